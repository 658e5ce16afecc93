//! Scripts of V8: hands over the source of one, piece by piece over many samples, so that the
//! collector can count its lines. Called by `lists.rs`, and by `by_frames_of_v8.rs`, which says of
//! which.

use aya_ebpf::bindings::BPF_RB_AVAIL_DATA;
use stackwire_collector_ebpf::managed::{PIECE, SCRIPTS, ScriptHead};
use stackwire_collector_ebpf::v8::{SCRIPT_SOURCE, TAG};
use stackwire_collector_ebpf::{RING_BYTES, RecordKind, SampleHeader, masked};

use super::functions::{SOURCE, found, script_key};
use super::objects::{copy_into, word};
use crate::maps::{
    HANDED_OVER, LISTS, List, MAX_WANTED, PIECES, Piece, SAMPLES, SCRATCH, hand_over,
};

/// Pieces of a script that a sample hands over.
const AT_ONCE: u32 = 4;
/// What a CPU may hand over: a piece so often, and so many at once.
const APART_NS: u64 = 8_000_000;
const SAVED_UP: u64 = 64;
/// Instead of how many bytes have been handed over: all.
const ALL: u64 = u64::MAX;

/// Notes a script that is not handed over yet.
#[inline(always)]
pub fn want(all: &mut List, script: u64) {
    // Functions of one script mostly call each other.
    if script == all.last_script {
        return;
    }
    all.last_script = script;
    let Some(key) = script_key(all.start, script) else { return };
    match HANDED_OVER.get(key as u32 & (SCRIPTS - 1)) {
        Some(&[known, bytes]) if known == key && bytes == ALL => {}
        _ if all.wanted < MAX_WANTED as u64 => {
            let at = masked::<{ MAX_WANTED as u64 - 1 }>(all.wanted);
            // SAFETY: masked to less than the length.
            unsafe { *all.scripts.as_mut_ptr().add(at) = script };
            all.wanted += 1;
        }
        _ => {}
    }
}

/// Hands over the next pieces of the scripts that were noted, those of the innermost functions
/// first.
#[inline(always)]
pub fn hand_over_more(slot: u32) {
    for index in 0..MAX_WANTED as u32 {
        if hand_over_pieces(slot, index) == 0 {
            break;
        }
    }
}

/// Hands over pieces of the script with this number; 0: there is none. A global function, as
/// `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn hand_over_pieces(slot: u32, index: u32) -> u64 {
    let Some(all) = LISTS.get_ptr(slot) else { return 0 };
    // SAFETY: as in `lists::found`; masked to less than the length.
    let (wanted, script) = unsafe {
        let at = masked::<{ MAX_WANTED as u64 - 1 }>(u64::from(index));
        ((*all).wanted, *(*all).scripts.as_ptr().add(at))
    };
    if u64::from(index) >= wanted {
        return 0;
    }
    for _ in 0..AT_ONCE {
        if hand_over_piece(slot, script) == 0 {
            break;
        }
    }
    1
}

/// Hands over the next piece; 0: there is none, or no room. A global function, as `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn hand_over_piece(slot: u32, script: u64) -> u64 {
    piece(slot, script).is_some().into()
}

#[inline(always)]
fn piece(slot: u32, script: u64) -> Option<()> {
    let (Some(all), Some(scratch), Some(to)) =
        (LISTS.get_ptr_mut(slot), SCRATCH.get_ptr(slot), PIECES.get_ptr_mut(slot))
    else {
        return None;
    };
    // SAFETY: as in `lists::found`.
    let (all, scratch, to) = unsafe { (&mut *all, &*scratch, &mut *to) };
    // Lines are not worth the samples of others.
    if SAMPLES.query(BPF_RB_AVAIL_DATA as u64) > u64::from(RING_BYTES / 4) {
        return None;
    }
    let now_ns = scratch.header.time_ns;
    if to.until_ns >= now_ns + APART_NS * SAVED_UP {
        return None;
    }
    let key = script_key(all.start, script)?;
    all.source = word(script.wrapping_sub(TAG), SCRIPT_SOURCE)?;
    let source = found(slot, SOURCE)?;
    let known = HANDED_OVER.get_ptr_mut(key as u32 & (SCRIPTS - 1))?;
    // SAFETY: the pointer came from a successful lookup. Where another program has written
    // meanwhile, pieces come twice: the collector takes those that are next.
    let known = unsafe { &mut *known };
    if known[0] != key {
        *known = [key, 0];
    }
    let offset = known[1];
    if offset >= source.bytes {
        known[1] = ALL;
        return None;
    }
    let left = source.bytes - offset;
    let bytes = if left < PIECE as u64 { left } else { PIECE as u64 };
    let bytes = masked::<{ 2 * PIECE as u64 - 1 }>(bytes);
    if !copy_into(&mut to.bytes, source.at.wrapping_add(offset), bytes as u32) {
        return None;
    }
    // Field by field: a whole struct would be copied by a call to memcpy.
    to.header.time_ns = now_ns;
    to.header.start_boottime_ns = scratch.header.start_boottime_ns;
    to.header.pid = scratch.header.pid;
    to.header.cpu = scratch.header.cpu;
    to.header.kind = RecordKind::Script as u8;
    to.head.script = key;
    to.head.offset = offset;
    to.head.length = source.bytes;
    to.head.width = source.width;
    to.head.bytes = bytes as u32;
    to.until_ns = if to.until_ns > now_ns { to.until_ns } else { now_ns } + APART_NS;
    let length = size_of::<SampleHeader>() + size_of::<ScriptHead>() + bytes;
    // SAFETY: `length` is at most the size of what the pointer points to, which the verifier
    // checks.
    if !unsafe { hand_over((to as *mut Piece).cast(), length) } {
        return None;
    }
    known[1] = offset + bytes as u64;
    Some(())
}
