//! Read-only views of whole files.
//!
//! # Conditions
//! A memory map is a borrow of the file that the compiler cannot check. It is sound only while
//! all of these hold; `docs/guarantees.md` repeats them for the operator.
//!
//! 1. **Sealed only.** A file is mapped only after its last write. The store never writes to,
//!    truncates or extends a sealed file; it replaces files by renaming new ones over the name,
//!    which leaves the mapped inode untouched.
//! 2. **Fixed length.** The length is taken once, when the map is made. Nobody may read beyond
//!    it, and because of (1) the file never becomes shorter than it.
//! 3. **Nobody else.** Files are regular, ours, have one name and mode 0600, and the store's
//!    directory is locked: no other process of good will writes to them. Whoever edits a live
//!    store by force breaks this condition.
//! 4. **Bus errors.** A page that the device cannot read raises SIGBUS and ends the process.
//!    This is accepted: it is process death, which the log survives, never a wrong answer.
//!    Checksums are verified by the readers, not here.
#![expect(unsafe_code, reason = "memory maps, conditions 1 to 4 above")]

use std::fmt;
use std::fs;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

/// A read-only view of a whole sealed file: a memory map, or shared bytes of a simulated disk.
pub struct Map(Source);

enum Source {
    Mapped(memmap2::Mmap),
    Shared(Arc<Vec<u8>>),
}

impl Map {
    /// Maps a sealed file. The caller upholds condition 1; `DiskDir` has checked condition 3.
    pub(super) fn of_file(file: &fs::File) -> io::Result<Map> {
        if file.metadata()?.len() == 0 {
            return Err(empty_file());
        }
        // SAFETY: memmap2 asks that the file is not modified while mapped. Only sealed files
        // come here, `File::map` says so (1); the length is taken inside this call and the file
        // never shrinks (2); no other process writes to it (3); an unreadable page ends the
        // process instead of continuing with wrong bytes (4).
        let mapped = unsafe { memmap2::Mmap::map(file) }?;
        Ok(Map(Source::Mapped(mapped)))
    }

    /// Wraps the bytes of a simulated file, which are copied when somebody writes to the file.
    pub(super) fn of_bytes(bytes: Arc<Vec<u8>>) -> io::Result<Map> {
        if bytes.is_empty() {
            Err(empty_file())
        } else {
            Ok(Map(Source::Shared(bytes)))
        }
    }

    /// Tells the kernel not to read ahead. Only a hint: failures are of no consequence.
    pub fn advise_random(&self) {
        if let Source::Mapped(mapped) = &self.0 {
            mapped.advise(memmap2::Advice::Random).unwrap_or_default();
        }
    }
}

impl Map {
    /// Tells the kernel that all of it will be read. Only a hint, too.
    pub(crate) fn advise_will_need(&self) {
        if let Source::Mapped(mapped) = &self.0 {
            mapped.advise(memmap2::Advice::WillNeed).unwrap_or_default();
        }
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Source::Mapped(mapped) => mapped,
            Source::Shared(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Map")
            .field("bytes", &self.len())
            .finish_non_exhaustive()
    }
}

fn empty_file() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "empty file cannot be mapped")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_map_shows_the_bytes_of_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"sealed").unwrap();
        let map = Map::of_file(&file).unwrap();
        map.advise_random();
        assert_eq!(&*map, b"sealed");
        assert_eq!(format!("{map:?}"), "Map { bytes: 6, .. }");
    }

    #[test]
    fn an_empty_file_is_not_mapped() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(
            Map::of_file(&file).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        let shared = Map::of_bytes(Arc::default());
        assert_eq!(shared.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
