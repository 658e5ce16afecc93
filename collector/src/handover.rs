//! Files of processes for a symbolizer that cannot see them: which are known, and reading them
//! piece by piece.
//!
//! The pipeline reports which files were mapped where; the sinks ask for files. Files are opened
//! through the broker. Their bytes are read but not interpreted. [`Share`] decides what may be
//! sent.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use stackwire_model::{ExecutableKey, Share};
use stackwire_proto::MAX_FILE_BYTES;

use crate::artifact::{Extent, Hash};
use crate::batch::Epoch;
use crate::helpers::broker::{Broker, OpenError};
use crate::process::Wanted;
use crate::process::executable::Kind;

/// Why a file is not sent.
#[derive(Debug, thiserror::Error)]
pub enum NotSent {
    /// By order.
    #[error("the collector was told to share no files")]
    Private,
    /// No process has had it mapped.
    #[error("the collector does not know it")]
    Unknown,
    /// By its path another file is found.
    #[error("another file is at its path now")]
    Replaced,
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No file may be that large.
    #[error("it has {0} bytes, more than the {MAX_FILE_BYTES} that are sent")]
    TooLarge(u64),
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// Nor in time.
    #[error("it could not be read within {} s", .0.as_secs())]
    Late(Duration),
}

/// Files known at once; each is a path and some numbers.
const MAX_KNOWN: usize = 16_384;
/// Mappings remembered of a file: one may be gone when it is asked for.
const MAX_PLACES: usize = 4;

/// Where files were mapped. Shared between threads.
#[derive(Debug)]
pub struct Handover {
    share: Share,
    broker: Arc<Broker>,
    known: Mutex<HashMap<ExecutableKey, Vec<Wanted>>>,
}

impl Handover {
    /// Knows no file yet.
    #[must_use]
    pub fn new(share: Share, broker: Arc<Broker>) -> Self {
        Self { share, broker, known: Mutex::default() }
    }

    /// Which files may be sent.
    #[must_use]
    pub fn share(&self) -> Share {
        self.share
    }

    /// Remembers where the files of an epoch were mapped.
    pub fn learn(&self, epoch: &Epoch) {
        if self.share == Share::Never {
            return;
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for mapping in &epoch.mappings {
            let kind = &epoch.executables[mapping.executable as usize].kind;
            let Kind::File { path, key: Some(key) } = kind else { continue };
            if known.len() >= MAX_KNOWN && !known.contains_key(key) {
                continue;
            }
            let wanted = Wanted::Mapped {
                pid: epoch.processes[mapping.process as usize].pid,
                start: mapping.start,
                end: mapping.start.saturating_add(mapping.length),
                path: path.clone(),
            };
            let places = known.entry(*key).or_default();
            places.retain(|place| *place != wanted);
            places.push(wanted);
            // The latest lives longest.
            places.drain(..places.len().saturating_sub(MAX_PLACES));
        }
    }

    /// Files known, in no order.
    #[must_use]
    pub fn files(&self) -> Vec<ExecutableKey> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.keys().copied().collect()
    }

    /// Opens a file to send it. Blocks: all of it is read once, for its hash.
    ///
    /// # Errors
    /// See [`NotSent`].
    pub fn open(&self, key: ExecutableKey) -> Result<Content, NotSent> {
        if self.share == Share::Never {
            return Err(NotSent::Private);
        }
        let places = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.get(&key).cloned().unwrap_or_default()
        };
        let mut reason = NotSent::Unknown;
        for place in places.iter().rev() {
            match self.broker.open(place) {
                // Only a build-id tells the symbolizer that it is the right one.
                Ok(file) if key.file().is_some_and(|id| inode(&file) != Some(id.inode())) => {
                    reason = NotSent::Replaced;
                }
                Ok(file) => return Content::read(file),
                Err(why) => reason = why.into(),
            }
        }
        Err(reason)
    }
}

fn inode(file: &File) -> Option<u64> {
    file.metadata().ok().map(|metadata| metadata.ino())
}

/// An opened file.
#[derive(Debug)]
pub struct Content {
    /// All of it.
    pub extent: Extent,
    /// SHA-256 of all of it.
    pub hash: Hash,
}

impl Content {
    fn read(file: File) -> Result<Self, NotSent> {
        let length = file.metadata()?.len();
        if length > MAX_FILE_BYTES {
            return Err(NotSent::TooLarge(length));
        }
        let extent = Extent { file: Arc::new(file), offset: 0, length };
        let hash = extent.hash()?;
        Ok(Self { extent, hash })
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use stackwire_model::BuildId;
    use stackwire_proto::ARTIFACT_PIECE_BYTES;

    use stackwire_model::{FileOffset, UserAddr};

    use super::*;
    use crate::definitions::MappingDef;
    use crate::process::executable::Executables;

    #[test]
    fn a_file_that_was_mapped_is_read_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lib");
        let bytes: Vec<u8> = (0..ARTIFACT_PIECE_BYTES as u32 + 9).map(|n| (n / 3) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let key = BuildId::new(&[1; 20]).unwrap().into();
        let kind = Kind::File { path: path.to_str().unwrap().to_owned(), key: Some(key) };
        let mut epoch = Epoch::default();
        epoch.executables.push(Rc::clone(&Executables::default().intern(kind)));
        epoch.processes.push(crate::definitions::ProcessDef {
            image: 1,
            pid: 4_000_001,
            ..Default::default()
        });
        epoch.mappings.push(MappingDef {
            process: 0,
            executable: 0,
            start: UserAddr(0x1000),
            length: 0x1000,
            file_offset: FileOffset(0),
            since_ns: 0,
        });
        let of = |share| {
            let handover = Handover::new(share, Arc::new(Broker::none()));
            handover.learn(&epoch);
            handover
        };
        let content = of(Share::Missing).open(key).unwrap();
        assert_eq!(content.extent.length, bytes.len() as u64);
        assert_eq!(content.hash, Hash::of(&bytes));
        let end = content.extent.piece(ARTIFACT_PIECE_BYTES as u64).unwrap();
        assert_eq!(end, bytes[ARTIFACT_PIECE_BYTES..]);
        assert!(content.extent.piece(content.extent.length).unwrap().is_empty());
        let said = of(Share::Missing).open(BuildId::new(&[2; 20]).unwrap().into()).unwrap_err();
        assert!(matches!(said, NotSent::Unknown));
        assert!(matches!(of(Share::Never).open(key), Err(NotSent::Private)));
        std::fs::remove_file(&path).unwrap();
        assert!(of(Share::Missing).open(key).is_err());
    }
}
