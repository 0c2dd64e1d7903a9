//! The finished cells, by name: medians over their rounds.

use std::collections::{BTreeMap, BTreeSet};

use crate::figures::Figures;
use crate::runner::Finished;

/// Every store that is not idemlog, not a limit, and durable where it says so.
pub(crate) const PEERS: &[&str] = &[
    "lmdb",
    "rocksdb",
    "redb",
    "sled",
    "fjall",
    "fjall-grouped",
    "sqlite",
    "redis",
];

#[derive(Debug, Default)]
pub(crate) struct Data {
    /// By scenario, row, keys and store.
    medians: BTreeMap<Name, Figures>,
    missing: BTreeMap<Name, String>,
    rounds_max: usize,
}

type Name = (String, String, u64, String);

impl Data {
    pub(crate) fn new(finished: &[Finished]) -> Data {
        let mut rounds: BTreeMap<Name, Vec<Figures>> = BTreeMap::new();
        let mut data = Data::default();
        for line in finished {
            let cell = &line.cell;
            let name = (
                cell.scenario.clone(),
                cell.row.clone(),
                cell.keys,
                cell.store.clone(),
            );
            match &line.figures {
                Ok(figures) => rounds.entry(name).or_default().push(figures.clone()),
                Err(reason) => {
                    data.missing.insert(name, reason.clone());
                }
            }
        }
        data.rounds_max = rounds.values().map(Vec::len).max().unwrap_or(0);
        let medians = rounds
            .into_iter()
            .map(|(name, all)| (name, Figures::median(&all)));
        data.medians = medians.collect();
        data
    }

    pub(crate) fn rounds_max(&self) -> usize {
        self.rounds_max
    }

    /// The numbers of keys that a scenario's row was measured at, smallest first.
    pub(crate) fn sizes(&self, scenario: &str, row: &str) -> Vec<u64> {
        let names = self
            .medians
            .keys()
            .filter(|name| name.0 == scenario && name.1 == row);
        names
            .map(|name| name.2)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// The smallest number of keys of a row: the one that the durable rows have alone.
    pub(crate) fn size(&self, scenario: &str, row: &str) -> u64 {
        self.sizes(scenario, row).first().copied().unwrap_or(0)
    }

    pub(crate) fn figures(
        &self,
        scenario: &str,
        row: &str,
        keys: u64,
        store: &str,
    ) -> Option<&Figures> {
        let name = (scenario.to_owned(), row.to_owned(), keys, store.to_owned());
        self.medians.get(&name)
    }

    pub(crate) fn value(&self, at: At<'_>, store: &str, figure: &str) -> Option<f64> {
        self.figures(at.scenario, at.row, at.keys, store)?
            .get(figure)
    }

    /// The peer with the smallest figure.
    pub(crate) fn least(&self, at: At<'_>, figure: &str) -> Option<(&'static str, f64)> {
        let all = PEERS
            .iter()
            .filter_map(|peer| Some((*peer, self.value(at, peer, figure)?)));
        all.min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The peer with the largest figure.
    pub(crate) fn most(&self, at: At<'_>, figure: &str) -> Option<(&'static str, f64)> {
        let all = PEERS
            .iter()
            .filter_map(|peer| Some((*peer, self.value(at, peer, figure)?)));
        all.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Each reason why something is missing, with how many cells it holds for and of which
    /// stores.
    pub(crate) fn reasons(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut reasons: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (name, reason) in &self.missing {
            if !self.medians.contains_key(name) {
                reasons.entry(reason).or_default().insert(&name.3);
            }
        }
        reasons
    }
}

/// A row of a scenario at one number of keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At<'a> {
    pub(crate) scenario: &'a str,
    pub(crate) row: &'a str,
    pub(crate) keys: u64,
}

/// Writes a figure so that three digits of it can be trusted by eye.
pub(crate) fn show(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if size >= 10_000_000.0 {
        format!("{:.1} M", value / 1e6)
    } else if size >= 1_000_000.0 {
        format!("{:.2} M", value / 1e6)
    } else if size >= 10_000.0 {
        format!("{:.0} k", value / 1e3)
    } else if size >= 1_000.0 {
        format!("{:.2} k", value / 1e3)
    } else if size >= 100.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else if size >= 0.1 {
        format!("{value:.2}")
    } else {
        format!("{value:.4}")
    }
}

/// `1 M`, `100 k`.
pub(crate) fn show_keys(keys: u64) -> String {
    match keys {
        _ if keys >= 1_000_000 && keys.is_multiple_of(1_000_000) => {
            format!("{} M", keys / 1_000_000)
        }
        _ if keys >= 1_000 && keys.is_multiple_of(1_000) => format!("{} k", keys / 1_000),
        _ => keys.to_string(),
    }
}
