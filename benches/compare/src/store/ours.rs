//! idemlog: a filter, observed.

use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use idemlog::{DedupLog, Durability, Filter, NamespaceOptions, ObserveOptions, Observed, Options};

use super::{Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::figures::Figures;
use crate::workload::{EXPIRY, Key};

pub(crate) const SETTINGS: &str = "default options; `Buffered` for lazy, `Process`, `Power` for \
     durable; `idemlog-4m` has segments of 4 MiB instead of 32 MiB, so that a million keys see \
     seals, runs and merges";

pub(crate) const SMALL_SEGMENT_BYTES: u32 = 4 << 20;

/// The sweep has ended when it dropped nothing for this many tenths of a second: it looks each
/// second.
const QUIET_COUNT: u32 = 30;

pub(crate) struct Ours {
    pub(crate) log: DedupLog,
    pub(crate) filter: Filter,
}

pub(crate) fn durability(level: Level) -> Durability {
    match level {
        Level::Lazy => Durability::Buffered,
        Level::Process => Durability::Process,
        Level::Durable => Durability::Power,
    }
}

impl Ours {
    pub(crate) fn open(dir: &Path, level: Level, segment_bytes: u32) -> Fallible<Ours> {
        let options = Options::new()
            .durability(durability(level))
            .segment_bytes(segment_bytes);
        let log = options.open(dir.join("store"))?;
        let filter = log.filter("keys", NamespaceOptions::new())?;
        Ok(Ours { log, filter })
    }
}

impl Store for Ours {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(OurSession(&self.filter)))
    }

    fn settle(&self) -> Fallible<()> {
        self.log.sync()?;
        Ok(self.log.wait_idle()?)
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        drop(self.filter);
        Ok(self.log.close()?)
    }

    /// The sweep drops whole segments by itself; this waits until it has nothing left to drop.
    fn expire(&self, before: u64) -> Fallible<u64> {
        super::sleep_until(before);
        let (mut last, mut same) = (0, 0);
        while same < QUIET_COUNT {
            std::thread::sleep(Duration::from_millis(100));
            let drops = self.log.stats().drops_count;
            same = if drops == last { same + 1 } else { 0 };
            last = drops;
        }
        // Counted in segments; the caller knows how many keys they had.
        Ok(0)
    }

    fn figures(&self) -> Figures {
        let stats = self.log.stats();
        let mut figures = Figures::default();
        figures.count("own_flushes", stats.flushes_count);
        figures.count("own_appended_bytes", stats.appended_bytes);
        figures.count("own_seals", stats.seals_count);
        figures.count("own_merges", stats.merges_count);
        figures.count("own_drops", stats.drops_count);
        figures.count("own_carried", stats.carried_count);
        figures.count("own_runs", stats.runs_count);
        figures.count("own_fuse_filters", stats.fuse_filters_count);
        figures.count("own_stalls", stats.stalls_count);
        figures.count("own_run_bytes", stats.run_bytes);
        figures.count("own_filter_bytes", stats.filter_bytes);
        figures.count("own_table_bytes", stats.table_bytes);
        figures
    }
}

/// The namespace's retention, or what is left until a nearer expiry.
fn until(expiry: u64) -> ObserveOptions {
    if expiry == EXPIRY {
        return ObserveOptions::new();
    }
    let left = Duration::from_millis(expiry.saturating_sub(super::now_ms()));
    ObserveOptions::new().retention(left)
}

struct OurSession<'a>(&'a Filter);

impl Session for OurSession<'_> {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        if expiry == EXPIRY {
            return Ok(self.0.observe(key)?.is_new());
        }
        Ok(self.0.observe_with(key, &until(expiry))?.is_new())
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        for observed in self.0.observe_many_with(keys, &until(expiry))? {
            fresh.push(observed? == Observed::New);
        }
        Ok(())
    }

    fn insert_in_flight(
        &mut self,
        keys: &[Key],
        in_flight: usize,
        fresh: &mut Vec<bool>,
    ) -> Fallible<()> {
        let calls = stream::iter(keys).map(|key| self.0.observe_async(key));
        let mut answers = pin!(calls.buffered(in_flight));
        futures_executor::block_on(async {
            while let Some(observed) = answers.next().await {
                fresh.push(observed? == Observed::New);
            }
            Ok(())
        })
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        Ok(self.0.get(key)? == idemlog::KeyState::Seen)
    }
}
