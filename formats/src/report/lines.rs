//! Lines of source that interpreters ran, or called native functions from: of each sample that of
//! the innermost function of an interpreter. Called by `write.rs`.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use bytestring::ByteString;
use stackwire_model::profile::{LocationId, Named, SeriesId};

use super::amounts::Amounts;
use crate::percent::share;
use crate::plain;

/// Lines listed.
const TOP: usize = 10;

/// Writes those of a series; nothing where there are none.
pub fn write(profile: Named<'_>, series: SeriesId, out: &mut impl Write) -> io::Result<()> {
    let is_code = |at: LocationId| {
        let location = &profile.locations[at.index()];
        profile.executables[location.executable.index()].is_code()
    };
    let mut of_location: HashMap<LocationId, u64> = HashMap::new();
    for sample in profile.samples_of(series) {
        if let Some(innermost) = profile.frames(sample.key).find(|&at| is_code(at)) {
            *of_location.entry(innermost).or_default() += profile.share_of(sample);
        }
    }
    // Instructions of one line are several locations.
    let mut lines: BTreeMap<(ByteString, u32, ByteString), u64> = BTreeMap::new();
    for (location, amount) in of_location {
        let Some(line) = profile.lines(location).into_iter().next() else { continue };
        if line.line > 0 && amount > 0 {
            *lines.entry((line.file, line.line, line.function)).or_default() += amount;
        }
    }
    if lines.is_empty() {
        return Ok(());
    }
    let mut lines: Vec<_> = lines.into_iter().collect();
    lines.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let amounts = Amounts::of(&profile, series);
    let total = profile.total_of(series);
    writeln!(
        out,
        "\n   share {:>7}  line of source that ran, or called native functions",
        amounts.unit()
    )?;
    for ((file, line, function), amount) in lines.iter().take(TOP) {
        let (part, amount) = (share(*amount, total), amounts.text(*amount));
        let file = file.rsplit('/').next().unwrap_or_default();
        let (file, function) = (plain(file), plain(function));
        writeln!(out, "{part:>6.2} % {amount}  {file}:{line} in {function}")?;
    }
    if let Some(more) = lines.len().checked_sub(TOP).filter(|&more| more > 0) {
        let rest: u64 = lines[TOP..].iter().map(|(_, amount)| amount).sum();
        writeln!(out, "{:>6.2} % {}  {more} more", share(rest, total), amounts.text(rest))?;
    }
    Ok(())
}
