//! The command line: arguments in, one validated [`Config`] and where it goes out.

use std::ffi::CString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Parser};
use stackwire_collector::{
    AddUp, Address, Choice, Config, Counting, Credentials, Destination, Event, Limits, OffCpu,
    Scope, Share, Source, StackCopies, Target, Unwind, VERSION, WaitState,
};
use stackwire_model::{ContainerId, Groups, PodUid};

/// Sample stacks with eBPF and stream them unsymbolized.
///
/// The privileged half of Stackwire. Takes on-CPU samples of one process, a cgroup or the whole
/// host and sends them to a symbolizer, or writes a capture that `stackwire resolve` reads on any
/// host. Nothing it sends of what it samples holds a name or a kernel address.
///
/// Needs CAP_BPF and CAP_PERFMON to start, and CAP_SYSLOG to locate kernel functions; drops all but
/// CAP_PERFMON before it takes the first sample off the kernel.
#[derive(Debug, Parser)]
#[command(name = "stackwire-collector", version = VERSION, max_term_width = 100)]
#[command(group(ArgGroup::new("scope").required(true).multiple(true).args(["pid", "all", "cgroup", "comm", "container", "pod", "list_events"])))]
#[command(group(ArgGroup::new("destination").required(true).args(["to", "output", "list_events", "stat"])))]
#[command(after_help = "Exit codes: 0 done, 1 the capture failed, 2 the command line is wrong.")]
pub struct Args {
    /// Sample this process with all its threads (repeatable, or as "12,34").
    #[arg(long, short, value_name = "PID", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..), conflicts_with_all = ["all", "cgroup", "comm", "container", "pod"])]
    pid: Vec<u32>,
    /// Sample every process.
    #[arg(long, short, conflicts_with_all = ["cgroup", "comm", "container", "pod"])]
    all: bool,
    /// Sample the tasks of this directory of the cgroup v2 hierarchy, and of those below it.
    #[arg(long, value_name = "DIRECTORY")]
    cgroup: Option<PathBuf>,
    /// Sample processes with this name, as `ps -o comm` shows it (repeatable), those that start
    /// later among them.
    #[arg(long, value_name = "NAME")]
    comm: Vec<String>,
    /// Sample processes of the container whose id begins so (repeatable), those that start later
    /// among them.
    #[arg(long, value_name = "ID", value_parser = str::parse::<ContainerId>)]
    container: Vec<ContainerId>,
    /// Sample processes of this pod (repeatable), those that start later among them. Of --comm,
    /// --container and --pod all that are given have to fit.
    #[arg(long, value_name = "UID", value_parser = str::parse::<PodUid>)]
    pod: Vec<PodUid>,
    /// Sample children of the processes as well, those that run already and those to come.
    #[arg(long, requires = "pid")]
    follow: bool,
    /// Have CPython 3.12 and later write the names of its functions: its perf trampoline is on
    /// while it is sampled, and off again at the end. Processes chosen by --pid have to do it; of
    /// others the report says what became of it.
    #[arg(long)]
    inject_python: bool,
    /// What makes the kernel take samples (repeatable, or as "cpu-clock,page-faults"): each event
    /// is a series of its own.
    #[arg(long, short, value_name = "EVENT", value_delimiter = ',', default_value = "cpu-clock", value_parser = str::parse::<Event>)]
    event: Vec<Event>,
    /// Record where threads wait: blocked time as the series off-cpu, and time they wait for a CPU
    /// as the series run-queue. Alone it takes no samples of events.
    #[arg(long)]
    offcpu: bool,
    /// Add up how threads are scheduled: how long they run in one go and wait for a CPU, why they
    /// leave it, and what hardware counters count. Alone it takes no samples of events.
    #[arg(long)]
    pmu: bool,
    /// Add it up for each thread, not for each process.
    #[arg(long, requires = "pmu")]
    per_thread: bool,
    /// Take samples of events beside what --offcpu and --pmu record.
    #[arg(long)]
    profile: bool,
    /// Which waits are recorded: for events that signals interrupt (sleep), for disks and locks of
    /// the kernel (disk), stopped by a signal or debugger (stopped), or able to run and without a
    /// CPU since another thread was given it (preempted).
    #[arg(long, value_name = "STATE,…", value_delimiter = ',', default_value = "sleep,disk", requires = "offcpu", value_parser = PossibleValuesParser::new(WaitState::ALL.map(WaitState::name)).try_map(|name| name.parse::<WaitState>()))]
    offcpu_states: Vec<WaitState>,
    /// Record all waits of at least this length, as "1ms"; of shorter ones a share that leaves
    /// totals as they are. 0 records every wait.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "1ms", requires = "offcpu")]
    offcpu_threshold: Duration,
    /// Record who ended each wait, and from which stack: labels waker, waker_pid, waker_tid and
    /// waker_stack.
    #[arg(long, requires = "offcpu")]
    offcpu_wakers: bool,
    /// Samples of each event a second on each CPU.
    #[arg(long, short = 'F', value_name = "HZ", default_value_t = 99)]
    sample_rate: u32,
    /// Take a sample of each so many occurrences of an event instead.
    #[arg(long, short, value_name = "N", conflicts_with = "sample_rate")]
    count: Option<u64>,
    /// Of tracepoints, sample only occurrences whose fields fit: "prev_pid == 1".
    #[arg(long, value_name = "FILTER")]
    filter: Option<String>,
    /// Count these events, in groups as "{cycles,instructions},page-faults", until standard input
    /// closes or a signal comes; then print a line for each: event, thread or "-", "u" if it is of
    /// user mode alone or "-", count, nanoseconds it was to be counted and was; or "-" where this
    /// machine counts no such event. `stackwire stat` uses it.
    #[arg(long, value_name = "EVENTS", value_parser = str::parse::<Groups>, requires = "pid", conflicts_with_all = ["to", "output"])]
    stat: Option<Groups>,
    /// Count each thread by itself.
    #[arg(long, requires = "stat")]
    stat_threads: bool,
    /// Begin when the processes become other programs: what they do before does not count.
    #[arg(long, requires = "pid")]
    on_exec: bool,
    /// List the events there are on this host, one a line: group, tab, name. `stackwire events`
    /// shows them.
    #[arg(long, exclusive = true)]
    list_events: bool,
    /// Record kernel stacks. Those of waits always are.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    kernel_stacks: bool,
    /// End the capture after this long, as "30s", "5m" or 30. Without it, Ctrl-C ends it.
    #[arg(long, value_name = "TIME", value_parser = time)]
    duration: Option<Duration>,
    /// Send to a symbolizer: unix:/path/to/socket or https://host:port (repeatable). Of several, to
    /// the first that answers, and to the next when it does not any more. http://host:port is clear
    /// text.
    #[arg(long, value_name = "ADDRESS")]
    to: Vec<Address>,
    /// CA that signs the certificates of symbolizers (PEM); those the system trusts, unless told.
    /// Files are read again for each connection.
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// The collector's own certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// File with the collector's token, for symbolizers that know collectors by one.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Send to other hosts in clear text.
    #[arg(long)]
    insecure: bool,
    /// How long to go on delivering after the end of the capture.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "20s")]
    drain_timeout: Duration,
    /// Write a capture file.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Length of an epoch: what a crash can cost, and how often a symbolizer hears.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "10s")]
    epoch: Duration,
    /// Memory for epochs nobody has taken yet, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 16)]
    buffer: usize,
    /// Directory for a file that holds what the memory does not.
    #[arg(long, value_name = "DIRECTORY")]
    spool: Option<PathBuf>,
    /// Largest size of that file, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 256, requires = "spool")]
    spool_max: u64,
    /// Which executables are sent for the names in them: none, those the symbolizer cannot find, or
    /// all that have samples (into a capture file, too).
    #[arg(long, value_name = "WHICH", default_value = "missing", value_parser = PossibleValuesParser::new(Share::ALL.map(Share::name)).try_map(|name| name.parse::<Share>()))]
    share_executables: Share,
    /// With what samples are taken: with eBPF, which takes CAP_BPF and CAP_PERFMON (bpf); through
    /// perf events alone, which need no capability for processes of the same user (perf); with
    /// eBPF, and where it is refused through perf events (auto).
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = PossibleValuesParser::new(Source::ALL.map(Source::name)).try_map(|name| name.parse::<Source>()))]
    source: Source,
    /// Bytes of user stacks that perf events copy, 1024 to 64512. Unless told, 8192, and more where
    /// stacks are deeper; 32768 to begin with where kernel.perf_event_paranoid is above 2.
    #[arg(long, value_name = "BYTES")]
    stack_bytes: Option<u32>,
    /// Copy the part of a user stack that cannot be walked yet, because its process or the unwind
    /// table of its code is not known yet, and walk it a moment later, on this host (auto); or end
    /// such stacks there (off).
    #[arg(long, value_name = "WHETHER", default_value = "auto", value_parser = PossibleValuesParser::new(StackCopies::ALL.map(StackCopies::name)).try_map(|name| name.parse::<StackCopies>()))]
    stack_copies: StackCopies,
    /// How user stacks are walked: by the tables of their executables, and by frame pointers
    /// through code made at run time (auto); by tables alone (dwarf); by frame pointers alone (fp).
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = PossibleValuesParser::new(Unwind::ALL.map(Unwind::name)).try_map(|name| name.parse::<Unwind>()))]
    unwind: Unwind,
    /// Directory for unwind tables, kept from run to run; $XDG_CACHE_HOME/stackwire/unwind unless
    /// told.
    #[arg(long, value_name = "DIRECTORY")]
    unwind_cache_dir: Option<PathBuf>,
    /// End when standard input closes, and do not reconnect. `stackwire record` uses it.
    #[arg(long)]
    until_stdin_closes: bool,
    /// Tell what is held and what was taken.
    #[arg(long, short)]
    verbose: bool,
}

/// What `main` needs.
#[derive(Debug)]
pub struct Run {
    /// The capture.
    pub config: Config,
    /// Where it goes.
    pub destination: Destination,
    /// Standard input ends it.
    pub until_stdin_closes: bool,
    /// Talk.
    pub verbose: bool,
}

impl Args {
    /// What is to be counted, if nothing else is to be done.
    pub fn counting(&self) -> Option<Counting> {
        let Groups(groups) = self.stat.clone()?;
        let (pids, per_thread) = (self.pid.clone(), self.stat_threads);
        Some(Counting { groups, pids, per_thread, on_exec: self.on_exec })
    }

    /// Whether events are to be listed, and nothing else is to be done.
    pub fn lists_events(&self) -> bool {
        self.list_events
    }

    /// What was typed and must not be done, with what to type instead.
    pub fn mistake(&self) -> Option<String> {
        let mut addresses = self.to.iter();
        if let Some(clear) = addresses.find(|address| address.is_clear_text() && !self.insecure) {
            return Some(format!(
                "{clear} would be sent to in clear text: write https://, or add --insecure if the network may be trusted"
            ));
        }
        let mut addresses = self.to.iter().filter(|_| self.token_file.is_some());
        let clear = addresses.find(|address| !address.is_tls())?;
        Some(format!("a token is sent over TLS alone: write https:// instead of {clear}"))
    }

    /// Turns what was typed into what is run.
    pub fn into_run(self) -> Run {
        let scope = match self.cgroup {
            Some(path) => Scope::Cgroup(path),
            None if self.pid.is_empty() => Scope::All,
            None => Scope::Processes { pids: self.pid, follow: self.follow, on_exec: self.on_exec },
        };
        let mut config = Config::new(scope);
        config.choice = Choice { comms: self.comm, containers: self.container, pods: self.pod };
        let others = self.offcpu || self.pmu;
        config.events = if others && !self.profile { Vec::new() } else { self.event };
        config.sched = match (self.pmu, self.per_thread) {
            (false, _) => AddUp::Nothing,
            (true, false) => AddUp::Processes,
            (true, true) => AddUp::Threads,
        };
        let off_cpu = OffCpu {
            states: self.offcpu_states,
            threshold: self.offcpu_threshold,
            wakers: self.offcpu_wakers,
        };
        config.off_cpu = self.offcpu.then_some(off_cpu);
        config.frequency = self.sample_rate;
        config.count = self.count;
        // No argument has a zero byte in it.
        config.filter = self.filter.and_then(|filter| CString::new(filter).ok());
        config.kernel_stacks = self.kernel_stacks;
        config.source = self.source;
        config.stack_bytes = self.stack_bytes;
        config.stack_copies = self.stack_copies;
        config.unwind = self.unwind;
        config.unwind_cache = self.unwind_cache_dir.or_else(unwind_cache);
        config.duration = self.duration;
        config.epoch = self.epoch;
        config.limits = Limits {
            memory: self.buffer << 20,
            spool: self.spool.map(|directory| (directory, self.spool_max << 20)),
            ..Limits::default()
        };
        config.share = self.share_executables;
        config.inject_python = self.inject_python;
        let destination = match self.output {
            Some(path) => Destination::File(path),
            None => Destination::Symbolizer(Target {
                addresses: self.to,
                credentials: Credentials {
                    ca: self.tls_ca,
                    identity: self.tls_cert.zip(self.tls_key),
                    token: self.token_file,
                },
                drain: self.drain_timeout,
                once: self.until_stdin_closes,
            }),
        };
        Run {
            config,
            destination,
            until_stdin_closes: self.until_stdin_closes,
            verbose: self.verbose,
        }
    }
}

/// A stretch of time: a number alone is one of seconds, as perf's and `timeout`'s.
fn time(text: &str) -> Result<Duration, humantime::DurationError> {
    text.parse().map(Duration::from_secs).or_else(|_unit| humantime::parse_duration(text))
}

/// The user's cache directory, where there is one; a service's.
fn unwind_cache() -> Option<PathBuf> {
    let of =
        |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = of("XDG_CACHE_HOME")
        .or_else(|| of("CACHE_DIRECTORY"))
        .or_else(|| Some(of("HOME")?.join(".cache")))?;
    cache.is_absolute().then(|| cache.join("stackwire/unwind"))
}
