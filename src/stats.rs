//! Counters and gauges, units in their names.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What the store has done since it was opened, and what it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Keys answered `New` (observed or claimed for the first time).
    pub new_count: u64,
    /// Keys answered `Duplicate`.
    pub duplicates_count: u64,
    /// Claims taken over from an owner that was gone or had lapsed.
    pub takeovers_count: u64,
    /// Calls answered `Fenced`.
    pub fenced_count: u64,
    /// Commits recorded.
    pub commits_count: u64,
    /// Records appended, of all kinds.
    pub records_count: u64,
    /// Bytes appended to the log.
    pub appended_bytes: u64,
    /// Writes handed to the operating system.
    pub writes_count: u64,
    /// Device flushes of log segments.
    pub flushes_count: u64,
    /// Segments sealed.
    pub seals_count: u64,
    /// Merges of index runs.
    pub merges_count: u64,
    /// Index runs, each with a filter that a look-up asks.
    pub runs_count: u64,
    /// Those of them with a fuse filter, of which a look-up reads three cache lines; of the others,
    /// which have a Bloom filter, it reads one.
    pub fuse_filters_count: u64,
    /// Segments dropped because everything in them had expired.
    pub drops_count: u64,
    /// Records carried over to a newer segment.
    pub carried_count: u64,
    /// Records forgotten before their retention ended, to make room.
    pub evicted_count: u64,
    /// Times a call waited for a seal or for the next segment.
    pub stalls_count: u64,
    /// Failed attempts of background work.
    pub background_failures_count: u64,
    /// Unfinished writes of processes that died in a shared store, cleared by this one.
    pub torn_writes_count: u64,
    /// Segments of the log.
    pub segments_count: u64,
    /// Sizes of all segment files, which is what a bound on the log counts; a part of the newest
    /// ones may have no blocks yet.
    pub log_bytes: u64,
    /// Bytes of all index runs.
    pub run_bytes: u64,
    /// Bytes of all filters: memory that look-ups need.
    pub filter_bytes: u64,
    /// Bytes of the tables in memory.
    pub table_bytes: u64,
    /// Claims, starts and keys in doubt.
    pub unsettled_count: u64,
    /// Calls that wait for a key that another owner holds.
    pub waiters_count: u64,
    /// Age of the oldest segment that is still kept, by trusted time: the real window. What the
    /// newest segments held before the last open counts from that open.
    pub window: Duration,
}

/// The store's condition.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// Nothing is wrong.
    pub ok: bool,
    /// Why the store takes no more writes, if so: reopen it.
    pub poisoned: Option<String>,
    /// The wall clock is ahead of trusted time by more than may be believed: if the wall clock is
    /// right, call `confirm_time`.
    pub clock_suspect: bool,
    /// The newest failure of background work, if the next attempt has not succeeded yet.
    pub background_error: Option<String>,
}

/// What an open found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenReport {
    /// The store was made by this open.
    pub created: bool,
    /// The last close was clean.
    pub clean: bool,
    /// Records replayed from segments without an index run.
    pub replayed_count: u64,
    /// Bytes of unfinished writes behind the end of the log that were overwritten with zeros.
    pub dropped_bytes: u64,
    /// Files left over by interrupted work that were removed.
    pub orphans_count: u64,
    /// Index runs that were missing or invalid and were rebuilt from their segments.
    pub rebuilt_runs_count: u64,
    /// Unsettled records found.
    pub unsettled_count: u64,
    /// Those of them that are damaged: each keeps its segment, and nothing is dropped, until the
    /// store is repaired.
    pub unreadable_count: u64,
    /// How long the open took.
    pub elapsed: Duration,
    /// The store is damaged and open for reading what is left, see [`OpenMode::Salvage`].
    ///
    /// [`OpenMode::Salvage`]: crate::OpenMode::Salvage
    pub salvaged: bool,
    /// What the log has lost, if it was salvaged: the first 10,000 ranges.
    pub lost: Vec<LostRange>,
}

/// Bytes of the log that hold no valid record any more, and held or may have held some.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LostRange {
    /// The file.
    pub file: String,
    /// Where the range starts, in bytes.
    pub from: u64,
    /// Where it ends, exclusive.
    pub to: u64,
    /// Trusted time, in unix milliseconds, of the last event known before it.
    pub after_ms: Option<u64>,
    /// Trusted time of the first event known behind it.
    pub before_ms: Option<u64>,
}

/// The counters behind [`Stats`]. Relaxed everywhere: they order nothing.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) new: Counter,
    pub(crate) duplicates: Counter,
    pub(crate) takeovers: Counter,
    pub(crate) fenced: Counter,
    pub(crate) commits: Counter,
    pub(crate) records: Counter,
    pub(crate) appended_bytes: Counter,
    pub(crate) writes: Counter,
    pub(crate) flushes: Counter,
    pub(crate) seals: Counter,
    pub(crate) drops: Counter,
    pub(crate) merges: Counter,
    pub(crate) carried: Counter,
    pub(crate) evicted: Counter,
    pub(crate) stalls: Counter,
    pub(crate) background_failures: Counter,
    pub(crate) torn_frames: Counter,
}

/// One counter.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// The same for a counter that only who holds one lock adds to: no bus is locked for it.
    #[inline]
    pub(crate) fn add_alone(&self, count: u64) {
        self.0.store(self.get() + count, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
