//! One step up a stack: from the registers of a frame and the rule of its code to the registers of
//! its caller.
//!
//! x86-64. Pure but for the memory it is given, so that the kernel side and tests in user space run
//! the same lines. Where rules come from is `tables.rs`, what they are made of the unwind
//! compiler's (`unwind/`).

use crate::UserEnd;

/// Registers by DWARF number: rax, rdx, rcx, rbx, rsi, rdi, rbp, rsp, r8 to r15 (System V ABI,
/// figure 3.36).
pub const REGISTERS: usize = 16;
/// DWARF number of rax.
pub const RAX: u32 = 0;
/// DWARF number of rbx.
pub const RBX: u32 = 3;
/// DWARF number of r12.
pub const R12: u32 = 12;
/// DWARF number of rbp.
pub const RBP: u32 = 6;
/// DWARF number of rsp.
pub const RSP: u32 = 7;

/// How to leave a frame. 24 bytes without padding; kinds are constants, not enums, since rules come
/// from outside.
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
    /// Of files that compute a frame address from one more register that callees keep (the linker's
    /// lazy binding does from rbx, Go's race detector from r12), where the caller's value of it is:
    /// 0 nowhere, positive still in the register, negative in memory at CFA + this.
    pub kept: i32,
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
    /// Go's scheduler stack, left for that of the running goroutine: g is at thread pointer +
    /// offset (or, where `kept` is not 0, thread pointer + the word in memory at this instruction +
    /// kept), its m at + ra_offset in it, curg at + offset2 in that, and in curg, at + fp_offset,
    /// where its stack pointer was put: the return address is there, or behind the rbp saved there
    /// with [`fp::AT_CFA`](super::fp::AT_CFA).
    pub const GO_SYSTEM_STACK: u8 = 7;
    /// The scheduler's stack where C was called from it: at rsp + offset is the goroutine, of which
    /// the second word is where its stack begins, at rsp + offset2 how deep below that it was left.
    /// The return address is there, or behind rbp, likewise.
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

/// What is known of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Cursor {
    /// By DWARF number.
    pub registers: [u64; REGISTERS],
    /// The instruction that runs, or is returned to.
    pub ip: u64,
    /// Bit N: register N has the value it has in this frame.
    pub known: u64,
    /// Non-zero: `ip` was interrupted; zero: it is a return address, the call is before it.
    pub exact: u64,
    /// Thread pointer (fs base).
    pub thread: u64,
    /// Non-zero: the code before was taken to keep a frame pointer, which nothing proves. One of
    /// [`guessed`].
    pub guessed: u64,
}

/// Where the code was that was taken to keep a frame pointer.
pub mod guessed {
    /// What is known of the frame is certain.
    pub const NOT: u64 = 0;
    /// In a file that says so.
    pub const IN_FILE: u64 = 1;
    /// In memory a process filled itself.
    pub const IN_JIT: u64 = 2;
}

impl Cursor {
    /// The address to look up: of the instruction that runs, or of the call.
    #[inline(always)]
    #[must_use]
    pub fn lookup_ip(&self) -> u64 {
        if self.exact != 0 { self.ip } else { self.ip.wrapping_sub(1) }
    }

    #[inline(always)]
    fn register(&self, number: u64) -> u64 {
        // SAFETY: masked to less than the length. With a check of its own the code would have a
        // panic, and no kernel loads that.
        unsafe { *self.registers.get_unchecked(masked::<{ REGISTERS as u64 - 1 }>(number)) }
    }

    #[inline(always)]
    fn set_register(&mut self, number: u64, value: u64) {
        // SAFETY: as in `register`.
        unsafe {
            *self.registers.get_unchecked_mut(masked::<{ REGISTERS as u64 - 1 }>(number)) = value;
        }
    }
}

/// `uc_mcontext.gregs` as far as rip: r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip
/// (sys/ucontext.h).
pub type SignalFrame = [u64; 17];
/// Where it is in a `struct ucontext`.
pub const SIGNAL_FRAME: u64 = 40;
/// Memory of the process.
pub trait Memory {
    /// Eight bytes.
    fn word(&mut self, address: u64) -> Option<u64>;
    /// A signal frame, into `to`; false when it is not to be read.
    fn signal_frame(&mut self, address: u64, to: &mut SignalFrame) -> bool;
}

/// There is a caller.
pub const GO_ON: u64 = u64::MAX;

/// Goes to the caller: [`GO_ON`], or a [`UserEnd`] as a number and the cursor is of no more use.
#[inline(always)]
pub fn step(
    memory: &mut impl Memory,
    signal: &mut SignalFrame,
    at: &mut Cursor,
    rule: &Rule,
) -> u64 {
    let sp = at.registers[RSP as usize];
    match rule.cfa {
        cfa::SIGNAL => return signal_step(memory, signal, at),
        cfa::ROOT => return UserEnd::Root as u64,
        cfa::UNKNOWN_SWITCH => return UserEnd::UnknownSwitch as u64,
        cfa::NONE => return UserEnd::NoRule as u64,
        _ => {}
    }
    let base = if rule.cfa == cfa::FRAME_POINTER { RBP } else { u32::from(rule.register) };
    if at.known >> (base & 15) & 1 == 0 {
        return UserEnd::RegisterLost as u64;
    }
    let base = at.register(u64::from(base));
    let mut frame = plus(base, rule.offset);
    let (mut fp, mut fp_offset, mut ra_offset) = (rule.fp, rule.fp_offset, rule.ra_offset);
    let place = rule.ra & !ra::EXACT;
    let (mut lowest, mut ra_at) = (sp, 0);
    let mut proven = true;
    match rule.cfa {
        cfa::REGISTER => {}
        cfa::CLONE if at.known >> RAX & 1 == 0 => return UserEnd::RegisterLost as u64,
        cfa::CLONE if at.registers[RAX as usize] == 0 => return UserEnd::Root as u64,
        cfa::CLONE => {}
        cfa::OTHER_STACK => lowest = 0,
        cfa::MEMORY => match memory.word(frame) {
            Some(word) => frame = plus(word, rule.offset2),
            None => return UserEnd::Unreadable as u64,
        },
        cfa::PLT => frame += u64::from(at.ip & 15 >= rule.offset2 as u64) << 3,
        cfa::FRAME_POINTER => {
            ra_offset = -8;
            match edge(memory, at.ip, at.exact != 0) {
                Edge::Bare(depth) => (frame, fp) = (sp.wrapping_add(depth + 8), fp::SAME),
                Edge::Target => {
                    proven = false;
                    (frame, fp) = (sp.wrapping_add(8), fp::SAME);
                }
                Edge::Pushed => (frame, fp, fp_offset) = (sp.wrapping_add(16), fp::AT_CFA, -16),
                // No thread begins in such code: 0 is something else's.
                Edge::None if base < sp || base & 7 != 0 => return UserEnd::NoFramePointer as u64,
                Edge::None => {
                    proven = false;
                    (frame, fp, fp_offset) = (base.wrapping_add(16), fp::AT_CFA, -16);
                }
            }
        }
        cfa::GO_SAVED_DEPTH => {
            let Some(stack) = left_at_depth(memory, base, rule) else {
                return UserEnd::Unreadable as u64;
            };
            // Which of two stacks lies higher says nothing.
            (lowest, ra_offset, fp_offset) = (0, -8, -16);
            frame = above(stack, fp);
        }
        cfa::GO_SYSTEM_STACK | cfa::GO_MORE_STACK => {
            let Some(kept) = kept_by_goroutine(memory, at, rule) else {
                return UserEnd::Unreadable as u64;
            };
            if kept == 0 {
                return UserEnd::Root as u64;
            }
            let Some(stack) = memory.word(kept) else {
                return UserEnd::Unreadable as u64;
            };
            lowest = 0;
            fp_offset = -16;
            (frame, ra_at) = match rule.cfa {
                cfa::GO_MORE_STACK => (stack, kept.wrapping_add(8)),
                _ => (above(stack, fp), above(stack, fp).wrapping_sub(8)),
            };
        }
        _ => return UserEnd::NoRule as u64,
    }
    // The stack grows down; only where the return address has been taken off it a frame is empty.
    if frame < lowest || frame == lowest && place == ra::AT_CFA {
        return UserEnd::BadStack as u64;
    }
    let mut known = CALLER;
    let caller_fp = match fp {
        fp::AT_CFA => memory.word(plus(frame, fp_offset)),
        fp::AT_FP => memory.word(plus(at.registers[RBP as usize], fp_offset)),
        fp::SAME => {
            known &= at.known | !(1 << RBP);
            Some(at.registers[RBP as usize])
        }
        _ => {
            known &= !(1 << RBP);
            Some(0)
        }
    };
    let return_address = match place {
        ra::REGISTER => {
            if at.known >> (rule.ra_offset & 15) & 1 == 0 {
                return UserEnd::RegisterLost as u64;
            }
            Some(at.register(rule.ra_offset as u64))
        }
        ra::AT_RBX => {
            if at.known >> RBX & 1 == 0 {
                return UserEnd::RegisterLost as u64;
            }
            memory.word(plus(at.registers[RBX as usize], ra_offset))
        }
        _ if ra_at != 0 => memory.word(ra_at),
        _ => memory.word(plus(frame, ra_offset)),
    };
    let (Some(caller_fp), Some(return_address)) = (caller_fp, return_address) else {
        return UserEnd::Unreadable as u64;
    };
    if return_address == 0 {
        return if proven { UserEnd::Root } else { UserEnd::NoFramePointer } as u64;
    }
    at.guessed = u64::from(!proven);
    let kept = u64::from(rule.register >> 4);
    if ra_at != 0 {
        // There it is for the way to the goroutine.
    } else if rule.kept > 0 {
        known |= at.known & 1 << kept;
    } else if rule.kept < 0
        && let Some(word) = memory.word(plus(frame, rule.kept))
    {
        at.set_register(kept, word);
        known |= 1 << kept;
    }
    at.registers[RBP as usize] = caller_fp;
    at.registers[RSP as usize] = frame;
    at.ip = return_address;
    at.known = known;
    at.exact = u64::from(rule.ra & ra::EXACT != 0);
    GO_ON
}

/// The frame whose return address is on top of a stack, or behind rbp.
#[inline(always)]
fn above(stack: u64, fp: u8) -> u64 {
    stack.wrapping_add(8 + (u64::from(fp == fp::AT_CFA) << 3))
}

#[inline(always)]
fn plus(address: u64, offset: i32) -> u64 {
    address.wrapping_add(offset as i64 as u64)
}

/// What the next instructions say of a frame.
enum Edge {
    /// Nothing.
    None,
    /// rbp is the caller's, the return address this many bytes above the top of the stack.
    Bare(u64),
    /// The return address is behind the caller's rbp on top of the stack.
    Pushed,
    /// Something jumps or calls here: most likely a function begins.
    Target,
}

/// From the next instructions. Where a function was interrupted `push %rbp` and `ret` come before
/// and after its frame, `mov %rsp,%rbp` makes it. Where it goes on after a call, it may go on to
/// return: `add $N,%rsp; ret` and `pop %rbp; ret` are how the trampolines of CPython end
/// (Python/asm_trampoline.S), which make nothing of rbp.
#[inline(always)]
fn edge(memory: &mut impl Memory, ip: u64, exact: bool) -> Edge {
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

/// Whether the frame that was found may be one, in code of a file with this rule, if it has one:
/// what was guessed must follow a call, and an indirect one where the code it was guessed from was
/// made at run time. V8's builtins, which keep frame pointers as well, call others of them that go
/// on to what was compiled.
#[inline(always)]
pub fn may_be_called(memory: &mut impl Memory, at: &Cursor, rule: Option<&Rule>) -> bool {
    let kind = rule.map_or(cfa::NONE, |rule| rule.cfa);
    let indirect = at.guessed == guessed::IN_JIT && kind != cfa::FRAME_POINTER;
    // The kernel makes the frame of a signal handler return there.
    at.guessed == guessed::NOT || kind == cfa::SIGNAL || follows_call(memory, at.ip, indirect)
}

/// Whether a call comes before an address (Intel's manual, CALL): of what lies in a register or
/// memory, or any. A word on the stack that is taken for a return address and is none rarely points
/// behind one.
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

/// Where a goroutine's stack was left to call C on the scheduler's.
#[inline(always)]
fn left_at_depth(memory: &mut impl Memory, sp: u64, rule: &Rule) -> Option<u64> {
    let goroutine = memory.word(plus(sp, rule.offset))?;
    let begin = memory.word(goroutine.wrapping_add(8))?;
    Some(begin.wrapping_sub(memory.word(plus(sp, rule.offset2))?))
}

/// Where the running goroutine's stack pointer was put when its stack was left for the scheduler's;
/// 0 when none runs, or another thread has taken it over, as Go's own traceback asks (`curg.m ==
/// m`, runtime/traceback.go).
#[inline(always)]
fn kept_by_goroutine(memory: &mut impl Memory, at: &Cursor, rule: &Rule) -> Option<u64> {
    let slot = match rule.kept {
        0 => plus(at.thread, rule.offset),
        kept => at.thread.wrapping_add(memory.word(plus(at.ip, kept))?),
    };
    let g = memory.word(slot)?;
    let m = memory.word(plus(g, rule.ra_offset))?;
    let running = memory.word(plus(m, rule.offset2))?;
    if running == 0 || memory.word(plus(running, rule.ra_offset))? != m {
        return Some(0);
    }
    Some(plus(running, rule.fp_offset))
}

/// Of a caller no more is known, one more register at times aside: all that callees keep would
/// triple the number of rules, for one frame in ten thousand.
const CALLER: u64 = 1 << RBP | 1 << RSP;

#[inline(always)]
fn signal_step(memory: &mut impl Memory, signal: &mut SignalFrame, at: &mut Cursor) -> u64 {
    if !memory.signal_frame(at.registers[RSP as usize].wrapping_add(SIGNAL_FRAME), signal) {
        return UserEnd::Unreadable as u64;
    }
    let [r8, r9, r10, r11, r12, r13, r14, r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip] =
        *signal;
    at.registers = [rax, rdx, rcx, rbx, rsi, rdi, rbp, rsp, r8, r9, r10, r11, r12, r13, r14, r15];
    at.ip = rip;
    at.known = 0xffff;
    at.exact = 1;
    at.guessed = guessed::NOT;
    GO_ON
}

/// `value & MASK`, in one instruction that LLVM cannot prove needless and drop, or turn into a
/// pointer that runs along.
#[inline(always)]
#[must_use]
pub fn masked<const MASK: u64>(value: u64) -> usize {
    #[cfg(target_arch = "bpf")]
    {
        let mut value = value;
        // SAFETY: one arithmetic instruction on a register.
        unsafe {
            core::arch::asm!("{0} &= {1}", inout(reg) value, const MASK, options(pure, nomem, nostack));
        }
        value as usize
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        (value & MASK) as usize
    }
}
