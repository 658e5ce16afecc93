//! Reads of `struct task_struct` by offsets from BTF. Knows nothing of samples.

use aya_ebpf::helpers::bpf_probe_read_kernel;

use crate::maps::config;

/// `PF_KTHREAD` of include/linux/sched.h, the same value since 2.6.
const PF_KTHREAD: u32 = 0x0020_0000;

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
