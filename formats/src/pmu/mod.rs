//! How threads were scheduled and what counters counted: as text for people, as JSON for programs.
//!
//! Text is laid out as perf-agent's, whose users are to find what they know, with names beside
//! numbers of processes. Pure.

mod json;
mod prometheus;
mod text;

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::io::{self, Write};

use stackwire_model::Profile;
use stackwire_model::profile::{Process, Who};
use stackwire_model::sched::{CounterSum, PerfCounter, SchedStats};

/// How it is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs: see `docs/pmu-json.md`.
    Json,
    /// For Prometheus.
    Prometheus,
}

/// What is written of the whole host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// How.
    pub format: Format,
    /// Processes one by one, not all of them added up.
    pub per_pid: bool,
}

/// Writes what is known of processes; those that ran longest come first.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: &Profile, options: Options, out: impl Write) -> io::Result<()> {
    let parts = parts(profile);
    match options.format {
        Format::Text => text::write(profile, &parts, options.per_pid, out),
        Format::Json => json::write(profile, &parts, out),
        Format::Prometheus => prometheus::write(profile, &parts, out),
    }
}

/// One of those that were told apart.
#[derive(Clone)]
struct Part<'a> {
    /// None: all those there was no room to tell apart.
    who: Option<Named<'a>>,
    stats: Cow<'a, SchedStats>,
}

impl Part<'_> {
    /// Whoever told threads apart wants to see them.
    fn is_thread(&self) -> bool {
        self.who.as_ref().is_some_and(|who| who.thread.is_some())
    }
}

/// A process or a thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Named<'a> {
    pid: u32,
    host_pid: u32,
    /// When the process began.
    start_ns: u64,
    comm: &'a str,
    thread: Option<(u32, &'a str)>,
}

fn parts(profile: &Profile) -> Vec<Part<'_>> {
    let part = |(&who, stats)| {
        let stats = Cow::Borrowed(stats);
        let (process, thread) = match who {
            Who::TheRest => return Part { who: None, stats },
            Who::Process(process) => (process, None),
            Who::Thread(thread) => {
                let thread = &profile.threads[thread.index()];
                (thread.process, Some((thread.tid, thread.comm.as_str())))
            }
        };
        let process = &profile.processes[process.index()];
        let Process { pid, host_pid, start_ns, ref comm, .. } = *process;
        Part { who: Some(Named { pid, host_pid, start_ns, comm, thread }), stats }
    };
    // The profile has one more process each time one becomes another program.
    let mut parts = merged(profile.sched.iter().map(part), |part| part.who);
    // Stable: the order they came in decides between equals.
    parts.sort_by_key(|part| std::cmp::Reverse(part.stats.slices.sum_ns()));
    parts
}

/// Adds up those that are called the same, at the place of the first.
fn merged<'a, K: Eq + Hash>(
    parts: impl Iterator<Item = Part<'a>>,
    name: impl Fn(&Part<'a>) -> K,
) -> Vec<Part<'a>> {
    let mut places: HashMap<K, usize> = HashMap::new();
    let mut merged: Vec<Part<'a>> = Vec::new();
    for part in parts {
        match places.entry(name(&part)) {
            Entry::Occupied(place) => *merged[*place.get()].stats.to_mut() += &*part.stats,
            Entry::Vacant(place) => {
                place.insert(merged.len());
                merged.push(part);
            }
        }
    }
    merged
}

/// All of them added up.
fn total(parts: &[Part<'_>]) -> SchedStats {
    let mut total = SchedStats::default();
    for part in parts {
        total += &*part.stats;
    }
    total
}

/// A counter by its name, scaled to the time it was meant to count.
fn counter(profile: &Profile, stats: &SchedStats, name: &str) -> Option<u64> {
    counters(profile, stats).find(|(known, _)| known.name == name).map(|(_, sum)| sum.scaled())
}

/// Counters there are, with what they counted.
fn counters<'a>(
    profile: &'a Profile,
    stats: &'a SchedStats,
) -> impl Iterator<Item = (&'a PerfCounter, CounterSum)> {
    let sum = |index: usize| stats.counters.get(index).copied().unwrap_or_default();
    let all = profile.counters.iter().enumerate().map(move |(index, it)| (it, sum(index)));
    all.filter(|(it, _)| it.missing.is_none())
}

/// One number for so many of another; none where there is nothing to divide by.
fn ratio(of: Option<u64>, by: Option<u64>) -> Option<f64> {
    by.filter(|by| *by > 0).and_then(|by| Some(of? as f64 / by as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_called_the_same_are_added_up_at_the_place_of_the_first() {
        let stats = |migrations| SchedStats { migrations, ..SchedStats::default() };
        let (one, other, third) = (stats(1), stats(2), stats(4));
        let part = |pid, stats| {
            let who = Named { pid, host_pid: 0, start_ns: 5, comm: "sh", thread: None };
            Part { who: Some(who), stats: Cow::Borrowed(stats) }
        };
        let parts = [part(7, &one), part(8, &other), part(7, &third)];
        let merged = merged(parts.into_iter(), |part| part.who);
        let found: Vec<_> = merged
            .iter()
            .map(|part| (part.who.map(|who| who.pid), part.stats.migrations))
            .collect();
        assert_eq!(found, [(Some(7), 5), (Some(8), 2)]);
    }
}
