//! Closed windows, until their profiles are written: which is next, what becomes of one that failed
//! or that ended the server.
//!
//! The index knows all of it before it happens, so that the next server goes on. Called by
//! `closing.rs`.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::index::{Due, State};
use super::store::{Inner, Store};

/// How often a window, or a push of its profiles, may end the server before it is given up.
pub(super) const MAX_INTERRUPTED: u32 = 8;
/// How long a window that failed waits: a second, then twice as long each time, up to this.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// How often what is old is looked for.
const SWEEP: Duration = Duration::from_secs(60);

impl Store {
    /// Waits for a window whose profile is to be written. `None` when the server stops.
    pub(super) fn next_due(&self) -> Option<Due> {
        loop {
            let mut inner = self.lock();
            if inner.stopping {
                return None;
            }
            match inner.take_due() {
                Ok(Some(due)) => return Some(due),
                Ok(None) => {}
                Err(error) => tracing::warn!("cannot use the index of windows: {error}"),
            }
            if inner.swept.elapsed() >= SWEEP {
                inner.swept = Instant::now();
                inner.sweep(&self.places);
                inner.forget_captures();
            }
            if !inner.orphans.is_empty() || !inner.unclosed.is_empty() {
                drop(inner);
                if self.close_one() {
                    continue;
                }
                inner = self.lock();
            }
            // Windows that failed become due without anybody saying so.
            let _ = self.changed.wait_timeout(inner, Duration::from_millis(500));
        }
    }

    /// The profiles of a window are written, or it is not worth trying again.
    pub(super) fn done(&self, due: &Due, state: State, profiles: &[(String, u64)]) {
        let mut inner = match self.usable() {
            Ok(inner) => inner,
            Err(error) => {
                self.lock().working.remove(&due.id);
                return tracing::warn!("window {}: {error}; it is written again", due.id);
            }
        };
        inner.working.remove(&due.id);
        match inner.index.done(due.id, state, profiles, self.places.is_pushing) {
            Ok(pushes) => inner.pushes += pushes,
            Err(error) => {
                return tracing::warn!("window {}: {error}; it is written again", due.id);
            }
        }
        inner.waiting = inner.waiting.saturating_sub(due.bytes);
        inner.done += due.bytes;
        inner.profiles += profiles.iter().map(|(_, bytes)| bytes).sum::<u64>();
        inner.sweep(&self.places);
        drop(inner);
        self.changed.notify_all();
        self.written.notify_one();
    }

    /// The profile of a window could not be written: it is tried again later.
    pub(super) fn failed(&self, due: &Due) -> Duration {
        let wait = wait_after(due.failures);
        let mut inner = self.lock();
        inner.working.remove(&due.id);
        let failures = due.failures.saturating_add(1);
        if let Err(error) = inner.index.postpone(due.id, due.interrupted, failures, wait) {
            tracing::warn!("cannot use the index of windows: {error}");
        }
        drop(inner);
        self.changed.notify_all();
        wait
    }

    /// Waits until all that is due is done, but not for longer than `most`. Then no window is begun
    /// any more. How many are left.
    pub(super) fn drain(&self, most: Duration) -> u64 {
        let deadline = Instant::now() + most;
        let mut inner = self.lock();
        loop {
            let due = inner.index.due(1 + inner.working.len() as u32);
            let idle = inner.working.is_empty()
                && inner.orphans.is_empty()
                && inner.unclosed.is_empty()
                && due.is_ok_and(|due| due.is_empty());
            let left = deadline.saturating_duration_since(Instant::now());
            if idle || left.is_zero() {
                break;
            }
            let wait = left.min(Duration::from_millis(100));
            inner =
                self.changed.wait_timeout(inner, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.stopping = true;
        // Those that are worked on are not to blame for the end of this server.
        for due in std::mem::take(&mut inner.working).into_values() {
            let none = Duration::ZERO;
            let _ = inner.index.postpone(due.id, due.interrupted, due.failures, none);
        }
        let left = inner.index.waiting().unwrap_or(0);
        drop(inner);
        self.changed.notify_all();
        self.written.notify_one();
        left
    }
}

impl Inner {
    /// A window to work on. The index is told before: if it ends the server, the next one knows.
    pub(super) fn take_due(&mut self) -> rusqlite::Result<Option<Due>> {
        let due = self.index.due(1 + self.working.len() as u32)?;
        let Some(due) = due.into_iter().find(|due| !self.working.contains_key(&due.id)) else {
            return Ok(None);
        };
        if due.interrupted >= MAX_INTERRUPTED {
            tracing::warn!(
                "window {} ended the server {} times while it was resolved: it is kept without a profile",
                due.id,
                due.interrupted
            );
            self.index.done(due.id, State::GivenUp, &[], false)?;
            self.waiting = self.waiting.saturating_sub(due.bytes);
            self.done += due.bytes;
            return Ok(None);
        }
        let wait = if due.interrupted > 0 { wait_after(due.interrupted) } else { Duration::ZERO };
        self.index.postpone(due.id, due.interrupted + 1, due.failures, wait)?;
        self.working.insert(due.id, due.clone());
        Ok(Some(due))
    }
}

/// How long one waits that failed so often.
pub(super) fn wait_after(times: u32) -> Duration {
    LONGEST_WAIT.min(Duration::from_secs(1u64 << times.min(20)))
}
