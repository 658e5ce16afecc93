//! Which tasks are sampled, and the tracepoint that takes children along (`--follow`).

use aya_ebpf::helpers::generated::{bpf_get_current_ancestor_cgroup_id, bpf_get_smp_processor_id};
use aya_ebpf::macros::raw_tracepoint;
use aya_ebpf::programs::RawTracePointContext;
use stackwire_collector_ebpf::{ANY_LEVEL, Counter, Scope};

use crate::maps::{TARGETS, config, count};
use crate::task::{Task, current};

/// Depths at which a cgroup is looked for. Kubernetes has its containers at 4 to 6.
const MAX_LEVELS: u32 = 24;

/// Whether a sample of process `pid`, started at `start`, is wanted. 0 is idle, or outside the pid
/// namespace.
#[inline(always)]
pub fn wanted(pid: u32, start: u64) -> bool {
    if pid == 0 {
        return false;
    }
    let config = config();
    if config.scope == Scope::Processes as u32 {
        // SAFETY: the value is a plain u64; a torn read is impossible on 64-bit targets.
        return match unsafe { TARGETS.get(&pid) } {
            Some(&expected) => expected == 0 || expected == start,
            None => false,
        };
    }
    if config.scope == Scope::Cgroup as u32 {
        if config.cgroup_level == ANY_LEVEL {
            return (0..MAX_LEVELS).any(|level| ancestor(level) == config.cgroup_id);
        }
        return ancestor(config.cgroup_level) == config.cgroup_id;
    }
    true
}

/// The id of the cgroup at this depth above the current task's, or of its own.
#[inline(always)]
fn ancestor(level: u32) -> u64 {
    // SAFETY: a helper without memory arguments.
    unsafe { bpf_get_current_ancestor_cgroup_id(level as i32) }
}

/// `sched_process_fork(parent, child)`: runs before the child can. Fires for threads as well, which
/// need no entry of their own.
///
/// Here and not in user space because a child may be gone before the collector wakes; here and not
/// in the sampler because hash updates are not safe from NMI.
#[raw_tracepoint(tracepoint = "sched_process_fork")]
pub fn follow_fork(ctx: RawTracePointContext) -> i32 {
    let child = Task(ctx.arg::<u64>(1));
    let pid = child.pid();
    if pid == 0 || child.tid() != pid {
        return 0;
    }
    let parent = Task(ctx.arg::<u64>(0));
    if !wanted(current().0, parent.process_start()) {
        return 0;
    }
    if TARGETS.insert(&pid, &child.process_start(), 0).is_err() {
        // SAFETY: a helper without arguments.
        count(unsafe { bpf_get_smp_processor_id() }, Counter::TargetsFull);
    }
    0
}
