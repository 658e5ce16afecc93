//! A live capture from start to profile: starts the collector, receives its stream on a private socket,
//! resolves what came. For `stackwire record` and for programs that embed the symbolizer.

mod builder;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use stackwire_cache::Cache;
use stackwire_proto::v1;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;

pub use self::builder::Builder;
use crate::capture::{self, Assembler, CaptureError};
use crate::log::{Answer, Files, Log, LogError};
use crate::profile::Profile;
use crate::resolve::{Pinned, Sources, lay_out, resolve};
use crate::server::{Accept, Keep, service};

/// A capture that could not start or finish.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// Nothing to do.
    #[error("nothing to sample: call profile() on the builder")]
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
    /// The capture that came.
    #[error("cannot read the capture back: {0}")]
    Capture(#[from] CaptureError),
}

impl Builder {
    /// Starts the collector; returns when it samples.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn start(self) -> Result<Session, SessionError> {
        if !self.profile {
            return Err(SessionError::NothingToDo);
        }
        let collector = match &self.collector {
            Some(path) => path.clone(),
            None => find_collector().ok_or(SessionError::NoCollector)?,
        };
        let setup = |error: std::io::Error| SessionError::Setup(error.to_string());
        // Mode 0700: nobody else connects.
        let directory = tempfile::Builder::new().prefix("stackwire-").tempdir().map_err(setup)?;
        let socket = directory.path().join("collector.sock");
        let log =
            self.capture.clone().unwrap_or_else(|| directory.path().join("capture.stackwire"));
        if std::fs::metadata(&log).is_ok_and(|found| !found.is_file()) {
            return Err(SessionError::Setup(format!(
                "cannot write {}: a capture is read back, so it has to be a regular file",
                log.display()
            )));
        }
        // In the directory of the capture, to find out now whether it can be written, and in its place
        // only when the collector has started: what is there may be a capture from before.
        let parent = log.parent().filter(|parent| !parent.as_os_str().is_empty());
        let file =
            tempfile::NamedTempFile::new_in(parent.unwrap_or(Path::new("."))).map_err(|error| {
                SessionError::Setup(format!("cannot write {}: {error}", log.display()))
            })?;

        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("receive")
            .enable_all()
            .build()
            .map_err(setup)?;
        let (greeted, greeting) = mpsc::channel();
        let (finished, finish) = mpsc::channel();
        let state = Mutex::new(Some((file, greeted, finished)));
        let (open, closing) = tokio::sync::watch::channel(false);
        let acceptor = Arc::new(OneStream { path: log.clone(), cache: self.cache.clone(), state });
        {
            let _guard = runtime.enter();
            let listener = UnixListener::bind(&socket).map_err(setup)?;
            let server = tonic::transport::Server::builder()
                .add_service(service(acceptor, closing))
                .serve_with_incoming(UnixListenerStream::new(listener));
            runtime.spawn(server);
        }
        let mut child = self.spawn(&collector, &socket)?;
        let stdin = child.stdin.take();
        let stderr = child.stderr.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                // What it said until then is still worth showing.
                let _ = pipe.read_to_end(&mut text);
                String::from_utf8_lossy(&text).into_owned()
            })
        });
        let mut session = Session {
            child,
            stdin,
            stderr,
            finish,
            log,
            timeline: self.timeline,
            buildid_dir: self.buildid_dir.clone(),
            _open: open,
            _runtime: runtime,
            _directory: directory,
        };
        session.wait_for_greeting(&greeting)?;
        Ok(session)
    }
}

/// A running capture.
#[derive(Debug)]
pub struct Session {
    child: Child,
    stdin: Option<ChildStdin>,
    stderr: Option<JoinHandle<String>>,
    finish: Receiver<(Pinned, bool)>,
    log: PathBuf,
    timeline: bool,
    buildid_dir: Option<PathBuf>,
    /// The stream ends when it is dropped.
    _open: tokio::sync::watch::Sender<bool>,
    _runtime: Runtime,
    /// Removed, with the socket and an unwanted log, when this is dropped.
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
    /// See [`SessionError`]. A collector that died leaves what it had sent: the profile says it is cut.
    pub fn stop(self) -> Result<Profile, SessionError> {
        self.stop_with(&Sources::default())
    }

    /// Ends sampling, waits for what was sampled, and looks for names in these sources.
    ///
    /// # Errors
    /// See [`SessionError`]. A collector that died leaves what it had sent: the profile says it is cut.
    pub fn stop_with(mut self, sources: &Sources) -> Result<Profile, SessionError> {
        drop(self.stdin.take());
        let finished = self.finish.recv_timeout(STOP);
        let status = self.reap();
        let said = self.stderr.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        // The stream may have been cut by a collector that died: what came is in the log all the same.
        let (pinned, ended) = finished.unwrap_or_default();
        let file = File::open(&self.log).map_err(|error| SessionError::Setup(error.to_string()))?;
        let assembler =
            if self.timeline { Assembler::with_timeline() } else { Assembler::default() };
        let (mut profile, artifacts) = capture::read_with(BufReader::new(file), assembler)?;
        if !ended {
            profile.notes.push(format!("the collector ended early ({status}): {}", message(&said)));
        }
        let sources = sources.with_pinned(pinned);
        resolve(&mut profile, &artifacts, &sources);
        if let Some(directory) = &self.buildid_dir {
            lay_out(&profile, &artifacts, &sources, directory).map_err(|error| {
                SessionError::Setup(format!("cannot write {}: {error}", directory.display()))
            })?;
        }
        Ok(profile)
    }

    fn wait_for_greeting(
        &mut self,
        greeting: &Receiver<Result<(), String>>,
    ) -> Result<(), SessionError> {
        let deadline = Instant::now() + START;
        loop {
            match greeting.recv_timeout(Duration::from_millis(20)) {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => return Err(SessionError::Setup(error)),
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

/// The log to be, and who is told that the collector has greeted and that its stream is over.
type Ends = (tempfile::NamedTempFile, Sender<Result<(), String>>, Sender<(Pinned, bool)>);

/// Accepts the one stream of a session.
#[derive(Debug)]
struct OneStream {
    path: PathBuf,
    cache: Option<Arc<Cache>>,
    state: Mutex<Option<Ends>>,
}

impl Accept for OneStream {
    fn accept(
        &self,
        _hello: &v1::Hello,
        message: &v1::CollectorMessage,
    ) -> Result<Box<dyn Keep>, String> {
        let taken = self.state.lock().ok().and_then(|mut state| state.take());
        let (file, greeted, finished) = taken.ok_or("a collector is connected already")?;
        let files = Files { local: true, pinned: Pinned::default(), cache: self.cache.clone() };
        let log = Log::create(file.path().to_owned(), message, 0, files)
            .map_err(|error| error.to_string())
            .and_then(|log| {
                let cannot = |error| format!("cannot write {}: {error}", self.path.display());
                file.persist(&self.path).map(|_| log).map_err(cannot)
            });
        // The session may have given up waiting, and then needs no answer.
        let _ = greeted.send(log.as_ref().map(|_| ()).map_err(Clone::clone));
        Ok(Box::new(KeepOne { log: log?, finished }))
    }
}

struct KeepOne {
    log: Log,
    finished: Sender<(Pinned, bool)>,
}

impl Keep for KeepOne {
    fn next_epoch(&self) -> u64 {
        self.log.next_epoch
    }

    fn add(&mut self, message: &v1::CollectorMessage) -> Result<Answer, LogError> {
        self.log.add(message)
    }

    fn pause(&self) -> Option<Duration> {
        None
    }

    fn finish(self: Box<Self>) {
        let ended = self.log.has_ended();
        let (_, pinned) = self.log.close();
        let _ = self.finished.send((pinned, ended));
    }
}
