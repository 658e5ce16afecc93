//! Addresses: one type for each thing they count from, and none of them a bare number. Only a
//! mapping turns an offset in a file into an address of a process, and only a segment turns it into
//! an address in an ELF file.

use std::fmt;

macro_rules! addresses {
    ($($(#[$doc:meta])* $name:ident)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
            pub struct $name(pub u64);

            impl $name {
                /// The address that is `bytes` higher; `None` when it is beyond the last one.
                #[must_use]
                pub fn checked_add(self, bytes: u64) -> Option<Self> {
                    self.0.checked_add(bytes).map(Self)
                }

                /// The address that is `bytes` higher, but at most the last one.
                #[must_use]
                pub fn saturating_add(self, bytes: u64) -> Self {
                    Self(self.0.saturating_add(bytes))
                }

                /// The address that is `bytes` lower, but at least the first one.
                #[must_use]
                pub fn saturating_sub(self, bytes: u64) -> Self {
                    Self(self.0.saturating_sub(bytes))
                }

                /// Bytes from `start` to it; `None` where it lies before.
                #[must_use]
                pub fn since(self, start: Self) -> Option<u64> {
                    self.0.checked_sub(start.0)
                }
            }

            impl CodeAddress for $name {
                fn before(self, bytes: u64) -> Self {
                    self.saturating_sub(bytes)
                }
            }

            impl fmt::LowerHex for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    self.0.fmt(f)
                }
            }
        )*
    };
}

addresses! {
    /// A byte of a file: `address − start of the mapping + offset of the mapping`. In the vDSO, a
    /// byte of its image.
    FileOffset
    /// An address as the program headers of an ELF file count them.
    VirtAddr
    /// An address in a process.
    UserAddr
    /// Bytes from `_text` of a kernel, or from the lowest symbol of a module.
    KernelOffset
    /// Where code of a kernel is in memory. It never leaves the host: no [`Address`] is made of it.
    KernelAddr
}

/// What can be the address of an instruction.
pub trait CodeAddress {
    /// The address so many bytes before it, or the first.
    #[must_use]
    fn before(self, bytes: u64) -> Self;
}

impl CodeAddress for Address {
    fn before(self, bytes: u64) -> Self {
        self.with_number(self.number().saturating_sub(bytes))
    }
}

/// Where in its executable code lies. The executable decides which kind it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// In a file or the vDSO.
    File(FileOffset),
    /// In the kernel or a module.
    Kernel(KernelOffset),
    /// In memory that is of no file.
    User(UserAddr),
    /// In code of an interpreter: bytes from its first instruction.
    Code(u64),
    /// Nowhere: the number of a name that came without an address.
    Name(u64),
}

impl Address {
    /// The number alone, as the wire has it.
    #[must_use]
    pub fn number(self) -> u64 {
        match self {
            Self::File(FileOffset(number))
            | Self::Kernel(KernelOffset(number))
            | Self::User(UserAddr(number))
            | Self::Code(number)
            | Self::Name(number) => number,
        }
    }

    /// The same kind of address with another number.
    #[must_use]
    pub fn with_number(self, number: u64) -> Self {
        match self {
            Self::File(_) => Self::File(FileOffset(number)),
            Self::Kernel(_) => Self::Kernel(KernelOffset(number)),
            Self::User(_) => Self::User(UserAddr(number)),
            Self::Code(_) => Self::Code(number),
            Self::Name(_) => Self::Name(number),
        }
    }

    /// The offset, of code in a file.
    #[must_use]
    pub fn file(self) -> Option<FileOffset> {
        match self {
            Self::File(offset) => Some(offset),
            _ => None,
        }
    }

    /// The offset, of code of a kernel.
    #[must_use]
    pub fn kernel(self) -> Option<KernelOffset> {
        match self {
            Self::Kernel(offset) => Some(offset),
            _ => None,
        }
    }

    /// The address, of code in memory that is of no file.
    #[must_use]
    pub fn user(self) -> Option<UserAddr> {
        match self {
            Self::User(address) => Some(address),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_stays_inside() {
        assert_eq!(FileOffset(u64::MAX).checked_add(1), None);
        assert_eq!(UserAddr(5).since(UserAddr(6)), None);
        assert_eq!(VirtAddr(5).since(VirtAddr(3)), Some(2));
        assert_eq!(KernelOffset(1).saturating_sub(2), KernelOffset(0));
        assert_eq!(Address::Kernel(KernelOffset(7)).with_number(9).kernel(), Some(KernelOffset(9)));
        assert_eq!(Address::File(FileOffset(7)).user(), None);
    }
}
