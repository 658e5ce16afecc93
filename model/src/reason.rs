//! Why stacks end where they do, and why samples are missing: found by the collector, told to
//! people.

/// Why a stack ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EndReason {
    /// The thread's first function.
    Root,
    /// Memory not readable.
    Unreadable,
    /// Deeper than is recorded.
    DepthLimit,
    /// Code without a frame pointer.
    NoFramePointer,
    /// A return address outside executable memory.
    NotCode,
    /// A 32-bit process.
    Compat,
    /// The kernel's unwinder refused.
    Failed,
    /// The mappings of the process are not known.
    NoMappings,
    /// The unwind table of this code was not there yet.
    NoTableYet,
    /// There is no unwind table of this code.
    NoTable,
    /// The unwind table has no rule for this address.
    NoUnwindRule,
    /// The rule needs a register that is not known in this frame.
    RegisterLost,
    /// The caller's frame would not lie above.
    BadStack,
    /// The kernel side had not heard of the process's mappings yet.
    NoMappingsYet,
    /// Tables were replaced while the stack was walked.
    TablesReplaced,
    /// The code changes from one stack to another in a way that is not known.
    UnknownSwitch,
    /// The user of the process has had their share of the collector's unwind tables.
    OverShare,
    /// It was walked from a copy of its top, and goes on behind that.
    CopyEnded,
    /// It was walked from a copy of its top, and goes on elsewhere: on another stack, mostly.
    NotCopied,
    /// A reason a newer collector knows.
    Other,
    /// Who took it did not say.
    NotSaid,
}

impl EndReason {
    /// For the report.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Root => "reached the thread's root",
            Self::Unreadable => "next frame not readable",
            Self::DepthLimit => "deeper than is recorded",
            Self::NoFramePointer => "code without frame pointers",
            Self::NotCode => "return address not in code",
            Self::Compat => "32-bit process",
            Self::Failed => "kernel unwinder refused",
            Self::NoMappings => "mappings of the process unknown",
            Self::NoTableYet => "no unwind table yet",
            Self::NoTable => "no unwind table",
            Self::NoUnwindRule => "no unwind rule for this code",
            Self::RegisterLost => "unwind rule needs a register that is lost",
            Self::BadStack => "caller's frame not above this one",
            Self::NoMappingsYet => "mapping not known yet: process or mapping too young",
            Self::TablesReplaced => "unwind tables replaced meanwhile",
            Self::UnknownSwitch => "code that changes stacks in an unknown way",
            Self::OverShare => "no unwind table: limit of its user or process",
            Self::CopyEnded => "deeper than the copy of the stack",
            Self::NotCopied => "next frame in memory that was not copied",
            Self::Other => "for a reason this version does not know",
            Self::NotSaid => "not said by who took it",
        }
    }
}

/// Why the frames of an interpreter end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ListEnd {
    /// The thread's first function.
    Root,
    /// Memory not readable.
    Unreadable,
    /// Deeper than is recorded.
    DepthLimit,
    /// The thread was not among those that were looked at.
    ManyThreads,
    /// A frame was being made or unmade.
    Changing,
    /// The ring buffer had no room for them.
    RingFull,
    /// The native walk did not come by the evaluator that runs them.
    NoPlace,
    /// A reason a newer collector knows.
    Other,
}

impl ListEnd {
    /// For the report.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Root => "reached the thread's first function",
            Self::Unreadable => "memory not readable",
            Self::DepthLimit => "deeper than is recorded",
            Self::ManyThreads => "not shown: too many threads in its process",
            Self::Changing => "not shown: frame list changed while it was read",
            Self::RingFull => "not shown: ring buffer full",
            Self::NoPlace => "some not shown: the native frame that runs them was not found",
            Self::Other => EndReason::Other.text(),
        }
    }
}

/// Why something was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LostReason {
    /// Ring buffer full.
    RingFull,
    /// No scratch buffer.
    NoScratch,
    /// Epochs dropped by the collector.
    EpochDropped,
    /// Undecodable records.
    MalformedRecord,
    /// Mapping, exec, fork and exit events.
    Events,
    /// Times sampling was throttled.
    Throttled,
    /// Children that could not be followed.
    TargetsFull,
    /// CPUs that came online and could not be sampled.
    CpuRefused,
    /// Waits the ring buffer had no room for.
    WaitsRingFull,
    /// Nanoseconds of those.
    WaitsRingFullNs,
    /// Waits of more threads than are watched at once.
    ThreadsFull,
    /// Waits whose stacks did not come.
    WaitStacks,
    /// Waits whose end the kernel did not show.
    WaitsUnseen,
    /// Nanoseconds that passed in them and until the thread waited again.
    WaitsUnseenNs,
    /// Samples of processes outside the collector's pid namespace.
    OutsideNamespace,
    /// A reason a newer collector knows.
    Other,
}

impl LostReason {
    /// Whether what is counted are samples, which are part of those taken.
    #[must_use]
    pub fn counts_samples(self) -> bool {
        matches!(
            self,
            Self::RingFull
                | Self::NoScratch
                | Self::EpochDropped
                | Self::MalformedRecord
                | Self::WaitsRingFull
                | Self::WaitsUnseen
                | Self::OutsideNamespace
        )
    }

    /// For the report.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::RingFull => "samples: ring buffer full",
            Self::NoScratch => "samples: no scratch buffer",
            Self::EpochDropped => "samples: epochs dropped, symbolizer too slow or gone",
            Self::MalformedRecord => "samples: undecodable records",
            Self::Events => "process events: perf ring full (mappings were read again)",
            Self::Throttled => "times the kernel throttled sampling",
            Self::TargetsFull => "children that could not be followed",
            Self::CpuRefused => "CPUs that came online and could not be sampled",
            Self::WaitsRingFull => "waits: ring buffer full",
            Self::WaitsRingFullNs => "nanoseconds of waits: ring buffer full",
            Self::ThreadsFull => "waits of more threads than are watched at once",
            Self::WaitStacks => "waits without their stacks: ring buffer full",
            Self::WaitsUnseen => "waits: the kernel did not show their end",
            Self::WaitsUnseenNs => "nanoseconds until their threads waited again",
            Self::OutsideNamespace => "samples: of processes outside the collector's pid namespace",
            Self::Other => "for a reason this version does not know",
        }
    }
}
