//! Places in code, and the one −1 of return addresses.

use super::{Executable, ExecutableId, LocationId, ProcessId, Profile};
use crate::{Address, CodeAddress, Runtime};

/// How the address of a frame is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// The instruction that was running, or was interrupted by a signal.
    Exact,
    /// A return address: the call ends where it points.
    Caller,
}

/// What kind of code a frame is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameType {
    /// Code of a file, or of unknown memory.
    Native,
    /// Code that Go compiled.
    Go,
    /// The kernel.
    Kernel,
    /// Code made at run time.
    Jit,
    /// A function that an interpreter runs.
    Code(Runtime),
}

impl FrameType {
    /// OpenTelemetry's word (`profile.frame.type`), and `jit`.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Go => "go",
            Self::Kernel => "kernel",
            Self::Jit => "jit",
            Self::Code(runtime) => runtime.frame_type(),
        }
    }
}

impl Profile {
    /// What kind of code is at a location.
    #[must_use]
    pub fn frame_type(&self, at: LocationId) -> FrameType {
        let Location { executable, address, .. } = self.locations[at.index()];
        if let (Address::File(at), Some(code)) = (address, self.go_code.get(&executable))
            && code.contains(&at)
        {
            return FrameType::Go;
        }
        match &self.executables[executable.index()] {
            Executable::Code(code) => FrameType::Code(code.runtime),
            Executable::Anonymous => FrameType::Jit,
            other if other.is_kernel() => FrameType::Kernel,
            _ => FrameType::Native,
        }
    }
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
    use crate::profile::Builder;

    #[test]
    fn code_of_go_is_told_from_the_rest_of_its_file() {
        let mut into = Builder::new();
        let file = Executable::File { path: "both".to_owned(), key: None };
        let executable = into.executable(file).unwrap();
        into.go_code(executable, 0x1000, 0x100);
        let at = |number| Location {
            executable,
            process: None,
            address: Address::File(FileOffset(number)),
            seen_ns: 0,
        };
        let numbers = [0xfff, 0x1000, 0x10ff, 0x1100];
        let places = numbers.map(|number| into.location(at(number)).unwrap());
        let profile = into.build();
        let kinds = places.map(|place| profile.frame_type(place).text());
        assert_eq!(kinds, ["native", "go", "go", "native"]);
    }

    #[test]
    fn only_callers_are_moved_into_the_call() {
        let at = |number| Address::File(FileOffset(number));
        assert_eq!(lookup_address(at(0x100), FrameKind::Exact), at(0x100));
        assert_eq!(lookup_address(at(0x100), FrameKind::Caller), at(0xff));
        assert_eq!(lookup_address(at(0), FrameKind::Caller), at(0));
    }
}
