//! Layers that are tests of the main package, run in release with their sizes turned up.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::context::{Context, Counts, Fallible, Outcome};
use crate::process::{self, Ended};

/// A run that has not ended by then hangs.
const TIME_MAX: Duration = Duration::from_secs(24 * 3600);

/// Runs the tests whose names contain the filter; tests read their sizes from the environment.
///
/// Besides the test harness's own sum, the numbers in [`COUNT_LINES`] are added up.
pub(crate) fn test(
    context: &Context,
    filter: &str,
    environment: &[(&str, String)],
) -> Fallible<Outcome> {
    let mut command = command(context);
    command.args([
        "test",
        "--release",
        "--all-features",
        "--test",
        "main",
        filter,
    ]);
    command.args(["--", "--nocapture"]);
    // Where tests that draw begin; `IDEMLOG_SEED` repeats a single case and is not set here.
    command.env("IDEMLOG_SEED_START", context.seed.to_string());
    command.env_remove("IDEMLOG_SEED");
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    judge(&process::run(&mut command, TIME_MAX)?)
}

/// Shows how many images each crash scenario has left, and counts those of all: an image that two
/// scenarios share counts once.
fn show_scenarios(text: &str, counts: &mut Counts) {
    let line = |kind: &'static str| text.lines().filter_map(move |line| line.split_once(kind));
    for (_, scenario) in line("crash: scenario=") {
        println!("  {scenario}");
    }
    let all = line("crash total: ").next_back();
    let union = all.and_then(|(_, all)| all.split_once("distinct=")?.1.trim().parse().ok());
    if let Some(union) = union {
        counts.add("union", union);
    }
}

/// Reads the sums of a test run that has ended.
pub(crate) fn judge(ended: &Ended) -> Fallible<Outcome> {
    let mut counts = counts_of(&ended.stdout);
    add_lines(&mut counts, &ended.stderr);
    show_scenarios(&ended.stdout, &mut counts);
    if !ended.is_success() {
        counts.failed = counts.failed.max(1);
    }
    Ok(Outcome::judge(counts, tail(ended)))
}

/// Runs an example of the main package; it counts as one check.
pub(crate) fn example(context: &Context, name: &str, words: &[&str]) -> Fallible<(Counts, String)> {
    let mut command = command(context);
    command
        .args(["run", "--quiet", "--release", "--example", name, "--"])
        .args(words);
    let ended = process::run(&mut command, TIME_MAX)?;
    let mut counts = Counts::default();
    counts.check(ended.is_success());
    Ok((counts, tail(&ended)))
}

/// Builds a program in release and says where it is.
pub(crate) fn build(context: &Context, manifest: &Path, words: &[&str]) -> Fallible<PathBuf> {
    let mut command = command(context);
    command.args([
        "build",
        "--release",
        "--message-format",
        "json",
        "--manifest-path",
    ]);
    command.arg(manifest).args(words);
    let ended = process::run(&mut command, TIME_MAX)?;
    let mut found = ended.stdout.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        message.get("executable")?.as_str().map(PathBuf::from)
    });
    let found = found.next_back().filter(|_| ended.is_success());
    found.ok_or_else(|| format!("it does not build: {}", ended.last_line()).into())
}

fn command(context: &Context) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(&context.root);
    command
}

fn counts_of(text: &str) -> Counts {
    let mut counts = Counts::default();
    for line in text.lines().filter(|line| line.starts_with("test result:")) {
        for part in line.split([';', '.']) {
            let mut words = part.split_whitespace();
            let number = words.next().and_then(|word| word.parse::<u64>().ok());
            match (number, words.next()) {
                (Some(number), Some("passed")) => counts.passed += number,
                (Some(number), Some("failed")) => counts.failed += number,
                _ => {}
            }
        }
    }
    add_lines(&mut counts, text);
    counts
}

/// What the tests count is in lines of these kinds, as `name=1` or `name: 1`.
const COUNT_LINES: [&str; 4] = ["counts: ", "crash: ", "faults: ", "model: "];

fn add_lines(counts: &mut Counts, text: &str) {
    for line in text.lines() {
        // The harness may have begun the line with the test's name.
        let pairs = COUNT_LINES.iter().find_map(|kind| line.split_once(kind));
        let Some((_, pairs)) = pairs else { continue };
        let words: Vec<&str> = pairs
            .split(|c: char| !c.is_alphanumeric() && c != '_' && c != '-')
            .filter(|word| !word.is_empty())
            .collect();
        for pair in words.windows(2) {
            if let [name, number] = pair
                && let Ok(number) = number.parse::<u64>()
                && name.starts_with(|c: char| c.is_alphabetic())
            {
                counts.add(name, number);
            }
        }
    }
}

/// The end of what a failed child said: a seed to repeat it with is in there.
fn tail(ended: &Ended) -> String {
    let text = format!("{}\n{}", ended.stderr, ended.stdout);
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let start = lines.len().saturating_sub(40);
    lines.get(start..).unwrap_or_default().join("\n  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_count_lines_are_read() {
        let text = "test a ... counts: images=5 points=2\nok\n\
                    crash: scenario=x Totals { images: 1 }\n\
                    test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 9 filtered out";
        let counts = counts_of(text);
        assert_eq!((counts.passed, counts.failed), (3, 1));
        assert_eq!(counts.more["images"], 6);
        assert_eq!(counts.more["points"], 2);
    }
}
