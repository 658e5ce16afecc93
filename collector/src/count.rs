//! Counts events of processes and takes no samples: for `stackwire stat`.
//!
//! Counters are of threads, and those of the threads and children they start are added to them by
//! the kernel. Called by `main.rs`.

use std::io;

use perf_event::{Builder, Counter, ReadFormat};
use stackwire_model::Event;
use stackwire_model::sched::CounterSum;

use crate::process::{each_once, threads};
use crate::sources::perf_event::{builder, raise_descriptors};
use crate::sources::tracepoint::{self, TracepointError};

/// What is counted.
#[derive(Clone, Debug)]
pub struct Counting {
    /// Events, in groups: those of a group are counted at the same times.
    pub groups: Vec<Vec<Event>>,
    /// Of which processes.
    pub pids: Vec<u32>,
    /// Each thread by itself. It is not told of threads that start later.
    pub per_thread: bool,
    /// Count from the moment on that the process becomes another program.
    pub on_exec: bool,
}

/// Counting could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CountError {
    /// No such process.
    #[error("no process with pid {0}; `ps -e` lists those that run")]
    NoSuchProcess(u32),
    /// A tracepoint.
    #[error(transparent)]
    Tracepoint(#[from] TracepointError),
    /// An event that may not be counted.
    #[error(
        "cannot count {event} of pid {pid}: {error}; count your own processes, or run it as root"
    )]
    Denied {
        /// Its name.
        event: String,
        /// Of which process.
        pid: u32,
        /// What the kernel said.
        error: io::Error,
    },
    /// Anything else.
    #[error("cannot count {event}: {error}; this machine may have no such event")]
    Open {
        /// Its name.
        event: String,
        /// What the kernel said.
        error: io::Error,
    },
}

/// Counters that run.
#[derive(Debug)]
pub struct Counters {
    counters: Vec<OfThread>,
}

struct OfThread {
    /// Place in the list that was asked for: an event may be in several groups.
    place: usize,
    event: Event,
    tid: Option<u32>,
    /// Of user mode alone: the kernel's part may not be counted.
    user_only: bool,
    /// `None`: this machine has none.
    counter: Option<Counter>,
}

impl std::fmt::Debug for OfThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OfThread").field("event", &self.event).field("tid", &self.tid).finish()
    }
}

/// What was counted of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Count {
    /// Its name.
    pub event: String,
    /// Of which thread; none: of all.
    pub tid: Option<u32>,
    /// Of user mode alone.
    pub user_only: bool,
    /// Not scaled. `None`: this machine does not count it.
    pub counted: Option<CounterSum>,
}

impl Counters {
    /// Opens them and lets them count.
    ///
    /// # Errors
    /// See [`CountError`].
    pub fn start(counting: &Counting) -> Result<Self, CountError> {
        // One for each event of each thread.
        let _ = raise_descriptors();
        let mut counters = Vec::new();
        for pid in each_once(&counting.pids) {
            let tids = threads(pid);
            if tids.is_empty() {
                return Err(CountError::NoSuchProcess(pid));
            }
            for tid in tids {
                let mut place = 0;
                for group in &counting.groups {
                    open_group(group, place, counting, (pid, tid), &mut counters)?;
                    place += group.len();
                }
            }
        }
        if !counting.on_exec {
            for counter in counters.iter_mut().filter_map(|of| of.counter.as_mut()) {
                // Of a thread that has ended nothing is counted.
                let _ = counter.enable();
            }
        }
        Ok(Self { counters })
    }

    /// What was counted so far: each event once, or for each thread.
    #[must_use]
    pub fn read(&mut self) -> Vec<Count> {
        let mut found: Vec<(usize, Count)> = Vec::new();
        for OfThread { place, event, tid, user_only, counter } in &mut self.counters {
            let counted = counter.as_mut().and_then(|counter| {
                let read = counter.read_count_and_time().ok()?;
                let (enabled_ns, running_ns) = (read.time_enabled, read.time_running);
                Some(CounterSum { value: read.count, enabled_ns, running_ns })
            });
            let same = |(at, it): &&mut (usize, Count)| at == place && it.tid == *tid;
            let Some((_, sum)) = found.iter_mut().find(same) else {
                let (event, user_only) = (event.name.clone(), *user_only);
                found.push((*place, Count { event, tid: *tid, user_only, counted }));
                continue;
            };
            if let Some(more) = counted {
                *sum.counted.get_or_insert_default() += more;
            }
        }
        found.into_iter().map(|(_, count)| count).collect()
    }
}

/// Opens a group whose first event has this place.
fn open_group(
    group: &[Event],
    first_place: usize,
    counting: &Counting,
    (pid, tid): (u32, u32),
    into: &mut Vec<OfThread>,
) -> Result<(), CountError> {
    let first = into.len();
    for (place, event) in (first_place..).zip(group) {
        let found = if event.is_tracepoint() { tracepoint::find(event)? } else { event.clone() };
        let leader = into[first..].iter_mut().find_map(|of| of.counter.as_mut());
        let (counter, user_only) = match open(&found, counting, tid, false, leader) {
            Err(error) if error.raw_os_error() == Some(libc::EACCES) && !event.is_tracepoint() => {
                let leader = into[first..].iter_mut().find_map(|of| of.counter.as_mut());
                (open(&found, counting, tid, true, leader), true)
            }
            opened => (opened, false),
        };
        let counter = match counter {
            Ok(counter) => Some(counter),
            Err(error) => match error.raw_os_error() {
                // The thread has ended meanwhile.
                Some(libc::ESRCH) => return Ok(()),
                Some(libc::ENOENT | libc::EOPNOTSUPP | libc::ENODEV) => None,
                Some(libc::EACCES | libc::EPERM) => {
                    return Err(CountError::Denied { event: event.name.clone(), pid, error });
                }
                _ => return Err(CountError::Open { event: event.name.clone(), error }),
            },
        };
        let tid = counting.per_thread.then_some(tid);
        into.push(OfThread { place, event: event.clone(), tid, user_only, counter });
    }
    Ok(())
}

fn open(
    event: &Event,
    counting: &Counting,
    tid: u32,
    user_only: bool,
    leader: Option<&mut Counter>,
) -> io::Result<Counter> {
    let Some(perf) = event.perf else { return Err(io::Error::from_raw_os_error(libc::ENOENT)) };
    let mut builder: Builder<'_> = builder(perf);
    builder.observe_pid(tid as i32).any_cpu();
    builder.exclude_kernel(user_only).exclude_hv(user_only);
    builder.read_format(ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING);
    builder.inherit(!counting.per_thread).enable_on_exec(counting.on_exec);
    match leader {
        Some(leader) => builder.build_with_group(leader),
        None => builder.build(),
    }
}
