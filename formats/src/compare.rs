//! Two profiles side by side: functions by what they gained and lost, and stacks with both counts.

use std::collections::BTreeMap;
use std::io::{self, Write};

use stackwire_model::profile::Named;

use crate::folded as stacks;
use crate::percent::share;
use crate::plain;
use crate::report::{self, Counts};

/// Functions listed.
const TOP: usize = 40;

/// Writes functions by how much their own share has changed, in points of all samples of the series
/// that is shown; before them the values of a label, if one is asked for (`by`).
///
/// # Errors
/// Those of the writer.
pub fn write(
    before: Named<'_>,
    after: Named<'_>,
    by: Option<&str>,
    mut out: impl Write,
) -> io::Result<()> {
    let (counted, totals) = totals(before, after);
    let shown = after.series_of(after.shown());
    let what = if counted { "samples".to_owned() } else { shown.shown_kind().to_string() };
    writeln!(out, "{} {what} before, {} after", totals.0, totals.1)?;
    if let Some(key) = by {
        let values = |profile: Named<'_>| report::by_value(&profile, profile.shown(), key);
        let rows = both(values(before), values(after));
        table(key, counted, &rows, None, totals, &mut out)?;
    }
    let functions = [before, after].map(|profile| {
        let count = |sample: &_| profile.share_of(sample);
        let functions = report::functions(profile, profile.shown(), count).into_iter();
        let named = functions.map(|((function, module), counts)| {
            (format!("{function} [{}]", module.trim_matches(['[', ']'])), counts)
        });
        named.collect::<Vec<_>>()
    });
    let of = |count: fn(&Counts) -> u64| {
        let [before, after] = &functions;
        let counts = |of: &[(String, Counts)]| {
            let counts = of.iter().map(|(name, counts)| (name.clone(), count(counts)));
            counts.filter(|(_, count)| *count > 0).collect::<Vec<_>>()
        };
        both(counts(before), counts(after))
    };
    let with_callees = of(|counts| counts.all);
    let own = of(|counts| counts.own);
    table("function", counted, &own, Some(&with_callees), totals, &mut out)?;
    out.flush()
}

/// Whether it is samples that are compared, and how much there is on both sides, of the series
/// that is shown. Bytes, say, were not sampled one by one.
pub(crate) fn totals(before: Named<'_>, after: Named<'_>) -> (bool, (u64, u64)) {
    let of = |profile: Named<'_>| {
        let shown = profile.shown();
        (profile.series_of(shown).weighs_evenly(), profile.total_of(shown))
    };
    let (one, two) = (of(before), of(after));
    (one.0 && two.0, (one.1, two.1))
}

/// Samples of the same thing before and after.
type Both = BTreeMap<String, (u64, u64)>;

/// Whether two shares may be one that was sampled twice: a two-proportion z-test at 5 %.
pub(crate) fn is_noise((one, two): (u64, u64), totals: (u64, u64)) -> bool {
    let [one, two, of_one, of_two] = [one, two, totals.0, totals.1].map(|count| count as f64);
    let pooled = (one + two) / (of_one + of_two);
    let deviation = (pooled * (1.0 - pooled) * (1.0 / of_one + 1.0 / of_two)).sqrt();
    // Shares of nothing are noise, too.
    of_one * of_two == 0.0 || (two / of_two - one / of_one).abs() <= 1.96 * deviation
}

/// What has changed most comes first, what may be noise (`~`) behind it. With what functions call,
/// if that is given.
fn table(
    what: &str,
    counted: bool,
    rows: &Both,
    with_callees: Option<&Both>,
    totals: (u64, u64),
    out: &mut impl Write,
) -> io::Result<()> {
    let change = |(one, two): (u64, u64)| share(two, totals.1) - share(one, totals.0);
    let mut rows: Vec<_> = rows
        .iter()
        .map(|(name, &counts)| (counted && is_noise(counts, totals), change(counts), name, counts))
        .collect();
    rows.sort_by(|a, b| {
        a.0.cmp(&b.0).then(b.1.abs().total_cmp(&a.1.abs())).then_with(|| a.2.cmp(b.2))
    });
    let callees = if with_callees.is_some() { "   with callees" } else { "" };
    writeln!(out, "\n   before       after      change  {callees:<20}{what}")?;
    for (noise, change, name, (one, two)) in rows.iter().take(TOP) {
        let (one, two) = (share(*one, totals.0), share(*two, totals.1));
        let mark = if *noise { '~' } else { ' ' };
        write!(out, "{one:>7.2} %   {two:>7.2} %   {change:>+7.2} %{mark} ")?;
        if let Some((one, two)) = with_callees.and_then(|counts| counts.get(*name)) {
            let (one, two) = (share(*one, totals.0), share(*two, totals.1));
            write!(out, "{one:>7.2} {two:>7.2} %  ")?;
        }
        writeln!(out, "{}", plain(name))?;
    }
    if let Some(more) = rows.len().checked_sub(TOP).filter(|&more| more > 0) {
        writeln!(out, "                                   {more} more")?;
    }
    if rows.iter().take(TOP).any(|row| row.0) {
        writeln!(out, "~ within what sampling alone makes of equal shares")?;
    }
    Ok(())
}

/// Counts of the same name beside each other.
fn both(
    before: impl IntoIterator<Item = (String, u64)>,
    after: impl IntoIterator<Item = (String, u64)>,
) -> Both {
    let mut both = Both::new();
    for (name, count) in before {
        both.entry(name).or_default().0 += count;
    }
    for (name, count) in after {
        both.entry(name).or_default().1 += count;
    }
    both
}

/// Stacks with both counts: `comm;root;…;leaf before after`, as tools for differential flame graphs
/// read them.
#[must_use]
pub fn lines(before: Named<'_>, after: Named<'_>, by: Option<&str>) -> Both {
    let marks = stacks::Marks::KERNEL;
    both(stacks::lines(before, by, marks), stacks::lines(after, by, marks))
}

/// Writes stacks with both counts, a line each.
///
/// # Errors
/// Those of the writer.
pub fn folded(
    before: Named<'_>,
    after: Named<'_>,
    by: Option<&str>,
    mut out: impl Write,
) -> io::Result<()> {
    for (stack, (one, two)) in lines(before, after, by) {
        writeln!(out, "{stack} {one} {two}")?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_samplings_of_one_share_may_differ_by_is_noise() {
        // Of 1,000 samples each: the standard deviation of a difference at 50 % is 2.2 points.
        assert!(is_noise((500, 540), (1000, 1000)) && !is_noise((500, 550), (1000, 1000)));
        // Longer captures tell more.
        assert!(is_noise((50, 60), (1000, 1000)) && !is_noise((500, 600), (10_000, 10_000)));
        assert!(is_noise((0, 0), (10, 10)) && is_noise((0, 0), (0, 0)));
        assert!(is_noise((0, 2), (1000, 1000)) && !is_noise((0, 30), (1000, 1000)));
    }
}
