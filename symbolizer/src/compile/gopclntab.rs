//! Go's own table of functions, files, lines and inlined calls (`.gopclntab`), which stripping
//! leaves: Go 1.16 to 1.27.
//!
//! Layouts are those of Go's `runtime/symtab.go` and `cmd/link/internal/ld/pcln.go`; where a
//! release changed one, the release is named. The header's magic tells three families apart:
//!
//! | magic | Go | entries of functions | an inlined call |
//! |---|---|---|---|
//! | `fffffffa` | 1.16, 1.17 | addresses | 20 bytes |
//! | `fffffff0` | 1.18, 1.19 | offsets from the text | 20 bytes |
//! | `fffffff1` | 1.20 on | offsets from the text | 16 bytes |

use std::cell::Cell;

use object::Endianness;
use rustc_hash::FxHashMap;
use stackwire_elf::{Bytes, Elf, ElfError};

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

/// Sections it is in; of position-independent programs built before 1.26 the second.
const SECTIONS: [&str; 2] = [".gopclntab", ".data.rel.ro.gopclntab"];
/// Index of the tree of inlined calls among a function's tables of values and of data.
const PCDATA_INL_TREE: u64 = 2;
const FUNCDATA_INL_TREE: u64 = 3;
/// Most tables of values a function has; real ones have 5.
const MAX_PCDATA: u64 = 64;
/// Longest name taken. The longest seen has 373 bytes.
const MAX_NAME: usize = 1 << 12;
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
    for index in 0..table.functions {
        // A function that does not hold together costs its own names.
        found |= table.function(index, writer).is_some();
    }
    Ok(found)
}

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Format {
    little: bool,
    pointer: usize,
}

impl Format {
    fn number(self, bytes: &[u8], at: u64, length: usize) -> Option<u64> {
        let at = usize::try_from(at).ok()?;
        let bytes = bytes.get(at..at.checked_add(length)?)?;
        let add = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
        Some(if self.little { bytes.iter().rev().fold(0, add) } else { bytes.iter().fold(0, add) })
    }

    fn u32(self, bytes: &[u8], at: u64) -> Option<u64> {
        self.number(bytes, at, 4)
    }

    fn i32(self, bytes: &[u8], at: u64) -> Option<i32> {
        Some(self.u32(bytes, at)? as u32 as i32)
    }

    fn word(self, bytes: &[u8], at: u64) -> Option<u64> {
        self.number(bytes, at, self.pointer)
    }
}

/// Which releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Family {
    Go116,
    Go118,
    Go120,
}

struct Table<'e> {
    elf: &'e Elf,
    bytes: Bytes,
    format: Format,
    family: Family,
    quantum: u64,
    functions: u64,
    /// Offsets of the parts.
    names: u64,
    units: u64,
    files: u64,
    values: u64,
    entries: u64,
    /// Where the text begins, which entries are relative to; 0 where they are addresses.
    text: u64,
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
        let (bytes, address) = (elf.content(section)?, section.address);
        let little = elf.endian == Endianness::Little;
        let pointer = if elf.is_64 { 8 } else { 4 };
        let format = Format { little, pointer };
        let family = match format.u32(&bytes, 0) {
            Some(0xffff_fffa) => Family::Go116,
            Some(0xffff_fff0) => Family::Go118,
            Some(0xffff_fff1) => Family::Go120,
            _ => return Err(GoError::Foreign),
        };
        let (quantum, size) =
            (bytes.get(6).copied().unwrap_or(0), bytes.get(7).copied().unwrap_or(0));
        if !matches!(quantum, 1 | 2 | 4) || usize::from(size) != pointer {
            return Err(GoError::Foreign);
        }
        let relocated = relocations(elf, format)?;
        // From 1.18 on with where the text begins, which is 0 from 1.26 on.
        let skip = u64::from(family >= Family::Go118);
        let word =
            |index: u64| format.word(&bytes, 8 + index * pointer as u64).ok_or(GoError::Foreign);
        let mut table = Self {
            elf,
            format,
            family,
            quantum: u64::from(quantum),
            functions: word(0)?,
            names: word(2 + skip)?,
            units: word(3 + skip)?,
            files: word(4 + skip)?,
            values: word(5 + skip)?,
            entries: word(6 + skip)?,
            text: 0,
            function_data: None,
            relocated,
            values_left: Cell::new(bytes.len().saturating_mul(8)),
            bytes: bytes.clone(),
        };
        let field = if family == Family::Go116 { pointer as u64 } else { 4 };
        let fits =
            table.functions.checked_mul(2 * field).and_then(|size| size.checked_add(table.entries));
        if fits.is_none_or(|end| end > bytes.len() as u64) {
            return Err(GoError::Foreign);
        }
        let module = table.module(address);
        if family >= Family::Go118 {
            let in_header = table
                .relocated
                .get(&(address + 8 + 2 * pointer as u64))
                .copied()
                .unwrap_or(word(2)?);
            table.text = module.map_or(in_header, |module| module.text);
            if table.text == 0 {
                return Err(GoError::NoText);
            }
        }
        table.function_data = module.and_then(|module| module.function_data);
        Ok(Some(table))
    }

    /// The module's description (`runtime.moduledata`), known by what it points at.
    fn module(&self, address: u64) -> Option<Module> {
        let pointer = self.format.pointer as u64;
        let relocated =
            self.relocated.iter().filter(|(_, target)| **target == address).map(|(&at, _)| at);
        if let Some(found) = relocated.filter_map(|at| self.module_at(address, at)).next() {
            return Some(found);
        }
        for load in self.elf.loads.iter().filter(|load| !load.code) {
            let size = load.segment.size.min(MAX_SEARCHED);
            let Ok(data) = self.elf.loaded(load.segment.address, size) else { continue };
            for at in (0..size).step_by(pointer as usize) {
                if self.format.word(&data, at) == Some(address)
                    && let Some(found) = self.module_at(address, load.segment.address + at)
                {
                    return Some(found);
                }
            }
        }
        None
    }

    fn module_at(&self, header: u64, at: u64) -> Option<Module> {
        let pointer = self.format.pointer as u64;
        let data = self.elf.loaded(at, 48 * pointer).ok()?;
        let word = |index: u64| {
            let moved = self.relocated.get(&(at + index * pointer)).copied();
            moved.or_else(|| self.format.word(&data, index * pointer))
        };
        let parts = [
            (1, self.names),
            (4, self.units),
            (7, self.files),
            (10, self.values),
            (13, self.entries),
        ];
        if !parts.iter().all(|&(index, offset)| word(index) == header.checked_add(offset)) {
            return None;
        }
        let text = word(22)?;
        let function_data = match self.family {
            Family::Go116 => None,
            Family::Go118 => word(38),
            // Words were added before it in 1.27: there it is followed by the end of what it is in.
            Family::Go120 => {
                let (start, end) = (word(43)?, word(44)?);
                if header < start && start < end && end <= header + self.bytes.len() as u64 {
                    Some(start)
                } else {
                    word(40)
                }
            }
        };
        Some(Module { text, function_data })
    }

    /// Address of a function, and offset of what is known of it.
    fn entry(&self, index: u64) -> Option<(u64, u64)> {
        let (format, bytes) = (self.format, &self.bytes);
        match self.family {
            Family::Go116 => {
                let pointer = format.pointer as u64;
                let at = self.entries + index * 2 * pointer;
                Some((format.word(bytes, at)?, format.word(bytes, at + pointer)?))
            }
            _ => {
                let at = self.entries + index * 8;
                Some((self.text.checked_add(format.u32(bytes, at)?)?, format.u32(bytes, at + 4)?))
            }
        }
    }

    /// Where a function ends: where the next begins, or the text ends.
    fn end(&self, index: u64) -> Option<u64> {
        if index + 1 < self.functions {
            return Some(self.entry(index + 1)?.0);
        }
        let at = self.entries
            + self.functions
                * 2
                * if self.family == Family::Go116 { self.format.pointer as u64 } else { 4 };
        match self.family {
            Family::Go116 => self.format.word(&self.bytes, at),
            _ => self.text.checked_add(self.format.u32(&self.bytes, at)?),
        }
    }

    /// Adds a function; `None` when it does not hold together.
    fn function(&self, index: u64, writer: &mut Writer) -> Option<()> {
        let ((start, record), end) = (self.entry(index)?, self.end(index)?);
        let is_code = self.elf.loads.iter().any(|load| {
            let (address, size) = load.memory;
            load.code && address <= start && end <= address.saturating_add(size)
        });
        if start >= end || !is_code {
            return None;
        }
        let function = self.describe(start, end, self.entries.checked_add(record)?)?;
        let name = writer.function(self.text_at(self.names, function.name)?, Kind::Gopclntab);
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
            (at, last) = (function.start + parent, index);
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

    /// Name of an inlined call, and where in the function it was made.
    fn inlined(&self, function: &Function, index: i32) -> Option<(&str, u64)> {
        let (size, name, parent) =
            if self.family == Family::Go120 { (16, 4, 8) } else { (20, 12, 16) };
        let at = u64::try_from(index).ok()? * size;
        let tree = &function.tree;
        let parent = u64::try_from(self.format.i32(tree, at + parent)?).ok()?;
        let name = self.text_at(self.names, self.format.i32(tree, at + name)?)?;
        (parent < function.end - function.start).then_some((name, parent))
    }

    fn describe(&self, start: u64, end: u64, at: u64) -> Option<Function> {
        let (format, bytes) = (self.format, &self.bytes);
        // Offsets of: name, files, lines, number of tables, unit, number of data, tables.
        let offsets: [u64; 7] = match self.family {
            Family::Go116 => {
                [0, 16, 20, 24, 28, 35, 36].map(|offset| offset + format.pointer as u64)
            }
            Family::Go118 => [4, 20, 24, 28, 32, 39, 40],
            Family::Go120 => [4, 20, 24, 28, 32, 43, 44],
        };
        let [name, files, lines, tables, unit, data, first] =
            offsets.map(|offset| at.saturating_add(offset));
        let tables = format.u32(bytes, tables)?;
        let data = format.number(bytes, data, 1)?;
        if tables > MAX_PCDATA {
            return None;
        }
        let values = |offset: u64| self.decode(offset, start, end);
        let inlined = match tables > PCDATA_INL_TREE && data > FUNCDATA_INL_TREE {
            true => values(format.u32(bytes, first + PCDATA_INL_TREE * 4)?),
            false => Vec::new(),
        };
        let calls =
            inlined.iter().map(|span| span.what as i32 + 1).max().unwrap_or(0).max(0) as u64;
        let tree = if calls > 0 {
            self.tree(first + tables * 4, calls).unwrap_or_default()
        } else {
            Vec::new()
        };
        Some(Function {
            start,
            end,
            name: format.i32(bytes, name)?,
            unit: format.u32(bytes, unit)?,
            files: values(format.u32(bytes, files)?),
            lines: values(format.u32(bytes, lines)?),
            inlined,
            tree,
        })
    }

    /// The tree of inlined calls, `calls` of them. `at`: offset of the function's list of data.
    fn tree(&self, at: u64, calls: u64) -> Option<Vec<u8>> {
        let size = calls.checked_mul(if self.family == Family::Go120 { 16 } else { 20 })?;
        let address = match self.family {
            Family::Go116 => {
                let pointer = self.format.pointer as u64;
                // Pointers, aligned by their address.
                let section =
                    self.elf.sections.iter().find(|s| SECTIONS.contains(&s.name.as_str()))?;
                let list = (section.address + at).next_multiple_of(pointer);
                let slot = list + FUNCDATA_INL_TREE * pointer;
                let moved = self.relocated.get(&slot).copied();
                moved
                    .or_else(|| self.format.word(&self.bytes, slot - section.address))
                    .filter(|&to| to != 0)?
            }
            _ => {
                let offset = self.format.u32(&self.bytes, at + FUNCDATA_INL_TREE * 4)?;
                if offset == u64::from(u32::MAX) {
                    return None;
                }
                self.function_data?.checked_add(offset)?
            }
        };
        self.elf.loaded(address, size).ok()
    }

    /// A table of values: by how much each grows, and for how long it holds.
    fn decode(&self, offset: u64, start: u64, end: u64) -> Vec<Span> {
        let mut spans = Vec::new();
        if offset == 0 {
            return spans;
        }
        let Some(mut at) = self.values.checked_add(offset) else { return spans };
        let (mut value, mut from) = (-1i32, start);
        while from < end && at < self.entries {
            let Some(delta) = self.varint(&mut at) else { break };
            if delta == 0 && !spans.is_empty() {
                break;
            }
            let delta = if delta & 1 == 1 { !(delta >> 1) } else { delta >> 1 };
            value = value.wrapping_add(delta as i32);
            let Some(length) = self.varint(&mut at).filter(|&length| length > 0) else { break };
            let to = from.saturating_add(u64::from(length) * self.quantum).min(end);
            let Some(left) = self.values_left.get().checked_sub(1) else { break };
            self.values_left.set(left);
            spans.push(Span { start: from, end: to, what: value as u32 });
            from = to;
        }
        spans
    }

    fn varint(&self, at: &mut u64) -> Option<u32> {
        let mut value = 0u32;
        for shift in (0..35).step_by(7) {
            let byte = *self.bytes.get(usize::try_from(*at).ok()?)?;
            *at += 1;
            value |= u32::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn file(&self, function: &Function, address: u64) -> Option<&str> {
        let number = u64::try_from(value(&function.files, address)?).ok()?;
        if function.unit == u64::from(u32::MAX) {
            return None;
        }
        let at = function.unit.checked_add(number)?.checked_mul(4)?.checked_add(self.units)?;
        let offset =
            self.format.u32(&self.bytes, at).filter(|&offset| offset != u64::from(u32::MAX))?;
        self.text_at(self.files, i32::try_from(offset).ok()?)
    }

    fn text_at(&self, part: u64, offset: i32) -> Option<&str> {
        let at = usize::try_from(part.checked_add(u64::try_from(offset).ok()?)?).ok()?;
        let tail = self.bytes.get(at..)?;
        let tail = &tail[..tail.len().min(MAX_NAME)];
        let end = tail.iter().position(|&byte| byte == 0)?;
        std::str::from_utf8(&tail[..end]).ok()
    }
}

#[derive(Clone, Copy)]
struct Module {
    text: u64,
    function_data: Option<u64>,
}

struct Function {
    start: u64,
    end: u64,
    name: i32,
    unit: u64,
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
fn relocations(elf: &Elf, format: Format) -> Result<FxHashMap<u64, u64>, ElfError> {
    let mut found = FxHashMap::default();
    let Some(content) = elf.section(".rela.dyn")? else { return Ok(found) };
    let (size, word) = (3 * format.pointer, format.pointer as u64);
    for entry in content.chunks_exact(size) {
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
