//! Two profiles side by side: functions by what they gained and lost, and stacks with both counts.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::folded as stacks;
use super::plain::plain;
use super::report::{self, share};
use crate::profile::Profile;

/// Functions listed.
const TOP: usize = 40;

/// Writes functions by how much their own share has changed, in points of all samples.
///
/// # Errors
/// Those of the writer.
pub fn write(before: &Profile, after: &Profile, mut out: impl Write) -> io::Result<()> {
    let totals = (before.sample_count(), after.sample_count());
    let mut rows: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
    for (name, count) in report::own(before) {
        rows.entry(name).or_default().0 = count;
    }
    for (name, count) in report::own(after) {
        rows.entry(name).or_default().1 = count;
    }
    let mut rows: Vec<_> = rows
        .into_iter()
        .map(|(name, (one, two))| (share(two, totals.1) - share(one, totals.0), name, one, two))
        .collect();
    rows.sort_by(|a, b| b.0.abs().total_cmp(&a.0.abs()).then_with(|| a.1.cmp(&b.1)));
    writeln!(out, "{} samples before, {} after\n", totals.0, totals.1)?;
    writeln!(out, "   before       after      change  function")?;
    for (change, (function, module), one, two) in rows.iter().take(TOP) {
        writeln!(
            out,
            "{:>7.2} %   {:>7.2} %   {:>+7.2} %  {} [{}]",
            share(*one, totals.0),
            share(*two, totals.1),
            change,
            plain(function),
            plain(module.trim_matches(['[', ']']))
        )?;
    }
    if rows.len() > TOP {
        writeln!(out, "                                   {} more", rows.len() - TOP)?;
    }
    out.flush()
}

/// Stacks with both counts: `comm;root;…;leaf before after`, as tools for differential flame graphs read them.
#[must_use]
pub fn lines(before: &Profile, after: &Profile, by: Option<&str>) -> Vec<String> {
    let mut both: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for (stack, count) in stacks::lines(before, by) {
        both.entry(stack).or_default().0 = count;
    }
    for (stack, count) in stacks::lines(after, by) {
        both.entry(stack).or_default().1 = count;
    }
    both.into_iter().map(|(stack, (one, two))| format!("{stack} {one} {two}")).collect()
}

/// Writes stacks with both counts, a line each.
///
/// # Errors
/// Those of the writer.
pub fn folded(
    before: &Profile,
    after: &Profile,
    by: Option<&str>,
    mut out: impl Write,
) -> io::Result<()> {
    for line in lines(before, after, by) {
        writeln!(out, "{line}")?;
    }
    out.flush()
}
