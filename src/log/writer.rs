//! Appends to the active segment. Lives under the append lock.
//!
//! The log image is the file up to `written` and the buffer behind it. A record is complete in
//! the image before anything refers to it. The buffer also keeps the newest part of what is
//! written, because what is asked for again is mostly what has just come. When a write fails,
//! everything behind `written` is taken back and its bytes are neutralised, so that no junk lies
//! between valid records.

use std::io;
use std::sync::Arc;

use crate::format::record::{Frame, Record, SyncMark, begin_group, end_group, seed};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{Malformed, to_u32, to_usize};
use crate::log::segment::{ReadError, SegmentFile};
use crate::position::Position;

/// The end of the log.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) segment: Arc<SegmentFile>,
    /// Everything below is in the file.
    written: u32,
    /// The bytes from `kept_from` to the end of the log.
    image: Vec<u8>,
    kept_from: u32,
    /// Offset of the newest frame; 0 before this writer's first.
    last: u32,
    /// Where the group begins that is being appended.
    group: Option<u32>,
}

impl Writer {
    /// Continues a segment at this offset; [`SEGMENT_HEADER_BYTES`] for an empty one.
    pub(crate) fn new(segment: Arc<SegmentFile>, end: u32) -> Self {
        debug_assert!(end >= to_u32(SEGMENT_HEADER_BYTES));
        // Single records are looked up, and in a shared store the place behind the end.
        if let Ok(file) = segment.file() {
            file.advise_random();
        }
        Writer {
            segment,
            written: end,
            image: Vec::new(),
            kept_from: end,
            last: 0,
            group: None,
        }
    }

    /// Returns the offset of the newest frame that this writer appended; 0 for none.
    pub(crate) fn last_offset(&self) -> u32 {
        self.last
    }

    pub(crate) fn end_offset(&self) -> u32 {
        self.kept_from + to_u32(self.image.len())
    }

    pub(crate) fn end(&self) -> Position {
        Position::new(self.segment.id, self.end_offset())
    }

    pub(crate) fn written(&self) -> Position {
        Position::new(self.segment.id, self.written)
    }

    pub(crate) fn has_unwritten(&self) -> bool {
        self.unwritten_bytes() > 0
    }

    pub(crate) fn unwritten_bytes(&self) -> usize {
        to_usize(self.end_offset() - self.written)
    }

    /// Returns the place in the image behind everything that is in the file.
    fn written_at(&self) -> usize {
        to_usize(self.written - self.kept_from)
    }

    /// Returns the bytes left in what is reserved of the segment.
    pub(crate) fn room_bytes(&self) -> usize {
        to_usize(self.segment.allocated().saturating_sub(self.end_offset()))
    }

    /// Appends a record to the image and returns its offset. The caller has checked the room.
    pub(crate) fn append(&mut self, record: &Record<'_>) -> u32 {
        self.append_with(|image, seed| record.encode(image, seed))
    }

    pub(crate) fn append_mark(&mut self, mark: SyncMark) -> u32 {
        self.append_with(|image, seed| mark.encode(image, seed))
    }

    /// Appends whatever `encode` writes: one frame, given its checksum seed.
    pub(crate) fn append_with(&mut self, encode: impl FnOnce(&mut Vec<u8>, u32)) -> u32 {
        let offset = self.end_offset();
        if self.group.is_none() {
            self.last = offset;
        }
        encode(&mut self.image, seed(self.segment.nonce, offset));
        offset
    }

    /// Begins a group: what is appended until its end is valid together or not at all.
    pub(crate) fn begin_group(&mut self) {
        self.last = self.end_offset();
        self.group = Some(self.last);
        begin_group(&mut self.image);
    }

    pub(crate) fn end_group(&mut self) {
        if let Some(offset) = self.group.take() {
            let start = to_usize(offset - self.kept_from);
            let seed = seed(self.segment.nonce, offset);
            end_group(&mut self.image, start, seed);
        }
    }

    /// Hands everything appended so far to the operating system.
    ///
    /// # Errors
    /// What the system says; nothing of the image may be relied upon then: see
    /// [`Writer::take_back`].
    pub(crate) fn write_out(&mut self) -> io::Result<()> {
        let bytes = self.image.get(self.written_at()..).unwrap_or_default();
        if bytes.is_empty() {
            return Ok(());
        }
        let file = self.segment.file()?;
        file.write_at(bytes, u64::from(self.written))?;
        self.written = self.end_offset();
        self.forget_oldest();
        Ok(())
    }

    /// Takes over whole frames that another process has written at the end of this log; the last of
    /// them begins at `last`. Nothing of this writer's own waits to be written.
    pub(crate) fn absorb(&mut self, frames: &[u8], last: u32) {
        debug_assert!(!self.has_unwritten());
        self.image.extend_from_slice(frames);
        self.written = self.end_offset();
        self.last = last;
        self.forget_oldest();
    }

    fn forget_oldest(&mut self) {
        let kept = kept_bytes(self.segment.bytes);
        if self.image.len() >= 2 * kept {
            self.image.drain(..self.image.len() - kept);
            self.kept_from = self.written - to_u32(kept);
        }
    }

    /// Gives up everything that was not written out, and overwrites with zeros what a failed
    /// write may have left of it: durably, because whole records may be among that, and the system
    /// may have written them to the device before the zeros came.
    ///
    /// # Errors
    /// What the system says: junk may be left in the file, nothing may be appended any more.
    pub(crate) fn take_back(&mut self) -> io::Result<()> {
        let mut zeros = vec![0; self.unwritten_bytes()];
        self.image.truncate(self.written_at());
        let at = u64::from(self.written);
        let file = self.segment.file()?;
        if let Err(error) = file.write_at(&zeros, at) {
            // On a full disk zeros do not fit into a hole either, but then nothing else did.
            let got = file.read_at(&mut zeros, at)?;
            let read = zeros.get(..got).unwrap_or_default();
            if read.iter().any(|b| *b != 0) {
                return Err(error);
            }
        }
        file.sync()
    }

    pub(crate) fn is_in_memory(&self, offset: u32) -> bool {
        offset >= self.kept_from
    }

    /// Reads a record of the active segment that is still in memory; `None` if it is in the file.
    pub(crate) fn read_image<T>(
        &self,
        offset: u32,
        take: impl FnOnce(&Frame<'_>) -> Result<T, Malformed>,
    ) -> Option<Result<T, ReadError>> {
        let at = to_usize(offset.checked_sub(self.kept_from)?);
        let bytes = self.image.get(at..).unwrap_or_default();
        let seed = seed(self.segment.nonce, offset);
        let frame = Frame::verify(bytes, seed);
        Some(
            frame
                .and_then(|frame| take(&frame))
                .map_err(ReadError::Malformed),
        )
    }
}

/// Returns how much of what is written stays in memory at least: 1 MiB, less of a small segment.
fn kept_bytes(segment_bytes: u32) -> usize {
    to_usize(segment_bytes / 32).min(1 << 20)
}
