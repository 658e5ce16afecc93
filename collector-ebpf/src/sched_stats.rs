//! What the kernel side adds up of each process: how long its threads ran in one go and waited for
//! a CPU, why they left it, and hardware counters. Plain data, of the same layout on both sides.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Buckets of a [`Times`].
pub const BUCKETS: usize = 624;
/// Each power of two has so many buckets, as a power of two itself: a bucket is at most a sixteenth
/// of its times wide.
const SUB_BITS: u32 = 4;
/// Counters that may be read at each switch.
pub const MAX_COUNTERS: usize = 8;
/// Processes, or threads, that are told apart; what others do is added up under the key
/// [`THE_REST`].
pub const MAX_SCHED_STATS: u32 = 2048;
/// See [`MAX_SCHED_STATS`]. No process has it.
pub const THE_REST: u64 = 0;

/// The key of a process or thread with this number that began at this time, nanoseconds: numbers
/// are used again. Each program it becomes has a key of its own.
#[inline(always)]
#[must_use]
pub fn key_of(number: u32, start_boottime_ns: u64, exec_id: u32) -> u64 {
    // Fibonacci hashing: any numbers that are spread well will do.
    let born = ((start_boottime_ns >> 10) as u32).wrapping_add(exec_id.wrapping_mul(0x9e37_79b9));
    u64::from(number) << 32 | u64::from(born)
}

/// What runs on a CPU, by what the last switch there said.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct OnCpu {
    /// Since when, `CLOCK_MONOTONIC` nanoseconds.
    pub since_ns: u64,
    /// Process; 0: the CPU is idle, or nothing has been switched yet.
    pub pid: u32,
    /// Thread.
    pub tid: u32,
    /// Counters at that switch.
    pub counters: [CounterSum; MAX_COUNTERS],
}

/// A histogram of nanoseconds.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Times {
    /// Sum of them all.
    pub sum_ns: u64,
    /// How many are in each bucket, see [`bucket_of`]; wraps.
    pub buckets: [u32; BUCKETS],
}

/// A counter, as perf gives it.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CounterSum {
    /// What it counted.
    pub value: u64,
    /// Nanoseconds it was meant to count.
    pub enabled_ns: u64,
    /// Nanoseconds of those it did: less when counters share the hardware.
    pub running_ns: u64,
}

/// Why a thread left the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SwitchReason {
    /// It could have run on: another was given the CPU, or it yielded.
    Preempted = 0,
    /// It waits, and signals interrupt it.
    Voluntary = 1,
    /// It waits, and nothing interrupts it.
    Io = 2,
    /// A signal or a debugger stopped it.
    Stopped = 3,
    /// It ended.
    Exited = 4,
}

/// What is added up of a process or thread.
#[cfg_attr(not(target_arch = "bpf"), derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct SchedStats {
    /// How long its threads ran in one go.
    pub slices: Times,
    /// How long they could run and had no CPU.
    pub run_queue: Times,
    /// How often they left the CPU, by [`SwitchReason`].
    pub switches: [u64; 5],
    /// How often they went on to another CPU.
    pub migrations: u64,
    /// What counters counted while they ran, in the order the collector opened them.
    pub counters: [CounterSum; MAX_COUNTERS],
    /// Start of the process, `CLOCK_BOOTTIME` nanoseconds.
    pub start_boottime_ns: u64,
    /// When it was met, `CLOCK_MONOTONIC` nanoseconds: the program is that of this time.
    pub since_ns: u64,
    /// The cgroup it was in when it was met.
    pub cgroup_id: u64,
    /// Process; 0: of many.
    pub pid: u32,
    /// Thread that was met first.
    pub tid: u32,
    /// Process, in the initial pid namespace.
    pub host_pid: u32,
    /// Zero; keeps the size a multiple of 8.
    pub reserved: u32,
    /// Name of the thread, NUL-padded; of a process, of the thread that was met first. Empty:
    /// nobody saw it before it became another program.
    pub comm: [u8; 16],
}

/// What is added up together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AddUp {
    /// Nothing.
    Nothing = 0,
    /// The threads of a process.
    Processes = 1,
    /// Each thread for itself.
    Threads = 2,
}

/// The bucket of a time. Below 16 ns each number has its own; above, each power of two has 16. From
/// 2^42 ns on, 73 minutes, all are in the last.
#[inline(always)]
#[must_use]
pub fn bucket_of(ns: u64) -> usize {
    if ns < 1 << SUB_BITS {
        return ns as usize;
    }
    let power = u64::BITS - 1 - ns.leading_zeros();
    let sub = (ns >> (power - SUB_BITS)) & ((1 << SUB_BITS) - 1);
    let bucket = ((power - SUB_BITS + 1) << SUB_BITS) as usize + sub as usize;
    if bucket < BUCKETS { bucket } else { BUCKETS - 1 }
}

#[cfg(not(target_arch = "bpf"))]
mod layout {
    //! What a process costs.
    const _: () = assert!(size_of::<super::SchedStats>() <= 8 << 10);
}
