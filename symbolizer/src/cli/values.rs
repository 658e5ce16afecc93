//! Values as they are typed: times, bytes, labels.

use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};

/// A stretch of time: a number alone is one of seconds, as perf's and `timeout`'s.
pub fn time(text: &str) -> Result<Duration, humantime::DurationError> {
    text.parse().map(Duration::from_secs).or_else(|_unit| humantime::parse_duration(text))
}

/// `KEY=VALUE`, with a key.
pub fn tag(text: &str) -> anyhow::Result<String> {
    match text.split_once('=') {
        Some((key, _)) if !key.is_empty() => Ok(text.to_owned()),
        _ => bail!("a tag is KEY=VALUE"),
    }
}

/// A number of bytes, as `2GiB`, `500MB` or without a unit.
pub fn bytes(text: &str) -> anyhow::Result<u64> {
    const FORM: &str = "a number of bytes is as 2GiB or 500MB";
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KB" | "kB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        _ => bail!(FORM),
    };
    let number: u64 = number.parse().map_err(|_number| anyhow!(FORM))?;
    number.checked_mul(factor).context("more bytes than there are")
}

/// Labels a sample must have, as `comm=postgres,thread=worker`. A comma without a `=` behind it
/// belongs to the value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels(pub Vec<(String, String)>);

/// Labels, as typed.
pub fn labels(text: &str) -> anyhow::Result<Labels> {
    Ok(Labels(stackwire::labels::parse(text)?))
}

/// Seconds from the start, as `10..20`, `10..` or `..20`.
pub fn stretch(text: &str) -> anyhow::Result<std::ops::Range<f64>> {
    const FORM: &str = "a stretch of time is A..B, in seconds from the start";
    let (from, to) = text.split_once("..").context(FORM)?;
    let seconds = |text: &str, otherwise: f64| match text.trim_end_matches('s') {
        "" => Ok(otherwise),
        text => text.parse::<f64>().ok().filter(|it| it.is_finite() && *it >= 0.0).context(FORM),
    };
    // Beyond any capture, and still a number of nanoseconds.
    let range = seconds(from, 0.0)?..seconds(to, 1e9)?;
    ensure!(!range.is_empty(), "that stretch of time is empty");
    Ok(range)
}
