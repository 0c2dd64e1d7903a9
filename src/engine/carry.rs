//! Carrying over: what is still needed of a segment is copied to the end of the log before it goes.
//!
//! A copy keeps the position that its record had at first. It is appended under the lock under
//! which its record was seen to be its key's newest, many at a time; between two of these the
//! foreground goes on, and gets the room that it may need.

use super::Engine;
use super::core::{Core, Older, Sealed, Snapshot};
use super::lookup::{Completed, Searched, Wanted, read_error};
use super::pass::{Item, fetch_table_ahead, next_pass};
use super::prepare::Upkeep;
use super::room::{Need, Room};
use crate::error::{Error, Result};
use crate::format::record::{FLAG_CARRIED, Kind, Record, StateHeader};
use crate::format::to_usize;
use crate::log::replay;
use crate::log::segment::SegmentFile;
use crate::model::retention::keeps_segment_until;
use crate::options::Durability;
use crate::position::Position;

/// Records that are copied under the lock at a time, and about how many bytes of them.
const COPIED_AT_ONCE: usize = 256;
const COPIED_BYTES_AT_ONCE: usize = 64 * 1024;

/// Which records of a segment are still needed when it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carry {
    /// Only unsettled ones: everything else has expired, or is evicted.
    Unsettled,
    /// Everything that is its key's newest record and still needed (TTL compaction).
    Needed,
}

/// What became of one record under the lock.
enum Copied {
    /// It is at the end of the log, there; or it is not needed any more.
    Done(Option<Position>),
    /// The store has changed since the search.
    Again,
    NoRoom(Room),
}

impl Engine {
    pub(super) fn carry_over(
        &self,
        upkeep: &mut Upkeep,
        sealed: &Sealed,
        carry: Carry,
    ) -> Result<()> {
        let offsets = match carry {
            Carry::Unsettled => self.unsettled_offsets(sealed)?,
            Carry::Needed => self.needed_offsets(sealed)?,
        };
        if !offsets.is_empty() {
            upkeep.half_carried.insert(sealed.segment.id);
        }
        let mut left = offsets.as_slice();
        let mut keeps_room = true;
        while !left.is_empty() {
            let records = read_some(&sealed.segment, left)?;
            left = left.get(records.len()..).unwrap_or_default();
            self.copy_all(upkeep, &records)?;
            keeps_room = keeps_room && self.keep_room(upkeep).is_ok();
        }
        Ok(())
    }

    /// Does what the foreground would have to wait for until everything is carried over. What fails
    /// here is not tried again before the end of it, and told by whoever needs it then.
    fn keep_room(&self, upkeep: &mut Upkeep) -> Result<()> {
        // At a bound what is prepared for new keys may evict, and that carries over itself.
        if self.options.log_bytes_max.is_none() {
            self.prepare_ahead(upkeep)?;
        }
        self.seal_frozen()
    }

    fn unsettled_offsets(&self, sealed: &Sealed) -> Result<Vec<u32>> {
        let id = sealed.segment.id;
        let range = Position::new(id, 0).get()..Position::new(id + 1, 0).get();
        // With the turn: who starts again from the runs forgets all of them for a moment.
        let core = self.turn()?;
        let listed = core.unsettled.range(range);
        Ok(listed
            .map(|(at, _)| Position::from_u64(*at).offset())
            .collect())
    }

    /// Lists the records that must outlive the segment: unsettled or within retention, or needed
    /// to hide an older record.
    fn needed_offsets(&self, sealed: &Sealed) -> Result<Vec<u32>> {
        let now = self.now();
        let segment = &sealed.segment;
        let map = segment
            .freeze()
            .map_err(|e| Error::io("mapping a segment failed", e).in_file(segment.name()))?;
        let end = to_usize(sealed.entry.end);
        let mut replay = replay::Replay::new(map.get(..end).unwrap_or_default(), segment.nonce);
        let mut offsets = Vec::new();
        for item in replay.by_ref() {
            let replay::Item::Record(offset, record) = item else {
                continue;
            };
            let until = keeps_segment_until(&record);
            if record.kind.is_unsettled() || !until.has_come(now.trusted_ms) {
                offsets.push(offset);
            }
        }
        if !replay.is_sealed() {
            return Err(Error::damaged(
                segment.name(),
                u64::from(replay.end()),
                "sealed segment is damaged; it is not compacted; see docs/operations.md",
            ));
        }
        Ok(offsets)
    }

    /// Copies those of the records to the end of the log that are still their keys' newest.
    fn copy_all(&self, upkeep: &mut Upkeep, records: &[(Position, OwnedRecord)]) -> Result<()> {
        let items = records.iter().map(|(_, record)| Item {
            wanted: self.wanted(record.record.0, &record.key),
            in_file: false,
            answer: None,
        });
        let mut items: Vec<Item<'_, ()>> = items.collect();
        let mut done = 0;
        while let Some(pass) = next_pass(&mut items, &mut done) {
            let those = records.get(done..).unwrap_or_default();
            if let Some(room) = self.copy_pass(pass, those)? {
                self.make_room_held(upkeep, room)?;
            }
        }
        Ok(())
    }

    /// Goes on with a pass as far as it comes; returns the room that the next record needs.
    fn copy_pass(
        &self,
        pass: &mut [Item<'_, ()>],
        records: &[(Position, OwnedRecord)],
    ) -> Result<Option<Room>> {
        let snapshot = self.snapshot_many(pass, false);
        let searched = self.search_many(&snapshot, pass, &|_| ());
        let mut core = self.turn()?;
        self.check_writable(&core)?;
        let (mut copies, mut no_room, mut failed) = (Vec::new(), None, Ok(()));
        for (index, (searched, (position, record))) in searched.into_iter().zip(records).enumerate()
        {
            fetch_table_ahead(pass, index, &core);
            let Some(item) = pass.get_mut(index) else {
                break;
            };
            let Some(searched) = searched else {
                failed = item.answer.take().unwrap_or(Ok(()));
                break;
            };
            match self.copy_one(
                &mut core,
                &snapshot,
                item.wanted,
                searched,
                *position,
                record,
            ) {
                Ok(Copied::Done(copy)) => {
                    copies.extend(copy.map(|at| (*position, record, at)));
                    item.answer = Some(Ok(()));
                }
                Ok(Copied::Again) => break,
                Ok(Copied::NoRoom(room)) => {
                    no_room = Some(room);
                    break;
                }
                Err(error) => {
                    failed = Err(error);
                    break;
                }
            }
        }
        if !copies.is_empty() {
            self.finish_append(&mut core, Durability::Buffered)?;
        }
        // Not before: what a failed write takes back has not moved.
        for (position, record, at) in copies {
            core.move_queued(&record.copy(position), at);
        }
        failed.map(|()| no_room)
    }

    /// Copies one record under the lock.
    fn copy_one(
        &self,
        core: &mut Core,
        snapshot: &Snapshot,
        wanted: Wanted<'_>,
        searched: Searched<()>,
        position: Position,
        owned: &OwnedRecord,
    ) -> Result<Copied> {
        let hit = match self.complete(core, snapshot, wanted, searched, &|_| ())? {
            Completed::Current(hit) => hit,
            Completed::Changed | Completed::InFile => return Ok(Copied::Again),
        };
        let is_newest = hit.is_some_and(|hit| hit.older.position == position);
        if !is_newest || !core.namespaces.contains_key(&wanted.namespace) {
            return Ok(Copied::Done(None));
        }
        let record = owned.copy(position);
        let frame_bytes = record.frame_bytes();
        // The copy owes what its record did.
        let need = Need::Change {
            own_bytes: 0,
            owed_bytes: 0,
        };
        let room = Room::of_one(frame_bytes, need);
        if !core.has_room(room) {
            return Ok(Copied::NoRoom(room));
        }
        let entry = core.unsettled.get(&position.get()).copied();
        let older = Older::of(&record, position);
        let carried = self.append(core, &record, wanted.h, Some(older), entry);
        self.counters.carried.add(1);
        Ok(Copied::Done(Some(carried.position)))
    }
}

/// Reads the first of these records: one at least, and as many as are copied at a time.
fn read_some(segment: &SegmentFile, offsets: &[u32]) -> Result<Vec<(Position, OwnedRecord)>> {
    let mut records = Vec::new();
    let mut bytes = 0;
    for offset in offsets.iter().take(COPIED_AT_ONCE) {
        let read = segment.read(*offset, |frame| {
            let record = frame.record()?;
            Ok((record.frame_bytes(), OwnedRecord::of(&record)))
        });
        let (frame_bytes, record) = read.map_err(|e| read_error(e, segment, *offset))?;
        records.push((Position::new(segment.id, *offset), record));
        bytes += frame_bytes;
        if bytes >= COPIED_BYTES_AT_ONCE {
            break;
        }
    }
    Ok(records)
}

/// A record that has left the bytes it was read from.
#[derive(Debug)]
pub(super) struct OwnedRecord {
    kind: Kind,
    record: (u16, u16, u32, StateHeader),
    key: Vec<u8>,
    parts: [Option<Vec<u8>>; 4],
    origin: Option<u64>,
    inherit_s: Option<u32>,
    outcome_until_s: Option<u32>,
}

impl OwnedRecord {
    pub(super) fn of(r: &Record<'_>) -> Self {
        let own = |part: Option<&[u8]>| part.map(<[u8]>::to_vec);
        OwnedRecord {
            kind: r.kind,
            record: (r.namespace, r.flags, r.expires_at_s, r.state),
            key: r.key.to_vec(),
            parts: [
                own(r.parts.outcome),
                own(r.parts.error),
                own(r.parts.evidence),
                own(r.parts.ordering),
            ],
            origin: r.parts.origin,
            inherit_s: r.parts.inherit_s,
            outcome_until_s: r.parts.outcome_until_s,
        }
    }

    /// Returns what is written of it when it is carried over from there.
    fn copy(&self, position: Position) -> Record<'_> {
        let mut record = self.borrow();
        record.flags |= FLAG_CARRIED;
        record.parts.origin = record.parts.origin.or(Some(position.get()));
        record
    }

    pub(super) fn borrow(&self) -> Record<'_> {
        let (namespace, flags, expires_at_s, state) = self.record;
        let [outcome, error, evidence, ordering] = &self.parts;
        let mut record = Record::new(self.kind, namespace, &self.key);
        record.flags = flags;
        record.expires_at_s = expires_at_s;
        record.state = state;
        record.parts.outcome = outcome.as_deref();
        record.parts.error = error.as_deref();
        record.parts.evidence = evidence.as_deref();
        record.parts.origin = self.origin;
        record.parts.inherit_s = self.inherit_s;
        record.parts.ordering = ordering.as_deref();
        record.parts.outcome_until_s = self.outcome_until_s;
        record
    }
}
