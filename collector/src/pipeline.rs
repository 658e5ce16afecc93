//! From rings to epochs: the loop that everything else is called from. Read this file first.
//!
//! drain → events and samples merged by time → processes → normalize → batch → wire → outbox. One
//! thread, the only one that touches the kernel side; sinks run on another.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stackwire_collector_ebpf::Counter;
use stackwire_model::LostReason;

use crate::adding::Adding;
use crate::artifact::Hash;
use crate::batch::Epoch;
use crate::clock::now_ns;
use crate::codes::Codes;
use crate::context::Context;
use crate::cpu_time::CpuTimes;
use crate::handover::Handover;
use crate::host::Identity;
use crate::host::jit::Snapshots;
use crate::host::kallsyms::KernelLayout;
use crate::host::kernel_names::KernelNames;
use crate::host::whose::Whose;
use crate::late::LateWalks;
use crate::off_cpu::OffCpu;
use crate::outbox::Outbox;
use crate::perf_samples::PerfSamples;
use crate::process::{Processes, maps, waiting};
use crate::python::Pythons;
use crate::sampler::{Batch, NewCode, NewPiece, Sampler};
use crate::sched::Totals;
use crate::scheduling::Scheduling;
use crate::sources::side_band::Change;
use crate::summary::Summary;
use crate::unwind::{Stats, Unwind};
use crate::wire::{self, Beside, References, Span};

/// An epoch is cut early when it holds this many bytes.
const EPOCH_BYTES: usize = 24 << 20;
/// How long a sample waits for events that happened before it and are not in their ring yet.
const SETTLE: Duration = Duration::from_millis(5);
/// How long the kernel side may take to tell of processes that have ended: it does so when all CPUs
/// have done something else since.
const UNTIL_TOLD: Duration = Duration::from_millis(200);
/// Mappings asked about in a turn: a process may map a file without end, and all others wait.
const MAX_ASKED: usize = 32;

/// The loop's state.
#[derive(Debug)]
pub struct Pipeline {
    started: Instant,
    sampler: Box<dyn Sampler>,
    processes: Processes,
    /// `None`: stacks are walked by frame pointers.
    unwind: Option<Unwind>,
    /// `None`: samples are those of the eBPF programs, which say everything.
    perf: Option<PerfSamples>,
    /// `None`: all stacks have been walked as far as they are.
    late: Option<LateWalks>,
    layout: KernelLayout,
    codes: Codes,
    names: KernelNames,
    identity: Identity,
    references: References,
    jit: Snapshots,
    whose: Whose,
    handover: Arc<Handover>,
    outbox: Arc<Outbox>,
    /// `None`: nobody asked where threads wait.
    off_cpu: Option<OffCpu>,
    /// `None`: the kernel side does not tell of processes that end.
    cpu_times: Option<CpuTimes>,
    scheduling: Scheduling,
    /// `None`: nobody asked for names of Python functions.
    pythons: Option<Pythons>,
    batch: Batch,
    epoch: Epoch,
    /// Up to when events of processes have been applied.
    known_ns: u64,
    epoch_start: u64,
    epoch_number: u64,
    epoch_length: Duration,
    delivered: u64,
    throttled: u64,
    lost_events: u64,
    refused_cpus: u64,
    /// Samples that were taken, of no time or process that counts.
    uncounted: u64,
    /// When the capture began, monotonic nanoseconds.
    begun_ns: u64,
    /// Totals at the start of this epoch, to tell what this epoch lost.
    before: HashMap<LostReason, u64>,
    tables_before: Stats,
    dropped: u64,
}

/// What a pipeline is made of.
#[derive(Debug)]
pub struct Parts {
    /// The kernel side.
    pub sampler: Box<dyn Sampler>,
    /// What is known of processes.
    pub processes: Processes,
    /// Publishes unwind tables; `None`: stacks are walked by frame pointers.
    pub unwind: Option<Unwind>,
    /// Completes samples of perf events; `None`: samples are those of the eBPF programs.
    pub perf: Option<PerfSamples>,
    /// Walks on in copies of stacks; `None`: there are none.
    pub late: Option<LateWalks>,
    /// Where the kernel's code is.
    pub layout: KernelLayout,
    /// What it is called.
    pub names: KernelNames,
    /// The host.
    pub identity: Identity,
    /// Artifacts every epoch refers to.
    pub references: References,
    /// Where epochs and files go.
    pub outgoing: Outgoing,
    /// `None`: nobody asked where threads wait.
    pub off_cpu: Option<OffCpu>,
    /// `None`: the kernel side does not tell of processes that end.
    pub cpu_times: Option<CpuTimes>,
    /// How threads were scheduled up to the last look.
    pub sched: Totals,
    /// `None`: nobody asked for names of Python functions.
    pub pythons: Option<Pythons>,
    /// When sampling started.
    pub started: Instant,
    /// The same, monotonic nanoseconds.
    pub epoch_start: u64,
    /// How long an epoch is.
    pub epoch_length: Duration,
}

/// Where epochs and files go.
#[derive(Debug)]
pub struct Outgoing {
    /// Takes perf-maps and jitdumps.
    pub jit: Snapshots,
    /// Asks processes whose they are.
    pub whose: Whose,
    /// Hands executables over.
    pub handover: Arc<Handover>,
    /// Queues everything for the sink.
    pub outbox: Arc<Outbox>,
}

impl Pipeline {
    /// Puts the parts together.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let Parts { sampler, mut processes, unwind, layout, names, identity, references, .. } =
            parts;
        let Outgoing { jit, whose, handover, outbox } = parts.outgoing;
        let Parts { perf, late, off_cpu, cpu_times, sched, pythons, .. } = parts;
        let Parts { started, epoch_start, epoch_length, .. } = parts;
        let codes = Codes::new(processes.executables());
        Self {
            started,
            sampler,
            processes,
            unwind,
            perf,
            late,
            layout,
            codes,
            names,
            identity,
            references,
            jit,
            whose,
            handover,
            outbox,
            off_cpu,
            cpu_times,
            scheduling: Scheduling::new(sched),
            pythons,
            batch: Batch::default(),
            epoch: Epoch::default(),
            known_ns: epoch_start,
            epoch_start,
            epoch_number: 0,
            epoch_length,
            delivered: 0,
            throttled: 0,
            lost_events: 0,
            refused_cpus: 0,
            uncounted: 0,
            begun_ns: epoch_start,
            before: HashMap::new(),
            tables_before: Stats::default(),
            dropped: 0,
        }
    }

    /// When sampling started.
    #[must_use]
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Runs until `stop` says so, the processes asked for have ended, or the sink gave up; then
    /// takes what is left and closes the outbox.
    pub fn run(mut self, mut stop: impl FnMut() -> bool) -> Summary {
        let mut second = Instant::now();
        while !stop() && self.outbox.stopped().is_none() {
            // What has been drained and not settled yet is not waited for in the rings.
            let pending = !self.batch.events.is_empty() || !self.batch.samples.is_empty();
            let at_most = if pending { SETTLE } else { Duration::from_millis(50) };
            let cut_short = self.sampler.wait(at_most);
            self.take(SETTLE, cut_short);
            if self.jit.is_due() {
                self.look_at_jits();
            }
            // Before the epoch is cut, which has nobody in it then.
            if second.elapsed() >= Duration::from_secs(1) {
                self.whose.ask(images(&self.epoch, &self.late, &self.processes));
                if let Some(pythons) = &mut self.pythons {
                    pythons.meet(images(&self.epoch, &self.late, &self.processes));
                }
            }
            if now_ns() - self.epoch_start >= self.epoch_length.as_nanos() as u64
                || self.epoch.bytes() > EPOCH_BYTES
                || self.off_cpu.as_ref().is_some_and(OffCpu::is_full)
            {
                self.cut();
            }
            self.sampler.adapt();
            if let Some(late) = &mut self.late {
                self.sampler.copy_at_most(late.bytes_to_copy());
                if let Some(tally) = late.take_tally() {
                    self.sampler.note_cut(tally);
                }
            }
            if second.elapsed() >= Duration::from_secs(1) {
                second = Instant::now();
                self.sampler.follow_hotplug(&mut self.batch);
                self.refused_cpus = self.refused_cpus.max(self.sampler.refused_cpus());
                let ended = self.processes.take_ended();
                self.sampler.dismiss(&ended);
                if self.processes.all_ended() {
                    break;
                }
            }
        }
        // What goes on now is told up to here. To stop takes seconds on a busy machine.
        let end_ns = now_ns();
        self.sampler.stop();
        if let Some(cpu_times) = &mut self.cpu_times {
            cpu_times.end(waiting::processes());
        }
        // Twice what the ring holds: the first may have been cut short by a full one.
        self.take(Duration::ZERO, false);
        self.take(Duration::ZERO, false);
        let patience = Instant::now() + UNTIL_TOLD;
        let awaits = |it: &Self| {
            it.cpu_times.as_ref().is_some_and(|of| of.awaits_any(&it.processes, &it.epoch))
        };
        while awaits(&self) && Instant::now() < patience {
            std::thread::sleep(SETTLE);
            self.take(Duration::ZERO, false);
        }
        let (sampler, processes) = (&mut *self.sampler, &mut self.processes);
        if let Some(off_cpu) = &mut self.off_cpu {
            let (codes, layout, epoch) = (&self.codes, &self.layout, &mut self.epoch);
            let mut context = Context { codes, processes, layout, epoch };
            off_cpu.add_going_on(sampler, end_ns, &mut context);
        }
        self.scheduling.add_up(sampler, processes, &mut self.epoch, self.known_ns);
        self.scheduling.add_running(sampler, processes, &mut self.epoch, end_ns);
        self.whose.ask_last(images(&self.epoch, &self.late, &self.processes));
        // Samples of young programs wait for their tables, none without end.
        while self.late.as_ref().is_some_and(LateWalks::any_waits)
            && self.outbox.stopped().is_none()
        {
            std::thread::sleep(SETTLE);
            self.adding().walk_on(LateWalks::look);
        }
        self.adding().walk_on(LateWalks::finish);
        self.finish()
    }

    /// Takes what the rings hold, up to `settle` ago; everything when `settle` is zero. `hurry`:
    /// the kernel side is told of later events, too.
    fn take(&mut self, settle: Duration, hurry: bool) {
        let until = match settle.as_nanos() as u64 {
            0 => u64::MAX,
            settle => now_ns() - settle,
        };
        self.sampler.drain(&mut self.batch);
        self.define();
        self.identify();
        let mut events = 0;
        let mut samples = 0;
        while let Some(&sample) =
            self.batch.samples.get(samples).filter(|sample| sample.header.time_ns <= until)
        {
            while self.batch.events.get(events).is_some_and(|e| e.time_ns <= sample.header.time_ns)
            {
                self.apply(events);
                events += 1;
            }
            self.uncounted += u64::from(!self.adding().add(&sample));
            samples += 1;
        }
        while self.batch.events.get(events).is_some_and(|event| event.time_ns <= until) {
            self.apply(events);
            events += 1;
        }
        if let Some(cpu_times) = &mut self.cpu_times {
            cpu_times.take(&mut self.batch.ended, &mut self.processes, &mut self.epoch);
        }
        self.known_ns = until;
        self.batch.advance(samples, events);
        if let Some(unwind) = &mut self.unwind {
            unwind.update(&mut self.processes, &self.batch.events, hurry);
        }
        self.adding().walk_on(LateWalks::look);
    }

    fn adding(&mut self) -> Adding<'_> {
        let (epoch, processes, layout) = (&mut self.epoch, &mut self.processes, &self.layout);
        Adding {
            context: Context { codes: &self.codes, processes, layout, epoch },
            batch: &mut self.batch,
            begun_ns: self.begun_ns,
            late: self.late.as_mut().zip(self.unwind.as_mut()),
            perf: self.perf.as_mut(),
            off_cpu: self.off_cpu.as_mut(),
        }
    }

    /// Keeps what names functions of interpreters.
    fn define(&mut self) {
        // Of processes that do not count as well: they may later, and it does not come again.
        for NewCode { of, head, bytes } in self.batch.codes.drain(..) {
            self.codes.define(&of, &head, &bytes, self.processes.executables());
        }
        for NewPiece { of, head, bytes } in self.batch.pieces.drain(..) {
            self.codes.add_source(&of, &head, &bytes, self.processes.executables());
        }
    }

    /// Asks for the file of each mapping whose build-id is too short to identify it. Asks once for
    /// each mapping.
    fn identify(&mut self) {
        let mut left = MAX_ASKED;
        for event in &mut self.batch.events {
            if let Change::Map(mapped) = &mut event.change
                && std::mem::take(&mut mapped.is_ambiguous)
                && left > 0
            {
                left -= 1;
                mapped.key = maps::file_of(event.pid, mapped).map(Into::into);
            }
        }
    }

    fn apply(&mut self, index: usize) {
        let event = &self.batch.events[index];
        match &event.change {
            Change::Throttle => self.throttled += 1,
            Change::Lost(count) => self.lost_events += count,
            // The last moment what its JIT wrote can still be found.
            Change::Exit { tid } if *tid == event.pid => {
                if let Some(image) = self.processes.image(event.pid)
                    && (self.epoch.runs_anonymous(image)
                        || self.late.as_ref().is_some_and(|late| late.has(image)))
                {
                    let jitdump = self.processes.jitdump(event.pid);
                    self.jit.take(image, event.pid, jitdump, self.epoch_number, &self.outbox);
                }
            }
            _ => {}
        }
        self.processes.apply(event);
        if let Some(perf) = &mut self.perf {
            perf.apply(event);
        }
        if let Change::Exit { tid } = event.change
            && tid == event.pid
            && let Some(process) = self.processes.get(event.pid)
        {
            self.epoch.ended(process);
        }
    }

    /// Notes how what JIT compilers write has grown.
    fn look_at_jits(&mut self) {
        for process in self.epoch.processes.iter().filter(|process| process.runs_anonymous) {
            // One that has ended writes no more.
            if self.processes.image(process.pid) == Some(process.image) {
                let jitdump = || self.processes.jitdump(process.pid);
                self.jit.watch(process.image, process.pid, jitdump);
            }
        }
        self.jit.look();
    }

    /// Seals the epoch and starts the next.
    fn cut(&mut self) {
        let now = now_ns();
        for process in self.epoch.processes.iter().filter(|process| process.runs_anonymous) {
            // Those that ended in this epoch have been looked at, and keep what was found then.
            let ended = self.processes.image(process.pid) != Some(process.image);
            if !(ended && self.jit.taken().contains_key(&process.image)) {
                let jitdump = self.processes.jitdump(process.pid).filter(|_| !ended);
                let (image, pid) = (process.image, process.pid);
                self.jit.take(image, pid, jitdump, self.epoch_number, &self.outbox);
            }
        }
        let totals = self.totals();
        let mut lost: Vec<_> = totals
            .iter()
            .map(|&(reason, total)| {
                (reason, total - self.before.get(&reason).copied().unwrap_or(0))
            })
            .collect();
        self.before = totals.into_iter().collect();
        // A dropped epoch also drops its record of what was lost: record it again in this epoch.
        lost.extend(self.outbox.take_dropped_losses());
        let (sampler, processes) = (&mut *self.sampler, &mut self.processes);
        self.scheduling.add_up(sampler, processes, &mut self.epoch, self.known_ns);
        if let Some(cpu_times) = &mut self.cpu_times {
            cpu_times.add_up(processes, &mut self.epoch);
        }
        self.epoch.put_in_order();
        let samples = self.epoch.samples();
        let tables = self.unwind.as_ref().map(Unwind::stats).unwrap_or_default();
        let mut kernel_symbols = self.name_kernel();
        if !self.outbox.keep_for(&kernel_symbols, self.epoch_number) {
            self.names.forget();
            kernel_symbols = self.name_kernel();
        }
        let span = Span {
            number: self.epoch_number,
            times: (self.epoch.start(self.epoch_start), now),
            lost: &lost,
            tables: tables.since(self.tables_before),
            kernel_symbols: &kernel_symbols,
            unwind: self.unwind.as_ref(),
        };
        self.tables_before = tables;
        let beside = Beside { jit: self.jit.taken(), said: self.whose.said() };
        let sealed = wire::epoch(&self.epoch, &span, &self.references, &beside, &self.identity);
        self.handover.learn(&self.epoch);
        self.outbox.push(sealed, samples, lost);
        self.delivered += samples;
        self.epoch = Epoch::default();
        let (processes, late) = (&self.processes, &self.late);
        self.codes.retain(|pid, start_ns| {
            let known = processes.get(pid).filter(|process| process.start_ns == start_ns);
            known.is_some() || late.as_ref().is_some_and(LateWalks::any_waits)
        });
        if self.codes.take_has_forgotten() {
            self.sampler.name_again();
        }
        self.epoch_number += 1;
        self.epoch_start = now;
        self.processes.end_epoch();
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.end_epoch(&*self.sampler);
        }
        if let Some(unwind) = &mut self.unwind {
            unwind.end_epoch(&self.processes);
        }
        if let Some(late) = &mut self.late {
            late.rest();
        }
        let processes = &self.processes;
        self.jit.retain(|image| processes.has_image(image));
        self.whose.retain(|image| processes.has_image(image));
        if let Some(pythons) = &mut self.pythons {
            pythons.retain(|image| processes.has_image(image));
        }
        self.jit.end_epoch();
    }

    /// Pieces that name the kernel frames of this epoch, the new one among them handed on.
    fn name_kernel(&mut self) -> Vec<Hash> {
        let (pieces, new) = self.names.of(&self.epoch);
        if let Some(new) = new {
            self.outbox.add_artifact(new, Some(self.epoch_number));
        }
        pieces
    }

    fn finish(mut self) -> Summary {
        self.cut();
        let lost = self.totals();
        let waits = self.off_cpu.as_ref();
        let waits = |counted: fn(&OffCpu) -> u64| waits.map_or(0, counted);
        let taken = self.sampler.counter(Counter::Taken) - self.uncounted
            + self.sampler.counter(Counter::WaitsTaken)
            + waits(OffCpu::going_on)
            - waits(OffCpu::uncounted);
        let python = self.pythons.as_ref().map(Pythons::switch_off).unwrap_or_default();
        let (at, epochs) = (self.epoch_start, self.epoch_number);
        self.outbox.close(wire::end(at, epochs, taken, &lost, &python));
        Summary {
            taken,
            delivered: self.delivered - self.dropped,
            epochs: self.epoch_number,
            lost: lost.into_iter().filter(|(_, count)| *count > 0).collect(),
            denied: self.processes.denied,
            tables: self.unwind.as_ref().map(Unwind::stats).unwrap_or_default(),
        }
    }

    /// Everything lost since the start, by reason.
    fn totals(&mut self) -> Vec<(LostReason, u64)> {
        self.dropped += self.outbox.take_dropped();
        vec![
            (LostReason::RingFull, self.sampler.counter(Counter::RingFull)),
            (LostReason::NoScratch, self.sampler.counter(Counter::NoScratch)),
            (LostReason::EpochDropped, self.dropped),
            (LostReason::MalformedRecord, self.batch.malformed),
            (LostReason::Events, self.lost_events),
            (LostReason::Throttled, self.throttled),
            (LostReason::TargetsFull, self.sampler.counter(Counter::TargetsFull)),
            (LostReason::CpuRefused, self.refused_cpus),
            (LostReason::WaitsRingFull, self.sampler.counter(Counter::WaitsLost)),
            (LostReason::WaitsRingFullNs, self.sampler.counter(Counter::WaitsLostNs)),
            (LostReason::WaitsUnseen, self.sampler.counter(Counter::WaitsUnseen)),
            (LostReason::WaitsUnseenNs, self.sampler.counter(Counter::WaitsUnseenNs)),
            (LostReason::OutsideNamespace, self.sampler.counter(Counter::Outside)),
            (LostReason::ThreadsFull, self.sampler.counter(Counter::ThreadsFull)),
            (LostReason::WaitStacks, self.off_cpu.as_ref().map_or(0, OffCpu::without_stacks)),
        ]
    }
}

/// Images of the processes that have samples in an epoch or waiting and run still, each with its
/// pid.
fn images(
    epoch: &Epoch,
    late: &Option<LateWalks>,
    processes: &Processes,
) -> impl Iterator<Item = (u64, u32)> {
    let running = epoch.processes.iter().filter(|process| process.end_ns == 0);
    let all = running.map(|process| (process.image, process.pid));
    let all = all.chain(late.iter().flat_map(LateWalks::images));
    all.filter(|&(image, pid)| processes.image(pid) == Some(image))
}
