//! Group commit as an application builds it: who waits while one caller flushes is served by the
//! next flush, and woken by the position it waits for.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

use crate::Fallible;

const WAITING: u8 = 0;
const DONE: u8 = 1;
const LEAD: u8 = 2;

struct Waiter {
    position: u64,
    thread: Thread,
    signal: Arc<AtomicU8>,
}

#[derive(Default)]
struct State {
    durable: u64,
    leading: bool,
    waiters: Vec<Waiter>,
}

/// How far a log is durable, and who waits for more.
#[derive(Default)]
pub(crate) struct Group(Mutex<State>);

impl Group {
    /// Returns when everything before `position` is durable. `flush` makes durable what there is,
    /// and says up to where; one caller at a time is in it.
    pub(crate) fn wait(&self, position: u64, flush: impl Fn() -> Fallible<u64>) -> Fallible<()> {
        let signal = {
            let mut state = self.state();
            if state.durable >= position {
                return Ok(());
            }
            if state.leading {
                let signal = Arc::new(AtomicU8::new(WAITING));
                state.waiters.push(Waiter {
                    position,
                    thread: std::thread::current(),
                    signal: Arc::clone(&signal),
                });
                Some(signal)
            } else {
                state.leading = true;
                None
            }
        };
        if let Some(signal) = signal {
            // Acquire: pairs with the leader's Release, so that what it flushed is seen.
            while signal.load(Ordering::Acquire) == WAITING {
                std::thread::park();
            }
            if signal.load(Ordering::Acquire) == DONE {
                return Ok(());
            }
        }
        let durable = flush()?;
        self.finish(durable);
        Ok(())
    }

    /// Wakes whom the flush served, and makes one of the others the next leader.
    fn finish(&self, durable: u64) {
        let mut served = Vec::new();
        {
            let mut state = self.state();
            state.durable = durable;
            let waiters = std::mem::take(&mut state.waiters);
            for waiter in waiters {
                if waiter.position <= durable {
                    served.push((waiter, DONE));
                } else {
                    state.waiters.push(waiter);
                }
            }
            match state.waiters.pop() {
                Some(next) => served.insert(0, (next, LEAD)),
                None => state.leading = false,
            }
        }
        for (waiter, signal) in served {
            waiter.signal.store(signal, Ordering::Release);
            waiter.thread.unpark();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
