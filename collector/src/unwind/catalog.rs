//! The executables the kernel side knows by number, and their tables in its maps: who has one, who wants one, who must go.
//!
//! Shared by the collecting thread, which numbers what it sees mapped, and the loading thread, which brings tables. Opens
//! and parses nothing.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stackwire_collector_ebpf::tables::{
    CHUNK, CHUNKS, EXECUTABLES, PAGES, page_word, pages_word, row, state,
};
use stackwire_collector_ebpf::unwind::Rule;
use stackwire_unwind::Table;

use super::maps::TableMaps;
use super::rules::Rules;
use super::space::Space;
use crate::broker::Wanted;
use crate::process::executable::Kind;

/// Number of all executables there is no number for: they have no table.
pub const UNLISTED: u32 = 1;
/// Times a table is looked for in vain.
const MAX_FAILURES: u32 = 3;
/// Rules of one table. librustc_driver has 707.
const MAX_RULES: usize = 8 << 10;
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
    /// Its file takes long to open.
    pub slow: bool,
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
    rules: Rules,
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
    /// Its file takes long to open.
    slow: bool,
    failures: u32,
    state: State,
    /// Its uses at the last look, and how many there have been of late.
    seen: u64,
    heat: u64,
}

#[derive(Debug)]
enum State {
    Wanting,
    Loading,
    Ready(Place),
    /// Why.
    Failed(String),
}

/// Where a table is: first page, pages, first chunk, chunks, numbers of its rules.
#[derive(Debug)]
struct Place {
    page: u32,
    pages: u32,
    chunk: u32,
    chunks: u32,
    rules: Vec<u16>,
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
            slow: false,
            failures: 0,
            state: State::Failed(String::new()),
            seen: 0,
            heat: 0,
        };
        let inner = Mutex::new(Inner {
            maps,
            pages: Space::new(PAGES, 0),
            chunks: Space::new(CHUNKS, 0),
            rules: Rules::default(),
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
        for &number in numbers.iter().filter(|&&number| number > UNLISTED) {
            let slot = &mut inner.slots[number as usize];
            slot.refs = slot.refs.saturating_sub(1);
        }
    }

    /// The executable that wants its table most: of those looked up, or of `all`.
    pub fn next(&self, all: bool) -> Option<Job> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let wanting =
            inner.slots.iter().enumerate().filter(|(_, slot)| matches!(slot.state, State::Wanting));
        let (number, _) = wanting
            .map(|(number, slot)| (number, inner.maps.uses(number as u32).wrapping_sub(slot.seen)))
            .filter(|(_, uses)| all || *uses > 0)
            .max_by_key(|&(number, uses)| {
                (!inner.slots[number].slow, uses, std::cmp::Reverse(number))
            })?;
        let slot = &mut inner.slots[number];
        slot.state = State::Loading;
        let wanted = slot.wanted.iter().rev().cloned().collect();
        let (kind, slow) = (slot.kind.clone(), slot.slow);
        Some(Job { number: number as u32, kind, wanted, slow })
    }

    /// An executable nobody has looked up yet and that may have its table on disk, each once, the one mapped most first;
    /// none where tables had to go for others.
    pub fn next_idle(&self) -> Option<Job> {
        let mut inner = self.lock();
        if inner.stats.evicted > 0 {
            return None;
        }
        let idle = inner.slots.iter_mut().enumerate();
        let idle =
            idle.filter(|(_, slot)| matches!(slot.state, State::Wanting) && !slot.looked_for);
        let (number, slot) = idle.max_by_key(|(_, slot)| slot.refs)?;
        slot.looked_for = true;
        slot.state = State::Loading;
        let kind = slot.kind.clone();
        Some(Job { number: number as u32, kind, wanted: Vec::new(), slow: false })
    }

    /// Its file takes long to open: all others come first.
    pub fn postpone(&self, number: u32) {
        let slot = &mut self.lock().slots[number as usize];
        (slot.state, slot.slow) = (State::Wanting, true);
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
            Ok((place, pages)) => {
                inner.stats.loaded += 1;
                inner.slots[number as usize].state = State::Ready(place);
                inner.maps.set_executable(number, pages, state::READY);
            }
            Err(why) => {
                let slot = &mut inner.slots[number as usize];
                slot.state = State::Failed(why);
                slot.failures += 1;
                inner.stats.failed += u64::from(inner.slots[number as usize].failures == 1);
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
            if !matches!(slot.state, State::Wanting) {
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
                    slow: false,
                    failures: 0,
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
                    // A walk under way may have the number from mappings of the one before.
                    self.maps.next_generation();
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
            // Whoever has it mapped now may have what the one before had not: life, or a file that may be opened.
            if matches!(slot.state, State::Failed(_)) && slot.failures < MAX_FAILURES {
                slot.state = State::Wanting;
                self.maps.set_executable(number, 0, state::NOT_YET);
            }
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
            .skip(UNLISTED as usize + 1)
            .filter(|(_, slot)| slot.refs == 0 && !matches!(slot.state, State::Loading));
        idle.min_by_key(|(_, slot)| slot.heat).map(|(number, _)| number as u32)
    }

    fn drop_table(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        if matches!(slot.state, State::Ready(_))
            && let State::Ready(place) = std::mem::replace(&mut slot.state, State::Wanting)
        {
            self.maps.set_executable(number, 0, state::NOT_YET);
            slot.seen = self.maps.uses(number);
            self.give_back(&place);
        }
    }

    fn give_back(&mut self, place: &Place) {
        self.pages.give_back(place.page, place.pages);
        self.chunks.give_back(place.chunk, place.chunks);
        self.rules.give_back(&place.rules);
    }

    /// Writes a table; where it is, and its executable's word.
    fn place(&mut self, number: u32, table: &Table) -> Result<(Place, u64), String> {
        let pages = table.pages.len() as u32;
        let chunks = (table.rows.len() as u32).div_ceil(CHUNK);
        // Never all others for one.
        if pages > PAGES / 2 || chunks > CHUNKS / 2 || table.rules.len() > MAX_RULES {
            return Err("its unwind table is too large".to_owned());
        }
        if !self.make_room(number, (pages, chunks), &table.rules) {
            return Err("no room for its unwind table".to_owned());
        }
        let unwritten = |error| format!("its unwind table cannot be written: {error}");
        let Self { maps, rules, .. } = self;
        let rules = rules.take(&table.rules, |number, rule| maps.write_rule(number, rule));
        let rules = rules.map_err(unwritten)?;
        // Both are there: this is what making room was about.
        let page = self.pages.take(pages).unwrap_or_default();
        let chunk = self.chunks.take(chunks).unwrap_or_default();
        let mut first = chunk * CHUNK;
        let words = table.pages.iter().map(|&count| {
            let word = page_word(first, count);
            first += count;
            word
        });
        let words = words.collect();
        let rows = table.rows.iter();
        let rows: Vec<u32> =
            rows.map(|&of| row((of >> 16) as u16, rules[(of & 0xffff) as usize])).collect();
        let place = Place { page, pages, chunk, chunks, rules };
        let written =
            self.maps.write_pages(page, words).and_then(|()| self.maps.write_rows(chunk, &rows));
        match written {
            Ok(()) => Ok((place, pages_word(page, pages, table.base))),
            Err(error) => {
                self.give_back(&place);
                Err(unwritten(error))
            }
        }
    }

    /// Makes room for a table, that of others used less if need be; whether there is.
    fn make_room(&mut self, number: u32, (pages, chunks): (u32, u32), rules: &[Rule]) -> bool {
        let heat = self.maps.uses(number).wrapping_sub(self.slots[number as usize].seen);
        while !(self.pages.fits(pages) && self.chunks.fits(chunks) && self.rules.fit(rules)) {
            if !(self.pages.has_limbo() || self.chunks.has_limbo() || self.rules.has_limbo()) {
                let ready = self.slots.iter().enumerate();
                let ready = ready.filter(|(_, slot)| matches!(slot.state, State::Ready(_)));
                let Some((coldest, slot)) = ready.min_by_key(|(_, slot)| slot.heat) else {
                    return false;
                };
                if slot.refs > 0 && slot.heat > heat {
                    return false;
                }
                self.drop_table(coldest as u32);
                self.stats.evicted += 1;
            }
            self.maps.next_generation();
            self.pages.reclaim();
            self.chunks.reclaim();
            self.rules.reclaim();
        }
        true
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use stackwire_collector_ebpf::unwind::cfa;

    use super::*;
    use crate::unwind::maps;

    fn catalog() -> Catalog {
        Catalog::new(maps::open(maps::Descriptors::in_memory()).unwrap().1)
    }

    fn file(number: u32) -> Kind {
        let build_id = number.to_le_bytes().to_vec();
        Kind::File { path: String::new(), build_id, inode: 0, device: (0, 0) }
    }

    /// Of this many rows, one page of 64 KiB for each thousand, and rules of its own.
    fn table(rows: u32, rules: i32, seed: i32) -> Table {
        let rule = |at| Rule { cfa: cfa::REGISTER, offset: seed * 100_000 + at, ..Rule::default() };
        let rules = std::iter::once(Rule::default()).chain((1..=rules).map(rule)).collect();
        let pages = vec![1000; (rows / 1000) as usize];
        let rows = (0..rows / 1000 * 1000).map(|at| row((at % 1000) as u16, 1)).collect();
        Table { build_id: Vec::new(), base: 0, rules, pages, rows }
    }

    fn wanted() -> Option<Wanted> {
        Some(Wanted::Mapped { pid: 1, start: 0, end: 1, path: String::new() })
    }

    #[test]
    fn the_coldest_tables_go_when_rows_or_rules_run_out() {
        let catalog = catalog();
        let mut before = None;
        // Nine million rows of ten, three times; then thirty thousand rules of 32, likewise.
        for (number, (rows, rules)) in
            [(3_000_000, 1); 9].into_iter().chain([(1000, 8000); 9]).enumerate()
        {
            let number = catalog.number(&file(number as u32), wanted());
            catalog.release(&before.replace(number).into_iter().collect::<Vec<_>>());
            catalog.install(number, Ok(&table(rows, rules, number as i32)), None);
        }
        let stats = catalog.stats();
        assert_eq!((stats.loaded, stats.failed), (18, 0));
        assert!((6..=17).contains(&stats.evicted), "{stats:?}");
        let number = catalog.number(&file(100), wanted());
        catalog.install(number, Ok(&table(6_000_000, 1, 0)), None);
        assert_eq!(catalog.missing(&file(100)).unwrap(), "its unwind table is too large");
        assert_eq!(catalog.stats().evicted, stats.evicted, "for nothing");
    }

    #[test]
    fn numbers_are_used_again_and_those_of_no_file_never() {
        let catalog = catalog();
        for number in 0..EXECUTABLES * 2 {
            let number = catalog.number(&file(number), wanted());
            assert!(number > UNLISTED);
            // As areas give back what they have, code without a file among it.
            catalog.release(&[number, 0, UNLISTED]);
        }
        let held: Vec<u32> =
            (0..EXECUTABLES * 2).map(|number| catalog.number(&file(number), wanted())).collect();
        assert_eq!(
            held.iter().filter(|&&number| number == UNLISTED).count(),
            EXECUTABLES as usize + 2
        );
        assert!(held.iter().all(|&number| number != 0));
    }

    #[test]
    fn what_failed_is_tried_again_for_another_process_but_not_for_ever() {
        let catalog = catalog();
        let mut tries = 0;
        for _ in 0..9 {
            let number = catalog.number(&file(1), wanted());
            if let Some(job) = catalog.next(true) {
                assert_eq!(job.number, number);
                catalog.install(number, Err("not to be had".to_owned()), None);
                tries += 1;
            }
        }
        assert_eq!((tries, catalog.stats().failed), (u64::from(MAX_FAILURES), 1));
    }
}
