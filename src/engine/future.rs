//! How does a task wait for the store without blocking the thread that polls it?
//!
//! An asynchronous call does its work when it is first polled, as its blocking twin does: search,
//! decide, append. Only its waits are different: for the disk on the thread `idemlog-flush`, which
//! joins the same group commit as all callers, and for a key in the same line as they.

use std::future::Future;
use std::time::Duration;

use super::Engine;
use super::claim::{Claim, ClaimVerdict, Commit, Committable, Held, StartError, Started, is_end};
use super::class::{DirectCommit, EffectClass};
use super::filter::{Filter, ObserveOptions};
use super::keep::Kept;
use super::namespace::{ClaimOptions, Namespace, Space};
use super::run_once::{Attempt, RunVerdict};
use super::update::Basis;
use super::wait::{Next, Waiting};
use crate::error::{ErrorKind, Result};
use crate::key::check_key;
use crate::model::claim as model;
use crate::options::Durability;
use crate::stamp::Stamp;
use crate::verdict::{Change, CommitVerdict, Failure, KeyState, Observed, Resolution};

impl Engine {
    /// Waits until what an answer rests on is as durable as it must be. Without a thread that
    /// flushes (`Options::background`, a store that is closing) the flush is led here.
    async fn durable(&self, basis: Basis) -> Result<()> {
        let Basis {
            end,
            failures,
            level,
        } = basis;
        if level != Durability::Power {
            return self.ensure(end, failures, level);
        }
        let end_ms = self.gate_end_ms();
        loop {
            let place = match self.syncer.judge_or_join(end, failures) {
                Ok(judged) => return judged.map_err(|error| self.wait_error(error)),
                Err(place) => place,
            };
            self.check_gate_end(end_ms)?;
            if !self.background.flush_now() {
                drop(place);
                return self.ensure(end, failures, level);
            }
            place.rung().await;
        }
    }
}

impl<C: EffectClass> Held<C> {
    async fn commit_async(&mut self, commit: Commit) -> Result<CommitVerdict> {
        if !commit.attached.is_empty() {
            return self.commit_attached_async(commit).await;
        }
        let (decided, basis) = {
            let _still = self.kept.as_ref().map(Kept::pause);
            self.namespace
                .commit_undurable(&self.key, self.epoch, &commit)?
        };
        // From here on the record is there: a future that is dropped does not end the claim again.
        self.ended = true;
        let engine = &self.namespace.handle.engine;
        let synced = engine.durable(basis).await;
        let position = decided.written.map(|(_, position)| position);
        let verdict = synced.and_then(|()| {
            self.namespace
                .commit_verdict(&self.key, decided.answer, position, commit)
        });
        self.ended = verdict.is_ok();
        verdict
    }

    /// The same with what is attached.
    async fn commit_attached_async(&mut self, commit: Commit) -> Result<CommitVerdict> {
        let (committed, rests) = {
            let _still = self.kept.as_ref().map(Kept::pause);
            self.namespace
                .append_attached(&self.key, self.epoch, &commit)?
        };
        self.ended = committed.is_written();
        let mut synced = Ok(());
        if let Some(on) = rests {
            let basis = Basis {
                end: on.end,
                failures: on.failures,
                level: self.namespace.level(commit.durability),
            };
            synced = self.namespace.handle.engine.durable(basis).await;
        }
        let verdict = synced.and_then(|()| {
            self.namespace
                .attached_verdict(&self.key, committed, commit)
        });
        self.ended = verdict.as_ref().is_ok_and(is_end);
        verdict
    }

    async fn fail_async(&mut self, failure: &Failure) -> Result<Change> {
        let (change, basis) = {
            let _still = self.kept.as_ref().map(Kept::pause);
            let failed = self
                .namespace
                .fail_undurable(&self.key, self.epoch, failure, None)?;
            self.ended = true;
            self.kept.iter().for_each(Kept::end);
            failed
        };
        let synced = self.namespace.handle.engine.durable(basis).await;
        self.ended = synced.is_ok();
        synced?;
        Ok(self.namespace.told(&self.key, change))
    }
}

macro_rules! guard {
    ($name:ident) => {
        impl<C: EffectClass> $name<C> {
            /// As [`Self::renew`]; writes to the log when first polled, and waits for no flush.
            ///
            /// # Errors
            /// As [`Self::renew`].
            pub async fn renew_async(&self, lease: Duration) -> Result<Change> {
                self.renew(lease)
            }

            /// As [`Self::fail`]. A future that is dropped after its first poll has ended the
            /// claim as asked; one that was never polled drops the guard.
            ///
            /// # Errors
            /// As [`Self::fail`].
            pub async fn fail_async(mut self, failure: Failure) -> Result<Change> {
                self.0.fail_async(&failure).await
            }
        }
    };
}

guard!(Claim);
guard!(Started);

impl<C: EffectClass> Claim<C> {
    /// As [`Claim::start`]. A future that is dropped before it is ready releases the claim: nobody
    /// has been told that the effect may begin.
    ///
    /// # Errors
    /// As [`Claim::start`].
    pub async fn start_async(
        mut self,
        evidence: &[u8],
    ) -> std::result::Result<Started<C>, StartError<C>> {
        let undurable = self
            .0
            .namespace
            .start_undurable(&self.0.key, self.0.epoch, evidence);
        let (change, basis) = match undurable {
            Ok(begun) => begun,
            Err(error) => return Err(StartError::Failed { claim: self, error }),
        };
        if let Err(error) = self.0.namespace.handle.engine.durable(basis).await {
            return Err(StartError::Failed { claim: self, error });
        }
        match self.0.namespace.told(&self.0.key, change) {
            Change::Applied(_) => Ok(self.into_started()),
            Change::Fenced { current } => {
                self.0.ended = true;
                Err(StartError::Fenced { current })
            }
        }
    }
}

impl<C: EffectClass> Claim<C> {
    /// Whoever drops the guard of a task must not wait for the disk: nobody is told of its end.
    pub(crate) fn into_started(mut self) -> Started<C> {
        let mut held = self.0.take();
        held.drop_level = Some(Durability::Buffered);
        Started(held)
    }
}

impl<C: DirectCommit> Claim<C> {
    /// As [`Claim::commit`]. The commit is in the log after the first poll, and a future that is
    /// dropped later takes nothing back: the key is done. One that was never polled does nothing.
    ///
    /// # Errors
    /// As [`Claim::commit`].
    pub async fn commit_async(&mut self, outcome: &[u8]) -> Result<CommitVerdict> {
        self.0.commit_async(Commit::new(outcome)).await
    }

    /// As [`Claim::commit_with`]; see [`Claim::commit_async`].
    ///
    /// # Errors
    /// As [`Claim::commit`].
    pub async fn commit_with_async(&mut self, commit: Commit) -> Result<CommitVerdict> {
        self.0.commit_async(commit).await
    }
}

impl<C: EffectClass> Started<C> {
    /// As [`Started::commit`]. The commit is in the log after the first poll, and a future that is
    /// dropped later takes nothing back: the key is done. One that was never polled does nothing.
    ///
    /// # Errors
    /// As [`Started::commit`].
    pub async fn commit_async(&mut self, outcome: &[u8]) -> Result<CommitVerdict> {
        self.0.commit_async(Commit::new(outcome)).await
    }

    /// As [`Started::commit_with`]; see [`Started::commit_async`].
    ///
    /// # Errors
    /// As [`Started::commit`].
    pub async fn commit_with_async(&mut self, commit: Commit) -> Result<CommitVerdict> {
        self.0.commit_async(commit).await
    }
}

impl<C: EffectClass> Namespace<C> {
    /// As [`Namespace::claim`]. A future that is dropped before it is ready holds no claim.
    ///
    /// A poll may read the disk: a record of a sealed segment that is not in the page cache. A
    /// probe is called within a poll.
    ///
    /// # Errors
    /// As [`Namespace::claim`].
    pub async fn claim_async(&self, key: impl AsRef<[u8]>) -> Result<ClaimVerdict<C>> {
        self.claim_with_async(key, &ClaimOptions::new()).await
    }

    /// As [`Namespace::claim_with`]; see [`Namespace::claim_async`].
    ///
    /// # Errors
    /// As [`Namespace::claim`].
    pub async fn claim_with_async(
        &self,
        key: impl AsRef<[u8]>,
        options: &ClaimOptions,
    ) -> Result<ClaimVerdict<C>> {
        let key = key.as_ref();
        check_key(key)?;
        let (decided, basis) = self.claim_undurable(key, &self.request(options), true)?;
        self.handle.engine.durable(basis).await?;
        self.granted(key, decided, options)
    }

    /// As [`Namespace::claim_wait`], in the same line as callers that block. A future that is
    /// dropped before it is ready leaves the line and holds no claim.
    ///
    /// A poll may read the disk, as in [`Namespace::claim_async`].
    ///
    /// # Errors
    /// As [`Namespace::claim_wait`]; also `Io` if no thread can be started.
    pub async fn claim_wait_async(
        &self,
        key: impl AsRef<[u8]>,
        deadline: Duration,
    ) -> Result<ClaimVerdict<C>> {
        self.claim_wait_with_async(key, &ClaimOptions::new(), deadline)
            .await
    }

    /// As [`Namespace::claim_wait_with`]; see [`Namespace::claim_wait_async`].
    ///
    /// # Errors
    /// As [`Namespace::claim_wait_async`].
    pub async fn claim_wait_with_async(
        &self,
        key: impl AsRef<[u8]>,
        options: &ClaimOptions,
        deadline: Duration,
    ) -> Result<ClaimVerdict<C>> {
        let engine = &self.handle.engine;
        let mut waiting = Waiting::new(self, key.as_ref(), options, deadline)?;
        let verdict = loop {
            let look = waiting.look()?;
            engine.durable(look.basis).await?;
            match waiting.next(look)? {
                Next::Return(verdict) => break verdict,
                Next::LookAgain => {}
                Next::Sleep(listening, until_ms) => {
                    // Who sleeps stands in a line.
                    if let Some(place) = waiting.place() {
                        engine.sleep_async(place, listening, until_ms).await?;
                    }
                }
            }
        };
        Ok(verdict)
    }

    /// As [`Namespace::run_once`]. A future that is dropped while the effect runs leaves the
    /// outcome unknown, as a panic does; before the start is durable it releases the claim, and
    /// once the effect has returned its end is recorded.
    ///
    /// A poll may read the disk, as in [`Namespace::claim_async`].
    ///
    /// # Errors
    /// As [`Namespace::run_once`].
    pub async fn run_once_async<F: Future<Output = std::result::Result<Vec<u8>, Failure>>>(
        &self,
        key: impl AsRef<[u8]>,
        effect: impl FnOnce(Attempt) -> F,
    ) -> Result<RunVerdict> {
        self.run_once_with_async(key, &ClaimOptions::new(), effect)
            .await
    }

    /// As [`Namespace::run_once_with`]; see [`Namespace::run_once_async`].
    ///
    /// # Errors
    /// As [`Namespace::run_once`].
    pub async fn run_once_with_async<F: Future<Output = std::result::Result<Vec<u8>, Failure>>>(
        &self,
        key: impl AsRef<[u8]>,
        options: &ClaimOptions,
        effect: impl FnOnce(Attempt) -> F,
    ) -> Result<RunVerdict> {
        let verdict = self.claim_with_async(key, options).await?;
        self.run_claimed_async(verdict, effect).await
    }

    /// As [`Namespace::run_once_wait`]; see [`Namespace::run_once_async`] and
    /// [`Namespace::claim_wait_async`].
    ///
    /// # Errors
    /// As [`Namespace::run_once_wait`].
    pub async fn run_once_wait_async<F: Future<Output = std::result::Result<Vec<u8>, Failure>>>(
        &self,
        key: impl AsRef<[u8]>,
        deadline: Duration,
        effect: impl FnOnce(Attempt) -> F,
    ) -> Result<RunVerdict> {
        self.run_once_wait_with_async(key, &ClaimOptions::new(), deadline, effect)
            .await
    }

    /// As [`Namespace::run_once_wait_with`]; see [`Namespace::run_once_wait_async`].
    ///
    /// # Errors
    /// As [`Namespace::run_once_wait`].
    pub async fn run_once_wait_with_async<
        F: Future<Output = std::result::Result<Vec<u8>, Failure>>,
    >(
        &self,
        key: impl AsRef<[u8]>,
        options: &ClaimOptions,
        deadline: Duration,
        effect: impl FnOnce(Attempt) -> F,
    ) -> Result<RunVerdict> {
        let verdict = self.claim_wait_with_async(key, options, deadline).await?;
        self.run_claimed_async(verdict, effect).await
    }

    async fn run_claimed_async<F: Future<Output = std::result::Result<Vec<u8>, Failure>>>(
        &self,
        verdict: ClaimVerdict<C>,
        effect: impl FnOnce(Attempt) -> F,
    ) -> Result<RunVerdict> {
        let (claim, attempt) = match self.attempt(verdict) {
            Ok(begun) => begun,
            Err(answer) => return Ok(answer),
        };
        let started = if C::KIND.starts_durably() {
            claim.start_async(b"").await?
        } else {
            claim.into_started()
        };
        let ended = effect(attempt).await;
        match ended {
            Ok(outcome) => finish(started, outcome).await,
            Err(failure) => match started.fail_async(failure).await? {
                Change::Applied(state) | Change::Fenced { current: state } => {
                    Ok(RunVerdict::Failed { state })
                }
            },
        }
    }

    /// As [`Namespace::commit_many`]. The commits are in the log after the first poll, and a future
    /// that is dropped later takes none back; one that was never polled does nothing.
    ///
    /// # Errors
    /// As [`Namespace::commit_many`].
    pub async fn commit_many_async<H: Committable<C>>(
        &self,
        items: &mut [(H, Commit)],
    ) -> Result<Vec<Result<CommitVerdict>>> {
        let mut many = self.commit_many_undurable(items)?;
        // As for one commit: a guard whose record is there is not ended again by a drop.
        many.set_ended(items, true);
        for basis in many.basis.parts() {
            if let Err(error) = self.handle.engine.durable(basis).await {
                many.set_ended(items, false);
                return Err(many.error(many.basis.passes.error_of_wait(error)));
            }
        }
        for (index, basis) in many.apart() {
            let synced = self.handle.engine.durable(basis).await;
            if synced.is_err()
                && let Some((guard, _)) = items.get_mut(index)
            {
                guard.held_mut().ended = false;
            }
            many.note(index, synced);
        }
        Ok(self.committed(items, many))
    }

    /// As [`Namespace::resolve`]. The resolution is in the log after the first poll; a future that
    /// is dropped later takes nothing back.
    ///
    /// # Errors
    /// As [`Namespace::resolve`].
    pub async fn resolve_async(
        &self,
        key: impl AsRef<[u8]>,
        epoch: Stamp,
        resolution: Resolution,
    ) -> Result<Change> {
        let key = key.as_ref();
        self.check_resolution(key, &resolution)?;
        let (change, basis) =
            self.change_undurable(key, self.level(None), None, |entry, env| {
                model::resolve(entry, env, epoch, &resolution)
            })?;
        self.handle.engine.durable(basis).await?;
        Ok(self.told(key, change))
    }

    /// As [`Namespace::forget`]. The key is absent after the first poll; a future that is dropped
    /// later takes nothing back.
    ///
    /// # Errors
    /// As [`Namespace::forget`].
    pub async fn forget_async(&self, key: impl AsRef<[u8]>, forced: bool) -> Result<Change> {
        let key = key.as_ref();
        check_key(key)?;
        let (change, basis) = self.change_undurable(key, self.level(None), None, |entry, _| {
            model::forget(entry, forced)
        })?;
        self.handle.engine.durable(basis).await?;
        Ok(self.told(key, change))
    }
}

async fn finish<C: EffectClass>(mut started: Started<C>, outcome: Vec<u8>) -> Result<RunVerdict> {
    match started.commit_async(&outcome).await {
        Ok(commit) => Ok(RunVerdict::Ran { outcome, commit }),
        // The effect has happened: that must be recorded even if its outcome cannot be.
        Err(error) if error.kind() == ErrorKind::Invalid => {
            let recorded = started.commit_with_async(Commit::without_outcome()).await;
            Err(recorded.err().unwrap_or(error))
        }
        Err(error) => Err(error),
    }
}

impl Filter {
    /// As [`Filter::observe`]. The key is remembered after the first poll, and a future that is
    /// dropped later takes nothing back: the next copy is a duplicate. One that was never polled
    /// does nothing.
    ///
    /// A poll may read the disk: a record of a sealed segment that is not in the page cache.
    ///
    /// # Errors
    /// As [`Filter::observe`].
    pub async fn observe_async(&self, key: impl AsRef<[u8]>) -> Result<Observed> {
        self.observe_with_async(key, &ObserveOptions::new()).await
    }

    /// As [`Filter::observe_with`]; see [`Filter::observe_async`].
    ///
    /// # Errors
    /// As [`Filter::observe`].
    pub async fn observe_with_async(
        &self,
        key: impl AsRef<[u8]>,
        options: &ObserveOptions,
    ) -> Result<Observed> {
        let (observed, basis) = self.observe_undurable(key.as_ref(), options)?;
        self.handle.engine.durable(basis).await?;
        self.handle.engine.count(observed);
        Ok(observed)
    }

    /// As [`Filter::observe_many`]; see [`Filter::observe_async`].
    ///
    /// # Errors
    /// As [`Filter::observe_many`].
    pub async fn observe_many_async<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
    ) -> Result<Vec<Result<Observed>>> {
        self.observe_many_with_async(keys, &ObserveOptions::new())
            .await
    }

    /// As [`Filter::observe_many_with`]; see [`Filter::observe_async`].
    ///
    /// # Errors
    /// As [`Filter::observe_many`].
    pub async fn observe_many_with_async<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        options: &ObserveOptions,
    ) -> Result<Vec<Result<Observed>>> {
        let engine = &self.handle.engine;
        let many = self.observe_many_undurable(keys, options)?;
        if let Some(basis) = many.basis {
            let synced = engine.durable(basis).await;
            synced.map_err(|e| many.written.error_of_wait(e))?;
        }
        Ok(engine.counted(many.answers))
    }
}

impl<C: EffectClass> Namespace<C> {
    /// As [`Namespace::claim_many`]. A future that is dropped before it is ready holds no claim
    /// but detached ones, which stay until their leases lapse.
    ///
    /// A poll may read the disk, as in [`Namespace::claim_async`].
    ///
    /// # Errors
    /// As [`Namespace::claim_many`].
    pub async fn claim_many_async<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        options: &ClaimOptions,
    ) -> Result<Vec<Result<ClaimVerdict<C>>>> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let many = self.claim_many_undurable(&keys, options)?;
        for basis in many.bases() {
            let synced = self.handle.engine.durable(basis).await;
            synced.map_err(|e| many.error_of_wait(e))?;
        }
        let mut verdicts = Vec::with_capacity(keys.len());
        for (key, claimed) in keys.iter().zip(many.claims) {
            verdicts.push(match claimed {
                Err(error) => Err(error),
                Ok(claimed) => match self.told_of_claim(key, claimed) {
                    Some(verdict) => Ok(verdict),
                    None => self.claim_with_async(key, options).await,
                },
            });
        }
        Ok(verdicts)
    }

    /// As [`Namespace::get`]; a future that is dropped leaves nothing behind.
    ///
    /// A poll may read the disk, as in [`Namespace::claim_async`].
    ///
    /// # Errors
    /// As [`Namespace::get`].
    pub async fn get_async(&self, key: impl AsRef<[u8]>) -> Result<KeyState> {
        self.handle
            .engine
            .get_async(&self.space, key.as_ref())
            .await
    }
}

impl Filter {
    /// As [`Filter::get`]; a future that is dropped leaves nothing behind.
    ///
    /// A poll may read the disk, as in [`Filter::observe_async`].
    ///
    /// # Errors
    /// As [`Filter::get`].
    pub async fn get_async(&self, key: impl AsRef<[u8]>) -> Result<KeyState> {
        self.handle
            .engine
            .get_async(&self.space, key.as_ref())
            .await
    }
}

impl Engine {
    async fn get_async(&self, space: &Space, key: &[u8]) -> Result<KeyState> {
        let read = self.get_undurable(space, key)?;
        if let Some(basis) = read.basis {
            self.durable(basis).await?;
        }
        self.state_of(&read)
    }
}
