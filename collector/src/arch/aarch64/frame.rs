//! Threads are not made to do calls here yet: nobody has shown that they go on unharmed.

use crate::arch::call::{Call, Prepared, Registers, Thread, Unfit};

/// As which ptrace(2) has the vector state.
pub const VECTORS: usize = libc::NT_PRFPREG as usize;

/// As which it has the state of a shadow stack.
pub const SHADOW_STACK: Option<usize> = None;

/// Whether a thread is stopped in a system call. What is done to it does not depend on it.
pub fn is_in_call(_registers: &Registers) -> bool {
    false
}

/// The address of its next instruction.
pub fn instruction(registers: &Registers) -> u64 {
    registers.pc
}

/// Where the thread's own data is. What is done to it does not depend on it.
pub fn thread_pointer(_registers: &Registers) -> u64 {
    0
}

/// Lets no thread do a call.
///
/// # Errors
/// Always.
pub fn prepare(_thread: &Thread, _call: Call, _restorer: u64) -> Result<Prepared, Unfit> {
    Err(Unfit)
}
