//! The oldest half of the keys expires while one thread inserts.
//!
//! Before it and after it the same thread inserts alone for as long: what an insert costs then, on
//! average of the two, is taken off, and its rate is what the foreground's is compared with. The
//! store grows all the while, by much where inserts are fast, so that one of the two alone would
//! not do.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Bounds;
use super::insert::Driver;
use crate::Fallible;
use crate::cell::Cell;
use crate::figures::Figures;
use crate::measure::{self, Subject};
use crate::process;
use crate::store::{self, Session, Store};
use crate::workload::{self, EXPIRY, Key, Sequence};

const BATCH: usize = 1000;
/// Where a store counts expiry by the clock, its keys must outlive the filling.
const FILL_KEYS_PER_S: u64 = 100_000;

pub(crate) fn run(cell: &Cell, dir: &Path, bounds: Bounds) -> Fallible<Figures> {
    let store = store::open(&cell.store, dir, cell.level(), cell.keys)?;
    let subject = Subject::new(dir, store.server());
    let baseline = Duration::from_secs(bounds.seconds_max.clamp(1, 3));
    let before = store::now_ms() + 1000 * (4 + baseline.as_secs() + cell.keys / FILL_KEYS_PER_S);
    fill(store.session()?.as_mut(), cell.keys, before)?;
    store.settle()?;
    let disk_before = process::disk_bytes(dir);
    let mut driver = Driver::new(Sequence::new(1), 1, 64)?;
    let alone = foreground(store.as_ref(), &subject, &mut driver, |_| {
        std::thread::sleep(baseline);
        Ok(0)
    })?;
    if store::now_ms() > before {
        return Err("the store was filled too slowly: its keys expired before".into());
    }
    std::thread::sleep(Duration::from_millis(
        before.saturating_sub(store::now_ms()),
    ));
    let beside = foreground(store.as_ref(), &subject, &mut driver, |store| {
        store.expire(before + 1)
    })?;
    store.settle()?;
    let disk_after = process::disk_bytes(dir);
    let again = foreground(store.as_ref(), &subject, &mut driver, |_| {
        std::thread::sleep(baseline);
        Ok(0)
    })?;
    store.settle()?;
    let gone = check(store.session()?.as_mut(), cell.keys)?;
    let mut figures = store.figures();
    store.close()?;
    let mean = |of: &dyn Fn(&Foreground) -> f64| f64::midpoint(of(&alone), of(&again));
    let cpu_per_op = mean(&|one| one.cpu.as_secs_f64() / one.ops.max(1) as f64);
    let cpu = (beside.cpu.as_secs_f64() - cpu_per_op * beside.ops as f64).max(0.0);
    figures.set(
        "cpu_us_per_expired",
        cpu * 1e6 / (cell.keys / 2).max(1) as f64,
    );
    figures.set("foreground_kept", beside.rate() / mean(&Foreground::rate));
    figures.set("foreground_p999_us", beside.p999_us);
    figures.set("expire_s", beside.wall.as_secs_f64());
    figures.count("disk_before_bytes", disk_before);
    figures.count("disk_after_bytes", disk_after);
    figures.count("expired_reported", beside.result);
    figures.set("expired_gone_share", gone);
    let flushes_per_s = mean(&|one| one.flushes as f64 / one.wall.as_secs_f64());
    figures.set(
        "extra_device_flushes",
        beside.flushes as f64 - flushes_per_s * beside.wall.as_secs_f64(),
    );
    Ok(figures)
}

/// The older half expires at `before`, the newer half does not.
fn fill(session: &mut dyn Session, keys: u64, before: u64) -> Fallible<()> {
    let mut verdicts = Vec::new();
    for (from, to, expiry) in [(0, keys / 2, before), (keys / 2, keys, EXPIRY)] {
        let mut next = from;
        while next < to {
            let end = to.min(next + BATCH as u64);
            let batch: Vec<Key> = (next..end).map(workload::key).collect();
            verdicts.clear();
            session.insert_many(&batch, expiry, &mut verdicts)?;
            if verdicts.iter().any(|fresh| !fresh) {
                return Err("a new key is known".into());
            }
            next = end;
        }
    }
    Ok(())
}

/// What one thread did while something else went on.
struct Foreground {
    ops: u64,
    wall: Duration,
    cpu: Duration,
    flushes: u64,
    p999_us: f64,
    result: u64,
}

impl Foreground {
    fn rate(&self) -> f64 {
        measure::rate(self.ops, self.wall)
    }
}

fn foreground(
    store: &dyn Store,
    subject: &Subject,
    driver: &mut Driver,
    beside: impl FnOnce(&dyn Store) -> Fallible<u64>,
) -> Fallible<Foreground> {
    let stop = AtomicBool::new(false);
    let ops_before = driver.done.ops;
    driver.done.histogram.reset();
    let (cpu, flushes, began) = (subject.cpu(), subject.device().flushes, Instant::now());
    let result = std::thread::scope(|scope| {
        let inserting = scope.spawn(|| {
            let mut session = store.session()?;
            while !stop.load(Ordering::Relaxed) {
                driver.step(session.as_mut(), u64::MAX)?;
            }
            Fallible::Ok(())
        });
        let result = beside(store);
        stop.store(true, Ordering::Relaxed);
        let inserted = inserting
            .join()
            .map_err(|_| "the inserting thread panicked")?;
        inserted.and(result)
    })?;
    Ok(Foreground {
        ops: driver.done.ops - ops_before,
        wall: began.elapsed(),
        cpu: subject.cpu().saturating_sub(cpu),
        flushes: subject.device().flushes - flushes,
        p999_us: driver.done.histogram.value_at_quantile(0.999) as f64 / 1e3,
        result,
    })
}

/// The share of the older half that is gone; the newer half must all be there.
fn check(session: &mut dyn Session, keys: u64) -> Fallible<f64> {
    let sample = (keys / 2).clamp(1, 1000);
    let step = (keys / 2 / sample).max(1);
    let mut gone = 0;
    for i in 0..sample {
        gone += u64::from(!session.contains(&workload::key(i * step))?);
        if !session.contains(&workload::key(keys / 2 + i * step))? {
            return Err("a key expired before its time".into());
        }
    }
    Ok(gone as f64 / sample as f64)
}
