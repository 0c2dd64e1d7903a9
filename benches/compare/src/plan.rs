//! Which cells there are, and in which order: all stores of a row side by side.

use crate::args::Args;
use crate::cell::Cell;
use crate::scenario::Bounds;

/// A planned cell, and how far it goes.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) cell: Cell,
    pub(crate) bounds: Bounds,
    /// Rounds at most: the largest sizes run once.
    pub(crate) rounds_max: u32,
    /// Whether a short pass under `strace` counts the sync calls.
    pub(crate) traced: bool,
}

/// All scenarios, in the order of the report.
pub(crate) const SCENARIOS: &[&str] = &["lazy", "process", "durable"];

const LIMITS: &[&str] = &["ram", "ramlog", "append"];
const OURS: &[&str] = &["idemlog", "idemlog-4m"];
const PEERS: &[&str] = &[
    "lmdb", "rocksdb", "redb", "sled", "fjall", "sqlite", "redis",
];
/// Peers of the durable rows alone: the one flushes no device, the other groups callers.
const DURABLE_PEERS: &[&str] = &["sled-flush", "fjall-grouped"];

const UNBOUNDED: Bounds = Bounds {
    ops_max: u64::MAX,
    seconds_max: 3600,
};

/// Above this many keys only the stores that can take them run, in batches.
const KEYS_ALL_MAX: u64 = 1_000_000;
const KEYS_MOST_MAX: u64 = 10_000_000;

pub(crate) fn cells(args: &Args) -> Vec<Planned> {
    let mut planned = Vec::new();
    for scenario in SCENARIOS {
        match *scenario {
            "lazy" => args
                .keys
                .iter()
                .for_each(|keys| planned.extend(lazy(*keys, args.quick))),
            "process" => planned.extend(process(args)),
            "durable" => planned.extend(durable(args)),
            _ => {}
        }
    }
    let chosen =
        |list: &[String], name: &str| list.is_empty() || list.iter().any(|one| one == name);
    planned.retain(|planned| {
        chosen(&args.only, &planned.cell.store) && chosen(&args.scenarios, &planned.cell.scenario)
    });
    planned
}

fn row(scenario: &str, row: &str, keys: u64, stores: &[&[&str]], bounds: Bounds) -> Vec<Planned> {
    let stores = stores.iter().copied().flatten();
    stores
        .map(|store| Planned {
            cell: Cell::new(scenario, row, keys, store),
            bounds,
            rounds_max: if keys > KEYS_MOST_MAX { 1 } else { u32::MAX },
            traced: false,
        })
        .collect()
}

fn lazy(keys: u64, quick: bool) -> Vec<Planned> {
    let bounds = UNBOUNDED;
    if keys > KEYS_MOST_MAX {
        let stores: &[&[&str]] = &[&["ramlog", "idemlog", "lmdb", "rocksdb"]];
        return row("lazy", "batch1000", keys, stores, bounds);
    }
    let stores: &[&[&str]] = &[LIMITS, OURS, PEERS];
    if keys > KEYS_ALL_MAX {
        let rows = ["single", "batch1000"];
        return rows
            .iter()
            .flat_map(|name| row("lazy", name, keys, stores, bounds))
            .collect();
    }
    let rows: &[&str] = if quick {
        &["single", "batch100"]
    } else {
        &["single", "batch100", "batch1000", "threads2"]
    };
    rows.iter()
        .flat_map(|name| row("lazy", name, keys, stores, bounds))
        .collect()
}

/// Operations of a durable cell at most, by time.
fn durable_bounds(args: &Args) -> Bounds {
    Bounds {
        ops_max: UNBOUNDED.ops_max,
        seconds_max: if args.quick { 1 } else { 5 },
    }
}

fn process(args: &Args) -> Vec<Planned> {
    let keys = if args.quick { 20_000 } else { 300_000 };
    row(
        "process",
        "single",
        keys,
        &[&["pwrite64", "idemlog", "idemlog-4m"]],
        durable_bounds(args),
    )
}

fn durable(args: &Args) -> Vec<Planned> {
    let rows: &[(&str, u64)] = &[
        ("callers1", 20_000),
        ("callers16", 200_000),
        ("callers64", 200_000),
        ("batch100", 300_000),
        ("batch1000", 1_000_000),
    ];
    let stores: &[&[&str]] = &[
        &["pwrite64", "pwrite4k", "ramlog", "idemlog"],
        PEERS,
        DURABLE_PEERS,
    ];
    let mut planned = Vec::new();
    for (name, keys) in rows {
        let keys = if args.quick { keys / 20 } else { *keys };
        planned.extend(row("durable", name, keys, stores, durable_bounds(args)));
    }
    for planned in &mut planned {
        planned.traced = true;
    }
    planned
}
