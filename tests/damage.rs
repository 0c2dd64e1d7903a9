//! Every byte of a small store changed, zeroed, cut: either the right answers, or a typed error
//! that names the file. Never a panic, never a forgotten key, never a wrong outcome.
//!
//! `IDEMLOG_BITS=all` changes every bit of every file, and repairs each such store, too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{Rng, SimDisk};
use idemlog::{
    Change, Commit, DedupLog, ErrorKind, Failure, Filter, KeyState, Namespace, NamespaceKind,
    NamespaceOptions, NonRepeatable, OpenMode, Options, Repair, Repeatable, Retention, ZeroFill,
};

use crate::golden::bytes;

const START_MS: u64 = 1_700_000_000_000;
const SECTOR_BYTES: usize = 512;
/// Keys observed by one acknowledged call.
const BATCH: usize = 4;

fn options() -> Options {
    Options::new()
        .segment_bytes(4096)
        .background(false)
        .zero_fill(ZeroFill::Never)
        .clock(Arc::new(ManualClock::new(START_MS)))
}

/// 4-KiB segments have room for claims without kept outcomes only.
fn small() -> NamespaceOptions {
    NamespaceOptions::new()
        .outcome_bytes_max(0)
        .retention(Retention::Forever)
}

/// A closed store, and what it must answer.
#[derive(Clone)]
struct Reference {
    disk: SimDisk,
    /// Answers of the filter `seen`.
    seen: BTreeMap<Vec<u8>, KeyState>,
    /// Answers of the namespace `jobs`.
    jobs: BTreeMap<Vec<u8>, KeyState>,
    /// Keys of the last acknowledged batch: nothing in the log proves that they were durable.
    last: BTreeSet<Vec<u8>>,
}

/// Long keys: few of them fill a segment.
fn key(number: usize) -> Vec<u8> {
    format!("key-{number:0192}").into_bytes()
}

impl Reference {
    /// Makes a store of some sealed segments and an active one, with every kind of record.
    fn make(batches: usize) -> Reference {
        let disk = SimDisk::memory();
        let log = options().open_on(disk.dir()).unwrap();
        let seen = log.filter("seen", small()).unwrap();
        let jobs = log
            .namespace::<Repeatable>("jobs", small().attempts_max(3))
            .unwrap();
        let pays = log.namespace::<NonRepeatable>("pays", small()).unwrap();
        make_jobs(&jobs, &pays);
        let mut number = 0;
        let mut last = BTreeSet::new();
        for _ in 0..batches {
            let keys: Vec<_> = (number..number + BATCH).map(key).collect();
            number += BATCH;
            for observed in seen.observe_many(&keys).unwrap() {
                assert!(observed.unwrap().is_new());
            }
            last = keys.into_iter().collect();
        }
        assert!(seen.forget(key(3)).unwrap().is_applied());
        let keys: Vec<_> = (number..number + BATCH).map(key).collect();
        number += BATCH;
        for observed in seen.observe_many(&keys).unwrap() {
            assert!(observed.unwrap().is_new());
        }
        last.clear();
        last.extend(keys);
        log.maintain().unwrap();
        let mut reference = Reference {
            disk,
            seen: BTreeMap::new(),
            jobs: BTreeMap::new(),
            last,
        };
        for n in 0..number + 4 {
            let state = if n == 3 || n >= number {
                KeyState::Absent
            } else {
                KeyState::Seen
            };
            reference.seen.insert(key(n), state);
        }
        for name in JOBS {
            reference.jobs.insert(name.into(), jobs.get(name).unwrap());
        }
        reference.check_kinds();
        // A kill, as far as the disk can tell; `closed` makes a clean end of it.
        let disk = reference.disk.after_kill();
        drop((seen, jobs, pays));
        drop(log);
        reference.disk = disk;
        reference
    }

    /// Opens and closes: the manifest then says where the log ends.
    fn closed(mut self) -> Reference {
        options().open_on(self.disk.dir()).unwrap().close().unwrap();
        self.disk = self.disk.after_kill();
        self.last.clear();
        self
    }

    fn check_kinds(&self) {
        let states: BTreeSet<_> = self.jobs.values().map(KeyState::name).collect();
        assert_eq!(
            states,
            ["absent", "dead", "done", "failed", "pending", "rejected"].into()
        );
    }

    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        image(&self.disk)
    }

    /// Returns a copy of the disk with one file in place of another.
    fn with(&self, name: &str, bytes: impl Into<Vec<u8>>) -> SimDisk {
        let disk = self.disk.after_kill();
        disk.write_file(name, bytes);
        disk
    }

    /// Opens a damaged copy and asks for every key.
    fn judge(&self, disk: &SimDisk, what: &dyn Fn() -> String) -> Judgement {
        let _announce = Announce(what);
        let before = image(disk);
        let log = match options().open_on(disk.dir()) {
            Ok(log) => log,
            Err(error) => {
                let typed = [ErrorKind::Damaged, ErrorKind::Incompatible];
                assert!(typed.contains(&error.kind()), "{error:?}");
                assert!(error.file().is_some(), "names no file: {error:?}");
                assert_eq!(
                    changed_files(&before, &image(disk)),
                    [] as [String; 0],
                    "{error}"
                );
                return Judgement::Refused(error.kind());
            }
        };
        assert!(
            !log.open_report().created,
            "a fresh store took the place of a damaged one"
        );
        let mut judgement = Judgement::Right { errors: 0, lost: 0 };
        let seen = log.filter("seen", small()).unwrap();
        let jobs = log.namespace::<Repeatable>("jobs", small()).unwrap();
        for (key, state) in &self.seen {
            self.compare(&mut judgement, key, seen.get(key), state);
        }
        for (key, state) in &self.jobs {
            self.compare(
                &mut judgement,
                key,
                jobs.get(key),
                &without_time(state.clone()),
            );
        }
        judgement
    }

    /// Opens a damaged copy to salvage, and repairs it: nothing that was lost is lost in silence.
    fn judge_what_is_left(&self, disk: &SimDisk, what: &dyn Fn() -> String) {
        let _announce = Announce(what);
        let before = image(disk);
        let salvaged = options().open_mode(OpenMode::Salvage).open_on(disk.dir());
        let is_damaged = salvaged
            .as_ref()
            .map_or(true, |log| !log.open_report().lost.is_empty());
        if let Ok(log) = &salvaged {
            let lost = self.count_forgotten(log, is_damaged);
            assert_eq!(
                lost, 0,
                "a salvaged store forgets nothing: it says that it cannot know"
            );
        }
        drop(salvaged);
        if is_damaged {
            assert_eq!(changed_files(&before, &image(disk)), [] as [String; 0]);
        }
        let target = SimDisk::memory();
        let repair = Repair::of("simulated")
            .clock(Arc::new(ManualClock::new(START_MS)))
            .namespace(1, "seen", NamespaceKind::Filter)
            .namespace(2, "jobs", NamespaceKind::Repeatable)
            .namespace(3, "pays", NamespaceKind::NonRepeatable);
        let report = match repair.write_on(disk.dir().as_ref(), target.dir()) {
            Ok(report) => report,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Incompatible, "{error}");
                return;
            }
        };
        let log = options().open_on(target.dir()).unwrap();
        let lost = self.count_forgotten(&log, false);
        assert!(
            lost == 0 || !report.is_whole(),
            "{lost} keys are lost in silence"
        );
        assert!(lost <= BATCH + 2, "one bit cost {lost} keys");
    }

    /// Counts the keys that are forgotten; what was never asked must not be known.
    fn count_forgotten(&self, log: &DedupLog, may_fail: bool) -> usize {
        let seen = log.filter("seen", small()).unwrap();
        let mut lost = 0;
        for (n, key) in self.seen.keys().enumerate() {
            match (seen.get(key), &self.seen[key]) {
                (Ok(KeyState::Absent), KeyState::Seen) => lost += 1,
                // A key that was forgotten, which may be lost; the others were never seen.
                (Ok(KeyState::Seen), KeyState::Absent) => assert_eq!(n, 3),
                (Ok(_), _) => {}
                (Err(error), _) => {
                    assert!(may_fail || error.kind() == ErrorKind::Damaged, "{error}");
                }
            }
        }
        lost
    }

    fn compare(
        &self,
        judgement: &mut Judgement,
        key: &[u8],
        found: idemlog::Result<KeyState>,
        expected: &KeyState,
    ) {
        let Judgement::Right { errors, lost } = judgement else {
            unreachable!()
        };
        match found.map(without_time) {
            Ok(found) if found == *expected => {}
            Ok(KeyState::Absent) if self.last.contains(key) => *lost += 1,
            Ok(found) => panic!("{}: {found:?} is not {expected:?}", key.escape_ascii()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
                *errors += 1;
            }
        }
    }
}

/// What a damaged store did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Judgement {
    Refused(ErrorKind),
    /// All answers were right, but for so many errors, and keys lost with an unproven tail.
    Right {
        errors: usize,
        lost: usize,
    },
}

const JOBS: [&str; 6] = ["done", "failed", "rejected", "dead", "held", "nobody"];

/// One key of each state, of both classes.
fn make_jobs(jobs: &Namespace<Repeatable>, pays: &Namespace<NonRepeatable>) {
    let claim = |key: &str| jobs.claim(key).unwrap().claim().unwrap();
    let mut done = claim("done");
    let _committed = done.commit_with(Commit::without_outcome()).unwrap();
    let failed = Failure::retryable(std::time::Duration::from_secs(60), "later");
    let _failed = claim("failed").fail(failed).unwrap();
    let _rejected = claim("rejected").fail(Failure::permanent("never")).unwrap();
    for _ in 0..3 {
        let again = Failure::retryable(std::time::Duration::ZERO, "again");
        let _failed = claim("dead").fail(again).unwrap();
    }
    let options = idemlog::ClaimOptions::new().detached(true);
    let _ticket = jobs
        .claim_with("held", &options)
        .unwrap()
        .claim()
        .unwrap()
        .detach();
    let started = pays
        .claim("doubt")
        .unwrap()
        .claim()
        .unwrap()
        .start(b"evidence")
        .unwrap();
    assert!(matches!(
        started.fail(Failure::unknown("timeout")).unwrap(),
        Change::Applied(KeyState::InDoubt(_))
    ));
}

/// What is left of a lease or a pause depends on the moment of asking.
fn without_time(mut state: KeyState) -> KeyState {
    if let KeyState::Pending { lease_left, .. } = &mut state {
        *lease_left = std::time::Duration::ZERO;
    }
    if let KeyState::Failed { retry_after, .. } = &mut state {
        *retry_after = std::time::Duration::ZERO;
    }
    state
}

/// Names and contents of all files but the lock, whose note says who tried last, and the ballast,
/// whose bytes mean nothing.
fn image(disk: &SimDisk) -> BTreeMap<String, Vec<u8>> {
    let names = disk
        .file_names()
        .into_iter()
        .filter(|name| name != "LOCK" && name != "RESERVE");
    names
        .map(|name| (name.clone(), disk.read_file(&name).unwrap()))
        .collect()
}

fn changed_files(
    before: &BTreeMap<String, Vec<u8>>,
    after: &BTreeMap<String, Vec<u8>>,
) -> Vec<String> {
    let names: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    names
        .into_iter()
        .filter(|name| before.get(*name) != after.get(*name))
        .cloned()
        .collect()
}

/// Says which damage a failing check was looking at.
struct Announce<'a>(&'a dyn Fn() -> String);

impl Drop for Announce<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("damage: {}", (self.0)());
        }
    }
}

/// Counts what a sweep of damages did.
#[derive(Debug, Default)]
struct Totals {
    refused: usize,
    right: usize,
    with_errors: usize,
    with_lost: usize,
}

impl Totals {
    fn add(&mut self, judgement: Judgement) {
        match judgement {
            Judgement::Refused(_) => self.refused += 1,
            Judgement::Right { errors, lost } => {
                self.right += 1;
                self.with_errors += usize::from(errors > 0);
                self.with_lost += usize::from(lost > 0);
            }
        }
    }
}

fn is_index(name: &str) -> bool {
    name.starts_with("run-")
}

#[test]
fn the_reference_store_answers_right_and_has_every_kind_of_file() {
    for reference in [Reference::make(22), Reference::make(22).closed()] {
        let files = reference.files();
        let count = |ending: &str| files.keys().filter(|name| name.ends_with(ending)).count();
        assert!(count(".log") >= 4, "{:?}", files.keys());
        assert!(count(".idx") >= 2);
        let merged = files
            .keys()
            .any(|name| name.starts_with("run-000000000001-000000000004"));
        assert!(merged, "{:?}", files.keys());
        assert_eq!(count(".idx"), count(".flt"));
        assert!(files.contains_key("MANIFEST"));
        let judged = reference.judge(&reference.disk.after_kill(), &|| "none".into());
        assert_eq!(judged, Judgement::Right { errors: 0, lost: 0 });
    }
}

#[test]
fn every_changed_byte_is_refused_or_harmless() {
    let reference = Reference::make(22).closed();
    let mut totals = Totals::default();
    for (name, bytes) in reference.files() {
        // Most of a run's pages is zeros under one checksum: a sample of them will do.
        let step = if name.ends_with(".idx") { 7 } else { 1 };
        for at in (0..bytes.len()).step_by(step) {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << (at % 8);
            let disk = reference.with(&name, bad);
            totals.add(reference.judge(&disk, &|| format!("{name} byte {at}")));
        }
    }
    assert!(totals.refused > 0 && totals.with_errors > 0, "{totals:?}");
}

#[test]
fn every_changed_bit_of_manifest_filters_and_headers_is_refused_or_harmless() {
    let reference = Reference::make(22).closed();
    let all = std::env::var("IDEMLOG_BITS").is_ok_and(|bits| bits == "all");
    let mut bits_count = 0;
    for (name, bytes) in reference.files() {
        let end = if all || name == "MANIFEST" || name.ends_with(".flt") {
            bytes.len()
        } else {
            100
        };
        bits_count += end.min(bytes.len()) * 8;
        for bit in 0..end.min(bytes.len()) * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let disk = reference.with(&name, bad);
            let judged = reference.judge(&disk, &|| format!("{name} bit {bit}"));
            // The pages of a run are summed each on its own: an error until it is built again.
            let is_page = name.ends_with(".idx") && bit / 8 >= 4096;
            if is_index(&name) {
                let is_right = match judged {
                    Judgement::Right { errors, lost } => lost == 0 && (is_page || errors == 0),
                    Judgement::Refused(_) => false,
                };
                assert!(is_right, "{name} bit {bit} {judged:?}");
            }
            // A bit in 101: the same damage, salvaged and repaired.
            if all || bit % 101 == 0 {
                reference.judge_what_is_left(&disk, &|| format!("{name} bit {bit}"));
            }
        }
    }
    println!("counts: bits={bits_count}");
}

#[test]
fn a_changed_byte_of_a_killed_store_costs_no_more_than_the_unproven_tail() {
    let reference = Reference::make(22);
    let mut totals = Totals::default();
    for (name, bytes) in reference
        .files()
        .into_iter()
        .filter(|(name, _)| !is_index(name))
    {
        for at in (0..bytes.len()).step_by(3) {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << (at % 8);
            let disk = reference.with(&name, bad);
            totals.add(reference.judge(&disk, &|| format!("{name} byte {at}")));
        }
    }
    assert!(totals.with_lost > 0, "{totals:?}");
}

#[test]
fn every_sector_zeroed_changed_or_exchanged_is_refused_or_harmless() {
    for reference in [Reference::make(22).closed(), Reference::make(22)] {
        let older = Reference::make(19);
        let mut rng = Rng::new(7);
        let files = reference.files();
        for (name, bytes) in &files {
            for start in (0..bytes.len()).step_by(SECTOR_BYTES) {
                let end = bytes.len().min(start + SECTOR_BYTES);
                let sources = [
                    ("zeros", vec![0; end - start]),
                    (
                        "garbage",
                        (start..end)
                            .map(|_| rng.next_u64().to_le_bytes()[0])
                            .collect(),
                    ),
                    ("ones", vec![0xff; end - start]),
                    ("its neighbour", sector_of(bytes, end)),
                    ("a sibling", sibling_sector(&files, name, start)),
                    ("an older time", sector_of(&older.file(name), start)),
                ];
                for (what, source) in sources {
                    let mut bad = bytes.clone();
                    let len = source.len().min(end - start);
                    bad[start..start + len].copy_from_slice(&source[..len]);
                    let disk = reference.with(name, bad);
                    reference.judge(&disk, &|| format!("{name} sector at {start}: {what}"));
                }
            }
        }
    }
}

impl Reference {
    fn file(&self, name: &str) -> Vec<u8> {
        self.disk.read_file(name).unwrap_or_default()
    }
}

fn sector_of(bytes: &[u8], start: usize) -> Vec<u8> {
    let end = bytes.len().min(start + SECTOR_BYTES);
    bytes.get(start..end).unwrap_or_default().to_vec()
}

/// The same sector of another file of the same kind.
fn sibling_sector(files: &BTreeMap<String, Vec<u8>>, name: &str, start: usize) -> Vec<u8> {
    let ending = name.rsplit('.').next().unwrap();
    let sibling = files
        .iter()
        .find(|(other, _)| *other != name && other.ends_with(ending));
    sibling
        .map(|(_, bytes)| sector_of(bytes, start))
        .unwrap_or_default()
}

#[test]
fn every_cut_and_every_extension_is_refused_or_harmless() {
    let reference = Reference::make(22).closed();
    for (name, bytes) in reference.files() {
        let step = match bytes.len() {
            0..2048 => 1,
            _ => 61,
        };
        let borders = [63, 64, 65, 4095, 4096, 4097].into_iter();
        let cuts = (0..bytes.len())
            .step_by(step)
            .chain(borders)
            .chain([bytes.len() - 1]);
        for len in cuts.filter(|len| *len < bytes.len()) {
            let disk = reference.with(&name, &bytes[..len]);
            reference.judge(&disk, &|| format!("{name} cut to {len}"));
        }
        for more in [1, 7, 8, 512, 4096, 4 << 20] {
            for fill in [0, 0xa5] {
                let mut bad = bytes.clone();
                bad.resize(bytes.len() + more, fill);
                let disk = reference.with(&name, bad);
                reference.judge(&disk, &|| format!("{name} and {more} bytes of {fill}"));
            }
        }
        let twice = [bytes.as_slice(), &bytes].concat();
        reference.judge(&reference.with(&name, twice), &|| format!("{name} twice"));
    }
}

#[test]
fn c07_missing_and_exchanged_files_are_refused_or_harmless() {
    let reference = Reference::make(22).closed();
    let stranger = Reference::make(22).closed().files();
    let files = reference.files();
    for (name, bytes) in &files {
        let disk = reference.disk.after_kill();
        disk.remove_file(name);
        let judged = reference.judge(&disk, &|| format!("{name} missing"));
        let is_log = name == "MANIFEST" || name.ends_with(".log");
        assert_eq!(
            judged == Judgement::Refused(ErrorKind::Damaged),
            is_log,
            "{name}: {judged:?}"
        );
        if let Some(theirs) = stranger.get(name) {
            let disk = reference.with(name, theirs.clone());
            let judged = reference.judge(&disk, &|| format!("{name} of another store"));
            assert_eq!(
                judged == Judgement::Refused(ErrorKind::Damaged),
                is_log,
                "{name}"
            );
        }
        for (other, theirs) in &files {
            let disk = reference.with(name, theirs.clone());
            disk.write_file(other, bytes.clone());
            reference.judge(&disk, &|| format!("{name} and {other} exchanged"));
            reference.judge(&reference.with(name, theirs.clone()), &|| {
                format!("{other} in place of {name}")
            });
        }
    }
}

#[test]
fn c07_a_sealed_segment_cut_at_a_record_border_is_refused() {
    let reference = Reference::make(22).closed();
    let name = "seg-000000000002.log";
    let whole = reference.file(name);
    let frames = bytes::frames(&whole);
    let last_record = frames.iter().rfind(|frame| frame.kind < 16).unwrap().offset;
    for frame in frames {
        let disk = reference.with(name, &whole[..frame.offset]);
        let judged = reference.judge(&disk, &|| format!("cut at {}", frame.offset));
        assert_eq!(judged, Judgement::Refused(ErrorKind::Damaged));
        // The size kept, the records gone: the index knows what must be there.
        let mut bad = whole.clone();
        bad[frame.offset..].fill(0);
        let disk = reference.with(name, bad);
        let judged = reference.judge(&disk, &|| format!("zeroed from {}", frame.offset));
        if frame.offset <= last_record {
            assert_ne!(
                judged,
                Judgement::Right { errors: 0, lost: 0 },
                "offset {}",
                frame.offset
            );
        }
    }
}

#[test]
fn a_damaged_index_is_rebuilt_and_answers_right() {
    let reference = Reference::make(22).closed();
    for name in reference.files().into_keys().filter(|name| is_index(name)) {
        let disk = reference.disk.after_kill();
        disk.remove_file(&name);
        let log = options().open_on(disk.dir()).unwrap();
        assert!(log.open_report().rebuilt_runs_count >= 1, "{name}");
        drop(log);
        let judged = reference.judge(&disk, &|| format!("{name} missing, second open"));
        assert_eq!(judged, Judgement::Right { errors: 0, lost: 0 });
        let log = options().open_on(disk.dir()).unwrap();
        assert_eq!(log.open_report().rebuilt_runs_count, 0, "{name}");
    }
}

#[test]
fn a_damaged_page_is_rebuilt_and_hides_no_key_until_then() {
    let reference = Reference::make(22).closed();
    for name in reference
        .files()
        .into_keys()
        .filter(|name| name.ends_with(".idx"))
    {
        let mut bad = reference.file(&name);
        bad[4096 + 100] ^= 1;
        let disk = reference.with(&name, bad);
        let log = options().open_on(disk.dir()).unwrap();
        let seen = log.filter("seen", small()).unwrap();
        for (key, state) in &reference.seen {
            match seen.get(key) {
                Ok(found) => assert_eq!(found, *state),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Damaged),
            }
        }
        log.maintain().unwrap();
        for (key, state) in &reference.seen {
            assert_eq!(seen.get(key).unwrap(), *state);
        }
        drop((seen, log));
        let judged = reference.judge(&disk, &|| "rebuilt".into());
        assert_eq!(judged, Judgement::Right { errors: 0, lost: 0 });
    }
}

#[test]
fn c29_an_index_of_another_moment_is_not_believed() {
    let early = Reference::make(9).closed();
    let late = Reference::make(22).closed();
    // Runs of an earlier time of another store of the same shape, under the names of today.
    for (name, bytes) in early.files().into_iter().filter(|(name, _)| is_index(name)) {
        let disk = late.with(&name, bytes);
        let judged = late.judge(&disk, &|| format!("{name} of another store"));
        assert_eq!(judged, Judgement::Right { errors: 0, lost: 0 });
    }
    // Left-over runs of segments that are not there any more, or not sealed yet.
    let (name, bytes) = late
        .files()
        .into_iter()
        .find(|(name, _)| name.ends_with(".idx"))
        .unwrap();
    let disk = late.disk.after_kill();
    for number in [77, 99] {
        disk.write_file(
            &format!("run-{number:012}-{number:012}-0.idx"),
            bytes.clone(),
        );
    }
    let judged = late.judge(&disk, &|| format!("{name} under other numbers"));
    assert_eq!(judged, Judgement::Right { errors: 0, lost: 0 });
    assert!(!disk.file_names().iter().any(|name| name.contains("77-")));
}

#[test]
fn c64_a_damaged_manifest_is_refused_and_never_replaced_by_a_fresh_store() {
    for reference in [
        Reference::make(22).closed(),
        Reference::make(1),
        Reference::make(1).closed(),
    ] {
        let whole = reference.file("MANIFEST");
        let half = whole[..whole.len() / 2].to_vec();
        let twice = [whole.as_slice(), &whole].concat();
        for bad in [vec![0; whole.len()], Vec::new(), half, twice] {
            let disk = reference.with("MANIFEST", bad.clone());
            let judged = reference.judge(&disk, &|| format!("manifest of {} bytes", bad.len()));
            assert_eq!(judged, Judgement::Refused(ErrorKind::Damaged));
        }
        let disk = reference.disk.after_kill();
        disk.remove_file("MANIFEST");
        let judged = reference.judge(&disk, &|| "no manifest".into());
        assert_eq!(judged, Judgement::Refused(ErrorKind::Damaged));
        // A half-written next manifest is not taken for one.
        let disk = reference.with("MANIFEST.new", &whole[..whole.len() / 2]);
        let judged = reference.judge(&disk, &|| "half a next manifest".into());
        assert_eq!(judged, Judgement::Right { errors: 0, lost: 0 });
        assert!(!disk.file_names().contains(&"MANIFEST.new".to_owned()));
    }
}

#[test]
fn c64_an_older_manifest_is_refused_or_loses_nothing() {
    let disk = SimDisk::memory();
    let mut manifests = Vec::new();
    let log = options().open_on(disk.dir()).unwrap();
    let seen = log.filter("seen", small()).unwrap();
    for n in 0..300 {
        assert!(seen.observe(key(n)).unwrap().is_new());
        let manifest = disk.read_file("MANIFEST").unwrap();
        if manifests.last().is_none_or(|(_, last)| *last != manifest) {
            manifests.push((n, manifest));
        }
    }
    drop((seen, log));
    assert!(manifests.len() > 5);
    for (number, manifest) in manifests {
        let copy = disk.after_kill();
        copy.write_file("MANIFEST", manifest);
        match options().open_on(copy.dir()) {
            Err(error) => assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}"),
            Ok(log) => {
                let seen = log.filter("seen", small()).unwrap();
                for n in 0..300 {
                    assert_eq!(
                        seen.get(key(n)).unwrap(),
                        KeyState::Seen,
                        "{number}: key {n}"
                    );
                }
            }
        }
    }
}

#[test]
fn c25_leftovers_of_ours_are_removed_and_foreign_files_are_left_alone() {
    let reference = Reference::make(22).closed();
    let disk = reference.disk.after_kill();
    let ours = [
        "MANIFEST.new",
        "hint-000000000003",
        "run-000000000001-000000000001-0.idx.tmp",
        "run-000000000001-000000000001-0.flt.tmp",
        "run-000000000008-000000000009-4.idx",
        "run-000000000008-000000000009-4.flt",
    ];
    let foreign = [
        "notes.txt",
        "seg-1.log",
        ".hidden",
        "MANIFEST.bak",
        "seg-000000000001.log~",
    ];
    for name in ours.iter().chain(&foreign) {
        disk.write_file(name, vec![0x5a; 100]);
    }
    let log = options().open_on(disk.dir()).unwrap();
    assert_eq!(log.open_report().orphans_count, ours.len() as u64);
    drop(log);
    let names = disk.file_names();
    for name in ours {
        assert!(!names.iter().any(|n| n == name), "{name}");
    }
    for name in foreign {
        assert_eq!(disk.read_file(name), Some(vec![0x5a; 100]), "{name}");
    }
    let judged = reference.judge(&disk, &|| "with foreign files".into());
    assert_eq!(judged, Judgement::Right { errors: 0, lost: 0 });
}

#[test]
fn c62_empty_newest_segments_are_removed_and_nothing_is_overwritten() {
    let reference = Reference::make(22);
    let header = reference.file("seg-000000000001.log")[..64].to_vec();
    let mut sized = header.clone();
    sized.resize(4096, 0);
    let newest = reference
        .files()
        .into_keys()
        .filter(|name| name.ends_with(".log"))
        .max();
    let newest: u64 = newest.unwrap()[4..16].parse().unwrap();
    for content in [
        Vec::new(),
        header[..32].to_vec(),
        header,
        sized,
        vec![0; 4096],
    ] {
        for count in 1..=3 {
            let disk = reference.disk.after_kill();
            for n in 1..=count {
                disk.write_file(&format!("seg-{:012}.log", newest + n), content.clone());
            }
            let log = options().open_on(disk.dir()).unwrap();
            assert_eq!(log.open_report().orphans_count, count);
            let seen = log.filter("seen", small()).unwrap();
            let late: Vec<_> = (1000..1060).map(key).collect();
            for key in &late {
                assert!(seen.observe(key).unwrap().is_new());
            }
            drop((seen, log));
            let log = options().open_on(disk.dir()).unwrap();
            let seen = log.filter("seen", small()).unwrap();
            for key in &late {
                assert_eq!(seen.get(key).unwrap(), KeyState::Seen);
            }
            drop((seen, log));
            let judged = reference.judge(&disk, &|| format!("{count} of {}", content.len()));
            assert_eq!(judged, Judgement::Right { errors: 0, lost: 0 });
        }
    }
}

#[test]
fn a_segment_with_records_that_no_manifest_lists_is_refused() {
    let reference = Reference::make(22).closed();
    let whole = reference.file("seg-000000000002.log");
    let mut newer = whole.clone();
    bytes::put(&mut newer, 32, 8, 900);
    bytes::fix_end(&mut newer[..64]);
    let mut foreign = newer.clone();
    foreign[16] ^= 1;
    bytes::fix_end(&mut foreign[..64]);
    for content in [newer, foreign] {
        let disk = reference.with("seg-000000000900.log", content);
        let judged = reference.judge(&disk, &|| "an unlisted segment".into());
        assert_eq!(judged, Judgement::Refused(ErrorKind::Damaged));
    }
    // One of a number that was used before was dropped: its removal had not reached the disk.
    let disk = reference.with("seg-000000000900.log", whole);
    let judged = reference.judge(&disk, &|| "a copy of an older segment".into());
    assert_eq!(judged, Judgement::Right { errors: 0, lost: 0 });
}

/// The newest segment of a killed store, its frames, and where its records end.
fn tail_of(reference: &Reference) -> (String, Vec<u8>, Vec<bytes::Frame>, usize) {
    let logs = reference
        .files()
        .into_iter()
        .filter(|(name, _)| name.ends_with(".log"));
    let used = logs.filter(|(_, content)| !bytes::frames(content).is_empty());
    let (name, content) = used.max_by_key(|(name, _)| name.clone()).unwrap();
    let frames = bytes::frames(&content);
    let end = frames
        .last()
        .map(|frame| frame.offset + frame.bytes.len())
        .unwrap();
    (name, content, frames, end)
}

/// Opens a store with a broken tail, goes on with it, kills it, and opens it twice more.
fn go_on_behind_the_tail(reference: &Reference, disk: &SimDisk, what: &dyn Fn() -> String) -> u64 {
    let judged = reference.judge(disk, what);
    let _announce = Announce(what);
    assert!(
        matches!(judged, Judgement::Right { errors: 0, .. }),
        "{judged:?}"
    );
    let log = options().open_on(disk.dir()).unwrap();
    let seen = log.filter("seen", small()).unwrap();
    for n in 2000..2010 {
        assert!(seen.observe(key(n)).unwrap().is_new());
    }
    let killed = disk.after_kill();
    for _ in 0..2 {
        let log = options().open_on(killed.dir()).unwrap();
        let seen = log.filter("seen", small()).unwrap();
        for n in 2000..2010 {
            assert_eq!(seen.get(key(n)).unwrap(), KeyState::Seen);
        }
        let judged = reference.judge(&killed.after_kill(), what);
        assert!(
            matches!(judged, Judgement::Right { errors: 0, .. }),
            "{judged:?}"
        );
    }
    log.open_report().dropped_bytes
}

#[test]
fn c30_junk_behind_the_end_of_the_log_is_a_tail() {
    let reference = Reference::make(22);
    let (name, whole, _, end) = tail_of(&reference);
    let mut rng = Rng::new(3);
    for fill in ["zeros", "random", "half a frame", "an old frame"] {
        let mut bad = whole.clone();
        let behind = bad.len() - end;
        match fill {
            "random" => bad[end..].fill_with(|| rng.next_u64().to_le_bytes()[0]),
            "half a frame" => bad.copy_within(64..64 + behind.min(20), end),
            "an old frame" => bad.copy_within(64..64 + behind.min(64), end),
            _ => {}
        }
        let disk = reference.with(&name, bad);
        let log = options().open_on(disk.dir()).unwrap();
        assert_eq!(
            log.open_report().dropped_bytes > 0,
            fill != "zeros",
            "{fill}"
        );
        drop(log);
        go_on_behind_the_tail(&reference, &disk, &|| format!("{fill} behind {end}"));
    }
}

#[test]
fn c30_a_last_write_cut_at_each_byte_or_sector_is_a_tail() {
    let reference = Reference::make(22);
    let (name, whole, frames, end) = tail_of(&reference);
    // The last write is the last batch and the mark that proves the one before it.
    let start = frames[frames.len() - 1 - BATCH].offset;
    let sectors = (start.next_multiple_of(SECTOR_BYTES)..end).step_by(SECTOR_BYTES);
    for cut in (start..end).step_by(5).chain(sectors) {
        let mut bad = whole.clone();
        bad[cut..].fill(0);
        let disk = reference.with(&name, bad);
        go_on_behind_the_tail(&reference, &disk, &|| format!("zeroed from {cut}"));
    }
}

/// The newest log file shorter than its segment, or longer: the file system did not keep its size.
#[test]
fn c30_a_newest_file_of_another_length_is_a_tail() {
    let reference = Reference::make(22);
    let (name, whole, frames, end) = tail_of(&reference);
    let start = frames[frames.len() - 1 - BATCH].offset;
    for more in [4096, 4 << 20] {
        for fill in [0, 0xa5] {
            let mut bad = whole.clone();
            bad.resize(whole.len() + more, fill);
            let disk = reference.with(&name, bad);
            go_on_behind_the_tail(&reference, &disk, &|| {
                format!("{more} bytes of {fill} more")
            });
        }
    }
    for cut in (start..end).step_by(7) {
        let disk = reference.with(&name, &whole[..cut]);
        go_on_behind_the_tail(&reference, &disk, &|| format!("cut at {cut}"));
    }
}

#[test]
fn damage_before_a_mark_that_proves_it_durable_is_refused() {
    let reference = Reference::make(22);
    let (name, whole, frames, _) = tail_of(&reference);
    let last_write = frames[frames.len() - 1 - BATCH].offset;
    let mut refused = 0;
    for frame in frames.iter().filter(|frame| frame.offset < last_write) {
        let mut bad = whole.clone();
        bad[frame.offset + 9] ^= 4;
        let disk = reference.with(&name, bad);
        let judged = reference.judge(&disk, &|| format!("frame at {}", frame.offset));
        assert_eq!(
            judged,
            Judgement::Refused(ErrorKind::Damaged),
            "frame at {}",
            frame.offset
        );
        refused += 1;
    }
    assert!(refused > 3);
}

#[test]
fn files_are_unchanged_when_an_open_is_refused_for_another_file() {
    let reference = Reference::make(22);
    let (name, whole, _, end) = tail_of(&reference);
    // A torn tail to clean up, a temporary to remove, a run to rebuild, and a damaged segment.
    let mut junk = whole.clone();
    junk[end..].fill(0x77);
    let disk = reference.with(&name, junk);
    disk.write_file("MANIFEST.new", vec![1; 10]);
    for name in disk
        .file_names()
        .into_iter()
        .filter(|name| name.ends_with(".idx"))
    {
        disk.remove_file(&name);
    }
    let mut bad = reference.file("seg-000000000002.log");
    bad[200] ^= 1;
    disk.write_file("seg-000000000002.log", bad);
    let judged = reference.judge(&disk, &|| "several faults at once".into());
    assert_eq!(judged, Judgement::Refused(ErrorKind::Damaged));
}

/// Numbers that a damaged length likes to be.
const EXTREMES: [u64; 7] = [
    0,
    1,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

/// Answers may be wrong here: the checksum says that these bytes were meant. But nothing panics,
/// and nothing is allocated that the bytes on disk do not pay for.
fn survives(disk: &SimDisk, what: &dyn Fn() -> String) {
    let _announce = Announce(what);
    let Ok(log) = options().open_on(disk.dir()) else {
        return;
    };
    let _unused = exercise(&log);
    let _unused = log.close();
}

fn exercise(log: &DedupLog) -> idemlog::Result<()> {
    let seen: Filter = log.filter("seen", small())?;
    for n in 0..40 {
        let _state = seen.get(key(n * 2));
    }
    let jobs = log.namespace::<Repeatable>("jobs", small())?;
    for name in JOBS {
        let _state = jobs.get(name);
    }
    let _pending = log.pending();
    let _in_doubt = log.in_doubt();
    let _observed = seen.observe("extra")?;
    let _stats = log.stats();
    log.maintain()
}

#[test]
fn c11_extreme_numbers_in_the_manifest_are_refused_or_harmless() {
    let reference = Reference::make(22).closed();
    let whole = reference.file("MANIFEST");
    for width in [1, 2, 4, 8] {
        for at in 10..whole.len() - 4 - width {
            for value in EXTREMES {
                let mut bad = whole.clone();
                bytes::put(&mut bad, at, width, value & (u64::MAX >> (64 - 8 * width)));
                bytes::fix_end(&mut bad);
                let disk = reference.with("MANIFEST", bad);
                survives(&disk, &|| {
                    format!("manifest at {at}: {value} in {width} bytes")
                });
            }
        }
    }
}

#[test]
fn c11_extreme_numbers_in_records_are_refused_or_harmless() {
    let reference = Reference::make(22).closed();
    for name in [
        "seg-000000000001.log",
        "seg-000000000002.log",
        &tail_of(&reference).0,
    ] {
        let whole = reference.file(name);
        let mut kinds = BTreeMap::new();
        for frame in bytes::frames(&whole) {
            let count = kinds.entry(frame.kind).or_insert(0);
            *count += 1;
            if *count > 1 {
                continue;
            }
            for at in 4..frame.bytes.len() {
                for value in [0, 1, u64::MAX] {
                    for width in [1, 2, 4, 8] {
                        if at % width != 0 || at + width > frame.bytes.len() {
                            continue;
                        }
                        let mut bad = whole.clone();
                        bytes::put(&mut bad, frame.offset + at, width, value);
                        let len = bytes::u16_at(&bad, frame.offset + 4) * 8;
                        bytes::fix_frame(&mut bad, frame.offset, len.max(8));
                        let disk = reference.with(name, bad);
                        survives(&disk, &|| {
                            format!("{name} kind {} at {at}: {value} in {width}", frame.kind)
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn c11_extreme_numbers_in_headers_runs_and_filters_are_refused_or_harmless() {
    let reference = Reference::make(22).closed();
    for (name, whole) in reference.files() {
        let (head, end) = match name.rsplit('.').next().unwrap() {
            "log" | "flt" => (64, 60),
            "idx" => (4096, 100),
            _ => continue,
        };
        for at in 8..end {
            for width in [1, 2, 4, 8] {
                for value in EXTREMES {
                    if at % width != 0 || at + width > end {
                        continue;
                    }
                    let mut bad = whole.clone();
                    bytes::put(&mut bad, at, width, value & (u64::MAX >> (64 - 8 * width)));
                    bytes::fix_end(&mut bad[..head]);
                    let disk = reference.with(&name, bad);
                    survives(&disk, &|| {
                        format!("{name} at {at}: {value} in {width} bytes")
                    });
                }
            }
        }
    }
}

#[test]
fn c11_extreme_numbers_in_run_pages_are_refused_or_harmless() {
    let reference = Reference::make(22).closed();
    let name = reference
        .files()
        .into_keys()
        .find(|name| name.ends_with(".idx"))
        .unwrap();
    let whole = reference.file(&name);
    let named = [&whole[16..32], &whole[40..56], &whole[12..16]].concat();
    let seed = bytes::crc32(0, &named);
    for at in 4..200 {
        for value in EXTREMES {
            for width in [2, 4, 8] {
                if at % width != 0 {
                    continue;
                }
                let mut bad = whole.clone();
                let page = &mut bad[4096..8192];
                bytes::put(page, at, width, value & (u64::MAX >> (64 - 8 * width)));
                let crc = bytes::crc32(seed, &page[4..]);
                bytes::put(page, 0, 4, u64::from(crc));
                survives(&reference.with(&name, bad), &|| {
                    format!("page at {at}: {value}")
                });
            }
        }
    }
}

/// A store whose active segment has a hint, and keys behind its end.
fn hinted() -> (SimDisk, String, Vec<String>) {
    let disk = SimDisk::memory();
    let keys: Vec<String> = (0..13_000).map(|n| format!("key-{n}")).collect();
    let open = || {
        options()
            .segment_bytes(1 << 20)
            .open_on(disk.dir())
            .unwrap()
    };
    for part in [&keys[..12_000], &keys[12_000..]] {
        let log = open();
        let seen = log.filter("seen", small()).unwrap();
        for answer in seen.observe_many(part).unwrap() {
            assert!(answer.unwrap().is_new());
        }
        drop(seen);
        log.close().unwrap();
    }
    let name = disk
        .file_names()
        .into_iter()
        .find(|name| name.starts_with("hint-"));
    (disk.clone(), name.expect("a hint"), keys)
}

fn check_hinted(disk: &SimDisk, keys: &[String], what: &dyn Fn() -> String) -> u64 {
    let _announce = Announce(what);
    let log = options()
        .segment_bytes(1 << 20)
        .open_on(disk.dir())
        .unwrap();
    let seen = log.filter("seen", small()).unwrap();
    for key in keys.iter().step_by(61).chain(keys.last()) {
        assert_eq!(seen.get(key).unwrap(), KeyState::Seen, "{key}");
    }
    assert_eq!(seen.get("nobody").unwrap(), KeyState::Absent);
    log.open_report().replayed_count
}

#[test]
fn c29_a_hint_that_is_damaged_foreign_or_of_another_time_is_not_believed() {
    let (disk, name, keys) = hinted();
    let whole = disk.read_file(&name).unwrap();
    let replayed = check_hinted(&disk.after_kill(), &keys, &|| "the right hint".into());
    assert!(replayed < 2000, "{replayed}");
    let with = |bytes: Vec<u8>| {
        let copy = disk.after_kill();
        copy.write_file(&name, bytes);
        copy
    };
    let mut rng = Rng::new(5);
    let places = (0..160)
        .step_by(3)
        .chain((0..40).map(|_| rng.below(whole.len())));
    for at in places.collect::<Vec<_>>() {
        let mut bad = whole.clone();
        bad[at] ^= 1 << (at % 8);
        let replayed = check_hinted(&with(bad), &keys, &|| format!("hint byte {at}"));
        assert!(replayed >= 3000, "byte {at}: {replayed}");
    }
    for len in [0, 1, 159, 160, whole.len() / 2, whole.len() - 1] {
        check_hinted(&with(whole[..len].to_vec()), &keys, &|| {
            format!("hint cut to {len}")
        });
    }
    // Of another store of the same shape.
    let (other, name_there, _) = hinted();
    let foreign = other.read_file(&name_there).unwrap();
    check_hinted(&with(foreign), &keys, &|| "hint of another store".into());
    // Newer than the log: the log was cut back behind the hint's back, as a lost tail would.
    for at in (8..160).step_by(4) {
        for value in [0, 1, u64::from(u32::MAX)] {
            let mut bad = whole.clone();
            bytes::put(&mut bad, at, 4, value);
            bytes::fix_end(&mut bad);
            survives_hint(&with(bad), &|| format!("hint at {at}: {value}"));
        }
    }
}

/// With the right checksum a wrong number may be believed, but nothing panics or is allocated.
fn survives_hint(disk: &SimDisk, what: &dyn Fn() -> String) {
    let _announce = Announce(what);
    let Ok(log) = options().segment_bytes(1 << 20).open_on(disk.dir()) else {
        return;
    };
    let Ok(seen) = log.filter("seen", small()) else {
        return;
    };
    let _state = seen.get("key-1");
    let _observed = seen.observe("later");
    let _done = log.maintain();
}
