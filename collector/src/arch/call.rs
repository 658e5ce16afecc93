//! A call that a thread of another process is made to do, in words that each processor has.

/// General registers, as ptrace(2) has them.
pub type Registers = libc::user_regs_struct;

/// Registers and signal mask of a thread that is stopped.
#[derive(Clone, Debug)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "no thread is made to do a call there")
)]
pub struct Thread {
    /// General registers.
    pub registers: Registers,
    /// The vector state, as ptrace(2) has it.
    pub vectors: Vec<u8>,
    /// Signals that are blocked, one bit each.
    pub mask: u64,
}

/// A function and what it is called with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its address.
    pub function: u64,
    /// Arguments, all of them integers.
    pub arguments: [u64; 6],
}

/// What makes the thread do the call.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// Registers to be set.
    pub registers: Registers,
    /// Where on the stack the frame belongs.
    pub at: u64,
    /// The frame.
    pub frame: Vec<u8>,
}

/// A thread cannot be made to do a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfit;
