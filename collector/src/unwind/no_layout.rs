//! Why the functions that an interpreter runs are not seen: found by the catalog, put into words on
//! the wire.

use stackwire_collector_ebpf::cpython::evaluators;
use stackwire_model::Runtime;
use stackwire_unwind::Interpreter;

/// The reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLayout {
    /// What its objects look like is not known.
    #[error("{0}: not known to this version")]
    Unknown(Runtime),
    /// Likewise.
    #[error("{0} without the global interpreter lock: not known to this version")]
    FreeThreaded(Runtime),
    /// The map has no room for its layout, or its user has as many there as one may have.
    #[error("no room for another build of an interpreter")]
    NoRoom,
}

impl NoLayout {
    /// Refuses a layout that says nothing.
    pub fn of(interpreter: &Interpreter) -> Result<(), Self> {
        match interpreter {
            Interpreter::Cpython(layout) => {
                let runtime = Runtime::Cpython(layout.version);
                match layout.evaluators {
                    evaluators::UNKNOWN => Err(Self::Unknown(runtime)),
                    evaluators::FREE_THREADED => Err(Self::FreeThreaded(runtime)),
                    _ => Ok(()),
                }
            }
            Interpreter::Ruby(layout) if layout.is_unknown() => {
                Err(Self::Unknown(Runtime::Ruby(layout.version)))
            }
            Interpreter::V8(layout) if layout.is_unknown() => {
                Err(Self::Unknown(Runtime::V8(layout.version)))
            }
            Interpreter::Ruby(_) | Interpreter::V8(_) => Ok(()),
        }
    }
}
