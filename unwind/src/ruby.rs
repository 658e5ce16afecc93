//! Where a Ruby keeps its frames, out of its file. What the kernel side begins with is hidden from
//! 3.3 on, and stripped files have no name of it: the execution context is found in the file's
//! thread-local storage, the function that runs instructions by what it looks like.
//!
//! Offsets are those of the version, by its headers (vm_core.h, iseq.h and
//! include/ruby/internal/core/rstring.h). Of a version that is not known the layout says that
//! alone: a wrong one would give wrong frames.

use gimli::{BaseAddresses, CieOrFde, EhFrame, LittleEndian, UnwindSection};
use object::elf;
use stackwire_collector_ebpf::ruby::{Layout, MAX_WORDS};

use crate::elf::Elf;
use crate::shared::Shared;

/// Bytes of `ruby_version` that are read.
const VERSION: usize = 16;
/// Smallest `vm_exec_core`, in bytes, and the fewest indirect jumps it has: one for each
/// instruction, of which there are more than a hundred.
const CORE_BYTES: u64 = 8 << 10;
const CORE_JUMPS: u64 = 64;
/// Most bytes of it for each of those.
const BYTES_A_JUMP: u64 = 512;
const CALL: u8 = 0xe8;
/// Most bytes of code that are looked at; a libruby with a JIT has 6 MB.
const MAX_CODE: u64 = 128 << 20;

/// The layout; none where the file is no Ruby.
pub(crate) fn layout(elf: &Elf<'_>) -> Option<Layout> {
    let exports = elf.exports()?;
    let text: [u8; VERSION] = exports.content(exports.find("ruby_version")?)?;
    let version = version(&text).unwrap_or(0);
    let known = offsets(version).and_then(|offsets| with_places(offsets, elf));
    Some(known.unwrap_or_else(|| Layout::unknown(version)))
}

/// `3.1.2` as 0x030102.
fn version(text: &[u8]) -> Option<u32> {
    let text = text.split(|&byte| byte == 0).next()?;
    let numbers = std::str::from_utf8(text).ok()?.split('.');
    let numbers: Vec<u8> = numbers.map(str::parse).collect::<Result<_, _>>().ok()?;
    let &[major, minor, patch] = &numbers[..] else { return None };
    Some(u32::from_be_bytes([0, major, minor, patch]))
}

/// Offsets in the objects of a version; none where they are not known.
fn offsets(version: u32) -> Option<Layout> {
    let of_3_0 = Layout {
        version,
        frame: 56,
        line_is_value: 1,
        lines: 120,
        line_entry: 8,
        length_in_flags: 1,
        ..Layout::default()
    };
    let of_3_1 = Layout { frame: 64, line_entry: 12, ..of_3_0 };
    let of_3_2 = Layout { line_is_value: 0, lines: 112, length_in_flags: 0, ..of_3_1 };
    match version >> 8 {
        0x0300 => Some(of_3_0),
        0x0301 => Some(of_3_1),
        0x0302 => Some(of_3_2),
        0x0303 | 0x0304 | 0x0400 => Some(Layout { frame: 56, ..of_3_2 }),
        _ => None,
    }
}

/// The layout with the places of what is in the file.
fn with_places(offsets: Layout, elf: &Elf<'_>) -> Option<Layout> {
    let origin = elf.origin()?;
    let (core, entry) = evaluator(elf)?;
    let words = u32::try_from(elf.thread_storage() / 8).ok()?.min(MAX_WORDS);
    let layout = Layout {
        module: elf.module_number()?.wrapping_sub(origin),
        core: core.0.wrapping_sub(origin),
        entry: entry.0.wrapping_sub(origin),
        core_bytes: u32::try_from(core.1 - core.0).ok()?,
        entry_bytes: u32::try_from(entry.1 - entry.0).ok()?,
        words,
        ..offsets
    };
    layout.is_sound().then_some(layout)
}

/// First address of a function and first behind it.
type Function = (u64, u64);

/// `vm_exec_core` and what calls it, `rb_vm_exec`.
fn evaluator(elf: &Elf<'_>) -> Option<(Function, Function)> {
    let mut functions = functions(elf);
    functions.retain(|&(start, _)| !elf.is_linkage_table(start));
    let bytes = functions.iter().try_fold(0u64, |all, (start, end)| all.checked_add(end - start));
    // Functions that lie in each other, of a file that was made to be slow.
    if bytes.is_none_or(|bytes| bytes > MAX_CODE) {
        return None;
    }
    let large = functions.iter().filter(|(start, end)| end - start >= CORE_BYTES);
    let found = large.filter_map(|&(start, end)| {
        let (bytes, jumps) = (end - start, jumps(&elf.code(start, end - start)?));
        let is_it = jumps >= CORE_JUMPS && bytes / jumps <= BYTES_A_JUMP;
        is_it.then_some((jumps, (start, end)))
    });
    let (_, core) = found.max()?;
    let mut callers = functions.iter().filter(|&&(start, end)| {
        elf.code(start, end - start).is_some_and(|code| calls(&code, start, core.0))
    });
    let entry = callers.next()?;
    callers.next().is_none().then_some((core, *entry))
}

/// Functions by the call frame information.
fn functions(elf: &Elf<'_>) -> Vec<Function> {
    let Some(section) = elf.section(".eh_frame") else { return Vec::new() };
    let Ok(content) = elf.content(section) else { return Vec::new() };
    let mut frames = EhFrame::new(&content, LittleEndian);
    frames.set_address_size(8);
    let bases = BaseAddresses::default().set_eh_frame(section.address.0);
    let (mut entries, mut shared) = (frames.entries(&bases), Shared::default());
    let mut functions = Vec::new();
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(partial) = entry else { continue };
        let cie = |section: &EhFrame<_>, bases: &_, offset| shared.entry(section, bases, offset);
        if let Ok(fde) = partial.parse(cie) {
            functions.push((fde.initial_address(), fde.end_address()));
        }
    }
    functions.retain(|(start, end)| start < end);
    functions
}

/// Indirect jumps: `ff /4` by a register, or by memory with a register and at most 8 bits of
/// offset. Not what stands behind a distance below zero, which ends in `ff`, too: there a prefix
/// looks like `ff /4` by `rsi` or `rsp`.
fn jumps(code: &[u8]) -> u64 {
    let is_jump = |bytes: &&[u8]| match **bytes {
        [0xff, 0xff, ..] => false,
        [before, 0xff, 0x66, _] => before == 0x41,
        [_, 0xff, 0x64, behind] => behind == 0x24,
        [_, 0xff, by, _] => matches!(by, 0x20..=0x27 | 0x60..=0x67 | 0xe0..=0xe7),
        _ => false,
    };
    code.windows(4).filter(is_jump).count() as u64
}

/// Whether code that begins at an address calls a function.
fn calls(code: &[u8], start: u64, function: u64) -> bool {
    let call = |(at, bytes): (usize, &[u8])| {
        let distance = i32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]);
        let behind = start.wrapping_add(at as u64 + 5);
        bytes[0] == CALL && behind.wrapping_add_signed(distance.into()) == function
    };
    code.windows(5).enumerate().any(call)
}

impl Elf<'_> {
    /// Where the loader writes the number of this file's thread-local storage.
    fn module_number(&self) -> Option<u64> {
        let relocations = self.content(self.section(".rela.dyn")?).ok()?;
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        // Of the file itself: without a symbol.
        let is_it = |one: &&[u8]| word(&one[8..16]) == u64::from(elf::R_X86_64_DTPMOD64);
        relocations.chunks_exact(24).find(is_it).map(|one| word(&one[..8]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_three_numbers() {
        assert_eq!(version(b"3.1.2\0x"), Some(0x0003_0102));
        assert_eq!(version(b"3.4.10"), Some(0x0003_040a));
        for text in [&b"3.1"[..], b"3.1.2.3", b"3.1.256", b"", b"\xff.1.2"] {
            assert_eq!(version(text), None);
        }
        assert!(offsets(0x0003_040a).unwrap().is_sound());
        assert!(offsets(0x0004_0005).unwrap().is_sound());
        assert_eq!(offsets(0x0004_0100), None);
        assert_eq!(offsets(0x0002_0704), None);
    }

    #[test]
    fn calls_and_jumps_are_found_in_code() {
        // call +3; jmp *%rax; jmp *(%rbx); jmp *16(%r12); jmp *8(%r14); call *%rax; nop; nop.
        let code = [
            [CALL, 3, 0, 0, 0],
            [0xff, 0xe0, 0xff, 0x23, 0x41],
            [0xff, 0x64, 0x24, 16, 0x41],
            [0xff, 0x66, 8, 0xff, 0xd0],
            [0x90; 5],
        ];
        let code = code.concat();
        assert_eq!(jumps(&code), 4);
        assert!(calls(&code, 0x1000, 0x1008) && !calls(&code, 0x1000, 0x1009));
        // call -9; nopw (%rax).
        let code = [CALL, 0xf7, 0xff, 0xff, 0xff, 0x66, 0x0f, 0x1f, 0];
        assert_eq!(jumps(&code), 0);
        assert!(calls(&code, 0x1000, 0xffc));
        assert!(!calls(&code[..4], 0x1000, 0x1009));
    }
}
