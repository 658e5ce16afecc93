//! pprof: `profile.proto`, as every agent writes and `go tool pprof` reads it.

mod mappings;
mod proto;
mod read;
mod write;

pub use self::read::read;
pub use self::write::{Options, Part, write};
