//! An interactive SVG flame graph, drawn by inferno.

use std::collections::HashMap;
use std::io::{self, Write};

use inferno::flamegraph::color::{Color, MultiPalette, Palette, PaletteMap};
use inferno::flamegraph::{Direction, Options, TextTruncateDirection, from_lines};
use stackwire_model::Profile;
use stackwire_model::profile::{FrameType, Line, LocationId, Named, SeriesId};

use super::tooltip::Tooltips;
use crate::plain;
use crate::{compare, folded};

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

/// Writes the flame graph. What a frame is has a colour: kernel orange, inlined blue-green, made at
/// run time green, C++ and Rust yellow, other native code red; functions of an interpreter are
/// violet, functions of Go teal, and what a thread waits in is blue.
///
/// Of several series it draws the first that has samples. A clock and waits are drawn together:
/// their sum is the time that passed for all threads. [`amount`] says how much that is.
///
/// # Errors
/// Those of the writer.
pub fn write(profile: Named<'_>, flames: &Flames<'_>, mut out: impl Write) -> io::Result<()> {
    let marks = folded::Marks { all: true, inlined: flames.inlined };
    let shown = profile.series_of(profile.shown());
    let series = drawn_series(&profile);
    let all_time = series.iter().any(|&id| profile.series_of(id).event.is_wait);
    let stacks = if all_time {
        let samples = profile.samples.iter().filter(|sample| series.contains(&sample.key.series));
        let samples = samples.map(|sample| (sample, sample.value));
        folded::lines_of(profile, samples, flames.by, marks)
    } else {
        folded::lines(profile, flames.by, marks)
    };
    let mut options = options(flames.title);
    if flames.icicle {
        options.direction = Direction::Inverted;
    }
    if all_time {
        // Whole numbers, and few digits.
        options.count_name = "µs".to_owned();
        options.factor = 1e-3;
    } else if shown.types.is_some() {
        options.count_name = shown.shown_kind().unit.clone();
    } else if !shown.weighs_evenly() {
        options.count_name = shown.shown_kind().kind.clone();
    }
    options.colors = Palette::Multi(MultiPalette::Java);
    let mut colours = PaletteMap::default();
    let frames = stacks.keys().flat_map(|stack| stack.split(';'));
    for frame in frames.filter(|frame| frame.ends_with(folded::WAIT_MARK)) {
        colours.insert(frame, BLUE);
    }
    for (frame, colour) in coloured(profile) {
        colours.insert(&frame, colour);
    }
    if colours.iter().next().is_some() {
        options.palette_map = Some(&mut colours);
    }
    let lines: Vec<String> =
        stacks.into_iter().map(|(stack, count)| format!("{stack} {count}")).collect();
    out.write_all(Tooltips::of(profile).add_to(&drawn(&mut options, &lines)?).as_bytes())
}

/// How much a flame graph of a profile draws, in words.
#[must_use]
pub fn amount(profile: &Profile) -> String {
    let drawn = drawn_series(profile);
    let amounts: Vec<String> = drawn.iter().map(|&id| profile.amount_of(id)).collect();
    amounts.join(" + ")
}

fn drawn_series(profile: &Profile) -> Vec<SeriesId> {
    let shown = profile.shown();
    let event = &profile.series_of(shown).event;
    let has_time = event.is_clock() || event.is_wait;
    let too = |id: &SeriesId| *id == shown || has_time && profile.series_of(*id).event.is_wait;
    let mut drawn: Vec<SeriesId> = profile.sampled_series().filter(too).collect();
    if drawn.is_empty() {
        drawn.push(shown);
    }
    drawn
}

/// Frames whose kind the palette does not know.
fn coloured(profile: Named<'_>) -> impl Iterator<Item = (String, Color)> {
    let locations = (0..profile.locations.len() as u32).map(LocationId);
    locations.flat_map(move |at| {
        let (mark, colour) = match profile.frame_type(at) {
            FrameType::Code(_) => ("_[j]", VIOLET),
            FrameType::Go => ("", TEAL),
            FrameType::Native | FrameType::Kernel | FrameType::Jit => return Vec::new(),
        };
        let frame = |line: Line| (format!("{}{mark}", folded::clean(&line.function)), colour);
        profile.lines(at).into_iter().map(frame).collect::<Vec<_>>()
    })
}

/// Of functions of interpreters.
const VIOLET: Color = Color { r: 176, g: 128, b: 224 };
/// Of functions of Go.
const TEAL: Color = Color { r: 96, g: 192, b: 184 };
/// Of what threads wait in.
const BLUE: Color = Color { r: 96, g: 144, b: 224 };

/// Draws what has changed: red what takes more of the time than before, blue what takes less, grey
/// what may be as it was.
///
/// # Errors
/// Those of the writer.
pub fn diff(
    before: Named<'_>,
    after: Named<'_>,
    by: Option<&str>,
    title: &str,
    mut out: impl Write,
) -> io::Result<()> {
    let lines = compare::lines(before, after, by);
    let (counted, totals) = compare::totals(before, after);
    let factor = totals.1.max(1) as f64 / totals.0.max(1) as f64;
    let mut own: HashMap<&str, (u64, u64)> = HashMap::new();
    for (stack, (one, two)) in &lines {
        let counts = own.entry(leaf(stack)).or_default();
        *counts = (counts.0 + one, counts.1 + two);
    }
    let scaled = lines.iter().map(|(stack, &(one, two))| {
        // A function may have changed though none of its stacks has for sure.
        let noise = |counts| compare::is_noise(counts, totals);
        let is_noise = counted && noise((one, two)) && noise(own[leaf(stack)]);
        // Captures are rarely equally long: shares are compared.
        let one = if is_noise { two } else { (one as f64 * factor).round() as u64 };
        format!("{stack} {one} {two}")
    });
    let lines: Vec<String> = scaled.collect();
    let mut options = options(title);
    options.subtitle = Some("red: more than before, blue: less, grey: within noise".to_owned());
    let svg = Tooltips::of(after).add_to(&drawn(&mut options, &lines)?);
    // inferno draws what has not changed in white, nearly that of the background.
    out.write_all(svg.replace(UNCHANGED, GREY).as_bytes())
}

fn drawn(options: &mut Options<'_>, lines: &[String]) -> io::Result<String> {
    let mut svg = Vec::new();
    from_lines(options, lines.iter().map(String::as_str), &mut svg)?;
    String::from_utf8(svg).map_err(io::Error::other)
}

const UNCHANGED: &str = "fill=\"rgb(250,250,250)\"";
const GREY: &str = "fill=\"rgb(205,205,205)\"";

/// The innermost function of a stack.
fn leaf(stack: &str) -> &str {
    stack.rsplit(';').next().unwrap_or(stack)
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
