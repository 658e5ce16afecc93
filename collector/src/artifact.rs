//! Content the symbolizer cannot see from where it runs, addressed by its SHA-256.
//!
//! A large file that a JIT compiler wrote is never in memory as a whole. A small one stays in
//! memory until a symbolizer has it. When the next window of `serve` asks for a file again, it is
//! read again: a service with a perf-map of 24 MB must not cost 24 MB for as long as it runs.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Weak};

use sha2::{Digest, Sha256};
use stackwire_proto::ARTIFACT_PIECE_BYTES;

/// SHA-256 of an artifact's content.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    /// Of content.
    #[must_use]
    pub fn of(content: &[u8]) -> Self {
        Self::of_parts(&[content])
    }

    /// Of content that is in parts.
    #[must_use]
    pub fn of_parts(parts: &[&[u8]]) -> Self {
        let mut hash = Sha256::new();
        parts.iter().for_each(|part| hash.update(part));
        Self(hash.finalize().into())
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What an artifact is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Rebased symbols of kernel functions.
    Kallsyms,
    /// A perf-map as the process wrote it, or a piece of one.
    PerfMap,
    /// Likewise, a jitdump.
    Jitdump,
    /// The vDSO's ELF image.
    Vdso,
}

/// Bytes of an open file, read in pieces.
#[derive(Clone, Debug)]
pub struct Extent {
    /// The file.
    pub file: Arc<File>,
    /// Where they begin in it.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

impl Extent {
    /// The piece `at` bytes after the beginning, [`ARTIFACT_PIECE_BYTES`] at most; empty at the
    /// end.
    ///
    /// # Errors
    /// When the file cannot be read, or has become shorter.
    pub fn piece(&self, at: u64) -> io::Result<Vec<u8>> {
        let left = self.length.saturating_sub(at).min(ARTIFACT_PIECE_BYTES as u64);
        let mut piece = vec![0; left as usize];
        self.file.read_exact_at(&mut piece, self.offset + at)?;
        Ok(piece)
    }

    /// SHA-256 of all of it. Reads all of it.
    ///
    /// # Errors
    /// As [`Extent::piece`].
    pub fn hash(&self) -> io::Result<Hash> {
        let mut hasher = Sha256::new();
        let mut at = 0;
        while at < self.length {
            let piece = self.piece(at)?;
            hasher.update(&piece);
            at += piece.len() as u64;
        }
        Ok(Hash(hasher.finalize().into()))
    }
}

/// An artifact: its content, or the files to read it from.
#[derive(Clone, Debug)]
pub struct Artifact {
    /// Its address.
    pub hash: Hash,
    /// What it is.
    pub kind: Kind,
    /// Bytes.
    pub length: u64,
    content: Content,
    /// The places from which the content can be read again. A place can be read while its file is
    /// kept open elsewhere, which is while its process is known. There are several when processes
    /// wrote the same content, for example children that copy their parent's perf-map.
    origins: Vec<(Weak<File>, u64)>,
}

#[derive(Clone, Debug)]
enum Content {
    Memory(Arc<[u8]>),
    File(Extent),
    /// A symbolizer has it.
    Delivered,
}

impl Artifact {
    /// Content that stays in memory.
    #[must_use]
    pub fn new(kind: Kind, content: Vec<u8>) -> Self {
        let (hash, length) = (Hash::of(&content), content.len() as u64);
        Self { hash, kind, length, content: Content::Memory(content.into()), origins: Vec::new() }
    }

    /// Content of a file. A piece or less is kept in memory, so that many small files do not cost a
    /// descriptor each.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn of_file(kind: Kind, extent: Extent) -> io::Result<Self> {
        let origins = vec![(Arc::downgrade(&extent.file), extent.offset)];
        if extent.length <= ARTIFACT_PIECE_BYTES as u64 {
            return Ok(Self { origins, ..Self::new(kind, extent.piece(0)?) });
        }
        let (hash, length) = (extent.hash()?, extent.length);
        Ok(Self { hash, kind, length, content: Content::File(extent), origins })
    }

    /// Adds where another has the same content.
    pub fn merge(&mut self, other: Self) {
        self.origins.retain(|(file, _)| file.strong_count() > 0);
        self.origins.extend(other.origins);
        if matches!(self.content, Content::Delivered) {
            self.content = other.content;
        }
    }

    /// A symbolizer has it: nothing is kept of what can be read again.
    pub fn delivered(&mut self) {
        if !self.origins.is_empty() {
            self.content = Content::Delivered;
        }
    }

    /// A symbolizer may ask for it again: its file stays open.
    pub fn needed(&mut self) {
        if matches!(self.content, Content::Delivered)
            && let Some(extent) = self.extents().into_iter().next()
        {
            self.content = Content::File(extent);
        }
    }

    /// Nothing has to be read for it.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        matches!(self.content, Content::Memory(_))
    }

    /// Nobody can have its content any more.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self.content, Content::Delivered)
            && self.origins.iter().all(|(file, _)| file.strong_count() == 0)
    }

    /// Its content, if it is still what it was. Blocks: all of a file is read, which may hang.
    #[must_use]
    pub fn open(self) -> Option<Source> {
        if let Content::Memory(content) = self.content {
            return Some(Source::Memory(content));
        }
        let is_intact = |extent: &Extent| extent.hash().is_ok_and(|hash| hash == self.hash);
        self.extents().into_iter().find(is_intact).map(Source::File)
    }

    fn extents(&self) -> Vec<Extent> {
        let held = match &self.content {
            Content::File(extent) => Some(extent.clone()),
            Content::Memory(_) | Content::Delivered => None,
        };
        let others = self.origins.iter().filter_map(|(file, offset)| {
            Some(Extent { file: file.upgrade()?, offset: *offset, length: self.length })
        });
        held.into_iter().chain(others).collect()
    }
}

/// The content of an artifact.
#[derive(Debug)]
pub enum Source {
    /// In memory.
    Memory(Arc<[u8]>),
    /// In a file.
    File(Extent),
}

impl Source {
    /// The piece that starts at `at`, [`ARTIFACT_PIECE_BYTES`] at most; `None` where it cannot be
    /// read. Blocks as [`Artifact::open`].
    #[must_use]
    pub fn piece(&self, at: u64) -> Option<Vec<u8>> {
        match self {
            Self::Memory(content) => {
                let end = content.len().min(at as usize + ARTIFACT_PIECE_BYTES);
                content.get(at as usize..end).map(<[u8]>::to_vec)
            }
            Self::File(extent) => extent.piece(at).ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// All of it, as a sink reads it.
    fn read(artifact: &Artifact) -> Option<Vec<u8>> {
        let source = artifact.clone().open()?;
        let mut content = Vec::new();
        while (content.len() as u64) < artifact.length {
            content.extend(source.piece(content.len() as u64)?);
        }
        Some(content)
    }

    fn of_file(length: usize) -> (Arc<File>, Artifact, Vec<u8>) {
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..length as u32).map(|n| (n / 3) as u8).collect();
        file.write_all(b"....").unwrap();
        file.write_all(&content).unwrap();
        let file = Arc::new(file);
        let extent = Extent { file: Arc::clone(&file), offset: 4, length: length as u64 };
        (file, Artifact::of_file(Kind::PerfMap, extent).unwrap(), content)
    }

    #[test]
    fn delivered_content_of_files_is_read_again() {
        for length in [1, ARTIFACT_PIECE_BYTES, ARTIFACT_PIECE_BYTES + 1, 3 * ARTIFACT_PIECE_BYTES]
        {
            let (file, mut artifact, content) = of_file(length);
            assert_eq!(artifact.hash, Hash::of(&content));
            assert_eq!(read(&artifact), Some(content.clone()));
            artifact.delivered();
            assert_eq!(Arc::strong_count(&file), 1);
            assert_eq!(read(&artifact), Some(content));
            file.write_all_at(b"other", 0).unwrap();
            assert!(read(&artifact).is_none(), "{length} bytes: it was written anew");
            drop(file);
            assert!(artifact.is_gone() && read(&artifact).is_none());
        }
    }

    #[test]
    fn what_is_needed_is_kept_when_its_process_is_gone() {
        for length in [7, ARTIFACT_PIECE_BYTES + 1] {
            let (file, mut artifact, content) = of_file(length);
            drop(file);
            assert_eq!(read(&artifact), Some(content.clone()), "nobody has it yet");
            artifact.delivered();
            assert!(artifact.is_gone());
            let (file, mut artifact, _) = of_file(length);
            artifact.delivered();
            artifact.needed();
            drop(file);
            assert_eq!(read(&artifact), Some(content), "an epoch refers to it again");
        }
        let mut other = Artifact::new(Kind::Vdso, vec![1]);
        other.delivered();
        assert_eq!(read(&other), Some(vec![1]), "nothing to read it from again");
    }

    #[test]
    fn of_several_processes_that_wrote_the_same_one_is_enough() {
        let (one, mut artifact, content) = of_file(9);
        let (two, same, _) = of_file(9);
        artifact.delivered();
        artifact.merge(same);
        artifact.delivered();
        one.write_all_at(b"other", 4).unwrap();
        assert_eq!(read(&artifact), Some(content.clone()), "one was written anew");
        drop(one);
        assert_eq!(read(&artifact), Some(content), "one is gone");
        drop(two);
        assert!(artifact.is_gone());
    }
}
