//! What is a lock? A claim that nothing follows: each of its ends leaves the key absent.

use std::fmt;
use std::time::Duration;

use super::claim::{Claim, ClaimVerdict};
use super::class::Internal;
use super::handle::DedupLog;
use super::namespace::{ClaimOptions, Namespace};
use crate::error::{Error, Result};
use crate::options::NamespaceOptions;
use crate::stamp::Stamp;
use crate::verdict::{Change, Failure};

/// A namespace of locks. Clones are handles of the same namespace.
///
/// A lock excludes other lockers of its key while its owner lives and its lease has not lapsed. It
/// does not stop an owner that goes on after its lease has lapsed: only the target can, by
/// refusing an [epoch](Lock::epoch) that is lower than one it has seen.
///
/// ```
/// use std::time::Duration;
/// use idemlog::{DedupLog, LockVerdict};
///
/// let log = DedupLog::in_memory()?;
/// let locks = log.locks("reports")?;
/// let LockVerdict::Locked(lock) = locks.try_lock("daily", Duration::from_secs(60))? else {
///     panic!("nobody else holds it");
/// };
/// // Whatever the lock protects gets the epoch with each change.
/// assert!(lock.epoch().get() > 0);
/// assert!(lock.unlock()?.is_applied());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Locks(Namespace<Internal>);

/// The answer of `try_lock` and `lock_wait`.
#[derive(Debug)]
#[must_use = "a lock that is dropped is unlocked"]
pub enum LockVerdict {
    /// It is locked, for whoever holds the guard.
    Locked(Lock),
    /// Another owner holds it.
    Busy {
        /// How long it still excludes others, at most; zero if it was just let go and others wait
        /// for it.
        lease_left: Duration,
    },
}

impl LockVerdict {
    /// Returns the lock, if it was handed out.
    pub fn lock(self) -> Option<Lock> {
        match self {
            LockVerdict::Locked(lock) => Some(lock),
            LockVerdict::Busy { .. } => None,
        }
    }
}

/// A lock that is held. Dropped, it is unlocked.
#[must_use = "a lock that is dropped is unlocked"]
pub struct Lock(Claim<Internal>);

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("key", &crate::key::show_key(self.key()))
            .field("epoch", &self.epoch())
            .finish_non_exhaustive()
    }
}

impl Lock {
    /// Returns the key.
    pub fn key(&self) -> &[u8] {
        self.0.key()
    }

    /// Returns the fencing token: higher than that of every earlier owner of any lock of this
    /// store, over restarts and crashes.
    pub fn epoch(&self) -> Stamp {
        self.0.epoch()
    }

    /// Prolongs the lease to `lease` from now, also after it has lapsed, unless somebody else has
    /// locked it since: then `Fenced`.
    ///
    /// # Errors
    /// `Poisoned`, `Closed`, `Full`, `Io`.
    pub fn renew(&self, lease: Duration) -> Result<Change> {
        self.0.renew(lease)
    }

    /// Has the store renew the lease until `ceiling` from now; see [`Claim::keep_alive`].
    ///
    /// # Errors
    /// As [`Claim::keep_alive`].
    pub fn keep_alive(&mut self, ceiling: Duration) -> Result<()> {
        self.0.keep_alive(ceiling)
    }

    /// Unlocks. `Fenced` says that the lease had lapsed and somebody else has locked it since: what
    /// was done under the lock was not alone.
    ///
    /// # Errors
    /// `Poisoned`, `Closed`, `Io`; the lock then ends as if it had been dropped.
    pub fn unlock(self) -> Result<Change> {
        self.0.fail(Failure::Release)
    }
}

impl DedupLog {
    /// Opens a namespace of locks. Creates it if it is missing. In the store it is a namespace of
    /// class [`Internal`]; use it for nothing else.
    ///
    /// # Errors
    /// As [`DedupLog::filter`].
    pub fn locks(&self, name: &str) -> Result<Locks> {
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        self.namespace(name, options).map(Locks)
    }
}

impl Locks {
    /// Returns the namespace's name.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Locks a key for at most `lease`, if nobody else holds it. The lock of an owner whose lease
    /// has lapsed is taken over. It waits for no flush: a crash unlocks.
    ///
    /// # Errors
    /// `Invalid` for an empty or oversized key, and for one that was used as something else than a
    /// lock; `Full`, `Poisoned`, `Closed`, `Damaged`, `Io`.
    pub fn try_lock(&self, key: impl AsRef<[u8]>, lease: Duration) -> Result<LockVerdict> {
        self.locked(self.0.claim_with(key, &with(lease))?)
    }

    /// Locks a key for at most `lease` and waits for it until `deadline` from now. Those who wait
    /// get it in the order in which they came.
    ///
    /// # Errors
    /// As [`Locks::try_lock`]; `Closed` and `Poisoned` end a wait.
    pub fn lock_wait(
        &self,
        key: impl AsRef<[u8]>,
        lease: Duration,
        deadline: Duration,
    ) -> Result<LockVerdict> {
        self.locked(self.0.claim_wait_with(key, &with(lease), deadline)?)
    }

    /// As [`Locks::lock_wait`], in the same line as callers that block. A future that is dropped
    /// before it is ready holds no lock.
    ///
    /// # Errors
    /// As [`Locks::lock_wait`]; also `Io` if no thread can be started.
    pub async fn lock_wait_async(
        &self,
        key: impl AsRef<[u8]>,
        lease: Duration,
        deadline: Duration,
    ) -> Result<LockVerdict> {
        let options = with(lease);
        let waited = self.0.claim_wait_with_async(key, &options, deadline);
        self.locked(waited.await?)
    }

    fn locked(&self, verdict: ClaimVerdict<Internal>) -> Result<LockVerdict> {
        match verdict {
            ClaimVerdict::New(claim)
            | ClaimVerdict::Takeover { claim, .. }
            | ClaimVerdict::Retry { claim, .. } => Ok(LockVerdict::Locked(Lock(claim))),
            ClaimVerdict::Busy { lease_left, .. } => Ok(LockVerdict::Busy { lease_left }),
            ClaimVerdict::Backoff { after, .. } => Ok(LockVerdict::Busy { lease_left: after }),
            ClaimVerdict::Duplicate(_)
            | ClaimVerdict::Rejected { .. }
            | ClaimVerdict::Dead { .. }
            | ClaimVerdict::InDoubt(_)
            | ClaimVerdict::Mismatch => Err(Error::invalid(format!(
                "key is no lock: namespace={}; it was claimed and ended there as something else",
                self.name()
            ))),
        }
    }
}

fn with(lease: Duration) -> ClaimOptions {
    ClaimOptions::new().lease(lease)
}
