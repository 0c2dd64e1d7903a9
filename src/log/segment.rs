//! One segment file, for reading, and how much of it may be written.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use crate::format::Malformed;
use crate::format::names::FileName;
use crate::format::record::{Frame, HEADER_BYTES, claimed_bytes, seed};
use crate::format::segment::SegmentHeader;
use crate::options::SEGMENT_BYTES_FIRST;
use crate::vfs::{Access, Dir, File, Map};

/// Blocks are reserved in steps of this part of a segment, and of [`STEP_BYTES_MIN`] at least.
const STEPS_COUNT: u32 = 64;
const STEP_BYTES_MIN: u32 = 4096;

/// How much of a file's blocks may be the file system's own: where the others are.
const OWN_BLOCKS_MAX: u32 = 16 * 1024;

/// Most records fit in the first read: a header, a state, a key and a short outcome.
const READ_GUESS_BYTES: usize = 512;

/// One segment of the log. Sealed and frozen ones are mapped; the active one is read by calls.
#[derive(Debug)]
pub(crate) struct SegmentFile {
    pub(crate) id: u64,
    pub(crate) nonce: u32,
    pub(crate) bytes: u32,
    /// The open file; a sealed segment needs only its map.
    file: Option<Arc<dyn File>>,
    /// Old bytes of another life may lie behind the records.
    pub(crate) recycled: bool,
    /// Blocks are reserved up to here at least, and nothing is appended behind it.
    allocated: AtomicU32,
    map: OnceLock<Map>,
}

/// Why a record could not be read.
#[derive(Debug)]
pub(crate) enum ReadError {
    Io(io::Error),
    Malformed(Malformed),
}

impl SegmentFile {
    /// A segment whose blocks are all reserved, or that this opener does not write.
    pub(crate) fn new(header: &SegmentHeader, file: Arc<dyn File>) -> Self {
        let SegmentHeader {
            id,
            nonce,
            bytes,
            recycled,
            ..
        } = *header;
        SegmentFile {
            id,
            nonce,
            bytes,
            file: Some(file),
            recycled,
            allocated: AtomicU32::new(bytes),
            map: OnceLock::new(),
        }
    }

    /// Returns the offset up to which records may be appended.
    pub(crate) fn allocated(&self) -> u32 {
        // Relaxed: it says nothing of other memory.
        self.allocated.load(Ordering::Relaxed)
    }

    /// Notes that blocks are reserved up to this offset. Called under the append lock, or before
    /// anybody appends.
    pub(crate) fn set_allocated(&self, offset: u32) {
        self.allocated.store(offset, Ordering::Relaxed);
    }

    /// Returns how many bytes are reserved at a time, and kept ahead of what is appended.
    pub(crate) fn step_bytes(&self) -> u32 {
        if self.bytes <= SEGMENT_BYTES_FIRST {
            // Reserved as a whole.
            return 0;
        }
        (self.bytes / STEPS_COUNT).max(STEP_BYTES_MIN)
    }

    /// Takes what a former opener has reserved, and at least this much, for reserved. Nobody
    /// appends yet.
    pub(crate) fn find_allocated(&self, end: u32) -> io::Result<()> {
        // Steps follow each other, so what has blocks is the front of the file. The system counts
        // its own blocks for the file among them.
        let blocks = self.file()?.allocated()?;
        let front = if blocks >= u64::from(self.bytes) {
            self.bytes
        } else {
            u32::try_from(blocks)
                .unwrap_or(0)
                .saturating_sub(OWN_BLOCKS_MAX)
        };
        self.set_allocated(front.max(end));
        Ok(())
    }

    /// Reserves blocks up to this offset: to the end of the step that it lies in where the disk has
    /// more than that. `keeps_free`: on a disk with little space nothing is reserved, so that there
    /// is some for indexes and manifests.
    ///
    /// # Errors
    /// What the system says; out of space, for one.
    pub(crate) fn allocate(&self, wanted: u32, keeps_free: bool) -> io::Result<()> {
        let file = self.file()?;
        let from = self.allocated();
        let is_tight = file.free_space()? < u64::from(self.bytes / 2);
        if is_tight && keeps_free {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let unit = if is_tight { 0 } else { self.step_bytes() };
        let to = wanted
            .next_multiple_of(unit.max(STEP_BYTES_MIN))
            .min(self.bytes);
        if to > from {
            file.allocate(u64::from(from), u64::from(to - from))?;
            self.set_allocated(to);
        }
        Ok(())
    }

    pub(crate) fn name(&self) -> String {
        FileName::Segment(self.id).to_string()
    }

    /// Returns the open file of a segment that is not sealed.
    pub(crate) fn file(&self) -> io::Result<&Arc<dyn File>> {
        let closed = || io::Error::other("the file of a sealed segment is not kept open");
        self.file.as_ref().ok_or_else(closed)
    }

    /// Returns the same segment with a map of its own and without an open file.
    pub(crate) fn sealed(&self, dir: &dyn Dir) -> io::Result<SegmentFile> {
        let map = dir.open(&self.name(), Access::Read)?.map()?;
        map.advise_random();
        Ok(SegmentFile {
            id: self.id,
            nonce: self.nonce,
            bytes: self.bytes,
            file: None,
            recycled: self.recycled,
            allocated: AtomicU32::new(self.bytes),
            map: OnceLock::from(map),
        })
    }

    /// Maps the file. From here on nobody writes to it.
    pub(crate) fn freeze(&self) -> io::Result<&Map> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        let map = self.file()?.map()?;
        map.advise_random();
        Ok(self.map.get_or_init(|| map))
    }

    /// Reads as many of these bytes as there are.
    pub(crate) fn bytes_at(&self, offset: u32, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let got = self.file()?.read_at(&mut bytes, u64::from(offset))?;
        bytes.truncate(got);
        Ok(bytes)
    }

    /// Reads and verifies the frame at this offset, and hands it to `take`.
    pub(crate) fn read<T>(
        &self,
        offset: u32,
        take: impl FnOnce(&Frame<'_>) -> Result<T, Malformed>,
    ) -> Result<T, ReadError> {
        let seed = seed(self.nonce, offset);
        let malformed = ReadError::Malformed;
        if let Some(map) = self.map.get() {
            let at = usize::try_from(offset).unwrap_or(usize::MAX);
            let bytes = map.get(at..).unwrap_or_default();
            return Frame::verify(bytes, seed)
                .and_then(|frame| take(&frame))
                .map_err(malformed);
        }
        let mut short = [0; READ_GUESS_BYTES];
        let file = self.file().map_err(ReadError::Io)?;
        let got = file
            .read_at(&mut short, u64::from(offset))
            .map_err(ReadError::Io)?;
        let bytes = short.get(..got).unwrap_or_default();
        let len = bytes.get(..HEADER_BYTES).and_then(claimed_bytes);
        let len = len.ok_or(malformed(Malformed("no frame starts here")))?;
        if len <= got {
            return Frame::verify(bytes, seed)
                .and_then(|frame| take(&frame))
                .map_err(malformed);
        }
        // At most 512 KiB: a frame's length is kept in 16 bits.
        let mut long = vec![0; len];
        let got = file
            .read_at(&mut long, u64::from(offset))
            .map_err(ReadError::Io)?;
        let bytes = long.get(..got).unwrap_or_default();
        Frame::verify(bytes, seed)
            .and_then(|frame| take(&frame))
            .map_err(malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::is_out_of_space;
    use crate::vfs::sim::SimDisk;

    const BYTES: u32 = 1 << 20;
    const STEP: u32 = BYTES / STEPS_COUNT;

    fn segment(disk: &SimDisk) -> SegmentFile {
        let header = SegmentHeader {
            store: [1; 16],
            id: 7,
            nonce: 1,
            bytes: BYTES,
            hash_key_id: 1,
            recycled: false,
        };
        let dir = disk.dir();
        let create = |_| dir.open("s", Access::Create);
        let file = dir.open("s", Access::Write).or_else(create).unwrap();
        file.set_len(u64::from(BYTES)).unwrap();
        let segment = SegmentFile::new(&header, file);
        segment.set_allocated(0);
        segment
    }

    #[test]
    fn blocks_are_reserved_in_steps_up_to_the_end() {
        let disk = SimDisk::memory();
        let segment = segment(&disk);
        for (wanted, allocated) in [
            (1, STEP),
            (STEP, STEP),
            (STEP + 1, 2 * STEP),
            (BYTES, BYTES),
        ] {
            segment.allocate(wanted, true).unwrap();
            assert_eq!(segment.allocated(), allocated);
            assert_eq!(disk.used_bytes(), u64::from(allocated));
        }
    }

    #[test]
    fn a_disk_with_little_space_gives_what_is_wanted_and_only_to_what_is_owed() {
        let disk = SimDisk::memory();
        let segment = segment(&disk);
        disk.set_free_bytes(Some(9000));
        let error = segment.allocate(5000, true).unwrap_err();
        assert!(is_out_of_space(&error), "{error}");
        assert_eq!(disk.used_bytes(), 0);
        segment.allocate(5000, false).unwrap();
        assert_eq!((segment.allocated(), disk.used_bytes()), (8192, 8192));
        let error = segment.allocate(16_000, false).unwrap_err();
        assert!(is_out_of_space(&error), "{error}");
        assert_eq!(segment.allocated(), 8192);
    }

    /// Behind a restart, on a full disk and where reserving once more takes space for a moment
    /// (XFS).
    #[test]
    fn what_was_reserved_before_a_restart_is_known() {
        let disk = SimDisk::memory();
        for (wanted, found) in [
            (0, 100),
            (10 * STEP, 10 * STEP - OWN_BLOCKS_MAX),
            (BYTES, BYTES),
        ] {
            let before = segment(&disk);
            before.allocate(wanted, true).unwrap();
            let again = segment(&disk);
            again.find_allocated(100).unwrap();
            assert_eq!(again.allocated(), found);
        }
    }
}
