//! A job that was taken: its claim, its run and its end.

use std::time::Duration;

use super::claim::{Claim, ClaimVerdict, Commit, Started};
use super::class::EffectClass;
use super::group::{GroupLevels, Grouped, MemberStep, place_of};
use super::intake::Intake;
use super::keep::Kept;
use super::namespace::{Answer, ClaimOptions, change_step};
use super::outbox::{OutboxEntry, entry_key, parse_entry_key, public_entry};
use super::run_once::RunVerdict;
use super::update::{Decided, Step};
use crate::error::{Error, ErrorKind, Result};
use crate::format::record::Kind;
use crate::format::{to_u32, to_usize};
use crate::model::claim as model;
use crate::model::claim::{ChangeDecision, Entry, Env};
use crate::position::Position;
use crate::stamp::Stamp;
use crate::verdict::{Change, CommitVerdict, Failure, KeyState, Probed, Resolution};

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
    /// As [`Namespace::run_once`](crate::Namespace::run_once).
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
            Err(failure) => RunVerdict::Failed {
                state: self.intake.fail(started, failure)?,
            },
        };
        let state = match &verdict {
            RunVerdict::Failed { state } => state.clone(),
            RunVerdict::Ran {
                commit: CommitVerdict::Fenced { current, .. },
                ..
            } => current.clone(),
            RunVerdict::Ran {
                commit: CommitVerdict::Conflict { current, .. },
                ..
            } => KeyState::Done(current.clone()),
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
    pub(super) fn claim(&self, entry: &OutboxEntry) -> Result<Option<Taken<C>>> {
        let Some((verdict, payload)) = self.claim_job(&entry.key)? else {
            return Ok(None);
        };
        let claim = match verdict {
            ClaimVerdict::New(claim)
            | ClaimVerdict::Takeover { claim, .. }
            | ClaimVerdict::Retry { claim, .. } => claim,
            // Its payload has ended with it.
            ClaimVerdict::Duplicate(_)
            | ClaimVerdict::Rejected { .. }
            | ClaimVerdict::Dead { .. } => return Ok(None),
            ClaimVerdict::Busy { lease_left, .. } => {
                self.pause(&payload, lease_left)?;
                return Ok(None);
            }
            ClaimVerdict::Backoff { after, .. } => {
                self.pause(&payload, after)?;
                return Ok(None);
            }
            ClaimVerdict::InDoubt(_) | ClaimVerdict::Mismatch => {
                self.pause(&payload, BLOCKED_PAUSE)?;
                return Ok(None);
            }
        };
        if payload.place != entry.place {
            self.queue.hold(&payload)?;
        }
        Ok(Some(Taken {
            intake: self.clone(),
            held: Some((claim, payload)),
        }))
    }

    /// Claims a job together with a look at its payload, which nobody replaces from then on;
    /// `None`: there is none any more. If the job has its end, or gets it here, so has the payload.
    fn claim_job(&self, key: &[u8]) -> Result<Option<(ClaimVerdict<C>, OutboxEntry)>> {
        let mut probed: Option<(Stamp, Probed)> = None;
        loop {
            let Some((decided, payload)) = self.try_claim(key, probed.as_ref())? else {
                return Ok(None);
            };
            if let (Answer::Probe(doubt), None) = (&decided.answer, &probed) {
                probed = Some((doubt.epoch, self.jobs.ask(key, doubt)?));
                continue;
            }
            return Ok(Some((self.jobs.verdict(key, decided, false), payload)));
        }
    }

    fn try_claim(
        &self,
        key: &[u8],
        probed: Option<&(Stamp, Probed)>,
    ) -> Result<Option<(Decided<Answer>, OutboxEntry)>> {
        let (engine, jobs, queue) = (self.engine(), &self.jobs, &self.queue.space);
        let request = jobs.request(&ClaimOptions::new());
        let own_key = entry_key(jobs.name(), key, 0);
        let levels = GroupLevels {
            level: jobs.claim_levels(request.detached).write,
            reserved_bytes: self.reserved_bytes(),
        };
        let mut payload = None;
        let mut next: Option<(Option<Entry>, Answer)> = None;
        let members = self.members(key, &own_key);
        let (grouped, rests) = engine.append_group(&members, levels, |index, entry, env| {
            if index == 0 {
                let step = match probed {
                    Some((epoch, found)) => {
                        jobs.decide_probed(entry, env, (*epoch, found), &request)
                    }
                    None => jobs.decide_claim(entry, env, &request),
                };
                let (step, entry, answer) = claim_member(step);
                next = Some((entry, answer));
                return Ok(step);
            }
            let Some(entry) = entry.filter(|entry| entry.kind == Kind::Queued) else {
                return Ok(MemberStep::Refuse(()));
            };
            let place = place_of(entry, env.position.unwrap_or(Position::START));
            payload = Some(public_entry(queue, &own_key, entry.clone(), place)?);
            let ends = matches!(&next, Some((_, Answer::State { state, .. })) if is_end(state));
            Ok(end_member(ends))
        })?;
        let (Grouped::Written(written), Some((entry, answer)), Some(payload)) =
            (grouped, next, payload)
        else {
            return Ok(None);
        };
        // A claim waits for nothing; what is told of a job that has its end must be durable.
        if let Some(rests) = rests.filter(|_| !matches!(answer, Answer::Granted { .. })) {
            engine.ensure(rests.end, rests.failures, jobs.level(None))?;
        }
        self.take_out(&written);
        let job = written.first().copied().flatten();
        let written = entry.zip(job).map(|(mut entry, written)| {
            entry.state.stamp = written.stamp.get();
            (entry, written.position)
        });
        Ok(Some((Decided { answer, written }, payload)))
    }

    /// Holds a payload back whose job nobody may begin now.
    fn pause(&self, payload: &OutboxEntry, pause: Duration) -> Result<()> {
        self.queue.pause(payload, pause)?;
        // Whoever has changed the job since then has ended a pause that was not there yet.
        match self.jobs.get(&payload.key)? {
            KeyState::Pending { .. } | KeyState::InDoubt(_) => Ok(()),
            KeyState::Failed { retry_after, .. } => self.queue.pause(payload, retry_after),
            _ => self.queue.give_back(std::slice::from_ref(payload)),
        }
    }

    /// What ends a job needs no room: that was kept free when the job was accepted.
    fn reserved_bytes(&self) -> usize {
        to_usize(self.engine().options.segment_bytes)
    }

    /// Keeps log space free for the jobs that other openers have accepted.
    pub(super) fn reserve(&self) -> Result<()> {
        let (engine, queue) = (self.engine(), &self.queue.space);
        if engine.reader.is_some() {
            return Ok(());
        }
        // Nothing is carried over meanwhile.
        let _one_at_a_time = engine.maintenance()?;
        let positions: Vec<Position> = {
            let mut core = engine.turn()?;
            let Some(entries) = core.outboxes.get_mut(&queue.id) else {
                return Ok(());
            };
            if std::mem::replace(&mut entries.is_reserved, true) {
                return Ok(());
            }
            let own = core
                .unsettled
                .iter()
                .filter(|(_, e)| e.namespace == queue.id);
            own.map(|(at, _)| Position::from_u64(*at)).collect()
        };
        for position in positions {
            let Some(own_key) = engine.read_at(position, |record| record.key.to_vec())? else {
                continue;
            };
            if let Some((_, _, key)) = parse_entry_key(&own_key) {
                let owed_bytes = engine.owed_by_job(&self.jobs.space, &key, &own_key);
                engine.turn()?.set_owed(position, to_u32(owed_bytes));
            }
        }
        Ok(())
    }

    /// Ends the doubt about a job: somebody found out what became of this epoch. A job that has its
    /// end then ends together with its payload; one that was not applied is taken again at once.
    ///
    /// # Errors
    /// As [`Namespace::resolve`](crate::Namespace::resolve).
    pub fn resolve(
        &self,
        key: impl AsRef<[u8]>,
        epoch: Stamp,
        resolution: Resolution,
    ) -> Result<Change> {
        let key = key.as_ref();
        self.jobs.check_resolution(key, &resolution)?;
        let change = self.change(key, |entry, env| {
            model::resolve(entry, env, epoch, &resolution)
        })?;
        Ok(self.jobs.told(key, change))
    }

    /// Ends an attempt other than by a commit.
    fn fail(&self, mut started: Started<C>, failure: Failure) -> Result<KeyState> {
        if failure == Failure::Release {
            // That is no end, and may wait for less.
            let (Change::Applied(state) | Change::Fenced { current: state }) =
                started.fail(failure)?;
            return Ok(state);
        }
        let held = &mut started.0;
        let change = {
            let _still = held.kept.as_ref().map(Kept::pause);
            let epoch = held.epoch;
            let change = self.change(&held.key, |entry, env| {
                model::fail(entry, env, epoch, &failure)
            })?;
            held.ended = true;
            held.kept.iter().for_each(Kept::end);
            change
        };
        match self.jobs.told(&held.key, change) {
            Change::Applied(state) | Change::Fenced { current: state } => Ok(state),
        }
    }

    /// Changes a job. If it has its end then, its payload, which nobody can have replaced, ends in
    /// the same frame: a crash leaves both or neither.
    fn change(
        &self,
        key: &[u8],
        mut decide: impl FnMut(Option<&Entry>, &Env) -> ChangeDecision,
    ) -> Result<Change> {
        let own_key = entry_key(self.jobs.name(), key, 0);
        let levels = GroupLevels {
            level: self.jobs.level(None),
            reserved_bytes: self.reserved_bytes(),
        };
        let mut place = None;
        let mut change = None;
        let members = self.members(key, &own_key);
        let grouped: Grouped<()> =
            self.engine()
                .update_group(&members, levels, |index, entry, env| {
                    if index == 0 {
                        let step = change_step(decide(entry, env), entry, env, None);
                        return Ok(match step {
                            Step::Answer(answer) => {
                                change = Some(answer);
                                MemberStep::Nothing
                            }
                            Step::Write(write, answer) => {
                                change = Some(answer);
                                MemberStep::Write {
                                    entry: write.entry,
                                    stamped: false,
                                }
                            }
                        });
                    }
                    let queued = entry.filter(|entry| entry.kind.is_queued());
                    place = queued.map(|e| place_of(e, env.position.unwrap_or(Position::START)));
                    let ends = change
                        .as_ref()
                        .is_some_and(|change| is_end(state_of(change)));
                    Ok(end_member(ends && queued.is_some()))
                })?;
        if let Grouped::Written(written) = &grouped {
            self.take_out(written);
        }
        let change = change.unwrap_or(Change::Fenced {
            current: KeyState::Absent,
        });
        // One that nobody could begin may be due now.
        let is_due = matches!(&change, Change::Applied(state) if is_due(state));
        if let Some(place) = place.filter(|_| is_due) {
            self.queue.release(std::iter::once(place))?;
        }
        Ok(change)
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
        self.queue.ring();
        Ok(())
    }
}

/// Turns the decision about a job into what its group does: the step, the state to be appended,
/// and the answer.
fn claim_member(step: Step<Answer>) -> (MemberStep<()>, Option<Entry>, Answer) {
    let (write, answer) = match step {
        Step::Answer(answer) => return (MemberStep::Nothing, None, answer),
        Step::Write(write, answer) => (write, answer),
    };
    let entry = write.entry.clone();
    let step = match write.deadline_boot_ms.filter(|_| write.is_claim) {
        Some(deadline_boot_ms) => MemberStep::Claim {
            entry: write.entry,
            deadline_boot_ms,
        },
        None => MemberStep::Write {
            entry: write.entry,
            stamped: false,
        },
    };
    (step, Some(entry), answer)
}

/// What becomes of a payload: it ends with its job.
fn end_member(ends: bool) -> MemberStep<()> {
    if !ends {
        return MemberStep::Nothing;
    }
    MemberStep::Write {
        entry: Entry::new(Kind::Forgotten),
        stamped: false,
    }
}

fn state_of(change: &Change) -> &KeyState {
    match change {
        Change::Applied(state) | Change::Fenced { current: state } => state,
    }
}

/// Says whether a job in this state may be begun now.
fn is_due(state: &KeyState) -> bool {
    match state {
        KeyState::Failed { retry_after, .. } => retry_after.is_zero(),
        state => *state == KeyState::Absent,
    }
}

/// Says whether a job in this state is never begun again.
fn is_end(state: &KeyState) -> bool {
    matches!(
        state,
        KeyState::Done(_) | KeyState::Rejected { .. } | KeyState::Dead { .. }
    )
}

#[cfg(all(test, not(idemlog_shuttle)))]
mod tests {
    use super::*;
    use crate::{IntakeOptions, Keep, Options, Repeatable, Submitted};

    /// Story: a payload that was replaced between the lease and the claim was worked on under the
    /// place of the one before: what was said of it changed nothing, or another entry.
    #[test]
    fn a_payload_that_is_replaced_before_its_claim_has_the_new_place() {
        let log = Options::new().open_in_memory().unwrap();
        let options = IntakeOptions::new().keep(Keep::Last);
        let intake: Intake<Repeatable> = log.intake("jobs", options).unwrap();
        let submit = |payload| intake.submit("a", payload).unwrap();
        assert_eq!(submit("old"), Submitted::Queued);
        let leased = intake.queue.lease(1).unwrap().remove(0);
        assert_eq!(submit("new"), Submitted::Replaced);
        let taken = intake.claim(&leased).unwrap().unwrap();
        assert_eq!(taken.payload(), b"new");
        // Nobody else meets it.
        assert!(intake.queue.lease(9).unwrap().is_empty());
        let (claim, entry) = taken.into_parts().unwrap();
        assert!(entry.place > leased.place);
        assert!(intake.queue.nack(&entry, Duration::ZERO, b"no").unwrap());
        assert_eq!(intake.stats().unwrap().queued_count, 1);
        drop(claim);
        let job = intake.take(1).unwrap().remove(0);
        assert_eq!(job.payload(), b"new");
    }
}
