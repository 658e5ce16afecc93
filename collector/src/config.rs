//! A validated configuration: what to sample, how, and where to send it. Nothing reads arguments
//! after this; of the environment `host/mod.rs` reads who the collector's own pod is.

use std::ffi::CString;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use stackwire_collector_ebpf::MAX_EVENTS;
use stackwire_model::{AddUp, Choice, Event, NoBpf, OffCpu, Share, Source, StackCopies, Unwind};
use stackwire_rights::capabilities::as_user;

use crate::host::proc_is_own;
use crate::outbox::Limits;
use crate::process::{has_ended, text};
use crate::sampler::BTF_PATH;
use crate::sink::Target;
use crate::sources::perf_event::Sampled;
use crate::sources::tracepoint::TracepointError;

/// What is sampled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every process.
    All,
    /// These processes with all their threads.
    Processes {
        /// Process ids.
        pids: Vec<u32>,
        /// Their future children as well.
        follow: bool,
        /// From the moment on that they become other programs.
        on_exec: bool,
    },
    /// The tasks of a cgroup and those below it.
    Cgroup(PathBuf),
}

/// `CGROUP2_SUPER_MAGIC` of include/uapi/linux/magic.h.
const CGROUP2: i64 = 0x6367_7270;

/// Above it, most waits would not be taken one by one, and a short one would stand for more than
/// a profile's count of events holds.
const MAX_THRESHOLD: Duration = Duration::from_millis(100);

/// The shortest period of a clock, to which the kernel makes shorter ones longer without saying so
/// (`perf_swevent_start_hrtimer` of kernel/events/core.c).
const SHORTEST_CLOCK_NS: u64 = 10_000;

/// Bytes of a user stack that can be copied.
const STACK_BYTES: RangeInclusive<u32> = 1 << 10..=63 << 10;

/// Where a capture goes.
#[derive(Clone, Debug)]
pub enum Destination {
    /// A capture file.
    File(PathBuf),
    /// A symbolizer.
    Symbolizer(Target),
}

/// Everything a capture needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// What is sampled.
    pub scope: Scope,
    /// Which processes of those count.
    pub choice: Choice,
    /// What makes the kernel take samples: a series each.
    pub events: Vec<Event>,
    /// Where threads wait: two series, of blocked and of runnable time.
    pub off_cpu: Option<OffCpu>,
    /// How threads are scheduled, added up.
    pub sched: AddUp,
    /// Samples of each a second and CPU, without a `count`.
    pub frequency: u32,
    /// A sample of each so many occurrences.
    pub count: Option<u64>,
    /// Of tracepoints only those occurrences are sampled whose fields fit, as the kernel's
    /// Documentation/trace/events.rst writes it: `prev_pid == 1`.
    pub filter: Option<CString>,
    /// Record kernel stacks.
    pub kernel_stacks: bool,
    /// With what samples are taken.
    pub source: Source,
    /// Bytes of user stacks that perf events copy. None: few, and more where stacks are deeper.
    pub stack_bytes: Option<u32>,
    /// Whether stacks that cannot be walked yet are copied.
    pub stack_copies: StackCopies,
    /// How user stacks are walked.
    pub unwind: Unwind,
    /// Where unwind tables are kept from run to run.
    pub unwind_cache: Option<PathBuf>,
    /// Longest capture; none: until told to stop.
    pub duration: Option<Duration>,
    /// Length of an epoch.
    pub epoch: Duration,
    /// What may wait for the destination.
    pub limits: Limits,
    /// Which files of processes leave the host.
    pub share: Share,
    /// Have Python processes name their functions while they are sampled.
    pub inject_python: bool,
}

/// A configuration that cannot work, with what to do instead.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// No such process.
    #[error("no process with pid {0}; `ps -e` lists those that run")]
    NoSuchProcess(u32),
    /// A thread id was given.
    #[error("{tid} is a thread of process {pid}; use --pid {pid}, all its threads are sampled")]
    IsThread {
        /// The thread.
        tid: u32,
        /// Its process.
        pid: u32,
    },
    /// A zombie.
    #[error(
        "pid {0} is a zombie: it has ended and waits for its parent, there is nothing left to sample"
    )]
    IsZombie(u32),
    /// A kernel thread.
    #[error("pid {0} is a kernel thread; kernel threads are sampled with -a")]
    IsKernelThread(u32),
    /// Rate 0.
    #[error("a sample rate of 0 takes no samples; 99 is a good one")]
    RateZero,
    /// Rate above the kernel's limit.
    #[error(
        "a sample rate of {asked} is above the kernel's limit of {limit}; use --sample-rate {limit} or less, or raise sysctl kernel.perf_event_max_sample_rate"
    )]
    RateTooHigh {
        /// Asked for.
        asked: u32,
        /// `kernel.perf_event_max_sample_rate`.
        limit: u32,
    },
    /// Too many events, or none.
    #[error("{0} events at once: 1 to {MAX_EVENTS} can be sampled")]
    Events(usize),
    /// No way to wait.
    #[error("no state of waiting threads to record; there are sleep, disk, stopped and preempted")]
    NoWaitState,
    /// A threshold no one would want.
    #[error(
        "an off-CPU threshold of {0:?} is too long: 100ms is the longest, 1ms a good one, and 0 takes every wait"
    )]
    Threshold(Duration),
    /// An event twice.
    #[error("the event {0} is there twice")]
    EventTwice(String),
    /// Not an event of perf's.
    #[error("the kernel cannot sample an event called {0:?}")]
    NotSampled(String),
    /// Duration 0.
    #[error("a duration of 0 takes no samples")]
    NoDuration,
    /// Not a cgroup.
    #[error("{0} is not a directory of the cgroup v2 hierarchy")]
    NotACgroup(PathBuf),
    /// Pids would be those of other processes.
    #[error(
        "/proc is that of another pid namespace, so a pid there is not the same process here: enter it with its mounts (nsenter --pid --mount), or mount its own where nobody else sees it (unshare --mount, then mount -t proc proc /proc)"
    )]
    OtherProc,
    /// Count 0.
    #[error("a sample of each 0 events is none; 1 takes every event")]
    CountZero,
    /// A clock that is to take samples faster than the kernel lets it.
    #[error(
        "a clock counts nanoseconds and takes a sample each 10,000 at most: count 10000 or more"
    )]
    ClockTooFast,
    /// A filter without a tracepoint.
    #[error("a filter is of tracepoints, and none is sampled: add one, as sched:sched_switch")]
    NothingToFilter,
    /// Tracepoints are perf's.
    #[error("tracepoints are sampled through perf events: leave out the source")]
    NeedsPerf,
    /// Tracepoints and waits.
    #[error(
        "tracepoints and waits are recorded in two captures: the first through perf events, the second with eBPF"
    )]
    NeedsBoth,
    /// A tracepoint that is none here.
    #[error(transparent)]
    Tracepoint(TracepointError),
    /// A copy that is none.
    #[error("stacks are copied in multiples of 8 bytes, 1 to 63 KiB of them")]
    StackBytes,
    /// Perf events alone do not tell it.
    #[error(
        "where threads wait and how they are scheduled is recorded with eBPF alone: leave out the source, or record CPU time"
    )]
    NeedsBpf,
    /// No BTF.
    #[error(
        "this kernel has no {BTF_PATH}; Stackwire needs one built with CONFIG_DEBUG_INFO_BTF, as distribution kernels from 5.15 on are"
    )]
    NoBtf,
}

impl Config {
    /// All series, as `Hello` lists them: those of events, then blocked and runnable time.
    #[must_use]
    pub fn series(&self) -> Vec<Event> {
        let waits = self.off_cpu.iter().flat_map(|_| [Event::off_cpu(), Event::run_queue()]);
        self.events.iter().cloned().chain(waits).collect()
    }

    /// A configuration with the defaults of the command line.
    #[must_use]
    pub fn new(scope: Scope) -> Self {
        Self {
            scope,
            choice: Choice::default(),
            events: vec![Event::cpu_clock()],
            off_cpu: None,
            sched: AddUp::Nothing,
            frequency: 99,
            count: None,
            filter: None,
            kernel_stacks: true,
            source: Source::default(),
            stack_bytes: None,
            stack_copies: StackCopies::default(),
            unwind: Unwind::default(),
            unwind_cache: None,
            duration: None,
            epoch: Duration::from_secs(10),
            limits: Limits::default(),
            share: Share::default(),
            inject_python: false,
        }
    }

    /// Checks it against this host.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.frequency == 0 {
            return Err(ConfigError::RateZero);
        }
        if let Some(limit) = max_sample_rate().filter(|&limit| self.frequency > limit) {
            return Err(ConfigError::RateTooHigh { asked: self.frequency, limit });
        }
        let adds_up = self.sched != AddUp::Nothing;
        if self.events.is_empty() && self.off_cpu.is_none() && !adds_up
            || self.events.len() > MAX_EVENTS
        {
            return Err(ConfigError::Events(self.events.len()));
        }
        if let Some(off_cpu) = &self.off_cpu {
            if off_cpu.states.is_empty() {
                return Err(ConfigError::NoWaitState);
            }
            if off_cpu.threshold > MAX_THRESHOLD {
                return Err(ConfigError::Threshold(off_cpu.threshold));
            }
        }
        for (index, event) in self.events.iter().enumerate() {
            if self.events[..index].contains(event) {
                return Err(ConfigError::EventTwice(event.name.clone()));
            }
            if event.perf.is_none() && !event.is_tracepoint() {
                return Err(ConfigError::NotSampled(event.name.clone()));
            }
        }
        if self.count == Some(0) {
            return Err(ConfigError::CountZero);
        }
        if self.count.is_some_and(|count| count < SHORTEST_CLOCK_NS)
            && self.events.iter().any(Event::is_clock)
        {
            return Err(ConfigError::ClockTooFast);
        }
        if self.filter.is_some() && !self.needs_perf() {
            return Err(ConfigError::NothingToFilter);
        }
        if self.duration.is_some_and(|duration| duration.is_zero()) {
            return Err(ConfigError::NoDuration);
        }
        if !proc_is_own() {
            return Err(ConfigError::OtherProc);
        }
        match &self.scope {
            Scope::All => {}
            Scope::Processes { pids, .. } => {
                pids.iter().try_for_each(|&pid| check_process(pid, Path::new("/proc")))?;
            }
            Scope::Cgroup(path) => {
                // One of version 1 has ids of another kind.
                let of_cgroups = || rustix::fs::statfs(path).is_ok_and(|of| of.f_type == CGROUP2);
                let is_one = || path.is_dir() && of_cgroups();
                if as_user(is_one) != Ok(true) {
                    return Err(ConfigError::NotACgroup(path.clone()));
                }
            }
        }
        if self.stack_bytes.is_some_and(|bytes| !STACK_BYTES.contains(&bytes) || bytes % 8 != 0) {
            return Err(ConfigError::StackBytes);
        }
        match (self.source, self.no_bpf()) {
            (Source::Perf, _) if self.needs_bpf() => Err(ConfigError::NeedsBpf),
            _ if self.needs_perf() && self.needs_bpf() => Err(ConfigError::NeedsBoth),
            (Source::Bpf, _) if self.needs_perf() => Err(ConfigError::NeedsPerf),
            _ if self.needs_perf() => Ok(()),
            (Source::Auto, _) if !self.needs_bpf() => Ok(()),
            (Source::Auto | Source::Bpf, Some(_)) => Err(ConfigError::NoBtf),
            (_, None) | (Source::Perf, _) => Ok(()),
        }
    }

    /// Whether something is recorded that perf events do not tell.
    #[must_use]
    pub fn needs_bpf(&self) -> bool {
        self.off_cpu.is_some() || self.sched != AddUp::Nothing
    }

    /// Whether an event is sampled that eBPF programs of perf events do not see.
    #[must_use]
    pub fn needs_perf(&self) -> bool {
        self.events.iter().any(Event::is_tracepoint)
    }

    /// When events take a sample.
    #[must_use]
    pub fn sampled(&self) -> Sampled {
        self.count.map_or(Sampled::PerSecond(self.frequency), Sampled::EachOf)
    }

    /// What of this host is in the way of eBPF, as far as can be told without trying.
    #[must_use]
    pub fn no_bpf(&self) -> Option<NoBpf> {
        (!Path::new(BTF_PATH).exists()).then_some(NoBpf::NoBtf)
    }
}

fn max_sample_rate() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/perf_event_max_sample_rate").ok()?.trim().parse().ok()
}

/// `PF_KTHREAD` of include/linux/sched.h.
const PF_KTHREAD: u64 = 0x0020_0000;

fn check_process(pid: u32, proc: &Path) -> Result<(), ConfigError> {
    let directory = proc.join(pid.to_string());
    let status = text::read(directory.join("status"));
    let status = status.map_err(|_cause| ConfigError::NoSuchProcess(pid))?;
    let leader = status
        .lines()
        .find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok())
        .unwrap_or(pid);
    if leader != pid {
        return Err(ConfigError::IsThread { tid: pid, pid: leader });
    }
    let stat = text::read(directory.join("stat")).unwrap_or_default();
    if has_ended(&stat) {
        return Err(ConfigError::IsZombie(pid));
    }
    // proc_pid_stat(5): flags are field 9; the name before may hold anything.
    let mut fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ');
    let flags: u64 = fields.nth(6).and_then(|flags| flags.parse().ok()).unwrap_or(0);
    if flags & PF_KTHREAD != 0 {
        return Err(ConfigError::IsKernelThread(pid));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(status: &str, stat: &str) -> Result<(), ConfigError> {
        let proc = tempfile::tempdir().unwrap();
        std::fs::create_dir(proc.path().join("7")).unwrap();
        std::fs::write(proc.path().join("7/status"), status).unwrap();
        std::fs::write(proc.path().join("7/stat"), stat).unwrap();
        check_process(7, proc.path())
    }

    #[test]
    fn tells_what_cannot_be_sampled() {
        assert_eq!(check("Tgid:\t7\n", "7 (a) b) S 1 7 7 0 -1 4194560 1"), Ok(()));
        assert_eq!(check("Tgid:\t5\n", ""), Err(ConfigError::IsThread { tid: 7, pid: 5 }));
        assert_eq!(check("Tgid:\t7\n", "7 (sh) Z 1 7 7 0 -1 4 1"), Err(ConfigError::IsZombie(7)));
        // The main thread has ended, three others run.
        let stat = "7 (sh) Z 1 7 7 0 -1 4 1 1 1 1 1 1 1 1 20 0 4 0 99";
        assert_eq!(check("Tgid:\t7\n", stat), Ok(()));
        assert_eq!(
            check("Tgid:\t7\n", "7 (kworker/0) S 2 0 0 0 -1 69238880 1"),
            Err(ConfigError::IsKernelThread(7))
        );
        assert_eq!(check_process(8, Path::new("/nonexistent")), Err(ConfigError::NoSuchProcess(8)));
    }

    #[test]
    fn rates_and_durations_have_limits() {
        let mut config = Config::new(Scope::All);
        config.frequency = 0;
        assert_eq!(config.check(), Err(ConfigError::RateZero));
        config.frequency = 1_000_000;
        assert!(matches!(config.check(), Err(ConfigError::RateTooHigh { asked: 1_000_000, .. })));
        config.frequency = 99;
        let clock = Event::cpu_clock();
        config.events = vec![clock.clone(), clock.clone()];
        assert_eq!(config.check(), Err(ConfigError::EventTwice("cpu-clock".to_owned())));
        config.events = Vec::new();
        assert_eq!(config.check(), Err(ConfigError::Events(0)));
        config.events = vec![Event::by_name("no such event")];
        assert_eq!(config.check(), Err(ConfigError::NotSampled("no such event".to_owned())));
        config.events = vec![Event::by_name("sched:x")];
        config.source = Source::Bpf;
        assert_eq!(config.check(), Err(ConfigError::NeedsPerf));
        config.source = Source::Auto;
        assert_eq!(config.check(), Ok(()));
        config.count = Some(0);
        assert_eq!(config.check(), Err(ConfigError::CountZero));
        config.events = vec![clock.clone()];
        config.count = Some(9_999);
        assert_eq!(config.check(), Err(ConfigError::ClockTooFast));
        config.events = vec![Event::by_name("sched:x")];
        config.count = None;
        config.filter = Some(c"prev_pid == 1".to_owned());
        assert_eq!(config.check(), Ok(()));
        config.events = vec![clock.clone()];
        assert_eq!(config.check(), Err(ConfigError::NothingToFilter));
        config.filter = None;
        config.events = vec![clock];
        config.duration = Some(Duration::ZERO);
        assert_eq!(config.check(), Err(ConfigError::NoDuration));
        // As one of version 1 is, or a directory of any kind with such a file.
        let like_one =
            std::env::temp_dir().join(format!("stackwire-cgroup-{}", std::process::id()));
        std::fs::create_dir(&like_one).unwrap();
        std::fs::write(like_one.join("cgroup.procs"), "").unwrap();
        let config = Config::new(Scope::Cgroup(like_one.clone()));
        assert_eq!(config.check(), Err(ConfigError::NotACgroup(like_one.clone())));
        std::fs::remove_dir_all(&like_one).unwrap();
        let config = Config::new(Scope::Cgroup("/proc/self".into()));
        assert_eq!(config.check(), Err(ConfigError::NotACgroup("/proc/self".into())));
    }
}
