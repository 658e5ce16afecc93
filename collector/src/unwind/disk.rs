//! Unwind tables from run to run: a file each, by build-id and version of the format.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use stackwire_model::BuildId;
use stackwire_unwind::{Table, VERSION};

/// Most of it; beyond, those written longest ago go.
const MAX_BYTES: u64 = 256 << 20;
/// Largest file read.
const MAX_TABLE: u64 = 64 << 20;

/// A directory of tables, our user's alone.
#[derive(Debug)]
pub struct Disk {
    directory: PathBuf,
}

impl Disk {
    /// Opens it, made if there is none. `None` when it is not to be had, or others could write to
    /// it.
    #[must_use]
    pub fn open(directory: &Path) -> Option<Self> {
        stackwire_rights::directory::make(directory).ok()?;
        Some(Self { directory: directory.to_owned() })
    }

    /// The table of a build-id.
    #[must_use]
    pub fn get(&self, build_id: BuildId) -> Option<Table> {
        let mut bytes = Vec::new();
        // Whatever is there instead of a file is not waited for.
        let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(self.path(build_id));
        let file = file.ok().filter(|file| file.metadata().is_ok_and(|found| found.is_file()))?;
        file.take(MAX_TABLE).read_to_end(&mut bytes).ok()?;
        Table::parse(&bytes).ok().filter(|table| table.build_id == Some(build_id))
    }

    /// Keeps a table.
    ///
    /// # Errors
    /// Those of writing.
    pub fn put(&self, build_id: BuildId, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(build_id);
        // Two threads may have the same build-id.
        static WRITTEN: AtomicU32 = AtomicU32::new(0);
        let serial = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let new = path.with_extension(format!("new-{}-{serial}", std::process::id()));
        // What was left by a collector of the same pid that was killed.
        let _ = fs::remove_file(&new);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        let written = file.write_all(bytes).and_then(|()| fs::rename(&new, &path));
        if written.is_err() {
            // Half a file is of no use.
            let _ = fs::remove_file(&new);
        }
        self.prune()?;
        written
    }

    fn path(&self, build_id: BuildId) -> PathBuf {
        self.directory.join(format!("{build_id}.v{VERSION}"))
    }

    fn prune(&self) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.directory)?.flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_file() && entry.file_name().to_str().is_some_and(is_ours) {
                files.push((metadata.mtime(), metadata.len(), entry.path()));
            }
        }
        let mut total: u64 = files.iter().map(|(_, length, _)| length).sum();
        files.sort();
        for (_, length, path) in files {
            if total <= MAX_BYTES {
                break;
            }
            // Another collector may have been faster.
            let _ = fs::remove_file(path);
            total -= length;
        }
        Ok(())
    }
}

/// Whether a file is one of tables, of any version, or half of one.
fn is_ours(name: &str) -> bool {
    let Some((id, version)) = name.split_once('.') else { return false };
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let versions = version.strip_prefix('v').or_else(|| version.strip_prefix("new-"));
    let number = |byte: u8| byte.is_ascii_digit() || byte == b'-';
    id.bytes().all(hex) && versions.is_some_and(|rest| rest.bytes().all(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_kept_and_damaged_ones_are_none() {
        let directory = tempfile::tempdir().unwrap();
        let disk = Disk::open(&directory.path().join("a/b")).unwrap();
        let id = BuildId::new(&[7; 20]).unwrap();
        let table = Table { build_id: Some(id), ..Table::default() };
        assert!(disk.get(id).is_none());
        disk.put(id, &table.to_bytes()).unwrap();
        assert_eq!(disk.get(id), Some(table));
        // Of another, under this name.
        let other = Table { build_id: BuildId::new(&[8; 20]), ..Table::default() };
        disk.put(id, &other.to_bytes()).unwrap();
        assert!(disk.get(id).is_none());
        disk.put(id, b"damaged").unwrap();
        assert!(disk.get(id).is_none());
        for (name, ours) in [
            ("0a.v1", true),
            ("0a.new-7-0", true),
            ("thesis.tar", false),
            ("ab", false),
            ("x.v1", false),
        ] {
            assert_eq!(is_ours(name), ours, "{name}");
        }
        assert_eq!(fs::read_dir(&disk.directory).unwrap().count(), 1);
    }
}
