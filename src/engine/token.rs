//! One-time tokens: issue and redeem, as a layer over claims. `docs/tokens.md`.
//!
//! A. Issuing writes nothing: a token says itself what it is, under a MAC.
//! B. Redeeming is a claim of the token's id. The commit is at `Power` and remembered at least
//!    until the token expires, so a token takes effect once.
//! C. Expiry is looked at before the claim and again after it, by trusted time, which does not
//!    go back: in between the mark of a used token cannot have expired unnoticed.
//! D. What is forged, unknown or wrongly bound is refused before any lock or read.

use std::fmt;
use std::time::Duration;

use super::claim::{Claim, ClaimVerdict, Commit};
use super::class::Internal;
use super::handle::DedupLog;
use super::namespace::{Namespace, to_ms};
use super::prepare::fill_random;
use crate::error::{Error, Result};
use crate::format::token::{Opened, TokenBody, TokenKeys};
use crate::options::{
    Durability, LEASE_DEFAULT, NamespaceOptions, OUTCOME_BYTES_DEFAULT, Retention, WhenFull,
};
use crate::stamp::Stamp;
use crate::verdict::{Change, CommitVerdict, Done, Failure};

/// What the names of namespaces that hold used tokens begin with.
const NAMESPACE_PREFIX: &str = "token:";
/// The key that holds the policy; the other keys are ids of 16 bytes.
const POLICY_KEY: &[u8] = b"policy";
/// The bytes of the longest policy name.
const POLICY_BYTES_MAX: usize = 6;

/// What the second redeemer of a token gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenPolicy {
    /// That it was used, and when. No outcome is kept.
    Single,
    /// The outcome of the first one, again.
    Replay,
}

impl TokenPolicy {
    /// Returns the name used in messages; it is kept in the store.
    pub const fn name(self) -> &'static str {
        match self {
            TokenPolicy::Single => "single",
            TokenPolicy::Replay => "replay",
        }
    }
}

/// How tokens of one name are redeemed.
#[derive(Clone, Debug)]
#[must_use]
pub struct TokenOptions {
    policy: TokenPolicy,
    lease: Duration,
    outcome_bytes_max: usize,
}

impl TokenOptions {
    /// Returns the defaults for this policy, which is declared once and kept in the store.
    pub fn new(policy: TokenPolicy) -> Self {
        TokenOptions {
            policy,
            lease: LEASE_DEFAULT,
            outcome_bytes_max: OUTCOME_BYTES_DEFAULT,
        }
    }

    /// Sets how long a redeemer that hangs keeps others out. Default:
    /// [`LEASE_DEFAULT`](crate::LEASE_DEFAULT).
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the largest outcome, in bytes; see [`NamespaceOptions::outcome_bytes_max`]. Default:
    /// [`OUTCOME_BYTES_DEFAULT`](crate::OUTCOME_BYTES_DEFAULT), and none with
    /// [`TokenPolicy::Single`].
    pub fn outcome_bytes_max(mut self, bytes: usize) -> Self {
        self.outcome_bytes_max = bytes;
        self
    }

    fn namespace(&self) -> NamespaceOptions {
        let outcome_bytes = match self.policy {
            TokenPolicy::Single => 0,
            TokenPolicy::Replay => self.outcome_bytes_max,
        };
        NamespaceOptions::new()
            .lease(self.lease)
            .durability(Durability::Power)
            .outcome_bytes_max(outcome_bytes.max(POLICY_BYTES_MAX))
    }
}

/// The printable form of a token: 88 characters, letters, digits, `-` and `_`. Whoever has it can
/// redeem it, as far as its binding allows: treat it as a password. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Token(String);

impl Token {
    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Token {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// One-time tokens of one name. Clones are handles of the same.
///
/// ```
/// use std::time::Duration;
///
/// use idemlog::{CommitVerdict, DedupLog, RedeemVerdict, TokenOptions, TokenPolicy};
///
/// let log = DedupLog::in_memory()?;
/// let resets = log.tokens("password-reset", TokenOptions::new(TokenPolicy::Single))?;
/// let token = resets.issue(Duration::from_secs(3600), "user-7")?;
///
/// assert!(matches!(resets.redeem(&token, "user-8")?, RedeemVerdict::WrongBinding));
/// match resets.redeem(&token, "user-7")? {
///     RedeemVerdict::Granted(mut redemption) => {
///         // Outside of the store: after the commit it happens at most once, before it at least
///         // once.
///         let verdict = redemption.commit(b"")?;
///         assert!(matches!(verdict, CommitVerdict::Committed { .. }));
///     }
///     refused => panic!("{refused:?}"),
/// }
/// assert!(matches!(resets.redeem(&token, "user-7")?, RedeemVerdict::Used { .. }));
/// # Ok::<(), idemlog::Error>(())
/// ```
#[derive(Clone)]
pub struct Tokens {
    used: Namespace<Internal>,
    keys: TokenKeys,
    policy: TokenPolicy,
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens")
            .field("namespace", &self.used.name())
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

/// The answer of `redeem`.
#[derive(Debug)]
#[must_use = "a redemption that is dropped gives the token back"]
pub enum RedeemVerdict {
    /// The token is valid and not used; its effect may be run under this guard.
    Granted(Redemption),
    /// It was used ([`TokenPolicy::Single`]).
    Used {
        /// Trusted time of the commit, in milliseconds.
        at_ms: u64,
    },
    /// It was used; this is what was kept of it ([`TokenPolicy::Replay`]).
    Replayed(Done),
    /// Somebody else is redeeming it.
    Busy {
        /// How long they still exclude others, at most.
        lease_left: Duration,
    },
    /// It was issued here, for this principal, and its time is over; whether it was used is not
    /// told.
    Expired,
    /// It was issued here, for another principal.
    WrongBinding,
    /// It is of another store, of another name or of a purged one in this store, or of this store
    /// before a repair that lost something.
    Unknown,
    /// It is no token, or was changed, or made by somebody without the store's secret.
    Forged,
}

impl RedeemVerdict {
    /// Returns the guard, if one was handed out.
    pub fn granted(self) -> Option<Redemption> {
        match self {
            RedeemVerdict::Granted(redemption) => Some(redemption),
            _ => None,
        }
    }
}

/// The right to run the effect of one token. Dropped without a commit, the token can be redeemed
/// again; so it can when this process ends before the commit.
#[derive(Debug)]
pub struct Redemption {
    claim: Claim<Internal>,
    expires_at_s: u32,
    policy: TokenPolicy,
}

impl Redemption {
    /// Returns the epoch: the fencing token to give to the target.
    pub fn epoch(&self) -> Stamp {
        self.claim.epoch()
    }

    /// Returns the number of this attempt to redeem the token, from 1.
    pub fn attempt(&self) -> u32 {
        self.claim.attempt()
    }

    /// Returns the same text on every attempt of this token: pass it to the target of an effect
    /// outside of the store as the target's own idempotency key.
    pub fn derived_key(&self, step: &str) -> String {
        self.claim.derived_key(step)
    }

    /// Prolongs the time in which others are kept out, to `lease` from now.
    ///
    /// # Errors
    /// `Poisoned`, `Closed`, `Full`, `Io`.
    pub fn renew(&self, lease: Duration) -> Result<Change> {
        self.claim.renew(lease)
    }

    /// Records, durably whatever the store's durability, that the token is used, with the outcome
    /// that later redeemers get ([`TokenPolicy::Replay`]; with `Single` no outcome is kept). This
    /// holds also when the token has expired since it was granted.
    ///
    /// # Errors
    /// `Invalid` for an outcome over the limit, `Poisoned`, `Closed`, `Io`. The redemption is
    /// still held after an error and may commit again.
    pub fn commit(&mut self, outcome: &[u8]) -> Result<CommitVerdict> {
        self.commit_with(Commit::new(outcome))
    }

    /// The same with what else [`Commit`] can record. Its retention and its durability are set
    /// here: the record outlives the token, and is durable.
    ///
    /// # Errors
    /// As [`Redemption::commit`].
    pub fn commit_with(&mut self, mut commit: Commit) -> Result<CommitVerdict> {
        if self.policy == TokenPolicy::Single {
            commit.outcome = None;
        }
        let commit = commit
            .retention(self.retention())
            .durability(Durability::Power);
        self.claim.commit_with(commit)
    }

    /// Gives the token back: it can be redeemed again.
    ///
    /// # Errors
    /// `Poisoned`, `Closed`, `Io`; the redemption then ends as if it had been dropped.
    pub fn release(self) -> Result<Change> {
        self.claim.fail(Failure::Release)
    }

    /// Counted from trusted time, and kept from the later of trusted and wall time on: never
    /// shorter than the token. At least a lease, so that a commit repeated after an error finds
    /// the first one.
    fn retention(&self) -> Retention {
        if self.expires_at_s == 0 {
            return Retention::Forever;
        }
        let space = &self.claim.0.namespace;
        let now_ms = space.handle.engine.now().trusted_ms;
        let left_ms = (u64::from(self.expires_at_s) * 1000).saturating_sub(now_ms);
        let left_ms = left_ms.max(to_ms(space.space.options.lease));
        Retention::For(Duration::from_millis(left_ms))
    }
}

impl Tokens {
    /// Issues a token that this principal (a user, a session, a request; empty: whoever has it)
    /// can redeem once, for at least this long. Nothing is written: what is lost is not missed,
    /// and a million unused tokens take no room.
    ///
    /// # Errors
    /// `Io` if the system has no randomness to give.
    pub fn issue(&self, ttl: impl Into<Retention>, bind: impl AsRef<[u8]>) -> Result<Token> {
        let engine = &self.used.handle.engine;
        let mut id = [0; 16];
        fill_random(engine.dir.as_ref(), &mut id)?;
        let expires_at_s = ttl.into().expires_at_s(engine.now().latest_ms);
        let body = TokenBody { id, expires_at_s };
        Ok(Token(self.keys.seal(&body, bind.as_ref())))
    }

    /// Redeems a token: tells what it is, and hands out the right to run its effect if it is
    /// valid and unused. Like a claim, this excludes all other redeemers and waits for no flush;
    /// only the commit uses the token up.
    ///
    /// Any text may be given. What was not issued here for this principal is refused without a
    /// look at the store.
    ///
    /// # Errors
    /// `Full` without room for a claim, `Poisoned`, `Closed`, `Damaged`, `Io`; `Invalid` if the
    /// token's record was written by other calls than these.
    pub fn redeem(&self, token: impl AsRef<str>, bind: impl AsRef<[u8]>) -> Result<RedeemVerdict> {
        let body = match self.keys.open(token.as_ref(), bind.as_ref()) {
            Opened::Valid(body) => body,
            Opened::Forged => return Ok(RedeemVerdict::Forged),
            Opened::Unknown => return Ok(RedeemVerdict::Unknown),
            Opened::WrongBinding => return Ok(RedeemVerdict::WrongBinding),
        };
        if self.is_over(&body) {
            return Ok(RedeemVerdict::Expired);
        }
        let verdict = self.used.claim(body.id)?;
        // Upholds C: if the mark of a used token had expired before the claim was decided, the
        // token has, too. The claim is released by its drop.
        if self.is_over(&body) {
            return Ok(RedeemVerdict::Expired);
        }
        Ok(match verdict {
            ClaimVerdict::New(claim)
            | ClaimVerdict::Takeover { claim, .. }
            | ClaimVerdict::Retry { claim, .. } => RedeemVerdict::Granted(Redemption {
                claim,
                expires_at_s: body.expires_at_s,
                policy: self.policy,
            }),
            ClaimVerdict::Duplicate(done) => match self.policy {
                TokenPolicy::Single => RedeemVerdict::Used {
                    at_ms: done.committed_at_ms,
                },
                TokenPolicy::Replay => RedeemVerdict::Replayed(done),
            },
            ClaimVerdict::Busy { lease_left, .. } => RedeemVerdict::Busy { lease_left },
            ClaimVerdict::Backoff { .. }
            | ClaimVerdict::Rejected { .. }
            | ClaimVerdict::Dead { .. }
            | ClaimVerdict::InDoubt(_)
            | ClaimVerdict::Mismatch => {
                return Err(Error::invalid(format!(
                    "token's record was written by other calls: namespace={}",
                    self.used.name()
                )));
            }
        })
    }

    /// Says whether a token's time is over, to the millisecond at which its record would expire.
    fn is_over(&self, body: &TokenBody) -> bool {
        let now_ms = self.used.handle.engine.now().trusted_ms;
        body.expires_at_s != 0 && now_ms >= u64::from(body.expires_at_s) * 1000
    }
}

impl DedupLog {
    /// Opens the tokens of one name, creating what they need if it is missing. Used tokens are
    /// remembered in the namespace `token:NAME`, which is theirs alone.
    ///
    /// # Errors
    /// `Invalid` for a bad name, for another policy than the one declared before, and in a store
    /// with [`WhenFull::EvictOldest`](crate::WhenFull::EvictOldest), which may forget that a token
    /// was used; `Poisoned`, `Closed`, `Full`, `Io`.
    pub fn tokens(&self, name: &str, options: TokenOptions) -> Result<Tokens> {
        let engine = &self.handle.engine;
        if engine.options.when_full == WhenFull::EvictOldest {
            return Err(Error::invalid(
                "tokens need a store that forgets nothing early: open it with WhenFull::Refuse",
            ));
        }
        let name = format!("{NAMESPACE_PREFIX}{name}");
        let used = self.namespace::<Internal>(&name, options.namespace())?;
        declare(&used, options.policy)?;
        let hash_key = engine.catalog().manifest().hash_key;
        Ok(Tokens {
            keys: TokenKeys::new(&hash_key, engine.store, used.space.id),
            used,
            policy: options.policy,
        })
    }
}

/// Writes the policy of a new name, or compares it. Whoever finds others at it waits for them, as
/// for any key: no lock is held over the flush, so the waker of a task that the flush has served
/// may open tokens, too.
fn declare(used: &Namespace<Internal>, policy: TokenPolicy) -> Result<()> {
    let found = loop {
        // Who declares it has ended, or is gone, within its lease.
        break match used.claim_wait(POLICY_KEY, used.space.options.lease)? {
            ClaimVerdict::New(mut claim)
            | ClaimVerdict::Takeover { mut claim, .. }
            | ClaimVerdict::Retry { mut claim, .. } => {
                let commit = Commit::new(policy.name()).retention(Retention::Forever);
                match claim.commit_with(commit)? {
                    CommitVerdict::Committed { .. } | CommitVerdict::AlreadyCommitted => {
                        return Ok(());
                    }
                    CommitVerdict::Conflict { current, .. } => Some(current),
                    // The lease has lapsed in between, and somebody has taken over.
                    CommitVerdict::Fenced { .. } => continue,
                    CommitVerdict::CellConflict { .. } => None,
                }
            }
            ClaimVerdict::Duplicate(done) => Some(done),
            _ => None,
        };
    };
    let found = found.as_ref().and_then(|done| done.outcome.bytes());
    if found == Some(policy.name().as_bytes()) {
        return Ok(());
    }
    let found = found.map_or_else(|| "none".into(), String::from_utf8_lossy);
    Err(Error::invalid(format!(
        "tokens have another policy: namespace={} found={found} asked={}; the policy is declared \
         once",
        used.name(),
        policy.name()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::vfs::sim::SimDisk;

    /// Forged, unknown and wrongly bound tokens are refused while somebody else holds every lock
    /// of the log, and without one call to the disk.
    #[test]
    fn what_is_not_ours_is_refused_without_a_lock_and_without_the_disk() {
        let disk = SimDisk::new();
        let log = Options::new()
            .background(false)
            .open_on(disk.dir())
            .unwrap();
        let single = || TokenOptions::new(TokenPolicy::Single);
        let tokens = log.tokens("a", single()).unwrap();
        let other = log.tokens("b", single()).unwrap();
        let ttl = Duration::from_secs(60);
        let token = tokens.issue(ttl, "anna").unwrap();
        let theirs = other.issue(ttl, "anna").unwrap();
        let mut forged = token.to_string();
        forged.pop();
        forged.push(if token.as_str().ends_with('A') {
            'B'
        } else {
            'A'
        });
        let calls = disk.counts();
        let (answered, answers) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let engine = &log.handle.engine;
            let (core, catalog) = (engine.core(), engine.catalog());
            let tokens = &tokens;
            scope.spawn(move || {
                for (text, bind) in [(&forged, "anna"), (&theirs.0, "anna"), (&token.0, "bob")] {
                    answered.send(tokens.redeem(text, bind).unwrap()).unwrap();
                }
            });
            let limit = Duration::from_secs(20);
            let all: Vec<_> = (0..3).map(|_| answers.recv_timeout(limit)).collect();
            drop((core, catalog));
            assert!(matches!(all[0], Ok(RedeemVerdict::Forged)), "{all:?}");
            assert!(matches!(all[1], Ok(RedeemVerdict::Unknown)), "{all:?}");
            assert!(matches!(all[2], Ok(RedeemVerdict::WrongBinding)), "{all:?}");
        });
        assert_eq!(disk.counts(), calls);
    }
}
