//! Making room: rolling to the next segment, sealing full ones.
//!
//! Order of steps (each is a crash point; `tests/crash.rs` stops at every one):
//! - roll: footer into the active segment, written; the table freezes; the next segment is active.
//! - seal: flush the segment, install run and filter (`install.rs`), manifest edit, switch the
//!   view; the table goes with the view before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Engine;
use super::core::{Frozen, Part, Sealed, View, is_mostly_kept};
use super::install::install_table;
use super::prepare::{Upkeep, Why};
use super::room::Room;
use super::turn::Turn;
use crate::error::{Error, ErrorKind, Result};
use crate::format::filter::FilterKind;
use crate::format::manifest::{RunEntry, SealedEntry};
use crate::format::record::{FRAME_BYTES_MAX, Record, SEAL_BYTES, SYNC_MARK_BYTES};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::times::Coverage;
use crate::format::{to_u32, to_usize};
use crate::index::active::ActiveTable;
use crate::index::build::RunPlan;
use crate::index::run::Run;
use crate::key_time::KeyTime;
use crate::log::replay::{Item, Replay};
use crate::log::segment::SegmentFile;
use crate::log::sync::FailureCount;
use crate::model::retention::{Needs, keeps_segment_until};
use crate::position::Position;
use crate::stamp::GENERATIONS_RESERVED;

/// Bytes of a segment that no record can use: header, the shortest footer, a last sync mark.
const OVERHEAD_BYTES: usize = SEGMENT_HEADER_BYTES + SEAL_BYTES + SYNC_MARK_BYTES + 64;

/// How many segments are prepared for one record at the most before its caller is refused.
const ROUNDS_MAX: usize = 64;

impl Engine {
    /// Makes sure that a record fits.
    pub(crate) fn make_room(&self, room: Room) -> Result<()> {
        self.check_frame(room.frame_bytes)?;
        let made = self.find_room(room);
        // An eviction flushes, and those whom that has served are rung behind the lock.
        self.pay_waiters();
        made
    }

    fn find_room(&self, room: Room) -> Result<()> {
        if self.allocate_for(room)? || self.roll_at_once(room)? {
            return Ok(());
        }
        self.wait_for_room(room)
    }

    fn wait_for_room(&self, room: Room) -> Result<()> {
        self.counters.stalls.add(1);
        match self.maintenance_unless_room(room)? {
            Some(mut held) => self.make_room_held(&mut held, room),
            // The caller looks again.
            None => Ok(()),
        }
    }

    /// Says whether room is for a new key where the log has a bound: it waits for the upkeep, for
    /// what is prepared meanwhile is for what is carried over.
    pub(super) fn is_at_bound(&self, room: Room) -> bool {
        self.options.log_bytes_max.is_some() && room.need.is_new()
    }

    /// Goes on in the next segment without the upkeep, which may be in the middle of something
    /// long, if one is prepared and the tables that wait for their seals are no more than that of
    /// one full segment. `false`: it is not as easy as that.
    pub(super) fn roll_at_once(&self, room: Room) -> Result<bool> {
        if self.shared.is_some() || self.is_at_bound(room) {
            return Ok(false);
        }
        let core = self.turn()?;
        self.check_writable(&core)?;
        if core.stamps.runs_low() {
            return Ok(false);
        }
        if core.has_room(room) {
            // Another thread has made it.
            return Ok(true);
        }
        let frozen = core.view().frozen.iter();
        let waiting: u64 = frozen.map(|frozen| u64::from(frozen.segment.bytes)).sum();
        let tables = waiting + u64::from(core.writer.segment.bytes);
        let may_wait = waiting == 0 || tables <= u64::from(self.options.segment_bytes);
        let fits = core.fits(room.frame_bytes, room.records_count);
        if fits || !core.admits(room) || core.next.is_empty() || !may_wait {
            return Ok(false);
        }
        self.roll_here(core).map(|()| true)
    }

    /// Refuses a record that no segment could hold, and every record where none may be written.
    pub(crate) fn check_frame(&self, frame_bytes: usize) -> Result<()> {
        self.check_whole()?;
        let segment_bytes = to_usize(self.options.segment_bytes);
        if frame_bytes > FRAME_BYTES_MAX || frame_bytes + OVERHEAD_BYTES > segment_bytes {
            return Err(Error::invalid(format!(
                "record is too large: bytes={frame_bytes} bytes_max={FRAME_BYTES_MAX} \
                 segment_bytes={segment_bytes}; shorten key or outcome, or raise segment_bytes"
            )));
        }
        Ok(())
    }

    /// The same for a caller that holds the maintenance lock.
    pub(crate) fn make_room_held(&self, upkeep: &mut Upkeep, room: Room) -> Result<()> {
        self.reserve_stamps()?;
        for _ in 0..ROUNDS_MAX {
            if self.allocate_for(room)? {
                return Ok(());
            }
            let (fits, admits, prepared, active) = {
                let core = self.turn()?;
                self.check_writable(&core)?;
                (
                    core.fits(room.frame_bytes, room.records_count),
                    core.admits(room),
                    core.next.len(),
                    core.writer.segment.id,
                )
            };
            if fits && admits {
                // Another thread has made it.
                return Ok(());
            }
            if (!admits && !room.uses_its_own()) || prepared == 0 {
                let why = if room.need.is_new() {
                    Why::NewKeys
                } else {
                    Why::Owed
                };
                self.prepare_next(upkeep, room.frame_bytes, why)?;
                // What is owed gets its blocks there before this segment ends.
                continue;
            }
            if !fits {
                match self.seal_frozen() {
                    // What is owed needs no new space: the log goes on, and the full segment's
                    // table stays in memory until its index finds room.
                    Err(error) if error.kind() == ErrorKind::Full && !room.need.is_new() => {}
                    sealed => sealed?,
                }
                self.roll(active)?;
            }
        }
        Err(Error::new(
            ErrorKind::Full,
            "open claims may still write more than can be kept free for them; commit or fail some, \
             or lower outcome_bytes_max",
        ))
    }

    /// Reserves stamps ahead, so that none leaves before its generation is durable.
    pub(crate) fn reserve_stamps(&self) -> Result<()> {
        let reserved = {
            let core = self.core();
            if !core.stamps.runs_low() {
                return Ok(());
            }
            core.stamps.reserved() + GENERATIONS_RESERVED
        };
        self.edit_manifest(|manifest| {
            manifest.generation_reserved = manifest.generation_reserved.max(reserved);
        })?;
        self.core().stamps.extend(reserved);
        Ok(())
    }

    /// Ends the active segment and continues in the prepared one, if it is still this one that is
    /// active: who needs room rolls without the upkeep.
    pub(crate) fn roll(&self, active: u64) -> Result<()> {
        let core = self.turn()?;
        self.check_writable(&core)?;
        if core.writer.segment.id == active {
            self.roll_here(core)
        } else {
            Ok(())
        }
    }

    fn roll_here(&self, mut core: Turn<'_>) -> Result<()> {
        let now = self.now();
        let Some(next) = core.next.front().map(Arc::clone) else {
            return Ok(());
        };
        core.append_footer(now.trusted_ms);
        self.write_out(&mut core)?;
        core.next.pop_front();
        let frozen = core.switch(next, now.trusted_ms);
        drop(core);
        // Without a map the segment is read by calls until it is sealed.
        frozen.segment.freeze().map(|_| ()).unwrap_or_default();
        self.background.wake();
        Ok(())
    }

    /// Seals all frozen segments, oldest first.
    pub(crate) fn seal_frozen(&self) -> Result<()> {
        loop {
            let Some(frozen) = self.core().view().frozen.first().map(Arc::clone) else {
                return Ok(());
            };
            self.seal_one(&frozen)?;
        }
    }

    /// Seals the oldest frozen segment.
    fn seal_one(&self, frozen: &Arc<Frozen>) -> Result<()> {
        let id = frozen.segment.id;
        if self.shared.is_some() {
            // Together with the others' flushes, which look after one that has died in it.
            let failures = FailureCount::new(self.core().failures);
            self.ensure_durable_held(Position::new(id, frozen.end), failures)?;
        } else {
            self.sync_frozen(frozen)?;
        }
        let (entry, times) = check_frozen(frozen, &self.key_times())?;
        if frozen.table.count() as u64 != expected_entries(frozen) {
            return Err(Error::damaged(
                frozen.segment.name(),
                0,
                "table and segment disagree on the number of keys; open the store again",
            ));
        }
        let superseded_count = u64::from(frozen.tally.superseded_count);
        let run = self.write_run(&frozen.segment, &frozen.table, superseded_count, 0, times)?;
        let segment = Arc::new(frozen.segment.sealed(self.dir.as_ref()).map_err(|e| {
            Error::io("mapping a sealed segment failed", e).in_file(frozen.segment.name())
        })?);
        self.edit_manifest(|manifest| {
            if let Some(segment) = manifest.segments.iter_mut().find(|s| s.id == id) {
                segment.sealed = Some(entry);
            }
            let run = RunEntry {
                lo: id,
                hi: id,
                generation: 0,
            };
            if !manifest.runs.contains(&run) {
                manifest.runs.push(run);
            }
        })?;
        self.counters.seals.add(1);
        self.remove_hint(id);
        if self.shared.is_some() {
            return self.take_over_edit();
        }
        let part = Arc::new(Part {
            run,
            damaged: AtomicBool::new(false),
        });
        let former = Arc::downgrade(&frozen.segment);
        let sealed = Arc::new(Sealed {
            segment,
            entry,
            former,
        });
        let mut core = self.core();
        let mut view = View::clone(core.view());
        view.frozen.remove(0);
        view.parts.insert(0, part);
        view.sealed.insert(id, sealed);
        core.set_view(view);
        Ok(())
    }

    /// Returns the namespaces whose keys tell when they were made.
    fn key_times(&self) -> Vec<(u16, KeyTime)> {
        let core = self.core();
        let known = core.namespaces.iter();
        known
            .filter_map(|(id, n)| Some((*id, n.key_time?)))
            .collect()
    }

    /// Writes run and filter of one segment and opens them.
    pub(crate) fn write_run(
        &self,
        segment: &SegmentFile,
        table: &ActiveTable,
        superseded_count: u64,
        generation: u32,
        times: Vec<Coverage>,
    ) -> Result<Run> {
        let plan = RunPlan {
            store: self.store,
            hash_key_id: self.hash.id(),
            lo: segment.id,
            hi: segment.id,
            generation,
            segment_bytes: segment.bytes,
            superseded_count,
            segments_count: 1,
            times,
            filter: FilterKind::Bloom,
        };
        install_table(self.dir.as_ref(), &plan, table)
    }
}

fn expected_entries(frozen: &Frozen) -> u64 {
    u64::from(frozen.tally.records_count()) - u64::from(frozen.tally.superseded_count)
}

/// Reads a frozen segment once more, whole, and says what the manifest keeps of it, and which times
/// its keys are of.
fn check_frozen(
    frozen: &Frozen,
    key_times: &[(u16, KeyTime)],
) -> Result<(SealedEntry, Vec<Coverage>)> {
    let segment = &frozen.segment;
    let io = |e| Error::io("mapping a full segment failed", e).in_file(segment.name());
    let bytes = segment.freeze().map_err(io)?;
    let bytes = bytes.get(..to_usize(frozen.end)).unwrap_or_default();
    let mut needs = Needs::default();
    let mut replay = Replay::new(bytes, segment.nonce);
    let mut records_count = 0;
    let mut times = Times::new(key_times);
    for item in replay.by_ref() {
        if let Item::Record(_, record) = item {
            records_count += 1;
            times.add(&record);
            needs.add(keeps_segment_until(&record), to_u32(record.frame_bytes()));
        }
    }
    if !replay.is_sealed() || records_count != frozen.tally.records_count() {
        return Err(Error::damaged(
            segment.name(),
            u64::from(replay.end()),
            "full segment does not read back as it was written; open the store again",
        ));
    }
    let is_held = is_mostly_kept(frozen.tally.unsettled_count, records_count);
    let sparse = if is_held {
        frozen.tally.drop_at
    } else {
        needs.sparse_at().min(frozen.tally.drop_at)
    };
    let entry = SealedEntry {
        end: frozen.end,
        records_count,
        unsettled_count: to_u32(frozen.tally.unsettled_count),
        drop_at_s: frozen.tally.drop_at.to_disk(),
        began_at_s: frozen.began_at_s,
        sparse_at_s: sparse.to_disk(),
        crc: crc32fast::hash(bytes),
    };
    Ok((entry, times.coverage))
}

/// Gathers the times of the keys of a segment, for the namespaces whose keys tell it.
struct Times<'a> {
    key_times: &'a [(u16, KeyTime)],
    coverage: Vec<Coverage>,
}

impl<'a> Times<'a> {
    fn new(key_times: &'a [(u16, KeyTime)]) -> Self {
        let coverage = |(id, time): &(u16, KeyTime)| Coverage::new(*id, time.function());
        Times {
            key_times,
            coverage: key_times.iter().map(coverage).collect(),
        }
    }

    fn add(&mut self, record: &Record<'_>) {
        for ((id, time), coverage) in self.key_times.iter().zip(&mut self.coverage) {
            if *id == record.namespace
                && let Some(found) = time.bucket(record.key)
            {
                coverage.insert(found.bucket);
            }
        }
    }
}

impl Part {
    /// Says that the run has shown damage: it is built again in the background.
    pub(crate) fn mark_damaged(&self) {
        self.damaged.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_damaged(&self) -> bool {
        // Relaxed: whoever set it has also woken the background.
        self.damaged.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::room::Need;
    use super::*;
    use crate::index::active::counted;
    use crate::vfs::sim::SimDisk;
    use crate::{
        ClaimOptions, CommitVerdict, DedupLog, Durability, Filter, NamespaceOptions, Options,
        Repeatable, ZeroFill,
    };

    const KEYS: u32 = 300;

    fn open(disk: &SimDisk) -> (DedupLog, Filter) {
        let options = Options::new()
            .shared(true)
            .segment_bytes(8192)
            .background(false)
            .turn_timeout(Duration::from_secs(5));
        let log = options.open_on(disk.process().dir()).unwrap();
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        let filter = log.filter("f", options).unwrap();
        (log, filter)
    }

    /// Who waits for room needs no upkeep of its own if another process makes it: here one that
    /// never lets go of the upkeep.
    #[test]
    fn room_that_another_process_makes_is_room() {
        let disk = SimDisk::new();
        let ((a, _), (_b, filter)) = (open(&disk), open(&disk));
        let engine = &a.handle.engine;
        let mut held = engine.maintenance().unwrap();
        let room = Room::of_one(256, Need::New { owed_bytes: 0 });
        std::thread::scope(|scope| {
            let keys = scope.spawn(|| {
                for n in 0..KEYS {
                    let observed = filter.observe(format!("{n:->180}"));
                    assert!(observed.unwrap().is_new(), "{n}");
                }
            });
            while !keys.is_finished() {
                engine.make_room_held(&mut held, room).unwrap();
                std::thread::yield_now();
            }
            keys.join().unwrap();
        });
        drop(held);
        assert!(a.stats().segments_count > 5, "{:?}", a.stats());
    }

    fn open_alone(options: Options) -> (DedupLog, Filter) {
        let options = options.segment_bytes(8192).background(false);
        let options = options.durability(Durability::Buffered);
        let log = options.open_on(SimDisk::memory().dir()).unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        (log, filter)
    }

    /// Observes keys in another thread while the upkeep is held; says how many came to an end
    /// before one had to wait for it.
    fn observed_beside_upkeep(log: &DedupLog, filter: &Filter) -> u32 {
        let engine = &log.handle.engine;
        let held = engine.maintenance().unwrap();
        let stalls = log.stats().stalls_count;
        std::thread::scope(|scope| {
            let keys = scope.spawn(|| {
                for n in 0..KEYS {
                    if log.stats().stalls_count > stalls {
                        return n;
                    }
                    let observed = filter.observe(format!("{n:->180}"));
                    assert!(observed.unwrap().is_new(), "{n}");
                }
                KEYS
            });
            while log.stats().stalls_count == stalls && !keys.is_finished() {
                std::thread::yield_now();
            }
            drop(held);
            keys.join().unwrap()
        })
    }

    /// Story: a compaction of a second held the upkeep, and everybody stood still until its end
    /// although the next segment had been there for long.
    #[test]
    fn who_has_a_next_segment_does_not_wait_for_the_upkeep() {
        let (log, filter) = open_alone(Options::new());
        assert!(filter.observe("first").unwrap().is_new());
        // Of 8 KiB each; about 40 keys in one.
        for n in 0..100 {
            assert!(filter.observe(format!("{n:->200}")).unwrap().is_new());
        }
        log.maintain().unwrap();
        let first = log.handle.engine.core().writer.segment.id;
        let count = observed_beside_upkeep(&log, &filter);
        let last = log.handle.engine.core().writer.segment.id;
        assert!((40..KEYS).contains(&count), "{count}");
        assert!(last > first);
        for n in 0..count {
            assert!(!filter.observe(format!("{n:->180}")).unwrap().is_new());
        }
    }

    /// Story: who had begun to wait for the upkeep waited for the end of a compaction, although
    /// that had prepared the next segment meanwhile.
    #[test]
    fn who_waits_for_the_upkeep_goes_on_when_a_segment_is_prepared() {
        let (log, filter) = open_alone(Options::new());
        let engine = &log.handle.engine;
        let mut held = engine.maintenance().unwrap();
        let first = engine.core().writer.segment.id;
        std::thread::scope(|scope| {
            let keys = scope.spawn(|| {
                for n in 0..60 {
                    assert!(filter.observe(format!("{n:->180}")).unwrap().is_new());
                }
            });
            while !keys.is_finished() {
                engine.prepare_ahead(&mut held).unwrap();
                // The table of a full segment waits here until it is sealed.
                engine.seal_frozen().unwrap();
                std::thread::yield_now();
            }
            keys.join().unwrap();
        });
        drop(held);
        assert!(engine.core().writer.segment.id > first);
    }

    /// However many segments are prepared, no more tables wait for their seals than one of a full
    /// segment takes.
    #[test]
    fn no_roll_leaves_a_second_full_table_waiting() {
        let (log, filter) = open_alone(Options::new());
        let engine = &log.handle.engine;
        for n in 0..100 {
            assert!(filter.observe(format!("{n:->200}")).unwrap().is_new());
        }
        let mut held = engine.maintenance().unwrap();
        for _ in 0..2 {
            engine.prepare_next(&mut held, 0, Why::Owed).unwrap();
        }
        engine.seal_frozen().unwrap();
        let room = Room::of_one(8000, Need::New { owed_bytes: 0 });
        assert!(!engine.allocate_for(room).unwrap());
        assert!(engine.roll_at_once(room).unwrap());
        assert!(filter.observe("one").unwrap().is_new());
        assert!(!engine.core().fits(8000, 1) && !engine.core().next.is_empty());
        assert!(!engine.allocate_for(room).unwrap());
        assert!(!engine.roll_at_once(room).unwrap(), "its table waits");
        engine.seal_frozen().unwrap();
        assert!(engine.roll_at_once(room).unwrap());
    }

    /// At a bound new keys wait for the upkeep: what it has prepared is for what it carries over.
    #[test]
    fn at_a_bound_new_keys_wait_for_the_upkeep() {
        let (log, filter) = open_alone(Options::new().log_bytes_max(1 << 20));
        for n in 0..100 {
            assert!(filter.observe(format!("{n:->200}")).unwrap().is_new());
        }
        log.maintain().unwrap();
        let first = log.handle.engine.core().writer.segment.id;
        assert!(log.handle.engine.core().next.front().is_some());
        let held = log.handle.engine.maintenance().unwrap();
        let room = Room::of_one(8000, Need::New { owed_bytes: 0 });
        assert!(!log.handle.engine.roll_at_once(room).unwrap());
        let owed = Room::of_one(8000, Need::Any);
        assert!(log.handle.engine.roll_at_once(owed).unwrap());
        assert!(log.handle.engine.core().writer.segment.id > first);
        drop(held);
    }

    /// Story: whoever found its segment full still held the view with the table before it, which
    /// was sealed now, while the next one was made.
    #[test]
    fn there_are_two_tables_at_most_whoever_fills_segments() {
        let options = Options::new().segment_bytes(8192).background(false);
        let options = options.zero_fill(ZeroFill::Never);
        let log = options.durability(Durability::Buffered);
        let log = log.open_on(SimDisk::memory().dir()).unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        let small = NamespaceOptions::new().outcome_bytes_max(0);
        let jobs = log.namespace::<Repeatable>("j", small).unwrap();
        let seals = || log.stats().seals_count;
        let keys =
            |first: u64| -> Vec<[u8; 8]> { (first..).take(2000).map(u64::to_le_bytes).collect() };
        counted::take_most();
        let mut most = Vec::new();
        let mut check = |what: &'static str, fill: &dyn Fn()| {
            let before = seals();
            fill();
            assert!(seals() > before + 2, "{what}");
            most.push((what, counted::take_most()));
        };
        check("one", &|| {
            for key in keys(0) {
                assert!(filter.observe(key).unwrap().is_new());
            }
        });
        check("many", &|| {
            filter.observe_many(&keys(10_000)).unwrap();
        });
        check("forget", &|| {
            for key in keys(0) {
                assert!(filter.forget(key).unwrap().is_applied());
            }
        });
        check("claims", &|| {
            let options = ClaimOptions::new();
            for some in keys(0).chunks(50) {
                for claim in jobs.claim_many(some, &options).unwrap() {
                    let mut claim = claim.unwrap().claim().unwrap();
                    let committed = claim.commit(b"").unwrap();
                    assert!(matches!(committed, CommitVerdict::Committed { .. }));
                }
            }
        });
        let two = ["one", "many", "forget", "claims"].map(|what| (what, 2));
        assert_eq!(most, two);
    }
}
