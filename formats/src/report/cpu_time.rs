//! The report's part on CPU time: how much of what programs used has samples, and whole stacks.
//! Called by `write.rs`.

use std::io::{self, Write};

use stackwire_model::profile::{CpuTime, Named};

use crate::percent::share;
use crate::plain;

/// Programs listed.
const TOP: usize = 10;
/// Periods that a program has to have run for: of fewer, a share says nothing.
const LEAST_PERIODS: u64 = 10;

/// Writes it; nothing where it is not known.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: Named<'_>, out: &mut impl Write) -> io::Result<()> {
    let (Some(times), Some(unsampled_ns)) = (profile.cpu_times(), profile.unsampled_cpu_ns) else {
        return Ok(());
    };
    let unsampled = CpuTime { used_ns: unsampled_ns, ..CpuTime::default() };
    let all = sum(times.values().chain([&unsampled]));
    writeln!(out, "\n CPU time  sampled   whole  used by")?;
    row("all programs", &all, out)?;
    let mut rows: Vec<_> = times.into_iter().collect();
    rows.sort_by(|a, b| b.1.used_ns.cmp(&a.1.used_ns).then(a.0.cmp(b.0)));
    let least_ns = all.period_ns().saturating_mul(LEAST_PERIODS);
    let enough = rows.partition_point(|(_, time)| time.used_ns >= least_ns);
    let (listed, others) = rows.split_at(enough.min(TOP));
    for (comm, time) in listed {
        row(comm, time, out)?;
    }
    if !others.is_empty() {
        let name = format!("{} others", others.len());
        row(&name, &sum(others.iter().map(|(_, time)| time)), out)?;
    }
    if unsampled_ns > 0 {
        row("processes without samples", &unsampled, out)?;
    }
    Ok(())
}

fn row(name: &str, time: &CpuTime, out: &mut impl Write) -> io::Result<()> {
    let used = time.used_ns as f64 / 1e9;
    let [sampled, whole] = [time.sampled_ns, time.whole_ns].map(|ns| share(ns, time.used_ns));
    writeln!(out, "{used:>7.3} s {sampled:>6.1} % {whole:>5.1} %  {}", plain(name))
}

fn sum<'a>(times: impl Iterator<Item = &'a CpuTime>) -> CpuTime {
    times.fold(CpuTime::default(), |all, time| CpuTime {
        used_ns: all.used_ns.saturating_add(time.used_ns),
        sampled_ns: all.sampled_ns.saturating_add(time.sampled_ns),
        whole_ns: all.whole_ns.saturating_add(time.whole_ns),
        samples: all.samples.saturating_add(time.samples),
    })
}
