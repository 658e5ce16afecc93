//! The command line, as typed. `command/` turns it into what is run.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use stackwire::{
    ContainerId, Event, FetchFormat, Groups, Listen, PodUid, Share, Source, Unwind, VERSION,
    WaitState,
};

/// Profile Linux processes: stacks from a small privileged collector, names found here.
#[derive(Debug, Parser)]
#[command(name = "stackwire", version = VERSION, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 done, 1 the run failed, 2 the command line is wrong; of `record -- COMMAND` that of\n\
                        the command, 128 and more if a signal ended it.\n\
                        `stackwire doctor` tells what works on this host and what to do about the rest."
)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Sample a process, a command or the whole host, and write profiles.
    Record(Record),
    /// Receive captures from many collectors and write a profile for each window.
    Serve(Serve),
    /// List the captures of a server: hosts, rates, how whole stacks are, what was lost.
    Ps(Ps),
    /// Get a profile of what a server keeps: of some time, hosts, processes.
    Fetch(Fetch),
    /// Turn saved captures into profiles.
    Resolve(Resolve),
    /// Print what a capture shows: hot functions, how well they are named, what was lost.
    Report(Report),
    /// Tell what addresses of an executable are: functions with inlined callees, files, lines.
    Symbolize(Symbolize),
    /// Look into the symbol cache and change it.
    Cache(CacheCommand),
    /// Check this host: kernel, permissions, collector.
    Doctor(Doctor),
    /// List the events of this host that can be sampled.
    Events(Events),
    /// Count events of a command or of processes, as `perf stat` does.
    Stat(Stat),
    /// Wait for a word on a socket, then become a command. `record -- command` uses it.
    #[command(hide = true)]
    Launch(Launch),
    /// Put outputs in their places for a process that may not. Commands of root use it.
    #[command(hide = true)]
    Place,
}

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

/// How --pmu is written.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub struct PmuAs {
    /// Write the processes of the host one by one, not all of them added up.
    #[arg(long)]
    pub per_pid: bool,
    /// As text for people, or as JSON for programs.
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub pmu_format: PmuFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PmuFormat {
    Text,
    Json,
}

/// How flame graphs are drawn.
#[derive(Clone, Copy, Debug, Default, ClapArgs)]
pub struct Flames {
    /// Draw the root on top.
    #[arg(long, requires = "flamegraph")]
    pub icicle: bool,
    /// Draw inlined functions as part of what they are inlined into.
    #[arg(long, requires = "flamegraph")]
    pub no_inlines: bool,
}

/// Outputs every profile can have.
#[derive(Clone, Debug, Default, ClapArgs)]
pub struct Outputs {
    /// Draw a flame graph (SVG).
    #[arg(long, value_name = "FILE")]
    pub flamegraph: Option<PathBuf>,
    #[command(flatten)]
    pub flames: Flames,
    /// Write folded stacks.
    #[arg(long, value_name = "FILE")]
    pub folded: Option<PathBuf>,
    /// Write perf.data, for perf, hotspot, samply and autofdo.
    #[arg(long, value_name = "FILE")]
    pub perf_data_output: Option<PathBuf>,
    /// Lay out the files names are from as perf's build-id cache, for `perf --buildid-dir DIR
    /// report` elsewhere.
    #[arg(long, value_name = "DIR")]
    pub perf_buildid_dir: Option<PathBuf>,
    /// Write the pprof without names: build-ids and addresses, to be completed elsewhere.
    #[arg(long)]
    pub pprof_unsymbolized: bool,
    /// Put a comment into the pprof (repeatable).
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = tag)]
    pub tags: Vec<String>,
}

/// A stretch of time: a number alone is one of seconds, as perf's and `timeout`'s.
fn time(text: &str) -> Result<Duration, humantime::DurationError> {
    text.parse().map(Duration::from_secs).or_else(|_unit| humantime::parse_duration(text))
}

fn tag(text: &str) -> anyhow::Result<String> {
    match text.split_once('=') {
        Some((key, _)) if !key.is_empty() => Ok(text.to_owned()),
        _ => bail!("a tag is KEY=VALUE"),
    }
}

/// Where names are looked for.
#[derive(Clone, Debug, ClapArgs)]
pub struct SymbolOptions {
    /// Directory with separate debug files (repeatable).
    #[arg(long = "debug-dir", value_name = "DIR", default_value = stackwire::DEBUG_DIR)]
    pub debug_dirs: Vec<PathBuf>,
    /// Leave names as the compiler mangled them.
    #[arg(long)]
    pub no_demangle: bool,
    #[command(flatten)]
    pub cache: CacheOptions,
    /// debuginfod server to ask for what is not here (repeatable, asked in order); without it,
    /// those in DEBUGINFOD_URLS.
    #[arg(long = "debuginfod-url", value_name = "URL", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub debuginfod_urls: Vec<String>,
    /// How long servers are waited for, all together.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "30s")]
    pub symbol_fetch_timeout: Duration,
    /// Fail when a server was asked for symbols and did not give them.
    #[arg(long)]
    pub symbol_fail_closed: bool,
}

/// Counters for Prometheus.
#[derive(Clone, Debug, ClapArgs)]
pub struct MetricsOption {
    /// Serve counters for Prometheus on http://HOST:PORT/metrics.
    #[arg(long, value_name = "HOST:PORT")]
    pub metrics_listen: Option<String>,
}

/// Which symbol cache.
#[derive(Clone, Debug, ClapArgs)]
pub struct CacheOptions {
    /// Where fetched files and compiled symbols are kept; without it, $XDG_CACHE_HOME/stackwire.
    #[arg(long, value_name = "DIR")]
    pub symbol_cache_dir: Option<PathBuf>,
    /// Most bytes kept, as "2GiB" or "500MB"; the least recently used go first.
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "2GiB")]
    pub symbol_cache_max: u64,
}

fn bytes(text: &str) -> anyhow::Result<u64> {
    const FORM: &str = "a number of bytes is as 2GiB or 500MB";
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KB" | "kB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        _ => bail!(FORM),
    };
    let number: u64 = number.parse().map_err(|_number| anyhow!(FORM))?;
    number.checked_mul(factor).context("more bytes than there are")
}

#[derive(Debug, ClapArgs)]
pub struct CacheCommand {
    #[command(flatten)]
    pub cache: CacheOptions,
    #[command(subcommand)]
    pub action: CacheAction,
}

#[derive(Debug, Subcommand)]
pub enum CacheAction {
    /// Print how much is in it.
    Stats,
    /// List what is in it, least recently used first.
    Ls,
    /// Read everything and compare it with its checksum; remove what is damaged.
    Verify,
    /// Remove the least recently used until at most this much is left.
    Prune {
        /// As "500MB"; 0 removes everything.
        #[arg(value_name = "BYTES", value_parser = bytes)]
        to: u64,
    },
    /// Add an executable or a debug file, under its build-id.
    Add {
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Remove everything that has this build-id.
    Rm {
        #[arg(required = true, value_name = "BUILD-ID")]
        ids: Vec<String>,
    },
}

#[derive(Debug, ClapArgs)]
pub struct Symbolize {
    /// One JSON object an address instead of text.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub symbols: SymbolOptions,
    /// An executable, library or debug file; or a build-id in hex.
    #[arg(value_name = "FILE|BUILD-ID")]
    pub object: String,
    /// Addresses in hex, as in the file; without any, they are read from standard input.
    #[arg(value_name = "ADDR")]
    pub addresses: Vec<String>,
}

#[derive(Debug, ClapArgs)]
pub struct Serve {
    /// Address to listen on: host:port or unix:/path (repeatable).
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:4400")]
    pub listen: Vec<Listen>,
    /// Certificate for TLS on TCP addresses, with those between it and its CA (PEM). Read again
    /// when it changes, as the other files are.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// CA that signs the certificates of clients (PEM). A client is known by the first URI or DNS
    /// name in its certificate, or by the SHA-256 of its key.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_client_ca: Option<PathBuf>,
    /// Certificates of clients that are revoked: a CRL of that CA (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_client_ca")]
    pub tls_client_crl: Option<PathBuf>,
    /// Tokens of clients without a certificate: lines of a name and a token. A client sends
    /// `authorization: Bearer TOKEN`, over TLS alone.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub token_file: Option<PathBuf>,
    /// Let other hosts come in clear text, without any proof of who they are.
    #[arg(long, conflicts_with = "tls_cert")]
    pub insecure: bool,
    /// User who may use the unix socket, by number (repeatable). Without --allow-uid and
    /// --allow-gid: all who may open it.
    #[arg(long, value_name = "UID")]
    pub allow_uid: Vec<u32>,
    /// Group whose processes may use the unix socket, by number (repeatable).
    #[arg(long, value_name = "GID")]
    pub allow_gid: Vec<u32>,
    /// Client that sees with `ps` and `fetch` what others sent, as token:NAME, certificate:NAME,
    /// uid:NUMBER or loopback (repeatable). Others see what they sent themselves.
    #[arg(long, value_name = "CLIENT", value_parser = reader)]
    pub reader: Vec<String>,
    /// Where profiles go.
    #[arg(long, value_name = "DIRECTORY")]
    pub output_dir: PathBuf,
    /// Where the captures are kept; without it, `captures` in the output directory.
    #[arg(long, value_name = "DIRECTORY")]
    pub log_dir: Option<PathBuf>,
    /// Most MiB of captures kept; the oldest go first. Captures whose profiles are not written yet
    /// are never removed: when they are more, collectors have to wait.
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    pub log_max: u64,
    /// Remove captures this long after their profiles were written.
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub log_max_age: Option<Duration>,
    /// Most MiB of profiles kept; the oldest go first, pushed or not.
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    pub output_max: u64,
    /// Remove profiles this long after they were written.
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub output_max_age: Option<Duration>,
    /// How long profiles may take that are written when the server stops. The next start writes
    /// what is left.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "25s")]
    pub drain_timeout: Duration,
    /// Length of the window a profile covers, in whole epochs of its collector, one at least.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "5m")]
    pub window: Duration,
    /// Put a comment into every pprof (repeatable).
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = tag)]
    pub tags: Vec<String>,
    #[command(flatten)]
    pub limits: LimitOptions,
    /// What is logged on standard error.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    #[command(flatten)]
    pub push: PushOptions,
    /// Let executables that collectors hand over name the samples of everybody, before files of
    /// debuginfod. Without it, they name samples of the same client, where nothing else does.
    #[arg(long)]
    pub trust_executables: bool,
    #[command(flatten)]
    pub symbols: SymbolOptions,
    #[command(flatten)]
    pub metrics: MetricsOption,
}

/// How what happens is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line for people.
    Text,
    /// A JSON object a line.
    Json,
}

fn reader(text: &str) -> anyhow::Result<String> {
    let known = ["token:", "certificate:", "uid:"];
    let is_known = |kind: &&str| text.strip_prefix(*kind).is_some_and(|name| !name.is_empty());
    ensure!(
        known.iter().any(is_known) || matches!(text, "loopback" | "anyone"),
        "write token:NAME, certificate:NAME, uid:NUMBER, loopback or anyone"
    );
    Ok(text.to_owned())
}

/// Which server, and how it knows us.
#[derive(Clone, Debug, ClapArgs)]
pub struct FromOptions {
    /// The server: https://host:port, http://host:port on this host, or unix:/path.
    #[arg(long, value_name = "ADDRESS")]
    pub from: String,
    /// CA that signs the certificate of the server (PEM); without it, those of this host.
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Certificate that says who we are (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// File with the token that says who we are.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Send a token to other hosts in clear text.
    #[arg(long)]
    pub insecure: bool,
}

#[derive(Debug, ClapArgs)]
pub struct Ps {
    #[command(flatten)]
    pub from: FromOptions,
    /// Only captures that come in now.
    #[arg(long)]
    pub live: bool,
    /// For people, or as the server says it.
    #[arg(long, value_name = "HOW", default_value = "text")]
    pub format: PsFormat,
}

/// How captures are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PsFormat {
    /// A table.
    Text,
    /// What `/v1/captures` answers.
    Json,
}

#[derive(Debug, ClapArgs)]
pub struct Fetch {
    #[command(flatten)]
    pub from: FromOptions,
    /// From this long ago up to now, as "15m".
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with_all = ["since", "until"])]
    pub last: Option<Duration>,
    /// From this moment on, as 2026-01-31T12:00:00Z.
    #[arg(long, value_name = "TIME")]
    pub since: Option<jiff::Timestamp>,
    /// Up to this moment.
    #[arg(long, value_name = "TIME")]
    pub until: Option<jiff::Timestamp>,
    /// Samples that have these labels, as comm=postgres,pod_uid=…; of values for one label any.
    /// host and client choose captures.
    #[arg(long = "where", value_name = "LABEL=VALUE,…", value_parser = labels_as_typed)]
    pub labels: Option<String>,
    /// Samples of one event alone.
    #[arg(long, value_name = "EVENT")]
    pub event: Option<String>,
    /// What to write; without it, as the name of the output ends: .svg, .folded, .data, .txt,
    /// .json, else pprof.
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(FetchFormat::ALL.map(FetchFormat::name)).try_map(|name| name.parse::<FetchFormat>()))]
    pub format: Option<FetchFormat>,
    /// Where it goes; "-" is standard output.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}

fn labels_as_typed(text: &str) -> anyhow::Result<String> {
    labels(text).map(|_| text.to_owned())
}

/// What clients of a server may take. What is beyond is refused, and the refusal names the option.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub struct LimitOptions {
    /// Most streams and requests of one client at a time.
    #[arg(long, value_name = "NUMBER", default_value_t = 1024, help_heading = LIMITS)]
    pub streams_max: usize,
    /// Most MiB a second from one client, before compression. Who sends more has to wait.
    #[arg(long, value_name = "MIB", default_value_t = 256, help_heading = LIMITS)]
    pub rate_max: u64,
    /// Most MiB of memory that an epoch takes, 256 at most.
    #[arg(long, value_name = "MIB", default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=256), help_heading = LIMITS)]
    pub epoch_max: u64,
    /// Most MiB of artifacts and executables from one client in an hour, before compression.
    #[arg(long, value_name = "MIB", default_value_t = 16_384, help_heading = LIMITS)]
    pub artifacts_max: u64,
    /// Most executables that one client hands over in a day, each counted once.
    #[arg(long, value_name = "NUMBER", default_value_t = 16_384, help_heading = LIMITS)]
    pub executables_max: usize,
    /// Most bytes of a name: of a thread, a path, a cgroup, a service.
    #[arg(long, value_name = "BYTES", default_value_t = 131_072, help_heading = LIMITS)]
    pub label_max: usize,
    /// MiB of memory for what all clients send, and for windows that are resolved: half for each.
    /// Where it is short, collectors wait and windows end early.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(128..), help_heading = LIMITS)]
    pub memory_max: u64,
}

const LIMITS: &str = "Limits of clients";

/// Where profiles go as well.
#[derive(Clone, Debug, ClapArgs)]
pub struct PushOptions {
    /// Pyroscope that profiles are pushed to once they are written, as http://host:4040. Each
    /// process name is a series. Tags are labels, but for those that a series has already.
    /// Pyroscope refuses what began more than an hour ago: --window must be shorter.
    #[arg(long, value_name = "URL", help_heading = PUSH)]
    pub pyroscope_url: Option<reqwest::Url>,
    /// Tenant there (X-Scope-OrgID).
    #[arg(long, value_name = "NAME", requires = "pyroscope_url", help_heading = PUSH)]
    pub pyroscope_tenant: Option<String>,
    /// File with a token for it, or with the password of --pyroscope-user. Read again when it
    /// changes.
    #[arg(long, value_name = "FILE", requires = "pyroscope_url", help_heading = PUSH)]
    pub pyroscope_token_file: Option<PathBuf>,
    /// User of basic authentication.
    #[arg(long, value_name = "NAME", requires = "pyroscope_token_file", help_heading = PUSH)]
    pub pyroscope_user: Option<String>,
    /// CA that signs its certificate (PEM); without it, those of this host.
    #[arg(long, value_name = "FILE", requires = "pyroscope_url", help_heading = PUSH)]
    pub pyroscope_ca: Option<PathBuf>,
    /// Send the token to another host in clear text.
    #[arg(long, requires = "pyroscope_token_file", help_heading = PUSH)]
    pub pyroscope_insecure: bool,
}

const PUSH: &str = "Pushing profiles";

/// Labels a sample must have, as `comm=postgres,thread=worker`. A comma without a `=` behind it
/// belongs to the value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels(pub Vec<(String, String)>);

fn labels(text: &str) -> anyhow::Result<Labels> {
    Ok(Labels(stackwire::labels::parse(text)?))
}

/// Which part of a profile, and how it is divided.
#[derive(Clone, Debug, Default, ClapArgs)]
pub struct Slice {
    /// Divide samples by a label: comm, thread, tid, pid, cpu, container_id, pod_uid, cgroup_path,
    /// or any a profile has. The report shows their shares; flame graphs and folded stacks begin
    /// with it.
    #[arg(long, value_name = "LABEL")]
    pub by: Option<String>,
    /// Keep the samples of one event, off-cpu and run-queue among them. Without it pprof, perf.data
    /// and report have all events, and flame graphs, folded stacks and comparisons the first. Flame
    /// graphs draw waits together with CPU time.
    #[arg(long, short, visible_alias = "series", value_name = "EVENT")]
    pub event: Option<String>,
    /// Keep samples with these labels, as "comm=postgres,thread=worker"; of one label several
    /// values may be given (repeatable).
    #[arg(long = "where", value_name = "LABEL=VALUE,…", value_parser = labels)]
    pub wanted: Vec<Labels>,
    /// Keep stacks that have a function this regular expression matches.
    #[arg(long, value_name = "REGEX")]
    pub focus: Option<regex::Regex>,
    /// Leave out stacks that have a function this regular expression matches.
    #[arg(long, value_name = "REGEX")]
    pub ignore: Option<regex::Regex>,
    /// Keep a stretch of time, seconds from the start, as "10..20", "10.." or "..20". A wait is in
    /// the stretch it ends in, with all its length.
    #[arg(long, value_name = "A..B", value_parser = stretch)]
    pub time: Option<std::ops::Range<f64>>,
}

fn stretch(text: &str) -> anyhow::Result<std::ops::Range<f64>> {
    const FORM: &str = "a stretch of time is A..B, in seconds from the start";
    let (from, to) = text.split_once("..").context(FORM)?;
    let seconds = |text: &str, otherwise: f64| match text.trim_end_matches('s') {
        "" => Ok(otherwise),
        text => text.parse::<f64>().ok().filter(|it| it.is_finite() && *it >= 0.0).context(FORM),
    };
    // Beyond any capture, and still a number of nanoseconds.
    let range = seconds(from, 0.0)?..seconds(to, 1e9)?;
    ensure!(!range.is_empty(), "that stretch of time is empty");
    Ok(range)
}

#[derive(Debug, ClapArgs)]
pub struct Resolve {
    /// Captures, perf.data, pprof, gperftools or folded stacks; several become one profile.
    #[arg(required = true, value_name = "FILE")]
    pub captures: Vec<PathBuf>,
    /// Where the pprof goes; without it, beside the first capture with the ending .pb.gz.
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write a pprof of where threads waited, and leave it out of the other one.
    #[arg(long, value_name = "FILE")]
    pub offcpu_output: Option<PathBuf>,
    /// Write how threads were scheduled: all of it, there are no parts.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["wanted", "time"])]
    pub pmu_output: Option<PathBuf>,
    #[command(flatten)]
    pub pmu_as: PmuAs,
    #[command(flatten)]
    pub slice: Slice,
    #[command(flatten)]
    pub outputs: Outputs,
    #[command(flatten)]
    pub symbols: SymbolOptions,
}

#[derive(Debug, ClapArgs)]
pub struct Report {
    /// Captures, perf.data, pprof, gperftools or folded stacks; several are reported as one.
    #[arg(required = true, value_name = "FILE")]
    pub captures: Vec<PathBuf>,
    #[command(flatten)]
    pub slice: Slice,
    /// Functions listed; without it 20, and on a terminal no more than its window has room for.
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Which functions come first: those that take most themselves, or with all they call.
    #[arg(long, value_enum, value_name = "BY", default_value = "self")]
    pub sort: Sort,
    /// Print how threads were scheduled, and nothing else. It was added up while it was recorded:
    /// there are no parts of it.
    #[arg(long, conflicts_with_all = ["by", "event", "wanted", "focus", "ignore", "time", "diff", "flamegraph", "folded"])]
    pub pmu: bool,
    #[command(flatten)]
    pub pmu_as: PmuAs,
    /// On a terminal, too, print everything: what each executable's names are from, where stacks
    /// end.
    #[arg(long)]
    pub full: bool,
    /// Compare two: which functions take more of the time in the second than in the first.
    #[arg(long)]
    pub diff: bool,
    /// Draw a flame graph (SVG); with --diff one of the second, red what grew and blue what shrank.
    #[arg(long, value_name = "FILE")]
    pub flamegraph: Option<PathBuf>,
    #[command(flatten)]
    pub flames: Flames,
    /// Write folded stacks; with --diff with both counts.
    #[arg(long, value_name = "FILE")]
    pub folded: Option<PathBuf>,
    #[command(flatten)]
    pub symbols: SymbolOptions,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Sort {
    #[value(name = "self")]
    Own,
    Total,
}

#[derive(Debug, ClapArgs)]
pub struct Stat {
    /// What is counted (repeatable, or as a list), in groups as "{cycles,instructions},page-faults"
    /// that are counted at the same times. `stackwire events` lists what there is.
    #[arg(long, short, value_name = "EVENTS", default_value = "task-clock,context-switches,cpu-migrations,page-faults,cycles,instructions,branches,branch-misses", value_parser = str::parse::<Groups>)]
    pub event: Vec<Groups>,
    /// Count this process with the threads and children it starts meanwhile (repeatable, or as
    /// "12,34"), for --duration or until Ctrl-C.
    #[arg(long, short, value_name = "PID", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Vec<u32>,
    /// Count each thread by itself that the processes have now.
    #[arg(long, requires = "pid")]
    pub per_thread: bool,
    /// How long, as "30s", "5m" or 30.
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "command")]
    pub duration: Option<Duration>,
    /// Print a JSON object a line, with the keys of `perf stat -j`.
    #[arg(long, short = 'j')]
    pub json: bool,
    /// The collector to start, instead of the one beside this program or in PATH.
    #[arg(long, value_name = "FILE")]
    pub collector: Option<PathBuf>,
    /// A command to run and count, with its children, until it ends.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}

#[derive(Debug, ClapArgs)]
pub struct Events {
    /// Only those with this text in their names.
    pub pattern: Option<String>,
    /// The collector that looks, instead of the one beside this program or in PATH.
    #[arg(long, value_name = "FILE")]
    pub collector: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub struct Doctor {
    /// Say what names and stacks to expect of this process, and which option of its run-time would
    /// make them better.
    #[arg(long, short, value_name = "PID", conflicts_with = "collector", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// The collector to check, instead of the one beside this program or in PATH.
    #[arg(long, value_name = "FILE")]
    pub collector: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub struct Launch {
    pub socket: PathBuf,
    #[arg(last = true, required = true)]
    pub command: Vec<std::ffi::OsString>,
}
