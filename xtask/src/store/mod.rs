//! What runs on the real file systems: a workload of the store, and its judge.

pub(crate) mod book;
pub(crate) mod calls;
pub(crate) mod check;
pub(crate) mod limits;
pub(crate) mod notes;
pub(crate) mod work;

use idemlog::{NamespaceOptions, Options, Retention};

/// Kept for ever, observed one by one and in batches.
pub(crate) const MAIN: &str = "main";
/// Observed without waiting for a flush.
pub(crate) const LOOSE: &str = "loose";
/// Kept for a second: these keys expire, and their segments are dropped.
pub(crate) const SHORT: &str = "short";

/// In keys that are asked for after a failure.
pub(crate) const AFTER: &str = "-after-";

/// Small segments, so that rolls, seals, merges and drops are frequent.
const SEGMENT_BYTES: u32 = 16 * 1024;
const OUTCOME_BYTES_MAX: usize = 512;

pub(crate) fn options() -> Options {
    Options::new().segment_bytes(SEGMENT_BYTES)
}

pub(crate) fn space_options() -> NamespaceOptions {
    NamespaceOptions::new()
        .retention(Retention::Forever)
        .outcome_bytes_max(OUTCOME_BYTES_MAX)
}

/// The outcome that a key is committed with: what is replayed must be exactly this.
pub(crate) fn outcome_of(key: &str) -> Vec<u8> {
    let sum: usize = key.bytes().map(usize::from).sum();
    format!("outcome of {key};")
        .repeat(1 + sum % 6)
        .into_bytes()
}

/// The error that a key is rejected or retried with.
pub(crate) fn error_of(key: &str) -> Vec<u8> {
    format!("error of {key}").into_bytes()
}
