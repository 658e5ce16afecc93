//! What a file was when it was read: one with the same stamp has the same content, and need not be
//! read again. A server opens the same tables for each window it resolves.

use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Device, inode, size and the time of the last change of either content or inode, of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

/// Time between changes that a file system may not tell apart.
const TICK: Duration = Duration::from_secs(2);

impl Stamp {
    /// Of a file; `None` of one that has just been changed: if it is again, nobody could tell.
    #[must_use]
    pub fn of(metadata: &Metadata) -> Option<Self> {
        let changed = (metadata.ctime(), metadata.ctime_nsec());
        let seconds = u64::try_from(changed.0).ok()?;
        let at = UNIX_EPOCH + Duration::new(seconds, u32::try_from(changed.1).ok()?);
        // A time to come says nothing, either.
        let age = SystemTime::now().duration_since(at).ok()?;
        let (device, inode, size) = (metadata.dev(), metadata.ino(), metadata.size());
        (age > TICK).then_some(Self { device, inode, size, changed })
    }
}

/// What was found out about files, by their stamps.
#[derive(Debug)]
pub struct Known<T>(Mutex<HashMap<Stamp, T>>);

/// Files that are remembered; then all are forgotten.
const MOST: usize = 4096;

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Copy> Known<T> {
    /// What is known of a file.
    #[must_use]
    pub fn get(&self, stamp: Option<Stamp>) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&stamp?).copied()
    }

    /// Remembers it. `stamp` is from before the file was read.
    pub fn put(&self, stamp: Option<Stamp>, found: T) {
        let Some(stamp) = stamp else { return };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(stamp, found);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_that_is_changed_has_another_stamp() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"first").unwrap();
        let stamp = |file: &tempfile::NamedTempFile| Stamp::of(&file.path().metadata().unwrap());
        assert_eq!(stamp(&file), None, "it has just been changed");
        std::thread::sleep(TICK + Duration::from_millis(100));
        let before = stamp(&file);
        assert!(before.is_some());
        let known = Known::default();
        known.put(before, 5);
        assert_eq!((known.get(before), known.get(None)), (Some(5), None));
        // Whoever sets a time back changes the inode now.
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(file.path(), mode).unwrap();
        let then = SystemTime::now() - Duration::from_secs(3600);
        file.as_file().set_modified(then).unwrap();
        assert_eq!(stamp(&file), None);
        (0..2 * MOST as i64).for_each(|second| {
            known.put(before.map(|it| Stamp { changed: (second, 0), ..it }), 1);
        });
        assert!(known.0.lock().unwrap().len() <= MOST);
    }
}
