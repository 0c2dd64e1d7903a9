//! Crashes and power cuts on the simulated disk (`tests/crash.rs`).

use super::cargo;
use crate::context::{Context, Fallible, Outcome};

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let images = context.count(1_000_000, 100_000_000);
    let scale = context.count(1, 20).min(20);
    // Sequences of two calls do not have 20,000 images in them.
    let length = if images > 15_000 { 3 } else { 2 };
    let sizes = [
        ("IDEMLOG_LENGTH", length.to_string()),
        ("IDEMLOG_SCALE", scale.to_string()),
        ("IDEMLOG_IMAGES", images.to_string()),
    ];
    cargo::test(context, "crash::", &sizes)
}
