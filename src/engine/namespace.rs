//! Namespaces: a filter, or claims of one effect class, with the calls each of them has.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::claim::{Claim, ClaimVerdict, Commit};
use super::class::{EffectClass, Probeable};
use super::handle::Handle;
use super::update::{Basis, Decided, Levels, Step, Write};
use super::wait::Asking;
use crate::clock::Now;
use crate::error::{Error, Result};
use crate::format::record::Kind;
use crate::key::{Fingerprint, NamespaceKind, check_key, derive_key};
use crate::model::claim as model;
use crate::model::claim::{ChangeDecision, ClaimDecision, Entry, Env, Request};
use crate::options::{Durability, Event, NamespaceOptions};
use crate::stamp::Stamp;
use crate::verdict::{Change, Doubt, Failure, KeyState, Probed, Resolution};

/// A namespace as its handles share it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) id: u16,
    pub(crate) name: String,
    pub(crate) kind: NamespaceKind,
    pub(crate) options: NamespaceOptions,
}

/// How one claim is made.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct ClaimOptions {
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) lease: Option<Duration>,
    pub(crate) detached: bool,
    pub(crate) auto_renew: Option<Duration>,
}

impl ClaimOptions {
    /// Returns the defaults: no fingerprint, the namespace's lease, ended with this process.
    pub fn new() -> Self {
        ClaimOptions::default()
    }

    /// Sets the hash of the message's payload, compared with the one of the key's first claim.
    pub fn fingerprint(mut self, fingerprint: Fingerprint) -> Self {
        self.fingerprint = Some(fingerprint);
        self
    }

    /// Sets the lease. Default: the namespace's.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Sets whether the claim outlives this process; only its lease ends it then. Default: no.
    pub fn detached(mut self, detached: bool) -> Self {
        self.detached = detached;
        self
    }

    /// Has the store renew the claim's lease as long as its guard lives, until `ceiling` after the
    /// claim; see [`Claim::keep_alive`]. Default: it does not.
    pub fn auto_renew(mut self, ceiling: Duration) -> Self {
        self.auto_renew = Some(ceiling);
        self
    }
}

/// What a probe is asked about: a started effect whose owner is gone.
#[derive(Clone, Debug)]
pub struct ProbeRequest<'a> {
    /// The namespace's name.
    pub namespace: &'a str,
    /// The key.
    pub key: &'a [u8],
    /// The attempt in question, with what `start` left behind.
    pub doubt: Doubt,
}

impl ProbeRequest<'_> {
    /// Returns the key that the attempt gave the target as the target's own idempotency key.
    pub fn derived_key(&self, step: &str) -> String {
        derive_key(self.namespace, self.key, step)
    }
}

type Probe = Arc<dyn Fn(&ProbeRequest<'_>) -> Probed + Send + Sync>;

/// Claims of one effect class. Clones are handles of the same namespace.
pub struct Namespace<C> {
    pub(crate) handle: Arc<Handle>,
    pub(crate) space: Arc<Space>,
    probe: Option<Probe>,
    class: PhantomData<fn() -> C>,
}

impl<C> Clone for Namespace<C> {
    fn clone(&self) -> Self {
        Namespace {
            handle: Arc::clone(&self.handle),
            space: Arc::clone(&self.space),
            probe: self.probe.clone(),
            class: PhantomData,
        }
    }
}

impl<C> fmt::Debug for Namespace<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Namespace")
            .field("space", &self.space)
            .finish_non_exhaustive()
    }
}

pub(crate) fn to_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// What a claim's decision comes to, before it is turned into a verdict with a guard.
#[derive(Debug)]
pub(crate) enum Answer {
    Granted {
        previous: Option<crate::verdict::Previous>,
        retry: bool,
    },
    /// The key's state, as it is after the call; `Busy` for how long.
    State {
        state: KeyState,
        busy_ms: Option<u64>,
    },
    Probe(Doubt),
    Mismatch,
}

impl<C: EffectClass> Namespace<C> {
    pub(crate) fn new(handle: Arc<Handle>, space: Arc<Space>) -> Self {
        Namespace {
            handle,
            space,
            probe: None,
            class: PhantomData,
        }
    }

    /// Returns the namespace's name.
    pub fn name(&self) -> &str {
        &self.space.name
    }

    /// Claims the right to run the effect of this key, under the namespace's lease.
    ///
    /// The verdict excludes all other claimers of the key while the claim's owner lives and its
    /// lease has not lapsed. It is not durable: a crash right after it is a crash before it.
    ///
    /// # Errors
    /// `Invalid` for an empty or oversized key, `Full` without room for a new claim, `Poisoned`,
    /// `Closed`, `Damaged`, `Io`.
    pub fn claim(&self, key: impl AsRef<[u8]>) -> Result<ClaimVerdict<C>> {
        self.claim_with(key, &ClaimOptions::new())
    }

    /// Claims with a fingerprint, another lease, or detached.
    ///
    /// # Errors
    /// As [`Namespace::claim`].
    pub fn claim_with(
        &self,
        key: impl AsRef<[u8]>,
        options: &ClaimOptions,
    ) -> Result<ClaimVerdict<C>> {
        let key = key.as_ref();
        check_key(key)?;
        let (decided, basis) = self.claim_undurable(key, &self.request(options), true)?;
        self.handle.engine.ensure_basis(basis)?;
        self.granted(key, decided, options)
    }

    /// Decides a claim and does not wait. Who may not be granted it, because others wait longer,
    /// is answered `Absent` where it could have been, and leaves the probe to them.
    pub(crate) fn claim_undurable(
        &self,
        key: &[u8],
        request: &Request,
        may_be_granted: bool,
    ) -> Result<(Decided<Answer>, Basis)> {
        let engine = &self.handle.engine;
        let (decided, basis) = engine.update_undurable(
            false,
            &self.space,
            key,
            self.claim_levels(request.detached),
            self.space.options.retention,
            |entry, env| match self.decide_claim(entry, env, request) {
                Step::Write(_, Answer::Granted { .. }) | Step::Answer(Answer::Probe(_))
                    if !may_be_granted =>
                {
                    Step::Answer(Answer::State {
                        state: KeyState::Absent,
                        busy_ms: None,
                    })
                }
                step => step,
            },
        )?;
        let (decided, basis) = match decided.answer {
            Answer::Probe(doubt) => self.claim_after_probe(key, &doubt, request)?,
            _ => (decided, basis),
        };
        // A state that the call has settled is told only when it is as durable as such states are.
        let is_settled =
            decided.written.is_some() && !matches!(decided.answer, Answer::Granted { .. });
        let level = if is_settled {
            self.level(None)
        } else {
            basis.level
        };
        Ok((decided, Basis { level, ..basis }))
    }

    /// Turns a decision into what the caller gets, and does for the guard what was asked.
    pub(crate) fn granted(
        &self,
        key: &[u8],
        decided: Decided<Answer>,
        options: &ClaimOptions,
    ) -> Result<ClaimVerdict<C>> {
        let mut verdict = self.verdict(key, decided, options.detached);
        if let (Some(ceiling), Some(claim)) = (options.auto_renew, verdict.claim_mut()) {
            claim.keep_alive(ceiling)?;
        }
        Ok(verdict)
    }

    pub(crate) fn request(&self, options: &ClaimOptions) -> Request {
        Request {
            fingerprint: options.fingerprint,
            lease_ms: to_ms(options.lease.unwrap_or(self.space.options.lease)),
            detached: options.detached,
        }
    }

    /// A claim waits for no flush. It must survive a kill where attempts are counted (a message
    /// that kills its worker must reach its limit) and where it outlives the process. An answer
    /// without a claim rests on a record that must be as durable as the namespace says.
    pub(crate) fn claim_levels(&self, detached: bool) -> Levels {
        let counted = self.space.options.attempts_max.is_some();
        let write = if counted || detached {
            Durability::Process
        } else {
            Durability::Buffered
        };
        Levels {
            write,
            answer: self.level(None),
        }
    }

    pub(crate) fn level(&self, call: Option<Durability>) -> Durability {
        self.handle
            .engine
            .level(self.space.options.durability, call)
    }

    pub(crate) fn decide_claim(
        &self,
        entry: Option<&Entry>,
        env: &Env,
        request: &Request,
    ) -> Step<Answer> {
        self.step(model::claim(entry, env, request), entry, env, request)
    }

    fn step(
        &self,
        decision: ClaimDecision,
        entry: Option<&Entry>,
        env: &Env,
        request: &Request,
    ) -> Step<Answer> {
        match decision {
            ClaimDecision::Grant {
                entry,
                previous,
                retry,
            } => {
                let deadline = env.now.boot_ms.saturating_add(request.lease_ms);
                let write = Write {
                    entry,
                    is_claim: true,
                    deadline_boot_ms: Some(deadline),
                };
                Step::Write(write, Answer::Granted { previous, retry })
            }
            ClaimDecision::Settle { entry } => {
                let state = model::view(Some(&entry), env);
                let write = Write {
                    entry,
                    is_claim: false,
                    deadline_boot_ms: None,
                };
                Step::Write(
                    write,
                    Answer::State {
                        state,
                        busy_ms: None,
                    },
                )
            }
            ClaimDecision::Probe { doubt } if self.probe.is_some() => {
                Step::Answer(Answer::Probe(doubt))
            }
            // Nobody to ask: it is in doubt, and says so until somebody resolves it.
            ClaimDecision::Probe { doubt } => {
                let unknown = model::probed(entry, env, doubt.epoch, &Probed::Unknown, request);
                match unknown {
                    Some(decision) => self.step(decision, entry, env, request),
                    None => Step::Answer(Answer::State {
                        state: KeyState::InDoubt(doubt),
                        busy_ms: None,
                    }),
                }
            }
            ClaimDecision::Answer { busy_ms } => {
                let state = model::view(entry, env);
                let prolonged = entry
                    .filter(|entry| self.space.options.sliding && entry.kind == Kind::Done)
                    .and_then(|entry| entry.prolonged(env.expires_at_s()));
                if let Some(entry) = prolonged {
                    let write = Write {
                        entry,
                        is_claim: false,
                        deadline_boot_ms: None,
                    };
                    return Step::Write(write, Answer::State { state, busy_ms });
                }
                Step::Answer(Answer::State { state, busy_ms })
            }
            ClaimDecision::Mismatch => Step::Answer(Answer::Mismatch),
        }
    }

    /// Asks the probe, with no lock held, and decides by its answer; if the key has changed
    /// meanwhile, the claim is decided anew, without asking again.
    fn claim_after_probe(
        &self,
        key: &[u8],
        doubt: &Doubt,
        request: &Request,
    ) -> Result<(Decided<Answer>, Basis)> {
        let found = self.ask(key, doubt)?;
        self.handle.engine.update_undurable(
            true,
            &self.space,
            key,
            self.claim_levels(request.detached),
            self.space.options.retention,
            |entry, env| self.decide_probed(entry, env, (doubt.epoch, &found), request),
        )
    }

    /// Asks the probe, with no lock held.
    pub(crate) fn ask(&self, key: &[u8], doubt: &Doubt) -> Result<Probed> {
        let Some(probe) = &self.probe else {
            return Ok(Probed::Unknown);
        };
        let found = {
            let _asking = Asking::begin(&self.handle.engine, &self.space, key)?;
            probe(&ProbeRequest {
                namespace: &self.space.name,
                key,
                doubt: doubt.clone(),
            })
        };
        if let Probed::Applied(outcome) = &found {
            self.check_outcome(key, outcome.len())?;
        }
        Ok(found)
    }

    /// Decides by what the probe has found out about an epoch, or anew if the key has changed
    /// meanwhile.
    pub(crate) fn decide_probed(
        &self,
        entry: Option<&Entry>,
        env: &Env,
        (epoch, found): (Stamp, &Probed),
        request: &Request,
    ) -> Step<Answer> {
        match model::probed(entry, env, epoch, found, request) {
            Some(decision) => self.step(decision, entry, env, request),
            None => match self.decide_claim(entry, env, request) {
                Step::Answer(Answer::Probe(doubt)) => Step::Answer(Answer::State {
                    state: KeyState::InDoubt(doubt),
                    busy_ms: Some(1),
                }),
                step => step,
            },
        }
    }

    /// A claim waits for nothing, but a state that a call has settled (done by a probe or
    /// prolonged, in doubt, dead) is told only when it is durable: this is what it rests on.
    pub(crate) fn settled_basis<'a>(
        &self,
        decided: impl IntoIterator<Item = &'a Decided<Answer>>,
    ) -> Option<Basis> {
        let settled = decided
            .into_iter()
            .filter(|decided| !matches!(decided.answer, Answer::Granted { .. }))
            .filter_map(|decided| decided.written.as_ref().map(|(_, position)| *position))
            .max()?;
        let core = self.handle.engine.core();
        Some(Basis {
            end: settled.after(),
            failures: crate::log::sync::FailureCount::new(core.failures),
            level: self.level(None),
        })
    }

    /// Turns a decision into what the caller gets.
    pub(crate) fn verdict(
        &self,
        key: &[u8],
        decided: Decided<Answer>,
        detached: bool,
    ) -> ClaimVerdict<C> {
        let engine = &self.handle.engine;
        match decided.answer {
            Answer::Granted { previous, retry } => {
                let entry = decided.written.map(|(entry, _)| entry);
                let (epoch, attempt, lease_ms) = entry.map_or((Stamp::from_u64(0), 0, 0), |e| {
                    (e.epoch(), e.state.attempt, e.state.lease_ms)
                });
                let claim = Claim::new(self, key, epoch, attempt, detached, u64::from(lease_ms));
                match previous {
                    None => {
                        engine.counters.new.add(1);
                        ClaimVerdict::New(claim)
                    }
                    Some(previous) if retry => ClaimVerdict::Retry { claim, previous },
                    Some(previous) => {
                        engine.counters.takeovers.add(1);
                        engine.tell(Event::Takeover {
                            namespace: self.space.name.clone(),
                            key: key.to_vec(),
                            attempt,
                        });
                        ClaimVerdict::Takeover { claim, previous }
                    }
                }
            }
            Answer::Mismatch => ClaimVerdict::Mismatch,
            Answer::Probe(doubt) => ClaimVerdict::InDoubt(doubt),
            Answer::State { state, busy_ms } => {
                if decided.written.is_some() && matches!(state, KeyState::Dead { .. }) {
                    self.tell_dead(key);
                }
                if matches!(state, KeyState::Done(_)) {
                    engine.counters.duplicates.add(1);
                }
                ClaimVerdict::of_state(state, busy_ms)
            }
        }
    }

    fn tell_dead(&self, key: &[u8]) {
        let namespace = self.space.name.clone();
        self.handle.engine.tell(Event::Dead {
            namespace,
            key: key.to_vec(),
        });
    }

    /// Reads the state of a key. It may change the moment after.
    ///
    /// # Errors
    /// `Invalid`, `Damaged`, `Io`, `Closed`; `Poisoned` where the answer would rest on a record
    /// that may not be durable, or on there being none.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<KeyState> {
        self.handle.engine.get(&self.space, key.as_ref())
    }

    /// Ends the doubt about a key: somebody found out what became of this epoch.
    ///
    /// # Errors
    /// `Invalid` for a bad key or an outcome over the limit, `Poisoned`, `Closed`, `Io`.
    pub fn resolve(
        &self,
        key: impl AsRef<[u8]>,
        epoch: Stamp,
        resolution: Resolution,
    ) -> Result<Change> {
        let key = key.as_ref();
        self.check_resolution(key, &resolution)?;
        self.change(key, self.level(None), None, |entry, env| {
            model::resolve(entry, env, epoch, &resolution)
        })
    }

    pub(crate) fn check_resolution(&self, key: &[u8], resolution: &Resolution) -> Result<()> {
        check_key(key)?;
        match resolution {
            Resolution::Applied(outcome) => self.check_outcome(key, outcome.len()),
            _ => Ok(()),
        }
    }

    /// Makes a key absent, durably. A pending or in-doubt key is refused unless `forced`; then
    /// its owner is fenced.
    ///
    /// # Errors
    /// `Invalid`, `Poisoned`, `Closed`, `Io`.
    pub fn forget(&self, key: impl AsRef<[u8]>, forced: bool) -> Result<Change> {
        let key = key.as_ref();
        check_key(key)?;
        self.change(key, self.level(None), None, |entry, _| {
            model::forget(entry, forced)
        })
    }

    pub(crate) fn check_outcome(&self, key: &[u8], bytes: usize) -> Result<()> {
        let max = self.space.options.outcome_bytes_max;
        if bytes > max {
            return Err(Error::invalid(format!(
                "outcome over the limit: bytes={bytes} bytes_max={max} key={}; commit without \
                 outcome, or raise outcome_bytes_max",
                crate::key::show_key(key)
            )));
        }
        Ok(())
    }

    /// Carries out a change of a claim's owner or of somebody who resolves or forgets.
    pub(crate) fn change(
        &self,
        key: &[u8],
        level: Durability,
        lease_ms: Option<u64>,
        decide: impl FnMut(Option<&Entry>, &Env) -> ChangeDecision,
    ) -> Result<Change> {
        let (change, basis) = self.change_undurable(key, level, lease_ms, decide)?;
        self.handle.engine.ensure_basis(basis)?;
        Ok(self.told(key, change))
    }

    /// The same without the wait at the end.
    pub(crate) fn change_undurable(
        &self,
        key: &[u8],
        level: Durability,
        lease_ms: Option<u64>,
        decide: impl FnMut(Option<&Entry>, &Env) -> ChangeDecision,
    ) -> Result<(Change, Basis)> {
        let engine = &self.handle.engine;
        let (decided, basis) = engine.change(&self.space, key, level, lease_ms, decide)?;
        Ok((decided.answer, basis))
    }

    /// Tells of a change what others want to know.
    pub(crate) fn told(&self, key: &[u8], change: Change) -> Change {
        if matches!(change, Change::Fenced { .. }) {
            self.tell_fenced(key);
        }
        if matches!(&change, Change::Applied(KeyState::Dead { .. })) {
            self.tell_dead(key);
        }
        change
    }

    pub(crate) fn tell_fenced(&self, key: &[u8]) {
        self.handle.engine.counters.fenced.add(1);
        let namespace = self.space.name.clone();
        self.handle.engine.tell(Event::Fenced {
            namespace,
            key: key.to_vec(),
        });
    }

    pub(crate) fn fail_epoch(
        &self,
        key: &[u8],
        epoch: Stamp,
        failure: &Failure,
        level: Option<Durability>,
    ) -> Result<Change> {
        let (change, basis) = self.fail_undurable(key, epoch, failure, level)?;
        self.handle.engine.ensure_basis(basis)?;
        Ok(self.told(key, change))
    }

    pub(crate) fn fail_undurable(
        &self,
        key: &[u8],
        epoch: Stamp,
        failure: &Failure,
        level: Option<Durability>,
    ) -> Result<(Change, Basis)> {
        // Where nothing waited for the disk a release need not wait either: a claim that comes
        // back after a crash is an orphan, and claimed again. One that was started would come
        // back in doubt.
        let level = match failure {
            Failure::Release if !C::KIND.starts_durably() => level.unwrap_or(Durability::Buffered),
            _ => self.level(level),
        };
        self.change_undurable(key, level, None, |entry, env| {
            model::fail(entry, env, epoch, failure)
        })
    }

    pub(crate) fn start_epoch(&self, key: &[u8], epoch: Stamp, evidence: &[u8]) -> Result<Change> {
        let (change, basis) = self.start_undurable(key, epoch, evidence)?;
        self.handle.engine.ensure_basis(basis)?;
        Ok(self.told(key, change))
    }

    pub(crate) fn start_undurable(
        &self,
        key: &[u8],
        epoch: Stamp,
        evidence: &[u8],
    ) -> Result<(Change, Basis)> {
        if evidence.len() > crate::key::EVIDENCE_BYTES_MAX {
            return Err(Error::invalid(format!(
                "evidence over the limit: bytes={} bytes_max={}",
                evidence.len(),
                crate::key::EVIDENCE_BYTES_MAX
            )));
        }
        let level = if C::KIND.starts_durably() {
            Durability::Power
        } else {
            Durability::Buffered
        };
        self.change_undurable(key, level, Some(0), |entry, env| {
            model::start(entry, env, epoch, evidence)
        })
    }

    pub(crate) fn renew_epoch(&self, key: &[u8], epoch: Stamp, lease: Duration) -> Result<Change> {
        let lease_ms = to_ms(lease);
        // A detached claim's lease is all that protects it after this process: written at once.
        self.change(key, Durability::Process, Some(lease_ms), |entry, env| {
            model::renew(entry, env, epoch, lease_ms)
        })
    }
}

impl Namespace<Probeable> {
    /// Sets the function that asks the target whether a started effect happened. It is called on
    /// the claiming thread, with no lock held, and may call back into the store.
    pub fn with_probe(
        mut self,
        probe: impl Fn(&ProbeRequest<'_>) -> Probed + Send + Sync + 'static,
    ) -> Self {
        self.probe = Some(Arc::new(probe));
        self
    }
}

impl Engine {
    /// Decides about a change and does not wait.
    pub(crate) fn change(
        &self,
        space: &Space,
        key: &[u8],
        level: Durability,
        lease_ms: Option<u64>,
        mut decide: impl FnMut(Option<&Entry>, &Env) -> ChangeDecision,
    ) -> Result<(Decided<Change>, Basis)> {
        let levels = Levels {
            write: level,
            answer: level,
        };
        self.update_undurable(
            true,
            space,
            key,
            levels,
            space.options.retention,
            |entry, env| change_step(decide(entry, env), entry, env, lease_ms),
        )
    }
}

pub(crate) fn change_step(
    decision: ChangeDecision,
    entry: Option<&Entry>,
    env: &Env,
    lease_ms: Option<u64>,
) -> Step<Change> {
    match decision {
        ChangeDecision::Write { entry: next, .. } => {
            let lease_ms = lease_ms.map(|ms| ms.max(u64::from(next.state.lease_ms)));
            let deadline_boot_ms = lease_ms.map(|ms| env.now.boot_ms.saturating_add(ms));
            // The lease that the change grants is what the new state is seen under.
            let env = Env {
                deadline_boot_ms,
                ..*env
            };
            let state = model::view(Some(&next), &env);
            Step::Write(
                Write {
                    entry: next,
                    is_claim: false,
                    deadline_boot_ms,
                },
                Change::Applied(state),
            )
        }
        ChangeDecision::AlreadyDone { same: true } => {
            Step::Answer(Change::Applied(model::view(entry, env)))
        }
        _ => Step::Answer(Change::Fenced {
            current: model::view(entry, env),
        }),
    }
}

/// The time of a decision, for callers outside of one.
pub(crate) fn age(now: &Now, since_ms: u64) -> Duration {
    Duration::from_millis(now.trusted_ms.saturating_sub(since_ms))
}

impl<C: EffectClass> Namespace<C> {
    pub(crate) fn commit_retention(&self, commit: &Commit) -> crate::options::Retention {
        commit.retention.unwrap_or(self.space.options.retention)
    }
}
