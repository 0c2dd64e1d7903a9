//! What happens to a store beside its calls: purges, evictions, confirmed time, used-up stamps,
//! hints, replaced manifests, claims that others end; each dies, or loses power, at every step.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::SimDisk;
use idemlog::{
    ClaimVerdict, DedupLog, Durability, Failure, Filter, Internal, KeyState, NamespaceKind,
    NamespaceOptions, NonRepeatable, Options, Result, Retention, WhenFull,
};

use super::{
    Explorer, KEY, crash_everywhere, crash_options, crash_with, created, created_as, fill,
    long_key, promised, run, secs,
};
use crate::support::crew::{
    CLASSES, Crew, FILTER, INTERNAL, LEVELS, NON_REPEATABLE, Promised, REPEATABLE, Settings,
};

/// A purged namespace is gone whole or there whole, and what was in it never comes back.
#[test]
fn purges() {
    for level in [Durability::Buffered, Durability::Power] {
        let script = move |crew: Crew| {
            run(crew, |crew| {
                crew.observe(b"kept", None, level)?;
                crew.claim(REPEATABLE, b"held", true)?;
                crew.claim(NON_REPEATABLE, KEY, false)?;
                crew.start(NON_REPEATABLE, KEY, b"left")?;
                crew.purge(NON_REPEATABLE)?;
                crew.claim(NON_REPEATABLE, KEY, false)?;
                crew.start(NON_REPEATABLE, KEY, b"again")?;
                fill(crew, level, 0, 2, secs(600))?;
                crew.log.maintain()?;
                crew.purge(FILTER)?;
                crew.observe(b"kept", None, level)?;
                fill(crew, level, 0, 1, secs(600))?;
                crew.purge(REPEATABLE)?;
                crew.log.maintain()?;
                crew.claim(REPEATABLE, b"held", false).map(|_| ())
            })
        };
        let totals = crash_everywhere("purge", &created(level), level, &script);
        assert!(totals.checked > 100);
    }
}

/// Whoever has the ticket of a claim starts, renews, commits or fails it, also after a crash.
#[test]
fn tickets_outlive_their_process() {
    for level in LEVELS {
        let script = move |mut crew: Crew| {
            let mut epochs = Vec::new();
            let mut first = |crew: &mut Crew| -> Result<()> {
                for space in CLASSES {
                    for key in [&b"committed"[..], b"failed", b"released", b"left"] {
                        crew.claim(space, key, true)?;
                        epochs.push((space, key, crew.detach(space, key)));
                    }
                }
                for (space, key, epoch) in &epochs {
                    if *key != b"released" {
                        crew.start_ticket(*space, key, *epoch)?;
                    }
                }
                Ok(())
            };
            if let Err(error) = first(&mut crew) {
                return (crew.close().0, Err(error));
            }
            let crew = match crew.reopen() {
                Ok(crew) => crew,
                Err(ended) => return ended,
            };
            run(crew, |crew| {
                for (space, key, epoch) in epochs {
                    crew.renew_ticket(space, key, epoch, 30_000)?;
                    let error = b"no".to_vec();
                    match key {
                        b"committed" => {
                            crew.commit_ticket(space, key, epoch, b"done")?;
                        }
                        b"failed" => {
                            crew.fail_ticket(space, key, epoch, &Failure::Permanent { error })?;
                        }
                        b"released" => crew.fail_ticket(space, key, epoch, &Failure::Release)?,
                        _ => {
                            crew.claim(space, key, false)?;
                        }
                    }
                }
                Ok(())
            })
        };
        crash_everywhere("tickets", &created(level), level, &script);
    }
}

/// The counter of a generation is used up again and again: each next generation is reserved
/// before a stamp of it leaves, so that no crash brings one back.
#[test]
fn used_up_stamps() {
    for level in [Durability::Buffered, Durability::Power] {
        let start = Promised {
            settings: Settings {
                stamps_per_generation: Some(2),
                ..Settings::default()
            },
            ..promised(level)
        };
        // 16 generations are reserved at a time, and the simulated wall clock stands still.
        let script = move |crew: Crew| {
            run(crew, |crew| {
                for n in 0..48_u8 {
                    crew.claim(REPEATABLE, &[n], n % 4 == 0)?;
                    crew.claim(INTERNAL, b"same", false)?;
                    crew.fail(INTERNAL, b"same", &Failure::Release)?;
                    if n == 30 {
                        crew.log.maintain()?;
                    }
                }
                Ok(())
            })
        };
        let base = created(level);
        let totals = crash_with("used-up-stamps", &crash_options(&base), &start, &script);
        assert!(totals.checked > 50);
    }
}

/// Hints are written when a store stands still and at close, not flushed, and may be torn, stale
/// or of another life of the log: the answers are those of the log.
#[test]
fn hints() {
    for level in [Durability::Process, Durability::Power] {
        let start = Promised {
            settings: Settings {
                hint_keys_min: Some(1),
                ..Settings::default()
            },
            ..promised(level)
        };
        let script = move |mut crew: Crew| {
            let stand_still = |crew: &mut Crew, n: u32| {
                fill(crew, level, n, 1, secs(600))?;
                crew.claim(NON_REPEATABLE, &n.to_le_bytes(), false)?;
                crew.start(NON_REPEATABLE, &n.to_le_bytes(), b"")?;
                // A hint may hold only what is durable; then there is more of that.
                crew.log.maintain()?;
                crew.log.maintain()?;
                crew.sync()?;
                crew.log.maintain()?;
                crew.log.maintain()?;
                crew.observe(format!("behind the hint {n}").as_bytes(), None, level)
            };
            for n in [0, 100] {
                if let Err(error) = stand_still(&mut crew, n) {
                    return (crew.close().0, Err(error));
                }
                crew = match crew.reopen() {
                    Ok(crew) => crew,
                    Err(ended) => return ended,
                };
            }
            run(crew, |crew| stand_still(crew, 200))
        };
        let base = created_as(Promised {
            settings: start.settings,
            ..promised(level)
        });
        let whole = base.after_kill();
        let ended = super::play(&whole, super::copy(&start), &script);
        ended.1.unwrap();
        let log = whole.step_log();
        let written = log.iter().filter(|line| line.starts_with("write hint-"));
        assert!(written.count() >= 5);
        crash_with("hints", &crash_options(&base), &start, &script);
    }
}

fn options(clock: &Arc<ManualClock>, level: Durability) -> Options {
    Options::new()
        .background(false)
        .durability(level)
        .segment_bytes(4096)
        .clock(clock.clone())
}

const START_MS: u64 = 1_700_000_000_000;
const DAY_MS: u64 = 86_400_000;

/// A clock as the next process finds it.
fn clock_after(wall_ms: u64, killed: bool) -> Arc<ManualClock> {
    let clock = Arc::new(ManualClock::new(wall_ms));
    if !killed {
        clock.reboot();
    }
    clock
}

// --- Replaced manifests --------------------------------------------------------------------------

/// Each edit of the list of namespaces is there whole, or not at all, and none without those
/// before it.
#[test]
fn manifests_are_replaced_whole() {
    const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
    // Made one after the other; every second one takes the first away.
    let edit = |log: &DedupLog, n: usize| -> Result<()> {
        match n % 3 {
            2 => log.purge(NAMES[n / 3], true),
            _ => log
                .filter(NAMES[n / 3 * 2 + n % 3], NamespaceOptions::new())
                .map(|_| ()),
        }
    };
    let names = |edits: usize| -> Vec<String> {
        let mut names = Vec::new();
        for n in 0..edits {
            match n % 3 {
                2 => names.retain(|name| name != NAMES[n / 3]),
                _ => names.push(NAMES[n / 3 * 2 + n % 3].to_owned()),
            }
        }
        names.sort();
        names
    };
    let told = RefCell::new((false, 0));
    let scenario = |disk: &SimDisk| {
        *told.borrow_mut() = (false, 0);
        let clock = clock_after(START_MS, true);
        let Ok(log) = options(&clock, Durability::Power).open_on(disk.dir()) else {
            return;
        };
        told.borrow_mut().0 = true;
        for n in 0..9 {
            if edit(&log, n).is_err() {
                break;
            }
            told.borrow_mut().1 = n + 1;
        }
        drop(log.close());
    };
    let base = SimDisk::seeded(1);
    let open_on = |disk: &SimDisk, clock: &Arc<ManualClock>| {
        options(clock, Durability::Power).open_on(disk.dir())
    };
    let mut explorer = Explorer::default();
    explorer.judge_all(
        &crash_options(&base),
        scenario,
        || *told.borrow(),
        |disk, _| {
            if let Ok(log) = open_on(disk, &clock_after(START_MS, false)) {
                drop(log.close());
            }
        },
        |disk, (opened, edits), killed| {
            let clock = clock_after(START_MS, killed);
            let log = open_on(disk, &clock).unwrap();
            assert!(!opened || !log.open_report().created, "the store is gone");
            let found: Vec<String> = log.namespaces().into_iter().map(|(name, _)| name).collect();
            let fits = |n: usize| n <= 9 && names(n) == found;
            assert!(
                fits(*edits) || fits(edits + 1),
                "{edits} edits, found {found:?}"
            );
            // The next edit is possible, and stays.
            let next = log.filter("next", NamespaceOptions::new()).map(|_| ());
            next.unwrap();
            log.close().unwrap();
            let log = open_on(disk, &clock).unwrap();
            assert_eq!(log.kind_of("next"), Some(NamespaceKind::Filter));
            assert_eq!(log.namespaces().len(), found.len() + 1);
        },
    );
    explorer.tell("manifest", Durability::Power);
}

// --- Eviction ------------------------------------------------------------------------------------

/// What was told before a crash.
#[derive(Clone, Copy, Default)]
struct Evicting {
    /// Keys observed, from the first on.
    observed: u32,
    /// Records told as evicted.
    evicted: u64,
    /// Whether the claim of the beginning was started, its effect unknown.
    started: bool,
}

fn evicting(clock: &Arc<ManualClock>, level: Durability) -> Options {
    options(clock, level)
        .log_bytes_max(5 * 4096)
        .when_full(WhenFull::EvictOldest)
}

/// A segment of 4 KiB holds fewer records of these keys.
const SEGMENT_RECORDS: u64 = 24;

fn remembered(filter: &Filter, count: u32) -> Vec<bool> {
    (0..count)
        .map(|n| filter.get(long_key(n)).unwrap() == KeyState::Seen)
        .collect()
}

/// The keys that are remembered are a window without holes: forgotten from the front by eviction,
/// as told, and at the end only what was not durable. Nothing that is not settled is evicted.
#[test]
fn evictions() {
    for level in [Durability::Process, Durability::Power] {
        let told = RefCell::new(Evicting::default());
        let scenario = |disk: &SimDisk| {
            *told.borrow_mut() = Evicting::default();
            let clock = clock_after(START_MS, true);
            let steps = || -> Result<()> {
                let log = evicting(&clock, level).open_on(disk.dir())?;
                let filter = log.filter("f", NamespaceOptions::new())?;
                let few = NamespaceOptions::new().outcome_bytes_max(0);
                let once = log.namespace::<NonRepeatable>("n", few)?;
                if let ClaimVerdict::New(claim) = once.claim(KEY)? {
                    match claim.start(b"left") {
                        Ok(_started) => told.borrow_mut().started = true,
                        Err(_) => return Ok(()),
                    }
                }
                for n in 0..160 {
                    let observed = filter.observe(long_key(n));
                    told.borrow_mut().evicted = log.stats().evicted_count;
                    assert!(observed?.is_new(), "{n}");
                    told.borrow_mut().observed = n + 1;
                }
                log.close()
            };
            drop(steps());
        };
        let base = SimDisk::seeded(1);
        let mut evicted_at_most = 0;
        let judge = |disk: &SimDisk, told: &Evicting, killed: bool| {
            evicted_at_most = evicted_at_most.max(told.evicted);
            let clock = clock_after(START_MS, killed);
            let (log, filter) = reopen_evicting(&clock, level, disk);
            let window = remembered(&filter, told.observed + 1);
            let first = window.iter().position(|seen| *seen);
            let last = window.iter().rposition(|seen| *seen);
            let bound = level == Durability::Power || killed;
            let (first, end) = match (first, last) {
                (Some(first), Some(last)) => (first, last + 1),
                _ => (0, 0),
            };
            assert!(
                window[first..end].iter().all(|seen| *seen),
                "a hole: {window:?}"
            );
            assert!(
                !bound || end as u32 >= told.observed,
                "lost: {end}, {}",
                told.observed
            );
            assert!(
                first as u64 <= told.evicted + SEGMENT_RECORDS,
                "{first}, {}",
                told.evicted
            );
            let doubt = judge_doubt(&log, told.started);
            // It goes on.
            let from = told.observed + 1;
            for n in from..from + 60 {
                assert!(filter.observe(long_key(n)).unwrap().is_new());
            }
            assert!(log.stats().log_bytes <= 5 * 4096);
            let disk = disk.after_kill();
            drop((filter, log.close()));
            let (log, filter) = reopen_evicting(&clock, level, &disk);
            let window = remembered(&filter, from + 60);
            let first = window.iter().position(|seen| *seen).unwrap();
            assert!(window[first.max(from as usize)..].iter().all(|seen| *seen));
            judge_doubt(&log, doubt);
        };
        let open = |disk: &SimDisk, _: &Evicting| {
            let clock = clock_after(START_MS, false);
            if let Ok(log) = evicting(&clock, level).open_on(disk.dir()) {
                drop(log.close());
            }
        };
        let mut explorer = Explorer::default();
        explorer.judge_all(
            &crash_options(&base),
            scenario,
            || *told.borrow(),
            open,
            judge,
        );
        explorer.tell("evict", level);
        assert!(evicted_at_most > 40, "evicted={evicted_at_most}");
    }
}

fn reopen_evicting(
    clock: &Arc<ManualClock>,
    level: Durability,
    disk: &SimDisk,
) -> (DedupLog, Filter) {
    let log = evicting(clock, level).open_on(disk.dir()).unwrap();
    let filter = log.filter("f", NamespaceOptions::new()).unwrap();
    (log, filter)
}

/// Returns whether the key of the beginning is in doubt, which it must be once it was started.
fn judge_doubt(log: &DedupLog, started: bool) -> bool {
    let few = NamespaceOptions::new().outcome_bytes_max(0);
    let once = log.namespace::<NonRepeatable>("n", few).unwrap();
    let state = once.get(KEY).unwrap();
    let in_doubt = matches!(state, KeyState::InDoubt(_));
    assert!(in_doubt || !started, "{state:?}");
    in_doubt
}

// --- Confirmed time ------------------------------------------------------------------------------

/// Keys beside the one that is asked for: some segments of them.
const LONG_KEYS: u32 = 72;

/// A key fails until this much later: what is left of it tells trusted time.
const FAR_MS: u64 = 3650 * DAY_MS;

/// What was told before a crash.
#[derive(Clone, Copy, Default)]
struct Confirming {
    /// The key that is to be kept for ten days is durable.
    observed: bool,
    /// `confirm_time` has begun, and has answered.
    confirming: bool,
    confirmed: bool,
    again: bool,
}

/// A wall clock that is 30 days ahead counts from the answer of `confirm_time` on, whatever crash
/// comes; before the call nothing is forgotten by it.
#[test]
fn confirmed_time_is_kept() {
    let level = Durability::Power;
    let base = SimDisk::seeded(1);
    let clock = clock_after(START_MS, true);
    let log = options(&clock, level).open_on(base.dir()).unwrap();
    let far = Duration::from_millis(FAR_MS);
    let error = Vec::new();
    let ClaimVerdict::New(claim) = scratch(&log).claim(KEY).unwrap() else {
        panic!("the key is new")
    };
    let failed = claim.fail(Failure::Retryable { after: far, error });
    assert!(failed.unwrap().is_applied());
    log.close().unwrap();
    let wall_ms = START_MS + 30 * DAY_MS;
    let told = RefCell::new(Confirming::default());
    let scenario = |disk: &SimDisk| {
        *told.borrow_mut() = Confirming::default();
        let clock = clock_after(START_MS, true);
        let steps = || -> Result<()> {
            let log = options(&clock, level).open_on(disk.dir())?;
            let filter = log.filter("f", ten_days())?;
            assert!(filter.observe(KEY)?.is_new());
            told.borrow_mut().observed = true;
            for n in 0..LONG_KEYS {
                assert!(filter.observe(long_key(n))?.is_new());
            }
            clock.set_wall_ms(wall_ms);
            log.maintain()?;
            assert!(!filter.observe(KEY)?.is_new());
            assert!(log.health().clock_suspect);
            told.borrow_mut().confirming = true;
            log.confirm_time()?;
            told.borrow_mut().confirmed = true;
            assert!(!log.health().clock_suspect);
            assert!(filter.observe(KEY)?.is_new());
            told.borrow_mut().again = true;
            for n in 0..LONG_KEYS {
                assert!(filter.observe(long_key(n))?.is_new());
            }
            log.maintain()?;
            log.close()
        };
        drop(steps());
    };
    let judge = |disk: &SimDisk, told: &Confirming, killed: bool| {
        let clock = clock_after(wall_ms, killed);
        let log = options(&clock, level).open_on(disk.dir()).unwrap();
        let filter = log.filter("f", ten_days()).unwrap();
        let now_ms = trusted_ms(&log);
        // After each reboot the wall clock may push it by a day; three crashes come in a row.
        let jump_ms = if killed { 5 * 60 * 1000 } else { 3 * DAY_MS };
        let kept = now_ms <= START_MS + jump_ms;
        let moved = now_ms == wall_ms;
        assert!(
            if told.confirmed {
                moved
            } else {
                kept || moved && told.confirming
            },
            "{now_ms}"
        );
        let seen = filter.get(KEY).unwrap() == KeyState::Seen;
        if told.observed && kept || told.again {
            assert!(seen);
        }
        // What nobody was told may be there: the answer that came after the time was confirmed.
        assert!(
            !seen || kept || told.confirmed,
            "an expired key is remembered"
        );
        log.confirm_time().unwrap();
        let disk = disk.after_kill();
        drop((filter, log.close()));
        let log = options(&clock, level).open_on(disk.dir()).unwrap();
        assert_eq!(trusted_ms(&log), wall_ms);
    };
    let open = |disk: &SimDisk, _: &Confirming| {
        let clock = clock_after(wall_ms, false);
        if let Ok(log) = options(&clock, level).open_on(disk.dir()) {
            drop(log.close());
        }
    };
    let mut explorer = Explorer::default();
    explorer.judge_all(
        &crash_options(&base),
        scenario,
        || *told.borrow(),
        open,
        judge,
    );
    explorer.tell("confirm", level);
}

fn ten_days() -> NamespaceOptions {
    NamespaceOptions::new().retention(Duration::from_millis(10 * DAY_MS))
}

fn scratch(log: &DedupLog) -> idemlog::Namespace<Internal> {
    let few = NamespaceOptions::new().outcome_bytes_max(0);
    let few = few.retention(Retention::Forever);
    log.namespace::<Internal>("scratch", few).unwrap()
}

fn trusted_ms(log: &DedupLog) -> u64 {
    match scratch(log).get(KEY).unwrap() {
        KeyState::Failed { retry_after, .. } => {
            START_MS + FAR_MS - u64::try_from(retry_after.as_millis()).unwrap()
        }
        state => panic!("{state:?}"),
    }
}
