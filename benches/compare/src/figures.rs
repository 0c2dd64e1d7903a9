//! What a cell measured: names with their unit last, and numbers.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Figures(BTreeMap<String, f64>);

impl Figures {
    pub(crate) fn set(&mut self, name: &str, value: f64) {
        self.0.insert(name.to_owned(), value);
    }

    pub(crate) fn count(&mut self, name: &str, value: u64) {
        self.set(name, value as f64);
    }

    pub(crate) fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    pub(crate) fn extend(&mut self, other: Figures) {
        self.0.extend(other.0);
    }

    pub(crate) fn to_json(&self) -> Value {
        let numbers = self.0.iter();
        Value::Object(
            numbers
                .map(|(name, value)| (name.clone(), Value::from(*value)))
                .collect(),
        )
    }

    pub(crate) fn from_json(object: &Map<String, Value>) -> Figures {
        let numbers = object.iter();
        Figures(
            numbers
                .filter_map(|(name, value)| Some((name.clone(), value.as_f64()?)))
                .collect(),
        )
    }

    /// The median of each figure over several rounds.
    pub(crate) fn median(rounds: &[Figures]) -> Figures {
        let mut all: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for round in rounds {
            for (name, value) in &round.0 {
                all.entry(name.clone()).or_default().push(*value);
            }
        }
        let middle = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
        };
        Figures(
            all.into_iter()
                .map(|(name, values)| (name, middle(values)))
                .collect(),
        )
    }
}
