//! Callers that wait for a key: they get its outcome or inherit its claim, in order, at once, and
//! no longer than they asked for.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{Fault, FaultKind, Op, SimDisk};
use idemlog::{
    Change, Claim, ClaimOptions, ClaimVerdict, Commit, DedupLog, Durability, EffectClass,
    ErrorKind, Event, Failure, Fingerprint, KeyState, Namespace, NamespaceOptions, NonRepeatable,
    Options, Outcome, Probeable, Probed, Repeatable, Resolution, RunVerdict, ZeroFill,
};

const START_MS: u64 = 1_700_000_000_000;
/// Longer than any test: whoever waits that long is stuck.
const LONG: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(10);

/// A store with a clock that moves by hand, and its clock.
struct World {
    log: DedupLog,
    clock: Arc<ManualClock>,
    disk: SimDisk,
}

impl World {
    fn new() -> World {
        World::with(|options| options)
    }

    fn with(change: impl FnOnce(Options) -> Options) -> World {
        let disk = SimDisk::new();
        let clock = Arc::new(ManualClock::new(START_MS));
        let options = Options::new()
            .zero_fill(ZeroFill::Never)
            .clock(Arc::clone(&clock) as _);
        let log = change(options).open_on(disk.dir()).unwrap();
        World { log, clock, disk }
    }

    fn jobs<C: EffectClass>(&self) -> Namespace<C> {
        let options = NamespaceOptions::new().outcome_bytes_max(64).lease(LEASE);
        self.log.namespace(C::KIND.name(), options).unwrap()
    }

    /// Waits until so many callers wait.
    fn until_waiting(&self, count: u64) {
        until("waiters", || self.log.stats().waiters_count == count);
    }

    /// Claims the key on a thread of its own, waiting for it.
    fn waiter<C: EffectClass>(&self, key: &'static str, deadline: Duration) -> Waiter<C> {
        let jobs = self.jobs::<C>();
        Waiter::new(move || jobs.claim_wait(key, deadline))
    }
}

/// Waits for a condition that another thread makes true.
fn until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < LONG, "never: {what}");
        std::thread::yield_now();
    }
}

/// A call on a thread of its own.
struct Waiter<C: EffectClass>(Receiver<idemlog::Result<ClaimVerdict<C>>>);

impl<C: EffectClass> Waiter<C> {
    fn new(call: impl FnOnce() -> idemlog::Result<ClaimVerdict<C>> + Send + 'static) -> Self {
        let (told, answer) = mpsc::channel();
        std::thread::Builder::new()
            .spawn(move || told.send(call()).unwrap_or_default())
            .unwrap();
        Waiter(answer)
    }

    fn answer(&self) -> idemlog::Result<ClaimVerdict<C>> {
        self.0.recv_timeout(LONG).expect("a waiter is stuck")
    }

    fn verdict(&self) -> ClaimVerdict<C> {
        self.answer().unwrap()
    }

    fn is_waiting(&self) -> bool {
        matches!(self.0.try_recv(), Err(mpsc::TryRecvError::Empty))
    }
}

fn new<C: EffectClass>(verdict: ClaimVerdict<C>) -> Claim<C> {
    match verdict {
        ClaimVerdict::New(claim) => claim,
        other => panic!("{other:?}"),
    }
}

fn outcome<C: EffectClass>(verdict: ClaimVerdict<C>) -> Vec<u8> {
    match verdict {
        ClaimVerdict::Duplicate(done) => done.outcome.bytes().unwrap().to_vec(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn whoever_waits_gets_the_outcome() {
    let world = World::new();
    let mut claim = new(world.jobs::<Repeatable>().claim("k").unwrap());
    let waiters: Vec<_> = (0..3)
        .map(|_| world.waiter::<Repeatable>("k", LONG))
        .collect();
    world.until_waiting(3);
    assert!(claim.commit(b"done").unwrap() != claim.commit(b"done").unwrap());
    for waiter in waiters {
        assert_eq!(outcome(waiter.verdict()), b"done");
    }
    world.until_waiting(0);
}

#[test]
fn whoever_waits_gets_the_verdict_that_ends_the_key() {
    let world = World::new();
    let jobs = world.jobs::<NonRepeatable>();
    let claim = new(jobs.claim("rejected").unwrap());
    let waiter = world.waiter::<NonRepeatable>("rejected", LONG);
    world.until_waiting(1);
    assert!(claim.fail(Failure::permanent("no")).unwrap().is_applied());
    assert!(matches!(waiter.verdict(), ClaimVerdict::Rejected { error } if error == b"no"));

    let started = new(jobs.claim("doubt").unwrap()).start(b"").unwrap();
    let epoch = started.epoch();
    let waiter = world.waiter::<NonRepeatable>("doubt", LONG);
    world.until_waiting(1);
    assert!(started.fail(Failure::unknown("?")).unwrap().is_applied());
    assert!(matches!(waiter.verdict(), ClaimVerdict::InDoubt(_)));

    // Nobody waits for a key in doubt: it is the answer.
    let verdict = jobs.claim_wait("doubt", LONG).unwrap();
    assert!(matches!(verdict, ClaimVerdict::InDoubt(_)));
    assert!(
        jobs.resolve("doubt", epoch, Resolution::Abandon)
            .unwrap()
            .is_applied()
    );
    let verdict = jobs.claim_wait("doubt", LONG).unwrap();
    assert!(matches!(verdict, ClaimVerdict::Dead { .. }));
}

#[test]
fn a_release_a_drop_and_a_forget_hand_the_claim_on() {
    let world = World::new();
    let jobs = world.jobs::<Repeatable>();
    type End = fn(&Namespace<Repeatable>, Claim<Repeatable>);
    let ends: [End; 3] = [
        |_, claim| assert!(claim.fail(Failure::Release).unwrap().is_applied()),
        |_, claim| drop(claim),
        |jobs, claim| {
            assert!(jobs.forget("k", true).unwrap().is_applied());
            assert!(!claim.fail(Failure::Release).unwrap().is_applied());
        },
    ];
    for end in ends {
        let claim = new(jobs.claim("k").unwrap());
        let waiter = world.waiter::<Repeatable>("k", LONG);
        world.until_waiting(1);
        assert!(waiter.is_waiting());
        end(&jobs, claim);
        drop(new(waiter.verdict()));
    }
}

#[test]
fn a_failed_attempt_is_retried_when_its_pause_is_over() {
    let world = World::new();
    let jobs = world.jobs::<Repeatable>();
    let claim = new(jobs.claim("k").unwrap());
    let waiter = world.waiter::<Repeatable>("k", LONG);
    world.until_waiting(1);
    let failure = Failure::retryable(Duration::from_secs(5), "later");
    assert!(claim.fail(failure).unwrap().is_applied());
    world.clock.advance_ms(4_999);
    assert!(waiter.is_waiting());
    world.clock.advance_ms(1);
    match waiter.verdict() {
        ClaimVerdict::Retry { claim, previous } => {
            assert_eq!((claim.attempt(), previous.error), (2, b"later".to_vec()));
        }
        other => panic!("{other:?}"),
    }
    // A pause that the wall clock ends, as far as it is believed, ends the wait.
    let claim = new(jobs.claim("other").unwrap());
    let failure = Failure::retryable(Duration::from_secs(60), "later");
    assert!(claim.fail(failure).unwrap().is_applied());
    let waiter = world.waiter::<Repeatable>("other", LONG * 10);
    world.until_waiting(1);
    world.clock.set_wall_ms(START_MS + 5_000 + 60_000);
    world.log.maintain().unwrap();
    assert!(matches!(waiter.verdict(), ClaimVerdict::Retry { .. }));
}

#[test]
fn a_lease_that_lapses_is_taken_over_and_a_renewed_one_is_not() {
    let world = World::new();
    let jobs = world.jobs::<Repeatable>();
    let claim = new(jobs.claim("k").unwrap());
    let waiter = world.waiter::<Repeatable>("k", LONG);
    world.until_waiting(1);
    world.clock.advance_ms(9_999);
    assert!(claim.renew(LEASE).unwrap().is_applied());
    world.clock.advance_ms(9_999);
    assert!(waiter.is_waiting());
    world.clock.advance_ms(1);
    let ClaimVerdict::Takeover { claim: mine, .. } = waiter.verdict() else {
        panic!("the lease has lapsed");
    };
    assert!(mine.epoch() > claim.epoch());
    assert!(!claim.fail(Failure::Release).unwrap().is_applied());
}

/// Each class decides about a started owner that hangs as it does without a wait.
#[test]
fn a_started_owner_that_hangs_ends_a_wait_as_its_class_says() {
    let world = World::new();
    let jobs = world.jobs::<NonRepeatable>();
    let _hung = new(jobs.claim("k").unwrap()).start(b"").unwrap();
    let waiters: Vec<_> = (0..3)
        .map(|_| world.waiter::<NonRepeatable>("k", LONG))
        .collect();
    world.until_waiting(3);
    world.clock.advance_ms(10_000);
    for waiter in waiters {
        assert!(matches!(waiter.verdict(), ClaimVerdict::InDoubt(_)));
    }

    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let jobs = world.jobs::<Probeable>().with_probe(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        Probed::Applied(b"found".to_vec())
    });
    let _hung = new(jobs.claim("k").unwrap()).start(b"").unwrap();
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let jobs = jobs.clone();
            Waiter::new(move || jobs.claim_wait("k", LONG))
        })
        .collect();
    world.until_waiting(3);
    world.clock.advance_ms(10_000);
    for waiter in waiters {
        assert_eq!(outcome(waiter.verdict()), b"found");
    }
    assert_eq!(asked.load(Ordering::SeqCst), 1, "only the first asks");
}

#[test]
fn at_the_deadline_the_ordinary_verdict_is_returned() {
    let world = World::new();
    let jobs = world.jobs::<Repeatable>();
    let claim = new(jobs.claim("k").unwrap());
    let none = jobs.claim_wait("k", Duration::ZERO).unwrap();
    assert!(matches!(none, ClaimVerdict::Busy { attempt: 1, .. }));
    let waiters = [3, 2, 1].map(|s| world.waiter::<Repeatable>("k", Duration::from_secs(s)));
    world.until_waiting(3);
    for (seconds, waiter) in (1..=3).zip(waiters.iter().rev()) {
        world.clock.advance_ms(999);
        assert!(waiter.is_waiting());
        world.clock.advance_ms(1);
        let ClaimVerdict::Busy { lease_left, .. } = waiter.verdict() else {
            panic!("the owner is alive");
        };
        assert_eq!(lease_left, LEASE - Duration::from_secs(seconds));
    }
    let failure = Failure::retryable(Duration::from_secs(5), "later");
    assert!(claim.fail(failure).unwrap().is_applied());
    let waiter = world.waiter::<Repeatable>("k", Duration::from_secs(2));
    world.until_waiting(1);
    world.clock.advance_ms(2_000);
    let ClaimVerdict::Backoff { after, .. } = waiter.verdict() else {
        panic!("the pause is not over");
    };
    let (least, most) = (Duration::from_secs(3), Duration::from_secs(5));
    assert!((least..=most).contains(&after), "{after:?}");
    world.until_waiting(0);
}

/// The same by the clock of the system, where sleeps end by themselves.
#[test]
fn sleeps_end_by_the_clock_of_the_system() {
    let log = DedupLog::in_memory().unwrap();
    let options = NamespaceOptions::new().outcome_bytes_max(64);
    let jobs = log.namespace::<Repeatable>("j", options).unwrap();
    let lease = ClaimOptions::new().lease(Duration::from_millis(80));
    let _hung = new(jobs.claim_with("k", &lease).unwrap());
    let started = Instant::now();
    let early = jobs.claim_wait("k", Duration::from_millis(20)).unwrap();
    assert!(matches!(early, ClaimVerdict::Busy { .. }), "{early:?}");
    let verdict = jobs.claim_wait("k", LONG).unwrap();
    assert!(matches!(verdict, ClaimVerdict::Takeover { .. }));
    assert!(started.elapsed() >= Duration::from_millis(79));
}

#[test]
fn waiters_come_in_order_and_a_plain_claim_may_come_before_them() {
    let world = World::new();
    let jobs = world.jobs::<Repeatable>();
    let mut held = Some(new(jobs.claim("k").unwrap()));
    let waiters: Vec<_> = (1..=5)
        .map(|count| {
            let waiter = world.waiter::<Repeatable>("k", LONG);
            world.until_waiting(count);
            waiter
        })
        .collect();
    for (index, waiter) in waiters.iter().enumerate() {
        drop(held.take());
        held = Some(new(waiter.verdict()));
        world.until_waiting(4 - index as u64);
        assert!(waiters.iter().skip(index + 1).all(Waiter::is_waiting));
    }
    drop(held);
    // Those who wait do not keep a plain claim from trying.
    let held = new(jobs.claim("k").unwrap());
    let waiter = world.waiter::<Repeatable>("k", LONG);
    world.until_waiting(1);
    assert!(matches!(
        jobs.claim("k").unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    drop(held);
    drop(new(waiter.verdict()));
}

#[test]
fn another_fingerprint_is_told_at_once_also_behind_others() {
    let world = World::new();
    let jobs = world.jobs::<Repeatable>();
    let print = |text: &str| ClaimOptions::new().fingerprint(Fingerprint::of(text.as_bytes()));
    let _held = new(jobs.claim_with("k", &print("a")).unwrap());
    let first = world.waiter::<Repeatable>("k", LONG);
    world.until_waiting(1);
    let verdict = jobs.claim_wait_with("k", &print("b"), LONG).unwrap();
    assert!(matches!(verdict, ClaimVerdict::Mismatch));
    assert!(first.is_waiting());
}

#[test]
fn other_keys_and_namespaces_wake_nobody() {
    let world = World::new();
    let jobs = world.jobs::<Repeatable>();
    let _held = new(jobs.claim("k").unwrap());
    let waiter = world.waiter::<Repeatable>("k", LONG);
    world.until_waiting(1);
    drop(new(jobs.claim("other").unwrap()));
    drop(new(world.jobs::<NonRepeatable>().claim("k").unwrap()));
    assert!(waiter.is_waiting());
}

#[test]
fn a_batch_wakes_those_who_wait_for_its_keys() {
    let world = World::new();
    let jobs = world.jobs::<Repeatable>();
    let mut items: Vec<_> = ["a", "b"]
        .map(|key| (new(jobs.claim(key).unwrap()), Commit::new(key)))
        .into();
    let waiters = ["a", "b"].map(|key| world.waiter::<Repeatable>(key, LONG));
    world.until_waiting(2);
    for verdict in jobs.commit_many(&mut items).unwrap() {
        assert!(matches!(
            verdict.unwrap(),
            idemlog::CommitVerdict::Committed { .. }
        ));
    }
    for (waiter, key) in waiters.iter().zip(["a", "b"]) {
        assert_eq!(outcome(waiter.verdict()), key.as_bytes());
    }
}

#[test]
fn a_close_a_purge_and_a_poisoned_store_end_every_wait() {
    let kind = |waiter: Waiter<Repeatable>| waiter.answer().unwrap_err().kind();
    let world = World::new();
    let _held = new(world.jobs::<Repeatable>().claim("k").unwrap());
    let waiters = [0; 3].map(|_| world.waiter::<Repeatable>("k", LONG));
    world.until_waiting(3);
    world.log.clone().close().unwrap();
    assert!(
        waiters
            .into_iter()
            .all(|waiter| kind(waiter) == ErrorKind::Closed)
    );
    let late = world.jobs_after_close();
    assert_eq!(late, ErrorKind::Closed);

    let world = World::new();
    let _held = new(world.jobs::<Repeatable>().claim("k").unwrap());
    let waiters = [0; 3].map(|_| world.waiter::<Repeatable>("k", LONG));
    world.until_waiting(3);
    world.log.purge("repeatable", true).unwrap();
    assert!(
        waiters
            .into_iter()
            .all(|waiter| kind(waiter) == ErrorKind::Invalid)
    );

    for background in [true, false] {
        let world = World::with(|options| options.background(background));
        let jobs = world.jobs::<Repeatable>();
        let _held = new(jobs.claim("k").unwrap());
        let mut other = new(jobs.claim("other").unwrap());
        let waiters = [0; 3].map(|_| world.waiter::<Repeatable>("k", LONG));
        world.until_waiting(3);
        let steps = world.disk.steps();
        world
            .disk
            .fail(Fault::sticky(steps, FaultKind::Io).only(Op::Sync));
        assert!(other.commit(b"").is_err());
        assert!(
            waiters
                .into_iter()
                .all(|waiter| kind(waiter) == ErrorKind::Poisoned)
        );
    }
}

impl World {
    fn jobs_after_close(&self) -> ErrorKind {
        let options = NamespaceOptions::new();
        let opened = self.log.namespace::<Repeatable>("late", options);
        opened.unwrap_err().kind()
    }
}

/// The pause ends, and the write of the claim that the waiter would inherit fails: it is told, and
/// the key may be claimed again.
#[test]
fn a_waiter_whose_own_write_fails_is_told_so() {
    let world = World::with(|options| options.background(false));
    let options = NamespaceOptions::new()
        .outcome_bytes_max(64)
        .lease(LEASE)
        .attempts_max(9);
    let jobs = world.log.namespace::<Repeatable>("j", options).unwrap();
    let claim = new(jobs.claim("k").unwrap());
    let failure = Failure::retryable(Duration::from_secs(5), "later");
    assert!(claim.fail(failure).unwrap().is_applied());
    let waiting = jobs.clone();
    let waiter = Waiter::new(move || waiting.claim_wait("k", LONG));
    world.until_waiting(1);
    // The pause ends, and the waiter's own write is the one that fails: it is told.
    world
        .disk
        .fail(Fault::once(world.disk.steps(), FaultKind::NoSpace));
    world.clock.advance_ms(5_000);
    assert_eq!(waiter.answer().unwrap_err().kind(), ErrorKind::Full);
    assert!(matches!(
        jobs.claim("k").unwrap(),
        ClaimVerdict::Retry { .. }
    ));
}

#[test]
fn run_once_wait_runs_the_effect_once_and_gives_all_the_outcome() {
    let world = World::new();
    let runs = Arc::new(AtomicUsize::new(0));
    let (entered, inside) = mpsc::channel();
    let (go, gate) = mpsc::channel::<()>();
    let gate = Arc::new(Mutex::new(gate));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let jobs = world.jobs::<NonRepeatable>();
            let (runs, entered, gate) = (Arc::clone(&runs), entered.clone(), Arc::clone(&gate));
            std::thread::spawn(move || {
                jobs.run_once_wait("k", LONG, |attempt| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    entered.send(attempt.attempt()).unwrap();
                    gate.lock().unwrap().recv().unwrap();
                    Ok(b"paid".to_vec())
                })
                .unwrap()
            })
        })
        .collect();
    assert_eq!(inside.recv_timeout(LONG).unwrap(), 1);
    world.until_waiting(7);
    go.send(()).unwrap();
    let mut replayed = 0;
    for thread in threads {
        match thread.join().unwrap() {
            RunVerdict::Ran { outcome, .. } => assert_eq!(outcome, b"paid"),
            RunVerdict::Replayed(done) => {
                assert_eq!(done.outcome, Outcome::Kept(b"paid".to_vec()));
                replayed += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((runs.load(Ordering::SeqCst), replayed), (1, 7));
}

/// A small generator, so that a failure repeats from its seed.
fn is_unlucky(seed: u64, key: usize, attempt: u32) -> bool {
    let mut x = seed ^ (key as u64) << 32 ^ u64::from(attempt);
    for _ in 0..3 {
        x = (x ^ x >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    }
    x.is_multiple_of(100)
}

/// 64 threads race for the same keys; in one of a hundred attempts the winner fails. Each key has
/// one effect, and every loser gets its outcome, or inherits the claim.
#[test]
fn sixty_four_threads_race_and_each_key_has_one_effect() {
    const THREADS: usize = 64;
    const KEYS: usize = 150;
    let seed = crate::support::env_u64("IDEMLOG_SEED", 1);
    println!("seed={seed} (again with IDEMLOG_SEED={seed})");
    let log = Options::new()
        .segment_bytes(64 * 1024)
        .open_on(SimDisk::memory().dir())
        .unwrap();
    let options = NamespaceOptions::new().outcome_bytes_max(64);
    let jobs = log.namespace::<Repeatable>("j", options).unwrap();
    let effects: Arc<Vec<AtomicUsize>> = Arc::new((0..KEYS).map(|_| AtomicUsize::new(0)).collect());
    let failures = Arc::new(AtomicUsize::new(0));
    let (done, finished): (Sender<()>, _) = mpsc::channel();
    for thread in 0..THREADS {
        let (jobs, effects, failures) = (jobs.clone(), Arc::clone(&effects), Arc::clone(&failures));
        let done = done.clone();
        std::thread::spawn(move || {
            for key in (0..KEYS).map(|key| (key + thread % 4) % KEYS) {
                let name = format!("key-{key}");
                let verdict = jobs.run_once_wait(&name, LONG, |attempt| {
                    if is_unlucky(seed, key, attempt.attempt()) {
                        failures.fetch_add(1, Ordering::SeqCst);
                        return Err(Failure::retryable(Duration::from_millis(1), "unlucky"));
                    }
                    effects[key].fetch_add(1, Ordering::SeqCst);
                    Ok(name.clone().into_bytes())
                });
                match verdict.unwrap() {
                    RunVerdict::Ran { outcome, .. } => assert_eq!(outcome, name.as_bytes()),
                    RunVerdict::Replayed(done) => {
                        assert_eq!(done.outcome.bytes(), Some(name.as_bytes()));
                    }
                    RunVerdict::Failed { state } => {
                        assert!(matches!(state, KeyState::Failed { .. }), "{state:?}");
                    }
                    other => panic!("{key}: {other:?}"),
                }
            }
            done.send(()).unwrap();
        });
    }
    drop(done);
    for _ in 0..THREADS {
        finished
            .recv_timeout(Duration::from_secs(120))
            .expect("a thread is stuck or panicked");
    }
    let counts: Vec<_> = effects.iter().map(|n| n.load(Ordering::SeqCst)).collect();
    assert_eq!(counts, vec![1; KEYS]);
    assert!(failures.load(Ordering::SeqCst) > 0, "no attempt failed");
    assert_eq!(log.stats().waiters_count, 0);
}

#[test]
fn a_lease_is_renewed_up_to_its_ceiling_and_never_beyond() {
    for background in [true, false] {
        let world = World::with(|options| options.background(background));
        let jobs = world.jobs::<Repeatable>();
        let asked = ClaimOptions::new().auto_renew(Duration::from_secs(25));
        let hung = new(jobs.claim_with("k", &asked).unwrap());
        let left = || match jobs.get("k").unwrap() {
            KeyState::Pending { lease_left, .. } => lease_left,
            other => panic!("{other:?}"),
        };
        let pass = |ms| {
            world.clock.advance_ms(ms);
            if !background {
                world.log.maintain().unwrap();
            }
        };
        // Each renewal is a third of a lease after the last one.
        for second in 1..=4 {
            pass(3_333);
            let leased = LEASE.min(Duration::from_millis(25_000 - 3_333 * second));
            until("renewed", || left() == leased);
        }
        pass(3_333);
        until("renewed", || {
            left() == Duration::from_millis(25_000 - 5 * 3_333)
        });
        pass(25_000 - 5 * 3_333 - 1);
        assert_eq!(left(), Duration::from_millis(1));
        pass(1);
        let verdict = jobs.claim("k").unwrap();
        assert!(
            matches!(verdict, ClaimVerdict::Takeover { .. }),
            "{verdict:?}"
        );
        drop(hung);
    }
}

#[test]
fn renewals_end_with_the_claim_and_pass_to_what_it_becomes() {
    let world = World::with(|options| options.background(false));
    let records = || {
        world.clock.advance_ms(4_000);
        world.log.maintain().unwrap();
        world.log.stats().records_count
    };
    let jobs = world.jobs::<Probeable>();
    let mut claim = new(jobs.claim("k").unwrap());
    claim.keep_alive(LONG).unwrap();
    let before = records();
    assert_eq!(records(), before + 1);
    let started = claim.start(b"").unwrap();
    let before = records();
    assert_eq!(records(), before + 1, "the start goes on with it");
    // The owner does not know: from here on the probe decides, whatever a renewal would write.
    assert!(started.fail(Failure::unknown("?")).unwrap().is_applied());
    let before = records();
    assert_eq!(records(), before);

    let jobs = world.jobs::<Repeatable>();
    let asked = ClaimOptions::new().auto_renew(LONG);
    let mut claim = new(jobs.claim_with("committed", &asked).unwrap());
    drop(claim.commit(b"").unwrap());
    assert_eq!(
        claim.keep_alive(LONG).unwrap_err().kind(),
        ErrorKind::Invalid
    );
    drop(new(jobs.claim_with("dropped", &asked).unwrap()));
    let ticket = new(jobs.claim_with("detached", &asked).unwrap()).detach();
    let many = jobs.claim_many(&["a", "b"], &asked).unwrap();
    let before = records();
    assert_eq!(records(), before + 2, "those of the batch alone");
    drop(many);
    let change = jobs.renew_ticket(&ticket, LEASE).unwrap();
    assert!(change.is_applied(), "{change:?}");
    let before = records();
    assert_eq!(records(), before);
}

/// The effect, a probe and an event callback call back into the store while nothing of it is
/// locked.
#[test]
fn calls_back_into_the_store_work_or_are_typed_errors() {
    let told: Arc<Mutex<Vec<Event>>> = Arc::default();
    let from_event: Arc<OnceLock<Namespace<Repeatable>>> = Arc::default();
    let was_busy = Arc::new(AtomicBool::new(false));
    let world = World::with(|options| {
        let (told, jobs) = (Arc::clone(&told), Arc::clone(&from_event));
        let was_busy = Arc::clone(&was_busy);
        options.on_event(move |event| {
            if let Some(jobs) = jobs.get() {
                drop(new(jobs.claim_wait("of-the-callback", LONG).unwrap()));
                // Held elsewhere: no longer than asked, also on a thread of the store.
                let held = jobs.claim_wait("held", Duration::ZERO).unwrap();
                was_busy.store(matches!(held, ClaimVerdict::Busy { .. }), Ordering::SeqCst);
                jobs.run_once("event", |_| Ok(Vec::new()))
                    .unwrap()
                    .ack_advice();
            }
            told.lock().unwrap().push(event.clone());
        })
    });
    let jobs = world.jobs::<Repeatable>();
    from_event.set(jobs.clone()).unwrap();
    let _held = new(jobs.claim("held").unwrap());

    // From an effect: other keys, the same key, and lists.
    let (clock, inner) = (Arc::clone(&world.clock), jobs.clone());
    let log = world.log.clone();
    let verdict = jobs.run_once("outer", |_| {
        assert!(inner.claim("inner").unwrap().claim().is_some());
        let same = inner.claim_wait("outer", Duration::ZERO).unwrap();
        assert!(matches!(same, ClaimVerdict::Busy { .. }));
        let waiting = inner.clone();
        let own = Waiter::new(move || waiting.claim_wait("outer", Duration::from_secs(1)));
        until("waits", || log.stats().waiters_count == 1);
        clock.advance_ms(1_000);
        assert!(matches!(own.verdict(), ClaimVerdict::Busy { .. }));
        for pending in log.pending().unwrap() {
            assert!(matches!(
                inner.get(&pending.key).unwrap(),
                KeyState::Pending { .. }
            ));
        }
        log.maintain().unwrap();
        Ok(b"fine".to_vec())
    });
    assert!(matches!(verdict.unwrap(), RunVerdict::Ran { .. }));

    // From an event callback, which is told of the takeover.
    let hung = new(jobs.claim("hung").unwrap());
    world.clock.advance_ms(10_000);
    let renewed = _held.renew(LEASE).unwrap();
    assert!(renewed.is_applied());
    assert!(matches!(
        jobs.claim("hung").unwrap(),
        ClaimVerdict::Takeover { .. }
    ));
    until("told", || !told.lock().unwrap().is_empty());
    assert!(was_busy.load(Ordering::SeqCst));
    assert!(matches!(jobs.get("event").unwrap(), KeyState::Done(_)));
    drop(hung);
}

#[test]
fn a_probe_that_claims_its_own_key_gets_a_typed_error() {
    let world = World::new();
    let inner: Arc<OnceLock<Namespace<Probeable>>> = Arc::default();
    let probing = Arc::clone(&inner);
    let jobs = world.jobs::<Probeable>().with_probe(move |request| {
        let jobs = probing.get().unwrap();
        for own in [jobs.claim(request.key), jobs.claim_wait(request.key, LONG)] {
            let error = own.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        }
        assert!(jobs.claim("another").unwrap().claim().is_some());
        assert!(matches!(
            jobs.get(request.key).unwrap(),
            KeyState::Pending { .. }
        ));
        Probed::NotApplied
    });
    assert!(inner.set(jobs.clone()).is_ok());
    let _hung = new(jobs.claim("k").unwrap()).start(b"").unwrap();
    world.clock.advance_ms(10_000);
    for _ in 0..2 {
        let verdict = jobs.claim("k").unwrap();
        assert!(
            matches!(verdict, ClaimVerdict::Takeover { .. }),
            "{verdict:?}"
        );
        let _hung = verdict.claim().unwrap().start(b"").unwrap();
        world.clock.advance_ms(10_000);
    }
}

/// While an open reports its progress the store is not there yet: a second open is refused.
#[test]
fn a_progress_callback_that_opens_the_store_is_told_that_it_is_locked() {
    let disk = SimDisk::new();
    let open = |options: Options| {
        options
            .segment_bytes(4096)
            .background(false)
            .open_on(disk.dir())
    };
    let log = open(Options::new()).unwrap();
    let options = NamespaceOptions::new().outcome_bytes_max(0);
    let filter = log.filter("f", options.clone()).unwrap();
    for key in 0..200 {
        assert!(filter.observe(format!("key-{key}")).unwrap().is_new());
    }
    let kinds: Arc<Mutex<BTreeMap<String, usize>>> = Arc::default();
    let (told, inner) = (Arc::clone(&kinds), disk.after_kill());
    let outer = inner.clone();
    let opened = Options::new()
        .segment_bytes(4096)
        .background(false)
        .on_progress(move |_, _| {
            let again = Options::new().background(false).open_on(inner.dir());
            let kind = again.map_or_else(|e| format!("{:?}", e.kind()), |_| "opened".to_owned());
            *told.lock().unwrap().entry(kind).or_default() += 1;
        })
        .open_on(outer.dir())
        .unwrap();
    assert!(
        !opened
            .filter("f", options)
            .unwrap()
            .observe("key-0")
            .unwrap()
            .is_new()
    );
    let kinds = kinds.lock().unwrap();
    assert!(kinds.keys().eq(["Locked"]), "{kinds:?}");
}

/// A wait does not end with an answer that a power cut takes back.
#[test]
fn a_waiter_is_told_of_a_commit_only_when_it_is_durable() {
    let world = World::with(|options| options.background(false));
    let mut claim = new(world.jobs::<Repeatable>().claim("k").unwrap());
    let waiter = world.waiter::<Repeatable>("k", LONG);
    world.until_waiting(1);
    let commit = Commit::new("done").durability(Durability::Buffered);
    let flushes = world.log.stats().flushes_count;
    assert!(matches!(
        claim.commit_with(commit).unwrap(),
        idemlog::CommitVerdict::Committed { .. }
    ));
    assert_eq!(outcome(waiter.verdict()), b"done");
    assert_eq!(world.log.stats().flushes_count, flushes + 1);
    let after = world
        .disk
        .after_power_cut(&mut idemlog::testing::sim::PowerCut::drop_all());
    let log = Options::new()
        .background(false)
        .open_on(after.dir())
        .unwrap();
    let options = NamespaceOptions::new().outcome_bytes_max(64);
    let jobs = log.namespace::<Repeatable>("repeatable", options).unwrap();
    assert!(matches!(jobs.get("k").unwrap(), KeyState::Done(_)));
    let change: Change = jobs.forget("k", false).unwrap();
    assert!(change.is_applied());
}
