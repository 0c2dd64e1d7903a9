//! What commits with a key: cells, watermarks, outbox entries, and several claims at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{Fault, FaultKind, Op, PowerCut, SimDisk};
use idemlog::{
    Applied, CellVerdict, Cells, Claim, Commit, CommitAll, CommitAllVerdict, CommitVerdict,
    DedupLog, Dispatched, Dispatcher, Durability, EffectClass, ErrorKind, Expected, Filter,
    Internal, KeyState, Namespace, NamespaceKind, NamespaceOptions, NonRepeatable, Options, Outbox,
    OutboxEntry, Outcome, Repeatable, Reset, Sequenced, Stamp, WatermarkOptions, Watermarks,
};

use crate::support::rigged::rigged;

const START_MS: u64 = 1_700_000_000_000;
const HOUR: Duration = Duration::from_secs(3600);
const SOURCE: &[u8] = b"orders/0";

/// Makes each key new that fills a segment.
static FILLED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(START_MS))
}

fn options(clock: &Arc<ManualClock>) -> Options {
    Options::new()
        .segment_bytes(8192)
        .background(false)
        .clock(Arc::clone(clock) as _)
}

/// Everything a commit may touch.
struct Desk {
    log: DedupLog,
    jobs: Namespace<Internal>,
    filter: Filter,
    cells: Cells,
    marks: Watermarks,
    outbox: Outbox,
}

impl Desk {
    fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> Desk {
        Desk::of(options(clock).open_on(disk.dir()).unwrap())
    }

    fn memory() -> Desk {
        Desk::of(options(&clock()).open_in_memory().unwrap())
    }

    fn of(log: DedupLog) -> Desk {
        let small = NamespaceOptions::new().outcome_bytes_max(512);
        let lease = Duration::from_secs(60);
        Desk {
            jobs: log
                .namespace("jobs", small.clone().retention(HOUR))
                .unwrap(),
            filter: log.filter("filter", small.clone().retention(HOUR)).unwrap(),
            cells: log.cells("accounts", small.clone()).unwrap(),
            marks: log
                .watermarks("kafka", WatermarkOptions::sparse(4))
                .unwrap(),
            outbox: log.outbox("mail", small.lease(lease)).unwrap(),
            log,
        }
    }

    fn claim(&self, key: &str) -> Claim<Internal> {
        self.jobs.claim(key).unwrap().claim().unwrap()
    }

    fn commit(&self, key: &str, commit: Commit) -> CommitVerdict {
        self.claim(key).commit_with(commit).unwrap()
    }

    fn done(&self, key: &str, commit: Commit) {
        let verdict = self.commit(key, commit);
        assert!(
            matches!(verdict, CommitVerdict::Committed { .. }),
            "{verdict:?}"
        );
    }

    fn put(&self, key: &str, expected: Expected, value: &str) -> Stamp {
        match self.cells.put(key, expected, value).unwrap() {
            CellVerdict::Written { version } => version,
            other => panic!("{other:?}"),
        }
    }

    fn value(&self, key: &str) -> Option<String> {
        let cell = self.cells.get(key).unwrap()?;
        Some(String::from_utf8(cell.value).unwrap())
    }

    fn version(&self, key: &str) -> Stamp {
        self.cells.get(key).unwrap().unwrap().version
    }

    fn payloads(&self, count: usize) -> Vec<String> {
        let leased = self.outbox.lease(count).unwrap();
        leased.iter().map(payload).collect()
    }

    /// Fills so many segments with keys that expire in an hour.
    fn fill(&self, segments: u32) {
        let seals = self.log.stats().seals_count;
        loop {
            let n = FILLED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let key = format!("{n}-{}", "f".repeat(180));
            assert!(self.filter.observe(key).unwrap().is_new());
            self.log.maintain().unwrap();
            if self.log.stats().seals_count >= seals + u64::from(segments) {
                return;
            }
        }
    }
}

fn payload(entry: &OutboxEntry) -> String {
    String::from_utf8(entry.payload.clone()).unwrap()
}

fn all_of_it(desk: &Desk) -> Commit {
    Commit::new("paid")
        .put(&desk.cells, "a", Expected::Absent, "90")
        .put(&desk.cells, "b", Expected::Anything, "10")
        .advance(&desk.marks, SOURCE, 0)
        .publish(&desk.outbox, "mail 1")
        .publish(&desk.outbox, "mail 2")
}

#[test]
fn everything_attached_is_there_with_the_key_and_after_a_reopen() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    let flushes = desk.log.stats().flushes_count;
    desk.done("order-1", all_of_it(&desk));
    assert_eq!(desk.log.stats().flushes_count, flushes + 1);
    let ids: Vec<String> = {
        let leased = desk.outbox.lease(9).unwrap();
        assert_eq!(leased[1].index, 1);
        assert_eq!(
            (leased[1].key.as_slice(), leased[1].attempt),
            (&b"order-1"[..], 1)
        );
        assert_eq!(leased[0].namespace, "jobs");
        assert!(desk.payloads(9).is_empty(), "they are leased");
        leased.into_iter().map(|entry| entry.id).collect()
    };
    let bare = disk.after_power_cut(&mut PowerCut::drop_all());
    let desk = Desk::open(&bare, &clock);
    let KeyState::Done(done) = desk.jobs.get("order-1").unwrap() else {
        panic!("not done");
    };
    assert_eq!(done.outcome, Outcome::Kept(b"paid".to_vec()));
    assert_eq!(desk.value("a").as_deref(), Some("90"));
    assert_eq!(desk.value("b").as_deref(), Some("10"));
    assert_eq!(desk.marks.safe_position(SOURCE).unwrap(), Some(0));
    // A lease ends with its process; the ids are what they were.
    let again = desk.outbox.lease(9).unwrap();
    assert_eq!(again.iter().map(|e| e.id.clone()).collect::<Vec<_>>(), ids);
    assert_eq!(desk.outbox.ack_many(&again).unwrap(), 2);
    assert!(!desk.outbox.ack(&again[0]).unwrap());
    assert_eq!(desk.outbox.stats().unwrap().queued_count, 0);
}

#[test]
fn a_cell_that_has_changed_refuses_the_whole_commit() {
    let desk = Desk::memory();
    desk.put("a", Expected::Absent, "100");
    let mut claim = desk.claim("order-1");
    let stale = Commit::new("paid")
        .put(&desk.cells, "b", Expected::Anything, "10")
        .put(&desk.cells, "a", Expected::Absent, "90")
        .publish(&desk.outbox, "mail")
        .advance(&desk.marks, SOURCE, 0);
    let verdict = claim.commit_with(stale).unwrap();
    let CommitVerdict::CellConflict {
        index,
        current,
        outcome,
    } = verdict
    else {
        panic!("{verdict:?}");
    };
    assert_eq!((index, outcome.as_slice()), (1, &b"paid"[..]));
    assert_eq!(desk.value("b"), None);
    assert!(desk.payloads(9).is_empty());
    assert_eq!(desk.marks.observe(SOURCE, 0).unwrap(), Sequenced::Fresh);
    // The claim is still held, and the version told fits.
    let version = current.unwrap().version;
    let fresh = Commit::new("paid").put(&desk.cells, "a", Expected::Version(version), "90");
    assert!(matches!(
        claim.commit_with(fresh).unwrap(),
        CommitVerdict::Committed { .. }
    ));
    assert_eq!(desk.value("a").as_deref(), Some("90"));
}

#[test]
fn a_second_commit_of_the_same_epoch_attaches_nothing_again() {
    let desk = Desk::memory();
    let mut claim = desk.claim("order-1");
    let commit = || Commit::new("paid").publish(&desk.outbox, "mail");
    assert!(matches!(
        claim.commit_with(commit()).unwrap(),
        CommitVerdict::Committed { .. }
    ));
    assert_eq!(
        claim.commit_with(commit()).unwrap(),
        CommitVerdict::AlreadyCommitted
    );
    assert_eq!(desk.payloads(9), ["mail"]);
    let other = Commit::new("other").publish(&desk.outbox, "mail");
    assert!(matches!(
        claim.commit_with(other).unwrap(),
        CommitVerdict::Conflict { .. }
    ));
    assert_eq!(desk.outbox.stats().unwrap().queued_count, 1);
}

#[test]
fn a_fenced_owner_attaches_nothing() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    let mut late = desk.claim("order-1");
    clock.advance_ms(61_000);
    let mut claim = desk.claim("order-1");
    desk.put("a", Expected::Absent, "100");
    let commit = all_of_it(&desk);
    assert!(matches!(
        late.commit_with(commit).unwrap(),
        CommitVerdict::Fenced { .. }
    ));
    assert_eq!(desk.value("b"), None);
    assert!(desk.payloads(9).is_empty());
    assert!(matches!(
        claim.commit(b"mine").unwrap(),
        CommitVerdict::Committed { .. }
    ));
}

#[test]
fn versions_are_never_used_again() {
    let (disk, clock) = (SimDisk::new(), clock());
    let mut desk = Desk::open(&disk, &clock);
    let mut seen = vec![desk.put("a", Expected::Absent, "1")];
    seen.push(desk.put("a", Expected::Version(seen[0]), "2"));
    seen.push(desk.put("a", Expected::Version(seen[1]), "1"));
    assert!(matches!(
        desk.cells
            .put("a", Expected::Version(seen[0]), "3")
            .unwrap(),
        CellVerdict::Conflict { .. }
    ));
    assert_eq!(
        desk.cells.delete("a", Expected::Version(seen[2])).unwrap(),
        CellVerdict::Deleted
    );
    assert_eq!(desk.value("a"), None);
    seen.push(desk.put("a", Expected::Absent, "1"));
    // An unwritten tail is lost, and its versions with it.
    let buffered = NamespaceOptions::new()
        .durability(Durability::Buffered)
        .outcome_bytes_max(512);
    let cells = desk.log.cells("accounts", buffered).unwrap();
    let CellVerdict::Written { version } = cells.put("a", Expected::Anything, "lost").unwrap()
    else {
        panic!("not written");
    };
    seen.push(version);
    let bare = disk.after_power_cut(&mut PowerCut::drop_all());
    drop((desk, cells));
    desk = Desk::open(&bare, &clock);
    assert_eq!(desk.cells.get("a").unwrap().unwrap().version, seen[3]);
    for _ in 0..3 {
        seen.push(desk.put("a", Expected::Anything, "1"));
        desk.fill(2);
        clock.advance_ms(2 * 3_600_000);
        desk.log.maintain().unwrap();
    }
    assert!(desk.log.stats().carried_count > 0);
    assert_eq!(
        desk.cells.get("a").unwrap().unwrap().version,
        *seen.last().unwrap()
    );
    assert!(seen.is_sorted_by(|a, b| a < b), "{seen:?}");
}

#[test]
fn a_safe_position_stays_before_what_is_not_done() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    desk.marks.begin(SOURCE, 1000).unwrap();
    assert_eq!(desk.marks.safe_position(SOURCE).unwrap(), Some(999));
    desk.done(
        "1000",
        Commit::without_outcome().advance(&desk.marks, SOURCE, 1000),
    );
    desk.done(
        "1002",
        Commit::without_outcome().advance(&desk.marks, SOURCE, 1002),
    );
    let look = |desk: &Desk| {
        assert_eq!(desk.marks.safe_position(SOURCE).unwrap(), Some(1000));
        assert_eq!(
            desk.marks.observe(SOURCE, 1000).unwrap(),
            Sequenced::Duplicate
        );
        assert_eq!(desk.marks.observe(SOURCE, 1001).unwrap(), Sequenced::Fresh);
        assert_eq!(
            desk.marks.observe(SOURCE, 1002).unwrap(),
            Sequenced::Duplicate
        );
        let gap = Sequenced::Gap { expected: 1001 };
        assert_eq!(desk.marks.observe(SOURCE, 1003).unwrap(), gap);
    };
    look(&desk);
    let bare = disk.after_power_cut(&mut PowerCut::drop_all());
    let desk = Desk::open(&bare, &clock);
    // Of a source that is known `begin` changes nothing.
    desk.marks.begin(SOURCE, 5000).unwrap();
    look(&desk);
    desk.done(
        "1001",
        Commit::without_outcome().advance(&desk.marks, SOURCE, 1001),
    );
    assert_eq!(desk.marks.safe_position(SOURCE).unwrap(), Some(1002));
    assert_eq!(desk.marks.safe_position("another").unwrap(), None);
}

#[test]
fn numbers_of_one_commit_are_marked_together_and_once() {
    let desk = Desk::memory();
    let mut commit = Commit::without_outcome();
    for number in [3, 0, 1, 1, 4] {
        commit = commit.advance(&desk.marks, SOURCE, number);
    }
    let records = desk.log.stats().records_count;
    let mut claim = desk.claim("batch");
    assert!(matches!(
        claim.commit_with(commit).unwrap(),
        CommitVerdict::Committed { .. }
    ));
    // The claim, the commit, and one record for the source.
    assert_eq!(desk.log.stats().records_count, records + 3);
    assert_eq!(desk.marks.safe_position(SOURCE).unwrap(), Some(1));
    assert_eq!(desk.marks.advance(SOURCE, 3).unwrap(), Sequenced::Duplicate);
    assert_eq!(desk.log.stats().records_count, records + 3);
    assert_eq!(desk.marks.advance(SOURCE, 2).unwrap(), Sequenced::Fresh);
    assert_eq!(desk.marks.safe_position(SOURCE).unwrap(), Some(4));
}

#[test]
fn too_wide_a_gap_refuses_the_commit_and_loses_nothing() {
    let desk = Desk::memory();
    for number in [2, 4, 6, 8] {
        assert!(matches!(
            desk.marks.advance(SOURCE, number).unwrap(),
            Sequenced::Gap { .. }
        ));
    }
    let mut claim = desk.claim("10");
    let commit = Commit::new("x")
        .advance(&desk.marks, SOURCE, 10)
        .publish(&desk.outbox, "mail");
    let error = claim.commit_with(commit.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(error.to_string().contains("lowest_not_done=0"), "{error}");
    assert!(desk.payloads(9).is_empty());
    assert_eq!(
        desk.marks.advance(SOURCE, 10).unwrap_err().kind(),
        ErrorKind::Full
    );
    assert_eq!(
        desk.marks.advance(SOURCE, 3).unwrap(),
        Sequenced::Gap { expected: 0 }
    );
    assert!(matches!(
        claim.commit_with(commit).unwrap(),
        CommitVerdict::Committed { .. }
    ));
}

#[test]
fn a_reset_is_fenced_by_the_source_epoch() {
    let desk = Desk::memory();
    assert_eq!(desk.marks.advance(SOURCE, 0).unwrap(), Sequenced::Fresh);
    assert_eq!(
        desk.marks.reset(SOURCE, 0, 9).unwrap(),
        Reset::Fenced { current: 0 }
    );
    assert_eq!(desk.marks.reset(SOURCE, 2, 500).unwrap(), Reset::Applied);
    assert_eq!(
        desk.marks.reset(SOURCE, 1, 9).unwrap(),
        Reset::Fenced { current: 2 }
    );
    assert_eq!(desk.marks.epoch(SOURCE).unwrap(), 2);
    assert_eq!(
        desk.marks.observe(SOURCE, 499).unwrap(),
        Sequenced::Duplicate
    );
    // A number of the old numbering means nothing; the rest of its commit counts.
    desk.done(
        "old",
        Commit::new("x").advance_in(&desk.marks, SOURCE, 0, 500),
    );
    assert_eq!(desk.marks.safe_position(SOURCE).unwrap(), Some(499));
    desk.done(
        "new",
        Commit::new("x").advance_in(&desk.marks, SOURCE, 2, 500),
    );
    assert_eq!(desk.marks.safe_position(SOURCE).unwrap(), Some(500));
    let mut claim = desk.claim("future");
    let unknown = Commit::new("x").advance_in(&desk.marks, SOURCE, 3, 501);
    assert_eq!(
        claim.commit_with(unknown).unwrap_err().kind(),
        ErrorKind::Invalid
    );
}

#[test]
fn a_source_keeps_its_mode() {
    let desk = Desk::memory();
    assert!(matches!(
        desk.marks.advance(SOURCE, 2).unwrap(),
        Sequenced::Gap { .. }
    ));
    let strict = desk
        .log
        .watermarks("kafka", WatermarkOptions::strict())
        .unwrap();
    let error = strict.observe(SOURCE, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(
        strict.advance(SOURCE, 5).unwrap_err().kind(),
        ErrorKind::Invalid
    );
    assert_eq!(
        desk.marks.observe(SOURCE, 1).unwrap(),
        Sequenced::Gap { expected: 0 }
    );
    // Under a higher epoch the mode may be another one.
    assert_eq!(strict.reset(SOURCE, 1, 3).unwrap(), Reset::Applied);
    assert_eq!(strict.observe(SOURCE, 3).unwrap(), Sequenced::Fresh);
    // A strict one takes everything below for done.
    assert_eq!(
        strict.advance("other", 7).unwrap(),
        Sequenced::Gap { expected: 0 }
    );
    assert_eq!(strict.observe("other", 3).unwrap(), Sequenced::Duplicate);
    assert_eq!(strict.safe_position("other").unwrap(), Some(7));
}

#[test]
fn entries_of_one_ordering_key_are_dispatched_in_order() {
    let desk = Desk::memory();
    for (key, ordering, mail) in [("1", "x", "x1"), ("2", "x", "x2"), ("3", "y", "y1")] {
        desk.done(
            key,
            Commit::new("").publish_ordered(&desk.outbox, ordering, mail),
        );
    }
    let leased = desk.outbox.lease(9).unwrap();
    assert_eq!(leased.iter().map(payload).collect::<Vec<_>>(), ["x1", "y1"]);
    assert!(desk.outbox.nack(&leased[0], Duration::ZERO, b"no").unwrap());
    assert!(desk.outbox.ack(&leased[1]).unwrap());
    let leased = desk.outbox.lease(9).unwrap();
    assert_eq!(leased.iter().map(payload).collect::<Vec<_>>(), ["x1"]);
    assert_eq!(
        (leased[0].attempt, leased[0].error.as_slice()),
        (2, &b"no"[..])
    );
    assert!(desk.outbox.ack(&leased[0]).unwrap());
    assert_eq!(desk.payloads(9), ["x2"]);
}

#[test]
fn a_pause_and_what_was_put_aside_survive_a_reopen() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    for key in ["1", "2", "3"] {
        desk.done(
            key,
            Commit::new("").publish(&desk.outbox, format!("mail {key}")),
        );
    }
    let leased = desk.outbox.lease(9).unwrap();
    assert!(
        desk.outbox
            .nack(&leased[0], Duration::from_secs(30), b"down")
            .unwrap()
    );
    assert!(desk.outbox.park(&leased[1], b"bad address").unwrap());
    drop(desk);
    let desk = Desk::open(&disk, &clock);
    let stats = desk.outbox.stats().unwrap();
    assert_eq!((stats.queued_count, stats.parked_count), (2, 1));
    assert_eq!(desk.payloads(9), ["mail 3"]);
    clock.advance_ms(30_000);
    assert_eq!(desk.payloads(9), ["mail 1"]);
    let parked = desk.outbox.parked().unwrap();
    assert_eq!(parked[0].error, b"bad address");
    assert!(desk.outbox.unpark(&parked[0]).unwrap());
    assert_eq!(desk.payloads(9), ["mail 2"]);
    // A lapsed lease gives the entry to the next one.
    clock.advance_ms(60_000);
    assert_eq!(desk.payloads(9), ["mail 1", "mail 2", "mail 3"]);
    assert_eq!(
        desk.outbox.stats().unwrap().oldest_age,
        Some(Duration::from_secs(90))
    );
}

#[test]
fn a_dispatcher_that_is_down_for_twice_the_retention_loses_nothing() {
    let (disk, clock) = (SimDisk::new(), clock());
    let mut desk = Desk::open(&disk, &clock);
    let mut ids = Vec::new();
    for n in 0..10 {
        desk.done(
            &format!("order-{n}"),
            Commit::new("").publish(&desk.outbox, "mail"),
        );
    }
    desk.put("a", Expected::Absent, "100");
    assert!(matches!(
        desk.marks.advance(SOURCE, 7).unwrap(),
        Sequenced::Gap { .. }
    ));
    for entry in desk.outbox.lease(10).unwrap() {
        ids.push(entry.id);
    }
    for round in 0..4 {
        desk.fill(3);
        clock.advance_ms(3_600_000);
        desk.log.maintain().unwrap();
        if round % 2 == 0 {
            drop(desk);
            desk = Desk::open(&disk, &clock);
        }
    }
    assert!(desk.log.stats().drops_count + desk.log.stats().carried_count > 0);
    assert_eq!(desk.jobs.get("order-0").unwrap(), KeyState::Absent);
    clock.advance_ms(60_000);
    let leased = desk.outbox.lease(99).unwrap();
    assert_eq!(leased.iter().map(|e| e.id.clone()).collect::<Vec<_>>(), ids);
    assert_eq!(desk.value("a").as_deref(), Some("100"));
    assert_eq!(desk.marks.observe(SOURCE, 7).unwrap(), Sequenced::Duplicate);
    assert_eq!(desk.outbox.ack_many(&leased).unwrap(), 10);
    drop(desk);
    let desk = Desk::open(&disk, &clock);
    assert!(desk.payloads(99).is_empty());
}

/// A key that has expired runs again: its entry has the same id as the one that still waits, so it
/// is the same message, and nothing that was committed is lost.
#[test]
fn an_entry_that_waits_is_kept_when_its_key_runs_again() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    let publish = |desk: &Desk, what: &str| {
        desk.done("order-1", Commit::new("").publish(&desk.outbox, what));
    };
    publish(&desk, "first");
    let old = desk.outbox.lease(1).unwrap().remove(0);
    clock.advance_ms(2 * 3_600_000);
    publish(&desk, "second");
    let again = desk.outbox.lease(9).unwrap();
    assert_eq!(again.iter().map(payload).collect::<Vec<_>>(), ["first"]);
    assert!(desk.outbox.ack(&old).unwrap());
    assert!(!desk.outbox.ack(&again[0]).unwrap());
    // Gone, and the next one is another one under the same id.
    clock.advance_ms(2 * 3_600_000);
    publish(&desk, "third");
    let new = desk.outbox.lease(9).unwrap();
    assert_eq!(new.iter().map(payload).collect::<Vec<_>>(), ["third"]);
    assert_eq!(new[0].id, old.id);
    assert!(!desk.outbox.ack(&old).unwrap());
    assert_eq!(desk.outbox.stats().unwrap().queued_count, 1);
}

/// Story: cells filled a segment, it was due at once because time alone keeps nothing settled in
/// it, all of them were carried over into the next one, and that was due again, for ever; at a
/// bound on the log that evicts, a caller never came back.
#[test]
fn more_cells_than_a_segment_holds_are_not_copied_for_ever() {
    let clock = clock();
    let desk = Desk::of(options(&clock).open_in_memory().unwrap());
    for n in 0..200 {
        desk.put(&format!("cell-{n}"), Expected::Absent, &"v".repeat(200));
    }
    for _ in 0..3 {
        desk.log.maintain().unwrap();
    }
    let carried = desk.log.stats().carried_count;
    for _ in 0..3 {
        desk.log.maintain().unwrap();
    }
    assert_eq!(desk.log.stats().carried_count, carried);
    // What is deleted or written anew is not kept for ever.
    let segments = desk.log.stats().segments_count;
    for n in 0..200 {
        let verdict = desk
            .cells
            .delete(format!("cell-{n}"), Expected::Anything)
            .unwrap();
        assert_eq!(verdict, CellVerdict::Deleted);
    }
    clock.advance_ms(2 * 3_600_000);
    for _ in 0..3 {
        desk.log.maintain().unwrap();
    }
    assert!(desk.log.stats().segments_count < segments);
}

/// A segment that is to stay an hour stays so when the process dies before it is sealed.
#[test]
fn what_is_to_stay_stays_over_a_crash_before_the_seal() {
    for count in 1..60 {
        let (disk, clock) = (SimDisk::new(), clock());
        let desk = Desk::open(&disk, &clock);
        for n in 0..count {
            desk.put(&format!("cell-{n}"), Expected::Absent, &"v".repeat(200));
        }
        let desk = Desk::open(&disk.after_kill(), &clock);
        for _ in 0..3 {
            desk.log.maintain().unwrap();
        }
        assert_eq!(desk.log.stats().carried_count, 0, "{count}");
    }
}

/// Open claims in the newest segment are no reason to evict nothing.
#[test]
fn many_open_claims_do_not_keep_old_keys_from_being_evicted() {
    let options = options(&clock())
        .log_bytes_max(400 * 1024)
        .when_full(idemlog::WhenFull::EvictOldest);
    let desk = Desk::of(options.open_in_memory().unwrap());
    // Long keys: few records fill a segment.
    let key = |n: u32| format!("{n}-{}", "f".repeat(1500));
    for n in 0..250 {
        assert!(desk.filter.observe(key(n)).unwrap().is_new());
    }
    let claims: Vec<_> = (0..90).map(|n| desk.claim(&format!("{n}"))).collect();
    for n in 250..500 {
        assert!(desk.filter.observe(key(n)).unwrap().is_new());
    }
    assert!(desk.log.stats().evicted_count > 0);
    drop(claims);
}

#[test]
fn cells_that_fill_the_log_are_refused_and_can_be_deleted() {
    let options = options(&clock())
        .log_bytes_max(64 * 1024)
        .when_full(idemlog::WhenFull::EvictOldest);
    let desk = Desk::of(options.open_in_memory().unwrap());
    let value = "v".repeat(200);
    let put = |n: usize| {
        desk.cells
            .put(format!("cell-{n}"), Expected::Anything, &value)
    };
    let full = (0..1000).find(|n| put(*n).is_err()).unwrap();
    assert_eq!(put(full).unwrap_err().kind(), ErrorKind::Full);
    for n in 0..full {
        let verdict = desk
            .cells
            .delete(format!("cell-{n}"), Expected::Anything)
            .unwrap();
        assert_eq!(verdict, CellVerdict::Deleted);
    }
    desk.log.maintain().unwrap();
    assert!(put(full).is_ok());
}

/// Story: every look at an empty queue rang the bell that it was about to wait for.
#[test]
fn an_idle_dispatcher_sleeps_and_is_woken_at_once() {
    let log = Options::new().open_in_memory().unwrap();
    let outbox = log.outbox("mail", NamespaceOptions::new()).unwrap();
    let jobs: Namespace<Internal> = log.namespace("jobs", NamespaceOptions::new()).unwrap();
    let dispatcher = Dispatcher::new(&outbox).backoff(Duration::from_millis(20), HOUR);
    let (told, heard) = std::sync::mpsc::channel();
    let stopper = dispatcher.stopper();
    let running = std::thread::spawn(move || {
        let began = cpu_of_this_thread();
        let done = dispatcher.run(|entry| {
            told.send(()).unwrap();
            if entry.attempt == 1 {
                let error = b"again".to_vec();
                return Dispatched::Retry { error };
            }
            Dispatched::Done
        });
        (done, cpu_of_this_thread() - began)
    });
    std::thread::sleep(Duration::from_millis(500));
    let mut claim = jobs.claim("1").unwrap().claim().unwrap();
    let verdict = claim
        .commit_with(Commit::new("").publish(&outbox, "mail"))
        .unwrap();
    assert!(matches!(verdict, CommitVerdict::Committed { .. }));
    let committed = std::time::Instant::now();
    // The first dispatch, and after its pause the second one.
    for _ in 0..2 {
        heard.recv_timeout(Duration::from_secs(20)).unwrap();
    }
    // Without a bell it would look again after a minute.
    assert!(committed.elapsed() < Duration::from_secs(10));
    stopper.stop();
    let (done, cpu) = running.join().unwrap();
    done.unwrap();
    assert!(cpu < Duration::from_millis(200), "{cpu:?}");
}

/// The time that a thread has had the processor.
fn cpu_of_this_thread() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanos = text.split(' ').next().and_then(|word| word.parse().ok());
    Duration::from_nanos(nanos.unwrap())
}

/// Story: an outbox was opened after a write had failed and been taken back; its entries lay behind
/// that place, and were taken for what was taken back.
#[test]
fn an_outbox_opened_after_a_failed_write_has_all_its_entries() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    for n in 0..3 {
        desk.done(
            &format!("{n}"),
            Commit::new("").publish(&desk.outbox, format!("{n}")),
        );
    }
    drop(desk);
    let log = options(&clock).open_on(disk.dir()).unwrap();
    let small = NamespaceOptions::new().outcome_bytes_max(512);
    let filter = log.filter("filter", small.clone().retention(HOUR)).unwrap();
    log.sync().unwrap();
    disk.fail(Fault::once(disk.steps(), FaultKind::NoSpace).only(Op::Write));
    assert!(filter.observe("refused").is_err());
    // The entries are carried over, behind that place.
    for n in 0..200 {
        let key = format!("{n}-{}", "f".repeat(180));
        assert!(filter.observe(key).unwrap().is_new());
    }
    clock.advance_ms(2 * 3_600_000);
    log.maintain().unwrap();
    log.maintain().unwrap();
    assert!(log.stats().carried_count >= 3);
    let outbox = log.outbox("mail", small).unwrap();
    assert_eq!(outbox.lease(9).unwrap().len(), 3);
}

/// Two who hold an entry, because the lease of the first has lapsed: the later word counts.
#[test]
fn of_two_changes_of_an_entry_the_later_one_counts() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    desk.done("1", Commit::new("").publish(&desk.outbox, "mail"));
    let first = desk.outbox.lease(1).unwrap().remove(0);
    clock.advance_ms(61_000);
    let second = desk.outbox.lease(1).unwrap().remove(0);
    assert!(desk.outbox.park(&first, b"bad").unwrap());
    assert!(desk.outbox.nack(&second, Duration::ZERO, b"again").unwrap());
    assert!(desk.outbox.parked().unwrap().is_empty());
    let third = desk.outbox.lease(1).unwrap().remove(0);
    assert_eq!(third.attempt, 3);
    assert!(desk.outbox.ack(&first).unwrap());
    assert!(!desk.outbox.nack(&third, Duration::ZERO, b"").unwrap());
    assert!(desk.payloads(9).is_empty());
}

/// What cannot be read holds back nothing but itself.
#[test]
fn a_damaged_entry_does_not_keep_others_from_being_dispatched() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    for n in 0..6 {
        let mail = format!("mail number {n}");
        desk.done(&format!("{n}"), Commit::new("").publish(&desk.outbox, mail));
    }
    desk.fill(2);
    desk.log.close().unwrap();
    let disk = disk.after_kill();
    let name = "seg-000000000001.log";
    let mut bytes = disk.read_file(name).unwrap();
    let at = bytes
        .windows(13)
        .position(|w| w == b"mail number 2")
        .unwrap();
    bytes[at] ^= 1;
    disk.write_file(name, bytes);
    let log = options(&clock).open_on(disk.dir()).unwrap();
    assert_eq!(log.open_report().unreadable_count, 1);
    let desk = Desk::of(log);
    assert_eq!(desk.outbox.lease(9).unwrap().len(), 5);
    // Nobody knows whose it was: a list without it would not be true.
    assert_eq!(desk.log.pending().unwrap_err().kind(), ErrorKind::Damaged);
    // It may be a claim: its segment stays, and the failure shows.
    clock.advance_ms(2 * 3_600_000);
    assert_eq!(desk.log.maintain().unwrap_err().kind(), ErrorKind::Damaged);
    assert!(disk.file_names().contains(&name.to_owned()));
}

#[test]
fn claims_of_one_group_may_advance_the_same_source() {
    let desk = Desk::memory();
    let (mut one, mut two) = (desk.claim("1"), desk.claim("2"));
    let verdict = CommitAll::new()
        .add(&mut one, Commit::new("").advance(&desk.marks, SOURCE, 0))
        .add(&mut two, Commit::new("").advance(&desk.marks, SOURCE, 1))
        .commit()
        .unwrap();
    assert!(matches!(verdict, CommitAllVerdict::Committed { .. }));
    assert_eq!(desk.marks.safe_position(SOURCE).unwrap(), Some(1));
}

/// Found applied by somebody else, a key is done without what its owner attaches: that is told.
#[test]
fn a_commit_that_comes_after_a_resolve_is_told_that_nothing_was_attached() {
    let desk = Desk::memory();
    let small = NamespaceOptions::new().outcome_bytes_max(512);
    let pays: Namespace<NonRepeatable> = desk.log.namespace("pays", small).unwrap();
    let started = pays
        .claim("p")
        .unwrap()
        .claim()
        .unwrap()
        .start(b"")
        .unwrap();
    let epoch = started.epoch();
    let unknown = idemlog::Failure::unknown("?");
    let copy = pays
        .claim("q")
        .unwrap()
        .claim()
        .unwrap()
        .start(b"")
        .unwrap();
    assert!(copy.fail(unknown).unwrap().is_applied());
    let doubt = match pays.get("q").unwrap() {
        KeyState::InDoubt(doubt) => doubt,
        other => panic!("{other:?}"),
    };
    assert!(doubt.epoch > epoch);
    let applied = idemlog::Resolution::Applied(b"paid".to_vec());
    assert!(
        pays.resolve("q", doubt.epoch, applied)
            .unwrap()
            .is_applied()
    );
    let ticket = started.detach();
    assert!(matches!(
        pays.commit_ticket(&ticket, Commit::new("paid")).unwrap(),
        CommitVerdict::Committed { .. }
    ));
    let late = Commit::new("paid").publish(&desk.outbox, "mail");
    let verdict = pays.commit_ticket(&ticket, late).unwrap();
    assert!(
        matches!(verdict, CommitVerdict::Conflict { .. }),
        "{verdict:?}"
    );
    let same = pays.commit_ticket(&ticket, Commit::new("paid")).unwrap();
    assert_eq!(same, CommitVerdict::AlreadyCommitted);
    assert!(desk.payloads(9).is_empty());
}

#[test]
fn a_claim_makes_room_for_the_entry_that_it_attaches() {
    let log = options(&clock())
        .unsettled_count_max(2)
        .open_in_memory()
        .unwrap();
    let desk = Desk::of(log);
    let mut claims = [desk.claim("1"), desk.claim("2")];
    for claim in &mut claims {
        let commit = Commit::new("").publish(&desk.outbox, "mail");
        assert!(matches!(
            claim.commit_with(commit).unwrap(),
            CommitVerdict::Committed { .. }
        ));
    }
}

#[test]
fn entries_of_long_keys_are_acknowledged_together() {
    let log = Options::new().background(false).open_in_memory().unwrap();
    let desk = Desk::of(log);
    for n in 0..20 {
        let key = format!("{n}-{}", "k".repeat(60_000));
        desk.done(&key, Commit::new("").publish(&desk.outbox, "mail"));
    }
    let leased = desk.outbox.lease(20).unwrap();
    assert_eq!(desk.outbox.ack_many(&leased).unwrap(), 20);
}

#[test]
fn several_claims_commit_together_or_not_at_all() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    let small = NamespaceOptions::new().outcome_bytes_max(512);
    let payments: Namespace<NonRepeatable> = desk.log.namespace("payments", small).unwrap();
    let paid = |key: &str| payments.claim(key).unwrap().claim().unwrap();
    let mut started = paid("p-1").start(b"").unwrap();
    let (mut one, mut late) = (desk.claim("1"), desk.claim("2"));
    clock.advance_ms(61_000);
    let mut two = desk.claim("2");
    let flushes = desk.log.stats().flushes_count;
    let refused = CommitAll::new()
        .add(&mut started, Commit::new("p").publish(&desk.outbox, "mail"))
        .add(&mut one, Commit::new("1"))
        .add(&mut late, Commit::new("2"))
        .commit()
        .unwrap();
    let CommitAllVerdict::Refused { index: 2, verdict } = refused else {
        panic!("{refused:?}");
    };
    assert!(matches!(verdict, CommitVerdict::Fenced { .. }));
    assert!(desk.payloads(9).is_empty());
    assert!(matches!(
        desk.jobs.get("1").unwrap(),
        KeyState::Pending { .. }
    ));
    let commit = |one: &mut _, two: &mut _, started: &mut _| {
        CommitAll::new()
            .add(started, Commit::new("p").publish(&desk.outbox, "mail"))
            .add(one, Commit::new("1"))
            .add(two, Commit::new("2"))
            .commit()
            .unwrap()
    };
    let verdict = commit(&mut one, &mut two, &mut started);
    assert!(
        matches!(verdict, CommitAllVerdict::Committed { .. }),
        "{verdict:?}"
    );
    assert_eq!(desk.log.stats().flushes_count, flushes + 1);
    assert_eq!(
        commit(&mut one, &mut two, &mut started),
        CommitAllVerdict::AlreadyCommitted
    );
    assert_eq!(desk.payloads(9), ["mail"]);
    // One that was committed before, together with one that was not, is refused.
    let mut three = desk.claim("3");
    let mixed = CommitAll::new()
        .add(&mut one, Commit::new("1"))
        .add(&mut three, Commit::new("3"))
        .commit()
        .unwrap();
    let verdict = CommitVerdict::AlreadyCommitted;
    assert_eq!(mixed, CommitAllVerdict::Refused { index: 0, verdict });
    let bare = disk.after_power_cut(&mut PowerCut::drop_all());
    let desk = Desk::open(&bare, &clock);
    for key in ["1", "2"] {
        assert!(matches!(desk.jobs.get(key).unwrap(), KeyState::Done(_)));
    }
    assert_eq!(desk.jobs.get("3").unwrap(), KeyState::Absent);
}

/// What is leased may be sent, so it is as durable as the outbox says, whatever its commit was.
#[test]
fn an_entry_that_was_leased_survives_a_power_cut() {
    for level in [Durability::Buffered, Durability::Process] {
        let (disk, clock) = (SimDisk::new(), clock());
        let desk = Desk::open(&disk, &clock);
        let mut claim = desk.claim("k");
        let commit = Commit::new("k").publish(&desk.outbox, "mail");
        let committed = claim.commit_with(commit.durability(level)).unwrap();
        assert!(matches!(committed, CommitVerdict::Committed { .. }));
        let lost = disk.after_power_cut(&mut PowerCut::drop_all());
        assert!(Desk::open(&lost, &clock).payloads(9).is_empty());
        assert_eq!(desk.payloads(9), ["mail"]);
        let kept = disk.after_power_cut(&mut PowerCut::drop_all());
        let desk = Desk::open(&kept, &clock);
        assert_eq!(desk.payloads(9), ["mail"]);
        assert!(matches!(desk.jobs.get("k").unwrap(), KeyState::Done(_)));
    }
}

/// Story: an acknowledgement waited for another one's flush, and was not written yet, when
/// somebody looked at the entry: it was gone, and its queue had it no more. Then the write failed
/// and the acknowledgement was taken back.
#[test]
fn an_entry_whose_acknowledgement_is_taken_back_is_leased_again() {
    let [is_held, is_failing, is_flushing] = [false; 3].map(|no| Arc::new(AtomicBool::new(no)));
    let (disk, clock) = (SimDisk::new(), clock());
    let dir = {
        let [is_held, is_failing, is_flushing] =
            [&is_held, &is_failing, &is_flushing].map(Arc::clone);
        rigged(disk.dir(), move |op, name| {
            let is_log = name.starts_with("seg-");
            if op == Op::Sync && is_log {
                is_flushing.store(true, Ordering::SeqCst);
                while is_held.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
            }
            if op == Op::Write && is_log && is_failing.swap(false, Ordering::SeqCst) {
                is_held.store(false, Ordering::SeqCst);
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            Ok(())
        })
    };
    let desk = Desk::of(options(&clock).open_on(dir).unwrap());
    desk.done("k", Commit::new("").publish(&desk.outbox, "mail"));
    let leased = desk.outbox.lease(1).unwrap().remove(0);
    clock.advance_ms(61_000);
    is_held.store(true, Ordering::SeqCst);
    is_flushing.store(false, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let flushing = scope.spawn(|| desk.filter.observe("other").unwrap());
        while !is_flushing.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let before = desk.log.stats().records_count;
        let acknowledged = scope.spawn(|| desk.outbox.ack(&leased));
        while desk.log.stats().records_count == before {
            std::thread::yield_now();
        }
        is_failing.store(true, Ordering::SeqCst);
        assert!(desk.outbox.lease(1).unwrap().is_empty());
        is_held.store(false, Ordering::SeqCst);
        assert!(flushing.join().unwrap().is_new());
        let error = acknowledged.join().unwrap().unwrap_err();
        assert_eq!(error.applied(), Applied::No, "{error}");
    });
    assert!(!is_failing.load(Ordering::SeqCst));
    clock.advance_ms(61_000);
    assert_eq!(desk.payloads(9), ["mail"]);
}

/// What is read of a cell and of a source is as durable as their namespaces say.
#[test]
fn what_was_read_survives_a_power_cut() {
    type Read = fn(&Desk) -> bool;
    let reads: [Read; 2] = [
        |desk| desk.value("a").as_deref() == Some("90"),
        |desk| desk.marks.safe_position(SOURCE).unwrap() == Some(0),
    ];
    for read in reads {
        let (disk, clock) = (SimDisk::new(), clock());
        let desk = Desk::open(&disk, &clock);
        desk.marks.begin(SOURCE, 0).unwrap();
        let mut claim = desk.claim("k");
        let commit = Commit::new("k")
            .put(&desk.cells, "a", Expected::Absent, "90")
            .advance(&desk.marks, SOURCE, 0)
            .durability(Durability::Process);
        let committed = claim.commit_with(commit).unwrap();
        assert!(matches!(committed, CommitVerdict::Committed { .. }));
        let lost = disk.after_power_cut(&mut PowerCut::drop_all());
        assert!(!read(&Desk::open(&lost, &clock)));
        assert!(read(&desk));
        let kept = disk.after_power_cut(&mut PowerCut::drop_all());
        assert!(read(&Desk::open(&kept, &clock)));
    }
}

#[test]
fn a_batch_of_commits_may_have_something_attached() {
    let desk = Desk::memory();
    let version = desk.put("a", Expected::Absent, "1");
    let stale =
        |n: &str| Commit::new(n.to_owned()).put(&desk.cells, "a", Expected::Version(version), n);
    let mut items = vec![
        (desk.claim("0"), Commit::new("0")),
        (desk.claim("1"), stale("1")),
        (desk.claim("2"), stale("2")),
        (
            desk.claim("3"),
            Commit::new("3").publish(&desk.outbox, "mail"),
        ),
        (
            desk.claim("4"),
            Commit::new("x".repeat(513)).publish(&desk.outbox, "big"),
        ),
    ];
    let flushes = desk.log.stats().flushes_count;
    let verdicts = desk.jobs.commit_many(&mut items).unwrap();
    assert_eq!(desk.log.stats().flushes_count, flushes + 1);
    for index in [0, 1, 3] {
        let verdict = &verdicts[index];
        assert!(
            matches!(verdict, Ok(CommitVerdict::Committed { .. })),
            "{index}"
        );
    }
    assert!(matches!(
        verdicts[2],
        Ok(CommitVerdict::CellConflict { index: 0, .. })
    ));
    assert_eq!(verdicts[4].as_ref().unwrap_err().kind(), ErrorKind::Invalid);
    drop(items);
    // What was refused was still held, and is released.
    assert_eq!(desk.jobs.get("2").unwrap(), KeyState::Absent);
    assert_eq!(desk.value("a").as_deref(), Some("1"));
    assert_eq!(desk.payloads(9), ["mail"]);
}

#[test]
fn outcomes_may_be_told_for_less_long_than_keys_are_remembered() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    let minute = Duration::from_secs(60);
    desk.done("1", Commit::new("secret").outcome_retention(minute));
    desk.done("2", Commit::new("kept").outcome_retention(2 * HOUR));
    let outcome = |desk: &Desk, key: &str| match desk.jobs.get(key).unwrap() {
        KeyState::Done(done) => Some(done.outcome),
        _ => None,
    };
    let kept = |text: &str| Some(Outcome::Kept(text.as_bytes().to_vec()));
    assert_eq!(outcome(&desk, "1"), kept("secret"));
    clock.advance_ms(61_000);
    assert_eq!(outcome(&desk, "1"), Some(Outcome::Dropped));
    drop(desk);
    let desk = Desk::open(&disk, &clock);
    assert_eq!(outcome(&desk, "1"), Some(Outcome::Dropped));
    assert_eq!(outcome(&desk, "2"), kept("kept"));
    clock.advance_ms(3_600_000);
    assert_eq!(outcome(&desk, "2"), None);
}

#[test]
fn what_cannot_be_attached_is_refused_before_anything_is_written() {
    let desk = Desk::memory();
    let other = Desk::memory();
    let records = desk.log.stats().records_count;
    let mut claim = desk.claim("1");
    let big = "x".repeat(513);
    let many = (0..90).fold(Commit::new(""), |commit, n| {
        commit.put(&desk.cells, format!("cell-{n}"), Expected::Anything, "v")
    });
    for (commit, what) in [
        (
            Commit::new("").publish(&other.outbox, "mail"),
            "another store",
        ),
        (
            Commit::new("").publish(&desk.outbox, big.clone()),
            "over the limit",
        ),
        (
            Commit::new("").put(&desk.cells, "a", Expected::Anything, big),
            "over the limit",
        ),
        (
            Commit::new("").put(&desk.cells, "", Expected::Anything, ""),
            "key is empty",
        ),
        (
            Commit::new("").advance(&desk.marks, SOURCE, u64::MAX),
            "largest",
        ),
        (
            Commit::new("")
                .put(&desk.cells, "a", Expected::Anything, "1")
                .delete(&desk.cells, "a", Expected::Anything),
            "names a key twice",
        ),
        (many, "too large"),
    ] {
        let error = claim.commit_with(commit).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
    assert_eq!(desk.log.stats().records_count, records + 1);
    assert!(CommitAll::new().commit().is_err());
    let mut foreign = other.claim("1");
    let both = CommitAll::new()
        .add(&mut claim, Commit::new(""))
        .add(&mut foreign, Commit::new(""))
        .commit();
    assert_eq!(both.unwrap_err().kind(), ErrorKind::Invalid);
    assert!(matches!(
        claim.commit(b"").unwrap(),
        CommitVerdict::Committed { .. }
    ));
}

#[test]
fn a_write_that_fails_takes_the_whole_frame_back() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    desk.done("0", Commit::new("").publish(&desk.outbox, "mail 0"));
    let leased = desk.outbox.lease(1).unwrap();
    let mut claim = desk.claim("1");
    // A claim waits for nothing: what was promised is in the file first.
    desk.log.sync().unwrap();
    disk.fail(Fault::once(disk.steps(), FaultKind::NoSpace));
    let error = claim.commit_with(all_of_it(&desk)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    assert_eq!(desk.value("a"), None);
    assert!(desk.payloads(9).is_empty());
    assert_eq!(desk.marks.observe(SOURCE, 0).unwrap(), Sequenced::Fresh);
    // An end that was taken back leaves the entry where it was.
    for change in [
        &(|| desk.outbox.ack(&leased[0])) as &dyn Fn() -> idemlog::Result<bool>,
        &|| desk.outbox.nack(&leased[0], Duration::ZERO, b""),
        &|| desk.outbox.park(&leased[0], b""),
    ] {
        disk.fail(Fault::once(disk.steps(), FaultKind::NoSpace));
        assert_eq!(change().unwrap_err().kind(), ErrorKind::Full);
    }
    clock.advance_ms(61_000);
    assert_eq!(desk.payloads(9), ["mail 0"]);
    let committed = claim.commit_with(all_of_it(&desk)).unwrap();
    assert!(matches!(committed, CommitVerdict::Committed { .. }));
    assert_eq!(desk.payloads(9), ["mail 1", "mail 2"]);
    let desk = Desk::open(&disk.after_power_cut(&mut PowerCut::drop_all()), &clock);
    assert_eq!(desk.value("a").as_deref(), Some("90"));
    assert_eq!(desk.payloads(9), ["mail 0", "mail 1", "mail 2"]);
}

#[test]
fn the_bound_of_unsettled_records_counts_what_is_attached() {
    let log = options(&clock())
        .unsettled_count_max(3)
        .open_in_memory()
        .unwrap();
    let desk = Desk::of(log);
    desk.put("a", Expected::Anything, "1");
    desk.put("b", Expected::Anything, "1");
    desk.put("a", Expected::Anything, "2");
    let mut claim = desk.claim("1");
    let two = Commit::new("")
        .publish(&desk.outbox, "1")
        .publish(&desk.outbox, "2");
    assert_eq!(claim.commit_with(two).unwrap_err().kind(), ErrorKind::Full);
    let error = desk.cells.put("c", Expected::Anything, "1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(matches!(
        claim.commit(b"").unwrap(),
        CommitVerdict::Committed { .. }
    ));
    desk.put("c", Expected::Anything, "1");
}

#[test]
fn other_kinds_of_namespaces_are_told_apart_and_listed_as_what_they_are() {
    let desk = Desk::memory();
    desk.put("a", Expected::Absent, "1");
    let kind = |name: &str| desk.log.kind_of(name).unwrap();
    assert_eq!(kind("accounts"), NamespaceKind::Cells);
    assert_eq!(kind("kafka"), NamespaceKind::Watermarks);
    assert_eq!(kind("mail"), NamespaceKind::Outbox);
    let small = NamespaceOptions::new().outcome_bytes_max(512);
    assert!(desk.log.outbox("accounts", small.clone()).is_err());
    assert!(
        desk.log
            .namespace::<Repeatable>("mail", small.clone())
            .is_err()
    );
    assert!(desk.log.pending().unwrap().is_empty());
    assert!(desk.log.in_doubt().unwrap().is_empty());
    // What may not be forgotten is not purged by the way.
    assert_eq!(
        desk.log.purge("accounts", false).unwrap_err().kind(),
        ErrorKind::Invalid
    );
    desk.log.purge("accounts", true).unwrap();
    assert_eq!(desk.cells.get("a").unwrap_err().kind(), ErrorKind::Invalid);
    let cells = desk.log.cells("accounts", small).unwrap();
    assert_eq!(cells.get("a").unwrap(), None);
}

#[test]
fn a_dispatcher_delivers_retries_with_growing_pauses_and_parks() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    for mail in ["good", "bad", "flaky"] {
        desk.done(mail, Commit::new("").publish(&desk.outbox, mail));
    }
    let second = Duration::from_secs(1);
    let dispatcher = Dispatcher::new(&desk.outbox)
        .backoff(second, 4 * second)
        .attempts_max(5);
    let mut tries = Vec::new();
    for now_s in 0..40 {
        dispatcher
            .run_due(&mut |entry: &OutboxEntry| match entry.payload.as_slice() {
                b"good" => Dispatched::Done,
                b"bad" => Dispatched::Park {
                    error: b"never".to_vec(),
                },
                _ => {
                    tries.push(now_s);
                    Dispatched::Retry {
                        error: b"down".to_vec(),
                    }
                }
            })
            .unwrap();
        clock.advance_ms(1000);
    }
    assert_eq!(tries, [0, 1, 3, 7, 11]);
    let parked = desk.outbox.parked().unwrap();
    assert_eq!(
        parked.iter().map(payload).collect::<Vec<_>>(),
        ["bad", "flaky"]
    );
    assert_eq!(desk.outbox.stats().unwrap().queued_count, 0);
}

#[test]
fn a_delivery_that_panics_gives_its_entries_back() {
    let desk = Desk::memory();
    for n in ["1", "2"] {
        desk.done(n, Commit::new("").publish(&desk.outbox, n));
    }
    let dispatcher = Dispatcher::new(&desk.outbox);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        dispatcher.run_due(&mut |_: &OutboxEntry| panic!("delivery"))
    }));
    assert!(panicked.is_err());
    assert_eq!(desk.payloads(9), ["1", "2"]);
}

#[test]
fn a_dispatcher_is_woken_by_a_commit_and_ends_when_it_is_told_to() {
    let log = Options::new().open_in_memory().unwrap();
    let outbox = log.outbox("mail", NamespaceOptions::new()).unwrap();
    let jobs: Namespace<Internal> = log.namespace("jobs", NamespaceOptions::new()).unwrap();
    let dispatcher = Dispatcher::new(&outbox);
    let stopper = dispatcher.stopper();
    let (told, heard) = std::sync::mpsc::channel();
    let running = std::thread::spawn(move || {
        dispatcher.run(|entry| {
            told.send(payload(entry)).unwrap();
            Dispatched::Done
        })
    });
    for n in 0..20 {
        let mut claim = jobs.claim(format!("{n}")).unwrap().claim().unwrap();
        let commit = Commit::new("").publish(&outbox, format!("{n}"));
        assert!(matches!(
            claim.commit_with(commit).unwrap(),
            CommitVerdict::Committed { .. }
        ));
        assert_eq!(
            heard.recv_timeout(Duration::from_secs(20)).unwrap(),
            format!("{n}")
        );
    }
    stopper.stop();
    running.join().unwrap().unwrap();
    // A store that is closed ends it, too.
    let dispatcher = Dispatcher::new(&outbox);
    let running = std::thread::spawn(move || dispatcher.run(|_| Dispatched::Done));
    log.close().unwrap();
    assert_eq!(
        running.join().unwrap().unwrap_err().kind(),
        ErrorKind::Closed
    );
}

/// The tables of `docs/format.md`, read without the crate's code.
#[test]
fn a_commit_is_one_frame_of_frames_as_the_tables_say() {
    use crate::golden::bytes::{Frame, crc32, frames, seed, u16_at, u32_at, u64_at};
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    let until = Duration::from_secs(60);
    let commit = Commit::new("paid")
        .outcome_retention(until)
        .put(&desk.cells, "a", Expected::Absent, "90")
        .advance(&desk.marks, SOURCE, 0)
        .advance(&desk.marks, SOURCE, 5)
        .publish_ordered(&desk.outbox, "customer", "mail");
    desk.done("order-1", commit);
    let queued = desk.outbox.lease(1).unwrap().remove(0);
    assert!(desk.outbox.park(&queued, b"bad").unwrap());
    let segment = disk.read_file("seg-000000000001.log").unwrap();
    let all = frames(&segment);
    let group = all.iter().find(|frame| frame.kind == 19).unwrap();
    assert_eq!(group.bytes[7..16], [0; 9]);
    let nonce = u32_at(&segment, 12);
    let mut inner = Vec::new();
    let mut at = 16;
    while at < group.bytes.len() {
        let offset = group.offset + at;
        let len = u16_at(&group.bytes, at + 4) * 8;
        let bytes = group.bytes[at..at + len].to_vec();
        assert_eq!(u32_at(&bytes, 0), crc32(seed(nonce, offset), &bytes[4..]));
        let kind = bytes[6];
        inner.push(
            Frame {
                offset,
                kind,
                bytes,
            }
            .record(),
        );
        at += len;
    }
    assert_eq!(at, group.bytes.len());
    let kinds: Vec<u8> = inner.iter().map(|record| record.kind).collect();
    assert_eq!(kinds, [5, 10, 11, 12]);
    let [done, cell, mark, entry] = &inner[..] else {
        panic!("four records");
    };
    let seconds = u32::try_from(START_MS / 1000).unwrap();
    let until_s = (seconds + 60).to_le_bytes().to_vec();
    assert_eq!(done.parts, [(1, b"paid".to_vec()), (7, until_s)]);
    assert_eq!(
        (cell.key.as_slice(), &cell.parts),
        (&b"a"[..], &vec![(1, b"90".to_vec())])
    );
    let stamp = |state: &Option<Vec<u8>>| u64_at(state.as_ref().unwrap(), 0);
    assert_eq!(stamp(&cell.state), desk.version("a").get());
    let value = &mark.parts[0].1;
    assert_eq!((mark.key.as_slice(), mark.parts.len()), (SOURCE, 1));
    assert_eq!(value[..4], [1, 0, 0, 0]);
    assert_eq!(
        (u32_at(value, 4), u64_at(value, 8), u64_at(value, 16)),
        (1, 0, 1)
    );
    assert_eq!(
        (u64_at(value, 24), u64_at(value, 32), value.len()),
        (5, 5, 40)
    );
    assert_eq!(entry.key, b"\x04jobs\x00\x00\x00\x00order-1");
    assert_eq!(
        entry.parts,
        [(1, b"mail".to_vec()), (6, b"customer".to_vec())]
    );
    assert!(inner.iter().skip(1).all(|record| record.expires_at_s == 0));
    // Put aside: the same entry, with its error and the position at which it was first.
    let parked = all.iter().find(|frame| frame.kind == 13).unwrap().record();
    assert_eq!(
        (&parked.key, stamp(&parked.state)),
        (&entry.key, stamp(&entry.state))
    );
    assert_eq!(u32_at(parked.state.as_ref().unwrap(), 48), 1);
    let first = group.offset + group.bytes.len() - frame_bytes(entry);
    let origin = ((1u64 << 23) | (first as u64 / 8)).to_le_bytes().to_vec();
    let value = (1, b"mail".to_vec());
    let ordering = (6, b"customer".to_vec());
    assert_eq!(
        parked.parts,
        [value, (2, b"bad".to_vec()), (4, origin), ordering]
    );
}

fn frame_bytes(record: &crate::golden::bytes::Record) -> usize {
    let parts: usize = record.parts.iter().map(|part| 8 + part.1.len()).sum();
    (16 + 64 + record.key.len() + parts).next_multiple_of(8)
}

/// Random calls, kills and power cuts, compared with maps and lists.
#[test]
fn random_calls_agree_with_a_map_a_set_and_a_queue() {
    use std::collections::{BTreeMap, BTreeSet};
    for seed in 0..crate::support::env_u64("IDEMLOG_CASES", 12) {
        let mut rng = idemlog::testing::sim::Rng::new(seed);
        let (mut disk, clock) = (SimDisk::seeded(seed), clock());
        let mut desk = Desk::open(&disk, &clock);
        let mut cells: BTreeMap<String, (String, Stamp)> = BTreeMap::new();
        let mut marks: BTreeSet<u64> = BTreeSet::new();
        let mut queue: Vec<String> = Vec::new();
        for n in 0..120 {
            let cell = format!("cell-{}", rng.below(4));
            match rng.below(10) {
                0..=4 => {
                    let known = cells.get(&cell).map(|(_, version)| *version);
                    let expected = known.map_or(Expected::Absent, Expected::Version);
                    let number = marks.iter().next_back().map_or(0, |last| last + 1);
                    let number = number.saturating_sub(rng.below(5) as u64);
                    let (value, mail) = (format!("value {n}"), format!("mail {n}"));
                    let commit = Commit::new("")
                        .put(&desk.cells, cell.clone(), expected, value.clone())
                        .publish(&desk.outbox, mail.clone())
                        .advance(&desk.marks, SOURCE, number);
                    desk.done(&format!("job-{n}"), commit);
                    cells.insert(cell.clone(), (value, desk.version(&cell)));
                    marks.insert(number);
                    queue.push(mail);
                }
                5 => {
                    let known = cells.remove(&cell);
                    let expected = known.map_or(Expected::Absent, |(_, v)| Expected::Version(v));
                    let verdict = desk.cells.delete(&cell, expected).unwrap();
                    assert_eq!(verdict, CellVerdict::Deleted, "seed {seed}");
                }
                6 => {
                    for entry in desk.outbox.lease(rng.below(4)).unwrap() {
                        assert!(desk.outbox.ack(&entry).unwrap(), "seed {seed}");
                        assert_eq!(payload(&entry), queue.remove(0), "seed {seed}");
                    }
                }
                7 => {
                    desk.fill(1);
                    clock.advance_ms(rng.below(3_600_000) as u64);
                    desk.log.maintain().unwrap();
                }
                _ => {
                    disk = match rng.below(3) {
                        0 => disk.after_kill(),
                        1 => disk.after_power_cut(&mut PowerCut::drop_all()),
                        _ => disk.after_power_cut(&mut PowerCut::seeded(rng.next_u64())),
                    };
                    drop(desk);
                    desk = Desk::open(&disk, &clock);
                }
            }
            for n in 0..4 {
                let cell = format!("cell-{n}");
                let found = desk.cells.get(&cell).unwrap();
                let found = found.map(|c| (String::from_utf8(c.value).unwrap(), c.version));
                assert_eq!(found, cells.get(&cell).cloned(), "seed {seed}");
            }
            let next = (0..).find(|n| !marks.contains(n)).unwrap();
            let safe = desk.marks.safe_position(SOURCE).unwrap();
            assert_eq!(safe, next.checked_sub(1), "seed {seed}");
            let queued = desk.outbox.stats().unwrap().queued_count;
            assert_eq!(queued, queue.len() as u64, "seed {seed}");
        }
    }
}

/// What is left of a damaged store: whole records of a damaged commit, and which values may be
/// older than they were.
#[test]
fn a_repair_keeps_what_is_attached_and_says_what_may_be_outdated() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    desk.put("a", Expected::Absent, "old");
    desk.put("b", Expected::Absent, "same");
    assert_eq!(desk.marks.advance(SOURCE, 0).unwrap(), Sequenced::Fresh);
    let commit = Commit::new("")
        .put(&desk.cells, "a", Expected::Anything, "NEWER")
        .publish(&desk.outbox, "mail");
    desk.done("order-1", commit);
    desk.put("b", Expected::Anything, "last");
    let version = desk.version("b");
    desk.log.close().unwrap();
    let disk = disk.after_kill();
    let name = "seg-000000000001.log";
    let whole = disk.read_file(name).unwrap();
    let repair = || idemlog::Repair::of("simulated").clock(Arc::clone(&clock) as _);
    let repaired = SimDisk::new();
    let report = repair()
        .write_on(disk.dir().as_ref(), repaired.dir())
        .unwrap();
    assert_eq!((report.outdated_count, report.lost_count), (0, 0));
    assert_eq!(
        Desk::open(&repaired, &clock).value("a").as_deref(),
        Some("NEWER")
    );

    let mut bad = whole.clone();
    let at = whole.windows(5).position(|w| w == b"NEWER").unwrap();
    bad[at] ^= 1;
    disk.write_file(name, bad);
    let repaired = SimDisk::new();
    let report = repair()
        .write_on(disk.dir().as_ref(), repaired.dir())
        .unwrap();
    // The cell and the source; the other cell was written again behind what is lost.
    assert_eq!(report.outdated_count, 2, "{report:?}");
    let desk = Desk::open(&repaired, &clock);
    assert_eq!(desk.value("a").as_deref(), Some("old"));
    assert_eq!(desk.value("b").as_deref(), Some("last"));
    assert_eq!(desk.version("b"), version);
    assert_eq!(desk.payloads(9), ["mail"]);
    assert!(desk.put("a", Expected::Anything, "again") > version);
}

/// The same answers as a future, and what a dropped one leaves.
#[test]
fn a_commit_with_something_attached_has_its_future() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    let mut claim = desk.claim("1");
    let version = desk.put("a", Expected::Absent, "1");
    desk.put("a", Expected::Version(version), "2");
    let stale = Commit::new("x").put(&desk.cells, "a", Expected::Version(version), "3");
    let verdict = smol::block_on(claim.commit_with_async(stale)).unwrap();
    assert!(matches!(
        verdict,
        CommitVerdict::CellConflict { index: 0, .. }
    ));
    let commit = Commit::new("x").publish(&desk.outbox, "mail");
    let verdict = smol::block_on(claim.commit_with_async(commit)).unwrap();
    assert!(matches!(verdict, CommitVerdict::Committed { .. }));
    let leased = smol::block_on(desk.outbox.lease_wait_async(9, HOUR)).unwrap();
    assert_eq!(leased.iter().map(payload).collect::<Vec<_>>(), ["mail"]);
    // Polled once and dropped: the record is there, and the claim is not released.
    let mut claim = desk.claim("2");
    {
        let commit = Commit::new("y").publish(&desk.outbox, "other");
        let mut future = Box::pin(claim.commit_with_async(commit));
        let waker = std::task::Waker::noop();
        let mut context = std::task::Context::from_waker(waker);
        drop(std::future::Future::poll(future.as_mut(), &mut context));
    }
    drop(claim);
    assert!(matches!(desk.jobs.get("2").unwrap(), KeyState::Done(_)));
    assert_eq!(desk.payloads(9), ["other"]);
}

/// An entry that ends with a key: work that one outbox asked for and a commit records.
#[test]
fn a_commit_may_end_the_entry_that_it_was_made_for() {
    let (disk, clock) = (SimDisk::new(), clock());
    let desk = Desk::open(&disk, &clock);
    for n in ["1", "2"] {
        desk.done(n, Commit::new("").publish_ordered(&desk.outbox, "line", n));
    }
    let entry = desk.outbox.lease(1).unwrap().remove(0);
    let waiting = {
        let outbox = desk.outbox.clone();
        std::thread::spawn(move || outbox.lease_wait(1, HOUR).unwrap())
    };
    while desk.log.stats().waiters_count == 0 {
        std::thread::yield_now();
    }
    desk.done("next", Commit::new("").acknowledge(&desk.outbox, &entry));
    // The next one of its ordering key is free at once.
    assert_eq!(
        waiting
            .join()
            .unwrap()
            .iter()
            .map(payload)
            .collect::<Vec<_>>(),
        ["2"]
    );
    // Gone already, it changes nothing.
    desk.done("again", Commit::new("").acknowledge(&desk.outbox, &entry));
    let desk = Desk::open(&disk.after_power_cut(&mut PowerCut::drop_all()), &clock);
    assert_eq!(desk.payloads(9), ["2"]);
}

fn is_send<T: Send + Sync>() {}

#[test]
fn handles_go_to_other_threads() {
    is_send::<(Cells, Watermarks, Outbox, Dispatcher)>();
    fn any<C: EffectClass>() {
        is_send::<Namespace<C>>();
    }
    any::<Internal>();
}
