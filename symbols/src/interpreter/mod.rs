//! Functions of interpreters, by what their run-times keep of them. Pure; all of it may be of a
//! stranger.

mod cpython;
mod ruby;
mod v8;

use bytestring::ByteString;
use stackwire_model::profile::Line;
use stackwire_model::{Code, Runtime};

/// What functions of V8 are called that have no name, as V8's own profiles call them.
const ANONYMOUS: &str = "(anonymous)";

/// A function, read.
#[derive(Debug)]
pub struct Function {
    name: ByteString,
    path: ByteString,
    /// Where each stretch of its instructions ends, in units from the first, and its line.
    lines: Vec<(u64, Option<u32>)>,
}

impl Function {
    /// Reads what was taken of a function; none where its name was not.
    #[must_use]
    pub fn read(code: &Code) -> Option<Self> {
        let name = match code.runtime {
            _ if !code.name.bytes.is_empty() => code.name.to_utf8().into(),
            // It was taken, and is empty.
            Runtime::V8(1..) => ANONYMOUS.into(),
            _ => return None,
        };
        let lines = match code.runtime {
            Runtime::Cpython(version) => cpython::lines(code, version),
            Runtime::Ruby(version) => ruby::lines(code, version),
            Runtime::V8(_) => v8::lines(code),
        };
        let path = code.path.to_utf8().into();
        Some(Self { name, path, lines })
    }

    /// The function, with the line of a position in it; 0: it has none.
    #[must_use]
    pub fn at(&self, position: u64) -> Line {
        let next = self.lines.partition_point(|&(end, _)| end <= position);
        let line = self.lines.get(next).and_then(|&(_, line)| line).unwrap_or(0);
        Line { function: self.name.clone(), file: self.path.clone(), line }
    }
}
