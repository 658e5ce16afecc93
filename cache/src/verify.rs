//! Bringing files and index together: after a lost index, after kills, and when asked to.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FlockOperation, flock};

use crate::look::Look;
use crate::{Cache, CacheError, Key, Known};

/// What a look at all blobs found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Whole blobs.
    pub good: u64,
    /// Blobs whose content is not what was written; they are removed.
    pub damaged: Vec<Key>,
    /// Files that had no row, rows that had no file: left by a kill, put right.
    pub repaired: u64,
}

/// Where blobs lie.
const DIRECTORIES: [&str; 4] = [".build-id", "tables", "handed-over", "blobs"];

impl Cache {
    /// Reads every blob and compares it with its checksum.
    ///
    /// # Errors
    /// See [`CacheError`].
    pub fn verify(&self) -> Result<Verified, CacheError> {
        let mut found = Verified { repaired: self.take_in_files()?, ..Verified::default() };
        for row in self.rows()? {
            // Not by what is known of it.
            match self.look(&row.key, &Known::default())? {
                Look::Whole(_) => found.good += 1,
                Look::Damaged => found.damaged.push(row.key),
                Look::NotThere => found.repaired += 1,
            }
        }
        Ok(found)
    }

    /// Adds rows for files that have none; how many.
    pub(crate) fn take_in_files(&self) -> Result<u64, CacheError> {
        let mut taken = 0;
        for directory in DIRECTORIES {
            let names = |path: &std::path::Path| {
                let entries = fs::read_dir(path).into_iter().flatten().flatten();
                entries.filter_map(|entry| entry.file_name().into_string().ok()).collect::<Vec<_>>()
            };
            let top = self.directory.join(directory);
            for first in names(&top) {
                for name in names(&top.join(&first)) {
                    let Some(key) = Key::of_path(directory, &first, &name) else { continue };
                    if self.index().row(&key)?.is_some() {
                        continue;
                    }
                    // One that cannot be read is no reason to do without all others.
                    if matches!(self.look(&key, &self.read), Ok(Look::Whole(_))) {
                        taken += 1;
                    }
                }
            }
        }
        Ok(taken)
    }

    /// Removes temporary files whose writers are gone: nobody holds their lock.
    pub(crate) fn sweep(&self) {
        for entry in fs::read_dir(self.scratch()).into_iter().flatten().flatten() {
            let Ok(file) = File::open(entry.path()) else { continue };
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                continue;
            }
            // Between its creation and its lock a file is nobody's; that takes microseconds.
            let age = file.metadata().ok().and_then(|found| {
                let now =
                    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?;
                Some(now.as_secs().saturating_sub(found.mtime() as u64))
            });
            if age.is_some_and(|seconds| seconds > 5) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}
