//! Places in code, and the one −1 of return addresses.

use super::{ExecutableId, ProcessId};
use crate::{Address, CodeAddress};

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
    /// The process, where the address means nothing without it (anonymous and unmapped memory).
    pub process: Option<ProcessId>,
    /// Address of the instruction: inside the call for callers.
    pub address: Address,
    /// About when the code was there, in nanoseconds since the Unix epoch; 0: at any time. It is
    /// set where a process writes code while it is sampled: another function may have been at the
    /// same address before.
    pub seen_ns: u64,
}

/// Address of the instruction a frame stands for.
///
/// The only place where return addresses are decremented. One byte is enough: it lies inside the
/// call instruction, whatever its length, and so in the function, line and inlined chain of the
/// call.
#[must_use]
pub fn lookup_address<A: CodeAddress>(address: A, kind: FrameKind) -> A {
    match kind {
        FrameKind::Exact => address,
        FrameKind::Caller => address.before(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FileOffset;

    #[test]
    fn only_callers_are_moved_into_the_call() {
        let at = |number| Address::File(FileOffset(number));
        assert_eq!(lookup_address(at(0x100), FrameKind::Exact), at(0x100));
        assert_eq!(lookup_address(at(0x100), FrameKind::Caller), at(0xff));
        assert_eq!(lookup_address(at(0), FrameKind::Caller), at(0));
    }
}
