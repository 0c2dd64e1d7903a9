//! Claims and their outcomes: late owners, losers, failures, payloads, lost answers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::SimDisk;
use idemlog::{
    Claim, ClaimOptions, ClaimVerdict, Commit, CommitVerdict, DedupLog, EffectClass, ErrorKind,
    Failure, Fingerprint, Internal, KeyState, Namespace, NamespaceOptions, NonRepeatable,
    OUTCOME_BYTES_MAX, Options, Outcome, Probeable, Repeatable, RunVerdict, Stamp, Ticket,
};

use super::{clock, long, new, options, remove_index, small};

const LEASE: Duration = Duration::from_secs(30);

fn jobs<C: EffectClass>(log: &DedupLog) -> Namespace<C> {
    log.namespace(C::KIND.name(), small().lease(LEASE)).unwrap()
}

/// Fills segments with what expires in a minute, so that the first is compacted then.
fn fill_for_a_minute(log: &DedupLog, seals: u64) {
    let filler = log
        .filter("filler", small().retention(Duration::from_secs(60)))
        .unwrap();
    let before = log.stats().seals_count;
    let mut n = 0;
    while log.stats().seals_count < before + seals {
        assert!(
            filler
                .observe(long(&format!("fill{before}"), n))
                .unwrap()
                .is_new()
        );
        n += 1;
    }
}

/// The calls that an owner can make, in any order; those that end it come back as fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Late {
    Commit,
    Fail,
    Release,
    Renew,
    Start,
}

fn late(jobs: &Namespace<Repeatable>, ticket: &Ticket, call: Late) {
    let fenced = match call {
        Late::Commit => {
            let verdict = jobs
                .commit_ticket(ticket, Commit::without_outcome())
                .unwrap();
            matches!(verdict, CommitVerdict::Fenced { .. })
        }
        Late::Fail => {
            let failure = Failure::permanent("late");
            !jobs.fail_ticket(ticket, &failure).unwrap().is_applied()
        }
        Late::Release => !jobs
            .fail_ticket(ticket, &Failure::Release)
            .unwrap()
            .is_applied(),
        Late::Renew => !jobs.renew_ticket(ticket, LEASE * 100).unwrap().is_applied(),
        Late::Start => !jobs.start_ticket(ticket, b"late").unwrap().is_applied(),
    };
    assert!(fenced, "{call:?}");
}

fn orders() -> Vec<Vec<Late>> {
    let all = [
        Late::Commit,
        Late::Fail,
        Late::Release,
        Late::Renew,
        Late::Start,
    ];
    let mut orders = Vec::new();
    for first in all {
        for second in all {
            for third in all {
                if first != second && second != third && first != third {
                    orders.push(vec![first, second, third]);
                }
            }
        }
    }
    orders
}

/// How the first owner loses its claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    Lapsed,
    LapsedAndReopened,
    ForgottenAndClaimedAgain,
    CommittedByTheSecond,
    Expired,
}

#[test]
fn c02_in_every_order_of_late_calls_the_successors_claim_is_untouched() {
    let ways = [
        Lost::Lapsed,
        Lost::LapsedAndReopened,
        Lost::ForgottenAndClaimedAgain,
        Lost::CommittedByTheSecond,
        Lost::Expired,
    ];
    for way in ways {
        for order in orders() {
            let (disk, clock) = (SimDisk::memory(), clock());
            let mut log = options(&clock).open_on(disk.dir()).unwrap();
            let mut space = jobs::<Repeatable>(&log);
            let detached = ClaimOptions::new().detached(true);
            let first = new(space.claim_with("k", &detached).unwrap()).detach();
            let mut epochs = BTreeSet::from([first.epoch()]);
            if way == Lost::ForgottenAndClaimedAgain {
                assert!(space.forget("k", true).unwrap().is_applied());
            } else {
                clock.advance_ms(30_001);
            }
            let second = space.claim_with("k", &detached).unwrap().claim().unwrap();
            assert!(epochs.insert(second.epoch()), "an epoch came twice");
            let mut second = Some(second);
            match way {
                Lost::LapsedAndReopened => {
                    let ticket = second.take().unwrap().detach();
                    drop(space);
                    log.close().unwrap();
                    log = options(&clock).open_on(disk.dir()).unwrap();
                    space = jobs::<Repeatable>(&log);
                    let before = space.get("k").unwrap();
                    order.iter().for_each(|call| late(&space, &first, *call));
                    assert_eq!(space.get("k").unwrap(), before, "{order:?}");
                    let verdict = space.commit_ticket(&ticket, Commit::without_outcome());
                    assert!(matches!(verdict.unwrap(), CommitVerdict::Committed { .. }));
                    continue;
                }
                Lost::CommittedByTheSecond | Lost::Expired => {
                    let commit = Commit::without_outcome().retention(Duration::from_secs(60));
                    let _committed = second.take().unwrap().commit_with(commit).unwrap();
                    if way == Lost::Expired {
                        clock.advance_ms(61_000);
                        let third = new(space.claim_with("k", &detached).unwrap());
                        assert!(epochs.insert(third.epoch()));
                        second = Some(third);
                    }
                }
                _ => {}
            }
            let before = space.get("k").unwrap();
            order.iter().for_each(|call| late(&space, &first, *call));
            assert_eq!(space.get("k").unwrap(), before, "{way:?} {order:?}");
            if let Some(mut second) = second {
                let verdict = second.commit_with(Commit::without_outcome()).unwrap();
                assert!(
                    matches!(verdict, CommitVerdict::Committed { .. }),
                    "{way:?}"
                );
            }
            assert!(
                matches!(space.get("k").unwrap(), KeyState::Done(_)),
                "{way:?} {order:?}"
            );
        }
    }
}

#[test]
fn c24_losers_change_nothing_of_a_held_or_done_key_its_times_included_also_after_a_reopen() {
    let (disk, clock) = (SimDisk::memory(), clock());
    let open = || options(&clock).open_on(disk.dir()).unwrap();
    let lose = |space: &Namespace<Repeatable>, epoch: Stamp| {
        let before = space.get("k").unwrap();
        for n in 0..50 {
            let longer = ClaimOptions::new().lease(LEASE * 50).detached(n % 2 == 0);
            drop(space.claim_with("k", &longer).unwrap());
            let ran = space.run_once("k", |_| panic!("ran")).unwrap();
            assert!(matches!(
                ran,
                RunVerdict::Busy { .. } | RunVerdict::Replayed(_)
            ));
            let _state = space.get("k").unwrap();
            // A ticket that nobody was given.
            let (name, wrong) = (space.name(), epoch.get() + 1 + n);
            let hex = |text: &str| -> String { text.bytes().map(|b| format!("{b:02x}")).collect() };
            let ticket = format!("t1-{wrong:x}-{}-{}", hex(name), hex("k"));
            let ticket: Ticket = ticket.parse().unwrap();
            assert!(
                !space
                    .fail_ticket(&ticket, &Failure::Release)
                    .unwrap()
                    .is_applied()
            );
        }
        assert_eq!(space.get("k").unwrap(), before);
    };
    let log = open();
    let space = jobs::<Repeatable>(&log);
    let detached = ClaimOptions::new().detached(true);
    let ticket = new(space.claim_with("k", &detached).unwrap()).detach();
    lose(&space, ticket.epoch());
    drop((space, log));
    let log = open();
    let space = jobs::<Repeatable>(&log);
    lose(&space, ticket.epoch());
    let commit = Commit::without_outcome().retention(Duration::from_secs(600));
    let _committed = space.commit_ticket(&ticket, commit).unwrap();
    lose(&space, ticket.epoch());
    drop((space, log));
    clock.advance_ms(599_999);
    let log = open();
    let space = jobs::<Repeatable>(&log);
    lose(&space, ticket.epoch());
    // No loser has prolonged what is remembered.
    clock.advance_ms(1);
    assert!(matches!(space.claim("k").unwrap(), ClaimVerdict::New(_)));
}

/// Ends an attempt with the raw calls in each way that is not a commit, and looks and retries.
fn only_a_commit_is_final<C: EffectClass>(log: &DedupLog, started: bool) {
    let space = jobs::<C>(log);
    let attempt = |key: &str| -> Claim<C> { new(space.claim(key).unwrap()) };
    type End<C> = fn(Claim<C>, bool);
    fn end<C: EffectClass>(claim: Claim<C>, started: bool, failure: Failure) {
        let changed = if started {
            claim
                .start(b"")
                .map_err(idemlog::Error::from)
                .unwrap()
                .fail(failure)
        } else {
            claim.fail(failure)
        };
        assert!(changed.unwrap().is_applied());
    }
    let ends: [(&str, End<C>); 5] = [
        ("dropped", |claim, started| {
            if started {
                drop(claim.start(b"").map_err(idemlog::Error::from).unwrap());
            }
        }),
        ("unwound", |claim, started| {
            let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _held = started.then(|| claim.start(b"").map_err(idemlog::Error::from));
                panic!("the handler")
            }));
            assert!(unwound.is_err());
        }),
        ("released", |claim, started| {
            end(claim, started, Failure::Release)
        }),
        ("failed", |claim, started| {
            end(claim, started, Failure::retryable(Duration::ZERO, "again"));
        }),
        ("unknown", |claim, started| {
            end(claim, started, Failure::unknown("timeout"))
        }),
    ];
    for (name, end) in ends {
        let key = format!("{name}-{started}");
        end(attempt(&key), started);
        let verdict = space.claim(&key).unwrap();
        let what = format!("{} {key}: {verdict:?}", C::KIND.name());
        match verdict {
            // Nothing but a commit is told as done.
            ClaimVerdict::Duplicate(_) | ClaimVerdict::Rejected { .. } => panic!("{what}"),
            ClaimVerdict::New(_) | ClaimVerdict::Takeover { .. } | ClaimVerdict::Retry { .. } => {}
            // A started effect that cannot be repeated waits for an answer, not for luck.
            ClaimVerdict::InDoubt(doubt) => {
                let resolution = idemlog::Resolution::NotApplied;
                assert!(
                    space
                        .resolve(&key, doubt.epoch, resolution)
                        .unwrap()
                        .is_applied()
                );
                assert!(space.claim(&key).unwrap().claim().is_some(), "{key}");
            }
            ClaimVerdict::Busy { .. } => assert!(started, "{what}"),
            other => panic!("{key}: {other:?}"),
        }
    }
    // A permanent failure is final by choice.
    let key = format!("permanent-{started}");
    end(attempt(&key), started, Failure::permanent("bad card"));
    let ClaimVerdict::Rejected { error } = space.claim(&key).unwrap() else {
        panic!("{key}")
    };
    assert_eq!(error, b"bad card");
}

#[test]
fn c45_dropped_unwound_released_failed_and_unknown_attempts_are_not_final_in_any_class() {
    let log = options(&clock()).open_in_memory().unwrap();
    for started in [false, true] {
        only_a_commit_is_final::<Repeatable>(&log, started);
        only_a_commit_is_final::<Internal>(&log, started);
        only_a_commit_is_final::<Probeable>(&log, started);
        only_a_commit_is_final::<NonRepeatable>(&log, started);
    }
}

#[test]
fn c45_a_panic_in_run_once_is_not_an_outcome_and_the_retry_runs() {
    let log = options(&clock()).open_in_memory().unwrap();
    let space = jobs::<Repeatable>(&log);
    for attempt in 1..4 {
        let run = std::panic::AssertUnwindSafe(|| {
            space.run_once("k", |now| {
                assert_eq!(now.attempt(), attempt);
                panic!("boom")
            })
        });
        assert!(std::panic::catch_unwind(run).is_err());
        assert!(!matches!(space.get("k").unwrap(), KeyState::Done(_)));
    }
    let ran = space.run_once("k", |_| Ok(Vec::new())).unwrap();
    assert!(matches!(ran, RunVerdict::Ran { .. }), "{ran:?}");
    assert!(log.health().ok);
}

#[test]
fn c01_the_fingerprint_survives_the_compaction_of_its_segment_and_a_first_call_without_one() {
    let (disk, clock) = (SimDisk::memory(), clock());
    let open = || options(&clock).open_on(disk.dir()).unwrap();
    let same = ClaimOptions::new().fingerprint(Fingerprint::of(b"amount=5"));
    let other = ClaimOptions::new().fingerprint(Fingerprint::of(b"amount=6"));
    let log = open();
    let space = jobs::<Repeatable>(&log);
    let _done = new(space.claim_with("with", &same).unwrap())
        .commit_with(Commit::without_outcome())
        .unwrap();
    let _done = new(space.claim("without").unwrap())
        .commit_with(Commit::without_outcome())
        .unwrap();
    let held = ClaimOptions::new()
        .fingerprint(Fingerprint::of(b"amount=5"))
        .detached(true);
    let ticket = new(space.claim_with("held", &held).unwrap()).detach();
    let check = |space: &Namespace<Repeatable>, what: &str| {
        let mismatch = |key: &str, options: &ClaimOptions| {
            let before = space.get(key).unwrap();
            let verdict = space.claim_with(key, options).unwrap();
            assert!(
                matches!(verdict, ClaimVerdict::Mismatch),
                "{what}: {key} {verdict:?}"
            );
            assert_eq!(space.get(key).unwrap(), before, "{what}: {key}");
        };
        mismatch("with", &other);
        mismatch("held", &other);
        for (key, options) in [
            ("with", &same),
            ("with", &ClaimOptions::new()),
            // A first call without one is compared with nothing.
            ("without", &same),
            ("without", &other),
        ] {
            let verdict = space.claim_with(key, options).unwrap();
            assert!(
                matches!(verdict, ClaimVerdict::Duplicate(_)),
                "{what}: {key} {verdict:?}"
            );
        }
    };
    check(&space, "at once");
    fill_for_a_minute(&log, 2);
    clock.advance_ms(61_000);
    for _ in 0..4 {
        log.maintain().unwrap();
    }
    assert!(
        log.stats().drops_count >= 1 && log.stats().carried_count >= 3,
        "{:?}",
        log.stats()
    );
    check(&space, "carried over");
    drop((space, log));
    for rebuilt in [false, true] {
        if rebuilt {
            remove_index(&disk);
        }
        let log = open();
        check(&jobs(&log), &format!("reopened, index rebuilt: {rebuilt}"));
    }
    let log = open();
    let space = jobs::<Repeatable>(&log);
    let verdict = space
        .commit_ticket(&ticket, Commit::without_outcome())
        .unwrap();
    assert!(
        matches!(verdict, CommitVerdict::Committed { .. }),
        "{verdict:?}"
    );
    assert!(matches!(
        space.claim_with("held", &other).unwrap(),
        ClaimVerdict::Mismatch
    ));
}

fn large() -> NamespaceOptions {
    NamespaceOptions::new().outcome_bytes_max(OUTCOME_BYTES_MAX)
}

fn roomy(clock: &Arc<ManualClock>) -> Options {
    options(clock).segment_bytes(4 * OUTCOME_BYTES_MAX as u32 + 64 * 1024)
}

#[test]
fn c22_five_retries_of_a_lost_answer_get_its_bytes_and_the_effect_happens_once() {
    for (size, fill) in [(0, 0), (1, 7), (3000, 9), (OUTCOME_BYTES_MAX, 0xa5)] {
        let (disk, clock) = (SimDisk::memory(), clock());
        let outcome = vec![fill; size];
        let effects = AtomicUsize::new(0);
        let open = || roomy(&clock).open_on(disk.dir()).unwrap();
        let charge = |log: &DedupLog| {
            let space = log.namespace::<NonRepeatable>("pay", large()).unwrap();
            space
                .run_once("order-1", |_| {
                    effects.fetch_add(1, Ordering::Relaxed);
                    Ok(outcome.clone())
                })
                .unwrap()
        };
        let retries = |log: &DedupLog, what: &str| {
            std::thread::scope(|scope| {
                for retry in [(); 5].map(|()| scope.spawn(|| charge(log))) {
                    let RunVerdict::Replayed(done) = retry.join().unwrap() else {
                        panic!("{what}: {size} bytes")
                    };
                    assert!(
                        done.outcome == Outcome::Kept(outcome.clone()),
                        "{what}: {size} bytes"
                    );
                }
            });
        };
        let log = open();
        // The answer of the first call is lost on the way.
        drop(charge(&log));
        retries(&log, "at once");
        drop(log);
        let log = open();
        retries(&log, "after a restart");
        let filler = log
            .filter("filler", small().retention(Duration::from_secs(60)))
            .unwrap();
        for n in 0..16_000 {
            assert!(filler.observe(long("fill", n)).unwrap().is_new());
        }
        clock.advance_ms(61_000);
        for _ in 0..4 {
            log.maintain().unwrap();
        }
        assert!(log.stats().drops_count > 0, "{:?}", log.stats());
        retries(&log, "after a compaction");
        drop((filler, log));
        remove_index(&disk);
        retries(&open(), "after a rebuild");
        assert_eq!(effects.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn c34_the_limit_of_an_outcome_is_known_and_kept_to_the_byte() {
    let (disk, clock) = (SimDisk::memory(), clock());
    let log = roomy(&clock).open_on(disk.dir()).unwrap();
    let refused = NamespaceOptions::new().outcome_bytes_max(OUTCOME_BYTES_MAX + 1);
    let error = log.namespace::<Repeatable>("over", refused).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    let space = log.namespace::<Repeatable>("j", large()).unwrap();
    for size in [0, 1, OUTCOME_BYTES_MAX - 1, OUTCOME_BYTES_MAX] {
        let key = format!("fits-{size}");
        let mut claim = new(space.claim(&key).unwrap());
        assert!(matches!(
            claim.commit(&vec![3; size]).unwrap(),
            CommitVerdict::Committed { .. }
        ));
    }
    // One more, a mebibyte, a gibibyte: refused before anything is written or copied.
    for size in [OUTCOME_BYTES_MAX + 1, 1 << 20, 1 << 30] {
        let key = format!("over-{size}");
        let mut claim = new(space.claim(&key).unwrap());
        let records = log.stats().records_count;
        let error = claim.commit(&vec![0; size]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
        assert!(
            error
                .to_string()
                .contains(&format!("bytes_max={OUTCOME_BYTES_MAX}")),
            "{error}"
        );
        assert_eq!(log.stats().records_count, records);
        // The claim is held, and the effect may be committed without its outcome.
        assert!(matches!(
            space.claim(&key).unwrap(),
            ClaimVerdict::Busy { .. }
        ));
        let verdict = claim.commit_with(Commit::without_outcome()).unwrap();
        assert!(
            matches!(verdict, CommitVerdict::Committed { .. }),
            "{verdict:?}"
        );
        let ClaimVerdict::Duplicate(done) = space.claim(&key).unwrap() else {
            panic!("{key}")
        };
        assert_eq!(done.outcome, Outcome::Dropped);
    }
    drop((space, log));
    let log = roomy(&clock).open_on(disk.after_kill().dir()).unwrap();
    let space = log.namespace::<Repeatable>("j", large()).unwrap();
    for size in [0, 1, OUTCOME_BYTES_MAX - 1, OUTCOME_BYTES_MAX] {
        let ClaimVerdict::Duplicate(done) = space.claim(format!("fits-{size}")).unwrap() else {
            panic!("{size}")
        };
        assert!(done.outcome == Outcome::Kept(vec![3; size]), "{size}");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Inputs that a serialiser could write for one request, and what changes on each try. The
/// helpers hash exactly the bytes they are given: which of these are equal is the caller's choice.
pub const PAYLOADS: [&[u8]; 8] = [
    b"",
    b"\0",
    b"{\"amount\":1,\"to\":\"x\"}",
    b"{\"to\":\"x\",\"amount\":1}",
    b"{\"amount\": 1, \"to\": \"x\"}",
    b"{\"amount\":1.0,\"to\":\"x\"}",
    b"{\"amount\":1,\"to\":\"x\",\"try\":2}",
    &[0xff; 1000],
];

/// What `PAYLOADS` hash to, for ever: a store keeps these, and they outlive builds and machines.
pub const FINGERPRINTS: [&str; 8] = [
    "39335c28ac19e263127af3ae986f8536",
    "6ec417a79f7faf83e9e70c30e8933942",
    "be1619e932cd3451407e12d2427bb527",
    "0ec9727779b25d1b979d9bed423befeb",
    "4ae543eb127c540f45bd9cd5132fcb6a",
    "6844f4da3ecd0c7a01acc7d91f4882e2",
    "86bb3fa72c3ac5035ad322333faf2d49",
    "85c1dc819e26a35cec8f052d1c7eb9b2",
];

/// Derived keys of `PAYLOADS` as keys of one namespace (those that are legal), in order.
pub const DERIVED: [&str; 7] = [
    "44d2750e162f47fe5e394b255097680d",
    "43635b1f5046b108d2cdb11f72a446fa",
    "42708f734935712e73a3ae33ece5cdb6",
    "015b90de1d026b0c2c9941a2cfbafbf8",
    "d7a81bd742349ce65e14d27ea113148b",
    "88f6a1641ad67dbf99180ba348d5af60",
    "6c3916d6dcfd4eb5680d912b2968cd10",
];

/// Returns fingerprints and derived keys as this process computes them.
pub fn vectors() -> (Vec<String>, Vec<String>) {
    let log = options(&clock()).open_in_memory().unwrap();
    let space = log.namespace::<Repeatable>("payments", small()).unwrap();
    let prints = PAYLOADS.map(|payload| hex(Fingerprint::of(payload).as_bytes()));
    let derived = PAYLOADS[1..].iter().map(|key| {
        let claim = new(space.claim(key).unwrap());
        claim.derived_key("charge")
    });
    (prints.to_vec(), derived.collect())
}

#[test]
fn c51_fingerprints_and_derived_keys_are_those_of_fixed_vectors_and_of_exactly_the_bytes() {
    let (prints, derived) = vectors();
    assert_eq!(prints, FINGERPRINTS);
    assert_eq!(derived, DERIVED);
    let different: BTreeSet<_> = prints.iter().chain(&derived).collect();
    assert_eq!(
        different.len(),
        PAYLOADS.len() * 2 - 1,
        "other bytes, other hashes"
    );
    // What a caller computes goes through unchanged.
    let own = Fingerprint::from_bytes([9; 16]);
    assert_eq!(own.as_bytes(), &[9; 16]);
}

#[test]
fn c51_an_equal_request_is_found_by_another_opener_and_without_an_index() {
    let (disk, clock) = (SimDisk::memory(), clock());
    let open = || options(&clock).open_on(disk.dir()).unwrap();
    let log = open();
    let space = jobs::<Repeatable>(&log);
    for payload in &PAYLOADS[1..] {
        let asked = ClaimOptions::new().fingerprint(Fingerprint::of(payload));
        let mut claim = new(space.claim_with(payload, &asked).unwrap());
        let _committed = claim.commit_with(Commit::without_outcome()).unwrap();
    }
    fill_for_a_minute(&log, 1);
    drop((space, log));
    for rebuilt in [false, true] {
        if rebuilt {
            assert!(remove_index(&disk) > 0);
        }
        let log = open();
        let space = jobs::<Repeatable>(&log);
        for payload in &PAYLOADS[1..] {
            for (print, equal) in [(*payload, true), (b"volatile", false)] {
                let asked = ClaimOptions::new().fingerprint(Fingerprint::of(print));
                match space.claim_with(payload, &asked).unwrap() {
                    ClaimVerdict::Duplicate(_) => assert!(equal),
                    ClaimVerdict::Mismatch => assert!(!equal),
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

#[test]
fn c65_a_burst_of_ten_times_the_bound_forgets_no_key_and_the_window_is_shown() {
    let (disk, clock) = (SimDisk::memory(), clock());
    let bounded = || options(&clock).log_bytes_max(40 * 1024);
    let log = bounded().open_on(disk.dir()).unwrap();
    let filter = super::filter(&log);
    let mut kept = Vec::new();
    let mut full = 0;
    for n in 0..2000 {
        clock.advance_ms(10);
        match filter.observe(long("key", n)) {
            Ok(observed) => {
                assert!(observed.is_new());
                kept.push(long("key", n));
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Full, "{error:?}");
                assert_eq!(error.applied(), idemlog::Applied::No);
                full += 1;
            }
        }
    }
    assert!(
        full > 1500 && kept.len() > 100,
        "{full} refused, {} kept",
        kept.len()
    );
    let seen = |filter: &idemlog::Filter| {
        let answers = filter.observe_many(&kept).unwrap();
        answers.into_iter().all(|answer| !answer.unwrap().is_new())
    };
    assert!(seen(&filter));
    let stats = log.stats();
    assert_eq!(stats.evicted_count, 0);
    assert!(
        stats.window >= Duration::from_secs(19),
        "{:?}",
        stats.window
    );
    drop((filter, log));
    let log = bounded().open_on(disk.dir()).unwrap();
    assert!(seen(&super::filter(&log)));
    // A refused key was not recorded behind the caller's back.
    let refused = super::filter(&log).get(long("key", 1999)).unwrap();
    assert_eq!(refused, KeyState::Absent);
}
