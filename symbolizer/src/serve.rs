//! `stackwire serve`: many collectors at once, each with a durable log, a profile for every window.
//!
//! A stream's log is a file a window, `CAPTURE-WINDOW.open` while it grows and `.stackwire` once its
//! profile is written. A server that was killed finds its `.open` files at the next start and finishes
//! them; a collector that comes back is told which epochs are held already.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use stackwire_proto::v1;
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};

use crate::capture;
use crate::export::{self, PprofOptions};
use crate::log::{Answer, Held, Log, LogError, inspect};
use crate::profile::hex;
use crate::resolve::{Pinned, Sources, resolve};
use crate::server::{Accept, Keep, service};

/// How to serve.
#[derive(Clone, Debug)]
pub struct Config {
    /// `host:port`, or `unix:/path/to/socket`.
    pub listen: String,
    /// Where profiles go.
    pub output_dir: PathBuf,
    /// Where logs go.
    pub log_dir: PathBuf,
    /// Most bytes of finished logs kept; the oldest go first.
    pub log_max: u64,
    /// Length of a window by the stream's clock.
    pub window: Duration,
    /// `key=value` comments for every profile.
    pub tags: Vec<String>,
}

/// A server that could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// A directory.
    #[error("cannot use the directory {path}: {error}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The address.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        error: io::Error,
    },
    /// tonic.
    #[error("the server failed: {0}")]
    Server(#[from] tonic::transport::Error),
}

/// Serves until `shutdown` is over; streams that run then are finished with what they brought.
/// `ready` is told the address that is listened on.
///
/// # Errors
/// See [`ServeError`].
pub async fn run(
    config: Config,
    ready: impl FnOnce(&str),
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    for path in [&config.output_dir, &config.log_dir] {
        fs::create_dir_all(path)
            .map_err(|error| ServeError::Directory { path: path.clone(), error })?;
    }
    let listen = config.listen.clone();
    let failed = |error| ServeError::Listen { address: listen.clone(), error };
    let (alive, mut all_gone) = tokio::sync::mpsc::channel(1);
    let (close, closing) = tokio::sync::watch::channel(false);
    let config = Arc::new(config);
    let keepers = Arc::new(Keepers { config, unresolved: Arc::default(), alive });
    keepers.finish_old();
    let server = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(20)))
        .add_service(service(keepers, closing));
    match listen.strip_prefix("unix:") {
        Some(path) => {
            // A socket from before; anything else there is not ours to remove.
            if fs::symlink_metadata(path).is_ok_and(|found| is_socket(&found)) {
                fs::remove_file(path).map_err(failed)?;
            }
            let listener = UnixListener::bind(path).map_err(failed)?;
            ready(&listen);
            let serving = server.serve_with_incoming(UnixListenerStream::new(listener));
            tokio::select! {
                result = serving => result?,
                () = shutdown => {}
            }
        }
        None => {
            let listener = TcpListener::bind(&listen).await.map_err(failed)?;
            let address = listener.local_addr().map_or(listen.clone(), |bound| bound.to_string());
            ready(&address);
            let serving = server.serve_with_incoming(TcpListenerStream::new(listener));
            tokio::select! {
                result = serving => result?,
                () = shutdown => {}
            }
        }
    }
    // Each stream ends here and writes the profile of what it has; collectors keep the rest.
    let _ = close.send(true);
    let _ = tokio::time::timeout(LAST_PROFILES, all_gone.recv()).await;
    Ok(())
}

/// How long profiles may take that are written when the server stops.
const LAST_PROFILES: Duration = Duration::from_secs(60);

fn is_socket(found: &fs::Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    found.file_type().is_socket()
}

/// Makes a keeper for each stream.
#[derive(Debug)]
struct Keepers {
    config: Arc<Config>,
    /// Windows closed and not resolved yet.
    unresolved: Arc<AtomicUsize>,
    /// Held by every keeper, so that the server can wait for the last.
    alive: tokio::sync::mpsc::Sender<()>,
}

impl Keepers {
    /// Finishes what a server before this one left open.
    fn finish_old(&self) {
        for path in files(&self.config.log_dir, "open") {
            finish_window(&self.config, &path, Pinned::default());
        }
    }
}

impl Accept for Keepers {
    fn accept(
        &self,
        hello: &v1::Hello,
        message: &v1::CollectorMessage,
    ) -> Result<Box<dyn Keep>, String> {
        if hello.capture_id.len() != 16 {
            return Err("a capture id has 16 bytes".to_owned());
        }
        let id = hex(&hello.capture_id);
        // What is held of the capture from before: of a broken connection, or a server before this one.
        let mut held = Held::default();
        let mut window = 0;
        for path in files(&self.config.log_dir, "stackwire")
            .into_iter()
            .chain(files(&self.config.log_dir, "open"))
        {
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            let Some(number) = stem.strip_prefix(&id).and_then(|rest| rest.strip_prefix('-'))
            else {
                continue;
            };
            window = window.max(number.parse().unwrap_or(0) + 1);
            let found = inspect(&path);
            held.next_epoch = held.next_epoch.max(found.next_epoch);
            held.lost.extend(found.lost);
        }
        let pin = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .is_ok_and(|boot_id| boot_id.trim() == hello.boot_id);
        let mut keeper = Keeper {
            config: Arc::clone(&self.config),
            unresolved: Arc::clone(&self.unresolved),
            hello: message.clone(),
            id,
            window,
            log: None,
            next_epoch: held.next_epoch,
            lost_before: held.lost,
            pin,
            _alive: self.alive.clone(),
        };
        keeper.open().map_err(|error| error.to_string())?;
        Ok(Box::new(keeper))
    }
}

/// Keeps one stream.
struct Keeper {
    config: Arc<Config>,
    unresolved: Arc<AtomicUsize>,
    hello: v1::CollectorMessage,
    id: String,
    window: u64,
    log: Option<Log>,
    next_epoch: u64,
    /// Said by windows before this one.
    lost_before: Vec<v1::Lost>,
    pin: bool,
    _alive: tokio::sync::mpsc::Sender<()>,
}

/// Windows that may wait to be resolved before collectors are asked to pause.
const MAX_UNRESOLVED: usize = 4;

impl Keeper {
    fn open(&mut self) -> Result<&mut Log, LogError> {
        let path = self.config.log_dir.join(format!("{}-{:06}.open", self.id, self.window));
        let log = Log::create(path, &self.hello, self.next_epoch, self.pin)?;
        Ok(self.log.insert(log))
    }

    /// Ends the window as one of several; `total` are the losses of the whole capture, when it ends.
    fn end_window(&mut self, total: Option<&[v1::Lost]>) -> Result<(), LogError> {
        let Some(log) = &mut self.log else { return Ok(()) };
        let (_, said) = log.totals();
        let mut more = Vec::new();
        for lost in total.unwrap_or_default() {
            let known =
                said.iter().chain(&self.lost_before).filter(|known| known.reason == lost.reason);
            let known: u64 = known.map(|known| known.count).sum();
            if lost.count > known {
                more.push(v1::Lost { count: lost.count - known, ..*lost });
            }
        }
        log.end_window(&more)?;
        self.lost_before.extend(said);
        self.rotate();
        Ok(())
    }

    /// Hands the window to be resolved.
    fn rotate(&mut self) {
        let Some(log) = self.log.take() else { return };
        self.next_epoch = log.next_epoch;
        self.window += 1;
        let empty = log.totals().0 == 0;
        let (path, pinned) = log.close();
        if empty {
            // Nothing in it that a profile could show; the next window has the rest.
            let _ = fs::remove_file(&path);
            return;
        }
        self.unresolved.fetch_add(1, Ordering::Relaxed);
        finish_window(&self.config, &path, pinned);
        self.unresolved.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Keep for Keeper {
    fn next_epoch(&self) -> u64 {
        self.next_epoch
    }

    fn add(&mut self, message: &v1::CollectorMessage) -> Result<Answer, LogError> {
        use v1::collector_message::Body;
        if self.log.is_none() {
            self.open()?;
        }
        if let (Some(Body::End(end)), true) = (&message.body, self.window > 0) {
            self.end_window(Some(&end.lost))?;
            return Ok(Answer::default());
        }
        let window = self.config.window.as_nanos() as u64;
        let full =
            |log: &Log| log.span.is_some_and(|(start, end)| end.saturating_sub(start) >= window);
        if let Some(Body::Epoch(_)) = &message.body
            && self.log.as_ref().is_some_and(full)
        {
            self.end_window(None)?;
            self.open()?;
        }
        match &mut self.log {
            Some(log) => log.add(message),
            None => Ok(Answer::default()),
        }
    }

    fn pause(&self) -> Option<Duration> {
        (self.unresolved.load(Ordering::Relaxed) > MAX_UNRESOLVED).then_some(Duration::from_secs(1))
    }

    fn finish(mut self: Box<Self>) {
        self.rotate();
    }
}

/// Resolves a window, writes its profile, and keeps its log as a capture like any other.
fn finish_window(config: &Config, path: &Path, pinned: Pinned) {
    match write_profile(config, path, pinned) {
        Ok(Some(written)) => eprintln!("stackwire: wrote {}", written.display()),
        Ok(None) => {}
        Err(error) => {
            eprintln!("stackwire: cannot write the profile of {}: {error}", path.display())
        }
    }
    let kept = path.with_extension("stackwire");
    if let Err(error) = fs::rename(path, &kept) {
        eprintln!("stackwire: cannot keep {} as {}: {error}", path.display(), kept.display());
    }
    prune(&config.log_dir, config.log_max);
}

fn write_profile(config: &Config, path: &Path, pinned: Pinned) -> anyhow::Result<Option<PathBuf>> {
    let file = fs::File::open(path)?;
    let (mut profile, artifacts) = capture::read(io::BufReader::new(file))?;
    if profile.samples.is_empty() {
        return Ok(None);
    }
    resolve(&mut profile, &artifacts, &Sources { pinned });
    let start = jiff::Timestamp::from_nanosecond(i128::from(profile.start_ns))?;
    let host: String = profile
        .origin
        .hostname
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' })
        .collect();
    // To the millisecond and with the capture: windows may be short, collectors many on a host.
    let id = path
        .file_stem()
        .and_then(|stem| stem.to_str())
        .and_then(|stem| stem.get(..8))
        .unwrap_or("capture");
    let name = format!("{host}-{}-{id}-on-cpu.pb.gz", start.strftime("%Y%m%d%H%M%S%3f"));
    let written = config.output_dir.join(name);
    let out = tempfile::NamedTempFile::new_in(&config.output_dir)?;
    export::pprof(&profile, &PprofOptions { tags: config.tags.clone() }, io::BufWriter::new(&out))?;
    out.persist(&written)?;
    Ok(Some(written))
}

/// Removes the oldest finished logs beyond `most` bytes.
fn prune(directory: &Path, most: u64) {
    let mut logs: Vec<_> = files(directory, "stackwire")
        .into_iter()
        .filter_map(|path| {
            let metadata = fs::metadata(&path).ok()?;
            Some((metadata.modified().ok()?, metadata.len(), path))
        })
        .collect();
    logs.sort();
    let mut bytes: u64 = logs.iter().map(|(_, length, _)| length).sum();
    for (_, length, path) in logs {
        if bytes <= most {
            break;
        }
        if fs::remove_file(&path).is_ok() {
            bytes -= length;
        }
    }
}

fn files(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    paths.sort();
    paths
}
