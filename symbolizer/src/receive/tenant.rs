//! Who hands files over, and where what they hand over is kept: in the symbol cache, by the content
//! and by who sent it, so that it is found for nobody else. Called by `handed.rs`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use stackwire_cache::{Cache, Id, Key, Kind, Meta};

use crate::profile::ArtifactHash;

/// Where files are from that came with a capture, in reports and in the cache.
pub const HANDED_OVER: &str = "handed over by the collector";

/// Who hands files over, and where they are kept.
#[derive(Clone, Debug, Default)]
pub struct Tenant {
    /// A server's name for it; empty: it is one's own.
    pub owner: String,
    /// Where files are kept. Without it they are in temporary files for as long as the capture is.
    pub cache: Option<Arc<Cache>>,
}

impl Tenant {
    /// What a file of this sender is called: a SHA-256 of both.
    pub(super) fn id(&self, hash: &ArtifactHash) -> Id {
        let mut both = Sha256::new();
        both.update(&self.owner);
        both.update([0]);
        both.update(hash);
        Id::of_hash(both.finalize().into())
    }

    fn key(&self, hash: &ArtifactHash) -> Key {
        Key::new(self.id(hash), Kind::Handed)
    }

    /// Bytes of a file that is kept, without a look at them: each window asks.
    pub(super) fn size(&self, hash: &ArtifactHash) -> Option<u64> {
        self.cache.as_ref()?.size(&self.key(hash))
    }

    /// What is kept of a file. Where the cache cannot be used, there is nothing.
    pub(super) fn open(&self, hash: &ArtifactHash) -> Option<File> {
        Some(self.cache.as_ref()?.get(&self.key(hash)).ok()??.file)
    }

    /// Keeps a file; `None` when it is not kept here.
    pub(super) fn keep(&self, hash: &ArtifactHash, file: &File) -> Option<()> {
        let mut pending = self.cache.as_ref()?.begin().ok()?;
        copy(file, &mut pending).ok()?;
        let meta = Meta { quality: 0, origin: HANDED_OVER.to_owned() };
        pending.keep(&self.key(hash), meta).ok().map(|_| ())
    }
}

/// From the beginning, wherever others are reading.
pub fn copy(file: &File, out: &mut impl io::Write) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 18];
    let mut at = 0;
    loop {
        match file.read_at(&mut buffer, at)? {
            0 => return Ok(()),
            read => {
                out.write_all(&buffer[..read])?;
                at += read as u64;
            }
        }
    }
}
