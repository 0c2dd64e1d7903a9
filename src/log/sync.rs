//! Group commit: one leader flushes for everybody who has appended, and wakes exactly those whom
//! the flush has served.
//!
//! Safety properties:
//! A. `durable` rises only after a flush has returned without error.
//! B. A failed flush is never retried and never forgotten: every later wait gets the error.
//! C. A waiter is woken once: served, failed, or made the next leader. There is a leader as long
//!    as there are waiters.
//! D. A task never leads: whoever polls it has a thread that waits in its place (see
//!    `engine/future.rs`). It looks and is registered in one step, and is rung behind every later
//!    change that may end its wait. No lock is held then: a ring may run the task's waker. Who
//!    leads with locks held leaves the ring to whoever calls [`Syncer::ring_owed`] once they are
//!    released.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use self::primitives::{Arc, AtomicU8, Mutex, MutexGuard, Thread};
use super::bell::{Bell, Listening};
use crate::position::Position;

/// What threads meet at. Under `--cfg idemlog_shuttle` a scheduler takes their place that tries
/// one interleaving after another, so that the code tested is the code that ships.
pub(crate) mod primitives {
    #[cfg(all(test, idemlog_shuttle))]
    pub(crate) use shuttle::{
        sync::atomic::{AtomicBool, AtomicU8, AtomicUsize},
        sync::{Arc, Condvar, Mutex, MutexGuard},
        thread::{Thread, current, park},
    };
    #[cfg(not(all(test, idemlog_shuttle)))]
    pub(crate) use std::{
        sync::atomic::{AtomicBool, AtomicU8, AtomicUsize},
        sync::{Arc, Condvar, Mutex, MutexGuard},
        thread::{Thread, current, park},
    };

    /// Runs `body` under `IDEMLOG_SCHEDULES` interleavings drawn from `IDEMLOG_SEED`: one half at
    /// random, one with few preemptions at chosen places. A failure prints its schedule, and
    /// `IDEMLOG_SCHEDULE` repeats it.
    #[cfg(all(test, idemlog_shuttle))]
    pub(crate) fn explore(name: &str, body: impl Fn() + Send + Sync + 'static) {
        use shuttle::scheduler::{PctScheduler, RandomScheduler};
        let body = std::sync::Arc::new(body);
        let run = std::sync::Arc::clone(&body);
        if let Ok(schedule) = std::env::var("IDEMLOG_SCHEDULE") {
            return shuttle::replay(move || run(), &schedule);
        }
        let number = |name: &str, default| {
            let text = std::env::var(name).ok();
            text.map_or(default, |text| text.parse().unwrap())
        };
        let seed = number("IDEMLOG_SEED", 1);
        let half = usize::try_from(number("IDEMLOG_SCHEDULES", 2000) / 2).unwrap();
        println!("schedules: name={name:?} seed={seed}");
        let random = RandomScheduler::new_from_seed(seed, half);
        let mut count = shuttle::Runner::new(random, shuttle::Config::new()).run(move || run());
        let few = PctScheduler::new_from_seed(seed, 3, half);
        count += shuttle::Runner::new(few, shuttle::Config::new()).run(move || body());
        println!("counts: schedules={count}");
    }
}

const WAITING: u8 = 0;
/// Look again at the state.
const LOOK: u8 = 1;
/// Everything below the target is durable, and nothing of it was taken back: whoever takes records
/// back tells all who wait at that moment to look.
const SERVED: u8 = 2;

/// Tracks how far the log is durable.
#[derive(Debug)]
pub(crate) struct Syncer {
    state: Mutex<State>,
    flushing: Mutex<()>,
}

#[derive(Debug)]
struct State {
    durable: Position,
    leader_active: bool,
    /// Rises with each failure that takes appended records back; see [`Syncer::taken_back`].
    failures: Vec<Failure>,
    poisoned: bool,
    waiters: Vec<Waiter>,
    /// By what each waits for, and a number.
    tasks: BTreeMap<(Position, u64), Bell>,
    task_next: u64,
    /// All tasks are to be rung, by whoever holds no lock (D).
    rings_owed: bool,
}

/// Records behind `kept` that were appended before this failure are gone.
#[derive(Clone, Copy, Debug)]
struct Failure {
    kept: Position,
}

#[derive(Debug)]
struct Waiter {
    target: Position,
    thread: Thread,
    signal: Arc<AtomicU8>,
}

/// A point in the history of failures: what is appended now is judged by later ones only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FailureCount(usize);

impl FailureCount {
    /// `failures`: how often [`Syncer::taken_back`] was called before, counted under the append
    /// lock, under which it is called.
    pub(crate) fn new(failures: usize) -> Self {
        FailureCount(failures)
    }
}

/// Who rings for the tasks that a flush has served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rings {
    /// Its leader does, which holds no lock.
    Now,
    /// Its leader holds locks: they are rung behind those.
    Owed,
}

/// Why a wait ended without the position being durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitError {
    /// The write failed and the record was taken back: it is not in the log.
    TakenBack,
    /// A flush failed: nobody knows.
    Poisoned,
}

impl Syncer {
    pub(crate) fn new(durable: Position) -> Self {
        let state = State {
            durable,
            leader_active: false,
            failures: Vec::new(),
            poisoned: false,
            waiters: Vec::new(),
            tasks: BTreeMap::new(),
            task_next: 0,
            rings_owed: false,
        };
        Syncer {
            state: Mutex::new(state),
            flushing: Mutex::default(),
        }
    }

    /// A panic elsewhere does not tear the state: every change is one assignment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the position below which everything is durable.
    pub(crate) fn durable(&self) -> Position {
        self.state().durable
    }

    #[cfg(test)]
    fn failure_count(&self) -> FailureCount {
        FailureCount(self.state().failures.len())
    }

    /// Says that a write failed and everything behind `kept` was taken back.
    pub(crate) fn taken_back(&self, kept: Position) {
        let mut state = self.state();
        state.failures.push(Failure { kept });
        wake_all(&mut state);
    }

    /// Waits until nobody else flushes, and keeps others from it. Held over one flush and, if it
    /// fails, until the store is poisoned.
    pub(crate) fn alone(&self) -> MutexGuard<'_, ()> {
        self.flushing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says whether a failed write took the record that ends here.
    pub(crate) fn was_taken_back(&self, target: Position, appended_at: FailureCount) -> bool {
        is_taken_back(&self.state(), target, appended_at)
    }

    /// Says that everything below is durable: a flush of this opener has returned.
    pub(crate) fn reached(&self, end: Position) {
        let mut state = self.state();
        state.durable = state.durable.max(end);
    }

    /// Says that nothing more will become durable.
    pub(crate) fn poison(&self) {
        let mut state = self.state();
        state.poisoned = true;
        wake_all(&mut state);
    }

    /// Answers as [`Syncer::wait`] does, or registers a task that waits for `target`: in one look,
    /// so that a flush that ends behind it rings (D).
    pub(crate) fn judge_or_join(
        &self,
        target: Position,
        appended_at: FailureCount,
    ) -> Result<Result<(), WaitError>, TaskPlace<'_>> {
        let mut state = self.state();
        if let Some(judged) = judge(&state, target, appended_at) {
            return Ok(judged);
        }
        let bell = Bell::default();
        let listening = bell.listen();
        state.task_next += 1;
        let at = (target, state.task_next);
        state.tasks.insert(at, bell);
        Err(TaskPlace {
            syncer: self,
            at,
            listening: Some(listening),
        })
    }

    /// Has all tasks look again.
    pub(crate) fn ring_tasks(&self) {
        let tasks = {
            let mut state = self.state();
            state.rings_owed = false;
            std::mem::take(&mut state.tasks)
        };
        tasks.values().for_each(|bell| bell.ring());
    }

    /// Rings for the tasks that are served, or for all if that is owed.
    pub(crate) fn ring_owed(&self) {
        let tasks = {
            let mut state = self.state();
            if state.tasks.is_empty() {
                return;
            }
            let keep_from = (state.durable, u64::MAX);
            let later = if std::mem::take(&mut state.rings_owed) {
                BTreeMap::new()
            } else {
                state.tasks.split_off(&keep_from)
            };
            std::mem::replace(&mut state.tasks, later)
        };
        tasks.values().for_each(|bell| bell.ring());
    }

    /// Waits until everything below `target` is durable. Whoever finds no leader calls `lead`,
    /// which flushes and returns the position reached; an `Err` poisons. Call it with no lock
    /// held: it rings for the tasks that its flush has served.
    pub(crate) fn wait<E>(
        &self,
        target: Position,
        appended_at: FailureCount,
        lead: impl FnMut() -> Result<Position, E>,
    ) -> Result<(), Result<WaitError, E>> {
        self.wait_and(target, appended_at, Rings::Now, lead)
    }

    /// The same for a caller that holds locks and calls [`Syncer::ring_owed`] behind them (D).
    pub(crate) fn wait_held<E>(
        &self,
        target: Position,
        appended_at: FailureCount,
        lead: impl FnMut() -> Result<Position, E>,
    ) -> Result<(), Result<WaitError, E>> {
        self.wait_and(target, appended_at, Rings::Owed, lead)
    }

    fn wait_and<E>(
        &self,
        target: Position,
        appended_at: FailureCount,
        rings: Rings,
        mut lead: impl FnMut() -> Result<Position, E>,
    ) -> Result<(), Result<WaitError, E>> {
        let mut state = self.state();
        let mut leading_failed = false;
        loop {
            if let Some(answer) = judge(&state, target, appended_at) {
                return answer.map_err(Ok);
            }
            if state.leader_active {
                match self.follow(state, target) {
                    Some(again) => state = again,
                    None => return Ok(()),
                }
                continue;
            }
            state.leader_active = true;
            drop(state);
            let led = lead();
            state = self.state();
            state.leader_active = false;
            match led {
                Ok(reached) => {
                    if reached > state.durable && !state.poisoned {
                        state.durable = reached;
                    }
                    wake_served(&mut state);
                    promote(&mut state);
                    state = self.ring_unlocked(state, rings);
                }
                Err(error) => {
                    promote(&mut state);
                    state = self.ring_unlocked(state, rings);
                    // A write of later records may have failed and been taken back while this
                    // one was in the file already: then the flush is still to be done.
                    match judge(&state, target, appended_at) {
                        Some(Ok(())) => return Ok(()),
                        Some(Err(_)) => return Err(Err(error)),
                        None if leading_failed => return Err(Err(error)),
                        None => leading_failed = true,
                    }
                }
            }
        }
    }

    /// Rings for tasks without the lock; without tasks it is not let go.
    fn ring_unlocked<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        rings: Rings,
    ) -> MutexGuard<'a, State> {
        if state.tasks.is_empty() || rings == Rings::Owed {
            return state;
        }
        drop(state);
        self.ring_owed();
        self.state()
    }

    /// Waits for a leader. `None`: served, which needs no second look, so that those whom one flush
    /// has served do not meet at the lock; otherwise failed, or to lead.
    fn follow<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        target: Position,
    ) -> Option<MutexGuard<'a, State>> {
        let signal = Arc::new(AtomicU8::new(WAITING));
        let waiter = Waiter {
            target,
            thread: primitives::current(),
            signal: Arc::clone(&signal),
        };
        state.waiters.push(waiter);
        drop(state);
        // Acquire pairs with the Release of whoever signals: its change of the state is seen.
        loop {
            match signal.load(Ordering::Acquire) {
                WAITING => primitives::park(),
                SERVED => return None,
                _ => return Some(self.state()),
            }
        }
    }
}

/// A task's place among those who wait, given up when dropped.
#[derive(Debug)]
pub(crate) struct TaskPlace<'a> {
    syncer: &'a Syncer,
    at: (Position, u64),
    /// `None`: it was rung, and whoever rings has taken the place away before.
    listening: Option<Listening>,
}

impl TaskPlace<'_> {
    /// Ends when the task is to look again.
    pub(crate) async fn rung(mut self) {
        if let Some(listening) = &mut self.listening {
            listening.await;
        }
        self.listening = None;
    }
}

impl Drop for TaskPlace<'_> {
    fn drop(&mut self) {
        if self.listening.is_some() {
            let removed = self.syncer.state().tasks.remove(&self.at);
            drop(removed);
        }
    }
}

fn judge(
    state: &State,
    target: Position,
    appended_at: FailureCount,
) -> Option<Result<(), WaitError>> {
    if is_taken_back(state, target, appended_at) {
        return Some(Err(WaitError::TakenBack));
    }
    if state.durable >= target {
        return Some(Ok(()));
    }
    state.poisoned.then_some(Err(WaitError::Poisoned))
}

fn is_taken_back(state: &State, target: Position, appended_at: FailureCount) -> bool {
    // The first failure after the append decides: later ones concern later records.
    let failure = state.failures.get(appended_at.0);
    failure.is_some_and(|failure| target > failure.kept)
}

fn wake(waiter: &Waiter, signal: u8) {
    waiter.signal.store(signal, Ordering::Release);
    waiter.thread.unpark();
}

fn wake_all(state: &mut State) {
    state.rings_owed = true;
    for waiter in state.waiters.drain(..) {
        wake(&waiter, LOOK);
    }
}

fn wake_served(state: &mut State) {
    let durable = state.durable;
    state.waiters.retain(|waiter| {
        let served = waiter.target <= durable;
        if served {
            wake(waiter, SERVED);
        }
        !served
    });
}

/// Lets one waiter become the leader (C).
fn promote(state: &mut State) {
    if let Some(waiter) = state.waiters.pop() {
        wake(&waiter, LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(not(idemlog_shuttle))]
    use std::sync::atomic::AtomicU64;

    fn at(offset: u32) -> Position {
        Position::new(1, offset)
    }

    #[cfg(not(idemlog_shuttle))]
    #[test]
    fn many_waiters_share_flushes_and_all_return() {
        let syncer = Syncer::new(at(0));
        let flushes = AtomicU64::new(0);
        let end = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let mine = end.fetch_add(8, Ordering::SeqCst) + 8;
                        let target = at(u32::try_from(mine).unwrap());
                        let count = syncer.failure_count();
                        let wait: Result<(), Result<WaitError, ()>> =
                            syncer.wait(target, count, || {
                                flushes.fetch_add(1, Ordering::SeqCst);
                                let reached = end.load(Ordering::SeqCst);
                                std::thread::yield_now();
                                Ok(at(u32::try_from(reached).unwrap()))
                            });
                        assert_eq!(wait, Ok(()));
                        assert!(syncer.durable() >= target);
                    }
                });
            }
        });
        assert!(flushes.load(Ordering::SeqCst) <= 3200);
    }

    #[cfg(not(idemlog_shuttle))]
    #[test]
    fn a_failed_flush_is_told_to_everybody_from_then_on() {
        let syncer = Syncer::new(at(0));
        let count = syncer.failure_count();
        let led = syncer.wait(at(8), count, || {
            syncer.poison();
            Err("flush failed")
        });
        assert_eq!(led, Err(Err("flush failed")));
        let later = syncer.wait(at(8), count, || Ok::<_, &str>(at(8)));
        assert_eq!(later, Err(Ok(WaitError::Poisoned)));
    }

    #[cfg(not(idemlog_shuttle))]
    #[test]
    fn a_record_taken_back_fails_its_waiter_and_not_the_next_record_at_its_place() {
        let syncer = Syncer::new(at(0));
        let before = syncer.failure_count();
        syncer.taken_back(at(0));
        let after = syncer.failure_count();
        let lost = syncer.wait(at(8), before, || Ok::<_, ()>(at(8)));
        assert_eq!(lost, Err(Ok(WaitError::TakenBack)));
        let next = syncer.wait(at(8), after, || Ok::<_, ()>(at(8)));
        assert_eq!(next, Ok(()));
    }

    /// A log of numbered records with the append lock's duties, and faults drawn by the scheduler.
    #[cfg(idemlog_shuttle)]
    mod interleaved {
        use super::super::primitives::explore;
        use super::*;
        use shuttle::rand::Rng;
        use shuttle::sync::Condvar;
        use std::collections::BTreeSet;
        use std::future::Future;

        const RECORD_BYTES: usize = 8;

        #[derive(Default)]
        struct Log {
            records: Vec<u32>,
            written: usize,
            failures: usize,
            poisoned: bool,
        }

        #[derive(Clone, Copy)]
        enum Faults {
            None,
            /// Some writes fail and are taken back.
            Writes,
            /// Some flushes fail.
            Flushes,
            Both,
        }

        struct World {
            syncer: Syncer,
            log: Mutex<Log>,
            /// Records that a flush has covered. Never held while anything else is.
            flushed: std::sync::Mutex<BTreeSet<u32>>,
            faults: Faults,
            /// A task waits for a flush; the thread that leads them is to stop.
            asked: Mutex<(bool, bool)>,
            changed: Condvar,
        }

        fn end_of(records: usize) -> Position {
            at(u32::try_from(64 + records * RECORD_BYTES).unwrap())
        }

        impl World {
            fn new(faults: Faults) -> World {
                World {
                    syncer: Syncer::new(end_of(0)),
                    log: Mutex::new(Log::default()),
                    flushed: std::sync::Mutex::default(),
                    faults,
                    asked: Mutex::new((false, false)),
                    changed: Condvar::new(),
                }
            }

            fn log(&self) -> MutexGuard<'_, Log> {
                self.log.lock().unwrap()
            }

            fn is_flushed(&self, record: u32) -> bool {
                self.flushed.lock().unwrap().contains(&record)
            }

            fn lead(&self) -> Result<Position, ()> {
                let snapshot = {
                    let mut log = self.log();
                    if log.poisoned {
                        return Err(());
                    }
                    let fails = matches!(self.faults, Faults::Writes | Faults::Both)
                        && log.written < log.records.len()
                        && shuttle::rand::thread_rng().gen_range(0..3) == 0;
                    if fails {
                        let written = log.written;
                        log.records.truncate(written);
                        log.failures += 1;
                        self.syncer.taken_back(end_of(written));
                        return Err(());
                    }
                    log.written = log.records.len();
                    log.records.clone()
                };
                shuttle::thread::yield_now();
                let fails = matches!(self.faults, Faults::Flushes | Faults::Both)
                    && shuttle::rand::thread_rng().gen_range(0..4) == 0;
                if fails {
                    self.log().poisoned = true;
                    self.syncer.poison();
                    return Err(());
                }
                let end = end_of(snapshot.len());
                self.flushed.lock().unwrap().extend(snapshot);
                Ok(end)
            }

            /// Appends one record, waits, and judges the answer.
            fn append(&self, record: u32) {
                self.append_and(record, |target, count| {
                    self.syncer.wait(target, count, || self.lead())
                });
            }

            /// The same for a caller that holds locks, behind which the rings are paid.
            fn append_held(&self, record: u32) {
                self.append_and(record, |target, count| {
                    let waited = self.syncer.wait_held(target, count, || self.lead());
                    self.syncer.ring_owed();
                    waited
                });
            }

            /// The same as a task, whose flushes another thread leads.
            fn append_as_task(&self, record: u32) {
                self.append_and(record, |target, count| {
                    shuttle::future::block_on(async {
                        loop {
                            let place = match self.syncer.judge_or_join(target, count) {
                                Ok(judged) => return judged.map_err(Ok),
                                Err(place) => place,
                            };
                            self.asked.lock().unwrap().0 = true;
                            self.changed.notify_one();
                            place.rung().await;
                        }
                    })
                });
            }

            /// A task that is dropped while it waits: it takes nobody's place but its own.
            fn give_up_as_task(&self, record: u32) {
                let (target, count) = {
                    let mut log = self.log();
                    if log.poisoned {
                        return;
                    }
                    log.records.push(record);
                    (end_of(log.records.len()), FailureCount::new(log.failures))
                };
                if let Err(place) = self.syncer.judge_or_join(target, count) {
                    let mut waiting = Box::pin(place.rung());
                    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
                    let polled = waiting.as_mut().poll(&mut context);
                    shuttle::thread::yield_now();
                    drop((polled, waiting));
                }
            }

            /// Flushes for tasks until it is told to stop.
            fn serve(&self) {
                loop {
                    {
                        let mut asked = self.asked.lock().unwrap();
                        while *asked == (false, false) {
                            asked = self.changed.wait(asked).unwrap();
                        }
                        if asked.1 {
                            return;
                        }
                        asked.0 = false;
                    }
                    let (end, count) = {
                        let log = self.log();
                        (end_of(log.records.len()), FailureCount::new(log.failures))
                    };
                    // Those who wait are told; the server goes on.
                    self.syncer
                        .wait(end, count, || self.lead())
                        .unwrap_or_default();
                }
            }

            fn append_and(
                &self,
                record: u32,
                wait: impl FnOnce(Position, FailureCount) -> Result<(), Result<WaitError, ()>>,
            ) {
                let (target, count) = {
                    let mut log = self.log();
                    if log.poisoned {
                        return;
                    }
                    log.records.push(record);
                    (end_of(log.records.len()), FailureCount::new(log.failures))
                };
                let waited = wait(target, count);
                let log = self.log();
                match waited {
                    Ok(()) => assert!(self.is_flushed(record), "{record} is not durable"),
                    Err(Ok(WaitError::TakenBack)) => {
                        assert!(!log.records.contains(&record), "{record} is still there");
                        assert!(!self.is_flushed(record));
                    }
                    Err(Ok(WaitError::Poisoned)) => assert!(log.poisoned, "{record}"),
                    Err(Err(())) => assert!(
                        log.poisoned || log.failures > 0,
                        "{record} fails without a fault"
                    ),
                }
                if matches!(self.faults, Faults::None) {
                    assert_eq!(waited, Ok(()));
                }
            }
        }

        /// A waiter that nobody wakes is a deadlock, which the scheduler reports.
        fn appenders(name: &str, faults: Faults, threads: u32, each: u32) {
            explore(name, move || {
                let world = Arc::new(World::new(faults));
                let all: Vec<_> = (0..threads)
                    .map(|thread| {
                        let world = Arc::clone(&world);
                        shuttle::thread::spawn(move || {
                            (0..each).for_each(|n| world.append(thread * 100 + n));
                        })
                    })
                    .collect();
                all.into_iter().for_each(|thread| thread.join().unwrap());
            });
        }

        /// Tasks beside a thread that flushes for itself, and the one that flushes for them.
        fn tasks(name: &str, faults: Faults, tasks: u32, beside: fn(&World, u32)) {
            explore(name, move || {
                let world = Arc::new(World::new(faults));
                let spawn = |body: fn(&World, u32), n: u32| {
                    let world = Arc::clone(&world);
                    shuttle::thread::spawn(move || body(&world, n))
                };
                let server = spawn(|world, _| world.serve(), 0);
                let mut all: Vec<_> = (0..tasks)
                    .map(|n| spawn(World::append_as_task, n))
                    .collect();
                all.push(spawn(beside, tasks));
                all.into_iter().for_each(|thread| thread.join().unwrap());
                world.asked.lock().unwrap().1 = true;
                world.changed.notify_one();
                server.join().unwrap();
            });
        }

        #[test]
        fn tasks_are_rung_when_they_are_served() {
            tasks("syncer, tasks", Faults::None, 3, World::append);
        }

        #[test]
        fn tasks_are_rung_beside_one_that_gives_up() {
            tasks(
                "syncer, tasks, one gives up",
                Faults::None,
                3,
                World::give_up_as_task,
            );
        }

        #[test]
        fn tasks_are_rung_behind_the_locks_of_who_leads() {
            tasks("syncer, tasks, held", Faults::None, 3, World::append_held);
        }

        #[test]
        fn failing_writes_and_flushes_behind_locks_lose_no_task() {
            tasks(
                "syncer, tasks, held, fail",
                Faults::Both,
                3,
                World::append_held,
            );
        }

        #[test]
        fn failing_writes_and_flushes_lose_no_task() {
            tasks("syncer, tasks, both fail", Faults::Both, 3, World::append);
        }

        #[test]
        fn nobody_returns_before_their_record_is_durable() {
            appenders("syncer", Faults::None, 4, 2);
        }

        #[test]
        fn a_write_that_is_taken_back_fails_those_it_took_and_nobody_else() {
            appenders("syncer, writes fail", Faults::Writes, 4, 2);
        }

        #[test]
        fn a_failed_flush_reaches_everybody_who_waits() {
            appenders("syncer, flushes fail", Faults::Flushes, 4, 2);
        }

        #[test]
        fn failing_writes_and_flushes_lose_no_waiter() {
            appenders("syncer, both fail", Faults::Both, 3, 3);
        }
    }
}
