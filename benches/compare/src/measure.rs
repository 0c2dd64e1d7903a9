//! The meter of a cell: wall clock, CPU, bytes, flushes, memory.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::Fallible;
use crate::figures::Figures;
use crate::process::{self, DeviceCounts};

/// How often the memory of the processes is looked at.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);

/// The process, the server it talks to if there is one, and the device.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) server: Option<u32>,
    device: Option<String>,
}

/// All counters at one moment.
#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Instant,
    cpu: Duration,
    written: u64,
    device: DeviceCounts,
}

impl Subject {
    pub(crate) fn new(dir: &Path, server: Option<u32>) -> Subject {
        Subject {
            server,
            device: process::device_of(dir),
        }
    }

    pub(crate) fn cpu(&self) -> Duration {
        process::cpu_here() + self.server.map_or(Duration::ZERO, process::cpu_of)
    }

    pub(crate) fn device(&self) -> DeviceCounts {
        process::device_counts(self.device.as_deref())
    }

    /// A figure of `/proc/<pid>`, summed over the process and its server.
    fn sum(&self, file: &str, name: &str) -> u64 {
        let server = self.server.map(|pid| pid.to_string());
        let server = server.map_or(0, |pid| process::proc_number(&pid, file, name));
        process::proc_number("self", file, name) + server
    }

    fn read(&self) -> Reading {
        Reading {
            at: Instant::now(),
            cpu: self.cpu(),
            written: self.sum("io", "write_bytes"),
            device: self.device(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Meter {
    subject: Subject,
    began: Reading,
    answered_at: Option<Instant>,
    stop: Arc<AtomicBool>,
    anonymous_max: Arc<AtomicU64>,
    sampler: Option<JoinHandle<Duration>>,
}

impl Meter {
    pub(crate) fn start(subject: Subject) -> Fallible<Meter> {
        let stop = Arc::new(AtomicBool::new(false));
        let anonymous_max = Arc::new(AtomicU64::new(0));
        let sampler = {
            let (subject, stop, max) = (
                subject.clone(),
                Arc::clone(&stop),
                Arc::clone(&anonymous_max),
            );
            std::thread::Builder::new()
                .name("sampler".to_owned())
                .spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        max.fetch_max(subject.sum("status", "RssAnon") * 1024, Ordering::Relaxed);
                        std::thread::park_timeout(SAMPLE_INTERVAL);
                    }
                    process::cpu_of_thread()
                })?
        };
        Ok(Meter {
            began: subject.read(),
            subject,
            answered_at: None,
            stop,
            anonymous_max,
            sampler: Some(sampler),
        })
    }

    /// The last answer is there; the store may not be idle yet.
    pub(crate) fn answered(&mut self) {
        self.answered_at = Some(Instant::now());
    }

    /// The store is idle. `harness` is what the operations themselves cost to make.
    pub(crate) fn stop(mut self, ops: u64, harness: Harness) -> Figures {
        let ended = self.subject.read();
        self.stop.store(true, Ordering::Relaxed);
        let mut sampled = Duration::ZERO;
        if let Some(sampler) = self.sampler.take() {
            sampler.thread().unpark();
            sampled = sampler.join().unwrap_or_default();
        }
        let per_op = |value: f64| value / ops.max(1) as f64;
        let answered = self.answered_at.unwrap_or(ended.at) - self.began.at;
        let cpu = (ended.cpu - self.began.cpu).saturating_sub(harness.cpu + sampled);
        let flushes = ended.device.flushes - self.began.device.flushes;
        let written = ended.written - self.began.written;
        let mut figures = Figures::default();
        figures.count("ops", ops);
        figures.set(
            "ops_per_s",
            rate(ops, answered.saturating_sub(harness.wall)),
        );
        let idle = (ended.at - self.began.at).saturating_sub(harness.wall);
        figures.set("ops_per_s_until_idle", rate(ops, idle));
        figures.set("cpu_us_per_op", per_op(cpu.as_secs_f64() * 1e6));
        figures.set("written_bytes_per_op", per_op(written as f64));
        figures.set("device_flushes_per_op", per_op(flushes as f64));
        figures.count("device_flushes", flushes);
        figures.count("rss_max_bytes", self.subject.sum("status", "VmHWM") * 1024);
        figures.count(
            "anonymous_max_bytes",
            self.anonymous_max.load(Ordering::Relaxed),
        );
        figures
    }
}

/// The cost of making the operations, which is not the store's: of one thread, on average.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Harness {
    pub(crate) wall: Duration,
    pub(crate) cpu: Duration,
}

pub(crate) fn rate(ops: u64, time: Duration) -> f64 {
    ops as f64 / time.as_secs_f64().max(1e-9)
}

/// An empty histogram of nanoseconds, from 1 ns to 100 s, within 1 %: 64 callers have one each.
pub(crate) fn histogram() -> Fallible<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, 100_000_000_000, 2)?)
}

pub(crate) fn latencies(histogram: &Histogram<u64>) -> Figures {
    let mut figures = Figures::default();
    if histogram.is_empty() {
        return figures;
    }
    let quantiles = [("p50_us", 0.5), ("p99_us", 0.99), ("p999_us", 0.999)];
    for (name, quantile) in quantiles {
        figures.set(name, histogram.value_at_quantile(quantile) as f64 / 1e3);
    }
    figures.set("max_us", histogram.max() as f64 / 1e3);
    figures
}
