//! Reads one immutable run and its filter.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::format::Malformed;
use crate::format::filter::{self, FILTER_HEADER_BYTES, FilterHeader, FilterKind};
use crate::format::fuse::{self, Partition};
use crate::format::run::{
    PAGE_BYTES, PAGE_HEADER_BYTES, Page, RunHeader, SLOT_BYTES, decode_times, header_crc,
    page_number, run_seed,
};
use crate::format::times::Coverage;
use crate::key_time::KeyBucket;
use crate::vfs::Map;

/// A run whose header was verified. Pages, and partitions of its filter, are when first read.
#[derive(Debug)]
pub(crate) struct Run {
    map: Map,
    pub(crate) header: RunHeader,
    times: Vec<Coverage>,
    filter_map: Map,
    filter: FilterHeader,
    /// Of a fuse filter.
    partitions: Vec<Partition>,
    /// One bit a partition, as `verified`.
    verified_partitions: Vec<AtomicU64>,
    /// Seed of the pages' checksums.
    seed: u32,
    /// Slots of a home page, on average.
    page_slots: u64,
    /// One bit a page. Relaxed: a page verified twice is only wasted work.
    verified: Vec<AtomicU64>,
}

impl Run {
    /// Opens a run and its filter, which must belong together.
    pub(crate) fn open(map: Map, filter_map: Map) -> Result<Run, Malformed> {
        map.advise_random();
        filter_map.advise_will_need();
        let header = RunHeader::decode(&map)?;
        let times = decode_times(&map)?;
        let seed = run_seed(header.store, header.lo, header.hi, header.generation);
        let (filter, body) = filter::decode(&filter_map, seed)?;
        let partitions = match filter.kind {
            FilterKind::Bloom => Vec::new(),
            FilterKind::Fuse => fuse::decode_table(body, filter.parts_count)?.0,
        };
        let held: u64 = partitions.iter().map(|p| u64::from(p.keys_count)).sum();
        if filter.kind == FilterKind::Fuse && held != filter.keys_count {
            return Err(Malformed(
                "partitions of a filter hold another number of keys",
            ));
        }
        let same = filter.store == header.store
            && filter.hash_key_id == header.hash_key_id
            && filter.generation == header.generation
            && filter.run_crc == header_crc(&map);
        if !same || filter.keys_count != header.hashes_count {
            return Err(Malformed("filter of another run"));
        }
        let pages = header.geometry.pages + u64::from(header.spill_pages);
        let pages = usize::try_from(pages).unwrap_or(usize::MAX);
        Ok(Run {
            map,
            header,
            times,
            filter_map,
            filter,
            seed,
            page_slots: header.slots_count / header.geometry.pages.max(1),
            verified: bits(pages),
            verified_partitions: bits(partitions.len()),
            partitions,
        })
    }

    /// Says that no key of this time is in the run; `false` says nothing.
    #[inline]
    pub(crate) fn excludes(&self, namespace: u16, time: Option<KeyBucket>) -> bool {
        time.is_some_and(|time| self.times.iter().any(|t| t.excludes(namespace, time)))
    }

    pub(crate) fn times(&self) -> &[Coverage] {
        &self.times
    }

    /// Says whether the run may hold this hash; `false` is certain.
    #[inline]
    pub(crate) fn may_contain(&self, h: u64) -> Result<bool, Malformed> {
        match self.filter.kind {
            FilterKind::Bloom => {
                let body = self.filter_map.get(FILTER_HEADER_BYTES..);
                let blocks = body.unwrap_or_default();
                Ok(filter::may_contain(blocks, self.filter.parts_count, h))
            }
            FilterKind::Fuse => self.may_be_in_partition(h),
        }
    }

    fn may_be_in_partition(&self, h: u64) -> Result<bool, Malformed> {
        let number = fuse::partition_of(h, self.filter.parts_count);
        let (partition, fingerprints) = self.partition(number)?;
        Ok(partition.may_contain(fingerprints, h))
    }

    /// Returns a partition and its fingerprints, verifying them the first time.
    #[inline]
    fn partition(&self, number: usize) -> Result<(&Partition, &[u8]), Malformed> {
        let missing = Malformed("filter has fewer partitions than its header says");
        let partition = self.partitions.get(number).ok_or(missing)?;
        let all = self.filter_map.get(self.fingerprints_at()..);
        let fingerprints = all.and_then(|all| partition.fingerprints(all));
        let fingerprints = fingerprints.ok_or(missing)?;
        let (word, bit) = bit(&self.verified_partitions, number).ok_or(missing)?;
        if word.load(Ordering::Relaxed) & bit == 0 {
            if !partition.is_intact(fingerprints, self.seed) {
                return Err(Malformed("filter checksum differs"));
            }
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Ok((partition, fingerprints))
    }

    fn fingerprints_at(&self) -> usize {
        FILTER_HEADER_BYTES + fuse::table_bytes(self.filter.parts_count)
    }

    /// Has the processor fetch what [`Run::may_contain`] reads first.
    pub(crate) fn prefetch(&self, h: u64) {
        let at = match self.filter.kind {
            FilterKind::Bloom => FILTER_HEADER_BYTES + filter::block_at(self.filter.parts_count, h),
            FilterKind::Fuse => {
                let number = fuse::partition_of(h, self.filter.parts_count);
                let Some(partition) = self.partitions.get(number) else {
                    return;
                };
                let at = usize::try_from(partition.first_at(h)).unwrap_or(usize::MAX);
                self.fingerprints_at().saturating_add(at)
            }
        };
        super::prefetch::prefetch(&self.filter_map, at);
    }

    pub(crate) fn has_fuse_filter(&self) -> bool {
        self.filter.kind == FilterKind::Fuse
    }

    /// Returns the bytes of the filter file.
    pub(crate) fn filter_bytes(&self) -> u64 {
        self.filter_map.len() as u64
    }

    /// Returns the bytes of the run file.
    pub(crate) fn run_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Appends the places (segment, offset) of all entries with this hash, newest first.
    pub(crate) fn find(&self, h: u64, places: &mut Vec<(u64, u32)>) -> Result<(), Malformed> {
        let g = self.header.geometry;
        let tag = g.tag(h);
        let home = g.home_page(h);
        let range = g.first_h(home + 1).saturating_sub(g.first_h(home)).max(1);
        let start = places.len();
        // Meanwhile the page's header is read, which another line has.
        let place =
            PAGE_HEADER_BYTES as u64 + guess(tag, self.page_slots, range) * SLOT_BYTES as u64;
        super::prefetch::prefetch(&self.map, to_index(page_at(home).saturating_add(place)));
        let mut page = self.page(home)?;
        // At most one page more than there are spill pages: a damaged chain must end too.
        for _ in 0..=self.header.spill_pages {
            let first = first_at_least(&page, tag, range, |slot| g.slot_tag(slot));
            let mut index = first;
            while index < page.count() {
                let slot = page.slot(index);
                if g.slot_tag(slot) != tag {
                    break;
                }
                places.push((self.header.lo + g.slot_ordinal(slot), g.slot_offset(slot)));
                index += 1;
            }
            // A smaller tag than the page's last one cannot stand in a later page.
            if page.overflow == 0 || index < page.count() {
                break;
            }
            page = self.page(g.pages + u64::from(page.overflow) - 1)?;
        }
        if let Some(found) = places.get_mut(start..) {
            found.sort_unstable_by(|a, b| b.cmp(a));
        }
        Ok(())
    }

    /// Returns the slots of a home page and of the spill pages that continue it, ascending.
    pub(crate) fn page_slots(&self, home: u64) -> Result<Vec<u64>, Malformed> {
        let mut slots = Vec::new();
        let mut page = self.page(home)?;
        for _ in 0..=self.header.spill_pages {
            slots.extend((0..page.count()).map(|index| page.slot(index)));
            if page.overflow == 0 {
                break;
            }
            page = self.page(self.header.geometry.pages + u64::from(page.overflow) - 1)?;
        }
        Ok(slots)
    }

    /// Reads a page, verifying it the first time.
    fn page(&self, page: u64) -> Result<Page<'_>, Malformed> {
        let bytes = self.map.get(to_index(page_at(page))..);
        let bytes = bytes.and_then(|b| b.get(..PAGE_BYTES));
        let bytes = bytes.ok_or(Malformed("page behind the end"))?;
        let number = usize::try_from(page).unwrap_or(usize::MAX);
        let (word, bit) = bit(&self.verified, number).ok_or(Malformed("page behind the end"))?;
        let known = word.load(Ordering::Relaxed) & bit != 0;
        let read = Page::read(bytes, page_number(page), (!known).then_some(self.seed))?;
        if !known {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Ok(read)
    }

    /// Verifies every partition of the filter, every page and every count.
    pub(crate) fn check_whole(&self) -> Result<(), Malformed> {
        for number in 0..self.partitions.len() {
            self.partition(number)?;
        }
        let mut slots = 0;
        for page in 0..self.header.geometry.pages + u64::from(self.header.spill_pages) {
            let read = self.page(page)?;
            slots += read.count() as u64;
            let ordered = (1..read.count()).all(|i| read.slot(i - 1) < read.slot(i));
            if !ordered {
                return Err(Malformed("slots out of order"));
            }
        }
        if slots != self.header.slots_count {
            return Err(Malformed(
                "run has another number of slots than its header says",
            ));
        }
        Ok(())
    }
}

/// Makes so many bits, all zero.
fn bits(count: usize) -> Vec<AtomicU64> {
    (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
}

/// Returns the word of a bit, and the bit in it.
#[inline]
fn bit(bits: &[AtomicU64], number: usize) -> Option<(&AtomicU64, u64)> {
    Some((bits.get(number / 64)?, 1 << (number % 64)))
}

fn to_index(place: u64) -> usize {
    usize::try_from(place).unwrap_or(usize::MAX)
}

/// Returns where in the file a page begins.
pub(super) fn page_at(page: u64) -> u64 {
    (page + 1).saturating_mul(PAGE_BYTES as u64)
}

/// Returns about where a tag stands among the slots of a page: tags spread evenly.
fn guess(tag: u64, count: u64, range: u64) -> u64 {
    tag.saturating_mul(count) / range
}

/// Finds the first slot with at least this tag: guesses by interpolation, then walks.
fn first_at_least(page: &Page<'_>, tag: u64, range: u64, tag_of: impl Fn(u64) -> u64) -> usize {
    let count = page.count();
    let mut index = to_index(guess(tag, count as u64, range)).min(count);
    // The hash spreads evenly, so the guess is some ten slots off; a page whose hashes were
    // chosen degrades to a walk over its 510 slots.
    while index > 0 && tag_of(page.slot(index - 1)) >= tag {
        index -= 1;
    }
    while index < count && tag_of(page.slot(index)) < tag {
        index += 1;
    }
    index
}
