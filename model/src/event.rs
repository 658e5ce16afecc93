//! Events: what makes the kernel take a sample, and what a sample of it weighs.
//!
//! Nothing else asks which event it is: what differs from one to the next is in its fields. Those
//! of perf's are in `perf_events.rs`.

use std::str::FromStr;

use crate::perf_events::{self, PerfType};
use crate::value::ValueKind;

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

/// There is no event of that name.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnknownEvent {
    /// None that perf knows.
    #[error(
        "perf knows no event of this name; cpu-clock, page-faults, cycles, r01c2 and sched:sched_switch are some, `stackwire events` lists all of this host"
    )]
    Name,
    /// One with a modifier, as in `cycles:u`.
    #[error("events have no modifiers here: leave out what is behind the colon")]
    Modifier,
}

impl Event {
    /// A timer on the CPU's clock; exists everywhere, weighs in nanoseconds.
    #[must_use]
    pub fn cpu_clock() -> Self {
        Self::by_name("cpu-clock")
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
        if let Ok(known) = name.parse::<Self>() {
            // What a file calls `faults` stays `faults`.
            let counted = known.weight == ValueKind::new(&known.name, "count");
            let weight = if counted { ValueKind::new(name, "count") } else { known.weight };
            return Self { name: name.to_owned(), weight, ..known };
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

    /// Whether it is a tracepoint of the kernel, as `sched:sched_switch`. Which number it has
    /// differs from host to host: that is looked up where it is sampled.
    #[must_use]
    pub fn is_tracepoint(&self) -> bool {
        perf_events::is_tracepoint(&self.name)
    }

    /// Whether the kernel counts it one by one, in software: page faults. Clocks are timers, and
    /// what the processor counts overflows by itself.
    #[must_use]
    pub fn is_counted_singly(&self) -> bool {
        let software = self.perf.is_some_and(|perf| perf.kind == PERF_TYPE_SOFTWARE);
        software && !self.is_clock()
    }
}

impl FromStr for Event {
    type Err = UnknownEvent;

    fn from_str(name: &str) -> Result<Self, UnknownEvent> {
        let is_wait = false;
        // perf-list(1): modifiers are letters; no tracepoint's system is called like an event.
        let has_modifier = |(event, _): (&str, &str)| perf_events::by_name(event).is_some();
        if name.split_once(':').is_some_and(has_modifier) {
            return Err(UnknownEvent::Modifier);
        }
        if perf_events::is_tracepoint(name) {
            let weight = perf_events::weight(name);
            return Ok(Self { name: name.to_owned(), weight, perf: None, is_wait });
        }
        let perf_events::Named { name, weight, perf, .. } =
            perf_events::by_name(name).ok_or(UnknownEvent::Name)?;
        Ok(Self { name, weight, perf: Some(perf), is_wait })
    }
}

/// Events in groups: those of a group are counted at the same times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups(pub Vec<Vec<Event>>);

/// A list of events that is none.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadList {
    /// Braces do not fit.
    #[error("groups are written as \"{{cycles,instructions}},page-faults\"")]
    Braces,
    /// An event that is none.
    #[error("{name}: {error}")]
    Event {
        /// What was written.
        name: String,
        /// Why.
        error: UnknownEvent,
    },
}

/// With groups in braces: `{cycles,instructions},page-faults`.
impl FromStr for Groups {
    type Err = BadList;

    fn from_str(list: &str) -> Result<Self, BadList> {
        let mut groups: Vec<Vec<Event>> = Vec::new();
        let mut is_open = false;
        for part in list.split(',').map(str::trim) {
            let begins = part.starts_with('{');
            let ends = part.ends_with('}');
            if begins && is_open || ends && !(is_open || begins) {
                return Err(BadList::Braces);
            }
            let name = part.strip_prefix('{').unwrap_or(part);
            let name = name.strip_suffix('}').unwrap_or(name);
            if name.contains(['{', '}']) {
                return Err(BadList::Braces);
            }
            let event =
                name.parse().map_err(|error| BadList::Event { name: name.to_owned(), error })?;
            match groups.last_mut().filter(|_| is_open) {
                Some(group) => group.push(event),
                None => groups.push(vec![event]),
            }
            is_open = (is_open || begins) && !ends;
        }
        if is_open { Err(BadList::Braces) } else { Ok(Self(groups)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_known_by_name() {
        for event in perf_events::all() {
            let parsed = event.name.parse::<Event>().unwrap();
            assert_eq!((parsed.perf, &parsed.name), (Some(event.perf), &event.name));
            assert_eq!(parsed, Event::by_name(&event.name));
        }
        assert!(Event::cpu_clock().is_clock() && Event::cpu_clock().perf.is_some());
        let switch: Event = "sched:sched_switch".parse().unwrap();
        assert!(switch.is_tracepoint() && switch.perf.is_none() && !switch.is_counted_singly());
        for wait in [Event::off_cpu(), Event::run_queue()] {
            assert!(wait.is_wait && !wait.is_clock() && !wait.is_counted_singly());
            assert_eq!(Event::by_name(wait.perf_name()), wait);
        }
        assert_eq!(Event::by_name("other-clock").weight, ValueKind::cpu());
        let faults = Event::by_name("minor-faults");
        assert_eq!(faults.weight.to_string(), "minor-faults/count");
        assert_eq!("cpu-clocks".parse::<Event>(), Err(UnknownEvent::Name));
        assert_eq!("page-faults:u".parse::<Event>(), Err(UnknownEvent::Modifier));
    }

    #[test]
    fn groups_are_in_braces() {
        let names = |list: &str| {
            list.parse().map(|Groups(groups)| {
                let names = |group: Vec<Event>| group.into_iter().map(|it| it.name).collect();
                groups.into_iter().map(names).collect::<Vec<Vec<String>>>()
            })
        };
        assert_eq!(names("cs"), Ok(vec![vec!["context-switches".to_owned()]]));
        let three = names("{cycles, instructions},sched:sched_switch,{faults}").unwrap();
        assert_eq!(three.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 1]);
        assert_eq!(three[0][1], "instructions");
        for bad in ["{cycles", "cycles}", "{{cycles},cs}", "{cs,{faults}"] {
            assert_eq!(names(bad), Err(BadList::Braces), "{bad}");
        }
        assert!(
            matches!(names("cs,nothing"), Err(BadList::Event { name, .. }) if name == "nothing")
        );
        assert!(names("").is_err());
    }
}
