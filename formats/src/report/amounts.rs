//! How amounts are written. Called by `write.rs` and `lines.rs`.

use stackwire_model::profile::{Profile, SeriesId};

/// How amounts of a series are written: nanoseconds are too many digits to read.
#[derive(Clone, Copy)]
pub enum Amounts {
    /// A number.
    Samples,
    /// As seconds.
    Nanoseconds,
}

impl Amounts {
    /// Those of a series.
    pub fn of(profile: &Profile, series: SeriesId) -> Self {
        let series = profile.series_of(series);
        match series.shown_kind().unit.as_str() {
            "nanoseconds" if !series.weighs_evenly() => Self::Nanoseconds,
            _ => Self::Samples,
        }
    }

    /// The head of their column.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Samples => "samples",
            Self::Nanoseconds => "s",
        }
    }

    /// One, of seven characters or more.
    pub fn text(self, amount: u64) -> String {
        match self {
            Self::Samples => format!("{amount:>7}"),
            Self::Nanoseconds => format!("{:>7.3}", amount as f64 / 1e9),
        }
    }
}
