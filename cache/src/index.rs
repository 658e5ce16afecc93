//! The index: an SQLite database that processes share. It remembers what the files are. Only the
//! list of what is missing is kept nowhere else.

use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, ErrorCode, OptionalExtension, TransactionBehavior, params};

use crate::{CacheError, Id, Key, Kind, Meta, Stats};

/// What is in the index about a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its name.
    pub key: Key,
    /// Bytes.
    pub size: u64,
    /// XXH3 of its content.
    pub checksum: u64,
    /// The rest.
    pub meta: Meta,
    /// Milliseconds since the Unix epoch.
    pub last_use: u64,
}

/// Why a key has no blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Negative {
    /// Nobody has it.
    Missing(String),
    /// There is one that cannot be used.
    Malformed(String),
}

#[derive(Debug)]
pub(crate) struct Index {
    connection: Connection,
    is_new: bool,
}

/// How long one process waits for another to finish its statement.
const PATIENCE: Duration = Duration::from_secs(20);

/// Version of the schema.
const VERSION: i32 = 1;
const SCHEMA: &str = "
    CREATE TABLE blobs (
        id TEXT NOT NULL, kind TEXT NOT NULL,
        size INTEGER NOT NULL, checksum INTEGER NOT NULL,
        quality INTEGER NOT NULL, origin TEXT NOT NULL, last_use INTEGER NOT NULL,
        PRIMARY KEY (id, kind)) WITHOUT ROWID;
    CREATE INDEX by_use ON blobs (last_use);
    CREATE TABLE negatives (
        id TEXT NOT NULL, kind TEXT NOT NULL,
        malformed INTEGER NOT NULL, reason TEXT NOT NULL, expires INTEGER NOT NULL,
        PRIMARY KEY (id, kind)) WITHOUT ROWID;
    PRAGMA user_version = 1;";

impl Index {
    /// Opens the index of a directory; one that is damaged is put aside and begun anew.
    pub fn open(directory: &Path) -> Result<Self, CacheError> {
        let path = directory.join("index.db");
        let mut opened = Self::try_open(&path);
        // Going over to a write-ahead log does not wait for others who are at the same.
        let deadline = Instant::now() + PATIENCE;
        while is_busy(&opened) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
            opened = Self::try_open(&path);
        }
        match opened {
            Err(CacheError::Index(error)) if is_damage(&error) => {
                for name in ["index.db", "index.db-wal", "index.db-shm"] {
                    let _ = std::fs::rename(
                        directory.join(name),
                        directory.join(format!("{name}.damaged")),
                    );
                }
                Self::try_open(&path)
            }
            other => other,
        }
    }

    fn try_open(path: &Path) -> Result<Self, CacheError> {
        // Before SQLite makes it, which would be with a mode others may read; its other files
        // follow this one's.
        let mut make = std::fs::OpenOptions::new();
        let made = make.write(true).create(true).truncate(false).mode(0o600).open(path);
        made.map_err(|error| CacheError::File { path: path.to_owned(), error })?;
        let connection = Connection::open(path)?;
        connection.busy_timeout(PATIENCE)?;
        // A row lost with the power is made again from its file.
        connection.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;")?;
        // Immediate: one that begins by reading cannot wait for its turn to write.
        let transaction =
            rusqlite::Transaction::new_unchecked(&connection, TransactionBehavior::Immediate)?;
        let version: i32 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        if version > VERSION {
            return Err(CacheError::Newer(path.to_owned()));
        }
        if version == 0 {
            connection.execute_batch(SCHEMA)?;
        }
        transaction.commit()?;
        // The tables are read, so that damage shows now.
        for table in ["blobs", "negatives"] {
            let sql = format!("SELECT 1 FROM {table} LIMIT 1");
            connection.query_row(&sql, [], |_| Ok(())).optional()?;
        }
        Ok(Self { connection, is_new: version == 0 })
    }

    /// Whether it was begun by this opening, and may know nothing of files that are there.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    pub fn row(&self, key: &Key) -> rusqlite::Result<Option<Row>> {
        let sql = "SELECT id, kind, size, checksum, quality, origin, last_use FROM blobs WHERE id = ?1 AND kind = ?2";
        let mut statement = self.connection.prepare_cached(sql)?;
        let row = statement.query_row(params![key.id.as_str(), key.kind.name()], row).optional()?;
        Ok(row.flatten())
    }

    /// All blobs, least recently used first.
    pub fn rows(&self) -> rusqlite::Result<Vec<Row>> {
        let sql = "SELECT id, kind, size, checksum, quality, origin, last_use FROM blobs ORDER BY last_use, id, kind";
        let mut statement = self.connection.prepare_cached(sql)?;
        let rows = statement.query_map([], row)?;
        Ok(rows.collect::<rusqlite::Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Changes files and their rows together, one process at a time. Others that also use this
    /// function never see a file without its row or a row without its file, except after a kill.
    pub fn change<T>(
        &self,
        change: impl FnOnce(&Self) -> Result<T, CacheError>,
    ) -> Result<T, CacheError> {
        self.connection.execute_batch("BEGIN IMMEDIATE")?;
        match change(self) {
            Ok(done) => {
                self.connection.execute_batch("COMMIT")?;
                Ok(done)
            }
            Err(error) => {
                // The error that came first is the one to tell.
                let _ = self.connection.execute_batch("ROLLBACK");
                Err(error)
            }
        }
    }

    /// Adds a row, in the place of the one before; what was missing is there now.
    pub fn insert(
        &self,
        key: &Key,
        (size, checksum): (u64, u64),
        meta: &Meta,
    ) -> rusqlite::Result<()> {
        let sql = "INSERT OR REPLACE INTO blobs VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
        self.connection.prepare_cached(sql)?.execute(params![
            key.id.as_str(),
            key.kind.name(),
            size as i64,
            checksum as i64,
            meta.quality,
            meta.origin,
            now() as i64,
        ])?;
        let sql = "DELETE FROM negatives WHERE id = ?1 AND kind = ?2";
        self.connection.prepare_cached(sql)?.execute(params![key.id.as_str(), key.kind.name()])?;
        Ok(())
    }

    pub fn touch(&self, key: &Key) -> rusqlite::Result<()> {
        let sql = "UPDATE blobs SET last_use = ?3 WHERE id = ?1 AND kind = ?2";
        let now = now() as i64;
        self.connection.prepare_cached(sql)?.execute(params![
            key.id.as_str(),
            key.kind.name(),
            now
        ])?;
        Ok(())
    }

    pub fn forget(&self, key: &Key) -> rusqlite::Result<()> {
        let sql = "DELETE FROM blobs WHERE id = ?1 AND kind = ?2";
        self.connection.prepare_cached(sql)?.execute(params![key.id.as_str(), key.kind.name()])?;
        Ok(())
    }

    /// Forgets that anything of an id is missing or malformed; whether something was.
    pub fn forget_negatives(&self, id: &Id) -> rusqlite::Result<bool> {
        let sql = "DELETE FROM negatives WHERE id = ?1";
        Ok(self.connection.prepare_cached(sql)?.execute(params![id.as_str()])? > 0)
    }

    pub fn negative(&self, key: &Key) -> rusqlite::Result<Option<Negative>> {
        let sql =
            "SELECT malformed, reason FROM negatives WHERE id = ?1 AND kind = ?2 AND expires > ?3";
        let now = now() as i64;
        let mut statement = self.connection.prepare_cached(sql)?;
        let found = statement.query_row(params![key.id.as_str(), key.kind.name(), now], |row| {
            let reason: String = row.get(1)?;
            Ok(if row.get(0)? { Negative::Malformed(reason) } else { Negative::Missing(reason) })
        });
        found.optional()
    }

    pub fn put_negative(
        &self,
        key: &Key,
        negative: &Negative,
        lifetime: Duration,
    ) -> rusqlite::Result<()> {
        let (malformed, reason) = match negative {
            Negative::Missing(reason) => (false, reason),
            Negative::Malformed(reason) => (true, reason),
        };
        let expires = now().saturating_add(lifetime.as_millis() as u64) as i64;
        let sql = "INSERT OR REPLACE INTO negatives VALUES (?1, ?2, ?3, ?4, ?5)";
        let (id, kind) = (key.id.as_str(), key.kind.name());
        self.connection
            .prepare_cached(sql)?
            .execute(params![id, kind, malformed, reason, expires])?;
        let sql = "DELETE FROM negatives WHERE expires <= ?1";
        self.connection.prepare_cached(sql)?.execute(params![now() as i64])?;
        Ok(())
    }

    pub fn stats(&self) -> rusqlite::Result<Stats> {
        let sql = "SELECT count(*), coalesce(sum(size), 0) FROM blobs";
        let (blobs, bytes): (i64, i64) =
            self.connection.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let sql = "SELECT count(*) FROM negatives WHERE malformed = ?1 AND expires > ?2";
        let count = |malformed: bool| -> rusqlite::Result<i64> {
            self.connection.query_row(sql, params![malformed, now() as i64], |row| row.get(0))
        };
        Ok(Stats {
            blobs: blobs as u64,
            bytes: bytes as u64,
            missing: count(false)? as u64,
            malformed: count(true)? as u64,
        })
    }
}

/// `None` for a row of a kind this version does not know.
fn row(row: &rusqlite::Row<'_>) -> rusqlite::Result<Option<Row>> {
    let (id, kind): (String, String) = (row.get(0)?, row.get(1)?);
    let (Ok(id), Some(kind)) = (id.parse(), Kind::of_name(&kind)) else { return Ok(None) };
    let (size, checksum, last_use): (i64, i64, i64) = (row.get(2)?, row.get(3)?, row.get(6)?);
    Ok(Some(Row {
        key: Key::new(id, kind),
        size: size as u64,
        checksum: checksum as u64,
        meta: Meta { quality: row.get(4)?, origin: row.get(5)? },
        last_use: last_use as u64,
    }))
}

fn is_busy(opened: &Result<Index, CacheError>) -> bool {
    let busy = |error: &rusqlite::Error| {
        matches!(
            error.sqlite_error_code(),
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
        )
    };
    matches!(opened, Err(CacheError::Index(error)) if busy(error))
}

fn is_damage(error: &rusqlite::Error) -> bool {
    let code = error.sqlite_error_code();
    matches!(code, Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt))
        // A table that should be there is not.
        || matches!(code, Some(ErrorCode::Unknown))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}
