//! SQLite, by rusqlite.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::Connection;

use super::{Session, Store};
use crate::Fallible;
use crate::cell::Level;
use crate::workload::Key;

pub(crate) const SETTINGS: &str = "WAL, `WITHOUT ROWID`, `INSERT OR IGNORE`, prepared, one \
     connection a thread, cache 256 MiB, checkpoint each 4000 pages; lazy: `synchronous = OFF`; \
     durable: `synchronous = FULL`";

pub(crate) struct Sqlite {
    path: PathBuf,
    level: Level,
}

impl Sqlite {
    pub(crate) fn open(dir: &Path, level: Level) -> Fallible<Sqlite> {
        let store = Sqlite {
            path: dir.join("data.sqlite"),
            level,
        };
        store.connect()?.execute_batch(
            "CREATE TABLE IF NOT EXISTS keys (key BLOB PRIMARY KEY, expiry INTEGER) WITHOUT ROWID",
        )?;
        Ok(store)
    }

    fn connect(&self) -> Fallible<Connection> {
        let connection = Connection::open(&self.path)?;
        connection.busy_timeout(Duration::from_secs(60))?;
        let synchronous = match self.level {
            Level::Durable => "FULL",
            Level::Lazy | Level::Process => "OFF",
        };
        connection.execute_batch(&format!(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous};
             PRAGMA cache_size = -262144; PRAGMA wal_autocheckpoint = 4000;
             PRAGMA temp_store = MEMORY;"
        ))?;
        Ok(connection)
    }
}

impl Store for Sqlite {
    fn session(&self) -> Fallible<Box<dyn Session + '_>> {
        Ok(Box::new(SqliteSession(self.connect()?)))
    }

    fn settle(&self) -> Fallible<()> {
        let connection = self.connect()?;
        connection.execute_batch("PRAGMA synchronous = FULL")?;
        Ok(connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?)
    }

    fn close(self: Box<Self>) -> Fallible<()> {
        self.settle()
    }

    fn scan(&self, after: &[u8], count_max: usize) -> Fallible<Vec<(Key, u64)>> {
        let connection = self.connect()?;
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
        let mut connection = self.connect()?;
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

struct SqliteSession(Connection);

impl Session for SqliteSession {
    fn insert(&mut self, key: &Key, expiry: u64) -> Fallible<bool> {
        let mut statement = self.0.prepare_cached(INSERT)?;
        Ok(statement.execute((key, expiry.cast_signed()))? == 1)
    }

    fn insert_many(&mut self, keys: &[Key], expiry: u64, fresh: &mut Vec<bool>) -> Fallible<()> {
        let txn = self
            .0
            .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        {
            let mut statement = txn.prepare_cached(INSERT)?;
            for key in keys {
                fresh.push(statement.execute((key, expiry.cast_signed()))? == 1);
            }
        }
        Ok(txn.commit()?)
    }

    fn contains(&mut self, key: &Key) -> Fallible<bool> {
        let mut statement = self.0.prepare_cached("SELECT 1 FROM keys WHERE key = ?1")?;
        Ok(statement.exists((key,))?)
    }
}
