//! What the programs tell the collector, and what it tells them: the record in the ring, counters,
//! the configuration, limits. Plain data, of the same layout on both sides.

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
    /// Process id as user space has it (the kernel's tgid), in the initial pid namespace.
    pub pid: u32,
    /// Thread id.
    pub tid: u32,
    /// CPU the sample was taken on.
    pub cpu: u32,
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
    /// Of a wait: [`WaitState`] as a number.
    pub state: u8,
    /// Zero; keeps the size a multiple of 8.
    pub reserved: [u8; 3],
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
    /// A wait that is over. Its words are those of a [`Wait`], in place of frames, or of a
    /// [`Woken`].
    Wait = 2,
}

/// Words of a [`RecordKind::Wait`], which its header counts as user frames.
pub const WAIT_WORDS: usize = 5;

/// Likewise, where it is known who ended it.
pub const WOKEN_WORDS: usize = WAIT_WORDS + 7;

/// A wait that is over, as the ring has it.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Wait {
    /// `time_ns` is when it ended, `period` how many nanoseconds it took.
    pub header: SampleHeader,
    /// The number of the user stack it waited with; 0: nobody saw it begin.
    pub user_stack: u64,
    /// The number of the kernel stack.
    pub kernel_stack: u64,
    /// Nanoseconds until it could run again, weighted, see [`Config::wait_threshold_ns`].
    pub blocked_ns: u64,
    /// Nanoseconds from then until it ran, likewise.
    pub runnable_ns: u64,
    /// How many waits it stands for.
    pub count: u64,
}

/// Who woke a thread, and from where.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Waker {
    /// Which wait it ended: its [`Waiting::since_ns`].
    pub of: u64,
    /// The number of its user stack; 0: it was not walked.
    pub user_stack: u64,
    /// The number of its kernel stack; 0: it was not taken.
    pub kernel_stack: u64,
    /// As in [`SampleHeader`]; 0: the capture is not of this process.
    pub start_boottime_ns: u64,
    /// As in [`SampleHeader`].
    pub pid: u32,
    /// As in [`SampleHeader`]; 0: the CPU was idle when an interrupt came.
    pub tid: u32,
    /// As in [`SampleHeader`].
    pub comm: [u8; 16],
}

/// A wait that is over, and who ended it.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Woken {
    /// The wait.
    pub wait: Wait,
    /// Who ended it.
    pub waker: Waker,
}

/// How a thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum WaitState {
    /// For an event, and signals interrupt it: `TASK_INTERRUPTIBLE`.
    Sleep = 0,
    /// For a disk or a lock of the kernel, and nothing interrupts it: `TASK_UNINTERRUPTIBLE`.
    Disk = 1,
    /// A signal or a debugger stopped it.
    Stopped = 2,
    /// It could run, and another thread was given the CPU.
    Preempted = 3,
}

/// Threads whose waits are watched at once.
pub const MAX_WAITING: u32 = 65_536;

/// Places for numbers of stacks the collector was told of, a power of two.
pub const TOLD_STACKS: u32 = 65_536;

/// A thread that waits, in the kernel side's map by thread id.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Waiting {
    /// Since when, `CLOCK_MONOTONIC` nanoseconds; 0: it runs.
    pub since_ns: u64,
    /// Since when it could run, likewise; 0: it cannot yet.
    pub woken_ns: u64,
    /// The number of the user stack it waits with; 0: nobody saw it begin.
    pub user_stack: u64,
    /// The number of the kernel stack, once it was looked at.
    pub kernel_stack: u64,
    /// Of which wait that is: its `since_ns`.
    pub kernel_stack_of: u64,
    /// As in [`SampleHeader`].
    pub start_boottime_ns: u64,
    /// As in [`SampleHeader`].
    pub cgroup_id: u64,
    /// As in [`SampleHeader`].
    pub pid: u32,
    /// [`WaitState`] as a number.
    pub state: u32,
    /// Which of its short waits are taken.
    pub stratum: Stratum,
    /// As in [`SampleHeader`].
    pub comm: [u8; 16],
}

/// Chooses among short waits of a thread, each with a probability of its length divided by the
/// threshold.
///
/// They are laid one behind the other and cut into strata as long as the threshold. A wait is taken
/// for each stratum whose random point it covers. So of each stratum one wait is taken, and the sum
/// of what is taken is at most a threshold or two from the sum of all. With a draw for each wait,
/// the sum of 3 s of short waits would have a standard deviation of 2 % at a threshold of 1 ms.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stratum {
    /// Nanoseconds of it that have passed.
    pub past_ns: u32,
    /// Its point, nanoseconds from its start.
    pub point_ns: u32,
}

impl Stratum {
    /// Begins one with a random point.
    #[inline(always)]
    #[must_use]
    pub fn new(threshold_ns: u32, random: u32) -> Self {
        Self { past_ns: 0, point_ns: point(threshold_ns, random) }
    }

    /// Whether a wait that takes this long, or less than a sixteenth of the threshold longer, may
    /// be taken.
    #[inline(always)]
    #[must_use]
    pub fn may_take(&self, wait_ns: u64, threshold_ns: u32) -> bool {
        let past = u64::from(self.past_ns) + wait_ns + u64::from(threshold_ns / 16);
        let covers = self.point_ns >= self.past_ns && u64::from(self.point_ns) < past;
        covers || past >= u64::from(threshold_ns)
    }

    /// How often a wait shorter than the threshold is taken: never, once or twice.
    #[inline(always)]
    pub fn take(&mut self, wait_ns: u32, threshold_ns: u32, random: u32) -> u32 {
        let mut taken = 0;
        let past = u64::from(self.past_ns) + u64::from(wait_ns);
        if self.point_ns >= self.past_ns && u64::from(self.point_ns) < past {
            taken += 1;
        }
        if past < u64::from(threshold_ns) {
            self.past_ns = past as u32;
            return taken;
        }
        self.past_ns = (past - u64::from(threshold_ns)) as u32;
        self.point_ns = point(threshold_ns, random);
        if self.point_ns < self.past_ns {
            taken += 1;
        }
        taken
    }
}

/// How many waits one stands for that was taken with a weight: rounded up or down at random, so
/// that the sum of many is right.
#[inline(always)]
#[must_use]
pub fn waits_behind(wait_ns: u32, weight_ns: u64, random: u32) -> u64 {
    let wait_ns = u64::from(wait_ns);
    if wait_ns == 0 {
        return 0;
    }
    let rest = weight_ns % wait_ns;
    weight_ns / wait_ns + u64::from((u64::from(random) * wait_ns) >> 32 < rest)
}

/// A random number becomes one less than the threshold.
#[inline(always)]
fn point(threshold_ns: u32, random: u32) -> u32 {
    ((u64::from(random) * u64::from(threshold_ns)) >> 32) as u32
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
    /// Waits of threads that [`MAX_WAITING`] has no room for, for an event or for a CPU.
    ThreadsFull = 7,
    /// Of those in `WaitsTaken`, waits of threads that waited again and were not seen to run in
    /// between: some kernels hide the switches of processes they protect. Of threads in real time
    /// alone. Of others the kernel knows when they were given their CPU.
    WaitsUnseen = 8,
    /// Nanoseconds from their begin until the thread waited again.
    WaitsUnseenNs = 9,
}

/// Slots each CPU has in `COUNTERS`.
pub const COUNTERS_PER_CPU: u32 = 16;

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
    /// Depth of that cgroup below the root of the unified hierarchy (0 = the root).
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
    /// The collector, in the initial pid namespace.
    pub collector: u32,
    /// A bit for each event that the kernel counts one by one: [`crate::Picker`] picks its samples.
    pub counted: u32,
    /// Desired time between two samples of such an event on a CPU, in nanoseconds.
    pub interval_ns: u32,
    /// Waits of at least this many nanoseconds are all taken. Of shorter ones [`Stratum`] chooses
    /// some, each of which stands for as many nanoseconds: totals stay as they are.
    pub wait_threshold_ns: u32,
    /// A bit for each [`WaitState`] that is recorded; 0: waits are not.
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
    /// Zero; keeps the size a multiple of 8.
    pub reserved: u32,
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
    use super::{Config, SampleHeader, WAIT_WORDS, WOKEN_WORDS, Wait, Woken};
    const _: () = assert!(size_of::<SampleHeader>() == 72 && align_of::<SampleHeader>() == 8);
    const _: () = assert!(size_of::<Config>() == 104);
    const _: () = assert!(size_of::<Wait>() == size_of::<SampleHeader>() + WAIT_WORDS * 8);
    const _: () = assert!(size_of::<Woken>() == size_of::<SampleHeader>() + WOKEN_WORDS * 8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_of_short_waits_adds_up_to_all_of_them() {
        const THRESHOLD: u32 = 1_000_000;
        let mut seed = 1u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 32) as u32
        };
        let mut stratum = Stratum::new(THRESHOLD, random());
        // Two kinds that take turns, in step with the strata.
        let (mut taken, mut all) = ([0u64; 2], [0u64; 2]);
        for turn in 0..20_000 {
            let kind = turn % 2;
            let wait = [THRESHOLD / 4, THRESHOLD / 4 * 3][kind];
            let may = stratum.may_take(u64::from(wait) - 20_000, THRESHOLD);
            let times = stratum.take(wait, THRESHOLD, random());
            assert!(may || times == 0, "taken and not seen to come");
            taken[kind] += u64::from(times);
            all[kind] += u64::from(wait);
        }
        let sum: u64 = taken.iter().sum();
        assert!(sum.abs_diff(10_000) <= 1, "{taken:?}");
        let of = |wait_ns| waits_behind(wait_ns, THRESHOLD.into(), random());
        let counted: u64 = (0..3_000).map(|_| THRESHOLD / 7 * 4).map(of).sum();
        assert!(counted.abs_diff(3_000 * 7 / 4) < 150, "{counted}");
        for (taken, all) in taken.into_iter().zip(all) {
            let of = taken * u64::from(THRESHOLD);
            assert!(of.abs_diff(all) < all / 30, "{of} of {all}");
        }
    }
}
