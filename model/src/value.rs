//! What values are: their kinds and units. Pure.

use std::fmt;

/// What a value is: its kind and unit, as pprof calls them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ValueKind {
    /// "cpu", "page-faults".
    pub kind: String,
    /// "nanoseconds", "count".
    pub unit: String,
}

impl ValueKind {
    /// Of a kind, in a unit.
    #[must_use]
    pub fn new(kind: &str, unit: &str) -> Self {
        Self { kind: kind.to_owned(), unit: unit.to_owned() }
    }

    /// How many samples there are.
    #[must_use]
    pub fn samples() -> Self {
        Self::new("samples", "count")
    }

    /// How many waits they stand for.
    #[must_use]
    pub fn events() -> Self {
        Self::new("events", "count")
    }

    /// Time on a CPU.
    #[must_use]
    pub fn cpu() -> Self {
        Self::new("cpu", "nanoseconds")
    }
}

impl fmt::Display for ValueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.unit)
    }
}
