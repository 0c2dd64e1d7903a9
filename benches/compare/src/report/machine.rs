//! What the figures hold for: machine, kernel, file system, versions.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

pub(crate) fn describe(dir: &Path) -> Value {
    json!({
        "cpu": cpu(),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_mib": crate::process::file_number("/proc/meminfo", "MemTotal") / 1024,
        "kernel": first_line("/proc/sys/kernel/osrelease"),
        "file_system": file_system(dir),
        "device": crate::process::device_of(dir),
        "commit": git(&["rev-parse", "--short=12", "HEAD"]),
        "dirty": !git(&["status", "--porcelain", "-uno"]).is_empty(),
        "versions": versions(),
        "rustc": output("rustc", &["--version"]),
        "redis": output("redis-server", &["--version"]),
        "day": output("date", &["-u", "+%F"]),
        "command": arguments(),
    })
}

/// What was asked for, without where things lie on this machine.
fn arguments() -> String {
    let mut kept = Vec::new();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if ["--dir", "--results", "--report"].contains(&word.as_str()) {
            words.next();
        } else {
            kept.push(word);
        }
    }
    kept.join(" ")
}

/// The lines of the report about the runs that filled the results file: each once.
pub(crate) fn text(runs: &[Value], rounds: usize) -> String {
    let field = |run: &Value, name: &str| match run.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::new(),
    };
    let distinct = |name: &str| {
        let mut all: Vec<String> = runs.iter().map(|run| field(run, name)).collect();
        all.retain(|text| !text.is_empty());
        all.sort();
        all.dedup();
        all.join("; ")
    };
    let mut text = String::new();
    for (title, name) in [
        ("Processor", "cpu"),
        ("Cores", "cores"),
        ("Memory, MiB", "memory_mib"),
        ("Kernel", "kernel"),
        ("File system", "file_system"),
        ("Versions", "versions"),
        ("Compiler", "rustc"),
        ("Redis", "redis"),
        ("Commit", "commit"),
        ("Uncommitted changes", "dirty"),
        ("Days", "day"),
        ("Arguments", "command"),
    ] {
        text += &format!("- {title}: {}\n", distinct(name));
    }
    text + &format!("- Rounds: {rounds} at most; figures are their medians\n")
}

/// Versions of the peers, as the lock file names them.
fn versions() -> String {
    let lock = include_str!("../../Cargo.lock");
    let names = [
        "fjall",
        "heed",
        "libsqlite3-sys",
        "librocksdb-sys",
        "lmdb-master-sys",
        "redb",
        "rocksdb",
        "rusqlite",
        "sled",
    ];
    let mut found = Vec::new();
    let mut lines = lock.lines();
    while let Some(line) = lines.next() {
        let name = line
            .strip_prefix("name = ")
            .map(|name| name.trim_matches('"'));
        let version = lines
            .clone()
            .next()
            .and_then(|line| line.strip_prefix("version = "));
        if let (Some(name), Some(version)) = (name, version)
            && (names.contains(&name) || name.starts_with("lmdb"))
        {
            found.push(format!("{name} {}", version.trim_matches('"')));
        }
    }
    found.join(", ")
}

fn git(arguments: &[&str]) -> String {
    let here = ["-C", env!("CARGO_MANIFEST_DIR")];
    output("git", &[&here, arguments].concat())
}

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map_or_else(
        |_| String::new(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

fn first_line(path: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().next().unwrap_or_default().to_owned()
}

fn cpu() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    name.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |name| name.trim_start_matches([' ', '\t', ':']).to_owned(),
    )
}

/// The type and the options of the file system that a directory lies on.
fn file_system(dir: &Path) -> String {
    let Ok(dir) = dir.canonicalize() else {
        return String::new();
    };
    let table = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let mounts = table.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        Some((
            fields.next()?.to_owned(),
            fields.next()?.to_owned(),
            fields.next()?.to_owned(),
        ))
    });
    let under = mounts.filter(|(mount, ..)| dir.starts_with(mount));
    let nearest = under.max_by_key(|(mount, ..)| mount.len());
    nearest.map_or_else(String::new, |(_, kind, options)| {
        format!("{kind} ({options})")
    })
}
