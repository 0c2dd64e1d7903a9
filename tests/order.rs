//! Flushes that keep an order: what one of them left out would cost.
//!
//! `cargo xtask rel syncs` leaves out every call that makes something durable, one at a time; the
//! tests here notice those that no wrong answer shows, but a slow open or a refused call.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use idemlog::testing::sim::{
    CrashOptions, Fault, FaultKind, Op, PowerCut, SimDisk, for_each_crash_point,
};
use idemlog::testing::{Access, Dir, File, LockAttempt, ManualClock, Map};
use idemlog::{
    Applied, ClaimOptions, ClaimVerdict, DedupLog, Durability, ErrorKind, Filter, KeyState,
    NamespaceOptions, ObserveOptions, Observed, Options, Probeable, Probed, Repeatable, Retention,
    WhenFull, ZeroFill,
};

fn options() -> Options {
    Options::new()
        .segment_bytes(4096)
        .background(false)
        .zero_fill(ZeroFill::Never)
        .clock(Arc::new(ManualClock::new(1_700_000_000_000)))
}

fn filter(log: &DedupLog) -> Filter {
    let options = NamespaceOptions::new()
        .outcome_bytes_max(0)
        .retention(Retention::Forever);
    log.filter("f", options).unwrap()
}

fn open(disk: &SimDisk) -> (DedupLog, Filter) {
    let log = options().open_on(disk.dir()).unwrap();
    let filter = filter(&log);
    (log, filter)
}

/// About sixteen fill a segment.
fn key(n: usize) -> String {
    format!("{n:0>200}")
}

fn observe(filter: &Filter, keys: std::ops::Range<usize>) -> idemlog::Result<()> {
    let quickly = ObserveOptions::new().durability(Durability::Process);
    for n in keys {
        assert!(filter.observe_with(key(n), &quickly)?.is_new());
    }
    Ok(())
}

/// Run and filter are flushed under temporary names, and their names before the manifest lists
/// them (I7): a power cut never costs a sealed segment its index.
#[test]
fn a_listed_run_is_whole_after_every_power_cut() {
    let base = SimDisk::new();
    let (log, filter) = open(&base);
    observe(&filter, 0..40).unwrap();
    log.maintain().unwrap();
    assert_eq!(log.stats().runs_count, 2);
    drop(filter);
    log.close().unwrap();
    let options = CrashOptions {
        base,
        outcomes_max: 64,
        seeded_count: 6,
        inside_count: 0,
        ..CrashOptions::default()
    };
    let mut merged = false;
    let scenario = |disk: &SimDisk| {
        let Ok(log) = self::options().open_on(disk.dir()) else {
            return;
        };
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        if let Ok(filter) = log.filter("f", options.retention(Retention::Forever)) {
            let _died = observe(&filter, 40..80).and_then(|()| log.maintain());
        }
    };
    let totals = for_each_crash_point(&options, scenario, |state| {
        let log = self::options().open_on(state.disk.dir()).unwrap();
        let report = log.open_report();
        assert_eq!(report.rebuilt_runs_count, 0, "an index was lost");
        // No page of a run is asked for in vain.
        let filter = self::filter(&log);
        for n in 0..40 {
            assert_eq!(filter.get(key(n)).unwrap(), KeyState::Seen, "{n}");
        }
        assert_eq!(log.health().background_error, None);
        merged |= log.stats().runs_count == 1;
    });
    assert!(merged && totals.checked > 100, "{totals:?}");
}

/// The ballast's blocks are free only when its removal is durable: without that flush the manifest
/// would not fit although the ballast was given up for it.
#[test]
fn the_ballast_makes_room_for_a_manifest_on_a_full_disk() {
    let disk = SimDisk::new();
    let (log, filter) = open(&disk);
    observe(&filter, 0..40).unwrap();
    log.maintain().unwrap();
    assert!(disk.file_names().contains(&"RESERVE".to_owned()));
    disk.set_free_bytes(Some(0));
    drop(filter);
    log.close().unwrap();
    assert!(!disk.file_names().contains(&"RESERVE".to_owned()));
    disk.set_free_bytes(None);
    let (log, filter) = open(&disk);
    assert!(log.open_report().clean);
    assert_eq!(filter.observe(key(39)).unwrap(), Observed::Duplicate);
}

/// A file that is used again for another segment holds whole old records behind the new ones, at
/// the same offsets where all are of one size. None of them may come back.
#[test]
fn evicted_keys_do_not_come_back_out_of_a_recycled_file() {
    let disk = SimDisk::new();
    let bounded = || {
        let options = options().log_bytes_max(5 * 4096);
        options.when_full(WhenFull::EvictOldest)
    };
    let log = bounded().open_on(disk.dir()).unwrap();
    let filter = filter(&log);
    let mut recycled = false;
    for n in 0..160 {
        observe(&filter, n..n + 1).unwrap();
        log.maintain().unwrap();
        let evicted: Vec<bool> = (0..=n)
            .map(|n| filter.get(key(n)).unwrap() == KeyState::Absent)
            .collect();
        for disk in [
            disk.after_kill(),
            disk.after_power_cut(&mut PowerCut::keep_all()),
        ] {
            let log = bounded().open_on(disk.dir()).unwrap();
            let filter = self::filter(&log);
            for (n, was_evicted) in evicted.iter().enumerate() {
                let is_absent = filter.get(key(n)).unwrap() == KeyState::Absent;
                assert_eq!(is_absent, *was_evicted, "{n}");
            }
        }
        recycled |= log.stats().evicted_count > 40;
    }
    assert!(recycled);
}

/// Whatever is asked to be durable by `sync` and by a close is so at once, at every level.
#[test]
fn sync_and_close_make_everything_durable() {
    for level in [Durability::Buffered, Durability::Process] {
        let disk = SimDisk::new();
        let (log, filter) = open(&disk);
        let asked = ObserveOptions::new().durability(level);
        assert!(filter.observe_with("synced", &asked).unwrap().is_new());
        log.sync().unwrap();
        let cut = disk.after_power_cut(&mut PowerCut::drop_all());
        let (_cut_log, found) = open(&cut);
        assert_eq!(found.get("synced").unwrap(), KeyState::Seen);
        assert!(filter.observe_with("closed", &asked).unwrap().is_new());
        drop(filter);
        log.close().unwrap();
        let cut = disk.after_power_cut(&mut PowerCut::drop_all());
        let (log, found) = open(&cut);
        assert!(log.open_report().clean);
        assert_eq!(found.get("closed").unwrap(), KeyState::Seen);
    }
}

/// At `Buffered` records wait in memory, but not without end: what has gathered is written out.
#[test]
fn many_buffered_records_are_written_out() {
    let disk = SimDisk::new();
    let log = options()
        .segment_bytes(1 << 20)
        .open_on(disk.dir())
        .unwrap();
    let filter = filter(&log);
    let buffered = ObserveOptions::new().durability(Durability::Buffered);
    let keys: Vec<String> = (0..4000).map(key).collect();
    for chunk in keys.chunks(50) {
        let observed = filter.observe_many_with(chunk, &buffered).unwrap();
        assert_eq!(observed.len(), chunk.len());
    }
    let killed = disk.after_kill();
    let log = options()
        .segment_bytes(1 << 20)
        .open_on(killed.dir())
        .unwrap();
    let filter = self::filter(&log);
    let kept = keys
        .iter()
        .filter(|key| filter.get(key).unwrap() == KeyState::Seen)
        .count();
    // 256 KiB are in memory at the most, of records of more than 220 bytes; the last of the growing
    // segments is twice as long.
    assert!(kept > keys.len() - 1250, "kept={kept}");
}

/// Written records become durable within the sync interval, without anybody asking.
#[test]
fn what_is_written_is_flushed_in_the_background() {
    let disk = SimDisk::new();
    let log = options()
        .background(true)
        .flush_interval(Duration::from_millis(1))
        .sync_interval(Duration::from_millis(2))
        .open_on(disk.dir())
        .unwrap();
    let filter = filter(&log);
    for level in [Durability::Buffered, Durability::Process] {
        let flushes_count = log.stats().flushes_count;
        let key = format!("{level:?}");
        let asked = ObserveOptions::new().durability(level);
        assert!(filter.observe_with(&key, &asked).unwrap().is_new());
        let began = Instant::now();
        while log.stats().flushes_count == flushes_count {
            assert!(began.elapsed() < Duration::from_secs(60), "nobody flushes");
            std::thread::yield_now();
        }
        // The flush that has begun ends before this one.
        log.maintain().unwrap();
        let log = loop {
            let cut = disk.after_power_cut(&mut PowerCut::drop_all());
            let (log, found) = open(&cut);
            if found.get(&key).unwrap() == KeyState::Seen {
                break log;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{key} is lost");
        };
        drop(log);
    }
}

/// Many threads at `Process` while writes fail now and then: whose record was taken back by
/// another's failure is told so, and whose was not finds it after a kill.
#[test]
fn a_write_that_fails_under_many_threads_has_one_fate_for_each() {
    for round in 0..20 {
        let disk = SimDisk::new();
        let (log, filter) = open(&disk);
        let quickly = ObserveOptions::new().durability(Durability::Process);
        let over = AtomicBool::new(false);
        let fates: Vec<(String, idemlog::Result<Observed>)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|thread| {
                    let (filter, quickly, over) = (&filter, &quickly, &over);
                    scope.spawn(move || {
                        let keys = (0..40).map(|n| format!("{round}-{thread}-{n}"));
                        let fates = keys.map(|key| {
                            let observed = filter.observe_with(&key, quickly);
                            (key, observed)
                        });
                        let fates: Vec<_> = fates.collect();
                        over.store(true, Ordering::SeqCst);
                        fates
                    })
                })
                .collect();
            let mut failing = 0;
            while !over.load(Ordering::SeqCst) {
                // One write of four fails.
                if disk.steps() > failing {
                    failing = disk.steps() + 3;
                    disk.fail(Fault::once(failing, FaultKind::NoSpace).only(Op::Write));
                }
                std::thread::yield_now();
            }
            let ended = threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap());
            ended.collect()
        });
        disk.clear_faults();
        let (_log, found) = open(&disk.after_kill());
        for (key, fate) in fates {
            let is_there = found.get(&key).unwrap() == KeyState::Seen;
            match fate {
                Ok(_) => assert!(is_there, "{key} was promised"),
                Err(error) if error.applied() == Applied::No => {
                    assert!(!is_there, "{key} was refused: {error}");
                }
                Err(_) => {}
            }
        }
        drop(log);
    }
}

/// Whoever asks for more than the record that is found has: the duplicate's answer waits for it.
#[test]
fn a_duplicate_at_process_survives_a_kill() {
    let disk = SimDisk::new();
    let (_log, filter) = open(&disk);
    let asked = |level| ObserveOptions::new().durability(level);
    let buffered = filter.observe_with("key", &asked(Durability::Buffered));
    assert_eq!(buffered.unwrap(), Observed::New);
    let (_killed, found) = open(&disk.after_kill());
    assert_eq!(found.get("key").unwrap(), KeyState::Absent);
    let process = filter.observe_with("key", &asked(Durability::Process));
    assert_eq!(process.unwrap(), Observed::Duplicate);
    let (_killed, found) = open(&disk.after_kill());
    assert_eq!(found.get("key").unwrap(), KeyState::Seen);
}

/// What a probe has found is told as done only when that is durable: the target may not know it
/// any more when it is asked again.
#[test]
fn what_a_probe_has_found_stays_after_a_power_cut() {
    let disk = SimDisk::new();
    let jobs = |log: &DedupLog, found: Probed| {
        let options = NamespaceOptions::new()
            .outcome_bytes_max(0)
            .settle(Duration::ZERO);
        let jobs = log.namespace::<Probeable>("j", options).unwrap();
        jobs.with_probe(move |_| found.clone())
    };
    let log = options().open_on(disk.dir()).unwrap();
    let mut claim = jobs(&log, Probed::Unknown).claim("job").unwrap().claim();
    let started = claim.take().unwrap().start(b"").unwrap();
    let disk = disk.after_kill();
    drop((started, log));
    let log = options().open_on(disk.dir()).unwrap();
    let told = jobs(&log, Probed::Applied(Vec::new()))
        .claim("job")
        .unwrap();
    assert!(matches!(told, ClaimVerdict::Duplicate(_)), "{told:?}");
    let cut = disk.after_power_cut(&mut PowerCut::drop_all());
    let log = options().open_on(cut.dir()).unwrap();
    let told = jobs(&log, Probed::NotApplied).claim("job").unwrap();
    assert!(matches!(told, ClaimVerdict::Duplicate(_)), "{told:?}");
}

const SEGMENT_ENTRY_BYTES: usize = 44;
const RUN_ENTRY_BYTES: usize = 20;

/// The next segment's id, the segments that a manifest lists, and those whose drop it declares
/// (`docs/format.md` section 4).
fn listed_and_dropped(manifest: &[u8]) -> (u64, Vec<u64>, Vec<u64>) {
    use crate::golden::bytes::{u16_at, u32_at, u64_at};
    let count = |at| u32_at(manifest, at) as usize;
    let mut at = 136;
    for _ in 0..count(120) {
        at += 4 + usize::from(manifest[at + 3]);
    }
    let (mut listed, mut dropped) = (Vec::new(), Vec::new());
    for _ in 0..count(124) {
        listed.push(u64_at(manifest, at));
        at += SEGMENT_ENTRY_BYTES;
    }
    at += count(128) * RUN_ENTRY_BYTES;
    for _ in 0..count(132) {
        dropped.push(u64_at(manifest, at));
        at += 8;
    }
    assert_eq!(at + 4, manifest.len());
    assert_eq!(u16_at(manifest, 8), 1);
    (u64_at(manifest, 104), listed, dropped)
}

/// The manifest forgets a drop only when the removal of the file is durable: what reads it can
/// tell a file that came back from one that it has never heard of.
#[test]
fn a_dropped_segment_stays_listed_until_its_removal_is_durable() {
    // Segments expire one after the other, and nothing else flushes the directory in between.
    let scenario = |disk: &SimDisk| {
        let clock = Arc::new(ManualClock::new(1_700_000_000_000));
        let reopened = || options().clock(Arc::clone(&clock) as _).open_on(disk.dir());
        let expiring = |log: &DedupLog| -> idemlog::Result<()> {
            let filter = log.filter("f", NamespaceOptions::new().outcome_bytes_max(0))?;
            // Three segments and a little: nothing is prepared meanwhile.
            for n in 0..53 {
                let retention = match n {
                    0..50 => Retention::For(Duration::from_secs(10 + 10 * n)),
                    _ => Retention::Forever,
                };
                let asked = ObserveOptions::new().durability(Durability::Process);
                let key = key(usize::try_from(n).unwrap());
                assert!(
                    filter
                        .observe_with(key, &asked.retention(retention))?
                        .is_new()
                );
            }
            for _ in 0..7 {
                log.maintain()?;
                clock.advance_ms(100_000);
            }
            log.maintain()
        };
        if reopened().and_then(|log| expiring(&log)).is_ok() {
            drop(reopened());
        }
    };
    let options = CrashOptions {
        outcomes_max: 128,
        seeded_count: 40,
        inside_count: 0,
        ..CrashOptions::default()
    };
    let mut came_back = 0;
    let totals = for_each_crash_point(&options, scenario, |state| {
        let Some(manifest) = state.disk.read_file("MANIFEST") else {
            return;
        };
        let (next, listed, dropped) = listed_and_dropped(&manifest);
        for name in state.disk.file_names() {
            let Some(id) = name.strip_prefix("seg-") else {
                continue;
            };
            let id: u64 = id.trim_end_matches(".log").parse().unwrap();
            let is_dropped = dropped.contains(&id);
            let is_known = is_dropped || listed.contains(&id) || id >= next;
            assert!(is_known, "{name} is unheard of");
            came_back += u64::from(is_dropped);
        }
    });
    assert!(totals.checked > 200 && came_back > 0, "{totals:?}");
}

/// What `get` and `check_many` tell of a key rests on a record as durable as the namespace says,
/// also when it was asked for at a lower level.
#[test]
fn what_a_read_tells_of_a_key_survives_a_power_cut() {
    type Read = fn(&Filter) -> bool;
    let reads: [Read; 2] = [
        |filter| filter.get("key").unwrap() == KeyState::Seen,
        |filter| *filter.check_many(&["key"]).unwrap()[0].as_ref().unwrap(),
    ];
    for read in reads {
        let disk = SimDisk::new();
        let (_log, filter) = open(&disk);
        let buffered = ObserveOptions::new().durability(Durability::Buffered);
        assert!(filter.observe_with("key", &buffered).unwrap().is_new());
        assert!(read(&filter));
        let (_cut, found) = open(&disk.after_power_cut(&mut PowerCut::drop_all()));
        assert!(read(&found));
    }
}

/// A buffered answer is a promise within the process: a later write that fails does not take its
/// record back in silence. The store is poisoned instead.
#[test]
fn a_failed_write_takes_no_buffered_answer_back() {
    let buffered = ObserveOptions::new().durability(Durability::Buffered);
    let job_options = || NamespaceOptions::new().outcome_bytes_max(0);
    type Call<'a> = &'a dyn Fn(&DedupLog, &Filter);
    let calls: [Call; 4] = [
        &|_, filter| assert!(filter.observe_with("key", &buffered).unwrap().is_new()),
        &|_, filter| {
            let observed = filter.observe_many_with(&["key"], &buffered).unwrap();
            assert!(observed[0].as_ref().unwrap().is_new());
        },
        &|log, _| {
            let jobs = log.namespace::<Repeatable>("j", job_options()).unwrap();
            std::mem::forget(jobs.claim("job").unwrap());
        },
        &|log, _| {
            let jobs = log.namespace::<Repeatable>("j", job_options()).unwrap();
            std::mem::forget(jobs.claim_many(&["job"], &ClaimOptions::new()).unwrap());
        },
    ];
    for call in calls {
        let disk = SimDisk::new();
        let (log, filter) = open(&disk);
        drop(log.namespace::<Repeatable>("j", job_options()).unwrap());
        call(&log, &filter);
        disk.fail(Fault::once(disk.steps(), FaultKind::NoSpace).only(Op::Write));
        let quickly = ObserveOptions::new().durability(Durability::Process);
        let refused = filter.observe_with("other", &quickly).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Poisoned, "{refused}");
        assert!(log.health().poisoned.is_some());
        assert!(filter.get("key").is_err(), "never absent");
    }
}

/// A hint of a later time beside an older log, as a backup restored in part leaves it: what it says
/// is compared with the log.
#[test]
fn a_hint_that_the_log_does_not_bear_out_is_not_believed() {
    let opened = |disk: &SimDisk| {
        options()
            .segment_bytes(1 << 20)
            .open_on(disk.dir())
            .unwrap()
    };
    let disk = SimDisk::new();
    let log = opened(&disk);
    let filter = filter(&log);
    let keys: Vec<String> = (0..13_000).map(|n| format!("key-{n}")).collect();
    let (before, later) = keys.split_at(12_000);
    let observe = |filter: &Filter, keys: &[String]| {
        for chunk in keys.chunks(500) {
            let observed = filter.observe_many(chunk).unwrap();
            assert!(observed.iter().all(|one| one.as_ref().unwrap().is_new()));
        }
    };
    observe(&filter, before);
    log.maintain().unwrap();
    let older = disk.after_kill();
    observe(&filter, later);
    drop(filter);
    log.close().unwrap();
    let names = disk.file_names();
    let hint = names.iter().find(|name| name.starts_with("hint-")).unwrap();
    older.write_file(hint, disk.read_file(hint).unwrap());
    let log = opened(&older);
    let filter = self::filter(&log);
    for key in before.iter().step_by(10) {
        assert_eq!(filter.get(key).unwrap(), KeyState::Seen, "{key}");
    }
    for key in later.iter().step_by(10) {
        assert_eq!(filter.get(key).unwrap(), KeyState::Absent, "{key}");
    }
}

/// Lets a test hold a flush of a segment that has failed, until somebody else is through.
#[derive(Debug, Default)]
struct Held {
    state: Mutex<HeldState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct HeldState {
    is_armed: bool,
    has_failed: bool,
    is_over: bool,
}

impl Held {
    fn set(&self, change: impl FnOnce(&mut HeldState)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn wait(&self, time: Duration, until: impl Fn(&HeldState) -> bool) {
        let state = self.state.lock().unwrap();
        let waited = self
            .changed
            .wait_timeout_while(state, time, |state| !until(state));
        drop(waited.unwrap());
    }
}

/// A directory whose segments' flushes can be held.
#[derive(Debug)]
struct HeldDir(Arc<dyn Dir>, Arc<Held>);

#[derive(Debug)]
struct HeldFile(Arc<dyn File>, Arc<Held>);

impl Dir for HeldDir {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        let file = self.0.open(name, access)?;
        if !name.starts_with("seg-") {
            return Ok(file);
        }
        Ok(Arc::new(HeldFile(file, Arc::clone(&self.1))))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn unlink(&self, name: &str) -> io::Result<()> {
        self.0.unlink(name)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.0.list()
    }

    fn lock(&self, name: &str, create: bool, note: &str) -> io::Result<LockAttempt> {
        self.0.lock(name, create, note)
    }
}

impl File for HeldFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_at(buf, offset)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.0.set_len(bytes)
    }

    fn allocated(&self) -> io::Result<u64> {
        self.0.allocated()
    }

    fn free_space(&self) -> io::Result<u64> {
        self.0.free_space()
    }

    fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.0.allocate(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        let synced = self.0.sync();
        let is_armed = self.1.state.lock().unwrap().is_armed;
        if is_armed && synced.is_err() {
            self.1.set(|state| state.has_failed = true);
            // Where flushes are one at a time nobody gets through, and the time is over.
            self.1
                .wait(Duration::from_millis(300), |state| state.is_over);
        }
        synced
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> io::Result<Option<bool>> {
        self.0.holds(bytes, offset)
    }

    fn size(&self) -> io::Result<u64> {
        self.0.size()
    }

    fn map(&self) -> io::Result<Map> {
        self.0.map()
    }
}

/// Of two that flush one file at once, the kernel tells only one that its pages are lost; for the
/// other they are clean. The upkeep's flush of a full segment fails here while a caller waits at
/// `Power` for the same segment: it must not be told that it is durable.
#[test]
fn a_flush_beside_a_failing_one_proves_nothing() {
    let disk = SimDisk::new();
    let held = Arc::new(Held::default());
    let dir = HeldDir(disk.dir(), Arc::clone(&held));
    let log = options().open_on(Arc::new(dir)).unwrap();
    let filter = filter(&log);
    // One segment is full and not flushed.
    observe(&filter, 0..20).unwrap();
    held.set(|state| state.is_armed = true);
    disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
    let told = std::thread::scope(|scope| {
        let upkeep = scope.spawn(|| log.maintain());
        held.wait(Duration::from_secs(60), |state| state.has_failed);
        let told = filter.observe("late");
        held.set(|state| state.is_over = true);
        assert!(upkeep.join().unwrap().is_err());
        told
    });
    assert_eq!(told.unwrap_err().kind(), ErrorKind::Poisoned);
    assert!(log.health().poisoned.is_some());
}

/// What an open has cut is gone from the device before anything is appended: a power cut right
/// after the open does not bring it back.
#[test]
fn what_an_open_has_cut_is_gone_from_the_device_when_it_returns() {
    let disk = SimDisk::new();
    let (log, filter) = open(&disk);
    observe(&filter, 0..8).unwrap();
    log.sync().unwrap();
    let torn = disk.after_kill();
    drop((log, filter));
    let name = "seg-000000000001.log";
    let mut bytes = torn.read_file(name).unwrap();
    let at = bytes.iter().rposition(|b| *b != 0).unwrap();
    // The last frame is torn: its end is not what its checksum says.
    bytes[at] ^= 1;
    torn.write_file(name, bytes);
    let log = options().open_on(torn.dir()).unwrap();
    assert!(log.open_report().dropped_bytes > 0);
    let bare = torn.after_power_cut(&mut PowerCut::drop_all());
    drop(log);
    let log = options().open_on(bare.dir()).unwrap();
    assert_eq!(log.open_report().dropped_bytes, 0);
}

/// After a kill the end of the log is in the cache only: one flush makes it durable. Without it a
/// whole segment would be written again, with a copy beside it.
#[test]
fn an_open_after_a_kill_flushes_and_writes_no_segment_anew() {
    let disk = SimDisk::new();
    let (log, filter) = open(&disk);
    observe(&filter, 0..8).unwrap();
    let killed = disk.after_kill();
    drop((log, filter));
    let (log, filter) = open(&killed);
    let copies = killed
        .step_log()
        .iter()
        .filter(|step| step.contains(".copy"))
        .count();
    assert_eq!(copies, 0, "{:?}", killed.step_log());
    assert_eq!(filter.get(key(7)).unwrap(), KeyState::Seen);
    drop(log);
}

/// A hint is written only of what is durable. Otherwise a power cut may keep the hint and the last
/// record that it names and lose one between: the hint would be believed, and answers for what is
/// not there.
#[test]
fn a_hint_says_nothing_of_what_a_power_cut_may_take() {
    let disk = SimDisk::new();
    let open = |disk: &SimDisk| {
        let log = options().hint_keys_min(1).open_on(disk.dir()).unwrap();
        let filter = filter(&log);
        (log, filter)
    };
    let (log, filter) = open(&disk);
    observe(&filter, 0..10).unwrap();
    for _ in 0..3 {
        log.maintain().unwrap();
    }
    let mut lost = 0;
    for seed in 0..400 {
        let bare = disk.after_power_cut(&mut PowerCut::seeded(seed));
        let (_log, filter) = open(&bare);
        let seen = |n| filter.get(key(n)).unwrap() == KeyState::Seen;
        let kept = (0..10).take_while(|n| seen(*n)).count();
        assert!((kept..10).all(|n| !seen(n)), "seed {seed}");
        lost += usize::from(kept < 10);
    }
    assert!(lost > 0);
}
