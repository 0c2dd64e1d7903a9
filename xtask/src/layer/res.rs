//! Limits of the machine: a disk that is full at every size and has space again, small limits of
//! file size and descriptors, and less memory than data.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::child::{REFUSED, plan_words};
use crate::context::{Context, Counts, Fallible, Mode, Outcome};
use crate::process::{self, Ended, How, has, must};
use crate::rig::guard::Guard;
use crate::rig::subject::{child, run as run_marked};
use crate::rig::volume::text;
use crate::store::work::Plan;

const KIB: u64 = 1024;
/// A store needs about this much to be made at all.
const DISK_BYTES_MIN: u64 = 320 * KIB;
const BALLAST_BYTES: u64 = 192 * KIB;
const MEMORY_BYTES: u64 = 160 * KIB * KIB;
const MEMORY_TIME_MAX: Duration = Duration::from_secs(600);
const CGROUP: &str = "/sys/fs/cgroup/memory";

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    let guard = Guard::new(context.scratch())?;
    let (mut counts, mut whats) = (Counts::default(), Vec::new());
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        full_disks(context, &guard, &mut counts, &mut whats)?;
    } else {
        println!("SKIPPED res on full disks: needs root");
    }
    if has("prlimit") && has("env") {
        small_limits(context, &guard, &mut counts, &mut whats)?;
    } else {
        println!("SKIPPED res with small limits: needs prlimit");
    }
    if is_root && Path::new(CGROUP).is_dir() {
        little_memory(context, &guard, &mut counts, &mut whats)?;
    } else {
        println!("SKIPPED res with little memory: needs root and {CGROUP}");
    }
    if counts.passed + counts.failed == 0 {
        return Ok(Outcome::skipped("nothing of it can be done here"));
    }
    let shown = whats.get(..whats.len().min(12)).unwrap_or_default();
    Ok(Outcome::judge(counts, shown.join("\n  ")))
}

/// Disks of all sizes from the smallest on; each is filled, gets space, and is used on.
fn full_disks(
    context: &Context,
    guard: &Guard,
    counts: &mut Counts,
    whats: &mut Vec<String>,
) -> Fallible<()> {
    let point = guard.dir().join("disk");
    std::fs::create_dir_all(&point)?;
    for step in 0..context.count(24, 400) {
        if context.is_over() {
            break;
        }
        // Steps of a page, then coarser, so that every allocation is the one that fails.
        let grows = if context.mode == Mode::Full {
            4 * KIB
        } else {
            20 * KIB
        };
        let bytes = DISK_BYTES_MIN + BALLAST_BYTES + step * grows;
        let size = format!("size={bytes}");
        must(
            "mount",
            &["-t", "tmpfs", "-o", &size, "idemlog-rig", text(&point)?],
        )?;
        let (ballast, notes) = (point.join("ballast"), guard.dir().join("notes"));
        std::fs::write(&ballast, vec![1; usize::try_from(BALLAST_BYTES)?])?;
        std::fs::write(&notes, "")?;
        let store = point.join("store");
        let mut fill = child("fill", &store, &notes)?;
        fill.arg(&ballast);
        let filled = run_marked(guard, fill)?;
        let checked = run_marked(guard, child("check", &store, &notes)?)?;
        must("umount", &[text(&point)?])?;
        for (task, ended) in [("filled", &filled), ("checked", &checked)] {
            counts.check(ended.is_success());
            if !ended.is_success() {
                whats.push(format!("disk of {bytes} {task}: {}", what_of(ended)));
            }
        }
        counts.add("full-disks", 1);
    }
    Ok(())
}

/// The workload under a limit ends well or says what it lacks; what it was answered stays.
fn small_limits(
    context: &Context,
    guard: &Guard,
    counts: &mut Counts,
    whats: &mut Vec<String>,
) -> Fallible<()> {
    let sizes = [1, 4, 8, 12, 16, 20, 32, 48, 64, 96].map(|kib| format!("--fsize={}", kib * KIB));
    let descriptors = (4..40).map(|count| format!("--nofile={count}"));
    for limit in sizes.into_iter().chain(descriptors) {
        let (store, notes) = (guard.dir().join("limited"), guard.dir().join("notes"));
        if store.exists() {
            std::fs::remove_dir_all(&store)?;
        }
        let plan = Plan {
            seed: context.seed,
            part: 0,
            calls: 100,
            killed: false,
            drops: false,
            fault_at: None,
            fault_open: false,
            foreground: false,
        };
        // Notes go through a pipe, which has no size.
        let mut work = Command::new("prlimit");
        work.arg(&limit)
            .args(["env", "--ignore-signal=XFSZ"])
            .arg(std::env::current_exe()?);
        work.arg("work")
            .arg(&store)
            .arg("/dev/stdout")
            .args(plan_words(&plan));
        let worked = run_marked(guard, work)?;
        std::fs::write(&notes, &worked.stdout)?;
        let polite = match worked.how {
            How::Code(0) => true,
            How::Code(code) => {
                code == i32::from(REFUSED) && worked.stderr.trim().lines().count() == 1
            }
            _ => false,
        };
        let checked = run_marked(guard, child("check", &store, &notes)?)?;
        for (task, holds, ended) in [
            ("worked", polite, &worked),
            ("checked", checked.is_success(), &checked),
        ] {
            counts.check(holds);
            if !holds {
                whats.push(format!("{limit} {task}: {}", what_of(ended)));
            }
        }
        counts.add("limits", 1);
        counts.add("limits-refused", u64::from(!worked.is_success()));
    }
    Ok(())
}

/// More data than memory, on a disk: right answers, at whatever speed.
fn little_memory(
    context: &Context,
    guard: &Guard,
    counts: &mut Counts,
    whats: &mut Vec<String>,
) -> Fallible<()> {
    let keys = match context.mode {
        Mode::Ci => 4_000_000,
        Mode::Full => 12_000_000,
    };
    let group = Group::new()?;
    // Not the scratch directory: that may be memory itself.
    let disk = tempfile::Builder::new()
        .prefix("idemlog-rel-")
        .tempdir_in(std::env::temp_dir())?;
    let script = format!(
        "echo $$ > {}/cgroup.procs && exec \"$@\"",
        group.path.display()
    );
    let mut command = Command::new("sh");
    command
        .args(["-c", &script, "sh"])
        .arg(std::env::current_exe()?);
    command
        .arg("many")
        .arg(disk.path().join("store"))
        .arg(keys.to_string());
    guard.mark(&mut command);
    let ended = process::run(&mut command, MEMORY_TIME_MAX)?;
    counts.check(ended.is_success());
    counts.add("keys-under-memory-cap", keys);
    if !ended.is_success() {
        whats.push(format!(
            "{keys} keys in {MEMORY_BYTES} bytes: {}",
            what_of(&ended)
        ));
    }
    Ok(())
}

/// A control group with little memory, its page cache included.
struct Group {
    path: PathBuf,
}

impl Group {
    fn new() -> Fallible<Self> {
        let path = Path::new(CGROUP).join(format!("idemlog-rel-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        let group = Group { path };
        std::fs::write(
            group.path.join("memory.limit_in_bytes"),
            MEMORY_BYTES.to_string(),
        )?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Empty by now; the kernel removes it.
        std::fs::remove_dir(&self.path).unwrap_or_default();
    }
}

fn what_of(ended: &Ended) -> String {
    let bad = ended.stdout.lines().find(|line| line.starts_with("BAD "));
    format!(
        "{:?} {}",
        ended.how,
        bad.unwrap_or_else(|| ended.last_line())
    )
}
