//! Binary fuse filters in partitions. `docs/format.md` section 6.
//!
//! The filter is that of Graf and Lemire, "Binary Fuse Filters: Fast and Smaller Than Xor Filters"
//! (2022), with fingerprints of 8 bits: about 9 bits a key, and one absent key in 256 is not
//! excluded. Building one takes some 33 bytes a key, hence partitions by the upper bits of the
//! hash, each with a checksum of its own, which is compared before its first answer.

use super::Malformed;
use super::filter::PARTS_MAX;
use super::le::{Put, Reader};
use super::run::{HASH_BITS, checksum};

pub(crate) const ENTRY_BYTES: usize = 32;
/// Keys of one partition, about.
const PARTITION_KEYS: u64 = 200_000;

/// One partition: where its fingerprints are, and how a hash finds its three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    pub(crate) seed: u64,
    /// Where the fingerprints begin, counted from the end of the table.
    pub(crate) at: u64,
    /// A power of two; 0: the partition excludes nothing.
    pub(crate) segment_length: u32,
    /// A multiple of the segment length: fingerprints but for those of the last two segments.
    pub(crate) segment_count_length: u32,
    /// 0: the partition excludes everything.
    pub(crate) keys_count: u32,
    /// Checksum of the fingerprints.
    pub(crate) crc: u32,
}

/// Returns how many partitions a filter of so many keys has.
pub(crate) fn partitions_for(keys_max: u64) -> u32 {
    let count = keys_max.div_ceil(PARTITION_KEYS).clamp(1, PARTS_MAX);
    u32::try_from(count).unwrap_or(1)
}

/// Returns the partition of h.
#[inline]
pub(crate) fn partition_of(h: u64, partitions_count: u32) -> usize {
    usize::try_from((h * u64::from(partitions_count)) >> HASH_BITS).unwrap_or(0)
}

#[inline]
pub(crate) fn table_bytes(partitions_count: u32) -> usize {
    usize::try_from(partitions_count)
        .unwrap_or(usize::MAX)
        .saturating_mul(ENTRY_BYTES)
}

impl Partition {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.put_u64(self.seed);
        out.put_u64(self.at);
        out.put_u32(self.segment_length);
        out.put_u32(self.segment_count_length);
        out.put_u32(self.keys_count);
        out.put_u32(self.crc);
    }

    fn decode(bytes: &[u8]) -> Result<Partition, Malformed> {
        let mut r = Reader::new(bytes);
        Ok(Partition {
            seed: r.u64()?,
            at: r.u64()?,
            segment_length: r.u32()?,
            segment_count_length: r.u32()?,
            keys_count: r.u32()?,
            crc: r.u32()?,
        })
    }

    /// Returns how many fingerprints there are, one byte each.
    fn len(&self) -> u64 {
        u64::from(self.segment_count_length) + 2 * u64::from(self.segment_length)
    }

    /// Returns the fingerprints out of all that follow the table.
    #[inline]
    pub(crate) fn fingerprints<'a>(&self, all: &'a [u8]) -> Option<&'a [u8]> {
        let at = usize::try_from(self.at).ok()?;
        let len = usize::try_from(self.len()).ok()?;
        all.get(at..at.checked_add(len)?)
    }

    pub(crate) fn is_intact(&self, fingerprints: &[u8], seed: u32) -> bool {
        checksum(seed, fingerprints) == self.crc
    }

    fn is_sane(&self) -> bool {
        let length = self.segment_length;
        length == 0 || length.is_power_of_two() && self.segment_count_length.is_multiple_of(length)
    }

    /// Returns the places of h's three fingerprints, and what they must come to.
    #[inline]
    fn place(&self, h: u64) -> ([u64; 3], u8) {
        let x = mix(h.wrapping_add(self.seed));
        let first = (u128::from(x) * u128::from(self.segment_count_length)) >> 64;
        let first = u64::try_from(first).unwrap_or(0);
        let length = u64::from(self.segment_length);
        let mask = length.wrapping_sub(1);
        let second = (first + length) ^ ((x >> 18) & mask);
        let third = (first + 2 * length) ^ (x & mask);
        ([first, second, third], (x ^ (x >> 32)).to_le_bytes()[0])
    }

    /// Returns where the first fingerprint of h is, counted as `at`.
    pub(crate) fn first_at(&self, h: u64) -> u64 {
        self.at + self.place(h).0[0]
    }

    /// Says whether the partition may hold h; `false` is certain.
    #[inline]
    pub(crate) fn may_contain(&self, fingerprints: &[u8], h: u64) -> bool {
        if self.keys_count == 0 {
            return false;
        }
        if self.segment_length == 0 {
            return true;
        }
        let (places, expected) = self.place(h);
        let mut found = 0;
        for place in places {
            let at = usize::try_from(place).unwrap_or(usize::MAX);
            match fingerprints.get(at) {
                Some(fingerprint) => found ^= fingerprint,
                None => return true,
            }
        }
        found == expected
    }
}

/// Reads the table, which has been verified as bytes, and what follows it.
pub(crate) fn decode_table(
    body: &[u8],
    partitions_count: u32,
) -> Result<(Vec<Partition>, &[u8]), Malformed> {
    let parts = body.split_at_checked(table_bytes(partitions_count));
    let (table, fingerprints) = parts.ok_or(Malformed("table of partitions cut short"))?;
    let mut all = Vec::with_capacity(table.len() / ENTRY_BYTES);
    let mut end = 0;
    for entry in table.chunks_exact(ENTRY_BYTES) {
        let partition = Partition::decode(entry)?;
        if !partition.is_sane() || partition.at != end {
            return Err(Malformed("impossible partition of a filter"));
        }
        end += partition.len();
        all.push(partition);
    }
    if end != fingerprints.len() as u64 {
        return Err(Malformed("filter has another size than its partitions say"));
    }
    Ok((all, fingerprints))
}

/// The finalizer of MurmurHash3.
#[inline]
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}
