//! What an epoch defines and refers to, as tables of plain entries: processes, mappings, threads,
//! frames, samples, wakers. Made in `batch.rs`, turned into messages by `wire.rs`.

use std::rc::Rc;

use stackwire_model::{Address, FileOffset, SchedStats, UserAddr, Wait};

use crate::normalize::FrameKind;

/// A process with samples in this epoch, as it was at the first of them; or one that ended in it.
#[derive(Clone, Debug, Default)]
pub struct ProcessDef {
    /// Image the definition is of.
    pub image: u64,
    /// Process id.
    pub pid: u32,
    /// Its pid in the initial pid namespace; 0: not known.
    pub host_pid: u32,
    /// Start in boottime nanoseconds.
    pub start_ns: u64,
    /// Name of the main thread.
    pub comm: String,
    /// Counts images.
    pub generation: u32,
    /// cgroup v2 id.
    pub cgroup_id: u64,
    /// Path of its cgroup.
    pub cgroup_path: Option<Rc<str>>,
    /// The process that made it; 0: unknown.
    pub parent: u32,
    /// When it became this, monotonic nanoseconds; 0: nobody saw it.
    pub since_ns: u64,
    /// When it ended, monotonic nanoseconds; 0: it has not.
    pub end_ns: u64,
    /// Frames lie in anonymous memory: a perf-map may name them.
    pub runs_anonymous: bool,
    /// CPU time it used in this epoch, or since the one in which that was asked last, nanoseconds.
    pub cpu_ns: u64,
}

/// A mapping some frame lies in.
#[derive(Clone, Copy, Debug)]
pub struct MappingDef {
    /// Index into [`Epoch::processes`].
    pub process: u32,
    /// Index into [`Epoch::executables`].
    pub executable: u32,
    /// First address.
    pub start: UserAddr,
    /// Bytes.
    pub length: u64,
    /// Offset in the file of the first address.
    pub file_offset: FileOffset,
    /// Since when, monotonic nanoseconds; 0: as long as the process.
    pub since_ns: u64,
}

/// A thread with samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ThreadDef {
    /// Index into [`Epoch::processes`].
    pub process: u32,
    /// Thread id.
    pub tid: u32,
    /// Name, NUL-padded.
    pub comm: [u8; 16],
}

/// A frame and, as its parent, the frame that called it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    /// 0 = none, else 1 + index of the parent.
    pub parent: u32,
    /// Index into [`Epoch::executables`].
    pub executable: u32,
    /// Address in the executable.
    pub address: Address,
    /// How to read the address.
    pub kind: FrameKind,
}

/// A sample.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub time_ns: u64,
    /// Index into [`Epoch::threads`].
    pub thread: u32,
    /// CPU.
    pub cpu: u32,
    /// 0 = none, else 1 + index into [`Epoch::stacks`].
    pub user: u32,
    /// Likewise.
    pub kernel: u32,
    /// Weight.
    pub value: u64,
    /// How many events it stands for.
    pub count: u32,
    /// The wait it is a part of, if it is of one.
    pub wait: Option<Wait>,
}

/// Who ended waits, and from where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WakerDef {
    /// A thread.
    Thread {
        /// Process id.
        pid: u32,
        /// Thread id.
        tid: u32,
        /// Name, NUL-padded.
        comm: [u8; 16],
        /// 0 = the capture is not of it, else 1 + index into [`Epoch::processes`].
        process: u32,
        /// As in [`Sample`].
        user: u32,
        /// Likewise.
        kernel: u32,
    },
    /// An interrupt, of a timer for example.
    Interrupt {
        /// As in [`Sample`]: what the interrupt ran.
        kernel: u32,
    },
}

/// How a process or a thread was scheduled.
#[derive(Clone, Debug)]
pub struct SchedDef {
    /// 1 + index into [`Epoch::processes`]; 0: those there was no room to tell apart.
    pub process: u32,
    /// 1 + index into [`Epoch::threads`]; 0: all threads of the process.
    pub thread: u32,
    /// The sums.
    pub stats: SchedStats,
}
