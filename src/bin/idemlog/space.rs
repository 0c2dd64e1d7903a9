//! Opening a store and one of its namespaces, whose class only the store knows.

use std::path::Path;
use std::time::Duration;

use idemlog::{
    Change, ClaimOptions, ClaimVerdict, Commit, CommitVerdict, DedupLog, EffectClass, Failure,
    Filter, Internal, KeyState, Namespace, NamespaceKind, NamespaceOptions, NonRepeatable, Options,
    Probeable, Repeatable, Resolution, Result, Stamp, Ticket,
};

use crate::answer::Answer;
use crate::args::Common;
use crate::exit::Stop;

/// The namespace of every command but `filter`, unless `--namespace` says otherwise.
pub(crate) const NAMESPACE_DEFAULT: &str = "default";

impl Common {
    /// Opens the store; a missing one is created only if `create` says so.
    pub(crate) fn open(&self, create: bool) -> std::result::Result<DedupLog, Stop> {
        let path = self.store_path()?;
        if !create {
            check_there(path)?;
        }
        Ok(self.options().create(create).open(path)?)
    }

    /// Opens the store for a command that writes nothing.
    pub(crate) fn open_to_read(&self) -> std::result::Result<DedupLog, Stop> {
        if self.exclusive {
            return self.open(false);
        }
        let path = self.store_path()?;
        check_there(path)?;
        Ok(self.options().open_read_only(path)?)
    }

    fn options(&self) -> Options {
        Options::new()
            .shared(!self.exclusive)
            .turn_timeout(self.lock_timeout)
            .lock_timeout(self.lock_timeout)
    }

    pub(crate) fn store_path(&self) -> std::result::Result<&Path, Stop> {
        let path = self
            .store
            .as_deref()
            .filter(|path| !path.as_os_str().is_empty());
        path.ok_or_else(|| Stop::usage("no store given; use --store DIR or set IDEMLOG_STORE"))
    }

    pub(crate) fn namespace_or<'a>(&'a self, default: &'a str) -> &'a str {
        self.namespace.as_deref().unwrap_or(default)
    }

    /// Returns the ticket's namespace; another one given by hand is a mistake.
    pub(crate) fn namespace_of<'a>(
        &self,
        ticket: &'a Ticket,
    ) -> std::result::Result<&'a str, Stop> {
        match &self.namespace {
            Some(name) if name != ticket.namespace() => Err(Stop::usage(format!(
                "the ticket is of namespace={}, not of {name}; leave --namespace out",
                ticket.namespace()
            ))),
            _ => Ok(ticket.namespace()),
        }
    }
}

fn check_there(path: &Path) -> std::result::Result<(), Stop> {
    if path.exists() {
        return Ok(());
    }
    Err(Stop::usage(format!(
        "no store at {}; filter, run and claim create one",
        path.display()
    )))
}

/// One open namespace.
pub(crate) enum Space {
    Filter(Filter),
    Claims(Box<dyn Claims>),
}

impl Space {
    /// Opens a namespace that exists.
    pub(crate) fn existing(
        store: &DedupLog,
        name: &str,
        options: NamespaceOptions,
    ) -> std::result::Result<Space, Stop> {
        let Some(kind) = store.kind_of(name) else {
            let names: Vec<_> = store
                .namespaces()
                .into_iter()
                .map(|(name, _)| name)
                .collect();
            return Err(Stop::usage(format!(
                "no namespace={name} in this store; it has: {}",
                if names.is_empty() {
                    "none".to_string()
                } else {
                    names.join(", ")
                }
            )));
        };
        Space::of_kind(store, name, kind, options)
    }

    /// Opens a namespace, or creates it.
    pub(crate) fn of_kind(
        store: &DedupLog,
        name: &str,
        kind: NamespaceKind,
        options: NamespaceOptions,
    ) -> std::result::Result<Space, Stop> {
        Ok(match kind {
            NamespaceKind::Filter => Space::Filter(store.filter(name, options)?),
            NamespaceKind::Repeatable => claims::<Repeatable>(store, name, options)?,
            NamespaceKind::Probeable => claims::<Probeable>(store, name, options)?,
            NamespaceKind::NonRepeatable => claims::<NonRepeatable>(store, name, options)?,
            NamespaceKind::Internal => claims::<Internal>(store, name, options)?,
            _ => {
                return Err(Stop::usage(format!(
                    "namespace={name} has no keys to claim or observe: kind={}; use another \
                     --namespace",
                    kind.name()
                )));
            }
        })
    }

    /// Returns the calls of a namespace with claims.
    pub(crate) fn claims(self, name: &str) -> std::result::Result<Box<dyn Claims>, Stop> {
        match self {
            Space::Claims(claims) => Ok(claims),
            Space::Filter(_) => Err(Stop::usage(format!(
                "namespace={name} is a filter, which has no claims; use another --namespace"
            ))),
        }
    }

    pub(crate) fn get(&self, key: &[u8]) -> Result<KeyState> {
        match self {
            Space::Filter(filter) => filter.get(key),
            Space::Claims(claims) => claims.get(key),
        }
    }

    pub(crate) fn forget(&self, key: &[u8], forced: bool) -> Result<Change> {
        match self {
            Space::Filter(filter) => filter.forget(key),
            Space::Claims(claims) => claims.forget(key, forced),
        }
    }
}

fn claims<C: EffectClass + 'static>(
    store: &DedupLog,
    name: &str,
    options: NamespaceOptions,
) -> Result<Space> {
    Ok(Space::Claims(Box::new(
        store.namespace::<C>(name, options)?,
    )))
}

/// The calls of a namespace of any class. A claim leaves as a ticket: it outlives this process.
pub(crate) trait Claims {
    fn claim(&self, key: &[u8], options: &ClaimOptions) -> Result<Answer>;
    fn start(&self, ticket: &Ticket, evidence: &[u8]) -> Result<Change>;
    fn renew(&self, ticket: &Ticket, lease: Duration) -> Result<Change>;
    fn commit(&self, ticket: &Ticket, commit: Commit) -> Result<CommitVerdict>;
    fn fail(&self, ticket: &Ticket, failure: Failure) -> Result<Change>;
    fn get(&self, key: &[u8]) -> Result<KeyState>;
    fn resolve(&self, key: &[u8], epoch: Stamp, resolution: Resolution) -> Result<Change>;
    fn forget(&self, key: &[u8], forced: bool) -> Result<Change>;
}

impl<C: EffectClass> Claims for Namespace<C> {
    fn claim(&self, key: &[u8], options: &ClaimOptions) -> Result<Answer> {
        let claimed = |how, claim: idemlog::Claim<C>, previous| {
            let attempt = claim.attempt();
            Answer::Claimed {
                how,
                attempt,
                previous,
                ticket: claim.detach(),
            }
        };
        Ok(
            match self.claim_with(key, &options.clone().detached(true))? {
                ClaimVerdict::New(claim) => claimed("new", claim, None),
                ClaimVerdict::Takeover { claim, previous } => {
                    claimed("takeover", claim, Some(previous))
                }
                ClaimVerdict::Retry { claim, previous } => claimed("retry", claim, Some(previous)),
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
            },
        )
    }

    fn start(&self, ticket: &Ticket, evidence: &[u8]) -> Result<Change> {
        self.start_ticket(ticket, evidence)
    }

    fn renew(&self, ticket: &Ticket, lease: Duration) -> Result<Change> {
        self.renew_ticket(ticket, lease)
    }

    fn commit(&self, ticket: &Ticket, commit: Commit) -> Result<CommitVerdict> {
        self.commit_ticket(ticket, commit)
    }

    fn fail(&self, ticket: &Ticket, failure: Failure) -> Result<Change> {
        self.fail_ticket(ticket, &failure)
    }

    fn get(&self, key: &[u8]) -> Result<KeyState> {
        Namespace::get(self, key)
    }

    fn resolve(&self, key: &[u8], epoch: Stamp, resolution: Resolution) -> Result<Change> {
        Namespace::resolve(self, key, epoch, resolution)
    }

    fn forget(&self, key: &[u8], forced: bool) -> Result<Change> {
        Namespace::forget(self, key, forced)
    }
}
