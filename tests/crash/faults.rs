//! Full disks, single failures, and stories of faults that were found.

use idemlog::testing::sim::{Fault, FaultKind, PowerCut, SimDisk, SyncFailure};
use idemlog::{Applied, Durability, ErrorKind, KeyState, NamespaceOptions, Options};

use super::{KEY, SEGMENT_BYTES, check, copy, created, fill, long_key, promised, reopen, secs};
use crate::support::crew::{NON_REPEATABLE, Promised, REPEATABLE};

/// A full disk refuses new keys with a typed error, settles what is claimed, and is as before when
/// there is space again.
#[test]
fn a_full_disk_is_a_typed_error_and_clears() {
    for spare in [0, 512, 2048, 8192, 40_000] {
        let level = Durability::Power;
        let disk = created(level);
        let mut crew = reopen(&disk, promised(level));
        crew.claim(REPEATABLE, KEY, false).unwrap();
        disk.set_free_bytes(Some(spare));
        let mut refused = 0;
        for n in 0..400 {
            if let Err(error) = crew.observe(&long_key(n), None, level) {
                assert!(
                    matches!(error.kind(), ErrorKind::Full | ErrorKind::Io),
                    "{error:?}"
                );
                refused += 1;
            }
        }
        assert!(refused > 0);
        let health = crew.log.health();
        assert_eq!(health.poisoned, None, "spare={spare}");
        // What is owed fits, also when the index of the full segment does not.
        crew.commit(REPEATABLE, KEY, b"fits", level).unwrap();
        disk.set_free_bytes(None);
        for n in 0..400 {
            crew.observe(&long_key(n), None, level).unwrap();
        }
        let floor = crew.p.floor_power;
        let promised = copy(&crew.p);
        check(
            &disk.after_power_cut(&mut PowerCut::drop_all()),
            promised,
            false,
            true,
        );
        assert_eq!(crew.p.floor_power, floor);
        crew.close().1.unwrap();
    }
}

/// A key whose call failed without being applied is new when it is tried again.
#[test]
fn a_refused_key_is_new_again() {
    let level = Durability::Power;
    let disk = created(level);
    let mut crew = reopen(&disk, promised(level));
    for n in 0..50u32 {
        let key = long_key(n);
        disk.fail(Fault::once(disk.steps(), FaultKind::Io).after_bytes(n as usize * 3));
        if crew.observe(&key, None, level).is_ok() {
            continue;
        }
        if crew.log.health().poisoned.is_some() {
            break;
        }
        crew.observe(&key, None, level).unwrap();
        crew.observe(&key, None, level).unwrap();
    }
    disk.clear_faults();
    check(
        &disk.after_power_cut(&mut PowerCut::drop_all()),
        copy(&crew.p),
        false,
        true,
    );
}

/// P2, I9: bytes that a failed flush left in the page cache only are not answered from after a
/// restart, unless they are on the disk by then.
#[test]
fn a_failed_flush_poisons_and_a_restart_trusts_no_cache() {
    for sync in [
        SyncFailure::MarkClean,
        SyncFailure::StuckSectors,
        SyncFailure::DropPages,
        SyncFailure::KeepDirty,
    ] {
        let level = Durability::Power;
        let disk = created(level);
        let mut crew = reopen(&disk, promised(level));
        crew.observe(b"before", None, level).unwrap();
        let fault = Fault::once(disk.steps(), FaultKind::Io);
        disk.fail(fault.only(idemlog::testing::sim::Op::Sync).on_sync(sync));
        let error = crew.observe(b"lost", None, level).unwrap_err();
        assert_eq!(error.applied(), Applied::Maybe);
        assert!(crew.log.health().poisoned.is_some());
        assert_eq!(crew.filter.get(b"before").unwrap(), KeyState::Seen);
        assert!(crew.filter.get(b"lost").is_err());
        assert!(crew.filter.get(b"absent").is_err());
        assert_eq!(
            crew.filter.observe(b"absent").unwrap_err().kind(),
            ErrorKind::Poisoned
        );
        let promised = copy(&crew.p);
        let restarted = disk.after_kill();
        check(&restarted, promised, false, true);
    }
}

/// I1: index runs and filters are derived from the log.
#[test]
fn i1_runs_and_filters_are_deletable() {
    let level = Durability::Process;
    let disk = created(level);
    let mut crew = reopen(&disk, promised(level));
    crew.claim(NON_REPEATABLE, KEY, false).unwrap();
    crew.start(NON_REPEATABLE, KEY, b"").unwrap();
    fill(&mut crew, level, 0, 6, secs(600)).unwrap();
    crew.log.maintain().unwrap();
    let (mut promised, closed) = crew.close();
    closed.unwrap();
    let derived = |name: &String| name.starts_with("run-") || name.starts_with("hint-");
    let names: Vec<String> = disk.file_names().into_iter().filter(derived).collect();
    assert!(names.len() >= 4, "{names:?}");
    for name in &names {
        let copy = disk.after_kill();
        assert!(copy.remove_file(name));
        promised = check(&copy, promised, false, false);
    }
    for name in &names {
        assert!(disk.remove_file(name));
    }
    check(&disk, promised, false, true);
}

/// Story: with 4-KiB segments no prepared segment counted as room for what an open claim may
/// still write, so `make_room` prepared segments for ever.
#[test]
fn the_smallest_segments_hold_claims() {
    let disk = SimDisk::new();
    let mut promised = Promised::new(4096, Durability::Process);
    for spec in &mut promised.oracle.specs {
        spec.outcome_bytes_max = 0;
    }
    let mut crew = reopen(&disk, promised);
    crew.claim(REPEATABLE, &[b'k'; 300], false).unwrap();
    for n in 0..200 {
        crew.observe(&long_key(n), None, Durability::Process)
            .unwrap();
    }
    crew.commit(REPEATABLE, &[b'k'; 300], b"", Durability::Process)
        .unwrap();
    crew.close().1.unwrap();
}

/// Story: `claim_many` failed in its second pass and left the claims of its first pass pending,
/// with no guard to end them: busy until their lease lapsed.
#[test]
fn a_batch_of_claims_that_fails_holds_none_of_them() {
    use idemlog::{ClaimOptions, ClaimVerdict, NamespaceOptions, Options, Repeatable};
    let disk = SimDisk::new();
    let log = Options::new()
        .background(false)
        .segment_bytes(SEGMENT_BYTES)
        .log_bytes_max(3 * u64::from(SEGMENT_BYTES))
        .open_on(disk.dir())
        .unwrap();
    let options = NamespaceOptions::new().outcome_bytes_max(200);
    let namespace = log.namespace::<Repeatable>("jobs", options).unwrap();
    let keys: Vec<_> = (0..200).map(long_key).collect();
    let error = namespace
        .claim_many(&keys, &ClaimOptions::new())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    let verdict = namespace.claim(&keys[0]).unwrap();
    assert!(matches!(verdict, ClaimVerdict::New(_)), "{verdict:?}");
}

/// A record behind the end of the log must not come back when the log grows up to where it
/// begins: recovery cuts at the first invalid frame, and what lies behind is as valid as before.
#[test]
fn what_recovery_cuts_does_not_come_back_when_the_log_grows_up_to_it() {
    let options = |level| {
        let options = Options::new().segment_bytes(4096).background(false);
        options.durability(level)
    };
    let disk = SimDisk::new();
    let open = || {
        let log = options(Durability::Process).open_on(disk.dir()).unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        (log, filter)
    };
    let key = |n: u8| [n; 16];
    let (log, filter) = open();
    for n in 0..40 {
        assert!(filter.observe(key(n)).unwrap().is_new());
    }
    let mut killed = disk.after_kill();
    drop((log, filter));
    let name = "seg-000000000001.log";
    let mut bytes = killed.read_file(name).unwrap();
    // A header of 64 bytes, then records of 32: the eleventh is lost.
    let at = 64 + 10 * 32;
    bytes[at..at + 32].fill(0);
    killed.write_file(name, bytes);
    for round in 0..2 {
        let log = options(Durability::Process).open_on(killed.dir()).unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        assert_eq!(filter.get(key(9)).unwrap(), KeyState::Seen);
        for n in 10..40 {
            assert_eq!(
                filter.get(key(n)).unwrap(),
                KeyState::Absent,
                "key {n} round {round}"
            );
        }
        if round == 0 {
            assert!(filter.observe(key(200)).unwrap().is_new());
        } else {
            assert_eq!(filter.get(key(200)).unwrap(), KeyState::Seen);
        }
        let next = killed.after_kill();
        drop((log, filter));
        killed = next;
    }
}

/// P3: a failed write may leave whole records behind, and the system may write them to the device
/// before they are overwritten with zeros: what was told as "not applied" came back after a power
/// cut.
#[test]
fn what_was_taken_back_does_not_come_back_after_a_power_cut() {
    let level = Durability::Power;
    for after_bytes in [24, 28, 32, 40, 55] {
        let disk = created(level);
        let mut crew = reopen(&disk, promised(level));
        crew.observe(KEY, None, level).unwrap();
        let fault = Fault::sticky(disk.steps(), FaultKind::NoSpace).after_bytes(after_bytes);
        disk.fail(fault.only(idemlog::testing::sim::Op::Write));
        let error = crew.filter.forget(KEY).unwrap_err();
        assert_eq!(error.applied(), Applied::No, "{error}");
        disk.clear_faults();
        for seed in 0..40 {
            let cut = disk.after_power_cut(&mut PowerCut::seeded(seed));
            check(&cut, copy(&crew.p), false, false);
        }
    }
}

/// P2, C: an open that finds records in the cache that the device does not hold writes their
/// segment anew. Stopped anywhere in that, the next open has every record that a kill must leave,
/// and after a power cut every record that was durable.
#[test]
fn an_open_that_writes_a_segment_anew_can_be_stopped_anywhere() {
    let level = Durability::Process;
    let disk = created(level);
    let mut crew = reopen(&disk, promised(level));
    crew.observe(b"durable", None, Durability::Power).unwrap();
    for n in 0..8 {
        crew.observe(&super::long_key(n), None, level).unwrap();
    }
    let fault = Fault::once(disk.steps(), FaultKind::Io).on_sync(SyncFailure::StuckSectors);
    disk.fail(fault.only(idemlog::testing::sim::Op::Sync));
    crew.observe(b"refused", None, Durability::Power)
        .unwrap_err();
    let (promised, _) = crew.close();
    let left = disk.after_kill();
    let open = |disk: &SimDisk| {
        if let Ok(crew) = super::Crew::open(disk, copy(&promised)) {
            drop(crew.close());
        }
    };
    let whole = left.after_kill();
    open(&whole);
    let log = whole.step_log();
    assert!(log.iter().any(|line| line.ends_with(".copy")), "{log:?}");
    let options = super::CrashOptions {
        recycled_count: 2,
        ..super::crash_options(&left)
    };
    let mut cuts = 0;
    let totals = super::for_each_crash_point(&options, open, |state| {
        let killed = super::is_kill(state.kind);
        cuts += usize::from(!killed);
        // A repair in place of the next open finds the copy, too.
        let report = idemlog::Repair::of("simulated").dry_run_on(state.disk.dir().as_ref());
        assert_eq!(report.unwrap().lost_count, 0);
        check(&state.disk, copy(&promised), killed, true);
    });
    println!("crash: scenario=anew level={level:?} {totals:?}");
    assert!(cuts > 50, "{totals:?}");
}
