//! Two profiles side by side: functions by what they gained and lost, and stacks with both counts.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::folded as stacks;
use super::plain::plain;
use super::report::{self, share};
use crate::profile::Profile;

/// Functions listed.
const TOP: usize = 40;

/// Writes functions by how much their own share has changed, in points of all samples; before them the values of a label,
/// if one is asked for (`by`).
///
/// # Errors
/// Those of the writer.
pub fn write(
    before: &Profile,
    after: &Profile,
    by: Option<&str>,
    mut out: impl Write,
) -> io::Result<()> {
    let totals = (before.sample_count(), after.sample_count());
    writeln!(out, "{} samples before, {} after", totals.0, totals.1)?;
    if let Some(key) = by {
        let rows = both(report::by_value(before, key), report::by_value(after, key));
        table(key, rows, totals, &mut out)?;
    }
    let own = |profile| {
        let functions = report::functions(profile).into_iter();
        functions.filter(|(_, counts)| counts.own > 0).map(|((function, module), counts)| {
            (format!("{function} [{}]", module.trim_matches(['[', ']'])), counts.own)
        })
    };
    table("function", both(own(before), own(after)), totals, &mut out)?;
    out.flush()
}

/// What has changed most comes first.
fn table(
    what: &str,
    rows: BTreeMap<String, (u64, u64)>,
    totals: (u64, u64),
    out: &mut impl Write,
) -> io::Result<()> {
    let mut rows: Vec<_> = rows
        .into_iter()
        .map(|(name, (one, two))| (share(two, totals.1) - share(one, totals.0), name, one, two))
        .collect();
    rows.sort_by(|a, b| b.0.abs().total_cmp(&a.0.abs()).then_with(|| a.1.cmp(&b.1)));
    writeln!(out, "\n   before       after      change  {what}")?;
    for (change, name, one, two) in rows.iter().take(TOP) {
        writeln!(
            out,
            "{:>7.2} %   {:>7.2} %   {:>+7.2} %  {}",
            share(*one, totals.0),
            share(*two, totals.1),
            change,
            plain(name)
        )?;
    }
    if rows.len() > TOP {
        writeln!(out, "                                   {} more", rows.len() - TOP)?;
    }
    Ok(())
}

/// Counts of the same name beside each other.
fn both(
    before: impl IntoIterator<Item = (String, u64)>,
    after: impl IntoIterator<Item = (String, u64)>,
) -> BTreeMap<String, (u64, u64)> {
    let mut both: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for (name, count) in before {
        both.entry(name).or_default().0 += count;
    }
    for (name, count) in after {
        both.entry(name).or_default().1 += count;
    }
    both
}

/// Stacks with both counts: `comm;root;…;leaf before after`, as tools for differential flame graphs read them.
#[must_use]
pub fn lines(before: &Profile, after: &Profile, by: Option<&str>) -> BTreeMap<String, (u64, u64)> {
    both(stacks::lines(before, by), stacks::lines(after, by))
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
    for (stack, (one, two)) in lines(before, after, by) {
        writeln!(out, "{stack} {one} {two}")?;
    }
    out.flush()
}
