//! The text report, whole or made for a terminal.

mod amounts;
mod beside;
mod cpu_time;
mod functions;
mod groups;
mod lines;
mod options;
mod problems;
mod short;
mod terminal;
mod unwinding;
mod write;

pub(crate) use self::functions::{Counts, functions};
pub use self::options::{Options, Sort, Window};
pub use self::terminal::Terminal;
pub use self::write::write;
pub(crate) use self::write::{by_value, sources};
