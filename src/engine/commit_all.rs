//! Commits of several claims: all of them happen, or none.

use std::sync::Arc;

use super::Engine;
use super::attach::{GroupClaim, GroupCommitted, Refusal};
use super::claim::{Commit, Committed, Held, commit_step, is_end};
use super::class::EffectClass;
use super::group::{GroupLevels, Grouped, Member, MemberStep};
use super::namespace::Space;
use super::update::Step;
use crate::error::{Error, ErrorKind, Result};
use crate::options::{Durability, Retention};
use crate::position::Position;
use crate::stamp::Stamp;
use crate::verdict::CommitVerdict;

/// Commits of several claims, of one or several namespaces, that happen together or not at all.
///
/// Made by [`CommitAll::new`], filled by [`CommitAll::add`], carried out by [`CommitAll::commit`].
#[derive(Debug, Default)]
#[must_use = "nothing is committed before `commit`"]
pub struct CommitAll<'a> {
    parts: Vec<Part<'a>>,
}

#[derive(Debug)]
struct Part<'a> {
    held: &'a mut dyn AnyHeld,
    commit: Commit,
}

/// The answer of [`CommitAll::commit`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a refusal wrote nothing"]
pub enum CommitAllVerdict {
    /// All are recorded, as durably as asked.
    Committed {
        /// Where.
        position: Position,
    },
    /// All were committed before, by the same epochs and with the same outcomes.
    AlreadyCommitted,
    /// Nothing was written, because of one of them. All claims are still held, but for one that
    /// is fenced.
    Refused {
        /// Which one, counted from 0 in the order in which they were added.
        index: usize,
        /// What its own commit would have been told.
        verdict: CommitVerdict,
    },
}

/// What a guard of any class is to a commit of several.
pub(crate) trait AnyHeld: std::fmt::Debug {
    fn engine(&self) -> &Engine;
    fn space(&self) -> &Arc<Space>;
    fn key(&self) -> &[u8];
    fn epoch(&self) -> Stamp;
    fn retention(&self, commit: &Commit) -> Retention;
    fn level(&self, commit: &Commit) -> Durability;
    fn check(&self, commit: &Commit) -> Result<()>;
    fn verdict(&self, committed: GroupCommitted, commit: Commit) -> Result<CommitVerdict>;
    fn end(&mut self);
}

impl<C: EffectClass> std::fmt::Debug for Held<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held")
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

impl<C: EffectClass> AnyHeld for Held<C> {
    fn engine(&self) -> &Engine {
        &self.namespace.handle.engine
    }

    fn space(&self) -> &Arc<Space> {
        &self.namespace.space
    }

    fn key(&self) -> &[u8] {
        &self.key
    }

    fn epoch(&self) -> Stamp {
        self.epoch
    }

    fn retention(&self, commit: &Commit) -> Retention {
        self.namespace.commit_retention(commit)
    }

    fn level(&self, commit: &Commit) -> Durability {
        self.namespace.level(commit.durability)
    }

    fn check(&self, commit: &Commit) -> Result<()> {
        let bytes = commit.outcome.as_ref().map_or(0, Vec::len);
        self.namespace.check_outcome(&self.key, bytes)
    }

    fn verdict(&self, committed: GroupCommitted, commit: Commit) -> Result<CommitVerdict> {
        self.namespace
            .attached_verdict(&self.key, committed, commit)
    }

    fn end(&mut self) {
        self.ended = true;
    }
}

impl<'a> CommitAll<'a> {
    /// Starts an empty list.
    pub fn new() -> Self {
        CommitAll::default()
    }

    /// Adds a claim that may be committed, with what its commit records.
    pub fn add<C: EffectClass, H: super::claim::Committable<C>>(
        mut self,
        claim: &'a mut H,
        commit: Commit,
    ) -> Self {
        let held = claim.held_mut();
        self.parts.push(Part { held, commit });
        self
    }

    /// Records that all of it happened, in one frame: after a crash all commits and everything
    /// attached to them are there, or none. The highest of the durabilities counts for all.
    ///
    /// # Errors
    /// `Invalid` for an empty list, claims of several stores, a key that is named twice, an
    /// outcome or value over its limit, or more than one frame holds (512 KiB less 8 bytes);
    /// `Full`, `Poisoned`, `Closed`, `Io`. The claims are still held after an error.
    pub fn commit(mut self) -> Result<CommitAllVerdict> {
        let Some(first) = self.parts.first() else {
            return Err(Error::invalid("no claim to commit: the list is empty"));
        };
        let store = first.held.engine().store;
        for part in &self.parts {
            part.held.check(&part.commit)?;
            if part.held.engine().store != store {
                return Err(Error::invalid(
                    "claims of several stores: one record can only be in one log",
                ));
            }
        }
        let engine = first.held.engine();
        let level = self.parts.iter().map(|p| p.held.level(&p.commit)).max();
        let level = level.unwrap_or(engine.options.durability);
        let owed =
            |p: &Part<'_>| engine.owed_bytes(p.held.space(), p.held.key()) + p.commit.ends_bytes();
        let levels = GroupLevels {
            level,
            reserved_bytes: self.parts.iter().map(owed).sum(),
        };
        let claims: Vec<GroupClaim<'_>> = self.parts.iter().map(Part::claim).collect();
        let (committed, rests) = engine.append_commits(&claims, levels)?;
        if let Some(rests) = rests {
            engine.ensure(rests.end, rests.failures, level)?;
        }
        drop(claims);
        self.answer(committed)
    }

    fn answer(&mut self, committed: GroupCommitted) -> Result<CommitAllVerdict> {
        match committed {
            GroupCommitted::Written { position, late } => {
                for (part, late) in self.parts.iter_mut().zip(late) {
                    let late = vec![late];
                    let own = GroupCommitted::Written { position, late };
                    let commit = std::mem::replace(&mut part.commit, Commit::without_outcome());
                    let _counted = part.held.verdict(own, commit)?;
                    part.held.end();
                }
                Ok(CommitAllVerdict::Committed { position })
            }
            GroupCommitted::Refused(refusal) => self.refuse(refusal),
        }
    }

    fn refuse(&mut self, refusal: Refusal) -> Result<CommitAllVerdict> {
        let (Refusal::Claim(index, _) | Refusal::Cell(index, ..)) = &refusal;
        let index = *index;
        if matches!(refusal, Refusal::Claim(0, Committed::Already)) && self.were_all_committed()? {
            self.parts.iter_mut().for_each(|part| part.held.end());
            return Ok(CommitAllVerdict::AlreadyCommitted);
        }
        let Some(part) = self.parts.get_mut(index) else {
            return Err(Error::new(
                ErrorKind::Io,
                "a commit was refused for no claim",
            ));
        };
        let commit = std::mem::replace(&mut part.commit, Commit::without_outcome());
        let verdict = part
            .held
            .verdict(GroupCommitted::Refused(refusal), commit)?;
        if is_end(&verdict) {
            part.held.end();
        }
        Ok(CommitAllVerdict::Refused { index, verdict })
    }

    /// Asks each claim on its own whether it was committed before, writing nothing: the first one
    /// was, and a commit of several leaves all of them so.
    fn were_all_committed(&self) -> Result<bool> {
        for part in &self.parts {
            let engine = part.held.engine();
            let member = [Member {
                space: part.held.space(),
                key: part.held.key(),
                retention: Retention::Forever,
            }];
            let levels = GroupLevels {
                level: part.held.level(&part.commit),
                reserved_bytes: 0,
            };
            let epoch = part.held.epoch();
            let asked = engine.update_group(&member, levels, |_, entry, env| {
                let step = commit_step(entry, env, epoch, &part.commit);
                let same = matches!(step, Step::Answer(Committed::Already));
                Ok(MemberStep::Refuse(same))
            })?;
            if !matches!(asked, Grouped::Refused(true)) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Part<'_> {
    fn claim(&self) -> GroupClaim<'_> {
        GroupClaim {
            space: self.held.space(),
            key: self.held.key(),
            epoch: self.held.epoch(),
            commit: &self.commit,
            retention: self.held.retention(&self.commit),
        }
    }
}
