//! `stackwire serve`: many collectors at once, each with durable logs, a profile for every window.
//!
//! A window of a capture has a log, `CAPTURE-NUMBER.stackwire`, and a row in the index that says
//! how far it has come: open, closed, written. A server that was killed goes on from there at the
//! next start; a collector that comes back is told which epochs are held already.

mod answers;
mod api;
mod asked;
mod changed;
mod closing;
mod counted;
mod counts;
mod crowd;
mod fetch;
mod id;
mod identity;
mod index;
mod keeper;
mod limits;
mod listen;
mod live;
mod profiles;
mod pulse;
mod push;
mod pushed;
mod pyroscope;
mod queue;
mod retention;
mod store;
#[cfg(test)]
mod tests;
mod tls;
mod turns;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;

pub use self::answers::{Capture, Captures, Format, Windows};
use self::api::Api;
use self::closing::Closing;
use self::counts::Counts;
use self::crowd::Crowd;
pub use self::identity::Allowed;
use self::identity::Door;
use self::keeper::{AllHanded, Keepers, Shared};
use self::limits::Ledger;
pub use self::limits::Limits;
pub use self::listen::Listen;
use self::listen::Listener;
use self::pulse::Pulse;
use self::push::Pushing;
pub use self::pyroscope::Pyroscope;
use self::pyroscope::Receiver;
pub use self::store::Keep;
use self::store::{Places, Store};
use self::tls::Certificates;
pub use self::tls::Tls;
use crate::receive::grpc::service;
use crate::resolve::Sources;

/// How to serve.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen.
    pub listen: Vec<Listen>,
    /// TLS of TCP connections; without it they are in clear text.
    pub tls: Option<Tls>,
    /// Clear text may come from other hosts.
    pub is_insecure: bool,
    /// Who may come.
    pub allowed: Allowed,
    /// Where profiles go.
    pub output_dir: PathBuf,
    /// Where logs go.
    pub log_dir: PathBuf,
    /// How many logs are kept once their profiles are written.
    pub keep_logs: Keep,
    /// How many profiles are kept.
    pub keep_profiles: Keep,
    /// How long profiles may take that are written when the server stops. What is left is written
    /// by the next one.
    pub drain_timeout: Duration,
    /// Names of clients that see what others sent: `token:NAME`, `certificate:NAME`, `uid:NUMBER`.
    pub readers: Vec<String>,
    /// What clients may take.
    pub limits: Limits,
    /// Length of a window by the stream's clock.
    pub window: Duration,
    /// Where profiles are pushed to, once they are written.
    pub push: Option<Pyroscope>,
    /// `key=value` comments for every profile.
    pub tags: Vec<String>,
    /// Where names are looked for.
    pub sources: Arc<Sources>,
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
    /// Another server.
    #[error(
        "another stackwire serve keeps its logs in {path}: give this one another --log-dir or --output-dir"
    )]
    Taken {
        /// The directory.
        path: PathBuf,
    },
    /// What is to be done with logs is not known.
    #[error("{0}")]
    Index(String),
    /// Certificates, tokens.
    #[error("{0}")]
    Credentials(io::Error),
    /// Everybody could read and write everything.
    #[error(
        "{0} can be reached from other hosts, and there is no TLS: give --tls-cert and --tls-key, or --insecure if the network may be trusted"
    )]
    ClearText(String),
    /// What takes profiles.
    #[error("cannot push to {url}: {error}")]
    Push {
        /// Where it is.
        url: String,
        /// Certificates that cannot be used.
        error: io::Error,
    },
    /// No thread for profiles.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The address.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        error: io::Error,
    },
    /// The contract that is built in.
    #[error("cannot tell what is spoken here: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// tonic.
    #[error("the server failed: {0}")]
    Server(#[from] tonic::transport::Error),
}

/// Largest message of somebody who was not let in.
const STRANGERS: usize = 4096;
/// Bytes that a stream and a connection may send before they are looked at.
const STREAM_AHEAD: u32 = 128 << 10;
const CONNECTION_AHEAD: u32 = 512 << 10;
/// Connections at a time; further ones wait.
const MAX_CONNECTIONS: usize = 4096;

/// Serves until `shutdown` is over; streams that run then are finished with what they brought.
/// `ready` is told each address that is listened on.
///
/// # Errors
/// See [`ServeError`].
pub async fn run(
    config: Config,
    ready: impl Fn(&str),
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let door = Door::new(config.allowed.clone()).map_err(ServeError::Credentials)?;
    let certificates = config.tls.clone().map(Certificates::new).transpose();
    let certificates = certificates.map_err(ServeError::Credentials)?.map(Arc::new);
    let (close, closing) = tokio::sync::watch::channel(false);
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(stackwire_proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    // Before windows are begun to be resolved: one that is ended by that counts it.
    let receiver = match config.push.clone() {
        None => None,
        Some(at) => {
            let mut shown = at.url.clone();
            shown.set_query(None);
            let receiver = Receiver::new(at);
            Some(receiver.map_err(|error| ServeError::Push { url: shown.to_string(), error })?)
        }
    };
    let store = Arc::new(Store::open(Places {
        logs: config.log_dir.clone(),
        profiles: config.output_dir.clone(),
        keep_logs: config.keep_logs,
        keep_profiles: config.keep_profiles,
        is_pushing: config.push.is_some(),
    })?);
    // After the lock: a second server must not take this one's sockets away.
    let mut listeners = Vec::new();
    for listen in &config.listen {
        let listener = Listener::bind(listen, &config.allowed).await;
        let listener =
            listener.map_err(|error| ServeError::Listen { address: listen.to_string(), error })?;
        let address = listener.address(listen);
        if listener.is_open() && certificates.is_none() && !config.is_insecure {
            return Err(ServeError::ClearText(address));
        }
        listeners.push((listener, address));
    }
    profiles::remove_unfinished(&config);
    let config = Arc::new(config);
    let (counts, registry) = Counts::new();
    config.sources.metrics.add(registry);
    let shared = Arc::new(Shared {
        store: Arc::clone(&store),
        counts: counts.clone(),
        pins: Arc::default(),
        handed: AllHanded::default(),
        turns: Arc::default(),
        live: Arc::default(),
    });
    let (alive, mut all_gone) = tokio::sync::watch::channel(0);
    let ledger = Arc::new(Ledger::new(config.limits));
    let threads = Closing {
        config: Arc::clone(&config),
        store: Arc::clone(&store),
        counts: counts.clone(),
        ledger: Arc::clone(&ledger),
        pins: Arc::clone(&shared.pins),
    }
    .start()
    .map_err(ServeError::Thread)?;
    let pushing = receiver.map(|receiver| {
        let pushing = Pushing {
            config: Arc::clone(&config),
            store: Arc::clone(&store),
            counts: counts.clone(),
            ledger: Arc::clone(&ledger),
            receiver,
            closing: closing.clone(),
        };
        pushing.start()
    });
    let pushing = pushing.transpose().map_err(ServeError::Thread)?;
    let keepers = Arc::new(Keepers { config: Arc::clone(&config), shared, door, ledger, alive });
    let (reporter, health) = tonic_health::server::health_reporter();
    let pulse = Pulse {
        store: Arc::clone(&store),
        ledger: Arc::clone(&keepers.ledger),
        counts: counts.clone(),
        metrics: Arc::clone(&config.sources.metrics),
        reporter,
    };
    let pulse = tokio::spawn(pulse.beat(closing.clone()));
    let service = service(Arc::clone(&keepers), closing);
    let turns = Arc::new(Semaphore::new(api::FETCHES));
    let api = api::router(Arc::new(Api { keepers, readers: config.readers.clone(), turns }));
    // What strangers say is short.
    let health = health.max_decoding_message_size(STRANGERS);
    let reflection = reflection.max_decoding_message_size(STRANGERS);
    let grpc = Routes::new(service).add_service(health).add_service(reflection);
    let server = tonic::transport::Server::builder()
        // For who asks as people do.
        .accept_http1(true)
        .initial_stream_window_size(STREAM_AHEAD)
        .initial_connection_window_size(CONNECTION_AHEAD)
        .http2_keepalive_interval(Some(Duration::from_secs(20)))
        .add_routes(Routes::from(grpc.into_axum_router().merge(api)));
    let (accepted, incoming) = mpsc::channel(16);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let crowd = Crowd::of(MAX_CONNECTIONS);
    for (listener, address) in listeners {
        ready(&address);
        let places = (Arc::clone(&places), Arc::clone(&crowd));
        let (certificates, counts) = (certificates.clone(), counts.clone());
        tokio::spawn(listener.run(certificates, places, counts, accepted.clone()));
    }
    tokio::select! {
        result = server.serve_with_incoming(ReceiverStream::new(incoming)) => result?,
        () = shutdown => {}
    }
    // Each stream ends here and closes its window; collectors keep the rest.
    let _ = close.send(true);
    // It says that nobody is served any more.
    let _ = pulse.await;
    let deadline = Instant::now() + config.drain_timeout;
    let _ =
        tokio::time::timeout(config.drain_timeout, all_gone.wait_for(|count| *count == 0)).await;
    let draining = tokio::task::spawn_blocking(move || {
        let left = store.drain(deadline.saturating_duration_since(Instant::now()));
        if left == 0 {
            // They are idle. With the last of them the index is closed.
            threads.into_iter().for_each(|thread| drop(thread.join()));
        }
        while pushing.as_ref().is_some_and(|it| !it.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        left
    });
    if let Ok(left @ 1..) = draining.await {
        tracing::warn!("{left} windows have no profile yet: the next start writes them");
    }
    Ok(())
}
