//! The walk of Ruby's control frames. First it finds the execution context of the thread, in the
//! thread-local storage of Ruby's file. Then it goes from frame to frame, one a step: they lie one
//! behind the other. Called by `lists.rs`.

use stackwire_collector_ebpf::managed::{
    ANY, Entry, LAYOUTS, ListEnd, MAX_ENTRIES, OF_RUBY, cookie,
};
use stackwire_collector_ebpf::ruby::{
    BODY_BYTES, BODY_ENCODED, BODY_LABEL, BODY_LINE, BODY_PATH, C_FRAME, CONTEXT_BYTES, DUMMY,
    FINISH, FRAME_BYTES, FRAME_EP, FRAME_ISEQ, KIND, Layout, MAX_FRAMES, MAX_WORDS, NOWHERE,
};

use super::entries::{GO_ON, begin_list, is_open, note_new, push, push_evaluator};
use super::objects::{read, word, word_in};
use crate::maps::{LISTS, List, RUBY_LAYOUTS};

/// Offset of the table of thread-local storage in what the thread pointer leads to, and bytes of an
/// entry there (`tcbhead_t` and `dtv_t` of glibc; musl's has entries of 8 bytes).
const STORAGES: u16 = 8;
const STORAGE_BYTES: u64 = 16;
/// More files than have such storage in any process.
const MAX_MODULES: u64 = 1 << 12;
/// Largest stack in words: 1 GiB.
const MAX_STACK: u64 = 1 << 27;
/// Flags of a garbage-collected object: its type, and that of what the interpreter made for itself.
const TYPE: u64 = 0x1f;
const INTERNAL: u64 = 0x1a;

/// One step: finds the execution context, or walks one frame. [`GO_ON`], or a [`ListEnd`] as a
/// number. A global function, as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn walk_control_frame(slot: u32) -> u64 {
    let Some(all) = LISTS.get_ptr_mut(slot) else { return ListEnd::NoThread as u64 };
    // SAFETY: as in `found`.
    let all = unsafe { &mut *all };
    let Some(layout) = RUBY_LAYOUTS.get(all.layout as u32 & (LAYOUTS - 1)) else {
        return ListEnd::NoThread as u64;
    };
    let end = if all.is_found == 0 { find_context(all, layout) } else { frame(all, layout, slot) };
    let end = end.unwrap_or(ListEnd::Unreadable as u64);
    if end != GO_ON {
        all.head.end = end as u32;
    }
    end
}

#[inline(always)]
fn find_context(all: &mut List, layout: &Layout) -> Option<u64> {
    let module = word(all.base.wrapping_add(layout.module), 0)?;
    if module == 0 || module > MAX_MODULES {
        return Some(ListEnd::Unreadable as u64);
    }
    let storages = word(all.thread_pointer, STORAGES)?;
    let storage = word(storages.wrapping_add(module * STORAGE_BYTES), 0)?;
    for index in 0..MAX_WORDS {
        if index >= layout.words {
            break;
        }
        let context = word(storage, (index * 8) as u16).unwrap_or(0);
        if context == 0 || read(all, context, CONTEXT_BYTES).is_none() {
            continue;
        }
        let [stack, words, frame] = [0, 8, 16].map(|offset| word_in(&all.bytes, offset));
        // The first control frame ends where the stack does.
        let end = stack.wrapping_add(words.wrapping_mul(8));
        let is_it = words <= MAX_STACK
            && frame >= stack
            && frame < end
            && end.wrapping_sub(frame).checked_rem(layout.frame.into()) == Some(0);
        if !is_it {
            continue;
        }
        all.frame = frame;
        all.end_of_frames = end;
        all.any = ANY;
        all.head.evaluator.core = all.base.wrapping_add(layout.core);
        all.head.evaluator.core_bytes = layout.core_bytes.into();
        all.head.evaluator.entry = all.base.wrapping_add(layout.entry);
        all.head.evaluator.entry_bytes = layout.entry_bytes.into();
        // The only one.
        begin_list(all);
        all.is_found = 1;
        return Some(GO_ON);
    }
    // As a thread that is no Ruby's, but calls its library.
    Some(ListEnd::NoThread as u64)
}

#[inline(always)]
fn frame(all: &mut List, layout: &Layout, slot: u32) -> Option<u64> {
    if all.frame >= all.end_of_frames {
        return Some(ListEnd::Root as u64);
    }
    all.looked_at += 1;
    // A frame may take two, the end one, and fewer than all are handed over.
    if all.looked_at >= MAX_FRAMES || all.count >= MAX_ENTRIES as u64 - 3 {
        // What was found since the last evaluator runs in the one that comes next.
        if is_open(all) {
            push_evaluator(all, ANY);
        }
        return Some(ListEnd::DepthLimit as u64);
    }
    read(all, all.frame, FRAME_BYTES)?;
    all.frame = all.frame.wrapping_add(layout.frame.into());
    let [next, sequence, environment] =
        [0, FRAME_ISEQ, FRAME_EP].map(|offset| word_in(&all.bytes, offset));
    let flags = word(environment, 0)?;
    if flags & C_FRAME != 0 || flags & KIND == DUMMY || sequence == 0 {
        return Some(GO_ON);
    }
    read(all, sequence, 24)?;
    if word_in(&all.bytes, 0) & TYPE != INTERNAL {
        return Some(ListEnd::Unreadable as u64);
    }
    let body = word_in(&all.bytes, 16);
    read(all, body, BODY_BYTES)?;
    let [first, path, label, lines] = [BODY_ENCODED, BODY_PATH, BODY_LABEL, layout.lines]
        .map(|offset| word_in(&all.bytes, offset));
    let first_line = word_in(&all.bytes, BODY_LINE) as u32;
    let cookie = cookie(label, path, lines, first_line);
    // That of the next instruction; 0 before the first.
    let position = next.wrapping_sub(first) >> 3;
    let size = word_in(&all.bytes, 0) >> 32;
    let position = if position <= size { (position as u32).wrapping_sub(1) } else { NOWHERE };
    let code = body & !(3 << 62) | OF_RUBY;
    let entry = Entry { code, rest: u64::from(cookie) << 32 | u64::from(position) };
    push(all, entry);
    note_new(all, slot, entry);
    if flags & FINISH == 0 { Some(GO_ON) } else { Some(push_evaluator(all, ANY)) }
}
