//! Where threads wait: programs at each switch to another thread and at each wake-up.
//!
//! A thread's stacks are walked when it leaves the CPU. They have a number, a hash, and the
//! collector is told of each once. When the thread runs again, a record says how long it waited and
//! with which stacks. In between, what is known of a thread is kept by its id and not by CPU,
//! because threads migrate.
//!
//! Called by the kernel with the run queue locked, so no other program of this file runs on the
//! CPU, and none of a perf event's that is no NMI.

use aya_ebpf::EbpfContext;
use aya_ebpf::helpers::generated::{
    bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_current_task_btf, bpf_get_prandom_u32,
    bpf_get_smp_processor_id, bpf_ktime_get_ns,
};
use aya_ebpf::macros::raw_tracepoint;
use aya_ebpf::programs::RawTracePointContext;
use stackwire_collector_ebpf::{
    Counter, KernelEnd, MAX_KERNEL_FRAMES, MAX_USER_FRAMES, RecordKind, SampleHeader, Stratum,
    TOLD_STACKS, UserEnd, WAIT_WORDS, Wait, WaitState, Waiting, masked,
};

use crate::maps::{
    SCRATCH, SWITCHER, Scratch, TOLD, WAIT_STAGES, WAITING, WALKING, add, config, count, hand_over,
    wake_collector,
};
use crate::targets::wanted;
use crate::task::Task;
use crate::walk::{by_frame_pointers, by_tables, stacks};

/// Bits of `task_struct.__state`, include/linux/sched.h, the same since 4.14.
mod task_state {
    pub const UNINTERRUPTIBLE: u64 = 0x2;
    pub const STOPPED: u64 = 0x4;
    pub const TRACED: u64 = 0x8;
    pub const DEAD: u64 = 0x80;
    /// With `UNINTERRUPTIBLE`: a kernel thread that has nothing to do.
    pub const NO_LOAD: u64 = 0x400;
}

/// `sched_switch(preempt, previous, next, previous state)`; the state since 5.18.
#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn switch(ctx: RawTracePointContext) -> i32 {
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    runs(Task(ctx.arg::<u64>(2)), now_ns);
    leaves(&ctx, ctx.arg::<u64>(3), now_ns);
    0
}

/// `sched_wakeup(task)`.
#[raw_tracepoint(tracepoint = "sched_wakeup")]
pub fn wakeup(ctx: RawTracePointContext) -> i32 {
    let tid = Task(ctx.arg::<u64>(0)).tid();
    if let Some(waiting) = WAITING.get_ptr_mut(&tid) {
        // SAFETY: the pointer came from a successful lookup; nobody else writes of a thread that
        // is being woken.
        let waiting = unsafe { &mut *waiting };
        if waiting.since_ns != 0 && waiting.woken_ns == 0 {
            // SAFETY: a helper without arguments.
            waiting.woken_ns = unsafe { bpf_ktime_get_ns() };
        }
    }
    0
}

/// Walks on where the program before left off; when the walk is over, notes that the thread waits.
#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn walk_waiting_frame_pointers(ctx: RawTracePointContext) -> i32 {
    walk_on(&ctx, by_frame_pointers::step)
}

/// Likewise, by tables: the collector puts one of the two into `WAIT_STAGES`.
#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn walk_waiting_tables(ctx: RawTracePointContext) -> i32 {
    walk_on(&ctx, |scratch| by_tables::step(scratch, SWITCHER))
}

/// A thread is given a CPU: what it waited for is over.
#[inline(always)]
fn runs(task: Task, now_ns: u64) {
    let tid = task.tid();
    let Some(waiting) = WAITING.get_ptr_mut(&tid) else { return };
    // SAFETY: the pointer came from a successful lookup; the thread is on no other CPU.
    let waiting = unsafe { &mut *waiting };
    let since_ns = waiting.since_ns;
    if since_ns == 0 {
        return;
    }
    waiting.since_ns = 0;
    let whole = now_ns.saturating_sub(since_ns);
    let woken_ns = if waiting.woken_ns == 0 { now_ns } else { waiting.woken_ns };
    let mut blocked_ns = woken_ns.saturating_sub(since_ns);
    let mut runnable_ns = now_ns.saturating_sub(woken_ns);
    let threshold = u64::from(config().wait_threshold_ns);
    if whole < threshold {
        // SAFETY: a helper without arguments.
        let random = unsafe { bpf_get_prandom_u32() };
        let taken = waiting.stratum.take(whole as u32, threshold as u32, random);
        if taken == 0 || whole == 0 {
            return;
        }
        // Each factor is less than 2^31.
        let weight = u64::from(taken) * threshold;
        blocked_ns = blocked_ns * weight / whole;
        runnable_ns = runnable_ns * weight / whole;
    }
    // SAFETY: a helper without arguments.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    let parts = u64::from(blocked_ns != 0) + u64::from(runnable_ns != 0);
    add(cpu, Counter::WaitsTaken, parts);
    // The collector, which noted threads that waited already, does not know it.
    let start_boottime_ns = match waiting.start_boottime_ns {
        0 => task.process_start(),
        known => known,
    };
    let header = SampleHeader {
        time_ns: now_ns,
        start_boottime_ns,
        cgroup_id: waiting.cgroup_id,
        period: whole,
        pid: waiting.pid,
        tid,
        cpu,
        user_frames: WAIT_WORDS as u16,
        kernel_frames: 0,
        user_end: 0,
        kernel_end: KernelEnd::None as u8,
        event: config().wait_event as u8,
        kind: RecordKind::Wait as u8,
        state: waiting.state as u8,
        reserved: [0; 3],
        comm: waiting.comm,
    };
    let mut wait = Wait { header, stack: waiting.stack, blocked_ns, runnable_ns };
    // SAFETY: the record is a local of that size.
    if !unsafe { hand_over((&raw mut wait).cast(), size_of::<Wait>()) } {
        add(cpu, Counter::WaitsLost, parts);
        add(cpu, Counter::WaitsLostNs, blocked_ns + runnable_ns);
    }
}

/// The current thread leaves the CPU.
#[inline(always)]
fn leaves(ctx: &RawTracePointContext, state: u64, now_ns: u64) {
    let (pid, tid) = (ctx.tgid(), ctx.pid());
    if tid == 0 {
        return; // idle
    }
    if state & task_state::DEAD != 0 {
        let _ = WAITING.remove(&tid);
        return;
    }
    let state = match state {
        0 => WaitState::Preempted,
        state if state & (task_state::STOPPED | task_state::TRACED) != 0 => WaitState::Stopped,
        state if state & task_state::NO_LOAD != 0 => WaitState::Sleep,
        state if state & task_state::UNINTERRUPTIBLE != 0 => WaitState::Disk,
        _ => WaitState::Sleep,
    };
    if config().wait_states & (1 << state as u32) == 0 {
        return;
    }
    // SAFETY: helpers without memory arguments.
    let (task, cpu) = unsafe { (bpf_get_current_task_btf(), bpf_get_smp_processor_id()) };
    let start_boottime_ns = Task(task as u64).process_start();
    if !wanted(pid, start_boottime_ns) {
        return;
    }
    let Some(scratch) = SCRATCH.get_ptr_mut(SWITCHER) else { return };
    // SAFETY: the pointer came from a successful lookup; the slot is of this CPU and of this file's
    // programs.
    let scratch = unsafe { &mut *scratch };
    scratch.header.time_ns = now_ns;
    scratch.header.start_boottime_ns = start_boottime_ns;
    // SAFETY: a helper without arguments.
    scratch.header.cgroup_id = unsafe { bpf_get_current_cgroup_id() };
    scratch.header.pid = pid;
    scratch.header.tid = tid;
    scratch.header.cpu = cpu;
    scratch.header.event = config().wait_event as u8;
    scratch.header.kind = RecordKind::Stack as u8;
    scratch.header.state = state as u8;
    // SAFETY: the buffer is 16 bytes of the scratch record.
    unsafe { bpf_get_current_comm(scratch.header.comm.as_mut_ptr().cast(), 16) };
    stacks::begin(scratch, task, pid);
    // SAFETY: the map holds programs of this type only.
    let _ = unsafe { WAIT_STAGES.tail_call(ctx, 0) };
}

#[inline(always)]
fn walk_on(ctx: &RawTracePointContext, step: impl FnOnce(&mut Scratch)) -> i32 {
    let Some(scratch) = SCRATCH.get_ptr_mut(SWITCHER) else { return 0 };
    // SAFETY: as in `leaves`, in whose name this runs.
    let scratch = unsafe { &mut *scratch };
    step(scratch);
    if scratch.walk.end == WALKING {
        // SAFETY: as in `leaves`. Fails at the kernel's limit of tail calls, beyond
        // MAX_USER_FRAMES.
        let _ = unsafe { WAIT_STAGES.tail_call(ctx, 0) };
        scratch.walk.end = UserEnd::DepthLimit as u64;
    }
    waits(ctx, scratch);
    0
}

/// Notes that the current thread waits, and with which stacks.
#[inline(always)]
fn waits(ctx: &RawTracePointContext, scratch: &mut Scratch) {
    // The bound, for the verifier, which does not know what the walk promised.
    let depth = scratch.walk.depth as usize;
    let user_frames = if depth > MAX_USER_FRAMES { MAX_USER_FRAMES } else { depth };
    let (kernel_frames, kernel_end) = stacks::of_kernel(ctx.as_ptr(), scratch, user_frames);
    let user_end = scratch.walk.end;
    if user_end == UserEnd::NoMappingsYet as u64 {
        wake_collector();
    }
    scratch.header.user_frames = user_frames as u16;
    scratch.header.kernel_frames = kernel_frames as u16;
    scratch.header.user_end = user_end as u8;
    scratch.header.kernel_end = kernel_end as u8;
    let ends = u64::from(kernel_end as u8) << 8 | user_end;
    let lengths = (user_frames as u64) << 16 | kernel_frames as u64;
    let mut number = mixed(u64::from(scratch.header.pid) << 32 | ends << 16, lengths);
    let frames = user_frames + kernel_frames;
    for index in 0..MAX_USER_FRAMES + MAX_KERNEL_FRAMES {
        if index >= frames {
            break;
        }
        // SAFETY: the index is less than the length of the array.
        number = mixed(number, unsafe { *scratch.frames.as_ptr().add(index) });
    }
    // 0 stands for none.
    number |= 1;
    scratch.header.period = number;
    tell(scratch, number, frames);

    let header = &scratch.header;
    let woken_ns = if header.state == WaitState::Preempted as u8 { header.time_ns } else { 0 };
    if let Some(known) = WAITING.get_ptr_mut(&header.tid) {
        // SAFETY: the pointer came from a successful lookup; the thread is on this CPU.
        let known = unsafe { &mut *known };
        known.woken_ns = woken_ns;
        known.stack = number;
        known.start_boottime_ns = header.start_boottime_ns;
        known.cgroup_id = header.cgroup_id;
        known.pid = header.pid;
        known.state = u32::from(header.state);
        known.comm = header.comm;
        known.since_ns = header.time_ns;
        return;
    }
    // SAFETY: a helper without arguments.
    let random = unsafe { bpf_get_prandom_u32() };
    let waiting = Waiting {
        since_ns: header.time_ns,
        woken_ns,
        stack: number,
        start_boottime_ns: header.start_boottime_ns,
        cgroup_id: header.cgroup_id,
        pid: header.pid,
        state: u32::from(header.state),
        stratum: Stratum::new(config().wait_threshold_ns, random),
        comm: header.comm,
    };
    if WAITING.insert(&header.tid, &waiting, 0).is_err() {
        count(header.cpu, Counter::ThreadsFull);
    }
}

/// Tells the collector of stacks it does not know.
#[inline(always)]
fn tell(scratch: &mut Scratch, number: u64, frames: usize) {
    let Some(told) = TOLD.get_ptr_mut(masked::<{ TOLD_STACKS as u64 - 1 }>(number >> 8) as u32)
    else {
        return;
    };
    // SAFETY: the pointer came from a successful lookup. Of two CPUs that write here one is lost,
    // and its stacks are told again.
    if unsafe { core::ptr::read_volatile(told) } == number {
        return;
    }
    let bytes = size_of::<SampleHeader>() + frames * 8;
    // SAFETY: `bytes` is at most the size of the scratch record, which the verifier checks.
    if unsafe { hand_over((scratch as *mut Scratch).cast(), bytes) } {
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(told, number) };
    }
}

/// A step of the hash: a multiplication by an odd number and a rotation, as FxHash has.
#[inline(always)]
fn mixed(hash: u64, word: u64) -> u64 {
    (hash.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
