//! The registers the kernel saves when it is entered: `struct pt_regs` of
//! arch/x86/include/uapi/asm/ptrace.h.

use aya_ebpf::bindings::pt_regs;

use super::{RBP, REGISTERS, RSP};

/// Requested privilege level 3 in the code segment: the registers are of user mode.
const USER_MODE: u64 = 3;
/// System call numbers of arch/x86/entry/syscalls/syscall_64.tbl.
const EXECVE: u64 = 59;
const EXECVEAT: u64 = 322;
/// `__USER32_CS` of arch/x86/include/asm/segment.h.
const USER32_CS: u64 = 0x23;

/// Whether they are of user mode.
#[inline(always)]
#[must_use]
pub fn is_of_user_mode(regs: &pt_regs) -> bool {
    regs.cs & USER_MODE == USER_MODE
}

/// Whether they are of a 32-bit program.
#[inline(always)]
#[must_use]
pub fn is_compat(regs: &pt_regs) -> bool {
    regs.cs == USER32_CS
}

/// Whether the task they are of is inside execve.
#[inline(always)]
#[must_use]
pub fn is_exec(regs: &pt_regs) -> bool {
    regs.orig_rax == EXECVE || regs.orig_rax == EXECVEAT
}

/// The instruction.
#[inline(always)]
#[must_use]
pub fn ip(regs: &pt_regs) -> u64 {
    regs.rip
}

/// The stack pointer.
#[inline(always)]
#[must_use]
pub fn sp(regs: &pt_regs) -> u64 {
    regs.rsp
}

/// The frame pointer, where the code keeps one.
#[inline(always)]
#[must_use]
pub fn fp(regs: &pt_regs) -> u64 {
    regs.rbp
}

/// All of them by DWARF number, field by field: an array would be copied by a call to memcpy.
#[inline(always)]
pub fn copy(regs: &pt_regs, to: &mut [u64; REGISTERS]) {
    to[0] = regs.rax;
    to[1] = regs.rdx;
    to[2] = regs.rcx;
    to[3] = regs.rbx;
    to[4] = regs.rsi;
    to[5] = regs.rdi;
    to[RBP as usize] = regs.rbp;
    to[RSP as usize] = regs.rsp;
    to[8] = regs.r8;
    to[9] = regs.r9;
    to[10] = regs.r10;
    to[11] = regs.r11;
    to[12] = regs.r12;
    to[13] = regs.r13;
    to[14] = regs.r14;
    to[15] = regs.r15;
}
