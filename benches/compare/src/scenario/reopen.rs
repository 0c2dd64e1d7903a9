//! Reopen after a close, and after SIGKILL: until the first insert is answered, and what is lost.

use std::path::Path;
use std::time::Instant;

use super::writer::{self, End, NEWEST_COUNT};
use crate::Fallible;
use crate::cell::Cell;
use crate::figures::Figures;
use crate::process;
use crate::store;
use crate::workload::{self, EXPIRY};

/// Row `close` or `kill`.
pub(crate) fn run(cell: &Cell, dir: &Path) -> Fallible<Figures> {
    let end = if cell.row == "kill" {
        End::Kill
    } else {
        End::Close
    };
    writer::fill(cell, dir, end)?;
    let mut figures = Figures::default();
    figures.count("disk_bytes", process::disk_bytes(dir));
    let began = Instant::now();
    let store = store::open(&cell.store, dir, cell.level(), cell.keys)?;
    figures.set("open_ms", began.elapsed().as_secs_f64() * 1e3);
    let mut session = store.session()?;
    if !session.insert(&workload::absent_key(0), EXPIRY)? {
        return Err("an absent key is known after the reopen".into());
    }
    figures.set("first_insert_ms", began.elapsed().as_secs_f64() * 1e3);
    let newest = cell.keys.saturating_sub(NEWEST_COUNT)..cell.keys;
    let mut lost = 0;
    for number in newest {
        lost += u64::from(!session.contains(&workload::key(number))?);
    }
    figures.count("lost", lost);
    drop(session);
    store.close()?;
    if end == End::Close && lost > 0 {
        return Err(format!("{lost} keys are lost after a close").into());
    }
    Ok(figures)
}
