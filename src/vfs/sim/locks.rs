//! Processes that share one simulated disk, and the locks they hold.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use super::{SimDir, SimDisk};
use crate::vfs::{Dir, Lock, LockFile, LockMode};

/// One process among several on one disk: it can die alone. What [`SimDisk::dir`] returns belongs
/// to a process of its own, which dies with the disk.
#[derive(Clone, Debug)]
pub struct SimProcess {
    disk: SimDisk,
    id: u32,
}

impl SimDisk {
    /// Makes a process that dies alone.
    pub fn process(&self) -> SimProcess {
        let mut state = self.state();
        state.processes.last += 1;
        SimProcess {
            disk: self.clone(),
            id: state.processes.last,
        }
    }
}

impl SimProcess {
    /// Returns the directory. Two calls are two openers: they compete for locks.
    pub fn dir(&self) -> Arc<dyn Dir> {
        Arc::new(SimDir {
            disk: self.disk.clone(),
            process: self.id,
        })
    }

    /// Kills the process: its locks are free, and every call of it fails from now on.
    pub fn kill(&self) {
        self.disk.state().processes.kill(self.id);
    }

    /// Kills the process at its first step of this number or a later one, of all steps of the disk;
    /// if that is a write, its first bytes are in the cache.
    pub fn kill_at(&self, step: u64, kept_bytes: usize) {
        let mut state = self.disk.state();
        state.processes.stops.insert(self.id, (step, kept_bytes));
    }

    /// Says whether the process is dead.
    pub fn is_dead(&self) -> bool {
        self.disk.state().processes.is_dead(self.id)
    }
}

/// Who is alive, and who holds which lock.
#[derive(Clone, Debug, Default)]
pub(super) struct Processes {
    last: u32,
    /// Whose call is being served.
    pub(super) current: u32,
    dead: BTreeSet<u32>,
    /// The step at which a process dies, and the bytes of it that still get written.
    stops: BTreeMap<u32, (u64, usize)>,
    /// By name of the file.
    locks: BTreeMap<String, Vec<Holder>>,
}

#[derive(Clone, Debug)]
struct Holder {
    id: u64,
    process: u32,
    mode: LockMode,
    note: String,
}

impl Processes {
    fn is_dead(&self, process: u32) -> bool {
        self.dead.contains(&process)
    }

    pub(super) fn is_current_dead(&self) -> bool {
        self.is_dead(self.current)
    }

    /// Kills the current process if this is its step to die at; returns the bytes that it still
    /// writes.
    pub(super) fn strike(&mut self, step: u64) -> Option<usize> {
        let (_, kept_bytes) = *self
            .stops
            .get(&self.current)
            .filter(|(stop, _)| step >= *stop)?;
        self.kill(self.current);
        Some(kept_bytes)
    }

    fn kill(&mut self, process: u32) {
        self.dead.insert(process);
        for holders in self.locks.values_mut() {
            holders.retain(|holder| holder.process != process);
        }
    }

    /// Takes a lock unless somebody is in the way, whose note is returned then.
    pub(super) fn try_lock(
        &mut self,
        name: &str,
        id: u64,
        mode: LockMode,
        note: &str,
    ) -> Result<(), String> {
        self.unlock(name, id);
        let holders = self.locks.entry(name.to_owned()).or_default();
        let alone = mode == LockMode::Exclusive;
        let other = holders
            .iter()
            .find(|other| alone || other.mode == LockMode::Exclusive);
        if let Some(other) = other {
            return Err(other.note.clone());
        }
        holders.push(Holder {
            id,
            process: self.current,
            mode,
            note: note.to_owned(),
        });
        Ok(())
    }

    pub(super) fn unlock(&mut self, name: &str, id: u64) {
        if let Some(holders) = self.locks.get_mut(name) {
            holders.retain(|holder| holder.id != id);
        }
    }
}

/// One opening of a file to lock.
#[derive(Debug)]
pub(super) struct SimLock {
    pub(super) dir: SimDir,
    pub(super) name: String,
    pub(super) id: u64,
}

impl Lock for SimLock {}

impl LockFile for SimLock {
    fn try_lock(&self, mode: LockMode) -> io::Result<bool> {
        let mut state = self.dir.state();
        state.alive()?;
        let tried = state.processes.try_lock(&self.name, self.id, mode, "");
        Ok(tried.is_ok())
    }

    fn unlock(&self) -> io::Result<()> {
        let mut state = self.dir.state();
        state.alive()?;
        state.processes.unlock(&self.name, self.id);
        Ok(())
    }

    fn is_in_place(&self) -> io::Result<bool> {
        self.dir.state().alive()?;
        Ok(true)
    }
}

impl Drop for SimLock {
    fn drop(&mut self) {
        self.dir.disk.state().processes.unlock(&self.name, self.id);
    }
}
