//! The walk of a user stack by unwind tables, with frame pointers where the code was made at run
//! time.
//!
//! In steps of [`STEP`] frames, each a program that tail-calls the next, as in
//! `by_frame_pointers.rs`.
//! Searches are loops the verifier can count, over arrays that never change their size.

use aya_ebpf::bindings::pt_regs;
use aya_ebpf::helpers::{bpf_probe_read_user, bpf_probe_read_user_buf};
use stackwire_collector_ebpf::arch::{RBP, RSP, saved};
use stackwire_collector_ebpf::frame::{AGAIN, NOT_CALLED, TableWalk, Tables};
use stackwire_collector_ebpf::tables::{CHUNK, Mapping, mapping_of};
use stackwire_collector_ebpf::unwind::{GO_ON, guessed};
use stackwire_collector_ebpf::{
    INTERRUPTED, MAX_USER_FRAMES, Memory, Rule, Unwind, UserEnd, masked,
};

use crate::maps::{
    EXECUTABLES, MAPPINGS, MAX_READS, PAGES, ROWS, RULES, Reads, SCRATCH, Scratch, WALKING, config,
    list,
};
use crate::processes::{find_process, generation};
use crate::walk::{lists, pointers, tree};

/// A count of [`Reads`].
const NOT_REPEATABLE: u64 = MAX_READS as u64 + 1;

/// Frames a program walks. The kernel allows 33 tail calls: one to `sample`, and those of the walk,
/// which cover MAX_USER_FRAMES. Those of a list (`lists.rs`), up to five, are taken from
/// these.
const STEP: u64 = 32;
/// Frames of a process that runs V8: tail calls are left to look at them afterwards, 128 in each.
const MAX_OF_V8: u64 = 736;

/// The process's own memory, and what was read of it.
struct User<'a>(&'a mut Reads);

impl Memory for User<'_> {
    #[inline(always)]
    fn word(&mut self, address: u64) -> Option<u64> {
        // SAFETY: bpf_probe_read_user checks the address and fails rather than fault.
        let found = unsafe { bpf_probe_read_user(address as *const u64) }.ok();
        let Reads { count, at, found: words } = self.0;
        let index = *count as usize;
        match found {
            Some(word) if index < MAX_READS => {
                // SAFETY: the index is less than the length of both arrays.
                unsafe {
                    *at.as_mut_ptr().add(index) = address;
                    *words.as_mut_ptr().add(index) = word;
                }
                *count = index as u64 + 1;
            }
            _ => *count = NOT_REPEATABLE,
        }
        found
    }

    #[inline(always)]
    fn needs_more(&mut self) {
        self.0.count = NOT_REPEATABLE;
    }

    #[inline(always)]
    fn words<const N: usize>(&mut self, address: u64, to: &mut [u64; N]) -> bool {
        self.needs_more();
        // SAFETY: as above; words are plain bytes.
        unsafe {
            let bytes = core::slice::from_raw_parts_mut((to as *mut [u64; N]).cast::<u8>(), N * 8);
            bpf_probe_read_user_buf(address as *const u8, bytes).is_ok()
        }
    }
}

/// Records the interrupted instruction and makes ready for [`step`].
#[inline(always)]
pub fn begin(scratch: &mut Scratch, pid: u32, regs: &pt_regs, thread: u64) {
    scratch.frames[0] = saved::ip(regs);
    scratch.walk.depth = 1;
    scratch.walk.end = WALKING;
    scratch.pointers[0] = 0;
    let TableWalk { cursor, mapping, .. } = &mut scratch.tables;
    saved::copy(regs, &mut cursor.registers);
    cursor.ip = saved::ip(regs);
    cursor.known = 0xffff;
    cursor.exact = 1;
    cursor.thread = thread;
    cursor.guessed = guessed::NOT;
    mapping.start = 1;
    mapping.end = 0;
    scratch.tables.first = 0;
    scratch.tables.count = 0;
    // Nothing is noted unless somebody asks for it: `remembered.rs` does.
    scratch.reads.count = NOT_REPEATABLE;
    match find_process(pid) {
        Some((first, count)) => {
            scratch.tables.first = first;
            scratch.tables.count = count;
        }
        // One that has just become another program: the kernel knows its mappings all the same.
        None if tree::is_there() => {}
        None => scratch.walk.end = UserEnd::NoMappingsYet as u64,
    }
}

/// Walks on for at most [`STEP`] frames, in a slot of `SCRATCH`.
#[inline(always)]
pub fn step(scratch: &mut Scratch, slot: u32) {
    for _ in 0..STEP {
        if scratch.walk.end != WALKING || scratch.list.is_wanted() {
            break;
        }
        let end = walk_frame(slot);
        if end != GO_ON {
            scratch.walk.end = end;
        }
    }
    // What was read may have been of something else by then: only the first frame is certain, of a
    // walk that was begun. Of one that was not, the buffer still has a frame of the sample before.
    let over = scratch.walk.end != WALKING && scratch.walk.depth > 0;
    if over && scratch.tables.generation != generation() {
        scratch.walk.depth = 1;
        scratch.walk.end = UserEnd::TablesReplaced as u64;
    }
    if over {
        lists::walk_is_over(slot);
    }
}

/// Walks one frame up. It is a global function, so that the verifier looks at it once and not once
/// for each call: 9 ms instead of 170. Older kernels understand no pointer among the arguments of
/// such a function, so it looks for the buffer itself.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn walk_frame(slot: u32) -> u64 {
    let Some(scratch) = SCRATCH.get_ptr_mut(slot) else { return UserEnd::DepthLimit as u64 };
    // SAFETY: as in `sources/`, in whose programs this runs.
    frame(unsafe { &mut *scratch }, slot)
}

#[inline(always)]
fn frame(scratch: &mut Scratch, slot: u32) -> u64 {
    let depth = scratch.walk.depth;
    if depth >= MAX_USER_FRAMES as u64 || depth == MAX_OF_V8 && lists::is_of_v8(slot) != 0 {
        return UserEnd::DepthLimit as u64;
    }
    let memory = &mut User(&mut scratch.reads);
    let guesses = config().unwind == Unwind::Auto as u32;
    let elsewhere = |ip| tree::mapping_at(ip, slot);
    let (ip, sp) =
        (scratch.tables.cursor.lookup_ip(), scratch.tables.cursor.registers[RSP as usize]);
    scratch.walk.fp = scratch.tables.cursor.registers[RBP as usize];
    let mut maps = Maps { layout: 0 };
    let end = scratch.tables.up(&mut maps, memory, guesses, elsewhere);
    if maps.layout != 0 && scratch.list.stage == list::NOT_MET {
        let (_, offset) = mapping_of(scratch.tables.mapping.word);
        let base = scratch.tables.mapping.start.wrapping_sub(offset);
        lists::meet(slot, maps.layout as u32, base, ip, sp);
    }
    let end = match end {
        AGAIN => return GO_ON,
        NOT_CALLED => {
            scratch.walk.depth = depth - 1;
            UserEnd::NoFramePointer as u64
        }
        end => end,
    };
    if end != GO_ON {
        return end;
    }
    let cursor = &scratch.tables.cursor;
    let mark = if cursor.exact != 0 { INTERRUPTED } else { 0 };
    let address = cursor.ip | mark;
    // SAFETY: the index is masked to less than MAX_USER_FRAMES, the array is longer.
    unsafe {
        *scratch.frames.as_mut_ptr().add(masked::<{ MAX_USER_FRAMES as u64 - 1 }>(depth)) = address;
    }
    scratch.walk.depth = depth + 1;
    note_pointer(slot, sp);
    if scratch.list.evaluator != 0 {
        lists::come_by(scratch, slot, depth - 1, ip, sp);
    }
    GO_ON
}

/// Notes whether the frame that was left, with this stack pointer, has a frame pointer of its own
/// that was followed. A global function, as `walk_frame`, whose stack it spares.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn note_pointer(slot: u32, sp: u64) -> u64 {
    let Some(scratch) = SCRATCH.get_ptr_mut(slot) else { return 0 };
    // SAFETY: as in `walk_frame`.
    let scratch = unsafe { &mut *scratch };
    let (cursor, pointer) = (&scratch.tables.cursor, scratch.walk.fp);
    let is_own = cursor.guessed != guessed::NOT
        && cursor.registers[RSP as usize] == pointer.wrapping_add(16);
    let noted = if is_own { pointers::noted(pointer, sp) } else { 0 };
    let frame = scratch.walk.depth.wrapping_sub(2);
    // SAFETY: the indexes are masked to less than the length.
    unsafe {
        let at = |frame| masked::<{ MAX_USER_FRAMES as u64 - 1 }>(frame);
        *scratch.pointers.as_mut_ptr().add(at(frame)) = noted;
        // The new one, until it is left.
        *scratch.pointers.as_mut_ptr().add(at(frame.wrapping_add(1))) = 0;
    }
    1
}

/// The collector's tables.
struct Maps {
    /// Number of the layout of the interpreter that the executable looked up last has.
    layout: u64,
}

impl Tables for Maps {
    #[inline(always)]
    fn mapping(&mut self, number: u32) -> Option<&Mapping> {
        MAPPINGS.get(number)
    }

    #[inline(always)]
    fn executable(&mut self, number: u32) -> Option<(u64, u64)> {
        let slot = EXECUTABLES.get_ptr_mut(number)?;
        // SAFETY: the pointer came from a successful lookup. The count may lose some to other CPUs;
        // it ranks, no more.
        unsafe {
            (*slot).uses += 1;
            self.layout = core::ptr::read_volatile(&raw const (*slot).layout);
            let pages = core::ptr::read_volatile(&raw const (*slot).pages);
            Some((pages, core::ptr::read_volatile(&raw const (*slot).state)))
        }
    }

    #[inline(always)]
    fn page(&mut self, number: u32) -> Option<u64> {
        PAGES.get(number).copied()
    }

    #[inline(always)]
    fn row(&mut self, number: u32) -> Option<u32> {
        row(number)
    }

    #[inline(always)]
    fn rule(&mut self, number: u32) -> Option<&Rule> {
        RULES.get(number)
    }
}

#[inline(always)]
fn row(number: u32) -> Option<u32> {
    let chunk = ROWS.get_ptr(number / CHUNK)?;
    // SAFETY: the pointer came from a successful lookup, the index is masked to less than CHUNK.
    Some(unsafe { *chunk.cast::<u32>().add(masked::<{ CHUNK as u64 - 1 }>(u64::from(number))) })
}
