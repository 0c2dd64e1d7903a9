//! Instructions of one operation, counted by callgrind and compared with the bounds in
//! `xtask/instructions.txt`. No noise of the machine reaches them.
//!
//! They depend on the compiler: with another one than the file names the bounds are wide.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::process::Command;
use std::time::Duration;

use crate::context::{Context, Counts, Fallible, Outcome};
use crate::process::{self, has};
use crate::store::calls::{COUNTED, WORKLOADS, Workload};

/// The word that starts this program as the one that is counted.
pub(crate) const WORD: &str = "calls";
const BOUNDS: &str = "xtask/instructions.txt";
const UPDATE: &str = "cargo xtask rel instructions --update";
/// What the store's random key and a neighbour's change to inlining may do.
const TOLERANCE_PERCENT: u64 = 10;
/// What another compiler may do.
const TOLERANCE_PERCENT_OTHER: u64 = 15;
const TIME_MAX: Duration = Duration::from_secs(300);

pub(crate) fn run(context: &Context) -> Fallible<Outcome> {
    if !has("valgrind") {
        return Ok(Outcome::skipped("valgrind is not installed"));
    }
    let compiler = compiler()?;
    let file = context.root.join(BOUNDS);
    let mut measured = BTreeMap::new();
    for workload in &WORKLOADS {
        let count = count(context, workload)?;
        println!("  {}: {count} instructions an operation", workload.name);
        measured.insert(workload.name.to_owned(), count);
    }
    if context.update {
        fs::write(&file, text(&compiler, &measured))?;
        println!("  written: {BOUNDS}");
    }
    let bounds = Bounds::parse(&fs::read_to_string(&file)?)?;
    let is_same = bounds.compiler == compiler;
    if !is_same {
        println!(
            "  compiler: {compiler}; the bounds are of {}, and hold within \
             {TOLERANCE_PERCENT_OTHER} %",
            bounds.compiler
        );
    }
    let (counts, wrong) = judge(&bounds, is_same, &measured);
    Ok(Outcome::judge(counts, wrong.join("\n  ")))
}

/// Runs one workload under the counter.
fn count(context: &Context, workload: &Workload) -> Fallible<u64> {
    let dir = context.scratch().join(workload.name);
    fs::create_dir(&dir)?;
    let mut command = Command::new("valgrind");
    command
        .arg("--tool=callgrind")
        .arg("--callgrind-out-file=/dev/null")
        .arg(format!("--toggle-collect={COUNTED}"))
        .arg(std::env::current_exe()?)
        .args([WORD, workload.name])
        .arg(&dir);
    let ended = process::run(&mut command, TIME_MAX)?;
    fs::remove_dir_all(&dir)?;
    let collected = ended.stderr.lines().find_map(|line| {
        let (_, number) = line.split_once("Collected : ")?;
        number.trim().parse::<u64>().ok()
    });
    match collected.filter(|count| *count > 0 && ended.is_success()) {
        Some(count) => Ok(count / workload.operations),
        None => Err(format!("{}: {}", workload.name, ended.last_line()).into()),
    }
}

fn compiler() -> Fallible<String> {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let told = process::must(&rustc, &["-vV"])?;
    let line = |name: &str| told.lines().find(|line| line.starts_with(name));
    let host = line("host: ")
        .unwrap_or_default()
        .trim_start_matches("host: ");
    Ok(format!("{} {host}", line("rustc ").unwrap_or_default()))
}

/// What the file says.
struct Bounds {
    compiler: String,
    instructions: BTreeMap<String, u64>,
}

impl Bounds {
    fn parse(text: &str) -> Fallible<Bounds> {
        let mut bounds = Bounds {
            compiler: String::new(),
            instructions: BTreeMap::new(),
        };
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            match line.split_once(" = ") {
                Some(("compiler", compiler)) => bounds.compiler = compiler.to_owned(),
                Some((name, count)) => {
                    let count = count
                        .parse()
                        .map_err(|e| format!("{BOUNDS}: {line}: {e}"))?;
                    bounds.instructions.insert(name.to_owned(), count);
                }
                None => return Err(format!("{BOUNDS}: {line}").into()),
            }
        }
        Ok(bounds)
    }
}

fn text(compiler: &str, measured: &BTreeMap<String, u64>) -> String {
    let mut text = format!(
        "# Instructions of one operation (of one key in batches and loads), by callgrind.\n\
         # More than {TOLERANCE_PERCENT} % above fails: cargo xtask rel instructions\n\
         # After a change that is worth it: {UPDATE}\n\
         compiler = {compiler}\n"
    );
    for (name, count) in measured {
        writeln!(text, "{name} = {count}").unwrap_or_default();
    }
    text
}

/// Counts what holds, and says of the others what was measured and what to do.
fn judge(
    bounds: &Bounds,
    is_same: bool,
    measured: &BTreeMap<String, u64>,
) -> (Counts, Vec<String>) {
    let tolerance = if is_same {
        TOLERANCE_PERCENT
    } else {
        TOLERANCE_PERCENT_OTHER
    };
    let (mut counts, mut wrong) = (Counts::default(), Vec::new());
    for (name, measured) in measured {
        counts.add(name, *measured);
        let Some(bound) = bounds.instructions.get(name) else {
            counts.check(false);
            wrong.push(format!("{name}: measured={measured}, no bound; {UPDATE}"));
            continue;
        };
        let holds = measured * 100 <= bound * (100 + tolerance);
        counts.check(holds);
        if !holds {
            wrong.push(format!(
                "{name}: measured={measured} bound={bound} tolerance={tolerance} %; find out what \
                 has become slower, or, if it is worth it: {UPDATE}"
            ));
        } else if is_same && measured * (100 + tolerance) < bound * 100 {
            println!("  {name} is below {bound}: keep it with {UPDATE}");
        }
    }
    (counts, wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(count: u64) -> BTreeMap<String, u64> {
        BTreeMap::from([("observe-new".to_owned(), count)])
    }

    #[test]
    fn what_is_written_is_read_and_judged() {
        let bounds = Bounds::parse(&text("rustc 1 x", &measured(1000))).unwrap();
        assert_eq!(bounds.compiler, "rustc 1 x");
        for (count, is_same, failed) in [
            (900, true, 0),
            (1100, true, 0),
            (1101, true, 1),
            (1150, false, 0),
            (1151, false, 1),
        ] {
            let (counts, wrong) = judge(&bounds, is_same, &measured(count));
            assert_eq!(counts.failed, failed, "{count}");
            let says = wrong.concat();
            assert_eq!(says.contains("bound=1000"), failed > 0, "{says}");
            assert_eq!(says.contains("--update"), failed > 0, "{says}");
        }
        let more = BTreeMap::from([("another".to_owned(), 1)]);
        assert_eq!(judge(&bounds, true, &more).0.failed, 1);
    }
}
