//! The text report, whole or made for a terminal.

mod problems;
mod short;
mod terminal;
mod unwinding;
mod write;

pub use self::terminal::Terminal;
pub(crate) use self::write::{Counts, by_value, functions, sources};
pub use self::write::{Options, Sort, Window, write};
