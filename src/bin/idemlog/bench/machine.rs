//! What a measurement was made on: a number without it says nothing.

use std::path::Path;

/// Cores, processor, kernel and file system; "unknown" where the system does not tell.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) cores: usize,
    pub(crate) cpu: String,
    pub(crate) kernel: String,
    pub(crate) file_system: String,
}

impl Machine {
    /// Describes this machine, and the file system that a directory lies on.
    pub(crate) fn of(dir: &Path) -> Machine {
        Machine {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            cpu: cpu().unwrap_or_else(unknown),
            kernel: kernel().unwrap_or_else(unknown),
            file_system: file_system(dir).unwrap_or_else(unknown),
        }
    }

    /// Returns the facts as one line.
    pub(crate) fn line(&self) -> String {
        format!(
            "machine: cores={} cpu=\"{}\" kernel={} file_system={} idemlog={}",
            self.cores,
            self.cpu,
            self.kernel,
            self.file_system,
            env!("CARGO_PKG_VERSION")
        )
    }
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn cpu() -> Option<String> {
    let text = read("/proc/cpuinfo")?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn kernel() -> Option<String> {
    Some(read("/proc/sys/kernel/osrelease")?.trim().to_owned())
}

/// The type of the mount that a directory lies on: the longest prefix, of equals the last.
fn file_system(dir: &Path) -> Option<String> {
    let dir = dir.canonicalize().ok()?;
    let table = read("/proc/mounts")?;
    let mounts = table.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        Some((fields.next()?, fields.next()?))
    });
    let found = mounts
        .filter(|(mount, _)| dir.starts_with(mount))
        .max_by_key(|(mount, _)| mount.len());
    found.map(|(_, kind)| kind.to_owned())
}
