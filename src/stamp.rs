//! Stamps: one `u64` that serves as epoch of a claim, fencing token and (later) cell version.
//!
//! A stamp is (generation, counter). The generation belongs to the store: it is raised at each
//! open to at least the wall clock in milliseconds and made durable before the first stamp
//! leaves, so an older copy of a store that is opened later starts above every stamp ever issued.
//! The counter is assigned in log order. Stamps are never reused, also after a lost tail.

use std::fmt;

/// Bits of the counter; the other 42 hold the generation (milliseconds until the year 2109).
const COUNTER_BITS: u32 = 22;
pub(crate) const COUNTER_MAX: u64 = (1 << COUNTER_BITS) - 1;
pub(crate) const GENERATION_MAX: u64 = (1 << (64 - COUNTER_BITS)) - 1;

/// The epoch of one claim: larger than every stamp the store issued before, also before a restart.
///
/// Pass it to the target of an effect as a fencing token: a target that refuses a smaller stamp
/// than the largest it has seen cannot be written by an owner whose claim was taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(u64);

impl Stamp {
    /// Returns the stamp as the number to compare, store or send.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Makes a stamp of a number that [`Stamp::get`] returned.
    pub const fn from_u64(value: u64) -> Self {
        Stamp(value)
    }

    pub(crate) const fn generation(self) -> u64 {
        self.0 >> COUNTER_BITS
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How many generations one durable reservation covers: an open reserves this many, so that a
/// used-up counter costs no flush at the moment it is used up.
pub(crate) const GENERATIONS_RESERVED: u64 = 16;

/// Returns the first generation an open may use: above everything reserved before, and at least
/// the wall clock, unless that is so far ahead that it can be no clock: it would use up the
/// generations of all time.
pub(crate) fn next_generation(reserved: u64, wall_ms: u64) -> u64 {
    let next = reserved.saturating_add(1);
    if wall_ms > GENERATION_MAX / 2 {
        next
    } else {
        next.max(wall_ms)
    }
}

/// Assigns stamps in order. Lives under the append lock.
#[derive(Debug)]
pub(crate) struct Stamps {
    generation: u64,
    counter: u64,
    counter_max: u64,
    /// The highest generation that is durable as reserved; never exceeded.
    reserved: u64,
}

impl Stamps {
    pub(crate) fn new(generation: u64, reserved: u64, counter_max: u64) -> Self {
        Stamps {
            generation,
            counter: 0,
            counter_max: counter_max.clamp(1, COUNTER_MAX),
            reserved,
        }
    }

    /// Takes the next stamp; `None` when every reserved stamp is used up.
    pub(crate) fn take(&mut self) -> Option<Stamp> {
        if self.counter == self.counter_max {
            if self.generation == self.reserved {
                return None;
            }
            self.generation += 1;
            self.counter = 0;
        }
        self.counter += 1;
        Some(Stamp(self.generation << COUNTER_BITS | self.counter))
    }

    /// Goes on behind a stamp that another process has given out: what it had reserved for that is
    /// durable.
    pub(crate) fn follow(&mut self, stamp: Stamp) {
        let (generation, counter) = (stamp.generation(), stamp.0 & COUNTER_MAX);
        if (generation, counter) > (self.generation, self.counter) {
            (self.generation, self.counter) = (generation, counter);
            self.reserved = self.reserved.max(generation);
        }
    }

    /// Returns the newest stamp that was given out.
    pub(crate) fn newest(&self) -> u64 {
        self.generation << COUNTER_BITS | self.counter
    }

    /// Says that less than half of the reservation is left: time to reserve ahead.
    pub(crate) fn runs_low(&self) -> bool {
        self.reserved - self.generation < GENERATIONS_RESERVED / 2
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    pub(crate) fn extend(&mut self, reserved: u64) {
        self.reserved = self.reserved.max(reserved);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_rise_and_end_at_the_reservation() {
        let mut stamps = Stamps::new(10, 10, COUNTER_MAX);
        let first = stamps.take().unwrap();
        let second = stamps.take().unwrap();
        assert!(second > first);
        stamps.counter = COUNTER_MAX;
        assert_eq!(stamps.take(), None);
        stamps.extend(11);
        let third = stamps.take().unwrap();
        assert!(third > second);
        assert_eq!(third.generation(), 11);
    }

    #[test]
    fn stamps_go_on_behind_those_of_others() {
        let mut stamps = Stamps::new(10, 26, COUNTER_MAX);
        let own = stamps.take().unwrap();
        let theirs = Stamp(40 << COUNTER_BITS | 7);
        stamps.follow(theirs);
        stamps.follow(own);
        let next = stamps.take().unwrap();
        assert_eq!(next.get(), theirs.get() + 1);
        // Only what they have given out is known to be reserved.
        stamps.counter = COUNTER_MAX;
        assert_eq!(stamps.take(), None);
    }

    #[test]
    fn a_generation_is_above_the_reserved_one_and_the_wall_clock() {
        assert_eq!(next_generation(5, 100), 100);
        assert_eq!(next_generation(100, 5), 101);
        assert_eq!(next_generation(100, u64::MAX), 101);
    }
}
