//! Compiles what ELF files say about code into a table: DWARF first, symbol tables where it is
//! silent.
//!
//! Its caller hands the files over; the symbolizer finds out which files those are. Hostile input
//! costs its own names only: what does not parse is left out, and [`Compiled::notes`] says so.

mod bounds;
mod debug;
mod dwarf;
mod gopclntab;
mod lines;
mod overlay;
mod paint;
mod pieces;
mod plt;
mod scopes;
mod sections;
mod symbols;
mod units;

use stackwire_elf::{Bytes, Elf, Segment};
use stackwire_model::{FileOffset, VirtAddr};

use crate::table::Writer;

/// Finds a `.dwo` by directory of the compilation and name.
pub type FindSplit<'a> = dyn Fn(&str, &str) -> Option<Elf> + Sync + 'a;

/// A `.symtab` without its file; class, byte order and sections are the executable's.
#[derive(Debug)]
pub struct SymbolTable {
    /// Its entries.
    pub entries: Bytes,
    /// The `.strtab` they refer to.
    pub strings: Bytes,
}

/// The files of one executable.
#[derive(Clone, Copy, Default)]
pub struct Files<'a> {
    /// What is mapped and run.
    pub executable: Option<&'a Elf>,
    /// What holds its DWARF, when that is another file.
    pub debug: Option<&'a Elf>,
    /// What came in place of a debug file that is too large.
    pub symbols: Option<&'a SymbolTable>,
    /// What `dwz` moved common parts to.
    pub alt: Option<&'a Elf>,
    /// The package of what `-gsplit-dwarf` kept out of it (`.dwp`).
    pub package: Option<&'a Elf>,
    /// Finds a file of one unit (`.dwo`) by directory of the compilation and name.
    pub split: Option<&'a FindSplit<'a>>,
}

impl std::fmt::Debug for Files<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { executable, debug, symbols, alt, package, split } = self;
        f.debug_struct("Files")
            .field("executable", executable)
            .field("debug", debug)
            .field("symbols", symbols)
            .field("alt", alt)
            .field("package", package)
            .field("split", &split.is_some())
            .finish()
    }
}

/// A table with what it was not possible to take into it.
#[derive(Debug)]
pub struct Compiled {
    /// The table, see `table/`.
    pub bytes: Vec<u8>,
    /// In words, for the report.
    pub notes: Vec<String>,
}

/// Compiles a table.
///
/// `code`: the lowest offset that the capture saw mapped as code. It is needed when only the debug
/// file is at hand, whose program headers have lost their offsets.
pub fn compile(files: &Files<'_>, code: Option<FileOffset>) -> Compiled {
    let mut writer = Writer::default();
    let mut notes = Vec::new();
    for segment in segments(files, code) {
        writer.segment(segment);
    }
    let symbols = symbols::read(files, &mut notes);
    if let Some(elf) = with_dwarf(files) {
        let limits = pieces::Limits::default();
        if let Err(error) = dwarf::compile(elf, files, &symbols, &mut writer, &mut notes, limits) {
            notes.push(format!("its debug information: {error}"));
        }
    }
    if let Some(elf) = files.executable {
        // Go's table is loaded, so that no stripping takes it away.
        if let Err(error) = gopclntab::compile(elf, &mut writer) {
            notes.push(format!("its Go table: {error}"));
        }
    }
    if let Some(elf) = files.executable {
        plt::write(elf, &mut writer);
        bounds::write(elf, &mut writer);
    }
    symbols.write(&mut writer);
    Compiled { bytes: writer.finish(), notes }
}

/// The file to take DWARF from.
fn with_dwarf<'a>(files: &Files<'a>) -> Option<&'a Elf> {
    [files.debug, files.executable].into_iter().flatten().find(|elf| elf.has(".debug_info"))
}

/// How offsets become addresses; nothing when the files at hand cannot tell.
pub fn segments(files: &Files<'_>, code: Option<FileOffset>) -> Vec<Segment> {
    if let Some(executable) = files.executable {
        return executable.loads.iter().map(|load| load.segment).collect();
    }
    if let Some(kernel) = files.debug.filter(|debug| debug.is_kernel()) {
        // Counted from `_text`, where its code begins.
        let code = kernel.code_range();
        return code
            .map(|code| Segment {
                offset: FileOffset(0),
                address: code.start,
                size: code.end.0 - code.start.0,
            })
            .into_iter()
            .collect();
    }
    // In debug files program headers keep addresses and lose offsets. A single segment of code is
    // where the mapping with the lowest offset was; of several, nobody knows.
    let Some(debug) = files.debug else { return Vec::new() };
    let mut loads = debug.loads.iter().filter(|load| load.code);
    match (loads.next(), loads.next(), code) {
        (Some(load), None, Some(offset)) => {
            const PAGE: u64 = 4096;
            let inside = load.segment.address.0 % PAGE;
            vec![Segment {
                offset: FileOffset(offset.0 - offset.0 % PAGE),
                address: VirtAddr(load.segment.address.0 - inside),
                size: load.memory_size.saturating_add(inside),
            }]
        }
        _ => Vec::new(),
    }
}
