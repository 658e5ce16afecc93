//! The walk of a user stack by frame pointers alone (`--unwind fp`). Its own, because
//! `bpf_get_stackid` on user stacks gives no end reason, stops at 127 frames, starts from the
//! interrupted registers and has crashed kernels.
//!
//! The walk is cut into steps of [`STEP`] frames, each a program that tail-calls the next. In one
//! loop of 1,024 the verifier spends 0.8 s at every start; `bpf_loop` needs 5.17 and has regressed
//! since.

use aya_ebpf::helpers::bpf_probe_read_user;
use stackwire_collector_ebpf::masked;
use stackwire_collector_ebpf::{MAX_USER_FRAMES, UserEnd};

use crate::maps::{Scratch, WALKING, Walk};

/// Frames a program walks. The kernel allows 33 tail calls: one to `sample`, and those of the walk,
/// which cover MAX_USER_FRAMES.
const STEP: u64 = 32;

/// The three registers a walk starts from.
#[derive(Clone, Copy)]
pub struct Registers {
    pub ip: u64,
    pub sp: u64,
    pub fp: u64,
}

/// What a function with a frame pointer has at its address: `push rbp; mov rbp, rsp`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Frame {
    caller_fp: u64,
    return_address: u64,
}

/// Records the interrupted instruction and makes ready for [`step`].
#[inline(always)]
pub fn begin(scratch: &mut Scratch, start: Registers) {
    scratch.frames[0] = start.ip;
    scratch.walk = Walk { fp: start.fp, lowest: start.sp, depth: 1, end: WALKING };
}

/// Walks on for at most [`STEP`] frames.
///
/// A frame pointer is taken only where it can be one: not below the stack pointer, 8-byte aligned,
/// and higher than the one before. Whether a return address is code is checked by the collector,
/// which knows the mappings.
#[inline(always)]
pub fn step(scratch: &mut Scratch) {
    let Walk { mut fp, mut lowest, mut depth, mut end } = scratch.walk;
    for _ in 0..STEP {
        if end != WALKING {
            break;
        }
        // Of the leaf's frame pointer a null tells nothing: code without them leaves any number
        // there.
        let null = if depth > 1 { UserEnd::Root as u64 } else { UserEnd::NoFramePointer as u64 };
        if fp == 0 {
            end = null;
        } else if fp < lowest || fp & 7 != 0 {
            end = UserEnd::NoFramePointer as u64;
        } else if depth >= MAX_USER_FRAMES as u64 {
            end = UserEnd::DepthLimit as u64;
        } else {
            // SAFETY: bpf_probe_read_user checks the address and fails rather than fault.
            match unsafe { bpf_probe_read_user(fp as *const Frame) } {
                Ok(Frame { return_address: 0, .. }) => end = null,
                Ok(frame) => {
                    // SAFETY: the index is masked to less than MAX_USER_FRAMES, the array is
                    // longer.
                    unsafe {
                        *scratch
                            .frames
                            .as_mut_ptr()
                            .add(masked::<{ MAX_USER_FRAMES as u64 - 1 }>(depth)) =
                            frame.return_address;
                    }
                    depth += 1;
                    lowest = fp + 16;
                    fp = frame.caller_fp;
                }
                Err(_) => end = UserEnd::Unreadable as u64,
            }
        }
    }
    scratch.walk = Walk { fp, lowest, depth, end };
}
