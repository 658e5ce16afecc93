//! The functions a C compiler puts into every program and library: `_init`, `_fini`, and those of
//! GCC's `crtstuff.c`, which run constructors and destructors. Distributions build them without
//! call frame information, and short programs spend a tenth of their time there, where memory is
//! written for the first time.
//!
//! They are found through `.init_array`, `.fini_array`, the sections of the first two, and the
//! functions that those call. Their instructions are followed (`code/`). Code that already has
//! rules is left alone. Code that does not look like these functions gets no rules: the same arrays
//! hold constructors of programs built without call frame information, and nobody knows where those
//! end.

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction};
use stackwire_collector_ebpf::arch::RSP;
use stackwire_collector_ebpf::{Rule, cfa};

use super::code::{Found, Function, rules};
use crate::elf::Elf;
use crate::pages::Spans;

/// Entries looked at, of each array: GCC's are among the first.
const MAX_ENTRIES: u64 = 8;
/// Bytes of a function: the longest has 60.
const MAX_LENGTH: u64 = 96;
/// Deepest the stack is, with the return address: they push one register, or make room for one.
const MAX_DEPTH: i32 = 16;
/// Instructions followed.
const MAX_INSTRUCTIONS: usize = 4096;

/// Adds them. `covered`: offsets that have rules.
pub fn add(elf: &Elf<'_>, covered: &[(u64, u64)], kept: Option<u32>, spans: &mut Spans) {
    let mut left = MAX_INSTRUCTIONS;
    let first = first(elf);
    let mut called: Vec<u64> = first
        .iter()
        .flat_map(|&start| {
            let bytes = code(elf, covered, start, MAX_LENGTH);
            let found = followed(start, &bytes, kept, &mut left);
            targets(start, &bytes, &found.unwrap_or_default())
        })
        .filter(|target| !elf.is_linkage_table(*target))
        .collect();
    called.extend(&first);
    called.sort_unstable();
    called.dedup();
    // One ends where the next begins, so all are found before any has rules.
    for (index, &start) in called.iter().enumerate() {
        let until = called.get(index + 1).map_or(MAX_LENGTH, |next| next - start);
        let bytes = code(elf, covered, start, until.min(MAX_LENGTH));
        for one in followed(start, &bytes, kept, &mut left).unwrap_or_default() {
            if let (Some(rule), Some(from)) = (one.rule, elf.offset(one.from)) {
                spans.add(from, from.saturating_add(one.to - one.from), rule);
            }
        }
    }
}

/// Addresses of what runs at the beginning and at the end.
fn first(elf: &Elf<'_>) -> Vec<u64> {
    let sections = [".init", ".fini"].into_iter().filter_map(|name| elf.section(name));
    let mut found: Vec<u64> = sections.map(|section| section.address.0).collect();
    for name in [".init_array", ".fini_array"] {
        let words = elf.section(name).and_then(|section| {
            elf.words(section.address.0, (section.size / 8).min(MAX_ENTRIES) as usize)
        });
        found.extend(words.unwrap_or_default());
    }
    found
}

/// The code from an address on that has no rules; empty where some has.
fn code(elf: &Elf<'_>, covered: &[(u64, u64)], address: u64, most: u64) -> Vec<u8> {
    let Some(offset) = elf.offset(address) else { return Vec::new() };
    let next = covered.get(covered.partition_point(|&(_, end)| end <= offset));
    let gap = next.map_or(most, |&(start, _)| start.saturating_sub(offset));
    elf.code_until(address, gap.min(most))
}

/// The rules of a function, or none when it is not like those of GCC. It is not like them when its
/// stack is deeper, or when it returns or jumps elsewhere with something left on its stack. This
/// happens where a call that never returns is taken for one that does.
fn followed(start: u64, bytes: &[u8], kept: Option<u32>, left: &mut usize) -> Option<Vec<Found>> {
    let found = rules(&Function { start, bytes, keeps_all: None }, kept, left);
    let is_like = |one: &Found| {
        let depth = one.rule.as_ref().and_then(depth).filter(|depth| *depth <= MAX_DEPTH);
        let ends = instruction(start, bytes, one).is_some_and(|it| leaves(&it, start, bytes));
        !one.left && depth.is_some_and(|depth| !ends || depth == 8)
    };
    found.iter().all(is_like).then_some(found)
}

fn depth(rule: &Rule) -> Option<i32> {
    (rule.cfa == cfa::REGISTER && u32::from(rule.register & 15) == RSP).then_some(rule.offset)
}

fn instruction(start: u64, bytes: &[u8], one: &Found) -> Option<Instruction> {
    let bytes = bytes.get((one.from - start) as usize..)?;
    Some(Decoder::with_ip(64, bytes, one.from, DecoderOptions::NONE).decode())
}

/// Whether the function ends with it.
fn leaves(it: &Instruction, start: u64, bytes: &[u8]) -> bool {
    let inside = |address: u64| address.wrapping_sub(start) < bytes.len() as u64;
    match it.flow_control() {
        FlowControl::Return | FlowControl::IndirectBranch => true,
        FlowControl::UnconditionalBranch => !inside(it.near_branch_target()),
        _ => false,
    }
}

/// Functions it calls, or goes on to at its end: beyond all that was found to be its own.
fn targets(start: u64, bytes: &[u8], found: &[Found]) -> Vec<u64> {
    let end = found.last().map_or(start, |last| last.to);
    let instructions = found.iter().filter_map(|one| instruction(start, bytes, one));
    let calls = instructions.filter(|it| {
        let code = it.code();
        code == Code::Call_rel32_64 || matches!(code, Code::Jmp_rel32_64 | Code::Jmp_rel8_64)
    });
    calls.map(|it| it.near_branch_target()).filter(|at| !(start..end).contains(at)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use stackwire_model::FileOffset;

    #[test]
    fn constructors_and_destructors_of_this_program_have_rules() {
        let file = File::open(std::env::current_exe().unwrap()).unwrap();
        let elf = Elf::open(&file).unwrap();
        let table = crate::compile(&file).unwrap();
        let names = [
            "_init",
            "_fini",
            "__do_global_dtors_aux",
            "frame_dummy",
            "register_tm_clones",
            "deregister_tm_clones",
        ];
        for name in names {
            let start = elf.function(name).unwrap();
            let code = elf.code_until(start, 16);
            let first = Decoder::with_ip(64, &code, start, DecoderOptions::NONE).decode();
            for at in [start, first.next_ip()] {
                assert!(
                    table.rule(FileOffset(elf.offset(at).unwrap())).is_some(),
                    "{name}: {at:#x}"
                );
            }
        }
    }

    #[test]
    fn what_is_not_like_them_has_no_rules() {
        let rules =
            |bytes: &[u8]| followed(0x1000, bytes, None, &mut 1000).map(|found| found.len());
        // push %rbp; mov %rsp,%rbp; call elsewhere; pop %rbp; ret
        let like = [0x55, 0x48, 0x89, 0xe5, 0xe8, 0, 1, 0, 0, 0x5d, 0xc3];
        assert_eq!(rules(&like), Some(5));
        // Deeper: push %rbp; push %rbx; pop %rbx; pop %rbp; ret
        assert_eq!(rules(&[0x55, 0x53, 0x5b, 0x5d, 0xc3]), None);
        // The call never returns, and the next function follows: push %rbp; call abort; xor
        // %eax,%eax; ret
        assert_eq!(rules(&[0x55, 0xe8, 0, 1, 0, 0, 0x31, 0xc0, 0xc3]), None);
        // push %rax; jmp elsewhere
        assert_eq!(rules(&[0x50, 0xe9, 0, 1, 0, 0]), None);
        // Jumps inside a function are no functions: 0: dec %eax; jne 0; jmp 0
        let bytes = [0xff, 0xc8, 0x75, 0xfc, 0xeb, 0xfa];
        let found = followed(0x1000, &bytes, None, &mut 1000).unwrap();
        assert_eq!(targets(0x1000, &bytes, &found), []);
    }
}
