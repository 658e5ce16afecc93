//! One task of one process at a time for each key, by flock: the system gives it back when its
//! holder dies.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::{Key, Kind};

/// A key held; given back when dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Lock files of each kind. Two keys may share a file: then one waits for the other, and nothing
/// worse happens. A task that holds the lock of a table may wait for the lock of a file, never the
/// other way round. So there is no deadlock.
const SLOTS: u64 = 256;
/// Between two tries: flock with a deadline does not exist.
const TRY_AGAIN: Duration = Duration::from_millis(10);

impl Lock {
    /// `None` when another had it for longer than `patience`.
    pub(crate) fn take(
        directory: &Path,
        key: &Key,
        patience: Duration,
    ) -> io::Result<Option<Self>> {
        let slot = xxhash_rust::xxh3::xxh3_64(key.id.as_str().as_bytes()) % SLOTS;
        let kind = match key.kind {
            Kind::Table(_) | Kind::HandedTable(_) => "table",
            Kind::Handed => "handed-over",
            Kind::Executable => "executable",
            Kind::Debuginfo => "debuginfo",
            Kind::Other => "other",
        };
        let path = directory.join("locks").join(format!("{kind}-{slot:02x}"));
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let deadline = Instant::now() + patience;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Self { _file: file })),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(TRY_AGAIN);
        }
    }
}
