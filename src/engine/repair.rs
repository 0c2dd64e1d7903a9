//! `repair`: writes what is left of a damaged store into a new directory.
//!
//! Safety properties:
//! A. The damaged directory is only read, and locked until it is out of use.
//! B. The new directory is marked as unfinished before its first file and until everything in it
//!    is durable: killed at any step, it is refused when opened or repaired, and the next repair
//!    into it starts again.
//! C. A key whose later records may be lost is not offered again where that could do the effect
//!    twice: what a lost stretch may have changed goes in doubt, or to the probe.
//! D. It is the same store afterwards: identity, epochs and derived keys go on, and segment ids go
//!    on above all that exist.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::carry::OwnedRecord;
use super::catalog::{read_manifest, remove_if_there};
use super::core::{Older, UnsettledEntry};
use super::open::{find_orphans, open_error, refuse_unfinished, take_lock};
use super::prepare::{Blocks, create_segment, fill_random, random_u32};
use super::recovery::recover;
use super::room::{Need, Room};
use super::salvage::{OldLog, Piece, Salvaged};
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
    Durability, OUTCOME_BYTES_DEFAULT, Options, SEGMENT_BYTES_FIRST, SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN, ZeroFill,
};
use crate::stats::{LostRange, OpenReport};
use crate::vfs::disk::{DiskDir, exchange, lies_in};
use crate::vfs::{Access, Dir, Lock, is_media_error};

/// What a key is told that may have gone on in a lost stretch.
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
    purged: BTreeSet<u16>,
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
    /// Records written into the new store, as they were; 0 for a dry run.
    pub kept_count: u64,
    /// Valid records of purged namespaces, which were left behind.
    pub purged_count: u64,
    /// Keys that went in doubt, or to the probe, because a later record may be lost.
    pub doubtful_count: u64,
    /// Cells, watermarks and outbox entries whose later records may be lost: they may be older
    /// than they were, and an entry that was dispatched may be dispatched again.
    pub outdated_count: u64,
    /// The manifest could not be read: namespaces are those that the caller named, and the end of
    /// the log is not known.
    pub manifest_lost: bool,
    /// What is lost, in the order of the log: the first 10,000 ranges.
    pub lost: Vec<LostRange>,
    /// The number of lost ranges.
    pub lost_count: u64,
    /// The bytes of all lost ranges.
    pub lost_bytes: u64,
}

impl RepairReport {
    /// Says that nothing is lost: the store needs no repair.
    pub fn is_whole(&self) -> bool {
        self.lost_count == 0 && !self.manifest_lost
    }

    fn add(&mut self, salvaged: Salvaged) {
        self.found_count = salvaged.records_count;
        self.lost = salvaged.lost;
        self.lost_count = salvaged.lost_count;
        self.lost_bytes = salvaged.lost_bytes;
    }
}

impl Repair {
    /// Prepares the repair of the store in this directory. Nothing is read yet.
    pub fn of(path: impl AsRef<Path>) -> Self {
        Repair {
            path: path.as_ref().to_owned(),
            named: Vec::new(),
            purged: BTreeSet::new(),
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

    /// Says that the namespace of this number was purged: its records are left behind.
    pub fn purged(mut self, id: u16) -> Self {
        self.purged.insert(id);
        self
    }

    /// Sets how long to wait for an opener of the damaged store to go. Default: not at all.
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.options = self.options.lock_timeout(timeout);
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
        self.look(from).map(|(_, report)| report)
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
    /// has newer records, `Damaged` if neither manifest nor any segment can be read or the
    /// manifest is older than the log, `Invalid` if namespaces have to be named, `Io`.
    pub fn dry_run(&self) -> Result<RepairReport> {
        let (dir, lock) = self.take_source()?;
        let (_, report) = self.look(&dir)?;
        drop(lock);
        Ok(report)
    }

    /// Writes what is left into the directory `target`, which must be missing, empty, or left
    /// over by an interrupted repair. The store there is complete when this returns.
    ///
    /// # Errors
    /// As [`Repair::dry_run`]; `Invalid` for a target that holds something else, or lies inside
    /// the damaged store.
    pub fn write_to(&self, target: impl AsRef<Path>) -> Result<RepairReport> {
        let (dir, lock) = self.take_source()?;
        let report = self.write_path(&dir, target.as_ref())?;
        drop(lock);
        Ok(report)
    }

    /// Does what [`Repair::write_to`] does, and then exchanges the two directories in one step:
    /// the repaired store takes the place of the damaged one, whose files are in `target`
    /// afterwards. Nobody gets the damaged store open in between.
    ///
    /// # Errors
    /// As [`Repair::write_to`]; `Io` where the file system cannot exchange directories: the
    /// repaired store is complete in `target` then, unless [`Error::applied`] says `Maybe`.
    pub fn replace_by_way_of(&self, target: impl AsRef<Path>) -> Result<RepairReport> {
        let target = target.as_ref();
        let (dir, lock) = self.take_source()?;
        let report = self.write_path(&dir, target)?;
        let shown = self.path.display().to_string();
        match exchange(&self.path, target) {
            Ok(Ok(())) => {}
            Ok(Err(late)) => {
                let what = "exchanging the directories may not survive a power cut";
                return Err(Error::io(what, late).in_file(shown).maybe_applied());
            }
            Err(error) => {
                let what = format!(
                    "the repaired store is complete in {}, but exchanging the directories failed",
                    target.display()
                );
                return Err(Error::io(what, error).in_file(shown));
            }
        }
        drop(lock);
        Ok(report)
    }

    fn write_path(&self, dir: &DiskDir, target: &Path) -> Result<RepairReport> {
        let shown = target.display().to_string();
        let failed = |e: io::Error| open_error(e, &shown);
        if lies_in(target, &self.path).map_err(failed)? {
            return Err(Error::invalid(
                "target of a repair lies inside the damaged store; nothing was written; name \
                 another",
            )
            .in_file(shown));
        }
        // What cannot be repaired leaves no target behind.
        self.look(dir)?;
        let made = DiskDir::open(target, true).map_err(failed)?;
        self.write(dir, Arc::new(made), &shown)
    }

    /// Locks the damaged store where that is possible without making a file.
    fn take_source(&self) -> Result<(DiskDir, Option<Box<dyn Lock>>)> {
        let shown = self.path.display().to_string();
        let dir = DiskDir::open(&self.path, false).map_err(|e| open_error(e, &shown))?;
        let lock = match take_lock(&dir, &shown, &self.options, false) {
            Ok(lock) => Some(lock),
            // Without a lock file, or the right to open it, nobody else writes here.
            Err(error) if is_unlockable(&error) => None,
            Err(error) => return Err(error),
        };
        Ok((dir, lock))
    }

    /// Reads everything, writes nothing.
    fn look(&self, from: &dyn Dir) -> Result<(Plan, RepairReport)> {
        let mut plan = self.plan(from)?;
        let mut report = plan.report();
        let mut unnamed = BTreeSet::new();
        let salvaged = plan.log.read(from, &mut |piece| {
            let Piece::Record(_, record) = piece else {
                return Ok(());
            };
            match plan.kinds.get(&record.namespace) {
                Some(kind) => return check_kind(*kind, &record),
                None if self.purged.contains(&record.namespace) => {}
                None => {
                    unnamed.insert(record.namespace);
                }
            }
            report.purged_count += 1;
            Ok(())
        })?;
        plan.check_named(&unnamed)?;
        plan.any_lost = salvaged.lost_count > 0 || report.manifest_lost;
        plan.generation = salvaged.generation;
        plan.trusted_ms = salvaged.trusted_ms;
        plan.namespace_max = salvaged.namespace_max;
        report.add(salvaged);
        Ok((plan, report))
    }

    /// Reads everything and writes it into another directory (B).
    fn write(&self, from: &dyn Dir, to: Arc<dyn Dir>, shown: &str) -> Result<RepairReport> {
        let (plan, report) = self.look(from)?;
        let lock = begin(to.as_ref(), shown, &self.options)?;
        let (engine, report) = self.write_marked(from, &to, lock, &plan, report)?;
        engine.close()?;
        finish(to.as_ref())?;
        engine.unlock_if_over();
        Ok(report)
    }

    /// Writes the new store up to its last record, and hands it out open.
    fn write_marked(
        &self,
        from: &dyn Dir,
        to: &Arc<dyn Dir>,
        lock: Box<dyn Lock>,
        plan: &Plan,
        mut report: RepairReport,
    ) -> Result<(Arc<Engine>, RepairReport)> {
        let manifest = plan.new_store(to.as_ref())?;
        let options = plan.options(&self.options);
        let found = OpenReport::default();
        let engine = recover(Arc::clone(to), lock, false, options, manifest, found)?;
        engine.time.raise(engine.clock(), plan.trusted_ms);
        let mut writer = Writer {
            engine: &engine,
            plan,
            restless: BTreeSet::new(),
            attached: BTreeSet::new(),
            outdated: BTreeSet::new(),
            kept_count: 0,
            doubtful_count: 0,
        };
        // What is told is what this reading has met: a dying disk may read once and not twice.
        let salvaged = plan.log.read(from, &mut |piece| writer.take(piece))?;
        report.kept_count = writer.kept_count;
        report.doubtful_count = writer.doubtful_count;
        report.outdated_count = writer.outdated.len() as u64;
        if salvaged.lost_count > report.lost_count && !plan.any_lost {
            return Err(Error::new(
                ErrorKind::Damaged,
                "more is lost than at the first reading: the device is failing; copy the \
                 directory to another one first",
            ));
        }
        report.add(salvaged);
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
            purged: BTreeSet::new(),
            options: options.clone(),
        };
        if repair.plan(dir)?.is_pieced_together() {
            // Nobody is here to name the namespaces.
            return Err(why);
        }
        let (plan, report) = repair.look(dir)?;
        let memory = crate::vfs::sim::SimDisk::memory().dir();
        let (mut engine, report) = repair.write_marked(dir, &memory, lock, &plan, report)?;
        let Some(only) = Arc::get_mut(&mut engine) else {
            return Err(why);
        };
        only.salvaged = Some(why.to_string());
        only.report.salvaged = true;
        only.report.lost = report.lost;
        Ok(engine)
    }

    fn plan(&self, from: &dyn Dir) -> Result<Plan> {
        let names = from
            .list()
            .map_err(|e| Error::io("listing the directory failed", e))?;
        refuse_unfinished(&names)?;
        match read_manifest(from) {
            Ok(Some(manifest)) => {
                // A manifest that is older than the log would hide what came later.
                find_orphans(from, &manifest)?;
                let kinds = manifest.namespaces.iter().map(|n| (n.id, n.kind));
                Ok(Plan::new(
                    OldLog::listed(&manifest),
                    kinds.collect(),
                    Old::Manifest(manifest),
                ))
            }
            Err(error) if !is_readable_damage(&error) => Err(error),
            Ok(None) | Err(_) => {
                let kinds = self.named_kinds()?;
                let old = Old::Named(self.named.clone());
                Ok(Plan::new(OldLog::found(from)?, kinds, old))
            }
        }
    }

    /// Checks what the caller has named.
    fn named_kinds(&self) -> Result<HashMap<u16, NamespaceKind>> {
        let mut kinds = HashMap::new();
        let mut names = BTreeSet::new();
        for NamespaceEntry { id, kind, name } in &self.named {
            check_namespace(name)?;
            let is_number = (1..u16::MAX).contains(id) && !self.purged.contains(id);
            if !is_number || kinds.insert(*id, *kind).is_some() || !names.insert(name) {
                return Err(Error::invalid(format!(
                    "each namespace has one number from 1 to 65534 and one name: id={id} \
                     name={name}"
                )));
            }
        }
        Ok(kinds)
    }
}

fn io_source(error: &Error) -> Option<&io::Error> {
    std::error::Error::source(error).and_then(|source| source.downcast_ref())
}

fn is_unlockable(error: &Error) -> bool {
    use io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem};
    io_source(error)
        .is_some_and(|e| [NotFound, PermissionDenied, ReadOnlyFilesystem].contains(&e.kind()))
}

/// Says whether a file is there but cannot be believed, or not be read.
pub(super) fn is_readable_damage(error: &Error) -> bool {
    error.kind() == ErrorKind::Damaged || io_source(error).is_some_and(is_media_error)
}

/// Refuses a kind that the records contradict: with it every key would be new.
fn check_kind(kind: NamespaceKind, record: &Record<'_>) -> Result<()> {
    let fits = match record.kind {
        Kind::Forgotten => true,
        Kind::Seen => kind == NamespaceKind::Filter,
        Kind::Cell => kind == NamespaceKind::Cells,
        Kind::Watermark => kind == NamespaceKind::Watermarks,
        Kind::Queued | Kind::Parked => kind == NamespaceKind::Outbox,
        _ => kind.has_claims(),
    };
    if fits {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "namespace has another kind by its records: id={} named={}; nothing was written",
        record.namespace,
        kind.name()
    )))
}

/// Takes the target and marks it as unfinished, with nothing else in it.
fn begin(to: &dyn Dir, shown: &str, options: &Options) -> Result<Box<dyn Lock>> {
    let failed = |e| Error::io("preparing the repair's target failed", e).in_file(shown);
    let mark = FileName::Repairing.to_string();
    let lock_name = FileName::Lock.to_string();
    let refuse = |names: &[String]| {
        let mut others = names.iter().filter(|name| **name != lock_name);
        let other = others.next().filter(|_| !names.contains(&mark));
        other.map_or(Ok(()), |other| {
            Err(Error::invalid(format!(
                "target of a repair is not empty: found={other}; nothing was written; name another"
            ))
            .in_file(shown))
        })
    };
    // Looked at first, so that what is not ours gets no LOCK either.
    refuse(&to.list().map_err(failed)?)?;
    let lock = take_lock(to, shown, options, true)?;
    let names = to.list().map_err(failed)?;
    refuse(&names)?;
    if !names.contains(&mark) {
        // It has no bytes: its name says it all, and the directory keeps that. Beside it there is
        // nothing to remove, so that one sync is enough for both.
        to.open(&mark, Access::Create).map_err(failed)?;
    }
    let is_left = |name: &&String| **name != mark && **name != lock_name;
    for name in names.iter().filter(is_left) {
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
#[derive(Debug)]
enum Old {
    Manifest(Manifest),
    Named(Vec<NamespaceEntry>),
}

/// What is read, and how it is understood.
#[derive(Debug)]
struct Plan {
    log: OldLog,
    kinds: HashMap<u16, NamespaceKind>,
    old: Old,
    /// The rest is what the first reading has found.
    any_lost: bool,
    generation: u64,
    trusted_ms: u64,
    namespace_max: u16,
}

impl Plan {
    fn new(log: OldLog, kinds: HashMap<u16, NamespaceKind>, old: Old) -> Plan {
        Plan {
            log,
            kinds,
            old,
            any_lost: false,
            generation: 0,
            trusted_ms: 0,
            namespace_max: 0,
        }
    }

    fn is_pieced_together(&self) -> bool {
        matches!(self.old, Old::Named(_))
    }

    fn report(&self) -> RepairReport {
        RepairReport {
            segments_count: self.log.sources.len() as u64,
            manifest_lost: self.is_pieced_together(),
            ..RepairReport::default()
        }
    }

    /// A record whose namespace nobody knows must not be lost in silence.
    fn check_named(&self, unnamed: &BTreeSet<u16>) -> Result<()> {
        let (what, first) = match &self.old {
            Old::Manifest(manifest) => {
                let newer = unnamed.range(manifest.namespace_next..).next();
                (
                    "MANIFEST is older than the log; restore the right one",
                    newer,
                )
            }
            Old::Named(_) => (
                "MANIFEST cannot be read: name each namespace by number, name and kind, in the \
                 order in which they were made, or say that it was purged",
                unnamed.first(),
            ),
        };
        let Some(id) = first else { return Ok(()) };
        let text = format!("records of an unknown namespace: id={id}; {what}");
        Err(match &self.old {
            Old::Manifest(_) => Error::damaged(FileName::Manifest.to_string(), 0, text),
            Old::Named(_) => Error::invalid(text),
        })
    }

    fn bytes_max(&self) -> u32 {
        let bytes = self.log.sources.iter().map(|source| source.bytes);
        bytes.max().unwrap_or(0).min(SEGMENT_BYTES_MAX)
    }

    fn options(&self, given: &Options) -> Options {
        let segment_bytes = self.bytes_max().max(given.segment_bytes);
        Options {
            log_bytes_max: None,
            unsettled_count_max: usize::MAX,
            background: false,
            on_event: None,
            ..given.clone()
        }
        .segment_bytes(segment_bytes.next_multiple_of(4096))
        .durability(Durability::Buffered)
        .zero_fill(ZeroFill::Never)
    }

    /// Makes the first segment of the new store, and its manifest in memory (D).
    fn new_store(&self, to: &dyn Dir) -> Result<Manifest> {
        let mut manifest = match &self.old {
            Old::Manifest(manifest) => manifest.clone(),
            Old::Named(named) => self.pieced_together(to, named)?,
        };
        if self.any_lost {
            // Tokens are made under it, and the record of a used one may be among what is lost:
            // those of before are unknown from here on.
            fill_random(to, &mut manifest.hash_key)?;
        }
        let nonce = random_u32(to)?;
        let bytes = self
            .bytes_max()
            .clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_FIRST);
        let id = manifest.segment_next;
        let header = SegmentHeader {
            store: manifest.store,
            id,
            nonce,
            bytes,
            hash_key_id: KeyHash::new(&manifest.hash_key, manifest.store).id(),
            recycled: false,
        };
        create_segment(to, &header, Blocks::First, false)?;
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
    fn pieced_together(&self, to: &dyn Dir, named: &[NamespaceEntry]) -> Result<Manifest> {
        let mut hash_key = [0; 16];
        fill_random(to, &mut hash_key)?;
        let named_max = named.iter().map(|n| n.id).max().unwrap_or(0);
        Ok(Manifest {
            store: self.log.store,
            edit: 0,
            hash_key,
            generation_reserved: self.generation,
            // As after a reboot: the wall clock is believed as far as it is then.
            anchor: Anchor {
                boot_id: [0; 16],
                boot_ms: 0,
                trusted_ms: self.trusted_ms,
                slack_used_ms: 0,
            },
            segment_next: self.log.segment_next(),
            namespace_next: self.namespace_max.max(named_max).saturating_add(1),
            closed_at: None,
            namespaces: named.to_vec(),
            segments: Vec::new(),
            runs: Vec::new(),
            dropped: Vec::new(),
        })
    }
}

/// Writes the records of the old log into the new store.
struct Writer<'a> {
    engine: &'a Engine,
    plan: &'a Plan,
    /// Keys whose newest record so far would offer them again: what a lost stretch behind it may
    /// have changed (C). Kept only if anything is lost at all.
    restless: BTreeSet<(u16, Vec<u8>)>,
    /// Cells, watermarks and outbox entries, and those of them that something lost may concern.
    attached: BTreeSet<(u16, Vec<u8>)>,
    outdated: BTreeSet<(u16, Vec<u8>)>,
    kept_count: u64,
    doubtful_count: u64,
}

impl Writer<'_> {
    fn take(&mut self, piece: Piece<'_>) -> Result<()> {
        match piece {
            Piece::Lost => self.doubt(),
            Piece::Record(position, mut record) => {
                let Some(kind) = self.plan.kinds.get(&record.namespace) else {
                    return Ok(());
                };
                if self.plan.any_lost && is_once(*kind) {
                    let key = (record.namespace, record.key.to_vec());
                    if is_restless(*kind, record.kind) {
                        self.restless.insert(key);
                    } else {
                        self.restless.remove(&key);
                    }
                }
                if self.plan.any_lost && !kind.has_claims() && *kind != NamespaceKind::Filter {
                    self.note_attached(&record);
                }
                if record.kind.is_queued() {
                    // Its place in the order is where it was first.
                    record.parts.origin = record.parts.origin.or(Some(position.get()));
                }
                self.kept_count += 1;
                self.put(&record)
            }
        }
    }

    /// The newest record of what is attached is what it is, whatever was lost before it.
    fn note_attached(&mut self, record: &Record<'_>) {
        let key = (record.namespace, record.key.to_vec());
        self.outdated.remove(&key);
        if record.kind.is_attached() {
            self.attached.insert(key);
        } else {
            self.attached.remove(&key);
        }
    }

    /// Something is lost here: whoever looks as if its effect had surely not begun may have begun
    /// it there, and whoever began may have begun again.
    fn doubt(&mut self) -> Result<()> {
        self.outdated.extend(self.attached.iter().cloned());
        let now_ms = self.engine.now().trusted_ms;
        for (namespace, key) in std::mem::take(&mut self.restless) {
            let wanted = self.engine.wanted(namespace, &key);
            let located = self.engine.locate(wanted, OwnedRecord::of)?;
            let (Some(hit), Some(kind)) = (located.hit, self.plan.kinds.get(&namespace)) else {
                continue;
            };
            let mut record = hit.taken.borrow();
            let has_expired = record.kind == Kind::Failed
                && record.expires_at_s != 0
                && now_ms >= u64::from(record.expires_at_s) * 1000;
            if has_expired {
                continue;
            }
            let is_owned = record.kind != Kind::Failed;
            record.kind = if *kind == NamespaceKind::NonRepeatable {
                Kind::InDoubt
            } else {
                Kind::Started
            };
            // An attempt that had failed, and a doubt, have no owner whose lease could run.
            if !is_owned || record.kind == Kind::InDoubt {
                record.state.until_ms = 0;
            }
            // The effect may have begun at any moment until now: a probe is believed from here on.
            record.state.at_ms = now_ms;
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
    fn put(&self, record: &Record<'_>) -> Result<()> {
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
            let room = Room::of_one(frame_bytes, Need::Any);
            if !core.has_room(room) {
                drop(core);
                engine.make_room(room)?;
                while engine.merge_once()? {}
                engine.remove_left(&mut engine.upkeep())?;
                continue;
            }
            let entry = record.kind.is_unsettled().then(|| UnsettledEntry {
                namespace: record.namespace,
                deadline_boot_ms: None,
                owed_bytes: if record.kind.is_open_claim() {
                    to_u32(OUTCOME_BYTES_DEFAULT).min(engine.options.segment_bytes / 8)
                } else {
                    0
                },
                origin: 0,
            });
            engine.append(&mut core, &record, wanted.h, older, entry);
            return engine.finish_append(&mut core, Durability::Buffered);
        }
    }
}

fn is_once(namespace: NamespaceKind) -> bool {
    matches!(
        namespace,
        NamespaceKind::NonRepeatable | NamespaceKind::Probeable
    )
}

/// Says whether a key in this state would be offered again on the strength of what is left,
/// though its effect must not happen twice.
fn is_restless(namespace: NamespaceKind, record: Kind) -> bool {
    match record {
        Kind::Claimed | Kind::Failed => is_once(namespace),
        // A probe is asked anyway, but only some time after the newest start.
        Kind::Started => namespace == NamespaceKind::Probeable,
        _ => false,
    }
}
