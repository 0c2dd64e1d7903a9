//! The disk, behind two traits: everything the store does to files goes through here.
//!
//! Names are plain file names relative to one directory; there are no paths and no
//! subdirectories. Three implementations: `disk` (real files), [`sim`] (a simulated disk that
//! can lose power, tear writes and fail calls; also the home of in-memory stores), and read-only
//! `map`s of sealed files for both.
#![cfg_attr(
    not(feature = "testing"),
    allow(unreachable_pub, reason = "public for tests only")
)]

pub(crate) mod disk;
pub(crate) mod fork;
pub(crate) mod map;
#[cfg_attr(
    not(feature = "testing"),
    allow(dead_code, unused_imports, reason = "mostly for tests")
)]
pub mod sim;
pub(crate) mod words;

use std::fmt;
use std::io;
use std::sync::Arc;

pub use map::Map;

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// An existing file, for reading only.
    Read,
    /// An existing file, for reading and writing.
    Write,
    /// A new file, for reading and writing; fails with `AlreadyExists` if the name is taken.
    Create,
}

/// One directory: names of files, and what makes names durable.
pub trait Dir: Send + Sync + fmt::Debug {
    /// Opens a regular file; never follows a symbolic link. New files get mode 0600.
    ///
    /// # Errors
    /// `NotFound`, `AlreadyExists`, `InvalidInput` for something that is not a regular file of
    /// ours (a link, a FIFO, several hard links, a foreign owner), or what the system says.
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>>;

    /// Renames a file, replacing the target. Durable only after [`Dir::sync`].
    ///
    /// # Errors
    /// What the system says.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a name. Durable only after [`Dir::sync`].
    ///
    /// # Errors
    /// What the system says.
    fn unlink(&self, name: &str) -> io::Result<()>;

    /// Makes all creations, renames and removals so far durable.
    ///
    /// # Errors
    /// What the system says; "not supported" and "invalid argument" are tolerated.
    fn sync(&self) -> io::Result<()>;

    /// Lists all names, in no particular order, without `.` and `..`.
    ///
    /// # Errors
    /// What the system says.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Fills a buffer with bytes that nobody can guess: identities and keys of a store. A
    /// simulated disk may have its own, so that a test repeats them.
    ///
    /// # Errors
    /// What the system says.
    fn fill_random(&self, bytes: &mut [u8]) -> io::Result<()> {
        getrandom::fill(bytes).map_err(io::Error::other)
    }

    /// Takes the exclusive lock on the file `name`, creating it if `create`, and writes `note`
    /// into it (who holds it). `Ok(Err(note))` says that another opener holds it, and its note.
    ///
    /// # Errors
    /// What the system says.
    fn lock(&self, name: &str, create: bool, note: &str) -> io::Result<LockAttempt>;

    /// Opens a file whose lock is taken again and again, making it for `Create` if it is missing.
    /// Takes nothing yet. The default is a directory that has no such files: no store in it can be
    /// open in shared mode, or for reading only.
    ///
    /// # Errors
    /// `NotFound`, or what the system says.
    fn lock_file(&self, name: &str, access: Access) -> io::Result<Arc<dyn LockFile>> {
        let _ = (name, access);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The answer to [`Dir::lock`]: the held lock, or the note of whoever holds it.
pub type LockAttempt = std::result::Result<Box<dyn Lock>, String>;

/// A held lock; released when dropped (and by the kernel when the process dies).
pub trait Lock: Send + Sync + fmt::Debug {}

/// How a [`LockFile`] is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Together with others that share it.
    Shared,
    /// Alone.
    Exclusive,
}

/// A file whose lock is taken and let go again and again. Two openings of one file are two who
/// compete; all that one opening holds is released when it is dropped (and by the kernel when the
/// process dies).
pub trait LockFile: Send + Sync + fmt::Debug {
    /// Takes the lock, or changes how it is held, if nobody is in the way; `false`: somebody is,
    /// and nothing is held any more.
    ///
    /// # Errors
    /// What the system says.
    fn try_lock(&self, mode: LockMode) -> io::Result<bool>;

    /// Lets the lock go.
    ///
    /// # Errors
    /// What the system says.
    fn unlock(&self) -> io::Result<()>;

    /// Says whether the file still has its name, in a directory that is still in its place. Asked
    /// with the lock held: otherwise others have locked something else.
    ///
    /// # Errors
    /// What the system says.
    fn is_in_place(&self) -> io::Result<bool>;
}

/// One open regular file.
pub trait File: Send + Sync + fmt::Debug {
    /// Reads up to `buf.len()` bytes at `offset`; short only at the end of the file.
    ///
    /// # Errors
    /// What the system says.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all of `buf` at `offset`. After an error a prefix may have been written.
    ///
    /// # Errors
    /// What the system says.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;

    /// Sets the size without reserving blocks; new bytes read as zeros.
    ///
    /// # Errors
    /// What the system says.
    fn set_len(&self, bytes: u64) -> io::Result<()>;

    /// Reserves blocks for a range where the file system can, so that later writes inside it do
    /// not run out of space. Neither the size nor what is read changes. After an error a part of
    /// the range may be reserved.
    ///
    /// # Errors
    /// What the system says.
    fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()>;

    /// Returns how many bytes have blocks, as far as the system tells: written or reserved.
    ///
    /// # Errors
    /// What the system says.
    fn allocated(&self) -> io::Result<u64>;

    /// Returns the free space of the file system; the largest number if it does not count.
    ///
    /// # Errors
    /// What the system says.
    fn free_space(&self) -> io::Result<u64>;

    /// Makes everything written so far, and the size, durable: a device flush.
    ///
    /// # Errors
    /// What the system says. After an error nothing may be assumed of unsynced bytes.
    fn sync(&self) -> io::Result<()>;

    /// Says whether the device itself holds these bytes here. After a failed flush the cache may
    /// show what no later flush will write, and on some file systems a block of that kind takes no
    /// later bytes either; so what is cached of the file is forgotten on the way. The file was just
    /// synced. `None`: the system gives no way to look around its cache.
    ///
    /// # Errors
    /// What the system says.
    fn holds(&self, bytes: &[u8], offset: u64) -> io::Result<Option<bool>>;

    /// Returns the size in bytes.
    ///
    /// # Errors
    /// What the system says.
    fn size(&self) -> io::Result<u64>;

    /// Maps the whole file for reading. Only for files that nobody writes any more.
    ///
    /// # Errors
    /// What the system says; `InvalidData` for an empty file.
    fn map(&self) -> io::Result<Map>;

    /// Tells the system that single places will be read, not what lies behind them. Only a hint.
    fn advise_random(&self) {}
}

/// Reads until the buffer is full or the file ends: goes on after short reads and EINTR.
fn read_fully(
    mut buf: &mut [u8],
    mut offset: u64,
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
) -> io::Result<usize> {
    let mut total = 0;
    while !buf.is_empty() {
        match read(buf, offset) {
            Ok(0) => break,
            Ok(got) => {
                total += got;
                offset += got as u64;
                buf = buf.get_mut(got..).unwrap_or_default();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}

/// Writes the whole buffer: goes on after short writes and EINTR.
fn write_fully(
    mut buf: &[u8],
    mut offset: u64,
    mut write: impl FnMut(&[u8], u64) -> io::Result<usize>,
) -> io::Result<()> {
    while !buf.is_empty() {
        match write(buf, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                offset += written as u64;
                buf = buf.get(written..).unwrap_or_default();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads the whole file, refusing one larger than `bytes_max`.
pub(crate) fn read_all(file: &dyn File, bytes_max: u64) -> io::Result<Vec<u8>> {
    let size = file.size()?;
    let Some(len) = usize::try_from(size).ok().filter(|_| size <= bytes_max) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("file too large: bytes={size} bytes_max={bytes_max}"),
        ));
    };
    let mut bytes = vec![0; len];
    let got = file.read_at(&mut bytes, 0)?;
    bytes.truncate(got);
    Ok(bytes)
}

/// Says whether the device could not give the bytes of one place: others may be readable.
pub(crate) fn is_media_error(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| [Errno::IO, Errno::NODATA, Errno::BADMSG].contains(&errno))
}

/// Refuses what is not a plain file name: anything that could lead out of the directory.
fn check_name(name: &str) -> io::Result<()> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a plain file name",
        ));
    }
    Ok(())
}

#[cfg(test)]
impl Map {
    /// Wraps bytes of a test.
    pub(crate) fn from_vec(bytes: Vec<u8>) -> Map {
        Map::of_bytes(Arc::new(bytes)).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::sim::SimDisk;
    use super::*;

    #[test]
    fn a_file_over_the_bound_is_not_read() {
        let disk = SimDisk::memory();
        disk.write_file("f", *b"0123456789");
        let file = disk.dir().open("f", Access::Read).unwrap();
        assert_eq!(read_all(file.as_ref(), 10).unwrap(), b"0123456789");
        let refused = read_all(file.as_ref(), 9).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
