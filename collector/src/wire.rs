//! Domain → wire: the one file of the collector that builds messages. Pure.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use stackwire_model::sched::PerfCounter;
use stackwire_model::{Choice, Event, ExecutableKey, LostReason, NoBpf, PythonOutcome};
use stackwire_proto::{FORMAT, build_id_to_wire, seal_epoch, seal_piece, v1};

use crate::artifact::{self, Artifact, Hash};
use crate::batch::Epoch;
use crate::definitions::{Sample, SchedDef, WakerDef};
use crate::handover::NotSent;
use crate::host::growth::Growth;
use crate::host::jit::Taken;
use crate::host::whose::Said;
use crate::host::{Identity, module_build_id};
use crate::normalize::FrameKind;
use crate::process::executable::Kind;
use crate::sources::record::comm_text;
use crate::unwind::{Stats, Unwind};

/// What is said once, at the head of a stream.
#[derive(Clone, Debug)]
pub struct Head {
    /// Random identity of the capture.
    pub capture_id: [u8; 16],
    /// The host.
    pub identity: Identity,
    /// The same instant on the monotonic and the real-time clock, nanoseconds.
    pub clocks: (u64, u64),
    /// How samples are taken.
    pub sampling: Sampling,
    /// The capture is to hold every file that has samples.
    pub share_all: bool,
    /// Length of an epoch.
    pub epoch: Duration,
}

/// How samples are taken.
#[derive(Clone, Debug, Default)]
pub struct Sampling {
    /// What makes the kernel take them.
    pub events: Vec<Event>,
    /// Samples of each a second and CPU.
    pub frequency: u32,
    /// Kernel stacks are recorded.
    pub kernel_stacks: bool,
    /// Processes asked for; empty: all, or those of `cgroup`.
    pub pids: Vec<u32>,
    /// cgroup asked for, empty otherwise.
    pub cgroup: String,
    /// Children are taken along.
    pub follow: bool,
    /// Which processes of those count.
    pub choice: Choice,
    /// Counters read at each switch, where it is recorded how threads are scheduled.
    pub counters: Vec<PerfCounter>,
    /// Why they are not taken with eBPF, if they are not.
    pub no_bpf: Option<NoBpf>,
    /// Time in the kernel is not sampled.
    pub kernel_excluded: bool,
}

/// Artifacts that executables and processes of an epoch refer to.
#[derive(Clone, Debug, Default)]
pub struct References {
    /// Hash of all symbols of the kernel and its modules, without those of BPF programs. The
    /// symbols themselves are not sent.
    pub kernel: Option<Hash>,
    /// Of those of BPF programs.
    pub programs: Option<Hash>,
    /// vDSO image.
    pub vdso: Option<Hash>,
}

/// The first message of a stream.
#[must_use]
pub fn hello(head: &Head) -> v1::CollectorMessage {
    let Head { capture_id, identity, clocks, sampling, share_all, epoch } = head;
    let container = &identity.container;
    message(v1::collector_message::Body::Hello(v1::Hello {
        format: FORMAT,
        capture_id: capture_id.to_vec(),
        collector_version: crate::VERSION.to_owned(),
        hostname: identity.hostname.clone(),
        boot_id: identity.boot_id.clone(),
        kernel_release: identity.kernel_release.clone(),
        machine: identity.machine.clone(),
        clock_monotonic_ns: clocks.0,
        clock_realtime_ns: clocks.1,
        sampling: Some(v1::Sampling {
            events: sampling.events.iter().map(Into::into).collect(),
            // That of format 1.
            event: String::new(),
            frequency: sampling.frequency,
            kernel_stacks: sampling.kernel_stacks,
            all: sampling.pids.is_empty()
                && sampling.cgroup.is_empty()
                && sampling.choice.is_everything(),
            pids: sampling.pids.clone(),
            cgroup: sampling.cgroup.clone(),
            follow: sampling.follow,
            comms: sampling.choice.comms.clone(),
            containers: texts(&sampling.choice.containers),
            pods: texts(&sampling.choice.pods),
            counters: sampling.counters.iter().map(Into::into).collect(),
            no_bpf: sampling.no_bpf.map_or(v1::NoBpf::Unspecified, Into::into).into(),
            kernel_excluded: sampling.kernel_excluded,
        }),
        share_all: *share_all,
        container: Some(v1::Container {
            pod_name: container.pod_name.clone(),
            namespace: container.namespace.clone(),
            container_name: container.container_name.clone(),
            cgroup_path: container.cgroup_path.clone(),
        }),
        cpus: identity.cpus.0,
        cpus_online: identity.cpus.1,
        cpu_id: identity.cpu.id.clone(),
        cpu_description: identity.cpu.description.clone(),
        epoch_ns: epoch.as_nanos() as u64,
    }))
}

/// Span and losses of an epoch.
#[derive(Clone, Debug)]
pub struct Span<'a> {
    /// Number within the capture.
    pub number: u64,
    /// Start and end on the monotonic clock.
    pub times: (u64, u64),
    /// Lost in it.
    pub lost: &'a [(LostReason, u64)],
    /// What became of unwind tables in it.
    pub tables: Stats,
    /// Artifacts that name its kernel frames.
    pub kernel_symbols: &'a [Hash],
    /// Why executables have no unwind table, and functions of an interpreter are not seen.
    pub unwind: Option<&'a Unwind>,
}

fn texts(all: &[impl ToString]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

fn growth(growth: &Growth) -> Vec<v1::Growth> {
    let marks = growth.marks().iter();
    marks.map(|mark| v1::Growth { time_ns: mark.time_ns, size: mark.size }).collect()
}

/// What was taken of process images beside their samples.
#[derive(Clone, Copy, Debug)]
pub struct Beside<'a> {
    /// What their JIT compilers wrote.
    pub jit: &'a HashMap<u64, Taken>,
    /// What they say of themselves.
    pub said: &'a HashMap<u64, Said>,
}

/// Compresses an epoch into a message body.
#[must_use]
pub fn epoch(
    epoch: &Epoch,
    span: &Span<'_>,
    references: &References,
    beside: &Beside<'_>,
    identity: &Identity,
) -> v1::SealedEpoch {
    let mut strings = Strings::default();
    strings.index("");
    let executables = epoch
        .executables
        .iter()
        .map(|found| {
            let missing = span.unwind.and_then(|unwind| unwind.missing(&found.kind));
            let mut wire = executable(&found.kind, &mut strings, references, identity);
            wire.unwind_missing = missing.map_or(0, |why| strings.index(&why.to_string()));
            let no_layout = span.unwind.and_then(|unwind| unwind.no_layout(&found.kind));
            wire.functions_missing = no_layout.map_or(0, |why| strings.index(&why.to_string()));
            let go = span.unwind.map(|unwind| unwind.go_code(&found.kind)).unwrap_or_default();
            (wire.go_start, wire.go_length) = (go.start, go.end.saturating_sub(go.start));
            wire
        })
        .collect();
    let processes = epoch
        .processes
        .iter()
        .map(|process| {
            let jit = beside.jit.get(&process.image).cloned().unwrap_or_default();
            let said = beside.said.get(&process.image).cloned().unwrap_or_default();
            let wire = |hashes: Vec<Hash>| hashes.iter().map(|hash| hash.0.to_vec()).collect();
            v1::Process {
                pid: process.pid,
                start_ns: process.start_ns,
                comm: strings.index(&process.comm),
                generation: process.generation,
                perf_map: wire(jit.perf_map),
                jitdump: wire(jit.jitdump),
                jit_missing: jit.missing.map_or(0, |why| strings.index(&why.to_string())),
                cgroup_id: process.cgroup_id,
                cgroup_path: process.cgroup_path.as_deref().map_or(0, |path| strings.index(path)),
                parent_pid: process.parent,
                since_ns: process.since_ns,
                end_ns: process.end_ns,
                process_context: said.context,
                otel_service_name: said.service_name,
                otel_resource_attributes: said.resource_attributes,
                host_pid: if process.host_pid == process.pid { 0 } else { process.host_pid },
                perf_map_growth: growth(&jit.perf_map_growth),
                jitdump_growth: growth(&jit.jitdump_growth),
                cpu_ns: process.cpu_ns,
            }
        })
        .collect();
    let threads = epoch
        .threads
        .iter()
        .map(|thread| v1::Thread {
            process: thread.process,
            tid: thread.tid,
            comm: strings.index(&Epoch::thread_comm(thread)),
        })
        .collect();
    let mappings = epoch
        .mappings
        .iter()
        .map(|mapping| v1::Mapping {
            process: mapping.process,
            executable: mapping.executable,
            start: mapping.start.0,
            length: mapping.length,
            file_offset: mapping.file_offset.0,
            since_ns: mapping.since_ns,
        })
        .collect();
    let wakers = epoch.wakers.iter().map(|of| waker(of, &mut strings)).collect();
    let cpu_times = epoch.unsampled_cpu_ns.as_ref().map(|by_name| {
        let used = by_name.iter();
        let used = used.map(|(comm, &ns)| v1::UnsampledCpu { comm: strings.index(comm), ns });
        v1::CpuTimes { unsampled: used.collect() }
    });
    let stacks = epoch
        .stacks
        .iter()
        .map(|&(node, end)| v1::Stack { node, end: v1::EndReason::from(end).into() });
    seal_epoch(&v1::Epoch {
        number: span.number,
        start_ns: span.times.0,
        end_ns: span.times.1,
        executables,
        processes,
        mappings,
        threads,
        nodes: Some(nodes(epoch)),
        stacks: stacks.collect(),
        samples: samples(epoch, span.times.0),
        lost: lost(span.lost),
        unwind_tables: Some(unwind_tables(span.tables)),
        strings: strings.table,
        sched: epoch.sched.iter().map(sched).collect(),
        wakers,
        kernel_symbols: span.kernel_symbols.iter().map(|hash| hash.0.to_vec()).collect(),
        list_ends: list_ends(epoch),
        cpu_times,
    })
}

/// The last message of a capture.
#[must_use]
pub fn end(
    now_ns: u64,
    epochs: u64,
    taken: u64,
    totals: &[(LostReason, u64)],
    python: &BTreeMap<PythonOutcome, u64>,
) -> v1::End {
    let python = python.iter().map(|(&outcome, &processes)| v1::PythonProcesses {
        outcome: v1::PythonOutcome::from(outcome).into(),
        processes,
    });
    let (lost, python) = (lost(totals), python.collect());
    v1::End { clock_monotonic_ns: now_ns, epochs, taken, lost, python }
}

/// An artifact as messages, one at a time; fewer when it is not what it was. Blocks: it is read
/// from a file, which may hang.
pub fn pieces(artifact: Artifact) -> impl Iterator<Item = v1::CollectorMessage> {
    let kind = match artifact.kind {
        artifact::Kind::Kallsyms => v1::ArtifactKind::Kallsyms,
        artifact::Kind::PerfMap => v1::ArtifactKind::PerfMap,
        artifact::Kind::Jitdump => v1::ArtifactKind::Jitdump,
        artifact::Kind::Vdso => v1::ArtifactKind::Vdso,
    };
    let (hash, length) = (artifact.hash, artifact.length);
    let source = artifact.open();
    let mut at = 0;
    std::iter::from_fn(move || {
        let content = source.as_ref().filter(|_| at < length)?.piece(at)?;
        let chunk = seal_piece(&hash.0, kind, length, at, &content);
        at += content.len() as u64;
        Some(message(v1::collector_message::Body::Artifact(chunk)))
    })
}

/// A piece of a file, or, without content, the reason why there is none.
#[must_use]
pub fn file_piece(
    key: ExecutableKey,
    whole: (&Hash, u64),
    piece: Result<(u64, &[u8]), &NotSent>,
) -> v1::CollectorMessage {
    let (hash, length) = whole;
    let (offset, content) = *piece.as_ref().unwrap_or(&(0, &[]));
    let mut chunk = seal_piece(&hash.0, v1::ArtifactKind::File, length, offset, content);
    chunk.file = Some(key.into());
    chunk.refused = piece.err().map(ToString::to_string).unwrap_or_default();
    message(v1::collector_message::Body::Artifact(chunk))
}

/// Wraps a body.
#[must_use]
pub fn message(body: v1::collector_message::Body) -> v1::CollectorMessage {
    v1::CollectorMessage { body: Some(body) }
}

fn executable(
    kind: &Kind,
    strings: &mut Strings,
    references: &References,
    identity: &Identity,
) -> v1::Executable {
    let hash = |hash: Option<Hash>| hash.map_or(Vec::new(), |hash| hash.0.to_vec());
    let mut wire = v1::Executable::default();
    match kind {
        Kind::File { path, key } => {
            wire.set_kind(v1::ExecutableKind::File);
            wire.path = strings.index(path);
            wire.set_key(*key);
        }
        Kind::Vdso => {
            wire.set_kind(v1::ExecutableKind::Vdso);
            wire.path = strings.index("[vdso]");
            wire.artifact = hash(references.vdso);
        }
        Kind::Anonymous | Kind::Described { .. } => wire.set_kind(v1::ExecutableKind::Anonymous),
        Kind::Code(code) => {
            wire.set_kind(v1::ExecutableKind::Code);
            wire.code = Some((&**code).into());
        }
        Kind::Kernel => {
            wire.set_kind(v1::ExecutableKind::Kernel);
            // Without kallsyms there are no real offsets, but debug information would still name
            // them.
            if references.kernel.is_some() {
                wire.build_id = build_id_to_wire(identity.kernel_build_id);
            }
            wire.symbols = hash(references.kernel);
        }
        Kind::Module(name) => {
            wire.set_kind(v1::ExecutableKind::Module);
            wire.path = strings.index(name);
            wire.build_id = build_id_to_wire(module_build_id(name));
            let is_programs = name == "bpf";
            wire.symbols = hash(if is_programs { references.programs } else { references.kernel });
        }
        Kind::Unmapped => wire.set_kind(v1::ExecutableKind::Unmapped),
    }
    wire
}

fn list_ends(epoch: &Epoch) -> Vec<v1::ListEnds> {
    let ends = epoch.list_ends.iter();
    let ends =
        ends.map(|(&end, &samples)| v1::ListEnds { end: v1::ListEnd::from(end).into(), samples });
    let mut ends: Vec<_> = ends.collect();
    ends.sort_by_key(|of| of.end);
    ends
}

fn unwind_tables(stats: Stats) -> v1::UnwindTables {
    let Stats { loaded, compiled, compile_ns, failed, evicted } = stats;
    v1::UnwindTables { loaded, compiled, compile_ns, failed, evicted }
}

fn nodes(epoch: &Epoch) -> v1::StackNodes {
    let mut wire = v1::StackNodes::default();
    let mut before = 0u64;
    for node in &epoch.nodes {
        wire.parent.push(node.parent);
        wire.executable.push(node.executable);
        let number = node.address.number();
        wire.offset_delta.push(number.wrapping_sub(before) as i64);
        wire.kind.push(match node.kind {
            FrameKind::Leaf => v1::FrameKind::Leaf as u32,
            FrameKind::Caller => v1::FrameKind::Caller as u32,
            FrameKind::Interrupted => v1::FrameKind::Signal as u32,
        });
        before = number;
    }
    wire
}

/// Columns by event, of those that have samples.
fn samples(epoch: &Epoch, start_ns: u64) -> Vec<v1::Samples> {
    let series = epoch.series.iter().zip(0..).filter(|(samples, _)| !samples.is_empty());
    let columns = |(samples, event): (&Vec<Sample>, u32)| {
        let mut wire = v1::Samples { event, ..v1::Samples::default() };
        let mut before = start_ns;
        for sample in samples {
            wire.time_delta.push(sample.time_ns.wrapping_sub(before) as i64);
            wire.thread.push(sample.thread);
            wire.cpu.push(sample.cpu);
            wire.user_stack.push(sample.user);
            wire.kernel_stack.push(sample.kernel);
            wire.value.push(sample.value);
            before = sample.time_ns;
        }
        for wait in samples.iter().filter_map(|sample| sample.wait) {
            wire.wait_state.push(v1::WaitState::from(wait.state).into());
            wire.wait_open.push(v1::WaitOpen::from(wait).into());
        }
        one_if_equal(&mut wire.value);
        if samples.iter().any(|sample| sample.count != 1) {
            wire.count.extend(samples.iter().map(|sample| u64::from(sample.count)));
            one_if_equal(&mut wire.count);
        }
        one_if_equal(&mut wire.wait_state);
        one_if_equal(&mut wire.wait_open);
        if let Some(wakers) = epoch.woken_by.get(event as usize).filter(|it| !it.is_empty()) {
            wire.waker.clone_from(wakers);
            wire.waker.resize(samples.len(), 0);
            one_if_equal(&mut wire.waker);
        }
        wire
    };
    series.map(columns).collect()
}

fn waker(of: &WakerDef, strings: &mut Strings) -> v1::Waker {
    match *of {
        WakerDef::Interrupt { kernel } => {
            v1::Waker { interrupt: true, kernel_stack: kernel, ..v1::Waker::default() }
        }
        WakerDef::Thread { pid, tid, comm, process, user, kernel } => v1::Waker {
            pid,
            tid,
            comm: strings.index(&comm_text(&comm)),
            process,
            user_stack: user,
            kernel_stack: kernel,
            interrupt: false,
        },
    }
}

fn sched(of: &SchedDef) -> v1::SchedStats {
    v1::SchedStats { process: of.process, thread: of.thread, ..(&of.stats).into() }
}

fn one_if_equal<T: PartialEq>(column: &mut Vec<T>) {
    if column.windows(2).all(|pair| pair[0] == pair[1]) {
        column.truncate(1);
    }
}

fn lost(counts: &[(LostReason, u64)]) -> Vec<v1::Lost> {
    let wire = counts.iter().filter(|(_, count)| *count > 0).map(|&(reason, count)| v1::Lost {
        reason: v1::LostReason::from(reason).into(),
        count,
        samples: reason.counts_samples(),
    });
    wire.collect()
}

#[derive(Default)]
struct Strings {
    table: Vec<String>,
    index: HashMap<String, u32>,
}

impl Strings {
    fn index(&mut self, text: &str) -> u32 {
        if let Some(&index) = self.index.get(text) {
            return index;
        }
        let index = self.table.len() as u32;
        self.table.push(text.to_owned());
        self.index.insert(text.to_owned(), index);
        index
    }
}
