//! The memory of a process, however it is read: in the kernel, from a copy, from one that is
//! stopped.

/// Memory of the process.
pub trait Memory {
    /// Eight bytes.
    fn word(&mut self, address: u64) -> Option<u64>;
    /// As many words as there is room for; false when they are not to be read.
    fn words<const N: usize>(&mut self, address: u64, to: &mut [u64; N]) -> bool;
    /// What was found depends on more than the words that were read.
    #[inline(always)]
    fn needs_more(&mut self) {}
}
