//! Index runs: immutable, ordered by hash. `docs/format.md` section 5.
//!
//! A run is a header page, `pages` home pages and some spill pages. With h the top 44 bits of a
//! key's hash, the home page of h is `h * pages >> 44`, and a slot keeps h minus the first h of
//! its home page. So (home page, slot) gives h back exactly, whatever page holds the slot: that is
//! what lets runs be merged without reading the log.

use super::le::{Put, Reader, check_crc_at_end, put_crc_at_end, set_u32};
use super::times::{self, Coverage};
use super::{FORMAT, Malformed, StoreId, to_u32};

pub(crate) const MAGIC: [u8; 8] = *b"idemlogR";
pub(crate) const PAGE_BYTES: usize = 4096;
pub(crate) const PAGE_HEADER_BYTES: usize = 16;
pub(crate) const SLOT_BYTES: usize = 8;
pub(crate) const PAGE_SLOTS: usize = (PAGE_BYTES - PAGE_HEADER_BYTES) / SLOT_BYTES;
/// Slots a home page gets on average: 85 % of its room, so that about one in 10,000 spills.
pub(crate) const PAGE_FILL: u64 = 433;
/// Bits of h.
pub(crate) const HASH_BITS: u32 = 44;
/// The largest number of home pages: `page << 44` must fit 64 bits.
pub(crate) const PAGES_MAX: u64 = 1 << 20;
const OFFSET_BITS_MAX: u32 = 23;
const ORDINAL_BITS_MAX: u32 = 9;

const _: () = assert!(PAGE_SLOTS == 510);

/// How many bits of a slot are offset and segment ordinal; the rest is the tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) pages: u64,
    pub(crate) offset_bits: u32,
    pub(crate) ordinal_bits: u32,
}

impl Geometry {
    /// Chooses the geometry for so many slots over so many segments of at most this size.
    pub(crate) fn plan(slots: u64, segments: u64, segment_bytes: u32) -> Geometry {
        let bits = |values: u64| 64 - values.saturating_sub(1).leading_zeros();
        let offset_bits = bits(u64::from(segment_bytes) / 8).min(OFFSET_BITS_MAX);
        let ordinal_bits = bits(segments).min(ORDINAL_BITS_MAX);
        let tag_bits = 64 - offset_bits - ordinal_bits;
        // The tag must hold h minus the first h of its page: fewer tag bits need more pages.
        let least = 1u64 << HASH_BITS.saturating_sub(tag_bits);
        let pages = slots.div_ceil(PAGE_FILL).max(least).min(PAGES_MAX);
        Geometry {
            pages,
            offset_bits,
            ordinal_bits,
        }
    }

    pub(crate) fn home_page(&self, h: u64) -> u64 {
        (h * self.pages) >> HASH_BITS
    }

    /// Returns the smallest h whose home is this page.
    pub(crate) fn first_h(&self, page: u64) -> u64 {
        (page << HASH_BITS).div_ceil(self.pages)
    }

    pub(crate) fn tag(&self, h: u64) -> u64 {
        h - self.first_h(self.home_page(h))
    }

    pub(crate) fn slot(&self, h: u64, ordinal: u64, offset: u32) -> u64 {
        let place = ordinal << self.offset_bits | u64::from(offset / 8);
        self.tag(h) << (self.offset_bits + self.ordinal_bits) | place
    }

    pub(crate) fn slot_tag(&self, slot: u64) -> u64 {
        slot >> (self.offset_bits + self.ordinal_bits)
    }

    pub(crate) fn slot_ordinal(&self, slot: u64) -> u64 {
        slot >> self.offset_bits & ((1 << self.ordinal_bits) - 1)
    }

    pub(crate) fn slot_offset(&self, slot: u64) -> u32 {
        u32::try_from((slot & ((1 << self.offset_bits) - 1)) * 8).unwrap_or(u32::MAX)
    }

    fn check(&self) -> Result<(), Malformed> {
        let sane = self.pages >= 1
            && self.pages <= PAGES_MAX
            && self.offset_bits <= OFFSET_BITS_MAX
            && self.ordinal_bits <= ORDINAL_BITS_MAX;
        let tag_bits = 64 - self.offset_bits.min(32) - self.ordinal_bits.min(32);
        if !sane || self.pages < 1 << HASH_BITS.saturating_sub(tag_bits) {
            return Err(Malformed("impossible run geometry"));
        }
        Ok(())
    }
}

/// Where in the header page the times of keys begin.
const TIMES_AT: usize = 96;

/// The first page of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunHeader {
    pub(crate) store: StoreId,
    pub(crate) hash_key_id: u64,
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) generation: u32,
    pub(crate) geometry: Geometry,
    pub(crate) spill_pages: u32,
    pub(crate) slots_count: u64,
    /// Different values of h; what the filter must hold.
    pub(crate) hashes_count: u64,
    /// Index entries of the segments that a later one of the same run supersedes.
    pub(crate) superseded_count: u64,
    /// Segments whose entries it holds: fewer than the range where some were dropped before.
    pub(crate) segments_count: u32,
}

impl RunHeader {
    pub(crate) fn file_bytes(&self) -> u64 {
        (1 + self.geometry.pages + u64::from(self.spill_pages)) * PAGE_BYTES as u64
    }

    pub(crate) fn encode(&self, times: &[Coverage]) -> Vec<u8> {
        let mut out = Vec::with_capacity(PAGE_BYTES);
        out.put(&MAGIC);
        out.put_u16(FORMAT);
        out.put_u8(u8::try_from(self.geometry.offset_bits).unwrap_or(0));
        out.put_u8(u8::try_from(self.geometry.ordinal_bits).unwrap_or(0));
        out.put_u32(self.generation);
        out.put(&self.store);
        out.put_u64(self.hash_key_id);
        out.put_u64(self.lo);
        out.put_u64(self.hi);
        out.put_u64(self.geometry.pages);
        out.put_u64(self.slots_count);
        out.put_u64(self.hashes_count);
        out.put_u64(self.superseded_count);
        out.put_u32(self.spill_pages);
        out.put_u32(self.segments_count);
        times::encode(times, &mut out, PAGE_BYTES - 4 - TIMES_AT);
        out.put_zeros(PAGE_BYTES - 4 - out.len());
        put_crc_at_end(&mut out);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<RunHeader, Malformed> {
        let page = bytes
            .get(..PAGE_BYTES)
            .ok_or(Malformed("run header cut short"))?;
        let mut r = Reader::new(check_crc_at_end(page)?);
        if r.array()? != MAGIC {
            return Err(Malformed("not a run"));
        }
        if r.u16()? != FORMAT {
            return Err(Malformed("run of another format"));
        }
        let offset_bits = u32::from(r.u8()?);
        let ordinal_bits = u32::from(r.u8()?);
        let generation = r.u32()?;
        let header = RunHeader {
            store: r.array()?,
            hash_key_id: r.u64()?,
            lo: r.u64()?,
            hi: r.u64()?,
            generation,
            geometry: Geometry {
                pages: r.u64()?,
                offset_bits,
                ordinal_bits,
            },
            slots_count: r.u64()?,
            hashes_count: r.u64()?,
            superseded_count: r.u64()?,
            spill_pages: r.u32()?,
            segments_count: r.u32()?,
        };
        header.geometry.check()?;
        let room = (header.geometry.pages + u64::from(header.spill_pages)) * PAGE_SLOTS as u64;
        if header.slots_count > room || header.hashes_count > header.slots_count {
            return Err(Malformed("impossible counts of a run"));
        }
        if header.file_bytes() != bytes.len() as u64 {
            return Err(Malformed("run has another size than its header says"));
        }
        Ok(header)
    }
}

/// Reads which times the keys of the run are of, from a header page that was verified.
pub(crate) fn decode_times(run: &[u8]) -> Result<Vec<Coverage>, Malformed> {
    times::decode(run.get(TIMES_AT..PAGE_BYTES - 4).unwrap_or_default())
}

/// Returns the checksum that ends the header page: it names the run and everything it counts.
pub(crate) fn header_crc(run: &[u8]) -> u32 {
    let header = run
        .get(..PAGE_BYTES)
        .and_then(|page| page.last_chunk::<4>());
    header.map_or(0, |crc| u32::from_le_bytes(*crc))
}

/// One verified page of slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page<'a> {
    slots: &'a [u8],
    /// The spill page that continues this one, counted behind the home pages; 0 is none.
    pub(crate) overflow: u32,
}

impl<'a> Page<'a> {
    /// Reads the page, comparing its checksum unless the caller has done so before (`seed` of
    /// `None`).
    pub(crate) fn read(bytes: &'a [u8], number: u32, seed: Option<u32>) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes);
        let crc = r.u32()?;
        if seed.is_some_and(|seed| checksum(seed, r.rest()) != crc) {
            return Err(Malformed("page checksum differs"));
        }
        if r.u32()? != number {
            return Err(Malformed("page in another page's place"));
        }
        let count = usize::from(r.u16()?);
        r.zeros(2)?;
        let overflow = r.u32()?;
        let slots = r.bytes(count * SLOT_BYTES)?;
        Ok(Page { slots, overflow })
    }

    pub(crate) fn count(&self) -> usize {
        self.slots.len() / SLOT_BYTES
    }

    pub(crate) fn slot(&self, index: usize) -> u64 {
        let at = self
            .slots
            .get(index * SLOT_BYTES..)
            .and_then(|b| b.first_chunk::<SLOT_BYTES>());
        at.map_or(u64::MAX, |b| u64::from_le_bytes(*b))
    }
}

/// Appends one page of slots, in ascending order.
pub(crate) fn encode_page(out: &mut Vec<u8>, seed: u32, number: u32, slots: &[u64], overflow: u32) {
    let start = out.len();
    out.put_u32(0);
    out.put_u32(number);
    out.put_u16(u16::try_from(slots.len()).unwrap_or(0));
    out.put_u16(0);
    out.put_u32(overflow);
    for slot in slots {
        out.put_u64(*slot);
    }
    out.put_zeros(PAGE_BYTES - (out.len() - start));
    let crc = checksum(seed, out.get(start + 4..).unwrap_or_default());
    set_u32(out, start, crc);
}

/// The seed of all checksums of one run and its filter: bytes of another run never validate.
pub(crate) fn run_seed(store: StoreId, lo: u64, hi: u64, generation: u32) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&store);
    hasher.update(&lo.to_le_bytes());
    hasher.update(&hi.to_le_bytes());
    hasher.update(&generation.to_le_bytes());
    hasher.finalize()
}

pub(crate) fn checksum(seed: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(seed);
    hasher.update(bytes);
    hasher.finalize()
}

/// Returns the page count as kept in page headers.
pub(crate) fn page_number(page: u64) -> u32 {
    to_u32(usize::try_from(page).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_comes_back_from_page_and_tag_in_every_geometry() {
        let shapes = [
            (1, 1, 4096),
            (2048, 1, 65_536),
            (1 << 20, 1, 32 << 20),
            (9, 512, 64 << 20),
        ];
        for (slots, segments, bytes) in shapes {
            let g = Geometry::plan(slots, segments, bytes);
            g.check().unwrap();
            let mut h = 1u64;
            for _ in 0..1000 {
                h = h
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let h = h >> (64 - HASH_BITS);
                let slot = g.slot(h, segments - 1, bytes - 8);
                let page = g.home_page(h);
                assert_eq!(g.first_h(page) + g.slot_tag(slot), h);
                assert_eq!(g.slot_ordinal(slot), segments - 1);
                assert_eq!(g.slot_offset(slot), bytes - 8);
            }
            for h in [0, (1 << HASH_BITS) - 1] {
                let slot = g.slot(h, 0, 64);
                assert_eq!(g.first_h(g.home_page(h)) + g.slot_tag(slot), h);
            }
        }
    }

    #[test]
    fn headers_and_pages_read_back_and_changed_bytes_are_noticed() {
        let header = RunHeader {
            store: [1; 16],
            hash_key_id: 2,
            lo: 3,
            hi: 4,
            generation: 5,
            geometry: Geometry::plan(10, 2, 4096),
            spill_pages: 0,
            slots_count: 10,
            hashes_count: 9,
            superseded_count: 8,
            segments_count: 2,
        };
        let mut bytes = header.encode(&[]);
        encode_page(&mut bytes, 6, 0, &[7, 8, 9], 0);
        assert_eq!(RunHeader::decode(&bytes), Ok(header));
        let page = Page::read(&bytes[PAGE_BYTES..], 0, Some(6)).unwrap();
        assert_eq!((page.count(), page.slot(2), page.overflow), (3, 9, 0));
        assert!(Page::read(&bytes[PAGE_BYTES..], 1, Some(6)).is_err());
        assert!(Page::read(&bytes[PAGE_BYTES..], 0, Some(7)).is_err());
        for at in 0..PAGE_BYTES {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(RunHeader::decode(&bad).is_err());
            let mut bad = bytes[PAGE_BYTES..].to_vec();
            bad[at] ^= 1;
            assert!(Page::read(&bad, 0, Some(6)).is_err());
        }
    }
}
