//! Outbox: entries that commit with a key and are dispatched afterwards, at least once, under an
//! id that never changes.

use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::group::{GroupLevels, Grouped, Member, MemberStep, Written, place_of, queued_of};
use super::handle::Handle;
use super::lookup::read_error;
use super::namespace::{Space, to_ms};
use crate::error::{Error, Result};
use crate::format::record::{Kind, Record};
use crate::format::to_usize;
use crate::key::derive_key;
use crate::log::sync::FailureCount;
use crate::model::claim::{Entry, Env};
use crate::model::outbox::{Moment, Queue};
use crate::options::Retention;
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
    stamp: Stamp,
    place: u64,
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
pub(super) struct Leased {
    pub(super) entries: Vec<OutboxEntry>,
    /// Until another entry may be dispatched, if time alone decides that.
    pub(super) next_in: Option<Duration>,
}

/// Returns the key of an entry's own record: the committing namespace's name, the index, its key.
pub(crate) fn entry_key(namespace: &str, key: &[u8], index: u32) -> Vec<u8> {
    let name = namespace.as_bytes();
    // Names have at most 255 bytes.
    let len = u8::try_from(name.len()).unwrap_or(u8::MAX);
    [&[len][..], name, &index.to_le_bytes(), key].concat()
}

fn parse_entry_key(key: &[u8]) -> Option<(String, u32, Vec<u8>)> {
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
        let mut newest: Option<(Position, FailureCount)> = None;
        loop {
            let wanted = count - leased.entries.len();
            let (places, next_in_ms) = self.pick(wanted)?;
            leased.next_in = next_in_ms.map(Duration::from_millis);
            if places.is_empty() {
                break;
            }
            for place in places {
                match engine.outbox_entry(&self.space, place) {
                    Ok(Some((entry, position, failures))) => {
                        if newest.is_none_or(|(newest, _)| newest < position) {
                            newest = Some((position, failures));
                        }
                        leased.entries.push(entry);
                    }
                    // It was acknowledged, or its commit was taken back.
                    Ok(None) => engine.with_queue(&self.space, |queue| queue.remove(place))?,
                    Err(error) => {
                        self.give_back(&leased.entries)?;
                        return Err(error);
                    }
                }
            }
        }
        if let Some((position, failures)) = newest {
            let level = engine.level(self.space.options.durability, None);
            if let Err(error) = engine.ensure(position.after(), failures, level) {
                self.give_back(&leased.entries)?;
                return Err(error);
            }
        }
        Ok(leased)
    }

    fn pick(&self, count: usize) -> Result<(Vec<u64>, Option<u64>)> {
        let engine = &self.handle.engine;
        let now = engine.now();
        let until_ms = now.boot_ms.saturating_add(to_ms(self.space.options.lease));
        engine.with_queue(&self.space, |queue| {
            let picked = queue.pick(
                count,
                Moment {
                    trusted_ms: now.trusted_ms,
                    boot_ms: now.boot_ms,
                },
            );
            queue.lease(&picked.places, until_ms);
            (picked.places, picked.next_in_ms)
        })
    }

    /// Lets others at leased entries again, without counting an attempt.
    ///
    /// # Errors
    /// `Closed`, `Poisoned`.
    pub fn give_back(&self, entries: &[OutboxEntry]) -> Result<()> {
        let engine = &self.handle.engine;
        engine.with_queue(&self.space, |queue| {
            entries.iter().for_each(|entry| queue.release(entry.place));
        })?;
        engine.background.bell.ring();
        Ok(())
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
        let mut gone = 0;
        // A frame has room for so many short records in the smallest segments.
        for entries in entries.chunks(16) {
            let written = self.change_many(entries, |_, _| Entry::new(Kind::Forgotten))?;
            gone += written.iter().flatten().count();
            self.handle.engine.with_queue(&self.space, |queue| {
                for (entry, _) in entries.iter().zip(written).filter(|(_, at)| at.is_some()) {
                    queue.remove(entry.place);
                }
            })?;
        }
        // The next one of an ordering key may be due now.
        self.handle.engine.background.bell.ring();
        Ok(gone)
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
            if let Some((entry, ..)) = engine.outbox_entry(&self.space, place)? {
                entries.push(entry);
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
        let written = self.change_many(std::slice::from_ref(entry), change)?;
        let engine = &self.handle.engine;
        let Some(written) = written.into_iter().flatten().next() else {
            return Ok(false);
        };
        let changed = engine.read_at(written.position, Entry::of_record)?;
        if let Some(changed) = changed.filter(is_entry) {
            let failures = engine.core().failures;
            let mut queued = queued_of(&changed, written.position, failures);
            queued.ordering = engine.ordering_of(&changed);
            engine.with_queue(&self.space, |queue| queue.put(entry.place, queued))?;
        }
        engine.background.bell.ring();
        Ok(true)
    }

    /// Changes entries that are still the ones that were leased; says which were.
    fn change_many(
        &self,
        entries: &[OutboxEntry],
        change: impl Fn(&Entry, &Env) -> Entry,
    ) -> Result<Vec<Option<Written>>> {
        let engine = &self.handle.engine;
        let keys: Vec<Vec<u8>> = entries
            .iter()
            .map(|entry| entry_key(&entry.namespace, &entry.key, entry.index))
            .collect();
        let members: Vec<Member<'_>> = keys
            .iter()
            .map(|key| Member {
                space: &self.space,
                key,
                retention: Retention::Forever,
            })
            .collect();
        let levels = GroupLevels {
            level: engine.level(self.space.options.durability, None),
            // What ends an entry must fit, whatever the bound.
            reserved_bytes: to_usize(engine.options.segment_bytes),
        };
        let decide = |index: usize, found: Option<&Entry>, env: &Env| {
            let own = entries.get(index).map(|entry| entry.stamp);
            let found = found.filter(|found| is_entry(found) && Some(found.epoch()) == own);
            Ok(match (found, entries.get(index)) {
                (Some(found), Some(entry)) => {
                    let mut next = change(found, env);
                    if let Some(queued) = &mut next.queued {
                        queued.origin = entry.place;
                    }
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
            Grouped::Written(written) => written,
            Grouped::Refused(..) => Vec::new(),
        })
    }
}

fn is_entry(entry: &Entry) -> bool {
    entry.kind.is_queued()
}

/// The next state of an entry whose dispatch has failed.
fn again(entry: &Entry, kind: Kind, error: &[u8]) -> Entry {
    let mut next = entry.clone();
    next.kind = kind;
    next.state.attempt = entry.state.attempt.saturating_add(1);
    next.error = error.to_vec();
    next
}

impl Engine {
    /// Reads the outbox's entries back into its queue, at the first opening of it.
    fn fill_outbox(&self, space: &Space) -> Result<()> {
        // Nothing is carried over meanwhile, and nobody can publish: this is the first handle.
        let _one_at_a_time = self.maintenance();
        let places: Vec<Position> = {
            let core = self.core();
            if core.outboxes.contains_key(&space.id) {
                return Ok(());
            }
            let own = core
                .unsettled
                .iter()
                .filter(|(_, e)| e.namespace == space.id);
            own.map(|(at, _)| Position::from_u64(*at)).collect()
        };
        let mut queue = Queue::default();
        for position in places {
            let read = self.read_at(position, Entry::of_record)?;
            let Some(entry) = read.filter(is_entry) else {
                continue;
            };
            let mut queued = queued_of(&entry, position, 0);
            queued.ordering = self.ordering_of(&entry);
            queue.put(place_of(&entry, position), queued);
        }
        self.core().outboxes.insert(space.id, queue);
        Ok(())
    }

    fn with_queue<R>(&self, space: &Space, act: impl FnOnce(&mut Queue) -> R) -> Result<R> {
        let mut core = self.core();
        self.check_writable(&core)?;
        core.check_namespace(space)?;
        Ok(act(core.outboxes.entry(space.id).or_default()))
    }

    /// Reads the entry of this place; `None` if it is gone.
    fn outbox_entry(
        &self,
        space: &Space,
        place: u64,
    ) -> Result<Option<(OutboxEntry, Position, FailureCount)>> {
        loop {
            let Some(queued) = self.with_queue(space, |queue| queue.get(place).copied())? else {
                return Ok(None);
            };
            let failures = FailureCount::new(queued.failures);
            if self
                .syncer
                .was_taken_back(queued.position.after(), failures)
            {
                return Ok(None);
            }
            let own = |record: &Record<'_>| (record.key.to_vec(), record.namespace);
            let read = self.read_at(queued.position, own);
            // Looked at again: it may have been taken back between the two.
            if read.is_err()
                && self
                    .syncer
                    .was_taken_back(queued.position.after(), failures)
            {
                return Ok(None);
            }
            let Some((key, namespace)) = read? else {
                // Its segment is gone: it was carried over meanwhile, or settled.
                if self.with_queue(space, |queue| queue.get(place) == Some(&queued))? {
                    return Ok(None);
                }
                continue;
            };
            let located = self.locate(self.wanted(namespace, &key), Entry::of_record)?;
            let Some(hit) = located.hit.filter(|hit| is_entry(&hit.taken)) else {
                return Ok(None);
            };
            let position = hit.older.position;
            if namespace != space.id || place_of(&hit.taken, position) != place {
                return Ok(None);
            }
            let entry = public_entry(space, &key, hit.taken, place)?;
            return Ok(Some((entry, position, located.failures)));
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
                (core.view.segment(position.segment()).map(Arc::clone), None)
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

fn public_entry(space: &Space, key: &[u8], entry: Entry, place: u64) -> Result<OutboxEntry> {
    let Some((namespace, index, key)) = parse_entry_key(key) else {
        return Err(Error::new(
            crate::error::ErrorKind::Damaged,
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
