//! What a process may, and giving it up: capabilities, and directories that nobody else can lead
//! elsewhere; and memory it does not keep. For both halves.

pub mod capabilities;
pub mod directory;
pub mod memory;
