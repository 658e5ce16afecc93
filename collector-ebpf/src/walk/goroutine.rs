//! The runtime of Go, and C that Go calls, run on the stack of its scheduler: behind it the stack
//! of the goroutine goes on. Where C calls Go, it is the other way round. Finds both without an
//! unwind table: a copy is made because there is none yet.
//!
//! So it relies on what is the same in all releases from 1.16 on, or is one of two, and takes
//! nothing for Go's that does not lead back to where it came from. Called by `copy.rs`.

use aya_ebpf::helpers::bpf_probe_read_user;
use stackwire_collector_ebpf::arch::{GOROUTINE, LEFT_STACK, RSP};
use stackwire_collector_ebpf::unwind::Cursor;
use stackwire_collector_ebpf::{OF_LEFT, OF_POINTER, PARTS, Part};

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

/// Says which parts of memory to copy, of this many bytes at most: one, of a stack that is none of
/// Go's.
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
    let stacks = most - WAY_BYTES;
    let Some(Found { way, end, left: (from, to) }) = find(cursor, sp, stacks / 2) else { return };
    // Each has half of the room, and what the other leaves.
    let (here, there) = (end - sp, to - from);
    parts[OF_POINTER].bytes = least(here, stacks - least(there, stacks / 2));
    parts[OF_LEFT].start = from;
    parts[OF_LEFT].bytes = least(there, stacks - least(here, stacks / 2));
    for (part, (start, bytes)) in parts[OF_LEFT + 1..].iter_mut().zip(way.iter().zip(WAY)) {
        part.start = *start;
        part.bytes = bytes;
    }
}

struct Found {
    /// Addresses of what is read on the way.
    way: [u64; WAY.len()],
    /// Where the stack ends that is in use.
    end: u64,
    /// The part in use of the other, which was left for it.
    left: (u64, u64),
}

#[inline(always)]
fn find(cursor: &Cursor, sp: u64, most: u64) -> Option<Found> {
    let slot = cursor.thread.wrapping_add(GOROUTINE as u64);
    let current = word(slot)?;
    let m = word(current.wrapping_add(M))?;
    let scheduler = word(m)?;
    let of_scheduler = stack_of(scheduler, m)?;
    // While the vDSO runs on the scheduler's, the goroutine is still the current one.
    let running = if current == scheduler {
        let ([new, old], is_its) = (RUNNING, |running: &u64| stack_of(*running, m).is_some());
        let running = word(m.wrapping_add(new)).filter(is_its);
        running.or_else(|| word(m.wrapping_add(old)).filter(is_its)).unwrap_or(0)
    } else {
        current
    };
    let way = [slot, current, m, running];
    let Some(of_running) = stack_of(running, m) else {
        // None runs: the way says so, and the stack ends there.
        let is_its = is_inside(sp, of_scheduler);
        return is_its.then_some(Found { way, end: of_scheduler.1, left: (0, 0) });
    };
    if is_inside(sp, of_running) {
        // C calls Go from where the scheduler's was left.
        let kept = word(scheduler.wrapping_add(KEPT))?;
        let left = is_inside(kept, of_scheduler).then_some((kept, of_scheduler.1))?;
        return Some(Found { way, end: of_running.1, left });
    }
    if !is_inside(sp, of_scheduler) {
        return None;
    }
    let kept = if current == scheduler {
        word(running.wrapping_add(KEPT))?
    } else {
        cursor.registers[LEFT_STACK as usize]
    };
    let (start, end) = of_running;
    // The register may be in use for something else by now.
    let above = if end - start > most { end - most } else { start };
    let from = if is_inside(kept, of_running) { kept } else { above };
    Some(Found { way, end: of_scheduler.1, left: (from, end) })
}

#[inline(always)]
fn is_inside(address: u64, (start, end): (u64, u64)) -> bool {
    address >= start && address < end
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
