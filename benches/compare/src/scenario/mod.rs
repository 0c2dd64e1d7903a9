//! The scenarios: what a child process does with the store of its cell.

mod insert;

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
        other => Err(format!("no scenario is called {other}").into()),
    }
}

pub(crate) fn writer(_arguments: &[String]) -> Fallible<()> {
    Err("no writer".into())
}
