//! Sampling through perf events alone: the kernel copies registers and the top of the user stack,
//! and user space walks it. It takes no capability for processes of the same user.
//!
//! The samples of all events of a CPU and the side band go into one ring, see `rings.rs`. An event
//! is of a thread and of a CPU: the kernel lets inherited events write into rings of a CPU alone
//! (perf_mmap of kernel/events/core.c).

use std::collections::{BTreeSet, HashMap};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use stackwire_collector_ebpf::Counter;
use stackwire_model::Event;

use super::drained::Batch;
use super::rings::{Rings, records};
use super::seen::{Place, Seen};
use super::{Kind, Sampler, SamplerError, online_cpus, open_error, paranoid};
use crate::clock::now_ns;
use crate::process::{family, threads};
use crate::sources::perf_event::{
    Contents, Kernel, PerfEvent, Sampled, Watched, raise_descriptors,
};
use crate::sources::side_band::{self, Change, Forked};
use crate::unwind::Tally;

/// Longest time between two looks at what the thread of the rings has taken.
const TURN: Duration = Duration::from_millis(20);
/// A thread is there a moment before the record that it was forked.
const UNTIL_TOLD: Duration = Duration::from_millis(10);
/// The largest copy. A record has less than 64 KiB, and more in it than the copy.
const MAX_STACK_BYTES: u32 = 63 << 10;
/// Looks for threads that were started meanwhile.
const MAX_LOOKS: usize = 8;

/// Whose samples are taken.
#[derive(Debug)]
pub enum Tasks {
    /// Every task's.
    All,
    /// Those of the processes that are admitted.
    Processes {
        /// Their children are theirs, too.
        follow: bool,
    },
    /// Those of the cgroup whose directory this is.
    Cgroup(File),
}

/// The running kernel side.
#[derive(Debug)]
pub struct PerfSampler {
    tasks: Tasks,
    kinds: Vec<Kind>,
    /// Of the tracepoints among them.
    filter: Option<CString>,
    contents: Contents,
    /// Copies may become larger.
    grows: bool,
    rings: Rings,
    events: Vec<OnCpu>,
    /// By the number of the event.
    by_id: HashMap<u64, Place>,
    /// Processes that were admitted and, where their children are theirs, those they have started.
    admitted: BTreeSet<u32>,
    /// When threads got events, monotonic nanoseconds. Of interest while events are opened.
    opened: HashMap<u32, u64>,
    /// Threads that were to get events.
    found: usize,
    /// Bytes of records that were looked at meanwhile.
    looked_at: usize,
    refused: BTreeSet<u32>,
    seen: Seen,
}

/// An event on a CPU.
#[derive(Debug)]
struct OnCpu {
    cpu: u32,
    event: PerfEvent,
}

impl PerfSampler {
    /// Opens the rings, and events of all tasks or of a cgroup; samples of processes come once they
    /// are admitted. Where the kernel may not be sampled, [`PerfSampler::contents`] says so
    /// afterwards. `grows`: copies become larger where more than 1 % of stacks are deeper.
    ///
    /// # Errors
    /// See [`SamplerError`].
    pub fn start(
        tasks: Tasks,
        kinds: &[Event],
        sampled: Sampled,
        filter: Option<CString>,
        contents: Contents,
        grows: bool,
    ) -> Result<Self, SamplerError> {
        // One for each event on each CPU.
        let _ = raise_descriptors();
        let cpus = online_cpus()?;
        let kind = |event: &Event| Kind { event: event.clone(), when: sampled, paced: false };
        let kinds = kinds.iter().map(kind);
        let mut sampler = Self {
            tasks,
            kinds: kinds.collect(),
            filter,
            contents,
            grows,
            rings: Rings::start(&cpus)?,
            events: Vec::new(),
            by_id: HashMap::new(),
            admitted: BTreeSet::new(),
            opened: HashMap::new(),
            found: 0,
            looked_at: 0,
            refused: BTreeSet::new(),
            seen: Seen::nothing_yet(),
        };
        if !matches!(sampler.tasks, Tasks::Processes { .. }) {
            for cpu in cpus {
                sampler.open_what_there_is(cpu, 0)?;
            }
            sampler.enable_all();
        }
        Ok(sampler)
    }

    /// What a sample holds.
    #[must_use]
    pub fn contents(&self) -> Contents {
        self.contents
    }

    /// Takes samples of these processes, but for threads whose events are inherited already.
    ///
    /// # Errors
    /// See [`SamplerError`].
    pub fn admit(&mut self, pids: &[u32]) -> Result<(), SamplerError> {
        self.admitted.extend(pids);
        self.open_threads(pids, true)
    }

    /// Copies so many bytes of user stacks from now on.
    ///
    /// # Errors
    /// See [`SamplerError`]; then it goes on as before.
    fn copy_stacks(&mut self, bytes: u32) -> Result<(), SamplerError> {
        let before = std::mem::replace(&mut self.contents.stack_bytes, bytes);
        let mut old = std::mem::take(&mut self.events);
        let opened = match self.tasks {
            Tasks::Processes { follow } => {
                self.opened.clear();
                self.open_threads(&self.watched_processes(follow), false)
            }
            _ => {
                let cpus = self.rings.cpus();
                cpus.into_iter().try_for_each(|cpu| self.open(cpu, 0))
            }
        };
        if opened.is_err() {
            self.contents.stack_bytes = before;
            let new = std::mem::replace(&mut self.events, old);
            for of in new {
                self.by_id.remove(&of.event.id());
            }
            return opened;
        }
        // What they wrote stays in the rings, with as large a copy as they were opened for.
        self.seen.end(old.iter_mut().map(|of| &mut of.event));
        self.enable_all();
        Ok(())
    }

    fn watched_processes(&self, follow: bool) -> Vec<u32> {
        let admitted: Vec<u32> = self.admitted.iter().copied().collect();
        if follow { family(&admitted) } else { admitted }
    }

    /// Opens events of all threads of these processes that have not inherited any. With `begin`
    /// they are enabled at once; without, those before are still there.
    fn open_threads(&mut self, pids: &[u32], begin: bool) -> Result<(), SamplerError> {
        let cpus = self.rings.cpus();
        for look in 0..MAX_LOOKS {
            let mut found = self.unopened(pids);
            if !found.is_empty() && !self.opened.is_empty() {
                std::thread::sleep(UNTIL_TOLD);
                self.note_forks();
                found.retain(|(tid, _)| !self.opened.contains_key(tid));
            }
            if found.is_empty() && look > 0 {
                break;
            }
            self.found += found.len();
            for (tid, pid) in found {
                let first = self.events.len();
                for &cpu in &cpus {
                    match self.open_what_there_is(cpu, tid) {
                        Ok(()) => {}
                        // It has ended.
                        Err(error) if error.is(libc::ESRCH) => break,
                        Err(error) => return Err(self.explain(error, pid)),
                    }
                }
                if begin {
                    // A thread that has ended takes no samples.
                    self.events[first..].iter_mut().for_each(|of| drop(of.event.enable()));
                }
                self.opened.insert(tid, now_ns());
            }
        }
        Ok(())
    }

    /// Threads of these processes, each with its process, that are not known to have events.
    fn unopened(&self, pids: &[u32]) -> Vec<(u32, u32)> {
        let all = pids.iter().flat_map(|&pid| threads(pid).into_iter().map(move |tid| (tid, pid)));
        all.filter(|(tid, _)| !self.opened.contains_key(tid)).collect()
    }

    /// Notes which threads were started by threads that had events, and have inherited them.
    fn note_forks(&mut self) {
        let mut forks: Vec<Forked> = Vec::new();
        let look = |record: &[u8]| forks.extend(side_band::forked(record));
        self.looked_at = self.rings.look(self.looked_at, look);
        forks.sort_by_key(|fork| fork.time_ns);
        for Forked { tid, by, time_ns } in forks {
            if self.opened.get(&by).is_some_and(|&opened_ns| opened_ns <= time_ns) {
                self.opened.insert(tid, time_ns);
            }
        }
    }

    fn enable_all(&mut self) {
        for of in &mut self.events {
            // Fails only for events of a CPU that went offline.
            let _ = of.event.enable();
        }
    }

    /// Opens events; without the kernel's part or the cgroup where they are not to be had.
    fn open_what_there_is(&mut self, cpu: u32, tid: u32) -> Result<(), SamplerError> {
        let opened = self.open(cpu, tid);
        let Err(error) = &opened else { return Ok(()) };
        let wanted = self.contents;
        let of_kernel = self.kinds.iter().any(|kind| kind.event.is_tracepoint());
        if error.is(libc::EACCES) && wanted.kernel != Kernel::Excluded && !of_kernel {
            self.contents.kernel = Kernel::Excluded;
        } else if error.is(libc::EINVAL) && wanted.cgroup {
            self.contents.cgroup = false;
        } else {
            return opened;
        }
        self.open_what_there_is(cpu, tid).or_else(|other| {
            self.contents = wanted;
            // That it has ended or that there is no such event was hidden by the first.
            let is_told = other.is(libc::ESRCH) || other.is(libc::ENOENT);
            if is_told { Err(other) } else { opened }
        })
    }

    fn open(&mut self, cpu: u32, tid: u32) -> Result<(), SamplerError> {
        let watched = match &self.tasks {
            Tasks::All => Watched::All,
            Tasks::Processes { follow } => Watched::Thread { tid, children: *follow },
            Tasks::Cgroup(directory) => Watched::Cgroup(directory),
        };
        for (number, Kind { event, when, .. }) in self.kinds.iter().enumerate() {
            let error = |error| open_error(cpu, event, error);
            let perf = event.perf.ok_or_else(|| error(io::ErrorKind::Unsupported.into()))?;
            let first = number == 0;
            let contents = self.contents;
            let opened = self.rings.open_into(cpu, |ring| {
                PerfEvent::open_copying(cpu, perf, *when, watched, contents, ring, first)
            });
            let Some(opened) = opened.map_err(error)? else { return Ok(()) };
            if let Some(filter) = self.filter.as_deref().filter(|_| event.is_tracepoint()) {
                let event = || event.name.clone();
                let failed = |error| SamplerError::Filter { event: event(), error };
                opened.set_filter(filter).map_err(failed)?;
            }
            let place = Place { number: number as u8, contents: self.contents };
            self.by_id.insert(opened.id(), place);
            self.events.push(OnCpu { cpu, event: opened });
        }
        Ok(())
    }

    /// What an error means where events are opened for each thread.
    fn explain(&self, error: SamplerError, pid: u32) -> SamplerError {
        let of_another = || {
            let of = crate::process::user::of(pid);
            of.is_some_and(|users| users.real != rustix::process::geteuid().as_raw())
        };
        if error.is(libc::EMFILE) {
            let threads = self.found;
            let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
            return SamplerError::Descriptors { threads, cpus: self.rings.cpus().len(), limit };
        }
        if error.is(libc::EACCES) && paranoid() <= 2 && of_another() {
            return SamplerError::OfAnotherUser { pid };
        }
        error
    }
}

impl Sampler for PerfSampler {
    fn wait(&mut self, timeout: Duration) -> bool {
        std::thread::sleep(timeout.min(TURN));
        false
    }

    fn drain(&mut self, batch: &mut Batch) {
        self.opened.clear();
        self.looked_at = 0;
        let first_event = batch.events.len();
        let bytes = self.rings.drain();
        for record in records(&bytes, 0) {
            self.seen.take(record, &self.by_id, batch);
        }
        if matches!(self.tasks, Tasks::Processes { follow: true }) {
            // Of those that are watched alone: their parents may end before them.
            for event in &batch.events[first_event..] {
                match event.change {
                    Change::Fork { .. } => drop(self.admitted.insert(event.pid)),
                    Change::Exit { tid } if tid == event.pid => {
                        self.admitted.remove(&event.pid);
                    }
                    _ => {}
                }
            }
        }
        batch.samples.sort_by_key(|sample| sample.header.time_ns);
        batch.events.sort_by_key(|event| event.time_ns);
    }

    fn adapt(&mut self) {}

    fn follow_hotplug(&mut self, batch: &mut Batch) {
        let Ok(online) = online_cpus() else { return };
        let known = self.rings.cpus();
        if known.iter().any(|cpu| !online.contains(cpu)) {
            self.drain(batch);
            let gone = self.events.extract_if(.., |of| !online.contains(&of.cpu));
            let mut gone: Vec<_> = gone.collect();
            self.seen.end(gone.iter_mut().map(|of| &mut of.event));
            self.rings.keep(&online);
        }
        let new: Vec<u32> = online.iter().copied().filter(|cpu| !known.contains(cpu)).collect();
        for cpu in new {
            let tids = match self.tasks {
                Tasks::Processes { follow } => {
                    self.watched_processes(follow).into_iter().flat_map(threads).collect()
                }
                _ => vec![0],
            };
            let opened = self.rings.add(cpu).and_then(|()| {
                tids.into_iter().try_for_each(|tid| match self.open(cpu, tid) {
                    Err(error) if error.is(libc::ESRCH) => Ok(()),
                    opened => opened,
                })
            });
            match opened {
                Ok(()) => drop(self.refused.remove(&cpu)),
                Err(_) => {
                    self.refused.insert(cpu);
                    let others: Vec<u32> = online.iter().copied().filter(|it| *it != cpu).collect();
                    self.rings.keep(&others);
                    self.events.retain(|of| of.cpu != cpu);
                }
            }
            self.enable_all();
        }
    }

    fn refused_cpus(&self) -> u64 {
        self.refused.len() as u64
    }

    fn stop(&mut self) {
        self.seen.end(self.events.iter_mut().map(|of| &mut of.event));
    }

    fn counter(&self, counter: Counter) -> u64 {
        match counter {
            Counter::Taken => self.seen.taken(),
            Counter::RingFull => self.seen.lost(),
            Counter::Outside => self.seen.outside(),
            _ => 0,
        }
    }

    fn note_cut(&mut self, tally: Tally) {
        let bytes = self.contents.stack_bytes;
        // Copies of before it grew last say nothing of those of now.
        let too_small = tally.cut * 100 >= tally.walked && tally.largest_cut > bytes / 2;
        if self.grows && too_small && bytes < MAX_STACK_BYTES {
            // It goes on as before where that fails, and is not tried again: it would be each time.
            self.grows = self.copy_stacks((bytes * 2).min(MAX_STACK_BYTES)).is_ok();
        }
    }
}
