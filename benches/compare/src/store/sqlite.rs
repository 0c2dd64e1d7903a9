//! SQLite, by rusqlite.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rusqlite::Connection;

use super::{Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::workload::Key;

pub(crate) const SETTINGS: &str = "WAL, `WITHOUT ROWID`, `INSERT OR IGNORE`, prepared, one \
     connection behind a mutex, cache 256 MiB, checkpoint each 4000 pages; `synchronous` `OFF` \
     where lazy, `FULL` where durable";

/// One connection for all callers: connections of their own would wait for each other by
/// sleeping, which is slower.
pub(crate) struct Sqlite(Mutex<Connection>);

impl Sqlite {
    pub(crate) fn open(dir: &Path, level: Level) -> Fallible<Sqlite> {
        let connection = Connection::open(dir.join("data.sqlite"))?;
        let synchronous = match level {
            Level::Durable => "FULL",
            Level::Lazy | Level::Process => "OFF",
        };
        connection.execute_batch(&format!(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous};
             PRAGMA cache_size = -262144; PRAGMA wal_autocheckpoint = 4000;
             PRAGMA temp_store = MEMORY;
             CREATE TABLE IF NOT EXISTS keys (key BLOB PRIMARY KEY, expiry INTEGER)
             WITHOUT ROWID;"
        ))?;
        Ok(Sqlite(Mutex::new(connection)))
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for Sqlite {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(SqliteSession(self)))
    }

    fn settle(&self) -> Fallible<()> {
        let connection = self.connection();
        let synchronous: i64 = connection.query_row("PRAGMA synchronous", [], |row| row.get(0))?;
        connection.execute_batch("PRAGMA synchronous = FULL")?;
        connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
        Ok(connection.pragma_update(None, "synchronous", synchronous)?)
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        self.settle()
    }

    fn scan(&self, after: &[u8], count_max: usize) -> Fallible<Vec<(Key, u64)>> {
        let connection = self.connection();
        let sql = "SELECT key, expiry FROM keys WHERE key > ?1 ORDER BY key LIMIT ?2";
        let mut statement = connection.prepare_cached(sql)?;
        let rows = statement.query_map((after, i64::try_from(count_max)?), |row| {
            Ok((row.get::<_, Key>(0)?, row.get::<_, i64>(1)?))
        })?;
        rows.map(|row| {
            let (key, expiry) = row?;
            Ok((key, u64::try_from(expiry)?))
        })
        .collect()
    }

    fn remove(&self, keys: &[Key]) -> Fallible<()> {
        let mut connection = self.connection();
        let txn = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        {
            let mut statement = txn.prepare_cached("DELETE FROM keys WHERE key = ?1")?;
            for key in keys {
                statement.execute((key,))?;
            }
        }
        Ok(txn.commit()?)
    }
}

const INSERT: &str = "INSERT OR IGNORE INTO keys (key, expiry) VALUES (?1, ?2)";

struct SqliteSession<'a>(&'a Sqlite);

impl Session for SqliteSession<'_> {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        let connection = self.0.connection();
        let mut statement = connection.prepare_cached(INSERT)?;
        Ok(statement.execute((key, expiry.cast_signed()))? == 1)
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let mut connection = self.0.connection();
        let txn = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        {
            let mut statement = txn.prepare_cached(INSERT)?;
            for key in keys {
                fresh.push(statement.execute((key, expiry.cast_signed()))? == 1);
            }
        }
        Ok(txn.commit()?)
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        let connection = self.0.connection();
        let mut statement = connection.prepare_cached("SELECT 1 FROM keys WHERE key = ?1")?;
        Ok(statement.exists((key,))?)
    }
}
