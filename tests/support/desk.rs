//! Namespaces of all classes behind one trait, with the guards and tickets they have handed out.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use idemlog::{
    Change, Claim, ClaimOptions, ClaimVerdict, Commit, CommitVerdict, DedupLog, Durability,
    EffectClass, Failure, Internal, KeyState, Namespace, NamespaceKind, NamespaceOptions,
    NonRepeatable, Outcome, ProbeRequest, Probeable, Probed, Repeatable, Resolution, Result,
    Retention, Stamp, StartError, Started, Ticket,
};

use super::oracle::{Answer, Ask, Changed, How, Spec};

/// What the probe of a test says next, and what it was asked.
pub type Probe = Arc<Mutex<(Probed, Vec<(Vec<u8>, Stamp)>)>>;

/// An answer to a claim, and the epoch it handed out.
#[derive(Clone, Debug)]
pub struct Said {
    pub answer: Answer,
    pub epoch: Option<Stamp>,
}

pub trait Class: EffectClass + Sized {
    fn commit_claim(_claim: &mut Claim<Self>, _commit: Commit) -> Option<Result<CommitVerdict>> {
        None
    }

    fn commit_claims(
        _namespace: &Namespace<Self>,
        _items: &mut [(Claim<Self>, Commit)],
    ) -> Option<Result<Vec<Result<CommitVerdict>>>> {
        None
    }
}

macro_rules! direct {
    ($class:ident) => {
        impl Class for $class {
            fn commit_claim(
                claim: &mut Claim<Self>,
                commit: Commit,
            ) -> Option<Result<CommitVerdict>> {
                Some(claim.commit_with(commit))
            }

            fn commit_claims(
                namespace: &Namespace<Self>,
                items: &mut [(Claim<Self>, Commit)],
            ) -> Option<Result<Vec<Result<CommitVerdict>>>> {
                Some(namespace.commit_many(items))
            }
        }
    };
}

direct!(Repeatable);
direct!(Internal);
impl Class for Probeable {}
impl Class for NonRepeatable {}

#[derive(Debug)]
enum Guard<C: Class> {
    Claim(Claim<C>),
    Started(Started<C>),
}

/// One guard, for choosing.
#[derive(Clone, Debug)]
pub struct Held {
    pub key: Vec<u8>,
    pub epoch: Stamp,
    pub started: bool,
}

pub trait Desk: Send {
    fn claim(&mut self, key: &[u8], ask: &Ask) -> Result<Said>;
    fn claim_many(&mut self, keys: &[Vec<u8>], ask: &Ask) -> Result<Vec<Said>>;
    fn held(&self) -> Vec<Held>;
    fn start(&mut self, index: usize, evidence: &[u8]) -> Result<Changed>;
    fn renew(&mut self, index: usize, lease_ms: u64) -> Result<Changed>;
    /// `None`: the class does not allow it, as the compiler says.
    fn commit(&mut self, index: usize, give: &Give) -> Option<Result<Changed>>;
    fn commit_started(&mut self, gives: &[Give]) -> Result<Vec<(Held, Changed)>>;
    fn commit_claims(&mut self, gives: &[Give]) -> Option<Result<Vec<(Held, Changed)>>>;
    fn fail(&mut self, index: usize, failure: Failure) -> Result<Changed>;
    fn drop_guard(&mut self, index: usize) -> Held;
    fn detach(&mut self, index: usize) -> Ticket;
    fn start_ticket(&self, ticket: &Ticket, evidence: &[u8]) -> Result<Changed>;
    fn renew_ticket(&self, ticket: &Ticket, lease_ms: u64) -> Result<Changed>;
    fn commit_ticket(&self, ticket: &Ticket, give: &Give) -> Result<Changed>;
    fn fail_ticket(&self, ticket: &Ticket, failure: &Failure) -> Result<Changed>;
    fn get(&self, key: &[u8]) -> Result<KeyState>;
    fn resolve(&self, key: &[u8], epoch: Stamp, resolution: Resolution) -> Result<Changed>;
    fn forget(&self, key: &[u8], forced: bool) -> Result<Changed>;
}

struct Table<C: Class> {
    namespace: Namespace<C>,
    guards: Vec<Guard<C>>,
}

/// Opens a namespace of claims as its declaration says.
pub fn open_desk(
    log: &DedupLog,
    spec: &Spec,
    options: NamespaceOptions,
    probe: &Probe,
) -> Result<Box<dyn Desk>> {
    fn table<C: Class>(namespace: Namespace<C>) -> Box<dyn Desk> {
        Box::new(Table {
            namespace,
            guards: Vec::new(),
        })
    }
    let name = spec.name.as_str();
    Ok(match spec.kind {
        NamespaceKind::Repeatable => table(log.namespace::<Repeatable>(name, options)?),
        NamespaceKind::Internal => table(log.namespace::<Internal>(name, options)?),
        NamespaceKind::NonRepeatable => table(log.namespace::<NonRepeatable>(name, options)?),
        NamespaceKind::Probeable if !spec.has_probe => {
            table(log.namespace::<Probeable>(name, options)?)
        }
        NamespaceKind::Probeable => {
            let probe = Arc::clone(probe);
            let ask = move |request: &ProbeRequest<'_>| {
                let mut probe = probe.lock().unwrap();
                probe.1.push((request.key.to_vec(), request.doubt.epoch));
                probe.0.clone()
            };
            table(log.namespace::<Probeable>(name, options)?.with_probe(ask))
        }
        _ => unreachable!("{:?} has no claims", spec.kind),
    })
}

/// Returns the options that a declaration stands for.
pub fn options_of(spec: &Spec) -> NamespaceOptions {
    let mut options = NamespaceOptions::new()
        .retention(spec.retention)
        .lease(Duration::from_millis(spec.lease_ms))
        .outcome_bytes_max(spec.outcome_bytes_max)
        .sliding(spec.sliding);
    if let Some(ms) = spec.settle_ms {
        options = options.settle(Duration::from_millis(ms));
    }
    if let Some(count) = spec.attempts_max {
        options = options.attempts_max(count);
    }
    options
}

/// Makes the ticket of any claim, as its printed form allows.
pub fn ticket_of(namespace: &str, key: &[u8], epoch: Stamp) -> Ticket {
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|b| format!("{b:02x}")).collect() };
    format!(
        "t1-{:x}-{}-{}",
        epoch.get(),
        hex(namespace.as_bytes()),
        hex(key)
    )
    .parse()
    .unwrap()
}

pub fn changed(change: Change) -> Changed {
    match change {
        Change::Applied(state) => Changed::Applied(state),
        Change::Fenced { current } => Changed::Fenced(current),
    }
}

/// Compares the outcome that is handed back with the one that was given.
fn committed(verdict: CommitVerdict, given: &Outcome) -> Changed {
    let given = given.bytes().unwrap_or_default();
    match verdict {
        CommitVerdict::Committed { .. } => Changed::Committed,
        CommitVerdict::AlreadyCommitted => Changed::AlreadyCommitted,
        CommitVerdict::Conflict { current, outcome } => {
            assert_eq!(outcome, given);
            Changed::Conflict(current)
        }
        CommitVerdict::Fenced { current, outcome } => {
            assert_eq!(outcome, given);
            Changed::Fenced(current)
        }
        CommitVerdict::CellConflict { .. } => unreachable!("no cell was attached"),
    }
}

/// What a commit gives.
#[derive(Clone, Debug)]
pub struct Give {
    pub outcome: Outcome,
    pub retention: Option<Retention>,
    pub durability: Option<Durability>,
}

impl Give {
    pub fn new(outcome: &[u8]) -> Give {
        Give {
            outcome: Outcome::Kept(outcome.to_vec()),
            retention: None,
            durability: None,
        }
    }

    fn commit(&self) -> Commit {
        let mut commit = match &self.outcome {
            Outcome::Kept(bytes) => Commit::new(bytes.clone()),
            Outcome::Dropped => Commit::without_outcome(),
        };
        if let Some(retention) = self.retention {
            commit = commit.retention(retention);
        }
        if let Some(durability) = self.durability {
            commit = commit.durability(durability);
        }
        commit
    }
}

impl<C: Class> Table<C> {
    fn said(&mut self, verdict: ClaimVerdict<C>) -> Said {
        let mut granted = |claim: Claim<C>, how: How| {
            let (attempt, epoch) = (claim.attempt(), Some(claim.epoch()));
            self.guards.push(Guard::Claim(claim));
            Said {
                answer: Answer::Granted { attempt, how },
                epoch,
            }
        };
        let answer = match verdict {
            ClaimVerdict::New(claim) => return granted(claim, How::New),
            ClaimVerdict::Takeover { claim, previous } => {
                return granted(claim, How::Takeover(previous));
            }
            ClaimVerdict::Retry { claim, previous } => return granted(claim, How::Retry(previous)),
            ClaimVerdict::Busy {
                attempt,
                owner,
                lease_left,
            } => Answer::Busy {
                attempt,
                owner,
                lease_left,
            },
            ClaimVerdict::Duplicate(done) => Answer::Duplicate(done),
            ClaimVerdict::Backoff { after, error } => Answer::Backoff { after, error },
            ClaimVerdict::Rejected { error } => Answer::Rejected { error },
            ClaimVerdict::Dead { attempts, error } => Answer::Dead { attempts, error },
            ClaimVerdict::InDoubt(doubt) => Answer::InDoubt(doubt),
            ClaimVerdict::Mismatch => Answer::Mismatch,
        };
        Said {
            answer,
            epoch: None,
        }
    }

    fn options(ask: &Ask) -> ClaimOptions {
        let mut options = ClaimOptions::new().detached(ask.detached);
        if let Some(fingerprint) = ask.fingerprint {
            options = options.fingerprint(fingerprint);
        }
        if let Some(ms) = ask.lease_ms {
            options = options.lease(Duration::from_millis(ms));
        }
        options
    }

    fn held_of(guard: &Guard<C>) -> Held {
        let (key, epoch, started) = match guard {
            Guard::Claim(claim) => (claim.key(), claim.epoch(), false),
            Guard::Started(started) => (started.key(), started.epoch(), true),
        };
        Held {
            key: key.to_vec(),
            epoch,
            started,
        }
    }
}

impl<C: Class> Desk for Table<C> {
    fn claim(&mut self, key: &[u8], ask: &Ask) -> Result<Said> {
        let verdict = self.namespace.claim_with(key, &Self::options(ask))?;
        Ok(self.said(verdict))
    }

    fn claim_many(&mut self, keys: &[Vec<u8>], ask: &Ask) -> Result<Vec<Said>> {
        let verdicts = self.namespace.claim_many(keys, &Self::options(ask))?;
        verdicts
            .into_iter()
            .map(|verdict| Ok(self.said(verdict?)))
            .collect()
    }

    fn held(&self) -> Vec<Held> {
        self.guards.iter().map(Self::held_of).collect()
    }

    fn start(&mut self, index: usize, evidence: &[u8]) -> Result<Changed> {
        match self.guards.swap_remove(index) {
            Guard::Claim(claim) => match claim.start(evidence) {
                Ok(started) => {
                    let state = self.namespace.get(started.key());
                    self.guards.push(Guard::Started(started));
                    Ok(state.map_or(Changed::Unseen, Changed::Applied))
                }
                Err(StartError::Fenced { current }) => Ok(Changed::Fenced(current)),
                Err(StartError::Failed { claim, error }) => {
                    self.guards.push(Guard::Claim(claim));
                    Err(error)
                }
            },
            started @ Guard::Started(_) => {
                let held = Self::held_of(&started);
                self.guards.push(started);
                self.start_ticket(
                    &ticket_of(self.namespace.name(), &held.key, held.epoch),
                    evidence,
                )
            }
        }
    }

    fn renew(&mut self, index: usize, lease_ms: u64) -> Result<Changed> {
        let lease = Duration::from_millis(lease_ms);
        match &self.guards[index] {
            Guard::Claim(claim) => claim.renew(lease),
            Guard::Started(started) => started.renew(lease),
        }
        .map(changed)
    }

    fn commit(&mut self, index: usize, give: &Give) -> Option<Result<Changed>> {
        let verdict = match &mut self.guards[index] {
            Guard::Claim(claim) => C::commit_claim(claim, give.commit())?,
            Guard::Started(started) => started.commit_with(give.commit()),
        };
        if verdict.is_ok() {
            self.guards.swap_remove(index);
        }
        Some(verdict.map(|verdict| committed(verdict, &give.outcome)))
    }

    fn commit_started(&mut self, gives: &[Give]) -> Result<Vec<(Held, Changed)>> {
        let (mut items, mut given) = (Vec::new(), Vec::new());
        let mut gives = gives.iter();
        for guard in std::mem::take(&mut self.guards) {
            let held = Self::held_of(&guard);
            match guard {
                Guard::Started(started) if gives.len() > 0 => {
                    let give = gives.next().unwrap();
                    given.push((held, give.outcome.clone()));
                    items.push((started, give.commit()));
                }
                guard => self.guards.push(guard),
            }
        }
        let verdicts = self.namespace.commit_many(&mut items)?;
        verdicts
            .into_iter()
            .zip(given)
            .map(|(verdict, (held, outcome))| Ok((held, committed(verdict?, &outcome))))
            .collect()
    }

    fn commit_claims(&mut self, gives: &[Give]) -> Option<Result<Vec<(Held, Changed)>>> {
        let (mut items, mut given) = (Vec::new(), Vec::new());
        C::commit_claims(&self.namespace, &mut [])?.unwrap();
        let mut gives = gives.iter();
        for guard in std::mem::take(&mut self.guards) {
            let held = Self::held_of(&guard);
            match guard {
                Guard::Claim(claim) if gives.len() > 0 => {
                    let give = gives.next().unwrap();
                    given.push((held, give.outcome.clone()));
                    items.push((claim, give.commit()));
                }
                guard => self.guards.push(guard),
            }
        }
        let verdicts = match C::commit_claims(&self.namespace, &mut items)? {
            Ok(verdicts) => verdicts,
            Err(error) => return Some(Err(error)),
        };
        Some(
            verdicts
                .into_iter()
                .zip(given)
                .map(|(verdict, (held, outcome))| Ok((held, committed(verdict?, &outcome))))
                .collect(),
        )
    }

    fn fail(&mut self, index: usize, failure: Failure) -> Result<Changed> {
        match self.guards.swap_remove(index) {
            Guard::Claim(claim) => claim.fail(failure),
            Guard::Started(started) => started.fail(failure),
        }
        .map(changed)
    }

    fn drop_guard(&mut self, index: usize) -> Held {
        Self::held_of(&self.guards.swap_remove(index))
    }

    fn detach(&mut self, index: usize) -> Ticket {
        match self.guards.swap_remove(index) {
            Guard::Claim(claim) => claim.detach(),
            Guard::Started(started) => started.detach(),
        }
    }

    fn start_ticket(&self, ticket: &Ticket, evidence: &[u8]) -> Result<Changed> {
        self.namespace.start_ticket(ticket, evidence).map(changed)
    }

    fn renew_ticket(&self, ticket: &Ticket, lease_ms: u64) -> Result<Changed> {
        self.namespace
            .renew_ticket(ticket, Duration::from_millis(lease_ms))
            .map(changed)
    }

    fn commit_ticket(&self, ticket: &Ticket, give: &Give) -> Result<Changed> {
        let verdict = self.namespace.commit_ticket(ticket, give.commit())?;
        Ok(committed(verdict, &give.outcome))
    }

    fn fail_ticket(&self, ticket: &Ticket, failure: &Failure) -> Result<Changed> {
        self.namespace.fail_ticket(ticket, failure).map(changed)
    }

    fn get(&self, key: &[u8]) -> Result<KeyState> {
        self.namespace.get(key)
    }

    fn resolve(&self, key: &[u8], epoch: Stamp, resolution: Resolution) -> Result<Changed> {
        self.namespace.resolve(key, epoch, resolution).map(changed)
    }

    fn forget(&self, key: &[u8], forced: bool) -> Result<Changed> {
        self.namespace.forget(key, forced).map(changed)
    }
}
