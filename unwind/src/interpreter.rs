//! Where the interpreter in a file keeps the frames of the functions it runs, as a table has it.

use stackwire_collector_ebpf::{cpython, ruby, v8};
use zerocopy::{FromBytes, IntoBytes};

/// An interpreter and its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpreter {
    /// CPython.
    Cpython(cpython::Layout),
    /// Ruby.
    Ruby(ruby::Layout),
    /// V8.
    V8(v8::Layout),
}

impl Interpreter {
    /// As bytes: which it is, and its layout.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let (kind, layout) = match &self {
            Self::Cpython(layout) => (CPYTHON, layout.as_bytes()),
            Self::Ruby(layout) => (RUBY, layout.as_bytes()),
            Self::V8(layout) => (V8, layout.as_bytes()),
        };
        [&[kind], layout].concat()
    }

    /// From bytes; none where they are no layout that the kernel side may have.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let (&kind, layout) = bytes.split_first()?;
        match kind {
            CPYTHON => {
                let layout = cpython::Layout::read_from_bytes(layout).ok()?;
                layout.is_sound().then_some(Self::Cpython(layout))
            }
            RUBY => {
                let layout = ruby::Layout::read_from_bytes(layout).ok()?;
                layout.is_sound().then_some(Self::Ruby(layout))
            }
            V8 => {
                let layout = v8::Layout::read_from_bytes(layout).ok()?;
                layout.is_sound().then_some(Self::V8(layout))
            }
            _ => None,
        }
    }
}

const CPYTHON: u8 = 1;
const RUBY: u8 = 2;
const V8: u8 = 3;
