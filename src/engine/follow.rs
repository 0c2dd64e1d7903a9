//! Following what other processes of a shared store do: the log is read on from where this process
//! has come to; where others have sealed what it has not read, it starts again from their runs.
//!
//! Safety properties:
//! A. Called with the turn held, so that the log stands still and nobody is in the middle of a
//!    write: what is not a whole frame at its end was left by a process that died.
//! B. Only whole frames are taken in; a torn one is overwritten with zeros, durably, before
//!    anything is appended in its place.
//! C. The manifest may be replaced meanwhile, by whoever has the gate for that. It is read as a
//!    whole, and read again if a file that it lists is gone.
//! D. Without the turn only that is read which was told at the end of a turn: nothing of it is
//!    taken back, and it needs no edit of the manifest that is not known.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use super::Engine;
use super::catalog::read_manifest;
use super::core::{Core, KnownNamespace, Part, Sealed, UnsettledEntry, View};
use super::group::place_of;
use super::join::Rebuilt;
use super::lookup::read_error;
use super::merge::run_entry;
use super::open::open_segment;
use super::reader::Reach;
use super::runs::open_run;
use super::shared::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::{Manifest, RunEntry};
use crate::format::names::FileName;
use crate::format::record::{FLAG_CARRIED, Frame, HEADER_BYTES, Record, Seal, claimed_bytes};
use crate::format::shared::SharedCells;
use crate::format::{to_u32, to_usize};
use crate::index::KeyHash;
use crate::log::replay::{Item, Replay};
use crate::log::segment::{ReadError, SegmentFile};
use crate::model::claim::Entry;
use crate::model::retention::DropTime;
use crate::options::OUTCOME_BYTES_DEFAULT;
use crate::position::Position;
use crate::stamp::Stamp;
use crate::vfs::{Access, Dir};

/// How much of the log is read at once.
const CHUNK_BYTES: usize = 256 << 10;
/// What most records take.
const RECORD_BYTES: usize = 32;
/// How much is looked at behind the known end.
const PROBE_BYTES: usize = 64;
/// How often the manifest is read again because a file that it lists is gone.
pub(super) const TRIES_MAX: usize = 100;

/// What the end of the log looks like.
pub(super) enum Read {
    /// Whole frames, which were taken in.
    Frames,
    /// Nothing was ever written there.
    Nothing,
    /// The footer was read: the log goes on in the next segment.
    Seal(Box<Seal>),
}

/// Whole frames from one place of a segment on.
struct Piece {
    /// Of each record the hash of its key, and its offset.
    records: Vec<(u64, u32)>,
    /// The newest time that a mark or the seal tells.
    trusted_ms: u64,
    seal: Option<Seal>,
    /// Behind the last frame that counts: lists of what is not settled count only together with
    /// the seal behind them.
    end: u32,
    /// Where that frame begins.
    last: u32,
    /// Behind the last whole frame.
    torn: u32,
    /// A frame of a newer version is there.
    is_newer: bool,
}

impl Piece {
    /// Reads all frames before any is taken in: their places in the table are fetched meanwhile.
    fn read(bytes: &[u8], nonce: u32, at: u32, hash_and_fetch: impl Fn(u16, &[u8]) -> u64) -> Self {
        let mut replay = Replay::of_part(bytes, nonce, at);
        let mut piece = Piece {
            records: Vec::with_capacity(bytes.len() / RECORD_BYTES),
            trusted_ms: 0,
            seal: None,
            end: at,
            last: at,
            torn: at,
            is_newer: false,
        };
        let (mut frame, mut behind) = (at, at);
        loop {
            while let Some((offset, bare)) = replay.next_bare() {
                let h = hash_and_fetch(bare.namespace, bare.key);
                piece.records.push((h, offset));
                (frame, behind) = (offset, replay.end());
                (piece.end, piece.last) = (behind, frame);
            }
            let Some(item) = replay.next() else {
                break;
            };
            if replay.end() != behind {
                (frame, behind) = (behind, replay.end());
            }
            match item {
                Item::Record(offset, record) => {
                    let h = hash_and_fetch(record.namespace, record.key);
                    piece.records.push((h, offset));
                }
                Item::Mark(mark) => piece.trusted_ms = piece.trusted_ms.max(mark.trusted_ms),
                Item::Seal(seal) => {
                    piece.trusted_ms = piece.trusted_ms.max(seal.trusted_ms);
                    piece.seal = Some(seal);
                }
                Item::Unsettled => continue,
            }
            (piece.end, piece.last) = (behind, frame);
        }
        (piece.torn, piece.is_newer) = (replay.end(), replay.is_not_understood());
        piece
    }
}

/// Refuses records of a newer version.
fn check_known(segment: &SegmentFile, piece: &Piece) -> Result<()> {
    if !piece.is_newer {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Incompatible,
        "another process has written a record of a newer version; stop it, or use that version \
         here",
    )
    .in_file(segment.name())
    .at(u64::from(piece.torn)))
}

pub(super) fn not_read_back(segment: &SegmentFile, at: u32) -> Error {
    Error::damaged(
        segment.name(),
        u64::from(at),
        "what another process has appended does not read back; nothing was appended here; see \
         docs/operations.md",
    )
}

impl Engine {
    /// Reads on to the end of the log (A).
    pub(crate) fn follow(&self, cells: &SharedCells) -> Result<()> {
        let (is_behind, is_edited) = {
            let mut core = self.core();
            core.stamps.follow(Stamp::from_u64(cells.stamp));
            (core.is_behind, core.edit_seen < cells.edit)
        };
        if is_behind {
            self.with_listed(|manifest| self.start_again(manifest, Reach::Turn))?;
        } else if is_edited {
            self.with_listed(|manifest| self.follow_far(manifest, Reach::Turn))?;
        }
        {
            let mut core = self.core();
            loop {
                match self.read_on(&mut core, cells)? {
                    Read::Frames => {}
                    Read::Nothing => break,
                    Read::Seal(seal) => self.follow_roll(&mut core, &seal)?,
                }
            }
        }
        if is_edited {
            self.with_listed(|manifest| self.follow_files(manifest))?;
        }
        Ok(())
    }

    /// Reads on while another process has the turn, up to what the one before it has told (D). What
    /// goes wrong is left to this process's own turn.
    pub(crate) fn follow_ahead(&self, shared: &Shared) {
        let Ok(cells) = shared.read() else {
            return;
        };
        let told = Position::from_u64(cells.end);
        let mut core = self.core();
        let (segment, at) = (Arc::clone(&core.writer.segment), core.writer.end_offset());
        if core.is_behind
            || core.closed
            || core.edit_seen < cells.end_edit
            || told.segment() != segment.id
            || told.offset() <= at
        {
            return;
        }
        // A failure leaves a mark that it is behind.
        self.read_told(&mut core, told)
            .map(|_| ())
            .unwrap_or_default();
    }

    /// Reads one piece of the active segment up to what was told (D).
    pub(super) fn read_told(&self, core: &mut Core, told: Position) -> Result<Read> {
        let segment = Arc::clone(&core.writer.segment);
        let at = core.writer.end_offset();
        let failed = |e| Error::io("reading the log failed", e).in_file(segment.name());
        let end = match told.segment().cmp(&segment.id) {
            std::cmp::Ordering::Less => at,
            std::cmp::Ordering::Equal => told.offset(),
            std::cmp::Ordering::Greater => segment.bytes,
        };
        if end <= at {
            return Ok(Read::Nothing);
        }
        let all = to_usize(end - at);
        // Some frames are larger than what is read at once.
        for wanted in [all.min(CHUNK_BYTES), all] {
            let bytes = segment.bytes_at(at, wanted).map_err(failed)?;
            let piece = self.read_piece(core, &bytes, at);
            check_known(&segment, &piece)?;
            if piece.end > at {
                return self.take_in_piece(core, &bytes, piece);
            }
        }
        Err(not_read_back(&segment, at))
    }

    /// Does something with the manifest; again if a later edit has removed what this one lists (C).
    fn with_listed(&self, mut act: impl FnMut(&Manifest) -> Result<()>) -> Result<()> {
        let mut tried = 0;
        loop {
            let manifest = self.read_listed()?;
            let done = act(&manifest);
            if done.is_ok() || tried == TRIES_MAX || self.read_listed()?.edit == manifest.edit {
                return done;
            }
            tried += 1;
        }
    }

    pub(super) fn read_listed(&self) -> Result<Manifest> {
        read_manifest(self.dir.as_ref())?.ok_or_else(|| {
            let name = FileName::Manifest.to_string();
            let what = "MANIFEST is gone while the store is open; restore it from a backup";
            Error::damaged(name, 0, what)
        })
    }

    /// Starts again from the runs if others have sealed more than what this process is in.
    pub(super) fn follow_far(&self, manifest: &Manifest, reach: Reach) -> Result<()> {
        let active = self.core().writer.segment.id;
        if goes_on_from(manifest, active) {
            self.follow_rest(&mut self.core(), manifest);
            return Ok(());
        }
        self.start_again(manifest, reach)
    }

    /// Opens the segments that come behind the active one.
    pub(super) fn follow_next(&self, core: &mut Core, manifest: &Manifest) -> Result<()> {
        let dir = self.dir.as_ref();
        let active = core.writer.segment.id;
        let mut next: BTreeMap<u64, Arc<SegmentFile>> = core
            .next
            .iter()
            .map(|segment| (segment.id, Arc::clone(segment)))
            .collect();
        for entry in &manifest.segments {
            if entry.id > active && entry.sealed.is_none() && !next.contains_key(&entry.id) {
                let segment = open_segment(dir, manifest, entry, self.hash.id(), Access::Write)?;
                next.insert(entry.id, segment);
            }
        }
        core.next = next.into_values().collect();
        Ok(())
    }

    /// Takes over which files there are, and what else the manifest says.
    pub(super) fn follow_files(&self, manifest: &Manifest) -> Result<()> {
        let mut core = self.core();
        let (dir, active) = (self.dir.as_ref(), core.writer.segment.id);
        let view = listed_view(dir, manifest, &self.hash, core.view(), active)?;
        self.follow_next(&mut core, manifest)?;
        core.set_view(view);
        self.follow_rest(&mut core, manifest);
        core.edit_seen = manifest.edit;
        Ok(())
    }

    /// Takes over namespaces, time and stamps.
    pub(super) fn follow_rest(&self, core: &mut Core, manifest: &Manifest) {
        let known: Vec<u16> = core.namespaces.keys().copied().collect();
        for id in known {
            if !manifest.namespaces.iter().any(|n| n.id == id) {
                core.namespaces.remove(&id);
                core.outboxes.remove(&id);
                core.forget_namespace(id);
            }
        }
        for entry in &manifest.namespaces {
            core.namespaces
                .entry(entry.id)
                .or_insert_with(|| KnownNamespace {
                    name: entry.name.clone(),
                    kind: entry.kind,
                    key_time: None,
                });
        }
        core.stamps.extend(manifest.generation_reserved);
        self.time.adopt(self.clock(), manifest.anchor);
    }

    /// Continues in the next segment, as whoever has rolled did.
    pub(super) fn follow_roll(&self, core: &mut Core, seal: &Seal) -> Result<()> {
        // Behind a seal nothing is appended, whatever fails here.
        core.is_behind = true;
        let active = core.writer.segment.id;
        if core.next.front().is_none_or(|next| next.id <= active) {
            let manifest = self.read_listed()?;
            let later = manifest.segments.iter().filter(|s| s.id > active);
            let entry = later.min_by_key(|s| s.id).ok_or_else(|| {
                let name = core.writer.segment.name();
                Error::damaged(
                    name,
                    0,
                    "the log has ended, and the manifest lists no next segment; close the store \
                     everywhere and open it again",
                )
            })?;
            let segment = open_segment(
                self.dir.as_ref(),
                &manifest,
                entry,
                self.hash.id(),
                Access::Write,
            )?;
            core.next.push_front(segment);
        }
        let Some(next) = core.next.pop_front() else {
            return Ok(());
        };
        core.tally.drop_at = core.tally.drop_at.max(DropTime::from_disk(seal.drop_at_s));
        core.tally.unsettled_count = to_usize(seal.unsettled_count);
        core.switch(next, seal.trusted_ms);
        if self.reader.is_none() {
            core.map_frozen();
        }
        core.is_behind = false;
        Ok(())
    }

    /// Reads one piece of the active segment behind what is known.
    fn read_on(&self, core: &mut Core, cells: &SharedCells) -> Result<Read> {
        let segment = Arc::clone(&core.writer.segment);
        let at = core.writer.end_offset();
        let failed = |e| Error::io("reading the log failed", e).in_file(segment.name());
        let told = Position::from_u64(cells.end);
        let known = match told.segment().cmp(&segment.id) {
            std::cmp::Ordering::Less => 0,
            std::cmp::Ordering::Equal => told.offset().saturating_sub(at),
            std::cmp::Ordering::Greater => segment.bytes - at,
        };
        let room = to_usize(segment.bytes - at);
        let mut wanted = (to_usize(known) + PROBE_BYTES).min(CHUNK_BYTES).min(room);
        loop {
            let bytes = segment.bytes_at(at, wanted).map_err(failed)?;
            let piece = self.read_piece(core, &bytes, at);
            check_known(&segment, &piece)?;
            if piece.end > at {
                let is_all = piece.torn == piece.end
                    && told == Position::new(segment.id, piece.end)
                    && is_untouched(bytes.get(to_usize(piece.torn - at)..).unwrap_or_default());
                return Ok(match self.take_in_piece(core, &bytes, piece)? {
                    Read::Frames if is_all => Read::Nothing,
                    read => read,
                });
            }
            let lists = to_usize(piece.torn - at);
            let rest = bytes.get(lists..).unwrap_or_default();
            let header = rest.get(..HEADER_BYTES);
            if (header.is_none() || is_untouched(rest)) && lists == 0 && known == 0 {
                return Ok(Read::Nothing);
            }
            let claimed = header.and_then(claimed_bytes).unwrap_or(HEADER_BYTES);
            if claimed > rest.len() && bytes.len() < room {
                wanted = (lists + claimed).min(room);
                continue;
            }
            if known > 0 {
                return Err(not_read_back(&segment, at));
            }
            return self.clear_torn(core, (lists + claimed).min(room));
        }
    }

    /// Overwrites what a dead process has left of a frame (B).
    fn clear_torn(&self, core: &Core, bytes: usize) -> Result<Read> {
        let segment = &core.writer.segment;
        let at = u64::from(core.writer.end_offset());
        let cleared = segment
            .file()
            .and_then(|file| file.write_at(&vec![0; bytes], at));
        if let Err(source) = cleared {
            let what = "clearing an unfinished write of a dead process failed";
            let error = Error::io(what, source).in_file(segment.name());
            self.poison_with(error.to_string());
            return Err(error);
        }
        // Together with whatever others have appended: a failure is everybody's.
        self.sync_segment(segment)?;
        self.counters.torn_frames.add(1);
        Ok(Read::Nothing)
    }

    fn read_piece(&self, core: &Core, bytes: &[u8], at: u32) -> Piece {
        Piece::read(bytes, core.writer.segment.nonce, at, |namespace, key| {
            let h = self.hash.hash(namespace, key);
            core.table.prefetch(h);
            h
        })
    }

    /// Takes in what was read where the log ends for this process.
    fn take_in_piece(&self, core: &mut Core, bytes: &[u8], piece: Piece) -> Result<Read> {
        let at = core.writer.end_offset();
        let bytes = bytes.get(..to_usize(piece.end - at)).unwrap_or_default();
        // From here on there is no way back but to start again.
        core.is_behind = true;
        core.writer.absorb(bytes, piece.last);
        let mut trusted_ms = piece.trusted_ms;
        for (h, offset) in &piece.records {
            let frame = bytes.get(to_usize(offset - at)..).unwrap_or_default();
            let record = match Frame::verified(frame).and_then(|frame| frame.record()) {
                Ok(record) => record,
                Err(why) => {
                    let why = ReadError::Malformed(why);
                    return Err(read_error(why, &core.writer.segment, *offset));
                }
            };
            trusted_ms = trusted_ms.max(record.state.at_ms);
            self.take_in(core, *h, *offset, &record)?;
        }
        core.note_written();
        core.is_behind = false;
        self.counters.records.add_alone(piece.records.len() as u64);
        if trusted_ms > 0 {
            self.time.raise(self.clock(), trusted_ms);
        }
        Ok(match piece.seal {
            Some(seal) => Read::Seal(Box::new(seal)),
            None => Read::Frames,
        })
    }

    fn take_in(&self, core: &mut Core, h: u64, offset: u32, record: &Record<'_>) -> Result<()> {
        if !core.table.has_room(1) {
            return Err(Error::damaged(
                core.writer.segment.name(),
                u64::from(offset),
                "segment holds more records than its table has room for",
            ));
        }
        let position = Position::new(core.writer.segment.id, offset);
        let older = self.older_of(core, h, record)?;
        let entry = record.kind.is_unsettled().then(|| UnsettledEntry {
            namespace: record.namespace,
            deadline_boot_ms: None,
            owed_bytes: self.owed_by_others(core, record.namespace),
            origin: 0,
        });
        let older_at = older.as_ref().map(|(at, _)| *at);
        core.take_in(record, h, offset, older_at, entry);
        core.stamps.follow(Stamp::from_u64(record.state.stamp));
        if core.outboxes.contains_key(&record.namespace) {
            self.follow_outbox(core, record, position, older);
        }
        Ok(())
    }

    /// Returns the log space to keep free for a claim that this opener has not granted.
    pub(super) fn owed_by_others(&self, core: &Core, namespace: u16) -> u32 {
        let owes = core
            .namespaces
            .get(&namespace)
            .is_some_and(|n| n.kind.has_claims() || super::intake::is_queue_name(&n.name));
        if owes {
            to_u32(OUTCOME_BYTES_DEFAULT).min(self.options.segment_bytes / 8)
        } else {
            0
        }
    }

    /// Finds the record that this one supersedes, and where it was first appended; one behind the
    /// active segment only if something there is not settled.
    fn older_of(
        &self,
        core: &Core,
        h: u64,
        record: &Record<'_>,
    ) -> Result<Option<(Position, u64)>> {
        let segment = &core.writer.segment;
        let own = |found: &Record<'_>| {
            (found.namespace == record.namespace && found.key == record.key)
                .then_some(found.parts.origin)
        };
        for at in core.table.candidates(h) {
            let take = |frame: &Frame<'_>| Ok(own(&frame.record()?));
            let read = core
                .writer
                .read_image(at, take)
                .unwrap_or_else(|| segment.read(at, take));
            if let Some(origin) = read.map_err(|error| read_error(error, segment, at))? {
                let position = Position::new(segment.id, at);
                return Ok(Some((position, origin.unwrap_or(position.get()))));
            }
        }
        let first = Position::new(segment.id, 0).get();
        if core.unsettled.range(..first).next().is_none() {
            return Ok(None);
        }
        let wanted = self.wanted(record.namespace, record.key);
        let hit = self.search_view(core.view(), wanted, &|found| found.parts.origin)?;
        Ok(hit.map(|hit| {
            let position = hit.older.position;
            (position, hit.taken.unwrap_or(position.get()))
        }))
    }

    /// Tells the queue of an outbox that is open here what has become of an entry.
    fn follow_outbox(
        &self,
        core: &mut Core,
        record: &Record<'_>,
        position: Position,
        older: Option<(Position, u64)>,
    ) {
        if !record.kind.is_queued() {
            let queue = core.outboxes.get_mut(&record.namespace);
            if let (Some(queue), Some((_, place))) = (queue, older) {
                queue.remove(place);
            }
            return;
        }
        if record.flags & FLAG_CARRIED != 0 {
            core.move_queued(record, position);
            return;
        }
        let entry = Entry::of_record(record);
        let queued = self.queued_entry(&entry, position, core.failures);
        let place = place_of(&entry, position);
        if let Some(queue) = core.outboxes.get_mut(&record.namespace) {
            if let Some((_, before)) = older.filter(|(_, before)| *before != place) {
                queue.remove(before);
            }
            queue.change(place, queued);
        }
    }

    /// Forgets what was read of the log, and takes over what others have made of it: they have
    /// sealed more than is worth reading.
    pub(super) fn start_again(&self, manifest: &Manifest, reach: Reach) -> Result<()> {
        let view = self.core().view().clone();
        let rebuilt = Rebuilt::of(&self.dir, manifest, &self.hash, &self.options, &view, reach)?;
        let listed = {
            let mut core = self.core();
            core.is_behind = true;
            core.stamps.follow(Stamp::from_u64(rebuilt.stamp));
            let listed = rebuilt.install(&mut core);
            if self.reader.is_none() {
                core.map_frozen();
            }
            for (at, entry) in std::mem::take(&mut core.unsettled) {
                // A restart that has failed had more to keep.
                core.granted.entry(at).or_insert(entry);
            }
            core.owed_bytes = 0;
            self.follow_rest(&mut core, manifest);
            listed
        };
        let (sealed, active) = listed;
        self.gather_unsettled(sealed, active)?;
        let origins = self.origins_of_copies().inspect_err(|_| {
            // What is listed here would pass for what was known before, when it starts once more.
            self.core().unsettled.clear();
        })?;
        let mut core = self.core();
        let granted = std::mem::take(&mut core.granted);
        let by_origin: BTreeMap<u64, &UnsettledEntry> = granted
            .values()
            .map(|entry| (entry.origin, entry))
            .collect();
        let copied = |at: &u64| by_origin.get(origins.get(at)?).copied();
        let mut more = 0i128;
        for (at, entry) in &mut core.unsettled {
            if let Some(before) = granted.get(at).or_else(|| copied(at)) {
                more += i128::from(before.owed_bytes) - i128::from(entry.owed_bytes);
                *entry = *before;
            }
        }
        core.owed_bytes = u64::try_from(i128::from(core.owed_bytes) + more).unwrap_or(0);
        core.note_written();
        let outboxes: Vec<u16> = core.outboxes.keys().copied().collect();
        drop(core);
        for id in outboxes {
            self.read_outbox(id)?;
        }
        self.core().is_behind = false;
        Ok(())
    }

    /// Reads where the copies of open claims come from, if something is missing that was known
    /// before: others may have carried it over since.
    fn origins_of_copies(&self) -> Result<BTreeMap<u64, u64>> {
        let (places, view, active) = {
            let core = self.core();
            let is_missing = |at: &u64| !core.unsettled.contains_key(at);
            let unknown = core.unsettled.keys();
            let unknown = unknown.filter(|at| !core.granted.contains_key(at)).copied();
            let may_be_own = self.reader.is_none() && core.granted.keys().any(is_missing);
            let places: Vec<u64> = if may_be_own {
                unknown.collect()
            } else {
                Vec::new()
            };
            let active = Arc::clone(&core.writer.segment);
            (places, Arc::clone(core.view()), active)
        };
        let mut origins = BTreeMap::new();
        for at in places {
            let position = Position::from_u64(at);
            let behind = view.segment(position.segment());
            let segment = behind.unwrap_or(&active);
            let offset = position.offset();
            let read = segment.read(offset, |frame| {
                let record = frame.record()?;
                let origin = record.parts.origin;
                Ok(origin.filter(|_| record.kind.is_open_claim()))
            });
            match read {
                Ok(origin) => origins.extend(origin.map(|origin| (at, origin))),
                // It is kept all the same, as one that nobody knows.
                Err(ReadError::Malformed(_)) => {}
                Err(error) => return Err(read_error(error, segment, offset)),
            }
        }
        Ok(origins)
    }
}

/// Says whether the log is to be read on from this segment: nothing behind it is sealed, nor was
/// and is gone.
fn goes_on_from(manifest: &Manifest, active: u64) -> bool {
    let later = || manifest.segments.iter().filter(|s| s.id > active);
    let is_next_there = || later().any(|s| s.id == active + 1);
    let known = manifest.segments.iter().find(|s| s.id == active);
    let is_gapless = known.is_some_and(|s| s.sealed.is_none() || is_next_there());
    is_gapless && later().all(|s| s.sealed.is_none())
}

/// Says whether no frame was ever begun here.
fn is_untouched(bytes: &[u8]) -> bool {
    let begin = bytes.get(..8);
    begin.is_some_and(|begin| begin.iter().all(|b| *b == 0))
}

/// Makes the view that a manifest describes, of what is open already and what is not.
pub(super) fn listed_view(
    dir: &dyn Dir,
    manifest: &Manifest,
    hash: &KeyHash,
    old: &View,
    active: u64,
) -> Result<View> {
    let mut view = View::default();
    for entry in &manifest.segments {
        let Some(sealed) = entry.sealed.filter(|_| entry.id < active) else {
            continue;
        };
        let known = old.sealed.get(&entry.id).filter(|s| s.entry == sealed);
        let sealed = match known {
            Some(known) => Arc::clone(known),
            None => Arc::new(open_sealed_one(dir, manifest, entry.id, hash, old)?),
        };
        view.sealed.insert(entry.id, sealed);
    }
    view.frozen = old.frozen.clone();
    view.frozen.retain(|frozen| {
        let mut listed = manifest.segments.iter();
        listed.any(|s| s.id == frozen.segment.id && s.sealed.is_none())
    });
    for entry in manifest.runs.iter().filter(|run| run.hi < active) {
        let known = old.parts.iter().find(|part| run_entry(&part.run) == *entry);
        let part = match known {
            Some(known) => Arc::clone(known),
            None => Arc::new(Part {
                run: open_run(dir, manifest, entry, hash).ok_or_else(|| unreadable(entry))?,
                damaged: AtomicBool::new(false),
            }),
        };
        view.parts.push(part);
    }
    view.parts
        .sort_by_key(|part| std::cmp::Reverse(part.run.header.lo));
    Ok(view)
}

fn unreadable(run: &RunEntry) -> Error {
    let RunEntry { lo, hi, generation } = *run;
    Error::damaged(
        FileName::Run { lo, hi, generation }.to_string(),
        0,
        "index run is missing or damaged; close the store everywhere and open it once: it is \
         built again then",
    )
}

fn open_sealed_one(
    dir: &dyn Dir,
    manifest: &Manifest,
    id: u64,
    hash: &KeyHash,
    old: &View,
) -> Result<Sealed> {
    let entry = manifest.segments.iter().find(|s| s.id == id);
    let (Some(entry), Some(sealed)) = (entry, entry.and_then(|entry| entry.sealed)) else {
        return Err(Error::invalid(format!("segment is not sealed: id={id}")));
    };
    let frozen = old.frozen.iter().find(|frozen| frozen.segment.id == id);
    let (segment, former) = match frozen {
        Some(frozen) => (Arc::clone(&frozen.segment), Arc::downgrade(&frozen.segment)),
        None => {
            let segment = open_segment(dir, manifest, entry, hash.id(), Access::Read)?;
            (segment, Weak::new())
        }
    };
    let mapped = segment
        .sealed(dir)
        .map_err(|e| Error::io("mapping a segment failed", e).in_file(segment.name()))?;
    Ok(Sealed {
        segment: Arc::new(mapped),
        entry: sealed,
        former,
    })
}

#[cfg(test)]
mod tests {
    use crate::vfs::sim::SimDisk;
    use crate::{DedupLog, Durability, Filter, NamespaceOptions, Observed, Options};

    fn open(disk: &SimDisk) -> (DedupLog, Filter) {
        let options = Options::new()
            .shared(true)
            .background(false)
            .durability(Durability::Process);
        let log = options.open_on(disk.process().dir()).unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        (log, filter)
    }

    fn ahead(log: &DedupLog) -> u32 {
        let engine = &log.handle.engine;
        engine.follow_ahead(engine.shared.as_ref().unwrap());
        engine.core().writer.end_offset()
    }

    /// What counts of a piece: lists of what is not settled only with the seal behind them, and a
    /// group as one frame with records at their own offsets.
    #[test]
    fn a_piece_ends_behind_its_last_frame_that_counts() {
        use super::Piece;
        use crate::format::record::{
            Kind, Record, Seal, begin_group, encode_unsettled, end_group, seed,
        };
        use crate::format::to_u32;
        const AT: u32 = 640;
        let mut bytes = Vec::new();
        let next = |bytes: &[u8]| AT + to_u32(bytes.len());
        let put = |bytes: &mut Vec<u8>, key: &[u8]| {
            let at = next(bytes);
            Record::new(Kind::Seen, 1, key).encode(bytes, seed(7, at));
            at
        };
        let read = |bytes: &[u8]| {
            let piece = Piece::read(bytes, 7, AT, |_, key| u64::from(key[0]));
            let is_sealed = piece.seal.is_some();
            (piece.records, piece.last, piece.end, piece.torn, is_sealed)
        };
        let first = put(&mut bytes, b"first");
        let group = bytes.len();
        begin_group(&mut bytes);
        let members = [b"a", b"b"].map(|key| put(&mut bytes, key));
        end_group(&mut bytes, group, seed(7, AT + to_u32(group)));
        let mut records = vec![(u64::from(b'f'), first)];
        records.extend([(u64::from(b'a'), members[0]), (u64::from(b'b'), members[1])]);
        let end = next(&bytes);
        let expected = (records.clone(), AT + to_u32(group), end, end, false);
        assert_eq!(read(&bytes), expected);
        let last = put(&mut bytes, b"last");
        records.push((u64::from(b'l'), last));
        let end = next(&bytes);
        assert_eq!(read(&bytes), (records.clone(), last, end, end, false));
        encode_unsettled(&[first], &mut bytes, seed(7, end));
        let listed = next(&bytes);
        assert_eq!(read(&bytes), (records.clone(), last, end, listed, false));
        Seal::default().encode(&mut bytes, seed(7, listed));
        let sealed = next(&bytes);
        assert_eq!(read(&bytes), (records, listed, sealed, sealed, true));
    }

    /// Without the turn as much is read as was told when a turn ended, and no more: what lies
    /// behind may be taken back by whoever has the turn.
    #[test]
    fn what_was_told_is_read_without_the_turn_and_nothing_else() {
        let disk = SimDisk::new();
        let ((a, keys), (b, others)) = (open(&disk), open(&disk));
        b.handle.engine.refresh().unwrap();
        let before = ahead(&b);
        assert_eq!(keys.observe("told").unwrap(), Observed::New);
        let shared = disk.read_file("SHARED").unwrap();
        let told = a.handle.engine.core().writer.end_offset();
        assert_eq!(keys.observe("later").unwrap(), Observed::New);
        let end = a.handle.engine.core().writer.end_offset();
        assert!(before < told && told < end);
        // As if the second turn had not ended yet.
        let now = disk.read_file("SHARED").unwrap();
        disk.write_file("SHARED", shared);
        assert_eq!((ahead(&b), ahead(&b)), (told, told));
        // A cell that is being written tells nothing.
        let mut torn = now.clone();
        torn[70] ^= 1;
        disk.write_file("SHARED", torn);
        assert_eq!(ahead(&b), told);
        disk.write_file("SHARED", now);
        // A record of a namespace that this opener does not know yet.
        let space = a.filter("g", NamespaceOptions::new()).unwrap();
        assert_eq!(space.observe("in g").unwrap(), Observed::New);
        assert_eq!(ahead(&b), told);
        for key in ["told", "later"] {
            assert_eq!(others.observe(key).unwrap(), Observed::Duplicate);
        }
        assert!(ahead(&b) > end);
    }
}
