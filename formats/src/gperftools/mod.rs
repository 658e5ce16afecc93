//! CPU profiles of gperftools, which are read and not written.

mod read;

pub use self::read::{is_one, read};
