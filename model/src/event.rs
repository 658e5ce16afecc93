//! Events: what makes the kernel take a sample, and what a sample of it weighs.
//!
//! Nothing else asks which event it is: what differs from one to the next is in its fields. To add
//! an event of perf's, add a line to [`KNOWN`].

use std::fmt;
use std::str::FromStr;

/// What a value is: its kind and unit, as pprof calls them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ValueKind {
    /// "cpu", "page-faults".
    pub kind: String,
    /// "nanoseconds", "count".
    pub unit: String,
}

impl ValueKind {
    /// Of a kind, in a unit.
    #[must_use]
    pub fn new(kind: &str, unit: &str) -> Self {
        Self { kind: kind.to_owned(), unit: unit.to_owned() }
    }

    /// How many samples there are.
    #[must_use]
    pub fn samples() -> Self {
        Self::new("samples", "count")
    }

    /// How many waits they stand for.
    #[must_use]
    pub fn events() -> Self {
        Self::new("events", "count")
    }

    /// Time on a CPU.
    #[must_use]
    pub fn cpu() -> Self {
        Self::new("cpu", "nanoseconds")
    }
}

impl fmt::Display for ValueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.unit)
    }
}

/// An event as the kernel knows it: `type` and `config` of `struct perf_event_attr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PerfType {
    /// `PERF_TYPE_*`.
    pub kind: u32,
    /// Which of that type.
    pub config: u64,
}

/// What makes the kernel take a sample.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Event {
    /// As `perf list` has it; empty where another profiler did not say.
    pub name: String,
    /// What a sample of it weighs.
    pub weight: ValueKind,
    /// As the kernel knows it, where it does.
    pub perf: Option<PerfType>,
    /// It is time that threads wait, blocked or for a CPU.
    pub is_wait: bool,
}

const PERF_TYPE_SOFTWARE: u32 = 1;
const PERF_COUNT_SW_DUMMY: u64 = 9;

const OFF_CPU: &str = "off-cpu";
const RUN_QUEUE: &str = "run-queue";
/// What `perf record --off-cpu` calls it: `OFFCPU_EVENT` of tools/perf/util/off_cpu.h.
const PERF_OFF_CPU: &str = "offcpu-time";

/// Name, kind and unit of the weight, `perf_event_attr`'s type and config.
///
/// `enum perf_type_id`, `perf_sw_ids` and `perf_hw_id` of include/uapi/linux/perf_event.h.
const KNOWN: [(&str, &str, &str, u32, u64); 6] = [
    ("cpu-clock", "cpu", "nanoseconds", 1, 0),
    ("page-faults", "page-faults", "count", 1, 2),
    ("cycles", "cycles", "cycles", 0, 0),
    ("instructions", "instructions", "count", 0, 1),
    ("cache-misses", "cache-misses", "count", 0, 3),
    ("branch-misses", "branch-misses", "count", 0, 5),
];

/// There is no event of that name.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("no event has this name; there are {}", Event::names().collect::<Vec<_>>().join(", "))]
pub struct UnknownEvent;

impl Event {
    /// Names of events that can be sampled.
    pub fn names() -> impl Iterator<Item = &'static str> {
        KNOWN.iter().map(|(name, ..)| *name)
    }

    /// A timer on the CPU's clock; exists everywhere, weighs in nanoseconds.
    #[must_use]
    pub fn cpu_clock() -> Self {
        Self::known(0)
    }

    /// Time a thread waits until it can run again: not one of perf's.
    #[must_use]
    pub fn off_cpu() -> Self {
        let weight = ValueKind::new("off_cpu", "nanoseconds");
        Self { name: OFF_CPU.to_owned(), weight, perf: None, is_wait: true }
    }

    /// Time a thread waits for a CPU: not one of perf's.
    #[must_use]
    pub fn run_queue() -> Self {
        let weight = ValueKind::new("run_queue", "nanoseconds");
        Self { name: RUN_QUEUE.to_owned(), weight, perf: None, is_wait: true }
    }

    /// Never happens: opened for the records of processes that come with it.
    #[must_use]
    pub fn dummy() -> Self {
        let perf = Some(PerfType { kind: PERF_TYPE_SOFTWARE, config: PERF_COUNT_SW_DUMMY });
        let weight = ValueKind::new("dummy", "count");
        Self { name: "dummy".to_owned(), weight, perf, is_wait: false }
    }

    /// An event that is known by its name alone. Clocks weigh in nanoseconds and cycles in cycles;
    /// all other events are counted.
    #[must_use]
    pub fn by_name(name: &str) -> Self {
        if let Ok(known) = name.parse() {
            return known;
        }
        let weight = match name {
            // Or as its weight is called.
            OFF_CPU | PERF_OFF_CPU | "off_cpu" => return Self::off_cpu(),
            RUN_QUEUE | "run_queue" => return Self::run_queue(),
            clock if clock == "cpu" || clock.ends_with("-clock") => ValueKind::cpu(),
            name => ValueKind::new(name, "count"),
        };
        Self { name: name.to_owned(), weight, perf: None, is_wait: false }
    }

    /// What its samples count.
    #[must_use]
    pub fn count(&self) -> ValueKind {
        if self.is_wait { ValueKind::events() } else { ValueKind::samples() }
    }

    /// What perf calls it.
    #[must_use]
    pub fn perf_name(&self) -> &str {
        if self.name == OFF_CPU { PERF_OFF_CPU } else { &self.name }
    }

    /// Whether it is a clock, whose samples come after equal times. All others count.
    #[must_use]
    pub fn is_clock(&self) -> bool {
        self.weight == ValueKind::cpu()
    }

    /// Whether the kernel counts it one by one, in software: page faults. Clocks are timers, and
    /// what the processor counts overflows by itself.
    #[must_use]
    pub fn is_counted_singly(&self) -> bool {
        let software = self.perf.is_some_and(|perf| perf.kind == PERF_TYPE_SOFTWARE);
        software && !self.is_clock()
    }

    fn known(index: usize) -> Self {
        let (name, kind, unit, of, config) = KNOWN[index];
        let perf = Some(PerfType { kind: of, config });
        Self { name: name.to_owned(), weight: ValueKind::new(kind, unit), perf, is_wait: false }
    }
}

impl FromStr for Event {
    type Err = UnknownEvent;

    fn from_str(name: &str) -> Result<Self, UnknownEvent> {
        Self::names().position(|known| known == name).map(Self::known).ok_or(UnknownEvent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_known_by_name() {
        for name in Event::names() {
            assert_eq!(name.parse::<Event>().unwrap(), Event::by_name(name));
        }
        assert_eq!(Event::by_name("cpu-clock"), Event::cpu_clock());
        for wait in [Event::off_cpu(), Event::run_queue()] {
            assert!(wait.is_wait && !wait.is_clock() && !wait.is_counted_singly());
            assert_eq!(Event::by_name(wait.perf_name()), wait);
        }
        assert_eq!(Event::by_name("task-clock").weight, ValueKind::cpu());
        let faults = Event::by_name("minor-faults");
        assert_eq!(faults.weight.to_string(), "minor-faults/count");
        let said = "cpu-clocks".parse::<Event>().unwrap_err().to_string();
        assert!(
            said.starts_with("no event has this name; there are cpu-clock, page-faults"),
            "{said}"
        );
    }
}
