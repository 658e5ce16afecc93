//! A file on its way from a collector: its pieces come in order, are hashed as they come, and the
//! whole is checked.
//!
//! Does not know who may send what: `handed.rs` has one of these for each file that comes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use sha2::{Digest, Sha256};
use stackwire_elf::{Elf, ElfError, Scratch};
use stackwire_model::ExecutableKey;
use stackwire_proto::{SealError, open_piece, v1};

use crate::profile::ArtifactHash;

/// Why a file that was sent is not kept.
#[derive(Debug, thiserror::Error)]
pub enum NotTaken {
    /// The collector says so, in its own words.
    #[error("{0}")]
    Said(String),
    /// A piece is not where it belongs.
    #[error("what the collector sent of it is damaged")]
    Damaged,
    /// A piece does not decompress.
    #[error(transparent)]
    Piece(#[from] SealError),
    /// It is not what its hash says.
    #[error("the collector sent something else than it announced")]
    OtherContent,
    /// It is not what was asked for.
    #[error("the collector sent a file with another build-id")]
    OtherBuildId,
    /// It is no ELF file.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// A collector sends one at a time.
    #[error("the collector sent more files at a time than are taken")]
    AtATime,
    /// There are as many files as can be held open.
    #[error("the collector sent more files than can be kept")]
    TooMany,
    /// All files together are too large.
    #[error("the collector sent more than the {MAX_BYTES} bytes that are kept")]
    TooLarge,
    /// It cannot be written.
    #[error("it cannot be kept: {0}")]
    NotKept(#[from] io::Error),
}

/// Most bytes kept of all files of a capture.
const MAX_BYTES: u64 = 4 << 30;

/// The part of a file that has come.
#[derive(Debug)]
pub(super) struct Transfer {
    file: File,
    hasher: Sha256,
    hash: ArtifactHash,
    at: u64,
}

impl Transfer {
    /// Of a file with this hash, into an empty one.
    pub(super) fn new(hash: ArtifactHash, file: File) -> Self {
        Self { file, hasher: Sha256::new(), hash, at: 0 }
    }

    /// The hash it is to have.
    pub(super) fn hash(&self) -> ArtifactHash {
        self.hash
    }

    /// Bytes that have come.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Writes a piece behind those before it, and counts its bytes among those of all files of the
    /// capture. Whether the file is whole now.
    pub(super) fn take(
        &mut self,
        chunk: &v1::ArtifactChunk,
        bytes: &mut u64,
    ) -> Result<bool, NotTaken> {
        let end = chunk.offset.saturating_add(chunk.piece_length.into());
        if end <= self.at && chunk.length > 0 {
            return Ok(false); // came before
        }
        if chunk.offset != self.at || end > chunk.length {
            return Err(NotTaken::Damaged);
        }
        if *bytes + u64::from(chunk.piece_length) > MAX_BYTES {
            return Err(NotTaken::TooLarge);
        }
        let content = open_piece(chunk)?;
        self.file.write_all_at(&content, self.at)?;
        self.hasher.update(&content);
        self.at += content.len() as u64;
        *bytes += content.len() as u64;
        Ok(self.at == chunk.length)
    }

    /// The file, if it is what it was said to be, and what was asked for.
    pub(super) fn finish(self, key: ExecutableKey, scratch: &Scratch) -> Result<File, NotTaken> {
        if ArtifactHash::from(self.hasher.finalize()) != self.hash {
            return Err(NotTaken::OtherContent);
        }
        if let ExecutableKey::BuildId(id) = key {
            let elf = Elf::open(self.file.try_clone()?, scratch)?;
            if elf.ids.gnu != Some(id) {
                return Err(NotTaken::OtherBuildId);
            }
        }
        Ok(self.file)
    }
}
