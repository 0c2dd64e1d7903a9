//! Filters: "certainly not in this run". `docs/format.md` section 6.
//!
//! A split-block Bloom filter as in Apache Parquet's specification: each key sets one bit in each
//! of the eight 32-bit words of one 32-byte block, so a test touches one cache line.

use super::le::{Put, Reader, check_crc_at_end, put_crc_at_end};
use super::run::checksum;
use super::{FORMAT, Malformed, StoreId, to_u32};

pub(crate) const MAGIC: [u8; 8] = *b"idemlogF";
pub(crate) const FILTER_HEADER_BYTES: usize = 64;
pub(crate) const BLOCK_BYTES: usize = 32;
/// 12 bits a key: about one absent key in 200 is not excluded.
const BITS_PER_KEY: u64 = 12;

/// The multipliers of Parquet's specification, one a word.
const SALT: [u32; 8] = [
    0x47b6_137b,
    0x4497_4d91,
    0x8824_ad5b,
    0xa2b7_289d,
    0x7054_95c7,
    0x2df1_424b,
    0x9efc_4947,
    0x5c6b_fb31,
];

/// What stands before the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FilterHeader {
    pub(crate) store: StoreId,
    pub(crate) hash_key_id: u64,
    pub(crate) keys_count: u64,
    pub(crate) blocks_count: u32,
    pub(crate) generation: u32,
    pub(crate) body_crc: u32,
    /// Checksum of the header page of the run that the filter is about.
    pub(crate) run_crc: u32,
}

impl FilterHeader {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(FILTER_HEADER_BYTES);
        out.put(&MAGIC);
        out.put_u16(FORMAT);
        out.put_u16(0);
        out.put_u32(self.generation);
        out.put(&self.store);
        out.put_u64(self.hash_key_id);
        out.put_u64(self.keys_count);
        out.put_u32(self.blocks_count);
        out.put_u32(self.body_crc);
        out.put_u32(self.run_crc);
        put_crc_at_end(&mut out);
        out
    }

    fn decode(bytes: &[u8]) -> Result<FilterHeader, Malformed> {
        let mut r = Reader::new(check_crc_at_end(bytes)?);
        if r.array()? != MAGIC {
            return Err(Malformed("not a filter"));
        }
        if r.u16()? != FORMAT {
            return Err(Malformed("filter of another format"));
        }
        r.zeros(2)?;
        let generation = r.u32()?;
        let store = r.array()?;
        let hash_key_id = r.u64()?;
        let keys_count = r.u64()?;
        let blocks_count = r.u32()?;
        let body_crc = r.u32()?;
        let run_crc = r.u32()?;
        Ok(FilterHeader {
            store,
            hash_key_id,
            keys_count,
            blocks_count,
            generation,
            body_crc,
            run_crc,
        })
    }
}

/// Splits a filter file into its verified header and its blocks.
pub(crate) fn decode(bytes: &[u8], seed: u32) -> Result<(FilterHeader, &[u8]), Malformed> {
    let parts = bytes.split_at_checked(FILTER_HEADER_BYTES);
    let (head, body) = parts.ok_or(Malformed("filter header cut short"))?;
    let header = FilterHeader::decode(head)?;
    if header.blocks_count == 0 || body.len() as u64 != u64::from(header.blocks_count) * 32 {
        return Err(Malformed("filter has another size than its header says"));
    }
    if checksum(seed, body) != header.body_crc {
        return Err(Malformed("filter checksum differs"));
    }
    Ok((header, body))
}

/// What a filter is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilterPlan {
    pub(crate) store: StoreId,
    pub(crate) hash_key_id: u64,
    pub(crate) generation: u32,
    pub(crate) keys_count: u64,
    pub(crate) run_crc: u32,
    /// Seed of the checksum of the blocks: `run::run_seed`.
    pub(crate) seed: u32,
}

/// Gathers hashes into the blocks of a filter.
#[derive(Debug)]
pub(crate) struct FilterBuilder {
    blocks: Vec<[u32; 8]>,
}

impl FilterBuilder {
    /// Makes room for so many keys.
    pub(crate) fn new(keys_max: u64) -> Self {
        let blocks = (keys_max * BITS_PER_KEY)
            .div_ceil(BLOCK_BYTES as u64 * 8)
            .max(1);
        let blocks = usize::try_from(blocks.min(u64::from(u32::MAX))).unwrap_or(1);
        FilterBuilder {
            blocks: vec![[0; 8]; blocks],
        }
    }

    pub(crate) fn insert(&mut self, h: u64) {
        let (block, masks) = place(h, to_u32(self.blocks.len()));
        if let Some(block) = self.blocks.get_mut(block) {
            for (word, mask) in block.iter_mut().zip(masks) {
                *word |= mask;
            }
        }
    }

    /// Returns the whole file.
    pub(crate) fn finish(self, plan: &FilterPlan) -> Vec<u8> {
        let mut out = Vec::with_capacity(FILTER_HEADER_BYTES + self.blocks.len() * BLOCK_BYTES);
        out.put_zeros(FILTER_HEADER_BYTES);
        for word in self.blocks.iter().flatten() {
            out.put_u32(*word);
        }
        let body = out.get(FILTER_HEADER_BYTES..).unwrap_or_default();
        let header = FilterHeader {
            store: plan.store,
            hash_key_id: plan.hash_key_id,
            keys_count: plan.keys_count,
            blocks_count: to_u32(self.blocks.len()),
            generation: plan.generation,
            body_crc: checksum(plan.seed, body),
            run_crc: plan.run_crc,
        };
        for (to, from) in out.iter_mut().zip(header.encode()) {
            *to = from;
        }
        out
    }
}

/// Builds a whole filter file over these hashes.
#[cfg(test)]
fn encode(plan: &FilterPlan, hashes: impl Iterator<Item = u64>) -> Vec<u8> {
    let mut builder = FilterBuilder::new(plan.keys_count);
    hashes.for_each(|h| builder.insert(h));
    builder.finish(plan)
}

/// Says whether the run may hold h; `false` is certain. A missing block counts as "may".
pub(crate) fn may_contain(body: &[u8], blocks_count: u32, h: u64) -> bool {
    let (block, masks) = place(h, blocks_count);
    let Some(words) = body
        .get(block * BLOCK_BYTES..)
        .and_then(|b| b.first_chunk::<BLOCK_BYTES>())
    else {
        return true;
    };
    let mut missing = 0;
    for (word, mask) in words.chunks_exact(4).zip(masks) {
        let word = word
            .first_chunk::<4>()
            .map_or(u32::MAX, |w| u32::from_le_bytes(*w));
        missing |= !word & mask;
    }
    missing == 0
}

/// Returns the block of h and its bit in each word.
fn place(h: u64, blocks_count: u32) -> (usize, [u32; 8]) {
    // h has 44 good bits; the multiplication spreads them over 64.
    let mixed = h.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = mixed ^ mixed >> 32;
    let block = ((mixed >> 32) * u64::from(blocks_count)) >> 32;
    let low = u32::try_from(mixed & 0xffff_ffff).unwrap_or(0);
    (
        usize::try_from(block).unwrap_or(0),
        SALT.map(|salt| 1 << (low.wrapping_mul(salt) >> 27)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::run::HASH_BITS;

    fn plan(keys_count: u64) -> FilterPlan {
        FilterPlan {
            store: [1; 16],
            hash_key_id: 2,
            generation: 3,
            keys_count,
            run_crc: 4,
            seed: 5,
        }
    }

    fn hashes(count: u64, start: u64) -> impl Iterator<Item = u64> {
        (start..start + count).map(|n| {
            (n + 1).wrapping_mul(0xd134_2543_de82_ef95).rotate_left(17) >> (64 - HASH_BITS)
        })
    }

    #[test]
    fn a_filter_excludes_no_key_it_holds_and_almost_all_others() {
        let bytes = encode(&plan(10_000), hashes(10_000, 0));
        let (header, body) = decode(&bytes, 5).unwrap();
        assert_eq!(
            (header.keys_count, header.hash_key_id, header.generation),
            (10_000, 2, 3)
        );
        assert!(hashes(10_000, 0).all(|h| may_contain(body, header.blocks_count, h)));
        let passed = hashes(100_000, 1 << 30)
            .filter(|h| may_contain(body, header.blocks_count, *h))
            .count();
        assert!(passed < 1_000, "passed={passed} of 100000");
    }

    #[test]
    fn every_changed_bit_is_noticed() {
        let bytes = encode(&plan(20), hashes(20, 0));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&bad, 5).is_err(), "bit {bit}");
        }
        assert!(decode(&bytes[..bytes.len() - 1], 5).is_err());
    }
}
