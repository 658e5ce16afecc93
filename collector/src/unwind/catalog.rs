//! The executables the kernel side knows by number, and their tables in its maps: who has one, who wants one, who must go.
//!
//! Shared by the collecting thread, which numbers what it sees mapped, and the loading thread, which brings tables. Opens
//! and parses nothing.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stackwire_collector_ebpf::tables::{
    CHUNK, CHUNKS, EXECUTABLES, PAGES, RULES, page_word, pages_word, row, state,
};
use stackwire_collector_ebpf::unwind::{NO_RULE, Rule};
use stackwire_unwind::Table;

use super::maps::TableMaps;
use super::space::Space;
use crate::broker::Wanted;
use crate::process::executable::Kind;

/// Number of all executables there is no number for: they have no table.
const UNLISTED: u32 = 1;
/// Processes remembered to have a file mapped.
const MAX_WANTED: usize = 4;

/// What the loading thread is to bring.
#[derive(Clone, Debug)]
pub struct Job {
    /// Number of the executable.
    pub number: u32,
    /// What it is.
    pub kind: Kind,
    /// Where it is mapped, the last process first.
    pub wanted: Vec<Wanted>,
}

impl Job {
    /// GNU build-id, empty when it has none.
    #[must_use]
    pub fn build_id(&self) -> &[u8] {
        match &self.kind {
            Kind::File { build_id, .. } => build_id,
            _ => &[],
        }
    }
}

/// What became of tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tables put into the maps.
    pub loaded: u64,
    /// Of those, compiled and not on disk from before.
    pub compiled: u64,
    /// Time that took, failures included, nanoseconds.
    pub compile_ns: u64,
    /// Executables without one, for good.
    pub failed: u64,
    /// Tables that had to go for others.
    pub evicted: u64,
}

impl Stats {
    /// What has come since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            loaded: self.loaded - before.loaded,
            compiled: self.compiled - before.compiled,
            compile_ns: self.compile_ns - before.compile_ns,
            failed: self.failed - before.failed,
            evicted: self.evicted - before.evicted,
        }
    }
}

/// The catalog.
#[derive(Debug)]
pub struct Catalog {
    inner: Mutex<Inner>,
    /// Told when an executable has got a number.
    numbered: Condvar,
}

#[derive(Debug)]
struct Inner {
    maps: TableMaps,
    pages: Space,
    chunks: Space,
    rules: HashMap<Rule, u16>,
    numbers: HashMap<Kind, u32>,
    /// By number.
    slots: Vec<Slot>,
    stats: Stats,
}

#[derive(Debug)]
struct Slot {
    kind: Kind,
    wanted: Vec<Wanted>,
    /// Areas that have it mapped.
    refs: u32,
    /// On disk, by [`Catalog::next_idle`].
    looked_for: bool,
    state: State,
    /// Its uses at the last look, and how many there have been of late.
    seen: u64,
    heat: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Wanting,
    Loading,
    /// First page, pages, first chunk, chunks.
    Ready(u32, u32, u32, u32),
    /// Why.
    Failed(String),
}

impl Catalog {
    /// An empty one.
    #[must_use]
    pub fn new(maps: TableMaps) -> Self {
        maps.set_executable(UNLISTED, 0, state::NONE);
        let none = || Slot {
            kind: Kind::Unmapped,
            wanted: Vec::new(),
            refs: 1,
            looked_for: false,
            state: State::Failed(String::new()),
            seen: 0,
            heat: 0,
        };
        let inner = Mutex::new(Inner {
            maps,
            pages: Space::new(PAGES, 0),
            chunks: Space::new(CHUNKS, 0),
            rules: HashMap::from([(Rule::default(), NO_RULE)]),
            numbers: HashMap::new(),
            slots: vec![none(), none()],
            stats: Stats::default(),
        });
        Self { inner, numbered: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of an executable, for one user more; `wanted` is where its file is mapped.
    pub fn number(&self, kind: &Kind, wanted: Option<Wanted>) -> u32 {
        let mut inner = self.lock();
        let before = inner.slots.len();
        let number = inner.number(kind, wanted);
        if inner.slots.len() > before {
            self.numbered.notify_one();
        }
        number
    }

    /// Waits until an executable has got a number, or this long.
    pub fn wait(&self, at_most: Duration) {
        // Whoever has panicked with the lock, there is nothing to wait for.
        let _ = self.numbered.wait_timeout(self.lock(), at_most);
    }

    /// One user less, each.
    pub fn release(&self, numbers: &[u32]) {
        let mut inner = self.lock();
        for &number in numbers {
            let slot = &mut inner.slots[number as usize];
            slot.refs = slot.refs.saturating_sub(1);
        }
    }

    /// The executable that wants its table most: of those looked up, or of `all`.
    pub fn next(&self, all: bool) -> Option<Job> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let wanting =
            inner.slots.iter().enumerate().filter(|(_, slot)| slot.state == State::Wanting);
        let (number, _) = wanting
            .map(|(number, slot)| (number, inner.maps.uses(number as u32).wrapping_sub(slot.seen)))
            .filter(|(_, uses)| all || *uses > 0)
            .max_by_key(|&(number, uses)| (uses, std::cmp::Reverse(number)))?;
        let slot = &mut inner.slots[number];
        slot.state = State::Loading;
        let wanted = slot.wanted.iter().rev().cloned().collect();
        Some(Job { number: number as u32, kind: slot.kind.clone(), wanted })
    }

    /// An executable nobody has looked up yet and that may have its table on disk, each once, the one mapped most first;
    /// none where tables had to go for others.
    pub fn next_idle(&self) -> Option<Job> {
        let mut inner = self.lock();
        if inner.stats.evicted > 0 {
            return None;
        }
        let idle = inner.slots.iter_mut().enumerate();
        let idle = idle.filter(|(_, slot)| slot.state == State::Wanting && !slot.looked_for);
        let (number, slot) = idle.max_by_key(|(_, slot)| slot.refs)?;
        slot.looked_for = true;
        slot.state = State::Loading;
        Some(Job { number: number as u32, kind: slot.kind.clone(), wanted: Vec::new() })
    }

    /// It has none on disk: it waits for its turn.
    pub fn put_back(&self, number: u32) {
        self.lock().slots[number as usize].state = State::Wanting;
    }

    /// Puts a table into the maps, or notes that there is none. `compiled`: how long compiling took, if it had to be.
    pub fn install(&self, number: u32, table: Result<&Table, String>, compiled: Option<Duration>) {
        let mut inner = self.lock();
        inner.stats.compiled += u64::from(compiled.is_some() && table.is_ok());
        inner.stats.compile_ns += compiled.unwrap_or_default().as_nanos() as u64;
        let placed = table.and_then(|table| inner.place(number, table));
        match placed {
            Ok((state, pages)) => {
                inner.stats.loaded += 1;
                inner.slots[number as usize].state = state;
                inner.maps.set_executable(number, pages, state::READY);
            }
            Err(why) => {
                inner.stats.failed += 1;
                inner.slots[number as usize].state = State::Failed(why);
                inner.maps.set_executable(number, 0, state::NONE);
            }
        }
    }

    /// Lets what was used long ago count less. To be called once a second or so.
    pub fn cool(&self) {
        let mut inner = self.lock();
        let Inner { maps, slots, .. } = &mut *inner;
        for (number, slot) in slots.iter_mut().enumerate() {
            // Those that want their table are compared by all of their uses.
            if slot.state != State::Wanting {
                let uses = maps.uses(number as u32);
                slot.heat = slot.heat / 2 + uses.wrapping_sub(slot.seen);
                slot.seen = uses;
            }
        }
    }

    /// Why an executable has no table, if there will be none.
    #[must_use]
    pub fn missing(&self, kind: &Kind) -> Option<String> {
        let inner = self.lock();
        match &inner.slots[*inner.numbers.get(kind)? as usize].state {
            State::Failed(why) => Some(why.clone()),
            _ => None,
        }
    }

    /// What became of tables since the start.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.lock().stats
    }
}

impl Inner {
    fn number(&mut self, kind: &Kind, wanted: Option<Wanted>) -> u32 {
        let number = match self.numbers.get(kind) {
            Some(&number) => number,
            None => {
                let slot = Slot {
                    kind: kind.clone(),
                    wanted: Vec::new(),
                    refs: 0,
                    looked_for: false,
                    state: State::Wanting,
                    seen: 0,
                    heat: 0,
                };
                let number = if self.slots.len() < EXECUTABLES as usize {
                    self.slots.push(slot);
                    (self.slots.len() - 1) as u32
                } else {
                    let Some(number) = self.idle() else { return UNLISTED };
                    self.drop_table(number);
                    let seen = self.maps.uses(number);
                    let before = &mut self.slots[number as usize];
                    self.numbers.remove(&before.kind);
                    *before = Slot { seen, ..slot };
                    number
                };
                self.maps.set_executable(number, 0, state::NOT_YET);
                self.numbers.insert(kind.clone(), number);
                number
            }
        };
        let slot = &mut self.slots[number as usize];
        slot.refs += 1;
        if let Some(wanted) = wanted {
            if slot.wanted.len() == MAX_WANTED {
                slot.wanted.remove(0);
            }
            slot.wanted.push(wanted);
        }
        number
    }

    /// The number nobody has mapped that was used least of late.
    fn idle(&self) -> Option<u32> {
        let idle = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.refs == 0 && slot.state != State::Loading);
        idle.min_by_key(|(_, slot)| slot.heat).map(|(number, _)| number as u32)
    }

    fn drop_table(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        if let State::Ready(page, pages, chunk, chunks) = slot.state {
            self.maps.set_executable(number, 0, state::NOT_YET);
            slot.state = State::Wanting;
            slot.seen = self.maps.uses(number);
            self.pages.give_back(page, pages);
            self.chunks.give_back(chunk, chunks);
        }
    }

    fn place(&mut self, number: u32, table: &Table) -> Result<(State, u64), String> {
        let pages = table.pages.len() as u32;
        let chunks = (table.rows.len() as u32).div_ceil(CHUNK);
        let no_room = || "no room for its unwind table".to_owned();
        let mut numbers = Vec::with_capacity(table.rules.len());
        for rule in &table.rules {
            numbers.push(self.rule(rule).ok_or_else(no_room)?);
        }
        let (page, chunk) = self.room(number, pages, chunks).ok_or_else(no_room)?;
        let mut first = chunk * CHUNK;
        let words = table.pages.iter().map(|&count| {
            let word = page_word(first, count);
            first += count;
            word
        });
        let words = words.collect();
        let rows: Vec<u32> = table
            .rows
            .iter()
            .map(|&of| row((of >> 16) as u16, numbers[(of & 0xffff) as usize]))
            .collect();
        let written =
            self.maps.write_pages(page, words).and_then(|()| self.maps.write_rows(chunk, &rows));
        if let Err(error) = written {
            self.pages.give_back(page, pages);
            self.chunks.give_back(chunk, chunks);
            return Err(format!("its unwind table cannot be written: {error}"));
        }
        Ok((State::Ready(page, pages, chunk, chunks), pages_word(page, pages, table.base)))
    }

    /// The number of a rule, which all executables share.
    fn rule(&mut self, rule: &Rule) -> Option<u16> {
        if let Some(&number) = self.rules.get(rule) {
            return Some(number);
        }
        let number = self.rules.len();
        if number >= RULES as usize {
            return None;
        }
        self.maps.write_rule(number as u16, rule).ok()?;
        self.rules.insert(*rule, number as u16);
        Some(number as u16)
    }

    /// Room for a table, that of others used less if need be: first page, first chunk.
    fn room(&mut self, number: u32, pages: u32, chunks: u32) -> Option<(u32, u32)> {
        let heat = self.maps.uses(number).wrapping_sub(self.slots[number as usize].seen);
        loop {
            if let Some(page) = self.pages.take(pages) {
                match self.chunks.take(chunks) {
                    Some(chunk) => return Some((page, chunk)),
                    None => self.pages.give_back(page, pages),
                }
            }
            if !self.pages.has_limbo() && !self.chunks.has_limbo() {
                let ready = self.slots.iter().enumerate();
                let ready = ready.filter(|(_, slot)| matches!(slot.state, State::Ready(..)));
                let (coldest, slot) = ready.min_by_key(|(_, slot)| slot.heat)?;
                if slot.refs > 0 && slot.heat > heat {
                    return None;
                }
                self.drop_table(coldest as u32);
                self.stats.evicted += 1;
            }
            self.maps.next_generation();
            self.pages.reclaim();
            self.chunks.reclaim();
        }
    }
}
