//! Intake: a consumer accepts jobs and acknowledges at once, workers do them later; copies are
//! absorbed.
//!
//! ```text
//! cargo run --release --example intake [-- --seed 7 --kills 20]
//! ```
//!
//! The child submits 300 jobs, each two or three times in a random order, as a broker would that
//! delivers again what was not acknowledged: the file `acked` is the broker's memory. Two workers
//! take the jobs and write each effect as a line into the file `effects`, with its derived key. The
//! child is killed with SIGKILL again and again. Judged at the end: every job that the broker
//! will not deliver again was done, the target drops repeats by their derived key, and a repeat
//! only comes from a job that was being done when the process was killed.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a program that prints, and kills its child at moments of its own"
)]

mod common;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Fallible, Random, number, run_and_kill, start};
use idemlog::{AckAdvice, DedupLog, Failure, Intake, IntakeOptions, Repeatable};

const JOBS: u64 = 300;
const WORKERS: u64 = 2;

fn main() -> ExitCode {
    start("intake", child, parent)
}

fn append(file: &Path, line: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(file)?;
    file.write_all(format!("{line}\n").as_bytes())
}

fn lines(file: &Path) -> Fallible<Vec<String>> {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

/// What the broker delivers in this life: all that was not acknowledged, and some of the rest.
fn deliveries(dir: &Path) -> Fallible<Vec<u64>> {
    let acked = lines(&dir.join("acked"))?;
    let mut random = Random::new(number("--life", 0) + 1);
    let mut all = Vec::new();
    for n in 0..JOBS {
        let is_acked = acked.contains(&n.to_string());
        let copies = if is_acked {
            random.below(2)
        } else {
            1 + random.below(2)
        };
        all.extend((0..copies).map(|_| n));
    }
    for at in (1..all.len()).rev() {
        all.swap(at, usize::try_from(random.below(at as u64 + 1))?);
    }
    Ok(all)
}

fn work(intake: &Intake<Repeatable>, target: &Path, over: &AtomicBool) -> Fallible<()> {
    while !(over.load(Ordering::Acquire) && intake.stats()?.queued_count == 0) {
        for taken in intake.take_wait(4, Duration::from_millis(50))? {
            let verdict = taken.run(|job| {
                let payload = String::from_utf8_lossy(job.payload());
                let line = format!("{} {payload}", job.derived_key("write"));
                append(target, &line).map_err(Failure::unknown)?;
                Ok(b"written".to_vec())
            })?;
            if verdict.ack_advice() != AckAdvice::Ack {
                return Err(format!("a job was not done: {verdict:?}").into());
            }
        }
    }
    Ok(())
}

fn child(dir: &Path) -> Fallible<()> {
    let log = DedupLog::open(dir.join("store"))?;
    let intake: Intake<Repeatable> = log.intake("jobs", IntakeOptions::new())?;
    let target = dir.join("effects");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| -> Fallible<()> {
        let workers: Vec<_> = (0..WORKERS)
            .map(|_| scope.spawn(|| work(&intake, &target, &over)))
            .collect();
        let submitted = deliveries(dir)?.into_iter().try_for_each(|n| {
            let submitted = intake.submit(format!("job-{n}"), format!("payload-{n}"))?;
            if submitted.ack_advice() == AckAdvice::Ack {
                append(&dir.join("acked"), &n.to_string())?;
            }
            Ok(())
        });
        over.store(true, Ordering::Release);
        for worker in workers {
            worker.join().map_err(|_panic| "a worker panicked")??;
        }
        submitted
    })?;
    Ok(log.close()?)
}

fn parent(dir: &Path) -> Fallible<bool> {
    let (seed, kills) = (number("--seed", 1), number("--kills", 20));
    println!("seed {seed} (again with: --seed {seed})");
    let killed = run_and_kill(dir, kills, 60, seed)?;
    let mut effects: BTreeMap<String, u64> = BTreeMap::new();
    for line in lines(&dir.join("effects"))? {
        *effects.entry(line).or_default() += 1;
    }
    let repeats: u64 = effects.values().map(|count| count - 1).sum();
    let mut payloads: Vec<&str> = effects.keys().filter_map(|l| l.split(' ').nth(1)).collect();
    payloads.sort_unstable();
    payloads.dedup();
    let done = payloads.len() as u64;
    // Each kill interrupts at most one job of each worker.
    let right = done == JOBS && effects.len() as u64 == JOBS && repeats <= killed * WORKERS;
    println!(
        "killed {killed} times; {done} of {JOBS} jobs done; {repeats} repeats, dropped by key"
    );
    println!(
        "every job accepted and done: {}",
        if right { "yes" } else { "NO" }
    );
    Ok(right)
}
