//! Files opened while the processes that ran them were alive: they may be deleted or out of reach
//! when names are looked for.

use std::collections::HashMap;
use std::io;
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;

use super::file::{self, FileError, Opened, find};
use crate::profile::Executable;
use crate::receive::handed::Handed;

/// Files held open at most, below the usual limit of 1,024 descriptors. Those used least recently
/// are closed first.
const MAX_PINNED: NonZeroUsize = NonZeroUsize::new(512).unwrap();
/// Executables remembered as not to be had.
const MAX_TRIED: NonZeroUsize = NonZeroUsize::new(8192).unwrap();
/// A file not to be had is not asked for again and again.
const MAX_TRIES: u32 = 3;

/// Files held open, of all streams of a server.
#[derive(Debug)]
pub struct Pins(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    files: LruCache<Executable, Opened>,
    tried: LruCache<Executable, u32>,
}

impl Default for Pins {
    fn default() -> Self {
        let (files, tried) = (LruCache::new(MAX_PINNED), LruCache::new(MAX_TRIED));
        Self(Mutex::new(Inner { files, tried }))
    }
}

impl Pins {
    /// Opens the file of `executable` through one of `pids`, unless it is held already; whether it
    /// is held then.
    pub fn pin(&self, executable: &Executable, pids: &[u32]) -> bool {
        let Executable::File { .. } = executable else { return false };
        {
            let mut inner = self.lock();
            if inner.files.get(executable).is_some() {
                return true;
            }
            let tried = inner.tried.get_or_insert_mut(executable.clone(), || 0);
            if *tried >= MAX_TRIES {
                return false;
            }
            *tried += 1;
        }
        // Without the lock: a file system may take its time.
        let Ok(opened) = find(executable, pids) else { return false };
        let mut inner = self.lock();
        inner.tried.pop(executable);
        inner.files.put(executable.clone(), opened);
        true
    }

    /// What is held of these, a second time. What cannot be is left out, and looked for again.
    #[must_use]
    pub fn of(&self, executables: &[Executable]) -> Pinned {
        let inner = self.lock();
        let held = executables.iter().filter_map(|executable| {
            let opened = again(inner.files.peek(executable)?).ok()?;
            Some((executable.clone(), opened))
        });
        Pinned { files: held.collect(), is_elsewhere: false }
    }

    /// A panic elsewhere leaves it whole.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Files held open, of one profile.
#[derive(Debug, Default)]
pub struct Pinned {
    files: HashMap<Executable, Opened>,
    /// Its processes and inodes are of another host: nothing is looked for by them.
    is_elsewhere: bool,
}

impl Pinned {
    /// The same, of a capture of this host or of another.
    #[must_use]
    pub fn of_host(self, is_here: bool) -> Self {
        Self { is_elsewhere: !is_here, ..self }
    }

    /// Opens the file of an executable: as it is held, or as [`file::open`] finds it.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn open(
        &self,
        executable: &Executable,
        pids: &[u32],
        handed: &Handed,
    ) -> Result<Opened, FileError> {
        match self.files.get(executable) {
            Some(opened) => Ok(again(opened)?),
            None if self.is_elsewhere => file::open_elsewhere(executable, handed),
            None => file::open(executable, pids, handed),
        }
    }
}

fn again(opened: &Opened) -> io::Result<Opened> {
    Ok(Opened::of(opened.file.try_clone()?, opened.path.clone()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use stackwire_model::{Device, FileId};

    use super::*;

    #[test]
    fn a_pinned_file_outlives_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("copy");
        std::fs::copy("/proc/self/exe", &path).unwrap();
        let found = std::fs::metadata(&path).unwrap();
        let (major, minor) = (rustix::fs::major(found.dev()), rustix::fs::minor(found.dev()));
        let id = FileId::new(found.ino(), Device { major, minor }).unwrap();
        let path = path.to_str().unwrap().to_owned();
        let executable = Executable::File { path: path.clone(), key: Some(id.into()) };
        let pins = Pins::default();
        assert!(pins.pin(&executable, &[]));
        let pinned = pins.of(std::slice::from_ref(&executable));
        std::fs::remove_file(&path).unwrap();
        assert!(pinned.open(&executable, &[], &Handed::default()).is_ok());
        assert!(Pinned::default().open(&executable, &[], &Handed::default()).is_err());

        // The inodes of another host mean nothing here, even where they fit.
        let there = std::env::current_exe().unwrap();
        let found = std::fs::metadata(&there).unwrap();
        let (major, minor) = (rustix::fs::major(found.dev()), rustix::fs::minor(found.dev()));
        let id = FileId::new(found.ino(), Device { major, minor }).unwrap();
        let path = there.to_str().unwrap().to_owned();
        let executable = Executable::File { path, key: Some(id.into()) };
        let open = |is_here| {
            let pinned = Pinned::default().of_host(is_here);
            pinned.open(&executable, &[], &Handed::default())
        };
        assert!(open(true).is_ok());
        assert!(matches!(open(false), Err(FileError::OtherHost)));
    }
}
