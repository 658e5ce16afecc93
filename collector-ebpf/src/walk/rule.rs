//! How to leave a frame, as rules say it: what the unwind compiler (`unwind/`) writes into tables
//! and [`step`](crate::unwind::step) reads. Numbers of registers are `arch/`'s.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::arch::{RBP, RSP};

/// How to leave a frame. 24 bytes without padding; kinds are constants, not enums, since rules come
/// from outside.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Rule {
    /// One of [`cfa`].
    pub cfa: u8,
    /// Low half: register the CFA is computed from. High half: register `kept` is about.
    pub register: u8,
    /// One of [`fp`].
    pub fp: u8,
    /// One of [`ra`], with [`ra::EXACT`] or without.
    pub ra: u8,
    /// Added to the register.
    pub offset: i32,
    /// Added to what is read there, or where in 16 bytes an entry of a PLT pushes.
    pub offset2: i32,
    /// Where the caller's rbp is.
    pub fp_offset: i32,
    /// Where the return address is, or the register that has it.
    pub ra_offset: i32,
    /// Some files compute a frame address from one more register that callees keep: the linker's
    /// lazy binding from rbx, Go's race detector from r12. For these files, this says where the
    /// caller's value of the register is: 0 nowhere, positive still in the register, negative in
    /// memory at CFA + this.
    pub kept: i32,
}

impl Rule {
    /// Whether the caller depends on memory, rsp and rbp alone.
    #[inline(always)]
    #[must_use]
    pub fn needs_stack_alone(&self) -> bool {
        let base = u32::from(self.register & 15);
        let of_thread = matches!(self.cfa, cfa::CLONE | cfa::GO_SYSTEM_STACK | cfa::GO_MORE_STACK);
        (base == RSP || base == RBP) && !of_thread && self.ra & !ra::EXACT == ra::AT_CFA
    }
}

/// Where the canonical frame address is.
pub mod cfa {
    /// Nothing is known of this code.
    pub const NONE: u8 = 0;
    /// Register + offset.
    pub const REGISTER: u8 = 1;
    /// Memory at (register + offset), + offset2.
    pub const MEMORY: u8 = 2;
    /// rsp + offset, and 8 more from byte offset2 of an entry of 16 bytes on: a PLT.
    pub const PLT: u8 = 3;
    /// rsp points to a `struct ucontext`: the kernel interrupted the caller for a signal.
    pub const SIGNAL: u8 = 4;
    /// There is no caller: a thread begins here.
    pub const ROOT: u8 = 5;
    /// rbp points to the caller's rbp and the return address, but where the next instructions say
    /// better.
    pub const FRAME_POINTER: u8 = 6;
    /// Go's scheduler stack, left for that of the running goroutine. The address of g is at thread
    /// pointer + offset. Where `kept` is not 0, it is at thread pointer + X, where X is the word in
    /// memory at (this instruction + kept). In g, at + ra_offset, is its m. In m, at + offset2, is
    /// curg. In curg, at + fp_offset, is its stack pointer. The return address is where that
    /// points, or with [`fp::AT_CFA`](super::fp::AT_CFA) behind the rbp saved there.
    pub const GO_SYSTEM_STACK: u8 = 7;
    /// The scheduler's stack where C was called from it. At rsp + offset is the goroutine; its
    /// second word says where its stack begins. At rsp + offset2 is how deep below that beginning
    /// the stack was left. The return address is there, or behind rbp, likewise.
    pub const GO_SAVED_DEPTH: u8 = 8;
    /// As `GO_SYSTEM_STACK`, where a goroutine's stack grows: where its function goes on was put
    /// behind the stack pointer (`gobuf`, runtime/runtime2.go), since only what is above that is
    /// copied to the new stack.
    pub const GO_MORE_STACK: u8 = 9;
    /// Register + offset, on another stack: which of the two lies higher says nothing.
    pub const OTHER_STACK: u8 = 10;
    /// This code changes stacks in a way that is not known.
    pub const UNKNOWN_SWITCH: u8 = 11;
    /// Returns from the system call `clone`, in two tasks. As `REGISTER` in the parent. The child,
    /// of which rax is 0 (clone(2)), has a new stack and no caller.
    pub const CLONE: u8 = 12;
}

/// Where the caller's rbp is.
pub mod fp {
    /// In rbp.
    pub const SAME: u8 = 0;
    /// In memory at CFA + fp_offset.
    pub const AT_CFA: u8 = 1;
    /// In memory at rbp + fp_offset.
    pub const AT_FP: u8 = 2;
    /// Nowhere.
    pub const LOST: u8 = 3;
}

/// Where the return address is.
pub mod ra {
    /// In memory at CFA + ra_offset.
    pub const AT_CFA: u8 = 0;
    /// In register ra_offset.
    pub const REGISTER: u8 = 1;
    /// In memory at rbx + ra_offset.
    pub const AT_RBX: u8 = 2;
    /// The caller did not call: it was interrupted there, or begins there.
    pub const EXACT: u8 = 0x80;
}

/// Rules of 0: no rule.
pub const NO_RULE: u16 = 0;
