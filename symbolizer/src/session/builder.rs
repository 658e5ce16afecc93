//! How a session is set up: what to sample, how, and the command line of the collector that says
//! so.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use stackwire_cache::Cache;
use stackwire_model::{AddUp, Choice, Event, OffCpu, Share, Source, StackCopies, Unwind};

use super::SessionError;
use super::exporter::{Exporting, MetricsExporter};

/// What is sampled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    All,
    Pids(Vec<u32>),
    Cgroup(PathBuf),
}

/// How a session is set up; see [`Session::builder`](super::Session::builder).
#[derive(Clone, Debug)]
pub struct Builder {
    pub(super) scope: Scope,
    pub(super) choice: Choice,
    pub(super) follow: bool,
    pub(super) on_exec: bool,
    pub(super) inject_python: bool,
    pub(super) profile: bool,
    pub(super) frequency: u32,
    pub(super) events: Vec<Event>,
    pub(super) count: Option<u64>,
    pub(super) filter: Option<String>,
    pub(super) off_cpu: Option<OffCpu>,
    pub(super) sched: AddUp,
    pub(super) kernel_stacks: bool,
    pub(super) stack_copies: StackCopies,
    pub(super) unwind: Unwind,
    pub(super) source: Source,
    pub(super) stack_bytes: Option<u32>,
    pub(super) duration: Option<Duration>,
    pub(super) collector: Option<PathBuf>,
    pub(super) capture: Option<PathBuf>,
    pub(super) share: Share,
    pub(super) cache: Option<Arc<Cache>>,
    pub(super) timeline: bool,
    pub(super) buildid_dir: Option<PathBuf>,
    pub(super) exporting: Option<Exporting>,
}

impl Builder {
    pub(super) fn new() -> Self {
        Self {
            scope: Scope::All,
            choice: Choice::default(),
            follow: false,
            on_exec: false,
            inject_python: false,
            profile: false,
            frequency: 99,
            events: vec![Event::cpu_clock()],
            count: None,
            filter: None,
            off_cpu: None,
            sched: AddUp::Nothing,
            kernel_stacks: true,
            stack_copies: StackCopies::default(),
            unwind: Unwind::default(),
            source: Source::default(),
            stack_bytes: None,
            duration: None,
            collector: None,
            capture: None,
            share: Share::default(),
            cache: None,
            timeline: false,
            buildid_dir: None,
            exporting: None,
        }
    }

    /// Samples one process with all its threads (repeatable) instead of all processes.
    #[must_use]
    pub fn pid(mut self, pid: u32) -> Self {
        match &mut self.scope {
            Scope::Pids(pids) => pids.push(pid),
            scope => *scope = Scope::Pids(vec![pid]),
        }
        self
    }

    /// Samples the tasks of a cgroup v2 directory.
    #[must_use]
    pub fn cgroup(mut self, path: impl Into<PathBuf>) -> Self {
        self.scope = Scope::Cgroup(path.into());
        self
    }

    /// Samples only processes that fit, of all or of those of the cgroup.
    #[must_use]
    pub fn choice(mut self, choice: Choice) -> Self {
        self.choice = choice;
        self
    }

    /// Takes children along.
    #[must_use]
    pub fn follow(mut self, follow: bool) -> Self {
        self.follow = follow;
        self
    }

    /// Begins when the processes become other programs: what they do before does not count.
    #[must_use]
    pub fn on_exec(mut self) -> Self {
        self.on_exec = true;
        self
    }

    /// Has CPython 3.12 and later write the names of its functions while it is sampled.
    #[must_use]
    pub fn inject_python(mut self, inject: bool) -> Self {
        self.inject_python = inject;
        self
    }

    /// Samples CPU time.
    #[must_use]
    pub fn profile(mut self) -> Self {
        self.profile = true;
        self
    }

    /// Records where threads wait: blocked time, and time they wait for a CPU.
    #[must_use]
    pub fn off_cpu(mut self, which: OffCpu) -> Self {
        self.off_cpu = Some(which);
        self
    }

    /// Adds up how processes or threads are scheduled, and what hardware counters count meanwhile.
    #[must_use]
    pub fn counters(mut self, of: AddUp) -> Self {
        self.sched = of;
        self
    }

    /// Hands snapshots of what [`Builder::counters`] adds up to an exporter: each `interval`, a
    /// second or more, and once at the end.
    #[must_use]
    pub fn export(mut self, exporter: impl MetricsExporter + 'static, interval: Duration) -> Self {
        self.exporting = Some(Exporting::new(Box::new(exporter), interval));
        self
    }

    /// Samples a second and CPU; 99 unless told.
    #[must_use]
    pub fn sample_rate(mut self, frequency: u32) -> Self {
        self.frequency = frequency;
        self
    }

    /// What makes the kernel take samples, a series each: the CPU's clock alone unless told.
    #[must_use]
    pub fn events(mut self, events: Vec<Event>) -> Self {
        self.events = events;
        self
    }

    /// Takes a sample of each so many occurrences of an event, not so many a second.
    #[must_use]
    pub fn count(mut self, count: Option<u64>) -> Self {
        self.count = count;
        self
    }

    /// Samples only those occurrences of tracepoints whose fields fit, as `prev_pid == 1`.
    #[must_use]
    pub fn filter(mut self, filter: Option<String>) -> Self {
        self.filter = filter;
        self
    }

    /// Records kernel stacks; true unless told.
    #[must_use]
    pub fn kernel_stacks(mut self, record: bool) -> Self {
        self.kernel_stacks = record;
        self
    }

    /// How user stacks are walked.
    #[must_use]
    pub fn unwind(mut self, how: Unwind) -> Self {
        self.unwind = how;
        self
    }

    /// With what samples are taken: with eBPF, or through perf events where that is refused, unless
    /// told.
    #[must_use]
    pub fn source(mut self, source: Source) -> Self {
        self.source = source;
        self
    }

    /// How much of user stacks perf events copy. None: little, and more where stacks are deeper.
    #[must_use]
    pub fn stack_bytes(mut self, bytes: Option<u32>) -> Self {
        self.stack_bytes = bytes;
        self
    }

    /// Whether stacks that cannot be walked yet are copied, to be walked a moment later.
    #[must_use]
    pub fn stack_copies(mut self, whether: StackCopies) -> Self {
        self.stack_copies = whether;
        self
    }

    /// Ends by itself after this long.
    #[must_use]
    pub fn duration(mut self, duration: Duration) -> Self {
        self.duration = Some(duration);
        self
    }

    /// The collector to start, instead of the one beside this program or in `PATH`.
    #[must_use]
    pub fn collector(mut self, path: impl Into<PathBuf>) -> Self {
        self.collector = Some(path.into());
        self
    }

    /// Which executables the collector hands over: those that are missing here unless told.
    #[must_use]
    pub fn share_executables(mut self, which: Share) -> Self {
        self.share = which;
        self
    }

    /// What is in this cache is not asked for.
    #[must_use]
    pub fn cache(mut self, cache: Option<Arc<Cache>>) -> Self {
        self.cache = cache;
        self
    }

    /// Keeps each sample with its time and CPU, as perf.data needs it.
    #[must_use]
    pub fn timeline(mut self, keep: bool) -> Self {
        self.timeline = keep;
        self
    }

    /// Lays out the files names are from as perf's build-id cache.
    #[must_use]
    pub fn buildid_dir(mut self, directory: Option<PathBuf>) -> Self {
        self.buildid_dir = directory;
        self
    }

    /// Keeps the raw stream in this file.
    #[must_use]
    pub fn capture(mut self, path: impl Into<PathBuf>) -> Self {
        self.capture = Some(path.into());
        self
    }

    /// Starts the collector, which is to send to this socket.
    pub(super) fn collect(&self, collector: &Path, socket: &Path) -> Result<Child, SessionError> {
        let mut command = Command::new(collector);
        match &self.scope {
            // Each of the three that choose says it.
            Scope::All if !self.choice.is_everything() => {}
            Scope::All => {
                command.arg("--all");
            }
            Scope::Pids(pids) => {
                command.args(pids.iter().map(|pid| format!("--pid={pid}")));
            }
            Scope::Cgroup(path) => {
                command.arg("--cgroup").arg(path);
            }
        }
        let Choice { comms, containers, pods } = &self.choice;
        command.args(comms.iter().map(|name| format!("--comm={name}")));
        command.args(containers.iter().map(|id| format!("--container={id}")));
        command.args(pods.iter().map(|uid| format!("--pod={uid}")));
        if self.follow {
            command.arg("--follow");
        }
        if self.on_exec {
            command.arg("--on-exec");
        }
        if self.inject_python {
            command.arg("--inject-python");
        }
        if let Some(duration) = self.duration {
            command.arg(format!("--duration={}ns", duration.as_nanos()));
        }
        if let Some(off_cpu) = &self.off_cpu {
            let states: Vec<&str> = off_cpu.states.iter().map(|state| state.name()).collect();
            command
                .arg("--offcpu")
                .arg(format!("--offcpu-states={}", states.join(",")))
                .arg(format!("--offcpu-threshold={}ns", off_cpu.threshold.as_nanos()));
            if off_cpu.wakers {
                command.arg("--offcpu-wakers");
            }
        }
        match self.sched {
            AddUp::Nothing => {}
            AddUp::Processes => drop(command.arg("--pmu")),
            AddUp::Threads => drop(command.args(["--pmu", "--per-thread"])),
        }
        if self.profile {
            command.arg("--profile");
        }
        command.arg(format!("--stack-copies={}", self.stack_copies.name()));
        if let Some(bytes) = self.stack_bytes {
            command.arg(format!("--stack-bytes={bytes}"));
        }
        match self.count {
            Some(count) => drop(command.arg(format!("--count={count}"))),
            None => drop(command.arg(format!("--sample-rate={}", self.frequency))),
        }
        if let Some(filter) = &self.filter {
            command.arg(format!("--filter={filter}"));
        }
        let events: Vec<&str> = self.events.iter().map(|event| event.name.as_str()).collect();
        command
            .arg(format!("--event={}", events.join(",")))
            .arg(format!("--kernel-stacks={}", self.kernel_stacks))
            .arg(format!("--unwind={}", self.unwind.name()))
            .arg(format!("--source={}", self.source.name()))
            // Often, so that files are opened while their processes live.
            .arg("--epoch=1s")
            .arg(format!("--share-executables={}", self.share.name()))
            .arg("--until-stdin-closes")
            // Less than the session waits for the end of the stream.
            .arg("--drain-timeout=50s")
            .arg(format!("--to=unix:{}", socket.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command.spawn().map_err(|error| SessionError::Execute {
            path: collector.to_owned(),
            hint: match error.kind() {
                std::io::ErrorKind::PermissionDenied => {
                    "; who may execute the collector may profile: ask to be put into the group it belongs to"
                }
                _ => "",
            },
            error,
        })
    }
}
