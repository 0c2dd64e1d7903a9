//! Calls that wait for what another process does: they are answered soon after it has done it, or
//! died.

use std::io::Write;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use idemlog::{
    Claim, ClaimOptions, ClaimVerdict, Commit, DedupLog, Durability, IntakeOptions, JobStatus,
    KeyState, LockVerdict, NamespaceOptions, Repeatable, RunVerdict,
};

use super::{Worker, open, say, small};

const LEASE: Duration = Duration::from_secs(600);
const LONG: Duration = Duration::from_secs(60);
/// Every 10 ms somebody looks; the rest is for a machine with other work.
const SOON: Duration = Duration::from_millis(500);
const ROUNDS: usize = 3;

fn intake(log: &DedupLog) -> idemlog::Intake<Repeatable> {
    let options = IntakeOptions::new().jobs(small().lease(LEASE));
    log.intake("work", options).unwrap()
}

fn outbox(log: &DedupLog) -> idemlog::Outbox {
    log.outbox("mail", NamespaceOptions::new().lease(LEASE))
        .unwrap()
}

/// Holds everything that the others wait for, and does what it is told to.
pub fn hold(dir: &Path) {
    let log = open(dir, Durability::Process);
    let jobs = log.namespace::<Repeatable>("j", small()).unwrap();
    let (intake, outbox) = (intake(&log), outbox(&log));
    let locks = log.locks("l").unwrap();
    let lease = ClaimOptions::new().lease(LEASE);
    let claim = |key: &str| jobs.claim_with(key, &lease).unwrap().claim().unwrap();
    let mut held: Vec<Claim<Repeatable>> = CLAIMED.iter().map(|key| claim(key)).collect();
    let locked: Vec<_> = ["lock", "lock async"]
        .iter()
        .map(|key| locks.try_lock(key, LEASE).unwrap().lock().unwrap())
        .collect();
    for key in ["job", "job async"] {
        let _queued = intake.submit(key, b"do it").unwrap();
    }
    let taken = intake.take(2).unwrap();
    assert_eq!(taken.len(), 2);
    say("ready");
    let mut go = String::new();
    std::io::stdin().read_line(&mut go).unwrap();
    for claim in &mut held {
        let _committed = claim.commit(b"out").unwrap();
    }
    for lock in locked {
        assert!(lock.unlock().is_ok());
    }
    for job in taken {
        let _ran = job.run(|_| Ok(b"out".to_vec())).unwrap();
    }
    let mut mail = claim("mail");
    let publish = Commit::new(b"")
        .publish(&outbox, "one")
        .publish(&outbox, "two");
    let _committed = mail.commit_with(publish).unwrap();
    say("done");
    std::io::stdin().read_line(&mut go).unwrap();
}

/// One key for each call that waits for a claim.
const CLAIMED: [&str; 4] = ["claim", "claim async", "run", "run async"];

/// What a waiter was answered.
type Answer = (&'static str, Result<(), String>, Instant);

/// Starts all waiters. `ended`: the owner is to commit, and not to be killed.
fn wait_for_all(log: &DedupLog, ended: bool) -> (mpsc::Receiver<Answer>, usize) {
    let (told, answers) = mpsc::channel();
    let mut count = 0;
    let mut start =
        |name: &'static str, wait: Box<dyn FnOnce(&DedupLog) -> Result<(), String> + Send>| {
            count += 1;
            let (told, log) = (told.clone(), log.clone());
            thread::spawn(move || {
                let answer = wait(&log);
                told.send((name, answer, Instant::now())).unwrap();
            });
        };
    let jobs = |log: &DedupLog| log.namespace::<Repeatable>("j", small()).unwrap();
    let claimed = move |verdict: ClaimVerdict<Repeatable>| match verdict {
        ClaimVerdict::Duplicate(_) if ended => Ok(()),
        ClaimVerdict::Takeover { .. } if !ended => Ok(()),
        other => Err(format!("{other:?}")),
    };
    let ran = move |verdict: RunVerdict| match verdict {
        RunVerdict::Replayed(_) if ended => Ok(()),
        RunVerdict::Ran { .. } if !ended => Ok(()),
        other => Err(format!("{other:?}")),
    };
    let locked = |verdict: LockVerdict| match verdict {
        LockVerdict::Locked(_) => Ok(()),
        other => Err(format!("{other:?}")),
    };
    let done = |status: JobStatus| match status {
        JobStatus::Begun(KeyState::Done(_)) => Ok(()),
        other => Err(format!("{other:?}")),
    };
    let out = |_: &idemlog::Attempt| Ok(b"mine".to_vec());
    start(
        "claim_wait",
        Box::new(move |log| claimed(jobs(log).claim_wait("claim", LONG).unwrap())),
    );
    start(
        "claim_wait_async",
        Box::new(move |log| {
            claimed(smol::block_on(jobs(log).claim_wait_async("claim async", LONG)).unwrap())
        }),
    );
    start(
        "run_once_wait",
        Box::new(move |log| ran(jobs(log).run_once_wait("run", LONG, out).unwrap())),
    );
    start(
        "run_once_wait_async",
        Box::new(move |log| {
            let run = |_: idemlog::Attempt| async { Ok(b"mine".to_vec()) };
            let jobs = jobs(log);
            ran(smol::block_on(jobs.run_once_wait_async("run async", LONG, run)).unwrap())
        }),
    );
    start(
        "lock_wait",
        Box::new(move |log| {
            locked(
                log.locks("l")
                    .unwrap()
                    .lock_wait("lock", LEASE, LONG)
                    .unwrap(),
            )
        }),
    );
    start(
        "lock_wait_async",
        Box::new(move |log| {
            let locks = log.locks("l").unwrap();
            locked(smol::block_on(locks.lock_wait_async("lock async", LEASE, LONG)).unwrap())
        }),
    );
    start(
        "wait_outcome",
        Box::new(move |log| done(intake(log).wait_outcome("job", LONG).unwrap())),
    );
    start(
        "wait_outcome_async",
        Box::new(move |log| {
            done(smol::block_on(intake(log).wait_outcome_async("job async", LONG)).unwrap())
        }),
    );
    if ended {
        start(
            "lease_wait",
            Box::new(move |log| {
                let entries = outbox(log).lease_wait(1, LONG).unwrap();
                if entries.len() == 1 {
                    Ok(())
                } else {
                    Err(format!("{entries:?}"))
                }
            }),
        );
        start(
            "lease_wait_async",
            Box::new(move |log| {
                let entries = smol::block_on(outbox(log).lease_wait_async(1, LONG)).unwrap();
                if entries.len() == 1 {
                    Ok(())
                } else {
                    Err(format!("{entries:?}"))
                }
            }),
        );
    } else {
        // Whoever takes the jobs of the dead one ends the wait for their outcomes.
        for (name, is_async) in [("take_wait", false), ("take_wait_async", true)] {
            start(
                name,
                Box::new(move |log| {
                    let intake = intake(log);
                    let mut taken = if is_async {
                        smol::block_on(intake.take_wait_async(1, LONG)).unwrap()
                    } else {
                        intake.take_wait(1, LONG).unwrap()
                    };
                    let job = taken.pop().ok_or("no job")?;
                    let ran = job.run(|_| Ok(b"mine".to_vec())).unwrap();
                    if let RunVerdict::Ran { .. } = ran {
                        Ok(())
                    } else {
                        Err(format!("{ran:?}"))
                    }
                }),
            );
        }
    }
    (answers, count)
}

/// One round: returns how long each waiter was not answered behind the end of what it waited for.
fn wait_once(is_killed: bool) -> Vec<(&'static str, Duration)> {
    let dir = tempfile::tempdir().unwrap();
    let mut worker = Worker::start("hold", 0, dir.path());
    worker.read_to("ready");
    let log = open(dir.path(), Durability::Process);
    let (answers, count) = wait_for_all(&log, !is_killed);
    let early = answers.recv_timeout(Duration::from_millis(100));
    assert!(early.is_err(), "{early:?}");
    assert!(log.stats().waiters_count as usize >= count / 2);
    let ended = if is_killed {
        worker.child.kill().unwrap();
        worker.child.wait().unwrap();
        Instant::now()
    } else {
        worker
            .child
            .stdin
            .as_mut()
            .unwrap()
            .write_all(b"go\n")
            .unwrap();
        worker.read_to("done");
        Instant::now()
    };
    let waits = (0..count).map(|_| {
        let answer = answers.recv_timeout(LONG / 2);
        let (name, answer, at) = answer.expect("somebody waits on");
        assert_eq!(answer, Ok(()), "{name} is_killed={is_killed}");
        (name, at.saturating_duration_since(ended))
    });
    let waits: Vec<_> = waits.collect();
    log.close().unwrap();
    waits
}

fn check_waits(is_killed: bool) {
    let mut best = std::collections::BTreeMap::<&str, Duration>::new();
    for _ in 0..ROUNDS {
        for (name, wait) in wait_once(is_killed) {
            let least = best.entry(name).or_insert(wait);
            *least = wait.min(*least);
        }
    }
    println!("is_killed={is_killed} {best:?}");
    assert_eq!(best.len(), 10);
    assert!(best.values().all(|wait| *wait < SOON), "{best:?}");
}

#[test]
fn whoever_waits_is_woken_soon_behind_what_another_process_does() {
    check_waits(false);
}

#[test]
fn whoever_waits_for_a_process_that_is_killed_is_answered_at_once() {
    check_waits(true);
}
