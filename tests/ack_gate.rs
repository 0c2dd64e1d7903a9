//! The ack gate on a disk that loses power: whatever was acknowledged is remembered.

use std::cell::RefCell;
use std::sync::Arc;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{CrashOptions, Fault, FaultKind, Op, SimDisk, for_each_crash_point};
use idemlog::{
    AckGate, AckMode, ClaimVerdict, Commit, CommitVerdict, DedupLog, Durability, ErrorKind,
    NamespaceOptions, Options, Repeatable, Result,
};

use crate::support::env_u64;

const MODES: [AckMode; 2] = [AckMode::Individual, AckMode::Cumulative];
const LEVELS: [Durability; 3] = [Durability::Buffered, Durability::Process, Durability::Power];
/// Messages that the consumer gets, a few at a time.
const MESSAGES: u32 = 12;

fn open(disk: &SimDisk) -> Result<DedupLog> {
    Options::new()
        .segment_bytes(4096)
        .background(false)
        .clock(Arc::new(ManualClock::new(1_700_000_000_000)))
        .open_on(disk.dir())
}

fn key(message: u32) -> String {
    format!("message-{message}")
}

/// What the broker has heard, and how many tags waited in vain.
#[derive(Clone, Default)]
struct Heard {
    acked: Vec<u32>,
    held: usize,
}

/// Commits in another order than the messages came in, at all levels, and acknowledges what the
/// gate lets through.
fn consume(disk: &SimDisk, mode: AckMode, heard: &RefCell<Heard>) -> Result<()> {
    let log = open(disk)?;
    let options = NamespaceOptions::new().outcome_bytes_max(0);
    let orders = log.namespace::<Repeatable>("orders", options)?;
    let mut gate = AckGate::new(mode, 4);
    for batch in (0..MESSAGES).collect::<Vec<_>>().chunks(4) {
        for message in batch {
            gate.received(*message)?;
        }
        for message in batch.iter().rev() {
            let level = LEVELS[*message as usize * 7 % 3];
            let position = match orders.claim(key(*message))?.claim() {
                Some(mut claim) => {
                    let commit = Commit::without_outcome().durability(level);
                    match claim.commit_with(commit)? {
                        CommitVerdict::Committed { position } => position,
                        verdict => panic!("{verdict:?}"),
                    }
                }
                None => log.answered_position(),
            };
            gate.push(*message, position)?;
            let ready = gate.ready(&log)?;
            let mut heard = heard.borrow_mut();
            heard.acked.extend(ready);
            heard.held = gate.len();
        }
        log.sync()?;
        heard.borrow_mut().acked.extend(gate.ready(&log)?);
        assert!(gate.is_empty());
    }
    log.close()
}

#[test]
fn what_was_acknowledged_before_a_crash_is_a_duplicate_after_it() {
    for mode in MODES {
        let heard = RefCell::new(Heard::default());
        let whole = SimDisk::seeded(1);
        consume(&whole, mode, &heard).unwrap();
        assert_eq!(heard.borrow().acked.len(), MESSAGES as usize);
        let (mut acked, mut held) = (0, 0);
        let scenario = |disk: &SimDisk| {
            heard.take();
            drop(consume(disk, mode, &heard));
        };
        let options = CrashOptions {
            images_min: env_u64("IDEMLOG_IMAGES", 0),
            ..CrashOptions::default()
        };
        let totals = for_each_crash_point(&options, scenario, |state| {
            let heard = heard.borrow();
            let mut once = heard.acked.clone();
            once.sort_unstable();
            once.dedup();
            assert_eq!(once.len(), heard.acked.len(), "a tag is released once");
            if mode == AckMode::Cumulative {
                let received: Vec<u32> = (0..heard.acked.len() as u32).collect();
                assert_eq!(heard.acked, received, "each with all before it");
            }
            let log = open(&state.disk).unwrap();
            let orders = log
                .namespace::<Repeatable>("orders", NamespaceOptions::new().outcome_bytes_max(0))
                .unwrap();
            for message in &heard.acked {
                let verdict = orders.claim(key(*message)).unwrap();
                assert!(
                    matches!(verdict, ClaimVerdict::Duplicate(_)),
                    "{message} was acknowledged, and is lost: {verdict:?}"
                );
            }
            acked += heard.acked.len();
            held += heard.held;
        });
        println!("counts: mode={mode:?} totals={totals:?} acked={acked} held={held}");
        assert!(acked > 100 && held > 100, "nothing was at stake");
    }
}

#[test]
fn a_tag_is_let_through_when_its_commit_is_durable_and_not_before() {
    let log = open(&SimDisk::new()).unwrap();
    let options = NamespaceOptions::new()
        .outcome_bytes_max(0)
        .durability(Durability::Buffered);
    let filter = log.filter("seen", options).unwrap();
    for mode in MODES {
        let mut gate = AckGate::new(mode, 10);
        for message in 0..3 {
            gate.received(message).unwrap();
            let key = format!("{mode:?}-{message}");
            assert!(filter.observe(key).unwrap().is_new());
            gate.push(message, log.answered_position()).unwrap();
        }
        assert!(gate.ready(&log).unwrap().is_empty());
        log.sync().unwrap();
        assert_eq!(gate.ready(&log).unwrap(), [0, 1, 2]);
        // A duplicate rests on what is durable by now; so does whatever was answered before.
        gate.received(3).unwrap();
        let key = format!("{mode:?}-0");
        assert!(!filter.observe(key).unwrap().is_new());
        gate.push(3, log.answered_position()).unwrap();
        assert_eq!(gate.ready(&log).unwrap(), [3]);
        assert!(gate.ready(&log).unwrap().is_empty());
    }
    // A clean close makes everything durable, and lets the last ones go.
    let mut gate = AckGate::new(AckMode::Cumulative, 10);
    gate.received(4).unwrap();
    assert!(filter.observe("last").unwrap().is_new());
    gate.push(4, log.answered_position()).unwrap();
    log.clone().close().unwrap();
    assert_eq!(gate.ready(&log).unwrap(), [4]);
}

/// The background makes a record durable, and its tag goes, although nobody calls `sync` and no
/// further record comes.
#[test]
fn an_idle_store_lets_its_last_tags_go() {
    let log = Options::new()
        .sync_interval(std::time::Duration::from_millis(5))
        .open_on(SimDisk::new().dir())
        .unwrap();
    let options = NamespaceOptions::new().durability(Durability::Buffered);
    let filter = log.filter("seen", options).unwrap();
    let mut gate = AckGate::new(AckMode::Cumulative, 1);
    gate.received("tag").unwrap();
    assert!(filter.observe("key").unwrap().is_new());
    gate.push("tag", log.answered_position()).unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while gate.ready(&log).unwrap().is_empty() {
        assert!(std::time::Instant::now() < until, "the tag is stuck");
        std::thread::park_timeout(std::time::Duration::from_millis(2));
    }
}

#[test]
fn a_poisoned_store_lets_nothing_through_any_more() {
    let disk = SimDisk::new();
    let log = open(&disk).unwrap();
    let filter = log
        .filter("seen", NamespaceOptions::new().outcome_bytes_max(0))
        .unwrap();
    let mut gate = AckGate::new(AckMode::Individual, 10);
    assert!(filter.observe("durable").unwrap().is_new());
    gate.push(1, log.answered_position()).unwrap();
    disk.fail(Fault::once(disk.steps(), FaultKind::Io).only(Op::Sync));
    filter.observe("lost").unwrap_err();
    gate.push(2, log.answered_position()).unwrap();
    for _ in 0..2 {
        let error = gate.ready(&log).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Poisoned);
        assert_eq!(gate.len(), 2);
    }
}
