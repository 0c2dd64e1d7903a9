//! Memory: Miri on the unit tests of format, model and index; AddressSanitizer on those and on the
//! damage tests, where most lengths come from changed bytes.

use std::process::Command;
use std::time::Duration;

use super::cargo;
use super::switched::target_folder;
use crate::context::{Context, Counts, Fallible, Mode, Outcome};
use crate::process;

const TIME_MAX: Duration = Duration::from_secs(6 * 3600);
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Tests that run for minutes under Miri: they change every bit of something.
const TOO_LONG_FOR_MIRI: [&str; 7] = [
    "every_changed",
    "every_cut",
    "headers_and_pages",
    "almost_all_others",
    "hash_comes_back",
    "merges_again",
    "comes_back_sorted",
];

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let mut counts = Counts::default();
    let mut skipped = Vec::new();
    for (name, part) in [
        ("Miri", miri as fn(&Context) -> Fallible<Outcome>),
        ("AddressSanitizer", sanitizer),
    ] {
        match part(context)? {
            Outcome::Passed(more) => {
                counts.passed += more.passed;
                counts.add(&format!("{name}_tests"), more.passed);
            }
            failed @ Outcome::Failed { .. } => return Ok(failed),
            Outcome::Skipped { reason } => {
                println!("SKIPPED {name}: {reason}");
                skipped.push(format!("{name}: {reason}"));
            }
        }
    }
    if counts.passed == 0 {
        return Ok(Outcome::skipped(skipped.join("; ")));
    }
    Ok(Outcome::judge(counts, ""))
}

fn miri(context: &Context) -> Fallible<Outcome> {
    let mut version = nightly(context);
    version.args(["miri", "--version"]);
    if !process::run(&mut version, Duration::from_secs(60))?.is_success() {
        let how = "rustup component add miri rust-src --toolchain nightly";
        return Ok(Outcome::skipped(format!("not installed; {how}")));
    }
    let mut command = nightly(context);
    command
        .args(["miri", "test", "--lib", "--features", "testing", "--"])
        .args(["format::", "model::", "index::"])
        .env(
            "CARGO_TARGET_DIR",
            target_folder(&context.root).join("miri"),
        )
        .env("MIRIFLAGS", "-Zmiri-disable-isolation");
    if context.mode == Mode::Ci {
        command.args(TOO_LONG_FOR_MIRI.iter().flat_map(|test| ["--skip", test]));
    }
    cargo::judge(&process::run(&mut command, TIME_MAX)?)
}

fn sanitizer(context: &Context) -> Fallible<Outcome> {
    let mut version = nightly(context);
    version.arg("--version");
    if !process::run(&mut version, Duration::from_secs(60))?.is_success() {
        return Ok(Outcome::skipped("the nightly toolchain is missing"));
    }
    let mut command = nightly(context);
    command
        .args(["test", "--features", "testing", "--lib", "--test", "main"])
        .args(["--target", TARGET, "--"])
        .args(["format::", "model::", "index::", "damage::", "corpus::"])
        .env(
            "CARGO_TARGET_DIR",
            target_folder(&context.root).join("asan"),
        )
        .env("RUSTFLAGS", "-Zsanitizer=address");
    cargo::judge(&process::run(&mut command, TIME_MAX)?)
}

fn nightly(context: &Context) -> Command {
    let mut command = Command::new("cargo");
    command.arg("+nightly").current_dir(&context.root);
    command
}
