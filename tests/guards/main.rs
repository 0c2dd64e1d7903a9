//! What an operation costs, in numbers that no noise can touch: allocations, bytes, flushes, and
//! records replayed. Each bound is a constant with its reason; a regression turns it red.
//!
//! A binary of its own, because its allocator counts.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    missing_docs,
    reason = "a test that fails panics, and documents itself by its name"
)]

mod allocations;
mod disk;
mod reopen;

use std::sync::Arc;

use idemlog::testing::ManualClock;
use idemlog::{DedupLog, Durability, Filter, NamespaceOptions, Options};

/// A record of a key of 16 bytes that is only observed: header and key.
const RECORD_BYTES: u64 = 32;

/// No thread but the caller's works, and time stands still: the same calls cost the same.
fn options(durability: Durability) -> Options {
    let clock = Arc::new(ManualClock::new(1_700_000_000_000));
    Options::new()
        .background(false)
        .clock(clock)
        .durability(durability)
}

fn filter(log: &DedupLog) -> Filter {
    log.filter("f", NamespaceOptions::new()).unwrap()
}

type Key = [u8; 16];

fn key(number: u64) -> Key {
    let mut key = [0; 16];
    let (low, high) = key.split_at_mut(8);
    low.copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    high.copy_from_slice(&number.to_le_bytes());
    key
}

fn keys(numbers: std::ops::Range<u64>) -> Vec<Key> {
    numbers.map(key).collect()
}

/// Observes keys that are new, in batches of 1000.
fn observe_new(filter: &Filter, numbers: std::ops::Range<u64>) {
    for batch in keys(numbers).chunks(1000) {
        let observed = filter.observe_many(batch).unwrap();
        assert!(observed.iter().all(|one| one.as_ref().unwrap().is_new()));
    }
}

fn to_usize(count: u64) -> usize {
    usize::try_from(count).unwrap()
}
