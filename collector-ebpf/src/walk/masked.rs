//! An index into an array of a power of two, so that the verifier sees it is inside.

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
