//! Claim, start and commit with an outcome, for each effect class: idemlog alone has them.

use std::path::Path;
use std::time::Instant;

use idemlog::{
    DedupLog, EffectClass, Internal, NamespaceOptions, NonRepeatable, Probeable, Repeatable,
    RunVerdict,
};

use super::{Bounds, insert};
use crate::Fallible;
use crate::cell::Cell;
use crate::figures::Figures;
use crate::measure::{self, Harness, Meter, Subject};
use crate::workload;

const OUTCOME_BYTES: usize = 64;

/// Rows: the classes.
pub(crate) fn run(cell: &Cell, dir: &Path, bounds: Bounds) -> Fallible<Figures> {
    match cell.row.as_str() {
        "repeatable" => class::<Repeatable>(cell, dir, bounds),
        "probeable" => class::<Probeable>(cell, dir, bounds),
        "nonrepeatable" => class::<NonRepeatable>(cell, dir, bounds),
        "internal" => class::<Internal>(cell, dir, bounds),
        other => Err(format!("no effect class is called {other}").into()),
    }
}

fn class<C: EffectClass>(cell: &Cell, dir: &Path, bounds: Bounds) -> Fallible<Figures> {
    let log = DedupLog::open(dir.join("store"))?;
    let space = log.namespace::<C>("keys", NamespaceOptions::new())?;
    // The first record of a claim makes room for all; it is not what is measured.
    run_one(&space, u64::MAX >> 1)?;
    let count = cell.keys.min(bounds.ops_max);
    let mut histogram = measure::histogram()?;
    let flushes = log.stats().flushes_count;
    let mut meter = Meter::start(Subject::new(dir, None))?;
    for number in 0..count {
        let began = Instant::now();
        run_one(&space, number)?;
        histogram.saturating_record(insert::nanos(began.elapsed()));
    }
    meter.answered();
    let flushes = log.stats().flushes_count - flushes;
    log.wait_idle()?;
    let mut figures = meter.stop(count, Harness::default());
    figures.extend(measure::latencies(&histogram));
    figures.set("own_flushes_per_op", flushes as f64 / count.max(1) as f64);
    drop(space);
    log.close()?;
    Ok(figures)
}

fn run_one<C: EffectClass>(space: &idemlog::Namespace<C>, number: u64) -> Fallible<()> {
    let verdict = space.run_once(workload::key(number), |_| Ok(vec![7; OUTCOME_BYTES]))?;
    match verdict {
        RunVerdict::Ran { .. } => Ok(()),
        other => Err(format!("the effect did not run: {other:?}").into()),
    }
}
