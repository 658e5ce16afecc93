//! The walk of CPython's own list of frames. The native walk comes by an evaluator, the function
//! that runs Python code, and its frames are in this list and not on the stack.
//!
//! First it finds the state of the thread, the one with its thread pointer. Then it goes from frame
//! to frame. Where C has called Python again, it notes an address in the stack frame of the
//! evaluator: the native walk comes by that. At last what names code objects that were not met
//! before is handed over (`objects.rs`). Only memory of the process that runs is read, which may
//! hold anything: all loops have an end.
//!
//! In steps of [`STEP`], each a program that calls the next, as in `by_tables.rs`. In a slot of
//! `LISTS`, as a native walk is in one of `SCRATCH`. Called by `sources/`.

use stackwire_collector_ebpf::arch::RSP;
use stackwire_collector_ebpf::cpython::{
    ANY, CODE_BYTES, EVALUATOR, Entry, FRAME_BYTES, LAYOUTS, Layout, ListEnd, MAX_ENTRIES,
    MAX_EVALUATORS, ManagedHead, NO_FIELD, NOT_FOUND, OWNED_BY_EVALUATOR, cookie, evaluators,
};
use stackwire_collector_ebpf::{RecordKind, SampleHeader, masked};

use super::objects::{self, is_a, note_new, read, word, word_in};
use crate::hash::mixed;
use crate::maps::{
    LISTS, List, PYTHON_LAYOUTS, Scratch, THREAD_SLOTS, THREADS, WALKING, hand_over, list,
};

/// Threads that a program looks at, and frames that it walks.
const STEP: u64 = 128;
/// Threads of a process that are looked at, of all its interpreters.
const MAX_THREADS: u64 = 128;
/// Goes on: there is more.
const GO_ON: u64 = u64::MAX;

/// Notes that the native walk has come by code of a CPython with this layout, in the frame with
/// this address and stack pointer.
#[inline(always)]
pub fn meet(scratch: &mut Scratch, layout: u32, base: u64, ip: u64, sp: u64) {
    let list = &mut scratch.list;
    list.layout = u64::from(layout);
    list.base = base;
    list.ip = ip;
    list.sp = sp;
    list.native = scratch.walk.depth - 1;
    list.stage = list::WANTED;
}

/// A hash of the list and this one. A global function, as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn mix_list(hash: u64, slot: u32) -> u64 {
    let Some(all) = LISTS.get_ptr(slot) else { return hash };
    // SAFETY: as in `found`.
    let all = unsafe { &*all };
    let mut hash = mixed(hash, u64::from(all.head.end));
    for index in 0..MAX_ENTRIES {
        if index as u64 >= all.count {
            break;
        }
        // SAFETY: the index is less than the length.
        let entry = unsafe { &*all.entries.as_ptr().add(index) };
        hash = mixed(hash, entry.code);
        // That of an evaluator is where its frame is.
        if entry.code & EVALUATOR == 0 {
            hash = mixed(hash, entry.rest);
        }
    }
    hash
}

/// Notes which native frame is the next evaluator's, if this is one: that with this number and this
/// address, between its stack pointer and its caller's.
#[inline(always)]
pub fn come_by(scratch: &mut Scratch, slot: u32, native: u64, ip: u64, sp: u64) {
    let caller = scratch.tables.cursor.registers[RSP as usize];
    let list = &mut scratch.list;
    let is_it = if list.evaluator == ANY {
        ip.wrapping_sub(list.code) < list.code_bytes
    } else {
        list.evaluator >= sp && list.evaluator < caller
    };
    if is_it {
        list.evaluator = found(native, slot);
    }
}

/// Notes that the next evaluator's frame was found; gives an address in the one behind it. A global
/// function, as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn found(native: u64, slot: u32) -> u64 {
    let Some(all) = LISTS.get_ptr_mut(slot) else { return 0 };
    // SAFETY: the pointer came from a successful lookup; the slot is of this CPU and of the program
    // in whose name this runs.
    let all = unsafe { &mut *all };
    let next = all.next;
    if next >= all.evaluators {
        all.head.end = ListEnd::Changing as u32;
        return 0;
    }
    let of = masked::<{ MAX_EVALUATORS as u64 - 1 }>(next);
    // SAFETY: both are masked to less than the lengths.
    unsafe {
        let entry = masked::<{ MAX_ENTRIES as u64 - 1 }>(*all.at.as_ptr().add(of));
        (*all.entries.as_mut_ptr().add(entry)).code = EVALUATOR | native & NOT_FOUND;
    }
    all.next = next + 1;
    address(all)
}

/// An address in the frame of the next evaluator, or [`ANY`]; 0: there is none.
#[inline(always)]
fn address(all: &List) -> u64 {
    if all.next >= all.evaluators {
        // One more would say that there is none for some frame. Of a list that was cut there are
        // more.
        return if all.head.end == ListEnd::Root as u32 { all.any } else { 0 };
    }
    let of = masked::<{ MAX_EVALUATORS as u64 - 1 }>(all.next);
    // SAFETY: both are masked to less than the lengths.
    unsafe {
        let entry = masked::<{ MAX_ENTRIES as u64 - 1 }>(*all.at.as_ptr().add(of));
        (*all.entries.as_ptr().add(entry)).rest
    }
}

/// Walks on; whether it has come to its end.
#[inline(always)]
pub fn step(scratch: &mut Scratch, slot: u32) -> bool {
    if scratch.list.stage == list::WANTED {
        let Some(all) = LISTS.get_ptr_mut(slot) else { return true };
        // SAFETY: as in `found`.
        begin(unsafe { &mut *all }, scratch);
        scratch.list.stage = list::WALKING;
    }
    let mut end = GO_ON;
    for _ in 0..STEP {
        end = walk_list(slot);
        if end != GO_ON {
            break;
        }
    }
    end != GO_ON
}

/// Hands over what names new code objects; then the native walk goes on.
#[inline(always)]
pub fn finish(scratch: &mut Scratch, slot: u32) {
    scratch.list.stage = list::WALKED;
    objects::hand_over_new(slot);
    let Some(all) = LISTS.get_ptr(slot) else { return };
    // SAFETY: as in `found`.
    let all = unsafe { &*all };
    let end = all.head.end;
    if end == ListEnd::NoThread as u32 || end == ListEnd::ManyThreads as u32 {
        scratch.list.stage = list::NOT_THERE;
    }
    scratch.list.evaluator = address(all);
    (scratch.list.code, scratch.list.code_bytes) = (all.code, all.code_bytes);
    if scratch.walk.end == WALKING {
        come_by(scratch, slot, scratch.list.native, scratch.list.ip, scratch.list.sp);
    }
}

#[inline(always)]
fn begin(all: &mut List, scratch: &Scratch) {
    all.layout = scratch.list.layout;
    all.base = scratch.list.base;
    all.thread_pointer = scratch.tables.cursor.thread;
    all.tid = u64::from(scratch.header.tid);
    all.start = scratch.header.start_boottime_ns;
    all.interpreter = 0;
    all.thread = 0;
    all.looked_at = 0;
    all.frame = 0;
    all.is_found = 0;
    all.count = 0;
    all.evaluators = 0;
    all.next = 0;
    all.new = 0;
    // Unless it comes to another.
    all.head.end = ListEnd::DepthLimit as u32;
    all.any = 0;
    all.code = 0;
    all.code_bytes = 0;
}

/// One step: looks at a thread, or walks one frame. [`GO_ON`], or a [`ListEnd`] as a number. A
/// global function, as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn walk_list(slot: u32) -> u64 {
    let Some(all) = LISTS.get_ptr_mut(slot) else { return ListEnd::NoThread as u64 };
    // SAFETY: as in `found`.
    let all = unsafe { &mut *all };
    let Some(layout) = PYTHON_LAYOUTS.get(all.layout as u32 & (LAYOUTS - 1)) else {
        return ListEnd::NoThread as u64;
    };
    let end = if all.is_found == 0 { find_thread(all, layout) } else { frame(all, layout) };
    let end = end.unwrap_or(ListEnd::Unreadable as u64);
    if end != GO_ON {
        all.head.end = end as u32;
    }
    end
}

#[inline(always)]
fn find_thread(all: &mut List, layout: &Layout) -> Option<u64> {
    let slot = (all.tid ^ all.start >> 10) as u32 & (THREAD_SLOTS - 1);
    if all.looked_at == 0 {
        // That of the last sample, mostly.
        if let Some(known) = THREADS.get(slot)
            && known[0] == all.start ^ all.tid
            && word(known[1], layout.thread_id) == Some(all.thread_pointer)
            && enter(all, layout, known[1]).is_some()
        {
            return Some(GO_ON);
        }
        let runtime = all.base.wrapping_add(layout.runtime);
        all.interpreter = word(runtime, layout.interpreters)?;
        if all.interpreter == 0 {
            return Some(ListEnd::NoThread as u64);
        }
        all.thread = word(all.interpreter, layout.threads)?;
    }
    all.looked_at += 1;
    if all.looked_at > MAX_THREADS {
        return Some(ListEnd::ManyThreads as u64);
    }
    if all.thread == 0 {
        all.interpreter = word(all.interpreter, layout.next_interpreter)?;
        if all.interpreter == 0 {
            return Some(ListEnd::NoThread as u64);
        }
        all.thread = word(all.interpreter, layout.threads)?;
        return Some(GO_ON);
    }
    // Of one that runs several interpreters, that which has frames.
    if word(all.thread, layout.thread_id)? == all.thread_pointer
        && enter(all, layout, all.thread).is_some()
    {
        if let Some(known) = THREADS.get_ptr_mut(slot) {
            // SAFETY: the pointer came from a successful lookup. Of two CPUs that write at once the
            // one that comes later finds what it reads not to fit, and looks again.
            unsafe { *known = [all.start ^ all.tid, all.thread] };
        }
        return Some(GO_ON);
    }
    all.thread = word(all.thread, layout.next_thread)?;
    Some(GO_ON)
}

/// The first frame of a thread; none: it runs no Python.
#[inline(always)]
fn enter(all: &mut List, layout: &Layout, thread: u64) -> Option<()> {
    if layout.evaluators == evaluators::IN_RANGE {
        all.any = ANY;
        all.code = all.base.wrapping_add(layout.evaluator);
        all.code_bytes = layout.evaluator_bytes.into();
    }
    let mut from = thread;
    if layout.c_frame != NO_FIELD {
        all.c_frame = word(thread, layout.c_frame)?;
        if layout.evaluators != evaluators::EACH {
            from = all.c_frame;
        }
    }
    all.frame = word(from, layout.current_frame).filter(|&frame| frame != 0)?;
    all.is_found = 1;
    Some(())
}

#[inline(always)]
fn frame(all: &mut List, layout: &Layout) -> Option<u64> {
    if all.frame == 0 {
        return Some(ListEnd::Root as u64);
    }
    // A frame may take two, and fewer than all are handed over.
    if all.count >= MAX_ENTRIES as u64 - 2 {
        return Some(ListEnd::DepthLimit as u64);
    }
    read(all, all.frame, FRAME_BYTES)?;
    let address = all.frame;
    all.frame = word_in(&all.bytes, layout.previous);
    let instruction = word_in(&all.bytes, layout.instruction);
    // From 3.14 on its last bits say how it is counted (pycore_stackref.h).
    let code = word_in(&all.bytes, layout.code) & !7;
    let owner = word_in(&all.bytes, layout.owner) as u8;
    if layout.evaluators == evaluators::SHIMS && owner >= OWNED_BY_EVALUATOR {
        return Some(push_evaluator(all, address));
    }
    read(all, code, CODE_BYTES)?;
    if is_a(all, layout.code_type) {
        let [name, path, lines] =
            [layout.name, layout.path, layout.lines].map(|offset| word_in(&all.bytes, offset));
        let first_line = word_in(&all.bytes, layout.first_line) as u32;
        let cookie = cookie(name, path, lines, first_line);
        let first = code.wrapping_add(u64::from(layout.instructions));
        let position = match layout.unit {
            0 => instruction.wrapping_sub(first) as u32,
            unit => (instruction as u32).wrapping_mul(unit.into()),
        };
        let entry = Entry { code, rest: u64::from(cookie) << 32 | u64::from(position) };
        push(all, entry);
        note_new(all, entry);
    }
    match layout.evaluators {
        evaluators::SHIMS => Some(GO_ON),
        evaluators::AT_ENTRY if owner == 0 => Some(GO_ON),
        evaluators::IN_RANGE => Some(push_evaluator(all, ANY)),
        _ => {
            let evaluator = all.c_frame;
            all.c_frame = word(evaluator, layout.previous_c_frame)?;
            Some(push_evaluator(all, evaluator))
        }
    }
}

#[inline(always)]
fn push(all: &mut List, entry: Entry) {
    let at = masked::<{ MAX_ENTRIES as u64 - 1 }>(all.count);
    // SAFETY: masked to less than the length.
    unsafe {
        let to = all.entries.as_mut_ptr().add(at);
        (*to).code = entry.code;
        (*to).rest = entry.rest;
    }
    all.count += 1;
}

#[inline(always)]
fn push_evaluator(all: &mut List, address: u64) -> u64 {
    if all.evaluators >= MAX_EVALUATORS as u64 {
        return ListEnd::DepthLimit as u64;
    }
    let of = masked::<{ MAX_EVALUATORS as u64 - 1 }>(all.evaluators);
    // SAFETY: masked to less than the length.
    unsafe { *all.at.as_mut_ptr().add(of) = all.count };
    all.evaluators += 1;
    push(all, Entry { code: EVALUATOR | NOT_FOUND, rest: address });
    GO_ON
}

/// Hands over the list, if the thread runs Python, and notes how it ended; false: there was no room
/// for it.
#[inline(always)]
pub fn hand_over_list(scratch: &mut Scratch, slot: u32) -> bool {
    let Some(all) = LISTS.get_ptr_mut(slot) else { return true };
    // SAFETY: as in `found`.
    let all = unsafe { &mut *all };
    all.header.time_ns = scratch.header.time_ns;
    all.header.cpu = scratch.header.cpu;
    all.header.kind = RecordKind::Managed as u8;
    if all.head.end != ListEnd::NoThread as u32 {
        scratch.header.list_end = 1 + all.head.end as u8;
    }
    let count = masked::<{ MAX_ENTRIES as u64 - 1 }>(all.count);
    if count == 0 {
        return true;
    }
    all.head.entries = count as u32;
    let bytes = size_of::<SampleHeader>() + size_of::<ManagedHead>() + count * size_of::<Entry>();
    // SAFETY: `bytes` is at most the size of what the pointer points to, which the verifier checks.
    let is_handed_over = unsafe { hand_over((all as *mut List).cast(), bytes) };
    if !is_handed_over {
        scratch.header.list_end = 1 + ListEnd::RingFull as u8;
    }
    is_handed_over
}
