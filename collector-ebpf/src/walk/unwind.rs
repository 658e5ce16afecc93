//! One step up a stack: from the registers of a frame and the rule of its code to the registers of
//! its caller.
//!
//! Pure but for the memory it is given, so that the kernel side and tests in user space run the
//! same lines. Where rules come from is `tables.rs`, what they are made of the unwind compiler's
//! (`unwind/`).

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::arch::{
    Edge, RAX, RBP, RBX, REGISTERS, RSP, SIGNAL_FRAME, SignalFrame, edge, follows_call, interrupted,
};
use crate::record::UserEnd;
use crate::walk::masked::masked;
use crate::walk::memory::Memory;
use crate::walk::rule::{Rule, cfa, fp, ra};

/// What is known of a frame.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, KnownLayout))]
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

/// Whether the frame that was found can be real, in code of a file with this rule, if it has one. A
/// guessed return address must follow a call. If it was guessed from code made at run time, that
/// call must be an indirect one. V8's builtins are an exception: they keep frame pointers as well,
/// and call other builtins that go on to compiled code.
#[inline(always)]
pub fn may_be_called(memory: &mut impl Memory, at: &Cursor, rule: Option<&Rule>) -> bool {
    let kind = rule.map_or(cfa::NONE, |rule| rule.cfa);
    let indirect = at.guessed == guessed::IN_JIT && kind != cfa::FRAME_POINTER;
    // The kernel makes the frame of a signal handler return there.
    at.guessed == guessed::NOT || kind == cfa::SIGNAL || follows_call(memory, at.ip, indirect)
}

/// Where a goroutine's stack was left to call C on the scheduler's.
#[inline(always)]
fn left_at_depth(memory: &mut impl Memory, sp: u64, rule: &Rule) -> Option<u64> {
    let goroutine = memory.word(plus(sp, rule.offset))?;
    let begin = memory.word(goroutine.wrapping_add(8))?;
    Some(begin.wrapping_sub(memory.word(plus(sp, rule.offset2))?))
}

/// Where the running goroutine's stack pointer was saved when its stack was left for that of the
/// scheduler. 0 when no goroutine runs, or another thread has taken it over. Go's own traceback
/// makes the same check (`curg.m == m`, runtime/traceback.go).
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

/// The registers that are known in a caller. At times one more is known. To track all registers
/// that callees keep would triple the number of rules, for one frame in ten thousand.
const CALLER: u64 = 1 << RBP | 1 << RSP;

#[inline(always)]
fn signal_step(memory: &mut impl Memory, signal: &mut SignalFrame, at: &mut Cursor) -> u64 {
    if !memory.words(at.registers[RSP as usize].wrapping_add(SIGNAL_FRAME), signal) {
        return UserEnd::Unreadable as u64;
    }
    (at.registers, at.ip) = interrupted(signal);
    at.known = 0xffff;
    at.exact = 1;
    at.guessed = guessed::NOT;
    GO_ON
}
