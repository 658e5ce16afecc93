//! Functions of interpreters, by what their run-times keep of them. Pure; all of it may be of a
//! stranger.

mod cpython;
mod ruby;

use bytestring::ByteString;
use stackwire_model::profile::Line;
use stackwire_model::{Code, Runtime};

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
        if code.name.bytes.is_empty() {
            return None;
        }
        let lines = match code.runtime {
            Runtime::Cpython(version) => cpython::lines(code, version),
            Runtime::Ruby(version) => ruby::lines(code, version),
        };
        let (name, path) = (code.name.to_utf8().into(), code.path.to_utf8().into());
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
