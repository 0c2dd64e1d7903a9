//! Filters: namespaces whose keys are only observed, one by one or many at once.

use std::sync::Arc;

use super::append::Appended;
use super::core::{Core, Older, Snapshot};
use super::handle::Handle;
use super::lookup::{Completed, Searched, Wanted};
use super::namespace::Space;
use super::pass::{Item, Rests, Written, fetch_table_ahead, later, next_pass};
use super::room::{Need, Room};
use super::update::{Basis, Levels, Step};
use super::{Engine, check_open};
use crate::clock::Now;
use crate::error::{Error, Result};
use crate::format::record::{Kind, Record};
use crate::key::check_key;
use crate::log::sync::FailureCount;
use crate::model::claim as model;
use crate::model::claim::ChangeDecision;
use crate::options::{Durability, Retention};
use crate::verdict::{Change, KeyState, Observed};

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
        engine.check_home()?;
        let wanted = engine.wanted_in(&self.space, key);
        let mut in_file = false;
        loop {
            let snapshot = engine.snapshot(wanted);
            let searched = engine.search(&snapshot, wanted, in_file, &|_| ())?;
            let now = engine.now();
            let asked = self.observation(options, &now);
            let mut core = engine.turn()?;
            engine.check_writable(&core)?;
            core.check_namespace(&self.space)?;
            match self.observe_one(&mut core, &snapshot, wanted, searched, &now, asked) {
                One::Again => {}
                One::InFile => in_file = true,
                One::Refused(error) => return Err(error),
                One::NoRoom(room) => {
                    drop(core);
                    // It may be the last to hold the table of a segment that is sealed now.
                    drop(snapshot);
                    engine.make_room(room)?;
                }
                One::Observed {
                    observed,
                    rests,
                    appended,
                } => {
                    let level = if appended {
                        engine.finish_append(&mut core, asked.level)?;
                        Engine::level_left(asked.level)
                    } else {
                        asked.level
                    };
                    let basis = Basis {
                        end: rests.end,
                        failures: rests.failures,
                        level,
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
        engine.check_home()?;
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
                let mut core = engine.turn().map_err(|e| written.error(e))?;
                let checked = engine.check_writable(&core);
                let checked = checked.and_then(|()| core.check_namespace(&self.space));
                checked.map_err(|e| written.error(e))?;
                for (index, searched) in searched.into_iter().enumerate() {
                    fetch_table_ahead(pass, index, &core);
                    let (Some(searched), Some(item)) = (searched, pass.get_mut(index)) else {
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
                drop(snapshot);
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
            answers.push(Ok(engine.is_seen(&self.space, key)?));
        }
        Ok(answers)
    }

    /// Reads whether a key is remembered.
    ///
    /// # Errors
    /// As [`Filter::check_many`]; also `Invalid` for a bad key.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<KeyState> {
        let key = key.as_ref();
        check_key(key)?;
        let is_seen = self.handle.engine.is_seen(&self.space, key)?;
        Ok(if is_seen {
            KeyState::Seen
        } else {
            KeyState::Absent
        })
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
        let room = Room::of_one(frame_bytes, Need::New { owed_bytes: 0 });
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

impl Engine {
    /// Says whether a filter's key is remembered, as [`Engine::get`] does, which also tells what
    /// more a claim's record says. The caller has checked the key.
    fn is_seen(&self, space: &Space, key: &[u8]) -> Result<bool> {
        let located = self.locate(self.wanted_in(space, key), |_| ())?;
        let now = self.now();
        {
            let core = self.core();
            check_open(&core)?;
            core.check_namespace(space)?;
        }
        let newest = located.hit.map(|hit| hit.older);
        self.check_trustworthy(newest.map(|newest| newest.position))?;
        if let Some(newest) = newest {
            // A duplicate is told only of what is as durable as the namespace says.
            let level = self.level(space.options.durability, None);
            self.ensure(newest.position.after(), located.failures, level)?;
        }
        let is_seen = newest.is_some_and(|newest| is_remembered(&newest, &now));
        if !is_seen {
            self.check_whole()?;
        }
        Ok(is_seen)
    }

    pub(super) fn count(&self, observed: Observed) {
        match observed {
            Observed::New => self.counters.new.add(1),
            Observed::Duplicate => self.counters.duplicates.add(1),
        }
    }

    pub(super) fn counted(&self, answers: Vec<Result<Observed>>) -> Vec<Result<Observed>> {
        let all = answers.iter().flatten();
        let (mut new, mut duplicates) = (0, 0);
        for observed in all {
            match observed {
                Observed::New => new += 1,
                Observed::Duplicate => duplicates += 1,
            }
        }
        self.counters.new.add(new);
        self.counters.duplicates.add(duplicates);
        answers
    }
}
