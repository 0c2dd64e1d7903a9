//! `idemlog verify`: reads every byte of a closed store and lists what is wrong.

use idemlog::{Problem, VerifyReport};
use serde_json::{Value, json};

use crate::args::Common;
use crate::exit::{Code, Stop};
use crate::output::print_line;

/// Exits 0 if nothing is wrong, 1 otherwise.
pub(crate) fn verify(common: &Common) -> Result<u8, Stop> {
    let report = idemlog::verify(common.store_path()?)?;
    if common.json {
        print_line(&to_json(&report).to_string())?;
    } else {
        for problem in &report.problems {
            print_line(&line(problem))?;
        }
        for orphan in &report.orphans {
            print_line(&format!(
                "left over: file={orphan}; the next open removes it"
            ))?;
        }
        print_line(&format!(
            "segments={} records={} runs={} read_bytes={} problems={}",
            report.segments_count,
            report.records_count,
            report.runs_count,
            report.read_bytes,
            report.problems.len()
        ))?;
    }
    Ok(if report.is_ok() {
        Code::Done as u8
    } else {
        Code::Failed as u8
    })
}

fn line(problem: &Problem) -> String {
    let place = problem
        .offset
        .map_or_else(String::new, |offset| format!(" offset={offset}"));
    let remedy = if problem.is_log {
        "restore it, or see what idemlog repair can keep: docs/operations.md"
    } else {
        "the next open builds it again"
    };
    format!(
        "problem: {} file={}{place}; {remedy}",
        problem.what, problem.file
    )
}

fn to_json(report: &VerifyReport) -> Value {
    let problems: Vec<Value> = report
        .problems
        .iter()
        .map(|p| json!({"file": p.file, "offset": p.offset, "what": p.what, "is_log": p.is_log}))
        .collect();
    json!({
        "ok": report.is_ok(),
        "segments_count": report.segments_count,
        "records_count": report.records_count,
        "runs_count": report.runs_count,
        "read_bytes": report.read_bytes,
        "orphans": report.orphans,
        "problems": problems,
    })
}
