//! The report's part on unwinding: how user stacks ended, and in whose code those that are not
//! whole.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, Write};

use stackwire_model::PythonOutcome;
use stackwire_model::profile::{EndReason, ExecutableId, ListEnd, Named, UnwindTables};

use super::groups::{self, Groups};
use crate::percent::share;
use crate::plain;

/// Executables listed.
const TOP: usize = 25;

/// Writes it.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: Named<'_>, out: &mut impl Write) -> io::Result<()> {
    #[derive(Default)]
    struct Row {
        /// Stacks through it.
        stacks: u64,
        /// Of those, whole.
        roots: u64,
        /// Of those, such as end in it before the root.
        ends: BTreeMap<EndReason, u64>,
    }
    let mut ends: BTreeMap<EndReason, u64> = BTreeMap::new();
    let mut rows: BTreeMap<ExecutableId, Row> = BTreeMap::new();
    let mut groups = Groups::new(profile);
    let (mut total, mut without) = (0, 0);
    for sample in &profile.samples {
        let Some(stack) = sample.key.user else {
            without += sample.count;
            continue;
        };
        let end = profile.end(stack);
        *ends.entry(end).or_default() += sample.count;
        total += sample.count;
        let locations = profile.stack(stack).map(|at| &profile.locations[at.index()]);
        let executables: Vec<_> = locations.map(|at| groups.of(at.executable)).collect();
        for executable in executables.iter().copied().collect::<HashSet<_>>() {
            let row = rows.entry(executable).or_default();
            row.stacks += sample.count;
            row.roots += if end == EndReason::Root { sample.count } else { 0 };
        }
        if let Some(last) = executables.last().filter(|_| end != EndReason::Root) {
            *rows.entry(*last).or_default().ends.entry(end).or_default() += sample.count;
        }
    }
    writeln!(out, "\n  stacks   share  user stacks ended")?;
    for (end, samples) in ends {
        writeln!(out, "{samples:>8} {:>5.1} %  {}", share(samples, total), end.text())?;
    }
    if without > 0 {
        writeln!(out, "{without:>8}          no user stack: kernel threads, tasks ending")?;
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by(|a, b| b.1.stacks.cmp(&a.1.stacks).then(a.0.cmp(&b.0)));
    if !rows.is_empty() {
        writeln!(out, "\n  stacks to root  user stacks through")?;
    }
    for (executable, row) in rows.iter().take(TOP) {
        let name = groups::name(&profile.executables[executable.index()]);
        let roots = share(row.roots, row.stacks);
        writeln!(out, "{:>8} {roots:>5.1} %  {}", row.stacks, plain(&name))?;
        for (&end, &samples) in &row.ends {
            let share = share(samples, row.stacks);
            writeln!(out, "                    {share:.1} % end here: {}", end.text())?;
        }
        if let Some(why) = profile.unwind_missing.get(executable) {
            writeln!(out, "                    no unwind table: {}", plain(why))?;
        }
        if let Some(why) = profile.functions_missing.get(executable) {
            writeln!(out, "                    its functions are not shown: {}", plain(why))?;
        }
    }
    if rows.len() > TOP {
        writeln!(out, "                  {} more", rows.len() - TOP)?;
    }
    lists(&profile.list_ends, out)?;
    tables(&profile.unwind_tables, out)?;
    pythons(&profile.python, out)
}

/// What became of the perf trampolines of Python processes.
fn pythons(outcomes: &BTreeMap<PythonOutcome, u64>, out: &mut impl Write) -> io::Result<()> {
    if !outcomes.is_empty() {
        writeln!(out, "\nprocesses  perf trampoline of Python")?;
    }
    for (outcome, processes) in outcomes {
        writeln!(out, "{processes:>9}  {}", outcome.text())?;
    }
    Ok(())
}

/// How frames of interpreters ended.
fn lists(ends: &BTreeMap<ListEnd, u64>, out: &mut impl Write) -> io::Result<()> {
    let total = ends.values().fold(0, |sum: u64, &samples| sum.saturating_add(samples));
    if total > 0 {
        writeln!(out, "\n  stacks   share  frames of interpreters ended")?;
    }
    for (end, &samples) in ends {
        writeln!(out, "{samples:>8} {:>5.1} %  {}", share(samples, total), end.text())?;
    }
    Ok(())
}

fn tables(tables: &UnwindTables, out: &mut impl Write) -> io::Result<()> {
    if *tables == UnwindTables::default() {
        return Ok(());
    }
    let UnwindTables { loaded, compiled, compile_ns, failed, evicted } = *tables;
    writeln!(
        out,
        "\nunwind tables: {loaded} loaded, {compiled} of them compiled in {:.0} ms; {failed} could not be had, {evicted} evicted",
        compile_ns as f64 / 1e6
    )
}
