//! Which plots there are.

use super::data::{Data, show_keys};
use super::svg::{self, Bar, Kind};
use crate::store;

/// File name, scenario, row, figure, title, unit.
type Chart = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
);

const CHARTS: &[Chart] = &[
    (
        "lazy-cpu",
        "lazy",
        "single",
        "cpu_us_per_op",
        "Lazy single inserts: CPU",
        "us an operation, less is better",
    ),
    (
        "lazy-batch-cpu",
        "lazy",
        "batch1000",
        "cpu_us_per_op",
        "Lazy batches of 1000: CPU",
        "us an operation, less is better",
    ),
    (
        "disk",
        "lazy",
        "batch1000",
        "disk_bytes_per_key",
        "Disk",
        "bytes a key, less is better",
    ),
    (
        "durable-1",
        "durable",
        "callers1",
        "p50_us",
        "Durable, one caller: p50",
        "us, less is better",
    ),
    (
        "durable-64",
        "durable",
        "callers64",
        "ops_per_s",
        "Durable, 64 callers",
        "operations a second, more is better",
    ),
    (
        "durable-batch",
        "durable",
        "batch1000",
        "ops_per_s",
        "Durable batches of 1000",
        "keys a second, more is better",
    ),
    (
        "lookup-hit",
        "lookup",
        "warm",
        "hit_cpu_us",
        "Look-up of a duplicate, warm: CPU",
        "us, less is better",
    ),
    (
        "lookup-miss",
        "lookup",
        "warm",
        "miss_cpu_us",
        "Look-up of an absent key, warm: CPU",
        "us, less is better",
    ),
    (
        "reopen-kill",
        "reopen",
        "kill",
        "first_insert_ms",
        "Reopen after SIGKILL",
        "ms until the first insert, less is better",
    ),
    (
        "expire",
        "expire",
        "half",
        "cpu_us_per_expired",
        "Expiry of the oldest half: CPU",
        "us an expired key, less is better",
    ),
];

/// File name, title, picture: those that have something to show.
pub(crate) fn all(data: &Data) -> Vec<(String, String, String)> {
    let made = CHARTS
        .iter()
        .filter_map(|(name, scenario, row, figure, title, unit)| {
            let keys = data.size(scenario, row);
            let bars = bars(data, scenario, row, keys, figure);
            let title = format!("{title}, {} keys", show_keys(keys));
            let picture = svg::bars(&title, unit, &bars);
            (!bars.is_empty()).then(|| ((*name).to_owned(), title, picture))
        });
    let mut made: Vec<_> = made.collect();
    made.extend(sizes(data));
    made
}

fn bars(data: &Data, scenario: &str, row: &str, keys: u64, figure: &str) -> Vec<Bar> {
    let all = store::NAMES.iter().filter_map(|store| {
        Some(Bar {
            label: (*store).to_owned(),
            value: data.figures(scenario, row, keys, store)?.get(figure)?,
            kind: Kind::of(store),
        })
    });
    all.collect()
}

/// CPU by number of keys, where more than one was measured.
fn sizes(data: &Data) -> Option<(String, String, String)> {
    let sizes = data.sizes("lazy", "batch1000");
    if sizes.len() < 2 {
        return None;
    }
    let bars: Vec<Bar> = ["ramlog", "idemlog", "lmdb", "rocksdb"]
        .iter()
        .flat_map(|store| {
            sizes.iter().filter_map(move |keys| {
                Some(Bar {
                    label: format!("{store}, {}", show_keys(*keys)),
                    value: data
                        .figures("lazy", "batch1000", *keys, store)?
                        .get("cpu_us_per_op")?,
                    kind: Kind::of(store),
                })
            })
        })
        .collect();
    let title = "Lazy batches of 1000 by number of keys: CPU".to_owned();
    let picture = svg::bars(&title, "us an operation, less is better", &bars);
    Some(("sizes".to_owned(), title, picture))
}
