//! What is made of files, made again when they change: certificates and tokens are renewed while a
//! server runs.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Files as they were when they were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Files {
    paths: Vec<PathBuf>,
    found: Vec<Option<Found>>,
}

/// What tells a file from what it was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    device: u64,
    inode: u64,
    length: u64,
    /// Seconds and nanoseconds.
    changed: (i64, i64),
}

impl Files {
    /// As they are now.
    pub(super) fn new(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let paths: Vec<PathBuf> = paths.into_iter().collect();
        let found = paths.iter().map(|path| {
            let found = fs::metadata(path).ok()?;
            Some(Found {
                device: found.dev(),
                inode: found.ino(),
                length: found.len(),
                changed: (found.ctime(), found.ctime_nsec()),
            })
        });
        Self { found: found.collect(), paths }
    }
}

/// What was made of files last.
#[derive(Debug)]
pub(super) struct Watched<T> {
    files: Files,
    made: T,
}

impl<T> Watched<T> {
    /// Makes it.
    ///
    /// # Errors
    /// Those of `make`.
    pub(super) fn new(
        files: Files,
        make: impl FnOnce(&[PathBuf]) -> io::Result<T>,
    ) -> io::Result<Self> {
        let made = make(&files.paths)?;
        Ok(Self { files, made })
    }

    /// What there is now. Where it cannot be made anew, what there was.
    pub(super) fn now(&mut self, make: impl FnOnce(&[PathBuf]) -> io::Result<T>) -> &T {
        let files = Files::new(self.files.paths.iter().cloned());
        if files != self.files {
            match make(&files.paths) {
                Ok(made) => self.made = made,
                Err(error) => tracing::warn!("{error}: what was read before stays in force"),
            }
            self.files = files;
        }
        &self.made
    }
}
