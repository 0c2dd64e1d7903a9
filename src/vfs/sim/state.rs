//! The simulated disk itself: what is cached, what is durable, and what lies between.
//!
//! A. Durable content changes only by a successful sync (or by tampering).
//! B. `durable` with all of `pending` applied is `cached`, unless a sync failed in between.
//! C. Every step passes [`State::begin`] before it changes anything.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::Arc;

use rustix::io::Errno;

use super::content::{Content, hash64};
use super::fault::{Attempts, Fault, FaultKind, Gate, Op, SyncFailure};
use super::locks::Processes;
use super::rng::Rng;
use crate::vfs::write_fully;

/// What a device writes as a whole or not at all. Also the unit in which space is charged.
pub(super) const SECTOR_BYTES: usize = 512;

/// Larger files are refused with EFBIG: the bytes lie in memory.
const FILE_BYTES_MAX: u64 = 1 << 32;

pub(super) type FileId = u64;
pub(super) type Entries = BTreeMap<String, FileId>;

/// Plain counters of what was asked of a [`SimDisk`](super::SimDisk), failures included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// New files.
    pub creates: u64,
    /// Calls of `write_at`.
    pub writes: u64,
    /// Bytes given to `write_at`.
    pub written_bytes: u64,
    /// Calls of `set_len`.
    pub set_lens: u64,
    /// Calls of `allocate`.
    pub allocates: u64,
    /// Calls of `File::sync`.
    pub syncs: u64,
    /// Calls of `Dir::sync`.
    pub dir_syncs: u64,
    /// Calls of `rename`.
    pub renames: u64,
    /// Calls of `unlink`.
    pub unlinks: u64,
    /// Calls that only read: opening an existing file, `read_at`, `size`, `map`, `list`.
    pub reads: u64,
    /// Bytes returned by `read_at`.
    pub read_bytes: u64,
}

#[derive(Clone)]
pub(super) struct FileOp {
    pub(super) change: Change,
    /// The size of the cached file afterwards.
    pub(super) size: usize,
}

#[derive(Clone)]
pub(super) enum Change {
    Write { offset: usize, bytes: Arc<[u8]> },
    Shrink,
    Grow,
}

#[derive(Clone, Default)]
pub(super) struct Inode {
    /// What reads see.
    pub(super) cached: Content,
    /// What a power cut leaves for sure.
    pub(super) durable: Content,
    /// Unsynced changes, oldest first.
    pub(super) pending: Vec<FileOp>,
    /// Which sectors have space on the disk.
    charged: Vec<bool>,
    /// Sectors that count as written and are not, see [`SyncFailure::StuckSectors`].
    stuck: BTreeSet<usize>,
    open_count: usize,
}

#[derive(Clone, Hash)]
pub(super) enum EntryOp {
    Create {
        name: String,
        id: FileId,
    },
    Rename {
        from: String,
        to: String,
        id: FileId,
    },
    Unlink {
        name: String,
    },
}

impl EntryOp {
    pub(super) fn apply(&self, entries: &mut Entries) {
        match self {
            EntryOp::Create { name, id } => {
                entries.insert(name.clone(), *id);
            }
            EntryOp::Rename { from, to, id } => {
                if entries.get(from) == Some(id) {
                    entries.remove(from);
                }
                entries.insert(to.clone(), *id);
            }
            EntryOp::Unlink { name } => {
                entries.remove(name);
            }
        }
    }

    fn names(&self, other: &str) -> bool {
        match self {
            EntryOp::Create { name, .. } | EntryOp::Unlink { name } => name == other,
            EntryOp::Rename { from, to, .. } => from == other || to == other,
        }
    }

    fn id(&self) -> Option<FileId> {
        match self {
            EntryOp::Create { id, .. } | EntryOp::Rename { id, .. } => Some(*id),
            EntryOp::Unlink { .. } => None,
        }
    }
}

/// The step in which the simulated process died.
#[derive(Clone, Debug)]
pub(super) struct Death {
    pub(super) what: String,
    /// The write that did not happen; `None` for other steps.
    pub(super) write: Option<(FileId, usize, Arc<[u8]>)>,
}

impl Death {
    /// Returns the bytes of the write that did not happen, 0 for other steps.
    pub(super) fn bytes(&self) -> usize {
        self.write.as_ref().map_or(0, |(_, _, bytes)| bytes.len())
    }
}

#[derive(Clone, Default)]
pub(super) struct State {
    pub(super) inodes: BTreeMap<FileId, Inode>,
    pub(super) cached: Entries,
    pub(super) durable: Entries,
    pub(super) entry_ops: Vec<EntryOp>,
    next_id: FileId,
    /// Without history there is nothing but the cache.
    pub(super) history: bool,
    pub(super) steps: u64,
    pub(super) log: Vec<String>,
    pub(super) counts: Counts,
    pub(super) faults: Vec<Fault>,
    /// The step at which the process dies, and the bytes of it that still get written.
    pub(super) stop: Option<(u64, usize)>,
    pub(super) death: Option<Death>,
    pub(super) free_bytes: Option<u64>,
    pub(super) processes: Processes,
    /// Where the store's random bytes come from; the operating system, if `None`.
    pub(super) rng: Option<Rng>,
}

impl State {
    pub(super) fn new(history: bool, rng: Option<Rng>) -> State {
        State {
            history,
            rng,
            ..State::default()
        }
    }

    /// The same disk under a new process: no steps, faults, locks or open files.
    pub(super) fn restarted(&self) -> State {
        let mut next = State {
            inodes: self.inodes.clone(),
            cached: self.cached.clone(),
            durable: self.durable.clone(),
            entry_ops: self.entry_ops.clone(),
            next_id: self.next_id,
            history: self.history,
            free_bytes: self.free_bytes,
            rng: self.rng.clone(),
            ..State::default()
        };
        for inode in next.inodes.values_mut() {
            inode.open_count = 0;
        }
        next.collect();
        next
    }

    /// Fails if the process is dead.
    pub(super) fn alive(&self) -> io::Result<()> {
        if self.death.is_some() || self.processes.is_current_dead() {
            Err(process_death())
        } else {
            Ok(())
        }
    }

    /// Counts a step and decides what happens to it.
    pub(super) fn begin(
        &mut self,
        op: Op,
        bytes: usize,
        what: impl FnOnce() -> String,
    ) -> io::Result<Gate> {
        self.alive()?;
        if let Some((stop, kept_bytes)) = self.stop.filter(|(stop, _)| self.steps >= *stop) {
            self.death = Some(Death {
                what: what(),
                write: None,
            });
            let kept_bytes = if self.steps == stop { kept_bytes } else { 0 };
            let error = process_death();
            return Ok(Gate::Fail {
                error,
                kept_bytes,
                sync: SyncFailure::KeepDirty,
            });
        }
        if let Some(kept_bytes) = self.processes.strike(self.steps) {
            return Ok(Gate::Fail {
                error: process_death(),
                kept_bytes,
                sync: SyncFailure::KeepDirty,
            });
        }
        let step = self.steps;
        self.steps += 1;
        self.count(op, bytes);
        let fault = self.strike(step, op);
        if self.history {
            let failed = fault.map_or(String::new(), |fault| format!(" -> {:?}", fault.error));
            self.log.push(what() + &failed);
        }
        Ok(fault.map_or(Gate::Go, |fault| Gate::of(&fault, op, bytes)))
    }

    /// Returns the first planned error that strikes this call, and forgets it if it comes once.
    fn strike(&mut self, number: u64, op: Op) -> Option<Fault> {
        let index = self.faults.iter().position(|f| f.strikes(number, op))?;
        let fault = self.faults.get(index).copied()?;
        if !fault.sticky {
            self.faults.remove(index);
        }
        Some(fault)
    }

    fn count(&mut self, op: Op, bytes: usize) {
        let counts = &mut self.counts;
        let counter = match op {
            Op::Create => &mut counts.creates,
            Op::Write => &mut counts.writes,
            Op::SetLen => &mut counts.set_lens,
            Op::Allocate => &mut counts.allocates,
            Op::Sync => &mut counts.syncs,
            Op::Rename => &mut counts.renames,
            Op::Unlink => &mut counts.unlinks,
            Op::DirSync => &mut counts.dir_syncs,
            Op::Open | Op::Read | Op::Size | Op::Map | Op::List => &mut counts.reads,
        };
        *counter += 1;
        counts.written_bytes += bytes as u64;
    }

    /// Counts a reading call and decides what happens to it.
    pub(super) fn begin_read(&mut self, op: Op, bytes: usize) -> io::Result<Gate> {
        self.alive()?;
        let number = self.counts.reads;
        self.count(op, 0);
        let fault = self.strike(number, op);
        Ok(fault.map_or(Gate::Go, |fault| Gate::of(&fault, op, bytes)))
    }

    /// Says whether the device holds these bytes, and forgets the cached copy if it does. Without
    /// history there is nothing but the cache.
    pub(super) fn holds(&mut self, id: FileId, bytes: &[u8], offset: u64) -> io::Result<bool> {
        self.alive()?;
        let history = self.history;
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        let inode = self.inode(id)?;
        let content = if history {
            &inode.durable
        } else {
            &inode.cached
        };
        let part = content.get(at..).and_then(|rest| rest.get(..bytes.len()));
        let holds = part == Some(bytes);
        if holds && history && inode.pending.is_empty() {
            inode.cached = inode.durable.clone();
            inode.stuck.clear();
        }
        Ok(holds)
    }

    pub(super) fn inode(&mut self, id: FileId) -> io::Result<&mut Inode> {
        self.inodes
            .get_mut(&id)
            .ok_or_else(|| io::Error::other("no such simulated file"))
    }

    pub(super) fn new_id(&mut self) -> FileId {
        self.next_id += 1;
        self.next_id
    }

    /// Adds a file that is open `open_count` times under a new name.
    pub(super) fn create(&mut self, name: &str, open_count: usize) -> io::Result<FileId> {
        self.begin(Op::Create, 0, || format!("create {name}"))?
            .whole()?;
        let id = self.new_id();
        self.inodes.insert(
            id,
            Inode {
                open_count,
                ..Inode::default()
            },
        );
        self.change_entries(EntryOp::Create {
            name: name.into(),
            id,
        });
        Ok(id)
    }

    fn change_entries(&mut self, op: EntryOp) {
        op.apply(&mut self.cached);
        if self.history {
            self.entry_ops.push(op);
        }
    }

    pub(super) fn opened(&mut self, id: FileId) -> io::Result<()> {
        self.inode(id)?.open_count += 1;
        Ok(())
    }

    pub(super) fn closed(&mut self, id: FileId) {
        if let Some(inode) = self.inodes.get_mut(&id) {
            inode.open_count = inode.open_count.saturating_sub(1);
            if inode.open_count == 0 && !self.cached.values().any(|linked| *linked == id) {
                self.collect();
            }
        }
    }

    pub(super) fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.alive()?;
        let id = *self.cached.get(from).ok_or(Errno::NOENT)?;
        self.begin(Op::Rename, 0, || format!("rename {from} {to}"))?
            .whole()?;
        if from != to {
            self.change_entries(EntryOp::Rename {
                from: from.into(),
                to: to.into(),
                id,
            });
            self.collect();
        }
        Ok(())
    }

    pub(super) fn unlink(&mut self, name: &str) -> io::Result<()> {
        self.alive()?;
        if !self.cached.contains_key(name) {
            return Err(Errno::NOENT.into());
        }
        self.begin(Op::Unlink, 0, || format!("unlink {name}"))?
            .whole()?;
        self.change_entries(EntryOp::Unlink { name: name.into() });
        self.collect();
        Ok(())
    }

    pub(super) fn sync_dir(&mut self) -> io::Result<()> {
        match self.begin(Op::DirSync, 0, || Op::DirSync.to_string())? {
            Gate::Go | Gate::Again(_) => {
                for op in std::mem::take(&mut self.entry_ops) {
                    op.apply(&mut self.durable);
                }
                self.collect();
                Ok(())
            }
            Gate::Fail { error, sync, .. } => {
                if sync != SyncFailure::KeepDirty {
                    self.entry_ops.clear();
                }
                Err(error)
            }
        }
    }

    /// Writes `buf`, or the prefix that a fault or the free space lets through.
    pub(super) fn write(
        &mut self,
        id: FileId,
        name: &str,
        buf: &[u8],
        offset: u64,
    ) -> io::Result<()> {
        let what = || format!("write {name} {offset}+{}", buf.len());
        let (kept_bytes, failure) = match self.begin(Op::Write, buf.len(), what)? {
            Gate::Go => (buf.len(), None),
            Gate::Again(first) => {
                let mut attempts = Attempts::new(Some(first));
                return write_fully(buf, offset, |buf, offset| {
                    let part = buf.get(..attempts.next(buf.len())?).unwrap_or(buf);
                    self.write_part(id, part, offset, part.len())
                });
            }
            Gate::Fail {
                error, kept_bytes, ..
            } => (kept_bytes.min(buf.len()), Some(error)),
        };
        if let (Some(death), Ok(offset)) = (&mut self.death, file_size(offset)) {
            death.write = Some((id, offset, buf.into()));
        }
        let written = self.write_part(id, buf, offset, kept_bytes)?;
        match failure {
            Some(error) => Err(error),
            None if written < kept_bytes => Err(FaultKind::NoSpace.error()),
            None => Ok(()),
        }
    }

    /// Writes a part of the bytes; returns how many of it there was space for.
    fn write_part(
        &mut self,
        id: FileId,
        buf: &[u8],
        offset: u64,
        kept_bytes: usize,
    ) -> io::Result<usize> {
        let end = offset.checked_add(kept_bytes as u64).ok_or(Errno::FBIG)?;
        file_size(end)?;
        let offset = file_size(offset)?;
        match self.put(id, offset, buf.get(..kept_bytes).unwrap_or_default())? {
            0 if kept_bytes > 0 => Err(FaultKind::NoSpace.error()),
            written => Ok(written),
        }
    }

    /// Writes as much as there is space for into the cache; returns how many bytes that were.
    fn put(&mut self, id: FileId, offset: usize, bytes: &[u8]) -> io::Result<usize> {
        let space = self.charge(id, offset, bytes.len())?;
        let written = bytes.get(..space).unwrap_or_default();
        let history = self.history;
        let inode = self.inode(id)?;
        if !written.is_empty() {
            overlay(inode.cached.make_mut(), offset, written);
            if history {
                let change = Change::Write {
                    offset,
                    bytes: written.into(),
                };
                inode.pending.push(FileOp {
                    change,
                    size: inode.cached.len(),
                });
            }
        }
        Ok(space)
    }

    /// The disk after a death inside the write at which the process died, as far as
    /// `kept_bytes`.
    pub(super) fn killed_inside(&self, kept_bytes: usize) -> State {
        let mut next = self.restarted();
        if let Some((id, offset, bytes)) = self.death.as_ref().and_then(|d| d.write.as_ref()) {
            let kept = bytes.get(..kept_bytes).unwrap_or(bytes);
            // A write to a file that nobody can find any more leaves nothing.
            next.put(*id, *offset, kept).unwrap_or_default();
        }
        next
    }

    /// Charges space, all of it or as far as there is any; what is read stays what it was.
    pub(super) fn allocate(
        &mut self,
        id: FileId,
        name: &str,
        offset: u64,
        bytes: u64,
    ) -> io::Result<()> {
        let what = || format!("{} {name} {offset}+{bytes}", Op::Allocate);
        self.begin(Op::Allocate, 0, what)?.whole()?;
        file_size(offset.checked_add(bytes).ok_or(Errno::FBIG)?)?;
        let (offset, bytes) = (file_size(offset)?, file_size(bytes)?);
        if self.charge(id, offset, bytes)? < bytes {
            return Err(FaultKind::NoSpace.error());
        }
        Ok(())
    }

    pub(super) fn resize(&mut self, id: FileId, name: &str, bytes: u64) -> io::Result<()> {
        let op = Op::SetLen;
        self.begin(op, 0, || format!("{op} {name} {bytes}"))?
            .whole()?;
        let bytes = file_size(bytes)?;
        let history = self.history;
        let inode = self.inode(id)?;
        let before = inode.cached.len();
        inode.cached.make_mut().resize(bytes, 0);
        if history && before != bytes {
            let change = if bytes < before {
                Change::Shrink
            } else {
                Change::Grow
            };
            inode.pending.push(FileOp {
                change,
                size: bytes,
            });
        }
        inode.stuck.retain(|sector| *sector < bytes / SECTOR_BYTES);
        let released = inode.release_from(bytes.div_ceil(SECTOR_BYTES));
        self.credit(released);
        Ok(())
    }

    pub(super) fn sync(&mut self, id: FileId, name: &str) -> io::Result<()> {
        let gate = self.begin(Op::Sync, 0, || format!("sync {name}"))?;
        let inode = self.inode(id)?;
        match gate {
            Gate::Go | Gate::Again(_) => {
                inode.make_durable();
                Ok(())
            }
            Gate::Fail { error, sync, .. } => {
                match sync {
                    SyncFailure::MarkClean => inode.pending.clear(),
                    SyncFailure::StuckSectors => inode.get_stuck(),
                    SyncFailure::DropPages => {
                        inode.pending.clear();
                        inode.cached = inode.durable.clone();
                    }
                    SyncFailure::KeepDirty => {}
                }
                Err(error)
            }
        }
    }

    /// Takes space for a range; returns how many bytes of it, from the start, have space.
    fn charge(&mut self, id: FileId, offset: usize, bytes: usize) -> io::Result<usize> {
        if bytes == 0 {
            return Ok(0);
        }
        let mut free = self.free_bytes;
        let inode = self.inode(id)?;
        let end = offset + bytes;
        let mut space = bytes;
        if inode.charged.len() < end.div_ceil(SECTOR_BYTES) {
            inode.charged.resize(end.div_ceil(SECTOR_BYTES), false);
        }
        let first = offset / SECTOR_BYTES;
        let sectors = inode.charged.iter_mut().enumerate().skip(first);
        for (index, charged) in sectors.take(end.div_ceil(SECTOR_BYTES) - first) {
            if *charged {
                continue;
            }
            if let Some(free) = &mut free {
                if *free < SECTOR_BYTES as u64 {
                    space = (index * SECTOR_BYTES).saturating_sub(offset);
                    break;
                }
                *free -= SECTOR_BYTES as u64;
            }
            *charged = true;
        }
        self.free_bytes = free;
        Ok(space)
    }

    fn credit(&mut self, sectors: usize) {
        if let Some(free) = &mut self.free_bytes {
            *free += (sectors * SECTOR_BYTES) as u64;
        }
    }

    /// Forgets files that nothing refers to, and takes back their space.
    pub(super) fn collect(&mut self) {
        let mut used: BTreeSet<FileId> = self.cached.values().copied().collect();
        used.extend(self.durable.values());
        used.extend(self.entry_ops.iter().filter_map(EntryOp::id));
        let mut released = 0;
        self.inodes.retain(|id, inode| {
            let keep = inode.open_count > 0 || used.contains(id);
            if !keep {
                released += inode.release_from(0);
            }
            keep
        });
        self.credit(released);
    }

    /// Writes the note of a lock, without a step and durable at once: nobody relies on it.
    pub(super) fn note(&mut self, name: &str, note: &str) {
        let id = self.cached.get(name).copied();
        if let Some(inode) = id.and_then(|id| self.inodes.get_mut(&id)) {
            inode.cached = Content::new(note.as_bytes().to_vec());
            inode.durable = inode.cached.clone();
            inode.pending.clear();
        }
    }

    /// Puts a durable file in place, without a step.
    pub(super) fn plant(&mut self, name: &str, bytes: Vec<u8>) {
        let id = match self.cached.get(name) {
            Some(id) => *id,
            None => self.new_id(),
        };
        self.cached.insert(name.into(), id);
        let sectors = bytes.len().div_ceil(SECTOR_BYTES);
        let content = Content::new(bytes);
        let inode = self.inodes.entry(id).or_default();
        inode.cached = content.clone();
        inode.pending.clear();
        inode.charged = vec![true; sectors];
        if self.history {
            inode.durable = content;
            self.durable.insert(name.into(), id);
            self.entry_ops.retain(|op| !op.names(name));
        }
    }

    /// Takes a file away durably, without a step.
    pub(super) fn pluck(&mut self, name: &str) -> bool {
        self.durable.remove(name);
        self.entry_ops.retain(|op| !op.names(name));
        let found = self.cached.remove(name).is_some();
        self.collect();
        found
    }

    /// Adds a name, with its file if that is not there yet; for disks after a power cut.
    pub(super) fn adopt(&mut self, name: String, id: FileId, inode: Option<Inode>) {
        if let Some(inode) = inode {
            self.next_id = self.next_id.max(id);
            self.inodes.insert(id, inode);
        }
        self.cached.insert(name.clone(), id);
        self.durable.insert(name, id);
    }

    pub(super) fn charged_bytes(&self) -> u64 {
        self.inodes.values().map(Inode::charged_bytes).sum()
    }

    /// Hashes names and contents as reads see them.
    pub(super) fn image_hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (name, id) in &self.cached {
            name.hash(&mut hasher);
            let inode = self.inodes.get(id);
            inode.map(|inode| inode.cached.hash64()).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Returns [`State::image_hash`], and a hash that covers also what a later power cut could
    /// bring to light.
    pub(super) fn hashes(&self) -> (u64, u64) {
        let image = self.image_hash();
        let mut hasher = DefaultHasher::new();
        (image, &self.durable, &self.entry_ops).hash(&mut hasher);
        for (id, inode) in &self.inodes {
            (id, inode.durable.hash64()).hash(&mut hasher);
            for op in &inode.pending {
                op.size.hash(&mut hasher);
                if let Change::Write { offset, bytes } = &op.change {
                    (offset, hash64(bytes)).hash(&mut hasher);
                }
            }
        }
        (image, hasher.finish())
    }
}

impl Inode {
    /// The same file on the disk with other content, all of it durable.
    pub(super) fn with_content(&self, content: Content) -> Inode {
        let mut charged = self.charged.clone();
        charged.resize(content.len().div_ceil(SECTOR_BYTES), false);
        let cached = content.clone();
        Inode {
            cached,
            durable: content,
            charged,
            ..Inode::default()
        }
    }

    fn make_durable(&mut self) {
        let Some(size) = self.pending.last().map(|op| op.size) else {
            return;
        };
        let durable = self.durable.make_mut();
        for op in self.pending.drain(..) {
            match op.change {
                Change::Write { offset, bytes } => overlay(durable, offset, &bytes),
                Change::Shrink => durable.truncate(op.size),
                Change::Grow => {}
            }
        }
        durable.resize(size, 0);
        for sector in &self.stuck {
            let start = sector * SECTOR_BYTES;
            let end = (start + SECTOR_BYTES).min(durable.len());
            if let Some(bytes) = durable.get_mut(start..end) {
                bytes.fill(0);
            }
        }
    }

    /// Loses what is unsynced; where nothing was on the disk before, later writes are lost too.
    fn get_stuck(&mut self) {
        for op in self.pending.drain(..) {
            let Change::Write { offset, bytes } = op.change else {
                continue;
            };
            for sector in offset / SECTOR_BYTES..(offset + bytes.len()).div_ceil(SECTOR_BYTES) {
                let rest = self
                    .durable
                    .get(sector * SECTOR_BYTES..)
                    .unwrap_or_default();
                if rest.iter().take(SECTOR_BYTES).all(|byte| *byte == 0) {
                    self.stuck.insert(sector);
                }
            }
        }
    }

    pub(super) fn charged_bytes(&self) -> u64 {
        (self.charged_sectors() * SECTOR_BYTES) as u64
    }

    fn charged_sectors(&self) -> usize {
        self.charged.iter().filter(|charged| **charged).count()
    }

    /// Gives up the space from a sector on; returns how many sectors had space.
    fn release_from(&mut self, sector: usize) -> usize {
        let before = self.charged_sectors();
        self.charged.truncate(sector);
        before - self.charged_sectors()
    }
}

/// Copies `bytes` to `offset`, filling a gap before it with zeros.
pub(super) fn overlay(content: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    let end = offset + bytes.len();
    if content.len() < end {
        content.resize(end, 0);
    }
    if let Some(place) = content.get_mut(offset..end) {
        place.copy_from_slice(bytes);
    }
}

fn file_size(bytes: u64) -> io::Result<usize> {
    let fits = usize::try_from(bytes)
        .ok()
        .filter(|_| bytes <= FILE_BYTES_MAX);
    fits.ok_or_else(|| FaultKind::TooLarge.error())
}

fn process_death() -> io::Error {
    io::Error::other("simulated process death")
}
