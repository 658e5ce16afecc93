//! Interning: epochs come in with ids of their own and leave as one set of tables.

mod ids;
mod only;
mod samples;
mod whole;

use std::collections::BTreeMap;
use std::hash::Hash;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use self::ids::Ids;
pub use self::only::Only;
pub use self::samples::{Taken, ValueError};
use super::labels::Label;
use super::{
    ArtifactHash, EndReason, Executable, ExecutableId, Frame, FrameId, JitFile, Line, Location,
    LocationId, Mapping, Process, ProcessId, Profile, Stack, StackId, Thread, ThreadId, Who,
};
use crate::Address;
use crate::sched::{PerfCounter, SchedStats};

/// Most entries any table of a profile takes; more is a hostile stream.
const MAX_ENTRIES: usize = 16 << 20;

/// Most series a profile has; nobody samples more at once.
const MAX_SERIES: usize = 64;

/// A profile in the making.
#[derive(Debug, Default)]
pub struct Builder {
    profile: Profile,
    capture: usize,
    /// Samples, what they weigh, and frames of those that stand for several.
    total: [u64; 3],
    /// The one whose origin stands for all.
    first: usize,
    /// Each sample is kept with its time and CPU.
    timeline: bool,
    /// Each sample has its CPU as a label.
    by_cpu: bool,
    only: Only,
    /// The capture that samples are added of tells how much CPU time processes used.
    knows_cpu_times: bool,
    /// There are samples of which that is not known.
    lacks_cpu_times: bool,
    /// Bytes of names in its tables.
    name_bytes: u64,
    /// Stretches of time that captures are of: the start of each, and its end.
    observed: BTreeMap<u64, u64>,
    /// Where that of this capture begins.
    timeline_start: usize,
    mapping_start: usize,
    variants: FxHashMap<(LocationId, Arc<[Line]>), LocationId>,
    names: FxHashMap<(ExecutableId, Arc<[Line]>), u64>,
    label_sets: Ids,
    executables: Ids,
    /// Generations count within a capture, so its number is part of the key.
    processes: FxHashMap<(usize, u32, u64, u32), u32>,
    /// Size and time.
    quiet_since: FxHashMap<ProcessId, (u64, u64)>,
    threads: Ids,
    mappings: Ids,
    locations: Ids,
    frames: Ids,
    stacks: Ids,
    samples: Ids,
}

/// A table is full.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the capture has more {0} than a profile holds")]
pub struct Full(pub &'static str);

impl Builder {
    /// An empty profile that took nothing yet.
    #[must_use]
    pub fn new() -> Self {
        let mut builder = Self::default();
        builder.profile.taken = Some(0);
        builder
    }

    /// The profile so far.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The profile.
    #[must_use]
    pub fn build(self) -> Profile {
        let mut profile = self.profile;
        profile.unsampled_cpu_ns =
            profile.unsampled_cpu_ns.take().filter(|_| !self.lacks_cpu_times);
        profile
    }

    /// The id of an executable.
    pub fn executable(&mut self, executable: Executable) -> Result<ExecutableId, Full> {
        let bytes = if let Executable::Code(code) = &executable { code.bytes() } else { 0 };
        let table = &mut self.profile.executables;
        let before = table.len();
        let id = own(&mut self.executables, table, executable, "executables")?;
        self.name_bytes += (bytes * (table.len() - before)) as u64;
        Ok(ExecutableId(id))
    }

    /// The id of a process; what is newly learnt of it replaces what was known.
    pub fn process(&mut self, process: Process) -> Result<ProcessId, Full> {
        let key = (self.capture, process.pid, process.start_ns, process.generation);
        if let Some(&id) = self.processes.get(&key) {
            let known = &mut self.profile.processes[id as usize];
            known.comm = process.comm;
            if process.host_pid != 0 {
                known.host_pid = process.host_pid;
            }
            known.perf_map.add(process.perf_map);
            known.jitdump.add(process.jitdump);
            // Of the last epoch: what was missing before may have come since.
            known.jit_missing = process.jit_missing;
            known.end_ns = known.end_ns.max(process.end_ns);
            // What a process is read in may be its parent's until it was asked itself.
            known.labels = process.labels;
            return Ok(ProcessId(id));
        }
        let table = &mut self.profile.processes;
        let id = u32::try_from(table.len()).ok().filter(|_| table.len() < MAX_ENTRIES);
        let id = id.ok_or(Full("processes"))?;
        let labels = process.labels.iter().map(|(_, value)| value.len()).sum::<usize>();
        self.name_bytes += (process.comm.len() + labels) as u64;
        table.push(process);
        self.processes.insert(key, id);
        Ok(ProcessId(id))
    }

    /// The id of a thread.
    pub fn thread(&mut self, thread: Thread) -> Result<ThreadId, Full> {
        let (table, name) = (&mut self.profile.threads, thread.comm.len());
        let before = table.len();
        let id = own(&mut self.threads, table, thread, "threads")?;
        self.name_bytes += (name * (table.len() - before)) as u64;
        Ok(ThreadId(id))
    }

    /// Adds to how somebody was scheduled.
    pub fn sched(&mut self, who: Who, stats: &SchedStats) {
        *self.profile.sched.entry(who).or_default() += stats;
    }

    /// Notes which counters a capture has; the place of each in the profile. One that another
    /// capture has is there.
    pub fn counters(&mut self, counters: &[PerfCounter]) -> Vec<usize> {
        let known = &mut self.profile.counters;
        let place = |new: &PerfCounter| {
            if let Some(place) = known.iter().position(|it| it.name == new.name) {
                if new.missing.is_none() {
                    known[place].missing = None;
                }
                return place;
            }
            known.push(new.clone());
            known.len() - 1
        };
        counters.iter().map(place).collect()
    }

    /// What is known of an executable.
    #[must_use]
    pub fn executable_of(&self, id: ExecutableId) -> &Executable {
        &self.profile.executables[id.index()]
    }

    /// Whether a stack leads through code made at run time.
    #[must_use]
    pub fn runs_anonymous(&self, stack: StackId) -> bool {
        self.profile.stack(stack).any(|location| {
            let executable = self.profile.locations[location.index()].executable;
            matches!(self.profile.executables[executable.index()], Executable::Anonymous)
        })
    }

    /// A process has a perf-map.
    pub fn add_perf_map(&mut self, process: ProcessId, hash: ArtifactHash) {
        let map = JitFile::of(vec![hash], 0, Vec::new());
        self.profile.processes[process.index()].perf_map.add(map);
    }

    /// Whether places may still have times. With times, a process that writes code for days would
    /// have more places than a profile holds.
    #[must_use]
    pub fn has_room_for_times(&self) -> bool {
        self.profile.locations.len() < MAX_ENTRIES / 8
    }

    /// The time since which a process has written no code. `size` is how many bytes of code it has.
    /// Call this at the end of an epoch in which it wrote none.
    pub fn quiet_since(&mut self, process: ProcessId, size: u64, end_ns: u64) -> u64 {
        let known = self.quiet_since.entry(process).or_insert((size, end_ns));
        if known.0 != size {
            *known = (size, end_ns);
        }
        known.1
    }

    /// Records a mapping.
    pub fn mapping(&mut self, mapping: Mapping) -> Result<(), Full> {
        let table = &mut self.profile.mappings;
        own(&mut self.mappings, table, mapping, "mappings").map(|_| ())
    }

    /// The id of a location.
    pub fn location(&mut self, location: Location) -> Result<LocationId, Full> {
        let table = &mut self.profile.locations;
        own(&mut self.locations, table, location, "locations").map(LocationId)
    }

    /// The id of a location that the input has names for. When another input had other names for
    /// it, this is a new location: nothing else tells two builds of a program without build-ids
    /// apart.
    pub fn location_named(
        &mut self,
        location: Location,
        lines: Arc<[Line]>,
    ) -> Result<LocationId, Full> {
        let id = self.location(location)?;
        match self.profile.given.get(&id) {
            None => {
                self.profile.given.insert(id, lines);
                Ok(id)
            }
            Some(known) if *known == lines => Ok(id),
            Some(_) => {
                if let Some(&known) = self.variants.get(&(id, Arc::clone(&lines))) {
                    return Ok(known);
                }
                let table = &mut self.profile.locations;
                let new = u32::try_from(table.len()).ok().filter(|_| table.len() < MAX_ENTRIES);
                let new = LocationId(new.ok_or(Full("locations"))?);
                table.push(location);
                self.variants.insert((id, Arc::clone(&lines)), new);
                self.profile.given.insert(new, lines);
                Ok(new)
            }
        }
    }

    /// The location of names that have no address.
    pub fn named(
        &mut self,
        executable: ExecutableId,
        lines: Arc<[Line]>,
    ) -> Result<LocationId, Full> {
        let next = self.names.len() as u64;
        let number = *self.names.entry((executable, Arc::clone(&lines))).or_insert(next);
        let address = Address::Name(number);
        let id = self.location(Location { executable, process: None, address, seen_ns: 0 })?;
        self.profile.given.insert(id, lines);
        Ok(id)
    }

    /// The id of labels; 0: there are none.
    pub fn labels(&mut self, labels: Vec<Label>) -> Result<u32, Full> {
        if labels.is_empty() {
            return Ok(0);
        }
        let table = &mut self.profile.label_sets;
        own(&mut self.label_sets, table, labels, "labels").map(|id| id + 1)
    }

    /// The id of a frame with its callers.
    pub fn frame(&mut self, frame: Frame) -> Result<FrameId, Full> {
        let table = &mut self.profile.tree;
        own(&mut self.frames, table, frame, "frames").map(FrameId)
    }

    /// The id of a stack of these frames, leaf first.
    pub fn stack(&mut self, frames: &[LocationId], end: EndReason) -> Result<StackId, Full> {
        let called = |caller, &location| self.frame(Frame { location, caller }).map(Some);
        let leaf = frames.iter().rev().try_fold(None, called)?;
        self.stack_from(leaf, end)
    }

    /// The id of a stack with this frame as its leaf.
    pub fn stack_from(&mut self, leaf: Option<FrameId>, end: EndReason) -> Result<StackId, Full> {
        let table = &mut self.profile.stacks;
        own(&mut self.stacks, table, Stack { leaf, end }, "stacks").map(StackId)
    }

    /// Artifacts the profile refers to.
    #[must_use]
    pub fn artifacts(&self) -> Vec<ArtifactHash> {
        artifacts(&self.profile)
    }
}

/// Artifacts a profile refers to, without duplicates.
pub(super) fn artifacts(profile: &Profile) -> Vec<ArtifactHash> {
    let of_executables = profile.executables.iter().filter_map(|executable| match executable {
        Executable::Vdso { image } => *image,
        Executable::Kernel { kallsyms, .. } => {
            kallsyms.filter(|hash| !profile.kernel_symbols.contains_key(hash))
        }
        _ => None,
    });
    let of_kernels = profile.kernel_symbols.values().flatten().copied();
    let of_processes = profile
        .processes
        .iter()
        .flat_map(|process| process.perf_map.snapshots().iter().chain(process.jitdump.snapshots()))
        .flat_map(|snapshot| snapshot.pieces.iter().copied());
    let mut hashes: Vec<_> = of_executables.chain(of_kernels).chain(of_processes).collect();
    hashes.sort_unstable();
    hashes.dedup();
    hashes
}

/// The id of an entry that is its own key.
fn own<V: Hash + Eq>(
    ids: &mut Ids,
    table: &mut Vec<V>,
    entry: V,
    what: &'static str,
) -> Result<u32, Full> {
    ids.intern(table, entry, |entry| entry, |entry| entry, what)
}
