//! How the allocator gives memory back. For the programs, not for those that embed their libraries.

#![allow(unsafe_code, reason = "mallopt")]

/// Blocks of a megabyte and more go back to the system when they are freed.
///
/// glibc would otherwise take the size of such a block, once freed, as the one up to which it keeps
/// memory for itself (mallopt(3), "dynamic mmap threshold"): resolving 5 GB of debug information
/// then peaks at 390 MiB instead of 212, and takes as long. The collector reads the kernel's types
/// and symbols at its start.
pub fn give_back_large_blocks() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number in the allocator, before there is a second thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
    }
}
