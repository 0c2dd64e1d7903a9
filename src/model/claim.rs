//! The life of a claim: claim, start, renew, commit, fail, probe, resolve, forget.
//!
//! Rules that hold for every function here:
//! A. A mutation is accepted only from the epoch that the key's newest record names.
//! B. A pending or in-doubt key is never answered "duplicate" and never expires.
//! C. The fingerprint is compared before anything else is told about the key.
//! D. `NonRepeatable` never goes from started to claimable without `resolve`.

use std::time::Duration;

use super::retention::DropTime;
use crate::clock::Now;
use crate::format::record::{
    FLAG_ATTACHED, FLAG_CARRIED, FLAG_DETACHED, FLAG_FINGERPRINT, FLAG_OUTCOME_DROPPED,
    FLAG_UNKNOWN, Kind, Record, StateHeader,
};
use crate::key::{Fingerprint, NamespaceKind};
use crate::options::Retention;
use crate::position::Position;
use crate::stamp::Stamp;
use crate::verdict::{Done, Doubt, Failure, KeyState, Outcome, Owner, Previous, Resolution};

/// A key's newest record, as owned data. `None` elsewhere stands for absent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) flags: u16,
    pub(crate) expires_at_s: u32,
    pub(crate) state: StateHeader,
    pub(crate) outcome: Vec<u8>,
    pub(crate) error: Vec<u8>,
    pub(crate) evidence: Vec<u8>,
    /// Trusted second from which on the outcome is not told any more; 0 is never.
    pub(crate) outcome_until_s: u32,
    /// What only an entry of an outbox has.
    pub(crate) queued: Option<Box<QueuedEntry>>,
}

/// See [`Entry::queued`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueuedEntry {
    /// Those with the same one are dispatched in order; empty for none.
    pub(crate) ordering: Vec<u8>,
    /// Where the entry was first appended; 0 if this record is the first.
    pub(crate) origin: u64,
    /// Log space to be kept free for what is written when it is worked on; not in the record.
    pub(crate) owed_bytes: u32,
}

impl Entry {
    pub(crate) fn new(kind: Kind) -> Self {
        Entry {
            kind,
            flags: 0,
            expires_at_s: 0,
            state: StateHeader::default(),
            outcome: Vec::new(),
            error: Vec::new(),
            evidence: Vec::new(),
            outcome_until_s: 0,
            queued: None,
        }
    }

    pub(crate) fn of_record(record: &Record<'_>) -> Self {
        let own = |part: Option<&[u8]>| part.unwrap_or_default().to_vec();
        Entry {
            kind: record.kind,
            // What is written next is no copy.
            flags: record.flags & !FLAG_CARRIED,
            expires_at_s: record.expires_at_s,
            state: record.state,
            outcome: own(record.parts.outcome),
            error: own(record.parts.error),
            evidence: own(record.parts.evidence),
            outcome_until_s: record.parts.outcome_until_s.unwrap_or(0),
            queued: record.kind.is_queued().then(|| {
                Box::new(QueuedEntry {
                    ordering: own(record.parts.ordering),
                    origin: record.parts.origin.unwrap_or(0),
                    owed_bytes: 0,
                })
            }),
        }
    }

    pub(crate) fn to_record<'a>(&'a self, namespace: u16, key: &'a [u8]) -> Record<'a> {
        let mut record = Record::new(self.kind, namespace, key);
        record.flags = self.flags;
        record.expires_at_s = self.expires_at_s;
        record.state = self.state;
        record.parts.outcome =
            (self.kind.has_value() && !self.has(FLAG_OUTCOME_DROPPED)).then_some(&self.outcome);
        record.parts.error = Some(self.error.as_slice()).filter(|e| !e.is_empty());
        record.parts.evidence = Some(self.evidence.as_slice()).filter(|e| !e.is_empty());
        record.parts.outcome_until_s = Some(self.outcome_until_s).filter(|s| *s != 0);
        if let Some(queued) = &self.queued {
            let ordering = Some(queued.ordering.as_slice());
            record.parts.ordering = ordering.filter(|o| !o.is_empty());
            record.parts.origin = Some(queued.origin).filter(|at| *at != 0);
        }
        record
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    pub(crate) fn epoch(&self) -> Stamp {
        self.state.epoch()
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        self.has(FLAG_FINGERPRINT)
            .then(|| Fingerprint::from_bytes(self.state.fingerprint))
    }

    /// Cuts error and evidence to what a record may hold.
    pub(crate) fn cut_texts(&mut self, bytes_max: usize) {
        self.error.truncate(bytes_max);
        self.evidence.truncate(bytes_max);
    }

    /// Says whether a duplicate's answer rests on this record: it must be durable first.
    pub(crate) fn is_final(&self) -> bool {
        !matches!(self.kind, Kind::Claimed | Kind::Started | Kind::Failed)
    }

    /// Says whether this answers everybody who waits for the key.
    pub(crate) fn ends_waits(&self) -> bool {
        matches!(
            self.kind,
            Kind::Done | Kind::Rejected | Kind::Dead | Kind::InDoubt
        )
    }

    /// Returns a copy that is remembered longer; `None` if that would not be longer.
    pub(crate) fn prolonged(&self, expires_at_s: u32) -> Option<Entry> {
        let longer =
            self.expires_at_s != 0 && (expires_at_s == 0 || expires_at_s > self.expires_at_s);
        longer.then(|| Entry {
            expires_at_s,
            ..self.clone()
        })
    }

    /// Starts the next state of the same key and epoch.
    fn next(&self, kind: Kind, at_ms: u64) -> Entry {
        let mut next = Entry::new(kind);
        next.flags = self.flags & FLAG_FINGERPRINT;
        next.state = self.state;
        next.state.at_ms = at_ms;
        next.state.until_ms = 0;
        next
    }

    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.kind, Kind::Claimed | Kind::Started)
    }

    fn doubt(&self) -> Doubt {
        Doubt {
            epoch: self.epoch(),
            attempt: self.state.attempt,
            since_ms: self.state.at_ms,
            evidence: self.evidence.clone(),
        }
    }

    fn done(&self, now: &Now) -> Done {
        let is_over = DropTime::from_disk(self.outcome_until_s).has_come(now.trusted_ms);
        let outcome = if is_over || self.has(FLAG_OUTCOME_DROPPED) {
            Outcome::Dropped
        } else {
            Outcome::Kept(self.outcome.clone())
        };
        Done {
            outcome,
            epoch: self.epoch(),
            attempt: self.state.attempt,
            first_seen_ms: u64::from(self.state.first_seen_s) * 1000,
            committed_at_ms: self.state.at_ms,
        }
    }

    fn previous(&self) -> Previous {
        Previous {
            epoch: self.epoch(),
            attempt: self.state.attempt,
            started: self.kind == Kind::Started,
            evidence: self.evidence.clone(),
            error: self.error.clone(),
        }
    }
}

/// What a decision depends on besides the key's state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Env {
    pub(crate) now: Now,
    pub(crate) kind: NamespaceKind,
    /// The generation of this opener: claims of any other one are orphans, but for detached ones.
    pub(crate) generation: u64,
    /// Another opener, which has made the current claim and is alive.
    pub(crate) alive: Option<u64>,
    pub(crate) pid: u32,
    pub(crate) retention: Retention,
    pub(crate) attempts_max: Option<u32>,
    /// `None`: the claim's own lease.
    pub(crate) settle_ms: Option<u64>,
    /// End of the current claim's lease on the boot clock, if this opener granted it.
    pub(crate) deadline_boot_ms: Option<u64>,
    /// Where the key's newest record is, if it has one.
    pub(crate) position: Option<Position>,
}

impl Env {
    pub(crate) fn expires_at_s(&self) -> u32 {
        self.retention.expires_at_s(self.now.latest_ms)
    }

    /// Returns how long the owner still excludes others: zero when it is gone or lapsed.
    fn lease_left_ms(&self, entry: &Entry) -> u64 {
        if entry.has(FLAG_UNKNOWN) {
            return 0;
        }
        if entry.has(FLAG_DETACHED) {
            return entry.state.until_ms.saturating_sub(self.now.trusted_ms);
        }
        let owner = entry.state.owner;
        if owner != self.generation && Some(owner) != self.alive {
            return 0;
        }
        match self.deadline_boot_ms {
            Some(deadline) => deadline.saturating_sub(self.now.boot_ms),
            None => entry.state.until_ms.saturating_sub(self.now.trusted_ms),
        }
    }

    fn is_last(&self, attempt: u32) -> bool {
        self.attempts_max.is_some_and(|max| attempt >= max)
    }
}

/// What a new claim asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) lease_ms: u64,
    pub(crate) detached: bool,
}

/// What to do about a `claim`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ClaimDecision {
    /// Write this claim (its stamp is still to be taken) and hand it out.
    Grant {
        entry: Entry,
        previous: Option<Previous>,
        retry: bool,
    },
    /// Write this state first, then answer it.
    Settle { entry: Entry },
    /// Ask the probe, outside all locks, then decide again.
    Probe { doubt: Doubt },
    /// Answer what is stored; `Busy` for a pending state.
    Answer { busy_ms: Option<u64> },
    /// Another fingerprint: tell nothing.
    Mismatch,
}

/// Decides a `claim`.
pub(crate) fn claim(entry: Option<&Entry>, env: &Env, request: &Request) -> ClaimDecision {
    let Some(entry) = entry else {
        return grant(None, env, request, false);
    };
    if let (Some(stored), Some(asked)) = (entry.fingerprint(), request.fingerprint)
        && stored != asked
    {
        return ClaimDecision::Mismatch;
    }
    match entry.kind {
        Kind::Claimed | Kind::Started => claim_pending(entry, env, request),
        Kind::Failed => {
            let wait_ms = entry.state.until_ms.saturating_sub(env.now.trusted_ms);
            if wait_ms > 0 {
                ClaimDecision::Answer { busy_ms: None }
            } else {
                grant(Some(entry), env, request, true)
            }
        }
        _ => ClaimDecision::Answer { busy_ms: None },
    }
}

fn claim_pending(entry: &Entry, env: &Env, request: &Request) -> ClaimDecision {
    let left_ms = env.lease_left_ms(entry);
    if left_ms > 0 {
        return ClaimDecision::Answer {
            busy_ms: Some(left_ms),
        };
    }
    if entry.kind == Kind::Claimed {
        return grant(Some(entry), env, request, false);
    }
    match env.kind {
        NamespaceKind::Probeable => {
            let settle_ms = env.settle_ms.unwrap_or(u64::from(entry.state.lease_ms));
            let settled_ms = entry.state.at_ms.saturating_add(settle_ms);
            match settled_ms.saturating_sub(env.now.trusted_ms) {
                0 => ClaimDecision::Probe {
                    doubt: entry.doubt(),
                },
                wait_ms => ClaimDecision::Answer {
                    busy_ms: Some(wait_ms),
                },
            }
        }
        NamespaceKind::NonRepeatable => ClaimDecision::Settle {
            entry: in_doubt(entry, env),
        },
        _ => grant(Some(entry), env, request, false),
    }
}

fn grant(old: Option<&Entry>, env: &Env, request: &Request, retry: bool) -> ClaimDecision {
    let attempts = old.map_or(0, |old| old.state.attempt);
    if let Some(old) = old
        && env.is_last(attempts)
    {
        return ClaimDecision::Settle {
            entry: dead(old, env, old.error.clone()),
        };
    }
    let mut entry = Entry::new(Kind::Claimed);
    let fingerprint = request
        .fingerprint
        .or_else(|| old.and_then(Entry::fingerprint));
    if let Some(fingerprint) = fingerprint {
        entry.flags |= FLAG_FINGERPRINT;
        entry.state.fingerprint = *fingerprint.as_bytes();
    }
    if request.detached {
        entry.flags |= FLAG_DETACHED;
    }
    let now_ms = env.now.trusted_ms;
    entry.state.owner = env.generation;
    entry.state.pid = env.pid;
    entry.state.at_ms = now_ms;
    entry.state.until_ms = now_ms.saturating_add(request.lease_ms);
    entry.state.lease_ms = u32::try_from(request.lease_ms).unwrap_or(u32::MAX);
    entry.state.attempt = attempts.saturating_add(1);
    entry.state.first_seen_s = old.map_or_else(
        || u32::try_from(now_ms / 1000).unwrap_or(u32::MAX),
        |old| old.state.first_seen_s,
    );
    ClaimDecision::Grant {
        entry,
        previous: old.map(Entry::previous),
        retry,
    }
}

fn in_doubt(entry: &Entry, env: &Env) -> Entry {
    let mut next = entry.next(Kind::InDoubt, entry.state.at_ms);
    if entry.has(FLAG_UNKNOWN) {
        next.state.at_ms = env.now.trusted_ms;
    }
    next.evidence = entry.evidence.clone();
    next
}

fn dead(entry: &Entry, env: &Env, error: Vec<u8>) -> Entry {
    let mut next = entry.next(Kind::Dead, env.now.trusted_ms);
    next.expires_at_s = env.expires_at_s();
    next.error = error;
    next.evidence = entry.evidence.clone();
    next
}

/// What to do about a call of a claim's owner, or of somebody who resolves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ChangeDecision {
    /// Write this state.
    Write { entry: Entry, late: bool },
    /// This epoch is done already; the same outcome or another one.
    AlreadyDone { same: bool },
    /// Nothing is written.
    Fenced,
    /// The call may not be made in this phase.
    NotStarted,
}

/// Returns the entry if it is held by this epoch: pending, or in doubt without a resolution.
fn held_by(entry: Option<&Entry>, epoch: Stamp) -> Option<&Entry> {
    entry.filter(|e| e.epoch() == epoch && (e.is_pending() || e.kind == Kind::InDoubt))
}

/// Decides a `start`: from here on a crash is in doubt.
pub(crate) fn start(
    entry: Option<&Entry>,
    env: &Env,
    epoch: Stamp,
    evidence: &[u8],
) -> ChangeDecision {
    let Some(entry) = held_by(entry, epoch).filter(|e| e.is_pending()) else {
        return ChangeDecision::Fenced;
    };
    let mut next = entry.next(Kind::Started, env.now.trusted_ms);
    next.flags |= entry.flags & FLAG_DETACHED;
    own(&mut next, env);
    next.state.until_ms = env
        .now
        .trusted_ms
        .saturating_add(u64::from(entry.state.lease_ms));
    next.evidence = evidence.to_vec();
    ChangeDecision::Write {
        entry: next,
        late: false,
    }
}

/// Whoever starts or renews is alive in this opener, also if another one granted the claim.
fn own(entry: &mut Entry, env: &Env) {
    entry.state.owner = env.generation;
    entry.state.pid = env.pid;
}

/// Decides a `renew`: the lease is counted from now, also when it has lapsed.
pub(crate) fn renew(
    entry: Option<&Entry>,
    env: &Env,
    epoch: Stamp,
    lease_ms: u64,
) -> ChangeDecision {
    let Some(entry) = held_by(entry, epoch).filter(|e| e.is_pending()) else {
        return ChangeDecision::Fenced;
    };
    let mut next = entry.clone();
    next.flags &= !FLAG_UNKNOWN;
    own(&mut next, env);
    next.state.until_ms = env.now.trusted_ms.saturating_add(lease_ms);
    next.state.lease_ms = u32::try_from(lease_ms).unwrap_or(u32::MAX);
    ChangeDecision::Write {
        entry: next,
        late: false,
    }
}

/// Decides a `commit`; `outcome` of `None` commits without keeping one; `attaches` says that it
/// records more than that.
pub(crate) fn commit(
    entry: Option<&Entry>,
    env: &Env,
    epoch: Stamp,
    outcome: Option<&[u8]>,
    attaches: bool,
) -> ChangeDecision {
    if let Some(done) = entry.filter(|e| e.kind == Kind::Done && e.epoch() == epoch) {
        let dropped = done.has(FLAG_OUTCOME_DROPPED);
        let same = outcome.map_or(dropped, |o| !dropped && o == done.outcome);
        // Found applied by somebody else, or committed without: what this one attaches is nowhere.
        let same = same && (!attaches || done.has(FLAG_ATTACHED));
        return ChangeDecision::AlreadyDone { same };
    }
    let Some(entry) = held_by(entry, epoch) else {
        return ChangeDecision::Fenced;
    };
    if entry.kind == Kind::Claimed && env.kind.starts_durably() {
        return ChangeDecision::NotStarted;
    }
    let late = entry.kind == Kind::InDoubt || env.lease_left_ms(entry) == 0;
    ChangeDecision::Write {
        entry: done(entry, env, outcome),
        late,
    }
}

fn done(entry: &Entry, env: &Env, outcome: Option<&[u8]>) -> Entry {
    let mut next = entry.next(Kind::Done, env.now.trusted_ms);
    next.expires_at_s = env.expires_at_s();
    match outcome {
        Some(bytes) => next.outcome = bytes.to_vec(),
        None => next.flags |= FLAG_OUTCOME_DROPPED,
    }
    next
}

/// Decides a `fail`.
pub(crate) fn fail(
    entry: Option<&Entry>,
    env: &Env,
    epoch: Stamp,
    failure: &Failure,
) -> ChangeDecision {
    let Some(entry) = held_by(entry, epoch) else {
        return ChangeDecision::Fenced;
    };
    let next = match failure {
        Failure::Release => Entry::new(Kind::Forgotten),
        Failure::Permanent { error } => {
            let mut next = entry.next(Kind::Rejected, env.now.trusted_ms);
            next.expires_at_s = env.expires_at_s();
            next.error = error.clone();
            next
        }
        Failure::Retryable { after, error } => failed(entry, env, *after, error.clone()),
        Failure::Unknown { evidence } => unknown(entry, env, evidence),
    };
    ChangeDecision::Write {
        entry: next,
        late: false,
    }
}

fn failed(entry: &Entry, env: &Env, after: Duration, error: Vec<u8>) -> Entry {
    if env.is_last(entry.state.attempt) {
        return dead(entry, env, error);
    }
    let mut next = entry.next(Kind::Failed, env.now.trusted_ms);
    let after_ms = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
    next.state.until_ms = env.now.trusted_ms.saturating_add(after_ms);
    // Counted from the moment it may be claimed again, so that a long pause does not outlive it.
    next.expires_at_s = env
        .retention
        .expires_at_s(env.now.latest_ms.saturating_add(after_ms));
    next.error = error;
    next
}

fn unknown(entry: &Entry, env: &Env, evidence: &[u8]) -> Entry {
    let started = entry.kind != Kind::Claimed;
    match env.kind {
        // Before the start nothing can have happened.
        NamespaceKind::Probeable | NamespaceKind::NonRepeatable if !started => {
            Entry::new(Kind::Forgotten)
        }
        NamespaceKind::NonRepeatable => {
            let mut next = entry.next(Kind::InDoubt, env.now.trusted_ms);
            next.evidence = join_evidence(&entry.evidence, evidence);
            next
        }
        NamespaceKind::Probeable if entry.kind == Kind::Started => {
            let mut next = entry.clone();
            next.flags |= FLAG_UNKNOWN;
            next.evidence = join_evidence(&entry.evidence, evidence);
            next
        }
        NamespaceKind::Probeable => entry.clone(),
        _ => failed(entry, env, Duration::ZERO, evidence.to_vec()),
    }
}

fn join_evidence(old: &[u8], new: &[u8]) -> Vec<u8> {
    if old.is_empty() || new.is_empty() {
        return [old, new].concat();
    }
    let joined = [old, b"\n", new].concat();
    if joined.len() > crate::key::EVIDENCE_BYTES_MAX {
        new.to_vec()
    } else {
        joined
    }
}

/// Decides what a probe's answer does to the attempt it was asked about.
pub(crate) fn probed(
    entry: Option<&Entry>,
    env: &Env,
    epoch: Stamp,
    found: &crate::verdict::Probed,
    request: &Request,
) -> Option<ClaimDecision> {
    use crate::verdict::Probed;
    let entry = entry.filter(|e| e.kind == Kind::Started && e.epoch() == epoch)?;
    if env.lease_left_ms(entry) > 0 {
        return None;
    }
    Some(match found {
        Probed::Applied(outcome) => ClaimDecision::Settle {
            entry: done(entry, env, Some(outcome)),
        },
        Probed::NotApplied => grant(Some(entry), env, request, false),
        Probed::Unknown => ClaimDecision::Settle {
            entry: in_doubt(entry, env),
        },
    })
}

/// Decides a `resolve`. A started NonRepeatable claim whose owner is gone counts as in doubt.
pub(crate) fn resolve(
    entry: Option<&Entry>,
    env: &Env,
    epoch: Stamp,
    resolution: &Resolution,
) -> ChangeDecision {
    let found = entry.filter(|e| e.epoch() == epoch && is_in_doubt(e, env));
    let Some(entry) = found else {
        let done = entry.filter(|e| e.kind == Kind::Done && e.epoch() == epoch);
        return match (done, resolution) {
            (Some(done), Resolution::Applied(outcome)) => ChangeDecision::AlreadyDone {
                same: !done.has(FLAG_OUTCOME_DROPPED) && *outcome == done.outcome,
            },
            _ => ChangeDecision::Fenced,
        };
    };
    let next = match resolution {
        Resolution::Applied(outcome) => done(entry, env, Some(outcome)),
        Resolution::NotApplied => failed(entry, env, Duration::ZERO, b"not applied".to_vec()),
        Resolution::Abandon => dead(entry, env, b"abandoned".to_vec()),
    };
    ChangeDecision::Write {
        entry: next,
        late: false,
    }
}

fn is_in_doubt(entry: &Entry, env: &Env) -> bool {
    entry.kind == Kind::InDoubt
        || entry.kind == Kind::Started
            && env.kind == NamespaceKind::NonRepeatable
            && env.lease_left_ms(entry) == 0
}

/// Decides a `forget`; `Fenced` for a key that is pending or in doubt, unless forced.
pub(crate) fn forget(entry: Option<&Entry>, forced: bool) -> ChangeDecision {
    match entry {
        Some(entry) if entry.kind.is_unsettled() && !forced => ChangeDecision::Fenced,
        Some(_) => ChangeDecision::Write {
            entry: Entry::new(Kind::Forgotten),
            late: false,
        },
        None => ChangeDecision::AlreadyDone { same: true },
    }
}

/// Returns the entry as callers see it.
pub(crate) fn view(entry: Option<&Entry>, env: &Env) -> KeyState {
    let Some(e) = entry else {
        return KeyState::Absent;
    };
    if is_in_doubt(e, env) {
        return KeyState::InDoubt(e.doubt());
    }
    match e.kind {
        Kind::Seen => KeyState::Seen,
        Kind::Claimed | Kind::Started => KeyState::Pending {
            epoch: e.epoch(),
            attempt: e.state.attempt,
            started: e.kind == Kind::Started,
            owner: Owner {
                pid: e.state.pid,
                detached: e.has(FLAG_DETACHED),
            },
            lease_left: Duration::from_millis(env.lease_left_ms(e)),
            since_ms: e.state.at_ms,
            evidence: e.evidence.clone(),
        },
        Kind::Done => KeyState::Done(e.done(&env.now)),
        Kind::Failed => KeyState::Failed {
            epoch: e.epoch(),
            attempt: e.state.attempt,
            error: e.error.clone(),
            retry_after: Duration::from_millis(e.state.until_ms.saturating_sub(env.now.trusted_ms)),
        },
        Kind::Rejected => KeyState::Rejected {
            epoch: e.epoch(),
            error: e.error.clone(),
        },
        Kind::Dead => KeyState::Dead {
            attempts: e.state.attempt,
            error: e.error.clone(),
        },
        _ => KeyState::Absent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Story: a claim was carried over and then renewed by another opener. The renewal had the mark
    /// of a copy, so who had granted the claim first went on by its own, earlier end of the lease.
    #[test]
    fn what_follows_a_copy_is_no_copy() {
        let mut copy = Record::new(Kind::Claimed, 1, b"key");
        copy.flags = FLAG_CARRIED | FLAG_DETACHED;
        copy.parts.origin = Some(7);
        let entry = Entry::of_record(&copy);
        let next = entry.to_record(1, b"key");
        assert_eq!(next.flags, FLAG_DETACHED);
        assert_eq!(next.parts.origin, None);
    }
}
