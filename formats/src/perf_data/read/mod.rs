//! perf.data of perf itself: file or pipe, chains by frame pointers or copies of stacks, which are
//! walked here. Each event is a series.
//!
//! The crate that reads the records trusts sizes in them: `guard.rs` looks at those first.

mod chain;
mod deferred;
mod executables;
mod guard;
mod kernel;
mod series;
mod stack_copy;

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::ops::Range;

use linux_perf_data::linux_perf_event_reader::{
    AttrFlags, CpuMode, EventRecord, Mmap2FileId, RawData, SampleFormat, SampleRecord,
};
use linux_perf_data::{
    AttributeDescription, Endianness, PerfFile, PerfFileReader, PerfFileRecord, PerfRecordIter,
};
use rustc_hash::FxHashMap;
use stackwire_model::profile::{
    Builder, EndReason, Executable, FrameKind, LostReason, Origin, ProcessId, SampleKey, SeriesId,
    StackId, Taken,
};
use stackwire_model::{FileOffset, KernelAddr, Machine, UserAddr};
use stackwire_unwind::MACHINE;

use self::chain::Chain;
use self::deferred::{CALLCHAIN_DEFERRED, Deferred, Known};
use self::executables::Executables;
use self::kernel::Kernel;
use self::series::Sampled;
use self::stack_copy::{Copied, Walker};
use crate::tasks::{Map, TaskId, Tasks};
use crate::{Host, ReadError};

/// Reads a file, which may be one that was written to a pipe.
///
/// # Errors
/// What cannot be a perf.data, or is none of x86-64 or arm64, little-endian. A file that is cut is
/// read as far as it goes.
pub fn read(
    mut file: File,
    into: &mut Builder,
    number: usize,
    host: &mut dyn Host,
) -> Result<(), ReadError> {
    let pipe = guard::check(&mut file)?;
    let modified = file.metadata().and_then(|metadata| metadata.modified()).ok();
    file.rewind()?;
    let input = BufReader::with_capacity(1 << 18, file);
    let error = |error: linux_perf_data::Error| ReadError::PerfData(error.to_string());
    if pipe {
        let PerfFileReader { perf_file, record_iter } =
            PerfFileReader::parse_pipe(input).map_err(error)?;
        Reader::new(perf_file, modified, into, host)?.run(record_iter, number)
    } else {
        let PerfFileReader { perf_file, record_iter } =
            PerfFileReader::parse_file(input).map_err(error)?;
        Reader::new(perf_file, modified, into, host)?.run(record_iter, number)
    }
}

struct Reader<'a> {
    file: PerfFile,
    into: &'a mut Builder,
    host: &'a mut dyn Host,
    tasks: Tasks,
    kernel: Kernel,
    walker: Walker,
    deferred: Deferred,
    executables: Executables,
    /// By index of the event: its series, and what samples weigh that do not say.
    series: FxHashMap<usize, (SeriesId, u64)>,
    undecoded: u64,
    taken: u64,
    lost: u64,
    span: Option<(u64, u64)>,
    modified: Option<std::time::SystemTime>,
    /// Processes that ran code they made themselves, once they were looked at.
    jits: rustc_hash::FxHashSet<u32>,
    /// Copied stacks are walked where there are rules for it.
    machine: Machine,
}

impl<'a> Reader<'a> {
    fn new(
        file: PerfFile,
        modified: Option<std::time::SystemTime>,
        into: &'a mut Builder,
        host: &'a mut dyn Host,
    ) -> Result<Self, ReadError> {
        if file.endian() != Endianness::LittleEndian {
            return Err(ReadError::PerfData("it is of a big-endian host".to_owned()));
        }
        let arch = file.arch().ok().flatten().unwrap_or(Machine::X86_64.name());
        let Some(machine) = Machine::of_name(arch) else {
            let message = format!("it is of {arch}: only x86_64 and aarch64 are read");
            return Err(ReadError::PerfData(message));
        };
        if file
            .event_attributes()
            .iter()
            .any(|attr| attr.attr.sample_format.contains(SampleFormat::READ))
        {
            let message =
                "its samples hold counter values (perf record of a group with :S): not read";
            return Err(ReadError::PerfData(message.to_owned()));
        }
        let copies = |attr: &AttributeDescription| {
            attr.attr.sample_format.contains(SampleFormat::STACK_USER)
        };
        if machine != MACHINE && file.event_attributes().iter().any(copies) {
            into.note(format!(
                "copies of stacks of {arch} are not walked: user stacks are one frame"
            ));
        }
        Ok(Self {
            executables: Executables::of(&file),
            file,
            into,
            host,
            tasks: Tasks::default(),
            kernel: Kernel::default(),
            walker: Walker::default(),
            deferred: Deferred::default(),
            series: FxHashMap::default(),
            undecoded: 0,
            taken: 0,
            lost: 0,
            span: None,
            modified,
            jits: rustc_hash::FxHashSet::default(),
            machine,
        })
    }

    fn run<R: Read>(
        mut self,
        mut records: PerfRecordIter<R>,
        number: usize,
    ) -> Result<(), ReadError> {
        // Numbers of processes are those of this file.
        self.into.capture(number, self.origin(), 0);
        self.begin_series()?;
        loop {
            match records.next_record(&mut self.file) {
                Ok(Some(PerfFileRecord::EventRecord { attr_index, record })) => {
                    let time = record.timestamp();
                    let misc = record.misc;
                    let kind = record.record_type;
                    match guard::decodes(&record).then(|| record.parse()) {
                        Some(Ok(EventRecord::Raw(raw))) => self.raw(kind.0, raw.data)?,
                        Some(Ok(parsed)) => self.record(parsed, attr_index, misc, time)?,
                        Some(Err(_)) | None => self.undecoded += 1,
                    }
                }
                Ok(Some(PerfFileRecord::UserRecord(_))) => {}
                Ok(None) => break,
                Err(error) => {
                    self.into.note(format!("the perf.data is cut or damaged: {error}"));
                    break;
                }
            }
        }
        self.add_without_their_stacks()?;
        self.finish();
        Ok(())
    }

    fn origin(&self) -> Origin {
        let text = |found: Result<Option<&str>, linux_perf_data::Error>| {
            found.ok().flatten().unwrap_or_default().to_owned()
        };
        let kernel = |it: &AttributeDescription| !it.attr.flags.contains(AttrFlags::EXCLUDE_KERNEL);
        let cpus = self.file.nr_cpus().ok().flatten();
        Origin {
            hostname: text(self.file.hostname()),
            kernel_release: text(self.file.os_release()),
            machine: text(self.file.arch()),
            all_processes: false,
            kernel_stacks: self.file.event_attributes().iter().any(kernel),
            perf_events: true,
            collector: String::new(),
            cpus: cpus.map_or((0, 0), |cpus| (cpus.nr_cpus_available, cpus.nr_cpus_online)),
            cpu_id: text(self.file.cpu_id()),
            cpu_description: text(self.file.cpu_desc()),
        }
    }

    fn record(
        &mut self,
        record: EventRecord<'_>,
        attr_index: usize,
        misc: u16,
        time: Option<u64>,
    ) -> Result<(), ReadError> {
        /// `PERF_RECORD_MISC_MMAP_DATA`: not of code.
        const MMAP_DATA: u16 = 1 << 13;
        match record {
            EventRecord::Sample(sample) => self.sample(&sample, attr_index, time)?,
            EventRecord::Comm(comm) => {
                let name = text(comm.name);
                self.tasks.comm(
                    self.into,
                    TaskId { pid: comm.pid as u32, tid: comm.tid as u32 },
                    name,
                    comm.is_execve,
                )?;
            }
            EventRecord::Fork(fork) => self.tasks.fork(
                self.into,
                TaskId { pid: fork.pid as u32, tid: fork.tid as u32 },
                TaskId { pid: fork.ppid as u32, tid: fork.ptid as u32 },
            )?,
            EventRecord::Mmap(map) if map.pid == -1 || map.cpu_mode == CpuMode::Kernel => {
                let path = text(map.path);
                let start = KernelAddr(map.address);
                let range = start..start.saturating_add(map.length);
                self.kernel.map(&path, range, KernelAddr(map.page_offset));
            }
            EventRecord::Mmap2(map) if map.pid == -1 || map.cpu_mode == CpuMode::Kernel => {
                let path = text(map.path);
                if let Mmap2FileId::BuildId(id) = &map.file_id {
                    self.executables.learn_of_kernel(&path, id);
                }
                let start = KernelAddr(map.address);
                let range = start..start.saturating_add(map.length);
                self.kernel.map(&path, range, KernelAddr(map.page_offset));
            }
            EventRecord::Mmap(map) if misc & MMAP_DATA == 0 => {
                let (range, offset) = mapped(map.address, map.length, map.page_offset);
                self.map(map.pid as u32, range, offset, &text(map.path), None, time)?;
            }
            EventRecord::Mmap2(map) if misc & MMAP_DATA == 0 => {
                let (range, offset) = mapped(map.address, map.length, map.page_offset);
                let id = Some(map.file_id);
                self.map(map.pid as u32, range, offset, &text(map.path), id, time)?;
            }
            EventRecord::Lost(lost) => self.lost = self.lost.saturating_add(lost.count),
            _ => {}
        }
        Ok(())
    }

    /// Records the crate has no type for.
    fn raw(&mut self, kind: u32, mut data: RawData<'_>) -> Result<(), ReadError> {
        /// `PERF_RECORD_LOST_SAMPLES`: how many.
        const LOST_SAMPLES: u32 = 13;
        let mut next = || data.read_u64::<byteorder::LittleEndian>();
        match kind {
            LOST_SAMPLES => self.lost = self.lost.saturating_add(next().unwrap_or(0)),
            CALLCHAIN_DEFERRED => {
                let (Ok(cookie), Ok(count)) = (next(), next()) else {
                    self.undecoded += 1;
                    return Ok(());
                };
                let chain = Chain::brought((0..count).map_while(|_| next().ok()));
                for sample in self.deferred.take(cookie) {
                    self.add(sample, &chain.user, EndReason::NotSaid)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn map(
        &mut self,
        pid: u32,
        range: Range<UserAddr>,
        file_offset: FileOffset,
        path: &str,
        id: Option<Mmap2FileId>,
        time: Option<u64>,
    ) -> Result<(), ReadError> {
        let since = time.unwrap_or(0);
        if range.is_empty() {
            return Ok(());
        }
        let executable = self.executables.at(path, id.as_ref(), self.host);
        let private = matches!(executable, Executable::Anonymous);
        let executable = self.into.executable(executable)?;
        self.tasks.map(
            self.into,
            pid,
            Map { start: range.start, end: range.end, file_offset, executable, private, since },
        )?;
        Ok(())
    }

    fn sample(
        &mut self,
        sample: &SampleRecord<'_>,
        attr_index: usize,
        time: Option<u64>,
    ) -> Result<(), ReadError> {
        let Some(&(series, period)) = self.series.get(&attr_index) else {
            self.undecoded += 1;
            return Ok(());
        };
        let pid = sample.pid.unwrap_or(0) as u32;
        let tid = sample.tid.unwrap_or(0) as u32;
        let (thread, process) = self.tasks.thread(self.into, TaskId { pid, tid })?;
        let mut chain = Chain::of(sample);
        let end = self.walk_copy(sample, pid, &mut chain);
        let Chain { kernel, user, deferred } = chain;
        let kernel = self.kernel_stack(&kernel)?;
        if let Some(time) = time {
            let (first, last) = self.span.unwrap_or((time, time));
            self.span = Some((first.min(time), last.max(time)));
        }
        let key = SampleKey { series, thread, user: None, kernel, labels: 0 };
        let value = sample.period.unwrap_or(period);
        let taken = Taken { count: 1, value, time_ns: time, cpu: sample.cpu };
        let ip = sample.ip.filter(|_| sample.cpu_mode == CpuMode::User).map(UserAddr);
        let known = Known { pid, process, key, taken, ip };
        match deferred.filter(|_| user.is_empty()) {
            Some(cookie) => self.deferred.keep(cookie, known),
            None => self.add(known, &user, end)?,
        }
        Ok(())
    }

    fn add(
        &mut self,
        sample: Known,
        user: &[(UserAddr, FrameKind)],
        end: EndReason,
    ) -> Result<(), ReadError> {
        let Known { pid, process, mut key, taken, .. } = sample;
        key.user = self.tasks.stack(self.into, pid, user, end)?;
        if let Some(user) = key.user {
            self.look_for_perf_map(pid, process, user)?;
        }
        self.into.sample(key, taken)?;
        self.taken += 1;
        Ok(())
    }

    /// Adds the samples whose user stack is not in the file.
    fn add_without_their_stacks(&mut self) -> Result<(), ReadError> {
        let rest = self.deferred.take_rest();
        if !rest.is_empty() {
            self.into.note(format!(
                "{} samples have no user stack: the file has no deferred call chain for them",
                rest.len()
            ));
        }
        for sample in rest {
            let user: Vec<_> = sample.ip.map(|ip| (ip, FrameKind::Exact)).into_iter().collect();
            self.add(sample, &user, EndReason::NotSaid)?;
        }
        Ok(())
    }

    /// Makes a series of each event.
    fn begin_series(&mut self) -> Result<(), ReadError> {
        let sampled = series::sampled(self.file.event_attributes());
        let events = sampled.iter().map(|it| (it.event.clone(), it.frequency)).collect();
        let ids = self.into.series(events)?;
        let weighed = |(id, it): (SeriesId, &Sampled)| (it.index, (id, it.period));
        self.series = ids.into_iter().zip(&sampled).map(weighed).collect();
        Ok(())
    }

    /// Walks the copy of the stack that was taken with a sample, if any. Says why the user stack
    /// ends.
    fn walk_copy(&mut self, sample: &SampleRecord<'_>, pid: u32, chain: &mut Chain) -> EndReason {
        let (Some(registers), Some((stack, size))) = (&sample.user_regs, &sample.user_stack) else {
            return EndReason::NotSaid;
        };
        if self.machine != MACHINE {
            return EndReason::NotSaid;
        }
        let stack = stack.as_slice();
        let size = usize::try_from(*size).unwrap_or(0).min(stack.len());
        let copied = Copied { registers, stack: &stack[..size] };
        let (walked, why) = self.walker.walk(&copied, pid, &self.tasks, self.into, self.host);
        // Never fewer than the kernel found by frame pointers.
        if walked.len() < chain.user.len() {
            return EndReason::NotSaid;
        }
        chain.user = walked;
        why
    }

    fn kernel_stack(
        &mut self,
        addresses: &[(KernelAddr, FrameKind)],
    ) -> Result<Option<StackId>, ReadError> {
        if addresses.is_empty() {
            return Ok(None);
        }
        let executables = &self.executables;
        self.kernel.prepare(self.into, self.host, |module| executables.module(module))?;
        Ok(self.kernel.stack(self.into, addresses)?)
    }

    /// As perf, which finds names of code made at run time where the process wrote them, if they
    /// are still there.
    fn look_for_perf_map(
        &mut self,
        pid: u32,
        process: ProcessId,
        user: StackId,
    ) -> Result<(), ReadError> {
        if self.jits.contains(&pid) || !self.into.runs_anonymous(user) {
            return Ok(());
        }
        self.jits.insert(pid);
        if let Some(hash) = self.host.perf_map(pid) {
            self.into.add_perf_map(process, hash);
        }
        Ok(())
    }

    fn finish(self) {
        if self.undecoded > 0 {
            let note = format!("{} records of the perf.data do not decode", self.undecoded);
            self.into.note(note);
        }
        if self.lost > 0 {
            self.into.lost(LostReason::RingFull, self.lost, true);
        }
        self.into.taken(Some(self.taken.saturating_add(self.lost)));
        let (first, last) = self.span.unwrap_or_default();
        let zero = match self.file.clock_data() {
            Ok(Some(clock)) => clock.wall_clock_ns.saturating_sub(clock.clockid_time_ns),
            // perf says "captured on" of the file's time, too.
            _ => self
                .modified
                .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok())
                .map_or(0, |time| (time.as_nanos() as u64).saturating_sub(last)),
        };
        self.into.shift_times(zero);
        let end = zero.saturating_add(last).saturating_add(1);
        self.into.span(zero.saturating_add(first), end);
    }
}

fn text(raw: RawData<'_>) -> String {
    let bytes = raw.as_slice();
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// What a record says of a mapping; an empty range where it would end beyond all addresses.
fn mapped(address: u64, length: u64, offset: u64) -> (Range<UserAddr>, FileOffset) {
    let start = UserAddr(address);
    (start..start.checked_add(length).unwrap_or(start), FileOffset(offset))
}
