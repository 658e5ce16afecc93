//! Copies the part of a user stack that cannot be walked yet. The collector walks on there once the
//! mapping or the table is there.
//!
//! Called by `sources/perf_event.rs` and `sources/off_cpu.rs`.

use aya_ebpf::bindings::BPF_RB_AVAIL_DATA;
use aya_ebpf::helpers::generated::bpf_probe_read_user;
use stackwire_collector_ebpf::{
    CopyHead, MAX_COPY_BYTES, OF_POINTER, Part, RING_BYTES, RecordKind, SampleHeader, masked,
};

use crate::maps::{COPIES, COPY_BYTES, Copied, PAGE, SAMPLER, SAMPLES, Scratch, hand_over};
use crate::walk::goroutine;

/// Hands a copy over, for the sample or the stack in this slot, whose walk by tables ended early.
/// Returns whether there was room.
#[inline(always)]
pub fn hand_over_copy(scratch: &Scratch, slot: u32) -> bool {
    // A sample without its copy is worth more than a copy that leaves no room for samples. Of waits
    // there may be a hundred times as many as of samples.
    let room = if slot == SAMPLER { RING_BYTES / 2 } else { RING_BYTES / 8 };
    if SAMPLES.query(BPF_RB_AVAIL_DATA as u64) > u64::from(room) {
        return false;
    }
    let most = match COPY_BYTES.get(slot) {
        Some(&most) if most <= MAX_COPY_BYTES as u64 => most,
        _ => return false,
    };
    let Some(copied) = COPIES.get_ptr_mut(slot) else { return false };
    // SAFETY: the pointer came from a successful lookup; the entry is this CPU's, and programs of
    // one slot do not interrupt each other.
    let copied = unsafe { &mut *copied };
    let cursor = &scratch.tables.cursor;
    goroutine::parts_of(cursor, most, &mut copied.head.parts);
    let mut bytes = 0;
    for part in &mut copied.head.parts {
        bytes = copy(part, &mut copied.bytes, bytes);
    }
    if copied.head.parts[OF_POINTER].bytes == 0 {
        return false;
    }
    // Field by field: a whole struct would be copied by a call to memcpy.
    copied.header.time_ns = scratch.header.time_ns;
    copied.header.cpu = scratch.header.cpu;
    copied.header.kind = RecordKind::Copy as u8;
    let to = &mut copied.head.cursor;
    for (to, from) in to.registers.iter_mut().zip(&cursor.registers) {
        *to = *from;
    }
    to.ip = cursor.ip;
    to.known = cursor.known;
    to.exact = cursor.exact;
    to.thread = cursor.thread;
    to.guessed = cursor.guessed;
    // The bound, for the verifier, which does not know what the parts add up to: kernel 6.1's not
    // even that it is no negative number.
    let bytes = masked::<{ 2 * MAX_COPY_BYTES as u64 - 1 }>(bytes);
    let bytes = if bytes > MAX_COPY_BYTES { MAX_COPY_BYTES } else { bytes };
    let length = size_of::<SampleHeader>() + size_of::<CopyHead>() + bytes;
    // Without room the sample ends where its walk did, which its record says.
    // SAFETY: `length` is at most the size of what the pointer points to, which the verifier
    // checks.
    unsafe { hand_over((copied as *mut Copied).cast(), length) }
}

/// Copies a part page by page, up to the first that cannot be read, and notes how much that is.
/// `before`: what was copied of others. Returns it with the bytes of this one.
#[inline(always)]
fn copy(part: &mut Part, to: &mut [u8; MAX_COPY_BYTES + 2 * PAGE], before: u64) -> u64 {
    let (start, most) = (part.start, part.bytes);
    let mut bytes = 0u64;
    for _ in 0..=MAX_COPY_BYTES / PAGE {
        if bytes >= most {
            break;
        }
        let at = start.wrapping_add(bytes);
        let in_page = PAGE as u64 - (at & (PAGE as u64 - 1));
        let left = most - bytes;
        let piece = if in_page < left { in_page } else { left };
        let place = masked::<{ MAX_COPY_BYTES as u64 - 1 }>(before + bytes);
        let length = masked::<{ 2 * PAGE as u64 - 1 }>(piece) as u32;
        // SAFETY: the place is less than MAX_COPY_BYTES and the length less than two pages, which
        // is what the array has. The helper checks the address and fails rather than fault.
        let failed = unsafe {
            bpf_probe_read_user(to.as_mut_ptr().add(place).cast(), length, at as *const _)
        };
        if failed != 0 {
            break;
        }
        bytes += piece;
    }
    part.bytes = bytes;
    before + bytes
}
