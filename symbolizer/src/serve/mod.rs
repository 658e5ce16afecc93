//! `stackwire serve`: many collectors at once, each with a durable log, a profile for every window.
//!
//! A stream's log is a file a window, `CAPTURE-WINDOW.open` while it grows and `.stackwire` once
//! its profile is written. A server that was killed finds its `.open` files at the next start and
//! finishes them; a collector that comes back is told which epochs are held already.

mod keeper;
mod window;

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};

use self::keeper::Keepers;
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
    /// Most bytes of finished logs kept; the oldest go first.
    pub log_max: u64,
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
    // Two servers on one directory would finish each other's logs.
    let lock = fs::File::create(config.log_dir.join("lock"))
        .map_err(|error| ServeError::Directory { path: config.log_dir.clone(), error })?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .map_err(|_held| ServeError::Taken { path: config.log_dir.clone() })?;
    let listen = config.listen.clone();
    let failed = |error| ServeError::Listen { address: listen.clone(), error };
    let (alive, mut all_gone) = tokio::sync::mpsc::channel(1);
    let (close, closing) = tokio::sync::watch::channel(false);
    let config = Arc::new(config);
    let keepers = Arc::new(Keepers::new(config, alive));
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
