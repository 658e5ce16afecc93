//! What the programs tell the collector, and what it tells them: the record in the ring, counters,
//! the configuration, limits. Plain data, of the same layout on both sides. What they tell of waits
//! is in `wait.rs`.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Frames of user stack a sample may carry, the interrupted instruction included.
pub const MAX_USER_FRAMES: usize = 1024;
/// Frames of kernel stack a sample may carry: `kernel.perf_event_max_stack`'s default.
pub const MAX_KERNEL_FRAMES: usize = 127;
/// CPUs that have counters of their own. Samples on a higher CPU share the last row.
pub const MAX_CPUS: u32 = 1024;
/// Events that may be sampled at once: one program each.
pub const MAX_EVENTS: usize = 8;
/// Places in the map of programs that others call: what takes a sample, what walks its stack, what
/// picks the samples of an event that is counted one by one.
pub const SAMPLE: u32 = 0;
/// See [`SAMPLE`].
pub const WALK: u32 = 1;
/// See [`SAMPLE`].
pub const PICK: u32 = 2;
/// Likewise: what copies a stack that cannot be walked yet.
pub const COPY: u32 = 3;
/// Likewise: what walks an interpreter's own list of frames.
pub const LIST: u32 = 4;
/// Place in the map of programs that those at a switch call: what walks an interpreter's own
/// list of frames. At the first is what walks native ones.
pub const WAIT_LIST: u32 = 1;
/// Likewise, what copies a stack that cannot be walked yet.
pub const WAIT_COPY: u32 = 2;
/// Processes a followed capture may hold at once.
pub const MAX_TARGETS: u32 = 65_536;

/// Head of a ring-buffer record. `user_frames` then `kernel_frames` native-endian `u64`
/// instruction pointers follow it, each leaf first.
///
/// Every field has its natural alignment and the size is a multiple of 8, so there is no padding.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SampleHeader {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time_ns: u64,
    /// Start of the process (its group leader) in `CLOCK_BOOTTIME` nanoseconds; with the pid, its
    /// identity.
    pub start_boottime_ns: u64,
    /// cgroup v2 id of the task: the inode of its directory in the unified hierarchy.
    pub cgroup_id: u64,
    /// Events since the last sample on this CPU, in the unit of the event (nanoseconds for
    /// cpu-clock).
    pub period: u64,
    /// Process id as user space has it (the kernel's tgid), in the collector's pid namespace.
    pub pid: u32,
    /// Thread id, likewise.
    pub tid: u32,
    /// CPU the sample was taken on.
    pub cpu: u32,
    /// Process id in the initial pid namespace; 0: not known.
    pub host_pid: u32,
    /// Number of user frames that follow.
    pub user_frames: u16,
    /// Number of kernel frames that follow.
    pub kernel_frames: u16,
    /// [`UserEnd`] as a number.
    pub user_end: u8,
    /// [`KernelEnd`] as a number.
    pub kernel_end: u8,
    /// Which event it is of: the number of the program that took it, `sample_0` and so on.
    pub event: u8,
    /// [`RecordKind`] as a number.
    pub kind: u8,
    /// Of a wait: [`WaitState`](crate::WaitState) as a number.
    pub state: u8,
    /// Of a user stack with frames of an interpreter: 1 + a [`ListEnd`](crate::managed::ListEnd) as
    /// a number; 0: it has none.
    pub list_end: u8,
    /// Zero; keeps the size a multiple of 8.
    pub reserved: [u8; 6],
    /// Name of the thread, NUL-padded.
    pub comm: [u8; 16],
}

/// What a ring-buffer record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    /// A sample of an event, with its stacks.
    Sample = 0,
    /// A stack that threads wait with: a user stack, or a kernel stack, which is of no process.
    /// `period` is its number, a hash: waits refer to it.
    Stack = 1,
    /// A wait that is over. Its words are those of a [`Wait`](crate::Wait), in place of frames, or
    /// of a [`Woken`](crate::Woken).
    Wait = 2,
    /// A part of a user stack that could not be walked yet: a [`CopyHead`](crate::CopyHead) in
    /// place of frames, and the bytes from its stack pointer on. The next sample of this CPU is of
    /// it, with the same time.
    Copy = 3,
    /// Frames of an interpreter: a [`ManagedHead`](crate::managed::ManagedHead) in place of frames,
    /// and the entries. They are of the next sample or stack of this CPU with the same time.
    Managed = 4,
    /// What names a function of an interpreter: a [`CodeHead`](crate::managed::CodeHead) in place
    /// of frames, and the bytes. Samples behind it may refer to it.
    Code = 5,
    /// A process that has ended, and its parent knows. `period` is the CPU time of all its threads,
    /// nanoseconds. Of the numbers of the process there is `host_pid` alone.
    Ended = 6,
    /// A piece of the source of a script: a [`ScriptHead`](crate::managed::ScriptHead) in place of
    /// frames, and the bytes.
    Script = 7,
}

/// Why a user stack ended where it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum UserEnd {
    /// The chain ended in a null frame pointer or return address: the thread's first function.
    Root = 0,
    /// A kernel thread, an io_uring worker, or a task that is executing a new program or ending.
    NoUserStack = 1,
    /// The next frame's memory could not be read (paged out or not mapped).
    Unreadable = 2,
    /// [`MAX_USER_FRAMES`] reached.
    DepthLimit = 3,
    /// The frame pointer is null in the leaf, lies below the stack pointer, or does not grow: the
    /// code keeps none.
    NoFramePointer = 4,
    /// A 32-bit process: only the interrupted instruction is known.
    Compat = 5,
    /// A return address outside executable memory.
    NotCode = 6,
    /// The unwind table of this code is not there yet.
    NoTableYet = 7,
    /// There is no unwind table of this code.
    NoTable = 8,
    /// The table has no rule for this address.
    NoRule = 9,
    /// The rule needs a register that is not known in this frame.
    RegisterLost = 10,
    /// The caller's frame would not lie above.
    BadStack = 11,
    /// The mappings of the process are not known yet.
    NoMappingsYet = 12,
    /// Tables were replaced while this stack was walked.
    TablesReplaced = 13,
    /// The code changes from one stack to another in a way that is not known.
    UnknownSwitch = 14,
    /// The user of this process has more mapped than is their share of the maps.
    OverShare = 15,
    /// The stack was walked from a copy, which ends there. Never from here.
    CopyEnded = 16,
    /// The kernel's own walk by frame pointers found no more. Never from here.
    NotSaid = 17,
    /// The stack was walked from a copy, and goes on in memory that is elsewhere. Never from here.
    NotCopied = 18,
}

impl UserEnd {
    /// Whether the walk goes on once the collector has learned what it is about to learn.
    #[inline(always)]
    #[must_use]
    pub fn is_early(end: u64) -> bool {
        end == Self::NoTableYet as u64 || end == Self::NoMappingsYet as u64
    }
}

/// Why a kernel stack ended where it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum KernelEnd {
    /// The kernel's unwinder gave all it had.
    Complete = 0,
    /// The sample was taken in user mode, or kernel stacks were not asked for.
    None = 1,
    /// [`MAX_KERNEL_FRAMES`] reached.
    DepthLimit = 2,
    /// `bpf_get_stack` refused.
    Failed = 3,
}

/// Counts what no record can tell, because there is no record. How stacks ended is in the records.
///
/// Rows of the `COUNTERS` map: slot `cpu * COUNTERS_PER_CPU + counter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Counter {
    /// Samples the filter let through: what a profile must add up to.
    Taken = 0,
    /// Of those, records the ring buffer had no room for.
    RingFull = 1,
    /// Of those, samples dropped for want of a scratch buffer; never seen, counted all the same.
    NoScratch = 2,
    /// Children that did not fit into `TARGETS`; their samples are not in `Taken`.
    TargetsFull = 3,
    /// Parts of waits, blocked and runnable, that became records or should have; each as often as
    /// the waits it stands for.
    WaitsTaken = 4,
    /// Of those, records the ring buffer had no room for.
    WaitsLost = 5,
    /// Nanoseconds of those.
    WaitsLostNs = 6,
    /// Waits of threads that [`MAX_WAITING`](crate::MAX_WAITING) has no room for, for an event or
    /// for a CPU.
    ThreadsFull = 7,
    /// Of those in `WaitsTaken`, waits of threads that waited again and were not seen to run in
    /// between: some kernels hide the switches of processes they protect. Of threads in real time
    /// alone. Of others the kernel knows when they were given their CPU.
    WaitsUnseen = 8,
    /// Nanoseconds from their begin until the thread waited again.
    WaitsUnseenNs = 9,
    /// Of those in `Taken`, samples of processes outside the collector's pid namespace.
    Outside = 10,
}

/// Slots each CPU has in `COUNTERS`.
pub const COUNTERS_PER_CPU: u32 = 16;

/// [`Config::cgroup_level`] where it is not known: in a cgroup namespace the root is not to be
/// seen.
pub const ANY_LEVEL: u32 = u32::MAX;

/// Which tasks are sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Scope {
    /// Every task but idle.
    #[default]
    All = 0,
    /// Threads of the processes in `TARGETS`.
    Processes = 1,
    /// Tasks in one cgroup and those below it.
    Cgroup = 2,
}

/// Set by the collector before load, as the `CONFIG` global. Offsets are bytes into
/// `struct task_struct`, read from the running kernel's BTF: Rust eBPF has no CO-RE.
#[cfg_attr(not(target_arch = "bpf"), derive(IntoBytes, Immutable))]
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Config {
    /// Id of the cgroup asked for, with [`Scope::Cgroup`].
    pub cgroup_id: u64,
    /// [`Scope`] as a number.
    pub scope: u32,
    /// Depth of that cgroup below the root of the unified hierarchy (0 = the root), or
    /// [`ANY_LEVEL`].
    pub cgroup_level: u32,
    /// Non-zero: record kernel stacks.
    pub kernel_stacks: u32,
    /// Offset of `flags`.
    pub task_flags: u32,
    /// Offset of `pid` (a thread id).
    pub task_pid: u32,
    /// Offset of `tgid`.
    pub task_tgid: u32,
    /// Offset of `group_leader`.
    pub task_group_leader: u32,
    /// Offset of `start_boottime`.
    pub task_start_boottime: u32,
    /// [`Unwind`] as a number.
    pub unwind: u32,
    /// Offset of `thread.fsbase`.
    pub task_thread_pointer: u32,
    /// Offset of `mm`.
    pub task_mm: u32,
    /// The collector.
    pub collector: u32,
    /// A bit for each event that the kernel counts one by one: [`crate::Picker`] picks its samples.
    pub counted: u32,
    /// Desired time between two samples of such an event on a CPU, in nanoseconds.
    pub interval_ns: u32,
    /// Waits of at least this many nanoseconds are all taken. Of shorter ones
    /// [`Stratum`](crate::Stratum) chooses some, each of which stands for as many nanoseconds:
    /// totals stay as they are.
    pub wait_threshold_ns: u32,
    /// A bit for each [`WaitState`](crate::WaitState) that is recorded; 0: waits are not.
    pub wait_states: u32,
    /// Which event blocked time is of; the one behind it is runnable time.
    pub wait_event: u32,
    /// What is added up of how threads are scheduled, and of which:
    /// [`AddUp`](crate::sched_stats::AddUp) as a number.
    pub add_up: u32,
    /// How many counters are read at each switch.
    pub counters: u32,
    /// Non-zero: with each wait it is recorded who ended it.
    pub wakers: u32,
    /// Offset of `policy`.
    pub task_policy: u32,
    /// Offset of `se.sum_exec_runtime`.
    pub task_runtime: u32,
    /// Offset of `se.prev_sum_exec_runtime`: that of when it was given its CPU.
    pub task_runtime_before: u32,
    /// Offset of `self_exec_id`: how often the process has become another program.
    pub task_exec_id: u32,
    /// The collector's pid namespace, by its inode; 0: it is the initial one, whose numbers tasks
    /// have themselves. What follows is 0 then.
    pub pid_namespace: u32,
    /// Offset of `thread_pid`.
    pub task_thread_pid: u32,
    /// Offset of `level` in `struct pid`: how deep the namespace of the task is.
    pub pid_level: u32,
    /// Offset of `numbers` in it: a `struct upid` for each namespace that the task is in.
    pub pid_numbers: u32,
    /// Offset of `ns` in `struct upid`.
    pub upid_ns: u32,
    /// Offset of `ns.inum` in `struct pid_namespace`.
    pub namespace_inode: u32,
    /// Non-zero: stacks that cannot be walked yet are copied.
    pub stack_copies: u32,
    /// Non-zero: frames of interpreters are recorded.
    pub managed: u32,
    /// Offset of `signal`.
    pub task_signal: u32,
    /// Offset of `sum_sched_runtime` in `struct signal_struct`: CPU time of threads that are gone.
    pub signal_runtime: u32,
}

/// How user stacks are walked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Unwind {
    /// By frame pointers alone.
    FramePointers = 0,
    /// By tables, and by frame pointers through code made at run time.
    #[default]
    Auto = 1,
    /// By tables alone.
    Tables = 2,
}

/// Set in a user frame's address: it was interrupted by a signal, and is no return address. No user
/// address has it.
pub const INTERRUPTED: u64 = 1 << 63;

/// Bytes of the ring buffer, a power of two of pages.
pub const RING_BYTES: u32 = 8 << 20;

#[cfg(not(target_arch = "bpf"))]
mod layout {
    //! What the two compilations must agree on.
    use super::{Config, SampleHeader};
    const _: () = assert!(size_of::<SampleHeader>() == 80 && align_of::<SampleHeader>() == 8);
    const _: () = assert!(size_of::<Config>() == 144);
}
