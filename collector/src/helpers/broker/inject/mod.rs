//! Switches the perf trampoline of a Python process on, and off again: CPython 3.12 and later write
//! the names of their functions to a perf map then.
//!
//! The main thread of the process is made to run some Python (`text.rs`): by Python 3.14's
//! interface for debuggers (`remote.rs`), and before that by calls that a thread is made to do
//! (`page.rs`). Where what is in a process the broker is told; it parses no file. All of it happens
//! in a process of its own for each Python process (`keeper.rs`).

mod keeper;
mod page;
mod process;
mod remote;
mod target;
mod text;
mod thread;

pub(super) use self::keeper::Keepers;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::helpers::interpreter::{Head, RemoteOffsets, StateOffsets};

/// A function of a Python process.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Function {
    /// Its address.
    pub at: u64,
    /// How it begins in its file, by which it is known in memory.
    pub head: Head,
}

/// What is where in a Python process.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Places {
    /// `Py_AddPendingCall`.
    pub add_pending_call: Function,
    /// `PyRun_SimpleString`.
    pub run_string: Function,
    /// `mmap`.
    pub map: Function,
    /// `munmap`.
    pub unmap: Function,
    /// The C library's end of a signal handler.
    pub restorer: Function,
    /// `_PyEval_EvalFrameDefault`, in which a thread may be interrupted.
    pub evaluator: u64,
    /// The first address behind it.
    pub evaluator_end: u64,
    /// `_PyRuntime`.
    pub runtime: u64,
    /// What is where in it.
    pub state: StateOffsets,
    /// Likewise, of the interface for debuggers.
    pub remote: RemoteOffsets,
}
