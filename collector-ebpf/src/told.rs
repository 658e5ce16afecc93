//! Tells the collector of stacks, each once, by a number: a hash of what is in it.
//!
//! Called by `sources/off_cpu.rs` and `sources/wakers.rs`.

use stackwire_collector_ebpf::{
    KernelEnd, MAX_USER_FRAMES, RecordKind, SampleHeader, TOLD_STACKS, UserEnd, masked,
};

use crate::hash::mixed;
use crate::maps::{Scratch, TOLD, hand_over, wake_collector};
use crate::walk::lists;

/// Tells of the user stack whose walk in this slot is over; returns its number.
#[inline(always)]
pub fn tell_user(scratch: &mut Scratch, slot: u32) -> u64 {
    let (frames, list) = of_user(scratch, slot);
    tell(scratch, frames, list)
}

/// Tells of the user stack of the current thread, of which a copy was handed over; returns its
/// number, which no other stack has: nobody knows yet what is behind its frames.
#[inline(always)]
pub fn tell_copied(scratch: &mut Scratch, slot: u32) -> u64 {
    let (frames, list) = of_user(scratch, slot);
    let header = &scratch.header;
    let thread = u64::from(header.pid) << 32 | u64::from(header.tid);
    let number = mixed(thread, header.time_ns) | 1;
    hand_over_stack(scratch, frames, list, number);
    number
}

/// How many frames the user stack has whose walk in this slot is over, and whether there is a list.
#[inline(always)]
fn of_user(scratch: &mut Scratch, slot: u32) -> (usize, Option<u32>) {
    // The bound, for the verifier, which does not know what the walk promised.
    let depth = scratch.walk.depth as usize;
    let frames = if depth > MAX_USER_FRAMES { MAX_USER_FRAMES } else { depth };
    let end = scratch.walk.end;
    if end == UserEnd::NoMappingsYet as u64 {
        wake_collector();
    }
    scratch.header.user_frames = frames as u16;
    scratch.header.kernel_frames = 0;
    scratch.header.user_end = end as u8;
    scratch.header.kernel_end = KernelEnd::None as u8;
    (frames, scratch.list.was_walked().then_some(slot))
}

/// Tells of the kernel stack in place of the frames, of so many; returns its number.
#[inline(always)]
pub fn tell_kernel(scratch: &mut Scratch, (frames, end): (usize, KernelEnd), now_ns: u64) -> u64 {
    scratch.header.time_ns = now_ns;
    // It means the same in every process.
    scratch.header.pid = 0;
    scratch.header.user_frames = 0;
    scratch.header.kernel_frames = frames as u16;
    scratch.header.user_end = 0;
    scratch.header.kernel_end = end as u8;
    scratch.header.list_end = 0;
    tell(scratch, frames, None)
}

/// Tells the collector of a stack if it does not know it, with the list of this slot; returns its
/// number.
#[inline(always)]
fn tell(scratch: &mut Scratch, frames: usize, list: Option<u32>) -> u64 {
    let header = &scratch.header;
    let ends = u64::from(header.kernel_end) << 8 | u64::from(header.user_end);
    let lengths = u64::from(header.user_frames) << 16 | u64::from(header.kernel_frames);
    let mut number = mixed(u64::from(header.pid) << 32 | ends << 16, lengths);
    for index in 0..MAX_USER_FRAMES {
        if index >= frames {
            break;
        }
        // SAFETY: the index is less than the length of the array.
        number = mixed(number, unsafe { *scratch.frames.as_ptr().add(index) });
    }
    if let Some(slot) = list {
        number = lists::mix_list(number, slot);
    }
    // 0 stands for none.
    number |= 1;
    let Some(told) = TOLD.get_ptr_mut(place(number)) else { return number };
    // SAFETY: the pointer came from a successful lookup. Of two CPUs that write here one is lost,
    // and its stacks are told again.
    if unsafe { core::ptr::read_volatile(told) } == number {
        return number;
    }
    if hand_over_stack(scratch, frames, list, number) {
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(told, number) };
    }
    number
}

/// Hands over a stack with this number, with the list of this slot; whether there was room for all
/// of it.
#[inline(always)]
fn hand_over_stack(scratch: &mut Scratch, frames: usize, list: Option<u32>, number: u64) -> bool {
    scratch.header.kind = RecordKind::Stack as u8;
    scratch.header.period = number;
    // Before the stack it is of.
    let is_whole = list.is_none_or(|slot| lists::hand_over_list(scratch, slot));
    // The bound again, in a way that the compiler does not find needless: kernel 6.1's verifier has
    // forgotten it over the calls before.
    let frames = masked::<{ 2 * MAX_USER_FRAMES as u64 - 1 }>(frames as u64);
    let frames = if frames > MAX_USER_FRAMES { MAX_USER_FRAMES } else { frames };
    let bytes = size_of::<SampleHeader>() + frames * 8;
    // SAFETY: `bytes` is at most the size of the scratch record, which the verifier checks.
    unsafe { hand_over((scratch as *mut Scratch).cast(), bytes) && is_whole }
}

/// Whether the collector knows the stack with this number.
#[inline(always)]
pub fn is_told(number: u64) -> bool {
    // SAFETY: the pointer came from a successful lookup.
    TOLD.get_ptr(place(number))
        .is_some_and(|told| unsafe { core::ptr::read_volatile(told) } == number)
}

#[inline(always)]
fn place(number: u64) -> u32 {
    masked::<{ TOLD_STACKS as u64 - 1 }>(number >> 8) as u32
}
