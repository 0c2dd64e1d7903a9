//! Millions of keys: every verdict is compared with what it must be, while loading, after
//! SIGKILL, and after the whole index was deleted.
//!
//! `cargo run --release --example scale -- [KEYS] [SEGMENT_BYTES]` (default: 1,000,000 keys,
//! 4-MiB segments). Thirty observations in a hundred repeat a key drawn evenly from all before;
//! afterwards as many absent keys are asked for as there are keys.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program for people: it prints, and ends with a message when something is false"
)]

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use idemlog::{DedupLog, Durability, Filter, NamespaceOptions, Options};

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let first = args.next();
    if first.as_deref() == Some("--load") {
        let keys = args.next().unwrap().parse().unwrap();
        let segment_bytes = args.next().unwrap().parse().unwrap();
        let store = std::env::var_os("SCALE_STORE").unwrap();
        load(Path::new(&store), keys, segment_bytes);
        return ExitCode::FAILURE;
    }
    let keys = first.map_or(1_000_000, |arg| arg.parse().unwrap());
    let segment_bytes = args.next().map_or(4 << 20, |arg| arg.parse().unwrap());
    let dir = tempfile::tempdir_in(".").unwrap();
    let path = dir.path().join("store");
    println!("{keys} keys of 16 bytes, segments of {segment_bytes} bytes, durability Buffered");
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--load", &keys.to_string(), &segment_bytes.to_string()])
        .env("SCALE_STORE", &path)
        .status()
        .unwrap();
    if status.success() || status.code().is_some() {
        println!("the loader ended before it was killed: {status}");
        return ExitCode::FAILURE;
    }
    let mut wrong = check("after SIGKILL", &path, keys, segment_bytes);
    for entry in std::fs::read_dir(&path).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("run-") || name.starts_with("hint-") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    wrong += check(
        "after all runs, filters and hints were deleted",
        &path,
        keys,
        segment_bytes,
    );
    println!("wrong verdicts: {wrong}");
    if wrong == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn open(path: &Path, segment_bytes: u32) -> (DedupLog, Filter) {
    let options = Options::new()
        .durability(Durability::Buffered)
        .segment_bytes(segment_bytes);
    let log = options.open(path).unwrap();
    let filter = log.filter("keys", NamespaceOptions::new()).unwrap();
    (log, filter)
}

/// Loads the keys and kills itself.
fn load(path: &Path, keys: u64, segment_bytes: u32) {
    let (log, filter) = open(path, segment_bytes);
    let (mut random, mut loaded, mut asked) = (7u64, 0, 0u64);
    let start = Instant::now();
    let mut memory_kib = 0;
    while loaded < keys {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let repeats = (random >> 33) % 10 < 3 && loaded > 0;
        let number = if repeats {
            (random >> 20) % loaded
        } else {
            loaded
        };
        let observed = filter.observe(key(number)).unwrap();
        assert_eq!(observed.is_new(), !repeats, "key {number}");
        loaded += u64::from(!repeats);
        asked += 1;
        if asked % 65_536 == 0 {
            memory_kib = anonymous_kib().max(memory_kib);
        }
    }
    let per_call = start.elapsed().as_secs_f64() * 1e6 / asked as f64;
    log.wait_idle().unwrap();
    log.sync().unwrap();
    memory_kib = anonymous_kib().max(memory_kib);
    let stats = log.stats();
    let filters_kib = stats.filter_bytes / 1024;
    println!("loaded: {asked} calls, {per_call:.2} us each; no verdict wrong");
    println!(
        "anonymous memory {memory_kib} KiB at most + filters {filters_kib} KiB; allowed {} KiB",
        keys * 12 / 10 / 1024 + 64 * 1024
    );
    println!(
        "segments {}, index runs {}, merges {}, disk {:.1} bytes a key",
        stats.segments_count,
        stats.runs_count,
        stats.merges_count,
        blocks_bytes(path) as f64 / keys as f64
    );
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .unwrap();
}

/// Bytes that the store's files take on the disk.
fn blocks_bytes(path: &Path) -> u64 {
    let entries = std::fs::read_dir(path).unwrap();
    entries
        .map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512)
        .sum()
}

/// Opens the store and asks for every key and for as many absent ones.
fn check(when: &str, path: &Path, keys: u64, segment_bytes: u32) -> u64 {
    let start = Instant::now();
    let (log, filter) = open(path, segment_bytes);
    let opened = start.elapsed();
    let start = Instant::now();
    let wrong = (0..keys)
        .map(|number| {
            let known = filter
                .check_many(&[key(number), key(number + (1 << 40))])
                .unwrap();
            let answers: Vec<bool> = known.into_iter().map(|answer| answer.unwrap()).collect();
            u64::from(answers != [true, false])
        })
        .sum();
    let per_call = start.elapsed().as_secs_f64() * 1e6 / (2 * keys) as f64;
    println!(
        "{when}: open {:.3} s, {per_call:.2} us a look-up, {wrong} wrong; {} runs rebuilt",
        opened.as_secs_f64(),
        log.open_report().rebuilt_runs_count
    );
    log.close().unwrap();
    wrong
}

/// Anonymous memory of this process, in KiB; 0 where the system does not tell.
fn anonymous_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0)
}

/// A key that looks random: each number has its own.
fn key(number: u64) -> [u8; 16] {
    let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mut key = [0; 16];
    let (low, high) = key.split_at_mut(8);
    low.copy_from_slice(&(mixed ^ mixed >> 32).to_le_bytes());
    high.copy_from_slice(&mixed.rotate_left(23).to_le_bytes());
    key
}
