//! Real SIGKILL: of the calls (`tests/kill.rs`) and of the main job (`examples/worker.rs`).

use super::cargo;
use crate::context::{Context, Fallible, Outcome};

/// Scenarios in `tests/kill.rs` that are killed at random moments, times durability levels.
const SERIES_COUNT: u64 = 6;

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let kills = context.count(300, 100_000);
    let each = (kills / 2).div_ceil(SERIES_COUNT);
    let seed = context.seed.to_string();
    let settings = [
        ("IDEMLOG_KILLS", each.to_string()),
        ("IDEMLOG_SEED", seed.clone()),
    ];
    let tests = cargo::test(context, "kill::", &settings)?;
    let mut counts = match tests {
        Outcome::Passed(counts) => counts,
        failed => return Ok(failed),
    };
    let rest = (kills / 2).max(60).to_string();
    let (worker, what) = cargo::example(context, "worker", &["--seed", &seed, "--kills", &rest])?;
    counts.passed += worker.passed;
    counts.failed += worker.failed;
    counts.add("kills", each * SERIES_COUNT + kills / 2);
    Ok(Outcome::judge(counts, what))
}
