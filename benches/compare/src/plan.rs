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
pub(crate) const SCENARIOS: &[&str] = &[
    "touch", "lazy", "process", "durable", "claim", "lookup", "reopen", "expire", "confined",
];

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
        planned.extend(match *scenario {
            "touch" => touch(args),
            "lazy" => each(args, |keys| lazy(keys, args.quick)),
            "process" => process(args),
            "durable" => durable(args),
            "claim" => claim(args),
            "lookup" => each(args, lookup),
            "reopen" => each(args, reopen),
            "expire" => expire(args),
            "confined" => confined(args),
            _ => Vec::new(),
        });
    }
    let chosen =
        |list: &[String], name: &str| list.is_empty() || list.iter().any(|one| one == name);
    planned.retain(|planned| {
        chosen(&args.only, &planned.cell.store) && chosen(&args.scenarios, &planned.cell.scenario)
    });
    planned
}

fn each(args: &Args, rows: impl Fn(u64) -> Vec<Planned>) -> Vec<Planned> {
    args.keys.iter().copied().flat_map(rows).collect()
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
        if args.quick && matches!(*name, "callers16" | "batch1000") {
            continue;
        }
        let keys = if args.quick { keys / 20 } else { *keys };
        planned.extend(row("durable", name, keys, stores, durable_bounds(args)));
    }
    // The others have no call that a task could wait for.
    let keys = if args.quick { 50_000 } else { 1_000_000 };
    let bounds = durable_bounds(args);
    planned.extend(row(
        "durable",
        "inflight1000",
        keys,
        &[&["idemlog"]],
        bounds,
    ));
    for planned in &mut planned {
        planned.traced = !args.quick;
    }
    planned
}

/// Keys of a scenario that has a size of its own, unless the command line gives one.
fn own_keys(args: &Args, full: u64, quick: u64) -> u64 {
    match args.keys.first() {
        Some(keys) if args.keys_given => *keys,
        _ if args.quick => quick,
        _ => full,
    }
}

fn touch(args: &Args) -> Vec<Planned> {
    // A gibibyte of lines; a quarter of one where time is short.
    let lines = if args.quick { 4 << 20 } else { 16 << 20 };
    row("touch", "single", lines, &[&["line"]], UNBOUNDED)
}

fn claim(args: &Args) -> Vec<Planned> {
    let keys = if args.quick { 300 } else { 5_000 };
    let classes = ["repeatable", "internal", "probeable", "nonrepeatable"];
    let rows = classes
        .iter()
        .flat_map(|name| row("claim", name, keys, &[&["idemlog"]], UNBOUNDED));
    rows.map(|planned| Planned {
        traced: true,
        ..planned
    })
    .collect()
}

/// Above this many keys only the stores that filled them in time look them up and reopen them.
fn kept_stores(keys: u64) -> &'static [&'static [&'static str]] {
    if keys > KEYS_ALL_MAX {
        &[&["ramlog", "idemlog", "lmdb", "rocksdb"]]
    } else {
        &[&["ramlog"], OURS, PEERS]
    }
}

fn lookup(keys: u64) -> Vec<Planned> {
    let mut planned = row("lookup", "warm", keys, kept_stores(keys), UNBOUNDED);
    let mut cold = row("lookup", "cold", keys, kept_stores(keys), UNBOUNDED);
    // The limit holds all keys in memory after its open: nothing of it is cold.
    cold.retain(|planned| planned.cell.store != "ramlog");
    planned.append(&mut cold);
    planned
}

fn reopen(keys: u64) -> Vec<Planned> {
    let rows = ["close", "kill"];
    rows.iter()
        .flat_map(|name| row("reopen", name, keys, kept_stores(keys), UNBOUNDED))
        .collect()
}

fn expire(args: &Args) -> Vec<Planned> {
    let keys = own_keys(args, 1_000_000, 100_000);
    let bounds = Bounds {
        ops_max: u64::MAX,
        seconds_max: if args.quick { 1 } else { 3 },
    };
    if args.quick {
        return row(
            "expire",
            "half",
            keys,
            &[&["idemlog", "lmdb", "sqlite"]],
            bounds,
        );
    }
    let mut planned = row("expire", "half", keys, &[OURS, PEERS], bounds);
    if !args.keys_given {
        planned.extend(row("expire", "half", 10 * keys, &[&["idemlog"]], bounds));
    }
    planned
}

fn confined(args: &Args) -> Vec<Planned> {
    let keys = own_keys(args, 20_000_000, 100_000);
    row(
        "confined",
        "tenth",
        keys,
        &[&["idemlog", "lmdb", "rocksdb"]],
        UNBOUNDED,
    )
    .into_iter()
    .map(|planned| Planned {
        rounds_max: 1,
        ..planned
    })
    .collect()
}
