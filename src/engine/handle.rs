//! The public handle of a store, and what keeps a store open.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::cells::Cells;
use super::class::EffectClass;
use super::filter::Filter;
use super::namespace::Namespace;
use super::outbox::Outbox;
use super::watermarks::Watermarks;
use super::{Engine, background, open};
use crate::error::Result;
use crate::key::NamespaceKind;
use crate::options::{NamespaceOptions, Options, WatermarkOptions};
use crate::stats::{Health, OpenReport, Stats};
use crate::verdict::Unsettled;
use crate::vfs::sim::SimDisk;

/// What all handles, namespaces and guards of one open store share. The last one closes it.
pub(crate) struct Handle {
    pub(crate) engine: Arc<Engine>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    #[cfg(feature = "snowflake")]
    pub(super) makers: super::snowflake::Makers,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("store", &self.engine.store)
            .finish_non_exhaustive()
    }
}

impl Handle {
    fn close(&self) -> Result<()> {
        // A forked child has no threads to wait for, and closes nothing of its parent's.
        self.engine.check_home()?;
        let closed = self.engine.close();
        self.engine.background.stop();
        let timer = self.engine.timers.stop();
        // Whoever waits finds the store closed; whoever waited for a flush leads its own, and is
        // told so.
        self.engine.waits.ring_all();
        self.engine.syncer.ring_tasks();
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads.into_iter().chain(timer) {
            // The last handle may be dropped by a callback on one of these threads.
            if thread.thread().id() != std::thread::current().id() {
                thread.join().unwrap_or_default();
            }
        }
        self.engine.deliver_events();
        self.engine.unlock_if_over();
        closed
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // An error was told as an event where it arose; the next open recovers what is there.
        self.close().unwrap_or_default();
    }
}

/// An open store. Clones are handles of the same store; the last one to go closes it.
#[derive(Clone, Debug)]
pub struct DedupLog {
    pub(super) handle: Arc<Handle>,
}

impl Options {
    /// Opens the store in this directory, creating it if it is missing (unless told otherwise);
    /// the directory it lies in must exist.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("store");
    /// use idemlog::{NamespaceOptions, Observed, Options};
    ///
    /// let log = Options::new().open(&path)?;
    /// let clicks = log.filter("clicks", NamespaceOptions::new())?;
    /// assert_eq!(clicks.observe("event-1")?, Observed::New);
    /// assert_eq!(clicks.observe("event-1")?, Observed::Duplicate);
    /// log.close()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `Locked` if another opener holds it, `Incompatible` for what is not a store of this
    /// format, `Damaged` if durable bytes have changed (nothing is touched then), `Invalid` for
    /// bad options, `Full`, `Io`.
    pub fn open(self, path: impl AsRef<Path>) -> Result<DedupLog> {
        DedupLog::start(open::open_path(path.as_ref(), self)?)
    }

    /// Opens a store that lives in memory and is gone with its last handle, for unit tests.
    ///
    /// # Errors
    /// `Invalid` for bad options.
    pub fn open_in_memory(self) -> Result<DedupLog> {
        let dir = SimDisk::memory().dir();
        DedupLog::start(open::open_dir(dir, "memory", false, self)?)
    }

    /// Opens the store in this directory for reading only: beside processes that share it, or while
    /// nobody has it open. Nothing is made, written, flushed or removed, and no right to write is
    /// needed.
    ///
    /// It is the same handle, whose calls that would write are `Invalid`, and which follows: each
    /// read knows what was answered before it began, whoever has answered it. It takes no turn
    /// among the processes that share the store. Where nobody writes, it reads to the end of what
    /// is whole in the log, which it cannot make durable: what it tells may still be lost with the
    /// power. As long as it is open, nobody can open the store alone. See `docs/shared.md`.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("store");
    /// use idemlog::{ErrorKind, KeyState, NamespaceOptions, Options};
    ///
    /// let log = Options::new().shared(true).open(&path)?;
    /// let clicks = log.filter("clicks", NamespaceOptions::new())?;
    ///
    /// let reader = Options::new().open_read_only(&path)?;
    /// let seen = reader.filter("clicks", NamespaceOptions::new())?;
    /// assert_eq!(seen.get("event-1")?, KeyState::Absent);
    /// clicks.observe("event-1")?;
    /// assert_eq!(seen.get("event-1")?, KeyState::Seen);
    /// assert_eq!(seen.observe("event-2").unwrap_err().kind(), ErrorKind::Invalid);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `Locked` if another opener has it alone, or recovers it for long; `Incompatible` for what is
    /// not a store of this format, has no file `LOCK`, or was left by an open in the middle of
    /// writing a segment anew; `Damaged`, `Invalid`, `Io`.
    pub fn open_read_only(self, path: impl AsRef<Path>) -> Result<DedupLog> {
        DedupLog::start(open::open_path_read_only(path.as_ref(), self)?)
    }

    /// Opens a store on any directory for reading only.
    ///
    /// # Errors
    /// As [`Options::open_read_only`].
    #[cfg(any(test, feature = "testing"))]
    pub fn open_read_only_on(self, dir: Arc<dyn crate::vfs::Dir>) -> Result<DedupLog> {
        DedupLog::start(open::open_read_only(dir, "simulated", self)?)
    }

    /// Opens a store on any directory, such as one of a simulated disk.
    ///
    /// # Errors
    /// As [`Options::open`].
    #[cfg(any(test, feature = "testing"))]
    pub fn open_on(self, dir: Arc<dyn crate::vfs::Dir>) -> Result<DedupLog> {
        DedupLog::start(open::open_dir(dir, "simulated", true, self)?)
    }
}

impl DedupLog {
    /// Opens the store in this directory with the default options, creating it if it is missing.
    ///
    /// # Errors
    /// As [`Options::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<DedupLog> {
        Options::new().open(path)
    }

    /// Opens a store in memory with the default options, for unit tests.
    ///
    /// # Errors
    /// None that can be expected.
    pub fn in_memory() -> Result<DedupLog> {
        Options::new().open_in_memory()
    }

    fn start(engine: Arc<Engine>) -> Result<DedupLog> {
        engine.follow_clock();
        let threads = if engine.options.background {
            background::start(&engine)?
        } else {
            Vec::new()
        };
        Ok(DedupLog {
            handle: Arc::new(Handle {
                engine,
                threads: Mutex::new(threads),
                #[cfg(feature = "snowflake")]
                makers: super::snowflake::Makers::default(),
            }),
        })
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.handle.engine
    }

    /// Opens a filter: a namespace whose keys are only observed. Creates it if it is missing.
    ///
    /// # Errors
    /// `Invalid` for a bad name, bad options, or a namespace of another kind; `Poisoned`,
    /// `Closed`, `Full`, `Io`.
    pub fn filter(&self, name: &str, options: NamespaceOptions) -> Result<Filter> {
        let space = self
            .engine()
            .open_space(name, NamespaceKind::Filter, options)?;
        Ok(Filter::new(Arc::clone(&self.handle), Arc::new(space)))
    }

    /// Opens a namespace of claims of one effect class. Creates it if it is missing.
    ///
    /// # Errors
    /// As [`DedupLog::filter`].
    pub fn namespace<C: EffectClass>(
        &self,
        name: &str,
        options: NamespaceOptions,
    ) -> Result<Namespace<C>> {
        let space = self.engine().open_space(name, C::KIND, options)?;
        Ok(Namespace::new(Arc::clone(&self.handle), Arc::new(space)))
    }

    /// Opens a namespace of versioned values. Creates it if it is missing.
    ///
    /// # Errors
    /// As [`DedupLog::filter`].
    pub fn cells(&self, name: &str, options: NamespaceOptions) -> Result<Cells> {
        let space = self
            .engine()
            .open_space(name, NamespaceKind::Cells, options)?;
        Ok(Cells::new(Arc::clone(&self.handle), Arc::new(space)))
    }

    /// Opens a namespace of watermarks. Creates it if it is missing.
    ///
    /// # Errors
    /// As [`DedupLog::filter`].
    pub fn watermarks(&self, name: &str, options: WatermarkOptions) -> Result<Watermarks> {
        let space =
            self.engine()
                .open_space(name, NamespaceKind::Watermarks, options.namespace())?;
        Ok(Watermarks::new(Arc::clone(&self.handle), Arc::new(space)))
    }

    /// Opens an outbox. Creates it if it is missing; reads the entries of one that is there.
    ///
    /// # Errors
    /// As [`DedupLog::filter`]; `Damaged`.
    pub fn outbox(&self, name: &str, options: NamespaceOptions) -> Result<Outbox> {
        let space = self
            .engine()
            .open_space(name, NamespaceKind::Outbox, options)?;
        Outbox::open(Arc::clone(&self.handle), Arc::new(space))
    }

    /// Returns the kind of a namespace; `None` if there is no such namespace.
    pub fn kind_of(&self, name: &str) -> Option<NamespaceKind> {
        self.engine().refresh().unwrap_or_default();
        let core = self.engine().core();
        core.namespaces
            .values()
            .find(|n| n.name == name)
            .map(|n| n.kind)
    }

    /// Lists all namespaces, by name.
    pub fn namespaces(&self) -> Vec<(String, NamespaceKind)> {
        self.engine().refresh().unwrap_or_default();
        let core = self.engine().core();
        let mut all: Vec<_> = core
            .namespaces
            .values()
            .map(|n| (n.name.clone(), n.kind))
            .collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// Forgets a whole namespace at once. One with open claims or keys in doubt is refused unless
    /// `forced`; their owners are fenced then. The bytes stay on disk until their segments expire.
    ///
    /// # Errors
    /// `Invalid` for an unknown namespace or one that is not settled, `Poisoned`, `Closed`, `Io`.
    pub fn purge(&self, name: &str, forced: bool) -> Result<()> {
        self.engine().purge(name, forced)
    }

    /// Lists the claims that are held, or whose owner is gone and which nobody has claimed since.
    ///
    /// # Errors
    /// `Damaged`, `Io`, `Closed`.
    pub fn pending(&self) -> Result<Vec<Unsettled>> {
        self.engine().list_unsettled(false)
    }

    /// Lists the keys in doubt, also those that are so only because their owner is gone.
    ///
    /// # Errors
    /// `Damaged`, `Io`, `Closed`.
    pub fn in_doubt(&self) -> Result<Vec<Unsettled>> {
        self.engine().list_unsettled(true)
    }

    /// Returns counters and sizes.
    pub fn stats(&self) -> Stats {
        self.engine().follow_if_reader();
        self.engine().stats()
    }

    /// Returns the store's condition.
    pub fn health(&self) -> Health {
        self.engine().follow_if_reader();
        self.engine().health()
    }

    /// Returns what the open found and did.
    pub fn open_report(&self) -> &OpenReport {
        &self.engine().report
    }

    /// Says that the wall clock is right although it is far ahead: trusted time follows it, and
    /// what has expired by it is gone.
    ///
    /// # Errors
    /// `Poisoned`, `Closed`, `Full`, `Io`: trusted time has not moved then.
    pub fn confirm_time(&self) -> Result<()> {
        self.engine().confirm_time()
    }

    /// Makes everything answered so far survive a power cut, whatever level it was asked at.
    ///
    /// # Errors
    /// `Poisoned`, `Closed`, `Io`.
    pub fn sync(&self) -> Result<()> {
        self.engine().sync_all()
    }

    /// Does all background work that is due now, and returns when it is done.
    ///
    /// # Errors
    /// What the work failed with.
    pub fn maintain(&self) -> Result<()> {
        self.engine().settle_down()
    }

    /// Waits until no background work is due: same as [`DedupLog::maintain`].
    ///
    /// # Errors
    /// What the work failed with.
    pub fn wait_idle(&self) -> Result<()> {
        self.engine().settle_down()
    }

    /// Closes the store for all handles: everything answered so far becomes durable. Claims that
    /// are still held end as if their owner had died. Guards, ended ones as well, keep the
    /// directory locked until they are dropped.
    ///
    /// # Errors
    /// `Poisoned`, `Io`: what was not durable before may be lost; the store is closed all the
    /// same.
    pub fn close(self) -> Result<()> {
        self.handle.close()
    }
}

impl Engine {
    pub(crate) fn stats(&self) -> Stats {
        let c = &self.counters;
        let mut stats = Stats {
            new_count: c.new.get(),
            duplicates_count: c.duplicates.get(),
            takeovers_count: c.takeovers.get(),
            fenced_count: c.fenced.get(),
            commits_count: c.commits.get(),
            records_count: c.records.get(),
            appended_bytes: c.appended_bytes.get(),
            writes_count: c.writes.get(),
            flushes_count: c.flushes.get(),
            seals_count: c.seals.get(),
            drops_count: c.drops.get(),
            merges_count: c.merges.get(),
            carried_count: c.carried.get(),
            evicted_count: c.evicted.get(),
            stalls_count: c.stalls.get(),
            background_failures_count: c.background_failures.get(),
            torn_writes_count: c.torn_frames.get(),
            waiters_count: self.waits.count(),
            ..Stats::default()
        };
        let now = self.now();
        let core = self.core();
        let view = core.view();
        let oldest_s = view
            .sealed
            .values()
            .map(|sealed| sealed.entry.began_at_s)
            .chain(view.frozen.iter().map(|frozen| frozen.began_at_s))
            .chain([core.began_at_s])
            .min()
            .unwrap_or(0);
        stats.window =
            Duration::from_millis(now.trusted_ms.saturating_sub(u64::from(oldest_s) * 1000));
        let sealed: u64 = view
            .sealed
            .values()
            .map(|s| u64::from(s.segment.bytes))
            .sum();
        let prepared: u64 = core.next.iter().map(|s| u64::from(s.bytes)).sum();
        let frozen = &view.frozen;
        stats.segments_count = (view.sealed.len() + core.next.len() + 1 + frozen.len()) as u64;
        stats.log_bytes = sealed
            + prepared
            + u64::from(core.writer.segment.bytes)
            + frozen
                .iter()
                .map(|f| u64::from(f.segment.bytes))
                .sum::<u64>();
        stats.runs_count = view.parts.len() as u64;
        let fuse = view.parts.iter().filter(|part| part.run.has_fuse_filter());
        stats.fuse_filters_count = fuse.count() as u64;
        stats.run_bytes = view.parts.iter().map(|p| p.run.run_bytes()).sum();
        stats.filter_bytes = view.parts.iter().map(|p| p.run.filter_bytes()).sum();
        stats.table_bytes = (core.table.memory_bytes()
            + frozen.iter().map(|f| f.table.memory_bytes()).sum::<usize>())
            as u64;
        stats.unsettled_count = core.unsettled.len() as u64;
        stats
    }

    pub(crate) fn health(&self) -> Health {
        let poisoned = self.poisoned().map(str::to_owned);
        let clock_suspect = self.now().suspect;
        let background_error = self.background_error();
        Health {
            ok: poisoned.is_none() && !clock_suspect && background_error.is_none(),
            poisoned,
            clock_suspect,
            background_error,
        }
    }
}
