//! How much cheaper is a key in a batch, by the size of the batch and by durability?
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a benchmark that fails panics, prints what it is about, and reads the clock"
)]

mod common;

use std::hint::black_box;

use criterion::BatchSize;
use idemlog::Durability;

fn main() {
    common::run(|criterion, dir| {
        for durability in [Durability::Buffered, Durability::Process, Durability::Power] {
            let log = common::open(&dir.join(format!("{durability:?}")), durability);
            let seen = common::filter(&log);
            let fresh = common::Fresh::new();
            for size in [1, 10, 100, 1000] {
                let mut group = common::group(criterion, &format!("batch, {durability:?}"), size);
                group.bench_function(size.to_string(), |bencher| {
                    let keys = || (0..size).map(|_| fresh.key()).collect::<Vec<_>>();
                    let observe = |keys: Vec<_>| black_box(seen.observe_many(&keys).unwrap());
                    bencher.iter_batched(keys, observe, BatchSize::SmallInput);
                });
            }
            log.close().unwrap();
        }
    });
}
