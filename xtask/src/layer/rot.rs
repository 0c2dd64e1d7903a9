//! Damage of every kind at every place of a store (`tests/damage.rs`).

use super::cargo;
use crate::context::{Context, Fallible, Outcome};

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let scale = context.count(1, 16);
    cargo::test(context, "damage::", &[("IDEMLOG_SCALE", scale.to_string())])
}
