//! What is measured in one child process.

use std::fmt;

use crate::Fallible;

/// First argument of a child process that runs one cell.
pub(crate) const CHILD: &str = "child";

/// What a verdict has survived when it is returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// Nothing: the store's own lazy mode.
    Lazy,
    /// A kill of the process.
    Process,
    /// A power cut: the device was flushed.
    Durable,
}

/// How the operations are given to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) threads: usize,
    /// 1: single calls.
    pub(crate) batch: usize,
    /// Calls of one task that wait at a time; 0: each call ends before the next.
    pub(crate) in_flight: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) scenario: String,
    pub(crate) row: String,
    pub(crate) keys: u64,
    pub(crate) store: String,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}/{}/{}/{}",
            self.scenario, self.row, self.keys, self.store
        )
    }
}

impl Cell {
    pub(crate) fn new(scenario: &str, row: &str, keys: u64, store: &str) -> Cell {
        Cell {
            scenario: scenario.to_owned(),
            row: row.to_owned(),
            keys,
            store: store.to_owned(),
        }
    }

    pub(crate) fn parse(id: &str) -> Fallible<Cell> {
        let mut parts = id.splitn(4, '/');
        let mut part = || parts.next().ok_or_else(|| format!("not a cell: {id}"));
        Ok(Cell {
            scenario: part()?.to_owned(),
            row: part()?.to_owned(),
            keys: part()?.parse()?,
            store: part()?.to_owned(),
        })
    }

    pub(crate) fn level(&self) -> Level {
        match self.scenario.as_str() {
            "durable" | "claim" => Level::Durable,
            "process" => Level::Process,
            _ => Level::Lazy,
        }
    }

    pub(crate) fn shape(&self) -> Fallible<Shape> {
        let number = |prefix| self.row.strip_prefix(prefix).map(str::parse::<usize>);
        let (mut threads, mut batch, mut in_flight) = (1, 1, 0);
        if let Some(count) = number("batch") {
            batch = count?;
        } else if let Some(count) = number("threads").or(number("callers")) {
            threads = count?;
        } else if let Some(count) = number("inflight") {
            in_flight = count?;
        }
        Ok(Shape {
            threads,
            batch,
            in_flight,
        })
    }
}
