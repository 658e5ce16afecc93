//! The debuginfod client: files by build-id from servers, in order, into the cache. One fetch a
//! file however many ask.
//!
//! A server that stalls, dies or lies costs a bounded time once and is then left alone; what it
//! could not give is a reason for the report. The protocol is elfutils' (debuginfod(8)): `GET
//! /buildid/HEX/{debuginfo,executable,section/NAME}`, hex in lower case. Used by `ladder.rs`, from
//! threads that may wait.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::{Client, Response, StatusCode};
use sha2::{Digest, Sha256};
use stackwire_cache::{Blob, Cache, CacheError, Id, Key, Kind, Meta, Negative, Pending};
use stackwire_elf::{Elf, Scratch};
use stackwire_model::BuildId;
use tokio::runtime::Runtime;

use crate::metrics::Metrics;

/// Why servers cannot be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DebuginfodError {
    /// An address is none.
    #[error("{0:?} is no debuginfod server: http://HOST[:PORT] is one")]
    NotAServer(String),
    /// TLS cannot be set up.
    #[error("{}", chain(.0))]
    Client(reqwest::Error),
    /// There is no thread to be had.
    #[error(transparent)]
    Runtime(#[from] io::Error),
}

/// Why a file did not come.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// No server has it; remembered.
    #[error("no server had build-id {0}")]
    Missing(String),
    /// What the servers sent cannot be used; remembered.
    #[error("{0}")]
    Malformed(String),
    /// It does not fit into the cache. Sections of it may.
    #[error("{0}")]
    TooLarge(String),
    /// It might come another time.
    #[error("{0}")]
    Failed(String),
}

impl From<CacheError> for FetchError {
    fn from(error: CacheError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// What is asked for, of a build-id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Artifact {
    /// The executable.
    Executable,
    /// The file with its debug information.
    Debuginfo,
    /// The content of a section, wherever the server has it.
    Section(&'static str),
}

impl Artifact {
    /// The words of the protocol.
    pub fn path(self) -> String {
        match self {
            Self::Executable => "executable".to_owned(),
            Self::Debuginfo => "debuginfo".to_owned(),
            Self::Section(name) => format!("section/{name}"),
        }
    }

    /// For the metrics, of which there must not be many.
    fn label(self) -> &'static str {
        match self {
            Self::Executable => "executable",
            Self::Debuginfo => "debuginfo",
            Self::Section(_) => "section",
        }
    }

    /// What it is kept under; a section is no file that gdb or perf could read, and has a name of
    /// its own.
    fn key(self, build_id: BuildId) -> Key {
        match self {
            Self::Executable => Key::new(build_id.into(), Kind::Executable),
            Self::Debuginfo => Key::new(build_id.into(), Kind::Debuginfo),
            Self::Section(name) => {
                let hash = Sha256::new().chain_update(build_id).chain_update(name).finalize();
                Key::new(Id::of_hash(hash.into()), Kind::Other)
            }
        }
    }
}

/// What is asked for and where it will be kept.
struct Asked {
    artifact: Artifact,
    build_id: BuildId,
    key: Key,
}

/// Servers, and how long and how much may be waited for.
#[derive(Debug)]
pub struct Debuginfod {
    servers: Vec<Server>,
    client: Client,
    warning: Option<String>,
    timeout: Duration,
    /// Taken when dropped.
    runtime: Option<Runtime>,
}

#[derive(Debug)]
struct Server {
    url: String,
    /// Without a password.
    shown: String,
    /// Failures in a row, and when it may be asked again.
    breaker: Mutex<(u32, Option<Instant>)>,
}

/// Largest file taken; debug information of a browser has 5 GB.
const MAX_BYTES: u64 = 8 << 30;
/// Tries of a server that answers with 5xx or is cut off.
const TRIES: u32 = 3;
/// Before the second try; four times as long before the third.
const BACK_OFF: Duration = Duration::from_millis(100);
/// Failures in a row after which a server is left alone for a while.
const MAX_FAILURES: u32 = 2;
/// How long.
const COOL_DOWN: Duration = Duration::from_secs(60);
/// How long an answer that there is nothing holds: debug packages are published hours after their
/// binaries.
const MISSING_FOR: Duration = Duration::from_secs(3600);
/// How long an answer that cannot be used holds.
const MALFORMED_FOR: Duration = Duration::from_secs(600);

impl Debuginfod {
    /// A client of these servers. `timeout`: for all files of a profile together; a server that is
    /// silent for a third of it is given up.
    ///
    /// # Errors
    /// See [`DebuginfodError`].
    pub fn new(urls: &[String], timeout: Duration) -> Result<Self, DebuginfodError> {
        let servers = urls.iter().map(|url| {
            let good =
                reqwest::Url::parse(url).is_ok_and(|url| matches!(url.scheme(), "http" | "https"));
            if !good {
                return Err(DebuginfodError::NotAServer(url.clone()));
            }
            let url = url.trim_end_matches('/').to_owned();
            let shown =
                match url.split_once("://").map(|(scheme, rest)| (scheme, rest.rsplit_once('@'))) {
                    Some((scheme, Some((_, host)))) => format!("{scheme}://{host}"),
                    _ => url.clone(),
                };
            Ok(Server { url, shown, breaker: Mutex::default() })
        });
        let servers = servers.collect::<Result<Vec<_>, _>>()?;
        // Fails when it was done before, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = || {
            Client::builder()
                .user_agent(concat!("stackwire/", env!("CARGO_PKG_VERSION")))
                .connect_timeout(timeout / 3)
        };
        // A host without certificates of authorities trusts no server with TLS; those without need
        // none.
        let (client, warning) = match builder().build() {
            Ok(client) => (client, None),
            Err(error) => {
                let client = builder().tls_certs_only([]).build();
                let warning = chain(&error);
                (client.map_err(|_same| DebuginfodError::Client(error))?, Some(warning))
            }
        };
        let with_tls = |server: &Server| server.url.starts_with("https:");
        let warning = warning.filter(|_| servers.iter().any(with_tls));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("fetch")
            .enable_all()
            .build()?;
        Ok(Self { servers, client, warning, timeout, runtime: Some(runtime) })
    }

    /// Why servers with TLS will give nothing, if it is known already.
    #[must_use]
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// How long all files of a profile may take together.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A file: from the cache, else from the first server that has it. Waits until `deadline` at
    /// most.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub fn fetch(
        &self,
        build_id: BuildId,
        artifact: Artifact,
        cache: &Cache,
        deadline: Instant,
        metrics: &Metrics,
    ) -> Result<Blob, FetchError> {
        let key = artifact.key(build_id);
        if let Some(blob) = cache.get(&key)? {
            return Ok(blob);
        }
        self.remembered(cache, &key)?;
        let left = || deadline.saturating_duration_since(Instant::now());
        let Some(_lock) = cache.lock(&key, left())? else {
            return Err(FetchError::Failed("another process is still fetching it".to_owned()));
        };
        // Whoever had the lock before may have fetched it.
        if let Some(blob) = cache.get(&key)? {
            return Ok(blob);
        }
        self.remembered(cache, &key)?;
        let Some(runtime) = &self.runtime else {
            return Err(FetchError::Failed("the client is closed".to_owned()));
        };
        let started = Instant::now();
        let asked = Asked { artifact, build_id, key: key.clone() };
        let fetched = runtime.block_on(async {
            let all = self.ask_servers(&asked, cache);
            tokio::time::timeout(left(), all).await.unwrap_or_else(|_elapsed| {
                let seconds = self.timeout.as_secs_f32();
                Err(FetchError::Failed(format!(
                    "not there within the {seconds} s of --symbol-fetch-timeout"
                )))
            })
        });
        let (outcome, bytes) = match &fetched {
            Ok(blob) => ("ok", blob.file.metadata().map_or(0, |metadata| metadata.len())),
            Err(FetchError::Missing(_)) => ("missing", 0),
            Err(FetchError::Malformed(_)) => ("malformed", 0),
            Err(FetchError::TooLarge(_)) => ("too_large", 0),
            Err(FetchError::Failed(_)) => ("failed", 0),
        };
        metrics.fetched(artifact.label(), outcome, started.elapsed(), bytes);
        match &fetched {
            Err(FetchError::Missing(id)) => {
                let negative = Negative::Missing(self.with_servers(id));
                cache.put_negative(&key, &negative, MISSING_FOR)?;
            }
            Err(FetchError::Malformed(why)) => {
                let negative = Negative::Malformed(self.with_servers(why));
                cache.put_negative(&key, &negative, MALFORMED_FOR)?;
            }
            _ => {}
        }
        fetched
    }

    /// An answer from before that still holds: of these servers and no others.
    fn remembered(&self, cache: &Cache, key: &Key) -> Result<(), FetchError> {
        let of_ours = |text: String| text.strip_prefix(&self.with_servers("")).map(str::to_owned);
        match cache.negative(key)? {
            Some(Negative::Missing(text)) => {
                of_ours(text).map_or(Ok(()), |id| Err(FetchError::Missing(id)))
            }
            Some(Negative::Malformed(text)) => {
                of_ours(text).map_or(Ok(()), |why| Err(FetchError::Malformed(why)))
            }
            None => Ok(()),
        }
    }

    fn with_servers(&self, text: &str) -> String {
        let servers: Vec<&str> = self.servers.iter().map(|server| server.shown.as_str()).collect();
        format!("{}\n{text}", servers.join(" "))
    }

    async fn ask_servers(&self, asked: &Asked, cache: &Cache) -> Result<Blob, FetchError> {
        let mut failures = Vec::new();
        let mut malformed = Vec::new();
        let mut too_large = None;
        for server in &self.servers {
            if let Some(why) = server.is_left_alone() {
                failures.push(format!("{}: {why}", server.shown));
                continue;
            }
            match self.ask(server, asked, cache).await {
                Ok(blob) => {
                    server.answered();
                    return Ok(blob);
                }
                Err(FetchError::Missing(_)) => server.answered(),
                Err(FetchError::Malformed(why)) => {
                    server.answered();
                    malformed.push(format!("{}: {why}", server.shown));
                }
                Err(FetchError::TooLarge(why)) => {
                    server.answered();
                    too_large = Some(format!("{}: {why}", server.shown));
                }
                Err(FetchError::Failed(why)) => {
                    server.failed();
                    failures.push(format!("{}: {why}", server.shown));
                }
            }
        }
        if let Some(why) = too_large {
            return Err(FetchError::TooLarge(why));
        }
        // A server that could not be asked may have it: nothing to remember.
        match (failures.is_empty(), malformed.is_empty()) {
            (false, _) => Err(FetchError::Failed(failures.join("; "))),
            (true, false) => Err(FetchError::Malformed(malformed.join("; "))),
            (true, true) => Err(FetchError::Missing(asked.build_id.to_string())),
        }
    }

    async fn ask(&self, server: &Server, asked: &Asked, cache: &Cache) -> Result<Blob, FetchError> {
        let (id, path) = (&asked.build_id, asked.artifact.path());
        let [url, shown] =
            [&server.url, &server.shown].map(|url| format!("{url}/buildid/{id}/{path}"));
        let mut tries = 1;
        loop {
            match self.ask_once(&url, &shown, asked, cache).await {
                Err(Try::Again(why)) if tries == TRIES => {
                    return Err(FetchError::Failed(format!("{why}, {TRIES} times")));
                }
                Err(Try::Again(_)) => {
                    tokio::time::sleep(BACK_OFF * 4u32.pow(tries - 1)).await;
                    tries += 1;
                }
                Err(Try::No(error)) => return Err(error),
                Ok(blob) => return Ok(blob),
            }
        }
    }

    async fn ask_once(
        &self,
        url: &str,
        shown: &str,
        asked: &Asked,
        cache: &Cache,
    ) -> Result<Blob, Try> {
        let stalled = || {
            let seconds = (self.timeout / 3).as_secs_f32();
            Try::No(FetchError::Failed(format!("silent for {seconds:.1} s")))
        };
        let answer = tokio::time::timeout(self.timeout / 3, self.client.get(url).send()).await;
        let answer = answer.map_err(|_elapsed| stalled())?.map_err(|error| cut(&error))?;
        let status = answer.status();
        match status {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => {
                return Err(Try::No(FetchError::Missing(asked.build_id.to_string())));
            }
            _ if status.is_server_error() => return Err(Try::Again(status.to_string())),
            _ => return Err(Try::No(FetchError::Failed(status.to_string()))),
        }
        let declared = answer.content_length();
        if let Some(bytes) = declared.filter(|&bytes| bytes > MAX_BYTES) {
            return Err(Try::No(FetchError::Malformed(format!(
                "sends {bytes} bytes, more than any debug file has"
            ))));
        }
        // What the cache would drop again at once is not fetched.
        let room = cache.max_bytes().min(MAX_BYTES);
        if let Some(bytes) = declared.filter(|&bytes| bytes > room) {
            return Err(Try::No(too_large(bytes, room)));
        }
        let mut pending = cache.begin().map_err(|error| Try::No(error.into()))?;
        let progress = Progress::of(shown, declared);
        self.take_body(answer, &mut pending, stalled, progress, room).await?;
        if !matches!(asked.artifact, Artifact::Section(_)) {
            verify(&pending, asked.build_id).map_err(Try::No)?;
        }
        let meta = Meta { quality: 0, origin: shown.to_owned() };
        pending.keep(&asked.key, meta).map_err(|error| Try::No(error.into()))
    }

    /// Writes the body as it comes: never more than a piece of it is in memory.
    async fn take_body(
        &self,
        mut answer: Response,
        to: &mut Pending<'_>,
        stalled: impl Fn() -> Try,
        mut progress: Progress,
        room: u64,
    ) -> Result<(), Try> {
        let mut taken = 0;
        loop {
            let piece = tokio::time::timeout(self.timeout / 3, answer.chunk()).await;
            let piece = piece.map_err(|_elapsed| stalled())?.map_err(|error| cut(&error))?;
            let Some(piece) = piece else { return Ok(()) };
            taken += piece.len() as u64;
            progress.show(taken);
            if taken > room {
                return Err(Try::No(too_large(taken, room)));
            }
            // A full disk is no fault of the server.
            to.write_all(&piece).map_err(|error| {
                Try::No(FetchError::Failed(format!("cannot write to the cache: {error}")))
            })?;
        }
    }
}

/// How much of a file has come, on a terminal that is looked at.
struct Progress {
    what: String,
    declared: Option<u64>,
    /// When it was shown last; `None`: nobody looks.
    shown: Option<Instant>,
    drawn: bool,
}

impl Progress {
    /// Between two lines.
    const PAUSE: Duration = Duration::from_millis(200);

    fn of(what: &str, declared: Option<u64>) -> Self {
        let shown = std::io::stderr().is_terminal().then(Instant::now);
        Self { what: what.to_owned(), declared, shown, drawn: false }
    }

    fn show(&mut self, taken: u64) {
        if let Some(shown) = self.shown.filter(|shown| shown.elapsed() >= Self::PAUSE) {
            self.shown = Some(shown + shown.elapsed());
            self.drawn = true;
            let megabytes = |bytes: u64| bytes as f64 / 1e6;
            let of =
                self.declared.map_or(String::new(), |all| format!(" of {:.1}", megabytes(all)));
            let (taken, what) = (megabytes(taken), &self.what);
            // The terminal may be gone; the file is not.
            let _ = write!(std::io::stderr(), "\r{taken:.1}{of} MB of {what}\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.drawn {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

fn too_large(bytes: u64, room: u64) -> FetchError {
    FetchError::TooLarge(format!(
        "sends {bytes} bytes, and the cache has room for {room}: raise --symbol-cache-max"
    ))
}

impl Drop for Debuginfod {
    fn drop(&mut self) {
        // Dropped as it is, a runtime waits for its threads, which it must not where the server's
        // runs.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// How a try ended.
enum Try {
    /// Worth another.
    Again(String),
    /// It would end the same way.
    No(FetchError),
}

/// An error of the connection: cut ones are worth another try, others not.
fn cut(error: &reqwest::Error) -> Try {
    let text = chain(error);
    let again = !error.is_redirect() && !error.is_builder() && !error.is_connect();
    if again { Try::Again(text) } else { Try::No(FetchError::Failed(text)) }
}

/// An error with its causes, and without the address it repeats.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = String::new();
    let mut cause = Some(error);
    while let Some(error) = cause {
        let part = error.to_string();
        let part = part.split(" for url").next().unwrap_or_default();
        if !text.contains(part) {
            text += if text.is_empty() { "" } else { ": " };
            text += part;
        }
        cause = error.source();
    }
    text
}

/// Whether what came is what was asked for.
fn verify(pending: &Pending<'_>, build_id: BuildId) -> Result<(), FetchError> {
    let file = pending.reader().map_err(|error| FetchError::Failed(error.to_string()))?;
    let elf = Elf::open(file, &Scratch::default())
        .map_err(|error| FetchError::Malformed(format!("sends what is {error}")))?;
    match elf.ids.gnu {
        Some(id) if id == build_id => Ok(()),
        Some(id) => Err(FetchError::Malformed(format!("sends a file with build-id {id}"))),
        None => Err(FetchError::Malformed("sends a file without a build-id".to_owned())),
    }
}

impl Server {
    fn is_left_alone(&self) -> Option<&'static str> {
        let (_, until) = *self.breaker.lock().unwrap_or_else(PoisonError::into_inner);
        until.filter(|&until| Instant::now() < until).map(|_| "not asked again after it failed")
    }

    fn answered(&self) {
        *self.breaker.lock().unwrap_or_else(PoisonError::into_inner) = (0, None);
    }

    fn failed(&self) {
        let mut breaker = self.breaker.lock().unwrap_or_else(PoisonError::into_inner);
        breaker.0 += 1;
        if breaker.0 >= MAX_FAILURES {
            *breaker = (0, Some(Instant::now() + COOL_DOWN));
        }
    }
}
