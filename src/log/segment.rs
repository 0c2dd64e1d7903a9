//! One segment file, for reading, and how much of it may be written.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use crate::error::is_out_of_space;
use crate::format::Malformed;
use crate::format::names::FileName;
use crate::format::record::{Frame, HEADER_BYTES, claimed_bytes, seed};
use crate::format::segment::SegmentHeader;
use crate::vfs::{Access, Dir, File, Map};

/// Blocks are reserved in steps of this part of a segment, and of [`STEP_BYTES_MIN`] at least.
const STEPS_COUNT: u32 = 64;
const STEP_BYTES_MIN: u32 = 4096;

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
        // Relaxed: it only grows while somebody appends, and says nothing of other memory.
        self.allocated.load(Ordering::Relaxed)
    }

    /// Forgets what is reserved behind this offset. Nobody appends yet.
    pub(crate) fn forget_allocated(&self, offset: u32) {
        self.allocated.store(offset, Ordering::Relaxed);
    }

    /// Reserves blocks up to this offset, and to the end of the step that it lies in if the disk
    /// has room for that. Blocks that are reserved already, before a restart, stay what they are.
    ///
    /// # Errors
    /// What the system says; out of space, for one.
    pub(crate) fn allocate(&self, wanted: u32) -> io::Result<()> {
        let file = self.file()?;
        let from = self.allocated();
        let reserve = |to: u32| {
            let to = to.min(self.bytes);
            if to > from {
                file.allocate(u64::from(from), u64::from(to - from))?;
                self.allocated.store(to, Ordering::Relaxed);
            }
            Ok(())
        };
        let step = (self.bytes / STEPS_COUNT).max(STEP_BYTES_MIN);
        match reserve(wanted.next_multiple_of(step)) {
            Err(error) if is_out_of_space(&error) => {
                reserve(wanted.next_multiple_of(STEP_BYTES_MIN))
            }
            reserved => reserved,
        }
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
        let segment = SegmentFile::new(&header, disk.dir().open("s", Access::Create).unwrap());
        segment.file().unwrap().set_len(u64::from(BYTES)).unwrap();
        segment.forget_allocated(0);
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
            segment.allocate(wanted).unwrap();
            assert_eq!(segment.allocated(), allocated);
            assert_eq!(disk.used_bytes(), u64::from(allocated));
        }
        segment.file().unwrap().write_at(&[1], 0).unwrap();
        segment.allocate(1).unwrap();
        assert_eq!(segment.allocated(), BYTES);
    }

    /// Behind a restart what was reserved is found again on a full disk, and no less than that.
    #[test]
    fn a_full_disk_gives_what_is_wanted_and_what_was_reserved() {
        let disk = SimDisk::memory();
        disk.set_free_bytes(Some(9000));
        let segment = segment(&disk);
        segment.allocate(5000).unwrap();
        assert_eq!(segment.allocated(), 8192);
        for wanted in [4097, 8000, 8192] {
            segment.forget_allocated(100);
            segment.allocate(wanted).unwrap();
            assert_eq!(segment.allocated(), 8192);
        }
        let error = segment.allocate(16_000).unwrap_err();
        assert!(is_out_of_space(&error), "{error}");
        assert_eq!(segment.allocated(), 8192);
    }
}
