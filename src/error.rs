//! The one error of the store: what to do about it, and whether anything was applied.
//!
//! Ordinary answers ("duplicate", "busy", "fenced") are verdicts, not errors. An [`Error`] means
//! that the store could not answer or could not write.

use std::fmt;
use std::io;

/// What the store could not do, and what the caller can do about it.
///
/// The message is one line: facts as `key=value`, the remedy last when there is one.
/// [`Error::applied`] says whether the failed call may have left its effect in the log.
pub struct Error(Box<Inner>);

/// The result of a call that can fail in the store itself.
pub type Result<T> = std::result::Result<T, Error>;

/// What the caller can do about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The call itself is wrong (an empty key, an outcome over the limit): fix the call.
    Invalid,
    /// Another opener holds the store: wait for it, or close it.
    Locked,
    /// No room for new keys: free space, raise the bound, or wait for expiry.
    Full,
    /// Bytes that were durable are no longer what was written: see `docs/operations.md`.
    Damaged,
    /// The directory is not a store, or is one of a format this version cannot read.
    Incompatible,
    /// An earlier failure made further promises impossible: close and open again.
    Poisoned,
    /// The handle was closed.
    Closed,
    /// The operating system refused a call.
    Io,
}

/// Whether a call that failed may have been applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Applied {
    /// Nothing of the call is in the log, now or after a reopen.
    No,
    /// The call may or may not be found applied after the next open; from then on it is fixed.
    Maybe,
}

struct Inner {
    kind: ErrorKind,
    applied: Applied,
    message: String,
    file: Option<String>,
    offset: Option<u64>,
    source: Option<io::Error>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error(Box::new(Inner {
            kind,
            applied: Applied::No,
            message: message.into(),
            file: None,
            offset: None,
            source: None,
        }))
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Invalid, message)
    }

    pub(crate) fn damaged(file: impl Into<String>, offset: u64, what: impl Into<String>) -> Self {
        Error::new(ErrorKind::Damaged, what)
            .in_file(file)
            .at(offset)
    }

    /// Wraps an operating system error: "no space" is `Full`, everything else `Io`.
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        let kind = if is_out_of_space(&source) {
            ErrorKind::Full
        } else {
            ErrorKind::Io
        };
        let mut error = Error::new(kind, what);
        error.0.source = Some(source);
        error
    }

    pub(crate) fn in_file(mut self, file: impl Into<String>) -> Self {
        self.0.file = Some(file.into());
        self
    }

    pub(crate) fn at(mut self, offset: u64) -> Self {
        self.0.offset = Some(offset);
        self
    }

    pub(crate) fn maybe_applied(mut self) -> Self {
        self.0.applied = Applied::Maybe;
        self
    }

    /// Returns what the caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns whether the failed call may have been applied.
    pub fn applied(&self) -> Applied {
        self.0.applied
    }

    /// Returns the file concerned, relative to the store's directory where it lies inside.
    pub fn file(&self) -> Option<&str> {
        self.0.file.as_deref()
    }

    /// Returns the offset in [`Error::file`], in bytes.
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }
}

/// Tells "no space left", "over quota" and "file too large" from other failures.
pub(crate) fn is_out_of_space(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        if let Some(file) = &self.0.file {
            write!(f, " file={file}")?;
        }
        if let Some(offset) = self.0.offset {
            write!(f, " offset={offset}")?;
        }
        if self.0.applied == Applied::Maybe {
            f.write_str(" applied=maybe")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("applied", &self.0.applied)
            .field("message", &self.0.message)
            .field("file", &self.0.file)
            .field("offset", &self.0.offset)
            .field("source", &self.0.source)
            .finish()
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|e| e as _)
    }
}
