//! `idemlog repair`: writes what is left of a damaged store into a new directory.

use std::path::{Path, PathBuf};

use idemlog::{LostRange, RepairReport};
use serde_json::{Value, json};

use crate::args::{Common, NamedSpace, Repair};
use crate::exit::{Code, Stop};
use crate::output::print_line;

/// Exits 0 when a whole store was written, or a dry run found nothing lost; otherwise 1.
pub(crate) fn repair(common: &Common, options: &Repair) -> Result<u8, Stop> {
    let store = common.store_path()?;
    let mut repair = idemlog::Repair::of(store);
    for NamedSpace { id, name, kind } in &options.space {
        repair = repair.namespace(*id, name, *kind);
    }
    if options.dry_run {
        let report = repair.dry_run()?;
        tell(common, &report, None)?;
        let code = if report.is_whole() {
            Code::Done
        } else {
            Code::Failed
        };
        return Ok(code as u8);
    }
    let ending = if options.swap { "damaged" } else { "repaired" };
    let target = options
        .to
        .clone()
        .unwrap_or_else(|| with_ending(store, ending));
    let report = repair.write_to(&target)?;
    if options.swap {
        repair.swap(&target)?;
    }
    let (repaired, damaged) = if options.swap {
        (store, target.as_path())
    } else {
        (target.as_path(), store)
    };
    tell(common, &report, Some((repaired, damaged)))?;
    Ok(Code::Done as u8)
}

/// Returns the path of a sibling: `store` becomes `store.repaired`.
fn with_ending(store: &Path, ending: &str) -> PathBuf {
    let mut path = store.components().as_path().as_os_str().to_owned();
    path.push(".");
    path.push(ending);
    PathBuf::from(path)
}

fn tell(
    common: &Common,
    report: &RepairReport,
    written: Option<(&Path, &Path)>,
) -> Result<(), Stop> {
    if common.json {
        return print_line(&to_json(report, written).to_string());
    }
    for range in &report.lost {
        print_line(&line(range))?;
    }
    print_line(&format!(
        "segments={} found={} kept={} purged={} doubtful={} lost_ranges={} lost_bytes={} \
         manifest_lost={}",
        report.segments_count,
        report.found_count,
        report.kept_count,
        report.purged_count,
        report.doubtful_count,
        report.lost.len(),
        report.lost_bytes(),
        report.manifest_lost,
    ))?;
    if let Some((repaired, damaged)) = written {
        print_line(&format!(
            "repaired={} damaged={}",
            repaired.display(),
            damaged.display()
        ))?;
    }
    Ok(())
}

fn line(range: &LostRange) -> String {
    let time = |ms: Option<u64>| ms.map_or_else(|| "unknown".to_owned(), |ms| ms.to_string());
    format!(
        "lost: file={} from={} to={} after_ms={} before_ms={}",
        range.file,
        range.from,
        range.to,
        time(range.after_ms),
        time(range.before_ms)
    )
}

fn to_json(report: &RepairReport, written: Option<(&Path, &Path)>) -> Value {
    let lost: Vec<Value> = report
        .lost
        .iter()
        .map(|range| {
            json!({
                "file": range.file,
                "from": range.from,
                "to": range.to,
                "after_ms": range.after_ms,
                "before_ms": range.before_ms,
            })
        })
        .collect();
    let shown = |path: &Path| path.display().to_string();
    json!({
        "whole": report.is_whole(),
        "segments_count": report.segments_count,
        "found_count": report.found_count,
        "kept_count": report.kept_count,
        "purged_count": report.purged_count,
        "doubtful_count": report.doubtful_count,
        "manifest_lost": report.manifest_lost,
        "lost_bytes": report.lost_bytes(),
        "lost": lost,
        "repaired": written.map(|(repaired, _)| shown(repaired)),
        "damaged": written.map(|(_, damaged)| shown(damaged)),
    })
}
