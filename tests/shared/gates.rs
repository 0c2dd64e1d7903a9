//! Somebody holds a gate and never lets go: whoever needs it ends with `Locked` when its time is
//! over, everybody else goes on, and so do all when the holder does or dies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idemlog::testing::sim::{SimDisk, SimProcess};
use idemlog::testing::{Clock, Reading};
use idemlog::{
    Applied, Claim, ClaimVerdict, Commit, DedupLog, Durability, ErrorKind, Filter, Namespace,
    NonRepeatable, ObserveOptions, Options, Outbox, Repeatable, Result,
};

use super::{big, small};

const GATES: [&str; 5] = ["turn", "edit", "upkeep", "merge", "flush"];
const TURN_MS: u64 = 150;

/// Moves on by a millisecond each time it is read: whoever waits by it sees the end come.
#[derive(Debug, Default)]
struct Ticking(AtomicU64);

impl Clock for Ticking {
    fn read(&self) -> Reading {
        let ticks = self.0.fetch_add(1, Ordering::SeqCst);
        Reading {
            wall_ms: 1_700_000_000_000 + ticks,
            boot_ms: 1000 + ticks,
        }
    }

    fn boot_id(&self) -> [u8; 16] {
        [1; 16]
    }
}

/// One opener with everything at hand.
struct Caller {
    process: SimProcess,
    clock: Arc<Ticking>,
    log: Option<DedupLog>,
    filter: Filter,
    jobs: Namespace<Repeatable>,
    payments: Namespace<NonRepeatable>,
    outbox: Outbox,
    held: Option<Claim<Repeatable>>,
    big_count: usize,
}

fn options(clock: &Arc<Ticking>) -> Options {
    Options::new()
        .shared(true)
        .segment_bytes(16 * 1024)
        .background(false)
        .durability(Durability::Process)
        .turn_timeout(Duration::from_millis(TURN_MS))
        .clock(Arc::clone(clock) as _)
}

impl Caller {
    fn new(disk: &SimDisk, clock: &Arc<Ticking>) -> Caller {
        let process = disk.process();
        let log = options(clock).open_on(process.dir()).unwrap();
        let filter = log.filter("f", small()).unwrap();
        let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
        let outbox = log.outbox("o", small()).unwrap();
        let ClaimVerdict::New(mut claim) = jobs.claim("first").unwrap() else {
            panic!("the key is new");
        };
        let publish = Commit::new(b"").publish(&outbox, "mail");
        let _committed = claim.commit_with(publish).unwrap();
        let ClaimVerdict::New(held) = jobs.claim("held").unwrap() else {
            panic!("the key is new");
        };
        assert!(filter.observe("old").unwrap().is_new());
        log.filter("spare", small()).unwrap();
        Caller {
            process,
            clock: Arc::clone(clock),
            payments: log.namespace("p", small()).unwrap(),
            log: Some(log),
            filter,
            jobs,
            outbox,
            held: Some(held),
            big_count: 0,
        }
    }

    fn log(&self) -> &DedupLog {
        self.log.as_ref().unwrap()
    }

    /// Says whether the key was new.
    fn observe(&self, key: &str, level: Durability) -> Result<Option<bool>> {
        let level = ObserveOptions::new().durability(level);
        self.filter
            .observe_with(key, &level)
            .map(|o| Some(o.is_new()))
    }

    fn commit(&mut self, level: Durability) -> Result<Option<bool>> {
        let held = self.held.as_mut().unwrap();
        let commit = Commit::new(b"out").durability(level);
        held.commit_with(commit).map(|_| None)
    }

    /// Until a segment is full and another one sealed.
    fn roll(&mut self) -> Result<Option<bool>> {
        let keys: Vec<String> = (0..40).map(|n| big(self.big_count + n)).collect();
        self.big_count += keys.len();
        let answers = self.filter.observe_many(&keys)?;
        assert!(answers.into_iter().all(|answer| answer.is_ok()));
        Ok(None)
    }

    fn open_another(&self) -> Result<Option<bool>> {
        // Its close may find the flush in the way; the open does not.
        drop(options(&self.clock).open_on(self.process.dir())?);
        Ok(None)
    }
}

type Call = fn(&mut Caller) -> Result<Option<bool>>;

/// Each call, and the gates without which it cannot end.
const CALLS: [(&str, Call, &[&str]); 30] = [
    (
        "observe buffered",
        |c| c.observe("new", Durability::Buffered),
        &["turn"],
    ),
    (
        "observe process",
        |c| c.observe("new", Durability::Process),
        &["turn"],
    ),
    (
        "observe power",
        |c| c.observe("new", Durability::Power),
        &["turn", "flush"],
    ),
    (
        "duplicate process",
        |c| c.observe("old", Durability::Process).map(|_| None),
        &["turn"],
    ),
    (
        "duplicate power",
        |c| c.observe("old", Durability::Power).map(|_| None),
        &["turn", "flush"],
    ),
    (
        "observe many",
        |c| c.filter.observe_many(&["a", "b"]).map(|_| None),
        &["turn"],
    ),
    (
        "check many",
        |c| c.filter.check_many(&["a", "b"]).map(|_| None),
        &["turn"],
    ),
    ("get", |c| c.filter.get("old").map(|_| None), &["turn"]),
    (
        "forget",
        |c| c.filter.forget("old").map(|_| None),
        &["turn"],
    ),
    ("claim", |c| c.jobs.claim("k").map(|_| None), &["turn"]),
    (
        "claim many",
        |c| {
            c.jobs
                .claim_many(&["k", "l"], &Default::default())
                .map(|_| None)
        },
        &["turn"],
    ),
    (
        "claim wait",
        |c| c.jobs.claim_wait("k", Duration::ZERO).map(|_| None),
        &["turn"],
    ),
    (
        "commit buffered",
        |c| c.commit(Durability::Buffered),
        &["turn"],
    ),
    (
        "commit process",
        |c| c.commit(Durability::Process),
        &["turn"],
    ),
    (
        "commit power",
        |c| c.commit(Durability::Power),
        &["turn", "flush"],
    ),
    (
        "run once",
        |c| c.jobs.run_once("k", |_| Ok(vec![1])).map(|_| None),
        &["turn"],
    ),
    (
        "start durably",
        |c| {
            let ClaimVerdict::New(claim) = c.payments.claim("k")? else {
                return Ok(None);
            };
            Ok(claim.start(b"").map(|_| None)?)
        },
        &["turn", "flush"],
    ),
    ("pending", |c| c.log().pending().map(|_| None), &["turn"]),
    ("in doubt", |c| c.log().in_doubt().map(|_| None), &["turn"]),
    ("lease", |c| c.outbox.lease(1).map(|_| None), &["turn"]),
    (
        "outbox stats",
        |c| c.outbox.stats().map(|_| None),
        &["turn"],
    ),
    (
        "open a namespace",
        |c| c.log().filter("f", small()).map(|_| None),
        &["turn", "edit", "upkeep"],
    ),
    (
        "make a namespace",
        |c| c.log().filter("x", small()).map(|_| None),
        &["turn", "edit", "upkeep"],
    ),
    (
        "purge",
        |c| c.log().purge("spare", true).map(|_| None),
        &["turn", "edit", "upkeep"],
    ),
    ("sync", |c| c.log().sync().map(|_| None), &["turn", "flush"]),
    (
        "maintain",
        |c| c.log().maintain().map(|_| None),
        &["turn", "edit"],
    ),
    (
        "confirm time",
        |c| c.log().confirm_time().map(|_| None),
        &["turn", "edit", "upkeep"],
    ),
    ("roll", Caller::roll, &["turn", "edit", "upkeep", "flush"]),
    (
        "open another",
        |c| c.open_another(),
        &["turn", "edit", "upkeep"],
    ),
    (
        "close",
        |c| c.log.take().unwrap().close().map(|()| None),
        &["turn", "flush"],
    ),
];

#[test]
fn whoever_needs_a_gate_that_is_held_ends_with_locked_and_the_others_go_on() {
    let (mut locked_count, mut went_on_count) = (0, 0);
    let mut wrong = Vec::new();
    for gate in GATES {
        for (n, (name, call, needed)) in CALLS.into_iter().enumerate() {
            let what = format!("gate={gate} call={name:?}");
            let (disk, clock) = (SimDisk::new(), Arc::new(Ticking::default()));
            let mut caller = Caller::new(&disk, &clock);
            let other = disk.process();
            let member = options(&clock).open_on(other.dir()).unwrap();
            let seen = member.filter("f", small()).unwrap();
            let lock = other.dir().lock(&format!("LOCK.{gate}"), true, "");
            let lock = lock.unwrap().expect("nobody holds it");
            let began = clock.0.load(Ordering::SeqCst);
            let called = call(&mut caller);
            let took = clock.0.load(Ordering::SeqCst) - began;
            let is_locked = called.is_err();
            if is_locked != needed.contains(&gate) {
                wrong.push(format!("{what}: {called:?}"));
                continue;
            }
            // By the deadline, and what else the call reads of the clock.
            assert!(took < TURN_MS + 100, "{what} took_ms={took}");
            if is_locked {
                assert!(took >= TURN_MS, "{what} took_ms={took}");
                locked_count += 1;
            } else {
                went_on_count += 1;
            }
            // The holder goes on, or dies.
            let is_killed = n % 2 == 0;
            if is_killed {
                other.kill();
            }
            drop(lock);
            if let Err(error) = &called {
                assert_eq!(error.kind(), ErrorKind::Locked, "{what} {error}");
            }
            if caller.log.is_some() {
                if let Err(error) = &called {
                    let again = call(&mut caller);
                    let again = again.unwrap_or_else(|error| panic!("{what} {error}"));
                    let is_maybe = error.applied() == Applied::Maybe;
                    if let Some(is_new) = again {
                        assert_eq!(is_new, !is_maybe, "{what} {error}");
                        assert_eq!(is_maybe, gate == "flush", "{what} {error}");
                    }
                }
                assert!(
                    caller.observe("last", Durability::Power).unwrap().unwrap(),
                    "{what}"
                );
                caller.log().maintain().unwrap();
            }
            if !is_killed {
                let seen = seen.observe("last").unwrap().is_new();
                assert_eq!(seen, caller.log.is_none(), "{what}");
                member.close().unwrap();
            }
            caller.held = None;
            drop(caller);
            let log = options(&clock).shared(false).open_on(disk.dir());
            let log = log.unwrap_or_else(|error| panic!("{what} {error}"));
            let filter = log.filter("f", small()).unwrap();
            let forgotten = name == "forget";
            assert_eq!(filter.observe("old").unwrap().is_new(), forgotten, "{what}");
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    println!("locked={locked_count} went_on={went_on_count}");
    assert_eq!(locked_count + went_on_count, GATES.len() * CALLS.len());
    assert!(locked_count >= 40, "{locked_count}");
}
