//! Versioned values: compare and set.

use super::claim::{Entry, Env};
use crate::format::record::Kind;
use crate::verdict::{Cell, Expected};

/// What becomes of a write of a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CellDecision {
    /// Write this state; one with a value needs a stamp, its version.
    Write(Entry),
    /// It is so already: there is nothing to delete.
    Unchanged,
    /// The cell is not what was expected.
    Conflict(Option<Cell>),
}

/// Decides a write, or the deletion if there is no `value`.
pub(crate) fn write(
    entry: Option<&Entry>,
    env: &Env,
    expected: Expected,
    value: Option<&[u8]>,
) -> CellDecision {
    let current = entry.filter(|entry| entry.kind == Kind::Cell);
    let matches = match expected {
        Expected::Anything => true,
        Expected::Absent => current.is_none(),
        Expected::Version(version) => current.is_some_and(|cell| cell.epoch() == version),
    };
    if !matches {
        return CellDecision::Conflict(view(entry));
    }
    match (value, current) {
        (Some(value), _) => {
            let mut next = Entry::new(Kind::Cell);
            next.state.at_ms = env.now.trusted_ms;
            next.outcome = value.to_vec();
            CellDecision::Write(next)
        }
        (None, Some(_)) => CellDecision::Write(Entry::new(Kind::Forgotten)),
        (None, None) => CellDecision::Unchanged,
    }
}

/// Returns the cell as callers see it.
pub(crate) fn view(entry: Option<&Entry>) -> Option<Cell> {
    let cell = entry.filter(|entry| entry.kind == Kind::Cell)?;
    Some(Cell {
        value: cell.outcome.clone(),
        version: cell.epoch(),
    })
}
