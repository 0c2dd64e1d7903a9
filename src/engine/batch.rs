//! Filters, and batches of every kind: one pass over the index, one write, one flush.

use std::sync::Arc;

use super::append::Appended;
use super::claim::{ClaimVerdict, Commit, Committable, Committed, commit_step};
use super::class::EffectClass;
use super::core::{Core, Need, Older, Room};
use super::handle::Handle;
use super::lookup::{Completed, Searched, Snapshot, Wanted};
use super::namespace::{Answer, ClaimOptions, Namespace, Space};
use super::pass::{Ahead, Item, Resting, Rests, Written, later, next_pass};
use super::update::{Attempt, Basis, Decided, Levels, Search, Step};
use super::{Engine, check_open};
use crate::clock::Now;
use crate::error::{Error, Result};
use crate::format::record::{Kind, Record};
use crate::key::check_key;
use crate::log::sync::FailureCount;
use crate::model::claim as model;
use crate::model::claim::{ChangeDecision, Entry, Env};
use crate::options::{Durability, Retention};
use crate::stamp::Stamp;
use crate::verdict::{Change, CommitVerdict, KeyState, Observed};

/// How one key is observed.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct ObserveOptions {
    retention: Option<Retention>,
    durability: Option<Durability>,
}

impl ObserveOptions {
    /// Returns the defaults: the namespace's retention and durability.
    pub fn new() -> Self {
        ObserveOptions::default()
    }

    /// Sets how long the key is remembered.
    pub fn retention(mut self, retention: impl Into<Retention>) -> Self {
        self.retention = Some(retention.into());
        self
    }

    /// Sets what the verdict must survive.
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = Some(durability);
        self
    }
}

/// A namespace whose keys are only observed: each is `New` once, then `Duplicate` until its
/// retention ends. The mark comes before the effect, so an effect happens at most once: a crash
/// between the two loses it. Clones are handles of the same filter.
#[derive(Clone, Debug)]
pub struct Filter {
    pub(super) handle: Arc<Handle>,
    pub(super) space: Arc<Space>,
}

/// What one observation wants.
#[derive(Clone, Copy, Debug)]
struct Observation {
    expires_at_s: u32,
    sliding: bool,
    level: Durability,
}

impl Filter {
    pub(crate) fn new(handle: Arc<Handle>, space: Arc<Space>) -> Self {
        Filter { handle, space }
    }

    /// Returns the filter's name.
    pub fn name(&self) -> &str {
        &self.space.name
    }

    /// Observes a key: one atomic step that answers and remembers. The verdict returns when the
    /// record that justifies it is as durable as the namespace says.
    ///
    /// # Errors
    /// `Invalid` for an empty or oversized key, `Full`, `Poisoned`, `Closed`, `Damaged`, `Io`.
    pub fn observe(&self, key: impl AsRef<[u8]>) -> Result<Observed> {
        self.observe_with(key, &ObserveOptions::new())
    }

    /// Observes a key with its own retention or durability.
    ///
    /// # Errors
    /// As [`Filter::observe`].
    pub fn observe_with(
        &self,
        key: impl AsRef<[u8]>,
        options: &ObserveOptions,
    ) -> Result<Observed> {
        let (observed, basis) = self.observe_undurable(key.as_ref(), options)?;
        self.handle.engine.ensure_basis(basis)?;
        self.handle.engine.count(observed);
        Ok(observed)
    }

    /// The same without the wait at the end.
    pub(super) fn observe_undurable(
        &self,
        key: &[u8],
        options: &ObserveOptions,
    ) -> Result<(Observed, Basis)> {
        check_key(key)?;
        let engine = &self.handle.engine;
        let wanted = engine.wanted_in(&self.space, key);
        let mut in_file = false;
        loop {
            let snapshot = engine.snapshot(wanted.h);
            let searched = engine.search(&snapshot, wanted, in_file, &|_| ())?;
            let now = engine.now();
            let asked = self.observation(options, &now);
            let mut core = engine.core();
            engine.check_writable(&core)?;
            core.check_namespace(&self.space)?;
            match self.observe_one(&mut core, &snapshot, wanted, searched, &now, asked) {
                One::Again => {}
                One::InFile => in_file = true,
                One::Refused(error) => return Err(error),
                One::NoRoom(room) => {
                    drop(core);
                    engine.make_room(room)?;
                }
                One::Observed {
                    observed,
                    rests,
                    appended,
                } => {
                    if appended {
                        engine.finish_append(&mut core, asked.level)?;
                    }
                    let basis = Basis {
                        end: rests.end,
                        failures: rests.failures,
                        level: asked.level,
                    };
                    return Ok((observed, basis));
                }
            }
        }
    }

    /// Observes many keys, in order: the first of a repeat inside the batch is new, the others
    /// are duplicates. One flush serves all, and one write up to 1024 keys. A bad key is an error
    /// of its own item, and so is one whose record cannot be read.
    ///
    /// # Errors
    /// As [`Filter::observe`], for the batch as a whole: its keys may or may not be remembered.
    pub fn observe_many<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Observed>>> {
        self.observe_many_with(keys, &ObserveOptions::new())
    }

    /// Observes many keys with their own retention or durability.
    ///
    /// # Errors
    /// As [`Filter::observe_many`].
    pub fn observe_many_with<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        options: &ObserveOptions,
    ) -> Result<Vec<Result<Observed>>> {
        let engine = &self.handle.engine;
        let many = self.observe_many_undurable(keys, options)?;
        if let Some(basis) = many.basis {
            let ensured = engine.ensure_basis(basis);
            ensured.map_err(|e| many.written.error_of_wait(e))?;
        }
        Ok(engine.counted(many.answers))
    }

    /// The same without the wait at the end.
    pub(super) fn observe_many_undurable<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        options: &ObserveOptions,
    ) -> Result<ManyObserved> {
        let engine = &self.handle.engine;
        let mut items: Vec<Item<'_, Observed>> = keys
            .iter()
            .map(|key| Item::new(engine, &self.space, key.as_ref()))
            .collect();
        let level = engine.level(self.space.options.durability, options.durability);
        let mut rests: Option<Rests> = None;
        let mut written = Written::default();
        let mut done = 0;
        while let Some(pass) = next_pass(&mut items, &mut done) {
            let snapshot = engine.snapshot_many(pass, false);
            let searched = engine.search_many(&snapshot, pass, &|_| ());
            let now = engine.now();
            let asked = self.observation(options, &now);
            let mut no_room = None;
            {
                let mut core = engine.core();
                let checked = engine.check_writable(&core);
                let checked = checked.and_then(|()| core.check_namespace(&self.space));
                checked.map_err(|e| written.error(e))?;
                let mut ahead = Ahead::new(pass);
                for (item, searched) in pass.iter_mut().zip(searched) {
                    ahead.fetch_table(&core);
                    let Some(searched) = searched else {
                        continue;
                    };
                    match self.observe_one(&mut core, &snapshot, item.wanted, searched, &now, asked)
                    {
                        // Whoever comes first in the batch comes first: the rest waits, too.
                        One::Again | One::InFile => break,
                        One::Refused(error) => item.answer = Some(Err(error)),
                        One::NoRoom(room) => {
                            no_room = Some(room);
                            break;
                        }
                        One::Observed {
                            observed,
                            rests: on,
                            appended,
                        } => {
                            item.answer = Some(Ok(observed));
                            rests = later(rests, on);
                            written.answered = true;
                            written.now |= appended;
                        }
                    }
                }
                if written.now {
                    let finished = engine.finish_append(&mut core, level);
                    finished.map_err(|e| written.error_of_write(e))?;
                }
            }
            written.end_pass();
            if let Some(room) = no_room {
                engine.make_room(room).map_err(|e| written.error(e))?;
            }
        }
        Ok(ManyObserved {
            answers: items.into_iter().filter_map(|item| item.answer).collect(),
            basis: rests.map(|Rests { end, failures }| Basis {
                end,
                failures,
                level,
            }),
            written,
        })
    }

    /// Says for each key whether it is remembered, without remembering it. Another thread may
    /// observe it the moment after: use it for reports, not to decide about an effect.
    ///
    /// # Errors
    /// `Damaged`, `Io`, `Closed`, `Poisoned`.
    pub fn check_many<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<bool>>> {
        let engine = &self.handle.engine;
        let mut answers = Vec::with_capacity(keys.len());
        for key in keys {
            let key = key.as_ref();
            if let Err(error) = check_key(key) {
                answers.push(Err(error));
                continue;
            }
            answers.push(Ok(engine.get(&self.space, key)? == KeyState::Seen));
        }
        Ok(answers)
    }

    /// Reads whether a key is remembered.
    ///
    /// # Errors
    /// As [`Filter::check_many`]; also `Invalid` for a bad key.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<KeyState> {
        self.handle.engine.get(&self.space, key.as_ref())
    }

    /// Makes a key absent, durably: it is new when observed again.
    ///
    /// # Errors
    /// `Invalid`, `Poisoned`, `Closed`, `Io`.
    pub fn forget(&self, key: impl AsRef<[u8]>) -> Result<Change> {
        let key = key.as_ref();
        check_key(key)?;
        let level = self
            .handle
            .engine
            .level(self.space.options.durability, None);
        let levels = Levels {
            write: level,
            answer: level,
        };
        let decided = self.handle.engine.update(
            &self.space,
            key,
            levels,
            self.space.options.retention,
            |entry, _| match model::forget(entry, true) {
                ChangeDecision::Write { entry, .. } => Step::Write(
                    super::update::Write {
                        entry,
                        is_claim: false,
                        deadline_boot_ms: None,
                    },
                    Change::Applied(KeyState::Absent),
                ),
                _ => Step::Answer(Change::Applied(KeyState::Absent)),
            },
        )?;
        Ok(decided.answer)
    }

    fn observation(&self, options: &ObserveOptions, now: &Now) -> Observation {
        let retention = options.retention.unwrap_or(self.space.options.retention);
        Observation {
            expires_at_s: retention.expires_at_s(now.latest_ms),
            sliding: self.space.options.sliding,
            level: self
                .handle
                .engine
                .level(self.space.options.durability, options.durability),
        }
    }

    /// Decides about one key under the lock.
    fn observe_one(
        &self,
        core: &mut Core,
        snapshot: &Snapshot,
        wanted: Wanted<'_>,
        searched: Searched<()>,
        now: &Now,
        asked: Observation,
    ) -> One {
        let engine = &self.handle.engine;
        let hit = match engine.complete(core, snapshot, wanted, searched, &|_| ()) {
            Ok(Completed::Current(hit)) => hit,
            Ok(Completed::Changed) => return One::Again,
            Ok(Completed::InFile) => return One::InFile,
            Err(error) => return One::Refused(error),
        };
        let older = hit.map(|hit| hit.older);
        let known = older.filter(|older| is_remembered(older, now));
        let longer = |older: &Older| {
            older.expires_at_s != 0
                && (asked.expires_at_s == 0 || asked.expires_at_s > older.expires_at_s)
        };
        if let Some(known) = known
            && !(asked.sliding && longer(&known))
        {
            core.rest_on(known.position, asked.level);
            let rests = Rests {
                end: known.position.after(),
                failures: FailureCount::new(core.failures),
            };
            return One::Observed {
                observed: Observed::Duplicate,
                rests,
                appended: false,
            };
        }
        let mut record = Record::new(Kind::Seen, self.space.id, wanted.key);
        record.expires_at_s = asked.expires_at_s;
        record.parts.inherit_s = core.inherit(older, now.trusted_ms);
        let frame_bytes = record.frame_bytes();
        // Forgotten and sliding keys are not new to the store, but they are to its bound.
        if let Err(error) = engine.check_frame(frame_bytes) {
            return One::Refused(error);
        }
        let room = Room {
            frame_bytes,
            need: Need::New { owed_bytes: 0 },
        };
        if !core.has_room(room) {
            return One::NoRoom(room);
        }
        let Appended { position, failures } = engine.append(core, &record, wanted.h, older, None);
        let rests = Rests {
            end: position.after(),
            failures,
        };
        let observed = if known.is_some() {
            Observed::Duplicate
        } else {
            Observed::New
        };
        One::Observed {
            observed,
            rests,
            appended: true,
        }
    }
}

/// What came of a batch, before its wait.
pub(super) struct ManyObserved {
    pub(super) answers: Vec<Result<Observed>>,
    pub(super) basis: Option<Basis>,
    pub(super) written: Written,
}

/// What came of one key of a batch.
enum One {
    Observed {
        observed: Observed,
        rests: Rests,
        appended: bool,
    },
    Again,
    /// A record of the active segment must be read from its file first.
    InFile,
    NoRoom(Room),
    /// No segment could hold the record, or the key's own could not be read.
    Refused(Error),
}

fn is_remembered(older: &Older, now: &Now) -> bool {
    older.kind != Kind::Forgotten
        && (older.expires_at_s == 0 || now.trusted_ms < u64::from(older.expires_at_s) * 1000)
}

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

/// Commits of a batch that are appended and not durable yet.
pub(super) struct ManyCommits {
    claims: Vec<OneCommit>,
    answers: Vec<Option<Result<Decided<Committed>>>>,
    pub(super) basis: ManyBasis,
}

impl ManyCommits {
    /// Says whether the claims of what was appended have their end.
    pub(super) fn set_ended<C: EffectClass, H: Committable<C>>(
        &self,
        items: &mut [(H, Commit)],
        ended: bool,
    ) {
        for (answer, (guard, _)) in self.answers.iter().zip(items) {
            let written = |decided: &Decided<Committed>| decided.written.is_some();
            if matches!(answer, Some(Ok(decided)) if written(decided)) {
                guard.held_mut().ended = ended;
            }
        }
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
    pub(super) fn count(&self, observed: Observed) {
        match observed {
            Observed::New => self.counters.new.add(1),
            Observed::Duplicate => self.counters.duplicates.add(1),
        }
    }

    pub(super) fn counted(&self, answers: Vec<Result<Observed>>) -> Vec<Result<Observed>> {
        for observed in answers.iter().flatten() {
            self.count(*observed);
        }
        answers
    }

    /// Decides about many keys: all are searched, then decided and appended under one lock, with
    /// one wait at the end. After an error `answers` holds what was decided before it; none of
    /// that may be told as durable.
    fn update_many<R>(
        &self,
        batch: Batch<'_>,
        answers: &mut Vec<Option<Result<Decided<R>>>>,
        decide: impl FnMut(usize, Option<&Entry>, &Env) -> Step<R>,
        retention: impl Fn(usize) -> Retention,
    ) -> Result<()> {
        let basis = self.update_many_undurable(batch, answers, decide, retention)?;
        self.ensure_many(&basis)
    }

    /// The same without the wait at the end.
    fn update_many_undurable<R>(
        &self,
        batch: Batch<'_>,
        answers: &mut Vec<Option<Result<Decided<R>>>>,
        decide: impl FnMut(usize, Option<&Entry>, &Env) -> Step<R>,
        retention: impl Fn(usize) -> Retention,
    ) -> Result<ManyBasis> {
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
                let mut core = self.core();
                let checked = self.check_writable(&core);
                checked.map_err(|e| written.error(e))?;
                let mut ahead = Ahead::new(pass);
                for (index, (item, searched)) in (first..).zip(pass.iter_mut().zip(searched)) {
                    ahead.fetch_table(&core);
                    let Some(searched) = searched else {
                        continue;
                    };
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
        let request = self.request(options);
        let mut answers = Vec::with_capacity(keys.len());
        let batch = Batch {
            space: &self.space,
            keys: &keys,
            levels: self.claim_levels(options.detached),
            is_known: false,
        };
        let claimed = self.handle.engine.update_many(
            batch,
            &mut answers,
            |_, entry, env| self.decide_claim(entry, env, &request),
            |_| self.space.options.retention,
        );
        let claimed =
            claimed.and_then(|()| self.wait_for_answers(answers.iter().flatten().flatten()));
        let decided = keys.iter().zip(answers.into_iter().flatten());
        if let Err(error) = claimed {
            // The guards of what was claimed before the error release it when they are dropped.
            for (key, decided) in decided {
                drop(decided.map(|decided| self.verdict(key, decided, false)));
            }
            return Err(error);
        }
        Ok(decided
            .map(|(key, decided)| match decided?.into_probe() {
                // A probe is user code: it is asked for one key at a time, with no lock held.
                Err(_doubt) => self.claim_with(key, options),
                Ok(decided) => self.granted(key, decided, options),
            })
            .collect())
    }

    /// Commits many claims, each on its own: one write and one flush serve all.
    ///
    /// # Errors
    /// As `commit`, for the batch as a whole; the claims are still held then. An item whose
    /// outcome is over the limit is an error of its own.
    pub fn commit_many<H: Committable<C>>(
        &self,
        items: &mut [(H, Commit)],
    ) -> Result<Vec<Result<CommitVerdict>>> {
        let many = self.commit_many_undurable(items)?;
        self.handle.engine.ensure_many(&many.basis)?;
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
        let basis = engine.update_many_undurable(
            batch,
            &mut answers,
            |index, entry, env| match claims.get(index) {
                Some((_, epoch, commit, _)) => {
                    commit_step(entry, env, *epoch, commit.outcome.as_deref())
                }
                None => Step::Answer(Committed::NotStarted),
            },
            |index| {
                let commit = claims.get(index).map(|(_, _, commit, _)| commit);
                commit.map_or(self.space.options.retention, |c| self.commit_retention(c))
            },
        )?;
        Ok(ManyCommits {
            claims,
            answers,
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
            claims, answers, ..
        } = many;
        let decided = answers.into_iter().flatten();
        let mut verdicts = Vec::with_capacity(items.len());
        for (((key, _, commit, checked), decided), (guard, _)) in
            claims.into_iter().zip(decided).zip(items.iter_mut())
        {
            let verdict = checked.and(decided).and_then(|decided| {
                let position = decided.written.map(|(_, position)| position);
                self.commit_verdict(&key, decided.answer, position, commit)
            });
            if verdict.is_ok() {
                guard.held_mut().ended = true;
            }
            verdicts.push(verdict);
        }
        verdicts
    }

    fn foreign(&self) -> Error {
        Error::invalid(format!(
            "claim of another namespace: namespace={}",
            self.name()
        ))
    }
}

impl Decided<Answer> {
    fn into_probe(self) -> std::result::Result<Self, crate::verdict::Doubt> {
        match self.answer {
            Answer::Probe(doubt) => Err(doubt),
            _ => Ok(self),
        }
    }
}
