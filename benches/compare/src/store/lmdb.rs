//! LMDB, by heed.

use std::ops::Bound;
use std::path::Path;

use heed::types::Bytes;
use heed::{CommitOrAbort, Database, Env, EnvFlags, EnvOpenOptions, WithoutTls};

use super::{Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::workload::Key;

pub(crate) const SETTINGS: &str = "one write transaction a call or a batch, `NO_READ_AHEAD`; \
     lazy: `NO_SYNC`; durable: its default, two flushes a commit";

/// One for the life of the process: heed ties a database to the borrow of its environment.
pub(crate) struct Lmdb {
    env: &'static Env<WithoutTls>,
    keys: Database<'static, Bytes, Bytes>,
}

impl Lmdb {
    #[expect(unsafe_code, reason = "opening a memory map is unsafe in heed")]
    pub(crate) fn open(dir: &Path, level: Level, keys: u64) -> Fallible<Lmdb> {
        let mut options = EnvOpenOptions::new().read_txn_without_tls();
        let map_bytes = usize::try_from((keys + 1_000_000) * 256)?;
        options
            .map_size(map_bytes.next_multiple_of(1 << 20))
            .max_readers(256);
        let mut flags = EnvFlags::NO_READ_AHEAD;
        if level != Level::Durable {
            flags |= EnvFlags::NO_SYNC;
        }
        // SAFETY: `NO_SYNC` gives up power-cut safety alone, which a benchmark's data can lose.
        unsafe { options.flags(flags) };
        // SAFETY: the directory is this cell's own: nobody else maps or changes the file.
        let env = unsafe { options.open(dir) }?;
        let env: &'static Env<WithoutTls> = Box::leak(Box::new(env));
        let txn = env.write_txn()?;
        let made = env.create_databases_and_commit(txn, |opener, txn| {
            let keys = opener.create_database::<Bytes, Bytes>(txn, None)?;
            Ok::<_, heed::Error>(CommitOrAbort::<_, ()>::Commit(keys))
        });
        let keys = made?.unwrap_commit();
        Ok(Lmdb { env, keys })
    }
}

impl Store for Lmdb {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(LmdbSession(self)))
    }

    fn settle(&self) -> Fallible<()> {
        Ok(self.env.force_sync()?)
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        self.settle()
    }

    fn scan(&self, after: &[u8], count_max: usize) -> Fallible<Vec<(Key, u64)>> {
        let txn = self.env.read_txn()?;
        // An empty key is no key to LMDB.
        let from = if after.is_empty() {
            Bound::Unbounded
        } else {
            Bound::Excluded(after)
        };
        let range = (from, Bound::Unbounded);
        let items = self.keys.range(&txn, &range)?.take(count_max);
        items
            .map(|item| {
                item.map_err(Into::into)
                    .and_then(|(k, v)| super::item(k, v))
            })
            .collect()
    }

    fn remove(&self, keys: &[Key]) -> Fallible<()> {
        let mut txn = self.env.write_txn()?;
        for key in keys {
            self.keys.delete(&mut txn, key)?;
        }
        Ok(txn.commit()?)
    }
}

struct LmdbSession<'a>(&'a Lmdb);

impl Session for LmdbSession<'_> {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        let value = expiry.to_le_bytes();
        let mut txn = self.0.env.write_txn()?;
        let known = self.0.keys.get_or_put(&mut txn, key, &value)?;
        let fresh = known.is_none();
        if fresh {
            txn.commit()?;
        }
        Ok(fresh)
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let value = expiry.to_le_bytes();
        let mut txn = self.0.env.write_txn()?;
        for key in keys {
            let known = self.0.keys.get_or_put(&mut txn, key, &value)?;
            fresh.push(known.is_none());
        }
        Ok(txn.commit()?)
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        let txn = self.0.env.read_txn()?;
        Ok(self.0.keys.get(&txn, key)?.is_some())
    }
}
