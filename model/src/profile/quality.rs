//! How good names are.

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
    /// What an interpreter keeps of its functions.
    Interpreter,
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
            Self::Interpreter => "interpreter",
            Self::Given => "given",
        }
    }
}
