//! `idemlog run`: a command that runs once per key.
//!
//! A. Nothing is run before the claim is written and, for Probeable and NonRepeatable, the start
//!    is durable.
//! B. The store is open only while claiming, renewing and recording; between them the claim is
//!    detached, so that its lease alone keeps others away.
//! C. A status of 0 is committed. Of any other only the class, or `--retry-on`, says that the
//!    command may run again; else nobody knows what it did.

use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use idemlog::{
    Change, Commit, Done, Failure, KeyState, NamespaceKind, OUTCOME_BYTES_DEFAULT, Outcome, Ticket,
};
use serde_json::json;

use crate::answer::Answer;
use crate::args::{self, Common};
use crate::calls::{
    applied, claim_options, committed, namespace_options, open_to_claim, with_ticket,
};
use crate::child::{self, Captured};
use crate::exit::{Code, Stop, say};
use crate::frame::{FRAME_BYTES, Ran};
use crate::output::{print, show_duration, state_line};
use crate::renewer::{LeaseEnd, Renewer};
use crate::space::{Claims, NAMESPACE_DEFAULT};

/// The largest stdout that is kept, in bytes.
const STDOUT_BYTES_MAX: usize = OUTCOME_BYTES_DEFAULT - FRAME_BYTES;
/// The pause between attempts to record what happened.
const RECORD_PAUSE: Duration = Duration::from_millis(200);
/// Statuses that are our own answers; a command's are changed to the one below them.
const OWN_STATUSES: std::ops::RangeInclusive<i32> = 91..=96;
const STATUS_BELOW_OWN: u8 = 90;

struct Job<'a> {
    common: &'a Common,
    options: &'a args::Run,
    kind: NamespaceKind,
    ticket: Ticket,
    lease_end: LeaseEnd,
}

pub(crate) fn run(common: &Common, options: &args::Run) -> Result<u8, Stop> {
    let program = options
        .command
        .first()
        .ok_or_else(|| Stop::usage("no command; add -- CMD"))?;
    let key = options.key.as_bytes();
    let opened = open_to_claim(common, &options.claiming)?;
    let end_boot_ms = LeaseEnd::from_now(options.claiming.lease);
    let answer = opened
        .claims
        .claim(key, &claim_options(&options.claiming))?;
    if let Some(refusal) = answer.refusal(common.namespace_or(NAMESPACE_DEFAULT), key) {
        opened.store.close()?;
        return Err(refusal);
    }
    let ticket = match answer {
        Answer::Claimed { ticket, .. } => ticket,
        Answer::Duplicate(done) => {
            opened.store.close()?;
            return replay(common, done);
        }
        _ => return Err(Stop::new(Code::Failed, "an answer without a meaning")),
    };
    let found = child::find(program);
    if found.is_err() {
        applied(opened.claims.fail(&ticket, Failure::Release)?, key)?;
    } else if opened.starts_first() {
        let evidence = format!(
            "run pid={} command={}",
            std::process::id(),
            program.display()
        );
        applied(opened.claims.start(&ticket, evidence.as_bytes())?, key)?;
    }
    let kind = opened.kind;
    opened.store.close()?;
    found?;
    let lease_end = LeaseEnd::new(end_boot_ms);
    Job {
        common,
        options,
        kind,
        ticket,
        lease_end,
    }
    .run()
}

/// Gives a duplicate what the command left behind.
fn replay(common: &Common, done: Done) -> Result<u8, Stop> {
    let ran = match &done.outcome {
        Outcome::Kept(bytes) => Ran::decode(bytes),
        Outcome::Dropped => {
            say("idemlog: duplicate: it was committed without its stdout, nothing to replay");
            Ran {
                status: 0,
                stdout: Vec::new(),
            }
        }
    };
    print(&ran.stdout)?;
    if common.json {
        say(&json!({ "verdict": "duplicate", "attempt": done.attempt }).to_string());
    }
    Ok(own_status(ran.status))
}

impl Job<'_> {
    fn run(self) -> Result<u8, Stop> {
        let mut child = match child::spawn(&self.options.command) {
            Ok(child) => child,
            Err(error) => {
                self.record_failure(Failure::Release)?;
                return Err(Stop::io("cannot start myself to run the command", &error));
            }
        };
        let lease = self.options.claiming.lease;
        let renewer = Renewer::start(self.common, &self.ticket, lease, &self.lease_end)
            .inspect_err(|error| say(&format!("idemlog: the claim is not renewed: {error}")));
        let captured = match child.stdout.take() {
            Some(stdout) => child::pass_on(stdout, STDOUT_BYTES_MAX),
            None => Captured {
                bytes: Vec::new(),
                is_partial: true,
            },
        };
        let status = child.wait().map(child::shell_status);
        if let Ok(renewer) = renewer {
            renewer.stop();
        }
        match status {
            Ok(0) => self.commit(captured),
            Ok(status) => self.fail(status),
            Err(error) => {
                let evidence = format!("cannot wait for the command: {error}");
                self.record_failure(Failure::unknown(&evidence))?;
                Err(Stop::new(Code::Failed, evidence))
            }
        }
    }

    fn commit(&self, captured: Captured) -> Result<u8, Stop> {
        let commit = || {
            if captured.is_partial {
                Commit::without_outcome()
            } else {
                Commit::new(
                    Ran {
                        status: 0,
                        stdout: captured.bytes.clone(),
                    }
                    .encode(),
                )
            }
        };
        if captured.is_partial {
            say(&format!(
                "idemlog: stdout is over bytes_max={STDOUT_BYTES_MAX}: committed without outcome, \
                 a duplicate replays nothing"
            ));
        }
        let retain = self.options.retain;
        let verdict =
            self.record(|claims| claims.commit(&self.ticket, commit().retention(retain)))?;
        let word = committed(verdict, self.ticket.key())
            .map_err(|stop| stop.while_doing("the command succeeded, but its claim was over"))?;
        if self.common.json {
            say(&json!({ "verdict": word }).to_string());
        }
        Ok(Code::Done as u8)
    }

    fn fail(&self, status: i32) -> Result<u8, Stop> {
        let text = format!("command ended with status {status}");
        let surely_not = u8::try_from(status).is_ok_and(|s| self.options.retry_on.contains(&s));
        let failure = if surely_not || self.kind == NamespaceKind::Repeatable {
            Failure::retryable(Duration::ZERO, &text)
        } else {
            Failure::unknown(&text)
        };
        let state = self.record_failure(failure)?;
        let line = state_line(self.ticket.key(), &state);
        if self.common.json {
            say(
                &json!({ "verdict": "failed", "status": status, "state": state.name() })
                    .to_string(),
            );
        } else {
            say(&format!("idemlog: {text}; now {line}"));
        }
        Ok(own_status(status))
    }

    fn record_failure(&self, failure: Failure) -> Result<KeyState, Stop> {
        match self.record(|claims| claims.fail(&self.ticket, failure.clone()))? {
            Change::Applied(state) | Change::Fenced { current: state } => Ok(state),
        }
    }

    /// Makes one call, again and again until the lease ends; then leaves it to the ticket.
    fn record<T>(&self, call: impl Fn(&dyn Claims) -> idemlog::Result<T>) -> Result<T, Stop> {
        let mut is_first = true;
        loop {
            let options = namespace_options(&self.options.claiming);
            let stop = match with_ticket(self.common, &self.ticket, options, &call) {
                Ok(answer) => return Ok(answer),
                Err(stop) => stop,
            };
            let left = self.lease_end.left();
            if left.is_zero() || stop.code != Code::Failed {
                return Err(stop.while_doing(&format!(
                    "not recorded, finish it with idemlog commit or idemlog fail and ticket={}",
                    self.ticket
                )));
            }
            if is_first {
                say(&format!(
                    "idemlog: not recorded yet, trying for {}: {}",
                    show_duration(left),
                    stop.message()
                ));
                is_first = false;
            }
            std::thread::park_timeout(RECORD_PAUSE.min(left));
        }
    }
}

/// Returns the status to exit with: the command's, but never one that means an answer of ours.
fn own_status(status: i32) -> u8 {
    if OWN_STATUSES.contains(&status) {
        say(&format!(
            "idemlog: the command's status={status} is shown as {STATUS_BELOW_OWN}"
        ));
        return STATUS_BELOW_OWN;
    }
    u8::try_from(status).unwrap_or(STATUS_BELOW_OWN)
}
