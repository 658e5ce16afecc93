//! Loads the eBPF object into the kernel and hands out its maps and programs.
//!
//! The object is checked in; `make ebpf` rebuilds it and `tests` compare its digest with the
//! sources. Attaches nothing to perf events: `sampler/mod.rs` does.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use aya::maps::{HashMap, MapData, MapError, ProgramArray, RingBuf};
use aya::programs::raw_trace_point::RawTracePointLinkId;
use aya::programs::{PerfEvent as PerfEventProgram, Program, RawTracePoint};
use aya::{Ebpf, EbpfLoader};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use stackwire_collector_ebpf::{
    COUNTERS_PER_CPU, Config, Counter, MAX_CPUS, MAX_EVENTS, PICK, Picker, SAMPLE, TOLD_STACKS,
    Unwind, WALK, Waiting,
};
use zerocopy::IntoBytes;

use super::btf::BtfError;
use super::mapped::Mapped;
use super::offsets::{has_previous_state, offsets};
use crate::arch;
use crate::unwind::Descriptors;

const FRAME_POINTERS: u32 = Unwind::FramePointers as u32;

/// Where the kernel publishes its BTF (CONFIG_DEBUG_INFO_BTF).
pub const BTF_PATH: &str = "/sys/kernel/btf/vmlinux";

/// The programs could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No programs for this processor.
    #[error(
        "there are no eBPF programs for {} yet: record on an x86_64 host; captures are resolved anywhere", arch::MACHINE.name()
    )]
    NoObject,
    /// No BTF.
    #[error(
        "cannot read {BTF_PATH}: {0}; Stackwire needs a kernel built with CONFIG_DEBUG_INFO_BTF (any distribution kernel from 5.15 on)"
    )]
    NoBtf(std::io::Error),
    /// BTF without what is needed.
    #[error(transparent)]
    Btf(#[from] BtfError),
    /// A kernel whose tracepoint does not say why a thread leaves the CPU.
    #[error(
        "this kernel cannot tell why threads wait: its tracepoint sched_switch has no previous state; --offcpu needs kernel 5.18 or newer"
    )]
    NoPreviousState,
    /// No capability.
    #[error(
        "cannot load eBPF programs: permission denied; give the collector CAP_BPF and CAP_PERFMON (`make install` does), or run it as root"
    )]
    Denied,
    /// Lockdown.
    #[error(
        "cannot load eBPF programs: this kernel does not let eBPF read kernel memory (lockdown=confidentiality); boot with lockdown=integrity or without lockdown"
    )]
    Lockdown,
    /// Anything else the kernel or the loader said.
    #[error("cannot load eBPF programs: {0}")]
    Kernel(String),
}

/// What is to be sampled, in kernel terms.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Scope, cgroup, kernel stacks and unwinding; the offsets are filled in here.
    pub config: Config,
    /// Take children along.
    pub follow: bool,
    /// How many events are sampled.
    pub events: usize,
}

/// Threads that have waited, by their ids.
pub type Waiters = HashMap<MapData, u32, [u8; size_of::<Waiting>()]>;

/// The loaded object.
pub struct Object {
    ebpf: Ebpf,
    counters: Mapped,
    pickers: Mapped,
    /// `None`: waits are not recorded.
    told: Option<Mapped>,
    /// The kernel empties them with the last descriptor.
    _stages: Vec<ProgramArray<MapData>>,
    /// Programs that watch where threads wait, while they do.
    watching: Vec<Watching>,
}

/// A program that is attached, by its name.
struct Watching {
    name: &'static str,
    link: RawTracePointLinkId,
}

impl Object {
    /// Loads maps and programs; attaches the fork tracepoint when children are followed.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(filter: &Filter) -> Result<Self, LoadError> {
        let object = arch::OBJECT.ok_or(LoadError::NoObject)?;
        let btf = std::fs::read(BTF_PATH).map_err(LoadError::NoBtf)?;
        let (config, layout) = offsets(filter.config, &btf)?;
        if config.wait_states != 0 && !has_previous_state(&btf)? {
            return Err(LoadError::NoPreviousState);
        }
        drop(btf);
        let waits = config.wait_states != 0;
        let mut loader = loader();
        loader.override_global("CONFIG", config.as_bytes(), true).override_global(
            "LAYOUT",
            layout.as_bytes(),
            true,
        );
        if !waits {
            loader.map_max_entries("WAITING", 1).map_max_entries("TOLD", 1);
        }
        let mut ebpf = loader.load(object).map_err(load_error)?;

        let (walk, walk_waiting) = match config.unwind {
            FRAME_POINTERS => ("walk_frame_pointers", "walk_waiting_frame_pointers"),
            _ => ("walk_tables", "walk_waiting_tables"),
        };
        let sampling: Vec<String> = (0..filter.events).map(sampling_name).collect();
        let mut others: Vec<&str> = sampling.iter().map(String::as_str).collect();
        others.push("sample");
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
            others.extend(WATCHERS.map(|(name, _)| name));
            others.push(walk_waiting);
        }
        verify(&mut ebpf, walk, &others)?;
        let mut stages = take_stages(&mut ebpf, "STAGES")?;
        let pick = (config.counted != 0).then_some((PICK, "pick"));
        for (place, name) in [(SAMPLE, "sample"), (WALK, walk)].into_iter().chain(pick) {
            let program: &mut PerfEventProgram = program(&mut ebpf, name)?;
            stages.set(place, program.fd().map_err(load_error)?, 0).map_err(load_error)?;
        }
        let mut all_stages = vec![stages];
        if waits {
            let mut stages = take_stages(&mut ebpf, "WAIT_STAGES")?;
            let program: &mut RawTracePoint = program(&mut ebpf, walk_waiting)?;
            stages.set(0, program.fd().map_err(load_error)?, 0).map_err(load_error)?;
            all_stages.push(stages);
        }
        if config.unwind != FRAME_POINTERS {
            attach(&mut ebpf, "note_exec", "task_rename")?;
            attach(&mut ebpf, "note_fork", "sched_process_fork")?;
        }
        if filter.follow {
            attach(&mut ebpf, "follow_fork", "sched_process_fork")?;
        }
        let mapped = |name: &str, bytes: usize| {
            let found = ebpf.map(name).ok_or_else(|| missing(name))?;
            let aya::maps::Map::Array(data) = found else { return Err(missing(name)) };
            let fd = data.fd().as_fd();
            // The one map of these that the collector writes to.
            let map = if name == "TOLD" { Mapped::read_write } else { Mapped::read_only };
            map(fd, bytes).map_err(|error| LoadError::Kernel(format!("cannot map {name}: {error}")))
        };
        let counters = mapped("COUNTERS", MAX_CPUS as usize * COUNTERS_PER_CPU as usize * 8)?;
        let pickers = mapped("PICKERS", MAX_CPUS as usize * MAX_EVENTS * size_of::<Picker>())?;
        let told = waits.then(|| mapped("TOLD", TOLD_STACKS as usize * 8)).transpose()?;
        Ok(Self { ebpf, counters, pickers, told, _stages: all_stages, watching: Vec::new() })
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

    /// Begins to watch where threads wait.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn watch(&mut self) -> Result<(), LoadError> {
        for (name, tracepoint) in WATCHERS {
            let program: &mut RawTracePoint = program(&mut self.ebpf, name)?;
            let link = program.attach(tracepoint).map_err(load_error)?;
            self.watching.push(Watching { name, link });
        }
        Ok(())
    }

    /// Stops it.
    pub fn stop_watching(&mut self) {
        for Watching { name, link } in self.watching.drain(..) {
            let program: Result<&mut RawTracePoint, _> = program(&mut self.ebpf, name);
            // One that is not attached watches nothing.
            let _ = program.map(|program| program.detach(link));
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
            let aya::maps::Map::Array(data) = map else { return Err(missing(name)) };
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

/// Programs that watch where threads wait, and at what.
const WATCHERS: [(&str, &str); 2] = [("switch", "sched_switch"), ("wakeup", "sched_wakeup")];

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
fn verify(ebpf: &mut Ebpf, walk: &str, others: &[&str]) -> Result<(), LoadError> {
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
        let first = scope.spawn(|| load(first));
        let then = then.into_iter().try_for_each(load);
        first.join().map_err(|_panicked| missing(walk))?.and(then)
    })
}

/// Raw tracepoints: those with BTF would have aya read the kernel's.
fn load(program: &mut Program) -> Result<(), LoadError> {
    let loaded = match program {
        Program::PerfEvent(program) => program.load(),
        Program::RawTracePoint(program) => program.load(),
        _ => return Err(missing("program of this kind")),
    };
    loaded.map_err(load_error)
}

fn attach(ebpf: &mut Ebpf, name: &str, tracepoint: &str) -> Result<(), LoadError> {
    let program: &mut RawTracePoint = program(ebpf, name)?;
    program.attach(tracepoint).map(drop).map_err(load_error)
}

fn missing(what: &str) -> LoadError {
    LoadError::Kernel(format!("the object has no {what}; it was not built from these sources"))
}

/// Tells "not allowed" from everything else, and keeps every cause in the text.
fn load_error(error: impl std::error::Error + 'static) -> LoadError {
    let mut text = error.to_string();
    let mut denied = false;
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            denied |= io.kind() == std::io::ErrorKind::PermissionDenied;
        }
        let part = error.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    let lockdown = std::fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    refusal(&text, denied, &lockdown)
}

/// What a refusal means, where `lockdown` is the state of the kernel's lockdown. Pure.
fn refusal(text: &str, denied: bool, lockdown: &str) -> LoadError {
    // The verifier then knows no helper that reads kernel memory, and names the one it was asked
    // for.
    if lockdown.contains("[confidentiality]") || text.contains("bpf_probe_read#") {
        return LoadError::Lockdown;
    }
    if denied {
        return LoadError::Denied;
    }
    // Of a verifier's log the last lines say what is wrong.
    let lines: Vec<&str> = text.lines().collect();
    match lines.as_slice() {
        [first, .., a, b, c, d] => LoadError::Kernel([*first, "…", *a, *b, *c, *d].join("\n")),
        _ => LoadError::Kernel(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_do() {
        let said = |text, denied, lockdown| refusal(text, denied, lockdown).to_string();
        let open = "[none] integrity confidentiality\n";
        let locked = "none integrity [confidentiality]\n";
        assert!(said("x", true, open).contains("give the collector CAP_BPF and CAP_PERFMON"));
        assert!(said("x", true, locked).contains("boot with lockdown=integrity"));
        // As kernel 6.1 puts it where securityfs is not mounted.
        let verifier = "unknown func bpf_probe_read#4";
        assert!(said(verifier, false, "").contains("boot with lockdown=integrity"));
        assert!(said("1\n2\n3\n4\n5\n6", false, open).ends_with("1\n…\n3\n4\n5\n6"));
    }
}
