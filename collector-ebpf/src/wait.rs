//! Where threads wait: what the programs tell of it, and which short waits they choose. Plain data,
//! of the same layout on both sides. Part of the record in the ring (`record.rs`).

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::record::SampleHeader;

/// Words of a [`RecordKind::Wait`](crate::RecordKind::Wait), which its header counts as user
/// frames.
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
    /// Nanoseconds until it could run again, weighted, see
    /// [`Config::wait_threshold_ns`](crate::Config::wait_threshold_ns).
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
    /// As in [`SampleHeader`]; 0: the CPU was idle when an interrupt came, or the thread is outside
    /// the pid namespace.
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
    /// Until when it has used up its share of copies of stacks, likewise.
    pub copied_ns: u64,
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

#[cfg(not(target_arch = "bpf"))]
mod layout {
    //! What the two compilations must agree on.
    use super::{SampleHeader, WAIT_WORDS, WOKEN_WORDS, Wait, Woken};
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
