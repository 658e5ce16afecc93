//! The text report: what was hot, how well it is named, how stacks ended, what was lost.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::{self, Write};

use stackwire_model::profile::{
    ExecutableId, MissingReason, Named, Profile, Quality, Resolution, SeriesId,
};

use super::amounts::Amounts;
use super::functions::{Counts, functions};
use super::groups::{self, Groups};
use super::options::{Options, Sort, Window};
use super::short::short;
use super::{beside, cpu_time, lines, problems, unwinding};
use crate::percent::share;
use crate::plain;

/// Functions listed.
const TOP: usize = 20;
/// Lines of a window that are not for functions: what was captured, the heads of columns, what is
/// wrong.
const OTHER_ROWS: usize = 12;

/// Writes the report.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: Named<'_>, options: &Options<'_>, mut out: impl Write) -> io::Result<()> {
    head(&profile, &mut out)?;
    let series: Vec<SeriesId> = profile.sampled_series().collect();
    let beside = beside::of_time(profile, &series);
    // What shares the room.
    let tables = series.len() - beside.len() + usize::from(!beside.is_empty());
    let room = options
        .window
        .map_or(TOP, |window| (window.rows.saturating_sub(OTHER_ROWS) / tables).clamp(5, TOP));
    let most = options.top.unwrap_or(room);
    if !beside.is_empty() {
        beside::write(profile, &beside, most, options, &mut out)?;
    }
    for &id in &series {
        let is_shown = beside.contains(&id);
        if series.len() > 1 && (!is_shown || options.by.is_some()) {
            writeln!(out, "\n{}", plain(&profile.amount_of(id)))?;
        }
        if let Some(key) = options.by {
            values(&profile, id, key, &mut out)?;
        }
        if !is_shown {
            top(profile, id, most, options, &mut out)?;
        }
        if options.window.is_none() {
            lines::write(profile, id, &mut out)?;
        }
    }
    match options.window {
        Some(_) => problems::write(profile, &mut out)?,
        None => {
            coverage(profile, &mut out)?;
            unwinding::write(profile, &mut out)?;
            cpu_time::write(profile, &mut out)?;
            losses(&profile, &mut out)?;
        }
    }
    out.flush()
}

fn head(profile: &Profile, out: &mut impl Write) -> io::Result<()> {
    let origin = &profile.origin;
    let processes = profile.sampled_processes();
    let mut head = profile.amount();
    // What others do not say is left out. Writing to a String cannot fail.
    let frequency = profile.series_of(profile.shown()).frequency;
    if frequency > 0 {
        let _ = write!(head, " at {frequency} Hz");
    }
    if profile.duration_ns > 0 {
        let _ = write!(head, " over {:.1} s", profile.duration_ns as f64 / 1e9);
    }
    let _ = write!(head, ", {}", count(processes.len(), "process", "processes"));
    if !origin.hostname.is_empty() {
        let kernel = format!("{} {}", origin.kernel_release, origin.machine);
        let _ = write!(head, " on {} ({})", origin.hostname, kernel.trim());
    }
    writeln!(out, "{}", plain(&head))?;
    for note in &profile.notes {
        writeln!(out, "note: {}", plain(note))?;
    }
    Ok(())
}

fn count(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// What samples of a series count for, by the values of a label.
pub(crate) fn by_value(profile: &Profile, series: SeriesId, key: &str) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for sample in profile.samples_of(series) {
        let value = profile.label(sample.key, key).unwrap_or("without".into());
        *counts.entry(value.into_owned()).or_default() += profile.share_of(sample);
    }
    counts
}

fn values(profile: &Profile, series: SeriesId, key: &str, out: &mut impl Write) -> io::Result<()> {
    let total = profile.total_of(series);
    let mut rows: Vec<_> = by_value(profile, series, key).into_iter().collect();
    rows.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let amounts = Amounts::of(profile, series);
    writeln!(out, "\n   share {:>7}  {key}", amounts.unit())?;
    for (value, amount) in rows {
        let (share, amount) = (share(amount, total), amounts.text(amount));
        writeln!(out, "{share:>6.2} % {amount}  {}", plain(&value))?;
    }
    Ok(())
}

/// Columns before the name of a function.
const BEFORE_NAMES: usize = 37;

/// At most `most` functions of a series.
fn top(
    profile: Named<'_>,
    series: SeriesId,
    most: usize,
    options: &Options<'_>,
    out: &mut impl Write,
) -> io::Result<()> {
    let total = profile.total_of(series);
    let weight = |counts: &Counts| match options.sort {
        Sort::Own => counts.own,
        Sort::Total => counts.all,
    };
    let mut rows: Vec<_> = functions(profile, series, |it| profile.share_of(it))
        .into_iter()
        .filter(|(_, counts)| weight(counts) > 0)
        .collect();
    rows.sort_by(|a, b| weight(&b.1).cmp(&weight(&a.1)).then_with(|| a.0.cmp(&b.0)));
    let amounts = Amounts::of(&profile, series);
    let amount = |count| amounts.text(count);
    let unit = match amounts {
        Amounts::Samples => " ",
        Amounts::Nanoseconds => "s",
    };
    writeln!(out, "\n    self       {unit}   total       {unit}  function")?;
    for ((function, module), Counts { own, all }) in rows.iter().take(most) {
        let (function, module) = (plain(function), plain(module.trim_matches(['[', ']'])));
        let function = match options.window {
            Some(Window { columns, .. }) => {
                let taken = BEFORE_NAMES + module.chars().count() + " []".len();
                short(&function, columns.saturating_sub(taken).max(12))
            }
            None => function,
        };
        writeln!(
            out,
            "{:>6.2} % {} {:>6.2} % {}  {function} [{module}]",
            share(*own, total),
            amount(*own),
            share(*all, total),
            amount(*all),
        )?;
    }
    if let Some(more) = rows.len().checked_sub(most).filter(|&more| more > 0) {
        let rest: u64 = rows[most..].iter().map(|(_, counts)| counts.own).sum();
        let (part, rest) = (share(rest, total), amount(rest));
        writeln!(out, "{part:>6.2} % {rest}                   {more} more")?;
    }
    Ok(())
}

/// A frame of a sample counts once a sample: what is hot weighs most.
fn coverage(profile: Named<'_>, out: &mut impl Write) -> io::Result<()> {
    #[derive(Default)]
    struct Row<'a> {
        frames: u64,
        named: u64,
        qualities: BTreeMap<&'static str, u64>,
        missing: BTreeMap<&'a MissingReason, u64>,
    }
    let mut rows: HashMap<ExecutableId, Row<'_>> = HashMap::new();
    let mut groups = Groups::new(profile);
    for sample in &profile.samples {
        for location in profile.frames(sample.key) {
            let executable = groups.of(profile.locations[location.index()].executable);
            let row = rows.entry(executable).or_default();
            row.frames += sample.count;
            match profile.names.resolutions.get(location.index()) {
                Some(Resolution::Found { quality, .. }) => {
                    row.named += sample.count;
                    *row.qualities.entry(quality.text()).or_default() += sample.count;
                }
                Some(Resolution::Missing(missing)) => {
                    *row.missing.entry(&missing.reason).or_default() += sample.count;
                }
                None => {}
            }
        }
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by(|a, b| b.1.frames.cmp(&a.1.frames).then(a.0.cmp(&b.0)));
    writeln!(out, "\n  frames   named  executable")?;
    for (number, row) in rows {
        let executable = &profile.executables[number.index()];
        let qualities: Vec<_> = row
            .qualities
            .iter()
            .map(|(quality, frames)| format!("{quality} {:.1} %", share(*frames, row.frames)))
            .collect();
        let id = executable.build_id().map_or(String::new(), |id| format!(" {id:.12}"));
        writeln!(
            out,
            "{:>8} {:>5.1} %  {}{id}  {}",
            row.frames,
            share(row.named, row.frames),
            plain(&groups::name(executable)),
            qualities.join(", ")
        )?;
        for line in sources(profile, number.index()) {
            writeln!(out, "                    {}", plain(&line))?;
        }
        let missing = row.missing.into_iter();
        let mut missing: Vec<_> =
            missing.map(|(why, frames)| (plain(&why.to_string()), frames)).collect();
        missing.sort();
        for (reason, frames) in missing {
            let share = share(frames, row.frames);
            writeln!(out, "                    {share:.1} % missing: {reason}")?;
        }
    }
    Ok(())
}

/// Where an executable's names are from, and what was looked for in vain.
pub(crate) fn sources(profile: Named<'_>, executable: usize) -> Vec<String> {
    let Some(source) = profile.names.sources.get(executable) else { return Vec::new() };
    let mut lines = Vec::new();
    // Of a file that is its own source there is nothing to say.
    if !source.origin.is_empty() && source.origin != profile.executables[executable].name() {
        lines.push(format!("from {}", source.origin));
    }
    if let Some(before) = source.upgraded_from {
        lines.push(format!(
            "better than before: the symbol cache had {}",
            before.map_or("none", Quality::text)
        ));
    }
    if !source.origin.is_empty() {
        lines.extend(source.notes.iter().cloned());
    }
    lines
}

fn losses(profile: &Profile, out: &mut impl Write) -> io::Result<()> {
    let (delivered, lost) = (profile.sample_count(), profile.lost_samples());
    let others = match profile.left_out {
        0 => String::new(),
        others => format!(" + {others} left out of this part"),
    };
    match profile.taken {
        Some(taken) => {
            writeln!(
                out,
                "\nsamples taken {taken} = {delivered} in the profile{others} + {lost} lost"
            )?;
            let known = delivered + profile.left_out + lost;
            if taken != known {
                let difference = taken.abs_diff(known);
                writeln!(out, "{difference} samples are unaccounted for: a bug, please report it")?;
            }
        }
        None => writeln!(
            out,
            "\nsamples taken: unknown, see the notes above; {delivered} in the profile, {lost} lost"
        )?,
    }
    for (reason, (count, _)) in &profile.lost {
        writeln!(out, "lost {count} {}", reason.text())?;
    }
    Ok(())
}
