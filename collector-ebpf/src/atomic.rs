//! Additions to values of maps that other CPUs add to at the same time. Rust has no atomic
//! additions for this target, the machine has.

use core::arch::asm;

/// Adds to a u64.
///
/// # Safety
/// `to` points into a value of a map and is aligned.
#[inline(always)]
pub unsafe fn add_u64(to: *mut u64, some: u64) {
    // SAFETY: as the caller promises.
    unsafe { asm!("lock *(u64 *)({} + 0) += {}", in(reg) to, in(reg) some) }
}

/// Adds to a u32, and wraps.
///
/// # Safety
/// As of [`add_u64`].
#[inline(always)]
pub unsafe fn add_u32(to: *mut u32, some: u64) {
    // SAFETY: as the caller promises.
    unsafe { asm!("lock *(u32 *)({} + 0) += {}", in(reg) to, in(reg) some) }
}
