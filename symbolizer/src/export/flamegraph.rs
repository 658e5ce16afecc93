//! An interactive SVG flame graph, drawn by inferno.

use std::io::{self, Write};

use inferno::flamegraph::{Options, from_lines};

use super::folded;
use super::plain::plain;
use crate::profile::Profile;

/// Writes the flame graph; user and kernel frames in colours of their own.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: &Profile, title: &str, out: impl Write) -> io::Result<()> {
    let lines: Vec<String> = folded::lines(profile)
        .into_iter()
        .map(|(stack, count)| format!("{stack} {count}"))
        .collect();
    let mut options = Options::default();
    options.title = plain(title);
    options.count_name = "samples".to_owned();
    options.colors =
        inferno::flamegraph::color::Palette::Multi(inferno::flamegraph::color::MultiPalette::Java);
    from_lines(&mut options, lines.iter().map(String::as_str), out)
}
