//! The processors whose programs are known here, and what others call them.

/// A processor architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Machine {
    /// x86-64, that is amd64. Not x32, which is x86-64 with short pointers.
    X86_64,
    /// arm64, that is AArch64.
    Aarch64,
}

impl Machine {
    const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    /// As `uname -m` and perf.data have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// The one of this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|machine| machine.name() == name)
    }

    /// As ELF files and jitdumps have it: `e_machine` of the System V ABI (`EM_X86_64`,
    /// `EM_AARCH64`).
    #[must_use]
    pub fn elf(self) -> u16 {
        match self {
            Self::X86_64 => 62,
            Self::Aarch64 => 183,
        }
    }

    /// The one that ELF files have this number for.
    #[must_use]
    pub fn of_elf(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|machine| machine.elf() == number)
    }
}
