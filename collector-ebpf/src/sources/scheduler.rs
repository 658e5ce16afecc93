//! How threads are scheduled: at each switch to another thread, adds to what is known of the
//! process of the thread that leaves the CPU. Each program a process becomes is a process of its
//! own here.
//!
//! Nothing is handed over in the ring: the collector reads the sums. How long a thread waited for
//! its CPU is added when it leaves it again, because only then it is the current one, of which the
//! kernel says whether it is wanted.

use aya_ebpf::bindings::bpf_perf_event_value;
use aya_ebpf::helpers::generated::{
    bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_current_task_btf,
    bpf_get_smp_processor_id, bpf_ktime_get_ns, bpf_perf_event_read_value,
};
use aya_ebpf::macros::{map, raw_tracepoint};
use aya_ebpf::maps::{Array, HashMap, PerCpuArray, PerfEventArray};
use aya_ebpf::programs::RawTracePointContext;
use stackwire_collector_ebpf::sched_stats::{
    AddUp, BUCKETS, CounterSum, MAX_COUNTERS, MAX_SCHED_STATS, OnCpu, SchedStats, SwitchReason,
    THE_REST, Times, bucket_of, key_of,
};
use stackwire_collector_ebpf::{Counter, MAX_CPUS, MAX_WAITING, Scope, masked};

use crate::atomic::{add_u32, add_u64};
use crate::maps::{config, count};
use crate::targets::wanted;
use crate::task::{Task, current, current_of_host, state};

/// By [`key_of`] a process or thread, and the rest. The collector makes it smaller where nothing is
/// added up.
#[map]
static SCHED_STATS: HashMap<u64, SchedStats> = HashMap::with_max_entries(MAX_SCHED_STATS + 1, 0);

/// Zeros, to begin with: too large for the BPF stack. Never written.
#[map]
static NOTHING_YET: Array<SchedStats> = Array::with_max_entries(1, 0);

/// By thread id.
#[map]
static RUNNABLE: HashMap<u32, Runnable> = HashMap::with_max_entries(MAX_WAITING, 0);

/// Since when the CPU's thread runs, and what its counters were then. The collector writes the time
/// at which it begins, and reads in the end what was not switched out.
#[map]
static ON_CPU: PerCpuArray<OnCpu> = PerCpuArray::with_max_entries(1, 0);

/// Counters: that of number N on CPU C is at `N * MAX_CPUS + C`.
#[map]
static HARDWARE: PerfEventArray<u32> = PerfEventArray::new(0);

/// A thread that can run.
#[repr(C)]
#[derive(Clone, Copy)]
struct Runnable {
    /// Since when it has waited for a CPU; 0: it does not.
    since_ns: u64,
    /// How long it waited for the CPU it has; [`UNKNOWN`] when nobody saw it begin.
    waited_ns: u64,
}

const UNKNOWN: u64 = u64::MAX;

/// `sched_switch(preempt, previous, next, previous state)`.
#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn add_up(ctx: RawTracePointContext) -> i32 {
    // SAFETY: helpers without arguments.
    let (now_ns, cpu) = unsafe { (bpf_ktime_get_ns(), bpf_get_smp_processor_id()) };
    let Some(on_cpu) = ON_CPU.get_ptr_mut(0) else { return 0 };
    // SAFETY: the pointer came from a successful lookup; this program alone has it, with the run
    // queue locked.
    let on_cpu = unsafe { &mut *on_cpu };
    let state = if ctx.arg::<u64>(0) & 1 != 0 { 0 } else { ctx.arg::<u64>(3) };
    leaves(state, now_ns, on_cpu, cpu);
    on_cpu.since_ns = now_ns;
    let next = Task(ctx.arg::<u64>(2));
    (on_cpu.pid, on_cpu.tid) = (next.pid(), next.tid());
    runs(on_cpu.tid, now_ns);
    0
}

/// `sched_wakeup(task)`.
#[raw_tracepoint(tracepoint = "sched_wakeup")]
pub fn add_up_wakeup(ctx: RawTracePointContext) -> i32 {
    can_run(Task(ctx.arg::<u64>(0)).tid());
    0
}

/// `sched_wakeup_new(task)`.
#[raw_tracepoint(tracepoint = "sched_wakeup_new")]
pub fn add_up_new(ctx: RawTracePointContext) -> i32 {
    can_run(Task(ctx.arg::<u64>(0)).tid());
    0
}

/// `sched_migrate_task(task, destination)`.
#[raw_tracepoint(tracepoint = "sched_migrate_task")]
pub fn add_up_migration(ctx: RawTracePointContext) -> i32 {
    let task = Task(ctx.arg::<u64>(0));
    let key = if config().add_up == AddUp::Threads as u32 {
        key_of(task.tid(), task.start(), task.exec_id())
    } else {
        key_of(task.pid(), task.process_start(), task.exec_id())
    };
    let stats = match SCHED_STATS.get_ptr_mut(&key) {
        Some(stats) => stats,
        // One that has not run yet is not known, but where there are more than are told apart.
        None => match SCHED_STATS.get_ptr_mut(&THE_REST) {
            // SAFETY: the pointer came from a successful lookup.
            Some(rest) if unsafe { (*rest).slices.sum_ns } != 0 && is_wanted(task) => rest,
            _ => return 0,
        },
    };
    // SAFETY: as above.
    unsafe { add_u64(&raw mut (*stats).migrations, 1) };
    0
}

/// `sched_process_exec(task, previous id of its thread, program)`: what the thread has run until
/// now is of the program before, which ends a slice here.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn add_up_exec(_ctx: RawTracePointContext) -> i32 {
    // SAFETY: helpers without arguments.
    let (now_ns, cpu) = unsafe { (bpf_ktime_get_ns(), bpf_get_smp_processor_id()) };
    let Some(on_cpu) = ON_CPU.get_ptr_mut(0) else { return 0 };
    // SAFETY: the pointer came from a successful lookup. No switch comes in between: tracepoints
    // run with preemption off.
    let on_cpu = unsafe { &mut *on_cpu };
    let (pid, tid) = current();
    // Who is no leader has the leader's thread id by now.
    let ran_ns = ran_ns(on_cpu, on_cpu.pid == pid, now_ns);
    let stats = stats_of((pid, tid), Program::Before { since_ns: now_ns.saturating_sub(ran_ns) });
    read_counters(on_cpu, stats, cpu);
    (on_cpu.since_ns, on_cpu.pid, on_cpu.tid) = (now_ns, pid, tid);
    if let Some(stats) = stats {
        // SAFETY: the pointer came from a successful lookup.
        unsafe { add_time(&raw mut (*stats).slices, ran_ns) };
    }
    0
}

/// Whether a task that is not the current one is wanted; of a cgroup that is not known.
#[inline(always)]
fn is_wanted(task: Task) -> bool {
    config().scope != Scope::Cgroup as u32 && wanted(task.pid(), task.process_start())
}

#[inline(always)]
fn can_run(tid: u32) {
    if tid == 0 {
        return; // outside the pid namespace
    }
    // SAFETY: a helper without arguments.
    let since_ns = unsafe { bpf_ktime_get_ns() };
    match RUNNABLE.get_ptr_mut(&tid) {
        // One that is woken while it prepares to sleep still runs: `leaves` writes over this.
        // SAFETY: the pointer came from a successful lookup; the run queue is locked.
        Some(known) => unsafe {
            if (*known).since_ns == 0 {
                (*known).since_ns = since_ns;
            }
        },
        None => note(tid, since_ns),
    }
}

/// Notes since when a thread that was not known can run.
#[inline(always)]
fn note(tid: u32, since_ns: u64) {
    if RUNNABLE.insert(&tid, &Runnable { since_ns, waited_ns: UNKNOWN }, 0).is_err() {
        // SAFETY: a helper without arguments.
        count(unsafe { bpf_get_smp_processor_id() }, Counter::ThreadsFull);
    }
}

/// The next thread is given the CPU.
#[inline(always)]
fn runs(tid: u32, now_ns: u64) {
    if let Some(known) = RUNNABLE.get_ptr_mut(&tid) {
        // SAFETY: the pointer came from a successful lookup; the thread is on no other CPU.
        let known = unsafe { &mut *known };
        known.waited_ns = match known.since_ns {
            0 => UNKNOWN,
            since_ns => now_ns.saturating_sub(since_ns),
        };
        known.since_ns = 0;
    }
}

/// The current thread leaves the CPU.
#[inline(always)]
fn leaves(state: u64, now_ns: u64, on_cpu: &mut OnCpu, cpu: u32) {
    let (pid, tid) = match current() {
        // Its number was taken from it: it ends.
        (0, _) | (_, 0) if state & state::DEAD != 0 => (on_cpu.pid, on_cpu.tid),
        known => known,
    };
    // The counters run while the CPU is idle, too: what they counted is nobody's then.
    let program = Program::Now { since_ns: now_ns };
    let stats = if tid == 0 { None } else { stats_of((pid, tid), program) };
    read_counters(on_cpu, stats, cpu);
    let came = on_cpu.tid == tid;
    let ran_ns = ran_ns(on_cpu, came, now_ns);
    let mut waited_ns = UNKNOWN;
    let reason = reason(state);
    if let Some(known) = RUNNABLE.get_ptr_mut(&tid) {
        // SAFETY: the pointer came from a successful lookup; the thread is on this CPU.
        let known = unsafe { &mut *known };
        if known.since_ns != 0 && !came && ran_ns != UNKNOWN {
            known.waited_ns = now_ns.saturating_sub(ran_ns).saturating_sub(known.since_ns);
        }
        waited_ns = core::mem::replace(&mut known.waited_ns, UNKNOWN);
        known.since_ns = if reason as u8 == SwitchReason::Preempted as u8 { now_ns } else { 0 };
        if reason as u8 == SwitchReason::Exited as u8 {
            let _ = RUNNABLE.remove(&tid);
        }
    } else if tid != 0 && reason as u8 == SwitchReason::Preempted as u8 {
        note(tid, now_ns);
    }
    let Some(stats) = stats else { return };
    // SAFETY: the pointer came from a successful lookup.
    unsafe {
        add_time(&raw mut (*stats).slices, ran_ns);
        add_time(&raw mut (*stats).run_queue, waited_ns);
        add_u64((&raw mut (*stats).switches).cast::<u64>().add(reason as usize), 1);
    }
}

/// How long the current thread has run, which was seen to come or not. A switch from a process that
/// the kernel protects is not seen (README): the time before is not this thread's then, and the
/// kernel has its own, up to the last tick where it becomes another program.
#[inline(always)]
fn ran_ns(on_cpu: &OnCpu, came: bool, now_ns: u64) -> u64 {
    if on_cpu.since_ns == 0 {
        return UNKNOWN;
    }
    let most_ns = now_ns.saturating_sub(on_cpu.since_ns);
    if came {
        return most_ns;
    }
    // SAFETY: a helper without arguments.
    let ran_ns = Task(unsafe { bpf_get_current_task_btf() } as u64).ran_ns();
    ran_ns.map_or(most_ns, |ran_ns| ran_ns.min(most_ns))
}

/// Of which of its programs something is added up. One that is not known yet is met then.
#[derive(Clone, Copy)]
enum Program {
    /// That which it is.
    Now { since_ns: u64 },
    /// The one before.
    Before { since_ns: u64 },
}

/// What is added up of the current thread, if it is wanted.
#[inline(always)]
fn stats_of((pid, tid): (u32, u32), program: Program) -> Option<*mut SchedStats> {
    // SAFETY: a helper without arguments.
    let task = Task(unsafe { bpf_get_current_task_btf() } as u64);
    let start_boottime_ns = task.process_start();
    if !wanted(pid, start_boottime_ns) {
        return None;
    }
    let of_threads = config().add_up == AddUp::Threads as u32;
    let (exec_id, since_ns, is_named) = match program {
        Program::Now { since_ns } => (task.exec_id(), since_ns, true),
        Program::Before { since_ns } => (task.exec_id().wrapping_sub(1), since_ns, false),
    };
    let (number, start_ns) =
        if of_threads { (tid, task.start()) } else { (pid, start_boottime_ns) };
    let key = key_of(number, start_ns, exec_id);
    if let Some(known) = SCHED_STATS.get_ptr_mut(&key) {
        if of_threads && is_named {
            // It may have changed.
            // SAFETY: the pointer came from a successful lookup; this thread alone writes here.
            unsafe { bpf_get_current_comm((&raw mut (*known).comm).cast(), 16) };
        }
        return Some(known);
    }
    let nothing = NOTHING_YET.get(0)?;
    // BPF_NOEXIST: another thread of the process may have come first.
    let is_new = SCHED_STATS.insert(&key, nothing, 1).is_ok();
    let Some(new) = SCHED_STATS.get_ptr_mut(&key) else {
        return SCHED_STATS.get_ptr_mut(&THE_REST);
    };
    if is_new {
        // SAFETY: the pointer came from a successful lookup, and it is this thread's to fill in.
        unsafe {
            (*new).start_boottime_ns = start_boottime_ns;
            (*new).since_ns = since_ns;
            (*new).cgroup_id = bpf_get_current_cgroup_id();
            if is_named {
                bpf_get_current_comm((&raw mut (*new).comm).cast(), 16);
            }
            (*new).pid = pid;
            (*new).tid = tid;
            (*new).host_pid = current_of_host().0;
        }
    }
    Some(new)
}

/// What the counters of this CPU have counted since the last switch.
#[inline(always)]
fn read_counters(on_cpu: &mut OnCpu, stats: Option<*mut SchedStats>, cpu: u32) {
    for number in 0..MAX_COUNTERS {
        if number as u32 >= config().counters {
            break;
        }
        let mut now = bpf_perf_event_value { counter: 0, enabled: 0, running: 0 };
        let index = u64::from(number as u32 * MAX_CPUS + cpu);
        // SAFETY: the buffer is a local of that size.
        let read = unsafe {
            bpf_perf_event_read_value(
                (&raw const HARDWARE).cast_mut().cast(),
                index,
                &raw mut now,
                size_of::<bpf_perf_event_value>() as u32,
            )
        };
        if read != 0 {
            continue;
        }
        let now =
            CounterSum { value: now.counter, enabled_ns: now.enabled, running_ns: now.running };
        let before = core::mem::replace(&mut on_cpu.counters[number], now);
        // Not known before the first look, nor of another that was opened since: the CPU was
        // offline.
        let is_another = now.value < before.value || now.enabled_ns < before.enabled_ns;
        if before.enabled_ns == 0 || is_another {
            continue;
        }
        if let Some(stats) = stats {
            // SAFETY: the pointer came from a successful lookup, the index is less than the length.
            unsafe {
                let sum = (&raw mut (*stats).counters).cast::<CounterSum>().add(number);
                add_u64(&raw mut (*sum).value, now.value.wrapping_sub(before.value));
                add_u64(&raw mut (*sum).enabled_ns, now.enabled_ns.wrapping_sub(before.enabled_ns));
                add_u64(&raw mut (*sum).running_ns, now.running_ns.wrapping_sub(before.running_ns));
            }
        }
    }
}

fn reason(state: u64) -> SwitchReason {
    match state {
        0 => SwitchReason::Preempted,
        _ if state & state::DEAD != 0 => SwitchReason::Exited,
        _ if state & (state::STOPPED | state::TRACED) != 0 => SwitchReason::Stopped,
        _ if state & state::NO_LOAD != 0 => SwitchReason::Voluntary,
        _ if state & state::UNINTERRUPTIBLE != 0 => SwitchReason::Io,
        _ => SwitchReason::Voluntary,
    }
}

/// Adds to a histogram.
#[inline(always)]
unsafe fn add_time(to: *mut Times, ns: u64) {
    if ns == UNKNOWN {
        return;
    }
    // The bound, for the verifier, which forgets what `bucket_of` compared.
    let bucket = masked::<1023>(bucket_of(ns) as u64);
    if bucket >= BUCKETS {
        return;
    }
    // SAFETY: the caller's pointer is to a whole `Times`; the bucket is less than their number.
    unsafe {
        add_u64(&raw mut (*to).sum_ns, ns);
        add_u32((&raw mut (*to).buckets).cast::<u32>().add(bucket), 1);
    }
}
