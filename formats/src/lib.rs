//! Formats of profiles, a folder each: `read.rs` makes a profile of a file, `write.rs` a file of a
//! resolved profile.
//!
//! Asks for nothing: no network, no names, no path of this host. What readers need of the host the
//! profile may be from comes through [`Host`]. Captures are read by the symbolizer: they are the
//! wire.

pub mod compare;
mod error;
pub mod flamegraph;
pub mod folded;
#[cfg(fuzzing)]
pub mod fuzz;
pub mod gperftools;
mod host;
mod kernel_place;
mod percent;
pub mod perf_data;
mod plain;
pub mod pprof;
pub mod report;
mod tasks;

pub use self::error::ReadError;
pub use self::host::{Elsewhere, Host, Module};
pub use self::kernel_place::places as kernel_places;
pub use self::plain::plain;
