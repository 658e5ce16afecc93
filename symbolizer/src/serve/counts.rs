//! What a server counts, for Prometheus. No client has a label of its own: there may be thousands.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::metrics::PREFIX;

/// What becomes of windows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Outcome {
    /// It has its profile.
    Written,
    /// It is tried again.
    Failed,
    /// It will have none.
    GivenUp,
}

/// Why something is refused.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refused {
    /// Its connection is none that is taken here: the certificate is bad, or nothing came in time.
    Handshake,
    /// Nobody knows who it is.
    Unknown,
    /// The capture is another's.
    NotTheirs,
    /// It does not hold together.
    Malformed,
    /// It is more than is allowed.
    Limit,
}

/// What becomes of pieces of profiles that are pushed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pushed {
    /// It is there.
    Taken,
    /// The receiver will not take it.
    Refused,
    /// It is too old, or was removed before it was pushed: all of a profile.
    Gone,
    /// It is tried again.
    Later,
}

/// The numbers of this moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Now {
    pub clients: usize,
    pub streams: usize,
    pub open: u64,
    pub waiting: u64,
    pub log_bytes: u64,
    pub waiting_bytes: u64,
    pub profile_bytes: u64,
    pub pushes: u64,
    pub is_ready: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labelled {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InState {
    state: &'static str,
}

/// See the top of this file. Cheap to count with from any thread.
#[derive(Clone, Debug)]
pub(super) struct Counts {
    windows: Family<Labelled, Counter>,
    refused: Family<Reason, Counter>,
    pushed: Family<Labelled, Counter>,
    epochs: Counter,
    samples: Counter,
    lost: Counter,
    acknowledged: Histogram,
    resolved: Histogram,
    clients: Gauge,
    streams: Gauge,
    windows_now: Family<InState, Gauge>,
    bytes_now: Family<InState, Gauge>,
    pushes: Gauge,
    ready: Gauge,
}

impl Counts {
    /// New ones, with the registry that they are in.
    pub(super) fn new() -> (Self, Registry) {
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 16));
        let counts = Self {
            windows: Family::default(),
            refused: Family::default(),
            pushed: Family::default(),
            epochs: Counter::default(),
            samples: Counter::default(),
            lost: Counter::default(),
            acknowledged: seconds(),
            resolved: seconds(),
            clients: Gauge::default(),
            streams: Gauge::default(),
            windows_now: Family::default(),
            bytes_now: Family::default(),
            pushes: Gauge::default(),
            ready: Gauge::default(),
        };
        // What never happened is 0, and not missing: rates are of something.
        for outcome in ["written", "failed", "given_up"] {
            drop(counts.windows.get_or_create(&Labelled { outcome }));
        }
        for outcome in ["taken", "refused", "gone", "later"] {
            drop(counts.pushed.get_or_create(&Labelled { outcome }));
        }
        for reason in ["handshake", "unauthenticated", "not_theirs", "malformed", "limit"] {
            drop(counts.refused.get_or_create(&Reason { reason }));
        }
        let mut all = Registry::with_prefix(PREFIX);
        let serve = all.sub_registry_with_prefix("serve");
        serve.register(
            "windows_ended",
            "Windows whose profile was to be written, by what became of it",
            counts.windows.clone(),
        );
        serve.register(
            "refused",
            "Connections, streams and messages that were refused, by reason",
            counts.refused.clone(),
        );
        serve.register(
            "pushed_pieces",
            "Pieces of profiles that were pushed, and profiles that will not be, by what became of them",
            counts.pushed.clone(),
        );
        serve.register("pushes", "Profiles that are still to be pushed", counts.pushes.clone());
        serve.register("epochs", "Epochs acknowledged", counts.epochs.clone());
        serve.register("samples", "Samples acknowledged", counts.samples.clone());
        serve.register(
            "lost_samples",
            "Samples that collectors say were lost, in epochs acknowledged",
            counts.lost.clone(),
        );
        serve.register_with_unit(
            "acknowledged",
            "Time from when epochs came to their acknowledgement",
            Unit::Seconds,
            counts.acknowledged.clone(),
        );
        serve.register_with_unit(
            "resolved",
            "Time windows took to be resolved and written",
            Unit::Seconds,
            counts.resolved.clone(),
        );
        serve.register("clients", "Clients with streams", counts.clients.clone());
        serve.register("streams", "Streams", counts.streams.clone());
        serve.register(
            "windows",
            "Windows without a profile, by state",
            counts.windows_now.clone(),
        );
        serve.register_with_unit(
            "disk",
            "What is kept: captures that are done with, captures that wait, profiles",
            Unit::Bytes,
            counts.bytes_now.clone(),
        );
        serve.register("ready", "Whether collectors are served: 1, else 0", counts.ready.clone());
        (counts, all)
    }

    /// A window was dealt with.
    pub(super) fn window(&self, outcome: Outcome, took: Duration) {
        let outcome = match outcome {
            Outcome::Written => "written",
            Outcome::Failed => "failed",
            Outcome::GivenUp => "given_up",
        };
        self.windows.get_or_create(&Labelled { outcome }).inc();
        self.resolved.observe(took.as_secs_f64());
    }

    /// A piece of a profile was sent.
    pub(super) fn pushed(&self, pushed: Pushed) {
        let outcome = match pushed {
            Pushed::Taken => "taken",
            Pushed::Refused => "refused",
            Pushed::Gone => "gone",
            Pushed::Later => "later",
        };
        self.pushed.get_or_create(&Labelled { outcome }).inc();
    }

    /// Something was refused.
    pub(super) fn refuse(&self, refused: Refused) {
        let reason = match refused {
            Refused::Handshake => "handshake",
            Refused::Unknown => "unauthenticated",
            Refused::NotTheirs => "not_theirs",
            Refused::Malformed => "malformed",
            Refused::Limit => "limit",
        };
        self.refused.get_or_create(&Reason { reason }).inc();
    }

    /// Epochs are on disk.
    pub(super) fn taken(&self, epochs: u64, samples: u64, lost: u64) {
        self.epochs.inc_by(epochs);
        self.samples.inc_by(samples);
        self.lost.inc_by(lost);
    }

    /// They are acknowledged.
    pub(super) fn acknowledged(&self, after: Duration) {
        self.acknowledged.observe(after.as_secs_f64());
    }

    /// Sets the numbers of this moment.
    pub(super) fn now(&self, now: Now) {
        let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.clients.set(number(now.clients as u64));
        self.streams.set(number(now.streams as u64));
        for (state, count) in [("open", now.open), ("waiting", now.waiting)] {
            self.windows_now.get_or_create(&InState { state }).set(number(count));
        }
        for (state, bytes) in [
            ("captures", now.log_bytes),
            ("waiting", now.waiting_bytes),
            ("profiles", now.profile_bytes),
        ] {
            self.bytes_now.get_or_create(&InState { state }).set(number(bytes));
        }
        self.pushes.set(number(now.pushes));
        self.ready.set(i64::from(now.is_ready));
    }
}
