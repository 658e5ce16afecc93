//! How threads were scheduled and what counters counted: as text for people, as JSON for programs.
//!
//! Text is laid out as perf-agent's, whose users are to find what they know, with names beside
//! numbers of processes. Pure.

mod json;
mod prometheus;
mod text;

use std::io::{self, Write};

use stackwire_model::Profile;
use stackwire_model::profile::Who;
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
struct Part<'a> {
    /// None: all those there was no room to tell apart.
    who: Option<Named<'a>>,
    stats: &'a SchedStats,
}

impl Part<'_> {
    /// Whoever told threads apart wants to see them.
    fn is_thread(&self) -> bool {
        self.who.as_ref().is_some_and(|who| who.thread.is_some())
    }
}

/// A process or a thread.
struct Named<'a> {
    pid: u32,
    comm: &'a str,
    thread: Option<(u32, &'a str)>,
}

fn parts(profile: &Profile) -> Vec<Part<'_>> {
    let part = |(&who, stats)| {
        let (process, thread) = match who {
            Who::TheRest => return Part { who: None, stats },
            Who::Process(process) => (process, None),
            Who::Thread(thread) => {
                let thread = &profile.threads[thread.index()];
                (thread.process, Some((thread.tid, thread.comm.as_str())))
            }
        };
        let process = &profile.processes[process.index()];
        let (pid, comm) = (process.pid, process.comm.as_str());
        Part { who: Some(Named { pid, comm, thread }), stats }
    };
    let mut parts: Vec<_> = profile.sched.iter().map(part).collect();
    // Stable: the order they came in decides between equals.
    parts.sort_by_key(|part| std::cmp::Reverse(part.stats.slices.sum_ns()));
    parts
}

/// All of them added up.
fn total(parts: &[Part<'_>]) -> SchedStats {
    let mut total = SchedStats::default();
    for part in parts {
        total += part.stats;
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
