//! What this program does when it is started as a child by a layer.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use crate::context::Fallible;
use crate::layer::instructions;
use crate::rig::guard;
use crate::store::calls;
use crate::store::check::Judge;
use crate::store::limits;
use crate::store::notes::Notes;
use crate::store::work::{self, Plan};

/// The exit code of a check that found wrong answers.
pub(crate) const WRONG: u8 = 1;
/// The exit code of a check, or a workload, to which the store gave an error.
pub(crate) const REFUSED: u8 = 3;

/// Runs a child's task; `None` if the words are not one.
pub(crate) fn run(words: &[&str]) -> Option<ExitCode> {
    let done = match words {
        [guard::WORD, dir] => return Some(guard::main(dir)),
        ["work", dir, notes, plan @ ..] => work(Path::new(dir), Path::new(notes), plan),
        ["fill", dir, notes, ballast] => fill(Path::new(dir), Path::new(notes), ballast),
        ["many", dir, count] => many(Path::new(dir), count),
        ["check", dir, notes] => judge(Path::new(dir), Path::new(notes)),
        ["look", dir, notes] => look(Path::new(dir), Path::new(notes)),
        [instructions::WORD, workload, dir] => count(workload, Path::new(dir)),
        _ => return None,
    };
    Some(done.unwrap_or_else(|error| {
        eprintln!("{error}{}", causes(&*error));
        ExitCode::from(REFUSED)
    }))
}

/// The words of a plan, as [`parse_plan`] reads them.
pub(crate) fn plan_words(plan: &Plan) -> Vec<String> {
    let mut words = vec![
        format!("seed={}", plan.seed),
        format!("part={}", plan.part),
        format!("calls={}", plan.calls),
    ];
    let flags = [
        ("killed", plan.killed),
        ("drops", plan.drops),
        ("foreground", plan.foreground),
        ("fault-open", plan.fault_open),
    ];
    words.extend(
        flags
            .iter()
            .filter(|(_, on)| *on)
            .map(|(name, _)| format!("{name}=1")),
    );
    words.extend(plan.fault_at.map(|call| format!("fault={call}")));
    words
}

fn parse_plan(words: &[&str]) -> Fallible<Plan> {
    let mut plan = Plan {
        seed: 1,
        part: 0,
        calls: 10,
        killed: false,
        drops: false,
        fault_at: None,
        fault_open: false,
        foreground: false,
    };
    for word in words {
        let (name, number) = word
            .split_once('=')
            .ok_or("a plan is made of name=number")?;
        let number: u64 = number.parse()?;
        match name {
            "seed" => plan.seed = number,
            "part" => plan.part = number,
            "calls" => plan.calls = number,
            "killed" => plan.killed = number > 0,
            "drops" => plan.drops = number > 0,
            "foreground" => plan.foreground = number > 0,
            "fault-open" => plan.fault_open = number > 0,
            "fault" => plan.fault_at = Some(number),
            _ => return Err(format!("no plan has {name}").into()),
        }
    }
    Ok(plan)
}

fn work(dir: &Path, notes: &Path, words: &[&str]) -> Fallible<ExitCode> {
    const CALLS_MAX: u64 = 1_000_000;
    let plan = parse_plan(words)?;
    let notes = Notes::open(notes, plan.part * CALLS_MAX)?;
    work::run(dir, &notes, &plan)?;
    Ok(ExitCode::SUCCESS)
}

fn fill(dir: &Path, notes: &Path, ballast: &str) -> Fallible<ExitCode> {
    limits::fill(dir, &Notes::open(notes, 0)?, Path::new(ballast))?;
    Ok(ExitCode::SUCCESS)
}

fn many(dir: &Path, count: &str) -> Fallible<ExitCode> {
    limits::many(dir, count.parse()?)?;
    Ok(ExitCode::SUCCESS)
}

fn count(workload: &str, dir: &Path) -> Fallible<ExitCode> {
    calls::run(workload, dir)?;
    Ok(ExitCode::SUCCESS)
}

fn judge(dir: &Path, notes: &Path) -> Fallible<ExitCode> {
    let mut judge = Judge::new(&std::fs::read_to_string(notes)?);
    judge.judge(dir)?;
    let is_right = judge.say()?;
    Ok(if is_right {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(WRONG)
    })
}

/// Says how every key is found, and dies without closing.
fn look(dir: &Path, notes: &Path) -> Fallible<ExitCode> {
    let mut judge = Judge::new(&std::fs::read_to_string(notes)?);
    let (log, found) = judge.look(dir)?;
    judge.say()?;
    let mut out = std::io::stdout().lock();
    for ((space, key), state) in &found {
        writeln!(out, "FOUND {space} {key} {state:?}")?;
    }
    out.flush()?;
    std::mem::forget(log);
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    Ok(ExitCode::from(WRONG))
}

/// What lies behind an error, on the same line.
fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(&format!(": {cause}"));
        next = cause.source();
    }
    text
}
