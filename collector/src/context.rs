//! What samples and waits are added to, and by what they are told. For those who add them:
//! `adding.rs` and `off_cpu.rs`.

use crate::batch::Epoch;
use crate::codes::Codes;
use crate::host::kallsyms::KernelLayout;
use crate::process::Processes;

/// See the top of this file.
#[derive(Debug)]
pub struct Context<'a> {
    /// Functions of interpreters.
    pub codes: &'a Codes,
    /// What is known of processes.
    pub processes: &'a mut Processes,
    /// Where the kernel's code is.
    pub layout: &'a KernelLayout,
    /// The epoch.
    pub epoch: &'a mut Epoch,
}
