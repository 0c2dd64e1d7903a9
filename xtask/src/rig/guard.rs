//! No mount, loop device or child outlives a run, however it ends.
//!
//! The guard is a child that waits for its standard input to end. The kernel closes that pipe
//! when the run ends, also by SIGKILL or Ctrl-C; then the child kills what was started with the
//! mark of this run, unmounts, detaches, and removes the directory. The usual end takes the same
//! way, so the way is always tried.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, getppid, kill_process};

use crate::context::Fallible;

/// The word that makes this program a guard.
pub(crate) const WORD: &str = "guard";
/// In the environment of every child that may use a mount of the run.
const MARK: &str = "IDEMLOG_RIG";
const ROUNDS_MAX: usize = 100;

pub(crate) struct Guard {
    child: Child,
    dir: PathBuf,
}

impl Guard {
    /// Watches over a new directory below this one.
    pub(crate) fn new(scratch: &Path) -> Fallible<Self> {
        let dir = tempfile::Builder::new()
            .prefix("rig-")
            .tempdir_in(scratch)?
            .keep();
        let child = Command::new(std::env::current_exe()?)
            .arg(WORD)
            .arg(&dir)
            .stdin(Stdio::piped())
            // Out of reach of the terminal's signals.
            .process_group(0)
            .spawn()?;
        Ok(Guard { child, dir })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Makes a child one of this run.
    pub(crate) fn mark(&self, command: &mut Command) {
        command.env(MARK, &self.dir);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if !self.child.wait().is_ok_and(|status| status.success()) {
            eprintln!("the guard could not clean {}", self.dir.display());
        }
    }
}

/// What the child does.
pub(crate) fn main(dir: &str) -> ExitCode {
    let parent = getppid();
    let mut nothing = Vec::new();
    std::io::stdin()
        .read_to_end(&mut nothing)
        .unwrap_or_default();
    let dir = Path::new(dir);
    for round in 0..ROUNDS_MAX {
        kill_marked(dir);
        let mounts = mounts_below(dir);
        for mount in mounts.iter().rev() {
            // What is still busy after a while goes lazily, before anything is left behind.
            let lazy = if round > ROUNDS_MAX / 2 { "-l" } else { "-n" };
            quiet(Command::new("umount").arg(lazy).arg(mount));
        }
        let loops = loops_below(dir);
        for name in &loops {
            quiet(Command::new("losetup").arg("-d").arg(name));
        }
        if mounts_below(dir).is_empty() && loops_below(dir).is_empty() {
            let removed = std::fs::remove_dir_all(dir);
            if getppid() != parent {
                // The run was killed: its scratch directory, empty by now, is left to us.
                drop(dir.parent().map(std::fs::remove_dir));
            }
            return if removed.is_ok() || !dir.exists() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            };
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    ExitCode::FAILURE
}

fn quiet(command: &mut Command) {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // What matters is whether the mount is still there in the next round.
    drop(command.status());
}

/// Mount points below the directory, in the order in which they were mounted.
fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(1));
    points
        .map(PathBuf::from)
        .filter(|point| point.starts_with(dir))
        .collect()
}

/// Loop devices whose file lies below the directory.
fn loops_below(dir: &Path) -> Vec<String> {
    let listed = Command::new("losetup")
        .args(["-l", "-n", "-O", "NAME,BACK-FILE"])
        .output();
    let text = listed.map(|done| String::from_utf8_lossy(&done.stdout).into_owned());
    let text = text.unwrap_or_default();
    let pairs = text
        .lines()
        .filter_map(|line| line.split_once(char::is_whitespace));
    pairs
        .filter(|(_, file)| Path::new(file.trim()).starts_with(dir))
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// Kills the children of the run that are still there.
fn kill_marked(dir: &Path) {
    let mark = format!("{MARK}={}", dir.display());
    let own = std::process::id();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let id = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<i32>().ok());
        let Some(id) = id.filter(|id| u32::try_from(*id) != Ok(own)) else {
            continue;
        };
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        if environment
            .split(|byte| *byte == 0)
            .any(|word| word == mark.as_bytes())
            && let Some(pid) = Pid::from_raw(id)
        {
            kill_process(pid, Signal::KILL).unwrap_or_default();
        }
    }
}
