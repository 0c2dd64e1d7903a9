//! What all benchmarks share: the machine's line, stores with keys, and keys.
#![allow(dead_code, reason = "no benchmark needs all of it")]

use std::path::Path;

use criterion::{BenchmarkGroup, Criterion, Throughput, measurement::WallTime};
use idemlog::{DedupLog, Durability, Filter, NamespaceOptions, Options};

use machine::Machine;

#[path = "../../src/bin/idemlog/bench/machine.rs"]
mod machine;

/// Runs a benchmark in a directory of its own, on the file system of the current one.
pub(crate) fn run(bench: impl FnOnce(&mut Criterion, &Path)) {
    let dir = tempfile::tempdir_in(".").unwrap();
    println!("{}", Machine::of(dir.path()).line());
    let mut criterion = Criterion::default().configure_from_args();
    bench(&mut criterion, dir.path());
    criterion.final_summary();
}

/// Opens a group whose figures are per so many keys.
pub(crate) fn group<'a>(
    criterion: &'a mut Criterion,
    name: &str,
    keys: u64,
) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Elements(keys));
    group
}

/// Opens a store whose full segments are small: a benchmark has sealed ones soon.
pub(crate) fn open(path: &Path, durability: Durability) -> DedupLog {
    let options = Options::new().durability(durability).segment_bytes(4 << 20);
    options.open(path).unwrap()
}

pub(crate) fn filter(log: &DedupLog) -> Filter {
    log.filter("seen", NamespaceOptions::new()).unwrap()
}

/// Observes keys `0..count` and waits until all work that follows from it is done.
pub(crate) fn fill(log: &DedupLog, filter: &Filter, count: u64) {
    for first in (0..count).step_by(1000) {
        let keys: Vec<_> = (first..count.min(first + 1000)).map(key).collect();
        assert_eq!(filter.observe_many(&keys).unwrap().len(), keys.len());
    }
    log.wait_idle().unwrap();
}

/// Numbers that no other call of the process has had: keys that are new.
#[derive(Default)]
pub(crate) struct Fresh(std::sync::atomic::AtomicU64);

impl Fresh {
    /// Begins behind the keys of [`fill`].
    pub(crate) fn new() -> Fresh {
        Fresh(std::sync::atomic::AtomicU64::new(1 << 40))
    }

    pub(crate) fn key(&self) -> [u8; 16] {
        // Relaxed: only that it is another number counts.
        key(self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }
}

/// Some of the keys `0..count`, in no order of theirs.
pub(crate) fn known(count: u64) -> impl FnMut() -> [u8; 16] {
    let mut next = 0;
    move || {
        next = (next + 7919) % count;
        key(next)
    }
}

/// A key of 16 bytes.
pub(crate) fn key(number: u64) -> [u8; 16] {
    let mut key = [0; 16];
    let (low, high) = key.split_at_mut(8);
    low.copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    high.copy_from_slice(&number.to_le_bytes());
    key
}
