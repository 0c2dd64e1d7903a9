//! The command that `run` starts: found first, ended with its parent, its stdout passed on.
//!
//! This binary starts itself under a hidden word, asks for the parent-death signal, checks that
//! the parent is still there, and only then becomes the command: no effect outlives the process
//! that would commit it. Linux sends that signal when the *thread* that spawned the child ends,
//! so `spawn` is called on the main thread only. It reaches the command itself; what the command
//! starts in its turn is the command's affair.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, ExitStatus, Stdio};

use crate::exit::{Stop, say};

/// The hidden word: `idemlog __exec PARENT -- CMD ..`.
pub(crate) const EXEC_WORD: &str = "__exec";
/// What shells answer for a command that is not there.
const STATUS_NOT_FOUND: u8 = 127;
/// What shells answer for a command that cannot be run.
const STATUS_NOT_RUN: u8 = 126;
/// What shells add to a signal's number.
const STATUS_SIGNAL_START: i32 = 128;
const CHUNK_BYTES: usize = 64 * 1024;

/// Refuses a command that cannot be run, before anything says that it might have been.
pub(crate) fn find(program: &OsStr) -> Result<(), Stop> {
    let shown = program.to_string_lossy();
    let is_path = shown.contains('/');
    let paths: Vec<PathBuf> = if is_path {
        vec![PathBuf::from(program)]
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path)
            .map(|dir| dir.join(program))
            .collect()
    };
    if paths.iter().any(|path| is_executable(path)) {
        return Ok(());
    }
    let place = if is_path {
        "no executable file"
    } else {
        "not in PATH"
    };
    Err(Stop::usage(format!(
        "command={shown}: {place}; nothing was run, the key is free again"
    )))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// Says where this program is.
pub(crate) fn own_program() -> io::Result<PathBuf> {
    // This link works also after an upgrade has replaced the file.
    let own = Path::new("/proc/self/exe");
    if own.exists() {
        return Ok(own.to_path_buf());
    }
    std::env::current_exe()
}

/// Starts the command so that it is killed when this process is. On the main thread only.
pub(crate) fn spawn(command: &[OsString]) -> io::Result<Child> {
    Command::new(own_program()?)
        .arg(EXEC_WORD)
        .arg(std::process::id().to_string())
        .arg("--")
        .args(command)
        .stdout(Stdio::piped())
        .spawn()
}

/// Becomes the command; returns only if that fails.
pub(crate) fn exec(words: &[OsString]) -> ExitCode {
    let (Some(parent), Some(program)) = (words.first(), words.get(2)) else {
        say("idemlog: the hidden word is used by run only");
        return ExitCode::from(STATUS_NOT_RUN);
    };
    if let Err(error) = die_with(parent) {
        say(&format!("idemlog: command not run: {error}"));
        return ExitCode::from(STATUS_NOT_RUN);
    }
    let error = Command::new(program)
        .args(words.get(3..).unwrap_or_default())
        .exec();
    say(&format!(
        "idemlog: command={} not run: {error}",
        program.to_string_lossy()
    ));
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    ExitCode::from(if is_missing {
        STATUS_NOT_FOUND
    } else {
        STATUS_NOT_RUN
    })
}

/// Asks for the signal first and looks second: a parent that died in between is noticed.
fn die_with(parent: &OsStr) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use rustix::process::{Signal, set_parent_process_death_signal};
        set_parent_process_death_signal(Some(Signal::KILL))?;
    }
    let now = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    if parent.to_str().and_then(|text| text.parse().ok()) == Some(now) {
        return Ok(());
    }
    Err(io::Error::other("the process that claimed the key is gone"))
}

/// What a command wrote, as far as it is kept.
pub(crate) struct Captured {
    pub(crate) bytes: Vec<u8>,
    /// There was more than the limit, or it could not all be read.
    pub(crate) is_partial: bool,
}

/// Passes stdout on as it comes, and keeps a copy up to the limit.
pub(crate) fn pass_on(mut from: ChildStdout, bytes_max: usize) -> Captured {
    let mut captured = Captured {
        bytes: Vec::new(),
        is_partial: false,
    };
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut to = Some(io::stdout());
    loop {
        let count = match from.read(&mut chunk) {
            Ok(0) => return captured,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                say(&format!(
                    "idemlog: cannot read the command's stdout: {error}"
                ));
                captured.is_partial = true;
                return captured;
            }
        };
        let part = chunk.get(..count).unwrap_or_default();
        if captured.bytes.len() + count > bytes_max {
            captured.is_partial = true;
        } else {
            captured.bytes.extend_from_slice(part);
        }
        // A reader that went away does not undo the effect: it is still waited for and recorded.
        if let Some(out) = &mut to
            && let Err(error) = out.write_all(part).and_then(|()| out.flush())
        {
            say(&format!("idemlog: stdout is no longer passed on: {error}"));
            to = None;
        }
    }
}

/// Returns a status as shells count it: a signal's number is 128 higher.
pub(crate) fn shell_status(status: ExitStatus) -> i32 {
    let signal = status.signal().map(|signal| STATUS_SIGNAL_START + signal);
    status
        .code()
        .or(signal)
        .unwrap_or(i32::from(STATUS_NOT_RUN))
}
