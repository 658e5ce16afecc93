//! Rules for the places where Go's runtime changes stacks through its own structures, which its
//! instructions alone do not tell. The offsets in these structures change from release to release,
//! so they are read from the instructions of `runtime.systemstack` (`runtime/asm_amd64.s`). What is
//! not recognized is said to be unknown.
//!
//! Pure. Called by `go.rs` for functions of these names.

use stackwire_collector_ebpf::arch::{RBX, RSP};
use stackwire_collector_ebpf::{Rule, cfa, fp, ra};

use super::code::Found;

/// Longest piece of code looked into.
pub const MAX_CODE: u64 = 1 << 10;
/// push %rbp; mov %rsp,%rbp
const PUSHED: [u8; 4] = [0x55, 0x48, 0x89, 0xe5];
/// Any byte, in a pattern.
const ANY: i16 = -1;

/// A piece of code and its address.
#[derive(Clone, Copy, Debug)]
pub struct Code<'a> {
    pub start: u64,
    pub bytes: &'a [u8],
}

/// Where the running goroutine is: from the thread's own variables through structures of the
/// runtime.
#[derive(Clone, Copy, Debug)]
pub struct Runtime {
    /// Offset of g from the thread pointer, or the address of the word that has it.
    slot: Slot,
    m: i32,
    curg: i32,
    /// Of the goroutine: where its stack pointer was put.
    sp: i32,
}

#[derive(Clone, Copy, Debug)]
enum Slot {
    Offset(i32),
    In(u64),
}

impl Runtime {
    /// As `runtime.systemstack` goes there.
    pub fn of(systemstack: Code<'_>) -> Option<Self> {
        let m = systemstack.find(0, &[0x48, 0x8b, 0x58, ANY])?; // mov M(%rax),%rbx
        let curg = systemstack.find(m, &[0x48, 0x3b, 0x83])?; // cmp CURG(%rbx),%rax
        let sp = systemstack.find(curg, &[0x48, 0x8b, 0x60, ANY])?; // mov SP(%rax),%rsp
        Some(Self {
            slot: systemstack.slot()?,
            m: systemstack.byte(m + 3)?,
            curg: systemstack.word(curg + 3)?,
            sp: systemstack.byte(sp + 3)?,
        })
    }

    /// The rule of the instruction that `at` comes after, where the scheduler's stack is in use.
    fn rule(&self, cfa: u8, found: &Found) -> Rule {
        let rule = Rule {
            cfa,
            register: RSP as u8,
            offset2: self.curg,
            ra_offset: self.m,
            fp_offset: self.sp,
            ..Rule::default()
        };
        match self.slot {
            Slot::Offset(offset) => Rule { offset, ..rule },
            Slot::In(address) => Rule { kept: address.wrapping_sub(found.to) as i32, ..rule },
        }
    }
}

impl<'a> Code<'a> {
    fn find(&self, from: usize, pattern: &[i16]) -> Option<usize> {
        let is = |(byte, &wanted): (&u8, &i16)| wanted == ANY || i16::from(*byte) == wanted;
        let rest = self.bytes.get(from..)?;
        let mut windows = rest.windows(pattern.len());
        Some(from + windows.position(|bytes| bytes.iter().zip(pattern).all(is))?)
    }

    fn byte(&self, at: usize) -> Option<i32> {
        self.bytes.get(at).map(|&byte| i32::from(byte as i8))
    }

    fn word(&self, at: usize) -> Option<i32> {
        Some(i32::from_le_bytes(*self.bytes.get(at..)?.first_chunk()?))
    }

    /// How it gets at g: mov %fs:G,%rax; or mov $G,%rcx; or, in libraries, mov IN(%rip),%rcx.
    fn slot(&self) -> Option<Slot> {
        if let Some(at) = self.find(0, &[0x64, 0x48, 0x8b, 0x04, 0x25]) {
            return Some(Slot::Offset(self.word(at + 5)?));
        }
        let through = self.find(0, &[0x64, 0x48, 0x8b, 0x01])?; // mov %fs:(%rcx),%rax
        let at = through.checked_sub(7)?;
        match self.bytes.get(at..at + 3)? {
            [0x48, 0xc7, 0xc1] => Some(Slot::Offset(self.word(at + 3)?)),
            [0x48, 0x8b, 0x0d] => {
                let next = self.start + through as u64;
                Some(Slot::In(next.wrapping_add(i64::from(self.word(at + 3)?) as u64)))
            }
            _ => None,
        }
    }
}

/// Whether a function changes stacks: up to Go 1.16 the table does not say.
pub fn changes(name: &[u8]) -> bool {
    const THESE: [&[u8]; 7] = [
        b"runtime.clone",
        b"runtime.mcall",
        b"runtime.morestack",
        b"runtime.systemstack",
        b"runtime.asmcgocall",
        b"runtime.gogo",
        b"gogo",
    ];
    THESE.contains(&name)
}

/// A rule that holds for a part of an instruction.
pub type Part = (u64, u64, Rule);

/// The rule of an instruction of one of these functions, where it is another than what the
/// instructions say; `None`: what they say holds.
pub fn rule(name: &[u8], code: Code<'_>, found: &Found, runtime: Option<&Runtime>) -> Option<Part> {
    let whole = |rule| Some((found.from, found.to, rule));
    let in_code = (found.from - code.start) as usize;
    let through = |cfa, fp| {
        let Some(runtime) = runtime else { return whole(unknown()) };
        let rule = Rule { fp, ..runtime.rule(cfa, found) };
        match runtime.slot {
            Slot::Offset(_) => whole(rule),
            // The word is found from where a call returns to, whose last byte is looked up.
            Slot::In(_) if matches!(code.bytes.get(in_code), Some(0xe8 | 0xff)) => {
                Some((found.to - 1, found.to, rule))
            }
            Slot::In(_) => whole(unknown()),
        }
    };
    let framed = if code.bytes.starts_with(&PUSHED) { fp::AT_CFA } else { fp::SAME };
    match name {
        // What it calls does not come back here; the goroutine goes on elsewhere.
        b"runtime.mcall" if found.left => whole(root()),
        // Its function goes on where it was, or is begun anew.
        b"runtime.morestack" if found.left => {
            let (from, to, rule) = through(cfa::GO_MORE_STACK, fp::LOST)?;
            Some((from, to, Rule { ra: rule.ra | ra::EXACT, ..rule }))
        }
        // rbp may say where the frame was before others moved the goroutine's stack meanwhile.
        // Before it returns it is on that stack again.
        b"runtime.systemstack"
            if found.left && found.rule.is_none_or(|rule| rule.cfa == cfa::OTHER_STACK) =>
        {
            through(cfa::GO_SYSTEM_STACK, framed)
        }
        b"runtime.asmcgocall" => match saved_depth(code, framed) {
            Some(depth) => depth.holds.contains(&in_code).then(|| whole(depth.rule))?,
            None if found.left => whole(unknown()),
            None => None,
        },
        // The kernel gives the child another stack pointer before it returns, and who is there
        // cannot be told.
        b"runtime.clone" => {
            let after = code.find(0, &[0x0f, 0x05]).is_some_and(|syscall| in_code > syscall); // syscall
            after.then(|| whole(if found.left { root() } else { unknown() }))?
        }
        b"gogo" | b"runtime.gogo" if found.left => {
            let Some((load, pc)) = resumes_at(code) else { return whole(unknown()) };
            let rule = Rule { cfa: cfa::REGISTER, register: RSP as u8, ..Rule::default() };
            let frame = code.find(0, &[0x48, 0x8b, 0x6b]); // mov BP(%rbx),%rbp
            let fp = if frame.is_some_and(|frame| in_code > frame) { fp::SAME } else { fp::LOST };
            let (ra, ra_offset) =
                if in_code <= load { (ra::AT_RBX, pc) } else { (ra::REGISTER, RBX as i32) };
            whole(Rule { fp, ra: ra | ra::EXACT, ra_offset, ..rule })
        }
        _ => None,
    }
}

struct SavedDepth {
    /// Offsets of instructions.
    holds: std::ops::RangeInclusive<usize>,
    rule: Rule,
}

/// In `asmcgocall`, on the scheduler's stack: from where the depth is put there until the
/// goroutine's stack is back.
fn saved_depth(code: Code<'_>, fp: u8) -> Option<SavedDepth> {
    let begin = code.find(0, &[0x48, 0x29, 0xd7])?; // sub %rdx,%rdi
    // mov %rdi,DEPTH(%rsp)
    let (stored, depth) = match code.bytes.get(begin + 3..begin + 8)? {
        [0x48, 0x89, 0x3c, 0x24, _] => (begin + 7, 0),
        &[0x48, 0x89, 0x7c, 0x24, depth] => (begin + 8, i32::from(depth as i8)),
        _ => return None,
    };
    // mov G(%rsp),%rdi; mov 8(%rdi),%rsi
    let again = code.find(stored, &[0x48, 0x8b, 0x7c, 0x24, ANY, 0x48, 0x8b, 0x77, 8])?;
    let back = code.find(again, &[0x48, 0x89, 0xf4])?; // mov %rsi,%rsp
    let rule = Rule {
        cfa: cfa::GO_SAVED_DEPTH,
        register: RSP as u8,
        fp,
        offset: code.byte(again + 4)?,
        offset2: depth,
        ..Rule::default()
    };
    Some(SavedDepth { holds: stored..=back, rule })
}

/// In `gogo`: the instruction that loads where the goroutine goes on, and from where behind rbx.
fn resumes_at(code: Code<'_>) -> Option<(usize, i32)> {
    let load = code.find(0, &[0x48, 0x8b, 0x5b, ANY, 0xff, 0xe3])?; // mov PC(%rbx),%rbx; jmp *%rbx
    Some((load, code.byte(load + 3)?))
}

/// There is no caller.
pub fn root() -> Rule {
    Rule { cfa: cfa::ROOT, register: RSP as u8, ..Rule::default() }
}

/// The code changes stacks, and how is not known.
pub fn unknown() -> Rule {
    Rule { cfa: cfa::UNKNOWN_SWITCH, register: RSP as u8, ..Rule::default() }
}
