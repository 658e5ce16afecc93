//! Content the symbolizer cannot see from where it runs, addressed by its SHA-256.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

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

/// An artifact in memory.
#[derive(Clone, Debug)]
pub struct Artifact {
    /// Its address.
    pub hash: Hash,
    /// What it is.
    pub kind: Kind,
    /// Its bytes.
    pub content: Arc<[u8]>,
}

impl Artifact {
    /// Hashes the content.
    #[must_use]
    pub fn new(kind: Kind, content: Vec<u8>) -> Self {
        Self { hash: Hash::of(&content), kind, content: content.into() }
    }
}
