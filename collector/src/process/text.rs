//! Text of `/proc`: names in it may be any bytes, and must not cost the rest.

use std::io;
use std::path::Path;

/// A file of `/proc`, with what is no UTF-8 replaced.
///
/// # Errors
/// Those of reading it.
pub fn read(path: impl AsRef<Path>) -> io::Result<String> {
    let bytes = std::fs::read(path)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
