//! Why an ELF file cannot be used, in words for the report.

use std::io;

use stackwire_model::{FileOffset, VirtAddr};

/// The reason.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElfError {
    /// No ELF file at all.
    #[error("not an ELF file")]
    NotElf,
    /// Its structure does not hold together.
    #[error("not a readable ELF file: {0}")]
    Broken(#[from] object::read::Error),
    /// A section is not where its header says.
    #[error(
        "not a readable ELF file: its {name} has {size} bytes at {offset:#x}, the file {length}"
    )]
    OutsideFile {
        /// The section.
        name: String,
        /// Bytes it has, as its header says.
        size: u64,
        /// Where it begins.
        offset: FileOffset,
        /// Bytes of the file.
        length: u64,
    },
    /// What is loaded at an address is not in the file.
    #[error("not a readable ELF file: {size} bytes at {address:#x} are not in it")]
    NotLoaded {
        /// First address.
        address: VirtAddr,
        /// Bytes.
        size: u64,
    },
    /// A section ends before its size says.
    #[error("not a readable ELF file: a section of {size} bytes ends after {found}")]
    Cut {
        /// Bytes it has, as its header says.
        size: u64,
        /// Bytes there are.
        found: u64,
    },
    /// It declares more sections than any real file has.
    #[error("it declares {0} sections")]
    TooManySections(usize),
    /// Likewise.
    #[error("it declares {0} segments")]
    TooManySegments(usize),
    /// A section is larger than is read.
    #[error("its section {name} has {size} bytes")]
    SectionTooLarge {
        /// The section.
        name: String,
        /// Bytes.
        size: u64,
    },
    /// A compressed section declares more than its bytes can become.
    #[error("its section {name} declares {size} bytes, which {compressed} cannot hold")]
    Expands {
        /// The section.
        name: String,
        /// Bytes it is said to become.
        size: u64,
        /// Bytes it has.
        compressed: u64,
    },
    /// A section is compressed in a way nobody knows.
    #[error("not a readable ELF file: compression of unknown kind {0}")]
    UnknownCompression(u32),
    /// The file inside it does not decompress.
    #[error("not a readable ELF file: xz: {0}")]
    Xz(#[source] io::Error),
    /// The file inside it is larger than is read.
    #[error("it holds more than {0} bytes")]
    InnerTooLarge(u64),
    /// A section with relocations is larger than is adjusted.
    #[error("a section of {0} bytes with relocations")]
    RelocatedTooLarge(usize),
    /// Relocations refer to symbols that are not there.
    #[error("not a readable ELF file: its relocations have no symbols")]
    NoRelocationSymbols,
    /// An object file of another machine than is adjusted.
    #[error("not a readable ELF file: an object file of this kind is not read")]
    ForeignObject,
    /// The file cannot be read.
    #[error("cannot read it: {0}")]
    Read(#[from] io::Error),
}
