//! Errors on demand, and what they leave behind.

use std::fmt;
use std::io;

use rustix::io::Errno;

/// The kinds of steps: calls that change the disk or make changes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// A new file.
    Create,
    /// `File::write_at`.
    Write,
    /// `File::set_len`.
    SetLen,
    /// `File::allocate`.
    Allocate,
    /// `File::sync`.
    Sync,
    /// `Dir::rename`.
    Rename,
    /// `Dir::unlink`.
    Unlink,
    /// `Dir::sync`.
    DirSync,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Create => "create",
            Op::Write => "write",
            Op::SetLen => "set_len",
            Op::Allocate => "allocate",
            Op::Sync => "sync",
            Op::Rename => "rename",
            Op::Unlink => "unlink",
            Op::DirSync => "sync_dir",
        })
    }
}

/// The errors that a simulated disk can give, as the operating system would.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// EIO: the device failed.
    Io,
    /// ENOSPC: the disk is full.
    NoSpace,
    /// EDQUOT: over quota.
    Quota,
    /// EFBIG: over the file size limit.
    TooLarge,
    /// EROFS: the file system turned read-only.
    ReadOnly,
    /// EMFILE: no descriptor left.
    NoDescriptor,
    /// ENOMEM: the kernel has no memory.
    NoMemory,
}

impl FaultKind {
    /// All kinds.
    pub const ALL: [FaultKind; 7] = [
        FaultKind::Io,
        FaultKind::NoSpace,
        FaultKind::Quota,
        FaultKind::TooLarge,
        FaultKind::ReadOnly,
        FaultKind::NoDescriptor,
        FaultKind::NoMemory,
    ];

    /// Returns the error that the operating system would give.
    pub fn error(self) -> io::Error {
        let errno = match self {
            FaultKind::Io => Errno::IO,
            FaultKind::NoSpace => Errno::NOSPC,
            FaultKind::Quota => Errno::DQUOT,
            FaultKind::TooLarge => Errno::FBIG,
            FaultKind::ReadOnly => Errno::ROFS,
            FaultKind::NoDescriptor => Errno::MFILE,
            FaultKind::NoMemory => Errno::NOMEM,
        };
        errno.into()
    }
}

/// What a failed `File::sync` does to the unsynced state of the file. All three exist in the
/// wild; see "Can Applications Recover from fsync Failures?" (Rebello et al., 2020).
///
/// A failed `Dir::sync` treats `DropPages` like `MarkClean`: no system takes names back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SyncFailure {
    /// The pages turn clean: reads still show the bytes, they are not on the disk, and a later
    /// sync says "ok" without writing them. What ext4 and XFS do, and the worst of the three.
    #[default]
    MarkClean,
    /// The pages are dropped: reads show the durable content again. What btrfs does.
    DropPages,
    /// The pages stay unsynced: a later sync writes them.
    KeepDirty,
}

/// One planned error, see [`SimDisk::fail`](super::SimDisk::fail).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The first step that can fail (0-based); with `only`, the first such step from there on.
    pub at_step: u64,
    /// The error given.
    pub error: FaultKind,
    /// Whether every later step (of that kind, with `only`) fails as well.
    pub sticky: bool,
    /// How many bytes a failed write leaves; `None` is 0.
    pub after_bytes: Option<usize>,
    /// Which steps can fail; `None` is all.
    pub only: Option<Op>,
    /// What a failed sync does to the unsynced bytes.
    pub sync: SyncFailure,
}

impl Fault {
    /// Plans one error at exactly one step.
    #[must_use]
    pub fn once(at_step: u64, error: FaultKind) -> Fault {
        let sync = SyncFailure::default();
        Fault {
            at_step,
            error,
            sticky: false,
            after_bytes: None,
            only: None,
            sync,
        }
    }

    /// Plans an error at a step and all later ones.
    #[must_use]
    pub fn sticky(at_step: u64, error: FaultKind) -> Fault {
        Fault {
            sticky: true,
            ..Fault::once(at_step, error)
        }
    }

    /// Lets a failed write leave this many bytes.
    #[must_use]
    pub fn after_bytes(self, bytes: usize) -> Fault {
        Fault {
            after_bytes: Some(bytes),
            ..self
        }
    }

    /// Restricts the error to one kind of step.
    #[must_use]
    pub fn only(self, op: Op) -> Fault {
        Fault {
            only: Some(op),
            ..self
        }
    }

    /// Says what a failed sync does.
    #[must_use]
    pub fn on_sync(self, sync: SyncFailure) -> Fault {
        Fault { sync, ..self }
    }

    /// Tells whether the error strikes now.
    pub(super) fn strikes(&self, step: u64, op: Op) -> bool {
        match self.only {
            Some(only) => step >= self.at_step && op == only,
            None => step == self.at_step || (self.sticky && step > self.at_step),
        }
    }
}

/// What happens to one step.
pub(super) enum Gate {
    Go,
    Fail {
        error: io::Error,
        kept_bytes: usize,
        sync: SyncFailure,
    },
}

impl Gate {
    /// For the steps that happen either entirely or not at all.
    pub(super) fn whole(self) -> io::Result<()> {
        match self {
            Gate::Go => Ok(()),
            Gate::Fail { error, .. } => Err(error),
        }
    }
}
