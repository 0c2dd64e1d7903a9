//! Allocations of a call: how many, never how large.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use idemlog::{
    ClaimOptions, ClaimVerdict, Commit, CommitVerdict, DedupLog, Durability, KeyState, Namespace,
    NamespaceOptions, Observed, Repeatable, RunVerdict,
};

use super::{Key, filter, key, keys, observe_new, options, to_usize};

thread_local! {
    /// What this thread has allocated: tests beside it do not count.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count_one() {
    COUNT.with(|count| count.set(count.get() + 1));
}

#[expect(unsafe_code, reason = "an allocator cannot be written without")]
// SAFETY: each call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: the caller upholds what `alloc` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: the caller upholds what `alloc_zeroed` asks for.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_one();
        // SAFETY: the block came from `System`, with this layout.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the block came from `System`, with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Allocations per 100 keys.
mod per_100 {
    /// The key is copied into the log image, and its slot into a table that is there.
    pub(super) const OBSERVE_NEW: u64 = 0;
    /// Where in the active segment's file the key may stand, if its record is not in memory.
    pub(super) const OBSERVE_DUPLICATE_ACTIVE: u64 = 65;
    pub(super) const OBSERVE_DUPLICATE_SEALED: u64 = 0;
    /// A filter says no before there is a place.
    pub(super) const GET_ABSENT: u64 = 0;
    /// Only the lists of a call: answers, look-ups, and how they grow. None for a key.
    pub(super) const OBSERVE_100: u64 = 8;
    pub(super) const OBSERVE_1000: u64 = 2;
    /// What the guard owns (its key), what it has been granted, the unsettled entry and the key
    /// of the commit.
    pub(super) const CLAIM_AND_COMMIT: u64 = 402;
    /// The outcome is handed out.
    pub(super) const CLAIM_DUPLICATE: u64 = 300;
    /// The attempt's name and key, and the outcome twice.
    pub(super) const RUN_ONCE: u64 = 801;
    /// The key of each guard; the rest are lists of the call and the table of what is unsettled.
    pub(super) const CLAIM_MANY: u64 = 136;
    /// The key and what the commit says, of each.
    pub(super) const COMMIT_MANY: u64 = 209;
    /// A flush has its mark encoded, and its waiter is told.
    pub(super) const FLUSH: u64 = 100;
}

/// What a measurement may allocate once: a table or an image that grows.
const ONCE_MAX: u64 = 10;

/// Fails if the work allocates more than so many times for 100 keys.
#[track_caller]
fn check(what: &str, keys: u64, per_100_max: u64, work: impl FnOnce()) {
    let before = COUNT.get();
    work();
    let count = COUNT.get() - before;
    let bound = keys * per_100_max / 100 + ONCE_MAX;
    println!("allocations, {what}, {keys} keys: measured={count} bound={bound}");
    assert!(
        count <= bound,
        "{what}, {keys} keys: measured={count} bound={bound}; is there one more for each key?"
    );
}

fn open(dir: &tempfile::TempDir, durability: Durability) -> DedupLog {
    let options = options(durability).segment_bytes(4 << 20);
    options.open(dir.path().join("store")).unwrap()
}

/// Keys ahead of each measurement: sealed segments, and an active one that is not over soon.
const KEYS_BEFORE: u64 = 200_000;
/// Keys of one measurement of single calls.
const KEYS: u64 = 10_000;

#[test]
fn observing_a_key() {
    for durability in [Durability::Buffered, Durability::Process] {
        let dir = tempfile::tempdir().unwrap();
        let log = open(&dir, durability);
        let filter = filter(&log);
        observe_new(&filter, 0..KEYS_BEFORE);
        log.maintain().unwrap();
        let observe_all = |keys: &[Key], expected: Observed| {
            for key in keys {
                assert_eq!(filter.observe(key).unwrap(), expected);
            }
        };
        let (fresh, sealed) = (keys(KEYS_BEFORE..KEYS_BEFORE + KEYS), keys(0..KEYS));
        check("observe, new", KEYS, per_100::OBSERVE_NEW, || {
            observe_all(&fresh, Observed::New);
        });
        let (in_active, in_sealed) = (
            per_100::OBSERVE_DUPLICATE_ACTIVE,
            per_100::OBSERVE_DUPLICATE_SEALED,
        );
        for (what, keys, most) in [
            ("active", &fresh, in_active),
            ("sealed", &sealed, in_sealed),
        ] {
            let what = format!("observe, duplicate, {what}");
            check(&what, KEYS, most, || {
                observe_all(keys, Observed::Duplicate);
            });
        }
        check("get, absent", KEYS, per_100::GET_ABSENT, || {
            for n in 0..KEYS {
                assert_eq!(filter.get(key(n + (1 << 40))).unwrap(), KeyState::Absent);
            }
        });
    }
}

#[test]
fn observing_many_keys() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(&dir, Durability::Buffered);
    let filter = filter(&log);
    observe_new(&filter, 0..KEYS_BEFORE);
    log.maintain().unwrap();
    let mut first = KEYS_BEFORE;
    for (size, lists) in [(100, per_100::OBSERVE_100), (1000, per_100::OBSERVE_1000)] {
        let count = 20 * size;
        let observe_all = |keys: &[Key]| {
            for batch in keys.chunks(to_usize(size)) {
                assert_eq!(filter.observe_many(batch).unwrap().len(), batch.len());
            }
        };
        let fresh = keys(first..first + count);
        first += count;
        check(
            &format!("observe_many of {size}, new"),
            count,
            lists,
            || {
                observe_all(&fresh);
            },
        );
        let in_active = lists + per_100::OBSERVE_DUPLICATE_ACTIVE;
        for (what, keys, most) in [
            ("active", fresh, in_active),
            ("sealed", keys(0..count), lists),
        ] {
            let what = format!("observe_many of {size}, duplicates, {what}");
            check(&what, count, most, || observe_all(&keys));
        }
    }
}

fn jobs(log: &DedupLog) -> Namespace<Repeatable> {
    let options = NamespaceOptions::new().outcome_bytes_max(64);
    log.namespace("jobs", options).unwrap()
}

#[test]
fn a_claim_and_its_commit() {
    for (durability, count) in [(Durability::Buffered, KEYS), (Durability::Power, 200)] {
        let dir = tempfile::tempdir().unwrap();
        let log = open(&dir, durability);
        let jobs = jobs(&log);
        let claim_all = |numbers: std::ops::Range<u64>| {
            for n in numbers {
                let mut claim = jobs.claim(key(n)).unwrap().claim().unwrap();
                let told = claim.commit(b"done").unwrap();
                assert!(matches!(told, CommitVerdict::Committed { .. }));
            }
        };
        let flush = if durability == Durability::Power {
            per_100::FLUSH
        } else {
            0
        };
        claim_all(0..count);
        check(
            "claim and commit",
            count,
            per_100::CLAIM_AND_COMMIT + flush,
            || {
                claim_all(count..2 * count);
            },
        );
        check("claim, duplicate", count, per_100::CLAIM_DUPLICATE, || {
            for n in 0..count {
                let told = jobs.claim(key(n)).unwrap();
                assert!(matches!(told, ClaimVerdict::Duplicate(_)));
            }
        });
        check("run_once", count, per_100::RUN_ONCE + flush, || {
            for n in 2 * count..3 * count {
                let ran = jobs.run_once(key(n), |_| Ok(b"done".to_vec())).unwrap();
                assert!(matches!(ran, RunVerdict::Ran { .. }));
            }
        });
    }
}

#[test]
fn claims_and_commits_of_many() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(&dir, Durability::Buffered);
    let jobs = jobs(&log);
    let claim = |keys: &[Key]| {
        let claims = jobs.claim_many(keys, &ClaimOptions::new()).unwrap();
        let claims = claims.into_iter().map(|one| one.unwrap().claim().unwrap());
        let held = claims.map(|claim| (claim, Commit::without_outcome()));
        held.collect::<Vec<_>>()
    };
    drop(claim(&keys(0..10_000)));
    let mut first = 10_000;
    for size in [100, 1000] {
        let mut batches = Vec::new();
        for _ in 0..10 {
            batches.push(keys(first..first + size));
            first += size;
        }
        let mut held = Vec::with_capacity(batches.len());
        let what = format!("claim_many of {size}");
        check(&what, 10 * size, per_100::CLAIM_MANY, || {
            held.extend(batches.iter().map(|keys| claim(keys)));
        });
        let what = format!("commit_many of {size}");
        check(&what, 10 * size, per_100::COMMIT_MANY, || {
            for held in &mut held {
                assert_eq!(jobs.commit_many(held).unwrap().len(), held.len());
            }
        });
    }
}
