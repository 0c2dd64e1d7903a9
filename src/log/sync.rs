//! Group commit: one leader flushes for everybody who has appended, and wakes exactly those whom
//! the flush has served.
//!
//! Safety properties:
//! A. `durable` rises only after a flush has returned without error.
//! B. A failed flush is never retried and never forgotten: every later wait gets the error.
//! C. A waiter is woken once: served, failed, or made the next leader. There is a leader as long
//!    as there are waiters.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

use crate::position::Position;

const WAITING: u8 = 0;
const DONE: u8 = 1;
const LEAD: u8 = 2;

/// Tracks how far the log is durable.
#[derive(Debug)]
pub(crate) struct Syncer {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    durable: Position,
    leader_active: bool,
    /// Rises with each failure that takes appended records back; see [`Syncer::taken_back`].
    failures: Vec<Failure>,
    poisoned: bool,
    waiters: Vec<Waiter>,
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
        };
        Syncer {
            state: Mutex::new(state),
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

    /// Says that nothing more will become durable.
    pub(crate) fn poison(&self) {
        let mut state = self.state();
        state.poisoned = true;
        wake_all(&mut state);
    }

    /// Waits until everything below `target` is durable. Whoever finds no leader calls `lead`,
    /// which flushes and returns the position reached; an `Err` poisons.
    pub(crate) fn wait<E>(
        &self,
        target: Position,
        appended_at: FailureCount,
        mut lead: impl FnMut() -> Result<Position, E>,
    ) -> Result<(), Result<WaitError, E>> {
        let mut state = self.state();
        let mut leading_failed = false;
        loop {
            if let Some(answer) = judge(&state, target, appended_at) {
                return answer.map_err(Ok);
            }
            if state.leader_active {
                state = self.follow(state, target);
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
                }
                Err(error) => {
                    promote(&mut state);
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

    /// Waits for a leader; returns when served, failed, or to lead.
    fn follow<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        target: Position,
    ) -> MutexGuard<'a, State> {
        let signal = Arc::new(AtomicU8::new(WAITING));
        let waiter = Waiter {
            target,
            thread: std::thread::current(),
            signal: Arc::clone(&signal),
        };
        state.waiters.push(waiter);
        drop(state);
        // Acquire pairs with the Release of whoever signals: its change of the state is seen.
        while signal.load(Ordering::Acquire) == WAITING {
            std::thread::park();
        }
        self.state()
    }
}

fn judge(
    state: &State,
    target: Position,
    appended_at: FailureCount,
) -> Option<Result<(), WaitError>> {
    // The first failure after the append decides: later ones concern later records.
    if let Some(failure) = state.failures.get(appended_at.0)
        && target > failure.kept
    {
        return Some(Err(WaitError::TakenBack));
    }
    if state.durable >= target {
        return Some(Ok(()));
    }
    state.poisoned.then_some(Err(WaitError::Poisoned))
}

fn wake(waiter: &Waiter, signal: u8) {
    waiter.signal.store(signal, Ordering::Release);
    waiter.thread.unpark();
}

fn wake_all(state: &mut State) {
    for waiter in state.waiters.drain(..) {
        wake(&waiter, DONE);
    }
}

fn wake_served(state: &mut State) {
    let durable = state.durable;
    state.waiters.retain(|waiter| {
        let served = waiter.target <= durable;
        if served {
            wake(waiter, DONE);
        }
        !served
    });
}

/// Lets one waiter become the leader (C).
fn promote(state: &mut State) {
    if let Some(waiter) = state.waiters.pop() {
        wake(&waiter, LEAD);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    fn at(offset: u32) -> Position {
        Position::new(1, offset)
    }

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
}
