//! Why an executable has no unwind table: told by the loading threads and the catalog, put into
//! words on the wire.

use std::io;

use stackwire_unwind::TableError;

use crate::helpers::broker::OpenError;
use crate::helpers::compiler::CompilerError;

/// The reason.
#[derive(Debug, thiserror::Error)]
pub enum NoTable {
    /// Its user has had their share.
    #[error("its user has as many unwind tables as one user may have")]
    OverShare,
    /// No table may be that large.
    #[error("its unwind table is too large")]
    TooLarge,
    /// All of the maps are in use.
    #[error("no room for its unwind table")]
    NoRoom,
    /// The maps cannot be written.
    #[error("its unwind table cannot be written: {0}")]
    Unwritable(#[source] io::Error),
    /// Who had it has ended.
    #[error("no process has it mapped any more")]
    Unmapped,
    /// By its path another file is found.
    #[error("its file has been replaced")]
    Replaced,
    /// The kernel told neither its build-id nor its inode.
    #[error("it cannot be told from other files at its path")]
    NoIdentity,
    /// The pid is another process's.
    #[error("its file is another user's by now")]
    OfAnotherUser,
    /// The kernel gives this process no vDSO.
    #[error("this process has none")]
    NoVdso,
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It cannot be compiled.
    #[error(transparent)]
    Compiler(#[from] CompilerError),
    /// What was compiled does not hold together.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The kernel refuses.
    #[error(transparent)]
    System(#[from] io::Error),
}

impl NoTable {
    /// Whether its file may never answer.
    pub fn hangs(&self) -> bool {
        matches!(self, Self::Open(error) if error.hangs())
    }

    /// Whether it is not its file that hangs but too many others.
    pub fn others_hang(&self) -> bool {
        matches!(self, Self::Open(OpenError::OthersHang))
    }
}
