//! What commits together with a key: outbox entries, watermarks, cells. One frame makes the key,
//! its outcome and everything attached durable together, or nothing of it.

use std::sync::Arc;

use super::claim::{Commit, Committed, Held, commit_step, is_end};
use super::class::EffectClass;
use super::group::{GroupLevels, Grouped, Member, MemberStep, Written};
use super::namespace::{Namespace, Space};
use super::outbox::{Outbox, entry_key};
use super::pass::Rests;
use super::update::Step;
use super::watermarks::{Watermarks, advance_step};
use super::{Engine, cells::Cells};
use crate::error::{Error, ErrorKind, Result};
use crate::format::StoreId;
use crate::format::record::Kind;
use crate::key::{KEY_BYTES_MAX, check_key};
use crate::model::cell;
use crate::model::claim::{Entry, Env, QueuedEntry};
use crate::options::Retention;
use crate::position::Position;
use crate::stamp::Stamp;
use crate::verdict::{Cell, CommitVerdict, Expected};

/// One thing that a commit records beside the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attachment {
    pub(crate) store: StoreId,
    pub(crate) space: Arc<Space>,
    /// Key of a cell, source of a watermark; empty for an outbox entry until its commit is known.
    pub(crate) key: Vec<u8>,
    pub(crate) what: Attached,
}

/// See [`Attachment`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Attached {
    Cell {
        expected: Expected,
        value: Option<Vec<u8>>,
    },
    Numbers {
        epoch: Option<u64>,
        numbers: Vec<u64>,
    },
    Entry {
        ordering: Vec<u8>,
        payload: Vec<u8>,
    },
}

impl Commit {
    /// Puts an entry into an outbox, to be dispatched once this commit is durable. The entry's
    /// id is made of this claim's namespace and key and of its index among the commit's entries
    /// for this outbox: the same on every attempt.
    pub fn publish(self, outbox: &Outbox, payload: impl Into<Vec<u8>>) -> Self {
        self.publish_ordered(outbox, b"", payload)
    }

    /// Puts an entry into an outbox, to be dispatched after all earlier ones of the same ordering
    /// key. An empty ordering key is none.
    pub fn publish_ordered(
        self,
        outbox: &Outbox,
        ordering_key: impl Into<Vec<u8>>,
        payload: impl Into<Vec<u8>>,
    ) -> Self {
        let what = Attached::Entry {
            ordering: ordering_key.into(),
            payload: payload.into(),
        };
        self.attach(outbox.handle.engine.store, &outbox.space, Vec::new(), what)
    }

    /// Writes a cell, if it is as expected; otherwise the whole commit is a
    /// [`CommitVerdict::CellConflict`].
    pub fn put(
        self,
        cells: &Cells,
        key: impl Into<Vec<u8>>,
        expected: Expected,
        value: impl Into<Vec<u8>>,
    ) -> Self {
        let value = Some(value.into());
        let what = Attached::Cell { expected, value };
        self.attach(cells.handle.engine.store, &cells.space, key.into(), what)
    }

    /// Deletes a cell, if it is as expected.
    pub fn delete(self, cells: &Cells, key: impl Into<Vec<u8>>, expected: Expected) -> Self {
        let value = None;
        let what = Attached::Cell { expected, value };
        self.attach(cells.handle.engine.store, &cells.space, key.into(), what)
    }

    /// Marks a number of a source as done, in whatever epoch the source is.
    pub fn advance(self, marks: &Watermarks, source: impl Into<Vec<u8>>, number: u64) -> Self {
        self.advance_any(marks, source.into(), None, number)
    }

    /// Marks a number of a source as done, if the source is in this epoch. If it has been reset
    /// since, the number means nothing any more: the rest is committed all the same.
    pub fn advance_in(
        self,
        marks: &Watermarks,
        source: impl Into<Vec<u8>>,
        epoch: u64,
        number: u64,
    ) -> Self {
        self.advance_any(marks, source.into(), Some(epoch), number)
    }

    fn advance_any(
        mut self,
        marks: &Watermarks,
        source: Vec<u8>,
        epoch: Option<u64>,
        number: u64,
    ) -> Self {
        let store = marks.handle.engine.store;
        let same = self.attached.iter_mut().find_map(|a| match &mut a.what {
            Attached::Numbers { epoch: e, numbers }
                if a.store == store
                    && a.space.id == marks.space.id
                    && a.key == source
                    && *e == epoch =>
            {
                Some(numbers)
            }
            _ => None,
        });
        if let Some(numbers) = same {
            numbers.push(number);
            return self;
        }
        let numbers = vec![number];
        let what = Attached::Numbers { epoch, numbers };
        self.attach(store, &marks.space, source, what)
    }

    fn attach(mut self, store: StoreId, space: &Arc<Space>, key: Vec<u8>, what: Attached) -> Self {
        self.attached.push(Attachment {
            store,
            space: Arc::clone(space),
            key,
            what,
        });
        self
    }
}

/// One claim of a group that is committed.
pub(crate) struct GroupClaim<'a> {
    pub(crate) space: &'a Space,
    pub(crate) key: &'a [u8],
    pub(crate) epoch: Stamp,
    pub(crate) commit: &'a Commit,
    pub(crate) retention: Retention,
}

/// Why a group of commits is refused.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The claim with this index.
    Claim(usize, Committed),
    /// A cell of the claim with this index: which one, and what it is.
    Cell(usize, usize, Option<Cell>),
}

/// What a group of commits came to.
#[derive(Debug)]
pub(crate) enum GroupCommitted {
    Written { position: Position, late: Vec<bool> },
    Refused(Refusal),
}

impl GroupCommitted {
    pub(crate) fn is_written(&self) -> bool {
        matches!(self, GroupCommitted::Written { .. })
    }
}

/// What one member of a group is about.
enum Role<'a> {
    Claim(usize),
    Attached {
        claim: usize,
        cell_index: usize,
        what: &'a Attached,
    },
    /// Numbers of one source, of all claims of the group.
    Numbers {
        space: &'a Space,
        epoch: Option<u64>,
        numbers: Vec<u64>,
    },
}

impl Engine {
    /// Commits claims with what is attached to them, all or nothing, and does not wait: the answer
    /// rests on what is returned beside it.
    pub(crate) fn append_commits(
        &self,
        claims: &[GroupClaim<'_>],
        levels: GroupLevels,
    ) -> Result<(GroupCommitted, Option<Rests>)> {
        let keys = self.attached_keys(claims)?;
        let (members, roles) = members_of(claims, &keys);
        check_distinct(&members)?;
        let mut late = vec![false; claims.len()];
        let (grouped, rests) =
            self.append_group(&members, levels, |index, entry, env| {
                match roles.get(index) {
                    Some(Role::Claim(at)) => Ok(commit_member(claims, *at, entry, env, &mut late)),
                    Some(Role::Attached {
                        claim,
                        cell_index,
                        what,
                    }) => Ok(attached_step((*claim, *cell_index), what, entry, env)),
                    Some(Role::Numbers {
                        space,
                        epoch,
                        numbers,
                    }) => numbers_step(space, *epoch, numbers, entry, env),
                    None => Ok(MemberStep::Nothing),
                }
            })?;
        let committed = match grouped {
            Grouped::Refused(refusal) => GroupCommitted::Refused(refusal),
            Grouped::Written(written) => {
                let first: Option<Written> = written.into_iter().next().flatten();
                let position = first.map_or(Position::START, |written| written.position);
                GroupCommitted::Written { position, late }
            }
        };
        Ok((committed, rests))
    }

    /// Checks every attachment and returns their keys, in the order of claims and attachments.
    fn attached_keys(&self, claims: &[GroupClaim<'_>]) -> Result<Vec<Vec<u8>>> {
        let mut keys = Vec::new();
        for claim in claims {
            let mut entries_count = std::collections::BTreeMap::new();
            for attachment in &claim.commit.attached {
                self.check_attachment(attachment)?;
                let key = if let Attached::Entry { .. } = attachment.what {
                    let index: &mut u32 = entries_count.entry(attachment.space.id).or_default();
                    let key = entry_key(&claim.space.name, claim.key, *index);
                    *index += 1;
                    key
                } else {
                    attachment.key.clone()
                };
                if key.len() > KEY_BYTES_MAX {
                    return Err(Error::invalid(format!(
                        "key is too long for an outbox entry of its own: bytes={} bytes_max={}",
                        claim.key.len(),
                        KEY_BYTES_MAX - (key.len() - claim.key.len())
                    )));
                }
                check_key(&key)?;
                keys.push(key);
            }
        }
        Ok(keys)
    }

    fn check_attachment(&self, attachment: &Attachment) -> Result<()> {
        let Attachment {
            store, space, what, ..
        } = attachment;
        if *store != self.store {
            return Err(Error::invalid(format!(
                "what is attached to a commit lies in another store: namespace={}; one record \
                 can only be in one log",
                space.name
            )));
        }
        let bytes = match what {
            Attached::Cell { value, .. } => value.as_ref().map_or(0, Vec::len),
            Attached::Entry { payload, ordering } => payload.len() + ordering.len(),
            Attached::Numbers { .. } => 0,
        };
        check_value(space, bytes)
    }
}

fn attached_step(
    (claim, cell_index): (usize, usize),
    what: &Attached,
    entry: Option<&Entry>,
    env: &Env,
) -> MemberStep<Refusal> {
    match what {
        Attached::Cell { expected, value } => {
            match cell::write(entry, env, *expected, value.as_deref()) {
                cell::CellDecision::Write(entry) => MemberStep::Write {
                    stamped: entry.kind == Kind::Cell,
                    entry,
                },
                cell::CellDecision::Unchanged => MemberStep::Nothing,
                cell::CellDecision::Conflict(current) => {
                    MemberStep::Refuse(Refusal::Cell(claim, cell_index, current))
                }
            }
        }
        // Its id is that of this one: it is the same message, and waits already.
        Attached::Entry { .. } if entry.is_some_and(|entry| entry.kind.is_queued()) => {
            MemberStep::Nothing
        }
        Attached::Entry { ordering, payload } => {
            let mut entry = Entry::new(Kind::Queued);
            entry.state.at_ms = env.now.trusted_ms;
            entry.queued = Some(Box::new(QueuedEntry {
                ordering: ordering.clone(),
                origin: 0,
            }));
            entry.outcome.clone_from(payload);
            MemberStep::Write {
                entry,
                stamped: true,
            }
        }
        Attached::Numbers { .. } => MemberStep::Nothing,
    }
}

fn numbers_step(
    space: &Space,
    epoch: Option<u64>,
    numbers: &[u64],
    entry: Option<&Entry>,
    env: &Env,
) -> Result<MemberStep<Refusal>> {
    let next = advance_step(entry, env, space.options.marks, epoch, numbers)?;
    Ok(match next {
        Some(entry) => MemberStep::Write {
            entry,
            stamped: true,
        },
        None => MemberStep::Nothing,
    })
}

/// Refuses a value over the limit of its namespace.
pub(crate) fn check_value(space: &Space, bytes: usize) -> Result<()> {
    let max = space.options.outcome_bytes_max;
    if bytes > max {
        return Err(Error::invalid(format!(
            "value over the limit: namespace={} bytes={bytes} bytes_max={max}; shorten it, or \
             raise outcome_bytes_max",
            space.name
        )));
    }
    Ok(())
}

fn members_of<'a>(
    claims: &'a [GroupClaim<'a>],
    keys: &'a [Vec<u8>],
) -> (Vec<Member<'a>>, Vec<Role<'a>>) {
    let mut members: Vec<Member<'_>> = Vec::new();
    let mut roles = Vec::new();
    for (at, claim) in claims.iter().enumerate() {
        members.push(Member {
            space: claim.space,
            key: claim.key,
            retention: claim.retention,
        });
        roles.push(Role::Claim(at));
    }
    let attached = claims.iter().enumerate().flat_map(|(at, claim)| {
        let mut cells_count = 0;
        claim.commit.attached.iter().map(move |attachment| {
            let cell_index = cells_count;
            cells_count += usize::from(matches!(attachment.what, Attached::Cell { .. }));
            (at, cell_index, attachment)
        })
    });
    for ((claim, cell_index, attachment), key) in attached.zip(keys) {
        let role = match &attachment.what {
            Attached::Numbers { epoch, numbers } => {
                let space = attachment.space.as_ref();
                if let Some(known) = known_numbers(&members, &mut roles, (space.id, key), *epoch) {
                    known.extend(numbers);
                    continue;
                }
                Role::Numbers {
                    space,
                    epoch: *epoch,
                    numbers: numbers.clone(),
                }
            }
            what => Role::Attached {
                claim,
                cell_index,
                what,
            },
        };
        members.push(Member {
            space: &attachment.space,
            key,
            retention: Retention::Forever,
        });
        roles.push(role);
    }
    (members, roles)
}

/// Finds the numbers of a source that another claim of the group has brought.
fn known_numbers<'r>(
    members: &[Member<'_>],
    roles: &'r mut [Role<'_>],
    (space, source): (u16, &[u8]),
    asked: Option<u64>,
) -> Option<&'r mut Vec<u64>> {
    members
        .iter()
        .zip(roles)
        .find_map(|(member, role)| match role {
            Role::Numbers { epoch, numbers, .. }
                if (member.space.id, member.key) == (space, source) && *epoch == asked =>
            {
                Some(numbers)
            }
            _ => None,
        })
}

/// One frame says one thing of each key.
fn check_distinct(members: &[Member<'_>]) -> Result<()> {
    let mut seen = std::collections::BTreeSet::new();
    for member in members {
        if !seen.insert((member.space.id, member.key)) {
            return Err(Error::invalid(format!(
                "one commit names a key twice: namespace={} key={}; the effect of both would be \
                 that of one",
                member.space.name,
                crate::key::show_key(member.key)
            )));
        }
    }
    Ok(())
}

fn commit_member(
    claims: &[GroupClaim<'_>],
    at: usize,
    entry: Option<&Entry>,
    env: &Env,
    late: &mut [bool],
) -> MemberStep<Refusal> {
    let Some(claim) = claims.get(at) else {
        return MemberStep::Nothing;
    };
    match commit_step(entry, env, claim.epoch, claim.commit) {
        Step::Write(write, committed) => {
            if let (Committed::Written { late: is_late }, Some(place)) =
                (committed, late.get_mut(at))
            {
                *place = is_late;
            }
            MemberStep::Write {
                entry: write.entry,
                stamped: false,
            }
        }
        Step::Answer(committed) => MemberStep::Refuse(Refusal::Claim(at, committed)),
    }
}

impl<C: EffectClass> Namespace<C> {
    /// Commits one claim with what is attached.
    pub(crate) fn commit_attached(
        &self,
        key: &[u8],
        epoch: Stamp,
        commit: Commit,
    ) -> Result<CommitVerdict> {
        let (committed, rests) = self.append_attached(key, epoch, &commit)?;
        if let Some(rests) = rests {
            let level = self.level(commit.durability);
            self.handle
                .engine
                .ensure(rests.end, rests.failures, level)?;
        }
        self.attached_verdict(key, committed, commit)
    }

    /// The same without the wait.
    pub(crate) fn append_attached(
        &self,
        key: &[u8],
        epoch: Stamp,
        commit: &Commit,
    ) -> Result<(GroupCommitted, Option<Rests>)> {
        self.check_outcome(key, commit.outcome.as_ref().map_or(0, Vec::len))?;
        let engine = &self.handle.engine;
        let levels = GroupLevels {
            level: self.level(commit.durability),
            reserved_bytes: engine.owed_bytes(&self.space, key),
        };
        let claim = GroupClaim {
            space: &self.space,
            key,
            epoch,
            commit,
            retention: self.commit_retention(commit),
        };
        engine.append_commits(&[claim], levels)
    }

    pub(crate) fn attached_verdict(
        &self,
        key: &[u8],
        committed: GroupCommitted,
        commit: Commit,
    ) -> Result<CommitVerdict> {
        let outcome = |commit: Commit| commit.outcome.unwrap_or_default();
        match committed {
            GroupCommitted::Written { position, late } => {
                let late = late.first().is_some_and(|late| *late);
                self.commit_verdict(key, Committed::Written { late }, Some(position), commit)
            }
            GroupCommitted::Refused(Refusal::Claim(_, committed)) => {
                self.commit_verdict(key, committed, None, commit)
            }
            GroupCommitted::Refused(Refusal::Cell(_, index, current)) => {
                Ok(CommitVerdict::CellConflict {
                    index,
                    current,
                    outcome: outcome(commit),
                })
            }
        }
    }
}

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
    fn level(&self, commit: &Commit) -> crate::options::Durability;
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

    fn level(&self, commit: &Commit) -> crate::options::Durability {
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
        let owed = |p: &Part<'_>| engine.owed_bytes(p.held.space(), p.held.key());
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
                    let _counted = part.held.verdict(own, Commit::without_outcome())?;
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
