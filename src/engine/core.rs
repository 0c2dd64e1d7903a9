//! What the append lock protects: the end of the log, the active table, the unsettled entries.
//!
//! Safety properties:
//! A. A slot of the table refers only to a record that is complete in the log image.
//! B. When a write fails, every change made since the last successful write is taken back, newest
//!    first, unless something of it was promised to a caller; then the store is poisoned.
//! C. The view changes only together with the table: whoever holds the lock sees every record
//!    exactly once, in the table, in the frozen table, or in a run.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;

use crate::format::manifest::SealedEntry;
use crate::format::record::{
    FLAG_CARRIED, KIND_COUNT, Kind, Record, Seal, SyncMark, UNSETTLED_LIST_MAX, encode_unsettled,
};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{to_u32, to_usize};
use crate::index::active::{ActiveTable, Place, SlotUndo};
use crate::index::run::Run;
use crate::key::NamespaceKind;
use crate::key_time::KeyTime;
use crate::log::segment::SegmentFile;
use crate::log::writer::Writer;
use crate::model::outbox::Queue;
use crate::model::retention::{DropTime, inherited, keeps_segment_until};
use crate::options::Durability;
use crate::position::Position;
use crate::stamp::Stamps;

/// Counts of one segment, kept while it is active and written into its seal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    pub(crate) by_kind: [u32; KIND_COUNT],
    /// Records that a later record of the same segment supersedes.
    pub(crate) superseded_count: u32,
    /// Current unsettled records of this segment.
    pub(crate) unsettled_count: usize,
    pub(crate) drop_at: DropTime,
}

impl Tally {
    pub(crate) fn new() -> Self {
        Tally {
            by_kind: [0; KIND_COUNT],
            superseded_count: 0,
            unsettled_count: 0,
            drop_at: DropTime::NOW,
        }
    }

    pub(crate) fn add(&mut self, record: &Record<'_>) {
        if let Some(count) = self.by_kind.get_mut(record.kind as usize) {
            *count += 1;
        }
        self.drop_at = self.drop_at.max(keeps_segment_until(record));
    }

    pub(crate) fn records_count(&self) -> u32 {
        self.by_kind.iter().sum()
    }
}

/// A full segment whose run is being built.
#[derive(Debug)]
pub(crate) struct Frozen {
    pub(crate) table: ActiveTable,
    pub(crate) segment: Arc<SegmentFile>,
    pub(crate) tally: Tally,
    /// Offset behind the seal record.
    pub(crate) end: u32,
    /// Trusted second of its first record.
    pub(crate) began_at_s: u32,
    /// Set once a flush of the file has returned.
    pub(crate) synced: AtomicBool,
}

/// A sealed segment.
#[derive(Debug)]
pub(crate) struct Sealed {
    pub(crate) segment: Arc<SegmentFile>,
    pub(crate) entry: SealedEntry,
    /// The segment as it was before it was sealed: readers of older views may have it mapped.
    pub(crate) former: Weak<SegmentFile>,
}

/// One run, and whether it has shown damage.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) run: Run,
    pub(crate) damaged: AtomicBool,
}

/// Everything behind the active segment, immutable: look-ups probe it without a lock.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// Full segments that are not sealed yet, oldest first: one, or several small ones; more only
    /// on a full disk.
    pub(crate) frozen: Vec<Arc<Frozen>>,
    /// Newest first.
    pub(crate) parts: Vec<Arc<Part>>,
    pub(crate) sealed: BTreeMap<u64, Arc<Sealed>>,
}

impl View {
    /// Returns the segment with this id, unless it is the active one or gone.
    pub(crate) fn segment(&self, id: u64) -> Option<&Arc<SegmentFile>> {
        match self.frozen(id) {
            Some(frozen) => Some(&frozen.segment),
            None => self.sealed.get(&id).map(|sealed| &sealed.segment),
        }
    }

    fn frozen(&self, id: u64) -> Option<&Arc<Frozen>> {
        self.frozen.iter().find(|frozen| frozen.segment.id == id)
    }

    fn drop_at(&self, id: u64) -> DropTime {
        let sealed = || self.sealed.get(&id).map(|s| s.entry.drop_at_s);
        match self.frozen(id) {
            Some(frozen) => frozen.tally.drop_at,
            None => sealed().map_or(DropTime::NOW, DropTime::from_disk),
        }
    }
}

/// One moment of the store: what lies behind the active segment, and which one that is.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) view: Arc<View>,
    active: u64,
    pub(crate) table: Place,
}

impl Snapshot {
    pub(crate) fn of(core: &Core) -> Self {
        Snapshot {
            view: Arc::clone(&core.view),
            active: core.writer.segment.id,
            table: core.table.place(),
        }
    }

    /// Says, under the lock, whether this is how the store is.
    pub(crate) fn is_current(&self, core: &Core) -> bool {
        self.active == core.writer.segment.id && Arc::ptr_eq(&self.view, core.view())
    }
}

/// One claim, start or key in doubt: what may not be dropped with its segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnsettledEntry {
    pub(crate) namespace: u16,
    /// End of the lease on the boot clock, for claims granted by this opener.
    pub(crate) deadline_boot_ms: Option<u64>,
    /// Log space kept free for what its owner may still write.
    pub(crate) owed_bytes: u32,
    /// Where the record was appended first, before it was carried over: said when it is appended
    /// or read. Of what an open or a restart lists, where it is.
    pub(crate) origin: u64,
}

/// Stands for the namespace of a record that cannot be read: no namespace gets this number.
pub(crate) const NAMESPACE_UNKNOWN: u16 = u16::MAX;

/// A namespace in force.
#[derive(Clone, Debug)]
pub(crate) struct KnownNamespace {
    pub(crate) name: String,
    pub(crate) kind: NamespaceKind,
    /// How keys tell when they were made, if this opener has said so.
    pub(crate) key_time: Option<KeyTime>,
}

/// What is needed to take one append back.
#[derive(Debug)]
struct Undo {
    slot: SlotUndo,
    added: Option<u64>,
    removed: Option<(u64, UnsettledEntry)>,
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) writer: Writer,
    pub(crate) table: ActiveTable,
    pub(crate) tally: Tally,
    /// Trusted second from which on the active segment's records were written.
    pub(crate) began_at_s: u32,
    /// Prepared segments, listed in the manifest, in order.
    pub(crate) next: VecDeque<Arc<SegmentFile>>,
    view: Arc<View>,
    /// The newest snapshot, for who searches without the lock: replaced with the view.
    pub(crate) published: Arc<ArcSwap<Snapshot>>,
    /// By position: the unsettled records that are their key's newest.
    pub(crate) unsettled: BTreeMap<u64, UnsettledEntry>,
    pub(crate) owed_bytes: u64,
    /// What was known of unsettled records before a restart that is not over: only this opener
    /// knows the leases that it has granted.
    pub(crate) granted: BTreeMap<u64, UnsettledEntry>,
    /// The largest frame that a namespace opened so far may write.
    pub(crate) frame_bytes_max: u32,
    pub(crate) stamps: Stamps,
    pub(crate) namespaces: BTreeMap<u16, KnownNamespace>,
    /// The queues of the outboxes that this opener has opened, by namespace.
    pub(crate) outboxes: BTreeMap<u16, Queue>,
    /// How many writes have failed and were taken back.
    pub(crate) failures: usize,
    pub(crate) closed: bool,
    /// End of the log when the newest hint was written.
    hinted: Position,
    /// The background was asked to prepare the next segment.
    next_asked: bool,
    undo: Vec<Undo>,
    /// The tally as of the last successful write.
    tally_written: Tally,
    /// Something behind the last successful write was promised to a caller (B).
    promised: bool,
    /// The durable position that the newest sync mark names.
    marked: Position,
    /// The edit of the manifest that all of this agrees with.
    pub(crate) edit_seen: u64,
    /// Following another process has failed in the middle: what was read is not all here.
    pub(crate) is_behind: bool,
}

impl Core {
    pub(crate) fn new(writer: Writer, table: ActiveTable, tally: Tally, stamps: Stamps) -> Self {
        let view = Arc::<View>::default();
        let snapshot = Snapshot {
            view: Arc::clone(&view),
            active: writer.segment.id,
            table: table.place(),
        };
        Core {
            marked: writer.end(),
            published: Arc::new(ArcSwap::from_pointee(snapshot)),
            writer,
            table,
            tally,
            began_at_s: 0,
            next: VecDeque::new(),
            view,
            unsettled: BTreeMap::new(),
            owed_bytes: 0,
            granted: BTreeMap::new(),
            frame_bytes_max: 0,
            stamps,
            namespaces: BTreeMap::new(),
            outboxes: BTreeMap::new(),
            failures: 0,
            closed: false,
            hinted: Position::START,
            next_asked: false,
            undo: Vec::new(),
            tally_written: tally,
            promised: false,
            edit_seen: 0,
            is_behind: false,
        }
    }

    /// Returns everything behind the active segment.
    pub(crate) fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// Puts everything behind the active segment in the place of what was there before (C). The
    /// active segment's writer and table are those that belong to it.
    pub(crate) fn set_view(&mut self, view: View) {
        self.view = Arc::new(view);
        self.published.store(Arc::new(Snapshot::of(self)));
    }

    /// Says whether a hint would say something that the newest one does not. Only what this opener
    /// has appended is worth one.
    pub(crate) fn is_hint_due(&self) -> bool {
        self.writer.last_offset() != 0 && self.hinted != self.writer.end()
    }

    pub(crate) fn note_hint(&mut self) {
        self.hinted = self.writer.end();
    }

    /// Says, once a segment, that it is half full and no next one is prepared.
    pub(crate) fn wants_next(&mut self) -> bool {
        let wants = !self.next_asked && self.next.is_empty() && self.is_half_full();
        self.next_asked |= wants;
        wants
    }

    pub(crate) fn is_half_full(&self) -> bool {
        self.writer.end_offset() > self.writer.segment.bytes / 2
    }

    /// Appends a record that supersedes `older` (position, kind, expiry), and publishes it (A).
    pub(crate) fn append(
        &mut self,
        record: &Record<'_>,
        h: u64,
        older: Option<Older>,
        entry: Option<UnsettledEntry>,
    ) -> Position {
        let offset = self.writer.append(record);
        let position = Position::new(self.writer.segment.id, offset);
        let here = older.filter(|o| o.position.segment() == self.writer.segment.id);
        let replaced = here.and_then(|o| self.table.replace(h, o.position.offset(), offset));
        let slot = match replaced {
            Some(slot) => {
                self.tally.superseded_count += 1;
                slot
            }
            None => self.table.insert(h, offset),
        };
        self.tally.add(record);
        let removed = older.and_then(|o| self.settle(o.position));
        let added = entry.map(|mut entry| {
            entry.origin = record.parts.origin.unwrap_or(position.get());
            self.owed_bytes += u64::from(entry.owed_bytes);
            self.tally.unsettled_count += 1;
            self.unsettled.insert(position.get(), entry);
            position.get()
        });
        if !self.promised {
            self.undo.push(Undo {
                slot,
                added,
                removed,
            });
        }
        position
    }

    /// Publishes a record that another process has appended (A): it is in the log image and in the
    /// file.
    pub(crate) fn take_in(
        &mut self,
        record: &Record<'_>,
        h: u64,
        offset: u32,
        older: Option<Position>,
        entry: Option<UnsettledEntry>,
    ) {
        let here = older.filter(|o| o.segment() == self.writer.segment.id);
        match here.and_then(|o| self.table.replace(h, o.offset(), offset)) {
            Some(_) => self.tally.superseded_count += 1,
            None => {
                self.table.insert(h, offset);
            }
        }
        self.tally.add(record);
        let settled = older.and_then(|older| self.settle(older));
        // A copy leaves its owner the lease.
        let kept = settled.filter(|_| record.flags & FLAG_CARRIED != 0);
        if let Some(entry) = entry {
            let position = Position::new(self.writer.segment.id, offset);
            let mut entry = kept.map_or(entry, |(_, kept)| kept);
            entry.origin = record.parts.origin.unwrap_or(position.get());
            self.owed_bytes += u64::from(entry.owed_bytes);
            self.tally.unsettled_count += 1;
            self.unsettled.insert(position.get(), entry);
        }
    }

    /// Returns the drop time that a record superseding `older` must carry; `None` if none.
    pub(crate) fn inherit(&self, older: Option<Older>, trusted_ms: u64) -> Option<u32> {
        let older = older?;
        let id = older.position.segment();
        let segment = (id != self.writer.segment.id).then(|| self.view.drop_at(id));
        let until = inherited(older.kind, older.expires_at_s, older.inherit, segment);
        (!until.has_come(trusted_ms)).then_some(until.to_disk())
    }

    /// Keeps so much log space free for what is written when this record is settled.
    pub(crate) fn set_owed(&mut self, position: Position, owed_bytes: u32) {
        if let Some(entry) = self.unsettled.get_mut(&position.get()) {
            self.owed_bytes -= u64::from(entry.owed_bytes);
            self.owed_bytes += u64::from(owed_bytes);
            entry.owed_bytes = owed_bytes;
        }
    }

    /// Returns the log space that is kept for what is written behind the record here.
    pub(crate) fn owed_at(&self, position: Position) -> u64 {
        let entry = self.unsettled.get(&position.get());
        entry.map_or(0, |entry| u64::from(entry.owed_bytes))
    }

    /// Notes where an outbox entry is now that was carried over.
    pub(crate) fn move_queued(&mut self, record: &Record<'_>, position: Position) {
        let failures = self.failures;
        let queue = self.outboxes.get_mut(&record.namespace);
        if let (Some(queue), Some(place)) = (queue, record.parts.origin) {
            queue.moved(place, position, failures);
        }
    }

    fn settle(&mut self, position: Position) -> Option<(u64, UnsettledEntry)> {
        let entry = self.unsettled.remove(&position.get())?;
        self.owed_bytes -= u64::from(entry.owed_bytes);
        if position.segment() == self.writer.segment.id {
            self.tally.unsettled_count -= 1;
        }
        Some((position.get(), entry))
    }

    /// Notes that an answer at this level rests on the record here: at `Buffered` nothing waits
    /// for it to be written, so it may not be taken back any more.
    pub(crate) fn rest_on(&mut self, position: Position, level: Durability) {
        if level == Durability::Buffered && position >= self.writer.written() {
            self.promise();
        }
    }

    /// Says that a caller was or will be told of something that is not written yet.
    pub(crate) fn promise(&mut self) {
        self.promised = true;
        self.undo.clear();
    }

    /// Notes that everything appended is in the file.
    pub(crate) fn note_written(&mut self) {
        self.undo.clear();
        self.promised = false;
        self.tally_written = self.tally;
    }

    /// Takes back everything since the last successful write (B). `false`: something of it was
    /// promised, or the bytes could not be neutralised.
    pub(crate) fn take_back(&mut self) -> bool {
        if self.promised || self.writer.take_back().is_err() {
            return false;
        }
        while let Some(undo) = self.undo.pop() {
            self.table.undo(undo.slot);
            if let Some(entry) = undo.added.and_then(|at| self.unsettled.remove(&at)) {
                self.owed_bytes -= u64::from(entry.owed_bytes);
            }
            if let Some((at, entry)) = undo.removed {
                self.owed_bytes += u64::from(entry.owed_bytes);
                self.unsettled.insert(at, entry);
            }
        }
        self.tally = self.tally_written;
        self.failures += 1;
        true
    }

    /// Appends a sync mark if the durable position has moved since the last one.
    pub(crate) fn mark(&mut self, durable: Position, trusted_ms: u64) {
        if durable > self.marked && self.writer.has_unwritten() && self.free_bytes() > 0 {
            self.marked = durable;
            self.writer.append_mark(SyncMark {
                durable: durable.get(),
                trusted_ms,
            });
        }
    }

    /// Ends the active segment with its footer, in memory. The caller writes it out.
    pub(crate) fn append_footer(&mut self, trusted_ms: u64) {
        let id = self.writer.segment.id;
        let range = Position::new(id, 0).get()..Position::new(id + 1, 0).get();
        let offsets: Vec<u32> = self
            .unsettled
            .range(range)
            .map(|(at, _)| Position::from_u64(*at).offset())
            .collect();
        self.hold(offsets.len(), trusted_ms);
        for list in offsets.chunks(UNSETTLED_LIST_MAX) {
            self.writer
                .append_with(|image, seed| encode_unsettled(list, image, seed));
        }
        let seal = Seal {
            trusted_ms,
            by_kind: self.tally.by_kind,
            superseded_count: self.tally.superseded_count,
            unsettled_count: to_u32(offsets.len()),
            drop_at_s: self.tally.drop_at.to_disk(),
        };
        self.writer
            .append_with(|image, seed| seal.encode(image, seed));
        self.tally.unsettled_count = offsets.len();
    }

    /// Lets a segment that ends with many unsettled records stay for a while: time alone keeps none
    /// of them, so it would be due at once, and what is copied out of it would fill the next one,
    /// which is due at once. Said before the segment is frozen, because what supersedes a record
    /// of it must outlive it.
    fn hold(&mut self, unsettled_count: usize, trusted_ms: u64) {
        if is_mostly_kept(unsettled_count, self.tally.records_count()) {
            let until_s = to_seconds(trusted_ms).saturating_add(HOLD_S);
            self.tally.drop_at = self.tally.drop_at.max(DropTime::from_disk(until_s));
        }
    }

    /// Puts runs that were built again, newest first, in the place of one.
    pub(crate) fn replace_part(&mut self, old: &Arc<Part>, built: Vec<Run>) {
        let mut view = View::clone(&self.view);
        if let Some(at) = view.parts.iter().position(|part| Arc::ptr_eq(part, old)) {
            let parts = built.into_iter().map(|run| {
                Arc::new(Part {
                    run,
                    damaged: AtomicBool::new(false),
                })
            });
            view.parts.splice(at..=at, parts);
        }
        self.set_view(view);
    }

    /// Continues in the next prepared segment; the former one is frozen (C). The caller has
    /// written the footer.
    pub(crate) fn switch(&mut self, next: Arc<SegmentFile>, trusted_ms: u64) -> Arc<Frozen> {
        let table = ActiveTable::new(next.bytes);
        let writer = Writer::new(next, to_u32(SEGMENT_HEADER_BYTES));
        let full = std::mem::replace(&mut self.writer, writer);
        let frozen = Arc::new(Frozen {
            table: std::mem::replace(&mut self.table, table),
            end: full.end_offset(),
            began_at_s: std::mem::replace(&mut self.began_at_s, to_seconds(trusted_ms)),
            segment: full.segment,
            tally: self.tally,
            synced: AtomicBool::new(false),
        });
        self.tally = Tally::new();
        self.next_asked = false;
        self.note_written();
        let mut view = View::clone(&self.view);
        view.frozen.push(Arc::clone(&frozen));
        self.set_view(view);
        frozen
    }

    /// Maps what is full and not sealed yet: nobody cuts it as long as somebody is there who may
    /// write. Without a map it is read by calls.
    pub(crate) fn map_frozen(&self) {
        for frozen in &self.view.frozen {
            frozen.segment.freeze().map(|_| ()).unwrap_or_default();
        }
    }
}

/// The newest record of a key, before it is superseded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Older {
    pub(crate) position: Position,
    pub(crate) kind: Kind,
    pub(crate) expires_at_s: u32,
    /// Until when it hides a record that is older still.
    pub(crate) inherit: DropTime,
}

impl Older {
    pub(crate) fn of(record: &Record<'_>, position: Position) -> Self {
        Older {
            position,
            kind: record.kind,
            expires_at_s: record.expires_at_s,
            inherit: record
                .parts
                .inherit_s
                .map_or(DropTime::NOW, DropTime::from_disk),
        }
    }
}

/// How long a segment stays at least that is mostly kept, in seconds.
const HOLD_S: u32 = 3600;

/// Says whether more than a quarter of a segment's records would have to be copied if it went.
pub(crate) fn is_mostly_kept(unsettled_count: usize, records_count: u32) -> bool {
    unsettled_count > to_usize(records_count) / 4
}

pub(crate) fn to_seconds(trusted_ms: u64) -> u32 {
    u32::try_from(trusted_ms / 1000).unwrap_or(u32::MAX)
}
