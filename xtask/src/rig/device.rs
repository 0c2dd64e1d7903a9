//! A device that keeps a tape: every write and every flush that reaches it, in order, together
//! with what the workload says it was answered.
//!
//! It is a file system in user space with two files. A loop device on `disk` carries the real
//! file system. The workload appends lines to `notes`; each is on the tape between the writes
//! that came before and after it, so a crash point has exactly the answers given before it.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use crate::context::Fallible;

/// From this note on, the device refuses writes with EIO.
pub(crate) const FAULT_ON: &str = "fault on\n";
/// From this note on, it takes them again.
pub(crate) const FAULT_OFF: &str = "fault off\n";

const DISK: INodeNo = INodeNo(2);
const NOTES: INodeNo = INodeNo(3);

/// Requests are not cut into smaller pieces than this.
const PIECE_BYTES_MIN: usize = 128 * 1024;

pub(crate) enum Event {
    Write { offset: u64, data: Box<[u8]> },
    Flush,
    Note(Box<[u8]>),
}

#[derive(Default)]
struct Tape {
    events: Vec<Event>,
    refuses: bool,
    refused_count: u64,
    /// Where the last accepted write ended, if more of its request may follow.
    more_at: Option<u64>,
}

pub(crate) struct Device {
    dir: PathBuf,
    tape: Arc<Mutex<Tape>>,
    session: Option<BackgroundSession>,
}

impl Device {
    /// Serves an image at a new directory.
    pub(crate) fn serve(image: &Path, dir: &Path) -> Fallible<Self> {
        std::fs::create_dir_all(dir)?;
        let image = OpenOptions::new().read(true).write(true).open(image)?;
        let bytes = image.metadata()?.len();
        let tape = Arc::new(Mutex::new(Tape::default()));
        let server = Server {
            image,
            bytes,
            tape: Arc::clone(&tape),
        };
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("idemlog-rig".to_owned())];
        let session = fuser::spawn_mount(server, dir, &config)?;
        Ok(Device {
            dir: dir.to_owned(),
            tape,
            session: Some(session),
        })
    }

    pub(crate) fn disk(&self) -> PathBuf {
        self.dir.join("disk")
    }

    pub(crate) fn notes(&self) -> PathBuf {
        self.dir.join("notes")
    }

    /// How many writes were refused so far.
    pub(crate) fn refused_count(&self) -> u64 {
        lock(&self.tape).refused_count
    }

    /// Everything noted so far.
    pub(crate) fn noted(&self) -> Vec<u8> {
        let tape = lock(&self.tape);
        let notes = tape.events.iter().filter_map(|event| match event {
            Event::Note(bytes) => Some(bytes.as_ref()),
            _ => None,
        });
        notes.flatten().copied().collect()
    }

    /// Takes the device away and returns its tape.
    pub(crate) fn end(mut self) -> Fallible<Vec<Event>> {
        if let Some(session) = self.session.take() {
            session.umount_and_join()?;
        }
        Ok(std::mem::take(&mut lock(&self.tape).events))
    }
}

struct Server {
    image: File,
    bytes: u64,
    tape: Arc<Mutex<Tape>>,
}

fn lock(tape: &Mutex<Tape>) -> MutexGuard<'_, Tape> {
    tape.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    fn attributes(&self, node: INodeNo) -> FileAttr {
        let is_dir = node == INodeNo::ROOT;
        let size = if node == DISK { self.bytes } else { 0 };
        FileAttr {
            ino: node,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_dir {
                FileType::Directory
            } else {
                FileType::RegularFile
            },
            perm: if is_dir { 0o700 } else { 0o600 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    fn write_disk(&self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let mut tape = lock(&self.tape);
        // A large request arrives in pieces, and a short write would look like a success to the
        // loop driver. So a piece that continues an accepted one is accepted, too.
        if tape.refuses && tape.more_at != Some(offset) {
            tape.refused_count += 1;
            return Err(Errno::EIO);
        }
        self.image
            .write_all_at(data, offset)
            .map_err(|_error| Errno::EIO)?;
        let end = offset + data.len() as u64;
        tape.more_at = (data.len() >= PIECE_BYTES_MIN).then_some(end);
        tape.events.push(Event::Write {
            offset,
            data: data.into(),
        });
        Ok(())
    }

    fn write_note(&self, data: &[u8]) {
        let mut tape = lock(&self.tape);
        if data == FAULT_ON.as_bytes() {
            tape.refuses = true;
        } else if data == FAULT_OFF.as_bytes() {
            tape.refuses = false;
        }
        tape.events.push(Event::Note(data.into()));
    }
}

impl Filesystem for Server {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let node = match name.to_str() {
            Some("disk") => DISK,
            Some("notes") => NOTES,
            _ => return reply.error(Errno::ENOENT),
        };
        reply.entry(&Duration::ZERO, &self.attributes(node), Generation(0));
    }

    fn getattr(&self, _r: &Request, node: INodeNo, _f: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &self.attributes(node));
    }

    fn setattr(
        &self,
        _request: &Request,
        node: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.attr(&Duration::ZERO, &self.attributes(node));
    }

    fn open(&self, _request: &Request, _node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // No cache of ours between the loop device and the tape.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _request: &Request,
        node: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if node != DISK {
            return reply.data(&[]);
        }
        let left = self.bytes.saturating_sub(offset).min(u64::from(size));
        let mut data = vec![0; usize::try_from(left).unwrap_or(0)];
        match self.image.read_exact_at(&mut data, offset) {
            Ok(()) => reply.data(&data),
            Err(_) => reply.error(Errno::EIO),
        }
    }

    fn write(
        &self,
        _request: &Request,
        node: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if node == DISK {
            if let Err(error) = self.write_disk(offset, data) {
                return reply.error(error);
            }
        } else {
            self.write_note(data);
        }
        reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX));
    }

    fn flush(&self, _r: &Request, _n: INodeNo, _h: FileHandle, _o: LockOwner, reply: ReplyEmpty) {
        // A close, not a flush of the device.
        reply.ok();
    }

    fn fsync(&self, _r: &Request, node: INodeNo, _h: FileHandle, _d: bool, reply: ReplyEmpty) {
        if node == DISK {
            lock(&self.tape).events.push(Event::Flush);
        }
        reply.ok();
    }
}
