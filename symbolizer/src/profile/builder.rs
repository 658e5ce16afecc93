//! Interning: epochs come in with ids of their own and leave as one set of tables.

use std::collections::hash_map::Entry;
use std::hash::Hash;

use rustc_hash::FxHashMap;

use super::{
    ArtifactHash, Executable, ExecutableId, Location, LocationId, LostReason, Mapping, Origin,
    Process, ProcessId, Profile, Sample, SampleKey, Stack, StackId, Thread, ThreadId, UnwindTables,
};

/// Most entries any table of a profile takes; more is a hostile stream.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Entries.
    pub entries: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { entries: 16 << 20 }
    }
}

/// A profile in the making.
#[derive(Debug, Default)]
pub struct Builder {
    profile: Profile,
    limits: Limits,
    capture: usize,
    executables: FxHashMap<Executable, u32>,
    /// Generations count within a capture, so its number is part of the key.
    processes: FxHashMap<(usize, u32, u64, u32), u32>,
    threads: FxHashMap<Thread, u32>,
    mappings: FxHashMap<Mapping, u32>,
    locations: FxHashMap<Location, u32>,
    stacks: FxHashMap<Stack, u32>,
    samples: FxHashMap<SampleKey, u32>,
}

/// A table is full.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the capture has more {0} than a profile holds")]
pub struct Full(pub &'static str);

impl Builder {
    /// Begins capture number `capture` of several; how and where the first was taken stands for all.
    pub fn capture(&mut self, capture: usize, origin: Origin) {
        self.capture = capture;
        let first = &mut self.profile.origin;
        if *first == Origin::default() {
            *first = origin;
        } else if first.event != origin.event {
            let note = format!("captures of {} and of {} are added up", first.event, origin.event);
            self.note(note);
        }
    }

    /// Widens the span to include `start..end`, nanoseconds since the Unix epoch.
    pub fn span(&mut self, start: u64, end: u64) {
        let profile = &mut self.profile;
        let old_end = profile.start_ns + profile.duration_ns;
        if profile.start_ns == 0 || start < profile.start_ns {
            profile.start_ns = start;
        }
        profile.duration_ns = end.max(old_end).saturating_sub(profile.start_ns);
    }

    /// The id of an executable.
    pub fn executable(&mut self, executable: Executable) -> Result<ExecutableId, Full> {
        let table = &mut self.profile.executables;
        intern(&mut self.executables, table, executable, Clone::clone, self.limits, "executables")
            .map(ExecutableId)
    }

    /// The id of a process; what is newly learnt of it replaces what was known.
    pub fn process(&mut self, process: Process) -> Result<ProcessId, Full> {
        let key = (self.capture, process.pid, process.start_ns, process.generation);
        if let Some(&id) = self.processes.get(&key) {
            let known = &mut self.profile.processes[id as usize];
            known.comm = process.comm;
            add_snapshots(&mut known.perf_maps, process.perf_maps);
            add_snapshots(&mut known.jitdumps, process.jitdumps);
            // Of the last epoch: what was missing before may have come since.
            known.jit_missing = process.jit_missing;
            return Ok(ProcessId(id));
        }
        let table = &mut self.profile.processes;
        intern(&mut self.processes, table, key, |_| process.clone(), self.limits, "processes")
            .map(ProcessId)
    }

    /// The id of a thread.
    pub fn thread(&mut self, thread: Thread) -> Result<ThreadId, Full> {
        let table = &mut self.profile.threads;
        intern(&mut self.threads, table, thread, Clone::clone, self.limits, "threads").map(ThreadId)
    }

    /// Records a mapping.
    pub fn mapping(&mut self, mapping: Mapping) -> Result<(), Full> {
        let table = &mut self.profile.mappings;
        intern(&mut self.mappings, table, mapping, Clone::clone, self.limits, "mappings")
            .map(|_| ())
    }

    /// The id of a location.
    pub fn location(&mut self, location: Location) -> Result<LocationId, Full> {
        let table = &mut self.profile.locations;
        intern(&mut self.locations, table, location, Clone::clone, self.limits, "locations")
            .map(LocationId)
    }

    /// The id of a stack.
    pub fn stack(&mut self, stack: Stack) -> Result<StackId, Full> {
        let table = &mut self.profile.stacks;
        intern(&mut self.stacks, table, stack, Clone::clone, self.limits, "stacks").map(StackId)
    }

    /// Adds one sample.
    pub fn sample(&mut self, key: SampleKey, value: u64) -> Result<(), Full> {
        let table = &mut self.profile.samples;
        let new = |key: &SampleKey| Sample { key: *key, count: 0, value: 0 };
        let id = intern(&mut self.samples, table, key, new, self.limits, "samples")?;
        let sample = &mut self.profile.samples[id as usize];
        sample.count += 1;
        sample.value = sample.value.saturating_add(value);
        Ok(())
    }

    /// Adds to what was lost.
    pub fn lost(&mut self, reason: LostReason, count: u64, samples: bool) {
        let entry = self.profile.lost.entry(reason).or_insert((0, samples));
        entry.0 = entry.0.saturating_add(count);
    }

    /// Adds to what became of unwind tables.
    pub fn unwind_tables(&mut self, more: UnwindTables) {
        let all = &mut self.profile.unwind_tables;
        for (all, more) in [
            (&mut all.loaded, more.loaded),
            (&mut all.compiled, more.compiled),
            (&mut all.compile_ns, more.compile_ns),
            (&mut all.failed, more.failed),
            (&mut all.evicted, more.evicted),
        ] {
            *all = all.saturating_add(more);
        }
    }

    /// Says why an executable has no unwind table, or that nothing speaks against one.
    pub fn unwind_missing(&mut self, executable: ExecutableId, why: Option<String>) {
        match why {
            Some(why) => self.profile.unwind_missing.insert(executable, why),
            None => self.profile.unwind_missing.remove(&executable),
        };
    }

    /// Adds to what the kernel took; a capture without an end makes the total unknown.
    pub fn taken(&mut self, taken: Option<u64>) {
        self.profile.taken = match (self.profile.taken, taken) {
            (Some(before), Some(taken)) => Some(before.saturating_add(taken)),
            _ => None,
        };
    }

    /// Says something in the report.
    pub fn note(&mut self, note: String) {
        self.profile.notes.push(note);
    }

    /// An empty profile that took nothing yet.
    #[must_use]
    pub fn new() -> Self {
        let mut builder = Self::default();
        builder.profile.taken = Some(0);
        builder
    }

    /// Artifacts the profile refers to.
    #[must_use]
    pub fn artifacts(&self) -> Vec<ArtifactHash> {
        artifacts(&self.profile)
    }

    /// The profile.
    #[must_use]
    pub fn build(self) -> Profile {
        self.profile
    }
}

/// Artifacts a profile refers to, without duplicates.
pub(super) fn artifacts(profile: &Profile) -> Vec<ArtifactHash> {
    let of_executables = profile.executables.iter().filter_map(|executable| match executable {
        Executable::Vdso { image } => *image,
        Executable::Kernel { kallsyms, .. } => *kallsyms,
        _ => None,
    });
    let of_processes = profile
        .processes
        .iter()
        .flat_map(|process| process.perf_maps.iter().chain(&process.jitdumps).flatten().copied());
    let mut hashes: Vec<_> = of_executables.chain(of_processes).collect();
    hashes.sort_unstable();
    hashes.dedup();
    hashes
}

fn intern<K: Hash + Eq, V>(
    index: &mut FxHashMap<K, u32>,
    table: &mut Vec<V>,
    key: K,
    value: impl FnOnce(&K) -> V,
    limits: Limits,
    what: &'static str,
) -> Result<u32, Full> {
    match index.entry(key) {
        Entry::Occupied(entry) => Ok(*entry.get()),
        Entry::Vacant(entry) => {
            let id = u32::try_from(table.len()).ok().filter(|_| table.len() < limits.entries);
            let id = id.ok_or(Full(what))?;
            table.push(value(entry.key()));
            entry.insert(id);
            Ok(id)
        }
    }
}

/// Snapshots kept of a file: it grows, so a later one has mostly all of those before.
const MAX_SNAPSHOTS: usize = 4;

fn add_snapshots(known: &mut Vec<Vec<ArtifactHash>>, more: Vec<Vec<ArtifactHash>>) {
    for snapshot in more {
        known.retain(|before| !snapshot.starts_with(before));
        known.push(snapshot);
        known.drain(..known.len().saturating_sub(MAX_SNAPSHOTS));
    }
}
