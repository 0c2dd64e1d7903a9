//! Clocks that step, stop and start again: no live key is new, nothing is dropped early, and the
//! store says when it does not believe the wall clock.

use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{PowerCut, SimDisk};
use idemlog::{
    ClaimOptions, ClaimVerdict, DedupLog, Filter, KeyState, NamespaceOptions, NonRepeatable,
    Observed, Options, Probeable, Probed, Repeatable,
};

const START_MS: u64 = 1_700_000_000_000;
const MINUTE_MS: u64 = 60_000;
const DAY_MS: u64 = 86_400_000;
const WEEK: Duration = Duration::from_secs(7 * 86_400);
/// 2106-02-07, the last second that 32 bits can hold.
const LAST_SECOND_MS: u64 = 0xffff_ffff * 1000;

/// A store, its clock, and some keys observed for a week.
struct World {
    disk: SimDisk,
    clock: Arc<ManualClock>,
}

impl World {
    fn new() -> World {
        World {
            disk: SimDisk::memory(),
            clock: Arc::new(ManualClock::new(START_MS)),
        }
    }

    fn open(&self) -> DedupLog {
        let options = Options::new().segment_bytes(4096).background(false);
        options
            .clock(Arc::clone(&self.clock) as _)
            .open_on(self.disk.dir())
            .unwrap()
    }

    fn filter(log: &DedupLog) -> Filter {
        log.filter(
            "f",
            NamespaceOptions::new().outcome_bytes_max(0).retention(WEEK),
        )
        .unwrap()
    }

    /// Observes enough keys to seal some segments.
    fn fill(&self) -> DedupLog {
        let log = self.open();
        let filter = World::filter(&log);
        for key in keys() {
            assert!(filter.observe(key).unwrap().is_new());
        }
        log.maintain().unwrap();
        assert!(log.stats().segments_count > 3);
        log
    }

    /// All keys are remembered, before and after maintenance, and no segment was dropped.
    fn check_kept(log: &DedupLog, what: &str) {
        let filter = World::filter(log);
        for _ in 0..2 {
            for key in keys() {
                assert_eq!(filter.observe(key).unwrap(), Observed::Duplicate, "{what}");
            }
            log.maintain().unwrap();
        }
        assert_eq!(log.stats().drops_count, 0, "{what}");
    }
}

fn keys() -> impl Iterator<Item = String> {
    (0..250).map(|n| format!("key-{n:08}"))
}

#[test]
fn a_month_ahead_for_a_second_forgets_nothing_and_is_reported() {
    let world = World::new();
    let log = world.fill();
    world.clock.set_wall_ms(START_MS + 30 * DAY_MS);
    World::check_kept(&log, "a month ahead");
    let health = log.health();
    assert!(health.clock_suspect && !health.ok);
    world.clock.set_wall_ms(START_MS + 1000);
    World::check_kept(&log, "back");
    assert!(log.health().ok);
}

#[test]
fn clock_steps_around_reopens_forget_nothing() {
    let walls = [
        ("a month ahead", START_MS + 30 * DAY_MS),
        ("1970", 0),
        ("2106", LAST_SECOND_MS),
        ("beyond 2106", LAST_SECOND_MS + DAY_MS),
        ("the end of numbers", u64::MAX),
        ("an hour back", START_MS - 60 * MINUTE_MS),
    ];
    for (what, wall_ms) in walls {
        for killed in [false, true] {
            let world = World::new();
            let log = world.fill();
            world.clock.set_wall_ms(wall_ms);
            World::check_kept(&log, what);
            let world = if killed {
                World {
                    disk: world.disk.after_kill(),
                    clock: Arc::clone(&world.clock),
                }
            } else {
                world
            };
            drop(log);
            for _ in 0..3 {
                let log = world.open();
                World::check_kept(&log, what);
                assert_eq!(
                    log.health().clock_suspect,
                    wall_ms > START_MS + DAY_MS,
                    "{what}"
                );
            }
            world.clock.set_wall_ms(START_MS);
            let log = world.open();
            World::check_kept(&log, what);
            assert!(log.health().ok, "{what}");
        }
    }
}

#[test]
fn a_reboot_with_a_wrong_clock_pushes_time_by_the_bound_and_no_further() {
    for wall_ms in [0, START_MS + 30 * DAY_MS, u64::MAX] {
        let world = World::new();
        drop(world.fill());
        // Six reboots of one day each at the most: still within the week.
        for _ in 0..6 {
            world.clock.reboot();
            world.clock.set_wall_ms(wall_ms);
            let log = world.open();
            World::check_kept(&log, "after a reboot");
            assert_eq!(log.health().clock_suspect, wall_ms > START_MS);
        }
    }
}

#[test]
fn a_store_that_was_off_for_long_catches_up_when_the_operator_confirms() {
    let world = World::new();
    drop(world.fill());
    world.clock.reboot();
    world.clock.set_wall_ms(START_MS + 30 * DAY_MS);
    let log = world.open();
    World::check_kept(&log, "not confirmed");
    assert!(log.health().clock_suspect);
    log.confirm_time().unwrap();
    assert!(log.health().ok);
    let filter = World::filter(&log);
    assert_eq!(filter.get("key-00000000").unwrap(), KeyState::Absent);
    log.maintain().unwrap();
    assert!(log.stats().drops_count > 0);
    drop((filter, log));
    // Confirmed time stays, also over another reboot with the clock back in the past.
    world.clock.reboot();
    world.clock.set_wall_ms(0);
    let log = world.open();
    assert_eq!(
        World::filter(&log).get("key-00000000").unwrap(),
        KeyState::Absent
    );
}

#[test]
fn time_passes_with_the_boot_clock_while_the_store_is_closed_or_the_wall_clock_frozen() {
    for frozen in [false, true] {
        let world = World::new();
        drop(world.fill());
        world.clock.advance_ms(7 * DAY_MS - 1000);
        if frozen {
            world.clock.set_wall_ms(START_MS);
        }
        World::check_kept(&world.open(), "a second before");
        world.clock.advance_ms(1000);
        if frozen {
            world.clock.set_wall_ms(START_MS);
        }
        let log = world.open();
        let filter = World::filter(&log);
        assert_eq!(
            filter.observe("key-00000000").unwrap(),
            Observed::New,
            "frozen={frozen}"
        );
    }
}

#[test]
fn a_clock_that_stands_still_forgets_nothing() {
    let world = World::new();
    let log = world.fill();
    for _ in 0..50 {
        log.maintain().unwrap();
    }
    World::check_kept(&log, "frozen");
}

#[test]
fn small_steps_of_the_wall_clock_use_up_their_slack_and_no_more() {
    let world = World::new();
    let log = world.fill();
    let filter = World::filter(&log);
    let minute = NamespaceOptions::new().outcome_bytes_max(0);
    let short = log
        .filter("short", minute.retention(Duration::from_secs(600)))
        .unwrap();
    assert!(short.observe("k").unwrap().is_new());
    // 100 steps of a minute: at most five of them are believed, also over reopens.
    drop((filter, short, log));
    for step in 1..=100 {
        world.clock.set_wall_ms(START_MS + step * MINUTE_MS);
        let log = world.open();
        let short = log
            .filter("short", NamespaceOptions::new().outcome_bytes_max(0))
            .unwrap();
        assert_eq!(short.get("k").unwrap(), KeyState::Seen, "step {step}");
    }
}

/// The wall clock is believed within its slack, and what was decided by it stays so: a power cut
/// and a clock that goes back do not make an expired key known again.
#[test]
fn a_small_step_of_the_wall_clock_counts_and_is_durable_before_it_does() {
    let (disk, clock) = (SimDisk::new(), Arc::new(ManualClock::new(START_MS)));
    let open = |disk: &SimDisk| {
        let options = Options::new().background(false);
        let log = options.clock(Arc::clone(&clock) as _).open_on(disk.dir());
        log.unwrap()
    };
    let filter = |log: &DedupLog| {
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        let options = options.retention(Duration::from_millis(2 * MINUTE_MS));
        log.filter("f", options).unwrap()
    };
    let log = open(&disk);
    assert!(filter(&log).observe("k").unwrap().is_new());
    clock.set_wall_ms(START_MS + 3 * MINUTE_MS);
    log.maintain().unwrap();
    assert_eq!(filter(&log).get("k").unwrap(), KeyState::Absent);
    clock.set_wall_ms(START_MS);
    let log = open(&disk.after_power_cut(&mut PowerCut::drop_all()));
    assert_eq!(filter(&log).get("k").unwrap(), KeyState::Absent);
}

#[test]
fn expiry_is_counted_from_the_later_of_both_clocks() {
    let world = World::new();
    let log = world.open();
    let options = NamespaceOptions::new().outcome_bytes_max(0);
    let filter = log
        .filter("f", options.retention(Duration::from_secs(3600)))
        .unwrap();
    // The wall clock is right and trusted time is behind: a key is kept for too long, not for too
    // short a time once trusted time has caught up.
    world.clock.set_wall_ms(START_MS + DAY_MS);
    assert!(filter.observe("k").unwrap().is_new());
    log.confirm_time().unwrap();
    assert_eq!(filter.get("k").unwrap(), KeyState::Seen);
    world.clock.advance_ms(3_599_000);
    assert_eq!(filter.get("k").unwrap(), KeyState::Seen);
    world.clock.advance_ms(1_000);
    assert_eq!(filter.get("k").unwrap(), KeyState::Absent);
}

#[test]
fn leases_run_on_the_boot_clock_whatever_the_wall_clock_does() {
    let world = World::new();
    let log = world.open();
    let options = NamespaceOptions::new()
        .outcome_bytes_max(0)
        .lease(Duration::from_secs(60));
    let jobs = log.namespace::<Repeatable>("j", options).unwrap();
    let claim = jobs.claim("k").unwrap().claim().unwrap();
    for wall_ms in [
        0,
        START_MS + 30 * DAY_MS,
        START_MS + 4 * MINUTE_MS,
        u64::MAX,
        START_MS,
    ] {
        world.clock.set_wall_ms(wall_ms);
        let ClaimVerdict::Busy { lease_left, .. } = jobs.claim("k").unwrap() else {
            panic!("wall_ms={wall_ms}")
        };
        assert_eq!(lease_left, Duration::from_secs(60));
    }
    world.clock.advance_ms(59_999);
    assert!(matches!(
        jobs.claim("k").unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    world.clock.set_wall_ms(0);
    world.clock.advance_ms(1);
    assert!(matches!(
        jobs.claim("k").unwrap(),
        ClaimVerdict::Takeover { .. }
    ));
    drop(claim);
}

#[test]
fn a_detached_lease_of_an_earlier_opener_is_not_cut_short_by_the_wall_clock() {
    let world = World::new();
    let log = world.open();
    let options = || NamespaceOptions::new().outcome_bytes_max(0);
    let detached = ClaimOptions::new()
        .detached(true)
        .lease(Duration::from_secs(3600));
    let jobs = log.namespace::<NonRepeatable>("j", options()).unwrap();
    let started = jobs
        .claim_with("k", &detached)
        .unwrap()
        .claim()
        .unwrap()
        .start(b"")
        .unwrap();
    let _ticket = started.detach();
    drop((jobs, log));
    for wall_ms in [START_MS + 30 * DAY_MS, 0, START_MS] {
        world.clock.set_wall_ms(wall_ms);
        let log = world.open();
        let jobs = log.namespace::<NonRepeatable>("j", options()).unwrap();
        assert!(
            matches!(jobs.claim("k").unwrap(), ClaimVerdict::Busy { .. }),
            "{wall_ms}"
        );
    }
    world.clock.advance_ms(3_600_000);
    let log = world.open();
    let jobs = log.namespace::<NonRepeatable>("j", options()).unwrap();
    assert!(matches!(jobs.claim("k").unwrap(), ClaimVerdict::InDoubt(_)));
}

#[test]
fn a_probe_is_not_asked_before_the_settle_time_also_after_a_reopen() {
    let world = World::new();
    let options = || {
        NamespaceOptions::new()
            .outcome_bytes_max(0)
            .settle(Duration::from_secs(120))
    };
    let log = world.open();
    let jobs = log.namespace::<Probeable>("j", options()).unwrap();
    let started = jobs
        .claim("k")
        .unwrap()
        .claim()
        .unwrap()
        .start(b"")
        .unwrap();
    let _ticket = started.detach();
    drop((jobs, log));
    for (after_ms, asked) in [(0, false), (119_999, false), (1, true)] {
        world.clock.advance_ms(after_ms);
        for wall_ms in [0, START_MS + 30 * DAY_MS, START_MS] {
            world.clock.set_wall_ms(wall_ms);
            let log = world.open();
            let jobs = log
                .namespace::<Probeable>("j", options())
                .unwrap()
                .with_probe(move |_| {
                    assert!(asked, "asked too early");
                    Probed::Unknown
                });
            match jobs.claim("k").unwrap() {
                ClaimVerdict::Busy { .. } => assert!(!asked),
                ClaimVerdict::InDoubt(_) => assert!(asked),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn stamps_rise_whatever_the_clock_does() {
    let world = World::new();
    let mut last = 0;
    for wall_ms in [START_MS, 0, LAST_SECOND_MS, START_MS, u64::MAX, 0, START_MS] {
        world.clock.set_wall_ms(wall_ms);
        let log = world.open();
        let options = NamespaceOptions::new().outcome_bytes_max(0);
        let jobs = log.namespace::<Repeatable>("j", options).unwrap();
        let claim = jobs.claim("k").unwrap().claim().unwrap();
        assert!(claim.epoch().get() > last, "wall_ms={wall_ms}");
        last = claim.epoch().get();
    }
}
