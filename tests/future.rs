//! Calls of tasks: the same answers as for threads, without blocking who polls; and what is left
//! of a call that is dropped half-way.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{Fault, FaultKind, Op, PowerCut, SimDisk};
use idemlog::{
    Change, Claim, ClaimOptions, ClaimVerdict, Commit, CommitVerdict, DedupLog, Durability,
    EffectClass, ErrorKind, Failure, Filter, KeyState, LockVerdict, Namespace, NamespaceOptions,
    NonRepeatable, ObserveOptions, Observed, Options, Probeable, Probed, Repeatable, Resolution,
    RunVerdict, ZeroFill,
};

use crate::support::env_u64;
use crate::support::gate::{Gate, GatedDir};

const START_MS: u64 = 1_700_000_000_000;
const LONG: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(10);

/// A store on a disk whose flushes can be held up, with a clock that moves by hand.
struct World {
    /// First: a test that fails must not wait at the gate for ever.
    _opens: Opens,
    log: DedupLog,
    disk: SimDisk,
    gate: Arc<Gate>,
    clock: Arc<ManualClock>,
}

/// Opens the gate when it is dropped.
struct Opens(Arc<Gate>);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.open();
    }
}

impl World {
    fn new(background: bool) -> World {
        let (disk, gate) = (SimDisk::new(), Arc::<Gate>::default());
        let clock = Arc::new(ManualClock::new(START_MS));
        let dir = GatedDir {
            dir: disk.dir(),
            gate: Arc::clone(&gate),
        };
        let log = options(background, &clock).open_on(Arc::new(dir)).unwrap();
        World {
            _opens: Opens(Arc::clone(&gate)),
            log,
            disk,
            gate,
            clock,
        }
    }

    fn jobs<C: EffectClass>(&self) -> Namespace<C> {
        jobs(&self.log)
    }

    fn filter(&self) -> Filter {
        filter(&self.log)
    }

    /// What the next opener finds after the power has failed.
    fn after_power_cut(&self) -> DedupLog {
        let disk = self.disk.after_power_cut(&mut PowerCut::drop_all());
        options(false, &self.clock).open_on(disk.dir()).unwrap()
    }
}

fn options(background: bool, clock: &Arc<ManualClock>) -> Options {
    Options::new()
        .background(background)
        .zero_fill(ZeroFill::Never)
        // Nothing is flushed but for those who wait.
        .sync_interval(Duration::from_secs(3600))
        .clock(Arc::clone(clock) as _)
}

fn jobs<C: EffectClass>(log: &DedupLog) -> Namespace<C> {
    let options = NamespaceOptions::new().outcome_bytes_max(64).lease(LEASE);
    log.namespace(C::KIND.name(), options).unwrap()
}

fn filter(log: &DedupLog) -> Filter {
    let options = NamespaceOptions::new().outcome_bytes_max(0);
    log.filter("f", options).unwrap()
}

fn new<C: EffectClass>(verdict: ClaimVerdict<C>) -> Claim<C> {
    match verdict {
        ClaimVerdict::New(claim) => claim,
        other => panic!("{other:?}"),
    }
}

fn poll<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// An observation that owns what it needs.
fn observing(filter: &Filter, key: impl Into<String>) -> Observing {
    let (filter, key) = (filter.clone(), key.into());
    Box::pin(async move { filter.observe_async(key).await })
}

type Observing = Pin<Box<dyn Future<Output = idemlog::Result<Observed>> + Send>>;

fn until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < LONG, "never: {what}");
        std::thread::yield_now();
    }
}

fn tokio() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .build()
        .unwrap()
}

/// Runs a task on a runtime of one thread; one that is stuck fails the test.
fn within<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> T {
    let (told, answer) = mpsc::channel();
    std::thread::spawn(move || told.send(smol::block_on(task)).unwrap_or_default());
    answer
        .recv_timeout(LONG)
        .expect("a task is stuck or panicked")
}

fn is_committed(verdict: &CommitVerdict) -> bool {
    matches!(verdict, CommitVerdict::Committed { .. })
}

fn word<C: EffectClass>(claimed: &idemlog::Result<ClaimVerdict<C>>) -> &'static str {
    match claimed {
        Ok(ClaimVerdict::New(_)) => "new",
        Ok(ClaimVerdict::Duplicate(_)) => "old",
        Ok(ClaimVerdict::Busy { .. }) => "busy",
        Err(error) if error.kind() == ErrorKind::Invalid => "invalid",
        other => panic!("{other:?}"),
    }
}

/// Each call, once, by its asynchronous name.
async fn every_call(log: DedupLog) {
    let (filter, repeatable) = (filter(&log), jobs::<Repeatable>(&log));
    assert_eq!(filter.observe_async("a").await.unwrap(), Observed::New);
    assert_eq!(
        filter.observe_async("a").await.unwrap(),
        Observed::Duplicate
    );
    let buffered = ObserveOptions::new().durability(Durability::Buffered);
    assert!(
        filter
            .observe_with_async("b", &buffered)
            .await
            .unwrap()
            .is_new()
    );
    let many = filter
        .observe_many_async(&["a", "b", "c", "c", ""])
        .await
        .unwrap();
    let many: Vec<_> = many
        .into_iter()
        .map(|one| one.map_err(|e| e.kind()))
        .collect();
    let (old, fresh) = (Ok(Observed::Duplicate), Ok(Observed::New));
    assert_eq!(many, [old, old, fresh, old, Err(ErrorKind::Invalid)]);
    let error = filter.observe_async("").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);

    let mut claim = new(repeatable.claim_async("a").await.unwrap());
    assert!(claim.renew_async(LEASE).await.unwrap().is_applied());
    let busy = repeatable.claim_async("a").await.unwrap();
    assert!(matches!(busy, ClaimVerdict::Busy { .. }));
    assert!(is_committed(&claim.commit_async(b"one").await.unwrap()));
    let again = claim.commit_async(b"one").await.unwrap();
    assert_eq!(again, CommitVerdict::AlreadyCommitted);
    let other = claim.commit_with_async(Commit::new("two")).await.unwrap();
    assert!(matches!(other, CommitVerdict::Conflict { .. }));
    let old = repeatable.claim_async("a").await.unwrap();
    assert!(matches!(old, ClaimVerdict::Duplicate(done) if done.outcome.bytes() == Some(b"one")));
    assert!(
        repeatable
            .forget_async("a", false)
            .await
            .unwrap()
            .is_applied()
    );
    let options = ClaimOptions::new().lease(LEASE * 2);
    let claim = new(repeatable.claim_with_async("a", &options).await.unwrap());
    let failed = claim.fail_async(Failure::Release).await.unwrap();
    assert_eq!(failed, Change::Applied(KeyState::Absent));
    drop(new(repeatable.claim_wait_async("a", LONG).await.unwrap()));

    let mut items = Vec::new();
    for key in ["m", "n"] {
        let claim = new(repeatable.claim_async(key).await.unwrap());
        items.push((claim, Commit::new(key)));
    }
    items.push((
        new(repeatable.claim_async("o").await.unwrap()),
        Commit::new([0; 65]),
    ));
    let many = repeatable.commit_many_async(&mut items).await.unwrap();
    let many: Vec<_> = many
        .into_iter()
        .map(|one| one.is_ok_and(|v| is_committed(&v)))
        .collect();
    assert_eq!(many, [true, true, false]);
    drop(items);
    assert_eq!(repeatable.get_async("o").await.unwrap(), KeyState::Absent);
    let state = repeatable.get_async("m").await.unwrap();
    assert!(matches!(state, KeyState::Done(_)), "{state:?}");
    assert_eq!(filter.get_async("a").await.unwrap(), KeyState::Seen);
    let error = filter.get_async("").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);

    let (keys, options) = (["m", "v", "v", ""], ClaimOptions::new());
    let many = repeatable.claim_many_async(&keys, &options).await.unwrap();
    let words: Vec<_> = many.iter().map(word).collect();
    assert_eq!(words, ["old", "new", "busy", "invalid"]);
    drop(many);
    assert_eq!(repeatable.get_async("v").await.unwrap(), KeyState::Absent);
    let settled = NamespaceOptions::new().settle(Duration::ZERO);
    let asked = log.namespace::<Probeable>("asked", settled).unwrap();
    let asked = asked.with_probe(|_| Probed::Applied(b"found".to_vec()));
    let started = new(asked.claim_async("w").await.unwrap());
    let started = started.start_async(b"").await.unwrap();
    let failed = started.fail_async(Failure::unknown("?")).await.unwrap();
    assert!(failed.is_applied());
    let many = asked.claim_many_async(&["x", "w"], &options).await.unwrap();
    let words: Vec<_> = many.iter().map(word).collect();
    assert_eq!(words, ["new", "old"]);

    let payments = jobs::<NonRepeatable>(&log);
    let started = new(payments.claim_async("p").await.unwrap())
        .start_async(b"sent")
        .await;
    let epoch = started.as_ref().unwrap().epoch();
    let doubt = started
        .unwrap()
        .fail_async(Failure::unknown("?"))
        .await
        .unwrap();
    assert!(matches!(doubt, Change::Applied(KeyState::InDoubt(_))));
    let found = Resolution::Applied(b"paid".to_vec());
    assert!(
        payments
            .resolve_async("p", epoch, found)
            .await
            .unwrap()
            .is_applied()
    );
    let started = new(payments.claim_async("q").await.unwrap());
    let mut started = started.start_async(b"").await.unwrap();
    assert!(is_committed(&started.commit_async(b"paid").await.unwrap()));
    let lost = new(payments.claim_async("r").await.unwrap());
    assert!(payments.forget_async("r", true).await.unwrap().is_applied());
    assert!(lost.start_async(b"").await.is_err());

    let ran = payments
        .run_once_async("s", |attempt| async move {
            assert_eq!((attempt.key(), attempt.attempt()), (b"s".as_slice(), 1));
            Ok(b"done".to_vec())
        })
        .await;
    assert!(matches!(ran.unwrap(), RunVerdict::Ran { commit, .. } if is_committed(&commit)));
    let effect = |_| async { panic!("it ran before") };
    let old = payments
        .run_once_wait_async("s", LONG, effect)
        .await
        .unwrap();
    assert!(matches!(old, RunVerdict::Replayed(_)));
    let effect = |_| async { Err(Failure::permanent("no")) };
    let failed = repeatable.run_once_async("t", effect).await.unwrap();
    assert!(matches!(
        failed,
        RunVerdict::Failed {
            state: KeyState::Rejected { .. }
        }
    ));
    let effect = |_| async { Ok(vec![0; 65]) };
    let error = repeatable.run_once_async("u", effect).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(matches!(repeatable.get("u").unwrap(), KeyState::Done(_)));

    let locks = log.locks("l").unwrap();
    let lock = locks
        .lock_wait_async("k", LEASE, LONG)
        .await
        .unwrap()
        .lock()
        .unwrap();
    let busy = locks
        .lock_wait_async("k", LEASE, Duration::ZERO)
        .await
        .unwrap();
    assert!(matches!(busy, LockVerdict::Busy { .. }));
    assert!(lock.unlock().unwrap().is_applied());
}

#[test]
fn every_call_answers_on_tokio_and_on_smol() {
    for background in [true, false] {
        let log = World::new(background).log;
        within(every_call(log));
        let log = World::new(background).log;
        let runtime = tokio();
        runtime.block_on(runtime.spawn(every_call(log))).unwrap();
    }
}

/// Without the thread that flushes, a future leads its flush itself: it is ready when first polled.
#[test]
fn without_background_threads_a_future_leads_its_own_flush() {
    let world = World::new(false);
    let (filter, flushes) = (world.filter(), || world.log.stats().flushes_count);
    let before = flushes();
    let observing = pin!(filter.observe_async("a"));
    assert!(matches!(poll(observing), Poll::Ready(Ok(Observed::New))));
    assert_eq!(flushes(), before + 1);
}

/// A hundred tasks of one thread commit while the disk does not answer: the thread goes on, and
/// one flush, or two, serves them all, with a thread that waits beside them.
#[test]
fn tasks_and_threads_share_flushes_and_nobody_who_polls_is_blocked() {
    let world = World::new(true);
    let (filter, gate) = (world.filter(), Arc::clone(&world.gate));
    world.log.sync().unwrap();
    let before = world.log.stats().flushes_count;
    gate.close();
    let arrived = gate.arrived.load(Ordering::SeqCst);
    let mut tasks: Vec<_> = (0..100)
        .map(|n| observing(&filter, format!("key-{n}")))
        .collect();
    let is_ready = |task: &mut Observing| poll(task.as_mut()).is_ready();
    assert_eq!(
        tasks
            .iter_mut()
            .filter_map(|task| is_ready(task).then_some(()))
            .count(),
        0
    );
    until("the flush thread leads", || {
        gate.arrived.load(Ordering::SeqCst) > arrived
    });
    let blocked = {
        let filter = filter.clone();
        std::thread::spawn(move || filter.observe("of a thread").unwrap())
    };
    until("appended", || world.log.stats().records_count == 101);
    // Polled again, they still wait, and nobody else has led.
    assert!(!tasks.iter_mut().any(is_ready));
    assert_eq!(gate.arrived.load(Ordering::SeqCst), arrived + 1);
    gate.open();
    let observed = within(async move {
        let mut observed = Vec::new();
        for task in tasks {
            observed.push(task.await.unwrap());
        }
        observed
    });
    assert_eq!(observed, vec![Observed::New; 100]);
    assert!(blocked.join().unwrap().is_new());
    let flushes = world.log.stats().flushes_count - before;
    assert!(flushes <= 3, "{flushes}");
    assert!(!filter.observe("key-7").unwrap().is_new());
}

/// A thread that leads serves the tasks that came before its flush.
#[test]
fn a_thread_that_leads_serves_tasks() {
    let world = World::new(true);
    let (filter, gate) = (world.filter(), Arc::clone(&world.gate));
    world.log.sync().unwrap();
    gate.close();
    let arrived = gate.arrived.load(Ordering::SeqCst);
    let leader = {
        let filter = filter.clone();
        std::thread::spawn(move || filter.observe("thread").unwrap())
    };
    until("leads", || gate.arrived.load(Ordering::SeqCst) > arrived);
    let mut task = observing(&filter, "thread");
    assert!(
        poll(task.as_mut()).is_pending(),
        "a duplicate of what is not durable waits"
    );
    gate.open();
    assert!(leader.join().unwrap().is_new());
    assert_eq!(within(task).unwrap(), Observed::Duplicate);
}

/// A commit is in the log after the first poll, or not at all.
#[test]
fn a_dropped_commit_is_made_if_it_was_polled_and_not_if_it_was_not() {
    for polled in [true, false] {
        let world = World::new(true);
        let repeatable = world.jobs::<Repeatable>();
        let mut claim = new(repeatable.claim("k").unwrap());
        world.log.sync().unwrap();
        world.gate.close();
        let mut commit = Box::pin(claim.commit_async(b"done"));
        if polled {
            assert!(poll(commit.as_mut()).is_pending());
        }
        drop(commit);
        if !polled {
            let state = repeatable.get("k").unwrap();
            assert!(matches!(state, KeyState::Pending { .. }), "{state:?}");
        }
        let fenced = world.log.stats().fenced_count;
        drop(claim);
        world.gate.open();
        world.log.sync().unwrap();
        let state = jobs::<Repeatable>(&world.after_power_cut())
            .get("k")
            .unwrap();
        if polled {
            assert!(matches!(state, KeyState::Done(_)), "{state:?}");
        } else {
            assert_eq!(
                state,
                KeyState::Absent,
                "the guard was dropped without an end"
            );
        }
        assert_eq!(
            world.log.stats().fenced_count,
            fenced,
            "no drop ended it again"
        );
    }
}

#[test]
fn dropped_commits_of_a_batch_are_made_if_they_were_polled() {
    let world = World::new(true);
    let repeatable = world.jobs::<Repeatable>();
    let mut items: Vec<_> = ["a", "b", "too long"]
        .map(|key| {
            let outcome = key.repeat(if key.len() > 1 { 9 } else { 1 });
            (new(repeatable.claim(key).unwrap()), Commit::new(outcome))
        })
        .into();
    world.log.sync().unwrap();
    world.gate.close();
    let mut commits = Box::pin(repeatable.commit_many_async(&mut items));
    assert!(poll(commits.as_mut()).is_pending());
    drop(commits);
    drop(items);
    world.gate.open();
    world.log.sync().unwrap();
    assert_eq!(world.log.stats().fenced_count, 0, "no drop ended one again");
    let later = jobs::<Repeatable>(&world.after_power_cut());
    for key in ["a", "b"] {
        assert!(
            matches!(later.get(key).unwrap(), KeyState::Done(_)),
            "{key}"
        );
    }
    assert_eq!(later.get("too long").unwrap(), KeyState::Absent);
}

/// What a duplicate is told waits for the disk, in a batch and in a read; a batch that is dropped
/// meanwhile holds nothing.
#[test]
fn a_batch_of_claims_and_a_read_wait_for_what_they_rest_on() {
    let world = World::new(true);
    let (jobs, filter) = (world.jobs::<Repeatable>(), world.filter());
    let mut claim = new(jobs.claim("old").unwrap());
    world.log.sync().unwrap();
    world.gate.close();
    let mut commit = Box::pin(claim.commit_async(b"done"));
    assert!(poll(commit.as_mut()).is_pending());
    assert!(poll(observing(&filter, "seen").as_mut()).is_pending());

    let (keys, options) = (["new", "old"], ClaimOptions::new());
    let mut many = Box::pin(jobs.claim_many_async(&keys, &options));
    assert!(poll(many.as_mut()).is_pending());
    let state = jobs.get("new").unwrap();
    assert!(matches!(state, KeyState::Pending { .. }), "{state:?}");
    // If it waited for the disk, it would wait for ever.
    drop(many);
    assert!(world.log.pending().unwrap().is_empty());

    let mut read = Box::pin(jobs.get_async("old"));
    let mut seen = Box::pin(filter.get_async("seen"));
    let mut many = Box::pin(jobs.claim_many_async(&keys, &options));
    assert!(poll(read.as_mut()).is_pending());
    assert!(poll(seen.as_mut()).is_pending());
    assert!(poll(many.as_mut()).is_pending());
    world.gate.open();
    // On another thread, which is stuck if nobody rings.
    let (state, seen, words) = std::thread::scope(|scope| {
        let all = scope.spawn(move || {
            let words: Vec<_> = smol::block_on(many).unwrap().iter().map(word).collect();
            let seen = smol::block_on(seen).unwrap();
            (smol::block_on(read).unwrap(), seen, words)
        });
        all.join().unwrap()
    });
    assert!(matches!(state, KeyState::Done(_)), "{state:?}");
    assert_eq!(seen, KeyState::Seen);
    assert_eq!(words, ["new", "old"]);
}

/// A flush that fails is told to a batch and to a read that wait for it.
#[test]
fn a_batch_of_claims_and_a_read_are_told_of_a_failed_flush() {
    let world = World::new(true);
    let jobs = world.jobs::<Repeatable>();
    let mut claim = new(jobs.claim("old").unwrap());
    world.log.sync().unwrap();
    world.gate.close();
    let mut commit = Box::pin(claim.commit_async(b"done"));
    assert!(poll(commit.as_mut()).is_pending());
    let (told, answers) = mpsc::channel();
    let (batch, read) = (jobs.clone(), jobs.clone());
    let told_too = told.clone();
    let many = std::thread::spawn(move || {
        let options = ClaimOptions::new();
        let many = batch.claim_many_async(&["old"], &options);
        let error = smol::block_on(many).map(|_| ()).unwrap_err();
        told_too.send(error.kind()).unwrap();
    });
    let read = std::thread::spawn(move || {
        let error = smol::block_on(read.get_async("old")).unwrap_err();
        told.send(error.kind()).unwrap();
    });
    let steps = world.disk.steps();
    let fails = Fault::sticky(steps, FaultKind::Io).only(Op::Sync);
    world.disk.fail(fails);
    world.gate.open();
    for _ in 0..2 {
        let kind = answers.recv_timeout(LONG).expect("a task is stuck");
        assert_eq!(kind, ErrorKind::Poisoned);
    }
    many.join().unwrap();
    read.join().unwrap();
}

#[test]
fn a_dropped_observation_is_made_if_it_was_polled() {
    let world = World::new(true);
    let filter = world.filter();
    world.gate.close();
    let mut observing = Box::pin(filter.observe_async("polled"));
    assert!(poll(observing.as_mut()).is_pending());
    drop(observing);
    drop(filter.observe_async("not polled"));
    world.gate.open();
    assert_eq!(filter.observe("polled").unwrap(), Observed::Duplicate);
    assert_eq!(filter.observe("not polled").unwrap(), Observed::New);
}

/// Drops a `run_once` before its start is durable or while its effect runs, without waiting for
/// the disk; returns the key's state at once, and after a power cut that follows a flush.
fn dropped<C: EffectClass>(in_effect: bool) -> (KeyState, KeyState) {
    let world = World::new(true);
    let jobs = world.jobs::<C>();
    world.log.sync().unwrap();
    if !in_effect {
        world.gate.close();
    }
    let (entered, inside) = mpsc::channel();
    let mut run = Box::pin(jobs.run_once_async("k", |_| {
        entered.send(()).unwrap();
        std::future::pending()
    }));
    assert!(poll(run.as_mut()).is_pending());
    let started = Instant::now();
    while in_effect && inside.try_recv().is_err() {
        assert!(poll(run.as_mut()).is_pending() && started.elapsed() < LONG);
    }
    assert!(
        inside.try_recv().is_err(),
        "the effect began before its start was durable"
    );
    world.gate.close();
    // If it waited for the disk, it would wait for ever.
    drop(run);
    world.gate.open();
    let state = jobs.get("k").unwrap();
    world.log.sync().unwrap();
    let later = self::jobs::<C>(&world.after_power_cut()).get("k").unwrap();
    (state, later)
}

#[test]
fn a_run_that_is_dropped_is_released_before_its_start_and_unknown_behind_it() {
    let (state, later) = dropped::<NonRepeatable>(false);
    assert_eq!((state, later), (KeyState::Absent, KeyState::Absent));
    let (state, later) = dropped::<NonRepeatable>(true);
    assert!(matches!(state, KeyState::InDoubt(_)), "{state:?}");
    assert!(matches!(later, KeyState::InDoubt(_)), "{later:?}");
    let (state, _) = dropped::<Probeable>(true);
    match state {
        // Its lease is over: the next claim asks the probe, after the settle time.
        KeyState::Pending {
            started: true,
            lease_left: Duration::ZERO,
            ..
        } => {}
        state => panic!("{state:?}"),
    }
    let (state, later) = dropped::<Repeatable>(true);
    for state in [state, later] {
        assert!(
            matches!(&state, KeyState::Failed { retry_after, .. } if retry_after.is_zero()),
            "{state:?}"
        );
    }
}

#[test]
fn a_run_that_is_dropped_while_it_commits_is_done() {
    let world = World::new(true);
    let jobs = world.jobs::<Repeatable>();
    world.log.sync().unwrap();
    world.gate.close();
    let mut run = Box::pin(jobs.run_once_async("k", |_| async { Ok(b"done".to_vec()) }));
    assert!(
        poll(run.as_mut()).is_pending(),
        "the commit waits for the disk"
    );
    drop(run);
    world.gate.open();
    world.log.sync().unwrap();
    let state = self::jobs::<Repeatable>(&world.after_power_cut())
        .get("k")
        .unwrap();
    assert!(matches!(state, KeyState::Done(_)), "{state:?}");
}

#[test]
fn a_dropped_start_releases_the_claim() {
    let world = World::new(true);
    let jobs = world.jobs::<NonRepeatable>();
    let claim = new(jobs.claim("k").unwrap());
    world.log.sync().unwrap();
    world.gate.close();
    let mut start = Box::pin(claim.start_async(b""));
    assert!(poll(start.as_mut()).is_pending());
    drop(start);
    world.gate.open();
    assert_eq!(jobs.get("k").unwrap(), KeyState::Absent);
}

/// Tasks and threads stand in one line; whoever leaves it makes room.
#[test]
fn tasks_and_threads_wait_in_one_line() {
    let world = World::new(true);
    let jobs = world.jobs::<Repeatable>();
    let held = new(jobs.claim("k").unwrap());
    let waiting = |count| until("waiters", || world.log.stats().waiters_count == count);
    let mut first = Box::pin(jobs.claim_wait_async("k", LONG));
    let mut leaves = Box::pin(jobs.claim_wait_async("k", LONG));
    assert!(poll(first.as_mut()).is_pending() && poll(leaves.as_mut()).is_pending());
    waiting(2);
    let (told, answer) = mpsc::channel();
    let thread = {
        let jobs = jobs.clone();
        std::thread::spawn(move || told.send(jobs.claim_wait("k", LONG).unwrap()).unwrap())
    };
    waiting(3);
    let mut last = Box::pin(jobs.claim_wait_async("k", LONG));
    assert!(poll(last.as_mut()).is_pending());
    waiting(4);
    drop(held);
    // The first was woken and is gone before it looks: the next in line is woken instead.
    drop(first);
    drop(leaves);
    let second = new(answer.recv_timeout(LONG).expect("the thread is stuck"));
    assert!(poll(last.as_mut()).is_pending());
    waiting(1);
    let mut second = second;
    drop(second.commit(b"done").unwrap());
    let verdict = match poll(last.as_mut()) {
        Poll::Ready(verdict) => verdict.unwrap(),
        Poll::Pending => panic!("the outcome is durable"),
    };
    assert!(matches!(verdict, ClaimVerdict::Duplicate(_)));
    thread.join().unwrap();
}

/// Story: a future that was polled once and then left stood in the line for ever, and nobody behind
/// it got the key.
#[test]
fn a_future_that_is_left_holds_up_nobody_beyond_its_deadline() {
    for free_before in [true, false] {
        let log = Options::new().open_in_memory().unwrap();
        let jobs: Namespace<Repeatable> = jobs(&log);
        let owner = new(jobs.claim("k").unwrap());
        let short = Duration::from_millis(200);
        let mut left = pin!(jobs.claim_wait_async("k", short));
        assert!(poll(left.as_mut()).is_pending());
        let began = Instant::now();
        let behind = {
            let jobs = jobs.clone();
            std::thread::spawn(move || jobs.claim_wait("k", LONG / 6).unwrap())
        };
        until("two wait", || log.stats().waiters_count == 2);
        if !free_before {
            until("the deadline is over", || began.elapsed() > short);
        }
        drop(owner);
        let claim = new(behind.join().unwrap());
        assert!(began.elapsed() < LONG / 6);
        // Who comes back to it is told what is so now.
        let late = poll(left.as_mut());
        assert!(
            matches!(late, Poll::Ready(Ok(ClaimVerdict::Busy { .. }))),
            "{late:?}"
        );
        drop(claim);
    }
}

#[test]
fn a_task_is_woken_at_its_deadline_and_when_a_lease_lapses() {
    let world = World::new(true);
    let jobs = world.jobs::<Repeatable>();
    let _hung = new(jobs.claim("k").unwrap());
    let (told, answers) = mpsc::channel();
    let mut threads = Vec::new();
    for (count, seconds) in [(1, 3), (2, 60)] {
        let (jobs, told) = (jobs.clone(), told.clone());
        threads.push(std::thread::spawn(move || {
            let wait = jobs.claim_wait_async("k", Duration::from_secs(seconds));
            told.send(smol::block_on(wait).unwrap()).unwrap();
        }));
        until("waits", || world.log.stats().waiters_count == count);
    }
    assert!(answers.try_recv().is_err());
    world.clock.advance_ms(3_000);
    let early = answers
        .recv_timeout(LONG)
        .expect("the deadline woke nobody");
    assert!(matches!(early, ClaimVerdict::Busy { .. }), "{early:?}");
    world.clock.advance_ms(7_000);
    let verdict = answers.recv_timeout(LONG).expect("the lapse woke nobody");
    assert!(
        matches!(verdict, ClaimVerdict::Takeover { .. }),
        "{verdict:?}"
    );
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());

    // By the clock of the system.
    let log = DedupLog::in_memory().unwrap();
    let jobs = self::jobs::<Repeatable>(&log);
    let options = ClaimOptions::new().lease(Duration::from_millis(60));
    let _hung = new(jobs.claim_with("k", &options).unwrap());
    let wait = Duration::from_millis(10);
    let waiting = jobs.clone();
    let early = within(async move { waiting.claim_wait_async("k", wait).await.unwrap() });
    assert!(matches!(early, ClaimVerdict::Busy { .. }), "{early:?}");
    let verdict = within(async move { jobs.claim_wait_async("k", LONG).await.unwrap() });
    assert!(
        matches!(verdict, ClaimVerdict::Takeover { .. }),
        "{verdict:?}"
    );
}

#[test]
fn a_close_ends_the_waits_of_tasks() {
    let world = World::new(true);
    let jobs = world.jobs::<Repeatable>();
    let _held = new(jobs.claim("k").unwrap());
    let waiting = jobs.clone();
    let (told, answer) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let wait = waiting.claim_wait_async("k", LONG);
        told.send(smol::block_on(wait).unwrap_err().kind()).unwrap();
    });
    until("waits", || world.log.stats().waiters_count == 1);
    world.log.close().unwrap();
    let kind = answer.recv_timeout(LONG).expect("the close woke nobody");
    assert_eq!(kind, ErrorKind::Closed);
    thread.join().unwrap();
    let late = within(async move { jobs.claim_wait_async("k", LONG).await });
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Closed);
}

/// A flush that fails is told to every task that waits for it, and to those that wait for a key.
#[test]
fn a_poisoned_store_ends_the_waits_of_tasks() {
    let world = World::new(true);
    let (filter, jobs) = (world.filter(), world.jobs::<Repeatable>());
    let _held = new(jobs.claim("k").unwrap());
    world.log.sync().unwrap();
    world.gate.close();
    let (told, answers) = mpsc::channel();
    let mut threads: Vec<_> = (0..3)
        .map(|n| {
            let (filter, told) = (filter.clone(), told.clone());
            std::thread::spawn(move || {
                let key = format!("key-{n}");
                let error = smol::block_on(filter.observe_async(key)).unwrap_err();
                told.send((error.kind(), error.applied())).unwrap();
            })
        })
        .collect();
    until("appended", || world.log.stats().records_count == 4);
    let waiting = jobs.clone();
    threads.push(std::thread::spawn(move || {
        let error = smol::block_on(waiting.claim_wait_async("k", LONG)).unwrap_err();
        told.send((error.kind(), idemlog::Applied::Maybe)).unwrap();
    }));
    until("waits", || world.log.stats().waiters_count == 1);
    world
        .disk
        .fail(Fault::sticky(world.disk.steps(), FaultKind::Io).only(Op::Sync));
    world.gate.open();
    for _ in 0..4 {
        let told = answers.recv_timeout(LONG).expect("a task is stuck");
        assert_eq!(told, (ErrorKind::Poisoned, idemlog::Applied::Maybe));
    }
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

/// A write that fails is taken back, and the tasks whose records it took are told.
#[test]
fn a_write_that_is_taken_back_is_told_to_its_tasks() {
    let world = World::new(true);
    let filter = world.filter();
    world.log.sync().unwrap();
    let steps = world.disk.steps();
    world
        .disk
        .fail(Fault::once(steps, FaultKind::NoSpace).only(Op::Write));
    let error = {
        let filter = filter.clone();
        within(async move { filter.observe_async("a").await.unwrap_err() })
    };
    assert_eq!(error.applied(), idemlog::Applied::No, "{error}");
    assert!(
        within(async move { filter.observe_async("a").await })
            .unwrap()
            .is_new()
    );
}

/// A thousand tasks race for the same keys; in one of a hundred attempts the winner fails. Each
/// key has one effect, and every loser gets its outcome, or inherits the claim.
fn race(spawn: impl Fn(Pin<Box<dyn Future<Output = ()> + Send>>)) {
    const TASKS: usize = 1_000;
    const KEYS: usize = 250;
    let seed = env_u64("IDEMLOG_SEED", 1) as usize;
    println!("seed={seed} (again with IDEMLOG_SEED={seed})");
    let log = Options::new().open_on(SimDisk::memory().dir()).unwrap();
    let jobs = jobs::<Repeatable>(&log);
    let effects: Arc<Vec<_>> = Arc::new((0..KEYS).map(|_| AtomicUsize::new(0)).collect());
    let attempts = Arc::new(AtomicUsize::new(seed % 100));
    let (told, finished) = mpsc::channel();
    for task in 0..TASKS {
        let (jobs, told) = (jobs.clone(), told.clone());
        let (effects, attempts) = (Arc::clone(&effects), Arc::clone(&attempts));
        spawn(Box::pin(async move {
            for key in (0..KEYS).map(|key| (key + task % 3) % KEYS) {
                let name = format!("key-{key}");
                let (effect, attempts) = (&effects[key], &attempts);
                let outcome = name.clone().into_bytes();
                let run = jobs.run_once_wait_async(&name, LONG, |_| async move {
                    smol::future::yield_now().await;
                    if attempts.fetch_add(1, Ordering::SeqCst) % 100 == 99 {
                        return Err(Failure::retryable(Duration::from_millis(1), "unlucky"));
                    }
                    effect.fetch_add(1, Ordering::SeqCst);
                    Ok(outcome)
                });
                match run.await.unwrap() {
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
            told.send(()).unwrap();
        }));
    }
    drop(told);
    for _ in 0..TASKS {
        finished
            .recv_timeout(LONG)
            .expect("a task is stuck or panicked");
    }
    let counts: Vec<_> = effects.iter().map(|n| n.load(Ordering::SeqCst)).collect();
    assert_eq!(counts, vec![1; KEYS]);
    assert!(
        attempts.load(Ordering::SeqCst) - seed % 100 > KEYS,
        "no attempt failed"
    );
    assert_eq!(log.stats().waiters_count, 0);
}

#[test]
fn a_thousand_tasks_race_on_tokio_and_each_key_has_one_effect() {
    let runtime = tokio();
    race(|task| drop(runtime.spawn(task)));
}

#[test]
fn a_thousand_tasks_race_on_smol_and_each_key_has_one_effect() {
    race(|task| smol::spawn(task).detach());
}

/// Another process flushes, and does not come to an end: a task is told so when a call of a thread
/// would be, and what it has appended counts.
#[test]
fn a_task_does_not_wait_for_ever_for_the_flush_of_another_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let wait = Duration::from_millis(300);
    let log = Options::new()
        .shared(true)
        .turn_timeout(wait)
        .durability(Durability::Power)
        .open(&path)
        .unwrap();
    let filter = filter(&log);
    assert_eq!(filter.observe("first").unwrap(), Observed::New);
    let gate = std::fs::File::open(path.join("LOCK.flush")).unwrap();
    gate.lock().unwrap();
    let began = Instant::now();
    let error = smol::block_on(filter.observe_async("second")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    assert_eq!(error.applied(), idemlog::Applied::Maybe, "{error}");
    let took = began.elapsed();
    // Clocks are read in milliseconds.
    assert!(took * 2 > wait && took < 20 * wait, "{took:?}");
    gate.unlock().unwrap();
    let again = smol::block_on(filter.observe_async("second")).unwrap();
    assert_eq!(again, Observed::Duplicate);
    log.close().unwrap();
}

/// A task that is told "duplicate" rests on a record that another caller left in memory: it must be
/// as safe as the task's own level asks, with and without a thread that flushes.
#[test]
fn what_a_task_is_told_of_another_callers_record_is_as_safe_as_its_level() {
    let buffered = ObserveOptions::new().durability(Durability::Buffered);
    for background in [false, true] {
        for level in [Durability::Process, Durability::Power] {
            let disk = SimDisk::new();
            let clock = Arc::new(ManualClock::new(START_MS));
            let log = options(background, &clock).open_on(disk.dir()).unwrap();
            let filter = filter(&log);
            assert!(filter.observe_with("k", &buffered).unwrap().is_new());
            let asked = ObserveOptions::new().durability(level);
            let told = smol::block_on(filter.observe_with_async("k", &asked));
            assert_eq!(told.unwrap(), Observed::Duplicate);
            let left = match level {
                Durability::Power => disk.after_power_cut(&mut PowerCut::drop_all()),
                _ => disk.after_kill(),
            };
            let again = options(false, &clock).open_on(left.dir()).unwrap();
            let filter = self::filter(&again);
            assert_eq!(filter.observe("k").unwrap(), Observed::Duplicate);
        }
    }
}
