//! The text report: what was hot, how well it is named, how stacks ended, what was lost.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Write};

use super::plain::plain;
use super::unwinding;
use crate::profile::{LocationId, Profile, Quality, Resolution};

/// Functions listed.
const TOP: usize = 25;

/// Writes the report; with the shares of a label's values, if one is asked for (`by`).
///
/// # Errors
/// Those of the writer.
pub fn write(profile: &Profile, by: Option<&str>, mut out: impl Write) -> io::Result<()> {
    head(profile, &mut out)?;
    if let Some(key) = by {
        values(profile, key, &mut out)?;
    }
    top(profile, &mut out)?;
    coverage(profile, &mut out)?;
    unwinding::write(profile, &mut out)?;
    losses(profile, &mut out)?;
    out.flush()
}

fn head(profile: &Profile, out: &mut impl Write) -> io::Result<()> {
    let origin = &profile.origin;
    writeln!(
        out,
        "{} samples of {} at {} Hz over {:.1} s, {} on {} ({} {})",
        profile.sample_count(),
        origin.event,
        origin.frequency,
        profile.duration_ns as f64 / 1e9,
        count(
            profile.processes.iter().map(|p| p.pid).collect::<HashSet<_>>().len(),
            "process",
            "processes"
        ),
        origin.hostname,
        origin.kernel_release,
        origin.machine,
    )?;
    for note in &profile.notes {
        writeln!(out, "note: {}", plain(note))?;
    }
    Ok(())
}

fn count(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// Samples by the values of a label.
fn values(profile: &Profile, key: &str, out: &mut impl Write) -> io::Result<()> {
    let total = profile.sample_count();
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for sample in &profile.samples {
        let value = profile.label(sample.key, key).unwrap_or("without".into());
        *counts.entry(value.into_owned()).or_default() += sample.count;
    }
    let mut rows: Vec<_> = counts.into_iter().collect();
    rows.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    writeln!(out, "\n   share samples  {key}")?;
    for (value, samples) in rows {
        writeln!(out, "{:>6.2} % {samples:>7}  {}", share(samples, total), plain(&value))?;
    }
    Ok(())
}

/// Samples in each function itself, by function and module.
pub(super) fn own(profile: &Profile) -> BTreeMap<(String, String), u64> {
    let mut own = BTreeMap::new();
    for sample in &profile.samples {
        let Some(leaf) = profile.frames(sample.key).next() else { continue };
        let module = module(profile, leaf);
        if let Some(line) = profile.lines(leaf).into_iter().next() {
            *own.entry((line.function, module)).or_default() += sample.count;
        }
    }
    own
}

/// The file name of what a location lies in.
fn module(profile: &Profile, location: LocationId) -> String {
    let executable = profile.locations[location.index()].executable;
    let name = profile.executables[executable.index()].name();
    name.rsplit('/').next().unwrap_or_default().to_owned()
}

fn top(profile: &Profile, out: &mut impl Write) -> io::Result<()> {
    let total = profile.sample_count();
    let mut with_callees: HashMap<(String, String), u64> = HashMap::new();
    for sample in &profile.samples {
        let mut seen = HashSet::new();
        for location in profile.frames(sample.key) {
            let module = module(profile, location);
            for line in profile.lines(location) {
                let name = (line.function, module.clone());
                if seen.insert(name.clone()) {
                    *with_callees.entry(name).or_default() += sample.count;
                }
            }
        }
    }
    let mut rows: Vec<_> = own(profile).into_iter().collect();
    rows.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    writeln!(out, "\n    self           total          function")?;
    let shown = rows.iter().take(TOP);
    for (name, samples) in shown {
        let all = with_callees.get(name).copied().unwrap_or(*samples);
        writeln!(
            out,
            "{:>6.2} % {samples:>7} {:>6.2} % {all:>7}  {} [{}]",
            share(*samples, total),
            share(all, total),
            plain(&name.0),
            plain(name.1.trim_matches(['[', ']']))
        )?;
    }
    if rows.len() > TOP {
        let rest: u64 = rows[TOP..].iter().map(|(_, samples)| samples).sum();
        writeln!(
            out,
            "{:>6.2} % {rest:>7}                   {} more",
            share(rest, total),
            rows.len() - TOP
        )?;
    }
    Ok(())
}

/// A frame of a sample counts once a sample: what is hot weighs most.
fn coverage(profile: &Profile, out: &mut impl Write) -> io::Result<()> {
    #[derive(Default)]
    struct Row {
        frames: u64,
        named: u64,
        qualities: BTreeMap<&'static str, u64>,
        missing: BTreeMap<String, u64>,
    }
    let mut rows: HashMap<usize, Row> = HashMap::new();
    for sample in &profile.samples {
        for location in profile.frames(sample.key) {
            let executable = profile.locations[location.index()].executable;
            let row = rows.entry(executable.index()).or_default();
            row.frames += sample.count;
            match profile.resolutions.get(location.index()) {
                Some(Resolution::Found { quality, .. }) => {
                    row.named += sample.count;
                    *row.qualities.entry(quality.text()).or_default() += sample.count;
                }
                Some(Resolution::Missing(reason)) => {
                    *row.missing.entry(reason.clone()).or_default() += sample.count;
                }
                None => {}
            }
        }
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by(|a, b| b.1.frames.cmp(&a.1.frames).then(a.0.cmp(&b.0)));
    writeln!(out, "\n  frames   named  executable")?;
    for (index, row) in rows {
        let executable = &profile.executables[index];
        let qualities: Vec<_> = row
            .qualities
            .iter()
            .map(|(quality, frames)| format!("{quality} {:.1} %", share(*frames, row.frames)))
            .collect();
        let build_id = executable.build_id_hex();
        let id = build_id.get(..12).map_or(String::new(), |id| format!(" {id}"));
        writeln!(
            out,
            "{:>8} {:>5.1} %  {}{id}  {}",
            row.frames,
            share(row.named, row.frames),
            plain(&executable.name()),
            qualities.join(", ")
        )?;
        for line in sources(profile, index) {
            writeln!(out, "                    {}", plain(&line))?;
        }
        for (reason, frames) in row.missing {
            writeln!(
                out,
                "                    {:.1} % missing: {}",
                share(frames, row.frames),
                plain(&reason)
            )?;
        }
    }
    Ok(())
}

/// Where an executable's names are from, and what was looked for in vain.
pub(super) fn sources(profile: &Profile, executable: usize) -> Vec<String> {
    let Some(source) = profile.sources.get(executable) else { return Vec::new() };
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

pub(super) fn share(part: u64, total: u64) -> f64 {
    if total == 0 { 0.0 } else { part as f64 * 100.0 / total as f64 }
}
