//! The walk of an interpreter's own list of frames. The native walk comes by code of the
//! interpreter, which runs functions, and their frames are in this list and not on the stack.
//!
//! First the list is walked (`by_frame_list.rs`, `by_control_frames.rs`); a thread has one in each
//! interpreter of its process that it runs. Where C has called the interpreter again, it is noted
//! how the stack frame of that evaluator is known: the native walk comes by it. V8 has no such
//! list: when the native walk is over, its frames are looked at (`by_frames_of_v8.rs`). At last
//! what names functions that were not met before is handed over (`names.rs`). Only memory of the
//! process that runs is read, which may hold anything: all loops have an end.
//!
//! In steps of [`STEP`], each a program that calls the next, as in `by_tables.rs`. In a slot of
//! `LISTS`, as a native walk is in one of `SCRATCH`. Called by `sources/`.

use aya_ebpf::helpers::generated::bpf_get_current_task_btf;
use stackwire_collector_ebpf::arch::RSP;
use stackwire_collector_ebpf::managed::{
    ANY, EVALUATOR, Entry, ListEnd, MAX_ENTRIES, MAX_EVALUATORS, ManagedHead, NOT_FOUND, RUBY, V8,
};
use stackwire_collector_ebpf::{RecordKind, SampleHeader, UserEnd, masked};

use super::by_control_frames::walk_control_frame;
use super::by_frame_list::walk_list;
use super::by_frames_of_v8::{FOUND, add_function_of_v8, walk_frame_of_v8};
use super::entries::GO_ON;
use super::{names, scripts};
use crate::hash::mixed;
use crate::maps::{
    LISTS, List, MAX_LISTS, MET, SCRATCH, Scratch, THREAD_SLOTS, WALKING, hand_over, list,
};
use crate::task::Task;

/// Threads that a program looks at, and frames that it walks.
const STEP: u64 = 128;

/// Notes that the native walk has come by code of an interpreter with this layout, in the frame
/// with this address and stack pointer. A global function, as `walk_frame`, whose stack it spares.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn meet(slot: u32, layout: u32, base: u64, ip: u64, sp: u64) -> u64 {
    let Some(scratch) = SCRATCH.get_ptr_mut(slot) else { return 0 };
    // SAFETY: as in `found`.
    let scratch = unsafe { &mut *scratch };
    let list = &mut scratch.list;
    list.layout = u64::from(layout);
    list.base = base;
    list.ip = ip;
    list.sp = sp;
    list.native = scratch.walk.depth.wrapping_sub(1);
    list.stage = if layout & V8 != 0 { list::LATER } else { list::WANTED };
    let of = process(scratch);
    if let Some(met) = MET.get_ptr_mut(of as u32 & (THREAD_SLOTS - 1)) {
        // SAFETY: the pointer came from a successful lookup. Of two CPUs that write at once the one
        // that comes later reads what makes no sense, and finds no list.
        unsafe { *met = [of, u64::from(layout), base] };
    }
    1
}

/// A walk is over: the list is walked that waits for that. Where it has ended before it came by
/// code of an interpreter, as in code that an interpreter made at run time, its list is walked all
/// the same, if another walk of the process has come by it. A global function, as `walk_frame`:
/// programs that call it have no stack to spare.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn walk_is_over(slot: u32) -> u64 {
    let Some(scratch) = SCRATCH.get_ptr_mut(slot) else { return 0 };
    // SAFETY: as in `found`.
    let scratch = unsafe { &mut *scratch };
    if scratch.list.stage == list::LATER {
        scratch.list.stage = list::WANTED;
        return 1;
    }
    if scratch.walk.end == UserEnd::Root as u64 {
        return 0;
    }
    let of = process(scratch);
    let Some(met) = MET.get(of as u32 & (THREAD_SLOTS - 1)) else { return 0 };
    if met[0] == of && scratch.list.stage == list::NOT_MET {
        scratch.list.layout = met[1];
        scratch.list.base = met[2];
        scratch.list.stage = list::WANTED;
    }
    1
}

/// Whether the process runs V8, by this walk or another. A global function, as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn is_of_v8(slot: u32) -> u64 {
    let Some(scratch) = SCRATCH.get_ptr(slot) else { return 0 };
    // SAFETY: as in `found`.
    let scratch = unsafe { &*scratch };
    if scratch.list.stage != list::NOT_MET {
        return u64::from(scratch.list.stage == list::LATER);
    }
    let of = process(scratch);
    let Some(met) = MET.get(of as u32 & (THREAD_SLOTS - 1)) else { return 0 };
    u64::from(met[0] == of && met[1] & u64::from(V8) != 0)
}

/// What tells the process from others, and from what it was before it became another program.
#[inline(always)]
fn process(scratch: &Scratch) -> u64 {
    // SAFETY: a helper without arguments.
    let task = Task(unsafe { bpf_get_current_task_btf() } as u64);
    let of = mixed(scratch.header.start_boottime_ns, u64::from(scratch.header.pid));
    mixed(of, u64::from(task.exec_id()))
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
        is_evaluator(slot, ip) != 0
    } else {
        list.evaluator >= sp && list.evaluator < caller
    };
    if is_it {
        list.evaluator = found(native, slot);
    }
}

/// Whether this address is in a native frame that counts as an evaluator. A global function, as
/// `meet`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn is_evaluator(slot: u32, ip: u64) -> u64 {
    let (Some(scratch), Some(all)) = (SCRATCH.get_ptr_mut(slot), LISTS.get_ptr(slot)) else {
        return 0;
    };
    // SAFETY: as in `found`.
    let (list, all) = unsafe { (&mut (*scratch).list, &*all) };
    all.head.evaluator.is_at(ip, &mut list.after_core).into()
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
    let Some(Next { list, entry, .. }) = next(all) else {
        all.head.end = ListEnd::Changing as u32;
        return 0;
    };
    let entry = masked::<{ MAX_ENTRIES as u64 - 1 }>(entry);
    let list = masked::<{ MAX_LISTS as u64 - 1 }>(list);
    // SAFETY: both are masked to less than the lengths.
    unsafe {
        (*all.entries.as_mut_ptr().add(entry)).code = EVALUATOR | native & NOT_FOUND;
        *all.next.as_mut_ptr().add(list) += 1;
    }
    address(all)
}

/// An address in the frame of the next evaluator, or [`ANY`]; 0: there is none.
#[inline(always)]
fn address(all: &List) -> u64 {
    match next(all) {
        Some(next) => next.address,
        // One more would say that there is none for some frame. Of a list that was cut there are
        // more.
        None if all.head.end == ListEnd::Root as u32 => all.any,
        None => 0,
    }
}

/// An evaluator: its list, its entry, and an address in its frame.
#[derive(Clone, Copy)]
struct Next {
    list: u64,
    entry: u64,
    address: u64,
}

/// The next that the native walk will come by: of all lists' next ones, that with the lowest
/// address, since stacks grow down.
#[inline(always)]
fn next(all: &List) -> Option<Next> {
    // Not an option: the compiler would read what was not written, which the verifier refuses.
    let mut found = Next { list: 0, entry: 0, address: u64::MAX };
    for list in 0..MAX_LISTS {
        // SAFETY: the index is less than the lengths; the others are masked to less than theirs.
        unsafe {
            let next = *all.next.as_ptr().add(list);
            if next < *all.ends.as_ptr().add(list) {
                let of = masked::<{ MAX_EVALUATORS as u64 - 1 }>(next);
                let entry = *all.at.as_ptr().add(of);
                let at = masked::<{ MAX_ENTRIES as u64 - 1 }>(entry);
                let address = (*all.entries.as_ptr().add(at)).rest;
                if address < found.address {
                    found = Next { list: list as u64, entry, address };
                }
            }
        }
    }
    (found.address != u64::MAX).then_some(found)
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
    let kind = scratch.list.layout as u32 & (RUBY | V8);
    let mut end = GO_ON;
    for _ in 0..STEP {
        end = match kind {
            RUBY => walk_control_frame(slot),
            V8 => match walk_frame_of_v8(slot) {
                FOUND => add_function_of_v8(slot),
                end => end,
            },
            _ => walk_list(slot),
        };
        if end != GO_ON {
            break;
        }
    }
    end != GO_ON
}

/// Hands over what names new functions; then the native walk goes on.
#[inline(always)]
pub fn finish(scratch: &mut Scratch, slot: u32) {
    scratch.list.stage = list::WALKED;
    let kind = scratch.list.layout as u32 & (RUBY | V8);
    names::hand_over_new(slot, kind);
    if kind == V8 {
        scripts::hand_over_more(slot);
    }
    let Some(all) = LISTS.get_ptr(slot) else { return };
    // SAFETY: as in `found`.
    let all = unsafe { &*all };
    let end = all.head.end;
    if end == ListEnd::NoThread as u32 || end == ListEnd::ManyThreads as u32 {
        scratch.list.stage = list::NOT_THERE;
    }
    scratch.list.evaluator = address(all);
    // SAFETY: a plain word of this structure; `is_evaluator` reads it in a reference of its own.
    unsafe { core::ptr::write_volatile(&raw mut scratch.list.after_core, 0) };
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
    all.lists = 0;
    all.next = [0; MAX_LISTS];
    all.ends = [0; MAX_LISTS];
    all.new = 0;
    all.wanted = 0;
    all.last_script = 0;
    // Unless it comes to another.
    all.head.end = ListEnd::DepthLimit as u32;
    all.any = 0;
    all.head.evaluator.core = 0;
    all.head.evaluator.core_bytes = 0;
    all.head.evaluator.entry = 0;
    all.head.evaluator.entry_bytes = 0;
}

/// Hands over the list, if the thread has one, and notes how it ended; false: there was no room
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
