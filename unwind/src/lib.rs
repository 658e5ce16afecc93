//! Unwind tables: from the call frame information of an ELF file to what the kernel side searches.
//!
//! [`compile`] reads ELF and DWARF and is run by the collector's unwind compiler, a process without any privilege;
//! [`Table`] is what comes out, checked again by who loads it. Knows no process and no map.

mod code;
mod compile;
mod elf;
mod expression;
mod go;
mod go_stacks;
mod pages;
mod shared;
mod startup;
mod table;
mod v8;

pub use compile::{CompileError, build_id, compile};
pub use shared::Shared;
pub use table::{Table, TableError, VERSION};
