//! A capture from start to stop, for `main.rs` and for programs that embed the collector.

mod prepare;
mod side;

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Instant;

use stackwire_model::{AddUp, LostReason, OffCpu, PythonOutcome, Unwind as Walk};
use stackwire_proto::v1::CollectorMessage;
use stackwire_rights::capabilities;

use self::prepare::prepare;
use crate::arch;
use crate::config::{Config, ConfigError, Destination, Scope};
use crate::handover::Handover;
use crate::helpers::broker::Broker;
use crate::helpers::compiler::Compiler;
use crate::host::jit::Snapshots;
use crate::host::whose::Whose;
use crate::outbox::Outbox;
use crate::pipeline::Outgoing;
use crate::sampler::SamplerError;
use crate::sink::{self, SinkError};
use crate::summary::Summary;
use crate::unwind::Sources;

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
    /// The destination, before anything was sampled.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The destination, and what became of the samples.
    #[error("{cause}")]
    Undelivered {
        /// Why.
        cause: SinkError,
        /// What there was; what was not acknowledged is among the losses.
        summary: Box<Summary>,
    },
    /// A process that was to name its Python functions does not.
    #[error("cannot switch on the perf trampoline of pid {pid}: {}", .outcome.text())]
    Python {
        /// The process.
        pid: u32,
        /// Why.
        outcome: PythonOutcome,
    },
    /// One that runs no Python was to.
    #[error("pid {0} runs no Python that could name its functions")]
    NotPython(u32),
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
            scope => *scope = Scope::Processes { pids: vec![pid], follow: false, on_exec: false },
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

    /// Records where threads wait.
    #[must_use]
    pub fn off_cpu(mut self, which: OffCpu) -> Self {
        self.config.off_cpu = Some(which);
        self
    }

    /// Adds up how processes or threads are scheduled, and what hardware counters count meanwhile.
    #[must_use]
    pub fn counters(mut self, of: AddUp) -> Self {
        self.config.sched = of;
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
            self.config.events.clear();
            if self.config.off_cpu.is_none() && self.config.sched == AddUp::Nothing {
                let message =
                    "nothing to sample: call profile(), off_cpu() or counters() on the builder";
                return Err(SessionError::Internal(message.to_owned()));
            }
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
    /// Of its own: others may be busy for seconds.
    python: Option<Compiler>,
}

impl Helpers {
    /// Starts them. Without the broker, files are opened with the rights of this process. Without
    /// any compiler, stacks are walked by frame pointers. `inject_python`: with what it
    /// takes to have Python processes name their functions.
    #[must_use]
    pub fn start(inject_python: bool) -> Self {
        // Two: one file that takes long keeps no other waiting.
        let compilers = (0..2).filter_map(|_| Compiler::start().ok()).collect();
        let python = inject_python.then(Compiler::start).and_then(Result::ok);
        Self {
            broker: Broker::start(inject_python).unwrap_or_else(|_| Broker::none()),
            compilers,
            python,
        }
    }

    /// None of them.
    #[must_use]
    pub fn none() -> Self {
        Self { broker: Broker::none(), compilers: Vec::new(), python: None }
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
    outbox: Arc<Outbox>,
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
            Out::Destination(Destination::Symbolizer(target)) => Sink::Symbolizer(target),
            Out::Writer(writer) => Sink::Writer(writer, "the capture's writer".to_owned()),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let outbox = Arc::new(Outbox::new(config.limits.clone()));
        let broker = Arc::new(helpers.broker);
        // Tables are of the processor that the eBPF programs are of.
        if helpers.compilers.is_empty() || arch::OBJECT.is_none() {
            config.unwind = Walk::FramePointers;
        }
        let cache = config.unwind_cache.clone();
        let sources = Sources { broker: Arc::clone(&broker), compilers: helpers.compilers, cache };
        let python = helpers.python.filter(|_| config.inject_python);
        if config.inject_python && python.is_none() {
            let message = "Python processes cannot be asked without the processes that do it";
            return Err(SessionError::Internal(message.to_owned()));
        }
        let handover = Arc::new(Handover::new(config.share, Arc::clone(&broker)));
        let (ready, started) = mpsc::channel();
        let deadline_stop = Arc::clone(&stop);
        let outgoing = Outgoing {
            jit: Snapshots::new(Arc::clone(&broker)),
            whose: Whose::new(broker),
            handover: Arc::clone(&handover),
            outbox: Arc::clone(&outbox),
        };
        let pipeline = std::thread::Builder::new()
            .name("collect".to_owned())
            .spawn(move || match prepare(&config, outgoing, sources, python) {
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
        let epochs = Arc::clone(&outbox);
        let sink = std::thread::Builder::new()
            .name("deliver".to_owned())
            .spawn(move || deliver(out, &epochs, &handover, hello))
            .map_err(|error| SessionError::Internal(format!("cannot start a thread: {error}")))?;
        Ok(Self { stop, pipeline, sink, outbox, held })
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

    /// Why nothing can be delivered now; it is tried again until it can.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.outbox.trouble()
    }

    /// Ends sampling and waits until everything is delivered.
    ///
    /// # Errors
    /// When the destination failed; what it had got by then stays there, and the error says what it
    /// had not got.
    pub fn stop(self) -> Result<Summary, SessionError> {
        self.stop.store(true, Ordering::Relaxed);
        let died = |_| SessionError::Internal("a thread of the collector died".to_owned());
        let mut summary = self.pipeline.join().map_err(died)?;
        match self.sink.join().map_err(died)? {
            Ok(()) => Ok(summary),
            Err(cause) => {
                let left = self.outbox.samples() + self.outbox.take_dropped();
                summary.lose(LostReason::EpochDropped, left);
                summary.delivered = summary.delivered.saturating_sub(left);
                Err(SessionError::Undelivered { cause, summary: Box::new(summary) })
            }
        }
    }
}

/// See [`capabilities::as_user`].
fn as_user<T>(work: impl FnOnce() -> T) -> Result<T, SessionError> {
    capabilities::as_user(work)
        .map_err(|error| SessionError::Internal(format!("cannot change capabilities: {error}")))
}

/// Where a capture goes.
pub(crate) enum Sink {
    File(std::fs::File, String),
    Writer(Box<dyn Write + Send>, String),
    Symbolizer(sink::Target),
}

/// Delivers what is in the outbox, until its end is.
pub(crate) fn deliver(
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
