//! The stack frame of a call that a thread is made to do: one as the kernel writes when it delivers
//! a signal. Pure.
//!
//! The function returns to the C library's end of a signal handler, which asks the kernel to put
//! back all registers, the vector state and the signal mask (`restore_sigcontext` of
//! arch/x86/kernel/signal_64.c). So who made the thread do it is not needed any more, and may die
//! at any moment after. The rejected option, to wait for the return and to put the registers back
//! by ptrace(2), leaves a thread with a breakpoint and foreign registers when the tracer dies.

use crate::arch::call::{Call, Prepared, Registers, Thread, Unfit};

/// As which ptrace(2) has the vector state: an XSAVE area that is not compacted.
pub const VECTORS: usize = 0x202;

/// As which it has the state of a shadow stack, of threads that have one.
pub const SHADOW_STACK: Option<usize> = Some(0x204);

/// Below the stack pointer a function without callees keeps what it likes (System V ABI, 3.2.2).
const RED_ZONE: u64 = 128;
/// `__USER_CS` of arch/x86/include/asm/segment.h.
const USER_CS: u64 = 0x33;
/// `struct ucontext` begins behind the return address, `struct sigcontext_64` behind its flags,
/// link and stack.
const CONTEXT: usize = 8;
const REGISTERS: usize = CONTEXT + 40;
const MASK: usize = REGISTERS + 256;
/// With `siginfo_t`, of 128 bytes, the frame is this long.
const FRAME: usize = MASK + 8 + 128;
/// `struct _fpx_sw_bytes` in the XSAVE area.
const SOFTWARE: usize = 464;
/// The area's own header follows the legacy region of 512 bytes.
const SHORTEST_AREA: usize = 512 + 64;
/// There it has which features are in use (XSTATE_BV).
const IN_USE: usize = 512;
const MAGIC1: u32 = 0x4650_5853;
const MAGIC2: u32 = 0x4650_5845;
/// `UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS` of
/// arch/x86/include/uapi/asm/ucontext.h.
const FLAGS: u64 = 1 | 2 | 4;
/// No value of `ss_flags` that sigaltstack(2) takes, so it leaves the alternate stack as it is;
/// `restore_altstack` of kernel/signal.c ignores the error.
const KEEP_ALTSTACK: u32 = 0x4;

/// What the kernel leaves in `rax` of a system call that a signal interrupts
/// (include/linux/errno.h).
const RESTART_SYS: i64 = -512;
const RESTART_NO_INTERRUPT: i64 = -513;
const RESTART_NO_HANDLER: i64 = -514;
const RESTART_BLOCK: i64 = -516;

/// Whether a thread is stopped in a system call.
pub fn is_in_call(registers: &Registers) -> bool {
    registers.orig_rax as i64 >= 0
}

/// The address of its next instruction.
pub fn instruction(registers: &Registers) -> u64 {
    registers.rip
}

/// Where the thread's own data is, as its C library keeps it.
pub fn thread_pointer(registers: &Registers) -> u64 {
    registers.fs_base
}

/// Lets `thread` do `call`, and go on from where it was then. `restorer` is the address of the C
/// library's end of a signal handler.
///
/// # Errors
/// When it runs no 64-bit code, or its vector state is not laid out as expected.
pub fn prepare(thread: &Thread, call: Call, restorer: u64) -> Result<Prepared, Unfit> {
    let back = interrupted(&thread.registers);
    if back.cs != USER_CS {
        return Err(Unfit);
    }
    let (mut vectors, features) = used(&thread.vectors, end_of_feature).ok_or(Unfit)?;
    let area = vectors.len();
    // XRSTOR wants 64 bytes of alignment. What is entered by a call has its stack 8 bytes off 16.
    // A stack pointer may be any number: whether that is a stack the caller looks.
    let vectors_at = back.rsp.wrapping_sub(RED_ZONE + area as u64 + 4) & !63;
    let at = (vectors_at.wrapping_sub(FRAME as u64) & !15).wrapping_sub(8);

    let mut frame = vec![0; vectors_at.wrapping_sub(at) as usize];
    let mut put = |offset: usize, value: u64| {
        frame[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
    };
    put(0, restorer);
    put(CONTEXT, FLAGS);
    put(CONTEXT + 24, u64::from(KEEP_ALTSTACK));
    let segments = back.cs & 0xffff | (back.ss & 0xffff) << 48;
    let order = [
        back.r8,
        back.r9,
        back.r10,
        back.r11,
        back.r12,
        back.r13,
        back.r14,
        back.r15,
        back.rdi,
        back.rsi,
        back.rbp,
        back.rbx,
        back.rdx,
        back.rax,
        back.rcx,
        back.rsp,
        back.rip,
        back.eflags,
        segments,
    ];
    for (place, value) in order.into_iter().enumerate() {
        put(REGISTERS + place * 8, value);
    }
    // Behind the segments: error, trap number, old mask and fault address, then the vector state.
    put(REGISTERS + 184, vectors_at);
    put(MASK, thread.mask);

    let mut software = [0; 48];
    software[..4].copy_from_slice(&MAGIC1.to_le_bytes());
    software[4..8].copy_from_slice(&(area as u32 + 4).to_le_bytes());
    software[8..16].copy_from_slice(&features.to_le_bytes());
    software[16..20].copy_from_slice(&(area as u32).to_le_bytes());
    vectors[SOFTWARE..SOFTWARE + 48].copy_from_slice(&software);
    frame.extend(vectors);
    frame.extend(MAGIC2.to_le_bytes());

    let [rdi, rsi, rdx, rcx, r8, r9] = call.arguments;
    let registers = Registers {
        rip: call.function,
        rsp: at,
        rdi,
        rsi,
        rdx,
        rcx,
        r8,
        r9,
        rax: 0,
        // No system call is to be made again by the kernel: the frame says what is.
        orig_rax: u64::MAX,
        // The direction flag is clear at a call.
        eflags: back.eflags & !0x400,
        ..back
    };
    Ok(Prepared { registers, at, frame })
}

/// The part of an XSAVE area that is used, and which features that is. ptrace(2) gives all that the
/// processor has; of that, rt_sigreturn(2) takes what its thread may use alone: not AMX's 8 KiB,
/// for which a thread has to ask (`check_xstate_in_sigframe` of arch/x86/kernel/fpu/signal.c). What
/// is not used is as at the start, and so it is put back.
fn used(vectors: &[u8], end_of: impl Fn(u32) -> usize) -> Option<(Vec<u8>, u64)> {
    let features = vectors.get(IN_USE..IN_USE + 8)?.try_into().map(u64::from_le_bytes).ok()?;
    let extended = (2..u64::BITS).filter(|feature| features & 1 << feature != 0);
    let end = extended.map(end_of).fold(SHORTEST_AREA, usize::max);
    // x87 and SSE have their places always.
    Some((vectors.get(..end)?.to_vec(), features | 3))
}

/// Where a feature ends in an area that is not compacted.
fn end_of_feature(feature: u32) -> usize {
    let place = std::arch::x86_64::__cpuid_count(0xd, feature);
    (place.ebx + place.eax) as usize
}

/// Registers to go on with. A system call that was interrupted is made again, as it would be
/// without a handler; one that keeps what is left of its time in the kernel ends with `EINTR`,
/// because the kernel forgets that in rt_sigreturn(2).
fn interrupted(registers: &Registers) -> Registers {
    let mut back = *registers;
    if is_in_call(registers) {
        match registers.rax as i64 {
            RESTART_SYS | RESTART_NO_INTERRUPT | RESTART_NO_HANDLER => {
                back.rax = registers.orig_rax;
                back.rip -= 2;
            }
            RESTART_BLOCK => back.rax = i64::from(-libc::EINTR) as u64,
            _ => {}
        }
    }
    back
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(orig_rax: u64, rax: i64) -> Thread {
        // SAFETY: plain numbers, of which zeros are some.
        let zeros: Registers = unsafe { std::mem::zeroed() };
        let registers = Registers {
            rip: 0x1000,
            rsp: 0x7fff_1234,
            cs: 0x33,
            ss: 0x2b,
            rbx: 77,
            eflags: 0x646,
            orig_rax,
            rax: rax as u64,
            ..zeros
        };
        let mut vectors = vec![0; 2696];
        // x87, SSE and AVX.
        vectors[IN_USE] = 7;
        Thread { registers, vectors, mask: 0x8000 }
    }

    const CALL: Call = Call { function: 0x5000, arguments: [1, 2, 3, 4, 5, 6] };

    fn long(frame: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|byte| frame[at + byte]))
    }

    #[test]
    fn a_frame_has_all_that_the_kernel_puts_back() {
        let thread = thread(u64::MAX, 9);
        let Prepared { registers, at, frame } = prepare(&thread, CALL, 0x9000).unwrap();
        assert_eq!(at % 16, 8);
        assert!(at + frame.len() as u64 <= thread.registers.rsp - RED_ZONE);
        assert_eq!((registers.rip, registers.rsp, registers.rdi, registers.r9), (0x5000, at, 1, 6));
        assert_eq!((registers.orig_rax, registers.eflags), (u64::MAX, 0x246));
        assert_eq!(long(&frame, 0), 0x9000);
        assert_eq!(long(&frame, REGISTERS + 16 * 8), 0x1000);
        assert_eq!(long(&frame, REGISTERS + 11 * 8), 77);
        assert_eq!(long(&frame, MASK), 0x8000);
        let vectors = (long(&frame, REGISTERS + 184) - at) as usize;
        assert_eq!((at as usize + vectors) % 64, 0);
        assert_eq!(long(&frame, vectors + SOFTWARE) as u32, MAGIC1);
        assert_eq!(long(&frame, vectors + SOFTWARE + 8), 7);
        assert_eq!(long(&frame, vectors + SOFTWARE + 16), 832);
        assert_eq!(frame[vectors + 832..], MAGIC2.to_le_bytes());
    }

    #[test]
    fn of_the_vector_state_the_used_part_is_put_back() {
        let mut area = vec![0; 11_008];
        // As processors with AMX have it: AVX-512 ends at 2688, protection keys at 2696.
        let end_of = |feature| [0, 0, 832, 0, 0, 1152, 1664, 2688, 0, 2696][feature as usize];
        let ends = |area: &[u8]| used(area, end_of).map(|(part, features)| (part.len(), features));
        assert_eq!(ends(&area), Some((576, 3)));
        area[IN_USE..IN_USE + 2].copy_from_slice(&0x2e7u16.to_le_bytes());
        assert_eq!(ends(&area), Some((2696, 0x2e7)));
        assert_eq!(ends(&area[..2000]), None);
        assert_eq!(ends(&area[..515]), None);
    }

    #[test]
    fn interrupted_calls_go_on_as_the_kernel_lets_them() {
        let back = |rax| {
            let back = interrupted(&thread(202, rax).registers);
            (back.rip, back.rax as i64)
        };
        assert_eq!(back(RESTART_SYS), (0xffe, 202));
        assert_eq!(back(RESTART_NO_HANDLER), (0xffe, 202));
        assert_eq!(back(RESTART_BLOCK), (0x1000, -4));
        assert_eq!(back(17), (0x1000, 17));
    }

    #[test]
    fn what_is_not_64_bit_is_left_alone() {
        let mut other = thread(u64::MAX, 0);
        other.registers.cs = 0x23;
        assert_eq!(prepare(&other, CALL, 0).unwrap_err(), Unfit);
        other.registers.cs = 0x33;
        other.vectors.truncate(100);
        assert_eq!(prepare(&other, CALL, 0).unwrap_err(), Unfit);
    }
}
