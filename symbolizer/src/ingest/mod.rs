//! Wire → profile: the only file of the symbolizer that takes messages apart. What is malformed is
//! rejected here, once. Pure.
//!
//! A whole epoch is checked while it is added. An epoch that does not hold together is refused, and
//! the error names the place that is wrong. What was added of it before is harmless: entries of
//! tables, no samples.

mod greeting;
mod service;
mod stacks;
mod tables;
mod waits;

use std::cell::Cell;

use stackwire_model::{FileOffset, UserAddr};
use stackwire_proto::v1;

pub use self::greeting::{Context, hello};
use self::stacks::{FRAME_BYTES, Stacks};
use self::tables::{MAX_NAMES, Reader};
use self::waits::Waits;

use crate::profile::{
    Builder, Executable, ExecutableId, Mapping, SampleKey, Taken, Thread, ThreadId, UnwindTables,
    Who,
};

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
    /// Bytes of names of its entries, however often they share one.
    names: usize,
    /// Frames it made.
    frames: u64,
}

impl Met {
    /// Bytes it takes in a profile beyond what it took decoded.
    #[must_use]
    pub fn memory(&self) -> u64 {
        (self.names as u64).saturating_add(self.frames.saturating_mul(FRAME_BYTES))
    }
}

/// Adds an epoch to a profile.
///
/// # Errors
/// See [`IngestError`].
pub fn epoch(epoch: &v1::Epoch, context: &Context, into: &mut Builder) -> Result<Met, IngestError> {
    let (start, end) = (context.wall(epoch.start_ns), context.wall(epoch.end_ns));
    if !into.takes_span(start, end) {
        return Ok(Met::default());
    }
    let names_left = &Cell::new(MAX_NAMES);
    let reader = Reader { epoch, context, names_left };
    let mut executables: Vec<ExecutableId> = epoch
        .executables
        .iter()
        .map(|wire| into.executable(reader.executable(wire)?).map_err(|e| reader.invalid(e)))
        .collect::<Result<_, _>>()?;
    let kernel_symbols = reader.hashes(&epoch.kernel_symbols)?;
    let mut of_kernel = std::collections::HashSet::new();
    for (wire, &id) in epoch.executables.iter().zip(&executables) {
        into.unwind_missing(id, reader.reason(wire.unwind_missing)?);
        if let Some(why) = reader.reason(wire.functions_missing)? {
            into.functions_missing(id, why);
        }
        if wire.go_length > 0 {
            into.go_code(id, wire.go_start, wire.go_length);
        }
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
    let is_taken: Vec<bool> = threads.iter().map(|(id, _)| into.takes_thread(*id)).collect();
    let nowhere = executables.len() as u32;
    let nodes = reader.nodes(executables.len(), nowhere)?;
    if nodes.iter().any(|node| node.executable == nowhere) {
        executables.push(into.executable(Executable::Unmapped).map_err(|e| reader.invalid(e))?);
    }
    let mut stacks = Stacks::new(reader, nodes, executables.clone())?;
    let mut keys = Vec::new();
    let mut waits = Waits::new(reader)?;
    for samples in &epoch.samples {
        let count = samples.time_delta.len();
        let columns = [&samples.thread, &samples.cpu, &samples.user_stack, &samples.kernel_stack];
        if columns.iter().any(|column| column.len() != count)
            || !(samples.value.len() == count || samples.value.len() == 1)
            || [
                samples.wait_state.len(),
                samples.wait_open.len(),
                samples.count.len(),
                samples.waker.len(),
            ]
            .iter()
            .any(|&length| length > 1 && length != count)
        {
            return Err(reader.ragged("samples"));
        }
        let series = reader.at(&context.series, samples.event, "event")?;
        let mut time_ns = epoch.start_ns;
        for index in 0..count {
            time_ns = time_ns.wrapping_add(samples.time_delta[index] as u64);
            let (thread, process) = reader.at(&threads, samples.thread[index], "thread")?;
            if !is_taken[samples.thread[index] as usize] || !into.takes_time(context.wall(time_ns))
            {
                keys.push(None);
                continue;
            }
            let seen_ns = writing[process as usize].seen(context.wall(time_ns));
            let of = (processes[process as usize], seen_ns);
            let waker = waits.waker(samples, index)?;
            let labels = match (samples.wait(index), waker) {
                (None, _) => 0,
                (Some(wait), None) => waits.labels(wait, None, into)?,
                (Some(wait), Some((number, waker))) => {
                    // Without a process there is a kernel stack alone, which means the same in all
                    // of them.
                    let at = waker.process.saturating_sub(1);
                    let process = reader.at(&processes, at, "process")?;
                    let of = (process, writing[at as usize].seen(context.wall(time_ns)));
                    let user = if waker.process == 0 { 0 } else { waker.user_stack };
                    let user = stacks.stack(user, of, into)?;
                    let kernel = stacks.stack(waker.kernel_stack, of, into)?;
                    waits.labels(wait, Some((number, user, kernel)), into)?
                }
            };
            keys.push(Some(SampleKey {
                series,
                thread,
                user: stacks.stack(samples.user_stack[index], of, into)?,
                kernel: stacks.stack(samples.kernel_stack[index], of, into)?,
                labels,
            }));
        }
    }
    let mut sched = Vec::with_capacity(epoch.sched.len());
    for wire in &epoch.sched {
        let process = wire.process.checked_sub(1);
        let process = process.map(|index| reader.at(&processes, index, "process")).transpose()?;
        let thread = wire.thread.checked_sub(1);
        let thread = thread.map(|index| reader.at(&threads, index, "thread")).transpose()?;
        let who = match (process, thread) {
            (_, Some((thread, _))) => Who::Thread(thread),
            (Some(process), None) => Who::Process(process),
            (None, None) => Who::TheRest,
        };
        sched.push(into.takes(who).then_some(who));
    }
    let unsampled = epoch.cpu_times.as_ref().map(|times| {
        let used = times.unsampled.iter();
        used.map(|used| Ok((reader.string(used.comm)?, used.ns))).collect::<Result<Vec<_>, _>>()
    });
    let unsampled = unsampled.transpose()?;
    // Nothing can be wrong from here on: an epoch counts whole or not at all.
    into.unsampled_cpu(unsampled);
    for (&process, wire) in processes.iter().zip(&epoch.processes) {
        into.cpu_time(process, wire.cpu_ns);
    }
    let mut keys = keys.into_iter();
    for samples in &epoch.samples {
        let mut time_ns = epoch.start_ns;
        for ((index, delta), key) in samples.time_delta.iter().enumerate().zip(&mut keys) {
            let value = samples.value.get(index).or(samples.value.first()).copied().unwrap_or(0);
            time_ns = time_ns.wrapping_add(*delta as u64);
            let Some(key) = key else {
                into.leave_out(samples.events(index));
                continue;
            };
            let taken = Taken {
                count: samples.events(index),
                value,
                time_ns: Some(context.wall(time_ns)),
                cpu: Some(samples.cpu[index]),
            };
            into.sample(key, taken).map_err(|e| reader.invalid(e))?;
        }
    }
    for (who, wire) in sched.into_iter().zip(&epoch.sched) {
        if let Some(who) = who {
            into.sched(who, &context.sched(wire));
        }
    }
    for lost in &epoch.lost {
        into.lost(lost.reason().into(), lost.count, lost.samples);
    }
    for ends in &epoch.list_ends {
        into.list_ends(ends.end().into(), ends.samples);
    }
    let tables = epoch.unwind_tables.unwrap_or_default();
    into.unwind_tables(UnwindTables {
        loaded: tables.loaded,
        compiled: tables.compiled,
        compile_ns: tables.compile_ns,
        failed: tables.failed,
        evicted: tables.evicted,
    });
    into.span(start, end);
    let names = MAX_NAMES - names_left.get();
    Ok(Met { executables, mapped, names, frames: stacks.made })
}

/// What is lost after the last epoch, or in epochs that are not there: totals at the end less what
/// the epochs said.
pub fn end(end: &v1::End, said: &[v1::Lost], into: &mut Builder) {
    into.taken(Some(end.taken));
    for python in &end.python {
        if let Some(outcome) = Option::from(python.outcome()) {
            into.python(outcome, python.processes);
        }
    }
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

    fn begun(into: &mut Builder) -> Context {
        let (clock_monotonic_ns, clock_realtime_ns) = (1000, 9000);
        let wire = v1::Hello { clock_monotonic_ns, clock_realtime_ns, ..Default::default() };
        let (origin, mut context) = hello(&wire);
        context.begin(into, 0, origin);
        context
    }

    fn build(wire: &v1::Epoch) -> Result<crate::profile::Profile, IngestError> {
        let mut builder = Builder::new();
        let context = begun(&mut builder);
        epoch(wire, &context, &mut builder)?;
        epoch(wire, &context, &mut builder)?;
        Ok(builder.build())
    }

    #[test]
    fn a_long_name_that_many_share_is_refused() {
        let mut wire = sample();
        wire.strings.push("x".repeat(MAX_NAMES / 8));
        let thread = v1::Thread { comm: 3, ..wire.threads[0] };
        wire.threads.extend(vec![thread; 7]);
        build(&wire).unwrap();
        wire.threads.extend(vec![thread; 2]);
        let said = build(&wire).unwrap_err().to_string();
        assert!(said.contains("its names have more than"), "{said}");
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
    fn counters_of_hosts_that_have_others_keep_their_names() {
        let counter = |name: &str, missing: &str| v1::Counter {
            name: name.to_owned(),
            missing: missing.to_owned(),
        };
        let mut builder = Builder::new();
        // The first has no cycles, and its sums begin with page faults.
        for (number, (missing, sums)) in
            [("none", vec![7]), ("", vec![100, 9])].into_iter().enumerate()
        {
            let counters = vec![counter("cycles", missing), counter("page-faults", "")];
            let sampling = v1::Sampling { counters, ..Default::default() };
            let wire = v1::Hello { sampling: Some(sampling), ..Default::default() };
            let (origin, mut context) = hello(&wire);
            context.begin(&mut builder, number, origin);
            let sum = |value| v1::CounterSum { value, ..Default::default() };
            let counters = sums.into_iter().map(sum).collect();
            let sched = vec![v1::SchedStats { counters, ..Default::default() }];
            let wire = v1::Epoch { sched, ..Default::default() };
            epoch(&wire, &context, &mut builder).unwrap();
        }
        let profile = builder.build();
        let names: Vec<_> = profile.counters.iter().map(|it| it.name.as_str()).collect();
        let stats = &profile.sched[&Who::TheRest];
        let values: Vec<_> = stats.counters.iter().map(|sum| sum.value).collect();
        assert_eq!((names, values), (vec!["cycles", "page-faults"], vec![100, 16]));
        assert!(profile.counters.iter().all(|it| it.missing.is_none()));
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
            let context = begun(&mut builder);
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
