//! The start of a capture: everything that needs a capability, then the drop of those not needed
//! any more. Run on the collecting thread, by `session.rs`.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use stackwire_collector_ebpf as abi;
use stackwire_model::{AddUp, Event, Share, StackCopies, Unwind as Walk, WaitState};
use stackwire_proto::v1::CollectorMessage;
use stackwire_rights::capabilities::{self, CapabilitySet};

use super::side::Side;
use super::{SessionError, as_user};
use crate::artifact::{Artifact, Hash, Kind};
use crate::clock::{now_ns, realtime_ns};
use crate::config::{Config, ConfigError, Scope};
use crate::cpu_time::CpuTimes;
use crate::helpers::broker::Broker;
use crate::helpers::compiler::Compiler;
use crate::host::kernel_names::KernelNames;
use crate::host::{Identity, in_a_cgroup_namespace, kallsyms, pid_namespace, vdso};
use crate::off_cpu::OffCpu;
use crate::perf_samples::PerfSamples;
use crate::pipeline::{Outgoing, Parts, Pipeline};
use crate::priority::Raised;
use crate::process::{Processes, each_once, family, waiting};
use crate::python::Pythons;
use crate::sampler::Filter;
use crate::sched::Totals;
use crate::sources::perf_event::Kernel;
use crate::unwind::{Sources, Unwind};
use crate::wire::{self, Head, References, Sampling};

/// Kept after start-up: opens events on CPUs that come online, and from kernel 6.15 on reads the
/// mappings of other users' processes.
const KEPT: CapabilitySet = CapabilitySet::PERFMON;
/// Looks for children that are not followed yet. Who forks all the time is soon followed by the
/// kernel side alone.
const MAX_LOOKS: usize = 8;

/// Everything that needs a capability, then the drop of those not needed any more.
pub(super) fn prepare(
    config: &Config,
    outgoing: Outgoing,
    sources: Sources,
    python: Option<Compiler>,
) -> Result<(CollectorMessage, Pipeline), SessionError> {
    let (filter, asked, mut sampling) = describe(config)?;
    // Before there are samples that nobody takes meanwhile.
    let pythons = python.map(|it| switch_on(config, it, &sources.broker)).transpose()?;
    let raised = Raised::for_now();
    let mut side = Side::start(config, &filter)?;
    let mut clocks = (now_ns(), realtime_ns());
    // Of single processes it is asked once they are admitted.
    let mut cpu_times =
        (filter.ends && asked.is_none()).then(|| CpuTimes::begin(waiting::processes()));
    let family = |of: &[u32]| if filter.follow { family(of) } else { each_once(of) };
    let wanted = asked.as_deref().map(family);
    match &mut side {
        Side::Ebpf(sampler) => sampling.counters = sampler.counters().to_vec(),
        Side::Perf(sampler, why) => {
            // Their side band begins with it: what is mapped is read after that.
            sampler.admit(wanted.as_deref().unwrap_or_default())?;
            sampling.no_bpf = Some(*why);
        }
    }
    let mut processes = Processes::new(wanted.as_deref(), filter.follow);
    processes.choose(config.choice.clone());
    if let Scope::Processes { pids, on_exec: true, .. } = &config.scope {
        processes.await_exec(pids);
    }
    if config.sched != AddUp::Nothing {
        processes.keep_before();
    }
    processes.scan();
    // The threads that bring tables would inherit it.
    drop(raised);
    let mut late = None;
    let unwind = match config.unwind {
        Walk::FramePointers => None,
        _ => {
            let (tables, walks) = side.take_tables(config, &sources.broker)?;
            late = walks;
            if late.is_some() {
                leave_no_core_file();
            }
            let unwind = Unwind::start(tables, sources, &mut processes, wanted.is_some());
            let error = |error| SessionError::Internal(format!("cannot set up unwinding: {error}"));
            Some(unwind.map_err(error)?)
        }
    };
    // Samples come already, and nobody takes them.
    let _raised = Raised::for_now();
    let mut admitted = wanted.unwrap_or_default();
    if !admitted.is_empty() {
        if let Side::Ebpf(sampler) = &mut side {
            sampler.admit(&admitted)?;
        }
        // Find the children that were born before the admission; after it, the kernel side takes
        // children along by itself. Each look finds the children born between the look before it
        // and the admission that followed. They have fewer and fewer parents.
        for _ in 0..MAX_LOOKS {
            let late: Vec<u32> =
                family(&admitted).into_iter().filter(|pid| !admitted.contains(pid)).collect();
            if late.is_empty() {
                break;
            }
            processes.want(&late);
            side.admit(&late)?;
            admitted.extend(late);
        }
    }
    let started = Instant::now();
    // All of what single processes do is sampled from now on; of others it was from the start on.
    if matches!(config.scope, Scope::Processes { .. }) {
        clocks = (now_ns(), realtime_ns());
        cpu_times = filter.ends.then(|| CpuTimes::begin(admitted.iter().copied()));
    }
    if let (Some(off_cpu), Side::Ebpf(sampler)) = (&config.off_cpu, &mut side) {
        let pids = match &config.scope {
            Scope::All => waiting::processes(),
            Scope::Processes { .. } => admitted,
            Scope::Cgroup(path) => as_user(|| waiting::processes_of(path))?,
        };
        let states: Vec<_> = off_cpu.states.iter().map(|&state| kernel_state(state)).collect();
        let threshold_ns = filter.config.wait_threshold_ns;
        let find = || waiting::threads(&pids, &states, threshold_ns, clocks.0);
        let noted = find();
        sampler.note_waiting(&noted);
        // One that was woken between the look and the note may run until the capture ends.
        let still: HashSet<u32> = find().into_iter().map(|(tid, _)| tid).collect();
        for (tid, _) in noted.iter().filter(|(tid, _)| !still.contains(tid)) {
            sampler.note_running(*tid, clocks.0);
        }
    }
    let mut perf = None;
    if let Side::Perf(sampler, _) = &side {
        sampling.kernel_excluded = sampler.contents().kernel == Kernel::Excluded;
        perf = Some(PerfSamples::default());
        cpu_times = None;
    }
    if cpu_times.is_some() {
        processes.keep_until_told();
    }
    let mut references = References::default();
    let mut layout = kallsyms::KernelLayout::default();
    let mut names = KernelNames::default();
    // Kernel stacks of waits are always taken: they are the reason.
    if config.kernel_stacks || config.off_cpu.is_some() {
        // Without it kernel frames stay unnamed, which the report says; the capture is still worth
        // it.
        let text = std::fs::read_to_string(kallsyms::PATH).unwrap_or_default();
        let (parsed, snapshot) = kallsyms::parse(&text);
        drop(text);
        layout = parsed;
        // Apart: programs come and go, ours at each start, and the rest is the same kernel until
        // the next boot.
        if !snapshot.is_empty() {
            let (programs, kernel) = kallsyms::split_programs(&snapshot);
            references.kernel = Some(Hash::of_parts(&kernel.map(str::as_bytes)));
            references.programs = Some(Hash::of(programs.as_bytes()));
        }
        names = KernelNames::new(snapshot);
    }
    if let Some(image) = vdso::image() {
        let artifact = Artifact::new(Kind::Vdso, image);
        references.vdso = Some(artifact.hash);
        outgoing.outbox.add_artifact(artifact, None);
    }
    capabilities::keep(KEPT)
        .map_err(|error| SessionError::Internal(format!("cannot drop capabilities: {error}")))?;

    // Not secret, only different: never to wait for entropy, as early at boot, while samples pile
    // up.
    let mut capture_id = [0; 16];
    rustix::rand::getrandom(&mut capture_id, rustix::rand::GetRandomFlags::INSECURE)
        .map_err(|error| SessionError::Internal(format!("no random numbers: {error}")))?;
    let identity = Identity::read();
    let there = sampling.counters.iter().filter(|counter| counter.missing.is_none());
    let counters = there.count();
    let share_all = config.share == Share::Always;
    let (host, epoch) = (identity.clone(), config.epoch);
    let head = Head { capture_id, identity: host, clocks, sampling, share_all, epoch };
    let pipeline = Pipeline::new(Parts {
        sampler: side.into_sampler(),
        processes,
        unwind,
        perf,
        late,
        layout,
        names,
        identity,
        references,
        outgoing,
        sched: Totals::new(config.sched, counters, matches!(config.scope, Scope::Cgroup(_))),
        pythons,
        off_cpu: config.off_cpu.as_ref().map(|_| OffCpu::new(config.events.len() as u8)),
        cpu_times,
        started,
        epoch_start: clocks.0,
        epoch_length: config.epoch,
    });
    Ok((wire::hello(&head), pipeline))
}

/// Copies of stacks are in this process's memory. One byte: it is less than a file takes, and
/// where cores are piped to a program, the kernel looks at no other limit (`do_coredump` of
/// fs/coredump.c).
fn leave_no_core_file() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Core);
    let current = Some(maximum.unwrap_or(1).min(1));
    // A soft limit below the hard one is never refused.
    let _ = setrlimit(Resource::Core, Rlimit { current, maximum });
}

/// Has Python processes name their functions. Those that were chosen one by one have to.
fn switch_on(
    config: &Config,
    compiler: Compiler,
    broker: &Arc<Broker>,
) -> Result<Pythons, SessionError> {
    let mut pythons = Pythons::start(Arc::clone(broker), compiler)
        .map_err(|error| SessionError::Internal(format!("cannot start a thread: {error}")))?;
    // Before it becomes another program, it runs none of what it will.
    let Scope::Processes { pids, on_exec: false, .. } = &config.scope else { return Ok(pythons) };
    for (pid, outcome) in pythons.switch_on(pids) {
        match outcome {
            None => return Err(SessionError::NotPython(pid)),
            Some(outcome) if !outcome.is_good() => {
                return Err(SessionError::Python { pid, outcome });
            }
            Some(_) => {}
        }
    }
    Ok(pythons)
}

fn describe(config: &Config) -> Result<(Filter, Option<Vec<u32>>, Sampling), SessionError> {
    let mut sampling = Sampling {
        events: config.series(),
        frequency: if config.count.is_some() { 0 } else { config.frequency },
        kernel_stacks: config.kernel_stacks,
        choice: config.choice.clone(),
        ..Sampling::default()
    };
    let mut filter = Filter { events: config.events.len(), ..Filter::default() };
    let counted = config.events.iter().enumerate().filter(|(_, event)| event.is_counted_singly());
    let counted = counted.filter(|_| config.count.is_none());
    filter.config.counted = counted.fold(0, |bits, (index, _)| bits | 1 << index);
    // Samples of a clock can be compared with CPU time. Where processes have other numbers, or are
    // chosen by where they are, it is not known which of those without samples count.
    let by_place = matches!(config.scope, Scope::Cgroup(_))
        || !(config.choice.containers.is_empty() && config.choice.pods.is_empty());
    let is_clock = config.events.iter().any(Event::is_clock);
    filter.ends = is_clock && !by_place && pid_namespace().is_none();
    filter.config.interval_ns = 1_000_000_000 / config.frequency.max(1);
    if let Some(off_cpu) = &config.off_cpu {
        let bit = |state: &WaitState| 1 << kernel_state(*state) as u32;
        filter.config.wait_states = off_cpu.states.iter().fold(0, |bits, state| bits | bit(state));
        filter.config.wait_threshold_ns = off_cpu.threshold.as_nanos() as u32;
        filter.config.wait_event = config.events.len() as u32;
        filter.config.wakers = off_cpu.wakers.into();
    }
    filter.config.add_up = match config.sched {
        AddUp::Nothing => abi::sched_stats::AddUp::Nothing,
        AddUp::Processes => abi::sched_stats::AddUp::Processes,
        AddUp::Threads => abi::sched_stats::AddUp::Threads,
    } as u32;
    filter.config.kernel_stacks = config.kernel_stacks.into();
    let walk = match config.unwind {
        Walk::Auto => abi::Unwind::Auto,
        Walk::Tables => abi::Unwind::Tables,
        Walk::FramePointers => abi::Unwind::FramePointers,
    };
    filter.config.unwind = walk as u32;
    filter.config.stack_copies = (config.stack_copies == StackCopies::Auto).into();
    filter.config.managed = (config.unwind != Walk::FramePointers).into();
    let mut wanted = None;
    match &config.scope {
        Scope::All => filter.config.scope = abi::Scope::All as u32,
        Scope::Processes { pids, follow, .. } => {
            filter.config.scope = abi::Scope::Processes as u32;
            filter.follow = *follow;
            sampling.pids.clone_from(pids);
            sampling.follow = *follow;
            wanted = Some(pids.clone());
        }
        Scope::Cgroup(path) => {
            let not_one = || ConfigError::NotACgroup(path.clone());
            let (id, level) = as_user(|| cgroup(path))?.ok_or_else(not_one)?;
            filter.config.scope = abi::Scope::Cgroup as u32;
            filter.config.cgroup_id = id;
            filter.config.cgroup_level =
                if in_a_cgroup_namespace() { abi::ANY_LEVEL } else { level };
            sampling.cgroup = path.display().to_string();
        }
    }
    Ok((filter, wanted, sampling))
}

fn kernel_state(state: WaitState) -> abi::WaitState {
    match state {
        WaitState::Sleep => abi::WaitState::Sleep,
        WaitState::Disk => abi::WaitState::Disk,
        WaitState::Stopped => abi::WaitState::Stopped,
        WaitState::Preempted => abi::WaitState::Preempted,
    }
}

/// Id of a cgroup (the inode of its directory) and its depth below the root of the hierarchy.
fn cgroup(path: &Path) -> Option<(u64, u32)> {
    let path = path.canonicalize().ok()?;
    let metadata = std::fs::metadata(&path).ok()?;
    // The root of the hierarchy is where the file system begins.
    let level = path
        .ancestors()
        .skip(1)
        .take_while(|up| std::fs::metadata(up).is_ok_and(|up| up.dev() == metadata.dev()))
        .count();
    Some((metadata.ino(), level as u32))
}
