//! The content-addressed store: executables, debug files and compiled tables by build-id, and what
//! is known to be missing. Knows no ELF, no HTTP and no symbols. What collectors handed over is
//! kept apart: whoever hands a file over chooses its build-id.
//!
//! # On disk
//!
//! ```text
//! DIR/                       0700, ours alone
//!   .build-id/NN/REST        an executable          gdb, perf and blazesym read
//!   .build-id/NN/REST.debug  its debug file         these two as they are
//!   tables/NN/REST.vN        a compiled table of format N
//!   handed-over/NN/REST      an executable that a collector handed over, by its content and whose
//!   handed-over/NN/REST.vN   its table
//!   blobs/NN/REST            anything else, by SHA-256 or boot id
//!   index.db                 SQLite: sizes, checksums, last use, what is missing
//!   tmp/, locks/             being written; one fetch or conversion a key
//! ```
//!
//! # What holds
//!
//! - A blob is renamed into its place once it is whole and on disk, in one transaction with its
//!   row. A process may be killed at any instruction: the store still holds each blob whole or not
//!   at all. A file without a row gets one when it is met; a row without a file is forgotten.
//! - The index remembers the files. When it is lost or damaged, it is made again from them.
//! - Every blob is checked against its checksum when a process opens it first, and again when its
//!   file has changed since; one that differs is removed.
//! - [`Cache::lock`] gives a key to one task of one process at a time.
//! - When a blob is not here, a [`Tier`] behind the store is asked for it, once for all callers.
//! - When there is more than the limit, the least recently used blobs are removed first.
//!
//! # Versions of the index
//!
//! - 1: the first.

mod blob;
mod index;
mod key;
mod lock;
mod look;
mod stamp;
#[cfg(test)]
mod tests;
mod tier;
mod verify;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use self::blob::{Blob, Meta, Pending};
pub use self::index::{Negative, Row};
pub use self::key::{BadId, Id, Key, Kind};
pub use self::lock::Lock;
use self::look::Look;
pub use self::stamp::{Known, Stamp};
pub use self::tier::{Absent, Tier};
pub use self::verify::Verified;

/// The store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The file system.
    #[error("{path}: {error}")]
    File {
        /// What it was about.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// It cannot be made, or someone else could put symbols into it.
    #[error("{0}; name a directory of your own with --symbol-cache-dir")]
    Directory(#[from] stackwire_rights::directory::Refused),
    /// The index.
    #[error("the index of the symbol cache: {0}")]
    Index(#[from] rusqlite::Error),
    /// A newer program's.
    #[error("{0} is of a newer Stackwire; name another directory with --symbol-cache-dir")]
    Newer(PathBuf),
}

/// An opened store. Shared by threads; other processes may have the same directory open.
#[derive(Debug)]
pub struct Cache {
    directory: PathBuf,
    max_bytes: u64,
    index: Mutex<index::Index>,
    /// Sizes and checksums of files that were read.
    read: Known<(u64, u64)>,
}

/// What is in a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blobs.
    pub blobs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Keys known to be missing.
    pub missing: u64,
    /// Keys known to be malformed.
    pub malformed: u64,
}

impl Cache {
    /// Opens a store, or makes one.
    ///
    /// # Errors
    /// See [`CacheError`].
    pub fn open(directory: &Path, max_bytes: u64) -> Result<Self, CacheError> {
        stackwire_rights::directory::make(directory)?;
        for below in ["tmp", "locks"] {
            stackwire_rights::directory::make(&directory.join(below))?;
        }
        let index = index::Index::open(directory)?;
        let (directory, index) = (directory.to_owned(), Mutex::new(index));
        let cache = Self { directory, max_bytes, index, read: Known::default() };
        if cache.index().is_new() {
            cache.take_in_files()?;
        }
        cache.sweep();
        Ok(cache)
    }

    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// How much it may hold.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// A directory for temporary files, swept when their writers are gone.
    #[must_use]
    pub fn scratch(&self) -> PathBuf {
        self.directory.join("tmp")
    }

    /// A blob, if it is there and whole. Counts as a use.
    ///
    /// # Errors
    /// When the index cannot be used. For a damaged blob the result is `None`, not an error.
    pub fn get(&self, key: &Key) -> Result<Option<Blob>, CacheError> {
        match self.look(key, &self.read)? {
            Look::Whole(blob) => {
                self.index().touch(key)?;
                Ok(Some(blob))
            }
            Look::Damaged | Look::NotThere => Ok(None),
        }
    }

    /// Bytes of a blob, if it is there. Its content is not looked at: [`Cache::get`] does that.
    #[must_use]
    pub fn size(&self, key: &Key) -> Option<u64> {
        fs::metadata(key.path(&self.directory)).ok().map(|found| found.len())
    }

    /// Begins a blob; it is in the store once [`Pending::keep`] has returned.
    ///
    /// # Errors
    /// When no temporary file can be made.
    pub fn begin(&self) -> Result<Pending<'_>, CacheError> {
        Pending::new(self)
    }

    /// Adds a blob at once.
    ///
    /// # Errors
    /// See [`CacheError`].
    pub fn put(&self, key: &Key, bytes: &[u8], meta: Meta) -> Result<Blob, CacheError> {
        let mut pending = self.begin()?;
        let written = io::Write::write_all(&mut pending, bytes);
        written.map_err(|error| CacheError::File { path: self.scratch(), error })?;
        pending.keep(key, meta)
    }

    /// What is known about a key that has no blob.
    ///
    /// # Errors
    /// When the index cannot be used.
    pub fn negative(&self, key: &Key) -> Result<Option<Negative>, CacheError> {
        Ok(self.index().negative(key)?)
    }

    /// Remembers for a while that a key has no blob.
    ///
    /// # Errors
    /// When the index cannot be used.
    pub fn put_negative(
        &self,
        key: &Key,
        negative: &Negative,
        lifetime: Duration,
    ) -> Result<(), CacheError> {
        Ok(self.index().put_negative(key, negative, lifetime)?)
    }

    /// Gives the key to one task of one process alone. `None` when another task had it for longer
    /// than `patience`.
    ///
    /// # Errors
    /// When the lock cannot be made.
    pub fn lock(&self, key: &Key, patience: Duration) -> Result<Option<Lock>, CacheError> {
        Lock::take(&self.directory, key, patience)
            .map_err(|error| CacheError::File { path: self.directory.join("locks"), error })
    }

    /// Removes a blob and what is known of it; whether there was one.
    ///
    /// # Errors
    /// See [`CacheError`].
    pub fn remove(&self, key: &Key) -> Result<bool, CacheError> {
        let path = key.path(&self.directory);
        self.index().change(|index| {
            let removed = match fs::remove_file(&path) {
                Ok(()) => true,
                Err(error) if error.kind() == io::ErrorKind::NotFound => false,
                Err(error) => return Err(CacheError::File { path: path.clone(), error }),
            };
            index.forget(key)?;
            Ok(removed)
        })
    }

    /// Forgets that anything of an id is missing or malformed; whether something was.
    ///
    /// # Errors
    /// When the index cannot be used.
    pub fn forget_negatives(&self, id: &Id) -> Result<bool, CacheError> {
        Ok(self.index().forget_negatives(id)?)
    }

    /// Removes the least recently used until at most `max_bytes` are left; returns what was
    /// removed.
    ///
    /// # Errors
    /// See [`CacheError`].
    pub fn prune(&self, max_bytes: u64) -> Result<Vec<Row>, CacheError> {
        let mut removed = Vec::new();
        let (mut bytes, rows) = {
            let index = self.index();
            (
                index.stats()?.bytes,
                if index.stats()?.bytes > max_bytes { index.rows()? } else { Vec::new() },
            )
        };
        for row in rows {
            if bytes <= max_bytes {
                break;
            }
            self.remove(&row.key)?;
            bytes -= row.size.min(bytes);
            removed.push(row);
        }
        Ok(removed)
    }

    /// All blobs, least recently used first.
    ///
    /// # Errors
    /// When the index cannot be used.
    pub fn rows(&self) -> Result<Vec<Row>, CacheError> {
        Ok(self.index().rows()?)
    }

    /// Counts.
    ///
    /// # Errors
    /// When the index cannot be used.
    pub fn stats(&self) -> Result<Stats, CacheError> {
        Ok(self.index().stats()?)
    }

    fn index(&self) -> MutexGuard<'_, index::Index> {
        // What a panicking thread left is a finished statement or a rolled back one.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
