//! Merging index runs, so that a look-up asks few filters. The log is not touched.
//!
//! Rules, where the weight of a run is that of its live segments, in full ones: only adjacent runs
//! are merged, four of about the same weight; no merged run weighs more than an eighth of the live
//! segments (at least four), so that expiry does not wait for a large run to die; where four would,
//! but two or three would not, these are merged; a run of which more than a quarter of the segments
//! are gone is written anew. The small segments of a young store are merged as soon as there are
//! four, and what is left of them comes along when full ones are merged.
//! The work is done without any lock on immutable inputs; one manifest edit replaces them. Killed
//! before it, the new files are orphans; killed after it, the old ones are.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError};

use super::Engine;
use super::core::{Part, View};
use super::install::install;
use crate::error::{Error, ErrorKind, Result};
use crate::format::filter::FilterKind;
use crate::format::manifest::RunEntry;
use crate::format::names::{FileName, GateName};
use crate::format::{times, to_u32};
use crate::index::build::{BuildError, RunPlan};
use crate::index::merge::merge;
use crate::index::run::Run;

/// Runs of one tier that are merged together.
const FAN_IN: usize = 4;
/// Log bytes of a small record: a merged run of more keys than a full segment has of these gets a
/// fuse filter. Smaller ones are those of a young store, where memory is of no concern yet and one
/// line is faster than three.
const SLOT_LOG_BYTES: u64 = 32;
/// The widest run: the reach of a slot's segment ordinal.
const SPAN_MAX: u64 = 512;

impl Engine {
    /// Merges once, if anything is due. Says whether it did.
    pub(crate) fn merge_once(&self) -> Result<bool> {
        let _one_at_a_time = self.merging.lock().unwrap_or_else(PoisonError::into_inner);
        let _one_process = match &self.shared {
            None => None,
            Some(shared) => {
                let gate = shared.try_gate(GateName::Merge, self.clock())?;
                if gate.is_none() {
                    return Ok(false);
                }
                self.refresh()?;
                gate
            }
        };
        let (inputs, plan, live) = {
            let view = {
                let core = self.core();
                if !self.may_maintain(&core) {
                    return Ok(false);
                }
                Arc::clone(core.view())
            };
            let Some(inputs) = choose(&view, self.options.segment_bytes) else {
                return Ok(false);
            };
            let plan = self.plan_merge(&view, &inputs);
            // Not the view itself: it would hold the table of a segment that is sealed meanwhile.
            let live = view.sealed.range(plan.lo..=plan.hi).map(|(id, _)| *id);
            let live: Vec<u64> = live.collect();
            (inputs, plan, live)
        };
        let runs: Vec<&Run> = inputs.iter().map(|part| &part.run).collect();
        let is_live = |segment: u64| live.binary_search(&segment).is_ok();
        let installed = install(self.dir.as_ref(), &plan, |write| {
            merge(&plan, &runs, is_live, |to, bytes, at| {
                // A close waits for one chunk, not for the whole merge.
                if self.background.is_stopping() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                write(to, bytes, at)
            })
        });
        let run = installed.map_err(|why| match why {
            BuildError::Io(error) => {
                Error::io("merging index runs failed; the log is intact", error)
            }
            BuildError::Malformed(why) => {
                // Whichever input it was: each is checked and built again if it is damaged.
                for part in inputs.iter().filter(|part| part.run.check_whole().is_err()) {
                    part.mark_damaged();
                }
                self.background.wake();
                Error::new(
                    ErrorKind::Damaged,
                    format!("index run is damaged and is being rebuilt: {}", why.0),
                )
            }
        })?;
        self.replace_runs(&inputs, run)
    }

    fn plan_merge(&self, view: &View, inputs: &[Arc<Part>]) -> RunPlan {
        let lo = inputs.iter().map(|p| p.run.header.lo).min().unwrap_or(0);
        let hi = inputs.iter().map(|p| p.run.header.hi).max().unwrap_or(0);
        let live: Vec<(u64, u32)> = view
            .sealed
            .range(lo..=hi)
            .map(|(id, s)| (*id, s.segment.bytes))
            .collect();
        let generation = inputs.iter().map(|p| p.run.header.generation).max();
        let segment_bytes = live.iter().map(|(_, bytes)| *bytes).max();
        let slots_count: u64 = inputs.iter().map(|p| p.run.header.slots_count).sum();
        let times: Vec<_> = inputs.iter().map(|part| part.run.times()).collect();
        RunPlan {
            store: self.store,
            hash_key_id: self.hash.id(),
            lo: live.first().map_or(lo, |(id, _)| *id),
            hi: live.last().map_or(hi, |(id, _)| *id),
            generation: generation.unwrap_or(0).wrapping_add(1),
            segment_bytes: segment_bytes.unwrap_or(self.options.segment_bytes),
            superseded_count: inputs.iter().map(|p| p.run.header.superseded_count).sum(),
            segments_count: to_u32(live.len()),
            times: times::merged(&times),
            filter: if slots_count > u64::from(self.options.segment_bytes) / SLOT_LOG_BYTES {
                FilterKind::Fuse
            } else {
                FilterKind::Bloom
            },
        }
    }

    /// Puts the merged run in the place of its inputs. `false`: they have changed meanwhile.
    fn replace_runs(&self, inputs: &[Arc<Part>], run: Run) -> Result<bool> {
        let mut upkeep = self.maintenance()?;
        let is_input = |part: &Arc<Part>| inputs.iter().any(|input| Arc::ptr_eq(input, part));
        let entry = run_entry(&run);
        let still = {
            let core = self.core();
            !core.closed
                && core
                    .view()
                    .parts
                    .iter()
                    .filter(|part| is_input(part))
                    .count()
                    == inputs.len()
        };
        if !still {
            upkeep.left.extend(file_names(entry));
            return Ok(false);
        }
        let gone: Vec<RunEntry> = inputs.iter().map(|part| run_entry(&part.run)).collect();
        self.edit_manifest(|manifest| {
            manifest.runs.retain(|run| !gone.contains(run));
            manifest.runs.push(entry);
            manifest.runs.sort_by_key(|run| run.lo);
        })?;
        if self.shared.is_some() {
            self.take_over_edit()?;
            self.counters.merges.add(1);
            upkeep.left.extend(gone.into_iter().flat_map(file_names));
            self.remove_left(&mut upkeep)?;
            return Ok(true);
        }
        let mut core = self.core();
        let mut view = View::clone(core.view());
        view.parts.retain(|part| !is_input(part));
        let at = view
            .parts
            .partition_point(|part| part.run.header.lo > entry.lo);
        let part = Part {
            run,
            damaged: AtomicBool::new(false),
        };
        view.parts.insert(at, Arc::new(part));
        core.set_view(view);
        drop(core);
        self.counters.merges.add(1);
        upkeep.left.extend(gone.into_iter().flat_map(file_names));
        self.remove_left(&mut upkeep)?;
        Ok(true)
    }
}

pub(super) fn run_entry(run: &Run) -> RunEntry {
    let header = &run.header;
    RunEntry {
        lo: header.lo,
        hi: header.hi,
        generation: header.generation,
    }
}

pub(super) fn file_names(RunEntry { lo, hi, generation }: RunEntry) -> [FileName; 2] {
    [
        FileName::Run { lo, hi, generation },
        FileName::Filter { lo, hi, generation },
    ]
}

/// Chooses runs to merge, newest first; `None` if nothing is due.
fn choose(view: &View, segment_bytes: u32) -> Option<Vec<Arc<Part>>> {
    let dying = view.parts.iter().filter(|part| !part.is_damaged());
    let dying = dying.clone().find(|part| {
        let held = u64::from(part.run.header.segments_count);
        let live = live(view, part).count() as u64;
        live > 0 && held.saturating_sub(live) * 4 > held
    });
    if let Some(part) = dying {
        return Some(vec![Arc::clone(part)]);
    }
    let bytes = |part: &Arc<Part>| -> u64 { live(view, part).sum() };
    let weights: Vec<u64> = view.parts.iter().map(bytes).collect();
    let heaviest = (view.sealed.len() as u64 / 8).clamp(FAN_IN as u64, SPAN_MAX);
    let full = u64::from(segment_bytes);
    (2..=FAN_IN).rev().find_map(|count| {
        let firsts = 0..(view.parts.len() + 1).saturating_sub(count);
        firsts.rev().find_map(|first| {
            let usable = |count: usize| {
                let some = view.parts.get(first..first + count)?;
                is_usable(some).then_some(some)
            };
            let (chosen, older) = weights.get(first..)?.split_at_checked(count)?;
            let some = usable(count).filter(|_| fit(chosen, full, heaviest))?;
            let more = along(chosen, older, full, heaviest);
            Some(usable(count + more).unwrap_or(some).to_vec())
        })
    })
}

/// Says whether these may become one run: whole, and within the reach of its slots.
fn is_usable(parts: &[Arc<Part>]) -> bool {
    let headers = || parts.iter().map(|part| &part.run.header);
    let hi = headers().map(|header| header.hi).max().unwrap_or(0);
    let lo = headers().map(|header| header.lo).min().unwrap_or(0);
    hi - lo < SPAN_MAX && !parts.iter().any(|part| part.is_damaged())
}

/// Returns how many of the older neighbours come along with runs that are merged: small ones, which
/// no others of their weight follow, such as those of a store's first segments.
fn along(chosen: &[u64], older: &[u64], full: u64, heaviest: u64) -> usize {
    let total: u64 = chosen.iter().sum();
    if total <= full {
        return 0;
    }
    let mut sum = 0;
    let small = older.iter().take_while(|bytes| {
        sum += **bytes;
        sum * 4 <= total && (total + sum).div_ceil(full) <= heaviest
    });
    small.count()
}

/// Returns the bytes of each live segment of a run.
fn live<'a>(view: &'a View, part: &Part) -> impl Iterator<Item = u64> + 'a {
    let range = part.run.header.lo..=part.run.header.hi;
    let segments = view.sealed.range(range);
    segments.map(|(_, sealed)| u64::from(sealed.segment.bytes))
}

/// Says whether runs of so many bytes of log are to be merged.
fn fit(bytes: &[u64], full: u64, heaviest: u64) -> bool {
    let total: u64 = bytes.iter().sum();
    let largest = bytes.iter().max().copied().unwrap_or(0);
    // Each twice as large as the one before: the largest is a little over half of them all. With a
    // larger one it would be written again and again for a few small ones.
    if bytes.len() == FAN_IN && total <= full && largest * 5 <= total * 3 {
        return true;
    }
    let weights = || bytes.iter().map(|bytes| bytes.div_ceil(full).max(1));
    let (sum, least) = (weights().sum::<u64>(), weights().min().unwrap_or(1));
    let alike = largest <= 2 * bytes.iter().min().copied().unwrap_or(0);
    // Fewer than four only where four would be too many, and only of those that were merged once:
    // an entry is not to be written again each time that there is room for one more.
    let once = (FAN_IN as u64..2 * FAN_IN as u64).contains(&least);
    let enough = bytes.len() == FAN_IN || once && sum + least > heaviest;
    alike && enough && sum <= heaviest
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: u64 = 32 << 20;

    #[test]
    fn runs_of_about_the_same_weight_are_merged_up_to_an_eighth_of_all() {
        let fits = |weights: &[u64], heaviest| {
            let bytes: Vec<u64> = weights.iter().map(|weight| weight * FULL).collect();
            fit(&bytes, FULL, heaviest)
        };
        assert!(fits(&[1, 1, 1, 1], 4));
        assert!(!fits(&[1, 1, 1], 4));
        assert!(!fits(&[1, 1, 1, 4], 12));
        assert!(!fits(&[4, 4], 7));
        assert!(fits(&[4, 4], 8));
        assert!(!fits(&[4, 4], 12));
        assert!(fits(&[4, 4, 4], 12));
        assert!(!fits(&[4, 4, 4, 4], 12));
        assert!(fits(&[4, 4, 4, 4], 16));
        assert!(!fits(&[12, 4], 16));
        assert!(!fits(&[8, 8], 16));
        assert!(fits(&[8, 8, 8, 8], 32));
    }

    /// Story: at 100 M keys a search still asked two Bloom filters of the store's first segments.
    #[test]
    fn what_is_left_of_a_young_store_comes_along() {
        let left = [FULL / 4, FULL / 4];
        assert_eq!(along(&[FULL, FULL, FULL, FULL / 2], &left, FULL, 4), 2);
        assert_eq!(along(&[FULL; 4], &left, FULL, 4), 0, "too heavy");
        assert_eq!(along(&[FULL; 4], &left, FULL, 5), 2);
        assert_eq!(along(&[FULL; 4], &[FULL, FULL / 4], FULL, 5), 1);
        assert_eq!(along(&[FULL; 4], &[2 * FULL], FULL, 8), 0, "not small");
        assert_eq!(
            along(&[1 << 20; 4], &[64 << 10], FULL, 4),
            0,
            "young itself"
        );
    }

    #[test]
    fn the_small_segments_of_a_young_store_are_merged_at_once() {
        let small = [64 << 10, 128 << 10, 256 << 10, 512 << 10];
        assert!(fit(&small, FULL, 4));
        assert!(!fit(&small[..3], FULL, 4));
        assert!(fit(&[1 << 20; 4], FULL, 4));
        assert!(!fit(&[4 * FULL, 1 << 20, 1 << 20, 1 << 20], 8 * FULL, 4));
    }
}
