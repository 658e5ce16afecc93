//! How threads were scheduled: how long they ran in one go and waited for a CPU, why they left it,
//! and what hardware counters counted meanwhile. Sums: any two of them add up exactly.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use crate::Event;

/// A histogram of nanoseconds.
///
/// Bucket 0 to 15 hold one number each; above, each power of two has 16 buckets, so a bucket is at
/// most a sixteenth of its times wide. The last, 623, holds everything from 4.26 x 10^12 ns on, 71
/// minutes. The kernel side has the same buckets (`sched_stats::bucket_of` of the collector's eBPF
/// crate).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    sum_ns: u64,
    buckets: BTreeMap<u16, u64>,
}

/// Buckets a power of two has, as a power of two itself.
const SUB_BITS: u32 = 4;

impl Histogram {
    /// How many buckets there are.
    pub const BUCKETS: u16 = 624;

    /// One of these sums and numbers in buckets. What is in a bucket there is not is dropped.
    #[must_use]
    pub fn new(sum_ns: u64, buckets: impl IntoIterator<Item = (u16, u64)>) -> Self {
        let mut new = Self { sum_ns, buckets: BTreeMap::new() };
        for (bucket, count) in buckets {
            if bucket < Self::BUCKETS && count > 0 {
                let known = new.buckets.entry(bucket).or_default();
                *known = known.saturating_add(count);
            }
        }
        new
    }

    /// The buckets that hold something, with how many.
    pub fn buckets(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        self.buckets.iter().map(|(&bucket, &count)| (bucket, count))
    }

    /// The sum of all times, exact.
    #[must_use]
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// How many times there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.values().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Their mean; none without any.
    #[must_use]
    pub fn mean_ns(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum_ns as f64 / count as f64)
    }

    /// A time that this share of all, 0 to 1, is not above: the end of the bucket it is in. None
    /// without any.
    #[must_use]
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        let rank = (share.clamp(0.0, 1.0) * self.count() as f64).ceil().max(1.0) as u64;
        let mut seen = 0u64;
        for (bucket, count) in self.buckets() {
            seen = seen.saturating_add(count);
            if seen >= rank {
                return Some(Self::end_of(bucket));
            }
        }
        None
    }

    /// The begin of the first bucket that holds something.
    #[must_use]
    pub fn lowest_ns(&self) -> Option<u64> {
        self.buckets.keys().next().map(|&bucket| Self::start_of(bucket))
    }

    /// The smallest time of a bucket.
    #[must_use]
    pub fn start_of(bucket: u16) -> u64 {
        let (power, sub) = (u32::from(bucket) >> SUB_BITS, u64::from(bucket) % (1 << SUB_BITS));
        match power {
            0 => sub,
            power => ((1 << SUB_BITS) + sub) << (power - 1),
        }
    }

    /// The largest time of a bucket.
    #[must_use]
    pub fn end_of(bucket: u16) -> u64 {
        Self::start_of(bucket + 1) - 1
    }
}

impl AddAssign<&Self> for Histogram {
    fn add_assign(&mut self, other: &Self) {
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        for (bucket, count) in other.buckets() {
            let known = self.buckets.entry(bucket).or_default();
            *known = known.saturating_add(count);
        }
    }
}

/// How often threads left the CPU, by why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// They could have run on: another was given the CPU, or they yielded.
    pub preempted: u64,
    /// They waited, and signals interrupt it.
    pub voluntary: u64,
    /// They waited, and nothing interrupts it: for a disk, most often.
    pub io: u64,
    /// A signal or a debugger stopped them.
    pub stopped: u64,
    /// They ended.
    pub exited: u64,
}

impl Switches {
    /// All of them.
    #[must_use]
    pub fn all(self) -> u64 {
        [self.voluntary, self.io, self.stopped, self.exited]
            .into_iter()
            .fold(self.preempted, u64::saturating_add)
    }
}

/// What a counter counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterSum {
    /// Events it saw.
    pub value: u64,
    /// Nanoseconds it was meant to count.
    pub enabled_ns: u64,
    /// Nanoseconds of those it did: less when counters share the hardware.
    pub running_ns: u64,
}

impl CounterSum {
    /// The value, scaled to the time the counter was meant to count, as perf does.
    #[must_use]
    pub fn scaled(self) -> u64 {
        if self.running_ns == 0 || self.running_ns >= self.enabled_ns {
            return self.value;
        }
        let scaled =
            u128::from(self.value) * u128::from(self.enabled_ns) / u128::from(self.running_ns);
        u64::try_from(scaled).unwrap_or(u64::MAX)
    }

    /// The share of the time it counted, 0 to 1.
    #[must_use]
    pub fn coverage(self) -> f64 {
        if self.enabled_ns == 0 { 0.0 } else { self.running_ns as f64 / self.enabled_ns as f64 }
    }
}

impl AddAssign for CounterSum {
    fn add_assign(&mut self, other: Self) {
        self.value = self.value.saturating_add(other.value);
        self.enabled_ns = self.enabled_ns.saturating_add(other.enabled_ns);
        self.running_ns = self.running_ns.saturating_add(other.running_ns);
    }
}

/// How the threads of a process, or one of them, were scheduled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedStats {
    /// How long they ran in one go.
    pub slices: Histogram,
    /// How long they could run and had no CPU.
    pub run_queue: Histogram,
    /// Why they left the CPU.
    pub switches: Switches,
    /// How often they went on to another CPU.
    pub migrations: u64,
    /// What counters counted, in the order of a profile's counters; 0 of one that is missing.
    pub counters: Vec<CounterSum>,
}

impl AddAssign<&Self> for SchedStats {
    fn add_assign(&mut self, other: &Self) {
        self.slices += &other.slices;
        self.run_queue += &other.run_queue;
        let (own, more) = (&mut self.switches, &other.switches);
        for (own, more) in [
            (&mut own.preempted, more.preempted),
            (&mut own.voluntary, more.voluntary),
            (&mut own.io, more.io),
            (&mut own.stopped, more.stopped),
            (&mut own.exited, more.exited),
            (&mut self.migrations, other.migrations),
        ] {
            *own = own.saturating_add(more);
        }
        let counters = self.counters.len().max(other.counters.len());
        self.counters.resize(counters, CounterSum::default());
        for (own, more) in self.counters.iter_mut().zip(&other.counters) {
            *own += *more;
        }
    }
}

/// A counter that was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PerfCounter {
    /// As `perf list` has it.
    pub name: String,
    /// Why there is none; none: it counts.
    pub missing: Option<String>,
}

impl PerfCounter {
    /// Those read at each switch, in this order.
    #[must_use]
    pub fn events() -> Vec<Event> {
        ["cycles", "instructions", "cache-misses", "branch-misses", "page-faults"]
            .map(Event::by_name)
            .to_vec()
    }
}

/// Whether how threads are scheduled is recorded, and of which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddUp {
    /// It is not.
    #[default]
    Nothing,
    /// Of processes.
    Processes,
    /// Of threads.
    Threads,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_are_narrow() {
        for bucket in 0..Histogram::BUCKETS - 1 {
            let (start, end) = (Histogram::start_of(bucket), Histogram::end_of(bucket));
            assert_eq!(end + 1, Histogram::start_of(bucket + 1));
            assert!(end - start <= start / 16, "{bucket}: {start} to {end}");
        }
    }

    #[test]
    fn quantiles_are_ends_of_buckets_and_sums_add_up() {
        let mut one = Histogram::new(100 + 200, [(3, 9), (100, 1)]);
        assert_eq!((one.quantile_ns(0.5), one.quantile_ns(0.9)), (Some(3), Some(3)));
        assert_eq!(one.quantile_ns(0.99), Some(Histogram::end_of(100)));
        one += &Histogram::new(50, [(3, 1), (623, 2), (624, 5)]);
        assert_eq!((one.sum_ns(), one.count()), (350, 13));
        assert_eq!(one.lowest_ns(), Some(3));
        assert_eq!(Histogram::default().quantile_ns(0.5), None);
    }

    #[test]
    fn counters_that_shared_the_hardware_are_scaled() {
        let half = CounterSum { value: 10, enabled_ns: 100, running_ns: 50 };
        assert_eq!((half.scaled(), half.coverage()), (20, 0.5));
        let none = CounterSum { value: 0, enabled_ns: 100, running_ns: 0 };
        assert_eq!((none.scaled(), none.coverage()), (0, 0.0));
    }
}
