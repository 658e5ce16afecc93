//! The walk of CPython's own list of frames. First it finds the state of the thread, the one with
//! its thread pointer. Then it goes from frame to frame, one a step. Where there are several
//! interpreters, it looks for the thread's next state then. Called by `lists.rs`.

use stackwire_collector_ebpf::cpython::{
    CODE_BYTES, FRAME_BYTES, Layout, NO_FIELD, OWNED_BY_EVALUATOR, evaluators,
};
use stackwire_collector_ebpf::managed::{ANY, Entry, LAYOUTS, ListEnd, MAX_ENTRIES, cookie};

use super::entries::{GO_ON, begin_list, note_new, push, push_evaluator};
use super::objects::{is_a, read, word, word_in};
use crate::maps::{LISTS, List, MAX_LISTS, PYTHON_LAYOUTS, THREAD_SLOTS, THREADS};

/// Threads of a process that are looked at, of all its interpreters.
const MAX_THREADS: u64 = 128;
/// More than a thread's state has. From 3.15 on the outermost frame of its list is a part of it
/// (`base_frame` of `_PyThreadStateImpl`), and of no evaluator.
const THREAD_STATE: u64 = 0x4000;

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
    let end = if all.is_found == 0 { find_thread(all, layout) } else { frame(all, layout, slot) };
    let end = end.unwrap_or(ListEnd::Unreadable as u64);
    if end != GO_ON {
        all.head.end = end as u32;
    }
    end
}

/// Finds the next state of this thread that has frames.
#[inline(always)]
fn find_thread(all: &mut List, layout: &Layout) -> Option<u64> {
    let slot = (all.tid ^ all.start >> 10) as u32 & (THREAD_SLOTS - 1);
    if all.looked_at == 0 {
        let runtime = all.base.wrapping_add(layout.runtime);
        all.interpreter = word(runtime, layout.interpreters)?;
        if all.interpreter == 0 {
            return Some(ListEnd::NoThread as u64);
        }
        all.is_single = u64::from(word(all.interpreter, layout.next_interpreter)? == 0);
        // That of the last sample, mostly.
        if all.is_single != 0
            && let Some(known) = THREADS.get(slot)
            && known[0] == all.start ^ all.tid
            && word(known[1], layout.thread_id) == Some(all.thread_pointer)
            && enter(all, layout, known[1]).is_some()
        {
            all.thread = known[1];
            return Some(GO_ON);
        }
        all.thread = word(all.interpreter, layout.threads)?;
    }
    all.looked_at += 1;
    if all.looked_at > MAX_THREADS {
        return Some(found_all(all, ListEnd::ManyThreads));
    }
    if all.thread == 0 {
        all.interpreter = word(all.interpreter, layout.next_interpreter)?;
        if all.interpreter == 0 {
            return Some(found_all(all, ListEnd::NoThread));
        }
        all.thread = word(all.interpreter, layout.threads)?;
        return Some(GO_ON);
    }
    // A thread that runs functions of several interpreters, inside each other, has a state in each.
    let is_its = word(all.thread, layout.thread_id)? == all.thread_pointer;
    if is_its && all.lists >= MAX_LISTS as u64 {
        return Some(ListEnd::DepthLimit as u64);
    }
    if is_its && enter(all, layout, all.thread).is_some() {
        if all.is_single != 0
            && let Some(known) = THREADS.get_ptr_mut(slot)
        {
            // SAFETY: the pointer came from a successful lookup. Of two CPUs that write at once the
            // one that comes later finds what it reads not to fit, and looks again.
            unsafe { *known = [all.start ^ all.tid, all.thread] };
        }
        return Some(GO_ON);
    }
    all.thread = word(all.thread, layout.next_thread)?;
    Some(GO_ON)
}

/// How the lists end where no more are found.
#[inline(always)]
fn found_all(all: &List, without: ListEnd) -> u64 {
    (if all.lists == 0 { without } else { ListEnd::Root }) as u64
}

/// The first frame of a thread; none: it runs no Python.
#[inline(always)]
fn enter(all: &mut List, layout: &Layout, thread: u64) -> Option<()> {
    if layout.evaluators == evaluators::IN_RANGE {
        all.any = ANY;
        all.head.evaluator.core = all.base.wrapping_add(layout.evaluator);
        all.head.evaluator.core_bytes = layout.evaluator_bytes.into();
    }
    let mut from = thread;
    if layout.c_frame != NO_FIELD {
        all.c_frame = word(thread, layout.c_frame)?;
        if layout.evaluators != evaluators::EACH {
            from = all.c_frame;
        }
    }
    all.frame = word(from, layout.current_frame).filter(|&frame| frame != 0)?;
    begin_list(all);
    all.is_found = 1;
    Some(())
}

#[inline(always)]
fn frame(all: &mut List, layout: &Layout, slot: u32) -> Option<u64> {
    if all.frame == 0 {
        if all.is_single != 0 {
            return Some(ListEnd::Root as u64);
        }
        all.is_found = 0;
        all.thread = word(all.thread, layout.next_thread)?;
        return Some(GO_ON);
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
        if address.wrapping_sub(all.thread) < THREAD_STATE {
            return Some(GO_ON);
        }
        return Some(push_evaluator(all, address));
    }
    read(all, code, CODE_BYTES)?;
    if is_a(all, layout, layout.code_type) {
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
        note_new(all, slot, entry);
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
