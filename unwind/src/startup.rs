//! The functions a C compiler puts into every program and library: `_init`, `_fini`, and those of GCC's `crtstuff.c`, which run
//! constructors and destructors. Distributions build them without call frame information, and short programs spend a tenth of
//! their time there, where memory is written for the first time.
//!
//! Found by `.init_array`, `.fini_array` and the sections of the first two, and by whom those call; their instructions are followed
//! (`code/`). Whatever has rules is left alone.

use iced_x86::{Decoder, DecoderOptions};

use crate::code::{Function, rules};
use crate::elf::Elf;
use crate::pages::Spans;

/// Entries looked at, of each array: GCC's are among the first.
const MAX_ENTRIES: u64 = 64;
/// Functions, and bytes of each: there are six, the longest of 60 bytes.
const MAX_FUNCTIONS: usize = 16;
const MAX_LENGTH: u64 = 512;
/// Instructions followed.
const MAX_INSTRUCTIONS: usize = 4096;

/// Adds them. `covered`: offsets that have rules.
pub fn add(elf: &Elf<'_>, covered: &[(u64, u64)], kept: Option<u32>, spans: &mut Spans) {
    let mut left = MAX_INSTRUCTIONS;
    let mut functions: Vec<u64> =
        first(elf).into_iter().filter(|&at| gap(elf, covered, at).is_some()).collect();
    functions.truncate(MAX_FUNCTIONS);
    let mut at = 0;
    while at < functions.len() {
        for target in targets(&bytes(elf, covered, &functions, functions[at])) {
            let target = functions[at].wrapping_add(target as u64);
            let is_new = !functions.contains(&target) && functions.len() < MAX_FUNCTIONS;
            if is_new && gap(elf, covered, target).is_some() {
                functions.push(target);
            }
        }
        at += 1;
    }
    // One ends where the next begins, so all are found before any is followed.
    for &start in &functions {
        let bytes = bytes(elf, covered, &functions, start);
        let function = Function { start, bytes: &bytes, keeps_all: None };
        for one in rules(&function, kept, &mut left) {
            if let (Some(rule), Some(from)) = (one.rule, elf.offset(one.from)) {
                spans.add(from, from.saturating_add(one.to - one.from), rule);
            }
        }
    }
}

/// Addresses of what runs at the beginning and at the end.
fn first(elf: &Elf<'_>) -> Vec<u64> {
    let sections = [".init", ".fini"].into_iter().filter_map(|name| elf.section(name));
    let mut found: Vec<u64> = sections.map(|section| section.address).collect();
    for name in [".init_array", ".fini_array"] {
        let words = elf.section(name).and_then(|section| {
            elf.words(section.address, (section.size / 8).min(MAX_ENTRIES) as usize)
        });
        found.extend(words.unwrap_or_default());
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// How long no rule holds from an address on; none where one does, or nothing is.
fn gap(elf: &Elf<'_>, covered: &[(u64, u64)], address: u64) -> Option<u64> {
    let offset = elf.offset(address)?;
    let next = covered.get(covered.partition_point(|&(_, end)| end <= offset));
    let end = next.map_or(u64::MAX, |&(start, _)| start);
    (end > offset).then(|| end - offset)
}

/// A function's code, as far as the next function.
fn bytes(elf: &Elf<'_>, covered: &[(u64, u64)], functions: &[u64], start: u64) -> Vec<u8> {
    let next = functions.iter().filter(|&&other| other > start).min();
    let until = next.map_or(MAX_LENGTH, |next| next - start);
    elf.code_until(start, gap(elf, covered, start).unwrap_or(0).min(until).min(MAX_LENGTH))
}

/// Where it calls or jumps to, as distances from its start.
fn targets(bytes: &[u8]) -> Vec<i64> {
    let mut found = Vec::new();
    for one in Decoder::with_ip(64, bytes, 0, DecoderOptions::NONE) {
        if one.is_invalid() {
            break;
        }
        if one.is_call_near() || one.is_jmp_near() {
            found.push(one.near_branch_target() as i64);
        }
    }
    found
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::fs::File;

    use super::*;

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
                assert!(table.rule(elf.offset(at).unwrap()).is_some(), "{name}: {at:#x}");
            }
        }
    }
}
