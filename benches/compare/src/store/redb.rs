//! redb.

use std::ops::Bound;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use redb::{
    Database, Durability, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};

use super::{CACHE_BYTES, Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::workload::Key;

pub(crate) const SETTINGS: &str = "one write transaction a call or a batch, cache 256 MiB; lazy: \
     `Durability::None`, with one `Immediate` commit each second; durable: `Immediate`";

const KEYS: TableDefinition<'_, Key, u64> = TableDefinition::new("keys");
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct Redb {
    database: Database,
    level: Level,
    synced_at: Mutex<Instant>,
}

impl Redb {
    pub(crate) fn open(dir: &Path, level: Level) -> Fallible<Redb> {
        let database = Database::builder()
            .set_cache_size(CACHE_BYTES)
            .create(dir.join("data.redb"))?;
        let txn = database.begin_write()?;
        txn.open_table(KEYS)?;
        txn.commit()?;
        Ok(Redb {
            database,
            level,
            synced_at: Mutex::new(Instant::now()),
        })
    }

    fn begin(&self) -> Fallible<WriteTransaction> {
        let mut txn = self.database.begin_write()?;
        if self.level != Level::Durable {
            let mut synced_at = self.synced_at.lock().map_err(|_| "a caller panicked")?;
            if synced_at.elapsed() < SYNC_INTERVAL {
                txn.set_durability(Durability::None)?;
            } else {
                *synced_at = Instant::now();
            }
        }
        Ok(txn)
    }
}

impl Store for Redb {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(RedbSession(self)))
    }

    fn settle(&self) -> Fallible<()> {
        Ok(self.database.begin_write()?.commit()?)
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        self.settle()?;
        Ok(self.database.close()?)
    }

    fn scan(&self, after: &[u8], count_max: usize) -> Fallible<Vec<(Key, u64)>> {
        let table = self.database.begin_read()?.open_table(KEYS)?;
        let after = Key::try_from(after).map_or(Bound::Unbounded, Bound::Excluded);
        let items = table
            .range::<Key>((after, Bound::Unbounded))?
            .take(count_max);
        items
            .map(|item| {
                let (key, expiry) = item?;
                Ok((key.value(), expiry.value()))
            })
            .collect()
    }

    fn remove(&self, keys: &[Key]) -> Fallible<()> {
        let txn = self.begin()?;
        {
            let mut table = txn.open_table(KEYS)?;
            for key in keys {
                table.remove(key)?;
            }
        }
        Ok(txn.commit()?)
    }
}

struct RedbSession<'a>(&'a Redb);

impl Session for RedbSession<'_> {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        let txn = self.0.begin()?;
        let fresh = {
            let mut table = txn.open_table(KEYS)?;
            let known = table.get(key)?.is_some();
            if !known {
                table.insert(key, expiry)?;
            }
            !known
        };
        if fresh {
            txn.commit()?;
        } else {
            txn.abort()?;
        }
        Ok(fresh)
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let txn = self.0.begin()?;
        {
            let mut table = txn.open_table(KEYS)?;
            for key in keys {
                let known = table.get(key)?.is_some();
                if !known {
                    table.insert(key, expiry)?;
                }
                fresh.push(!known);
            }
        }
        Ok(txn.commit()?)
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        let table = self.0.database.begin_read()?.open_table(KEYS)?;
        Ok(table.get(key)?.is_some())
    }
}
