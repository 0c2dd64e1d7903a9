//! What does one observation cost: of a new key, of a duplicate, of a key that is only looked up
//! and is absent? Buffered, and the work of seals and merges beside it.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a benchmark that fails panics, prints what it is about, and reads the clock"
)]

mod common;

use std::hint::black_box;

use idemlog::Durability;

const KEYS_COUNT: u64 = 500_000;

fn main() {
    common::run(|criterion, dir| {
        let log = common::open(&dir.join("store"), Durability::Buffered);
        let seen = common::filter(&log);
        common::fill(&log, &seen, KEYS_COUNT);
        let fresh = common::Fresh::new();
        let mut known = common::known(KEYS_COUNT);
        let mut group = common::group(criterion, "observe", 1);
        group.bench_function("duplicate", |bencher| {
            bencher.iter(|| black_box(seen.observe(known()).unwrap()));
        });
        group.bench_function("absent", |bencher| {
            bencher.iter(|| black_box(seen.get(fresh.key()).unwrap()));
        });
        // Last: it makes the store grow.
        group.bench_function("new", |bencher| {
            bencher.iter(|| black_box(seen.observe(fresh.key()).unwrap()));
        });
    });
}
