//! Why there is no unwind table of a file.

use std::io;

use stackwire_elf::ElfError;
use stackwire_model::Machine;

/// There is no table to be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// It cannot be read.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// Of another machine.
    #[error("a program for {}, and the rules are those of {}", .0.name(), crate::table::MACHINE.name())]
    Foreign(Machine),
    /// Of a machine nobody here knows, of 32 bits or of the other byte order.
    #[error("not a 64-bit {} program", crate::table::MACHINE.name())]
    Unknown,
    /// A section that the loader needs is compressed.
    #[error("not a readable ELF file: its {0} is compressed")]
    Compressed(String),
    /// Not a jitdump, or one of another byte order.
    #[error("not a jitdump")]
    NotJitdump,
    /// A jitdump larger than is read.
    #[error("a jitdump of {0} bytes")]
    JitdumpTooLarge(u64),
    /// A jitdump that describes more than is taken.
    #[error("a jitdump of too many rules")]
    TooManyRules,
    /// A jitdump that cannot be read.
    #[error("cannot read it: {0}")]
    Read(#[from] io::Error),
    /// It is whole and has nothing.
    #[error("it has no call frame information")]
    Nothing,
}
