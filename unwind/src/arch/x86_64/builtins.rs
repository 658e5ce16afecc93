//! V8's builtins (Node, Chromium): one block of machine code without call frame information, all of
//! which keeps frame pointers (v8/src/execution/frames.h), as the code V8 makes at run time does.

use stackwire_collector_ebpf::{Rule, cfa};

use crate::elf::Elf;
use crate::pages::Spans;

/// Functions that return where the block is, and how long: one instruction each, in every release
/// since 2018.
const BLOCK: &str = "_ZN2v88internal23DefaultEmbeddedBlobCodeEv";
const LENGTH: &str = "_ZN2v88internal27DefaultEmbeddedBlobCodeSizeEv";
/// What each V8 exports, see `crate::v8`.
const EXPORTED: &str = "v8dbg_off_fp_function";
/// How `PushAllRegistersAndIterateStack` begins, by which garbage is collected, and its bytes
/// (src/heap/base/asm/x64/push_registers_asm.cc): push %rbp; mov %rsp,%rbp; push $0xcdcdcd.
const TRAMPOLINE: [u8; 9] = [0x55, 0x48, 0x89, 0xe5, 0x68, 0xcd, 0xcd, 0xcd, 0x00];
const TRAMPOLINE_BYTES: u64 = 33;
/// Of Node 20 it is 1.6 MB.
const MIN_LENGTH: u64 = 256 << 10;
const MAX_LENGTH: u64 = 64 << 20;

/// Adds the builtins, if this has any. `covered`: offsets that have rules.
pub fn add(elf: &Elf<'_>, covered: &[(u64, u64)], spans: &mut Spans) {
    // Symbols are looked through only where so much code has no rules.
    let gaps = || covered.windows(2).map(|two| (two[0].1, two[1].0));
    let Some(largest) = gaps().max_by_key(|(from, to)| to - from) else { return };
    if largest.1 - largest.0 < MIN_LENGTH {
        return;
    }
    // From V8 13.6 on those functions are hidden, and a stripped file does not have their names.
    let is_v8 = is_v8(elf);
    let builtins = block(elf).or_else(|| is_v8.then_some(largest));
    let is_trampoline = |&(from, to): &(u64, u64)| {
        (TRAMPOLINE_BYTES..MIN_LENGTH).contains(&(to - from)) && elf.has_at(from, &TRAMPOLINE)
    };
    let trampoline = gaps().filter(|_| is_v8).find(is_trampoline);
    let trampoline = trampoline.map(|(from, _)| (from, from + TRAMPOLINE_BYTES));
    for (from, to) in builtins.into_iter().chain(trampoline) {
        spans.add(from, to, Rule { cfa: cfa::FRAME_POINTER, ..Rule::default() });
    }
}

fn is_v8(elf: &Elf<'_>) -> bool {
    elf.exports().is_some_and(|exports| exports.symbol(EXPORTED).is_some())
}

/// Offsets in the file.
fn block(elf: &Elf<'_>) -> Option<(u64, u64)> {
    let start = match returned(elf, BLOCK)? {
        Returned::Value(address) | Returned::Address(address) => address,
        Returned::In(place) => *elf.words(place, 1)?.first()?,
    };
    let length = match returned(elf, LENGTH)? {
        Returned::Value(length) => length,
        Returned::In(place) => u64::from(u32::from_le_bytes(elf.code(place, 4)?.try_into().ok()?)),
        Returned::Address(_) => return None,
    };
    let offset = elf.offset(start)?;
    let is_inside = (MIN_LENGTH..=MAX_LENGTH).contains(&length)
        && elf.offset(start.checked_add(length - 1)?) == offset.checked_add(length - 1);
    is_inside.then_some((offset, offset + length))
}

enum Returned {
    Value(u64),
    Address(u64),
    /// What is at an address.
    In(u64),
}

/// What a function returns that does nothing else.
fn returned(elf: &Elf<'_>, function: &str) -> Option<Returned> {
    let mut at = elf.function(function)?;
    let mut code = elf.code(at, 32)?;
    // endbr64; push %rbp; mov %rsp,%rbp
    for skipped in [&[0xf3, 0x0f, 0x1e, 0xfa][..], &[0x55, 0x48, 0x89, 0xe5]] {
        if code.starts_with(skipped) {
            code.drain(..skipped.len());
            at += skipped.len() as u64;
        }
    }
    let relative = |from: usize| {
        let offset = i32::from_le_bytes(*code.get(from..)?.first_chunk()?);
        Some(at.wrapping_add(from as u64 + 4).wrapping_add(i64::from(offset) as u64))
    };
    match code[..] {
        // mov $value,%eax
        [0xb8, a, b, c, d, ..] => {
            Some(Returned::Value(u64::from(u32::from_le_bytes([a, b, c, d]))))
        }
        // lea place(%rip),%rax; mov (%rax),%eax
        [0x48, 0x8d, 0x05, _, _, _, _, 0x8b, 0x00, ..] => relative(3).map(Returned::In),
        // lea place(%rip),%rax
        [0x48, 0x8d, 0x05, ..] => relative(3).map(Returned::Address),
        // mov place(%rip),%rax
        [0x48, 0x8b, 0x05, ..] => relative(3).map(Returned::In),
        // mov place(%rip),%eax
        [0x8b, 0x05, ..] => relative(2).map(Returned::In),
        _ => None,
    }
}
