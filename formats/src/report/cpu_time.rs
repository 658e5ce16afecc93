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
    let Some(times) = profile.cpu_times() else { return Ok(()) };
    writeln!(out, "\n CPU time  sampled   whole  used by")?;
    let all = sum(times.values());
    let least_ns = all.period_ns().saturating_mul(LEAST_PERIODS);
    let mut row = |name: &str, time: &CpuTime| {
        let (used, name) = (time.used_ns as f64 / 1e9, plain(name));
        if time.used_ns < least_ns {
            return writeln!(out, "{used:>7.3} s        -       -  {name}");
        }
        let [sampled, whole] = [time.sampled_ns, time.whole_ns].map(|ns| share(ns, time.used_ns));
        writeln!(out, "{used:>7.3} s {sampled:>6.1} % {whole:>5.1} %  {name}")
    };
    row("all programs", &all)?;
    let mut rows: Vec<_> = times.into_iter().collect();
    rows.sort_by(|a, b| b.1.used_ns.cmp(&a.1.used_ns).then(a.0.cmp(b.0)));
    let (listed, others) = rows.split_at(rows.len().min(TOP));
    listed.iter().try_for_each(|(comm, time)| row(comm, time))?;
    match others {
        [] => Ok(()),
        [(comm, time)] => row(comm, time),
        _ => row(&format!("{} others", others.len()), &sum(others.iter().map(|(_, time)| time))),
    }
}

fn sum<'a>(times: impl Iterator<Item = &'a CpuTime>) -> CpuTime {
    times.fold(CpuTime::default(), |all, time| CpuTime {
        used_ns: all.used_ns.saturating_add(time.used_ns),
        sampled_ns: all.sampled_ns.saturating_add(time.sampled_ns),
        whole_ns: all.whole_ns.saturating_add(time.whole_ns),
        samples: all.samples.saturating_add(time.samples),
    })
}
