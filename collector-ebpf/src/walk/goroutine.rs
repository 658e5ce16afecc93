//! Where the runtime of Go is on the stack of its scheduler, the stack of the goroutine goes on
//! behind it. Finds both without an unwind table: a copy is made because there is none yet.
//!
//! So it relies on what is the same in all releases from 1.16 on, or is one of two, and takes
//! nothing for Go's that does not lead back to where it came from. Called by `copy.rs`.

use aya_ebpf::helpers::bpf_probe_read_user;
use stackwire_collector_ebpf::arch::{GOROUTINE, LEFT_STACK, RSP};
use stackwire_collector_ebpf::unwind::Cursor;
use stackwire_collector_ebpf::{OF_GOROUTINE, OF_POINTER, PARTS, Part};

/// In `g` (runtime/runtime2.go): the end of its stack, its `m`, and where its stack pointer is kept
/// while it does not run on its stack. The stack's lowest address is its first word.
const END: u64 = 8;
const M: u64 = 48;
const KEPT: u64 = 56;
/// In `m`: the running goroutine, from 1.25 on and before. Its first word is the `g` of the
/// scheduler.
const RUNNING: [u64; 2] = [0xb8, 0xc0];
/// What is read of the way from stack to stack: the word of the thread, of `g`, of `m`, and of the
/// running goroutine.
const WAY: [u64; 4] = [8, M + 8, RUNNING[1] + 8, KEPT + 16];
const WAY_BYTES: u64 = WAY[0] + WAY[1] + WAY[2] + WAY[3];

/// Says which parts of memory to copy, of this many bytes at most: one, of a stack that is no
/// scheduler's.
#[inline(always)]
pub fn parts_of(cursor: &Cursor, most: u64, parts: &mut [Part; PARTS]) {
    let sp = cursor.registers[RSP as usize];
    for part in parts.iter_mut() {
        part.start = 0;
        part.bytes = 0;
    }
    parts[OF_POINTER].start = sp;
    parts[OF_POINTER].bytes = most;
    if most < 2 * WAY_BYTES {
        return;
    }
    let half = (most - WAY_BYTES) / 2;
    let Some(Found { way, left: (from, to), end }) = find(cursor, sp, half) else { return };
    parts[OF_POINTER].bytes = least(end - sp, half);
    parts[OF_GOROUTINE].start = from;
    parts[OF_GOROUTINE].bytes = least(to - from, half);
    for (part, (start, bytes)) in parts[OF_GOROUTINE + 1..].iter_mut().zip(way.iter().zip(WAY)) {
        part.start = *start;
        part.bytes = bytes;
    }
}

struct Found {
    /// Addresses of what is read on the way.
    way: [u64; WAY.len()],
    /// The part of the goroutine's stack that is in use.
    left: (u64, u64),
    /// The end of the scheduler's.
    end: u64,
}

#[inline(always)]
fn find(cursor: &Cursor, sp: u64, most: u64) -> Option<Found> {
    let slot = cursor.thread.wrapping_add(GOROUTINE as u64);
    let current = word(slot)?;
    let m = word(current.wrapping_add(M))?;
    let scheduler = word(m)?;
    let (start, end) = stack_of(scheduler, m)?;
    if sp < start || sp >= end {
        return None;
    }
    // While the vDSO runs there, the goroutine is still the current one.
    let (running, in_register) = if current == scheduler {
        let ([new, old], is_its) = (RUNNING, |running: &u64| stack_of(*running, m).is_some());
        let running = word(m.wrapping_add(new)).filter(is_its);
        (running.or_else(|| word(m.wrapping_add(old)).filter(is_its))?, false)
    } else {
        (current, true)
    };
    let (start, end_of_left) = stack_of(running, m)?;
    let kept = if in_register {
        cursor.registers[LEFT_STACK as usize]
    } else {
        word(running.wrapping_add(KEPT))?
    };
    let is_inside = kept >= start && kept < end_of_left;
    // The register may be in use for something else by now.
    let above = if end_of_left - start > most { end_of_left - most } else { start };
    let from = if is_inside { kept } else { above };
    Some(Found { way: [slot, current, m, running], left: (from, end_of_left), end })
}

/// Where the stack of a `g` begins and ends, if it is one of this `m`.
#[inline(always)]
fn stack_of(g: u64, m: u64) -> Option<(u64, u64)> {
    if g == 0 || word(g.wrapping_add(M))? != m {
        return None;
    }
    let (start, end) = (word(g)?, word(g.wrapping_add(END))?);
    (start < end).then_some((start, end))
}

#[inline(always)]
fn least(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}

#[inline(always)]
fn word(address: u64) -> Option<u64> {
    // SAFETY: the helper checks the address and fails rather than fault.
    unsafe { bpf_probe_read_user(address as *const u64) }.ok()
}
