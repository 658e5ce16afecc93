//! Where threads wait: programs at each switch to another thread and at each wake-up.
//!
//! A thread's user stack is walked when it leaves the CPU: its memory can be read then and not
//! later. Its kernel stack stays as it is until the thread runs again. It is taken then, of waits
//! that become a record: it costs half of the rest together. Stacks have a number, a hash, and the
//! collector is told of each once. In between, what is known of a thread is kept by its id and not
//! by CPU, because threads migrate.
//!
//! Called by the kernel with the run queue locked, so no other program of this file runs on the
//! CPU, and none of a perf event's that is no NMI. `answer_waiting` is not: the collector runs it.

use aya_ebpf::bindings::task_struct;
use aya_ebpf::helpers::generated::{
    bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_current_task_btf, bpf_get_prandom_u32,
    bpf_get_smp_processor_id, bpf_ktime_get_ns,
};
use aya_ebpf::macros::{btf_tracepoint, map, raw_tracepoint};
use aya_ebpf::maps::PerCpuArray;
use aya_ebpf::programs::{BtfTracePointContext, RawTracePointContext};
use stackwire_collector_ebpf::{
    Counter, RecordKind, SampleHeader, Stratum, Unwind, UserEnd, WAIT_COPY, WAIT_LIST, WAIT_WORDS,
    WOKEN_WORDS, Wait, WaitState, Waiting, Woken, waits_behind,
};

use crate::maps::{
    ANSWERS, COPIES, SCRATCH, SWITCHER, Scratch, WAIT_STAGES, WAITING, add, config, count,
    hand_over, list,
};
use crate::sources::wakers;
use crate::targets::wanted;
use crate::task::{Task, current, current_of_host, state};
use crate::told::{tell_copied, tell_kernel, tell_user};
use crate::walk::{by_frame_pointers, by_tables, copy, lists, remembered, stacks};

/// A thread has one copy of its stack in this time. A copy costs as much as some walks, and it
/// takes room in the ring: threads may wait a hundred thousand times a second.
const APART_NS: u64 = 5_000_000;
/// Likewise, all threads of a CPU.
const APART_ON_CPU_NS: u64 = 500_000;
/// So many of a thread may come at once: one that has just begun waits some times for a moment
/// before it waits for long.
const AT_ONCE: u64 = 16;
/// Likewise, of all threads of a CPU.
const AT_ONCE_ON_CPU: u64 = 256;

/// Process id and thread id of the CPU's thread, in a pid namespace alone.
#[map]
static CAME: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// `sched_switch(preempt, previous, next, previous state)`; the state since 5.18.
#[btf_tracepoint(function = "sched_switch")]
pub fn switch(ctx: BtfTracePointContext) -> i32 {
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    if let Some(scratch) = SCRATCH.get_ptr_mut(SWITCHER) {
        // SAFETY: the pointer came from a successful lookup; the slot is of this CPU and of the
        // programs that run at a switch.
        let scratch = unsafe { &mut *scratch };
        let leaving = leaving(Task(ctx.arg::<u64>(2)));
        runs(ctx.arg(2), now_ns, scratch);
        // A thread that is preempted goes on to be runnable, whatever it was about to wait for.
        let state = if ctx.arg::<u64>(0) & 1 != 0 { 0 } else { ctx.arg::<u64>(3) };
        leaves(&ctx, leaving, state, now_ns, scratch);
    }
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
#[btf_tracepoint(function = "sched_switch")]
pub fn walk_waiting_frame_pointers(ctx: BtfTracePointContext) -> i32 {
    walk_on(&ctx, by_frame_pointers::step)
}

/// Likewise, by tables: the collector puts one of the two into `WAIT_STAGES`.
#[btf_tracepoint(function = "sched_switch")]
pub fn walk_waiting_tables(ctx: BtfTracePointContext) -> i32 {
    walk_on(&ctx, |scratch| by_tables::step(scratch, SWITCHER))
}

/// Hands over a copy of the stack, which cannot be walked yet, and notes that the thread waits.
#[btf_tracepoint(function = "sched_switch")]
pub fn copy_waiting_stack(_: BtfTracePointContext) -> i32 {
    let Some(scratch) = SCRATCH.get_ptr_mut(SWITCHER) else { return 0 };
    // SAFETY: as in `switch`, in whose name this runs.
    let scratch = unsafe { &mut *scratch };
    if !copy::hand_over_copy(scratch, SWITCHER) {
        waits(scratch);
        return 0;
    }
    let number = tell_copied(scratch, SWITCHER);
    waits_with(scratch, number);
    0
}

/// Walks an interpreter's own list of frames; then the native walk goes on.
#[btf_tracepoint(function = "sched_switch")]
pub fn walk_waiting_list(ctx: BtfTracePointContext) -> i32 {
    let Some(scratch) = SCRATCH.get_ptr_mut(SWITCHER) else { return 0 };
    // SAFETY: as in `switch`, in whose name this runs.
    let scratch = unsafe { &mut *scratch };
    if !lists::step(scratch, SWITCHER) {
        // SAFETY: the map holds programs of this type only. At the kernel's limit of tail calls the
        // list ends here.
        let _ = unsafe { WAIT_STAGES.tail_call(&ctx, WAIT_LIST) };
    }
    lists::finish(scratch, SWITCHER);
    walk_on(&ctx, |_| {})
}

#[inline(always)]
fn walk_on(ctx: &BtfTracePointContext, step: impl FnOnce(&mut Scratch)) -> i32 {
    if let Some(scratch) = stacks::walk_on(ctx, &WAIT_STAGES, SWITCHER, step) {
        if config().stack_copies != 0 && UserEnd::is_early(scratch.walk.end) && may_copy(scratch) {
            // SAFETY: the map holds programs of this type only. Where it fails, the stack says
            // where the walk ended.
            let _ = unsafe { WAIT_STAGES.tail_call(ctx, WAIT_COPY) };
        }
        waits(scratch);
    }
    0
}

/// Takes a copy off the shares of the current thread and of this CPU, if both have one left.
#[inline(always)]
fn may_copy(scratch: &Scratch) -> bool {
    let now_ns = scratch.header.time_ns;
    let (Some(waiting), Some(copied)) = (known(&scratch.header), COPIES.get_ptr_mut(SWITCHER))
    else {
        return false;
    };
    // SAFETY: the pointer came from a successful lookup; the entry is this CPU's, and of programs
    // at a switch alone.
    let of_cpu = unsafe { &mut (*copied).until_ns };
    let has_one =
        |until_ns: u64, apart_ns: u64, at_once: u64| until_ns < now_ns + apart_ns * at_once;
    if !has_one(waiting.copied_ns, APART_NS, AT_ONCE)
        || !has_one(*of_cpu, APART_ON_CPU_NS, AT_ONCE_ON_CPU)
    {
        return false;
    }
    let after = |until_ns: u64| if until_ns > now_ns { until_ns } else { now_ns };
    waiting.copied_ns = after(waiting.copied_ns) + APART_NS;
    *of_cpu = after(*of_cpu) + APART_ON_CPU_NS;
    true
}

/// What an iterator over tasks is given: `struct bpf_iter__task` of kernel/bpf/task_iter.c.
#[repr(C)]
pub struct TaskOfAll {
    meta: u64,
    task: *mut task_struct,
}

/// Tells the collector, which reads from an iterator over all tasks, of the kernel stacks of those
/// that wait now. Their waits may be longer than the capture.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task")]
pub extern "C" fn answer_waiting(ctx: *mut TaskOfAll) -> i32 {
    // SAFETY: the kernel passes this struct. The task is null once all were visited.
    let task = unsafe { (*ctx).task };
    if task.is_null() {
        return 0;
    }
    let tid = Task(task as u64).tid();
    let Some(waiting) = WAITING.get_ptr_mut(&tid) else { return 0 };
    let Some(scratch) = SCRATCH.get_ptr_mut(ANSWERS) else { return 0 };
    // SAFETY: the pointer came from a successful lookup; one program at a time has this slot.
    let scratch = unsafe { &mut *scratch };
    let since_ns = || {
        // SAFETY: the pointer came from a successful lookup; a switch on another CPU may write.
        unsafe { core::ptr::read_volatile(&raw const (*waiting).since_ns) }
    };
    let before = since_ns();
    if before == 0 {
        return 0;
    }
    // SAFETY: a helper without arguments.
    let number = kernel_stack(task, unsafe { bpf_ktime_get_ns() }, scratch);
    // It has not run meanwhile, so that is its stack.
    if since_ns() == before {
        // SAFETY: as above. Nobody else writes these.
        unsafe {
            (*waiting).kernel_stack = number;
            (*waiting).kernel_stack_of = before;
        }
    }
    0
}

/// A thread is given a CPU: what it waited for is over.
#[inline(always)]
fn runs(next: *mut task_struct, now_ns: u64, scratch: &mut Scratch) {
    let task = Task(next as u64);
    let tid = task.tid();
    let Some(waiting) = WAITING.get_ptr_mut(&tid) else { return };
    // SAFETY: the pointer came from a successful lookup; the thread is on no other CPU.
    let waiting = unsafe { &mut *waiting };
    if waiting.since_ns != 0 {
        over(waiting, task, now_ns, scratch, |scratch| kernel_stack(next, now_ns, scratch));
        waiting.since_ns = 0;
    }
}

/// A wait is over: makes it a record, or lets another stand for it. Frames in the scratch record
/// are overwritten.
#[inline(always)]
fn over(
    waiting: &mut Waiting,
    task: Task,
    now_ns: u64,
    scratch: &mut Scratch,
    kernel_stack: impl FnOnce(&mut Scratch) -> u64,
) {
    let (tid, since_ns) = (task.tid(), waiting.since_ns);
    let whole = now_ns.saturating_sub(since_ns);
    let woken_ns = if waiting.woken_ns == 0 { now_ns } else { waiting.woken_ns };
    let mut blocked_ns = woken_ns.saturating_sub(since_ns);
    let mut runnable_ns = now_ns.saturating_sub(woken_ns);
    let mut stands_for = 1;
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
        // SAFETY: a helper without arguments.
        stands_for = waits_behind(whole as u32, weight, unsafe { bpf_get_prandom_u32() });
    } else {
        // What it copies of short waits, most of which are not recorded, costs long ones nothing.
        waiting.copied_ns = 0;
    }
    let kernel_stack = kernel_stack(scratch);
    // SAFETY: a helper without arguments.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    let parts = stands_for * (u64::from(blocked_ns != 0) + u64::from(runnable_ns != 0));
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
        host_pid: task.host_pid(),
        user_frames: WAIT_WORDS as u16,
        kernel_frames: 0,
        user_end: 0,
        kernel_end: 0,
        event: config().wait_event as u8,
        kind: RecordKind::Wait as u8,
        state: waiting.state as u8,
        list_end: 0,
        reserved: [0; 6],
        comm: waiting.comm,
    };
    let user_stack = waiting.user_stack;
    // Too large for the BPF stack, of which the walk needs most.
    // SAFETY: the frames are an array of words, longer than the record, which has nothing but such.
    let woken = unsafe { &mut *scratch.frames.as_mut_ptr().cast::<Woken>() };
    woken.wait =
        Wait { header, user_stack, kernel_stack, blocked_ns, runnable_ns, count: stands_for };
    let mut bytes = size_of::<Wait>();
    if let Some(waker) = wakers::of(tid, since_ns) {
        woken.wait.header.user_frames = WOKEN_WORDS as u16;
        woken.waker = waker;
        bytes = size_of::<Woken>();
    }
    // SAFETY: the record has at least that size.
    if !unsafe { hand_over((woken as *mut Woken).cast(), bytes) } {
        add(cpu, Counter::WaitsLost, parts);
        add(cpu, Counter::WaitsLostNs, blocked_ns + runnable_ns);
    }
}

/// Process id and thread id of the current thread, which leaves the CPU to `next`. In a pid
/// namespace one that ends has no number any more: it has that with which it came.
#[inline(always)]
fn leaving(next: Task) -> (u32, u32) {
    let now = current();
    if config().pid_namespace == 0 {
        return now;
    }
    let Some(last) = CAME.get_ptr_mut(0) else { return now };
    // SAFETY: the pointer came from a successful lookup; the entry is this CPU's and this program's
    // alone.
    let last = unsafe { &mut *last };
    let came = core::mem::replace(last, u64::from(next.pid()) << 32 | u64::from(next.tid()));
    match now {
        (0, _) | (_, 0) => ((came >> 32) as u32, came as u32),
        known => known,
    }
}

/// The current thread leaves the CPU.
#[inline(always)]
fn leaves(
    ctx: &BtfTracePointContext,
    (pid, tid): (u32, u32),
    state: u64,
    now_ns: u64,
    scratch: &mut Scratch,
) {
    if tid == 0 {
        return; // idle, or outside the pid namespace
    }
    if state & state::DEAD != 0 {
        still_waiting(tid, now_ns, scratch);
        let _ = WAITING.remove(&tid);
        wakers::forget(tid);
        return;
    }
    let state = match state {
        0 => WaitState::Preempted,
        state if state & (state::STOPPED | state::TRACED) != 0 => WaitState::Stopped,
        state if state & state::NO_LOAD != 0 => WaitState::Sleep,
        state if state & state::UNINTERRUPTIBLE != 0 => WaitState::Disk,
        _ => WaitState::Sleep,
    };
    if config().wait_states & (1 << state as u32) == 0 {
        still_waiting(tid, now_ns, scratch);
        return;
    }
    // SAFETY: helpers without memory arguments.
    let (task, cpu) = unsafe { (bpf_get_current_task_btf(), bpf_get_smp_processor_id()) };
    let start_boottime_ns = Task(task as u64).process_start();
    if !wanted(pid, start_boottime_ns) {
        return;
    }
    scratch.header.time_ns = now_ns;
    scratch.header.start_boottime_ns = start_boottime_ns;
    // SAFETY: a helper without arguments.
    scratch.header.cgroup_id = unsafe { bpf_get_current_cgroup_id() };
    scratch.header.pid = pid;
    scratch.header.tid = tid;
    scratch.header.cpu = cpu;
    scratch.header.host_pid = current_of_host().0;
    scratch.header.event = config().wait_event as u8;
    scratch.header.state = state as u8;
    // SAFETY: the buffer is 16 bytes of the scratch record.
    unsafe { bpf_get_current_comm(scratch.header.comm.as_mut_ptr().cast(), 16) };
    stacks::begin(scratch, task, pid);
    if config().managed != 0 {
        scratch.list.stage = list::NOT_MET;
    }
    if config().unwind != Unwind::FramePointers as u32
        && let Some(number) = remembered::find(scratch, pid)
    {
        waits_with(scratch, number);
        return;
    }
    // SAFETY: the map holds programs of this type only.
    let _ = unsafe { WAIT_STAGES.tail_call(ctx, 0) };
}

/// Notes that the current thread waits, and with which user stack.
#[inline(always)]
fn waits(scratch: &mut Scratch) {
    let number = tell_user(scratch, SWITCHER);
    if config().unwind != Unwind::FramePointers as u32 {
        remembered::remember(scratch, number);
    }
    waits_with(scratch, number);
}

/// Notes that the current thread waits, with the user stack of this number.
#[inline(always)]
fn waits_with(scratch: &mut Scratch, number: u64) {
    let Some(known) = known(&scratch.header) else {
        count(scratch.header.cpu, Counter::ThreadsFull);
        return;
    };
    unseen(known, scratch.header.time_ns, scratch);
    let header = &scratch.header;
    let is_runnable = header.state == WaitState::Preempted as u8;
    known.woken_ns = if is_runnable { header.time_ns } else { 0 };
    known.user_stack = number;
    known.start_boottime_ns = header.start_boottime_ns;
    known.cgroup_id = header.cgroup_id;
    known.pid = header.pid;
    known.state = u32::from(header.state);
    known.comm = header.comm;
    known.since_ns = header.time_ns;
}

/// What is known of the current thread: nothing so far, if it was not there. None: it has no room.
#[inline(always)]
fn known(header: &SampleHeader) -> Option<&'static mut Waiting> {
    let mut known = WAITING.get_ptr_mut(&header.tid);
    if known.is_none() {
        // SAFETY: a helper without arguments.
        let random = unsafe { bpf_get_prandom_u32() };
        let stratum = Stratum::new(config().wait_threshold_ns, random);
        WAITING.insert(&header.tid, &Waiting { stratum, ..Waiting::default() }, 0).ok()?;
        known = WAITING.get_ptr_mut(&header.tid);
    }
    // SAFETY: the pointer came from a successful lookup; the thread is on this CPU, and an entry is
    // removed on the CPU of its thread.
    known.map(|known| unsafe { &mut *known })
}

/// The current thread leaves the CPU, and what it does then is not recorded: ends a wait of it that
/// nobody saw end.
#[inline(always)]
fn still_waiting(tid: u32, now_ns: u64, scratch: &mut Scratch) {
    if let Some(known) = WAITING.get_ptr_mut(&tid) {
        // SAFETY: the pointer came from a successful lookup; the thread is on this CPU.
        let known = unsafe { &mut *known };
        unseen(known, now_ns, scratch);
        known.since_ns = 0;
    }
}

/// If the current thread waited before, nobody saw it run in between. The wait took until it was
/// given its CPU; its kernel stack of then is gone.
#[inline(always)]
fn unseen(known: &mut Waiting, now_ns: u64, scratch: &mut Scratch) {
    if known.since_ns == 0 {
        return;
    }
    // SAFETY: helpers without memory arguments.
    let (task, cpu) = unsafe { (bpf_get_current_task_btf(), bpf_get_smp_processor_id()) };
    let task = Task(task as u64);
    let waited_ns = now_ns.saturating_sub(known.since_ns);
    match task.ran_ns() {
        Some(ran_ns) if ran_ns < waited_ns => {
            over(known, task, now_ns - ran_ns, scratch, |_| 0);
        }
        // The collector found it running or waiting for a CPU, which /proc does not tell apart.
        _ if known.user_stack == 0 && known.state == WaitState::Preempted as u32 => {}
        _ => {
            count(cpu, Counter::WaitsTaken);
            count(cpu, Counter::WaitsUnseen);
            add(cpu, Counter::WaitsUnseenNs, waited_ns);
        }
    }
}

/// Number of the kernel stack of a thread that does not run.
#[inline(always)]
fn kernel_stack(task: *mut task_struct, now_ns: u64, scratch: &mut Scratch) -> u64 {
    let taken = stacks::of_waiting(task, scratch);
    tell_kernel(scratch, taken, now_ns)
}
