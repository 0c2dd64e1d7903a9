//! Real files, through one directory descriptor.
//!
//! # Safety properties
//! A. Every name is resolved relative to the directory descriptor and never through a symbolic
//!    link, so that moving or replacing the directory's path cannot redirect a write.
//! B. Only regular files that are ours, with one name, are opened: nothing planted in a hostile
//!    directory can make the store block, or write to a file elsewhere.
//! C. The lock is held on the file that has the lock's name, not on one that somebody removed; and
//!    not in a directory that another took the place of while the lock was waited for.

#[cfg(not(unix))]
compile_error!("idemlog supports Unix systems only");

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::{
    Access, Dir, File, Lock, LockAttempt, LockFile, LockMode, Map, check_name, read_fully,
    write_fully,
};

/// A note longer than this is cut when it is read: anything may be in the file.
const NOTE_BYTES_MAX: usize = 256;

/// How often [`Dir::lock`] starts again because the lock's file was replaced meanwhile.
const LOCK_TRIES_MAX: usize = 8;

/// A directory of real files.
pub(crate) struct DiskDir {
    fd: OwnedFd,
    /// Where it was when it was opened.
    path: PathBuf,
}

/// What the store has to know about the file system it lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(target_os = "linux"),
    expect(dead_code, reason = "only Linux can tell")
)]
pub(crate) enum FileSystem {
    /// Nothing special, or unknown.
    Local,
    /// Writes inside a file take new blocks (btrfs, ZFS, bcachefs): reserved space is no promise.
    CopyOnWrite,
    /// A network file system, by name: locks and flushes are not what they seem.
    Network(&'static str),
}

/// Exchanges two directories in one step. The inner result says whether that is durable.
#[cfg(any(target_os = "linux", target_vendor = "apple"))]
pub(crate) fn exchange(one: &Path, other: &Path) -> io::Result<io::Result<()>> {
    use rustix::fs::{CWD, RenameFlags};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = |path: &Path| -> io::Result<OwnedFd> {
        let dir = retry(|| rustix::fs::open(path, flags, Mode::empty()))?;
        Ok(retry(|| {
            rustix::fs::openat(&dir, "..", flags, Mode::empty())
        })?)
    };
    let parents = [parent(one)?, parent(other)?];
    retry(|| rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE))?;
    Ok(parents.iter().try_for_each(sync_dir))
}

/// Says that this system cannot do it.
#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
pub(crate) fn exchange(_one: &Path, _other: &Path) -> io::Result<io::Result<()>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Says whether a path, which need not exist, is a directory or lies in it.
pub(crate) fn lies_in(path: &Path, dir: &Path) -> io::Result<bool> {
    let dir = fs::canonicalize(dir)?;
    let found = match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty());
            fs::canonicalize(parent.unwrap_or(Path::new(".")))?
        }
        found => found?,
    };
    Ok(found.starts_with(dir))
}

impl DiskDir {
    /// Opens the directory `path`, making it (mode 0700, one level) if `create`.
    ///
    /// With `create` the parent is synced even if the directory exists: whoever made it may have
    /// died before doing so.
    pub(crate) fn open(path: &Path, create: bool) -> io::Result<DiskDir> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || retry(|| rustix::fs::open(path, flags, Mode::empty()));
        let mut made = false;
        let fd = match open() {
            Err(Errno::NOENT) if create => {
                match retry(|| rustix::fs::mkdir(path, Mode::RWXU)) {
                    Ok(()) => made = true,
                    Err(Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
                open()?
            }
            other => other?,
        };
        if create {
            match retry(|| rustix::fs::openat(&fd, "..", flags, Mode::empty())) {
                Ok(parent) => sync_dir(&parent)?,
                Err(Errno::ACCESS) if !made => {}
                Err(error) => return Err(error.into()),
            }
        }
        let path = std::path::absolute(path)?;
        Ok(DiskDir { fd, path })
    }

    /// Returns the kind of file system that the directory lies on.
    #[cfg(target_os = "linux")]
    pub(crate) fn filesystem(&self) -> io::Result<FileSystem> {
        let stat = retry(|| rustix::fs::fstatfs(&self.fd))?;
        // The field's width and sign differ by architecture; the magic numbers have 32 bits.
        Ok(classify(stat.f_type as u64 & 0xffff_ffff))
    }

    /// Returns `Local`: other systems have no portable way to tell.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn filesystem(&self) -> io::Result<FileSystem> {
        Ok(FileSystem::Local)
    }

    /// Opens and checks: upholds A and B.
    fn open_file(&self, name: &str, access: Access) -> io::Result<fs::File> {
        check_name(name)?;
        // NONBLOCK: opening a FIFO must not wait for its other end. No effect on regular files.
        let common = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let flags = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::RDWR,
            Access::Create => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
        };
        let mode = Mode::RUSR | Mode::WUSR;
        let fd = retry(|| rustix::fs::openat(&self.fd, name, common | flags, mode)).map_err(
            |errno| match errno {
                Errno::LOOP => refused("symbolic link"),
                // A directory opened for writing; a socket, or a device without a driver.
                Errno::ISDIR | Errno::NXIO => refused("not a regular file"),
                other => other.into(),
            },
        )?;
        if access == Access::Create {
            retry(|| rustix::fs::fchmod(&fd, mode))?;
        }
        let file = fs::File::from(fd);
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(refused("not a regular file"));
        }
        if metadata.nlink() > 1 {
            return Err(refused("several hard links"));
        }
        if metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(refused("foreign owner"));
        }
        Ok(file)
    }

    /// Says whether another directory has taken this one's place.
    fn is_replaced(&self) -> io::Result<bool> {
        let own = retry(|| rustix::fs::fstat(&self.fd))?;
        let named = retry(|| rustix::fs::stat(&self.path));
        Ok(named.is_ok_and(|named| (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino)))
    }

    fn clone_handle(&self) -> io::Result<DiskDir> {
        Ok(DiskDir {
            fd: self.fd.try_clone()?,
            path: self.path.clone(),
        })
    }

    /// Opens the lock's file, making it for `Create` if it is missing.
    fn open_lock(&self, name: &str, access: Access) -> io::Result<fs::File> {
        if access != Access::Create {
            return self.open_file(name, access);
        }
        match self.open_file(name, Access::Write) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.open_file(name, access),
            other => other,
        }
    }

    /// Tells whether `file` is what `name` names at this moment.
    fn is_named(&self, name: &str, file: &fs::File) -> io::Result<bool> {
        let held = rustix::fs::fstat(file)?;
        match retry(|| rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)) {
            Ok(named) => Ok(named.st_dev == held.st_dev && named.st_ino == held.st_ino),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl Dir for DiskDir {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(DiskFile(self.open_file(name, access)?)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        check_name(from)?;
        check_name(to)?;
        Ok(retry(|| {
            rustix::fs::renameat(&self.fd, from, &self.fd, to)
        })?)
    }

    fn unlink(&self, name: &str) -> io::Result<()> {
        check_name(name)?;
        Ok(retry(|| {
            rustix::fs::unlinkat(&self.fd, name, AtFlags::empty())
        })?)
    }

    fn sync(&self) -> io::Result<()> {
        sync_dir(&self.fd)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            let entry = entry?;
            // A name that is not UTF-8 is not one of ours: it is reported, never opened.
            let name = entry.file_name().to_string_lossy();
            if name != "." && name != ".." {
                names.push(name.into_owned());
            }
        }
        Ok(names)
    }

    fn lock(&self, name: &str, create: bool, note: &str) -> io::Result<LockAttempt> {
        let access = if create {
            Access::Create
        } else {
            Access::Write
        };
        for _ in 0..LOCK_TRIES_MAX {
            let file = match self.open_lock(name, access) {
                // Somebody else made it between our two attempts.
                Err(error) if create && error.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other?,
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(fs::TryLockError::WouldBlock) => return Ok(Err(read_note(&file)?)),
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
            // Upholds C.
            if self.is_replaced()? {
                return Err(io::Error::other(
                    "the directory was replaced by another meanwhile; open it again",
                ));
            }
            if self.is_named(name, &file)? {
                write_note(&file, note)?;
                return Ok(Ok(Box::new(DiskLock(file))));
            }
        }
        Err(io::Error::other("lock file keeps being replaced"))
    }

    fn lock_file(&self, name: &str, access: Access) -> io::Result<Arc<dyn LockFile>> {
        for _ in 0..LOCK_TRIES_MAX {
            match self.open_lock(name, access) {
                // Somebody else made it between our two attempts.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                opened => {
                    return Ok(Arc::new(DiskLockFile {
                        file: opened?,
                        name: name.to_owned(),
                        dir: self.clone_handle()?,
                    }));
                }
            }
        }
        Err(io::Error::other("lock file keeps being replaced"))
    }
}

impl fmt::Debug for DiskDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DiskDir").field(&self.fd).finish()
    }
}

/// One open file.
#[derive(Debug)]
struct DiskFile(fs::File);

impl File for DiskFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        read_fully(buf, offset, |buf, offset| self.0.read_at(buf, offset))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        write_fully(buf, offset, |buf, offset| self.0.write_at(buf, offset))
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.0.set_len(bytes)
    }

    fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        reserve(&self.0, offset, bytes)
    }

    fn allocated(&self) -> io::Result<u64> {
        // In units of 512 bytes, whatever the size of a block.
        Ok(self.0.metadata()?.blocks() * 512)
    }

    fn free_space(&self) -> io::Result<u64> {
        let stat = retry(|| rustix::fs::fstatvfs(&self.0))?;
        if stat.f_blocks == 0 {
            // A file system that does not count.
            return Ok(u64::MAX);
        }
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn sync(&self) -> io::Result<()> {
        // fdatasync, which includes the size; F_FULLFSYNC on macOS; EINTR is retried.
        self.0.sync_data()
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> io::Result<Option<bool>> {
        let read = read_around_cache(&self.0, bytes.len(), offset)?;
        let held = read.map(|read| read == bytes);
        #[cfg(target_os = "linux")]
        if held == Some(true) {
            // An advice: what is not cached is not there to be forgotten.
            retry(|| rustix::fs::fadvise(&self.0, 0, None, rustix::fs::Advice::DontNeed))?;
        }
        Ok(held)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    #[cfg(target_os = "linux")]
    fn advise_random(&self) {
        rustix::fs::fadvise(&self.0, 0, None, rustix::fs::Advice::Random).unwrap_or_default();
    }

    fn map(&self) -> io::Result<Map> {
        Map::of_file(&self.0)
    }
}

/// A held lock: dropping the descriptor releases it. The file stays, see property C.
#[derive(Debug)]
struct DiskLock(#[expect(dead_code, reason = "held for its drop")] fs::File);

impl Lock for DiskLock {}

/// A file to lock; the lock belongs to this descriptor.
#[derive(Debug)]
struct DiskLockFile {
    file: fs::File,
    name: String,
    dir: DiskDir,
}

impl LockFile for DiskLockFile {
    fn try_lock(&self, mode: LockMode) -> io::Result<bool> {
        let tried = match mode {
            LockMode::Shared => self.file.try_lock_shared(),
            LockMode::Exclusive => self.file.try_lock(),
        };
        match tried {
            Ok(()) => Ok(true),
            Err(fs::TryLockError::WouldBlock) => Ok(false),
            Err(fs::TryLockError::Error(error)) => Err(error),
        }
    }

    fn unlock(&self) -> io::Result<()> {
        // Once more: a lock server or a file system in user space may refuse for a moment, and
        // what stays locked keeps out everybody, this process at its next open too.
        self.file.unlock().or_else(|_| self.file.unlock())
    }

    fn is_in_place(&self) -> io::Result<bool> {
        Ok(!self.dir.is_replaced()? && self.dir.is_named(&self.name, &self.file)?)
    }
}

/// Reserves blocks where the file system can.
#[cfg(target_os = "linux")]
fn reserve(file: &fs::File, offset: u64, bytes: u64) -> io::Result<()> {
    let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
    match retry(|| rustix::fs::fallocate(file, flags, offset, bytes)) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(not(target_os = "linux"))]
fn reserve(_file: &fs::File, _offset: u64, _bytes: u64) -> io::Result<()> {
    Ok(())
}

fn sync_dir(fd: &OwnedFd) -> io::Result<()> {
    #[cfg(target_vendor = "apple")]
    let synced = retry(|| rustix::fs::fcntl_fullfsync(fd));
    #[cfg(not(target_vendor = "apple"))]
    let synced = retry(|| rustix::fs::fsync(fd));
    match synced {
        Ok(()) | Err(Errno::INVAL | Errno::NOTSUP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// What direct reads have to start at, and be a multiple of, on every device.
#[cfg(target_os = "linux")]
const DIRECT_BYTES: usize = 4096;

/// Reads from the device, not from the cache; `None` where that cannot be done.
#[cfg(target_os = "linux")]
fn read_around_cache(file: &fs::File, len: usize, offset: u64) -> io::Result<Option<Vec<u8>>> {
    let before = usize::try_from(offset % DIRECT_BYTES as u64).unwrap_or(0);
    let start = offset - before as u64;
    let mut buffer = vec![0; (before + len).next_multiple_of(DIRECT_BYTES) + DIRECT_BYTES];
    let aligned = buffer.as_ptr().align_offset(DIRECT_BYTES);
    let whole = buffer.len() - DIRECT_BYTES;
    let Some(part) = buffer.get_mut(aligned..aligned.saturating_add(whole)) else {
        return Ok(None);
    };
    // The flag belongs to this opening of the file, which nobody else uses meanwhile.
    let flags = retry(|| rustix::fs::fcntl_getfl(file))?;
    if retry(|| rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT)).is_err() {
        return Ok(None);
    }
    let read = file.read_at(part, start);
    retry(|| rustix::fs::fcntl_setfl(file, flags))?;
    match read {
        Ok(got) if got >= before + len => Ok(part.get(before..before + len).map(<[u8]>::to_vec)),
        Err(error) if super::is_media_error(&error) => Err(error),
        // Short, refused, or not known here.
        _ => Ok(None),
    }
}

/// Says that there is no portable way.
#[cfg(not(target_os = "linux"))]
fn read_around_cache(_file: &fs::File, _len: usize, _at: u64) -> io::Result<Option<Vec<u8>>> {
    Ok(None)
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

fn refused(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// Reads the note of whoever holds the lock: bounded and printable, whatever the file contains.
fn read_note(file: &fs::File) -> io::Result<String> {
    let mut bytes = [0; NOTE_BYTES_MAX];
    let got = loop {
        match file.read_at(&mut bytes, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    let note = String::from_utf8_lossy(bytes.get(..got).unwrap_or_default());
    Ok(note.chars().filter(|c| !c.is_control()).collect())
}

/// Writes the note. A full disk is no reason to refuse the lock: the note is then empty.
fn write_note(file: &fs::File, note: &str) -> io::Result<()> {
    file.set_len(0)?;
    match file.write_all_at(note.as_bytes(), 0) {
        Err(error) if crate::error::is_out_of_space(&error) => Ok(()),
        other => other,
    }
}

/// Classifies by the magic numbers of `linux/magic.h` and of the file systems' own sources.
/// FUSE is local: most of it is, and what is not cannot be told apart.
#[cfg(target_os = "linux")]
fn classify(magic: u64) -> FileSystem {
    match magic {
        0x9123_683e | 0x2fc1_2fc1 | 0xca45_1a4e => FileSystem::CopyOnWrite,
        0x6969 => FileSystem::Network("nfs"),
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => FileSystem::Network("smb"),
        0x00c3_6400 => FileSystem::Network("ceph"),
        0x5346_414f | 0x6b41_4653 => FileSystem::Network("afs"),
        0x7375_7245 => FileSystem::Network("coda"),
        0x0102_1997 => FileSystem::Network("9p"),
        0x0bd0_0bd0 => FileSystem::Network("lustre"),
        0x0116_1970 => FileSystem::Network("gfs2"),
        0x7461_636f => FileSystem::Network("ocfs2"),
        _ => FileSystem::Local,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_holds_what_was_synced_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let dir = DiskDir::open(place.path(), false).unwrap();
        let file = dir.open("f", Access::Create).unwrap();
        let bytes: Vec<u8> = (0..20_000u32).map(|n| n.to_le_bytes()[0]).collect();
        file.write_at(&bytes, 0).unwrap();
        file.sync().unwrap();
        for (from, to) in [
            (0, 20_000),
            (4096, 8192),
            (1, 2),
            (5000, 13_001),
            (19_999, 20_000),
        ] {
            let part = &bytes[from..to];
            let held = file.holds(part, from as u64).unwrap();
            // Some file systems have no device to look at.
            assert_ne!(held, Some(false), "{from}..{to}");
            let mut other = part.to_vec();
            other[0] ^= 1;
            assert_ne!(
                file.holds(&other, from as u64).unwrap(),
                Some(true),
                "{from}..{to}"
            );
        }
        assert_ne!(file.holds(&[0; 8], 20_000).unwrap(), Some(true));
        // The flag is gone: unaligned reads and writes go on.
        file.write_at(b"x", 3).unwrap();
        let mut byte = [0];
        assert_eq!(file.read_at(&mut byte, 3).unwrap(), 1);
    }

    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    fn scratch() -> (tempfile::TempDir, PathBuf, DiskDir) {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("store");
        let dir = DiskDir::open(&path, true).unwrap();
        (parent, path, dir)
    }

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn refusal(dir: &DiskDir, name: &str, access: Access) -> String {
        let error = dir.open(name, access).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        error.to_string()
    }

    #[test]
    fn a_directory_is_made_private_and_only_when_asked() {
        let (parent, path, _dir) = scratch();
        assert_eq!(mode_of(&path), 0o700);
        DiskDir::open(&path, true).unwrap();
        let missing = DiskDir::open(&parent.path().join("other"), false).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let nested = DiskDir::open(&parent.path().join("other/store"), true).unwrap_err();
        assert_eq!(nested.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_file_in_place_of_the_directory_is_refused() {
        let (_parent, path, dir) = scratch();
        dir.open("plain", Access::Create).unwrap();
        let error = DiskDir::open(&path.join("plain"), true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn bytes_come_back_as_written() {
        let (_parent, path, dir) = scratch();
        let file = dir.open("a", Access::Create).unwrap();
        file.write_at(b"hello", 3).unwrap();
        file.sync().unwrap();
        let mut buf = [9; 16];
        assert_eq!(file.read_at(&mut buf, 1).unwrap(), 7);
        assert_eq!(&buf[..7], b"\0\0hello");
        file.set_len(4).unwrap();
        assert_eq!(&*file.map().unwrap(), b"\0\0\0h");
        assert_eq!(mode_of(&path.join("a")), 0o600);
        assert_eq!(
            dir.open("a", Access::Create).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        assert_eq!(
            dir.open("b", Access::Write).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        let read_only = dir.open("a", Access::Read).unwrap();
        assert!(read_only.write_at(b"x", 0).is_err());
    }

    /// The umask belongs to the whole process: the test runs itself again as a child.
    #[test]
    fn new_files_are_readable_and_writable_whatever_the_umask() {
        const CHILD: &str = "IDEMLOG_TEST_UMASK_CHILD";
        if std::env::var_os(CHILD).is_none() {
            let (_crate, module) = module_path!().split_once("::").unwrap();
            let name = "new_files_are_readable_and_writable_whatever_the_umask";
            let child = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", &format!("{module}::{name}")])
                .env(CHILD, "1")
                .output()
                .unwrap();
            let printed = String::from_utf8_lossy(&child.stdout);
            assert!(
                child.status.success() && printed.contains("1 passed"),
                "{printed}"
            );
            return;
        }
        let (_parent, path, dir) = scratch();
        for (umask, name) in [(0o777, "closed"), (0, "open")] {
            rustix::process::umask(Mode::from_raw_mode(umask));
            dir.open(name, Access::Create).unwrap();
            assert_eq!(mode_of(&path.join(name)), 0o600);
        }
    }

    #[test]
    fn allocate_reserves_blocks_and_changes_neither_size_nor_bytes() {
        let (_parent, path, dir) = scratch();
        let file = dir.open("a", Access::Create).unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_at(b"abc", 0).unwrap();
        file.sync().unwrap();
        let blocks = || fs::metadata(path.join("a")).unwrap().blocks();
        let before = blocks();
        file.allocate(0, 0).unwrap();
        file.allocate(0, 8192).unwrap();
        file.allocate(65_536, 65_536).unwrap();
        assert_eq!(file.size().unwrap(), 1 << 20);
        assert_eq!(&file.map().unwrap()[..4], b"abc\0");
        // Where the file system reserves anything, it is no more than what was asked for.
        assert!(
            blocks() <= before + (8192 + 65_536) / 512,
            "{before} {}",
            blocks()
        );
        assert_eq!(file.allocated().unwrap(), blocks() * 512);
        assert!(file.free_space().unwrap() > 0);
    }

    #[test]
    fn names_are_renamed_removed_and_listed() {
        let (_parent, _path, dir) = scratch();
        for name in ["a", "b", "c"] {
            dir.open(name, Access::Create).unwrap();
        }
        dir.rename("a", "b").unwrap();
        dir.unlink("c").unwrap();
        dir.sync().unwrap();
        assert_eq!(dir.list().unwrap(), ["b"]);
        assert_eq!(
            dir.list().unwrap(),
            ["b"],
            "a second listing starts from the beginning"
        );
    }

    #[test]
    fn what_is_not_a_plain_file_of_ours_is_refused_without_hanging() {
        let (_parent, path, dir) = scratch();
        dir.open("real", Access::Create).unwrap();
        symlink("real", path.join("link")).unwrap();
        fs::create_dir(path.join("sub")).unwrap();
        fs::hard_link(path.join("real"), path.join("twin")).unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(&dir.fd, "fifo", fifo, Mode::RWXU, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path.join("socket")).unwrap();
        for access in [Access::Read, Access::Write] {
            assert_eq!(refusal(&dir, "link", access), "symbolic link");
            assert_eq!(refusal(&dir, "sub", access), "not a regular file");
            assert_eq!(refusal(&dir, "fifo", access), "not a regular file");
            assert_eq!(refusal(&dir, "socket", access), "not a regular file");
            assert_eq!(refusal(&dir, "real", access), "several hard links");
        }
        let planted = dir.open("link", Access::Create).unwrap_err();
        assert_eq!(planted.kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn a_foreign_owner_is_refused() {
        let (_parent, path, dir) = scratch();
        dir.open("a", Access::Create).unwrap();
        // Only root can give files away; without that right there is nothing to show.
        if std::os::unix::fs::chown(path.join("a"), Some(12_345), None).is_ok() {
            assert_eq!(refusal(&dir, "a", Access::Read), "foreign owner");
        }
    }

    #[test]
    fn names_that_lead_out_of_the_directory_are_refused() {
        let (_parent, _path, dir) = scratch();
        for name in ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b"] {
            assert_eq!(refusal(&dir, name, Access::Create), "not a plain file name");
            assert!(dir.rename(name, "x").is_err());
            assert!(dir.rename("x", name).is_err());
            assert!(dir.unlink(name).is_err());
            assert!(dir.lock(name, true, "").is_err());
        }
    }

    #[test]
    fn one_opener_holds_the_lock_and_others_read_its_note() {
        let (_parent, path, dir) = scratch();
        let missing = dir.lock("LOCK", false, "").unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let held = dir
            .lock("LOCK", true, "a rather long first note")
            .unwrap()
            .unwrap();
        let other = DiskDir::open(&path, false).unwrap();
        let refused = other.lock("LOCK", true, "second").unwrap().unwrap_err();
        assert_eq!(refused, "a rather long first note");
        drop(held);
        let _held = other.lock("LOCK", false, "second").unwrap().unwrap();
        assert_eq!(
            dir.lock("LOCK", true, "third").unwrap().unwrap_err(),
            "second"
        );
    }

    #[test]
    fn a_note_is_bounded_and_printable_whatever_the_file_contains() {
        let (_parent, _path, dir) = scratch();
        let note = format!("\x1b[31m\n{}", "x".repeat(1000));
        let _held = dir.lock("LOCK", true, &note).unwrap().unwrap();
        let read = dir.lock("LOCK", true, "").unwrap().unwrap_err();
        assert_eq!(read, format!("[31m{}", "x".repeat(NOTE_BYTES_MAX - 6)));
    }

    #[test]
    fn a_lock_on_a_removed_file_does_not_count_as_the_lock() {
        let (_parent, _path, dir) = scratch();
        let _held = dir.lock("LOCK", true, "old").unwrap().unwrap();
        let file = dir.open_lock("LOCK", Access::Write).unwrap();
        assert!(dir.is_named("LOCK", &file).unwrap());
        dir.unlink("LOCK").unwrap();
        assert!(!dir.is_named("LOCK", &file).unwrap());
        dir.open("LOCK", Access::Create).unwrap();
        assert!(!dir.is_named("LOCK", &file).unwrap());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn file_systems_are_told_apart() {
        let (_parent, _path, dir) = scratch();
        dir.filesystem().unwrap();
        assert_eq!(classify(0xef53), FileSystem::Local);
        assert_eq!(classify(0x6573_5546), FileSystem::Local);
        assert_eq!(classify(0x9123_683e), FileSystem::CopyOnWrite);
        assert_eq!(classify(0x6969), FileSystem::Network("nfs"));
        // A 32-bit system reports SMB's number as a negative one.
        let negative = i64::from(i32::from_le_bytes(0xfe53_4d42_u32.to_le_bytes()));
        assert_eq!(
            classify(negative.cast_unsigned() & 0xffff_ffff),
            FileSystem::Network("smb")
        );
    }
}
