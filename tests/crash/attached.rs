//! What commits with a key, stopped at every step: after each crash the store shows the state
//! after some call, whole, and not one before the last call that must be on disk.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{PowerCut, SimDisk};
use idemlog::{
    CellVerdict, Cells, Commit, CommitAll, CommitAllVerdict, CommitVerdict, DedupLog, Durability,
    Expected, Filter, Internal, KeyState, Namespace, NamespaceOptions, NonRepeatable, Options,
    Outbox, OutboxEntry, Result, Retention, Stamp, WatermarkOptions, Watermarks,
};

use super::{Explorer, SEGMENT_BYTES, crash_options};
use crate::support::crew::LEVELS;

const START_MS: u64 = 1_700_000_000_000;
const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;
const SOURCES: [&str; 3] = ["orders/0", "orders/1", "after"];
const ACCOUNTS: [&str; 4] = ["a", "b", "c", "z"];

/// An open store with everything that a commit may touch.
struct Desk {
    log: DedupLog,
    clock: Arc<ManualClock>,
    jobs: Namespace<Internal>,
    pays: Namespace<NonRepeatable>,
    filter: Filter,
    cells: Cells,
    marks: Watermarks,
    outbox: Outbox,
}

/// Everything that may be told of the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    done: Vec<String>,
    cells: BTreeMap<&'static str, (String, Stamp)>,
    /// Epoch, safe position, and which of the next numbers are done.
    marks: BTreeMap<&'static str, (u64, Option<u64>, Vec<bool>)>,
    /// Payload and attempt, in the order in which they are dispatched.
    queued: Vec<(String, u32)>,
    parked: Vec<(String, u32)>,
}

fn job(n: u32) -> String {
    format!("job-{n}")
}

fn of_entry(entry: &OutboxEntry) -> (String, u32) {
    let payload = String::from_utf8(entry.payload.clone()).unwrap();
    (payload, entry.attempt)
}

impl Desk {
    fn open(disk: &SimDisk, clock: &Arc<ManualClock>, level: Durability) -> Result<Desk> {
        let log = Options::new()
            .segment_bytes(SEGMENT_BYTES)
            .background(false)
            .durability(level)
            .hint_keys_min(4)
            .clock(Arc::clone(clock) as _)
            .open_on(disk.dir())?;
        let ever = NamespaceOptions::new()
            .outcome_bytes_max(200)
            .retention(Retention::Forever);
        let hour = Duration::from_millis(HOUR_MS);
        Ok(Desk {
            clock: Arc::clone(clock),
            jobs: log.namespace("jobs", ever.clone())?,
            pays: log.namespace("pays", ever.clone())?,
            filter: log.filter("filter", ever.clone().retention(hour))?,
            cells: log.cells("accounts", ever.clone())?,
            marks: log.watermarks("kafka", WatermarkOptions::sparse(8))?,
            outbox: log.outbox("mail", ever)?,
            log,
        })
    }

    /// Looks at everything; what waits to be dispatched is taken out, on a copy.
    fn look(disk: &SimDisk, now_ms: u64) -> Seen {
        let clock = Arc::new(ManualClock::new(now_ms));
        let desk = Desk::open(&disk.after_kill(), &clock, Durability::Process).unwrap();
        let mut seen = Seen::default();
        let is_done = |state: KeyState| matches!(state, KeyState::Done(_));
        for n in 0..40 {
            if is_done(desk.jobs.get(job(n)).unwrap()) {
                seen.done.push(job(n));
            }
            if is_done(desk.pays.get(job(n)).unwrap()) {
                seen.done.push(format!("pay-{n}"));
            }
        }
        for account in ACCOUNTS {
            if let Some(cell) = desk.cells.get(account).unwrap() {
                let value = String::from_utf8(cell.value).unwrap();
                seen.cells.insert(account, (value, cell.version));
            }
        }
        for source in SOURCES {
            let safe = desk.marks.safe_position(source).unwrap();
            let is_done =
                |n| desk.marks.observe(source, n).unwrap() == idemlog::Sequenced::Duplicate;
            let next = (0..12).map(is_done).collect();
            let epoch = desk.marks.epoch(source).unwrap();
            seen.marks.insert(source, (epoch, safe, next));
        }
        seen.parked = desk.outbox.parked().unwrap().iter().map(of_entry).collect();
        clock.advance_ms(DAY_MS);
        loop {
            let leased = desk.outbox.lease(1).unwrap();
            let Some(entry) = leased.first() else { break };
            seen.queued.push(of_entry(entry));
            assert!(desk.outbox.ack(entry).unwrap());
        }
        seen
    }

    fn commit(&self, n: u32, commit: Commit) -> Result<()> {
        let claim = self.jobs.claim(job(n))?.claim();
        let verdict = claim.unwrap().commit_with(commit)?;
        assert!(
            matches!(verdict, CommitVerdict::Committed { .. }),
            "{verdict:?}"
        );
        Ok(())
    }

    fn put(&self, account: &str, value: &str) -> Result<()> {
        let verdict = self.cells.put(account, Expected::Anything, value)?;
        assert!(matches!(verdict, CellVerdict::Written { .. }));
        Ok(())
    }

    fn version(&self, account: &str) -> Result<Expected> {
        let cell = self.cells.get(account)?;
        Ok(cell.map_or(Expected::Absent, |cell| Expected::Version(cell.version)))
    }

    /// Fills some segments with keys that expire in an hour.
    fn fill(&self, from: u32) -> Result<()> {
        let keys: Vec<String> = (from..from + 70)
            .map(|n| format!("{n}-{}", "f".repeat(180)))
            .collect();
        for keys in keys.chunks(10) {
            for observed in self.filter.observe_many(keys)? {
                assert!(observed?.is_new());
            }
        }
        self.log.maintain()
    }

    fn expire(&self) -> Result<()> {
        self.clock.advance_ms(HOUR_MS + 1000);
        self.log.maintain()?;
        self.log.maintain()
    }

    fn commit_both(&self) -> Result<()> {
        let pay = self.pays.claim(job(4))?.claim().unwrap();
        let mut pay = pay.start(b"").map_err(idemlog::Error::from)?;
        let mut claim = self.jobs.claim(job(4))?.claim().unwrap();
        let verdict = CommitAll::new()
            .add(&mut pay, Commit::new("p").publish(&self.outbox, "pay 4"))
            .add(
                &mut claim,
                Commit::new("j").put(&self.cells, "c", Expected::Absent, "5"),
            )
            .commit()?;
        assert!(matches!(verdict, CommitAllVerdict::Committed { .. }));
        Ok(())
    }

    /// One call that changes what is seen, or several that change nothing.
    fn step(&self, n: usize) -> Result<()> {
        let (cells, marks, outbox) = (&self.cells, &self.marks, &self.outbox);
        match n {
            0 => self.put("a", "100"),
            1 => self.put("b", "0"),
            2 => {
                let commit = Commit::new("paid")
                    .put(cells, "a", self.version("a")?, "90")
                    .put(cells, "b", self.version("b")?, "10")
                    .advance(marks, SOURCES[0], 0)
                    .publish_ordered(outbox, "x", "x-2")
                    .publish(outbox, "free-2");
                self.commit(2, commit)
            }
            3 => {
                let commit = Commit::without_outcome().advance(marks, SOURCES[0], 2);
                self.commit(3, commit.publish_ordered(outbox, "x", "x-3"))
            }
            4 => self.commit_both(),
            5 => {
                let leased = outbox.lease(1)?;
                outbox
                    .nack(&leased[0], Duration::from_secs(1), b"down")
                    .map(|_| ())
            }
            6 => {
                let leased = outbox.lease(1)?;
                let parked = outbox.park(&leased[0], b"bad");
                outbox.give_back(&leased)?;
                parked.map(|_| ())
            }
            7 | 12 | 17 => self.fill(n as u32 * 100),
            8 => marks.advance(SOURCES[0], 1).map(|_| ()),
            9 => cells.delete("c", self.version("c")?).map(|_| ()),
            10 => self.put("c", "6"),
            11 => marks.reset(SOURCES[1], 3, 5).map(|_| ()),
            13 | 18 => self.expire(),
            14 => {
                let commit = Commit::new("n").put(cells, "b", self.version("b")?, "11");
                let commit = commit.advance_in(marks, SOURCES[1], 3, 6);
                self.commit(14, commit.publish_ordered(outbox, "x", "x-14"))
            }
            15 => {
                let parked = outbox.parked()?;
                outbox.unpark(&parked[0]).map(|_| ())
            }
            16 => {
                let leased = outbox.lease(2)?;
                outbox.ack_many(&leased).map(|_| ())
            }
            _ => self.commit(19, Commit::new("").advance(marks, SOURCES[0], 3)),
        }
    }
}

const STEPS: usize = 20;

/// How far a scenario has come when it was stopped.
#[derive(Clone, Debug, Default)]
struct Told {
    returned: usize,
    /// Calls that must be there after a kill, and after a power cut.
    floor_kill: usize,
    floor_power: usize,
    now_ms: u64,
}

fn play(disk: &SimDisk, level: Durability, mut each: impl FnMut(Told, &Desk)) -> Result<()> {
    let clock = Arc::new(ManualClock::new(START_MS));
    let desk = Desk::open(disk, &clock, level)?;
    let mut told = Told::default();
    for n in 0..STEPS {
        // The clock moves at the start of some steps: told before, because it may be stopped there.
        told.now_ms = now_of(n);
        each(told.clone(), &desk);
        desk.step(n)?;
        told.returned = n + 1;
        if level >= Durability::Process {
            told.floor_kill = n + 1;
        }
        if level == Durability::Power {
            told.floor_power = n + 1;
        }
        each(told.clone(), &desk);
    }
    desk.log.close()?;
    Ok(())
}

/// Returns the time at the end of a step.
fn now_of(n: usize) -> u64 {
    let expiries = u64::from(n >= 13) + u64::from(n >= 18);
    START_MS + expiries * (HOUR_MS + 1000)
}

fn states(level: Durability) -> Vec<Seen> {
    let disk = SimDisk::seeded(1);
    let mut states = vec![];
    play(&disk, level, |told, desk| {
        if states.len() == told.returned {
            desk.log.sync().unwrap();
            states.push(Desk::look(&disk, told.now_ms));
        }
    })
    .unwrap();
    assert_eq!(states.len(), STEPS + 1);
    // Each step but those of upkeep changes what is seen.
    let changed = states.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert_eq!(changed, STEPS - 5);
    states
}

/// Opens what a crash has left, compares, and writes on.
fn judge(disk: &SimDisk, told: &Told, states: &[Seen], killed: bool) {
    let floor = if killed {
        told.floor_kill
    } else {
        told.floor_power
    };
    let allowed = &states[floor..(told.returned + 2).min(states.len())];
    let seen = Desk::look(disk, told.now_ms);
    assert!(
        allowed.contains(&seen),
        "{told:?}\nseen {seen:#?}\nallowed {allowed:#?}"
    );
    let clock = Arc::new(ManualClock::new(told.now_ms));
    let desk = Desk::open(disk, &clock, Durability::Power).unwrap();
    for n in 30..40 {
        let commit = Commit::new("after")
            .put(&desk.cells, "z", desk.version("z").unwrap(), format!("{n}"))
            .advance(&desk.marks, SOURCES[2], u64::from(n - 30))
            .publish(&desk.outbox, format!("after {n}"));
        desk.commit(n, commit).unwrap();
    }
    drop(desk);
    let bare = disk.after_power_cut(&mut PowerCut::drop_all());
    let mut after = Desk::look(&bare, told.now_ms);
    let (value, version) = after.cells.remove("z").unwrap();
    assert_eq!(value, "39");
    let older = states.iter().flat_map(|seen| seen.cells.values());
    assert!(older.map(|cell| cell.1).all(|older| older < version));
    assert_eq!(after.marks[SOURCES[2]].1, Some(9));
    after
        .marks
        .insert(SOURCES[2], seen.marks[SOURCES[2]].clone());
    assert_eq!(
        after
            .done
            .iter()
            .filter(|key| seen.done.contains(key))
            .count(),
        seen.done.len()
    );
    after.done.clone_from(&seen.done);
    let mut added = after.queued.split_off(seen.queued.len());
    if added
        .iter()
        .any(|(payload, _)| !payload.starts_with("after"))
    {
        // What is ordered behind something waits for it, and comes later.
        let all = [after.queued.clone(), added].concat();
        let is_new = |entry: &(String, u32)| entry.0.starts_with("after");
        (added, after.queued) = all.into_iter().partition(is_new);
    }
    assert_eq!(added.len(), 10);
    assert_eq!(after, seen);
}

#[test]
fn what_commits_with_a_key_is_there_with_it_or_not_at_all() {
    for level in LEVELS {
        let states = states(level);
        let base = SimDisk::seeded(1);
        let told: RefCell<Option<Rc<Told>>> = RefCell::new(None);
        let scenario = |disk: &SimDisk| {
            *told.borrow_mut() = Some(Rc::new(Told {
                now_ms: START_MS,
                ..Told::default()
            }));
            let note = |now: Told, _: &Desk| *told.borrow_mut() = Some(Rc::new(now));
            play(disk, level, note).unwrap_or_default();
        };
        let mut explorer = Explorer::default();
        explorer.judge_all(
            &crash_options(&base),
            scenario,
            || told.borrow().clone().unwrap(),
            |disk, told| {
                let clock = Arc::new(ManualClock::new(told.now_ms));
                drop(Desk::open(disk, &clock, level));
            },
            |disk, told, killed| judge(disk, told, &states, killed),
        );
        let totals = explorer.tell("attached", level);
        assert!(totals.checked > 100);
    }
}
