//! Repairing any directory.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| idemlog::testing::fuzz::repair(data));
