//! What is to be done at a moment of the store's clock, and who sleeps until then?
//!
//! Threads that wait sleep on their own. Tasks cannot, and leases are renewed while their owners
//! work: for those one thread sleeps until the earliest moment. It begins with the first of them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::Engine;
use super::keep::Keep;
use super::waits::Place;
use crate::error::{Error, Result};
use crate::log::bell::{Bell, Listening};

/// How long a call of a shared store sleeps at the most before it looks at what other processes
/// have done.
const SHARED_POLL_MS: u64 = 10;

/// What is done at a moment.
#[derive(Clone, Debug)]
pub(crate) enum Timed {
    /// A task's wait is over.
    Ring(Bell),
    /// A lease is due to be renewed.
    Renew(Arc<Keep>),
}

/// The moment on the boot clock, and a number that tells equal moments apart.
pub(crate) type TimerId = (u64, u64);

/// Everything that is to be done, by moment.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    state: Mutex<State>,
    changed: Condvar,
    /// Nobody can sleep by the store's clock: it moves by hand, and whoever moves it tells.
    by_hand: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    due: BTreeMap<TimerId, Timed>,
    next: u64,
    thread: Option<JoinHandle<()>>,
    stopped: bool,
}

impl Timers {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has something done at a moment.
    pub(crate) fn add(&self, at_ms: u64, what: Timed) -> TimerId {
        let mut state = self.state();
        state.next += 1;
        let id = (at_ms, state.next);
        let is_first = state
            .due
            .first_key_value()
            .is_none_or(|(first, _)| id < *first);
        state.due.insert(id, what);
        drop(state);
        if is_first {
            self.changed.notify_one();
        }
        id
    }

    pub(crate) fn remove(&self, id: TimerId) {
        let removed = self.state().due.remove(&id);
        drop(removed);
    }

    /// Returns what is due by now.
    fn take_due(&self, now_ms: u64) -> Vec<Timed> {
        let mut state = self.state();
        let later = state.due.split_off(&(now_ms, u64::MAX));
        std::mem::replace(&mut state.due, later)
            .into_values()
            .collect()
    }

    /// Sleeps until something is due; `None` says that the store is closing.
    fn sleep(&self, now_ms: impl Fn() -> u64) -> Option<()> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            let left_ms = match state.due.first_key_value() {
                Some(((at_ms, _), _)) => at_ms.saturating_sub(now_ms()),
                None => u64::MAX,
            };
            if left_ms == 0 {
                return Some(());
            }
            state = if left_ms == u64::MAX || self.is_by_hand() {
                self.changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner)
            } else {
                let slept = self
                    .changed
                    .wait_timeout(state, Duration::from_millis(left_ms));
                slept.unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }

    /// Says that the clock moves by hand.
    fn set_by_hand(&self) {
        self.by_hand.store(true, Ordering::Relaxed);
    }

    fn is_by_hand(&self) -> bool {
        self.by_hand.load(Ordering::Relaxed)
    }

    /// Has the thread look at the clock again.
    pub(crate) fn look(&self) {
        // The lock: between the thread's look at the clock and its sleep a call would be lost.
        drop(self.state());
        self.changed.notify_one();
    }

    /// Ends the thread, which the caller joins.
    pub(crate) fn stop(&self) -> Option<JoinHandle<()>> {
        let mut state = self.state();
        state.stopped = true;
        let due = std::mem::take(&mut state.due);
        let thread = state.thread.take();
        drop(state);
        self.changed.notify_one();
        drop(due);
        thread
    }
}

impl Engine {
    /// Starts the thread that does what is due, unless it runs.
    pub(crate) fn start_timers(self: &Arc<Self>) -> Result<()> {
        let mut state = self.timers.state();
        if state.stopped || state.thread.is_some() || !self.home.is_at_home() {
            return Ok(());
        }
        let engine = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("idemlog-timer".to_owned())
            .spawn(move || {
                while engine.timers.sleep(|| engine.now().boot_ms).is_some() {
                    engine.run_timers();
                }
            });
        let failed = |e| Error::io("starting a background thread failed", e);
        state.thread = Some(thread.map_err(failed)?);
        Ok(())
    }

    /// Has a clock that moves by hand tell when it was moved.
    pub(crate) fn follow_clock(self: &Arc<Self>) {
        let engine = Arc::downgrade(self);
        let moved = move || {
            let engine = engine.upgrade();
            engine.iter().for_each(|engine| engine.time_moved());
            engine.is_some()
        };
        if self.clock().tell_moves(Box::new(moved)) {
            self.timers.set_by_hand();
        }
    }

    /// Does what is due by now.
    pub(crate) fn run_timers(&self) {
        for due in self.timers.take_due(self.now().boot_ms) {
            match due {
                Timed::Ring(bell) => bell.ring(),
                Timed::Renew(keep) => self.renew_kept(&keep),
            }
        }
    }

    /// Has everybody who waits for a moment look at the clock again: it may have moved otherwise
    /// than a sleep lasts.
    pub(crate) fn time_moved(&self) {
        self.timers.look();
        self.waits.ring_all();
    }

    /// The same for a task that stands in a line: it never blocks the thread that polls it.
    pub(crate) async fn sleep_async(
        self: &Arc<Self>,
        place: &Place<'_>,
        listening: Listening,
        until_ms: u64,
    ) -> Result<()> {
        self.start_timers()?;
        let until_ms = self.look_again_by(until_ms);
        let bell = place.bell().clone();
        let _timer = Timer::new(&self.timers, until_ms, Timed::Ring(bell));
        listening.await;
        Ok(())
    }

    /// Nothing rings here for what another process does.
    fn look_again_by(&self, until_ms: u64) -> u64 {
        if self.is_alone() {
            return until_ms;
        }
        until_ms.min(self.now().boot_ms.saturating_add(SHARED_POLL_MS))
    }

    /// Sleeps until the bell rings or a moment on the boot clock has come.
    pub(crate) fn sleep(&self, listening: Listening, until_ms: u64) {
        let until_ms = self.look_again_by(until_ms);
        let by_hand = self.timers.is_by_hand() || until_ms == u64::MAX;
        let left_ms = until_ms.saturating_sub(self.now().boot_ms);
        listening.sleep((!by_hand).then(|| Duration::from_millis(left_ms)));
    }
}

/// Something that is to be done, taken back when dropped.
pub(crate) struct Timer<'a> {
    timers: &'a Timers,
    id: TimerId,
}

impl<'a> Timer<'a> {
    pub(crate) fn new(timers: &'a Timers, at_ms: u64, what: Timed) -> Self {
        let id = timers.add(at_ms, what);
        Timer { timers, id }
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        self.timers.remove(self.id);
    }
}

#[cfg(all(test, not(idemlog_shuttle)))]
mod tests {
    use super::*;

    fn ring() -> Timed {
        Timed::Ring(Bell::default())
    }

    #[test]
    fn what_is_due_is_taken_once_and_the_rest_stays() {
        let timers = Timers::default();
        let removed = timers.add(10, ring());
        for at_ms in [10, 20, 10, 30] {
            timers.add(at_ms, ring());
        }
        timers.remove(removed);
        assert_eq!(timers.take_due(9).len(), 0);
        assert_eq!(timers.take_due(10).len(), 2);
        assert_eq!(timers.take_due(10).len(), 0);
        drop(Timer::new(&timers, 5, ring()));
        assert_eq!(timers.take_due(u64::MAX).len(), 2);
    }

    #[test]
    fn an_earlier_moment_ends_a_sleep_and_so_does_the_close() {
        let timers = Timers::default();
        std::thread::scope(|scope| {
            let slept = scope.spawn(|| timers.sleep(|| 0).is_some());
            timers.add(u64::MAX - 1, ring());
            timers.add(0, ring());
            assert!(slept.join().unwrap());
            assert_eq!(timers.take_due(0).len(), 1);
            let stopped = scope.spawn(|| timers.sleep(|| 0).is_some());
            assert!(timers.stop().is_none());
            assert!(!stopped.join().unwrap());
        });
    }
}
