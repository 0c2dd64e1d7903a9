//! Snowflake ids: who makes them, and by which time?
//!
//! A. Time is trusted time, which does not go back over clean closes and within a boot.
//! B. A store has one maker for each machine number, whoever asks for it.
//! C. A maker begins behind the millisecond in which it was made: a former opener may have used
//!    up that one.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use ferroid::generator::{BasicSnowflakeGenerator, Poll};
use ferroid::id::SnowflakeTwitterId;
use ferroid::time::TimeSource;

use super::handle::{DedupLog, Handle};
use super::{Engine, check_open};
use crate::error::{Error, ErrorKind, Result};

/// The largest machine number: 10 bits.
const MACHINE_MAX: u64 = SnowflakeTwitterId::max_machine_id();
/// How often a maker looks for the next millisecond, each time after one, before it says that
/// the clock stands still.
const WAITS_MAX: u32 = 1000;

/// Trusted time, in milliseconds since the maker's epoch.
struct Time {
    engine: Arc<Engine>,
    epoch_ms: u64,
}

impl TimeSource<u64> for Time {
    fn current_millis(&self) -> u64 {
        let now_ms = self.engine.now().trusted_ms;
        let since_ms = now_ms.saturating_sub(self.epoch_ms);
        since_ms.min(SnowflakeTwitterId::max_timestamp())
    }
}

type Generator = BasicSnowflakeGenerator<SnowflakeTwitterId, Time>;

struct Maker {
    handle: Weak<Handle>,
    epoch_ms: u64,
    generator: Mutex<Generator>,
}

/// The makers of one open store, by machine number.
#[derive(Default)]
pub(super) struct Makers(Mutex<BTreeMap<u16, Arc<Maker>>>);

/// Makes Snowflake ids for one machine number. Clones, and makers of the same number of the same
/// open store, are one. It does not keep the store open.
#[derive(Clone)]
pub struct Snowflakes(Arc<Maker>);

impl fmt::Debug for Snowflakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snowflakes")
            .field("epoch_ms", &self.0.epoch_ms)
            .finish_non_exhaustive()
    }
}

impl Snowflakes {
    /// Makes an id that this store has not made before for this machine number: 41 bits of
    /// milliseconds since the epoch, 10 bits of machine number, 12 bits of sequence. Later ids
    /// are larger. More than 4096 in a millisecond wait for the next one.
    ///
    /// Give it to a message once, and send it along with every retry. `docs/keys.md` says when
    /// two ids can be equal all the same.
    ///
    /// # Errors
    /// `Closed` after the store was closed, or in a forked child; `Io` if the clock stands still
    /// for a second, or the 69 years behind the epoch are over.
    pub fn make(&self) -> Result<u64> {
        for _ in 0..WAITS_MAX {
            match self.poll()? {
                Poll::Ready { id } => return Ok(id.to_raw()),
                Poll::Pending { .. } => std::thread::park_timeout(Duration::from_millis(1)),
            }
        }
        Err(Error::new(
            ErrorKind::Io,
            format!(
                "the clock stands still, or the milliseconds of this epoch are used up: \
                 epoch_ms={}",
                self.0.epoch_ms
            ),
        ))
    }

    /// Makes an id under the append lock, under which a store is closed: the next opener makes
    /// its own only behind this millisecond (upholds C).
    fn poll(&self) -> Result<Poll<SnowflakeTwitterId>> {
        let Some(handle) = self.0.handle.upgrade() else {
            return Err(Error::new(ErrorKind::Closed, "store was closed"));
        };
        let core = handle.engine.core();
        check_open(&core)?;
        handle.engine.check_home()?;
        let polled = self.0.generator().poll_id();
        drop(core);
        Ok(polled)
    }
}

impl Maker {
    /// A panic does not tear the state: it is one number.
    fn generator(&self) -> MutexGuard<'_, Generator> {
        self.generator
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl DedupLog {
    /// Returns the maker of Snowflake ids for this machine number, from 0 to 1023, which no other
    /// machine may use: two of one number make equal ids. `epoch_ms` is the first millisecond of
    /// the numbering, since 1970.
    ///
    /// ```
    /// use idemlog::{DedupLog, KeyTime, NamespaceOptions, Observed, snowflake_key};
    ///
    /// const EPOCH_MS: u64 = 1_735_689_600_000;
    /// let log = DedupLog::in_memory()?;
    /// let ids = log.snowflakes(7, EPOCH_MS)?;
    /// let id = ids.make()?;
    ///
    /// let time = KeyTime::Snowflake { epoch_ms: EPOCH_MS };
    /// let seen = log.filter("seen", NamespaceOptions::new().key_time(time))?;
    /// assert_eq!(seen.observe(snowflake_key(id))?, Observed::New);
    /// # Ok::<(), idemlog::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Invalid` for a machine number over 1023, an epoch that is still to come, and a machine
    /// number that is in use with another epoch.
    pub fn snowflakes(&self, machine: u16, epoch_ms: u64) -> Result<Snowflakes> {
        if self.handle.engine.shared.is_some() {
            return Err(Error::invalid(
                "no Snowflakes in a shared store: two processes of one machine number would make \
                 equal ids; make them elsewhere",
            ));
        }
        let now_ms = self.handle.engine.now().trusted_ms;
        if u64::from(machine) > MACHINE_MAX || epoch_ms > now_ms {
            return Err(Error::invalid(format!(
                "no Snowflakes of this kind: machine={machine} machine_max={MACHINE_MAX} \
                 epoch_ms={epoch_ms} now_ms={now_ms}"
            )));
        }
        let makers = &self.handle.makers.0;
        let mut makers = makers.lock().unwrap_or_else(PoisonError::into_inner);
        let maker = makers
            .entry(machine)
            .or_insert_with(|| Arc::new(self.new_maker(machine, epoch_ms)));
        if maker.epoch_ms != epoch_ms {
            return Err(Error::invalid(format!(
                "machine number is in use with another epoch: machine={machine} epoch_ms={} \
                 asked_ms={epoch_ms}",
                maker.epoch_ms
            )));
        }
        Ok(Snowflakes(Arc::clone(maker)))
    }

    fn new_maker(&self, machine: u16, epoch_ms: u64) -> Maker {
        let engine = Arc::clone(&self.handle.engine);
        let time = Time { engine, epoch_ms };
        let used_up = SnowflakeTwitterId::max_sequence();
        let began = time.current_millis();
        let machine = u64::from(machine);
        Maker {
            handle: Arc::downgrade(&self.handle),
            epoch_ms,
            generator: Mutex::new(Generator::from_components(began, machine, used_up, time)),
        }
    }
}
