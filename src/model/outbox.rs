//! The queue of an outbox, in memory: who is next, in which order, and who is at it.
//!
//! The log is the truth: the queue is filled from it, may know entries that are gone since, and
//! never misses one. Whoever takes an entry compares it with the log before it is handed out.

use std::collections::{BTreeMap, BTreeSet};

use crate::position::Position;

/// One entry of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queued {
    /// Where its newest record is, and how many writes had failed by then.
    pub(crate) position: Position,
    pub(crate) failures: usize,
    /// Trusted time at which it was committed.
    pub(crate) at_ms: u64,
    /// Hash of what it must stay in order with; `None`: nothing.
    pub(crate) ordering: Option<u64>,
    /// Trusted time before which it is not dispatched again.
    pub(crate) not_before_ms: u64,
    /// Boot time until which somebody is at it.
    pub(crate) leased_until_ms: u64,
    pub(crate) parked: bool,
}

/// When a look at the queue takes place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) trusted_ms: u64,
    pub(crate) boot_ms: u64,
}

/// Entries by the place at which each was first appended, which is their order.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    entries: BTreeMap<u64, Queued>,
    parked_count: usize,
}

/// What a look at the queue comes to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Picked {
    /// Places of entries that may be dispatched now, in order.
    pub(crate) places: Vec<u64>,
    /// How long until another one may, in milliseconds, if time alone decides that.
    pub(crate) next_in_ms: Option<u64>,
}

impl Queue {
    pub(crate) fn put(&mut self, place: u64, entry: Queued) {
        self.parked_count += usize::from(entry.parked);
        if let Some(before) = self.entries.insert(place, entry) {
            self.parked_count -= usize::from(before.parked);
        }
    }

    pub(crate) fn remove(&mut self, place: u64) {
        if let Some(before) = self.entries.remove(&place) {
            self.parked_count -= usize::from(before.parked);
        }
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

    /// Lets others at an entry again.
    pub(crate) fn release(&mut self, place: u64) {
        if let Some(entry) = self.entries.get_mut(&place) {
            entry.leased_until_ms = 0;
        }
    }

    /// Picks up to `count` entries: the first of each ordering key that is not parked, if it is
    /// due and nobody is at it. Those of no ordering key wait for nobody.
    pub(crate) fn pick(&self, count: usize, now: Moment) -> Picked {
        let mut picked = Picked::default();
        let mut taken = BTreeSet::new();
        for (place, entry) in self.entries.iter().filter(|(_, entry)| !entry.parked) {
            if picked.places.len() == count {
                break;
            }
            if entry
                .ordering
                .is_some_and(|ordering| !taken.insert(ordering))
            {
                continue;
            }
            let due_in_ms = entry.not_before_ms.saturating_sub(now.trusted_ms);
            let free_in_ms = entry.leased_until_ms.saturating_sub(now.boot_ms);
            match due_in_ms.max(free_in_ms) {
                0 => picked.places.push(*place),
                wait_ms => {
                    picked.next_in_ms = Some(picked.next_in_ms.map_or(wait_ms, |w| w.min(wait_ms)));
                }
            }
        }
        picked
    }

    pub(crate) fn lease(&mut self, places: &[u64], until_ms: u64) {
        for place in places {
            if let Some(entry) = self.entries.get_mut(place) {
                entry.leased_until_ms = until_ms;
            }
        }
    }

    /// Lists the places of parked entries.
    pub(crate) fn parked(&self) -> Vec<u64> {
        let parked = self.entries.iter().filter(|(_, entry)| entry.parked);
        parked.map(|(place, _)| *place).collect()
    }

    pub(crate) fn queued_count(&self) -> usize {
        self.entries.len() - self.parked_count
    }

    pub(crate) fn parked_count(&self) -> usize {
        self.parked_count
    }

    /// Returns when the oldest entry that is to be dispatched was committed.
    pub(crate) fn oldest_ms(&self) -> Option<u64> {
        let queued = self.entries.values().filter(|entry| !entry.parked);
        queued.map(|entry| entry.at_ms).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(ordering: Option<u64>) -> Queued {
        Queued {
            position: Position::from_u64(1),
            failures: 0,
            at_ms: 5,
            ordering,
            not_before_ms: 0,
            leased_until_ms: 0,
            parked: false,
        }
    }

    const NOW: Moment = Moment {
        trusted_ms: 1000,
        boot_ms: 100,
    };

    #[test]
    fn entries_of_one_ordering_key_go_one_after_the_other() {
        let mut queue = Queue::default();
        for (place, ordering) in [(1, Some(7)), (2, Some(7)), (3, None), (4, Some(8))] {
            queue.put(place, entry(ordering));
        }
        assert_eq!(queue.pick(9, NOW).places, [1, 3, 4]);
        queue.lease(&[1, 3], 150);
        assert_eq!(queue.pick(9, NOW).places, [4]);
        assert_eq!(queue.pick(9, NOW).next_in_ms, Some(50));
        queue.remove(1);
        assert_eq!(queue.pick(9, NOW).places, [2, 4]);
        assert_eq!(queue.pick(1, NOW).places, [2]);
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
            queue.pick(9, NOW),
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
        assert_eq!(queue.pick(9, NOW).places, [2]);
        assert_eq!((queue.queued_count(), queue.parked_count()), (1, 1));
        assert_eq!(queue.parked(), [1]);
        queue.remove(1);
        assert_eq!((queue.queued_count(), queue.parked_count()), (1, 0));
    }

    #[test]
    fn a_lease_that_has_lapsed_lets_the_next_one_at_it() {
        let mut queue = Queue::default();
        queue.put(1, entry(None));
        queue.lease(&[1], 150);
        assert!(queue.pick(9, NOW).places.is_empty());
        let later = Moment {
            boot_ms: 150,
            ..NOW
        };
        assert_eq!(queue.pick(9, later).places, [1]);
        queue.lease(&[1], 900);
        queue.release(1);
        assert_eq!(queue.pick(9, NOW).places, [1]);
    }
}
