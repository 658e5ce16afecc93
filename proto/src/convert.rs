//! Words of the model on the wire, in both directions. Nothing else converts them.

use stackwire_model::profile::Moment;
use stackwire_model::sched::{CounterSum, Histogram, PerfCounter, SchedStats, Switches};
use stackwire_model::{
    BuildId, Code, Device, EndReason, Event, ExecutableKey, FileId, ListEnd, LostReason, NoBpf,
    PerfType, PythonOutcome, Runtime, Text, ValueKind, Wait, WaitState,
};

use crate::v1;

/// Most counters that are read from the wire.
const MAX_COUNTERS: usize = 32;

/// A build-id as it travels: no bytes where there is none.
#[must_use]
pub fn build_id_to_wire(id: Option<BuildId>) -> Vec<u8> {
    id.map_or(Vec::new(), |id| id.as_bytes().to_vec())
}

/// A file as it travels: inode 0 where it is not known.
fn file_to_wire(file: Option<FileId>) -> (u64, Device) {
    file.map_or_else(Default::default, |file| (file.inode(), file.device()))
}

impl v1::FileIdentity {
    /// The file that is meant, if the message names one. Bytes that are no build-id are ignored.
    /// Linkers write any bytes they are told to write, and the file of one process must not cost
    /// all others their epoch.
    #[must_use]
    pub fn key(&self) -> Option<ExecutableKey> {
        let device = Device { major: self.device_major, minor: self.device_minor };
        ExecutableKey::of(BuildId::new(&self.build_id), FileId::new(self.inode, device))
    }
}

impl From<ExecutableKey> for v1::FileIdentity {
    fn from(key: ExecutableKey) -> Self {
        let (inode, device) = file_to_wire(key.file());
        Self {
            build_id: build_id_to_wire(key.build_id()),
            inode,
            device_major: device.major,
            device_minor: device.minor,
        }
    }
}

impl v1::Executable {
    /// By what it is known, if by more than its path; see [`v1::FileIdentity::key`].
    #[must_use]
    pub fn key(&self) -> Option<ExecutableKey> {
        let device = Device { major: self.device_major, minor: self.device_minor };
        ExecutableKey::of(BuildId::new(&self.build_id), FileId::new(self.inode, device))
    }

    /// Says by what it is known.
    pub fn set_key(&mut self, key: Option<ExecutableKey>) {
        let (inode, device) = file_to_wire(key.and_then(ExecutableKey::file));
        self.build_id = build_id_to_wire(key.and_then(ExecutableKey::build_id));
        self.inode = inode;
        (self.device_major, self.device_minor) = (device.major, device.minor);
    }
}

impl From<&Code> for v1::Code {
    fn from(code: &Code) -> Self {
        let (runtime, version) = match code.runtime {
            Runtime::Cpython(version) => (v1::Runtime::Cpython, version),
            Runtime::Ruby(version) => (v1::Runtime::Ruby, version),
            Runtime::V8(version) => (v1::Runtime::V8, version),
        };
        let text = |text: &Text| v1::Text {
            characters: text.bytes.clone(),
            width: text.width.into(),
            cut: text.is_cut,
        };
        Self {
            runtime: runtime.into(),
            version,
            name: Some(text(&code.name)),
            path: Some(text(&code.path)),
            first_line: code.first_line,
            lines: code.lines.clone(),
        }
    }
}

impl From<&v1::Code> for Option<Code> {
    /// None: of a run-time that is not known.
    fn from(wire: &v1::Code) -> Self {
        let text = |text: &Option<v1::Text>| {
            text.as_ref().map_or_else(Text::default, |text| Text {
                bytes: text.characters.clone(),
                width: u8::try_from(text.width).unwrap_or(0),
                is_cut: text.cut,
            })
        };
        let runtime = match wire.runtime() {
            v1::Runtime::Cpython => Runtime::Cpython(wire.version),
            v1::Runtime::Ruby => Runtime::Ruby(wire.version),
            v1::Runtime::V8 => Runtime::V8(wire.version),
            v1::Runtime::Unspecified => return None,
        };
        let (name, path) = (text(&wire.name), text(&wire.path));
        let (first_line, lines) = (wire.first_line, wire.lines.clone());
        Some(Code { runtime, name, path, first_line, lines })
    }
}

impl v1::Sampling {
    /// What made the kernel take samples. Format 1 has one event, by its name.
    #[must_use]
    pub fn all_events(&self) -> Vec<Event> {
        match self.events.as_slice() {
            [] => vec![Event::by_name(&self.event)],
            events => events.iter().map(Event::from).collect(),
        }
    }
}

impl From<&Event> for v1::Event {
    fn from(event: &Event) -> Self {
        let perf = event.perf.map(|perf| v1::PerfType { r#type: perf.kind, config: perf.config });
        let ValueKind { kind, unit } = event.weight.clone();
        Self { name: event.name.clone(), kind, unit, perf, wait: event.is_wait }
    }
}

impl From<&v1::Event> for Event {
    fn from(event: &v1::Event) -> Self {
        let perf = event.perf.map(|perf| PerfType { kind: perf.r#type, config: perf.config });
        let weight = ValueKind { kind: event.kind.clone(), unit: event.unit.clone() };
        Self { name: event.name.clone(), weight, perf, is_wait: event.wait }
    }
}

impl From<NoBpf> for v1::NoBpf {
    fn from(why: NoBpf) -> Self {
        match why {
            NoBpf::Denied => Self::Denied,
            NoBpf::Lockdown => Self::Lockdown,
            NoBpf::NoBtf => Self::NoBtf,
            NoBpf::NoPrograms => Self::NoPrograms,
            NoBpf::PidNamespace => Self::PidNamespace,
            NoBpf::Kernel => Self::Kernel,
            NoBpf::NotAsked => Self::NotAsked,
        }
    }
}

/// None: samples were taken with eBPF.
impl From<v1::NoBpf> for Option<NoBpf> {
    fn from(why: v1::NoBpf) -> Self {
        Some(match why {
            v1::NoBpf::Unspecified => return None,
            v1::NoBpf::Denied => NoBpf::Denied,
            v1::NoBpf::Lockdown => NoBpf::Lockdown,
            v1::NoBpf::NoBtf => NoBpf::NoBtf,
            v1::NoBpf::NoPrograms => NoBpf::NoPrograms,
            v1::NoBpf::PidNamespace => NoBpf::PidNamespace,
            v1::NoBpf::Kernel => NoBpf::Kernel,
            v1::NoBpf::NotAsked => NoBpf::NotAsked,
        })
    }
}

impl From<EndReason> for v1::EndReason {
    fn from(reason: EndReason) -> Self {
        match reason {
            EndReason::Root => Self::Root,
            EndReason::Unreadable => Self::Unreadable,
            EndReason::DepthLimit => Self::DepthLimit,
            EndReason::NoFramePointer => Self::NoFramePointer,
            EndReason::NotCode => Self::NotCode,
            EndReason::Compat => Self::Compat,
            EndReason::Failed => Self::Failed,
            EndReason::NoMappings => Self::NoMappings,
            EndReason::NoTableYet => Self::NoTableYet,
            EndReason::NoTable => Self::NoTable,
            EndReason::NoUnwindRule => Self::NoUnwindRule,
            EndReason::RegisterLost => Self::RegisterLost,
            EndReason::BadStack => Self::BadStack,
            EndReason::NoMappingsYet => Self::NoMappingsYet,
            EndReason::TablesReplaced => Self::TablesReplaced,
            EndReason::UnknownSwitch => Self::UnknownSwitch,
            EndReason::OverShare => Self::OverShare,
            EndReason::CopyEnded => Self::CopyEnded,
            EndReason::NotCopied => Self::NotCopied,
            EndReason::NotSaid => Self::NotSaid,
            EndReason::Other => Self::Unspecified,
        }
    }
}

/// One this version does not know is `Other`.
impl From<v1::EndReason> for EndReason {
    fn from(reason: v1::EndReason) -> Self {
        match reason {
            v1::EndReason::Root => Self::Root,
            v1::EndReason::Unreadable => Self::Unreadable,
            v1::EndReason::DepthLimit => Self::DepthLimit,
            v1::EndReason::NoFramePointer => Self::NoFramePointer,
            v1::EndReason::NotCode => Self::NotCode,
            v1::EndReason::Compat => Self::Compat,
            v1::EndReason::Failed => Self::Failed,
            v1::EndReason::NoMappings => Self::NoMappings,
            v1::EndReason::NoTableYet => Self::NoTableYet,
            v1::EndReason::NoTable => Self::NoTable,
            v1::EndReason::NoUnwindRule => Self::NoUnwindRule,
            v1::EndReason::RegisterLost => Self::RegisterLost,
            v1::EndReason::BadStack => Self::BadStack,
            v1::EndReason::NoMappingsYet => Self::NoMappingsYet,
            v1::EndReason::TablesReplaced => Self::TablesReplaced,
            v1::EndReason::UnknownSwitch => Self::UnknownSwitch,
            v1::EndReason::OverShare => Self::OverShare,
            v1::EndReason::CopyEnded => Self::CopyEnded,
            v1::EndReason::NotCopied => Self::NotCopied,
            v1::EndReason::NotSaid => Self::NotSaid,
            v1::EndReason::Unspecified => Self::Other,
        }
    }
}

impl From<ListEnd> for v1::ListEnd {
    fn from(end: ListEnd) -> Self {
        match end {
            ListEnd::Root => Self::Root,
            ListEnd::Unreadable => Self::Unreadable,
            ListEnd::DepthLimit => Self::DepthLimit,
            ListEnd::ManyThreads => Self::ManyThreads,
            ListEnd::Changing => Self::Changing,
            ListEnd::RingFull => Self::RingFull,
            ListEnd::NoPlace => Self::NoPlace,
            ListEnd::Other => Self::Unspecified,
        }
    }
}

/// One this version does not know is `Other`.
impl From<v1::ListEnd> for ListEnd {
    fn from(end: v1::ListEnd) -> Self {
        match end {
            v1::ListEnd::Root => Self::Root,
            v1::ListEnd::Unreadable => Self::Unreadable,
            v1::ListEnd::DepthLimit => Self::DepthLimit,
            v1::ListEnd::ManyThreads => Self::ManyThreads,
            v1::ListEnd::Changing => Self::Changing,
            v1::ListEnd::RingFull => Self::RingFull,
            v1::ListEnd::NoPlace => Self::NoPlace,
            v1::ListEnd::Unspecified => Self::Other,
        }
    }
}

impl From<LostReason> for v1::LostReason {
    fn from(reason: LostReason) -> Self {
        match reason {
            LostReason::RingFull => Self::RingFull,
            LostReason::NoScratch => Self::NoScratch,
            LostReason::EpochDropped => Self::EpochDropped,
            LostReason::MalformedRecord => Self::MalformedRecord,
            LostReason::Events => Self::Events,
            LostReason::Throttled => Self::Throttled,
            LostReason::TargetsFull => Self::TargetsFull,
            LostReason::CpuRefused => Self::CpuRefused,
            LostReason::WaitsRingFull => Self::WaitsRingFull,
            LostReason::WaitsRingFullNs => Self::WaitsRingFullNs,
            LostReason::ThreadsFull => Self::ThreadsFull,
            LostReason::WaitStacks => Self::WaitStacks,
            LostReason::WaitsUnseen => Self::WaitsUnseen,
            LostReason::WaitsUnseenNs => Self::WaitsUnseenNs,
            LostReason::OutsideNamespace => Self::OutsideNamespace,
            LostReason::Other => Self::Unspecified,
        }
    }
}

/// One this version does not know is `Other`.
impl From<v1::LostReason> for LostReason {
    fn from(reason: v1::LostReason) -> Self {
        match reason {
            v1::LostReason::RingFull => Self::RingFull,
            v1::LostReason::NoScratch => Self::NoScratch,
            v1::LostReason::EpochDropped => Self::EpochDropped,
            v1::LostReason::MalformedRecord => Self::MalformedRecord,
            v1::LostReason::Events => Self::Events,
            v1::LostReason::Throttled => Self::Throttled,
            v1::LostReason::TargetsFull => Self::TargetsFull,
            v1::LostReason::CpuRefused => Self::CpuRefused,
            v1::LostReason::WaitsRingFull => Self::WaitsRingFull,
            v1::LostReason::WaitsRingFullNs => Self::WaitsRingFullNs,
            v1::LostReason::ThreadsFull => Self::ThreadsFull,
            v1::LostReason::WaitStacks => Self::WaitStacks,
            v1::LostReason::WaitsUnseen => Self::WaitsUnseen,
            v1::LostReason::WaitsUnseenNs => Self::WaitsUnseenNs,
            v1::LostReason::OutsideNamespace => Self::OutsideNamespace,
            v1::LostReason::Unspecified => Self::Other,
        }
    }
}

/// Each outcome as it is on the wire.
const PYTHON: [(PythonOutcome, v1::PythonOutcome); 22] = [
    (PythonOutcome::Activated, v1::PythonOutcome::Activated),
    (PythonOutcome::WasActive, v1::PythonOutcome::WasActive),
    (PythonOutcome::Waiting, v1::PythonOutcome::Waiting),
    (PythonOutcome::Refused, v1::PythonOutcome::Refused),
    (PythonOutcome::TooOld, v1::PythonOutcome::TooOld),
    (PythonOutcome::Unknown, v1::PythonOutcome::Unknown),
    (PythonOutcome::Traced, v1::PythonOutcome::Traced),
    (PythonOutcome::Denied, v1::PythonOutcome::Denied),
    (PythonOutcome::Stopped, v1::PythonOutcome::Stopped),
    (PythonOutcome::NoSafePoint, v1::PythonOutcome::NoSafePoint),
    (PythonOutcome::NoMemory, v1::PythonOutcome::NoMemory),
    (PythonOutcome::NoScript, v1::PythonOutcome::NoScript),
    (PythonOutcome::Broken, v1::PythonOutcome::Broken),
    (PythonOutcome::Spent, v1::PythonOutcome::Spent),
    (PythonOutcome::Unresponsive, v1::PythonOutcome::Unresponsive),
    (PythonOutcome::Machine, v1::PythonOutcome::Machine),
    (PythonOutcome::Ended, v1::PythonOutcome::Ended),
    (PythonOutcome::Lost, v1::PythonOutcome::Lost),
    (PythonOutcome::TooMany, v1::PythonOutcome::TooMany),
    (PythonOutcome::LeftOn, v1::PythonOutcome::LeftOn),
    (PythonOutcome::Sandboxed, v1::PythonOutcome::Sandboxed),
    (PythonOutcome::NoMap, v1::PythonOutcome::NoMap),
];

impl From<PythonOutcome> for v1::PythonOutcome {
    fn from(outcome: PythonOutcome) -> Self {
        PYTHON.iter().find(|(it, _)| *it == outcome).map_or(Self::Unspecified, |&(_, wire)| wire)
    }
}

/// One this version does not know is none.
impl From<v1::PythonOutcome> for Option<PythonOutcome> {
    fn from(wire: v1::PythonOutcome) -> Self {
        PYTHON.iter().find(|(_, it)| *it == wire).map(|&(outcome, _)| outcome)
    }
}

impl From<WaitState> for v1::WaitState {
    fn from(state: WaitState) -> Self {
        match state {
            WaitState::Sleep => Self::Sleep,
            WaitState::Disk => Self::Disk,
            WaitState::Stopped => Self::Stopped,
            WaitState::Preempted => Self::Preempted,
        }
    }
}

/// One this version does not know is none.
impl From<v1::WaitState> for Option<WaitState> {
    fn from(state: v1::WaitState) -> Self {
        match state {
            v1::WaitState::Sleep => Some(WaitState::Sleep),
            v1::WaitState::Disk => Some(WaitState::Disk),
            v1::WaitState::Stopped => Some(WaitState::Stopped),
            v1::WaitState::Preempted => Some(WaitState::Preempted),
            v1::WaitState::Unspecified => None,
        }
    }
}

/// Which part of a wait a capture saw.
impl From<Wait> for v1::WaitOpen {
    fn from(wait: Wait) -> Self {
        match (wait.began_before, wait.goes_on) {
            (false, false) => Self::Unspecified,
            (true, false) => Self::BeganBefore,
            (false, true) => Self::GoesOn,
            (true, true) => Self::Both,
        }
    }
}

impl From<&PerfCounter> for v1::Counter {
    fn from(counter: &PerfCounter) -> Self {
        Self { name: counter.name.clone(), missing: counter.missing.clone().unwrap_or_default() }
    }
}

impl From<&v1::Counter> for PerfCounter {
    fn from(wire: &v1::Counter) -> Self {
        let missing = (!wire.missing.is_empty()).then(|| wire.missing.clone());
        Self { name: wire.name.clone(), missing }
    }
}

impl From<&Histogram> for v1::Times {
    fn from(times: &Histogram) -> Self {
        let mut wire = Self { sum_ns: times.sum_ns(), ..Self::default() };
        let mut before = 0;
        for (bucket, count) in times.buckets() {
            wire.bucket_delta.push(u32::from(bucket) - before);
            wire.count.push(count);
            before = bucket.into();
        }
        wire
    }
}

/// What is in a bucket there is not is dropped.
impl From<&v1::Times> for Histogram {
    fn from(wire: &v1::Times) -> Self {
        let mut bucket = 0u32;
        let buckets = wire.bucket_delta.iter().zip(&wire.count).filter_map(|(delta, &count)| {
            bucket = bucket.saturating_add(*delta);
            Some((u16::try_from(bucket).ok()?, count))
        });
        Self::new(wire.sum_ns, buckets)
    }
}

/// Whom they are of is to be filled in.
impl From<&SchedStats> for v1::SchedStats {
    fn from(stats: &SchedStats) -> Self {
        let Switches { preempted, voluntary, io, stopped, exited } = stats.switches;
        let counter = |sum: &CounterSum| v1::CounterSum {
            value: sum.value,
            enabled_ns: sum.enabled_ns,
            running_ns: sum.running_ns,
        };
        Self {
            slices: Some((&stats.slices).into()),
            run_queue: Some((&stats.run_queue).into()),
            preempted,
            voluntary,
            io,
            stopped,
            exited,
            migrations: stats.migrations,
            counters: stats.counters.iter().map(counter).collect(),
            ..Self::default()
        }
    }
}

impl From<&v1::SchedStats> for SchedStats {
    fn from(wire: &v1::SchedStats) -> Self {
        let times = |wire: &Option<v1::Times>| wire.as_ref().map(Into::into).unwrap_or_default();
        let &v1::SchedStats { preempted, voluntary, io, stopped, exited, .. } = wire;
        let counter = |wire: &v1::CounterSum| CounterSum {
            value: wire.value,
            enabled_ns: wire.enabled_ns,
            running_ns: wire.running_ns,
        };
        Self {
            slices: times(&wire.slices),
            run_queue: times(&wire.run_queue),
            switches: Switches { preempted, voluntary, io, stopped, exited },
            migrations: wire.migrations,
            counters: wire.counters.iter().take(MAX_COUNTERS).map(counter).collect(),
        }
    }
}

impl v1::Samples {
    /// How many events a sample stands for, at most [`Moment::MOST_EVENTS`]: sums of them fit.
    #[must_use]
    pub fn events(&self, index: usize) -> u64 {
        let count = self.count.get(index).or(self.count.first()).copied().unwrap_or(1);
        count.min(Moment::MOST_EVENTS)
    }

    /// The wait a sample is of, if it is of one.
    #[must_use]
    pub fn wait(&self, index: usize) -> Option<Wait> {
        let at = |column: &[i32]| column.get(index).or(column.first()).copied().unwrap_or(0);
        let state = v1::WaitState::try_from(at(&self.wait_state)).ok()?;
        let open = v1::WaitOpen::try_from(at(&self.wait_open)).unwrap_or_default();
        let both = open == v1::WaitOpen::Both;
        Some(Wait {
            state: Option::from(state)?,
            began_before: both || open == v1::WaitOpen::BeganBefore,
            goes_on: both || open == v1::WaitOpen::GoesOn,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_their_way() {
        let device = Device { major: 254, minor: 1 };
        let of_file = FileId::new(7, device).unwrap();
        for key in [BuildId::new(&[7; 20]).unwrap().into(), of_file.into()] {
            assert_eq!(v1::FileIdentity::from(key).key(), Some(key));
            let mut executable = v1::Executable::default();
            assert_eq!(executable.key(), None);
            executable.set_key(Some(key));
            assert_eq!(executable.key(), Some(key));
            executable.set_key(None);
            assert_eq!(executable, v1::Executable::default());
        }
    }

    #[test]
    fn events_survive_their_way_and_format_1_has_one() {
        for named in stackwire_model::perf_events::all() {
            let event = Event::by_name(&named.name);
            assert_eq!(Event::from(&v1::Event::from(&event)), event);
        }
        let old = v1::Sampling { event: "cycles".to_owned(), ..Default::default() };
        assert_eq!(old.all_events(), [Event::by_name("cycles")]);
        let none = Event { name: "sched:x".to_owned(), perf: None, ..Event::default() };
        let new = v1::Sampling { events: vec![(&none).into()], ..old };
        assert_eq!(new.all_events(), [none]);
    }

    #[test]
    fn bytes_that_are_no_build_id_leave_the_file() {
        let device = Device { major: 254, minor: 1 };
        let file: ExecutableKey = FileId::new(7, device).unwrap().into();
        for odd in [1, 3, 33, 200] {
            let build_id = vec![1; odd];
            let short = v1::FileIdentity { build_id: build_id.clone(), ..Default::default() };
            assert_eq!(short.key(), None);
            let also = v1::FileIdentity { build_id, ..file.into() };
            assert_eq!(also.key(), Some(file));
        }
    }
}
