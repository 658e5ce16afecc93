//! What one client may take of a server, and what all of them may take together.
//!
//! Counts and decides; says no in words that name the option. Asked by `keeper.rs` for streams, and
//! by the gRPC service for what their messages hold.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stackwire_model::ExecutableKey;
use stackwire_proto::v1;
use tokio::sync::Semaphore;

use super::identity::Identity;
use crate::receive::allowance::Allowance;
use crate::receive::messages::{Shares, UNIT};

/// What is allowed. Everything but the memory is of one client.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Streams and requests at a time.
    pub streams: usize,
    /// Bytes a second, before compression. Who sends more has to wait.
    pub rate: u64,
    /// Bytes of memory that an epoch takes.
    pub epoch: u64,
    /// Bytes of artifacts and executables in an hour, before compression.
    pub artifacts: u64,
    /// Executables handed over in a day, each counted once.
    pub executables: usize,
    /// Bytes of a name: of a thread, a path, a cgroup, a service.
    pub label: usize,
    /// Bytes of memory, of all clients: for what comes in and for windows that are resolved.
    pub memory: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            streams: 1024,
            rate: 256 << 20,
            epoch: 128 << 20,
            artifacts: 16 << 30,
            executables: 16_384,
            label: 128 << 10,
            memory: 1 << 30,
        }
    }
}

impl Limits {
    /// Windows that are resolved at a time, in three eighths of the memory.
    pub(super) fn closings(&self) -> usize {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        usize::try_from(self.memory * 3 / 8 / CLOSING).unwrap_or(usize::MAX).clamp(1, cpus)
    }

    /// What the profile of a request may take.
    pub(super) fn request(&self) -> u64 {
        self.memory / 8
    }

    /// Largest message, compressed: what one client may have of the memory for those.
    pub(super) fn message(&self) -> u32 {
        u32::try_from(self.memory / 32).unwrap_or(u32::MAX).min(MESSAGE)
    }

    /// What the epochs of a window may take before it ends; the last may go beyond.
    pub(super) fn window(&self) -> u64 {
        self.memory / 8 / self.closings() as u64
    }
}

/// A window that is resolved takes as many times what its epochs do, where no two have anything in
/// common: places, frames and stacks are in tables by their content as well.
pub(super) const RESOLVED: u64 = 3;
/// No collector sends larger ones.
const MESSAGE: u32 = 32 << 20;
/// Memory of a window that is resolved.
const CLOSING: u64 = 192 << 20;
/// Threads that one client may keep busy at a time, of those that may block.
const TURNS: usize = 8;
/// Clients that are remembered while they have no stream.
const MAX_CLIENTS: usize = 16_384;
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Why something is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Exceeded {
    #[error("{who} has {limit} streams, and may have no more (--streams-max)")]
    Streams { who: Identity, limit: usize },
    #[error(
        "a {what} of {bytes} bytes, and one may have {limit} at most (--label-max): it begins with {begins:?}"
    )]
    Label { what: &'static str, bytes: usize, limit: usize, begins: String },
    #[error(
        "an epoch takes {} MiB of memory, and one may take {} MiB at most (--epoch-max)",
        memory.div_ceil(1 << 20), limit >> 20
    )]
    Epoch { memory: u64, limit: u64 },
    #[error(
        "its client has handed over {limit} executables today, and may no more (--executables-max)"
    )]
    Executables { limit: usize },
    #[error(
        "its client has sent {} MiB of artifacts and executables in an hour, and may no more (--artifacts-max)",
        limit >> 20
    )]
    Artifacts { limit: u64 },
}

/// Counts for all clients.
#[derive(Debug)]
pub(super) struct Ledger {
    pub limits: Limits,
    /// For epochs while they are compressed, decompressed, and decoded: one waits for the next, and
    /// no two wait for each other.
    messages: Arc<Semaphore>,
    pub unsealed: Budget,
    pub decoded: Budget,
    /// For windows that are resolved.
    pub resolving: Budget,
    clients: Mutex<Clients>,
}

type Clients = HashMap<Identity, Client>;

#[derive(Debug)]
struct Client {
    streams: usize,
    rate: Bucket,
    artifacts: Bucket,
    executables: HashSet<ExecutableKey>,
    since: Instant,
    turns: Arc<Semaphore>,
    asking: Arc<Semaphore>,
    messages: Arc<Semaphore>,
}

impl Ledger {
    pub(super) fn new(limits: Limits) -> Self {
        let share = limits.memory / 8;
        Self {
            limits,
            messages: Arc::new(Semaphore::new(units(share))),
            unsealed: Budget::new(share),
            decoded: Budget::new(2 * share),
            resolving: Budget::new(3 * share),
            clients: Mutex::default(),
        }
    }

    /// A stream begins.
    ///
    /// # Errors
    /// When the client has too many.
    pub(super) fn enter(self: &Arc<Self>, who: Identity) -> Result<Account, Exceeded> {
        let mut clients = self.lock();
        let client = self.client(&mut clients, &who);
        if client.streams >= self.limits.streams {
            return Err(Exceeded::Streams { who, limit: self.limits.streams });
        }
        client.streams += 1;
        let (turns, asking) = (Arc::clone(&client.turns), Arc::clone(&client.asking));
        Ok(Account { ledger: Arc::clone(self), who, turns, asking })
    }

    /// Memory for what a client is about to send.
    pub(super) fn shares(&self, who: &Identity) -> Shares {
        let own = Arc::clone(&self.client(&mut self.lock(), who).messages);
        Shares { own, all: Arc::clone(&self.messages) }
    }

    fn client<'c>(&self, clients: &'c mut Clients, who: &Identity) -> &'c mut Client {
        if clients.len() >= MAX_CLIENTS && !clients.contains_key(who) {
            clients.retain(|_, client| client.streams > 0);
        }
        clients.entry(who.clone()).or_insert_with(|| Client {
            streams: 0,
            rate: Bucket::full(),
            artifacts: Bucket::full(),
            executables: HashSet::new(),
            since: Instant::now(),
            turns: Arc::new(Semaphore::new(TURNS)),
            asking: Arc::new(Semaphore::new(1)),
            messages: Arc::new(Semaphore::new(units(self.limits.memory / 32))),
        })
    }

    /// Clients with streams, and their streams.
    pub(super) fn present(&self) -> (usize, usize) {
        let clients = self.lock();
        let streams = clients.values().map(|client| client.streams).filter(|count| *count > 0);
        streams.fold((0, 0), |(clients, all), count| (clients + 1, all + count))
    }

    fn lock(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One stream of a client.
#[derive(Debug)]
pub(super) struct Account {
    pub ledger: Arc<Ledger>,
    pub who: Identity,
    /// To keep a thread busy.
    pub turns: Arc<Semaphore>,
    /// To have a profile made.
    pub asking: Arc<Semaphore>,
}

impl Account {
    /// How long to wait before more is read, once messages have come.
    pub(super) fn pace(&self, messages: &[v1::CollectorMessage]) -> Duration {
        let bytes = messages.iter().map(weight).sum();
        let rate = self.ledger.limits.rate;
        self.with(|client| client.rate.take(bytes, rate, Duration::from_secs(1)))
            .unwrap_or_default()
    }

    /// Looks at what an epoch calls things.
    ///
    /// # Errors
    /// When a name is too long.
    pub(super) fn check_labels(&self, epoch: &v1::Epoch) -> Result<(), Exceeded> {
        let limit = self.ledger.limits.label;
        let check = |what, bytes: &[u8]| {
            if bytes.len() <= limit {
                return Ok(());
            }
            let begins = String::from_utf8_lossy(&bytes[..limit.min(40)]).into_owned();
            Err(Exceeded::Label { what, bytes: bytes.len(), limit, begins })
        };
        epoch.strings.iter().try_for_each(|name| check("name", name.as_bytes()))?;
        epoch.processes.iter().try_for_each(|process| {
            check("process context", &process.process_context)?;
            check("name of a service", &process.otel_service_name)?;
            check("list of attributes", &process.otel_resource_attributes)
        })
    }

    fn with<T>(&self, count: impl FnOnce(&mut Client) -> T) -> Option<T> {
        self.ledger.lock().get_mut(&self.who).map(count)
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.with(|client| client.streams -= 1);
    }
}

impl Allowance for Account {
    fn executable(&self, key: ExecutableKey) -> Result<(), String> {
        let limit = self.ledger.limits.executables;
        let is_allowed = self.with(|client| {
            if client.since.elapsed() > DAY {
                client.since = Instant::now();
                client.executables.clear();
            }
            client.executables.contains(&key)
                || client.executables.len() < limit && client.executables.insert(key)
        });
        if is_allowed == Some(false) {
            return Err(Exceeded::Executables { limit }.to_string());
        }
        Ok(())
    }

    fn artifact(&self, bytes: u64) -> Result<(), String> {
        let limit = self.ledger.limits.artifacts;
        let rate = limit / HOUR.as_secs();
        let taken = self.with(|client| client.artifacts.take_if_there(bytes, rate, HOUR));
        if taken == Some(false) {
            return Err(Exceeded::Artifacts { limit }.to_string());
        }
        Ok(())
    }
}

/// Bytes of a message before compression, as it says.
fn weight(message: &v1::CollectorMessage) -> u64 {
    use v1::collector_message::Body;
    let (said, sent) = match &message.body {
        Some(Body::Epoch(epoch)) => (epoch.length, epoch.zstd.len()),
        Some(Body::Artifact(chunk)) => (chunk.piece_length, chunk.zstd.len()),
        _ => (0, prost::Message::encoded_len(message)),
    };
    u64::from(said).max(sent as u64)
}

fn units(bytes: u64) -> usize {
    usize::try_from(bytes / UNIT).unwrap_or(usize::MAX).clamp(1, Semaphore::MAX_PERMITS)
}

/// Fills at a rate, up to what comes in some time.
#[derive(Debug)]
struct Bucket {
    /// What was taken and has not come back.
    taken: f64,
    at: Instant,
}

impl Bucket {
    fn full() -> Self {
        Self { taken: 0.0, at: Instant::now() }
    }

    /// Takes, and says how long to wait until that much has come.
    fn take(&mut self, bytes: u64, rate: u64, within: Duration) -> Duration {
        let lacking = self.lacking(bytes, rate, within);
        self.taken += bytes as f64;
        Duration::from_secs_f64((lacking / (rate as f64).max(1.0)).min(HOUR.as_secs_f64()))
    }

    /// Takes all or nothing; whether it did.
    fn take_if_there(&mut self, bytes: u64, rate: u64, within: Duration) -> bool {
        let is_there = self.lacking(bytes, rate, within) <= 0.0;
        if is_there {
            self.taken += bytes as f64;
        }
        is_there
    }

    /// How many of these bytes are not there now.
    fn lacking(&mut self, bytes: u64, rate: u64, within: Duration) -> f64 {
        let rate = (rate as f64).max(1.0);
        let back = self.at.elapsed().as_secs_f64() * rate;
        self.at = Instant::now();
        self.taken = (self.taken - back).max(0.0);
        (self.taken + bytes as f64 - rate * within.as_secs_f64()).max(0.0)
    }
}

/// Bytes of memory that threads share, in the order in which they ask.
#[derive(Debug)]
pub(super) struct Budget {
    total: u64,
    state: Mutex<Given>,
    changed: Condvar,
}

#[derive(Debug)]
struct Given {
    free: u64,
    /// Of those who asked: how many there were, and whose turn it is.
    asked: u64,
    turn: u64,
}

/// A part of it, until it is dropped.
#[derive(Debug)]
pub(super) struct Part<'b> {
    budget: &'b Budget,
    bytes: u64,
}

impl Budget {
    fn new(total: u64) -> Self {
        let state = Mutex::new(Given { free: total, asked: 0, turn: 0 });
        Self { total, state, changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Given> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is as much; what is larger than the whole has it alone.
    pub(super) fn take(&self, bytes: u64) -> Part<'_> {
        let bytes = bytes.min(self.total);
        let mut given = self.lock();
        let ticket = given.asked;
        given.asked += 1;
        while given.turn != ticket || given.free < bytes {
            given = self.changed.wait(given).unwrap_or_else(PoisonError::into_inner);
        }
        given.turn += 1;
        given.free -= bytes;
        drop(given);
        self.changed.notify_all();
        Part { budget: self, bytes }
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        self.budget.lock().free += self.bytes;
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(limits: Limits) -> Arc<Ledger> {
        Arc::new(Ledger::new(limits))
    }

    #[test]
    fn a_client_that_has_too_much_is_refused_and_no_other() {
        let ledger =
            ledger(Limits { streams: 2, executables: 1, artifacts: 7200, ..<_>::default() });
        let first = ledger.enter(Identity::Loopback).unwrap();
        let second = ledger.enter(Identity::Loopback).unwrap();
        let refused = ledger.enter(Identity::Loopback).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "loopback has 2 streams, and may have no more (--streams-max)"
        );
        let other = ledger.enter(Identity::User(7)).unwrap();
        assert_eq!(ledger.present(), (2, 3));
        drop(second);
        let second = ledger.enter(Identity::Loopback).unwrap();

        let key = |byte| stackwire_model::BuildId::new(&[byte; 20]).unwrap().into();
        assert!(first.executable(key(1)).is_ok() && second.executable(key(1)).is_ok());
        assert!(second.executable(key(2)).unwrap_err().contains("--executables-max"));
        assert!(other.executable(key(2)).is_ok());
        assert!(first.artifact(7000).is_ok());
        assert!(second.artifact(7000).unwrap_err().contains("--artifacts-max"));
        assert!(second.artifact(100).is_ok(), "what is refused counts for nothing");
        assert!(other.artifact(7000).is_ok());
    }

    #[test]
    fn who_sends_too_much_waits_as_long_as_it_should_have_taken() {
        let account = ledger(Limits { rate: 1000, ..<_>::default() }).enter(Identity::Loopback);
        let account = account.unwrap();
        let sealed = v1::SealedEpoch { length: 3000, ..<_>::default() };
        let body = Some(v1::collector_message::Body::Epoch(sealed));
        let wait = account.pace(&[v1::CollectorMessage { body }]);
        // What comes in a second was there.
        assert!((Duration::from_millis(1900)..=Duration::from_secs(2)).contains(&wait), "{wait:?}");
        assert!(account.pace(&[]) <= wait);
    }

    #[test]
    fn long_names_are_refused_with_how_they_begin() {
        let account = ledger(Limits { label: 100, ..<_>::default() }).enter(Identity::Loopback);
        let account = account.unwrap();
        let strings = vec!["ok".to_owned(), "x\n".repeat(100)];
        let said = account.check_labels(&v1::Epoch { strings, ..<_>::default() }).unwrap_err();
        assert!(said.to_string().contains("--label-max"), "{said}");
        assert!(!said.to_string().contains('\n'));
        let process = v1::Process { otel_service_name: vec![b'x'; 101], ..<_>::default() };
        let epoch = v1::Epoch { processes: vec![process], ..<_>::default() };
        assert!(account.check_labels(&epoch).is_err());
    }

    #[test]
    fn memory_is_given_out_up_to_the_whole() {
        let budget = Arc::new(Budget::new(100));
        let most = budget.take(1000);
        let waiting = Arc::clone(&budget);
        let thread = std::thread::spawn(move || drop(waiting.take(1)));
        std::thread::sleep(Duration::from_millis(30));
        assert!(!thread.is_finished());
        drop(most);
        thread.join().unwrap();
        assert_eq!(budget.lock().free, 100);
    }

    #[test]
    fn memory_of_windows_is_within_the_whole() {
        for memory in [64 << 20, 1 << 30, 64 << 30] {
            let limits = Limits { memory, ..<_>::default() };
            let closings = limits.closings() as u64 * limits.window() * RESOLVED;
            assert!(closings + limits.request() <= memory / 2);
        }
    }
}
