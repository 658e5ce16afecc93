//! An interactive SVG flame graph, drawn by inferno.

use std::io::{self, Write};

use inferno::flamegraph::{Direction, Options, TextTruncateDirection, from_lines};

use super::plain::plain;
use super::{compare, folded};
use crate::profile::Profile;

/// What a flame graph shows, and how.
#[derive(Clone, Copy, Debug)]
pub struct Flames<'a> {
    /// The label stacks begin with; the command unless told.
    pub by: Option<&'a str>,
    /// Above it.
    pub title: &'a str,
    /// The root on top.
    pub icicle: bool,
    /// Inlined functions are frames of their own.
    pub inlined: bool,
}

/// Writes the flame graph. What a frame is has a colour: kernel orange, inlined blue, made at run time green, C++ and Rust
/// yellow, other native code red.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: &Profile, flames: &Flames<'_>, out: impl Write) -> io::Result<()> {
    let marks = folded::Marks { all: true, inlined: flames.inlined };
    let lines: Vec<String> = folded::lines(profile, flames.by, marks)
        .into_iter()
        .map(|(stack, count)| format!("{stack} {count}"))
        .collect();
    let mut options = options(flames.title);
    if flames.icicle {
        options.direction = Direction::Inverted;
    }
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
    // Narrower than a pixel: nobody sees it, and it makes files of megabytes.
    options.min_width = 0.05;
    options.text_truncate_direction = TextTruncateDirection::Right;
    // Equal profiles give equal pictures.
    options.deterministic = true;
    options
}
