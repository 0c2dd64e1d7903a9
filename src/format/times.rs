//! Which times the keys of a run are of. `docs/format.md` section 5.
//!
//! Coverage is exact in one direction: a time outside the ranges is of no key in the run. It is
//! there for the namespaces alone whose function was known for every record of the run.

use super::Malformed;
use super::le::{Put, Reader};
use crate::key_time::{KeyBucket, KeyFunction};

/// Ranges of one namespace; with more, those with the least gap between them become one.
const RANGES_MAX: usize = 64;

/// The times of one namespace's keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Coverage {
    pub(crate) namespace: u16,
    pub(crate) function: KeyFunction,
    /// First and last bucket, both included; ascending, with gaps between them.
    ranges: Vec<(u32, u32)>,
}

impl Coverage {
    pub(crate) fn new(namespace: u16, function: KeyFunction) -> Self {
        Coverage {
            namespace,
            function,
            ranges: Vec::new(),
        }
    }

    pub(crate) fn insert(&mut self, bucket: u32) {
        self.insert_range((bucket, bucket));
    }

    fn insert_range(&mut self, (lo, hi): (u32, u32)) {
        // Those that overlap or touch it become one with it.
        let from = self.ranges.partition_point(|r| r.1.saturating_add(1) < lo);
        let to = self.ranges.partition_point(|r| r.0 <= hi.saturating_add(1));
        if let Some(met) = self.ranges.get(from..to)
            && let (Some(first), Some(last)) = (met.first(), met.last())
        {
            let whole = (first.0.min(lo), last.1.max(hi));
            if met.len() == 1 && *first == whole {
                return;
            }
            self.ranges.splice(from..to, [whole]);
            return;
        }
        self.ranges.insert(from, (lo, hi));
        if self.ranges.len() > RANGES_MAX {
            self.close_least_gap();
        }
    }

    fn close_least_gap(&mut self) {
        let gaps = self.ranges.windows(2).map(|pair| match pair {
            [one, next] => next.0 - one.1,
            _ => u32::MAX,
        });
        let least = gaps.enumerate().min_by_key(|(_, gap)| *gap);
        if let Some((at, _)) = least
            && at + 1 < self.ranges.len()
        {
            let next = self.ranges.remove(at + 1);
            if let Some(one) = self.ranges.get_mut(at) {
                one.1 = next.1;
            }
        }
    }

    /// Says that no key of this time is in the run; `false` says nothing.
    pub(crate) fn excludes(&self, namespace: u16, asked: KeyBucket) -> bool {
        let applies = self.namespace == namespace && self.function == asked.function;
        let mut ranges = self.ranges.iter();
        applies && !ranges.any(|(lo, hi)| (*lo..=*hi).contains(&asked.bucket))
    }

    fn encoded_bytes(&self) -> usize {
        16 + self.ranges.len() * 8
    }
}

/// Returns what is covered in all inputs: the union of the times.
pub(crate) fn merged(inputs: &[&[Coverage]]) -> Vec<Coverage> {
    let Some((first, others)) = inputs.split_first() else {
        return Vec::new();
    };
    let mut all = Vec::new();
    for coverage in *first {
        let mut whole = coverage.clone();
        let same =
            |c: &&Coverage| (c.namespace, c.function) == (coverage.namespace, coverage.function);
        let found: Vec<_> = others.iter().filter_map(|o| o.iter().find(same)).collect();
        if found.len() == others.len() {
            let ranges = found.into_iter().flat_map(|c| &c.ranges);
            ranges.for_each(|range| whole.insert_range(*range));
            all.push(whole);
        }
    }
    all
}

/// Puts as many as there is room for; the rest is not covered.
pub(crate) fn encode(all: &[Coverage], out: &mut Vec<u8>, bytes_max: usize) {
    let mut bytes = 2;
    let fitting = all.iter().take_while(|coverage| {
        bytes += coverage.encoded_bytes();
        bytes <= bytes_max
    });
    let fitting: Vec<&Coverage> = fitting.collect();
    out.put_u16(u16::try_from(fitting.len()).unwrap_or(0));
    for coverage in fitting {
        out.put_u16(coverage.namespace);
        out.put_u16(coverage.function.id);
        out.put_u32(super::to_u32(coverage.ranges.len()));
        out.put_u64(coverage.function.parameter);
        for (lo, hi) in &coverage.ranges {
            out.put_u32(*lo);
            out.put_u32(*hi);
        }
    }
}

pub(crate) fn decode(bytes: &[u8]) -> Result<Vec<Coverage>, Malformed> {
    let mut r = Reader::new(bytes);
    let mut all = Vec::new();
    for _ in 0..r.u16()? {
        let namespace = r.u16()?;
        let id = r.u16()?;
        let ranges_count = r.u32()?;
        let parameter = r.u64()?;
        let mut coverage = Coverage::new(namespace, KeyFunction { id, parameter });
        for _ in 0..ranges_count {
            let range = (r.u32()?, r.u32()?);
            let after = coverage.ranges.last().map(|last| last.1);
            if range.0 > range.1 || after.is_some_and(|after| after >= range.0) {
                return Err(Malformed("times of a run out of order"));
            }
            coverage.ranges.push(range);
        }
        all.push(coverage);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FUNCTION: KeyFunction = KeyFunction {
        id: 1,
        parameter: 7,
    };

    fn asked(bucket: u32) -> KeyBucket {
        KeyBucket {
            function: FUNCTION,
            bucket,
        }
    }

    fn of(buckets: impl IntoIterator<Item = u32>) -> Coverage {
        let mut coverage = Coverage::new(3, FUNCTION);
        buckets.into_iter().for_each(|b| coverage.insert(b));
        coverage
    }

    #[test]
    fn a_time_that_was_put_in_is_never_excluded() {
        let mut state = 1u64;
        let mut next = |below: u32| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            u32::try_from(state >> 33).unwrap() % below
        };
        for below in [10, 300, 100_000, u32::MAX] {
            let buckets: Vec<u32> = (0..500).map(|_| next(below)).collect();
            let coverage = of(buckets.iter().copied());
            assert!(coverage.ranges.len() <= RANGES_MAX);
            let apart = |pair: &[(u32, u32)]| pair[0].1 + 1 < pair[1].0;
            assert!(coverage.ranges.windows(2).all(apart), "{coverage:?}");
            assert!(buckets.iter().all(|b| !coverage.excludes(3, asked(*b))));
            let mut bytes = Vec::new();
            encode(std::slice::from_ref(&coverage), &mut bytes, 4000);
            assert_eq!(decode(&bytes).unwrap(), [coverage]);
        }
        let edges = of([0, u32::MAX]);
        assert_eq!(edges.ranges, [(0, 0), (u32::MAX, u32::MAX)]);
    }

    #[test]
    fn another_time_is_excluded_and_another_function_or_namespace_says_nothing() {
        let coverage = of([5, 6, 7, 20]);
        assert_eq!(coverage.ranges, [(5, 7), (20, 20)]);
        assert!(
            [4, 8, 19, 21]
                .iter()
                .all(|b| coverage.excludes(3, asked(*b)))
        );
        assert!(!coverage.excludes(4, asked(8)));
        let other = KeyFunction {
            id: 1,
            parameter: 8,
        };
        let asked = KeyBucket {
            function: other,
            bucket: 8,
        };
        assert!(!coverage.excludes(3, asked));
        assert!(of([]).excludes(3, self::asked(8)));
    }

    #[test]
    fn a_merge_covers_what_all_inputs_cover() {
        let (one, two) = ([of([1, 2])], [of([3, 9])]);
        let whole = merged(&[&one, &two]);
        assert_eq!(whole, [of([1, 2, 3, 9])]);
        assert_eq!(merged(&[&one, &[]]), []);
        let mut foreign = of([4]);
        foreign.namespace = 8;
        assert_eq!(merged(&[&one, &[foreign]]), []);
    }

    #[test]
    fn what_has_no_room_is_not_covered() {
        let all: Vec<Coverage> = (0..20).map(|_| of((0..64).map(|n| n * 3))).collect();
        let mut bytes = Vec::new();
        encode(&all, &mut bytes, 3000);
        assert!(bytes.len() <= 3000);
        assert_eq!(decode(&bytes).unwrap().len(), 5);
        assert!(decode(&bytes[..100]).is_err());
    }
}
