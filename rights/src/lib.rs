//! What a process may do, and how it gives that up: capabilities, directories whose path nobody
//! else can redirect, memory that goes back to the system, and how many files may be
//! open. For both halves.

pub mod capabilities;
pub mod descriptors;
pub mod directory;
pub mod memory;
