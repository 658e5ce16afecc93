//! V8's functions: each has a frame of its own on the native stack, compiled or not, and keeps a
//! frame pointer. When the native walk is over, the frames that it went through by their frame
//! pointers are looked at, one a step. Called by `lists.rs`.

use stackwire_collector_ebpf::managed::{
    ADDRESS, EVALUATOR, Entry, LAYOUTS, ListEnd, MAX_ENTRIES, OF_V8, cookie,
};
use stackwire_collector_ebpf::v8::{
    FIRST_OTHER, FRAME_BYTECODE, FRAME_BYTES, FRAME_CONTEXT, FRAME_FUNCTION, FRAME_OFFSET, Layout,
    SHARED_BYTES, SHARED_DATA, TAG, TEXT_LENGTH,
};
use stackwire_collector_ebpf::{MAX_USER_FRAMES, masked};

use super::entries::{GO_ON, note_new, push};
use super::objects::{read, type_of, word, word_in};
use super::{pointers, scripts};
use crate::maps::{LISTS, List, SCRATCH, V8_LAYOUTS};

/// A position that no instruction has: where the function is is not known.
const NOWHERE: u32 = i32::MAX as u32;
/// As [`GO_ON`], and a function was found, which [`add_function_of_v8`] adds.
pub const FOUND: u64 = GO_ON - 1;

/// One step: looks at one native frame. [`GO_ON`], [`FOUND`], or a [`ListEnd`] as a number. A
/// global function, as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn walk_frame_of_v8(slot: u32) -> u64 {
    let (Some(all), Some(scratch)) = (LISTS.get_ptr_mut(slot), SCRATCH.get_ptr(slot)) else {
        return ListEnd::NoThread as u64;
    };
    // SAFETY: as in `found`.
    let (all, scratch) = unsafe { (&mut *all, &*scratch) };
    let Some(layout) = V8_LAYOUTS.get(all.layout as u32 & (LAYOUTS - 1)) else {
        return ListEnd::NoThread as u64;
    };
    let number = all.looked_at;
    if number >= scratch.walk.depth {
        all.head.end = ListEnd::Root as u32;
        return ListEnd::Root as u64;
    }
    // A frame takes two, and fewer than all are handed over.
    if all.count >= MAX_ENTRIES as u64 - 2 {
        return ListEnd::DepthLimit as u64;
    }
    all.looked_at = number + 1;
    // SAFETY: masked to less than the length.
    let pointer = unsafe {
        let at = masked::<{ MAX_USER_FRAMES as u64 - 1 }>(number);
        *scratch.pointers.as_ptr().add(at)
    };
    // What is no function's has a native frame alone.
    if pointer != 0 && frame(all, layout, pointers::read(pointer)).is_some() {
        return FOUND;
    }
    GO_ON
}

/// Finds what the function of a frame shares with others, and how far it is; none: it has none.
#[inline(always)]
fn frame(
    all: &mut List,
    layout: &Layout,
    (pointer, may_be_interpreted): (u64, bool),
) -> Option<()> {
    read(all, pointer.wrapping_sub(FRAME_BYTES as u64), FRAME_BYTES)?;
    // A frame of V8's own has the number of its kind there.
    let kind = type_of(word_in(&all.bytes, FRAME_CONTEXT))?;
    if kind < layout.first_context || kind > layout.last_context {
        return None;
    }
    let function = word_in(&all.bytes, FRAME_FUNCTION);
    let kind = type_of(function)?;
    if kind < layout.first_function || kind > layout.last_function {
        return None;
    }
    all.frame = word(function - TAG, layout.shared)?;
    all.c_frame = pointer;
    // While it is interpreted. Otherwise there is something else in these words. The innermost has
    // the offset of the last instruction that called.
    let offset = word_in(&all.bytes, FRAME_OFFSET);
    let is_interpreted = may_be_interpreted
        && all.looked_at > 1
        && offset & u64::from(u32::MAX) == 0
        && type_of(word_in(&all.bytes, FRAME_BYTECODE)) == Some(layout.bytecode_type);
    let position = (offset >> 32) as u32;
    // Counted from the pointer to it.
    let before = u32::from(layout.instructions).wrapping_sub(TAG as u32);
    let is_there = is_interpreted && position >= before;
    all.position = if is_there { position - before } else { NOWHERE };
    Some(())
}

/// Adds the function that was found. [`GO_ON`]. A global function, as `walk_frame`; a part of its
/// own, since in one both need more stack than there is.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn add_function_of_v8(slot: u32) -> u64 {
    let Some(all) = LISTS.get_ptr_mut(slot) else { return GO_ON };
    // SAFETY: as in `found`.
    let all = unsafe { &mut *all };
    if let Some(layout) = V8_LAYOUTS.get(all.layout as u32 & (LAYOUTS - 1)) {
        let _ = add(all, layout, slot);
    }
    GO_ON
}

#[inline(always)]
fn add(all: &mut List, layout: &Layout, slot: u32) -> Option<()> {
    let shared = all.frame;
    read(all, shared.wrapping_sub(TAG), SHARED_BYTES)?;
    let (name, script) = (word_in(&all.bytes, layout.name), word_in(&all.bytes, layout.script));
    let cookie = cookie(name, script, word_in(&all.bytes, SHARED_DATA), 0);
    // A builtin that no script can name has a name among native functions.
    if type_of(script) == Some(layout.script_type) {
        scripts::want(all, script);
    } else if !is_named(name) {
        return None;
    }
    let code = shared & ADDRESS | OF_V8;
    let entry = Entry { code, rest: u64::from(cookie) << 32 | u64::from(all.position) };
    push(all, entry);
    note_new(all, slot, entry);
    push(all, Entry { code: EVALUATOR | (all.looked_at - 1), rest: all.c_frame });
    Some(())
}

/// Whether it is a string with characters.
#[inline(always)]
fn is_named(name: u64) -> bool {
    type_of(name).is_some_and(|kind| kind < FIRST_OTHER)
        && word(name - TAG, TEXT_LENGTH).is_some_and(|length| length as u32 != 0)
}
