//! How many durable observations a second do 1, 16 and 64 threads make that share flushes?
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a benchmark that fails panics, prints what it is about, and reads the clock"
)]

mod common;

use std::time::{Duration, Instant};

use idemlog::{Durability, Filter};

fn main() {
    common::run(|criterion, dir| {
        let log = common::open(&dir.join("store"), Durability::Power);
        let seen = common::filter(&log);
        let fresh = common::Fresh::new();
        let mut group = common::group(criterion, "group commit, threads", 1);
        for threads in [1, 16, 64] {
            let flushes = log.stats().flushes_count;
            let mut calls = 0;
            group.bench_function(threads.to_string(), |bencher| {
                bencher.iter_custom(|iterations| {
                    let each = iterations.div_ceil(threads);
                    calls += each * threads;
                    let took = observe(&seen, &fresh, threads, each);
                    // More was done than was asked for, where it does not divide.
                    took.mul_f64(iterations as f64 / (each * threads) as f64)
                });
            });
            let flushes = log.stats().flushes_count - flushes;
            println!(
                "flushes an observation: {:.3}",
                flushes as f64 / calls as f64
            );
        }
    });
}

fn observe(seen: &Filter, fresh: &common::Fresh, threads: u64, each: u64) -> Duration {
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for _ in 0..each {
                    assert!(seen.observe(fresh.key()).unwrap().is_new());
                }
            });
        }
    });
    began.elapsed()
}
