//! The text for people.

use std::io::{self, Write};

use stackwire_model::Profile;
use stackwire_model::sched::{Histogram, SchedStats};

use super::{Named, Part, counter, counters, ratio, total};
use crate::percent::share;
use crate::plain;

pub fn write(
    profile: &Profile,
    parts: &[Part<'_>],
    per_pid: bool,
    mut out: impl Write,
) -> io::Result<()> {
    if parts.is_empty() {
        return writeln!(out, "No PMU metrics collected");
    }
    let out = &mut out;
    let seconds = profile.observed_ns as f64 / 1e9;
    if !profile.origin.all_processes {
        for part in parts {
            writeln!(out, "=== PMU Metrics ({}) ===\n", name(part.who.as_ref()))?;
            block(profile, &part.stats, seconds, out)?;
            writeln!(out)?;
        }
    } else if per_pid || parts.iter().any(Part::is_thread) {
        writeln!(out, "=== PMU Metrics (System-Wide, Per-PID) ===\n")?;
        writeln!(out, "Profiled {} processes over {seconds:.1} s\n", processes(parts))?;
        for part in parts {
            writeln!(out, "--- {} ---\n", name(part.who.as_ref()))?;
            block(profile, &part.stats, seconds, out)?;
            writeln!(out)?;
        }
    } else {
        writeln!(out, "=== PMU Metrics (System-Wide) ===\n")?;
        writeln!(out, "Performance counter stats for 'system wide':\n")?;
        writeln!(out, "Processes profiled: {}\n", processes(parts))?;
        block(profile, &total(parts), seconds, out)?;
    }
    let missing = profile.counters.iter().filter_map(|it| Some((&it.name, it.missing.as_ref()?)));
    for (name, why) in missing {
        writeln!(out, "{}: not available: {}", plain(name), plain(why))?;
    }
    for note in &profile.notes {
        writeln!(out, "note: {}", plain(note))?;
    }
    Ok(())
}

fn processes(parts: &[Part<'_>]) -> usize {
    let pids = parts.iter().filter_map(|part| part.who.as_ref()).map(|who| who.pid);
    pids.collect::<std::collections::BTreeSet<_>>().len()
}

fn name(who: Option<&Named<'_>>) -> String {
    match who {
        None => "all others: too many to tell apart".to_owned(),
        Some(who) => {
            let host = match who.host_pid {
                0 => String::new(),
                pid => format!(" (host: {pid})"),
            };
            let process = format!("PID: {}{host}, {}", who.pid, plain(who.comm));
            match who.thread {
                None => process,
                Some((tid, thread)) => format!("{process}; TID: {tid}, {}", plain(thread)),
            }
        }
    }
}

fn block(
    profile: &Profile,
    stats: &SchedStats,
    seconds: f64,
    out: &mut impl Write,
) -> io::Result<()> {
    let rate = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
    writeln!(out, "Samples: {}\n", stats.switches.all())?;
    writeln!(out, "On-CPU Time (time slice per context switch):")?;
    times(&stats.slices, out)?;
    if stats.run_queue.count() > 0 {
        writeln!(out, "Runqueue Latency (time waiting for CPU):")?;
        times(&stats.run_queue, out)?;
    }
    let all = stats.switches.all();
    writeln!(out, "Context Switch Reasons:")?;
    for (reason, count) in [
        ("Preempted (running):    ", stats.switches.preempted),
        ("Voluntary (sleep/mutex):", stats.switches.voluntary),
        ("I/O Wait (D state):     ", stats.switches.io),
        ("Stopped (signal):       ", stats.switches.stopped),
        ("Exited:                 ", stats.switches.exited),
    ] {
        writeln!(out, "  {reason} {:5.1}%  ({count} times)", share(count, all))?;
    }
    writeln!(out, "  All:                     {all} times, {:.1} a second", rate(all))?;
    let migrations = stats.migrations;
    writeln!(
        out,
        "  Migrations:              {migrations} times, {:.1} a second\n",
        rate(migrations)
    )?;
    hardware(profile, stats, &rate, out)
}

fn times(times: &Histogram, out: &mut impl Write) -> io::Result<()> {
    let ms = |ns: u64| ns as f64 / 1e6;
    let quantile = |share| ms(times.quantile_ns(share).unwrap_or(0));
    let line = |out: &mut dyn Write, name: &str, ms: f64| writeln!(out, "  {name:<6} {ms:10.3} ms");
    line(out, "Min:", ms(times.lowest_ns().unwrap_or(0)))?;
    line(out, "Max:", quantile(1.0))?;
    line(out, "Mean:", times.mean_ns().unwrap_or(0.0) / 1e6)?;
    line(out, "P50:", quantile(0.5))?;
    line(out, "P95:", quantile(0.95))?;
    line(out, "P99:", quantile(0.99))?;
    line(out, "P99.9:", quantile(0.999))?;
    line(out, "Sum:", ms(times.sum_ns()))?;
    writeln!(out)
}

fn hardware(
    profile: &Profile,
    stats: &SchedStats,
    rate: &impl Fn(u64) -> f64,
    out: &mut impl Write,
) -> io::Result<()> {
    if counters(profile, stats).next().is_none() {
        return writeln!(out, "Hardware Counters: not available");
    }
    writeln!(out, "Hardware Counters:")?;
    for (known, sum) in counters(profile, stats) {
        let total = sum.scaled();
        write!(
            out,
            "  Total {:<15} {total}, {:.1} a second",
            format!("{}:", known.name),
            rate(total)
        )?;
        if sum.running_ns < sum.enabled_ns {
            write!(out, " (scaled from {:.1} % of the time)", sum.coverage() * 100.0)?;
        }
        writeln!(out)?;
    }
    let of = |name| counter(profile, stats, name);
    let instructions = of("instructions");
    for (name, ratio) in [
        ("IPC (Instr/Cycle):", ratio(instructions, of("cycles"))),
        (
            "Cache Misses/1K Instr:",
            ratio(of("cache-misses").map(|it| it.saturating_mul(1000)), instructions),
        ),
        (
            "Branch Misses/1K Instr:",
            ratio(of("branch-misses").map(|it| it.saturating_mul(1000)), instructions),
        ),
    ] {
        if let Some(ratio) = ratio {
            writeln!(out, "  {name:<23} {ratio:.3}")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_reach_the_terminal_as_text() {
        let comm = "a\n\u{1b}[31m";
        let named = |thread| name(Some(&Named { pid: 1, host_pid: 0, start_ns: 0, comm, thread }));
        assert_eq!(named(None), "PID: 1, a??[31m");
        assert_eq!(named(Some((2, "b\nPID: 3"))), "PID: 1, a??[31m; TID: 2, b?PID: 3");
    }
}
