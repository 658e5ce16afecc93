//! Go's functions: how far each instruction of what Go compiled has moved the stack pointer is in
//! `.gopclntab`, of which stripping leaves all; `.eh_frame` has only the C that was linked in, and
//! not even that where Go's own linker did.
//!
//! Layouts are those of Go's `runtime/symtab.go`, Go 1.16 to 1.27 (the magic tells three families
//! apart). Assembly, and C without call frame information, is followed instruction by instruction
//! (`code/`); what the runtime does where it changes stacks is `go_stacks.rs`.

use stackwire_collector_ebpf::unwind::{RSP, Rule, cfa, fp, ra};

use crate::code;
use crate::elf::Elf;
use crate::go_stacks::{self, Code, MAX_CODE, Runtime, root, unknown};
use crate::pages::Spans;

/// Every Go program and library has the first, plugins the second.
const MARKS: [&str; 2] = [".go.buildinfo", ".note.go.buildid"];
/// Sections the table is in; of position-independent programs built before 1.26 the second, or what
/// linkers of C put that into.
const SECTIONS: [&str; 3] = [".gopclntab", ".data.rel.ro.gopclntab", ".data.rel.ro"];
const ALIGNED: usize = 32;
/// Where the header has the beginning of the text, and where the module's description
/// (`runtime.moduledata`), in a section of its own from 1.26 on.
const HEADER_TEXT: u64 = 24;
const MODULE: &str = ".go.module";
const MODULE_TEXT: u64 = 22 * 8;
/// `TOPFRAME`, `SPWRITE` and `ASM` of `internal/abi`'s FuncFlag.
const TOPFRAME: u8 = 1;
const SPWRITE: u8 = 2;
const ASM: u8 = 4;
/// Those that 1.16 does not mark.
const ROOTS: [&[u8]; 4] =
    [b"runtime.goexit", b"runtime.mstart", b"runtime.rt0_go", b"_rt0_amd64_linux"];
/// Functions whose caller did not call them: it was interrupted, by a signal that had them called.
const INJECTED: [&[u8]; 3] = [b"runtime.sigpanic", b"runtime.sigpanic0", b"runtime.asyncPreempt"];
/// Changes no register but r9, against the rules of all others (`runtime/asm_amd64.s`).
const KEEPS_ALL: &[u8] = b"gosave_systemstack_switch";
const SYSTEMSTACK: &[u8] = b"runtime.systemstack";
/// Bytes of instructions followed, of a function.
const MAX_FOLLOWED: u64 = 64 << 10;
/// Instructions followed, of all functions: ten times those of a program with the race detector.
const MAX_INSTRUCTIONS: usize = 1 << 20;
/// Bytes of code read at once, and how often: in order, those of the largest programs are 100 MB.
const WINDOW: u64 = 256 << 10;
const MAX_WINDOWS: u32 = 4096;
/// Places where a function moves the stack pointer.
const MAX_MOVES: usize = 1 << 16;

/// What is known of the program.
struct Known {
    keeps_all: Option<u64>,
    runtime: Option<Runtime>,
    /// Instructions that may still be followed.
    left: usize,
}

/// Code, of functions in order of their addresses.
struct Window<'e, 'f> {
    elf: &'e Elf<'f>,
    start: u64,
    bytes: Vec<u8>,
    /// How often more may be read.
    left: u32,
}

impl Window<'_, '_> {
    /// What is at an address, or less.
    fn at(&mut self, address: u64, length: u64) -> &[u8] {
        let end = self.start.saturating_add(self.bytes.len() as u64);
        if address < self.start || address.saturating_add(length) > end {
            if self.left == 0 {
                return &[];
            }
            self.left -= 1;
            let wanted = WINDOW.max(length);
            (self.start, self.bytes) = (address, self.elf.code_until(address, wanted));
        }
        let at = (address - self.start) as usize;
        &self.bytes[at.min(self.bytes.len())..(at + length as usize).min(self.bytes.len())]
    }
}

/// Which releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Family {
    Go116,
    Go118,
    Go120,
}

impl Family {
    /// By the beginning of a table: magic, zero, instructions of any address, pointers of 8 bytes.
    fn of(bytes: &[u8]) -> Option<Self> {
        match *bytes.first_chunk()? {
            [0xfa, 0xff, 0xff, 0xff, 0, 0, 1, 8] => Some(Self::Go116),
            [0xf0, 0xff, 0xff, 0xff, 0, 0, 1, 8] => Some(Self::Go118),
            [0xf1, 0xff, 0xff, 0xff, 0, 0, 1, 8] => Some(Self::Go120),
            _ => None,
        }
    }
}

/// The table of a Go program.
#[derive(Debug)]
pub struct Table {
    bytes: Vec<u8>,
    family: Family,
    functions: u64,
    /// Offsets of the parts.
    names: u64,
    values: u64,
    entries: u64,
    /// What entries are relative to.
    text: u64,
}

impl Table {
    /// `None` when it is no Go program.
    pub fn load(elf: &Elf<'_>) -> Option<Self> {
        MARKS.iter().find_map(|name| elf.section(name))?;
        let sections = SECTIONS.iter().filter_map(|name| elf.section(name));
        let (address, family, bytes) = sections.into_iter().find_map(|section| {
            let mut bytes = elf.content(section).ok()?;
            let at = bytes.chunks(ALIGNED).position(|bytes| Family::of(bytes).is_some())? * ALIGNED;
            bytes.drain(..at);
            Some((section.address + at as u64, Family::of(&bytes)?, bytes))
        })?;
        let skip = u64::from(family >= Family::Go118);
        let word = |index: u64| number(&bytes, 8 + index * 8, 8);
        let (functions, names) = (word(0)?, word(2 + skip)?);
        let (values, entries) = (word(5 + skip)?, word(6 + skip)?);
        let text = match family {
            Family::Go116 => 0,
            _ => text(elf, address)?,
        };
        let field = if family == Family::Go116 { 16 } else { 8 };
        let end = functions.checked_mul(field)?.checked_add(entries)?;
        (end <= bytes.len() as u64).then_some(())?;
        Some(Self { family, functions, names, values, entries, text, bytes })
    }

    /// Adds the functions. `covered`: offsets that have rules; `kept`: one more register to follow.
    pub fn add(&self, elf: &Elf<'_>, covered: &[(u64, u64)], kept: Option<u32>, spans: &mut Spans) {
        let mut code = Window { elf, start: 0, bytes: Vec::new(), left: MAX_WINDOWS };
        let functions = || (0..self.functions).filter_map(|index| self.function(index));
        let mut known = Known { keeps_all: None, runtime: None, left: MAX_INSTRUCTIONS };
        for function in functions() {
            match function.name {
                KEEPS_ALL => known.keeps_all = Some(function.entry),
                SYSTEMSTACK => {
                    let bytes =
                        code.at(function.entry, MAX_CODE.min(function.end - function.entry));
                    known.runtime = Runtime::of(Code { start: function.entry, bytes });
                }
                _ => {}
            }
        }
        for function in functions() {
            let mut add = |from: u64, to: u64, rule: Rule| {
                let Some(offset) = elf.offset(from) else { return };
                if from < to && elf.offset(to - 1) == Some(offset + (to - 1 - from)) {
                    spans.add(offset, offset + (to - from), rule);
                }
            };
            let has_rules = || {
                let Some(offset) = elf.offset(function.entry) else { return true };
                let next = covered.partition_point(|&(_, end)| end <= offset);
                covered.get(next).is_some_and(|&(start, _)| start <= offset)
            };
            if !has_rules() {
                function.add(&mut code, kept, &mut known, &mut add);
            }
        }
    }

    /// Whether the race detector is linked in, which goes to another stack and keeps the way back
    /// in r12.
    pub fn detects_races(&self) -> bool {
        (0..self.functions)
            .filter_map(|index| self.function(index))
            .any(|function| function.name == b"racecall")
    }

    /// Of the `functab`: where a function begins, and where its description is.
    fn entry(&self, index: u64) -> Option<(u64, u64)> {
        let bytes = &self.bytes;
        match self.family {
            Family::Go116 => {
                let at = self.entries + index * 16;
                Some((number(bytes, at, 8)?, number(bytes, at + 8, 8).unwrap_or(0)))
            }
            _ => {
                let at = self.entries + index * 8;
                let entry = self.text.checked_add(number(bytes, at, 4)?)?;
                Some((entry, number(bytes, at + 4, 4).unwrap_or(0)))
            }
        }
    }

    /// `None` for one that does not hold together, which costs its own rules alone.
    fn function(&self, index: u64) -> Option<Function<'_>> {
        let bytes = &self.bytes;
        let (entry, at) = self.entry(index)?;
        let (end, _) = self.entry(index + 1)?;
        // Of `_func`: the entry, then 4 bytes each.
        let first = if self.family == Family::Go116 { 8 } else { 4 };
        let at = self.entries.checked_add(at)?.checked_add(first)?;
        let name = self.name(number(bytes, at, 4)?)?;
        // Before it: args, deferreturn. Of C that was linked in the table has names and nothing
        // else.
        let moves = match number(bytes, at + 12, 4)? {
            0 => Vec::new(),
            at => self.moves(entry, at)?,
        };
        // Before it: pcsp, pcfile, pcln, npcdata, cuOffset, from 1.20 on startLine; funcID.
        let flags = at + if self.family == Family::Go120 { 37 } else { 33 };
        let flags = *bytes.get(usize::try_from(flags).ok()?)?;
        let end = moves.last().map_or(end, |&(_, to, _)| to);
        (entry < end).then_some(Function { name, entry, end, flags, moves })
    }

    fn name(&self, at: u64) -> Option<&[u8]> {
        let rest = self.bytes.get(usize::try_from(self.names.checked_add(at)?).ok()?..)?;
        rest.split(|&byte| byte == 0).next()
    }

    /// How far the stack pointer is below where it was at entry: from, to, bytes. (`runtime.step`)
    fn moves(&self, entry: u64, at: u64) -> Option<Vec<(u64, u64, i32)>> {
        let from = usize::try_from(self.values.checked_add(at)?).ok()?;
        let mut bytes = self.bytes.get(from..)?.iter();
        let (mut pc, mut value) = (entry, -1i32);
        let mut moves = Vec::new();
        loop {
            let change = varint(&mut bytes)?;
            if change == 0 && pc != entry {
                return Some(moves);
            }
            let change = (change >> 1) as i32 ^ -((change & 1) as i32);
            value = value.checked_add(change)?;
            let next = pc.checked_add(u64::from(varint(&mut bytes)?))?;
            if moves.len() == MAX_MOVES {
                return None;
            }
            moves.push((pc, next, value));
            pc = next;
        }
    }
}

fn varint<'a>(bytes: &mut impl Iterator<Item = &'a u8>) -> Option<u32> {
    let mut value = 0;
    for shift in (0..32).step_by(7) {
        let byte = *bytes.next()?;
        value |= u32::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn number(bytes: &[u8], at: u64, length: usize) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let bytes = bytes.get(at..at.checked_add(length)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// Where Go's text begins: in the header up to 1.25, from then on in the module's description
/// alone.
fn text(elf: &Elf<'_>, table: u64) -> Option<u64> {
    let module = || {
        let module = elf.section(MODULE)?.address;
        (pointer(elf, module)? == table).then(|| pointer(elf, module + MODULE_TEXT))?
    };
    pointer(elf, table + HEADER_TEXT).filter(|&text| text != 0).or_else(module)
}

/// What is at an address once the program is loaded.
fn pointer(elf: &Elf<'_>, address: u64) -> Option<u64> {
    elf.words(address, 1)?.first().copied()
}

fn from_rsp(offset: i32) -> Rule {
    Rule { cfa: cfa::REGISTER, register: RSP as u8, offset, ..Rule::default() }
}

/// A function, as the table has it.
struct Function<'t> {
    name: &'t [u8],
    entry: u64,
    end: u64,
    flags: u8,
    /// From, to, bytes the stack pointer is below where it was at entry; empty for C.
    moves: Vec<(u64, u64, i32)>,
}

impl Function<'_> {
    fn add(
        &self,
        code: &mut Window<'_, '_>,
        kept: Option<u32>,
        known: &mut Known,
        add: &mut impl FnMut(u64, u64, Rule),
    ) {
        let Self { name, entry, end, flags, .. } = *self;
        let is_root = flags & TOPFRAME != 0 || ROOTS.contains(&name);
        let is_handler = name == b"runtime.sigtramp" || name == b"runtime.cgoSigtramp";
        // The kernel has a signal's handler return to its first instruction, of which the one
        // before is looked up.
        if name == b"runtime.sigreturn" || name == b"runtime.sigreturn__sigaction" {
            add(entry.saturating_sub(1), end, Rule { cfa: cfa::SIGNAL, ..from_rsp(0) });
        } else if is_root && !is_handler {
            // Where goroutines and threads begin.
            add(entry, end, root());
        } else if self.moves.is_empty() || flags & (ASM | SPWRITE) != 0 || go_stacks::changes(name)
        {
            self.add_followed(code, kept, known, add);
        } else {
            self.add_moves(code, add);
        }
    }

    /// Rules by the instructions, of assembly and C.
    fn add_followed(
        &self,
        code: &mut Window<'_, '_>,
        kept: Option<u32>,
        known: &mut Known,
        add: &mut impl FnMut(u64, u64, Rule),
    ) {
        let Self { name, entry, end, flags, .. } = *self;
        let length = end - entry;
        // Parts of C functions that are kept elsewhere begin with a frame.
        let is_part = self.moves.is_empty() && name.windows(5).any(|part| part == b".cold");
        let mut found = Vec::new();
        if length <= MAX_FOLLOWED && !is_part && known.left > 0 {
            let bytes = code.at(entry, length);
            let function = code::Function { start: entry, bytes, keeps_all: known.keeps_all };
            found = code::rules(&function, kept, &mut known.left);
        }
        if found.is_empty() {
            self.add_else(entry, end, flags, add);
            return;
        }
        let head = code.at(entry, length.min(MAX_CODE)).to_vec();
        let head = Code { start: entry, bytes: &head };
        let injected = if INJECTED.contains(&name) { ra::EXACT } else { 0 };
        let mut at = entry;
        for one in &found {
            let special = go_stacks::rule(name, head, one, known.runtime.as_ref());
            let said =
                one.rule.map(|rule| (one.from, one.to, Rule { ra: rule.ra | injected, ..rule }));
            let unknown = one.left.then(|| (one.from, one.to, unknown()));
            let Some((from, to, rule)) = special.or(said).or(unknown) else { continue };
            self.add_else(at, from, flags, add);
            add(from, to, rule);
            at = to;
        }
        self.add_else(at, end, flags, add);
    }

    /// Where instructions say nothing, the table does, but for who writes the stack pointer in ways
    /// it does not count.
    fn add_else(&self, from: u64, to: u64, flags: u8, add: &mut impl FnMut(u64, u64, Rule)) {
        if flags & SPWRITE != 0 || go_stacks::changes(self.name) {
            add(from, to, unknown());
            return;
        }
        if self.moves.is_empty() {
            // So that it is not taken for what fills functions up.
            add(from, to, Rule::default());
        }
        for &(start, end, moved) in &self.moves {
            let Some(offset) = moved.checked_add(8).filter(|_| moved >= 0) else { continue };
            let fp = if moved == 0 { fp::SAME } else { fp::LOST };
            add(start.max(from), end.min(to), Rule { ra_offset: -8, fp, ..from_rsp(offset) });
        }
    }

    /// Rules by the table, of what Go compiled. rbp is where the beginning of the function has put
    /// it.
    fn add_moves(&self, code: &mut Window<'_, '_>, add: &mut impl FnMut(u64, u64, Rule)) {
        let injected = if INJECTED.contains(&self.name) { ra::EXACT } else { 0 };
        // Whether it is put there, once that is known.
        let mut is_saved = None;
        for &(start, end, moved) in &self.moves {
            let Some(offset) = moved.checked_add(8).filter(|_| moved >= 0) else { continue };
            let rule = Rule { ra: injected, ra_offset: -8, ..from_rsp(offset) };
            if moved == 0 {
                add(start, end, rule);
                continue;
            }
            let after = match is_saved {
                None => saves(code.at(start.wrapping_sub(1), 9), moved),
                Some(is_saved) => Some(0).filter(|_| is_saved),
            };
            is_saved = Some(after.is_some());
            let Some(after) = after else {
                add(start, end, Rule { fp: fp::LOST, ..rule });
                continue;
            };
            // Until it is put there it is where it was.
            let saved = start.saturating_add(after).min(end);
            add(start, saved, rule);
            add(saved, end, Rule { fp: fp::AT_CFA, fp_offset: -16, ..rule });
        }
    }
}

/// Whether a function keeps its caller's rbp at the top of its frame, from the instructions around
/// where it makes room for that: `push %rbp`, or (up to Go 1.20) `mov %rbp,TOP(%rsp)` after it. How
/// many bytes later it is there.
fn saves(code: &[u8], moved: i32) -> Option<u64> {
    let top = moved.checked_sub(8)?;
    match *code {
        [0x55, ..] if top == 0 => Some(0),
        [_, 0x48, 0x89, 0x6c, 0x24, at, ..] if i32::from(at as i8) == top => Some(5),
        [_, 0x48, 0x89, 0xac, 0x24, a, b, c, d] if i32::from_le_bytes([a, b, c, d]) == top => {
            Some(8)
        }
        // mov %rbp,(%rsp)
        [_, 0x48, 0x89, 0x2c, 0x24, ..] if top == 0 => Some(4),
        _ => None,
    }
}
