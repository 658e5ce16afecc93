//! Folded stacks, a line a stack, as flame graph tools read and write them.

mod read;
mod write;

pub use self::read::read;
pub use self::write::write;
pub(crate) use self::write::{Marks, WAIT_MARK, clean, lines, lines_of, stack};
