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

const CALLS: &str = "fdatasync,fsync,sync_file_range,msync";
/// New keys of the shorter pass, for each caller or place in a batch; the longer has three times.
const UNIT: u64 = 100;

pub(crate) fn syncs(args: &Args, planned: &Planned) -> Fallible<Figures> {
    let shape = planned.cell.shape()?;
    let unit = UNIT * (shape.threads * shape.batch) as u64;
    let mut figures = Figures::default();
    let (Some(short), Some(long)) = (pass(args, planned, unit)?, pass(args, planned, 3 * unit)?)
    else {
        return Ok(figures);
    };
    let ops = long.1 - short.1;
    if ops > 0.0 {
        figures.set("sync_calls_per_op", (long.0 - short.0) / ops);
    }
    Ok(figures)
}

/// One traced pass: sync calls and operations. `None` where there is no `strace`.
fn pass(args: &Args, planned: &Planned, ops_max: u64) -> Fallible<Option<(f64, f64)>> {
    let dir = CellDir::new(&args.dir)?;
    let counts = args.dir.join(format!("strace-{}", std::process::id()));
    let bounds = Bounds {
        ops_max,
        seconds_max: 60,
    };
    let mut command = Command::new("strace");
    command
        .args(["-f", "-c", "-e", &format!("trace={CALLS}"), "-o"])
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
    let ops = object.get("ops").and_then(serde_json::Value::as_f64);
    Ok(Some((calls(&table), ops.unwrap_or(0.0))))
}

/// Sums the counts of a table by `strace -c`: share, seconds, us a call, calls, .., name.
fn calls(table: &str) -> f64 {
    let lines = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let counted = lines.filter(|fields| {
        fields
            .last()
            .is_some_and(|name| CALLS.split(',').any(|call| call == *name))
    });
    let counts = counted.filter_map(|fields| fields.get(3)?.parse::<f64>().ok());
    counts.sum()
}
