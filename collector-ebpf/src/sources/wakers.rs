//! Who ends a wait, and from where: a program at each wake-up, in the thread that wakes another.
//!
//! `sched_waking` and not `sched_wakeup`: the latter may run on the other thread's CPU, where
//! nobody knows any more who it was. Only loaded where wakers were asked for. Of waits that are not
//! likely to be recorded it notes nothing: it takes the kernel stack to tell an interrupt from the
//! thread it interrupted. The user stack is taken of processes the capture is about.
//!
//! Called by the kernel with the woken thread's `pi_lock` held and interrupts off. Nobody wakes it
//! a second time meanwhile, and it does not run before this is over.

use aya_ebpf::EbpfContext;
use aya_ebpf::helpers::generated::{
    bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_current_task_btf,
    bpf_get_smp_processor_id, bpf_ktime_get_ns,
};
use aya_ebpf::macros::raw_tracepoint;
use aya_ebpf::programs::RawTracePointContext;
use stackwire_collector_ebpf::Waker;

use crate::maps::{Ends, SCRATCH, Scratch, WAITING, WAKER, WAKER_STAGES, WAKERS, config};
use crate::targets::wanted;
use crate::task::{Task, current, current_of_host};
use crate::told::{tell_kernel, tell_user};
use crate::walk::{by_frame_pointers, by_tables, stacks};

/// `sched_waking(task)`.
#[raw_tracepoint(tracepoint = "sched_waking")]
pub fn waking(ctx: RawTracePointContext) -> i32 {
    let tid = Task(ctx.arg::<u64>(0)).tid();
    let Some(waiting) = WAITING.get_ptr_mut(&tid) else { return 0 };
    // SAFETY: the pointer came from a successful lookup. The thread does not run.
    let (since_ns, woken_ns, stratum) =
        unsafe { ((*waiting).since_ns, (*waiting).woken_ns, (*waiting).stratum) };
    if since_ns == 0 || woken_ns != 0 {
        return 0;
    }
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    let threshold_ns = config().wait_threshold_ns;
    let blocked_ns = now_ns.saturating_sub(since_ns);
    if blocked_ns < u64::from(threshold_ns) && !stratum.may_take(blocked_ns, threshold_ns) {
        return 0;
    }
    let Some(scratch) = SCRATCH.get_ptr_mut(WAKER) else { return 0 };
    // SAFETY: the pointer came from a successful lookup; the slot is of this CPU and of the
    // programs that run at a wake-up.
    let scratch = unsafe { &mut *scratch };
    scratch.woken = Ends { since_ns, tid };
    // SAFETY: a helper without arguments.
    let task = unsafe { bpf_get_current_task_btf() };
    let (pid, tid_of_waker) = current();
    let mut waker = Waker { of: since_ns, pid, tid: tid_of_waker, ..Waker::default() };
    // SAFETY: the buffer is 16 bytes of the local.
    unsafe { bpf_get_current_comm(waker.comm.as_mut_ptr().cast(), 16) };
    let start_boottime_ns = Task(task as u64).process_start();
    let is_wanted = wanted(waker.pid, start_boottime_ns);
    if is_wanted {
        waker.start_boottime_ns = start_boottime_ns;
    }
    let taken = stacks::of_kernel(ctx.as_ptr(), scratch, 0);
    waker.kernel_stack = tell_kernel(scratch, taken, now_ns);
    // Without room for it, nobody knows who it was.
    if WAKERS.insert(&tid, &waker, 0).is_err() || !is_wanted {
        return 0;
    }
    scratch.header.time_ns = now_ns;
    scratch.header.start_boottime_ns = start_boottime_ns;
    // SAFETY: helpers without memory arguments.
    (scratch.header.cgroup_id, scratch.header.cpu) =
        unsafe { (bpf_get_current_cgroup_id(), bpf_get_smp_processor_id()) };
    scratch.header.pid = waker.pid;
    scratch.header.host_pid = current_of_host().0;
    scratch.header.tid = waker.tid;
    scratch.header.comm = waker.comm;
    stacks::begin(scratch, task, waker.pid);
    // SAFETY: the map holds programs of this type only.
    let _ = unsafe { WAKER_STAGES.tail_call(&ctx, 0) };
    0
}

/// Walks on where the program before left off; when the walk is over, notes the stack.
#[raw_tracepoint(tracepoint = "sched_waking")]
pub fn walk_waker_frame_pointers(ctx: RawTracePointContext) -> i32 {
    walk_on(&ctx, by_frame_pointers::step)
}

/// Likewise, by tables: the collector puts one of the two into `WAKER_STAGES`.
#[raw_tracepoint(tracepoint = "sched_waking")]
pub fn walk_waker_tables(ctx: RawTracePointContext) -> i32 {
    walk_on(&ctx, |scratch| by_tables::step(scratch, WAKER))
}

/// Who ended this thread's wait, which began then.
#[inline(always)]
pub fn of(tid: u32, since_ns: u64) -> Option<Waker> {
    if config().wakers == 0 {
        return None;
    }
    // SAFETY: plain data. The thread begins to run: nobody wakes it.
    let waker = *unsafe { WAKERS.get(&tid) }?;
    (waker.of == since_ns).then_some(waker)
}

/// The thread ends.
#[inline(always)]
pub fn forget(tid: u32) {
    if config().wakers != 0 {
        // It may never have been woken.
        let _ = WAKERS.remove(&tid);
    }
}

#[inline(always)]
fn walk_on(ctx: &RawTracePointContext, step: impl FnOnce(&mut Scratch)) -> i32 {
    let Some(scratch) = stacks::walk_on(ctx, &WAKER_STAGES, WAKER, step) else { return 0 };
    let number = tell_user(scratch, WAKER);
    let Ends { since_ns, tid } = scratch.woken;
    if let Some(waker) = WAKERS.get_ptr_mut(&tid) {
        // SAFETY: the pointer came from a successful lookup; the thread is being woken here.
        let waker = unsafe { &mut *waker };
        if waker.of == since_ns {
            waker.user_stack = number;
        }
    }
    0
}
