//! The table of one executable, as bytes and as what they mean.
//!
//! Addresses are offsets in the file, since that is what mappings have; pages of 64 KiB make a row
//! 4 bytes. Layout, all little-endian: magic, version, CRC-32 of what follows it, number of rules,
//! pages and rows, number of the first page, length of the build-id, machine, length of what
//! follows it, where Go's code begins and ends; the build-id, where an interpreter keeps its
//! frames, rules of 24 bytes, rows of each page, rows.

use std::ops::Range;

use stackwire_collector_ebpf::tables::row;
use stackwire_collector_ebpf::{NO_RULE, Rule, cfa, fp, ra};
use stackwire_model::FileOffset;
use stackwire_model::{BuildId, Machine};

use crate::interpreter::Interpreter;

/// What tables made by this code hold. A change of rules or of what is compiled needs a new one:
/// tables are kept on disk.
pub const VERSION: u32 = 12;

/// Whose registers the rules are about, as ELF files name it.
pub const MACHINE: Machine = Machine::X86_64;

const MAGIC: &[u8; 8] = b"SWUNWIND";
const HEADER: usize = 60;
const RULE: usize = 24;
/// More than any file of 8 GiB needs.
pub(crate) const MAX_PAGES: u32 = 1 << 17;

/// Bytes that are no table of this version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an unwind table: {0}")]
pub struct TableError(&'static str);

/// Rules by address of an executable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// GNU build-id of the file, if it has one.
    pub build_id: Option<BuildId>,
    /// Where the interpreter that it has keeps its frames.
    pub interpreter: Option<Interpreter>,
    /// Offsets in the file of the code that Go compiled; empty: it has none.
    pub go: Range<u64>,
    /// Number of the first page among the pages of its file.
    pub base: u32,
    /// Number 0 is no rule.
    pub rules: Vec<Rule>,
    /// Rows each page has.
    pub pages: Vec<u32>,
    /// Of all pages; see [`row`].
    pub rows: Vec<u32>,
}

impl Table {
    /// The rule that holds at an offset in the file.
    #[must_use]
    pub fn rule(&self, offset: FileOffset) -> Option<&Rule> {
        let offset = offset.0;
        let page = usize::try_from((offset >> 16).checked_sub(u64::from(self.base))?).ok()?;
        let count = *self.pages.get(page)? as usize;
        let first: usize = self.pages[..page].iter().map(|&count| count as usize).sum();
        let rows = &self.rows[first..][..count];
        let after = rows.partition_point(|&at| at <= row(offset as u16, u16::MAX));
        let row = rows.get(after.checked_sub(1)?)?;
        self.rules.get((row & 0xffff) as usize).filter(|rule| rule.cfa != cfa::NONE)
    }

    /// As bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let counts =
            [self.rules.len(), self.pages.len(), self.rows.len()].map(|count| count as u32);
        let mut bytes = Vec::with_capacity(HEADER + self.rules.len() * RULE + self.rows.len() * 4);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([0; 4]);
        let build_id = self.build_id.as_ref().map_or(&[][..], BuildId::as_bytes);
        for word in counts.into_iter().chain([self.base, build_id.len() as u32]) {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(u32::from(MACHINE.elf()).to_le_bytes());
        let interpreter = self.interpreter.map(Interpreter::to_bytes).unwrap_or_default();
        bytes.extend((interpreter.len() as u32).to_le_bytes());
        bytes.extend(self.go.start.to_le_bytes());
        bytes.extend(self.go.end.to_le_bytes());
        bytes.extend(build_id);
        bytes.extend(interpreter);
        for rule in &self.rules {
            bytes.extend([rule.cfa, rule.register, rule.fp, rule.ra]);
            for word in [rule.offset, rule.offset2, rule.fp_offset, rule.ra_offset, rule.kept] {
                bytes.extend(word.to_le_bytes());
            }
        }
        for word in self.pages.iter().chain(&self.rows) {
            bytes.extend(word.to_le_bytes());
        }
        let crc = crc32fast::hash(&bytes[16..]);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// From bytes, which may be of anyone.
    ///
    /// # Errors
    /// When they are cut, damaged, of another version, or would lead a search astray.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        let error = |what| Err(TableError(what));
        let Some((head, body)) = bytes.split_at_checked(HEADER) else { return error("cut") };
        if &head[..8] != MAGIC || word(head, 8) != VERSION {
            return error("of another version");
        }
        if word(head, 12) != crc32fast::hash(&bytes[16..]) {
            return error("damaged");
        }
        if word(head, 36) != u32::from(MACHINE.elf()) {
            return error("of another machine");
        }
        let [rules, pages, rows, base, id] = [16, 20, 24, 28, 32].map(|at| word(head, at));
        let interpreter = word(head, 40) as usize;
        let long = |at| u64::from(word(head, at + 4)) << 32 | u64::from(word(head, at));
        let go = long(44)..long(52);
        if pages > MAX_PAGES || base > MAX_PAGES || rules > u32::from(u16::MAX) {
            return error("too large");
        }
        let size = rules as usize * RULE + (pages as usize + rows as usize) * 4;
        if body.len() != id as usize + interpreter + size {
            return error("of a wrong size");
        }
        let (id, body) = body.split_at(id as usize);
        let build_id = BuildId::new(id);
        if build_id.is_none() && !id.is_empty() {
            return error("with an impossible build-id");
        }
        let (bytes, body) = body.split_at(interpreter);
        let interpreter = Interpreter::read(bytes);
        if interpreter.is_none() && !bytes.is_empty() {
            return error("with an impossible layout of an interpreter");
        }
        let (rules, rest) = body.split_at(rules as usize * RULE);
        let rules: Vec<Rule> = rules.chunks_exact(RULE).map(rule).collect();
        let (pages, rows) = rest.split_at(pages as usize * 4);
        let words = |bytes: &[u8]| bytes.chunks_exact(4).map(|four| word(four, 0)).collect();
        let (pages, rows): (Vec<u32>, Vec<u32>) = (words(pages), words(rows));
        if !rules.iter().all(is_sound) {
            return error("with an impossible rule");
        }
        let mut left = &rows[..];
        for &count in &pages {
            let Some((of_page, rest)) = left.split_at_checked(count as usize) else {
                return error("with pages beyond its rows");
            };
            if !of_page.is_sorted_by(|a, b| a >> 16 < b >> 16) {
                return error("not in order");
            }
            if of_page.iter().any(|row| (row & 0xffff) as usize >= rules.len()) {
                return error("with rows beyond its rules");
            }
            left = rest;
        }
        if !left.is_empty() {
            return error("with rows beyond its pages");
        }
        Ok(Self { build_id, interpreter, go, base, rules, pages, rows })
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn rule(bytes: &[u8]) -> Rule {
    let signed = |at| word(bytes, at) as i32;
    Rule {
        cfa: bytes[0],
        register: bytes[1],
        fp: bytes[2],
        ra: bytes[3],
        offset: signed(4),
        offset2: signed(8),
        fp_offset: signed(12),
        ra_offset: signed(16),
        kept: signed(20),
    }
}

fn is_sound(rule: &Rule) -> bool {
    let place = rule.ra & !ra::EXACT;
    rule.cfa <= cfa::CLONE
        && rule.fp <= fp::LOST
        && place <= ra::AT_RBX
        && (place != ra::REGISTER || (0..16).contains(&rule.ra_offset))
}

/// The rule number 0 every table begins with.
pub(crate) fn none() -> Rule {
    const { assert!(NO_RULE == 0) };
    Rule::default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stackwire_collector_ebpf::{cpython, ruby};

    use super::*;

    fn python(previous: u16) -> Interpreter {
        Interpreter::Cpython(cpython::Layout { previous, ..cpython::Layout::default() })
    }

    fn ruby() -> ruby::Layout {
        ruby::Layout { frame: 56, lines: 112, line_entry: 12, ..ruby::Layout::default() }
    }

    fn sample() -> Table {
        let known = Rule { cfa: cfa::REGISTER, register: 7, offset: 8, ..Rule::default() };
        Table {
            build_id: BuildId::new(&[7; 20]),
            interpreter: Some(python(8)),
            go: 0x2_0010..0x4_0005,
            base: 2,
            rules: vec![none(), known],
            pages: vec![2, 0, 1],
            rows: vec![row(0x10, 1), row(0x20, 0), row(0, 1)],
        }
    }

    #[test]
    fn a_rule_holds_from_its_row_to_the_next() {
        let table = Table::parse(&sample().to_bytes()).unwrap();
        assert_eq!(table, sample());
        let has = |offset| table.rule(FileOffset(offset)).is_some();
        assert_eq!(
            [0xffff, 0x2_000f, 0x2_0010, 0x2_001f, 0x2_0020, 0x3_0000, 0x4_0000, 0x5_0000].map(has),
            [false, false, true, true, false, false, true, false]
        );
    }

    #[test]
    fn what_would_lead_a_search_astray_is_refused() {
        let refused = |change: &dyn Fn(&mut Table)| {
            let mut table = sample();
            change(&mut table);
            Table::parse(&table.to_bytes()).unwrap_err().0
        };
        assert_eq!(refused(&|table| table.rows[0] = row(0x30, 1)), "not in order");
        assert_eq!(refused(&|table| table.rows[0] = row(0x10, 2)), "with rows beyond its rules");
        assert_eq!(refused(&|table| table.pages[0] = 9), "with pages beyond its rows");
        assert_eq!(refused(&|table| table.pages[0] = 1), "with rows beyond its pages");
        assert_eq!(refused(&|table| table.rules[1].ra = 3), "with an impossible rule");
        let impossible = [python(1000), Interpreter::Ruby(ruby::Layout { words: 33, ..ruby() })];
        for one in impossible {
            let said = refused(&|table| table.interpreter = Some(one));
            assert_eq!(said, "with an impossible layout of an interpreter");
        }
        let mut known = sample();
        known.interpreter = Some(Interpreter::Ruby(ruby()));
        assert_eq!(Table::parse(&known.to_bytes()).unwrap(), known);
    }

    proptest! {
        #[test]
        fn damage_is_noticed(at in 0usize..140, flip in 1u8..) {
            let mut bytes = sample().to_bytes();
            let at = at % bytes.len();
            bytes[at] ^= flip;
            prop_assert!(Table::parse(&bytes).is_err());
            prop_assert!(Table::parse(&bytes[..at]).is_err());
        }
    }
}
