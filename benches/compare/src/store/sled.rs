//! sled 0.34.

use std::collections::HashSet;
use std::fs::File;
use std::ops::Bound;
use std::path::Path;

use super::gate::Gate;
use super::{CACHE_BYTES, Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::workload::Key;

pub(crate) const SETTINGS: &str = "cache 256 MiB, `HighThroughput`; single calls by \
     `compare_and_swap`, batches by `Batch` behind a lock; lazy: its default flush each 500 ms; \
     durable: `flush()` and then an `fdatasync` of its file, because `flush()` alone issues none; \
     `sled-flush` is without it and **not durable**";

pub(crate) struct Sled {
    db: sled::Db,
    gate: Gate,
    level: Level,
    /// What `flush()` does not sync.
    file: Option<File>,
}

impl Sled {
    pub(crate) fn open(dir: &Path, level: Level, syncs: bool) -> Fallible<Sled> {
        let mut config = sled::Config::new()
            .path(dir)
            .cache_capacity(CACHE_BYTES as u64)
            .mode(sled::Mode::HighThroughput);
        if level == Level::Durable {
            config = config.flush_every_ms(None);
        }
        let db = config.open()?;
        let file = syncs.then(|| File::open(dir.join("db"))).transpose()?;
        Ok(Sled {
            db,
            gate: Gate::default(),
            level,
            file,
        })
    }

    fn commit(&self) -> Fallible<()> {
        if self.level == Level::Durable {
            self.settle()?;
        }
        Ok(())
    }
}

impl Store for Sled {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(SledSession(self)))
    }

    fn settle(&self) -> Fallible<()> {
        self.db.flush()?;
        if let Some(file) = &self.file {
            file.sync_data()?;
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        self.settle()
    }

    fn scan(&self, after: &[u8], count_max: usize) -> Fallible<Vec<(Key, u64)>> {
        let range = (Bound::Excluded(after), Bound::<&[u8]>::Unbounded);
        let items = self.db.range::<&[u8], _>(range).take(count_max);
        items
            .map(|item| {
                let (key, value) = item?;
                super::item(&key, &value)
            })
            .collect()
    }

    fn remove(&self, keys: &[Key]) -> Fallible<()> {
        let mut batch = sled::Batch::default();
        keys.iter().for_each(|key| batch.remove(key));
        Ok(self.db.apply_batch(batch)?)
    }
}

struct SledSession<'a>(&'a Sled);

impl Session for SledSession<'_> {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        let value = &expiry.to_le_bytes();
        let swapped = self
            .0
            .db
            .compare_and_swap(key, None::<&[u8]>, Some(value))?;
        // A duplicate may rest on an insert that is not durable yet.
        self.0.commit()?;
        Ok(swapped.is_ok())
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let _alone = self.0.gate.all();
        let mut batch = sled::Batch::default();
        let mut seen = HashSet::with_capacity(keys.len());
        for key in keys {
            let new = seen.insert(key) && !self.0.db.contains_key(key)?;
            if new {
                batch.insert(key, &expiry.to_le_bytes());
            }
            fresh.push(new);
        }
        self.0.db.apply_batch(batch)?;
        self.0.commit()
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        Ok(self.0.db.contains_key(key)?)
    }
}
