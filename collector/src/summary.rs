//! What a finished capture can tell of itself: what was taken, delivered and lost. Made by
//! `pipeline.rs`, completed by `session.rs`, put into words by the program.

use stackwire_model::LostReason;

use crate::unwind::Stats;

/// What a finished capture can tell of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Samples the kernel side took.
    pub taken: u64,
    /// Samples handed on in epochs.
    pub delivered: u64,
    /// Epochs.
    pub epochs: u64,
    /// What was lost.
    pub lost: Vec<(LostReason, u64)>,
    /// Processes whose mappings could not be read for want of permission.
    pub denied: u64,
    /// What became of unwind tables.
    pub tables: Stats,
}

impl Summary {
    /// Adds to what was lost.
    pub fn lose(&mut self, reason: LostReason, count: u64) {
        match self.lost.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, known)) => *known += count,
            None if count > 0 => self.lost.push((reason, count)),
            None => {}
        }
    }
}
