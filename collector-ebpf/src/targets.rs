//! Which tasks are sampled, and the tracepoints that take children along (`--follow`) and note who becomes another program.

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::pt_regs;
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::{
    bpf_get_current_ancestor_cgroup_id, bpf_get_current_task_btf, bpf_get_smp_processor_id,
    bpf_ktime_get_ns, bpf_task_pt_regs,
};
use aya_ebpf::macros::{btf_tracepoint, raw_tracepoint};
use aya_ebpf::programs::{BtfTracePointContext, RawTracePointContext};
use stackwire_collector_ebpf::tables::{exec_word, first_slot};
use stackwire_collector_ebpf::{Counter, Scope};

use crate::maps::{EXECS, TARGETS, config, count};
use crate::sample::is_exec;
use crate::task::Task;

/// Whether a sample of process `pid`, started at `start`, is wanted.
#[inline(always)]
pub fn wanted(pid: u32, start: u64) -> bool {
    let config = config();
    if config.scope == Scope::Processes as u32 {
        // SAFETY: the value is a plain u64; a torn read is impossible on 64-bit targets.
        return match unsafe { TARGETS.get(&pid) } {
            Some(&expected) => expected == 0 || expected == start,
            None => false,
        };
    }
    if config.scope == Scope::Cgroup as u32 {
        // SAFETY: a helper without memory arguments.
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(config.cgroup_level as i32) };
        return id == config.cgroup_id;
    }
    true
}

/// `sched_process_fork(parent, child)`: runs before the child can. Fires for threads as well, which
/// need no entry of their own.
///
/// Here and not in user space because a child may be gone before the collector wakes; here and not in
/// the sampler because hash updates are not safe from NMI.
#[btf_tracepoint(function = "sched_process_fork")]
pub fn follow_fork(ctx: BtfTracePointContext) -> i32 {
    let child = Task(ctx.arg::<u64>(1));
    let pid = child.pid();
    if pid == 0 || child.tid() != pid {
        return 0;
    }
    let parent = Task(ctx.arg::<u64>(0));
    let parent_pid = ctx.tgid();
    if !wanted(parent_pid, parent.process_start()) {
        return 0;
    }
    if TARGETS.insert(&pid, &child.process_start(), 0).is_err() {
        // SAFETY: a helper without arguments.
        count(unsafe { bpf_get_smp_processor_id() }, Counter::TargetsFull);
    }
    0
}

/// `task_rename(task, comm)`: in execve, when the memory is the new program's and the old one's registers are still there.
/// Until the collector has heard of it, mappings of the old program must not be taken for those of the new.
///
/// Not `sched_process_exec`, which comes after the side-band records of the first mappings.
#[raw_tracepoint(tracepoint = "task_rename")]
pub fn note_exec(ctx: RawTracePointContext) -> i32 {
    // SAFETY: `bpf_task_pt_regs` is given the current task, as it demands; bpf_probe_read_kernel checks the address.
    let saved = unsafe {
        let saved = bpf_task_pt_regs(bpf_get_current_task_btf()) as *const pt_regs;
        bpf_probe_read_kernel(saved)
    };
    let pid = ctx.tgid();
    if saved.is_ok_and(|saved| is_exec(&saved))
        && let Some(slot) = EXECS.get_ptr_mut(first_slot(pid))
    {
        // SAFETY: the pointer came from a successful lookup; a helper without arguments.
        unsafe { core::ptr::write_volatile(slot, exec_word(pid, bpf_ktime_get_ns())) };
    }
    0
}
