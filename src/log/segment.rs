//! One segment file, for reading.

use std::io;
use std::sync::{Arc, OnceLock};

use crate::format::Malformed;
use crate::format::names::FileName;
use crate::format::record::{Frame, HEADER_BYTES, claimed_bytes, seed};
use crate::format::segment::SegmentHeader;
use crate::vfs::{Access, Dir, File, Map};

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
    map: OnceLock<Map>,
}

/// Why a record could not be read.
#[derive(Debug)]
pub(crate) enum ReadError {
    Io(io::Error),
    Malformed(Malformed),
}

impl SegmentFile {
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
            map: OnceLock::new(),
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
