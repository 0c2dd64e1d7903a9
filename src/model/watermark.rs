//! Which numbers of a source are done: fresh, gap, duplicate, and the safe position.

use crate::format::watermark::Marks;
use crate::verdict::Sequenced;

/// Why numbers were not marked as done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmarked {
    /// The set above the contiguous mark would have more stretches than the bound.
    Overflow,
    /// The numbers are of an older numbering of the source.
    OldEpoch,
    /// The numbers are of a numbering that nobody has begun.
    UnknownEpoch,
}

impl Marks {
    /// Starts a source whose lowest number is `first`.
    pub(crate) fn begin(sparse: bool, epoch: u64, first: u64) -> Self {
        Marks {
            sparse,
            epoch,
            next: first,
            above: Vec::new(),
        }
    }

    /// Says what is known of a number.
    pub(crate) fn observe(&self, number: u64) -> Sequenced {
        if self.is_done(number) {
            Sequenced::Duplicate
        } else if number == self.next {
            Sequenced::Fresh
        } else {
            Sequenced::Gap {
                expected: self.next,
            }
        }
    }

    fn is_done(&self, number: u64) -> bool {
        let at = self.above.partition_point(|(first, _)| *first <= number);
        let before = at.checked_sub(1).and_then(|at| self.above.get(at));
        number < self.next || before.is_some_and(|(_, last)| number <= *last)
    }

    /// Returns the highest number up to which all are done.
    pub(crate) fn safe_position(&self) -> Option<u64> {
        self.next.checked_sub(1)
    }

    /// Marks a number as done. A strict source takes everything below it for done, too.
    fn mark(&mut self, number: u64) {
        if self.is_done(number) {
            return;
        }
        if !self.sparse {
            self.next = number.saturating_add(1);
            return;
        }
        let at = self.above.partition_point(|(first, _)| *first < number);
        self.above.insert(at, (number, number));
        self.join(at);
        if let Some((first, last)) = self.above.first().copied()
            && first == self.next
        {
            self.next = last.saturating_add(1);
            self.above.remove(0);
        }
    }

    /// Joins the stretch at this place with the ones that touch it.
    fn join(&mut self, at: usize) {
        for left in [at, at.wrapping_sub(1)] {
            let pair = (self.above.get(left), self.above.get(left.wrapping_add(1)));
            if let (Some((first, end)), Some((begin, last))) = pair
                && end.saturating_add(1) == *begin
            {
                let joined = (*first, *last);
                self.above.remove(left + 1);
                if let Some(place) = self.above.get_mut(left) {
                    *place = joined;
                }
            }
        }
    }

    /// Marks numbers as done; `None`: all of them were. Nothing changes on a refusal.
    pub(crate) fn advanced(
        &self,
        epoch: Option<u64>,
        numbers: &[u64],
        stretches_max: usize,
    ) -> Result<Option<Marks>, Unmarked> {
        match epoch {
            Some(epoch) if epoch < self.epoch => return Err(Unmarked::OldEpoch),
            Some(epoch) if epoch > self.epoch => return Err(Unmarked::UnknownEpoch),
            _ => {}
        }
        let mut next = self.clone();
        for number in numbers {
            next.mark(*number);
        }
        if next.above.len() > stretches_max && next.above.len() > self.above.len() {
            return Err(Unmarked::Overflow);
        }
        Ok((next != *self).then_some(next))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// xorshift: enough to shuffle.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % bound
        }
    }

    #[test]
    fn any_order_of_completion_agrees_with_a_set() {
        for seed in 1..200 {
            let mut random = Random(seed);
            let first = random.below(3);
            let mut marks = Marks::begin(true, 0, first);
            let mut done: BTreeSet<u64> = (0..first).collect();
            for _ in 0..300 {
                let number = first + random.below(60);
                let was_done = done.contains(&number);
                let told = marks.observe(number);
                assert_eq!(told == Sequenced::Duplicate, was_done, "seed {seed}");
                if let Some(next) = marks.advanced(None, &[number], 1000).unwrap() {
                    assert!(!was_done);
                    marks = next;
                }
                done.insert(number);
                let next = (0..).find(|n| !done.contains(n)).unwrap();
                assert_eq!(marks.next, next, "seed {seed}");
                assert_eq!(marks.safe_position(), next.checked_sub(1));
                // What is written is what is read: stretches are apart and ascend.
                assert_eq!(Marks::decode(&marks.encode()).unwrap(), marks);
                for n in 0..first + 62 {
                    assert_eq!(marks.is_done(n), done.contains(&n), "seed {seed} {n}");
                }
            }
        }
    }

    #[test]
    fn a_strict_source_takes_what_lies_below_for_done() {
        let marks = Marks::begin(false, 0, 0);
        assert_eq!(marks.observe(0), Sequenced::Fresh);
        assert_eq!(marks.observe(5), Sequenced::Gap { expected: 0 });
        let marks = marks.advanced(None, &[5], 0).unwrap().unwrap();
        assert_eq!(marks.observe(4), Sequenced::Duplicate);
        assert_eq!(marks.observe(6), Sequenced::Fresh);
        assert_eq!(marks.safe_position(), Some(5));
        assert_eq!(marks.advanced(None, &[5, 3], 0), Ok(None));
    }

    #[test]
    fn a_gap_has_a_bound_and_filling_it_is_never_refused() {
        let mut marks = Marks::begin(true, 0, 0);
        for number in [2, 4, 6] {
            marks = marks.advanced(None, &[number], 3).unwrap().unwrap();
        }
        assert_eq!(marks.advanced(None, &[8], 3), Err(Unmarked::Overflow));
        // Less than before is let in, whatever the bound has become.
        let fewer = marks.advanced(None, &[5], 1).unwrap().unwrap();
        assert_eq!(fewer.above, [(2, 2), (4, 6)]);
        let filled = marks.advanced(None, &[0, 1, 3, 5], 3).unwrap().unwrap();
        assert_eq!((filled.next, filled.above.len()), (7, 0));
    }

    #[test]
    fn numbers_of_another_numbering_move_nothing() {
        let marks = Marks::begin(true, 5, 100);
        assert_eq!(marks.advanced(Some(4), &[100], 9), Err(Unmarked::OldEpoch));
        assert_eq!(
            marks.advanced(Some(6), &[100], 9),
            Err(Unmarked::UnknownEpoch)
        );
        assert!(marks.advanced(Some(5), &[100], 9).unwrap().is_some());
    }
}
