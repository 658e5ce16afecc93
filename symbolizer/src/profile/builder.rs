//! Interning: epochs come in with ids of their own and leave as one set of tables.

use std::collections::hash_map::Entry;
use std::hash::Hash;

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::labels::{Label, LabelValue};
use super::{
    ArtifactHash, Executable, ExecutableId, JitFile, Line, Location, LocationId, LostReason,
    Mapping, Moment, Origin, Process, ProcessId, Profile, Sample, SampleKey, Stack, StackId,
    Thread, ThreadId, Types, UnwindTables,
};

/// Most entries any table of a profile takes; more is a hostile stream.
const MAX_ENTRIES: usize = 16 << 20;
/// Most samples and most weight of all of them: sums of them are not checked again. 2^62 ns are 146
/// years.
const MAX_TOTAL: u64 = 1 << 62;

/// A profile in the making.
#[derive(Debug, Default)]
pub struct Builder {
    profile: Profile,
    capture: usize,
    /// Samples, and what they weigh.
    total: (u64, u64),
    /// The one whose origin stands for all.
    first: usize,
    /// Each sample is kept with its time and CPU.
    timeline: bool,
    /// Each sample has its CPU as a label.
    by_cpu: bool,
    /// Where that of this capture begins.
    timeline_start: usize,
    mapping_start: usize,
    mixed: bool,
    /// Values of a pprof are samples and CPU time.
    of_cpu_time: bool,
    variants: FxHashMap<(LocationId, Arc<[Line]>), LocationId>,
    names: FxHashMap<(ExecutableId, Arc<[Line]>), u64>,
    label_sets: FxHashMap<Vec<Label>, u32>,
    executables: FxHashMap<Executable, u32>,
    /// Generations count within a capture, so its number is part of the key.
    processes: FxHashMap<(usize, u32, u64, u32), u32>,
    /// Size and time.
    quiet_since: FxHashMap<ProcessId, (u64, u64)>,
    threads: FxHashMap<Thread, u32>,
    mappings: FxHashMap<Mapping, u32>,
    locations: FxHashMap<Location, u32>,
    stacks: FxHashMap<Stack, u32>,
    samples: FxHashMap<SampleKey, u32>,
}

/// Values that cannot be taken.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ValueError {
    /// There are none.
    #[error("its samples have no values")]
    None,
    /// They are of other kinds.
    #[error("its values ({new}) cannot be added to those before ({known})")]
    Others {
        /// What they are.
        new: String,
        /// What those before are.
        known: String,
    },
    /// A profile has no negative ones.
    #[error("a value is negative: it is the difference of two profiles")]
    Negative,
    /// A sample has too few, or too many.
    #[error("a sample has {values} values of {kinds} kinds")]
    Ragged {
        /// It has so many.
        values: usize,
        /// It should have so many.
        kinds: usize,
    },
    /// No sample fits any more.
    #[error(transparent)]
    Full(#[from] Full),
}

/// A table is full.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the capture has more {0} than a profile holds")]
pub struct Full(pub &'static str);

impl Builder {
    /// Begins capture number `capture` of several; how and where the first was taken stands for
    /// all. `clock_zero_ns`: the wall clock when the clock of its times was zero.
    pub fn capture(&mut self, capture: usize, origin: Origin, clock_zero_ns: u64) {
        self.capture = capture;
        self.timeline_start = self.profile.timeline.len();
        self.mapping_start = self.profile.mappings.len();
        let first = &mut self.profile.origin;
        if *first == Origin::default() {
            *first = origin;
            self.first = capture;
            self.profile.clock_zero_ns = clock_zero_ns;
        } else if !origin.event.is_empty() {
            self.add_up(&origin);
        }
    }

    /// Another origin's values are added to those of the first.
    fn add_up(&mut self, origin: &Origin) {
        let first = &self.profile.origin;
        // What folded stacks weigh nobody knows.
        let unknown = first.event == "samples" || origin.event == "samples";
        if !unknown && first.value_kind() != origin.value_kind() {
            self.mixed = true;
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
        intern(&mut self.executables, table, executable, Clone::clone, "executables")
            .map(ExecutableId)
    }

    /// The id of a process; what is newly learnt of it replaces what was known.
    pub fn process(&mut self, process: Process) -> Result<ProcessId, Full> {
        let key = (self.capture, process.pid, process.start_ns, process.generation);
        if let Some(&id) = self.processes.get(&key) {
            let known = &mut self.profile.processes[id as usize];
            known.comm = process.comm;
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
        intern(&mut self.processes, table, key, |_| process.clone(), "processes").map(ProcessId)
    }

    /// The id of a thread.
    pub fn thread(&mut self, thread: Thread) -> Result<ThreadId, Full> {
        let table = &mut self.profile.threads;
        intern(&mut self.threads, table, thread, Clone::clone, "threads").map(ThreadId)
    }

    /// What is known of an executable.
    #[must_use]
    pub fn executable_of(&self, id: ExecutableId) -> &Executable {
        &self.profile.executables[id.index()]
    }

    /// Whether a stack leads through code made at run time.
    #[must_use]
    pub fn runs_anonymous(&self, stack: StackId) -> bool {
        let locations = &self.profile.stacks[stack.index()].locations;
        locations.iter().any(|location| {
            let executable = self.profile.locations[location.index()].executable;
            matches!(self.profile.executables[executable.index()], Executable::Anonymous)
        })
    }

    /// A process has a perf-map.
    pub fn add_perf_map(&mut self, process: ProcessId, hash: ArtifactHash) {
        let map = JitFile::of(vec![hash], 0, Vec::new());
        self.profile.processes[process.index()].perf_map.add(map);
    }

    /// Whether places may have times: of a process that writes code for days there would be more
    /// than a profile holds.
    #[must_use]
    pub fn has_room_for_times(&self) -> bool {
        self.profile.locations.len() < MAX_ENTRIES / 8
    }

    /// Since when a process has written no code, of which it has so many bytes; asked for at the
    /// end of an epoch in which it wrote none.
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
        intern(&mut self.mappings, table, mapping, Clone::clone, "mappings").map(|_| ())
    }

    /// The id of a location.
    pub fn location(&mut self, location: Location) -> Result<LocationId, Full> {
        let table = &mut self.profile.locations;
        intern(&mut self.locations, table, location, Clone::clone, "locations").map(LocationId)
    }

    /// The id of a location the input has names for. Where another input had others, it is a
    /// location of its own: two builds of a program without build-ids are not told apart otherwise.
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
        let offset = *self.names.entry((executable, Arc::clone(&lines))).or_insert(next);
        let id = self.location(Location { executable, process: None, offset, seen_ns: 0 })?;
        self.profile.given.insert(id, lines);
        Ok(id)
    }

    /// The id of labels; 0: there are none.
    pub fn labels(&mut self, labels: Vec<Label>) -> Result<u32, Full> {
        if labels.is_empty() {
            return Ok(0);
        }
        let table = &mut self.profile.label_sets;
        intern(&mut self.label_sets, table, labels, Clone::clone, "labels").map(|id| id + 1)
    }

    /// The id of a stack.
    pub fn stack(&mut self, stack: Stack) -> Result<StackId, Full> {
        let table = &mut self.profile.stacks;
        intern(&mut self.stacks, table, stack, Clone::clone, "stacks").map(StackId)
    }

    /// Adds one sample, taken at a time (nanoseconds since the Unix epoch) on a CPU, as far as they
    /// are known.
    pub fn sample(
        &mut self,
        key: SampleKey,
        value: u64,
        (time_ns, cpu): (Option<u64>, Option<u32>),
    ) -> Result<(), Full> {
        let mut key = key;
        if let Some(cpu) = cpu.filter(|_| self.by_cpu) {
            let value = LabelValue::Number(cpu.into(), String::new());
            key.labels = self.labels(vec![Label { key: "cpu".to_owned(), value }])?;
        }
        let id = self.add(key, 1, value)?;
        if let Some(time_ns) = time_ns.filter(|_| self.timeline) {
            let cpu = cpu.unwrap_or(0);
            if self.profile.timeline.len() >= MAX_ENTRIES {
                return Err(Full("samples"));
            }
            self.profile.timeline.push(Moment { time_ns, value, sample: id, cpu });
        }
        Ok(())
    }

    /// Adds samples of which no time is known, with their weight.
    pub fn weighted(&mut self, key: SampleKey, count: u64, value: u64) -> Result<(), Full> {
        self.add(key, count, value).map(|_| ())
    }

    fn add(&mut self, key: SampleKey, count: u64, value: u64) -> Result<u32, Full> {
        let table = &mut self.profile.samples;
        let new = |key: &SampleKey| Sample { key: *key, count: 0, value: 0 };
        let id = intern(&mut self.samples, table, key, new, "samples")?;
        let total = (self.total.0.saturating_add(count), self.total.1.saturating_add(value));
        if total.0.max(total.1) > MAX_TOTAL {
            return Err(Full("samples, or time of them,"));
        }
        self.total = total;
        let sample = &mut self.profile.samples[id as usize];
        sample.count += count;
        sample.value += value;
        Ok(id)
    }

    /// Says what the values of the next samples are. Samples of CPU time are what all profiles
    /// have.
    pub fn types(&mut self, types: Types) -> Result<(), ValueError> {
        let shown = |types: &Types| {
            let kinds = types.kinds.iter().map(|(kind, unit)| format!("{kind}/{unit}"));
            kinds.collect::<Vec<_>>().join(", ")
        };
        if types.kinds.is_empty() {
            return Err(ValueError::None);
        }
        let is_cpu_time = types.kinds.len() == 2
            && types.kinds[0] == ("samples".to_owned(), "count".to_owned())
            && [("cpu", "nanoseconds"), ("cycles", "cycles")]
                .contains(&(types.kinds[1].0.as_str(), types.kinds[1].1.as_str()));
        self.of_cpu_time = is_cpu_time;
        match (&self.profile.types, is_cpu_time) {
            (None, true) => Ok(()),
            (Some(known), false) if known.kinds == types.kinds => Ok(()),
            (None, false) if self.profile.samples.is_empty() => {
                self.profile.types = Some(types);
                Ok(())
            }
            (known, _) => {
                let known =
                    known.as_ref().map_or("samples/count, cpu/nanoseconds".to_owned(), shown);
                Err(ValueError::Others { new: shown(&types), known })
            }
        }
    }

    /// Adds a sample with values as the last [`Builder::types`] said, and tells what it counts for.
    pub fn values(&mut self, key: SampleKey, values: &[i64]) -> Result<u64, ValueError> {
        if values.iter().any(|value| *value < 0) {
            return Err(ValueError::Negative);
        }
        let positive = |index: usize| values.get(index).map_or(0, |value| *value as u64);
        let types = self.profile.types.as_ref().filter(|_| !self.of_cpu_time);
        let (kinds, default) = types.map_or((2, 0), |types| (types.kinds.len(), types.default));
        if values.len() != kinds {
            return Err(ValueError::Ragged { values: values.len(), kinds });
        }
        if self.of_cpu_time {
            self.add(key, positive(0), positive(1))?;
            return Ok(positive(0));
        }
        let id = self.add(key, positive(default), 0)? as usize;
        let all = &mut self.profile.values;
        if all.len() <= id {
            all.resize(id + 1, vec![0; kinds]);
        }
        for (sum, value) in all[id].iter_mut().zip(values) {
            *sum = sum.saturating_add(*value);
        }
        Ok(positive(default))
    }

    /// Whether weights of another unit than those before have been added.
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// Whether values are no samples of CPU time.
    #[must_use]
    pub fn has_other_values(&self) -> bool {
        self.profile.types.is_some()
    }

    /// What another profiler had to say.
    pub fn comment(&mut self, comment: String) {
        if !self.profile.comments.contains(&comment) {
            self.profile.comments.push(comment);
        }
    }

    /// Says where this capture is from, whose event was not known when it began.
    pub fn origin(&mut self, origin: Origin) {
        if self.capture == self.first {
            self.profile.origin = origin;
        } else {
            self.add_up(&origin);
        }
    }

    /// Times of this capture's samples were told on a clock that was zero then, nanoseconds since
    /// the Unix epoch.
    pub fn shift_times(&mut self, zero_ns: u64) {
        if self.capture == self.first {
            self.profile.clock_zero_ns = zero_ns;
        }
        for moment in &mut self.profile.timeline[self.timeline_start..] {
            moment.time_ns = moment.time_ns.saturating_add(zero_ns);
        }
        for mapping in &mut self.profile.mappings[self.mapping_start..] {
            if mapping.since_ns != 0 {
                mapping.since_ns = mapping.since_ns.saturating_add(zero_ns);
            }
        }
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

    /// A file that its collector could not tell from others at its path.
    pub fn ambiguous(&mut self, executable: ExecutableId) {
        self.profile.ambiguous.insert(executable);
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

    /// Gives each sample its CPU as a label.
    pub fn label_cpus(&mut self) {
        self.by_cpu = true;
    }

    /// Keeps each sample with its time and CPU, 24 bytes each.
    pub fn keep_timeline(&mut self) {
        self.timeline = true;
    }

    /// Notes artifacts that name functions of a kernel or module.
    pub fn kernel_symbols(&mut self, of: ArtifactHash, pieces: &[ArtifactHash]) {
        if !pieces.is_empty() {
            self.profile.kernel_symbols.entry(of).or_default().extend(pieces);
        }
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

fn intern<K: Hash + Eq, V>(
    index: &mut FxHashMap<K, u32>,
    table: &mut Vec<V>,
    key: K,
    value: impl FnOnce(&K) -> V,
    what: &'static str,
) -> Result<u32, Full> {
    match index.entry(key) {
        Entry::Occupied(entry) => Ok(*entry.get()),
        Entry::Vacant(entry) => {
            let id = u32::try_from(table.len()).ok().filter(|_| table.len() < MAX_ENTRIES);
            let id = id.ok_or(Full(what))?;
            table.push(value(entry.key()));
            entry.insert(id);
            Ok(id)
        }
    }
}
