//! Several records that are decided together and appended as one: a commit with what is attached
//! to it, and commits of several claims. All of them are valid after a crash, or none.

use super::Engine;
use super::append::Appended;
use super::core::{Core, Older, UnsettledEntry};
use super::lookup::{Hit, Located, Wanted};
use super::namespace::Space;
use super::pass::{Rests, later};
use super::room::{Need, Room};
use crate::clock::Now;
use crate::error::{Error, ErrorKind, Result};
use crate::format::record::{HEADER_BYTES, Kind, PART_HEADER_BYTES, Record};
use crate::format::to_u32;
use crate::index::active::ActiveTable;
use crate::key::NamespaceKind;
use crate::log::sync::FailureCount;
use crate::model::claim::{Entry, Env};
use crate::model::outbox::Queued;
use crate::options::{Durability, Retention};
use crate::position::Position;
use crate::stamp::Stamp;

/// Where those stand who wait for anything of an outbox: no key is empty.
pub(crate) const DISPATCH_LINE: &[u8] = b"";

/// Bytes of the parts that a record may get when it is carried over.
const CARRY_BYTES: usize = 2 * (PART_HEADER_BYTES + 8);

/// One key of a group.
#[derive(Clone, Copy)]
pub(crate) struct Member<'a> {
    pub(crate) space: &'a Space,
    pub(crate) key: &'a [u8],
    pub(crate) retention: Retention,
}

/// What becomes of one key of a group.
#[derive(Debug)]
pub(crate) enum MemberStep<R> {
    /// Append this state; `stamped` ones get a stamp of their own.
    Write { entry: Entry, stamped: bool },
    /// Append the claim of a job, for which room was kept free when the job was accepted.
    Claim {
        entry: Entry,
        /// End of its lease on the boot clock.
        deadline_boot_ms: u64,
    },
    /// It is so already.
    Nothing,
    /// The whole group is refused.
    Refuse(R),
}

/// How a group is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupLevels {
    pub(crate) level: Durability,
    /// Room that was kept free for it when its claims were made.
    pub(crate) reserved_bytes: usize,
}

/// What a group came to.
#[derive(Debug)]
pub(crate) enum Grouped<R> {
    /// All of it is in the log; `None` where there was nothing to write.
    Written(Vec<Option<Written>>),
    /// Nothing was written.
    Refused(R),
}

/// One record of a group that was appended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    pub(crate) position: Position,
    pub(crate) stamp: Stamp,
    /// The place of the outbox entry that this has ended or taken another place for.
    pub(crate) place_before: Option<u64>,
    /// Nobody waits for the key any more.
    ends_waits: bool,
}

/// One member as it was found, and what is to be written.
struct Planned<'a> {
    index: usize,
    wanted: Wanted<'a>,
    older: Option<Older>,
    entry: Entry,
    stamped: bool,
    /// It is the claim of a job; see [`MemberStep::Claim`].
    deadline_boot_ms: Option<u64>,
    place_before: Option<u64>,
    /// Log space kept free for what is written later, and how much of that was kept before.
    owed_bytes: u32,
    owed_before: u32,
}

/// What a try under the lock came to.
enum Tried<R> {
    Again,
    NoRoom(Room),
    Done(Grouped<R>, Option<Rests>),
}

impl Engine {
    /// Decides about all members and appends what is decided, then waits. `decide` may be called
    /// several times; the last call counts.
    pub(crate) fn update_group<R>(
        &self,
        members: &[Member<'_>],
        levels: GroupLevels,
        decide: impl FnMut(usize, Option<&Entry>, &Env) -> Result<MemberStep<R>>,
    ) -> Result<Grouped<R>> {
        let (grouped, rests) = self.append_group(members, levels, decide)?;
        if let Some(rests) = rests {
            self.ensure(rests.end, rests.failures, levels.level)?;
        }
        Ok(grouped)
    }

    /// The same without the wait: the answer rests on what is returned beside it.
    pub(crate) fn append_group<R>(
        &self,
        members: &[Member<'_>],
        levels: GroupLevels,
        decide: impl FnMut(usize, Option<&Entry>, &Env) -> Result<MemberStep<R>>,
    ) -> Result<(Grouped<R>, Option<Rests>)> {
        let done = self.try_append_group(members, levels, decide);
        match &done {
            Ok((Grouped::Written(written), _)) if self.waits.any() => {
                for (member, written) in members.iter().zip(written) {
                    if let Some(written) = written {
                        self.tell_of(member, written);
                    }
                }
            }
            Ok(_) => {}
            // What failed may have changed other keys: a write that was taken back does.
            Err(_) => self.pay_waiters(),
        }
        done
    }

    fn tell_of(&self, member: &Member<'_>, written: &Written) {
        let Space { id, kind, .. } = member.space;
        if *kind == NamespaceKind::Outbox {
            // Who waits for an entry's end does not want to be its next owner.
            self.waits.changed(*id, member.key, true);
            self.waits.changed(*id, DISPATCH_LINE, true);
        } else {
            self.waits.changed(*id, member.key, written.ends_waits);
        }
    }

    fn try_append_group<R>(
        &self,
        members: &[Member<'_>],
        levels: GroupLevels,
        mut decide: impl FnMut(usize, Option<&Entry>, &Env) -> Result<MemberStep<R>>,
    ) -> Result<(Grouped<R>, Option<Rests>)> {
        let wanted: Vec<Wanted<'_>> = members
            .iter()
            .map(|member| self.wanted_in(member.space, member.key))
            .collect();
        loop {
            self.refresh()?;
            let located: Vec<Located<Entry>> = wanted
                .iter()
                .map(|wanted| self.locate_known(*wanted, Entry::of_record))
                .collect::<Result<_>>()?;
            let now = self.now();
            let tried = {
                let mut core = self.turn()?;
                self.check_writable(&core)?;
                let found = (members, wanted.as_slice(), located);
                let tried = self.try_group(&mut core, found, now, levels, &mut decide)?;
                if let Tried::Done(Grouped::Written(_), Some(_)) = &tried {
                    self.finish_append(&mut core, levels.level)?;
                }
                tried
            };
            match tried {
                Tried::Again => {}
                Tried::NoRoom(room) => self.make_room(room)?,
                Tried::Done(grouped, rests) => return Ok((grouped, rests)),
            }
        }
    }

    fn try_group<R>(
        &self,
        core: &mut Core,
        (members, wanted, located): (&[Member<'_>], &[Wanted<'_>], Vec<Located<Entry>>),
        now: Now,
        levels: GroupLevels,
        decide: &mut impl FnMut(usize, Option<&Entry>, &Env) -> Result<MemberStep<R>>,
    ) -> Result<Tried<R>> {
        let mut planned = Vec::with_capacity(members.len());
        let mut rests = None;
        for (index, ((member, wanted), located)) in
            members.iter().zip(wanted).zip(&located).enumerate()
        {
            if !located.is_current(core, wanted.h) {
                return Ok(Tried::Again);
            }
            core.check_namespace(member.space)?;
            let hit = located.hit.as_ref();
            let entry = self.alive(hit.map(|hit| &hit.taken), &now)?;
            let env = self.env(core, member.space, hit, now, member.retention);
            let rest = hit.filter(|hit| hit.taken.is_final()).map(|hit| Rests {
                end: hit.older.position.after(),
                failures: FailureCount::new(core.failures),
            });
            let (entry, stamped, deadline_boot_ms) = match decide(index, entry, &env)? {
                MemberStep::Write { entry, stamped } => (entry, stamped, None),
                MemberStep::Claim {
                    entry,
                    deadline_boot_ms,
                } => (entry, true, Some(deadline_boot_ms)),
                MemberStep::Nothing => {
                    rest_on(core, hit, levels.level);
                    rests = rest.map_or(rests, |on| later(rests, on));
                    continue;
                }
                MemberStep::Refuse(why) => {
                    rest_on(core, hit, levels.level);
                    return Ok(Tried::Done(Grouped::Refused(why), rest));
                }
            };
            let older = hit.map(|hit| hit.older);
            let owed_before = owed_before(core, older);
            planned.push(Planned {
                index,
                wanted: *wanted,
                older,
                stamped,
                deadline_boot_ms,
                place_before: hit
                    .filter(|hit| hit.taken.kind.is_queued())
                    .map(|hit| place_of(&hit.taken, hit.older.position)),
                owed_bytes: self.owed_behind(member, &entry, owed_before),
                owed_before,
                entry,
            });
        }
        self.check_group(core, &planned)?;
        let mut has_stamps = true;
        for planned in &mut planned {
            planned.entry.cut_texts(self.evidence_bytes_max());
            if planned.stamped {
                match core.stamps.take() {
                    Some(stamp) => planned.entry.state.stamp = stamp.get(),
                    None => has_stamps = false,
                }
            }
        }
        if let Some(room) = self.lacks_room(core, &planned, now, levels, has_stamps)? {
            return Ok(Tried::NoRoom(room));
        }
        let mut written = vec![None; members.len()];
        let on = self.append_all(core, members, &planned, now, &mut written);
        let rests = on.map_or(rests, |on| later(rests, on));
        Ok(Tried::Done(Grouped::Written(written), rests))
    }

    /// Returns the log space that is to be kept free behind a record.
    fn owed_behind(&self, member: &Member<'_>, entry: &Entry, owed_before: u32) -> u32 {
        match &entry.queued {
            // An entry that changes owes on what it owed.
            Some(queued) => queued.owed_bytes.max(owed_before),
            None if entry.kind.is_open_claim() => {
                to_u32(self.owed_bytes(member.space, member.key) + entry.evidence.len())
            }
            None => 0,
        }
    }

    /// Refuses what would leave more unsettled records than the bound. The claim of a job counts
    /// with the job's entry, which is there already: otherwise neither could ever end at the bound.
    fn check_group(&self, core: &Core, planned: &[Planned<'_>]) -> Result<()> {
        let (mut more, mut fewer) = (0, 0);
        for planned in planned.iter().filter(|p| p.deadline_boot_ms.is_none()) {
            let was = planned.older.is_some_and(|older| older.kind.is_unsettled());
            let is = planned.entry.kind.is_unsettled();
            more += usize::from(is && !was);
            fewer += usize::from(was && !is);
        }
        let max = self.options.unsettled_count_max;
        if more > fewer && core.unsettled.len() + more - fewer > max {
            return Err(Error::new(
                ErrorKind::Full,
                format!(
                    "too much that may not be forgotten: unsettled_count_max={max}; dispatch \
                     outbox entries, delete cells, end claims, or raise the bound"
                ),
            ));
        }
        Ok(())
    }

    /// Returns the room that has to be made first, if any.
    fn lacks_room(
        &self,
        core: &Core,
        ready: &[Planned<'_>],
        now: Now,
        levels: GroupLevels,
        has_stamps: bool,
    ) -> Result<Option<Room>> {
        if ready.is_empty() {
            return Ok(None);
        }
        let bytes = |planned: &Planned<'_>| record_of(planned, 0, core, now).frame_bytes();
        for planned in ready {
            // What is added to it when it is carried over or changes.
            self.check_frame(bytes(planned) + CARRY_BYTES)?;
        }
        let header = if ready.len() > 1 { HEADER_BYTES } else { 0 };
        let frame_bytes = header + ready.iter().map(bytes).sum::<usize>();
        self.check_frame(frame_bytes)?;
        let records_max = ActiveTable::keys_max(self.options.segment_bytes);
        if ready.len() > records_max {
            return Err(Error::invalid(format!(
                "too many records for one commit: count={} count_max={records_max}; attach less, \
                 or raise segment_bytes",
                ready.len()
            )));
        }
        let need = if frame_bytes <= levels.reserved_bytes {
            Need::Change {
                own_bytes: levels.reserved_bytes as u64,
                owed_bytes: 0,
            }
        } else {
            let before: u64 = ready.iter().map(|p| u64::from(p.owed_before)).sum();
            let behind: u64 = ready.iter().map(|p| u64::from(p.owed_bytes)).sum();
            Need::New {
                owed_bytes: behind.saturating_sub(before),
            }
        };
        let room = Room {
            frame_bytes,
            records_count: ready.len(),
            need,
        };
        Ok((!has_stamps || !core.has_room(room)).then_some(room))
    }

    fn append_all(
        &self,
        core: &mut Core,
        members: &[Member<'_>],
        ready: &[Planned<'_>],
        now: Now,
        written: &mut [Option<Written>],
    ) -> Option<Rests> {
        let failures = FailureCount::new(core.failures);
        let is_group = ready.len() > 1;
        if is_group {
            if !core.writer.has_unwritten() {
                self.background.dirty();
            }
            core.writer.begin_group();
            self.counters.appended_bytes.add_alone(HEADER_BYTES as u64);
        }
        for planned in ready {
            let Some(member) = members.get(planned.index) else {
                continue;
            };
            let record = record_of(planned, member.space.id, core, now);
            let entry = planned.entry.kind.is_unsettled().then_some(UnsettledEntry {
                namespace: member.space.id,
                deadline_boot_ms: planned.deadline_boot_ms,
                owed_bytes: planned.owed_bytes,
                origin: 0,
            });
            let Appended { position, .. } =
                self.append(core, &record, planned.wanted.h, planned.older, entry);
            if planned.entry.kind == Kind::Queued && origin_of(&planned.entry) == 0 {
                self.enqueue(core, member.space.id, &planned.entry, position);
            }
            if let Some(place) = written.get_mut(planned.index) {
                *place = Some(Written {
                    position,
                    stamp: planned.entry.epoch(),
                    place_before: planned.place_before,
                    ends_waits: planned.entry.ends_waits(),
                });
            }
        }
        if is_group {
            core.writer.end_group();
        }
        (!ready.is_empty()).then(|| Rests {
            end: core.writer.end(),
            failures,
        })
    }

    /// Tells the queue of an outbox of a new entry. One that changes is told when the change is
    /// certain: a write that is taken back must not take the entry from the queue.
    fn enqueue(&self, core: &mut Core, namespace: u16, entry: &Entry, position: Position) {
        let queued = Queued {
            ordering: self.ordering_of(entry),
            ..queued_of(entry, position, core.failures)
        };
        let place = place_of(entry, position);
        if let Some(queue) = core.outboxes.get_mut(&namespace) {
            queue.put(place, queued);
        }
    }

    /// Returns the hash of an entry's ordering key.
    pub(crate) fn ordering_of(&self, entry: &Entry) -> Option<u64> {
        let queued = entry.queued.as_ref()?;
        (!queued.ordering.is_empty()).then(|| self.hash.hash(0, &queued.ordering))
    }
}

/// Returns what the queue knows of an entry, but for its ordering key.
pub(crate) fn queued_of(entry: &Entry, position: Position, failures: usize) -> Queued {
    Queued {
        position,
        failures,
        changed_at: position,
        at_ms: entry.state.at_ms,
        ordering: None,
        // Where somebody was at it, that is when the lease ends.
        not_before_ms: if entry.state.owner == 0 {
            entry.state.until_ms
        } else {
            0
        },
        paused_until_ms: 0,
        leased_until_ms: 0,
        owner: 0,
        parked: entry.kind == Kind::Parked,
    }
}

/// Returns where an entry was first appended: its place in the order.
pub(crate) fn place_of(entry: &Entry, position: Position) -> u64 {
    match origin_of(entry) {
        0 => position.get(),
        origin => origin,
    }
}

fn origin_of(entry: &Entry) -> u64 {
    entry.queued.as_ref().map_or(0, |queued| queued.origin)
}

fn owed_before(core: &Core, older: Option<Older>) -> u32 {
    let unsettled = older.and_then(|older| core.unsettled.get(&older.position.get()));
    unsettled.map_or(0, |entry| entry.owed_bytes)
}

/// Notes that an answer rests on this record.
fn rest_on(core: &mut Core, hit: Option<&Hit<Entry>>, level: Durability) {
    if let Some(hit) = hit.filter(|hit| hit.taken.is_final()) {
        core.rest_on(hit.older.position, level);
    }
}

fn record_of<'a>(planned: &'a Planned<'_>, namespace: u16, core: &Core, now: Now) -> Record<'a> {
    let mut record = planned.entry.to_record(namespace, planned.wanted.key);
    record.parts.inherit_s = core.inherit(planned.older, now.trusted_ms);
    record
}

#[cfg(test)]
mod tests {
    use crate::vfs::sim::SimDisk;
    use crate::{Commit, Durability, Internal, NamespaceOptions, Options};

    /// At `Process` a group is written before the lock is released: another caller's failure does
    /// not reach it.
    #[test]
    fn a_group_at_process_is_written_before_anybody_else_appends() {
        let options = Options::new()
            .background(false)
            .durability(Durability::Process);
        let log = options.open_on(SimDisk::new().dir()).unwrap();
        let jobs = log
            .namespace::<Internal>("jobs", NamespaceOptions::new())
            .unwrap();
        let mail = log.outbox("mail", NamespaceOptions::new()).unwrap();
        let claim = jobs.claim("k").unwrap().claim().unwrap();
        let commit = Commit::new("done").publish(&mail, "sent");
        let (committed, _) = jobs.append_attached(b"k", claim.epoch(), &commit).unwrap();
        assert!(committed.is_written());
        assert!(!log.handle.engine.core().writer.has_unwritten());
    }
}
