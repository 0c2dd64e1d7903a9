//! Tickets: the printable form of a claim that goes on without its guard.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::claim::Commit;
use super::class::EffectClass;
use super::namespace::Namespace;
use crate::error::{Error, Result};
use crate::key::{check_key, check_namespace};
use crate::stamp::Stamp;
use crate::verdict::{Change, CommitVerdict, Failure};

/// Names one claim: namespace, key and epoch. It is no secret and no proof: whoever can open the
/// store could make one.
///
/// It prints as one word, `t1-<epoch>-<namespace>-<key>`, all in hexadecimal, and parses back.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    namespace: String,
    key: Vec<u8>,
    epoch: Stamp,
}

impl Ticket {
    pub(crate) fn new(namespace: &str, key: &[u8], epoch: Stamp) -> Self {
        Ticket {
            namespace: namespace.to_owned(),
            key: key.to_vec(),
            epoch,
        }
    }

    /// Returns the namespace's name.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the key.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// Returns the epoch.
    pub fn epoch(&self) -> Stamp {
        self.epoch
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t1-{:x}-", self.epoch.get())?;
        self.namespace
            .bytes()
            .try_for_each(|b| write!(f, "{b:02x}"))?;
        f.write_str("-")?;
        self.key.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl FromStr for Ticket {
    type Err = Error;

    fn from_str(text: &str) -> Result<Ticket> {
        let bad = || Error::invalid("not a ticket: expected t1-EPOCH-NAMESPACE-KEY in hexadecimal");
        let mut words = text.trim().split('-');
        let (Some("t1"), Some(epoch), Some(namespace), Some(key), None) = (
            words.next(),
            words.next(),
            words.next(),
            words.next(),
            words.next(),
        ) else {
            return Err(bad());
        };
        let epoch = u64::from_str_radix(epoch, 16).map_err(|_e| bad())?;
        let namespace = from_hex(namespace).and_then(|b| String::from_utf8(b).ok());
        let (Some(namespace), Some(key)) = (namespace, from_hex(key)) else {
            return Err(bad());
        };
        check_namespace(&namespace)?;
        check_key(&key)?;
        Ok(Ticket {
            namespace,
            key,
            epoch: Stamp::from_u64(epoch),
        })
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u32>> = text.chars().map(|c| c.to_digit(16)).collect();
    let digits = digits.filter(|d| d.len() % 2 == 0)?;
    digits
        .chunks_exact(2)
        .map(|pair| match pair {
            [high, low] => u8::try_from(high * 16 + low).ok(),
            _ => None,
        })
        .collect()
}

impl<C: EffectClass> Namespace<C> {
    /// Starts a claim by its ticket; see [`super::claim::Claim::start`].
    ///
    /// # Errors
    /// `Invalid` for a ticket of another namespace, `Poisoned`, `Closed`, `Io`.
    pub fn start_ticket(&self, ticket: &Ticket, evidence: &[u8]) -> Result<Change> {
        self.check_ticket(ticket)?;
        self.start_epoch(&ticket.key, ticket.epoch, evidence)
    }

    /// Prolongs the lease of a claim by its ticket, counted from now.
    ///
    /// # Errors
    /// As [`Namespace::start_ticket`].
    pub fn renew_ticket(&self, ticket: &Ticket, lease: Duration) -> Result<Change> {
        self.check_ticket(ticket)?;
        self.renew_epoch(&ticket.key, ticket.epoch, lease)
    }

    /// Commits a claim by its ticket.
    ///
    /// # Errors
    /// As [`Namespace::start_ticket`]; also `Invalid` for an outcome over the limit and for a
    /// claim of a class that must be started first.
    pub fn commit_ticket(&self, ticket: &Ticket, commit: Commit) -> Result<CommitVerdict> {
        self.check_ticket(ticket)?;
        self.commit_epoch(&ticket.key, ticket.epoch, commit)
    }

    /// Ends a claim other than by a commit, by its ticket.
    ///
    /// # Errors
    /// As [`Namespace::start_ticket`].
    pub fn fail_ticket(&self, ticket: &Ticket, failure: &Failure) -> Result<Change> {
        self.check_ticket(ticket)?;
        self.fail_epoch(&ticket.key, ticket.epoch, failure, None)
    }

    fn check_ticket(&self, ticket: &Ticket) -> Result<()> {
        if ticket.namespace == self.name() {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "ticket of another namespace: ticket={} namespace={}",
            ticket.namespace,
            self.name()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_one_word_and_parses_back() {
        let ticket = Ticket::new("pay-ments é", b"order 1\xff-", Stamp::from_u64(0xabc));
        let text = ticket.to_string();
        assert!(
            text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
            "{text}"
        );
        assert_eq!(text.parse::<Ticket>().unwrap(), ticket);
        for bad in [
            "",
            "t1",
            "t2-1-61-61",
            "t1-1-61-6",
            "t1-1--61",
            "t1-1-61-",
            "t1-x-61-61",
        ] {
            assert!(bad.parse::<Ticket>().is_err(), "{bad}");
        }
    }
}
