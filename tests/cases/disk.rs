//! Disks that refuse: permission denied for a while, writes and flushes that fail under a promise,
//! and space that ends in the middle of a batch.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use idemlog::testing::sim::{
    CrashOptions, Fault, FaultKind, Op, PowerCut, SimDisk, for_each_crash_point,
};
use idemlog::{
    Applied, ClaimVerdict, Commit, CommitVerdict, DedupLog, ErrorKind, Internal, KeyState,
    NonRepeatable, ObserveOptions, Observed, Options, Repeatable, ZeroFill,
};

use super::{
    Twin, aftermath, bytes_of_files, clock, compare, filter, image, long, new, options, small,
};
use crate::support::rigged::rigged;

fn open(disk: &SimDisk) -> DedupLog {
    options(&clock()).open_on(disk.dir()).unwrap()
}

fn denied() -> io::Error {
    io::ErrorKind::PermissionDenied.into()
}

/// How long names cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deny {
    /// Each name is refused so many times, and then works.
    Blip(u64),
    /// Until somebody lets go.
    Lasting,
}

/// A disk on which renames and removals of these names are denied.
fn denying(disk: &SimDisk, op: Op, start: &'static str, deny: Deny) -> (Held, DirOf) {
    let held = Arc::new(AtomicBool::new(false));
    let refusals = Arc::new(Mutex::new(std::collections::HashMap::<String, u64>::new()));
    let count = Arc::new(AtomicU64::new(0));
    let (hold, counted) = (Arc::clone(&held), Arc::clone(&count));
    let dir = rigged(disk.dir(), move |done, name| {
        if done != op || !name.starts_with(start) || !hold.load(Ordering::Relaxed) {
            return Ok(());
        }
        if let Deny::Blip(times) = deny {
            let mut refusals = refusals.lock().unwrap();
            let refused = refusals.entry(name.to_owned()).or_default();
            if *refused >= times {
                *refused = 0;
                return Ok(());
            }
            *refused += 1;
        }
        counted.fetch_add(1, Ordering::Relaxed);
        Err(denied())
    });
    (Held { held, count }, dir)
}

type DirOf = Arc<dyn idemlog::testing::Dir>;

struct Held {
    held: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
}

impl Held {
    fn hold(&self) {
        self.held.store(true, Ordering::Relaxed);
    }

    fn let_go(&self) {
        self.held.store(false, Ordering::Relaxed);
    }
}

#[test]
fn c17_permission_denied_for_a_while_or_for_long_leaves_the_store_whole_and_usable() {
    let places = [
        (Op::Rename, "MANIFEST"),
        (Op::Rename, "run-"),
        (Op::Rename, "seg-"),
        (Op::Unlink, "run-"),
        (Op::Unlink, "seg-"),
        (Op::Unlink, ""),
        (Op::Rename, ""),
    ];
    for (op, start) in places {
        for deny in [Deny::Blip(1), Deny::Blip(3), Deny::Lasting] {
            let what = format!("{op} of {start:?}, {deny:?}");
            let (disk, clock) = (SimDisk::new(), clock());
            let mut twin = Twin::new();
            {
                let log = options(&clock).open_on(disk.dir()).unwrap();
                assert!(filter(&log).observe("before").unwrap().is_new());
                twin.insert("before".into(), true);
            }
            let (held, dir) = denying(&disk, op, start, deny);
            let log = options(&clock).open_on(dir).unwrap();
            held.hold();
            let minute = ObserveOptions::new().retention(Duration::from_secs(60));
            let mut refused = 0;
            for n in 0..200 {
                let (key, asked) = match n % 8 {
                    0 => (long("key", n), ObserveOptions::new()),
                    _ => (long("short", n), minute.clone()),
                };
                match filter(&log).observe_with(&key, &asked) {
                    Ok(observed) => {
                        assert!(observed.is_new(), "{what}: {key}");
                        twin.insert(key, true);
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Io, "{what}: {error:?}");
                        assert_eq!(error.applied(), Applied::No, "{what}");
                        assert!(error.to_string().contains("failed"), "{error}");
                        // Refused is not recorded: the caller may come again.
                        assert_eq!(filter(&log).get(&key).unwrap(), KeyState::Absent, "{what}");
                        refused += 1;
                    }
                }
                if n % 20 == 0 {
                    let _unused = log.maintain();
                }
            }
            assert!(
                log.health().poisoned.is_none(),
                "{what}: {:?}",
                log.health()
            );
            compare(&filter(&log), &twin, &what);
            let denials = held.count.load(Ordering::Relaxed);
            assert!(
                refused <= denials,
                "{what}: {refused} calls refused for {denials} denials"
            );
            assert!(refused < 195, "{what}: a blip that ends nothing");
            clock.advance_ms(61_000);
            for _ in 0..4 {
                let _unused = log.maintain();
            }
            for (key, seen) in &mut twin {
                *seen &= !key.starts_with("short");
            }
            compare(&filter(&log), &twin, &what);
            // The files of what was dropped are used again, where that is allowed.
            for n in 200..260 {
                if filter(&log).observe(long("key", n)).is_ok() {
                    twin.insert(long("key", n), true);
                }
            }
            compare(&filter(&log), &twin, &what);
            // While it lasts, another open answers as well, where the manifest can be replaced.
            drop(log);
            let denials = held.count.load(Ordering::Relaxed);
            let (again, dir) = denying(&disk, op, start, Deny::Lasting);
            again.hold();
            match options(&clock).open_on(dir) {
                Ok(log) => {
                    compare(&filter(&log), &twin, &what);
                    assert!(log.health().poisoned.is_none(), "{what}");
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Io, "{what}: {error:?}");
                    assert!(op == Op::Rename && start != "seg-", "{what}: {error:?}");
                }
            }
            assert!(
                denials > 0 || deny != Deny::Lasting,
                "{what}: nothing was denied"
            );
            // It is over: the space comes back, and everything works.
            held.let_go();
            let log = options(&clock).open_on(disk.dir()).unwrap();
            for n in 0..30 {
                assert!(
                    filter(&log).observe(long("after", n)).unwrap().is_new(),
                    "{what}"
                );
                twin.insert(long("after", n), true);
            }
            for _ in 0..6 {
                log.maintain().unwrap();
            }
            drop(log);
            let open = |disk: &SimDisk| options(&clock).open_on(disk.dir()).unwrap();
            aftermath(&disk, &open, &twin, &what);
            let kept = twin.values().filter(|seen| **seen).count();
            let bytes = bytes_of_files(&disk);
            assert!(
                bytes < 160 * 1024 + kept * 800,
                "{what}: {bytes} bytes for {kept} keys"
            );
        }
    }
}

/// A place that fails once, and what is asked there.
fn at_once_and_from_waiters(op: Op, is_claim: bool) {
    let what = format!("{op}, claim {is_claim}");
    let disk = SimDisk::new();
    let clock = clock();
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let seen = filter(&log);
    assert!(seen.observe("first").unwrap().is_new());
    let mut claim = is_claim.then(|| new(jobs.claim("k").unwrap()));
    log.sync().unwrap();
    disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(op));
    let error = match &mut claim {
        Some(claim) => claim
            .commit_with(Commit::without_outcome())
            .map(drop)
            .unwrap_err(),
        None => seen.observe("k").map(drop).unwrap_err(),
    };
    assert!(
        !matches!(error.kind(), ErrorKind::Full | ErrorKind::Invalid),
        "{what}: {error:?}"
    );
    let poisoned = log.health().poisoned.is_some();
    assert_eq!(poisoned, op == Op::Sync, "{what}");
    // At once, in the same thread and in others.
    let asked = || match is_claim {
        true => jobs
            .claim("k")
            .map(|verdict| matches!(verdict, ClaimVerdict::Duplicate(_))),
        false => seen.get("k").map(|state| state == KeyState::Seen),
    };
    std::thread::scope(|scope| {
        for answer in [(); 4].map(|()| scope.spawn(asked)) {
            match answer.join().unwrap() {
                Ok(known) => assert!(!known, "{what}: a duplicate of nothing"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Poisoned, "{what}"),
            }
        }
    });
    if !poisoned {
        // The retry does what the first try was asked for.
        match &mut claim {
            Some(claim) => {
                let verdict = claim.commit_with(Commit::without_outcome()).unwrap();
                assert!(matches!(verdict, CommitVerdict::Committed { .. }), "{what}");
            }
            None => assert!(seen.observe("k").unwrap().is_new(), "{what}"),
        }
    }
    let disks = [
        disk.after_kill(),
        disk.after_power_cut(&mut PowerCut::drop_all()),
        disk.after_power_cut(&mut PowerCut::keep_all()),
    ];
    for disk in disks {
        let log = options(&clock).open_on(disk.dir()).unwrap();
        assert_eq!(filter(&log).observe("first").unwrap(), Observed::Duplicate);
        let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
        let known = match is_claim {
            true => matches!(jobs.get("k").unwrap(), KeyState::Done(_)),
            false => filter(&log).get("k").unwrap() == KeyState::Seen,
        };
        assert!(known || poisoned, "{what}: an acknowledged key is gone");
        // Whichever it is, it stays: the message is processed once more, or is known.
        drop((jobs, log));
        let log = options(&clock).open_on(disk.after_kill().dir()).unwrap();
        let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
        let again = match is_claim {
            true => matches!(jobs.get("k").unwrap(), KeyState::Done(_)),
            false => filter(&log).get("k").unwrap() == KeyState::Seen,
        };
        assert_eq!(again, known, "{what}");
    }
}

#[test]
fn c06_a_key_whose_record_was_not_stored_is_not_remembered_by_memory_alone() {
    for op in [Op::Write, Op::Sync] {
        for is_claim in [false, true] {
            at_once_and_from_waiters(op, is_claim);
        }
    }
}

/// Threads that wait for somebody else's flush get its error, or are new themselves.
#[test]
fn c06_waiters_on_a_write_that_fails_are_told_so_and_one_of_them_succeeds_later() {
    for op in [Op::Write, Op::Sync] {
        let disk = SimDisk::new();
        let armed = Arc::new(AtomicBool::new(false));
        let trigger = Arc::clone(&armed);
        let dir = rigged(disk.dir(), move |done, name| {
            let is_log = name.starts_with("seg-");
            if done == op && is_log && trigger.swap(false, Ordering::SeqCst) {
                // The others have come by now, and wait for this call.
                std::thread::sleep(Duration::from_millis(30));
                return Err(FaultKind::Io.error());
            }
            Ok(())
        });
        let log = options(&clock())
            .segment_bytes(64 * 1024)
            .open_on(dir)
            .unwrap();
        let filter = filter(&log);
        assert!(filter.observe("first").unwrap().is_new());
        armed.store(true, Ordering::SeqCst);
        let barrier = Barrier::new(8);
        let answers: Vec<_> = std::thread::scope(|scope| {
            let threads = [(); 8].map(|()| {
                scope.spawn(|| {
                    barrier.wait();
                    filter.observe("k")
                })
            });
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let errors = answers.iter().filter(|answer| answer.is_err()).count();
        let news = answers.iter().flatten().filter(|o| o.is_new()).count();
        let duplicates = answers.len() - errors - news;
        assert!(errors >= 1, "{op}: the fault struck nobody");
        assert!(
            news == 1 || news == 0 && duplicates == 0,
            "{op}: {answers:?}"
        );
        if op == Op::Sync {
            assert_eq!(
                (news, duplicates),
                (0, 0),
                "{op}: after a failed flush nobody is told"
            );
        } else {
            let late = filter.observe("k").unwrap();
            assert_eq!(late.is_new(), news == 0, "{op}");
        }
        drop((filter, log));
        let log = options(&clock()).open_on(disk.after_kill().dir()).unwrap();
        assert_eq!(
            super::filter(&log).observe("first").unwrap(),
            Observed::Duplicate
        );
        if op == Op::Write {
            assert_eq!(
                super::filter(&log).observe("k").unwrap(),
                Observed::Duplicate
            );
        }
    }
}

/// Sixty-four threads, a slow flush, and one write in a hundred that fails.
#[test]
fn c44_one_winner_a_key_although_winners_writes_fail_and_flushes_are_slow() {
    const KEYS: usize = 300;
    const THREADS: usize = 64;
    let disk = SimDisk::memory();
    let writes = Arc::new(AtomicU64::new(0));
    let failed = Arc::new(AtomicU64::new(0));
    let (counted, failing) = (Arc::clone(&writes), Arc::clone(&failed));
    let dir = rigged(disk.dir(), move |op, name| {
        if !name.starts_with("seg-") {
            return Ok(());
        }
        if op == Op::Sync {
            // Between the table and the flush.
            std::thread::sleep(Duration::from_micros(200));
        }
        if op == Op::Write && counted.fetch_add(1, Ordering::Relaxed) % 25 == 24 {
            failing.fetch_add(1, Ordering::Relaxed);
            return Err(FaultKind::NoSpace.error());
        }
        Ok(())
    });
    let log = Options::new()
        .zero_fill(ZeroFill::Never)
        .segment_bytes(64 * 1024)
        .open_on(dir)
        .unwrap();
    let filter = filter(&log);
    let news: Vec<AtomicUsize> = (0..KEYS).map(|_| AtomicUsize::new(0)).collect();
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for (number, count) in news.iter().enumerate() {
                    if number % 10 == 0 {
                        barrier.wait();
                    }
                    // Whoever got an error comes again, as a redelivery does.
                    loop {
                        match filter.observe(format!("key-{number}")) {
                            Ok(observed) => {
                                count.fetch_add(usize::from(observed.is_new()), Ordering::Relaxed);
                                break;
                            }
                            // A thread that panicked would leave the others waiting.
                            Err(error) if error.applied() == Applied::No => {}
                            Err(_) => break,
                        }
                    }
                }
            });
        }
    });
    let wins: Vec<_> = news
        .iter()
        .map(|count| count.load(Ordering::Relaxed))
        .collect();
    assert!(wins.iter().all(|wins| *wins == 1), "{wins:?}");
    assert!(failed.load(Ordering::Relaxed) > 3, "no write has failed");
    assert!(log.health().poisoned.is_none());
    drop((filter, log));
    let log = open(&disk);
    for number in 0..KEYS {
        let key = format!("key-{number}");
        assert_eq!(
            super::filter(&log).observe(key).unwrap(),
            Observed::Duplicate
        );
    }
}

/// What a batch of long keys leaves when space ends inside it.
#[test]
fn c10_a_batch_that_runs_out_of_space_says_what_may_be_there_and_can_be_repeated() {
    let keys: Vec<String> = (0..1000).map(|n| long("key", n)).collect();
    for free in [0, 8 * 1024, 40 * 1024, 100 * 1024, 200 * 1024] {
        let what = format!("{free} bytes free");
        let disk = SimDisk::new();
        let log = open(&disk);
        assert!(filter(&log).observe(&keys[500]).unwrap().is_new());
        disk.set_free_bytes(Some(free));
        let error = filter(&log).observe_many(&keys).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{what}: {error:?}");
        let there = |filter: &idemlog::Filter| -> Vec<bool> {
            let answers = filter.check_many(&keys).unwrap();
            answers.into_iter().map(Result::unwrap).collect()
        };
        log.sync().unwrap();
        let kept = there(&filter(&log));
        assert!(kept[500], "{what}: what was there before");
        let new = kept.iter().filter(|kept| **kept).count() - 1;
        // An error that says "no" leaves nothing behind: a repeat must not find duplicates.
        let said = error.applied();
        assert!(
            new == 0 || said == Applied::Maybe,
            "{what}: {new} keys are there, said {said:?}"
        );
        let killed = disk.after_kill();
        killed.set_free_bytes(None);
        assert_eq!(there(&filter(&open(&killed))), kept, "{what}");
        disk.set_free_bytes(None);
        let answers = filter(&log).observe_many(&keys).unwrap();
        for (index, (answer, kept)) in answers.iter().zip(&kept).enumerate() {
            assert_eq!(answer.as_ref().unwrap().is_new(), !kept, "{what}: {index}");
        }
        assert!(answers.len() == keys.len() && log.health().ok, "{what}");
    }
}

#[test]
fn c10_a_batch_of_commits_or_claims_that_runs_out_of_space_says_what_may_be_there() {
    let keys: Vec<String> = (0..200).map(|n| long("job", n)).collect();
    for free in [0, 4 * 1024, 12 * 1024, 30 * 1024] {
        let what = format!("{free} bytes free");
        let disk = SimDisk::new();
        let log = open(&disk);
        let jobs = log.namespace::<Internal>("j", small()).unwrap();
        disk.set_free_bytes(Some(free));
        let Err(error) = jobs.claim_many(&keys, &idemlog::ClaimOptions::new()) else {
            panic!("{what}: room for all claims");
        };
        assert_eq!(error.kind(), ErrorKind::Full, "{what}: {error:?}");
        // None of them is held: everybody may claim each of them.
        disk.set_free_bytes(None);
        for key in &keys {
            let verdict = jobs.claim(key).unwrap();
            assert!(verdict.claim().is_some(), "{what}: {key} is held by nobody");
        }
    }
    // Commits of claims that are held always fit.
    let disk = SimDisk::new();
    let log = open(&disk);
    let jobs = log.namespace::<Internal>("j", small()).unwrap();
    let verdicts = jobs
        .claim_many(&keys, &idemlog::ClaimOptions::new())
        .unwrap();
    let mut items: Vec<_> = verdicts
        .into_iter()
        .map(|verdict| (new(verdict.unwrap()), Commit::without_outcome()))
        .collect();
    disk.set_free_bytes(Some(0));
    for verdict in jobs.commit_many(&mut items).unwrap() {
        assert!(matches!(verdict.unwrap(), CommitVerdict::Committed { .. }));
    }
}

#[test]
fn c10_a_batch_killed_in_the_middle_leaves_a_prefix_and_no_hole() {
    let base = SimDisk::new();
    open(&base).close().unwrap();
    let keys: Vec<String> = (0..100).map(|n| long("key", n)).collect();
    let acknowledged = std::cell::Cell::new(false);
    let crash = CrashOptions {
        base,
        seeded_count: 2,
        inside_count: 3,
        ..CrashOptions::default()
    };
    let scenario = |disk: &SimDisk| {
        acknowledged.set(false);
        if let Ok(log) = options(&clock()).open_on(disk.dir())
            && let Ok(filter) = log.filter("f", small())
        {
            acknowledged.set(filter.observe_many(&keys).is_ok());
        }
    };
    let mut partial = 0;
    for_each_crash_point(&crash, scenario, |state| {
        let log = open(&state.disk);
        let known = filter(&log).check_many(&keys).unwrap();
        let known: Vec<bool> = known.into_iter().map(Result::unwrap).collect();
        let kept = known.iter().take_while(|known| **known).count();
        assert!(
            !known[kept..].contains(&true),
            "{state}: a hole behind {kept}"
        );
        assert!(
            kept == keys.len() || !acknowledged.get(),
            "{state}: {kept} of an answered batch"
        );
        partial += usize::from(kept > 0 && kept < keys.len());
        // The redelivered batch: each is new or known, and then all are known.
        let answers = filter(&log).observe_many(&keys).unwrap();
        for (index, answer) in answers.into_iter().enumerate() {
            assert_eq!(answer.unwrap().is_new(), index >= kept, "{state}: {index}");
        }
    });
    assert!(partial > 5, "{partial} kills in the middle");
}

#[test]
fn c34_after_a_commit_that_failed_in_any_way_nobody_is_told_new() {
    for op in [Op::Write, Op::Sync, Op::Allocate, Op::Rename] {
        for kind in [FaultKind::NoSpace, FaultKind::Io] {
            for sticky in [false, true] {
                let what = format!("{kind:?} of {op}, sticky {sticky}");
                let disk = SimDisk::new();
                let log = open(&disk);
                let pays = log.namespace::<NonRepeatable>("p", small()).unwrap();
                let mut started = new(pays.claim("k").unwrap()).start(b"sent").unwrap();
                let fault = if sticky {
                    Fault::sticky(disk.steps(), kind)
                } else {
                    Fault::once(disk.steps(), kind)
                };
                disk.fail(fault.only(op));
                let first = started.commit_with(Commit::without_outcome());
                let never_new = |verdict: idemlog::Result<ClaimVerdict<NonRepeatable>>| {
                    let fine = match &verdict {
                        Ok(ClaimVerdict::Busy { .. } | ClaimVerdict::InDoubt(_)) => first.is_err(),
                        Ok(ClaimVerdict::Duplicate(_)) => first.is_ok(),
                        Err(error) => error.kind() == ErrorKind::Poisoned,
                        _ => false,
                    };
                    assert!(fine, "{what}: {verdict:?} after {first:?}");
                };
                std::thread::scope(|scope| {
                    scope.spawn(|| never_new(pays.claim("k"))).join().unwrap();
                });
                never_new(pays.claim("k"));
                disk.clear_faults();
                let poisoned = log.health().poisoned.is_some();
                let again = started.commit_with(Commit::without_outcome());
                match &again {
                    Ok(CommitVerdict::Committed { .. }) => assert!(first.is_err(), "{what}"),
                    Ok(CommitVerdict::AlreadyCommitted) => assert!(first.is_ok(), "{what}"),
                    Ok(other) => panic!("{what}: {other:?}"),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Poisoned, "{what}");
                        assert!(poisoned, "{what}");
                    }
                }
                for disk in [
                    disk.after_kill(),
                    disk.after_power_cut(&mut PowerCut::drop_all()),
                ] {
                    let log = open(&disk);
                    let pays = log.namespace::<NonRepeatable>("p", small()).unwrap();
                    let verdict = pays.claim("k").unwrap();
                    let fine = match &verdict {
                        ClaimVerdict::Duplicate(_) => true,
                        ClaimVerdict::InDoubt(_) => again.is_err(),
                        _ => false,
                    };
                    assert!(fine, "{what}: {verdict:?} after a reopen");
                }
            }
        }
    }
}

/// The promise is about files, too: what a refused open leaves is what it found.
#[test]
fn c17_an_open_that_is_denied_leaves_all_segments_as_they_were() {
    let (disk, clock) = (SimDisk::new(), clock());
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let twin: Twin = (0..60).map(|n| (long("key", n), true)).collect();
    for key in twin.keys() {
        assert!(filter(&log).observe(key).unwrap().is_new());
    }
    let killed = disk.after_kill();
    let logs = |disk: &SimDisk| {
        let mut files = image(disk);
        files.retain(|name, _| name.starts_with("seg-") || name == "MANIFEST");
        files
    };
    let before = logs(&killed);
    let (held, dir) = denying(&killed, Op::Rename, "", Deny::Lasting);
    held.hold();
    let error = options(&clock).open_on(dir).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error:?}");
    assert!(logs(&killed) == before, "a denied open changed the log");
    let open = |disk: &SimDisk| options(&clock).open_on(disk.dir()).unwrap();
    aftermath(&killed, &open, &twin, "no longer denied");
}
