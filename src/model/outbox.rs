//! The queue of an outbox, in memory: who is next, in which order, and who is at it.
//!
//! The log is the truth: the queue is filled from it, may know entries that are gone since, and
//! never misses one. Whoever takes an entry compares it with the log before it is handed out.
//!
//! Only the first entry of an ordering key (its *head*) may be out; those of no ordering key are
//! heads of their own. A head is ready, pauses, or is leased.

use std::collections::{BTreeMap, BTreeSet};

use crate::position::Position;

/// One entry of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queued {
    /// Where its newest record is, and how many writes had failed by then.
    pub(crate) position: Position,
    pub(crate) failures: usize,
    /// Where the record is that last changed it; a copy that was carried over changes nothing.
    pub(crate) changed_at: Position,
    /// Trusted time at which it was committed.
    pub(crate) at_ms: u64,
    /// Hash of what it must stay in order with; `None`: nothing.
    pub(crate) ordering: Option<u64>,
    /// Trusted time before which it is not dispatched again.
    pub(crate) not_before_ms: u64,
    /// The same, but in memory only: nobody could do anything about it.
    pub(crate) paused_until_ms: u64,
    /// Boot time until which somebody is at it; 0: nobody is.
    pub(crate) leased_until_ms: u64,
    /// The other opener of a shared store that is at it; 0: none.
    pub(crate) owner: u64,
    pub(crate) parked: bool,
}

impl Queued {
    /// Returns the trusted time from which on it may be dispatched; 0: at any time.
    fn due_ms(&self) -> u64 {
        self.not_before_ms.max(self.paused_until_ms)
    }
}

/// When a look at the queue takes place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) trusted_ms: u64,
    pub(crate) boot_ms: u64,
}

/// The entries of one ordering key that are not parked.
#[derive(Debug, Default)]
struct Line {
    places: BTreeSet<u64>,
    /// Who may be out: the first, unless a later one was leased before the first came back.
    head: Option<u64>,
}

/// Entries by the place at which each was first appended, which is their order.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    entries: BTreeMap<u64, Queued>,
    parked: BTreeSet<u64>,
    lines: BTreeMap<u64, Line>,
    ready: BTreeSet<u64>,
    /// Heads that wait, by the time at which they need not any more.
    pausing: BTreeSet<(u64, u64)>,
    leased: BTreeSet<(u64, u64)>,
    /// Log space is kept free for entries of other openers, too.
    pub(crate) is_reserved: bool,
}

/// What a look at the queue comes to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Picked {
    /// Places of entries that are leased now, in order.
    pub(crate) places: Vec<u64>,
    /// How long until another one may be, in milliseconds, if time alone decides that.
    pub(crate) next_in_ms: Option<u64>,
}

impl Queue {
    /// Puts an entry in, or another state of it in its place.
    pub(crate) fn put(&mut self, place: u64, entry: Queued) {
        self.remove(place);
        self.entries.insert(place, entry);
        if entry.parked {
            self.parked.insert(place);
            return;
        }
        match entry.ordering {
            None => self.set_head(place),
            Some(ordering) => {
                self.lines.entry(ordering).or_default().places.insert(place);
                self.choose_head(ordering);
            }
        }
    }

    pub(crate) fn remove(&mut self, place: u64) {
        let Some(entry) = self.entries.remove(&place) else {
            return;
        };
        self.parked.remove(&place);
        self.unset_head(place, &entry);
        let Some(line) = entry.ordering.and_then(|o| self.lines.get_mut(&o)) else {
            return;
        };
        line.places.remove(&place);
        if line.head == Some(place) {
            line.head = None;
        }
        if let Some(ordering) = entry.ordering {
            self.choose_head(ordering);
        }
    }

    /// Removes an entry that is still the one that was looked at.
    pub(crate) fn remove_same(&mut self, place: u64, seen: &Queued) {
        let same =
            |entry: &Queued| (entry.position, entry.failures) == (seen.position, seen.failures);
        if self.entries.get(&place).is_some_and(same) {
            self.remove(place);
        }
    }

    /// Takes over what a record at `entry.changed_at` says, unless a later one has said otherwise.
    pub(crate) fn change(&mut self, place: u64, entry: Queued) {
        let Some(before) = self.entries.get(&place).copied() else {
            self.put(place, entry);
            return;
        };
        if entry.changed_at <= before.changed_at {
            return;
        }
        let mut entry = entry;
        if before.position > entry.position {
            // It was carried over since.
            (entry.position, entry.failures) = (before.position, before.failures);
        }
        self.put(place, entry);
    }

    pub(crate) fn get(&self, place: u64) -> Option<&Queued> {
        self.entries.get(&place)
    }

    /// Notes that the newest record of an entry is somewhere else now.
    pub(crate) fn moved(&mut self, place: u64, position: Position, failures: usize) {
        if let Some(entry) = self.entries.get_mut(&place) {
            (entry.position, entry.failures) = (position, failures);
        }
    }

    /// Lets nobody at an entry that is worked on already.
    pub(crate) fn hold(&mut self, place: u64, until_ms: u64) {
        if let Some(entry) = self.get(place).copied() {
            let leased_until_ms = until_ms.max(1).max(entry.leased_until_ms);
            self.put(
                place,
                Queued {
                    leased_until_ms,
                    ..entry
                },
            );
        }
    }

    /// Lets others at an entry again; `false`: nobody was at it, and it did not pause.
    pub(crate) fn release(&mut self, place: u64) -> bool {
        let is_held = |e: &Queued| e.leased_until_ms > 0 || e.paused_until_ms > 0;
        let Some(entry) = self.get(place).copied().filter(is_held) else {
            return false;
        };
        self.put(
            place,
            Queued {
                leased_until_ms: 0,
                owner: 0,
                paused_until_ms: 0,
                ..entry
            },
        );
        true
    }

    /// Lists the other openers that are at entries.
    pub(crate) fn owners(&self) -> BTreeSet<u64> {
        let leased = self.leased.iter().filter_map(|(_, at)| self.get(*at));
        leased.map(|e| e.owner).filter(|o| *o != 0).collect()
    }

    /// Lets others at what an opener was at that is gone.
    pub(crate) fn release_owner(&mut self, owner: u64) {
        let own = |at: &u64| self.get(*at).is_some_and(|entry| entry.owner == owner);
        let leased = self.leased.iter().map(|(_, at)| *at);
        for place in leased.filter(own).collect::<Vec<u64>>() {
            self.release(place);
        }
    }

    /// Keeps what only memory knows of an entry that was read again.
    pub(crate) fn keep(&mut self, place: u64, known: &Queued) {
        if let Some(entry) = self.get(place).copied().filter(|_| known.owner == 0) {
            self.put(
                place,
                Queued {
                    leased_until_ms: known.leased_until_ms.max(entry.leased_until_ms),
                    paused_until_ms: known.paused_until_ms,
                    ..entry
                },
            );
        }
    }

    /// Notes the newest record of an entry that this opener has leased.
    pub(crate) fn leased_at(&mut self, place: u64, position: Position, failures: usize) {
        self.moved(place, position, failures);
        if let Some(entry) = self.entries.get_mut(&place) {
            entry.changed_at = entry.changed_at.max(position);
        }
    }

    /// Holds an entry back until a trusted time, and lets others at it then. The latest call
    /// counts, whether it is a longer pause or a shorter one.
    pub(crate) fn pause(&mut self, place: u64, until_ms: u64) {
        if let Some(entry) = self.get(place).copied() {
            let paused = Queued {
                leased_until_ms: 0,
                owner: 0,
                paused_until_ms: until_ms,
                ..entry
            };
            self.put(place, paused);
        }
    }

    /// Leases up to `count` heads that are due and that nobody is at, in order.
    pub(crate) fn lease(&mut self, count: usize, now: Moment, until_ms: u64) -> Picked {
        self.wake(now);
        let places: Vec<u64> = self.ready.iter().copied().take(count).collect();
        for place in &places {
            self.ready.remove(place);
            if let Some(entry) = self.entries.get_mut(place) {
                entry.leased_until_ms = until_ms.max(1);
                self.leased.insert((entry.leased_until_ms, *place));
            }
        }
        let pause = self
            .pausing
            .first()
            .map(|(at, _)| at.saturating_sub(now.trusted_ms));
        let lease = self
            .leased
            .first()
            .map(|(at, _)| at.saturating_sub(now.boot_ms));
        Picked {
            places,
            next_in_ms: pause.into_iter().chain(lease).min(),
        }
    }

    /// Lets heads go on whose pause or lease is over.
    fn wake(&mut self, now: Moment) {
        while let Some((until_ms, place)) = self.leased.first().copied()
            && until_ms <= now.boot_ms
        {
            self.release(place);
        }
        while let Some((at_ms, place)) = self.pausing.first().copied()
            && at_ms <= now.trusted_ms
        {
            self.pausing.remove(&(at_ms, place));
            self.ready.insert(place);
        }
    }

    fn choose_head(&mut self, ordering: u64) {
        let Some(line) = self.lines.get_mut(&ordering) else {
            return;
        };
        let Some(first) = line.places.first().copied() else {
            self.lines.remove(&ordering);
            return;
        };
        let head = line.head;
        if head == Some(first) {
            return;
        }
        let before = head.and_then(|head| Some((head, *self.entries.get(&head)?)));
        if let Some((head, entry)) = before {
            if entry.leased_until_ms > 0 {
                return;
            }
            self.unset_head(head, &entry);
        }
        if let Some(line) = self.lines.get_mut(&ordering) {
            line.head = Some(first);
        }
        self.set_head(first);
    }

    fn set_head(&mut self, place: u64) {
        let Some(entry) = self.entries.get(&place) else {
            return;
        };
        if entry.leased_until_ms > 0 {
            self.leased.insert((entry.leased_until_ms, place));
        } else if entry.due_ms() > 0 {
            self.pausing.insert((entry.due_ms(), place));
        } else {
            self.ready.insert(place);
        }
    }

    fn unset_head(&mut self, place: u64, entry: &Queued) {
        self.ready.remove(&place);
        self.pausing.remove(&(entry.due_ms(), place));
        self.leased.remove(&(entry.leased_until_ms, place));
    }

    /// Lists the places of parked entries.
    pub(crate) fn parked(&self) -> Vec<u64> {
        self.parked.iter().copied().collect()
    }

    pub(crate) fn queued_count(&self) -> usize {
        self.entries.len() - self.parked.len()
    }

    pub(crate) fn parked_count(&self) -> usize {
        self.parked.len()
    }

    /// Returns when the oldest entry that is to be dispatched was committed.
    pub(crate) fn oldest_ms(&self) -> Option<u64> {
        let mut entries = self.entries.values();
        entries.find(|entry| !entry.parked).map(|entry| entry.at_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(ordering: Option<u64>) -> Queued {
        Queued {
            position: Position::from_u64(1),
            failures: 0,
            changed_at: Position::from_u64(1),
            at_ms: 5,
            ordering,
            not_before_ms: 0,
            paused_until_ms: 0,
            leased_until_ms: 0,
            owner: 0,
            parked: false,
        }
    }

    const NOW: Moment = Moment {
        trusted_ms: 1000,
        boot_ms: 100,
    };

    fn lease(queue: &mut Queue, count: usize) -> Vec<u64> {
        queue.lease(count, NOW, 150).places
    }

    #[test]
    fn entries_of_one_ordering_key_go_one_after_the_other() {
        let mut queue = Queue::default();
        for (place, ordering) in [(1, Some(7)), (2, Some(7)), (3, None), (4, Some(8))] {
            queue.put(place, entry(ordering));
        }
        assert_eq!(lease(&mut queue, 2), [1, 3]);
        assert_eq!(lease(&mut queue, 9), [4]);
        assert_eq!(
            queue.lease(9, NOW, 150),
            Picked {
                places: vec![],
                next_in_ms: Some(50)
            }
        );
        queue.remove(1);
        assert_eq!(lease(&mut queue, 9), [2]);
    }

    #[test]
    fn a_pause_holds_back_its_ordering_key_and_a_parked_entry_does_not() {
        let mut queue = Queue::default();
        queue.put(
            1,
            Queued {
                not_before_ms: 1030,
                ..entry(Some(7))
            },
        );
        queue.put(2, entry(Some(7)));
        assert_eq!(
            queue.lease(9, NOW, 150),
            Picked {
                places: vec![],
                next_in_ms: Some(30)
            }
        );
        queue.put(
            1,
            Queued {
                parked: true,
                ..entry(Some(7))
            },
        );
        assert_eq!(lease(&mut queue, 9), [2]);
        assert_eq!((queue.queued_count(), queue.parked_count()), (1, 1));
        assert_eq!(queue.parked(), [1]);
        // It comes back to its old place, and waits for the one that is out.
        queue.put(1, entry(Some(7)));
        assert!(lease(&mut queue, 9).is_empty());
        queue.remove(2);
        assert_eq!(lease(&mut queue, 9), [1]);
        queue.remove(1);
        assert_eq!((queue.queued_count(), queue.parked_count()), (0, 0));
        assert!(queue.lines.is_empty() && queue.leased.is_empty());
    }

    #[test]
    fn a_lease_that_has_lapsed_lets_the_next_one_at_it() {
        let mut queue = Queue::default();
        queue.put(1, entry(None));
        assert_eq!(lease(&mut queue, 9), [1]);
        assert!(lease(&mut queue, 9).is_empty());
        let later = Moment {
            boot_ms: 150,
            ..NOW
        };
        assert_eq!(queue.lease(9, later, 900).places, [1]);
        assert!(queue.release(1) && !queue.release(1));
        assert_eq!(lease(&mut queue, 9), [1]);
    }

    #[test]
    fn what_a_dead_opener_was_at_is_free_again() {
        let mut queue = Queue::default();
        for (place, owner) in [(1, 70), (2, 80), (3, 0)] {
            queue.put(
                place,
                Queued {
                    leased_until_ms: 150,
                    owner,
                    ..entry(None)
                },
            );
        }
        assert_eq!(queue.owners(), BTreeSet::from([70, 80]));
        assert!(lease(&mut queue, 9).is_empty());
        queue.release_owner(70);
        assert_eq!(lease(&mut queue, 9), [1]);
        assert_eq!(queue.owners(), BTreeSet::from([80]));
    }

    #[test]
    fn the_latest_pause_counts_and_none_outlives_a_release() {
        let mut queue = Queue::default();
        let at = |trusted_ms| Moment { trusted_ms, ..NOW };
        queue.put(
            1,
            Queued {
                not_before_ms: 1010,
                ..entry(None)
            },
        );
        queue.pause(1, 2000);
        assert_eq!(queue.lease(9, NOW, 150).next_in_ms, Some(1000));
        queue.pause(1, 1020);
        assert_eq!(queue.lease(9, NOW, 150).next_in_ms, Some(20));
        // What the log says of it stays.
        assert!(queue.release(1) && !queue.release(1));
        assert_eq!(queue.lease(9, NOW, 150).next_in_ms, Some(10));
        assert_eq!(queue.lease(9, at(1010), 150).places, [1]);
        queue.hold(1, 120);
        assert_eq!(queue.get(1).unwrap().leased_until_ms, 150);
        queue.pause(1, 1500);
        queue.hold(1, 170);
        assert!(queue.lease(9, at(1500), 900).places.is_empty());
        assert!(queue.release(1));
        assert_eq!(queue.lease(9, at(1500), 900).places, [1]);
    }

    #[test]
    fn the_latest_change_counts_wherever_a_copy_is() {
        let at = Position::from_u64;
        let mut queue = Queue::default();
        queue.put(1, entry(None));
        let changed = |n, parked| Queued {
            position: at(n),
            changed_at: at(n),
            parked,
            ..entry(None)
        };
        // Told in the wrong order.
        queue.change(1, changed(600, false));
        queue.change(1, changed(500, true));
        assert!(!queue.get(1).unwrap().parked);
        queue.moved(1, at(900), 3);
        queue.change(1, changed(700, true));
        let entry = queue.get(1).unwrap();
        assert!(entry.parked);
        assert_eq!((entry.position, entry.failures), (at(900), 3));
        // Who looked at it before it moved does not remove it.
        queue.remove_same(1, &changed(700, true));
        assert!(queue.get(1).is_some());
    }

    /// Heads, pauses and leases against a plain list.
    #[test]
    #[expect(clippy::cast_possible_truncation, reason = "a number below 4")]
    fn random_calls_agree_with_a_list() {
        let mut random = 7u64;
        let mut below = |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % bound
        };
        let mut queue = Queue::default();
        let mut list: BTreeMap<u64, Queued> = BTreeMap::new();
        let mut now = Moment {
            trusted_ms: 1,
            boot_ms: 1,
        };
        for _ in 0..20_000 {
            let place = below(12);
            match below(6) {
                0 | 1 => {
                    let new = Queued {
                        ordering: Some(below(3)).filter(|o| *o > 0),
                        not_before_ms: below(2) * (now.trusted_ms + below(20)),
                        parked: below(5) == 0,
                        ..entry(None)
                    };
                    // An entry keeps its ordering key for life.
                    let ordering = list.get(&place).map_or(new.ordering, |e| e.ordering);
                    let new = Queued { ordering, ..new };
                    queue.put(place, new);
                    list.insert(place, new);
                }
                2 => {
                    queue.remove(place);
                    list.remove(&place);
                }
                3 => {
                    now.trusted_ms += below(10);
                    now.boot_ms += below(10);
                }
                _ => {
                    let until = now.boot_ms + 15;
                    for place in queue.lease(below(4) as usize, now, until).places {
                        let own = list[&place];
                        assert!(!own.parked && own.not_before_ms <= now.trusted_ms);
                        assert!(own.leased_until_ms <= now.boot_ms);
                        let out = |e: &&Queued| {
                            e.ordering.is_some()
                                && e.ordering == own.ordering
                                && e.leased_until_ms > now.boot_ms
                                && !e.parked
                        };
                        assert_eq!(list.values().filter(out).count(), 0);
                        list.get_mut(&place).unwrap().leased_until_ms = until;
                    }
                }
            }
            assert_eq!(queue.entries.len(), list.len());
            let heads = queue.ready.len() + queue.pausing.len() + queue.leased.len();
            let free = list
                .values()
                .filter(|e| !e.parked && e.ordering.is_none())
                .count();
            assert_eq!(heads, free + queue.lines.len());
        }
    }
}
