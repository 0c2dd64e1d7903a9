//! Every target of `fuzz/`, for a share of the time: from the committed inputs and from those that
//! earlier runs have found, which stay in the target folder.
//!
//! `--hours` is divided among the targets; `--count` is seconds for each.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::switched::target_folder;
use crate::context::{Context, Counts, Fallible, Outcome};
use crate::process;

const SECONDS_CI: u64 = 60;
const SECONDS_FULL: u64 = 8 * 3600;
const BUILD_TIME_MAX: Duration = Duration::from_secs(3600);

/// What one target has done.
struct Fuzzed {
    runs: u64,
    seconds: u64,
    /// What breaks it, and how to see it again.
    crashes: Vec<String>,
}

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let mut version = Command::new("cargo");
    version.args(["+nightly", "fuzz", "--version"]);
    let found = process::run(&mut version, Duration::from_secs(60))?;
    if !found.is_success() {
        return Ok(Outcome::skipped(
            "cargo-fuzz or the nightly toolchain is missing",
        ));
    }
    let targets = targets(&context.root)?;
    let binaries = build(context)?;
    let mut counts = Counts::default();
    let mut what = Vec::new();
    for (index, target) in targets.iter().enumerate() {
        let left = targets.len() - index;
        let fuzzed = fuzz(context, target, &binaries, seconds(context, left))?;
        println!(
            "  {target}: {} runs in {} CPU seconds, {} crashes",
            fuzzed.runs,
            fuzzed.seconds,
            fuzzed.crashes.len()
        );
        counts.check(fuzzed.crashes.is_empty());
        counts.add(&format!("{target}_runs"), fuzzed.runs);
        counts.add(&format!("{target}_cpu_seconds"), fuzzed.seconds);
        what.extend(fuzzed.crashes);
    }
    Ok(Outcome::judge(counts, what.join("\n  ")))
}

/// Seconds for the next of `left` targets.
fn seconds(context: &Context, left: usize) -> u64 {
    match context.deadline {
        Some(deadline) if context.count.is_none() => {
            let time = deadline.saturating_duration_since(Instant::now());
            time.as_secs() / left.max(1) as u64
        }
        _ => context.count(SECONDS_CI, SECONDS_FULL),
    }
    .max(1)
}

/// The names in the manifest of `fuzz/`: a new target is part of the layer.
fn targets(root: &Path) -> Fallible<Vec<String>> {
    let text = fs::read_to_string(root.join("fuzz/Cargo.toml"))?;
    let bins = text.split("[[bin]]").skip(1);
    let names = bins.filter_map(|bin| bin.split("name = \"").nth(1)?.split('"').next());
    let names: Vec<String> = names.map(str::to_owned).collect();
    if names.is_empty() {
        return Err("fuzz/Cargo.toml lists no target".into());
    }
    Ok(names)
}

fn build(context: &Context) -> Fallible<PathBuf> {
    let target = target_folder(&context.root).join("fuzz");
    let mut command = Command::new("cargo");
    command
        .args(["+nightly", "fuzz", "build", "--target-dir"])
        .arg(&target)
        .current_dir(&context.root);
    let built = process::run(&mut command, BUILD_TIME_MAX)?;
    if !built.is_success() {
        return Err(format!("the fuzz targets do not build:\n{}", built.stderr).into());
    }
    Ok(target)
}

fn fuzz(context: &Context, target: &str, built: &Path, seconds: u64) -> Fallible<Fuzzed> {
    let program = find(built, target).ok_or_else(|| format!("{target} was not built"))?;
    let found = built.join("corpus").join(target);
    let artifacts = context.root.join("fuzz/artifacts").join(target);
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&artifacts)?;
    let before = process::cpu_seconds();
    let mut command = Command::new(program);
    command
        .arg(&found)
        .arg(context.root.join("fuzz/corpus").join(target))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(format!("-max_total_time={seconds}"))
        // 0 would draw one.
        .arg(format!(
            "-seed={}",
            u32::try_from(context.seed % u64::from(u32::MAX))? + 1
        ))
        .args(["-max_len=16384", "-print_final_stats=1", "-timeout=20"])
        .args(["-rss_limit_mb=1024", "-malloc_limit_mb=256"])
        .current_dir(&context.root);
    let ended = process::run(&mut command, Duration::from_secs(seconds * 2 + 600))?;
    let runs = ended
        .stderr
        .lines()
        .find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))
        .and_then(|number| number.trim().parse().ok())
        .unwrap_or(0);
    let mut crashes: Vec<String> = fs::read_dir(&artifacts)?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        // A busy machine is slow; what hangs ends by the time limit.
        .filter(|name| !name.starts_with("slow-unit-"))
        .map(|name| {
            format!(
                "{target} breaks: cargo +nightly fuzz run {target} fuzz/artifacts/{target}/{name}"
            )
        })
        .collect();
    if !ended.is_success() && crashes.is_empty() {
        crashes.push(format!("{target}: {:?} {}", ended.how, ended.last_line()));
    }
    if runs == 0 && crashes.is_empty() {
        crashes.push(format!("{target} has run nothing"));
    }
    Ok(Fuzzed {
        runs,
        seconds: cpu_seconds(process::cpu_seconds() - before),
        crashes,
    })
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "seconds of one run; a fraction is of no interest"
)]
fn cpu_seconds(seconds: f64) -> u64 {
    seconds.max(0.0) as u64
}

/// cargo-fuzz puts its programs below the name of the machine's kind.
fn find(built: &Path, target: &str) -> Option<PathBuf> {
    let kinds = fs::read_dir(built).ok()?;
    let mut programs = kinds.filter_map(|kind| {
        let program = kind.ok()?.path().join("release").join(target);
        program.is_file().then_some(program)
    });
    programs.next()
}
