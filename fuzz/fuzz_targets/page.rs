//! Index runs with their filters.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| idemlog::testing::fuzz::page(data));
