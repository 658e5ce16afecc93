//! Picks the occurrences of an event that become samples, for events that the kernel counts one by
//! one: page faults, not time.
//!
//! The kernel can adapt the period of such an event by itself (`attr.freq`). It does so for events
//! that come evenly. After a burst of page faults its period was too large for seconds, and up to
//! two thirds of them were in no sample (measured on Linux 6.18). So the period is fixed here, and
//! small; this file takes one in 2^shift of what comes, and changes `shift` with the time between
//! samples.
//!
//! Occurrences are divided into strata of 2^shift. One occurrence of each stratum is taken at
//! random and weighs 2^shift, so a program whose events alternate between two functions has both in
//! its samples. Estimates stay unbiased while `shift` changes (Horvitz and Thompson): what changes
//! it is the time a stratum has lasted, and this does not depend on which of its occurrences is
//! taken. The time between samples does depend on it; using that time made sums a fifth too small.
//! When a stratum changed its size, its weight is wrong by some amount. Later samples make up for
//! that amount, each by a quarter of its weight at most, so the sum of all weights stays close to
//! what was counted.
//!
//! Pure. Called by the program `pick` in `sources/perf_event.rs`; tested on the host.

/// The state of one event on one CPU. All zero at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Picker {
    /// How often the event has run its program. Read by the collector, which adapts the kernel's
    /// period to it: [`Picker::OVERFLOWS`].
    overflows: u64,
    /// What the kernel had counted at the last look.
    counter: u64,
    /// A stratum has 2^shift occurrences.
    shift: u64,
    /// How much of the stratum is over, in 2^-32 of it.
    phase: u64,
    /// Which part of it is taken, in the same unit.
    taken: u64,
    /// When it began, in nanoseconds; later where it was made smaller since.
    since_ns: u64,
    /// What came less what samples weigh.
    untold: i64,
    /// The same at the beginning of the stratum, less what was made up for since.
    error: i64,
}

/// One stratum, in the unit of `phase`.
const ONE: u64 = 1 << 32;
const MAX_SHIFT: u64 = 31;

impl Picker {
    /// Which of its words has the number of overflows.
    pub const OVERFLOWS: usize = 0;

    /// How often the event has come since the last look, by its counter on this CPU.
    #[inline(always)]
    pub fn came(&mut self, counter: u64) -> u64 {
        if counter < self.counter {
            // Of a CPU that was away the counter begins anew.
            self.counter = 0;
        }
        let came = counter - self.counter;
        self.counter = counter;
        came
    }

    /// Notes that the event came `came` times, the last time to a task that is sampled, if it is
    /// `ours`. Returns what a sample of it weighs; 0: no sample.
    ///
    /// `interval_ns`: desired time between samples. `random`: 32 even bits.
    #[inline(always)]
    pub fn happened(
        &mut self,
        came: u64,
        now_ns: u64,
        interval_ns: u64,
        ours: bool,
        mut random: impl FnMut() -> u32,
    ) -> u64 {
        self.overflows += 1;
        if !ours || came == 0 {
            return 0;
        }
        let mut lasted = now_ns.saturating_sub(self.since_ns);
        while lasted > 2 * interval_ns && self.shift > 0 {
            self.shift -= 1;
            lasted /= 2;
            self.since_ns = now_ns - lasted;
        }
        let shift = if self.shift < MAX_SHIFT { self.shift } else { MAX_SHIFT };
        let more = lasted < interval_ns - interval_ns / 4 && shift < MAX_SHIFT;
        let next_shift = if more { shift + 1 } else { shift };
        self.untold += came as i64;
        if came >= 1 << shift {
            // A stratum or more at once, for the kernel's period is as large: all of it is told.
            self.untold -= came as i64;
            self.begin(next_shift, 0, now_ns, random());
            return came;
        }
        let (begun, mut phase) = (self.phase, self.phase + (came << (32 - shift)));
        let mut weight = 0;
        if begun <= self.taken && self.taken < phase {
            weight = self.weight(shift);
        }
        if phase >= ONE {
            phase -= ONE;
            let of_next = (phase >> (32 - shift)) as i64;
            self.error = self.untold - of_next;
            phase >>= next_shift - shift;
            self.begin(next_shift, phase, now_ns, random());
            if self.taken < phase {
                weight += self.weight(next_shift);
            }
        }
        self.phase = phase;
        weight
    }

    #[inline(always)]
    fn begin(&mut self, shift: u64, phase: u64, now_ns: u64, random: u32) {
        self.shift = shift;
        self.phase = phase;
        self.since_ns = now_ns;
        self.taken = u64::from(random);
    }

    /// Of a sample in a stratum of 2^shift.
    #[inline(always)]
    fn weight(&mut self, shift: u64) -> u64 {
        let weight = 1_i64 << shift;
        let quarter = weight / 4;
        let more = if self.error > quarter {
            quarter
        } else if self.error < -quarter {
            -quarter
        } else {
            self.error
        };
        self.error -= more;
        self.untold -= weight + more;
        (weight + more) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: u64 = 2_000_000;

    /// Events at `every_ns`, each of a function, run through a picker with the kernel's `period`:
    /// samples and their weight by function.
    struct Run {
        picker: Picker,
        now: u64,
        counter: u64,
        period: u64,
        seed: u64,
        samples: [u64; 3],
        weights: [u64; 3],
    }

    impl Run {
        fn new(period: u64, seed: u64) -> Self {
            let picker = Picker::default();
            let (now, seed) = (1_000_000_000, seed | 1);
            Self { picker, now, counter: 0, period, seed, samples: [0; 3], weights: [0; 3] }
        }

        fn event(&mut self, every_ns: u64, function: usize) {
            self.now += every_ns;
            self.counter += 1;
            if !self.counter.is_multiple_of(self.period) {
                return;
            }
            let seed = &mut self.seed;
            let random = || {
                *seed ^= *seed << 13;
                *seed ^= *seed >> 7;
                *seed ^= *seed << 17;
                (*seed >> 16) as u32
            };
            let ours = function < 2;
            let came = self.picker.came(self.counter);
            let weight = self.picker.happened(came, self.now, INTERVAL, ours, random);
            self.samples[function] += u64::from(weight > 0);
            self.weights[function] += weight;
        }
    }

    fn about(what: u64, expected: u64, percent: u64) {
        assert!(what.abs_diff(expected) * 100 <= expected * percent, "{what}, not {expected}");
    }

    #[test]
    fn events_that_alternate_between_functions_are_sampled_in_both() {
        for period in [1, 7] {
            let mut run = Run::new(period, 5);
            for _ in 0..1_000_000 {
                run.event(1000, 0);
                run.event(1000, 1);
            }
            about(run.weights[0] + run.weights[1], 2_000_000, 1);
            about(run.weights[0], 1_000_000, 8);
            // Two seconds: between 1.33 and 0.75 of the rate asked for.
            let samples = run.samples[0] + run.samples[1];
            assert!((750..2_700).contains(&samples), "{samples}");
        }
    }

    #[test]
    fn bursts_and_pauses_weigh_what_came() {
        let mut all = [0; 2];
        for seed in 1..20 {
            let mut run = Run::new(1, seed * 7_919);
            for _ in 0..100 {
                for _ in 0..5_000 {
                    run.event(700, 0);
                }
                // Ten of another function, over 100 ms.
                for _ in 0..10 {
                    run.event(10_000_000, 1);
                }
            }
            about(run.weights[0], 500_000, 2);
            assert_eq!(run.samples[2], 0);
            all[0] += run.weights[0];
            all[1] += run.weights[1];
        }
        about(all[0], 19 * 500_000, 1);
        // One in a thousand of a burst's: what the burst left over is not theirs.
        about(all[1], 19 * 1_000, 25);
    }

    #[test]
    fn rare_events_are_all_samples_of_one() {
        let mut run = Run::new(1, 3);
        for _ in 0..1_000 {
            run.event(10_000_000, 0);
        }
        assert_eq!((run.samples[0], run.weights[0]), (1_000, 1_000));
    }

    #[test]
    fn events_of_others_are_not_in_ours() {
        for period in [1, 13] {
            let mut run = Run::new(period, 11);
            for turn in 0..2_000_000_u64 {
                // In runs of a length that has nothing in common with the period.
                run.event(500, if turn % 1_000 < 250 { 0 } else { 2 });
            }
            about(run.weights[0], 500_000, 6);
            assert_eq!(run.weights[2], 0);
        }
    }

    #[test]
    fn a_period_larger_than_a_stratum_is_told_whole() {
        let mut run = Run::new(1_000, 1);
        for _ in 0..100_000 {
            run.event(10_000, 0);
        }
        assert_eq!((run.samples[0], run.weights[0]), (100, 100_000));
    }

    #[test]
    fn a_counter_that_begins_anew_is_believed() {
        let mut picker = Picker::default();
        assert_eq!([10, 3, 3, 5].map(|counter| picker.came(counter)), [10, 3, 0, 2]);
    }
}
