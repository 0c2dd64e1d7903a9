//! Expiry, TTL compaction, eviction, and rebuilding of damaged runs.
//!
//! A segment whose time has come is dropped whole: no byte of the log is rewritten but for
//! unsettled records that are still their key's newest; those are carried over first, and the
//! carried copies are durable before the segment leaves the manifest. One manifest edit covers all
//! segments dropped together; files are unlinked after it, and stay listed as dropped until the
//! directory was synced after that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, TryLockError};

use super::Engine;
use super::carry::Carry;
use super::catalog::remove_if_there;
use super::core::{Sealed, View};
use super::merge::{file_names, run_entry};
use super::prepare::{Upkeep, Why, no_blocks};
use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::RunEntry;
use crate::format::names::{FileName, GateName};
use crate::format::to_usize;
use crate::index::active::ActiveTable;
use crate::log::segment::SegmentFile;
use crate::log::sync::FailureCount;
use crate::model::retention::DropTime;
use crate::options::Event;
use crate::position::Position;

impl Engine {
    /// Does all background work that is due. One caller at a time.
    pub(crate) fn maintain(&self) -> Result<()> {
        self.deliver_events();
        if !self.options.background {
            self.run_timers();
        }
        let done = self.maintain_here();
        self.pay_waiters();
        self.deliver_events();
        done
    }

    /// Does all background work that is due, merges included, and returns when nothing is left.
    pub(crate) fn settle_down(&self) -> Result<()> {
        self.check_home()?;
        self.maintain()?;
        while self.merge_once()? {}
        Ok(())
    }

    fn maintain_here(&self) -> Result<()> {
        match self.try_maintenance()? {
            Some(mut held) => self.maintain_held(&mut held),
            // Another process is at it.
            None => Ok(()),
        }
    }

    fn maintain_held(&self, upkeep: &mut Upkeep) -> Result<()> {
        if !self.may_maintain(&self.core()) {
            return Ok(());
        }
        // One task that fails must not keep the others from freeing space.
        let prepared = match self.prepare_ahead(upkeep) {
            // At the bound nothing is prepared; new keys are told so when they come.
            Err(error) if error.kind() == ErrorKind::Full => Ok(()),
            prepared => prepared,
        };
        let results = [
            self.push_time(false),
            self.seal_frozen(),
            prepared,
            self.end_expired(upkeep),
            self.reserve_stamps(),
            self.sweep(upkeep),
            self.rebuild_damaged(upkeep),
            self.remove_left(upkeep),
            self.look_after_dead(),
        ];
        self.catalog().keep_reserve();
        self.write_hint_if_idle(upkeep);
        results.into_iter().find(Result::is_err).unwrap_or(Ok(()))
    }

    /// Ends the active segment early when everything in it has expired: a store that stands still
    /// frees its space too.
    fn end_expired(&self, upkeep: &mut Upkeep) -> Result<()> {
        let now = self.now();
        let (over, prepared) = {
            let core = self.core();
            let over = core.tally.records_count() > 0
                && core.tally.unsettled_count == 0
                && core.tally.drop_at.has_come(now.trusted_ms);
            let idle = upkeep.end_before == Some(core.writer.end());
            let ended = core.writer.segment.id;
            ((over && idle).then_some(ended), !core.next.is_empty())
        };
        let Some(ended) = over else {
            return Ok(());
        };
        if !prepared {
            self.prepare_next(upkeep, 0, Why::EndedEarly)?;
        }
        self.seal_frozen()?;
        self.core().allocate_for_end().map_err(no_blocks)?;
        self.roll(ended)?;
        self.seal_frozen()
    }

    /// Drops every sealed segment whose time has come, and compacts sparse ones.
    fn sweep(&self, upkeep: &mut Upkeep) -> Result<()> {
        let trusted_ms = self.now().trusted_ms;
        let (sealed, failures) = self.sealed_of_now();
        let mut gone = BTreeSet::new();
        let carried = self.carry_what_goes(upkeep, &sealed, trusted_ms, &mut gone);
        // What is copied in part keeps its own segment and later ones.
        let mut half = upkeep.half_carried.difference(&gone);
        if let Some(half) = half.next().copied() {
            gone.retain(|id| *id < half);
        }
        let dropped = if gone.is_empty() {
            Ok(())
        } else {
            self.drop_segments(upkeep, &gone, failures).map(|_| ())
        };
        carried.and(dropped)
    }

    /// Returns the sealed segments, and how many writes have failed so far. Not the view: it would
    /// hold the table of a segment that is sealed meanwhile.
    fn sealed_of_now(&self) -> (BTreeMap<u64, Arc<Sealed>>, usize) {
        let (view, failures) = {
            let core = self.core();
            (Arc::clone(core.view()), core.failures)
        };
        (view.sealed.clone(), failures)
    }

    /// Carries over what is still needed of the segments that are due, and says which may go.
    fn carry_what_goes(
        &self,
        upkeep: &mut Upkeep,
        sealed: &BTreeMap<u64, Arc<Sealed>>,
        trusted_ms: u64,
        gone: &mut BTreeSet<u64>,
    ) -> Result<()> {
        for (id, sealed) in sealed {
            if DropTime::from_disk(sealed.entry.drop_at_s).has_come(trusted_ms) {
                self.carry_over(upkeep, sealed, Carry::Unsettled)?;
                gone.insert(*id);
            }
        }
        // One sparse segment a sweep: compaction must not crowd out the foreground.
        let sparse = sealed.iter().find(|(id, sealed)| {
            !gone.contains(id) && DropTime::from_disk(sealed.entry.sparse_at_s).has_come(trusted_ms)
        });
        if let Some((id, sealed)) = sparse {
            self.carry_over(upkeep, sealed, Carry::Needed)?;
            gone.insert(*id);
        }
        Ok(())
    }

    /// Forgets the oldest segment early. `false`: there is none that could go.
    pub(crate) fn evict_oldest(&self, upkeep: &mut Upkeep) -> Result<bool> {
        let (all, failures) = self.sealed_of_now();
        let (Some((id, sealed)), Some(last)) = (all.first_key_value(), all.keys().next_back())
        else {
            return Ok(false);
        };
        let records = all.values().map(|s| to_usize(s.entry.records_count));
        let kept_max = records.sum::<usize>() / 2;
        let behind = ..Position::new(last + 1, 0).get();
        // Where most of the sealed log is kept anyway, eviction would only move it. No segment is
        // passed over for a later one: that one may hide what is in it.
        if self.turn()?.unsettled.range(behind).count() > kept_max {
            return Ok(false);
        }
        self.carry_over(upkeep, sealed, Carry::Unsettled)?;
        if !self.drop_segments(upkeep, &BTreeSet::from([*id]), failures)? {
            // It is still there: the caller asks again.
            return Ok(true);
        }
        let records_count = u64::from(sealed.entry.records_count);
        self.counters.evicted.add(records_count);
        self.tell(Event::Evicted { records_count });
        Ok(true)
    }

    /// Removes segments from the manifest, then from the view, then from the directory.
    /// `failed_before` is how many writes had failed before anything was carried over; `false`: one
    /// has failed since, and nothing was removed.
    fn drop_segments(
        &self,
        upkeep: &mut Upkeep,
        gone: &BTreeSet<u64>,
        failed_before: usize,
    ) -> Result<bool> {
        // Carried copies must be durable before the originals go.
        let (end, failures) = {
            let core = self.core();
            (core.writer.end(), FailureCount::new(core.failures))
        };
        if self.syncer.durable() < end {
            self.ensure_durable_held(end, failures)?;
        }
        {
            let core = self.core();
            self.check_writable(&core)?;
            if core.failures != failed_before {
                // What had superseded a record here, so that it was not carried over, may have been
                // taken back. The next sweep looks again.
                return Ok(false);
            }
        }
        let mut runs = Vec::new();
        if !upkeep.unlinked.is_empty() {
            // The unlinking of earlier drops must be durable before the manifest forgets them.
            self.dir
                .sync()
                .map_err(|e| Error::io("syncing the directory failed", e))?;
        }
        self.edit_manifest(|manifest| {
            manifest.dropped.retain(|id| !upkeep.unlinked.contains(id));
            manifest.segments.retain(|s| !gone.contains(&s.id));
            manifest.dropped.extend(gone.iter().copied());
            let live: BTreeSet<u64> = manifest.segments.iter().map(|s| s.id).collect();
            let dead = |lo: u64, hi: u64| live.range(lo..=hi).next().is_none();
            runs = manifest
                .runs
                .iter()
                .copied()
                .filter(|r| dead(r.lo, r.hi))
                .collect();
            manifest.runs.retain(|r| !dead(r.lo, r.hi));
        })?;
        upkeep.unlinked.clear();
        upkeep.half_carried.retain(|id| !gone.contains(id));
        {
            let mut core = self.core();
            let mut view = View::clone(core.view());
            let newest = gone
                .last()
                .and_then(|id| view.sealed.get(id))
                .map(Arc::clone);
            view.sealed.retain(|id, _| !gone.contains(id));
            view.parts.retain(|part| {
                let header = &part.run.header;
                !runs.iter().any(|r| r.lo == header.lo && r.hi == header.hi)
            });
            core.set_view(view);
            if upkeep.retired.is_none() && self.shared.is_none() {
                upkeep.retired = newest;
            }
        }
        self.counters.drops.add(gone.len() as u64);
        let kept = upkeep.retired.as_ref().map(|sealed| sealed.segment.id);
        let segments = gone.iter().filter(|id| Some(**id) != kept);
        upkeep
            .left
            .extend(segments.map(|id| FileName::Segment(*id)));
        upkeep.left.extend(runs.into_iter().flat_map(file_names));
        self.remove_left(upkeep).map(|()| true)
    }

    /// Writes a hint when nothing was appended since the time before.
    fn write_hint_if_idle(&self, upkeep: &mut Upkeep) {
        let end = self.core().writer.end();
        let is_idle = upkeep.end_before.replace(end) == Some(end);
        // In a shared store it would be of a log that others go on with.
        if is_idle && self.shared.is_none() {
            self.write_hint();
        }
    }

    /// Removes files that the manifest does not list any more; what fails is tried again later.
    pub(crate) fn remove_left(&self, upkeep: &mut Upkeep) -> Result<()> {
        let mut result = Ok(());
        for name in std::mem::take(&mut upkeep.left) {
            match remove_if_there(self.dir.as_ref(), &name.to_string()) {
                Ok(()) => {
                    if let FileName::Segment(id) = name {
                        upkeep.unlinked.insert(id);
                    }
                }
                Err(error) => {
                    upkeep.left.push(name);
                    let name = name.to_string();
                    result = Err(Error::io("removing a dropped file failed", error).in_file(name));
                }
            }
        }
        result
    }

    /// Rebuilds runs that have shown damage from their segments: one run a segment, so that a wide
    /// one needs no more memory than a narrow one. Merging goes on from there.
    ///
    /// Not beside a merge, which may be writing files of the same names: a run of which one
    /// segment is left is written anew under the name that a rebuild of that segment has. Whoever
    /// merges takes this lock first, so it is only tried here; the next sweep looks again.
    pub(crate) fn rebuild_damaged(&self, upkeep: &mut Upkeep) -> Result<()> {
        let view = Arc::clone(self.core().view());
        let mut damaged = view.parts.clone();
        damaged.retain(|part| part.is_damaged());
        if damaged.is_empty() {
            return Ok(());
        }
        let all = view.sealed.clone();
        drop(view);
        let _no_merge = match self.merging.try_lock() {
            Ok(alone) => alone,
            Err(TryLockError::Poisoned(broken)) => broken.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let _no_merge_elsewhere = match &self.shared {
            None => None,
            Some(shared) => match shared.try_gate(GateName::Merge, self.clock())? {
                None => return Ok(()),
                gate => gate,
            },
        };
        for part in &damaged {
            let old = run_entry(&part.run);
            let mut built = Vec::new();
            for (_, sealed) in all.range(old.lo..=old.hi) {
                super::runs::check_sealed(&sealed.segment, &sealed.entry)?;
                let (table, superseded) = self.table_of(&sealed.segment, sealed.entry.end)?;
                let generation = old.generation.wrapping_add(1);
                let (segment, times) = (&sealed.segment, Vec::new());
                built.push(self.write_run(segment, &table, superseded, generation, times)?);
            }
            built.reverse();
            let entries: Vec<RunEntry> = built.iter().map(run_entry).collect();
            self.edit_manifest(|manifest| {
                manifest.runs.retain(|run| *run != old);
                manifest.runs.extend(entries);
                manifest.runs.sort_by_key(|run| run.lo);
            })?;
            self.core().replace_part(part, built);
            upkeep.left.extend(file_names(old));
        }
        Ok(())
    }

    /// Makes the table of a sealed segment again, from the segment itself; and says how many of its
    /// records another one supersedes.
    fn table_of(&self, segment: &SegmentFile, end: u32) -> Result<(ActiveTable, u64)> {
        let map = segment
            .freeze()
            .map_err(|e| Error::io("mapping a segment failed", e).in_file(segment.name()))?;
        let bytes = map.get(..to_usize(end)).unwrap_or_default();
        let replayed = super::recovery::replay_segment(bytes, segment, &self.hash)?;
        if !replayed.sealed {
            return Err(Error::damaged(
                segment.name(),
                u64::from(replayed.end),
                "sealed segment is damaged; its index cannot be rebuilt; see docs/operations.md",
            ));
        }
        let superseded_count = u64::from(replayed.tally.superseded_count);
        Ok((replayed.table, superseded_count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;
    use crate::engine::claim::Commit;
    use crate::vfs::sim::{Fault, FaultKind, Op, PowerCut, SimDisk};
    use crate::{
        ClaimVerdict, DedupLog, Durability, KeyState, Namespace, NamespaceOptions, ObserveOptions,
        Options, Repeatable, ZeroFill,
    };
    use std::time::Duration;

    const RETENTION: Duration = Duration::from_secs(60);

    fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> (DedupLog, Namespace<Repeatable>) {
        open_with(disk, clock, Options::new())
    }

    fn open_with(
        disk: &SimDisk,
        clock: &Arc<ManualClock>,
        options: Options,
    ) -> (DedupLog, Namespace<Repeatable>) {
        let log = options
            .background(false)
            .segment_bytes(8192)
            .zero_fill(ZeroFill::Never)
            .clock(Arc::clone(clock) as _)
            .open_on(disk.dir())
            .unwrap();
        let options = NamespaceOptions::new().retention(RETENTION);
        let options = options.lease(RETENTION * 100).outcome_bytes_max(64);
        let jobs = log.namespace("jobs", options).unwrap();
        (log, jobs)
    }

    /// Story: while a wide run was written anew, it was found damaged, and the rebuild of its last
    /// segment wrote the files of that name, too.
    #[test]
    fn nothing_is_rebuilt_while_a_merge_may_write_the_same_names() {
        let (disk, clock) = (
            SimDisk::new(),
            Arc::new(ManualClock::new(1_700_000_000_000)),
        );
        let (log, _jobs) = open(&disk, &clock);
        fill(&log);
        let engine = &log.handle.engine;
        let damaged = || {
            let view = engine.core().view().clone();
            let damaged = view.parts.iter().filter(|part| part.is_damaged());
            damaged.count()
        };
        engine.core().view().parts[0].mark_damaged();
        let merging = engine.merging.lock().unwrap();
        engine.maintain().unwrap();
        assert_eq!(damaged(), 1);
        drop(merging);
        engine.maintain().unwrap();
        assert_eq!(damaged(), 0);
    }

    /// Seals a few segments of a filter.
    fn fill(log: &DedupLog) {
        fill_more(log, 0..80);
        log.maintain().unwrap();
    }

    /// Story: a record was damaged and could not be carried over. The segments before its own, in
    /// which nothing was needed any more, stayed with it; later ones went, and what a copy had
    /// become in them hid the record here no more.
    #[test]
    fn what_cannot_be_carried_over_keeps_its_own_segment_and_later_ones() {
        for is_claim in [true, false] {
            let clock = Arc::new(ManualClock::new(1_700_000_000_000));
            let disk = SimDisk::new();
            let (log, jobs) = open(&disk, &clock);
            fill(&log);
            let long = NamespaceOptions::new().retention(RETENTION * 100);
            let long = log.filter("long", long.outcome_bytes_max(0)).unwrap();
            let claim = is_claim.then(|| jobs.claim("damaged").unwrap());
            if !is_claim {
                for key in ["whole", "damaged"] {
                    assert!(long.observe(key).unwrap().is_new());
                }
            }
            let its_own = log.handle.engine.core().writer.segment.id;
            fill_more(&log, 100..180);
            if !is_claim {
                // This is what is damaged: the search for the older one ends here.
                assert!(long.forget("damaged").unwrap().is_applied());
                fill_more(&log, 200..280);
            }
            log.sync().unwrap();
            let disk = disk.after_kill();
            drop(claim);
            let place = |name: &String| {
                let bytes = disk.read_file(name).unwrap();
                bytes.windows(7).position(|some| some == b"damaged")
            };
            let damaged = disk.file_names().into_iter().filter(|n| place(n).is_some());
            let name = damaged.max().unwrap();
            let mut bytes = disk.read_file(&name).unwrap();
            bytes[place(&name).unwrap()] ^= 1;
            disk.write_file(&name, bytes);
            let (log, _jobs) = open(&disk, &clock);
            let sealed = || log.handle.engine.sealed_of_now().0;
            let all: Vec<u64> = sealed().into_keys().collect();
            let (earlier, rest) = all.split_at(all.binary_search(&its_own).unwrap());
            assert!(!earlier.is_empty() && rest.len() > 1);
            clock.advance_ms(2 * 60_000);
            for _ in 0..2 {
                let error = log.maintain().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
                assert_eq!(log.stats().drops_count, earlier.len() as u64);
                let left: Vec<u64> = sealed().into_keys().collect();
                assert!(left.starts_with(rest), "{left:?} {rest:?}");
            }
        }
    }

    fn fill_more(log: &DedupLog, keys: std::ops::Range<u32>) {
        let options = NamespaceOptions::new().retention(RETENTION);
        let filter = log.filter("f", options.outcome_bytes_max(0)).unwrap();
        let buffered = ObserveOptions::new().durability(Durability::Buffered);
        for n in keys {
            let key = format!("{n:0>200}");
            assert!(filter.observe_with(key, &buffered).unwrap().is_new());
        }
    }

    /// Whoever could not follow starts again from the runs, and forgets what is unsettled for a
    /// moment: nothing is listed to be carried over in that.
    #[test]
    fn what_is_carried_over_is_listed_behind_a_restart() {
        let (disk, clock) = (
            SimDisk::new(),
            Arc::new(ManualClock::new(1_700_000_000_000)),
        );
        let (log, jobs) = open_with(&disk, &clock, Options::new().shared(true));
        let claim = jobs.claim("k").unwrap();
        assert!(matches!(claim, ClaimVerdict::New(_)));
        fill(&log);
        let engine = &log.handle.engine;
        let mut upkeep = engine.maintenance().unwrap();
        let view = engine.core().view().clone();
        let (_, sealed) = view.sealed.first_key_value().unwrap();
        {
            let mut core = engine.core();
            core.is_behind = true;
            core.unsettled.clear();
            core.owed_bytes = 0;
        }
        engine
            .carry_over(&mut upkeep, sealed, Carry::Unsettled)
            .unwrap();
        assert_eq!(engine.counters.carried.get(), 1);
        drop(upkeep);
        assert!(matches!(jobs.get("k").unwrap(), KeyState::Pending { .. }));
    }

    /// Story: a claim lay in a segment that was due, and its commit was appended, so it was not
    /// carried over. Then the write of the commit failed and was taken back: the claim was its
    /// key's newest record again, and went with its segment.
    #[test]
    fn a_segment_stays_when_a_write_fails_between_carrying_over_and_dropping() {
        let (disk, clock) = (
            SimDisk::new(),
            Arc::new(ManualClock::new(1_700_000_000_000)),
        );
        let (log, jobs) = open(&disk, &clock);
        let ClaimVerdict::New(claim) = jobs.claim("k").unwrap() else {
            panic!("it is new")
        };
        fill(&log);
        log.sync().unwrap();
        clock.advance_ms(2 * 60_000);

        let engine = &log.handle.engine;
        let commit = Commit::new("done");
        jobs.commit_undurable(&claim.0.key, claim.0.epoch, &commit)
            .unwrap();
        // What a sweep does, step by step.
        let mut upkeep = engine.maintenance().unwrap();
        let (view, failures) = {
            let core = engine.core();
            (core.view().clone(), core.failures)
        };
        let (id, sealed) = view.sealed.first_key_value().unwrap();
        let carried = || engine.counters.carried.get();
        engine
            .carry_over(&mut upkeep, sealed, Carry::Unsettled)
            .unwrap();
        assert_eq!(carried(), 0, "its commit has superseded it");
        disk.fail(Fault::once(disk.steps(), FaultKind::NoSpace).only(Op::Write));
        assert!(engine.sync_all().is_err());
        let gone = BTreeSet::from([*id]);
        let dropped = engine.drop_segments(&mut upkeep, &gone, failures).unwrap();
        assert!(!dropped, "the claim would be lost");
        drop(upkeep);
        let state = jobs.get("k").unwrap();
        assert!(matches!(state, KeyState::Pending { .. }), "{state:?}");

        // The next sweep looks again, and carries it over.
        log.maintain().unwrap();
        assert!(log.stats().drops_count > 0);
        assert_eq!(carried(), 1);
        let (_log, jobs) = open(&disk.after_power_cut(&mut PowerCut::drop_all()), &clock);
        let state = jobs.get("k").unwrap();
        assert!(matches!(state, KeyState::Pending { .. }), "{state:?}");
    }
}
