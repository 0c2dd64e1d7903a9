//! Merges runs: reads several in hash order and streams one, with its filter.
//!
//! The log is not touched and not read: a slot and its home page give the hash back. Memory is
//! one page of each input, a page of each output, one partition of the filter, and what spills.

use std::io;

use super::build::{BuildError, IndexEntry, Output, RunPlan, RunWriter};
use super::run::Run;
use crate::format::Malformed;
use crate::format::run::Geometry;

/// Iterates over the entries of a run in ascending order of (hash, segment, offset).
#[derive(Debug)]
struct Cursor<'a> {
    run: &'a Run,
    page: u64,
    slots: Vec<u64>,
    index: usize,
    /// Added to the run's own segment ordinals.
    ordinal_base: u64,
}

impl<'a> Cursor<'a> {
    fn new(run: &'a Run, lo: u64) -> Result<Self, Malformed> {
        // An input may begin with segments that are gone, before the output's first.
        let ordinal_base = run.header.lo.wrapping_sub(lo);
        let slots = run.page_slots(0)?;
        Ok(Cursor {
            run,
            page: 0,
            slots,
            index: 0,
            ordinal_base,
        })
    }

    fn peek(&mut self) -> Result<Option<IndexEntry>, Malformed> {
        let geometry = self.run.header.geometry;
        loop {
            if let Some(slot) = self.slots.get(self.index) {
                let h = geometry.first_h(self.page) + geometry.slot_tag(*slot);
                let ordinal = self.ordinal_base.wrapping_add(geometry.slot_ordinal(*slot));
                return Ok(Some((h, ordinal, geometry.slot_offset(*slot))));
            }
            if self.page + 1 >= geometry.pages {
                return Ok(None);
            }
            self.page += 1;
            self.slots = self.run.page_slots(self.page)?;
            self.index = 0;
        }
    }
}

/// Merges `inputs` (adjacent runs, in any order) and hands run and filter on as [`RunWriter`] does.
/// Entries of segments for which `is_live` is false are left out.
pub(crate) fn merge(
    plan: &RunPlan,
    inputs: &[&Run],
    is_live: impl Fn(u64) -> bool,
    write: impl FnMut(Output, &[u8], u64) -> io::Result<()>,
) -> Result<(), BuildError> {
    let slots_max: u64 = inputs.iter().map(|run| run.header.slots_count).sum();
    let geometry = Geometry::plan(slots_max, plan.hi - plan.lo + 1, plan.segment_bytes);
    let mut output = RunWriter::new(plan, geometry, slots_max, write);
    let mut cursors = Vec::with_capacity(inputs.len());
    for run in inputs {
        cursors.push(Cursor::new(run, plan.lo)?);
    }
    loop {
        // A few inputs: comparing all of them is as fast as a heap, and simpler.
        let mut least: Option<(IndexEntry, usize)> = None;
        for (index, cursor) in cursors.iter_mut().enumerate() {
            if let Some(entry) = cursor.peek()?
                && least.is_none_or(|(before, _)| entry < before)
            {
                least = Some((entry, index));
            }
        }
        let Some((entry, index)) = least else { break };
        if let Some(cursor) = cursors.get_mut(index) {
            cursor.index += 1;
        }
        if is_live(plan.lo.wrapping_add(entry.1)) {
            output.push(entry)?;
        }
    }
    output.finish(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::filter::FilterKind;
    use crate::index::build::InMemory;

    fn plan(lo: u64, hi: u64) -> RunPlan {
        RunPlan {
            store: [1; 16],
            hash_key_id: 2,
            lo,
            hi,
            generation: 1,
            segment_bytes: 1 << 20,
            superseded_count: 0,
            segments_count: 1,
            times: Vec::new(),
            filter: FilterKind::Fuse,
        }
    }

    fn h(n: u64) -> u64 {
        n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
    }

    fn level_0(segment: u64, numbers: std::ops::Range<u64>) -> (Run, Vec<IndexEntry>) {
        let mut entries: Vec<IndexEntry> = numbers
            .map(|n| (h(n), 0, u32::try_from((n % 30_000) * 8 + 64).unwrap()))
            .collect();
        entries.sort_unstable();
        let run = InMemory::of(&plan(segment, segment), &entries).open();
        (run, entries)
    }

    fn merged(plan: &RunPlan, inputs: &[&Run], is_live: impl Fn(u64) -> bool) -> Run {
        let mut files = InMemory::default();
        let write = |to, bytes: &[u8], at| files.write(to, bytes, at);
        merge(plan, inputs, is_live, write).unwrap();
        files.open()
    }

    #[test]
    fn a_merged_run_answers_what_its_inputs_answered_and_merges_again() {
        let parts: Vec<_> = (0..6)
            .map(|i| level_0(10 + i, i * 3000..(i + 1) * 3000 + 500))
            .collect();
        let first = merged(
            &plan(10, 12),
            &[&parts[0].0, &parts[1].0, &parts[2].0],
            |_| true,
        );
        let second = merged(
            &plan(13, 15),
            &[&parts[5].0, &parts[3].0, &parts[4].0],
            |_| true,
        );
        let all = merged(&plan(10, 15), &[&first, &second], |_| true);
        assert_eq!(all.check_whole(), Ok(()));
        assert_eq!(all.header.slots_count, 6 * 3500);
        for (index, (_, entries)) in parts.iter().enumerate() {
            for (h, _, offset) in entries {
                assert_eq!(all.may_contain(*h), Ok(true));
                let mut places = Vec::new();
                all.find(*h, &mut places).unwrap();
                assert!(places.contains(&(10 + index as u64, *offset)), "h={h}");
                assert!(places.is_sorted_by(|a, b| a > b), "newest first");
            }
        }
        let absent = (1 << 40..(1 << 40) + 2000).filter(|n| {
            let mut places = Vec::new();
            all.find(h(*n), &mut places).unwrap();
            !places.is_empty()
        });
        assert_eq!(absent.count(), 0);
    }

    #[test]
    fn entries_of_dropped_segments_are_left_out() {
        let (one, _) = level_0(1, 0..1000);
        let (two, entries) = level_0(2, 1000..2000);
        let run = merged(&plan(1, 2), &[&one, &two], |segment| segment == 2);
        assert_eq!(run.header.slots_count, 1000);
        let mut places = Vec::new();
        run.find(entries[0].0, &mut places).unwrap();
        assert_eq!(places, [(2, entries[0].2)]);
    }

    #[test]
    fn a_full_page_of_equal_hashes_spills_and_merges() {
        let entries: Vec<IndexEntry> = (0..1200u32).map(|n| (42, 0, n * 8 + 64)).collect();
        let one = InMemory::of(&plan(1, 1), &entries).open();
        let (two, _) = level_0(2, 0..1000);
        let run = merged(&plan(1, 2), &[&one, &two], |_| true);
        assert_eq!(run.check_whole(), Ok(()));
        let mut places = Vec::new();
        run.find(42, &mut places).unwrap();
        assert_eq!(places.len(), 1200);
    }
}
