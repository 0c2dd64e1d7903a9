//! Builds index runs and their filters.

use std::io;

use super::fuse::FuseBuilder;
use crate::format::filter::{BloomBuilder, FilterKind, FilterPlan};
use crate::format::run::{
    Geometry, PAGE_BYTES, PAGE_SLOTS, RunHeader, encode_page, header_crc, page_number, run_seed,
};
use crate::format::times::Coverage;
use crate::format::{StoreId, to_u32};

/// Pages are handed on in chunks of so many bytes.
const CHUNK_BYTES: usize = 1024 * 1024;

/// One index entry: hash, segment number counted from the run's first, offset.
pub(crate) type IndexEntry = (u64, u64, u32);

/// What a run is about.
#[derive(Clone, Debug)]
pub(crate) struct RunPlan {
    pub(crate) store: StoreId,
    pub(crate) hash_key_id: u64,
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) generation: u32,
    pub(crate) segment_bytes: u32,
    pub(crate) superseded_count: u64,
    pub(crate) segments_count: u32,
    pub(crate) times: Vec<Coverage>,
    pub(crate) filter: FilterKind,
}

/// The two files of one run.
#[derive(Debug)]
pub(crate) struct BuiltRun {
    pub(crate) run: Vec<u8>,
    pub(crate) filter: Vec<u8>,
}

/// Builds the files of a run over these entries, which ascend by (hash, segment, offset).
pub(crate) fn build(
    plan: &RunPlan,
    mut entries: impl ExactSizeIterator<Item = IndexEntry>,
) -> BuiltRun {
    let segments = plan.hi - plan.lo + 1;
    let slots_count = entries.len() as u64;
    let geometry = Geometry::plan(slots_count, segments, plan.segment_bytes);
    // The header page, the home pages, and a spill page or two.
    let pages = usize::try_from(geometry.pages + 3).unwrap_or(1);
    let mut run = Vec::with_capacity(pages.saturating_mul(PAGE_BYTES));
    run.resize(PAGE_BYTES, 0);
    // Writing to memory does not fail.
    let mut write = |bytes: &[u8], _at: u64| -> io::Result<()> {
        run.extend_from_slice(bytes);
        Ok(())
    };
    let mut writer = RunWriter::new(plan, geometry, slots_count, &mut write);
    let written = entries
        .try_for_each(|entry| writer.push(entry))
        .and_then(|()| writer.finish(plan));
    let (header, filter) =
        written.map_or_else(|_never| (Vec::new(), Vec::new()), |w| (w.header, w.filter));
    for (to, from) in run.iter_mut().zip(header) {
        *to = from;
    }
    BuiltRun { run, filter }
}

/// What a run's writer has made besides the pages: the header page, which goes to the front, and
/// the filter file.
#[derive(Debug)]
pub(crate) struct WrittenRun {
    pub(crate) header: Vec<u8>,
    pub(crate) filter: Vec<u8>,
}

enum Filter {
    Bloom(BloomBuilder),
    Fuse(FuseBuilder),
}

/// Streams the pages of a run in order.
pub(crate) struct RunWriter<W> {
    seed: u32,
    geometry: Geometry,
    write: W,
    page: u64,
    slots: Vec<u64>,
    chunk: Vec<u8>,
    chunk_at: u64,
    spill: Vec<u8>,
    filter: Filter,
    slots_count: u64,
    hashes_count: u64,
    hash_before: Option<u64>,
}

impl<W: FnMut(&[u8], u64) -> io::Result<()>> RunWriter<W> {
    /// Starts behind the header page. `write` gets bytes and their offset, in order.
    pub(crate) fn new(plan: &RunPlan, geometry: Geometry, slots_max: u64, write: W) -> Self {
        let seed = run_seed(plan.store, plan.lo, plan.hi, plan.generation);
        RunWriter {
            seed,
            geometry,
            write,
            page: 0,
            slots: Vec::with_capacity(PAGE_SLOTS),
            chunk: Vec::with_capacity(CHUNK_BYTES + PAGE_BYTES),
            chunk_at: PAGE_BYTES as u64,
            spill: Vec::new(),
            filter: match plan.filter {
                FilterKind::Bloom => Filter::Bloom(BloomBuilder::new(slots_max)),
                FilterKind::Fuse => Filter::Fuse(FuseBuilder::new(slots_max, seed)),
            },
            slots_count: 0,
            hashes_count: 0,
            hash_before: None,
        }
    }

    /// Adds an entry; entries ascend.
    pub(crate) fn push(&mut self, (h, ordinal, offset): IndexEntry) -> io::Result<()> {
        while self.geometry.home_page(h) > self.page {
            self.end_page()?;
        }
        self.slots.push(self.geometry.slot(h, ordinal, offset));
        self.slots_count += 1;
        if self.hash_before != Some(h) {
            self.hash_before = Some(h);
            self.hashes_count += 1;
            match &mut self.filter {
                Filter::Bloom(filter) => filter.insert(h),
                Filter::Fuse(filter) => filter.insert(h),
            }
        }
        Ok(())
    }

    fn end_page(&mut self) -> io::Result<()> {
        let pages = self.geometry.pages;
        encode_with_spill(
            (&mut self.chunk, &mut self.spill),
            self.seed,
            pages,
            self.page,
            &self.slots,
        );
        self.slots.clear();
        self.page += 1;
        if self.chunk.len() >= CHUNK_BYTES {
            self.flush()
        } else {
            Ok(())
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        (self.write)(&self.chunk, self.chunk_at)?;
        self.chunk_at += self.chunk.len() as u64;
        self.chunk.clear();
        Ok(())
    }

    pub(crate) fn finish(mut self, plan: &RunPlan) -> io::Result<WrittenRun> {
        while self.page < self.geometry.pages {
            self.end_page()?;
        }
        self.flush()?;
        (self.write)(&self.spill, self.chunk_at)?;
        let header = RunHeader {
            store: plan.store,
            hash_key_id: plan.hash_key_id,
            lo: plan.lo,
            hi: plan.hi,
            generation: plan.generation,
            geometry: self.geometry,
            spill_pages: to_u32(self.spill.len() / PAGE_BYTES),
            slots_count: self.slots_count,
            hashes_count: self.hashes_count,
            superseded_count: plan.superseded_count,
            segments_count: plan.segments_count,
        };
        let header = header.encode(&plan.times);
        let plan = FilterPlan {
            store: plan.store,
            hash_key_id: plan.hash_key_id,
            generation: plan.generation,
            keys_count: self.hashes_count,
            run_crc: header_crc(&header),
            seed: self.seed,
        };
        let filter = match self.filter {
            Filter::Bloom(filter) => filter.finish(&plan),
            Filter::Fuse(filter) => filter.finish(&plan),
        };
        Ok(WrittenRun { header, filter })
    }
}

/// Writes a home page; what does not fit goes to a chain of spill pages.
fn encode_with_spill(
    (pages, spill): (&mut Vec<u8>, &mut Vec<u8>),
    seed: u32,
    home_pages: u64,
    page: u64,
    slots: &[u64],
) {
    let mut chunks = slots.chunks(PAGE_SLOTS);
    let first = chunks.next().unwrap_or(&[]);
    let next_spill = |spill: &Vec<u8>| to_u32(spill.len() / PAGE_BYTES) + 1;
    let mut left = chunks.len();
    let overflow = if left > 0 { next_spill(spill) } else { 0 };
    encode_page(pages, seed, page_number(page), first, overflow);
    for chunk in chunks {
        left -= 1;
        let number = page_number(home_pages).saturating_add(next_spill(spill) - 1);
        let overflow = if left > 0 { next_spill(spill) + 1 } else { 0 };
        encode_page(spill, seed, number, chunk, overflow);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::run::Run;
    use crate::vfs::Map;

    fn plan() -> RunPlan {
        RunPlan {
            store: [1; 16],
            hash_key_id: 2,
            lo: 7,
            hi: 9,
            generation: 0,
            segment_bytes: 65_536,
            superseded_count: 0,
            segments_count: 1,
            times: Vec::new(),
            filter: FilterKind::Bloom,
        }
    }

    fn find(run: &Run, h: u64) -> Vec<(u64, u32)> {
        let mut found = Vec::new();
        run.find(h, &mut found).unwrap();
        found
    }

    #[test]
    fn every_entry_is_found_newest_first_and_absent_hashes_are_not() {
        let mut entries: Vec<IndexEntry> = (1..5000u64)
            .map(|n| {
                (
                    n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20,
                    n % 3,
                    u32::try_from(n * 8).unwrap(),
                )
            })
            .collect();
        let twice = entries[10];
        entries.push((twice.0, 2, 65_528));
        entries.sort_unstable();
        let built = build(&plan(), entries.iter().copied());
        let run = Run::open(Map::from_vec(built.run), Map::from_vec(built.filter)).unwrap();
        assert_eq!(run.check_whole(), Ok(()));
        for (h, ordinal, offset) in &entries {
            assert_eq!(run.may_contain(*h), Ok(true));
            assert!(find(&run, *h).contains(&(7 + ordinal, *offset)));
        }
        assert_eq!(find(&run, twice.0).first(), Some(&(9, 65_528)));
        let absent = (1..1000u64)
            .filter(|n| !find(&run, n * 77_777).is_empty())
            .count();
        assert_eq!(absent, 0);
    }

    #[test]
    fn more_entries_of_one_page_than_fit_spill_and_are_found() {
        let entries: Vec<IndexEntry> = (0..2000u64)
            .map(|n| (n / 2, n % 2, u32::try_from(n * 8 + 64).unwrap()))
            .collect();
        let built = build(&plan(), entries.iter().copied());
        let run = Run::open(Map::from_vec(built.run), Map::from_vec(built.filter)).unwrap();
        assert_eq!(run.check_whole(), Ok(()));
        for (h, ordinal, offset) in &entries {
            assert!(find(&run, *h).contains(&(7 + ordinal, *offset)), "h={h}");
        }
    }

    #[test]
    fn a_thousand_entries_of_one_hash_are_all_found() {
        let entries: Vec<IndexEntry> = (0..1000u64)
            .map(|n| (42, 0, u32::try_from(n * 8 + 64).unwrap()))
            .collect();
        let built = build(&plan(), entries.iter().copied());
        let run = Run::open(Map::from_vec(built.run), Map::from_vec(built.filter)).unwrap();
        assert_eq!(find(&run, 42).len(), 1000);
        assert_eq!(find(&run, 41).len(), 0);
    }

    #[test]
    fn an_empty_run_holds_nothing() {
        let built = build(&plan(), [].into_iter());
        let run = Run::open(Map::from_vec(built.run), Map::from_vec(built.filter)).unwrap();
        assert_eq!(find(&run, 42).len(), 0);
    }
}
