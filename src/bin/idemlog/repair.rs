//! `idemlog repair`: writes what is left of a damaged store into a new directory.

use std::path::{Path, PathBuf};

use idemlog::{LostRange, RepairReport};
use serde_json::{Value, json};

use crate::args::{Common, NamedSpace, Repair};
use crate::exit::{Code, Stop};
use crate::output::print_line;

/// Exits 0 when the store was written, whatever is lost, or a dry run found nothing lost;
/// otherwise 1.
pub(crate) fn repair(common: &Common, options: &Repair) -> Result<u8, Stop> {
    let store = common.store_path()?;
    let mut repair = idemlog::Repair::of(store).lock_timeout(common.lock_timeout);
    for NamedSpace { id, name, kind } in &options.space {
        repair = repair.namespace(*id, name, *kind);
    }
    for id in &options.purged {
        repair = repair.purged(*id);
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
    let beside = || with_ending(store, "repair");
    let target = options.to.clone().unwrap_or_else(beside);
    let target = target.as_path();
    if options.swap {
        let report = repair.replace_by_way_of(target)?;
        tell(common, &report, Some((store, target)))?;
    } else {
        let report = repair.write_to(target)?;
        tell(common, &report, Some((target, store)))?;
    }
    Ok(Code::Done as u8)
}

/// Returns the path of a sibling: `store` becomes `store.repair`.
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
        "segments={} found={} kept={} purged={} doubtful={} outdated={} lost_ranges={} \
         lost_bytes={} manifest_lost={}",
        report.segments_count,
        report.found_count,
        report.kept_count,
        report.purged_count,
        report.doubtful_count,
        report.outdated_count,
        report.lost_count,
        report.lost_bytes,
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
        "outdated_count": report.outdated_count,
        "manifest_lost": report.manifest_lost,
        "lost_count": report.lost_count,
        "lost_bytes": report.lost_bytes,
        "lost": lost,
        "repaired": written.map(|(repaired, _)| shown(repaired)),
        "damaged": written.map(|(_, damaged)| shown(damaged)),
    })
}
