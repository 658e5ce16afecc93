//! The profile: interned tables with `Copy` handles, aggregated samples, and what was lost.
//!
//! Built by readers of captures and of other profilers' files. It is what was captured, and has no
//! names: those are [`Names`], found by the symbolizer, and writers take both. Holds no bytes of
//! files and does no I/O. Everything keeps the order of the stream, so equal streams give equal
//! profiles.

mod builder;
mod cpu_time;
mod executable;
mod jit_file;
pub mod labels;
mod location;
mod missing;
mod names;
mod quality;
mod series;
mod shares;
mod slice;
mod stack;
mod unite;
mod unwind_tables;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::PythonOutcome;
use crate::sched::{PerfCounter, SchedStats};
pub use crate::{
    Address, BuildId, Device, EndReason, ExecutableKey, FileId, FileOffset, KernelOffset, ListEnd,
    LostReason, UserAddr,
};

pub use self::builder::{Builder, Full, Only, Taken, ValueError};
pub use self::cpu_time::CpuTime;
pub use self::executable::{ArtifactHash, Executable, hex};
pub use self::jit_file::{JitFile, Mark, Snapshot};
pub use self::location::{FrameKind, FrameType, Location, lookup_address};
pub use self::missing::{Missing, MissingReason};
pub use self::names::{Line, Named, Names, Resolution, Source, is_place, place};
pub use self::quality::Quality;
pub use self::series::{Series, Types};
pub use self::shares::{Cut, Share, Unnamed};
pub use self::stack::{Frame, Stack};
pub use self::unite::unite;
pub use self::unwind_tables::UnwindTables;

/// A handle into a table of a [`Profile`].
macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u32);

        impl $name {
            /// Position in its table.
            #[must_use]
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

handle!(
    /// Into [`Profile::executables`].
    ExecutableId
);
handle!(
    /// Into [`Profile::processes`].
    ProcessId
);
handle!(
    /// Into [`Profile::threads`].
    ThreadId
);
handle!(
    /// Into [`Profile::locations`].
    LocationId
);
handle!(
    /// Into [`Profile::tree`].
    FrameId
);
handle!(
    /// Into [`Profile::stacks`].
    StackId
);
handle!(
    /// Into [`Profile::series`].
    #[derive(Default)]
    SeriesId
);

/// One program image of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Process id, in the pid namespace of whoever recorded it.
    pub pid: u32,
    /// In the initial pid namespace, where that is another and it is known; 0.
    pub host_pid: u32,
    /// Start in boottime nanoseconds.
    pub start_ns: u64,
    /// Counts images.
    pub generation: u32,
    /// Name of its main thread.
    pub comm: String,
    /// Labels of its samples: where it ran.
    pub labels: Vec<(&'static str, String)>,
    /// The process that made it; 0: unknown.
    pub parent: u32,
    /// When it became this, nanoseconds since the Unix epoch; 0: before the capture.
    pub since_ns: u64,
    /// When it ended; 0: not in the capture.
    pub end_ns: u64,
    /// The wall clock when the clock of its host was zero, nanoseconds since the Unix epoch.
    pub clock_zero_ns: u64,
    /// Its perf-map.
    pub perf_map: JitFile,
    /// Its jitdump.
    pub jitdump: JitFile,
    /// Why there is neither, though it ran anonymous code.
    pub jit_missing: Option<String>,
    /// CPU time that it used, where [`Profile::unsampled_cpu_ns`] is known, nanoseconds.
    pub cpu_ns: u64,
}

/// A thread.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Thread {
    /// The process.
    pub process: ProcessId,
    /// Thread id.
    pub tid: u32,
    /// Its name.
    pub comm: String,
}

/// A mapping of an executable in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mapping {
    /// The process.
    pub process: ProcessId,
    /// What is mapped.
    pub executable: ExecutableId,
    /// First address.
    pub start: UserAddr,
    /// Bytes.
    pub length: u64,
    /// Offset in the file of the first address.
    pub file_offset: FileOffset,
    /// Since when, nanoseconds since the Unix epoch; 0: as long as the process.
    pub since_ns: u64,
}

/// What samples share: series, thread and stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SampleKey {
    /// The series.
    pub series: SeriesId,
    /// The thread.
    pub thread: ThreadId,
    /// User stack.
    pub user: Option<StackId>,
    /// Kernel stack.
    pub kernel: Option<StackId>,
    /// 1 + index into [`Profile::label_sets`]; 0: none.
    pub labels: u32,
}

/// Samples with one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// What they share.
    pub key: SampleKey,
    /// How many.
    pub count: u64,
    /// Sum of their weights, in the unit of their event.
    pub value: u64,
}

/// One sample of those with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// When, nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// Its weight.
    pub value: u64,
    /// Index into [`Profile::samples`].
    pub sample: u32,
    place: Place,
}

/// On which CPU, and how many events it stands for: in one word, because there are millions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place(u32);

/// Linux has at most 8,192 CPUs (`NR_CPUS`).
const CPU_BITS: u32 = 13;

impl Moment {
    /// Most events one can stand for.
    pub const MOST_EVENTS: u64 = (1 << (u32::BITS - CPU_BITS)) - 1;

    /// One that was taken on a CPU and stands for so many events, at most
    /// [`Moment::MOST_EVENTS`].
    #[must_use]
    pub fn new(time_ns: u64, value: u64, sample: u32, cpu: u32, count: u64) -> Self {
        let count = count.min(Self::MOST_EVENTS) as u32;
        let place = Place(count << CPU_BITS | cpu.min((1 << CPU_BITS) - 1));
        Self { time_ns, value, sample, place }
    }

    /// On which CPU.
    #[must_use]
    pub fn cpu(&self) -> u32 {
        self.place.0 & ((1 << CPU_BITS) - 1)
    }

    /// How many events it stands for.
    #[must_use]
    pub fn count(&self) -> u64 {
        u64::from(self.place.0 >> CPU_BITS)
    }
}

/// How and where a profile was taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Host name.
    pub hostname: String,
    /// `uname -r`.
    pub kernel_release: String,
    /// `uname -m`.
    pub machine: String,
    /// Every process of the host was watched, none was chosen.
    pub all_processes: bool,
    /// Kernel stacks were recorded.
    pub kernel_stacks: bool,
    /// Samples were taken through perf events, not with eBPF.
    pub perf_events: bool,
    /// Version of the collector; empty: another program took the profile.
    pub collector: String,
    /// CPUs of the host, and those of them that were online; 0: unknown.
    pub cpus: (u32, u32),
    /// What CPU it is, as perf tells it: vendor, family, model, stepping; empty: unknown.
    pub cpu_id: String,
    /// Likewise, for people.
    pub cpu_description: String,
}

/// Whom [`SchedStats`] are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    /// All threads of a process.
    Process(ProcessId),
    /// A thread.
    Thread(ThreadId),
    /// All those that there was no room to tell apart.
    TheRest,
}

/// A profile.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// How and where it was taken.
    pub origin: Origin,
    /// Start, nanoseconds since the Unix epoch.
    pub start_ns: u64,
    /// Length, nanoseconds.
    pub duration_ns: u64,
    /// The part of it that captures are of: there may be gaps between several.
    pub observed_ns: u64,
    /// How processes and threads were scheduled, where that was recorded.
    pub sched: BTreeMap<Who, SchedStats>,
    /// Counters of those, in their order.
    pub counters: Vec<PerfCounter>,
    /// Executables.
    pub executables: Vec<Executable>,
    /// Processes.
    pub processes: Vec<Process>,
    /// Threads.
    pub threads: Vec<Thread>,
    /// Mappings, first seen first.
    pub mappings: Vec<Mapping>,
    /// Distinct places in code.
    pub locations: Vec<Location>,
    /// Frames with their callers, a caller before what it calls.
    pub tree: Vec<Frame>,
    /// Stacks.
    pub stacks: Vec<Stack>,
    /// What was sampled.
    pub series: Vec<Series>,
    /// Samples of all series, first seen first.
    pub samples: Vec<Sample>,
    /// Each of them, in the order they came; empty unless asked for.
    pub timeline: Vec<Moment>,
    /// The wall clock when the clock of sample times was zero, nanoseconds since the Unix epoch.
    pub clock_zero_ns: u64,
    /// Labels that samples have beside those of their threads and processes.
    pub label_sets: Vec<Vec<labels::Label>>,
    /// The values of each sample, by its index, for a series with [`Series::types`]. The count of
    /// such a sample is its value of the default kind.
    pub values: Vec<Vec<i64>>,
    /// Names the input had.
    pub given: FxHashMap<LocationId, Arc<[Line]>>,
    /// What another profiler had to say.
    pub comments: Vec<String>,
    /// What was lost, with whether it counts samples.
    pub lost: BTreeMap<LostReason, (u64, bool)>,
    /// How frames of interpreters ended, and in how many samples of what was taken.
    pub list_ends: BTreeMap<ListEnd, u64>,
    /// CPU time of processes that have no samples by their names, nanoseconds. `None`: nobody asked
    /// how much CPU time processes used, or not for this part of the profile.
    pub unsampled_cpu_ns: Option<BTreeMap<String, u64>>,
    /// What became of unwind tables.
    pub unwind_tables: UnwindTables,
    /// Python processes whose perf trampolines were to be switched on, by what became of it.
    pub python: BTreeMap<PythonOutcome, u64>,
    /// Artifacts that name functions of kernels and modules, by the hash of all their symbols.
    pub kernel_symbols: BTreeMap<ArtifactHash, BTreeSet<ArtifactHash>>,
    /// Files that a collector could not tell from others at the same path. Other profilers give a
    /// path alone, whichever file it was.
    pub ambiguous: BTreeSet<ExecutableId>,
    /// By executable, why it had no unwind table at last.
    pub unwind_missing: BTreeMap<ExecutableId, String>,
    /// By executable, why functions of the interpreter in it are not among the frames.
    pub functions_missing: BTreeMap<ExecutableId, String>,
    /// By executable, where the code is that Go compiled.
    pub go_code: BTreeMap<ExecutableId, Range<FileOffset>>,
    /// Samples that are not in this part of the profile.
    pub left_out: u64,
    /// Samples the kernel took; unknown when the capture was cut.
    pub taken: Option<u64>,
    /// What is wrong with the capture, for the report.
    pub notes: Vec<String>,
}

impl Profile {
    /// Samples in the profile, of all series.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.samples.iter().map(|sample| sample.count).sum()
    }

    /// Processes that have samples. One that became another program is there once.
    #[must_use]
    pub fn sampled_processes(&self) -> Vec<&Process> {
        let threads: BTreeSet<_> = self.samples.iter().map(|sample| sample.key.thread).collect();
        let mut by_who = BTreeMap::new();
        for thread in threads {
            let process = &self.processes[self.threads[thread.index()].process.index()];
            // Folded stacks have names of processes and no more.
            let name = (process.pid == 0).then_some(&process.comm);
            by_who.insert((process.pid, name), process);
        }
        by_who.into_values().collect()
    }

    /// Samples lost.
    #[must_use]
    pub fn lost_samples(&self) -> u64 {
        self.lost.values().filter(|(_, samples)| *samples).map(|(count, _)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_without_samples_do_not_count() {
        let mut into = Builder::new();
        // The third is the second's program after an exec.
        for (pid, generation, sampled) in [(7, 0, false), (8, 0, true), (8, 1, true)] {
            let process = Process { pid, generation, ..Process::default() };
            let process = into.process(process).unwrap();
            let thread = into.thread(Thread { process, tid: pid, comm: String::new() }).unwrap();
            let key =
                SampleKey { series: SeriesId(0), thread, user: None, kernel: None, labels: 0 };
            if sampled {
                into.weighted(key, 1, 1).unwrap();
            }
        }
        let profile = into.build();
        let pids: Vec<_> = profile.sampled_processes().iter().map(|it| it.pid).collect();
        assert_eq!(pids, [8]);
    }
}
