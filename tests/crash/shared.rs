//! Two openers of one store, stopped together at every step of either: what one of them was
//! answered is there for both behind the crash, and what was never asked for is not.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{PowerCut, SimDisk, SimProcess};
use idemlog::{
    ClaimVerdict, DedupLog, Durability, Filter, Namespace, NamespaceOptions, Observed, Options,
    Outcome, Repeatable, Result, RunVerdict,
};

use super::{Explorer, SEGMENT_BYTES, crash_options};

const START_MS: u64 = 1_700_000_000_000;
const ROUNDS: usize = 48;
const OUTCOME: &[u8] = &[7; 40];

/// One opener, in a process of its own.
struct Side {
    process: SimProcess,
    log: DedupLog,
    filter: Filter,
    jobs: Namespace<Repeatable>,
}

impl Side {
    fn open(disk: &SimDisk, level: Durability) -> Result<Side> {
        let process = disk.process();
        let clock = ManualClock::new(START_MS);
        let log = Options::new()
            .shared(true)
            .segment_bytes(SEGMENT_BYTES)
            .background(false)
            .durability(level)
            .clock(Arc::new(clock))
            .open_on(process.dir())?;
        let small = NamespaceOptions::new().outcome_bytes_max(64);
        Ok(Side {
            filter: log.filter("f", small.clone())?,
            jobs: log.namespace("jobs", small)?,
            process,
            log,
        })
    }
}

/// What was answered when the two were stopped.
#[derive(Clone, Debug, Default)]
struct Told {
    answered: Vec<String>,
    /// How many of them must be there after a power cut.
    floor_power: usize,
}

impl Told {
    fn note(&mut self, key: String, level: Durability) {
        self.answered.push(key);
        if level == Durability::Power {
            self.floor_power = self.answered.len();
        }
    }
}

fn long(n: usize) -> String {
    format!("k{n}{:->170}", "")
}

/// Both work in turn. One leaves and comes back, one dies and another comes.
fn play(disk: &SimDisk, level: Durability, told: &RefCell<Told>) -> Result<()> {
    let mut sides = [Side::open(disk, level)?, Side::open(disk, level)?];
    for n in 0..ROUNDS {
        let (one, other) = (n / 2 % 2, 1 - n / 2 % 2);
        let side = &sides[one];
        assert_eq!(side.filter.observe(long(n))?, Observed::New);
        told.borrow_mut().note(long(n), level);
        assert_eq!(sides[other].filter.observe(long(n))?, Observed::Duplicate);
        if n % 8 == 3 {
            let job = format!("job{n}");
            let ran = side.jobs.run_once(&job, |_| Ok(OUTCOME.to_vec()))?;
            assert!(matches!(ran, RunVerdict::Ran { .. }));
            told.borrow_mut().note(job, level);
        }
        match n {
            15 => {
                side.log.clone().close()?;
                sides[one] = Side::open(disk, level)?;
            }
            25 => {
                sides[one].process.kill();
                sides[one] = Side::open(disk, level)?;
            }
            35 => {
                side.log.sync()?;
                let mut told = told.borrow_mut();
                told.floor_power = told.answered.len();
            }
            _ if n % 10 == 9 => sides[other].log.maintain()?,
            _ => {}
        }
    }
    let [one, other] = sides;
    one.log.close()?;
    other.log.close()
}

/// Says what a store knows of these keys, as both of two openers see it.
fn look(disk: &SimDisk, told: &Told, floor: usize) -> Vec<bool> {
    let sides = [0, 1].map(|_| Side::open(disk, Durability::Power).unwrap());
    let asked = |n: usize, key: &str| {
        let known = if key.starts_with("job") {
            match sides[n % 2].jobs.claim(key).unwrap() {
                ClaimVerdict::Duplicate(done) => {
                    assert_eq!(done.outcome, Outcome::Kept(OUTCOME.to_vec()));
                    true
                }
                ClaimVerdict::New(claim) | ClaimVerdict::Takeover { claim, .. } => {
                    drop(claim);
                    false
                }
                verdict => panic!("{verdict:?}"),
            }
        } else {
            sides[n % 2].filter.observe(key).unwrap() == Observed::Duplicate
        };
        assert!(known || n >= floor, "lost: {key} {told:?}");
        if !key.starts_with("job") {
            let again = sides[1 - n % 2].filter.observe(key).unwrap();
            assert_eq!(again, Observed::Duplicate, "{key}");
        }
        known
    };
    let known = (told.answered.iter().enumerate())
        .map(|(n, key)| asked(n, key))
        .collect();
    for n in 0..4 {
        let never = sides[n % 2].filter.get(format!("never{n}")).unwrap();
        assert_eq!(never, idemlog::KeyState::Absent);
    }
    known
}

/// Opens what a crash has left, compares, writes on, and looks again behind a power cut.
fn judge(disk: &SimDisk, told: &Told, killed: bool) {
    let floor = if killed {
        told.answered.len()
    } else {
        told.floor_power
    };
    look(disk, told, floor);
    let side = Side::open(disk, Durability::Power).unwrap();
    let mut later = told.clone();
    // What was asked for just now is there, whatever it was answered; but for the jobs.
    later.answered.retain(|key| !key.starts_with("job"));
    for n in 0..10 {
        let key = format!("after{n}");
        assert_eq!(side.filter.observe(&key).unwrap(), Observed::New);
        later.answered.push(key);
    }
    let bare = disk.after_power_cut(&mut PowerCut::drop_all());
    assert!(
        look(&bare, &later, later.answered.len())
            .iter()
            .all(|known| *known)
    );
}

#[test]
fn two_openers_that_are_stopped_together_lose_nothing() {
    for level in [Durability::Process, Durability::Power] {
        let base = SimDisk::seeded(1);
        play(&base.after_kill(), level, &RefCell::default()).unwrap();
        let told: Rc<RefCell<Told>> = Rc::default();
        let scenario = |disk: &SimDisk| {
            told.take();
            play(disk, level, &told).unwrap_or_default();
        };
        let mut explorer = Explorer::default();
        explorer.judge_all(
            &crash_options(&base),
            scenario,
            || told.borrow().clone(),
            |disk, _| drop(Side::open(disk, level)),
            judge,
        );
        let totals = explorer.tell("shared", level);
        assert!(totals.checked > 100);
    }
}

/// A close makes durable what was answered, whether or not others stay.
#[test]
fn who_leaves_has_made_durable_what_it_was_answered() {
    let disk = SimDisk::seeded(1);
    let [one, other] = [0, 1].map(|_| Side::open(&disk, Durability::Process).unwrap());
    assert_eq!(one.filter.observe("left").unwrap(), Observed::New);
    one.log.close().unwrap();
    assert_eq!(other.filter.observe("later").unwrap(), Observed::New);
    let bare = disk.after_power_cut(&mut PowerCut::drop_all());
    let again = Side::open(&bare, Durability::Process).unwrap();
    assert_eq!(again.filter.observe("left").unwrap(), Observed::Duplicate);
    assert_eq!(again.filter.observe("later").unwrap(), Observed::New);
}
