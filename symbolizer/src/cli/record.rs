//! Options of `record`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args as ClapArgs;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use stackwire::{ContainerId, Event, PodUid, Share, Source, StackCopies, Unwind, WaitState};

use super::outputs::{Outputs, PmuAs};
use super::symbols::{MetricsOption, SymbolOptions};
use super::values::time;

#[derive(Debug, ClapArgs)]
pub struct Record {
    /// Sample CPU time, which is what is sampled unless told otherwise.
    #[arg(long)]
    pub profile: bool,
    /// Record where threads wait: blocked time as the event off-cpu, and time they wait for a CPU
    /// as run-queue. With --profile, sample CPU time as well.
    #[arg(long)]
    pub offcpu: bool,
    #[command(flatten)]
    pub waits: Waits,
    /// Add up how threads are scheduled: how long they run in one go and wait for a CPU, why they
    /// leave it, and what hardware counters count. With --profile, sample CPU time as well.
    #[arg(long)]
    pub pmu: bool,
    /// Add it up for each thread, not for each process.
    #[arg(long, requires = "pmu")]
    pub per_thread: bool,
    /// Where it goes, "-" for standard output; without it or with "auto",
    /// COMM-YYYYMMDDHHMM-pmu.txt, or .json.
    #[arg(long, value_name = "FILE", requires = "pmu")]
    pub pmu_output: Option<PathBuf>,
    #[command(flatten)]
    pub pmu_as: PmuAs,
    /// Sample this process with all its threads (repeatable, or as "12,34").
    #[arg(long, short, value_name = "PID", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Vec<u32>,
    /// Sample every process.
    #[arg(long, short)]
    pub all: bool,
    /// Sample the tasks of this directory of the cgroup v2 hierarchy, and of those below it.
    #[arg(long, value_name = "DIRECTORY")]
    pub cgroup: Option<PathBuf>,
    /// Sample processes with this name, as `ps -o comm` shows it (repeatable), those that start
    /// later among them.
    #[arg(long, value_name = "NAME")]
    pub comm: Vec<String>,
    /// Sample processes of the container whose id begins so (repeatable), those that start later
    /// among them.
    #[arg(long, value_name = "ID", value_parser = str::parse::<ContainerId>)]
    pub container: Vec<ContainerId>,
    /// Sample processes of this pod (repeatable), those that start later among them. Of --comm,
    /// --container and --pod all that are given have to fit.
    #[arg(long, value_name = "UID", value_parser = str::parse::<PodUid>)]
    pub pod: Vec<PodUid>,
    /// Sample children of the processes as well, those that run already and those to come. A
    /// command is always followed.
    #[arg(long)]
    pub follow: bool,
    /// Have CPython 3.12 and later write the names of its functions: its perf trampoline is on
    /// while it is sampled, and off again at the end. A command has it on from its start.
    /// Processes chosen by --pid have to do it; of others the report says what became of it.
    #[arg(long)]
    pub inject_python: bool,
    /// How long, as "30s", "5m" or 30; 10s unless told. Ctrl-C ends it early and still writes
    /// everything. A command is sampled until it ends.
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub duration: Option<Duration>,
    /// Samples of each event a second on each CPU.
    #[arg(long, short = 'F', value_name = "HZ", default_value_t = 99)]
    pub sample_rate: u32,
    /// Take a sample of each so many occurrences of an event instead.
    #[arg(long, short, value_name = "N", conflicts_with = "sample_rate", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// What makes the kernel take samples (repeatable, or as "cpu-clock,page-faults"): each event
    /// is a series of its own. `stackwire events` lists those of this host: of software, of the
    /// hardware, of its caches, tracepoints as sched:sched_switch; r01c2 is a raw one. cpu-clock
    /// unless told.
    #[arg(long, short, value_name = "EVENT", value_delimiter = ',', value_parser = str::parse::<Event>)]
    pub event: Vec<Event>,
    /// Of tracepoints, sample only occurrences whose fields fit: "prev_pid == 1".
    #[arg(long, value_name = "FILTER")]
    pub filter: Option<String>,
    /// With what samples are taken: with eBPF, which takes CAP_BPF and CAP_PERFMON (bpf); through
    /// perf events alone, which need no capability for your own processes (perf); with eBPF, and
    /// where it is refused through perf events (auto).
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = PossibleValuesParser::new(Source::ALL.map(Source::name)).try_map(|name| name.parse::<Source>()))]
    pub source: Source,
    /// Bytes of user stacks that perf events copy, 1024 to 64512. Unless told, 8192, and more where
    /// stacks are deeper; 32768 to begin with where kernel.perf_event_paranoid is above 2.
    #[arg(long, value_name = "BYTES")]
    pub stack_bytes: Option<u32>,
    /// Copy the part of a user stack that cannot be walked yet, because its process or the unwind
    /// table of its code is not known yet, and walk it a moment later, on this host (auto); or end
    /// such stacks there (off).
    #[arg(long, value_name = "WHETHER", default_value = "auto", value_parser = PossibleValuesParser::new(StackCopies::ALL.map(StackCopies::name)).try_map(|name| name.parse::<StackCopies>()))]
    pub stack_copies: StackCopies,
    /// How user stacks are walked: by the tables of their executables, and by frame pointers
    /// through code made at run time (auto); by tables alone (dwarf); by frame pointers alone (fp).
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = PossibleValuesParser::new(Unwind::ALL.map(Unwind::name)).try_map(|name| name.parse::<Unwind>()))]
    pub unwind: Unwind,
    /// Record kernel stacks. Those of waits always are.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub kernel_stacks: bool,
    /// Where the pprof goes; without it, COMM-YYYYMMDDHHMM-on-cpu.pb.gz.
    #[arg(long, value_name = "FILE")]
    pub profile_output: Option<PathBuf>,
    /// Where the raw stream goes, for `report` and to resolve it again later; without it, beside
    /// the pprof with the ending .stackwire; what is there stays, and it has a number.
    #[arg(long, value_name = "FILE")]
    pub capture: Option<PathBuf>,
    /// Keep no raw stream.
    #[arg(long, conflicts_with = "capture")]
    pub no_capture: bool,
    #[command(flatten)]
    pub outputs: Outputs,
    #[command(flatten)]
    pub symbols: SymbolOptions,
    #[command(flatten)]
    pub metrics: MetricsOption,
    /// Which executables the collector hands over for the names in them: none, those that cannot be
    /// found from here, or all that have samples.
    #[arg(long, value_name = "WHICH", default_value = "missing", value_parser = PossibleValuesParser::new(Share::ALL.map(Share::name)).try_map(|name| name.parse::<Share>()))]
    pub share_executables: Share,
    /// The collector to start, instead of the one beside this program or in PATH.
    #[arg(long, value_name = "FILE")]
    pub collector: Option<PathBuf>,
    /// A command to run and sample, with its children, until it ends.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}

/// Which waits of threads are recorded.
#[derive(Clone, Debug, ClapArgs)]
pub struct Waits {
    /// Which waits are recorded: for events that signals interrupt (sleep), for disks and locks of
    /// the kernel (disk), stopped by a signal or a debugger (stopped), or able to run and without a
    /// CPU since another thread was given it (preempted).
    #[arg(long, value_name = "STATE,…", value_delimiter = ',', default_value = "sleep,disk", requires = "offcpu", value_parser = PossibleValuesParser::new(WaitState::ALL.map(WaitState::name)).try_map(|name| name.parse::<WaitState>()))]
    pub offcpu_states: Vec<WaitState>,
    /// Record all waits of at least this length, as "1ms"; of shorter ones a share that leaves
    /// totals as they are. 0 records every wait.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "1ms", requires = "offcpu")]
    pub offcpu_threshold: Duration,
    /// Record who ended each wait, and from which stack: labels waker, waker_pid, waker_tid and
    /// waker_stack.
    #[arg(long, requires = "offcpu")]
    pub offcpu_wakers: bool,
    /// Where the pprof of waits goes; without it, COMM-YYYYMMDDHHMM-off-cpu.pb.gz.
    #[arg(long, value_name = "FILE", requires = "offcpu")]
    pub offcpu_output: Option<PathBuf>,
}
