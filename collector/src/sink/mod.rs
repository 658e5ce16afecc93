//! Where epochs go: a capture file, or a symbolizer over gRPC. Each runs on its own thread and
//! takes from the [`Outbox`](crate::outbox::Outbox).

mod file;
mod sending;
mod upload;

use std::io;

pub use self::file::run as write_file;
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
    /// The target is not an address.
    #[error(
        "{0} is not an address of a symbolizer; write unix:/path/to/socket or http://host:port"
    )]
    Target(String),
    /// Not connected, or no longer.
    #[error("cannot reach the symbolizer at {target}: {cause}")]
    Unreachable {
        /// Its address.
        target: String,
        /// Why.
        cause: String,
    },
    /// It speaks a newer contract, or refused the stream.
    #[error("the symbolizer at {target} refused the capture: {cause}")]
    Refused {
        /// Its address.
        target: String,
        /// Why.
        cause: String,
    },
}
