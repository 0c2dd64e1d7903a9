//! Tasks for the limits of a machine: a disk that fills up, and more data than memory.

use std::path::Path;

use idemlog::{Durability, ErrorKind, NamespaceOptions, Observed, Options, Retention};

use super::notes::{Notes, Op};
use super::{MAIN, options, space_options};
use crate::context::Fallible;

/// Keys after which a disk that should be full is not.
const FULL_KEYS_MAX: u64 = 200_000;
/// Keys that must be taken once there is space again.
const AFTER_KEYS: u64 = 30;
const BATCH: u64 = 1_000;

/// Writes until the disk is full, removes the ballast, and goes on without a restart.
pub(crate) fn fill(dir: &Path, notes: &Notes, ballast: &Path) -> Fallible<()> {
    notes.fact("opening")?;
    let log = options().open(dir)?;
    notes.fact("opened")?;
    let main = log.filter(MAIN, space_options())?;
    let see = |number: u64| -> Fallible<Option<ErrorKind>> {
        let id = notes.ask(Op::See, MAIN, &format!("full-{number}"))?;
        match main.observe(format!("full-{number}")) {
            Ok(observed) => {
                notes.answered(id, if observed.is_new() { "new" } else { "dup" })?;
                Ok(None)
            }
            Err(error) => {
                notes.failed(id, &error)?;
                Ok(Some(error.kind()))
            }
        }
    };
    let mut number = 0;
    let refused = loop {
        if number == FULL_KEYS_MAX {
            return Err("the disk was never full".into());
        }
        number += 1;
        if let Some(kind) = see(number)? {
            break kind;
        }
    };
    if refused != ErrorKind::Full {
        return Err(format!("a full disk was answered {refused:?}").into());
    }
    std::fs::remove_file(ballast)?;
    for more in 0..AFTER_KEYS {
        if let Some(kind) = see(number + 1 + more)? {
            return Err(format!("with space again: {kind:?}").into());
        }
    }
    let health = log.health();
    if health.poisoned.is_some() {
        return Err(format!("poisoned by a full disk: {:?}", health.poisoned).into());
    }
    drop(main);
    log.close()?;
    notes.fact("closed")
}

/// Writes so many keys and asks for each of them and for as many absent ones.
pub(crate) fn many(dir: &Path, count: u64) -> Fallible<()> {
    let open = || Options::new().durability(Durability::Buffered).open(dir);
    let space_options = || NamespaceOptions::new().retention(Retention::Forever);
    let keys = |from: u64| -> Vec<Vec<u8>> {
        let mixed = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
        (from..from + BATCH)
            .map(|n| [&mixed(n)[..], &[b'.'; 40]].concat())
            .collect()
    };
    let log = open()?;
    let filter = log.filter("many", space_options())?;
    for from in (0..count).step_by(usize::try_from(BATCH)?) {
        for observed in filter.observe_many(&keys(from))? {
            if observed? != Observed::New {
                return Err(format!("a key after {from} is not new").into());
            }
        }
    }
    drop(filter);
    log.close()?;
    let log = open()?;
    let filter = log.filter("many", space_options())?;
    for from in (0..count).step_by(usize::try_from(BATCH)?) {
        for (start, expected) in [(from, true), (from + (1 << 40), false)] {
            for known in filter.check_many(&keys(start))? {
                if known? != expected {
                    return Err(format!("a key after {start} is not {expected}").into());
                }
            }
        }
    }
    log.close()?;
    Ok(())
}
