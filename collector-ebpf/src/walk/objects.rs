//! Objects of CPython in the memory of the process that runs: reads them, and hands over what names
//! a code object that was not met before. They may hold anything.
//!
//! Called by `by_frame_list.rs`, whose [`List`] has the room.

use aya_ebpf::bindings::BPF_RB_AVAIL_DATA;
use aya_ebpf::helpers::bpf_probe_read_user as read_user;
use aya_ebpf::helpers::generated::bpf_probe_read_user;
use stackwire_collector_ebpf::cpython::{
    CODE_BYTES, CodeHead, Entry, KNOWN_CODES, LAYOUTS, Layout, MAX_LINES, MAX_NAME, MAX_NEW,
    MAX_PATH, known_word,
};
use stackwire_collector_ebpf::{RING_BYTES, RecordKind, SampleHeader, masked};

use crate::maps::{
    CODE_ROOM, CODES, Code, KNOWN, LISTS, List, PYTHON_LAYOUTS, SAMPLES, SCRATCH, hand_over,
};

/// Bytes of a string's head, and where its length and its state are (Include/cpython/
/// unicodeobject.h).
const TEXT: usize = 40;
const TEXT_LENGTH: u64 = 16;
const TEXT_STATE: u64 = 32;
/// Bits of that state.
const COMPACT: u32 = 1 << 5;
const ASCII: u32 = 1 << 6;
/// `ob_type` of an object, `ob_size` and `ob_sval` of `bytes`.
const TYPE: u64 = 8;
const BYTES_LENGTH: u64 = 16;
const BYTES: u64 = 32;

/// A word of the process.
#[inline(always)]
pub fn word(address: u64, offset: u16) -> Option<u64> {
    let at = address.wrapping_add(u64::from(offset)) as *const u64;
    // SAFETY: the helper checks the address and fails rather than fault.
    unsafe { read_user(at) }.ok()
}

/// A word of what was read.
#[inline(always)]
pub fn word_in(bytes: &[u8; 264], offset: u16) -> u64 {
    let at = masked::<0xff>(u64::from(offset));
    // SAFETY: masked to less than the length less a word.
    unsafe { bytes.as_ptr().add(at).cast::<u64>().read_unaligned() }
}

/// Reads the first bytes of an object.
#[inline(always)]
pub fn read(all: &mut List, address: u64, bytes: usize) -> Option<()> {
    let to = all.bytes.as_mut_ptr().cast();
    // SAFETY: there is room for as many bytes; the helper checks the address and fails rather than
    // fault.
    let failed = unsafe { bpf_probe_read_user(to, bytes as u32, address as *const _) };
    (failed == 0).then_some(())
}

/// Notes a code object that was not handed over yet.
#[inline(always)]
pub fn note_new(all: &mut List, entry: Entry) {
    let word = known_word(all.start, entry.code, entry.cookie());
    let known = KNOWN.get(word as u32 & (KNOWN_CODES - 1));
    if known == Some(&word) || all.new >= MAX_NEW as u64 {
        return;
    }
    // Once of one that calls itself.
    for index in 0..MAX_NEW {
        if index as u64 >= all.new {
            break;
        }
        // SAFETY: the index is less than the length.
        let other = unsafe { &*all.news.as_ptr().add(index) };
        if other.code == entry.code && other.cookie() == entry.cookie() {
            return;
        }
    }
    let at = masked::<{ MAX_NEW as u64 - 1 }>(all.new);
    // SAFETY: masked to less than the length.
    unsafe {
        let to = all.news.as_mut_ptr().add(at);
        (*to).code = entry.code;
        (*to).rest = entry.rest;
    }
    all.new += 1;
}

/// Hands over what names new code objects.
#[inline(always)]
pub fn hand_over_new(slot: u32) {
    for index in 0..MAX_NEW as u32 {
        if define(index, slot) == 0 {
            break;
        }
    }
}

/// Hands over what names the new code object with this number; 0: there is none. A global function,
/// as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn define(index: u32, slot: u32) -> u64 {
    let (Some(all), Some(code)) = (LISTS.get_ptr_mut(slot), CODES.get_ptr_mut(slot)) else {
        return 0;
    };
    // SAFETY: as in `found`.
    let (all, code) = unsafe { (&mut *all, &mut *code) };
    if u64::from(index) >= all.new {
        return 0;
    }
    let at = masked::<{ MAX_NEW as u64 - 1 }>(u64::from(index));
    // SAFETY: masked to less than the length.
    let entry = unsafe { *all.news.as_ptr().add(at) };
    // The names of some functions are not worth the samples of others.
    if SAMPLES.query(BPF_RB_AVAIL_DATA as u64) > u64::from(RING_BYTES / 2) {
        return 0;
    }
    let Some(layout) = PYTHON_LAYOUTS.get(all.layout as u32 & (LAYOUTS - 1)) else { return 0 };
    let Some(length) = gather(all, code, layout, entry) else { return 1 };
    let Some(scratch) = SCRATCH.get_ptr(slot) else { return 0 };
    // SAFETY: as in `found`.
    let scratch = unsafe { &*scratch };
    // Field by field: a whole struct would be copied by a call to memcpy.
    code.header.time_ns = scratch.header.time_ns;
    code.header.start_boottime_ns = scratch.header.start_boottime_ns;
    code.header.pid = scratch.header.pid;
    code.header.cpu = scratch.header.cpu;
    code.header.kind = RecordKind::Code as u8;
    // SAFETY: `length` is at most the size of what the pointer points to, which the verifier
    // checks.
    if unsafe { hand_over((code as *mut Code).cast(), length) } {
        let word = known_word(all.start, entry.code, entry.cookie());
        if let Some(known) = KNOWN.get_ptr_mut(word as u32 & (KNOWN_CODES - 1)) {
            // SAFETY: the pointer came from a successful lookup. A word that another CPU replaces
            // is handed over again.
            unsafe { *known = word };
        }
    }
    1
}

/// Puts the record of a code object together; returns its bytes.
#[inline(always)]
fn gather(all: &mut List, to: &mut Code, layout: &Layout, entry: Entry) -> Option<usize> {
    read(all, entry.code, CODE_BYTES)?;
    let [name, path, lines] =
        [layout.name, layout.path, layout.lines].map(|offset| word_in(&all.bytes, offset));
    let first_line = word_in(&all.bytes, layout.first_line) as u32;
    to.head.code = entry.code;
    to.head.cookie = entry.cookie();
    to.head.version = layout.version;
    to.head.first_line = first_line as i32;

    read(all, name, TEXT)?;
    let (state, length, from) = text(all, name, layout)?;
    to.head.name_state = state;
    to.head.name_length = length;
    let name_bytes = copy::<{ MAX_NAME as u64 }, 1023>(&mut to.bytes, 0, from, length);
    to.head.name_bytes = name_bytes as u32;

    read(all, path, TEXT)?;
    let (state, length, from) = text(all, path, layout)?;
    to.head.path_state = state;
    to.head.path_length = length;
    let path_bytes = copy::<{ MAX_PATH as u64 }, 2047>(&mut to.bytes, name_bytes, from, length);
    to.head.path_bytes = path_bytes as u32;

    read(all, lines, TEXT)?;
    if !is_a(all, layout.bytes_type) {
        return None;
    }
    let length = word_in(&all.bytes, BYTES_LENGTH as u16);
    to.head.lines_length = length;
    // A part of it would be of no use.
    let wanted = if length <= MAX_LINES as u64 { length } else { 0 };
    let from = lines.wrapping_add(BYTES);
    let before = name_bytes + path_bytes;
    let lines_bytes = copy::<{ MAX_LINES as u64 }, 8191>(&mut to.bytes, before, from, wanted);
    to.head.lines_bytes = lines_bytes as u32;
    let bytes = masked::<8191>(before + lines_bytes);
    Some(size_of::<SampleHeader>() + size_of::<CodeHead>() + bytes)
}

/// Whether the object whose head was read is of this type.
#[inline(always)]
pub fn is_a(all: &List, of: u64) -> bool {
    word_in(&all.bytes, TYPE as u16) == all.base.wrapping_add(of)
}

/// State, bytes and place of the characters of a string whose head was read; none where it is no
/// string: nothing else of the process is handed over.
#[inline(always)]
fn text(all: &List, at: u64, layout: &Layout) -> Option<(u32, u64, u64)> {
    if !is_a(all, layout.text_type) {
        return None;
    }
    let state = word_in(&all.bytes, TEXT_STATE as u16) as u32;
    let width = u64::from(state >> 2 & 7);
    let length = word_in(&all.bytes, TEXT_LENGTH as u16);
    if state & COMPACT == 0 || length > u64::from(u32::MAX) {
        return Some((state, 0, at));
    }
    let begin = if state & ASCII != 0 { layout.ascii } else { layout.characters };
    Some((state, length * width, at.wrapping_add(u64::from(begin))))
}

/// Copies the first `length` bytes, at most `MOST`, behind `before` others; returns how many.
#[inline(always)]
fn copy<const MOST: u64, const MASK: u64>(
    to: &mut [u8; CODE_ROOM],
    before: u64,
    from: u64,
    length: u64,
) -> u64 {
    let length = if length < MOST { length } else { MOST };
    let place = masked::<2047>(before);
    let bytes = masked::<MASK>(length) as u32;
    // SAFETY: the place is less than 2048, the length at most MASK, and the array has more than
    // both together. The helper checks the address and fails rather than fault.
    let failed =
        unsafe { bpf_probe_read_user(to.as_mut_ptr().add(place).cast(), bytes, from as *const _) };
    if failed == 0 { u64::from(bytes) } else { 0 }
}
