//! One epoch in the making: interned definitions and columns of samples. Pure.
//!
//! In a steady state a sample costs two look-ups of its raw stacks and one push a column; only
//! stacks not seen in this epoch are normalized. Turned into messages by `wire.rs`.

use std::rc::Rc;

use rustc_hash::FxHashMap;
use stackwire_collector_ebpf::managed::{EVALUATOR, Entry};
use stackwire_collector_ebpf::{KernelEnd, SampleHeader, UserEnd};
use stackwire_model::{EndReason, ListEnd, UserAddr};

use crate::codes::Codes;
use crate::definitions::{MappingDef, Node, ProcessDef, Sample, SchedDef, ThreadDef, WakerDef};
use crate::host::kallsyms::{KernelLayout, WokenFrom};
use crate::late::Late;
use crate::managed::{self, UserStack};
use crate::normalize::{self, Frame, Stack};
use crate::process::executable::{Executable, Kind};
use crate::process::{Process, Processes};
use crate::sched::Done;
use crate::sources::record::{comm_bytes, comm_text};
use crate::waits::{Over, Part, Stacks, Taken, Waker};

/// The epoch.
#[derive(Debug, Default)]
pub struct Epoch {
    /// Executables referred to.
    pub executables: Vec<Rc<Executable>>,
    /// Processes referred to.
    pub processes: Vec<ProcessDef>,
    /// Mappings referred to.
    pub mappings: Vec<MappingDef>,
    /// Threads referred to.
    pub threads: Vec<ThreadDef>,
    /// The forest of frames.
    pub nodes: Vec<Node>,
    /// Leaf nodes (1 + index, 0 = no frames) with end reasons.
    pub stacks: Vec<(u32, EndReason)>,
    /// Samples by event, each in time order.
    pub series: Vec<Vec<Sample>>,
    /// Who ended waits.
    pub wakers: Vec<WakerDef>,
    /// By event, of its samples: 0 = nobody known, else 1 + index into [`Epoch::wakers`]. Shorter
    /// where nobody is known any more. No part of [`Sample`], which most have no use for it in.
    pub woken_by: Vec<Vec<u32>>,
    /// How processes and threads were scheduled.
    pub sched: Vec<SchedDef>,
    /// How frames of interpreters ended, and in how many samples.
    pub list_ends: FxHashMap<ListEnd, u64>,
    /// CPU time of processes without samples by their names, nanoseconds. `None`: nobody asks for
    /// CPU times.
    pub unsampled_cpu_ns: Option<FxHashMap<String, u64>>,

    oldest_late_ns: Option<u64>,
    executable_index: FxHashMap<u64, u32>,
    process_index: FxHashMap<u64, u32>,
    /// By pid, the last program that a process of this number has become.
    last_program: FxHashMap<u32, u32>,
    mapping_index: FxHashMap<(u32, UserAddr, UserAddr, u64), u32>,
    thread_index: FxHashMap<ThreadDef, u32>,
    node_index: FxHashMap<Node, u32>,
    stack_index: FxHashMap<(u32, EndReason), u32>,
    waker_index: FxHashMap<WakerDef, u32>,
    /// Raw addresses with what else their meaning depends on → stack (1 + index, 0 = none).
    seen: FxHashMap<Box<[u64]>, u32>,
    seen_words: usize,
    key: Vec<u64>,
}

/// Marks a kernel stack in the key of `seen`; image numbers never get there.
const KERNEL_STACK: u64 = u64::MAX;

impl Epoch {
    /// Adds a sample, of a wait or of an event of perf's.
    pub fn add(
        &mut self,
        header: &SampleHeader,
        user: UserStack<'_>,
        kernel: &[u64],
        taken: Taken,
        processes: &mut Processes,
        layout: &KernelLayout,
    ) {
        self.count_list(managed::end(header, user), taken.count);
        let (process, user) = self.user_stack(header, user, processes);
        let kernel = self.kernel_stack(header.kernel_end, kernel, processes, layout);
        self.push(header, process, (user, kernel), taken);
    }

    /// Adds a sample whose user stack was walked later than it was taken, by what was mapped in its
    /// process then.
    pub fn add_late(
        &mut self,
        sample: &Late,
        user: &[u64],
        codes: &Codes,
        processes: &mut Processes,
        layout: &KernelLayout,
    ) {
        let Late { header, kernel, list, process, .. } = sample;
        let managed = (!list.entries.is_empty()).then_some((&list.entries[..], codes));
        let user = UserStack { native: user, managed };
        self.add_then((header, process), user, kernel, Taken::ONE, processes, layout);
    }

    /// Adds a sample of a process as it was then.
    fn add_then(
        &mut self,
        (header, process): (&SampleHeader, &Process),
        user: UserStack<'_>,
        kernel: &[u64],
        taken: Taken,
        processes: &mut Processes,
        layout: &KernelLayout,
    ) {
        self.count_list(managed::end(header, user), taken.count);
        let unmapped = processes.executables().intern(Kind::Unmapped);
        // What is known of it now is more than what was known then.
        let now = processes.get(process.pid).filter(|now| now.image == process.image);
        let now = now.unwrap_or(process);
        let index = self.process(now);
        // It may have been met first where that is not known.
        self.processes[index as usize].host_pid = now.host_pid;
        let stacks = (
            self.stack_of((index, process), user, header.user_end, &unmapped),
            self.kernel_stack(header.kernel_end, kernel, processes, layout),
        );
        let oldest_ns = self.oldest_late_ns.get_or_insert(header.time_ns);
        *oldest_ns = header.time_ns.min(*oldest_ns);
        self.push(header, index, stacks, taken);
    }

    /// When it began, for which it has to be told when it was opened: samples that were added late
    /// may be older.
    #[must_use]
    pub fn start(&self, opened_ns: u64) -> u64 {
        self.oldest_late_ns.map_or(opened_ns, |late_ns| late_ns.min(opened_ns))
    }

    /// Puts samples that were added late where they belong.
    pub fn put_in_order(&mut self) {
        for (samples, woken_by) in self.series.iter_mut().zip(&mut self.woken_by) {
            if woken_by.is_empty() {
                samples.sort_by_key(|sample| sample.time_ns);
            } else if !samples.is_sorted_by_key(|sample| sample.time_ns) {
                woken_by.resize(samples.len(), 0);
                let mut both: Vec<_> = samples.drain(..).zip(woken_by.drain(..)).collect();
                both.sort_by_key(|(sample, _)| sample.time_ns);
                (*samples, *woken_by) = both.into_iter().unzip();
            }
        }
    }

    fn count_list(&mut self, end: Option<ListEnd>, samples: u32) {
        if let Some(end) = end {
            *self.list_ends.entry(end).or_default() += u64::from(samples);
        }
    }

    fn push(
        &mut self,
        header: &SampleHeader,
        process: u32,
        (user, kernel): (u32, u32),
        taken: Taken,
    ) {
        let thread = self.thread(ThreadDef { process, tid: header.tid, comm: header.comm });
        let event = usize::from(header.event);
        if self.series.len() <= event {
            self.series.resize_with(event + 1, Vec::new);
            self.woken_by.resize_with(event + 1, Vec::new);
        }
        if taken.waker != 0 {
            self.woken_by[event].resize(self.series[event].len(), 0);
            self.woken_by[event].push(taken.waker);
        }
        self.series[event].push(Sample {
            time_ns: header.time_ns,
            thread,
            cpu: header.cpu,
            user,
            kernel,
            value: header.period,
            count: taken.count,
            wait: taken.wait,
        });
    }

    /// Adds the parts of a wait. `then`: its process as it was then, where the user stack was
    /// walked later.
    pub fn add_wait(
        &mut self,
        over: &Over<'_>,
        then: Option<&Process>,
        codes: &Codes,
        processes: &mut Processes,
        layout: &KernelLayout,
    ) {
        let waker = over.waker.as_ref().map_or(0, |waker| 1 + self.waker(waker, processes, layout));
        let Stacks { user, list, kernel } = over.stacks;
        let user = UserStack { native: user, managed: (!list.is_empty()).then_some((list, codes)) };
        for Part { header, taken } in &over.parts {
            let taken = Taken { waker, ..*taken };
            match then {
                Some(process) => {
                    self.add_then((header, process), user, kernel, taken, processes, layout);
                }
                None => self.add(header, user, kernel, taken, processes, layout),
            }
        }
    }

    fn waker(
        &mut self,
        waker: &Waker<'_>,
        processes: &mut Processes,
        layout: &KernelLayout,
    ) -> u32 {
        let Waker { header, stacks } = waker;
        let waker = match layout.woken_from(stacks.kernel) {
            WokenFrom::Interrupt(ran) => {
                let kernel = self.kernel_stack(KernelEnd::Complete as u8, ran, processes, layout);
                WakerDef::Interrupt { kernel }
            }
            WokenFrom::Thread(ran) => {
                // Of another process's thread there is its name alone.
                let (process, user) = match header.start_boottime_ns {
                    0 => (0, 0),
                    _ => {
                        let user = UserStack::native(stacks.user);
                        let (process, user) = self.user_stack(header, user, processes);
                        (1 + process, user)
                    }
                };
                let kernel = self.kernel_stack(header.kernel_end, ran, processes, layout);
                let &SampleHeader { pid, tid, comm, .. } = header;
                WakerDef::Thread { pid, tid, comm, process, user, kernel }
            }
        };
        intern(&mut self.waker_index, &mut self.wakers, waker, waker)
    }

    /// The process a user stack is of, and the stack.
    fn user_stack(
        &mut self,
        header: &SampleHeader,
        user: UserStack<'_>,
        processes: &mut Processes,
    ) -> (u32, u32) {
        let unmapped = processes.executables().intern(Kind::Unmapped);
        let process = processes.sampled(header.pid, header.start_boottime_ns, header.cgroup_id);
        if header.host_pid != 0 {
            process.host_pid = header.host_pid;
        }
        let index = self.process(process);
        // It may have been met first where that is not known.
        self.processes[index as usize].host_pid = process.host_pid;
        let certain = process.certain(header.time_ns, user.native);
        let (user, user_end) = match user.native.get(..certain) {
            Some(native) if certain < user.native.len() => {
                (UserStack { native, ..user }, UserEnd::TablesReplaced as u8)
            }
            _ => (user, header.user_end),
        };
        (index, self.stack_of((index, process), user, user_end, &unmapped))
    }

    fn stack_of(
        &mut self,
        (index, process): (u32, &Process),
        user: UserStack<'_>,
        user_end: u8,
        unmapped: &Rc<Executable>,
    ) -> u32 {
        let version = u64::from(process.version) << 8 | u64::from(user_end);
        let entries = user.managed.map_or(&[][..], |(entries, _)| entries);
        let of = (process.pid, process.start_ns);
        // Of functions whose names come later they are put together again then.
        let is_final = || user.managed.is_none_or(|(entries, codes)| codes.knows(of, entries));
        let key = (user.native, entries);
        self.stack(&[process.image, version], key, is_final, |epoch| {
            let mut stack = normalize::user(process, user.native, user_end, unmapped)?;
            if let Some((entries, codes)) = user.managed {
                managed::insert(codes, of, entries, &mut stack);
            }
            epoch.define_mappings(index, &stack.frames);
            Some(stack)
        })
    }

    fn kernel_stack(
        &mut self,
        end: u8,
        kernel: &[u64],
        processes: &mut Processes,
        layout: &KernelLayout,
    ) -> u32 {
        let executables = processes.executables();
        self.stack(
            &[KERNEL_STACK, end.into()],
            (kernel, &[]),
            || true,
            |_| normalize::kernel(layout, kernel, end, executables),
        )
    }

    /// Adds how somebody was scheduled.
    pub fn add_sched(&mut self, done: &Done, processes: &mut Processes) {
        let stats = done.stats.clone();
        let Some(of) = done.of else {
            self.sched.push(SchedDef { process: 0, thread: 0, stats });
            return;
        };
        let program = processes.program_of(&of);
        let process = self.process(&program);
        let comm = if of.comm[0] == 0 { comm_bytes(program.comm.as_bytes()) } else { of.comm };
        let thread = of.tid.map(|tid| self.thread(ThreadDef { process, tid, comm }));
        let thread = thread.map_or(0, |thread| thread + 1);
        self.sched.push(SchedDef { process: process + 1, thread, stats });
    }

    /// Rough bytes held, to cut epochs before they grow large.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.seen_words * 8
            + (self.nodes.len() + self.mappings.len() + self.threads.len()) * 64
            + self.processes.len() * 192
            + self.wakers.len() * size_of::<WakerDef>() * 2
            + self.series.iter().map(Vec::len).sum::<usize>() * size_of::<Sample>()
    }

    /// How many events the samples stand for, of all kinds.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.series.iter().flatten().map(|sample| u64::from(sample.count)).sum()
    }

    /// Whether an image ran anonymous memory in this epoch.
    #[must_use]
    pub fn runs_anonymous(&self, image: u64) -> bool {
        let index = self.process_index.get(&image);
        index.is_some_and(|&index| self.processes[index as usize].runs_anonymous)
    }

    /// Name of a thread as text.
    #[must_use]
    pub fn thread_comm(thread: &ThreadDef) -> String {
        comm_text(&thread.comm)
    }

    fn stack(
        &mut self,
        context: &[u64; 2],
        (addresses, entries): (&[u64], &[Entry]),
        is_final: impl FnOnce() -> bool,
        normalize: impl FnOnce(&mut Self) -> Option<Stack>,
    ) -> u32 {
        let mut key = std::mem::take(&mut self.key);
        key.clear();
        key.extend_from_slice(context);
        key.extend_from_slice(addresses);
        for entry in entries {
            key.push(entry.code);
            // Of an evaluator it is where the stack was.
            if entry.code & EVALUATOR == 0 {
                key.push(entry.rest);
            }
        }
        let index = match self.seen.get(key.as_slice()) {
            Some(&index) => index,
            None => {
                let index = normalize(self).map_or(0, |stack| 1 + self.intern(&stack));
                if is_final() {
                    self.seen_words += key.len() + 4;
                    self.seen.insert(key.as_slice().into(), index);
                }
                index
            }
        };
        self.key = key;
        index
    }

    fn intern(&mut self, stack: &Stack) -> u32 {
        let mut parent = 0;
        for frame in stack.frames.iter().rev() {
            let executable = self.executable(&frame.executable);
            let node = Node { parent, executable, address: frame.address, kind: frame.kind };
            parent = 1 + intern(&mut self.node_index, &mut self.nodes, node, node);
        }
        let stack = (parent, stack.end);
        intern(&mut self.stack_index, &mut self.stacks, stack, stack)
    }

    fn executable(&mut self, executable: &Rc<Executable>) -> u32 {
        intern(
            &mut self.executable_index,
            &mut self.executables,
            executable.id,
            Rc::clone(executable),
        )
    }

    /// Notes that a process ended, if the stream knows it.
    pub fn ended(&mut self, process: &Process) {
        if process.sampled {
            let index = self.process(process);
            self.processes[index as usize].end_ns = process.end_ns;
        }
    }

    /// The last program of a process that is in [`Epoch::processes`].
    #[must_use]
    pub fn program_of(&self, pid: u32, start_ns: u64) -> Option<usize> {
        let index = *self.last_program.get(&pid)? as usize;
        (self.processes[index].start_ns == start_ns).then_some(index)
    }

    /// Adds CPU time that a process used.
    pub fn add_cpu_time(&mut self, process: &Process, used_ns: u64) {
        let index = self.process(process);
        self.processes[index as usize].cpu_ns += used_ns;
    }

    fn process(&mut self, process: &Process) -> u32 {
        if let Some(&index) = self.process_index.get(&process.image) {
            return index;
        }
        let definition = ProcessDef {
            image: process.image,
            pid: process.pid,
            host_pid: process.host_pid,
            start_ns: process.start_ns,
            comm: process.comm.clone(),
            generation: process.generation,
            cgroup_id: process.cgroup.id,
            cgroup_path: process.cgroup.path.clone(),
            parent: process.parent,
            since_ns: if process.witnessed { process.since_ns } else { 0 },
            end_ns: process.end_ns,
            runs_anonymous: false,
            cpu_ns: 0,
        };
        self.last_program.insert(process.pid, self.processes.len() as u32);
        intern(&mut self.process_index, &mut self.processes, process.image, definition)
    }

    fn thread(&mut self, thread: ThreadDef) -> u32 {
        intern(&mut self.thread_index, &mut self.threads, thread, thread)
    }

    fn define_mappings(&mut self, process: u32, frames: &[Frame]) {
        for frame in frames {
            let Some(mapping) = &frame.mapping else { continue };
            if frame.executable.kind == Kind::Anonymous {
                self.processes[process as usize].runs_anonymous = true;
            }
            let executable = self.executable(&mapping.executable);
            let definition = MappingDef {
                process,
                executable,
                start: mapping.start,
                length: mapping.end.0 - mapping.start.0,
                file_offset: mapping.file_offset,
                since_ns: mapping.since_ns,
            };
            let key = (process, mapping.start, mapping.end, mapping.executable.id);
            intern(&mut self.mapping_index, &mut self.mappings, key, definition);
        }
    }
}

/// Index of `key` in `table`, where `value` is pushed if it is new.
fn intern<K: std::hash::Hash + Eq, V>(
    index: &mut FxHashMap<K, u32>,
    table: &mut Vec<V>,
    key: K,
    value: V,
) -> u32 {
    *index.entry(key).or_insert_with(|| {
        table.push(value);
        (table.len() - 1) as u32
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::side_band::{Change, Event, Mapped};

    #[test]
    fn equal_stacks_are_stored_once_and_share_their_callers() {
        let mut processes = Processes::new(None, false);
        let pid = 4_000_001;
        let exec = Change::Comm { tid: pid, comm: "x".into(), exec: true };
        processes.apply(&Event { time_ns: 0, pid, change: exec });
        let mapped = Mapped {
            start: UserAddr(0x1000),
            length: 0x1000,
            path: "/x".into(),
            ..Mapped::default()
        };
        processes.apply(&Event { time_ns: 0, pid, change: Change::Map(mapped) });
        let header = SampleHeader {
            pid,
            tid: pid,
            start_boottime_ns: 1,
            period: 10,
            ..SampleHeader::default()
        };
        let mut epoch = Epoch::default();
        let layout = KernelLayout::default();
        for stack in [[0x1001, 0x1100, 0x1200], [0x1002, 0x1100, 0x1200], [0x1001, 0x1100, 0x1200]]
        {
            let stack = UserStack::native(&stack);
            epoch.add(&header, stack, &[], Taken::ONE, &mut processes, &layout);
        }
        let samples = &epoch.series[0];
        assert_eq!((samples.len(), epoch.samples()), (3, 3));
        assert_eq!(epoch.stacks.len(), 2);
        assert_eq!(epoch.nodes.len(), 4, "two leaves over one caller over one root");
        assert_eq!((samples[0].user, samples[0].kernel), (samples[2].user, 0));
        assert_eq!((epoch.mappings.len(), epoch.processes.len(), epoch.threads.len()), (1, 1, 1));
    }

    #[test]
    fn who_ended_a_wait_stays_with_it_where_waits_come_late() {
        let mut epoch = Epoch::default();
        let mut add = |time_ns, waker| {
            let header = SampleHeader { time_ns, ..SampleHeader::default() };
            epoch.push(&header, 0, (0, 0), Taken { waker, ..Taken::ONE });
        };
        for (time_ns, waker) in [(2, 0), (4, 7), (5, 0), (1, 0), (3, 9), (6, 0)] {
            add(time_ns, waker);
        }
        epoch.put_in_order();
        let times: Vec<_> = epoch.series[0].iter().map(|sample| sample.time_ns).collect();
        assert_eq!(
            (times, &epoch.woken_by[0][..]),
            (vec![1, 2, 3, 4, 5, 6], &[0, 0, 9, 7, 0, 0][..])
        );
    }
}
