//! Counts sync calls with `strace`, in short passes of their own: a traced process is slow, so
//! nothing else is taken from it.
//!
//! Calls at open and close must not count: two passes of different length are compared. What
//! `strace` does not see as a call, such as a write to a file opened with `O_DSYNC`, is in the
//! device's own counter alone.

use std::process::{Command, Stdio};

use crate::Fallible;
use crate::args::Args;
use crate::figures::Figures;
use crate::plan::Planned;
use crate::runner::{CellDir, child_arguments};
use crate::scenario::Bounds;

const CALLS: &str = "fdatasync,fsync,msync";
/// Starts the writing of pages and flushes no device, so it is counted apart.
const RANGE_CALL: &str = "sync_file_range";
/// New keys of the shorter pass, for each caller or place in a batch; the longer has three times.
const UNIT: u64 = 50;

pub(crate) fn syncs(args: &Args, planned: &Planned) -> Fallible<Figures> {
    let shape = planned.cell.shape()?;
    let unit = UNIT * (shape.threads * shape.batch) as u64;
    let mut figures = Figures::default();
    let (Some(short), Some(long)) = (pass(args, planned, unit)?, pass(args, planned, 3 * unit)?)
    else {
        return Ok(figures);
    };
    let keys = long.keys - short.keys;
    if keys > 0.0 {
        figures.set("sync_calls_per_key", (long.syncs - short.syncs) / keys);
        figures.set("range_syncs_per_key", (long.ranges - short.ranges) / keys);
    }
    Ok(figures)
}

/// What one pass counted.
struct Counts {
    syncs: f64,
    ranges: f64,
    /// New keys: duplicates need no sync of their own.
    keys: f64,
}

/// One traced pass; `None` where there is no `strace`.
fn pass(args: &Args, planned: &Planned, ops_max: u64) -> Fallible<Option<Counts>> {
    let dir = CellDir::new(&args.dir)?;
    let counts = args.dir.join(format!("strace-{}", std::process::id()));
    let bounds = Bounds {
        ops_max,
        seconds_max: 60,
    };
    let mut command = Command::new("strace");
    command
        .args([
            "-f",
            "-c",
            "-e",
            &format!("trace={CALLS},{RANGE_CALL}"),
            "-o",
        ])
        .arg(&counts);
    command.arg(std::env::current_exe()?);
    command.args(child_arguments(&planned.cell, &dir.0, bounds));
    let Ok(output) = command.stdin(Stdio::null()).output() else {
        return Ok(None);
    };
    let table = std::fs::read_to_string(&counts).unwrap_or_default();
    std::fs::remove_file(&counts).unwrap_or_default();
    let Ok(object) = serde_json::from_slice::<serde_json::Value>(&output.stdout) else {
        return Err(format!("traced: {}", String::from_utf8_lossy(&output.stderr).trim()).into());
    };
    let figure = |name| object.get(name).and_then(serde_json::Value::as_f64);
    let keys = figure("keys").or(figure("ops"));
    Ok(Some(Counts {
        syncs: calls(&table, CALLS),
        ranges: calls(&table, RANGE_CALL),
        keys: keys.unwrap_or(0.0),
    }))
}

/// Sums the counts of a table by `strace -c`: share, seconds, us a call, calls, .., name.
fn calls(table: &str, names: &str) -> f64 {
    let lines = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let counted = lines.filter(|fields| {
        let name = fields.last().copied().unwrap_or_default();
        names.split(',').any(|call| call == name)
    });
    let counts = counted.filter_map(|fields| fields.get(3)?.parse::<f64>().ok());
    counts.sum()
}
