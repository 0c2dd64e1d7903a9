//! Index runs at open: which are there and whole, which are built again from their segments.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use super::core::{Part, Sealed, View};
use super::install::install_table;
use super::merge::run_entry;
use super::recovery::replay_segment;
use crate::error::{Error, Result};
use crate::format::filter::FilterKind;
use crate::format::manifest::{Manifest, RunEntry, SealedEntry};
use crate::format::names::FileName;
use crate::format::to_usize;
use crate::index::KeyHash;
use crate::index::build::RunPlan;
use crate::index::run::Run;
use crate::log::segment::SegmentFile;
use crate::options::Options;
use crate::stats::OpenReport;
use crate::vfs::{Access, Dir};

/// A sealed segment, and whether a run that is there and whole covers it.
pub(super) struct SealedSegment {
    pub(super) sealed: Arc<Sealed>,
    pub(super) covered: bool,
    /// Generation of the run that is built if there is none.
    generation: u32,
}

/// Opens all sealed segments and their runs. A segment without a whole run is read once: what
/// its index is to be built from must be what was sealed.
pub(super) fn open_sealed(
    dir: &dyn Dir,
    manifest: &Manifest,
    opened: &BTreeMap<u64, Arc<SegmentFile>>,
    runs: &[Run],
) -> Result<Vec<SealedSegment>> {
    let mut all = Vec::new();
    for entry in &manifest.segments {
        let (Some(sealed), Some(segment)) = (entry.sealed, opened.get(&entry.id)) else {
            continue;
        };
        let segment = segment
            .sealed(dir)
            .map_err(|e| Error::io("mapping a segment failed", e).in_file(segment.name()))?;
        let covers = |lo: u64, hi: u64| (lo..=hi).contains(&entry.id);
        let covered = runs.iter().any(|r| covers(r.header.lo, r.header.hi));
        if !covered {
            check_sealed(&segment, &sealed)?;
        }
        let listed = manifest.runs.iter().find(|r| covers(r.lo, r.hi));
        all.push(SealedSegment {
            sealed: Arc::new(Sealed {
                segment: Arc::new(segment),
                entry: sealed,
                former: Weak::new(),
            }),
            covered,
            generation: listed.map_or(0, |r| r.generation.wrapping_add(1)),
        });
    }
    Ok(all)
}

/// Compares a sealed segment with the checksum taken when it was sealed.
pub(super) fn check_sealed(segment: &SegmentFile, sealed: &SealedEntry) -> Result<()> {
    let map = segment
        .freeze()
        .map_err(|e| Error::io("mapping a segment failed", e).in_file(segment.name()))?;
    let bytes = map.get(..to_usize(sealed.end)).unwrap_or_default();
    if crc32fast::hash(bytes) == sealed.crc {
        return Ok(());
    }
    Err(Error::damaged(
        segment.name(),
        0,
        "sealed segment is damaged and so is its index; nothing was changed; see \
         docs/operations.md",
    ))
}

/// Makes the view of all sealed segments; for those that no whole run covers one is built.
pub(super) fn install_sealed(
    dir: &dyn Dir,
    manifest: &Manifest,
    all: Vec<SealedSegment>,
    mut runs: Vec<Run>,
    hash: &KeyHash,
    options: &Options,
    report: &mut OpenReport,
) -> Result<(View, Vec<RunEntry>)> {
    let mut view = View::default();
    let bytes = |s: &SealedSegment| u64::from(s.sealed.segment.bytes);
    let total: u64 = all.iter().filter(|s| !s.covered).map(bytes).sum();
    let mut done = 0;
    for segment in all {
        if !segment.covered {
            if let Some(progress) = &options.on_progress {
                progress(done, total);
            }
            let (file, end) = (&segment.sealed.segment, segment.sealed.entry.end);
            runs.push(rebuild_run(
                dir,
                manifest,
                file,
                end,
                segment.generation,
                hash,
            )?);
            report.rebuilt_runs_count += 1;
            done += bytes(&segment);
        }
        view.sealed
            .insert(segment.sealed.segment.id, segment.sealed);
    }
    runs.sort_by_key(|run| std::cmp::Reverse(run.header.lo));
    let mut entries: Vec<RunEntry> = runs.iter().map(run_entry).collect();
    entries.reverse();
    view.parts = runs
        .into_iter()
        .map(|run| {
            Arc::new(Part {
                run,
                damaged: AtomicBool::new(false),
            })
        })
        .collect();
    Ok((view, entries))
}

/// Opens a listed run; `None` if it is missing, damaged, or about something else.
pub(super) fn open_run(
    dir: &dyn Dir,
    manifest: &Manifest,
    entry: &RunEntry,
    hash: &KeyHash,
) -> Option<Run> {
    let RunEntry { lo, hi, generation } = *entry;
    let open = |name: FileName| {
        dir.open(&name.to_string(), Access::Read)
            .and_then(|f| f.map())
    };
    let run = open(FileName::Run { lo, hi, generation }).ok()?;
    let filter = open(FileName::Filter { lo, hi, generation }).ok()?;
    let run = Run::open(run, filter).ok()?;
    let h = &run.header;
    let same = h.store == manifest.store
        && h.hash_key_id == hash.id()
        && (h.lo, h.hi, h.generation) == (lo, hi, generation);
    same.then_some(run)
}

pub(super) fn rebuild_run(
    dir: &dyn Dir,
    manifest: &Manifest,
    segment: &SegmentFile,
    end: u32,
    generation: u32,
    hash: &KeyHash,
) -> Result<Run> {
    let map = segment
        .freeze()
        .map_err(|e| Error::io("mapping a segment failed", e).in_file(segment.name()))?;
    let bytes = map.get(..to_usize(end)).unwrap_or_default();
    let replayed = replay_segment(bytes, segment, hash)?;
    if !replayed.sealed || replayed.end != end {
        return Err(Error::damaged(
            segment.name(),
            u64::from(replayed.end),
            "sealed segment is damaged and its index is missing; nothing was answered from it; \
             see docs/operations.md",
        ));
    }
    let plan = RunPlan {
        store: manifest.store,
        hash_key_id: hash.id(),
        lo: segment.id,
        hi: segment.id,
        generation,
        segment_bytes: segment.bytes,
        superseded_count: u64::from(replayed.tally.superseded_count),
        segments_count: 1,
        // Nobody has said yet how keys tell their time.
        times: Vec::new(),
        filter: FilterKind::Bloom,
    };
    install_table(dir, &plan, &replayed.table)
}
