//! Opening for reading only: beside processes that share the store, or where nobody has it open.
//!
//! Safety properties:
//! A. Nothing is made, written or removed: the directory of a reader refuses it.
//! B. LOCK is held shared, so nobody has the store alone: no file is used again, and what is sealed
//!    stays as it is as long as it is mapped.
//! C. What is not sealed is read as far as was told at the end of a turn, without the turn; where
//!    nobody can write, whole. Nothing of it is ever taken back. It is not mapped, because the
//!    first one to come may cut it.
//! D. A manifest counts together with an end of the log that was told after the manifest was read,
//!    and that needs no later edit: what it does not list any more was carried over before that
//!    end.
//! E. SHARED says how things are if an owner is alive, or if it has changed since nobody was there
//!    and everything was read.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Engine;
use super::catalog::{Catalog, read_manifest};
use super::core::View;
use super::follow::{Read, not_read_back};
use super::join::{JOIN_WAIT, Rebuilt, check_in_place, not_shared};
use super::namespace::to_ms;
use super::open::{LOCK_RETRY, find_orphans};
use super::prepare::Maintaining;
use super::recovery::{Base, assemble};
use super::shared::is_gone;
use crate::clock::{Clock, TrustedTime};
use crate::error::{Error, ErrorKind, Result};
use crate::format::StoreId;
use crate::format::manifest::Manifest;
use crate::format::names::FileName;
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::shared::{SHARED_BYTES, SharedCells};
use crate::format::to_usize;
use crate::index::KeyHash;
use crate::log::bell;
use crate::log::segment::SegmentFile;
use crate::options::{OpenMode, Options};
use crate::position::Position;
use crate::stats::OpenReport;
use crate::vfs::fork::ForkGuard;
use crate::vfs::{Access, Dir, File, Lock, LockAttempt, LockFile, LockMode};

/// How long a reader pauses when the store was being changed.
const PAUSE: Duration = Duration::from_millis(1);

/// How far the log is read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// To its end, by who may write, alone or with the turn held.
    Turn,
    /// To its end, by a reader while nobody can write.
    Still,
    /// To what was told at the end of a turn.
    Told(Position),
}

impl Reach {
    /// Says how far a manifest and what was told after it was read go together (D); `None`: not at
    /// all, unless the turn is held.
    pub(super) fn of(cells: &SharedCells, manifest: &Manifest, has_turn: bool) -> Option<Reach> {
        if cells.is_told() && cells.end_edit <= manifest.edit {
            return Some(Reach::Told(Position::from_u64(cells.end)));
        }
        has_turn.then_some(Reach::Turn)
    }

    /// Cuts off what does not count of a segment's image (C).
    pub(super) fn cut(self, id: u64, image: &mut Vec<u8>) {
        let Reach::Told(told) = self else {
            return;
        };
        match told.segment().cmp(&id) {
            std::cmp::Ordering::Less => image.truncate(SEGMENT_HEADER_BYTES),
            std::cmp::Ordering::Equal => image.truncate(to_usize(told.offset())),
            std::cmp::Ordering::Greater => {}
        }
    }

    pub(super) fn is_told(self) -> bool {
        matches!(self, Reach::Told(_))
    }

    /// Refuses less than was told.
    pub(super) fn check(self, active: &SegmentFile, end: u32) -> Result<()> {
        match self {
            Reach::Told(told) if told != Position::new(active.id, end) => {
                Err(not_read_back(active, end))
            }
            _ => Ok(()),
        }
    }
}

/// A directory in which nothing is changed (A).
#[derive(Debug)]
struct ReadOnlyDir(Arc<dyn Dir>);

fn refused<T>() -> io::Result<T> {
    Err(io::Error::new(
        io::ErrorKind::ReadOnlyFilesystem,
        "store is open for reading only",
    ))
}

impl Dir for ReadOnlyDir {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        if access == Access::Create {
            return refused();
        }
        self.0.open(name, Access::Read)
    }

    fn rename(&self, _from: &str, _to: &str) -> io::Result<()> {
        refused()
    }

    fn unlink(&self, _name: &str) -> io::Result<()> {
        refused()
    }

    fn sync(&self) -> io::Result<()> {
        refused()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.0.list()
    }

    fn lock(&self, _name: &str, _create: bool, _note: &str) -> io::Result<LockAttempt> {
        refused()
    }

    fn lock_file(&self, name: &str, _access: Access) -> io::Result<Arc<dyn LockFile>> {
        self.0.lock_file(name, Access::Read)
    }
}

/// A lock that is let go at once, whoever has its file open: a forked child may.
#[derive(Debug)]
struct Held {
    lock: Arc<dyn LockFile>,
    home: ForkGuard,
}

impl Held {
    fn new(lock: Arc<dyn LockFile>) -> Self {
        Held {
            lock,
            home: ForkGuard::new(),
        }
    }
}

impl Lock for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        if self.home.is_at_home() {
            self.lock.unlock().unwrap_or_default();
        }
    }
}

/// Who else is there.
enum Presence {
    /// Somebody who writes.
    Written,
    /// Nobody; and nobody comes in meanwhile, unless the file to lock is still to be made.
    Still(Option<Held>),
}

/// How the store is at one moment.
#[derive(Clone, Debug)]
struct Seen {
    reach: Reach,
    durable: Position,
    poison: Option<String>,
    /// Whose SHARED this was; 0 while nobody wrote.
    epoch: u64,
}

/// What SHARED said when everything was read while nobody could write: as long as it says that,
/// there is nothing new (E). Held by the thread of this process that follows.
type Settled = Option<Vec<u8>>;
/// Held by whoever follows, or does not want anybody to.
pub(crate) type Reading<'a> = MutexGuard<'a, Settled>;

/// What a reader has that another opener has not.
#[derive(Debug)]
pub(crate) struct Reader {
    dir: Arc<dyn Dir>,
    store: StoreId,
    /// How long a call waits for one who is recovering the store.
    wait: Duration,
    settled: Mutex<Settled>,
    /// Whose SHARED was read last; changed with `settled` held.
    epoch: AtomicU64,
}

impl Reader {
    /// Returns the bytes of SHARED; none if nobody has shared the store yet.
    fn shared_bytes(&self) -> Result<Vec<u8>> {
        let name = FileName::Shared.to_string();
        let failed = |e| Error::io("reading what processes share failed", e).in_file(name.clone());
        // By its name: the first one to come makes it anew.
        let file = match self.dir.open(&name, Access::Read) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut bytes = vec![0; SHARED_BYTES];
        let got = file.read_at(&mut bytes, 0).map_err(failed)?;
        bytes.truncate(got);
        Ok(bytes)
    }

    /// Looks who else is there; `None`: somebody is coming or going.
    fn look(&self) -> Result<Option<Presence>> {
        let failed = |e| Error::io("listing the directory failed", e);
        let names = self.dir.list().map_err(failed)?;
        let mut owners = names.iter().filter_map(|name| match FileName::parse(name) {
            Some(FileName::Owner(generation)) => Some(generation),
            _ => None,
        });
        // Whoever owns a file has made SHARED before, or has found it made.
        if owners.any(|generation| !is_gone(self.dir.as_ref(), generation)) {
            return Ok(Some(Presence::Written));
        }
        let Some(members) = self.members()? else {
            return Ok(Some(Presence::Still(None)));
        };
        // Alone, never shared: whoever else shares it would take this reader for a writer.
        let locked = members
            .try_lock(LockMode::Exclusive)
            .map_err(|e| Error::io("locking the store failed", e))?;
        Ok(locked.then(|| Presence::Still(Some(Held::new(members)))))
    }

    /// Opens what whoever writes holds.
    fn members(&self) -> Result<Option<Arc<dyn LockFile>>> {
        let name = FileName::Members.to_string();
        match self.dir.lock_file(&name, Access::Read) {
            Ok(members) => Ok(Some(members)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("locking the store failed", error).in_file(name)),
        }
    }

    fn read_listed(&self) -> Result<Manifest> {
        read_manifest(self.dir.as_ref())?.ok_or_else(|| {
            let name = FileName::Manifest.to_string();
            Error::damaged(name, 0, "MANIFEST is gone; restore it from a backup")
        })
    }

    /// Has the store read as it is; `None`: it was changed meanwhile.
    fn try_read<T>(
        &self,
        settled: &mut Settled,
        read: &mut impl FnMut(&Manifest, &Seen) -> Result<T>,
    ) -> Result<Option<T>> {
        match self.look()? {
            Some(Presence::Written) => {
                let before = self.shared_bytes()?;
                let edit = self.read_listed()?.edit;
                let done = self.try_read_written(settled, read);
                // A file that was listed may be gone by now, and who wrote, too: somebody may be
                // recovering what was read.
                let is_same = || -> Result<bool> {
                    Ok(matches!(self.look()?, Some(Presence::Written))
                        && self.shared_bytes()? == before
                        && self.read_listed()?.edit == edit)
                };
                match done {
                    Err(error) if is_same()? => Err(error),
                    Err(_) => Ok(None),
                    done => done,
                }
            }
            Some(Presence::Still(held)) => self.try_read_still(settled, held.as_ref(), read),
            None => Ok(None),
        }
    }

    /// The same while others write (D).
    fn try_read_written<T>(
        &self,
        settled: &mut Settled,
        read: &mut impl FnMut(&Manifest, &Seen) -> Result<T>,
    ) -> Result<Option<T>> {
        let manifest = self.read_listed()?;
        let bytes = self.shared_bytes()?;
        if bytes.is_empty() {
            // The last one is closing.
            return Ok(None);
        }
        let cells = SharedCells::decode(&bytes, &self.store).map_err(|why| {
            let what = format!("{}; use the version that writes the store", why.0);
            Error::new(ErrorKind::Incompatible, what).in_file(FileName::Shared.to_string())
        })?;
        let Some(reach) = Reach::of(&cells, &manifest, false) else {
            return Ok(None);
        };
        let seen = Seen {
            reach,
            durable: Position::from_u64(cells.durable),
            poison: cells.poison,
            epoch: cells.epoch,
        };
        let out = read(&manifest, &seen)?;
        *settled = None;
        Ok(Some(out))
    }

    /// The same while nobody writes.
    fn try_read_still<T>(
        &self,
        settled: &mut Settled,
        held: Option<&Held>,
        read: &mut impl FnMut(&Manifest, &Seen) -> Result<T>,
    ) -> Result<Option<T>> {
        let bytes = self.shared_bytes()?;
        let manifest = self.read_listed()?;
        let seen = Seen {
            reach: Reach::Still,
            durable: Position::START,
            poison: None,
            epoch: 0,
        };
        let checked = self.check_finished(&manifest);
        let out = checked.and_then(|()| read(&manifest, &seen));
        // The file is made before anything is done.
        if held.is_none() && self.members()?.is_some() {
            return Ok(None);
        }
        let out = out?;
        *settled = Some(bytes);
        Ok(Some(out))
    }

    /// Refuses a log that an open was writing anew when it was stopped, and one that is newer than
    /// its manifest.
    fn check_finished(&self, manifest: &Manifest) -> Result<()> {
        let orphans = find_orphans(self.dir.as_ref(), manifest)?;
        let is_copy = |name: &&String| {
            let Some(FileName::SegmentCopy(id)) = FileName::parse(name) else {
                return false;
            };
            let mut listed = manifest.segments.iter();
            listed.any(|s| s.id == id && s.sealed.is_none())
        };
        let Some(copy) = orphans.iter().find(is_copy) else {
            return Ok(());
        };
        Err(Error::new(
            ErrorKind::Incompatible,
            "an open that was writing a segment anew was stopped; open the store once for writing: \
             that goes on from its copy",
        )
        .in_file(copy))
    }

    /// Has the store read as it is; again if it was changed meanwhile.
    fn read<T>(
        &self,
        clock: &dyn Clock,
        deadline: u64,
        settled: &mut Settled,
        mut read: impl FnMut(&Manifest, &Seen) -> Result<T>,
    ) -> Result<T> {
        let read = || self.try_read(settled, &mut read);
        self.until_there(clock, deadline, read)
    }

    /// Waits until nobody is recovering the store.
    fn wait_settled(&self, clock: &dyn Clock) -> Result<()> {
        let deadline = self.deadline(clock);
        self.until_there(clock, deadline, || Ok(self.look()?.map(|_| ())))
    }

    /// Returns until when a call that begins now may wait, on the boot clock.
    fn deadline(&self, clock: &dyn Clock) -> u64 {
        clock.read().boot_ms.saturating_add(to_ms(self.wait))
    }

    fn until_there<T>(
        &self,
        clock: &dyn Clock,
        deadline: u64,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let wait_ms = to_ms(self.wait);
        let mut pauses_count = 0;
        loop {
            if let Some(out) = look()? {
                return Ok(out);
            }
            // Also where the clock moves by hand.
            if clock.read().boot_ms >= deadline || pauses_count >= wait_ms {
                return Err(Error::new(
                    ErrorKind::Locked,
                    format!(
                        "another process is recovering the store, or was stopped in the middle of \
                         telling: waited_ms={wait_ms}; try again"
                    ),
                ));
            }
            bell::pause(PAUSE);
            pauses_count += 1;
        }
    }

    /// Says whether the opener of a generation is alive.
    pub(crate) fn is_alive(&self, generation: u64) -> bool {
        !is_gone(self.dir.as_ref(), generation)
    }
}

/// Opens a store for reading only.
pub(super) fn open_reader(dir: Arc<dyn Dir>, shown: &str, options: Options) -> Result<Engine> {
    if options.mode == OpenMode::Salvage {
        return Err(Error::invalid(
            "a damaged store is opened to salvage by one process, which reads only, too: use open",
        ));
    }
    let dir: Arc<dyn Dir> = Arc::new(ReadOnlyDir(dir));
    let held = share_lock(dir.as_ref(), shown, &options)?;
    let options = Options {
        background: false,
        ..options
    };
    let clock = Arc::clone(&options.clock);
    let mut settled = None;
    let mut reader = Reader {
        store: [0; 16],
        wait: if options.lock_timeout.is_zero() {
            JOIN_WAIT
        } else {
            options.lock_timeout
        },
        settled: Mutex::default(),
        epoch: AtomicU64::new(0),
        dir: Arc::clone(&dir),
    };
    reader.store = reader.read_listed()?.store;
    let deadline = reader.deadline(clock.as_ref());
    let mut engine = reader.read(clock.as_ref(), deadline, &mut settled, |manifest, seen| {
        reader.epoch.store(seen.epoch, Ordering::Relaxed);
        read_engine(&dir, &options, manifest, seen)
    })?;
    reader.wait = options.turn_timeout;
    reader.settled = Mutex::new(settled);
    engine.reader = Some(reader);
    let held: Box<dyn Lock> = Box::new(held);
    engine
        .lock
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .replace(held);
    Ok(engine)
}

/// Takes LOCK together with others (B).
fn share_lock(dir: &dyn Dir, shown: &str, options: &Options) -> Result<Held> {
    let name = FileName::Lock.to_string();
    let lock = dir.lock_file(&name, Access::Read).map_err(|error| {
        if error.kind() == io::ErrorKind::NotFound {
            let what = "LOCK is missing, so nobody could be kept out meanwhile; open the store \
                        once for writing, or make an empty file of that name";
            return Error::new(ErrorKind::Incompatible, what).in_file(shown);
        }
        Error::io("locking the store failed", error).in_file(name.clone())
    })?;
    let clock = options.clock.as_ref();
    let wait_ms = to_ms(options.lock_timeout);
    let deadline = clock.read().boot_ms.saturating_add(wait_ms);
    loop {
        let failed = |e| Error::io("locking the store failed", e).in_file(name.clone());
        if lock.try_lock(LockMode::Shared).map_err(failed)? {
            check_in_place(lock.as_ref(), shown)?;
            return Ok(Held::new(lock));
        }
        if clock.read().boot_ms >= deadline {
            return Err(not_shared(dir, shown));
        }
        std::thread::park_timeout(LOCK_RETRY);
    }
}

/// Reads a store that nobody writes, or as far as was told.
fn read_engine(
    dir: &Arc<dyn Dir>,
    options: &Options,
    manifest: &Manifest,
    seen: &Seen,
) -> Result<Engine> {
    let hash = KeyHash::new(&manifest.hash_key, manifest.store);
    let rebuilt = Rebuilt::of(dir, manifest, &hash, options, &View::default(), seen.reach)?;
    let clock = options.clock.as_ref();
    let time = TrustedTime::resume(clock, Some(manifest.anchor), 0);
    time.raise(clock, rebuilt.trusted_ms);
    let report = OpenReport {
        clean: manifest.closed_at.is_some(),
        replayed_count: rebuilt.replayed_count,
        ..OpenReport::default()
    };
    let mut core = rebuilt.core(options);
    let (sealed, active) = rebuilt.install(&mut core);
    let mut engine = assemble(Base {
        dir: Arc::clone(dir),
        lock: Box::new(NoLock),
        zero_fill: false,
        options: options.clone(),
        time,
        hash,
        store: manifest.store,
        generation: 0,
        catalog: Catalog::new(Arc::clone(dir), manifest.clone()),
        core,
        durable: Position::START,
        report,
    });
    {
        let mut core = engine.core();
        engine.follow_rest(&mut core, manifest);
        core.edit_seen = manifest.edit;
    }
    engine.gather_unsettled(sealed, active)?;
    engine.count_unsettled();
    engine.note_seen(seen);
    Ok(engine)
}

/// Stands for the lock until everything was read.
#[derive(Debug)]
struct NoLock;

impl Lock for NoLock {}

impl Engine {
    /// Knows, from here on, everything that was answered before; nobody else here follows
    /// meanwhile.
    #[cold]
    pub(super) fn follow_told<'a>(&self, reader: &'a Reader) -> Result<Reading<'a>> {
        self.check_home()?;
        // Threads that wait for each other here wait no longer for that.
        let deadline = reader.deadline(self.clock());
        let lock = reader.settled.lock();
        let mut settled = lock.unwrap_or_else(PoisonError::into_inner);
        // What was told before a fault stays as it is.
        if self.core().closed || self.poisoned().is_some() {
            return Ok(settled);
        }
        let bytes = reader.shared_bytes()?;
        let (is_behind, edit_seen) = {
            let core = self.core();
            (core.is_behind, core.edit_seen)
        };
        if settled.as_ref() == Some(&bytes) && !is_behind {
            // Who shares the store meanwhile and closes it leaves no SHARED, but a later manifest.
            if !bytes.is_empty() || reader.read_listed()?.edit == edit_seen {
                return Ok(settled);
            }
        }
        let cells = SharedCells::decode(&bytes, &reader.store);
        if cells.is_ok_and(|cells| self.follow_near(reader, &cells)) {
            return Ok(settled);
        }
        reader.read(self.clock(), deadline, &mut settled, |manifest, seen| {
            if reader.epoch.swap(seen.epoch, Ordering::Relaxed) != seen.epoch {
                // Whoever has recovered the store since may have cut what was read.
                self.core().is_behind = true;
            }
            self.follow_listed(manifest, seen.reach)?;
            self.note_seen(seen);
            Ok(())
        })?;
        Ok(settled)
    }

    /// Reads on in the same segment; `false`: there is more to do.
    fn follow_near(&self, reader: &Reader, cells: &SharedCells) -> bool {
        let told = Position::from_u64(cells.end);
        let mut core = self.core();
        if core.is_behind
            || reader.epoch.load(Ordering::Relaxed) != cells.epoch
            || core.edit_seen < cells.edit.max(cells.end_edit)
            || told.segment() != core.writer.segment.id
        {
            return false;
        }
        loop {
            match self.read_told(&mut core, told) {
                Ok(Read::Frames) => {}
                Ok(Read::Nothing) => break,
                // Told is what lies behind a roll.
                Ok(Read::Seal(_)) | Err(_) => {
                    core.is_behind = true;
                    return false;
                }
            }
        }
        drop(core);
        self.note_seen(&Seen {
            reach: Reach::Told(told),
            durable: Position::from_u64(cells.durable),
            poison: cells.poison.clone(),
            epoch: cells.epoch,
        });
        true
    }

    /// Takes over what the manifest lists, and reads the log on.
    fn follow_listed(&self, manifest: &Manifest, reach: Reach) -> Result<()> {
        let Reach::Told(told) = reach else {
            self.start_again(manifest, reach)?;
            return self.follow_files(manifest);
        };
        if self.core().is_behind {
            self.start_again(manifest, reach)?;
        } else {
            self.follow_far(manifest, reach)?;
        }
        {
            let mut core = self.core();
            // Of this manifest: a later one may not list any more what comes next.
            self.follow_next(&mut core, manifest)?;
            loop {
                match self.read_told(&mut core, told)? {
                    Read::Frames => {}
                    Read::Nothing => break,
                    Read::Seal(seal) => self.follow_roll(&mut core, &seal)?,
                }
            }
        }
        self.follow_files(manifest)
    }

    fn note_seen(&self, seen: &Seen) {
        if self.poisoned().is_none() {
            self.syncer.reached(seen.durable);
        }
        if let Some(cause) = &seen.poison {
            self.poison_with(cause.clone());
        }
    }

    /// Reads something of the log; once more for a reader if it was damaged: it may have been in
    /// the hands of somebody who was recovering the store.
    pub(crate) fn read_again<T>(&self, read: impl Fn() -> Result<T>) -> Result<T> {
        let found = read();
        match (&self.reader, &found) {
            (Some(reader), Err(error)) if error.kind() == ErrorKind::Damaged => {
                reader.wait_settled(self.clock())?;
                read()
            }
            _ => found,
        }
    }

    /// Takes the upkeep, or keeps a reader's other threads from following: nothing is carried over
    /// meanwhile.
    pub(super) fn nothing_moves(&self) -> Result<(Option<Maintaining<'_>>, Option<Reading<'_>>)> {
        Ok(match &self.reader {
            None => (Some(self.maintenance()?), None),
            Some(reader) => (None, Some(self.follow_told(reader)?)),
        })
    }

    /// Makes sure that a reader's own numbers are of now.
    pub(super) fn follow_if_reader(&self) {
        if let Some(reader) = &self.reader {
            self.follow_told(reader).map(drop).unwrap_or_default();
        }
    }

    /// Refuses what a reader must not do.
    pub(crate) fn check_writer(&self) -> Result<()> {
        if self.reader.is_none() {
            return Ok(());
        }
        Err(Error::invalid(
            "store is open for reading only; open it with `open` to write",
        ))
    }
}
