//! What a claim answered, for scripts: a ticket, or the reason why there is none.

use std::time::Duration;

use idemlog::{Done, Doubt, Owner, Previous, Ticket};

use crate::exit::{Code, Stop};
use crate::output::{shell_word, show_bytes, show_duration};

/// The answer of a detached claim.
pub(crate) enum Answer {
    Claimed {
        how: &'static str,
        attempt: u32,
        previous: Option<Previous>,
        ticket: Ticket,
    },
    Busy {
        attempt: u32,
        owner: Owner,
        lease_left: Duration,
    },
    Duplicate(Done),
    Backoff {
        after: Duration,
        error: Vec<u8>,
    },
    Rejected {
        error: Vec<u8>,
    },
    Dead {
        attempts: u32,
        error: Vec<u8>,
    },
    InDoubt(Doubt),
    Mismatch,
}

impl Answer {
    /// Returns the line and code of every answer that hands out nothing.
    pub(crate) fn refusal(&self, namespace: &str, key: &[u8]) -> Option<Stop> {
        let shown = show_bytes(key);
        let (code, text) = match self {
            Answer::Claimed { .. } | Answer::Duplicate(_) => return None,
            Answer::Busy {
                attempt,
                owner,
                lease_left,
            } => (
                Code::NotNow,
                format!(
                    "busy: key={shown} attempt={attempt} pid={} lease_left={}; ask again then",
                    owner.pid,
                    show_duration(*lease_left)
                ),
            ),
            Answer::Backoff { after, error } => (
                Code::NotNow,
                format!(
                    "backoff: key={shown} error={}; ask again in {}",
                    show_bytes(error),
                    show_duration(*after)
                ),
            ),
            Answer::Rejected { error } => (
                Code::Refused,
                format!(
                    "rejected: key={shown} error={}; use another key",
                    show_bytes(error)
                ),
            ),
            Answer::Dead { attempts, error } => (
                Code::Refused,
                format!(
                    "dead: key={shown} attempts={attempts} error={}; look into it, then forget it",
                    show_bytes(error)
                ),
            ),
            Answer::InDoubt(doubt) => (Code::InDoubt, in_doubt(namespace, key, doubt)),
            Answer::Mismatch => (
                Code::Mismatch,
                format!("mismatch: key={shown} stands for something else; use another key"),
            ),
        };
        Some(Stop::new(code, text))
    }
}

/// Says how a doubt is ended, as a line to copy.
fn in_doubt(namespace: &str, key: &[u8], doubt: &Doubt) -> String {
    format!(
        "in doubt: key={} attempt={} evidence={}; find out whether it happened, then: idemlog \
         resolve --namespace {} --key {} --epoch {} applied|not-applied|abandon",
        show_bytes(key),
        doubt.attempt,
        show_bytes(&doubt.evidence),
        shell_word(namespace.as_bytes()),
        shell_word(key),
        doubt.epoch
    )
}
