//! Go's functions: how far each instruction has moved the stack pointer is in `.gopclntab`, of which stripping leaves
//! all; `.eh_frame` has only the C that was linked in.
//!
//! Layouts are those of Go's `runtime/symtab.go`, Go 1.16 to 1.27 (the magic tells three families apart); what the runtime
//! does where it changes stacks is read from its own instructions (`runtime/asm_amd64.s`), since offsets in its structures
//! move from release to release. What is not recognized has no rule.

use stackwire_collector_ebpf::unwind::{RSP, Rule, cfa, fp};

use crate::elf::Elf;
use crate::pages::Spans;

/// Every Go program has it.
const BUILD_INFO: &str = ".go.buildinfo";
/// Sections the table is in; of position-independent programs built before 1.26 the second, or what linkers of C put
/// that into.
const SECTIONS: [&str; 3] = [".gopclntab", ".data.rel.ro.gopclntab", ".data.rel.ro"];
const ALIGNED: usize = 32;
/// Where the header has the beginning of the text, and where the module's description (`runtime.moduledata`), in a
/// section of its own from 1.26 on.
const HEADER_TEXT: u64 = 24;
const MODULE: &str = ".go.module";
const MODULE_TEXT: u64 = 22 * 8;
/// `R_X86_64_RELATIVE`.
const RELATIVE: u64 = 8;
/// `TOPFRAME`, `SPWRITE` and `ASM` of `internal/abi`'s FuncFlag.
const TOPFRAME: u8 = 1;
const SPWRITE: u8 = 2;
const ASM: u8 = 4;
/// Those that 1.16 does not mark.
const ROOTS: [&[u8]; 4] =
    [b"runtime.goexit", b"runtime.mstart", b"runtime.rt0_go", b"_rt0_amd64_linux"];
/// Longest piece of code looked into.
const MAX_CODE: u64 = 1 << 10;
/// What sets the stack pointer: mov %rbx,%rsp; mov SP(%rdx),%rsp; mov SP(%rsi),%rsp; sub $N,%rsp.
const SWITCHING: [&[u8]; 4] =
    [&[0x48, 0x89, 0xdc], &[0x48, 0x8b, 0x62], &[0x48, 0x8b, 0x66], &[0x48, 0x83, 0xec]];
/// Bytes of a call through a register.
const CALL: u64 = 2;

/// Adds a Go program's functions; nothing when it is none.
pub fn add(elf: &Elf<'_>, spans: &mut Spans) {
    let Some(table) = Table::load(elf) else { return };
    for index in 0..table.functions {
        // One that does not hold together costs its own rules.
        let _ = table.function(index, elf, spans);
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

struct Table {
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
    fn load(elf: &Elf<'_>) -> Option<Self> {
        elf.section(BUILD_INFO)?;
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

    fn function(&self, index: u64, elf: &Elf<'_>, spans: &mut Spans) -> Option<()> {
        let bytes = &self.bytes;
        let (entry, at) = match self.family {
            Family::Go116 => {
                let at = self.entries + index * 16;
                (number(bytes, at, 8)?, number(bytes, at + 8, 8)?)
            }
            _ => {
                let at = self.entries + index * 8;
                (self.text.checked_add(number(bytes, at, 4)?)?, number(bytes, at + 4, 4)?)
            }
        };
        // Of `_func`: the entry, then 4 bytes each.
        let first = if self.family == Family::Go116 { 8 } else { 4 };
        let at = self.entries.checked_add(at)?.checked_add(first)?;
        let name = self.name(number(bytes, at, 4)?)?;
        let moves = self.moves(entry, number(bytes, at + 12, 4)?)?;
        // Before it: args, deferreturn, pcsp, pcfile, pcln, npcdata, cuOffset, from 1.20 on startLine; funcID.
        let flags = at + if self.family == Family::Go120 { 37 } else { 33 };
        let flags = *bytes.get(usize::try_from(flags).ok()?)?;
        let end = moves.last()?.1;
        let mut add = |from: u64, to: u64, rule: Rule| {
            let Some(offset) = elf.offset(from) else { return };
            if from < to && elf.offset(to - 1) == Some(offset + (to - 1 - from)) {
                spans.add(offset, offset + (to - from), rule);
            }
        };
        let code = || elf.code(entry, (end - entry).min(MAX_CODE)).unwrap_or_default();
        let switches = match name {
            b"runtime.systemstack" => systemstack(&code()).into_iter().collect(),
            b"runtime.asmcgocall" => asmcgocall(&code()),
            _ => Vec::new(),
        };
        match name {
            _ if !switches.is_empty() => {
                add(entry, end, Rule::default());
                let until = SWITCHING.iter().filter_map(|what| find(&code(), what)).min();
                let until = entry + until.unwrap_or(0) as u64;
                let before = moves.iter().map(|&(from, to, moved)| (from, to.min(until), moved));
                self.add_moves(&before.collect::<Vec<_>>(), flags, &mut add);
                for (at, rule) in switches {
                    add(entry + at, entry + at + CALL, rule);
                }
            }
            // The kernel has a signal's handler return to its first instruction, of which the one before is looked up.
            b"runtime.sigreturn" | b"runtime.sigreturn__sigaction" => {
                add(entry - 1, end, Rule { cfa: cfa::SIGNAL, ..from_rsp(0) });
            }
            b"runtime.sigtramp" | b"runtime.cgoSigtramp" => self.add_moves(&moves, flags, &mut add),
            // Where goroutines and threads begin; what these two call runs on the scheduler's stack.
            b"runtime.mcall" | b"runtime.morestack" => add(entry, end, root()),
            _ if flags & TOPFRAME != 0 || ROOTS.contains(&name) => add(entry, end, root()),
            _ if flags & SPWRITE != 0 => add(entry, end, Rule::default()),
            _ => self.add_moves(&moves, flags, &mut add),
        }
        Some(())
    }

    fn add_moves(
        &self,
        moves: &[(u64, u64, i32)],
        flags: u8,
        add: &mut impl FnMut(u64, u64, Rule),
    ) {
        for &(from, to, moved) in moves {
            let Some(offset) = moved.checked_add(8).filter(|_| moved >= 0) else { continue };
            let mut rule = Rule { ra_offset: -8, ..from_rsp(offset) };
            if moved > 0 {
                // Compiled functions with a frame keep rbp at its top; of others it is not known.
                let keeps = self.family >= Family::Go118 && flags & ASM == 0;
                (rule.fp, rule.fp_offset) = if keeps { (fp::AT_CFA, -16) } else { (fp::LOST, 0) };
            }
            add(from, to, rule);
        }
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

/// Where Go's text begins: in the header up to 1.25, from then on in the module's description alone.
fn text(elf: &Elf<'_>, table: u64) -> Option<u64> {
    let module = || {
        let module = elf.section(MODULE)?.address;
        (pointer(elf, module)? == table).then(|| pointer(elf, module + MODULE_TEXT))?
    };
    pointer(elf, table + HEADER_TEXT).filter(|&text| text != 0).or_else(module)
}

/// What is at an address once the program is loaded: of position-independent ones in a relocation.
fn pointer(elf: &Elf<'_>, address: u64) -> Option<u64> {
    let relocations = elf.section(".rela.dyn").and_then(|section| elf.content(section).ok());
    let mut found = relocations.as_deref().unwrap_or_default().chunks_exact(24);
    let found =
        found.find(|one| one[..8] == address.to_le_bytes() && one[8..16] == RELATIVE.to_le_bytes());
    match found {
        Some(found) => number(found, 16, 8),
        None => number(&elf.code(address, 8)?, 0, 8),
    }
}

fn from_rsp(offset: i32) -> Rule {
    Rule { cfa: cfa::REGISTER, register: RSP as u8, offset, ..Rule::default() }
}

fn root() -> Rule {
    Rule { cfa: cfa::ROOT, register: RSP as u8, ..Rule::default() }
}

/// Where `systemstack` calls, on the scheduler's stack, and how to get to the goroutine's: through g, m and curg to
/// where the goroutine's stack pointer was put, which is where the return address is.
fn systemstack(code: &[u8]) -> Option<(u64, Rule)> {
    let call = find(code, &[0x48, 0x8b, 0x3f, 0xff, 0xd7])? + 3; // mov (%rdi),%rdi; call *%rdi
    // mov %fs:G,%rax; mov M(%rax),%rbx
    let tls = find(code, &[0x64, 0x48, 0x8b, 0x04, 0x25])?;
    let m = code.get(tls + 9..tls + 13).filter(|code| code[..3] == [0x48, 0x8b, 0x58])?[3];
    let curg = find(code, &[0x48, 0x3b, 0x83])?; // cmp CURG(%rbx),%rax
    let sp = find(code, &[0x48, 0x8b, 0x60])?; // mov SP(%rax),%rsp
    let rule = Rule {
        cfa: cfa::GO_SYSTEM_STACK,
        register: RSP as u8,
        offset: number(code, tls as u64 + 5, 4)? as u32 as i32,
        offset2: number(code, curg as u64 + 3, 4)? as u32 as i32,
        ra_offset: i32::from(m),
        fp_offset: i32::from(*code.get(sp + 3)?),
        ..Rule::default()
    };
    Some((call as u64, rule))
}

/// Where `asmcgocall` calls C, on the scheduler's stack or where it was called from a thread without a goroutine.
fn asmcgocall(code: &[u8]) -> Vec<(u64, Rule)> {
    let mut rules = Vec::new();
    let calls = code.windows(2).enumerate().filter(|(_, code)| *code == [0xff, 0xd0]); // call *%rax
    for (at, _) in calls {
        let after = &code[at + 2..];
        // mov G(%rsp),%rdi; mov 0x8(%rdi),%rsi; sub DEPTH(%rsp),%rsi
        if let Some(
            &[0x48, 0x8b, 0x7c, 0x24, g, 0x48, 0x8b, 0x77, 8, 0x48, 0x2b, 0x74, 0x24, depth],
        ) = after.first_chunk()
        {
            let offsets = (i32::from(g), i32::from(depth));
            let rule = Rule { offset: offsets.0, offset2: offsets.1, ..from_rsp(0) };
            rules.push((at as u64, Rule { cfa: cfa::GO_SAVED_DEPTH, ..rule }));
        }
        // mov SP(%rsp),%rsi; mov %rsi,%rsp
        if let Some(&[0x48, 0x8b, 0x74, 0x24, sp, 0x48, 0x89, 0xf4]) = after.first_chunk() {
            let rule = Rule { offset2: 8, ra_offset: -8, ..from_rsp(i32::from(sp)) };
            rules.push((at as u64, Rule { cfa: cfa::MEMORY, ..rule }));
        }
    }
    rules
}

fn find(code: &[u8], what: &[u8]) -> Option<usize> {
    code.windows(what.len()).position(|code| code == what)
}
