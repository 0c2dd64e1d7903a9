//! Outbox: entries that commit with a key and are dispatched afterwards, at least once, under an
//! id that never changes.

use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::group::{
    DISPATCH_LINE, GroupLevels, Grouped, Member, MemberStep, Written, place_of, queued_of,
};
use super::handle::Handle;
use super::lookup::read_error;
use super::namespace::{Space, to_ms};
use super::pass::{Rests, later};
use super::waits::Place;
use crate::error::{Error, ErrorKind, Result};
use crate::format::record::{FRAME_BYTES_MAX, Kind, Record};
use crate::format::to_usize;
use crate::key::derive_key;
use crate::log::bell::Listening;
use crate::log::sync::FailureCount;
use crate::model::claim::{Entry, Env};
use crate::model::outbox::{Moment, Picked, Queue, Queued};
use crate::options::{Durability, Retention};
use crate::position::Position;
use crate::stamp::Stamp;

/// A namespace of entries that were committed together with keys
/// ([`Commit::publish`](crate::Commit::publish)) and are to be dispatched.
///
/// Dispatch is at least once, always with the same [`OutboxEntry::id`]: the target compares ids.
/// An entry stays until it is acknowledged, however long that takes: nothing expires. Clones are
/// handles of the same outbox.
#[derive(Clone, Debug)]
pub struct Outbox {
    pub(super) handle: Arc<Handle>,
    pub(super) space: Arc<Space>,
}

/// One entry to be dispatched, or parked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutboxEntry {
    /// The same on every dispatch and every attempt of the key: give it to the target.
    pub id: String,
    /// The namespace of the claim whose commit has put it here.
    pub namespace: String,
    /// That claim's key.
    pub key: Vec<u8>,
    /// Counts the commit's entries for this outbox, from 0.
    pub index: u32,
    /// What it is dispatched in order with; empty for none.
    pub ordering_key: Vec<u8>,
    /// What is to be dispatched.
    pub payload: Vec<u8>,
    /// Which dispatch this is, from 1, counted by `nack`s: a dispatch that ends with its process
    /// is not counted.
    pub attempt: u32,
    /// Why the last one failed.
    pub error: Vec<u8>,
    /// Trusted time of the commit, in unix milliseconds.
    pub committed_at_ms: u64,
    pub(super) stamp: Stamp,
    pub(super) place: u64,
}

/// What is in an outbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutboxStats {
    /// Entries that are to be dispatched or being dispatched.
    pub queued_count: u64,
    /// Entries put aside.
    pub parked_count: u64,
    /// How long the oldest entry has waited to be dispatched, by trusted time.
    pub oldest_age: Option<Duration>,
}

/// What a `lease` came to.
#[derive(Debug)]
pub(super) struct Leased<T = OutboxEntry> {
    pub(super) entries: Vec<T>,
    /// Until another entry may be dispatched, if time alone decides that.
    pub(super) next_in: Option<Duration>,
}

/// One call that waits for something to dispatch.
pub(super) struct Waiting<'a, T> {
    engine: &'a Engine,
    pub(super) place: Place<'a>,
    deadline_ms: u64,
    pub(super) found: Vec<T>,
}

impl<T> Waiting<'_, T> {
    /// Looks, and says how long to sleep before the next look; `None`: the wait is over.
    pub(super) fn look(
        &mut self,
        look: impl FnOnce() -> Result<Leased<T>>,
    ) -> Result<Option<(Listening, u64)>> {
        // Registered before the look: what comes behind it rings.
        let listening = self.place.listen();
        let leased = look()?;
        self.found = leased.entries;
        let now_ms = self.engine.now().boot_ms;
        if !self.found.is_empty() || now_ms >= self.deadline_ms {
            return Ok(None);
        }
        let next_ms = leased.next_in.map_or(u64::MAX, to_ms);
        let until_ms = now_ms.saturating_add(next_ms.max(1)).min(self.deadline_ms);
        Ok(Some((listening, until_ms)))
    }
}

/// Returns the key of an entry's own record: the committing namespace's name, the index, its key.
pub(crate) fn entry_key(namespace: &str, key: &[u8], index: u32) -> Vec<u8> {
    let name = namespace.as_bytes();
    // Names have at most 255 bytes.
    let len = u8::try_from(name.len()).unwrap_or(u8::MAX);
    [&[len][..], name, &index.to_le_bytes(), key].concat()
}

pub(super) fn parse_entry_key(key: &[u8]) -> Option<(String, u32, Vec<u8>)> {
    let (len, rest) = key.split_first()?;
    let (name, rest) = rest.split_at_checked(usize::from(*len))?;
    let (index, key) = rest.split_first_chunk()?;
    let name = std::str::from_utf8(name).ok()?.to_owned();
    Some((name, u32::from_le_bytes(*index), key.to_vec()))
}

impl Outbox {
    pub(crate) fn open(handle: Arc<Handle>, space: Arc<Space>) -> Result<Self> {
        handle.engine.fill_outbox(&space)?;
        Ok(Outbox { handle, space })
    }

    /// Returns the namespace's name.
    pub fn name(&self) -> &str {
        &self.space.name
    }

    /// Takes up to `count` entries to be dispatched: the oldest ones first, and of those with one
    /// ordering key only the first. Nobody else gets them until they are acknowledged, given back,
    /// or the namespace's lease has lapsed; a lease ends with the process, too. Entries are handed
    /// out only when their commit is as durable as the namespace says.
    ///
    /// # Errors
    /// `Poisoned`, `Closed`, `Damaged`, `Io`.
    pub fn lease(&self, count: usize) -> Result<Vec<OutboxEntry>> {
        self.lease_or_when(count).map(|leased| leased.entries)
    }

    pub(super) fn lease_or_when(&self, count: usize) -> Result<Leased> {
        let engine = &self.handle.engine;
        let mut leased = Leased {
            entries: Vec::new(),
            next_in: None,
        };
        let mut rests: Option<Rests> = None;
        let mut damaged: Option<Error> = None;
        loop {
            let picked = self.pick(count - leased.entries.len())?;
            leased.next_in = picked.next_in_ms.map(Duration::from_millis);
            if picked.places.is_empty() {
                break;
            }
            let mut places = picked.places.into_iter();
            while let Some(place) = places.next() {
                match engine.outbox_entry(&self.space, place) {
                    Ok(Looked::Found(entry, on)) => {
                        rests = later(rests, on);
                        leased.entries.push(*entry);
                    }
                    Ok(Looked::Gone(seen)) => {
                        engine.with_queue(&self.space, |queue| queue.remove_same(place, &seen))?;
                    }
                    // Asked again when the lease has lapsed.
                    Ok(Looked::Unknown) => {}
                    Err(error) if error.kind() == ErrorKind::Damaged => damaged = Some(error),
                    Err(error) => {
                        let taken = leased.entries.iter().map(|entry| entry.place);
                        self.release(taken.chain([place]).chain(places))?;
                        return Err(error);
                    }
                }
            }
        }
        if let Some(on) = rests {
            let level = engine.level(self.space.options.durability, None);
            if let Err(error) = engine.ensure(on.end, on.failures, level) {
                self.give_back(&leased.entries)?;
                return Err(error);
            }
        }
        if engine.shared.is_some() {
            self.lease_in_log(&mut leased.entries)?;
        }
        // One that cannot be read holds back no other.
        match damaged {
            Some(error) if leased.entries.is_empty() => Err(error),
            _ => Ok(leased),
        }
    }

    /// Leases up to `count` entries, and waits for the first of them until the deadline, counted
    /// from now; then there is none.
    ///
    /// # Errors
    /// As [`Outbox::lease`]; `Closed` and `Poisoned` end a wait.
    pub fn lease_wait(&self, count: usize, deadline: Duration) -> Result<Vec<OutboxEntry>> {
        let mut waiting = self.wait(deadline);
        while let Some((listening, until_ms)) = waiting.look(|| self.lease_or_when(count))? {
            self.handle.engine.sleep(listening, until_ms);
        }
        Ok(waiting.found)
    }

    /// As [`Outbox::lease_wait`]. A future that is dropped holds no lease.
    ///
    /// A poll may read the disk, and waits for the disk if the newest entry's commit is not as
    /// durable yet as the outbox says.
    ///
    /// # Errors
    /// As [`Outbox::lease_wait`].
    pub async fn lease_wait_async(
        &self,
        count: usize,
        deadline: Duration,
    ) -> Result<Vec<OutboxEntry>> {
        let engine = &self.handle.engine;
        let mut waiting = self.wait(deadline);
        while let Some((listening, until_ms)) = waiting.look(|| self.lease_or_when(count))? {
            let slept = engine.sleep_async(&waiting.place, listening, until_ms);
            slept.await?;
        }
        Ok(waiting.found)
    }

    pub(super) fn wait<T>(&self, deadline: Duration) -> Waiting<'_, T> {
        let engine = &self.handle.engine;
        Waiting {
            engine,
            // All of them are rung for everything: nobody has a turn.
            place: engine.waits.watch(&[(self.space.id, DISPATCH_LINE)]),
            deadline_ms: engine.now().boot_ms.saturating_add(to_ms(deadline)),
            found: Vec::new(),
        }
    }

    /// Wakes whoever waits for something to dispatch.
    pub(super) fn ring(&self) {
        self.handle
            .engine
            .waits
            .changed(self.space.id, DISPATCH_LINE, true);
    }

    /// Takes entries out of the queue that are gone from the log.
    pub(super) fn take_out(engine: &Engine, ended: &[(u16, u64)]) {
        for (space, place) in ended {
            if let Some(queue) = engine.core().outboxes.get_mut(space) {
                queue.remove(*place);
            }
            // The next one of an ordering key may be due now.
            engine.waits.changed(*space, DISPATCH_LINE, true);
        }
    }

    /// Holds an entry back for a while, in memory only.
    pub(super) fn pause(&self, entry: &OutboxEntry, pause: Duration) -> Result<()> {
        let engine = &self.handle.engine;
        let until_ms = engine.now().trusted_ms.saturating_add(to_ms(pause));
        engine.with_queue(&self.space, |queue| queue.pause(entry.place, until_ms))
    }

    /// Notes that an entry is worked on which was leased under another place, or not at all.
    pub(super) fn hold(&self, entry: &OutboxEntry) -> Result<()> {
        let engine = &self.handle.engine;
        let now_ms = engine.now().boot_ms;
        let until_ms = now_ms.saturating_add(to_ms(self.space.options.lease));
        engine.with_queue(&self.space, |queue| queue.hold(entry.place, until_ms))
    }

    fn pick(&self, count: usize) -> Result<Picked> {
        let engine = &self.handle.engine;
        engine.check_writer()?;
        let now = engine.now();
        let until_ms = now.boot_ms.saturating_add(to_ms(self.space.options.lease));
        let moment = Moment {
            trusted_ms: now.trusted_ms,
            boot_ms: now.boot_ms,
        };
        engine.with_queue(&self.space, |queue| {
            if let Some(shared) = &engine.shared {
                let owners = queue.owners().into_iter();
                for owner in owners.filter(|owner| !shared.is_alive(*owner)) {
                    queue.release_owner(owner);
                }
            }
            queue.lease(count, moment, until_ms)
        })
    }

    /// Lets others at these places again.
    pub(super) fn release(&self, places: impl Iterator<Item = u64>) -> Result<()> {
        let engine = &self.handle.engine;
        let released = engine.with_queue(&self.space, |queue| {
            places.filter(|place| queue.release(*place)).count()
        })?;
        if released > 0 {
            self.ring();
        }
        Ok(())
    }

    /// Lets others at leased entries again, without counting an attempt.
    ///
    /// # Errors
    /// `Closed`, `Poisoned`.
    pub fn give_back(&self, entries: &[OutboxEntry]) -> Result<()> {
        if self.handle.engine.shared.is_some() {
            self.release_in_log(entries)?;
        }
        self.release(entries.iter().map(|entry| entry.place))
    }

    /// Says that an entry was dispatched: it is gone, durably. `false`: it was gone before.
    ///
    /// # Errors
    /// `Poisoned`, `Closed`, `Damaged`, `Io`: it may be dispatched again.
    pub fn ack(&self, entry: &OutboxEntry) -> Result<bool> {
        self.ack_many(std::slice::from_ref(entry)).map(|n| n == 1)
    }

    /// Says that entries were dispatched, with one flush for all. Returns how many of them were
    /// still there.
    ///
    /// # Errors
    /// As [`Outbox::ack`], for those that were not acknowledged before the error.
    pub fn ack_many(&self, entries: &[OutboxEntry]) -> Result<usize> {
        let engine = &self.handle.engine;
        let mut gone = 0;
        let mut rest = entries;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(self.fits_one_frame(rest));
            rest = later;
            let (written, _) =
                self.change_many(now, Bound::Owed, |_, _| Entry::new(Kind::Forgotten))?;
            gone += written.iter().flatten().count();
            engine.with_queue(&self.space, |queue| {
                for (entry, _) in now.iter().zip(written).filter(|(_, at)| at.is_some()) {
                    queue.remove(entry.place);
                }
            })?;
        }
        if gone > 0 {
            // The next one of an ordering key may be due now.
            self.ring();
        }
        Ok(gone)
    }

    /// Returns how many of these can be ended by one frame in any segment.
    pub(super) fn fits_one_frame(&self, entries: &[OutboxEntry]) -> usize {
        let segment_bytes = to_usize(self.handle.engine.options.segment_bytes);
        let bytes_max = (segment_bytes / 4).min(FRAME_BYTES_MAX / 2);
        let mut bytes = 0;
        let fits = entries.iter().take_while(|entry| {
            bytes += 64 + entry.namespace.len() + entry.key.len();
            bytes <= bytes_max
        });
        fits.count().clamp(1, 16)
    }

    /// Says that a dispatch failed: it is due again after a pause. `false`: it is gone.
    ///
    /// # Errors
    /// As [`Outbox::ack`]; `Full`.
    pub fn nack(&self, entry: &OutboxEntry, after: Duration, error: &[u8]) -> Result<bool> {
        self.change_one(entry, |queued, env| {
            let mut next = again(queued, Kind::Queued, error);
            next.state.until_ms = env.now.trusted_ms.saturating_add(to_ms(after));
            next
        })
    }

    /// Puts an entry aside: it is not dispatched until it is [unparked](Outbox::unpark), and holds
    /// back nothing. `false`: it is gone.
    ///
    /// # Errors
    /// As [`Outbox::nack`].
    pub fn park(&self, entry: &OutboxEntry, error: &[u8]) -> Result<bool> {
        self.change_one(entry, |queued, _| again(queued, Kind::Parked, error))
    }

    /// Lets a parked entry be dispatched again, at its old place in the order. `false`: it is gone.
    ///
    /// # Errors
    /// As [`Outbox::nack`].
    pub fn unpark(&self, entry: &OutboxEntry) -> Result<bool> {
        self.change_one(entry, |queued, _| {
            let mut next = queued.clone();
            next.kind = Kind::Queued;
            next.state.attempt = 0;
            next.state.owner = 0;
            next.state.until_ms = 0;
            next
        })
    }

    /// Lists the parked entries, in order. Entries change while the list is made.
    ///
    /// # Errors
    /// `Closed`, `Damaged`, `Io`.
    pub fn parked(&self) -> Result<Vec<OutboxEntry>> {
        let engine = &self.handle.engine;
        let places = engine.with_queue(&self.space, |queue| queue.parked())?;
        let mut entries = Vec::new();
        for place in places {
            if let Looked::Found(entry, _) = engine.outbox_entry(&self.space, place)? {
                entries.push(*entry);
            }
        }
        Ok(entries)
    }

    /// Returns how much there is to dispatch and how long it has waited.
    ///
    /// # Errors
    /// `Closed`, `Poisoned`.
    pub fn stats(&self) -> Result<OutboxStats> {
        let engine = &self.handle.engine;
        let now = engine.now();
        engine.with_queue(&self.space, |queue| OutboxStats {
            queued_count: queue.queued_count() as u64,
            parked_count: queue.parked_count() as u64,
            oldest_age: queue
                .oldest_ms()
                .map(|ms| Duration::from_millis(now.trusted_ms.saturating_sub(ms))),
        })
    }

    /// Changes one entry, in the log and then in the queue. Where the log refuses, the queue goes
    /// on with what the log has.
    fn change_one(
        &self,
        entry: &OutboxEntry,
        change: impl Fn(&Entry, &Env) -> Entry,
    ) -> Result<bool> {
        let engine = &self.handle.engine;
        let own = std::slice::from_ref(entry);
        let (written, changed) = self.change_many(own, Bound::Kept, change)?;
        let written = written.into_iter().flatten().next();
        let (Some(written), Some(changed)) = (written, changed) else {
            return Ok(false);
        };
        {
            let mut core = engine.core();
            let mut queued = queued_of(&changed, written.position, core.failures);
            queued.ordering = engine.ordering_of(&changed);
            if let Some(queue) = core.outboxes.get_mut(&self.space.id) {
                queue.change(entry.place, queued);
            }
        }
        self.ring();
        Ok(true)
    }

    /// Changes entries that are still the ones that were leased; says which were, and what the last
    /// of them has become.
    fn change_many(
        &self,
        entries: &[OutboxEntry],
        bound: Bound,
        change: impl Fn(&Entry, &Env) -> Entry,
    ) -> Result<(Vec<Option<Written>>, Option<Entry>)> {
        self.change_some(entries, bound, None, &|found, env| Some(change(found, env)))
    }

    /// The same for those of which `change` returns another state, at this level or the outbox's.
    pub(super) fn change_some(
        &self,
        entries: &[OutboxEntry],
        bound: Bound,
        level: Option<Durability>,
        change: &impl Fn(&Entry, &Env) -> Option<Entry>,
    ) -> Result<(Vec<Option<Written>>, Option<Entry>)> {
        let engine = &self.handle.engine;
        let keys: Vec<Vec<u8>> = entries
            .iter()
            .map(|entry| entry_key(&entry.namespace, &entry.key, entry.index))
            .collect();
        let member = |key| Member {
            space: &self.space,
            key,
            retention: Retention::Forever,
        };
        let members: Vec<Member<'_>> = keys.iter().map(|key| member(key)).collect();
        let levels = GroupLevels {
            level: engine.level(self.space.options.durability, level),
            reserved_bytes: match bound {
                Bound::Owed => to_usize(engine.options.segment_bytes),
                Bound::Kept => 0,
            },
        };
        let mut last = None;
        let decide = |index: usize, found: Option<&Entry>, env: &Env| {
            let own = entries.get(index).map(|entry| entry.stamp);
            let found = found.filter(|found| is_entry(found) && Some(found.epoch()) == own);
            let changed = found.and_then(|found| change(found, env));
            Ok(match (changed, entries.get(index)) {
                (Some(mut next), Some(entry)) => {
                    if let Some(queued) = &mut next.queued {
                        queued.origin = entry.place;
                    }
                    last = Some(next.clone());
                    MemberStep::Write {
                        entry: next,
                        stamped: false,
                    }
                }
                _ => MemberStep::Nothing,
            })
        };
        let grouped: Grouped<()> = engine.update_group(&members, levels, decide)?;
        Ok(match grouped {
            Grouped::Written(written) => (written, last),
            Grouped::Refused(()) => (Vec::new(), None),
        })
    }
}

/// Whether the bound on the log counts.
#[derive(Clone, Copy)]
pub(super) enum Bound {
    /// No: what ends an entry makes room.
    Owed,
    Kept,
}

/// What a look at one entry comes to.
enum Looked {
    Found(Box<OutboxEntry>, Rests),
    /// It is certain that the log has it no more, as it was in the queue.
    Gone(Queued),
    /// Its newest record is not certain yet.
    Unknown,
}

fn is_entry(entry: &Entry) -> bool {
    entry.kind.is_queued()
}

/// The next state of an entry whose dispatch has failed.
fn again(entry: &Entry, kind: Kind, error: &[u8]) -> Entry {
    let mut next = entry.clone();
    next.kind = kind;
    next.state.owner = 0;
    next.state.until_ms = 0;
    next.state.attempt = entry.state.attempt.saturating_add(1);
    next.error = error.to_vec();
    next
}

impl Engine {
    /// Reads the outbox's entries back into its queue, at the first opening of it.
    fn fill_outbox(&self, space: &Space) -> Result<()> {
        // Nothing is carried over meanwhile, and nobody here can publish: this is the first handle.
        let _one_at_a_time = self.nothing_moves()?;
        if self.core().outboxes.contains_key(&space.id) {
            return Ok(());
        }
        self.read_outbox(space.id)
    }

    /// Reads an outbox's entries into its queue. What other processes do meanwhile is found out
    /// entry by entry.
    pub(super) fn read_outbox(&self, id: u16) -> Result<()> {
        let (places, failures, before) = {
            let mut core = self.core();
            let before = core.outboxes.insert(id, Queue::default());
            let own = core.unsettled.iter().filter(|(_, e)| e.namespace == id);
            let places: Vec<Position> = own.map(|(at, _)| Position::from_u64(*at)).collect();
            (places, core.failures, before)
        };
        for position in places {
            let read = self.read_at(position, Entry::of_record)?;
            let Some(entry) = read.filter(is_entry) else {
                continue;
            };
            let queued = self.queued_entry(&entry, position, failures);
            let place = place_of(&entry, position);
            let known = before.as_ref().and_then(|before| before.get(place));
            if let Some(queue) = self.core().outboxes.get_mut(&id) {
                queue.change(place, queued);
                if let Some(known) = known {
                    queue.keep(place, known);
                }
            }
        }
        Ok(())
    }

    /// Returns what the queue knows of an entry that another opener has written: in a shared store
    /// it may be at it.
    pub(super) fn queued_entry(
        &self,
        entry: &Entry,
        position: Position,
        failures: usize,
    ) -> Queued {
        let mut queued = queued_of(entry, position, failures);
        queued.ordering = self.ordering_of(entry);
        let owner = entry.state.owner;
        let left_ms = entry.state.until_ms.saturating_sub(self.now().trusted_ms);
        if self.shared.is_some() && owner != 0 && owner != self.generation && left_ms > 0 {
            queued.leased_until_ms = self.now().boot_ms.saturating_add(left_ms);
            queued.owner = owner;
        }
        queued
    }

    pub(super) fn with_queue<R>(
        &self,
        space: &Space,
        act: impl FnOnce(&mut Queue) -> R,
    ) -> Result<R> {
        let mut core = self.turn()?;
        self.check_usable(&core)?;
        core.check_namespace(space)?;
        Ok(act(core.outboxes.entry(space.id).or_default()))
    }

    /// Reads the entry of this place.
    fn outbox_entry(&self, space: &Space, place: u64) -> Result<Looked> {
        loop {
            let Some(seen) = self.with_queue(space, |queue| queue.get(place).copied())? else {
                return Ok(Looked::Unknown);
            };
            let end = seen.position.after();
            let failures = FailureCount::new(seen.failures);
            let own = |record: &Record<'_>| (record.key.to_vec(), record.namespace);
            let read = self.read_at(seen.position, own);
            // Asked after the reading: it may have been taken back meanwhile.
            if self.syncer.was_taken_back(end, failures) {
                return Ok(Looked::Gone(seen));
            }
            let Some((key, namespace)) = read? else {
                // Its segment is gone: it was carried over meanwhile, or settled.
                if self.with_queue(space, |queue| queue.get(place) == Some(&seen))? {
                    return Ok(Looked::Gone(seen));
                }
                continue;
            };
            let located = self.locate(self.wanted(namespace, &key), Entry::of_record)?;
            let Some(hit) = located.hit else {
                return Ok(Looked::Gone(seen));
            };
            let on = Rests {
                end: hit.older.position.after(),
                failures: located.failures,
            };
            let position = hit.older.position;
            let is_own = namespace == space.id
                && is_entry(&hit.taken)
                && place_of(&hit.taken, position) == place;
            if is_own {
                let entry = public_entry(space, &key, hit.taken, place)?;
                return Ok(Looked::Found(Box::new(entry), on));
            }
            // Something newer says that it is gone: that may be taken back until it is written.
            return Ok(
                match self.ensure(on.end, on.failures, Durability::Process) {
                    Ok(()) => Looked::Gone(seen),
                    Err(_) => Looked::Unknown,
                },
            );
        }
    }

    /// Reads the record at a position; `None` if its segment is gone.
    pub(crate) fn read_at<T>(
        &self,
        position: Position,
        extract: impl Fn(&Record<'_>) -> T,
    ) -> Result<Option<T>> {
        let (segment, in_image) = {
            let core = self.core();
            if position.segment() == core.writer.segment.id {
                let read = core
                    .writer
                    .read_image(position.offset(), |f| f.record().map(|r| extract(&r)));
                (Some(Arc::clone(&core.writer.segment)), read)
            } else {
                (
                    core.view().segment(position.segment()).map(Arc::clone),
                    None,
                )
            }
        };
        let Some(segment) = segment else {
            return Ok(None);
        };
        let read = in_image.unwrap_or_else(|| {
            segment.read(position.offset(), |frame| {
                frame.record().map(|r| extract(&r))
            })
        });
        read.map(Some)
            .map_err(|error| read_error(error, &segment, position.offset()))
    }
}

pub(super) fn public_entry(
    space: &Space,
    key: &[u8],
    entry: Entry,
    place: u64,
) -> Result<OutboxEntry> {
    let Some((namespace, index, key)) = parse_entry_key(key) else {
        return Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "outbox entry has a key of another form: outbox={}",
                space.name
            ),
        ));
    };
    let step = format!("outbox/{}/{index}", space.name);
    Ok(OutboxEntry {
        id: derive_key(&namespace, &key, &step),
        namespace,
        index,
        ordering_key: entry.queued.map_or(Vec::new(), |queued| queued.ordering),
        payload: entry.outcome,
        attempt: entry.state.attempt.saturating_add(1),
        error: entry.error,
        committed_at_ms: entry.state.at_ms,
        stamp: Stamp::from_u64(entry.state.stamp),
        place,
        key,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_of_its_own_is_found_again_from_its_key() {
        let name = "n".repeat(255);
        for (namespace, key, index) in [("orders", &b"order-1"[..], 0), (&name, b"\x00", u32::MAX)]
        {
            let found = parse_entry_key(&entry_key(namespace, key, index)).unwrap();
            assert_eq!(found, (namespace.to_owned(), index, key.to_vec()));
        }
        for bad in [
            &b""[..],
            b"\x05abc",
            b"\x01a\x00\x00\x00",
            b"\x01\xff\x00\x00\x00\x00k",
        ] {
            assert_eq!(parse_entry_key(bad), None);
        }
    }
}
