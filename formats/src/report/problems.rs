//! The report's part for a terminal on what is wrong: frames without names, stacks that are not
//! whole, losses; the worst first, a line each.

use std::collections::BTreeMap;
use std::io::{self, Write};

use stackwire_model::profile::{ExecutableId, Named};

use crate::percent::share;
use crate::plain;

/// Lines of each kind.
const MOST: usize = 4;
/// Less is not worth a line, in percent.
const LEAST: f64 = 0.5;

/// Writes it.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: Named<'_>, out: &mut impl Write) -> io::Result<()> {
    let name = |id: ExecutableId| {
        let name = profile.executables[id.index()].name();
        plain(name.rsplit('/').next().unwrap_or(&name))
    };
    let (named, whole) = (profile.named(), profile.whole());
    let unnamed = profile
        .unnamed()
        .filter_map(|frames| Some(((frames.executable, &frames.missing?.reason), frames.count)));
    let unnamed = counts(unnamed).into_iter().map(|((id, why), count)| {
        (count, named.of, format!("of frames: {}: {}", name(id), plain(&why.to_string())))
    });
    let cut = profile.cut().map(|stacks| ((stacks.end, stacks.executable), stacks.count));
    let cut = counts(cut).into_iter().map(|((end, id), count)| {
        let place = id.map_or(String::new(), |id| format!(" in {}", name(id)));
        (count, whole.of, format!("of stacks end{place}: {}", end.text()))
    });
    let mut lines = worst(unnamed);
    lines.extend(worst(cut));
    lines.extend(
        profile.lost.iter().map(|(reason, (count, _))| format!("lost {count} {}", reason.text())),
    );
    writeln!(out)?;
    write!(out, "{:.1} % of frames named", named.percent())?;
    if whole.of > 0 {
        write!(out, ", {:.1} % of stacks whole", whole.percent())?;
    }
    match profile.taken {
        Some(_) => writeln!(out, ", {} samples lost", profile.lost_samples())?,
        None => writeln!(out, ", the capture was cut")?,
    }
    lines.iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    writeln!(out, "\nEvery executable, and where stacks end: --full")
}

/// Lines for the largest.
fn worst(rows: impl Iterator<Item = (u64, u64, String)>) -> Vec<String> {
    let shares = rows.map(|(count, of, text)| (share(count, of), text));
    let mut rows: Vec<_> = shares.filter(|(share, _)| *share >= LEAST).collect();
    rows.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    rows.truncate(MOST);
    rows.into_iter().map(|(share, text)| format!("{share:.1} % {text}")).collect()
}

fn counts<K: Ord>(rows: impl Iterator<Item = (K, u64)>) -> BTreeMap<K, u64> {
    let mut counts = BTreeMap::new();
    rows.for_each(|(key, count)| *counts.entry(key).or_default() += count);
    counts
}
