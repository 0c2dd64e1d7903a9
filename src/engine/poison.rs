//! Sticky failure: after a failed flush, or when junk may lie in the log, nothing more is
//! promised until the store is opened again.

use std::sync::OnceLock;

use crate::error::{Error, ErrorKind};

/// Why the store takes no more writes; set once.
#[derive(Debug, Default)]
pub(crate) struct Poison(OnceLock<String>);

impl Poison {
    /// Poisons; the first cause stays. Says whether this call was the first.
    pub(crate) fn set(&self, cause: String) -> bool {
        self.0.set(cause).is_ok()
    }

    #[inline]
    pub(crate) fn cause(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    #[inline]
    pub(crate) fn error(&self) -> Option<Error> {
        let cause = self.cause()?;
        Some(Error::new(
            ErrorKind::Poisoned,
            format!("store is poisoned by an earlier failure: {cause}; close it and open it again"),
        ))
    }
}
