//! `stackwire serve`: many collectors at once, each with durable logs, a profile for every window.
//!
//! A window of a capture has a log, `CAPTURE-NUMBER.stackwire`, and a row in the index that says
//! how far it has come: open, closed, written. A server that was killed goes on from there at the
//! next start; a collector that comes back is told which epochs are held already.

mod closing;
mod id;
mod index;
mod keeper;
mod profiles;
mod store;
mod turns;

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};

use self::closing::Closing;
use self::keeper::{Keepers, Shared};
pub use self::store::Keep;
use self::store::{Places, Store};
use crate::receive::grpc::service;
use crate::resolve::Sources;

/// How to serve.
#[derive(Clone, Debug)]
pub struct Config {
    /// `host:port`, or `unix:/path/to/socket`.
    pub listen: String,
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
    /// Length of a window by the stream's clock.
    pub window: Duration,
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
    let listen = config.listen.clone();
    let failed = |error| ServeError::Listen { address: listen.clone(), error };
    let (close, closing) = tokio::sync::watch::channel(false);
    let store = Arc::new(Store::open(Places {
        logs: config.log_dir.clone(),
        profiles: config.output_dir.clone(),
        keep_logs: config.keep_logs,
        keep_profiles: config.keep_profiles,
    })?);
    profiles::remove_unfinished(&config);
    let config = Arc::new(config);
    let shared = Arc::new(Shared {
        store: Arc::clone(&store),
        pins: Arc::default(),
        handed: Arc::default(),
        turns: Arc::default(),
    });
    let (alive, mut all_gone) = tokio::sync::watch::channel(0);
    let threads = Closing {
        config: Arc::clone(&config),
        store: Arc::clone(&store),
        pins: Arc::clone(&shared.pins),
        handed: Arc::clone(&shared.handed),
    }
    .start()
    .map_err(ServeError::Thread)?;
    let keepers = Arc::new(Keepers { config: Arc::clone(&config), shared, alive });
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
    // Each stream ends here and closes its window; collectors keep the rest.
    let _ = close.send(true);
    let deadline = Instant::now() + config.drain_timeout;
    let _ =
        tokio::time::timeout(config.drain_timeout, all_gone.wait_for(|count| *count == 0)).await;
    let draining = tokio::task::spawn_blocking(move || {
        let left = store.drain(deadline.saturating_duration_since(Instant::now()));
        if left == 0 {
            // They are idle. With the last of them the index is closed.
            threads.into_iter().for_each(|thread| drop(thread.join()));
        }
        left
    });
    if let Ok(left @ 1..) = draining.await {
        tracing::warn!("{left} windows have no profile yet: the next start writes them");
    }
    Ok(())
}

fn is_socket(found: &fs::Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    found.file_type().is_socket()
}
