//! Batches of claims and commits: one pass over the index, one write, one flush.

use super::attach::GroupCommitted;
use super::claim::{ClaimVerdict, Commit, Committable, Committed, commit_step, is_end};
use super::class::EffectClass;
use super::namespace::{Answer, ClaimOptions, Namespace, Space};
use super::pass::{Item, Resting, Rests, Written, fetch_table_ahead, next_pass};
use super::update::{Attempt, Basis, Decided, Levels, Search, Step};
use super::{Engine, check_open};
use crate::error::{Error, Result};
use crate::model::claim::{Entry, Env};
use crate::options::{Durability, Retention};
use crate::stamp::Stamp;
use crate::verdict::CommitVerdict;

/// What the answers of a batch rest on: its own records, and older ones.
pub(super) struct ManyBasis {
    written: Option<Basis>,
    read: Option<Basis>,
    pub(super) passes: Written,
}

impl ManyBasis {
    pub(super) fn parts(&self) -> impl Iterator<Item = Basis> + use<> {
        [self.written, self.read].into_iter().flatten()
    }
}

/// One commit of a batch: key, epoch, what to commit, and why not.
type OneCommit = (Vec<u8>, Stamp, Commit, Result<()>);

/// A commit with what is attached to it, and what its answer rests on.
type Grouping = (GroupCommitted, Option<Rests>);

/// Commits of a batch that are appended and not durable yet.
pub(super) struct ManyCommits {
    claims: Vec<OneCommit>,
    answers: Vec<Option<Result<Decided<Committed>>>>,
    /// Those with something attached, which were appended apart.
    attached: Vec<Option<Result<Grouping>>>,
    level: Durability,
    pub(super) basis: ManyBasis,
}

impl ManyCommits {
    /// Returns what each of those rests on that were appended apart.
    pub(super) fn apart(&self) -> Vec<(usize, Basis)> {
        let basis = |(index, attached): (usize, &Option<Result<Grouping>>)| {
            let (_, rests) = attached.as_ref()?.as_ref().ok()?;
            let Rests { end, failures } = (*rests)?;
            let level = self.level;
            Some((
                index,
                Basis {
                    end,
                    failures,
                    level,
                },
            ))
        };
        self.attached.iter().enumerate().filter_map(basis).collect()
    }

    /// Notes whether one of those is as durable as it must be.
    pub(super) fn note(&mut self, index: usize, ensured: Result<()>) {
        if let (Err(error), Some(place)) = (ensured, self.attached.get_mut(index)) {
            *place = Some(Err(error));
        }
    }

    /// What the rest of the batch fails with says nothing of those that were appended apart.
    pub(super) fn error(&self, error: Error) -> Error {
        if self.attached.iter().flatten().any(Result::is_ok) {
            error.maybe_applied()
        } else {
            error
        }
    }

    /// Says whether the claims of what was appended have their end.
    pub(super) fn set_ended<C: EffectClass, H: Committable<C>>(
        &self,
        items: &mut [(H, Commit)],
        ended: bool,
    ) {
        let answers = self.answers.iter().zip(&self.attached);
        for ((answer, attached), (guard, _)) in answers.zip(items) {
            let written = |decided: &Decided<Committed>| decided.written.is_some();
            let is_own = matches!(answer, Some(Ok(decided)) if written(decided));
            let is_apart = matches!(attached, Some(Ok((group, _))) if group.is_written());
            if is_own || is_apart {
                guard.held_mut().ended = ended;
            }
        }
    }
}

/// A claim of a batch.
pub(super) enum OneClaim<C: EffectClass> {
    /// It is granted.
    Held(ClaimVerdict<C>),
    /// It is answered otherwise, when that is durable.
    Decided(Decided<Answer>),
}

/// Claims of a batch whose answers may not be durable yet.
pub(super) struct ManyClaims<C: EffectClass> {
    pub(super) claims: Vec<Result<OneClaim<C>>>,
    basis: ManyBasis,
    /// What the answers rest on that the claims themselves have settled.
    settled: Option<Basis>,
}

impl<C: EffectClass> ManyClaims<C> {
    pub(super) fn bases(&self) -> impl Iterator<Item = Basis> + use<C> {
        self.basis.parts().chain(self.settled)
    }

    pub(super) fn error_of_wait(&self, error: Error) -> Error {
        self.basis.passes.error_of_wait(error)
    }
}

/// Keys that are decided about together.
struct Batch<'a> {
    space: &'a Space,
    keys: &'a [&'a [u8]],
    levels: Levels,
    /// They are there, and mostly in the active segment: that is asked first.
    is_known: bool,
}

impl Engine {
    /// Decides about many keys: all are searched, then decided and appended under one lock. After
    /// an error `answers` holds what was decided before it; none of that may be told as durable.
    fn update_many_undurable<R>(
        &self,
        batch: Batch<'_>,
        answers: &mut Vec<Option<Result<Decided<R>>>>,
        decide: impl FnMut(usize, Option<&Entry>, &Env) -> Step<R>,
        retention: impl Fn(usize) -> Retention,
    ) -> Result<ManyBasis> {
        self.check_home()?;
        let mut items: Vec<Item<'_, Decided<R>>> = batch
            .keys
            .iter()
            .map(|key| Item::new(self, batch.space, key))
            .collect();
        let done = self.decide_many(&batch, &mut items, decide, retention);
        if self.waits.any() {
            self.tell_waiters(batch.space, &items);
        }
        answers.extend(items.into_iter().map(|item| item.answer));
        let (rests, written) = done?;
        let levels = batch.levels;
        let basis = |rests: Option<Rests>, level| {
            rests.map(|Rests { end, failures }| Basis {
                end,
                failures,
                level,
            })
        };
        Ok(ManyBasis {
            written: basis(rests.written, levels.write),
            read: basis(rests.read, levels.answer),
            passes: written,
        })
    }

    fn ensure_many(&self, basis: &ManyBasis) -> Result<()> {
        for basis_of_part in basis.parts() {
            let ensured = self.ensure_basis(basis_of_part);
            ensured.map_err(|e| basis.passes.error_of_wait(e))?;
        }
        Ok(())
    }

    /// Returns what the answers rest on, and what of them was appended.
    fn decide_many<R>(
        &self,
        batch: &Batch<'_>,
        items: &mut [Item<'_, Decided<R>>],
        mut decide: impl FnMut(usize, Option<&Entry>, &Env) -> Step<R>,
        retention: impl Fn(usize) -> Retention,
    ) -> Result<(Resting, Written)> {
        let Batch {
            space,
            levels,
            is_known,
            ..
        } = *batch;
        let mut rests = Resting::default();
        let mut written = Written::default();
        let mut done = 0;
        while let Some(pass) = next_pass(items, &mut done) {
            let first = done;
            let snapshot = self.snapshot_many(pass, is_known);
            let searched = self.search_many(&snapshot, pass, &Entry::of_record);
            let now = self.now();
            let mut no_room = None;
            {
                let mut core = self.turn().map_err(|e| written.error(e))?;
                self.check_writable(&core).map_err(|e| written.error(e))?;
                for (at, searched) in searched.into_iter().enumerate() {
                    fetch_table_ahead(pass, at, &core);
                    let (Some(searched), Some(item)) = (searched, pass.get_mut(at)) else {
                        continue;
                    };
                    let index = first + at;
                    let search = Search {
                        snapshot: &snapshot,
                        wanted: item.wanted,
                        searched,
                    };
                    let mut decide = |entry: Option<&Entry>, env: &Env| decide(index, entry, env);
                    let tried = self.attempt(
                        &mut core,
                        space,
                        search,
                        now,
                        retention(index),
                        levels.answer,
                        &mut decide,
                    );
                    match tried {
                        // Whoever comes first in the batch comes first: the rest waits, too.
                        Ok(Attempt::Again | Attempt::InFile) => break,
                        Ok(Attempt::NoRoom(room)) => {
                            no_room = Some(room);
                            break;
                        }
                        Ok(Attempt::Done {
                            decided,
                            end,
                            failures,
                        }) => {
                            rests.add(decided.written.is_some(), Rests { end, failures });
                            written.answered = true;
                            written.now |= decided.written.is_some();
                            item.answer = Some(Ok(decided));
                        }
                        Err(error) => item.answer = Some(Err(error)),
                    }
                }
                if written.now {
                    let finished = self.finish_append(&mut core, levels.write);
                    finished.map_err(|e| written.error_of_write(e))?;
                }
            }
            written.end_pass();
            if let Some(room) = no_room {
                drop(snapshot);
                self.make_room(room).map_err(|e| written.error(e))?;
            }
        }
        Ok((rests, written))
    }

    /// Tells those who wait for the keys of a batch, which may have failed half-way.
    fn tell_waiters<R>(&self, space: &Space, items: &[Item<'_, Decided<R>>]) {
        self.pay_waiters();
        for item in items {
            if let Some(Ok(Decided {
                written: Some((entry, _)),
                ..
            })) = &item.answer
            {
                self.waits
                    .changed(space.id, item.wanted.key, entry.ends_waits());
            }
        }
    }
}

impl<C: EffectClass> Namespace<C> {
    /// Claims many keys, in order; a repeat inside the batch is `Busy`. One write serves all. A
    /// bad key is an error of its own item.
    ///
    /// # Errors
    /// As [`Namespace::claim`], for the batch as a whole: claims made before the error are
    /// released.
    pub fn claim_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        options: &ClaimOptions,
    ) -> Result<Vec<Result<ClaimVerdict<C>>>> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let many = self.claim_many_undurable(&keys, options)?;
        for basis in many.bases() {
            let ensured = self.handle.engine.ensure_basis(basis);
            ensured.map_err(|e| many.error_of_wait(e))?;
        }
        let told = keys.iter().zip(many.claims);
        Ok(told
            .map(|(key, claimed)| match self.told_of_claim(key, claimed?) {
                Some(verdict) => Ok(verdict),
                None => self.claim_with(key, options),
            })
            .collect())
    }

    /// Decides the claims of a batch and does not wait. What is granted is held by guards from
    /// here on: whatever the batch ends with, they release it.
    pub(super) fn claim_many_undurable(
        &self,
        keys: &[&[u8]],
        options: &ClaimOptions,
    ) -> Result<ManyClaims<C>> {
        let request = self.request(options);
        let mut answers = Vec::with_capacity(keys.len());
        let batch = Batch {
            space: &self.space,
            keys,
            levels: self.claim_levels(options.detached),
            is_known: false,
        };
        let updated = self.handle.engine.update_many_undurable(
            batch,
            &mut answers,
            |_, entry, env| self.decide_claim(entry, env, &request),
            |_| self.space.options.retention,
        );
        let settled = self.settled_basis(answers.iter().flatten().flatten());
        let decided = keys.iter().zip(answers.into_iter().flatten());
        let claims = decided
            .map(|(key, decided)| {
                let decided = decided?;
                Ok(match decided.answer {
                    Answer::Granted { .. } => OneClaim::Held(self.granted(key, decided, options)?),
                    _ => OneClaim::Decided(decided),
                })
            })
            .collect();
        let many = |basis| ManyClaims {
            claims,
            basis,
            settled,
        };
        updated.map(many)
    }

    /// Tells of a claim of a batch when its answer is as durable as it must be; `None`: a probe is
    /// to be asked. That is user code: for one key at a time, with no lock held.
    pub(super) fn told_of_claim(
        &self,
        key: &[u8],
        claimed: OneClaim<C>,
    ) -> Option<ClaimVerdict<C>> {
        match claimed {
            OneClaim::Held(verdict) => Some(verdict),
            OneClaim::Decided(decided) if matches!(decided.answer, Answer::Probe(_)) => None,
            // Nothing is granted here that could be done for a guard.
            OneClaim::Decided(decided) => Some(self.verdict(key, decided, false)),
        }
    }

    /// Commits many claims, each on its own: one write and one flush serve all. Those with
    /// something attached are written before the others, each with one write of its own.
    ///
    /// # Errors
    /// As `commit`, for the batch as a whole; the claims are still held then. An item whose
    /// outcome is over the limit is an error of its own.
    pub fn commit_many<H: Committable<C>>(
        &self,
        items: &mut [(H, Commit)],
    ) -> Result<Vec<Result<CommitVerdict>>> {
        let engine = &self.handle.engine;
        let mut many = self.commit_many_undurable(items)?;
        let ensured = engine.ensure_many(&many.basis);
        ensured.map_err(|e| many.error(e))?;
        for (index, basis) in many.apart() {
            many.note(index, engine.ensure_basis(basis));
        }
        Ok(self.committed(items, many))
    }

    /// Appends the commits and does not wait.
    pub(super) fn commit_many_undurable<H: Committable<C>>(
        &self,
        items: &mut [(H, Commit)],
    ) -> Result<ManyCommits> {
        let engine = &self.handle.engine;
        check_open(&engine.core())?;
        let mut claims = Vec::with_capacity(items.len());
        let mut level = Durability::Buffered;
        for (guard, commit) in items.iter_mut() {
            let held = guard.held_mut();
            level = level.max(self.level(commit.durability));
            let sized = self.check_outcome(&held.key, commit.outcome.as_ref().map_or(0, Vec::len));
            let own = held.namespace.space.id == self.space.id;
            let checked = sized.and_then(|()| if own { Ok(()) } else { Err(self.foreign()) });
            claims.push((held.key.clone(), held.epoch, commit.clone(), checked));
        }
        let attached = self.append_many_attached(&mut claims);
        // An item that is refused keeps its place with an empty key, which is refused anew.
        let keys: Vec<&[u8]> = claims
            .iter()
            .map(|(key, _, _, checked)| if checked.is_ok() { key.as_slice() } else { b"" })
            .collect();
        let mut answers = Vec::with_capacity(keys.len());
        let batch = Batch {
            space: &self.space,
            keys: &keys,
            levels: Levels {
                write: level,
                answer: level,
            },
            is_known: true,
        };
        let updated = engine.update_many_undurable(
            batch,
            &mut answers,
            |index, entry, env| match claims.get(index) {
                Some((_, epoch, commit, _)) => commit_step(entry, env, *epoch, commit),
                None => Step::Answer(Committed::NotStarted),
            },
            |index| {
                let commit = claims.get(index).map(|(_, _, commit, _)| commit);
                commit.map_or(self.space.options.retention, |c| self.commit_retention(c))
            },
        );
        let is_apart = attached.iter().flatten().any(Result::is_ok);
        let basis = updated.map_err(|e| if is_apart { e.maybe_applied() } else { e })?;
        Ok(ManyCommits {
            claims,
            answers,
            attached,
            level,
            basis,
        })
    }

    /// Tells of commits that are as durable as they must be.
    pub(super) fn committed<H: Committable<C>>(
        &self,
        items: &mut [(H, Commit)],
        many: ManyCommits,
    ) -> Vec<Result<CommitVerdict>> {
        let ManyCommits {
            claims,
            answers,
            attached,
            ..
        } = many;
        let decided = answers.into_iter().flatten();
        let mut verdicts = Vec::with_capacity(items.len());
        for ((((key, _, commit, checked), decided), attached), (guard, _)) in claims
            .into_iter()
            .zip(decided)
            .zip(attached)
            .zip(items.iter_mut())
        {
            let verdict = match attached {
                Some(attached) => attached
                    .and_then(|(committed, _)| self.attached_verdict(&key, committed, commit)),
                None => checked.and(decided).and_then(|decided| {
                    let position = decided.written.map(|(_, position)| position);
                    self.commit_verdict(&key, decided.answer, position, commit)
                }),
            };
            if verdict.as_ref().is_ok_and(is_end) {
                guard.held_mut().ended = true;
            }
            verdicts.push(verdict);
        }
        verdicts
    }

    /// Appends the commits that have something attached, each as a frame of its own, and takes
    /// them out of the batch: what is left of them there is refused. The flush of the batch is
    /// theirs, too.
    fn append_many_attached(&self, claims: &mut [OneCommit]) -> Vec<Option<Result<Grouping>>> {
        let append = |(key, epoch, commit, checked): &mut OneCommit| {
            if commit.attached.is_empty() || checked.is_err() {
                return None;
            }
            *checked = Err(Error::invalid("committed apart from the batch"));
            Some(self.append_attached(key, *epoch, commit))
        };
        claims.iter_mut().map(append).collect()
    }

    fn foreign(&self) -> Error {
        Error::invalid(format!(
            "claim of another namespace: namespace={}",
            self.name()
        ))
    }
}
