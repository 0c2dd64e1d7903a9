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

/// Returns the moment from which on less than a quarter of the bytes is needed.
/// `needs` holds (needed until, bytes) of each record.
pub(crate) fn sparse_at(needs: &mut [(DropTime, u32)]) -> DropTime {
    needs.sort_unstable();
    let total: u64 = needs.iter().map(|(_, bytes)| u64::from(*bytes)).sum();
    let mut gone = 0;
    for (until, bytes) in needs.iter() {
        gone += u64::from(*bytes);
        if gone * 4 > total * 3 {
            return *until;
        }
    }
    DropTime::NOW
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

    #[test]
    fn a_segment_is_sparse_when_three_quarters_of_its_bytes_have_expired() {
        let t = DropTime::from_disk;
        assert_eq!(
            sparse_at(&mut [(t(10), 30), (t(20), 30), (t(30), 30), (t(0), 10)]),
            t(30)
        );
        assert_eq!(sparse_at(&mut [(t(10), 80), (t(0), 20)]), t(10));
        assert_eq!(sparse_at(&mut [(t(0), 80), (t(10), 20)]), DropTime::NEVER);
        assert_eq!(sparse_at(&mut []), DropTime::NOW);
    }
}
