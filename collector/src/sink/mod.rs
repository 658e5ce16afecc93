//! Where epochs go: a capture file, or a symbolizer over gRPC. Each runs on its own thread and
//! takes from the [`Outbox`](crate::outbox::Outbox).

mod address;
mod credentials;
mod file;
mod sending;
mod stream;
mod upload;

use std::io;
use std::time::Duration;

pub use self::address::{Address, AddressError};
pub use self::credentials::Credentials;
pub use self::file::run as write_file;
pub use self::stream::Broken;
pub use self::upload::{Target, run as upload};

/// A sink that could not deliver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SinkError {
    /// Writing the capture.
    #[error("cannot write the capture to {path}: {error}")]
    Write {
        /// File, or what stands for it.
        path: String,
        /// What the system said.
        error: io::Error,
    },
    /// Reading the spool back.
    #[error("cannot read the spool file: {0}")]
    Spool(io::Error),
    /// Nowhere to send to.
    #[error("no symbolizer to send to")]
    NoTarget,
    /// Not connected, or no longer.
    #[error("cannot reach the symbolizer at {target}: {broken}")]
    Unreachable {
        /// Its address.
        target: String,
        /// Why.
        broken: Broken,
    },
    /// Time was over before all was acknowledged.
    #[error("not everything was delivered within {} s: {cause}", .drain.as_secs_f32())]
    Undelivered {
        /// The time there was.
        drain: Duration,
        /// What kept it.
        cause: String,
    },
    /// It does not read the format.
    #[error(
        "the symbolizer at {target} refused the capture: {broken}; use a newer stackwire there"
    )]
    Refused {
        /// Its address.
        target: String,
        /// Why.
        broken: Broken,
    },
}
