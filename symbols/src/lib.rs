//! Files → names: what ELF files, the kernel and JIT compilers say of their code.
//!
//! `compile/` makes a table of an executable's files, `table/` looks addresses up in it,
//! `demangle/` makes names readable, `kallsyms.rs` and `jit/` read what the kernel and compilers at
//! run time write, `interpreter/` what interpreters keep. Works on what it is handed: it chooses no
//! file, asks no network and has no policy. The symbolizer's `resolve/` does that and calls it.

pub mod compile;
pub mod demangle;
#[cfg(feature = "fuzzing")]
pub mod fuzz;
pub mod interpreter;
pub mod jit;
pub mod kallsyms;
pub mod table;
