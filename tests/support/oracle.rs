//! What the store must answer, worked out from the contract alone: no log, no index, no segments.
//!
//! The oracle is told of every call, of the answer's epoch where one was handed out, and of every
//! movement of the clocks. It keeps a journal of changes since the last call that was as durable
//! as a process kill needs, so that a kill can take back any suffix of them, and nothing else.

use std::collections::BTreeMap;
use std::time::Duration;

use idemlog::{
    Done, Doubt, Failure, Fingerprint, KeyState, NamespaceKind, Outcome, Owner, Previous, Probed,
    Resolution, Retention, Stamp,
};

/// The declaration of one namespace.
#[derive(Clone, Debug)]
pub struct Spec {
    pub name: String,
    pub kind: NamespaceKind,
    pub retention: Retention,
    pub lease_ms: u64,
    pub settle_ms: Option<u64>,
    pub attempts_max: Option<u32>,
    pub outcome_bytes_max: usize,
    pub sliding: bool,
    pub has_probe: bool,
}

/// What every state of a claimed key carries on.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    pub epoch: Stamp,
    pub attempt: u32,
    pub fingerprint: Option<Fingerprint>,
    pub first_seen_s: u64,
    /// Trusted time of this state.
    pub at_ms: u64,
}

/// A key's state. Absent is not stored.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    Seen,
    Pending {
        started: bool,
        detached: bool,
        /// Which opener granted it.
        opener: u64,
        lease_ms: u64,
        /// End of the lease by trusted time, for detached claims.
        until_ms: u64,
        /// End of the lease by the boot clock, for the others.
        until_boot_ms: u64,
        /// The owner has said that it does not know.
        unknown: bool,
        evidence: Vec<u8>,
    },
    Done(Outcome),
    Failed {
        error: Vec<u8>,
        not_before_ms: u64,
    },
    Rejected {
        error: Vec<u8>,
    },
    InDoubt {
        evidence: Vec<u8>,
    },
    Dead {
        error: Vec<u8>,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub common: Common,
    pub state: State,
    /// First trusted second at which it is not remembered; `None` is never.
    pub expires_s: Option<u64>,
}

/// The answer of a claim, with the guard replaced by its epoch.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    Granted {
        attempt: u32,
        how: How,
    },
    Busy {
        attempt: u32,
        owner: Owner,
        lease_left: Duration,
    },
    Duplicate(Done),
    Backoff {
        after: Duration,
        error: Vec<u8>,
    },
    Rejected {
        error: Vec<u8>,
    },
    Dead {
        attempts: u32,
        error: Vec<u8>,
    },
    InDoubt(Doubt),
    Mismatch,
}

#[derive(Clone, Debug, PartialEq)]
pub enum How {
    New,
    Takeover(Previous),
    Retry(Previous),
}

/// The answer of a call that changes a claimed key.
#[derive(Clone, Debug, PartialEq)]
pub enum Changed {
    Committed,
    AlreadyCommitted,
    Conflict(Done),
    Applied(KeyState),
    Fenced(KeyState),
    NotStarted,
    /// Applied, and what the key is now could not be read.
    Unseen,
}

/// How a claim is asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ask {
    pub fingerprint: Option<Fingerprint>,
    pub lease_ms: Option<u64>,
    pub detached: bool,
}

pub type Key = (usize, Vec<u8>);

#[derive(Clone, Debug, Default)]
pub struct Oracle {
    pub specs: Vec<Spec>,
    pub keys: BTreeMap<Key, Entry>,
    /// Trusted time.
    pub trusted_ms: u64,
    pub wall_ms: u64,
    pub boot_ms: u64,
    pub opener: u64,
    pub epoch_max: u64,
    /// Changes that a kill may take back, oldest first: what was there before each.
    pub journal: Vec<(Key, Option<Entry>)>,
}

impl Oracle {
    pub fn entry(&self, space: usize, key: &[u8]) -> Option<&Entry> {
        let entry = self.keys.get(&(space, key.to_vec()))?;
        let unsettled = matches!(entry.state, State::Pending { .. } | State::InDoubt { .. });
        let expired = entry.expires_s.is_some_and(|s| self.trusted_ms >= s * 1000);
        (unsettled || !expired).then_some(entry)
    }

    fn put(&mut self, space: usize, key: &[u8], entry: Option<Entry>) {
        let key = (space, key.to_vec());
        let before = match entry {
            Some(entry) => self.keys.insert(key.clone(), entry),
            None => self.keys.remove(&key),
        };
        self.journal.push((key, before));
    }

    /// Says that a kill loses nothing of what was answered so far.
    pub fn written(&mut self) {
        self.journal.clear();
    }

    /// Says that a kill does not lose this key's state, nor anything before it.
    pub fn pin(&mut self, space: usize, key: &[u8]) {
        let key = (space, key.to_vec());
        if let Some(last) = self
            .journal
            .iter()
            .rposition(|(changed, _)| *changed == key)
        {
            self.journal.drain(..=last);
        }
    }

    /// Takes back the newest change that a kill may have lost.
    pub fn lose_one(&mut self) -> Option<Key> {
        let (key, before) = self.journal.pop()?;
        match before {
            Some(entry) => self.keys.insert(key.clone(), entry),
            None => self.keys.remove(&key),
        };
        Some(key)
    }

    /// Takes back the newest change of a key, if it came at or after that place of the journal.
    pub fn lose_last_of(&mut self, key: &Key, from: usize) -> bool {
        let last = self.journal.iter().rposition(|(changed, _)| changed == key);
        let Some(at) = last.filter(|at| *at >= from) else {
            return false;
        };
        let (key, before) = self.journal.remove(at);
        match before {
            Some(entry) => self.keys.insert(key, entry),
            None => self.keys.remove(&key),
        };
        true
    }

    /// Returns the trusted time of the newest state that can be seen: the log has a record of it.
    pub fn newest_ms(&self) -> u64 {
        let seen = self
            .keys
            .keys()
            .filter_map(|(space, key)| self.entry(*space, key));
        seen.map(|entry| entry.common.at_ms).max().unwrap_or(0)
    }

    /// Says whether a kill could lose a prolonged retention, which nothing shows until it ends.
    pub fn risks_hidden_loss(&self) -> bool {
        self.journal.iter().any(|(_, before)| {
            before
                .as_ref()
                .is_some_and(|entry| matches!(entry.state, State::Seen | State::Done(_)))
        })
    }

    /// Returns the keys whose changes a kill may have lost.
    pub fn at_risk(&self) -> Vec<Key> {
        let mut keys: Vec<Key> = self.journal.iter().map(|(key, _)| key.clone()).collect();
        keys.sort();
        keys.dedup();
        keys
    }

    fn expires_s(&self, retention: Retention, after_ms: u64) -> Option<u64> {
        let Retention::For(length) = retention else {
            return None;
        };
        let from = self.trusted_ms.max(self.wall_ms) + after_ms;
        let end = from + length.as_nanos().div_ceil(1_000_000) as u64;
        Some(end.div_ceil(1000))
    }

    fn lease_left_ms(&self, entry: &Entry) -> u64 {
        let State::Pending {
            detached,
            opener,
            until_ms,
            until_boot_ms,
            unknown,
            ..
        } = &entry.state
        else {
            return 0;
        };
        match (unknown, detached) {
            (true, _) => 0,
            (_, true) => until_ms.saturating_sub(self.trusted_ms),
            (_, false) if *opener == self.opener => until_boot_ms.saturating_sub(self.boot_ms),
            _ => 0,
        }
    }

    fn is_in_doubt(&self, space: usize, entry: &Entry) -> bool {
        match entry.state {
            State::InDoubt { .. } => true,
            State::Pending { started: true, .. } => {
                self.specs[space].kind == NamespaceKind::NonRepeatable
                    && self.lease_left_ms(entry) == 0
            }
            _ => false,
        }
    }

    fn doubt(entry: &Entry) -> Doubt {
        let evidence = match &entry.state {
            State::InDoubt { evidence } | State::Pending { evidence, .. } => evidence.clone(),
            _ => Vec::new(),
        };
        let Common {
            epoch,
            attempt,
            at_ms,
            ..
        } = entry.common;
        Doubt {
            epoch,
            attempt,
            since_ms: at_ms,
            evidence,
        }
    }

    fn done(entry: &Entry, outcome: &Outcome) -> Done {
        Done {
            outcome: outcome.clone(),
            epoch: entry.common.epoch,
            attempt: entry.common.attempt,
            first_seen_ms: entry.common.first_seen_s * 1000,
            committed_at_ms: entry.common.at_ms,
        }
    }

    /// Returns what `get` answers.
    pub fn get(&self, space: usize, key: &[u8]) -> KeyState {
        self.entry(space, key)
            .map_or(KeyState::Absent, |entry| self.view(space, entry))
    }

    fn view(&self, space: usize, entry: &Entry) -> KeyState {
        if self.is_in_doubt(space, entry) {
            return KeyState::InDoubt(Self::doubt(entry));
        }
        let Common {
            epoch,
            attempt,
            at_ms,
            ..
        } = entry.common;
        match &entry.state {
            State::Seen => KeyState::Seen,
            State::Pending {
                started,
                detached,
                evidence,
                ..
            } => KeyState::Pending {
                epoch,
                attempt,
                started: *started,
                owner: Owner {
                    pid: std::process::id(),
                    detached: *detached,
                },
                lease_left: Duration::from_millis(self.lease_left_ms(entry)),
                since_ms: at_ms,
                evidence: evidence.clone(),
            },
            State::Done(outcome) => KeyState::Done(Self::done(entry, outcome)),
            State::Failed {
                error,
                not_before_ms,
            } => KeyState::Failed {
                epoch,
                attempt,
                error: error.clone(),
                retry_after: Duration::from_millis(not_before_ms.saturating_sub(self.trusted_ms)),
            },
            State::Rejected { error } => KeyState::Rejected {
                epoch,
                error: error.clone(),
            },
            State::Dead { error } => KeyState::Dead {
                attempts: attempt,
                error: error.clone(),
            },
            State::InDoubt { .. } => KeyState::InDoubt(Self::doubt(entry)),
        }
    }

    /// Lists pending keys, or keys in doubt: namespace, key, state, age.
    pub fn list(&self, in_doubt: bool) -> Vec<(String, Vec<u8>, KeyState, Duration)> {
        let unsettled = self.keys.iter().filter_map(|((space, key), entry)| {
            let state = self.view(*space, entry);
            let wanted = match state {
                KeyState::InDoubt(_) => in_doubt,
                KeyState::Pending { .. } => !in_doubt,
                _ => false,
            };
            let age = Duration::from_millis(self.trusted_ms.saturating_sub(entry.common.at_ms));
            wanted.then(|| (self.specs[*space].name.clone(), key.clone(), state, age))
        });
        let mut list: Vec<_> = unsettled.collect();
        list.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
        list
    }

    /// Observes a key; `true` is new.
    pub fn observe(&mut self, space: usize, key: &[u8], retention: Option<Retention>) -> bool {
        let retention = retention.unwrap_or(self.specs[space].retention);
        let expires_s = self.expires_s(retention, 0);
        let known = self.entry(space, key).map(|entry| entry.expires_s);
        if let Some(before) = known {
            let longer = match (before, expires_s) {
                (None, _) => false,
                (Some(_), None) => true,
                (Some(before), Some(after)) => after > before,
            };
            if !self.specs[space].sliding || !longer {
                return false;
            }
        }
        let common = Common {
            epoch: Stamp::from_u64(0),
            attempt: 0,
            fingerprint: None,
            first_seen_s: 0,
            at_ms: 0,
        };
        self.put(
            space,
            key,
            Some(Entry {
                common,
                state: State::Seen,
                expires_s,
            }),
        );
        known.is_none()
    }

    /// Says whether a claim of this key asks the probe.
    pub fn asks_probe(&self, space: usize, key: &[u8], ask: &Ask) -> bool {
        let spec = &self.specs[space];
        let Some(entry) = self.entry(space, key) else {
            return false;
        };
        let State::Pending {
            started: true,
            lease_ms,
            ..
        } = entry.state
        else {
            return false;
        };
        spec.kind == NamespaceKind::Probeable
            && spec.has_probe
            && !mismatch(entry, ask)
            && self.lease_left_ms(entry) == 0
            && self.trusted_ms >= entry.common.at_ms + spec.settle_ms.unwrap_or(lease_ms)
    }

    /// Claims a key. `epoch` is the one that the store handed out, if it did; `probed` what the
    /// probe said.
    pub fn claim(
        &mut self,
        space: usize,
        key: &[u8],
        ask: &Ask,
        epoch: Option<Stamp>,
        probed: &Probed,
    ) -> Answer {
        let Some(entry) = self.entry(space, key).cloned() else {
            return self.grant(space, key, ask, None, epoch);
        };
        if mismatch(&entry, ask) {
            return Answer::Mismatch;
        }
        let Common { attempt, .. } = entry.common;
        match &entry.state {
            State::Done(outcome) => {
                let answer = Answer::Duplicate(Self::done(&entry, outcome));
                self.prolong(space, key, &entry);
                answer
            }
            State::Rejected { error } => Answer::Rejected {
                error: error.clone(),
            },
            State::Dead { error } => Answer::Dead {
                attempts: attempt,
                error: error.clone(),
            },
            State::InDoubt { .. } => Answer::InDoubt(Self::doubt(&entry)),
            State::Failed {
                error,
                not_before_ms,
            } => match not_before_ms.saturating_sub(self.trusted_ms) {
                0 => self.grant(space, key, ask, Some(&entry), epoch),
                ms => Answer::Backoff {
                    after: Duration::from_millis(ms),
                    error: error.clone(),
                },
            },
            State::Pending { .. } => self.claim_pending(space, key, ask, &entry, epoch, probed),
            State::Seen => unreachable!("filters have no claims"),
        }
    }

    /// In a sliding window a duplicate is remembered from now on, if that is longer.
    fn prolong(&mut self, space: usize, key: &[u8], entry: &Entry) {
        let expires_s = self.expires_s(self.specs[space].retention, 0);
        let longer = match (entry.expires_s, expires_s) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(before), Some(after)) => after > before,
        };
        if self.specs[space].sliding && longer {
            self.put(
                space,
                key,
                Some(Entry {
                    expires_s,
                    ..entry.clone()
                }),
            );
        }
    }

    fn claim_pending(
        &mut self,
        space: usize,
        key: &[u8],
        ask: &Ask,
        entry: &Entry,
        epoch: Option<Stamp>,
        probed: &Probed,
    ) -> Answer {
        let State::Pending {
            started,
            detached,
            lease_ms,
            unknown,
            ..
        } = entry.state
        else {
            unreachable!("only for pending keys")
        };
        let busy = |ms: u64| Answer::Busy {
            attempt: entry.common.attempt,
            owner: Owner {
                pid: std::process::id(),
                detached,
            },
            lease_left: Duration::from_millis(ms),
        };
        let left_ms = self.lease_left_ms(entry);
        if left_ms > 0 {
            return busy(left_ms);
        }
        if !started {
            return self.grant(space, key, ask, Some(entry), epoch);
        }
        let spec = &self.specs[space];
        match spec.kind {
            NamespaceKind::NonRepeatable => self.settle_in_doubt(space, key, entry, unknown),
            NamespaceKind::Probeable => {
                let settled_ms = entry.common.at_ms + spec.settle_ms.unwrap_or(lease_ms);
                if settled_ms > self.trusted_ms {
                    return busy(settled_ms - self.trusted_ms);
                }
                match probed {
                    Probed::Applied(outcome) if spec.has_probe => {
                        let done = self.finish(
                            space,
                            entry,
                            State::Done(Outcome::Kept(outcome.clone())),
                            None,
                        );
                        let State::Done(kept) = &done.state else {
                            unreachable!()
                        };
                        let answer = Answer::Duplicate(Self::done(&done, kept));
                        self.put(space, key, Some(done));
                        answer
                    }
                    Probed::NotApplied if spec.has_probe => {
                        self.grant(space, key, ask, Some(entry), epoch)
                    }
                    _ => self.settle_in_doubt(space, key, entry, unknown),
                }
            }
            _ => self.grant(space, key, ask, Some(entry), epoch),
        }
    }

    fn settle_in_doubt(
        &mut self,
        space: usize,
        key: &[u8],
        entry: &Entry,
        unknown: bool,
    ) -> Answer {
        let State::Pending { evidence, .. } = &entry.state else {
            unreachable!()
        };
        let mut next = Entry {
            common: entry.common.clone(),
            state: State::InDoubt {
                evidence: evidence.clone(),
            },
            expires_s: None,
        };
        if unknown {
            next.common.at_ms = self.trusted_ms;
        }
        let doubt = Self::doubt(&next);
        self.put(space, key, Some(next));
        Answer::InDoubt(doubt)
    }

    fn grant(
        &mut self,
        space: usize,
        key: &[u8],
        ask: &Ask,
        old: Option<&Entry>,
        epoch: Option<Stamp>,
    ) -> Answer {
        let spec = &self.specs[space];
        if let Some(old) = old
            && spec
                .attempts_max
                .is_some_and(|max| old.common.attempt >= max)
        {
            let error = error_of(old);
            let dead = self.finish(
                space,
                old,
                State::Dead {
                    error: error.clone(),
                },
                None,
            );
            self.put(space, key, Some(dead));
            return Answer::Dead {
                attempts: old.common.attempt,
                error,
            };
        }
        let attempt = old.map_or(0, |old| old.common.attempt) + 1;
        let how = match old {
            None => How::New,
            Some(old) => {
                let (started, evidence) = match &old.state {
                    State::Pending {
                        started, evidence, ..
                    } => (*started, evidence.clone()),
                    _ => (false, Vec::new()),
                };
                let Common { epoch, attempt, .. } = old.common;
                let error = error_of(old);
                let previous = Previous {
                    epoch,
                    attempt,
                    started,
                    evidence,
                    error,
                };
                match old.state {
                    State::Failed { .. } => How::Retry(previous),
                    _ => How::Takeover(previous),
                }
            }
        };
        let Some(epoch) = epoch else {
            // The store has handed out nothing: the caller will see that the answers differ.
            return Answer::Granted { attempt, how };
        };
        assert!(
            epoch.get() > self.epoch_max,
            "epoch {epoch} is not above {}",
            self.epoch_max
        );
        self.epoch_max = epoch.get();
        let lease_ms = ask.lease_ms.unwrap_or(spec.lease_ms);
        let entry = Entry {
            common: Common {
                epoch,
                attempt,
                fingerprint: ask
                    .fingerprint
                    .or(old.and_then(|old| old.common.fingerprint)),
                first_seen_s: old.map_or(self.trusted_ms / 1000, |old| old.common.first_seen_s),
                at_ms: self.trusted_ms,
            },
            state: State::Pending {
                started: false,
                detached: ask.detached,
                opener: self.opener,
                lease_ms,
                until_ms: self.trusted_ms + lease_ms,
                until_boot_ms: self.boot_ms + lease_ms,
                unknown: false,
                evidence: Vec::new(),
            },
            expires_s: None,
        };
        self.put(space, key, Some(entry));
        Answer::Granted { attempt, how }
    }

    /// Makes a settled state of the same epoch, from now.
    fn finish(
        &self,
        space: usize,
        entry: &Entry,
        state: State,
        retention: Option<Retention>,
    ) -> Entry {
        let after_ms = match &state {
            State::Failed { not_before_ms, .. } => not_before_ms - self.trusted_ms,
            _ => 0,
        };
        let retention = retention.unwrap_or(self.specs[space].retention);
        Entry {
            common: Common {
                at_ms: self.trusted_ms,
                ..entry.common.clone()
            },
            state,
            expires_s: self.expires_s(retention, after_ms),
        }
    }

    fn held(&self, space: usize, key: &[u8], epoch: Stamp, in_doubt_too: bool) -> Option<Entry> {
        let entry = self
            .entry(space, key)
            .filter(|entry| entry.common.epoch == epoch)?;
        match entry.state {
            State::Pending { .. } => Some(entry.clone()),
            State::InDoubt { .. } if in_doubt_too => Some(entry.clone()),
            _ => None,
        }
    }

    fn fenced(&self, space: usize, key: &[u8]) -> Changed {
        Changed::Fenced(self.get(space, key))
    }

    fn apply(&mut self, space: usize, key: &[u8], entry: Option<Entry>) -> Changed {
        self.put(space, key, entry);
        Changed::Applied(self.get(space, key))
    }

    pub fn start(&mut self, space: usize, key: &[u8], epoch: Stamp, evidence: &[u8]) -> Changed {
        let Some(mut entry) = self.held(space, key, epoch, false) else {
            return self.fenced(space, key);
        };
        entry.common.at_ms = self.trusted_ms;
        if let State::Pending {
            started,
            until_ms,
            until_boot_ms,
            lease_ms,
            evidence: kept,
            unknown,
            opener,
            ..
        } = &mut entry.state
        {
            *started = true;
            *unknown = false;
            *opener = self.opener;
            *until_ms = self.trusted_ms + *lease_ms;
            *until_boot_ms = self.boot_ms + *lease_ms;
            *kept = evidence.to_vec();
        }
        self.apply(space, key, Some(entry))
    }

    pub fn renew(&mut self, space: usize, key: &[u8], epoch: Stamp, lease: u64) -> Changed {
        let Some(mut entry) = self.held(space, key, epoch, false) else {
            return self.fenced(space, key);
        };
        if let State::Pending {
            until_ms,
            until_boot_ms,
            lease_ms,
            unknown,
            opener,
            ..
        } = &mut entry.state
        {
            *lease_ms = lease;
            *unknown = false;
            *until_ms = self.trusted_ms + lease;
            *until_boot_ms = self.boot_ms + lease;
            // Whoever renews is alive, in this process.
            *opener = self.opener;
        }
        self.apply(space, key, Some(entry))
    }

    pub fn commit(
        &mut self,
        space: usize,
        key: &[u8],
        epoch: Stamp,
        outcome: &Outcome,
        retention: Option<Retention>,
    ) -> Changed {
        if let Some(entry) = self.entry(space, key)
            && entry.common.epoch == epoch
            && let State::Done(kept) = &entry.state
        {
            return if kept == outcome {
                Changed::AlreadyCommitted
            } else {
                Changed::Conflict(Self::done(entry, kept))
            };
        }
        let Some(entry) = self.held(space, key, epoch, true) else {
            return self.fenced(space, key);
        };
        let durable = matches!(
            self.specs[space].kind,
            NamespaceKind::Probeable | NamespaceKind::NonRepeatable
        );
        if durable && matches!(entry.state, State::Pending { started: false, .. }) {
            return Changed::NotStarted;
        }
        let done = self.finish(space, &entry, State::Done(outcome.clone()), retention);
        self.put(space, key, Some(done));
        Changed::Committed
    }

    pub fn fail(&mut self, space: usize, key: &[u8], epoch: Stamp, failure: &Failure) -> Changed {
        let Some(entry) = self.held(space, key, epoch, true) else {
            return self.fenced(space, key);
        };
        let next = match failure {
            Failure::Release => None,
            Failure::Permanent { error } => Some(self.finish(
                space,
                &entry,
                State::Rejected {
                    error: error.clone(),
                },
                None,
            )),
            Failure::Retryable { after, error } => {
                Some(self.failed(space, &entry, after.as_millis() as u64, error.clone()))
            }
            Failure::Unknown { evidence } => self.unknown(space, &entry, evidence),
        };
        self.apply(space, key, next)
    }

    fn failed(&self, space: usize, entry: &Entry, after_ms: u64, error: Vec<u8>) -> Entry {
        let last = self.specs[space]
            .attempts_max
            .is_some_and(|max| entry.common.attempt >= max);
        let state = if last {
            State::Dead { error }
        } else {
            State::Failed {
                error,
                not_before_ms: self.trusted_ms + after_ms,
            }
        };
        self.finish(space, entry, state, None)
    }

    fn unknown(&self, space: usize, entry: &Entry, said: &[u8]) -> Option<Entry> {
        let kind = self.specs[space].kind;
        let waits = matches!(
            kind,
            NamespaceKind::Probeable | NamespaceKind::NonRepeatable
        );
        let mut next = entry.clone();
        match &mut next.state {
            // Before the start nothing can have happened.
            State::Pending { started: false, .. } if waits => return None,
            State::Pending { evidence, .. } | State::InDoubt { evidence }
                if kind == NamespaceKind::NonRepeatable =>
            {
                let evidence = join(evidence, said);
                next.state = State::InDoubt { evidence };
                next.common.at_ms = self.trusted_ms;
            }
            State::Pending {
                evidence, unknown, ..
            } if kind == NamespaceKind::Probeable => {
                *evidence = join(evidence, said);
                *unknown = true;
            }
            _ if kind == NamespaceKind::Probeable => {}
            _ => return Some(self.failed(space, entry, 0, said.to_vec())),
        }
        Some(next)
    }

    pub fn resolve(
        &mut self,
        space: usize,
        key: &[u8],
        epoch: Stamp,
        resolution: &Resolution,
    ) -> Changed {
        let found = self
            .entry(space, key)
            .filter(|entry| entry.common.epoch == epoch)
            .cloned();
        match found {
            Some(entry) if self.is_in_doubt(space, &entry) => {
                let next = match resolution {
                    Resolution::Applied(outcome) => {
                        let state = State::Done(Outcome::Kept(outcome.clone()));
                        self.finish(space, &entry, state, None)
                    }
                    Resolution::NotApplied => {
                        self.failed(space, &entry, 0, b"not applied".to_vec())
                    }
                    Resolution::Abandon => {
                        let state = State::Dead {
                            error: b"abandoned".to_vec(),
                        };
                        self.finish(space, &entry, state, None)
                    }
                };
                self.apply(space, key, Some(next))
            }
            // Resolving twice with the same outcome is no conflict.
            Some(Entry {
                state: State::Done(Outcome::Kept(kept)),
                ..
            }) if matches!(resolution, Resolution::Applied(outcome) if *outcome == kept) => {
                Changed::Applied(self.get(space, key))
            }
            _ => self.fenced(space, key),
        }
    }

    pub fn forget(&mut self, space: usize, key: &[u8], forced: bool) -> Changed {
        let Some(entry) = self.entry(space, key) else {
            return Changed::Applied(KeyState::Absent);
        };
        let unsettled = matches!(entry.state, State::Pending { .. } | State::InDoubt { .. });
        if unsettled && !forced {
            return self.fenced(space, key);
        }
        self.apply(space, key, None)
    }
}

fn mismatch(entry: &Entry, ask: &Ask) -> bool {
    matches!((entry.common.fingerprint, ask.fingerprint), (Some(a), Some(b)) if a != b)
}

fn error_of(entry: &Entry) -> Vec<u8> {
    match &entry.state {
        State::Failed { error, .. } => error.clone(),
        _ => Vec::new(),
    }
}

fn join(old: &[u8], new: &[u8]) -> Vec<u8> {
    if old.is_empty() || new.is_empty() {
        return [old, new].concat();
    }
    [old, b"\n", new].concat()
}
