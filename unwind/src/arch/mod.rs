//! What compiling tables takes to know of the processor: its registers, and what its instructions
//! do to frames where call frame information says nothing. A directory a processor; nothing outside
//! asks which it is.

mod x86_64;

pub use self::x86_64::{builtins, expression, go, startup};
