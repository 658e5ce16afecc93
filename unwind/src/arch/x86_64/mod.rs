//! x86-64.

mod code;
pub mod expression;
pub mod go;
mod go_stacks;
pub mod startup;
pub mod v8;
