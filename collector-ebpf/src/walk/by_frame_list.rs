//! The walk of CPython's own list of frames. The native walk comes by an evaluator, the function
//! that runs Python code, and its frames are in this list and not on the stack.
//!
//! First it finds the state of the thread, the one with its thread pointer. Then it goes from frame
//! to frame. Where C has called Python again, it notes an address in the stack frame of the
//! evaluator: the native walk comes by that. At last it hands over what names code objects that it
//! has not met before. Only memory of the process that runs is read, which may hold anything: all
//! loops have an end.
//!
//! In steps of [`STEP`], each a program that calls the next, as in `by_tables.rs`. Called by
//! `sources/perf_event.rs`.

use aya_ebpf::bindings::BPF_RB_AVAIL_DATA;
use aya_ebpf::helpers::bpf_probe_read_user as read_user;
use aya_ebpf::helpers::generated::bpf_probe_read_user;
use stackwire_collector_ebpf::arch::RSP;
use stackwire_collector_ebpf::cpython::{
    ANY, CODE_BYTES, CodeHead, EVALUATOR, Entry, FRAME_BYTES, KNOWN_CODES, LAYOUTS, Layout,
    ListEnd, MAX_ENTRIES, MAX_EVALUATORS, MAX_LINES, MAX_NAME, MAX_NEW, MAX_PATH, ManagedHead,
    NO_FIELD, NOT_FOUND, OWNED_BY_EVALUATOR, cookie, evaluators, known_word,
};
use stackwire_collector_ebpf::{RING_BYTES, RecordKind, SampleHeader, masked};

use crate::maps::{
    CODES, Code, KNOWN, LAYOUTS_OF, LISTS, List, SAMPLER, SAMPLES, SCRATCH, Scratch, THREAD_SLOTS,
    THREADS, WALKING, hand_over, list,
};

/// Threads that a program looks at, and frames that it walks.
const STEP: u64 = 128;
/// Threads of a process that are looked at, of all its interpreters.
const MAX_THREADS: u64 = 128;
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

/// Notes which native frame is the next evaluator's, if this is one: that with this number and this
/// address, between its stack pointer and its caller's.
#[inline(always)]
pub fn come_by(scratch: &mut Scratch, native: u64, ip: u64, sp: u64) {
    let caller = scratch.tables.cursor.registers[RSP as usize];
    let list = &mut scratch.list;
    let is_it = if list.evaluator == ANY {
        ip.wrapping_sub(list.code) < list.code_bytes
    } else {
        list.evaluator >= sp && list.evaluator < caller
    };
    if is_it {
        list.evaluator = found(native);
    }
}

/// Notes that the next evaluator's frame was found; gives an address in the one behind it. A global
/// function, as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn found(native: u64) -> u64 {
    let Some(all) = LISTS.get_ptr_mut(0) else { return 0 };
    // SAFETY: the pointer came from a successful lookup; the entry is this CPU's, and programs of
    // perf events do not interrupt each other.
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
pub fn step(scratch: &mut Scratch) -> bool {
    if scratch.list.stage == list::WANTED {
        let Some(all) = LISTS.get_ptr_mut(0) else { return true };
        // SAFETY: as in `found`.
        begin(unsafe { &mut *all }, scratch);
        scratch.list.stage = list::WALKING;
    }
    let mut end = GO_ON;
    for _ in 0..STEP {
        end = walk_list();
        if end != GO_ON {
            break;
        }
    }
    end != GO_ON
}

/// Hands over what names new code objects; then the native walk goes on.
#[inline(always)]
pub fn finish(scratch: &mut Scratch) {
    scratch.list.stage = list::WALKED;
    for index in 0..MAX_NEW as u32 {
        if define(index) == 0 {
            break;
        }
    }
    let Some(all) = LISTS.get_ptr(0) else { return };
    // SAFETY: as in `found`.
    let all = unsafe { &*all };
    scratch.list.evaluator = address(all);
    (scratch.list.code, scratch.list.code_bytes) = (all.code, all.code_bytes);
    if scratch.walk.end == WALKING {
        come_by(scratch, scratch.list.native, scratch.list.ip, scratch.list.sp);
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
pub extern "C" fn walk_list() -> u64 {
    let Some(all) = LISTS.get_ptr_mut(0) else { return ListEnd::NoThread as u64 };
    // SAFETY: as in `found`.
    let all = unsafe { &mut *all };
    let Some(layout) = LAYOUTS_OF.get(all.layout as u32 & (LAYOUTS - 1)) else {
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
fn word(address: u64, offset: u16) -> Option<u64> {
    let at = address.wrapping_add(u64::from(offset)) as *const u64;
    // SAFETY: the helper checks the address and fails rather than fault.
    unsafe { read_user(at) }.ok()
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

/// A word of what was read.
#[inline(always)]
fn word_in(bytes: &[u8; 264], offset: u16) -> u64 {
    let at = masked::<0xff>(u64::from(offset));
    // SAFETY: masked to less than the length less a word.
    unsafe { bytes.as_ptr().add(at).cast::<u64>().read_unaligned() }
}

#[inline(always)]
fn frame(all: &mut List, layout: &Layout) -> Option<u64> {
    if all.frame == 0 {
        return Some(ListEnd::Root as u64);
    }
    if all.count >= MAX_ENTRIES as u64 - 1 {
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
fn read(all: &mut List, address: u64, bytes: usize) -> Option<()> {
    let to = all.bytes.as_mut_ptr().cast();
    // SAFETY: there is room for as many bytes; the helper checks the address and fails rather than
    // fault.
    let failed = unsafe { bpf_probe_read_user(to, bytes as u32, address as *const _) };
    (failed == 0).then_some(())
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

#[inline(always)]
fn note_new(all: &mut List, entry: Entry) {
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

/// Hands over what names the new code object with this number; 0: there is none. A global function,
/// as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn define(index: u32) -> u64 {
    let (Some(all), Some(code)) = (LISTS.get_ptr_mut(0), CODES.get_ptr_mut(0)) else { return 0 };
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
    let Some(layout) = LAYOUTS_OF.get(all.layout as u32 & (LAYOUTS - 1)) else { return 0 };
    let Some(length) = gather(all, code, layout, entry) else { return 1 };
    let Some(scratch) = SCRATCH.get_ptr(SAMPLER) else { return 0 };
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
fn is_a(all: &List, of: u64) -> bool {
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
    to: &mut [u8; crate::maps::CODE_BYTES],
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

/// Hands over the list, if the thread runs Python.
#[inline(always)]
pub fn hand_over_list(scratch: &Scratch) {
    let Some(all) = LISTS.get_ptr_mut(0) else { return };
    // SAFETY: as in `found`.
    let all = unsafe { &mut *all };
    all.header.time_ns = scratch.header.time_ns;
    all.header.cpu = scratch.header.cpu;
    all.header.kind = RecordKind::Managed as u8;
    let count = masked::<{ MAX_ENTRIES as u64 - 1 }>(all.count);
    if count == 0 {
        return;
    }
    all.head.entries = count as u32;
    let bytes = size_of::<SampleHeader>() + size_of::<ManagedHead>() + count * size_of::<Entry>();
    // Without room for it the sample has native frames alone.
    // SAFETY: `bytes` is at most the size of what the pointer points to, which the verifier checks.
    unsafe { hand_over((all as *mut List).cast(), bytes) };
}
