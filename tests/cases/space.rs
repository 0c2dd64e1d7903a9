//! Disks that fill up: what was granted before is kept, expiry goes on, and every open succeeds.
//!
//! Segments over 64 KiB get their blocks in steps, so that little is reserved ahead; smaller ones
//! and those filled with zeros are reserved whole.

use std::time::Duration;

use idemlog::testing::sim::{Fault, FaultKind, Op, SimDisk};
use idemlog::{
    Applied, Claim, ClaimOptions, Commit, CommitVerdict, DedupLog, ErrorKind, Filter, KeyState,
    Namespace, Observed, Options, Repeatable, ZeroFill,
};

use super::{clock, filter, long, new, options, small};

const OUTCOME: [u8; 3000] = [7; 3000];

fn of_segments(bytes: u32) -> Options {
    options(&clock()).segment_bytes(bytes)
}

fn jobs(log: &DedupLog) -> Namespace<Repeatable> {
    let options = small().outcome_bytes_max(OUTCOME.len());
    log.namespace("j", options).unwrap()
}

/// Observes new keys, with the upkeep that they need.
fn fill(log: &DedupLog, filter: &Filter, name: &str, count: usize) {
    for n in 0..count {
        assert!(filter.observe(long(name, n)).unwrap().is_new());
        if n % 50 == 0 {
            log.maintain().unwrap();
        }
    }
}

/// Observes new keys until one is refused; says how many were not.
fn fill_until_full(filter: &Filter, name: &str) -> usize {
    for n in 0.. {
        if let Err(error) = filter.observe(long(name, n)) {
            assert_eq!(
                (error.kind(), error.applied()),
                (ErrorKind::Full, Applied::No),
                "{error}"
            );
            return n;
        }
        assert!(n < 20_000);
    }
    unreachable!()
}

/// Renews each claim once and commits it, with the largest outcome.
fn commit_all(claims: Vec<Claim<Repeatable>>, what: &str) {
    for mut claim in claims {
        let renewed = claim.renew(Duration::from_secs(90)).expect(what);
        assert!(renewed.is_applied(), "{what}");
        let verdict = claim.commit(&OUTCOME).expect(what);
        assert!(matches!(verdict, CommitVerdict::Committed { .. }), "{what}");
    }
}

/// A store in which claims were granted until the disk was full, behind so many keys.
struct Crowded {
    disk: SimDisk,
    log: DedupLog,
    claims: Vec<Claim<Repeatable>>,
    before: usize,
}

impl Crowded {
    fn new(segment_bytes: u32, before: usize, free: u64, claim: &ClaimOptions) -> Crowded {
        let disk = SimDisk::new();
        let log = of_segments(segment_bytes).open_on(disk.dir()).unwrap();
        let (jobs, keys) = (jobs(&log), filter(&log));
        fill(&log, &keys, "key", before);
        disk.set_free_bytes(Some(free));
        let granted = |n| jobs.claim_with(long("job", n), claim).ok().map(new);
        let claims: Vec<_> = (0..30).map_while(granted).collect();
        disk.set_free_bytes(Some(0));
        fill_until_full(&keys, "late");
        Crowded {
            disk,
            log,
            claims,
            before,
        }
    }

    /// Everything is there once the disk has space again.
    fn check(disk: &SimDisk, before: usize, done: usize, what: &str) {
        let killed = disk.after_kill();
        killed.set_free_bytes(None);
        let log = options(&clock()).open_on(killed.dir()).unwrap();
        let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
        for n in 0..done {
            let state = jobs.get(long("job", n)).unwrap();
            assert!(matches!(state, KeyState::Done(_)), "{what}: {n}: {state:?}");
        }
        let keys: Vec<_> = (0..before).map(|n| long("key", n)).collect();
        let known = filter(&log).check_many(&keys).unwrap();
        assert!(known.into_iter().all(Result::unwrap), "{what}");
    }
}

/// Calls `check` with many stores on disks that are full, at many places of many segments.
fn for_each_crowded(claim: &ClaimOptions, mut check: impl FnMut(Crowded, u32, &str)) {
    let cases = [
        (16 << 10, 0..260, 5),
        (128 << 10, 300..1100, 23),
        (1 << 20, 900..4500, 211),
    ];
    for (segment_bytes, places, step) in cases {
        for before in places.step_by(step) {
            for free in [0, 20, 90, 300, 700] {
                let what = format!("segments of {segment_bytes}, {before} keys, {free} KiB free");
                let crowded = Crowded::new(segment_bytes, before, free * 1024, claim);
                check(crowded, segment_bytes, &what);
            }
        }
    }
}

/// What open claims may still write has its blocks, wherever in a segment they were granted and
/// whatever of it was reserved by then: here, and in the next one.
#[test]
fn c10_what_open_claims_owe_fits_on_a_disk_that_is_full_at_any_moment() {
    let mut count = 0;
    for_each_crowded(&ClaimOptions::new(), |crowded, _, what| {
        let done = crowded.claims.len();
        count += done;
        commit_all(crowded.claims, what);
        assert!(crowded.log.health().poisoned.is_none(), "{what}");
        drop(crowded.log);
        Crowded::check(&crowded.disk, crowded.before, done, what);
    });
    assert!(count > 3000, "{count}");
}

/// The same behind a restart: what was reserved is known again.
#[test]
fn c10_what_detached_claims_owe_fits_on_a_full_disk_behind_a_restart() {
    let detached = ClaimOptions::new().detached(true);
    let mut count = 0;
    for_each_crowded(&detached, |crowded, segment_bytes, what| {
        let tickets: Vec<_> = crowded.claims.into_iter().map(Claim::detach).collect();
        let killed = crowded.disk.after_kill();
        // A full segment gets its index here.
        killed.set_free_bytes(None);
        let log = of_segments(segment_bytes).open_on(killed.dir()).unwrap();
        killed.set_free_bytes(Some(0));
        let jobs = jobs(&log);
        for ticket in &tickets {
            let verdict = jobs
                .commit_ticket(ticket, Commit::new(OUTCOME))
                .expect(what);
            assert!(matches!(verdict, CommitVerdict::Committed { .. }), "{what}");
        }
        count += tickets.len();
        drop((jobs, log));
        Crowded::check(&killed, crowded.before, tickets.len(), what);
    });
    assert!(count > 3000, "{count}");
}

/// Story: a store counted on the next segment, which was filled with zeros, and tried to reserve a
/// step of the active one instead.
#[test]
fn c10_claims_count_on_a_next_segment_that_is_reserved_whole() {
    let disk = SimDisk::new();
    let open = |zero_fill| {
        let options = of_segments(512 << 10).zero_fill(zero_fill);
        options.open_on(disk.dir()).unwrap()
    };
    let log = open(ZeroFill::Never);
    // The second segment, of 128 KiB, gets its blocks in steps.
    fill(&log, &filter(&log), "before", 400);
    log.close().unwrap();
    let log = open(ZeroFill::Always);
    let jobs = jobs(&log);
    fill(&log, &filter(&log), "key", 450);
    log.maintain().unwrap();
    let claims = (0..14).map(|n| new(jobs.claim(long("job", n)).unwrap()));
    let claims = claims.collect();
    disk.set_free_bytes(Some(0));
    commit_all(claims, "the next segment has zeros");
}

/// Story: the active segment ended because everything in it had expired, and with it went what was
/// reserved there for the claims of an older one.
#[test]
fn c10_a_segment_that_ends_early_leaves_what_claims_owe_in_the_next_one() {
    for segment_bytes in [64 << 10, 256 << 10] {
        let (disk, clock) = (SimDisk::new(), clock());
        let options = options(&clock).segment_bytes(segment_bytes);
        let log = options.open_on(disk.dir()).unwrap();
        let brief = small().retention(Duration::from_secs(60));
        let brief = log.filter("brief", brief).unwrap();
        let jobs = jobs(&log);
        let claims: Vec<_> = (0..6)
            .map(|n| new(jobs.claim(long("job", n)).unwrap()))
            .collect();
        let seals = || log.stats().seals_count;
        // The claims stay where they are, and their room moves along.
        for (keys, name) in [(filter(&log), "kept"), (brief, "brief")] {
            let before = seals();
            let mut n = 0;
            while seals() == before {
                fill(&log, &keys, &format!("{name}-{n}"), 1);
                n += 1;
            }
            fill(&log, &keys, name, 10);
        }
        // Where nothing moves, the second time finds out.
        log.maintain().unwrap();
        log.maintain().unwrap();
        let before = seals();
        clock.advance_ms(120_000);
        for _ in 0..4 {
            log.maintain().unwrap();
        }
        assert!(seals() > before, "the active segment has ended");
        disk.set_free_bytes(Some(0));
        commit_all(claims, &format!("segments of {segment_bytes}"));
    }
}

/// Story: on a full disk whatever was not new took the blocks that claims counted on.
#[test]
fn c10_other_changes_leave_what_claims_owe() {
    for (forgets, renewals) in [(0, 0), (300, 0), (0, 300), (40, 40)] {
        let disk = SimDisk::new();
        let log = of_segments(1 << 20).open_on(disk.dir()).unwrap();
        let (jobs, keys) = (jobs(&log), filter(&log));
        fill(&log, &keys, "key", 3000);
        let mut claims: Vec<_> = (0..8)
            .map(|n| new(jobs.claim(long("job", n)).unwrap()))
            .collect();
        let mut first = claims.remove(0);
        disk.set_free_bytes(Some(0));
        let forgotten = (0..forgets).take_while(|n| keys.forget(long("key", *n)).is_ok());
        let forgotten = forgotten.count();
        let renew = |_: &i32| first.renew(Duration::from_secs(90)).is_ok();
        let renewed = (0..renewals).take_while(renew).count();
        assert!(forgotten + renewed > 0 || forgets + renewals as usize == 0);
        let what = format!("{forgotten} forgotten, {renewed} renewed");
        commit_all(claims, &what);
        let verdict = first.commit(&OUTCOME).expect(&what);
        assert!(matches!(verdict, CommitVerdict::Committed { .. }), "{what}");
        let Err(refused) = keys.observe("late") else {
            continue;
        };
        assert_eq!(refused.kind(), ErrorKind::Full);
    }
}

/// Story: new keys took the last block, and what the ballast had left, so that no manifest could be
/// written any more and nothing expired.
#[test]
fn c10_expiry_goes_on_on_a_full_disk() {
    for segment_bytes in [64 << 10, 256 << 10] {
        for free in [20, 40, 70, 200, 400] {
            for killed in [false, true] {
                let what = format!("segments of {segment_bytes}, {free} KiB free, {killed}");
                let (disk, clock) = (SimDisk::new(), clock());
                let options = options(&clock).segment_bytes(segment_bytes);
                let hour = || small().retention(Duration::from_secs(3600));
                let mut log = options.clone().open_on(disk.dir()).unwrap();
                let mut keys = log.filter("hour", hour()).unwrap();
                fill(&log, &keys, "key", 3000);
                disk.set_free_bytes(Some(free * 1024));
                fill_until_full(&keys, "first");
                let _unused = log.maintain();
                let mut disk = disk;
                if killed {
                    let left = disk.free_bytes();
                    drop((keys, log));
                    disk = disk.after_kill();
                    disk.set_free_bytes(left);
                    log = options.open_on(disk.dir()).expect(&what);
                    keys = log.filter("hour", hour()).unwrap();
                } else {
                    // Where there is no other space, the ballast makes room for this.
                    log.filter("other", hour()).expect(&what);
                }
                fill_until_full(&keys, "second");
                let before = log.stats().segments_count;
                clock.advance_ms(2 * 3_600_000);
                for _ in 0..4 {
                    let _unused = log.maintain();
                }
                let left = log.stats().segments_count;
                assert!(left <= 2 && left < before, "{what}: {left} of {before}");
                // The space of what was removed is there once the directory is durable.
                log.filter("third", hour()).expect(&what);
                assert!(fill_until_full(&keys, "third") > 100, "{what}");
            }
        }
    }
}

/// Story: the last bytes of the disk went to new keys of a first segment, and neither a close nor
/// an open could write the manifest.
#[test]
fn c10_a_store_that_filled_its_disk_closes_and_opens() {
    for segment_bytes in [64 << 10, 256 << 10, 1 << 20] {
        for free in [3, 10, 20, 40, 100, 200] {
            let what = format!("segments of {segment_bytes}, {free} KiB free");
            let disk = SimDisk::new();
            let log = of_segments(segment_bytes).open_on(disk.dir()).unwrap();
            let keys = filter(&log);
            disk.set_free_bytes(Some(free * 1024));
            let count = fill_until_full(&keys, "key");
            drop(keys);
            log.close().expect(&what);
            let log = of_segments(segment_bytes).open_on(disk.dir());
            let log = log.expect(&what);
            for n in 0..count {
                let seen = filter(&log).observe(long("key", n)).unwrap();
                assert_eq!(seen, Observed::Duplicate, "{what}");
            }
        }
    }
}

/// Story: a segment that had to be written anew was written whole, with all the zeros behind its
/// records, and a disk with little space had no room for that.
#[test]
fn c10_a_segment_is_written_anew_on_a_disk_with_little_space() {
    for free in [200, 300, 600] {
        let disk = SimDisk::new();
        let log = of_segments(1 << 20).open_on(disk.dir()).unwrap();
        let keys = filter(&log);
        let mut count = 0;
        while log.stats().seals_count < 4 {
            fill(&log, &keys, &format!("{count}-key"), 1);
            count += 1;
        }
        fill(&log, &keys, "key", 300);
        disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
        let error = keys.observe("last").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        drop((keys, log));
        let killed = disk.after_kill();
        killed.set_free_bytes(Some(free * 1024));
        let log = of_segments(1 << 20).open_on(killed.dir()).unwrap();
        let keys: Vec<_> = (0..300).map(|n| long("key", n)).collect();
        let known = filter(&log).check_many(&keys).unwrap();
        assert!(known.into_iter().all(Result::unwrap), "{free} KiB free");
    }
}

/// Story: a store that had been private took all space that was left when it was opened shared,
/// and had none for its manifest then.
#[test]
fn c10_a_private_store_becomes_a_shared_one_on_a_full_disk() {
    for free in [8, 20, 40, 300] {
        for count in [10, 900] {
            let what = format!("{count} keys, {free} KiB free");
            let disk = SimDisk::new();
            let log = of_segments(128 << 10).open_on(disk.dir()).unwrap();
            fill(&log, &filter(&log), "key", count);
            log.close().unwrap();
            disk.set_free_bytes(Some(free * 1024));
            for is_shared in [true, false] {
                let options = of_segments(128 << 10).shared(is_shared);
                let log = options.open_on(disk.process().dir()).expect(&what);
                let seen = filter(&log).observe(long("key", count - 1)).unwrap();
                assert_eq!(seen, Observed::Duplicate, "{what}");
                log.close().expect(&what);
            }
        }
    }
}
