//! The value of a watermark's record: which numbers of a source are done. `docs/format.md`
//! section 3.

use super::le::{Put, Reader};
use super::{Malformed, to_u32, to_usize};

/// Bytes before the ranges.
const HEAD_BYTES: usize = 24;
const RANGE_BYTES: usize = 16;

/// Which numbers of one source are done: all below `next`, and those of `above`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// Numbers may be done out of order.
    pub(crate) sparse: bool,
    /// Which numbering of the source this is about.
    pub(crate) epoch: u64,
    /// The lowest number that is not done.
    pub(crate) next: u64,
    /// First and last of each stretch that is done above: ascending and apart.
    pub(crate) above: Vec<(u64, u64)>,
}

impl Marks {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + self.above.len() * RANGE_BYTES);
        out.put_u8(u8::from(self.sparse));
        out.put_zeros(3);
        out.put_u32(to_u32(self.above.len()));
        out.put_u64(self.epoch);
        out.put_u64(self.next);
        for (first, last) in &self.above {
            out.put_u64(*first);
            out.put_u64(*last);
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Marks, Malformed> {
        let mut r = Reader::new(bytes);
        let sparse = match r.u8()? {
            0 => false,
            1 => true,
            _ => return Err(Malformed("unknown kind of watermark")),
        };
        r.zeros(3)?;
        let count = to_usize(r.u32()?);
        let (epoch, next) = (r.u64()?, r.u64()?);
        if r.rest().len() != count.saturating_mul(RANGE_BYTES) || (!sparse && count > 0) {
            return Err(Malformed("watermark of another length than it says"));
        }
        let mut above = Vec::with_capacity(count);
        let mut behind = next;
        for _ in 0..count {
            let (first, last) = (r.u64()?, r.u64()?);
            // A stretch that touches the one before it would be one with it.
            if first <= behind || last < first || last == u64::MAX {
                return Err(Malformed("stretches of a watermark are not apart"));
            }
            above.push((first, last));
            behind = last + 1;
        }
        Ok(Marks {
            sparse,
            epoch,
            next,
            above,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks() -> Marks {
        Marks {
            sparse: true,
            epoch: 7,
            next: 1001,
            above: vec![(1002, 1002), (1004, 1009)],
        }
    }

    #[test]
    fn marks_read_back_as_they_were_written() {
        for marks in [marks(), Marks::default()] {
            assert_eq!(Marks::decode(&marks.encode()).unwrap(), marks);
        }
        assert_eq!(marks().encode().len(), HEAD_BYTES + 2 * RANGE_BYTES);
    }

    #[test]
    fn stretches_that_overlap_touch_or_go_backwards_are_refused() {
        for above in [
            vec![(1001, 1001)],
            vec![(1000, 1002)],
            vec![(1005, 1004)],
            vec![(1002, 1003), (1004, 1004)],
            vec![(1004, 1004), (1002, 1002)],
            vec![(1002, u64::MAX)],
        ] {
            let bad = Marks { above, ..marks() };
            assert!(Marks::decode(&bad.encode()).is_err(), "{bad:?}");
        }
        let strict = Marks {
            sparse: false,
            ..marks()
        };
        assert!(Marks::decode(&strict.encode()).is_err());
    }

    #[test]
    fn a_count_that_is_not_there_is_refused_without_allocating() {
        let whole = marks().encode();
        for len in 0..whole.len() {
            assert!(Marks::decode(&whole[..len]).is_err(), "{len}");
        }
        let mut bad = whole;
        bad[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Marks::decode(&bad).is_err());
    }
}
