//! The sampling program: registers in, one record in the ring out.

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP, pt_regs};
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::{
    bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_current_task_btf,
    bpf_get_smp_processor_id, bpf_get_stack, bpf_ktime_get_ns, bpf_ringbuf_output,
    bpf_task_pt_regs,
};
use aya_ebpf::macros::perf_event;
use aya_ebpf::programs::PerfEventContext;
use stackwire_collector_ebpf::{
    Counter, KernelEnd, MAX_KERNEL_FRAMES, MAX_USER_FRAMES, RING_BYTES, SampleHeader, UserEnd,
};

use crate::maps::{SAMPLES, SCRATCH, Scratch, config, count};
use crate::targets::wanted;
use crate::task::Task;
use crate::user_stack::{Registers, walk};

/// Requested privilege level 3 in the code segment: the registers are of user mode.
const USER_MODE: u64 = 3;
/// `__USER32_CS` of arch/x86/include/asm/segment.h.
const USER32_CS: u64 = 0x23;

#[perf_event]
pub fn sample(ctx: PerfEventContext) -> u32 {
    let pid = ctx.tgid();
    if pid == 0 {
        return 0; // idle
    }
    // SAFETY: helpers without memory arguments.
    let (task, cpu) = unsafe { (bpf_get_current_task_btf(), bpf_get_smp_processor_id()) };
    let start_boottime_ns = Task(task as u64).process_start();
    if !wanted(pid, start_boottime_ns) {
        return 0;
    }
    count(cpu, Counter::Taken);
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        count(cpu, Counter::NoScratch);
        return 0;
    };
    // SAFETY: the pointer came from a successful lookup; the slot is this CPU's, and a perf_event
    // program is not entered again on a CPU that runs one (bpf_prog_active).
    let scratch = unsafe { &mut *scratch };

    // SAFETY: the context of a perf_event program is valid for the length of the program.
    let (interrupted, period) = unsafe { (&(*ctx.ctx).regs, (*ctx.ctx).sample_period) };
    let in_user_mode = interrupted.cs & USER_MODE == USER_MODE;

    let (user_frames, user_end) = if in_user_mode {
        walk_from(scratch, registers(interrupted), interrupted.cs)
    } else if Task(task as u64).is_kernel_thread() {
        (0, UserEnd::NoUserStack)
    } else {
        // SAFETY: `task` is the current task, as the helper demands.
        let saved = unsafe { bpf_task_pt_regs(task) } as *const pt_regs;
        // SAFETY: bpf_probe_read_kernel checks the address and fails rather than fault.
        match unsafe { bpf_probe_read_kernel(saved) } {
            Ok(saved) if saved.cs & USER_MODE == USER_MODE => {
                walk_from(scratch, registers(&saved), saved.cs)
            }
            _ => (0, UserEnd::NoUserStack),
        }
    };
    match user_end {
        UserEnd::Unreadable => count(cpu, Counter::UserUnreadable),
        UserEnd::DepthLimit => count(cpu, Counter::UserDepthLimit),
        _ => {}
    }

    // The bound again, for the verifier: `walk` is inlined, its promise is not.
    let user_frames = if user_frames > MAX_USER_FRAMES { MAX_USER_FRAMES } else { user_frames };
    let (kernel_frames, kernel_end) = if in_user_mode || config().kernel_stacks == 0 {
        (0, KernelEnd::None)
    } else {
        kernel_stack(&ctx, scratch, user_frames)
    };
    if let KernelEnd::Failed = kernel_end {
        count(cpu, Counter::KernelFailed);
    }

    // SAFETY: helpers without memory arguments, then one that fills 16 bytes of our own.
    let (time_ns, cgroup_id) = unsafe { (bpf_ktime_get_ns(), bpf_get_current_cgroup_id()) };
    scratch.header = SampleHeader {
        time_ns,
        start_boottime_ns,
        cgroup_id,
        period,
        pid,
        tid: ctx.pid(),
        cpu,
        user_frames: user_frames as u16,
        kernel_frames: kernel_frames as u16,
        user_end: user_end as u8,
        kernel_end: kernel_end as u8,
        reserved: [0; 6],
        comm: [0; 16],
    };
    // SAFETY: the buffer is 16 bytes of the scratch record.
    unsafe { bpf_get_current_comm(scratch.header.comm.as_mut_ptr().cast(), 16) };

    // Wake the collector only when a quarter of the ring is full; it looks by itself every tick.
    let waiting = SAMPLES.query(BPF_RB_AVAIL_DATA as u64);
    let wakeup =
        if waiting > u64::from(RING_BYTES / 4) { BPF_RB_FORCE_WAKEUP } else { BPF_RB_NO_WAKEUP };
    let bytes = size_of::<SampleHeader>() + (user_frames + kernel_frames) * 8;
    // SAFETY: `bytes` is at most the size of the scratch record, which the verifier checks.
    let refused = unsafe {
        bpf_ringbuf_output(
            (&raw const SAMPLES).cast_mut().cast(),
            (scratch as *mut Scratch).cast(),
            bytes as u64,
            u64::from(wakeup),
        )
    };
    if refused != 0 {
        count(cpu, Counter::RingFull);
    }
    0
}

#[inline(always)]
fn registers(regs: &pt_regs) -> Registers {
    Registers { ip: regs.rip, sp: regs.rsp, fp: regs.rbp }
}

#[inline(always)]
fn walk_from(scratch: &mut Scratch, start: Registers, cs: u64) -> (usize, UserEnd) {
    if cs == USER32_CS {
        scratch.frames[0] = start.ip;
        return (1, UserEnd::Compat);
    }
    // SAFETY: the array is the head of the longer one, with the same element type.
    let frames = unsafe { &mut *(&raw mut scratch.frames).cast::<[u64; MAX_USER_FRAMES]>() };
    walk(frames, start)
}

/// Appends the kernel stack behind `user_frames` frames.
#[inline(always)]
fn kernel_stack(
    ctx: &PerfEventContext,
    scratch: &mut Scratch,
    user_frames: usize,
) -> (usize, KernelEnd) {
    const BYTES: u32 = (MAX_KERNEL_FRAMES * 8) as u32;
    // SAFETY: `user_frames` is at most MAX_USER_FRAMES and the array has MAX_KERNEL_FRAMES more.
    let written = unsafe {
        let tail = scratch.frames.as_mut_ptr().add(user_frames);
        bpf_get_stack(ctx.as_ptr(), tail.cast(), BYTES, 0)
    };
    if written < 0 {
        return (0, KernelEnd::Failed);
    }
    let frames = (written as usize / 8).min(MAX_KERNEL_FRAMES);
    (frames, if frames == MAX_KERNEL_FRAMES { KernelEnd::DepthLimit } else { KernelEnd::Complete })
}
