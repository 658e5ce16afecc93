//! Tells the kernel side what is mapped in which process. The collecting thread's.

use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use stackwire_collector_ebpf::tables::{
    ANONYMOUS, DESCRIBED, MAPPINGS, PROCESS_PROBES, PROCESS_SLOTS, WINDOW, first_slot, process_of,
    process_word,
};

use super::catalog::{Catalog, UNLISTED};
use super::maps::ProcessMaps;
use super::owner::{Owner, SHARES};
use super::space::Space;
use crate::process::Wanted;
use crate::process::executable::Kind;
use crate::process::{Mapping, Processes, jitdump};
use crate::sources::side_band::Event;

/// Of one process: one that maps without end leaves room for others.
const MAX_MAPPINGS: u32 = MAPPINGS / 4;
/// Likewise, executables that get a number of their own.
const MAX_NUMBERS: usize = 2048;
/// Windows of code made at run time that get one. Those of compilers lie together.
const MAX_WINDOWS: usize = 8;
/// From this many mappings on, they are counted for the user. To ask for the user takes longer than
/// everything else, and most processes have fewer mappings.
const MANY: u32 = 32;

/// The kernel side's processes, as they were told.
#[derive(Debug)]
pub struct Published {
    maps: ProcessMaps,
    catalog: Arc<Catalog>,
    space: Space,
    by_pid: HashMap<u32, Place>,
    /// By the address of the mappings: processes that were forked and not changed share theirs.
    areas: HashMap<*const Vec<Mapping>, Area>,
    /// How many mappings users have, in areas of [`MANY`] and more.
    taken: HashMap<Owner, u32>,
}

/// Mappings that stay where they are until they are [released](Published::release_held).
#[derive(Debug)]
pub struct Held {
    area: *const Vec<Mapping>,
    /// Number of the first.
    pub first: u32,
    /// How many there are.
    pub count: u32,
}

#[derive(Debug)]
struct Place {
    slot: u32,
    area: *const Vec<Mapping>,
}

#[derive(Debug)]
struct Area {
    /// Held, so that the address is not used for others.
    _held: Rc<Vec<Mapping>>,
    first: u32,
    /// Entries it takes.
    taken: u32,
    /// Those of code that has a file or none, not the kernel's own pages.
    count: u32,
    /// For whom they are counted.
    owner: Option<Owner>,
    /// Of executables.
    numbers: Vec<u32>,
    users: u32,
}

impl Published {
    /// None so far.
    #[must_use]
    pub fn new(maps: ProcessMaps, catalog: Arc<Catalog>) -> Self {
        Self {
            maps,
            catalog,
            space: Space::new(MAPPINGS, 0),
            by_pid: HashMap::new(),
            areas: HashMap::new(),
            taken: HashMap::new(),
        }
    }

    /// Tells what has changed since the last call.
    pub fn update(&mut self, processes: &mut Processes) {
        let mut changed: Vec<u32> = processes.take_changed().into_iter().collect();
        // Children share what their parents have: it is the parent's user that counts.
        changed.sort_by_key(|&pid| processes.known_mappings(pid).map(|(_, since_ns)| since_ns));
        for pid in changed {
            let known = processes.known_mappings(pid);
            match known.map(|(mappings, since_ns)| (Rc::clone(mappings), since_ns)) {
                Some((mappings, since_ns)) => self.publish(pid, &mappings, since_ns),
                None => self.withdraw(pid),
            }
        }
    }

    /// Tells what events that are not applied yet will change in these processes. Samples wait for
    /// events of other CPUs; processes that have become another program should not wait.
    pub fn preview(&mut self, processes: &mut Processes, events: &[Event], of: &HashSet<u32>) {
        for (pid, (mappings, since_ns)) in processes.preview(events, of) {
            self.publish(pid, &mappings, since_ns);
        }
    }

    /// Withdraws the processes that are forgotten.
    pub fn retain(&mut self, processes: &Processes) {
        let gone = |pid: &&u32| processes.known_mappings(**pid).is_none();
        let gone: Vec<u32> = self.by_pid.keys().filter(gone).copied().collect();
        for pid in gone {
            self.withdraw(pid);
        }
    }

    /// Where these mappings of a process are, for walks of its copied stacks. None: there is no
    /// room for them.
    pub fn hold(&mut self, pid: u32, mappings: &Rc<Vec<Mapping>>) -> Option<Held> {
        let (first, count) = self.area(pid, mappings)?;
        Some(Held { area: Rc::as_ptr(mappings), first, count })
    }

    /// No walk needs them any more.
    pub fn release_held(&mut self, held: Held) {
        self.release(held.area);
    }

    fn publish(&mut self, pid: u32, mappings: &Rc<Vec<Mapping>>, since_ns: u64) {
        let key = Rc::as_ptr(mappings);
        let before = self.by_pid.get(&pid).map(|place| (place.slot, place.area));
        let slot = before.map(|(slot, _)| slot).or_else(|| self.free_slot(pid));
        let area = slot.and_then(|_| self.area(pid, mappings));
        let (Some(slot), Some((first, count))) = (slot, area) else {
            // Full: better no mappings than old ones.
            self.withdraw(pid);
            return;
        };
        self.maps.set_slot(slot, process_word(pid, first, count), since_ns);
        self.by_pid.insert(pid, Place { slot, area: key });
        if let Some((_, area)) = before {
            self.release(area);
        }
    }

    fn withdraw(&mut self, pid: u32) {
        if let Some(Place { slot, area }) = self.by_pid.remove(&pid) {
            self.maps.set_slot(slot, 0, 0);
            self.release(area);
        }
    }

    fn free_slot(&self, pid: u32) -> Option<u32> {
        (0..PROCESS_PROBES)
            .map(|probe| (first_slot(pid) + probe) & (PROCESS_SLOTS - 1))
            .find(|&slot| process_of(self.maps.slot(slot)).0 == 0)
    }

    /// Where these mappings are, for one process more: first, count.
    fn area(&mut self, pid: u32, mappings: &Rc<Vec<Mapping>>) -> Option<(u32, u32)> {
        let key = Rc::as_ptr(mappings);
        if let Some(area) = self.areas.get_mut(&key) {
            area.users += 1;
            return Some((area.first, area.count));
        }
        let user = LazyCell::new(|| Owner::of_process(pid));
        let entries = (mappings.len() as u32).max(1);
        let owner = (entries >= MANY).then(|| user.payer());
        let run = if entries > MAX_MAPPINGS
            || owner.is_some_and(|owner| self.is_over(owner, pid, entries))
        {
            None
        } else {
            self.take(entries)
        };
        // Without room for them it has one, of everything, that says so.
        let (first, taken) =
            run.map(|first| (first, entries)).or_else(|| Some((self.take(1)?, 1)))?;
        let mut numbers = Vec::with_capacity(taken as usize);
        let rows = match run {
            Some(_) => self.rows(pid, mappings, &mut numbers, || *user),
            None => vec![(0, u64::MAX, UNLISTED, 0)],
        };
        if self.maps.write(first, &rows).is_err() {
            self.space.give_back(first, taken);
            self.catalog.release(&numbers);
            return None;
        }
        let count = rows.len() as u32;
        let owner = owner.filter(|_| run.is_some());
        if let Some(owner) = owner {
            *self.taken.entry(owner).or_default() += taken;
        }
        let _held = Rc::clone(mappings);
        let area = Area { _held, first, taken, count, owner, numbers, users: 1 };
        self.areas.insert(key, area);
        Some((first, count))
    }

    /// What is written of mappings, and the numbers that are taken for it.
    fn rows(
        &self,
        pid: u32,
        mappings: &[Mapping],
        numbers: &mut Vec<u32>,
        owner: impl Fn() -> Owner,
    ) -> Vec<(u64, u64, u32, u64)> {
        let mut distinct = HashSet::new();
        let described = jitdump(pid, mappings);
        let mut windows: HashMap<u64, u32> = HashMap::new();
        let mut rows = Vec::with_capacity(mappings.len());
        for mapping in mappings {
            let (number, offset) = match &mapping.executable.kind {
                Kind::Anonymous => {
                    let window = mapping.start.0 / WINDOW;
                    let known = windows.get(&window).copied();
                    let number = match &described {
                        Some(_) if known.is_some() || windows.len() == MAX_WINDOWS => known,
                        Some((dump, wanted)) => {
                            let dump = Box::new((*dump).clone());
                            let (kind, wanted) = (Kind::Described { dump, window }, wanted.clone());
                            let number = self.catalog.number(&kind, Some(wanted), &owner);
                            windows.insert(window, number);
                            numbers.push(number);
                            Some(number)
                        }
                        None => None,
                    };
                    rows.push(match number {
                        None | Some(UNLISTED) => (mapping.start.0, mapping.end.0, ANONYMOUS, 0),
                        Some(number) => {
                            let offset = mapping.start.0 % WINDOW;
                            (mapping.start.0, mapping.end.0, number | DESCRIBED, offset)
                        }
                    });
                    continue;
                }
                _ if distinct.len() > MAX_NUMBERS => (UNLISTED, 0),
                // Its image begins with its mapping.
                Kind::Vdso => (self.catalog.number(&Kind::Vdso, None, &owner), 0),
                kind => {
                    let Kind::File { path, .. } = kind else { continue };
                    let (start, end, path) = (mapping.start, mapping.end, path.clone());
                    let wanted = Wanted::Mapped { pid, start, end, path };
                    (self.catalog.number(kind, Some(wanted), &owner), mapping.file_offset.0)
                }
            };
            distinct.insert(number);
            numbers.push(number);
            rows.push((mapping.start.0, mapping.end.0, number, offset));
        }
        rows
    }

    /// Whether this many more entries for a process exceed the share of its user. What the process
    /// gives up is taken off first.
    fn is_over(&self, owner: Owner, pid: u32, entries: u32) -> bool {
        let before = self.by_pid.get(&pid).and_then(|place| self.areas.get(&place.area));
        let before = before.filter(|area| area.owner == Some(owner) && area.users == 1);
        let given_up = before.map_or(0, |area| area.taken);
        let taken = self.taken.get(&owner).copied().unwrap_or(0) - given_up;
        owner.is_limited() && taken + entries > MAPPINGS / SHARES
    }

    fn take(&mut self, count: u32) -> Option<u32> {
        if let Some(first) = self.space.take(count) {
            return Some(first);
        }
        if !self.space.has_limbo() {
            return None;
        }
        self.maps.next_generation();
        self.space.reclaim();
        self.space.take(count)
    }

    fn release(&mut self, key: *const Vec<Mapping>) {
        let Some(area) = self.areas.get_mut(&key) else { return };
        area.users -= 1;
        if area.users == 0
            && let Some(area) = self.areas.remove(&key)
        {
            self.space.give_back(area.first, area.taken);
            self.catalog.release(&area.numbers);
            if let Some(taken) = area.owner.and_then(|owner| self.taken.get_mut(&owner)) {
                *taken -= area.taken;
            }
        }
    }
}
