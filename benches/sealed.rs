//! How do look-ups grow with the number of index runs, for keys that are there and for absent
//! ones?
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

fn main() {
    common::run(|criterion, dir| {
        for keys in [100_000, 1_000_000, 4_000_000] {
            let log = common::open(&dir.join(format!("{keys}")), Durability::Buffered);
            let seen = common::filter(&log);
            common::fill(&log, &seen, keys);
            let runs = log.stats().runs_count;
            let fresh = common::Fresh::new();
            let mut known = common::known(keys);
            let mut group = common::group(criterion, &format!("{keys} keys in {runs} runs"), 1);
            group.bench_function("duplicate", |bencher| {
                bencher.iter(|| black_box(seen.observe(known()).unwrap()));
            });
            group.bench_function("absent", |bencher| {
                bencher.iter(|| black_box(seen.get(fresh.key()).unwrap()));
            });
            drop(group);
            log.close().unwrap();
        }
    });
}
