//! Reads of `struct task_struct` by offsets from BTF. Knows nothing of samples.

use aya_ebpf::helpers::bpf_probe_read_kernel;

use crate::maps::config;

/// `PF_KTHREAD` of include/linux/sched.h, the same value since 2.6.
const PF_KTHREAD: u32 = 0x0020_0000;

/// Policies of the fair scheduler, include/uapi/linux/sched.h.
const SCHED_NORMAL: u32 = 0;
const SCHED_BATCH: u32 = 3;
const SCHED_IDLE: u32 = 5;

/// Bits of `task_struct.__state`, include/linux/sched.h, the same since 4.14.
pub mod state {
    pub const UNINTERRUPTIBLE: u64 = 0x2;
    pub const STOPPED: u64 = 0x4;
    pub const TRACED: u64 = 0x8;
    pub const DEAD: u64 = 0x80;
    /// With `UNINTERRUPTIBLE`: a kernel thread that has nothing to do.
    pub const NO_LOAD: u64 = 0x400;
}

/// A kernel address of a `struct task_struct`.
#[derive(Clone, Copy)]
pub struct Task(pub u64);

impl Task {
    pub fn is_kernel_thread(self) -> bool {
        self.read::<u32>(config().task_flags).is_none_or(|flags| flags & PF_KTHREAD != 0)
    }

    pub fn tid(self) -> u32 {
        self.read(config().task_pid).unwrap_or(0)
    }

    pub fn pid(self) -> u32 {
        self.read(config().task_tgid).unwrap_or(0)
    }

    /// Start of the process the task belongs to, `CLOCK_BOOTTIME` nanoseconds; 0 if unreadable.
    pub fn process_start(self) -> u64 {
        let config = config();
        self.read::<u64>(config.task_group_leader)
            .and_then(|leader| Task(leader).read(config.task_start_boottime))
            .unwrap_or(0)
    }

    /// Start of the task itself, `CLOCK_BOOTTIME` nanoseconds; 0 if unreadable.
    pub fn start(self) -> u64 {
        self.read(config().task_start_boottime).unwrap_or(0)
    }

    /// Another number for each program the process has become; the same for all its threads.
    pub fn exec_id(self) -> u32 {
        self.read(config().task_exec_id).unwrap_or(0)
    }

    /// How long it has run since it was given its CPU, nanoseconds, at a switch to another. None of
    /// one that runs in real time, of which the kernel does not keep it.
    pub fn ran_ns(self) -> Option<u64> {
        let config = config();
        let policy = self.read::<u32>(config.task_policy)?;
        if !matches!(policy, SCHED_NORMAL | SCHED_BATCH | SCHED_IDLE) {
            return None;
        }
        let now = self.read::<u64>(config.task_runtime)?;
        Some(now.wrapping_sub(self.read(config.task_runtime_before)?))
    }

    /// Its `struct mm_struct`; none before it has memory of its own, and as it ends.
    pub fn memory(self) -> Option<u64> {
        self.read(config().task_mm).filter(|&mm| mm != 0)
    }

    /// Where the thread's own variables are; 0 if unreadable.
    pub fn thread_pointer(self) -> u64 {
        self.read(config().task_thread_pointer).unwrap_or(0)
    }

    #[inline(always)]
    fn read<T>(self, offset: u32) -> Option<T> {
        // SAFETY: bpf_probe_read_kernel checks the address and fails rather than fault.
        unsafe { bpf_probe_read_kernel((self.0 + u64::from(offset)) as *const T) }.ok()
    }
}
