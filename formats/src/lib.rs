//! Formats of profiles, a folder each: `read.rs` makes a profile of a file, `write.rs` a file of a
//! resolved profile.
//!
//! This crate looks for nothing: it uses no network, finds no names and opens no path of this host.
//! Readers may need something of the host that the profile may be from: they get it through
//! [`Host`]. The symbolizer reads captures, since they are the wire format.

pub mod compare;
mod error;
pub mod flamegraph;
pub mod folded;
#[cfg(feature = "fuzzing")]
pub mod fuzz;
pub mod gperftools;
mod host;
mod kernel_place;
mod percent;
pub mod perf_data;
mod plain;
pub mod pmu;
pub mod pprof;
pub mod report;
pub mod stat;
mod tasks;

pub use self::error::ReadError;
pub use self::host::{Elsewhere, Host, Module};
pub use self::kernel_place::places as kernel_places;
pub use self::plain::plain;
