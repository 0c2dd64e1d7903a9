//! The canonical workload, two numbers: durable claim-to-commit cycles per second on this
//! machine, and the latency of a duplicate's look-up.
//!
//! `cargo bench --bench claim` prints both with the file system and the durability they hold for.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    missing_docs,
    reason = "a benchmark that fails panics, and prints what it is about"
)]

use std::cell::Cell;
use std::hint::black_box;

use criterion::{Criterion, Throughput};
use idemlog::{DedupLog, Durability, NamespaceOptions, Options, Repeatable};

/// Keys in the store that duplicates are looked up in: half of them in sealed segments.
const KEYS_COUNT: u64 = 500_000;

fn main() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let file_system = file_system_of(dir.path());
    println!(
        "machine: {} cores; file system: {file_system}; durability: Power for commits, \
         Buffered for the {KEYS_COUNT} keys looked up",
        std::thread::available_parallelism().unwrap()
    );
    let mut criterion = Criterion::default().configure_from_args();
    durable_commit(&mut criterion, &dir.path().join("durable"));
    duplicate(&mut criterion, &dir.path().join("buffered"));
    criterion.final_summary();
}

fn durable_commit(criterion: &mut Criterion, path: &std::path::Path) {
    let log = DedupLog::open(path).unwrap();
    let orders = log
        .namespace::<Repeatable>("orders", NamespaceOptions::new())
        .unwrap();
    let next = Cell::new(0u64);
    let mut group = criterion.benchmark_group("claim");
    group.throughput(Throughput::Elements(1));
    group.bench_function("claim and commit, durable", |bencher| {
        bencher.iter(|| {
            let number = next.replace(next.get() + 1);
            let verdict = orders.run_once(key(number), |_| Ok(b"done".to_vec()));
            black_box(verdict.unwrap())
        });
    });
    group.finish();
    log.close().unwrap();
}

fn duplicate(criterion: &mut Criterion, path: &std::path::Path) {
    let options = Options::new()
        .durability(Durability::Buffered)
        .segment_bytes(4 << 20);
    let log = options.open(path).unwrap();
    let seen = log.filter("seen", NamespaceOptions::new()).unwrap();
    for number in 0..KEYS_COUNT {
        assert!(seen.observe(key(number)).unwrap().is_new());
    }
    log.wait_idle().unwrap();
    let next = Cell::new(0u64);
    let mut group = criterion.benchmark_group("observe");
    group.throughput(Throughput::Elements(1));
    group.bench_function("duplicate", |bencher| {
        bencher.iter(|| {
            let number = next.replace((next.get() + 7919) % KEYS_COUNT);
            black_box(seen.observe(key(number)).unwrap())
        });
    });
    group.finish();
    log.close().unwrap();
}

fn key(number: u64) -> [u8; 16] {
    let mut key = [0; 16];
    let (low, high) = key.split_at_mut(8);
    low.copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    high.copy_from_slice(&number.to_le_bytes());
    key
}

/// Finds the type of the file system a directory lies on; "unknown" where there is no mount table.
fn file_system_of(path: &std::path::Path) -> String {
    let path = path.canonicalize().unwrap();
    let table = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let mounts = table.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
    });
    mounts
        .filter(|(mount, _)| path.starts_with(mount))
        .max_by_key(|(mount, _)| mount.len())
        .map_or_else(|| "unknown".to_owned(), |(_, kind)| kind)
}
