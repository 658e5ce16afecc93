//! Pushes written profiles to a receiver, the oldest first, each piece until it is taken or
//! refused.
//!
//! The index knows how much of a profile was taken. A piece whose answer is lost, because the
//! server is killed or the connection breaks, is sent again: the same bytes under the same id.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use sha2::{Digest, Sha256};
use stackwire_formats::pprof::{self, Largest, SPLIT};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::Config;
use super::counts::{Counts, Pushed};
use super::index::now_ms;
use super::limits::Ledger;
use super::pushed::ToPush;
use super::pyroscope::{Answer, Receiver, Sent};
use super::queue::{MAX_INTERRUPTED, wait_after};
use super::store::Store;

/// What the thread needs.
#[derive(Debug)]
pub(super) struct Pushing {
    pub config: Arc<Config>,
    pub store: Arc<Store>,
    pub counts: Counts,
    pub ledger: Arc<Ledger>,
    pub receiver: Receiver,
    /// Turns true when the server stops.
    pub closing: watch::Receiver<bool>,
}

/// A receiver takes 2 MB at once, and 16,000 samples, unless it is told otherwise:
/// `ingestion_burst_size_mb`, `max_profile_stacktrace_samples` of Pyroscope.
const LARGEST: Largest = Largest { bytes: 1 << 20, samples: 10_000 };
/// Memory a profile takes while it is split, by the bytes it has when it is unpacked.
const OPENED: u64 = 8;
/// How long an answer may take when the server stops.
const PATIENCE: Duration = Duration::from_secs(3);
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
    /// What is left of it will not be sent.
    Never(Pushed, String),
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
        while let Some(mut due) = self.store.next_push() {
            match self.push(&mut due, runtime) {
                Outcome::Over => {
                    self.store.push_is_over(&due);
                    in_a_row = 0;
                }
                Outcome::Never(outcome, why) => {
                    let profile = &due.name;
                    tracing::warn!(profile, "{profile} is not pushed: {why}");
                    self.counts.pushed(outcome);
                    self.store.push_is_refused(&due);
                    self.store.push_is_over(&due);
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
                    let others = LONGEST_PAUSE.min(wait_after(in_a_row));
                    self.store.pause_pushes(pause.unwrap_or(others));
                }
            }
        }
    }

    fn push(&self, due: &mut ToPush, runtime: &Runtime) -> Outcome {
        let age = now_ms().saturating_sub(due.since_ms);
        if u128::try_from(age).is_ok_and(|age| age > TRIED.as_millis()) {
            return Outcome::Never(Pushed::Gone, "it is more than a day old".to_owned());
        }
        if due.interrupted >= MAX_INTERRUPTED {
            let why = format!("the server ended {MAX_INTERRUPTED} times while it was pushed");
            return Outcome::Never(Pushed::Gone, why);
        }
        let path = self.config.output_dir.join(&due.name);
        let file = match File::open(&path).and_then(|file| Ok((unpacked(&file)?, file))) {
            Ok((bytes, file)) => {
                let _memory = self.ledger.resolving.take(bytes.saturating_mul(OPENED));
                pprof::split(io::BufReader::new(file), LARGEST)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let why = "it was removed before it was pushed".to_owned();
                return Outcome::Never(Pushed::Gone, why);
            }
            Err(error) => return Outcome::Later(format!("{}: {error}", path.display()), None),
        };
        let pieces = match file {
            Ok(pieces) => pieces,
            Err(error) => return Outcome::Never(Pushed::Gone, error.to_string()),
        };
        // A receiver that is slow must not keep windows from being resolved.
        let bytes = pieces.iter().map(|piece| piece.pprof.len() as u64).sum();
        let _memory = self.ledger.resolving.take(bytes);
        let sent = usize::try_from(due.sent).unwrap_or(usize::MAX);
        for (number, piece) in pieces.into_iter().enumerate().skip(sent) {
            let labels = self.labels(due, piece.labels);
            let sent = Sent { labels: &labels, pprof: piece.pprof, id: id(due, number) };
            match runtime.block_on(self.send(sent)) {
                Answer::Taken => self.counts.pushed(Pushed::Taken),
                Answer::Refused(why) => {
                    let profile = &due.name;
                    tracing::warn!(profile, "a piece of {profile} is refused: {why}");
                    self.counts.pushed(Pushed::Refused);
                    self.store.push_is_refused(due);
                }
                Answer::Later(why, pause) => return Outcome::Later(why, pause),
            }
            (due.sent, due.failures) = (number as u64 + 1, 0);
            if let Err(error) = self.store.piece_is_sent(due) {
                return Outcome::Later(format!("cannot use the index of windows: {error}"), None);
            }
        }
        Outcome::Over
    }

    /// Sends a piece. When the server stops, its answer is not waited for as long as usual.
    async fn send(&self, sent: Sent<'_>) -> Answer {
        let mut closing = self.closing.clone();
        let stopped = async {
            let _ = closing.wait_for(|closing| *closing).await;
            tokio::time::sleep(PATIENCE).await;
        };
        tokio::select! {
            answer = self.receiver.send(sent) => answer,
            () = stopped => Answer::Later("the server stops".to_owned(), None),
        }
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

/// Bytes of a gzip file when it is unpacked, by its last four (RFC 1952). It is one of ours.
fn unpacked(file: &File) -> io::Result<u64> {
    let mut bytes = [0; 4];
    let at = file.metadata()?.len().saturating_sub(4);
    file.read_exact_at(&mut bytes, at)?;
    Ok(u32::from_le_bytes(bytes).into())
}

/// As Prometheus allows it: letters, digits and `_`, no digit first.
fn label_name(key: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let name: String = key.chars().map(safe).collect();
    if name.starts_with(|c: char| c.is_ascii_digit()) { format!("_{name}") } else { name }
}

/// A UUID (RFC 9562, version 8) that is the same each time.
fn id(due: &ToPush, piece: usize) -> String {
    let piece = (piece as u64).to_be_bytes();
    let of = Sha256::new().chain_update(&due.name).chain_update(SPLIT.to_be_bytes());
    let hash = of.chain_update(piece).finalize();
    let mut id = [0; 16];
    id.copy_from_slice(&hash[..16]);
    id[6] = id[6] & 0x0f | 0x80;
    id[8] = id[8] & 0x3f | 0x80;
    let hex = crate::profile::hex(&id);
    let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    format!("{a}-{b}-{c}-{d}-{e}")
}
