//! Random calls against the oracle (`tests/model.rs`).

use super::cargo;
use crate::context::{Context, Fallible, Outcome};

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let cases = context.count(1_000, 1_000_000);
    cargo::test(context, "model::", &[("IDEMLOG_CASES", cases.to_string())])
}
