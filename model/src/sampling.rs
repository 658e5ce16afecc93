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

/// Whether stacks that cannot be walked where they are taken are copied, to be walked a moment
/// later on the same host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StackCopies {
    /// As much of them as there is room for.
    #[default]
    Auto,
    /// Nothing is copied: they end there.
    Off,
}

impl StackCopies {
    /// Every way.
    pub const ALL: [Self; 2] = [Self::Auto, Self::Off];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
        }
    }
}

impl FromStr for StackCopies {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        by_name(Self::ALL, Self::name, name)
    }
}

/// With what samples are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// With eBPF, and where that is refused through perf events.
    #[default]
    Auto,
    /// With eBPF, which takes CAP_BPF and CAP_PERFMON. The kernel side walks user stacks.
    Bpf,
    /// Through perf events alone. The kernel copies the top of user stacks, and user space walks
    /// them.
    Perf,
}

impl Source {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Bpf, Self::Perf];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Bpf => "bpf",
            Self::Perf => "perf",
        }
    }
}

impl FromStr for Source {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        by_name(Self::ALL, Self::name, name)
    }
}

/// Why samples are not taken with eBPF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoBpf {
    /// The collector lacks the capabilities.
    Denied,
    /// The kernel's lockdown.
    Lockdown,
    /// The kernel has no BTF.
    NoBtf,
    /// There are no programs for this processor.
    NoPrograms,
    /// eBPF knows the host's pids, and the collector is in another pid namespace.
    PidNamespace,
    /// The kernel did not take the programs.
    Kernel,
    /// Nobody wanted it.
    NotAsked,
}

impl NoBpf {
    /// For the report.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Denied => "the collector has no CAP_BPF and CAP_PERFMON",
            Self::Lockdown => "this kernel does not let eBPF read its memory (lockdown)",
            Self::NoBtf => "this kernel has no BTF",
            Self::NoPrograms => {
                "there are no eBPF programs and no unwind tables for this processor"
            }
            Self::PidNamespace => "the collector is not in the host's pid namespace",
            Self::Kernel => "the kernel did not load the eBPF programs",
            Self::NotAsked => "as asked for",
        }
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
        assert_eq!(Source::ALL.map(|it| it.name().parse()), Source::ALL.map(Ok));
        assert_eq!("lbr".parse::<Unwind>().unwrap_err().to_string(), "there is no \"lbr\"");
    }
}
