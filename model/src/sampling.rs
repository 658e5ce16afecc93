//! How samples are taken, as the command lines of both programs and the wire call it.

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
