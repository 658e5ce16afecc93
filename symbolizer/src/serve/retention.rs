//! What is removed of what a server keeps: the oldest logs and profiles beyond a size, and those
//! beyond an age. Logs of windows without a profile are never among them.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use super::index::now_ms;
use super::store::{Inner, Keep, Places};

/// A capture that was greeted and brought nothing.
const FORGET_EMPTY: Duration = Duration::from_secs(3600);
/// A collector that is silent for so long starts a new capture if it comes back at all.
const FORGET_CAPTURES: Duration = Duration::from_secs(30 * 24 * 3600);

impl Inner {
    /// Removes what is more than is kept, and what is older.
    pub(super) fn sweep(&mut self, places: &Places) {
        if let Err(error) = self.sweep_logs(places).and_then(|()| self.sweep_profiles(places)) {
            tracing::warn!("cannot use the index of windows: {error}");
        }
    }

    /// Forgets captures that are over. It looks at all of them, so it is not for each window.
    pub(super) fn forget_captures(&mut self) {
        if let Err(error) = self.index.forget_captures(FORGET_CAPTURES, FORGET_EMPTY) {
            tracing::warn!("cannot use the index of windows: {error}");
        }
    }

    fn sweep_logs(&mut self, places: &Places) -> rusqlite::Result<()> {
        while let Some(old) = self.index.oldest_log()? {
            if !is_over(&places.keep_logs, self.done, old.since_ms)
                || !is_removed(&old.what.log(&places.logs))
            {
                break;
            }
            self.index.forget(old.what)?;
            self.done = self.done.saturating_sub(old.bytes);
        }
        Ok(())
    }

    fn sweep_profiles(&mut self, places: &Places) -> rusqlite::Result<()> {
        while let Some(old) = self.index.oldest_profile()? {
            if !is_over(&places.keep_profiles, self.profiles, old.since_ms)
                || !is_removed(&places.profiles.join(&old.what))
            {
                break;
            }
            self.index.forget_profile(&old.what)?;
            self.profiles = self.profiles.saturating_sub(old.bytes);
        }
        Ok(())
    }
}

fn is_over(keep: &Keep, bytes: u64, since_ms: u64) -> bool {
    let age = u64::try_from(now_ms()).unwrap_or(0).saturating_sub(since_ms);
    bytes > keep.bytes || keep.age.is_some_and(|most| u128::from(age) > most.as_millis())
}

/// Whether a file is gone, now or before.
fn is_removed(path: &Path) -> bool {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("cannot remove {}: {error}", path.display());
            false
        }
        _ => true,
    }
}
