//! The stores: one operation, each in its own fastest fair way.

mod fjall;
mod gate;
mod grouped;
mod limit;
mod lmdb;
pub(crate) mod ours;
mod ramlog;
mod redb;
mod redis;
#[cfg(feature = "rocksdb")]
mod rocks;
mod sled;
mod sqlite;

use std::path::Path;

use crate::Fallible;
use crate::cell::Level;
use crate::figures::Figures;
use crate::workload::Key;

pub(crate) trait Store: Sync {
    /// What one thread calls.
    fn session(&self) -> Fallible<Box<dyn Session + '_>>;

    /// Makes all answers durable, and waits until no background work is due.
    fn settle(&self) -> Fallible<()>;

    fn close(self: Box<Self>) -> Fallible<()>;

    /// The process that does the work, if it is not this one.
    fn server(&self) -> Option<u32> {
        None
    }

    /// Removes all keys that expire before this time, in the store's natural way; says how many.
    /// A scan beside the inserts and small transactions of deletes, unless the store knows better.
    fn expire(&self, before: u64) -> Fallible<u64> {
        let (mut after, mut removed) = (Vec::new(), 0);
        loop {
            let items = self.scan(&after, EXPIRE_SCAN_COUNT)?;
            let Some((last, _)) = items.last() else {
                return Ok(removed);
            };
            after = last.to_vec();
            let old = items.iter().filter(|(_, expiry)| *expiry < before);
            let old: Vec<Key> = old.map(|(key, _)| *key).collect();
            self.remove(&old)?;
            removed += old.len() as u64;
        }
    }

    /// The next keys behind `after`, in the order of keys, with their expiry.
    fn scan(&self, _after: &[u8], _count_max: usize) -> Fallible<Vec<(Key, u64)>> {
        Err("this store is not scanned".into())
    }

    fn remove(&self, _keys: &[Key]) -> Fallible<()> {
        Err("this store does not remove keys".into())
    }

    /// Says whether verdicts are answers; bare writes know nothing about keys.
    fn answers(&self) -> bool {
        true
    }

    /// Figures that only this store has.
    fn figures(&self) -> Figures {
        Figures::default()
    }
}

pub(crate) trait Session {
    /// Inserts a key if it is absent, and says whether it was.
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool>;

    /// The same for many keys in order, with one commit; one verdict a key.
    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()>;

    /// The same by one task that has this many calls wait at a time; the verdicts are in order.
    fn insert_in_flight(
        &mut self,
        _keys: &[Key],
        _in_flight: usize,
        _fresh: &mut Vec<bool>,
    ) -> Fallible<()> {
        Err("this store has no asynchronous calls".into())
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool>;
}

/// How many keys one step of an expiry scans.
const EXPIRE_SCAN_COUNT: usize = 1000;

/// Why a store cannot run here at all; `None` if it can.
pub(crate) fn missing(name: &str) -> Option<String> {
    match name {
        "redis" => redis::missing(),
        "rocksdb" if cfg!(not(feature = "rocksdb")) => {
            Some("built without the feature `rocksdb`".to_owned())
        }
        _ if NAMES.contains(&name) => None,
        _ => Some(format!("no store is called {name}")),
    }
}

/// All stores, in the order of the tables.
pub(crate) const NAMES: &[&str] = &[
    "ram",
    "ramlog",
    "append",
    "pwrite64",
    "pwrite4k",
    "line",
    "idemlog",
    "idemlog-4m",
    "lmdb",
    "rocksdb",
    "redb",
    "sled",
    "sled-flush",
    "fjall",
    "fjall-grouped",
    "sqlite",
    "redis",
];

/// The cache of each store that has one of its own; the page cache is there for all.
pub(crate) const CACHE_BYTES: usize = 256 << 20;

/// Opens a store in a directory that exists. `keys` is how many keys it is going to hold.
pub(crate) fn open(name: &str, dir: &Path, level: Level, keys: u64) -> Fallible<Box<dyn Store>> {
    Ok(match name {
        "idemlog" => Box::new(ours::Ours::open(
            dir,
            level,
            idemlog::SEGMENT_BYTES_DEFAULT,
        )?),
        "idemlog-4m" => Box::new(ours::Ours::open(dir, level, ours::SMALL_SEGMENT_BYTES)?),
        "ram" => Box::new(limit::Ram::default()),
        "append" => Box::new(limit::Append::open(dir)?),
        "pwrite64" => Box::new(limit::Pwrite::open(dir, level, 64, keys)?),
        "pwrite4k" => Box::new(limit::Pwrite::open(dir, level, 4096, keys)?),
        "ramlog" => Box::new(ramlog::RamLog::open(dir, level, keys)?),
        "lmdb" => Box::new(lmdb::Lmdb::open(dir, level, keys)?),
        #[cfg(feature = "rocksdb")]
        "rocksdb" => Box::new(rocks::Rocks::open(dir, level)?),
        "redb" => Box::new(redb::Redb::open(dir, level)?),
        "sled" => Box::new(sled::Sled::open(dir, level, true)?),
        "sled-flush" => Box::new(sled::Sled::open(dir, level, false)?),
        "fjall" => Box::new(fjall::Fjall::open(dir, level, false)?),
        "fjall-grouped" => Box::new(fjall::Fjall::open(dir, level, true)?),
        "sqlite" => Box::new(sqlite::Sqlite::open(dir, level)?),
        "redis" => Box::new(redis::Redis::open(dir, level)?),
        other => return Err(format!("no store is called {other}").into()),
    })
}

/// The settings of a store, as the foot of a table states them.
pub(crate) fn settings(name: &str) -> &'static str {
    match name {
        "idemlog" | "idemlog-4m" => ours::SETTINGS,
        "ram" | "append" | "pwrite64" | "pwrite4k" => limit::SETTINGS,
        "ramlog" => ramlog::SETTINGS,
        "lmdb" => lmdb::SETTINGS,
        #[cfg(feature = "rocksdb")]
        "rocksdb" => rocks::SETTINGS,
        "redb" => redb::SETTINGS,
        "sled" | "sled-flush" => sled::SETTINGS,
        "fjall" | "fjall-grouped" => fjall::SETTINGS,
        "sqlite" => sqlite::SETTINGS,
        "redis" => redis::SETTINGS,
        _ => "",
    }
}

/// A key and its expiry, as peers keep them.
fn item(key: &[u8], value: &[u8]) -> Fallible<(Key, u64)> {
    Ok((key.try_into()?, u64::from_le_bytes(value.try_into()?)))
}

/// Milliseconds since 1970, as expiries are counted.
pub(crate) fn now_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

/// Waits for a moment that stores expire keys at by themselves.
pub(crate) fn sleep_until(ms: u64) {
    std::thread::sleep(std::time::Duration::from_millis(
        ms.saturating_sub(now_ms()),
    ));
}
