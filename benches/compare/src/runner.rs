//! Runs cells in child processes, and keeps what they found in the results file.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::Fallible;
use crate::args::Args;
use crate::cell::{CHILD, Cell};
use crate::figures::Figures;
use crate::plan::{self, Planned};
use crate::scenario::{self, Bounds};
use crate::{report, store};

/// A line of the results file.
#[derive(Clone, Debug)]
pub(crate) struct Finished {
    pub(crate) cell: Cell,
    pub(crate) round: u32,
    /// Figures, or why there are none.
    pub(crate) figures: Result<Figures, String>,
}

pub(crate) fn run(args: &Args) -> Fallible<()> {
    fs::create_dir_all(&args.dir)?;
    if let Some(parent) = args.results.parent() {
        fs::create_dir_all(parent)?;
    }
    let planned = plan::cells(args);
    // What was skipped or failed is tried again: the reason may be gone.
    let mut finished: BTreeSet<(String, u32)> = read_results(&args.results)?
        .iter()
        .filter(|line| line.figures.is_ok())
        .map(|line| (line.cell.to_string(), line.round))
        .collect();
    append(
        &args.results,
        &json!({ "run": report::machine::describe(&args.dir) }),
    )?;
    for round in 1..=args.rounds {
        for planned in planned.iter().filter(|planned| round <= planned.rounds_max) {
            let key = (planned.cell.to_string(), round);
            if finished.contains(&key) {
                continue;
            }
            let figures = measure(args, planned, round);
            print_line(&planned.cell, round, &figures);
            append(&args.results, &to_json(&planned.cell, round, &figures))?;
            finished.insert(key);
        }
    }
    if let Some(path) = &args.report {
        report::write(
            path,
            &read_results(&args.results)?,
            &read_runs(&args.results)?,
        )?;
    }
    Ok(())
}

fn measure(args: &Args, planned: &Planned, round: u32) -> Result<Figures, String> {
    let missing = store::missing(&planned.cell.store);
    if let Some(reason) = missing.or_else(|| scenario::missing(&planned.cell.scenario)) {
        return Err(format!("skipped: {reason}"));
    }
    let measured = || {
        let mut figures = child(args, planned)?;
        if planned.traced && round == 1 {
            figures.extend(crate::trace::syncs(args, planned)?);
        }
        Ok(figures)
    };
    measured().map_err(|error: Box<dyn std::error::Error + Send + Sync>| error.to_string())
}

/// An empty directory for one cell, gone with this value.
pub(crate) struct CellDir(pub(crate) PathBuf);

impl CellDir {
    pub(crate) fn new(parent: &Path) -> Fallible<CellDir> {
        let path = parent.join(format!("cell-{}", std::process::id()));
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir_all(&path)?;
        Ok(CellDir(path))
    }
}

impl Drop for CellDir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap_or_default();
    }
}

/// The command line of a child that runs one cell.
pub(crate) fn child_arguments(cell: &Cell, dir: &Path, bounds: Bounds) -> Vec<String> {
    vec![
        CHILD.to_owned(),
        cell.to_string(),
        dir.display().to_string(),
        bounds.ops_max.to_string(),
        bounds.seconds_max.to_string(),
    ]
}

fn child(args: &Args, planned: &Planned) -> Fallible<Figures> {
    let dir = CellDir::new(&args.dir)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(child_arguments(&planned.cell, &dir.0, planned.bounds));
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim().strip_prefix("compare: ").unwrap_or(said.trim());
        return Err(format!("{said} ({})", output.status).into());
    }
    let object: Value = serde_json::from_slice(&output.stdout)?;
    Ok(Figures::from_json(
        object.as_object().ok_or("a child prints an object")?,
    ))
}

/// What a child process does: its cell, in the directory it is given.
pub(crate) fn child_main(arguments: &[String]) -> Fallible<()> {
    let [id, dir, ops_max, seconds_max] = arguments else {
        return Err("a child needs a cell, a directory and its bounds".into());
    };
    let bounds = Bounds {
        ops_max: ops_max.parse()?,
        seconds_max: seconds_max.parse()?,
    };
    let figures = scenario::run(&Cell::parse(id)?, Path::new(dir), bounds)?;
    println!("{}", figures.to_json());
    Ok(())
}

fn to_json(cell: &Cell, round: u32, figures: &Result<Figures, String>) -> Value {
    match figures {
        Ok(figures) => {
            json!({ "cell": cell.to_string(), "round": round, "figures": figures.to_json() })
        }
        Err(reason) => json!({ "cell": cell.to_string(), "round": round, "missing": reason }),
    }
}

fn append(path: &Path, line: &Value) -> Fallible<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    Ok(writeln!(file, "{line}")?)
}

/// Reads the finished cells.
pub(crate) fn read_results(path: &Path) -> Fallible<Vec<Finished>> {
    Ok(read_lines(path)?.iter().filter_map(from_json).collect())
}

/// What the results file says about the runs that filled it.
fn read_runs(path: &Path) -> Fallible<Vec<Value>> {
    let lines = read_lines(path)?;
    Ok(lines
        .iter()
        .filter_map(|line| line.get("run").cloned())
        .collect())
}

/// A last line cut short by a kill is left out.
fn read_lines(path: &Path) -> Fallible<Vec<Value>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(path)?;
    Ok(text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect())
}

fn from_json(line: &Value) -> Option<Finished> {
    let figures = match line.get("figures") {
        Some(figures) => Ok(Figures::from_json(figures.as_object()?)),
        None => Err(line.get("missing")?.as_str()?.to_owned()),
    };
    Some(Finished {
        cell: Cell::parse(line.get("cell")?.as_str()?).ok()?,
        round: u32::try_from(line.get("round")?.as_u64()?).ok()?,
        figures,
    })
}

/// What a line on the screen shows of a cell's figures; the results file has them all.
const SHOWN: &[&str] = &[
    "ops_per_s",
    "cpu_us_per_op",
    "p50_us",
    "p99_us",
    "device_flushes_per_op",
    "sync_calls_per_key",
    "hit_cpu_us",
    "miss_cpu_us",
    "hit_device_reads",
    "first_insert_ms",
    "lost",
    "cpu_us_per_expired",
    "foreground_kept",
    "new_device_reads",
    "old_device_reads",
    "touch_ns",
];

fn print_line(cell: &Cell, round: u32, figures: &Result<Figures, String>) {
    let id = cell.to_string();
    match figures {
        Err(reason) => println!("{id:44} {round}  {reason}"),
        Ok(figures) => {
            let shown = SHOWN.iter();
            let shown = shown.filter_map(|name| Some(format!("{name}={:.2}", figures.get(name)?)));
            println!("{id:44} {round}  {}", shown.collect::<Vec<_>>().join(" "));
        }
    }
}
