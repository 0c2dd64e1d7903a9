//! A job that was taken: its claim, its run and its end.

use std::time::Duration;

use super::claim::{Claim, ClaimVerdict, Commit, Started};
use super::class::EffectClass;
use super::intake::Intake;
use super::outbox::{OutboxEntry, entry_key};
use super::run_once::RunVerdict;
use crate::error::{Error, ErrorKind, Result};
use crate::stamp::Stamp;
use crate::verdict::{Change, CommitVerdict, Failure, KeyState};

/// How long a job waits that nobody may begin, before it is looked at again.
const BLOCKED_PAUSE: Duration = Duration::from_secs(60);

/// A job that was taken. Dropped without an end, it is given back.
#[derive(Debug)]
pub struct Taken<C: EffectClass> {
    intake: Intake<C>,
    /// `None` once it has an end.
    held: Option<(Claim<C>, OutboxEntry)>,
}

/// What the effect of a job knows about it.
#[derive(Clone, Debug)]
pub struct Job {
    entry: OutboxEntry,
    epoch: Stamp,
    attempt: u32,
}

impl Job {
    /// Returns the key.
    pub fn key(&self) -> &[u8] {
        &self.entry.key
    }

    /// Returns the payload.
    pub fn payload(&self) -> &[u8] {
        &self.entry.payload
    }

    /// Returns the number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Returns the epoch: the fencing token to give to the target.
    pub fn epoch(&self) -> Stamp {
        self.epoch
    }

    /// Returns the same text on every attempt of this key: the target's own idempotency key.
    pub fn derived_key(&self, step: &str) -> String {
        crate::key::derive_key(&self.entry.namespace, &self.entry.key, step)
    }
}

impl<C: EffectClass> Taken<C> {
    /// Returns the key.
    pub fn key(&self) -> &[u8] {
        self.held.as_ref().map_or(&[], |(_, entry)| &entry.key)
    }

    /// Returns the payload.
    pub fn payload(&self) -> &[u8] {
        self.held.as_ref().map_or(&[], |(_, entry)| &entry.payload)
    }

    /// Runs the effect: starts it, durably where the class asks for that, and commits its outcome
    /// together with the end of its payload. A failure ends the attempt as it says; the job waits
    /// then, or has its end. If `effect` panics, its outcome is unknown.
    ///
    /// # Errors
    /// As [`Namespace::run_once`].
    pub fn run(
        mut self,
        effect: impl FnOnce(&Job) -> std::result::Result<Vec<u8>, Failure>,
    ) -> Result<RunVerdict> {
        let Some((claim, entry)) = self.held.take() else {
            return Err(Error::invalid("job has an end already"));
        };
        let job = Job {
            epoch: claim.epoch(),
            attempt: claim.attempt(),
            entry,
        };
        let rest = GiveBack::new(&self.intake, &job.entry);
        let started = self.intake.jobs.begin(claim)?;
        let verdict = match effect(&job) {
            Ok(outcome) => self.commit(started, &job.entry, outcome)?,
            Err(failure) => match started.fail(failure)? {
                Change::Applied(state) | Change::Fenced { current: state } => {
                    RunVerdict::Failed { state }
                }
            },
        };
        let state = match &verdict {
            RunVerdict::Failed { state } => state.clone(),
            RunVerdict::Ran {
                commit: CommitVerdict::Fenced { current, .. },
                ..
            } => current.clone(),
            _ => {
                rest.keep();
                return Ok(verdict);
            }
        };
        self.intake.settle(&job.entry, &state)?;
        rest.keep();
        Ok(verdict)
    }

    fn commit(
        &self,
        mut started: Started<C>,
        entry: &OutboxEntry,
        outcome: Vec<u8>,
    ) -> Result<RunVerdict> {
        let end = |commit: Commit| commit.acknowledge(&self.intake.queue, entry);
        match started.commit_with(end(Commit::new(outcome.clone()))) {
            Ok(commit) => Ok(RunVerdict::Ran { outcome, commit }),
            // The effect has happened: that must be recorded even if its outcome cannot be.
            Err(error) if error.kind() == ErrorKind::Invalid => {
                let _recorded = started.commit_with(end(Commit::without_outcome()))?;
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    /// Takes the job apart, for a caller that runs the steps itself: commit the claim with
    /// [`Commit::acknowledge`], so that the payload ends with it. A payload whose job has ended
    /// another way ends when it is taken the next time.
    pub fn into_parts(mut self) -> Option<(Claim<C>, OutboxEntry)> {
        self.held.take()
    }
}

/// Gives the payload back if the job ends by a panic or an error.
pub(super) struct GiveBack<'a, C: EffectClass>(&'a Intake<C>, Option<&'a OutboxEntry>);

impl<C: EffectClass> Drop for GiveBack<'_, C> {
    fn drop(&mut self) {
        if let Some(entry) = self.1 {
            // A store that refuses this ends the lease with itself.
            let given = self.0.queue.give_back(std::slice::from_ref(entry));
            given.unwrap_or_default();
            self.0.tell_of_end(entry);
        }
    }
}

impl<'a, C: EffectClass> GiveBack<'a, C> {
    pub(super) fn new(intake: &'a Intake<C>, entry: &'a OutboxEntry) -> Self {
        GiveBack(intake, Some(entry))
    }

    /// Leaves the payload to whoever has it now.
    pub(super) fn keep(mut self) {
        self.1 = None;
    }
}

impl<C: EffectClass> Drop for Taken<C> {
    fn drop(&mut self) {
        if let Some((claim, entry)) = self.held.take() {
            drop(claim);
            drop(GiveBack::new(&self.intake, &entry));
        }
    }
}

impl<C: EffectClass> Intake<C> {
    /// Claims the job of an entry; `None`: it is not to be begun now, or never again.
    pub(super) fn claim(&self, entry: OutboxEntry) -> Result<Option<Taken<C>>> {
        let claim = match self.jobs.claim(&entry.key)? {
            ClaimVerdict::New(claim)
            | ClaimVerdict::Takeover { claim, .. }
            | ClaimVerdict::Retry { claim, .. } => claim,
            // It ended by another way than through here.
            ClaimVerdict::Duplicate(_)
            | ClaimVerdict::Rejected { .. }
            | ClaimVerdict::Dead { .. }
            | ClaimVerdict::Mismatch => {
                self.queue.ack(&entry)?;
                return Ok(None);
            }
            ClaimVerdict::Busy { lease_left, .. } => {
                self.queue.pause(&entry, lease_left)?;
                return Ok(None);
            }
            ClaimVerdict::Backoff { after, .. } => {
                self.queue.pause(&entry, after)?;
                return Ok(None);
            }
            ClaimVerdict::InDoubt(_) => {
                self.queue.pause(&entry, BLOCKED_PAUSE)?;
                self.tell_of_end(&entry);
                return Ok(None);
            }
        };
        // From the claim on nobody replaces the payload: this is the one that counts.
        let Some(current) = self.queued_entry(&entry.key)? else {
            let _released = claim.fail(Failure::Release)?;
            return Ok(None);
        };
        let mut entry = entry;
        let stamp = current.epoch();
        entry.set_current(current.outcome, stamp);
        Ok(Some(Taken {
            intake: self.clone(),
            held: Some((claim, entry)),
        }))
    }

    /// Does with a payload what the end of its job asks for.
    fn settle(&self, entry: &OutboxEntry, state: &KeyState) -> Result<()> {
        match state {
            KeyState::Rejected { .. } | KeyState::Dead { .. } | KeyState::Done(_) => {
                self.queue.ack(entry)?;
            }
            KeyState::Failed { retry_after, .. } => self.queue.pause(entry, *retry_after)?,
            KeyState::InDoubt(_) => self.queue.pause(entry, BLOCKED_PAUSE)?,
            KeyState::Pending { lease_left, .. } => self.queue.pause(entry, *lease_left)?,
            KeyState::Absent | KeyState::Seen => {
                self.queue.give_back(std::slice::from_ref(entry))?;
            }
        }
        self.tell_of_end(entry);
        self.queue.ring();
        Ok(())
    }

    /// Wakes who waits for the outcome of a job.
    fn tell_of_end(&self, entry: &OutboxEntry) {
        let own_key = entry_key(self.jobs.name(), &entry.key, 0);
        let waits = &self.queue.handle.engine.waits;
        waits.changed(self.queue.space.id, &own_key, true);
    }
}
