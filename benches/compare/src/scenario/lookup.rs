//! Look-ups of duplicates and of absent keys after a reopen: warm, and with a cold page cache.

use std::path::Path;
use std::time::Instant;

use super::writer::{self, End};
use super::{Bounds, insert};
use crate::Fallible;
use crate::cell::Cell;
use crate::figures::Figures;
use crate::measure::{self, Subject};
use crate::process;
use crate::store::{self, Session};
use crate::workload::{self, Key, mix};

const WARM_COUNT: u64 = 200_000;
/// Fewer where each may wait for the device.
const COLD_COUNT: u64 = 2_000;

/// Row `warm` or `cold`.
pub(crate) fn run(cell: &Cell, dir: &Path, bounds: Bounds) -> Fallible<Figures> {
    writer::fill(cell, dir, End::Close)?;
    let cold = cell.row == "cold";
    if cold {
        process::drop_cache(dir)?;
    }
    let store = store::open(&cell.store, dir, cell.level(), cell.keys)?;
    let subject = Subject::new(dir, store.server());
    let mut session = store.session()?;
    let count = if cold { COLD_COUNT } else { WARM_COUNT }.min(bounds.ops_max);
    let known = |i| workload::key(mix(i) % cell.keys);
    let mut looks = Looks {
        session: session.as_mut(),
        subject: &subject,
    };
    if !cold {
        // One pass over everything that is going to be asked.
        looks.ask("hit", count, true, &known)?;
        looks.ask("miss", count, false, &workload::absent_key)?;
    }
    let mut figures = looks.ask("hit", count, true, &known)?;
    figures.extend(looks.ask("miss", count, false, &workload::absent_key)?);
    drop(session);
    figures.extend(store.figures());
    store.close()?;
    Ok(figures)
}

struct Looks<'a> {
    session: &'a mut dyn Session,
    subject: &'a Subject,
}

impl Looks<'_> {
    /// Asks for `count` keys; each must be there, or not.
    fn ask(
        &mut self,
        name: &str,
        count: u64,
        expected: bool,
        key: &dyn Fn(u64) -> Key,
    ) -> Fallible<Figures> {
        let mut histogram = measure::histogram()?;
        let keys: Vec<Key> = (0..count).map(key).collect();
        let (cpu, device, began) = (self.subject.cpu(), self.subject.device(), Instant::now());
        let (mut last, mut wrong) = (began, 0u64);
        for key in &keys {
            wrong += u64::from(self.session.contains(key)? != expected);
            let now = Instant::now();
            histogram.saturating_record(insert::nanos(now - last));
            last = now;
        }
        let elapsed = began.elapsed();
        let used = self.subject.cpu().saturating_sub(cpu);
        let after = self.subject.device();
        if wrong > 0 {
            return Err(format!("wrong answers: {wrong} of {count} ({name})").into());
        }
        let per_op = |value: f64| value / count.max(1) as f64;
        let mut figures = Figures::default();
        let mut set = |what: &str, value| figures.set(&format!("{name}_{what}"), value);
        set("cpu_us", per_op(used.as_secs_f64() * 1e6));
        set("per_s", measure::rate(count, elapsed));
        set("p50_us", histogram.value_at_quantile(0.5) as f64 / 1e3);
        set("p99_us", histogram.value_at_quantile(0.99) as f64 / 1e3);
        set("device_reads", per_op((after.reads - device.reads) as f64));
        set(
            "device_read_bytes",
            per_op((after.read_bytes - device.read_bytes) as f64),
        );
        Ok(figures)
    }
}
