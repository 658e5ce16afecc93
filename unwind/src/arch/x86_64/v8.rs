//! V8's builtins (Node, Chromium): one block of machine code without call frame information, all of
//! which keeps frame pointers (v8/src/execution/frames.h), as the code V8 makes at run time does.

use stackwire_collector_ebpf::{Rule, cfa};

use crate::elf::Elf;
use crate::pages::Spans;

/// Functions that return where the block is, and how long: one instruction each, in every release
/// since 2018.
const BLOCK: &str = "_ZN2v88internal23DefaultEmbeddedBlobCodeEv";
const LENGTH: &str = "_ZN2v88internal27DefaultEmbeddedBlobCodeSizeEv";
/// Of Node 20 it is 1.6 MB.
const MIN_LENGTH: u64 = 256 << 10;
const MAX_LENGTH: u64 = 64 << 20;

/// Adds the builtins, if this has any. `covered`: offsets that have rules.
pub fn add(elf: &Elf<'_>, covered: &[(u64, u64)], spans: &mut Spans) {
    // Symbols are looked through only where so much code has no rules.
    let gap = covered.windows(2).any(|two| two[1].0 - two[0].1 >= MIN_LENGTH);
    let Some((start, length)) = gap.then(|| block(elf)).flatten() else { return };
    if let Some(offset) = elf.offset(start)
        && elf.offset(start + length - 1) == Some(offset + length - 1)
    {
        let rule = Rule { cfa: cfa::FRAME_POINTER, ..Rule::default() };
        spans.add(offset, offset + length, rule);
    }
}

fn block(elf: &Elf<'_>) -> Option<(u64, u64)> {
    let start = match returned(elf, BLOCK)? {
        Returned::Value(address) | Returned::Address(address) => address,
        Returned::In(_) => return None,
    };
    let length = match returned(elf, LENGTH)? {
        Returned::Value(length) => length,
        Returned::In(address) => {
            let bytes = elf.code(address, 4)?;
            u64::from(u32::from_le_bytes(bytes.try_into().ok()?))
        }
        Returned::Address(_) => return None,
    };
    (MIN_LENGTH..=MAX_LENGTH).contains(&length).then_some((start, length))
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
    let relative = |from: usize, length: u64| {
        let offset = i32::from_le_bytes(code.get(from..from + 4)?.try_into().ok()?);
        Some(at.wrapping_add(length).wrapping_add(i64::from(offset) as u64))
    };
    match code[..] {
        [0xb8, a, b, c, d, ..] => {
            Some(Returned::Value(u64::from(u32::from_le_bytes([a, b, c, d]))))
        }
        [0x48, 0x8d, 0x05, ..] => relative(3, 7).map(Returned::Address),
        [0x8b, 0x05, ..] => relative(2, 6).map(Returned::In),
        _ => None,
    }
}
