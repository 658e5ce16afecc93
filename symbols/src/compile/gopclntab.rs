//! Names from Go's own table (`.gopclntab`): functions, files, lines and inlined calls. Stripping
//! does not remove this table. Go 1.16 to 1.27.
//!
//! The crate `elf` reads the table. This file finds what lies outside of the table: where the text
//! begins, and the trees of inlined calls. Layouts are those of Go's `runtime/symtab.go` and
//! `cmd/link/internal/ld/pcln.go`; where a release changed one, the release is named.

use std::cell::Cell;

use object::Endianness;
use rustc_hash::FxHashMap;
use stackwire_elf::{Bytes, Elf, ElfError, GoFamily, GoFormat, GoFunction, GoTable, GoValues};
use stackwire_model::VirtAddr;

use super::paint::Span;
use crate::table::{Kind, NodeKey, Writer};

/// A table that says nothing.
#[derive(Debug, thiserror::Error)]
pub enum GoError {
    /// Of a Go that is too old, or of none.
    #[error("its .gopclntab is not one of Go 1.16 or newer")]
    Foreign,
    /// Its functions are nowhere.
    #[error("where its text begins is nowhere said")]
    NoText,
    /// Its file cannot be read.
    #[error(transparent)]
    Elf(#[from] ElfError),
}

/// Sections that hold the table. Position-independent programs built before 1.26 have the second.
const SECTIONS: [&str; 2] = [".gopclntab", ".data.rel.ro.gopclntab"];
/// Index of the tree of inlined calls among a function's tables of values and of data.
const PCDATA_INL_TREE: u64 = 2;
const FUNCDATA_INL_TREE: u64 = 3;
/// Deepest chain of inlined calls; the deepest seen has 6.
const MAX_INLINED: usize = 256;
/// Most of a data segment searched for the module's description.
const MAX_SEARCHED: u64 = 512 << 20;

/// Adds a Go program's functions to a table; whether there were any.
///
/// # Errors
/// See [`GoError`].
pub fn compile(elf: &Elf, writer: &mut Writer) -> Result<bool, GoError> {
    let Some(table) = Table::load(elf)? else { return Ok(false) };
    let mut found = false;
    for function in table.go.functions() {
        // A function that does not hold together costs its own names.
        found |= table.add(&function, writer).is_some();
    }
    Ok(found)
}

struct Table<'e> {
    elf: &'e Elf,
    go: GoTable<Bytes>,
    /// Of its section.
    address: u64,
    /// Where data of functions begins, which offsets of trees are relative to.
    function_data: Option<u64>,
    relocated: FxHashMap<u64, u64>,
    /// Values that may still be decoded: functions share tables, and a hostile file shares one with
    /// all.
    values_left: Cell<usize>,
}

impl<'e> Table<'e> {
    fn load(elf: &'e Elf) -> Result<Option<Self>, GoError> {
        let Some(section) =
            elf.sections.iter().find(|s| SECTIONS.contains(&s.name.as_str()) && elf.has(&s.name))
        else {
            return Ok(None);
        };
        let (bytes, address) = (elf.content(section)?, section.address.0);
        let values_left = Cell::new(bytes.len().saturating_mul(8));
        let go = GoTable::parse(bytes).ok_or(GoError::Foreign)?;
        let little = elf.endian == Endianness::Little;
        let format = GoFormat { little, pointer: if elf.is_64 { 8 } else { 4 } };
        if go.format() != format {
            return Err(GoError::Foreign);
        }
        let relocated = relocations(elf, format)?;
        let mut table = Self { elf, go, address, function_data: None, relocated, values_left };
        let module = table.module(address);
        if table.go.family() > GoFamily::Go116 {
            let (at, in_file) = table.go.text_in_header();
            let in_header =
                table.relocated.get(&address.wrapping_add(at)).copied().unwrap_or(in_file);
            let text = module.map_or(in_header, |module| module.text);
            if text == 0 {
                return Err(GoError::NoText);
            }
            table.go.set_text(text);
        }
        table.function_data = module.and_then(|module| module.function_data);
        Ok(Some(table))
    }

    /// The module's description (`runtime.moduledata`), known by what it points at.
    fn module(&self, address: u64) -> Option<Module> {
        let (format, pointer) = (self.go.format(), self.go.format().pointer);
        let relocated =
            self.relocated.iter().filter(|(_, target)| **target == address).map(|(&at, _)| at);
        if let Some(found) = relocated.filter_map(|at| self.module_at(address, at)).next() {
            return Some(found);
        }
        for load in self.elf.loads.iter().filter(|load| !load.code) {
            let size = load.segment.size.min(MAX_SEARCHED);
            let Ok(data) = self.elf.loaded(load.segment.address, size) else { continue };
            for at in (0..size).step_by(pointer as usize) {
                if format.word(&data, at) == Some(address)
                    && let Some(found) = self.module_at(address, load.segment.address.0 + at)
                {
                    return Some(found);
                }
            }
        }
        None
    }

    fn module_at(&self, header: u64, at: u64) -> Option<Module> {
        let (format, pointer) = (self.go.format(), self.go.format().pointer);
        let data = self.elf.loaded(VirtAddr(at), 48 * pointer).ok()?;
        let word = |index: u64| {
            let moved = self.relocated.get(&at.wrapping_add(index * pointer)).copied();
            moved.or_else(|| format.word(&data, index * pointer))
        };
        let points = |(index, offset)| word(index) == header.checked_add(offset);
        if !self.go.parts().into_iter().all(points) {
            return None;
        }
        let text = word(22)?;
        let function_data = match self.go.family() {
            GoFamily::Go116 => None,
            GoFamily::Go118 => word(38),
            // Words were added before it in 1.27: there it is followed by the end of what it is in.
            GoFamily::Go120 => {
                let (start, end) = (word(43)?, word(44)?);
                if header < start && start < end && end - header <= self.go.bytes().len() as u64 {
                    Some(start)
                } else {
                    word(40)
                }
            }
        };
        Some(Module { text, function_data })
    }

    /// Adds a function; `None` when it does not hold together.
    fn add(&self, found: &GoFunction, writer: &mut Writer) -> Option<()> {
        let GoFunction { start, end, .. } = *found;
        let is_code = self.elf.loads.iter().any(|load| {
            let memory_end = load.segment.address.saturating_add(load.memory_size);
            load.code && load.segment.address.0 <= start && end <= memory_end.0
        });
        if !is_code {
            return None;
        }
        let function = self.describe(found);
        let name = writer.function(text(self.go.name(found)?)?, Kind::Gopclntab);
        let (mut f, mut l, mut i) = (0, 0, 0);
        let mut at = start;
        while at < end {
            while function.files.get(f).is_some_and(|span| span.end <= at) {
                f += 1;
            }
            while function.lines.get(l).is_some_and(|span| span.end <= at) {
                l += 1;
            }
            while function.inlined.get(i).is_some_and(|span| span.end <= at) {
                i += 1;
            }
            let ends = [function.files.get(f), function.lines.get(l), function.inlined.get(i)];
            let to = ends.into_iter().flatten().map(|span| span.end).min().unwrap_or(end);
            let leaf = self.chain(&function, at, name, writer);
            writer.fallback(0, at, to, leaf);
            at = to;
        }
        Some(())
    }

    /// The node of an address: the calls inlined there, outermost made first.
    fn chain(&self, function: &Function, address: u64, name: u32, writer: &mut Writer) -> u32 {
        // Innermost first: which inlined call, and an address with the file and line in it.
        let mut calls = Vec::new();
        let (mut at, mut last) = (address, i32::MAX);
        while let Some(index) =
            value(&function.inlined, at).filter(|&index| index >= 0 && index < last)
        {
            let Some((name, parent)) = self.inlined(function, index) else { break };
            if calls.len() >= MAX_INLINED {
                break;
            }
            calls.push((name, at));
            (at, last) = (function.found.start + parent, index);
        }
        let place = |at: u64, writer: &mut Writer| {
            let file = self.file(function, at).map(|path| writer.file(path));
            let line =
                value(&function.lines, at).map_or(0, |line| u32::try_from(line).unwrap_or(0));
            // Behind a function's code, up to where the next begins, there is no file and no line.
            file.map_or((None, 0), |file| (Some(file), line))
        };
        let (file, line) = place(at, writer);
        let mut node = writer.node(NodeKey { function: name, file, line, parent: 0 });
        for (name, at) in calls.into_iter().rev() {
            let inner = writer.function(name, Kind::Gopclntab);
            let (file, line) = place(at, writer);
            node = writer.node(NodeKey { function: inner, file, line, parent: node });
        }
        node
    }

    /// Bytes of an inlined call, and where in it are its name and where it was made.
    fn call(&self) -> (u64, u64, u64) {
        if self.go.family() == GoFamily::Go120 { (16, 4, 8) } else { (20, 12, 16) }
    }

    /// Name of an inlined call, and where in the function it was made.
    fn inlined(&self, function: &Function, index: i32) -> Option<(&str, u64)> {
        let (size, name, parent) = self.call();
        let at = u64::try_from(index).ok()? * size;
        let number = |at| self.go.format().u32(&function.tree, at);
        let (parent, name) = (number(at + parent)?, number(at + name)?);
        let name = text(self.go.name_at(name)?)?;
        (parent < function.found.end - function.found.start).then_some((name, parent))
    }

    fn describe(&self, found: &GoFunction) -> Function {
        let inlined = self.decode(self.go.more(found, PCDATA_INL_TREE));
        let calls =
            inlined.iter().map(|span| (span.what as i32).saturating_add(1)).max().unwrap_or(0);
        let calls = calls.max(0) as u64;
        let tree = (calls > 0).then(|| self.tree(found, calls)).flatten().unwrap_or_default();
        Function {
            found: *found,
            files: self.decode(self.go.files(found)),
            lines: self.decode(self.go.lines(found)),
            inlined,
            tree,
        }
    }

    /// The tree of inlined calls, `calls` of them.
    fn tree(&self, found: &GoFunction, calls: u64) -> Option<Vec<u8>> {
        let at = self.go.data(found, FUNCDATA_INL_TREE, self.address)?;
        let (format, bytes) = (self.go.format(), self.go.bytes());
        let address = if self.go.family() == GoFamily::Go116 {
            let moved = self.relocated.get(&self.address.wrapping_add(at)).copied();
            moved.or_else(|| format.word(bytes, at)).filter(|&to| to != 0)?
        } else {
            let offset = format.u32(bytes, at).filter(|&offset| offset != u64::from(u32::MAX))?;
            self.function_data?.checked_add(offset)?
        };
        // Functions may share trees, too.
        let left = self.values_left.get().checked_sub(calls as usize)?;
        self.values_left.set(left);
        self.elf.loaded(VirtAddr(address), calls.checked_mul(self.call().0)?).ok()
    }

    fn decode(&self, values: Option<GoValues<'_>>) -> Vec<Span> {
        let left = self.values_left.get();
        let values = values.into_iter().flatten().take(left);
        let span = |(start, end, value)| Span { start, end, what: value as u32 };
        let spans: Vec<Span> = values.map(span).collect();
        self.values_left.set(left - spans.len());
        spans
    }

    fn file(&self, function: &Function, address: u64) -> Option<&str> {
        let number = u64::try_from(value(&function.files, address)?).ok()?;
        text(self.go.file(&function.found, number)?)
    }
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

#[derive(Clone, Copy)]
struct Module {
    text: u64,
    function_data: Option<u64>,
}

struct Function {
    found: GoFunction,
    files: Vec<Span>,
    lines: Vec<Span>,
    inlined: Vec<Span>,
    tree: Vec<u8>,
}

/// The value that holds at an address.
fn value(spans: &[Span], address: u64) -> Option<i32> {
    let after = spans.partition_point(|span| span.start <= address);
    let span = spans[..after].last().filter(|span| address < span.end)?;
    Some(span.what as i32)
}

/// Slots of a position-independent program that hold an address once it is loaded, with what is put
/// there: tables that keep the addend beside the slot only (RELA); the others have it in the slot.
fn relocations(elf: &Elf, format: GoFormat) -> Result<FxHashMap<u64, u64>, ElfError> {
    let mut found = FxHashMap::default();
    let Some(content) = elf.section(".rela.dyn")? else { return Ok(found) };
    let word = format.pointer;
    for entry in content.chunks_exact(3 * word as usize) {
        let number = |index: u64| format.word(entry, index * word).unwrap_or(0);
        let (slot, info, addend) = (number(0), number(1), number(2));
        // Relative relocations name no symbol, on every machine; what else does not is not of this
        // kind either, and its slots are none of ours.
        let symbol = if elf.is_64 { info >> 32 } else { info >> 8 };
        if symbol == 0 {
            found.insert(slot, addend);
        }
    }
    Ok(found)
}
