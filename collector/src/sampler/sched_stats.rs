//! The kernel side's sums of how threads are scheduled, and the hardware counters it reads.
//!
//! Opens a counter on each CPU; whether the hardware has it is known then. Called by `mod.rs`.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;

use aya::maps::{Array, MapData, PerCpuValues};
use stackwire_collector_ebpf::MAX_CPUS;
use stackwire_collector_ebpf::sched_stats::{CounterSum, OnCpu, SchedStats, THE_REST};
use stackwire_model::Event;
use stackwire_model::sched::PerfCounter;
use zerocopy::FromBytes;

use super::load_error::{LoadError, load_error};
use super::object::{Running, Sums};
use crate::sources::perf_event::PerfEvent;

/// The sums and the counters.
pub struct SchedSums {
    sums: Sums,
    places: Array<MapData, u32>,
    running: Running,
    /// Those there are.
    events: Vec<Event>,
    /// By CPU: open counters, each with its number among `events`.
    open: BTreeMap<u32, Vec<(usize, PerfEvent)>>,
}

impl SchedSums {
    /// Takes the maps of the kernel side. `events` are those of [`counters`] that are there.
    pub fn new(
        sums: Sums,
        places: Array<MapData, u32>,
        running: Running,
        events: Vec<Event>,
    ) -> Result<Self, LoadError> {
        let mut new = Self { sums, places, running, events, open: BTreeMap::new() };
        let zeros = [0; size_of::<SchedStats>()];
        new.sums.insert(THE_REST, zeros, 0).map_err(load_error)?;
        Ok(new)
    }

    /// Says that it begins at this time: what runs then is not seen to be switched to.
    ///
    /// # Errors
    /// The map's.
    pub fn begin(&mut self, now_ns: u64) -> Result<(), LoadError> {
        let now = OnCpu { since_ns: now_ns, ..OnCpu::default() };
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| load_error(error))?;
        let all = PerCpuValues::try_from(vec![zerocopy::transmute!(now); cpus]);
        let all = all.map_err(load_error)?;
        self.running.set(0, all, 0).map_err(load_error)
    }

    /// What has not been switched out since it was switched to, with what its counters have counted
    /// since then.
    pub fn running(&mut self) -> Vec<OnCpu> {
        let all = self.running.get(&0, 0);
        let all = all.iter().flat_map(|all| all.iter()).zip(0..);
        let mut found = Vec::new();
        for (bytes, cpu) in all {
            let Ok(mut on_cpu) = OnCpu::read_from_bytes(bytes) else { continue };
            if on_cpu.pid == 0 {
                continue;
            }
            let before = std::mem::take(&mut on_cpu.counters);
            for (number, counter) in self.open.get_mut(&cpu).into_iter().flatten() {
                // Not known before the first look.
                let before = before.get(*number).filter(|before| before.enabled_ns > 0);
                if let Some((now, before)) = counter.counted().zip(before) {
                    on_cpu.counters[*number] = CounterSum {
                        value: now.value.saturating_sub(before.value),
                        enabled_ns: now.enabled_ns.saturating_sub(before.enabled_ns),
                        running_ns: now.running_ns.saturating_sub(before.running_ns),
                    };
                }
            }
            found.push(on_cpu);
        }
        found
    }

    /// Opens the counters of a CPU, if they are not.
    pub fn open(&mut self, cpu: u32) {
        if cpu >= MAX_CPUS || self.open.contains_key(&cpu) {
            return;
        }
        let mut counters = Vec::with_capacity(self.events.len());
        for (number, event) in self.events.iter().enumerate() {
            let Some(perf) = event.perf else { continue };
            // One that fails counts nothing on this CPU, and its time enabled says so.
            let Ok(counter) = PerfEvent::count(cpu, perf) else { continue };
            let place = number as u32 * MAX_CPUS + cpu;
            if self.places.set(place, counter.fd().as_raw_fd() as u32, 0).is_ok() {
                counters.push((number, counter));
            }
        }
        self.open.insert(cpu, counters);
    }

    /// Closes those of a CPU that went offline, if only for a moment.
    pub fn close(&mut self, cpu: u32) {
        self.open.remove(&cpu);
    }

    /// All sums, by `key_of` a process or thread.
    pub fn read(&self) -> impl Iterator<Item = (u64, SchedStats)> + '_ {
        let read = |(key, bytes): (u64, [u8; size_of::<SchedStats>()])| {
            Some((key, SchedStats::read_from_bytes(&bytes).ok()?))
        };
        self.sums.iter().flatten().filter_map(read)
    }

    /// Drops the sums of one that ended.
    pub fn forget(&mut self, key: u64) {
        // Not there, it need not be dropped.
        let _ = self.sums.remove(&key);
    }
}

/// Which counters this machine has: each is opened on the first of these CPUs.
#[must_use]
pub fn counters(cpus: &[u32]) -> Vec<PerfCounter> {
    let cpu = cpus.first().copied().unwrap_or(0);
    let counter = |event: Event| {
        let opened = match event.perf {
            Some(perf) => PerfEvent::count(cpu, perf).map(drop),
            None => Err(io::ErrorKind::Unsupported.into()),
        };
        let missing = opened.err().map(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::EOPNOTSUPP | libc::ENODEV) => {
                "this machine has no counter for it".to_owned()
            }
            _ => error.to_string(),
        });
        PerfCounter { name: event.name, missing }
    };
    PerfCounter::events().into_iter().map(counter).collect()
}
