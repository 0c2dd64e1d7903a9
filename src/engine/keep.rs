//! Who prolongs a lease while its owner works, and when does that end?
//!
//! Safety properties:
//! A. No renewal reaches beyond the ceiling.
//! B. Nothing is renewed while the owner ends its claim, or after it: what an end has written
//!    must not be overwritten by a renewal that was decided before. A renewal looks whether the
//!    owner is at it where it decides, under the append lock, under which it is appended, too.
//! C. No renewal holds `busy` when it rings for those who wait for the key: a waker may end the
//!    claim. Who ends it holds `busy` alone, as the guard is its alone, and nobody else waits for
//!    it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Engine;
use super::claim::{Claim, Held, Started};
use super::class::EffectClass;
use super::namespace::{Space, to_ms};
use super::timers::{Timed, TimerId};
use crate::error::{Error, ErrorKind, Result};
use crate::model::claim as model;
use crate::options::{Durability, Event};
use crate::stamp::Stamp;
use crate::verdict::Change;

/// A lease is renewed when this part of it has passed.
const PART: u64 = 3;

/// A claim whose lease the store renews.
#[derive(Debug)]
pub(crate) struct Keep {
    space: Arc<Space>,
    key: Vec<u8>,
    epoch: Stamp,
    lease_ms: u64,
    /// On the boot clock.
    ceiling_ms: u64,
    /// Until when the lease was granted last.
    leased_ms: AtomicU64,
    ended: AtomicBool,
    /// Held over the decision of a renewal, which does not wait for it, and over an end by the
    /// owner (B).
    busy: Mutex<()>,
    timer: Mutex<Option<TimerId>>,
}

/// Ends the renewals when its guard goes.
pub(crate) struct Kept {
    engine: Arc<Engine>,
    keep: Arc<Keep>,
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.keep.fmt(f)
    }
}

impl Keep {
    fn is_ended(&self) -> bool {
        // Acquire pairs with the Release of whoever ends it.
        self.ended.load(Ordering::Acquire)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kept {
    /// Keeps renewals off until the answer is dropped (B).
    pub(crate) fn pause(&self) -> MutexGuard<'_, ()> {
        lock(&self.keep.busy)
    }

    /// Ends the renewals; one that was decided before may still be told to those who wait.
    pub(crate) fn end(&self) {
        // Release pairs with the Acquire of a renewal.
        self.keep.ended.store(true, Ordering::Release);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.end();
        let timer = lock(&self.keep.timer).take();
        if let Some(timer) = timer {
            self.engine.timers.remove(timer);
        }
    }
}

impl Engine {
    /// Renews a lease that is due, and says when it is due again.
    pub(crate) fn renew_kept(&self, keep: &Arc<Keep>) {
        if keep.is_ended() {
            return;
        }
        let now_ms = self.now().boot_ms;
        let left_ms = keep.ceiling_ms.saturating_sub(now_ms);
        if left_ms == 0 || keep.leased_ms.load(Ordering::Relaxed) >= keep.ceiling_ms {
            return;
        }
        let lease_ms = keep.lease_ms.min(left_ms);
        let mut is_ending = false;
        let renewed = self.change(
            &keep.space,
            &keep.key,
            Durability::Process,
            Some(lease_ms),
            |entry, env| {
                // Upholds B and C: held here alone.
                let Ok(_one) = keep.busy.try_lock() else {
                    is_ending = true;
                    return model::ChangeDecision::Fenced;
                };
                is_ending = false;
                if keep.is_ended() {
                    return model::ChangeDecision::Fenced;
                }
                model::renew(entry, env, keep.epoch, lease_ms)
            },
        );
        if is_ending {
            // If the end fails, the owner still wants its lease.
            return self.renew_later(keep);
        }
        match renewed {
            Ok((decided, _)) if matches!(decided.answer, Change::Fenced { .. }) => {}
            Ok(_) => {
                let leased_ms = now_ms.saturating_add(lease_ms);
                keep.leased_ms.store(leased_ms, Ordering::Relaxed);
                self.renew_later(keep);
            }
            Err(error) if error.kind() == ErrorKind::Closed => {}
            Err(error) => {
                let message = format!("renewing a lease failed: {error}");
                self.tell(Event::BackgroundFailed { message });
                if error.kind() != ErrorKind::Poisoned {
                    self.renew_later(keep);
                }
            }
        }
    }

    fn renew_later(&self, keep: &Arc<Keep>) {
        let pause_ms = (keep.lease_ms / PART).max(1);
        let at_ms = self.now().boot_ms.saturating_add(pause_ms);
        let mut timer = lock(&keep.timer);
        if !keep.is_ended() {
            *timer = Some(self.timers.add(at_ms, Timed::Renew(Arc::clone(keep))));
        }
    }
}

impl<C: EffectClass> Held<C> {
    fn keep_alive(&mut self, ceiling: Duration) -> Result<()> {
        if self.ended {
            return Err(Error::invalid("claim has ended: nothing is left to renew"));
        }
        let engine = &self.namespace.handle.engine;
        let now_ms = engine.now().boot_ms;
        let keep = Arc::new(Keep {
            space: Arc::clone(&self.namespace.space),
            key: self.key.clone(),
            epoch: self.epoch,
            lease_ms: self.lease_ms,
            ceiling_ms: now_ms.saturating_add(to_ms(ceiling)),
            leased_ms: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            busy: Mutex::new(()),
            timer: Mutex::new(None),
        });
        if engine.options.background {
            engine.start_timers()?;
        }
        engine.renew_later(&keep);
        self.kept = Some(Kept {
            engine: Arc::clone(engine),
            keep,
        });
        Ok(())
    }
}

macro_rules! keep_alive {
    ($name:ident) => {
        impl<C: EffectClass> $name<C> {
            /// Has the store renew the lease, each time a third of it has passed, as long as this
            /// guard lives and no longer than until `ceiling` from now: an owner that hangs loses
            /// its claim then. The lease is the one the claim was made with; a renewal by hand
            /// holds until the next one by the store. Detaching ends it.
            ///
            /// A renewal that fails is told as an event and tried again.
            ///
            /// # Errors
            /// `Invalid` for a claim that has ended, `Io` if no thread can be started.
            pub fn keep_alive(&mut self, ceiling: Duration) -> Result<()> {
                self.0.keep_alive(ceiling)
            }
        }
    };
}

keep_alive!(Claim);
keep_alive!(Started);
