//! What the kernel side hands over of a user stack that it could not walk to its end.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::walk::unwind::Cursor;

/// Most bytes of a stack that are copied: a multiple of a page.
pub const MAX_COPY_BYTES: usize = 16 << 10;

/// In a record of [`RecordKind::Copy`](crate::RecordKind), between the head and the bytes.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CopyHead {
    /// The frame whose caller is not known: the last of the sample.
    pub cursor: Cursor,
    /// Bytes that follow, from its stack pointer on.
    pub bytes: u64,
}
