//! `verify`: reads every byte of a store that is not open and says what is not as it should be.
//! It changes nothing but the note in LOCK, which it takes meanwhile where it may, and needs no
//! right to write.

use std::path::Path;
use std::sync::Arc;

use super::catalog::read_manifest;
use super::hint::is_hint_whole;
use super::open::{find_orphans, open_error, open_segment, refuse_unfinished};
use super::recovery::replay_segment;
use super::runs::{check_sealed, open_run};
use super::settle::read_image;
use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::{Manifest, RunEntry, SegmentEntry};
use crate::format::names::FileName;
use crate::format::to_usize;
use crate::index::KeyHash;
use crate::index::active::ActiveTable;
use crate::index::run::Run;
use crate::log::replay::proven_behind;
use crate::log::segment::SegmentFile;
use crate::position::Position;
use crate::vfs::disk::DiskDir;
use crate::vfs::{Access, Dir};

/// What `verify` found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Segments read, sealed and not.
    pub segments_count: u64,
    /// Records read, of keys.
    pub records_count: u64,
    /// Index runs read, each compared with the segments it is about.
    pub runs_count: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Files left over by interrupted work; the next open removes them.
    pub orphans: Vec<String>,
    /// Everything that is not as it should be.
    pub problems: Vec<Problem>,
}

/// One thing that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// The file.
    pub file: String,
    /// Where in it, in bytes, if that is known.
    pub offset: Option<u64>,
    /// What is wrong.
    pub what: String,
    /// The log itself is concerned. An index run or a hint is built again by the next open.
    pub is_log: bool,
}

impl VerifyReport {
    /// Says that nothing is wrong.
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }

    fn add(&mut self, file: &str, offset: Option<u64>, what: impl Into<String>, is_log: bool) {
        let (file, what) = (file.to_owned(), what.into());
        self.problems.push(Problem {
            file,
            offset,
            what,
            is_log,
        });
    }

    /// Keeps an error as a problem of the log.
    fn add_error(&mut self, error: &Error, file: &str) {
        let file = error.file().unwrap_or(file).to_owned();
        self.add(&file, error.offset(), error.to_string(), true);
    }
}

/// Verifies the store in this directory. Damage is a [`Problem`], not an error.
///
/// # Errors
/// `Incompatible` for what is not a store of this format, `Locked` while it is open, `Io`.
pub fn verify(path: impl AsRef<Path>) -> Result<VerifyReport> {
    let shown = path.as_ref().display().to_string();
    let dir = DiskDir::open(path.as_ref(), false).map_err(|e| open_error(e, &shown))?;
    let names = dir
        .list()
        .map_err(|e| Error::io("listing the directory failed", e).in_file(&shown))?;
    refuse_unfinished(&names)?;
    verify_dir(&dir, &shown)
}

/// Verifies the store in any directory.
pub(crate) fn verify_dir(dir: &dyn Dir, shown: &str) -> Result<VerifyReport> {
    let mut report = VerifyReport::default();
    let manifest = match read_manifest(dir) {
        Ok(Some(manifest)) => manifest,
        Ok(None) => {
            return Err(Error::new(
                ErrorKind::Incompatible,
                "no store here: MANIFEST is missing",
            )
            .in_file(shown));
        }
        Err(error) if error.kind() == ErrorKind::Damaged => {
            report.add_error(&error, "MANIFEST");
            return Ok(report);
        }
        Err(error) => return Err(error),
    };
    // Without a lock file, or without the right to open it, nobody else has it open for writing.
    let name = FileName::Lock.to_string();
    let lock = match dir.lock(
        &name,
        false,
        &format!("pid={} (verify)", std::process::id()),
    ) {
        Ok(Err(holder)) => {
            return Err(Error::new(
                ErrorKind::Locked,
                format!("store is open elsewhere: holder={holder}; close it there first"),
            )
            .in_file(shown));
        }
        Ok(Ok(lock)) => Some(lock),
        Err(_unlocked) => None,
    };
    match find_orphans(dir, &manifest) {
        Ok(orphans) => report.orphans = orphans,
        Err(error) => report.add_error(&error, shown),
    }
    let hash = KeyHash::new(&manifest.hash_key, manifest.store);
    let runs = open_runs(dir, &manifest, &hash, &mut report);
    let mut end = Position::START;
    let mut proven = manifest.closed_at.unwrap_or(0);
    for entry in &manifest.segments {
        report.segments_count += 1;
        let name = FileName::Segment(entry.id).to_string();
        let opened = open_segment(dir, &manifest, entry, hash.id(), Access::Read);
        let verified = opened.and_then(|segment| {
            verify_segment(dir, &manifest, &segment, entry, &hash, &runs, &mut report)
        });
        match verified {
            Ok(Some(found)) => {
                proven = proven.max(found.proven);
                if found.holds_end {
                    end = end.max(found.end);
                }
            }
            Ok(None) => {}
            Err(error) => report.add_error(&error, &name),
        }
    }
    if Position::from_u64(proven) > end {
        let what = format!(
            "records that were durable are missing: log_end={end} durable_until={}",
            Position::from_u64(proven)
        );
        let file = FileName::Segment(end.segment()).to_string();
        report.add(&file, Some(u64::from(end.offset())), what, true);
    }
    drop(lock);
    Ok(report)
}

/// Opens and reads all listed runs.
fn open_runs(
    dir: &dyn Dir,
    manifest: &Manifest,
    hash: &KeyHash,
    report: &mut VerifyReport,
) -> Vec<Run> {
    let mut runs = Vec::new();
    for entry in &manifest.runs {
        report.runs_count += 1;
        let RunEntry { lo, hi, generation } = *entry;
        let name = FileName::Run { lo, hi, generation }.to_string();
        let Some(run) = open_run(dir, manifest, entry, hash) else {
            report.add(&name, None, "run or filter is missing or damaged", false);
            continue;
        };
        report.read_bytes += run.run_bytes() + run.filter_bytes();
        match run.check_whole() {
            Ok(()) => runs.push(run),
            Err(why) => report.add(&name, None, why.0, false),
        }
    }
    runs
}

/// Where an unsealed segment ends, and what it proves.
struct Found {
    end: Position,
    proven: u64,
    /// The segment holds records, or it is where a clean close has ended the log.
    holds_end: bool,
}

fn verify_segment(
    dir: &dyn Dir,
    manifest: &Manifest,
    segment: &Arc<SegmentFile>,
    entry: &SegmentEntry,
    hash: &KeyHash,
    runs: &[Run],
    report: &mut VerifyReport,
) -> Result<Option<Found>> {
    report.read_bytes += u64::from(segment.bytes);
    let Some(sealed) = entry.sealed else {
        let image = read_image(segment)?;
        let replayed = replay_segment(&image, segment, hash)?;
        report.records_count += u64::from(replayed.tally.records_count());
        let hint = FileName::Hint(segment.id).to_string();
        let has_hint = dir.list().is_ok_and(|names| names.contains(&hint));
        if has_hint && !is_hint_whole(dir, segment.id) {
            report.add(&hint, None, "hint is damaged", false);
        }
        let behind = proven_behind(&image, segment.nonce, replayed.end);
        let end = Position::new(segment.id, replayed.end);
        let holds_records = replayed.tally.records_count() > 0 || replayed.sealed;
        return Ok(Some(Found {
            end,
            proven: behind.max(replayed.proven),
            // A store that was closed before its first record, or right after a roll, ends here.
            holds_end: holds_records || manifest.closed_at == Some(end.get()),
        }));
    };
    let segment = segment
        .sealed(dir)
        .map_err(|e| Error::io("mapping a segment failed", e).in_file(segment.name()))?;
    check_sealed(&segment, &sealed)?;
    let map = segment
        .freeze()
        .map_err(|e| Error::io("mapping a segment failed", e).in_file(segment.name()))?;
    let bytes = map.get(..to_usize(sealed.end)).unwrap_or_default();
    let replayed = replay_segment(bytes, &segment, hash)?;
    let records_count = replayed.tally.records_count();
    report.records_count += u64::from(records_count);
    if !replayed.sealed || replayed.end != sealed.end || records_count != sealed.records_count {
        let at = Some(u64::from(replayed.end));
        report.add(
            &segment.name(),
            at,
            "sealed segment is not what was sealed",
            true,
        );
    }
    compare_with_run(&segment, &replayed.table, runs, report);
    Ok(None)
}

/// Looks every key of a segment up in its run.
fn compare_with_run(
    segment: &SegmentFile,
    table: &ActiveTable,
    runs: &[Run],
    report: &mut VerifyReport,
) {
    let covers = |run: &&Run| (run.header.lo..=run.header.hi).contains(&segment.id);
    // A run that is missing was reported where it was opened.
    let Some(run) = runs.iter().find(covers) else {
        return;
    };
    let mut places = Vec::new();
    for (h, offset) in table.ascending() {
        places.clear();
        let found = run.may_contain(h) == Ok(true)
            && run.find(h, &mut places).is_ok()
            && places.contains(&(segment.id, offset));
        if !found {
            let RunEntry { lo, hi, generation } = super::merge::run_entry(run);
            let name = FileName::Run { lo, hi, generation }.to_string();
            let what = format!(
                "record is not indexed: segment={} offset={offset}",
                segment.id
            );
            report.add(&name, None, what, false);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Durability, NamespaceOptions, Options};
    use crate::vfs::sim::SimDisk;

    fn store() -> SimDisk {
        let disk = SimDisk::new();
        let options = Options::new().segment_bytes(4096).background(false);
        let log = options
            .hint_keys_min(1)
            .durability(Durability::Process)
            .open_on(disk.dir())
            .unwrap();
        let filter = log.filter("f", NamespaceOptions::new()).unwrap();
        for n in 0..600u32 {
            assert!(filter.observe(n.to_le_bytes()).unwrap().is_new());
        }
        log.maintain().unwrap();
        log.close().unwrap();
        disk
    }

    #[test]
    fn a_whole_store_has_no_problems_and_a_killed_one_neither() {
        let disk = store();
        let report = verify_dir(disk.dir().as_ref(), "store").unwrap();
        assert!(report.is_ok(), "{report:?}");
        assert_eq!(report.records_count, 600);
        assert!(report.runs_count > 0 && report.segments_count > report.runs_count);
        assert!(
            verify_dir(disk.after_kill().dir().as_ref(), "store")
                .unwrap()
                .is_ok()
        );
    }

    #[test]
    fn a_store_closed_before_its_first_record_has_no_problems() {
        let disk = SimDisk::new();
        let options = Options::new().segment_bytes(4096).background(false);
        options.open_on(disk.dir()).unwrap().close().unwrap();
        let report = verify_dir(disk.dir().as_ref(), "store").unwrap();
        assert!(report.is_ok(), "{report:?}");
    }

    /// Story: a hint that is whole and not of this log, which the open passes over, was reported as
    /// damage of a sound store.
    #[test]
    fn a_stale_hint_is_no_problem_and_a_damaged_one_is() {
        let (disk, other) = (store(), store());
        let hint_of = |disk: &SimDisk| {
            let names = disk.file_names().into_iter();
            let mut hints = names.filter(|name| name.starts_with("hint-"));
            hints.next().expect("a close leaves a hint")
        };
        // The two may have come to different segments: time decides where a log rolls.
        let name = &hint_of(&disk);
        let mut hint = other.read_file(&hint_of(&other)).unwrap();
        assert_ne!(Some(&hint), disk.read_file(name).as_ref());
        disk.write_file(name, hint.clone());
        let report = verify_dir(disk.dir().as_ref(), "store").unwrap();
        assert!(report.is_ok(), "{report:?}");
        hint[40] ^= 1;
        disk.write_file(name, hint);
        let report = verify_dir(disk.dir().as_ref(), "store").unwrap();
        let [problem] = report.problems.as_slice() else {
            panic!("{report:?}")
        };
        assert_eq!(&problem.file, name);
        assert!(!problem.is_log);
    }

    #[test]
    fn every_changed_sector_of_every_file_is_found_or_is_empty_space() {
        let disk = store();
        for name in disk.file_names() {
            let whole = disk.read_file(&name).unwrap();
            for at in (0..whole.len()).step_by(512) {
                let mut bad = whole.clone();
                let sector = &mut bad[at..(at + 512).min(whole.len())];
                let was_empty = sector.iter().all(|b| *b == 0);
                sector.iter_mut().for_each(|b| *b ^= 0x55);
                disk.write_file(&name, bad.clone());
                let found =
                    verify_dir(disk.dir().as_ref(), "store").map_or(true, |report| !report.is_ok());
                let needless = was_empty || name == "LOCK" || name == "RESERVE";
                assert!(found || needless, "{name} at {at}");
            }
            disk.write_file(&name, whole.clone());
        }
    }
}
