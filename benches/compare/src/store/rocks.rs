//! RocksDB, built from its source.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rocksdb::compaction_filter::Decision;
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, Options, WaitForCompactOptions, WriteBatch,
    WriteOptions,
};

use super::gate::Gate;
use super::{CACHE_BYTES, Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::workload::Key;

pub(crate) const SETTINGS: &str = "write buffer 64 MiB, block cache 256 MiB, bloom filters of 10 \
     bits, two background jobs, no compression, get and put under a lock of the key; lazy: WAL \
     handed to the system at each write; durable: `sync` at each write; expiry by a compaction \
     filter and a full compaction";

const WRITE_BUFFER_BYTES: usize = 64 << 20;

pub(crate) struct Rocks {
    db: DB,
    gate: Gate,
    write: WriteOptions,
    /// What the compaction filter removes, and how many keys it has.
    expire_before: Arc<AtomicU64>,
    expired: Arc<AtomicU64>,
}

impl Rocks {
    pub(crate) fn open(dir: &Path, level: Level) -> Fallible<Rocks> {
        let mut table = BlockBasedOptions::default();
        table.set_bloom_filter(10.0, false);
        table.set_block_cache(&Cache::new_lru_cache(CACHE_BYTES));
        let expire_before = Arc::new(AtomicU64::new(0));
        let expired = Arc::new(AtomicU64::new(0));
        let mut options = Options::default();
        options.create_if_missing(true);
        options.set_block_based_table_factory(&table);
        options.set_write_buffer_size(WRITE_BUFFER_BYTES);
        options.set_max_background_jobs(2);
        options.set_compression_type(DBCompressionType::None);
        let (before, count) = (Arc::clone(&expire_before), Arc::clone(&expired));
        options.set_compaction_filter("expiry", move |_level: u32, _key: &[u8], value: &[u8]| {
            let expiry = value
                .first_chunk()
                .map_or(u64::MAX, |v| u64::from_le_bytes(*v));
            // Relaxed: a key that this compaction misses goes with the next.
            if expiry < before.load(Ordering::Relaxed) {
                count.fetch_add(1, Ordering::Relaxed);
                Decision::Remove
            } else {
                Decision::Keep
            }
        });
        let mut write = WriteOptions::default();
        write.set_sync(level == Level::Durable);
        Ok(Rocks {
            db: DB::open(&options, dir)?,
            gate: Gate::default(),
            write,
            expire_before,
            expired,
        })
    }

    fn knows(&self, key: &Key) -> Fallible<bool> {
        Ok(self.db.get_pinned(key)?.is_some())
    }
}

impl Store for Rocks {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(RocksSession(self)))
    }

    fn settle(&self) -> Fallible<()> {
        self.db.flush_wal(true)?;
        let mut options = WaitForCompactOptions::default();
        options.set_flush(false);
        Ok(self.db.wait_for_compact(&options)?)
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        Ok(self.db.flush_wal(true)?)
    }

    fn expire(&self, before: u64) -> Fallible<u64> {
        self.expire_before.store(before, Ordering::Relaxed);
        self.db.flush()?;
        self.db.compact_range(None::<&[u8]>, None::<&[u8]>);
        self.expire_before.store(0, Ordering::Relaxed);
        Ok(self.expired.load(Ordering::Relaxed))
    }
}

struct RocksSession<'a>(&'a Rocks);

impl Session for RocksSession<'_> {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        // Held until the write is durable: a duplicate waits for the insert that it rests on.
        let _one = self.0.gate.one(key);
        let fresh = !self.0.knows(key)?;
        if fresh {
            self.0
                .db
                .put_opt(key, expiry.to_le_bytes(), &self.0.write)?;
        }
        Ok(fresh)
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let _alone = self.0.gate.all();
        let mut batch = WriteBatch::default();
        let mut seen = HashSet::with_capacity(keys.len());
        for key in keys {
            let new = seen.insert(key) && !self.0.knows(key)?;
            if new {
                batch.put(key, expiry.to_le_bytes());
            }
            fresh.push(new);
        }
        Ok(self.0.db.write_opt(batch, &self.0.write)?)
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        self.0.knows(key)
    }
}
