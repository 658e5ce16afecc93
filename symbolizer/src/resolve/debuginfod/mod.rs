//! The debuginfod client: gets files by build-id from servers, which are asked in order. It is a
//! [`Tier`] behind the cache. The cache keeps what came and remembers what did not.
//!
//! A server that stalls, dies or lies costs a bounded time once and is then left alone. What it
//! could not give is a reason for the report. The protocol is elfutils' (debuginfod(8)):
//! `GET /buildid/HEX/{debuginfo,executable,section/NAME}`, hex in lower case. `ladder.rs` uses
//! this, from threads that may wait.

mod ask;
mod progress;
mod server;

use std::io;
use std::time::{Duration, Instant};

use reqwest::Client;
use sha2::{Digest, Sha256};
use stackwire_cache::{Absent, Blob, Cache, Id, Key, Kind, Meta, Pending, Tier};
use stackwire_model::BuildId;
use tokio::runtime::Runtime;

use self::server::Server;
use crate::causes::chain;
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
        let servers = urls.iter().map(|url| Server::new(url)).collect::<Result<Vec<_>, _>>()?;
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
    /// See [`Absent`].
    pub fn fetch(
        &self,
        build_id: BuildId,
        artifact: Artifact,
        cache: &Cache,
        deadline: Instant,
        metrics: &Metrics,
    ) -> Result<Blob, Absent> {
        let servers = Servers { client: self, metrics };
        cache.get_through(&servers, &(build_id, artifact), deadline)
    }
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

/// The servers, and who counts what they give.
struct Servers<'a> {
    client: &'a Debuginfod,
    metrics: &'a Metrics,
}

impl Tier for Servers<'_> {
    type Wanted = (BuildId, Artifact);

    fn key(&self, &(build_id, artifact): &Self::Wanted) -> Key {
        artifact.key(build_id)
    }

    fn name(&self) -> String {
        let servers = self.client.servers.iter().map(|server| server.shown.as_str());
        servers.collect::<Vec<_>>().join(" ")
    }

    fn get<'s>(
        &self,
        &(build_id, artifact): &Self::Wanted,
        store: &'s Cache,
        deadline: Instant,
    ) -> Result<(Pending<'s>, Meta), Absent> {
        let Some(runtime) = &self.client.runtime else {
            return Err(Absent::Failed("the client is closed".to_owned()));
        };
        let started = Instant::now();
        let left = deadline.saturating_duration_since(started);
        let fetched = runtime.block_on(async {
            let all = self.client.ask_servers(build_id, artifact, store);
            tokio::time::timeout(left, all).await.unwrap_or_else(|_elapsed| {
                let seconds = self.client.timeout.as_secs_f32();
                Err(Absent::Failed(format!(
                    "not there within the {seconds} s of --symbol-fetch-timeout"
                )))
            })
        });
        let (outcome, bytes) = match &fetched {
            Ok((pending, _)) => ("ok", pending.bytes()),
            Err(Absent::Missing(_)) => ("missing", 0),
            Err(Absent::Malformed(_)) => ("malformed", 0),
            Err(Absent::TooLarge(_)) => ("too_large", 0),
            Err(_) => ("failed", 0),
        };
        self.metrics.fetched(artifact.label(), outcome, started.elapsed(), bytes);
        fetched
    }

    fn negative(&self, absent: &Absent) -> Option<Duration> {
        match absent {
            Absent::Missing(_) => Some(MISSING_FOR),
            Absent::Malformed(_) => Some(MALFORMED_FOR),
            _ => None,
        }
    }
}
