//! Several processes in one store: who is at what, and what they tell each other.
//!
//! Safety properties:
//! A. Every gate is a lock of the kernel: who dies lets go of it, and nobody else takes it away.
//!    Every wait for one has an end, and is `Locked` then.
//! B. Gates are taken in the order upkeep, edit, turn, and merge or flush before them all; each
//!    before the lock of this process that it stands for, but upkeep.
//! C. Whoever holds the turn knows all of the log: it has read what others appended, or it appends
//!    nothing.
//! D. An owner is alive exactly as long as the kernel holds its lock. Asked with the turn held,
//!    "dead" means that all it ever appended has been read.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Engine;
use super::namespace::to_ms;
use crate::clock::Clock;
use crate::error::{Error, ErrorKind, Result};
use crate::format::StoreId;
use crate::format::names::{FileName, GateName};
use crate::format::shared::{Cell, SHARED_BYTES, SharedCells};
use crate::log::bell;
use crate::position::Position;
use crate::vfs::fork::ForkGuard;
use crate::vfs::{Access, Dir, File, Lock, LockFile, LockMode};

/// How often the turn is tried before there is a pause: it is held for some microseconds. The other
/// gates are held over flushes.
const SPINS: u32 = 100;
/// The first pause between two looks at a gate that somebody holds.
const PAUSE_FIRST: Duration = Duration::from_micros(20);
/// Longest pause between two looks at a gate that somebody holds.
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// How often an opener tries to lock the file that says that it is alive.
const OWN_TRIES_MAX: usize = 1000;

/// One thing that a single process does at a time, and within it a single thread.
#[derive(Debug)]
struct Gate {
    name: GateName,
    lock: Arc<dyn LockFile>,
    /// The process that opened it: a forked child has the same lock in its hands.
    home: Arc<ForkGuard>,
    queue: Mutex<Queue>,
    freed: Condvar,
}

/// The threads of this process at a gate.
#[derive(Debug, Default)]
struct Queue {
    /// One of them has it, or asks the kernel for it.
    taken: bool,
    waiting_count: usize,
}

/// A gate that is held.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    gate: &'a Gate,
    locked: bool,
}

/// What came of waiting for a gate.
pub(crate) enum Taken<'a, T> {
    Held(Held<'a>),
    /// Meanwhile this was found.
    Needless(T),
    /// Somebody else had it until the end of the wait.
    TooLate,
}

impl Gate {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the gate, unless `look` finds meanwhile that there is no need to.
    fn take<T>(
        &self,
        clock: &dyn Clock,
        end_ms: u64,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Taken<'_, T>> {
        let left = || end_ms.saturating_sub(clock.read().boot_ms);
        let mut queue = self.queue();
        while queue.taken {
            let left = left();
            if left == 0 {
                return Ok(Taken::TooLate);
            }
            queue.waiting_count += 1;
            let waited = self.freed.wait_timeout(queue, Duration::from_millis(left));
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
            queue.waiting_count -= 1;
        }
        queue.taken = true;
        drop(queue);
        let mut held = Held {
            gate: self,
            locked: false,
        };
        let mut pause = PAUSE_FIRST;
        let mut spins = if self.name == GateName::Turn {
            SPINS
        } else {
            0
        };
        loop {
            let failed = |e| {
                let name = FileName::Gate(self.name).to_string();
                Error::io("locking a shared store failed", e).in_file(name)
            };
            if self.lock.try_lock(LockMode::Exclusive).map_err(failed)? {
                held.locked = true;
                return Ok(Taken::Held(held));
            }
            if let Some(found) = look()? {
                return Ok(Taken::Needless(found));
            }
            if left() == 0 {
                return Ok(Taken::TooLate);
            }
            if spins > 0 {
                spins -= 1;
                std::thread::yield_now();
                continue;
            }
            bell::pause(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.locked && self.gate.home.is_at_home() {
            // A lock that cannot be let go is let go with the process.
            self.gate.lock.unlock().unwrap_or_default();
        }
        let mut queue = self.gate.queue();
        queue.taken = false;
        if queue.waiting_count > 0 {
            self.gate.freed.notify_one();
        }
    }
}

/// Who flushes what is to be flushed.
pub(crate) enum Flush<'a> {
    Own(Held<'a>),
    /// Somebody else has, up to here.
    Done(Position),
}

/// What an opener of a shared store has that another one has not.
#[derive(Debug)]
pub(crate) struct Shared {
    dir: Arc<dyn Dir>,
    store: StoreId,
    /// Held by everybody who may write.
    member: Arc<dyn LockFile>,
    file: Arc<dyn File>,
    gates: [Gate; 5],
    /// How long a call waits for a gate.
    wait: Duration,
    /// Others have appended between the newest two turns of this process.
    others_append: AtomicBool,
    /// Where the log ended when this process let go of the turn.
    end_left: AtomicU64,
    /// Generations of which it is known that they are gone. They do not come back.
    dead: Mutex<BTreeSet<u64>>,
}

impl Shared {
    /// Opens the files of a shared store; the first opener makes them anew.
    pub(crate) fn open(
        dir: &Arc<dyn Dir>,
        store: StoreId,
        wait: Duration,
        member: &Arc<dyn LockFile>,
        first: Option<&SharedCells>,
    ) -> Result<Shared> {
        let name = FileName::Shared.to_string();
        let open = || {
            if let Some(cells) = first {
                super::catalog::remove_if_there(dir.as_ref(), &name)?;
                let file = dir.open(&name, Access::Create)?;
                file.write_at(&cells.encode(&store), 0)?;
                return Ok(file);
            }
            dir.open(&name, Access::Write)
        };
        let failed = |e| Error::io("opening a shared store failed", e);
        let file = open().map_err(|e| failed(e).in_file(name))?;
        let home = Arc::new(ForkGuard::new());
        let gate = |gate: GateName| -> Result<Gate> {
            let name = FileName::Gate(gate).to_string();
            let lock = dir.lock_file(&name, Access::Create);
            Ok(Gate {
                name: gate,
                lock: lock.map_err(|e| failed(e).in_file(name))?,
                home: Arc::clone(&home),
                queue: Mutex::default(),
                freed: Condvar::new(),
            })
        };
        let [turn, edit, upkeep, merge, flush] = GateName::ALL.map(gate);
        Ok(Shared {
            dir: Arc::clone(dir),
            store,
            member: Arc::clone(member),
            file,
            gates: [turn?, edit?, upkeep?, merge?, flush?],
            wait,
            others_append: AtomicBool::new(false),
            end_left: AtomicU64::new(0),
            dead: Mutex::default(),
        })
    }

    fn find(&self, name: GateName) -> Result<&Gate> {
        let gate = self.gates.iter().find(|gate| gate.name == name);
        gate.ok_or_else(|| Error::invalid("no such gate"))
    }

    /// Takes a gate if it is free at once.
    pub(crate) fn try_gate(&self, name: GateName, clock: &dyn Clock) -> Result<Option<Held<'_>>> {
        let never = || Ok(None::<()>);
        Ok(match self.find(name)?.take(clock, 0, never)? {
            Taken::Held(held) => Some(held),
            _ => None,
        })
    }

    /// Returns until when a call that begins now may wait for gates, on the boot clock.
    pub(crate) fn end_ms(&self, clock: &dyn Clock) -> u64 {
        clock.read().boot_ms.saturating_add(to_ms(self.wait))
    }

    /// Takes a gate, and waits for it until then.
    pub(crate) fn gate(&self, name: GateName, clock: &dyn Clock, end_ms: u64) -> Result<Held<'_>> {
        match self.find(name)?.take(clock, end_ms, || Ok(None::<()>))? {
            Taken::Held(held) => Ok(held),
            _ => Err(self.locked(name)),
        }
    }

    /// Takes the turn, and waits for it until then. `meanwhile` is called again and again while
    /// another process has it, and once before if others have appended since the turn before.
    pub(crate) fn turn_gate(
        &self,
        clock: &dyn Clock,
        end_ms: u64,
        meanwhile: impl Fn(),
    ) -> Result<Held<'_>> {
        // Relaxed: it decides when something is done, not whether.
        if self.others_append.load(Ordering::Relaxed) {
            meanwhile();
        }
        let look = || {
            meanwhile();
            Ok(None::<()>)
        };
        match self.find(GateName::Turn)?.take(clock, end_ms, look)? {
            Taken::Held(held) => Ok(held),
            _ => Err(self.locked(GateName::Turn)),
        }
    }

    /// Takes the gate of the upkeep, unless the log goes on behind this segment meanwhile.
    pub(crate) fn upkeep_gate(
        &self,
        active: u64,
        clock: &dyn Clock,
        end_ms: u64,
    ) -> Result<Option<Held<'_>>> {
        let rolled = || {
            let end = Position::from_u64(self.read()?.end);
            Ok((end.segment() > active).then_some(()))
        };
        match self.find(GateName::Upkeep)?.take(clock, end_ms, rolled)? {
            Taken::Held(held) => Ok(Some(held)),
            Taken::Needless(()) => Ok(None),
            Taken::TooLate => Err(self.locked(GateName::Upkeep)),
        }
    }

    /// Takes the gate of flushes, unless somebody else flushes what is to be flushed.
    pub(crate) fn flush_gate(
        &self,
        target: Position,
        clock: &dyn Clock,
        end_ms: u64,
    ) -> Result<Flush<'_>> {
        let durable = || {
            let durable = Position::from_u64(self.read()?.durable);
            Ok(Some(durable).filter(|durable| *durable >= target))
        };
        match self.find(GateName::Flush)?.take(clock, end_ms, durable)? {
            Taken::Held(held) => Ok(Flush::Own(held)),
            Taken::Needless(durable) => Ok(Flush::Done(durable)),
            Taken::TooLate => Err(self.locked(GateName::Flush)),
        }
    }

    fn locked(&self, name: GateName) -> Error {
        Error::new(
            ErrorKind::Locked,
            format!(
                "another process is in the way, or stopped where it should not be: gate={name:?} \
                 waited_ms={}; try again",
                to_ms(self.wait)
            ),
        )
        .in_file(FileName::Gate(name).to_string())
    }

    /// Notes where the log ends as a turn of this process begins.
    pub(crate) fn note_begin(&self, end: u64) {
        let left = self.end_left.load(Ordering::Relaxed);
        self.others_append.store(left != end, Ordering::Relaxed);
    }

    /// Notes where the log ends as a turn of this process ends.
    pub(crate) fn note_end(&self, end: u64) {
        self.end_left.store(end, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Result<SharedCells> {
        let name = || FileName::Shared.to_string();
        let mut bytes = [0; SHARED_BYTES];
        self.file
            .read_at(&mut bytes, 0)
            .map_err(|e| Error::io("reading what processes share failed", e).in_file(name()))?;
        SharedCells::decode(&bytes, &self.store).map_err(|why| {
            let what = format!(
                "{}; close the store everywhere, and open it with one version",
                why.0
            );
            Error::new(ErrorKind::Incompatible, what).in_file(name())
        })
    }

    pub(crate) fn write(&self, cell: &Cell) -> Result<()> {
        let (at, bytes) = cell.encode();
        self.file.write_at(&bytes, at).map_err(|e| {
            Error::io("telling other processes failed", e).in_file(FileName::Shared.to_string())
        })
    }

    /// Says, at the end of this opener, whether it was the last one; then nobody else can come in.
    /// If it was not, it holds nothing any more.
    pub(crate) fn is_last(&self) -> Result<bool> {
        let tried = self.member.try_lock(LockMode::Exclusive);
        let name = FileName::Members.to_string();
        tried.map_err(|e| Error::io("locking the store failed", e).in_file(name))
    }

    /// Says whether the opener of a generation is alive (D). What cannot be found out is taken for
    /// alive: its lease ends all the same.
    pub(crate) fn is_alive(&self, generation: u64) -> bool {
        let dead = || self.dead.lock().unwrap_or_else(PoisonError::into_inner);
        if dead().contains(&generation) {
            return false;
        }
        let gone = is_gone(self.dir.as_ref(), generation);
        if gone {
            dead().insert(generation);
        }
        !gone
    }

    /// Locks the file that says that the opener of this generation is alive.
    pub(crate) fn own(dir: &dyn Dir, generation: u64) -> Result<Box<dyn Lock>> {
        let name = FileName::Owner(generation).to_string();
        let note = format!("pid={}", std::process::id());
        for _ in 0..OWN_TRIES_MAX {
            let tried = dir.lock(&name, true, &note);
            let failed = |e| Error::io("locking a shared store failed", e).in_file(name.clone());
            if let Ok(lock) = tried.map_err(failed)? {
                return Ok(lock);
            }
            // Somebody is just asking whether this opener is alive.
            std::thread::park_timeout(PAUSE_MAX);
        }
        Err(Error::new(
            ErrorKind::Locked,
            "another opener has this generation; open again",
        )
        .in_file(name))
    }
}

/// Says whether nobody holds the file of an opener of this generation (D).
pub(super) fn is_gone(dir: &dyn Dir, generation: u64) -> bool {
    let name = FileName::Owner(generation).to_string();
    match dir.lock_file(&name, Access::Read) {
        // Shared, so that two who ask do not take each other for the owner.
        Ok(lock) => {
            let is_free = lock.try_lock(LockMode::Shared).unwrap_or(false);
            // At once, whoever has this opening of the file: a forked child may.
            lock.unlock().unwrap_or_default();
            is_free
        }
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

impl Engine {
    /// Takes a gate; nothing in a store of one process.
    pub(crate) fn gate(&self, name: GateName, end_ms: u64) -> Result<Option<Held<'_>>> {
        let Some(shared) = &self.shared else {
            return Ok(None);
        };
        // A forked child would take the parent's.
        self.check_home()?;
        shared.gate(name, self.clock(), end_ms).map(Some)
    }

    /// Says whether a task has waited for another process's flush until then, which is an error:
    /// what it has appended is in the log.
    pub(crate) fn check_gate_end(&self, end_ms: u64) -> Result<()> {
        match &self.shared {
            Some(shared) if self.clock().read().boot_ms >= end_ms => {
                Err(shared.locked(GateName::Flush).maybe_applied())
            }
            _ => Ok(()),
        }
    }

    /// Returns until when a call that begins now may wait for gates; 0 in a store of one process.
    pub(crate) fn gate_end_ms(&self) -> u64 {
        let shared = self.shared.as_ref();
        shared.map_or(0, |shared| shared.end_ms(self.clock()))
    }
}
