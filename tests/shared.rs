//! Several openers of one store: what one has seen is a duplicate to the others, and who dies
//! leaves nothing behind that the others stumble over.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{
    CrashOptions, Fault, FaultKind, Op, Rng, SimDisk, SimProcess, for_each_crash_point,
};
use idemlog::{
    ClaimVerdict, Commit, CommitVerdict, DedupLog, Durability, EffectClass, ErrorKind, Filter,
    IntakeOptions, KeyState, Namespace, NamespaceOptions, NonRepeatable, ObserveOptions, Observed,
    OpenMode, Options, Outbox, Repeatable, Retention, RunVerdict, Submitted,
};

mod closing;
mod flush;
mod gates;
mod joins;
mod left;

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(1_700_000_000_000))
}

fn options(clock: &Arc<ManualClock>) -> Options {
    Options::new()
        .shared(true)
        .segment_bytes(16 * 1024)
        .background(false)
        .durability(Durability::Process)
        .clock(Arc::<ManualClock>::clone(clock))
}

/// About eighty fill a segment.
fn key(name: &str, n: impl std::fmt::Display) -> String {
    format!("{name}{n}{:->150}", "")
}

fn small() -> NamespaceOptions {
    NamespaceOptions::new().outcome_bytes_max(64)
}

/// One opener, in a process of its own.
struct Member {
    process: SimProcess,
    log: DedupLog,
    filter: Filter,
}

impl Member {
    fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> Member {
        let process = disk.process();
        let log = options(clock).open_on(process.dir()).unwrap();
        let filter = log.filter("f", small()).unwrap();
        Member {
            process,
            log,
            filter,
        }
    }

    fn claims<C: EffectClass>(&self, name: &str) -> Namespace<C> {
        self.log.namespace(name, small()).unwrap()
    }

    /// Dies without a word.
    fn kill(self) {
        self.process.kill();
        drop(self);
    }
}

#[test]
fn a_key_of_one_opener_is_a_duplicate_to_the_others() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    assert_eq!(a.filter.observe("k0").unwrap(), Observed::New);
    let b = Member::open(&disk, &clock);
    for n in 0..500 {
        let (one, other) = if n % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let key = key("k", n + 1);
        assert_eq!(other.filter.observe("k0").unwrap(), Observed::Duplicate);
        assert_eq!(one.filter.observe(&key).unwrap(), Observed::New, "{key}");
        assert_eq!(other.filter.get(&key).unwrap(), KeyState::Seen, "{key}");
        assert_eq!(
            other.filter.observe(&key).unwrap(),
            Observed::Duplicate,
            "{key}"
        );
        if n % 100 == 99 {
            one.log.maintain().unwrap();
        }
    }
    assert!(a.log.stats().segments_count > 5, "{:?}", a.log.stats());
    a.log.close().unwrap();
    assert_eq!(b.filter.observe(key("k", 17)).unwrap(), Observed::Duplicate);
    b.log.close().unwrap();
    // The last one has closed it cleanly: one alone goes on.
    let log = options(&clock).shared(false).open_on(disk.dir()).unwrap();
    assert!(log.open_report().clean);
    let filter = log.filter("f", small()).unwrap();
    for n in 0..=500 {
        assert_eq!(
            filter
                .get(if n == 0 { "k0".to_owned() } else { key("k", n) })
                .unwrap(),
            KeyState::Seen,
            "{n}"
        );
    }
}

#[test]
fn who_has_slept_for_many_segments_goes_on_from_their_runs() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let c = a.claims::<Repeatable>("c");
    assert_eq!(b.filter.observe("first").unwrap(), Observed::New);
    let held = match b.claims::<Repeatable>("c").claim("held").unwrap() {
        ClaimVerdict::New(claim) => claim,
        other => panic!("{other:?}"),
    };
    for n in 0..2000 {
        assert_eq!(a.filter.observe(key("k", n)).unwrap(), Observed::New);
        if n % 50 == 0 {
            a.log.maintain().unwrap();
        }
    }
    assert!(matches!(
        c.run_once("job", |_| Ok(b"out".to_vec())).unwrap(),
        RunVerdict::Ran { .. }
    ));
    assert!(a.log.stats().segments_count > 10);
    assert_eq!(b.filter.observe(key("k", 3)).unwrap(), Observed::Duplicate);
    for n in 0..2000 {
        assert_eq!(b.filter.get(key("k", n)).unwrap(), KeyState::Seen, "{n}");
    }
    assert_eq!(b.filter.observe("new").unwrap(), Observed::New);
    assert!(matches!(
        c.claim("held").unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    let mut started = held.start(b"").unwrap();
    assert!(matches!(
        started.commit(b"x").unwrap(),
        CommitVerdict::Committed { .. }
    ));
    assert!(matches!(
        c.claim("held").unwrap(),
        ClaimVerdict::Duplicate(_)
    ));
    assert!(matches!(
        b.claims::<Repeatable>("c").claim("job").unwrap(),
        ClaimVerdict::Duplicate(_)
    ));
}

#[test]
fn a_killed_owner_is_gone_at_once_and_a_living_one_is_not() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let granted = |verdict: ClaimVerdict<Repeatable>| match verdict {
        ClaimVerdict::New(claim) | ClaimVerdict::Takeover { claim, .. } => claim,
        other => panic!("{other:?}"),
    };
    let epoch = {
        let claim = granted(a.claims::<Repeatable>("c").claim("k").unwrap());
        let started = claim.start(b"").unwrap();
        let pay = a.claims::<NonRepeatable>("pay");
        let ClaimVerdict::New(payment) = pay.claim("p").unwrap() else {
            panic!("the key is new");
        };
        let payment = payment.start(b"sent").unwrap();
        assert!(matches!(
            b.claims::<Repeatable>("c").claim("k").unwrap(),
            ClaimVerdict::Busy { .. }
        ));
        assert!(matches!(
            b.claims::<NonRepeatable>("pay").claim("p").unwrap(),
            ClaimVerdict::Busy { .. }
        ));
        let epoch = started.epoch();
        a.process.kill();
        drop((started, payment));
        epoch
    };
    a.kill();
    let claim = granted(b.claims::<Repeatable>("c").claim("k").unwrap());
    assert!(claim.epoch() > epoch, "{} {epoch}", claim.epoch());
    assert_eq!(claim.attempt(), 2);
    assert!(matches!(
        b.claims::<NonRepeatable>("pay").claim("p").unwrap(),
        ClaimVerdict::InDoubt(_)
    ));
    // Who comes later asks about the same owners.
    let c = Member::open(&disk, &clock);
    assert!(matches!(
        c.claims::<Repeatable>("c").claim("k").unwrap(),
        ClaimVerdict::Busy { .. }
    ));
    drop(claim);
    assert!(matches!(
        c.claims::<Repeatable>("c").claim("k").unwrap(),
        ClaimVerdict::New(_)
    ));
}

#[test]
fn an_owner_whose_lease_has_lapsed_is_fenced_by_whoever_took_over() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let ClaimVerdict::New(mut slow) = a.claims::<Repeatable>("c").claim("k").unwrap() else {
        panic!("the key is new");
    };
    clock.advance_ms(61_000);
    let ClaimVerdict::Takeover { mut claim, .. } = b.claims::<Repeatable>("c").claim("k").unwrap()
    else {
        panic!("the lease has lapsed");
    };
    assert!(claim.epoch() > slow.epoch());
    assert!(matches!(
        slow.commit(b"late").unwrap(),
        CommitVerdict::Fenced { .. }
    ));
    assert!(matches!(
        claim.commit(b"out").unwrap(),
        CommitVerdict::Committed { .. }
    ));
    assert!(matches!(
        a.claims::<Repeatable>("c").claim("k").unwrap(),
        ClaimVerdict::Duplicate(_)
    ));
}

#[test]
fn openers_of_the_two_modes_keep_each_other_out() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let alone = || options(&clock).shared(false).open_on(disk.dir());
    assert_eq!(alone().unwrap_err().kind(), ErrorKind::Locked);
    let b = Member::open(&disk, &clock);
    a.log.clone().close().unwrap();
    assert_eq!(alone().unwrap_err().kind(), ErrorKind::Locked);
    b.kill();
    drop(a);
    let log = alone().unwrap();
    assert!(!log.open_report().clean);
    log.close().unwrap();
}

/// What one process does while it dies at any of its steps, and another goes on.
fn work(log: &DedupLog, seen: &mut Vec<String>) -> idemlog::Result<()> {
    let filter = log.filter("f", small())?;
    let claims = log.namespace::<Repeatable>("c", small())?;
    for n in 0..200 {
        let key = key("k", n);
        if filter.observe(&key)? == Observed::New {
            seen.push(key);
        }
        if n % 20 == 0 {
            let key = format!("job{n}");
            if let RunVerdict::Ran { .. } = claims.run_once(&key, |_| Ok(vec![7; 40]))? {
                seen.push(key);
            }
        }
    }
    log.maintain()?;
    log.confirm_time()?;
    log.clone().close()
}

/// Killed before each step, and inside each write: the other one goes on at once, everything that
/// was answered is a duplicate, and what was not may be either, for ever.
#[test]
fn one_dies_at_each_step_and_the_other_goes_on() {
    let steps = {
        let (disk, clock) = (SimDisk::seeded(1), clock());
        let b = Member::open(&disk, &clock);
        let before = disk.steps();
        let a = disk.process();
        let log = options(&clock).open_on(a.dir()).unwrap();
        work(&log, &mut Vec::new()).unwrap();
        drop(b);
        disk.steps() - before
    };
    assert!(steps > 200, "{steps}");
    let mut torn = 0;
    for step in 0..steps {
        for kept_bytes in [0, 9, 21, 64] {
            let (disk, clock) = (SimDisk::seeded(1), clock());
            let b = Member::open(&disk, &clock);
            assert_eq!(b.filter.observe("b").unwrap(), Observed::New);
            let a = disk.process();
            a.kill_at(disk.steps() + step, kept_bytes);
            let mut seen = Vec::new();
            let opened = options(&clock).open_on(a.dir());
            let worked = opened.and_then(|log| work(&log, &mut seen));
            assert!(a.is_dead() || worked.is_ok(), "{step} {worked:?}");
            judge(&b, &seen, &format!("step={step} kept={kept_bytes}"));
            torn += b.log.stats().torn_writes_count;
            // And again after all are gone.
            b.kill();
            let c = Member::open(&disk, &clock);
            judge(
                &c,
                &seen,
                &format!("reopened step={step} kept={kept_bytes}"),
            );
        }
    }
    assert!(torn > 50, "{torn}");
}

fn judge(b: &Member, seen: &[String], what: &str) {
    let claims = b.claims::<Repeatable>("c");
    for key in seen {
        if key.starts_with('k') {
            assert_eq!(
                b.filter.observe(key).unwrap(),
                Observed::Duplicate,
                "{what} {key}"
            );
        } else {
            let verdict = claims.claim(key).unwrap();
            assert!(
                matches!(verdict, ClaimVerdict::Duplicate(_)),
                "{what} {key} {verdict:?}"
            );
        }
    }
    for n in 0..200 {
        let key = key("k", n);
        let first = b.filter.observe(&key).unwrap();
        assert!(!(first.is_new() && seen.contains(&key)), "{what} {key}");
        assert_eq!(
            b.filter.observe(&key).unwrap(),
            Observed::Duplicate,
            "{what} {key}"
        );
    }
    for n in 0..10 {
        let key = format!("more-{what}-{n}");
        assert_eq!(b.filter.observe(&key).unwrap(), Observed::New, "{what}");
        assert_eq!(
            b.filter.observe(&key).unwrap(),
            Observed::Duplicate,
            "{what}"
        );
    }
    b.log.maintain().unwrap();
}

/// Openers come, work, sleep, die and go in any order; a map knows what was seen.
#[test]
fn random_openers_agree_with_a_map() {
    let seed = std::env::var("IDEMLOG_SEED").map_or(7, |seed| seed.parse().unwrap());
    let rounds = std::env::var("IDEMLOG_CASES").map_or(12, |count| count.parse().unwrap());
    for round in 0..rounds {
        println!("shared: IDEMLOG_SEED={seed} round={round}");
        let mut rng = Rng::new(seed + round * 1000);
        let (disk, clock) = (SimDisk::seeded(seed), clock());
        let mut members: Vec<Member> = vec![Member::open(&disk, &clock)];
        let mut seen: BTreeMap<String, bool> = BTreeMap::new();
        for call in 0..1500 {
            let at = rng.below(members.len());
            let member = &members[at];
            match rng.below(100) {
                0 | 1 if members.len() < 5 => members.push(Member::open(&disk, &clock)),
                2 if members.len() > 1 => members.swap_remove(at).kill(),
                3 if members.len() > 1 => members.swap_remove(at).log.close().unwrap(),
                4..=8 => member.log.maintain().unwrap(),
                9 => clock.advance_ms(rng.below(5000) as u64),
                10 => {
                    let name = format!("n{}", rng.below(4));
                    let one = member.log.filter(&name, small()).unwrap();
                    let key = format!("{name}/{}", rng.below(20));
                    let was = seen.insert(key.clone(), true).is_some();
                    assert_eq!(one.observe(&key).unwrap().is_new(), !was, "{call} {key}");
                }
                11..=30 => {
                    let key = format!("j{}", rng.below(200));
                    let claims = member.claims::<Repeatable>("c");
                    let ran = claims
                        .run_once(&key, |_| Ok(key.clone().into_bytes()))
                        .unwrap();
                    let was = seen.insert(key.clone(), true).is_some();
                    match ran {
                        RunVerdict::Ran { .. } => assert!(!was, "{call} {key}"),
                        RunVerdict::Replayed(done) => {
                            assert!(was, "{call} {key}");
                            assert_eq!(
                                done.outcome,
                                idemlog::Outcome::Kept(key.clone().into_bytes())
                            );
                        }
                        other => panic!("{call} {key} {other:?}"),
                    }
                }
                _ => {
                    let key = key("k", rng.below(3000));
                    let was = seen.insert(key.clone(), true).is_some();
                    let verdict = member.filter.observe(&key).unwrap();
                    assert_eq!(verdict.is_new(), !was, "{call} {key}");
                }
            }
        }
    }
}

/// Commits so many keys, each with one entry.
fn publish(member: &Member, outbox: &Outbox, count: usize) {
    let jobs = member.claims::<Repeatable>("c");
    for n in 0..count {
        let ClaimVerdict::New(mut claim) = jobs.claim(format!("j{n}")).unwrap() else {
            panic!("the key is new");
        };
        let commit = Commit::new(b"").publish(outbox, format!("mail {n}"));
        let committed = claim.commit_with(commit).unwrap();
        assert!(matches!(committed, CommitVerdict::Committed { .. }));
    }
}

/// Entries that one opener has leased are nobody else's: until it gives them back, acknowledges
/// them, or dies.
#[test]
fn an_outbox_is_dispatched_by_one_opener_at_a_time() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let outbox = |member: &Member| member.log.outbox("mail", small()).unwrap();
    let (first, second) = (outbox(&a), outbox(&b));
    publish(&a, &first, 6);
    let payloads = |entries: &[idemlog::OutboxEntry]| -> Vec<String> {
        let text = |e: &idemlog::OutboxEntry| String::from_utf8(e.payload.clone()).unwrap();
        entries.iter().map(text).collect()
    };
    let mine = first.lease(2).unwrap();
    assert_eq!(payloads(&mine), ["mail 0", "mail 1"]);
    let theirs = second.lease(2).unwrap();
    assert_eq!(payloads(&theirs), ["mail 2", "mail 3"]);
    assert_eq!(second.ack_many(&theirs).unwrap(), 2);
    first.give_back(&mine[..1]).unwrap();
    assert_eq!(payloads(&second.lease(1).unwrap()), ["mail 0"]);
    assert_eq!(payloads(&first.lease(9).unwrap()), ["mail 4", "mail 5"]);
    assert!(second.lease(9).unwrap().is_empty());
    assert_eq!(second.stats().unwrap().queued_count, 4);
    drop(first);
    a.kill();
    // What the dead one was at is free at once, without its lease having lapsed.
    let rest = second.lease(9).unwrap();
    assert_eq!(payloads(&rest), ["mail 1", "mail 4", "mail 5"]);
    assert_eq!(rest[0].attempt, 1);
    assert_eq!(second.ack_many(&rest).unwrap(), 3);
    let c = Member::open(&disk, &clock);
    assert!(
        outbox(&c).lease(9).unwrap().is_empty(),
        "one is still leased"
    );
    clock.advance_ms(61_000);
    assert_eq!(payloads(&outbox(&c).lease(9).unwrap()), ["mail 0"]);
}

#[test]
fn a_job_is_taken_by_one_opener_and_by_another_when_that_dies() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let intake = |member: &Member| {
        let options = IntakeOptions::new().jobs(small());
        member.log.intake::<Repeatable>("work", options).unwrap()
    };
    let (first, second) = (intake(&a), intake(&b));
    for n in 0..4 {
        assert_eq!(
            first.submit(format!("j{n}"), b"do it").unwrap(),
            Submitted::Queued
        );
        assert_eq!(
            second.submit(format!("j{n}"), b"do it").unwrap(),
            Submitted::AlreadyQueued
        );
    }
    let mut mine = first.take(2).unwrap();
    let ran = mine.pop().unwrap().run(|_| Ok(b"done".to_vec())).unwrap();
    assert!(matches!(ran, RunVerdict::Ran { .. }));
    let theirs = second.take(9).unwrap();
    assert_eq!(theirs.len(), 2, "{theirs:?}");
    assert_eq!(
        second.submit("j0", b"again").unwrap(),
        Submitted::InProgress
    );
    assert!(matches!(
        second.submit("j1", b"again").unwrap(),
        Submitted::Duplicate(_)
    ));
    a.process.kill();
    drop((mine, first));
    a.kill();
    let orphan = second.take(9).unwrap();
    assert_eq!(orphan.len(), 1);
    assert_eq!(orphan[0].key(), b"j0");
}

/// Two openers in turn, at the level of power cuts: what either was answered is there after a power
/// cut at any step, and what was not may be either.
#[test]
fn what_two_openers_were_answered_survives_power_cuts() {
    let answered = RefCell::new(Vec::new());
    let scenario = |disk: &SimDisk| {
        answered.borrow_mut().clear();
        let clock = clock();
        let power = || options(&clock).durability(Durability::Power);
        let run = || -> idemlog::Result<()> {
            let a = power().open_on(disk.dir())?;
            let b = power().open_on(disk.dir())?;
            let (first, second) = (a.filter("f", small())?, b.filter("f", small())?);
            for n in 0..24 {
                let key = key("k", n);
                let (one, other) = if n % 3 == 0 {
                    (&first, &second)
                } else {
                    (&second, &first)
                };
                if n % 4 == 0 {
                    // Appended by one, flushed by whoever is told of it.
                    let quickly = ObserveOptions::new().durability(Durability::Process);
                    assert!(one.observe_with(&key, &quickly)?.is_new());
                    assert!(!other.observe(&key)?.is_new());
                } else {
                    assert!(one.observe(&key)?.is_new());
                }
                answered.borrow_mut().push(key);
            }
            a.maintain()?;
            b.close()?;
            a.close()
        };
        run().ok();
    };
    let totals = for_each_crash_point(&CrashOptions::default(), scenario, |state| {
        let clock = clock();
        let log = options(&clock)
            .shared(false)
            .open_on(state.disk.dir())
            .unwrap();
        let filter = log.filter("f", small()).unwrap();
        for key in answered.borrow().iter() {
            assert_eq!(filter.observe(key).unwrap(), Observed::Duplicate);
        }
        for n in 0..24 {
            let _either = filter.observe(key("k", n)).unwrap();
            assert_eq!(filter.observe(key("k", n)).unwrap(), Observed::Duplicate);
        }
    });
    println!("checked={} distinct={}", totals.checked, totals.distinct);
    assert!(totals.checked > 500, "{}", totals.checked);
}

/// A flush that fails in one process poisons the store for all of them, until all have closed it.
#[test]
fn a_failed_flush_of_one_is_told_to_all() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    assert_eq!(b.filter.observe("before").unwrap(), Observed::New);
    a.log.sync().unwrap();
    disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
    let power = ObserveOptions::new().durability(Durability::Power);
    assert_eq!(
        a.filter.observe_with("lost", &power).unwrap_err().kind(),
        ErrorKind::Io
    );
    for member in [&a, &b] {
        let error = member.filter.observe("more").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
        assert!(member.log.health().poisoned.is_some());
    }
    let refused = options(&clock).open_on(disk.dir()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Poisoned, "{refused}");
    for member in [a, b] {
        member.log.close().unwrap_err();
    }
    let c = Member::open(&disk, &clock);
    assert_eq!(c.filter.observe("before").unwrap(), Observed::Duplicate);
    assert_eq!(c.filter.observe("after").unwrap(), Observed::New);
}

/// A write that fails is taken back before anybody else has seen it.
#[test]
fn a_full_disk_refuses_and_takes_back() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    for n in 0..10 {
        disk.fail(Fault::once(disk.steps(), FaultKind::NoSpace).only(Op::Write));
        let error = a.filter.observe(key("k", n)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert_eq!(error.applied(), idemlog::Applied::No);
        assert_eq!(b.filter.observe(key("k", n)).unwrap(), Observed::New);
        assert_eq!(a.filter.observe(key("k", n)).unwrap(), Observed::Duplicate);
    }
}

/// Namespaces, purges and time are those of the store, not of an opener.
#[test]
fn what_one_opener_declares_holds_for_the_others() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let jobs = a.claims::<Repeatable>("jobs");
    assert!(matches!(
        b.claims::<Repeatable>("jobs").claim("k").unwrap(),
        ClaimVerdict::New(_)
    ));
    assert!(b.log.namespace::<NonRepeatable>("jobs", small()).is_err());
    a.log.purge("jobs", true).unwrap();
    assert!(matches!(
        b.claims::<Repeatable>("jobs").claim("k").unwrap(),
        ClaimVerdict::New(_)
    ));
    assert!(jobs.claim("k").is_err(), "a handle of the purged one");
    let hour = small().retention(Retention::For(Duration::from_secs(3600)));
    let first = a.log.filter("h", hour.clone()).unwrap();
    let second = b.log.filter("h", hour).unwrap();
    assert_eq!(first.observe("k").unwrap(), Observed::New);
    clock.advance_ms(3_599_000);
    assert_eq!(second.observe("k").unwrap(), Observed::Duplicate);
    clock.advance_ms(3_700_000);
    assert_eq!(second.observe("k").unwrap(), Observed::New);
    assert_eq!(first.observe("k").unwrap(), Observed::Duplicate);
}

/// Keys that fill a segment of sixteen.
fn big(n: usize) -> String {
    format!("{n:0>900}")
}

/// Many rolls at the level of power cuts, with something in each segment that may not be forgotten:
/// what was sealed is what the next opener finds.
#[test]
fn a_roll_at_power_leaves_nothing_behind_its_seal() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let claims = a.claims::<Repeatable>("c");
    let power = ObserveOptions::new().durability(Durability::Power);
    let mut held = Vec::new();
    for n in 0..120 {
        let one = if n % 2 == 0 { &a } else { &b };
        assert!(one.filter.observe_with(big(n), &power).unwrap().is_new());
        if n % 30 == 0 {
            held.push(claims.claim(format!("held {n}")).unwrap());
        }
        if n % 10 == 0 {
            one.log.maintain().unwrap();
        }
    }
    let c = Member::open(&disk, &clock);
    for n in 0..120 {
        assert_eq!(
            c.filter.observe(big(n)).unwrap(),
            Observed::Duplicate,
            "{n}"
        );
    }
    assert_eq!(c.log.pending().unwrap().len(), 4);
    for member in [a, b, c] {
        member.kill();
    }
    let log = options(&clock).shared(false).open_on(disk.dir()).unwrap();
    assert_eq!(log.pending().unwrap().len(), 4);
}

/// Each reading call of a follower fails in turn: the call says so, and the next one knows all.
#[test]
fn a_follow_that_fails_half_way_forgets_nothing() {
    // In one segment; over a roll; over segments that are sealed by then.
    for (count, is_far) in [(40, false), (100, false), (200, true)] {
        let mut failed = 0;
        for read in 0..60 {
            let (disk, clock) = (SimDisk::seeded(1), clock());
            let a = Member::open(&disk, &clock);
            let b = Member::open(&disk, &clock);
            let claims = a.claims::<Repeatable>("c");
            let followers = b.claims::<Repeatable>("c");
            let ClaimVerdict::New(held) = claims.claim("held").unwrap() else {
                panic!("the key is new");
            };
            let own = followers.claim("own").unwrap();
            for n in 0..count {
                assert_eq!(a.filter.observe(key("k", n)).unwrap(), Observed::New);
                let job = format!("job {n}");
                if n % 8 == 0 {
                    let _ran = claims.run_once(&job, |_| Ok(vec![1; 60])).unwrap();
                }
                if is_far && n % 40 == 0 {
                    a.log.maintain().unwrap();
                }
            }
            // Who starts again looks for it behind what it has forgotten by then.
            let renewed = held.renew(Duration::from_secs(60)).unwrap();
            assert!(
                matches!(renewed, idemlog::Change::Applied(_)),
                "{renewed:?}"
            );
            let first = disk.counts().reads + read;
            disk.fail(Fault::once(first, FaultKind::Io).reads());
            let asked = b.filter.observe("asked");
            disk.clear_faults();
            failed += u64::from(asked.is_err());
            for n in 0..count {
                let seen = b.filter.observe(key("k", n)).unwrap();
                assert_eq!(seen, Observed::Duplicate, "count={count} read={read} {n}");
            }
            assert_eq!(
                b.log.pending().unwrap().len(),
                2,
                "count={count} read={read}"
            );
            // The lease runs on the boot clock of who has granted it, also behind a restart.
            clock.set_wall_ms(1_700_000_000_000 + 120_000);
            b.log.maintain().unwrap();
            let again = followers.claim("own").unwrap();
            let is_busy = matches!(again, ClaimVerdict::Busy { .. });
            assert!(is_busy, "count={count} read={read} {again:?}");
            drop((held, own));
        }
        assert!(failed > 1, "count={count} {failed}");
    }
}

/// Story: segments that had been dropped were not listed as sealed, so whoever had slept in front
/// of them went on behind them, and knew for ever of a claim whose end it had not read.
#[test]
fn what_ended_in_a_segment_that_is_gone_has_ended() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let hour = small().retention(Retention::For(Duration::from_secs(3600)));
    let short = a.log.filter("short", hour.clone()).unwrap();
    let jobs = a.log.namespace::<Repeatable>("jobs", hour).unwrap();
    let ClaimVerdict::New(mut own) = jobs.claim("own").unwrap() else {
        panic!("the key is new");
    };
    assert_eq!(b.log.pending().unwrap().len(), 1);
    for n in 0..300 {
        assert!(short.observe(key("k", n)).unwrap().is_new());
        if n == 150 {
            let committed = own.commit(b"done").unwrap();
            assert!(matches!(committed, CommitVerdict::Committed { .. }));
        }
    }
    a.log.maintain().unwrap();
    clock.advance_ms(3_700_000);
    a.log.maintain().unwrap();
    assert_eq!(a.log.stats().segments_count, 1);
    assert!(b.filter.observe("asked").unwrap().is_new());
    assert_eq!(b.log.stats().unsettled_count, 0);
}

/// Story: who starts again from the runs looked for what it knew of its leases where it had left
/// them. Another opener had carried the claim over meanwhile, and a jump of the wall clock ended
/// its lease for its own callers. And if the restart failed in the middle, so it was behind the
/// next one.
#[test]
fn a_lease_that_others_carried_over_runs_on_behind_a_restart() {
    let mut failed = 0;
    for read in 0..40 {
        failed += u64::from(is_failed_and_kept(read));
    }
    assert!((2..40).contains(&failed), "{failed}");
}

/// The reading call of that number fails in the first restart: says whether there was one.
fn is_failed_and_kept(read: u64) -> bool {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let hour = small().retention(Retention::For(Duration::from_secs(3600)));
    let short = a.log.filter("short", hour).unwrap();
    let lease = small().lease(Duration::from_secs(6 * 3600));
    let claims = b.log.namespace::<Repeatable>("c", lease).unwrap();
    let own = claims.claim("own").unwrap();
    let mut next = 0..;
    let mut is_failed = false;
    // Twice: the second copy is one of a copy.
    for round in 1..=2 {
        for n in next.by_ref().take(300) {
            assert!(short.observe(key("k", n)).unwrap().is_new());
        }
        a.log.maintain().unwrap();
        clock.advance_ms(3_700_000);
        a.log.maintain().unwrap();
        assert!(a.log.stats().carried_count >= round);
        if round == 1 {
            disk.fail(Fault::once(disk.counts().reads + read, FaultKind::Io).reads());
            is_failed = b.filter.observe("asked").is_err();
            disk.clear_faults();
        }
        assert!(b.filter.observe(key("f", round)).unwrap().is_new());
    }
    let left_ms = 6 * 3_600_000 - 2 * 3_700_000;
    clock.advance_ms(left_ms - 120_000);
    clock.set_wall_ms(1_700_000_000_000 + 6 * 3_600_000 + 120_000);
    b.log.maintain().unwrap();
    let again = claims.claim("own").unwrap();
    let is_busy = matches!(again, ClaimVerdict::Busy { .. });
    assert!(is_busy, "read={read} {again:?}");
    drop(own);
    is_failed
}

/// Who has slept through the stamps of others does not give them out again.
#[test]
fn an_epoch_is_above_all_former_ones_also_after_a_long_sleep() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let (first, second) = (a.claims::<Repeatable>("c"), b.claims::<Repeatable>("c"));
    let ClaimVerdict::New(x) = second.claim("x").unwrap() else {
        panic!("the key is new");
    };
    let ClaimVerdict::New(mut slow) = first.claim("k").unwrap() else {
        panic!("the key is new");
    };
    assert!(slow.epoch() > x.epoch());
    for n in 0..400 {
        assert!(a.filter.observe(key("k", n)).unwrap().is_new());
        if n % 40 == 0 {
            a.log.maintain().unwrap();
        }
    }
    clock.advance_ms(61_000);
    let ClaimVerdict::Takeover { claim, .. } = second.claim("k").unwrap() else {
        panic!("the lease has lapsed");
    };
    assert!(
        claim.epoch() > slow.epoch(),
        "{} {}",
        claim.epoch(),
        slow.epoch()
    );
    assert!(matches!(
        slow.commit(b"late").unwrap(),
        CommitVerdict::Fenced { .. }
    ));
}

/// Killed in the middle of a footer that lists what is not settled.
#[test]
fn an_unfinished_footer_is_written_again() {
    let run = |kill: Option<(u64, usize)>| {
        let (disk, clock) = (SimDisk::seeded(1), clock());
        let b = Member::open(&disk, &clock);
        let a = Member::open(&disk, &clock);
        let claims = a.claims::<Repeatable>("c");
        let held: Vec<_> = (0..40).map(|n| claims.claim(format!("{n}"))).collect();
        if let Some((step, kept_bytes)) = kill {
            a.process.kill_at(step, kept_bytes);
        }
        let observed = (0..20).take_while(|n| a.filter.observe(big(*n)).is_ok());
        let observed = observed.count();
        a.process.kill();
        drop((held, claims));
        a.kill();
        (disk, clock, b, observed)
    };
    // The last write to the first segment is its footer.
    let log = run(None).0.step_log();
    let is_footer = |line: &String| line.starts_with("write seg-000000000001.log");
    let footer = log.iter().rposition(is_footer).unwrap();
    let bytes: usize = log[footer].rsplit('+').next().unwrap().parse().unwrap();
    assert!(bytes > 250, "{}", log[footer]);
    for kept_bytes in (4..bytes - 8).step_by(4) {
        let (disk, clock, b, observed) = run(Some((footer as u64, kept_bytes)));
        for n in 0..observed {
            assert_eq!(
                b.filter.observe(big(n)).unwrap(),
                Observed::Duplicate,
                "{n}"
            );
        }
        for n in 1000..1060 {
            assert!(b.filter.observe(big(n)).unwrap().is_new());
            b.log.maintain().unwrap();
        }
        assert_eq!(b.log.stats().torn_writes_count, 1, "{kept_bytes}");
        assert_eq!(b.log.pending().unwrap().len(), 40, "{kept_bytes}");
        let c = Member::open(&disk, &clock);
        assert_eq!(c.log.pending().unwrap().len(), 40, "{kept_bytes}");
        b.kill();
        c.kill();
        let log = options(&clock).shared(false).open_on(disk.dir()).unwrap();
        assert_eq!(log.pending().unwrap().len(), 40, "{kept_bytes}");
    }
}

/// The manifest was replaced, and whoever did it has died before telling anybody.
#[test]
fn an_edit_that_nobody_was_told_of_is_found() {
    let steps = {
        let (disk, clock) = (SimDisk::seeded(1), clock());
        let (a, _b) = (Member::open(&disk, &clock), Member::open(&disk, &clock));
        let before = disk.steps();
        a.log.filter("x", small()).unwrap();
        disk.steps() - before
    };
    for step in 0..steps {
        let (disk, clock) = (SimDisk::seeded(1), clock());
        let (a, b) = (Member::open(&disk, &clock), Member::open(&disk, &clock));
        a.process.kill_at(disk.steps() + step, 0);
        assert!(a.log.filter("x", small()).is_err(), "{step}");
        a.kill();
        let first = b.log.filter("x", small()).unwrap();
        let c = Member::open(&disk, &clock);
        let second = c.log.filter("x", small()).unwrap();
        assert_eq!(first.observe("k").unwrap(), Observed::New, "{step}");
        assert_eq!(second.observe("k").unwrap(), Observed::Duplicate, "{step}");
    }
}

/// A flush that fails while a torn write is cleared is everybody's failure.
#[test]
fn clearing_what_a_dead_one_left_may_fail_for_all() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    assert_eq!(b.filter.observe("k").unwrap(), Observed::New);
    a.process.kill_at(disk.steps(), 20);
    assert!(a.filter.observe(key("torn", 1)).is_err());
    disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
    assert!(b.filter.observe("more").is_err());
    let power = ObserveOptions::new().durability(Durability::Power);
    let told = b.filter.observe_with("k", &power);
    assert_eq!(told.unwrap_err().kind(), ErrorKind::Poisoned);
}

/// An entry that was carried over once is parked, and leased, for all.
#[test]
fn what_becomes_of_a_carried_entry_is_followed() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let outbox = |member: &Member| member.log.outbox("mail", small()).unwrap();
    let (first, second) = (outbox(&a), outbox(&b));
    publish(&a, &first, 3);
    let mine = second.lease(1).unwrap();
    assert_eq!(mine.len(), 1);
    for n in 0..200 {
        assert!(a.filter.observe(key("k", n)).unwrap().is_new());
    }
    clock.advance_ms(8 * 24 * 3_600_000);
    for _ in 0..4 {
        a.log.confirm_time().unwrap();
        a.log.maintain().unwrap();
    }
    assert!(a.log.stats().carried_count > 0);
    let all = first.lease(9).unwrap();
    assert_eq!(all.len(), 3, "the lease of the other one has lapsed");
    assert!(first.park(&all[0], b"no").unwrap());
    assert!(
        first
            .nack(&all[1], Duration::from_secs(3600), b"later")
            .unwrap()
    );
    assert!(second.lease(9).unwrap().is_empty());
    first.give_back(&all[2..]).unwrap();
    assert_eq!(second.lease(9).unwrap().len(), 1);
    // And whoever sleeps for long keeps its own lease.
    for n in 1000..1400 {
        assert!(a.filter.observe(key("k", n)).unwrap().is_new());
        if n % 40 == 0 {
            a.log.maintain().unwrap();
        }
    }
    assert!(second.lease(9).unwrap().is_empty());
}

/// Story: the write of carried entries failed and was taken back, and the queue had them where they
/// were not: nobody was given them any more before the next open.
#[test]
fn an_entry_whose_copy_is_taken_back_is_still_sent() {
    let mut failed = 0;
    for write in 0..80 {
        let (disk, clock) = (SimDisk::new(), clock());
        let a = Member::open(&disk, &clock);
        let outbox = a.log.outbox("mail", small()).unwrap();
        publish(&a, &outbox, 3);
        for n in 0..200 {
            assert!(a.filter.observe(key("k", n)).unwrap().is_new());
        }
        a.log.maintain().unwrap();
        clock.advance_ms(8 * 24 * 3_600_000);
        a.log.confirm_time().unwrap();
        disk.fail(Fault::once(disk.steps() + write, FaultKind::NoSpace).only(Op::Write));
        failed += u64::from(a.log.maintain().is_err());
        disk.clear_faults();
        if a.log.health().poisoned.is_some() {
            // It was what tells the others.
            continue;
        }
        assert_eq!(outbox.lease(9).unwrap().len(), 3, "write={write}");
        for _ in 0..4 {
            a.log.maintain().unwrap();
        }
        assert!(a.log.stats().carried_count > 0);
    }
    assert!(failed > 1, "{failed}");
}

/// A store that stands still frees its space, and a purge leaves a full disk harmless.
#[test]
fn a_shared_store_at_rest_frees_its_space() {
    let (disk, clock) = (SimDisk::new(), clock());
    let a = Member::open(&disk, &clock);
    let b = Member::open(&disk, &clock);
    let hour = small().retention(Retention::For(Duration::from_secs(3600)));
    let filter = a.log.filter("h", hour).unwrap();
    for n in 0..20 {
        assert!(filter.observe(key("k", n)).unwrap().is_new());
    }
    clock.advance_ms(2 * 3_600_000);
    for _ in 0..4 {
        a.log.maintain().unwrap();
    }
    assert!(a.log.stats().drops_count > 0);
    assert_eq!(b.filter.get("k").unwrap(), KeyState::Absent);
    a.log.purge("h", true).unwrap();
    disk.fail(Fault::once(disk.steps(), FaultKind::NoSpace).only(Op::Write));
    let error = b.filter.observe("k").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    assert_eq!(b.filter.observe("k").unwrap(), Observed::New);
}

#[test]
fn what_a_shared_store_cannot_do_is_refused() {
    let (disk, clock) = (SimDisk::new(), clock());
    let salvage = options(&clock).open_mode(OpenMode::Salvage);
    let error = salvage.open_on(disk.dir()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let a = Member::open(&disk, &clock);
    #[cfg(feature = "snowflake")]
    assert_eq!(
        a.log.snowflakes(1, 0).unwrap_err().kind(),
        ErrorKind::Invalid
    );
    // What processes share is that of another version.
    let mut cells = disk.read_file("SHARED").unwrap();
    cells[0] ^= 1;
    disk.write_file("SHARED", cells);
    let error = a.filter.observe("k").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incompatible, "{error}");
}
