//! Line coverage of what must not be wrong. Reports; fails only where the tests fail.

use std::process::Command;
use std::time::Duration;

use super::switched::target_folder;
use crate::context::{Context, Counts, Fallible, Outcome};
use crate::process;

const TIME_MAX: Duration = Duration::from_secs(3 * 3600);
/// Files of interest, by how their names begin.
const FILES: [&str; 7] = [
    "format/",
    "log/",
    "model/",
    "engine/recovery.rs",
    "engine/append.rs",
    "engine/claim.rs",
    "engine/seal.rs",
];

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let mut version = Command::new("cargo");
    version.args(["llvm-cov", "--version"]);
    if !process::run(&mut version, Duration::from_secs(60))?.is_success() {
        return Ok(Outcome::skipped("cargo-llvm-cov is not installed"));
    }
    let mut command = Command::new("cargo");
    command
        .args([
            "llvm-cov",
            "--features",
            "testing",
            "--lib",
            "--test",
            "main",
        ])
        .args(["--summary-only"])
        .current_dir(&context.root)
        .env(
            "CARGO_TARGET_DIR",
            target_folder(&context.root).join("cover"),
        );
    let ended = process::run(&mut command, TIME_MAX)?;
    let mut counts = Counts::default();
    for line in ended.stdout.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        // Name, then regions, functions and lines: of each all, missed, and the share reached.
        let [name, _, _, _, _, _, _, all, missed, share, ..] = words.as_slice() else {
            continue;
        };
        if FILES.iter().any(|file| name.starts_with(file)) {
            println!("  {name}: lines={all} missed={missed} reached={share}");
            counts.add("lines", all.parse().unwrap_or(0));
            counts.add("lines_missed", missed.parse().unwrap_or(0));
        }
    }
    counts.check(ended.is_success() && counts.more.contains_key("lines"));
    Ok(Outcome::judge(counts, ended.last_line()))
}
