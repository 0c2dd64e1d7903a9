//! Many threads: one winner a key, and no answer before what it rests on is durable.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{PowerCut, SimDisk};
use idemlog::{
    ClaimOptions, ClaimVerdict, Commit, CommitVerdict, DedupLog, Durability, ErrorKind, KeyState,
    NamespaceOptions, NonRepeatable, Observed, Options, Probeable, Probed, Repeatable, Retention,
    RunVerdict, WhenFull,
};

const START_MS: u64 = 1_700_000_000_000;
const THREADS: usize = 16;

fn small() -> NamespaceOptions {
    NamespaceOptions::new()
        .outcome_bytes_max(0)
        .retention(Retention::Forever)
}

fn options(segment_bytes: u32) -> Options {
    Options::new().segment_bytes(segment_bytes)
}

/// Runs `body` on so many threads at once; a panic or a deadlock of one is the test's.
fn together(threads: usize, body: impl Fn(usize) + Send + Sync + 'static) {
    let body = Arc::new(body);
    let (done, finished) = mpsc::channel();
    for thread in 0..threads {
        let (body, done) = (Arc::clone(&body), done.clone());
        let run = move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(thread)));
            done.send(result.is_ok()).unwrap();
        };
        std::thread::Builder::new()
            .name(format!("test-{thread}"))
            .spawn(run)
            .unwrap();
    }
    for _ in 0..threads {
        let fine = finished
            .recv_timeout(Duration::from_secs(60))
            .expect("a thread is stuck");
        assert!(fine, "a thread panicked");
    }
}

/// All threads observe the same keys in the same order, one barrier a key.
fn race_to_observe(segment_bytes: u32, durability: Durability, keys: usize) {
    let disk = SimDisk::memory();
    let log = options(segment_bytes)
        .durability(durability)
        .open_on(disk.dir())
        .unwrap();
    let filter = log.filter("f", small()).unwrap();
    let news: Arc<Vec<AtomicUsize>> = Arc::new((0..keys).map(|_| AtomicUsize::new(0)).collect());
    let barrier = Arc::new(Barrier::new(THREADS));
    let counted = Arc::clone(&news);
    together(THREADS, move |_| {
        for (number, count) in counted.iter().enumerate() {
            if number % 8 == 0 {
                barrier.wait();
            }
            if filter.observe(format!("key-{number:08}")).unwrap().is_new() {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let wins: Vec<_> = news
        .iter()
        .map(|count| count.load(Ordering::Relaxed))
        .collect();
    assert!(wins.iter().all(|wins| *wins == 1), "{wins:?}");
    let stats = log.stats();
    assert_eq!(stats.new_count as usize, keys);
    assert_eq!(stats.duplicates_count as usize, keys * (THREADS - 1));
    log.close().unwrap();
    let log = options(segment_bytes).open_on(disk.dir()).unwrap();
    let filter = log.filter("f", small()).unwrap();
    for number in 0..keys {
        let key = format!("key-{number:08}");
        assert_eq!(filter.observe(key).unwrap(), Observed::Duplicate);
    }
}

#[test]
fn c44_each_key_is_new_once_at_every_level_with_seals_in_between() {
    race_to_observe(4096, Durability::Power, 600);
    race_to_observe(4096, Durability::Process, 600);
    race_to_observe(64 * 1024, Durability::Power, 1500);
    race_to_observe(64 * 1024, Durability::Buffered, 3000);
}

#[test]
fn c44_batches_and_single_calls_race_to_one_new_a_key() {
    let log = options(8192).open_in_memory().unwrap();
    let filter = log.filter("f", small()).unwrap();
    let news = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&news);
    together(THREADS, move |thread| {
        for round in 0..40 {
            let keys: Vec<String> = (0..25).map(|n| format!("{round}-{n}")).collect();
            let answers: Vec<Observed> = if thread % 2 == 0 {
                let answers = filter.observe_many(&keys).unwrap();
                answers.into_iter().map(Result::unwrap).collect()
            } else {
                keys.iter()
                    .rev()
                    .map(|key| filter.observe(key).unwrap())
                    .collect()
            };
            let wins = answers.iter().filter(|observed| observed.is_new()).count();
            counted.fetch_add(wins, Ordering::Relaxed);
        }
    });
    assert_eq!(news.load(Ordering::Relaxed), 1000);
}

#[test]
fn c44_each_effect_runs_once_however_many_threads_try() {
    for segment_bytes in [8192, 64 * 1024] {
        let log = options(segment_bytes).open_in_memory().unwrap();
        let jobs = log
            .namespace::<NonRepeatable>("j", small().outcome_bytes_max(512))
            .unwrap();
        let runs: Arc<Vec<AtomicUsize>> = Arc::new((0..200).map(|_| AtomicUsize::new(0)).collect());
        let counted = Arc::clone(&runs);
        together(THREADS, move |thread| {
            for (number, count) in counted.iter().enumerate() {
                loop {
                    let run = jobs.run_once(format!("key-{number}"), |_| {
                        count.fetch_add(1, Ordering::SeqCst);
                        Ok(thread.to_string().into_bytes())
                    });
                    match run.unwrap() {
                        RunVerdict::Busy { .. } => std::thread::yield_now(),
                        RunVerdict::Ran { .. } | RunVerdict::Replayed(_) => break,
                        other => panic!("{other:?}"),
                    }
                }
            }
        });
        assert!(runs.iter().all(|count| count.load(Ordering::SeqCst) == 1));
        assert_eq!(log.stats().unsettled_count, 0);
    }
}

#[test]
fn claims_commits_and_takeovers_race_and_one_epoch_commits() {
    let clock = Arc::new(ManualClock::new(START_MS));
    let log = options(64 * 1024)
        .clock(Arc::clone(&clock) as _)
        .open_in_memory()
        .unwrap();
    let lease = Duration::from_millis(50);
    let jobs = log
        .namespace::<Repeatable>("j", small().outcome_bytes_max(512).lease(lease))
        .unwrap();
    let commits: Arc<Mutex<HashMap<String, Vec<u64>>>> = Arc::default();
    let (counted, handle) = (Arc::clone(&commits), jobs.clone());
    together(8, move |thread| {
        for number in 0..150 {
            let key = format!("key-{number}");
            loop {
                // Time passes all the while: leases lapse between claim and commit.
                clock.advance_ms(7);
                match handle.claim(&key).unwrap() {
                    ClaimVerdict::Duplicate(_) => break,
                    ClaimVerdict::Busy { .. } => std::thread::yield_now(),
                    verdict => {
                        let mut claim = verdict.claim().expect("a claim");
                        clock.advance_ms(if thread % 2 == 0 { 60 } else { 1 });
                        let epoch = claim.epoch().get();
                        let outcome = epoch.to_string().into_bytes();
                        match claim.commit(&outcome).unwrap() {
                            CommitVerdict::Committed { .. } => {
                                let mut commits = counted.lock().unwrap();
                                commits.entry(key.clone()).or_default().push(epoch);
                            }
                            CommitVerdict::Fenced { outcome: back, .. } => {
                                assert_eq!(back, outcome);
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                }
            }
        }
    });
    for (key, epochs) in commits.lock().unwrap().iter() {
        assert_eq!(epochs.len(), 1, "{key}: {epochs:?}");
        let KeyState::Done(done) = jobs.get(key).unwrap() else {
            panic!("{key}")
        };
        assert_eq!(
            done.outcome.bytes().unwrap(),
            epochs[0].to_string().as_bytes()
        );
    }
    assert_eq!(commits.lock().unwrap().len(), 150);
}

#[test]
fn c44_no_loser_is_told_duplicate_before_the_winner_is_durable() {
    let disk = SimDisk::new();
    let log = options(64 * 1024).open_on(disk.dir()).unwrap();
    let filter = log.filter("f", small()).unwrap();
    let jobs = log
        .namespace::<Repeatable>("j", small().outcome_bytes_max(512))
        .unwrap();
    let images = Arc::new(Mutex::new(Vec::new()));
    let taken = Arc::clone(&images);
    let photographed = disk.clone();
    together(8, move |thread| {
        for number in 0..40 {
            let key = format!("key-{number}");
            let observed = filter.observe(&key).unwrap();
            let mut jobs_done = false;
            let run = jobs.run_once(&key, |_| Ok(b"x".to_vec())).unwrap();
            jobs_done |= matches!(run, RunVerdict::Ran { .. } | RunVerdict::Replayed(_));
            // The moment the answer is known: nothing unsynced survives.
            if number % 5 == thread % 5 {
                let image = photographed.after_power_cut(&mut PowerCut::drop_all());
                taken
                    .lock()
                    .unwrap()
                    .push((image, key, observed, jobs_done));
            }
        }
    });
    let images = std::mem::take(&mut *images.lock().unwrap());
    assert!(images.len() >= 60);
    for (image, key, observed, jobs_done) in images {
        let log = options(64 * 1024)
            .background(false)
            .open_on(image.dir())
            .unwrap();
        let filter = log.filter("f", small()).unwrap();
        assert_eq!(
            filter.get(&key).unwrap(),
            KeyState::Seen,
            "{key} was {observed:?}"
        );
        let jobs = log
            .namespace::<Repeatable>("j", small().outcome_bytes_max(512))
            .unwrap();
        if jobs_done {
            assert!(
                matches!(jobs.get(&key).unwrap(), KeyState::Done(_)),
                "{key}"
            );
        }
    }
}

#[test]
fn concurrent_callers_share_flushes() {
    let disk = SimDisk::memory();
    let log = options(1 << 20).open_on(disk.dir()).unwrap();
    let filter = log.filter("f", small()).unwrap();
    together(THREADS, move |thread| {
        for number in 0..200 {
            assert!(
                filter
                    .observe(format!("{thread}-{number}"))
                    .unwrap()
                    .is_new()
            );
        }
    });
    let stats = log.stats();
    assert_eq!(stats.new_count, 3200);
    assert!(stats.flushes_count <= 3200 + 64, "{}", stats.flushes_count);
}

#[test]
fn a_close_under_load_is_answered_closed_and_loses_nothing_acknowledged() {
    for round in 0..10 {
        let disk = SimDisk::memory();
        let log = options(8192).open_on(disk.dir()).unwrap();
        let filter = log.filter("f", small()).unwrap();
        let acknowledged = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&acknowledged);
        let closer = Mutex::new(Some(log));
        together(4, move |thread| {
            if thread == 0 {
                for _ in 0..round * 20 {
                    std::thread::yield_now();
                }
                let log: DedupLog = closer.lock().unwrap().take().unwrap();
                log.close().unwrap();
                return;
            }
            for number in 0..100_000 {
                let key = format!("{thread}-{number}");
                match filter.observe(&key) {
                    Ok(observed) => {
                        assert!(observed.is_new());
                        kept.lock().unwrap().push(key);
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
                        return;
                    }
                }
            }
        });
        let log = options(8192)
            .lock_timeout(Duration::from_secs(20))
            .open_on(disk.dir())
            .unwrap();
        let filter = log.filter("f", small()).unwrap();
        for key in acknowledged.lock().unwrap().iter() {
            assert_eq!(
                filter.get(key).unwrap(),
                KeyState::Seen,
                "round {round}: {key}"
            );
        }
    }
}

#[test]
fn c33_dropping_and_reopening_under_load_always_works() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("store");
    let stop = Arc::new(AtomicBool::new(false));
    let load: Vec<_> = (0..2)
        .map(|n| {
            let stop = Arc::clone(&stop);
            let spin = move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            };
            std::thread::Builder::new()
                .name(format!("load-{n}"))
                .spawn(spin)
                .unwrap()
        })
        .collect();
    // Other tests of this binary start children, which hold a copy of the lock until their exec:
    // that is waited for, a lock that is let go too late is not.
    let open = || {
        let options = Options::new()
            .durability(Durability::Buffered)
            .segment_bytes(8192);
        options
            .lock_timeout(Duration::from_secs(10))
            .open(&path)
            .unwrap()
    };
    for round in 0..200 {
        let log = open();
        let filter = log.filter("f", small()).unwrap();
        let other = log.clone();
        let clone = filter.clone();
        let user = std::thread::Builder::new()
            .name("user".into())
            .spawn(move || {
                assert!(clone.observe(format!("a-{round}")).unwrap().is_new());
                drop(other);
            });
        assert!(filter.observe(format!("b-{round}")).unwrap().is_new());
        user.unwrap().join().unwrap();
        drop((filter, log));
    }
    let log = open();
    let filter = log.filter("f", small()).unwrap();
    for round in 0..200 {
        for name in ["a", "b"] {
            assert_eq!(
                filter.get(format!("{name}-{round}")).unwrap(),
                KeyState::Seen
            );
        }
    }
    stop.store(true, Ordering::Relaxed);
    for thread in load {
        thread.join().unwrap();
    }
}

#[test]
fn a_reopen_right_after_the_last_drop_needs_no_waiting() {
    let disk = SimDisk::memory();
    for round in 0..200 {
        let log = options(8192).open_on(disk.dir()).unwrap();
        let filter = log.filter("f", small()).unwrap();
        drop(log);
        let quick = filter.observe(format!("{round}")).unwrap();
        assert!(quick.is_new());
        drop(filter);
    }
}

#[test]
fn callbacks_and_probes_may_call_back_with_background_threads_on() {
    let clock = Arc::new(ManualClock::new(START_MS));
    let store: Arc<Mutex<Option<DedupLog>>> = Arc::default();
    let within = Arc::clone(&store);
    let told = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&told);
    let log = options(4096)
        .clock(Arc::clone(&clock) as _)
        .log_bytes_max(64 * 1024)
        .when_full(WhenFull::EvictOldest)
        .on_event(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            let log = within.lock().unwrap().clone();
            if let Some(log) = log {
                let filter = log.filter("from-callback", small()).unwrap();
                let _observed = filter.observe("again");
                let _stats = (log.stats(), log.health(), log.maintain());
            }
        })
        .open_in_memory()
        .unwrap();
    *store.lock().unwrap() = Some(log.clone());
    let inner = log.clone();
    together(2, move |thread| {
        let filter = inner.filter(&format!("f{thread}"), small()).unwrap();
        let again = inner.clone();
        let jobs = inner
            .namespace::<Probeable>(&format!("p{thread}"), small().settle(Duration::ZERO))
            .unwrap()
            .with_probe(move |request| {
                let probes = again.filter("probes", small()).unwrap();
                let _observed = probes.observe(request.key).unwrap();
                let _list = again.pending().unwrap();
                Probed::NotApplied
            });
        for number in 0..400 {
            assert!(filter.observe(format!("key-{number}")).unwrap().is_new());
            if number % 20 == 0 {
                let key = format!("probe-{number}");
                let claim = jobs.claim(&key).unwrap().claim().unwrap();
                drop(claim.start(b"").unwrap());
                let mut again = match jobs.claim(&key).unwrap() {
                    ClaimVerdict::Takeover { claim, .. } => claim.start(b"").unwrap(),
                    other => panic!("{other:?}"),
                };
                let _verdict = again.commit_with(Commit::without_outcome()).unwrap();
            }
        }
    });
    log.maintain().unwrap();
    assert!(told.load(Ordering::Relaxed) > 0);
    *store.lock().unwrap() = None;
}

#[test]
fn reads_race_seals_and_drops_and_are_never_wrong() {
    let clock = Arc::new(ManualClock::new(START_MS));
    let log = options(4096)
        .clock(Arc::clone(&clock) as _)
        .open_in_memory()
        .unwrap();
    let forever = log.filter("forever", small()).unwrap();
    let minute = log
        .filter("minute", small().retention(Duration::from_secs(60)))
        .unwrap();
    for number in 0..200 {
        assert!(forever.observe(format!("key-{number}")).unwrap().is_new());
    }
    let writer_done = Arc::new(AtomicBool::new(false));
    let maintained = log.clone();
    together(4, move |thread| match thread {
        0 => {
            for number in 0..3000 {
                assert!(minute.observe(format!("key-{number}")).unwrap().is_new());
                clock.advance_ms(100);
            }
            writer_done.store(true, Ordering::Release);
        }
        1 => {
            while !writer_done.load(Ordering::Acquire) {
                maintained.maintain().unwrap();
            }
        }
        _ => {
            while !writer_done.load(Ordering::Acquire) {
                for number in 0..200 {
                    let key = format!("key-{number}");
                    assert_eq!(forever.get(&key).unwrap(), KeyState::Seen);
                    assert_eq!(forever.observe(&key).unwrap(), Observed::Duplicate);
                }
            }
        }
    });
    assert!(log.stats().drops_count > 0);
}

#[test]
fn a_batch_of_claims_races_single_claims() {
    let log = options(64 * 1024).open_in_memory().unwrap();
    let jobs = log
        .namespace::<Repeatable>("j", small().outcome_bytes_max(64))
        .unwrap();
    let wins = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&wins);
    together(8, move |thread| {
        for round in 0..30 {
            let keys: Vec<String> = (0..10).map(|n| format!("{round}-{n}")).collect();
            if thread % 2 == 0 {
                let verdicts = jobs.claim_many(&keys, &ClaimOptions::new()).unwrap();
                let claims = verdicts
                    .into_iter()
                    .filter_map(|verdict| verdict.unwrap().claim());
                let mut items: Vec<_> = claims.map(|claim| (claim, Commit::new("b"))).collect();
                for verdict in jobs.commit_many(&mut items).unwrap() {
                    assert!(matches!(verdict, Ok(CommitVerdict::Committed { .. })));
                }
                counted.fetch_add(items.len(), Ordering::Relaxed);
            } else {
                for key in keys.iter().rev() {
                    if let Some(mut claim) = jobs.claim(key).unwrap().claim() {
                        assert!(matches!(
                            claim.commit(b"s").unwrap(),
                            CommitVerdict::Committed { .. }
                        ));
                        counted.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
    });
    assert_eq!(wins.load(Ordering::Relaxed), 300);
}

/// Two merges of the same runs once wrote to the same temporary file: one removed the other's,
/// and one of them failed, or put a file in place that the other was still writing.
#[test]
fn merges_called_from_many_threads_are_one_at_a_time() {
    for round in 0..10 {
        let disk = SimDisk::memory();
        let log = options(4096)
            .durability(Durability::Buffered)
            .background(false)
            .open_on(disk.dir())
            .unwrap();
        let filter = log.filter("f", small()).unwrap();
        for number in 0..1500 {
            let key = format!("round-{round}-key-{number}");
            assert_eq!(filter.observe(key).unwrap(), Observed::New);
        }
        let all = Arc::new(Barrier::new(THREADS));
        let shared = log.clone();
        together(THREADS, move |_| {
            all.wait();
            shared.maintain().unwrap();
        });
        assert!(log.stats().merges_count > 0, "nothing was merged");
        for number in 0..1500 {
            let key = format!("round-{round}-key-{number}");
            assert_eq!(filter.observe(key).unwrap(), Observed::Duplicate);
        }
    }
}

/// Story: the keys of a batch were searched one after the other while runs were merged. The first
/// of a repeat was found to rest on a list of runs that was gone, the second on the new one: the
/// second was told that it is new, and the first that it is a duplicate.
#[test]
fn the_first_of_a_repeat_is_new_whatever_is_sealed_meanwhile() {
    const BATCHES: usize = 150;
    let disk = SimDisk::memory();
    let options = options(4096).durability(Durability::Buffered);
    let log = Arc::new(options.open_on(disk.dir()).unwrap());
    let filter = log.filter("f", small()).unwrap();
    let is_over = AtomicBool::new(false);
    together(2, move |thread| {
        if thread == 1 {
            for n in 0.. {
                if is_over.load(Ordering::SeqCst) {
                    return;
                }
                assert!(filter.observe(format!("other-{n:0>200}")).unwrap().is_new());
                log.maintain().unwrap();
            }
        }
        for batch in 0..BATCHES {
            let keys: Vec<String> = (0..60).map(|n| format!("{batch}-{}", n % 30)).collect();
            let answers = filter.observe_many(&keys).unwrap();
            for (n, answer) in answers.into_iter().enumerate() {
                assert_eq!(answer.unwrap().is_new(), n < 30, "batch {batch}, key {n}");
            }
        }
        is_over.store(true, Ordering::SeqCst);
    });
}
