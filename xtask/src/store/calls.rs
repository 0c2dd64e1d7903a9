//! Calls whose instructions are counted: each workload prepares a store and then hands what counts
//! to [`counted_calls`], which the counter knows by its name.
//!
//! No other thread works, time stands still, and the segments are sized so that none is sealed
//! among the calls, unless that is what is counted.

use std::hint::black_box;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use idemlog::testing::ManualClock;
use idemlog::{DedupLog, Durability, Filter, NamespaceOptions, Options, Repeatable, RunVerdict};

use crate::context::Fallible;

/// What the counter is told to look for.
pub(crate) const COUNTED: &str = "*counted_calls*";

/// Keys in the store beforehand: sealed segments, and an active one with room for as many as are
/// counted.
const KEYS_BEFORE: u64 = 65_000;
/// Keys of a workload whose calls are cheap.
const KEYS: u64 = 16_000;
/// Claims, of several records each.
const CLAIMS: u64 = 2_000;
const BATCH: u64 = 1000;
/// Records of another opener that are followed at once.
const FOLLOWED: usize = 100;
const SEGMENT_BYTES: u32 = 4 << 20;
/// Small enough for seals and merges among the keys of `load`.
const SEGMENT_BYTES_LOAD: u32 = 64 << 10;

/// A workload: what it does with a fresh store, and how many operations that are.
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    pub(crate) operations: u64,
    run: fn(&Path) -> Fallible<()>,
}

pub(crate) const WORKLOADS: [Workload; 10] = [
    Workload {
        name: "observe-new",
        operations: KEYS,
        run: observe_new,
    },
    Workload {
        name: "observe-duplicate-active",
        operations: KEYS,
        run: observe_duplicate_active,
    },
    Workload {
        name: "observe-duplicate-sealed",
        operations: KEYS,
        run: observe_duplicate_sealed,
    },
    Workload {
        name: "follow-other-process",
        operations: KEYS,
        run: follow,
    },
    Workload {
        name: "get-absent",
        operations: KEYS,
        run: get_absent,
    },
    Workload {
        name: "observe-many-new",
        operations: KEYS,
        run: observe_many_new,
    },
    Workload {
        name: "observe-many-duplicate-sealed",
        operations: KEYS,
        run: observe_many_duplicate_sealed,
    },
    Workload {
        name: "run-once",
        operations: CLAIMS,
        run: run_once,
    },
    Workload {
        name: "load-with-seals-and-merges",
        operations: KEYS_BEFORE,
        run: load,
    },
    Workload {
        name: "replay-at-open",
        operations: KEYS,
        run: replay,
    },
];

/// Runs a workload in an empty directory.
pub(crate) fn run(name: &str, dir: &Path) -> Fallible<()> {
    let workload = WORKLOADS.iter().find(|workload| workload.name == name);
    let workload = workload.ok_or_else(|| format!("no workload called {name}"))?;
    (workload.run)(&dir.join("store"))
}

#[inline(never)]
fn counted_calls(calls: &mut dyn FnMut() -> Fallible<()>) -> Fallible<()> {
    black_box(calls())
}

fn open(path: &Path, segment_bytes: u32) -> Fallible<(DedupLog, Filter)> {
    open_as(path, segment_bytes, false)
}

fn open_as(path: &Path, segment_bytes: u32, shared: bool) -> Fallible<(DedupLog, Filter)> {
    let clock = Arc::new(ManualClock::new(1_700_000_000_000));
    let options = Options::new()
        .background(false)
        .clock(clock)
        .durability(Durability::Buffered)
        .shared(shared)
        .segment_bytes(segment_bytes);
    let log = options.open(path)?;
    let filter = log.filter("f", NamespaceOptions::new())?;
    Ok((log, filter))
}

/// A store with keys, nothing left to do or to write.
fn open_filled(path: &Path) -> Fallible<(DedupLog, Filter)> {
    let (log, filter) = open(path, SEGMENT_BYTES)?;
    observe_batches(&filter, &keys(0..KEYS_BEFORE))?;
    log.maintain()?;
    log.sync()?;
    Ok((log, filter))
}

type Key = [u8; 16];

fn keys(numbers: Range<u64>) -> Vec<Key> {
    let key = |number: u64| {
        let mut key = [0; 16];
        let (low, high) = key.split_at_mut(8);
        low.copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        high.copy_from_slice(&number.to_le_bytes());
        key
    };
    numbers.map(key).collect()
}

const FRESH: Range<u64> = KEYS_BEFORE..KEYS_BEFORE + KEYS;

fn observe_batches(filter: &Filter, keys: &[Key]) -> Fallible<()> {
    for batch in keys.chunks(usize::try_from(BATCH)?) {
        black_box(filter.observe_many(batch)?);
    }
    Ok(())
}

fn observe_each(filter: &Filter, keys: &[Key]) -> Fallible<()> {
    for key in keys {
        let _told = black_box(filter.observe(key)?);
    }
    Ok(())
}

fn observe_new(path: &Path) -> Fallible<()> {
    let (_log, filter) = open_filled(path)?;
    let keys = keys(FRESH);
    counted_calls(&mut || observe_each(&filter, &keys))
}

fn observe_duplicate_active(path: &Path) -> Fallible<()> {
    let (log, filter) = open_filled(path)?;
    let keys = keys(FRESH);
    observe_batches(&filter, &keys)?;
    // From the file and not from the image of what is not written yet.
    log.sync()?;
    counted_calls(&mut || observe_each(&filter, &keys))
}

fn observe_duplicate_sealed(path: &Path) -> Fallible<()> {
    let (_log, filter) = open_filled(path)?;
    let keys = keys(0..KEYS);
    counted_calls(&mut || observe_each(&filter, &keys))
}

fn get_absent(path: &Path) -> Fallible<()> {
    let (_log, filter) = open_filled(path)?;
    let keys = keys(FRESH);
    counted_calls(&mut || {
        for key in &keys {
            black_box(filter.get(key)?);
        }
        Ok(())
    })
}

fn observe_many_new(path: &Path) -> Fallible<()> {
    let (_log, filter) = open_filled(path)?;
    let keys = keys(FRESH);
    counted_calls(&mut || observe_batches(&filter, &keys))
}

fn observe_many_duplicate_sealed(path: &Path) -> Fallible<()> {
    let (_log, filter) = open_filled(path)?;
    let keys = keys(0..KEYS);
    counted_calls(&mut || observe_batches(&filter, &keys))
}

/// What an opener of a shared store does with each record that another one has appended.
fn follow(path: &Path) -> Fallible<()> {
    let (log, filter) = open_as(path, SEGMENT_BYTES, true)?;
    observe_batches(&filter, &keys(0..KEYS_BEFORE))?;
    log.maintain()?;
    let (_other, told) = open_as(path, SEGMENT_BYTES, true)?;
    for some in keys(FRESH).chunks(FOLLOWED) {
        observe_batches(&filter, some)?;
        counted_calls(&mut || {
            black_box(told.get(b"absent")?);
            Ok(())
        })?;
    }
    Ok(())
}

/// Claim and commit, with an outcome of 64 bytes.
fn run_once(path: &Path) -> Fallible<()> {
    let (log, _filter) = open_filled(path)?;
    let options = NamespaceOptions::new().outcome_bytes_max(64);
    let jobs = log.namespace::<Repeatable>("jobs", options)?;
    let keys = keys(0..CLAIMS);
    counted_calls(&mut || {
        for key in &keys {
            let ran = jobs.run_once(key, |_| Ok(vec![7; 64]))?;
            if !matches!(ran, RunVerdict::Ran { .. }) {
                return Err("it has run before".into());
            }
        }
        Ok(())
    })
}

/// New keys in batches, with everything that they cost later: runs, filters, merges.
fn load(path: &Path) -> Fallible<()> {
    let (log, filter) = open(path, SEGMENT_BYTES_LOAD)?;
    let keys = keys(0..KEYS_BEFORE);
    counted_calls(&mut || {
        for some in keys.chunks(usize::try_from(BATCH)?) {
            observe_batches(&filter, some)?;
            log.maintain()?;
        }
        Ok(())
    })
}

/// The open after a kill: the records of the active segment are read again.
fn replay(path: &Path) -> Fallible<()> {
    let (log, filter) = open_filled(path)?;
    // Without a hint: the records of one segment, which is the active one.
    observe_batches(&filter, &keys(FRESH))?;
    log.sync()?;
    std::mem::forget((log, filter));
    let copy = path.with_extension("killed");
    std::fs::create_dir(&copy)?;
    for entry in std::fs::read_dir(path)? {
        let from = entry?.path();
        let name = from.file_name().unwrap_or_default().to_owned();
        if !name.to_string_lossy().starts_with("hint-") {
            std::fs::copy(&from, copy.join(name))?;
        }
    }
    counted_calls(&mut || {
        let (log, _filter) = open(&copy, SEGMENT_BYTES)?;
        let replayed = log.open_report().replayed_count;
        if replayed < KEYS {
            return Err(format!("only {replayed} records were replayed").into());
        }
        std::mem::forget(log);
        Ok(())
    })
}
