//! Processes of ours that do what the collector must not: open files of other processes, and parse.
//!
//! Both are forked from the collector before it has threads. `channel.rs` has how they are started,
//! asked and answered; `broker/` and `compiler.rs` what they do. Each can do what its name says and
//! nothing else, so that no process has both privileges and a parser.

pub mod broker;
mod channel;
pub mod compiler;
pub mod interpreter;
