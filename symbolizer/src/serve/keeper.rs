//! What a server keeps of each stream: a log for each window.
//!
//! A window is closed when the artifacts asked for with it have come. By then the next window has
//! begun. Called by `receive/grpc.rs`, on threads that may block. Profiles are written elsewhere
//! (`closing.rs`), from the logs.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{SealError, Unsealed, v1};
use tokio::sync::watch;

use super::Config;
use super::counted::Counted;
use super::counts::{Counts, Refused};
use super::id::{CaptureId, WindowId};
use super::identity::{Door, Identity};
use super::index::Before;
use super::limits::{Account, Exceeded, Ledger};
use super::live::{Live, OnAir};
use super::store::{Store, StoreError};
use super::turns::{Turn, Turns};
use crate::capture::Assembler;
use crate::receive::grpc::{Accept, Accepted, Cut, Keep, NotAdmitted, NotKept, Stopped, Taken};
use crate::receive::handed::Handed;
use crate::receive::log::{Batch, Log, LogError, Tally, beyond, lose};
use crate::receive::messages::Shares;
use crate::receive::peer::Caller;
use crate::receive::tenant::Tenant;
use crate::receive::wants::{Place, Wants};
use crate::resolve::Pins;

/// A window ends early when its log has this many bytes.
const MAX_WINDOW_BYTES: u64 = 128 << 20;

/// Makes a keeper for each stream.
#[derive(Debug)]
pub(super) struct Keepers {
    pub config: Arc<Config>,
    pub shared: Arc<Shared>,
    pub door: Door,
    pub ledger: Arc<Ledger>,
    /// How many keepers there are, so that the server can wait for the last.
    pub alive: watch::Sender<usize>,
}

/// What the keepers share.
#[derive(Debug)]
pub(super) struct Shared {
    pub store: Arc<Store>,
    pub counts: Counts,
    pub pins: Arc<Pins>,
    pub handed: AllHanded,
    pub turns: Arc<Turns>,
    pub live: Arc<Live>,
}

/// Files that collectors hand over, by capture: a transfer that broke off goes on in the next
/// stream.
#[derive(Debug, Default)]
pub(super) struct AllHanded(Mutex<HashMap<Whose, Arc<Handed>>>);

type Whose = (Identity, CaptureId);

/// Most captures whose files are remembered between streams. Beyond that, captures without a stream
/// lose what has come of theirs: they may never come back.
const MAX_REMEMBERED: usize = 256;

impl AllHanded {
    /// Those of a capture, made if there are none.
    fn of(&self, capture: Whose, make: impl FnOnce() -> Handed) -> Arc<Handed> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_REMEMBERED && !all.contains_key(&capture) {
            // Held by no stream.
            all.retain(|_, handed| Arc::strong_count(handed) > 1);
        }
        Arc::clone(all.entry(capture).or_insert_with(|| Arc::new(make())))
    }

    /// A capture has ended.
    fn forget(&self, capture: &Whose) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(capture);
    }
}

impl Accept for Keepers {
    type Name = Account;

    fn admit(&self, caller: Option<&Caller>) -> Result<Account, NotAdmitted> {
        let name = match caller.map(|caller| self.door.name(caller)) {
            Some(Ok(name)) => Ok(name),
            Some(Err(denied)) => Err(denied.to_string()),
            None => Err("nobody knows where it is from".to_owned()),
        };
        let counts = &self.shared.counts;
        if caller.is_some_and(|caller| caller.is_page) {
            counts.refuse(Refused::Unknown);
            return Err(NotAdmitted::Page);
        }
        let name = name.map_err(|why| {
            counts.refuse(Refused::Unknown);
            NotAdmitted::Unknown(why)
        })?;
        self.ledger.enter(name).map_err(|exceeded| {
            counts.refuse(Refused::Limit);
            NotAdmitted::TooMuch(exceeded.to_string())
        })
    }

    fn memory(&self, account: &Account) -> (Option<Shares>, u32) {
        (Some(self.ledger.shares(&account.who)), self.ledger.limits.message())
    }

    fn cut(&self, account: &Account, why: &Cut<'_>) {
        let client = &account.who;
        tracing::warn!(%client, "a stream of {client} is cut before its greeting: {why}");
        if let Cut::NoMessage(_) = why {
            self.shared.counts.refuse(Refused::Malformed);
        }
    }

    async fn accept(&self, account: Account, hello: v1::Hello) -> Result<Accepted, NotKept> {
        let counts = &self.shared.counts;
        let capture = CaptureId::of(&hello.capture_id).ok_or_else(|| {
            counts.refuse(Refused::Malformed);
            NotKept::Malformed("a capture id has 16 bytes")
        })?;
        // A stranger's stream is in nobody's way.
        let taken = self.shared.turns.take((account.who.clone(), capture)).await;
        let (turn, replaced) = taken.ok_or_else(|| {
            NotKept::Failed("another stream of this capture is in the way".to_owned())
        })?;
        let (config, shared) = (Arc::clone(&self.config), Arc::clone(&self.shared));
        let alive = Alive::of(&self.alive);
        let turns = Arc::clone(&account.turns);
        let begin = move || Keeper::begin(config, shared, account, capture, hello, turn, alive);
        let keeper = tokio::task::spawn_blocking(begin).await;
        let keeper = keeper.map_err(|error| NotKept::Failed(error.to_string()))?;
        let keeper = keeper.map_err(|error| match error {
            StoreError::NotTheirs => {
                counts.refuse(Refused::NotTheirs);
                NotKept::NotTheirs
            }
            error => NotKept::Failed(error.to_string()),
        })?;
        Ok(Accepted { keeper: Box::new(keeper), replaced, turns })
    }
}

/// Keeps one stream.
struct Keeper {
    config: Arc<Config>,
    shared: Arc<Shared>,
    capture: CaptureId,
    hello: v1::CollectorMessage,
    /// Length of the collector's epochs, zero if it is not told.
    epoch: Duration,
    place: Arc<Place>,
    /// Files handed over, in whichever window.
    handed: Arc<Handed>,
    /// What there was before this stream, and in its closed windows.
    before: Before,
    window: Option<Window>,
    /// The window before, while artifacts it asked for are on their way.
    closing: Option<Window>,
    /// The newest epoch of this stream.
    last: Option<u64>,
    /// Said by the collector to be all.
    end: Option<v1::End>,
    account: Arc<Account>,
    on_air: OnAir,
    _turn: Turn,
    _alive: Alive,
}

/// Counts a keeper while it is there.
struct Alive(watch::Sender<usize>);

impl Alive {
    fn of(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// A window that grows.
struct Window {
    id: WindowId,
    log: Log,
    wants: Wants,
    /// What the log is to say beside the next epochs.
    unsaid: Vec<v1::CollectorMessage>,
}

impl Window {
    fn say_what_is_left(&mut self) -> Result<(), LogError> {
        if self.log.has_ended() {
            return Ok(());
        }
        self.wants.left().iter().try_for_each(|message| self.log.append_one(message))
    }
}

impl Keeper {
    fn begin(
        config: Arc<Config>,
        shared: Arc<Shared>,
        account: Account,
        capture: CaptureId,
        hello: v1::Hello,
        turn: Turn,
        alive: Alive,
    ) -> Result<Self, StoreError> {
        // Who is elsewhere could say so as well, to have files of this host read.
        let account = Arc::new(account);
        let owner = &account.who;
        let is_here = owner.is_of_this_host()
            && fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .is_ok_and(|boot_id| boot_id.trim() == hello.boot_id);
        let sources = &config.sources;
        let place = Place {
            is_here,
            share_all: hello.share_all,
            cache: sources.cache.clone(),
            trust_executables: sources.trust_executables,
            allowance: Some(Arc::new(Counted::new(&account, &shared.counts))),
        };
        let tenant = Tenant { owner: owner.to_string(), cache: sources.cache.clone() };
        let scratch = sources.scratch.clone();
        let before = shared.store.before(capture, owner, &hello)?;
        let on_air = shared.live.begin(capture);
        Ok(Self {
            before,
            handed: shared.handed.of((owner.clone(), capture), || Handed::new(scratch, tenant)),
            config,
            shared,
            capture,
            epoch: Duration::from_nanos(hello.epoch_ns),
            hello: v1::CollectorMessage { body: Some(Body::Hello(hello)) },
            place: Arc::new(place),
            window: None,
            closing: None,
            last: None,
            end: None,
            account,
            on_air,
            _turn: turn,
            _alive: alive,
        })
    }

    /// The window that grows; begun if there is none, or if its log was removed.
    fn window(&mut self) -> Result<&mut Window, StoreError> {
        if self.window.as_ref().is_some_and(|window| window.log.is_removed()) {
            self.turn_window()?;
            self.close_before()?;
        }
        let window = match self.window.take() {
            Some(window) => window,
            None => self.begin_window()?,
        };
        Ok(self.window.insert(window))
    }

    fn begin_window(&mut self) -> Result<Window, StoreError> {
        let id = WindowId { capture: self.capture, number: self.before.next_window };
        let begun = self.shared.store.begin(id, &self.account.who, &self.hello).inspect_err(|error| {
            if matches!(error, StoreError::Log(failed) if failed.error.kind() == ErrorKind::AlreadyExists)
            {
                self.before.next_window += 1;
            }
        });
        let log = begun?;
        self.before.next_window += 1;
        let wants = Wants::new(Arc::clone(&self.place), Arc::clone(&self.handed));
        Ok(Window { id, log, wants, unsaid: Vec::new() })
    }

    /// Whether the next epoch is of the next window, `added` being added to this one. Epochs are
    /// not split: where they do not fill a window exactly, it ends with the one that comes nearest.
    fn is_full(&self, added: &Tally, bytes: u64) -> bool {
        let Some(window) = &self.window else { return false };
        let (length, half) = (self.config.window.as_nanos(), self.epoch.as_nanos() / 2);
        let span = window.log.tally().span_with(added);
        let span = span.map_or(0, |(start, end)| end.saturating_sub(start));
        let memory = window.log.tally().memory.saturating_add(added.memory);
        u128::from(span) + half >= length
            || window.log.bytes() + bytes > MAX_WINDOW_BYTES
            || memory > self.account.ledger.limits.window()
    }

    /// The window that grows waits for its artifacts, and the one that did so is closed.
    fn turn_window(&mut self) -> Result<(), StoreError> {
        self.close_before()?;
        if let Some(window) = &self.window {
            self.before.next_epoch = self.before.next_epoch.max(window.log.tally().next_epoch);
            lose(&mut self.before.lost, window.log.tally().lost.values());
        }
        self.closing = self.window.take();
        Ok(())
    }

    fn close_before(&mut self) -> Result<(), StoreError> {
        if let Some(window) = &mut self.closing {
            window.say_what_is_left()?;
            self.shared.store.close(window.id, &mut window.log, &[])?;
        }
        self.closing = None;
        Ok(())
    }

    fn next_epoch(&self) -> u64 {
        let grown = self.window.as_ref().map_or(0, |window| window.log.tally().next_epoch);
        self.before.next_epoch.max(grown)
    }

    /// Adds epochs from the front of `messages`, as many as fit into the window, with one sync.
    fn add_epochs(
        &mut self,
        messages: &[v1::CollectorMessage],
        taken: &mut Taken,
    ) -> Result<(), Stop> {
        self.shared.store.room()?;
        let mut batch = Batch::default();
        let (mut count, mut last) = (0, None);
        let mut stop = Ok(());
        for message in messages {
            let Some(Body::Epoch(sealed)) = &message.body else { break };
            if last.max(self.last).is_some_and(|before| sealed.number <= before) {
                // It would be acknowledged and be nowhere.
                stop = Err(Stop::Refused(Stopped::Order { number: sealed.number }));
                break;
            }
            if sealed.number < self.next_epoch() {
                // Sent again: durable since before this stream.
                (count, last) = (count + 1, last.max(Some(sealed.number)));
                continue;
            }
            if self.is_full(batch.tally(), batch.bytes()) {
                if batch.tally().epochs > 0 {
                    break;
                }
                self.turn_window()?;
            }
            match self.check(sealed, taken) {
                Ok(tally) => {
                    let path = || self.capture.to_string().into();
                    batch
                        .epoch(message, &tally)
                        .map_err(|error| LogError { path: path(), error })?;
                    (count, last) = (count + 1, last.max(Some(sealed.number)));
                }
                Err(error) => {
                    // What came before it is kept.
                    stop = Err(error);
                    break;
                }
            }
        }
        if batch.tally().epochs > 0 {
            let window = self.window()?;
            for message in &window.unsaid {
                let path = || window.log.path().to_owned();
                batch.other(message).map_err(|error| LogError { path: path(), error })?;
            }
            window.log.append(&batch)?;
            window.unsaid.clear();
            let Tally { epochs, samples, lost_samples, .. } = *batch.tally();
            self.shared.counts.taken(epochs, samples, lost_samples);
            let open = [&self.window, &self.closing].into_iter().flatten();
            self.on_air.came(samples, open.map(|window| window.log.tally().clone()));
        }
        taken.messages += count;
        taken.ack = taken.ack.max(last);
        self.last = self.last.max(last);
        stop
    }

    /// Opens an epoch, and asks for what it needs. One that does not hold together is refused
    /// before it is written: what is acknowledged can be resolved.
    fn check(&mut self, sealed: &v1::SealedEpoch, taken: &mut Taken) -> Result<Tally, Stop> {
        if sealed.number >= i64::MAX as u64 {
            return Err(Stop::Refused(Stopped::Seal(stackwire_proto::SealError::TooLarge {
                what: "the number of an epoch",
                length: sealed.number,
                limit: i64::MAX as u64,
            })));
        }
        let ledger = Arc::clone(&self.account.ledger);
        let unsealed_part = ledger.unsealed.take(sealed.length.into());
        let refused = |error: SealError| Stop::Refused(error.into());
        let unsealed = Unsealed::of(sealed).map_err(refused)?;
        let (memory, limit) = (unsealed.memory(), ledger.limits.epoch);
        if memory > limit {
            return Err(Exceeded::Epoch { memory, limit }.into());
        }
        // As it is decoded, and in tables.
        let _decoded_part = ledger.decoded.take(2 * memory);
        let epoch = unsealed.decode(limit).map_err(refused)?;
        drop(unsealed_part);
        self.account.check_labels(&epoch)?;
        let mut assembler = Assembler::default();
        let added = assembler.add(&self.hello).and_then(|()| assembler.take(&epoch));
        let met = added.map_err(|error| Stop::Refused(error.into()))?;
        let pins = Arc::clone(&self.shared.pins);
        let window = self.window()?;
        let (wanted, known) = window.wants.look(&assembler, &met, &pins);
        window.unsaid.extend(known);
        taken.wanted.extend(wanted);
        let mut tally = Tally::of(&epoch, sealed.number);
        tally.memory = memory.saturating_add(met.memory());
        Ok(tally)
    }

    fn add_artifact(
        &mut self,
        message: &v1::CollectorMessage,
        taken: &mut Taken,
    ) -> Result<(), Stop> {
        let Some(Body::Artifact(chunk)) = &message.body else { return Ok(()) };
        if chunk.kind() == v1::ArtifactKind::File {
            let window = self.window()?;
            taken.wanted.extend(window.wants.file(chunk, &mut window.log)?);
        }
        for window in [&mut self.closing, &mut self.window].into_iter().flatten() {
            if chunk.kind() != v1::ArtifactKind::File && window.wants.artifact(chunk) {
                window.log.append_one(message)?;
            }
        }
        if self.closing.as_ref().is_some_and(|window| window.wants.are_fulfilled()) {
            self.close_before()?;
        }
        Ok(())
    }

    fn add_front(
        &mut self,
        messages: &[v1::CollectorMessage],
        taken: &mut Taken,
    ) -> Result<(), Stop> {
        let Some(first) = messages.first() else { return Ok(()) };
        match &first.body {
            Some(Body::Epoch(_)) => return self.add_epochs(messages, taken),
            Some(Body::Artifact(_)) => self.add_artifact(first, taken)?,
            // Of the whole capture; its last window gets an end of its own, in `finish`, when the
            // artifacts have come as well.
            Some(Body::End(end)) => self.end = Some(end.clone()),
            Some(Body::Hello(_)) | None => {}
        }
        taken.messages += 1;
        Ok(())
    }

    /// What the capture lost beyond what its windows said.
    fn lost_beyond(&self, total: &[v1::Lost]) -> Vec<v1::Lost> {
        let mut said = vec![&self.before.lost];
        said.extend(self.window.as_ref().map(|window| &window.log.tally().lost));
        beyond(total, &said)
    }
}

/// Why messages are not taken.
enum Stop {
    Store(StoreError),
    Refused(Stopped),
}

impl From<StoreError> for Stop {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<Exceeded> for Stop {
    fn from(exceeded: Exceeded) -> Self {
        Self::Refused(Stopped::TooMuch(exceeded.to_string()))
    }
}

impl From<LogError> for Stop {
    fn from(error: LogError) -> Self {
        Self::Store(error.into())
    }
}

impl Keep for Keeper {
    fn next_epoch(&self) -> u64 {
        self.next_epoch()
    }

    fn pace(&self, messages: &[v1::CollectorMessage]) -> Duration {
        self.account.pace(messages)
    }

    fn cut(&self, why: &Cut<'_>) {
        let (client, capture) = (&self.account.who, self.capture);
        tracing::warn!(%client, %capture, "a stream of {client} is cut: {why}");
        match why {
            Cut::Stopped(Stopped::TooMuch(_)) => self.shared.counts.refuse(Refused::Limit),
            Cut::NoMessage(_)
            | Cut::Stopped(Stopped::Seal(_) | Stopped::Capture(_) | Stopped::Order { .. }) => {
                self.shared.counts.refuse(Refused::Malformed);
            }
            Cut::Broken(_) | Cut::Stopped(Stopped::Later(_) | Stopped::Write(_)) => {}
        }
    }

    fn acknowledged(&self, after: Duration) {
        self.shared.counts.acknowledged(after);
    }

    fn add(&mut self, messages: &[v1::CollectorMessage]) -> Taken {
        let mut taken = Taken::default();
        while taken.messages < messages.len() {
            match self.add_front(&messages[taken.messages..], &mut taken) {
                Ok(()) => {}
                Err(Stop::Store(error)) => {
                    // Whatever is wrong with the disk, it may be right in a second.
                    self.shared.store.warn("collectors have to wait", &error);
                    taken.stopped = Some(Stopped::Later(error.to_string()));
                    break;
                }
                Err(Stop::Refused(stopped)) => {
                    taken.stopped = Some(stopped);
                    break;
                }
            }
        }
        taken
    }

    fn finish(mut self: Box<Self>) {
        if self.end.is_some() {
            self.shared.handed.forget(&(self.account.who.clone(), self.capture));
        }
        let mut beyond = self.end.take().map(|end| self.lost_beyond(&end.lost)).unwrap_or_default();
        // Said by the last window, whichever that is.
        for mut window in [self.window.take(), self.closing.take()].into_iter().flatten() {
            // It makes a difference to the words of a report alone.
            let _ = window.say_what_is_left();
            self.shared.store.close_later(window.id, window.log, std::mem::take(&mut beyond));
        }
        if !beyond.is_empty() {
            // A number that is taken, because the index was lost, is not taken again.
            match self.begin_window().or_else(|_taken| self.begin_window()) {
                Ok(window) => self.shared.store.close_later(window.id, window.log, beyond),
                Err(error) => self.shared.store.warn("cannot tell what was lost", &error),
            }
        }
    }
}
