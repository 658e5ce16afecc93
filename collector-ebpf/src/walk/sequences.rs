//! Instruction sequences of Ruby: puts together what names one. Called by `names.rs`.

use stackwire_collector_ebpf::managed::{CodeHead, Entry, MAX_LINES, MAX_NAME, MAX_PATH, OF_RUBY};
use stackwire_collector_ebpf::ruby::{
    BODY_BYTES, BODY_LABEL, BODY_LINE, BODY_PATH, Layout, index_bytes,
};
use stackwire_collector_ebpf::{SampleHeader, masked};

use super::objects::{copy, read, word, word_in};
use crate::maps::{Code, List};

/// Bytes of a string's head.
const TEXT: usize = 32;
/// Flags of an object: its type, and whether its content is elsewhere (strings) or inside (arrays).
const TYPE: u64 = 0x1f;
const STRING: u64 = 5;
const ARRAY: u64 = 7;
const OPTION: u64 = 1 << 13;
/// Bytes of an index that are copied: of sequences of 6,000 words.
const MAX_INDEX: u64 = 1023;

/// Begins the record of the body of an instruction sequence: with its name and its path.
#[inline(always)]
pub fn gather_names(all: &mut List, to: &mut Code, layout: &Layout, entry: Entry) -> Option<()> {
    read(all, entry.code & !OF_RUBY, BODY_BYTES)?;
    let path = word_in(&all.bytes, BODY_PATH);
    let label = word_in(&all.bytes, BODY_LABEL);
    let first_line = word_in(&all.bytes, BODY_LINE) as u32;
    to.head.code = entry.code;
    to.head.cookie = entry.cookie();
    to.head.version = layout.version;
    to.head.first_line = (first_line >> u32::from(layout.line_is_value != 0)) as i32;
    to.head.name_state = 0;
    to.head.path_state = 0;

    let (length, from) = text(all, label, layout)?;
    to.head.name_length = length;
    let name_bytes = copy::<{ MAX_NAME as u64 }, 1023>(&mut to.bytes, 0, from, length);
    to.head.name_bytes = name_bytes as u32;

    let path = first(all, path)?;
    let (length, from) = text(all, path, layout)?;
    to.head.path_length = length;
    let path_bytes = copy::<{ MAX_PATH as u64 }, 2047>(&mut to.bytes, name_bytes, from, length);
    to.head.path_bytes = path_bytes as u32;
    Some(())
}

/// Ends it with the line table; returns its bytes.
#[inline(always)]
pub fn gather_lines(all: &mut List, to: &mut Code, layout: &Layout, entry: Entry) -> Option<usize> {
    read(all, entry.code & !OF_RUBY, BODY_BYTES)?;
    let lines = word_in(&all.bytes, layout.lines);
    let count = word_in(&all.bytes, layout.lines.wrapping_add(16));
    let index = word_in(&all.bytes, layout.lines.wrapping_add(24));
    let words = word_in(&all.bytes, 0) >> 32;
    let mut before = u64::from(to.head.name_bytes + to.head.path_bytes);
    let index_length = u64::from(index_bytes(words as u32));
    let lines_length = (count & 0xffff_ffff) * u64::from(layout.line_entry);
    to.head.lines_length = index_length + lines_length;
    to.head.index_bytes = 0;
    to.head.lines_bytes = 0;
    // A part of it would be of no use.
    if index_length <= MAX_INDEX && index_length + lines_length <= MAX_LINES as u64 {
        let copied = copy::<MAX_INDEX, 1023>(&mut to.bytes, before, index, index_length);
        to.head.index_bytes = copied as u32;
        before += copied;
        let copied = copy::<{ MAX_LINES as u64 }, 8191>(&mut to.bytes, before, lines, lines_length);
        to.head.lines_bytes = copied as u32;
        before += copied;
    }
    Some(size_of::<SampleHeader>() + size_of::<CodeHead>() + masked::<8191>(before))
}

/// Bytes and place of a string; none where it is none: nothing else of the process is handed over.
#[inline(always)]
fn text(all: &mut List, at: u64, layout: &Layout) -> Option<(u64, u64)> {
    read(all, at, TEXT)?;
    let flags = word_in(&all.bytes, 0);
    let (length, place) = (word_in(&all.bytes, 16), word_in(&all.bytes, 24));
    if flags & TYPE != STRING {
        return None;
    }
    let found = if flags & OPTION != 0 {
        (length, place)
    } else if layout.length_in_flags != 0 {
        (flags >> 14 & 31, at.wrapping_add(16))
    } else {
        (length, at.wrapping_add(24))
    };
    (found.0 <= u64::from(u32::MAX)).then_some(found)
}

/// The path of a file, which may be the first of two: the second is the real path.
#[inline(always)]
fn first(all: &mut List, at: u64) -> Option<u64> {
    read(all, at, TEXT)?;
    let (flags, inside) = (word_in(&all.bytes, 0), word_in(&all.bytes, 16));
    if flags & TYPE != ARRAY {
        return Some(at);
    }
    if flags & OPTION != 0 {
        return Some(inside);
    }
    word(at, 32).and_then(|elements| word(elements, 0))
}
