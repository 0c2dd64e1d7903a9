//! A simulated disk: it dies at a chosen step, loses power, tears writes, fails calls, fills up.
//!
//! Every call that changes the disk or makes changes durable is one numbered *step*, from 0:
//! creating a file, `write_at`, `set_len`, `allocate`, `File::sync`, `rename`, `unlink`,
//! `Dir::sync`. Reads see a cache, and are numbered for themselves. `File::sync` makes the content
//! and size of that file durable, not its name; `Dir::sync` makes names durable, not contents. A
//! kill keeps the cache, a power cut keeps what is durable and any subset of the rest, in sectors
//! of 512 bytes.
//!
//! Without history ([`SimDisk::memory`]) it is the home of in-memory stores.
//!
//! # Your handler, at every step
//!
//! [`for_each_crash_point`] runs a scenario once for each of its steps, lets the process die or
//! the power fail there in many ways, and hands you every disk that the next process could find.
//! The scenario is your consumer, with your effect; what it did to the world outside, and what the
//! store has answered it, it leaves in a cell. The check is the next process: it opens the disk,
//! gets the same messages again, and judges the world.
//!
//! ```
//! use std::cell::RefCell;
//! use std::sync::Arc;
//!
//! use idemlog::testing::ManualClock;
//! use idemlog::testing::sim::{CrashOptions, SimDisk, for_each_crash_point};
//! use idemlog::{NamespaceOptions, NonRepeatable, Options, Result, RunVerdict};
//!
//! /// What the handler does to the world: money that was sent stays sent.
//! type Ledger = RefCell<Vec<String>>;
//!
//! /// The handler under test.
//! fn pay(disk: &SimDisk, ledger: &Ledger, orders: &[&str]) -> Result<Vec<RunVerdict>> {
//!     let clock = Arc::new(ManualClock::new(1_700_000_000_000));
//!     let options = Options::new().background(false).clock(clock);
//!     let log = options.open_on(disk.dir())?;
//!     let payments = log.namespace::<NonRepeatable>("payments", NamespaceOptions::new())?;
//!     let pay_one = |order: &&str| {
//!         payments.run_once(order, |_attempt| {
//!             ledger.borrow_mut().push(order.to_string());
//!             Ok(b"receipt".to_vec())
//!         })
//!     };
//!     let verdicts = orders.iter().map(pay_one).collect::<Result<Vec<_>>>()?;
//!     log.close()?;
//!     Ok(verdicts)
//! }
//!
//! let orders = ["order-1", "order-2"];
//! let paid = Ledger::default();
//! let scenario = |disk: &SimDisk| {
//!     paid.borrow_mut().clear();
//!     // It ends with an error where the process dies: that is no failure of the test.
//!     pay(disk, &paid, &orders).ok();
//! };
//! let totals = for_each_crash_point(&CrashOptions::default(), scenario, |state| {
//!     let ledger = Ledger::new(paid.borrow().clone());
//!     let verdicts = pay(&state.disk, &ledger, &orders).expect("opens after any crash");
//!     for (order, verdict) in orders.iter().zip(verdicts) {
//!         let count = ledger.borrow().iter().filter(|paid| paid == &order).count();
//!         // Nothing is paid twice, and what may have been paid or not is for a person to see.
//!         assert!(count == 1 || count == 0 && matches!(verdict, RunVerdict::InDoubt(_)));
//!     }
//! });
//! assert!(totals.checked > 100);
//! ```
//!
//! A check that panics leaves a line on stderr, such as
//! `crash seed=1 step=42 doing="sync seg-000000000001.log" kind=DropAll`; with its step and kind
//! [`CrashOptions::replay`] makes that one disk again.
//!
//! # Your handler, and a call that fails
//!
//! A [`Fault`] makes a chosen step fail, or a chosen reading call, once or from then on. Here the
//! first flush of the log after the open fails, and the kernel marks the pages as clean all the
//! same.
//!
//! ```
//! use idemlog::testing::sim::{Fault, FaultKind, Op, SimDisk};
//! use idemlog::{ErrorKind, NamespaceOptions, Observed, Options};
//!
//! let disk = SimDisk::new();
//! let log = Options::new().background(false).open_on(disk.dir())?;
//! let orders = log.filter("orders", NamespaceOptions::new())?;
//! disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
//!
//! let error = orders.observe("order-1").unwrap_err();
//! assert_eq!(error.kind(), ErrorKind::Io);
//! // Nobody knows what is on the disk: the store promises nothing more until it is opened again.
//! let error = orders.observe("order-2").unwrap_err();
//! assert_eq!(error.kind(), ErrorKind::Poisoned);
//!
//! log.close().unwrap_err();
//! let log = Options::new().background(false).open_on(disk.after_kill().dir())?;
//! let orders = log.filter("orders", NamespaceOptions::new())?;
//! assert_eq!(orders.observe("order-2")?, Observed::New);
//! # Ok::<(), idemlog::Error>(())
//! ```

mod content;
mod crash;
mod fault;
mod locks;
mod power;
mod rng;
mod state;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::{Access, Dir, File, LockAttempt, LockFile, LockMode, Map, check_name, read_fully};
use fault::{Attempts, Gate};
use locks::SimLock;
use state::{FileId, State};

pub use crash::{CrashKind, CrashOptions, CrashState, CrashTotals, for_each_crash_point};
pub use fault::{Fault, FaultKind, Op, SyncFailure};
pub use locks::SimProcess;
pub use power::{PowerCut, PowerCuts};
pub use rng::Rng;
pub use state::Counts;

/// One simulated disk with one directory. Clones are handles of the same disk.
#[derive(Clone)]
pub struct SimDisk(Arc<Mutex<State>>);

impl SimDisk {
    /// Makes an empty disk that remembers what is not durable.
    pub fn new() -> SimDisk {
        SimDisk::seeded(getrandom::u64().unwrap_or(1))
    }

    /// Like [`SimDisk::new`], and a store on it draws its random bytes (its identity, its key)
    /// from this seed: the same calls leave the same bytes in every process.
    pub fn seeded(seed: u64) -> SimDisk {
        SimDisk::from_state(State::new(true, Some(Rng::new(seed))))
    }

    /// Makes an empty disk without history: fast, no step log, and empty after a power cut.
    pub fn memory() -> SimDisk {
        SimDisk::from_state(State::new(false, None))
    }

    fn from_state(state: State) -> SimDisk {
        SimDisk(Arc::new(Mutex::new(state)))
    }

    /// A panic elsewhere leaves the state usable: each change is complete before code of a
    /// caller runs.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the directory. Two calls are two openers: they compete for locks.
    pub fn dir(&self) -> Arc<dyn Dir> {
        Arc::new(SimDir {
            disk: self.clone(),
            process: 0,
        })
    }

    /// Returns how many steps were taken; the next step has this number.
    pub fn steps(&self) -> u64 {
        self.state().steps
    }

    /// Returns a line for each step, such as `write seg-1.log 64+32` (offset and bytes).
    pub fn step_log(&self) -> Vec<String> {
        self.state().log.clone()
    }

    /// Returns what was asked of this disk so far.
    pub fn counts(&self) -> Counts {
        self.state().counts
    }

    /// Lets the process die before step `step`: it and all later calls, also reads, fail.
    pub fn stop_at(&self, step: u64) {
        self.state().stop = Some((step, 0));
    }

    /// Lets the process die inside step `step`: of a write, the first bytes are in the cache.
    pub fn stop_inside(&self, step: u64, kept_bytes: usize) {
        self.state().stop = Some((step, kept_bytes));
    }

    /// Returns what the process was doing when it died, if it did.
    pub fn died_doing(&self) -> Option<String> {
        self.state().death.as_ref().map(|death| death.what.clone())
    }

    /// Returns the disk as the next process finds it: the cache is kept, unsynced changes stay
    /// unsynced, locks are free, and there are no faults. The old disk stays as it is.
    #[must_use]
    pub fn after_kill(&self) -> SimDisk {
        SimDisk::from_state(self.state().restarted())
    }

    /// Like [`SimDisk::after_kill`], for a process that died inside the write at which
    /// [`SimDisk::stop_at`] stopped it: the first bytes of that write are in the cache.
    #[must_use]
    pub fn after_kill_inside(&self, kept_bytes: usize) -> SimDisk {
        SimDisk::from_state(self.state().killed_inside(kept_bytes))
    }

    /// Returns the disk after a power cut. The old disk stays as it is.
    #[must_use]
    pub fn after_power_cut(&self, cut: &mut PowerCut) -> SimDisk {
        SimDisk::from_state(self.state().after_power_cut(cut))
    }

    /// Returns a disk for every possible outcome of a power cut, or `limit` random ones if
    /// there are more.
    pub fn after_power_cut_exhaustive(&self, limit: u64) -> PowerCuts {
        PowerCuts::new(self.state().restarted(), limit, 0)
    }

    /// Plans an error. Of several for one step the first planned is given.
    pub fn fail(&self, fault: Fault) {
        self.state().faults.push(fault);
    }

    /// Lets `count` more reading calls succeed (opening an existing file, `read_at`, `size`,
    /// `map`, `list`), and then all fail with EIO.
    pub fn fail_reads_after(&self, count: u64) {
        let mut state = self.state();
        let first = state.counts.reads + count;
        state
            .faults
            .push(Fault::sticky(first, FaultKind::Io).reads());
    }

    /// Forgets planned errors, also of reads, and planned deaths. The dead stay dead.
    pub fn clear_faults(&self) {
        let mut state = self.state();
        state.faults.clear();
        state.stop = None;
    }

    /// Sets the free space; `None` is unlimited. Space is taken in sectors when they are first
    /// written or allocated (not by `set_len`), and given back when a file is gone.
    pub fn set_free_bytes(&self, bytes: Option<u64>) {
        self.state().free_bytes = bytes;
    }

    /// Returns the space that is taken, also by files that have no name any more.
    pub fn used_bytes(&self) -> u64 {
        self.state().charged_bytes()
    }

    /// Returns the free space, if it is limited.
    pub fn free_bytes(&self) -> Option<u64> {
        self.state().free_bytes
    }

    /// Returns a file as reads see it. No step; works on a dead disk.
    pub fn read_file(&self, name: &str) -> Option<Vec<u8>> {
        let state = self.state();
        let inode = state.inodes.get(state.cached.get(name)?)?;
        Some(inode.cached.to_vec())
    }

    /// Puts a file in place of whatever has the name, durable at once. No step.
    pub fn write_file(&self, name: &str, bytes: impl Into<Vec<u8>>) {
        self.state().plant(name, bytes.into());
    }

    /// Removes a file, durably at once. No step. Returns whether it was there.
    pub fn remove_file(&self, name: &str) -> bool {
        self.state().pluck(name)
    }

    /// Returns all names in order. No step; works on a dead disk.
    pub fn file_names(&self) -> Vec<String> {
        self.state().cached.keys().cloned().collect()
    }

    /// Returns a hash of all names and contents as reads see them, for counting distinct disks
    /// within one run of one program.
    pub fn image_hash(&self) -> u64 {
        self.state().image_hash()
    }
}

impl Default for SimDisk {
    fn default() -> SimDisk {
        SimDisk::new()
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("SimDisk")
            .field("steps", &state.steps)
            .field("files", &state.cached.keys())
            .finish_non_exhaustive()
    }
}

/// The directory of one process.
#[derive(Clone, Debug)]
struct SimDir {
    disk: SimDisk,
    process: u32,
}

impl SimDir {
    fn open_lock(&self, name: &str, access: Access) -> io::Result<SimLock> {
        check_name(name)?;
        let mut state = self.state();
        state.alive()?;
        if !state.cached.contains_key(name) {
            if access != Access::Create {
                return Err(Errno::NOENT.into());
            }
            state.create(name, 0)?;
        }
        let id = state.new_id();
        drop(state);
        Ok(SimLock {
            dir: self.clone(),
            name: name.into(),
            id,
        })
    }

    /// Serves a call of this process.
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.disk.state();
        state.processes.current = self.process;
        state
    }

    fn open_file(&self, name: &str, access: Access) -> io::Result<SimFile> {
        check_name(name)?;
        let mut state = self.state();
        let found = state.cached.get(name).copied();
        let id = match (access, found) {
            (Access::Create, Some(_)) => {
                state.alive()?;
                return Err(Errno::EXIST.into());
            }
            (Access::Create, None) => state.create(name, 1)?,
            (Access::Read | Access::Write, found) => {
                state.begin_read(Op::Open, 0)?.whole()?;
                let id = found.ok_or(Errno::NOENT)?;
                state.opened(id)?;
                id
            }
        };
        drop(state);
        let writable = access != Access::Read;
        Ok(SimFile {
            dir: self.clone(),
            name: name.into(),
            id,
            writable,
        })
    }
}

impl Dir for SimDir {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(self.open_file(name, access)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        check_name(from)?;
        check_name(to)?;
        self.state().rename(from, to)
    }

    fn unlink(&self, name: &str) -> io::Result<()> {
        check_name(name)?;
        self.state().unlink(name)
    }

    fn sync(&self) -> io::Result<()> {
        self.state().sync_dir()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut state = self.state();
        state.begin_read(Op::List, 0)?.whole()?;
        Ok(state.cached.keys().cloned().collect())
    }

    fn fill_random(&self, bytes: &mut [u8]) -> io::Result<()> {
        match &mut self.state().rng {
            Some(rng) => rng.fill(bytes),
            None => getrandom::fill(bytes).map_err(io::Error::other)?,
        }
        Ok(())
    }

    fn lock(&self, name: &str, create: bool, note: &str) -> io::Result<LockAttempt> {
        let access = if create {
            Access::Create
        } else {
            Access::Write
        };
        let lock = self.open_lock(name, access)?;
        let mut state = self.state();
        let tried = state
            .processes
            .try_lock(name, lock.id, LockMode::Exclusive, note);
        if let Err(holder) = tried {
            return Ok(Err(holder));
        }
        state.note(name, note);
        drop(state);
        Ok(Ok(Box::new(lock)))
    }

    fn lock_file(&self, name: &str, access: Access) -> io::Result<Arc<dyn LockFile>> {
        Ok(Arc::new(self.open_lock(name, access)?))
    }
}

#[derive(Debug)]
struct SimFile {
    dir: SimDir,
    /// The name at the time of opening, for the step log.
    name: String,
    id: FileId,
    writable: bool,
}

impl SimFile {
    fn writable(&self) -> io::Result<()> {
        if self.writable {
            Ok(())
        } else {
            Err(Errno::BADF.into())
        }
    }

    fn content(&self) -> io::Result<Arc<Vec<u8>>> {
        let mut state = self.dir.state();
        state.begin_read(Op::Map, 0)?.whole()?;
        Ok(state.inode(self.id)?.cached.shared())
    }
}

impl File for SimFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        // Under the lock, and without a second owner of the bytes: a concurrent write would
        // have to copy the file.
        let mut state = self.dir.state();
        let mut attempts = match state.begin_read(Op::Read, buf.len())? {
            Gate::Go => Attempts::new(None),
            Gate::Again(first) => Attempts::new(Some(first)),
            Gate::Fail { error, .. } => return Err(error),
        };
        let content = &state.inode(self.id)?.cached;
        let bytes = read_fully(buf, offset, |buf, offset| {
            let bytes = attempts.next(buf.len())?;
            let rest = usize::try_from(offset)
                .ok()
                .and_then(|at| content.get(at..));
            let from = rest.unwrap_or_default();
            let bytes = bytes.min(from.len());
            if let (Some(to), Some(from)) = (buf.get_mut(..bytes), from.get(..bytes)) {
                to.copy_from_slice(from);
            }
            Ok(bytes)
        })?;
        state.counts.read_bytes += bytes as u64;
        Ok(bytes)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.writable()?;
        self.dir.state().write(self.id, &self.name, buf, offset)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.writable()?;
        self.dir.state().resize(self.id, &self.name, bytes)
    }

    fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.writable()?;
        let mut state = self.dir.state();
        state.allocate(self.id, &self.name, offset, bytes)
    }

    fn allocated(&self) -> io::Result<u64> {
        let mut state = self.dir.state();
        state.alive()?;
        Ok(state.inode(self.id)?.charged_bytes())
    }

    fn free_space(&self) -> io::Result<u64> {
        let state = self.dir.state();
        state.alive()?;
        Ok(state.free_bytes.unwrap_or(u64::MAX))
    }

    fn sync(&self) -> io::Result<()> {
        self.dir.state().sync(self.id, &self.name)
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> io::Result<Option<bool>> {
        self.dir.state().holds(self.id, bytes, offset).map(Some)
    }

    fn size(&self) -> io::Result<u64> {
        let mut state = self.dir.state();
        state.begin_read(Op::Size, 0)?.whole()?;
        Ok(state.inode(self.id)?.cached.len() as u64)
    }

    fn map(&self) -> io::Result<Map> {
        Map::of_bytes(self.content()?)
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        self.dir.state().closed(self.id);
    }
}
