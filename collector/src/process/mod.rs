//! The processes under observation: identity, name, and what is mapped where, at the time of each
//! sample.
//!
//! Fed with side-band events in time order and asked at each sample. Processes that ran before the
//! capture are read from `/proc` at start or when first met. Opens no file of a target but
//! `/proc/PID/{maps,comm,stat,cgroup}`.

mod before;
pub mod cgroup;
mod counts;
pub mod executable;
mod family;
mod history;
mod image;
mod introduce;
mod life;
pub mod maps;
pub mod text;
pub mod user;
pub mod waiting;
mod wanted;

use std::collections::{HashMap, HashSet};
use std::io;
use std::rc::Rc;

use stackwire_model::Choice;

pub use self::before::Before;
use self::executable::{Executables, Kind};
pub use self::family::{each_once, family};
pub use self::image::{Mapping, Mappings, Process};
pub use self::introduce::ThreadNames;
use self::life::is_running;
pub use self::life::{has_ended, living_task, threads};
pub use self::wanted::Wanted;
use crate::clock::now_ns;

/// Processes remembered at once; beyond it, those without a sample in this epoch are forgotten
/// first.
const MAX_PROCESSES: usize = 32_768;

/// How long a process is kept after its end for the kernel side to tell of it: it does so once its
/// parent was told and the kernel has cleaned up, which may take ten seconds (`CONFIG_RCU_LAZY`).
const UNTIL_TOLD_NS: u64 = 12_000_000_000;

/// Samples older than this have been looked at.
const OLDEST_NS: u64 = 10_000_000_000;

/// All processes of interest.
#[derive(Debug, Default)]
pub struct Processes {
    by_pid: HashMap<u32, Process>,
    executables: Executables,
    cgroups: cgroup::Paths,
    /// `None`: all processes are of interest.
    wanted: Option<HashSet<u32>>,
    follow: bool,
    /// Of those of interest these count.
    pub(super) choice: Rc<Choice>,
    /// Wanted, and found ended at the last look.
    gone: HashSet<u32>,
    next_image: u64,
    /// Mappings that are others than at the last [`Processes::take_changed`].
    changed: HashSet<u32>,
    /// Stacks are walked by tables of what is mapped: it matters when those are told.
    by_tables: bool,
    /// Processes with code in the place of other code that the kernel side has not been told of.
    untold: HashSet<u32>,
    /// Processes to hold before the next attempt to forget some.
    most: usize,
    /// The kernel side tells of processes that have ended.
    ends_are_told: bool,
    /// Programs of this epoch that others have taken the place of, by pid. `None`: nobody asks.
    before: Option<HashMap<u32, Vec<Before>>>,
    /// Processes that have not become the program yet that is to be looked at.
    unborn: HashSet<u32>,
    /// Processes whose mappings could not be read, by cause.
    pub denied: u64,
}

impl Processes {
    /// Observes all processes, or those given (with their children when `follow`).
    #[must_use]
    pub fn new(wanted: Option<&[u32]>, follow: bool) -> Self {
        let wanted = wanted.map(|pids| pids.iter().copied().collect());
        Self { wanted, follow, ..Self::default() }
    }

    /// Observes these, too, and reads what is mapped in them.
    pub fn want(&mut self, pids: &[u32]) {
        if let Some(wanted) = &mut self.wanted {
            wanted.extend(pids);
        }
        pids.iter().for_each(|&pid| self.load(pid));
    }

    /// Reads what is mapped in the processes that already run: all, or those wanted.
    pub fn scan(&mut self) {
        let pids: Vec<u32> = match &self.wanted {
            Some(pids) => pids.iter().copied().collect(),
            None => std::fs::read_dir("/proc")
                .map(|entries| {
                    entries
                        .flatten()
                        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
                        .collect()
                })
                .unwrap_or_default(),
        };
        for pid in pids {
            self.load(pid);
        }
    }

    /// The process a sample was taken in.
    pub fn sampled(&mut self, pid: u32, start_ns: u64, cgroup_id: u64) -> &mut Process {
        // The kernel side has proved it is, whatever the events said.
        if let Some(wanted) = &mut self.wanted {
            wanted.insert(pid);
        }
        if self.by_pid.get(&pid).is_some_and(|process| process.stale) {
            self.read_again(pid);
        }
        // A pid used again, and the events that would have told are lost.
        let reused = |process: &Process| process.start_ns != 0 && process.start_ns != start_ns;
        if self.by_pid.get(&pid).is_none_or(reused) {
            self.by_pid.remove(&pid);
            self.load(pid);
            // It has ended, and another has its number by now.
            if self.by_pid.contains_key(&pid) && !introduce::began(pid, start_ns) {
                self.by_pid.remove(&pid);
            }
        }
        if self.by_pid.len() > self.most.max(MAX_PROCESSES) {
            // Those that ended first; the others only if that is not enough.
            self.by_pid
                .retain(|&other, process| !process.exited() || process.touched || other == pid);
            if self.by_pid.len() > MAX_PROCESSES {
                self.by_pid.retain(|&other, process| process.touched || other == pid);
            }
            // If all of them were sampled in this epoch, not to look at each again at every sample.
            self.most = self.by_pid.len() + MAX_PROCESSES / 4;
        }
        let next_image = &mut self.next_image;
        // Absent after load() only if it was gone: its samples are still worth keeping.
        let process = self.by_pid.entry(pid).or_insert_with(|| {
            *next_image += 1;
            Process::new(*next_image, pid, String::new(), Mappings::Gone)
        });
        process.start_ns = start_ns;
        process.touched = true;
        process.sampled = true;
        match cgroup_id {
            // Of a thread that has waited since before the capture it is not known.
            0 => self.cgroups.at_meeting(pid, &mut process.cgroup),
            id => self.cgroups.at_sample(pid, id, &mut process.cgroup),
        }
        process
    }

    /// The interner, for executables that are not mappings.
    pub fn executables(&mut self) -> &mut Executables {
        &mut self.executables
    }

    /// A process.
    #[must_use]
    pub fn get(&self, pid: u32) -> Option<&Process> {
        self.by_pid.get(&pid)
    }

    /// The kernel side tells of processes that have ended: until then each is kept for a while.
    pub fn keep_until_told(&mut self) {
        self.ends_are_told = true;
    }

    /// The kernel side has told that this process has ended.
    pub fn told_of_end(&mut self, pid: u32) {
        if let Some(process) = self.by_pid.get_mut(&pid) {
            process.is_told = true;
        }
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Process> {
        self.by_pid.values()
    }

    /// Whether the process with this number that began then still runs, as far as is known.
    #[must_use]
    pub fn runs(&self, pid: u32, start_ns: u64) -> bool {
        let is_another = |start| start != 0 && start != start_ns;
        self.by_pid.get(&pid).map_or_else(
            || is_running(pid),
            |process| !process.exited() && !is_another(process.start_ns),
        )
    }

    /// The current image of a process.
    #[must_use]
    pub fn image(&self, pid: u32) -> Option<u64> {
        self.by_pid.get(&pid).map(|process| process.image)
    }

    /// Processes whose mappings have changed since the last call, gone ones among them.
    pub fn take_changed(&mut self) -> HashSet<u32> {
        std::mem::take(&mut self.changed)
    }

    /// Stacks are walked by tables from now on. A new mapping then matters to samples that are
    /// taken before the kernel side is told of it.
    pub fn walk_by_tables(&mut self) {
        self.by_tables = true;
    }

    /// The kernel side has been told of all changes.
    pub fn told(&mut self, time_ns: u64) {
        for pid in self.untold.drain() {
            let Some(process) = self.by_pid.get_mut(&pid) else { continue };
            // One that maps again and again and is never sampled would remember all of it.
            process.replaced.retain(|(_, until)| *until > time_ns.saturating_sub(OLDEST_NS));
            for (_, until) in &mut process.replaced {
                *until = time_ns.min(*until);
            }
        }
    }

    /// The mappings of a process, if they are known, and the time since which the process runs the
    /// program that has them.
    #[must_use]
    pub fn known_mappings(&self, pid: u32) -> Option<(&Rc<Vec<Mapping>>, u64)> {
        let process = self.by_pid.get(&pid)?;
        match &process.mappings {
            Mappings::Known(mappings) => Some((mappings, process.since_ns)),
            _ => None,
        }
    }

    /// Where a process has mapped a jitdump: JIT compilers do so for this alone, that it is found.
    #[must_use]
    pub fn jitdump(&self, pid: u32) -> Option<Wanted> {
        let Mappings::Known(mappings) = &self.by_pid.get(&pid)?.mappings else { return None };
        jitdump(pid, mappings).map(|(_, wanted)| wanted)
    }

    /// Whether some process still runs this image.
    #[must_use]
    pub fn has_image(&self, image: u64) -> bool {
        self.by_pid.values().any(|process| process.image == image)
    }

    /// Called between epochs: forgets who ended, who was sampled, and executables nothing refers
    /// to.
    pub fn end_epoch(&mut self) {
        let (ends_are_told, now) = (self.ends_are_told, now_ns());
        let is_awaited = |process: &Process| {
            ends_are_told && !process.is_told && now < process.end_ns + UNTIL_TOLD_NS
        };
        self.by_pid
            .retain(|_, process| process.touched || !process.exited() || is_awaited(process));
        for process in self.by_pid.values_mut() {
            process.touched = false;
        }
        self.executables.purge();
        self.most = 0;
        if let Some(before) = &mut self.before {
            before.clear();
        }
    }

    /// Processes asked for, or followed, that have ended since the last call. None when all
    /// processes are observed.
    pub fn take_ended(&mut self) -> Vec<u32> {
        let Some(wanted) = &mut self.wanted else { return Vec::new() };
        // Forgotten only at the second look: their last events may still be on their way.
        let gone = &mut self.gone;
        let ended: Vec<u32> =
            wanted.extract_if(|pid| gone.contains(pid) && !is_running(*pid)).collect();
        gone.clear();
        gone.extend(wanted.iter().copied().filter(|&pid| !is_running(pid)));
        ended
    }

    /// Whether none is left of those asked for. Never true when all processes are observed.
    #[must_use]
    pub fn all_ended(&self) -> bool {
        self.wanted.as_ref().is_some_and(HashSet::is_empty)
    }

    /// Whether a process with this number is of interest, if there is one.
    #[must_use]
    pub fn is_wanted(&self, pid: u32) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted.contains(&pid))
    }

    fn load(&mut self, pid: u32) {
        let read_ns = now_ns();
        let comm = std::fs::read(format!("/proc/{pid}/comm"))
            .map(|name| String::from_utf8_lossy(name.trim_ascii_end()).into_owned());
        let mappings = match maps::read(pid) {
            Ok(found) if found.is_empty() => Mappings::Gone,
            Ok(found) => {
                let executables = &mut self.executables;
                let mappings = found.iter().map(|mapped| Mapping {
                    start: mapped.start,
                    end: mapped.end(),
                    file_offset: mapped.file_offset,
                    executable: executables.of_mapping(mapped),
                    since_ns: 0,
                });
                Mappings::Known(Rc::new(mappings.collect()))
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.denied += 1;
                Mappings::Denied
            }
            Err(_) => Mappings::Gone,
        };
        if comm.is_err() && matches!(mappings, Mappings::Gone) {
            return; // no such process
        }
        self.next_image += 1;
        let mut process = Process::new(self.next_image, pid, comm.unwrap_or_default(), mappings);
        process.read_ns = read_ns;
        process.since_ns = read_ns;
        self.changed.insert(pid);
        self.by_pid.insert(pid, process);
    }

    /// Reads the mappings of a process again; what was known stays when nothing better is to be
    /// had.
    fn read_again(&mut self, pid: u32) {
        let Some(mut before) = self.by_pid.remove(&pid) else { return };
        self.load(pid);
        match self.by_pid.get_mut(&pid) {
            Some(now) if matches!(now.mappings, Mappings::Known(_)) => {
                now.start_ns = before.start_ns;
                now.born_ns = before.born_ns;
                now.generation = before.generation + 1;
                now.parent = before.parent;
                now.cgroup = before.cgroup;
            }
            _ => {
                before.stale = false;
                self.changed.insert(pid);
                self.by_pid.insert(pid, before);
            }
        }
    }
}

/// The jitdump among what a process has mapped, its own rather than its parent's, and how to open
/// it.
#[must_use]
pub fn jitdump(pid: u32, mappings: &[Mapping]) -> Option<(&Kind, Wanted)> {
    let dumps = mappings.iter().filter_map(|mapping| {
        let kind = &mapping.executable.kind;
        let Kind::File { path, .. } = kind else { return None };
        let of = path.rsplit('/').next()?.strip_prefix("jit-")?.strip_suffix(".dump")?;
        let (start, end, path) = (mapping.start, mapping.end, path.clone());
        Some((of.parse() == Ok(pid), kind, Wanted::Mapped { pid, start, end, path }))
    });
    dumps.max_by_key(|(own, ..)| *own).map(|(_, kind, wanted)| (kind, wanted))
}

#[cfg(test)]
mod tests {
    use stackwire_collector_ebpf::SampleHeader;
    use stackwire_model::{BuildId, FileOffset, UserAddr};

    use super::*;
    use crate::sched::Scheduled;
    use crate::sources::record::comm_bytes;
    use crate::sources::side_band::{Change, Event, Mapped};

    const PID: u32 = 4_000_001; // above any pid_max, so that /proc has no such process

    fn map(pid: u32, start: u64, length: u64, file_offset: u64, path: &str) -> Event {
        let path = path.to_owned();
        let key = BuildId::new(&[1; 20]).map(Into::into);
        let (start, file_offset) = (UserAddr(start), FileOffset(file_offset));
        let mapped = Mapped { start, length, file_offset, path, key, is_ambiguous: false };
        Event { time_ns: 0, pid, change: Change::Map(mapped) }
    }

    fn exec(pid: u32, comm: &str) -> Event {
        Event { time_ns: 0, pid, change: Change::Comm { tid: pid, comm: comm.into(), exec: true } }
    }

    fn at(process: &Process, address: u64) -> Option<(String, u64)> {
        let mapping = process.mapping(UserAddr(address))?;
        let Kind::File { path, .. } = &mapping.executable.kind else { return None };
        Some((path.clone(), mapping.offset(UserAddr(address)).0))
    }

    #[test]
    fn a_new_mapping_replaces_what_it_covers_and_splits_what_sticks_out() {
        let mut processes = Processes::new(None, false);
        processes.apply(&exec(PID, "x"));
        processes.apply(&map(PID, 0x1000, 0x4000, 0, "/old"));
        processes.apply(&map(PID, 0x2000, 0x1000, 0x700, "/new"));
        let process = processes.sampled(PID, 1, 1);
        assert_eq!(at(process, 0x1fff).unwrap(), ("/old".into(), 0xfff));
        assert_eq!(at(process, 0x2001).unwrap(), ("/new".into(), 0x701));
        assert_eq!(at(process, 0x3000).unwrap(), ("/old".into(), 0x2000));
        assert_eq!(at(process, 0x5000), None);
        processes.apply(&map(PID, 0, 0x9000, 0, "/all"));
        assert_eq!(at(processes.sampled(PID, 1, 1), 0x2001).unwrap().0, "/all");
    }

    #[test]
    fn a_child_has_its_parents_mappings_until_it_execs() {
        let mut processes = Processes::new(None, false);
        processes.apply(&exec(PID, "parent"));
        processes.apply(&map(PID, 0x1000, 0x1000, 0, "/parent"));
        let fork = Change::Fork { parent: PID };
        processes.apply(&Event { time_ns: 0, pid: PID + 1, change: fork });
        let image = processes.sampled(PID + 1, 2, 1).image;
        assert_eq!(at(processes.sampled(PID + 1, 2, 1), 0x1000).unwrap().0, "/parent");
        processes.apply(&exec(PID + 1, "child"));
        let child = processes.sampled(PID + 1, 2, 1);
        assert!(at(child, 0x1000).is_none() && child.image != image);
        assert_eq!((child.comm.as_str(), child.generation), ("child", 1));
        assert_eq!(at(processes.sampled(PID, 1, 1), 0x1000).unwrap().0, "/parent");
    }

    #[test]
    fn only_wanted_processes_and_followed_children_are_kept() {
        for follow in [false, true] {
            let mut processes = Processes::new(Some(&[PID]), follow);
            processes.apply(&exec(PID, "wanted"));
            processes.apply(&exec(PID + 7, "stranger"));
            processes.apply(&Event {
                time_ns: 0,
                pid: PID + 1,
                change: Change::Fork { parent: PID },
            });
            let mut kept: Vec<_> = processes.by_pid.keys().copied().collect();
            kept.sort_unstable();
            assert_eq!(kept, if follow { vec![PID, PID + 1] } else { vec![PID] });
        }
    }

    #[test]
    fn after_a_gap_in_the_events_the_mappings_are_read_again() {
        let own = std::process::id();
        let code = after_a_gap_in_the_events_the_mappings_are_read_again as fn() as usize as u64;
        let mut processes = Processes::new(None, false);
        // What the events told is out of date; the one that would have said so is lost.
        processes.apply(&exec(own, "stale"));
        processes.apply(&map(own, 0x1000, 0x1000, 0, "/stale"));
        assert!(processes.sampled(own, 1, 1).mapping(UserAddr(code)).is_none());
        processes.apply(&Event { time_ns: 0, pid: 0, change: Change::Lost(1) });
        let process = processes.sampled(own, 1, 1);
        assert!(at(process, 0x1000).is_none());
        let own_path = std::fs::read_link("/proc/self/exe").unwrap();
        assert_eq!(at(process, code).unwrap().0, own_path.to_str().unwrap());
        assert_eq!((process.generation, process.start_ns), (1, 1));
        // Of a process that is gone nothing better is known than what was.
        processes.apply(&exec(PID, "gone"));
        processes.apply(&map(PID, 0x1000, 0x1000, 0, "/gone"));
        processes.apply(&Event { time_ns: 0, pid: 0, change: Change::Lost(1) });
        assert_eq!(at(processes.sampled(PID, 1, 1), 0x1000).unwrap().0, "/gone");
    }

    #[test]
    fn stacks_through_code_in_the_place_of_other_code_are_cut_until_it_is_told() {
        let mut processes = Processes::new(None, false);
        processes.walk_by_tables();
        processes.apply(&exec(PID, "x"));
        processes.apply(&map(PID, 0x1000, 0x1000, 0, "/old"));
        processes.apply(&map(PID, 0x5000, 0x1000, 0, "/other"));
        let stack = [0x5010, 0x1010, 0x5020];
        assert_eq!(processes.sampled(PID, 1, 1).certain(10, &stack), 3);
        processes.apply(&map(PID, 0x1000, 0x1000, 0, "/new"));
        assert_eq!(processes.sampled(PID, 1, 1).certain(20, &stack), 2);
        processes.told(30);
        assert_eq!(processes.sampled(PID, 1, 1).certain(29, &stack), 2);
        assert_eq!(processes.sampled(PID, 1, 1).certain(30, &stack), 3);
    }

    #[test]
    fn programs_are_found_by_the_time_they_ran() {
        let mut processes = Processes::new(None, false);
        processes.keep_before();
        processes.await_exec(&[PID]);
        let fork = |time_ns| Event { time_ns, pid: PID, change: Change::Fork { parent: PID - 1 } };
        let at = |time_ns, event: Event| Event { time_ns, ..event };
        let own = |processes: &mut Processes, start_ns, time_ns| {
            let (pid, start_boottime_ns, since_ns) = (PID, start_ns, time_ns);
            let comm = comm_bytes(b"told");
            let (tid, cgroup_id) = (None, 1);
            let host_pid = 0;
            let of = Scheduled { pid, host_pid, tid, start_boottime_ns, since_ns, cgroup_id, comm };
            let program = processes.program_of(&of);
            (program.comm, program.start_ns)
        };
        processes.apply(&exec(PID - 1, "parent"));
        processes.apply(&fork(10));
        let counts = |processes: &mut Processes| {
            processes.counts(&SampleHeader { pid: PID, ..SampleHeader::default() })
        };
        assert!(!counts(&mut processes));
        processes.apply(&at(20, exec(PID, "first")));
        processes.apply(&at(30, exec(PID, "second")));
        assert!(counts(&mut processes));
        assert_eq!(own(&mut processes, 9, 15), ("parent".to_owned(), 9));
        assert!(!processes.before(PID, 15).unwrap().counts);
        assert_eq!(own(&mut processes, 9, 25), ("first".to_owned(), 9));
        assert!(processes.before(PID, 25).unwrap().counts);
        assert_eq!(own(&mut processes, 9, 35), ("second".to_owned(), 9));
        // Another process takes its number.
        processes.apply(&fork(40));
        assert_eq!(own(&mut processes, 9, 35), ("second".to_owned(), 9));
        processes.end_epoch();
        // Nobody knows the second any more; the other has not been sampled.
        assert_eq!(own(&mut processes, 9, 35), ("told".to_owned(), 9));
        assert_eq!(own(&mut processes, 39, 45), ("parent".to_owned(), 39));
    }

    #[test]
    fn a_reused_pid_does_not_inherit_and_a_gone_process_is_said_to_be_gone() {
        let mut processes = Processes::new(None, false);
        processes.apply(&exec(PID, "first"));
        processes.apply(&map(PID, 0x1000, 0x1000, 0, "/first"));
        processes.sampled(PID, 10, 1);
        let second = processes.sampled(PID, 20, 1);
        assert!(at(second, 0x1000).is_none());
        assert!(matches!(second.mappings, Mappings::Gone));
    }
}
