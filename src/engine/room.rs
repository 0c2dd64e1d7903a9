//! Is there room for a record, in the segment and on the disk?
//!
//! A segment's blocks are reserved in steps, ahead of the end of the log. Safety properties:
//! A. Nothing is appended behind what is reserved, and the end of a segment always fits: its footer
//!    and a last sync mark.
//! B. What open claims owe fits into what is reserved, here and in the prepared segments; what is
//!    not a claim's own end leaves it there. A segment ends only when it fits into the next ones.

use std::io;
use std::sync::Arc;

use super::core::Core;
use crate::error::is_out_of_space;
use crate::format::record::{SEAL_BYTES, SYNC_MARK_BYTES, footer_bytes};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::to_usize;
use crate::log::segment::SegmentFile;

/// Room that a record needs, and on whose account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) frame_bytes: usize,
    /// Records in the frame: one, or those of a group.
    pub(crate) records_count: usize,
    pub(crate) need: Need,
}

impl Room {
    /// The room of a frame of one record.
    pub(crate) fn of_one(frame_bytes: usize, need: Need) -> Self {
        Room {
            frame_bytes,
            records_count: 1,
            need,
        }
    }

    /// Says whether what was kept for the record that it supersedes is enough for it.
    pub(crate) fn uses_its_own(&self) -> bool {
        match self.need {
            Need::New { .. } => false,
            Need::Change {
                own_bytes,
                owed_bytes,
            } => self.frame_bytes as u64 + owed_bytes <= own_bytes,
            Need::Any => true,
        }
    }
}

/// On whose account room is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A new key: the bound on the log applies, and what open claims owe must still fit behind
    /// it, with what this one will owe.
    New { owed_bytes: u64 },
    /// What is not new: what was kept for the superseded record is for it, and what it will owe,
    /// and what the others do, must still fit behind it.
    Change { own_bytes: u64, owed_bytes: u64 },
    /// What has nobody's space to leave alone.
    Any,
}

impl Need {
    pub(crate) fn is_new(self) -> bool {
        matches!(self, Need::New { .. })
    }
}

/// The segment of which nothing more could be reserved, and why.
pub(crate) type NoBlocks = (Arc<SegmentFile>, io::Error);

impl Core {
    /// Returns the bytes that records may still take in the active segment.
    #[inline]
    pub(super) fn free_bytes(&self) -> usize {
        self.writer.room_bytes().saturating_sub(self.end_bytes(1))
    }

    /// Returns the bytes kept free for the end of the segment, if as many more unsettled records
    /// are listed there: its footer and a last sync mark.
    #[inline]
    fn end_bytes(&self, records_count: usize) -> usize {
        footer_bytes(self.tally.unsettled_count + records_count) + SYNC_MARK_BYTES
    }

    /// Says whether a frame of so many records fits into the active segment with everything that
    /// must follow it.
    pub(crate) fn fits(&self, frame_bytes: usize, records_count: usize) -> bool {
        let wanted = frame_bytes + self.end_bytes(records_count);
        self.table.has_room(records_count) && self.writer.room_bytes() >= wanted
    }

    /// Says whether a record may be appended now, and reserves blocks for it if they are missing.
    #[inline]
    pub(crate) fn has_room(&self, room: Room) -> bool {
        self.is_reserved(room) || self.allocate(room).unwrap_or(false)
    }

    #[inline]
    fn is_reserved(&self, room: Room) -> bool {
        self.fits(room.frame_bytes, room.records_count) && self.admits(room)
    }

    /// Reserves what is missing for a record, which costs about what a write costs, and says
    /// whether it may be appended now. It may not if the active segment is full.
    ///
    /// # Errors
    /// What the system says, and of which segment.
    #[cold]
    pub(crate) fn allocate(&self, room: Room) -> Result<bool, NoBlocks> {
        let ends = !self.may_fit(room);
        while let Some((segment, to)) = self.to_allocate(room, ends) {
            match segment.allocate(to, room.need.is_new()) {
                Ok(()) => {}
                Err(error) if is_out_of_space(&error) && self.goes_on_behind(room) => break,
                Err(error) => return Err((segment, error)),
            }
        }
        Ok(self.is_reserved(room))
    }

    /// Reserves what it takes to end the active segment: its footer, and in the next ones all that
    /// open claims owe, because what is reserved here goes.
    pub(crate) fn allocate_for_end(&self) -> Result<(), NoBlocks> {
        let need = Need::Change {
            own_bytes: 0,
            owed_bytes: 0,
        };
        while let Some((segment, to)) = self.to_allocate(Room::of_one(0, need), true) {
            segment
                .allocate(to, false)
                .map_err(|error| (segment, error))?;
        }
        Ok(())
    }

    /// Says whether the active segment is large enough, whatever of it is reserved.
    fn may_fit(&self, room: Room) -> bool {
        let end = to_usize(self.writer.end_offset()) + self.end_bytes(room.records_count);
        let fits = end + room.frame_bytes <= to_usize(self.writer.segment.bytes);
        fits && self.table.has_room(room.records_count)
    }

    /// Says whether what is reserved in the next segments is enough without the active one.
    fn goes_on_behind(&self, room: Room) -> bool {
        let kept = if room.uses_its_own() {
            0
        } else {
            self.kept_bytes(room.need)
        };
        self.spread_bytes(0) >= kept + room.frame_bytes as u64
    }

    /// Says whether what open claims owe still fits behind a record into what is reserved.
    #[inline]
    pub(crate) fn admits(&self, room: Room) -> bool {
        self.missing_bytes(room, false) == 0
    }

    /// Returns how many bytes have to be left free behind a record, of all that is reserved: what
    /// open claims owe, and behind a new key a step more, for what is not owed and has to be
    /// written all the same. Where not even what is owed is there, as behind a restart, a change
    /// does not wait for it.
    #[inline]
    fn kept_bytes(&self, need: Need) -> u64 {
        match need {
            Need::New { owed_bytes } => {
                self.owed_bytes + owed_bytes + u64::from(self.writer.segment.step_bytes())
            }
            Need::Change {
                own_bytes,
                owed_bytes,
            } => {
                let here = self.here_bytes();
                let is_kept = here.max(self.spread_bytes(here)) >= self.owed_bytes;
                let kept = self.owed_bytes.saturating_sub(own_bytes) + owed_bytes;
                if is_kept { kept } else { 0 }
            }
            Need::Any => 0,
        }
    }

    /// Returns what open claims may count on in the active segment. Nothing, if its table may be
    /// full before its bytes are.
    #[inline]
    fn here_bytes(&self) -> u64 {
        if self.owed_bytes > 0 && !self.table.has_room(2 * self.unsettled.len() + 2) {
            return 0;
        }
        self.free_bytes() as u64
    }

    /// Returns the bytes that are reserved in all segments if so many are in the active one, and
    /// records do not fit into the end of each.
    fn spread_bytes(&self, here: u64) -> u64 {
        let frame_bytes_max = u64::from(self.frame_bytes_max);
        let mut free = here.saturating_sub(frame_bytes_max);
        for next in &self.next {
            // Header, footer, and the end of a segment that the next frame does not fit into.
            let lost = SEGMENT_HEADER_BYTES + SEAL_BYTES + SYNC_MARK_BYTES;
            let bytes = u64::from(next.allocated()).saturating_sub(lost as u64);
            free += bytes.saturating_sub(frame_bytes_max.max(bytes / 4));
        }
        free
    }

    /// Returns what is missing, of all that is reserved, for a record and what must be left free
    /// behind it; `ends`: if it is the first of the next segment.
    #[inline]
    fn missing_bytes(&self, room: Room, ends: bool) -> u64 {
        let kept = self.kept_bytes(room.need);
        if kept == 0 && !ends {
            return 0;
        }
        let wanted = kept + room.frame_bytes as u64;
        let here = if ends { 0 } else { self.here_bytes() };
        if here >= wanted {
            return 0;
        }
        // What does not fit here goes on in the next segment, and this one's end is lost.
        wanted.saturating_sub(self.spread_bytes(here))
    }

    /// Returns the segment of which more has to be reserved for this, and up to where; `None` if it
    /// would not help.
    fn to_allocate(&self, room: Room, ends: bool) -> Option<(Arc<SegmentFile>, u32)> {
        let end = to_usize(self.writer.end_offset()) + self.end_bytes(room.records_count);
        let to = if ends {
            end as u64
        } else {
            (end + room.frame_bytes) as u64 + self.kept_bytes(room.need)
        };
        let active = &self.writer.segment;
        let to = bounded(to, active.bytes);
        if to > active.allocated() {
            return Some((Arc::clone(active), to));
        }
        let missing = self.missing_bytes(room, ends);
        if missing == 0 {
            return None;
        }
        let mut next = self.next.iter();
        let next = next.find(|next| next.allocated() < next.bytes)?;
        // A third more: of what is reserved in a next segment a quarter does not count.
        let to = u64::from(next.allocated()) + missing + missing / 3 + 1;
        Some((Arc::clone(next), bounded(to, next.bytes)))
    }
}

fn bounded(offset: u64, bytes: u32) -> u32 {
    u32::try_from(offset).unwrap_or(u32::MAX).min(bytes)
}
