//! Unwind tables: from the call frame information of an ELF file to what the kernel side searches.
//!
//! [`compile`] reads ELF and DWARF and is run by the collector's unwind compiler, a process without
//! any privilege; [`Table`] is what comes out, checked again by who loads it. Knows no process and
//! no map.

mod arch;
mod compile;
mod cpython;
mod elf;
mod error;
mod interpreter;
pub mod jitdump;
mod pages;
mod ruby;
mod shared;
mod table;
mod v8;

pub use compile::{build_id, compile};
pub use error::CompileError;
pub use interpreter::Interpreter;
pub use shared::Shared;
pub use table::{MACHINE, Table, TableError, VERSION};
