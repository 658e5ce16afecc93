//! Bytes that do not change: owned, or a private file of ours mapped into memory.
//!
//! Only files nobody else can cut short are mapped (the cache's, and unlinked ones): a file cut
//! short by its owner while mapped ends the reader with SIGBUS. Everything else is read.

#![allow(unsafe_code, reason = "mmap")]

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::sync::{Arc, Weak};

/// Immutable bytes; clones share them.
#[derive(Clone)]
pub struct Bytes(Arc<Inner>);

/// Bytes that may be gone.
#[derive(Clone, Debug)]
pub struct WeakBytes(Weak<Inner>);

impl WeakBytes {
    /// The bytes, if somebody still has them.
    #[must_use]
    pub fn upgrade(&self) -> Option<Bytes> {
        self.0.upgrade().map(Bytes)
    }
}

#[derive(Debug)]
enum Inner {
    Owned(Vec<u8>),
    Mapped(memmap2::Mmap),
}

impl Bytes {
    /// Maps a file that is ours alone.
    ///
    /// # Errors
    /// Those of mmap.
    pub fn map(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() == 0 {
            return Ok(Self::default());
        }
        // SAFETY: callers pass files of the cache (mode 0600 in a directory of mode 0700, replaced
        // by rename and never written in place) or unlinked temporary ones: no one shortens or
        // changes them.
        let map = unsafe { memmap2::Mmap::map(file)? };
        Ok(Self(Arc::new(Inner::Mapped(map))))
    }

    /// The same, without keeping them.
    #[must_use]
    pub fn downgrade(&self) -> WeakBytes {
        WeakBytes(Arc::downgrade(&self.0))
    }

    /// Whether they are a mapped file: the system can give up their memory and read it again.
    #[must_use]
    pub fn are_mapped(&self) -> bool {
        matches!(&*self.0, Inner::Mapped(_))
    }

    /// Gives memory of a mapped file back to the system, which reads it again if it must.
    pub fn forget_pages(&self) {
        if let Inner::Mapped(map) = &*self.0 {
            // SAFETY: the mapping is private, read-only and of a file: dropped pages are read from
            // it again.
            let _ = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }
}

impl Default for Bytes {
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Inner::Owned(bytes)))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &*self.0 {
            Inner::Owned(bytes) => bytes,
            Inner::Mapped(map) => map,
        }
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}
