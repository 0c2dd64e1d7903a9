//! Kafka offsets: messages are finished out of order, and the offset that is committed to the
//! broker never passes one that is not.
//!
//! ```text
//! cargo run --release --example kafka_offsets [-- --seed 7 --kills 20]
//! ```
//!
//! The child handles offsets 1000 to 1099 in a random order, and 1001 last of all. It is killed
//! with SIGKILL again and again. After each death the parent opens the store and asks what may be
//! committed: as long as 1001 is not done, that stays before it, however many later ones are.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a program that prints, and kills its child at moments of its own"
)]

mod common;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use common::{Fallible, Random, number, run_and_kill, start};
use idemlog::{
    ClaimVerdict, Commit, DedupLog, Internal, Namespace, NamespaceOptions, Sequenced,
    WatermarkOptions, Watermarks,
};

const SOURCE: &str = "orders/0";
const FIRST: u64 = 1000;
const COUNT: u64 = 100;
const LATE: u64 = FIRST + 1;

fn main() -> ExitCode {
    start("kafka_offsets", child, parent)
}

fn open(dir: &Path) -> Fallible<(DedupLog, Namespace<Internal>, Watermarks)> {
    let log = DedupLog::open(dir.join("store"))?;
    let jobs = log.namespace("jobs", NamespaceOptions::new())?;
    let marks = log.watermarks("offsets", WatermarkOptions::sparse(1000))?;
    // Where the consumer group was told to begin.
    marks.begin(SOURCE, FIRST)?;
    Ok((log, jobs, marks))
}

/// Handles what the broker delivers again after each restart: everything from the safe position.
fn child(dir: &Path) -> Fallible<()> {
    let (_log, jobs, marks) = open(dir)?;
    let mut random = Random::new(number("--life", 0) + 1);
    let safe = marks.safe_position(SOURCE)?;
    let mut offsets: Vec<u64> = (safe.map_or(FIRST, |safe| safe + 1)..FIRST + COUNT).collect();
    for at in (1..offsets.len()).rev() {
        let other = usize::try_from(random.below(at as u64 + 1))?;
        offsets.swap(at, other);
    }
    offsets.sort_by_key(|offset| *offset == LATE);
    for offset in offsets {
        // Below the mark and in its set a duplicate costs no look-up of a key.
        if marks.observe(SOURCE, offset)? == Sequenced::Duplicate {
            continue;
        }
        let claimed = jobs.claim(format!("{SOURCE}/{offset}"))?;
        let Some(mut claim) = claimed.claim() else {
            return Err(format!("offset {offset} is done and not marked so").into());
        };
        std::thread::sleep(Duration::from_millis(random.below(4)));
        let commit = Commit::new(offset.to_string()).advance(&marks, SOURCE, offset);
        if !claim
            .commit_with(commit)?
            .ack_advice()
            .eq(&idemlog::AckAdvice::Ack)
        {
            return Err(format!("offset {offset} was not committed").into());
        }
    }
    Ok(())
}

/// What may be committed to the broker, and how many offsets are done beyond it.
fn look(dir: &Path) -> Fallible<(u64, u64, bool)> {
    let (_log, jobs, marks) = open(dir)?;
    let safe = marks.safe_position(SOURCE)?.unwrap_or_default();
    let mut beyond = 0;
    for offset in FIRST..FIRST + COUNT {
        let marked = marks.observe(SOURCE, offset)? == Sequenced::Duplicate;
        let done = matches!(
            jobs.claim(format!("{SOURCE}/{offset}"))?,
            ClaimVerdict::Duplicate(_)
        );
        if marked != done {
            return Err(format!("offset {offset}: marked={marked} done={done}").into());
        }
        beyond += u64::from(marked && offset > safe);
    }
    let late = marks.observe(SOURCE, LATE)? == Sequenced::Duplicate;
    Ok((safe, beyond, late))
}

fn parent(dir: &Path) -> Fallible<bool> {
    let (seed, kills) = (number("--seed", 1), number("--kills", 20));
    println!("seed {seed} (again with: --seed {seed})");
    let mut right = true;
    let mut killed = 0;
    // One life at a time, so that each death can be looked at.
    for life in 0..kills {
        let mut random = Random::new(seed + life);
        let mut child = std::process::Command::new(std::env::current_exe()?)
            .arg("--child")
            .arg(dir)
            .args(["--life", &(seed + life).to_string()])
            .spawn()?;
        std::thread::sleep(Duration::from_millis(5 + random.below(25)));
        child.kill()?;
        killed += u64::from(!child.wait()?.success());
        let (safe, beyond, late) = look(dir)?;
        println!("  killed: commit {safe} + 1 to the broker; {beyond} done beyond it");
        right &= late || safe == FIRST || safe == FIRST - 1;
    }
    run_and_kill(dir, 0, 1, seed)?;
    let (safe, beyond, late) = look(dir)?;
    right &= late && beyond == 0 && safe == FIRST + COUNT - 1;
    println!("killed {killed} times; at the end: commit {safe} + 1");
    println!(
        "never past what is not done: {}",
        if right { "yes" } else { "NO" }
    );
    Ok(right)
}
