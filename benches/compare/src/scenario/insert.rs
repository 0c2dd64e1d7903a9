//! Inserts: single, in batches, by several callers; lazy or durable.

use std::path::Path;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::Bounds;
use crate::Fallible;
use crate::cell::{Cell, Shape};
use crate::figures::Figures;
use crate::measure::{self, Harness, Meter, Subject};
use crate::process;
use crate::store::{self, Session, Store};
use crate::workload::{EXPIRY, Key, Op, Sequence};

/// Bytes that an operation must keep: a key and its expiry.
pub(crate) const PAYLOAD_BYTES: f64 = 24.0;

/// Operations made at once, outside of the store's time.
const CHUNK_OPS: usize = 4096;
/// The same where each call waits for the device.
const CHUNK_CALLS_DURABLE: usize = 64;

pub(crate) fn run(cell: &Cell, dir: &Path, bounds: Bounds) -> Fallible<Figures> {
    let shape = cell.shape()?;
    let store = store::open(
        &cell.store,
        dir,
        cell.level(),
        cell.keys.min(bounds.ops_max),
    )?;
    let mut meter = Meter::start(Subject::new(dir, store.server()))?;
    let per_thread = Bounds {
        ops_max: cell.keys.min(bounds.ops_max) / shape.threads as u64,
        ..bounds
    };
    let chunk = if cell.level() == crate::cell::Level::Lazy {
        CHUNK_OPS / shape.batch.min(CHUNK_OPS)
    } else {
        CHUNK_CALLS_DURABLE * shape.in_flight.max(1)
    };
    let done = drive_all(store.as_ref(), shape, chunk.max(1), per_thread)?;
    meter.answered();
    store.settle()?;
    let mut figures = meter.stop(done.ops, done.harness);
    figures.extend(measure::latencies(&done.histogram));
    figures.extend(store.figures());
    figures.count("keys", done.fresh);
    store.close()?;
    let disk = process::disk_bytes(dir) as f64;
    figures.set("disk_bytes_per_key", disk / done.fresh.max(1) as f64);
    if let Some(written) = figures.get("written_bytes_per_op") {
        let per_key = written * done.ops as f64 / done.fresh.max(1) as f64;
        figures.set("written_per_payload", per_key / PAYLOAD_BYTES);
    }
    Ok(figures)
}

/// What threads did, summed up.
pub(crate) struct Done {
    pub(crate) ops: u64,
    pub(crate) fresh: u64,
    pub(crate) harness: Harness,
    pub(crate) histogram: Histogram<u64>,
}

/// Gives each thread a session and a sequence of its own.
pub(crate) fn drive_all(
    store: &dyn Store,
    shape: Shape,
    chunk_calls: usize,
    bounds: Bounds,
) -> Fallible<Done> {
    let mut all = Done {
        ops: 0,
        fresh: 0,
        harness: Harness::default(),
        histogram: measure::histogram()?,
    };
    let threads: Vec<Fallible<Done>> = std::thread::scope(|scope| {
        let work = |thread| {
            let mut session = store.session()?;
            let mut driver = Driver::new(Sequence::new(thread), shape.batch, chunk_calls)?;
            driver.in_flight = shape.in_flight;
            driver.answers = store.answers();
            driver.drive(session.as_mut(), bounds)?;
            Ok(driver.done)
        };
        let threads: Vec<_> = (0..shape.threads)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(done) => done,
            Err(_) => Err("a caller panicked".into()),
        });
        joined.collect()
    });
    for thread in threads {
        let done = thread?;
        all.ops += done.ops;
        all.fresh += done.fresh;
        all.harness.cpu += done.harness.cpu;
        all.harness.wall += done.harness.wall / u32::try_from(shape.threads)?;
        all.histogram.add(&done.histogram)?;
    }
    Ok(all)
}

/// One caller: makes operations, calls the store, checks the verdicts.
pub(crate) struct Driver {
    sequence: Sequence,
    batch: usize,
    in_flight: usize,
    chunk_calls: usize,
    ops: Vec<Op>,
    verdicts: Vec<bool>,
    pub(crate) answers: bool,
    pub(crate) done: Done,
}

impl Driver {
    pub(crate) fn new(sequence: Sequence, batch: usize, chunk_calls: usize) -> Fallible<Driver> {
        Ok(Driver {
            sequence,
            batch,
            in_flight: 0,
            chunk_calls,
            ops: Vec::new(),
            verdicts: Vec::new(),
            answers: true,
            done: Done {
                ops: 0,
                fresh: 0,
                harness: Harness::default(),
                histogram: measure::histogram()?,
            },
        })
    }

    /// Goes on with single calls.
    pub(crate) fn single(&mut self) {
        (self.batch, self.chunk_calls) = (1, CHUNK_OPS);
    }

    /// Goes on until there are `ops_max` new keys, or the time is over.
    pub(crate) fn drive(&mut self, session: &mut dyn Session, bounds: Bounds) -> Fallible<()> {
        let deadline = Instant::now() + Duration::from_secs(bounds.seconds_max);
        while self.step(session, bounds.ops_max)? && Instant::now() < deadline {}
        Ok(())
    }

    /// Makes a chunk of operations and does them; `false` when there are enough new keys.
    pub(crate) fn step(&mut self, session: &mut dyn Session, keys_max: u64) -> Fallible<bool> {
        let (began, began_cpu) = (Instant::now(), process::cpu_of_thread());
        self.ops.clear();
        self.verdicts.clear();
        while self.ops.len() < self.chunk_calls * self.batch && self.sequence.inserted() < keys_max
        {
            let op = self.sequence.next();
            self.ops.push(op);
        }
        self.done.harness.cpu += process::cpu_of_thread() - began_cpu;
        self.done.harness.wall += began.elapsed();
        if self.in_flight > 0 {
            let keys: Vec<Key> = self.ops.iter().map(|op| op.key).collect();
            session.insert_in_flight(&keys, self.in_flight, &mut self.verdicts)?;
        } else if self.batch == 1 {
            self.singles(session)?;
        } else {
            self.batches(session)?;
        }
        self.check()?;
        Ok(self.sequence.inserted() < keys_max)
    }

    fn singles(&mut self, session: &mut dyn Session) -> Fallible<()> {
        let mut last = Instant::now();
        for op in &self.ops {
            self.verdicts.push(session.insert(&op.key, EXPIRY)?);
            let now = Instant::now();
            self.done.histogram.saturating_record(nanos(now - last));
            last = now;
        }
        Ok(())
    }

    fn batches(&mut self, session: &mut dyn Session) -> Fallible<()> {
        let mut last = Instant::now();
        for ops in self.ops.chunks(self.batch) {
            let keys: Vec<Key> = ops.iter().map(|op| op.key).collect();
            session.insert_many(&keys, EXPIRY, &mut self.verdicts)?;
            let now = Instant::now();
            self.done.histogram.saturating_record(nanos(now - last));
            last = now;
        }
        Ok(())
    }

    fn check(&mut self) -> Fallible<()> {
        let wrong = self
            .ops
            .iter()
            .zip(&self.verdicts)
            .filter(|(op, fresh)| op.fresh != **fresh);
        let wrong = wrong.count();
        if self.answers && (wrong > 0 || self.ops.len() != self.verdicts.len()) {
            return Err(format!("wrong verdicts: {wrong} of {}", self.ops.len()).into());
        }
        self.done.ops += self.ops.len() as u64;
        self.done.fresh = self.sequence.inserted();
        Ok(())
    }
}

pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
