//! Code of an interpreter: what names a function of it, as the interpreter keeps it in memory. It
//! is copied where a sample was taken and parsed by the symbolizer alone. Pure.

use std::fmt;

/// Whose code it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Runtime {
    /// CPython, of a version as `PY_VERSION_HEX` has it.
    Cpython(u32),
    /// Ruby; major, minor and patch version, a byte each.
    Ruby(u32),
    /// V8; major, minor and build version: 8, 8 and 16 bits.
    V8(u32),
}

impl Runtime {
    /// The kind of its frames, in OpenTelemetry's words (`profile.frame.type`).
    #[must_use]
    pub fn frame_type(self) -> &'static str {
        match self {
            Self::Cpython(_) => "cpython",
            Self::Ruby(_) => "ruby",
            Self::V8(_) => "v8js",
        }
    }

    /// Native functions, one called by the other, that run one of its own: CPython's
    /// `_PyEval_EvalFrameDefault`, Ruby's `rb_vm_exec` and `vm_exec_core`. V8's functions have each
    /// a native frame of their own.
    #[must_use]
    pub fn evaluators(self) -> usize {
        match self {
            Self::Cpython(_) | Self::V8(_) => 1,
            Self::Ruby(_) => 2,
        }
    }
}

impl fmt::Display for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            // Nothing was read of it.
            Self::Cpython(0) => f.write_str("CPython"),
            Self::Cpython(version) => {
                write!(f, "CPython {}.{}", version >> 24, version >> 16 & 0xff)
            }
            Self::Ruby(0) => f.write_str("Ruby"),
            Self::Ruby(version) => write!(f, "Ruby {}.{}", version >> 16, version >> 8 & 0xff),
            Self::V8(0) => f.write_str("V8"),
            Self::V8(version) => write!(f, "V8 {}.{}", version >> 24, version >> 16 & 0xff),
        }
    }
}

/// Most bytes of a name that are taken, of a path, and of a table of lines.
pub const MAX_NAME: usize = 512;
/// See [`MAX_NAME`].
pub const MAX_PATH: usize = 1024;
/// See [`MAX_NAME`].
pub const MAX_LINES: usize = 4096 + INDEX_LENGTH;
/// Bytes in front of Ruby's line table: how many of it are its index, little-endian.
pub const INDEX_LENGTH: usize = 4;

/// A text in the characters of an interpreter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Text {
    /// Bytes of a character, little-endian: 1 (Latin-1), 2 or 4 (Unicode); 0: it is UTF-8.
    pub width: u8,
    /// The first of them.
    pub bytes: Vec<u8>,
    /// There are more.
    pub is_cut: bool,
}

impl Text {
    /// As UTF-8; what is no character becomes U+FFFD, what is missing `…`.
    #[must_use]
    pub fn to_utf8(&self) -> String {
        let mut text = if self.width == 0 {
            String::from_utf8_lossy(&self.bytes).into_owned()
        } else {
            let characters =
                |number: u32| char::from_u32(number).unwrap_or(char::REPLACEMENT_CHARACTER);
            let number = |bytes: &[u8]| {
                bytes.iter().rev().fold(0u32, |number, &byte| number << 8 | u32::from(byte))
            };
            let width = usize::from(self.width.min(4));
            self.bytes.chunks_exact(width).map(|it| characters(number(it))).collect()
        };
        if self.is_cut {
            text.push('…');
        }
        text
    }
}

/// A function, a class body or a module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Code {
    /// Whose.
    pub runtime: Runtime,
    /// Its qualified name.
    pub name: Text,
    /// The file it was compiled from.
    pub path: Text,
    /// Line it begins in; 0: unknown.
    pub first_line: u32,
    /// Its line table, as the run-time has it; empty: it was not taken. In front of Ruby's is the
    /// length of its index, see [`INDEX_LENGTH`]; in front of V8's is its own, and behind it are
    /// the characters of the script where the function begins and that end lines in it, each but
    /// the first as the distance from the one before, in 7 bits a byte.
    pub lines: Vec<u8>,
}

impl Code {
    /// One of which nothing was taken.
    #[must_use]
    pub fn unknown(runtime: Runtime) -> Self {
        let (name, path) = (Text::default(), Text::default());
        Self { runtime, name, path, first_line: 0, lines: Vec::new() }
    }

    /// Whether it is no larger than what is taken.
    #[must_use]
    pub fn is_bounded(&self) -> bool {
        self.name.bytes.len() <= MAX_NAME
            && self.path.bytes.len() <= MAX_PATH
            && self.lines.len() <= MAX_LINES
    }

    /// Bytes it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.name.bytes.len() + self.path.bytes.len() + self.lines.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_have_characters_of_one_two_or_four_bytes() {
        let text = |width, bytes: &[u8]| Text { width, bytes: bytes.to_vec(), is_cut: false };
        assert_eq!(text(1, b"caf\xe9").to_utf8(), "café");
        assert_eq!(text(2, &[0x30, 0x04, 0x31, 0x04]).to_utf8(), "аб");
        assert_eq!(text(4, &[0x40, 0xf6, 1, 0, 0, 0xd8, 0, 0]).to_utf8(), "🙀\u{fffd}");
        assert_eq!(text(2, &[0x30]).to_utf8(), "", "half a character");
        assert_eq!(text(0, "caf\u{e9}".as_bytes()).to_utf8(), "café");
        assert_eq!(text(0, b"a\xc3").to_utf8(), "a\u{fffd}", "half a character");
        let cut = Text { is_cut: true, ..text(1, b"a") };
        assert_eq!(cut.to_utf8(), "a…");
    }

    #[test]
    fn a_runtime_is_called_by_its_minor_version() {
        assert_eq!(Runtime::Cpython(0x030e_0af0).to_string(), "CPython 3.14");
        assert_eq!(Runtime::Cpython(0).to_string(), "CPython");
        assert_eq!(Runtime::Ruby(0x0003_040a).to_string(), "Ruby 3.4");
        assert_eq!(Runtime::Ruby(0).to_string(), "Ruby");
    }
}
