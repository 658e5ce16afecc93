//! Names of captures and windows, and of their files.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::profile::hex;

/// Chosen by a collector when it starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct CaptureId(pub [u8; 16]);

/// A stretch of a capture: the profile made of it and the file it is in have its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct WindowId {
    pub capture: CaptureId,
    pub number: u64,
}

impl CaptureId {
    /// From the wire; `None` when it has not 16 bytes.
    pub(super) fn of(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Display for CaptureId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for CaptureId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for WindowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:06}", self.capture, self.number)
    }
}

/// Extension of captures, whoever keeps them.
pub(super) const EXTENSION: &str = "stackwire";

impl WindowId {
    /// Where its log is.
    pub(super) fn log(self, directory: &Path) -> PathBuf {
        directory.join(format!("{self}.{EXTENSION}"))
    }

    /// The window a file is of, by the name without its extension: 32 hex digits, a dash, six
    /// digits or more.
    pub(super) fn of_file(path: &Path) -> Option<Self> {
        let (capture, number) = path.file_stem()?.to_str()?.split_once('-')?;
        if capture.len() != 32 || number.len() < 6 || !capture.is_ascii() {
            return None;
        }
        let mut id = [0; 16];
        for (byte, digits) in id.iter_mut().zip(capture.as_bytes().chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        let found = Self { capture: CaptureId(id), number: number.parse().ok()? };
        // Not `+1`, not capitals: one window has one name.
        (path.file_stem()?.to_str()? == found.to_string()).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_one_name() {
        let window = WindowId { capture: CaptureId([0xab; 16]), number: 1_234_567 };
        let path = window.log(Path::new("/x"));
        assert_eq!(WindowId::of_file(&path), Some(window));
        for other in ["AB", "a", "+", "é"] {
            let name = format!("{}{}-000001.stackwire", other, "ab".repeat(16 - other.len() / 2));
            assert_ne!(
                WindowId::of_file(Path::new(&name)).map(|w| w.log(Path::new(""))),
                Some(name.into())
            );
        }
        assert_eq!(WindowId::of_file(Path::new("lock")), None);
    }
}
