//! The ledger: one JSON line for each run of a layer, kept beside the code.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::context::{Context, Counts, Fallible, Outcome, repository_root};

pub(crate) struct Entry<'a> {
    pub(crate) layer: &'a str,
    pub(crate) context: &'a Context,
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
    pub(crate) outcome: &'a Outcome,
}

pub(crate) fn append(file: &Path, entry: &Entry<'_>) -> Fallible<()> {
    let (status, counts, note) = match entry.outcome {
        Outcome::Passed(counts) => ("passed", counts.clone(), String::new()),
        Outcome::Failed { counts, what } => ("failed", counts.clone(), what.clone()),
        Outcome::Skipped { reason } => ("skipped", Counts::default(), reason.clone()),
    };
    let line = json!({
        "date": output("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"])?,
        "commit": commit()?,
        "layer": entry.layer,
        "mode": entry.context.mode.name(),
        "seed": entry.context.seed,
        "seconds": (entry.seconds * 10.0).round() / 10.0,
        "cpu_seconds": (entry.cpu_seconds * 10.0).round() / 10.0,
        "status": status,
        "passed": counts.passed,
        "failed": counts.failed,
        "counts": counts.more,
        "note": note.lines().next().unwrap_or_default(),
    });
    let mut to = OpenOptions::new().append(true).create(true).open(file)?;
    to.write_all(format!("{line}\n").as_bytes())?;
    Ok(())
}

#[derive(Default)]
struct Total {
    runs: u64,
    failed_runs: u64,
    skipped_runs: u64,
    seconds: f64,
    counts: BTreeMap<String, u64>,
}

/// Adds up the ledger by layer.
pub(crate) fn print_totals(file: &Path) -> Fallible<()> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("no ledger at {}: {error}", file.display()))?;
    let mut totals: BTreeMap<String, Total> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let entry: Value = serde_json::from_str(line)?;
        let word = |name: &str| entry.get(name).and_then(Value::as_str).unwrap_or_default();
        let total = totals.entry(word("layer").to_owned()).or_default();
        total.runs += 1;
        total.failed_runs += u64::from(word("status") == "failed");
        total.skipped_runs += u64::from(word("status") == "skipped");
        total.seconds += entry.get("seconds").and_then(Value::as_f64).unwrap_or(0.0);
        for name in ["passed", "failed"] {
            let count = entry.get(name).and_then(Value::as_u64).unwrap_or(0);
            *total.counts.entry(name.to_owned()).or_default() += count;
        }
        for (name, count) in entry
            .get("counts")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            *total.counts.entry(name.clone()).or_default() += count.as_u64().unwrap_or(0);
        }
    }
    for (layer, total) in totals {
        let counts: Vec<String> = total
            .counts
            .iter()
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        println!(
            "{layer}: {} runs ({} failed, {} skipped), {:.0} s: {}",
            total.runs,
            total.failed_runs,
            total.skipped_runs,
            total.seconds,
            counts.join(", ")
        );
    }
    Ok(())
}

/// The commit that is checked out, marked if the tree has changes (the ledger's own aside).
fn commit() -> Fallible<String> {
    let head = output("git", &["rev-parse", "--short=12", "HEAD"])?;
    let changes = output(
        "git",
        &["status", "--porcelain", "--", ".", ":!xtask/ledger.jsonl"],
    )?;
    Ok(if changes.is_empty() {
        head
    } else {
        format!("{head}-dirty")
    })
}

fn output(program: &str, words: &[&str]) -> Fallible<String> {
    let done = Command::new(program)
        .args(words)
        .current_dir(repository_root())
        .output()?;
    Ok(String::from_utf8(done.stdout)?.trim().to_owned())
}
