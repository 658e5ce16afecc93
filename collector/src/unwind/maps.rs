//! The maps of unwind tables, as memory to write. Knows where things lie (`collector-ebpf`), not
//! what they are for.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use stackwire_collector_ebpf::managed::LAYOUTS;
use stackwire_collector_ebpf::tables::{
    CHUNK, CHUNKS, EXECUTABLES, Executable, MAPPINGS, Mapping, PAGES, PROCESS_SLOTS, Process,
    RULES, mapping_word, moment,
};
use stackwire_collector_ebpf::vma::{FILES, File, Question};
use stackwire_collector_ebpf::{Rule, cpython, ruby, v8};
use stackwire_unwind::Interpreter;

use super::known::{Keys, KnownFiles};
use crate::sampler::mapped::Mapped;

/// Descriptors of the maps.
#[derive(Debug)]
pub struct Descriptors {
    /// By slot.
    pub processes: OwnedFd,
    /// Mappings of processes.
    pub mappings: OwnedFd,
    /// By number.
    pub executables: OwnedFd,
    /// Pages of executables.
    pub pages: OwnedFd,
    /// Rows of pages.
    pub rows: OwnedFd,
    /// By number.
    pub rules: OwnedFd,
    /// One word.
    pub generation: OwnedFd,
    /// Files whose executables have numbers.
    pub known_files: OwnedFd,
    /// What the kernel side is asked of a file.
    pub question: OwnedFd,
    /// Layouts of CPythons, by number.
    pub pythons: OwnedFd,
    /// Likewise, of Rubies.
    pub rubies: OwnedFd,
    /// Likewise, of V8s.
    pub v8s: OwnedFd,
}

impl Descriptors {
    /// Without eBPF programs to read them: files in memory, which take as much of it as is written.
    ///
    /// # Errors
    /// The system calls'.
    pub fn in_memory() -> io::Result<Self> {
        let map = |bytes: usize| {
            let fd = memfd_create(c"tables", MemfdFlags::CLOEXEC)?;
            ftruncate(&fd, bytes.next_multiple_of(rustix::param::page_size()) as u64)?;
            Ok::<_, io::Error>(fd)
        };
        Ok(Self {
            processes: map(PROCESS_SLOTS as usize * SLOT)?,
            mappings: map(MAPPINGS as usize * size_of::<Mapping>())?,
            executables: map(EXECUTABLES as usize * EXECUTABLE)?,
            pages: map(PAGES as usize * 8)?,
            rows: map((CHUNKS * CHUNK) as usize * 4)?,
            rules: map(RULES as usize * size_of::<Rule>())?,
            generation: map(8)?,
            known_files: map(FILES as usize * size_of::<File>())?,
            question: map(size_of::<Question>())?,
            pythons: map(LAYOUTS as usize * size_of::<cpython::Layout>())?,
            rubies: map(LAYOUTS as usize * size_of::<ruby::Layout>())?,
            v8s: map(LAYOUTS as usize * size_of::<v8::Layout>())?,
        })
    }
}

/// The maps of processes and their mappings.
#[derive(Debug)]
pub struct ProcessMaps {
    slots: Mapped,
    mappings: OwnedFd,
    /// The part written to last, and where it begins. Processes that come and go have theirs in the
    /// same place: to map it each time took a quarter of the time they cost.
    window: Option<(u64, Mapped)>,
    generation: Mapped,
}

/// The maps of executables and their tables.
#[derive(Debug)]
pub struct TableMaps {
    executables: Mapped,
    pages: OwnedFd,
    rows: OwnedFd,
    rules: OwnedFd,
    pythons: OwnedFd,
    rubies: OwnedFd,
    v8s: OwnedFd,
    generation: Mapped,
    /// Which file is which executable.
    pub files: KnownFiles,
}

/// Bytes of mappings that are kept mapped, a part of all of them.
const WINDOW: u64 = 64 << 10;
const _: () = assert!((MAPPINGS as u64 * size_of::<Mapping>() as u64).is_multiple_of(WINDOW));
/// Bytes of a process's slot.
const SLOT: usize = size_of::<Process>();
/// Bytes of an executable's entry.
const EXECUTABLE: usize = size_of::<Executable>();

/// Maps what is written often; the rest is mapped piece by piece, since all of it would be in our
/// memory at once.
///
/// # Errors
/// The system call's.
pub fn open(maps: Descriptors) -> io::Result<(ProcessMaps, TableMaps, Keys)> {
    let generation = || Mapped::read_write(maps.generation.as_fd(), 8);
    let processes = ProcessMaps {
        slots: Mapped::read_write(maps.processes.as_fd(), PROCESS_SLOTS as usize * SLOT)?,
        generation: generation()?,
        mappings: maps.mappings,
        window: None,
    };
    let tables = TableMaps {
        executables: Mapped::read_write(
            maps.executables.as_fd(),
            EXECUTABLES as usize * EXECUTABLE,
        )?,
        generation: generation()?,
        pages: maps.pages,
        rows: maps.rows,
        rules: maps.rules,
        pythons: maps.pythons,
        rubies: maps.rubies,
        v8s: maps.v8s,
        files: KnownFiles::new(&maps.known_files)?,
    };
    Ok((processes, tables, Keys::new(&maps.question)?))
}

impl ProcessMaps {
    /// What a slot holds.
    #[must_use]
    pub fn slot(&self, slot: u32) -> u64 {
        self.slots.atomic(slot as usize * SLOT).load(Ordering::Relaxed)
    }

    /// Replaces what a slot holds, after all that was written before: the word, then since when it
    /// is true.
    pub fn set_slot(&self, slot: u32, word: u64, since_ns: u64) {
        self.slots.atomic(slot as usize * SLOT).store(word, Ordering::SeqCst);
        self.slots.atomic(slot as usize * SLOT + 8).store(moment(since_ns), Ordering::SeqCst);
    }

    /// Writes mappings: start, end, number of the executable, offset in the file.
    ///
    /// # Errors
    /// The system call's.
    pub fn write(&mut self, first: u32, mappings: &[(u64, u64, u32, u64)]) -> io::Result<()> {
        let words = mappings.iter().flat_map(|&(start, end, executable, offset)| {
            [start, end, mapping_word(executable, offset >> 12)]
        });
        let at = u64::from(first) * size_of::<Mapping>() as u64;
        let from = at / WINDOW * WINDOW;
        if at + mappings.len() as u64 * size_of::<Mapping>() as u64 > from + WINDOW {
            return write(&self.mappings, at, words.collect());
        }
        if self.window.as_ref().is_none_or(|(of, _)| *of != from) {
            let window = Mapped::window(self.mappings.as_fd(), from, WINDOW as usize)?;
            self.window = Some((from, window));
        }
        if let Some((_, window)) = &self.window {
            for (index, word) in words.enumerate() {
                window.atomic((at - from) as usize + index * 8).store(word, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Makes walks that are under way distrust what they have read.
    pub fn next_generation(&self) {
        next_generation(&self.generation);
    }
}

impl TableMaps {
    /// Publishes an executable's pages and the number of the layout of its interpreter, or that
    /// there are none, as one of `tables::state`.
    pub fn set_executable(&self, number: u32, pages: u64, layout: u32, state: u64) {
        let at = number as usize * EXECUTABLE;
        // Never pages of one and the state of another: without a state pages are not read.
        self.executables.atomic(at + 8).store(0, Ordering::SeqCst);
        self.executables.atomic(at + 24).store(layout.into(), Ordering::SeqCst);
        self.executables.atomic(at).store(pages, Ordering::SeqCst);
        self.executables.atomic(at + 8).store(state, Ordering::SeqCst);
    }

    /// How often an executable was looked up.
    #[must_use]
    pub fn uses(&self, number: u32) -> u64 {
        self.executables.atomic(number as usize * EXECUTABLE + 16).load(Ordering::Relaxed)
    }

    /// Writes pages.
    ///
    /// # Errors
    /// The system call's.
    pub fn write_pages(&self, first: u32, pages: Vec<u64>) -> io::Result<()> {
        write(&self.pages, u64::from(first) * 8, pages)
    }

    /// Writes rows, from the beginning of a chunk on.
    ///
    /// # Errors
    /// The system call's.
    pub fn write_rows(&self, chunk: u32, rows: &[u32]) -> io::Result<()> {
        let words = rows
            .chunks(2)
            .map(|two| u64::from(two[0]) | u64::from(two.get(1).copied().unwrap_or(0)) << 32);
        write(&self.rows, u64::from(chunk) * u64::from(CHUNK) * 4, words.collect())
    }

    /// Writes a rule.
    ///
    /// # Errors
    /// The system call's.
    pub fn write_rule(&self, number: u16, rule: &Rule) -> io::Result<()> {
        debug_assert!(u32::from(number) < RULES);
        let words: &[u64; 3] = &zerocopy::transmute!(*rule);
        write(&self.rules, u64::from(number) * size_of::<Rule>() as u64, words.to_vec())
    }

    /// Writes the layout of an interpreter.
    ///
    /// # Errors
    /// The system call's.
    pub fn write_layout(&self, number: u32, of: &Interpreter) -> io::Result<()> {
        debug_assert!(number < LAYOUTS);
        let (map, words) = match of {
            Interpreter::Cpython(layout) => {
                let words: &[u64; size_of::<cpython::Layout>() / 8] =
                    zerocopy::transmute_ref!(layout);
                (&self.pythons, words.to_vec())
            }
            Interpreter::Ruby(layout) => {
                let words: &[u64; size_of::<ruby::Layout>() / 8] = zerocopy::transmute_ref!(layout);
                (&self.rubies, words.to_vec())
            }
            Interpreter::V8(layout) => {
                let words: [u64; size_of::<v8::Layout>() / 8] = zerocopy::transmute!(*layout);
                (&self.v8s, words.to_vec())
            }
        };
        write(map, u64::from(number) * 8 * words.len() as u64, words)
    }

    /// As of [`ProcessMaps`].
    pub fn next_generation(&self) {
        next_generation(&self.generation);
    }
}

fn next_generation(generation: &Mapped) {
    generation.atomic(0).fetch_add(1, Ordering::SeqCst);
}

/// Writes words at a byte offset, a multiple of 8, through a mapping that lasts no longer.
fn write(map: &OwnedFd, at: u64, words: Vec<u64>) -> io::Result<()> {
    if words.is_empty() {
        return Ok(());
    }
    let page = rustix::param::page_size() as u64;
    let from = at - at % page;
    let length = (at - from) as usize + words.len() * 8;
    let window = Mapped::window(map.as_fd(), from, length.next_multiple_of(page as usize))?;
    for (index, word) in words.into_iter().enumerate() {
        window.atomic((at - from) as usize + index * 8).store(word, Ordering::Relaxed);
    }
    Ok(())
}
