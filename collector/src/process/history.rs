//! What events change of the processes: they fork, become other programs, map files, end.
//!
//! Reads `/proc` only of a parent that was never heard of.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::{Mapping, Mappings, Process, Processes};
use crate::sources::side_band::{Change, Event};

impl Processes {
    /// Applies one event.
    pub fn apply(&mut self, event: &Event) {
        let pid = event.pid;
        match &event.change {
            // The side band has gaps: what is mapped must be asked again. The record names no
            // process.
            Change::Lost(_) => self.by_pid.values_mut().for_each(|process| process.stale = true),
            // What was read from /proc after the event has it in it.
            _ if self.by_pid.get(&pid).is_some_and(|process| event.time_ns < process.read_ns) => {}
            Change::Fork { parent } => {
                self.follow(*parent, pid);
                if self.is_wanted(pid) {
                    self.keep(pid, event.time_ns);
                    self.fork(*parent, pid, event.time_ns);
                }
            }
            _ if !self.is_wanted(pid) => {}
            Change::Comm { exec: true, comm, .. } => {
                self.keep(pid, event.time_ns);
                self.unborn.remove(&pid);
                self.exec(pid, comm, event.time_ns);
            }
            Change::Comm { tid, comm, .. } if *tid == pid => {
                if let Some(process) = self.by_pid.get_mut(&pid) {
                    process.comm.clone_from(comm);
                }
            }
            Change::Map(mapped) => {
                if let Some(process) = self.by_pid.get_mut(&pid) {
                    let version = process.version;
                    process.map(event.time_ns, mapped, &mut self.executables);
                    if process.version != version {
                        self.changed.insert(pid);
                    }
                    if !self.by_tables {
                        process.replaced.clear();
                    } else if !process.replaced.is_empty() {
                        self.untold.insert(pid);
                    }
                }
            }
            Change::Exit { tid } if *tid == pid => {
                if let Some(process) = self.by_pid.get_mut(&pid) {
                    process.end_ns = event.time_ns.max(1);
                }
            }
            Change::Comm { .. } | Change::Exit { .. } | Change::Throttle => {}
        }
    }

    /// The mappings that these processes will have after `events`, which are in order of time and
    /// not applied yet. With each is the time since which the process runs the program that has
    /// these mappings. Contains only processes that became another program or mapped something.
    pub fn preview(
        &mut self,
        events: &[Event],
        of: &HashSet<u32>,
    ) -> HashMap<u32, (Rc<Vec<Mapping>>, u64)> {
        let mut ahead: HashMap<u32, Process> = HashMap::new();
        for Event { time_ns, pid, change } in events {
            match change {
                // Its next word may be of an exec, and be here already.
                Change::Fork { parent } => self.follow(*parent, *pid),
                _ if !of.contains(pid) || !self.is_wanted(*pid) => {}
                Change::Comm { exec: true, .. } => {
                    let mappings = Mappings::Known(Rc::default());
                    let mut process = Process::new(0, *pid, String::new(), mappings);
                    process.since_ns = *time_ns;
                    ahead.insert(*pid, process);
                }
                Change::Map(mapped) => {
                    let now = || self.by_pid.get(pid).cloned();
                    let process = ahead.remove(pid).or_else(now);
                    let Some(mut process) = process else { continue };
                    process.map(*time_ns, mapped, &mut self.executables);
                    ahead.insert(*pid, process);
                }
                _ => {}
            }
        }
        let known = |(pid, process): (u32, Process)| match process.mappings {
            Mappings::Known(mappings) => Some((pid, (mappings, process.since_ns))),
            _ => None,
        };
        ahead.into_iter().filter_map(known).collect()
    }

    /// Takes a child along, if that is asked for.
    fn follow(&mut self, parent: u32, pid: u32) {
        if let Some(wanted) = &mut self.wanted
            && self.follow
            && wanted.contains(&parent)
        {
            wanted.insert(pid);
        }
    }

    fn fork(&mut self, parent: u32, pid: u32, time_ns: u64) {
        self.changed.insert(pid);
        if !self.by_pid.contains_key(&parent) {
            self.load(parent);
        }
        // What was read of the parent after the fork may be of a program it has become since.
        let parent_now = self.by_pid.get(&parent).filter(|parent| parent.read_ns <= time_ns);
        let inherited =
            parent_now.map(|p| (p.comm.clone(), p.mappings.clone(), p.cgroup.inherited()));
        // A parent that is not wanted itself was loaded for this alone.
        if !self.is_wanted(parent) {
            self.by_pid.remove(&parent);
        }
        let Some((comm, mappings, cgroup)) = inherited else {
            self.by_pid.remove(&pid);
            return; // the first sample will ask /proc
        };
        self.next_image += 1;
        let mut process = Process::new(self.next_image, pid, comm, mappings);
        (process.since_ns, process.witnessed, process.born_ns) = (time_ns, true, time_ns);
        (process.parent, process.cgroup) = (parent, cgroup);
        self.by_pid.insert(pid, process);
    }

    fn exec(&mut self, pid: u32, comm: &str, time_ns: u64) {
        self.changed.insert(pid);
        self.next_image += 1;
        let mappings = Mappings::Known(Rc::default());
        let mut process = Process::new(self.next_image, pid, comm.to_owned(), mappings);
        (process.since_ns, process.witnessed) = (time_ns, true);
        if let Some(before) = self.by_pid.get(&pid) {
            process.start_ns = before.start_ns;
            process.born_ns = before.born_ns;
            process.host_pid = before.host_pid;
            process.generation = before.generation + 1;
            process.parent = before.parent;
            process.cgroup = before.cgroup.inherited();
        }
        self.cgroups.at_exec(pid, &mut process.cgroup);
        self.by_pid.insert(pid, process);
    }
}
