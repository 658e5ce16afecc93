//! Wire → profile: the only file of the symbolizer that takes messages apart. What is malformed is
//! rejected here, once. Pure.
//!
//! A whole epoch is checked while it is added. An epoch that does not hold together is refused, and
//! the error names the place that is wrong. What was added of it before is harmless: entries of
//! tables, no samples.

mod stacks;
mod tables;

use stackwire_model::{Event, FileOffset, UserAddr, Wait};
use stackwire_proto::v1;

use self::stacks::Stacks;
use self::tables::Reader;

use crate::profile::labels::{Label, LabelValue};
use crate::profile::{
    Builder, Executable, ExecutableId, Mapping, Origin, SampleKey, SeriesId, Thread, ThreadId,
    UnwindTables, labels,
};

/// Most events of a capture.
const MAX_EVENTS: usize = 64;

/// A message that does not hold together.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum IngestError {
    /// An index outside its table.
    #[error("epoch {epoch}: {what} {index} is not defined")]
    Undefined {
        /// Epoch.
        epoch: u64,
        /// Kind of definition.
        what: &'static str,
        /// The index.
        index: u32,
    },
    /// Columns of unequal length.
    #[error("epoch {epoch}: the columns of its {what} differ in length")]
    Ragged {
        /// Epoch.
        epoch: u64,
        /// Which table.
        what: &'static str,
    },
    /// A field with a value it cannot have.
    #[error("epoch {epoch}: {what}")]
    Invalid {
        /// Epoch.
        epoch: u64,
        /// What.
        what: String,
    },
}

/// The part of a greeting that is needed to read epochs: where on the wall clock the monotonic
/// times of a capture lie, and in which container the collector runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Context {
    monotonic_ns: u64,
    realtime_ns: u64,
    container: v1::Container,
    /// The processes were chosen one by one.
    chosen: bool,
    /// What was sampled; see [`Context::begin`].
    events: Vec<Event>,
    frequency: u32,
    series: Vec<SeriesId>,
}

impl Context {
    /// Begins its capture.
    pub fn begin(&mut self, into: &mut Builder, number: usize, origin: Origin) {
        into.capture(number, origin, self.wall(0));
        let events = self.events.iter().take(MAX_EVENTS);
        let events = events
            .map(|event| {
                // Waits are not sampled by a clock.
                let frequency = if event.perf.is_some() { self.frequency } else { 0 };
                (event.clone(), frequency)
            })
            .collect();
        // Without series its epochs are refused, each with a note.
        self.series = into.series(events).unwrap_or_default();
    }

    /// Nanoseconds since the Unix epoch.
    #[must_use]
    pub fn wall(&self, monotonic_ns: u64) -> u64 {
        self.realtime_ns.saturating_add(monotonic_ns).saturating_sub(self.monotonic_ns)
    }

    /// The same of a time that may be unknown, 0.
    fn known(&self, monotonic_ns: u64) -> u64 {
        if monotonic_ns == 0 { 0 } else { self.wall(monotonic_ns) }
    }

    /// Labels of a process in this cgroup. The collector's own environment has the names of its
    /// pod. They hold for processes in that pod. When no cgroup tells the pods, they hold for
    /// processes that were chosen one by one.
    fn labels(&self, cgroup: &str) -> Vec<(&'static str, String)> {
        let mut found = labels::of_cgroup(cgroup);
        let own = &self.container;
        let unknown =
            labels::pod_uid(cgroup).is_none() && labels::pod_uid(&own.cgroup_path).is_none();
        // Another container's process is not in the collector's because nobody says so.
        let other = labels::container_id(cgroup);
        let other = other.is_some() && other != labels::container_id(&own.cgroup_path);
        if labels::same_pod(&own.cgroup_path, cgroup) || self.chosen && unknown && !other {
            let names = [
                ("pod_name", &own.pod_name),
                ("namespace", &own.namespace),
                ("container_name", &own.container_name),
            ];
            let told = names.into_iter().filter(|(_, name)| !name.is_empty());
            found.extend(told.map(|(key, name)| (key, name.clone())));
        }
        found
    }
}

/// Takes a greeting apart.
#[must_use]
pub fn hello(hello: &v1::Hello) -> (Origin, Context) {
    let sampling = hello.sampling.clone().unwrap_or_default();
    let events = sampling.all_events();
    let origin = Origin {
        hostname: hello.hostname.clone(),
        kernel_release: hello.kernel_release.clone(),
        machine: hello.machine.clone(),
        kernel_stacks: sampling.kernel_stacks,
        collector: hello.collector_version.clone(),
        cpus: (hello.cpus, hello.cpus_online),
        cpu_id: hello.cpu_id.clone(),
        cpu_description: hello.cpu_description.clone(),
    };
    let context = Context {
        monotonic_ns: hello.clock_monotonic_ns,
        realtime_ns: hello.clock_realtime_ns,
        container: hello.container.clone().unwrap_or_default(),
        chosen: !sampling.pids.is_empty(),
        events,
        frequency: sampling.frequency,
        series: Vec::new(),
    };
    (origin, context)
}

/// Whether a process wrote code while it was sampled.
#[derive(Clone, Copy)]
enum Writing {
    /// In this epoch.
    Now,
    /// Not after this, nanoseconds since the Unix epoch; 0: nobody looked.
    Until(u64),
}

impl Writing {
    /// The time that tells what code was there: of each sample where it may matter, else one for
    /// all, so that equal stacks stay one.
    fn seen(self, time_ns: u64) -> u64 {
        match self {
            Self::Now => (time_ns - time_ns % TENTH).saturating_add(TENTH / 2),
            Self::Until(until) => until,
        }
    }
}

/// How exactly a collector knows when code was written.
const TENTH: u64 = 100_000_000;

/// What an epoch is about.
#[derive(Debug, Default)]
pub struct Met {
    /// Executables it defines.
    pub executables: Vec<ExecutableId>,
    /// Which it says are mapped, each with the pid of a process.
    pub mapped: Vec<(ExecutableId, u32)>,
}

/// Adds an epoch to a profile.
///
/// # Errors
/// See [`IngestError`].
pub fn epoch(epoch: &v1::Epoch, context: &Context, into: &mut Builder) -> Result<Met, IngestError> {
    let reader = Reader { epoch, context };
    let mut executables: Vec<ExecutableId> = epoch
        .executables
        .iter()
        .map(|wire| into.executable(reader.executable(wire)?).map_err(|e| reader.invalid(e)))
        .collect::<Result<_, _>>()?;
    let kernel_symbols = reader.hashes(&epoch.kernel_symbols)?;
    let mut of_kernel = std::collections::HashSet::new();
    for (wire, &id) in epoch.executables.iter().zip(&executables) {
        into.unwind_missing(id, reader.reason(wire.unwind_missing)?);
        if matches!(into.executable_of(id), Executable::File { key: None, .. }) {
            into.ambiguous(id);
        }
        if let Some(symbols) = reader.hash(&wire.symbols)?
            && of_kernel.insert(symbols)
        {
            into.kernel_symbols(symbols, &kernel_symbols);
        }
    }
    // The kernel's with its modules, and BPF programs.
    if of_kernel.len() > 2 {
        return Err(reader.invalid("symbols of more than one kernel"));
    }
    let mut processes = Vec::with_capacity(epoch.processes.len());
    let mut writing = Vec::with_capacity(epoch.processes.len());
    for wire in &epoch.processes {
        let process = reader.process(wire)?;
        // A jitdump may be written long after the code it is about, with the time of that.
        let writes = process.perf_map.grew() || process.jitdump.first_size().is_some();
        let size = process.perf_map.first_size();
        let id = into.process(process).map_err(|e| reader.invalid(e))?;
        writing.push(match (writes, size) {
            (true, _) if into.has_room_for_times() => Writing::Now,
            (false, Some(size)) => {
                Writing::Until(into.quiet_since(id, size, context.wall(epoch.end_ns)))
            }
            _ => Writing::Until(0),
        });
        processes.push(id);
    }
    let mut mapped = Vec::with_capacity(epoch.mappings.len());
    for wire in &epoch.mappings {
        let mapping = Mapping {
            process: reader.at(&processes, wire.process, "process")?,
            executable: reader.at(&executables, wire.executable, "executable")?,
            start: UserAddr(wire.start),
            length: wire.length,
            file_offset: FileOffset(wire.file_offset),
            since_ns: context.known(wire.since_ns),
        };
        if wire.start.checked_add(wire.length).is_none() {
            return Err(reader.invalid("a mapping ends beyond the address space"));
        }
        mapped.push((mapping.executable, epoch.processes[wire.process as usize].pid));
        into.mapping(mapping).map_err(|e| reader.invalid(e))?;
    }
    let threads: Vec<(ThreadId, u32)> = epoch
        .threads
        .iter()
        .map(|wire| {
            let process = reader.at(&processes, wire.process, "process")?;
            let thread = Thread { process, tid: wire.tid, comm: reader.string(wire.comm)? };
            into.thread(thread).map(|id| (id, wire.process)).map_err(|e| reader.invalid(e))
        })
        .collect::<Result<_, _>>()?;
    let nowhere = executables.len() as u32;
    let nodes = reader.nodes(executables.len(), nowhere)?;
    if nodes.iter().any(|node| node.executable == nowhere) {
        executables.push(into.executable(Executable::Unmapped).map_err(|e| reader.invalid(e))?);
    }
    let mut stacks = Stacks::new(reader, nodes, executables.clone())?;
    let mut keys = Vec::new();
    // Label sets by what they say.
    let mut waits = std::collections::HashMap::new();
    for samples in &epoch.samples {
        let count = samples.time_delta.len();
        let columns = [&samples.thread, &samples.cpu, &samples.user_stack, &samples.kernel_stack];
        if columns.iter().any(|column| column.len() != count)
            || !(samples.value.len() == count || samples.value.len() == 1)
            || [&samples.wait_state, &samples.wait_open]
                .iter()
                .any(|column| column.len() > 1 && column.len() != count)
        {
            return Err(reader.ragged("samples"));
        }
        let series = reader.at(&context.series, samples.event, "event")?;
        let mut time_ns = epoch.start_ns;
        for index in 0..count {
            time_ns = time_ns.wrapping_add(samples.time_delta[index] as u64);
            let (thread, process) = reader.at(&threads, samples.thread[index], "thread")?;
            let seen_ns = writing[process as usize].seen(context.wall(time_ns));
            let of = (processes[process as usize], seen_ns);
            keys.push(SampleKey {
                series,
                thread,
                user: stacks.stack(samples.user_stack[index], of, into)?,
                kernel: stacks.stack(samples.kernel_stack[index], of, into)?,
                labels: match samples.wait(index) {
                    Some(wait) => match waits.get(&wait) {
                        Some(&known) => known,
                        None => {
                            let new = into.labels(of_wait(wait)).map_err(|e| reader.invalid(e))?;
                            waits.insert(wait, new);
                            new
                        }
                    },
                    None => 0,
                },
            });
        }
    }
    // Nothing can be wrong from here on: an epoch counts whole or not at all.
    let mut keys = keys.into_iter();
    for samples in &epoch.samples {
        let mut time_ns = epoch.start_ns;
        for ((index, delta), key) in samples.time_delta.iter().enumerate().zip(&mut keys) {
            let value = samples.value.get(index).or(samples.value.first()).copied().unwrap_or(0);
            time_ns = time_ns.wrapping_add(*delta as u64);
            let at = Some(context.wall(time_ns));
            into.sample(key, value, at, Some(samples.cpu[index])).map_err(|e| reader.invalid(e))?;
        }
    }
    for lost in &epoch.lost {
        into.lost(lost.reason().into(), lost.count, lost.samples);
    }
    let tables = epoch.unwind_tables.unwrap_or_default();
    into.unwind_tables(UnwindTables {
        loaded: tables.loaded,
        compiled: tables.compiled,
        compile_ns: tables.compile_ns,
        failed: tables.failed,
        evicted: tables.evicted,
    });
    into.span(context.wall(epoch.start_ns), context.wall(epoch.end_ns));
    Ok(Met { executables, mapped })
}

/// How the thread waited, and which part of the wait is outside the capture.
fn of_wait(wait: Wait) -> Vec<Label> {
    let label = |key: &str, value: &str| Label {
        key: key.to_owned(),
        value: LabelValue::Text(value.to_owned()),
    };
    let open = match (wait.began_before, wait.goes_on) {
        (false, false) => None,
        (true, false) => Some("start"),
        (false, true) => Some("end"),
        (true, true) => Some("start,end"),
    };
    let mut labels = vec![label("state", wait.state.name())];
    labels.extend(open.map(|open| label("open", open)));
    labels
}

/// What is lost after the last epoch, or in epochs that are not there: totals at the end less what
/// the epochs said.
pub fn end(end: &v1::End, said: &[v1::Lost], into: &mut Builder) {
    into.taken(Some(end.taken));
    for total in &end.lost {
        let before: u64 =
            said.iter().filter(|lost| lost.reason == total.reason).map(|lost| lost.count).sum();
        if total.count > before {
            into.lost(total.reason().into(), total.count - before, total.samples);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One process, one thread, a stack of a caller and a leaf, two samples.
    fn sample() -> v1::Epoch {
        let mut executable =
            v1::Executable { path: 1, build_id: vec![1; 20], ..Default::default() };
        executable.set_kind(v1::ExecutableKind::File);
        let mut stack = v1::Stack { node: 2, ..Default::default() };
        stack.set_end(v1::EndReason::Root);
        v1::Epoch {
            strings: vec![String::new(), "/bin/x".into(), "x".into()],
            executables: vec![executable],
            processes: vec![v1::Process { pid: 7, comm: 2, ..Default::default() }],
            mappings: vec![v1::Mapping { start: 0x1000, length: 0x1000, ..Default::default() }],
            threads: vec![v1::Thread { process: 0, tid: 8, comm: 2 }],
            nodes: Some(v1::StackNodes {
                parent: vec![0, 1],
                executable: vec![0, 0],
                offset_delta: vec![0x100, -0x10],
                kind: vec![1, 0],
            }),
            stacks: vec![stack],
            samples: vec![v1::Samples {
                time_delta: vec![1, 1],
                thread: vec![0, 0],
                cpu: vec![0, 1],
                user_stack: vec![1, 1],
                kernel_stack: vec![0, 0],
                value: vec![10],
                event: 0,
                ..Default::default()
            }],
            start_ns: 1000,
            end_ns: 5000,
            ..Default::default()
        }
    }

    fn build(wire: &v1::Epoch) -> Result<crate::profile::Profile, IngestError> {
        let mut builder = Builder::new();
        let events = vec![Event::cpu_clock()];
        let (monotonic_ns, realtime_ns) = (1000, 9000);
        let clock = &mut Context { monotonic_ns, realtime_ns, events, ..Context::default() };
        clock.begin(&mut builder, 0, Origin::default());
        epoch(wire, clock, &mut builder)?;
        epoch(wire, clock, &mut builder)?;
        Ok(builder.build())
    }

    #[test]
    fn epochs_merge_and_callers_are_moved_into_their_call() {
        let profile = build(&sample()).unwrap();
        assert_eq!(
            (profile.samples.len(), profile.samples[0].count, profile.samples[0].value),
            (1, 4, 40)
        );
        let offsets: Vec<u64> = profile
            .frames(profile.samples[0].key)
            .map(|id| profile.locations[id.index()].address.number())
            .collect();
        assert_eq!(offsets, [0xf0, 0xff], "leaf first and exact, then the caller less one");
        assert_eq!((profile.start_ns, profile.duration_ns), (9000, 4000));
    }

    #[test]
    fn an_offset_that_is_none_costs_its_own_frame() {
        let mut wire = sample();
        // The caller's; the leaf's counts on from it.
        wire.nodes.as_mut().unwrap().offset_delta = vec![-0x1000, 0x10f0];
        let profile = build(&wire).unwrap();
        let frames = profile.frames(profile.samples[0].key);
        let offsets: Vec<u64> =
            frames.map(|id| profile.locations[id.index()].address.number()).collect();
        assert_eq!((offsets, profile.samples[0].count), (vec![0xf0, 0], 4));
    }

    #[test]
    fn indices_outside_their_table_are_refused() {
        let breaks: [fn(&mut v1::Epoch); 10] = [
            |e| e.executables[0].path = 9,
            |e| e.threads[0].process = 9,
            |e| e.mappings[0].executable = 9,
            |e| e.mappings[0].start = u64::MAX,
            |e| e.stacks[0].node = 9,
            |e| e.nodes.as_mut().unwrap().parent[1] = 2,
            |e| e.nodes.as_mut().unwrap().executable[1] = 9,
            |e| e.samples[0].thread[0] = 9,
            |e| e.samples[0].user_stack[0] = 9,
            |e| e.samples[0].event = 9,
        ];
        for (number, damage) in breaks.iter().enumerate() {
            let mut wire = sample();
            damage(&mut wire);
            assert!(build(&wire).is_err(), "case {number}");
        }
        let mut ragged = sample();
        ragged.samples[0].cpu.pop();
        assert_eq!(build(&ragged).unwrap_err(), IngestError::Ragged { epoch: 0, what: "samples" });
    }

    #[test]
    fn small_messages_of_very_many_frames_are_refused() {
        // One chain of 4,096 nodes, a stack at each: 8 million frames. Twice that is beyond any
        // collector.
        let wide = |processes: u32| {
            let mut wire = sample();
            let nodes = stacks::MAX_DEPTH;
            wire.nodes = Some(v1::StackNodes {
                parent: (0..nodes).collect(),
                executable: vec![0; nodes as usize],
                offset_delta: vec![1; nodes as usize],
                kind: vec![0; nodes as usize],
            });
            wire.stacks =
                (1..=nodes).map(|node| v1::Stack { node, ..Default::default() }).collect();
            wire.processes =
                (0..processes).map(|pid| v1::Process { pid, ..Default::default() }).collect();
            wire.threads = (0..processes)
                .map(|process| v1::Thread { process, ..Default::default() })
                .collect();
            let count = (nodes * processes) as usize;
            wire.samples = vec![v1::Samples {
                time_delta: vec![0; count],
                thread: (0..processes).flat_map(|thread| vec![thread; nodes as usize]).collect(),
                cpu: vec![0; count],
                user_stack: (0..processes).flat_map(|_| 1..=nodes).collect(),
                kernel_stack: vec![0; count],
                value: vec![1],
                event: 0,
                ..Default::default()
            }];
            let mut builder = Builder::new();
            let events = vec![Event::cpu_clock()];
            let mut context = Context { events, ..Context::default() };
            context.begin(&mut builder, 0, Origin::default());
            epoch(&wire, &context, &mut builder).map(drop)
        };
        wide(1).unwrap();
        let said = wide(2).unwrap_err().to_string();
        assert!(said.contains("deeper than any collector records"), "{said}");
    }

    #[test]
    fn losses_at_the_end_are_those_the_epochs_did_not_tell() {
        let mut builder = Builder::new();
        let lost =
            |count| v1::Lost { reason: v1::LostReason::RingFull.into(), count, samples: true };
        end(
            &v1::End { taken: 10, lost: vec![lost(5)], ..Default::default() },
            &[lost(3)],
            &mut builder,
        );
        let profile = builder.build();
        assert_eq!((profile.taken, profile.lost_samples()), (Some(10), 2));
    }
}
