//! Looks at a blob once: reads its file and its row, and brings them together where they differ.
//!
//! Every reader of blobs calls this. Reading needs no transaction. Only when file and row differ, a
//! transaction finds out whether another process has just changed both, or one of them is wrong.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::{Blob, Cache, CacheError, Key, Known, Meta, Row, Stamp, blob};

/// What was found.
pub enum Look {
    /// The blob.
    Whole(Blob),
    /// Its content was not what was written; it is removed.
    Damaged,
    /// No file; its row, where it had one, is forgotten.
    NotThere,
}

/// Why the file that was read and the row do not agree.
enum Differs {
    /// It had no row yet; this is the one it has now.
    Row(Row),
    /// Another process replaced the file in the meantime.
    Replaced,
    Damaged,
}

/// A reader whose blob is replaced this often meanwhile does without.
const MAX_LOOKS: usize = 16;

impl Cache {
    /// `read`: what is known of files that were read before.
    pub(crate) fn look(&self, key: &Key, read: &Known<(u64, u64)>) -> Result<Look, CacheError> {
        let path = key.path(&self.directory);
        for _ in 0..MAX_LOOKS {
            let failed = |error| CacheError::File { path: path.clone(), error };
            let file = match File::open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.forget_if_gone(key, &path)?;
                    return Ok(Look::NotThere);
                }
                Err(error) => return Err(failed(error)),
            };
            let stamp = Stamp::of(&file.metadata().map_err(failed)?);
            let found = match read.get(stamp) {
                Some(found) => found,
                None => {
                    let found = blob::checksum(&file).map_err(failed)?;
                    read.put(stamp, found);
                    found
                }
            };
            let row = self.index().row(key)?;
            let row = match row.filter(|row| (row.size, row.checksum) == found) {
                Some(row) => row,
                None => match self.settle(key, &path, &file, found)? {
                    Differs::Row(row) => row,
                    Differs::Replaced => continue,
                    Differs::Damaged => return Ok(Look::Damaged),
                },
            };
            return Ok(Look::Whole(Blob { file, path, meta: row.meta }));
        }
        Ok(Look::NotThere)
    }

    fn settle(
        &self,
        key: &Key,
        path: &Path,
        file: &File,
        found: (u64, u64),
    ) -> Result<Differs, CacheError> {
        self.index().change(|index| {
            if !is_at(file, path) {
                return Ok(Differs::Replaced);
            }
            match index.row(key)? {
                // Added while it was read here.
                Some(row) if (row.size, row.checksum) == found => Ok(Differs::Row(row)),
                Some(_) => {
                    let removed = fs::remove_file(path);
                    removed.map_err(|error| CacheError::File { path: path.to_owned(), error })?;
                    index.forget(key)?;
                    Ok(Differs::Damaged)
                }
                None => {
                    index.insert(key, found, &Meta::default())?;
                    Ok(index.row(key)?.map_or(Differs::Replaced, Differs::Row))
                }
            }
        })
    }

    fn forget_if_gone(&self, key: &Key, path: &Path) -> Result<(), CacheError> {
        // Most of what is not there has no row either, and to look costs no turn at writing.
        if self.index().row(key)?.is_none() {
            return Ok(());
        }
        self.index().change(|index| if path.exists() { Ok(()) } else { Ok(index.forget(key)?) })
    }
}

/// Whether what is open is what lies there now.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let (open, there) = (file.metadata().map(id), fs::metadata(path).map(id));
    matches!((open, there), (Ok(open), Ok(there)) if open == there)
}
