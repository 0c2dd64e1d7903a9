//! Opening: lock, manifest, replay of unsealed segments, runs; and creation.
//!
//! Safety properties:
//! A. Nothing is answered from bytes that the disk may not hold: what is found behind the last
//!    proven durable position is flushed and compared with what the device holds. Where that
//!    differs, or cannot be seen, the segment is written anew, into new blocks. (Writing the same
//!    bytes over the old ones is not enough: after a failed flush ext4 takes a block that was
//!    reserved and never written for written, so that no later flush makes it durable.)
//! B. Only what was never acknowledged as durable is cut: the log ends at its first invalid
//!    frame, unless something behind proves that the place was durable; then it is damage.
//! C. Killed at any step, the next open ends in the same state. Nothing is removed before what
//!    replaces it is durable, and no file with records is removed unless the manifest says so.
//! D. A damaged or foreign directory is never replaced by a fresh store.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, RwLock};

use super::Engine;
use super::background::Signals;
use super::catalog::Catalog;
use super::core::{
    Core, Frozen, KnownNamespace, NAMESPACE_UNKNOWN, Sealed, Tally, UnsettledEntry, View,
    to_seconds,
};
use super::hint::read_hint;
use super::open::{find_orphans, open_segment, remove_orphans};
use super::poison::Poison;
use super::reader::Reach;
use super::runs::{SealedSegment, install_sealed, open_run, open_sealed};
use super::settle::{finish_writing_anew, read_image, settle_segment};
use super::timers::Timers;
use super::waits::Waits;
use crate::clock::TrustedTime;
use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::Manifest;
use crate::format::names::FileName;
use crate::format::record::{Frame, Record, footer_bytes, seed};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{to_u32, to_usize};
use crate::index::KeyHash;
use crate::index::active::ActiveTable;
use crate::index::run::Run;
use crate::log::replay::{Item, Replay, proven_behind};
use crate::log::segment::SegmentFile;
use crate::log::sync::Syncer;
use crate::log::sync::primitives::Mutex;
use crate::log::writer::Writer;
use crate::model::retention::DropTime;
use crate::options::Options;
use crate::position::Position;
use crate::stamp::{GENERATIONS_RESERVED, next_generation};
use crate::stats::{Counters, OpenReport};
use crate::vfs::fork::ForkGuard;
use crate::vfs::{Access, Dir, Lock};

/// One segment read back into a table.
#[derive(Debug)]
pub(crate) struct Replayed {
    pub(crate) table: ActiveTable,
    pub(crate) tally: Tally,
    /// Offsets of unsettled records that no later record of the segment supersedes.
    pub(crate) unsettled: BTreeMap<u32, u16>,
    pub(crate) sealed: bool,
    pub(crate) end: u32,
    /// The furthest position that a mark inside the prefix proves durable.
    pub(super) proven: u64,
    pub(super) trusted_ms: u64,
    /// The newest stamp.
    pub(super) stamp: u64,
}

/// Replays the valid prefix of a segment.
pub(crate) fn replay_segment(
    bytes: &[u8],
    segment: &SegmentFile,
    hash: &KeyHash,
) -> Result<Replayed> {
    let start = Replayed {
        table: ActiveTable::new(segment.bytes),
        tally: Tally::new(),
        unsettled: BTreeMap::new(),
        sealed: false,
        end: to_u32(SEGMENT_HEADER_BYTES),
        proven: 0,
        trusted_ms: 0,
        stamp: 0,
    };
    replay_on(start, bytes, segment, hash)
}

/// Continues a replay where it has come to.
fn replay_on(
    mut out: Replayed,
    bytes: &[u8],
    segment: &SegmentFile,
    hash: &KeyHash,
) -> Result<Replayed> {
    let mut listed_count = None;
    let mut replay = Replay::starting_at(bytes, segment.nonce, out.end);
    while let Some(item) = replay.next() {
        if !matches!(item, Item::Unsettled) {
            // Lists without their seal are an unfinished footer: it is written again, and whole,
            // where it began, in the room that was kept for it.
            out.end = replay.end();
        }
        match item {
            Item::Record(offset, record) => out.add(bytes, segment, hash, offset, &record)?,
            Item::Mark(mark) => {
                out.proven = out.proven.max(mark.durable);
                out.trusted_ms = out.trusted_ms.max(mark.trusted_ms);
            }
            Item::Seal(seal) => {
                out.trusted_ms = out.trusted_ms.max(seal.trusted_ms);
                // It may stay longer than its records say.
                out.tally.drop_at = out.tally.drop_at.max(DropTime::from_disk(seal.drop_at_s));
                listed_count = Some(to_usize(seal.unsettled_count));
            }
            Item::Unsettled => {}
        }
    }
    if replay.is_not_understood() {
        return Err(Error::new(
            ErrorKind::Incompatible,
            "record of a newer version; nothing was changed; use a version that reads it",
        )
        .in_file(segment.name())
        .at(u64::from(replay.end())));
    }
    out.sealed = replay.is_sealed();
    // A sealed segment's footer says how many it lists: none of namespaces purged by then.
    out.tally.unsettled_count = listed_count.unwrap_or(out.unsettled.len());
    Ok(out)
}

impl Replayed {
    fn add(
        &mut self,
        bytes: &[u8],
        segment: &SegmentFile,
        hash: &KeyHash,
        offset: u32,
        record: &Record<'_>,
    ) -> Result<()> {
        if self.table.is_full() {
            return Err(Error::damaged(
                segment.name(),
                u64::from(offset),
                "segment holds more records than its table has room for",
            ));
        }
        let h = hash.hash(record.namespace, record.key);
        let older = self.table.candidates(h).find(|at| {
            let rest = bytes.get(to_usize(*at)..).unwrap_or_default();
            // Verified moments ago in the same bytes; a frame that fails now is another key.
            let frame = Frame::verify(rest, seed(segment.nonce, *at));
            let same = frame.and_then(|f| f.record());
            same.is_ok_and(|r| r.namespace == record.namespace && r.key == record.key)
        });
        match older {
            Some(older) => {
                self.table.replace(h, older, offset);
                self.tally.superseded_count += 1;
                self.unsettled.remove(&older);
            }
            None => {
                self.table.insert(h, offset);
            }
        }
        self.tally.add(record);
        self.trusted_ms = self.trusted_ms.max(record.state.at_ms);
        self.stamp = self.stamp.max(record.state.stamp);
        if record.kind.is_unsettled() {
            self.unsettled.insert(offset, record.namespace);
        }
        Ok(())
    }
}

/// Tables of full segments that an open keeps from its first reading to the sealing: there is one
/// such segment, or several small ones, but on a full disk. More are read again, so that the memory
/// of an open has a bound, whatever the manifest says.
const TABLES_KEPT_MAX: usize = 2;

/// A segment that was full when the store went down, and is not sealed.
pub(super) struct Full {
    pub(super) segment: Arc<SegmentFile>,
    end: u32,
    trusted_ms: u64,
    pub(super) replayed: Option<Replayed>,
}

/// What recovery has read before it writes anything.
pub(super) struct Gathered {
    /// Unsealed segments that were full, oldest first.
    pub(super) frozen: Vec<Full>,
    pub(super) active: (Arc<SegmentFile>, Replayed),
    pub(super) next: Vec<Arc<SegmentFile>>,
    sealed: Vec<SealedSegment>,
    /// The listed runs that are there and whole, oldest first.
    runs: Vec<Run>,
    /// Unsettled records that the footers of sealed segments list.
    unsettled: Vec<(Position, u16)>,
    proven: Position,
    pub(super) trusted_ms: u64,
    orphans: Vec<String>,
}

pub(super) fn recover(
    dir: Arc<dyn Dir>,
    lock: Box<dyn Lock>,
    in_place: bool,
    options: Options,
    manifest: Manifest,
    mut report: OpenReport,
) -> Result<Arc<Engine>> {
    let hash = KeyHash::new(&manifest.hash_key, manifest.store);
    report.clean = manifest.closed_at.is_some();
    // Everything is read and judged first: an open that is refused leaves all files as they were.
    finish_writing_anew(dir.as_ref(), &manifest, hash.id())?;
    let gathered = gather(dir.as_ref(), &manifest, &hash, &options, &mut report)?;
    remove_orphans(dir.as_ref(), &gathered.orphans)?;
    settle_log(dir.as_ref(), &gathered, &mut report)?;

    let wall_jump_ms = u64::try_from(options.wall_jump_max.as_millis()).unwrap_or(u64::MAX);
    let time = TrustedTime::resume(options.clock.as_ref(), Some(manifest.anchor), wall_jump_ms);
    time.raise(options.clock.as_ref(), gathered.trusted_ms);
    let wall_ms = options.clock.read().wall_ms;
    let generation = next_generation(manifest.generation_reserved, wall_ms);
    let reserved = generation + GENERATIONS_RESERVED;

    let namespaces = manifest
        .namespaces
        .iter()
        .map(|n| {
            (
                n.id,
                KnownNamespace {
                    name: n.name.clone(),
                    kind: n.kind,
                    key_time: None,
                },
            )
        })
        .collect();
    let store = manifest.store;
    let engine = build_engine(Parts {
        dir,
        lock,
        zero_fill: Engine::uses_zero_fill(&options, in_place),
        options,
        time,
        hash,
        store,
        generation,
        reserved,
        namespaces,
        manifest,
        report,
        gathered,
    })?;
    Ok(Arc::new(engine))
}

/// Reads and judges everything, and writes nothing.
fn gather(
    dir: &dyn Dir,
    manifest: &Manifest,
    hash: &KeyHash,
    options: &Options,
    report: &mut OpenReport,
) -> Result<Gathered> {
    let orphans = find_orphans(dir, manifest)?;
    report.orphans_count = orphans.len() as u64;
    let mut opened = BTreeMap::new();
    for entry in &manifest.segments {
        let access = if entry.sealed.is_some() {
            Access::Read
        } else {
            Access::Write
        };
        let segment = open_segment(dir, manifest, entry, hash.id(), access)?;
        opened.insert(entry.id, segment);
    }
    let reach = Reach::Turn;
    let mut gathered = replay_unsealed(dir, manifest, &opened, hash, options, report, reach)?;
    gathered.orphans = orphans;
    gathered.runs = manifest
        .runs
        .iter()
        .filter_map(|entry| open_run(dir, manifest, entry, hash))
        .collect();
    gathered.sealed = open_sealed(dir, manifest, &opened, &gathered.runs)?;
    for segment in &gathered.sealed {
        gathered.unsettled.extend(footer_records(&segment.sealed)?);
    }
    Ok(gathered)
}

struct Parts {
    dir: Arc<dyn Dir>,
    lock: Box<dyn Lock>,
    zero_fill: bool,
    options: Options,
    time: TrustedTime,
    hash: KeyHash,
    store: [u8; 16],
    generation: u64,
    reserved: u64,
    namespaces: BTreeMap<u16, KnownNamespace>,
    manifest: Manifest,
    report: OpenReport,
    gathered: Gathered,
}

fn build_engine(parts: Parts) -> Result<Engine> {
    let Gathered {
        frozen,
        active,
        next,
        sealed,
        runs: whole,
        unsettled: listed,
        ..
    } = parts.gathered;
    let mut report = parts.report;
    let (view, runs) = install_sealed(
        parts.dir.as_ref(),
        &parts.manifest,
        sealed,
        whole,
        &parts.hash,
        &parts.options,
        &mut report,
    )?;
    let (segment, replayed) = active;
    if !parts.options.shared {
        find_allocated(&segment, replayed.end, &next)?;
    }
    let unsettled = places(segment.id, &replayed.unsettled);
    let writer = Writer::new(segment, replayed.end);
    let stamps = parts.options.stamps(parts.generation, parts.reserved);
    let mut core = Core::new(writer, replayed.table, replayed.tally, stamps);
    core.next = next.into();
    core.namespaces = parts.namespaces;
    let mut catalog = Catalog::new(Arc::clone(&parts.dir), parts.manifest);
    let anchor = parts.time.anchor(parts.options.clock.as_ref(), 0, false);
    sync_drops(parts.dir.as_ref(), catalog.manifest())?;
    // The first durable step of this opener: from here on an older stamp is never issued.
    catalog.edit(|manifest| {
        manifest.anchor = anchor;
        manifest.generation_reserved = parts.reserved;
        manifest.closed_at = None;
        manifest.runs = runs;
        manifest.dropped.clear();
    })?;
    core.set_view(view);
    let mut engine = assemble(Base {
        dir: parts.dir,
        lock: parts.lock,
        zero_fill: parts.zero_fill,
        options: parts.options,
        time: parts.time,
        hash: parts.hash,
        store: parts.store,
        generation: parts.generation,
        catalog,
        durable: core.writer.end(),
        core,
        report,
    });
    engine.seal_all_recovered(frozen)?;
    // The index of a full segment comes first.
    engine.catalog().keep_reserve();
    engine.gather_unsettled(listed, unsettled)?;
    engine.count_unsettled();
    Ok(engine)
}

/// What an engine is made of.
pub(super) struct Base {
    pub(super) dir: Arc<dyn Dir>,
    pub(super) lock: Box<dyn Lock>,
    pub(super) zero_fill: bool,
    pub(super) options: Options,
    pub(super) time: TrustedTime,
    pub(super) hash: KeyHash,
    pub(super) store: [u8; 16],
    pub(super) generation: u64,
    pub(super) catalog: Catalog,
    pub(super) core: Core,
    pub(super) durable: Position,
    pub(super) report: OpenReport,
}

/// Makes an engine that is alone in its store.
pub(super) fn assemble(base: Base) -> Engine {
    Engine {
        dir: base.dir,
        lock: Mutex::new(Some(base.lock)),
        guards_count: AtomicUsize::new(0),
        options: base.options,
        time: base.time,
        hash: base.hash,
        store: base.store,
        generation: base.generation,
        pid: std::process::id(),
        home: ForkGuard::new(),
        syncer: Syncer::new(base.durable),
        published: Arc::clone(&base.core.published),
        core: Mutex::new(base.core),
        catalog: Mutex::new(base.catalog),
        maintenance: Mutex::default(),
        merging: Mutex::default(),
        poison: Poison::default(),
        counters: Counters::default(),
        zero_fill: base.zero_fill,
        clock_was_suspect: AtomicBool::new(false),
        events: Mutex::default(),
        background_errors: RwLock::default(),
        background: Signals::default(),
        waits: Waits::default(),
        timers: Timers::default(),
        report: base.report,
        salvaged: None,
        shared: None,
        reader: None,
    }
}

/// Returns where in the log the records of a segment are.
pub(super) fn places(segment: u64, records: &BTreeMap<u32, u16>) -> Vec<(Position, u16)> {
    let place = |(at, namespace): (&u32, &u16)| (Position::new(segment, *at), *namespace);
    records.iter().map(place).collect()
}

/// Finds out what is reserved of the segments that will be written. A shared store knows of no
/// part: see [`Engine::reserve_whole`].
fn find_allocated(active: &SegmentFile, end: u32, next: &[Arc<SegmentFile>]) -> Result<()> {
    let ends = next.iter().map(|next| (next.as_ref(), 0));
    for (segment, end) in ends.chain([(active, end)]) {
        segment
            .find_allocated(end)
            .map_err(|e| Error::io("reading a segment failed", e).in_file(segment.name()))?;
    }
    Ok(())
}

/// Makes the unlinking of dropped segments durable, before the manifest forgets them.
fn sync_drops(dir: &dyn Dir, manifest: &Manifest) -> Result<()> {
    if manifest.dropped.is_empty() {
        return Ok(());
    }
    dir.sync()
        .map_err(|e| Error::io("syncing the directory failed", e))
}

impl Engine {
    pub(super) fn count_unsettled(&mut self) {
        let (all, unreadable) = {
            let core = self.core();
            let known = core.unsettled.values();
            let unreadable = known.filter(|e| e.namespace == NAMESPACE_UNKNOWN).count();
            (core.unsettled.len(), unreadable)
        };
        self.report.unsettled_count = all as u64;
        self.report.unreadable_count = unreadable as u64;
    }

    /// Seals the segments that were full, oldest first. Each begins when the one before it ends.
    fn seal_all_recovered(&self, frozen: Vec<Full>) -> Result<()> {
        let mut began_at_s = to_seconds(self.now().trusted_ms);
        for full in frozen {
            let segment = full.segment;
            let replayed = match full.replayed {
                Some(replayed) => replayed,
                None => replay_segment(&read_image(&segment)?, &segment, &self.hash)?,
            };
            let ended_at_s = to_seconds(full.trusted_ms);
            self.seal_recovered(segment, replayed, began_at_s.min(ended_at_s))?;
            began_at_s = ended_at_s;
        }
        self.core().began_at_s = began_at_s;
        Ok(())
    }

    /// Seals a segment that was full when the store went down.
    fn seal_recovered(
        &self,
        segment: Arc<SegmentFile>,
        replayed: Replayed,
        began_at_s: u32,
    ) -> Result<()> {
        segment
            .freeze()
            .map_err(|e| Error::io("mapping a segment failed", e).in_file(segment.name()))?;
        let frozen = Frozen {
            table: replayed.table,
            segment,
            tally: replayed.tally,
            end: replayed.end,
            began_at_s,
            // It was written again and flushed by this open.
            synced: AtomicBool::new(true),
        };
        {
            let mut core = self.core();
            let mut view = View::clone(core.view());
            view.frozen.push(Arc::new(frozen));
            core.set_view(view);
        }
        self.seal_frozen()
    }

    /// Fills the unsettled table from what the footers of sealed segments list, as far as that is
    /// still its key's newest record, and from the active segment.
    pub(super) fn gather_unsettled(
        &self,
        listed: Vec<(Position, u16)>,
        active: Vec<(Position, u16)>,
    ) -> Result<()> {
        let mut found = Vec::new();
        // Segments that this open has sealed list theirs too; those before it were read already.
        let mut listed = listed;
        let known: BTreeSet<u64> = listed.iter().map(|(at, _)| at.get()).collect();
        let view = self.core().view().clone();
        for sealed in view.sealed.values() {
            let records = footer_records(sealed)?;
            listed.extend(records.into_iter().filter(|r| !known.contains(&r.0.get())));
        }
        for (position, namespace) in listed {
            let Some(segment) = view.segment(position.segment()) else {
                continue;
            };
            if namespace == NAMESPACE_UNKNOWN {
                found.push((position, namespace));
                continue;
            }
            let key = read_key(segment, position.offset())?.1;
            let wanted = self.wanted(namespace, &key);
            let located = match self.locate_known(wanted, |_| ()) {
                // A page of a run has gone bad: built again, it answers.
                Err(error) if error.kind() == ErrorKind::Damaged && self.is_alone() => {
                    let rebuilt = self
                        .maintenance()
                        .and_then(|mut held| self.rebuild_damaged(&mut held));
                    rebuilt.and_then(|()| self.locate_known(wanted, |_| ()))
                }
                located => located,
            };
            let is_newest = match located {
                Ok(located) => located
                    .hit
                    .is_some_and(|hit| hit.older.position == position),
                // A record on the way is damaged, and so is each answer about this key. What is
                // not known to be settled is not forgotten.
                Err(error) if error.kind() == ErrorKind::Damaged => true,
                Err(error) => return Err(error),
            };
            if is_newest {
                found.push((position, namespace));
            }
        }
        let mut core = self.core();
        let all = found.into_iter().chain(active);
        let mut in_active = 0;
        for (position, namespace) in all {
            if namespace != NAMESPACE_UNKNOWN && !core.namespaces.contains_key(&namespace) {
                continue;
            }
            in_active += usize::from(position.segment() == core.writer.segment.id);
            // Written by another opener; whoever ends it may need room for an outcome. How much a
            // queued job needs is known when its intake is opened.
            let owed_bytes = self.owed_by_others(&core, namespace);
            core.owed_bytes += u64::from(owed_bytes);
            let entry = UnsettledEntry {
                namespace,
                deadline_boot_ms: None,
                owed_bytes,
                origin: position.get(),
            };
            core.unsettled.insert(position.get(), entry);
        }
        core.tally.unsettled_count = in_active;
        core.note_written();
        Ok(())
    }
}

/// Reads the unsettled records that a segment's footer lists: position and namespace. Keys are
/// read again when they are looked up: only their places are kept.
pub(super) fn footer_records(sealed: &Sealed) -> Result<Vec<(Position, u16)>> {
    let segment = &sealed.segment;
    let mut records = Vec::new();
    for offset in footer_offsets(sealed)? {
        let namespace = match read_key(segment, offset) {
            Ok((namespace, _key)) => namespace,
            // It costs its own key, and keeps its segment: nobody can say that it is settled.
            Err(error) if error.kind() == ErrorKind::Damaged => NAMESPACE_UNKNOWN,
            Err(error) => return Err(error),
        };
        records.push((Position::new(segment.id, offset), namespace));
    }
    Ok(records)
}

fn read_key(segment: &SegmentFile, offset: u32) -> Result<(u16, Vec<u8>)> {
    segment
        .read(offset, |frame| {
            let record = frame.record()?;
            Ok((record.namespace, record.key.to_vec()))
        })
        .map_err(|e| super::lookup::read_error(e, segment, offset))
}

/// Reads the list of unsettled offsets in front of a segment's seal.
fn footer_offsets(sealed: &Sealed) -> Result<Vec<u32>> {
    let count = sealed.entry.unsettled_count;
    let mut offsets = Vec::new();
    let len = to_u32(footer_bytes(to_usize(count)));
    let mut at = sealed.entry.end.saturating_sub(len);
    while to_u32(offsets.len()) < count {
        let list = sealed
            .segment
            .read(at, |frame| {
                frame.unsettled().map(|list| (list, to_u32(frame.len())))
            })
            .map_err(|e| super::lookup::read_error(e, &sealed.segment, at))?;
        at = at.saturating_add(list.1);
        offsets.extend(list.0);
    }
    // One place listed again and again would be one record, and any amount of memory.
    if !offsets.is_sorted_by(|a, b| a < b) {
        return Err(Error::damaged(
            sealed.segment.name(),
            u64::from(at),
            "list of unsettled records is not in order; nothing was changed",
        ));
    }
    Ok(offsets)
}

/// Replays the unsealed segments in order and finds the end of the log (B).
pub(super) fn replay_unsealed(
    dir: &dyn Dir,
    manifest: &Manifest,
    opened: &BTreeMap<u64, Arc<SegmentFile>>,
    hash: &KeyHash,
    options: &Options,
    report: &mut OpenReport,
    reach: Reach,
) -> Result<Gathered> {
    let unsealed: Vec<&Arc<SegmentFile>> = manifest
        .segments
        .iter()
        .filter(|s| s.sealed.is_none())
        .filter_map(|s| opened.get(&s.id))
        .collect();
    let total: u64 = unsealed.iter().map(|s| u64::from(s.bytes)).sum();
    let mut read = 0;
    let mut full: Vec<Full> = Vec::new();
    let mut active = None;
    // What was told may end before what the last one to close has found.
    let closed_at = manifest.closed_at.filter(|_| !reach.is_told());
    let mut proven = closed_at.unwrap_or(0);
    for segment in &unsealed {
        if active.is_some() && (manifest.closed_at.is_some() || reach.is_told()) {
            // Behind the end of a log that was closed cleanly nothing was ever written; and what
            // was told is whole.
            continue;
        }
        let mut image = read_image(segment)?;
        reach.cut(segment.id, &mut image);
        let mut valid = to_u32(SEGMENT_HEADER_BYTES);
        if active.is_none() {
            let hint = read_hint(dir, manifest.store, segment, &image, hash);
            let known_count = hint.as_ref().map_or(0, |h| h.tally.records_count());
            let replayed = match hint {
                Some(hint) => replay_on(hint, &image, segment, hash)?,
                None => replay_segment(&image, segment, hash)?,
            };
            let records_count = replayed.tally.records_count();
            report.replayed_count += u64::from(records_count.saturating_sub(known_count));
            valid = replayed.end;
            proven = proven.max(replayed.proven);
            if replayed.sealed {
                full.push(Full {
                    segment: Arc::clone(segment),
                    end: replayed.end,
                    trusted_ms: replayed.trusted_ms,
                    replayed: (full.len() < TABLES_KEPT_MAX).then_some(replayed),
                });
            } else {
                active = Some((Arc::clone(segment), replayed));
            }
        }
        proven = proven.max(proven_behind(&image, segment.nonce, valid));
        read += image.len() as u64;
        if let Some(progress) = &options.on_progress {
            progress(read, total);
        }
    }
    let Some((active, replayed)) = active else {
        return Err(Error::damaged(
            FileName::Manifest.to_string(),
            0,
            "manifest lists no segment that could take the next record; nothing was changed",
        ));
    };
    let proven = Position::from_u64(proven);
    check_end(&active, &replayed, proven)?;
    let next = unsealed.into_iter().skip(full.len() + 1);
    let trusted_ms = full.iter().map(|f| f.trusted_ms).max().unwrap_or(0);
    Ok(Gathered {
        trusted_ms: trusted_ms.max(replayed.trusted_ms),
        frozen: full,
        active: (active, replayed),
        next: next.map(Arc::clone).collect(),
        sealed: Vec::new(),
        runs: Vec::new(),
        unsettled: Vec::new(),
        proven,
        orphans: Vec::new(),
    })
}

/// Makes sure that the disk holds exactly the log that was found (A, B).
fn settle_log(dir: &dyn Dir, gathered: &Gathered, report: &mut OpenReport) -> Result<()> {
    let proven = gathered.proven;
    let (active, replayed) = &gathered.active;
    if report.clean && proven == Position::new(active.id, replayed.end) {
        // Closed cleanly: all of it was flushed, and nothing lies behind it.
        return Ok(());
    }
    let full = gathered.frozen.iter().map(|f| (&f.segment, f.end));
    let empty = to_u32(SEGMENT_HEADER_BYTES);
    let next = gathered.next.iter().map(|segment| (segment, empty));
    for (segment, valid) in full.chain([(active, replayed.end)]).chain(next) {
        report.dropped_bytes += settle_segment(dir, segment, valid, proven)?;
    }
    Ok(())
}

/// Tells an unfinished tail from damage (B).
fn check_end(active: &SegmentFile, replayed: &Replayed, proven: Position) -> Result<()> {
    let end = Position::new(active.id, replayed.end);
    if proven > end {
        return Err(Error::damaged(
            active.name(),
            u64::from(replayed.end),
            format!(
                "records that were durable are damaged: log_end={end} durable_until={proven}; \
                 nothing was changed; see docs/operations.md"
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::prepare::{Blocks, create_segment};
    use super::*;
    use crate::format::record::Kind;
    use crate::format::segment::SegmentHeader;
    use crate::key::NamespaceKind;
    use crate::options::{Durability, NamespaceOptions};
    use crate::verdict::{KeyState, Observed};
    use crate::vfs::sim::SimDisk;

    const KEYS: u32 = 1500;

    fn options() -> Options {
        let options = Options::new().segment_bytes(4096).background(false);
        options.durability(Durability::Process)
    }

    /// A closed store of many sealed segments.
    fn store() -> SimDisk {
        let disk = SimDisk::memory();
        let log = options().open_on(disk.dir()).unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        for n in 0..KEYS {
            assert_eq!(filter.observe(n.to_le_bytes()).unwrap(), Observed::New);
        }
        log.maintain().unwrap();
        log.close().unwrap();
        disk
    }

    fn edit(disk: &SimDisk, change: impl FnOnce(&mut Manifest)) {
        let mut manifest = Manifest::decode(&disk.read_file("MANIFEST").unwrap()).unwrap();
        change(&mut manifest);
        disk.write_file("MANIFEST", manifest.encode());
    }

    #[test]
    fn any_number_of_full_segments_is_sealed_with_few_tables_in_memory() {
        let disk = store();
        let mut sealed_count = 0;
        edit(&disk, |manifest| {
            manifest.closed_at = None;
            manifest.runs.clear();
            for segment in &mut manifest.segments {
                sealed_count += usize::from(segment.sealed.take().is_some());
            }
        });
        assert!(sealed_count > 2 * TABLES_KEPT_MAX, "{sealed_count}");
        let log = options().open_on(disk.dir()).unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        for n in 0..KEYS {
            assert_eq!(filter.get(n.to_le_bytes()).unwrap(), KeyState::Seen);
        }
        assert_eq!(log.open_report().replayed_count, u64::from(KEYS));
        let kinds = [(String::from("f"), NamespaceKind::Filter)];
        assert_eq!(log.namespaces(), kinds);
    }

    /// Two keys with one hash under this hash key, found by trying nine million.
    const TWINS: [&[u8]; 2] = [b"key-2553173", b"key-8603410"];

    #[test]
    fn a_replay_tells_keys_of_one_hash_apart() {
        let hash = KeyHash::new(&[1; 16], [0; 16]);
        assert_eq!(hash.hash(1, TWINS[0]), hash.hash(1, TWINS[1]));
        let header = SegmentHeader {
            store: [0; 16],
            id: 1,
            nonce: 7,
            bytes: 4096,
            hash_key_id: hash.id(),
            recycled: false,
        };
        let dir = SimDisk::memory().dir();
        let segment = create_segment(dir.as_ref(), &header, Blocks::All, false).unwrap();
        let mut image = header.encode();
        for key in TWINS {
            let at = to_u32(image.len());
            Record::new(Kind::Seen, 1, key).encode(&mut image, seed(7, at));
        }
        image.resize(4096, 0);
        let replayed = replay_segment(&image, &segment, &hash).unwrap();
        assert_eq!(replayed.tally.records_count(), 2);
        assert_eq!(replayed.tally.superseded_count, 0);
        assert_eq!(replayed.table.count(), 2);
    }
}
