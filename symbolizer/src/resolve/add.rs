//! `stackwire cache add`: a file of the user's own into the cache, where the ladder finds it.

use std::io;
use std::path::Path;

use stackwire_cache::{Cache, CacheError, Key, Kind as CacheKind, Meta};
use stackwire_elf::{ElfError, Headers};

use super::file::{self, FileError};

/// Why a file cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// Paths are kept as text.
    #[error("its path is not UTF-8")]
    NotUtf8,
    /// It cannot be opened.
    #[error(transparent)]
    File(#[from] FileError),
    /// It is not ELF.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// It would never be found.
    #[error("it has no build-id, so nothing could find it again")]
    NoBuildId,
    /// It cannot be copied.
    #[error(transparent)]
    Copy(#[from] io::Error),
    /// The cache does not take it.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// Adds an ELF file to a cache, as the kind it is.
///
/// # Errors
/// See [`AddError`].
pub fn add(path: &Path, cache: &Cache) -> Result<Key, AddError> {
    let name = path.to_str().ok_or(AddError::NotUtf8)?;
    let mut file = file::open_regular(name)?;
    let elf = Headers::read(&file)?;
    elf.check_all()?;
    let id = elf.ids.gnu.ok_or(AddError::NoBuildId)?;
    // In a debug file what is loaded has no content.
    let kind = if elf.has(".text") { CacheKind::Executable } else { CacheKind::Debuginfo };
    let key = Key::new(id.into(), kind);
    let mut pending = cache.begin()?;
    io::copy(&mut file, &mut pending)?;
    let meta = Meta { quality: 0, origin: name.to_owned() };
    pending.keep(&key, meta)?;
    Ok(key)
}
