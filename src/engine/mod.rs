//! The shell: locks, threads, and the order of steps. It introduces log and index to each other.
//!
//! Lock order: `merging`, then `maintenance`, then `catalog`, then `core`, then the syncer's own.
//! No lock is held over user code or a flush, but `merging` and `maintenance` over their own;
//! `core` is held over a `write` of what was just appended, never over a read of sealed data.

pub(crate) mod ack_gate;
mod append;
pub(crate) mod attach;
mod background;
mod batch;
mod carry;
mod catalog;
pub(crate) mod cells;
pub(crate) mod claim;
pub(crate) mod class;
pub(crate) mod commit_all;
mod core;
pub(crate) mod dispatch;
pub(crate) mod filter;
mod follow;
mod future;
mod group;
pub(crate) mod handle;
mod hint;
mod install;
pub(crate) mod intake;
#[cfg(all(test, idemlog_shuttle))]
mod interleaved;
pub(crate) mod job;
mod join;
mod keep;
mod lease;
mod listing;
pub(crate) mod lock;
mod lookup;
mod merge;
pub(crate) mod namespace;
mod open;
pub(crate) mod outbox;
mod pass;
mod poison;
mod prepare;
pub(crate) mod reader;
mod recovery;
pub(crate) mod repair;
mod room;
pub(crate) mod run_once;
mod runs;
mod salvage;
mod seal;
mod settle;
pub(crate) mod shared;
#[cfg(feature = "snowflake")]
pub(crate) mod snowflake;
mod space;
mod sweep;
pub(crate) mod ticket;
mod timers;
#[cfg(feature = "token")]
pub(crate) mod token;
mod turn;
#[cfg(feature = "bincode")]
mod typed;
mod update;
pub(crate) mod verify;
pub(crate) mod wait;
mod waits;
pub(crate) mod watermarks;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, TryLockError};
use std::time::Duration;

use arc_swap::ArcSwap;

use self::catalog::{Catalog, EditError};
use self::core::{Core, Snapshot};
use self::poison::Poison;
use crate::clock::{Anchor, Clock, Now, TrustedTime};
use crate::error::{Error, ErrorKind, Result};
use crate::format::StoreId;
use crate::format::manifest::Manifest;
use crate::format::names::GateName;
use crate::format::shared::Cell;
use crate::index::KeyHash;
use crate::log::bell::pause;
use crate::log::sync::Syncer;
use crate::log::sync::primitives::{Mutex, MutexGuard};
use crate::options::{Durability, Event, Options};
use crate::stats::{Counters, OpenReport};
use crate::vfs::fork::ForkGuard;
use crate::vfs::{Dir, Lock};

/// How long a caller that needs room sleeps before it looks again.
const ROOM_PAUSE: Duration = Duration::from_micros(200);
/// Events kept for a callback that does not keep up; further ones are lost.
const EVENTS_MAX: usize = 10_000;

/// One open store.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) dir: Arc<dyn Dir>,
    /// Held until the store is closed and the last guard is gone, so that no second opener gets
    /// in while anything of this one could still write.
    lock: Mutex<Option<Box<dyn Lock>>>,
    /// Claim guards that are alive.
    pub(crate) guards_count: AtomicUsize,
    pub(crate) options: Options,
    pub(crate) time: TrustedTime,
    pub(crate) hash: KeyHash,
    pub(crate) store: StoreId,
    pub(crate) generation: u64,
    pub(crate) pid: u32,
    /// The process that opened the store.
    pub(crate) home: ForkGuard,
    pub(crate) core: Mutex<Core>,
    /// The core's own, which is read without its lock.
    published: Arc<ArcSwap<Snapshot>>,
    pub(crate) syncer: Syncer,
    catalog: Mutex<Catalog>,
    /// Seals and sweeps are one at a time, and rolls but for the easy ones.
    maintenance: Mutex<prepare::Upkeep>,
    /// Merges are one at a time: two of the same runs would write to the same temporary file.
    merging: Mutex<()>,
    poison: Poison,
    pub(crate) counters: Counters,
    /// Zero-fill pays on this file system.
    zero_fill: bool,
    clock_was_suspect: AtomicBool,
    /// What the callback is still to be told.
    events: Mutex<Vec<Event>>,
    background_errors: RwLock<BTreeMap<background::Task, String>>,
    pub(crate) background: background::Signals,
    pub(crate) waits: waits::Waits,
    pub(crate) timers: timers::Timers,
    pub(crate) report: OpenReport,
    /// Why the store is open for reading what is left of it only.
    salvaged: Option<String>,
    /// What is needed where other processes have the store open, too.
    pub(crate) shared: Option<shared::Shared>,
    /// What is needed where the store is open for reading only.
    pub(crate) reader: Option<reader::Reader>,
}

impl Engine {
    pub(crate) fn clock(&self) -> &dyn Clock {
        self.options.clock.as_ref()
    }

    /// Reads trusted time; reports the first reading of a suspect wall clock.
    pub(crate) fn now(&self) -> Now {
        let now = self.time.now(self.clock());
        if now.suspect != self.clock_was_suspect.load(Ordering::Relaxed) {
            self.clock_was_suspect.store(now.suspect, Ordering::Relaxed);
            if now.suspect {
                self.tell(Event::ClockSuspect);
            }
        }
        now
    }

    /// Takes the append lock. A thread that panicked while it held the lock may have left half a
    /// change behind: the store is poisoned then.
    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|broken| {
            self.poison_with("a thread panicked inside the store".to_owned());
            broken.into_inner()
        })
    }

    fn catalog(&self) -> MutexGuard<'_, Catalog> {
        self.catalog.lock().unwrap_or_else(|broken| {
            self.poison_with("a thread panicked inside the store".to_owned());
            broken.into_inner()
        })
    }

    /// Takes the upkeep, among threads and among processes; whoever has it knows what the others
    /// have done.
    fn maintenance(&self) -> Result<prepare::Maintaining<'_>> {
        self.check_home()?;
        self.check_writer()?;
        let end_ms = self.gate_end_ms();
        let upkeep = self.upkeep();
        let gate = self.gate(GateName::Upkeep, end_ms)?;
        if let Some(shared) = &self.shared {
            self.know_all(shared)?;
        }
        Ok(prepare::Maintaining::new(upkeep, gate))
    }

    /// The same, unless there is room meanwhile: another process goes on in a later segment than
    /// this one knows, or whoever is at the upkeep has prepared the next one.
    fn maintenance_unless_room(
        &self,
        room: room::Room,
    ) -> Result<Option<prepare::Maintaining<'_>>> {
        let Some(shared) = &self.shared else {
            self.check_home()?;
            self.check_writer()?;
            let upkeep = self.upkeep_unless_room(room)?;
            return Ok(upkeep.map(|upkeep| prepare::Maintaining::new(upkeep, None)));
        };
        self.check_home()?;
        let end_ms = shared.end_ms(self.clock());
        let active = self.core().writer.segment.id;
        let upkeep = self.upkeep();
        let Some(gate) = shared.upkeep_gate(active, self.clock(), end_ms)? else {
            return Ok(None);
        };
        self.know_all(shared)?;
        Ok(Some(prepare::Maintaining::new(upkeep, Some(gate))))
    }

    fn upkeep_unless_room(
        &self,
        room: room::Room,
    ) -> Result<Option<MutexGuard<'_, prepare::Upkeep>>> {
        // Under the scheduler no time passes.
        while !self.is_at_bound(room) && cfg!(not(all(test, idemlog_shuttle))) {
            match self.maintenance.try_lock() {
                Ok(upkeep) => return Ok(Some(upkeep)),
                Err(TryLockError::Poisoned(broken)) => return Ok(Some(broken.into_inner())),
                Err(TryLockError::WouldBlock) => pause(ROOM_PAUSE),
            }
            if self.roll_at_once(room)? {
                return Ok(None);
            }
        }
        Ok(Some(self.upkeep()))
    }

    /// The same, unless another process is at it.
    fn try_maintenance(&self) -> Result<Option<prepare::Maintaining<'_>>> {
        self.check_writer()?;
        let upkeep = self.upkeep();
        let Some(shared) = &self.shared else {
            return Ok(Some(prepare::Maintaining::new(upkeep, None)));
        };
        self.check_home()?;
        let Some(gate) = shared.try_gate(GateName::Upkeep, self.clock())? else {
            return Ok(None);
        };
        self.know_all(shared)?;
        Ok(Some(prepare::Maintaining::new(upkeep, Some(gate))))
    }

    fn upkeep(&self) -> MutexGuard<'_, prepare::Upkeep> {
        self.maintenance
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that the manifest is known as it is on disk. Who has replaced it may have died
    /// before it told anybody, and before it made the replacement durable.
    fn know_all(&self, shared: &shared::Shared) -> Result<()> {
        let gate = self.gate(GateName::Edit, self.gate_end_ms())?;
        let edit = {
            let mut catalog = self.catalog();
            catalog.reload()?;
            catalog.manifest().edit
        };
        if shared.read()?.edit < edit {
            self.dir
                .sync()
                .map_err(|e| Error::io("syncing the directory failed", e))?;
            shared.write(&Cell::Edit(edit))?;
        }
        drop(gate);
        self.refresh()
    }

    /// Replaces the manifest. An edit of which nobody knows whether it is on disk poisons.
    fn edit_manifest(&self, change: impl FnOnce(&mut Manifest)) -> Result<()> {
        self.edit_manifest_at(None, change)
    }

    /// The same, and lets the wall clock push trusted time; `Some(true)`: somebody confirmed it.
    fn edit_manifest_at(
        &self,
        push: Option<bool>,
        change: impl FnOnce(&mut Manifest),
    ) -> Result<()> {
        self.check_home()?;
        let gate = self.gate(GateName::Edit, self.gate_end_ms())?;
        let mut catalog = self.catalog();
        if gate.is_some() {
            // Others may have replaced it since.
            catalog.reload()?;
            self.time.adopt(self.clock(), catalog.manifest().anchor);
        }
        let confirmed = push.unwrap_or(false);
        // Others may have pushed it since: asked behind that.
        let push_ms = push.and_then(|confirmed| self.time.push_due(self.clock(), confirmed));
        let push_ms = push_ms.unwrap_or(0);
        let anchor = self.time.anchor(self.clock(), push_ms, confirmed);
        let edited = catalog.edit(|manifest| {
            manifest.anchor = anchor;
            change(manifest);
        });
        let edit = catalog.manifest().edit;
        drop(catalog);
        if edited.is_ok() {
            self.edit_is_done(edit, anchor, push_ms, confirmed)?;
        }
        drop(gate);
        edited.map_err(|EditError { error, uncertain }| {
            if uncertain {
                self.poison_with(error.to_string());
                return error.maybe_applied();
            }
            error
        })
    }

    /// Tells other processes of an edit, and lets time go on from what it says.
    fn edit_is_done(&self, edit: u64, anchor: Anchor, push_ms: u64, confirmed: bool) -> Result<()> {
        let Some(shared) = &self.shared else {
            self.time.push(push_ms, confirmed);
            return Ok(());
        };
        // Another thread may have followed the edit already: this adds nothing then.
        self.time.adopt(self.clock(), anchor);
        shared.write(&Cell::Edit(edit)).map_err(|error| {
            self.poison_with(error.to_string());
            error.maybe_applied()
        })
    }

    /// Lets the wall clock push trusted time ahead, as far as it may be believed or somebody
    /// confirmed it. The push is durable before anything is decided by it.
    pub(crate) fn push_time(&self, confirmed: bool) -> Result<()> {
        if self.time.push_due(self.clock(), confirmed).is_none() {
            return Ok(());
        }
        self.edit_manifest_at(Some(confirmed), |_| ())?;
        self.owe_waiters();
        Ok(())
    }

    /// Says, with locks held, that everybody who waits must look again.
    pub(crate) fn owe_waiters(&self) {
        self.waits.owe();
        self.background.wake();
    }

    /// Wakes those to whom that is owed, with no lock held.
    pub(crate) fn pay_waiters(&self) {
        if !self.home.is_at_home() {
            return;
        }
        self.waits.pay();
        self.syncer.ring_owed();
    }

    /// Refuses every write from here on.
    pub(crate) fn poison_with(&self, cause: String) {
        if self.poison.set(cause.clone()) {
            if let Some(shared) = &self.shared {
                // Who is not told finds out by the kernel's own report to its file.
                shared
                    .write(&Cell::Poison(cause.clone()))
                    .unwrap_or_default();
            }
            self.syncer.poison();
            self.owe_waiters();
            self.tell(Event::Poisoned { message: cause });
        }
    }

    pub(crate) fn poisoned(&self) -> Option<&str> {
        self.poison.cause()
    }

    /// Keeps an event for the callback, which is never called from here: locks may be held.
    pub(crate) fn tell(&self, event: Event) {
        if self.options.on_event.is_none() {
            return;
        }
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() < EVENTS_MAX {
            events.push(event);
        }
        drop(events);
        self.background.wake();
    }

    /// Calls the callback with everything that happened, with no lock held.
    pub(crate) fn deliver_events(&self) {
        let Some(callback) = &self.options.on_event else {
            return;
        };
        let events =
            std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        for event in &events {
            callback(event);
        }
    }

    /// Lets other openers in, if the store is closed and no guard is alive.
    pub(crate) fn unlock_if_over(&self) {
        if !self.home.is_at_home() {
            return;
        }
        // Acquire pairs with the Release of a guard's end: what it wrote is in the file.
        let over = self.guards_count.load(Ordering::Acquire) == 0 && self.core().closed;
        if over {
            // Another thread may be closing still: it writes the end of the log with this held.
            let _nobody_closes = self.upkeep();
            drop(
                self.lock
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take(),
            );
        }
    }

    /// Refuses to write to what is left of a damaged store.
    pub(crate) fn check_whole(&self) -> Result<()> {
        self.salvaged.as_ref().map_or(Ok(()), |why| {
            Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "store is damaged and open to salvage: records are lost, so only keys that \
                     were found are answered; repair it first; damage: {why}"
                ),
            ))
        })
    }

    /// Says whether background work may be done: by the opener's process, while the store is open
    /// and sound.
    fn may_maintain(&self, core: &Core) -> bool {
        !core.closed && self.poisoned().is_none() && self.home.is_at_home()
    }

    /// Checks what every writing call checks first.
    pub(crate) fn check_writable(&self, core: &Core) -> Result<()> {
        check_open(core)?;
        self.check_home()?;
        self.check_writer()?;
        match self.poison.error() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Checks what every call that may write if it has to checks first: a reader does not have to.
    pub(crate) fn check_usable(&self, core: &Core) -> Result<()> {
        if self.reader.is_none() {
            return self.check_writable(core);
        }
        check_open(core)?;
        self.check_home()
    }

    /// Says that no other process is in the store.
    pub(crate) fn is_alone(&self) -> bool {
        self.shared.is_none() && self.reader.is_none()
    }

    /// Refuses a child of the process that opened the store. Asked before any lock is taken: one
    /// that another thread held at the fork is held for ever in the child.
    #[inline]
    fn check_home(&self) -> Result<()> {
        if self.home.is_at_home() {
            return Ok(());
        }
        Err(not_at_home())
    }

    pub(crate) fn level(
        &self,
        namespace: Option<Durability>,
        call: Option<Durability>,
    ) -> Durability {
        call.or(namespace).unwrap_or(self.options.durability)
    }
}

#[cold]
fn not_at_home() -> Error {
    Error::new(
        ErrorKind::Closed,
        "handle was inherited by a forked child; open the store in the child instead",
    )
}

pub(crate) fn check_open(core: &Core) -> Result<()> {
    if core.closed {
        return Err(Error::new(
            ErrorKind::Closed,
            "store was closed by this process",
        ));
    }
    Ok(())
}
