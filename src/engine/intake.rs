//! Intake: work that is accepted now and done later; what comes twice is absorbed.
//!
//! A thin layer over two namespaces: claims, which say what became of each key, and an outbox,
//! which holds the payloads that wait. A job's end and the end of its payload are one frame.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::class::{EffectClass, Probeable};
use super::group::{GroupLevels, Grouped, Member, MemberStep, Written};
use super::handle::DedupLog;
use super::job::{GiveBack, Taken};
use super::namespace::{Namespace, ProbeRequest, to_ms};
use super::outbox::{Leased, Outbox, OutboxStats, entry_key};
use super::waits::Place;
use crate::error::{Error, ErrorKind, Result};
use crate::format::record::Kind;
use crate::format::to_u32;
use crate::key::check_key;
use crate::log::bell::Listening;
use crate::model::claim as model;
use crate::model::claim::{Entry, QueuedEntry};
use crate::options::{NamespaceOptions, Retention};
use crate::verdict::{AckAdvice, Done, Doubt, KeyState, Probed};

/// What stands before the name of an intake in that of its queue.
const QUEUE_PREFIX: &str = "intake:";

/// Says whether a namespace of this name is the queue of an intake.
pub(super) fn is_queue_name(name: &str) -> bool {
    name.starts_with(QUEUE_PREFIX)
}

/// Which payload counts when a key is submitted again while it is queued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Keep {
    /// The first one.
    #[default]
    First,
    /// The last one, which goes to the end of the queue.
    Last,
}

/// What an intake is to do.
#[derive(Clone, Debug)]
#[must_use]
pub struct IntakeOptions {
    jobs: NamespaceOptions,
    payload_bytes_max: Option<usize>,
    queued_max: u64,
    keep: Keep,
}

impl Default for IntakeOptions {
    fn default() -> Self {
        IntakeOptions::new()
    }
}

impl IntakeOptions {
    /// Starts with the defaults of a namespace, payloads of the size of outcomes, 100,000 queued
    /// jobs, and the first payload of each key.
    pub fn new() -> Self {
        IntakeOptions {
            jobs: NamespaceOptions::new(),
            payload_bytes_max: None,
            queued_max: 100_000,
            keep: Keep::First,
        }
    }

    /// Sets the options of the jobs: retention, lease, durability, attempts, largest outcome. The
    /// lease is also how long a taken job is nobody else's.
    pub fn jobs(mut self, options: NamespaceOptions) -> Self {
        self.jobs = options;
        self
    }

    /// Sets the largest payload, in bytes. Default: as the largest outcome.
    pub fn payload_bytes_max(mut self, bytes: usize) -> Self {
        self.payload_bytes_max = Some(bytes);
        self
    }

    /// Sets how many jobs may wait; more are `Full`. Callers that submit at the same moment may
    /// get in together. Default: 100,000.
    pub fn queued_max(mut self, count: u64) -> Self {
        self.queued_max = count;
        self
    }

    /// Sets which payload counts when a queued key comes again. Default: the first.
    pub fn keep(mut self, keep: Keep) -> Self {
        self.keep = keep;
        self
    }

    fn queue(&self) -> NamespaceOptions {
        let mut options = self.jobs.clone();
        if let Some(bytes) = self.payload_bytes_max {
            options = options.outcome_bytes_max(bytes);
        }
        options
    }
}

/// The answer of a `submit`. In every case but `InDoubt` and `Dead` the message it came with may be
/// acknowledged: its work is queued, being done, or done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a submission that was not accepted is not queued"]
pub enum Submitted {
    /// It is queued now, as durably as asked.
    Queued,
    /// It was queued before; the payload of then counts.
    AlreadyQueued,
    /// It was queued before, and has this payload now.
    Replaced,
    /// Somebody is at it, with the payload of before.
    InProgress,
    /// It is done.
    Duplicate(Done),
    /// It ended with a permanent error.
    Rejected {
        /// The error.
        error: Vec<u8>,
    },
    /// Its attempts are used up, or somebody gave up.
    Dead {
        /// How many attempts there were.
        attempts: u32,
        /// The last error.
        error: Vec<u8>,
    },
    /// It may or may not have happened: `resolve` it.
    InDoubt(Doubt),
}

impl Submitted {
    /// Says what to tell the broker.
    pub fn ack_advice(&self) -> AckAdvice {
        match self {
            Submitted::InDoubt(_) => AckAdvice::Hold,
            Submitted::Dead { .. } => AckAdvice::DeadLetter,
            _ => AckAdvice::Ack,
        }
    }
}

/// What is known of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobStatus {
    /// Nothing: never submitted, forgotten, or expired.
    Unknown,
    /// It waits; nobody is at it.
    Queued {
        /// Attempts that have failed.
        failed_count: u32,
        /// Trusted time of its submission, in unix milliseconds.
        since_ms: u64,
    },
    /// Somebody is at it, or it has an end.
    Begun(KeyState),
}

impl JobStatus {
    fn is_end(&self) -> bool {
        match self {
            JobStatus::Unknown => true,
            JobStatus::Queued { .. } => false,
            JobStatus::Begun(state) => matches!(
                state,
                KeyState::Done(_)
                    | KeyState::Rejected { .. }
                    | KeyState::Dead { .. }
                    | KeyState::InDoubt(_)
            ),
        }
    }
}

/// A durable buffer in front of work: accept fast, acknowledge the broker, work later. A key that
/// is queued, being worked on or done absorbs every further submission of itself. Clones are
/// handles of the same intake.
#[derive(Debug)]
pub struct Intake<C: EffectClass> {
    pub(super) jobs: Namespace<C>,
    pub(super) queue: Outbox,
    queued_max: u64,
    keep: Keep,
}

impl<C: EffectClass> Clone for Intake<C> {
    fn clone(&self) -> Self {
        Intake {
            jobs: self.jobs.clone(),
            queue: self.queue.clone(),
            queued_max: self.queued_max,
            keep: self.keep,
        }
    }
}

impl DedupLog {
    /// Opens an intake: the namespace of its jobs has this name, that of its queue the same with
    /// `intake:` before it. Creates both if they are missing.
    ///
    /// # Errors
    /// As [`DedupLog::namespace`] and [`DedupLog::outbox`].
    pub fn intake<C: EffectClass>(&self, name: &str, options: IntakeOptions) -> Result<Intake<C>> {
        let queue = self.outbox(&format!("{QUEUE_PREFIX}{name}"), options.queue())?;
        let intake = Intake {
            jobs: self.namespace(name, options.jobs)?,
            queue,
            queued_max: options.queued_max,
            keep: options.keep,
        };
        intake.reserve()?;
        Ok(intake)
    }
}

impl Intake<Probeable> {
    /// Sets the function that asks the target whether a started job happened: see
    /// [`Namespace::with_probe`].
    pub fn with_probe(
        mut self,
        probe: impl Fn(&ProbeRequest<'_>) -> Probed + Send + Sync + 'static,
    ) -> Self {
        self.jobs = self.jobs.with_probe(probe);
        self
    }
}

impl<C: EffectClass> Intake<C> {
    /// Returns the namespace of the jobs: to resolve, to forget, to read.
    pub fn jobs(&self) -> &Namespace<C> {
        &self.jobs
    }

    /// Returns the queue of payloads.
    pub fn queue(&self) -> &Outbox {
        &self.queue
    }

    /// Accepts a job, durably: when this returns, its message may be acknowledged, see
    /// [`Submitted::ack_advice`]. Queued jobs never expire.
    ///
    /// # Errors
    /// `Full` when too many jobs wait or the log is at its bound: push back; nothing was accepted.
    /// `Invalid` for a bad key or a payload over the limit; `Poisoned`, `Closed`, `Damaged`, `Io`.
    pub fn submit(&self, key: impl AsRef<[u8]>, payload: impl AsRef<[u8]>) -> Result<Submitted> {
        let payload = payload.as_ref();
        self.submit_as(key.as_ref(), payload, &mut |_| match self.keep {
            Keep::First => None,
            Keep::Last => Some(payload.to_vec()),
        })
    }

    /// Accepts a job; if its key is queued, `merge` makes one payload of the queued one and this
    /// one. It is called with no other call of this store possible within it, and perhaps more than
    /// once: compute only.
    ///
    /// # Errors
    /// As [`Intake::submit`]; `Invalid` also for a merged payload over the limit.
    pub fn submit_merged(
        &self,
        key: impl AsRef<[u8]>,
        payload: impl AsRef<[u8]>,
        mut merge: impl FnMut(&[u8], &[u8]) -> Vec<u8>,
    ) -> Result<Submitted> {
        let payload = payload.as_ref();
        let key = key.as_ref();
        // No lock is held over the caller's code: what it was shown is compared under the lock.
        loop {
            let shown = self.queued_entry(key)?;
            let merged = shown.as_ref().map(|entry| merge(&entry.outcome, payload));
            let mut changed = false;
            let submitted = self.submit_as(key, payload, &mut |queued| {
                let same = shown
                    .as_ref()
                    .is_some_and(|shown| shown.epoch() == queued.epoch());
                changed = !same;
                merged.clone().filter(|_| same)
            })?;
            if !(changed && submitted == Submitted::AlreadyQueued) {
                return Ok(submitted);
            }
        }
    }

    /// `replaced` says what a queued entry's payload becomes; `None`: it stays.
    fn submit_as(
        &self,
        key: &[u8],
        payload: &[u8],
        replaced: &mut dyn FnMut(&Entry) -> Option<Vec<u8>>,
    ) -> Result<Submitted> {
        check_key(key)?;
        super::attach::check_value(&self.queue.space, payload.len())?;
        let engine = &self.queue.handle.engine;
        let own_key = entry_key(self.jobs.name(), key, 0);
        check_key(&own_key)?;
        let stats = self.queue.stats()?;
        let is_full = stats.queued_count + stats.parked_count >= self.queued_max;
        let members = self.members(key, &own_key);
        let levels = GroupLevels {
            level: engine.level(self.jobs.space.options.durability, None),
            reserved_bytes: 0,
        };
        // A job that is accepted finds room later, whatever fills the log meanwhile.
        let owed_bytes = to_u32(engine.owed_by_job(&self.jobs.space, key, &own_key));
        let mut is_pending = false;
        let mut was_queued = false;
        let grouped = engine.update_group(&members, levels, |index, entry, env| {
            if index == 0 {
                let state = model::view(entry, env);
                is_pending = matches!(state, KeyState::Pending { .. });
                return Ok(ended(state).map_or(MemberStep::Nothing, MemberStep::Refuse));
            }
            let queued = entry.filter(|entry| entry.kind.is_queued());
            was_queued = queued.is_some();
            let next = match queued {
                Some(_) if is_pending => return Ok(MemberStep::Refuse(Submitted::InProgress)),
                Some(queued) => match replaced(queued) {
                    Some(payload) => payload,
                    None => return Ok(MemberStep::Refuse(Submitted::AlreadyQueued)),
                },
                None if is_full => return Err(full(self.queued_max)),
                None => payload.to_vec(),
            };
            super::attach::check_value(&self.queue.space, next.len())?;
            let mut fresh = Entry::new(Kind::Queued);
            fresh.state.at_ms = queued.map_or(env.now.trusted_ms, |queued| queued.state.at_ms);
            fresh.queued = Some(Box::new(QueuedEntry {
                owed_bytes,
                ..QueuedEntry::default()
            }));
            fresh.outcome = next;
            Ok(MemberStep::Write {
                entry: fresh,
                stamped: true,
            })
        })?;
        Ok(match grouped {
            Grouped::Refused(submitted) => submitted,
            Grouped::Written(written) if was_queued => {
                self.take_out(&written);
                Submitted::Replaced
            }
            Grouped::Written(_) => Submitted::Queued,
        })
    }

    /// Returns job and payload of a key, in this order.
    pub(super) fn members<'a>(&'a self, key: &'a [u8], own_key: &'a [u8]) -> [Member<'a>; 2] {
        let member = |space, key, retention| Member {
            space,
            key,
            retention,
        };
        [
            member(&*self.jobs.space, key, self.jobs.space.options.retention),
            member(&*self.queue.space, own_key, Retention::Forever),
        ]
    }

    /// Takes the place out of the queue at which a payload was that has ended or has another one.
    pub(super) fn take_out(&self, written: &[Option<Written>]) {
        let before = written.iter().flatten().filter_map(|w| w.place_before);
        let ended: Vec<(u16, u64)> = before.map(|place| (self.queue.space.id, place)).collect();
        Outbox::take_out(self.engine(), &ended);
    }

    fn queued_entry(&self, key: &[u8]) -> Result<Option<Entry>> {
        let own_key = entry_key(self.jobs.name(), key, 0);
        let entry = self
            .queue
            .handle
            .engine
            .read_entry(&self.queue.space, &own_key)?;
        Ok(entry.filter(|entry| entry.kind.is_queued()))
    }

    /// Takes up to `count` jobs to work on: the oldest first. Each is claimed, and nobody else's
    /// until it has an end, its guard is dropped, or the lease lapses.
    ///
    /// # Errors
    /// `Full`, `Poisoned`, `Closed`, `Damaged`, `Io`; jobs taken before the error are given back.
    pub fn take(&self, count: usize) -> Result<Vec<Taken<C>>> {
        self.take_or_when(count).map(|leased| leased.entries)
    }

    /// Takes up to `count` jobs, and waits for the first of them until the deadline, counted from
    /// now; then there is none.
    ///
    /// # Errors
    /// As [`Intake::take`]; `Closed` and `Poisoned` end a wait.
    pub fn take_wait(&self, count: usize, deadline: Duration) -> Result<Vec<Taken<C>>> {
        let mut waiting = self.queue.wait(deadline);
        while let Some((listening, until_ms)) = waiting.look(|| self.take_or_when(count))? {
            self.queue.handle.engine.sleep(listening, until_ms);
        }
        Ok(waiting.found)
    }

    /// As [`Intake::take_wait`]. A future that is dropped holds no job. A poll may read the disk,
    /// and waits for it where a payload is not as durable yet as the intake says.
    ///
    /// # Errors
    /// As [`Intake::take_wait`].
    pub async fn take_wait_async(&self, count: usize, deadline: Duration) -> Result<Vec<Taken<C>>> {
        let engine = &self.queue.handle.engine;
        let mut waiting = self.queue.wait(deadline);
        while let Some((listening, until_ms)) = waiting.look(|| self.take_or_when(count))? {
            let slept = engine.sleep_async(&waiting.place, listening, until_ms);
            slept.await?;
        }
        Ok(waiting.found)
    }

    fn take_or_when(&self, count: usize) -> Result<Leased<Taken<C>>> {
        let mut taken = Leased {
            entries: Vec::new(),
            next_in: None,
        };
        loop {
            let leased = self.queue.lease_or_when(count - taken.entries.len())?;
            taken.next_in = leased.next_in;
            if leased.entries.is_empty() {
                return Ok(taken);
            }
            let mut rest = leased.entries.into_iter();
            while let Some(entry) = rest.next() {
                let failed = GiveBack::new(self, &entry);
                let claimed = self.claim(&entry);
                match claimed {
                    Ok(job) => {
                        failed.keep();
                        taken.entries.extend(job);
                    }
                    Err(error) => {
                        self.queue.give_back(rest.as_slice())?;
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Says what is known of a key. It may change the moment after.
    ///
    /// # Errors
    /// `Invalid`, `Damaged`, `Io`, `Closed`, `Poisoned`.
    pub fn status(&self, key: impl AsRef<[u8]>) -> Result<JobStatus> {
        let key = key.as_ref();
        let state = self.jobs.get(key)?;
        if !matches!(state, KeyState::Absent | KeyState::Failed { .. }) {
            return Ok(JobStatus::Begun(state));
        }
        Ok(match self.queued_entry(key)? {
            Some(queued) => JobStatus::Queued {
                failed_count: match state {
                    KeyState::Failed { attempt, .. } => attempt,
                    _ => 0,
                },
                since_ms: queued.state.at_ms,
            },
            // It may have ended between the two looks: job and payload end together.
            None => match self.jobs.get(key)? {
                KeyState::Absent => JobStatus::Unknown,
                state => JobStatus::Begun(state),
            },
        })
    }

    /// Waits until a submitted job has an end, and returns that; at the deadline, counted from now,
    /// what it is then. A key that is not known is answered at once.
    ///
    /// # Errors
    /// As [`Intake::status`]; `Closed` and `Poisoned` end a wait.
    pub fn wait_outcome(&self, key: impl AsRef<[u8]>, deadline: Duration) -> Result<JobStatus> {
        let (place, until_ms) = self.wait_for(key.as_ref(), deadline);
        loop {
            match self.look(key.as_ref(), &place, until_ms)? {
                ControlFlow::Break(status) => return Ok(status),
                ControlFlow::Continue((listening, until_ms)) => {
                    self.engine().sleep(listening, until_ms);
                }
            }
        }
    }

    /// As [`Intake::wait_outcome`]. A poll may read the disk.
    ///
    /// # Errors
    /// As [`Intake::wait_outcome`].
    pub async fn wait_outcome_async(
        &self,
        key: impl AsRef<[u8]>,
        deadline: Duration,
    ) -> Result<JobStatus> {
        let (place, until_ms) = self.wait_for(key.as_ref(), deadline);
        loop {
            match self.look(key.as_ref(), &place, until_ms)? {
                ControlFlow::Break(status) => return Ok(status),
                ControlFlow::Continue((listening, until_ms)) => {
                    let slept = self.engine().sleep_async(&place, listening, until_ms);
                    slept.await?;
                }
            }
        }
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.queue.handle.engine
    }

    fn wait_for(&self, key: &[u8], deadline: Duration) -> (Place<'_>, u64) {
        let engine = self.engine();
        let until_ms = engine.now().boot_ms.saturating_add(to_ms(deadline));
        let own_key = entry_key(self.jobs.name(), key, 0);
        let keys = [(self.jobs.space.id, key), (self.queue.space.id, &*own_key)];
        (engine.waits.watch(&keys), until_ms)
    }

    /// Looks at a key, and says until when to sleep. Registered before: no change behind the look
    /// is missed.
    fn look(
        &self,
        key: &[u8],
        place: &Place<'_>,
        until_ms: u64,
    ) -> Result<ControlFlow<JobStatus, (Listening, u64)>> {
        let listening = place.listen();
        let status = self.status(key)?;
        let now_ms = self.engine().now().boot_ms;
        if status.is_end() || now_ms >= until_ms {
            return Ok(ControlFlow::Break(status));
        }
        // A lease that lapses may leave a doubt, and no call says so.
        let lapse_ms = match status {
            JobStatus::Begun(KeyState::Pending { lease_left, .. }) if !lease_left.is_zero() => {
                now_ms.saturating_add(to_ms(lease_left))
            }
            _ => u64::MAX,
        };
        let until_ms = until_ms.min(lapse_ms);
        Ok(ControlFlow::Continue((listening, until_ms)))
    }

    /// Returns how much waits, and how long.
    ///
    /// # Errors
    /// `Closed`, `Poisoned`.
    pub fn stats(&self) -> Result<OutboxStats> {
        self.queue.stats()
    }
}

/// Returns what a submission is told of a job that has an end.
fn ended(state: KeyState) -> Option<Submitted> {
    Some(match state {
        KeyState::Done(done) => Submitted::Duplicate(done),
        KeyState::Rejected { error, .. } => Submitted::Rejected { error },
        KeyState::Dead { attempts, error } => Submitted::Dead { attempts, error },
        KeyState::InDoubt(doubt) => Submitted::InDoubt(doubt),
        _ => return None,
    })
}

fn full(max: u64) -> Error {
    Error::new(
        ErrorKind::Full,
        format!("too many jobs wait: queued_max={max}; let the broker deliver again later"),
    )
}
