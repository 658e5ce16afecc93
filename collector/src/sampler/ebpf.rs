//! Sampling with eBPF: loads, attaches to every CPU, drains rings in time order.
//!
//! Everything that needs a capability happens in [`EbpfSampler::start`], except opening events on
//! CPUs that come online later.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use aya::maps::{MapData, MapError, RingBuf};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use stackwire_collector_ebpf::sched_stats::{OnCpu, SchedStats};
use stackwire_collector_ebpf::{CopyHead, Counter, RING_BYTES, RecordKind, WaitState, Waiting};
use stackwire_model::Event;
use stackwire_model::sched::PerfCounter;
use zerocopy::FromBytes;
use zeroize::Zeroizing;

use super::drained::{Batch, Copy, NewCode, NewPiece};
use super::object::{Filter, Object, Waiters};
use super::sched_stats::{SchedSums, counters};
use super::{Kind, Sampler, SamplerError, ToCopy, online_cpus, open_error};
use crate::clock::now_ns;
use crate::managed::List;
use crate::process::waiting::ran_ns;
use crate::sources::pace::Pace;
use crate::sources::perf_event::{PerfEvent, Sampled};
use crate::sources::record::{self, Record};
use crate::sources::side_band;
use crate::unwind::Descriptors;

/// Shortest time between two looks at the rings. At 20,000 samples of 4 KiB a second the ring, of 8
/// MiB, is a tenth full by then.
const TURN: Duration = Duration::from_millis(10);
/// From when the kernel side needs what events tell to the look at them: an exec maps a linker and
/// most libraries meanwhile.
const SHORT_TURN: Duration = Duration::from_millis(1);
/// Turns that short in a row, and how many come back in a second. A build would take a tenth of a
/// CPU.
const SHORT_TURNS: u32 = 40;

/// A copy or a list this old has no sample: they come one behind the other.
const OF_NO_SAMPLE_NS: u64 = 1_000_000_000;

/// The running kernel side.
pub struct EbpfSampler {
    object: Object,
    /// `None`: nobody asked where threads wait.
    waiters: Option<Waiters>,
    /// Threads that waited in the beginning and for which it had no room.
    unnoted: u64,
    /// Threads that ran or waited for a CPU in the beginning: since when, and how long each had
    /// run, nanoseconds.
    runnable: HashMap<u32, (u64, u64)>,
    /// `None`: nobody asked how threads are scheduled.
    sched: Option<SchedSums>,
    /// Counters that were asked for.
    counters: Vec<PerfCounter>,
    ring: RingBuf<MapData>,
    /// By CPU and time: a copy whose sample or stack comes next.
    copies: HashMap<(u32, u64), Copy>,
    /// Likewise, frames of an interpreter.
    lists: HashMap<(u32, u64), List>,
    wakeups: RingBuf<MapData>,
    /// By CPU: one for each of `kinds`.
    events: BTreeMap<u32, Vec<PerfEvent>>,
    /// By CPU and place in `kinds`, of those that are counted one by one.
    paces: BTreeMap<(u32, usize), Pace>,
    kinds: Vec<Kind>,
    frequency: u32,
    refused: BTreeSet<u32>,
    buffer: Vec<u8>,
    /// A short turn is allowed while this time is in the past. Each short turn moves it forward by
    /// its share of a second. It is never more than a second ago.
    spent: Instant,
}

impl fmt::Debug for EbpfSampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { events, kinds, frequency, .. } = self;
        let cpus: Vec<_> = events.keys().collect();
        f.debug_struct("EbpfSampler")
            .field("kinds", kinds)
            .field("frequency", frequency)
            .field("cpus", &cpus)
            .finish()
    }
}

impl EbpfSampler {
    /// Loads, attaches to every online CPU, and starts sampling; of single processes once they are
    /// admitted.
    ///
    /// # Errors
    /// See [`SamplerError`].
    pub fn start(
        filter: &Filter,
        kinds: &[Event],
        frequency: u32,
        sampled: Sampled,
    ) -> Result<Self, SamplerError> {
        let cpus = online_cpus()?;
        let mut filter = filter.clone();
        let counters: Vec<PerfCounter> =
            if filter.config.add_up == 0 { Vec::new() } else { counters(&cpus) };
        let counting = PerfCounter::events().into_iter().zip(&counters);
        let counting: Vec<Event> =
            counting.filter(|(_, it)| it.missing.is_none()).map(|(event, _)| event).collect();
        filter.config.counters = counting.len() as u32;
        let mut object = Object::load(&filter)?;
        let (ring, wakeups) = (object.take_samples()?, object.take_wakeups()?);
        let waits = filter.config.wait_states != 0;
        let waiters = waits.then(|| object.take_waiting()).transpose()?;
        let mut sched = None;
        if filter.config.add_up != 0 {
            let (sums, places, running) = object.take_sched_sums()?;
            sched = Some(SchedSums::new(sums, places, running, counting)?);
        }
        let mut kinds: Vec<Kind> = kinds.iter().map(|kind| Kind::new(kind, sampled)).collect();
        if kinds.is_empty() {
            // For its ring, that tells of processes and mappings.
            kinds.push(Kind { event: Event::dummy(), when: Sampled::Never, paced: false });
        }
        let mut sampler = Self {
            object,
            waiters,
            unnoted: 0,
            runnable: HashMap::new(),
            sched,
            counters,
            ring,
            copies: HashMap::new(),
            lists: HashMap::new(),
            wakeups,
            events: BTreeMap::new(),
            paces: BTreeMap::new(),
            kinds,
            frequency,
            refused: BTreeSet::new(),
            buffer: Vec::new(),
            spent: a_second_ago(),
        };
        for cpu in cpus {
            sampler.attach(cpu)?;
        }
        let attached: Vec<u32> = sampler.events.keys().copied().collect();
        for cpu in attached {
            sampler.enable(cpu)?;
        }
        if waits {
            sampler.object.watch()?;
        }
        if let Some(sched) = &mut sampler.sched {
            sched.begin(now_ns())?;
            sampler.object.add_up()?;
        }
        Ok(sampler)
    }

    /// Lets samples of these processes through.
    ///
    /// # Errors
    /// See [`SamplerError`].
    pub fn admit(&mut self, pids: &[u32]) -> Result<(), SamplerError> {
        Ok(self.object.admit(pids)?)
    }

    /// The maps of unwind tables, once.
    ///
    /// # Errors
    /// See [`SamplerError`].
    pub fn take_tables(&mut self) -> Result<Descriptors, SamplerError> {
        Ok(self.object.take_tables()?)
    }

    /// Waits for a wake-up, or with `all` for anything else, too. True when there is a wake-up. A
    /// wait that is interrupted or fails only leads to an early look at the rings.
    fn poll(&self, timeout: Duration, all: bool) -> bool {
        let mut fds = vec![PollFd::new(&self.wakeups, PollFlags::IN)];
        if all {
            fds.push(PollFd::new(&self.ring, PollFlags::IN));
            let events = self.events.values().filter_map(|events| events.first());
            fds.extend(events.map(|event| PollFd::from_borrowed_fd(event.fd(), PollFlags::IN)));
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
        let _ = poll(&mut fds, Some(&timeout));
        fds[0].revents().contains(PollFlags::IN)
    }

    /// Takes a note back: the thread ran when it was made.
    pub fn note_running(&mut self, tid: u32, since_ns: u64) {
        let Some(waiters) = &mut self.waiters else { return };
        let noted = waiters.get(&tid, 0).ok();
        let noted = noted.and_then(|bytes| Waiting::read_from_bytes(&bytes).ok());
        if noted.is_some_and(|noted| noted.since_ns == since_ns && noted.user_stack == 0) {
            let _ = waiters.remove(&tid);
        }
    }

    /// Counters that were asked for.
    #[must_use]
    pub fn counters(&self) -> &[PerfCounter] {
        &self.counters
    }

    /// Notes threads that wait already, each with its id; not those that have been seen to wait or
    /// to run since.
    pub fn note_waiting(&mut self, threads: &[(u32, Waiting)]) {
        let Some(waiters) = &mut self.waiters else { return };
        for (tid, waiting) in threads {
            if waiting.state == WaitState::Preempted as u32 {
                let ran_ns = ran_ns(waiting.pid, *tid).unwrap_or(0);
                self.runnable.insert(*tid, (waiting.since_ns, ran_ns));
            }
            // BPF_NOEXIST: the kernel side knows better.
            match waiters.insert(tid, zerocopy::transmute_ref!(waiting), 1) {
                Err(MapError::SyscallError(error))
                    if error.io_error.raw_os_error() == Some(libc::EEXIST) => {}
                noted => self.unnoted += u64::from(noted.is_err()),
            }
        }
    }

    /// Whether it was found running or waiting for a CPU in the beginning, has not been switched
    /// since, and ran all the time.
    fn has_run_since(&self, tid: u32, waiting: &Waiting) -> bool {
        let noted = self.runnable.get(&tid).filter(|_| waiting.user_stack == 0);
        let Some(&(since_ns, before_ns)) = noted else { return false };
        let passed_ns = now_ns().saturating_sub(since_ns);
        let ran = |now_ns: u64| now_ns.saturating_sub(before_ns) > passed_ns / 2;
        since_ns == waiting.since_ns && ran_ns(waiting.pid, tid).is_none_or(ran)
    }

    fn attach(&mut self, cpu: u32) -> Result<(), SamplerError> {
        let mut events: Vec<PerfEvent> = Vec::with_capacity(self.kinds.len());
        let mut paces = Vec::new();
        for (number, Kind { event: kind, when, paced }) in self.kinds.iter().enumerate() {
            let error = |error| open_error(cpu, kind, error);
            let perf = kind.perf.ok_or_else(|| error(io::ErrorKind::Unsupported.into()))?;
            let mut event = PerfEvent::open(cpu, perf, *when, events.first()).map_err(error)?;
            if *when != Sampled::Never {
                event.set_program(self.object.sampling_program(number)?).map_err(error)?;
            }
            if *paced {
                let pace = Pace::new(self.object.overflows(cpu, number), Instant::now());
                paces.push(((cpu, number), pace));
            }
            events.push(event);
        }
        self.events.insert(cpu, events);
        self.paces.extend(paces);
        if let Some(sched) = &mut self.sched {
            sched.open(cpu);
        }
        Ok(())
    }

    fn enable(&mut self, cpu: u32) -> Result<(), SamplerError> {
        for (event, kind) in self.events.get_mut(&cpu).into_iter().flatten().zip(&self.kinds) {
            event.enable().map_err(|error| open_error(cpu, &kind.event, error))?;
        }
        Ok(())
    }
}

impl Sampler for EbpfSampler {
    fn follow_hotplug(&mut self, batch: &mut Batch) {
        let Ok(online) = online_cpus() else { return };
        let mut gone = Vec::new();
        for (&cpu, events) in &mut self.events {
            let Some(first) = events.first_mut() else { continue };
            if !first.advances() || !online.contains(&cpu) {
                take_events(first, &mut self.buffer, &mut batch.events);
                gone.push(cpu);
            }
        }
        for cpu in gone {
            self.events.remove(&cpu);
            // The kernel has taken its counters off for good, too.
            if let Some(sched) = &mut self.sched {
                sched.close(cpu);
            }
        }
        for cpu in online {
            if !self.events.contains_key(&cpu) {
                match self.attach(cpu).and_then(|()| self.enable(cpu)) {
                    Ok(()) => drop(self.refused.remove(&cpu)),
                    Err(_) => drop(self.refused.insert(cpu)),
                }
            }
        }
    }

    fn adapt(&mut self) {
        let now = Instant::now();
        for (&(cpu, number), pace) in &mut self.paces {
            let Some(event) = self.events.get(&cpu).and_then(|events| events.get(number)) else {
                continue;
            };
            if let Some(period) = pace.look(self.object.overflows(cpu, number), now, self.frequency)
            {
                // Fails only for events of a CPU that went offline.
                let _ = event.set_period(period);
            }
        }
    }

    fn refused_cpus(&self) -> u64 {
        self.refused.len() as u64
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        let price = Duration::from_secs(1) / SHORT_TURNS;
        self.spent = self.spent.max(a_second_ago());
        let may_be_short = self.spent + price <= Instant::now();
        // The ring of samples is readable as soon as it holds one record: without a pause every
        // sample would be a turn.
        let mut woken = false;
        if may_be_short {
            woken = self.poll(TURN, false);
        } else {
            std::thread::sleep(TURN);
        }
        woken = woken || self.poll(timeout, true);
        if !woken || !may_be_short {
            return false;
        }
        std::thread::sleep(SHORT_TURN);
        while self.wakeups.next().is_some() {}
        self.spent += price;
        true
    }

    fn drain(&mut self, batch: &mut Batch) {
        // At most what the ring holds: at the highest rates it fills as fast as it is emptied, and
        // what comes after, a stop among it, would have to wait.
        let mut left = RING_BYTES as usize;
        while let Some(record) = self.ring.next() {
            left = left.saturating_sub(record.len());
            let start = batch.frames.len();
            match record::decode(&record, &mut batch.frames) {
                Ok(Record::Framed(header)) => {
                    let is_sample = header.kind == RecordKind::Sample as u8;
                    let is_user_stack = header.kind == RecordKind::Stack as u8 && header.pid != 0;
                    let of = (header.cpu, header.time_ns);
                    let has_user = is_sample || is_user_stack;
                    let copy = has_user.then(|| self.copies.remove(&of)).flatten();
                    let list = has_user.then(|| self.lists.remove(&of)).flatten();
                    batch.push(header, start, copy, list);
                }
                Ok(Record::Managed { of, entries, evaluator }) => {
                    let list = List { entries: entries.to_vec(), evaluator };
                    self.lists.insert((of.cpu, of.time_ns), list);
                }
                Ok(Record::Code { of, head, bytes }) => {
                    batch.codes.push(NewCode { of, head, bytes: bytes.to_vec() });
                }
                Ok(Record::Script { of, head, bytes }) => {
                    let bytes = Zeroizing::new(bytes.to_vec());
                    batch.pieces.push(NewPiece { of, head, bytes });
                }
                Ok(Record::Copy { of, head: CopyHead { cursor, parts }, bytes }) => {
                    let bytes = Zeroizing::new(bytes.to_vec());
                    self.copies.insert((of.cpu, of.time_ns), Copy { cursor, parts, bytes });
                }
                Ok(Record::Ended(ended)) => batch.ended.push(ended),
                Err(_) => batch.malformed += 1,
            }
            if left == 0 {
                break;
            }
        }
        // There was no room for the samples of those that have been here for long.
        if left > 0 {
            let oldest_ns = now_ns().saturating_sub(OF_NO_SAMPLE_NS);
            self.copies.retain(|(_, time_ns), _| *time_ns > oldest_ns);
            self.lists.retain(|(_, time_ns), _| *time_ns > oldest_ns);
        }
        for event in self.events.values_mut().filter_map(|events| events.first_mut()) {
            take_events(event, &mut self.buffer, &mut batch.events);
        }
        batch.samples.sort_by_key(|sample| sample.header.time_ns);
        batch.events.sort_by_key(|event| event.time_ns);
    }

    fn stop(&mut self) {
        for event in self.events.values_mut().flatten() {
            // Fails only for events of a CPU that went offline, which take no samples.
            let _ = event.disable();
        }
        self.object.stop_watching();
    }

    fn copy_at_most(&self, bytes: ToCopy) {
        self.object.copy_at_most(bytes);
    }

    fn name_again(&self) {
        self.object.name_again();
    }

    fn forget(&self, place: u32, number: u64) {
        self.object.forget(place, number);
    }

    fn dismiss(&mut self, pids: &[u32]) {
        self.object.dismiss(pids);
    }

    fn running(&mut self) -> Vec<OnCpu> {
        self.sched.as_mut().map(SchedSums::running).unwrap_or_default()
    }

    fn sched_sums(&self) -> Vec<(u64, SchedStats)> {
        self.sched.iter().flat_map(SchedSums::read).collect()
    }

    fn forget_sched(&mut self, key: u64) {
        if let Some(sched) = &mut self.sched {
            sched.forget(key);
        }
    }

    fn waiting(&self) -> Vec<(u32, Waiting)> {
        let all = self.waiters.iter().flat_map(|waiters| waiters.iter()).flatten();
        let read =
            all.filter_map(|(tid, bytes)| Some((tid, Waiting::read_from_bytes(&bytes).ok()?)));
        let waits = |tid: u32, waiting: &Waiting| {
            waiting.since_ns != 0 && !self.has_run_since(tid, waiting)
        };
        read.filter(|(tid, waiting)| waits(*tid, waiting)).collect()
    }

    fn counter(&self, counter: Counter) -> u64 {
        let unnoted = if let Counter::ThreadsFull = counter { self.unnoted } else { 0 };
        self.object.counter(counter) + unnoted
    }
}

fn a_second_ago() -> Instant {
    let now = Instant::now();
    now.checked_sub(Duration::from_secs(1)).unwrap_or(now)
}

/// Takes what an event's ring has. Where that was full, others may be lost behind the last.
fn take_events(event: &mut PerfEvent, buffer: &mut Vec<u8>, events: &mut Vec<side_band::Event>) {
    if event.drain(buffer, |record| events.extend(side_band::decode(record))) {
        let time_ns = events.last().map_or(0, |last| last.time_ns);
        events.push(side_band::Event { time_ns, pid: 0, change: side_band::Change::Lost(0) });
    }
}
