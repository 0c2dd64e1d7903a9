//! A whole store under a scheduler that tries interleavings: callers, rolls, seals and merges meet
//! at the locks of the engine and of the syncer. Built only with `--cfg idemlog_shuttle`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use shuttle::rand::Rng;
use shuttle::thread;

use crate::clock::ManualClock;
use crate::log::sync::primitives::explore;
use crate::vfs::sim::{Fault, FaultKind, Op, PowerCut, SimDisk};
use crate::{
    Applied, Claim, ClaimVerdict, DedupLog, Durability, ErrorKind, Failure, Filter, KeyState,
    NamespaceOptions, ObserveOptions, Observed, Options, Repeatable, Result, ZeroFill,
};

const KEYS: u32 = 3;

fn open(disk: &SimDisk) -> DedupLog {
    let clock = Arc::new(ManualClock::new(1_700_000_000_000));
    let options = Options::new().segment_bytes(4096).background(false);
    let options = options.zero_fill(ZeroFill::Never).clock(clock);
    options.open_on(disk.dir()).unwrap()
}

fn filter(log: &DedupLog) -> Filter {
    let options = NamespaceOptions::new().outcome_bytes_max(0);
    log.filter("f", options).unwrap()
}

/// A store whose active segment is so full that one of the next records rolls it.
fn nearly_full(disk: &SimDisk) -> (DedupLog, Filter) {
    let log = open(disk);
    let filter = filter(&log);
    for n in 0..17 {
        assert!(filter.observe(format!("{n:0>180}")).unwrap().is_new());
    }
    (log, filter)
}

fn key(n: u32) -> String {
    format!("key-{n:0>170}")
}

fn join(all: Vec<thread::JoinHandle<()>>) {
    all.into_iter().for_each(|one| one.join().unwrap());
}

fn after_power_cut(disk: &SimDisk) -> (DedupLog, Filter) {
    let log = open(&disk.after_power_cut(&mut PowerCut::drop_all()));
    let filter = filter(&log);
    (log, filter)
}

#[test]
fn each_key_is_new_once_while_segments_roll_and_are_sealed() {
    explore("observe, roll, seal", || {
        let disk = SimDisk::new();
        let (log, filter) = nearly_full(&disk);
        let news: Arc<Vec<AtomicU32>> = Arc::new((0..KEYS).map(|_| AtomicU32::new(0)).collect());
        let mut all: Vec<_> = (0..2)
            .map(|start| {
                let (filter, news) = (filter.clone(), Arc::clone(&news));
                thread::spawn(move || {
                    for n in (0..KEYS).map(|n| (n + start) % KEYS) {
                        if filter.observe(key(n)).unwrap() == Observed::New {
                            news[n as usize].fetch_add(1, Ordering::SeqCst);
                        }
                    }
                })
            })
            .collect();
        let keeper = log.clone();
        all.push(thread::spawn(move || keeper.maintain().unwrap()));
        join(all);
        let counts: Vec<u32> = news.iter().map(|n| n.load(Ordering::SeqCst)).collect();
        assert_eq!(counts, vec![1; KEYS as usize]);
        let (_log, filter) = after_power_cut(&disk);
        for n in 0..KEYS {
            assert_eq!(filter.observe(key(n)).unwrap(), Observed::Duplicate, "{n}");
        }
    });
}

/// Whether a call promised its key, and whether it said that nothing is there.
fn told(observed: Result<Observed>) -> (bool, bool) {
    match observed {
        Ok(_) => (true, false),
        Err(error) => (false, error.applied() == Applied::No),
    }
}

/// One call of the disk fails while callers and the upkeep are at it. `Process` is judged by what
/// a kill leaves, `Power` by what a power cut leaves.
fn one_call_fails(name: &str, level: Durability) {
    explore(name, move || {
        let disk = SimDisk::new();
        let (log, filter) = nearly_full(&disk);
        let at = disk.steps() + shuttle::rand::thread_rng().gen_range(0..8);
        disk.fail(Fault::once(at, FaultKind::Io));
        let fates = Arc::new(std::sync::Mutex::new(Vec::new()));
        let mut all: Vec<_> = (0..KEYS)
            .map(|n| {
                let (filter, fates) = (filter.clone(), Arc::clone(&fates));
                thread::spawn(move || {
                    let asked = ObserveOptions::new().durability(level);
                    let fate = told(filter.observe_with(key(n), &asked));
                    fates.lock().unwrap().push((n, fate));
                })
            })
            .collect();
        let keeper = log.clone();
        all.push(thread::spawn(move || drop(keeper.maintain())));
        join(all);
        disk.clear_faults();
        let left = match level {
            Durability::Power => disk.after_power_cut(&mut PowerCut::drop_all()),
            _ => disk.after_kill(),
        };
        let log = open(&left);
        let filter = self::filter(&log);
        for (n, (promised, never)) in fates.lock().unwrap().drain(..) {
            let found = filter.get(key(n)).unwrap() == KeyState::Seen;
            assert!(found || !promised, "{n} was promised");
            assert!(!found || !never, "{n} was refused");
        }
    });
}

#[test]
fn a_failing_call_of_the_disk_has_one_fate_for_each_caller() {
    one_call_fails("observe at Power, the disk fails", Durability::Power);
}

#[test]
fn a_failing_write_is_told_to_everybody_whose_record_it_took() {
    one_call_fails("observe at Process, the disk fails", Durability::Process);
}

#[test]
fn one_of_two_claimants_commits() {
    explore("claim, commit, merge", || {
        let disk = SimDisk::new();
        let (log, _filter) = nearly_full(&disk);
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        let jobs = log.namespace::<Repeatable>("j", options.clone()).unwrap();
        let effects = Arc::new(AtomicU32::new(0));
        let mut all: Vec<_> = (0..2)
            .map(|_| {
                let (jobs, effects) = (jobs.clone(), Arc::clone(&effects));
                thread::spawn(move || match jobs.claim("job").unwrap() {
                    ClaimVerdict::New(mut claim) => {
                        effects.fetch_add(1, Ordering::SeqCst);
                        drop(claim.commit(b"").unwrap());
                    }
                    ClaimVerdict::Busy { .. } | ClaimVerdict::Duplicate(_) => {}
                    other => panic!("{other:?}"),
                })
            })
            .collect();
        let keeper = log.clone();
        all.push(thread::spawn(move || keeper.maintain().unwrap()));
        join(all);
        assert_eq!(effects.load(Ordering::SeqCst), 1);
        let log = open(&disk.after_power_cut(&mut PowerCut::drop_all()));
        let jobs = log.namespace::<Repeatable>("j", options.clone()).unwrap();
        assert!(matches!(
            jobs.claim("job").unwrap(),
            ClaimVerdict::Duplicate(_)
        ));
    });
}

/// Waits until the test is over: the clock stands still, so only a ring ends it. One that is lost
/// is a deadlock, which the scheduler reports.
const LONG: Duration = Duration::from_secs(60);

/// The owner ends in one of several ways while two wait and one tries once: whoever waits gets the
/// outcome, or inherits the claim, and the effect happens once.
#[test]
fn waiters_get_the_outcome_or_inherit_the_claim() {
    explore("claim_wait", || {
        let disk = SimDisk::new();
        let log = open(&disk);
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        let jobs = log.namespace::<Repeatable>("j", options).unwrap();
        let effects = Arc::new(AtomicU32::new(0));
        let commit = |mut claim: Claim<Repeatable>, effects: &AtomicU32| {
            effects.fetch_add(1, Ordering::SeqCst);
            drop(claim.commit(b"").unwrap());
        };
        let owner = jobs.claim("job").unwrap().claim().unwrap();
        let mut all: Vec<_> = (0..2)
            .map(|_| {
                let (jobs, effects) = (jobs.clone(), Arc::clone(&effects));
                thread::spawn(move || match jobs.claim_wait("job", LONG).unwrap() {
                    ClaimVerdict::New(claim) | ClaimVerdict::Retry { claim, .. } => {
                        commit(claim, &effects);
                    }
                    ClaimVerdict::Duplicate(_) => {}
                    other => panic!("{other:?}"),
                })
            })
            .collect();
        let once = jobs.clone();
        all.push(thread::spawn(move || drop(once.claim("job").unwrap())));
        match shuttle::rand::thread_rng().gen_range(0..4) {
            0 => commit(owner, &effects),
            1 => drop(owner),
            2 => {
                let failure = Failure::retryable(Duration::ZERO, "");
                assert!(owner.fail(failure).unwrap().is_applied());
            }
            _ => assert!(jobs.forget("job", true).unwrap().is_applied()),
        }
        join(all);
        assert_eq!(effects.load(Ordering::SeqCst), 1);
        assert_eq!(log.stats().waiters_count, 0);
    });
}

/// A close, and a flush that fails, end every wait, whenever they come.
fn a_wait_ends(name: &str, end: impl Fn(&SimDisk, DedupLog) -> ErrorKind + Send + Sync + 'static) {
    explore(name, move || {
        let disk = SimDisk::new();
        let log = open(&disk);
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        let jobs = log.namespace::<Repeatable>("j", options).unwrap();
        let held = jobs.claim("job").unwrap().claim().unwrap();
        let all: Vec<_> = (0..2)
            .map(|_| {
                let jobs = jobs.clone();
                thread::spawn(move || jobs.claim_wait("job", LONG).unwrap_err().kind())
            })
            .collect();
        let expected = end(&disk, log);
        for waiter in all {
            assert_eq!(waiter.join().unwrap(), expected);
        }
        drop(held);
    });
}

#[test]
fn a_close_ends_every_wait() {
    a_wait_ends("claim_wait, close", |_, log| {
        log.close().unwrap();
        ErrorKind::Closed
    });
}

#[test]
fn a_failed_flush_ends_every_wait() {
    a_wait_ends("claim_wait, poison", |disk, log| {
        let filter = filter(&log);
        disk.fail(Fault::sticky(disk.steps(), FaultKind::Io).only(Op::Sync));
        assert!(filter.observe("k").is_err());
        ErrorKind::Poisoned
    });
}
