//! Calls, crashes and clock steps against a model.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| idemlog::testing::fuzz::ops(data));
