//! `idemlog stats`: what the store holds, and whether anything is wrong.

use std::time::Duration;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use idemlog::{Health, OpenReport, Stats};
use serde_json::{Map, Value, json};

use crate::args::Common;
use crate::exit::{Code, Stop};
use crate::output::{print_line, show_duration};

pub(crate) fn stats(common: &Common) -> Result<u8, Stop> {
    let store = common.open_to_read()?;
    let mut namespaces = store.namespaces();
    namespaces.sort_by(|a, b| a.0.cmp(&b.0));
    let stats = store.stats();
    let health = store.health();
    let report = store.open_report().clone();
    store.close()?;
    let namespaces: Vec<_> = namespaces
        .into_iter()
        .map(|(name, kind)| (name, kind.name()))
        .collect();
    if common.json {
        print_line(&to_json(&namespaces, &stats, &health, &report).to_string())?;
    } else {
        print_line(&table(&namespaces, &stats, &health, &report))?;
    }
    Ok(Code::Done as u8)
}

/// Returns the gauges: counters of calls start at each open, so they say nothing here.
fn gauges(stats: &Stats) -> [(&'static str, u64); 9] {
    [
        ("segments_count", stats.segments_count),
        ("log_bytes", stats.log_bytes),
        ("runs_count", stats.runs_count),
        ("fuse_filters_count", stats.fuse_filters_count),
        ("run_bytes", stats.run_bytes),
        ("filter_bytes", stats.filter_bytes),
        ("table_bytes", stats.table_bytes),
        ("unsettled_count", stats.unsettled_count),
        (
            "window_ms",
            u64::try_from(stats.window.as_millis()).unwrap_or(u64::MAX),
        ),
    ]
}

/// Returns what the open found.
fn found(report: &OpenReport) -> [(&'static str, u64); 5] {
    [
        ("replayed_count", report.replayed_count),
        ("dropped_bytes", report.dropped_bytes),
        ("orphans_count", report.orphans_count),
        ("rebuilt_runs_count", report.rebuilt_runs_count),
        (
            "open_ms",
            u64::try_from(report.elapsed.as_millis()).unwrap_or(u64::MAX),
        ),
    ]
}

fn to_json(
    namespaces: &[(String, &str)],
    stats: &Stats,
    health: &Health,
    report: &OpenReport,
) -> Value {
    let mut object = Map::new();
    let kinds: Map<_, _> = namespaces
        .iter()
        .map(|(name, kind)| (name.clone(), json!(kind)))
        .collect();
    object.insert("namespaces".to_string(), Value::Object(kinds));
    for (name, value) in gauges(stats).into_iter().chain(found(report)) {
        object.insert(name.to_string(), json!(value));
    }
    object.insert("clean".to_string(), json!(report.clean));
    object.insert("ok".to_string(), json!(health.ok));
    object.insert("poisoned".to_string(), json!(health.poisoned));
    object.insert("clock_suspect".to_string(), json!(health.clock_suspect));
    object.insert(
        "background_error".to_string(),
        json!(health.background_error),
    );
    Value::Object(object)
}

fn table(
    namespaces: &[(String, &str)],
    stats: &Stats,
    health: &Health,
    report: &OpenReport,
) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    for (name, kind) in namespaces {
        table.add_row([format!("namespace {name}"), (*kind).to_string()]);
    }
    for (name, value) in gauges(stats).into_iter().chain(found(report)) {
        let (name, shown) = match name.strip_suffix("_ms") {
            Some(name) => (name, show_duration(Duration::from_millis(value))),
            None => (name, value.to_string()),
        };
        table.add_row([name.replace('_', " "), shown]);
    }
    let last = if report.clean {
        "clean"
    } else {
        "not clean: a process was killed"
    };
    table.add_row(["last close", last]);
    table.add_row(["health", &health_line(health)]);
    table.trim_fmt()
}

fn health_line(health: &Health) -> String {
    let mut wrong = Vec::new();
    if let Some(cause) = &health.poisoned {
        wrong.push(format!("poisoned: {cause}"));
    }
    if health.clock_suspect {
        wrong.push("the wall clock is further ahead than may be believed".to_string());
    }
    if let Some(error) = &health.background_error {
        wrong.push(format!("background work failed: {error}"));
    }
    if wrong.is_empty() {
        "ok".to_string()
    } else {
        wrong.join("; ")
    }
}
