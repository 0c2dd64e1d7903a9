//! The tables: one line a store, one column a figure.

use std::fmt::Write;

use super::data::{At, Data, show, show_keys};
use crate::store;

/// A column: heading, row of the scenario, figure, and what it is divided by.
type Column = (&'static str, &'static str, &'static str, f64);

const MIB: f64 = 1024.0 * 1024.0;

/// All tables, by the name of their markers.
pub(crate) fn all(data: &Data) -> Vec<(&'static str, String)> {
    vec![
        ("lazy", lazy(data)),
        ("process", of_rows(data, "process", PROCESS)),
        ("durable", durable(data)),
        ("claim", claim(data)),
        ("lookup", of_sizes(data, "lookup", "warm", LOOKUP)),
        ("reopen", of_sizes(data, "reopen", "kill", REOPEN)),
        ("disk", of_sizes(data, "lazy", "batch1000", DISK)),
        ("expire", of_sizes(data, "expire", "half", EXPIRE)),
        ("confined", of_sizes(data, "confined", "tenth", CONFINED)),
        ("settings", settings()),
        ("missing", missing(data)),
    ]
}

const LAZY: &[Column] = &[
    ("CPU us/op, 1 thread", "single", "cpu_us_per_op", 1.0),
    ("batches of 100", "batch100", "cpu_us_per_op", 1.0),
    ("batches of 1000", "batch1000", "cpu_us_per_op", 1.0),
    ("ops/s, 1 thread", "single", "ops_per_s", 1.0),
    ("ops/s, 2 threads", "threads2", "ops_per_s", 1.0),
    ("p50 us", "single", "p50_us", 1.0),
    ("p99 us", "single", "p99_us", 1.0),
    ("p99.9 us", "single", "p999_us", 1.0),
    ("max us", "single", "max_us", 1.0),
];

const DISK: &[Column] = &[
    ("disk B/key, single", "single", "disk_bytes_per_key", 1.0),
    (
        "disk B/key, batches",
        "batch1000",
        "disk_bytes_per_key",
        1.0,
    ),
    (
        "written / payload, single",
        "single",
        "written_per_payload",
        1.0,
    ),
    (
        "written / payload, batches",
        "batch1000",
        "written_per_payload",
        1.0,
    ),
    ("peak RSS MiB", "batch1000", "rss_max_bytes", MIB),
    (
        "peak anonymous MiB",
        "batch1000",
        "anonymous_max_bytes",
        MIB,
    ),
    ("filter files MiB", "batch1000", "own_filter_bytes", MIB),
];

const PROCESS: &[Column] = &[
    ("CPU us/op", "single", "cpu_us_per_op", 1.0),
    ("ops/s", "single", "ops_per_s", 1.0),
    ("p50 us", "single", "p50_us", 1.0),
    ("p99 us", "single", "p99_us", 1.0),
];

const LOOKUP: &[Column] = &[
    ("hit CPU us", "warm", "hit_cpu_us", 1.0),
    ("miss CPU us", "warm", "miss_cpu_us", 1.0),
    ("hit p99 us", "warm", "hit_p99_us", 1.0),
    ("miss p99 us", "warm", "miss_p99_us", 1.0),
    ("cold hit p50 us", "cold", "hit_p50_us", 1.0),
    ("cold miss p50 us", "cold", "miss_p50_us", 1.0),
    ("reads/cold hit", "cold", "hit_device_reads", 1.0),
    ("reads/cold miss", "cold", "miss_device_reads", 1.0),
];

const REOPEN: &[Column] = &[
    ("open after close, ms", "close", "open_ms", 1.0),
    (
        "first insert after close, ms",
        "close",
        "first_insert_ms",
        1.0,
    ),
    ("open after SIGKILL, ms", "kill", "open_ms", 1.0),
    (
        "first insert after SIGKILL, ms",
        "kill",
        "first_insert_ms",
        1.0,
    ),
    ("newest 20 k lost at SIGKILL", "kill", "lost", 1.0),
];

const EXPIRE: &[Column] = &[
    ("CPU us per expired key", "half", "cpu_us_per_expired", 1.0),
    ("foreground throughput kept", "half", "foreground_kept", 1.0),
    ("foreground p99.9 us", "half", "foreground_p999_us", 1.0),
    ("disk before MiB", "half", "disk_before_bytes", MIB),
    ("disk after MiB", "half", "disk_after_bytes", MIB),
    (
        "flushes more than without",
        "half",
        "extra_device_flushes",
        1.0,
    ),
    ("share gone", "half", "expired_gone_share", 1.0),
    ("seconds", "half", "expire_s", 1.0),
];

const CONFINED: &[Column] = &[
    ("data / limit", "tenth", "data_per_limit", 1.0),
    ("reads per new key", "tenth", "new_device_reads", 1.0),
    ("reads per old duplicate", "tenth", "old_device_reads", 1.0),
    ("B read per new key", "tenth", "new_device_read_bytes", 1.0),
    (
        "B read per old duplicate",
        "tenth",
        "old_device_read_bytes",
        1.0,
    ),
    ("new CPU us", "tenth", "new_cpu_us", 1.0),
    ("old CPU us", "tenth", "old_cpu_us", 1.0),
];

/// A Markdown table; lines without any figure are left out.
fn table(headings: &[&str], lines: Vec<(String, Vec<Option<f64>>)>) -> String {
    let mut text = format!(
        "| | {} |\n|---|{}\n",
        headings.join(" | "),
        "---:|".repeat(headings.len())
    );
    let mut any = false;
    for (name, values) in lines {
        if values.iter().all(Option::is_none) {
            continue;
        }
        any = true;
        let cells = values
            .iter()
            .map(|value| value.map_or_else(|| "-".to_owned(), show));
        // Writing to a string cannot fail.
        writeln!(
            text,
            "| {name} | {} |",
            cells.collect::<Vec<_>>().join(" | ")
        )
        .unwrap_or_default();
    }
    if any {
        text
    } else {
        "Not measured yet.\n".to_owned()
    }
}

/// One table of a scenario at one number of keys.
fn at_size(data: &Data, scenario: &str, keys: u64, columns: &[Column]) -> String {
    let headings: Vec<&str> = columns.iter().map(|column| column.0).collect();
    let lines = store::NAMES.iter().map(|store| {
        let values = columns.iter().map(|(_, row, figure, unit)| {
            let at = At {
                scenario,
                row,
                keys,
            };
            Some(data.value(at, store, figure)? / unit)
        });
        (label(store), values.collect())
    });
    table(&headings, lines.collect())
}

/// One table for each number of keys.
fn of_sizes(data: &Data, scenario: &str, row: &str, columns: &[Column]) -> String {
    let sizes = data.sizes(scenario, row);
    if sizes.is_empty() {
        return "Not measured yet.\n".to_owned();
    }
    let mut text = String::new();
    for keys in sizes {
        let rest = at_size(data, scenario, keys, columns);
        writeln!(text, "{} keys:\n\n{rest}", show_keys(keys)).unwrap_or_default();
    }
    text
}

/// One table whose rows have numbers of keys of their own.
fn of_rows(data: &Data, scenario: &str, columns: &[Column]) -> String {
    let headings: Vec<&str> = columns.iter().map(|column| column.0).collect();
    let lines = store::NAMES.iter().map(|store| {
        let values = columns.iter().map(|(_, row, figure, unit)| {
            let keys = data.size(scenario, row);
            Some(
                data.value(
                    At {
                        scenario,
                        row,
                        keys,
                    },
                    store,
                    figure,
                )? / unit,
            )
        });
        (label(store), values.collect())
    });
    table(&headings, lines.collect())
}

fn lazy(data: &Data) -> String {
    of_sizes(data, "lazy", "single", LAZY) + &large(data)
}

/// Sizes that only batches were measured at.
fn large(data: &Data) -> String {
    let singles = data.sizes("lazy", "single");
    let sizes = data.sizes("lazy", "batch1000");
    let sizes = sizes.into_iter().filter(|keys| !singles.contains(keys));
    let columns: &[Column] = &[
        ("CPU us/op", "batch1000", "cpu_us_per_op", 1.0),
        ("ops/s", "batch1000", "ops_per_s", 1.0),
        ("ops/s until idle", "batch1000", "ops_per_s_until_idle", 1.0),
    ];
    let tables = sizes.map(|keys| {
        let rest = at_size(data, "lazy", keys, columns);
        format!("{} keys, batches of 1000:\n\n{rest}\n", show_keys(keys))
    });
    tables.collect()
}

fn durable(data: &Data) -> String {
    let columns: &[Column] = &[
        ("1 caller: p50 us", "callers1", "p50_us", 1.0),
        (
            "device flushes/op",
            "callers1",
            "device_flushes_per_op",
            1.0,
        ),
        ("sync calls/new key", "callers1", "sync_calls_per_key", 1.0),
        ("B written/op", "callers1", "written_bytes_per_op", 1.0),
        ("16 callers: ops/s", "callers16", "ops_per_s", 1.0),
        ("CPU us/op", "callers16", "cpu_us_per_op", 1.0),
        ("64 callers: ops/s", "callers64", "ops_per_s", 1.0),
        ("CPU us/op", "callers64", "cpu_us_per_op", 1.0),
        (
            "device flushes/op",
            "callers64",
            "device_flushes_per_op",
            1.0,
        ),
        ("sync calls/new key", "callers64", "sync_calls_per_key", 1.0),
        ("p99 us", "callers64", "p99_us", 1.0),
        ("batches of 100: keys/s", "batch100", "ops_per_s", 1.0),
        ("batches of 1000: keys/s", "batch1000", "ops_per_s", 1.0),
        ("1000 in flight: ops/s", "inflight1000", "ops_per_s", 1.0),
        ("CPU us/op", "inflight1000", "cpu_us_per_op", 1.0),
    ];
    of_rows(data, "durable", columns)
}

fn claim(data: &Data) -> String {
    let headings = [
        "flushes/op",
        "sync calls/new key",
        "p50 us",
        "p99 us",
        "CPU us/op",
        "B written/op",
    ];
    let figures = [
        "own_flushes_per_op",
        "sync_calls_per_key",
        "p50_us",
        "p99_us",
        "cpu_us_per_op",
        "written_bytes_per_op",
    ];
    let lines = ["repeatable", "internal", "probeable", "nonrepeatable"].map(|row| {
        let keys = data.size("claim", row);
        let at = At {
            scenario: "claim",
            row,
            keys,
        };
        let values = figures
            .iter()
            .map(|figure| data.value(at, "idemlog", figure));
        (row.to_owned(), values.collect())
    });
    table(&headings, lines.into())
}

/// Limits are set apart from stores.
fn label(store: &str) -> String {
    match store {
        "ram" => "RAM hash map, nothing kept (floor)".to_owned(),
        "ramlog" => "RAM hash map + log (**the limit**)".to_owned(),
        "append" => "bare buffered append (floor)".to_owned(),
        "pwrite64" => "bare pwrite of 64 B (floor)".to_owned(),
        "pwrite4k" => "bare pwrite of 4 KiB (floor)".to_owned(),
        "idemlog" => "**idemlog**".to_owned(),
        "idemlog-4m" => "**idemlog**, 4-MiB segments".to_owned(),
        "sled-flush" => "sled, `flush()` alone (not durable)".to_owned(),
        "fjall-grouped" => "fjall behind group commit".to_owned(),
        other => other.to_owned(),
    }
}

fn settings() -> String {
    let mut text = String::new();
    let mut last = "";
    for name in store::NAMES {
        let settings = store::settings(name);
        if !settings.is_empty() && settings != last {
            writeln!(text, "- **{name}**: {settings}.").unwrap_or_default();
            last = settings;
        }
    }
    text
}

fn missing(data: &Data) -> String {
    let lines = data.reasons().into_iter().map(|(reason, stores)| {
        let stores: Vec<&str> = stores.into_iter().collect();
        format!("- {}: {reason}\n", stores.join(", "))
    });
    let text: String = lines.collect();
    if text.is_empty() {
        "Nothing.\n".to_owned()
    } else {
        text
    }
}
