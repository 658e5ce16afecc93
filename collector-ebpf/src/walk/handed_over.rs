//! What the kernel side hands over of a user stack that it could not walk to its end.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::walk::unwind::Cursor;

/// Most bytes of a stack that are copied: a multiple of a page.
pub const MAX_COPY_BYTES: usize = 16 << 10;

/// Parts of memory in one copy.
pub const PARTS: usize = 6;
/// Which of them is the stack of the stack pointer.
pub const OF_POINTER: usize = 0;
/// Which is the stack that was left for it: in Go, of the goroutine or of the scheduler. What leads
/// from the one to the other is in the rest.
pub const OF_LEFT: usize = 1;

/// A part of the memory of a process.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Part {
    /// Its address.
    pub start: u64,
    /// How many bytes it has.
    pub bytes: u64,
}

impl Part {
    /// The parts of a copy of one stack.
    #[must_use]
    pub fn alone(start: u64, bytes: usize) -> [Self; PARTS] {
        let mut parts = [Self::default(); PARTS];
        parts[OF_POINTER] = Self { start, bytes: bytes as u64 };
        parts
    }
}

/// In a record of [`RecordKind::Copy`](crate::RecordKind), between the head and the bytes.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CopyHead {
    /// The frame whose caller is not known: the last of the sample.
    pub cursor: Cursor,
    /// What follows, one part behind the other.
    pub parts: [Part; PARTS],
}
