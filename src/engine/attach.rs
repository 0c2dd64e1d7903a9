//! What commits together with a key: outbox entries, watermarks, cells. One frame makes the key,
//! its outcome and everything attached durable together, or nothing of it.

use std::sync::Arc;

use super::claim::{Commit, Committed, commit_step};
use super::class::EffectClass;
use super::group::{GroupLevels, Grouped, Member, MemberStep, Written};
use super::namespace::{Namespace, Space};
use super::outbox::{Outbox, OutboxEntry, entry_key};
use super::pass::Rests;
use super::update::{Step, end_bytes};
use super::watermarks::{Watermarks, advance_step};
use super::{Engine, cells::Cells};
use crate::error::{Error, Result};
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
    /// An entry ends that has this stamp and stands at this place.
    End {
        stamp: Stamp,
        place: u64,
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

    /// Ends an entry of an outbox: what it asked for is what this commit records. An entry that is
    /// gone already changes nothing.
    pub fn acknowledge(self, outbox: &Outbox, entry: &OutboxEntry) -> Self {
        let what = Attached::End {
            stamp: entry.stamp,
            place: entry.place,
        };
        let key = entry_key(&entry.namespace, &entry.key, entry.index);
        self.attach(outbox.handle.engine.store, &outbox.space, key, what)
    }

    /// Returns the bytes of what ends with a commit: that makes room, and waits for none.
    pub(super) fn ends_bytes(&self) -> usize {
        let ends = self.attached.iter().filter_map(|a| match a.what {
            Attached::End { .. } => Some(end_bytes(a.key.len())),
            _ => None,
        });
        ends.sum()
    }

    /// Returns the entries that a commit ends: outbox and place.
    pub(super) fn ended(&self) -> Vec<(u16, u64)> {
        let ended = self.attached.iter().filter_map(|a| match a.what {
            Attached::End { place, .. } => Some((a.space.id, place)),
            _ => None,
        });
        ended.collect()
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
            Attached::Numbers { .. } | Attached::End { .. } => 0,
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
                ..QueuedEntry::default()
            }));
            entry.outcome.clone_from(payload);
            MemberStep::Write {
                entry,
                stamped: true,
            }
        }
        Attached::End { stamp, .. } => {
            match entry.filter(|e| e.kind.is_queued() && e.epoch() == *stamp) {
                Some(_) => MemberStep::Write {
                    entry: Entry::new(Kind::Forgotten),
                    stamped: false,
                },
                None => MemberStep::Nothing,
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
            reserved_bytes: engine.owed_bytes(&self.space, key) + commit.ends_bytes(),
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
                Outbox::take_out(&self.handle.engine, &commit.ended());
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
