//! A live capture from start to profile: starts the collector, receives its stream on a private
//! socket, resolves what came. For `stackwire record` and for programs that embed the symbolizer.

mod builder;
mod exporter;
mod stream;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use stackwire_cache::Cache;
use tempfile::NamedTempFile;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;

pub use self::builder::Builder;
pub use self::exporter::{MetricsExporter, WriteExporter};
use self::stream::{Finished, OneStream};
use crate::profile::{Names, Profile, unite};
use crate::receive::grpc::{NotKept, service};
use crate::resolve::{Sources, lay_out, resolve};

/// A capture that could not start or finish.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// Nothing to do.
    #[error("nothing to sample: call profile(), off_cpu() or counters() on the builder")]
    NothingToDo,
    /// No collector.
    #[error(
        "no stackwire-collector beside this program or in PATH; name it with --collector, or run `make install`"
    )]
    NoCollector,
    /// It cannot be executed.
    #[error("cannot execute {path}: {error}{hint}")]
    Execute {
        /// The collector.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// It said why it failed.
    #[error("{0}")]
    Collector(String),
    /// Its command line was wrong, by its own word.
    #[error("{0}")]
    Usage(String),
    /// The socket, a directory, the runtime.
    #[error("cannot set up the capture: {0}")]
    Setup(String),
}

/// The file the raw stream is kept in. It begins as a new file beside its path, and is put at the
/// path only when the collector has started: a capture from before may be there.
pub struct Kept {
    file: NamedTempFile,
    path: PathBuf,
    put: Put,
}

/// Puts a finished file in its place.
type Put = Box<dyn FnOnce(NamedTempFile) -> std::io::Result<()> + Send>;

impl Kept {
    /// Makes the file, to find out now whether it can be written.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn at(path: &Path) -> Result<Self, SessionError> {
        let cannot = |why: &dyn std::fmt::Display| {
            SessionError::Setup(format!("cannot write {}: {why}", path.display()))
        };
        if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(cannot(
                &"a capture replaces what is there, so that has to be a regular file",
            ));
        }
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let file = NamedTempFile::new_in(parent.unwrap_or(Path::new(".")));
        let file = file.map_err(|error| cannot(&error))?;
        let place = path.to_owned();
        let put = Box::new(move |file: NamedTempFile| Ok(file.persist(place).map(drop)?));
        Ok(Self { file, path: path.to_owned(), put })
    }

    /// Where it is written at first.
    #[must_use]
    pub fn first(&self) -> &Path {
        self.file.path()
    }

    /// Lets somebody else put it in its place.
    #[must_use]
    pub fn put_by(
        self,
        put: impl FnOnce(NamedTempFile) -> std::io::Result<()> + Send + 'static,
    ) -> Self {
        Self { put: Box::new(put), ..self }
    }
}

impl Builder {
    /// Starts the collector; returns when it samples.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn start(self) -> Result<Session, SessionError> {
        let kept = self.capture.as_deref().map(Kept::at).transpose()?;
        let cache = self.cache.clone();
        self.spawn(kept)?.start(cache)
    }

    /// Starts the process of the collector, and no thread. A caller with rights can then give them
    /// up before [`Spawned::start`]. The raw stream goes to `kept`.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn spawn(self, kept: Option<Kept>) -> Result<Spawned, SessionError> {
        let adds_up = self.sched != stackwire_model::AddUp::Nothing;
        if !self.profile && self.off_cpu.is_none() && !adds_up {
            return Err(SessionError::NothingToDo);
        }
        let collector = match &self.collector {
            Some(path) => path.clone(),
            None => find_collector().ok_or(SessionError::NoCollector)?,
        };
        let log = match &kept {
            Some(kept) => kept.file.as_file().try_clone(),
            None => tempfile::tempfile(),
        };
        let log = log.map_err(setup)?;
        // Mode 0700: nobody else connects.
        let directory = tempfile::Builder::new().prefix("stackwire-").tempdir().map_err(setup)?;
        let socket = directory.path().join("collector.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).map_err(setup)?;
        let child = self.collect(&collector, &socket)?;
        Ok(Spawned { builder: self, log, kept, listener, child, directory })
    }
}

/// A collector that has been started and not been listened to yet. It ends when this is dropped,
/// and is not waited for.
pub struct Spawned {
    builder: Builder,
    log: File,
    kept: Option<Kept>,
    listener: std::os::unix::net::UnixListener,
    child: Child,
    directory: tempfile::TempDir,
}

impl Spawned {
    /// Returns when the collector samples. What is in the cache is not asked for.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn start(self, cache: Option<Arc<Cache>>) -> Result<Session, SessionError> {
        let Self { builder, log, kept, listener, mut child, directory } = self;
        let stdin = child.stdin.take();
        let stderr = child.stderr.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                // What it said until then is still worth showing.
                let _ = pipe.read_to_end(&mut text);
                String::from_utf8_lossy(&text).into_owned()
            })
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("receive")
            .enable_all()
            .build()
            .map_err(setup)?;
        let (greeted, greeting) = mpsc::channel();
        let (finished, finish) = mpsc::channel();
        let state = Mutex::new(Some((log, kept, greeted, finished)));
        let (open, closing) = tokio::sync::watch::channel(false);
        let (timeline, exporting) = (builder.timeline, builder.exporting);
        let acceptor = Arc::new(OneStream { cache, timeline, exporting, state });
        {
            let _guard = runtime.enter();
            listener.set_nonblocking(true).map_err(setup)?;
            let listener = UnixListener::from_std(listener).map_err(setup)?;
            let server = tonic::transport::Server::builder()
                .add_service(service(acceptor, closing))
                .serve_with_incoming(UnixListenerStream::new(listener));
            runtime.spawn(server);
        }
        let mut session = Session {
            child,
            stdin,
            stderr,
            finish,
            buildid_dir: builder.buildid_dir,
            _open: open,
            _runtime: runtime,
            _directory: directory,
        };
        session.wait_for_greeting(&greeting)?;
        Ok(session)
    }
}

fn setup(error: std::io::Error) -> SessionError {
    SessionError::Setup(error.to_string())
}

/// A running capture.
#[derive(Debug)]
pub struct Session {
    child: Child,
    stdin: Option<ChildStdin>,
    stderr: Option<JoinHandle<String>>,
    finish: Receiver<Finished>,
    buildid_dir: Option<PathBuf>,
    /// The stream ends when it is dropped.
    _open: tokio::sync::watch::Sender<bool>,
    _runtime: Runtime,
    /// Removed, with the socket, when this is dropped.
    _directory: tempfile::TempDir,
}

/// How long a collector may take to load its programs and connect.
const START: Duration = Duration::from_secs(20);
/// How long it may take to deliver what it has once it was told to stop.
const STOP: Duration = Duration::from_secs(60);

impl Session {
    /// A session of all processes at 99 Hz with kernel stacks.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// Whether the collector has ended by itself: duration over or processes gone.
    pub fn is_finished(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends sampling, waits for what was sampled, and resolves it with what this host has.
    ///
    /// # Errors
    /// See [`SessionError`]. A collector that died leaves what it had sent: the profile says it is
    /// cut.
    pub fn stop(self) -> Result<(Profile, Names), SessionError> {
        self.stop_with(&Sources::default())
    }

    /// Ends sampling, waits for what was sampled, and looks for names in these sources.
    ///
    /// # Errors
    /// See [`SessionError`]. A collector that died leaves what it had sent: the profile says it is
    /// cut.
    pub fn stop_with(mut self, sources: &Sources) -> Result<(Profile, Names), SessionError> {
        drop(self.stdin.take());
        let finished = self.finish.recv_timeout(STOP);
        let status = self.reap();
        // The stream may have been cut by a collector that died: what came is there all the same.
        let finished = finished.or_else(|_| self.finish.recv_timeout(STOP));
        let said = self.stderr.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        let Finished { assembler, pins, ended } = finished.map_err(|_waited| {
            SessionError::Collector(format!(
                "its stream did not end ({status}): {}",
                message(&said)
            ))
        })?;
        let (mut profile, artifacts) = assembler.finish();
        if !ended {
            profile.notes.push(format!("the collector ended early ({status}): {}", message(&said)));
        }
        let sources = sources.with_pinned(pins.of(&profile.executables));
        let names = resolve(&profile, &artifacts, &sources);
        unite(&mut profile, &names);
        if let Some(directory) = &self.buildid_dir {
            lay_out(names.of(&profile), &artifacts, &sources, directory).map_err(|error| {
                SessionError::Setup(format!("cannot write {}: {error}", directory.display()))
            })?;
        }
        Ok((profile, names))
    }

    fn wait_for_greeting(
        &mut self,
        greeting: &Receiver<Result<(), NotKept>>,
    ) -> Result<(), SessionError> {
        let deadline = Instant::now() + START;
        loop {
            match greeting.recv_timeout(Duration::from_millis(20)) {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => return Err(SessionError::Setup(error.to_string())),
                Err(_) => {}
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                let said =
                    self.stderr.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
                let said = message(&said);
                return Err(match status.code() {
                    Some(2) => SessionError::Usage(said),
                    _ => SessionError::Collector(said),
                });
            }
            if Instant::now() >= deadline {
                // It hangs; nothing it holds is of use.
                let _ = self.child.kill();
                let seconds = START.as_secs();
                let text = format!("the collector did not start within {seconds} s");
                return Err(SessionError::Collector(text));
            }
        }
    }

    fn reap(&mut self) -> String {
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status.to_string();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A session that is given up must not leave a collector behind; its end of input stops it.
        drop(self.stdin.take());
        self.reap();
    }
}

/// Without the program's name in front of each line.
fn message(said: &str) -> String {
    let lines = said.trim().lines();
    let lines: Vec<_> =
        lines.map(|line| line.strip_prefix("stackwire-collector: ").unwrap_or(line)).collect();
    if lines.is_empty() { "it said nothing".to_owned() } else { lines.join("\n") }
}

/// The collector beside this program, else the first in `PATH`.
#[must_use]
pub fn find_collector() -> Option<PathBuf> {
    const NAME: &str = "stackwire-collector";
    let beside = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.join(NAME)));
    let in_path = std::env::var_os("PATH").unwrap_or_default();
    beside
        .into_iter()
        .chain(std::env::split_paths(&in_path).map(|directory| directory.join(NAME)))
        .find(|path| path.is_file())
}
