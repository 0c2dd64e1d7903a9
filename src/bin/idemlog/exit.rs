//! Exit codes, and the one way a command ends early.

use std::io::{self, Write};
use std::process::ExitCode;

use idemlog::{ErrorKind, KeyState};
use serde_json::json;

/// What a script learns from the exit status; `run` adds 90.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// The call did what it says.
    Done = 0,
    /// The store could not answer or could not write.
    Failed = 1,
    /// The call is wrong.
    Usage = 2,
    /// Busy, or not due: ask again later.
    NotNow = 3,
    /// Nobody knows whether the effect happened.
    InDoubt = 4,
    /// Another fingerprint, another outcome, or a claim that is over.
    Mismatch = 5,
    /// Rejected or dead: it will not be run.
    Refused = 6,
}

impl Code {
    /// Returns what a fenced call means, by what the key is now.
    pub(crate) fn of_fenced(current: &KeyState) -> Code {
        match current {
            KeyState::Pending { .. } | KeyState::Failed { .. } => Code::NotNow,
            KeyState::InDoubt(_) => Code::InDoubt,
            KeyState::Rejected { .. } | KeyState::Dead { .. } => Code::Refused,
            KeyState::Absent | KeyState::Seen | KeyState::Done(_) => Code::Mismatch,
        }
    }
}

/// A command's end other than by doing what it says: one line with the remedy, and a code.
#[derive(Debug)]
pub(crate) struct Stop {
    pub(crate) code: Code,
    message: String,
}

impl Stop {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Stop {
            code,
            message: message.into(),
        }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Stop::new(Code::Usage, message)
    }

    /// Wraps a failure of our own input or output.
    pub(crate) fn io(what: &str, error: &io::Error) -> Self {
        Stop::new(Code::Failed, format!("{what}: {error}"))
    }

    /// Says first what was being done.
    pub(crate) fn while_doing(mut self, what: &str) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Writes the line to stderr and returns the status.
    pub(crate) fn report(&self, as_json: bool, codes_start: u8) -> ExitCode {
        let status = self.code as u8 + codes_start;
        let line = if as_json {
            json!({ "error": self.message, "exit": status }).to_string()
        } else {
            format!("idemlog: {}", self.message)
        };
        say(&line);
        ExitCode::from(status)
    }
}

/// Writes one line to stderr. That nobody reads it changes nothing: the status tells the rest.
pub(crate) fn say(line: &str) {
    drop(writeln!(io::stderr(), "{line}"));
}

impl From<idemlog::Error> for Stop {
    fn from(error: idemlog::Error) -> Self {
        let code = if error.kind() == ErrorKind::Invalid {
            Code::Usage
        } else {
            Code::Failed
        };
        let mut message = error.to_string();
        if let Some(source) = std::error::Error::source(&error) {
            message.push_str(&format!(": {source}"));
        }
        if let Some(remedy) = remedy(error.kind()) {
            message.push_str(&format!("; {remedy}"));
        }
        Stop::new(code, message.replace('\n', " "))
    }
}

/// Returns what the command line adds to the library's own remedy.
fn remedy(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::Locked => Some("wait for that process, or raise --lock-timeout"),
        ErrorKind::Full => Some("free space, then run the same command again"),
        ErrorKind::Damaged => Some("keep a copy of the directory before anything else"),
        ErrorKind::Poisoned => Some("run the same command again"),
        _ => None,
    }
}
