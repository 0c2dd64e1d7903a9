//! Builds index runs and their filters.

use crate::format::filter::FilterPlan;
use crate::format::run::{
    Geometry, PAGE_BYTES, PAGE_SLOTS, RunHeader, encode_page, header_crc, page_number,
};
use crate::format::{StoreId, filter, to_u32};

/// One index entry: hash, segment number counted from the run's first, offset.
pub(crate) type IndexEntry = (u64, u64, u32);

/// What a run is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunPlan {
    pub(crate) store: StoreId,
    pub(crate) hash_key_id: u64,
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) generation: u32,
    pub(crate) segment_bytes: u32,
    pub(crate) superseded_count: u64,
}

/// The two files of one run.
#[derive(Debug)]
pub(crate) struct BuiltRun {
    pub(crate) run: Vec<u8>,
    pub(crate) filter: Vec<u8>,
}

/// Builds the files of a run over these entries, which ascend by (hash, segment, offset).
pub(crate) fn build(plan: &RunPlan, entries: &[IndexEntry]) -> BuiltRun {
    let segments = plan.hi - plan.lo + 1;
    let geometry = Geometry::plan(entries.len() as u64, segments, plan.segment_bytes);
    let hashes = || {
        entries
            .chunk_by(|a, b| a.0 == b.0)
            .filter_map(|same| same.first())
            .map(|e| e.0)
    };
    let hashes_count = hashes().count() as u64;
    let mut pages = Vec::new();
    let mut spill = Vec::new();
    let mut rest = entries;
    for page in 0..geometry.pages {
        let count = rest.partition_point(|e| geometry.home_page(e.0) == page);
        let (mine, others) = rest.split_at_checked(count).unwrap_or((rest, &[]));
        rest = others;
        let slots: Vec<u64> = mine.iter().map(|e| geometry.slot(e.0, e.1, e.2)).collect();
        encode_with_spill(&mut pages, &mut spill, geometry.pages, page, &slots);
    }
    let header = RunHeader {
        store: plan.store,
        hash_key_id: plan.hash_key_id,
        lo: plan.lo,
        hi: plan.hi,
        generation: plan.generation,
        geometry,
        spill_pages: to_u32(spill.len() / PAGE_BYTES),
        slots_count: entries.len() as u64,
        hashes_count,
        superseded_count: plan.superseded_count,
    };
    let mut run = header.encode();
    run.append(&mut pages);
    run.append(&mut spill);
    let filter = filter::encode(
        &FilterPlan {
            store: plan.store,
            hash_key_id: plan.hash_key_id,
            generation: plan.generation,
            keys_count: hashes_count,
            run_crc: header_crc(&run),
        },
        hashes(),
    );
    BuiltRun { run, filter }
}

/// Writes a home page; what does not fit goes to a chain of spill pages.
fn encode_with_spill(
    pages: &mut Vec<u8>,
    spill: &mut Vec<u8>,
    home_pages: u64,
    page: u64,
    slots: &[u64],
) {
    let mut chunks = slots.chunks(PAGE_SLOTS);
    let first = chunks.next().unwrap_or(&[]);
    let next_spill = |spill: &Vec<u8>| to_u32(spill.len() / PAGE_BYTES) + 1;
    let mut left = chunks.len();
    let overflow = if left > 0 { next_spill(spill) } else { 0 };
    encode_page(pages, page_number(page), first, overflow);
    for chunk in chunks {
        left -= 1;
        let number = page_number(home_pages).saturating_add(next_spill(spill) - 1);
        let overflow = if left > 0 { next_spill(spill) + 1 } else { 0 };
        encode_page(spill, number, chunk, overflow);
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
        let built = build(&plan(), &entries);
        let run = Run::open(Map::from_vec(built.run), Map::from_vec(built.filter)).unwrap();
        assert_eq!(run.check_whole(), Ok(()));
        for (h, ordinal, offset) in &entries {
            assert!(run.may_contain(*h));
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
        let built = build(&plan(), &entries);
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
        let built = build(&plan(), &entries);
        let run = Run::open(Map::from_vec(built.run), Map::from_vec(built.filter)).unwrap();
        assert_eq!(find(&run, 42).len(), 1000);
        assert_eq!(find(&run, 41).len(), 0);
    }

    #[test]
    fn an_empty_run_holds_nothing() {
        let built = build(&plan(), &[]);
        let run = Run::open(Map::from_vec(built.run), Map::from_vec(built.filter)).unwrap();
        assert_eq!(find(&run, 42).len(), 0);
    }
}
