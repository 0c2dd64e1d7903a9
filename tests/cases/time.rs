//! Time: retention and leases of nothing and of for ever, the exact moment, and expiry that races.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::SimDisk;
use idemlog::{
    ClaimOptions, ClaimVerdict, Commit, CommitVerdict, DedupLog, KeyState, ObserveOptions,
    Repeatable, Retention,
};

use super::{clock, filter, long, new, options, remove_index, small};

/// 1 ms, 1 s, 1.5 s and their neighbours; a century; the largest; and never.
const RETENTIONS: [Retention; 10] = [
    Retention::For(Duration::ZERO),
    Retention::For(Duration::from_nanos(1)),
    Retention::For(Duration::from_millis(1)),
    Retention::For(Duration::from_millis(999)),
    Retention::For(Duration::from_secs(1)),
    Retention::For(Duration::from_millis(1500)),
    Retention::For(Duration::from_secs(60)),
    Retention::For(Duration::from_secs(100 * 365 * 86_400)),
    Retention::For(Duration::MAX),
    Retention::Forever,
];

/// The rule: expired from the first whole second on that is not before the end of the retention.
fn expires_after_ms(retention: Retention, offset_ms: u64) -> Option<u64> {
    let Retention::For(length) = retention else {
        return None;
    };
    // A hundred years do not fit what the format keeps: that is for ever.
    if length > Duration::from_secs(80 * 365 * 86_400) {
        return None;
    }
    let end = Duration::from_millis(offset_ms) + length;
    let seconds = end.as_secs() + u64::from(end.subsec_nanos() > 0);
    Some(seconds * 1000 - offset_ms)
}

/// A filter key and a committed one, both with this retention, in a sealed or an unsealed segment.
fn remembered(disk: &SimDisk, clock: &Arc<ManualClock>, retention: Retention, sealed: bool) {
    let log = options(clock).open_on(disk.dir()).unwrap();
    let asked = ObserveOptions::new().retention(retention);
    assert!(filter(&log).observe_with("k", &asked).unwrap().is_new());
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let commit = Commit::without_outcome().retention(retention);
    let committed = new(jobs.claim("k").unwrap()).commit_with(commit).unwrap();
    assert!(matches!(committed, CommitVerdict::Committed { .. }));
    if sealed {
        for n in 0..40 {
            assert!(filter(&log).observe(long("fill", n)).unwrap().is_new());
        }
        log.maintain().unwrap();
        assert!(log.stats().seals_count > 0);
    }
}

/// Asks in all four places: look-up, batch, after upkeep, and after a rebuild from the log.
fn is_known(disk: &SimDisk, clock: &Arc<ManualClock>, expected: bool, what: &str) {
    for rebuilt in [false, true] {
        let disk = disk.after_kill();
        if rebuilt {
            remove_index(&disk);
        }
        let log = options(clock).open_on(disk.dir()).unwrap();
        let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
        for maintained in [false, true] {
            let what = format!("{what}, rebuilt {rebuilt}, maintained {maintained}");
            if maintained {
                for _ in 0..3 {
                    log.maintain().unwrap();
                }
            }
            let state = filter(&log).get("k").unwrap();
            assert_eq!(state == KeyState::Seen, expected, "{what}");
            let many = filter(&log).check_many(&["k"]).unwrap().pop().unwrap();
            assert_eq!(many.unwrap(), expected, "{what}");
            let done = matches!(jobs.get("k").unwrap(), KeyState::Done(_));
            assert_eq!(done, expected, "{what}");
        }
        let verdict = jobs.claim("k").unwrap();
        assert_eq!(
            matches!(verdict, ClaimVerdict::Duplicate(_)),
            expected,
            "{what}"
        );
        assert_eq!(
            filter(&log).observe("k").unwrap().is_new(),
            !expected,
            "{what}"
        );
    }
}

#[test]
fn c38_every_retention_holds_to_the_millisecond_in_each_place_and_after_each_reopen() {
    for retention in RETENTIONS {
        for offset_ms in [0, 1, 500, 999] {
            for sealed in [false, true] {
                let disk = SimDisk::memory();
                let clock = clock();
                clock.advance_ms(offset_ms);
                remembered(&disk, &clock, retention, sealed);
                let what = format!("{retention:?} set at .{offset_ms}, sealed {sealed}");
                match expires_after_ms(retention, offset_ms) {
                    // At once: remembered not at all, or to the end of the second.
                    Some(0) => is_known(&disk, &clock, false, &what),
                    Some(ms) => {
                        is_known(&disk, &clock, true, &format!("{what}, at once"));
                        clock.advance_ms(ms - 1);
                        is_known(&disk, &clock, true, &format!("{what}, the moment before"));
                        clock.advance_ms(1);
                        is_known(&disk, &clock, false, &format!("{what}, the moment"));
                        clock.advance_ms(1);
                        is_known(&disk, &clock, false, &format!("{what}, the moment after"));
                    }
                    None => {
                        clock.advance_ms(70 * 365 * 86_400_000);
                        is_known(&disk, &clock, true, &format!("{what}, after 70 years"));
                    }
                }
            }
        }
    }
}

#[test]
fn c38_every_lease_excludes_to_the_millisecond_and_the_longest_for_ever() {
    let leases = [
        (Duration::ZERO, Some(0)),
        (Duration::from_millis(1), Some(1)),
        (Duration::from_secs(1), Some(1000)),
        (Duration::from_millis(1500), Some(1500)),
        (Duration::from_secs(100 * 365 * 86_400), None),
        (Duration::MAX, None),
    ];
    for (lease, ends_ms) in leases {
        for detached in [false, true] {
            for offset_ms in [0, 999] {
                let what = format!("{lease:?} at .{offset_ms}, detached {detached}");
                let disk = SimDisk::memory();
                let clock = clock();
                clock.advance_ms(offset_ms);
                let mut log = options(&clock).open_on(disk.dir()).unwrap();
                let mut jobs = log.namespace::<Repeatable>("j", small()).unwrap();
                let asked = ClaimOptions::new().lease(lease).detached(detached);
                let claim = new(jobs.claim_with("k", &asked).unwrap());
                let mut held = Some(claim);
                if detached {
                    // A detached lease outlives its opener, by the same moment.
                    drop(held.take().map(idemlog::Claim::detach));
                    drop((jobs, log));
                    log = options(&clock).open_on(disk.dir()).unwrap();
                    jobs = log.namespace::<Repeatable>("j", small()).unwrap();
                }
                let is_busy = || {
                    let KeyState::Pending { lease_left, .. } = jobs.get("k").unwrap() else {
                        panic!("{what}")
                    };
                    !lease_left.is_zero()
                };
                match ends_ms {
                    Some(ends_ms) => {
                        if ends_ms > 0 {
                            assert!(is_busy(), "{what}: at once");
                            clock.advance_ms(ends_ms - 1);
                            assert!(is_busy(), "{what}: the moment before");
                            let verdict = jobs.claim("k").unwrap();
                            assert!(matches!(verdict, ClaimVerdict::Busy { .. }), "{what}");
                            clock.advance_ms(1);
                        }
                        assert!(!is_busy(), "{what}: the moment");
                        let verdict = jobs.claim("k").unwrap();
                        assert!(matches!(verdict, ClaimVerdict::Takeover { .. }), "{what}");
                    }
                    None => {
                        clock.advance_ms(50 * 365 * 86_400_000);
                        assert!(is_busy(), "{what}: after 50 years");
                        let verdict = jobs.claim("k").unwrap();
                        assert!(matches!(verdict, ClaimVerdict::Busy { .. }), "{what}");
                    }
                }
                drop(held);
                assert!(log.health().ok, "{what}");
            }
        }
    }
}

#[test]
fn c08_by_the_sizing_rule_no_redelivery_is_new_and_below_it_the_stats_show_the_window() {
    const MINUTE: u64 = 60_000;
    // Retention, work, and redelivery after the first delivery, in minutes; is it a duplicate?
    let table = [
        (5, 7, 6, None),
        (5, 7, 11, Some(true)),
        (5, 7, 12, Some(false)),
        (5, 1, 5, Some(true)),
        (5, 1, 6, Some(false)),
        // A dead-letter redrive after a day.
        (24 * 60 + 8, 7, 24 * 60, Some(true)),
        (5, 7, 24 * 60, Some(false)),
    ];
    for (retention, work, redelivery, expected) in table {
        for lease in [1, 10, 100] {
            let what =
                format!("{retention} min, work {work}, again at {redelivery}, lease {lease}");
            let clock = clock();
            let log = options(&clock).open_in_memory().unwrap();
            let space = small()
                .retention(Duration::from_millis(retention * MINUTE))
                .lease(Duration::from_millis(lease * MINUTE));
            let jobs = log.namespace::<Repeatable>("j", space).unwrap();
            let mut claim = new(jobs.claim("k").unwrap());
            let mut passed = 0;
            let mut redelivered = |until: u64, claimed: &mut bool| {
                let end = redelivery.min(until);
                clock.advance_ms((end - passed) * MINUTE);
                passed = end;
                for _ in 0..2 {
                    log.maintain().unwrap();
                }
                if passed == redelivery && !*claimed {
                    *claimed = true;
                    return Some(jobs.claim("k").unwrap());
                }
                None
            };
            let mut asked = false;
            let during = redelivered(work, &mut asked);
            if let Some(verdict) = during {
                // While the work goes on: the claim is there, whatever the retention is.
                match verdict {
                    ClaimVerdict::Busy { .. } => assert!(lease > redelivery, "{what}"),
                    ClaimVerdict::Takeover { .. } => assert!(lease <= redelivery, "{what}"),
                    other => panic!("{what}: {other:?}"),
                }
                assert_eq!(expected, None, "{what}");
                continue;
            }
            let verdict = claim.commit_with(Commit::without_outcome()).unwrap();
            assert!(
                matches!(verdict, CommitVerdict::Committed { .. }),
                "{what}: {verdict:?}"
            );
            let verdict = redelivered(u64::MAX, &mut asked).unwrap();
            let duplicate = matches!(verdict, ClaimVerdict::Duplicate(_));
            assert_eq!(Some(duplicate), expected, "{what}: {verdict:?}");
            let window = log.stats().window;
            assert!(
                window <= Duration::from_millis(redelivery * MINUTE),
                "{what}: {window:?}"
            );
        }
    }
}

/// Threads observe, read and sweep while keys expire under them; time moves between the rounds.
#[test]
fn c61_in_each_period_each_key_is_new_once_although_threads_sweep_what_expires() {
    const KEYS: usize = 16;
    const THREADS: usize = 12;
    const PERIODS: usize = 25;
    let clock = clock();
    let log = options(&clock).open_in_memory().unwrap();
    let short = log
        .filter("short", small().retention(Duration::from_secs(1)))
        .unwrap();
    let (start, end) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    let over = AtomicBool::new(false);
    let news: Vec<AtomicUsize> = (0..KEYS).map(|_| AtomicUsize::new(0)).collect();
    // Counted, and judged at the end: a thread that panicked would leave the others waiting.
    let (missing, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let mut counts = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                failed.fetch_add(usize::from(log.maintain().is_err()), Ordering::Relaxed);
            }
        });
        for thread in 0..THREADS {
            let (start, end, news, short) = (&start, &end, &news, &short);
            let (missing, failed) = (&missing, &failed);
            scope.spawn(move || {
                for _ in 0..PERIODS {
                    start.wait();
                    for n in 0..KEYS {
                        let n = (n * 5 + thread) % KEYS;
                        let key = long("key", n);
                        match short.observe(&key) {
                            Ok(seen) => news[n].fetch_add(seen.is_new().into(), Ordering::Relaxed),
                            Err(_) => failed.fetch_add(1, Ordering::Relaxed),
                        };
                        // Younger than its retention: never missing.
                        let there = matches!(short.get(&key), Ok(KeyState::Seen));
                        missing.fetch_add((!there).into(), Ordering::Relaxed);
                    }
                    end.wait();
                }
            });
        }
        for _ in 0..PERIODS {
            start.wait();
            end.wait();
            let now: Vec<_> = news
                .iter()
                .map(|count| count.load(Ordering::Relaxed))
                .collect();
            counts.push(now);
            clock.advance_ms(1000);
        }
        over.store(true, Ordering::Release);
    });
    assert_eq!((missing.into_inner(), failed.into_inner()), (0, 0));
    for (period, counts) in counts.iter().enumerate() {
        let once = counts.iter().all(|count| *count == period + 1);
        assert!(once, "period {period}: {counts:?}");
    }
    assert!(log.stats().drops_count > 0, "nothing was swept");
}

/// The controlled pause: found expired, recorded again, and only then removed.
#[test]
fn c61_what_was_found_expired_is_removed_and_what_came_after_it_stays() {
    for reopened in [false, true] {
        let (disk, clock) = (SimDisk::memory(), clock());
        let open = || options(&clock).open_on(disk.dir()).unwrap();
        let mut log = open();
        let minute = ObserveOptions::new().retention(Duration::from_secs(60));
        let keys: Vec<String> = (0..60).map(|n| long("key", n)).collect();
        for round in 0..5 {
            for key in &keys {
                // Found expired by this look-up; the sweep has not removed it yet.
                assert_eq!(filter(&log).get(key).unwrap(), KeyState::Absent, "{round}");
                assert!(
                    filter(&log).observe_with(key, &minute).unwrap().is_new(),
                    "{round}"
                );
            }
            for _ in 0..3 {
                log.maintain().unwrap();
            }
            if reopened {
                drop(log);
                log = open();
            }
            for key in &keys {
                assert_eq!(filter(&log).get(key).unwrap(), KeyState::Seen, "{round}");
            }
            clock.advance_ms(60_000);
        }
        for _ in 0..3 {
            log.maintain().unwrap();
        }
        assert!(log.stats().drops_count > 0);
    }
}

/// The same for records of claims: a shorter retention, a longer one, a forgotten and new one.
#[test]
fn c27_the_last_commit_decides_about_expiry_whatever_stands_in_older_segments() {
    let (disk, clock) = (SimDisk::memory(), clock());
    let open = || options(&clock).open_on(disk.dir()).unwrap();
    let commit = |log: &DedupLog, key: &str, seconds: u64| {
        let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
        let retention = match seconds {
            0 => Retention::Forever,
            s => Duration::from_secs(s).into(),
        };
        let _unused = jobs.forget(key, true).unwrap();
        let commit = Commit::without_outcome().retention(retention);
        let _committed = new(jobs.claim(key).unwrap()).commit_with(commit).unwrap();
    };
    // Key, and its retentions one after the other, each in a segment of its own.
    let writes: [(&str, [u64; 3]); 4] = [
        ("never, then 3 s", [0, 0, 3]),
        ("10 s, then 60 s", [10, 10, 60]),
        ("60 s, then 5 s", [60, 60, 5]),
        ("5 s, then never", [5, 60, 0]),
    ];
    let log = open();
    for round in 0..3 {
        for (key, retentions) in writes {
            commit(&log, key, retentions[round]);
        }
        for n in 0..40 {
            let key = long(&format!("fill{round}"), n);
            assert!(filter(&log).observe(key).unwrap().is_new());
        }
    }
    assert!(log.stats().seals_count >= 3);
    drop(log);
    for at in 0..65 {
        for rebuilt in [false, true] {
            let disk = disk.after_kill();
            if rebuilt {
                remove_index(&disk);
            }
            let log = options(&clock).open_on(disk.dir()).unwrap();
            let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
            for maintained in [false, true] {
                if maintained {
                    for _ in 0..2 {
                        log.maintain().unwrap();
                    }
                }
                for (key, [_, _, last]) in writes {
                    let known = matches!(jobs.get(key).unwrap(), KeyState::Done(_));
                    assert_eq!(known, last == 0 || at < last, "{key} at {at} s, {rebuilt}");
                }
            }
        }
        clock.advance_ms(1000);
    }
}
