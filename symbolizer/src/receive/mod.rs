//! Receiving: a collector's stream over gRPC, kept on disk before it is acknowledged, with the
//! files the collector hands over.
//!
//! What becomes of a stream is decided by `session/` (one client, one log) and `serve/` (many).

pub mod allowance;
pub mod grpc;
pub mod handed;
pub mod log;
pub mod messages;
pub mod peer;
pub mod tenant;
pub mod transfer;
pub mod wants;
