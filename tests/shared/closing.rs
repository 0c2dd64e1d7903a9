//! The ends of a store: who is the last one to close it, and who comes meanwhile.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use idemlog::testing::sim::{Fault, FaultKind, Op, PowerCut, SimDisk};
use idemlog::testing::{Dir, LockMode, ManualClock};
use idemlog::{
    ClaimVerdict, DedupLog, Durability, ErrorKind, Filter, KeyState, ObserveOptions, Observed,
    Repeatable, Retention,
};

use super::{Member, clock, key, options, small};
use crate::support::gate::{Gate, OpenAtEnd};
use crate::support::rigged::{Rigged, rigged};

/// How long somebody gets who is to wait, and would not.
const SOON: Duration = Duration::from_millis(30);

/// A directory whose manifest is replaced when the gate is open.
fn gated(disk: &SimDisk, gate: &Arc<Gate>) -> Arc<dyn Dir> {
    let gate = Arc::clone(gate);
    rigged(disk.process().dir(), move |op, name| {
        if op == Op::Rename && name == "MANIFEST.new" {
            gate.pass();
        }
        Ok(())
    })
}

fn wait_for(gate: &Gate, count: usize) {
    while gate.arrived.load(Ordering::SeqCst) < count {
        thread::yield_now();
    }
}

/// Story: a close that found the store closed by another thread let go of the directory while that
/// one still wrote the end of the log; so did the last guard.
#[test]
fn nobody_comes_in_while_a_close_is_under_way() {
    for shared in [false, true] {
        for by_guard in [false, true] {
            let (disk, clock) = (SimDisk::new(), clock());
            let gate = Arc::new(Gate::default());
            let opened = options(&clock).shared(shared).open_on(gated(&disk, &gate));
            let log = opened.unwrap();
            let filter = log.filter("f", small()).unwrap();
            let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
            assert!(filter.observe("k").unwrap().is_new());
            let guard = by_guard.then(|| jobs.claim("held").unwrap());
            gate.close();
            let arrived = gate.arrived.load(Ordering::SeqCst);
            let alone = || options(&clock).shared(false).open_on(disk.dir());
            thread::scope(|scope| {
                let _at_end = OpenAtEnd(&gate);
                let closing = scope.spawn(|| log.clone().close());
                wait_for(&gate, arrived + 1);
                let second = scope.spawn(|| match guard {
                    Some(guard) => {
                        drop(guard);
                        Ok(())
                    }
                    None => log.clone().close(),
                });
                thread::sleep(SOON);
                let what = format!("shared={shared} by_guard={by_guard}");
                let error = alone().expect_err(&what);
                assert_eq!(error.kind(), ErrorKind::Locked, "{what} {error}");
                gate.open();
                closing.join().unwrap().unwrap();
                second.join().unwrap().unwrap();
            });
            let log = alone().unwrap();
            assert!(log.open_report().clean);
            let filter = log.filter("f", small()).unwrap();
            assert_eq!(filter.get("k").unwrap(), KeyState::Seen);
        }
    }
}

fn manifests_count(disk: &SimDisk) -> usize {
    let steps = disk.step_log();
    let is_edit = |line: &&String| line.starts_with("rename MANIFEST.new");
    steps.iter().filter(is_edit).count()
}

/// Three close at the same moment: one of them writes the end of the log, whoever it is.
#[test]
fn of_many_closers_exactly_one_is_the_last() {
    let mut lasts = [0; 3];
    for round in 0..300 {
        let (disk, clock) = (SimDisk::new(), clock());
        let members: Vec<Member> = (0..3).map(|_| Member::open(&disk, &clock)).collect();
        for (n, member) in members.iter().enumerate() {
            assert!(member.filter.observe(format!("k{n}")).unwrap().is_new());
        }
        let before = manifests_count(&disk);
        let start = Barrier::new(members.len());
        let last = AtomicUsize::new(usize::MAX);
        thread::scope(|scope| {
            for (n, member) in members.into_iter().enumerate() {
                let (start, last, disk) = (&start, &last, &disk);
                scope.spawn(move || {
                    start.wait();
                    member.log.close().unwrap();
                    if manifests_count(disk) > before {
                        // Whoever sees the edit first has made it, or has closed before.
                        last.compare_exchange(usize::MAX, n, Ordering::SeqCst, Ordering::SeqCst)
                            .ok();
                    }
                });
            }
        });
        assert_eq!(manifests_count(&disk) - before, 1, "{round}");
        lasts[last.into_inner()] += 1;
        let log = options(&clock).shared(false).open_on(disk.dir()).unwrap();
        assert!(log.open_report().clean, "{round}");
        let filter = log.filter("f", small()).unwrap();
        for n in 0..3 {
            let seen = filter.observe(format!("k{n}")).unwrap();
            assert_eq!(seen, Observed::Duplicate, "{round} {n}");
        }
    }
    println!("last of three: {lasts:?}");
}

/// Whoever comes while the last one closes waits for its end, and is the next first one.
#[test]
fn an_opener_waits_for_the_last_one_to_close() {
    let (disk, clock) = (SimDisk::new(), clock());
    let gate = Arc::new(Gate::default());
    let log = options(&clock).open_on(gated(&disk, &gate)).unwrap();
    let filter = log.filter("f", small()).unwrap();
    assert!(filter.observe("k").unwrap().is_new());
    gate.close();
    let arrived = gate.arrived.load(Ordering::SeqCst);
    thread::scope(|scope| {
        let _at_end = OpenAtEnd(&gate);
        let closing = scope.spawn(|| log.clone().close());
        wait_for(&gate, arrived + 1);
        let opening: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| Member::open(&disk, &clock)))
            .collect();
        thread::sleep(SOON);
        assert!(opening.iter().all(|opening| !opening.is_finished()));
        gate.open();
        closing.join().unwrap().unwrap();
        let opened: Vec<Member> = opening.into_iter().map(|o| o.join().unwrap()).collect();
        let clean = |member: &&Member| member.log.open_report().clean;
        assert_eq!(opened.iter().filter(clean).count(), 1, "one is the first");
        for member in &opened {
            assert_eq!(member.filter.observe("k").unwrap(), Observed::Duplicate);
        }
        assert!(opened[0].filter.observe("more").unwrap().is_new());
        assert!(!opened[1].filter.observe("more").unwrap().is_new());
    });
}

/// Who was in the store when an opener asked whether it is alone, and is not when it asks whether
/// it may join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaves {
    /// One that had the store for itself; nobody ever shared it.
    Alone,
    /// One that had the store for itself; before it others shared it.
    AloneBehindOthers,
    /// The same, killed.
    AloneKilled,
    /// The last one of those who shared it.
    Last,
    /// The only one of those who shared it, killed.
    Killed,
    /// One of those who shared it, killed in its recovery behind a power cut.
    KilledInRecovery,
    /// The last one, of a store that a failed flush has poisoned.
    Poisoned,
}

/// Fills some segments, so that what comes next may be written over what was there.
fn fill(filter: &Filter, log: &DedupLog, clock: &ManualClock, name: &str) {
    for n in 0..400 {
        assert!(filter.observe(key(name, n)).unwrap().is_new());
        if n % 100 == 0 {
            log.maintain().unwrap();
        }
    }
    clock.advance_ms(2 * 3_600_000);
    for _ in 0..4 {
        log.confirm_time().unwrap();
        log.maintain().unwrap();
    }
}

/// An opener that is neither alone nor among others asks again.
///
/// Story: an opener that had found the store in use, and came back a moment later to join, joined
/// nobody: what the former ones had told each other was missing, or was of another time.
#[test]
fn an_opener_joins_nobody_who_has_just_left() {
    use Leaves::{Alone, AloneBehindOthers, AloneKilled, Killed, KilledInRecovery, Last, Poisoned};
    for leaves in [
        Alone,
        AloneBehindOthers,
        AloneKilled,
        Last,
        Killed,
        KilledInRecovery,
        Poisoned,
    ] {
        println!("{leaves:?}");
        let (mut disk, clock) = (SimDisk::seeded(5), clock());
        let hour = small().retention(Retention::For(Duration::from_secs(3600)));
        let power = ObserveOptions::new().durability(Durability::Power);
        if leaves != Alone {
            let former = Member::open(&disk, &clock);
            let hourly = former.log.filter("h", hour.clone()).unwrap();
            fill(&hourly, &former.log, &clock, "former");
            assert!(
                former
                    .filter
                    .observe_with("former", &power)
                    .unwrap()
                    .is_new()
            );
            if leaves == KilledInRecovery {
                disk = disk.after_power_cut(&mut PowerCut::keep_all());
            }
            former.kill();
        }
        let process = disk.process();
        let shared = matches!(leaves, Last | Killed | KilledInRecovery | Poisoned);
        if leaves == KilledInRecovery {
            // In the middle of what it writes before anybody else may come in.
            process.kill_at(disk.steps() + 3, 0);
        }
        let opened = options(&clock).shared(shared).open_on(process.dir());
        let before = opened.ok();
        if let Some(log) = &before {
            let filter = log.filter("f", small()).unwrap();
            let hourly = log.filter("h", hour.clone()).unwrap();
            fill(&hourly, log, &clock, "before");
            assert!(filter.observe("before").unwrap().is_new());
        }
        assert_eq!(before.is_none(), leaves == KilledInRecovery);
        if leaves == Poisoned {
            disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
            assert!(before.as_ref().unwrap().sync().is_err());
        }
        // It is still there when the opener asks for the first time.
        let stays = match leaves {
            KilledInRecovery => Some(
                disk.process()
                    .dir()
                    .lock("LOCK", true, "")
                    .unwrap()
                    .unwrap(),
            ),
            _ => None,
        };
        let leaver = Mutex::new(Some((before, stays)));
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let dir = Rigged::new(disk.process().dir(), |_, _| Ok(())).on_lock(
            move |name, mode, is_locked| {
                let denied = [
                    // By one who is alone, and by others.
                    ("LOCK", LockMode::Shared, false),
                    ("LOCK.members", LockMode::Exclusive, false),
                ];
                if denied.contains(&(name, mode, is_locked))
                    && let Some((before, stays)) = leaver.lock().unwrap().take()
                {
                    count.fetch_add(1, Ordering::SeqCst);
                    if matches!(leaves, AloneKilled | Killed) {
                        process.kill();
                    }
                    if let Some(before) = before {
                        let closed = before.close();
                        assert_eq!(
                            closed.is_ok(),
                            matches!(leaves, Alone | AloneBehindOthers | Last)
                        );
                    }
                    drop(stays);
                }
            },
        );
        let opened = options(&clock).open_on(dir.dir());
        let log = opened.unwrap_or_else(|error| panic!("{leaves:?} {error}"));
        assert_eq!(asked.load(Ordering::SeqCst), 1, "{leaves:?}");
        let other = Member::open(&disk, &clock);
        let filter = log.filter("f", small()).unwrap();
        let mut known: Vec<String> = Vec::new();
        if leaves != KilledInRecovery {
            known.push("before".into());
        }
        if leaves != Alone {
            known.push("former".into());
        }
        for n in 0..300 {
            known.push(key("after", n));
            let (one, two) = if n % 2 == 0 {
                (&filter, &other.filter)
            } else {
                (&other.filter, &filter)
            };
            assert!(
                one.observe(key("after", n)).unwrap().is_new(),
                "{leaves:?} {n}"
            );
            assert!(
                !two.observe(key("after", n)).unwrap().is_new(),
                "{leaves:?} {n}"
            );
        }
        assert_eq!(log.stats().torn_writes_count, 0, "{leaves:?}");
        log.close().unwrap();
        other.kill();
        // Nobody has closed it: it says so, and all of it is there.
        let alone = options(&clock).shared(false).open_on(disk.dir()).unwrap();
        assert!(!alone.open_report().clean, "{leaves:?}");
        let filter = alone.filter("f", small()).unwrap();
        for key in known {
            let seen = filter.observe(&key).unwrap();
            assert_eq!(seen, Observed::Duplicate, "{leaves:?} {key}");
        }
        let jobs = alone.namespace::<Repeatable>("j", small()).unwrap();
        assert!(matches!(jobs.claim("k").unwrap(), ClaimVerdict::New(_)));
    }
}
