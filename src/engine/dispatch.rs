//! A loop that dispatches an outbox: lease, deliver, acknowledge, with a growing pause after
//! failures.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::outbox::{Leased, Outbox, OutboxEntry};
use crate::error::{Error, Result};

/// What became of one dispatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dispatched {
    /// The target has it, now or from an earlier dispatch: the entry is gone.
    Done,
    /// It failed or nobody knows: it is dispatched again after a pause, under the same id.
    Retry {
        /// The error, kept with the entry.
        error: Vec<u8>,
    },
    /// It will never succeed: put aside until somebody looks.
    Park {
        /// The error, kept with the entry.
        error: Vec<u8>,
    },
}

/// Dispatches the entries of an outbox. Several may do so at once.
#[derive(Clone, Debug)]
#[must_use]
pub struct Dispatcher {
    outbox: Outbox,
    batch: usize,
    backoff_min: Duration,
    backoff_max: Duration,
    attempts_max: Option<u32>,
    stopped: Arc<AtomicBool>,
}

/// Ends a [`Dispatcher::run`] from another thread.
#[derive(Clone, Debug)]
pub struct Stopper {
    outbox: Outbox,
    stopped: Arc<AtomicBool>,
}

impl Stopper {
    /// Lets the loop end after the entry it is at.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.outbox.ring();
    }
}

/// Gives back what was not dispatched, also when the caller's code panics.
struct Rest<'a> {
    outbox: &'a Outbox,
    entries: std::vec::IntoIter<OutboxEntry>,
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        if !self.entries.as_slice().is_empty() {
            // A store that refuses this has no more dispatches to give.
            self.outbox
                .give_back(self.entries.as_slice())
                .unwrap_or_default();
        }
    }
}

impl Dispatcher {
    /// Starts with 16 entries at a time, pauses from 100 ms to one minute, and no limit of
    /// attempts.
    pub fn new(outbox: &Outbox) -> Self {
        Dispatcher {
            outbox: outbox.clone(),
            batch: 16,
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(60),
            attempts_max: None,
            stopped: Arc::default(),
        }
    }

    /// Sets how many entries are taken at a time; all of them must be dispatched within the
    /// outbox's lease. Default: 16.
    pub fn batch(mut self, count: usize) -> Self {
        self.batch = count.max(1);
        self
    }

    /// Sets the pause after the first failure, which doubles with each further one up to `max`.
    pub fn backoff(mut self, min: Duration, max: Duration) -> Self {
        (self.backoff_min, self.backoff_max) = (min, max.max(min));
        self
    }

    /// Sets after how many failures an entry is parked. Default: never.
    pub fn attempts_max(mut self, count: u32) -> Self {
        self.attempts_max = Some(count);
        self
    }

    /// Returns what ends the loop.
    pub fn stopper(&self) -> Stopper {
        Stopper {
            outbox: self.outbox.clone(),
            stopped: Arc::clone(&self.stopped),
        }
    }

    /// Dispatches what is due now and returns how many entries were delivered for good. `deliver`
    /// is called with no lock held; if it panics, its entry and the rest are given back.
    ///
    /// # Errors
    /// `Poisoned`, `Closed`, `Full`, `Damaged`, `Io`: what was delivered and not acknowledged is
    /// dispatched again.
    pub fn run_due(&self, deliver: &mut dyn FnMut(&OutboxEntry) -> Dispatched) -> Result<usize> {
        self.run_until_none_is_due(deliver).map(|(done, _)| done)
    }

    /// The same; says too when the next one will be due, if time alone decides that.
    fn run_until_none_is_due(
        &self,
        deliver: &mut dyn FnMut(&OutboxEntry) -> Dispatched,
    ) -> Result<(usize, Option<Duration>)> {
        let mut done = 0;
        while !self.is_stopped() {
            let leased = self.outbox.lease_or_when(self.batch)?;
            if leased.entries.is_empty() {
                return Ok((done, leased.next_in));
            }
            done += self.deliver_all(leased.entries, deliver)?;
        }
        Ok((done, None))
    }

    fn deliver_all(
        &self,
        leased: Vec<OutboxEntry>,
        deliver: &mut dyn FnMut(&OutboxEntry) -> Dispatched,
    ) -> Result<usize> {
        let mut rest = Rest {
            outbox: &self.outbox,
            entries: leased.into_iter(),
        };
        let mut done = Vec::new();
        let mut failed: Option<Error> = None;
        while let Some(entry) = rest.entries.as_slice().first() {
            if self.is_stopped() || failed.is_some() {
                break;
            }
            let dispatched = deliver(entry);
            let Some(entry) = rest.entries.next() else {
                break;
            };
            match dispatched {
                Dispatched::Done => done.push(entry),
                other => failed = self.put_back(&entry, other).err(),
            }
        }
        // One flush for all that were delivered, whatever became of the others.
        self.outbox.ack_many(&done)?;
        failed.map_or(Ok(done.len()), Err)
    }

    fn put_back(&self, entry: &OutboxEntry, dispatched: Dispatched) -> Result<bool> {
        match dispatched {
            Dispatched::Done => self.outbox.ack(entry),
            Dispatched::Park { error } => self.outbox.park(entry, &error),
            Dispatched::Retry { error }
                if self.attempts_max.is_some_and(|max| entry.attempt >= max) =>
            {
                self.outbox.park(entry, &error)
            }
            Dispatched::Retry { error } => {
                let doublings = entry.attempt.saturating_sub(1).min(31);
                let pause = self.backoff_min.saturating_mul(1 << doublings);
                self.outbox.nack(entry, pause.min(self.backoff_max), &error)
            }
        }
    }

    /// Dispatches until it is stopped or the store is closed; waits while nothing is due.
    ///
    /// # Errors
    /// As [`Dispatcher::run_due`]; `Closed` when the store was closed.
    pub fn run(&self, mut deliver: impl FnMut(&OutboxEntry) -> Dispatched) -> Result<()> {
        let mut waiting = self.outbox.wait::<OutboxEntry>(Duration::MAX);
        while !self.is_stopped() {
            let slept = waiting.look(|| {
                let (_, next_in) = self.run_until_none_is_due(&mut deliver)?;
                let entries = Vec::new();
                Ok(Leased { entries, next_in })
            })?;
            if let Some((listening, until_ms)) = slept.filter(|_| !self.is_stopped()) {
                self.outbox.handle.engine.sleep(listening, until_ms);
            }
        }
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}
