//! The walk of a user stack by unwind tables, with frame pointers where the code was made at run
//! time.
//!
//! In steps of [`STEP`] frames, each a program that tail-calls the next, as in
//! `by_frame_pointers.rs`.
//! Searches are loops the verifier can count, over arrays that never change their size.

use aya_ebpf::bindings::pt_regs;
use aya_ebpf::helpers::{bpf_probe_read_user, bpf_probe_read_user_buf};
use stackwire_collector_ebpf::arch::{follows_call, saved};
use stackwire_collector_ebpf::tables::{self, CHUNK, state};
use stackwire_collector_ebpf::unwind::{self, GO_ON, guessed};
use stackwire_collector_ebpf::{
    INTERRUPTED, MAX_USER_FRAMES, Memory, Rule, Unwind, UserEnd, cfa, masked,
};

use crate::maps::{
    EXECUTABLES, MAPPINGS, PAGES, ROWS, RULES, SCRATCH, Scratch, TableWalk, WALKING, config,
};
use crate::processes::{find_process, generation};
use crate::walk::tree;

/// Frames a program walks. The kernel allows 33 tail calls: one to `sample`, and those of the walk,
/// which cover MAX_USER_FRAMES.
const STEP: u64 = 32;

/// The process's own memory.
struct User;

impl Memory for User {
    #[inline(always)]
    fn word(&mut self, address: u64) -> Option<u64> {
        // SAFETY: bpf_probe_read_user checks the address and fails rather than fault.
        unsafe { bpf_probe_read_user(address as *const u64) }.ok()
    }

    #[inline(always)]
    fn words<const N: usize>(&mut self, address: u64, to: &mut [u64; N]) -> bool {
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
        if scratch.walk.end != WALKING {
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
    if depth >= MAX_USER_FRAMES as u64 {
        return UserEnd::DepthLimit as u64;
    }
    let ip = scratch.tables.cursor.lookup_ip();
    let inside = ip >= scratch.tables.mapping.start && ip < scratch.tables.mapping.end;
    if !inside && !find_mapping(&mut scratch.tables, ip) {
        let runs = scratch.tables.cursor.exact != 0;
        match tree::find_in_tree(ip, slot) {
            tree::FOUND => {}
            tree::UNKNOWN => return UserEnd::NoMappingsYet as u64,
            // What runs is code: its mapping has not been told.
            _ => return if runs { UserEnd::NoMappingsYet } else { UserEnd::NotCode } as u64,
        }
    }
    let (executable, file_offset) = tables::mapping_of(scratch.tables.mapping.word);
    let offset = ip - scratch.tables.mapping.start + file_offset;
    let rule = match executable {
        tables::ANONYMOUS => Err(UserEnd::NoTable),
        _ => find_rule(executable & !tables::DESCRIBED, offset),
    };
    let made = executable == tables::ANONYMOUS || executable & tables::DESCRIBED != 0;
    let rule = match rule {
        // What its compiler has not described yet.
        Ok(rule) if made && rule.cfa == cfa::NONE => Err(UserEnd::NoRule),
        rule => rule,
    };
    let end = if made && rule.is_err() {
        if config().unwind != Unwind::Auto as u32 {
            return UserEnd::NoTable as u64;
        }
        let rule = Rule { cfa: cfa::FRAME_POINTER, ..Rule::default() };
        let cursor = &mut scratch.tables.cursor;
        let end = unwind::step(&mut User, &mut scratch.tables.signal, cursor, &rule);
        // From one to two.
        cursor.guessed <<= 1;
        end
    } else {
        // Of a file whose table is being made nobody knows yet what keeps frame pointers in it.
        let asked = !made && !matches!(rule, Err(UserEnd::NoTableYet));
        if asked && !unwind::may_be_called(&mut User, &scratch.tables.cursor, rule.ok()) {
            scratch.walk.depth = depth - 1;
            return UserEnd::NoFramePointer as u64;
        }
        match rule {
            Ok(rule) => unwind::step(
                &mut User,
                &mut scratch.tables.signal,
                &mut scratch.tables.cursor,
                rule,
            ),
            // A stack may be made up to return to the beginning of a function, in front of which
            // nothing is: now by what is there (`makecontext` does so).
            Err(UserEnd::NoRule)
                if scratch.tables.cursor.exact == 0
                    && !follows_call(&mut User, scratch.tables.cursor.ip, false) =>
            {
                scratch.tables.cursor.exact = 1;
                return GO_ON;
            }
            Err(end) => end as u64,
        }
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
    GO_ON
}

/// The mapping an address lies in, into `walk.mapping`.
#[inline(always)]
fn find_mapping(walk: &mut TableWalk, ip: u64) -> bool {
    let (mut low, mut left) = (walk.first, walk.count);
    if left == 0 {
        return false;
    }
    // The last that begins at or before `ip`.
    for _ in 0..18 {
        if left <= 1 {
            break;
        }
        let half = left / 2;
        let Some(mapping) = MAPPINGS.get(low + half) else { return false };
        if mapping.start <= ip {
            low += half;
            left -= half;
        } else {
            left = half;
        }
    }
    let Some(mapping) = MAPPINGS.get(low) else { return false };
    walk.mapping.start = mapping.start;
    walk.mapping.end = mapping.end;
    walk.mapping.word = mapping.word;
    ip >= mapping.start && ip < mapping.end
}

/// The rule at an offset of an executable's file.
#[inline(always)]
fn find_rule(executable: u32, offset: u64) -> Result<&'static Rule, UserEnd> {
    let Some(slot) = EXECUTABLES.get_ptr_mut(executable) else { return Err(UserEnd::NoTable) };
    // SAFETY: the pointer came from a successful lookup. The count may lose some to other CPUs; it
    // ranks, no more.
    let (pages, known) = unsafe {
        (*slot).uses += 1;
        (
            core::ptr::read_volatile(&raw const (*slot).pages),
            core::ptr::read_volatile(&raw const (*slot).state),
        )
    };
    if known == state::NOT_YET {
        return Err(UserEnd::NoTableYet);
    }
    if known == state::OVER_SHARE {
        return Err(UserEnd::OverShare);
    }
    if known != state::READY {
        return Err(UserEnd::NoTable);
    }
    let (first, count, base) = tables::pages_of(pages);
    let page = (offset >> 16).wrapping_sub(u64::from(base));
    if page >= u64::from(count) {
        return Err(UserEnd::NoRule);
    }
    let Some(&page) = PAGES.get(first + page as u32) else { return Err(UserEnd::NoRule) };
    let (mut low, mut left) = tables::page_of(page);
    let key = (offset as u32 & 0xffff) << 16 | 0xffff;
    if left == 0 {
        return Err(UserEnd::NoRule);
    }
    for _ in 0..17 {
        if left <= 1 {
            break;
        }
        let half = left / 2;
        let Some(row) = row(low + half) else { return Err(UserEnd::NoRule) };
        if row <= key {
            low += half;
            left -= half;
        } else {
            left = half;
        }
    }
    let Some(row) = row(low) else { return Err(UserEnd::NoRule) };
    if row > key {
        return Err(UserEnd::NoRule);
    }
    RULES.get(row & 0xffff).ok_or(UserEnd::NoRule)
}

#[inline(always)]
fn row(number: u32) -> Option<u32> {
    let chunk = ROWS.get_ptr(number / CHUNK)?;
    // SAFETY: the pointer came from a successful lookup, the index is masked to less than CHUNK.
    Some(unsafe { *chunk.cast::<u32>().add(masked::<{ CHUNK as u64 - 1 }>(u64::from(number))) })
}
