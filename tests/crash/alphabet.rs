//! All sequences of a few calls, up to a length, with a crash at every step of the last one: the
//! steps before it were those of a shorter sequence.
//!
//! `IDEMLOG_LENGTH` says how long the sequences are.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use idemlog::testing::sim::{CrashOptions, SimDisk};
use idemlog::{Durability, Failure, KeyState, Resolution};

use super::{Explorer, KEY, Said, crash_options, created, fill, images_min, promised, secs};
use crate::support::crew::{Crew, Ended, FILTER, NON_REPEATABLE, REPEATABLE};
use crate::support::env_u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Observe,
    Claim,
    Start,
    Commit,
    Fail,
    Forget,
    Resolve,
    Roll,
    Reopen,
}

const CALLS: [Call; 9] = [
    Call::Observe,
    Call::Claim,
    Call::Start,
    Call::Commit,
    Call::Fail,
    Call::Forget,
    Call::Resolve,
    Call::Roll,
    Call::Reopen,
];

/// A run that goes on, or has ended.
type Step = Result<Crew, Ended>;

/// Makes one call, if there is something to make it for.
fn step(mut crew: Crew, call: Call, space: usize) -> Option<Step> {
    let level = crew.p.level;
    let held = crew.desk(space).held();
    let newest = held.last().map(|held| held.started);
    let state = crew.p.oracle.get(space, KEY);
    let result = match (call, newest) {
        (Call::Observe, _) => crew.observe(KEY, None, level),
        (Call::Claim, _) => crew.claim(space, KEY, false).map(|_| ()),
        (Call::Start, Some(false)) => crew.start(space, KEY, b"evidence"),
        (Call::Commit, Some(true)) => crew.commit(space, KEY, b"outcome", level),
        (Call::Fail, Some(started)) => {
            let failure = if started {
                Failure::Unknown {
                    evidence: b"?".to_vec(),
                }
            } else {
                Failure::Retryable {
                    after: Duration::ZERO,
                    error: b"later".to_vec(),
                }
            };
            crew.fail(space, KEY, &failure)
        }
        (Call::Forget, _) if state == KeyState::Absent => crew.forget(FILTER, KEY),
        (Call::Forget, _) => crew.forget(space, KEY),
        (Call::Resolve, _) if state != KeyState::Absent => {
            crew.resolve(space, KEY, Resolution::Applied(b"outcome".to_vec()))
        }
        (Call::Roll, _) => {
            let from = 40 * crew.p.oracle.keys.len() as u32;
            fill(&mut crew, level, from, 1, secs(600)).and_then(|()| crew.log.maintain())
        }
        (Call::Reopen, _) => return Some(crew.reopen()),
        _ => return None,
    };
    Some(match result {
        Ok(()) => Ok(crew),
        Err(error) => Err((crew.close().0, Err(error))),
    })
}

/// Makes the calls and ends with the process alive: what closing does is another call. Also says
/// at which step the last one began; `None` if one of them has nothing to do.
fn play(disk: &SimDisk, level: Durability, calls: &[Call], space: usize) -> Option<(Ended, u64)> {
    let mut began = 0;
    let mut at = Crew::open(disk, promised(level));
    for call in calls {
        let crew = match at {
            Ok(crew) => crew,
            Err(ended) => return Some((ended, began)),
        };
        began = disk.steps();
        at = step(crew, *call, space)?;
    }
    let ended = match at {
        Ok(crew) => {
            disk.stop_at(disk.steps());
            (crew.close().0, Ok(()))
        }
        Err(ended) => ended,
    };
    Some((ended, began))
}

/// Lists the sequences in which every call has something to do, each with the step at which its
/// last call begins.
fn sequences(
    base: &SimDisk,
    level: Durability,
    space: usize,
    length: u64,
) -> Vec<(Vec<Call>, u64)> {
    let mut all: Vec<(Vec<Call>, u64)> = Vec::new();
    let mut shorter = vec![Vec::new()];
    for _ in 0..length {
        let mut longer = Vec::new();
        for (before, call) in shorter.iter().flat_map(|b| CALLS.map(|call| (b, call))) {
            let calls = [before.as_slice(), &[call]].concat();
            if let Some((ended, began)) = play(&base.after_kill(), level, &calls, space) {
                ended.1.unwrap();
                all.push((calls.clone(), began));
                longer.push(calls);
            }
        }
        shorter = longer;
    }
    all
}

fn crash_all(name: &str, level: Durability, space: usize) {
    let base = created(level);
    let length = env_u64("IDEMLOG_LENGTH", 2);
    let sequences = sequences(&base, level, space, length);
    let share = images_min().div_ceil(sequences.len() as u64);
    let mut explorer = Explorer::default();
    for (calls, first_step) in &sequences {
        let ended = RefCell::new(None);
        let options = CrashOptions {
            first_step: *first_step,
            images_min: share,
            ..crash_options(&base)
        };
        let scenario = |disk: &SimDisk| {
            let (played, _) = play(disk, level, calls, space).unwrap();
            *ended.borrow_mut() = Some(Rc::new(played.0));
        };
        let _said = Said(format!("{name}: {calls:?}"));
        explorer.explore(&options, scenario, &ended);
    }
    println!(
        "crash: scenario={name} length={length} sequences={}",
        sequences.len()
    );
    explorer.tell(name, level);
}

#[test]
fn all_sequences_of_calls_that_may_not_be_repeated() {
    crash_all("sequences-nonrepeatable", Durability::Power, NON_REPEATABLE);
}

#[test]
fn all_sequences_of_calls_that_may_be_repeated() {
    crash_all("sequences-repeatable", Durability::Process, REPEATABLE);
}
