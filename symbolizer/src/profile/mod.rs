//! The profile: interned tables with `Copy` handles, aggregated samples, and what was lost.
//!
//! Built by `ingest.rs`, given names by `resolve/`, read by `export/`. Holds no bytes of files and
//! does no I/O. Everything keeps the order of the stream, so equal streams give equal profiles.

mod builder;
pub mod labels;
mod location;
mod slice;

use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::FxHashMap;

pub use self::builder::{Builder, Full, Limits};
pub use self::location::{FrameKind, Location, lookup_offset};

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
    /// Into [`Profile::stacks`].
    StackId
);

/// SHA-256 of an artifact.
pub type ArtifactHash = [u8; 32];

/// What code came from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Executable {
    /// A mapped file.
    File {
        /// Path as the process had it.
        path: String,
        /// GNU build-id, empty when unknown.
        build_id: Vec<u8>,
        /// Inode and device (major, minor), where there is no build-id.
        inode: u64,
        /// Device of the inode.
        device: (u32, u32),
    },
    /// The vDSO, with its image.
    Vdso {
        /// The ELF image.
        image: Option<ArtifactHash>,
    },
    /// Anonymous executable memory; addresses are those of the process.
    Anonymous,
    /// The kernel or a module of it (empty name: the kernel itself).
    Kernel {
        /// Module.
        module: String,
        /// GNU build-id, empty when unknown.
        build_id: Vec<u8>,
        /// Rebased symbols.
        kallsyms: Option<ArtifactHash>,
    },
    /// Nothing known is mapped there.
    Unmapped,
    /// Names that came without addresses.
    Names {
        /// They are of the kernel.
        kernel: bool,
    },
}

impl Executable {
    /// The name outputs show: a path, or `[kernel]`, `[module]`, `[vdso]`, `[jit]`.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::File { path, .. } => path.clone(),
            Self::Vdso { .. } => "[vdso]".to_owned(),
            Self::Anonymous => "[jit]".to_owned(),
            Self::Kernel { module, .. } if module.is_empty() => "[kernel]".to_owned(),
            Self::Kernel { module, .. } => format!("[{module}]"),
            Self::Unmapped => "[unmapped]".to_owned(),
            Self::Names { .. } => "[names]".to_owned(),
        }
    }

    /// Whether it is code of the kernel.
    #[must_use]
    pub fn is_kernel(&self) -> bool {
        matches!(self, Self::Kernel { .. } | Self::Names { kernel: true })
    }

    /// GNU build-id, empty when unknown.
    #[must_use]
    pub fn build_id(&self) -> &[u8] {
        match self {
            Self::File { build_id, .. } | Self::Kernel { build_id, .. } => build_id,
            _ => &[],
        }
    }

    /// Build-id in hex, empty when unknown.
    #[must_use]
    pub fn build_id_hex(&self) -> String {
        hex(self.build_id())
    }
}

/// Lower-case hex.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One program image of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Process id.
    pub pid: u32,
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
    /// Snapshots of its perf-map, oldest first; each as the artifacts that follow each other in it.
    pub perf_maps: Vec<Vec<ArtifactHash>>,
    /// Those of its jitdump.
    pub jitdumps: Vec<Vec<ArtifactHash>>,
    /// Why there is neither, though it ran anonymous code.
    pub jit_missing: Option<String>,
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
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// File offset of the first address.
    pub file_offset: u64,
    /// Since when, nanoseconds since the Unix epoch; 0: as long as the process.
    pub since_ns: u64,
}

/// Why a stack ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EndReason {
    /// The thread's first function.
    Root,
    /// Memory not readable.
    Unreadable,
    /// Deeper than is recorded.
    DepthLimit,
    /// Code without a frame pointer.
    NoFramePointer,
    /// A return address outside executable memory.
    NotCode,
    /// A 32-bit process.
    Compat,
    /// The kernel's unwinder refused.
    Failed,
    /// The mappings of the process are not known.
    NoMappings,
    /// The unwind table of this code was not there yet.
    NoTableYet,
    /// There is no unwind table of this code.
    NoTable,
    /// The unwind table has no rule for this address.
    NoUnwindRule,
    /// The rule needs a register that is not known in this frame.
    RegisterLost,
    /// The caller's frame would not lie above.
    BadStack,
    /// The kernel side had not heard of the process's mappings yet.
    NoMappingsYet,
    /// Tables were replaced while the stack was walked.
    TablesReplaced,
    /// Who took it did not say.
    NotSaid,
}

impl EndReason {
    /// For the report.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Root => "reached the thread's root",
            Self::Unreadable => "next frame not readable",
            Self::DepthLimit => "deeper than is recorded",
            Self::NoFramePointer => "code without frame pointers",
            Self::NotCode => "return address not in code",
            Self::Compat => "32-bit process",
            Self::Failed => "kernel unwinder refused",
            Self::NoMappings => "mappings of the process unknown",
            Self::NoTableYet => "no unwind table yet",
            Self::NoTable => "no unwind table",
            Self::NoUnwindRule => "no unwind rule for this code",
            Self::RegisterLost => "unwind rule needs a register that is lost",
            Self::BadStack => "caller's frame not above this one",
            Self::NoMappingsYet => "mapping not known yet: process or mapping too young",
            Self::TablesReplaced => "unwind tables replaced meanwhile",
            Self::NotSaid => "not said by who took it",
        }
    }
}

/// A stack, leaf first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Stack {
    /// Frames.
    pub locations: Vec<LocationId>,
    /// Why it ends.
    pub end: EndReason,
}

/// What samples share: thread and stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SampleKey {
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
    /// Sum of their weights, in the event's unit.
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
    /// On which CPU.
    pub cpu: u32,
}

/// Why something was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LostReason {
    /// Ring buffer full.
    RingFull,
    /// No scratch buffer.
    NoScratch,
    /// Epochs dropped by the collector.
    EpochDropped,
    /// Undecodable records.
    MalformedRecord,
    /// Mapping, exec, fork and exit events.
    Events,
    /// Times sampling was throttled.
    Throttled,
    /// Children that could not be followed.
    TargetsFull,
    /// CPUs that came online and could not be sampled.
    CpuRefused,
    /// A reason a newer collector knows.
    Other,
}

impl LostReason {
    /// For the report.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::RingFull => "samples: ring buffer full",
            Self::NoScratch => "samples: no scratch buffer",
            Self::EpochDropped => "samples: epochs dropped, symbolizer too slow or gone",
            Self::MalformedRecord => "samples: undecodable records",
            Self::Events => "process events: perf ring full (mappings were read again)",
            Self::Throttled => "times the kernel throttled sampling",
            Self::TargetsFull => "children that could not be followed",
            Self::CpuRefused => "CPUs that came online and could not be sampled",
            Self::Other => "for a reason this version does not know",
        }
    }
}

/// What became of the collector's unwind tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnwindTables {
    /// Put to use.
    pub loaded: u64,
    /// Of those, compiled and not kept from an earlier run.
    pub compiled: u64,
    /// Time that took, nanoseconds.
    pub compile_ns: u64,
    /// Executables without one.
    pub failed: u64,
    /// Dropped to make room for others.
    pub evicted: u64,
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
    /// "cpu-clock" or "cycles".
    pub event: String,
    /// Samples a second and CPU.
    pub frequency: u32,
    /// Kernel stacks were recorded.
    pub kernel_stacks: bool,
    /// Version of the collector; empty: another program took the profile.
    pub collector: String,
    /// All processes were sampled.
    pub all: bool,
    /// CPUs of the host, and those of them that were online; 0: unknown.
    pub cpus: (u32, u32),
}

/// What the values of samples are, where they are no samples of CPU time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Types {
    /// Kind and unit of each value.
    pub kinds: Vec<(String, String)>,
    /// Which of them is shown unless told otherwise.
    pub default: usize,
    /// Kind and unit of the period.
    pub period_type: (String, String),
    /// Between two events of that kind.
    pub period: i64,
}

impl Origin {
    /// Kind and unit of what samples weigh.
    #[must_use]
    pub fn value_kind(&self) -> (&str, &str) {
        match self.event.as_str() {
            "" | "cpu" | "samples" => ("cpu", "nanoseconds"),
            clock if clock.ends_with("-clock") => ("cpu", "nanoseconds"),
            "cycles" => ("cycles", "cycles"),
            event => (event, "count"),
        }
    }
}

/// What became of a location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// Names were found.
    Found {
        /// Innermost inlined function first, the function that exists last.
        lines: Arc<[Line]>,
        /// Where they came from.
        quality: Quality,
    },
    /// There is no name, and this is why.
    Missing(String),
}

/// How good an answer is, best last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Quality {
    /// The kernel's own symbol list.
    Kallsyms,
    /// A JIT's perf-map.
    PerfMap,
    /// A JIT's jitdump.
    Jitdump,
    /// The symbols an ELF file exports.
    Dynsym,
    /// An ELF symbol table.
    Symtab,
    /// Go's own table.
    Gopclntab,
    /// DWARF.
    Dwarf,
    /// The input had the names already.
    Given,
}

impl Quality {
    /// For the report.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Kallsyms => "kallsyms",
            Self::PerfMap => "perf-map",
            Self::Jitdump => "jitdump",
            Self::Dynsym => "dynsym",
            Self::Symtab => "symtab",
            Self::Gopclntab => "gopclntab",
            Self::Dwarf => "dwarf",
            Self::Given => "given",
        }
    }
}

/// A function at a place in a source file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Line {
    /// Demangled name.
    pub function: String,
    /// Source file, empty when unknown.
    pub file: String,
    /// Line, 0 when unknown.
    pub line: u32,
}

/// Where the names of an executable are from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// A file or an address; empty when there are no names.
    pub origin: String,
    /// What was looked for and not found, or is broken.
    pub notes: Vec<String>,
    /// A server was asked and did not give what it was asked for.
    pub fetch_failed: bool,
    /// How good the names were that the symbol cache had before (`Some(None)`: it had none).
    pub upgraded_from: Option<Option<Quality>>,
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
    /// Stacks.
    pub stacks: Vec<Stack>,
    /// Samples, first seen first.
    pub samples: Vec<Sample>,
    /// Each of them, in the order they came; empty unless asked for.
    pub timeline: Vec<Moment>,
    /// The wall clock when the clock of sample times was zero, nanoseconds since the Unix epoch.
    pub clock_zero_ns: u64,
    /// Labels other profilers gave samples.
    pub label_sets: Vec<Vec<labels::Label>>,
    /// What [`Profile::values`] are; `None`: there are none, and samples are of CPU time.
    pub types: Option<Types>,
    /// By sample. Its count is then the value of the default kind.
    pub values: Vec<Vec<i64>>,
    /// Names the input had.
    pub given: FxHashMap<LocationId, Arc<[Line]>>,
    /// What another profiler had to say.
    pub comments: Vec<String>,
    /// What was lost, with whether it counts samples.
    pub lost: BTreeMap<LostReason, (u64, bool)>,
    /// What became of unwind tables.
    pub unwind_tables: UnwindTables,
    /// By executable, why it had no unwind table at last.
    pub unwind_missing: BTreeMap<ExecutableId, String>,
    /// Samples that are not in this part of the profile.
    pub left_out: u64,
    /// Samples the kernel took; unknown when the capture was cut.
    pub taken: Option<u64>,
    /// What is wrong with the capture, for the report.
    pub notes: Vec<String>,
    /// By location; empty before `resolve`.
    pub resolutions: Vec<Resolution>,
    /// By executable: where its names came from or why there are none; filled by `resolve`.
    pub sources: Vec<Source>,
}

impl Profile {
    /// Samples in the profile.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.samples.iter().map(|sample| sample.count).sum()
    }

    /// Samples lost.
    #[must_use]
    pub fn lost_samples(&self) -> u64 {
        self.lost.values().filter(|(_, samples)| *samples).map(|(count, _)| count).sum()
    }

    /// The frames of a sample, leaf first: kernel, then user.
    pub fn frames(&self, key: SampleKey) -> impl DoubleEndedIterator<Item = LocationId> + '_ {
        let of = |stack: Option<StackId>| {
            stack.map_or(&[][..], |stack| self.stacks[stack.index()].locations.as_slice())
        };
        of(key.kernel).iter().chain(of(key.user)).copied()
    }

    /// Name of a location without inlined functions opened up, for lack of a better one its address.
    #[must_use]
    pub fn lines(&self, location: LocationId) -> Vec<Line> {
        match self.resolutions.get(location.index()) {
            Some(Resolution::Found { lines, .. }) => lines.to_vec(),
            _ => {
                let found = &self.locations[location.index()];
                let name = self.executables[found.executable.index()].name();
                let base = name.rsplit('/').next().unwrap_or(&name);
                let function = format!("{base}+0x{:x}", found.offset);
                vec![Line { function, ..Line::default() }]
            }
        }
    }
}
