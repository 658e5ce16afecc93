//! Which file of a process is to be opened: asked of `helpers/broker/` by whoever needs one.

use stackwire_model::UserAddr;

/// What is to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The file mapped there, which the process calls `path`.
    Mapped {
        /// Process.
        pid: u32,
        /// First address of the mapping.
        start: UserAddr,
        /// First address behind it.
        end: UserAddr,
        /// Path as the process has it.
        path: String,
    },
    /// What the process says of itself, see `helpers/broker/said.rs`.
    Said {
        /// Process.
        pid: u32,
        /// Where its context is, if it has one.
        context: Option<UserAddr>,
    },
    /// A file of the process's user, by its path in the process's root directory.
    Own {
        /// Process.
        pid: u32,
        /// Absolute path.
        path: String,
        /// Where that root is out of reach, the same path here will do.
        here: bool,
    },
}
