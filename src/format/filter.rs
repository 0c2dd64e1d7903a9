//! Filters: "certainly not in this run". `docs/format.md` section 6.
//!
//! The run of one segment has a split-block Bloom filter as in Apache Parquet's specification:
//! each key sets one bit in each of the eight 32-bit words of one 32-byte block, so a test touches
//! one cache line, and building it costs next to nothing. Merged runs live longer and are larger:
//! they have binary fuse filters (`fuse.rs`), which take three lines and a quarter less memory.

use super::fuse;
use super::le::{Put, Reader, check_crc_at_end, put_crc_at_end};
use super::run::{HASH_BITS, checksum};
use super::{Malformed, StoreId, to_usize};

pub(crate) const MAGIC: [u8; 8] = *b"idemlogF";
/// Filters can be built again, so they have a number of their own.
const FORMAT: u16 = 2;
pub(crate) const FILTER_HEADER_BYTES: usize = 64;
const BLOCK_BYTES: usize = 32;
/// 12 bits a key: about one absent key in 200 is not excluded.
const BITS_PER_KEY: u64 = 12;
/// Blocks are handed on in chunks of so many bytes.
const CHUNK_BYTES: usize = 4096;

/// What follows the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FilterKind {
    /// Blocks.
    Bloom,
    /// A table of partitions, then their fingerprints.
    Fuse,
}

/// Blocks or partitions, at most: `h * count` must fit 64 bits.
pub(crate) const PARTS_MAX: u64 = 1 << (64 - HASH_BITS);

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
    pub(crate) kind: FilterKind,
    /// Blocks, or partitions.
    pub(crate) parts_count: u32,
    pub(crate) generation: u32,
    /// Checksum of the blocks, or of the table of partitions.
    pub(crate) body_crc: u32,
    /// Checksum of the header page of the run that the filter is about.
    pub(crate) run_crc: u32,
}

impl FilterHeader {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(FILTER_HEADER_BYTES);
        out.put(&MAGIC);
        out.put_u16(FORMAT);
        out.put_u16(match self.kind {
            FilterKind::Bloom => 1,
            FilterKind::Fuse => 2,
        });
        out.put_u32(self.generation);
        out.put(&self.store);
        out.put_u64(self.hash_key_id);
        out.put_u64(self.keys_count);
        out.put_u32(self.parts_count);
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
        let kind = match r.u16()? {
            1 => FilterKind::Bloom,
            2 => FilterKind::Fuse,
            _ => return Err(Malformed("filter of an unknown kind")),
        };
        let generation = r.u32()?;
        let store = r.array()?;
        let hash_key_id = r.u64()?;
        let keys_count = r.u64()?;
        let parts_count = r.u32()?;
        let body_crc = r.u32()?;
        let run_crc = r.u32()?;
        Ok(FilterHeader {
            store,
            hash_key_id,
            keys_count,
            kind,
            parts_count,
            generation,
            body_crc,
            run_crc,
        })
    }
}

/// Splits a filter file into its verified header and its body, which is verified but for the
/// fingerprints of partitions.
pub(crate) fn decode(bytes: &[u8], seed: u32) -> Result<(FilterHeader, &[u8]), Malformed> {
    let parts = bytes.split_at_checked(FILTER_HEADER_BYTES);
    let (head, body) = parts.ok_or(Malformed("filter header cut short"))?;
    let header = FilterHeader::decode(head)?;
    let summed = match header.kind {
        FilterKind::Bloom => body,
        FilterKind::Fuse => body
            .get(..fuse::table_bytes(header.parts_count))
            .unwrap_or_default(),
    };
    let part_bytes = match header.kind {
        FilterKind::Bloom => BLOCK_BYTES,
        FilterKind::Fuse => fuse::ENTRY_BYTES,
    };
    let said = u64::from(header.parts_count) * part_bytes as u64;
    if header.parts_count == 0
        || u64::from(header.parts_count) > PARTS_MAX
        || summed.len() as u64 != said
    {
        return Err(Malformed("filter has another size than its header says"));
    }
    if checksum(seed, summed) != header.body_crc {
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
}

impl FilterPlan {
    /// Returns the header of the file.
    pub(crate) fn header(&self, kind: FilterKind, parts_count: u32, body_crc: u32) -> Vec<u8> {
        let header = FilterHeader {
            store: self.store,
            hash_key_id: self.hash_key_id,
            keys_count: self.keys_count,
            kind,
            parts_count,
            generation: self.generation,
            body_crc,
            run_crc: self.run_crc,
        };
        header.encode()
    }
}

/// Makes the blocks of a Bloom filter one after the other, out of ascending hashes.
#[derive(Debug)]
pub(crate) struct BloomBuilder {
    blocks_count: u32,
    /// The block that is being filled, and its number.
    block: [u32; 8],
    number: usize,
    /// Blocks that are done and were not handed on yet.
    chunk: Vec<u8>,
    chunk_at: u64,
    crc: crc32fast::Hasher,
}

impl BloomBuilder {
    /// Makes room for so many keys. `seed`: that of the run's checksums.
    pub(crate) fn new(keys_max: u64, seed: u32) -> Self {
        let blocks = (keys_max * BITS_PER_KEY)
            .div_ceil(BLOCK_BYTES as u64 * 8)
            .clamp(1, PARTS_MAX);
        BloomBuilder {
            blocks_count: u32::try_from(blocks).unwrap_or(1),
            block: [0; 8],
            number: 0,
            chunk: Vec::with_capacity(CHUNK_BYTES),
            chunk_at: FILTER_HEADER_BYTES as u64,
            crc: crc32fast::Hasher::new_with_initial(seed),
        }
    }

    /// Adds a hash that is not less than the one before. `write` gets bytes and their offset.
    pub(crate) fn insert<E>(
        &mut self,
        h: u64,
        write: impl FnMut(&[u8], u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let number = block_of(self.blocks_count, h);
        if number > self.number {
            self.end_blocks(number, write)?;
        }
        let low = low_bits(h);
        for (word, salt) in self.block.iter_mut().zip(SALT) {
            *word |= mask(low, salt);
        }
        Ok(())
    }

    /// Ends the block that is being filled, and all up to this number.
    fn end_blocks<E>(
        &mut self,
        number: usize,
        mut write: impl FnMut(&[u8], u64) -> Result<(), E>,
    ) -> Result<(), E> {
        while self.number < number {
            for word in self.block {
                self.chunk.put_u32(word);
            }
            self.block = [0; 8];
            self.number += 1;
            if self.chunk.len() >= CHUNK_BYTES {
                self.flush(&mut write)?;
            }
        }
        Ok(())
    }

    fn flush<E>(&mut self, mut write: impl FnMut(&[u8], u64) -> Result<(), E>) -> Result<(), E> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        self.crc.update(&self.chunk);
        write(&self.chunk, self.chunk_at)?;
        self.chunk_at += self.chunk.len() as u64;
        self.chunk.clear();
        Ok(())
    }

    /// Hands on the rest of the blocks, then the header, which goes to the front.
    pub(crate) fn finish<E>(
        mut self,
        plan: &FilterPlan,
        mut write: impl FnMut(&[u8], u64) -> Result<(), E>,
    ) -> Result<(), E> {
        self.end_blocks(to_usize(self.blocks_count), &mut write)?;
        self.flush(&mut write)?;
        let crc = self.crc.finalize();
        write(&plan.header(FilterKind::Bloom, self.blocks_count, crc), 0)
    }
}

/// Says whether the blocks may hold h; `false` is certain. A missing block counts as "may".
#[inline]
pub(crate) fn may_contain(body: &[u8], blocks_count: u32, h: u64) -> bool {
    let block = body.get(block_at(blocks_count, h)..);
    let Some(block) = block.and_then(|b| b.first_chunk::<BLOCK_BYTES>()) else {
        return true;
    };
    // Without a branch a word: each would be guessed wrong every other time.
    let low = low_bits(h);
    let mut missing = 0;
    for (word, salt) in block.as_chunks().0.iter().zip(SALT) {
        missing |= !u32::from_le_bytes(*word) & mask(low, salt);
    }
    missing == 0
}

/// Returns where in the body the block of h begins.
#[inline]
pub(crate) fn block_at(blocks_count: u32, h: u64) -> usize {
    block_of(blocks_count, h) * BLOCK_BYTES
}

/// Returns the block of h. The blocks have the order of the hashes, so that who writes ascending
/// hashes writes one block after the other.
#[inline]
fn block_of(blocks_count: u32, h: u64) -> usize {
    let block = (h * u64::from(blocks_count)) >> HASH_BITS;
    usize::try_from(block).unwrap_or(0)
}

/// The block says the upper bits of h; the multiplication lets the lower ones decide the rest.
#[inline]
fn low_bits(h: u64) -> u32 {
    let mixed = h.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    u32::try_from(mixed).unwrap_or(0)
}

/// Returns the bit of h in the word of this salt.
#[inline]
fn mask(low: u32, salt: u32) -> u32 {
    1 << (low.wrapping_mul(salt) >> 27)
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
        }
    }

    const SEED: u32 = 5;

    /// Builds a whole filter file over these hashes.
    fn encode(plan: &FilterPlan, hashes: impl Iterator<Item = u64>) -> Vec<u8> {
        let mut hashes: Vec<u64> = hashes.collect();
        hashes.sort_unstable();
        let mut file = vec![0; FILTER_HEADER_BYTES];
        let mut write = |bytes: &[u8], at: u64| {
            assert!(!bytes.is_empty());
            if at > 0 {
                assert_eq!(at, file.len() as u64);
                file.extend_from_slice(bytes);
            } else {
                file[..bytes.len()].copy_from_slice(bytes);
            }
            Ok::<(), ()>(())
        };
        let mut builder = BloomBuilder::new(plan.keys_count, SEED);
        hashes
            .iter()
            .for_each(|h| builder.insert(*h, &mut write).unwrap());
        builder.finish(plan, write).unwrap();
        file
    }

    fn hashes(count: u64, start: u64) -> impl Iterator<Item = u64> {
        (start..start + count).map(|n| {
            (n + 1).wrapping_mul(0xd134_2543_de82_ef95).rotate_left(17) >> (64 - HASH_BITS)
        })
    }

    #[test]
    fn a_filter_excludes_no_key_it_holds_and_almost_all_others() {
        let bytes = encode(&plan(10_000), hashes(10_000, 0));
        let (header, body) = decode(&bytes, SEED).unwrap();
        assert_eq!(
            (header.keys_count, header.hash_key_id, header.generation),
            (10_000, 2, 3)
        );
        assert!(hashes(10_000, 0).all(|h| may_contain(body, header.parts_count, h)));
        let passed = hashes(100_000, 1 << 30)
            .filter(|h| may_contain(body, header.parts_count, *h))
            .count();
        assert!(passed < 1_000, "passed={passed} of 100000");
        // Blocks that fill the last chunk.
        let whole = encode(&plan(5460), hashes(5460, 0));
        assert_eq!(whole.len(), 64 + 2 * CHUNK_BYTES);
    }

    #[test]
    fn every_changed_bit_is_noticed() {
        let bytes = encode(&plan(20), hashes(20, 0));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&bad, SEED).is_err(), "bit {bit}");
        }
        assert!(decode(&bytes[..bytes.len() - 1], SEED).is_err());
    }
}
