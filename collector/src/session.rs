//! A capture from start to stop, for `main.rs` and for programs that embed the collector.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Instant;

use stackwire_collector_ebpf as abi;
use stackwire_model::{Share, Unwind as Walk};
use stackwire_proto::v1::CollectorMessage;
use stackwire_rights::capabilities::{self, CapabilitySet};

use crate::artifact::{Artifact, Hash, Kind};
use crate::clock::{now_ns, realtime_ns};
use crate::config::{Config, ConfigError, Destination, Scope};
use crate::handover::Handover;
use crate::helpers::broker::Broker;
use crate::helpers::compiler::Compiler;
use crate::host::jit::Snapshots;
use crate::host::kernel_names::KernelNames;
use crate::host::{Identity, kallsyms, vdso};
use crate::outbox::Outbox;
use crate::pipeline::{Pipeline, Summary};
use crate::priority::Raised;
use crate::process::{Processes, family};
use crate::sampler::{Filter, Sampler, SamplerError};
use crate::sink::{self, SinkError};
use crate::unwind::{Sources, Unwind};
use crate::wire::{self, Head, References, Sampling};

/// A capture that could not start or finish.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// What was asked for cannot work here.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The kernel side.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// The destination.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// A thread, a runtime, a system call that never fails did.
    #[error("{0}")]
    Internal(String),
}

/// How a session is set up; see [`Session::builder`].
#[derive(Debug)]
pub struct Builder {
    config: Config,
    profile: bool,
    follow: bool,
}

impl Builder {
    /// Samples one process with all its threads (repeatable) instead of all processes.
    #[must_use]
    pub fn pid(mut self, pid: u32) -> Self {
        match &mut self.config.scope {
            Scope::Processes { pids, .. } => pids.push(pid),
            scope => *scope = Scope::Processes { pids: vec![pid], follow: false },
        }
        self
    }

    /// Takes children along.
    #[must_use]
    pub fn follow(mut self) -> Self {
        self.follow = true;
        self
    }

    /// Samples CPU time.
    #[must_use]
    pub fn profile(mut self) -> Self {
        self.profile = true;
        self
    }

    /// Samples a second and CPU; 99 unless told.
    #[must_use]
    pub fn sample_rate(mut self, frequency: u32) -> Self {
        self.config.frequency = frequency;
        self
    }

    /// Starts sampling into `out`, a capture as `stackwire resolve` reads it.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn start(mut self, out: impl Write + Send + 'static) -> Result<Session, SessionError> {
        if let Scope::Processes { follow, .. } = &mut self.config.scope {
            *follow = self.follow;
        }
        if !self.profile {
            let message = "nothing to sample: call profile() on the builder";
            return Err(SessionError::Internal(message.to_owned()));
        }
        Session::start(self.config, Out::Writer(Box::new(out)), Helpers::none())
    }
}

/// Processes that do for a session what it must not: forked by [`Helpers::start`] before there are
/// threads.
#[derive(Debug)]
pub struct Helpers {
    broker: Broker,
    compilers: Vec<Compiler>,
}

impl Helpers {
    /// Starts them. One that does not start is done without: files are opened with what this
    /// process may, stacks are walked by frame pointers.
    #[must_use]
    pub fn start() -> Self {
        // Two: one file that takes long keeps no other waiting.
        let compilers = (0..2).filter_map(|_| Compiler::start().ok()).collect();
        Self { broker: Broker::start().unwrap_or_else(|_| Broker::none()), compilers }
    }

    /// None of them.
    #[must_use]
    pub fn none() -> Self {
        Self { broker: Broker::none(), compilers: Vec::new() }
    }
}

enum Out {
    Writer(Box<dyn Write + Send>),
    Destination(Destination),
}

/// A running capture.
///
/// Its threads give up their capabilities once sampling has started; those of the calling thread
/// stay.
#[derive(Debug)]
pub struct Session {
    stop: Arc<AtomicBool>,
    pipeline: JoinHandle<Summary>,
    sink: JoinHandle<Result<(), SinkError>>,
    held: String,
}

impl Session {
    /// A session of all processes with the defaults of the command line.
    #[must_use]
    pub fn builder() -> Builder {
        Builder { config: Config::new(Scope::All), profile: false, follow: false }
    }

    /// Starts a capture to a destination.
    ///
    /// # Errors
    /// See [`SessionError`]. An output that cannot be written is found out before sampling starts.
    pub fn to(
        config: Config,
        destination: Destination,
        helpers: Helpers,
    ) -> Result<Self, SessionError> {
        Self::start(config, Out::Destination(destination), helpers)
    }

    fn start(mut config: Config, out: Out, helpers: Helpers) -> Result<Self, SessionError> {
        config.check()?;
        let mut made = None;
        let out = match out {
            Out::Destination(Destination::File(path)) => {
                let (file, new) = as_user(|| create(&path))??;
                made = new.then(|| path.clone());
                Sink::File(file, path.display().to_string())
            }
            Out::Destination(Destination::Symbolizer(target)) => {
                target.check()?;
                Sink::Symbolizer(target)
            }
            Out::Writer(writer) => Sink::Writer(writer, "the capture's writer".to_owned()),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let outbox = Arc::new(Outbox::new(config.limits.clone()));
        let broker = Arc::new(helpers.broker);
        if helpers.compilers.is_empty() {
            config.unwind = Walk::FramePointers;
        }
        let cache = config.unwind_cache.clone();
        let sources = Sources { broker: Arc::clone(&broker), compilers: helpers.compilers, cache };
        let handover = Arc::new(Handover::new(config.share, Arc::clone(&broker)));
        let (ready, started) = mpsc::channel();
        let deadline_stop = Arc::clone(&stop);
        let queue = (Snapshots::new(broker), Arc::clone(&handover), Arc::clone(&outbox));
        let pipeline = std::thread::Builder::new()
            .name("collect".to_owned())
            .spawn(move || match prepare(&config, queue, sources) {
                Ok((hello, pipeline)) => {
                    let deadline = config
                        .duration
                        .and_then(|duration| pipeline.started().checked_add(duration));
                    let held = capabilities::names(capabilities::effective());
                    // The other end waits for this message; it cannot be gone.
                    let _ = ready.send(Ok((hello, held)));
                    pipeline.run(|| {
                        deadline_stop.load(Ordering::Relaxed)
                            || deadline.is_some_and(|deadline| Instant::now() >= deadline)
                    })
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                    Summary::default()
                }
            })
            .map_err(|error| SessionError::Internal(format!("cannot start a thread: {error}")))?;
        let died = "the collecting thread died at start";
        let began = started.recv().map_err(|_closed| SessionError::Internal(died.to_owned()));
        let (hello, held) = began.and_then(|began| began).inspect_err(|_| {
            if let Some(path) = &made {
                // An empty file would look like a capture that was cut to nothing.
                let _ = as_user(|| std::fs::remove_file(path));
            }
        })?;
        let sink = std::thread::Builder::new()
            .name("deliver".to_owned())
            .spawn(move || deliver(out, &outbox, &handover, hello))
            .map_err(|error| SessionError::Internal(format!("cannot start a thread: {error}")))?;
        Ok(Self { stop, pipeline, sink, held })
    }

    /// Whether the capture has ended by itself: duration over, processes gone, destination lost.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.pipeline.is_finished()
    }

    /// Capabilities the sampling thread still holds, as in capabilities(7).
    #[must_use]
    pub fn capabilities(&self) -> &str {
        &self.held
    }

    /// Ends sampling and waits until everything is delivered.
    ///
    /// # Errors
    /// When the destination failed; what it had got by then stays there.
    pub fn stop(self) -> Result<Summary, SessionError> {
        self.stop.store(true, Ordering::Relaxed);
        let died = |_| SessionError::Internal("a thread of the collector died".to_owned());
        let summary = self.pipeline.join().map_err(died)?;
        self.sink.join().map_err(died)??;
        Ok(summary)
    }
}

/// See [`capabilities::as_user`].
fn as_user<T>(work: impl FnOnce() -> T) -> Result<T, SessionError> {
    capabilities::as_user(work)
        .map_err(|error| SessionError::Internal(format!("cannot change capabilities: {error}")))
}

enum Sink {
    File(std::fs::File, String),
    Writer(Box<dyn Write + Send>, String),
    Symbolizer(sink::Target),
}

fn deliver(
    out: Sink,
    outbox: &Arc<Outbox>,
    handover: &Arc<Handover>,
    hello: CollectorMessage,
) -> Result<(), SinkError> {
    // Started with the privileges of the caller, of which it needs none.
    let _ = capabilities::drop_all();
    let result = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| SinkError::Write { path: "the runtime".to_owned(), error })
        .and_then(|runtime| {
            runtime.block_on(async {
                let (outbox, handover) = (Arc::clone(outbox), Arc::clone(handover));
                match out {
                    Sink::File(file, name) => {
                        // Nothing to cut off what is no regular file.
                        let _ = file.set_len(0);
                        sink::write_file(outbox, handover, hello, file, name).await
                    }
                    Sink::Writer(writer, name) => {
                        sink::write_file(outbox, handover, hello, writer, name).await
                    }
                    Sink::Symbolizer(target) => sink::upload(outbox, handover, hello, target).await,
                }
            })
        });
    if let Err(error) = &result {
        outbox.stop(error.to_string());
    }
    result
}

/// Kept after start-up: opens events on CPUs that come online, and from kernel 6.15 on reads the
/// mappings of other users' processes.
const KEPT: CapabilitySet = CapabilitySet::PERFMON;
/// Looks for children that are not followed yet. Who forks all the time is soon followed by the
/// kernel side alone.
const MAX_LOOKS: usize = 8;

/// Everything that needs a capability, then the drop of those not needed any more.
fn prepare(
    config: &Config,
    (jit, handover, outbox): (Snapshots, Arc<Handover>, Arc<Outbox>),
    sources: Sources,
) -> Result<(CollectorMessage, Pipeline), SessionError> {
    let (filter, asked, sampling) = describe(config)?;
    let raised = Raised::for_now();
    let mut sampler = Sampler::start(&filter, &config.events, config.frequency)?;
    drop(raised);
    let family = |of: &[u32]| if filter.follow { family(of) } else { of.to_vec() };
    let wanted = asked.as_deref().map(family);
    let mut processes = Processes::new(wanted.as_deref(), filter.follow);
    processes.scan();
    let unwind = match config.unwind {
        Walk::FramePointers => None,
        _ => {
            let tables = sampler.take_tables()?;
            let unwind = Unwind::start(tables, sources, &mut processes, wanted.is_some());
            let error = |error| SessionError::Internal(format!("cannot set up unwinding: {error}"));
            Some(unwind.map_err(error)?)
        }
    };
    if let Some(mut admitted) = wanted {
        sampler.admit(&admitted)?;
        // Children of before the admission; from it on the kernel side takes them along by itself.
        // Each look finds those born between the one before and what was admitted by it: of ever
        // fewer parents.
        for _ in 0..MAX_LOOKS {
            let late: Vec<u32> =
                family(&admitted).into_iter().filter(|pid| !admitted.contains(pid)).collect();
            if late.is_empty() {
                break;
            }
            processes.want(&late);
            sampler.admit(&late)?;
            admitted.extend(late);
        }
    }
    let (started, clocks) = (Instant::now(), (now_ns(), realtime_ns()));
    let mut references = References::default();
    let mut layout = kallsyms::KernelLayout::default();
    let mut names = KernelNames::default();
    if config.kernel_stacks {
        // Without it kernel frames stay unnamed, which the report says; the capture is still worth
        // it.
        let text = std::fs::read_to_string(kallsyms::PATH).unwrap_or_default();
        let (parsed, snapshot) = kallsyms::parse(&text);
        drop(text);
        layout = parsed;
        // Apart: programs come and go, ours at each start, and the rest is the same kernel until
        // the next boot.
        if !snapshot.is_empty() {
            let (programs, kernel) = kallsyms::split_programs(&snapshot);
            references.kernel = Some(Hash::of_parts(&kernel.map(str::as_bytes)));
            references.programs = Some(Hash::of(programs.as_bytes()));
        }
        names = KernelNames::new(snapshot);
    }
    if let Some(image) = vdso::image() {
        let artifact = Artifact::new(Kind::Vdso, image);
        references.vdso = Some(artifact.hash);
        outbox.add_artifact(artifact, None);
    }
    capabilities::keep(KEPT)
        .map_err(|error| SessionError::Internal(format!("cannot drop capabilities: {error}")))?;

    // Not secret, only different: never to wait for entropy, as early at boot, while samples pile
    // up.
    let mut capture_id = [0; 16];
    rustix::rand::getrandom(&mut capture_id, rustix::rand::GetRandomFlags::INSECURE)
        .map_err(|error| SessionError::Internal(format!("no random numbers: {error}")))?;
    let identity = Identity::read();
    let share_all = config.share == Share::Always;
    let (host, epoch) = (identity.clone(), config.epoch);
    let head = Head { capture_id, identity: host, clocks, sampling, share_all, epoch };
    let times = (started, clocks.0, config.epoch);
    let parts = (sampler, processes, unwind);
    let (kernel, host) = ((layout, names), (identity, references));
    let pipeline = Pipeline::new(parts, kernel, host, (jit, handover, outbox), times);
    Ok((wire::hello(&head), pipeline))
}

fn describe(config: &Config) -> Result<(Filter, Option<Vec<u32>>, Sampling), SessionError> {
    let mut sampling = Sampling {
        events: config.events.clone(),
        frequency: config.frequency,
        kernel_stacks: config.kernel_stacks,
        ..Sampling::default()
    };
    let mut filter = Filter { events: config.events.len(), ..Filter::default() };
    let counted = config.events.iter().enumerate().filter(|(_, event)| event.is_counted_singly());
    filter.config.counted = counted.fold(0, |bits, (index, _)| bits | 1 << index);
    filter.config.interval_ns = 1_000_000_000 / config.frequency.max(1);
    filter.config.kernel_stacks = config.kernel_stacks.into();
    let walk = match config.unwind {
        Walk::Auto => abi::Unwind::Auto,
        Walk::Tables => abi::Unwind::Tables,
        Walk::FramePointers => abi::Unwind::FramePointers,
    };
    filter.config.unwind = walk as u32;
    let mut wanted = None;
    match &config.scope {
        Scope::All => filter.config.scope = abi::Scope::All as u32,
        Scope::Processes { pids, follow } => {
            filter.config.scope = abi::Scope::Processes as u32;
            filter.follow = *follow;
            sampling.pids.clone_from(pids);
            sampling.follow = *follow;
            wanted = Some(pids.clone());
        }
        Scope::Cgroup(path) => {
            let not_one = || ConfigError::NotACgroup(path.clone());
            let (id, level) = as_user(|| cgroup(path))?.ok_or_else(not_one)?;
            filter.config.scope = abi::Scope::Cgroup as u32;
            filter.config.cgroup_id = id;
            filter.config.cgroup_level = level;
            sampling.cgroup = path.display().to_string();
        }
    }
    Ok((filter, wanted, sampling))
}

/// Id of a cgroup (the inode of its directory) and its depth below the root of the hierarchy.
fn cgroup(path: &Path) -> Option<(u64, u32)> {
    let path = path.canonicalize().ok()?;
    let metadata = std::fs::metadata(&path).ok()?;
    // The root of the hierarchy is where the file system begins.
    let level = path
        .ancestors()
        .skip(1)
        .take_while(|up| std::fs::metadata(up).is_ok_and(|up| up.dev() == metadata.dev()))
        .count();
    Some((metadata.ino(), level as u32))
}

/// Opens a capture file, emptied only once sampling has started: what is there may be a capture
/// from before. True when there was none.
fn create(path: &Path) -> Result<(std::fs::File, bool), SinkError> {
    // A capture tells what runs on the host: for its owner only.
    let mut options = std::fs::OpenOptions::new();
    options.write(true).mode(0o600);
    let file = match options.clone().create_new(true).open(path) {
        Ok(file) => Ok((file, true)),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            options.open(path).map(|file| (file, false))
        }
        Err(error) => Err(error),
    };
    file.map_err(|error| SinkError::Write { path: path.display().to_string(), error })
}
