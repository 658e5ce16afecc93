//! x86-64: registers by DWARF number, frames of signals, and what its instructions say of frames.

#[cfg(target_arch = "bpf")]
pub mod saved;

use crate::walk::memory::Memory;

/// Registers by DWARF number: rax, rdx, rcx, rbx, rsi, rdi, rbp, rsp, r8 to r15 (System V ABI,
/// figure 3.36).
pub const REGISTERS: usize = 16;
/// DWARF number of rax.
pub const RAX: u32 = 0;
/// DWARF number of rbx.
pub const RBX: u32 = 3;
/// DWARF number of r12.
pub const R12: u32 = 12;
/// Where Go's current `g` is, from the thread pointer on (`runtime.tlsg`): in programs of the nine
/// releases that `make test` has, position-independent ones included.
pub const GOROUTINE: i64 = -8;
/// Register in which functions of Go's runtime keep the goroutine's stack pointer while they call
/// the vDSO (runtime/sys_linux_amd64.s).
pub const LEFT_STACK: u32 = R12;
/// DWARF number of rbp.
pub const RBP: u32 = 6;
/// DWARF number of rsp.
pub const RSP: u32 = 7;

/// Where perf has these registers: their numbers in `enum perf_event_x86_regs` of
/// arch/x86/include/uapi/asm/perf_regs.h, by DWARF number.
pub const PERF_REGISTERS: [u32; REGISTERS] =
    [0, 3, 2, 1, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23];
/// `PERF_REG_X86_IP`.
pub const PERF_IP: u32 = 8;

/// `uc_mcontext.gregs` as far as rip: r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip
/// (sys/ucontext.h).
pub type SignalFrame = [u64; 17];
/// Where it is in a `struct ucontext`.
pub const SIGNAL_FRAME: u64 = 40;

/// The registers of what a signal interrupted, and where that was.
#[inline(always)]
#[must_use]
pub fn interrupted(frame: &SignalFrame) -> ([u64; REGISTERS], u64) {
    let [r8, r9, r10, r11, r12, r13, r14, r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip] =
        *frame;
    ([rax, rdx, rcx, rbx, rsi, rdi, rbp, rsp, r8, r9, r10, r11, r12, r13, r14, r15], rip)
}

/// What the next instructions say of a frame.
pub enum Edge {
    /// Nothing.
    None,
    /// rbp is the caller's, the return address this many bytes above the top of the stack.
    Bare(u64),
    /// The return address is behind the caller's rbp on top of the stack.
    Pushed,
    /// Something jumps or calls here: most likely a function begins.
    Target,
}

/// Judges a frame by the next instructions. Where a function was interrupted: `push %rbp` comes
/// before its frame, `ret` after it, and `mov %rsp,%rbp` makes it. Where a function goes on after a
/// call, it may be about to return. The trampolines of CPython (Python/asm_trampoline.S), which do
/// not use rbp, end with `add $N,%rsp; ret` or `pop %rbp; ret`.
#[inline(always)]
pub fn edge(memory: &mut impl Memory, ip: u64, exact: bool) -> Edge {
    let code = memory.word(ip).unwrap_or(0);
    // Before that end they call what they were given, `call *%rcx`; before that they make room.
    let rest = if exact && code as u16 == 0xd1ff { code >> 16 } else { code };
    if rest & 0xff_80ff_ffff == 0xc3_00c4_8348 {
        return Edge::Bare(rest >> 24 & 0x7f);
    }
    if rest as u16 == 0xc35d {
        return Edge::Pushed;
    }
    match code as u8 {
        0xc2 | 0xc3 => Edge::Bare(0),
        0x55 if exact => Edge::Bare(0),
        // `endbr64`
        _ if exact && code as u32 == 0xfa1e_0ff3 => Edge::Target,
        _ if exact && code & 0xffff_ffff_ffff == 0xd1ff_08ec_8348 => Edge::Bare(0),
        _ if exact && matches!(code & 0xff_ffff, 0xe5_8948 | 0xec_8b48) => Edge::Pushed,
        _ => Edge::None,
    }
}

/// Whether a call comes before an address (Intel's manual, CALL). With `indirect` it must be a call
/// through a register or memory, otherwise any call will do. A word on the stack that is wrongly
/// taken for a return address rarely points behind a call.
#[inline(always)]
pub fn follows_call(memory: &mut impl Memory, ip: u64, indirect: bool) -> bool {
    let Some(before) = memory.word(ip.wrapping_sub(8)) else { return false };
    // The last N bytes: opcode and ModRM, and the next byte of those.
    let tail = |bytes: u32| (before >> (64 - 8 * bytes)) as u16;
    let is = |bytes: u32, mask: u16, word: u16| tail(bytes) & mask == word;
    if !indirect && tail(5) as u8 == 0xe8 {
        return true;
    }
    // ModRM in the high byte: bits 5 to 3 are 2; the mode and whether there is a SIB byte say how
    // long it is.
    let register = is(2, 0xf8ff, 0xd0ff);
    let plain = is(2, 0xf8ff, 0x10ff) && !is(2, 0xfeff, 0x14ff);
    let with_byte = is(3, 0xf8ff, 0x50ff) || is(3, 0xffff, 0x14ff) || is(4, 0xffff, 0x54ff);
    let with_word = is(6, 0xf8ff, 0x90ff)
        || is(6, 0xffff, 0x15ff)
        || is(7, 0xffff, 0x94ff)
        || is(7, 0xffff, 0x14ff);
    register || plain || with_byte || with_word
}
