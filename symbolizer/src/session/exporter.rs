//! Snapshots of how processes are scheduled, handed out while a session runs.

use std::fmt;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use stackwire_formats::pmu;
use stackwire_model::Profile;

/// Takes snapshots of how processes are scheduled: see [`Builder::export`](super::Builder::export).
pub trait MetricsExporter: Send {
    /// Takes one. `profile.sched` has sums since the session began, `profile.counters` names of the
    /// counters in them.
    ///
    /// # Errors
    /// Whatever keeps it from doing so: it is told as an event, and the session goes on.
    fn export(&mut self, profile: &Profile) -> io::Result<()>;
}

/// Writes each snapshot: text for a console, JSON, or what Prometheus reads.
#[derive(Debug)]
pub struct WriteExporter<W> {
    out: W,
    options: pmu::Options,
}

impl<W: Write + Send> WriteExporter<W> {
    /// One that writes to `out`, a snapshot behind the other.
    pub fn new(out: W, options: pmu::Options) -> Self {
        Self { out, options }
    }
}

impl<W: Write + Send> MetricsExporter for WriteExporter<W> {
    fn export(&mut self, profile: &Profile) -> io::Result<()> {
        pmu::write(profile, self.options, &mut self.out)?;
        self.out.flush()
    }
}

/// An exporter, and how often it is asked.
#[derive(Clone)]
pub(super) struct Exporting {
    exporter: Arc<Mutex<Box<dyn MetricsExporter>>>,
    interval: Duration,
    next: Instant,
}

impl fmt::Debug for Exporting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exporting").field("interval", &self.interval).finish_non_exhaustive()
    }
}

impl Exporting {
    pub(super) fn new(exporter: Box<dyn MetricsExporter>, interval: Duration) -> Self {
        let exporter = Arc::new(Mutex::new(exporter));
        Self { exporter, interval, next: Instant::now() + interval }
    }

    /// Hands out a snapshot if it is time, or the last.
    pub(super) fn look(&mut self, profile: &Profile, is_last: bool) {
        let now = Instant::now();
        if now < self.next && !is_last {
            return;
        }
        self.next = now + self.interval;
        let mut exporter = self.exporter.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = exporter.export(profile) {
            tracing::warn!("cannot export metrics: {error}");
        }
    }
}
