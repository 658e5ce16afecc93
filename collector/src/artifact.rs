//! Content the symbolizer cannot see from where it runs, addressed by its SHA-256.
//!
//! Large files of JIT compilers are never in memory as a whole, small ones until a symbolizer has them. Asked for again, by the next
//! window of `serve`, they are read again. A service with a perf-map of 24 MB must not cost 24 MB for as long as it runs.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Weak};

use sha2::{Digest, Sha256};
use stackwire_proto::ARTIFACT_PIECE_BYTES;

use crate::in_time::in_time;

/// SHA-256 of an artifact's content.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    /// Of content.
    #[must_use]
    pub fn of(content: &[u8]) -> Self {
        Self(Sha256::digest(content).into())
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
    /// The piece `at` bytes after the beginning, [`ARTIFACT_PIECE_BYTES`] at most; empty at the end.
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

/// An artifact: its content, or the file to read it from.
#[derive(Clone, Debug)]
pub struct Artifact {
    /// Its address.
    pub hash: Hash,
    /// What it is.
    pub kind: Kind,
    /// Bytes.
    pub length: u64,
    content: Content,
    /// Where it can be read again, for as long as the file is kept open elsewhere: while its process is known.
    origin: Option<(Weak<File>, u64)>,
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
        Self { hash, kind, length, content: Content::Memory(content.into()), origin: None }
    }

    /// Content of a file. A piece or less is kept in memory, so that many small files do not cost a descriptor each.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn of_file(kind: Kind, extent: Extent) -> io::Result<Self> {
        let origin = Some((Arc::downgrade(&extent.file), extent.offset));
        if extent.length <= ARTIFACT_PIECE_BYTES as u64 {
            return Ok(Self { origin, ..Self::new(kind, extent.piece(0)?) });
        }
        let (hash, length) = (extent.hash()?, extent.length);
        Ok(Self { hash, kind, length, content: Content::File(extent), origin })
    }

    /// Bytes that are kept for it, in memory or in a file that would be closed otherwise.
    #[must_use]
    pub fn kept(&self) -> u64 {
        match self.content {
            Content::Memory(_) | Content::File(_) => self.length,
            Content::Delivered => 0,
        }
    }

    /// A symbolizer has it: nothing is kept of what can be read again.
    pub fn delivered(&mut self) {
        if self.origin.is_some() {
            self.content = Content::Delivered;
        }
    }

    /// Nobody can have its content any more.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        let closed = |(file, _): &(Weak<File>, u64)| file.strong_count() == 0;
        matches!(self.content, Content::Delivered) && self.origin.as_ref().is_none_or(closed)
    }

    /// Whether its content is still what it was. Blocks: a file is read, for two seconds at most.
    #[must_use]
    pub fn is_intact(&self) -> bool {
        match self.extent() {
            None => matches!(self.content, Content::Memory(_)),
            Some(extent) => {
                in_time(move || extent.hash()).is_ok_and(|hash| hash.ok() == Some(self.hash))
            }
        }
    }

    /// The piece that starts at `at`, [`ARTIFACT_PIECE_BYTES`] at most; `None` where it cannot be read. Blocks for two seconds at most.
    #[must_use]
    pub fn piece(&self, at: u64) -> Option<Vec<u8>> {
        if let Content::Memory(content) = &self.content {
            let end = content.len().min(at as usize + ARTIFACT_PIECE_BYTES);
            return content.get(at as usize..end).map(<[u8]>::to_vec);
        }
        let extent = self.extent()?;
        in_time(move || extent.piece(at)).ok()?.ok()
    }

    fn extent(&self) -> Option<Extent> {
        match (&self.content, &self.origin) {
            (Content::File(extent), _) => Some(extent.clone()),
            (Content::Delivered, Some((file, offset))) => {
                Some(Extent { file: file.upgrade()?, offset: *offset, length: self.length })
            }
            (Content::Memory(_) | Content::Delivered, _) => None,
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::io::Write;

    use super::*;

    /// All of it, as a sink reads it.
    fn read(artifact: &Artifact) -> Option<Vec<u8>> {
        let mut content = Vec::new();
        if !artifact.is_intact() {
            return None;
        }
        while (content.len() as u64) < artifact.length {
            content.extend(artifact.piece(content.len() as u64)?);
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
            assert_eq!((read(&artifact), artifact.kept()), (Some(content.clone()), length as u64));
            artifact.delivered();
            assert_eq!((read(&artifact), artifact.kept()), (Some(content), 0));
            file.write_all_at(b"other", 0).unwrap();
            assert!(read(&artifact).is_none(), "{length} bytes: it was written anew");
            drop(file);
            assert!(artifact.is_gone() && read(&artifact).is_none());
        }
    }

    #[test]
    fn what_is_not_delivered_is_kept_when_its_process_is_gone() {
        for length in [7, ARTIFACT_PIECE_BYTES + 1] {
            let (file, artifact, content) = of_file(length);
            drop(file);
            assert_eq!(read(&artifact), Some(content));
        }
        let mut other = Artifact::new(Kind::Vdso, vec![1]);
        other.delivered();
        assert_eq!(read(&other), Some(vec![1]), "nothing to read it from again");
    }
}
