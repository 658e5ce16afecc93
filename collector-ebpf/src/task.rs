//! Reads of `struct task_struct` by offsets from BTF. Knows nothing of samples.

use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::{bpf_get_current_pid_tgid, bpf_get_current_task_btf};

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

/// Levels of pid namespaces below the initial one: `MAX_PID_NS_LEVEL` of
/// include/linux/pid_namespace.h.
const MAX_PID_LEVEL: u32 = 32;

/// Bytes of `struct upid`: a number and a pointer.
const UPID: u64 = 16;

/// Process id and thread id of the current task; 0 for one that is idle or outside the collector's
/// pid namespace.
#[inline(always)]
pub fn current() -> (u32, u32) {
    if config().pid_namespace == 0 {
        return current_of_host();
    }
    // SAFETY: a helper without arguments.
    let task = Task(unsafe { bpf_get_current_task_btf() } as u64);
    (task.pid(), task.tid())
}

/// Likewise, in the initial pid namespace.
#[inline(always)]
pub fn current_of_host() -> (u32, u32) {
    // SAFETY: a helper without arguments.
    let both = unsafe { bpf_get_current_pid_tgid() };
    ((both >> 32) as u32, both as u32)
}

/// A kernel address of a `struct task_struct`.
#[derive(Clone, Copy)]
pub struct Task(pub u64);

impl Task {
    pub fn is_kernel_thread(self) -> bool {
        self.read::<u32>(config().task_flags).is_none_or(|flags| flags & PF_KTHREAD != 0)
    }

    /// In the collector's pid namespace; 0 outside of it.
    #[inline(always)]
    pub fn tid(self) -> u32 {
        match config().pid_namespace {
            0 => self.host_tid(),
            _ => self.number().unwrap_or(0),
        }
    }

    /// Likewise, of its process.
    #[inline(always)]
    pub fn pid(self) -> u32 {
        let config = config();
        match config.pid_namespace {
            0 => self.host_pid(),
            _ => {
                let leader = self.read::<u64>(config.task_group_leader);
                leader.and_then(|leader| Task(leader).number()).unwrap_or(0)
            }
        }
    }

    /// Of its process, in the initial pid namespace.
    #[inline(always)]
    pub fn host_pid(self) -> u32 {
        self.read(config().task_tgid).unwrap_or(0)
    }

    /// In the initial pid namespace.
    #[inline(always)]
    pub fn host_tid(self) -> u32 {
        self.read(config().task_pid).unwrap_or(0)
    }

    /// The number it has in the collector's pid namespace. Of a task that has just ended there is
    /// none.
    #[inline(always)]
    fn number(self) -> Option<u32> {
        let config = config();
        let pid = self.read::<u64>(config.task_thread_pid).filter(|&pid| pid != 0)?;
        let mut level = read::<u32>(pid + u64::from(config.pid_level))?;
        // From its own namespace up: the collector's is mostly that.
        for _ in 0..=MAX_PID_LEVEL {
            let upid = pid + u64::from(config.pid_numbers) + u64::from(level) * UPID;
            let namespace = read::<u64>(upid + u64::from(config.upid_ns))?;
            if read(namespace + u64::from(config.namespace_inode)) == Some(config.pid_namespace) {
                return read(upid);
            }
            level = level.checked_sub(1)?;
        }
        None
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

    /// CPU time of the threads of its process that are gone, or its own where that is more,
    /// nanoseconds; 0 if unreadable. Of a process's last thread, once that is gone: of the process.
    ///
    /// The sum is made as each is reaped (`__exit_signal` of kernel/exit.c), when it may not have
    /// left its CPU yet; its own is complete by now.
    pub fn gone_runtime(self) -> u64 {
        let own: u64 = self.read(config().task_runtime).unwrap_or(0);
        let signal = self.read::<u64>(config().task_signal);
        let all = signal.and_then(|signal| read(signal + u64::from(config().signal_runtime)));
        own.max(all.unwrap_or(0))
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
        read(self.0 + u64::from(offset))
    }
}

#[inline(always)]
fn read<T>(address: u64) -> Option<T> {
    // SAFETY: bpf_probe_read_kernel checks the address and fails rather than fault.
    unsafe { bpf_probe_read_kernel(address as *const T) }.ok()
}
