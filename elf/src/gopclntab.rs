//! Go's own table of functions (`.gopclntab`), which stripping leaves: Go 1.16 to 1.27. Pure.
//!
//! Says where functions are, what they are called, and where their values are: stack pointer, file,
//! line, inlined call, each by address. Names are made of it by `symbols/`, unwind rules by
//! `unwind/`. Layouts are those of Go's `runtime/symtab.go` and `cmd/link/internal/ld/pcln.go`. The
//! header's magic tells three families apart:
//!
//! | magic | Go | entries of functions |
//! |---|---|---|
//! | `fffffffa` | 1.16, 1.17 | addresses |
//! | `fffffff0` | 1.18, 1.19 | offsets from the text |
//! | `fffffff1` | 1.20 on | offsets from the text |

use std::ops::Deref;

/// Longest name taken. The longest seen has 373 bytes.
const MAX_NAME: usize = 1 << 12;
/// Most tables of values a function has; real ones have 5.
const MAX_PCDATA: u64 = 64;

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GoFormat {
    /// Byte order.
    pub little: bool,
    /// Bytes of a pointer: 4 or 8.
    pub pointer: u64,
}

impl GoFormat {
    /// A number of so many bytes.
    #[must_use]
    pub fn number(self, bytes: &[u8], at: u64, length: usize) -> Option<u64> {
        let at = usize::try_from(at).ok()?;
        let bytes = bytes.get(at..at.checked_add(length)?)?;
        let add = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
        Some(if self.little { bytes.iter().rev().fold(0, add) } else { bytes.iter().fold(0, add) })
    }

    /// One of 4 bytes.
    #[must_use]
    pub fn u32(self, bytes: &[u8], at: u64) -> Option<u64> {
        self.number(bytes, at, 4)
    }

    /// A pointer.
    #[must_use]
    pub fn word(self, bytes: &[u8], at: u64) -> Option<u64> {
        self.number(bytes, at, self.pointer as usize)
    }
}

/// Which releases wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GoFamily {
    /// 1.16 and 1.17.
    Go116,
    /// 1.18 and 1.19.
    Go118,
    /// 1.20 and later.
    Go120,
}

/// The table. Of `bytes` it is the beginning.
#[derive(Debug)]
pub struct GoTable<B> {
    bytes: B,
    format: GoFormat,
    family: GoFamily,
    quantum: u64,
    functions: u64,
    text_in_header: u64,
    /// What entries are relative to; 0 where they are addresses.
    text: u64,
    names: u64,
    units: u64,
    files: u64,
    values: u64,
    entries: u64,
}

/// A function, as the table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GoFunction {
    /// Its first address.
    pub start: u64,
    /// Where the next begins, or the text ends.
    pub end: u64,
    /// `FuncFlag` of `internal/abi`.
    pub flags: u8,
    name: u64,
    unit: u64,
    stack: u64,
    files: u64,
    lines: u64,
    /// How many more tables of values it has, and where that list begins.
    tables: u64,
    first: u64,
    /// How much data of its own, which that list is followed by.
    data: u64,
}

impl<B: Deref<Target = [u8]>> GoTable<B> {
    /// Reads the header; `None` when it is no such table, or one that does not fit in its bytes.
    pub fn parse(bytes: B) -> Option<Self> {
        let (family, format, quantum) = head(&bytes)?;
        let word = |index: u64| format.word(&bytes, 8 + index * format.pointer);
        // From 1.18 on with where the text begins.
        let skip = u64::from(family >= GoFamily::Go118);
        let table = Self {
            format,
            family,
            quantum,
            functions: word(0)?,
            text_in_header: if skip == 1 { word(2)? } else { 0 },
            text: 0,
            names: word(2 + skip)?,
            units: word(3 + skip)?,
            files: word(4 + skip)?,
            values: word(5 + skip)?,
            entries: word(6 + skip)?,
            bytes,
        };
        let end = table.functions.checked_mul(2 * table.field())?.checked_add(table.entries)?;
        (end <= table.bytes.len() as u64).then_some(table)
    }

    /// Which releases wrote it.
    #[must_use]
    pub fn family(&self) -> GoFamily {
        self.family
    }

    /// How numbers are stored in it, and in what it refers to.
    #[must_use]
    pub fn format(&self) -> GoFormat {
        self.format
    }

    /// All its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Where the header of 1.18 and later has the beginning of the text: offset in the table, and
    /// what is there in the file. It is 0 from 1.26 on.
    #[must_use]
    pub fn text_in_header(&self) -> (u64, u64) {
        (8 + 2 * self.format.pointer, self.text_in_header)
    }

    /// Says where the text begins. Needed from 1.18 on.
    pub fn set_text(&mut self, text: u64) {
        self.text = text;
    }

    /// Words of `runtime.moduledata` that point into the table: index, and offset in the table.
    #[must_use]
    pub fn parts(&self) -> [(u64, u64); 5] {
        [(1, self.names), (4, self.units), (7, self.files), (10, self.values), (13, self.entries)]
    }

    /// All functions that hold together, in the order of their addresses.
    pub fn functions(&self) -> impl Iterator<Item = GoFunction> {
        (0..self.functions).filter_map(|index| self.function(index))
    }

    /// Bytes of a field of the list of functions.
    fn field(&self) -> u64 {
        if self.family == GoFamily::Go116 { self.format.pointer } else { 4 }
    }

    /// Address of a function, and offset of its description. Behind the last is where the text
    /// ends.
    fn entry(&self, index: u64) -> Option<(u64, u64)> {
        let (field, size) = (self.field(), self.field() as usize);
        let at = self.entries + index * 2 * field;
        let address = self.format.number(&self.bytes, at, size)?;
        let description = self.format.number(&self.bytes, at + field, size).unwrap_or(0);
        Some((self.text.checked_add(address)?, description))
    }

    /// Of `_func`: entry, name, args, deferreturn, pcsp, pcfile, pcln, npcdata, cuOffset, from 1.20
    /// on startLine, then funcID, flag, a byte or two, nfuncdata, and the tables.
    fn function(&self, index: u64) -> Option<GoFunction> {
        let ((start, at), (end, _)) = (self.entry(index)?, self.entry(index + 1)?);
        let at = self.entries.checked_add(at)?.checked_add(self.field())?;
        let number = |offset| self.format.u32(&self.bytes, at.checked_add(offset)?);
        let byte = |offset| self.format.number(&self.bytes, at.checked_add(offset)?, 1);
        let kind = if self.family == GoFamily::Go120 { 36 } else { 32 };
        let (tables, data) = match (number(24)?, byte(kind + 3)?) {
            (tables, data) if tables <= MAX_PCDATA => (tables, data),
            _ => (0, 0),
        };
        (start < end).then_some(GoFunction {
            start,
            end,
            flags: byte(kind + 1)? as u8,
            name: number(0)?,
            unit: number(28)?,
            stack: number(12)?,
            files: number(16)?,
            lines: number(20)?,
            tables,
            first: at + kind + 4,
            data,
        })
    }

    /// What a function is called.
    #[must_use]
    pub fn name(&self, function: &GoFunction) -> Option<&[u8]> {
        self.name_at(function.name)
    }

    /// A name by its offset among names, which inlined calls have.
    #[must_use]
    pub fn name_at(&self, offset: u64) -> Option<&[u8]> {
        self.text_at(self.names, offset)
    }

    /// A file by its number in a function.
    #[must_use]
    pub fn file(&self, function: &GoFunction, number: u64) -> Option<&[u8]> {
        const NONE: u64 = u32::MAX as u64;
        if function.unit == NONE {
            return None;
        }
        let at = function.unit.checked_add(number)?.checked_mul(4)?.checked_add(self.units)?;
        let offset = self.format.u32(&self.bytes, at).filter(|&offset| offset != NONE)?;
        self.text_at(self.files, offset)
    }

    fn text_at(&self, part: u64, offset: u64) -> Option<&[u8]> {
        let at = usize::try_from(part.checked_add(offset)?).ok()?;
        let tail = self.bytes.get(at..)?;
        let tail = &tail[..tail.len().min(MAX_NAME)];
        Some(&tail[..tail.iter().position(|&byte| byte == 0)?])
    }

    /// How far the stack pointer is below where it was at entry, in bytes; `None` for C that was
    /// linked in, of which the table has names and nothing else.
    #[must_use]
    pub fn stack(&self, function: &GoFunction) -> Option<GoValues<'_>> {
        self.values(function, function.stack)
    }

    /// Numbers of files.
    #[must_use]
    pub fn files(&self, function: &GoFunction) -> Option<GoValues<'_>> {
        self.values(function, function.files)
    }

    /// Lines.
    #[must_use]
    pub fn lines(&self, function: &GoFunction) -> Option<GoValues<'_>> {
        self.values(function, function.lines)
    }

    /// One more of its tables of values (`PCDATA`).
    #[must_use]
    pub fn more(&self, function: &GoFunction, table: u64) -> Option<GoValues<'_>> {
        let at = function.first.checked_add(table * 4).filter(|_| table < function.tables)?;
        self.values(function, self.format.u32(&self.bytes, at)?)
    }

    /// Where in the table a function's reference to data of its own (`FUNCDATA`) is: up to 1.17 a
    /// pointer, then 4 bytes. `address`: of the table, which pointers are aligned by.
    #[must_use]
    pub fn data(&self, function: &GoFunction, number: u64, address: u64) -> Option<u64> {
        let list = function.first.checked_add(function.tables * 4)?;
        if number >= function.data {
            return None;
        }
        if self.family == GoFamily::Go116 {
            let pointer = self.format.pointer;
            let list = address.checked_add(list)?.checked_next_multiple_of(pointer)?;
            return list.checked_add(number * pointer)?.checked_sub(address);
        }
        list.checked_add(number * 4)
    }

    /// `None` where there is no such table; without values where it lies outside.
    fn values(&self, function: &GoFunction, offset: u64) -> Option<GoValues<'_>> {
        if offset == 0 {
            return None;
        }
        let at = self.values.checked_add(offset).and_then(|at| usize::try_from(at).ok());
        let bytes = at.and_then(|at| self.bytes.get(at..)).unwrap_or_default();
        let quantum = self.quantum;
        let GoFunction { start, end, .. } = *function;
        Some(GoValues { bytes, quantum, start, at: start, end, value: -1, is_whole: false })
    }
}

/// How numbers are stored in a table of Go's, if bytes begin as one does.
#[must_use]
pub fn gopclntab_format(bytes: &[u8]) -> Option<GoFormat> {
    head(bytes).map(|(_, format, _)| format)
}

/// Magic, two zeros, how many bytes an instruction is a multiple of, bytes of a pointer.
fn head(bytes: &[u8]) -> Option<(GoFamily, GoFormat, u64)> {
    let &[a, b, c, d, 0, 0, quantum @ (1 | 2 | 4), pointer @ (4 | 8)] = bytes.first_chunk()? else {
        return None;
    };
    let of = |magic: u32| match magic {
        0xffff_fffa => Some(GoFamily::Go116),
        0xffff_fff0 => Some(GoFamily::Go118),
        0xffff_fff1 => Some(GoFamily::Go120),
        _ => None,
    };
    let magic = [a, b, c, d];
    let little = of(u32::from_le_bytes(magic)).map(|family| (family, true));
    let big = || of(u32::from_be_bytes(magic)).map(|family| (family, false));
    let (family, little) = little.or_else(big)?;
    Some((family, GoFormat { little, pointer: pointer.into() }, quantum.into()))
}

/// Values by address, from a function's beginning on: from, to, value (`runtime.step`).
#[derive(Clone, Debug)]
pub struct GoValues<'t> {
    bytes: &'t [u8],
    quantum: u64,
    start: u64,
    at: u64,
    end: u64,
    value: i32,
    is_whole: bool,
}

impl GoValues<'_> {
    /// Whether the table has come to its end, and not to something that makes no sense.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    fn varint(&mut self) -> Option<u32> {
        let mut value = 0;
        for shift in (0..32).step_by(7) {
            let (&byte, rest) = self.bytes.split_first()?;
            self.bytes = rest;
            value |= u32::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}

impl Iterator for GoValues<'_> {
    type Item = (u64, u64, i32);

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_whole || self.at >= self.end {
            self.is_whole = true;
            return None;
        }
        let change = self.varint()?;
        if change == 0 && self.at != self.start {
            self.is_whole = true;
            return None;
        }
        let change = (change >> 1) as i32 ^ -((change & 1) as i32);
        self.value = self.value.checked_add(change)?;
        let length = u64::from(self.varint()?).checked_mul(self.quantum)?;
        let from = self.at;
        self.at = from.checked_add(length).filter(|_| length > 0)?;
        Some((from, self.at.min(self.end), self.value))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Of Go 1.20: one function `f` at 0x1000, 8 bytes down from its second byte on, 32 bytes long.
    fn sample() -> Vec<u8> {
        const NAMES: u64 = 72;
        const VALUES: u64 = 80;
        const ENTRIES: u64 = 96;
        let mut bytes = vec![0xf1, 0xff, 0xff, 0xff, 0, 0, 1, 8];
        for word in [1, 0, 0x1000, NAMES, 0, 0, VALUES, ENTRIES] {
            bytes.extend(u64::to_le_bytes(word));
        }
        bytes.extend(b"\0f\0\0\0\0\0\0");
        // From -1 by 1 for 1 byte, by 8 for 31 bytes; the end.
        bytes.extend([0, 2, 1, 16, 31, 0]);
        bytes.resize(ENTRIES as usize, 0);
        // Entry and description; the end of the text.
        for word in [0, 12, 32] {
            bytes.extend(u32::to_le_bytes(word));
        }
        // Entry, name, args, deferreturn, pcsp, pcfile, pcln, npcdata, cuOffset, startLine.
        for word in [0, 1, 0, 0, 1, 0, 0, 0, 0, 7] {
            bytes.extend(u32::to_le_bytes(word));
        }
        bytes.extend([0, 4, 0, 0]);
        bytes
    }

    #[test]
    fn a_function_has_its_name_and_its_values() {
        let bytes = sample();
        let mut table = GoTable::parse(&*bytes).unwrap();
        assert_eq!((table.family(), table.text_in_header()), (GoFamily::Go120, (24, 0x1000)));
        table.set_text(0x1000);
        let functions: Vec<_> = table.functions().collect();
        let [function] = functions.as_slice() else { panic!("{functions:?}") };
        assert_eq!((function.start, function.end, function.flags), (0x1000, 0x1020, 4));
        assert_eq!(table.name(function), Some(&b"f"[..]));
        let mut values = table.stack(function).unwrap();
        let found: Vec<_> = values.by_ref().collect();
        assert_eq!(found, [(0x1000, 0x1001, 0), (0x1001, 0x1020, 8)]);
        assert!(values.is_whole());
        assert!(table.files(function).is_none() && table.more(function, 0).is_none());
    }

    proptest! {
        #[test]
        fn never_panics(cut in 0usize..160, changes in prop::collection::vec((0usize..160, any::<u8>()), 0..6)) {
            let mut bytes = sample();
            bytes.truncate(cut);
            for (at, value) in changes {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = value;
                }
            }
            let Some(mut table) = GoTable::parse(&*bytes) else { return Ok(()) };
            table.set_text(u64::MAX - 0x10);
            for function in table.functions().take(100) {
                let _ = (table.name(&function), table.file(&function, 1), table.data(&function, 3, 8));
                let values = [table.stack(&function), table.lines(&function), table.more(&function, 2)];
                prop_assert!(values.into_iter().flatten().flatten().count() < 1000);
            }
        }
    }
}
