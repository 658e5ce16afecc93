//! x86-64.

pub mod frame;

use seccompiler::TargetArch;
use stackwire_model::Machine;

/// What it is.
pub const MACHINE: Machine = Machine::X86_64;

/// The eBPF programs, compiled from `collector-ebpf/`.
pub const OBJECT: Option<&[u8]> = Some(aya::include_bytes_aligned!("../../ebpf/stackwire.bpf.o"));

/// Whose system calls filters are about.
pub const SECCOMP: TargetArch = TargetArch::x86_64;

/// Calls that newer ones replace, and that the C library still makes.
pub const OLDER_CALLS: &[i64] = &[libc::SYS_fork, libc::SYS_poll];

/// Calls that open files.
pub const OPENING_CALLS: &[i64] = &[libc::SYS_open, libc::SYS_openat];

/// Where `struct task_struct` keeps where a thread's own variables are.
pub const THREAD_POINTER: &str = "thread.fsbase";

/// Whether the kernel's function of this name is where interrupts enter: those that
/// `DECLARE_IDTENTRY_SYSVEC` and `DECLARE_IDTENTRY_IRQ` of arch/x86/include/asm/idtentry.h make.
pub fn is_interrupt_entry(name: &str) -> bool {
    let name = name.strip_prefix("asm_").unwrap_or(name);
    name.starts_with("sysvec_") || name == "common_interrupt"
}
