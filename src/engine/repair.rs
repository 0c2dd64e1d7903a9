//! `repair`: writes what is left of a damaged store into a new directory.
//!
//! Safety properties:
//! A. The damaged directory is only read, and locked meanwhile.
//! B. The new directory is marked as unfinished before its first file and until everything in it
//!    is durable: killed at any step, it is refused when opened, and the next repair starts again.
//! C. A key whose later records may be lost is not offered again where that could do the effect
//!    twice: what a lost stretch may have changed goes in doubt, or to the probe.
//! D. It is the same store afterwards: identity, epochs and derived keys go on, and segment ids go
//!    on above all that exist.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Engine;
use super::catalog::{read_manifest, remove_if_there};
use super::core::{Need, Older, Room, UnsettledEntry};
use super::open::{open_error, take_lock};
use super::prepare::{Upkeep, create_segment, random_u32};
use super::recovery::recover;
use super::salvage::{self, Piece, Salvaged, Source};
use super::sweep::OwnedRecord;
use crate::clock::Anchor;
use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::{Manifest, NamespaceEntry, SegmentEntry};
use crate::format::names::FileName;
use crate::format::record::{Kind, Record};
use crate::format::segment::SegmentHeader;
use crate::format::to_u32;
use crate::index::KeyHash;
use crate::key::{NamespaceKind, check_namespace};
use crate::options::{
    Durability, OUTCOME_BYTES_DEFAULT, Options, SEGMENT_BYTES_FIRST, SEGMENT_BYTES_MAX, ZeroFill,
};
use crate::stats::{LostRange, OpenReport};
use crate::vfs::disk::{DiskDir, exchange};
use crate::vfs::{Access, Dir, Lock};

/// What a record is told that stands before a lost stretch.
const EVIDENCE: &[u8] = b"repair: records written after this one are lost";

/// A repair of a damaged store: what is still readable is written into a new directory; the old
/// one is only read.
///
/// What was in the lost stretches is forgotten: keys that were remembered only there are **new**
/// again, and [`RepairReport::lost`] says where and when they were written. Keys whose later
/// records may be among the lost ones are not offered as if nothing had happened: those of
/// `NonRepeatable` namespaces are in doubt, those of `Probeable` ones are decided by the probe.
#[derive(Clone, Debug)]
#[must_use]
pub struct Repair {
    path: PathBuf,
    named: Vec<NamespaceEntry>,
    options: Options,
}

/// What a repair has found and done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RepairReport {
    /// Segments that were looked for.
    pub segments_count: u64,
    /// Valid records found.
    pub found_count: u64,
    /// Records written into the new store; 0 for a dry run.
    pub kept_count: u64,
    /// Valid records of purged namespaces, which were left behind.
    pub purged_count: u64,
    /// Keys that went in doubt, or to the probe, because a later record may be lost.
    pub doubtful_count: u64,
    /// The manifest could not be read: namespaces are those that the caller named.
    pub manifest_lost: bool,
    /// What is lost, in the order of the log.
    pub lost: Vec<LostRange>,
}

impl RepairReport {
    /// Says that nothing is lost: the store needs no repair.
    pub fn is_whole(&self) -> bool {
        self.lost.is_empty() && !self.manifest_lost
    }

    /// Returns the number of lost bytes.
    pub fn lost_bytes(&self) -> u64 {
        self.lost.iter().map(|range| range.to - range.from).sum()
    }
}

impl Repair {
    /// Prepares the repair of the store in this directory. Nothing is read yet.
    pub fn of(path: impl AsRef<Path>) -> Self {
        Repair {
            path: path.as_ref().to_owned(),
            named: Vec::new(),
            options: Options::new(),
        }
    }

    /// Names a namespace by its number, for a store whose manifest cannot be read: names and
    /// kinds are kept only there. A repair that needs them says so.
    pub fn namespace(mut self, id: u16, name: &str, kind: NamespaceKind) -> Self {
        let name = name.to_owned();
        self.named.push(NamespaceEntry { id, kind, name });
        self
    }

    /// Sets the source of time, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn clock(mut self, clock: Arc<dyn crate::clock::Clock>) -> Self {
        self.options = self.options.clock(clock);
        self
    }

    /// Does what [`Repair::dry_run`] does, on any directory.
    ///
    /// # Errors
    /// As [`Repair::dry_run`], but for the lock.
    #[cfg(any(test, feature = "testing"))]
    pub fn dry_run_on(&self, from: &dyn Dir) -> Result<RepairReport> {
        self.look(from)
    }

    /// Does what [`Repair::write_to`] does, on any directories.
    ///
    /// # Errors
    /// As [`Repair::write_to`], but for the lock of the damaged store.
    #[cfg(any(test, feature = "testing"))]
    pub fn write_on(&self, from: &dyn Dir, to: Arc<dyn Dir>) -> Result<RepairReport> {
        self.write(from, to, "simulated")
    }

    /// Reads everything and reports what a repair would lose. Writes nothing but the note in the
    /// store's LOCK.
    ///
    /// # Errors
    /// `Locked` while the store is open, `Incompatible` for what is not a store of this format or
    /// has newer records, `Damaged` if neither manifest nor any segment can be read, `Invalid` if
    /// namespaces have to be named, `Io`.
    pub fn dry_run(&self) -> Result<RepairReport> {
        let dir = open_dir(&self.path)?;
        let lock = take_source(&dir, &self.path)?;
        let report = self.look(&dir)?;
        drop(lock);
        Ok(report)
    }

    /// Writes what is left into the directory `target`, which must be missing, empty, or left
    /// over by an interrupted repair. The store there is complete when this returns.
    ///
    /// # Errors
    /// As [`Repair::dry_run`]; `Invalid` for a target that holds something else.
    pub fn write_to(&self, target: impl AsRef<Path>) -> Result<RepairReport> {
        let target = target.as_ref();
        let dir = open_dir(&self.path)?;
        let lock = take_source(&dir, &self.path)?;
        let shown = target.display().to_string();
        let made = DiskDir::open(target, true).map_err(|e| open_error(e, &shown))?;
        let report = self.write(&dir, Arc::new(made), &shown)?;
        drop(lock);
        Ok(report)
    }

    /// Exchanges two directories in one step, and makes that durable: the repaired store takes the
    /// place of the damaged one, whose files are then in `target`.
    ///
    /// # Errors
    /// `Io`, with nothing exchanged, also where the file system cannot do it: rename by hand.
    pub fn swap(&self, target: impl AsRef<Path>) -> Result<()> {
        exchange(&self.path, target.as_ref()).map_err(|e| {
            Error::io("exchanging the directories failed", e)
                .in_file(self.path.display().to_string())
        })
    }

    /// Reads everything, writes nothing.
    pub(crate) fn look(&self, from: &dyn Dir) -> Result<RepairReport> {
        let plan = self.plan(from)?;
        let mut report = plan.report();
        let salvaged = salvage::read_log(from, &plan.sources, plan.closed_at, &mut |piece| {
            let Piece::Record(record) = piece else {
                return Ok(());
            };
            if plan.kind(&record).is_none() {
                report.purged_count += 1;
            }
            Ok(())
        })?;
        plan.check_named(&report)?;
        report.add(salvaged);
        Ok(report)
    }

    /// Reads everything and writes it into another directory (B).
    pub(crate) fn write(
        &self,
        from: &dyn Dir,
        to: Arc<dyn Dir>,
        shown: &str,
    ) -> Result<RepairReport> {
        let lock = begin(to.as_ref(), shown, &self.options)?;
        let (engine, report) = self.write_marked(from, &to, lock)?;
        engine.close()?;
        engine.unlock_if_over();
        finish(to.as_ref())?;
        Ok(report)
    }

    /// Writes the new store up to its last record, and hands it out open.
    fn write_marked(
        &self,
        from: &dyn Dir,
        to: &Arc<dyn Dir>,
        lock: Box<dyn Lock>,
    ) -> Result<(Arc<Engine>, RepairReport)> {
        let plan = self.plan(from)?;
        let mut report = self.look(from)?;
        let manifest = plan.new_store(to.as_ref(), &report, from)?;
        let engine = recover(
            Arc::clone(to),
            lock,
            false,
            plan.options(&self.options),
            manifest,
            OpenReport::default(),
        )?;
        let mut writer = Writer {
            engine: &engine,
            plan: &plan,
            upkeep: Upkeep::default(),
            restless: Vec::new(),
            kept_count: 0,
            doubtful_count: 0,
        };
        salvage::read_log(from, &plan.sources, plan.closed_at, &mut |piece| {
            writer.take(piece)
        })?;
        report.kept_count = writer.kept_count;
        report.doubtful_count = writer.doubtful_count;
        Ok((engine, report))
    }

    /// Opens what is left of a damaged store, in memory, for reading only.
    pub(super) fn open_in_memory(
        dir: &dyn Dir,
        options: &Options,
        lock: Box<dyn Lock>,
        why: Error,
    ) -> Result<Arc<Engine>> {
        let repair = Repair {
            path: PathBuf::new(),
            named: Vec::new(),
            options: options.clone(),
        };
        if repair.plan(dir)?.is_pieced_together() {
            // Nobody is here to name the namespaces.
            return Err(why);
        }
        let memory = crate::vfs::sim::SimDisk::memory().dir();
        let (mut engine, report) = repair.write_marked(dir, &memory, lock)?;
        if let Some(engine) = Arc::get_mut(&mut engine) {
            engine.salvaged = Some(why.to_string());
            engine.report.lost = report.lost;
        }
        Ok(engine)
    }

    fn plan(&self, from: &dyn Dir) -> Result<Plan> {
        for named in &self.named {
            check_namespace(&named.name)?;
        }
        match read_manifest(from) {
            Ok(Some(manifest)) => Ok(Plan {
                sources: salvage::listed(&manifest),
                closed_at: manifest.closed_at,
                old: Old::Manifest(manifest),
            }),
            Err(error) if error.kind() != ErrorKind::Damaged => Err(error),
            Ok(None) | Err(_) => {
                let (sources, store) = salvage::found(from)?;
                Ok(Plan {
                    sources,
                    closed_at: None,
                    old: Old::Pieces {
                        store,
                        named: self.named.clone(),
                    },
                })
            }
        }
    }
}

fn open_dir(path: &Path) -> Result<DiskDir> {
    DiskDir::open(path, false).map_err(|e| open_error(e, &path.display().to_string()))
}

/// Locks the damaged store where that is possible without making a file.
fn take_source(dir: &DiskDir, path: &Path) -> Result<Option<Box<dyn Lock>>> {
    let note = format!("pid={} (repair)", std::process::id());
    match dir.lock(&FileName::Lock.to_string(), false, &note) {
        Ok(Ok(lock)) => Ok(Some(lock)),
        Ok(Err(holder)) => Err(Error::new(
            ErrorKind::Locked,
            format!("store is open elsewhere: holder={holder}; close it there first"),
        )
        .in_file(path.display().to_string())),
        Err(_missing) => Ok(None),
    }
}

/// Takes the target and marks it as unfinished, with nothing else in it.
fn begin(to: &dyn Dir, shown: &str, options: &Options) -> Result<Box<dyn Lock>> {
    let failed = |e| Error::io("preparing the repair's target failed", e).in_file(shown);
    let mark = FileName::Repairing.to_string();
    let names = to.list().map_err(failed)?;
    let is_ours = names.contains(&mark);
    let lock_name = FileName::Lock.to_string();
    let mut others = names.iter().filter(|name| **name != lock_name);
    if !is_ours && let Some(other) = others.next() {
        return Err(Error::invalid(format!(
            "target of a repair is not empty: found={other}; nothing was written; name another"
        ))
        .in_file(shown));
    }
    let lock = take_lock(to, shown, options)?;
    if !is_ours {
        let file = to.open(&mark, Access::Create).map_err(failed)?;
        file.sync().map_err(failed)?;
    }
    to.sync().map_err(failed)?;
    for name in names
        .iter()
        .filter(|name| **name != mark && **name != lock_name)
    {
        if FileName::parse(name).is_some() {
            remove_if_there(to, name).map_err(failed)?;
        }
    }
    to.sync().map_err(failed)?;
    Ok(lock)
}

/// Takes the mark away: everything else is durable.
fn finish(to: &dyn Dir) -> Result<()> {
    let mark = FileName::Repairing.to_string();
    to.unlink(&mark).map_err(|e| {
        Error::io("finishing the repair failed; run it again", e).in_file(mark.clone())
    })?;
    to.sync().map_err(|e| {
        let what = "the repaired store is complete, but a power cut may bring back its mark as \
                    unfinished: syncing the directory failed";
        Error::io(what, e).in_file(mark).maybe_applied()
    })
}

/// What is known of the store beside its log.
enum Old {
    Manifest(Manifest),
    Pieces {
        store: [u8; 16],
        named: Vec<NamespaceEntry>,
    },
}

/// What is read, and how it is understood.
struct Plan {
    sources: Vec<Source>,
    closed_at: Option<u64>,
    old: Old,
}

impl Plan {
    fn is_pieced_together(&self) -> bool {
        matches!(self.old, Old::Pieces { .. })
    }

    fn namespaces(&self) -> &[NamespaceEntry] {
        match &self.old {
            Old::Manifest(manifest) => &manifest.namespaces,
            Old::Pieces { named, .. } => named,
        }
    }

    fn kind(&self, record: &Record<'_>) -> Option<NamespaceKind> {
        let mut known = self.namespaces().iter();
        known.find(|n| n.id == record.namespace).map(|n| n.kind)
    }

    fn report(&self) -> RepairReport {
        RepairReport {
            segments_count: self.sources.len() as u64,
            manifest_lost: self.is_pieced_together(),
            ..RepairReport::default()
        }
    }

    /// Without a manifest every namespace of the log must have been named.
    fn check_named(&self, report: &RepairReport) -> Result<()> {
        if !report.manifest_lost || report.purged_count == 0 {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "MANIFEST cannot be read and {} records are of namespaces that were not named; name \
             each by number, name and kind, in the order in which they were made",
            report.purged_count
        )))
    }

    fn options(&self, given: &Options) -> Options {
        let largest = self.sources.iter().map(|s| s.bytes).max().unwrap_or(0);
        let segment_bytes = largest
            .max(given.segment_bytes.min(SEGMENT_BYTES_FIRST))
            .min(SEGMENT_BYTES_MAX)
            .next_multiple_of(4096);
        Options {
            log_bytes_max: None,
            unsettled_count_max: usize::MAX,
            background: false,
            on_event: None,
            ..given.clone()
        }
        .segment_bytes(segment_bytes)
        .durability(Durability::Buffered)
        .zero_fill(ZeroFill::Never)
    }

    /// Makes the first segment of the new store, and its manifest in memory (D).
    fn new_store(&self, to: &dyn Dir, report: &RepairReport, from: &dyn Dir) -> Result<Manifest> {
        let mut manifest = match &self.old {
            Old::Manifest(manifest) => manifest.clone(),
            Old::Pieces { store, named } => self.pieced_together(*store, named, report, from)?,
        };
        let nonce = random_u32()?;
        let bytes = self
            .sources
            .iter()
            .map(|s| s.bytes)
            .max()
            .unwrap_or(SEGMENT_BYTES_FIRST)
            .clamp(crate::options::SEGMENT_BYTES_MIN, SEGMENT_BYTES_FIRST);
        let id = manifest.segment_next;
        let header = SegmentHeader {
            store: manifest.store,
            id,
            nonce,
            bytes,
            hash_key_id: KeyHash::new(&manifest.hash_key, manifest.store).id(),
            recycled: false,
        };
        create_segment(to, &header, false)?;
        manifest.segment_next = id + 1;
        manifest.segments = vec![SegmentEntry {
            id,
            nonce,
            bytes,
            sealed: None,
        }];
        manifest.runs = Vec::new();
        manifest.dropped = Vec::new();
        manifest.closed_at = None;
        Ok(manifest)
    }

    /// Makes a manifest out of what the log says and the caller named.
    fn pieced_together(
        &self,
        store: [u8; 16],
        named: &[NamespaceEntry],
        report: &RepairReport,
        from: &dyn Dir,
    ) -> Result<Manifest> {
        let mut ids_max = 0;
        let salvaged = salvage::read_log(from, &self.sources, None, &mut |piece| {
            if let Piece::Record(record) = piece {
                ids_max = ids_max.max(record.namespace);
            }
            Ok(())
        })?;
        let mut hash_key = [0; 16];
        getrandom::fill(&mut hash_key)
            .map_err(|e| Error::new(ErrorKind::Io, format!("no randomness: {e}")))?;
        let named_max = named.iter().map(|n| n.id).max().unwrap_or(0);
        debug_assert!(report.manifest_lost);
        Ok(Manifest {
            store,
            edit: 0,
            hash_key,
            generation_reserved: salvaged.generation,
            // As after a reboot: the wall clock is believed as far as it is then.
            anchor: Anchor {
                boot_id: [0; 16],
                boot_ms: 0,
                trusted_ms: salvaged.trusted_ms,
                slack_used_ms: 0,
            },
            segment_next: self.sources.iter().map(|s| s.id).max().unwrap_or(0) + 1,
            namespace_next: ids_max.max(named_max).saturating_add(1),
            closed_at: None,
            namespaces: named.to_vec(),
            segments: Vec::new(),
            runs: Vec::new(),
            dropped: Vec::new(),
        })
    }
}

impl RepairReport {
    fn add(&mut self, salvaged: Salvaged) {
        self.found_count = salvaged.records_count;
        self.lost = salvaged.lost;
    }
}

/// Writes the records of the old log into the new store.
struct Writer<'a> {
    engine: &'a Engine,
    plan: &'a Plan,
    upkeep: Upkeep,
    /// Keys whose newest record so far would offer them again: what a lost stretch behind it may
    /// have changed (C).
    restless: Vec<(u16, Vec<u8>)>,
    kept_count: u64,
    doubtful_count: u64,
}

impl Writer<'_> {
    fn take(&mut self, piece: Piece<'_>) -> Result<()> {
        match piece {
            Piece::Lost => self.doubt(),
            Piece::Record(record) => {
                let Some(kind) = self.plan.kind(&record) else {
                    return Ok(());
                };
                if is_restless(kind, record.kind) {
                    self.restless.push((record.namespace, record.key.to_vec()));
                }
                self.kept_count += 1;
                self.put(&record)
            }
        }
    }

    /// Something is lost here: whoever looks as if its effect had surely not begun may have begun
    /// it there.
    fn doubt(&mut self) -> Result<()> {
        for (namespace, key) in std::mem::take(&mut self.restless) {
            let wanted = self.engine.wanted(namespace, &key);
            let located = self.engine.locate(wanted, OwnedRecord::of)?;
            let Some(hit) = located.hit else { continue };
            let mut record = hit.taken.borrow();
            let Some(kind) = self.plan.kind(&record) else {
                continue;
            };
            if !is_restless(kind, record.kind) {
                continue;
            }
            record.kind = if kind == NamespaceKind::NonRepeatable {
                Kind::InDoubt
            } else {
                Kind::Started
            };
            // A claim that has lapsed, or an attempt that had failed: nobody owns it.
            if hit.taken.borrow().kind == Kind::Failed || record.kind == Kind::InDoubt {
                record.state.until_ms = 0;
            }
            record.expires_at_s = 0;
            record.parts.outcome = None;
            record.parts.error = None;
            record.parts.evidence = Some(EVIDENCE);
            self.doubtful_count += 1;
            self.put(&record)?;
        }
        Ok(())
    }

    /// Appends one record as its key's newest.
    fn put(&mut self, record: &Record<'_>) -> Result<()> {
        let engine = self.engine;
        let wanted = engine.wanted(record.namespace, record.key);
        loop {
            let located = engine.locate(wanted, |_| ())?;
            let older: Option<Older> = located.hit.map(|hit| hit.older);
            let mut record = *record;
            let mut core = engine.core();
            engine.check_writable(&core)?;
            record.parts.inherit_s = core.inherit(older, engine.now().trusted_ms);
            let frame_bytes = record.frame_bytes();
            if !core.fits(frame_bytes) {
                drop(core);
                let need = Need::Owed;
                engine.make_room_held(&mut self.upkeep, Room { frame_bytes, need })?;
                continue;
            }
            let entry = record.kind.is_unsettled().then(|| UnsettledEntry {
                namespace: record.namespace,
                deadline_boot_ms: None,
                owed_bytes: to_u32(OUTCOME_BYTES_DEFAULT).min(engine.options.segment_bytes / 8),
            });
            engine.append(&mut core, &record, wanted.h, older, entry);
            return engine.finish_append(&mut core, Durability::Buffered);
        }
    }
}

/// Says whether a key in this state would be claimed again without a doubt, though its effect
/// must not happen twice.
fn is_restless(namespace: NamespaceKind, record: Kind) -> bool {
    let once = matches!(
        namespace,
        NamespaceKind::NonRepeatable | NamespaceKind::Probeable
    );
    once && matches!(record, Kind::Claimed | Kind::Failed)
}
