//! Repair and opening to salvage: what is left is kept and answered, what is lost is said, and
//! nothing is offered again that may have happened.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{
    CrashOptions, Fault, FaultKind, PowerCut, SimDisk, for_each_crash_point,
};
use idemlog::{
    ClaimOptions, ClaimVerdict, Commit, CommitVerdict, DedupLog, ErrorKind, Failure, KeyState,
    Namespace, NamespaceKind, NamespaceOptions, NonRepeatable, Observed, OpenMode, Options,
    Probeable, Repair, RepairReport, Result, Retention, ZeroFill,
};

const START_MS: u64 = 1_700_000_000_000;
const SECTOR_BYTES: usize = 512;
const KEYS: usize = 120;

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(START_MS))
}

fn options() -> Options {
    Options::new()
        .segment_bytes(8192)
        .background(false)
        .zero_fill(ZeroFill::Never)
        .clock(clock())
}

fn space() -> NamespaceOptions {
    NamespaceOptions::new()
        .outcome_bytes_max(64)
        .retention(Retention::Forever)
}

fn open(disk: &SimDisk) -> Result<DedupLog> {
    options().open_on(disk.dir())
}

fn repair() -> Repair {
    Repair::of("simulated").clock(clock())
}

fn key(n: usize) -> Vec<u8> {
    format!("key-{n:0120}").into_bytes()
}

/// Commits one key with an outcome that names it.
fn commit(jobs: &Namespace<NonRepeatable>, key: &[u8]) {
    let ClaimVerdict::New(claim) = jobs.claim(key).unwrap() else {
        panic!("{key:?} is not new");
    };
    let mut started = claim.start(b"evidence").unwrap();
    let committed = started.commit(key).unwrap();
    assert!(matches!(committed, CommitVerdict::Committed { .. }));
}

/// A store of several segments, all of it durable, and closed.
fn store() -> SimDisk {
    let disk = SimDisk::memory();
    let log = open(&disk).unwrap();
    let seen = log.filter("seen", space()).unwrap();
    let jobs = log.namespace::<NonRepeatable>("jobs", space()).unwrap();
    for n in 0..KEYS {
        assert_eq!(seen.observe(key(n)).unwrap(), Observed::New);
        if n % 10 == 0 {
            commit(&jobs, format!("job-{n}").as_bytes());
        }
    }
    log.maintain().unwrap();
    log.close().unwrap();
    disk.after_kill()
}

fn segments(disk: &SimDisk) -> Vec<String> {
    let mut names = disk.file_names();
    names.retain(|name| name.starts_with("seg-"));
    names.sort();
    names
}

fn without_index(disk: &SimDisk) -> SimDisk {
    let disk = disk.after_kill();
    for name in disk.file_names() {
        if name.starts_with("run-") || name.starts_with("hint-") {
            disk.remove_file(&name);
        }
    }
    disk
}

/// Repairs into a new disk.
fn repaired(disk: &SimDisk) -> (SimDisk, RepairReport) {
    let before = disk.image_hash();
    let target = SimDisk::memory();
    let report = repair()
        .write_on(disk.dir().as_ref(), target.dir())
        .unwrap();
    assert_eq!(disk.image_hash(), before, "the damaged store was changed");
    assert!(!target.file_names().contains(&"REPAIRING".to_owned()));
    (target, report)
}

/// Asks for every key: how many are forgotten. Wrong outcomes and invented keys are failures.
fn forgotten(log: &DedupLog) -> usize {
    let seen = log.filter("seen", space()).unwrap();
    let jobs = log.namespace::<NonRepeatable>("jobs", space()).unwrap();
    let mut lost = 0;
    for n in 0..KEYS {
        match seen.get(key(n)).unwrap() {
            KeyState::Seen => {}
            KeyState::Absent => lost += 1,
            other => panic!("{other:?}"),
        }
        assert_eq!(seen.get(key(KEYS + n)).unwrap(), KeyState::Absent);
        let name = format!("job-{n}");
        match jobs.get(&name).unwrap() {
            KeyState::Done(done) => assert_eq!(done.outcome.bytes(), Some(name.as_bytes())),
            KeyState::Absent if n % 10 == 0 => lost += 1,
            KeyState::Absent => {}
            // Claimed or started, with what came later lost: never offered again.
            KeyState::InDoubt(_) | KeyState::Pending { .. } => {}
            other => panic!("{name} {other:?}"),
        }
    }
    lost
}

#[test]
fn repairing_a_whole_store_keeps_every_answer() {
    for disk in [store(), without_index(&store())] {
        let dry = repair().dry_run_on(disk.dir().as_ref()).unwrap();
        assert!(dry.is_whole(), "{dry:?}");
        let (target, report) = repaired(&disk);
        assert!(report.is_whole());
        assert_eq!(report.kept_count, dry.found_count);
        assert_eq!((report.doubtful_count, report.purged_count), (0, 0));
        assert_eq!(forgotten(&open(&target).unwrap()), 0);
    }
}

#[test]
fn an_unfinished_write_at_the_end_is_no_loss() {
    let disk = SimDisk::memory();
    let log = open(&disk).unwrap();
    let seen = log.filter("seen", space()).unwrap();
    for n in 0..20 {
        assert!(seen.observe(key(n)).unwrap().is_new());
    }
    let killed = disk.after_kill();
    let name = segments(&killed).pop().unwrap();
    let mut bytes = killed.read_file(&name).unwrap();
    let at = find(&bytes, &key(19));
    bytes[at] ^= 1;
    killed.write_file(&name, bytes);
    let (target, report) = repaired(&killed);
    assert!(report.is_whole(), "{report:?}");
    let log = open(&target).unwrap();
    let seen = log.filter("seen", space()).unwrap();
    let states: Vec<_> = (0..20).map(|n| seen.get(key(n)).unwrap()).collect();
    assert!(states[..19].iter().all(|state| *state == KeyState::Seen));
    assert_eq!(states[19], KeyState::Absent);
}

#[test]
fn a_damaged_sector_costs_its_own_records_and_no_other() {
    let whole = store();
    let mut lossy = 0;
    for name in segments(&whole) {
        let bytes = whole.read_file(&name).unwrap();
        for at in (SECTOR_BYTES..bytes.len()).step_by(SECTOR_BYTES) {
            for fill in [0x00, 0xa7] {
                let mut bad = bytes.clone();
                bad[at..at + SECTOR_BYTES].fill(fill);
                let disk = without_index(&whole);
                disk.write_file(&name, bad);
                let (target, report) = repaired(&disk);
                let lost = forgotten(&open(&target).unwrap());
                // Frames here have 144 bytes and more: four in a sector, and one at each side.
                assert!(lost <= 5, "{name} at {at}: {lost} keys are lost");
                assert!(
                    lost == 0 || !report.is_whole(),
                    "{name} at {at}: lost in silence"
                );
                for range in &report.lost {
                    assert_eq!(range.file, name);
                    assert!(range.from >= at as u64 - 300 && range.to <= at as u64 + 812);
                }
                lossy += usize::from(lost > 0);
                // The repaired store needs no repair, and can be repaired again.
                let again = repair().dry_run_on(target.dir().as_ref()).unwrap();
                assert!(again.is_whole());
            }
        }
    }
    assert!(
        lossy > 20,
        "nothing was lost: the damage does not reach the records"
    );
}

#[test]
fn a_missing_or_headless_segment_is_lost_and_the_others_are_kept() {
    let whole = store();
    for name in segments(&whole) {
        let bytes = whole.read_file(&name).unwrap();
        let missing = without_index(&whole);
        missing.remove_file(&name);
        let mut headless = bytes.clone();
        headless[..64].fill(0x5a);
        let beheaded = without_index(&whole);
        beheaded.write_file(&name, headless);
        let had_records = bytes[64..].iter().any(|b| *b != 0);
        let (target, report) = repaired(&missing);
        assert_eq!(report.is_whole(), !had_records, "{name} {report:?}");
        let lost = forgotten(&open(&target).unwrap());
        assert!(lost < KEYS, "{name}: all is lost");
        // The manifest knows the nonce, so the frames of a headless file are read.
        let (target, _) = repaired(&beheaded);
        assert_eq!(forgotten(&open(&target).unwrap()), 0, "{name}");
    }
}

/// The states of a few keys before a stretch that is lost, after the repair.
#[test]
fn what_a_lost_record_may_have_changed_goes_in_doubt() {
    let disk = SimDisk::memory();
    let log = open(&disk).unwrap();
    let pays = log.namespace::<NonRepeatable>("pays", space()).unwrap();
    let asks = log.namespace::<Probeable>("asks", space()).unwrap();
    let detached = ClaimOptions::new().detached(true);
    let claim = |key: &str| match pays.claim_with(key, &detached).unwrap() {
        ClaimVerdict::New(claim) => claim,
        other => panic!("{other:?}"),
    };
    let tickets = [
        claim("claimed"),
        claim("started"),
        claim("failed"),
        claim("done"),
    ]
    .map(idemlog::Claim::detach);
    let [_, started, failed, done] = &tickets;
    let start = |ticket| pays.start_ticket(ticket, b"e").unwrap();
    assert!(
        [started, failed, done]
            .map(start)
            .iter()
            .all(|c| c.is_applied())
    );
    let failure = Failure::retryable(Duration::ZERO, "no");
    assert!(pays.fail_ticket(failed, &failure).unwrap().is_applied());
    let paid = pays.commit_ticket(done, Commit::new(*b"paid")).unwrap();
    assert!(matches!(paid, CommitVerdict::Committed { .. }));
    let ClaimVerdict::New(asked) = asks.claim_with("asked", &detached).unwrap() else {
        panic!("new");
    };
    let _ticket = asked.detach();
    // Two that are lost, and one behind them.
    let seen = log.filter("seen", space()).unwrap();
    for n in 0..3 {
        assert!(seen.observe(key(n)).unwrap().is_new());
    }
    log.close().unwrap();
    let disk = disk.after_kill();
    let name = segments(&disk).remove(0);
    let mut bytes = disk.read_file(&name).unwrap();
    let at = find(&bytes, &key(1)[..]);
    bytes[at] ^= 1;
    disk.write_file(&name, bytes);
    assert_eq!(open(&disk).unwrap_err().kind(), ErrorKind::Damaged);

    let (target, report) = repaired(&disk);
    assert_eq!(report.lost.len(), 1, "{report:?}");
    assert_eq!(report.doubtful_count, 3);
    let log = open(&target).unwrap();
    let pays = log.namespace::<NonRepeatable>("pays", space()).unwrap();
    let asks = log.namespace::<Probeable>("asks", space()).unwrap();
    let states: BTreeMap<&str, &str> = ["claimed", "started", "failed", "done"]
        .map(|key| (key, pays.get(key).unwrap().name()))
        .into();
    assert_eq!(states["claimed"], "in-doubt");
    assert_eq!(states["failed"], "in-doubt");
    assert_eq!(states["done"], "done");
    assert_ne!(states["started"], "absent");
    let KeyState::Pending { started, .. } = asks.get("asked").unwrap() else {
        panic!("asked is not pending");
    };
    assert!(started, "the probe has to be asked first");
    // The owner, if it lives, can still say what happened.
    let late = pays.commit_ticket(&tickets[0], Commit::new(*b"late"));
    assert!(matches!(late.unwrap(), CommitVerdict::Committed { .. }));
}

fn find(bytes: &[u8], part: &[u8]) -> usize {
    let found = bytes.windows(part.len()).position(|window| window == part);
    found.expect("the key is in the file")
}

#[test]
fn a_damaged_store_opens_to_salvage_and_answers_only_what_it_knows() {
    let whole = store();
    let mut answered = 0;
    for name in segments(&whole) {
        let bytes = whole.read_file(&name).unwrap();
        for at in (SECTOR_BYTES..bytes.len()).step_by(SECTOR_BYTES) {
            let disk = without_index(&whole);
            let mut bad = bytes.clone();
            bad[at..at + SECTOR_BYTES].fill(0x3c);
            disk.write_file(&name, bad);
            let Err(error) = open(&disk) else { continue };
            assert_eq!(error.kind(), ErrorKind::Damaged);
            let before = disk.image_hash();
            let log = options()
                .open_mode(OpenMode::Salvage)
                .open_on(disk.dir())
                .unwrap();
            assert!(!log.open_report().lost.is_empty());
            let seen = log.filter("seen", space()).unwrap();
            let jobs = log.namespace::<NonRepeatable>("jobs", space()).unwrap();
            for n in 0..KEYS {
                match seen.observe(key(n)) {
                    Ok(Observed::Duplicate) => answered += 1,
                    Ok(Observed::New) => panic!("{name} at {at}: key {n} is new again"),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Damaged),
                }
            }
            assert_eq!(
                seen.observe("never").unwrap_err().kind(),
                ErrorKind::Damaged
            );
            assert_eq!(seen.get("never").unwrap_err().kind(), ErrorKind::Damaged);
            assert_eq!(seen.forget(key(0)).unwrap_err().kind(), ErrorKind::Damaged);
            match jobs.claim("job-0") {
                Ok(ClaimVerdict::Duplicate(done)) => {
                    assert_eq!(done.outcome.bytes(), Some(&b"job-0"[..]));
                }
                Ok(ClaimVerdict::InDoubt(_)) => {}
                Ok(other) => panic!("{other:?}"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Damaged),
            }
            assert!(log.filter("another", space()).is_err());
            let second = open(&disk).unwrap_err();
            assert_eq!(
                second.kind(),
                ErrorKind::Locked,
                "the damaged store is locked"
            );
            log.close().unwrap();
            assert_eq!(
                disk.image_hash(),
                before,
                "{name} at {at}: the store was changed"
            );
        }
    }
    assert!(answered > KEYS * 5);
}

#[test]
fn a_whole_store_opened_to_salvage_is_written_as_ever() {
    let disk = store();
    let log = options()
        .open_mode(OpenMode::Salvage)
        .open_on(disk.dir())
        .unwrap();
    assert!(log.open_report().lost.is_empty());
    let seen = log.filter("seen", space()).unwrap();
    assert_eq!(seen.observe("another").unwrap(), Observed::New);
    assert_eq!(seen.observe("another").unwrap(), Observed::Duplicate);
}

#[test]
fn without_a_manifest_namespaces_are_named_by_the_caller() {
    let whole = store();
    let cut = whole.read_file("MANIFEST").unwrap()[..50].to_vec();
    let zeroed = vec![0; 200];
    for manifest in [None, Some(cut), Some(zeroed)] {
        let disk = without_index(&whole);
        match manifest {
            Some(bytes) => disk.write_file("MANIFEST", bytes),
            None => assert!(disk.remove_file("MANIFEST")),
        }
        for mode in [OpenMode::Strict, OpenMode::Salvage] {
            let error = options().open_mode(mode).open_on(disk.dir()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
        }
        let unnamed = repair().dry_run_on(disk.dir().as_ref()).unwrap_err();
        assert_eq!(unnamed.kind(), ErrorKind::Invalid, "{unnamed}");
        let named = repair()
            .namespace(1, "seen", NamespaceKind::Filter)
            .namespace(2, "jobs", NamespaceKind::NonRepeatable);
        let target = SimDisk::memory();
        let report = named.write_on(disk.dir().as_ref(), target.dir()).unwrap();
        assert!(report.manifest_lost && report.lost.is_empty());
        let log = open(&target).unwrap();
        assert_eq!(forgotten(&log), 0);
        // Numbers go on behind those that were used.
        let third = log.filter("third", space()).unwrap();
        assert!(third.observe("x").unwrap().is_new());
        assert_eq!(forgotten(&log), 0);
    }
}

#[test]
fn epochs_and_derived_keys_go_on_after_a_repair() {
    let disk = SimDisk::memory();
    let log = open(&disk).unwrap();
    let jobs = log.namespace::<NonRepeatable>("jobs", space()).unwrap();
    let ClaimVerdict::New(claim) = jobs.claim("one").unwrap() else {
        panic!("new");
    };
    let (epoch, derived) = (claim.epoch(), claim.derived_key("charge"));
    drop(claim);
    log.close().unwrap();
    let (target, _) = repaired(&disk.after_kill());
    let log = open(&target).unwrap();
    let jobs = log.namespace::<NonRepeatable>("jobs", space()).unwrap();
    let ClaimVerdict::New(claim) = jobs.claim("one").unwrap() else {
        panic!("released, so new");
    };
    assert!(claim.epoch() > epoch);
    assert_eq!(claim.derived_key("charge"), derived);
}

#[test]
fn a_target_that_holds_anything_else_is_refused() {
    let whole = store();
    let other = store();
    let foreign = SimDisk::memory();
    foreign.write_file("notes.txt", *b"mine");
    for target in [other, foreign] {
        let before = target.image_hash();
        let error = repair()
            .write_on(whole.dir().as_ref(), target.dir())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert_eq!(target.image_hash(), before);
    }
}

/// A damaged store for the tests that repeat a repair very often.
fn small_damaged() -> SimDisk {
    let disk = SimDisk::memory();
    let log = options().segment_bytes(4096).open_on(disk.dir()).unwrap();
    let seen = log.filter("seen", space().outcome_bytes_max(0)).unwrap();
    for n in 0..45 {
        assert!(seen.observe(key(n)).unwrap().is_new());
    }
    log.maintain().unwrap();
    log.close().unwrap();
    let disk = without_index(&disk);
    let name = segments(&disk).remove(0);
    let mut bytes = disk.read_file(&name).unwrap();
    bytes[1024..1536].fill(0);
    disk.write_file(&name, bytes);
    disk
}

fn left(log: &DedupLog) -> usize {
    let seen = log.filter("seen", space().outcome_bytes_max(0)).unwrap();
    (0..45)
        .filter(|n| seen.get(key(*n)).unwrap() == KeyState::Seen)
        .count()
}

#[test]
fn a_repair_can_be_killed_at_every_step_and_run_again() {
    let damaged = small_damaged();
    let (target, report) = repaired(&damaged);
    let kept = left(&open(&target).unwrap());
    assert_eq!(kept as u64, report.kept_count);
    let run = |disk: &SimDisk| repair().write_on(damaged.dir().as_ref(), disk.dir());
    let crash = CrashOptions {
        seeded_count: 3,
        ..CrashOptions::default()
    };
    let mut finished = 0;
    let totals = for_each_crash_point(
        &crash,
        |disk| drop(run(disk)),
        |state| {
            let names = state.disk.file_names();
            let is_marked = names.contains(&"REPAIRING".to_owned());
            let is_store = names.contains(&"MANIFEST".to_owned());
            if is_store && !is_marked {
                // Finished: complete, although the caller was not told.
                finished += 1;
                assert_eq!(left(&open(&state.disk).unwrap()), kept, "{state}");
                return;
            }
            if is_marked {
                let error = open(&state.disk).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Incompatible, "{state}");
            }
            run(&state.disk).unwrap();
            assert_eq!(left(&open(&state.disk).unwrap()), kept, "{state}");
        },
    );
    println!("crash: scenario=repair level=Power {totals:?}");
    assert!(finished > 0 && totals.checked > 50, "{totals:?}");
}

#[test]
fn a_repair_in_which_a_call_fails_is_an_error_and_can_be_run_again() {
    let damaged = small_damaged();
    let kept = left(&open(&repaired(&damaged).0).unwrap());
    let before = damaged.image_hash();
    let whole = SimDisk::new();
    let run = |disk: &SimDisk| repair().write_on(damaged.dir().as_ref(), disk.dir());
    run(&whole).unwrap();
    for kind in [FaultKind::Io, FaultKind::NoSpace] {
        for step in 0..whole.steps() {
            for fault in [Fault::once(step, kind), Fault::sticky(step, kind)] {
                let target = SimDisk::new();
                target.fail(fault);
                let result = run(&target);
                assert_eq!(damaged.image_hash(), before);
                target.clear_faults();
                let names = target.file_names();
                let is_complete = names.contains(&"MANIFEST".to_owned())
                    && !names.contains(&"REPAIRING".to_owned());
                assert!(result.is_err() || is_complete);
                if !is_complete {
                    run(&target).unwrap();
                }
                assert_eq!(left(&open(&target).unwrap()), kept, "{fault:?}");
            }
        }
    }
}

/// A killed store: one key claimed in a sealed segment, done in the unsealed end of the log.
fn killed_with_work_at_the_end() -> SimDisk {
    let disk = SimDisk::new();
    let log = open(&disk).unwrap();
    let pays = log.namespace::<NonRepeatable>("pays", space()).unwrap();
    let seen = log.filter("seen", space()).unwrap();
    let detached = ClaimOptions::new().detached(true);
    let ClaimVerdict::New(claim) = pays.claim_with("k", &detached).unwrap() else {
        panic!("new");
    };
    let ticket = claim.detach();
    let mut n = 0;
    while segments(&disk).len() < 3 {
        assert!(seen.observe(key(n)).unwrap().is_new());
        n += 1;
    }
    for n in 1000..1020 {
        assert!(seen.observe(key(n)).unwrap().is_new());
    }
    assert!(pays.start_ticket(&ticket, b"").unwrap().is_applied());
    let done = pays.commit_ticket(&ticket, Commit::new(*b"paid")).unwrap();
    assert!(matches!(done, CommitVerdict::Committed { .. }));
    disk.after_kill()
}

fn state_of_k(disk: &SimDisk) -> KeyState {
    let log = open(disk).unwrap();
    let pays = log.namespace::<NonRepeatable>("pays", space()).unwrap();
    pays.get("k").unwrap()
}

/// A missing or foreign file is no unfinished write, whatever the marks say: a repair that took it
/// for one called the store whole, and offered a key again that had been paid.
#[test]
fn a_missing_end_of_the_log_is_lost_and_its_claims_are_in_doubt() {
    let killed = killed_with_work_at_the_end();
    assert!(matches!(
        state_of_k(&killed.after_kill()),
        KeyState::Done(_)
    ));
    let with_records = |name: &String| {
        let bytes = killed.read_file(name).unwrap();
        bytes.windows(4).any(|window| window == b"paid")
    };
    let last = segments(&killed).into_iter().find(with_records).unwrap();
    for damage in ["missing", "empty", "foreign"] {
        let disk = killed.after_kill();
        match damage {
            "missing" => assert!(disk.remove_file(&last)),
            "empty" => disk.write_file(&last, Vec::new()),
            _ => disk.write_file(&last, vec![0x11; 8192]),
        }
        let (target, report) = repaired(&disk);
        assert!(!report.is_whole(), "{damage}");
        assert_eq!(report.doubtful_count, 1, "{damage}");
        assert!(
            matches!(state_of_k(&target), KeyState::InDoubt(_)),
            "{damage}"
        );
    }
}

#[test]
fn what_the_device_refuses_to_read_is_lost_and_not_the_rest() {
    let whole = store();
    let before = forgotten(&open(&whole.after_kill()).unwrap());
    assert_eq!(before, 0);
    // All reads fail from some point on: nothing is called whole, and nothing panics.
    for reads in 0..40 {
        let disk = without_index(&whole);
        disk.fail_reads_after(reads);
        let target = SimDisk::memory();
        match repair()
            .namespace(1, "seen", NamespaceKind::Filter)
            .namespace(2, "jobs", NamespaceKind::NonRepeatable)
            .write_on(disk.dir().as_ref(), target.dir())
        {
            Ok(report) => {
                let lost = forgotten(&open(&target).unwrap());
                assert!(lost == 0 || !report.is_whole(), "after {reads} reads");
            }
            Err(error) => {
                let kinds = [ErrorKind::Damaged, ErrorKind::Io];
                assert!(kinds.contains(&error.kind()), "{error}");
            }
        }
    }
}

#[test]
fn a_manifest_that_is_older_than_the_log_is_refused() {
    let disk = SimDisk::memory();
    let log = open(&disk).unwrap();
    let seen = log.filter("seen", space()).unwrap();
    assert!(seen.observe(key(0)).unwrap().is_new());
    let older = disk.read_file("MANIFEST").unwrap();
    for n in 1..KEYS {
        assert!(seen.observe(key(n)).unwrap().is_new());
    }
    let later = log.filter("later", space()).unwrap();
    assert!(later.observe("k").unwrap().is_new());
    log.close().unwrap();
    let disk = disk.after_kill();
    disk.write_file("MANIFEST", older);
    let error = repair().dry_run_on(disk.dir().as_ref()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
    // Without it the caller names both namespaces, and everything is there.
    disk.remove_file("MANIFEST");
    let named = repair()
        .namespace(1, "seen", NamespaceKind::Filter)
        .namespace(2, "later", NamespaceKind::Filter);
    let target = SimDisk::memory();
    let report = named.write_on(disk.dir().as_ref(), target.dir()).unwrap();
    assert_eq!(report.lost_count, 0, "{report:?}");
    let log = open(&target).unwrap();
    let seen = log.filter("seen", space()).unwrap();
    assert!((0..KEYS).all(|n| seen.get(key(n)).unwrap() == KeyState::Seen));
}

#[test]
fn a_hole_between_segments_is_lost_also_without_a_manifest() {
    let killed = killed_with_work_at_the_end();
    let names = segments(&killed);
    for gone in &names {
        for damage in ["missing", "headless"] {
            let disk = without_index(&killed);
            disk.remove_file("MANIFEST");
            if damage == "missing" {
                disk.remove_file(gone);
            } else {
                let mut bytes = disk.read_file(gone).unwrap();
                bytes[..64].fill(0x77);
                disk.write_file(gone, bytes);
            }
            let named = repair()
                .namespace(1, "pays", NamespaceKind::NonRepeatable)
                .namespace(2, "seen", NamespaceKind::Filter);
            let target = SimDisk::memory();
            let report = named.write_on(disk.dir().as_ref(), target.dir()).unwrap();
            assert!(report.manifest_lost && !report.is_whole());
            // Never plainly claimable: done, in doubt, or lost with its first segment.
            let state = state_of_k(&target);
            let first = *gone == names[0];
            let fits = match state {
                KeyState::Done(_) | KeyState::InDoubt(_) => true,
                KeyState::Absent => first,
                _ => false,
            };
            assert!(fits, "{gone} {damage}: {state:?}");
        }
    }
}

#[test]
fn an_unfinished_repair_is_no_source() {
    let whole = store();
    let target = SimDisk::new();
    target.stop_at(20);
    assert!(
        repair()
            .write_on(whole.dir().as_ref(), target.dir())
            .is_err()
    );
    let half = target.after_kill();
    assert!(half.file_names().contains(&"REPAIRING".to_owned()));
    let error = repair().dry_run_on(half.dir().as_ref()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incompatible);
}

#[test]
fn namespaces_that_are_named_wrongly_are_refused() {
    let disk = store();
    disk.remove_file("MANIFEST");
    let filter = NamespaceKind::Filter;
    let once = NamespaceKind::NonRepeatable;
    let wrong = [
        repair(),
        repair().namespace(1, "seen", filter),
        repair()
            .namespace(1, "seen", once)
            .namespace(2, "jobs", once),
        repair()
            .namespace(1, "seen", filter)
            .namespace(2, "jobs", filter),
        repair()
            .namespace(1, "same", filter)
            .namespace(2, "same", once),
        repair()
            .namespace(1, "seen", filter)
            .namespace(1, "jobs", once),
        repair()
            .namespace(0, "zero", filter)
            .namespace(2, "jobs", once),
        repair().namespace(1, "", filter).namespace(2, "jobs", once),
    ];
    for repair in wrong {
        let error = repair.dry_run_on(disk.dir().as_ref()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{repair:?}");
    }
    let purged = repair().namespace(1, "seen", filter).purged(2);
    let report = purged.dry_run_on(disk.dir().as_ref()).unwrap();
    assert!(report.purged_count > 0);
}

#[test]
fn a_forgotten_key_is_no_answer_in_what_is_left() {
    let disk = SimDisk::memory();
    let log = open(&disk).unwrap();
    let seen = log.filter("seen", space()).unwrap();
    assert!(seen.observe(key(1)).unwrap().is_new());
    assert!(seen.forget(key(1)).unwrap().is_applied());
    assert!(seen.observe(key(2)).unwrap().is_new());
    assert!(seen.observe(key(1)).unwrap().is_new());
    log.close().unwrap();
    let disk = without_index(&disk);
    let name = segments(&disk).remove(0);
    let mut bytes = disk.read_file(&name).unwrap();
    let last = find_last(&bytes, &key(1));
    bytes[last] ^= 1;
    disk.write_file(&name, bytes);
    let log = options()
        .open_mode(OpenMode::Salvage)
        .open_on(disk.dir())
        .unwrap();
    assert!(log.open_report().salvaged);
    let seen = log.filter("seen", space()).unwrap();
    assert_eq!(seen.get(key(2)).unwrap(), KeyState::Seen);
    for error in [
        seen.get(key(1)).map(drop).unwrap_err(),
        seen.check_many(&[key(1)]).map(drop).unwrap_err(),
        seen.forget(key(1)).map(drop).unwrap_err(),
        seen.observe(key(1)).map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
    }
}

fn find_last(bytes: &[u8], part: &[u8]) -> usize {
    let found = bytes.windows(part.len()).rposition(|window| window == part);
    found.expect("the key is in the file")
}

#[test]
fn the_probe_is_asked_only_some_time_after_the_repair() {
    let disk = SimDisk::memory();
    let log = open(&disk).unwrap();
    let asks = log.namespace::<Probeable>("asks", space()).unwrap();
    let detached = ClaimOptions::new().detached(true);
    let ClaimVerdict::New(claim) = asks.claim_with("k", &detached).unwrap() else {
        panic!("new");
    };
    let _ticket = claim.detach();
    let seen = log.filter("seen", space()).unwrap();
    for n in 0..3 {
        assert!(seen.observe(key(n)).unwrap().is_new());
    }
    log.close().unwrap();
    let disk = disk.after_kill();
    let name = segments(&disk).remove(0);
    let mut bytes = disk.read_file(&name).unwrap();
    let at = find(&bytes, &key(1));
    bytes[at] ^= 1;
    disk.write_file(&name, bytes);
    // A day later: the lease has long lapsed, but a start that is lost may be recent.
    let day_ms = 24 * 3600 * 1000;
    let clock = clock();
    clock.advance_ms(day_ms);
    let target = SimDisk::memory();
    Repair::of("simulated")
        .clock(Arc::clone(&clock) as _)
        .write_on(disk.dir().as_ref(), target.dir())
        .unwrap();
    let log = options()
        .clock(Arc::clone(&clock) as _)
        .open_on(target.dir())
        .unwrap();
    let settle = space().settle(Duration::from_secs(60));
    let asks = log
        .namespace::<Probeable>("asks", settle)
        .unwrap()
        .with_probe(|_| idemlog::Probed::NotApplied);
    assert!(matches!(
        asks.claim("k").unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    clock.advance_ms(61_000);
    let asked = asks.claim("k").unwrap();
    assert!(matches!(asked, ClaimVerdict::Takeover { .. }), "{asked:?}");
}

/// One damaged record used to refuse the whole store, after the manifest had been changed, if a
/// claim of the same key was listed in an older footer.
#[test]
fn a_damaged_end_of_a_listed_claim_costs_its_own_key_only() {
    let disk = SimDisk::memory();
    let log = open(&disk).unwrap();
    let jobs = log.namespace::<NonRepeatable>("jobs", space()).unwrap();
    let seen = log.filter("seen", space()).unwrap();
    let ClaimVerdict::New(claim) = jobs.claim("k").unwrap() else {
        panic!("new");
    };
    let mut started = claim.start(b"").unwrap();
    let mut n = 0;
    let mut fill = |segments_count: usize| {
        while segments(&disk).len() < segments_count {
            assert!(seen.observe(key(n)).unwrap().is_new());
            n += 1;
        }
    };
    fill(3);
    let _done = started.commit(b"unique-outcome").unwrap();
    fill(5);
    log.maintain().unwrap();
    drop(started);
    log.close().unwrap();
    let disk = disk.after_kill();
    for name in segments(&disk) {
        let mut bytes = disk.read_file(&name).unwrap();
        if let Some(at) = bytes.windows(14).position(|w| w == b"unique-outcome") {
            bytes[at] ^= 1;
            disk.write_file(&name, bytes);
        }
    }
    let log = open(&disk).unwrap();
    let jobs = log.namespace::<NonRepeatable>("jobs", space()).unwrap();
    assert_eq!(jobs.get("k").unwrap_err().kind(), ErrorKind::Damaged);
    assert_eq!(jobs.claim("k").unwrap_err().kind(), ErrorKind::Damaged);
    let seen = log.filter("seen", space()).unwrap();
    assert_eq!(seen.get(key(0)).unwrap(), KeyState::Seen);
}

/// A repair that has returned is complete, whatever the power does: its mark does not come back.
#[test]
fn a_finished_repair_stays_finished_after_a_power_cut() {
    let disk = store();
    let target = SimDisk::new();
    let report = repair()
        .write_on(disk.dir().as_ref(), target.dir())
        .unwrap();
    assert!(report.is_whole());
    let bare = target.after_power_cut(&mut PowerCut::drop_all());
    let log = open(&bare).unwrap();
    let seen = log.filter("seen", space()).unwrap();
    assert_eq!(seen.observe(key(0)).unwrap(), Observed::Duplicate);
}
