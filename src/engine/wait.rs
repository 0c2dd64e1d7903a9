//! How does a caller wait for a key that another owner holds?
//!
//! Everybody who waits for a key stands in its line (see `waits.rs`). The first asks as any claim
//! does, each time the key changes and when its lease or pause ends; the others ask only what has
//! an end, and are asked nothing else until they are the first.

use std::cell::RefCell;
use std::time::Duration;

use super::Engine;
use super::claim::ClaimVerdict;
use super::class::EffectClass;
use super::namespace::{Answer, ClaimOptions, Namespace, Space, to_ms};
use super::run_once::{Attempt, RunVerdict};
use super::update::{Basis, Decided};
use super::waits::Place;
use crate::error::{Error, Result};
use crate::key::check_key;
use crate::log::bell::Listening;
use crate::model::claim::Request;
use crate::verdict::{Failure, KeyState};

/// One call that waits for a key.
pub(super) struct Waiting<'a, C> {
    namespace: &'a Namespace<C>,
    key: &'a [u8],
    options: &'a ClaimOptions,
    request: Request,
    /// The end of the wait, on the boot clock.
    deadline_ms: u64,
    place: Option<Place<'a>>,
    /// Whose turn it was at the last look: see [`Place::behind_until`].
    behind_until_ms: Option<u64>,
}

/// What came of one look at the key.
pub(super) struct Look {
    /// When it began, on the boot clock.
    at_ms: u64,
    listening: Option<Listening>,
    decided: Decided<Answer>,
    pub(super) basis: Basis,
}

/// What a waiter does next.
pub(super) enum Next<C: EffectClass> {
    Return(ClaimVerdict<C>),
    /// Look again when the bell rings, and at the latest at this moment on the boot clock.
    Sleep(Listening, u64),
    LookAgain,
}

impl<'a, C: EffectClass> Waiting<'a, C> {
    pub(super) fn new(
        namespace: &'a Namespace<C>,
        key: &'a [u8],
        options: &'a ClaimOptions,
        deadline: Duration,
    ) -> Result<Self> {
        check_key(key)?;
        let now_ms = namespace.handle.engine.now().boot_ms;
        Ok(Waiting {
            namespace,
            key,
            options,
            request: namespace.request(options),
            deadline_ms: now_ms.saturating_add(to_ms(deadline)),
            place: None,
            behind_until_ms: None,
        })
    }

    fn engine(&self) -> &'a Engine {
        &self.namespace.handle.engine
    }

    fn join(&mut self) {
        let waits = &self.engine().waits;
        self.place = Some(waits.join(self.namespace.space.id, self.key, self.deadline_ms));
    }

    /// Looks at the key. Registered first, so that no change behind the look is missed.
    pub(super) fn look(&mut self) -> Result<Look> {
        let waits = &self.engine().waits;
        if self.place.is_none() && waits.has_line(self.namespace.space.id, self.key) {
            self.join();
        }
        let listening = self.place.as_ref().map(Place::listen);
        let now_ms = self.engine().now().boot_ms;
        self.behind_until_ms = self.place.as_ref().and_then(|p| p.behind_until(now_ms));
        let is_first = self.behind_until_ms.is_none();
        let (decided, basis) = self
            .namespace
            .claim_undurable(self.key, &self.request, is_first)?;
        Ok(Look {
            at_ms: now_ms,
            listening,
            decided,
            basis,
        })
    }

    /// Says what comes after a look whose answer is as durable as it must be.
    pub(super) fn next(&mut self, look: Look) -> Result<Next<C>> {
        let wait_ms = match &look.decided.answer {
            Answer::State {
                state: KeyState::Pending { lease_left, .. },
                busy_ms,
            } => busy_ms.unwrap_or_else(|| to_ms(*lease_left)),
            Answer::State {
                state: KeyState::Failed { retry_after, .. },
                ..
            } => to_ms(*retry_after),
            Answer::State {
                state: KeyState::Absent,
                ..
            } => u64::MAX,
            _ => return self.end(look.decided),
        };
        if look.at_ms >= self.deadline_ms {
            return self.end(look.decided);
        }
        let now_ms = self.engine().now().boot_ms;
        if now_ms >= self.deadline_ms {
            // What is told at the deadline is what is true then.
            return Ok(Next::LookAgain);
        }
        let Some(listening) = look.listening else {
            self.join();
            return Ok(Next::LookAgain);
        };
        // Who is not the first is rung when it becomes that, unless those before it are left.
        let until_ms = match self.behind_until_ms {
            None => now_ms.saturating_add(wait_ms.max(1)),
            Some(until_ms) => until_ms,
        };
        Ok(Next::Sleep(listening, until_ms.min(self.deadline_ms)))
    }

    fn end(&self, decided: Decided<Answer>) -> Result<Next<C>> {
        let verdict = self.namespace.granted(self.key, decided, self.options)?;
        Ok(Next::Return(verdict))
    }

    pub(super) fn place(&self) -> Option<&Place<'a>> {
        self.place.as_ref()
    }
}

impl<C: EffectClass> Namespace<C> {
    /// Claims the right to run the effect of this key, and waits while another owner holds it:
    /// until its outcome is there, which the waiter gets, or until the claim is free, which the
    /// waiter inherits (`New` after a release, `Retry` when a pause is over, `Takeover` when a
    /// lease lapses). At the deadline, counted from now, it returns what [`Namespace::claim`]
    /// answers then: `Busy` or `Backoff`.
    ///
    /// Waiters for one key get it in the order in which they came; a plain `claim` may come
    /// before them. The deadline also bounds the wait of an owner for its own key.
    ///
    /// # Errors
    /// As [`Namespace::claim`]; `Closed` and `Poisoned` end a wait.
    pub fn claim_wait(&self, key: impl AsRef<[u8]>, deadline: Duration) -> Result<ClaimVerdict<C>> {
        self.claim_wait_with(key, &ClaimOptions::new(), deadline)
    }

    /// Waits for a claim with a fingerprint, another lease, or detached. Another fingerprint than
    /// the key's is a `Mismatch` at once.
    ///
    /// # Errors
    /// As [`Namespace::claim_wait`].
    pub fn claim_wait_with(
        &self,
        key: impl AsRef<[u8]>,
        options: &ClaimOptions,
        deadline: Duration,
    ) -> Result<ClaimVerdict<C>> {
        let engine = &self.handle.engine;
        let mut waiting = Waiting::new(self, key.as_ref(), options, deadline)?;
        loop {
            let look = waiting.look()?;
            engine.ensure_basis(look.basis)?;
            match waiting.next(look)? {
                Next::Return(verdict) => return Ok(verdict),
                Next::Sleep(listening, until_ms) => engine.sleep(listening, until_ms),
                Next::LookAgain => {}
            }
        }
    }

    /// Runs the effect of this key once, as [`Namespace::run_once`] does; concurrent duplicates
    /// wait for its outcome, as in [`Namespace::claim_wait`], instead of being told `Busy`.
    ///
    /// # Errors
    /// As [`Namespace::run_once`]; `Closed` and `Poisoned` end a wait.
    pub fn run_once_wait(
        &self,
        key: impl AsRef<[u8]>,
        deadline: Duration,
        effect: impl FnOnce(&Attempt) -> std::result::Result<Vec<u8>, Failure>,
    ) -> Result<RunVerdict> {
        self.run_once_wait_with(key, &ClaimOptions::new(), deadline, effect)
    }

    /// The same with a fingerprint or another lease.
    ///
    /// # Errors
    /// As [`Namespace::run_once_wait`].
    pub fn run_once_wait_with(
        &self,
        key: impl AsRef<[u8]>,
        options: &ClaimOptions,
        deadline: Duration,
        effect: impl FnOnce(&Attempt) -> std::result::Result<Vec<u8>, Failure>,
    ) -> Result<RunVerdict> {
        let verdict = self.claim_wait_with(key, options, deadline)?;
        self.run_claimed(verdict, effect)
    }
}

thread_local! {
    /// The keys that this thread is asking a probe about: store, namespace, key.
    static ASKING: RefCell<Vec<(usize, u16, Vec<u8>)>> = const { RefCell::new(Vec::new()) };
}

/// A probe that is being asked. Claiming the same key from within it would ask it again, without
/// an end.
pub(super) struct Asking;

impl Asking {
    pub(super) fn begin(engine: &Engine, space: &Space, key: &[u8]) -> Result<Asking> {
        let store = std::ptr::from_ref(engine) as usize;
        ASKING.with_borrow_mut(|asking| {
            let is_same = |(s, n, k): &(usize, u16, Vec<u8>)| {
                (*s, *n) == (store, space.id) && k.as_slice() == key
            };
            if asking.iter().any(is_same) {
                return Err(Error::invalid(format!(
                    "a probe claimed the key it is asked about: namespace={} key={}; let it ask \
                     the target only",
                    space.name,
                    crate::key::show_key(key)
                )));
            }
            asking.push((store, space.id, key.to_vec()));
            Ok(Asking)
        })
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        ASKING.with_borrow_mut(|asking| asking.pop());
    }
}
