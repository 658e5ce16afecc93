//! x86-64.

pub mod builtins;
mod code;
pub mod expression;
pub mod go;
mod go_stacks;
pub mod startup;
