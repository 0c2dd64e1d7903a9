//! The calls of the library as commands for scripts.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;

use idemlog::{
    Change, ClaimOptions, Commit, CommitVerdict, DedupLog, Failure, Fingerprint, KeyState,
    NamespaceKind, NamespaceOptions, OUTCOME_BYTES_MAX, Outcome, Resolution, Stamp, Ticket,
};
use serde_json::{Map, Value, json};

use crate::answer::Answer;
use crate::args::{self, Claiming, Common, FailKind, Found, OutcomeSource};
use crate::exit::{Code, Stop, say};
use crate::output::{print, print_line, put_bytes, state_json, state_line};
use crate::space::{Claims, NAMESPACE_DEFAULT, Space};

/// An open namespace that claims may be taken from, and its store.
pub(crate) struct Opened {
    pub(crate) store: DedupLog,
    pub(crate) claims: Box<dyn Claims>,
    pub(crate) kind: NamespaceKind,
}

impl Opened {
    /// Says whether `start` is written, durably, before the effect.
    pub(crate) fn starts_first(&self) -> bool {
        matches!(
            self.kind,
            NamespaceKind::Probeable | NamespaceKind::NonRepeatable
        )
    }
}

/// Opens the namespace that a claim is for; creates store and namespace if a class is given.
pub(crate) fn open_to_claim(common: &Common, claiming: &Claiming) -> Result<Opened, Stop> {
    let name = common.namespace_or(NAMESPACE_DEFAULT);
    let store = match claiming.effects {
        Some(_) => common.open(true)?,
        None if common.store_path()?.exists() => common.open(false)?,
        None => return Err(effects_wanted(name)),
    };
    let known = store.kind_of(name);
    let kind = claiming
        .effects
        .or(known)
        .ok_or_else(|| effects_wanted(name))?;
    let claims = Space::of_kind(&store, name, kind, namespace_options(claiming))?.claims(name)?;
    Ok(Opened {
        store,
        claims,
        kind,
    })
}

/// Returns what `--lease` and `--max-attempts` say.
pub(crate) fn namespace_options(claiming: &Claiming) -> NamespaceOptions {
    let options = NamespaceOptions::new().lease(claiming.lease);
    match claiming.max_attempts {
        Some(attempts) => options.attempts_max(attempts),
        None => options,
    }
}

fn effects_wanted(name: &str) -> Stop {
    Stop::usage(format!(
        "namespace={name} does not exist yet; say what a second run means: --effects \
         repeatable|probeable|non-repeatable|internal"
    ))
}

/// Returns what `--lease` and `--fingerprint` say.
pub(crate) fn claim_options(claiming: &Claiming) -> ClaimOptions {
    let options = ClaimOptions::new().lease(claiming.lease);
    match &claiming.fingerprint {
        Some(text) => options.fingerprint(Fingerprint::of(text.as_bytes())),
        None => options,
    }
}

pub(crate) fn claim(common: &Common, options: &args::Claim) -> Result<u8, Stop> {
    let opened = open_to_claim(common, &options.claiming)?;
    let key = options.key.as_bytes();
    let answer = opened
        .claims
        .claim(key, &claim_options(&options.claiming))?;
    if let Answer::Claimed { ticket, .. } = &answer
        && opened.starts_first()
    {
        applied(
            opened.claims.start(ticket, options.evidence.as_bytes())?,
            key,
        )?;
    }
    opened.store.close()?;
    let name = common.namespace_or(NAMESPACE_DEFAULT);
    let refusal = answer.refusal(name, key);
    match answer {
        Answer::Claimed {
            how,
            attempt,
            previous,
            ticket,
        } if common.json => {
            let mut object = Map::new();
            object.insert("verdict".to_string(), json!(how));
            object.insert("ticket".to_string(), json!(ticket.to_string()));
            object.insert("epoch".to_string(), json!(ticket.epoch().get()));
            object.insert("attempt".to_string(), json!(attempt));
            if let Some(previous) = previous {
                object.insert("previous_started".to_string(), json!(previous.started));
                put_bytes(&mut object, "previous_evidence", &previous.evidence);
                put_bytes(&mut object, "previous_error", &previous.error);
            }
            print_line(&Value::Object(object).to_string())?;
        }
        Answer::Claimed { ticket, .. } => print_line(&ticket.to_string())?,
        Answer::Duplicate(done) => {
            let state = KeyState::Done(done);
            if common.json {
                let mut object = state_json(key, &state);
                object.insert("verdict".to_string(), json!("duplicate"));
                print_line(&Value::Object(object).to_string())?;
            } else {
                say(&format!("idemlog: duplicate: {}", state_line(key, &state)));
            }
        }
        _ => {}
    }
    refusal.map_or(Ok(Code::Done as u8), Err)
}

/// Opens the ticket's namespace, makes one call, and closes the store.
pub(crate) fn with_ticket<T>(
    common: &Common,
    ticket: &Ticket,
    options: NamespaceOptions,
    call: impl FnOnce(&dyn Claims) -> idemlog::Result<T>,
) -> Result<T, Stop> {
    let name = common.namespace_of(ticket)?;
    let store = common.open(false)?;
    let claims = Space::existing(&store, name, options)?.claims(name)?;
    let answer = call(&*claims)?;
    drop(claims);
    store.close()?;
    Ok(answer)
}

pub(crate) fn renew(common: &Common, options: &args::Renew) -> Result<u8, Stop> {
    let ticket = &options.ticket;
    let change = with_ticket(common, ticket, NamespaceOptions::new(), |claims| {
        claims.renew(ticket, options.lease)
    })?;
    report(common, ticket.key(), change)
}

pub(crate) fn commit(common: &Common, options: &args::Commit) -> Result<u8, Stop> {
    let ticket = &options.ticket;
    let commit = Commit::new(options.outcome.read()?).retention(options.retain);
    let verdict = with_ticket(common, ticket, NamespaceOptions::new(), |claims| {
        claims.commit(ticket, commit)
    })?;
    let word = committed(verdict, ticket.key())?;
    if common.json {
        print_line(&json!({ "verdict": word }).to_string())?;
    }
    Ok(Code::Done as u8)
}

/// Returns the word for a commit that stands, and the refusal of one that does not.
pub(crate) fn committed(verdict: CommitVerdict, key: &[u8]) -> Result<&'static str, Stop> {
    match verdict {
        CommitVerdict::Committed { .. } => Ok("committed"),
        CommitVerdict::AlreadyCommitted => Ok("already-committed"),
        CommitVerdict::Conflict { current, .. } => Err(Stop::new(
            Code::Mismatch,
            format!(
                "conflict: another outcome of this claim is committed and stays: {}; nothing was \
                 written",
                state_line(key, &KeyState::Done(current))
            ),
        )),
        CommitVerdict::Fenced { current, .. } => Err(fenced(&current, key)),
        CommitVerdict::CellConflict { index, .. } => Err(Stop::new(
            Code::Mismatch,
            format!("conflict: cell={index} of the commit has changed; nothing was written"),
        )),
    }
}

pub(crate) fn fail(common: &Common, options: &args::Fail) -> Result<u8, Stop> {
    let ticket = &options.ticket;
    let text = options.error.as_bytes().to_vec();
    let failure = match options.how {
        FailKind::Retryable => Failure::Retryable {
            after: options.after,
            error: text,
        },
        FailKind::Permanent => Failure::Permanent { error: text },
        FailKind::Release => Failure::Release,
        FailKind::Unknown => Failure::Unknown { evidence: text },
    };
    let change = with_ticket(common, ticket, NamespaceOptions::new(), |claims| {
        claims.fail(ticket, failure)
    })?;
    report(common, ticket.key(), change)
}

pub(crate) fn get(common: &Common, options: &args::Get) -> Result<u8, Stop> {
    let key = options.key.as_bytes();
    let state = with_key(common, common.open_to_read()?, |space| space.get(key))?;
    let code = match &state {
        KeyState::Pending { .. } => Code::NotNow,
        KeyState::Failed { retry_after, .. } if !retry_after.is_zero() => Code::NotNow,
        KeyState::InDoubt(_) => Code::InDoubt,
        KeyState::Rejected { .. } | KeyState::Dead { .. } => Code::Refused,
        _ => Code::Done,
    };
    if options.outcome {
        let KeyState::Done(done) = &state else {
            return Err(Stop::new(
                if code == Code::Done {
                    Code::NotNow
                } else {
                    code
                },
                format!("no outcome: {}", state_line(key, &state)),
            ));
        };
        print(match &done.outcome {
            Outcome::Kept(bytes) => bytes,
            Outcome::Dropped => b"",
        })?;
    } else if common.json {
        print_line(&Value::Object(state_json(key, &state)).to_string())?;
    } else {
        print_line(&state_line(key, &state))?;
    }
    Ok(code as u8)
}

pub(crate) fn forget(common: &Common, options: &args::Forget) -> Result<u8, Stop> {
    let key = options.key.as_bytes();
    let forgotten = with_key(common, common.open(false)?, |space| {
        space.forget(key, options.force)
    });
    match forgotten? {
        Change::Fenced { current } => Err(Stop::new(
            Code::of_fenced(&current),
            format!(
                "not forgotten: {}; let it end, resolve it, or use --force",
                state_line(key, &current)
            ),
        )),
        change => report(common, key, change),
    }
}

pub(crate) fn resolve(common: &Common, options: &args::Resolve) -> Result<u8, Stop> {
    let key = options.key.as_bytes();
    let given = options.outcome.outcome.is_some() || options.outcome.outcome_stdin;
    let resolution = match options.found {
        Found::Applied => Resolution::Applied(options.outcome.read()?),
        _ if given => return Err(Stop::usage("only applied has an outcome; leave it out")),
        Found::NotApplied => Resolution::NotApplied,
        Found::Abandon => Resolution::Abandon,
    };
    let name = common.namespace_or(NAMESPACE_DEFAULT);
    let store = common.open(false)?;
    let claims = Space::existing(&store, name, NamespaceOptions::new())?.claims(name)?;
    let change = claims.resolve(key, Stamp::from_u64(options.epoch), resolution)?;
    drop(claims);
    store.close()?;
    report(common, key, change)
}

/// Opens the namespace of a key, makes one call, and closes the store.
fn with_key<T>(
    common: &Common,
    store: DedupLog,
    call: impl FnOnce(&Space) -> idemlog::Result<T>,
) -> Result<T, Stop> {
    let name = common.namespace_or(NAMESPACE_DEFAULT);
    let space = Space::existing(&store, name, NamespaceOptions::new())?;
    let answer = call(&space)?;
    drop(space);
    store.close()?;
    Ok(answer)
}

/// Prints the state a change led to, or refuses.
fn report(common: &Common, key: &[u8], change: Change) -> Result<u8, Stop> {
    let state = applied(change, key)?;
    if common.json {
        print_line(&Value::Object(state_json(key, &state)).to_string())?;
    }
    Ok(Code::Done as u8)
}

/// Returns the state a change led to; a fenced one is a refusal.
pub(crate) fn applied(change: Change, key: &[u8]) -> Result<KeyState, Stop> {
    match change {
        Change::Applied(state) => Ok(state),
        Change::Fenced { current } => Err(fenced(&current, key)),
    }
}

fn fenced(current: &KeyState, key: &[u8]) -> Stop {
    Stop::new(
        Code::of_fenced(current),
        format!(
            "fenced: nothing was written; the key is now: {}",
            state_line(key, current)
        ),
    )
}

impl OutcomeSource {
    fn read(&self) -> Result<Vec<u8>, Stop> {
        if let Some(text) = &self.outcome {
            return Ok(OsStr::as_bytes(text).to_vec());
        }
        let mut bytes = Vec::new();
        if self.outcome_stdin {
            // One byte more than the limit is enough for the store to refuse it.
            let limit = u64::try_from(OUTCOME_BYTES_MAX)
                .unwrap_or(u64::MAX)
                .saturating_add(1);
            let read = io::stdin().lock().take(limit).read_to_end(&mut bytes);
            read.map_err(|e| Stop::io("cannot read the outcome from stdin", &e))?;
        }
        Ok(bytes)
    }
}
