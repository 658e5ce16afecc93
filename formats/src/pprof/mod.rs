//! pprof: `profile.proto`, as every agent writes and `go tool pprof` reads it.

mod mappings;
mod proto;
mod read;
mod split;
mod write;

pub use self::read::read;
pub use self::split::{Largest, Piece, SPLIT, split};
pub use self::write::{Options, Part, write};
