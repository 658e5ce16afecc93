//! ELF files, hostile ones included: who they are, their segments and sections, and what is in
//! these.
//!
//! [`Headers`] is the one reader of their structure. With the feature `content`, [`Elf`] reads
//! whole sections, decompressed, and follows links to debug files. Knows nothing of DWARF, symbols
//! or unwind tables: `unwind/` and the symbolizer's `compile/` do, and call this.

mod error;
mod headers;
mod notes;
mod positioned;

#[cfg(feature = "content")]
mod content;

#[cfg(feature = "content")]
pub use content::{AltLink, Bytes, DebugLink, Elf, Scratch};
pub use error::ElfError;
pub use headers::{Headers, Load, Section, Segment};
pub use notes::{Ids, gnu_build_id};
