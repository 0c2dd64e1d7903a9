//! The scenarios: what a child process does with the store of its cell.

mod claim;
mod confined;
mod expire;
mod insert;
mod lookup;
mod reopen;
mod touch;
mod writer;

use std::path::Path;

use crate::Fallible;
use crate::cell::Cell;
use crate::figures::Figures;

/// First argument of a process that writes until it is killed.
pub(crate) const WRITER: &str = "writer";

/// How far a cell goes at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) ops_max: u64,
    pub(crate) seconds_max: u64,
}

pub(crate) fn run(cell: &Cell, dir: &Path, bounds: Bounds) -> Fallible<Figures> {
    match cell.scenario.as_str() {
        "lazy" | "durable" | "process" => insert::run(cell, dir, bounds),
        "claim" => claim::run(cell, dir, bounds),
        "lookup" => lookup::run(cell, dir, bounds),
        "reopen" => reopen::run(cell, dir),
        "expire" => expire::run(cell, dir, bounds),
        "confined" => confined::run(cell, dir, bounds),
        "touch" => touch::run(cell, bounds),
        other => Err(format!("no scenario is called {other}").into()),
    }
}

/// Why a scenario cannot run here at all; `None` if it can.
pub(crate) fn missing(scenario: &str) -> Option<String> {
    match scenario {
        "confined" => confined::missing(),
        _ => None,
    }
}

pub(crate) use writer::main as writer;
