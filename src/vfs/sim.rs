//! A simulated disk: it dies at a chosen step, loses power, tears writes, fails calls, fills up.
//!
//! Every call that changes the disk or makes changes durable is one numbered *step*, from 0:
//! creating a file, `write_at`, `set_len`, `allocate`, `File::sync`, `rename`, `unlink`,
//! `Dir::sync`. Reads see a cache. `File::sync` makes the content and size of that file durable,
//! not its name; `Dir::sync` makes names durable, not contents. A kill keeps the cache, a power
//! cut keeps what is durable and any subset of the rest, in sectors of 512 bytes.
//!
//! Without history ([`SimDisk::memory`]) it is the home of in-memory stores.

mod crash;
mod fault;
mod power;
mod rng;
mod state;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::{Access, Dir, File, Lock, LockAttempt, Map, check_name};
use state::{FileId, State};

pub use crash::{CrashKind, CrashOptions, CrashState, CrashTotals, for_each_crash_point};
pub use fault::{Fault, FaultKind, Op, SyncFailure};
pub use power::{PowerCut, PowerCuts};
pub use rng::Rng;
pub use state::Counts;

/// One simulated disk with one directory. Clones are handles of the same disk.
#[derive(Clone)]
pub struct SimDisk(Arc<Mutex<State>>);

impl SimDisk {
    /// Makes an empty disk that remembers what is not durable.
    pub fn new() -> SimDisk {
        SimDisk::from_state(State::new(true))
    }

    /// Makes an empty disk without history: fast, no step log, and empty after a power cut.
    pub fn memory() -> SimDisk {
        SimDisk::from_state(State::new(false))
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
        Arc::new(SimDir(self.clone()))
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
        self.state().reads_left = Some(count);
    }

    /// Forgets planned errors, also of reads, and planned deaths. The dead stay dead.
    pub fn clear_faults(&self) {
        let mut state = self.state();
        state.faults.clear();
        state.reads_left = None;
        state.stop = None;
    }

    /// Sets the free space; `None` is unlimited. Space is taken in sectors when they are first
    /// written or allocated (not by `set_len`), and given back when a file is gone.
    pub fn set_free_bytes(&self, bytes: Option<u64>) {
        self.state().free_bytes = bytes;
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

    fn open(&self, name: &str, access: Access) -> io::Result<SimFile> {
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
                state.begin_read()?;
                let id = found.ok_or(Errno::NOENT)?;
                state.opened(id)?;
                id
            }
        };
        drop(state);
        let writable = access != Access::Read;
        Ok(SimFile {
            disk: self.clone(),
            name: name.into(),
            id,
            writable,
        })
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

#[derive(Debug)]
struct SimDir(SimDisk);

impl Dir for SimDir {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(self.0.open(name, access)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        check_name(from)?;
        check_name(to)?;
        self.0.state().rename(from, to)
    }

    fn unlink(&self, name: &str) -> io::Result<()> {
        check_name(name)?;
        self.0.state().unlink(name)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.state().sync_dir()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut state = self.0.state();
        state.begin_read()?;
        Ok(state.cached.keys().cloned().collect())
    }

    fn lock(&self, name: &str, create: bool, note: &str) -> io::Result<LockAttempt> {
        check_name(name)?;
        let mut state = self.0.state();
        state.alive()?;
        if let Some((_, holder)) = state.locks.get(name) {
            return Ok(Err(holder.clone()));
        }
        if !state.cached.contains_key(name) {
            if !create {
                return Err(Errno::NOENT.into());
            }
            state.create(name, 0)?;
        }
        let id = state.new_id();
        state.note(name, note);
        state.locks.insert(name.into(), (id, note.into()));
        drop(state);
        Ok(Ok(Box::new(SimLock {
            disk: self.0.clone(),
            name: name.into(),
            id,
        })))
    }
}

#[derive(Debug)]
struct SimLock {
    disk: SimDisk,
    name: String,
    id: u64,
}

impl Lock for SimLock {}

impl Drop for SimLock {
    fn drop(&mut self) {
        let mut state = self.disk.state();
        if state
            .locks
            .get(&self.name)
            .is_some_and(|(id, _)| *id == self.id)
        {
            state.locks.remove(&self.name);
        }
    }
}

#[derive(Debug)]
struct SimFile {
    disk: SimDisk,
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
        let mut state = self.disk.state();
        state.begin_read()?;
        Ok(Arc::clone(&state.inode(self.id)?.cached))
    }
}

impl File for SimFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        // Under the lock, and without a second owner of the bytes: a concurrent write would
        // have to copy the file.
        let mut state = self.disk.state();
        state.begin_read()?;
        let content = &state.inode(self.id)?.cached;
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| content.get(offset..));
        let (to, from) = (buf, rest.unwrap_or_default());
        let bytes = to.len().min(from.len());
        if let (Some(to), Some(from)) = (to.get_mut(..bytes), from.get(..bytes)) {
            to.copy_from_slice(from);
        }
        state.counts.read_bytes += bytes as u64;
        Ok(bytes)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.writable()?;
        self.disk.state().write(self.id, &self.name, buf, offset)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.writable()?;
        self.disk
            .state()
            .resize(self.id, &self.name, bytes, Op::SetLen)
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        self.writable()?;
        self.disk
            .state()
            .resize(self.id, &self.name, bytes, Op::Allocate)
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.state().sync(self.id, &self.name)
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> io::Result<Option<bool>> {
        let mut state = self.disk.state();
        state.alive()?;
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        let held = state.on_device(self.id)?;
        let part = held.get(at..).and_then(|held| held.get(..bytes.len()));
        Ok(Some(part == Some(bytes)))
    }

    fn size(&self) -> io::Result<u64> {
        let mut state = self.disk.state();
        state.begin_read()?;
        Ok(state.inode(self.id)?.cached.len() as u64)
    }

    fn map(&self) -> io::Result<Map> {
        Map::of_bytes(self.content()?)
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        self.disk.state().closed(self.id);
    }
}
