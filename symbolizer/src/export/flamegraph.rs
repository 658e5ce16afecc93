//! An interactive SVG flame graph, drawn by inferno.

use std::io::{self, Write};

use inferno::flamegraph::{Options, from_lines};

use super::plain::plain;
use super::{compare, folded};
use crate::profile::Profile;

/// Writes the flame graph; user and kernel frames in colours of their own.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: &Profile, by: Option<&str>, title: &str, out: impl Write) -> io::Result<()> {
    let lines: Vec<String> = folded::lines(profile, by)
        .into_iter()
        .map(|(stack, count)| format!("{stack} {count}"))
        .collect();
    let mut options = options(title);
    if profile.types.is_some() {
        options.count_name = profile.shown_kind().1.to_owned();
    }
    options.colors =
        inferno::flamegraph::color::Palette::Multi(inferno::flamegraph::color::MultiPalette::Java);
    from_lines(&mut options, lines.iter().map(String::as_str), out)
}

/// Draws what has changed: red what takes more of the time than before, blue what takes less.
///
/// # Errors
/// Those of the writer.
pub fn diff(
    before: &Profile,
    after: &Profile,
    by: Option<&str>,
    title: &str,
    out: impl Write,
) -> io::Result<()> {
    let lines = compare::lines(before, after, by);
    let total = |profile: &Profile| profile.sample_count().max(1) as f64;
    let factor = total(after) / total(before);
    // Captures are rarely equally long: shares are compared.
    let scaled = lines.into_iter().map(|(stack, (before, after))| {
        format!("{stack} {} {after}", (before as f64 * factor).round() as u64)
    });
    let lines: Vec<String> = scaled.collect();
    from_lines(&mut options(title), lines.iter().map(String::as_str), out)
}

fn options(title: &str) -> Options<'static> {
    let mut options = Options::default();
    options.title = plain(title);
    options.count_name = "samples".to_owned();
    options
}
