//! How samples are taken, as the command lines of both programs and the wire call it.

use std::str::FromStr;

/// Nothing has this name.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("there is no {0:?}")]
pub struct UnknownName(String);

pub(crate) fn by_name<T: Copy, const N: usize>(
    all: [T; N],
    name_of: fn(T) -> &'static str,
    name: &str,
) -> Result<T, UnknownName> {
    all.into_iter().find(|&it| name_of(it) == name).ok_or_else(|| UnknownName(name.to_owned()))
}

/// How user stacks are walked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unwind {
    /// By unwind tables, and by frame pointers through code made at run time.
    #[default]
    Auto,
    /// By unwind tables alone.
    Tables,
    /// By frame pointers alone.
    FramePointers,
}

impl Unwind {
    /// Every way.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Tables, Self::FramePointers];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tables => "dwarf",
            Self::FramePointers => "fp",
        }
    }
}

impl FromStr for Unwind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        by_name(Self::ALL, Self::name, name)
    }
}

/// Which files of processes leave the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Share {
    /// None.
    Never,
    /// Those a symbolizer asks for. A capture file asks for none.
    #[default]
    Missing,
    /// All that have samples: in a capture file as well.
    Always,
}

impl Share {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::Never, Self::Missing, Self::Always];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Missing => "missing",
            Self::Always => "always",
        }
    }
}

impl FromStr for Share {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        by_name(Self::ALL, Self::name, name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_known_by_its_name() {
        assert_eq!(Unwind::ALL.map(|it| it.name().parse()), Unwind::ALL.map(Ok));
        assert_eq!(Share::ALL.map(|it| it.name().parse()), Share::ALL.map(Ok));
        assert_eq!("lbr".parse::<Unwind>().unwrap_err().to_string(), "there is no \"lbr\"");
    }
}
