//! Files of processes for a symbolizer that cannot see them: which are known, and reading them piece by piece.
//!
//! Told by the pipeline what was mapped where, asked by the sinks. Opens through the broker; reads bytes and
//! looks at none. What may be sent is [`Share`]'s to say.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};

use stackwire_proto::MAX_FILE_BYTES;

use crate::artifact::{Extent, Hash};
use crate::batch::Epoch;
use crate::broker::{Broker, Wanted};
use crate::process::executable::Kind;

/// Which files of processes leave the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Share {
    /// None.
    Never,
    /// Those a symbolizer asks for. A capture file asks for none.
    #[default]
    Missing,
    /// All that have samples: in a capture file as well.
    Always,
}

/// Which file: its build-id, else inode and device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FileId {
    /// GNU build-id.
    pub build_id: Vec<u8>,
    /// Inode, without a build-id.
    pub inode: u64,
    /// Its device.
    pub device: (u32, u32),
}

impl FileId {
    /// The identity of what is a file.
    #[must_use]
    pub fn of(kind: &Kind) -> Option<Self> {
        let Kind::File { build_id, inode, device, .. } = kind else { return None };
        Some(Self { build_id: build_id.clone(), inode: *inode, device: *device })
    }
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
    known: Mutex<HashMap<FileId, Vec<Wanted>>>,
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
            let (Some(id), Kind::File { path, .. }) = (FileId::of(kind), kind) else { continue };
            if known.len() >= MAX_KNOWN && !known.contains_key(&id) {
                continue;
            }
            let wanted = Wanted::Mapped {
                pid: epoch.processes[mapping.process as usize].pid,
                start: mapping.start,
                end: mapping.start + mapping.length,
                path: path.clone(),
            };
            let places = known.entry(id).or_default();
            places.retain(|place| *place != wanted);
            places.push(wanted);
            // The latest lives longest.
            places.drain(..places.len().saturating_sub(MAX_PLACES));
        }
    }

    /// Files known, in no order.
    #[must_use]
    pub fn files(&self) -> Vec<FileId> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.keys().cloned().collect()
    }

    /// Opens a file to send it. Blocks: all of it is read once, for its hash.
    ///
    /// # Errors
    /// In words for the symbolizer's report.
    pub fn open(&self, id: &FileId) -> Result<Content, String> {
        if self.share == Share::Never {
            return Err("the collector was told to share no files".to_owned());
        }
        let places = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.get(id).cloned().unwrap_or_default()
        };
        let mut reason = "the collector does not know it".to_owned();
        for place in places.iter().rev() {
            match self.broker.open(place) {
                // Only a build-id tells the symbolizer that it is the right one.
                Ok(file) if id.build_id.is_empty() && inode(&file) != Some(id.inode) => {
                    reason = "another file is at its path now".to_owned();
                }
                Ok(file) => return Content::read(file),
                Err(why) => reason = why,
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
    fn read(file: File) -> Result<Self, String> {
        let length = file.metadata().map_err(|error| error.to_string())?.len();
        if length > MAX_FILE_BYTES {
            return Err(format!(
                "it has {length} bytes, more than the {MAX_FILE_BYTES} that are sent"
            ));
        }
        let extent = Extent { file: Arc::new(file), offset: 0, length };
        let hash = extent.hash().map_err(|error| error.to_string())?;
        Ok(Self { extent, hash })
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::rc::Rc;

    use stackwire_proto::ARTIFACT_PIECE_BYTES;

    use super::*;
    use crate::batch::MappingDef;
    use crate::process::executable::Executables;

    #[test]
    fn a_file_that_was_mapped_is_read_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lib");
        let bytes: Vec<u8> = (0..ARTIFACT_PIECE_BYTES as u32 + 9).map(|n| (n / 3) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let kind = Kind::File {
            path: path.to_str().unwrap().to_owned(),
            build_id: vec![1; 20],
            inode: 0,
            device: (0, 0),
        };
        let id = FileId::of(&kind).unwrap();
        let mut epoch = Epoch::default();
        epoch.executables.push(Rc::clone(&Executables::default().intern(kind)));
        epoch.processes.push(crate::batch::ProcessDef {
            image: 1,
            pid: 4_000_001,
            ..Default::default()
        });
        epoch.mappings.push(MappingDef {
            process: 0,
            executable: 0,
            start: 0x1000,
            length: 0x1000,
            file_offset: 0,
            since_ns: 0,
        });
        let of = |share| {
            let handover = Handover::new(share, Arc::new(Broker::none()));
            handover.learn(&epoch);
            handover
        };
        let content = of(Share::Missing).open(&id).unwrap();
        assert_eq!(content.extent.length, bytes.len() as u64);
        assert_eq!(content.hash, Hash::of(&bytes));
        let end = content.extent.piece(ARTIFACT_PIECE_BYTES as u64).unwrap();
        assert_eq!(end, bytes[ARTIFACT_PIECE_BYTES..]);
        assert!(content.extent.piece(content.extent.length).unwrap().is_empty());
        let said = of(Share::Missing).open(&FileId::default()).unwrap_err();
        assert_eq!(said, "the collector does not know it");
        assert!(of(Share::Never).open(&id).unwrap_err().contains("told to share no files"));
        std::fs::remove_file(&path).unwrap();
        assert!(of(Share::Missing).open(&id).is_err());
    }
}
