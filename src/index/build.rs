//! Builds index runs and their filters.

use std::io;

use super::fuse::FuseBuilder;
use super::run::page_at;
use crate::format::filter::{BloomBuilder, FilterKind, FilterPlan};
use crate::format::run::{
    Geometry, HASH_BITS, PAGE_BYTES, PAGE_SLOTS, RunHeader, encode_page, header_crc, page_number,
    run_seed,
};
use crate::format::times::Coverage;
use crate::format::{Malformed, StoreId, to_u32};

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

/// One of the two files of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    Run,
    Filter,
}

/// Why a run was not made.
#[derive(Debug)]
pub(crate) enum BuildError {
    /// What it is made of is damaged.
    Malformed(Malformed),
    /// It could not be written.
    Io(io::Error),
}

impl From<Malformed> for BuildError {
    fn from(why: Malformed) -> Self {
        BuildError::Malformed(why)
    }
}

impl From<io::Error> for BuildError {
    fn from(error: io::Error) -> Self {
        BuildError::Io(error)
    }
}

/// Makes a run and its filter over so many entries, which ascend by (hash, segment, offset), and
/// hands both on as [`RunWriter`] does.
pub(crate) fn build(
    plan: &RunPlan,
    entries_count: u64,
    entries: impl Iterator<Item = IndexEntry>,
    write: impl FnMut(Output, &[u8], u64) -> io::Result<()>,
) -> Result<(), BuildError> {
    let segments = plan.hi - plan.lo + 1;
    let geometry = Geometry::plan(entries_count, segments, plan.segment_bytes);
    let mut writer = RunWriter::new(plan, geometry, entries_count, write);
    for entry in entries {
        writer.push(entry)?;
    }
    if writer.slots_count != entries_count {
        return Err(Malformed("table has another number of entries than it says").into());
    }
    writer.finish(plan)
}

enum Filter {
    Bloom(BloomBuilder),
    Fuse(FuseBuilder),
}

/// Streams a run and its filter: in memory are a page of each, and what spills.
pub(crate) struct RunWriter<W> {
    seed: u32,
    geometry: Geometry,
    write: W,
    page: u64,
    slots: Vec<u64>,
    page_bytes: Vec<u8>,
    spill: Vec<u8>,
    filter: Filter,
    slots_count: u64,
    hashes_count: u64,
    hash_before: Option<u64>,
}

impl<W: FnMut(Output, &[u8], u64) -> io::Result<()>> RunWriter<W> {
    /// `write` gets bytes of one of the files and their offset: in order, but that the front of
    /// each comes last.
    pub(crate) fn new(plan: &RunPlan, geometry: Geometry, slots_max: u64, write: W) -> Self {
        let seed = run_seed(plan.store, plan.lo, plan.hi, plan.generation);
        RunWriter {
            seed,
            geometry,
            write,
            page: 0,
            slots: Vec::with_capacity(PAGE_SLOTS),
            page_bytes: Vec::with_capacity(PAGE_BYTES),
            spill: Vec::new(),
            filter: match plan.filter {
                FilterKind::Bloom => Filter::Bloom(BloomBuilder::new(slots_max, seed)),
                FilterKind::Fuse => Filter::Fuse(FuseBuilder::new(slots_max, seed)),
            },
            slots_count: 0,
            hashes_count: 0,
            hash_before: None,
        }
    }

    /// Adds an entry; entries ascend.
    pub(crate) fn push(&mut self, (h, ordinal, offset): IndexEntry) -> Result<(), BuildError> {
        if self.hash_before != Some(h) {
            // In the wrong page, or block of the filter, it would not be found.
            if self.hash_before > Some(h) || h >> HASH_BITS != 0 {
                return Err(Malformed("entries out of order").into());
            }
            self.hash_before = Some(h);
            self.hashes_count += 1;
            let write = |bytes: &[u8], at| (self.write)(Output::Filter, bytes, at);
            match &mut self.filter {
                Filter::Bloom(filter) => filter.insert(h, write)?,
                Filter::Fuse(filter) => filter.insert(h, write)?,
            }
        }
        while self.geometry.home_page(h) > self.page {
            self.end_page()?;
        }
        self.slots.push(self.geometry.slot(h, ordinal, offset));
        self.slots_count += 1;
        Ok(())
    }

    fn end_page(&mut self) -> io::Result<()> {
        let pages = self.geometry.pages;
        encode_with_spill(
            (&mut self.page_bytes, &mut self.spill),
            self.seed,
            pages,
            self.page,
            &self.slots,
        );
        (self.write)(Output::Run, &self.page_bytes, page_at(self.page))?;
        self.page += 1;
        self.slots.clear();
        self.page_bytes.clear();
        Ok(())
    }

    /// Hands on what is left of both.
    pub(crate) fn finish(mut self, plan: &RunPlan) -> Result<(), BuildError> {
        while self.page < self.geometry.pages {
            self.end_page()?;
        }
        if !self.spill.is_empty() {
            (self.write)(Output::Run, &self.spill, page_at(self.page))?;
        }
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
        (self.write)(Output::Run, &header, 0)?;
        let plan = FilterPlan {
            store: plan.store,
            hash_key_id: plan.hash_key_id,
            generation: plan.generation,
            keys_count: self.hashes_count,
            run_crc: header_crc(&header),
        };
        let write = |bytes: &[u8], at| (self.write)(Output::Filter, bytes, at);
        match self.filter {
            Filter::Bloom(filter) => filter.finish(&plan, write)?,
            Filter::Fuse(filter) => filter.finish(&plan, write)?,
        }
        Ok(())
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

/// The two files of a run, in memory.
#[cfg(test)]
#[derive(Debug, Default)]
pub(crate) struct InMemory {
    run: Vec<u8>,
    filter: Vec<u8>,
    /// The places and sizes of all writes.
    writes: Vec<(Output, u64, usize)>,
}

#[cfg(test)]
impl InMemory {
    pub(crate) fn write(&mut self, to: Output, bytes: &[u8], at: u64) -> io::Result<()> {
        let file = match to {
            Output::Run => &mut self.run,
            Output::Filter => &mut self.filter,
        };
        let at = usize::try_from(at).unwrap();
        file.resize(file.len().max(at + bytes.len()), 0);
        file[at..at + bytes.len()].copy_from_slice(bytes);
        self.writes.push((to, at as u64, bytes.len()));
        Ok(())
    }

    pub(crate) fn open(self) -> super::run::Run {
        let [run, filter] = [self.run, self.filter].map(crate::vfs::Map::from_vec);
        super::run::Run::open(run, filter).unwrap()
    }

    pub(crate) fn of(plan: &RunPlan, entries: &[IndexEntry]) -> Self {
        let mut files = InMemory::default();
        let write = |to, bytes: &[u8], at| files.write(to, bytes, at);
        build(plan, entries.len() as u64, entries.iter().copied(), write).unwrap();
        files
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::run::Run;

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
        let run = InMemory::of(&plan(), &entries).open();
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
        let run = InMemory::of(&plan(), &entries).open();
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
        let run = InMemory::of(&plan(), &entries).open();
        assert_eq!(find(&run, 42).len(), 1000);
        assert_eq!(find(&run, 41).len(), 0);
    }

    #[test]
    fn an_empty_run_holds_nothing() {
        let run = InMemory::of(&plan(), &[]).open();
        assert_eq!(find(&run, 42).len(), 0);
    }

    #[test]
    fn both_files_are_handed_on_by_the_page_and_the_front_of_each_last() {
        let entries: Vec<IndexEntry> = (0..5000u32)
            .map(|n| (u64::from(n) * 3_500_000_000, 0, n * 8 + 64))
            .collect();
        for (filter, front) in [(FilterKind::Bloom, 64), (FilterKind::Fuse, 64 + 32)] {
            let plan = RunPlan { filter, ..plan() };
            let files = InMemory::of(&plan, &entries);
            for (output, start, count_min) in [(Output::Run, 4096, 12), (Output::Filter, front, 2)]
            {
                let mut writes = files.writes.iter().filter(|(to, ..)| *to == output);
                let count = writes.clone().count();
                assert!(count >= count_min, "{filter:?} {output:?} {count}");
                let mut end = start;
                for (_, at, len) in writes.by_ref().take(count - 1) {
                    assert_eq!(*at, end);
                    let fits = (1..=2 * PAGE_BYTES).contains(len);
                    assert!(fits, "{filter:?} {output:?} {len}");
                    end += *len as u64;
                }
                let (_, at, len) = writes.next().unwrap();
                assert_eq!((*at, *len as u64), (0, start), "{filter:?} {output:?}");
            }
            let run = files.open();
            assert_eq!(run.check_whole(), Ok(()));
            assert!(
                entries
                    .iter()
                    .all(|(h, ..)| run.may_contain(*h) == Ok(true))
            );
        }
    }

    #[test]
    fn entries_out_of_order_or_of_another_number_make_no_run() {
        let refused = |entries: &[IndexEntry], count| {
            let mut files = InMemory::default();
            let write = |to, bytes: &[u8], at| files.write(to, bytes, at);
            let built = build(&plan(), count, entries.iter().copied(), write);
            matches!(built, Err(BuildError::Malformed(_)))
        };
        let (one, two) = ((1 << 40, 0, 64), (2 << 40, 0, 128));
        assert!(!refused(&[one, one, two], 3));
        assert!(refused(&[two, one], 2));
        assert!(refused(&[one, two], 3));
        assert!(refused(&[one, two], 1));
        assert!(refused(&[one, (1 << HASH_BITS, 0, 64)], 2));
    }
}
