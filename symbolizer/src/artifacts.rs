//! Artifacts of a capture: symbols of kernels, perf-maps, jitdumps, images of vDSOs, by their hash;
//! and the files that were handed over with it.
//!
//! Small ones are in memory. Large ones, and all beyond some MiB, are in temporary files that are
//! mapped: a host with many JIT compilers has more of them than memory. Filled by `capture.rs` and
//! `input.rs`, read by `resolve/`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

use sha2::{Digest, Sha256};
use stackwire_elf::Bytes;
use stackwire_proto::{ARTIFACT_PIECE_BYTES, open_piece, v1};

use crate::profile::{ArtifactHash, Profile};
use crate::receive::handed::Handed;

/// Most bytes of artifacts kept of one capture.
const MAX_BYTES: u64 = 512 << 20;
/// Most bytes of those in memory.
const IN_MEMORY: u64 = 32 << 20;
/// Most artifacts that come at a time: each has a descriptor. A collector sends one at a time.
const MAX_PARTIAL: usize = 16;

/// Artifacts by hash, verified.
#[derive(Debug, Default)]
pub struct Artifacts {
    handed: Arc<Handed>,
    whole: HashMap<ArtifactHash, Bytes>,
    partial: HashMap<ArtifactHash, Partial>,
    /// Of all, and of those in memory.
    bytes: u64,
    in_memory: u64,
}

/// One of several pieces.
#[derive(Debug)]
struct Partial {
    file: File,
    hasher: Sha256,
    bytes: u64,
}

impl Artifacts {
    /// None yet, of a capture that files are handed over with.
    #[must_use]
    pub(crate) fn beside(handed: Arc<Handed>) -> Self {
        Self { handed, ..Self::default() }
    }

    /// The content behind a hash.
    #[must_use]
    pub fn get(&self, hash: &ArtifactHash) -> Option<&[u8]> {
        self.whole.get(hash).map(|content| &content[..])
    }

    /// Symbols of a kernel or module by the hash of all of them: what is here of them.
    #[must_use]
    pub fn kernel_symbols(&self, profile: &Profile, hash: &ArtifactHash) -> Option<Cow<'_, [u8]>> {
        if let Some(all) = self.get(hash) {
            return Some(Cow::Borrowed(all));
        }
        let pieces = profile.kernel_symbols.get(hash)?.iter().filter_map(|piece| self.get(piece));
        let pieces: Vec<&[u8]> = pieces.collect();
        (!pieces.is_empty()).then(|| Cow::Owned(pieces.concat()))
    }

    /// Files that came with the capture.
    #[must_use]
    pub fn handed(&self) -> &Arc<Handed> {
        &self.handed
    }

    /// Adds a whole one that did not come with a capture, if there is room for it.
    pub(crate) fn add_whole(&mut self, content: Vec<u8>) -> Option<ArtifactHash> {
        let hash = ArtifactHash::from(Sha256::digest(&content));
        if !self.whole.contains_key(&hash) {
            let bytes = content.len() as u64;
            if self.bytes + bytes > MAX_BYTES {
                return None;
            }
            let content = self.keep(content).ok()?;
            self.bytes += bytes;
            self.whole.insert(hash, content);
        }
        Some(hash)
    }

    /// Adds a piece; true when the artifact is whole now. Pieces that do not fit are ignored, and
    /// so the artifact stays missing.
    pub fn add(&mut self, chunk: &v1::ArtifactChunk) -> bool {
        let Ok(hash) = ArtifactHash::try_from(chunk.hash.as_slice()) else { return false };
        if self.whole.contains_key(&hash) {
            return true;
        }
        let Ok(piece) = open_piece(chunk) else { return false };
        if chunk.offset == 0 && piece.len() as u64 == chunk.length {
            self.forget_partial(&hash);
            return self.add_whole(piece) == Some(hash);
        }
        self.add_piece(hash, chunk, &piece).unwrap_or(false)
    }

    /// Adds one of several.
    fn add_piece(
        &mut self,
        hash: ArtifactHash,
        chunk: &v1::ArtifactChunk,
        piece: &[u8],
    ) -> io::Result<bool> {
        if chunk.offset == 0 {
            self.forget_partial(&hash);
            if self.partial.len() < MAX_PARTIAL {
                let file = self.handed.scratch().file()?;
                let partial = Partial { file, hasher: Sha256::new(), bytes: 0 };
                self.partial.insert(hash, partial);
            }
        }
        let Some(partial) = self.partial.get_mut(&hash) else { return Ok(false) };
        let bytes = piece.len() as u64;
        if partial.bytes != chunk.offset || self.bytes + bytes > MAX_BYTES {
            return Ok(false);
        }
        partial.file.write_all(piece)?;
        partial.hasher.update(piece);
        partial.bytes += bytes;
        self.bytes += bytes;
        if partial.bytes != chunk.length {
            return Ok(false);
        }
        let Some(Partial { file, hasher, bytes }) = self.partial.remove(&hash) else {
            return Ok(false);
        };
        let is_honest = ArtifactHash::from(hasher.finalize()) == hash;
        if is_honest {
            self.whole.insert(hash, Bytes::map(&file)?);
        } else {
            self.bytes -= bytes;
        }
        Ok(is_honest)
    }

    fn forget_partial(&mut self, hash: &ArtifactHash) {
        self.bytes -= self.partial.remove(hash).map_or(0, |partial| partial.bytes);
    }

    /// In memory, or beyond that in a file.
    fn keep(&mut self, content: Vec<u8>) -> io::Result<Bytes> {
        let bytes = content.len() as u64;
        if bytes <= ARTIFACT_PIECE_BYTES as u64 && self.in_memory + bytes <= IN_MEMORY {
            self.in_memory += bytes;
            return Ok(Bytes::from(content));
        }
        let mut file = self.handed.scratch().file()?;
        file.write_all(&content)?;
        Bytes::map(&file)
    }
}

#[cfg(test)]
mod tests {
    use stackwire_proto::seal_piece;

    use super::*;

    fn chunks(content: &[u8]) -> Vec<v1::ArtifactChunk> {
        let (hash, length) = (Sha256::digest(content).into(), content.len() as u64);
        let pieces = content.chunks(ARTIFACT_PIECE_BYTES).enumerate();
        let at = |number: usize| (number * ARTIFACT_PIECE_BYTES) as u64;
        let kind = v1::ArtifactKind::PerfMap;
        pieces.map(|(number, piece)| seal_piece(&hash, kind, length, at(number), piece)).collect()
    }

    #[test]
    fn large_ones_are_in_files_and_say_the_same() {
        let mut artifacts = Artifacts::default();
        let small = vec![1; 1000];
        let large: Vec<u8> =
            (0..3 * ARTIFACT_PIECE_BYTES as u32 + 5).map(|i| (i / 7) as u8).collect();
        for (content, mapped) in [(&small, false), (&large, true)] {
            let chunks = chunks(content);
            let (last, others) = chunks.split_last().unwrap();
            assert!(!others.iter().any(|chunk| artifacts.add(chunk)));
            // From its beginning once more.
            assert!(!others.iter().any(|chunk| artifacts.add(chunk)));
            assert!(artifacts.add(last));
            let hash = Sha256::digest(content).into();
            assert_eq!(artifacts.get(&hash), Some(&content[..]));
            assert_eq!(artifacts.whole[&hash].are_mapped(), mapped);
        }
        assert_eq!(artifacts.bytes, (small.len() + large.len()) as u64);
    }

    #[test]
    fn what_is_not_what_it_says_is_not_kept() {
        let mut artifacts = Artifacts::default();
        let mut chunks = chunks(&vec![1; 2 * ARTIFACT_PIECE_BYTES]);
        for chunk in &mut chunks {
            chunk.hash[0] ^= 1;
            assert!(!artifacts.add(chunk));
        }
        assert_eq!((artifacts.bytes, artifacts.partial.len()), (0, 0));
        // Many that never end have no file each.
        for number in 0..200u8 {
            let mut chunk = chunks[0].clone();
            chunk.hash[0] = number;
            artifacts.add(&chunk);
        }
        assert_eq!(artifacts.partial.len(), MAX_PARTIAL);
    }
}
