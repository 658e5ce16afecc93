//! `stackwire cache add`: a file of the user's own into the cache, where the ladder finds it.

use std::path::Path;

use stackwire_cache::{Cache, Key, Kind as CacheKind, Meta};

use super::{file, ladder::key};
use crate::elf::{Elf, Scratch};

/// Adds an ELF file to a cache, as the kind it is.
///
/// # Errors
/// In words, when it is no ELF file or has no build-id.
pub fn add(path: &Path, cache: &Cache) -> Result<Key, String> {
    let name = path.to_str().ok_or("its path is not UTF-8")?;
    let mut file = file::open_regular(name)?;
    let copy = file.try_clone().map_err(|error| error.to_string())?;
    let elf = Elf::open(copy, &Scratch::default()).map_err(|error| error.to_string())?;
    let id = elf.ids.gnu.as_deref().ok_or("it has no build-id, so nothing could find it again")?;
    // In a debug file what is loaded has no content.
    let kind = if elf.has(".text") { CacheKind::Executable } else { CacheKind::Debuginfo };
    let key = key(id, kind).ok_or("its build-id has an impossible length")?;
    let mut pending = cache.begin().map_err(|error| error.to_string())?;
    std::io::copy(&mut file, &mut pending).map_err(|error| error.to_string())?;
    let meta = Meta { quality: 0, origin: name.to_owned() };
    pending.keep(&key, meta).map_err(|error| error.to_string())?;
    Ok(key)
}
