//! The tables as whoever walks a copied stack reads them, in the memory that the catalog writes:
//! what the eBPF programs read through their maps.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use stackwire_collector_ebpf::Rule;
use stackwire_collector_ebpf::frame::Tables;
use stackwire_collector_ebpf::tables::{
    CHUNK, CHUNKS, EXECUTABLES, Executable, MAPPINGS, Mapping, PAGES, PROCESS_PROBES,
    PROCESS_SLOTS, Process, RULES, first_slot, process_of,
};

use super::maps::Descriptors;
use crate::sampler::mapped::Mapped;

/// All tables.
#[derive(Debug)]
pub struct Reader {
    processes: Mapped,
    mappings: Mapped,
    executables: Mapped,
    pages: Mapped,
    rows: Mapped,
    rules: Mapped,
    generation: Mapped,
    /// What was read last.
    mapping: Mapping,
    rule: Rule,
}

impl Reader {
    /// Maps all of them; memory is taken by what is written there.
    ///
    /// # Errors
    /// The system call's.
    pub fn new(maps: &Descriptors) -> io::Result<Self> {
        let map = |fd: &OwnedFd, count: u32, size: usize| {
            Mapped::read_write(fd.as_fd(), count as usize * size)
        };
        Ok(Self {
            processes: map(&maps.processes, PROCESS_SLOTS, size_of::<Process>())?,
            mappings: map(&maps.mappings, MAPPINGS, size_of::<Mapping>())?,
            executables: map(&maps.executables, EXECUTABLES, size_of::<Executable>())?,
            pages: map(&maps.pages, PAGES, 8)?,
            rows: map(&maps.rows, CHUNKS * CHUNK, 4)?,
            rules: map(&maps.rules, RULES, size_of::<Rule>())?,
            generation: map(&maps.generation, 1, 8)?,
            mapping: Mapping::default(),
            rule: Rule::default(),
        })
    }

    /// First mapping and number of mappings of a process, if they are known.
    #[must_use]
    pub fn process(&self, pid: u32) -> Option<(u32, u32)> {
        let slots = (0..PROCESS_PROBES).map(|probe| (first_slot(pid) + probe) % PROCESS_SLOTS);
        let words = slots.map(|slot| word(&self.processes, slot as usize * size_of::<Process>()));
        let (_, first, count) = words.map(process_of).find(|&(of, ..)| of == pid)?;
        Some((first, count))
    }

    /// Counts up before what was given back is used again.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.atomic(0).load(Ordering::SeqCst)
    }
}

impl Tables for Reader {
    fn mapping(&mut self, number: u32) -> Option<&Mapping> {
        let at = (number < MAPPINGS).then_some(number as usize * size_of::<Mapping>())?;
        let [start, end, word] = [0, 8, 16].map(|part| word(&self.mappings, at + part));
        self.mapping = Mapping { start, end, word };
        Some(&self.mapping)
    }

    fn executable(&mut self, number: u32) -> Option<(u64, u64)> {
        let at = (number < EXECUTABLES).then_some(number as usize * size_of::<Executable>())?;
        self.executables.atomic(at + 16).fetch_add(1, Ordering::Relaxed);
        Some((word(&self.executables, at), word(&self.executables, at + 8)))
    }

    fn page(&mut self, number: u32) -> Option<u64> {
        (number < PAGES).then(|| word(&self.pages, number as usize * 8))
    }

    fn row(&mut self, number: u32) -> Option<u32> {
        let at = (number < CHUNKS * CHUNK).then_some(number as usize / 2 * 8)?;
        let two = word(&self.rows, at);
        Some((two >> (32 * (number % 2))) as u32)
    }

    fn rule(&mut self, number: u32) -> Option<&Rule> {
        let at = (number < RULES).then_some(number as usize * size_of::<Rule>())?;
        let words: [u64; 3] = [0, 8, 16].map(|part| word(&self.rules, at + part));
        self.rule = zerocopy::transmute!(words);
        Some(&self.rule)
    }
}

fn word(of: &Mapped, at: usize) -> u64 {
    of.atomic(at).load(Ordering::SeqCst)
}
