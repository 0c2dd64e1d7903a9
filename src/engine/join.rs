//! Opening a store that several processes share: the first one recovers it, as an opener does that
//! is alone; the others join, and change nothing but the manifest's list of what is reserved.
//!
//! Safety properties:
//! A. LOCK is held shared by everybody, also by who only reads: an opener that wants the store for
//!    itself is refused as long as anybody is in it, and the other way round. LOCK.members is held
//!    by who may write: alone while the first one recovers, shared afterwards.
//! B. Behind the end of the log there are zeros: no file is used again while a store is shared, and
//!    the first one clears those that were.
//! C. A generation is reserved durably, and its owner's file locked, before its first claim.
//! D. Whoever is a member and finds no owner alive, because those it has met are gone, joins nobody
//!    and asks again: SHARED is of former ones then. The first one makes it anew when the others
//!    may come in, before it is an owner.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Engine;
use super::catalog::{Catalog, read_manifest, remove_if_there};
use super::core::{Core, Frozen, Tally, View, to_seconds};
use super::follow::{TRIES_MAX, listed_view};
use super::namespace::to_ms;
use super::open::{LOCK_RETRY, open_segment, recover_or_create};
use super::reader::Reach;
use super::recovery::{
    Base, Full, Gathered, assemble, footer_records, places, replay_segment, replay_unsealed,
};
use super::settle::read_image;
use super::shared::{Shared, is_gone};
use crate::clock::TrustedTime;
use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::Manifest;
use crate::format::names::{FileName, GateName};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::shared::SharedCells;
use crate::format::{to_u32, to_usize};
use crate::index::KeyHash;
use crate::index::active::ActiveTable;
use crate::log::segment::SegmentFile;
use crate::log::writer::Writer;
use crate::options::Options;
use crate::position::Position;
use crate::stamp::{GENERATIONS_RESERVED, next_generation};
use crate::stats::OpenReport;
use crate::vfs::fork::ForkGuard;
use crate::vfs::{Access, Dir, Lock, LockFile, LockMode};

/// How long an open waits, unless told otherwise, for others that open or close the same store.
pub(super) const JOIN_WAIT: Duration = Duration::from_secs(10);

/// Records and their namespaces.
type Places = Vec<(Position, u16)>;

/// What an opener of a shared store holds for as long as it may still write.
#[derive(Debug)]
struct Membership {
    dir: Arc<dyn Dir>,
    locks: Locks,
    /// Let go before the file's name: see the order in `drop`.
    owner: Mutex<Option<Box<dyn Lock>>>,
    generation: u64,
    home: ForkGuard,
}

impl Lock for Membership {}

impl Drop for Membership {
    fn drop(&mut self) {
        if !self.home.is_at_home() {
            // A forked child holds the parent's locks, and lets go of none of them.
            return;
        }
        // Failing here leaves a file that whoever comes next removes.
        let name = FileName::Owner(self.generation).to_string();
        self.dir.unlink(&name).unwrap_or_default();
        let owner = self
            .owner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(owner);
        self.locks.unlock();
    }
}

/// The locks of one who may write (A).
#[derive(Clone, Debug)]
struct Locks {
    lock: Arc<dyn LockFile>,
    member: Arc<dyn LockFile>,
}

impl Locks {
    fn open(dir: &dyn Dir) -> Result<Locks> {
        let open = |name: FileName| {
            let name = name.to_string();
            let lock = dir.lock_file(&name, Access::Create);
            lock.map_err(|e| locking(e).in_file(name))
        };
        Ok(Locks {
            lock: open(FileName::Lock)?,
            member: open(FileName::Members)?,
        })
    }

    fn try_member(&self, mode: LockMode) -> Result<bool> {
        let tried = self.member.try_lock(mode);
        tried.map_err(|e| locking(e).in_file(FileName::Members.to_string()))
    }

    fn unlock(&self) {
        self.member.unlock().unwrap_or_default();
        self.lock.unlock().unwrap_or_default();
    }
}

fn locking(source: std::io::Error) -> Error {
    Error::io("locking the store failed", source)
}

/// Stands for the lock until the opener is a member; whoever opens lets it go on an error.
#[derive(Debug)]
struct NotYet;

impl Lock for NotYet {}

/// Opens a store in shared mode (A).
pub(super) fn open_shared(
    dir: Arc<dyn Dir>,
    shown: &str,
    in_place: bool,
    options: Options,
) -> Result<Arc<Engine>> {
    let locks = Locks::open(dir.as_ref())?;
    let wait = if options.lock_timeout.is_zero() {
        JOIN_WAIT
    } else {
        options.lock_timeout
    };
    let deadline = options.clock.read().boot_ms.saturating_add(to_ms(wait));
    let tried = loop {
        match try_open(&dir, &locks, shown, in_place, &options) {
            Ok(None) if options.clock.read().boot_ms < deadline => {
                std::thread::park_timeout(LOCK_RETRY);
            }
            tried => break tried,
        }
    };
    let in_the_way = || match locks.lock.try_lock(LockMode::Shared) {
        Ok(true) => not_settled(shown),
        _ => not_shared(dir.as_ref(), shown),
    };
    let opened = tried.and_then(|opened| opened.ok_or_else(in_the_way));
    if opened.is_err() {
        locks.unlock();
    }
    opened
}

/// Opens a store, unless somebody is in the way for now.
fn try_open(
    dir: &Arc<dyn Dir>,
    locks: &Locks,
    shown: &str,
    in_place: bool,
    options: &Options,
) -> Result<Option<Arc<Engine>>> {
    if !locks.lock.try_lock(LockMode::Shared).map_err(locking)? {
        return Ok(None);
    }
    if locks.try_member(LockMode::Exclusive)? {
        let own = (Arc::clone(dir), options.clone());
        // `None`: somebody else has come in while the lock was handed on.
        return open_first(locks, own, shown, in_place);
    }
    if !locks.try_member(LockMode::Shared)? {
        return Ok(None);
    }
    check_place(locks, shown)?;
    if !is_shared(dir.as_ref())? {
        // Who was in the way is gone since (D).
        locks.member.unlock().unwrap_or_default();
        return Ok(None);
    }
    join(dir, locks, in_place, options.clone()).map(|engine| Some(Arc::new(engine)))
}

/// Says who holds the store, by the text of the lock's file.
pub(super) fn not_shared(dir: &dyn Dir, shown: &str) -> Error {
    let mut text = [0; 64];
    let mut read = || {
        let file = dir.open(&FileName::Lock.to_string(), Access::Read)?;
        file.read_at(&mut text, 0)
    };
    let got = read().unwrap_or(0);
    let holder = String::from_utf8_lossy(text.get(..got).unwrap_or_default()).into_owned();
    let holder: String = holder.chars().filter(|c| !c.is_control()).collect();
    Error::new(
        ErrorKind::Locked,
        format!(
            "store is open elsewhere: holder={holder}; it does not share it: close it there, or \
             open it in shared mode there, too"
        ),
    )
    .in_file(shown)
}

fn not_settled(shown: &str) -> Error {
    let what = "another process is recovering the store, or reading it while nobody writes, and \
                does not come to an end; continue or end it, and try again";
    Error::new(ErrorKind::Locked, what).in_file(shown)
}

/// Says whether anybody shares the store (D): somebody is alive who has found it recovered. Asked
/// as a member, so nobody recovers it meanwhile.
fn is_shared(dir: &dyn Dir) -> Result<bool> {
    let failed = |e| Error::io("listing the directory failed", e);
    let names = dir.list().map_err(failed)?;
    let is_owned = |name: &String| match FileName::parse(name) {
        Some(FileName::Owner(generation)) => !is_gone(dir, generation),
        _ => false,
    };
    if !names.iter().any(is_owned) {
        return Ok(false);
    }
    let name = FileName::Shared.to_string();
    match dir.open(&name, Access::Read) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::io("opening a shared store failed", error).in_file(name)),
    }
}

/// Refuses a directory, or a lock's file, that another one has taken the place of.
fn check_place(locks: &Locks, shown: &str) -> Result<()> {
    check_in_place(locks.lock.as_ref(), shown)?;
    check_in_place(locks.member.as_ref(), shown)
}

pub(super) fn check_in_place(lock: &dyn LockFile, shown: &str) -> Result<()> {
    if lock.is_in_place().map_err(|e| locking(e).in_file(shown))? {
        Ok(())
    } else {
        Err(replaced(shown))
    }
}

fn replaced(shown: &str) -> Error {
    let what = "the directory was replaced by another meanwhile; open it again";
    Error::new(ErrorKind::Locked, what).in_file(shown)
}

/// Recovers the store alone, and lets the others in. `None`: another one was faster.
fn open_first(
    locks: &Locks,
    (dir, options): (Arc<dyn Dir>, Options),
    shown: &str,
    in_place: bool,
) -> Result<Option<Arc<Engine>>> {
    check_place(locks, shown)?;
    note_sharing(dir.as_ref());
    let engine = recover_or_create(dir, Box::new(NotYet), shown, in_place, options)?;
    admit_others(engine, locks)
}

/// Says in the lock's file who holds it, for those who are refused. A full disk is no reason not to
/// open.
fn note_sharing(dir: &dyn Dir) {
    let note = b"several processes that share the store";
    let write = || {
        let file = dir.open(&FileName::Lock.to_string(), Access::Write)?;
        file.set_len(0)?;
        file.write_at(note, 0)
    };
    write().unwrap_or_default();
}

/// Turns a store that was opened alone into a shared one.
fn admit_others(engine: Arc<Engine>, locks: &Locks) -> Result<Option<Arc<Engine>>> {
    let mut engine = engine;
    let Some(own) = Arc::get_mut(&mut engine) else {
        return Err(Error::invalid("store is in use before it is open"));
    };
    let end = {
        let core = own.core();
        let empty = to_u32(SEGMENT_HEADER_BYTES);
        let next = core.next.iter().map(|segment| (segment, empty));
        for (segment, end) in [(&core.writer.segment, core.writer.end_offset())]
            .into_iter()
            .chain(next)
        {
            clear_behind(segment, end)?;
        }
        core.writer.end().get()
    };
    let edit = own.catalog().manifest().edit;
    let cells = SharedCells {
        epoch: own.generation,
        end,
        end_edit: edit,
        edit,
        stamp: own.core().stamps.newest(),
        // Recovery has made all of it durable.
        durable: end,
        ..SharedCells::default()
    };
    let shared = Shared::open(
        &own.dir,
        own.store,
        own.options.turn_timeout,
        &locks.member,
        Some(&cells),
    )?;
    own.core().edit_seen = edit;
    own.shared = Some(shared);
    own.hold_membership(locks)?;
    own.reserve_whole();
    let admitted = locks.try_member(LockMode::Shared)?;
    Ok(admitted.then_some(engine))
}

/// Overwrites old bytes of a file's former life with zeros (B). They need not be durable: behind a
/// crash the next one to come first does it again.
fn clear_behind(segment: &SegmentFile, end: u32) -> Result<()> {
    if !segment.recycled {
        return Ok(());
    }
    let clear = || {
        let file = segment.file()?;
        let zeros = vec![0; to_usize(segment.bytes - end)];
        file.write_at(&zeros, u64::from(end))
    };
    clear().map_err(|e| Error::io("clearing a segment failed", e).in_file(segment.name()))
}

/// Joins a store that others have open.
fn join(dir: &Arc<dyn Dir>, locks: &Locks, in_place: bool, options: Options) -> Result<Engine> {
    let manifest = read_manifest(dir.as_ref())?.ok_or_else(|| {
        let name = FileName::Manifest.to_string();
        Error::damaged(name, 0, "MANIFEST is gone; restore it from a backup")
    })?;
    let hash = KeyHash::new(&manifest.hash_key, manifest.store);
    let wait = options.turn_timeout;
    let shared = Shared::open(dir, manifest.store, wait, &locks.member, None)?;
    let (manifest, durable, rebuilt) = rebuild(dir, &shared, manifest, &hash, &options)?;
    let time = TrustedTime::resume(options.clock.as_ref(), Some(manifest.anchor), 0);
    time.raise(options.clock.as_ref(), rebuilt.trusted_ms);
    let report = OpenReport {
        replayed_count: rebuilt.replayed_count,
        ..OpenReport::default()
    };
    let mut core = rebuilt.core(&options);
    let (sealed, active) = rebuilt.install(&mut core);
    let mut engine = assemble(Base {
        dir: Arc::clone(dir),
        lock: Box::new(NotYet),
        zero_fill: Engine::uses_zero_fill(&options, in_place),
        options,
        time,
        hash,
        store: manifest.store,
        generation: 0,
        catalog: Catalog::new(Arc::clone(dir), manifest.clone()),
        core,
        durable,
        report,
    });
    engine.core().map_frozen();
    engine.shared = Some(shared);
    engine.reserve_generation()?;
    {
        // Whoever looks after the dead does so with this gate: not between making and locking.
        let _nobody_looks = engine.gate(GateName::Upkeep, engine.gate_end_ms())?;
        engine.hold_membership(locks)?;
    }
    {
        let mut core = engine.core();
        engine.follow_rest(&mut core, &manifest);
        // What it lists was taken over; what was edited since is not.
        core.edit_seen = manifest.edit;
    }
    engine.gather_unsettled(sealed, active)?;
    engine.refresh()?;
    engine.count_unsettled();
    Ok(engine)
}

/// Reads the store as the manifest lists it, and says what of it was durable; again if a file that
/// it lists is gone because it was replaced meanwhile. As far as was told, which needs no turn: the
/// others go on. If who told it died in the middle of telling, with the turn held.
fn rebuild(
    dir: &Arc<dyn Dir>,
    shared: &Shared,
    known: Manifest,
    hash: &KeyHash,
    options: &Options,
) -> Result<(Manifest, Position, Rebuilt)> {
    let read = || Ok::<_, Error>(read_manifest(dir.as_ref())?.unwrap_or_else(|| known.clone()));
    let clock = options.clock.as_ref();
    let end_ms = shared.end_ms(clock);
    let mut tried = 0;
    loop {
        tried += 1;
        let turn = if tried <= TRIES_MAX && shared.read()?.is_told() {
            None
        } else {
            Some(shared.gate(GateName::Turn, clock, end_ms)?)
        };
        let manifest = read()?;
        let cells = shared.read()?;
        check_sound(&cells)?;
        let Some(reach) = Reach::of(&cells, &manifest, turn.is_some()) else {
            continue;
        };
        match Rebuilt::of(dir, &manifest, hash, options, &View::default(), reach) {
            Ok(rebuilt) => return Ok((manifest, Position::from_u64(cells.durable), rebuilt)),
            Err(_) if tried <= TRIES_MAX && read()?.edit != manifest.edit => {}
            Err(error) => return Err(error),
        }
    }
}

/// Refuses a store that is poisoned.
fn check_sound(cells: &SharedCells) -> Result<()> {
    let Some(cause) = &cells.poison else {
        return Ok(());
    };
    Err(Error::new(
        ErrorKind::Poisoned,
        format!(
            "store is poisoned by an earlier failure: {cause}; close it in all processes, and \
             open it again"
        ),
    ))
}

impl Engine {
    /// Reserves a generation of its own for this opener (C).
    fn reserve_generation(&mut self) -> Result<()> {
        let wall_ms = self.clock().read().wall_ms;
        let mut generation = 0;
        self.edit_manifest(|manifest| {
            generation = next_generation(manifest.generation_reserved, wall_ms);
            manifest.generation_reserved = generation + GENERATIONS_RESERVED;
        })?;
        self.generation = generation;
        let stamps = self
            .options
            .stamps(generation, generation + GENERATIONS_RESERVED);
        self.core().stamps = stamps;
        Ok(())
    }

    /// Locks the file that says that this opener is alive, and keeps that with the membership.
    fn hold_membership(&self, locks: &Locks) -> Result<()> {
        let owner = Shared::own(self.dir.as_ref(), self.generation)?;
        let membership = Membership {
            dir: Arc::clone(&self.dir),
            locks: locks.clone(),
            owner: Mutex::new(Some(owner)),
            generation: self.generation,
            home: ForkGuard::new(),
        };
        let held: Box<dyn Lock> = Box::new(membership);
        self.lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .replace(held);
        Ok(())
    }

    /// Ends this opener; the last one ends the store. Never in a forked child: it has the parent's
    /// locks in its hands.
    pub(super) fn close_shared(&self, shared: &Shared) -> Result<()> {
        let synced = match self.poison.error() {
            Some(error) => Err(error),
            None => self.sync_all(),
        };
        let _one_at_a_time = self.upkeep();
        {
            let mut core = self.core();
            if core.closed {
                return Ok(());
            }
            core.closed = true;
        }
        synced?;
        if !shared.is_last()? {
            return Ok(());
        }
        let (segment, frozen, end) = {
            // Another thread may be following still, which has found the store open.
            let end_ms = shared.end_ms(self.clock());
            let _turn = shared.gate(GateName::Turn, self.clock(), end_ms)?;
            self.follow(&shared.read()?)?;
            let core = self.core();
            let segment = Arc::clone(&core.writer.segment);
            (segment, core.view().frozen.clone(), core.writer.end())
        };
        if self.poisoned().is_some() {
            return Ok(());
        }
        for frozen in &frozen {
            self.sync_frozen(frozen)?;
        }
        self.sync_segment(&segment)?;
        self.syncer.reached(end);
        self.write_hint();
        self.edit_manifest(|manifest| manifest.closed_at = Some(end.get()))
    }

    /// Looks whether an opener has died, and tidies up behind it; with the upkeep held.
    pub(super) fn look_after_dead(&self) -> Result<()> {
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        match shared.try_gate(GateName::Merge, self.clock())? {
            Some(_no_merges) => self.remove_left_by_dead(shared),
            // At the next upkeep.
            None => Ok(()),
        }
    }

    /// Removes what dead openers have left: their own files, and those of their unfinished work.
    /// Called with the upkeep gate held, and the merge gate.
    fn remove_left_by_dead(&self, shared: &Shared) -> Result<()> {
        let failed = |e| Error::io("listing the directory failed", e);
        let names = self.dir.list().map_err(failed)?;
        let parsed = || names.iter().filter_map(|name| FileName::parse(name));
        let dead: Vec<u64> = parsed()
            .filter_map(|name| match name {
                FileName::Owner(generation) if generation != self.generation => Some(generation),
                _ => None,
            })
            .filter(|generation| !shared.is_alive(*generation))
            .collect();
        if dead.is_empty() {
            return Ok(());
        }
        // What was unlisted by somebody who died then is unlisted durably before it goes.
        self.know_all(shared)?;
        if self.poisoned().is_some() {
            return Ok(());
        }
        let manifest = self.catalog().manifest().clone();
        let is_left = |name: &FileName| match *name {
            FileName::Temporary { .. } => true,
            FileName::Segment(id) => manifest.dropped.contains(&id),
            FileName::Run { lo, hi, generation } | FileName::Filter { lo, hi, generation } => {
                let mut runs = manifest.runs.iter();
                !runs.any(|r| (r.lo, r.hi, r.generation) == (lo, hi, generation))
            }
            _ => false,
        };
        let left: Vec<FileName> = parsed().filter(is_left).collect();
        let owners = dead.into_iter().map(FileName::Owner);
        for name in left.into_iter().chain(owners).map(|name| name.to_string()) {
            remove_if_there(self.dir.as_ref(), &name)
                .map_err(|e| Error::io("removing a left-over file failed", e).in_file(name))?;
        }
        Ok(())
    }
}

/// A store read back by a process that changes nothing in it.
pub(super) struct Rebuilt {
    view: View,
    active: Arc<SegmentFile>,
    end: u32,
    table: ActiveTable,
    tally: Tally,
    began_at_s: u32,
    next: VecDeque<Arc<SegmentFile>>,
    /// Unsettled records outside the active segment that may be their key's newest.
    sealed_unsettled: Places,
    active_unsettled: Places,
    pub(super) trusted_ms: u64,
    /// The newest stamp in what was read.
    pub(super) stamp: u64,
    pub(super) replayed_count: u64,
}

impl Rebuilt {
    /// Reads what the manifest lists; `old` is what is open already.
    pub(super) fn of(
        dir: &Arc<dyn Dir>,
        manifest: &Manifest,
        hash: &KeyHash,
        options: &Options,
        old: &View,
        reach: Reach,
    ) -> Result<Rebuilt> {
        let mut opened = BTreeMap::new();
        for entry in manifest.segments.iter().filter(|s| s.sealed.is_none()) {
            let segment = open_segment(dir.as_ref(), manifest, entry, hash.id(), Access::Write)?;
            opened.insert(entry.id, segment);
        }
        let mut report = OpenReport::default();
        // No open may be under way: nobody is told of progress.
        let options = &Options {
            on_progress: None,
            ..options.clone()
        };
        let gathered = replay_unsealed(
            dir.as_ref(),
            manifest,
            &opened,
            hash,
            options,
            &mut report,
            reach,
        )?;
        let Gathered {
            frozen,
            active: (active, replayed),
            next,
            trusted_ms,
            ..
        } = gathered;
        reach.check(&active, replayed.end)?;
        let mut view = listed_view(dir.as_ref(), manifest, hash, old, active.id)?;
        view.frozen.clear();
        let mut sealed_unsettled = Vec::new();
        for sealed in view.sealed.values() {
            sealed_unsettled.extend(footer_records(sealed)?);
        }
        let began_at_s = to_seconds(trusted_ms);
        let full_ones = frozen.iter().filter_map(|full| full.replayed.as_ref());
        let stamp = full_ones
            .map(|replayed| replayed.stamp)
            .fold(replayed.stamp, u64::max);
        for full in frozen {
            let (frozen, unsettled) = freeze(full, hash, began_at_s)?;
            sealed_unsettled.extend(unsettled);
            view.frozen.push(Arc::new(frozen));
        }
        Ok(Rebuilt {
            view,
            end: replayed.end,
            active_unsettled: places(active.id, &replayed.unsettled),
            active,
            table: replayed.table,
            tally: replayed.tally,
            began_at_s,
            next: next.into(),
            sealed_unsettled,
            trusted_ms,
            stamp,
            replayed_count: report.replayed_count,
        })
    }

    /// Makes an empty core for this store.
    pub(super) fn core(&self, options: &Options) -> Core {
        let writer = Writer::new(Arc::clone(&self.active), self.end);
        let table = ActiveTable::new(self.active.bytes);
        Core::new(writer, table, Tally::new(), options.stamps(0, 0))
    }

    /// Puts the store into a core, but for what is not settled: that is returned.
    pub(super) fn install(self, core: &mut Core) -> (Places, Places) {
        core.writer = Writer::new(self.active, self.end);
        core.table = self.table;
        core.tally = self.tally;
        core.began_at_s = self.began_at_s;
        core.next = self.next;
        core.set_view(self.view);
        core.note_written();
        (self.sealed_unsettled, self.active_unsettled)
    }
}

/// Turns a full segment that is not sealed yet into a frozen one, and lists what is not settled.
fn freeze(full: Full, hash: &KeyHash, began_at_s: u32) -> Result<(Frozen, Places)> {
    let segment = full.segment;
    let replayed = match full.replayed {
        Some(replayed) => replayed,
        None => replay_segment(&read_image(&segment)?, &segment, hash)?,
    };
    let unsettled = places(segment.id, &replayed.unsettled);
    let frozen = Frozen {
        table: replayed.table,
        segment,
        tally: replayed.tally,
        end: replayed.end,
        began_at_s,
        synced: AtomicBool::new(false),
    };
    Ok((frozen, unsettled))
}

#[cfg(test)]
mod tests {
    use crate::vfs::sim::{PowerCut, SimDisk};
    use crate::{Durability, NamespaceOptions, Observed, Options};

    /// What the last one to close calls the clean end of the log is durable, also what others have
    /// appended, and rolled, behind its own last flush.
    #[test]
    fn the_clean_end_covers_what_others_appended_behind_the_last_flush() {
        let options = || {
            Options::new()
                .shared(true)
                .segment_bytes(8192)
                .background(false)
                .durability(Durability::Process)
        };
        let small = || NamespaceOptions::new().outcome_bytes_max(0);
        let disk = SimDisk::new();
        let a = options().open_on(disk.process().dir()).unwrap();
        let other = disk.process();
        let b = options().open_on(other.dir()).unwrap();
        let keys = b.filter("f", small()).unwrap();
        assert_eq!(keys.observe("first").unwrap(), Observed::New);
        let engine = std::sync::Arc::clone(&a.handle.engine);
        let key = |n: u32| format!("{n:->180}");
        std::thread::scope(|scope| {
            let held = engine.upkeep();
            let flushes = a.stats().flushes_count;
            let closing = scope.spawn(|| engine.close());
            // The close has flushed and waits for the upkeep.
            while a.stats().flushes_count == flushes {
                std::thread::yield_now();
            }
            while engine.syncer.durable() < engine.core().writer.end() {
                std::thread::yield_now();
            }
            for n in 0..50 {
                assert_eq!(keys.observe(key(n)).unwrap(), Observed::New);
            }
            assert!(b.stats().segments_count > 1);
            other.kill();
            drop(held);
            closing.join().unwrap().unwrap();
        });
        drop((a, b, keys));
        let disk = disk.after_power_cut(&mut PowerCut::drop_all());
        let log = options().shared(false).open_on(disk.dir()).unwrap();
        assert!(log.open_report().clean);
        let keys = log.filter("f", small()).unwrap();
        for n in 0..50 {
            assert_eq!(keys.observe(key(n)).unwrap(), Observed::Duplicate, "{n}");
        }
    }
}
