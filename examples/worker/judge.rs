//! Judges what happened. Knows messages and effects, and nothing of idemlog.

use std::collections::{BTreeMap, BTreeSet};

use crate::world::{Class, Entry, Message};

pub(crate) struct Judgement {
    pub(crate) messages: [u64; 4],
    pub(crate) effects: [u64; 4],
    pub(crate) is_once: [bool; 4],
    pub(crate) faults: Vec<String>,
}

/// Every message has exactly one effect, and everybody was told of that one.
///
/// `reports` are the receipts with which messages were acknowledged, `outcomes` what the
/// store keeps of messages whose only effect is that.
pub(crate) fn judge(
    messages: &BTreeMap<String, Message>,
    entries: &[Entry],
    reports: &[(String, String)],
    outcomes: &[(String, String)],
) -> Judgement {
    let mut receipts: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut balances: BTreeMap<usize, i64> = BTreeMap::new();
    for entry in entries {
        receipts.entry(&entry.key).or_default().push(&entry.receipt);
        *balances.entry(entry.account).or_default() += entry.amount.cast_signed();
    }
    for (key, receipt) in outcomes {
        receipts.entry(key).or_default().push(receipt);
    }
    let mut told: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (key, receipt) in reports {
        told.entry(key).or_default().insert(receipt);
    }
    let mut judgement = Judgement {
        messages: [0; 4],
        effects: [0; 4],
        is_once: [true; 4],
        faults: Vec::new(),
    };
    for (key, message) in messages {
        let class = message.class as usize;
        let receipts = receipts.remove(key.as_str()).unwrap_or_default();
        let told = told.remove(key.as_str()).unwrap_or_default();
        judgement.messages[class] += 1;
        judgement.effects[class] += receipts.len() as u64;
        if message.class != Class::Internal {
            *balances.entry(message.account).or_default() -= message.amount.cast_signed();
        }
        let is_once = receipts.len() == 1 && told.iter().eq(receipts.iter());
        if !is_once {
            judgement.is_once[class] = false;
            judgement.faults.push(format!(
                "{key} ({}): effects {receipts:?}, acknowledged with {told:?}",
                message.class.name()
            ));
        }
    }
    for key in receipts.keys().chain(told.keys()) {
        judgement
            .faults
            .push(format!("{key}: an effect without a message"));
    }
    for (account, amount) in balances.iter().filter(|(_, amount)| **amount != 0) {
        judgement
            .faults
            .push(format!("account {account}: wrong by {amount}"));
    }
    judgement
}
