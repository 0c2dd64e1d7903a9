//! Goals beside figures: what was to be reached, what was, and whether that is enough.

use std::fmt::Write;

use super::data::{At, Data, show, show_keys};

/// A goal: its figure, and the bound on it.
struct Goal {
    scenario: String,
    goal: String,
    figure: Option<f64>,
    bound: Bound,
    beside: String,
}

#[derive(Clone, Copy, Debug)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Bound {
    fn holds(self, figure: f64) -> bool {
        match self {
            Bound::AtMost(bound) => figure <= bound,
            Bound::AtLeast(bound) => figure >= bound,
        }
    }
}

/// The table of all goals; a goal that nothing was measured for says so.
pub(crate) fn table(data: &Data) -> String {
    let mut goals = Vec::new();
    lazy(data, &mut goals);
    lazy_tails(data, &mut goals);
    sizes(data, &mut goals);
    durable(data, &mut goals);
    durable_many(data, &mut goals);
    in_flight(data, &mut goals);
    claims(data, &mut goals);
    lookups(data, &mut goals);
    reopens(data, &mut goals);
    memory(data, &mut goals);
    expiry(data, &mut goals);
    confined(data, &mut goals);
    let mut text = String::from(
        "| Scenario | Goal | Figure | Reached | Beside it |\n|---|---|---:|---|---|\n",
    );
    for goal in goals {
        let figure = goal.figure.map_or_else(|| "-".to_owned(), show);
        let reached = match goal.figure {
            None => "not measured",
            Some(figure) if goal.bound.holds(figure) => "yes",
            Some(_) => "**no**",
        };
        // Writing to a string cannot fail.
        writeln!(
            text,
            "| {} | {} | {figure} | {reached} | {} |",
            goal.scenario, goal.goal, goal.beside
        )
        .unwrap_or_default();
    }
    text
}

fn ratio(above: Option<f64>, below: Option<f64>) -> Option<f64> {
    let below = below.filter(|below| *below > 0.0)?;
    Some(above? / below)
}

fn named(found: Option<(&str, f64)>, unit: &str) -> String {
    found.map_or_else(String::new, |(name, value)| {
        format!("{name} {} {unit}", show(value))
    })
}

fn push(
    goals: &mut Vec<Goal>,
    scenario: &str,
    goal: &str,
    figure: Option<f64>,
    bound: Bound,
    beside: String,
) {
    goals.push(Goal {
        scenario: scenario.to_owned(),
        goal: goal.to_owned(),
        figure,
        bound,
        beside,
    });
}

fn lazy(data: &Data, goals: &mut Vec<Goal>) {
    let keys = data.size("lazy", "single");
    for row in ["single", "batch100", "batch1000"] {
        let at = At {
            scenario: "lazy",
            row,
            keys,
        };
        let cpu = |store| data.value(at, store, "cpu_us_per_op");
        let best = data.least(at, "cpu_us_per_op");
        let limit = named(cpu("ramlog").map(|value| ("limit", value)), "us");
        for (store, by_limit, by_peer) in [("idemlog", 1.3, 3.0), ("idemlog-4m", 2.0, 2.0)] {
            let scenario = format!("Buffered, {row}, {}, {store}", show_keys(keys));
            let goal = format!("CPU/op <= {by_limit} x the limit");
            let figure = ratio(cpu(store), cpu("ramlog"));
            push(
                goals,
                &scenario,
                &goal,
                figure,
                Bound::AtMost(by_limit),
                limit.clone(),
            );
            let goal = format!("CPU/op >= {by_peer} x below the best peer");
            let figure = ratio(best.map(|best| best.1), cpu(store));
            push(
                goals,
                &scenario,
                &goal,
                figure,
                Bound::AtLeast(by_peer),
                named(best, "us"),
            );
        }
    }
}

fn lazy_tails(data: &Data, goals: &mut Vec<Goal>) {
    let keys = data.size("lazy", "single");
    let at = At {
        scenario: "lazy",
        row: "single",
        keys,
    };
    let threads = At {
        row: "threads2",
        ..at
    };
    let rate = |at| data.value(at, "idemlog", "ops_per_s");
    let figure = ratio(rate(threads), rate(at));
    let beside = ratio(
        data.value(threads, "ramlog", "ops_per_s"),
        data.value(at, "ramlog", "ops_per_s"),
    );
    let beside = named(beside.map(|value| ("limit", value)), "x");
    push(
        goals,
        "Buffered, 2 threads",
        ">= 1.6 x one thread",
        figure,
        Bound::AtLeast(1.6),
        beside,
    );
    let tail = |store, figure| data.value(at, store, figure);
    let beside = |figure| named(tail("ramlog", figure).map(|value| ("limit", value)), "us");
    let scenario = "Buffered, latency";
    push(
        goals,
        scenario,
        "p99.9 <= 15 us",
        tail("idemlog", "p999_us"),
        Bound::AtMost(15.0),
        beside("p999_us"),
    );
    push(
        goals,
        scenario,
        "max <= 5000 us",
        tail("idemlog", "max_us"),
        Bound::AtMost(5000.0),
        beside("max_us"),
    );
    let process = At {
        scenario: "process",
        row: "single",
        keys: data.size("process", "single"),
    };
    let bare = data.value(process, "pwrite64", "cpu_us_per_op");
    let sum = bare.and_then(|bare| Some(bare + tail("idemlog", "cpu_us_per_op")?));
    let figure = ratio(data.value(process, "idemlog", "cpu_us_per_op"), sum);
    let goal = "CPU/op <= 1.1 x (bare 64-byte write + Buffered)";
    push(
        goals,
        "Process, single",
        goal,
        figure,
        Bound::AtMost(1.1),
        named(sum.map(|v| ("sum", v)), "us"),
    );
}

fn sizes(data: &Data, goals: &mut Vec<Goal>) {
    for row in ["single", "batch1000"] {
        let all = data.sizes("lazy", row);
        let Some((base, larger)) = all.split_first() else {
            continue;
        };
        for keys in larger {
            let at = |keys| At {
                scenario: "lazy",
                row,
                keys,
            };
            let cpu = |keys| data.value(at(keys), "idemlog", "cpu_us_per_op");
            let scenario = format!("Buffered, {row}, {}", show_keys(*keys));
            let goal = format!("CPU/op <= 4 x its own at {}", show_keys(*base));
            push(
                goals,
                &scenario,
                &goal,
                ratio(cpu(*keys), cpu(*base)),
                Bound::AtMost(4.0),
                String::new(),
            );
            let best = data.least(at(*keys), "cpu_us_per_op");
            let figure = ratio(best.map(|best| best.1), cpu(*keys));
            let goal = "CPU/op >= 4 x below the best peer";
            push(
                goals,
                &scenario,
                goal,
                figure,
                Bound::AtLeast(4.0),
                named(best, "us"),
            );
        }
    }
}

fn durable(data: &Data, goals: &mut Vec<Goal>) {
    let at = |row| At {
        scenario: "durable",
        row,
        keys: data.size("durable", row),
    };
    let of = |row, store, figure| data.value(at(row), store, figure);
    let one = "Power, 1 caller";
    let syncs = of("callers1", "idemlog", "sync_calls_per_key");
    push(
        goals,
        one,
        "<= 1.0 flush a new key",
        syncs.map(|v| (v * 100.0).round() / 100.0),
        Bound::AtMost(1.0),
        "sync calls, traced".to_owned(),
    );
    let written = of("callers1", "idemlog", "written_bytes_per_op").map(|bytes| bytes / 1024.0);
    push(
        goals,
        one,
        "<= 4.2 KiB written an operation",
        written,
        Bound::AtMost(4.2),
        String::new(),
    );
    let bare = of("callers1", "pwrite4k", "p50_us");
    let figure = ratio(of("callers1", "idemlog", "p50_us"), bare);
    let beside = named(bare.map(|value| ("bare 4 KiB", value)), "us");
    push(
        goals,
        one,
        "p50 <= 1.15 x bare pwrite + fdatasync",
        figure,
        Bound::AtMost(1.15),
        beside,
    );
}

fn durable_many(data: &Data, goals: &mut Vec<Goal>) {
    let at = |row| At {
        scenario: "durable",
        row,
        keys: data.size("durable", row),
    };
    let of = |row, store, figure| data.value(at(row), store, figure);
    for row in ["callers16", "callers64"] {
        let scenario = format!("Power, {} callers", row.trim_start_matches("callers"));
        against_limit(data, goals, &scenario, at(row));
        let best = data.most(at(row), "ops_per_s");
        let figure = ratio(of(row, "idemlog", "ops_per_s"), best.map(|best| best.1));
        push(
            goals,
            &scenario,
            "above every peer",
            figure,
            Bound::AtLeast(1.0),
            named(best, "ops/s"),
        );
        let cpu = of(row, "idemlog", "cpu_us_per_op");
        let beside = named(
            of(row, "ramlog", "cpu_us_per_op").map(|v| ("limit", v)),
            "us",
        );
        push(
            goals,
            &scenario,
            "<= 20 us CPU/op",
            cpu,
            Bound::AtMost(20.0),
            beside,
        );
    }
    for row in ["batch100", "batch1000"] {
        let scenario = format!("Power, batches of {}", row.trim_start_matches("batch"));
        against_limit(data, goals, &scenario, at(row));
        let best = data.most(at(row), "ops_per_s");
        let figure = ratio(of(row, "idemlog", "ops_per_s"), best.map(|best| best.1));
        let bound = if row == "batch1000" { 2.0 } else { 1.0 };
        let goal = format!(">= {bound} x the best peer");
        push(
            goals,
            &scenario,
            &goal,
            figure,
            Bound::AtLeast(bound),
            named(best, "keys/s"),
        );
    }
}

/// One task with a thousand calls in flight, beside calls that wait for nothing.
fn in_flight(data: &Data, goals: &mut Vec<Goal>) {
    let rate = |scenario, row| {
        let keys = data.size(scenario, row);
        let at = At {
            scenario,
            row,
            keys,
        };
        data.value(at, "idemlog", "ops_per_s")
    };
    let buffered = rate("lazy", "single");
    push(
        goals,
        "Power, one task with 1000 in flight",
        ">= 0.8 x Buffered, single",
        ratio(rate("durable", "inflight1000"), buffered),
        Bound::AtLeast(0.8),
        named(buffered.map(|rate| ("Buffered", rate)), "ops/s"),
    );
}

fn against_limit(data: &Data, goals: &mut Vec<Goal>, scenario: &str, at: At<'_>) {
    let limit = data.value(at, "ramlog", "ops_per_s");
    let figure = ratio(data.value(at, "idemlog", "ops_per_s"), limit);
    let beside = named(limit.map(|value| ("limit", value)), "ops/s");
    push(
        goals,
        scenario,
        ">= 0.9 x the limit's rate",
        figure,
        Bound::AtLeast(0.9),
        beside,
    );
}

fn claims(data: &Data, goals: &mut Vec<Goal>) {
    for (row, flushes) in [
        ("repeatable", 1.0),
        ("internal", 1.0),
        ("probeable", 2.0),
        ("nonrepeatable", 2.0),
    ] {
        let at = At {
            scenario: "claim",
            row,
            keys: data.size("claim", row),
        };
        let figure = data.value(at, "idemlog", "own_flushes_per_op");
        let cpu = data.value(at, "idemlog", "cpu_us_per_op");
        let beside = named(cpu.map(|value| ("CPU", value)), "us");
        let goal = format!("<= {flushes} flushes from claim to commit");
        // A roll of the log may add a flush of its own in thousands.
        let figure = figure.map(|value| (value * 100.0).round() / 100.0);
        push(
            goals,
            &format!("claim, {row}"),
            &goal,
            figure,
            Bound::AtMost(flushes),
            beside,
        );
    }
}

fn lookups(data: &Data, goals: &mut Vec<Goal>) {
    for keys in data.sizes("lookup", "warm") {
        let warm = At {
            scenario: "lookup",
            row: "warm",
            keys,
        };
        for (what, figure) in [("duplicate", "hit_cpu_us"), ("absent key", "miss_cpu_us")] {
            let best = data.least(warm, figure);
            let ours = data.value(warm, "idemlog", figure);
            let scenario = format!(
                "look-up of a{} {what}, warm, {}",
                if what.starts_with('a') { "n" } else { "" },
                show_keys(keys)
            );
            let against = ratio(ours, best.map(|best| best.1));
            push(
                goals,
                &scenario,
                "CPU below every peer: <= 1 x the best",
                against,
                Bound::AtMost(1.0),
                named(best, "us"),
            );
        }
        let cold = At {
            row: "cold",
            ..warm
        };
        let best = data.least(cold, "miss_p50_us");
        let against = ratio(
            data.value(cold, "idemlog", "miss_p50_us"),
            best.map(|best| best.1),
        );
        let scenario = format!("look-up, cold, {}", show_keys(keys));
        push(
            goals,
            &scenario,
            "absent: p50 <= 1 x the best peer",
            against,
            Bound::AtMost(1.0),
            named(best, "us"),
        );
        let reads = data.value(cold, "idemlog", "hit_device_reads");
        let beside = named(
            data.value(cold, "lmdb", "hit_device_reads")
                .map(|v| ("lmdb", v)),
            "reads",
        );
        push(
            goals,
            &scenario,
            "duplicate: <= 2.05 reads",
            reads,
            Bound::AtMost(2.05),
            beside,
        );
    }
}

fn reopens(data: &Data, goals: &mut Vec<Goal>) {
    for keys in data.sizes("reopen", "kill") {
        let at = At {
            scenario: "reopen",
            row: "kill",
            keys,
        };
        let ms = |store| data.value(at, store, "first_insert_ms");
        let beside =
            ["lmdb", "redb"].map(|store| named(ms(store).map(|value| (store, value)), "ms"));
        let scenario = format!("reopen after SIGKILL, {}", show_keys(keys));
        push(
            goals,
            &scenario,
            "first insert <= 1000 ms",
            ms("idemlog"),
            Bound::AtMost(1000.0),
            beside.join(" "),
        );
    }
}

/// Anonymous memory allowed beside 1.2 B a key.
const ANONYMOUS_BASE: f64 = 64.0 * 1024.0 * 1024.0;

fn memory(data: &Data, goals: &mut Vec<Goal>) {
    for keys in data.sizes("lazy", "batch1000") {
        let at = At {
            scenario: "lazy",
            row: "batch1000",
            keys,
        };
        let of = |store, figure| data.value(at, store, figure);
        let count = keys as f64;
        let scenario = format!("memory, {}", show_keys(keys));
        let anonymous = of("idemlog", "anonymous_max_bytes");
        let sum = anonymous.and_then(|bytes| Some(bytes + of("idemlog", "own_filter_bytes")?));
        let figure = sum.map(|sum| sum / (1.2 * count + ANONYMOUS_BASE));
        let beside = named(sum.map(|sum| ("sum", sum / f64::from(1 << 20))), "MiB");
        push(
            goals,
            &scenario,
            "anonymous + filters <= 1 x (1.2 B a key + 64 MiB)",
            figure,
            Bound::AtMost(1.0),
            beside,
        );
        let scenario = format!("disk, {}", show_keys(keys));
        let least = data.least(at, "disk_bytes_per_key");
        push(
            goals,
            &scenario,
            "<= 44 B a key",
            of("idemlog", "disk_bytes_per_key"),
            Bound::AtMost(44.0),
            named(least, "B"),
        );
        filters(data, goals, at);
        let record = ratio(of("idemlog", "own_appended_bytes"), of("idemlog", "keys"));
        let written = ratio(of("idemlog", "written_bytes_per_op"), of("idemlog", "keys"));
        let written = written.and_then(|bytes| Some(bytes * of("idemlog", "ops")?));
        let scenario = format!("bytes written, {}", show_keys(keys));
        let beside = named(record.map(|value| ("record", value)), "B");
        push(
            goals,
            &scenario,
            "<= 2.1 x the record",
            ratio(written, record),
            Bound::AtMost(2.1),
            beside,
        );
    }
}

/// What a new key asks: three lines a fuse filter, one a Bloom filter, and one of the table.
fn filters(data: &Data, goals: &mut Vec<Goal>, at: At<'_>) {
    let of = |figure| data.value(at, "idemlog", figure);
    let fuse = of("own_fuse_filters");
    let bloom = of("own_runs").and_then(|all| Some(all - fuse?));
    let lines = fuse.and_then(|fuse| Some(3.0 * fuse + bloom? + 1.0));
    let scenario = format!("filters that a new key asks, {}", show_keys(at.keys));
    let beside = named(lines.map(|lines| ("together", lines)), "cache lines");
    push(
        goals,
        &scenario,
        "<= 12 fuse filters",
        fuse,
        Bound::AtMost(12.0),
        beside,
    );
    push(
        goals,
        &scenario,
        "<= 4 Bloom filters",
        bloom,
        Bound::AtMost(4.0),
        String::new(),
    );
}

fn expiry(data: &Data, goals: &mut Vec<Goal>) {
    for keys in data.sizes("expire", "half") {
        let at = At {
            scenario: "expire",
            row: "half",
            keys,
        };
        let scenario = format!("expire the oldest half of {}", show_keys(keys));
        let kept = data.most(at, "foreground_kept");
        let figure = data.value(at, "idemlog", "foreground_kept");
        push(
            goals,
            &scenario,
            "foreground >= 0.95",
            figure,
            Bound::AtLeast(0.95),
            named(kept, "kept"),
        );
        let least = data.least(at, "cpu_us_per_expired");
        let figure = data.value(at, "idemlog", "cpu_us_per_expired");
        let goal = "CPU us per expired key below every peer";
        let bound = Bound::AtMost(least.map_or(f64::INFINITY, |least| least.1));
        push(goals, &scenario, goal, figure, bound, named(least, "us"));
        let flushes = data.value(at, "idemlog", "extra_device_flushes");
        push(
            goals,
            &scenario,
            "<= 2 flushes more",
            flushes,
            Bound::AtMost(2.0),
            String::new(),
        );
    }
}

fn confined(data: &Data, goals: &mut Vec<Goal>) {
    for keys in data.sizes("confined", "tenth") {
        let at = At {
            scenario: "confined",
            row: "tenth",
            keys,
        };
        let scenario = format!("data 10 x a memory limit, {}", show_keys(keys));
        for (goal, figure, bound) in [
            ("<= 0.06 reads a new key", "new_device_reads", 0.06),
            ("<= 2.05 reads an old duplicate", "old_device_reads", 2.05),
        ] {
            let beside = named(
                data.value(at, "lmdb", figure).map(|value| ("lmdb", value)),
                "reads",
            );
            let value = data.value(at, "idemlog", figure);
            push(goals, &scenario, goal, value, Bound::AtMost(bound), beside);
        }
    }
}
