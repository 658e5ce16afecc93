//! Processes of a foreign profile, as its records tell of them: the names of processes and threads,
//! and what is mapped where. Pure.
//!
//! The rules are perf's. A child has its parent's mappings, an exec empties them, and a mapping
//! covers what was there before.

use std::collections::BTreeMap;
use std::rc::Rc;

use rustc_hash::FxHashMap;
use stackwire_model::profile::{
    Builder, EndReason, Executable, ExecutableId, FrameKind, Full, Location, LocationId, Mapping,
    Process, ProcessId, StackId, Thread, ThreadId, lookup_address,
};
use stackwire_model::{Address, FileOffset, UserAddr};

/// Mappings of all processes together: a child shares its parent's until it maps something itself.
const MAX_MAPS: usize = 4 << 20;

/// By first address; none covers another.
type Maps = BTreeMap<UserAddr, Map>;

/// Executable memory.
#[derive(Clone, Copy, Debug)]
pub struct Map {
    /// First address.
    pub start: UserAddr,
    /// First address behind it.
    pub end: UserAddr,
    /// Offset in the file of the first address.
    pub file_offset: FileOffset,
    /// What is mapped.
    pub executable: ExecutableId,
    /// Addresses mean something in this process alone.
    pub private: bool,
    /// When it was mapped, on the clock of the profile; 0: unknown.
    pub since: u64,
}

impl Map {
    /// The byte of the file that is at an address in the mapping.
    #[must_use]
    pub fn offset(&self, address: UserAddr) -> FileOffset {
        FileOffset(address.0.wrapping_sub(self.start.0).wrapping_add(self.file_offset.0))
    }
}

#[derive(Debug)]
struct Task {
    id: ProcessId,
    start: u64,
    generation: u32,
    comm: String,
    maps: Rc<Maps>,
    /// Names of its threads.
    names: FxHashMap<u32, String>,
    /// Mappings the profile has been told of, by address: end, file offset, executable.
    told: FxHashMap<UserAddr, (UserAddr, FileOffset, ExecutableId)>,
    threads: FxHashMap<u32, ThreadId>,
}

/// A thread of a process, as the kernel numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskId {
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Tasks {
    by_pid: FxHashMap<u32, Task>,
    /// Stands for the time a process began, which nobody tells.
    next: u64,
    /// Mappings of all.
    maps: usize,
}

impl Tasks {
    /// A thread has another name; `exec`: its process is another program.
    pub fn comm(
        &mut self,
        into: &mut Builder,
        TaskId { pid, tid }: TaskId,
        comm: String,
        exec: bool,
    ) -> Result<(), Full> {
        if exec {
            let before = self.by_pid.get(&pid).map(|task| (task.start, task.generation + 1));
            let (start, generation) = before.unwrap_or_else(|| (self.next(), 0));
            self.begin(into, pid, start, generation, comm, Rc::default())?;
            return Ok(());
        }
        let task = self.task(into, pid)?;
        task.threads.remove(&tid);
        if tid == pid {
            task.comm.clone_from(&comm);
            let (start, generation) = (task.start, task.generation);
            into.process(process(pid, start, generation, comm.clone()))?;
        }
        self.task(into, pid)?.names.insert(tid, comm);
        Ok(())
    }

    /// A process, or a thread of one, was made.
    pub fn fork(
        &mut self,
        into: &mut Builder,
        TaskId { pid, tid }: TaskId,
        TaskId { pid: parent, tid: parent_tid }: TaskId,
    ) -> Result<(), Full> {
        if pid == parent {
            let task = self.task(into, pid)?;
            if let Some(name) = task.names.get(&parent_tid).cloned() {
                task.threads.remove(&tid);
                task.names.insert(tid, name);
            }
            return Ok(());
        }
        let from = self.by_pid.get(&parent).map(|from| {
            let comm = from.names.get(&parent_tid).unwrap_or(&from.comm).clone();
            (comm, Rc::clone(&from.maps))
        });
        let (comm, maps) = from.unwrap_or_default();
        let start = self.next();
        self.begin(into, pid, start, 0, comm, maps)
    }

    /// Something was mapped.
    pub fn map(&mut self, into: &mut Builder, pid: u32, new: Map) -> Result<(), Full> {
        let task = self.task(into, pid)?;
        // A copy of what was shared is made now.
        let before = if Rc::strong_count(&task.maps) > 1 { 0 } else { task.maps.len() };
        let maps = Rc::make_mut(&mut task.maps);
        let first = maps.range(..new.start).next_back().map(|(_, old)| *old);
        let first = first.filter(|old| old.end > new.start);
        let covered: Vec<UserAddr> =
            maps.range(new.start..new.end).map(|(&start, _)| start).collect();
        let last = covered.last().map_or(first, |start| maps.get(start).copied());
        for start in covered {
            maps.remove(&start);
        }
        if let Some(old) = first {
            maps.insert(old.start, Map { end: new.start, ..old });
        }
        if let Some(old) = last.filter(|old| old.end > new.end) {
            let file_offset = old.offset(new.end);
            maps.insert(new.end, Map { start: new.end, file_offset, ..old });
        }
        maps.insert(new.start, new);
        let after = maps.len();
        self.maps = (self.maps + after).saturating_sub(before);
        if self.maps > MAX_MAPS { Err(Full("mappings")) } else { Ok(()) }
    }

    /// The thread a sample is of.
    pub fn thread(
        &mut self,
        into: &mut Builder,
        TaskId { pid, tid }: TaskId,
    ) -> Result<(ThreadId, ProcessId), Full> {
        let task = self.task(into, pid)?;
        let process = task.id;
        if let Some(&known) = task.threads.get(&tid) {
            return Ok((known, process));
        }
        let comm = task.names.get(&tid).unwrap_or(&task.comm).clone();
        let id = into.thread(Thread { process, tid, comm })?;
        task.threads.insert(tid, id);
        Ok((id, process))
    }

    /// Where an address of a process lies.
    pub fn find(&self, pid: u32, address: UserAddr) -> Option<&Map> {
        let maps = &self.by_pid.get(&pid)?.maps;
        let (_, map) = maps.range(..=address).next_back()?;
        Some(map).filter(|map| address < map.end)
    }

    /// The stack of these addresses, leaf first, each with how it is to be read.
    pub fn stack(
        &mut self,
        into: &mut Builder,
        pid: u32,
        addresses: &[(UserAddr, FrameKind)],
        end: EndReason,
    ) -> Result<Option<StackId>, Full> {
        if addresses.is_empty() {
            return Ok(None);
        }
        let process = self.task(into, pid)?.id;
        let mut locations: Vec<LocationId> = Vec::with_capacity(addresses.len());
        for &(address, kind) in addresses {
            let address = lookup_address(address, kind);
            let location = match self.find(pid, address).copied() {
                Some(map) => {
                    self.tell(into, pid, process, &map)?;
                    Location {
                        executable: map.executable,
                        process: map.private.then_some(process),
                        address: if map.private {
                            Address::User(address)
                        } else {
                            Address::File(map.offset(address))
                        },
                        seen_ns: 0,
                    }
                }
                None => Location {
                    executable: into.executable(Executable::Unmapped)?,
                    process: Some(process),
                    address: Address::User(address),
                    seen_ns: 0,
                },
            };
            locations.push(into.location(location)?);
        }
        into.stack(&locations, end).map(Some)
    }

    fn tell(
        &mut self,
        into: &mut Builder,
        pid: u32,
        process: ProcessId,
        map: &Map,
    ) -> Result<(), Full> {
        let Some(task) = self.by_pid.get_mut(&pid) else { return Ok(()) };
        let what = (map.end, map.file_offset, map.executable);
        if task.told.insert(map.start, what) == Some(what) {
            return Ok(());
        }
        into.mapping(Mapping {
            process,
            executable: map.executable,
            start: map.start,
            length: map.end.0.saturating_sub(map.start.0),
            file_offset: map.file_offset,
            since_ns: map.since,
        })
    }

    fn task(&mut self, into: &mut Builder, pid: u32) -> Result<&mut Task, Full> {
        if !self.by_pid.contains_key(&pid) {
            let start = self.next();
            let comm = if pid == 0 { "swapper".to_owned() } else { format!(":{pid}") };
            self.begin(into, pid, start, 0, comm, Rc::default())?;
        }
        self.by_pid.get_mut(&pid).ok_or(Full("processes"))
    }

    fn begin(
        &mut self,
        into: &mut Builder,
        pid: u32,
        start: u64,
        generation: u32,
        comm: String,
        maps: Rc<Maps>,
    ) -> Result<(), Full> {
        let id = into.process(process(pid, start, generation, comm.clone()))?;
        let task = Task {
            id,
            start,
            generation,
            comm,
            maps,
            names: FxHashMap::default(),
            told: FxHashMap::default(),
            threads: FxHashMap::default(),
        };
        if let Some(old) = self.by_pid.insert(pid, task)
            && Rc::strong_count(&old.maps) == 1
        {
            self.maps -= old.maps.len();
        }
        Ok(())
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

fn process(pid: u32, start: u64, generation: u32, comm: String) -> Process {
    Process { pid, start_ns: start, generation, comm, ..Process::default() }
}

#[cfg(test)]
mod tests {
    use stackwire_model::{Device, FileId};

    use super::*;

    fn of(pid: u32, tid: u32) -> TaskId {
        TaskId { pid, tid }
    }

    #[test]
    fn a_place_that_is_used_again_is_another_mapping() {
        let (mut into, mut tasks) = (Builder::new(), Tasks::default());
        let file = |into: &mut Builder, path: &str| {
            let path = path.to_owned();
            let key = FileId::new(1, Device::default()).map(Into::into);
            let file = Executable::File { path, key };
            into.executable(file).unwrap()
        };
        for (since, path) in [(1, "/a.so"), (2, "/b.so")] {
            let executable = file(&mut into, path);
            let map = Map {
                start: UserAddr(0x1000),
                end: UserAddr(0x2000),
                file_offset: FileOffset(0),
                executable,
                private: false,
                since,
            };
            tasks.map(&mut into, 7, map).unwrap();
            let stack = [(UserAddr(0x1010), FrameKind::Exact)];
            tasks.stack(&mut into, 7, &stack, EndReason::NotSaid).unwrap();
        }
        let profile = into.build();
        let told: Vec<_> =
            profile.mappings.iter().map(|it| (it.executable.0, it.since_ns)).collect();
        assert_eq!(told, [(0, 1), (1, 2)]);
    }

    #[test]
    fn a_mapping_covers_what_was_there() {
        let (mut into, mut tasks) = (Builder::new(), Tasks::default());
        let executable = into.executable(Executable::Anonymous).unwrap();
        let map = |start, end, file_offset| Map {
            start: UserAddr(start),
            end: UserAddr(end),
            file_offset: FileOffset(file_offset),
            executable,
            private: false,
            since: 0,
        };
        for new in [map(0, 100, 0), map(200, 300, 0), map(20, 30, 7), map(90, 210, 9)] {
            tasks.map(&mut into, 1, new).unwrap();
        }
        let at = |address| {
            let found = tasks.find(1, UserAddr(address));
            found.map(|it| (it.start.0, it.end.0, it.file_offset.0))
        };
        assert_eq!(at(19), Some((0, 20, 0)));
        assert_eq!(at(20), Some((20, 30, 7)));
        assert_eq!(at(30), Some((30, 90, 30)));
        assert_eq!(at(209), Some((90, 210, 9)));
        assert_eq!(at(210), Some((210, 300, 10)));
        assert_eq!(at(300), None);
        assert_eq!(tasks.maps, 5);
        // Another program begins with nothing, and what was there is given back.
        tasks.comm(&mut into, of(1, 1), "x".to_owned(), true).unwrap();
        assert_eq!((tasks.find(1, UserAddr(50)).is_none(), tasks.maps), (true, 0));
    }

    #[test]
    fn a_child_is_called_as_the_thread_that_made_it() {
        let (mut into, mut tasks) = (Builder::new(), Tasks::default());
        tasks.comm(&mut into, of(7, 7), "main".to_owned(), true).unwrap();
        tasks.comm(&mut into, of(7, 8), "worker".to_owned(), false).unwrap();
        tasks.fork(&mut into, of(9, 9), of(7, 8)).unwrap();
        tasks.thread(&mut into, of(9, 9)).unwrap();
        assert_eq!(into.build().threads[0].comm, "worker");
    }

    #[test]
    fn forks_that_copy_large_tables_end_somewhere() {
        let (mut into, mut tasks) = (Builder::new(), Tasks::default());
        let executable = into.executable(Executable::Anonymous).unwrap();
        let map = |start| Map {
            start: UserAddr(start),
            end: UserAddr(start + 1),
            file_offset: FileOffset(0),
            executable,
            private: true,
            since: 0,
        };
        for start in 0..20_000 {
            tasks.map(&mut into, 1, map(start * 2)).unwrap();
        }
        let made = (2..2000).try_for_each(|pid| {
            tasks.fork(&mut into, of(pid, pid), of(1, 1))?;
            tasks.map(&mut into, pid, map(1 << 40))
        });
        assert_eq!(made, Err(Full("mappings")));
    }
}
