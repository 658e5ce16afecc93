//! Pushes written profiles to a receiver, the oldest first, each piece until it is taken or
//! refused.
//!
//! The index knows how much of a profile was taken. A server that is killed sends one piece again
//! at most, under the same name.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use sha2::{Digest, Sha256};
use stackwire_formats::pprof::{self, Largest};
use tokio::runtime::Runtime;

use super::Config;
use super::counts::{Counts, Pushed};
use super::index::now_ms;
use super::limits::Ledger;
use super::pushed::ToPush;
use super::pyroscope::{Answer, Receiver, Sent};
use super::queue::wait_after;
use super::store::Store;

/// What the thread needs.
#[derive(Debug)]
pub(super) struct Pushing {
    pub config: Arc<Config>,
    pub store: Arc<Store>,
    pub counts: Counts,
    pub ledger: Arc<Ledger>,
    pub receiver: Receiver,
}

/// A receiver takes 2 MB at once, and 16,000 samples, unless it is told otherwise:
/// `ingestion_burst_size_mb`, `max_profile_stacktrace_samples` of Pyroscope.
const LARGEST: Largest = Largest { bytes: 1 << 20, samples: 10_000 };
/// Memory a profile takes while it is in pieces, by the bytes of its file.
const OPENED: u64 = 32;
/// How long a profile is tried. Pyroscope refuses what is older than an hour.
const TRIED: Duration = Duration::from_secs(24 * 3600);
/// How long all wait after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Longest value of a label, in bytes; Pyroscope takes 2,048.
const LONGEST_VALUE: usize = 1024;

/// What becomes of a profile now.
enum Outcome {
    /// All of it is taken or refused.
    Over,
    /// The rest is to be sent later.
    Later(String, Option<Duration>),
}

impl Pushing {
    /// Starts a thread that ends when the server stops and nothing is due.
    ///
    /// # Errors
    /// When there can be none.
    pub(super) fn start(self) -> io::Result<JoinHandle<()>> {
        // Of its own: the server's may be gone before the thread is.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("push".to_owned()).spawn(move || self.run(&runtime))
    }

    fn run(&self, runtime: &Runtime) {
        let mut in_a_row = 0;
        while let Some(due) = self.store.next_push() {
            match self.push(&due, runtime) {
                Outcome::Over => {
                    self.store.push_is_over(&due);
                    in_a_row = 0;
                }
                Outcome::Later(why, pause) => {
                    self.counts.pushed(Pushed::Later);
                    let wait = self.store.push_later(&due, pause);
                    let (profile, wait) = (&due.name, wait.as_secs());
                    tracing::warn!(
                        profile,
                        wait,
                        "cannot push {profile}: {why}; the next attempt is in {wait} s"
                    );
                    in_a_row += 1;
                    // The others wait as well, but not for one that no receiver can deal with.
                    self.store
                        .pause_pushes(pause.unwrap_or(LONGEST_PAUSE.min(wait_after(in_a_row))));
                }
            }
        }
    }

    fn push(&self, due: &ToPush, runtime: &Runtime) -> Outcome {
        let drop_all = |why: String| {
            let profile = &due.name;
            tracing::warn!(profile, "{profile} is not pushed: {why}");
            self.counts.pushed(Pushed::Dropped);
            self.store.push_is_refused(due);
            Outcome::Over
        };
        let age = now_ms().saturating_sub(due.since_ms);
        if u128::try_from(age).is_ok_and(|age| age > TRIED.as_millis()) {
            return drop_all("it was tried for a day".to_owned());
        }
        let path = self.config.output_dir.join(&due.name);
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (bytes, file) = match opened {
            Ok(opened) => opened,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return drop_all("it was removed before it was pushed".to_owned());
            }
            Err(error) => return Outcome::Later(format!("{}: {error}", path.display()), None),
        };
        let _memory = self.ledger.resolving.take(bytes.saturating_mul(OPENED));
        let pieces = match pprof::split(io::BufReader::new(file), LARGEST) {
            Ok(pieces) => pieces,
            Err(error) => return drop_all(error.to_string()),
        };
        let sent = usize::try_from(due.sent).unwrap_or(usize::MAX);
        for (number, piece) in pieces.into_iter().enumerate().skip(sent) {
            let labels = self.labels(due, piece.labels);
            let id = id(due, number);
            let sent = Sent { labels: &labels, pprof: piece.pprof, id };
            match runtime.block_on(self.receiver.send(sent)) {
                Answer::Taken => self.counts.pushed(Pushed::Taken),
                Answer::Refused(why) => {
                    let profile = &due.name;
                    tracing::warn!(profile, "a piece of {profile} is refused: {why}");
                    self.counts.pushed(Pushed::Dropped);
                    self.store.push_is_refused(due);
                }
                Answer::Later(why, pause) => return Outcome::Later(why, pause),
            }
            if let Err(error) = self.store.piece_is_sent(due, number as u64 + 1) {
                return Outcome::Later(format!("cannot use the index of windows: {error}"), None);
            }
        }
        Outcome::Over
    }

    /// Those of the piece, of its host, and of all that this server writes.
    fn labels(&self, due: &ToPush, of_piece: Vec<(String, String)>) -> Vec<(String, String)> {
        let name = if due.name.ends_with("-off-cpu.pb.gz") { "off_cpu" } else { "process_cpu" };
        let mut labels = vec![("__name__".to_owned(), name.to_owned())];
        labels.extend(of_piece);
        if !due.hostname.is_empty() {
            labels.push(("hostname".to_owned(), due.hostname.clone()));
        }
        let tags = self.config.tags.iter().filter_map(|tag| tag.split_once('='));
        for (key, value) in tags {
            let key = label_name(key);
            // A label that is there twice is refused.
            if labels.iter().all(|(known, _)| *known != key) {
                labels.push((key, value.to_owned()));
            }
        }
        for (_, value) in &mut labels {
            value.truncate(value.floor_char_boundary(LONGEST_VALUE));
        }
        labels.retain(|(_, value)| !value.is_empty());
        labels.sort();
        labels
    }
}

/// As Prometheus allows it: letters, digits and `_`, no digit first.
fn label_name(key: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let name: String = key.chars().map(safe).collect();
    if name.starts_with(|c: char| c.is_ascii_digit()) { format!("_{name}") } else { name }
}

/// A UUID (RFC 9562, version 8) that is the same each time.
fn id(due: &ToPush, piece: usize) -> String {
    let hash = Sha256::new().chain_update(&due.name).chain_update(piece.to_be_bytes()).finalize();
    let mut id = [0; 16];
    id.copy_from_slice(&hash[..16]);
    id[6] = id[6] & 0x0f | 0x80;
    id[8] = id[8] & 0x3f | 0x80;
    let hex = crate::profile::hex(&id);
    let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    format!("{a}-{b}-{c}-{d}-{e}")
}
