//! The canonical workload, two numbers: durable claim-to-commit cycles per second on this
//! machine, and the latency of a duplicate's look-up.
//!
//! `cargo bench --bench claim` prints both with the file system and the durability they hold for.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a benchmark that fails panics, prints what it is about, and reads the clock"
)]

mod common;

use std::hint::black_box;
use std::path::Path;

use criterion::Criterion;
use idemlog::{DedupLog, Durability, NamespaceOptions, Repeatable};

/// Keys in the store that duplicates are looked up in: most of them in sealed segments.
const KEYS_COUNT: u64 = 500_000;

fn main() {
    println!("durability: Power for commits, Buffered for the {KEYS_COUNT} keys looked up");
    common::run(|criterion, dir| {
        durable_commit(criterion, &dir.join("durable"));
        duplicate(criterion, &dir.join("buffered"));
    });
}

fn durable_commit(criterion: &mut Criterion, path: &Path) {
    let log = DedupLog::open(path).unwrap();
    let orders = log
        .namespace::<Repeatable>("orders", NamespaceOptions::new())
        .unwrap();
    let fresh = common::Fresh::new();
    common::group(criterion, "claim", 1).bench_function("claim and commit, durable", |bencher| {
        bencher.iter(|| {
            let verdict = orders.run_once(fresh.key(), |_| Ok(b"done".to_vec()));
            black_box(verdict.unwrap())
        });
    });
    log.close().unwrap();
}

fn duplicate(criterion: &mut Criterion, path: &Path) {
    let log = common::open(path, Durability::Buffered);
    let seen = common::filter(&log);
    common::fill(&log, &seen, KEYS_COUNT);
    let mut known = common::known(KEYS_COUNT);
    common::group(criterion, "observe", 1).bench_function("duplicate", |bencher| {
        bencher.iter(|| black_box(seen.observe(known()).unwrap()));
    });
    log.close().unwrap();
}
