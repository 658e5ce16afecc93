//! Places in code, and the one −1 of return addresses.

use super::{ExecutableId, ProcessId};

/// How the address of a frame is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// The instruction that was running, or was interrupted by a signal.
    Exact,
    /// A return address: the call ends where it points.
    Caller,
}

/// A place in code: what names are looked up for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// What the code came from.
    pub executable: ExecutableId,
    /// The process, where the offset means nothing without it (anonymous and unmapped memory).
    pub process: Option<ProcessId>,
    /// Offset of the instruction: inside the call for callers.
    pub offset: u64,
    /// About when it was there, nanoseconds since the Unix epoch, where a process writes code while
    /// it is sampled: another function may have been at the same address before. 0: at any time.
    pub seen_ns: u64,
}

/// Offset of the instruction a frame stands for.
///
/// The only place where return addresses are decremented. One byte is enough: it lies inside the
/// call instruction, whatever its length, and so in the function, line and inlined chain of the
/// call.
#[must_use]
pub fn lookup_offset(offset: u64, kind: FrameKind) -> u64 {
    match kind {
        FrameKind::Exact => offset,
        FrameKind::Caller => offset.saturating_sub(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_callers_are_moved_into_the_call() {
        assert_eq!(lookup_offset(0x100, FrameKind::Exact), 0x100);
        assert_eq!(lookup_offset(0x100, FrameKind::Caller), 0xff);
        assert_eq!(lookup_offset(0, FrameKind::Caller), 0);
    }
}
