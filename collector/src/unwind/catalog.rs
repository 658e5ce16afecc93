//! The executables that the kernel side knows by number, and their tables in its maps: which
//! executables have a table and which want one.
//!
//! Shared by two kinds of threads. The collecting thread gives numbers to what it sees mapped. The
//! loading threads bring tables. `room.rs` says where tables are put and which must go to make
//! room. What the kernel calls the files of executables is in `naming.rs`. Tables made of jitdumps
//! are in `growing.rs`. Opens and parses nothing.

mod growing;
mod naming;
mod room;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stackwire_collector_ebpf::tables::{CHUNKS, EXECUTABLES, PAGES, state};
use stackwire_collector_ebpf::vma::FileKey;
use stackwire_model::BuildId;
use stackwire_unwind::{Interpreter, Table};

use self::growing::Growing;
pub use self::naming::ASKED_AGAIN;
use self::room::Place;
use super::maps::TableMaps;
use super::no_layout::NoLayout;
use super::no_table::NoTable;
use super::owner::{Owner, SHARES};
use super::rules::Rules;
use super::space::Space;
use crate::process::Wanted;
use crate::process::executable::Kind;

/// The number of all executables that get none of their own, because there are too many in total or
/// of one user.
pub const UNLISTED: u32 = 1;
/// Times a table is looked for in vain.
const MAX_FAILURES: u32 = 3;
/// Until a file is tried again whose file system did not answer, or that could not be opened
/// because others did not: a disk may stall for seconds. For each time that the file itself hung,
/// twice as long, at most `DOUBLED` times.
const AGAIN: Duration = Duration::from_secs(1);
const DOUBLED: u32 = 6;
/// Processes remembered to have a file mapped.
const MAX_WANTED: usize = 4;
/// An executable that was mapped this often counts as looked up: processes may have used it and
/// ended before the kernel side has heard of it.
const OFTEN: u32 = 8;

/// What a loading thread is to bring.
#[derive(Clone, Debug)]
pub struct Job {
    /// Number of the executable.
    pub number: u32,
    /// What it is.
    pub kind: Kind,
    /// For whom its table is.
    pub owner: Owner,
    /// Where it is mapped, the last process first.
    pub wanted: Vec<Wanted>,
    /// Its file takes long to open.
    pub slow: bool,
    /// Its file, where it was open before: the processes may be gone.
    pub held: Option<Arc<File>>,
}

impl Job {
    /// GNU build-id, if it has one.
    #[must_use]
    pub fn build_id(&self) -> Option<BuildId> {
        build_id(&self.kind)
    }
}

fn build_id(kind: &Kind) -> Option<BuildId> {
    match kind {
        Kind::File { key: Some(key), .. } => key.build_id(),
        _ => None,
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
    /// Layouts of CPythons, the first with number 1.
    pythons: Vec<Interpreter>,
    /// Likewise, of Rubies.
    rubies: Vec<Interpreter>,
    /// Likewise, of V8s.
    v8s: Vec<Interpreter>,
    /// Everyone's first.
    numbers: HashMap<Kind, BTreeMap<Owner, u32>>,
    /// By number.
    slots: Vec<Slot>,
    /// `resting`: until when no table of this owner is made again. `unused`: jitdumps that are to
    /// be closed.
    resting: BTreeMap<Owner, Instant>,
    unused: Vec<Arc<File>>,
    stats: Stats,
}

#[derive(Debug)]
struct Slot {
    kind: Kind,
    owner: Owner,
    /// The owner who had it first. It counts towards that owner's share of the numbers.
    payer: Owner,
    wanted: Vec<Wanted>,
    /// Areas that have it mapped.
    refs: u32,
    /// Whether [`Catalog::next_idle`] has given it out, to look for its table on disk.
    looked_for: bool,
    /// How often [`Catalog::next_nameless`] gave it out, and when it may do so again.
    asked: u32,
    ask_again: Instant,
    /// How often it was mapped since the beginning of the capture.
    mapped: u32,
    /// It has been mapped since, perhaps from another file of its path and build-id.
    mapped_since: bool,
    /// Its file, until what the kernel calls it may be asked.
    held: Option<Arc<File>>,
    /// The jitdump its table was made of.
    growing: Option<Growing>,
    /// Its file takes long to open.
    slow: bool,
    failures: u32,
    /// When one that failed is tried again, whoever has it mapped.
    again: Option<Instant>,
    state: State,
    /// Its uses at the last look, and how many there have been of late.
    seen: u64,
    heat: u64,
}

#[derive(Debug)]
enum State {
    Wanting,
    Loading,
    /// Everyone's table is that of all numbers of its executable.
    Ready(Arc<Place>),
    Failed(Arc<NoTable>),
}

impl Catalog {
    /// An empty one.
    #[must_use]
    pub fn new(maps: TableMaps) -> Self {
        maps.set_executable(UNLISTED, 0, 0, state::OVER_SHARE);
        let none = || Slot {
            refs: 1,
            state: State::Failed(Arc::new(NoTable::OverShare)),
            ..Slot::new(Kind::Unmapped, Owner::Everyone)
        };
        let inner = Mutex::new(Inner {
            maps,
            pages: Space::new(PAGES, 0),
            chunks: Space::new(CHUNKS, 0),
            rules: Rules::default(),
            pythons: Vec::new(),
            rubies: Vec::new(),
            v8s: Vec::new(),
            numbers: HashMap::new(),
            slots: vec![none(), none()],
            resting: BTreeMap::new(),
            unused: Vec::new(),
            stats: Stats::default(),
        });
        Self { inner, numbered: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of an executable that one more area maps. `wanted` is where its file is mapped.
    /// `owner` is called only when there is no number for everyone.
    pub fn number(
        &self,
        kind: &Kind,
        wanted: Option<Wanted>,
        owner: impl FnOnce() -> Owner,
    ) -> u32 {
        let mut inner = self.lock();
        let before = inner.slots.len();
        let number = inner.number(kind, wanted, owner);
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

    /// One area less, each.
    pub fn release(&self, numbers: &[u32]) {
        let mut inner = self.lock();
        for &number in numbers.iter().filter(|&&number| number > UNLISTED) {
            let slot = &mut inner.slots[number as usize];
            slot.refs = slot.refs.saturating_sub(1);
            if slot.refs == 0 {
                inner.grows_no_more(number);
            }
        }
    }

    /// The capture begins: what is mapped by now need not be what is used.
    pub fn begin(&self) {
        self.lock().slots.iter_mut().for_each(|slot| slot.mapped = 0);
    }

    /// The executable that wants its table most: among those looked up, or with `all` among all.
    /// Gives out only one at a time for each user.
    pub fn next(&self, all: bool) -> Option<Job> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let (busy, now) = (inner.busy(), Instant::now());
        let wanting = inner
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.wants(now) && !busy.contains(&slot.payer));
        let (number, _) = wanting
            .map(|(number, slot)| (number, inner.maps.uses(number as u32).wrapping_sub(slot.seen)))
            .filter(|&(number, uses)| all || uses > 0 || inner.slots[number].mapped >= OFTEN)
            .max_by_key(|&(number, uses)| {
                (!inner.slots[number].slow, uses, std::cmp::Reverse(number))
            })?;
        let slot = &mut inner.slots[number];
        (slot.state, slot.again) = (State::Loading, None);
        let wanted = slot.wanted.iter().rev().cloned().collect();
        let (kind, owner, slow) = (slot.kind.clone(), slot.owner, slot.slow);
        Some(Job { number: number as u32, kind, owner, wanted, slow, held: None })
    }

    /// An executable that nobody has looked up yet and whose table may be on disk. Gives out each
    /// one once, the one mapped most first. `None` when tables had to go for others.
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
        let (kind, owner) = (slot.kind.clone(), slot.owner);
        let wanted = Vec::new();
        Some(Job { number: number as u32, kind, owner, wanted, slow: false, held: None })
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

    /// Whether no table is being brought, nor waits to be.
    pub fn is_settled(&self) -> bool {
        let inner = self.lock();
        !inner.slots.iter().any(|slot| matches!(slot.state, State::Wanting | State::Loading))
    }

    /// Puts a table into the maps.
    ///
    /// `key` is what the kernel calls the file it was made of, if that is known.
    pub fn install(&self, number: u32, table: &Table, everyones: bool, key: Option<FileKey>) {
        let mut inner = self.lock();
        if everyones {
            inner.becomes_everyones(number);
        }
        if let Some(key) = key {
            inner.slots[number as usize].was_asked();
            inner.name(number, key, everyones);
        }
        inner.install(number, table, everyones);
    }

    /// Notes that there is none, and why.
    pub fn fail(&self, number: u32, why: NoTable) {
        self.lock().fail(number, why);
    }

    /// Notes how long compiling a table took, or trying to.
    pub fn count_compiled(&self, took: Duration, compiled: bool) {
        let mut inner = self.lock();
        inner.stats.compiled += u64::from(compiled);
        inner.stats.compile_ns += took.as_nanos() as u64;
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
    pub fn missing(&self, kind: &Kind) -> Option<Arc<NoTable>> {
        self.lock().find_map(kind, |state| match state {
            State::Failed(why) if !matches!(**why, NoTable::OverShare) => Some(Arc::clone(why)),
            _ => None,
        })
    }

    /// Why the functions that an interpreter runs are not seen.
    #[must_use]
    pub fn no_layout(&self, kind: &Kind) -> Option<NoLayout> {
        self.lock().find_map(kind, |state| match state {
            State::Ready(place) => place.layout.err(),
            _ => None,
        })
    }

    /// Offsets in an executable of the code that Go compiled; empty: it has none, or that is not
    /// known now.
    #[must_use]
    pub fn go_code(&self, kind: &Kind) -> Range<u64> {
        let found = self.lock().find_map(kind, |state| match state {
            State::Ready(place) => Some(place.go.clone()),
            _ => None,
        });
        found.unwrap_or_default()
    }

    /// What became of tables since the start.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.lock().stats
    }
}

impl Slot {
    fn new(kind: Kind, owner: Owner) -> Self {
        Self {
            kind,
            owner,
            payer: owner.payer(),
            wanted: Vec::new(),
            refs: 0,
            looked_for: false,
            asked: 0,
            ask_again: Instant::now(),
            mapped: 0,
            mapped_since: false,
            held: None,
            growing: None,
            slow: false,
            failures: 0,
            again: None,
            state: State::Wanting,
            seen: 0,
            heat: 0,
        }
    }

    /// Whether its table is to be brought.
    fn wants(&self, now: Instant) -> bool {
        match self.state {
            State::Wanting => true,
            State::Failed(_) => self.again.is_some_and(|again| again <= now),
            State::Loading | State::Ready(_) => false,
        }
    }
}

impl Inner {
    fn number(
        &mut self,
        kind: &Kind,
        wanted: Option<Wanted>,
        owner: impl FnOnce() -> Owner,
    ) -> u32 {
        let known = |owner| self.numbers.get(kind)?.get(&owner).copied();
        let number = match known(Owner::Everyone) {
            Some(number) => number,
            None => {
                let owner = if *kind == Kind::Vdso { Owner::Everyone } else { owner() };
                match known(owner).or_else(|| self.new_number(kind, owner)) {
                    Some(number) => number,
                    None => return UNLISTED,
                }
            }
        };
        let slot = &self.slots[number as usize];
        if slot.refs == 0 && matches!(slot.kind, Kind::Described { .. }) {
            // Nobody has looked what was written since.
            self.drop_table(number);
        }
        let slot = &mut self.slots[number as usize];
        slot.refs += 1;
        (slot.mapped, slot.mapped_since) = (slot.mapped.saturating_add(1), true);
        if let Some(wanted) = wanted {
            // Whoever has it mapped now may have what the one before had not: life, or a file that
            // may be opened.
            if matches!(slot.state, State::Failed(_)) && slot.failures < MAX_FAILURES {
                slot.state = State::Wanting;
                self.maps.set_executable(number, 0, 0, state::NOT_YET);
            }
            if slot.wanted.len() == MAX_WANTED {
                // Everyone's first is of before anybody could have forged it; its path leads there
                // when its process is gone.
                slot.wanted.remove(usize::from(slot.owner == Owner::Everyone));
            }
            slot.wanted.push(wanted);
        }
        number
    }

    fn new_number(&mut self, kind: &Kind, owner: Owner) -> Option<u32> {
        if owner.is_limited() {
            let payer = owner.payer();
            let theirs = self.slots.iter().filter(|slot| slot.payer == payer && slot.refs > 0);
            if theirs.count() >= (EXECUTABLES / SHARES) as usize {
                return None;
            }
        }
        let slot = Slot::new(kind.clone(), owner);
        let number = if self.slots.len() < EXECUTABLES as usize {
            self.slots.push(slot);
            (self.slots.len() - 1) as u32
        } else {
            let number = self.idle()?;
            self.leave_table(number);
            self.forget(number);
            let seen = self.maps.uses(number);
            self.slots[number as usize] = Slot { seen, ..slot };
            // A walk under way may have the number from mappings of the one before.
            self.maps.next_generation();
            number
        };
        self.maps.set_executable(number, 0, 0, state::NOT_YET);
        self.numbers.entry(kind.clone()).or_default().insert(owner, number);
        Some(number)
    }

    /// Its executable has this number no more.
    fn forget(&mut self, number: u32) {
        self.maps.files.forget(number);
        let Slot { kind, owner, .. } = &self.slots[number as usize];
        let Some(numbers) = self.numbers.get_mut(kind) else { return };
        numbers.remove(owner);
        if numbers.is_empty() {
            self.numbers.remove(kind);
        }
    }

    /// The number of a user's executable becomes everyone's, unless there is one.
    fn becomes_everyones(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        let Some(numbers) = self.numbers.get_mut(&slot.kind) else { return };
        if !numbers.contains_key(&Owner::Everyone) {
            numbers.remove(&slot.owner);
            numbers.insert(Owner::Everyone, number);
            slot.owner = Owner::Everyone;
        }
    }

    /// Where everyone's table of a build-id is already, at whatever path its file was met.
    fn shared(&self, number: u32, table: &Table) -> Option<Arc<Place>> {
        let wanted = build_id(&self.slots[number as usize].kind);
        let mut slots = self.slots.iter().filter(|_| wanted.is_some());
        slots.find_map(|slot| match &slot.state {
            State::Ready(place)
                if place.owner == Owner::Everyone
                    && build_id(&slot.kind) == wanted
                    && place.is_as(table) =>
            {
                Some(Arc::clone(place))
            }
            _ => None,
        })
    }

    /// Users with a limit of whom a table is being made: of each one at a time.
    fn busy(&self) -> Vec<Owner> {
        let making = self.slots.iter().filter(|slot| {
            matches!(slot.state, State::Loading)
                || slot.growing.as_ref().is_some_and(|growing| growing.looked_at)
        });
        making.map(|slot| slot.payer).filter(|payer| payer.is_limited()).collect()
    }

    fn install(&mut self, number: u32, table: &Table, everyones: bool) {
        let shared = if everyones { self.shared(number, table) } else { None };
        match shared.map_or_else(|| self.place(number, table), Ok) {
            Ok(place) => {
                self.stats.loaded += 1;
                self.ready(number, place);
            }
            Err(why) => self.fail(number, why),
        }
    }

    /// An executable has its table, and with everyone's all users that wait for theirs.
    fn ready(&mut self, number: u32, place: Arc<Place>) {
        let mut numbers = vec![number];
        if place.owner == Owner::Everyone {
            let all = self.numbers.get(&self.slots[number as usize].kind);
            let waits = |other: &u32| {
                matches!(self.slots[*other as usize].state, State::Wanting | State::Failed(_))
            };
            numbers.extend(all.into_iter().flat_map(BTreeMap::values).copied().filter(waits));
        }
        for number in numbers {
            self.maps.set_executable(number, place.word, place.layout(), state::READY);
            self.slots[number as usize].state = State::Ready(Arc::clone(&place));
        }
    }

    /// What is to be said of the tables of an executable: of everyone's alone, if there is one;
    /// where users have their own, of one of which there is something.
    fn find_map<T>(&self, kind: &Kind, said: impl Fn(&State) -> Option<T>) -> Option<T> {
        let numbers = self.numbers.get(kind)?;
        let all = if numbers.contains_key(&Owner::Everyone) { 1 } else { numbers.len() };
        let mut numbers = numbers.values().take(all);
        numbers.find_map(|&number| said(&self.slots[number as usize].state))
    }

    fn fail(&mut self, number: u32, why: NoTable) {
        let told = match why {
            NoTable::OverShare => state::OVER_SHARE,
            _ => state::NONE,
        };
        let slot = &mut self.slots[number as usize];
        let others_hang = why.others_hang();
        slot.failures += u32::from(!others_hang);
        let wait = if others_hang { AGAIN } else { AGAIN * (1 << slot.failures.min(DOUBLED)) };
        slot.again = why.hangs().then(|| Instant::now() + wait);
        slot.state = State::Failed(Arc::new(why));
        // Code made at run time is walked by frame pointers then: most compilers describe no more
        // than its name.
        let is_made = matches!(slot.kind, Kind::Described { .. });
        self.stats.failed += u64::from(slot.failures == 1 && !others_hang && !is_made);
        self.maps.set_executable(number, 0, 0, told);
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
}

#[cfg(test)]
mod tests;
