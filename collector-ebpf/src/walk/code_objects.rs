//! Code objects of CPython: puts together what names one. Called by `names.rs`.

use stackwire_collector_ebpf::cpython::{CODE_BYTES, LARGE_TEXT_BYTES, Layout, TEXT_BYTES};
use stackwire_collector_ebpf::managed::{CodeHead, Entry, MAX_LINES, MAX_NAME, MAX_PATH};
use stackwire_collector_ebpf::{SampleHeader, masked};

use super::objects::{copy, is_a, read, word_in};
use crate::maps::{Code, List};

/// Bits of a string's state (Include/cpython/unicodeobject.h).
const COMPACT: u32 = 1 << 5;
const ASCII: u32 = 1 << 6;

/// Puts the record of a code object together; returns its bytes.
#[inline(always)]
pub fn gather(all: &mut List, to: &mut Code, layout: &Layout, entry: Entry) -> Option<usize> {
    read(all, entry.code, CODE_BYTES)?;
    let [name, path, lines] =
        [layout.name, layout.path, layout.lines].map(|offset| word_in(&all.bytes, offset));
    let first_line = word_in(&all.bytes, layout.first_line) as u32;
    to.head.code = entry.code;
    to.head.cookie = entry.cookie();
    to.head.version = layout.version;
    to.head.index_bytes = 0;
    to.head.first_line = first_line as i32;

    read_text(all, layout, name)?;
    let (state, length, from) = text(all, name, layout)?;
    to.head.name_state = state;
    to.head.name_length = length;
    let name_bytes = copy::<{ MAX_NAME as u64 }, 1023>(&mut to.bytes, 0, from, length);
    to.head.name_bytes = name_bytes as u32;

    read_text(all, layout, path)?;
    let (state, length, from) = text(all, path, layout)?;
    to.head.path_state = state;
    to.head.path_length = length;
    let path_bytes = copy::<{ MAX_PATH as u64 }, 2047>(&mut to.bytes, name_bytes, from, length);
    to.head.path_bytes = path_bytes as u32;

    read_text(all, layout, lines)?;
    if !is_a(all, layout, layout.bytes_type) {
        return None;
    }
    let length = word_in(&all.bytes, layout.bytes_length);
    to.head.lines_length = length;
    // A part of it would be of no use.
    let wanted = if length <= MAX_LINES as u64 { length } else { 0 };
    let from = lines.wrapping_add(u64::from(layout.bytes));
    let before = name_bytes + path_bytes;
    let lines_bytes = copy::<{ MAX_LINES as u64 }, 8191>(&mut to.bytes, before, from, wanted);
    to.head.lines_bytes = lines_bytes as u32;
    let bytes = masked::<8191>(before + lines_bytes);
    Some(size_of::<SampleHeader>() + size_of::<CodeHead>() + bytes)
}

/// Reads the head of a string or of `bytes`.
#[inline(always)]
fn read_text(all: &mut List, layout: &Layout, at: u64) -> Option<()> {
    // The verifier wants to know how many.
    match layout.text_bytes() {
        LARGE_TEXT_BYTES => read(all, at, LARGE_TEXT_BYTES),
        _ => read(all, at, TEXT_BYTES),
    }
}

/// State, bytes and place of the characters of a string whose head was read; none where it is no
/// string: nothing else of the process is handed over.
#[inline(always)]
fn text(all: &List, at: u64, layout: &Layout) -> Option<(u32, u64, u64)> {
    if !is_a(all, layout, layout.text_type) {
        return None;
    }
    let state = word_in(&all.bytes, layout.text_state) as u32;
    let width = u64::from(state >> 2 & 7);
    let length = word_in(&all.bytes, layout.text_length);
    if state & COMPACT == 0 || length > u64::from(u32::MAX) {
        return Some((state, 0, at));
    }
    let begin = if state & ASCII != 0 { layout.ascii } else { layout.characters };
    Some((state, length * width, at.wrapping_add(u64::from(begin))))
}
