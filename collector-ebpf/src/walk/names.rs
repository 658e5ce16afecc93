//! Hands over what names functions of an interpreter that were not met before. Called by
//! `lists.rs`.

use aya_ebpf::bindings::BPF_RB_AVAIL_DATA;
use stackwire_collector_ebpf::managed::{
    Entry, KNOWN_CODES, LAYOUTS, MAX_NEW, RUBY, V8, known_word,
};
use stackwire_collector_ebpf::{RING_BYTES, RecordKind, masked};

use super::{code_objects, functions, sequences};
use crate::maps::{
    CODES, Code, KNOWN, LISTS, List, PYTHON_LAYOUTS, RUBY_LAYOUTS, SAMPLES, SCRATCH, V8_LAYOUTS,
    hand_over,
};

/// Hands over what names new functions of a run-time: [`RUBY`], [`V8`] or neither.
#[inline(always)]
pub fn hand_over_new(slot: u32, kind: u32) {
    for index in 0..MAX_NEW as u32 {
        let more = match kind {
            RUBY => begin_sequence(index, slot) != 0 && end_sequence(index, slot) != 0,
            V8 => begin_function(index, slot) != 0 && end_function(index, slot) != 0,
            _ => define_code(index, slot) != 0,
        };
        if !more {
            break;
        }
    }
}

/// Hands over what names the new function of CPython with this number; 0: there is none. A global
/// function, as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn define_code(index: u32, slot: u32) -> u64 {
    let Some((all, code, entry)) = new(index, slot) else { return 0 };
    let number = all.layout as u32 & (LAYOUTS - 1);
    let Some(layout) = PYTHON_LAYOUTS.get(number) else { return 0 };
    let length = code_objects::gather(all, code, layout, entry);
    hand_over_code(slot, all, code, entry, length);
    1
}

/// Likewise, of Ruby, in two parts: one function would need more stack than there is. The first.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn begin_sequence(index: u32, slot: u32) -> u64 {
    let Some((all, code, entry)) = new(index, slot) else { return 0 };
    let number = all.layout as u32 & (LAYOUTS - 1);
    let Some(layout) = RUBY_LAYOUTS.get(number) else { return 0 };
    let is_readable = sequences::gather_names(all, code, layout, entry).is_some();
    // What comes after it hands nothing over then.
    code.head.code = if is_readable { entry.code } else { 0 };
    1
}

/// The second part.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn end_sequence(index: u32, slot: u32) -> u64 {
    let Some((all, code, entry)) = new(index, slot) else { return 0 };
    let number = all.layout as u32 & (LAYOUTS - 1);
    let Some(layout) = RUBY_LAYOUTS.get(number) else { return 0 };
    if code.head.code != 0 {
        let length = sequences::gather_lines(all, code, layout, entry);
        hand_over_code(slot, all, code, entry, length);
    }
    1
}

/// Likewise, of V8. The first part.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn begin_function(index: u32, slot: u32) -> u64 {
    let Some((all, code, entry)) = new(index, slot) else { return 0 };
    let Some(layout) = V8_LAYOUTS.get(all.layout as u32 & (LAYOUTS - 1)) else { return 0 };
    if functions::begin(all, code, layout, entry).is_none() {
        code.head.code = 0;
    }
    1
}

/// The second part.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn end_function(index: u32, slot: u32) -> u64 {
    let Some((all, code, entry)) = new(index, slot) else { return 0 };
    if code.head.code != 0 {
        let length = functions::end(code, slot);
        hand_over_code(slot, all, code, entry, length);
    }
    1
}

/// The new function with this number, and where the record of it is put together; none: there is no
/// such, or no room in the ring.
#[inline(always)]
fn new(index: u32, slot: u32) -> Option<(&'static mut List, &'static mut Code, Entry)> {
    // SAFETY: as in `found`.
    let (all, code) = unsafe { (&mut *LISTS.get_ptr_mut(slot)?, &mut *CODES.get_ptr_mut(slot)?) };
    if u64::from(index) >= all.new {
        return None;
    }
    // The names of some functions are not worth the samples of others.
    if SAMPLES.query(BPF_RB_AVAIL_DATA as u64) > u64::from(RING_BYTES / 2) {
        return None;
    }
    let at = masked::<{ MAX_NEW as u64 - 1 }>(u64::from(index));
    // SAFETY: masked to less than the length.
    let entry = unsafe { *all.news.as_ptr().add(at) };
    Some((all, code, entry))
}

#[inline(always)]
fn hand_over_code(slot: u32, all: &List, code: &mut Code, entry: Entry, length: Option<usize>) {
    let Some(length) = length else { return };
    let Some(scratch) = SCRATCH.get_ptr(slot) else { return };
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
}
