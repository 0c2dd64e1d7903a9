//! Preparing the next segment: created or recycled, durable and listed before its first record.
//!
//! Order of steps: create (or rename a retired file), size, blocks, header, sync the file, sync the
//! directory, manifest edit. Only then is the segment used.
//!
//! The size is whole from the start, the blocks are not, unless they are filled with zeros: they
//! are reserved a step ahead of the end of the log, and as far as open claims may need them. What
//! lies behind reads as zeros all the same.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::Engine;
use super::catalog::remove_if_there;
use super::core::Sealed;
use super::room::{NoBlocks, Room};
use super::shared::Held;
use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::SegmentEntry;
use crate::format::names::FileName;
use crate::format::segment::SegmentHeader;
use crate::format::to_u32;
use crate::log::segment::SegmentFile;
use crate::log::sync::primitives::MutexGuard;
use crate::options::{Durability, SEGMENT_BYTES_FIRST, WhenFull, ZeroFill};
use crate::position::Position;
use crate::vfs::{Access, Dir};

const ZERO_FILL_CHUNK_BYTES: usize = 4096;

/// Blocks reserved of a segment that is prepared and not in use yet.
const FIRST_BYTES: u32 = 4096;

/// What upkeep remembers from one time to the next; whoever holds it is the only one at it.
#[derive(Debug, Default)]
pub(crate) struct Upkeep {
    /// Dropped segments whose names are gone; durably so after the next directory sync.
    pub(crate) unlinked: BTreeSet<u64>,
    /// Files of dropped segments and runs whose removal failed and is tried again.
    pub(crate) left: Vec<FileName>,
    /// Segments of which some records may have been copied and others not. Nothing behind one goes
    /// before it: what a copy has become may lie there, and hides the record here.
    pub(crate) half_carried: BTreeSet<u64>,
    /// A dropped segment whose file is kept for the next one.
    pub(crate) retired: Option<Arc<Sealed>>,
    /// End of the log at the last upkeep.
    pub(crate) end_before: Option<Position>,
}

/// The upkeep, held: by this thread, and in a shared store by this process.
#[derive(Debug)]
pub(crate) struct Maintaining<'a> {
    upkeep: MutexGuard<'a, Upkeep>,
    _gate: Option<Held<'a>>,
}

impl<'a> Maintaining<'a> {
    pub(crate) fn new(upkeep: MutexGuard<'a, Upkeep>, gate: Option<Held<'a>>) -> Self {
        Maintaining {
            upkeep,
            _gate: gate,
        }
    }
}

impl Deref for Maintaining<'_> {
    type Target = Upkeep;

    fn deref(&self) -> &Upkeep {
        &self.upkeep
    }
}

impl DerefMut for Maintaining<'_> {
    fn deref_mut(&mut self) -> &mut Upkeep {
        &mut self.upkeep
    }
}

/// Why a segment is prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// For new keys: the bound on the log's size applies.
    NewKeys,
    /// For what is owed.
    Owed,
    /// The active segment ends early.
    EndedEarly,
}

impl Upkeep {
    /// Takes the retired segment's id if its file has the size and nobody reads it any more.
    fn take_retired(&mut self, bytes: u32) -> Option<u64> {
        let free = self.retired.as_ref().is_some_and(|sealed| {
            sealed.segment.bytes == bytes
                && Arc::strong_count(sealed) == 1
                && Arc::strong_count(&sealed.segment) == 1
                && sealed.former.strong_count() == 0
        });
        // Dropping the last handle here ends the map before the file is written again.
        self.retired
            .take_if(|_| free)
            .map(|sealed| sealed.segment.id)
    }
}

impl Engine {
    /// Prepares the next segment if the active one is more than half full and none is ready.
    pub(crate) fn prepare_ahead(&self, upkeep: &mut Upkeep) -> Result<()> {
        let due = {
            let core = self.core();
            core.next.is_empty() && core.is_half_full()
        };
        if due {
            self.prepare_next(upkeep, 0, Why::NewKeys)
        } else {
            Ok(())
        }
    }

    /// Makes the next segment, out of a retired one where there is one of the right size.
    pub(crate) fn prepare_next(
        &self,
        upkeep: &mut Upkeep,
        frame_bytes: usize,
        why: Why,
    ) -> Result<()> {
        let bytes = self.next_segment_bytes(frame_bytes, why);
        if why == Why::NewKeys {
            self.check_bound(upkeep, bytes)?;
        }
        let id = self.catalog().manifest().segment_next;
        let nonce = random_u32(self.dir.as_ref())?;
        let retired = upkeep.take_retired(bytes);
        let header = SegmentHeader {
            store: self.store,
            id,
            nonce,
            bytes,
            hash_key_id: self.hash.id(),
            recycled: retired.is_some(),
        };
        let segment = match retired {
            Some(old) => recycle_segment(self.dir.as_ref(), &header, old)?,
            None => {
                let keeps_free = why == Why::NewKeys;
                create_segment(self.dir.as_ref(), &header, self.blocks(bytes), keeps_free)?
            }
        };
        self.edit_manifest(|manifest| {
            manifest.segment_next = id + 1;
            manifest.segments.push(SegmentEntry {
                id,
                nonce,
                bytes,
                sealed: None,
            });
            manifest.dropped.retain(|id| Some(*id) != retired);
        })?;
        if self.shared.is_some() {
            return self.take_over_edit();
        }
        self.core().next.push_back(Arc::new(segment));
        Ok(())
    }

    /// A shared store reserves all blocks at once: its processes do not tell each other how far.
    fn blocks(&self, bytes: u32) -> Blocks {
        if self.zero_fill && bytes > SEGMENT_BYTES_FIRST {
            Blocks::Zeros
        } else if self.shared.is_some() {
            Blocks::All
        } else {
            Blocks::First
        }
    }

    /// Reserves what a store that was not shared has left unreserved, where the disk has far more
    /// than that. Otherwise a write that finds no space is taken back.
    pub(super) fn reserve_whole(&self) {
        let core = self.core();
        for segment in core.next.iter().chain([&core.writer.segment]) {
            let bytes = u64::from(segment.bytes);
            let reserve = || {
                let file = segment.file()?;
                if file.free_space()? / 2 > bytes {
                    file.allocate(0, bytes)?;
                }
                std::io::Result::Ok(())
            };
            reserve().unwrap_or_default();
        }
    }

    /// Says whether a record may be appended now; reserves blocks for it, if that is all it takes.
    pub(crate) fn allocate_for(&self, room: Room) -> Result<bool> {
        let core = self.turn()?;
        self.check_writable(&core)?;
        core.allocate(room).map_err(no_blocks)
    }

    /// Each segment is twice the former one, up to full size; it holds four of the largest frame
    /// that an open claim may still write, and what all of them may. One that replaces a segment
    /// that ended early, because everything in it had expired, is no larger than that.
    fn next_segment_bytes(&self, frame_bytes: usize, why: Why) -> u32 {
        let core = self.core();
        let newest = core
            .next
            .back()
            .map_or(core.writer.segment.bytes, |next| next.bytes);
        let factor = if why == Why::EndedEarly { 1 } else { 2 };
        let frame_bytes = to_u32(frame_bytes).max(core.frame_bytes_max);
        let owed_bytes = u32::try_from(core.owed_bytes).unwrap_or(u32::MAX);
        newest
            .saturating_mul(factor)
            .max(frame_bytes.saturating_mul(4))
            .max(owed_bytes)
            .min(self.options.segment_bytes)
            .next_multiple_of(4096)
            .min(self.options.segment_bytes)
    }

    /// Refuses to grow the log over its bound, or makes room by forgetting the oldest.
    fn check_bound(&self, upkeep: &mut Upkeep, bytes: u32) -> Result<()> {
        let Some(max) = self.options.log_bytes_max else {
            return Ok(());
        };
        loop {
            let used: u64 = self
                .catalog()
                .manifest()
                .segments
                .iter()
                .map(|s| u64::from(s.bytes))
                .sum();
            if used + u64::from(bytes) <= max {
                return Ok(());
            }
            if self.options.when_full == WhenFull::EvictOldest && self.evict_oldest(upkeep)? {
                continue;
            }
            return Err(Error::new(
                ErrorKind::Full,
                format!(
                    "log is at its bound: log_bytes={used} log_bytes_max={max}; new keys are \
                     refused until older ones expire; raise log_bytes_max"
                ),
            ));
        }
    }
}

/// Which blocks of a new segment are reserved before it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocks {
    /// Those of its header and first records; all of a first segment.
    First,
    All,
    /// All, and they are written: small commits into them cost one flush.
    Zeros,
}

/// Creates a segment file with its header, durable before anything refers to it. `keeps_free`: as
/// in [`SegmentFile::allocate`].
pub(crate) fn create_segment(
    dir: &dyn Dir,
    header: &SegmentHeader,
    blocks: Blocks,
    keeps_free: bool,
) -> Result<SegmentFile> {
    let name = FileName::Segment(header.id).to_string();
    let allocated = match blocks {
        Blocks::First if header.bytes > SEGMENT_BYTES_FIRST => FIRST_BYTES,
        Blocks::First | Blocks::All | Blocks::Zeros => header.bytes,
    };
    let create = || {
        // The id was never in a manifest, so whatever has the name holds nothing.
        remove_if_there(dir, &name)?;
        let file = dir.open(&name, Access::Create)?;
        // Asked first: a part may stay reserved of what does not fit.
        let kept = if keeps_free { header.bytes / 2 } else { 0 };
        if file.free_space()? < u64::from(allocated) + u64::from(kept) {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        file.set_len(u64::from(header.bytes))?;
        file.allocate(0, u64::from(allocated))?;
        if blocks == Blocks::Zeros {
            let zeros = [0; ZERO_FILL_CHUNK_BYTES];
            for at in (0..u64::from(header.bytes)).step_by(ZERO_FILL_CHUNK_BYTES) {
                file.write_at(&zeros, at)?;
            }
        }
        file.write_at(&header.encode(), 0)?;
        file.sync()?;
        dir.sync()?;
        Ok(file)
    };
    match create() {
        Ok(file) => {
            let segment = SegmentFile::new(header, file);
            segment.set_allocated(allocated);
            Ok(segment)
        }
        Err(error) => {
            remove_if_there(dir, &name).unwrap_or_default();
            Err(Error::io("creating the next segment failed", error).in_file(name))
        }
    }
}

/// Makes a segment out of the file of a dropped one: its blocks are allocated and written, so
/// small commits into it cost one flush. The new nonce makes the old bytes invalid. Killed in
/// between, the next open finds the header of a dropped segment, or of no listed one without
/// records, and removes the file.
fn recycle_segment(dir: &dyn Dir, header: &SegmentHeader, old: u64) -> Result<SegmentFile> {
    let from = FileName::Segment(old).to_string();
    let name = FileName::Segment(header.id).to_string();
    let recycle = || {
        dir.rename(&from, &name)?;
        let file = dir.open(&name, Access::Write)?;
        // Its former life may have ended early.
        if file.allocated()? < u64::from(header.bytes) {
            file.allocate(0, u64::from(header.bytes))?;
        }
        file.write_at(&header.encode(), 0)?;
        file.sync()?;
        dir.sync()?;
        Ok(file)
    };
    match recycle() {
        Ok(file) => Ok(SegmentFile::new(header, file)),
        Err(error) => {
            remove_if_there(dir, &name).unwrap_or_default();
            remove_if_there(dir, &from).unwrap_or_default();
            Err(Error::io("recycling a segment failed", error).in_file(name))
        }
    }
}

pub(crate) fn random_u32(dir: &dyn Dir) -> Result<u32> {
    let mut bytes = [0; 4];
    fill_random(dir, &mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

pub(crate) fn fill_random(dir: &dyn Dir, bytes: &mut [u8]) -> Result<()> {
    dir.fill_random(bytes)
        .map_err(|e| Error::io("no randomness", e))
}

pub(crate) fn no_blocks((segment, error): NoBlocks) -> Error {
    let what = "reserving space for the next record failed; free some, or let keys expire";
    Error::io(what, error).in_file(segment.name())
}

/// Zero-filling pays where small commits wait for the device and files are overwritten in place.
pub(crate) fn wants_zero_fill(zero_fill: ZeroFill, level: Durability, in_place: bool) -> bool {
    match zero_fill {
        ZeroFill::Always => true,
        ZeroFill::Never => false,
        ZeroFill::Auto => level == Durability::Power && in_place,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::manifest::SealedEntry;
    use crate::vfs::sim::SimDisk;
    use std::sync::Weak;

    const BYTES: u32 = 4096;

    fn retired(former: Weak<SegmentFile>) -> (Upkeep, Arc<Sealed>) {
        let header = SegmentHeader {
            store: [1; 16],
            id: 7,
            nonce: 1,
            bytes: BYTES,
            hash_key_id: 1,
            recycled: false,
        };
        let segment = create_segment(
            SimDisk::memory().dir().as_ref(),
            &header,
            Blocks::All,
            false,
        )
        .unwrap();
        let entry = SealedEntry {
            end: BYTES,
            records_count: 0,
            unsettled_count: 0,
            drop_at_s: 0,
            began_at_s: 0,
            sparse_at_s: 0,
            crc: 0,
        };
        let sealed = Arc::new(Sealed {
            segment: Arc::new(segment),
            entry,
            former,
        });
        let upkeep = Upkeep {
            retired: Some(Arc::clone(&sealed)),
            ..Upkeep::default()
        };
        (upkeep, sealed)
    }

    /// A search may hold the view, the segment, or the segment as it was before it was sealed.
    #[test]
    fn a_file_that_somebody_reads_is_not_used_again() {
        let (mut upkeep, view) = retired(Weak::new());
        assert_eq!(upkeep.take_retired(BYTES), None);
        let segment = Arc::clone(&view.segment);
        drop(view);
        assert_eq!(upkeep.take_retired(BYTES), None);
        drop(segment);
        assert_eq!(upkeep.take_retired(BYTES * 2), None);
        assert_eq!(upkeep.take_retired(BYTES), Some(7));
        assert_eq!(upkeep.take_retired(BYTES), None);

        let (_, other) = retired(Weak::new());
        let (mut upkeep, view) = retired(Arc::downgrade(&other.segment));
        drop(view);
        assert_eq!(upkeep.take_retired(BYTES), None);
        drop(other);
        assert_eq!(upkeep.take_retired(BYTES), Some(7));
    }
}
