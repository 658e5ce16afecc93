//! arm64. The eBPF programs read registers as x86-64 has them: the collector compiles and says so
//! when it is to sample.

pub mod frame;

use seccompiler::TargetArch;
use stackwire_model::Machine;

/// What it is.
pub const MACHINE: Machine = Machine::Aarch64;

/// There are no eBPF programs for it.
pub const OBJECT: Option<&[u8]> = None;

/// Whose system calls filters are about.
pub const SECCOMP: TargetArch = TargetArch::aarch64;

/// It came after the newer calls: there are none.
pub const OLDER_CALLS: &[i64] = &[];

/// Calls that open files.
pub const OPENING_CALLS: &[i64] = &[libc::SYS_openat];

/// Where `struct task_struct` keeps where a thread's own variables are.
pub const THREAD_POINTER: &str = "thread.uw.tp_value";

/// Whether the kernel's function of this name is where interrupts enter: those of
/// arch/arm64/kernel/entry.S, as `el0t_64_irq`.
pub fn is_interrupt_entry(name: &str) -> bool {
    name.starts_with("el") && (name.ends_with("_irq") || name.ends_with("_fiq"))
}
