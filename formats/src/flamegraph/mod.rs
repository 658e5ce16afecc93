//! Interactive SVG flame graphs, which are written and not read.

mod tooltip;
mod write;

pub use self::write::{Flames, amount, diff, write};
