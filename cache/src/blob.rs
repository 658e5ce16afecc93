//! Blobs: written aside, moved into place when whole, read with their checksum.

use std::collections::hash_map::RandomState;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::BuildHasher;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use xxhash_rust::xxh3::Xxh3;

use crate::{Cache, CacheError, Key};

/// What is kept about a blob besides its content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// How good it is; the user's own scale, higher is better.
    pub quality: u8,
    /// Where it came from: a path, a URL.
    pub origin: String,
}

/// A blob that is there.
#[derive(Debug)]
pub struct Blob {
    /// Its content, opened for reading. Stays readable when the blob is evicted.
    pub file: File,
    /// Where it lies.
    pub path: PathBuf,
    /// What is known of it.
    pub meta: Meta,
}

/// A blob being written. Dropped before [`Pending::keep`], it leaves nothing.
pub struct Pending<'c> {
    cache: &'c Cache,
    file: File,
    path: PathBuf,
    hasher: Box<Xxh3>,
    size: u64,
}

impl<'c> Pending<'c> {
    pub(crate) fn new(cache: &'c Cache) -> Result<Self, CacheError> {
        // Process ids repeat, in other pid namespaces at the same time: the name is random, and
        // new.
        let number = RandomState::new().hash_one(std::process::id());
        let path = cache.scratch().join(format!("{number:016x}"));
        let failed = |error| CacheError::File { path: path.clone(), error };
        let mut open = OpenOptions::new();
        open.read(true).write(true).create_new(true).mode(0o600);
        let file = open.open(&path).map_err(failed)?;
        // Held until it is moved or we die: how a sweep knows that it is in use.
        flock(&file, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
        Ok(Self { cache, file, path, hasher: Box::new(Xxh3::new()), size: 0 })
    }

    /// Bytes written so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.size
    }

    /// What was written so far, for a look before it is kept.
    ///
    /// # Errors
    /// When the file cannot be opened again.
    pub fn reader(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// Moves it into its place, where it replaces what was there, and makes room if there is too
    /// little.
    ///
    /// # Errors
    /// See [`CacheError`].
    pub fn keep(mut self, key: &Key, meta: Meta) -> Result<Blob, CacheError> {
        let path = key.path(&self.cache.directory);
        let failed = |error| CacheError::File { path: path.clone(), error };
        self.file.sync_all().map_err(failed)?;
        let parent = path.parent().unwrap_or(Path::new("."));
        if !parent.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(failed)?;
            // Or all of it is gone after a power cut.
            let above = parent.ancestors().skip(1);
            for directory in above.take_while(|it| it.starts_with(&self.cache.directory)) {
                sync(directory).map_err(failed)?;
            }
        }
        let checksum = self.hasher.digest();
        let found = (self.size, checksum);
        // Killed between rename and commit, the row of another blob would condemn this one.
        if self.cache.index().row(key)?.is_some_and(|row| (row.size, row.checksum) != found) {
            self.cache.remove(key)?;
        }
        self.cache.index().change(|index| {
            index.insert(key, found, &meta)?;
            fs::rename(&self.path, &path).map_err(failed)?;
            sync(parent).map_err(failed)
        })?;
        self.path.clear();
        let file = self.file.try_clone().map_err(failed)?;
        // Beyond the limit the blob itself may go at once; it is open, and serves this time. What
        // cannot be removed now will be next time.
        let _ = self.cache.prune(self.cache.max_bytes);
        Ok(Blob { file, path, meta })
    }
}

impl std::fmt::Debug for Pending<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("path", &self.path).field("size", &self.size).finish()
    }
}

impl Write for Pending<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Size and checksum of a file.
pub(crate) fn checksum(file: &File) -> io::Result<(u64, u64)> {
    let mut hasher = Xxh3::new();
    let mut buffer = vec![0; 1 << 18];
    let mut size = 0;
    loop {
        let read = file.read_at(&mut buffer, size)?;
        if read == 0 {
            return Ok((size, hasher.digest()));
        }
        hasher.update(&buffer[..read]);
        size += read as u64;
    }
}
