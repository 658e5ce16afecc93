//! The index of windows: which there are, and how far each has come. An SQLite database beside the
//! logs.
//!
//! What is acknowledged is in the logs alone. The index says what is still to be done with them, so
//! that it is done after any restart, and once. Called by `store.rs`.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, params};
use stackwire_formats::pprof::SPLIT;
use stackwire_proto::v1;

use super::id::{CaptureId, WindowId};
use crate::receive::log::Tally;

/// How far a window has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    /// Epochs are added to its log.
    Open = 0,
    /// Its log is whole; its profile is to be written.
    Closed = 1,
    /// Its profile is written.
    Written = 2,
    /// It ended the server too often while it was resolved. Its log is kept like that of one that
    /// is written.
    GivenUp = 3,
    /// All its profiles are where they are pushed to.
    Pushed = 4,
    /// Written, but some of it was refused there.
    NotPushed = 5,
}

/// A window that waits for its profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Due {
    pub id: WindowId,
    /// Who sent it, if that is known.
    pub owner: Option<String>,
    /// Bytes of its log that count.
    pub bytes: u64,
    /// Bytes its epochs take in memory.
    pub memory: u64,
    /// How often a server has ended while it resolved it.
    pub interrupted: u32,
    /// How often it failed.
    pub failures: u32,
}

/// What is known of a capture whose collector comes back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Before {
    /// Who began it.
    pub owner: String,
    /// First epoch that no closed window has.
    pub next_epoch: u64,
    /// Number of its next window.
    pub next_window: u64,
    /// Lost by what closed windows say, by reason.
    pub lost: BTreeMap<i32, v1::Lost>,
}

/// A file that was written, or a log: for who removes the oldest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Old<T> {
    pub what: T,
    pub bytes: u64,
    pub since_ms: u64,
}

/// An index.
#[derive(Debug)]
pub(super) struct Index {
    pub(super) connection: Connection,
    path: PathBuf,
    inode: u64,
}

/// How profiles end that can be pushed.
const PPROF: &str = ".pb.gz";
/// Its file.
const FILE: &str = "windows.db";
/// Version of the schema.
const VERSION: i32 = 3;
const SCHEMA: &str = "
    CREATE TABLE captures (
        id BLOB PRIMARY KEY, owner TEXT, next_epoch INTEGER NOT NULL,
        next_window INTEGER NOT NULL, seen_ms INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE lost (
        capture BLOB NOT NULL, reason INTEGER NOT NULL, samples INTEGER NOT NULL,
        count INTEGER NOT NULL, PRIMARY KEY (capture, reason)) WITHOUT ROWID;
    CREATE TABLE windows (
        capture BLOB NOT NULL, number INTEGER NOT NULL, state INTEGER NOT NULL,
        bytes INTEGER NOT NULL, since_ms INTEGER NOT NULL,
        interrupted INTEGER NOT NULL, failures INTEGER NOT NULL, due_ms INTEGER NOT NULL,
        PRIMARY KEY (capture, number)) WITHOUT ROWID;
    CREATE INDEX windows_by_state ON windows (state, since_ms);
    CREATE INDEX windows_done ON windows (since_ms) WHERE state >= 2;
    CREATE TABLE profiles (
        name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, since_ms INTEGER NOT NULL) WITHOUT ROWID;
    CREATE INDEX profiles_by_age ON profiles (since_ms);";
/// Since version 2: what collectors are asked about.
const ADDED: &str = "
    ALTER TABLE captures ADD COLUMN hostname TEXT NOT NULL DEFAULT '';
    ALTER TABLE captures ADD COLUMN collector TEXT NOT NULL DEFAULT '';
    ALTER TABLE captures ADD COLUMN kernel TEXT NOT NULL DEFAULT '';
    ALTER TABLE captures ADD COLUMN begun_ms INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE captures ADD COLUMN adopted INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE windows ADD COLUMN start_ms INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE windows ADD COLUMN end_ms INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE windows ADD COLUMN samples INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE windows ADD COLUMN lost INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE windows ADD COLUMN stacks INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE windows ADD COLUMN whole INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE windows ADD COLUMN memory INTEGER NOT NULL DEFAULT 0;
    UPDATE windows SET end_ms = since_ms WHERE state > 0;";
/// Since version 3: profiles that are to be pushed.
const PUSHES: &str = "
    CREATE TABLE pushes (
        name TEXT PRIMARY KEY, capture BLOB NOT NULL, number INTEGER NOT NULL,
        split INTEGER NOT NULL, sent INTEGER NOT NULL, interrupted INTEGER NOT NULL,
        failures INTEGER NOT NULL, since_ms INTEGER NOT NULL, due_ms INTEGER NOT NULL)
        WITHOUT ROWID;
    CREATE INDEX pushes_by_due ON pushes (due_ms);
    CREATE INDEX pushes_by_window ON pushes (capture, number);
    PRAGMA user_version = 3;";

/// With the number of the state in it, as the partial index has it: SQLite uses that for no other
/// query, and would look at all windows.
const OLDEST_LOG: &str = "SELECT capture, number, bytes, since_ms FROM windows WHERE state >= 2
    ORDER BY since_ms LIMIT 1";

/// Why there is no index.
#[derive(Debug, thiserror::Error)]
pub(super) enum IndexError {
    #[error("cannot use the index of windows {path}: {error}")]
    Sqlite { path: PathBuf, error: rusqlite::Error },
    #[error("cannot use the index of windows {path}: {error}")]
    Io { path: PathBuf, error: std::io::Error },
    #[error(
        "the index of windows {path} is of a newer stackwire: use that one, or another --log-dir"
    )]
    Newer { path: PathBuf },
}

pub(super) type Result<T> = rusqlite::Result<T>;

impl Index {
    /// Opens the index of a directory. One that is damaged is put aside, and begun anew: its logs
    /// are still there. True if it is new.
    pub(super) fn open(directory: &Path) -> std::result::Result<(Self, bool), IndexError> {
        let path = directory.join(FILE);
        match Self::try_open(&path) {
            Err(IndexError::Sqlite { error, .. }) if is_damage(&error) => {
                tracing::warn!(
                    "the index of windows {} is damaged ({error}): it is made again from the logs",
                    path.display()
                );
                for name in ["windows.db", "windows.db-wal", "windows.db-shm"] {
                    let damaged = directory.join(format!("{name}.damaged"));
                    // Whichever of them are there.
                    let _ = std::fs::rename(directory.join(name), damaged);
                }
                Self::try_open(&path)
            }
            other => other,
        }
    }

    fn try_open(path: &Path) -> std::result::Result<(Self, bool), IndexError> {
        let io = |error| IndexError::Io { path: path.to_owned(), error };
        let sqlite = |error| IndexError::Sqlite { path: path.to_owned(), error };
        // Before SQLite makes it, which would be with a mode others may read; its other files
        // follow this one's.
        let mut make = std::fs::OpenOptions::new();
        let made = make.write(true).create(true).truncate(false).mode(0o600).open(path);
        let inode = made.and_then(|file| file.metadata()).map_err(io)?.ino();
        let connection = Connection::open(path).map_err(sqlite)?;
        // Full: what a commit says is so after a power cut.
        connection
            .execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
            .map_err(sqlite)?;
        let version: i32 =
            connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(sqlite)?;
        if version > VERSION {
            return Err(IndexError::Newer { path: path.to_owned() });
        }
        let missing = match version {
            0 => [SCHEMA, ADDED, PUSHES].concat(),
            1 => [ADDED, PUSHES].concat(),
            2 => PUSHES.to_owned(),
            _ => String::new(),
        };
        connection.execute_batch(&format!("BEGIN; {missing} COMMIT;")).map_err(sqlite)?;
        // Read once, so that damage shows now and not when a window closes.
        let sound: String =
            connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(sqlite)?;
        if sound != "ok" {
            let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
            return Err(sqlite(rusqlite::Error::SqliteFailure(code, Some(sound))));
        }
        Ok((Self { connection, path: path.to_owned(), inode }, version == 0))
    }

    /// The same index for questions alone, which keep nobody else waiting.
    pub(super) fn reader(directory: &Path) -> Result<Self> {
        let path = directory.join(FILE);
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&path, flags)?;
        Ok(Self { connection, path, inode: 0 })
    }

    /// Whether its file is still where it was.
    pub(super) fn is_there(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|found| found.ino() == self.inode)
    }

    /// What is known of a capture. If nobody is known to have begun it, `owner` has, by this
    /// greeting.
    pub(super) fn claim(
        &mut self,
        capture: CaptureId,
        owner: &str,
        hello: &v1::Hello,
    ) -> Result<Before> {
        let begun_ms = integer(hello.clock_realtime_ns / 1_000_000);
        self.connection
            .prepare_cached(
                "INSERT INTO captures (id, owner, next_epoch, next_window, seen_ms, hostname,
                                       collector, kernel, begun_ms)
                 VALUES (?1, ?2, 0, 0, ?3, ?4, ?5, ?6, ?7)
                 ON CONFLICT (id) DO UPDATE SET owner = coalesce(owner, ?2),
                 adopted = CASE WHEN owner IS NULL THEN next_window ELSE adopted END,
                 hostname = ?4, collector = ?5, kernel = ?6, begun_ms = ?7
                 WHERE owner IS NULL OR owner = ?2",
            )?
            .execute(params![
                capture.0,
                owner,
                now_ms(),
                hello.hostname,
                hello.collector_version,
                hello.kernel_release,
                begun_ms
            ])?;
        let sql = "SELECT owner, next_epoch, next_window FROM captures WHERE id = ?1";
        let mut statement = self.connection.prepare_cached(sql)?;
        let known = |row: &Row<'_>| Ok((row.get(0)?, number(row, 1)?, number(row, 2)?));
        let (owner, next_epoch, next_window) = statement.query_row([&capture.0], known)?;
        let sql = "SELECT reason, samples, count FROM lost WHERE capture = ?1";
        let mut statement = self.connection.prepare_cached(sql)?;
        let lost = statement.query_map([&capture.0], |row| {
            let reason = row.get(0)?;
            Ok((reason, v1::Lost { reason, samples: row.get(1)?, count: number(row, 2)? }))
        })?;
        Ok(Before { owner, next_epoch, next_window, lost: lost.collect::<Result<_>>()? })
    }

    /// Whether anything is known of a capture.
    pub(super) fn is_known(&self, capture: CaptureId) -> Result<bool> {
        let sql = "SELECT EXISTS (SELECT 1 FROM captures WHERE id = ?1)";
        self.connection.prepare_cached(sql)?.query_row([&capture.0], |row| row.get(0))
    }

    /// A window that is about to be begun: its log is made after this.
    pub(super) fn begin(&mut self, id: WindowId) -> Result<()> {
        let now = now_ms();
        let transaction = self.connection.transaction()?;
        transaction.execute(
            "INSERT INTO captures (id, next_epoch, next_window, seen_ms) VALUES (?1, 0, ?2, ?3)
             ON CONFLICT (id) DO UPDATE SET next_window = max(next_window, ?2), seen_ms = ?3",
            params![id.capture.0, integer(id.number + 1), now],
        )?;
        transaction.execute(
            "INSERT INTO windows (capture, number, state, bytes, since_ms, interrupted, failures, due_ms)
             VALUES (?1, ?2, ?3, 0, ?4, 0, 0, 0)",
            params![id.capture.0, integer(id.number), State::Open as u8, now],
        )?;
        transaction.commit()
    }

    /// A window whose log is whole, with this many bytes; what its epochs hold, and from when to
    /// when they are.
    pub(super) fn close(
        &mut self,
        id: WindowId,
        bytes: u64,
        tally: &Tally,
        span_ms: Option<(u64, u64)>,
    ) -> Result<()> {
        let (start_ms, end_ms) = span_ms.unwrap_or_default();
        let now = now_ms();
        let transaction = self.connection.transaction()?;
        let changed = transaction.execute(
            "UPDATE windows SET state = ?3, bytes = ?4, since_ms = ?5, start_ms = ?7, end_ms = ?8,
             samples = ?9, lost = ?10, stacks = ?11, whole = ?12, memory = ?13
             WHERE capture = ?1 AND number = ?2 AND state = ?6",
            params![
                id.capture.0,
                integer(id.number),
                State::Closed as u8,
                integer(bytes),
                now,
                State::Open as u8,
                integer(start_ms),
                integer(end_ms),
                integer(tally.samples),
                integer(tally.lost_samples),
                integer(tally.stacks),
                integer(tally.whole),
                integer(tally.memory)
            ],
        )?;
        // Twice closed is once closed.
        if changed > 0 {
            transaction.execute(
                "UPDATE captures SET next_epoch = max(next_epoch, ?2), seen_ms = ?3 WHERE id = ?1",
                params![id.capture.0, integer(tally.next_epoch), now],
            )?;
            for lost in tally.lost.values() {
                transaction.execute(
                    "INSERT INTO lost VALUES (?1, ?2, ?3, ?4)
                     ON CONFLICT (capture, reason)
                     DO UPDATE SET count = min(count, 9223372036854775807 - ?4) + ?4",
                    params![id.capture.0, lost.reason, lost.samples, integer(lost.count)],
                )?;
            }
        }
        transaction.commit()
    }

    /// Windows that were open when a server ended.
    pub(super) fn open_windows(&self) -> Result<Vec<WindowId>> {
        let sql = "SELECT capture, number FROM windows WHERE state = ?1 ORDER BY capture, number";
        let mut statement = self.connection.prepare_cached(sql)?;
        statement.query_map([State::Open as u8], window)?.collect()
    }

    /// Closed windows that may be resolved now, those first that made no trouble.
    pub(super) fn due(&self, most: u32) -> Result<Vec<Due>> {
        let sql = "SELECT capture, number, bytes, interrupted, failures, owner, memory
                   FROM windows LEFT JOIN captures ON id = capture
                   WHERE state = ?1 AND due_ms <= ?2
                   ORDER BY interrupted + failures, since_ms LIMIT ?3";
        let mut statement = self.connection.prepare_cached(sql)?;
        let due = statement.query_map(params![State::Closed as u8, now_ms(), most], |row| {
            Ok(Due {
                id: window(row)?,
                bytes: number(row, 2)?,
                interrupted: row.get(3)?,
                failures: row.get(4)?,
                owner: row.get(5)?,
                memory: number(row, 6)?,
            })
        })?;
        due.collect()
    }

    /// Closed windows, due or not.
    pub(super) fn waiting(&self) -> Result<u64> {
        let sql = "SELECT count(*) FROM windows WHERE state = ?1";
        let mut statement = self.connection.prepare_cached(sql)?;
        statement.query_row([State::Closed as u8], |row| number(row, 0))
    }

    /// How a window came to wait: counts, and for how long.
    pub(super) fn postpone(
        &mut self,
        id: WindowId,
        interrupted: u32,
        failures: u32,
        wait: Duration,
    ) -> Result<()> {
        let due = now_ms().saturating_add(i64::try_from(wait.as_millis()).unwrap_or(i64::MAX));
        let sql = "UPDATE windows SET interrupted = ?3, failures = ?4, due_ms = ?5
                   WHERE capture = ?1 AND number = ?2";
        let values = params![id.capture.0, integer(id.number), interrupted, failures, due];
        self.connection.prepare_cached(sql)?.execute(values).map(|_| ())
    }

    /// A window is done with: `state`, and the profiles it has, with their bytes. `push`: they are
    /// to be pushed; how many are.
    pub(super) fn done(
        &mut self,
        id: WindowId,
        state: State,
        profiles: &[(String, u64)],
        push: bool,
    ) -> Result<u64> {
        let now = now_ms();
        let is_pushed = |(name, _): &&(String, u64)| push && name.ends_with(PPROF);
        let pushes = profiles.iter().filter(is_pushed).count() as u64;
        // One that has nothing to push is where it belongs.
        let state =
            if push && pushes == 0 && state == State::Written { State::Pushed } else { state };
        let transaction = self.connection.transaction()?;
        transaction.execute(
            "UPDATE windows SET state = ?3, since_ms = ?4 WHERE capture = ?1 AND number = ?2",
            params![id.capture.0, integer(id.number), state as u8, now],
        )?;
        for (name, bytes) in profiles {
            transaction.execute(
                "INSERT OR REPLACE INTO profiles VALUES (?1, ?2, ?3)",
                params![name, integer(*bytes), now],
            )?;
        }
        for (name, _) in profiles.iter().filter(is_pushed) {
            // Of a window that is written again, because its index is lost.
            transaction.execute(
                "INSERT OR REPLACE INTO pushes VALUES (?1, ?2, ?3, ?5, 0, 0, 0, ?4, ?4)",
                params![name, id.capture.0, integer(id.number), now, SPLIT],
            )?;
        }
        transaction.commit()?;
        Ok(pushes)
    }

    /// A window is gone, with its log.
    pub(super) fn forget(&mut self, id: WindowId) -> Result<()> {
        let sql = "DELETE FROM windows WHERE capture = ?1 AND number = ?2";
        let values = params![id.capture.0, integer(id.number)];
        self.connection.prepare_cached(sql)?.execute(values).map(|_| ())
    }

    /// Captures not heard of for so long, with no windows left, are forgotten; those that never
    /// brought anything sooner.
    pub(super) fn forget_captures(&mut self, silent: Duration, empty: Duration) -> Result<()> {
        let ago = |time: Duration| {
            now_ms().saturating_sub(i64::try_from(time.as_millis()).unwrap_or(i64::MAX))
        };
        let transaction = self.connection.transaction()?;
        transaction.execute(
            "DELETE FROM captures WHERE (seen_ms < ?1 OR (next_epoch = 0 AND seen_ms < ?2))
             AND NOT EXISTS (SELECT 1 FROM windows WHERE capture = captures.id)",
            [ago(silent), ago(empty)],
        )?;
        transaction.execute(
            "DELETE FROM lost WHERE NOT EXISTS (SELECT 1 FROM captures WHERE id = lost.capture)",
            [],
        )?;
        transaction.commit()
    }

    /// Bytes of the logs of windows that are done with, and of those that are not.
    pub(super) fn log_bytes(&self) -> Result<(u64, u64)> {
        let sql = "SELECT coalesce(sum(bytes) FILTER (WHERE state >= ?1), 0),
                          coalesce(sum(bytes) FILTER (WHERE state < ?1), 0) FROM windows";
        let both = |row: &Row<'_>| Ok((number(row, 0)?, number(row, 1)?));
        self.connection.query_row(sql, [State::Written as u8], both)
    }

    /// Bytes of profiles.
    pub(super) fn profile_bytes(&self) -> Result<u64> {
        let sql = "SELECT coalesce(sum(bytes), 0) FROM profiles";
        self.connection.query_row(sql, [], |row| number(row, 0))
    }

    /// The oldest log of a window that is done with.
    pub(super) fn oldest_log(&self) -> Result<Option<Old<WindowId>>> {
        let mut statement = self.connection.prepare_cached(OLDEST_LOG)?;
        let old = statement.query_row([], |row| {
            Ok(Old { what: window(row)?, bytes: number(row, 2)?, since_ms: number(row, 3)? })
        });
        old.optional()
    }

    /// The oldest profile, by the name of its file.
    pub(super) fn oldest_profile(&self) -> Result<Option<Old<String>>> {
        let sql = "SELECT name, bytes, since_ms FROM profiles ORDER BY since_ms LIMIT 1";
        let mut statement = self.connection.prepare_cached(sql)?;
        let old = statement.query_row([], |row| {
            Ok(Old { what: row.get(0)?, bytes: number(row, 1)?, since_ms: number(row, 2)? })
        });
        old.optional()
    }

    /// A profile is gone.
    pub(super) fn forget_profile(&mut self, name: &str) -> Result<()> {
        let sql = "DELETE FROM profiles WHERE name = ?1";
        self.connection.prepare_cached(sql)?.execute([name]).map(|_| ())
    }
}

/// Milliseconds since the Unix epoch.
pub(super) fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn window(row: &Row<'_>) -> Result<WindowId> {
    Ok(WindowId { capture: CaptureId(row.get(0)?), number: number(row, 1)? })
}

/// SQLite's integers have a sign; none of these numbers needs its last bit.
pub(super) fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(super) fn number(row: &Row<'_>, column: usize) -> Result<u64> {
    Ok(u64::try_from(row.get::<_, i64>(column)?).unwrap_or(0))
}

fn is_damage(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    matches!(error.sqlite_error_code(), Some(DatabaseCorrupt | NotADatabase))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_of_before_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let connection = Connection::open(directory.path().join(FILE)).unwrap();
        connection.execute_batch(SCHEMA).unwrap();
        let rows = "INSERT INTO captures VALUES (zeroblob(16), 'token:a', 3, 1, 7000);
            INSERT INTO windows VALUES (zeroblob(16), 0, 2, 50, 7000, 0, 0, 0);
            PRAGMA user_version = 1;";
        connection.execute_batch(rows).unwrap();
        drop(connection);
        let (mut index, is_new) = Index::open(directory.path()).unwrap();
        assert!(!is_new);
        let before = index.claim(CaptureId([0; 16]), "token:a", &v1::Hello::default()).unwrap();
        assert_eq!((before.next_epoch, before.next_window), (3, 1));
        // When it was written is what is known of its time.
        assert_eq!(index.windows_of(Some("token:a"), 6000, 8000).unwrap().len(), 1);
        drop(index);
        assert!(!Index::open(directory.path()).unwrap().1);
    }

    #[test]
    fn the_oldest_log_is_found_without_a_look_at_the_others() {
        assert_eq!(State::Written as u8, 2, "the number in the schema");
        let directory = tempfile::tempdir().unwrap();
        let (index, _) = Index::open(directory.path()).unwrap();
        let explain = format!("EXPLAIN QUERY PLAN {OLDEST_LOG}");
        let plan = |row: &Row<'_>| row.get::<_, String>(3);
        let mut statement = index.connection.prepare(&explain).unwrap();
        let plan = statement.query_map([], plan).unwrap();
        let plan: Vec<String> = plan.map(|line| line.unwrap()).collect();
        assert_eq!(plan.len(), 1, "nothing is sorted: {plan:?}");
        assert!(plan[0].contains("USING INDEX windows_done"), "{plan:?}");
    }
}
