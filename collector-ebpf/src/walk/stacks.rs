//! The stacks of a task: what to begin the walk of the current one's user stack with, and kernel
//! stacks.
//!
//! The walk itself is in `by_tables.rs` and `by_frame_pointers.rs`. Called by `sources/`.

use core::ffi::c_void;

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{pt_regs, task_struct};
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::{bpf_get_stack, bpf_get_task_stack, bpf_task_pt_regs};
use aya_ebpf::maps::ProgramArray;
use stackwire_collector_ebpf::arch::saved;
use stackwire_collector_ebpf::{KernelEnd, MAX_KERNEL_FRAMES, Unwind, UserEnd, WAIT_LIST};

use super::by_frame_pointers::Registers;
use super::{by_frame_pointers, by_tables};
use crate::maps::{SCRATCH, Scratch, WALKING, config, list};
use crate::processes::generation;
use crate::task::Task;

const BYTES: u32 = (MAX_KERNEL_FRAMES * 8) as u32;

/// Makes ready for the walk of a user stack from the registers that were saved when the kernel was
/// entered. `task` is the current one.
#[inline(always)]
pub fn begin(scratch: &mut Scratch, task: *mut task_struct, pid: u32) {
    make_ready(scratch);
    let current = Task(task as u64);
    if current.is_kernel_thread() || current.memory().is_none() {
        return;
    }
    // SAFETY: `task` is the current task, as the helper demands.
    let saved = unsafe { bpf_task_pt_regs(task) } as *const pt_regs;
    // SAFETY: bpf_probe_read_kernel checks the address and fails rather than fault.
    if let Ok(saved) = unsafe { bpf_probe_read_kernel(saved) }
        && saved::is_of_user_mode(&saved)
        && is_where_it_will_return(&saved)
    {
        begin_from(scratch, current, pid, &saved);
    }
}

/// Makes ready for the walk of a user stack, from these registers.
#[inline(always)]
pub fn begin_from(scratch: &mut Scratch, task: Task, pid: u32, regs: &pt_regs) {
    make_ready(scratch);
    if config().unwind == Unwind::FramePointers as u32 || saved::is_compat(regs) {
        let start = Registers { ip: saved::ip(regs), sp: saved::sp(regs), fp: saved::fp(regs) };
        by_frame_pointers::begin(scratch, start);
    } else {
        by_tables::begin(scratch, pid, regs, task.thread_pointer());
    }
    if saved::is_compat(regs) {
        scratch.walk.end = UserEnd::Compat as u64;
    }
}

#[inline(always)]
fn make_ready(scratch: &mut Scratch) {
    scratch.walk.depth = 0;
    scratch.walk.end = UserEnd::NoUserStack as u64;
    // Who walks it says so.
    scratch.list.stage = list::NONE;
    scratch.list.evaluator = 0;
    scratch.header.list_end = 0;
    // Before anything is looked up in tables.
    scratch.tables.generation = generation();
}

/// Whether the saved user registers say where the task will go on.
///
/// Those of an io_uring worker do not. It never was in user mode: they are a copy of its creator's,
/// without ip and sp. Those of a task inside execve do not, either: they belong to the program it
/// is leaving.
#[inline(always)]
fn is_where_it_will_return(saved: &pt_regs) -> bool {
    saved::ip(saved) != 0 && !saved::is_exec(saved)
}

/// Walks on in a slot of `SCRATCH`. None: in the next program, which these `stages` have.
#[inline(always)]
pub fn walk_on<C: EbpfContext>(
    ctx: &C,
    stages: &ProgramArray,
    slot: u32,
    step: impl FnOnce(&mut Scratch),
) -> Option<&'static mut Scratch> {
    // SAFETY: the pointer comes from a successful lookup; the slot is of this CPU and of the
    // program in whose name this runs.
    let scratch = unsafe { &mut *SCRATCH.get_ptr_mut(slot)? };
    step(scratch);
    if scratch.list.is_wanted() {
        // SAFETY: as below. Where it fails, the stack has native frames alone.
        let _ = unsafe { stages.tail_call(ctx, WAIT_LIST) };
        scratch.list.stage = list::NONE;
    }
    if scratch.walk.end == WALKING {
        // SAFETY: the map holds programs of this type only. Fails at the kernel's limit of tail
        // calls, beyond MAX_USER_FRAMES.
        let _ = unsafe { stages.tail_call(ctx, 0) };
        scratch.walk.end = UserEnd::DepthLimit as u64;
    }
    Some(scratch)
}

/// Puts the kernel stack of a task that does not run in place of the frames.
#[inline(always)]
pub fn of_waiting(task: *mut task_struct, scratch: &mut Scratch) -> (usize, KernelEnd) {
    // SAFETY: the array has room for as many bytes.
    let written = unsafe { bpf_get_task_stack(task, scratch.frames.as_mut_ptr().cast(), BYTES, 0) };
    ended(written)
}

/// Appends the kernel stack of the current task behind `user_frames` frames.
#[inline(always)]
pub fn of_kernel(
    ctx: *mut c_void,
    scratch: &mut Scratch,
    user_frames: usize,
) -> (usize, KernelEnd) {
    // SAFETY: `user_frames` is at most MAX_USER_FRAMES and the array has MAX_KERNEL_FRAMES more.
    let written = unsafe {
        let tail = scratch.frames.as_mut_ptr().add(user_frames);
        bpf_get_stack(ctx, tail.cast(), BYTES, 0)
    };
    ended(written)
}

/// What the kernel's unwinder found: how many frames, from the bytes it wrote.
#[inline(always)]
fn ended(written: i64) -> (usize, KernelEnd) {
    if written < 0 {
        return (0, KernelEnd::Failed);
    }
    let frames = (written as usize / 8).min(MAX_KERNEL_FRAMES);
    (frames, if frames == MAX_KERNEL_FRAMES { KernelEnd::DepthLimit } else { KernelEnd::Complete })
}
