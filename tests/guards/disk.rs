//! Bytes written and flushes of a call, as the simulated disk counts them.

use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{Counts, SimDisk};
use idemlog::{
    ClaimOptions, Commit, DedupLog, Durability, EffectClass, Filter, Internal, NamespaceKind,
    NamespaceOptions, NonRepeatable, ObserveOptions, Probeable, Repeatable, Retention, RunVerdict,
    ZeroFill,
};

use super::{RECORD_BYTES, filter, key, keys, observe_new, options, to_usize};

/// What a call gave the disk to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cost {
    writes: u64,
    bytes: u64,
    /// Of files and of directories.
    flushes: u64,
}

impl Cost {
    fn between(before: &Counts, after: &Counts) -> Cost {
        Cost {
            writes: after.writes - before.writes,
            bytes: after.written_bytes - before.written_bytes,
            flushes: after.syncs + after.dir_syncs - before.syncs - before.dir_syncs,
        }
    }

    fn of(disk: &SimDisk, work: impl FnOnce()) -> Cost {
        let before = disk.counts();
        work();
        Cost::between(&before, &disk.counts())
    }
}

/// The frame that a flush puts behind the records, which says that they were durable.
const MARK_BYTES: u64 = 32;
/// Claim, and commit with an outcome of 64 bytes: an extended header in each.
const RUN_BYTES: u64 = 264;
/// A start of its own where the class asks for it.
const START_BYTES: u64 = 128;
/// A small commit is one flush of about one page: what a device writes at least.
const SMALL_COMMIT_BYTES_MAX: u64 = 4300;

const _: () = assert!(RUN_BYTES + START_BYTES + MARK_BYTES < SMALL_COMMIT_BYTES_MAX);

#[track_caller]
fn check(what: &str, cost: Cost, writes: u64, flushes: u64, bytes_max: u64) {
    println!("{what}: {cost:?}, bytes_max={bytes_max}");
    let expected = Cost {
        writes,
        flushes,
        bytes: cost.bytes,
    };
    assert_eq!(cost, expected, "{what}");
    assert!(
        cost.bytes <= bytes_max,
        "{what}: {cost:?}, bytes_max={bytes_max}"
    );
}

/// Sealed segments, and an active one of 512 KiB that ends far behind what a test writes.
const KEYS_FEW: u64 = 18_000;
/// The same with an active segment of 4 MiB.
const KEYS_MANY: u64 = 140_000;

/// A store with so many keys, and nothing left to do or to write.
fn open(durability: Durability, keys: u64) -> (SimDisk, DedupLog, Filter) {
    let disk = SimDisk::memory();
    let options = options(durability).segment_bytes(4 << 20);
    let log = options.open_on(disk.dir()).unwrap();
    let filter = filter(&log);
    observe_new(&filter, 0..keys);
    log.maintain().unwrap();
    log.sync().unwrap();
    (disk, log, filter)
}

#[test]
fn an_observation_is_one_write_and_one_flush_whatever_the_batch() {
    let levels = [
        (Durability::Buffered, 0, 0, 0),
        (Durability::Process, 1, 0, 0),
        (Durability::Power, 1, 1, MARK_BYTES),
    ];
    for (durability, writes, flushes, mark_bytes) in levels {
        let (disk, _log, filter) = open(durability, KEYS_FEW);
        let mut first = 1_000_000;
        for count in [1, 64, 100, 1000] {
            let batch = keys(first..first + count);
            first += count;
            let what = format!("{durability:?}: observe {count} new");
            let cost = Cost::of(&disk, || match &batch[..] {
                [one] => assert!(filter.observe(one).unwrap().is_new()),
                many => assert_eq!(filter.observe_many(many).unwrap().len(), many.len()),
            });
            let bytes_max = writes * count * RECORD_BYTES + mark_bytes;
            check(&what, cost, writes, flushes, bytes_max);
            let again = Cost::of(&disk, || drop(filter.observe_many(&batch).unwrap()));
            check(&format!("{what}, again"), again, 0, 0, 0);
        }
        let sealed = Cost::of(&disk, || drop(filter.observe_many(&keys(0..1000)).unwrap()));
        check("duplicates in sealed segments", sealed, 0, 0, 0);
        let absent = Cost::of(&disk, || drop(filter.get(key(1 << 40)).unwrap()));
        check("an absent key", absent, 0, 0, 0);
    }
}

fn run_once<C: EffectClass>(durability: Durability, writes: u64, flushes: u64) {
    let (disk, log, _filter) = open(durability, KEYS_FEW);
    let jobs = log.namespace::<C>("jobs", NamespaceOptions::new()).unwrap();
    let kind = log.kind_of("jobs").unwrap();
    let start_bytes = match kind {
        NamespaceKind::NonRepeatable | NamespaceKind::Probeable => START_BYTES,
        _ => 0,
    };
    log.sync().unwrap();
    for n in 0..3 {
        let what = format!("{durability:?}: run_once, {kind:?}");
        let cost = Cost::of(&disk, || {
            let ran = jobs.run_once(key(n), |_| Ok(vec![7; 64])).unwrap();
            assert!(matches!(ran, RunVerdict::Ran { .. }));
        });
        // At `Buffered` the commit before it goes along.
        let bytes_max = RUN_BYTES + start_bytes + flushes * MARK_BYTES;
        check(&what, cost, writes, flushes, bytes_max);
    }
}

/// At `Power` an effect costs one flush, and two where its start has to be durable before it.
#[test]
fn an_effect_costs_one_flush_and_two_where_its_start_must_be_durable() {
    run_once::<Repeatable>(Durability::Power, 1, 1);
    run_once::<Internal>(Durability::Power, 1, 1);
    run_once::<NonRepeatable>(Durability::Power, 2, 2);
    run_once::<Probeable>(Durability::Power, 2, 2);
    run_once::<Repeatable>(Durability::Process, 1, 0);
    run_once::<Internal>(Durability::Process, 1, 0);
    run_once::<NonRepeatable>(Durability::Process, 2, 1);
    run_once::<Probeable>(Durability::Process, 2, 1);
    run_once::<Repeatable>(Durability::Buffered, 0, 0);
    run_once::<Internal>(Durability::Buffered, 0, 0);
    run_once::<NonRepeatable>(Durability::Buffered, 1, 1);
    run_once::<Probeable>(Durability::Buffered, 1, 1);
}

#[test]
fn many_commits_share_one_write_and_one_flush() {
    let (disk, log, _filter) = open(Durability::Power, KEYS_MANY);
    let options = NamespaceOptions::new().outcome_bytes_max(64);
    let jobs = log.namespace::<Repeatable>("jobs", options).unwrap();
    // The room that claims keep free has the next segment made: ahead of what is measured.
    let held = jobs.claim_many(&keys(0..1000), &ClaimOptions::new());
    log.maintain().unwrap();
    drop(held);
    log.sync().unwrap();
    for count in [100, 1000] {
        let first = count * 1000;
        let mut held = Vec::new();
        let cost = Cost::of(&disk, || {
            let keys = keys(first..first + count);
            let claims = jobs.claim_many(&keys, &ClaimOptions::new()).unwrap();
            let claims = claims
                .into_iter()
                .map(|claim| claim.unwrap().claim().unwrap());
            held.extend(claims.map(|claim| (claim, Commit::without_outcome())));
        });
        check(&format!("claim_many of {count}"), cost, 0, 0, 0);
        let cost = Cost::of(&disk, || drop(jobs.commit_many(&mut held).unwrap()));
        let bytes_max = count * (RUN_BYTES - 64) + MARK_BYTES;
        check(&format!("commit_many of {count}"), cost, 1, 1, bytes_max);
    }
}

/// Bytes written for a record once: the record, its entry in a run (9.6 bytes at the fill of a
/// page), its share of a filter (1.25 bytes), and of the mark of its group commit.
const WRITTEN_PERCENT_MAX: u64 = 140;
/// The same with two merges, each of which writes the entry and the share of a filter anew.
const WRITTEN_MERGED_PERCENT_MAX: u64 = 210 + MANIFEST_PERCENT;
/// The manifest lists all segments at each seal: this much of segments as small as these, and
/// less than a hundredth of it at full size.
const MANIFEST_PERCENT: u64 = 3;
/// What lies on the disk for a record: the record, one entry and one share of a filter.
const DISK_PERCENT_MAX: u64 = 140;
/// Bytes on the disk for a key of 16 bytes, whatever the number of keys: the same 140 %, with the
/// hint of a closed store, and no more reserved ahead than the rest of a step.
const DISK_BYTES_MAX: u64 = 44;
/// The ballast for a full disk, the first blocks of the next segment, manifest and lock.
const DISK_BASE_BYTES: u64 = 80 * 1024;
/// Records of one group commit.
const GROUP: u64 = 64;
const SEGMENT_BYTES: u32 = 256 * 1024;
/// A run of 16 segments is made when there are 128: then an entry has been merged twice.
const SEALS: u64 = 140;

/// Observes new keys in groups, with the upkeep that they need, until so many seals more.
fn fill(log: &DedupLog, filter: &Filter, next: &mut u64, seals: u64) {
    let until = log.stats().seals_count + seals;
    while log.stats().seals_count < until {
        let end = *next + 16 * GROUP;
        for group in keys(*next..end).chunks(to_usize(GROUP)) {
            assert_eq!(filter.observe_many(group).unwrap().len(), group.len());
        }
        *next = end;
        log.maintain().unwrap();
    }
}

fn percent(bytes: u64, records: u64) -> u64 {
    bytes * 100 / (records * RECORD_BYTES)
}

#[test]
fn bytes_written_and_kept_for_a_new_key() {
    let disk = SimDisk::memory();
    // Zeros ahead are a price of their own, and only at `Power`.
    let options = options(Durability::Power).zero_fill(ZeroFill::Never);
    let options = options.segment_bytes(SEGMENT_BYTES);
    let log = options.open_on(disk.dir()).unwrap();
    let filter = filter(&log);
    let mut next = 0;
    let measure = |next: &mut u64, seals| {
        let (first, merges) = (*next, log.stats().merges_count);
        let cost = Cost::of(&disk, || fill(&log, &filter, next, seals));
        let written = percent(cost.bytes, *next - first);
        let merges = log.stats().merges_count - merges;
        println!(
            "written for {} keys: {written} % with {merges} merges",
            *next - first
        );
        (written, merges)
    };
    // Behind the first, small segments, up to a merge; then as long as there is none.
    measure(&mut next, 5);
    let mut once = measure(&mut next, 1);
    while once.1 > 0 {
        once = measure(&mut next, 1);
    }
    assert!(
        once.0 <= WRITTEN_PERCENT_MAX,
        "{once:?} of at most {WRITTEN_PERCENT_MAX} %"
    );
    let merged = measure(&mut next, SEALS);
    assert!(
        merged.1 > SEALS / 4,
        "{merged:?}: merges of merged runs, too"
    );
    assert!(merged.0 <= WRITTEN_MERGED_PERCENT_MAX, "{merged:?}");
    let names = disk.file_names();
    let kept: usize = names
        .iter()
        .map(|name| disk.read_file(name).unwrap().len())
        .sum();
    let kept = percent(kept as u64, next);
    println!("kept for {next} keys: {kept} %");
    assert!(
        kept <= DISK_PERCENT_MAX,
        "kept={kept} % of at most {DISK_PERCENT_MAX} %"
    );
}

/// One replacement of the manifest: its file and its directory.
const DROP_FLUSHES_MAX: u64 = 2;
/// Nothing of the log is written anew: the manifest alone.
const DROP_BYTES_MAX: u64 = 4096;

#[test]
fn segments_that_expire_together_cost_two_flushes() {
    for segments in [4, 40] {
        let disk = SimDisk::memory();
        let clock = Arc::new(ManualClock::new(1_700_000_000_000));
        let opened = options(Durability::Process).clock(Arc::clone(&clock) as _);
        let log = opened.segment_bytes(64 * 1024).open_on(disk.dir()).unwrap();
        let retention = Duration::from_secs(100);
        let kept = NamespaceOptions::new().retention(retention);
        let filter = log.filter("f", kept).unwrap();
        fill(&log, &filter, &mut 0, segments);
        // Without it the active segment would be over as well, and be replaced.
        let kept = ObserveOptions::new().retention(Retention::Forever);
        assert!(filter.observe_with("kept", &kept).unwrap().is_new());
        log.sync().unwrap();
        log.maintain().unwrap();
        clock.advance_ms(200_000);
        let cost = Cost::of(&disk, || log.maintain().unwrap());
        let drops = log.stats().drops_count;
        println!("{drops} segments dropped: {cost:?}");
        assert!(drops >= segments, "drops={drops}");
        assert!(cost.flushes <= DROP_FLUSHES_MAX, "{cost:?}");
        assert!(cost.bytes <= DROP_BYTES_MAX, "{cost:?}");
    }
}

/// Space is reserved as the log grows: not a whole segment at a time, and not the next one ahead.
#[test]
fn a_store_takes_44_bytes_a_key_at_any_number_of_keys() {
    let disk = SimDisk::memory();
    let mut first = 0;
    for count in [
        10_000, 30_000, 60_000, 70_000, 100_000, 125_000, 131_072, 200_000,
    ] {
        let options = options(Durability::Buffered).segment_bytes(32 << 20);
        let log = options.open_on(disk.dir()).unwrap();
        let filter = filter(&log);
        for next in (first..count).step_by(1000) {
            observe_new(&filter, next..(next + 1000).min(count));
            log.maintain().unwrap();
        }
        first = count;
        let running = disk.used_bytes();
        drop(filter);
        log.close().unwrap();
        let closed = disk.used_bytes();
        println!(
            "{count} keys: running {running}, closed {closed}, {} a key",
            closed / count
        );
        let most = count * DISK_BYTES_MAX + DISK_BASE_BYTES;
        assert!(
            running.max(closed) <= most,
            "{count}: {running} {closed} > {most}"
        );
    }
}
