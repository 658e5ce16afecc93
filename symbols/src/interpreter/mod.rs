//! Functions of interpreters, by what their run-times keep of them. Pure; all of it may be of a
//! stranger.

mod cpython;

use stackwire_model::profile::Line;
use stackwire_model::{Code, Runtime};

/// The function of a piece of code, with the line of a position in it; none where nothing was taken
/// of its name.
#[must_use]
pub fn line(code: &Code, position: u64) -> Option<Line> {
    if code.name.bytes.is_empty() {
        return None;
    }
    let line = match code.runtime {
        Runtime::Cpython(version) => cpython::line(code, version, position),
    };
    Some(Line {
        function: code.name.to_utf8().into(),
        file: code.path.to_utf8().into(),
        line: line.unwrap_or(0),
    })
}
