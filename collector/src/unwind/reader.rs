//! The tables as whoever walks a copied stack reads them, in the memory that the catalog writes:
//! what the eBPF programs read through their maps.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use stackwire_collector_ebpf::Rule;
use stackwire_collector_ebpf::frame::Tables;
use stackwire_collector_ebpf::tables::{
    CHUNK, CHUNKS, EXECUTABLES, Executable, MAPPINGS, Mapping, PAGES, RULES,
};

use super::maps::Descriptors;
use crate::sampler::mapped::Mapped;

/// All tables.
#[derive(Debug)]
pub struct Reader {
    mappings: Pieces,
    executables: Pieces,
    pages: Pieces,
    rows: Pieces,
    rules: Pieces,
    generation: Mapped,
    /// Number of the executable that was looked up last.
    pub executable: u32,
    /// What was read last.
    mapping: Mapping,
    rule: Rule,
}

impl Reader {
    /// Reads these.
    ///
    /// # Errors
    /// The system call's.
    pub fn new(maps: &Descriptors) -> io::Result<Self> {
        Ok(Self {
            mappings: Pieces::new(&maps.mappings)?,
            executables: Pieces::new(&maps.executables)?,
            pages: Pieces::new(&maps.pages)?,
            rows: Pieces::new(&maps.rows)?,
            rules: Pieces::new(&maps.rules)?,
            generation: Mapped::read_write(maps.generation.as_fd(), 8)?,
            executable: 0,
            mapping: Mapping::default(),
            rule: Rule::default(),
        })
    }

    /// Gives the memory back that was taken to read. To be called when there is nothing to walk for
    /// a while.
    pub fn rest(&mut self) {
        let Self { mappings, executables, pages, rows, rules, .. } = self;
        for pieces in [mappings, executables, pages, rows, rules] {
            pieces.mapped.clear();
        }
    }

    /// What is known of an executable.
    pub fn state_of(&mut self, number: u32) -> Option<u64> {
        let at = (number < EXECUTABLES).then_some(number as usize * size_of::<Executable>())?;
        self.executables.word(at + 8)
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
        let [start, end, word] = [0, 8, 16].map(|part| self.mappings.word(at + part));
        self.mapping = Mapping { start: start?, end: end?, word: word? };
        Some(&self.mapping)
    }

    fn executable(&mut self, number: u32) -> Option<(u64, u64)> {
        let at = (number < EXECUTABLES).then_some(number as usize * size_of::<Executable>())?;
        self.executable = number;
        self.executables.atomic(at + 16)?.fetch_add(1, Ordering::Relaxed);
        Some((self.executables.word(at)?, self.executables.word(at + 8)?))
    }

    fn page(&mut self, number: u32) -> Option<u64> {
        (number < PAGES).then(|| self.pages.word(number as usize * 8))?
    }

    fn row(&mut self, number: u32) -> Option<u32> {
        let at = (number < CHUNKS * CHUNK).then_some(number as usize / 2 * 8)?;
        let two = self.rows.word(at)?;
        Some((two >> (32 * (number % 2))) as u32)
    }

    fn rule(&mut self, number: u32) -> Option<&Rule> {
        let at = (number < RULES).then_some(number as usize * size_of::<Rule>())?;
        let [first, second, third] = [0, 8, 16].map(|part| self.rules.word(at + part));
        self.rule = zerocopy::transmute!([first?, second?, third?]);
        Some(&self.rule)
    }
}

/// A table that is mapped piece by piece: all that is mapped of a map of the kernel counts as
/// memory of this process.
#[derive(Debug)]
struct Pieces {
    of: OwnedFd,
    mapped: HashMap<usize, Mapped>,
}

/// Bytes of a piece, and most pieces of a table.
const PIECE: usize = 64 << 10;
const MAX_PIECES: usize = 32;

impl Pieces {
    fn new(of: &OwnedFd) -> io::Result<Self> {
        Ok(Self { of: of.try_clone()?, mapped: HashMap::new() })
    }

    fn word(&mut self, at: usize) -> Option<u64> {
        self.atomic(at).map(|word| word.load(Ordering::SeqCst))
    }

    /// The eight bytes there. None: they cannot be mapped.
    fn atomic(&mut self, at: usize) -> Option<&AtomicU64> {
        let piece = at / PIECE;
        if !self.mapped.contains_key(&piece) {
            if self.mapped.len() >= MAX_PIECES
                && let Some(&other) = self.mapped.keys().next()
            {
                self.mapped.remove(&other);
            }
            let mapped = Mapped::window(self.of.as_fd(), (piece * PIECE) as u64, PIECE).ok()?;
            self.mapped.insert(piece, mapped);
        }
        Some(self.mapped.get(&piece)?.atomic(at % PIECE))
    }
}
