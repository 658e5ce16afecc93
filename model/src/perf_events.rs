//! perf's names of events, and what the kernel calls them. Pure: whether a host has an event only
//! the kernel can tell.
//!
//! Numbers: `perf_sw_ids`, `perf_hw_id`, `perf_hw_cache_id` and those that follow, of
//! include/uapi/linux/perf_event.h. Names: `perf list`.

use crate::value::ValueKind;

/// An event as the kernel knows it: `type` and `config` of `struct perf_event_attr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PerfType {
    /// `PERF_TYPE_*`.
    pub kind: u32,
    /// Which of that type.
    pub config: u64,
}

impl PerfType {
    /// Whether the kernel counts it, and not the processor.
    #[must_use]
    pub fn is_software(self) -> bool {
        self.kind == SOFTWARE
    }
}

/// Where an event is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// The kernel counts it.
    Software,
    /// The processor counts it.
    Hardware,
    /// The processor counts it, of one of its caches.
    Cache,
}

impl Group {
    /// As `perf list` has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Software => "software",
            Self::Hardware => "hardware",
            Self::Cache => "hardware cache",
        }
    }
}

/// An event that has a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Where it is from.
    pub group: Group,
    /// Its name.
    pub name: String,
    /// What a sample of it weighs.
    pub weight: ValueKind,
    /// As the kernel knows it.
    pub perf: PerfType,
}

const HARDWARE: u32 = 0;
const SOFTWARE: u32 = 1;
/// Of [`PerfType::kind`]: a tracepoint.
pub const TRACEPOINT: u32 = 2;
const CACHE: u32 = 3;
const RAW: u32 = 4;

/// Names, the first of which is the one that is shown, and `config`.
const SOFTWARE_EVENTS: [(&[&str], u64); 11] = [
    (&["cpu-clock"], 0),
    (&["task-clock"], 1),
    (&["page-faults", "faults"], 2),
    (&["context-switches", "cs"], 3),
    (&["cpu-migrations", "migrations"], 4),
    (&["minor-faults"], 5),
    (&["major-faults"], 6),
    (&["alignment-faults"], 7),
    (&["emulation-faults"], 8),
    (&["bpf-output"], 10),
    (&["cgroup-switches"], 11),
];
const HARDWARE_EVENTS: [(&[&str], u64); 10] = [
    (&["cycles", "cpu-cycles"], 0),
    (&["instructions"], 1),
    (&["cache-references"], 2),
    (&["cache-misses"], 3),
    (&["branches", "branch-instructions"], 4),
    (&["branch-misses"], 5),
    (&["bus-cycles"], 6),
    (&["stalled-cycles-frontend", "idle-cycles-frontend"], 7),
    (&["stalled-cycles-backend", "idle-cycles-backend"], 8),
    (&["ref-cycles"], 9),
];
/// By number, with the operations there are: loads, stores, prefetches (`evsel__hw_cache_stat` of
/// tools/perf/util/evsel.c).
const CACHES: [(&str, [bool; 3]); 7] = [
    ("L1-dcache", [true, true, true]),
    ("L1-icache", [true, false, true]),
    ("LLC", [true, true, true]),
    ("dTLB", [true, true, true]),
    ("iTLB", [true, false, false]),
    ("branch", [true, false, false]),
    ("node", [true, true, true]),
];
/// By number: how accesses are called, and what is in front of "-misses".
const OPERATIONS: [(&str, &str); 3] =
    [("loads", "load"), ("stores", "store"), ("prefetches", "prefetch")];

/// All events that have a name.
pub fn all() -> impl Iterator<Item = Named> {
    let software = SOFTWARE_EVENTS.into_iter().map(|it| (Group::Software, SOFTWARE, it));
    let hardware = HARDWARE_EVENTS.into_iter().map(|it| (Group::Hardware, HARDWARE, it));
    let counted = software.chain(hardware).map(|(group, kind, (names, config))| Named {
        group,
        name: names[0].to_owned(),
        weight: weight(names[0]),
        perf: PerfType { kind, config },
    });
    counted.chain(caches())
}

fn caches() -> impl Iterator<Item = Named> {
    let all = CACHES.into_iter().zip(0u64..).flat_map(|((cache, has), number)| {
        let operations = OPERATIONS.into_iter().zip(0u64..).zip(has).filter(|(_, has)| *has);
        operations.flat_map(move |(((accesses, access), operation), _)| {
            let names = [format!("{cache}-{accesses}"), format!("{cache}-{access}-misses")];
            let config = number | operation << 8;
            names.into_iter().zip(0u64..).map(move |(name, missed)| (name, config | missed << 16))
        })
    });
    all.map(|(name, config)| Named {
        group: Group::Cache,
        weight: weight(&name),
        name,
        perf: PerfType { kind: CACHE, config },
    })
}

/// The event of a name, or one the processor knows by a number, as `r01c2`.
#[must_use]
pub fn by_name(name: &str) -> Option<Named> {
    let aliases = SOFTWARE_EVENTS.iter().chain(&HARDWARE_EVENTS);
    let known = aliases.map(|(names, _)| names).find(|names| names.contains(&name));
    let shown = known.map_or(name, |names| names[0]);
    all().find(|event| event.name == shown).or_else(|| {
        let digits = name.strip_prefix('r').filter(|digits| !digits.starts_with('+'))?;
        let config = u64::from_str_radix(digits, 16).ok()?;
        let perf = PerfType { kind: RAW, config };
        Some(Named { group: Group::Hardware, name: name.to_owned(), weight: weight(name), perf })
    })
}

/// Whether this is how a tracepoint is called: `sched:sched_switch`.
#[must_use]
pub fn is_tracepoint(name: &str) -> bool {
    let is_word = |part: &str| {
        let fits = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-');
        !part.is_empty() && part.chars().all(fits)
    };
    name.split_once(':').is_some_and(|(system, event)| is_word(system) && is_word(event))
}

/// What a sample of an event weighs, by its name.
#[must_use]
pub fn weight(name: &str) -> ValueKind {
    match name {
        "cpu-clock" | "task-clock" => ValueKind::cpu(),
        "cycles" => ValueKind::new(name, "cycles"),
        _ => ValueKind::new(name, "count"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_perfs() {
        let config = |name: &str| by_name(name).map(|it| (it.perf.kind, it.perf.config));
        assert_eq!(config("faults"), Some((1, 2)));
        assert_eq!(by_name("cs").unwrap().name, "context-switches");
        assert_eq!(config("cpu-cycles"), Some((0, 0)));
        // As `perf stat -vv` of 6.1 shows them.
        for (name, expected) in [
            ("L1-dcache-loads", 0),
            ("L1-dcache-load-misses", 0x10000),
            ("L1-icache-load-misses", 0x10001),
            ("LLC-stores", 0x102),
            ("dTLB-store-misses", 0x10103),
            ("branch-load-misses", 0x10005),
            ("node-prefetch-misses", 0x10206),
        ] {
            assert_eq!(config(name), Some((3, expected)), "{name}");
        }
        assert_eq!(config("r01c2"), Some((4, 0x1c2)));
        for none in ["L1-icache-stores", "r", "r+1", "rx", "sched:sched_switch", ""] {
            assert_eq!(config(none), None, "{none}");
        }
        let names: std::collections::HashSet<String> = all().map(|event| event.name).collect();
        assert_eq!(names.len(), all().count());
    }

    #[test]
    fn tracepoints_have_two_words() {
        assert!(is_tracepoint("sched:sched_switch") && is_tracepoint("ext4:ext4_da-write"));
        for none in ["sched", "sched:", ":x", "a:b:c", "cycles:u k", "../x:y"] {
            assert!(!is_tracepoint(none), "{none}");
        }
    }
}
