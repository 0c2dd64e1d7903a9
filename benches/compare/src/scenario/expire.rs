//! The oldest half of the keys expires while one thread inserts.
//!
//! A second store beside it, filled in the same way but with keys that do not expire, then does the
//! same operations: what these cost there is taken off, and how long they take there is what the
//! foreground's time is compared with. Seals, merges and compactions come at the same numbers of
//! keys in both, so that they are no part of the difference.

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
    let warm = Duration::from_secs(bounds.seconds_max.clamp(1, 3));
    let (expiring, mut figures) = expiring(cell, &dir.join("expiring"), warm)?;
    let control = control(cell, &dir.join("control"), &expiring)?;
    let beside = &expiring.beside;
    let cpu = beside.cpu.saturating_sub(control.cpu);
    figures.set(
        "cpu_us_per_expired",
        cpu.as_secs_f64() * 1e6 / (cell.keys / 2).max(1) as f64,
    );
    figures.set("foreground_kept", beside.rate() / control.rate());
    figures.set("foreground_p999_us", beside.p999_us);
    figures.set("expire_s", beside.wall.as_secs_f64());
    figures.count("expired_reported", expiring.reported);
    figures.set(
        "extra_device_flushes",
        beside.flushes as f64 - control.flushes as f64,
    );
    Ok(figures)
}

/// What was done to the store whose keys expire.
struct Expiring {
    warm_ops: u64,
    beside: Foreground,
    reported: u64,
}

fn expiring(cell: &Cell, dir: &Path, warm: Duration) -> Fallible<(Expiring, Figures)> {
    std::fs::create_dir_all(dir)?;
    let store = store::open(&cell.store, dir, cell.level(), cell.keys)?;
    let subject = Subject::new(dir, store.server());
    let before = store::now_ms() + 1000 * (4 + warm.as_secs() + cell.keys / FILL_KEYS_PER_S);
    fill(store.session()?.as_mut(), cell.keys, before)?;
    store.settle()?;
    let disk_before = process::disk_bytes(dir);
    let mut driver = Driver::new(Sequence::new(1), 1, 64)?;
    let began = Instant::now();
    let warmed = foreground(store.as_ref(), &subject, &mut driver, |_| {
        began.elapsed() < warm
    })?;
    if store::now_ms() > before {
        return Err("the store was filled too slowly: its keys expired before".into());
    }
    stand_still(store.as_ref())?;
    store::sleep_until(before);
    let is_over = AtomicBool::new(false);
    let (beside, reported) = std::thread::scope(|scope| {
        let expire = scope.spawn(|| {
            let expired = store.expire(before + 1);
            is_over.store(true, Ordering::Relaxed);
            expired
        });
        let beside = foreground(store.as_ref(), &subject, &mut driver, |_| {
            !is_over.load(Ordering::Relaxed)
        })?;
        let reported = expire
            .join()
            .map_err(|_| "the expiring thread panicked")??;
        Fallible::Ok((beside, reported))
    })?;
    store.settle()?;
    let disk_after = process::disk_bytes(dir);
    let gone = check(store.session()?.as_mut(), cell.keys)?;
    let mut figures = store.figures();
    store.close()?;
    figures.count("disk_before_bytes", disk_before);
    figures.count("disk_after_bytes", disk_after);
    figures.set("expired_gone_share", gone);
    let expiring = Expiring {
        warm_ops: warmed.ops,
        beside,
        reported,
    };
    Ok((expiring, figures))
}

/// Leaves neither the store nor the system anything to do that came before: one of the two stores
/// waits for its keys' time, the other does not.
fn stand_still(store: &dyn Store) -> Fallible<()> {
    store.settle()?;
    rustix::fs::sync();
    Ok(())
}

/// The same operations, where nothing expires.
fn control(cell: &Cell, dir: &Path, expiring: &Expiring) -> Fallible<Foreground> {
    std::fs::create_dir_all(dir)?;
    let store = store::open(&cell.store, dir, cell.level(), cell.keys)?;
    let subject = Subject::new(dir, store.server());
    fill(store.session()?.as_mut(), cell.keys, EXPIRY)?;
    store.settle()?;
    let mut driver = Driver::new(Sequence::new(1), 1, 64)?;
    foreground(store.as_ref(), &subject, &mut driver, |ops| {
        ops < expiring.warm_ops
    })?;
    stand_still(store.as_ref())?;
    let beside = foreground(store.as_ref(), &subject, &mut driver, |ops| {
        ops < expiring.beside.ops
    })?;
    store.close()?;
    Ok(beside)
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

/// What one thread did.
struct Foreground {
    ops: u64,
    wall: Duration,
    cpu: Duration,
    flushes: u64,
    p999_us: f64,
}

impl Foreground {
    fn rate(&self) -> f64 {
        measure::rate(self.ops, self.wall)
    }
}

/// Inserts as long as `goes_on` says so of the number of operations.
fn foreground(
    store: &dyn Store,
    subject: &Subject,
    driver: &mut Driver,
    goes_on: impl Fn(u64) -> bool,
) -> Fallible<Foreground> {
    let ops_before = driver.done.ops;
    driver.done.histogram.reset();
    let mut session = store.session()?;
    let (cpu, flushes, began) = (subject.cpu(), subject.device().flushes, Instant::now());
    while goes_on(driver.done.ops - ops_before) {
        driver.step(session.as_mut(), u64::MAX)?;
    }
    Ok(Foreground {
        ops: driver.done.ops - ops_before,
        wall: began.elapsed(),
        cpu: subject.cpu().saturating_sub(cpu),
        flushes: subject.device().flushes - flushes,
        p999_us: driver.done.histogram.value_at_quantile(0.999) as f64 / 1e3,
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
