//! Which profiles are still to be pushed, and how much of each was. In the index, so that a restart
//! goes on.
//!
//! Called by `push.rs`. What was to be pushed by a server that pushed is forgotten by one that does
//! not.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use rusqlite::{OptionalExtension, Row, params};
use stackwire_formats::pprof::SPLIT;

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
    /// How often a server has ended while it pushed it.
    pub interrupted: u32,
    /// How often it failed since a piece was taken.
    pub failures: u32,
    /// When it was written.
    pub since_ms: i64,
}

impl Index {
    /// The one that waits longest of those that may be pushed now. It may not be again for a while.
    fn take_push(&mut self) -> Result<Option<ToPush>> {
        // Pieces of another version are others: it begins anew.
        let sql = "SELECT pushes.capture, pushes.number, name, coalesce(hostname, ''),
                          iif(split = ?2, sent, 0), failures, since_ms, interrupted
                   FROM pushes LEFT JOIN captures ON id = pushes.capture
                   WHERE due_ms <= ?1 ORDER BY due_ms LIMIT 1";
        let mut statement = self.connection.prepare_cached(sql)?;
        let found = statement.query_row(params![now_ms(), SPLIT], |row: &Row<'_>| {
            Ok(ToPush {
                window: window(row)?,
                name: row.get(2)?,
                hostname: row.get(3)?,
                sent: number(row, 4)?,
                failures: row.get(5)?,
                since_ms: row.get(6)?,
                interrupted: row.get(7)?,
            })
        });
        let Some(due) = found.optional()? else { return Ok(None) };
        let wait = wait_after(due.failures.saturating_add(due.interrupted));
        self.push_after(&due, due.interrupted.saturating_add(1), due.failures, wait)?;
        Ok(Some(due))
    }

    fn push_after(
        &self,
        due: &ToPush,
        interrupted: u32,
        failures: u32,
        wait: Duration,
    ) -> Result<()> {
        let wait = i64::try_from(wait.as_millis()).unwrap_or(i64::MAX);
        let sql = "UPDATE pushes SET interrupted = ?2, failures = ?3, due_ms = ?4, sent = ?5,
                   split = ?6 WHERE name = ?1";
        let due_ms = now_ms().saturating_add(wait);
        let values = params![due.name, interrupted, failures, due_ms, integer(due.sent), SPLIT];
        self.connection.prepare_cached(sql)?.execute(values).map(|_| ())
    }

    /// How many wait. Looks at all of them.
    pub(super) fn pushes(&self) -> Result<u64> {
        let mut statement = self.connection.prepare_cached("SELECT count(*) FROM pushes")?;
        statement.query_row([], |row| number(row, 0))
    }

    fn piece_is_sent(&self, due: &ToPush) -> Result<()> {
        let sql = "UPDATE pushes SET sent = ?2, split = ?3, failures = 0, interrupted = 1
                   WHERE name = ?1";
        let values = params![due.name, integer(due.sent), SPLIT];
        self.connection.prepare_cached(sql)?.execute(values).map(|_| ())
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
                Err(error) => {
                    self.warn("cannot push", &error.into());
                    if inner.stopping {
                        return None;
                    }
                }
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
    pub(super) fn piece_is_sent(&self, due: &ToPush) -> Result<()> {
        self.lock().index.piece_is_sent(due)
    }

    /// It is tried again after this time.
    pub(super) fn push_later(&self, due: &ToPush, pause: Option<Duration>) -> Duration {
        let wait = pause.unwrap_or_else(|| wait_after(due.failures));
        let failures = due.failures.saturating_add(1);
        self.tell(|index| index.push_after(due, 0, failures, wait));
        wait
    }

    /// Some of it will not be taken.
    pub(super) fn push_is_refused(&self, due: &ToPush) {
        self.tell(|index| index.push_is_refused(due.window));
    }

    /// All of it was taken or refused.
    pub(super) fn push_is_over(&self, due: &ToPush) {
        if self.tell(|index| index.push_is_over(&due.name, due.window)) {
            let mut inner = self.lock();
            inner.pushes = inner.pushes.saturating_sub(1);
        }
    }

    /// Whether it could be told.
    fn tell(&self, what: impl FnOnce(&mut Index) -> Result<()>) -> bool {
        let told = what(&mut self.lock().index);
        told.inspect_err(|error| tracing::warn!("cannot use the index of windows: {error}")).is_ok()
    }
}
