//! The queue and the ledger: what the kill does not reach.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::random::Random;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Repeatable = 0,
    Probeable = 1,
    NonRepeatable = 2,
    Internal = 3,
}

impl Class {
    pub(crate) const ALL: [Class; 4] = [
        Class::Repeatable,
        Class::Probeable,
        Class::NonRepeatable,
        Class::Internal,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Class::Repeatable => "repeatable",
            Class::Probeable => "probeable",
            Class::NonRepeatable => "non-repeatable",
            Class::Internal => "internal",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Class> {
        Class::ALL.into_iter().find(|class| class.name() == name)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) class: Class,
    pub(crate) account: usize,
    pub(crate) amount: u64,
}

/// One charge that happened.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) receipt: String,
    pub(crate) account: usize,
    pub(crate) amount: u64,
}

#[derive(Default)]
pub(crate) struct Ledger {
    pub(crate) entries: Vec<Entry>,
    by_derived_key: HashMap<String, String>,
    /// A key that was probed takes no charge of this epoch or an older one any more.
    closed_epochs: HashMap<String, u64>,
    pub(crate) repeats_count: u64,
    pub(crate) probes_applied: u64,
    pub(crate) probes_not: u64,
}

impl Ledger {
    /// Returns the receipt, or nothing if the charge comes too late.
    pub(crate) fn charge(&mut self, order: &Order<'_>) -> Option<String> {
        if self
            .closed_epochs
            .get(order.key)
            .is_some_and(|closed| order.epoch <= *closed)
        {
            return None;
        }
        // Only the Repeatable target honours the derived key.
        let honours = order.message.class == Class::Repeatable;
        if honours && let Some(receipt) = self.by_derived_key.get(order.derived_key) {
            self.repeats_count += 1;
            return Some(receipt.clone());
        }
        let receipt = format!("receipt-{}", self.entries.len());
        self.by_derived_key
            .insert(order.derived_key.to_owned(), receipt.clone());
        self.entries.push(Entry {
            key: order.key.to_owned(),
            receipt: receipt.clone(),
            account: order.message.account,
            amount: order.message.amount,
        });
        Some(receipt)
    }

    pub(crate) fn probe(&mut self, key: &str, epoch: u64) -> Option<String> {
        self.closed_epochs.insert(key.to_owned(), epoch);
        let receipt = self.receipt_of(key);
        *(if receipt.is_some() {
            &mut self.probes_applied
        } else {
            &mut self.probes_not
        }) += 1;
        receipt
    }

    pub(crate) fn receipt_of(&self, key: &str) -> Option<String> {
        self.entries
            .iter()
            .rfind(|entry| entry.key == key)
            .map(|entry| entry.receipt.clone())
    }
}

/// A request to charge.
pub(crate) struct Order<'a> {
    pub(crate) key: &'a str,
    pub(crate) derived_key: &'a str,
    pub(crate) epoch: u64,
    pub(crate) message: &'a Message,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) deliveries: u64,
    pub(crate) absorbed: u64,
    pub(crate) replayed: u64,
    pub(crate) takeovers: u64,
    pub(crate) in_doubt: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// New messages arrive, and charges time out.
    Open,
    /// No new messages.
    Drain,
    /// No time-outs either, so that no doubt is left.
    Last,
}

pub(crate) enum Next {
    Deliver(String, Message),
    Wait,
    End,
}

pub(crate) struct World {
    pub(crate) phase: Phase,
    pub(crate) messages: BTreeMap<String, Message>,
    pub(crate) ledger: Ledger,
    pub(crate) counts: [Counts; 4],
    /// Every acknowledgement: key and receipt.
    pub(crate) reports: Vec<(String, String)>,
    /// Connections that are open.
    pub(crate) connections: usize,
    random: Random,
    keys: Vec<String>,
    ready: VecDeque<String>,
    delayed: Vec<(Instant, String)>,
    in_flight: usize,
    unsettled: BTreeSet<String>,
    parked: BTreeSet<String>,
}

/// More messages than this without an answer: no new ones for now.
const BACKLOG_MAX: usize = 100;

impl World {
    pub(crate) fn new(seed: u64) -> World {
        World {
            phase: Phase::Open,
            messages: BTreeMap::new(),
            ledger: Ledger::default(),
            counts: Default::default(),
            reports: Vec::new(),
            connections: 0,
            random: Random::new(seed ^ 0x9e37_79b9),
            keys: Vec::new(),
            ready: VecDeque::new(),
            delayed: Vec::new(),
            in_flight: 0,
            unsettled: BTreeSet::new(),
            parked: BTreeSet::new(),
        }
    }

    /// Chooses what to deliver: mostly the next, sometimes one out of order or one again.
    pub(crate) fn next(&mut self) -> Next {
        let now = Instant::now();
        let due: Vec<_> = self.delayed.extract_if(.., |(at, _)| *at <= now).collect();
        self.ready.extend(due.into_iter().map(|(_, key)| key));
        let has_work = !self.unsettled.is_subset(&self.parked) || self.phase == Phase::Open;
        if !has_work {
            return if self.in_flight == 0 {
                Next::End
            } else {
                Next::Wait
            };
        }
        let recent = self.keys.len().min(300);
        let key = if recent > 0 && self.random.chance(15) {
            let back = self.random.index(recent);
            self.keys[self.keys.len() - 1 - back].clone()
        } else if !self.ready.is_empty() {
            let index = self.random.index(self.ready.len().min(8));
            self.ready.remove(index).unwrap_or_default()
        } else if self.phase == Phase::Open
            && self.unsettled.len() < BACKLOG_MAX + self.parked.len()
        {
            self.publish()
        } else {
            return Next::Wait;
        };
        let message = self.messages[&key].clone();
        self.counts[message.class as usize].deliveries += 1;
        self.in_flight += 1;
        Next::Deliver(key, message)
    }

    fn publish(&mut self) -> String {
        let class = Class::ALL[self.random.index(4)];
        let key = format!("order-{:05}", self.keys.len());
        let account = self.random.index(10);
        let amount = self.random.below(100) + 1;
        self.messages.insert(
            key.clone(),
            Message {
                class,
                account,
                amount,
            },
        );
        self.keys.push(key.clone());
        self.unsettled.insert(key.clone());
        key
    }

    pub(crate) fn done(&mut self, key: &str, how: &str, receipt: &str) {
        self.in_flight -= 1;
        self.unsettled.remove(key);
        self.ready.retain(|other| other != key);
        self.reports.push((key.to_owned(), receipt.to_owned()));
        let counts = &mut self.counts[self.messages[key].class as usize];
        match how {
            "replayed" => {
                counts.replayed += 1;
                counts.absorbed += 1;
            }
            "takeover" => counts.takeovers += 1,
            _ => {}
        }
    }

    pub(crate) fn later(&mut self, key: &str, how: &str, after: Duration) {
        if how == "busy" {
            self.counts[self.messages[key].class as usize].absorbed += 1;
        }
        self.in_flight -= 1;
        // A lease is long; who holds it is not. A broker would ask again sooner, too.
        let after = after.min(Duration::from_millis(30));
        if self.unsettled.contains(key) {
            self.delayed.push((Instant::now() + after, key.to_owned()));
        }
    }

    pub(crate) fn hold(&mut self, key: &str) {
        self.in_flight -= 1;
        if self.parked.insert(key.to_owned()) {
            self.counts[self.messages[key].class as usize].in_doubt += 1;
        }
    }

    /// Delivers again what a broken connection left without an answer.
    pub(crate) fn lost(&mut self, key: String) {
        self.in_flight -= 1;
        if self.unsettled.contains(&key) {
            self.ready.push_back(key);
        }
    }

    /// Delivers the parked messages again, for the last time.
    pub(crate) fn unpark(&mut self) {
        self.phase = Phase::Last;
        self.ready.extend(std::mem::take(&mut self.parked));
    }

    pub(crate) fn deliveries(&self) -> u64 {
        self.counts.iter().map(|counts| counts.deliveries).sum()
    }

    pub(crate) fn keys_of(&self, class: Class) -> Vec<String> {
        let of_class = self
            .messages
            .iter()
            .filter(|(_, message)| message.class == class);
        of_class.map(|(key, _)| key.clone()).collect()
    }
}
