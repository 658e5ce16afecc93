//! Counters for Prometheus: what was named and from where, what was not and why, how long it took.
//!
//! Counted by `resolve/` and `serve/`, served on an address of its own by [`listen`]. Every label
//! has few values: no path, no build-id, no host name.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::few::Few;
use crate::profile::{Executable, ExecutableId, Named, Profile, Quality, Resolution};

/// Where the names of an executable are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    /// A table made before.
    Cache,
    /// The file that was mapped.
    Executable,
    /// A debug file of this host.
    DebugFile,
    /// A file the collector handed over.
    HandedOver,
    /// A file fetched from a server, now or before.
    Debuginfod,
    /// The kernel's own list.
    Kallsyms,
    /// A perf-map or jitdump.
    Jit,
    /// There are none.
    Nothing,
}

impl Rung {
    fn text(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Executable => "executable",
            Self::DebugFile => "debug_file",
            Self::HandedOver => "handed_over",
            Self::Debuginfod => "debuginfod",
            Self::Kallsyms => "kallsyms",
            Self::Jit => "jit",
            Self::Nothing => "none",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Source {
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByQuality {
    quality: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Fetch {
    kind: &'static str,
    outcome: &'static str,
}

/// The counters. Cheap to count with from any thread.
#[derive(Debug)]
pub struct Metrics {
    /// What `/readyz` says.
    pub readiness: Readiness,
    registry: Registry,
    /// Of `serve`.
    more: OnceLock<Registry>,
    executables: Family<Source, Counter>,
    named: Family<ByQuality, Counter>,
    missing: Family<Reason, Counter>,
    fetches: Family<Fetch, Histogram, fn() -> Histogram>,
    fetched: Counter,
    conversions: Histogram,
    samples: Counter,
    lost: Family<Reason, Counter>,
    stacks: Family<Reason, Counter>,
    unwind_tables: Family<Outcome, Counter>,
    unwind_compiling: Counter<f64, AtomicU64>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        // From a millisecond to half a minute, which is as long as servers are waited for.
        let seconds: fn() -> Histogram = || Histogram::new(exponential_buckets(0.001, 2.0, 16));
        let metrics = Self {
            readiness: Readiness::default(),
            more: OnceLock::new(),
            executables: Family::default(),
            named: Family::default(),
            missing: Family::default(),
            fetches: Family::new_with_constructor(seconds),
            fetched: Counter::default(),
            conversions: seconds(),
            samples: Counter::default(),
            lost: Family::default(),
            stacks: Family::default(),
            unwind_tables: Family::default(),
            unwind_compiling: Counter::default(),
            registry: Registry::default(),
        };
        registry.register(
            "executables",
            "Executables looked up, by where their names are from",
            metrics.executables.clone(),
        );
        registry.register(
            "locations_named",
            "Places in code that have a name, by its quality",
            metrics.named.clone(),
        );
        registry.register(
            "locations_missing",
            "Places in code without a name, by reason",
            metrics.missing.clone(),
        );
        registry.register_with_unit(
            "fetch",
            "Time files took to come from servers",
            Unit::Seconds,
            metrics.fetches.clone(),
        );
        registry.register_with_unit(
            "fetched",
            "What came from servers",
            Unit::Bytes,
            metrics.fetched.clone(),
        );
        registry.register_with_unit(
            "conversion",
            "Time debug information took to become a table",
            Unit::Seconds,
            metrics.conversions.clone(),
        );
        registry.register("samples", "Samples in profiles", metrics.samples.clone());
        registry.register("lost", "What captures say was lost, by reason", metrics.lost.clone());
        registry.register(
            "user_stacks",
            "User stacks of samples, by why they end: all but the first reason are not whole",
            metrics.stacks.clone(),
        );
        registry.register(
            "unwind_tables",
            "What became of the collector's unwind tables; those compiled are among those loaded",
            metrics.unwind_tables.clone(),
        );
        registry.register_with_unit(
            "unwind_compiling",
            "Time collectors spent on compiling unwind tables",
            Unit::Seconds,
            metrics.unwind_compiling.clone(),
        );
        Self { registry, ..metrics }
    }
}

/// Whether a process can do what it is there for.
#[derive(Debug, Default)]
pub struct Readiness(Mutex<Option<String>>);

impl Readiness {
    /// It can, or why not.
    pub fn set(&self, why_not: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = why_not;
    }

    fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What the counters of a server are called, too.
pub const PREFIX: &str = "stackwire";

impl Metrics {
    /// Adds those of a server, once.
    pub fn add(&self, more: Registry) {
        // A second server of a process is not counted.
        let _ = self.more.set(more);
    }

    /// A fetch is over. `outcome`: "ok" with its bytes, "missing", "malformed", "failed".
    pub fn fetched(&self, kind: &'static str, outcome: &'static str, took: Duration, bytes: u64) {
        self.fetches.get_or_create(&Fetch { kind, outcome }).observe(took.as_secs_f64());
        self.fetched.inc_by(bytes);
    }

    /// Debug information was made into a table.
    pub fn converted(&self, took: Duration) {
        self.conversions.observe(took.as_secs_f64());
    }

    /// Names of an executable were looked for.
    pub fn looked_up(&self, rung: Rung) {
        self.executables.get_or_create(&Source { source: rung.text() }).inc();
    }

    /// A profile was resolved.
    pub fn resolved(&self, profile: Named<'_>) {
        self.samples.inc_by(profile.sample_count());
        for (reason, (count, _)) in &profile.lost {
            self.lost.get_or_create(&Reason { reason: reason.text() }).inc_by(*count);
        }
        self.unwound(&profile);
        // Of files the ladder has told already.
        let mut others: BTreeMap<ExecutableId, Rung> = BTreeMap::new();
        for (location, resolution) in profile.locations.iter().zip(&profile.names.resolutions) {
            let id = location.executable;
            let rung = match resolution {
                Resolution::Found { quality, .. } => {
                    self.named.get_or_create(&ByQuality { quality: quality.text() }).inc();
                    match quality {
                        Quality::PerfMap | Quality::Jitdump => Some(Rung::Jit),
                        Quality::Kallsyms => Some(Rung::Kallsyms),
                        _ => None,
                    }
                }
                Resolution::Missing(_) => {
                    let reason = reason(profile, id.index());
                    self.missing.get_or_create(&Reason { reason }).inc();
                    None
                }
            };
            match rung {
                Some(rung) => _ = others.insert(id, rung),
                None if profile.executables[id.index()] == Executable::Anonymous => {
                    others.entry(id).or_insert(Rung::Nothing);
                }
                None => {}
            }
        }
        others.into_values().for_each(|rung| self.looked_up(rung));
    }

    fn unwound(&self, profile: &Profile) {
        for sample in &profile.samples {
            if let Some(stack) = sample.key.user {
                let reason = profile.stacks[stack.index()].end.text();
                self.stacks.get_or_create(&Reason { reason }).inc_by(sample.count);
            }
        }
        let tables = profile.unwind_tables;
        for (outcome, count) in [
            ("loaded", tables.loaded),
            ("compiled", tables.compiled),
            ("failed", tables.failed),
            ("evicted", tables.evicted),
        ] {
            self.unwind_tables.get_or_create(&Outcome { outcome }).inc_by(count);
        }
        self.unwind_compiling.inc_by(tables.compile_ns as f64 / 1e9);
    }

    /// All of them as OpenMetrics.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for registry in std::iter::once(&self.registry).chain(self.more.get()) {
            // A String takes everything.
            let _ = encode_registry(&mut text, registry);
        }
        let _ = encode_eof(&mut text);
        text
    }

    /// All of them in Prometheus's text format 0.0.4, for who does not ask for OpenMetrics. There a
    /// counter is called as its samples are, and units are part of names alone.
    #[must_use]
    pub fn text_0_0_4(&self) -> String {
        let mut text = String::new();
        let openmetrics = self.text();
        let is_said = |line: &&str| !line.starts_with("# UNIT") && *line != "# EOF";
        let lines: Vec<&str> = openmetrics.lines().filter(is_said).collect();
        for (index, line) in lines.iter().enumerate() {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            // HELP comes before TYPE, each with the name of the family.
            let kind = [index, index + 1].into_iter().find_map(|at| {
                let of_family = lines.get(at)?.strip_prefix("# TYPE ")?;
                let (name, kind) = of_family.split_once(' ')?;
                (words.get(2) == Some(&name)).then_some(kind)
            });
            match words.as_slice() {
                ["#", what, name, rest] if kind == Some("counter") => {
                    text.push_str(&format!("# {what} {name}_total {rest}\n"));
                }
                _ => text.push_str(&format!("{line}\n")),
            }
        }
        text
    }
}

/// Why a place has no name, in one of few words; the report has the sentence.
fn reason(profile: Named<'_>, executable: usize) -> &'static str {
    let source = profile.names.sources.get(executable);
    match &profile.executables[executable] {
        Executable::Unmapped => "no mapping",
        Executable::Anonymous => "no JIT map",
        Executable::Code(_) => "code not taken",
        Executable::Kernel { .. } => "not in kallsyms",
        _ if source.is_some_and(|source| source.fetch_failed) => "fetch failed",
        _ if source.is_none_or(|source| source.origin.is_empty()) => "no file",
        _ => "no symbol",
    }
}

/// Serves `/metrics`, `/healthz` and `/readyz` on `host:port` until the process ends; returns the
/// address that is listened on.
///
/// # Errors
/// When the address cannot be listened on, or no thread be started.
pub fn listen(address: &str, metrics: Arc<Metrics>) -> io::Result<String> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let bound = listener.local_addr()?.to_string();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("metrics".to_owned()).spawn(move || {
        runtime.block_on(async {
            let ready = Arc::clone(&metrics);
            let page = axum::routing::get(|headers: HeaderMap| async move {
                let accepts = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
                let (kind, text) = match accepts {
                    Some(accepts) if accepts.contains("application/openmetrics-text") => (
                        "application/openmetrics-text; version=1.0.0; charset=utf-8",
                        metrics.text(),
                    ),
                    _ => ("text/plain; version=0.0.4; charset=utf-8", metrics.text_0_0_4()),
                };
                ([(CONTENT_TYPE, kind)], text)
            });
            let readiness = axum::routing::get(|| async move {
                match ready.readiness.get() {
                    None => (StatusCode::OK, "ready\n".to_owned()),
                    Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
                }
            });
            let router = axum::Router::new()
                .route("/metrics", page)
                .route("/healthz", axum::routing::get(|| async { "ok\n" }))
                .route("/readyz", readiness);
            if let Ok(listener) = tokio::net::TcpListener::from_std(listener) {
                // Ends with the process.
                let _ = axum::serve(Few::of(listener), router).await;
            }
        });
    })?;
    Ok(bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_in_the_text() {
        let metrics = Metrics::default();
        metrics.fetched("debuginfo", "ok", Duration::from_millis(30), 1000);
        metrics.converted(Duration::from_millis(3));
        metrics.looked_up(Rung::Debuginfod);
        let text = metrics.text();
        for line in [
            "stackwire_executables_total{source=\"debuginfod\"} 1",
            "stackwire_fetch_seconds_count{kind=\"debuginfo\",outcome=\"ok\"} 1",
            "stackwire_fetched_bytes_total 1000",
            "stackwire_conversion_seconds_bucket{le=\"0.004\"} 1",
        ] {
            assert!(text.contains(line), "no {line} in {text}");
        }
        assert!(text.ends_with("# EOF\n"));
        let older = metrics.text_0_0_4();
        for line in [
            "# TYPE stackwire_executables_total counter",
            "# HELP stackwire_fetched_bytes_total What came from servers.",
            "# TYPE stackwire_conversion_seconds histogram",
            "stackwire_fetched_bytes_total 1000",
        ] {
            assert!(older.lines().any(|it| it == line), "no {line} in {older}");
        }
        assert!(!older.contains("# UNIT") && !older.contains("# EOF"));
    }
}
