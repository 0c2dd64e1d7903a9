//! Hints: written when the store closes or stands still, read at open to replay less. A hint is
//! never needed: a missing, stale or foreign one means that the segment is replayed whole.

use std::cell::Cell;
use std::collections::BTreeMap;

use super::Engine;
use super::catalog::remove_if_there;
use super::core::Tally;
use super::recovery::Replayed;
use crate::format::hint::{HINT_BYTES_MAX, Hint};
use crate::format::names::FileName;
use crate::format::record::{Frame, seed};
use crate::format::run::HASH_BITS;
use crate::format::{StoreId, to_usize};
use crate::index::KeyHash;
use crate::index::active::{ActiveTable, PARTS};
use crate::log::segment::SegmentFile;
use crate::model::retention::DropTime;
use crate::position::Position;
use crate::vfs::{Access, Dir, read_all};

impl Engine {
    /// Writes a hint of the active segment, if all of it is durable and it is worth it. Failure
    /// is of no consequence.
    pub(crate) fn write_hint(&self) {
        if let Some((hint, entries_count)) = self.hint() {
            self.store_hint(&hint, entries_count);
        }
    }

    /// Removes the hint of a segment that has its run now. Where that fails the next open does it.
    pub(crate) fn remove_hint(&self, segment: u64) {
        let name = FileName::Hint(segment).to_string();
        remove_if_there(self.dir.as_ref(), &name).unwrap_or_default();
    }

    /// Returns a hint that is worth it, and how many entries it has.
    fn hint(&self) -> Option<(Hint, usize)> {
        let trusted_ms = self.now().trusted_ms;
        let durable = self.syncer.durable();
        let mut core = self.core();
        let end = core.writer.end();
        if end != durable
            || core.is_behind
            || core.table.count() < self.options.hint_entries_min
            || !core.is_hint_due()
        {
            return None;
        }
        let id = core.writer.segment.id;
        let range = Position::new(id, 0).get()..Position::new(id + 1, 0).get();
        let unsettled = core.unsettled.range(range);
        let unsettled = unsettled
            .map(|(at, entry)| (Position::from_u64(*at).offset(), entry.namespace))
            .collect();
        let hint = Hint {
            store: self.store,
            hash_key_id: self.hash.id(),
            segment: id,
            nonce: core.writer.segment.nonce,
            end: end.offset(),
            last: core.writer.last_offset(),
            trusted_ms,
            by_kind: core.tally.by_kind,
            superseded_count: core.tally.superseded_count,
            drop_at_s: core.tally.drop_at.to_disk(),
            unsettled,
        };
        core.note_hint();
        Some((hint, core.table.count()))
    }

    /// Copies the table one part at a time, so that nobody waits for the copy of a whole one. Where
    /// the log has gone on meanwhile, so has the table: then there is no hint, and not the end of
    /// one, with its checksum, on the disk either.
    fn store_hint(&self, hint: &Hint, entries_count: usize) {
        let end = Position::new(hint.segment, hint.end);
        let is_stale = Cell::new(false);
        let entries = (0..PARTS).flat_map(|part| {
            let core = self.core();
            is_stale.set(is_stale.get() || core.is_behind || core.writer.end() != end);
            let entries = core.table.ascending_in(part..part + 1);
            entries.collect::<Vec<_>>()
        });
        let name = FileName::Hint(hint.segment).to_string();
        let dir = self.dir.as_ref();
        let write = || {
            remove_if_there(dir, &name)?;
            let file = dir.open(&name, Access::Create)?;
            hint.stream(entries_count, entries, |bytes, at| {
                if is_stale.get() {
                    return Err(std::io::ErrorKind::Interrupted.into());
                }
                file.write_at(bytes, at)
            })
        };
        if write().is_err() {
            remove_if_there(dir, &name).unwrap_or_default();
        }
    }
}

/// Reads the hint of a segment and turns it into a replay that has come as far as its end.
pub(super) fn read_hint(
    dir: &dyn Dir,
    store: StoreId,
    segment: &SegmentFile,
    image: &[u8],
    hash: &KeyHash,
) -> Option<Replayed> {
    let file = dir
        .open(&FileName::Hint(segment.id).to_string(), Access::Read)
        .ok()?;
    let bytes = read_all(file.as_ref(), HINT_BYTES_MAX).ok()?;
    let (hint, entries) = Hint::decode(&bytes).ok()?;
    let same = hint.store == store
        && hint.hash_key_id == hash.id()
        && (hint.segment, hint.nonce) == (segment.id, segment.nonce);
    if !same || hint.end > segment.bytes || !ends_a_frame(&hint, segment, image) {
        return None;
    }
    let mut table = ActiveTable::new(segment.bytes);
    for (h, offset) in entries.iter() {
        if table.is_full() || h >> HASH_BITS != 0 {
            return None;
        }
        table.insert(h, offset);
    }
    let unsettled: BTreeMap<u32, u16> = hint.unsettled.iter().copied().collect();
    let tally = Tally {
        by_kind: hint.by_kind,
        superseded_count: hint.superseded_count,
        unsettled_count: unsettled.len(),
        drop_at: DropTime::from_disk(hint.drop_at_s),
    };
    Some(Replayed {
        table,
        tally,
        unsettled,
        sealed: false,
        end: hint.end,
        proven: Position::new(segment.id, hint.end).get(),
        trusted_ms: hint.trusted_ms,
        stamp: 0,
    })
}

/// Says whether the bytes of a hint are what was written: a stale one is no damage, as the open
/// does not need it.
pub(super) fn is_hint_whole(dir: &dyn Dir, segment: u64) -> bool {
    let name = FileName::Hint(segment).to_string();
    let read = dir.open(&name, Access::Read);
    let bytes = read.and_then(|file| read_all(file.as_ref(), HINT_BYTES_MAX));
    bytes.is_ok_and(|bytes| Hint::decode(&bytes).is_ok())
}

/// Says whether the log has a frame where the hint says that its last one is.
fn ends_a_frame(hint: &Hint, segment: &SegmentFile, image: &[u8]) -> bool {
    let bytes = image.get(to_usize(hint.last)..).unwrap_or_default();
    Frame::verify(bytes, seed(segment.nonce, hint.last))
        .is_ok_and(|frame| to_usize(hint.last) + frame.len() == to_usize(hint.end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfs::sim::{Fault, FaultKind, Op, SimDisk};
    use crate::{NamespaceOptions, Options};

    #[test]
    fn a_hint_is_of_one_moment_or_is_none() {
        let disk = SimDisk::new();
        let options = Options::new().background(false).hint_keys_min(1);
        let log = options.open_on(disk.dir()).unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        let keys: Vec<[u8; 2]> = (0..300u16).map(u16::to_le_bytes).collect();
        let (first, rest) = keys.split_at(200);
        assert_eq!(filter.observe_many(first).unwrap().len(), 200);
        let engine = &log.handle.engine;
        let name = FileName::Hint(engine.core().writer.segment.id).to_string();

        let (hint, count) = engine.hint().unwrap();
        engine.store_hint(&hint, count);
        let file = disk.read_file(&name).unwrap();
        let (read, entries) = Hint::decode(&file).unwrap();
        assert_eq!(read, hint);
        assert!(entries.iter().eq(engine.core().table.ascending()));
        assert_eq!(entries.iter().count(), 200);

        assert_eq!(filter.observe_many(rest).unwrap().len(), 100);
        engine.store_hint(&hint, count);
        assert_eq!(disk.read_file(&name), None);
        // Nor is there one if it dies before it has removed what it has written.
        disk.fail(Fault::sticky(disk.steps(), FaultKind::Io).only(Op::Unlink));
        engine.store_hint(&hint, count);
        assert!(
            disk.read_file(&name)
                .is_none_or(|file| Hint::decode(&file).is_err())
        );
    }
}
