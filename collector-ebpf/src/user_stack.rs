//! The frame-pointer walk of a user stack. Its own, because `bpf_get_stackid` on user stacks gives no
//! end reason, stops at 127 frames, starts from the interrupted registers and has crashed kernels.

use aya_ebpf::helpers::bpf_probe_read_user;
use stackwire_collector_ebpf::{MAX_USER_FRAMES, UserEnd};

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

/// Writes instruction pointers, leaf first, from `frames[0]` on; returns how many and why it ended.
///
/// A frame pointer is taken only where it can be one: not below the stack pointer, 8-byte aligned,
/// and higher than the one before. Whether a return address is code is checked by the collector,
/// which knows the mappings.
#[inline(always)]
pub fn walk(frames: &mut [u64; MAX_USER_FRAMES], start: Registers) -> (usize, UserEnd) {
    frames[0] = start.ip;
    let mut fp = start.fp;
    let mut lowest = start.sp;
    for depth in 1..MAX_USER_FRAMES {
        if fp == 0 {
            return (depth, UserEnd::Root);
        }
        if fp < lowest || fp & 7 != 0 {
            return (depth, UserEnd::NoFramePointer);
        }
        // SAFETY: bpf_probe_read_user checks the address and fails rather than fault.
        let Ok(frame) = (unsafe { bpf_probe_read_user(fp as *const Frame) }) else {
            return (depth, UserEnd::Unreadable);
        };
        if frame.return_address == 0 {
            return (depth, UserEnd::Root);
        }
        frames[depth] = frame.return_address;
        lowest = fp + 16;
        fp = frame.caller_fp;
    }
    (MAX_USER_FRAMES, UserEnd::DepthLimit)
}
