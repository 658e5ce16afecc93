//! Loads the eBPF object into the kernel and hands out its maps and programs.
//!
//! The object is checked in; `make ebpf` rebuilds it and `tests` compare its digest with the
//! sources. Attaches nothing to perf events: `sampler/mod.rs` does.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, ProgramArray, RingBuf};
use aya::programs::raw_trace_point::RawTracePointLinkId;
use aya::programs::tp_btf::BtfTracePointLinkId;
use aya::programs::{BtfTracePoint, Iter, PerfEvent as PerfEventProgram, Program, RawTracePoint};
use aya::{Ebpf, EbpfLoader};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use stackwire_collector_ebpf::managed::{KNOWN_CODES, SCRIPTS};
use stackwire_collector_ebpf::sched_stats::{OnCpu, SchedStats};
use stackwire_collector_ebpf::{
    COPY, COUNTERS_PER_CPU, Config, Counter, LIST, MAX_COPY_BYTES, MAX_CPUS, MAX_EVENTS, PICK,
    Picker, SAMPLE, TOLD_STACKS, Unwind, WAIT_COPY, WAIT_LIST, WALK, Waiting,
};
use zerocopy::IntoBytes;

use super::ToCopy;
use super::btf::{Btf, Named};
use super::load_error::{BTF_PATH, LoadError, load_error, missing};
use super::mapped::Mapped;
use super::offsets::offsets;
use crate::arch;
use crate::unwind::Descriptors;

/// Slots of `SCRATCH` and `SEARCH` there are without programs at wake-ups.
const WITHOUT_WAKERS: u32 = 3;

/// Where in `COPY_BYTES` is how much of a stack is copied.
const OF_SAMPLES: usize = 0;
const OF_WAITS: usize = 8;

const FRAME_POINTERS: u32 = Unwind::FramePointers as u32;

/// What is to be sampled, in kernel terms.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Scope, cgroup, kernel stacks and unwinding; the offsets are filled in here.
    pub config: Config,
    /// Take children along.
    pub follow: bool,
    /// How many events are sampled.
    pub events: usize,
    /// Tell of processes that have ended.
    pub ends: bool,
}

/// Threads that have waited, by their ids.
pub type Waiters = HashMap<MapData, u32, [u8; size_of::<Waiting>()]>;

/// Sums of how threads are scheduled, by `key_of` a process or thread.
pub type Sums = HashMap<MapData, u64, [u8; size_of::<SchedStats>()]>;

/// What runs on each CPU, at index 0.
pub type Running = PerCpuArray<MapData, [u8; size_of::<OnCpu>()]>;

/// The loaded object.
pub struct Object {
    ebpf: Ebpf,
    counters: Mapped,
    pickers: Mapped,
    /// Bytes of stacks that are copied now.
    copy_bytes: Mapped,
    /// Functions of interpreters that were handed over.
    known: Mapped,
    scripts: Mapped,
    /// `None`: waits are not recorded.
    told: Option<Mapped>,
    /// With each wait it is recorded who ended it.
    wakers: bool,
    /// The kernel empties them with the last descriptor.
    _stages: Vec<ProgramArray<MapData>>,
    /// Reading it to its end has the kernel side tell of kernel stacks of threads that wait.
    answers: Option<File>,
    watching: Watching,
}

/// Programs that watch where threads wait, while they do.
#[derive(Default)]
struct Watching {
    switches: Option<BtfTracePointLinkId>,
    /// Others, each by its name.
    others: Vec<(&'static str, RawTracePointLinkId)>,
}

impl Object {
    /// Loads maps and programs; attaches those that watch processes begin and end.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(filter: &Filter) -> Result<Self, LoadError> {
        let object = arch::OBJECT.ok_or(LoadError::NoObject)?;
        let waits = filter.config.wait_states != 0;
        let wakers = waits && filter.config.wakers != 0;
        let (config, layout, types) = {
            // 5 MB, dropped before anything is loaded.
            let bytes = std::fs::read(BTF_PATH).map_err(LoadError::NoBtf)?;
            let kernel = Btf::new(&bytes)?;
            let (config, layout) = offsets(filter.config, &kernel)?;
            let types = if waits { types_of_waits(&kernel)? } else { aya::Btf::new() };
            (config, layout, types)
        };
        let mut loader = loader();
        loader.override_global("CONFIG", config.as_bytes(), true).override_global(
            "LAYOUT",
            layout.as_bytes(),
            true,
        );
        if !waits {
            loader.map_max_entries("WAITING", 1).map_max_entries("TOLD", 1);
            loader.map_max_entries("REMEMBERED", 1);
            // Without the slot of programs at a switch, the last.
            loader.map_max_entries("LISTS", 1).map_max_entries("CODES", 1);
            loader.map_max_entries("COPIES", 1);
        }
        if !wakers {
            loader.map_max_entries("WAKERS", 1);
            // Without the slot of programs at a wake-up, the last.
            loader.map_max_entries("SCRATCH", WITHOUT_WAKERS);
            loader.map_max_entries("SEARCH", WITHOUT_WAKERS);
        }
        let adds_up = config.add_up != 0;
        if !adds_up {
            loader.map_max_entries("SCHED_STATS", 1).map_max_entries("RUNNABLE", 1);
        }
        loader.map_max_entries("HARDWARE", (config.counters * MAX_CPUS).max(1));
        let mut ebpf = loader.load(object).map_err(load_error)?;

        let [walk, walk_waiting, walk_waker] = match config.unwind {
            FRAME_POINTERS => {
                ["walk_frame_pointers", "walk_waiting_frame_pointers", "walk_waker_frame_pointers"]
            }
            _ => ["walk_tables", "walk_waiting_tables", "walk_waker_tables"],
        };
        let sampling: Vec<String> = (0..filter.events).map(sampling_name).collect();
        let mut others: Vec<&str> = sampling.iter().map(String::as_str).collect();
        others.push("sample");
        if filter.ends {
            others.push("note_end");
        }
        if config.counted != 0 {
            others.push("pick");
        }
        if config.unwind != FRAME_POINTERS {
            others.extend(["note_exec", "note_fork"]);
        }
        if filter.follow {
            others.push("follow_fork");
        }
        if waits {
            others.extend(["switch", "wakeup", "answer_waiting", walk_waiting]);
        }
        if wakers {
            others.extend(["waking", walk_waker]);
        }
        if adds_up {
            others.extend(SCHEDULER.map(|(name, _)| name));
        }
        let copies = config.stack_copies != 0 && config.unwind != FRAME_POINTERS;
        if copies {
            others.push("copy_stack");
        }
        if copies && waits {
            others.push("copy_waiting_stack");
        }
        let lists = config.managed != 0;
        if lists {
            others.push("walk_frame_list");
        }
        if lists && waits {
            others.push("walk_waiting_list");
        }
        verify(&mut ebpf, walk, &others, &types)?;
        let mut stages = take_stages(&mut ebpf, "STAGES")?;
        let pick = (config.counted != 0).then_some((PICK, "pick"));
        let copy = copies.then_some((COPY, "copy_stack"));
        let list = lists.then_some((LIST, "walk_frame_list"));
        let stages_of = [(SAMPLE, "sample"), (WALK, walk)];
        let stages_of = stages_of.into_iter().chain(pick).chain(copy).chain(list);
        for (place, name) in stages_of {
            let program: &mut PerfEventProgram = program(&mut ebpf, name)?;
            stages.set(place, program.fd().map_err(load_error)?, 0).map_err(load_error)?;
        }
        let mut all_stages = vec![stages];
        let mut answers = None;
        if waits {
            let mut stages = take_stages(&mut ebpf, "WAIT_STAGES")?;
            let walk: &mut BtfTracePoint = program(&mut ebpf, walk_waiting)?;
            stages.set(0, walk.fd().map_err(load_error)?, 0).map_err(load_error)?;
            if lists {
                let list: &mut BtfTracePoint = program(&mut ebpf, "walk_waiting_list")?;
                let list = list.fd().map_err(load_error)?;
                stages.set(WAIT_LIST, list, 0).map_err(load_error)?;
            }
            if copies {
                let copy: &mut BtfTracePoint = program(&mut ebpf, "copy_waiting_stack")?;
                let copy = copy.fd().map_err(load_error)?;
                stages.set(WAIT_COPY, copy, 0).map_err(load_error)?;
            }
            all_stages.push(stages);
            // Opened now: it takes a capability, reading from it does not.
            let answer: &mut Iter = program(&mut ebpf, "answer_waiting")?;
            let link = answer.attach().and_then(|link| answer.take_link(link));
            answers = Some(link.map_err(load_error)?.into_file().map_err(load_error)?);
        }
        if wakers {
            let mut stages = take_stages(&mut ebpf, "WAKER_STAGES")?;
            let walk: &mut RawTracePoint = program(&mut ebpf, walk_waker)?;
            stages.set(0, walk.fd().map_err(load_error)?, 0).map_err(load_error)?;
            all_stages.push(stages);
        }
        if config.unwind != FRAME_POINTERS {
            attach(&mut ebpf, "note_exec", "task_rename")?;
            attach(&mut ebpf, "note_fork", "sched_process_fork")?;
        }
        if filter.ends {
            attach(&mut ebpf, "note_end", "sched_process_free")?;
        }
        if filter.follow {
            attach(&mut ebpf, "follow_fork", "sched_process_fork")?;
        }
        let read_only = |name: &str, bytes: usize| mapped(&ebpf, name, bytes, Mapped::read_only);
        let counters = read_only("COUNTERS", MAX_CPUS as usize * COUNTERS_PER_CPU as usize * 8)?;
        let pickers = read_only("PICKERS", MAX_CPUS as usize * MAX_EVENTS * size_of::<Picker>())?;
        let copy_bytes = mapped(&ebpf, "COPY_BYTES", 16, Mapped::read_write)?;
        // The first samples come before anybody looks.
        copy_bytes.atomic(OF_SAMPLES).store(MAX_COPY_BYTES as u64, Ordering::Relaxed);
        copy_bytes.atomic(OF_WAITS).store(MAX_COPY_BYTES as u64, Ordering::Relaxed);
        let known = mapped(&ebpf, "KNOWN", KNOWN_CODES as usize * 8, Mapped::read_write)?;
        let scripts = mapped(&ebpf, "HANDED_OVER", SCRIPTS as usize * 16, Mapped::read_write)?;
        let told = || mapped(&ebpf, "TOLD", TOLD_STACKS as usize * 8, Mapped::read_write);
        let told = waits.then(told).transpose()?;
        let watching = Watching::default();
        let _stages = all_stages;
        Ok(Self {
            ebpf,
            counters,
            pickers,
            copy_bytes,
            known,
            scripts,
            told,
            wakers,
            answers,
            _stages,
            watching,
        })
    }

    /// Lets samples of these processes through.
    ///
    /// # Errors
    /// When the map cannot be written.
    pub fn admit(&mut self, pids: &[u32]) -> Result<(), LoadError> {
        let targets = self.ebpf.map_mut("TARGETS").ok_or_else(|| missing("TARGETS"))?;
        let mut targets: HashMap<_, u32, u64> = targets.try_into().map_err(load_error)?;
        for pid in pids {
            // BPF_NOEXIST: of one that the kernel side has taken along it knows when it began.
            match targets.insert(pid, 0, 1) {
                Err(MapError::SyscallError(error))
                    if error.io_error.raw_os_error() == Some(libc::EEXIST) => {}
                inserted => inserted.map_err(load_error)?,
            }
        }
        Ok(())
    }

    /// Forgets processes that have ended.
    pub fn dismiss(&mut self, pids: &[u32]) {
        let Some(targets) = self.ebpf.map_mut("TARGETS") else { return };
        let Ok(mut targets) = HashMap::<_, u32, u64>::try_from(targets) else { return };
        for pid in pids {
            // It is not there where the kernel side had no room for it.
            let _ = targets.remove(pid);
        }
    }

    /// Begins to watch where threads wait.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn watch(&mut self) -> Result<(), LoadError> {
        // The switches last. Each may take seconds on a busy machine, and of a wait that ends
        // meanwhile nobody would know who ended it, or when.
        if self.wakers {
            self.watch_at("waking", "sched_waking")?;
        }
        self.watch_at("wakeup", "sched_wakeup")?;
        let switch: &mut BtfTracePoint = program(&mut self.ebpf, "switch")?;
        self.watching.switches = Some(switch.attach().map_err(load_error)?);
        Ok(())
    }

    /// Begins to add up how threads are scheduled.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn add_up(&mut self) -> Result<(), LoadError> {
        SCHEDULER.into_iter().try_for_each(|(name, tracepoint)| self.watch_at(name, tracepoint))
    }

    fn watch_at(&mut self, name: &'static str, tracepoint: &str) -> Result<(), LoadError> {
        let program: &mut RawTracePoint = program(&mut self.ebpf, name)?;
        let link = program.attach(tracepoint).map_err(load_error)?;
        self.watching.others.push((name, link));
        Ok(())
    }

    /// The sums of how threads are scheduled, the map of counters, and what runs, once.
    ///
    /// # Errors
    /// When they were taken before.
    pub fn take_sched_sums(&mut self) -> Result<(Sums, Array<MapData, u32>, Running), LoadError> {
        let running = self.ebpf.take_map("ON_CPU").ok_or_else(|| missing("ON_CPU"))?;
        let sums = self.ebpf.take_map("SCHED_STATS").ok_or_else(|| missing("SCHED_STATS"))?;
        // What is put into it are descriptors of events, which aya knows no type of map for.
        let Some(Map::PerfEventArray(places)) = self.ebpf.take_map("HARDWARE") else {
            return Err(missing("HARDWARE"));
        };
        let places = Map::Array(places).try_into().map_err(load_error)?;
        let running = running.try_into().map_err(load_error)?;
        Ok((sums.try_into().map_err(load_error)?, places, running))
    }

    /// Stops it, after the kernel side has told of the kernel stacks of threads that wait.
    pub fn stop_watching(&mut self) {
        if let Some(mut answers) = self.answers.take() {
            // What could not be asked has no kernel stack.
            let _ = io::copy(&mut answers, &mut io::sink());
        }
        // One that is not attached watches nothing.
        if let Some(link) = self.watching.switches.take() {
            let switch: Result<&mut BtfTracePoint, _> = program(&mut self.ebpf, "switch");
            let _ = switch.map(|program| program.detach(link));
        }
        for (name, link) in self.watching.others.drain(..) {
            let program: Result<&mut RawTracePoint, _> = program(&mut self.ebpf, name);
            let _ = program.map(|program| program.detach(link));
        }
    }

    /// Has at most so many bytes of a stack copied from now on.
    pub fn copy_at_most(&self, bytes: ToCopy) {
        self.copy_bytes.atomic(OF_SAMPLES).store(bytes.of_sample as u64, Ordering::Relaxed);
        self.copy_bytes.atomic(OF_WAITS).store(bytes.of_wait as u64, Ordering::Relaxed);
    }

    /// Has the kernel side hand over again what names functions of interpreters.
    pub fn name_again(&self) {
        for word in 0..KNOWN_CODES as usize {
            self.known.atomic(word * 8).store(0, Ordering::Relaxed);
        }
        for script in 0..SCRIPTS as usize {
            self.scripts.atomic(script * 16).store(0, Ordering::Relaxed);
        }
    }

    /// Has the kernel side tell of a stack again, by its number and the place it is noted in.
    pub fn forget(&self, place: u32, number: u64) {
        if let Some(told) = &self.told {
            let noted = told.atomic(place as usize * 8);
            // Another's by now, if it fails.
            let _ = noted.compare_exchange(number, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Threads that have waited, by their ids, once.
    ///
    /// # Errors
    /// When the map was taken before.
    pub fn take_waiting(&mut self) -> Result<Waiters, LoadError> {
        let map = self.ebpf.take_map("WAITING").ok_or_else(|| missing("WAITING"))?;
        map.try_into().map_err(load_error)
    }

    /// The maps of unwind tables, once.
    ///
    /// # Errors
    /// When they were taken before.
    pub fn take_tables(&mut self) -> Result<Descriptors, LoadError> {
        let mut take = |name: &str| {
            let map = self.ebpf.take_map(name).ok_or_else(|| missing(name))?;
            let Map::Array(data) = map else { return Err(missing(name)) };
            data.fd().as_fd().try_clone_to_owned().map_err(load_error)
        };
        Ok(Descriptors {
            processes: take("PROCESSES")?,
            mappings: take("MAPPINGS")?,
            executables: take("EXECUTABLES")?,
            pages: take("PAGES")?,
            rows: take("ROWS")?,
            rules: take("RULES")?,
            generation: take("GENERATION")?,
            known_files: take("KNOWN_FILES")?,
            question: take("QUESTION")?,
            pythons: take("PYTHON_LAYOUTS")?,
            rubies: take("RUBY_LAYOUTS")?,
            v8s: take("V8_LAYOUTS")?,
        })
    }

    /// The ring buffer of samples, once.
    ///
    /// # Errors
    /// When it was taken before.
    pub fn take_samples(&mut self) -> Result<RingBuf<MapData>, LoadError> {
        self.take_ring("SAMPLES")
    }

    /// The ring buffer that becomes readable when the kernel side needs what events tell, once.
    ///
    /// # Errors
    /// When it was taken before.
    pub fn take_wakeups(&mut self) -> Result<RingBuf<MapData>, LoadError> {
        self.take_ring("WAKEUPS")
    }

    fn take_ring(&mut self, name: &str) -> Result<RingBuf<MapData>, LoadError> {
        let map = self.ebpf.take_map(name).ok_or_else(|| missing(name))?;
        RingBuf::try_from(map).map_err(load_error)
    }

    /// The program that samples an event, to attach to perf events.
    ///
    /// # Errors
    /// When the object lacks it.
    pub fn sampling_program(&self, event: usize) -> Result<BorrowedFd<'_>, LoadError> {
        let name = sampling_name(event);
        let program: &PerfEventProgram = self
            .ebpf
            .program(&name)
            .and_then(|program| program.try_into().ok())
            .ok_or_else(|| missing(&name))?;
        program.fd().map(AsFd::as_fd).map_err(load_error)
    }

    /// How often an event that is counted one by one has run its program on a CPU.
    pub fn overflows(&self, cpu: u32, event: usize) -> u64 {
        let slot = cpu.min(MAX_CPUS - 1) as usize * MAX_EVENTS + event;
        let word = slot * size_of::<Picker>() + Picker::OVERFLOWS * size_of::<u64>();
        self.pickers.atomic(word).load(Ordering::Relaxed)
    }

    /// Sum of a counter over all CPUs. Takes no system call and no capability.
    #[must_use]
    pub fn counter(&self, counter: Counter) -> u64 {
        (0..MAX_CPUS)
            .map(|cpu| {
                let slot = cpu * COUNTERS_PER_CPU + counter as u32;
                self.counters.atomic(slot as usize * 8).load(Ordering::Relaxed)
            })
            .sum()
    }
}

/// Programs that add up how threads are scheduled, and at what.
const SCHEDULER: [(&str, &str); 5] = [
    ("add_up", "sched_switch"),
    ("add_up_exec", "sched_process_exec"),
    ("add_up_wakeup", "sched_wakeup"),
    ("add_up_new", "sched_wakeup_new"),
    ("add_up_migration", "sched_migrate_task"),
];

/// What aya asks of the kernel's BTF for the programs that watch where threads wait.
fn types_of_waits(kernel: &Btf<'_>) -> Result<aya::Btf, LoadError> {
    let types = [Named::typedef("btf_trace_sched_switch"), Named::function("bpf_iter_task")];
    aya::Btf::parse(&kernel.of_these(&types)?, Default::default()).map_err(load_error)
}

/// An array that the collector reads or writes without system calls.
fn mapped(
    ebpf: &Ebpf,
    name: &str,
    bytes: usize,
    map: fn(BorrowedFd<'_>, usize) -> io::Result<Mapped>,
) -> Result<Mapped, LoadError> {
    let found = ebpf.map(name).ok_or_else(|| missing(name))?;
    let Map::Array(data) = found else { return Err(missing(name)) };
    map(data.fd().as_fd(), bytes)
        .map_err(|error| LoadError::Kernel(format!("cannot map {name}: {error}")))
}

fn take_stages(ebpf: &mut Ebpf, name: &str) -> Result<ProgramArray<MapData>, LoadError> {
    ebpf.take_map(name).ok_or_else(|| missing(name))?.try_into().map_err(load_error)
}

/// What the program that samples an event is called.
fn sampling_name(event: usize) -> String {
    format!("sample_{event}")
}

/// A loader without the kernel's BTF, which none of the programs needs.
///
/// aya 0.14 reads and keeps it in any case, which takes 70 ms. On a thread that may open
/// no file it does without. aya 0.15 reads it only for programs that need it, but takes Rust 1.98.
/// Where the kernel has no seccomp, starting takes longer.
fn loader() -> EbpfLoader<'static> {
    let without = || {
        let calls = arch::OPENING_CALLS.iter().map(|&call| (call, Vec::new()));
        let refused = SeccompAction::Errno(libc::EACCES as u32);
        let filter =
            SeccompFilter::new(calls.collect(), SeccompAction::Allow, refused, arch::SECCOMP);
        let filter = filter.and_then(BpfProgram::try_from);
        let _ = filter.map(|filter| seccompiler::apply_filter(&filter));
        EbpfLoader::new()
    };
    std::thread::spawn(without).join().unwrap_or_else(|_panicked| EbpfLoader::new())
}

fn program<'a, P>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut P, LoadError>
where
    &'a mut P: TryFrom<&'a mut Program>,
{
    ebpf.program_mut(name).and_then(|program| program.try_into().ok()).ok_or_else(|| missing(name))
}

/// Loads programs, the walk beside the others: it takes the verifier three times as long as they
/// do, and no sample can be taken before.
fn verify(ebpf: &mut Ebpf, walk: &str, others: &[&str], types: &aya::Btf) -> Result<(), LoadError> {
    let (mut first, mut then) = (None, Vec::new());
    for (name, program) in ebpf.programs_mut() {
        if name == walk {
            first = Some(program);
        } else if others.contains(&name) {
            then.push(program);
        }
    }
    let first = first.ok_or_else(|| missing(walk))?;
    std::thread::scope(|scope| {
        let first = scope.spawn(|| load(first, types));
        let then = then.into_iter().try_for_each(|program| load(program, types));
        first.join().map_err(|_panicked| missing(walk))?.and(then)
    })
}

fn load(program: &mut Program, types: &aya::Btf) -> Result<(), LoadError> {
    let loaded = match program {
        Program::PerfEvent(program) => program.load(),
        Program::RawTracePoint(program) => program.load(),
        Program::BtfTracePoint(program) => program.load("sched_switch", types),
        Program::Iter(program) => program.load("task", types),
        _ => return Err(missing("program of this kind")),
    };
    loaded.map_err(load_error)
}

fn attach(ebpf: &mut Ebpf, name: &str, tracepoint: &str) -> Result<(), LoadError> {
    let program: &mut RawTracePoint = program(ebpf, name)?;
    program.attach(tracepoint).map(drop).map_err(load_error)
}
