//! Interleavings of threads (shuttle): the syncer of `src/log/sync.rs` alone, with tasks and
//! without, and a whole store of which callers, waiters, rolls, seals and merges meet at its locks
//! (`src/engine/interleaved.rs`).

use std::process::Command;
use std::time::Duration;

use super::cargo;
use super::switched::target_folder;
use crate::context::{Context, Fallible, Outcome};
use crate::process;

/// Tests that explore interleavings; each gets an equal share.
const TESTS_COUNT: u64 = 15;
const TIME_MAX: Duration = Duration::from_secs(24 * 3600);

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let schedules = context.count(100_000, 10_000_000).div_ceil(TESTS_COUNT);
    let mut command = Command::new("cargo");
    command
        .args(["test", "--release", "--features", "testing", "--lib"])
        .args(["interleaved", "--", "--nocapture", "--test-threads=2"])
        .current_dir(&context.root)
        // Other flags, other folder: the usual builds stay as they are.
        .env(
            "CARGO_TARGET_DIR",
            target_folder(&context.root).join("conc"),
        )
        .env("RUSTFLAGS", "--cfg idemlog_shuttle")
        .env("IDEMLOG_SEED", context.seed.to_string())
        .env("IDEMLOG_SCHEDULES", schedules.to_string());
    let ended = process::run(&mut command, TIME_MAX)?;
    cargo::judge(&ended)
}
