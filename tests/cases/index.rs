//! The index, which the log alone must be able to replace: hashes that collide, growth that is
//! killed, indexes of another moment, and marks of deletion in compactions.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{CrashOptions, Op, Rng, SimDisk, for_each_crash_point};
use idemlog::{DedupLog, KeyState, ObserveOptions, Observed, Repeatable, Retention};
use siphasher::sip::SipHasher13;

use super::{
    Twin, aftermath, clock, compare, filter, image, is_index, long, options, remove_index,
    segments, small, verified,
};
use crate::golden::bytes;

const HASH_KEY: [u8; 16] = [7; 16];

fn open(disk: &SimDisk) -> DedupLog {
    options(&clock()).open_on(disk.dir()).unwrap()
}

/// Returns the index hash of a key of the first namespace, as `docs/format.md` says.
fn hash(key: &str) -> u64 {
    let mut hasher = SipHasher13::new_with_key(&HASH_KEY);
    hasher.write(&1u16.to_le_bytes());
    hasher.write(key.as_bytes());
    hasher.finish() >> 20
}

/// Makes an empty store whose hash key is known, so that keys with equal hashes can be chosen.
fn with_known_hash_key() -> SimDisk {
    let disk = SimDisk::memory();
    open(&disk).close().unwrap();
    let mut manifest = disk.read_file("MANIFEST").unwrap();
    manifest[40..56].copy_from_slice(&HASH_KEY);
    bytes::fix_end(&mut manifest);
    let mut mac = SipHasher13::new_with_key(&HASH_KEY);
    mac.write(&manifest[16..32]);
    for name in segments(&disk) {
        let mut segment = disk.read_file(&name).unwrap();
        bytes::put(&mut segment, 40, 8, mac.finish());
        bytes::fix_end(&mut segment[..64]);
        disk.write_file(&name, segment);
    }
    disk.write_file("MANIFEST", manifest);
    disk
}

/// Numbers of keys `key-N` of which each two have the same 44-bit index hash under `HASH_KEY`.
const COLLISIONS: [(u32, u32); 16] = [
    (17_508_450, 29_162_378),
    (5_922_374, 28_398_065),
    (15_100_869, 20_737_756),
    (6_235_268, 21_317_820),
    (12_337_885, 33_040_882),
    (6_148_820, 25_690_943),
    (9_186_265, 25_927_241),
    (2_828_807, 16_709_989),
    (660_166, 26_233_884),
    (7_986_190, 8_134_561),
    (9_453_775, 19_141_306),
    (7_768_197, 13_536_659),
    (1_698_883, 4_457_912),
    (49_414, 10_253_096),
    (8_211_133, 13_831_680),
    (6_371_733, 9_714_295),
];

fn collisions() -> impl Iterator<Item = (String, String)> {
    COLLISIONS
        .into_iter()
        .map(|(a, b)| (format!("key-{a}"), format!("key-{b}")))
}

#[test]
fn c35_keys_of_one_index_hash_are_told_apart_in_memory_in_runs_and_after_a_rebuild() {
    for apart in [false, true] {
        let disk = with_known_hash_key();
        let mut log = open(&disk);
        assert_eq!(
            hash("key-49414"),
            hash("key-10253096"),
            "the store's hash has changed"
        );
        let mut twin = Twin::new();
        for (first, second) in collisions() {
            assert_eq!(hash(&first), hash(&second));
            // The first is known everywhere before the second is asked for the first time.
            assert!(filter(&log).observe(&first).unwrap().is_new());
            assert_eq!(filter(&log).get(&second).unwrap(), KeyState::Absent);
            twin.insert(first, true);
            twin.insert(second, false);
        }
        if apart {
            // The first is in a sealed segment when the second comes.
            for n in 0..60 {
                assert!(filter(&log).observe(long("fill", n)).unwrap().is_new());
            }
            log.maintain().unwrap();
            compare(&filter(&log), &twin, "sealed");
        }
        for (first, second) in collisions().take(8) {
            assert_eq!(
                filter(&log).observe(&second).unwrap(),
                Observed::New,
                "{second}"
            );
            assert_eq!(filter(&log).observe(&second).unwrap(), Observed::Duplicate);
            // Forgetting one leaves the other.
            assert!(filter(&log).forget(&first).unwrap().is_applied());
            twin.insert(second, true);
            twin.insert(first, false);
        }
        compare(&filter(&log), &twin, "in memory");
        let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
        assert_eq!(jobs.get("key-49414").unwrap(), KeyState::Absent);
        for n in 100..160 {
            assert!(filter(&log).observe(long("fill", n)).unwrap().is_new());
        }
        log.maintain().unwrap();
        compare(&filter(&log), &twin, "in runs");
        drop((jobs, log));
        assert!(remove_index(&disk) > 0);
        log = open(&disk);
        compare(&filter(&log), &twin, "rebuilt");
        drop(log);
        aftermath(&disk, &open, &twin, "colliding keys");
    }
}

#[test]
fn c35_keys_that_share_most_of_their_bytes_or_their_page_are_told_apart() {
    let disk = with_known_hash_key();
    let wide = |disk: &SimDisk| {
        let options = options(&clock()).segment_bytes(256 * 1024);
        options.open_on(disk.dir()).unwrap()
    };
    let log = wide(&disk);
    let mut twin = Twin::new();
    // All in the first hundredth of the hashes: one page of the index, and what spills from it.
    let crowded = (0u32..)
        .map(|n| format!("crowd-{n}"))
        .filter(|key| hash(key) >> 37 == 0);
    let crowded: Vec<String> = crowded.take(3000).collect();
    for chunk in crowded.chunks(250) {
        for answer in filter(&log).observe_many(chunk).unwrap() {
            assert!(answer.unwrap().is_new());
        }
    }
    let strangers = (0u32..).map(|n| format!("stranger-{n}"));
    let strangers = strangers.filter(|key| hash(key) >> 37 == 0).take(1000);
    twin.extend(crowded.into_iter().map(|key| (key, true)));
    twin.extend(strangers.map(|key| (key, false)));
    let prefix = "p".repeat(4000);
    for n in 0..40 {
        let key = format!("{prefix}{n}");
        assert!(filter(&log).observe(&key).unwrap().is_new());
        twin.insert(key, true);
        twin.insert(format!("{prefix}{n}x"), false);
    }
    twin.insert(prefix, false);
    compare(&filter(&log), &twin, "in memory");
    log.maintain().unwrap();
    drop(log);
    aftermath(&disk, &wide, &twin, "crowded");
    assert!(remove_index(&disk) > 0);
    aftermath(&disk, &wide, &twin, "crowded, rebuilt");
}

#[test]
fn c46_the_table_holds_as_many_keys_as_a_segment_can_and_crowded_ones_are_all_found() {
    let disk = with_known_hash_key();
    let wide = |disk: &SimDisk| {
        let options = options(&clock()).segment_bytes(64 * 1024);
        options.open_on(disk.dir()).unwrap()
    };
    let log = wide(&disk);
    // The shortest keys: nothing packs more records into a segment.
    let keys: Vec<[u8; 2]> = (0..6000u16).map(u16::to_le_bytes).collect();
    for answer in filter(&log).observe_many(&keys).unwrap() {
        assert!(answer.unwrap().is_new());
    }
    assert!(
        log.stats().seals_count >= 1,
        "a table was filled to its limit"
    );
    for answer in filter(&log).observe_many(&keys).unwrap() {
        assert_eq!(answer.unwrap(), Observed::Duplicate);
    }
    for stranger in 6000..16_000u16 {
        let seen = filter(&log).get(stranger.to_le_bytes()).unwrap();
        assert_eq!(seen, KeyState::Absent);
    }
    drop(log);
    let log = wide(&disk);
    for answer in filter(&log).observe_many(&keys).unwrap() {
        assert_eq!(answer.unwrap(), Observed::Duplicate);
    }
    drop(log);
    assert!(verified(&disk).is_ok());
}

/// Observes until so many more segments are sealed.
fn grow(log: &DedupLog, twin: &mut Twin, word: &str, seals: u64) {
    let before = log.stats().seals_count;
    while log.stats().seals_count < before + seals {
        let key = long(word, twin.len());
        assert!(filter(log).observe(&key).unwrap().is_new());
        twin.insert(key, true);
    }
}

fn index_bytes(disk: &SimDisk) -> usize {
    let files = image(disk).into_iter();
    let index = files.filter(|(name, _)| is_index(name));
    index.map(|(_, content)| content.len()).sum()
}

#[test]
fn c46_killed_at_each_step_of_growth_every_key_is_found_once_and_growth_goes_on() {
    let base = SimDisk::new();
    let log = open(&base);
    let mut twin = Twin::new();
    grow(&log, &mut twin, "base", 3);
    assert_eq!(log.stats().runs_count, 3, "the next seal makes a merge due");
    let base = base.after_kill();
    drop(log);
    let growing = |log: &DedupLog| -> idemlog::Result<()> {
        let filter = log.filter("f", small())?;
        for n in 0..30 {
            let _observed = filter.observe(long("grow", n))?;
        }
        log.maintain()
    };
    let whole = base.after_kill();
    let log = open(&whole);
    growing(&log).unwrap();
    let stats = log.stats();
    assert!(stats.merges_count >= 1 && stats.runs_count < 4, "{stats:?}");
    log.close().unwrap();
    let bytes = index_bytes(&whole);
    let crash = CrashOptions {
        base,
        outcomes_max: 4,
        seeded_count: 1,
        inside_count: 0,
        ..CrashOptions::default()
    };
    let scenario = |disk: &SimDisk| {
        if let Ok(log) = options(&clock()).open_on(disk.dir()) {
            let _unused = growing(&log);
        }
    };
    let totals = for_each_crash_point(&crash, scenario, |state| {
        let what = state.to_string();
        let disk = state.disk;
        let log = open(&disk);
        compare(&filter(&log), &twin, &what);
        let mut all = twin.clone();
        growing(&log).unwrap();
        all.extend((0..30).map(|n| (long("grow", n), true)));
        compare(&filter(&log), &all, &what);
        assert!(log.stats().runs_count < 5, "{what}: {:?}", log.stats());
        let report = || {
            let report = verified(&disk);
            assert!(report.is_ok(), "{what}: {:?}", report.problems);
            report
        };
        log.close().unwrap();
        // Each key is in the log once, and each run has each of its keys once.
        assert_eq!(report().records_count as usize, all.len(), "{what}");
        // A kill may have sealed a segment early, never doubled the index.
        assert!(
            index_bytes(&disk) <= bytes * 2,
            "{what}: {}",
            index_bytes(&disk)
        );
        // It grows again, by itself.
        if state.step % 5 != 0 {
            return;
        }
        let log = open(&disk);
        grow(&log, &mut all, "again", 4);
        log.maintain().unwrap();
        assert!(log.stats().runs_count < 6, "{what}: {:?}", log.stats());
        log.close().unwrap();
        assert_eq!(report().records_count as usize, all.len(), "{what}");
        all.insert("stranger".into(), false);
        aftermath(&disk, &open, &all, &what);
    });
    assert!(totals.steps > 20, "{totals:?}");
}

/// Threads that merge at the same time, as the background and a caller of `maintain` do.
#[test]
fn c46_several_threads_that_let_the_index_grow_do_not_remove_each_others_files() {
    let disk = SimDisk::memory();
    let open = || {
        // Slow writes of the index: merges of several threads would surely overlap.
        let dir = crate::support::rigged::rigged(disk.dir(), |op, name| {
            if op == Op::Write && name.ends_with(".tmp") {
                std::thread::sleep(Duration::from_micros(300));
            }
            Ok(())
        });
        let options = idemlog::Options::new().segment_bytes(4096);
        options.open_on(dir).unwrap()
    };
    let log = open();
    let filter = filter(&log);
    let over = std::sync::atomic::AtomicBool::new(false);
    let failures: Vec<String> = std::thread::scope(|scope| {
        let mergers = [(); 3].map(|()| {
            scope.spawn(|| {
                let mut failures = Vec::new();
                while !over.load(std::sync::atomic::Ordering::Acquire) {
                    failures.extend(log.maintain().err().map(|error| error.to_string()));
                }
                failures
            })
        });
        let observed = (0..2500).all(|n| filter.observe(long("key", n)).is_ok_and(|o| o.is_new()));
        over.store(true, std::sync::atomic::Ordering::Release);
        let mut failures: Vec<String> = Vec::new();
        for merger in mergers {
            failures.extend(merger.join().unwrap());
        }
        failures.extend((!observed).then(|| "a key was not new".to_owned()));
        failures
    });
    assert_eq!(failures, [] as [String; 0]);
    assert!(log.stats().merges_count > 5, "{:?}", log.stats());
    drop(filter);
    log.close().unwrap();
    // All runs are there: none was removed as somebody else's.
    let report = verified(&disk);
    assert!(report.is_ok() && report.orphans.is_empty(), "{report:?}");
    assert_eq!(open().open_report().rebuilt_runs_count, 0);
}

/// Three segments: A, B and C are recorded in the first, A and B forgotten in the second, B is
/// recorded again in the third. What fills a sparse segment expires after a minute.
fn three_layers(clock: &Arc<ManualClock>, sparse: [bool; 2]) -> (SimDisk, Twin) {
    let disk = SimDisk::new();
    let log = options(clock).open_on(disk.dir()).unwrap();
    let minute = ObserveOptions::new().retention(Duration::from_secs(60));
    let mut twin = Twin::new();
    let mut fill = |log: &DedupLog, word: &str, is_sparse: bool| {
        let before = log.stats().seals_count;
        let mut n = 0;
        while log.stats().seals_count == before {
            let key = long(word, n);
            n += 1;
            // A few are always kept: a segment is compacted only if something in it is needed.
            let kept = !is_sparse || n == 3;
            let asked = if kept {
                ObserveOptions::new()
            } else {
                minute.clone()
            };
            assert!(filter(log).observe_with(&key, &asked).unwrap().is_new());
            twin.insert(key, kept);
            log.maintain().unwrap();
        }
    };
    for key in ["A", "B", "C"] {
        assert!(filter(&log).observe(key).unwrap().is_new());
    }
    fill(&log, "first", sparse[0]);
    for key in ["A", "B"] {
        assert!(filter(&log).forget(key).unwrap().is_applied());
    }
    fill(&log, "second", sparse[1]);
    assert!(filter(&log).observe("B").unwrap().is_new());
    fill(&log, "third", false);
    log.close().unwrap();
    for (key, seen) in [("A", false), ("B", true), ("C", true)] {
        twin.insert(key.into(), seen);
    }
    (disk, twin)
}

#[test]
fn c39_whichever_segment_is_compacted_a_forgotten_key_stays_new_and_a_recorded_one_known() {
    for sparse in [[false, true], [true, false], [true, true]] {
        let clock = clock();
        let (base, twin) = three_layers(&clock, sparse);
        clock.advance_ms(61_000);
        let open = |disk: &SimDisk| options(&clock).open_on(disk.dir()).unwrap();
        let whole = base.after_kill();
        let log = open(&whole);
        // One sparse segment a sweep.
        for _ in 0..3 {
            log.maintain().unwrap();
        }
        let dropped = sparse.iter().filter(|sparse| **sparse).count() as u64;
        assert_eq!(
            log.stats().drops_count,
            dropped,
            "{sparse:?}: {:?}",
            log.stats()
        );
        assert!(log.stats().carried_count >= dropped, "{sparse:?}");
        drop(log);
        let crash = CrashOptions {
            base,
            outcomes_max: 4,
            seeded_count: 1,
            inside_count: 0,
            ..CrashOptions::default()
        };
        let scenario = |disk: &SimDisk| {
            if let Ok(log) = options(&clock).open_on(disk.dir()) {
                for _ in 0..3 {
                    let _unused = log.maintain();
                }
            }
        };
        for_each_crash_point(&crash, scenario, |state| {
            let what = format!("{sparse:?} {state}");
            for rebuilt in [false, true] {
                let disk = state.disk.after_kill();
                if rebuilt {
                    remove_index(&disk);
                }
                let log = open(&disk);
                compare(&filter(&log), &twin, &what);
                for _ in 0..3 {
                    log.maintain().unwrap();
                }
                compare(&filter(&log), &twin, &what);
                drop(log);
                if rebuilt {
                    remove_index(&disk);
                    aftermath(&disk, &open, &twin, &what);
                }
            }
        });
    }
}

/// Random calls against a twin; after each few the index is built again from the log.
#[test]
fn c39_random_calls_answer_as_a_twin_and_a_rebuild_from_the_log_answers_the_same() {
    for seed in 0..6 {
        let clock = clock();
        let mut now = super::START_MS;
        let mut rng = Rng::new(seed);
        let open = |disk: &SimDisk| options(&clock).open_on(disk.dir()).unwrap();
        let disk = SimDisk::memory();
        let mut log = open(&disk);
        // The moment of expiry of each key; `u64::MAX` is never.
        let mut until: BTreeMap<String, u64> = BTreeMap::new();
        for step in 0..500 {
            let what = format!("seed {seed} step {step}");
            let key = long("key", rng.below(40));
            let seen = until.get(&key).is_some_and(|until| now < *until);
            match rng.below(10) {
                0..6 => {
                    let seconds = [10, 100, 1000, 0][rng.below(4)];
                    let retention = match seconds {
                        0 => Retention::Forever,
                        s => Duration::from_secs(s).into(),
                    };
                    let asked = ObserveOptions::new().retention(retention);
                    let observed = filter(&log).observe_with(&key, &asked).unwrap();
                    assert_eq!(observed.is_new(), !seen, "{what}");
                    if !seen {
                        let end = (now + seconds * 1000).div_ceil(1000) * 1000;
                        until.insert(key, if seconds == 0 { u64::MAX } else { end });
                    }
                }
                6 | 7 => {
                    assert!(filter(&log).forget(&key).unwrap().is_applied());
                    until.remove(&key);
                }
                8 => {
                    let ms = [1, 9_000, 40_000][rng.below(3)];
                    clock.advance_ms(ms);
                    now += ms;
                    log.maintain().unwrap();
                }
                _ => log.maintain().unwrap(),
            }
            if step % 25 == 24 {
                let mut twin = Twin::new();
                for n in 0..42 {
                    let key = long("key", n);
                    let seen = until.get(&key).is_some_and(|until| now < *until);
                    twin.insert(key, seen);
                }
                compare(&filter(&log), &twin, &what);
                let killed = disk.after_kill();
                remove_index(&killed);
                compare(&filter(&open(&killed)), &twin, &format!("{what}, rebuilt"));
                drop(log);
                log = open(&disk);
                compare(&filter(&log), &twin, &format!("{what}, reopened"));
            }
        }
        assert!(log.stats().segments_count < 60, "{:?}", log.stats());
        log.close().unwrap();
        assert!(verified(&disk).is_ok());
    }
}

/// The same store at an early and at a late moment, with a hint and runs at both.
fn two_moments(clock: &Arc<ManualClock>) -> (SimDisk, Twin, SimDisk, Twin) {
    let wide = |disk: &SimDisk| {
        let options = options(clock).segment_bytes(512 * 1024);
        options.open_on(disk.dir()).unwrap()
    };
    let minute = ObserveOptions::new().retention(Duration::from_secs(60));
    let disk = SimDisk::memory();
    let mut twin = Twin::new();
    let write = |log: &DedupLog, from: usize, count: usize, twin: &mut Twin| {
        let keys: Vec<String> = (from..from + count).map(|n| format!("key-{n}")).collect();
        for answer in filter(log).observe_many(&keys).unwrap() {
            assert!(answer.unwrap().is_new());
        }
        twin.extend(keys.into_iter().step_by(17).map(|key| (key, true)));
    };
    let log = wide(&disk);
    let short: Vec<String> = (0..3000).map(|n| format!("short-{n}")).collect();
    for answer in filter(&log).observe_many_with(&short, &minute).unwrap() {
        assert!(answer.unwrap().is_new());
    }
    write(&log, 0, 10_000, &mut twin);
    log.maintain().unwrap();
    log.close().unwrap();
    let (early, early_twin) = (disk.after_kill(), twin.clone());
    let log = wide(&disk);
    clock.advance_ms(61_000);
    write(&log, 10_000, 10_000, &mut twin);
    for n in (0..1000).step_by(2) {
        assert!(
            filter(&log)
                .forget(format!("key-{n}"))
                .unwrap()
                .is_applied()
        );
        twin.insert(format!("key-{n}"), false);
    }
    for _ in 0..3 {
        log.maintain().unwrap();
    }
    assert!(log.stats().drops_count > 0);
    log.close().unwrap();
    twin.extend((0..3000).step_by(37).map(|n| (format!("short-{n}"), false)));
    (early, early_twin, disk, twin)
}

#[test]
fn c29_an_index_of_the_same_store_at_another_moment_is_not_believed() {
    let clock = clock();
    let (early, early_twin, late, late_twin) = two_moments(&clock);
    let wide = |disk: &SimDisk| {
        let options = options(&clock).segment_bytes(512 * 1024);
        options.open_on(disk.dir()).unwrap()
    };
    let indexes = |disk: &SimDisk| -> BTreeMap<String, Vec<u8>> {
        let files = image(disk).into_iter();
        files.filter(|(name, _)| is_index(name)).collect()
    };
    let hints = |disk: &SimDisk| disk.file_names().iter().any(|n| n.starts_with("hint-"));
    assert!(hints(&early) || hints(&late), "no hint at either moment");
    // The old index put back, and the index of a log that was cut back.
    for (log, index, twin) in [(&late, &early, &late_twin), (&early, &late, &early_twin)] {
        // With its own index beside it, and alone.
        for alone in [false, true] {
            let disk = log.after_kill();
            if alone {
                remove_index(&disk);
            }
            for (name, content) in indexes(index) {
                disk.write_file(&name, content);
            }
            let opened = wide(&disk);
            compare(&filter(&opened), twin, "the index of another moment");
            assert!(opened.health().ok);
            drop(opened);
            compare(&filter(&wide(&disk)), twin, "opened again");
            // A hint that is not believed may stay until the next one replaces it.
            let report = verified(&disk);
            let is_hint = |problem: &idemlog::Problem| problem.file.starts_with("hint-");
            assert!(report.problems.iter().all(is_hint), "{:?}", report.problems);
        }
        // Under the names of today, each in the place of each.
        for name in indexes(log).keys() {
            let suffix = &name[name.len() - 4..];
            for content in indexes(index).iter().filter(|(n, _)| n.ends_with(suffix)) {
                let disk = log.after_kill();
                disk.write_file(name, content.1.clone());
                let opened = wide(&disk);
                compare(&filter(&opened), twin, &format!("{} as {name}", content.0));
            }
        }
    }
}
