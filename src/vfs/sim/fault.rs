//! Errors on demand, and what they leave behind.

use std::fmt;
use std::io;

use rustix::io::Errno;

/// The kinds of calls. The first eight are *steps*: they change the disk or make changes durable.
/// The others only read.
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
    /// `Dir::open` of an existing file.
    Open,
    /// `File::read_at`.
    Read,
    /// `File::size`.
    Size,
    /// `File::map`.
    Map,
    /// `Dir::list`.
    List,
}

impl Op {
    /// All kinds of steps.
    pub const STEPS: [Op; 8] = [
        Op::Create,
        Op::Write,
        Op::SetLen,
        Op::Allocate,
        Op::Sync,
        Op::Rename,
        Op::Unlink,
        Op::DirSync,
    ];

    /// All kinds of reading calls.
    pub const READS: [Op; 5] = [Op::Open, Op::Read, Op::Size, Op::Map, Op::List];
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
            Op::Open => "open",
            Op::Read => "read",
            Op::Size => "size",
            Op::Map => "map",
            Op::List => "list",
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
    /// EINTR: a signal came. `read_at` and `write_at` go on, as they do on real files; every
    /// other call returns the error.
    Interrupted,
    /// A read or write moves a part of the bytes only, and goes on with the rest, as on real
    /// files. Every other call is not affected.
    Short,
}

impl FaultKind {
    /// All kinds.
    pub const ALL: [FaultKind; 9] = [
        FaultKind::Io,
        FaultKind::NoSpace,
        FaultKind::Quota,
        FaultKind::TooLarge,
        FaultKind::ReadOnly,
        FaultKind::NoDescriptor,
        FaultKind::NoMemory,
        FaultKind::Interrupted,
        FaultKind::Short,
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
            FaultKind::Interrupted | FaultKind::Short => Errno::INTR,
        };
        errno.into()
    }
}

/// What a failed `File::sync` does to the unsynced state of the file. All of them exist in the
/// wild; see "Can Applications Recover from fsync Failures?" (Rebello et al., 2020).
///
/// A failed `Dir::sync` treats `DropPages` like `MarkClean`: no system takes names back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SyncFailure {
    /// The pages turn clean: reads still show the bytes, they are not on the disk, and a later
    /// sync says "ok" without writing them. What ext4 and XFS do, and the worst of the three.
    #[default]
    MarkClean,
    /// As `MarkClean`; and a sector that was to be written for the first time counts as written:
    /// it stays empty on the disk, whatever is written to it and synced later, until the cache
    /// has forgotten it. What ext4 does to reserved space.
    StuckSectors,
    /// The pages are dropped: reads show the durable content again. What btrfs does.
    DropPages,
    /// The pages stay unsynced: a later sync writes them.
    KeepDirty,
}

/// One planned error, see [`SimDisk::fail`](super::SimDisk::fail).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The first step that can fail (0-based), or reading call, with `reads`; with `only`, the
    /// first such call from there on.
    pub at_step: u64,
    /// The error given.
    pub error: FaultKind,
    /// Whether every later call (of that kind, with `only`) fails as well.
    pub sticky: bool,
    /// How many bytes a failed write leaves; `None` is 0. With [`FaultKind::Short`], how many
    /// the first part of a read or write has; `None` is half of them.
    pub after_bytes: Option<usize>,
    /// Which calls can fail; `None` is all.
    pub only: Option<Op>,
    /// Whether `at_step` counts reading calls ([`Counts::reads`](super::Counts)), and these fail
    /// instead of steps.
    pub reads: bool,
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
            reads: false,
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

    /// Counts and strikes reading calls instead of steps.
    #[must_use]
    pub fn reads(self) -> Fault {
        Fault {
            reads: true,
            ..self
        }
    }

    /// Restricts the error to one kind of call.
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
        if Op::READS.contains(&op) != self.reads {
            return false;
        }
        match self.only {
            Some(only) => step >= self.at_step && op == only,
            None => step == self.at_step || (self.sticky && step > self.at_step),
        }
    }
}

/// What happens to one call.
pub(super) enum Gate {
    Go,
    /// The first attempt is interrupted (`None`), or moves that many bytes.
    Again(Option<usize>),
    Fail {
        error: io::Error,
        kept_bytes: usize,
        sync: SyncFailure,
    },
}

impl Gate {
    /// Decides for a call that a fault has struck.
    pub(super) fn of(fault: &Fault, op: Op, bytes: usize) -> Gate {
        let moves = matches!(op, Op::Read | Op::Write);
        match fault.error {
            FaultKind::Interrupted if moves => Gate::Again(None),
            FaultKind::Short if moves => {
                let part = fault.after_bytes.unwrap_or(bytes / 2);
                Gate::Again(Some(part.clamp(1, bytes.max(1))))
            }
            FaultKind::Short => Gate::Go,
            error => Gate::Fail {
                error: error.error(),
                kept_bytes: fault.after_bytes.unwrap_or(0),
                sync: fault.sync,
            },
        }
    }

    /// For the calls that happen either entirely or not at all.
    pub(super) fn whole(self) -> io::Result<()> {
        match self {
            Gate::Go | Gate::Again(_) => Ok(()),
            Gate::Fail { error, .. } => Err(error),
        }
    }
}

/// How often one call is interrupted or cut short: once, so that a fault that stays does not
/// keep the call for ever.
pub(super) struct Attempts(Option<Option<usize>>);

impl Attempts {
    pub(super) fn new(first: Option<Option<usize>>) -> Attempts {
        Attempts(first)
    }

    /// Returns how many bytes the next attempt may move.
    pub(super) fn next(&mut self, bytes: usize) -> io::Result<usize> {
        match self.0.take() {
            Some(None) => Err(FaultKind::Interrupted.error()),
            Some(Some(part)) => Ok(part.min(bytes)),
            None => Ok(bytes),
        }
    }
}
