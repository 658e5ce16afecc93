//! Which profiles are still to be pushed, and how much of each was. In the index, so that a restart
//! goes on.
//!
//! Called by `push.rs`. What was to be pushed by a server that pushed is forgotten by one that does
//! not.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use rusqlite::{OptionalExtension, Row, params};

use super::id::WindowId;
use super::index::{Index, Result, State, integer, now_ms, number, window};
use super::queue::wait_after;
use super::store::Store;

/// A profile to push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ToPush {
    /// Of its file.
    pub name: String,
    pub window: WindowId,
    /// Of the capture.
    pub hostname: String,
    /// Pieces that were taken or refused.
    pub sent: u64,
    /// How often it failed.
    pub failures: u32,
    /// When it was written.
    pub since_ms: i64,
}

impl Index {
    /// The one that waits longest of those that may be pushed now. It may not be again for a while.
    fn take_push(&mut self) -> Result<Option<ToPush>> {
        let sql = "SELECT pushes.capture, pushes.number, name, coalesce(hostname, ''), sent,
                          failures, since_ms
                   FROM pushes LEFT JOIN captures ON id = pushes.capture
                   WHERE due_ms <= ?1 ORDER BY due_ms LIMIT 1";
        let mut statement = self.connection.prepare_cached(sql)?;
        let found = statement.query_row([now_ms()], |row: &Row<'_>| {
            Ok(ToPush {
                window: window(row)?,
                name: row.get(2)?,
                hostname: row.get(3)?,
                sent: number(row, 4)?,
                failures: row.get(5)?,
                since_ms: row.get(6)?,
            })
        });
        let Some(due) = found.optional()? else { return Ok(None) };
        self.push_after(&due, wait_after(due.failures))?;
        Ok(Some(due))
    }

    fn push_after(&self, due: &ToPush, wait: Duration) -> Result<()> {
        let wait = i64::try_from(wait.as_millis()).unwrap_or(i64::MAX);
        let sql = "UPDATE pushes SET failures = ?2, due_ms = ?3 WHERE name = ?1";
        let failures = due.failures.saturating_add(1);
        let values = params![due.name, failures, now_ms().saturating_add(wait)];
        self.connection.prepare_cached(sql)?.execute(values).map(|_| ())
    }

    /// How many wait.
    pub(super) fn pushes(&self) -> Result<u64> {
        let mut statement = self.connection.prepare_cached("SELECT count(*) FROM pushes")?;
        statement.query_row([], |row| number(row, 0))
    }

    fn piece_is_sent(&self, name: &str, pieces: u64) -> Result<()> {
        let sql = "UPDATE pushes SET sent = ?2, failures = 0 WHERE name = ?1";
        self.connection.prepare_cached(sql)?.execute(params![name, integer(pieces)]).map(|_| ())
    }

    fn push_is_refused(&self, id: WindowId) -> Result<()> {
        let sql = "UPDATE windows SET state = ?3 WHERE capture = ?1 AND number = ?2";
        let values = params![id.capture.0, integer(id.number), State::NotPushed as u8];
        self.connection.prepare_cached(sql)?.execute(values).map(|_| ())
    }

    /// A window is pushed when all its profiles are.
    fn push_is_over(&mut self, name: &str, id: WindowId) -> Result<()> {
        let transaction = self.connection.transaction()?;
        transaction.execute("DELETE FROM pushes WHERE name = ?1", [name])?;
        transaction.execute(
            "UPDATE windows SET state = ?3 WHERE capture = ?1 AND number = ?2 AND state = ?4
             AND NOT EXISTS (SELECT 1 FROM pushes WHERE capture = ?1 AND number = ?2)",
            params![id.capture.0, integer(id.number), State::Pushed as u8, State::Written as u8],
        )?;
        transaction.commit()
    }

    /// Nothing is pushed any more.
    pub(super) fn forget_pushes(&self) -> Result<()> {
        self.connection.execute("DELETE FROM pushes", []).map(|_| ())
    }
}

impl Store {
    /// Waits for a profile to push. `None` when the server stops and none is due.
    ///
    /// The index is told before: an index that cannot be written would have pieces sent again and
    /// again, and a profile that ends the server is not tried at once by the next.
    pub(super) fn next_push(&self) -> Option<ToPush> {
        let mut inner = self.lock();
        loop {
            let is_paused = inner.no_push_before.is_some_and(|until| Instant::now() < until);
            let found = if is_paused { Ok(None) } else { inner.index.take_push() };
            match found {
                Ok(Some(due)) => return Some(due),
                Ok(None) if inner.stopping => return None,
                Ok(None) => {}
                Err(error) => tracing::warn!("cannot use the index of windows: {error}"),
            }
            // What failed becomes due without anybody saying so.
            let woken = self.written.wait_timeout(inner, Duration::from_millis(500));
            inner = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// No profile is pushed for so long.
    pub(super) fn pause_pushes(&self, wait: Duration) {
        self.lock().no_push_before = Some(Instant::now() + wait);
    }

    /// So much of it was taken or refused.
    ///
    /// # Errors
    /// When the index cannot be written: those pieces would be sent again.
    pub(super) fn piece_is_sent(&self, due: &ToPush, pieces: u64) -> Result<()> {
        self.lock().index.piece_is_sent(&due.name, pieces)
    }

    /// It is tried again after this time.
    pub(super) fn push_later(&self, due: &ToPush, pause: Option<Duration>) -> Duration {
        let wait = pause.unwrap_or_else(|| wait_after(due.failures));
        self.tell(|index| index.push_after(due, wait));
        wait
    }

    /// Some of it will not be taken.
    pub(super) fn push_is_refused(&self, due: &ToPush) {
        self.tell(|index| index.push_is_refused(due.window));
    }

    /// All of it was taken or refused.
    pub(super) fn push_is_over(&self, due: &ToPush) {
        self.tell(|index| index.push_is_over(&due.name, due.window));
    }

    fn tell(&self, what: impl FnOnce(&mut Index) -> Result<()>) {
        if let Err(error) = what(&mut self.lock().index) {
            tracing::warn!("cannot use the index of windows: {error}");
        }
    }
}
