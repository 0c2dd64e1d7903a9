//! How long does an open take, by the number of keys, after a clean close and after a kill?
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a benchmark that fails panics, prints what it is about, and reads the clock"
)]

mod common;

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};

use criterion::BatchSize;
use idemlog::Durability;

fn main() {
    common::run(|criterion, dir| {
        for keys in [10_000, 100_000, 1_000_000] {
            let path = dir.join(format!("{keys}"));
            let log = common::open(&path, Durability::Buffered);
            common::fill(&log, &common::filter(&log), keys);
            log.sync().unwrap();
            // The files as a kill at this moment leaves them.
            let killed = copy(&path, &dir.join(format!("{keys}-killed")));
            log.close().unwrap();
            let mut group = criterion.benchmark_group("reopen");
            group.sample_size(10);
            for (how, from) in [("closed", &path), ("killed", &killed)] {
                let mut number = 0;
                group.bench_function(format!("{keys} keys, {how}"), |bencher| {
                    let fresh_copy = || {
                        number += 1;
                        copy(from, &dir.join(format!("{keys}-{how}-{number}")))
                    };
                    // The log is handed back: its close is not measured.
                    let open = |path: PathBuf| black_box(common::open(&path, Durability::Buffered));
                    bencher.iter_batched(fresh_copy, open, BatchSize::PerIteration);
                });
            }
        }
    });
}

fn copy(from: &Path, to: &Path) -> PathBuf {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
    to.to_owned()
}
