//! `idemlog bench`: two numbers of this machine, durable commits per second and the time of a
//! duplicate's look-up.

mod machine;
pub(crate) mod place;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use idemlog::{DedupLog, Durability, Namespace, NamespaceOptions, Options, Repeatable, RunVerdict};
use serde_json::{Value, json};

use crate::args::{Bench, Common, STORE_VARIABLE};
use crate::exit::{Code, Stop};
use crate::output::print_line;
use machine::Machine;
use place::Place;

/// Keys of one batch, when the store is filled.
const BATCH_KEYS: u64 = 1000;
/// Look-ups that are timed together: each takes too little for a clock.
const LOOKUPS_TIMED: u32 = 100;
const NAMESPACE: &str = "bench";

pub(crate) fn bench(common: &Common, options: &Bench) -> Result<u8, Stop> {
    let from_environment = std::env::var_os(STORE_VARIABLE).map(PathBuf::from);
    if common.store.is_some() && common.store != from_environment {
        return Err(Stop::usage(
            "bench makes a store of its own and removes it; say where with --dir, not --store",
        ));
    }
    let place = Place::new_in(&options.dir)?;
    let machine = Machine::of(place.path());
    let measured = commits(&place.path().join("commits"), options)
        .and_then(|commits| Ok((commits, lookup_ns(&place.path().join("keys"), options)?)));
    let removed = place.remove();
    let (commits, lookup_ns) = measured?;
    removed?;
    if common.json {
        let answer = to_json(&machine, options, &commits, lookup_ns);
        print_line(&answer.to_string())?;
    } else {
        print_line(&machine.line())?;
        print_line(&format!(
            "durable commits: {:.0}/s durability=power threads={} p50_us={:.0} p99_us={:.0} \
             flushes_per_commit={:.2}",
            commits.per_second,
            options.threads,
            commits.p50_us,
            commits.p99_us,
            commits.flushes_per_commit
        ))?;
        print_line(&format!(
            "duplicate look-up: {lookup_ns:.0} ns durability=buffered keys={}",
            options.keys
        ))?;
    }
    Ok(Code::Done as u8)
}

fn to_json(machine: &Machine, options: &Bench, commits: &Commits, lookup_ns: f64) -> Value {
    json!({
        "cores": machine.cores,
        "cpu": machine.cpu,
        "kernel": machine.kernel,
        "file_system": machine.file_system,
        "idemlog": env!("CARGO_PKG_VERSION"),
        "seconds": options.seconds,
        "commits": {
            "durability": "power",
            "threads": options.threads,
            "per_second": rounded(commits.per_second),
            "p50_us": rounded(commits.p50_us),
            "p99_us": rounded(commits.p99_us),
            "flushes_per_commit": rounded(commits.flushes_per_commit),
        },
        "duplicate_lookup": {
            "durability": "buffered",
            "keys": options.keys,
            "ns": rounded(lookup_ns),
        },
    })
}

/// More digits than these were not measured.
fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

#[expect(clippy::disallowed_methods, reason = "what is measured is real time")]
fn now() -> Instant {
    Instant::now()
}

/// What came of claims and commits that survive a power cut.
struct Commits {
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
    flushes_per_commit: f64,
}

fn commits(path: &Path, options: &Bench) -> Result<Commits, Stop> {
    let log = DedupLog::open(path)?;
    let jobs = log.namespace::<Repeatable>(NAMESPACE, NamespaceOptions::new())?;
    let began = now();
    let until = began + Duration::from_secs(options.seconds.into());
    let flushes = log.stats().flushes_count;
    let taken = std::thread::scope(|scope| {
        let numbers = 0..u64::from(options.threads);
        let threads: Vec<_> = numbers
            .map(|thread| {
                let jobs = &jobs;
                scope.spawn(move || commit_until(jobs, thread << 32, until))
            })
            .collect();
        let ended = threads.into_iter().map(|thread| {
            let panicked = |_| Stop::new(Code::Failed, "a thread of the benchmark panicked");
            thread.join().map_err(panicked)?
        });
        ended.collect::<Result<Vec<_>, Stop>>()
    })?;
    let seconds = began.elapsed().as_secs_f64();
    let flushes = log.stats().flushes_count - flushes;
    log.close()?;
    let mut taken = taken.concat();
    taken.sort_unstable();
    #[expect(clippy::cast_precision_loss, reason = "counts of a few minutes")]
    let (count, flushes) = (taken.len() as f64, flushes as f64);
    Ok(Commits {
        per_second: count / seconds,
        p50_us: micros(at_percent(&taken, 50)),
        p99_us: micros(at_percent(&taken, 99)),
        flushes_per_commit: flushes / count,
    })
}

/// Claims and commits one key after the other; returns how long each took.
fn commit_until(
    jobs: &Namespace<Repeatable>,
    first: u64,
    until: Instant,
) -> Result<Vec<Duration>, Stop> {
    let mut taken = Vec::new();
    for number in first.. {
        let began = now();
        let ran = jobs.run_once(key(number), |_| Ok(b"done".to_vec()))?;
        if !matches!(ran, RunVerdict::Ran { .. }) {
            return Err(Stop::new(Code::Failed, "a new key was answered as known"));
        }
        let ended = now();
        taken.push(ended - began);
        if ended >= until {
            break;
        }
    }
    Ok(taken)
}

/// Fills a store and observes its keys again, in no order; returns the median.
fn lookup_ns(path: &Path, options: &Bench) -> Result<f64, Stop> {
    let log = Options::new().durability(Durability::Buffered).open(path)?;
    let seen = log.filter(NAMESPACE, NamespaceOptions::new())?;
    let mut first = 0;
    while first < options.keys {
        let end = options.keys.min(first + BATCH_KEYS);
        let keys: Vec<_> = (first..end).map(key).collect();
        for observed in seen.observe_many(&keys)? {
            if !observed?.is_new() {
                return Err(Stop::new(Code::Failed, "a new key was answered as known"));
            }
        }
        first = end;
    }
    log.wait_idle()?;
    let until = now() + Duration::from_secs(options.seconds.into());
    let mut random = 1u64;
    let mut taken = Vec::new();
    loop {
        let began = now();
        for _ in 0..LOOKUPS_TIMED {
            // Knuth's multiplier; the upper bits are the random ones.
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            if seen.observe(key((random >> 32) % options.keys))?.is_new() {
                return Err(Stop::new(Code::Failed, "a known key was answered as new"));
            }
        }
        let ended = now();
        taken.push((ended - began) / LOOKUPS_TIMED);
        if ended >= until {
            break;
        }
    }
    log.close()?;
    taken.sort_unstable();
    Ok(micros(at_percent(&taken, 50)) * 1000.0)
}

/// The value that this part of all are not above; of a sorted list that is not empty.
fn at_percent(sorted: &[Duration], percent: usize) -> Duration {
    let index = sorted.len().saturating_sub(1) * percent / 100;
    sorted.get(index).copied().unwrap_or_default()
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// A key as services send them: 16 bytes without an order.
fn key(number: u64) -> [u8; 16] {
    let mut key = [0; 16];
    let (low, high) = key.split_at_mut(8);
    low.copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    high.copy_from_slice(&number.to_le_bytes());
    key
}
