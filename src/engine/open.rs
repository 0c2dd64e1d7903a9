//! Opening a directory: is it a store, is it free, what of it is ours; and creating one.
//!
//! The safety properties A to D are those of `recovery.rs`, which does the rest.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::catalog::{read_manifest, remove_if_there};
use super::join::open_shared;
use super::prepare::{Blocks, create_segment, fill_random, random_u32};
use super::reader::open_reader;
use super::recovery::recover;
use super::repair::{Repair, is_readable_damage};
use crate::clock::TrustedTime;
use crate::error::{Error, ErrorKind, Result};
use crate::format::manifest::{Manifest, RunEntry, SegmentEntry};
use crate::format::names::FileName;
use crate::format::record::FRAME_BYTES_MAX;
use crate::format::segment::{SEGMENT_HEADER_BYTES, SegmentHeader};
use crate::index::KeyHash;
use crate::log::replay::Replay;
use crate::log::segment::SegmentFile;
use crate::options::{OpenMode, Options, SEGMENT_BYTES_FIRST};
use crate::stats::OpenReport;
use crate::vfs::disk::{DiskDir, FileSystem};
use crate::vfs::{Access, Dir, Lock, LockMode};

/// How often a held lock is tried again while an open waits for it.
pub(super) const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Opens a store in a directory of the file system.
pub(crate) fn open_path(path: &Path, options: Options) -> Result<Arc<Engine>> {
    let shown = path.display().to_string();
    options.validate()?;
    let (dir, file_system) = open_disk(path, options.create, options.network_allowed, &shown)?;
    open_dir(dir, &shown, file_system == FileSystem::Local, options)
}

/// Opens a store in a directory of the file system for reading only.
pub(crate) fn open_path_read_only(path: &Path, options: Options) -> Result<Arc<Engine>> {
    let shown = path.display().to_string();
    let (dir, _) = open_disk(path, false, options.network_allowed, &shown)?;
    open_read_only(dir, &shown, options)
}

/// Opens a directory of a file system on which a store may be.
fn open_disk(
    path: &Path,
    create: bool,
    network_allowed: bool,
    shown: &str,
) -> Result<(Arc<dyn Dir>, FileSystem)> {
    let failed = |e| open_error(e, shown);
    let dir = DiskDir::open(path, create).map_err(failed)?;
    let file_system = dir.filesystem().map_err(failed)?;
    if let FileSystem::Network(name) = file_system
        && !network_allowed
    {
        return Err(Error::new(
            ErrorKind::Incompatible,
            format!(
                "network file system: type={name}; locks and flushes may not hold there; use a \
                 local disk, or allow_network_file_system"
            ),
        )
        .in_file(shown));
    }
    Ok((Arc::new(dir), file_system))
}

/// Says why a directory could not be opened.
pub(super) fn open_error(error: io::Error, shown: &str) -> Error {
    let what = match error.kind() {
        io::ErrorKind::NotFound => {
            "no store here: the directory, or the one it would be made in, does not exist"
        }
        io::ErrorKind::NotADirectory => "not a directory",
        _ => return Error::io("opening the directory failed", error).in_file(shown),
    };
    Error::new(ErrorKind::Incompatible, what).in_file(shown)
}

/// Opens a store in any directory.
pub(crate) fn open_dir(
    dir: Arc<dyn Dir>,
    shown: &str,
    in_place: bool,
    options: Options,
) -> Result<Arc<Engine>> {
    options.validate()?;
    let started = options.clock.read().boot_ms;
    look_before_lock(dir.as_ref(), shown, options.create)?;
    if options.shared {
        let engine = open_shared(dir, shown, in_place, options)?;
        return Ok(timed(engine, started));
    }
    let lock = take_lock(dir.as_ref(), shown, &options, true)?;
    let engine = match options.mode {
        OpenMode::Strict => recover_or_create(dir, lock, shown, in_place, options)?,
        OpenMode::Salvage => {
            let strict = options.clone();
            match recover_or_create(Arc::clone(&dir), lock, shown, in_place, strict) {
                Err(why) if is_readable_damage(&why) => {
                    let lock = take_lock(dir.as_ref(), shown, &options, true)?;
                    Repair::open_in_memory(dir.as_ref(), &options, lock, why)?
                }
                opened => opened?,
            }
        }
    };
    Ok(timed(engine, started))
}

/// Opens a store in any directory for reading only.
pub(crate) fn open_read_only(
    dir: Arc<dyn Dir>,
    shown: &str,
    options: Options,
) -> Result<Arc<Engine>> {
    options.validate()?;
    let started = options.clock.read().boot_ms;
    look_before_lock(dir.as_ref(), shown, false)?;
    let engine = open_reader(dir, shown, options)?;
    Ok(timed(Arc::new(engine), started))
}

/// Notes how long an open took.
fn timed(mut engine: Arc<Engine>, started_ms: u64) -> Arc<Engine> {
    let elapsed = engine.clock().read().boot_ms.saturating_sub(started_ms);
    if let Some(engine) = Arc::get_mut(&mut engine) {
        engine.report.elapsed = Duration::from_millis(elapsed);
    }
    engine
}

/// Refuses the target of a repair that has not finished: part of the log may be missing.
pub(super) fn refuse_unfinished(names: &[String]) -> Result<()> {
    let repairing = FileName::Repairing.to_string();
    if !names.contains(&repairing) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Incompatible,
        "a repair that writes this store has not finished; run it again with the same target",
    )
    .in_file(repairing))
}

pub(super) fn recover_or_create(
    dir: Arc<dyn Dir>,
    lock: Box<dyn Lock>,
    shown: &str,
    in_place: bool,
    options: Options,
) -> Result<Arc<Engine>> {
    let mut report = OpenReport::default();
    let manifest = match read_manifest(dir.as_ref())? {
        Some(manifest) => manifest,
        None => {
            report.created = true;
            create(dir.as_ref(), shown, &options)?
        }
    };
    recover(dir, lock, in_place, options, manifest, report)
}

/// Refuses what is not a store before anything is written, the lock file included (D).
fn look_before_lock(dir: &dyn Dir, shown: &str, create: bool) -> Result<()> {
    let names = dir
        .list()
        .map_err(|e| Error::io("listing the directory failed", e).in_file(shown))?;
    refuse_unfinished(&names)?;
    // Read before the lock is taken: what is not a store of this format gets no file.
    if read_manifest(dir)?.is_some() {
        return Ok(());
    }
    if let Some(foreign) = names.iter().find(|name| FileName::parse(name).is_none()) {
        return Err(Error::new(
            ErrorKind::Incompatible,
            format!("not a store: found={foreign}; nothing was written; use an empty directory"),
        )
        .in_file(shown));
    }
    if !create {
        return Err(Error::new(
            ErrorKind::Incompatible,
            "no store here: MANIFEST is missing",
        )
        .in_file(shown));
    }
    Ok(())
}

/// Takes the lock, and waits for it as long as the options say.
pub(super) fn take_lock(
    dir: &dyn Dir,
    shown: &str,
    options: &Options,
    create: bool,
) -> Result<Box<dyn Lock>> {
    let name = FileName::Lock.to_string();
    let note = format!("pid={}", std::process::id());
    let timeout_ms = u64::try_from(options.lock_timeout.as_millis()).unwrap_or(u64::MAX);
    let deadline = options.clock.read().boot_ms.saturating_add(timeout_ms);
    loop {
        let attempt = dir
            .lock(&name, create, &note)
            .map_err(|e| Error::io("locking the store failed", e).in_file(name.clone()))?;
        let holder = match attempt {
            Ok(lock) => return Ok(lock),
            Err(holder) => holder,
        };
        if options.clock.read().boot_ms >= deadline {
            let holder = shared_by(dir, &name).unwrap_or(holder);
            return Err(Error::new(
                ErrorKind::Locked,
                format!("store is open elsewhere: holder={holder}; close it there or wait"),
            )
            .in_file(shown));
        }
        std::thread::park_timeout(LOCK_RETRY);
    }
}

/// Names the holders of a lock that several share: its text is that of whoever was alone.
fn shared_by(dir: &dyn Dir, name: &str) -> Option<String> {
    let lock = dir.lock_file(name, Access::Read).ok()?;
    let is_shared = lock.try_lock(LockMode::Shared).ok()?;
    lock.unlock().ok()?;
    is_shared.then(|| "processes that share it or only read it".to_owned())
}

/// Creates a store: the first segment, then the manifest, whose rename makes it exist. Killed
/// before that, the next open starts again.
fn create(dir: &dyn Dir, shown: &str, options: &Options) -> Result<Manifest> {
    let names = dir
        .list()
        .map_err(|e| Error::io("listing the directory failed", e).in_file(shown))?;
    for name in &names {
        match FileName::parse(name) {
            Some(FileName::Segment(_)) => refuse_records(dir, name)?,
            Some(FileName::Run { .. } | FileName::Filter { .. } | FileName::Hint(_)) => {
                return Err(manifest_missing(name));
            }
            _ => {}
        }
    }
    let mut store = [0; 16];
    let mut hash_key = [0; 16];
    for bytes in [&mut store, &mut hash_key] {
        fill_random(dir, bytes)?;
    }
    let nonce = random_u32(dir)?;
    let bytes = SEGMENT_BYTES_FIRST.min(options.segment_bytes);
    let hash_key_id = KeyHash::new(&hash_key, store).id();
    create_segment(
        dir,
        &SegmentHeader {
            store,
            id: 1,
            nonce,
            bytes,
            hash_key_id,
            recycled: false,
        },
        Blocks::First,
        false,
    )?;
    let time = TrustedTime::resume(options.clock.as_ref(), None, 0);
    Ok(Manifest {
        store,
        edit: 0,
        hash_key,
        generation_reserved: 0,
        anchor: time.anchor(options.clock.as_ref(), 0, false),
        segment_next: 2,
        namespace_next: 1,
        closed_at: None,
        namespaces: Vec::new(),
        segments: vec![SegmentEntry {
            id: 1,
            nonce,
            bytes,
            sealed: None,
        }],
        runs: Vec::new(),
        dropped: Vec::new(),
    })
}

fn manifest_missing(name: &str) -> Error {
    Error::new(
        ErrorKind::Damaged,
        "MANIFEST is missing but files of a store are here; nothing was changed; restore it from \
         a backup",
    )
    .in_file(name)
}

/// Refuses a segment file that is here without a manifest (D). A file of which not even the
/// header is whole never held a record.
fn refuse_records(dir: &dyn Dir, name: &str) -> Result<()> {
    match read_first(dir, name)? {
        Some((_, true)) => Err(manifest_missing(name)),
        _ => Ok(()),
    }
}

/// Refuses an unlisted segment that is not ours to remove (C). The manifest is never older than
/// a drop: an unlisted segment below its next id was dropped, whatever came of the unlinking.
fn refuse_foreign(dir: &dyn Dir, name: &str, manifest: &Manifest, id: u64) -> Result<()> {
    let Some((header, has_records)) = read_first(dir, name)? else {
        return Ok(());
    };
    let ours = header.store == manifest.store;
    // A dropped segment that was being recycled under a new name has its old header still.
    if !has_records || (ours && header.id.min(id) < manifest.segment_next) {
        return Ok(());
    }
    Err(Error::damaged(
        name,
        0,
        "segment holds records but the manifest does not list it; nothing was changed; restore \
         the manifest that belongs to it, or move the file away",
    ))
}

/// Reads a segment's header, and whether a record follows it; `None` without a whole header.
fn read_first(dir: &dyn Dir, name: &str) -> Result<Option<(SegmentHeader, bool)>> {
    let failed = |e| Error::io("reading an unlisted segment failed", e).in_file(name);
    let file = dir.open(name, Access::Read).map_err(failed)?;
    let mut head = vec![0; SEGMENT_HEADER_BYTES + FRAME_BYTES_MAX];
    let got = file.read_at(&mut head, 0).map_err(failed)?;
    let head = head.get(..got).unwrap_or_default();
    Ok(SegmentHeader::decode(head)
        .ok()
        .map(|header| (header, Replay::new(head, header.nonce).next().is_some())))
}

/// Finds what interrupted work left behind: temporaries, unlisted runs, filters and hints, and
/// segments that never held a record or whose drop is declared (C).
pub(super) fn find_orphans(dir: &dyn Dir, manifest: &Manifest) -> Result<Vec<String>> {
    let listed: BTreeSet<u64> = manifest.segments.iter().map(|s| s.id).collect();
    let open: BTreeSet<u64> = manifest
        .segments
        .iter()
        .filter(|s| s.sealed.is_none())
        .map(|s| s.id)
        .collect();
    let mut orphans = Vec::new();
    let names = dir
        .list()
        .map_err(|e| Error::io("listing the directory failed", e))?;
    for name in names {
        use FileName::{
            Gate, Lock, Manifest, Members, Owner, Repairing, Reserve, SegmentCopy, Shared,
            Temporary,
        };
        let is_orphan = match FileName::parse(&name) {
            None | Some(Lock | Manifest | Members | Reserve | Repairing | Shared | Gate(_)) => {
                false
            }
            // Whoever looks for orphans is alone: no other opener is alive.
            Some(FileName::ManifestNew | SegmentCopy(_) | Temporary { .. } | Owner(_)) => true,
            Some(FileName::Hint(id)) => !open.contains(&id),
            Some(
                FileName::Run { lo, hi, generation } | FileName::Filter { lo, hi, generation },
            ) => !manifest.runs.contains(&RunEntry { lo, hi, generation }),
            Some(FileName::Segment(id)) if listed.contains(&id) => false,
            Some(FileName::Segment(id)) => {
                refuse_foreign(dir, &name, manifest, id)?;
                true
            }
        };
        if is_orphan {
            orphans.push(name);
        }
    }
    Ok(orphans)
}

/// Removes left-over files. One that may not be removed stays for a later open: it is listed
/// nowhere, and whatever is made under its name replaces it.
pub(super) fn remove_orphans(dir: &dyn Dir, orphans: &[String]) -> Result<()> {
    for name in orphans {
        match remove_if_there(dir, name) {
            Err(error) if error.kind() != io::ErrorKind::PermissionDenied => {
                return Err(Error::io("removing a left-over file failed", error).in_file(name));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Opens a listed segment and compares size and header with what the manifest says.
pub(super) fn open_segment(
    dir: &dyn Dir,
    manifest: &Manifest,
    entry: &SegmentEntry,
    hash_key_id: u64,
    access: Access,
) -> Result<Arc<SegmentFile>> {
    let name = FileName::Segment(entry.id).to_string();
    let file = dir.open(&name, access).map_err(|e| {
        let missing = e.kind() == io::ErrorKind::NotFound;
        let error = Error::io("opening a segment failed", e).in_file(name.clone());
        if missing {
            return Error::damaged(name.clone(), 0, "segment is missing; nothing was changed");
        }
        error
    })?;
    let failed = |e| Error::io("reading a segment failed", e).in_file(name.clone());
    let size = file.size().map_err(failed)?;
    // The end of an unsealed file is the log's to find: a shorter one reads as zeros behind it.
    if entry.sealed.is_some() && size != u64::from(entry.bytes) {
        return Err(Error::damaged(
            name.clone(),
            size,
            format!(
                "segment has another size: found={size} expected={}; nothing was changed",
                entry.bytes
            ),
        ));
    }
    let mut head = [0; SEGMENT_HEADER_BYTES];
    file.read_at(&mut head, 0).map_err(failed)?;
    let expected = SegmentHeader {
        store: manifest.store,
        id: entry.id,
        nonce: entry.nonce,
        bytes: entry.bytes,
        hash_key_id,
        recycled: false,
    };
    let header = match SegmentHeader::decode(&head) {
        Ok(found)
            if (SegmentHeader {
                recycled: false,
                ..found
            }) == expected =>
        {
            found
        }
        Ok(_) => {
            return Err(Error::damaged(
                name,
                0,
                "file of another store or segment stands here; nothing was changed",
            ));
        }
        Err(why) => {
            return Err(Error::damaged(
                name,
                0,
                format!("{}; nothing was changed", why.0),
            ));
        }
    };
    Ok(Arc::new(SegmentFile::new(&header, file)))
}
