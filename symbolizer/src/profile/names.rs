//! What resolving gives: functions at a place, how good that answer is, where it is from.

use std::sync::Arc;

/// What became of a location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// Names were found.
    Found {
        /// Innermost inlined function first, the function that exists last.
        lines: Arc<[Line]>,
        /// Where they came from.
        quality: Quality,
    },
    /// There is no name, and this is why.
    Missing(String),
}

/// How good an answer is, best last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Quality {
    /// The kernel's own symbol list.
    Kallsyms,
    /// A JIT's perf-map.
    PerfMap,
    /// A JIT's jitdump.
    Jitdump,
    /// The symbols an ELF file exports.
    Dynsym,
    /// An ELF symbol table.
    Symtab,
    /// Go's own table.
    Gopclntab,
    /// DWARF.
    Dwarf,
    /// The input had the names already.
    Given,
}

impl Quality {
    /// For the report.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Kallsyms => "kallsyms",
            Self::PerfMap => "perf-map",
            Self::Jitdump => "jitdump",
            Self::Dynsym => "dynsym",
            Self::Symtab => "symtab",
            Self::Gopclntab => "gopclntab",
            Self::Dwarf => "dwarf",
            Self::Given => "given",
        }
    }
}

/// A function at a place in a source file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Line {
    /// Demangled name.
    pub function: String,
    /// Source file, empty when unknown.
    pub file: String,
    /// Line, 0 when unknown.
    pub line: u32,
}

/// Where the names of an executable are from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// A file or an address; empty when there are no names.
    pub origin: String,
    /// What was looked for and not found, or is broken.
    pub notes: Vec<String>,
    /// A server was asked and did not give what it was asked for.
    pub fetch_failed: bool,
    /// How good the names were that the symbol cache had before (`Some(None)`: it had none).
    pub upgraded_from: Option<Option<Quality>>,
}
