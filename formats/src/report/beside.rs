//! Time that passed, of several series side by side: on a CPU, waiting, waiting for a CPU.

use std::collections::BTreeMap;
use std::io::{self, Write};

use bytestring::ByteString;
use stackwire_model::profile::{Named, SeriesId};

use super::functions::{Counts, functions};
use super::options::{Options, Sort};
use super::short::short;
use crate::plain;

/// Series whose samples weigh nanoseconds, if there are several.
pub fn of_time(profile: Named<'_>, series: &[SeriesId]) -> Vec<SeriesId> {
    let weighs_time = |id: &&SeriesId| profile.series_of(**id).event.weight.unit == "nanoseconds";
    let of_time: Vec<_> = series.iter().filter(weighs_time).copied().collect();
    if of_time.len() > 1 { of_time } else { Vec::new() }
}

/// Writes the functions of these series, at most `most` of them.
pub fn write(
    profile: Named<'_>,
    series: &[SeriesId],
    most: usize,
    options: &Options<'_>,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut rows: BTreeMap<(ByteString, String), Vec<Counts>> = BTreeMap::new();
    for (column, &id) in series.iter().enumerate() {
        for (name, counts) in functions(profile, id, |sample| sample.value) {
            rows.entry(name).or_insert_with(|| vec![Counts::default(); series.len()])[column] =
                counts;
        }
    }
    let weight = |row: &[Counts]| -> u64 {
        let of = |counts: &Counts| match options.sort {
            Sort::Own => counts.own,
            Sort::Total => counts.all,
        };
        row.iter().map(of).sum()
    };
    let mut rows: Vec<_> = rows.into_iter().filter(|(_, row)| weight(row) > 0).collect();
    rows.sort_by(|a, b| weight(&b.1).cmp(&weight(&a.1)).then_with(|| a.0.cmp(&b.0)));
    writeln!(out)?;
    for &id in series {
        write!(out, "{:>17} s", plain(&profile.series_of(id).event.name))?;
    }
    writeln!(out)?;
    for _ in series {
        write!(out, "{:>9}{:>10}", "self", "total")?;
    }
    writeln!(out, "  function")?;
    for ((function, module), row) in rows.iter().take(most) {
        for counts in row {
            write!(out, "{}{}", seconds(counts.own, 9), seconds(counts.all, 10))?;
        }
        let (function, module) = (plain(function), plain(module.trim_matches(['[', ']'])));
        let function = match options.window {
            Some(window) => {
                let taken = series.len() * 19 + module.chars().count() + " [] ".len();
                short(&function, window.columns.saturating_sub(taken).max(12))
            }
            None => function,
        };
        writeln!(out, "  {function} [{module}]")?;
    }
    if let Some(more) = rows.len().checked_sub(most).filter(|&more| more > 0) {
        for column in 0..series.len() {
            let rest = rows[most..].iter().map(|(_, row)| row[column].own).sum();
            write!(out, "{}{:>10}", seconds(rest, 9), "")?;
        }
        writeln!(out, "  {more} more")?;
    }
    Ok(())
}

/// Nothing is not written as zeros: it is what a reader looks for.
fn seconds(ns: u64, width: usize) -> String {
    if ns == 0 { format!("{:>width$}", "-") } else { format!("{:>width$.3}", ns as f64 / 1e9) }
}
