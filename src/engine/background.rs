//! Background threads: one writes and flushes what callers left in memory, one maintains, one
//! merges index runs.
//!
//! A failure is kept in `health()`, counted, told as an event, and tried again after a growing
//! pause; it never spins. The threads end when the last handle closes the store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::Engine;
use super::namespace::to_ms;
use crate::error::{Error, ErrorKind, Result};
use crate::options::Event;

/// How often expiry is looked for when nothing else happens.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// A task of its own thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Task {
    Flush,
    Sweep,
    Merge,
}

/// What the threads wait for.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    state: Mutex<State>,
    /// Records wait in memory, or did so when the thread that writes them looked last: changed with
    /// the lock, so that whoever appends needs it only for the first record.
    dirty: AtomicBool,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    work: bool,
    /// A task waits for the disk.
    flush: bool,
    /// There is a thread that flushes.
    flushing: bool,
    stop: bool,
}

impl Signals {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that records wait in memory. Called with the append lock held: the thread that writes
    /// them takes it behind [`Signals::take_flush`], so it sees every record of whoever found the
    /// mark there still.
    #[inline]
    pub(crate) fn dirty(&self) {
        if !self.dirty.load(Ordering::Relaxed) {
            self.mark_dirty();
        }
    }

    #[cold]
    fn mark_dirty(&self) {
        let _state = self.state();
        self.dirty.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Begins a flush: what is appended from here on says so again. Says whether tasks wait for it.
    fn take_flush(&self) -> bool {
        let mut state = self.state();
        self.dirty.store(false, Ordering::Relaxed);
        std::mem::take(&mut state.flush)
    }

    /// Says that there is maintenance to do.
    pub(crate) fn wake(&self) {
        self.state().work = true;
        self.changed.notify_all();
    }

    /// Has the thread that flushes do so at once, for tasks, which cannot wait for a flush
    /// themselves. `false`: there is none.
    pub(crate) fn flush_now(&self) -> bool {
        let mut state = self.state();
        let served = state.flushing && !state.stop;
        if served && !state.flush {
            state.flush = true;
            self.changed.notify_all();
        }
        served
    }

    pub(crate) fn stop(&self) {
        self.state().stop = true;
        self.changed.notify_all();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.state().stop
    }

    /// Waits until `ready` or the time is over; `false` says that the store is closing.
    fn wait(&self, timeout: Duration, ready: impl Fn(&mut State) -> bool) -> bool {
        let waited = self
            .changed
            .wait_timeout_while(self.state(), timeout, |state| !state.stop && !ready(state));
        let (state, _timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.stop
    }
}

/// Starts the threads of an engine.
pub(crate) fn start(engine: &Arc<Engine>) -> Result<Vec<JoinHandle<()>>> {
    let spawn = |name: &str, body: fn(&Engine)| {
        let engine = Arc::clone(engine);
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || body(&engine))
            .map_err(|e| Error::io("starting a background thread failed", e))
    };
    let bodies = [
        ("idemlog-flush", flush_loop as fn(&Engine)),
        ("idemlog-sweep", sweep_loop),
        ("idemlog-merge", merge_loop),
    ];
    let mut threads = Vec::new();
    for (name, body) in bodies {
        match spawn(name, body) {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                engine.background.stop();
                for thread in threads {
                    thread.join().unwrap_or_default();
                }
                return Err(error);
            }
        }
    }
    engine.background.state().flushing = true;
    Ok(threads)
}

fn flush_loop(engine: &Engine) {
    let flush = engine.options.flush_interval.max(Duration::from_millis(1));
    let per_sync = engine
        .options
        .sync_interval
        .as_nanos()
        .div_ceil(flush.as_nanos())
        .max(1);
    let mut unsynced = 0u128;
    loop {
        // While something is written but not synced, the wait is at most one interval.
        let idle = if unsynced > 0 { flush } else { SWEEP_INTERVAL };
        let ready =
            |state: &mut State| state.flush || engine.background.dirty.load(Ordering::Relaxed);
        if !engine.background.wait(idle, ready) {
            return;
        }
        if !engine.background.wait(flush, |state| state.flush) {
            return;
        }
        let result = if engine.background.take_flush() {
            let flushed = engine.flush_for_tasks();
            if flushed.is_err() && engine.poisoned().is_none() {
                // Another process was in the way: each task knows how long it waits.
                engine.syncer.ring_tasks();
            }
            flushed
        } else {
            engine.flush_due(unsynced >= per_sync)
        };
        engine.pay_waiters();
        let pending = engine.syncer.durable() < engine.core().writer.written();
        unsynced = if pending { unsynced + 1 } else { 0 };
        engine.note_background(Task::Flush, &result);
        if result.is_err() && engine.poisoned().is_some() {
            return;
        }
    }
}

fn sweep_loop(engine: &Engine) {
    let mut pause = SWEEP_INTERVAL;
    let mut looked_ms = engine.now().boot_ms;
    loop {
        engine.deliver_events();
        let going = engine
            .background
            .wait(pause, |state| std::mem::take(&mut state.work));
        if !going {
            return;
        }
        engine.pay_waiters();
        // A sleep does not count the time for which the machine was suspended; leases do.
        let now_ms = engine.now().boot_ms;
        if now_ms.saturating_sub(looked_ms) > to_ms(pause + SWEEP_INTERVAL) {
            engine.time_moved();
        }
        looked_ms = now_ms;
        let result = engine.maintain();
        pause = if result.is_ok() {
            SWEEP_INTERVAL
        } else {
            (pause * 2).min(PAUSE_MAX)
        };
        engine.note_background(Task::Sweep, &result);
        if result.is_err() && !engine.background.wait(pause, |_| false) {
            return;
        }
    }
}

/// Merges are apart from the sweep: one may take seconds, and sealing must not wait for it.
fn merge_loop(engine: &Engine) {
    let mut pause = SWEEP_INTERVAL;
    while engine.background.wait(pause, |_| false) {
        let merged = engine.merge_once();
        pause = match &merged {
            Ok(true) => Duration::from_millis(1),
            Ok(false) => SWEEP_INTERVAL,
            Err(_) => (pause * 2).clamp(SWEEP_INTERVAL, PAUSE_MAX),
        };
        if !engine.background.is_stopping() {
            engine.note_background(Task::Merge, &merged.map(|_| ()));
        }
    }
}

impl Engine {
    /// Writes out what waits in memory; with `sync`, also flushes what was written before.
    fn flush_due(&self, sync: bool) -> Result<()> {
        {
            let mut core = self.core();
            if core.closed || self.poisoned().is_some() {
                return Ok(());
            }
            self.write_out(&mut core)?;
        }
        if sync { self.sync_all() } else { Ok(()) }
    }

    /// Flushes as a caller does who waits, with a mark in front of what is written.
    fn flush_for_tasks(&self) -> Result<()> {
        if self.core().closed || self.poisoned().is_some() {
            return Ok(());
        }
        self.sync_all()
    }

    /// Keeps the newest failure of each task until that task succeeds.
    fn note_background(&self, task: Task, result: &Result<()>) {
        let message = match result {
            Ok(()) => None,
            Err(error) if error.kind() == ErrorKind::Closed => None,
            Err(error) => Some(error.to_string()),
        };
        if let Some(message) = &message {
            self.counters.background_failures.add(1);
            self.tell(Event::BackgroundFailed {
                message: message.clone(),
            });
        }
        let mut errors = self
            .background_errors
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        match message {
            Some(message) => errors.insert(task, message),
            None => errors.remove(&task),
        };
    }

    pub(crate) fn background_error(&self) -> Option<String> {
        self.background_errors
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .next()
            .cloned()
    }

    /// Ends the store for all handles: everything answered so far becomes durable, and the next
    /// open finds a clean end of the log.
    pub(crate) fn close(&self) -> Result<()> {
        if self.core().closed {
            return Ok(());
        }
        if let Some(shared) = &self.shared {
            return self.close_shared(shared);
        }
        if self.reader.is_some() {
            self.core().closed = true;
            return Ok(());
        }
        let synced = match self.poison.error() {
            Some(error) => Err(error),
            None => self.sync_all(),
        };
        let _one_at_a_time = self.upkeep();
        let end = {
            let mut core = self.core();
            if core.closed {
                return Ok(());
            }
            core.closed = true;
            core.writer.end()
        };
        synced?;
        // Whatever was appended between the flush and the mark above is not durable: not clean.
        let clean = self.syncer.durable() == end;
        if clean {
            self.write_hint();
        }
        self.edit_manifest(|manifest| manifest.closed_at = clean.then(|| end.get()))
    }

    pub(crate) fn uses_zero_fill(options: &crate::options::Options, in_place: bool) -> bool {
        super::prepare::wants_zero_fill(options.zero_fill, options.durability, in_place)
    }
}
