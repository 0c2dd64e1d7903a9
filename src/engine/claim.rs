//! The guards a caller holds: a claim, and a claim whose effect may have begun.
//!
//! A guard that is dropped without an end ends the claim itself: a claim that was not started is
//! released, a started one is of unknown outcome. Neither is ever silently retryable or done.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::attach::Attachment;
use super::class::{DirectCommit, EffectClass};
use super::handle::Handle;
use super::keep::Kept;
use super::namespace::Namespace;
use super::ticket::Ticket;
use super::update::{Basis, Decided, Levels, Step, Write};
use crate::error::Error;
use crate::error::Result;
use crate::format::record::FLAG_ATTACHED;
use crate::key::derive_key;
use crate::model::claim as model;
use crate::model::claim::{ChangeDecision, Entry, Env};
use crate::options::{Durability, Event, Retention};
use crate::position::Position;
use crate::stamp::Stamp;
use crate::verdict::{
    AckAdvice, Change, CommitVerdict, Done, Doubt, Failure, KeyState, Owner, Previous,
};

/// The answer of `claim`.
#[derive(Debug)]
#[must_use = "a claim that is dropped is released"]
pub enum ClaimVerdict<C: EffectClass> {
    /// The key was absent; its effect may be run under this claim.
    New(Claim<C>),
    /// An earlier attempt's owner is gone or its lease lapsed; the claim is this one now.
    Takeover {
        /// The claim.
        claim: Claim<C>,
        /// The attempt before.
        previous: Previous,
    },
    /// An earlier attempt failed, and its pause is over.
    Retry {
        /// The claim.
        claim: Claim<C>,
        /// The attempt before.
        previous: Previous,
    },
    /// Another owner is at it.
    Busy {
        /// Number of its attempt, from 1.
        attempt: u32,
        /// Who it is.
        owner: Owner,
        /// How long it still excludes others, at most.
        lease_left: Duration,
    },
    /// The effect happened; this is what was kept of it.
    Duplicate(Done),
    /// An earlier attempt failed, and its pause is not over.
    Backoff {
        /// What is left of the pause.
        after: Duration,
        /// The error it failed with.
        error: Vec<u8>,
    },
    /// An earlier attempt ended with a permanent error.
    Rejected {
        /// The error.
        error: Vec<u8>,
    },
    /// Attempts are used up, or somebody gave up.
    Dead {
        /// How many attempts there were.
        attempts: u32,
        /// The last error.
        error: Vec<u8>,
    },
    /// The effect may or may not have happened: `resolve` it.
    InDoubt(Doubt),
    /// The key was first claimed with another fingerprint; nothing changed, nothing is told.
    Mismatch,
}

impl<C: EffectClass> ClaimVerdict<C> {
    /// Returns the claim, if one was handed out.
    pub fn claim(self) -> Option<Claim<C>> {
        match self {
            ClaimVerdict::New(claim)
            | ClaimVerdict::Takeover { claim, .. }
            | ClaimVerdict::Retry { claim, .. } => Some(claim),
            _ => None,
        }
    }

    /// Says what to tell the broker; `None` if a claim was handed out: that depends on its end.
    pub fn ack_advice(&self) -> Option<AckAdvice> {
        match self {
            ClaimVerdict::New(_) | ClaimVerdict::Takeover { .. } | ClaimVerdict::Retry { .. } => {
                None
            }
            ClaimVerdict::Busy { lease_left, .. } => {
                Some(AckAdvice::Redeliver { after: *lease_left })
            }
            ClaimVerdict::Backoff { after, .. } => Some(AckAdvice::Redeliver { after: *after }),
            ClaimVerdict::Duplicate(_) | ClaimVerdict::Rejected { .. } => Some(AckAdvice::Ack),
            ClaimVerdict::InDoubt(_) => Some(AckAdvice::Hold),
            ClaimVerdict::Mismatch | ClaimVerdict::Dead { .. } => Some(AckAdvice::DeadLetter),
        }
    }

    pub(crate) fn claim_mut(&mut self) -> Option<&mut Claim<C>> {
        match self {
            ClaimVerdict::New(claim)
            | ClaimVerdict::Takeover { claim, .. }
            | ClaimVerdict::Retry { claim, .. } => Some(claim),
            _ => None,
        }
    }

    pub(crate) fn of_state(state: KeyState, busy_ms: Option<u64>) -> Self {
        match state {
            KeyState::Done(done) => ClaimVerdict::Duplicate(done),
            KeyState::Failed {
                error, retry_after, ..
            } => ClaimVerdict::Backoff {
                after: retry_after,
                error,
            },
            KeyState::Rejected { error, .. } => ClaimVerdict::Rejected { error },
            KeyState::Dead { attempts, error } => ClaimVerdict::Dead { attempts, error },
            KeyState::InDoubt(doubt) => ClaimVerdict::InDoubt(doubt),
            KeyState::Pending {
                attempt,
                owner,
                lease_left,
                ..
            } => ClaimVerdict::Busy {
                attempt,
                owner,
                lease_left: busy_ms.map_or(lease_left, Duration::from_millis),
            },
            // A claim is never answered from these; a caller who sees it may ask again at once.
            KeyState::Absent | KeyState::Seen => ClaimVerdict::Backoff {
                after: Duration::ZERO,
                error: Vec::new(),
            },
        }
    }
}

/// What `commit` records besides the fact.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Commit {
    pub(crate) outcome: Option<Vec<u8>>,
    pub(crate) retention: Option<Retention>,
    pub(crate) outcome_retention: Option<Retention>,
    pub(crate) durability: Option<Durability>,
    pub(crate) attached: Vec<Attachment>,
}

impl Commit {
    /// Commits with these outcome bytes, which duplicates get.
    pub fn new(outcome: impl Into<Vec<u8>>) -> Self {
        Commit {
            outcome: Some(outcome.into()),
            ..Commit::without_outcome()
        }
    }

    /// Commits without keeping an outcome: duplicates learn only that it happened.
    pub fn without_outcome() -> Self {
        Commit {
            outcome: None,
            retention: None,
            outcome_retention: None,
            durability: None,
            attached: Vec::new(),
        }
    }

    /// Sets how long the key is remembered. Default: the namespace's retention.
    pub fn retention(mut self, retention: impl Into<Retention>) -> Self {
        self.retention = Some(retention.into());
        self
    }

    /// Sets how long duplicates are told the outcome, if that is less than the key is remembered;
    /// afterwards they learn only that it happened. Default: as long as the key.
    pub fn outcome_retention(mut self, retention: impl Into<Retention>) -> Self {
        self.outcome_retention = Some(retention.into());
        self
    }

    /// Sets the durability of this commit. Default: the namespace's.
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = Some(durability);
        self
    }
}

/// Counts one guard; the store stays locked while there are any.
struct Alive(Arc<Handle>);

impl Alive {
    fn new(handle: &Arc<Handle>) -> Self {
        // Relaxed: it is counted before the caller gets the guard, under an open store.
        handle.engine.guards_count.fetch_add(1, Ordering::Relaxed);
        Alive(Arc::clone(handle))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.engine.guards_count.fetch_sub(1, Ordering::Release);
        self.0.engine.unlock_if_over();
    }
}

/// What both guards are made of.
pub(crate) struct Held<C: EffectClass> {
    _alive: Alive,
    pub(crate) namespace: Namespace<C>,
    pub(crate) key: Vec<u8>,
    pub(crate) epoch: Stamp,
    pub(crate) attempt: u32,
    detached: bool,
    pub(crate) lease_ms: u64,
    /// The store renews the lease.
    pub(crate) kept: Option<Kept>,
    /// How durable an end by a drop is, if not as the namespace says.
    pub(crate) drop_level: Option<Durability>,
    /// The claim has an end; dropping the guard does nothing.
    pub(crate) ended: bool,
}

impl<C: EffectClass> Held<C> {
    pub(crate) fn commit(&mut self, commit: Commit) -> Result<CommitVerdict> {
        let _still = self.kept.as_ref().map(Kept::pause);
        let verdict = self.namespace.commit_epoch(&self.key, self.epoch, commit)?;
        self.ended = is_end(&verdict);
        Ok(verdict)
    }

    fn fail(&mut self, failure: &Failure, level: Option<Durability>) -> Result<Change> {
        let _still = self.kept.as_ref().map(Kept::pause);
        let change = self
            .namespace
            .fail_epoch(&self.key, self.epoch, failure, level)?;
        self.ended = true;
        self.kept.iter().for_each(Kept::end);
        Ok(change)
    }

    fn detach(&mut self) -> Ticket {
        self.ended = true;
        self.kept = None;
        Ticket::new(self.namespace.name(), &self.key, self.epoch)
    }

    fn end_by_drop(&mut self, failure: &Failure) {
        if self.ended || self.detached {
            return;
        }
        // Renewals end before the claim does.
        if let Some(kept) = self.kept.take() {
            kept.end();
            drop(kept.pause());
        }
        // A claim that was not started never waited for the disk.
        let level = match failure {
            Failure::Release => Some(Durability::Buffered),
            _ => self.drop_level,
        };
        // Nobody is left to tell: the claim stays pending then, and is an orphan after a reopen.
        if let Err(error) = self
            .namespace
            .fail_epoch(&self.key, self.epoch, failure, level)
        {
            let message = format!("ending a dropped claim failed: {error}");
            self.namespace
                .handle
                .engine
                .tell(Event::BackgroundFailed { message });
        }
    }

    pub(crate) fn take(&mut self) -> Held<C> {
        let held = Held {
            _alive: Alive::new(&self.namespace.handle),
            namespace: self.namespace.clone(),
            key: std::mem::take(&mut self.key),
            epoch: self.epoch,
            attempt: self.attempt,
            detached: self.detached,
            lease_ms: self.lease_ms,
            kept: self.kept.take(),
            drop_level: self.drop_level,
            ended: self.ended,
        };
        self.ended = true;
        held
    }
}

/// The right to run the effect of one key. Dropped without an end, it is released: the key is
/// absent again.
pub struct Claim<C: EffectClass>(pub(crate) Held<C>);

/// A claim whose effect may have begun. Dropped without an end, its outcome is unknown.
pub struct Started<C: EffectClass>(pub(crate) Held<C>);

macro_rules! guard {
    ($name:ident) => {
        impl<C: EffectClass> $name<C> {
            /// Returns the key.
            pub fn key(&self) -> &[u8] {
                &self.0.key
            }

            /// Returns the epoch: the fencing token to give to the target.
            pub fn epoch(&self) -> Stamp {
                self.0.epoch
            }

            /// Returns the number of this attempt, from 1.
            pub fn attempt(&self) -> u32 {
                self.0.attempt
            }

            /// Returns the same text on every attempt of this key: pass it to the target of one
            /// step of the effect as the target's own idempotency key.
            pub fn derived_key(&self, step: &str) -> String {
                derive_key(self.0.namespace.name(), &self.0.key, step)
            }

            /// Prolongs the lease to `lease` from now, also after it has lapsed, unless somebody
            /// has taken over.
            ///
            /// # Errors
            /// `Poisoned`, `Closed`, `Full`, `Io`.
            pub fn renew(&self, lease: Duration) -> Result<Change> {
                self.0
                    .namespace
                    .renew_epoch(&self.0.key, self.0.epoch, lease)
            }

            /// Ends the claim other than by a commit.
            ///
            /// # Errors
            /// `Poisoned`, `Closed`, `Io`; the claim then ends as if it had been dropped.
            pub fn fail(mut self, failure: Failure) -> Result<Change> {
                self.0.fail(&failure, None)
            }

            /// Ends the claim other than by a commit, with another durability than the
            /// namespace's.
            ///
            /// # Errors
            /// As `fail`.
            pub fn fail_with(mut self, failure: Failure, level: Durability) -> Result<Change> {
                self.0.fail(&failure, Some(level))
            }

            /// Lets go of the guard without ending the claim, which goes on under its ticket
            /// until its lease lapses (claimed as detached), or until this opener closes.
            pub fn detach(mut self) -> Ticket {
                self.0.detach()
            }
        }

        impl<C: EffectClass> fmt::Debug for $name<C> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("namespace", &self.0.namespace.name())
                    .field("key", &crate::key::show_key(&self.0.key))
                    .field("epoch", &self.0.epoch)
                    .field("attempt", &self.0.attempt)
                    .finish_non_exhaustive()
            }
        }
    };
}

guard!(Claim);
guard!(Started);

impl<C: EffectClass> Claim<C> {
    pub(crate) fn new(
        namespace: &Namespace<C>,
        key: &[u8],
        epoch: Stamp,
        attempt: u32,
        detached: bool,
        lease_ms: u64,
    ) -> Self {
        let (namespace, key) = (namespace.clone(), key.to_vec());
        Claim(Held {
            _alive: Alive::new(&namespace.handle),
            namespace,
            key,
            epoch,
            attempt,
            detached,
            lease_ms,
            kept: None,
            drop_level: None,
            ended: false,
        })
    }

    /// Marks that the effect may be happening from now on. For `Probeable` and `NonRepeatable`
    /// the mark is durable before this returns, whatever the store's durability: a crash before
    /// it is harmless, a crash after it is in doubt.
    ///
    /// `evidence` (at most 4 KiB) is kept for whoever has to find out what happened.
    ///
    /// # Errors
    /// [`StartError::Fenced`] when the claim is not this owner's any more, [`StartError::Failed`]
    /// with the claim when the store failed.
    pub fn start(mut self, evidence: &[u8]) -> std::result::Result<Started<C>, StartError<C>> {
        match self
            .0
            .namespace
            .start_epoch(&self.0.key, self.0.epoch, evidence)
        {
            Ok(Change::Applied(_)) => Ok(Started(self.0.take())),
            Ok(Change::Fenced { current }) => {
                self.0.ended = true;
                Err(StartError::Fenced { current })
            }
            Err(error) => Err(StartError::Failed { claim: self, error }),
        }
    }
}

impl<C: DirectCommit> Claim<C> {
    /// Records that the effect happened, with the outcome that duplicates get.
    ///
    /// # Errors
    /// `Invalid` for an outcome over the limit, `Poisoned`, `Closed`, `Io`. The claim is still
    /// held after an error and may commit again.
    pub fn commit(&mut self, outcome: &[u8]) -> Result<CommitVerdict> {
        self.0.commit(Commit::new(outcome))
    }

    /// Records that the effect happened, with another retention or durability.
    ///
    /// # Errors
    /// As [`Claim::commit`].
    pub fn commit_with(&mut self, commit: Commit) -> Result<CommitVerdict> {
        self.0.commit(commit)
    }
}

impl<C: EffectClass> Started<C> {
    /// Records that the effect happened, with the outcome that duplicates get.
    ///
    /// # Errors
    /// `Invalid` for an outcome over the limit, `Poisoned`, `Closed`, `Io`. The claim is still
    /// held after an error and may commit again.
    pub fn commit(&mut self, outcome: &[u8]) -> Result<CommitVerdict> {
        self.0.commit(Commit::new(outcome))
    }

    /// Records that the effect happened, with another retention or durability.
    ///
    /// # Errors
    /// As [`Started::commit`].
    pub fn commit_with(&mut self, commit: Commit) -> Result<CommitVerdict> {
        self.0.commit(commit)
    }
}

impl<C: EffectClass> Drop for Claim<C> {
    fn drop(&mut self) {
        self.0.end_by_drop(&Failure::Release);
    }
}

impl<C: EffectClass> Drop for Started<C> {
    fn drop(&mut self) {
        let evidence = b"owner gave up without an answer".to_vec();
        self.0.end_by_drop(&Failure::Unknown { evidence });
    }
}

/// Why a claim was not started.
#[derive(Debug)]
pub enum StartError<C: EffectClass> {
    /// The claim is not this owner's any more; the effect must not run.
    Fenced {
        /// What the key is now.
        current: KeyState,
    },
    /// The store failed; the claim is still held.
    Failed {
        /// The claim.
        claim: Claim<C>,
        /// What failed.
        error: Error,
    },
}

impl<C: EffectClass> fmt::Display for StartError<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Fenced { current } => {
                write!(
                    f,
                    "claim was lost before the start: key_state={}",
                    current.name()
                )
            }
            StartError::Failed { error, .. } => error.fmt(f),
        }
    }
}

impl<C: EffectClass> std::error::Error for StartError<C> {}

impl<C: EffectClass> From<StartError<C>> for Error {
    fn from(failed: StartError<C>) -> Error {
        match failed {
            StartError::Failed { error, .. } => error,
            fenced => Error::invalid(fenced.to_string()),
        }
    }
}

/// A guard that can be committed together with others.
pub trait Committable<C: EffectClass>: held::HeldMut<C> {}

impl<C: DirectCommit> Committable<C> for Claim<C> {}
impl<C: EffectClass> Committable<C> for Started<C> {}

pub(crate) mod held {
    use super::{Claim, EffectClass, Held, Started};

    /// Gives the engine what a guard is made of; not for callers.
    #[expect(
        private_interfaces,
        reason = "the method cannot be named outside of the crate"
    )]
    pub trait HeldMut<C: EffectClass> {
        #[doc(hidden)]
        fn held_mut(&mut self) -> &mut Held<C>;
    }

    #[expect(
        private_interfaces,
        reason = "the method cannot be named outside of the crate"
    )]
    impl<C: EffectClass> HeldMut<C> for Claim<C> {
        fn held_mut(&mut self) -> &mut Held<C> {
            &mut self.0
        }
    }

    #[expect(
        private_interfaces,
        reason = "the method cannot be named outside of the crate"
    )]
    impl<C: EffectClass> HeldMut<C> for Started<C> {
        fn held_mut(&mut self) -> &mut Held<C> {
            &mut self.0
        }
    }
}

/// What a commit came to, before the outcome is handed back.
#[derive(Debug)]
pub(crate) enum Committed {
    Written { late: bool },
    Already,
    Conflict(Done),
    Fenced(KeyState),
    NotStarted,
}

impl<C: EffectClass> Namespace<C> {
    pub(crate) fn commit_epoch(
        &self,
        key: &[u8],
        epoch: Stamp,
        commit: Commit,
    ) -> Result<CommitVerdict> {
        if !commit.attached.is_empty() {
            return self.commit_attached(key, epoch, commit);
        }
        let (decided, basis) = self.commit_undurable(key, epoch, &commit)?;
        self.handle.engine.ensure_basis(basis)?;
        let position = decided.written.map(|(_, position)| position);
        self.commit_verdict(key, decided.answer, position, commit)
    }

    /// Appends a commit and does not wait.
    pub(crate) fn commit_undurable(
        &self,
        key: &[u8],
        epoch: Stamp,
        commit: &Commit,
    ) -> Result<(Decided<Committed>, Basis)> {
        self.check_outcome(key, commit.outcome.as_ref().map_or(0, Vec::len))?;
        let level = self.level(commit.durability);
        self.handle.engine.update_undurable(
            true,
            &self.space,
            key,
            Levels {
                write: level,
                answer: level,
            },
            self.commit_retention(commit),
            |entry, env| commit_step(entry, env, epoch, commit),
        )
    }

    pub(crate) fn commit_verdict(
        &self,
        key: &[u8],
        committed: Committed,
        position: Option<Position>,
        commit: Commit,
    ) -> Result<CommitVerdict> {
        let engine = &self.handle.engine;
        let outcome = commit.outcome.unwrap_or_default();
        match committed {
            Committed::Written { late } => {
                engine.counters.commits.add(1);
                if late {
                    let namespace = self.space.name.clone();
                    engine.tell(Event::LateCommit {
                        namespace,
                        key: key.to_vec(),
                    });
                }
                let position = position.unwrap_or(Position::START);
                Ok(CommitVerdict::Committed { position })
            }
            Committed::Already => Ok(CommitVerdict::AlreadyCommitted),
            Committed::Conflict(current) => Ok(CommitVerdict::Conflict { current, outcome }),
            Committed::Fenced(current) => {
                self.tell_fenced(key);
                Ok(CommitVerdict::Fenced { current, outcome })
            }
            Committed::NotStarted => Err(Error::invalid(format!(
                "claim was not started: namespace={} class={} key={}; start it before the effect",
                self.space.name,
                self.space.kind.name(),
                crate::key::show_key(key)
            ))),
        }
    }
}

pub(crate) fn commit_step(
    entry: Option<&Entry>,
    env: &Env,
    epoch: Stamp,
    commit: &Commit,
) -> Step<Committed> {
    let outcome = commit.outcome.as_deref();
    match model::commit(entry, env, epoch, outcome, !commit.attached.is_empty()) {
        ChangeDecision::Write { entry, late } => Step::Write(
            Write {
                entry: told_until(entry, env, commit),
                is_claim: false,
                deadline_boot_ms: None,
            },
            Committed::Written { late },
        ),
        ChangeDecision::AlreadyDone { same: true } => Step::Answer(Committed::Already),
        ChangeDecision::NotStarted => Step::Answer(Committed::NotStarted),
        decision => match (decision, model::view(entry, env)) {
            (ChangeDecision::AlreadyDone { .. }, KeyState::Done(done)) => {
                Step::Answer(Committed::Conflict(done))
            }
            (_, current) => Step::Answer(Committed::Fenced(current)),
        },
    }
}

/// Says whether a commit's answer ends the claim.
pub(crate) fn is_end(verdict: &CommitVerdict) -> bool {
    !matches!(verdict, CommitVerdict::CellConflict { .. })
}

/// Notes that something was attached, and how long the outcome is told, where that is less than
/// the key is remembered.
fn told_until(mut entry: Entry, env: &Env, commit: &Commit) -> Entry {
    if !commit.attached.is_empty() {
        entry.flags |= FLAG_ATTACHED;
    }
    if let Some(retention) = commit.outcome_retention {
        let until_s = retention.expires_at_s(env.now.latest_ms);
        let is_less = until_s != 0 && (entry.expires_at_s == 0 || until_s < entry.expires_at_s);
        entry.outcome_until_s = if is_less { until_s } else { 0 };
    }
    entry
}
