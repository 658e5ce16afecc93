//! Memory shared with the kernel: counters, unwind tables. Knows no layout.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A shared mapping that lives as long as this value.
#[derive(Debug)]
pub struct Mapped {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory is reached through atomics only, so any thread may hold the mapping.
unsafe impl Send for Mapped {}

impl Mapped {
    /// Maps `length` bytes of `fd` from its start, readable and writable.
    ///
    /// # Errors
    /// The system call's: `EPERM` when over the locked-memory allowance.
    pub fn read_write(fd: BorrowedFd<'_>, length: usize) -> io::Result<Self> {
        Self::map(fd, length, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Maps `length` bytes of `fd` from its start, readable.
    ///
    /// # Errors
    /// The system call's.
    pub fn read_only(fd: BorrowedFd<'_>, length: usize) -> io::Result<Self> {
        Self::map(fd, length, ProtFlags::READ)
    }

    /// Maps `length` bytes of `fd` from `offset` on, readable and writable; both are multiples of a
    /// page.
    ///
    /// # Errors
    /// The system call's.
    pub fn window(fd: BorrowedFd<'_>, offset: u64, length: usize) -> io::Result<Self> {
        Self::map_at(fd, offset, length, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map(fd: BorrowedFd<'_>, length: usize, protection: ProtFlags) -> io::Result<Self> {
        Self::map_at(fd, 0, length, protection)
    }

    fn map_at(
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        protection: ProtFlags,
    ) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing of ours.
        let base = unsafe {
            mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, fd, offset)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, length })
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.base.addr().get() as u64
    }

    /// The 8 bytes at `offset`, which must be a multiple of 8.
    #[must_use]
    pub fn atomic(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.length, "inside the mapping");
        // SAFETY: in bounds and aligned by the assertion, mapped until drop, and AtomicU64 allows
        // the kernel to change it behind our back.
        unsafe { self.base.add(offset).cast().as_ref() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the range is the one mmap returned, and no reference into it outlives self.
        // A failure would leave the mapping behind, which nothing could mend here.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
    }
}
