//! Functions of ELF symbol tables: `.symtab`, or `.dynsym` where a file has no other.

use object::Endianness;
use object::elf::{self, Sym32, Sym64};
use object::read::elf::Sym;
use stackwire_elf::{Bytes, Elf, ElfError, Section};
use stackwire_model::VirtAddr;

use super::paint::{Span, paint};
use super::{Files, SymbolTable};
use crate::table::{Kind, NodeKey, Writer};

/// A symbol table that cannot be read.
#[derive(Debug, thiserror::Error)]
enum SymbolError {
    /// Names are in another section, which is not there.
    #[error("it has no string table")]
    NoStrings,
    /// A hostile file names one string over and over.
    #[error("its names are longer than its string table")]
    NamesTooLong,
    /// Its file cannot be read.
    #[error(transparent)]
    Elf(#[from] ElfError),
}

/// Functions by address, at each address the one that begins last before it.
#[derive(Debug, Default)]
pub struct Symbols {
    names: Vec<(String, Kind)>,
    spans: Vec<Span>,
}

/// Reads the best symbol table of the files: one with all functions makes those with fewer
/// needless.
pub fn read(files: &Files<'_>, notes: &mut Vec<String>) -> Symbols {
    let elfs = || [files.debug, files.executable].into_iter().flatten();
    let mut found = Vec::new();
    let mut unreadable = Vec::new();
    let mut take = |elf: &Elf, name: &str, kind: Kind, found: &mut Vec<Symbol>| {
        if let Err(error) = functions(elf, name, kind, found) {
            notes.push(format!("its {name}: {error}"));
        }
    };
    if let Some(elf) = elfs().find(|elf| elf.has(".symtab")) {
        take(elf, ".symtab", Kind::Symtab, &mut found);
    } else if let (Some(elf), Some(table)) = (files.executable, files.symbols)
        && let Err(error) = symbols(elf, table, Kind::Symtab, &mut found)
    {
        unreadable.push(format!("its .symtab: {error}"));
    }
    if found.is_empty() {
        // The two complete each other: the first has no function the second exports.
        for elf in elfs() {
            match elf.mini_debug_info() {
                Ok(Some(mini)) => take(&mini, ".symtab", Kind::MiniDebugInfo, &mut found),
                Ok(None) => {}
                Err(error) => unreadable.push(format!("its .gnu_debugdata: {error}")),
            }
            take(elf, ".dynsym", Kind::Dynsym, &mut found);
        }
    }
    notes.extend(unreadable);
    arrange(found)
}

impl Symbols {
    /// Number of the function at an address, and where it ends.
    #[must_use]
    pub fn at(&self, address: u64) -> Option<(u32, u64)> {
        let after = self.spans.partition_point(|span| span.start <= address);
        let span = self.spans[..after].last().filter(|span| address < span.end)?;
        Some((span.what, span.end))
    }

    /// Name of a function.
    #[must_use]
    pub fn name(&self, number: u32) -> &str {
        &self.names[number as usize].0
    }

    /// Where the next function begins.
    #[must_use]
    pub fn next(&self, address: u64) -> u64 {
        let after = self.spans.partition_point(|span| span.start <= address);
        self.spans.get(after).map_or(u64::MAX, |span| span.start)
    }

    /// Adds all functions where the table has nothing better.
    pub fn write(&self, writer: &mut Writer) {
        for span in &self.spans {
            let (name, kind) = &self.names[span.what as usize];
            let function = writer.function(name, *kind);
            let leaf = writer.node(NodeKey { function, file: None, line: 0, parent: 0 });
            writer.fallback(1, span.start, span.end, leaf);
        }
    }
}

/// A function as its table has it.
#[derive(Clone, Debug)]
struct Symbol {
    address: u64,
    size: u64,
    /// Where its section ends: as far as one without a size reaches.
    limit: u64,
    /// Global, weak, local: 0, 1, 2.
    binding: u8,
    /// Kept for programs linked long ago.
    old_version: bool,
    name: String,
    kind: Kind,
}

/// Longest name taken; C++ has some of a hundred kilobytes.
const MAX_NAME: usize = 1 << 20;

fn functions(elf: &Elf, table: &str, kind: Kind, out: &mut Vec<Symbol>) -> Result<(), SymbolError> {
    let Some(section) = elf.sections.iter().find(|section| section.name == table) else {
        return Ok(());
    };
    if !elf.has(table) {
        return Ok(());
    }
    let entries = elf.content(section)?;
    let Some(strings) = elf.sections.get(section.link as usize) else {
        return Err(SymbolError::NoStrings);
    };
    let table = SymbolTable { entries, strings: elf.content(strings)? };
    symbols(elf, &table, kind, out)
}

/// Functions of a table that numbers sections as `elf` does. Stripping removes no section with
/// code, and no section before one with code.
fn symbols(
    elf: &Elf,
    SymbolTable { entries, strings }: &SymbolTable,
    kind: Kind,
    out: &mut Vec<Symbol>,
) -> Result<(), SymbolError> {
    let size = if elf.is_64 { 24 } else { 16 };
    // Names may share their ends; all together they are not much longer than the table they are in.
    let mut text_left = strings.len().saturating_mul(2);
    for entry in entries.chunks_exact(size) {
        let Some(raw) = Raw::of(entry, elf) else { continue };
        let code = elf.sections.get(usize::from(raw.section)).filter(|section| section.is_code());
        // In an object file a symbol counts from its section.
        let moved = if elf.relocatable { code.map_or(0, |code| code.address.0) } else { 0 };
        let address = raw.address.wrapping_add(moved);
        let Some(code) = code.filter(|code| code.range().contains(&VirtAddr(address))) else {
            continue;
        };
        let is_function = matches!(raw.kind, elf::STT_FUNC | elf::STT_GNU_IFUNC)
            // Assembly often leaves the type out.
            || raw.kind == elf::STT_NOTYPE;
        if !is_function {
            continue;
        }
        let Some(name) = name(strings, raw.name) else { continue };
        let Some(left) = text_left.checked_sub(name.len()) else {
            return Err(SymbolError::NamesTooLong);
        };
        text_left = left;
        // Mapping symbols of ARM and RISC-V are marks, not functions.
        if name.is_empty() || raw.kind == elf::STT_NOTYPE && name.starts_with('$') {
            continue;
        }
        // `name@@VERSION` is what the linker takes, `name@VERSION` what it took.
        let (name, version) = name.split_once('@').unwrap_or((name, "@"));
        out.push(Symbol {
            old_version: !version.starts_with('@'),
            address,
            size: raw.size,
            limit: code.range().end.0,
            binding: match raw.binding {
                elf::STB_GLOBAL => 0,
                elf::STB_WEAK => 1,
                _ => 2,
            },
            name: name.to_owned(),
            kind,
        });
    }
    Ok(())
}

/// An entry of a symbol table.
pub struct Raw {
    name: u32,
    kind: u8,
    binding: u8,
    section: u16,
    address: u64,
    size: u64,
}

impl Raw {
    /// Of a file of this class and byte order.
    pub fn of(entry: &[u8], elf: &Elf) -> Option<Self> {
        if elf.is_64 {
            Self::read::<Sym64<Endianness>>(entry, elf.endian)
        } else {
            Self::read::<Sym32<Endianness>>(entry, elf.endian)
        }
    }

    fn read<S: Sym<Endian = Endianness>>(entry: &[u8], endian: Endianness) -> Option<Self> {
        let (entry, _) = object::pod::from_bytes::<S>(entry).ok()?;
        Some(Self {
            name: entry.st_name(endian),
            kind: entry.st_type(),
            binding: entry.st_bind(),
            section: entry.st_shndx(endian),
            address: entry.st_value(endian).into(),
            size: entry.st_size(endian).into(),
        })
    }
}

/// Name of an entry, without the version some linkers put there.
pub fn dynamic_name<'s>(strings: &'s Bytes, raw: &Raw) -> Option<&'s str> {
    let name = name(strings, raw.name)?.split('@').next()?;
    (!name.is_empty()).then_some(name)
}

fn name(strings: &Bytes, at: u32) -> Option<&str> {
    let tail = strings.get(at as usize..)?;
    let tail = &tail[..tail.len().min(MAX_NAME)];
    let end = tail.iter().position(|&byte| byte == 0)?;
    std::str::from_utf8(&tail[..end]).ok()
}

fn arrange(mut found: Vec<Symbol>) -> Symbols {
    // When several begin together, `paint` shows the last one. The order is perf's choice: one with
    // a size first, then global before weak before local, then fewer underscores in front. The rest
    // only makes the choice the same each time.
    found.sort_by(|a, b| {
        let rank = |s: &Symbol| {
            let underscores = s.name.bytes().take_while(|&byte| byte == b'_').count();
            (s.size == 0, s.old_version, s.binding, underscores, s.name.len())
        };
        a.address
            .cmp(&b.address)
            .then_with(|| rank(b).cmp(&rank(a)))
            .then_with(|| b.name.cmp(&a.name))
    });
    let mut spans = Vec::with_capacity(found.len());
    let mut next = u64::MAX;
    for (index, symbol) in found.iter().enumerate().rev() {
        if let Some(after) = found.get(index + 1).filter(|after| after.address != symbol.address) {
            next = after.address;
        }
        let end = match symbol.size {
            0 => next.min(symbol.limit),
            size => symbol.address.saturating_add(size).min(symbol.limit),
        };
        spans.push(Span { start: symbol.address, end, what: index as u32 });
    }
    spans.reverse();
    let names = found.into_iter().map(|symbol| (symbol.name, symbol.kind)).collect();
    Symbols { names, spans: paint(&spans) }
}

/// Code sections of a file, for callers that must tell code from what is not.
pub fn code(elf: &Elf) -> Vec<std::ops::Range<VirtAddr>> {
    elf.sections.iter().filter(|section| section.is_code()).map(Section::range).collect()
}
