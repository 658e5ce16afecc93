//! The sampling program: registers in, one record in the ring out.

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::bpf_perf_event_value;
use aya_ebpf::helpers::generated::{
    bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_current_task_btf, bpf_get_prandom_u32,
    bpf_get_smp_processor_id, bpf_ktime_get_ns, bpf_perf_prog_read_value,
};
use aya_ebpf::macros::perf_event;
use aya_ebpf::programs::PerfEventContext;
use stackwire_collector_ebpf::arch::saved;
use stackwire_collector_ebpf::{
    COPY, Counter, KernelEnd, LIST, MAX_CPUS, MAX_EVENTS, MAX_USER_FRAMES, PICK, SAMPLE,
    SampleHeader, Scope, UserEnd, WALK,
};

use crate::maps::{
    PICKERS, SAMPLER, SCRATCH, STAGES, Scratch, WALKING, config, count, hand_over, list,
    wake_collector,
};
use crate::targets::wanted;
use crate::task::{Task, current, current_of_host};
use crate::walk::{by_frame_pointers, by_tables, copy, lists, stacks};

/// A program for each event: no helper tells which event a program runs for
/// (`bpf_get_attach_cookie` would, but before 6.5 no program can be attached with a cookie once
/// CAP_BPF is gone, as to a CPU that comes online).
macro_rules! sampling_programs {
    ($($name:ident $event:literal)*) => {
        $(
            #[perf_event]
            pub fn $name(ctx: PerfEventContext) -> u32 {
                begin(&ctx, $event)
            }
        )*
    };
}
sampling_programs! {
    sample_0 0
    sample_1 1
    sample_2 2
    sample_3 3
    sample_4 4
    sample_5 5
    sample_6 6
    sample_7 7
}

#[inline(always)]
fn begin(ctx: &PerfEventContext, event: u8) -> u32 {
    if let Some(scratch) = SCRATCH.get_ptr_mut(SAMPLER) {
        // SAFETY: as in `sample`; the context of a perf_event program is valid for the length of
        // the program.
        unsafe {
            (*scratch).header.event = event;
            (*scratch).header.period = (*ctx.ctx).sample_period;
        }
    }
    let next = if config().counted & (1 << event) == 0 { SAMPLE } else { PICK };
    // SAFETY: as in `sample`.
    let _ = unsafe { STAGES.tail_call(ctx, next) };
    0
}

/// For an event that the kernel counts one by one: decides whether this occurrence becomes a
/// sample, and what the sample weighs. For a clock each occurrence is a sample and weighs its
/// period.
#[perf_event]
pub fn pick(ctx: PerfEventContext) -> u32 {
    let (pid, _) = current();
    let mut value = bpf_perf_event_value { counter: 0, enabled: 0, running: 0 };
    let size = size_of::<bpf_perf_event_value>() as u32;
    // SAFETY: the context is the program's own, the buffer has the size that is told.
    if unsafe { bpf_perf_prog_read_value(ctx.ctx, &raw mut value, size) } != 0 {
        return 0;
    }
    // SAFETY: helpers without memory arguments.
    let (task, cpu, now_ns) =
        unsafe { (bpf_get_current_task_btf(), bpf_get_smp_processor_id(), bpf_ktime_get_ns()) };
    let ours = wanted(pid, Task(task as u64).process_start());
    let Some(scratch) = SCRATCH.get_ptr_mut(SAMPLER) else { return 0 };
    // SAFETY: as in `sample`.
    let header = unsafe { &mut (*scratch).header };
    let row = if cpu < MAX_CPUS { cpu } else { MAX_CPUS - 1 };
    let Some(picker) = PICKERS.get_ptr_mut(row * MAX_EVENTS as u32 + u32::from(header.event))
    else {
        return 0;
    };
    // SAFETY: the pointer came from a successful lookup; the entry is this CPU's, see `sample`, or
    // of CPUs beyond MAX_CPUS, which may lose what one of them adds.
    let picker = unsafe { &mut *picker };
    // CPUs that share an entry must not take each other's counters for their own.
    let came = if cpu < MAX_CPUS { picker.came(value.counter) } else { header.period };
    let interval_ns = u64::from(config().interval_ns);
    // SAFETY: a helper without arguments.
    let random = || unsafe { bpf_get_prandom_u32() };
    header.period = picker.happened(came, now_ns, interval_ns, ours, random);
    if header.period != 0 {
        // SAFETY: as in `sample`.
        let _ = unsafe { STAGES.tail_call(&ctx, SAMPLE) };
    }
    0
}

/// What all events have in common. Not a function of theirs: each would have a copy to verify.
#[perf_event]
pub fn sample(ctx: PerfEventContext) -> u32 {
    let host_pid = current_of_host().0;
    if host_pid == 0 {
        return 0; // idle
    }
    let (pid, tid) = current();
    // SAFETY: helpers without memory arguments.
    let (task, cpu) = unsafe { (bpf_get_current_task_btf(), bpf_get_smp_processor_id()) };
    if pid == 0 {
        if config().scope == Scope::All as u32 {
            count(cpu, Counter::Taken);
            count(cpu, Counter::Outside);
        }
        return 0;
    }
    let start_boottime_ns = Task(task as u64).process_start();
    if !wanted(pid, start_boottime_ns) {
        return 0;
    }
    count(cpu, Counter::Taken);
    let Some(scratch) = SCRATCH.get_ptr_mut(SAMPLER) else {
        count(cpu, Counter::NoScratch);
        return 0;
    };
    // SAFETY: the pointer came from a successful lookup; the slot is this CPU's, and a perf_event
    // program is not entered again on a CPU that runs one (bpf_prog_active).
    let scratch = unsafe { &mut *scratch };
    // SAFETY: helpers without memory arguments.
    let (time_ns, cgroup_id) = unsafe { (bpf_ktime_get_ns(), bpf_get_current_cgroup_id()) };
    // Field by field: a whole struct would be copied by a call to memcpy.
    scratch.header.time_ns = time_ns;
    scratch.header.start_boottime_ns = start_boottime_ns;
    scratch.header.cgroup_id = cgroup_id;
    scratch.header.pid = pid;
    scratch.header.tid = tid;
    scratch.header.cpu = cpu;
    scratch.header.host_pid = host_pid;
    // SAFETY: the buffer is 16 bytes of the scratch record.
    unsafe { bpf_get_current_comm(scratch.header.comm.as_mut_ptr().cast(), 16) };
    // SAFETY: the context of a perf_event program is valid for the length of the program.
    let interrupted = unsafe { &(*ctx.ctx).regs };
    if saved::is_of_user_mode(interrupted) {
        stacks::begin_from(scratch, Task(task as u64), pid, interrupted);
    } else {
        // The interrupted registers are the kernel's.
        stacks::begin(scratch, task, pid);
    }
    if config().managed != 0 {
        scratch.list.stage = list::NOT_MET;
    }
    // SAFETY: the map holds programs of this type only. Returns only when the call failed, which
    // the collector rules out by filling the map before it attaches this program.
    let _ = unsafe { STAGES.tail_call(&ctx, WALK) };
    count(cpu, Counter::NoScratch);
    0
}

/// Walks on where the program before left off; when the walk is over, hands the record over.
#[perf_event]
pub fn walk_frame_pointers(ctx: PerfEventContext) -> u32 {
    walk_on(&ctx, by_frame_pointers::step)
}

/// Likewise, by tables: the collector puts one of the two into `STAGES`.
#[perf_event]
pub fn walk_tables(ctx: PerfEventContext) -> u32 {
    walk_on(&ctx, |scratch| by_tables::step(scratch, SAMPLER))
}

#[inline(always)]
fn walk_on(ctx: &PerfEventContext, step: impl FnOnce(&mut Scratch)) -> u32 {
    let Some(scratch) = SCRATCH.get_ptr_mut(SAMPLER) else { return 0 };
    // SAFETY: as in `sample`, in whose name this runs.
    let scratch = unsafe { &mut *scratch };
    step(scratch);
    if scratch.list.is_wanted() {
        // SAFETY: as in `sample`. Where it fails, the sample has native frames alone.
        let _ = unsafe { STAGES.tail_call(ctx, LIST) };
        scratch.list.stage = list::NONE;
    }
    go_on(ctx, scratch)
}

/// Walks an interpreter's own list of frames; then the native walk goes on.
#[perf_event]
pub fn walk_frame_list(ctx: PerfEventContext) -> u32 {
    let Some(scratch) = SCRATCH.get_ptr_mut(SAMPLER) else { return 0 };
    // SAFETY: as in `sample`, in whose name this runs.
    let scratch = unsafe { &mut *scratch };
    if !lists::step(scratch, SAMPLER) {
        // SAFETY: as in `sample`. At the kernel's limit of tail calls the list ends here.
        let _ = unsafe { STAGES.tail_call(&ctx, LIST) };
    }
    lists::finish(scratch, SAMPLER);
    go_on(&ctx, scratch)
}

/// Goes on with the walk, or ends it.
#[inline(always)]
fn go_on(ctx: &PerfEventContext, scratch: &mut Scratch) -> u32 {
    if scratch.walk.end == WALKING {
        // SAFETY: as in `sample`. Fails at the kernel's limit of tail calls, beyond
        // MAX_USER_FRAMES.
        let _ = unsafe { STAGES.tail_call(ctx, WALK) };
        scratch.walk.end = UserEnd::DepthLimit as u64;
    }
    if config().stack_copies != 0 && UserEnd::is_early(scratch.walk.end) {
        // SAFETY: as in `sample`. Where it fails, the record says where the walk ended.
        let _ = unsafe { STAGES.tail_call(ctx, COPY) };
    }
    finish(ctx, scratch);
    0
}

/// Hands over a copy of the user stack, which cannot be walked yet, and the record.
#[perf_event]
pub fn copy_stack(ctx: PerfEventContext) -> u32 {
    let Some(scratch) = SCRATCH.get_ptr_mut(SAMPLER) else { return 0 };
    // SAFETY: as in `sample`, in whose name this runs.
    let scratch = unsafe { &mut *scratch };
    copy::hand_over_copy(scratch, SAMPLER);
    finish(&ctx, scratch);
    0
}

/// Adds the kernel stack and hands the record over.
#[inline(always)]
fn finish(ctx: &PerfEventContext, scratch: &mut Scratch) {
    let cpu = scratch.header.cpu;
    let user_end = scratch.walk.end;
    // The bound, for the verifier, which does not know what the walk promised.
    let depth = scratch.walk.depth as usize;
    let user_frames = if depth > MAX_USER_FRAMES { MAX_USER_FRAMES } else { depth };
    // SAFETY: the context of a perf_event program is valid for the length of the program.
    let in_user_mode = saved::is_of_user_mode(unsafe { &(*ctx.ctx).regs });
    let (kernel_frames, kernel_end) = if in_user_mode || config().kernel_stacks == 0 {
        (0, KernelEnd::None)
    } else {
        stacks::of_kernel(ctx.as_ptr(), scratch, user_frames)
    };
    scratch.header.user_frames = user_frames as u16;
    scratch.header.kernel_frames = kernel_frames as u16;
    scratch.header.user_end = user_end as u8;
    scratch.header.kernel_end = kernel_end as u8;

    if user_end == UserEnd::NoMappingsYet as u64 {
        wake_collector();
    }
    if scratch.list.was_walked() {
        // Before the sample it is of.
        lists::hand_over_list(scratch, SAMPLER);
    }
    let bytes = size_of::<SampleHeader>() + (user_frames + kernel_frames) * 8;
    // SAFETY: `bytes` is at most the size of the scratch record, which the verifier checks.
    if !unsafe { hand_over((scratch as *mut Scratch).cast(), bytes) } {
        count(cpu, Counter::RingFull);
    }
}
