//! Children: started in a group of their own, watched by a clock, and judged by how they end.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::context::Fallible;

/// How a child ended, and what it said.
pub(crate) struct Ended {
    pub(crate) how: How,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Code(i32),
    Signal(i32),
    /// It did not end in time and was killed.
    Hung,
}

impl Ended {
    pub(crate) fn is_success(&self) -> bool {
        self.how == How::Code(0)
    }

    /// The last line that says something, for a report.
    pub(crate) fn last_line(&self) -> &str {
        let last = |text: &'_ str| -> Option<usize> {
            text.lines().rev().position(|line| !line.trim().is_empty())
        };
        let from = if last(&self.stderr).is_some() {
            &self.stderr
        } else {
            &self.stdout
        };
        last(from)
            .and_then(|back| from.lines().rev().nth(back))
            .unwrap_or_default()
    }
}

/// Runs a child to its end, or kills it and all it has started when the time is over.
pub(crate) fn run(command: &mut Command, time_max: Duration) -> Fallible<Ended> {
    run_with(command, Stdio::null(), time_max)
}

/// As [`run`], with something to read.
pub(crate) fn run_with(command: &mut Command, stdin: Stdio, time_max: Duration) -> Fallible<Ended> {
    command
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut child = command
        .spawn()
        .map_err(|error| format!("{command:?}: {error}"))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        let stdout = scope.spawn(|| read_all(stdout));
        let stderr = scope.spawn(|| read_all(stderr));
        let (began, mut pause) = (Instant::now(), Duration::from_micros(200));
        let how = loop {
            if let Some(status) = child.try_wait()? {
                break how(status);
            }
            if began.elapsed() > time_max {
                kill_group(child.id());
                child.wait()?;
                break How::Hung;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(5));
        };
        // Whoever still holds the pipes would keep the readers waiting.
        kill_group(child.id());
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(Ended {
            how,
            stdout: text(stdout.join().unwrap_or_default()),
            stderr: text(stderr.join().unwrap_or_default()),
        })
    })
}

/// Runs a command of the system that must succeed; returns what it printed.
pub(crate) fn must(program: &str, words: &[&str]) -> Fallible<String> {
    let ended = run(Command::new(program).args(words), Duration::from_secs(60))?;
    if ended.is_success() {
        return Ok(ended.stdout.trim().to_owned());
    }
    Err(format!(
        "{program} {}: {:?} {}",
        words.join(" "),
        ended.how,
        ended.last_line()
    )
    .into())
}

/// Says whether a program is there.
pub(crate) fn has(program: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|path| path.join(program).is_file())
}

/// CPU seconds of this process and of the children it has waited for.
pub(crate) fn cpu_seconds() -> f64 {
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in parentheses may hold spaces; user, system and the children's times are fields
    // 14 to 17, counted from the pid.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = fields.split_whitespace().skip(11).take(4);
    ticks
        .filter_map(|field| field.parse::<f64>().ok())
        .sum::<f64>()
        / TICKS_PER_SECOND
}

fn how(status: ExitStatus) -> How {
    match (status.code(), status.signal()) {
        (Some(code), _) => How::Code(code),
        (None, signal) => How::Signal(signal.unwrap_or(0)),
    }
}

fn kill_group(id: u32) {
    let group = i32::try_from(id).ok().and_then(Pid::from_raw);
    if let Some(group) = group {
        // Gone already is fine.
        kill_process_group(group, Signal::KILL).unwrap_or_default();
    }
}

fn read_all(from: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(mut from) = from {
        from.read_to_end(&mut bytes).unwrap_or_default();
    }
    bytes
}
