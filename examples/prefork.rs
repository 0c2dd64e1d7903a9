//! Prefork: four worker processes share one store and one queue; some are killed and replaced.
//!
//! ```text
//! cargo run --release --example prefork [-- --seed 7 --kills 20 --jobs 400]
//! ```
//!
//! The parent submits jobs and starts four workers, each this program again. A worker takes a job
//! and makes its invoice: a file whose name is the job's derived key, so that the target (the
//! directory) refuses a second one. Workers are killed with SIGKILL at random moments, also between
//! effect and commit, and replaced at once; whatever a dead one was at is taken by another, without
//! waiting for a lease. Judged at the end: every job has one invoice and one outcome, nothing is
//! queued any more, and more than one worker did some of it.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a program that prints, and kills its workers at moments of its own"
)]
#![allow(dead_code, reason = "the common part is for one child at a time, too")]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use common::{Fallible, Random, number, start};
use idemlog::{
    DedupLog, Failure, Intake, IntakeOptions, JobStatus, KeyState, Options, Outcome, Repeatable,
};

const WORKERS: usize = 4;
/// Whoever has not come to its end by then hangs.
const TIME_MAX: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    start("prefork", worker, parent)
}

fn open(dir: &Path) -> Fallible<(DedupLog, Intake<Repeatable>)> {
    let log = Options::new().shared(true).open(dir.join("store"))?;
    let intake = log.intake("invoices", IntakeOptions::new())?;
    Ok((log, intake))
}

/// Works until nothing has come for a while.
fn worker(dir: &Path) -> Fallible<()> {
    let (log, intake) = open(dir)?;
    let me = std::process::id().to_string();
    loop {
        let mut jobs = intake.take_wait(1, Duration::from_millis(500))?;
        let Some(job) = jobs.pop() else {
            break;
        };
        let _verdict = job.run(|job| {
            let file = dir.join("out").join(job.derived_key("invoice"));
            match fs::File::create_new(file) {
                // The target has it already: an attempt before this one died before its commit.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                made => drop(made.map_err(Failure::unknown)?),
            }
            Ok(me.clone().into_bytes())
        })?;
    }
    Ok(log.close()?)
}

fn spawn(dir: &Path) -> Fallible<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    Ok(command.arg("--child").arg(dir).spawn()?)
}

fn parent(dir: &Path) -> Fallible<bool> {
    let (seed, kills) = (number("--seed", 1), number("--kills", 20));
    let jobs = number("--jobs", 400);
    println!("seed {seed} (again with: --seed {seed})");
    fs::create_dir(dir.join("out"))?;
    // The workers open the store themselves: a handle does not outlive a fork.
    let (log, intake) = open(dir)?;
    let mut workers = (0..WORKERS)
        .map(|_| spawn(dir))
        .collect::<Fallible<Vec<_>>>()?;
    let mut random = Random::new(seed);
    let (began, mut killed, mut next) = (Instant::now(), 0, 0);
    while killed < kills || next < jobs || intake.stats()?.queued_count > 0 {
        for key in next..(next + jobs / 20).min(jobs) {
            let _accepted = intake.submit(format!("job-{key}"), key.to_string())?;
        }
        next = (next + jobs / 20).min(jobs);
        std::thread::sleep(Duration::from_millis(5 + random.below(30)));
        if killed < kills {
            let at = usize::try_from(random.below(WORKERS as u64))?;
            if let Some(worker) = workers.get_mut(at) {
                worker.kill()?;
                worker.wait()?;
                *worker = spawn(dir)?;
                killed += 1;
            }
        }
        if began.elapsed() > TIME_MAX {
            return Err("the workers do not come to an end".into());
        }
    }
    for worker in &mut workers {
        if !worker.wait()?.success() {
            return Err("a worker has failed".into());
        }
    }
    let right = judge(dir, &intake, jobs, killed)?;
    log.close()?;
    Ok(right)
}

fn judge(dir: &Path, intake: &Intake<Repeatable>, jobs: u64, killed: u64) -> Fallible<bool> {
    let invoices = fs::read_dir(dir.join("out"))?.count();
    let mut by = BTreeSet::new();
    let mut done = 0;
    for key in 0..jobs {
        if let JobStatus::Begun(KeyState::Done(job)) = intake.status(format!("job-{key}"))?
            && let Outcome::Kept(worker) = job.outcome
        {
            by.insert(worker);
            done += 1;
        }
    }
    println!(
        "killed {killed} times; {jobs} jobs, {done} done by {} workers, {invoices} invoices",
        by.len()
    );
    let right = done == jobs && invoices as u64 == jobs && by.len() > 1;
    println!("every job once: {}", if right { "yes" } else { "NO" });
    Ok(right)
}
