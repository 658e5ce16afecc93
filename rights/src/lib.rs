//! What a process may do, and how it gives that up: capabilities, directories whose path nobody
//! else can redirect, and memory that goes back to the system. For both halves.

pub mod capabilities;
pub mod directory;
pub mod memory;
