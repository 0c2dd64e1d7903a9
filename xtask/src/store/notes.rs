//! What a workload writes down about its calls, one line each, before and after.
//!
//! ```text
//! ? 17 commit repeatable r-0003      call 17 begins
//! ! 17 ok                            it has answered
//! x 17 maybe Io                      or it has failed: whether it was applied, and the kind
//! = open                             something else worth knowing
//! ```
//!
//! A line is one write, so a crash keeps whole lines.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use idemlog::{Applied, Error};

use crate::context::Fallible;

pub(crate) struct Notes {
    file: File,
    next: AtomicU64,
}

impl Notes {
    /// Numbers calls from this one on: each process of a workload has its own range.
    pub(crate) fn open(path: &Path, first: u64) -> Fallible<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Notes {
            file,
            next: AtomicU64::new(first),
        })
    }

    pub(crate) fn ask(&self, op: Op, space: &str, key: &str) -> Fallible<u64> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.line(&format!("? {id} {} {space} {key}\n", op.name()))?;
        Ok(id)
    }

    pub(crate) fn answered(&self, id: u64, word: &str) -> Fallible<()> {
        self.line(&format!("! {id} {word}\n"))
    }

    pub(crate) fn failed(&self, id: u64, error: &Error) -> Fallible<()> {
        let applied = if error.applied() == Applied::No {
            "no"
        } else {
            "maybe"
        };
        self.line(&format!("x {id} {applied} {:?}\n", error.kind()))
    }

    pub(crate) fn fact(&self, text: &str) -> Fallible<()> {
        self.line(&format!("= {text}\n"))
    }

    /// Writes a line that the device understands.
    pub(crate) fn line(&self, line: &str) -> Fallible<()> {
        (&self.file).write_all(line.as_bytes())?;
        Ok(())
    }
}

/// What can be asked of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    See,
    Forget,
    Claim,
    Start,
    Commit,
    Reject,
    Retry,
    Release,
    Doubt,
    /// Not of a key: everything answered so far becomes durable.
    Sync,
}

impl Op {
    const ALL: [Op; 10] = [
        Op::See,
        Op::Forget,
        Op::Claim,
        Op::Start,
        Op::Commit,
        Op::Reject,
        Op::Retry,
        Op::Release,
        Op::Doubt,
        Op::Sync,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::See => "see",
            Op::Forget => "forget",
            Op::Claim => "claim",
            Op::Start => "start",
            Op::Commit => "commit",
            Op::Reject => "reject",
            Op::Retry => "retry",
            Op::Release => "release",
            Op::Doubt => "doubt",
            Op::Sync => "sync",
        }
    }
}

pub(crate) enum Line<'a> {
    Asked {
        id: u64,
        op: Op,
        space: &'a str,
        key: &'a str,
    },
    Answered {
        id: u64,
        word: &'a str,
    },
    Failed {
        id: u64,
        applied: Applied,
        kind: &'a str,
    },
    Fact(&'a str),
}

/// Reads a line; `None` for one that is not of these.
pub(crate) fn parse(line: &str) -> Option<Line<'_>> {
    let (mark, rest) = line.split_once(' ')?;
    if mark == "=" {
        return Some(Line::Fact(rest));
    }
    let mut words = rest.split(' ');
    let id = words.next()?.parse().ok()?;
    let word = words.next()?;
    match mark {
        "?" => {
            let op = Op::ALL.into_iter().find(|op| op.name() == word)?;
            Some(Line::Asked {
                id,
                op,
                space: words.next()?,
                key: words.next()?,
            })
        }
        "!" => Some(Line::Answered { id, word }),
        "x" => {
            let applied = if word == "no" {
                Applied::No
            } else {
                Applied::Maybe
            };
            Some(Line::Failed {
                id,
                applied,
                kind: words.next()?,
            })
        }
        _ => None,
    }
}
