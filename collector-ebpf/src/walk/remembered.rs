//! Stacks that a thread waited with before: as long as the walk would read the same words again, it
//! would find the same stack. For eight frames that costs 130 ns, and the walk 490.
//!
//! Of walks by tables to the thread's root. Called by `sources/off_cpu.rs`; a thread waits at few
//! places, a million times.

use aya_ebpf::helpers::bpf_probe_read_user;
use stackwire_collector_ebpf::{UserEnd, arch::RBP, arch::RSP, masked};

use crate::hash::mixed;
use crate::maps::{MAX_READS, REMEMBERED, REMEMBERED_STACKS, Remembered, Scratch, WALKING, list};
use crate::told::is_told;

/// The number of the stack that a walk that has begun, of this process, will find, if that is
/// known. If it is not, notes what the walk comes by.
#[inline(always)]
pub fn find(scratch: &mut Scratch, pid: u32) -> Option<u64> {
    if scratch.walk.end != WALKING {
        return None;
    }
    let cursor = &scratch.tables.cursor;
    let key = mixed(mixed(u64::from(pid), cursor.ip), cursor.registers[RSP as usize]);
    let key = mixed(key, cursor.registers[RBP as usize]) | 1;
    scratch.key = key;
    scratch.reads.count = 0;
    let known = place(key)?;
    // SAFETY: the pointer came from a successful lookup, in a map of this CPU; the run queue is
    // locked.
    let known = unsafe { &*known };
    let tables = &scratch.tables;
    if known.key != key
        || known.generation != tables.generation
        || (known.first, known.mappings) != (tables.first, tables.count)
        || !is_told(known.number)
    {
        return None;
    }
    for index in 0..MAX_READS {
        if is_all(index, known.reads.count) {
            break;
        }
        let index = inside(index);
        // SAFETY: the index is less than the length of both arrays; bpf_probe_read_user checks the
        // address and fails rather than fault.
        let (word, before) = unsafe {
            let at = *known.reads.at.as_ptr().add(index);
            (bpf_probe_read_user(at as *const u64), *known.reads.found.as_ptr().add(index))
        };
        if word != Ok(before) {
            return None;
        }
    }
    Some(known.number)
}

/// Remembers a walk that is over. Not one with frames of an interpreter: they change while the
/// words that the native walk comes by stay.
#[inline(always)]
pub fn remember(scratch: &Scratch, number: u64) {
    let whole = scratch.walk.end == UserEnd::Root as u64;
    let count = scratch.reads.count;
    let has_list = scratch.list.stage == list::WALKED;
    if !whole || has_list || count == 0 || count > MAX_READS as u64 || scratch.tables.count == 0 {
        return;
    }
    let key = scratch.key;
    let Some(known) = place(key) else { return };
    // SAFETY: as in `find`.
    let known = unsafe { &mut *known };
    known.key = key;
    (known.first, known.mappings) = (scratch.tables.first, scratch.tables.count);
    known.generation = scratch.tables.generation;
    known.number = number;
    known.reads.count = count;
    for index in 0..MAX_READS {
        if is_all(index, count) {
            break;
        }
        let index = inside(index);
        // SAFETY: the index is less than the length of the arrays.
        unsafe {
            *known.reads.at.as_mut_ptr().add(index) = *scratch.reads.at.as_ptr().add(index);
            *known.reads.found.as_mut_ptr().add(index) = *scratch.reads.found.as_ptr().add(index);
        }
    }
}

/// Whether there were so many words. The compiler does not see through it: it would make the count
/// the end of the loop, and kernel 6.1's verifier knows no end of that.
#[inline(always)]
fn is_all(index: usize, count: u64) -> bool {
    masked::<{ 4 * MAX_READS as u64 - 1 }>(count.wrapping_sub(index as u64)) == 0
}

/// An index into [`Reads`](crate::maps::Reads), likewise.
#[inline(always)]
fn inside(index: usize) -> usize {
    masked::<{ MAX_READS as u64 - 1 }>(index as u64)
}

#[inline(always)]
fn place(key: u64) -> Option<*mut Remembered> {
    REMEMBERED.get_ptr_mut(masked::<{ REMEMBERED_STACKS as u64 - 1 }>(key >> 8) as u32)
}
