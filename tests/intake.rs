//! Work that is accepted now and done later.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idemlog::testing::ManualClock;
use idemlog::testing::sim::{CrashOptions, PowerCut, SimDisk, for_each_crash_point};
use idemlog::{
    AckAdvice, Commit, DedupLog, EffectClass, ErrorKind, Failure, Intake, IntakeOptions, JobStatus,
    Keep, KeyState, NamespaceOptions, NonRepeatable, Options, Outcome, Probeable, Probed,
    Repeatable, Resolution, RunVerdict, Submitted, Taken,
};

const START_MS: u64 = 1_700_000_000_000;
const HOUR: Duration = Duration::from_secs(3600);

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(START_MS))
}

fn store(disk: &SimDisk, clock: &Arc<ManualClock>) -> DedupLog {
    let options = Options::new().segment_bytes(8192).background(false);
    options
        .clock(Arc::clone(clock) as _)
        .open_on(disk.dir())
        .unwrap()
}

fn options() -> IntakeOptions {
    let jobs = NamespaceOptions::new()
        .outcome_bytes_max(300)
        .retention(HOUR);
    IntakeOptions::new().jobs(jobs)
}

fn open<C: EffectClass>(disk: &SimDisk, clock: &Arc<ManualClock>) -> Intake<C> {
    store(disk, clock).intake("jobs", options()).unwrap()
}

fn run_all<C: EffectClass>(intake: &Intake<C>) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut done = Vec::new();
    for taken in intake.take(99).unwrap() {
        let verdict = taken.run(|job| {
            done.push((job.key().to_vec(), job.payload().to_vec()));
            Ok(b"done".to_vec())
        });
        assert!(matches!(verdict.unwrap(), RunVerdict::Ran { .. }));
    }
    done
}

fn pair(key: &str, payload: &str) -> (Vec<u8>, Vec<u8>) {
    (key.as_bytes().to_vec(), payload.as_bytes().to_vec())
}

#[test]
fn what_was_accepted_survives_a_power_cut_and_is_done_once() {
    let (disk, clock) = (SimDisk::new(), clock());
    let intake = open::<Repeatable>(&disk, &clock);
    assert_eq!(intake.submit("a", "1").unwrap(), Submitted::Queued);
    assert_eq!(intake.submit("b", "2").unwrap(), Submitted::Queued);
    assert_eq!(intake.submit("a", "3").unwrap(), Submitted::AlreadyQueued);
    assert!(matches!(
        intake.status("a").unwrap(),
        JobStatus::Queued {
            failed_count: 0,
            ..
        }
    ));
    let bare = disk.after_power_cut(&mut PowerCut::drop_all());
    let intake = open::<Repeatable>(&bare, &clock);
    assert_eq!(run_all(&intake), [pair("a", "1"), pair("b", "2")]);
    let again = intake.submit("a", "4").unwrap();
    let Submitted::Duplicate(done) = &again else {
        panic!("{again:?}");
    };
    assert_eq!(done.outcome, Outcome::Kept(b"done".to_vec()));
    assert_eq!(again.ack_advice(), AckAdvice::Ack);
    assert_eq!(intake.stats().unwrap().queued_count, 0);
    let bare = bare.after_power_cut(&mut PowerCut::drop_all());
    let intake = open::<Repeatable>(&bare, &clock);
    assert!(intake.take(9).unwrap().is_empty());
    assert!(matches!(
        intake.status("b").unwrap(),
        JobStatus::Begun(KeyState::Done(_))
    ));
    assert_eq!(intake.status("c").unwrap(), JobStatus::Unknown);
}

#[test]
fn the_last_payload_counts_or_all_of_them_where_that_is_wanted() {
    let log = store(&SimDisk::new(), &clock());
    let last: Intake<Repeatable> = log.intake("last", options().keep(Keep::Last)).unwrap();
    assert_eq!(last.submit("a", "1").unwrap(), Submitted::Queued);
    assert_eq!(last.submit("b", "2").unwrap(), Submitted::Queued);
    assert_eq!(last.submit("a", "3").unwrap(), Submitted::Replaced);
    // A replacement takes no second place.
    assert_eq!(last.stats().unwrap().queued_count, 2);
    assert_eq!(run_all(&last), [pair("b", "2"), pair("a", "3")]);
    assert_eq!(last.stats().unwrap().queued_count, 0);

    let merged: Intake<Repeatable> = log.intake("merged", options()).unwrap();
    let sum = |old: &[u8], new: &[u8]| [old, b"+", new].concat();
    assert_eq!(
        merged.submit_merged("a", "1", sum).unwrap(),
        Submitted::Queued
    );
    assert_eq!(
        merged.submit_merged("a", "2", sum).unwrap(),
        Submitted::Replaced
    );
    // The caller's code may call the store.
    let inner = merged.submit_merged("a", "3", |old, new| {
        assert!(matches!(
            merged.status("a").unwrap(),
            JobStatus::Queued { .. }
        ));
        sum(old, new)
    });
    assert_eq!(inner.unwrap(), Submitted::Replaced);
    assert_eq!(run_all(&merged), [pair("a", "1+2+3")]);
    let long = merged.submit("b", "x".repeat(301)).unwrap_err();
    assert_eq!(long.kind(), ErrorKind::Invalid);
    assert_eq!(
        merged.submit("b", "x".repeat(200)).unwrap(),
        Submitted::Queued
    );
    let long = merged.submit_merged("b", "y".repeat(200), sum).unwrap_err();
    assert_eq!(long.kind(), ErrorKind::Invalid);
}

#[test]
fn nobody_replaces_the_payload_of_a_job_that_has_begun() {
    let log = store(&SimDisk::new(), &clock());
    let intake: Intake<Repeatable> = log.intake("last", options().keep(Keep::Last)).unwrap();
    assert_eq!(intake.submit("a", "1").unwrap(), Submitted::Queued);
    let taken = intake.take(1).unwrap().remove(0);
    assert_eq!((taken.key(), taken.payload()), (&b"a"[..], &b"1"[..]));
    assert_eq!(intake.submit("a", "2").unwrap(), Submitted::InProgress);
    assert!(matches!(
        intake.status("a").unwrap(),
        JobStatus::Begun(KeyState::Pending { .. })
    ));
    drop(taken);
    // Given back: it is queued again.
    assert_eq!(intake.submit("a", "3").unwrap(), Submitted::Replaced);
    assert_eq!(run_all(&intake), [pair("a", "3")]);
}

#[test]
fn too_much_is_pushed_back_and_what_is_queued_never_expires() {
    let (disk, clock) = (SimDisk::new(), clock());
    let log = store(&disk, &clock);
    let intake: Intake<Repeatable> = log.intake("jobs", options().queued_max(2)).unwrap();
    assert_eq!(intake.submit("a", "1").unwrap(), Submitted::Queued);
    assert_eq!(intake.submit("b", "2").unwrap(), Submitted::Queued);
    assert_eq!(intake.submit("c", "3").unwrap_err().kind(), ErrorKind::Full);
    // What is queued is absorbed all the same.
    assert_eq!(intake.submit("a", "4").unwrap(), Submitted::AlreadyQueued);
    let filter = log.filter(
        "filter",
        NamespaceOptions::new().retention(HOUR).outcome_bytes_max(0),
    );
    let filter = filter.unwrap();
    for round in 0..4 {
        for n in 0..60 {
            let key = format!("{round}-{n}-{}", "f".repeat(150));
            assert!(filter.observe(key).unwrap().is_new());
        }
        clock.advance_ms(3_600_000);
        log.maintain().unwrap();
    }
    assert!(log.stats().drops_count > 0);
    assert_eq!(run_all(&intake), [pair("a", "1"), pair("b", "2")]);
    assert_eq!(intake.submit("c", "3").unwrap(), Submitted::Queued);
}

#[test]
fn failures_pause_end_or_leave_a_job_in_doubt() {
    let (disk, clock) = (SimDisk::new(), clock());
    let intake = open::<NonRepeatable>(&disk, &clock);
    for key in ["later", "never", "unknown", "released"] {
        assert_eq!(intake.submit(key, key).unwrap(), Submitted::Queued);
    }
    let fail = |taken: Taken<NonRepeatable>| {
        let verdict = taken.run(|job| {
            Err(match job.key() {
                b"later" => Failure::retryable(Duration::from_secs(30), "later"),
                b"never" => Failure::permanent("no"),
                b"unknown" => Failure::unknown("?"),
                _ => Failure::Release,
            })
        });
        assert!(matches!(verdict.unwrap(), RunVerdict::Failed { .. }));
    };
    intake.take(9).unwrap().into_iter().for_each(fail);
    assert!(matches!(
        intake.submit("never", "").unwrap(),
        Submitted::Rejected { .. }
    ));
    let doubt = match intake.submit("unknown", "").unwrap() {
        Submitted::InDoubt(doubt) => doubt,
        other => panic!("{other:?}"),
    };
    assert!(matches!(
        intake.status("later").unwrap(),
        JobStatus::Queued {
            failed_count: 1,
            ..
        }
    ));
    assert_eq!(run_all(&intake), [pair("released", "released")]);
    clock.advance_ms(30_000);
    assert_eq!(run_all(&intake), [pair("later", "later")]);
    // Resolved as not applied, it is done at the next look.
    let resolved = intake
        .jobs()
        .resolve("unknown", doubt.epoch, Resolution::NotApplied);
    assert!(resolved.unwrap().is_applied());
    clock.advance_ms(60_000);
    assert_eq!(run_all(&intake), [pair("unknown", "unknown")]);
    assert_eq!(intake.stats().unwrap().queued_count, 0);
}

#[test]
fn a_job_whose_steps_are_run_by_hand_ends_with_its_payload() {
    let (disk, clock) = (SimDisk::new(), clock());
    let intake = open::<Repeatable>(&disk, &clock);
    for key in ["a", "b"] {
        assert_eq!(intake.submit(key, key).unwrap(), Submitted::Queued);
    }
    let mut taken = intake.take(2).unwrap();
    let (mut claim, entry) = taken.remove(0).into_parts().unwrap();
    let commit = Commit::new("out").acknowledge(intake.queue(), &entry);
    assert_eq!(
        claim.commit_with(commit).unwrap().ack_advice(),
        AckAdvice::Ack
    );
    assert_eq!(intake.stats().unwrap().queued_count, 1);
    // Committed without the end of its payload: that ends when it is met.
    let (mut claim, _entry) = taken.remove(0).into_parts().unwrap();
    assert_eq!(claim.commit(b"out").unwrap().ack_advice(), AckAdvice::Ack);
    clock.advance_ms(61_000);
    assert!(intake.take(9).unwrap().is_empty());
    assert_eq!(intake.stats().unwrap().queued_count, 0);
}

#[test]
fn a_job_that_panics_or_whose_outcome_is_too_large_has_its_end() {
    let (disk, clock) = (SimDisk::new(), clock());
    let intake = open::<Repeatable>(&disk, &clock);
    assert_eq!(intake.submit("panics", "").unwrap(), Submitted::Queued);
    let taken = intake.take(1).unwrap().remove(0);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        taken.run(|_| panic!("effect")).map(|_| ())
    }));
    assert!(panicked.is_err());
    let taken = intake.take(1).unwrap().remove(0);
    let error = taken.run(|_| Ok(vec![0; 301])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    // It has happened, and is not done again.
    let Submitted::Duplicate(done) = intake.submit("panics", "").unwrap() else {
        panic!("not done");
    };
    assert_eq!(done.outcome, Outcome::Dropped);
    assert!(intake.take(1).unwrap().is_empty());
}

#[test]
fn who_waits_for_a_job_or_for_its_outcome_is_woken() {
    let log = Options::new().open_in_memory().unwrap();
    let intake: Intake<Repeatable> = log.intake("jobs", options()).unwrap();
    let minute = Duration::from_secs(60);
    let worker = {
        let intake = intake.clone();
        std::thread::spawn(move || {
            let mut done = 0;
            while done < 20 {
                for taken in intake.take_wait(3, minute).unwrap() {
                    let ran = taken.run(|job| Ok(job.payload().to_vec())).unwrap();
                    assert!(matches!(ran, RunVerdict::Ran { .. }));
                    done += 1;
                }
            }
        })
    };
    let began = std::time::Instant::now();
    for n in 0..20 {
        assert_eq!(
            intake.submit(format!("{n}"), format!("{n}")).unwrap(),
            Submitted::Queued
        );
        let JobStatus::Begun(KeyState::Done(done)) =
            intake.wait_outcome(format!("{n}"), minute).unwrap()
        else {
            panic!("not done");
        };
        assert_eq!(done.outcome, Outcome::Kept(format!("{n}").into_bytes()));
    }
    worker.join().unwrap();
    assert!(began.elapsed() < minute);
    assert_eq!(
        intake.wait_outcome("unknown", minute).unwrap(),
        JobStatus::Unknown
    );
    assert_eq!(intake.submit("waits", "").unwrap(), Submitted::Queued);
    let waited = intake
        .wait_outcome("waits", Duration::from_millis(20))
        .unwrap();
    assert!(matches!(waited, JobStatus::Queued { .. }));
    drop(intake.take(1).unwrap());
    // Closing ends a wait.
    let waiting = {
        let intake = intake.clone();
        std::thread::spawn(move || intake.wait_outcome("waits", minute).map(|_| ()))
    };
    while log.stats().waiters_count == 0 {
        std::thread::yield_now();
    }
    log.close().unwrap();
    assert_eq!(
        waiting.join().unwrap().unwrap_err().kind(),
        ErrorKind::Closed
    );
}

/// Story: a job went in doubt because its effect panicked, and who waited for its outcome slept on.
#[test]
fn who_waits_is_woken_when_a_job_goes_in_doubt() {
    let log = Options::new().open_in_memory().unwrap();
    let intake: Intake<NonRepeatable> = log.intake("jobs", options()).unwrap();
    assert_eq!(intake.submit("a", "").unwrap(), Submitted::Queued);
    let waiting = {
        let intake = intake.clone();
        std::thread::spawn(move || intake.wait_outcome("a", HOUR).unwrap())
    };
    while log.stats().waiters_count == 0 {
        std::thread::yield_now();
    }
    let taken = intake.take(1).unwrap().remove(0);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        taken.run(|_| panic!("effect")).map(|_| ())
    }));
    assert!(panicked.is_err());
    let status = waiting.join().unwrap();
    assert!(
        matches!(status, JobStatus::Begun(KeyState::InDoubt(_))),
        "{status:?}"
    );
}

#[test]
fn tasks_take_jobs_and_wait_for_outcomes() {
    let log = Options::new().open_in_memory().unwrap();
    let intake: Intake<Repeatable> = log.intake("jobs", options()).unwrap();
    let minute = Duration::from_secs(60);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    runtime.block_on(async {
        let worker = {
            let intake = intake.clone();
            tokio::spawn(async move {
                let mut done = 0;
                while done < 50 {
                    for taken in intake.take_wait_async(5, minute).await.unwrap() {
                        let ran = taken.run(|job| Ok(job.payload().to_vec())).unwrap();
                        assert!(matches!(ran, RunVerdict::Ran { .. }));
                        done += 1;
                    }
                }
            })
        };
        for n in 0..50 {
            assert_eq!(
                intake.submit(format!("{n}"), "x").unwrap(),
                Submitted::Queued
            );
            let status = intake
                .wait_outcome_async(format!("{n}"), minute)
                .await
                .unwrap();
            assert!(matches!(status, JobStatus::Begun(KeyState::Done(_))));
        }
        worker.await.unwrap();
    });
}

#[test]
fn many_workers_and_many_copies_do_each_job_once() {
    let log = Options::new().open_in_memory().unwrap();
    let intake: Intake<Repeatable> = log.intake("jobs", options()).unwrap();
    const JOBS: usize = 200;
    let effects: Vec<AtomicUsize> = (0..JOBS).map(|_| AtomicUsize::new(0)).collect();
    std::thread::scope(|scope| {
        for worker in 0..8 {
            let (intake, effects) = (&intake, &effects);
            scope.spawn(move || {
                for n in 0..JOBS {
                    let n = (n * 7 + worker * 31) % JOBS;
                    let submitted = intake.submit(format!("{n}"), format!("{n}")).unwrap();
                    assert_eq!(submitted.ack_advice(), AckAdvice::Ack);
                    for taken in intake.take(2).unwrap() {
                        let verdict = taken.run(|job| {
                            let n: usize =
                                std::str::from_utf8(job.payload()).unwrap().parse().unwrap();
                            effects[n].fetch_add(1, Ordering::SeqCst);
                            Ok(vec![])
                        });
                        assert!(matches!(verdict.unwrap(), RunVerdict::Ran { .. }));
                    }
                }
            });
        }
    });
    drop(run_all(&intake));
    for (n, count) in effects.iter().enumerate() {
        assert_eq!(count.load(Ordering::SeqCst), 1, "{n}");
    }
    assert_eq!(intake.stats().unwrap().queued_count, 0);
}

/// Stopped at each step: what was answered `Queued` is queued or done, and nothing that is done is
/// queued.
#[test]
fn no_crash_loses_a_job_or_leaves_one_queued_that_is_done() {
    let accepted = std::cell::Cell::new(0);
    let finished = std::cell::Cell::new(0);
    let scenario = |disk: &SimDisk| {
        accepted.set(0);
        finished.set(0);
        let options_ = Options::new().segment_bytes(8192).background(false);
        let Ok(log) = options_.clock(clock() as _).open_on(disk.dir()) else {
            return;
        };
        let Ok(intake) = log.intake::<NonRepeatable>("jobs", options()) else {
            return;
        };
        for n in 0..6u32 {
            if intake.submit(format!("{n}"), "x".repeat(100)).is_err() {
                return;
            }
            accepted.set(n + 1);
            if n % 2 == 1 {
                let Ok(mut taken) = intake.take(1) else {
                    return;
                };
                if taken.remove(0).run(|_| Ok(b"done".to_vec())).is_err() {
                    return;
                }
                finished.set(finished.get() + 1);
            }
        }
    };
    let crash = CrashOptions {
        seeded_count: 3,
        inside_count: 1,
        ..CrashOptions::default()
    };
    let totals = for_each_crash_point(&crash, scenario, |state| {
        let clock = clock();
        let log = store(&state.disk, &clock);
        let intake: Intake<NonRepeatable> = log.intake("jobs", options()).unwrap();
        let (mut done, mut queued, mut doubtful) = (0, 0, 0);
        for n in 0..6u32 {
            match intake.status(format!("{n}")).unwrap() {
                JobStatus::Unknown => assert!(n >= accepted.get(), "{n} {state}"),
                JobStatus::Queued { .. } => queued += 1,
                JobStatus::Begun(KeyState::Done(_)) => done += 1,
                JobStatus::Begun(KeyState::InDoubt(_)) => doubtful += 1,
                JobStatus::Begun(KeyState::Pending { .. }) => queued += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(done >= finished.get() && doubtful <= 1, "{state}");
        let waits = intake.stats().unwrap().queued_count;
        assert_eq!(waits, queued + doubtful, "{state}");
        assert_eq!(intake.take(9).unwrap().len() as u64, queued, "{state}");
    });
    assert!(totals.checked > 100);
}

/// Works off what is queued, with the largest outcomes, and says how much it was.
fn work_off(intake: &Intake<Repeatable>) -> usize {
    let mut done = 0;
    loop {
        let Some(taken) = intake.take(1).unwrap().pop() else {
            return done;
        };
        let ran = taken.run(|_| Ok(vec![7; 300])).unwrap();
        assert!(matches!(ran, RunVerdict::Ran { .. }));
        done += 1;
    }
}

/// Story: taking a job needed room as a new claim does. At the bound nothing could be submitted and
/// nothing taken, so that no room ever came.
#[test]
fn at_the_bound_on_unsettled_records_jobs_are_taken_and_make_room() {
    let disk = SimDisk::new();
    let open = |disk: &SimDisk| {
        let store = Options::new().segment_bytes(8192).background(false);
        let log = store.unsettled_count_max(2).open_on(disk.dir()).unwrap();
        log.intake::<Repeatable>("jobs", options()).unwrap()
    };
    let intake = open(&disk);
    let kind = |answer: idemlog::Result<Submitted>| answer.unwrap_err().kind();
    for key in ["a", "b"] {
        assert_eq!(intake.submit(key, "").unwrap(), Submitted::Queued);
    }
    assert_eq!(kind(intake.submit("c", "")), ErrorKind::Full);
    let taken = intake.take(1).unwrap().remove(0);
    assert_eq!(kind(intake.submit("c", "")), ErrorKind::Full);
    // Others than jobs that were accepted get nothing beyond the bound.
    assert_eq!(
        intake.jobs().claim("other").unwrap_err().kind(),
        ErrorKind::Full
    );
    drop(intake);
    drop(taken);
    let intake = open(&disk.after_kill());
    assert_eq!(kind(intake.submit("c", "")), ErrorKind::Full);
    let taken = intake.take(1).unwrap().remove(0);
    let ran = taken.run(|_| Ok(Vec::new())).unwrap();
    assert!(matches!(ran, RunVerdict::Ran { .. }));
    assert_eq!(intake.submit("c", "").unwrap(), Submitted::Queued);
    assert_eq!(work_off(&intake), 2);
}

/// The same for the bound on the log, which stays within it: what a job writes later is kept free
/// from its submission on, also over a reopen.
#[test]
fn at_the_bound_on_the_log_jobs_are_worked_off_within_it() {
    const BYTES_MAX: u64 = 64 * 1024;
    for reopens in [false, true] {
        let disk = SimDisk::new();
        let open = |disk: &SimDisk| {
            let store = Options::new().segment_bytes(8192).background(false);
            let log = store.log_bytes_max(BYTES_MAX).open_on(disk.dir());
            let log = log.unwrap();
            let intake = log.intake::<Repeatable>("jobs", options()).unwrap();
            (log, intake)
        };
        let fill = |intake: &Intake<Repeatable>, from: usize| {
            (from..)
                .map(|n| intake.submit(format!("{n}"), [1; 50]))
                .position(|submitted| submitted.is_err())
                .unwrap()
        };
        let (mut log, mut intake) = open(&disk);
        let accepted = fill(&intake, 0);
        assert!(accepted > 20, "{accepted}");
        if reopens {
            drop(intake);
            log.close().unwrap();
            (log, intake) = open(&disk);
            assert_eq!(
                fill(&intake, accepted),
                0,
                "the room kept free is forgotten"
            );
        }
        assert_eq!(work_off(&intake), accepted);
        assert!(
            log.stats().log_bytes <= BYTES_MAX,
            "{}",
            log.stats().log_bytes
        );
    }
}

/// Waits for the outcome of a key while somebody does something about it.
fn outcome_of<C: EffectClass>(
    log: &DedupLog,
    intake: &Intake<C>,
    key: &str,
    act: impl FnOnce(),
) -> JobStatus {
    let limit = Duration::from_secs(20);
    let began = std::time::Instant::now();
    let waiting = {
        let (intake, key) = (intake.clone(), key.to_owned());
        std::thread::spawn(move || intake.wait_outcome(key, limit).unwrap())
    };
    while log.stats().waiters_count == 0 {
        std::thread::yield_now();
    }
    act();
    let status = waiting.join().unwrap();
    assert!(began.elapsed() < limit, "{key} was not told");
    status
}

/// Story: who waited for an outcome heard only of what went through the intake, and slept until the
/// deadline where a job ended by its parts, was forgotten, or lost its lease.
#[test]
fn who_waits_for_an_outcome_hears_of_every_end() {
    let log = Options::new().open_in_memory().unwrap();
    let intake: Intake<Repeatable> = log.intake("jobs", options()).unwrap();
    let by_parts = |key: &str| {
        assert_eq!(intake.submit(key, "").unwrap(), Submitted::Queued);
        intake.take(1).unwrap().remove(0).into_parts().unwrap()
    };
    let (mut claim, _entry) = by_parts("committed");
    let status = outcome_of(&log, &intake, "committed", || {
        let verdict = claim.commit(b"out").unwrap();
        assert_eq!(verdict.ack_advice(), AckAdvice::Ack);
    });
    assert!(matches!(status, JobStatus::Begun(KeyState::Done(_))));

    let (claim, _entry) = by_parts("failed");
    let status = outcome_of(&log, &intake, "failed", || {
        let change = claim.fail(Failure::permanent("no")).unwrap();
        assert!(change.is_applied());
    });
    assert!(matches!(
        status,
        JobStatus::Begun(KeyState::Rejected { .. })
    ));

    let claim = intake.jobs().claim("forgotten").unwrap().claim().unwrap();
    let status = outcome_of(&log, &intake, "forgotten", || {
        let change = intake.jobs().forget("forgotten", true).unwrap();
        assert!(change.is_applied());
    });
    assert_eq!(status, JobStatus::Unknown);
    drop(claim);

    assert_eq!(
        intake.submit("acknowledged", "").unwrap(),
        Submitted::Queued
    );
    let status = outcome_of(&log, &intake, "acknowledged", || {
        let entry = intake.queue().lease(1).unwrap().remove(0);
        assert!(intake.queue().ack(&entry).unwrap());
    });
    assert_eq!(status, JobStatus::Unknown);
    assert_eq!(log.stats().waiters_count, 0);
}

#[test]
fn who_waits_for_an_outcome_is_told_of_a_doubt_that_only_time_brings() {
    let log = Options::new().open_in_memory().unwrap();
    let jobs = NamespaceOptions::new().lease(Duration::from_millis(100));
    let short = IntakeOptions::new().jobs(jobs);
    let intake: Intake<NonRepeatable> = log.intake("jobs", short).unwrap();
    assert_eq!(intake.submit("a", "").unwrap(), Submitted::Queued);
    let mut held = None;
    // It waits already when the lease begins.
    let status = outcome_of(&log, &intake, "a", || {
        let (claim, _entry) = intake.take(1).unwrap().remove(0).into_parts().unwrap();
        held = Some(claim.start(b"").unwrap());
    });
    assert!(
        matches!(status, JobStatus::Begun(KeyState::InDoubt(_))),
        "{status:?}"
    );
    drop(held);
}

/// Story: a job that was met while another one had it paused for the whole lease of that one, and
/// went on pausing when it was given back.
#[test]
fn a_job_that_is_given_back_is_taken_at_once_whoever_has_met_it_meanwhile() {
    let (disk, clock) = (SimDisk::new(), clock());
    let intake = open::<Repeatable>(&disk, &clock);
    assert_eq!(intake.submit("a", "").unwrap(), Submitted::Queued);
    let (claim, entry) = intake.take(1).unwrap().remove(0).into_parts().unwrap();
    assert!(claim.renew(HOUR).unwrap().is_applied());
    clock.advance_ms(1_000_000);
    // The payload's lease has lapsed, the claim's has not.
    assert!(intake.take(1).unwrap().is_empty());
    drop(claim);
    intake.queue().give_back(&[entry]).unwrap();
    assert_eq!(run_all(&intake), [pair("a", "")]);
}

#[test]
fn replacements_at_the_same_moment_take_one_place() {
    let log = Options::new().open_in_memory().unwrap();
    let intake: Intake<Repeatable> = log.intake("jobs", options().keep(Keep::Last)).unwrap();
    for round in 0..200 {
        let key = format!("{round}");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let submitted = intake.submit(&key, "x").unwrap();
                    assert!(matches!(submitted, Submitted::Queued | Submitted::Replaced));
                });
            }
        });
        assert_eq!(intake.stats().unwrap().queued_count, round + 1);
    }
}

/// Stopped at each step: a job that has its end has no payload any more, however it ended; it would
/// be done again once its key is forgotten.
#[test]
fn no_crash_leaves_a_payload_of_a_job_that_failed_or_was_resolved() {
    let fails = NamespaceOptions::new().outcome_bytes_max(300);
    let fails = fails.attempts_max(1).retention(HOUR);
    let scenario = |disk: &SimDisk| -> idemlog::Result<()> {
        let options = Options::new().segment_bytes(8192).background(false);
        let log = options.clock(clock() as _).open_on(disk.dir())?;
        let jobs = IntakeOptions::new().jobs(fails.clone());
        let intake = log.intake::<NonRepeatable>("jobs", jobs)?;
        for key in ["permanent", "used up", "abandoned", "applied"] {
            let _queued = intake.submit(key, key)?;
        }
        for taken in intake.take(9)? {
            let _failed = taken.run(|job| {
                Err(match job.key() {
                    b"permanent" => Failure::permanent("no"),
                    b"used up" => Failure::retryable(Duration::ZERO, "later"),
                    _ => Failure::unknown("?"),
                })
            })?;
        }
        for (key, resolution) in [
            ("abandoned", Resolution::Abandon),
            ("applied", Resolution::Applied(b"out".to_vec())),
        ] {
            let JobStatus::Begun(KeyState::InDoubt(doubt)) = intake.status(key)? else {
                panic!("{key} is in doubt");
            };
            assert!(intake.resolve(key, doubt.epoch, resolution)?.is_applied());
        }
        assert_eq!(intake.stats()?.queued_count, 0);
        Ok(())
    };
    let ends = std::cell::Cell::new(0);
    let run = |disk: &SimDisk| drop(scenario(disk));
    let totals = for_each_crash_point(&CrashOptions::default(), run, |state| {
        let log = store(&state.disk, &clock());
        let jobs = IntakeOptions::new().jobs(fails.clone());
        let intake: Intake<NonRepeatable> = log.intake("jobs", jobs).unwrap();
        let mut open = 0;
        for key in ["permanent", "used up", "abandoned", "applied"] {
            match intake.status(key).unwrap() {
                JobStatus::Unknown => {}
                JobStatus::Begun(
                    KeyState::Done(_) | KeyState::Rejected { .. } | KeyState::Dead { .. },
                ) => ends.set(ends.get() + 1),
                _ => open += 1,
            }
        }
        assert_eq!(intake.stats().unwrap().queued_count, open, "{state}");
    });
    assert!(totals.checked > 100 && ends.get() > 100, "{}", ends.get());
}

/// The same for what a probe finds out, and for attempts that a take finds used up.
#[test]
fn no_crash_leaves_a_payload_of_a_job_that_a_probe_has_ended() {
    let open = |disk: &SimDisk| -> idemlog::Result<Intake<Probeable>> {
        let log = Options::new().segment_bytes(8192).background(false);
        let log = log.clock(clock() as _).open_on(disk.dir())?;
        let jobs = NamespaceOptions::new().outcome_bytes_max(300);
        let jobs = IntakeOptions::new().jobs(jobs.settle(Duration::ZERO));
        let intake = log.intake("jobs", jobs)?;
        Ok(intake.with_probe(|_| Probed::Applied(b"out".to_vec())))
    };
    let begun = SimDisk::new();
    {
        let intake = open(&begun).unwrap();
        assert_eq!(intake.submit("a", "a").unwrap(), Submitted::Queued);
        let (claim, _entry) = intake.take(1).unwrap().remove(0).into_parts().unwrap();
        drop(claim.start(b"").unwrap().detach());
    }
    // What a take has ended stays so behind a power cut right after it.
    let ended = begun.after_kill();
    let intake = open(&ended).unwrap();
    assert!(intake.take(1).unwrap().is_empty());
    let bare = ended.after_power_cut(&mut PowerCut::drop_all());
    let status = open(&bare).unwrap().status("a").unwrap();
    assert!(
        matches!(status, JobStatus::Begun(KeyState::Done(_))),
        "{status:?}"
    );
    let crash = CrashOptions {
        base: begun,
        ..CrashOptions::default()
    };
    let probed = |disk: &SimDisk| {
        let Ok(intake) = open(disk) else { return };
        let taken = intake.take(1);
        assert!(taken.map_or(true, |taken| taken.is_empty()));
    };
    let done = std::cell::Cell::new(0);
    let totals = for_each_crash_point(&crash, probed, |state| {
        let intake = open(&state.disk).unwrap();
        let is_done = matches!(
            intake.status("a").unwrap(),
            JobStatus::Begun(KeyState::Done(_))
        );
        done.set(done.get() + u32::from(is_done));
        let queued = intake.stats().unwrap().queued_count;
        assert_eq!(queued, u64::from(!is_done), "{state}");
        assert!(intake.take(1).unwrap().is_empty(), "{state}");
    });
    assert!(totals.checked > 10 && done.get() > 0, "{}", done.get());
}
