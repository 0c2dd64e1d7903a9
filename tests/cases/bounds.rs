//! Bounds that do not grow with the number of keys: memory, what an open reads, and what an idle
//! or a killed store keeps. Counted, not timed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{CrashOptions, Rng, SimDisk, for_each_crash_point};
use idemlog::{DedupLog, KeyState, ObserveOptions, Observed, Options, Stats};

use super::{
    Twin, aftermath, bytes_of_files, clock, compare, filter, is_index, long, options, remove_index,
    small, verified,
};

fn wide(clock: &Arc<ManualClock>) -> Options {
    options(clock).segment_bytes(64 * 1024)
}

/// A killed store of so many keys, and its stats before the kill.
fn store_of(clock: &Arc<ManualClock>, keys: usize, retention: Duration) -> (SimDisk, Stats) {
    let disk = SimDisk::memory();
    let log = wide(clock).open_on(disk.dir()).unwrap();
    let asked = ObserveOptions::new().retention(retention);
    let keys: Vec<String> = (0..keys).map(|n| format!("key-{n}")).collect();
    for chunk in keys.chunks(500) {
        let answers = filter(&log).observe_many_with(chunk, &asked).unwrap();
        assert!(answers.into_iter().all(|answer| answer.unwrap().is_new()));
    }
    log.maintain().unwrap();
    let stats = log.stats();
    (disk.after_kill(), stats)
}

const YEAR: Duration = Duration::from_secs(365 * 86_400);

#[test]
fn c58_tables_in_memory_do_not_grow_with_the_keys_and_come_back_when_they_expire() {
    let clock = clock();
    let (few, few_stats) = store_of(&clock, 10_000, YEAR);
    let (many, many_stats) = store_of(&clock, 80_000, YEAR);
    // Eight times the keys: the same table, and at most two bytes a key of filters.
    assert!(
        many_stats.table_bytes <= few_stats.table_bytes * 2,
        "{few_stats:?}\n{many_stats:?}"
    );
    assert!(many_stats.filter_bytes < 80_000 * 2, "{many_stats:?}");
    assert!(many_stats.segments_count > 4 * few_stats.segments_count);
    for (disk, keys) in [(&few, 10_000), (&many, 80_000)] {
        let clock = super::clock();
        let log = wide(&clock).open_on(disk.dir()).unwrap();
        assert!(
            log.stats().table_bytes <= few_stats.table_bytes * 2,
            "{:?}",
            log.stats()
        );
        // A working set of all keys, from first to last.
        for n in (0..keys).step_by(11) {
            let key = format!("key-{n}");
            assert_eq!(filter(&log).observe(key).unwrap(), Observed::Duplicate);
        }
        for n in keys..keys + 500 {
            assert_eq!(
                filter(&log).get(format!("key-{n}")).unwrap(),
                KeyState::Absent
            );
        }
        clock.advance_ms(400 * 86_400_000);
        for _ in 0..4 {
            log.maintain().unwrap();
        }
        let stats = log.stats();
        assert_eq!((stats.run_bytes, stats.filter_bytes), (0, 0), "{stats:?}");
        assert!(stats.log_bytes < 300 * 1024, "{stats:?}");
        assert!(stats.table_bytes <= few_stats.table_bytes * 2, "{stats:?}");
    }
}

#[test]
fn c66_an_open_after_a_kill_reads_what_was_not_sealed_at_any_size() {
    let clock = clock();
    let mut read_at_size = Vec::new();
    for keys in [10_000, 80_000] {
        // Killed just after a seal, just before the next, and anywhere between.
        let (sealed, stats) = store_of(&clock, keys, YEAR);
        let per_segment = keys as u64 / stats.segments_count * 2;
        for more in [0, 300, 700, 1100] {
            let disk = sealed.after_kill();
            let log = wide(&clock).open_on(disk.dir()).unwrap();
            let late: Vec<String> = (0..more).map(|n| format!("late-{n}")).collect();
            for answer in filter(&log).observe_many(&late).unwrap() {
                assert!(answer.unwrap().is_new());
            }
            let killed = disk.after_kill();
            let before = killed.counts().read_bytes;
            let log = wide(&clock).open_on(killed.dir()).unwrap();
            let read = killed.counts().read_bytes - before;
            let report = log.open_report();
            assert_eq!(report.rebuilt_runs_count, 0, "{report:?}");
            assert!(report.replayed_count <= per_segment * 2, "{report:?}");
            // At most the active segment, a full one and a prepared one are read, the manifest,
            // and a header of each of the others.
            let headers = stats.segments_count * 256;
            assert!(
                read < 4 * 64 * 1024 + headers,
                "{keys} keys, {more} more: {read} bytes"
            );
            read_at_size.push((keys, more, read - headers.min(read)));
            for n in (0..keys).step_by(997) {
                assert_eq!(
                    filter(&log).get(format!("key-{n}")).unwrap(),
                    KeyState::Seen
                );
            }
        }
    }
    println!("bytes read by an open beside headers: {read_at_size:?}");
}

#[test]
fn c66_one_bad_index_costs_one_segment_and_a_whole_rebuild_reports_its_progress() {
    let clock = clock();
    let (killed, _) = store_of(&clock, 40_000, YEAR);
    let runs: Vec<String> = killed
        .file_names()
        .into_iter()
        .filter(|name| name.ends_with(".idx"))
        .collect();
    assert!(runs.len() > 3, "{runs:?}");
    let segments_of = |name: &String| {
        let number = |at: usize| name[at..at + 12].parse::<u64>().unwrap();
        number(17) - number(4) + 1
    };
    for (n, name) in runs.iter().enumerate() {
        let disk = killed.after_kill();
        let mut bad = disk.read_file(name).unwrap();
        bad[40] ^= 1;
        disk.write_file(name, bad);
        let log = wide(&clock).open_on(disk.dir()).unwrap();
        let report = log.open_report();
        assert!(
            (1..=segments_of(name)).contains(&report.rebuilt_runs_count),
            "run {n}: {report:?}"
        );
        compare_some(&log);
    }
    let disk = killed.after_kill();
    assert!(remove_index(&disk) > 0);
    let told = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&told);
    let log = wide(&clock)
        .on_progress(move |done, all| {
            assert!(done <= all && all > 0, "{done} of {all}");
            count.fetch_add(1, Ordering::Relaxed);
        })
        .open_on(disk.dir())
        .unwrap();
    assert!(
        log.open_report().rebuilt_runs_count > 10,
        "{:?}",
        log.open_report()
    );
    assert!(
        told.load(Ordering::Relaxed) > 3,
        "a rebuild that says nothing"
    );
    compare_some(&log);
}

fn compare_some(log: &DedupLog) {
    for n in (0..40_000).step_by(1999) {
        assert_eq!(filter(log).get(format!("key-{n}")).unwrap(), KeyState::Seen);
    }
    assert_eq!(filter(log).get("stranger").unwrap(), KeyState::Absent);
}

#[test]
fn c66_fifty_reopens_with_little_writing_in_between_cost_the_same_each() {
    let clock = clock();
    let (disk, _) = store_of(&clock, 10_000, YEAR);
    let mut costs = Vec::new();
    for round in 0..50 {
        let before = disk.counts().read_bytes;
        let log = wide(&clock).open_on(disk.dir()).unwrap();
        let read = disk.counts().read_bytes - before;
        costs.push((
            read,
            log.open_report().replayed_count,
            disk.file_names().len(),
        ));
        assert!(
            filter(&log)
                .observe(format!("round-{round}"))
                .unwrap()
                .is_new()
        );
        if round % 2 == 0 {
            log.close().unwrap();
        } else {
            // A kill: what was written is there, nothing was tidied.
            let killed = disk.after_kill();
            drop(log);
            let log = wide(&clock).open_on(killed.dir()).unwrap();
            for n in 0..=round {
                let key = format!("round-{n}");
                assert_eq!(filter(&log).get(key).unwrap(), KeyState::Seen);
            }
        }
    }
    let (first, last) = (costs[1], costs[49]);
    assert!(last.0 <= first.0 + 64 * 1024, "{costs:?}");
    assert!(last.1 <= first.1 + 50, "{costs:?}");
    assert!(last.2 <= first.2 + 1, "{costs:?}");
}

/// Waits for what background threads do by themselves; no call is made that could do it.
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "not within a minute: {what}"
        );
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

#[test]
fn c19_a_store_that_only_stands_open_frees_its_space_by_itself_and_stays_empty() {
    let clock = clock();
    let (disk, full) = store_of(&clock, 20_000, Duration::from_secs(60));
    let log = wide(&clock).background(true).open_on(disk.dir()).unwrap();
    clock.advance_ms(61_000);
    wait_until("expired segments are dropped", || {
        let stats = log.stats();
        stats.run_bytes == 0 && stats.log_bytes * 4 < full.log_bytes
    });
    log.close().unwrap();
    let mut sizes = Vec::new();
    for _ in 0..3 {
        let log = wide(&clock).open_on(disk.dir()).unwrap();
        let report = log.open_report().clone();
        assert!(report.replayed_count < 3000, "{report:?}");
        for n in (0..20_000).step_by(37) {
            assert_eq!(
                filter(&log).get(format!("key-{n}")).unwrap(),
                KeyState::Absent
            );
        }
        log.maintain().unwrap();
        log.close().unwrap();
        assert!(verified(&disk).is_ok(), "{:?}", verified(&disk).problems);
        let index = disk
            .file_names()
            .iter()
            .filter(|name| is_index(name))
            .count();
        sizes.push((bytes_of_files(&disk), disk.file_names().len(), index));
    }
    assert!(sizes[1] == sizes[2] && sizes[2].2 == 0, "{sizes:?}");
}

/// A store of which two segments have expired and one is sparse, closed before that moment.
fn due(clock: &Arc<ManualClock>) -> (SimDisk, Twin) {
    let disk = SimDisk::new();
    let log = options(clock).open_on(disk.dir()).unwrap();
    let minute = ObserveOptions::new().retention(Duration::from_secs(60));
    let mut twin = Twin::new();
    for n in 0..100 {
        let kept = n % 23 == 0 && n > 60;
        let key = long("key", n);
        let asked = if kept {
            ObserveOptions::new()
        } else {
            minute.clone()
        };
        assert!(filter(&log).observe_with(&key, &asked).unwrap().is_new());
        twin.insert(key, kept);
    }
    log.maintain().unwrap();
    log.close().unwrap();
    clock.advance_ms(61_000);
    (disk, twin)
}

#[test]
fn c43_killed_at_each_step_of_upkeep_the_next_opener_does_it_all_and_removes_what_was_half_done() {
    let clock = clock();
    let (base, twin) = due(&clock);
    let whole = base.after_kill();
    let log = options(&clock).open_on(whole.dir()).unwrap();
    for _ in 0..4 {
        log.maintain().unwrap();
    }
    assert!(
        log.stats().drops_count >= 3 && log.stats().carried_count > 0,
        "{:?}",
        log.stats()
    );
    log.close().unwrap();
    let bytes = bytes_of_files(&whole);
    let crash = CrashOptions {
        base,
        seeded_count: 2,
        inside_count: 1,
        ..CrashOptions::default()
    };
    let scenario = |disk: &SimDisk| {
        if let Ok(log) = options(&clock).open_on(disk.dir()) {
            for _ in 0..4 {
                let _unused = log.maintain();
            }
        }
    };
    let mut killed = Vec::new();
    for_each_crash_point(&crash, scenario, |state| {
        let what = state.to_string();
        killed.push(state.disk.after_kill());
        let log = options(&clock).open_on(state.disk.dir()).unwrap();
        compare(&filter(&log), &twin, &what);
        for _ in 0..4 {
            log.maintain().unwrap();
        }
        log.close().unwrap();
        let grown = bytes_of_files(&state.disk);
        assert!(
            grown <= bytes + 2 * 4096,
            "{what}: {grown} bytes, {bytes} without a kill"
        );
        let open = |disk: &SimDisk| options(&clock).open_on(disk.dir()).unwrap();
        aftermath(&state.disk, &open, &twin, &what);
    });
    // Twenty of them at random, with the real threads: nobody calls for upkeep. A second store
    // of the same process, whose disk is dead, is not in the way.
    let dead = SimDisk::new();
    let other = Options::new()
        .segment_bytes(4096)
        .open_on(dead.dir())
        .unwrap();
    let mut rng = Rng::new(43);
    for round in 0..20 {
        dead.stop_at(0);
        let disk = killed[rng.below(killed.len())].after_kill();
        let log = options(&clock)
            .background(true)
            .open_on(disk.dir())
            .unwrap();
        wait_until(&format!("upkeep, round {round}"), || {
            bytes_of_files(&disk) <= bytes + 3 * 4096
        });
        compare(&filter(&log), &twin, &format!("round {round}"));
        assert!(log.health().ok, "{:?}", log.health());
    }
    let _unused = filter_of(&other);
}

fn filter_of(log: &DedupLog) -> idemlog::Result<idemlog::Filter> {
    log.filter("f", small())
}
