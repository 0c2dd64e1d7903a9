//! Forty faults that other stores had in the field. A test's name begins with the number of its
//! case, wherever it stands, and tests the kind of fault and not one instance of it.
//!
//! Two opposite failures are judged everywhere: a key that must be remembered and is new again,
//! and a key that was never recorded and is answered as a duplicate.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::SimDisk;
use idemlog::{
    Claim, ClaimVerdict, DedupLog, EffectClass, Filter, KeyState, NamespaceOptions, Options,
    Retention, ZeroFill,
};

mod bounds;
mod claims;
mod disk;
mod index;
#[cfg(target_os = "linux")]
mod limits;
mod log;
mod manifest;
#[cfg(target_os = "linux")]
mod process;
mod space;
mod time;

/// The numbers of all cases. They carry no order, and gaps mean nothing.
const CASES: [u8; 40] = [
    1, 2, 5, 6, 7, 8, 9, 10, 11, 15, 17, 19, 21, 22, 24, 25, 27, 28, 29, 30, 33, 34, 35, 38, 39,
    43, 44, 45, 46, 51, 53, 57, 58, 60, 61, 62, 63, 64, 65, 66,
];

const START_MS: u64 = 1_700_000_000_000;

/// Reads the numbers that the names of tests begin with, in this file and all others.
fn numbers_of_tests(folder: &Path, found: &mut BTreeSet<u8>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            numbers_of_tests(&path, found);
            continue;
        }
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for after in text.split("#[test]\n").skip(1) {
            // Attributes may stand between; the first function that follows is the test.
            let name = after.split("fn ").nth(1).unwrap_or_default();
            if let Some(rest) = name.strip_prefix('c')
                && rest.as_bytes().get(2) == Some(&b'_')
                && let Ok(number) = rest[..2].parse()
            {
                found.insert(number);
            }
        }
    }
}

/// A case whose last test is deleted or renamed turns this red, and so does an unknown number.
#[test]
fn every_case_has_a_test_and_no_other_number_is_used() {
    let mut found = BTreeSet::new();
    for folder in ["tests", "src"] {
        numbers_of_tests(
            &Path::new(env!("CARGO_MANIFEST_DIR")).join(folder),
            &mut found,
        );
    }
    assert_eq!(found, BTreeSet::from(CASES));
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(START_MS))
}

/// Small segments, a clock that stands still, and background work in calls only.
fn options(clock: &Arc<ManualClock>) -> Options {
    Options::new()
        .background(false)
        .zero_fill(ZeroFill::Never)
        .segment_bytes(4096)
        .clock(Arc::clone(clock) as _)
}

/// The smallest segments have no room for outcomes.
fn small() -> NamespaceOptions {
    NamespaceOptions::new()
        .outcome_bytes_max(0)
        .retention(Retention::Forever)
}

fn filter(log: &DedupLog) -> Filter {
    log.filter("f", small()).unwrap()
}

/// Long keys: few of them fill a segment.
fn long(name: &str, number: usize) -> String {
    format!("{name}-{number:0150}")
}

fn new<C: EffectClass>(verdict: ClaimVerdict<C>) -> Claim<C> {
    match verdict {
        ClaimVerdict::New(claim) => claim,
        other => panic!("{other:?}"),
    }
}

/// What a filter must answer: `true` is remembered, `false` is not.
type Twin = BTreeMap<String, bool>;

fn compare(filter: &Filter, twin: &Twin, what: &str) {
    for (key, seen) in twin {
        let expected = if *seen {
            KeyState::Seen
        } else {
            KeyState::Absent
        };
        assert_eq!(filter.get(key).unwrap(), expected, "{what}: {key}");
    }
}

/// What follows every case: two opens that agree with the twin, and the product's own check of
/// the closed store.
fn aftermath(disk: &SimDisk, open: &dyn Fn(&SimDisk) -> DedupLog, twin: &Twin, what: &str) {
    for _ in 0..2 {
        let log = open(disk);
        compare(&filter(&log), twin, what);
        log.close().unwrap();
    }
    let report = verified(disk);
    assert!(report.is_ok(), "{what}: {:?}", report.problems);
    assert_eq!(report.orphans, [] as [String; 0], "{what}");
}

/// Puts the files of a simulated disk into a real directory, and verifies them there.
fn verified(disk: &SimDisk) -> idemlog::VerifyReport {
    let dir = tempfile::tempdir().unwrap();
    for name in disk.file_names() {
        std::fs::write(dir.path().join(&name), disk.read_file(&name).unwrap()).unwrap();
    }
    idemlog::verify(dir.path()).unwrap()
}

fn image(disk: &SimDisk) -> BTreeMap<String, Vec<u8>> {
    let names = disk.file_names().into_iter();
    // With background threads a file may be gone again.
    names
        .filter_map(|name| disk.read_file(&name).map(|content| (name, content)))
        .collect()
}

fn bytes_of_files(disk: &SimDisk) -> usize {
    image(disk).values().map(Vec::len).sum()
}

fn is_index(name: &str) -> bool {
    name.starts_with("run-") || name.starts_with("hint-")
}

fn remove_index(disk: &SimDisk) -> usize {
    let names = disk.file_names();
    let names = names.iter().filter(|name| is_index(name));
    names.filter(|name| disk.remove_file(name)).count()
}

/// The files of log segments, oldest first.
fn segments(disk: &SimDisk) -> Vec<String> {
    let names = disk.file_names().into_iter();
    names.filter(|name| name.starts_with("seg-")).collect()
}
