//! ELF files, hostile ones included: who they are, their segments and sections, and what is in
//! these.
//!
//! [`Headers`] is the one reader of their structure, [`GoTable`] of Go's table of functions. With
//! the feature `content`, [`Elf`] reads whole sections, decompressed, and follows links to debug
//! files. Knows nothing of DWARF, symbols or unwind tables: `unwind/` and `symbols/` do, and call
//! this.

mod error;
mod exports;
mod gopclntab;
mod headers;
mod notes;
mod positioned;

#[cfg(feature = "content")]
mod content;

#[cfg(feature = "content")]
pub use content::{AltLink, Bytes, DebugLink, Elf, Scratch, Stream, WeakBytes};
pub use error::ElfError;
pub use exports::{Export, Exports};
pub use gopclntab::{GoFamily, GoFormat, GoFunction, GoTable, GoValues, gopclntab_format};
pub use headers::{Headers, Load, Section, Segment};
pub use notes::{Ids, gnu_build_id};
