//! Finds the mappings of a process for the walk by tables. Keeps them right between two messages of
//! the collector: a fork passes them on, an exec ends them. Tells how much CPU time a process used
//! that has ended.

use aya_ebpf::bindings::pt_regs;
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::{bpf_get_current_task_btf, bpf_ktime_get_ns, bpf_task_pt_regs};
use aya_ebpf::macros::raw_tracepoint;
use aya_ebpf::programs::RawTracePointContext;
use stackwire_collector_ebpf::arch::saved;
use stackwire_collector_ebpf::tables::{
    PROCESS_PROBES, PROCESS_SLOTS, Process, exec_word, first_slot, is_outdated, moment, process_of,
    process_word,
};
use stackwire_collector_ebpf::{RecordKind, SampleHeader};

use crate::maps::{EXECS, GENERATION, INHERITED, PROCESSES, config, hand_over, wake_collector};
use crate::task::{Task, current};
use crate::walk::tree;

/// First mapping and number of mappings of a process, if they are those of the program it runs now.
#[inline(always)]
pub fn find_process(pid: u32) -> Option<(u32, u32)> {
    let slot = first_slot(pid);
    let exec = *EXECS.get(slot)?;
    for probe in 0..PROCESS_PROBES {
        let told = PROCESSES.get_ptr((slot + probe) & (PROCESS_SLOTS - 1))?;
        // SAFETY: the pointer came from a successful lookup.
        let told = unsafe { read(told) };
        let (of, first, count) = process_of(told.word);
        if of == pid {
            return if is_outdated(pid, told.since, exec) { None } else { Some((first, count)) };
        }
    }
    let inherited = INHERITED.get_ptr(slot)?;
    // SAFETY: the pointer came from a successful lookup.
    let (process, written) = unsafe {
        let written = core::ptr::read_volatile(&raw const (*inherited).generation);
        (read(&raw const (*inherited).process), written)
    };
    let (of, first, count) = process_of(process.word);
    if of != pid || written != generation() || is_outdated(pid, process.since, exec) {
        return None;
    }
    Some((first, count))
}

/// In this order: the word is written first, so that one that is older than its time is never seen.
///
/// # Safety
/// The pointer is of a map's entry.
#[inline(always)]
unsafe fn read(process: *const Process) -> Process {
    // SAFETY: as the caller promises.
    unsafe {
        let since = core::ptr::read_volatile(&raw const (*process).since);
        Process { word: core::ptr::read_volatile(&raw const (*process).word), since }
    }
}

/// Counts up before what was given back is used again.
#[inline(always)]
pub fn generation() -> u64 {
    let Some(slot) = GENERATION.get_ptr(0) else { return 0 };
    // SAFETY: the pointer came from a successful lookup; volatile because the collector writes it.
    unsafe { core::ptr::read_volatile(slot) }
}

/// `sched_process_fork(parent, child)`: a child has its parent's mappings. Many have ended before
/// the collector hears of them.
#[raw_tracepoint(tracepoint = "sched_process_fork")]
pub fn note_fork(ctx: RawTracePointContext) -> i32 {
    let child = Task(ctx.arg::<u64>(1));
    let pid = child.pid();
    if pid == 0 || child.tid() != pid {
        return 0; // a thread
    }
    let now = generation();
    // None: no word, so that one of this pid's process before is not taken for it.
    let word = match current().0 {
        0 => 0, // its parent is outside the pid namespace
        parent => match find_process(parent) {
            Some((first, count)) => process_word(pid, first, count),
            None => 0,
        },
    };
    if let Some(slot) = INHERITED.get_ptr_mut(first_slot(pid)) {
        // SAFETY: the pointer came from a successful lookup. One of another child there is
        // overwritten: first its word.
        unsafe {
            core::ptr::write_volatile(&raw mut (*slot).process.word, word);
            let since = moment(bpf_ktime_get_ns());
            core::ptr::write_volatile(&raw mut (*slot).process.since, since);
            core::ptr::write_volatile(&raw mut (*slot).generation, now);
        }
    }
    0
}

/// `task_rename(task, comm)`: in execve, when the memory is the new program's and the old one's
/// registers are still there. Until the collector has heard of it, mappings of the old program must
/// not be taken for those of the new.
///
/// Not `sched_process_exec`, which comes after the side-band records of the first mappings.
///
/// The collector names itself anew when it asks something.
#[raw_tracepoint(tracepoint = "task_rename")]
pub fn note_exec(_ctx: RawTracePointContext) -> i32 {
    let (pid, tid) = current();
    if pid == config().collector {
        tree::answer(tid);
        return 0;
    }
    // SAFETY: `bpf_task_pt_regs` is given the current task, as it demands; bpf_probe_read_kernel
    // checks the address.
    let saved = unsafe {
        let saved = bpf_task_pt_regs(bpf_get_current_task_btf()) as *const pt_regs;
        bpf_probe_read_kernel(saved)
    };
    if pid != 0
        && saved.is_ok_and(|saved| saved::is_exec(&saved))
        && let Some(slot) = EXECS.get_ptr_mut(first_slot(pid))
    {
        // SAFETY: the pointer came from a successful lookup; a helper without arguments.
        unsafe { core::ptr::write_volatile(slot, exec_word(pid, bpf_ktime_get_ns())) };
        wake_collector();
    }
    0
}

/// `sched_process_free(task)`: some milliseconds after the task was reaped, when it has long left
/// its CPU.
///
/// Not `sched_process_exit`, where it still runs: what it ran since the last tick is not counted
/// yet (`update_curr` of kernel/sched/fair.c).
#[raw_tracepoint(tracepoint = "sched_process_free")]
pub fn note_end(ctx: RawTracePointContext) -> i32 {
    let task = Task(ctx.arg::<u64>(0));
    let host_pid = task.host_pid();
    if host_pid == 0 || task.host_tid() != host_pid {
        return 0; // a thread, whose time is in that of its process
    }
    let mut record = SampleHeader {
        // SAFETY: a helper without arguments.
        time_ns: unsafe { bpf_ktime_get_ns() },
        start_boottime_ns: task.start(),
        cgroup_id: 0,
        period: task.gone_runtime(),
        pid: 0,
        tid: 0,
        cpu: 0,
        host_pid,
        user_frames: 0,
        kernel_frames: 0,
        user_end: 0,
        kernel_end: 0,
        event: 0,
        kind: RecordKind::Ended as u8,
        state: 0,
        list_end: 0,
        reserved: [0; 6],
        comm: [0; 16],
    };
    // One that there is no room for is asked no more: its last time is missing.
    // SAFETY: the record has as many bytes.
    unsafe { hand_over((&raw mut record).cast(), size_of::<SampleHeader>()) };
    0
}
