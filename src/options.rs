//! Every tunable, with its default, its range and its unit.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Clock, SystemClock};
use crate::error::{Error, Result};
use crate::key::{NamespaceKind, OUTCOME_BYTES_MAX};
use crate::key_time::KeyTime;
use crate::stamp::{COUNTER_MAX, Stamps};

/// The default and largest useful segment size: 32 MiB.
pub const SEGMENT_BYTES_DEFAULT: u32 = 32 * MIB;
/// The smallest segment size: 4 KiB, for tests.
pub const SEGMENT_BYTES_MIN: u32 = 4 * 1024;
/// The largest segment size: 64 MiB, the reach of an index slot.
pub const SEGMENT_BYTES_MAX: u32 = 64 * MIB;
/// The size of a store's first segment; each next one doubles up to full size: 64 KiB.
pub const SEGMENT_BYTES_FIRST: u32 = 64 * 1024;
/// The default interval after which `Buffered` records are handed to the system: 10 ms.
pub const FLUSH_INTERVAL_DEFAULT: Duration = Duration::from_millis(10);
/// The default interval after which written records are synced below `Power`: 1 s.
pub const SYNC_INTERVAL_DEFAULT: Duration = Duration::from_secs(1);
/// The default bound on unsettled entries (claims, starts, keys in doubt): 1,000,000.
pub const UNSETTLED_COUNT_DEFAULT: usize = 1_000_000;
/// The default time that a call of a shared store waits for another process: 10 s.
pub const TURN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
/// The default bound on a push of trusted time by the wall clock after a reboot: 24 h.
pub const WALL_JUMP_DEFAULT: Duration = Duration::from_secs(24 * 3600);
/// The default lease of a claim: 60 s.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(60);
/// The default retention of a done key: 7 days.
pub const RETENTION_DEFAULT: Duration = Duration::from_secs(7 * 24 * 3600);
/// The default limit of an outcome: 4 KiB.
pub const OUTCOME_BYTES_DEFAULT: usize = 4 * 1024;

const MIB: u32 = 1024 * 1024;

/// When a verdict may be returned: after what its record has survived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Durability {
    /// In memory; written within the flush interval. A process kill loses at most that interval,
    /// a power cut at most the sync interval.
    Buffered,
    /// Handed to the operating system: survives a process kill. A power cut loses at most the
    /// sync interval.
    Process,
    /// Flushed to the device: survives a power cut. The default.
    Power,
}

/// How long a key is remembered, counted from its commit or observation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// At least this long, rounded up to a second. More than 80 years means for ever.
    For(Duration),
    /// Until it is forgotten by a call.
    Forever,
}

impl Retention {
    /// Returns the moment of expiry in whole seconds, rounded up; 0 means never.
    pub(crate) fn expires_at_s(self, from_ms: u64) -> u32 {
        let Retention::For(duration) = self else {
            return 0;
        };
        let length_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        // A part of a millisecond counts as a whole one: never remembered for less than asked.
        let rest = u64::from(duration.subsec_nanos() % 1_000_000 != 0);
        let end_ms = from_ms.saturating_add(length_ms).saturating_add(rest);
        u32::try_from(end_ms.div_ceil(1000)).unwrap_or(0)
    }
}

impl From<Duration> for Retention {
    fn from(duration: Duration) -> Self {
        Retention::For(duration)
    }
}

/// What happens to *new* keys when [`Options::log_bytes_max`] is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// They are refused with `ErrorKind::Full`: nothing is forgotten early. The default.
    Refuse,
    /// The oldest segment's settled keys are forgotten early; counted and reported as an event.
    EvictOldest,
}

/// What an open does about a damaged log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// It is refused with `ErrorKind::Damaged`, and all files are left as they were. The default.
    Strict,
    /// What can still be read is answered, and nothing is changed: keys whose newest record was
    /// found get their answer; keys that were not found get an error, never "new", because a lost
    /// record may have been theirs; every call that would have to write gets an error, too. The
    /// log that is left is held in memory meanwhile. A store that is not damaged opens as in
    /// `Strict`, for reading and writing. [`OpenReport::lost`](crate::OpenReport::lost) tells.
    Salvage,
}

/// Whether the next segment is filled with zeros ahead of its use: a small durable commit costs one
/// flush then, and up to two segments of disk space are taken ahead. Otherwise space is reserved in
/// steps, as the log grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroFill {
    /// At `Power` on file systems that overwrite in place. The default.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Something worth knowing that is not the answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A claim was taken over from an owner that is gone or whose lease lapsed.
    Takeover {
        /// The namespace's name.
        namespace: String,
        /// The key.
        key: Vec<u8>,
        /// The number of the new attempt.
        attempt: u32,
    },
    /// An owner that had lost its claim tried to change it; nothing was written.
    Fenced {
        /// The namespace's name.
        namespace: String,
        /// The key.
        key: Vec<u8>,
    },
    /// An owner committed after its lease had lapsed, before anybody took over.
    LateCommit {
        /// The namespace's name.
        namespace: String,
        /// The key.
        key: Vec<u8>,
    },
    /// Attempts are used up: the key is dead until somebody looks at it.
    Dead {
        /// The namespace's name.
        namespace: String,
        /// The key.
        key: Vec<u8>,
    },
    /// The wall clock is further ahead than may be believed; see `confirm_time`.
    ClockSuspect,
    /// Settled keys were forgotten before their retention ended, to make room.
    Evicted {
        /// How many records were in the dropped segment.
        records_count: u64,
    },
    /// Background work failed and will be tried again.
    BackgroundFailed {
        /// What failed, in one line.
        message: String,
    },
    /// A failure made further promises impossible.
    Poisoned {
        /// What failed, in one line.
        message: String,
    },
}

/// A function called with each [`Event`], soon after it happened, on a background thread of the
/// store, or on the thread that calls `maintain` or `close`, with no lock held: it may call back
/// into the store. At most 10,000 events wait for a callback that does not keep up.
pub type EventCallback = Arc<dyn Fn(&Event) + Send + Sync>;

/// A function called during a long recovery with (bytes read, bytes to read).
pub type ProgressCallback = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// How a store is opened. Everything has a default; durability is the one to think about.
#[derive(Clone)]
#[must_use]
pub struct Options {
    pub(crate) create: bool,
    pub(crate) durability: Durability,
    pub(crate) segment_bytes: u32,
    pub(crate) flush_interval: Duration,
    pub(crate) sync_interval: Duration,
    pub(crate) zero_fill: ZeroFill,
    pub(crate) log_bytes_max: Option<u64>,
    pub(crate) when_full: WhenFull,
    pub(crate) unsettled_count_max: usize,
    pub(crate) wall_jump_max: Duration,
    pub(crate) lock_timeout: Duration,
    pub(crate) shared: bool,
    pub(crate) turn_timeout: Duration,
    pub(crate) background: bool,
    pub(crate) network_allowed: bool,
    pub(crate) mode: OpenMode,
    pub(crate) clock: Arc<dyn Clock>,
    /// How many stamps a generation has.
    pub(crate) stamp_counter_max: u64,
    /// A segment with fewer keys is replayed faster than a hint is read.
    pub(crate) hint_entries_min: usize,
    pub(crate) on_event: Option<EventCallback>,
    pub(crate) on_progress: Option<ProgressCallback>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            create: true,
            durability: Durability::Power,
            segment_bytes: SEGMENT_BYTES_DEFAULT,
            flush_interval: FLUSH_INTERVAL_DEFAULT,
            sync_interval: SYNC_INTERVAL_DEFAULT,
            zero_fill: ZeroFill::Auto,
            log_bytes_max: None,
            when_full: WhenFull::Refuse,
            unsettled_count_max: UNSETTLED_COUNT_DEFAULT,
            wall_jump_max: WALL_JUMP_DEFAULT,
            lock_timeout: Duration::ZERO,
            shared: false,
            turn_timeout: TURN_TIMEOUT_DEFAULT,
            background: true,
            network_allowed: false,
            mode: OpenMode::Strict,
            clock: Arc::new(SystemClock),
            stamp_counter_max: COUNTER_MAX,
            hint_entries_min: 4096,
            on_event: None,
            on_progress: None,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("create", &self.create)
            .field("durability", &self.durability)
            .field("segment_bytes", &self.segment_bytes)
            .field("log_bytes_max", &self.log_bytes_max)
            .finish_non_exhaustive()
    }
}

impl Options {
    /// Returns the defaults.
    pub fn new() -> Self {
        Options::default()
    }

    /// Sets whether a missing store is created. Default: yes.
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Sets the durability of calls that do not say their own. Default: [`Durability::Power`].
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Sets the size of full segments, in bytes: the unit of expiry. Default:
    /// [`SEGMENT_BYTES_DEFAULT`]; from [`SEGMENT_BYTES_MIN`] to [`SEGMENT_BYTES_MAX`].
    pub fn segment_bytes(mut self, bytes: u32) -> Self {
        self.segment_bytes = bytes;
        self
    }

    /// Sets how long a `Buffered` record may stay in memory. Default:
    /// [`FLUSH_INTERVAL_DEFAULT`].
    pub fn flush_interval(mut self, interval: Duration) -> Self {
        self.flush_interval = interval;
        self
    }

    /// Sets how long a written record may stay unsynced below `Power`. Default:
    /// [`SYNC_INTERVAL_DEFAULT`].
    pub fn sync_interval(mut self, interval: Duration) -> Self {
        self.sync_interval = interval;
        self
    }

    /// Sets whether segments are filled with zeros ahead. Default: [`ZeroFill::Auto`].
    pub fn zero_fill(mut self, zero_fill: ZeroFill) -> Self {
        self.zero_fill = zero_fill;
        self
    }

    /// Bounds the bytes of all log segments. Default: none.
    pub fn log_bytes_max(mut self, bytes: u64) -> Self {
        self.log_bytes_max = Some(bytes);
        self
    }

    /// Sets what happens to new keys at the bound. Default: [`WhenFull::Refuse`].
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.when_full = when_full;
        self
    }

    /// Bounds the unsettled entries, each about 128 bytes of memory. Default:
    /// [`UNSETTLED_COUNT_DEFAULT`].
    pub fn unsettled_count_max(mut self, count: usize) -> Self {
        self.unsettled_count_max = count;
        self
    }

    /// Bounds how far the wall clock may push trusted time after a reboot. Default:
    /// [`WALL_JUMP_DEFAULT`].
    pub fn wall_jump_max(mut self, bound: Duration) -> Self {
        self.wall_jump_max = bound;
        self
    }

    /// Sets how long an open waits for another opener to go. Default: not at all; in shared mode
    /// 10 seconds, for others that open or close the store.
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.lock_timeout = timeout;
        self
    }

    /// Opens the store together with other processes of this host, which must share it, too: a key
    /// is then a duplicate whichever process has seen it. Every call takes its turn among them, and
    /// `Buffered` is served as `Process`. See `docs/shared.md`. Default: the opener has the store
    /// for itself.
    pub fn shared(mut self, shared: bool) -> Self {
        self.shared = shared;
        self
    }

    /// Sets how long a call waits at the most for another process of a shared store, which may be
    /// stopped in the middle of its own: then it is `Locked`. Default: 10 seconds.
    pub fn turn_timeout(mut self, timeout: Duration) -> Self {
        self.turn_timeout = timeout;
        self
    }

    /// Allows a store on a network file system, where locks and flushes may not hold what the
    /// guarantees need. Default: refused.
    pub fn allow_network_file_system(mut self, allowed: bool) -> Self {
        self.network_allowed = allowed;
        self
    }

    /// Sets what an open does about a damaged log. Default: [`OpenMode::Strict`].
    pub fn open_mode(mut self, mode: OpenMode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets the function called with each [`Event`].
    pub fn on_event(mut self, callback: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.on_event = Some(Arc::new(callback));
        self
    }

    /// Sets the function told of the progress of a long recovery.
    pub fn on_progress(mut self, callback: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Arc::new(callback));
        self
    }

    /// Sets the source of time, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Sets whether background threads run. Without them seals, expiry and flushes happen inside
    /// calls and in `maintain`, in an order that a test can repeat.
    #[cfg(any(test, feature = "testing"))]
    pub fn background(mut self, background: bool) -> Self {
        self.background = background;
        self
    }

    /// Sets how many stamps a generation has, so that a test can use them up: the next generation
    /// has to be reserved, durably, before the first stamp of it leaves. The default is 2^22.
    #[cfg(any(test, feature = "testing"))]
    pub fn stamps_per_generation(mut self, count: u64) -> Self {
        self.stamp_counter_max = count;
        self
    }

    /// Sets from how many keys on the active segment gets a hint, so that a test can have one of
    /// a small segment. The default is 4096.
    #[cfg(any(test, feature = "testing"))]
    pub fn hint_keys_min(mut self, count: usize) -> Self {
        self.hint_entries_min = count;
        self
    }

    pub(crate) fn stamps(&self, generation: u64, reserved: u64) -> Stamps {
        Stamps::new(generation, reserved, self.stamp_counter_max)
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let range = SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX;
        if !range.contains(&self.segment_bytes) || !self.segment_bytes.is_multiple_of(4096) {
            return Err(Error::invalid(format!(
                "segment_bytes must be a multiple of 4096 from {SEGMENT_BYTES_MIN} to \
                 {SEGMENT_BYTES_MAX}: segment_bytes={}",
                self.segment_bytes
            )));
        }
        if self.unsettled_count_max == 0 {
            return Err(Error::invalid("unsettled_count_max must be at least 1"));
        }
        if self.shared && self.mode == OpenMode::Salvage {
            return Err(Error::invalid(
                "a damaged store is opened to salvage by one process: leave out shared",
            ));
        }
        Ok(())
    }
}

/// How a namespace is used by this opener; only its kind is kept in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct NamespaceOptions {
    pub(crate) retention: Retention,
    pub(crate) lease: Duration,
    pub(crate) settle: Option<Duration>,
    pub(crate) durability: Option<Durability>,
    pub(crate) outcome_bytes_max: usize,
    pub(crate) attached_bytes_max: usize,
    pub(crate) attempts_max: Option<u32>,
    pub(crate) sliding: bool,
    pub(crate) key_time: Option<KeyTime>,
    pub(crate) marks: MarkOptions,
}

impl Default for NamespaceOptions {
    fn default() -> Self {
        NamespaceOptions {
            retention: Retention::For(RETENTION_DEFAULT),
            lease: LEASE_DEFAULT,
            settle: None,
            durability: None,
            outcome_bytes_max: OUTCOME_BYTES_DEFAULT,
            attached_bytes_max: 0,
            attempts_max: None,
            sliding: false,
            key_time: None,
            marks: MarkOptions::default(),
        }
    }
}

impl NamespaceOptions {
    /// Returns the defaults.
    pub fn new() -> Self {
        NamespaceOptions::default()
    }

    /// Sets how long done keys are remembered, unless a call says its own. It must be longer than
    /// the longest redelivery, plus the work, plus the clock's error. Default:
    /// [`RETENTION_DEFAULT`].
    pub fn retention(mut self, retention: impl Into<Retention>) -> Self {
        self.retention = retention.into();
        self
    }

    /// Sets how long a claim excludes others when its owner hangs. Default: [`LEASE_DEFAULT`].
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the time after a start before the probe is asked. Default: the claim's lease.
    pub fn settle(mut self, settle: Duration) -> Self {
        self.settle = Some(settle);
        self
    }

    /// Sets the durability of this namespace's calls. Default: the store's.
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = Some(durability);
        self
    }

    /// Sets the largest outcome, in bytes; room for it is kept free for every open claim.
    /// Default: [`OUTCOME_BYTES_DEFAULT`]; at most [`OUTCOME_BYTES_MAX`].
    pub fn outcome_bytes_max(mut self, bytes: usize) -> Self {
        self.outcome_bytes_max = bytes;
        self
    }

    /// Sets how many bytes of what is attached to a commit (cells, watermarks, outbox entries,
    /// with 160 bytes for each beside its key and value) are kept free for every open claim.
    /// A commit that attaches more is written like a new key: while there is room, otherwise it
    /// is `Full`, with nothing applied and the claim still held. Default: 0.
    pub fn attached_bytes_max(mut self, bytes: usize) -> Self {
        self.attached_bytes_max = bytes;
        self
    }

    /// Sets after how many attempts a key is dead. Default: no limit.
    pub fn attempts_max(mut self, count: u32) -> Self {
        self.attempts_max = Some(count);
        self
    }

    /// Sets whether a duplicate extends retention (a sliding window). Default: no.
    pub fn sliding(mut self, sliding: bool) -> Self {
        self.sliding = sliding;
        self
    }

    /// Says how the time when it was made stands in a key of this namespace. Look-ups then skip
    /// everything sealed whose keys are of other times, exactly, whatever the clocks of those who
    /// made the keys show: with a window of a hundred segments, a new key asks two or three
    /// filters instead of a dozen. Segments that were sealed while the namespace was not open
    /// with this option are asked as ever. Default: keys have no time.
    pub fn key_time(mut self, time: KeyTime) -> Self {
        self.key_time = Some(time);
        self
    }

    pub(crate) fn validate(&self, kind: NamespaceKind, segment_bytes: u32) -> Result<()> {
        let room = usize::try_from(segment_bytes / 4).unwrap_or(usize::MAX);
        let marks_bytes = self
            .marks
            .stretches_max
            .saturating_mul(16)
            .saturating_add(1024);
        if self.marks.stretches_max > STRETCHES_MAX {
            return Err(Error::invalid(format!(
                "stretches_max over the limit: stretches_max={} limit={STRETCHES_MAX}",
                self.marks.stretches_max
            )));
        }
        if kind == NamespaceKind::Watermarks && marks_bytes > room {
            return Err(Error::invalid(format!(
                "stretches_max of a sparse watermark needs larger segments: stretches_max={} \
                 segment_bytes={segment_bytes} segment_bytes_min={}",
                self.marks.stretches_max,
                marks_bytes.saturating_mul(4)
            )));
        }
        if self.outcome_bytes_max > OUTCOME_BYTES_MAX {
            return Err(Error::invalid(format!(
                "outcome_bytes_max over the limit: bytes={} bytes_max={OUTCOME_BYTES_MAX}",
                self.outcome_bytes_max
            )));
        }
        let owed = self
            .outcome_bytes_max
            .saturating_add(self.attached_bytes_max);
        if kind != NamespaceKind::Filter && owed.saturating_add(1024) > room {
            return Err(Error::invalid(format!(
                "outcome_bytes_max needs segments of 4 times its size: outcome_bytes_max={} \
                 attached_bytes_max={} segment_bytes={segment_bytes}; raise segment_bytes or \
                 lower outcome_bytes_max",
                self.outcome_bytes_max, self.attached_bytes_max
            )));
        }
        if self.attempts_max == Some(0) {
            return Err(Error::invalid("attempts_max must be at least 1"));
        }
        Ok(())
    }
}

/// The largest bound of [`WatermarkOptions::sparse`].
pub const STRETCHES_MAX: usize = 8192;

/// How the numbers of a namespace's sources are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MarkOptions {
    pub(crate) sparse: bool,
    /// The first number of a source that nobody has begun otherwise.
    pub(crate) first: u64,
    /// Stretches of done numbers beyond one that is not.
    pub(crate) stretches_max: usize,
}

/// What a namespace of watermarks is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct WatermarkOptions {
    marks: MarkOptions,
    durability: Option<Durability>,
}

impl WatermarkOptions {
    /// A number at or below the highest one that was done counts as done: for sources that
    /// deliver in order and whose messages are handled one at a time.
    pub fn strict() -> Self {
        WatermarkOptions {
            marks: MarkOptions::default(),
            durability: None,
        }
    }

    /// Numbers may be done in any order: each counts for itself. At most so many stretches of
    /// done numbers may lie beyond one that is not done (16 bytes each in every record of the
    /// source; at most [`STRETCHES_MAX`]); a commit that would make more is `Full`.
    pub fn sparse(stretches_max: usize) -> Self {
        WatermarkOptions {
            marks: MarkOptions {
                sparse: true,
                first: 0,
                stretches_max,
            },
            durability: None,
        }
    }

    /// Sets the first number of a source that was not begun otherwise. Default: 0.
    pub fn first(mut self, number: u64) -> Self {
        self.marks.first = number;
        self
    }

    /// Sets the durability of this namespace's own calls. Default: the store's. A number that a
    /// commit carries is as durable as the commit.
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = Some(durability);
        self
    }

    pub(crate) fn namespace(self) -> NamespaceOptions {
        NamespaceOptions {
            durability: self.durability,
            // Nothing but marks is kept here.
            outcome_bytes_max: 0,
            marks: self.marks,
            ..NamespaceOptions::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiry_is_rounded_up_and_saturates_to_never() {
        let one = Retention::For(Duration::from_secs(1));
        assert_eq!(one.expires_at_s(1_000), 2);
        assert_eq!(one.expires_at_s(1_999), 3);
        assert_eq!(
            Retention::For(Duration::from_nanos(1)).expires_at_s(1_000),
            2
        );
        assert_eq!(Retention::For(Duration::MAX).expires_at_s(1_000), 0);
        assert_eq!(Retention::Forever.expires_at_s(1_000), 0);
    }

    #[test]
    fn bad_options_are_refused() {
        assert!(Options::new().segment_bytes(4095).validate().is_err());
        assert!(
            Options::new()
                .segment_bytes(128 * 1024 * 1024)
                .validate()
                .is_err()
        );
        assert!(Options::new().unsettled_count_max(0).validate().is_err());
        let big = NamespaceOptions::new().outcome_bytes_max(OUTCOME_BYTES_MAX + 1);
        assert!(
            big.validate(NamespaceKind::Internal, SEGMENT_BYTES_DEFAULT)
                .is_err()
        );
        assert!(
            NamespaceOptions::new()
                .validate(NamespaceKind::Internal, 4096)
                .is_err()
        );
        assert!(
            NamespaceOptions::new()
                .validate(NamespaceKind::Internal, SEGMENT_BYTES_DEFAULT)
                .is_ok()
        );
    }
}
