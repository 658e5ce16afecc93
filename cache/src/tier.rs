//! Tiers: places behind the store that are asked for what the store does not have.
//!
//! This file does locks, deadlines and remembered answers once for all tiers: a tier only brings
//! bytes. The debuginfod servers are a tier (the symbolizer's `resolve/debuginfod/`). Nothing here
//! knows their protocol.

use std::time::{Duration, Instant};

use crate::{Blob, Cache, CacheError, Key, Meta, Negative, Pending};

/// A place that is asked for blobs. It takes none: what is made here stays in the store.
pub trait Tier {
    /// What it is asked for.
    type Wanted;

    /// What the store keeps it under.
    fn key(&self, wanted: &Self::Wanted) -> Key;

    /// The name of who answers. An answer that a blob is missing counts for this name only: it says
    /// nothing about other servers.
    fn name(&self) -> String;

    /// The blob, written to a [`Pending`] of `store`, whole and verified. Waits until `deadline`
    /// at most.
    ///
    /// # Errors
    /// See [`Absent`].
    fn get<'s>(
        &self,
        wanted: &Self::Wanted,
        store: &'s Cache,
        deadline: Instant,
    ) -> Result<(Pending<'s>, Meta), Absent>;

    /// How long an answer is believed; `None`: it is asked again the next time.
    fn negative(&self, absent: &Absent) -> Option<Duration>;
}

/// Why a blob did not come.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Absent {
    /// The tier does not have it.
    #[error("{0}")]
    Missing(String),
    /// What it has cannot be used.
    #[error("{0}")]
    Malformed(String),
    /// It does not fit into the store. Parts of it may.
    #[error("{0}")]
    TooLarge(String),
    /// It might come another time.
    #[error("{0}")]
    Failed(String),
}

impl From<CacheError> for Absent {
    fn from(error: CacheError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Cache {
    /// A blob: from here, else from `tier`, once however many ask. Waits until `deadline` at most.
    ///
    /// # Errors
    /// See [`Absent`].
    pub fn get_through<T: Tier>(
        &self,
        tier: &T,
        wanted: &T::Wanted,
        deadline: Instant,
    ) -> Result<Blob, Absent> {
        let key = tier.key(wanted);
        if let Some(blob) = self.known(&key, tier)? {
            return Ok(blob);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(_lock) = self.lock(&key, left)? else {
            return Err(Absent::Failed("another process is still fetching it".to_owned()));
        };
        // Whoever had the lock before may have fetched it.
        if let Some(blob) = self.known(&key, tier)? {
            return Ok(blob);
        }
        match tier.get(wanted, self, deadline) {
            Ok((pending, meta)) => Ok(pending.keep(&key, meta)?),
            Err(absent) => {
                if let Some(lifetime) = tier.negative(&absent) {
                    self.remember(&key, tier, &absent, lifetime)?;
                }
                Err(absent)
            }
        }
    }

    /// The blob, or an answer from before that still holds.
    fn known<T: Tier>(&self, key: &Key, tier: &T) -> Result<Option<Blob>, Absent> {
        if let Some(blob) = self.get(key)? {
            return Ok(Some(blob));
        }
        let of_this = |text: String| text.strip_prefix(&prefix(tier)).map(str::to_owned);
        let absent = match self.negative(key)? {
            Some(Negative::Missing(text)) => of_this(text).map(Absent::Missing),
            Some(Negative::Malformed(text)) => of_this(text).map(Absent::Malformed),
            None => None,
        };
        absent.map_or(Ok(None), Err)
    }

    fn remember<T: Tier>(
        &self,
        key: &Key,
        tier: &T,
        absent: &Absent,
        lifetime: Duration,
    ) -> Result<(), CacheError> {
        let text = format!("{}{absent}", prefix(tier));
        let negative = match absent {
            Absent::Missing(_) => Negative::Missing(text),
            Absent::Malformed(_) => Negative::Malformed(text),
            // Neither says anything of the blob itself.
            Absent::TooLarge(_) | Absent::Failed(_) => return Ok(()),
        };
        self.put_negative(key, &negative, lifetime)
    }
}

/// What a remembered answer begins with.
fn prefix(tier: &impl Tier) -> String {
    format!("{}\n", tier.name())
}
