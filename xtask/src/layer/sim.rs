//! Crashes and power cuts on the simulated disk (`tests/crash.rs`).

use super::cargo;
use crate::context::{Context, Fallible, Outcome};

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let images = context.count(1_000_000, 100_000_000);
    let scale = context.count(1, 20).min(20);
    let sizes = [
        ("IDEMLOG_SCALE", scale.to_string()),
        ("IDEMLOG_IMAGES", images.to_string()),
    ];
    cargo::test(context, "crash::", &sizes)
}
