//! Data larger than the memory it may use: device reads per new key and per old duplicate.
//!
//! The store is filled without a limit, its pages are dropped from the cache, and then the
//! process confines itself to a control group of its own: what it reads counts against the limit.

use std::fs;
use std::path::{Path, PathBuf};

use super::Bounds;
use super::writer::{self, End};
use crate::Fallible;
use crate::cell::Cell;
use crate::figures::Figures;
use crate::measure::Subject;
use crate::process;
use crate::store::{self, Session};
use crate::workload::{self, EXPIRY, mix};

const GROUP_NAME: &str = "idemlog-compare";
const OPS: u64 = 20_000;
/// The data is this many times the limit.
const DATA_PER_LIMIT: u64 = 10;
/// A process with less cannot even start its threads.
const LIMIT_BYTES_MIN: u64 = 48 << 20;

/// Why there is no control group to be confined by; `None` if there is one.
pub(crate) fn missing() -> Option<String> {
    sweep();
    match group() {
        Ok(group) => {
            fs::remove_dir(&group.path).unwrap_or_default();
            None
        }
        Err(error) => Some(error.to_string()),
    }
}

/// What processes that were killed left behind; a group with a process in it cannot be removed.
fn sweep() {
    for (home, _) in homes() {
        for entry in fs::read_dir(home).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(GROUP_NAME) {
                fs::remove_dir(entry.path()).unwrap_or_default();
            }
        }
    }
}

/// The groups that this process is in, with the name of the file that limits memory there: of
/// version 2, and of version 1. A group is made below them, never beside.
fn homes() -> Vec<(PathBuf, &'static str)> {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let lines = text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        Some((
            parts.next()?.to_owned(),
            parts.next()?.trim_start_matches('/').to_owned(),
        ))
    });
    let known = lines.filter_map(|(controllers, path)| {
        if controllers.is_empty() {
            return Some((Path::new("/sys/fs/cgroup").join(path), "memory.max"));
        }
        let memory = controllers
            .split(',')
            .any(|controller| controller == "memory");
        memory.then(|| {
            (
                Path::new("/sys/fs/cgroup/memory").join(path),
                "memory.limit_in_bytes",
            )
        })
    });
    known.collect()
}

struct Group {
    path: PathBuf,
    limit_file: &'static str,
}

/// Makes a control group that can limit memory.
fn group() -> Fallible<Group> {
    let name = format!("{GROUP_NAME}-{}", std::process::id());
    let mut reasons = Vec::new();
    for (home, limit_file) in homes() {
        let path = home.join(&name);
        match fs::create_dir(&path) {
            Ok(()) if path.join(limit_file).exists() => return Ok(Group { path, limit_file }),
            Ok(()) => {
                fs::remove_dir(&path).unwrap_or_default();
                reasons.push(format!("no {limit_file}"));
            }
            Err(error) => reasons.push(error.to_string()),
        }
    }
    Err(format!(
        "no writable control group for memory ({})",
        reasons.join("; ")
    )
    .into())
}

/// Removes the group when the process that was in it has left it for its parent.
struct Confined(Group);

impl Confined {
    fn enter(limit: u64) -> Fallible<Confined> {
        let confined = Confined(group()?);
        fs::write(
            confined.0.path.join(confined.0.limit_file),
            limit.to_string(),
        )?;
        fs::write(
            confined.0.path.join("cgroup.procs"),
            std::process::id().to_string(),
        )?;
        Ok(confined)
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        if let Some(parent) = self.0.path.parent() {
            fs::write(parent.join("cgroup.procs"), std::process::id().to_string())
                .unwrap_or_default();
        }
        fs::remove_dir(&self.0.path).unwrap_or_default();
    }
}

pub(crate) fn run(cell: &Cell, dir: &Path, bounds: Bounds) -> Fallible<Figures> {
    writer::fill(cell, dir, End::Close)?;
    process::drop_cache(dir)?;
    let data = process::disk_bytes(dir);
    let limit = (data / DATA_PER_LIMIT).max(LIMIT_BYTES_MIN);
    let confined = Confined::enter(limit)?;
    let mut figures = Figures::default();
    figures.count("data_bytes", data);
    figures.count("limit_bytes", limit);
    figures.set("data_per_limit", data as f64 / limit as f64);
    let store = store::open(&cell.store, dir, cell.level(), cell.keys)?;
    let subject = Subject::new(dir, store.server());
    let count = OPS.min(bounds.ops_max);
    {
        let mut session = store.session()?;
        let known = |i: u64| (workload::key(mix(i) % cell.keys), false);
        let fresh = |i: u64| (workload::absent_key(i), true);
        // Warms what a store always keeps in memory.
        observe(session.as_mut(), &subject, "warm", count / 10, &|i| {
            known(i + count)
        })?;
        figures.extend(observe(session.as_mut(), &subject, "new", count, &fresh)?);
        figures.extend(observe(session.as_mut(), &subject, "old", count, &known)?);
    }
    figures.extend(store.figures());
    store.close()?;
    drop(confined);
    Ok(figures)
}

fn observe(
    session: &mut dyn Session,
    subject: &Subject,
    name: &str,
    count: u64,
    op: &dyn Fn(u64) -> (workload::Key, bool),
) -> Fallible<Figures> {
    let (began, cpu) = (std::time::Instant::now(), subject.cpu());
    let device = subject.device();
    for i in 0..count {
        let (key, fresh) = op(i);
        if session.insert(&key, EXPIRY)? != fresh {
            return Err(format!("wrong verdict ({name})").into());
        }
    }
    let after = subject.device();
    let used = subject.cpu().saturating_sub(cpu);
    let per_op = |value: f64| value / count.max(1) as f64;
    let mut figures = Figures::default();
    let mut set = |what: &str, value| figures.set(&format!("{name}_{what}"), value);
    set("device_reads", per_op((after.reads - device.reads) as f64));
    set(
        "device_read_bytes",
        per_op((after.read_bytes - device.read_bytes) as f64),
    );
    set("cpu_us", per_op(used.as_secs_f64() * 1e6));
    set("per_s", crate::measure::rate(count, began.elapsed()));
    Ok(figures)
}
