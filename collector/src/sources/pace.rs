//! The kernel's period of an event that it counts one by one. The period says how often the event
//! runs its program.
//!
//! The program uses a `Picker` to take the occurrences it needs. The period only prevents the
//! program from running for each of a million page faults a second. The kernel could adapt the
//! period by itself (`attr.freq`), but it loses events after bursts: `collector-ebpf/src/picker.rs`
//! has the numbers. Pure: reads no counter, sets no period. Called by `sampler/mod.rs`.

use std::time::{Duration, Instant};

/// How many overflows there should be in the time between two samples. Fewer make samples coarser:
/// one stands for the whole of the last period.
const OVERFLOWS_A_SAMPLE: u64 = 16;
/// After how long a period that is too large is made smaller. One that is too small costs, and is
/// made larger at once.
const PATIENCE: Duration = Duration::from_millis(200);
/// Below this the number of overflows says little.
const SHORTEST: Duration = Duration::from_millis(5);

/// The period of one event on one CPU.
#[derive(Debug)]
pub struct Pace {
    period: u64,
    overflows: u64,
    at: Instant,
}

impl Pace {
    /// Period of an event that begins: each occurrence.
    pub const FIRST: u64 = 1;

    /// Of an event that begins when it had run its program `overflows` times.
    pub fn new(overflows: u64, now: Instant) -> Self {
        Self { period: Self::FIRST, overflows, at: now }
    }

    /// Takes how often the event has run its program by now. Returns the period it should have, if
    /// that differs from the current one. `frequency`: samples a second that are asked for.
    pub fn look(&mut self, overflows: u64, now: Instant, frequency: u32) -> Option<u64> {
        let elapsed = now.saturating_duration_since(self.at);
        if elapsed < SHORTEST {
            return None;
        }
        let ran = overflows.saturating_sub(self.overflows);
        let rate = u128::from(ran) * 1_000_000_000 / elapsed.as_nanos();
        let desired = u128::from(frequency) * u128::from(OVERFLOWS_A_SAMPLE);
        let too_often = rate > 2 * desired;
        if !too_often && elapsed < PATIENCE {
            return None;
        }
        (self.overflows, self.at) = (overflows, now);
        let too_rarely = rate < desired / 2 && self.period > Self::FIRST;
        if !too_often && !too_rarely {
            return None;
        }
        let period = u128::from(self.period) * rate / desired;
        self.period = prime_from(u64::try_from(period).unwrap_or(u64::MAX).clamp(1, LARGEST));
        Some(self.period)
    }
}

/// A billion events a second are more than any CPU has.
const LARGEST: u64 = 1 << 24;

/// The smallest prime from `number` on, or 1: what a program does in turns of two or ten must not
/// always meet the same of them.
fn prime_from(number: u64) -> u64 {
    let divides = |number: u64, by: u64| number.is_multiple_of(by);
    let prime =
        |number: &u64| (2..).take_while(|by| by * by <= *number).all(|by| !divides(*number, by));
    (number..).find(prime).unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_follow_how_often_events_come() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut pace = Pace::new(0, start);
        // 99 Hz: 1,584 overflows a second.
        assert_eq!(pace.look(10, at(1), 99), None);
        assert_eq!(pace.look(20, at(10), 99), None);
        // 500,000 a second.
        assert_eq!(pace.look(10_000, at(20), 99), Some(317));
        assert_eq!(pace.look(10_032, at(40), 99), None);
        assert_eq!(pace.look(10_320, at(220), 99), None);
        // None for a while: the next one is to be seen.
        assert_eq!(pace.look(10_320, at(300), 99), None);
        assert_eq!(pace.look(10_320, at(420), 99), Some(1));
        assert_eq!(pace.look(10_320, at(820), 99), None);
    }

    #[test]
    fn periods_are_prime() {
        assert_eq!([0, 1, 2, 4, 90, 317].map(prime_from), [0, 1, 2, 5, 97, 317]);
    }
}
