//! What the kernel counts about a process, a device and a directory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Fallible;

/// CPU time of this process, all its threads.
pub(crate) fn cpu_here() -> Duration {
    to_duration(rustix::time::clock_gettime(
        rustix::time::ClockId::ProcessCPUTime,
    ))
}

/// CPU time of the calling thread.
pub(crate) fn cpu_of_thread() -> Duration {
    to_duration(rustix::time::clock_gettime(
        rustix::time::ClockId::ThreadCPUTime,
    ))
}

fn to_duration(time: rustix::time::Timespec) -> Duration {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// CPU time of another process, all its live threads, in nanoseconds as the scheduler counts it.
pub(crate) fn cpu_of(pid: u32) -> Duration {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Duration::ZERO;
    };
    let nanos = tasks.flatten().filter_map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanos.sum())
}

/// A number behind a name in a file of `/proc/<pid>`; `self` is this process.
pub(crate) fn proc_number(pid: &str, file: &str, name: &str) -> u64 {
    file_number(&format!("/proc/{pid}/{file}"), name)
}

/// A number behind a name at the start of a line.
pub(crate) fn file_number(path: &str, name: &str) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.trim_start_matches(':').split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Counters of the block device under a directory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceCounts {
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    pub(crate) flushes: u64,
}

/// The device under a directory, as `/proc/diskstats` names it: the whole disk, since flushes are
/// not counted per partition. `None` where the file system has no device of its own.
pub(crate) fn device_of(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let link = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let whole: PathBuf = if link.join("partition").exists() {
        link.parent()?.to_owned()
    } else {
        link
    };
    Some(whole.file_name()?.to_str()?.to_owned())
}

pub(crate) fn device_counts(device: Option<&str>) -> DeviceCounts {
    let table = fs::read_to_string("/proc/diskstats").unwrap_or_default();
    let fields = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let fields = fields
        .into_iter()
        .find(|fields| fields.get(2).copied() == device);
    let number = |index: usize| {
        let fields = fields.as_ref()?;
        fields.get(index)?.parse::<u64>().ok()
    };
    DeviceCounts {
        reads: number(3).unwrap_or(0),
        read_bytes: number(5).unwrap_or(0) * 512,
        flushes: number(18).unwrap_or(0),
    }
}

/// Bytes that the files below a directory occupy; a sparse file counts what is allocated.
pub(crate) fn disk_bytes(path: &Path) -> u64 {
    files(path)
        .iter()
        .map(|(_, metadata)| metadata.blocks() * 512)
        .sum()
}

/// All files below a directory.
pub(crate) fn files(path: &Path) -> Vec<(PathBuf, fs::Metadata)> {
    let Ok(entries) = fs::read_dir(path) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => found.extend(files(&entry.path())),
            Ok(metadata) => found.push((entry.path(), metadata)),
            Err(_) => {}
        }
    }
    found
}

/// Drops the cached pages of all files below a directory, after writing them out.
pub(crate) fn drop_cache(path: &Path) -> Fallible<()> {
    for (path, _) in files(path) {
        let file = fs::File::open(path)?;
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}
