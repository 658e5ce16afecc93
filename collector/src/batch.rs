//! One epoch in the making: interned definitions and columns of samples. Pure.
//!
//! In a steady state a sample costs two look-ups of its raw stacks and one push a column; only
//! stacks not seen in this epoch are normalized. Turned into messages by `wire.rs`.

use std::rc::Rc;

use rustc_hash::FxHashMap;
use stackwire_collector_ebpf::{SampleHeader, UserEnd};
use stackwire_model::{Address, EndReason, FileOffset, UserAddr, Wait};

use crate::host::kallsyms::KernelLayout;
use crate::normalize::{self, Frame, FrameKind, Stack};
use crate::process::executable::{Executable, Kind};
use crate::process::{Process, Processes};
use crate::sources::record::comm_text;
use crate::waits::{Part, Stacks};

/// A process with samples in this epoch, as it was at the first of them; or one that ended in it.
#[derive(Clone, Debug, Default)]
pub struct ProcessDef {
    /// Image the definition is of.
    pub image: u64,
    /// Process id.
    pub pid: u32,
    /// Start in boottime nanoseconds.
    pub start_ns: u64,
    /// Name of the main thread.
    pub comm: String,
    /// Counts images.
    pub generation: u32,
    /// cgroup v2 id.
    pub cgroup_id: u64,
    /// Path of its cgroup.
    pub cgroup_path: Option<Rc<str>>,
    /// The process that made it; 0: unknown.
    pub parent: u32,
    /// When it became this, monotonic nanoseconds; 0: nobody saw it.
    pub since_ns: u64,
    /// When it ended, monotonic nanoseconds; 0: it has not.
    pub end_ns: u64,
    /// Frames lie in anonymous memory: a perf-map may name them.
    pub runs_anonymous: bool,
}

/// A mapping some frame lies in.
#[derive(Clone, Copy, Debug)]
pub struct MappingDef {
    /// Index into [`Epoch::processes`].
    pub process: u32,
    /// Index into [`Epoch::executables`].
    pub executable: u32,
    /// First address.
    pub start: UserAddr,
    /// Bytes.
    pub length: u64,
    /// Offset in the file of the first address.
    pub file_offset: FileOffset,
    /// Since when, monotonic nanoseconds; 0: as long as the process.
    pub since_ns: u64,
}

/// A thread with samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ThreadDef {
    /// Index into [`Epoch::processes`].
    pub process: u32,
    /// Thread id.
    pub tid: u32,
    /// Name, NUL-padded.
    pub comm: [u8; 16],
}

/// A frame and, as its parent, the frame that called it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    /// 0 = none, else 1 + index of the parent.
    pub parent: u32,
    /// Index into [`Epoch::executables`].
    pub executable: u32,
    /// Address in the executable.
    pub address: Address,
    /// How to read the address.
    pub kind: FrameKind,
}

/// A sample.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub time_ns: u64,
    /// Index into [`Epoch::threads`].
    pub thread: u32,
    /// CPU.
    pub cpu: u32,
    /// 0 = none, else 1 + index into [`Epoch::stacks`].
    pub user: u32,
    /// Likewise.
    pub kernel: u32,
    /// Weight.
    pub value: u64,
    /// The wait it is a part of, if it is of one.
    pub wait: Option<Wait>,
}

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

    executable_index: FxHashMap<u64, u32>,
    process_index: FxHashMap<u64, u32>,
    mapping_index: FxHashMap<(u32, UserAddr, UserAddr, u64), u32>,
    thread_index: FxHashMap<ThreadDef, u32>,
    node_index: FxHashMap<Node, u32>,
    stack_index: FxHashMap<(u32, EndReason), u32>,
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
        user: &[u64],
        kernel: &[u64],
        wait: Option<Wait>,
        processes: &mut Processes,
        layout: &KernelLayout,
    ) {
        let unmapped = processes.executables().intern(Kind::Unmapped);
        let process = processes.sampled(header.pid, header.start_boottime_ns, header.cgroup_id);
        let process_index = self.process(process);
        let thread =
            self.thread(ThreadDef { process: process_index, tid: header.tid, comm: header.comm });

        let certain = process.certain(header.time_ns, user);
        let (user, user_end) = match user.get(..certain) {
            Some(cut) if certain < user.len() => (cut, UserEnd::TablesReplaced as u8),
            _ => (user, header.user_end),
        };
        let version = u64::from(process.version) << 8 | u64::from(user_end);
        let user = self.stack(&[process.image, version], user, |epoch| {
            let stack = normalize::user(process, user, user_end, &unmapped)?;
            epoch.define_mappings(process_index, &stack.frames);
            Some(stack)
        });
        let executables = processes.executables();
        let kernel = self.stack(&[KERNEL_STACK, header.kernel_end.into()], kernel, |_| {
            normalize::kernel(layout, kernel, header.kernel_end, executables)
        });
        let event = usize::from(header.event);
        if self.series.len() <= event {
            self.series.resize_with(event + 1, Vec::new);
        }
        self.series[event].push(Sample {
            time_ns: header.time_ns,
            thread,
            cpu: header.cpu,
            user,
            kernel,
            value: header.period,
            wait,
        });
    }

    /// Adds the parts of a wait.
    pub fn add_wait(
        &mut self,
        parts: &[Part],
        stacks: &Stacks,
        processes: &mut Processes,
        layout: &KernelLayout,
    ) {
        for Part { header, wait } in parts {
            self.add(header, &stacks.user, &stacks.kernel, Some(*wait), processes, layout);
        }
    }

    /// Rough bytes held, to cut epochs before they grow large.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.seen_words * 8
            + (self.nodes.len() + self.mappings.len() + self.threads.len()) * 64
            + self.processes.len() * 192
            + self.samples() * size_of::<Sample>()
    }

    /// How many samples there are, of all events.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.series.iter().map(Vec::len).sum()
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
        addresses: &[u64],
        normalize: impl FnOnce(&mut Self) -> Option<Stack>,
    ) -> u32 {
        let mut key = std::mem::take(&mut self.key);
        key.clear();
        key.extend_from_slice(context);
        key.extend_from_slice(addresses);
        let index = match self.seen.get(key.as_slice()) {
            Some(&index) => index,
            None => {
                let index = normalize(self).map_or(0, |stack| 1 + self.intern(&stack));
                self.seen_words += key.len() + 4;
                self.seen.insert(key.as_slice().into(), index);
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

    fn process(&mut self, process: &Process) -> u32 {
        if let Some(&index) = self.process_index.get(&process.image) {
            return index;
        }
        let definition = ProcessDef {
            image: process.image,
            pid: process.pid,
            start_ns: process.start_ns,
            comm: process.comm.clone(),
            generation: process.generation,
            cgroup_id: process.cgroup.id,
            cgroup_path: process.cgroup.path.clone(),
            parent: process.parent,
            since_ns: if process.witnessed { process.since_ns } else { 0 },
            end_ns: process.end_ns,
            runs_anonymous: false,
        };
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
            epoch.add(&header, &stack, &[], None, &mut processes, &layout);
        }
        let samples = &epoch.series[0];
        assert_eq!((samples.len(), epoch.samples()), (3, 3));
        assert_eq!(epoch.stacks.len(), 2);
        assert_eq!(epoch.nodes.len(), 4, "two leaves over one caller over one root");
        assert_eq!((samples[0].user, samples[0].kernel), (samples[2].user, 0));
        assert_eq!((epoch.mappings.len(), epoch.processes.len(), epoch.threads.len()), (1, 1, 1));
    }
}
