//! When records and segments may go.

use crate::format::record::{Kind, Record};

/// The trusted second from which on something is not needed; the largest is never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DropTime(u64);

impl DropTime {
    /// Nothing is needed: an empty segment, or one of unsettled records only.
    pub(crate) const NOW: DropTime = DropTime(0);
    pub(crate) const NEVER: DropTime = DropTime(u64::MAX);

    /// Reads the form on disk, in which 0 is never and 1 is now.
    pub(crate) fn from_disk(seconds: u32) -> Self {
        match seconds {
            0 => DropTime::NEVER,
            1 => DropTime::NOW,
            s => DropTime(u64::from(s)),
        }
    }

    pub(crate) fn to_disk(self) -> u32 {
        u32::try_from(self.0.max(1)).unwrap_or(0)
    }

    pub(crate) fn has_come(self, trusted_ms: u64) -> bool {
        trusted_ms >= self.0.saturating_mul(1000)
    }
}

/// Returns until when a record keeps its segment, as far as time alone decides. Unsettled records
/// do not: they are carried over instead.
pub(crate) fn keeps_segment_until(record: &Record<'_>) -> DropTime {
    let own = match record.kind {
        Kind::Forgotten => DropTime::NOW,
        kind if kind.is_unsettled() => DropTime::NOW,
        _ => DropTime::from_disk(record.expires_at_s),
    };
    let inherited = record
        .parts
        .inherit_s
        .map_or(DropTime::NOW, DropTime::from_disk);
    own.max(inherited)
}

/// Returns what a record that supersedes another one must outlive: the older record, or one that
/// the older one hides, could come back when the newer one is dropped first. `segment` is the drop
/// time of the older one's segment if that is another segment.
pub(crate) fn inherited(
    older: Kind,
    older_expires_at_s: u32,
    older_inherit: DropTime,
    segment: Option<DropTime>,
) -> DropTime {
    let Some(segment) = segment else {
        return older_inherit;
    };
    if older.is_unsettled() {
        return segment;
    }
    let own = if older == Kind::Forgotten {
        DropTime::NOW
    } else {
        DropTime::from_disk(older_expires_at_s)
    };
    own.max(older_inherit).min(segment)
}

/// So many different times are gathered before the first look for equal ones.
const FOLD_MIN: usize = 4096;

/// Gathers how many bytes of a segment are needed until when: bytes of one time are one entry.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    /// The time on disk less one, which ascends as times do; and the bytes.
    sums: Vec<(u32, u32)>,
    /// So many entries were left when equal times were last looked for.
    folded: usize,
}

impl Needs {
    /// Adds a record.
    pub(crate) fn add(&mut self, until: DropTime, bytes: u32) {
        let until = until.to_disk().wrapping_sub(1);
        match self.sums.last_mut() {
            Some((last, sum)) if *last == until => *sum += bytes,
            _ => self.sums.push((until, bytes)),
        }
        if self.sums.len() >= (2 * self.folded).max(FOLD_MIN) {
            self.fold();
        }
    }

    fn fold(&mut self) {
        self.sums.sort_unstable();
        self.sums.dedup_by(|later, kept| {
            let same = later.0 == kept.0;
            if same {
                kept.1 += later.1;
            }
            same
        });
        self.folded = self.sums.len();
    }

    /// Returns the moment from which on less than a quarter of the bytes is needed.
    pub(crate) fn sparse_at(mut self) -> DropTime {
        self.fold();
        let total: u64 = self.sums.iter().map(|(_, bytes)| u64::from(*bytes)).sum();
        let mut gone = 0;
        for (until, bytes) in &self.sums {
            gone += u64::from(*bytes);
            if gone * 4 > total * 3 {
                return DropTime::from_disk(until.wrapping_add(1));
            }
        }
        DropTime::NOW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_times_read_back_and_order_never_last() {
        for seconds in [0, 1, 2, 77, u32::MAX] {
            assert_eq!(DropTime::from_disk(seconds).to_disk(), seconds);
        }
        assert!(DropTime::NEVER > DropTime::from_disk(u32::MAX));
        assert!(DropTime::NOW < DropTime::from_disk(2));
        assert!(DropTime::NOW.has_come(0));
        assert!(!DropTime::from_disk(2).has_come(1_999));
        assert!(DropTime::from_disk(2).has_come(2_000));
        assert!(!DropTime::NEVER.has_come(u64::MAX - 1));
    }

    fn sparse_at(all: &[(DropTime, u32)]) -> DropTime {
        let mut needs = Needs::default();
        for (until, bytes) in all {
            needs.add(*until, *bytes);
        }
        needs.sparse_at()
    }

    #[test]
    fn a_segment_is_sparse_when_three_quarters_of_its_bytes_have_expired() {
        let t = DropTime::from_disk;
        assert_eq!(
            sparse_at(&[(t(10), 30), (t(20), 30), (t(30), 30), (t(0), 10)]),
            t(30)
        );
        assert_eq!(sparse_at(&[(t(10), 80), (t(0), 20)]), t(10));
        assert_eq!(sparse_at(&[(t(0), 80), (t(10), 20)]), DropTime::NEVER);
        assert_eq!(sparse_at(&[(t(u32::MAX), 10), (t(0), 0)]), t(u32::MAX));
        assert_eq!(sparse_at(&[(DropTime::NOW, 80), (t(2), 20)]), t(1));
        assert_eq!(sparse_at(&[]), DropTime::NOW);
    }

    #[test]
    fn equal_times_are_gathered_in_one_place_however_they_come() {
        let mut needs = Needs::default();
        let mut expected = std::collections::BTreeMap::new();
        for n in 0..20_000u32 {
            // Some times come more often than others.
            let until = (n.wrapping_mul(0x9e37_79b9) >> 24).pow(2) >> 8;
            needs.add(DropTime::from_disk(until), 32);
            *expected.entry(DropTime::from_disk(until)).or_insert(0) += 32u64;
        }
        assert!(needs.sums.capacity() <= 2 * FOLD_MIN);
        let total: u64 = expected.values().sum();
        let mut gone = 0;
        let first = expected.iter().find(|(_, bytes)| {
            gone += **bytes;
            gone * 4 > total * 3
        });
        assert_eq!(Some(needs.sparse_at()), first.map(|(until, _)| *until));
    }
}
