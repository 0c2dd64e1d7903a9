//! `run_once`: claim, start, run, commit, in one call.

use std::time::Duration;

use super::claim::{Claim, ClaimVerdict, Commit, Started};
use super::class::EffectClass;
use super::namespace::{ClaimOptions, Namespace};
use crate::error::Result;
use crate::key::derive_key;
use crate::stamp::Stamp;
use crate::verdict::{
    AckAdvice, Change, CommitVerdict, Done, Doubt, Failure, KeyState, Owner, Previous,
};

/// What the effect of `run_once` knows about its attempt.
#[derive(Clone, Debug)]
pub struct Attempt {
    namespace: String,
    key: Vec<u8>,
    epoch: Stamp,
    attempt: u32,
    previous: Option<Previous>,
}

impl Attempt {
    /// Returns the key.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// Returns the epoch: the fencing token to give to the target.
    pub fn epoch(&self) -> Stamp {
        self.epoch
    }

    /// Returns the number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Returns the attempt before this one, if there was one.
    pub fn previous(&self) -> Option<&Previous> {
        self.previous.as_ref()
    }

    /// Returns the same text on every attempt of this key, for one step of the effect.
    pub fn derived_key(&self, step: &str) -> String {
        derive_key(&self.namespace, &self.key, step)
    }
}

/// The answer of `run_once`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "the effect may not have run"]
pub enum RunVerdict {
    /// The effect ran in this call.
    Ran {
        /// What it produced.
        outcome: Vec<u8>,
        /// Whether it was recorded; `Fenced` if somebody had taken over meanwhile.
        commit: CommitVerdict,
    },
    /// The effect happened before; this is what was kept of it.
    Replayed(Done),
    /// The effect ran in this call and ended with an error.
    Failed {
        /// What the key is now.
        state: KeyState,
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
    /// The key was first claimed with another fingerprint.
    Mismatch,
}

impl RunVerdict {
    /// Says what to tell the broker.
    pub fn ack_advice(&self) -> AckAdvice {
        match self {
            RunVerdict::Ran { commit, .. } => commit.ack_advice(),
            RunVerdict::Failed { state } => state.ack_advice(),
            RunVerdict::Replayed(_) | RunVerdict::Rejected { .. } => AckAdvice::Ack,
            RunVerdict::Busy { lease_left, .. } => AckAdvice::Redeliver { after: *lease_left },
            RunVerdict::Backoff { after, .. } => AckAdvice::Redeliver { after: *after },
            RunVerdict::InDoubt(_) => AckAdvice::Hold,
            RunVerdict::Dead { .. } | RunVerdict::Mismatch => AckAdvice::DeadLetter,
        }
    }
}

impl<C: EffectClass> Namespace<C> {
    /// Runs the effect of this key once: claims, starts, runs `effect`, commits what it returns.
    /// A duplicate gets the outcome kept before.
    ///
    /// An error that `effect` did not classify should be [`Failure::Unknown`]; a panic is
    /// `Unknown` too, and goes on after it is recorded.
    ///
    /// # Errors
    /// `Invalid` for a bad key, and for an outcome over the limit: the effect has happened then,
    /// and is committed without its outcome first. `Full`, `Poisoned`, `Closed`, `Damaged`, `Io`.
    pub fn run_once(
        &self,
        key: impl AsRef<[u8]>,
        effect: impl FnOnce(&Attempt) -> std::result::Result<Vec<u8>, Failure>,
    ) -> Result<RunVerdict> {
        self.run_once_with(key, &ClaimOptions::new(), effect)
    }

    /// The same with a fingerprint or another lease.
    ///
    /// # Errors
    /// As [`Namespace::run_once`].
    pub fn run_once_with(
        &self,
        key: impl AsRef<[u8]>,
        options: &ClaimOptions,
        effect: impl FnOnce(&Attempt) -> std::result::Result<Vec<u8>, Failure>,
    ) -> Result<RunVerdict> {
        let verdict = self.claim_with(key, options)?;
        self.run_claimed(verdict, effect)
    }

    /// Runs the effect if a claim was handed out.
    pub(super) fn run_claimed(
        &self,
        verdict: ClaimVerdict<C>,
        effect: impl FnOnce(&Attempt) -> std::result::Result<Vec<u8>, Failure>,
    ) -> Result<RunVerdict> {
        let (claim, attempt) = match self.attempt(verdict) {
            Ok(begun) => begun,
            Err(answer) => return Ok(answer),
        };
        let started = self.begin(claim)?;
        // If `effect` panics, the guard's drop records that its outcome is unknown.
        match effect(&attempt) {
            Ok(outcome) => finish(started, outcome),
            Err(failure) => match started.fail(failure)? {
                Change::Applied(state) | Change::Fenced { current: state } => {
                    Ok(RunVerdict::Failed { state })
                }
            },
        }
    }

    /// Returns the claim and what its effect knows of it, or the answer if none was handed out.
    pub(crate) fn attempt(
        &self,
        verdict: ClaimVerdict<C>,
    ) -> std::result::Result<(Claim<C>, Attempt), RunVerdict> {
        let (claim, previous) = match verdict {
            ClaimVerdict::New(claim) => (claim, None),
            ClaimVerdict::Takeover { claim, previous }
            | ClaimVerdict::Retry { claim, previous } => (claim, Some(previous)),
            ClaimVerdict::Busy {
                attempt,
                owner,
                lease_left,
            } => {
                return Err(RunVerdict::Busy {
                    attempt,
                    owner,
                    lease_left,
                });
            }
            ClaimVerdict::Duplicate(done) => return Err(RunVerdict::Replayed(done)),
            ClaimVerdict::Backoff { after, error } => {
                return Err(RunVerdict::Backoff { after, error });
            }
            ClaimVerdict::Rejected { error } => return Err(RunVerdict::Rejected { error }),
            ClaimVerdict::Dead { attempts, error } => {
                return Err(RunVerdict::Dead { attempts, error });
            }
            ClaimVerdict::InDoubt(doubt) => return Err(RunVerdict::InDoubt(doubt)),
            ClaimVerdict::Mismatch => return Err(RunVerdict::Mismatch),
        };
        let attempt = Attempt {
            namespace: self.name().to_owned(),
            key: claim.key().to_vec(),
            epoch: claim.epoch(),
            attempt: claim.attempt(),
            previous,
        };
        Ok((claim, attempt))
    }

    /// Starts the claim durably where the class asks for it. The other classes write no start:
    /// a crash before their commit is the same with and without one.
    pub(super) fn begin(&self, mut claim: Claim<C>) -> Result<Started<C>> {
        if C::KIND.starts_durably() {
            return Ok(claim.start(b"")?);
        }
        Ok(Started(claim.0.take()))
    }
}

fn finish<C: EffectClass>(mut started: Started<C>, outcome: Vec<u8>) -> Result<RunVerdict> {
    match started.commit(&outcome) {
        Ok(commit) => Ok(RunVerdict::Ran { outcome, commit }),
        // The effect has happened: that must be recorded even if its outcome cannot be.
        Err(error) if error.kind() == crate::error::ErrorKind::Invalid => {
            let _recorded = started.commit_with(Commit::without_outcome())?;
            Err(error)
        }
        Err(error) => Err(error),
    }
}
