//! The capture once more, in the order of time: who came and went, what was mapped, and every
//! sample.

use std::io::{self, Write};

use rustc_hash::{FxHashMap, FxHashSet};
use stackwire_model::BuildId;
use stackwire_model::profile::{
    Executable, Location, LocationId, Moment, Process, ProcessId, Profile, SampleKey,
};

use super::interpreted::{self, Places};
use super::record::{At, Chain, Map, Records, chain};
use super::{jitted, kernel_name};
use crate::kernel_place::{self, HIDDEN_KERNEL, KERNEL_BASE};

/// Call chains kept encoded, in bytes.
const CHAINS_BYTES: usize = 64 << 20;
/// Samples between two rounds: readers hold what is between, to sort it.
const ROUND: u64 = 65_536;

/// No chain.
const NONE: u32 = u32::MAX;

/// Something that happened to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Exit(u32),
    Begin(u32),
    /// Index into [`Profile::mappings`].
    Map(u32),
}

/// A mapping in force: file offset, bytes, address.
type Placed = (u64, u64, u64);

/// Plays a profile.
#[derive(Debug)]
pub struct Player<'a, W> {
    profile: &'a Profile,
    jitted: bool,
    interpreted: Places,
    /// Path and build-id of their file.
    functions_file: (String, Option<BuildId>),
    /// Processes that run functions which are there.
    run_by: FxHashSet<ProcessId>,
    records: Records<W>,
    kernel: FxHashMap<u32, (u64, u64)>,
    /// By time; of equal times in the order of [`Event`].
    events: Vec<(u64, Event)>,
    next_event: usize,
    /// By process and executable, last mapped last.
    placed: FxHashMap<(u32, u32), Vec<Placed>>,
    /// By process: counts its mappings, so that chains from before are not used again.
    versions: Vec<u32>,
    chains: Vec<(u32, Chain)>,
    chains_bytes: usize,
    /// By sample: its chain in `chains`, or [`NONE`].
    chain_of: Vec<u32>,
    /// By thread: what its names are told apart by. A thread that was renamed is several in the
    /// profile.
    task_of: Vec<u32>,
    /// By process: that of its main thread, or [`NONE`] when that has no samples.
    main_task_of: Vec<u32>,
    /// By the two above: the name written last.
    names: Vec<&'a str>,
    /// Process ids met.
    begun: FxHashSet<u32>,
    /// By executable: something is mapped from it.
    used: Vec<bool>,
    times: (u64, u64),
}

impl<'a, W: Write> Player<'a, W> {
    /// Lays out what is to be played.
    pub fn new(profile: &'a Profile, jitted: bool, out: W) -> Self {
        let mut tasks = FxHashMap::default();
        let task_of = profile.threads.iter().map(|thread| {
            let next = tasks.len() as u32;
            *tasks.entry((thread.process, thread.tid)).or_insert(next)
        });
        let task_of = task_of.collect();
        let main_task_of = (0..).zip(&profile.processes).map(|(index, process)| {
            tasks.get(&(ProcessId(index), process.pid)).copied().unwrap_or(NONE)
        });
        let interpreted = Places::new(profile);
        let functions_file = if jitted {
            let (name, id) = interpreted::identity(profile, &interpreted);
            (name, BuildId::new(&id))
        } else {
            ("[interpreted]".to_owned(), None)
        };
        let mut player = Self {
            profile,
            jitted,
            run_by: interpreted.run_by(profile),
            interpreted,
            functions_file,
            records: Records::new(out),
            kernel: kernel_place::places(profile),
            events: Vec::new(),
            next_event: 0,
            placed: FxHashMap::default(),
            versions: vec![0; profile.processes.len()],
            chains: Vec::new(),
            chains_bytes: 0,
            chain_of: vec![NONE; profile.samples.len()],
            task_of,
            main_task_of: main_task_of.collect(),
            names: vec![""; tasks.len()],
            begun: FxHashSet::default(),
            used: vec![false; profile.executables.len()],
            times: (0, 0),
        };
        player.events = player.lay_out();
        player
    }

    /// Bytes written.
    pub fn bytes(&self) -> u64 {
        self.records.bytes
    }

    /// First and last sample, on the clock of samples.
    pub fn times(&self) -> (u64, u64) {
        self.times
    }

    /// By executable, whether something was mapped from it.
    pub fn into_used(self) -> Vec<bool> {
        self.used
    }

    /// Writes all records.
    pub fn play(&mut self) -> io::Result<()> {
        self.kernel_maps()?;
        let profile = self.profile;
        let timeline = &profile.timeline;
        let mut last = At::default();
        let mut play = |player: &mut Self, index: usize, number: u64| {
            let moment = &timeline[index];
            player.events_until(moment.time_ns)?;
            last = player.sample(moment)?;
            player.times.0 = if number == 0 { last.time } else { player.times.0 };
            player.times.1 = last.time;
            if number % ROUND == ROUND - 1 { player.records.finished_round() } else { Ok(()) }
        };
        if timeline.is_sorted_by_key(|moment| moment.time_ns) {
            for index in 0..timeline.len() {
                play(self, index, index as u64)?;
            }
        } else {
            let mut order: Vec<u32> = (0..timeline.len() as u32).collect();
            order.sort_by_key(|&index| timeline[index as usize].time_ns);
            for (number, index) in order.into_iter().enumerate() {
                play(self, index as usize, number as u64)?;
            }
        }
        for &(count, samples) in profile.lost.values() {
            if samples && count > 0 {
                self.records.lost(last, count)?;
            }
        }
        self.events_until(u64::MAX)?;
        self.records.finished_round()
    }

    /// When each process began and ended, as far as samples need to know.
    fn lay_out(&self) -> Vec<(u64, Event)> {
        let profile = self.profile;
        let mut spans: Vec<Option<(u64, u64)>> = vec![None; profile.processes.len()];
        for moment in &profile.timeline {
            let thread = profile.samples[moment.sample as usize].key.thread;
            let process = profile.threads[thread.index()].process;
            let time = moment.time_ns;
            let span = spans[process.index()].get_or_insert((time, time));
            *span = (span.0.min(time), span.1.max(time));
        }
        let start = spans.iter().flatten().map(|span| span.0).min().unwrap_or(0);
        let start = if profile.start_ns == 0 { start } else { start.min(profile.start_ns) };
        // Who had a pid first was there from the start, unless it was seen to come.
        let mut first: FxHashMap<u32, (u64, usize)> = FxHashMap::default();
        for (index, span) in spans.iter().enumerate() {
            let Some((time, _)) = *span else { continue };
            let entry = first.entry(profile.processes[index].pid).or_insert((time, index));
            *entry = (*entry).min((time, index));
        }
        let mut begins = vec![None; profile.processes.len()];
        let mut events = Vec::new();
        for (index, span) in spans.iter().enumerate() {
            let Some((time, last)) = *span else { continue };
            let process = &profile.processes[index];
            let is_first = first.get(&process.pid).is_some_and(|&(_, first)| first == index);
            let begin = match process.since_ns {
                0 if is_first => start,
                0 => time,
                since => since.min(time),
            };
            begins[index] = Some(begin);
            events.push((begin, Event::Begin(index as u32)));
            if process.end_ns != 0 {
                events
                    .push((process.end_ns.max(last.saturating_add(1)), Event::Exit(index as u32)));
            }
        }
        for (index, mapping) in profile.mappings.iter().enumerate() {
            if let Some(begin) = begins[mapping.process.index()] {
                events.push((begin.max(mapping.since_ns), Event::Map(index as u32)));
            }
        }
        events.sort_unstable();
        events
    }

    fn kernel_maps(&mut self) -> io::Result<()> {
        for (index, executable) in self.profile.executables.iter().enumerate() {
            let Executable::Kernel { module, .. } = executable else { continue };
            let Some(&(start, length)) = self.kernel.get(&(index as u32)) else { continue };
            // perf would name it by the first function of its own kernel.
            if start == HIDDEN_KERNEL {
                continue;
            }
            // Readers tell by this symbol how far the kernel was moved: not at all.
            let (name, file_offset) = match module.as_str() {
                "" => (format!("{}_text", kernel_name(module)), KERNEL_BASE),
                _ => (kernel_name(module), 0),
            };
            let map = Map { start, length, file_offset, build_id: None, path: &name };
            self.records.kernel_map(map)?;
        }
        Ok(())
    }

    fn events_until(&mut self, time_ns: u64) -> io::Result<()> {
        while let Some(&(at, event)) = self.events.get(self.next_event)
            && at <= time_ns
        {
            self.next_event += 1;
            match event {
                Event::Begin(index) => self.begin(index, at)?,
                Event::Map(index) => self.map(index, at)?,
                Event::Exit(index) => {
                    let process = &self.profile.processes[index as usize];
                    self.records.exit(self.at(process, process.pid, at, 0), process.parent)?;
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, index: u32, time_ns: u64) -> io::Result<()> {
        let process = &self.profile.processes[index as usize];
        let at = self.at(process, process.pid, time_ns, 0);
        // An exec keeps the threads' history, a new process must not inherit that of who had its
        // pid before.
        let execs = !self.begun.insert(process.pid) && process.generation > 0;
        if !execs {
            self.records.fork(at, process.parent)?;
        }
        if let Some(name) = self.names.get_mut(self.main_task_of[index as usize] as usize) {
            *name = &process.comm;
        }
        self.records.comm(at, &process.comm, execs)?;
        if !self.run_by.contains(&ProcessId(index)) {
            return Ok(());
        }
        let (path, build_id) = (&self.functions_file.0, self.functions_file.1);
        let (start, length) = (interpreted::BASE, self.interpreted.length);
        self.records.map(at, Map { start, length, file_offset: jitted::TEXT, build_id, path })
    }

    fn map(&mut self, index: u32, time_ns: u64) -> io::Result<()> {
        let mapping = &self.profile.mappings[index as usize];
        let process = &self.profile.processes[mapping.process.index()];
        let executable = &self.profile.executables[mapping.executable.index()];
        let (start, length) = (mapping.start.0, mapping.length);
        let mut file_offset = mapping.file_offset.0;
        let (name, build_id) = match executable {
            Executable::Anonymous if self.jitted => {
                let (name, id) = jitted::identity(self.profile, index as usize);
                file_offset = jitted::TEXT;
                (name, BuildId::new(&id))
            }
            // The name perf takes for code a JIT made, whose symbols are in /tmp/perf-PID.map.
            Executable::Anonymous => ("//anon".to_owned(), None),
            executable => (executable.name(), executable.build_id()),
        };
        let owner = (mapping.process.0, mapping.executable.0);
        self.placed.entry(owner).or_default().push((file_offset, length, start));
        self.versions[mapping.process.index()] += 1;
        self.used[mapping.executable.index()] = true;
        let map = Map { start, length, file_offset, build_id, path: &name };
        self.records.map(self.at(process, process.pid, time_ns, 0), map)
    }

    fn sample(&mut self, moment: &Moment) -> io::Result<At> {
        let key = self.profile.samples[moment.sample as usize].key;
        let thread = &self.profile.threads[key.thread.index()];
        let process = &self.profile.processes[thread.process.index()];
        let at = self.at(process, thread.tid, moment.time_ns, moment.cpu());
        let name = &mut self.names[self.task_of[key.thread.index()] as usize];
        if *name != thread.comm {
            *name = &thread.comm;
            self.records.comm(at, &thread.comm, false)?;
        }
        let index = self.chain_index(moment.sample, key, thread.process.0);
        self.records.sample(at, key.series, moment.value, &self.chains[index].1)?;
        Ok(at)
    }

    /// Where the chain of a sample is, as its process is mapped now.
    fn chain_index(&mut self, sample: u32, key: SampleKey, process: u32) -> usize {
        let version = self.versions[process as usize];
        let known = self.chain_of[sample as usize] as usize;
        if self.chains.get(known).is_some_and(|(of, _)| *of == version) {
            return known;
        }
        if self.chains_bytes > CHAINS_BYTES {
            self.chains.clear();
            self.chain_of.fill(NONE);
            self.chains_bytes = 0;
        }
        let chain = self.chain(key, process);
        self.chains_bytes += chain.bytes.len() + size_of::<(u32, Chain)>();
        self.chain_of[sample as usize] = self.chains.len() as u32;
        self.chains.push((version, chain));
        self.chains.len() - 1
    }

    fn chain(&self, key: SampleKey, process: u32) -> Chain {
        let addresses = |stack: Option<stackwire_model::profile::StackId>| -> Vec<u64> {
            let locations = stack.into_iter().flat_map(|stack| self.profile.stack(stack));
            let address = |location: LocationId| {
                self.address(&self.profile.locations[location.index()], process)
            };
            locations.map(address).collect()
        };
        chain(&addresses(key.kernel), &addresses(key.user))
    }

    /// Where a location is in a process now.
    fn address(&self, location: &Location, process: u32) -> u64 {
        let executable = location.executable;
        if let Some(address) = self.interpreted.address(location) {
            return address;
        }
        if let Some((start, _)) = self.kernel.get(&executable.0) {
            return start.saturating_add(location.address.number());
        }
        let private = matches!(
            self.profile.executables[executable.index()],
            Executable::Anonymous | Executable::Unmapped
        );
        if private {
            return location.address.number();
        }
        let placed = self.placed.get(&(process, executable.0));
        let found = placed.into_iter().flatten().rev().find(|(file_offset, length, _)| {
            location
                .address
                .number()
                .checked_sub(*file_offset)
                .is_some_and(|inside| inside < *length)
        });
        found.map_or(location.address.number(), |(file_offset, _, start)| {
            start.saturating_add(location.address.number() - file_offset)
        })
    }

    fn at(&self, process: &Process, tid: u32, time_ns: u64, cpu: u32) -> At {
        let time = time_ns.saturating_sub(self.profile.clock_zero_ns);
        At { pid: process.pid, tid, time, cpu }
    }
}
