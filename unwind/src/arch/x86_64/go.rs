//! Rules for Go's functions. How far each instruction that Go compiled has moved the stack pointer
//! is in `.gopclntab`, which stripping keeps. `.eh_frame` describes only the C that was linked in,
//! and not even that where Go's own linker linked it.
//!
//! The crate `elf` reads the table. Assembly, and C without call frame information, is followed
//! instruction by instruction (`code/`); what the runtime does where it changes stacks is
//! `go_stacks.rs`.

use std::ops::Range;

use stackwire_collector_ebpf::arch::RSP;
use stackwire_collector_ebpf::{Rule, cfa, fp, ra};
use stackwire_elf::{GoFamily, GoFormat, GoFunction, GoTable, gopclntab_format};

use super::code;
use super::go_stacks::{self, Code, MAX_CODE, Runtime, root, unknown};
use crate::elf::Elf;
use crate::pages::Spans;

/// Every Go program and library has the first, plugins the second.
const MARKS: [&str; 2] = [".go.buildinfo", ".note.go.buildid"];
/// Sections the table is in; of position-independent programs built before 1.26 the second, or what
/// linkers of C put that into.
const SECTIONS: [&str; 3] = [".gopclntab", ".data.rel.ro.gopclntab", ".data.rel.ro"];
const ALIGNED: usize = 32;
const FORMAT: GoFormat = GoFormat { little: true, pointer: 8 };
/// The module's description (`runtime.moduledata`), in a section of its own from 1.26 on, and where
/// it has the beginning of the text.
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

/// The table of a Go program.
#[derive(Debug)]
pub struct Table(GoTable<Vec<u8>>);

impl Table {
    /// `None` when it is no Go program.
    pub fn load(elf: &Elf<'_>) -> Option<Self> {
        MARKS.iter().find_map(|name| elf.section(name))?;
        let sections = SECTIONS.iter().filter_map(|name| elf.section(name));
        let (address, bytes) = sections.into_iter().find_map(|section| {
            let mut bytes = elf.content(section).ok()?;
            let is_one = |bytes: &[u8]| gopclntab_format(bytes) == Some(FORMAT);
            let at = bytes.chunks(ALIGNED).position(is_one)? * ALIGNED;
            bytes.drain(..at);
            Some((section.address.0 + at as u64, bytes))
        })?;
        let mut table = GoTable::parse(bytes)?;
        if table.family() > GoFamily::Go116 {
            table.set_text(text(elf, address, table.text_in_header().0)?);
        }
        Some(Self(table))
    }

    /// Adds the functions. `covered`: offsets that have rules; `kept`: one more register to follow.
    pub fn add(&self, elf: &Elf<'_>, covered: &[(u64, u64)], kept: Option<u32>, spans: &mut Spans) {
        let mut code = Window { elf, start: 0, bytes: Vec::new(), left: MAX_WINDOWS };
        let mut known = Known { keeps_all: None, runtime: None, left: MAX_INSTRUCTIONS };
        for function in self.functions() {
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
        for function in self.functions() {
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
        self.functions().any(|function| function.name == b"racecall")
    }

    /// Offsets in the file from the first function that Go compiled to behind the last.
    pub fn code(&self, elf: &Elf<'_>) -> Option<Range<u64>> {
        let of_go = self.functions().filter(|function| !function.moves.is_empty());
        let ends = of_go.map(|function| (function.entry, function.end));
        let (start, end) = ends.reduce(|all, one| (all.0.min(one.0), all.1.max(one.1)))?;
        Some(elf.offset(start)?..elf.offset(end.checked_sub(1)?)? + 1)
    }

    fn functions(&self) -> impl Iterator<Item = Function<'_>> {
        self.0.functions().filter_map(|found| self.function(&found))
    }

    /// `None` for one that does not hold together, which costs its own rules alone.
    fn function(&self, found: &GoFunction) -> Option<Function<'_>> {
        let name = self.0.name(found).unwrap_or_default();
        let moves = match self.0.stack(found) {
            // C that was linked in.
            None => Vec::new(),
            Some(mut values) => {
                let moves: Vec<_> = values.by_ref().take(MAX_MOVES + 1).collect();
                values.is_whole().then_some(moves)?
            }
        };
        let end = moves.last().map_or(found.end, |&(_, to, _)| to);
        Some(Function { name, entry: found.start, end, flags: found.flags, moves })
    }
}

/// Where Go's text begins: in the header up to 1.25, from then on in the module's description
/// alone.
fn text(elf: &Elf<'_>, table: u64, in_header: u64) -> Option<u64> {
    let module = || {
        let module = elf.section(MODULE)?.address.0;
        (pointer(elf, module)? == table).then(|| pointer(elf, module + MODULE_TEXT))?
    };
    pointer(elf, table + in_header).filter(|&text| text != 0).or_else(module)
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

    /// Adds rules by the table where the instructions give none. Functions that write the stack
    /// pointer in ways the table does not count are left unknown.
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

/// Whether a function saves its caller's rbp at the top of its frame. Judges by the instructions
/// around the one that makes room for the frame: `push %rbp`, or (up to Go 1.20)
/// `mov %rbp,TOP(%rsp)` after it. Returns after how many bytes rbp is there.
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
