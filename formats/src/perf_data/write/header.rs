//! Head and features of perf.data: `perf.data-file-format.txt` and `header.c` of perf. Pure.

use stackwire_model::BuildId;
use stackwire_model::PerfType;
use stackwire_model::profile::{Origin, Series, SeriesId};

use super::record::{Mode, SAMPLE_TYPE, event_id, words};

/// Bytes of the head.
pub const HEADER: usize = 104;
/// `PERF_ATTR_SIZE_VER5`: perf before 6.3 refuses more than it knows (128), and nothing later is
/// used.
const ATTR: usize = 112;
/// Bytes of an entry of the table of events: attributes, and where its ids are.
const ENTRY: usize = ATTR + 16;

/// Bytes of the head with the table of so many series and their ids: where data begins.
#[must_use]
pub fn data_offset(series: usize) -> u64 {
    (HEADER + series * (ENTRY + 8)) as u64
}

/// Strings are padded to this.
const NAME_ALIGN: usize = 64;

/// `HEADER_*`: number of a feature's bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Feature {
    BuildId = 2,
    Hostname = 3,
    OsRelease = 4,
    Version = 5,
    Arch = 6,
    CpuCount = 7,
    CpuDescription = 8,
    CpuId = 9,
    CommandLine = 11,
    EventDescription = 12,
    SampleTime = 21,
    ClockId = 23,
    ClockData = 29,
}

/// What is said of the whole file.
#[derive(Clone, Debug)]
pub struct Head<'a> {
    /// How and where it was taken.
    pub origin: &'a Origin,
    /// What was sampled: an event each.
    pub series: &'a [Series],
    /// The program that writes the file, with its version.
    pub program: &'a str,
    /// Its command line.
    pub command_line: &'a [String],
    /// First and last sample, on their clock.
    pub times: (u64, u64),
    /// The wall clock when that of samples was zero, nanoseconds.
    pub clock_zero_ns: u64,
    /// CPUs: there are, and were online.
    pub cpus: (u32, u32),
    /// Build-id, mode and name of executables.
    pub build_ids: Vec<(BuildId, Mode, String)>,
}

/// Head and table of events, for `data` bytes of records.
#[must_use]
pub fn head(head: &Head<'_>, data: u64) -> Vec<u8> {
    let begin = data_offset(head.series.len());
    let mut out = Vec::with_capacity(begin as usize);
    let table = (head.series.len() * ENTRY) as u64;
    out.extend(b"PERFILE2");
    words(&mut out, [HEADER as u64, ENTRY as u64, HEADER as u64, table, begin, data, 0, 0]);
    let mut bits = [0u64; 4];
    for feature in PRESENT {
        bits[feature as usize / 64] |= 1 << (feature as usize % 64);
    }
    words(&mut out, bits);
    let mut ids = HEADER as u64 + table;
    for series in head.series {
        out.extend(attributes(series, head.origin.kernel_stacks));
        words(&mut out, [ids, 8]);
        ids += 8;
    }
    for (_, id) in head.events() {
        words(&mut out, [id]);
    }
    out
}

impl Head<'_> {
    /// Each series with its id.
    fn events(&self) -> impl Iterator<Item = (&Series, u64)> {
        self.series.iter().zip(0..).map(|(series, index)| (series, event_id(SeriesId(index))))
    }
}

/// Features in the order of their bits, which is that of their table.
const PRESENT: [Feature; 13] = [
    Feature::BuildId,
    Feature::Hostname,
    Feature::OsRelease,
    Feature::Version,
    Feature::Arch,
    Feature::CpuCount,
    Feature::CpuDescription,
    Feature::CpuId,
    Feature::CommandLine,
    Feature::EventDescription,
    Feature::SampleTime,
    Feature::ClockId,
    Feature::ClockData,
];

/// What follows the records, at `offset` in the file: a table of sections, and the sections.
#[must_use]
pub fn features(head: &Head<'_>, offset: u64) -> Vec<u8> {
    let mut sections = Vec::new();
    let mut table = Vec::new();
    for feature in PRESENT {
        let start = sections.len();
        section(head, feature, &mut sections);
        let at = offset + (PRESENT.len() * 16 + start) as u64;
        words(&mut table, [at, (sections.len() - start) as u64]);
    }
    table.extend(sections);
    table
}

fn section(head: &Head<'_>, feature: Feature, out: &mut Vec<u8>) {
    let origin = head.origin;
    match feature {
        Feature::BuildId => {
            for (id, mode, name) in &head.build_ids {
                build_id(out, id, *mode, name);
            }
        }
        Feature::Hostname => string(out, &origin.hostname),
        Feature::OsRelease => string(out, &origin.kernel_release),
        Feature::Version => string(out, head.program),
        Feature::Arch => string(out, &origin.machine),
        Feature::CpuCount => {
            out.extend(head.cpus.0.to_le_bytes());
            out.extend(head.cpus.1.to_le_bytes());
        }
        // perf 6.1 takes for granted that they are there (`perf data convert`), `perf annotate`
        // that it has these parts.
        Feature::CpuDescription => string(out, known(&origin.cpu_description, "unknown")),
        Feature::CpuId => string(out, known(&origin.cpu_id, "unknown,0,0,0")),
        Feature::CommandLine => {
            out.extend((head.command_line.len() as u32).to_le_bytes());
            head.command_line.iter().for_each(|argument| string(out, argument));
        }
        Feature::EventDescription => {
            out.extend((head.series.len() as u32).to_le_bytes());
            out.extend((ATTR as u32).to_le_bytes());
            for (series, id) in head.events() {
                out.extend(attributes(series, origin.kernel_stacks));
                out.extend(1u32.to_le_bytes());
                string(out, known(series.event.perf_name(), "samples"));
                words(out, [id]);
            }
        }
        Feature::SampleTime => words(out, [head.times.0, head.times.1]),
        // Resolution, nanoseconds.
        Feature::ClockId => words(out, [1]),
        Feature::ClockData => {
            // Version, CLOCK_MONOTONIC.
            out.extend(1u32.to_le_bytes());
            out.extend(1u32.to_le_bytes());
            words(out, [head.clock_zero_ns, 0]);
        }
    }
}

fn known<'a>(text: &'a str, otherwise: &'a str) -> &'a str {
    if text.is_empty() { otherwise } else { text }
}

/// `struct perf_event_attr`.
fn attributes(series: &Series, kernel_stacks: bool) -> Vec<u8> {
    // comm, mmap, freq, task, sample_id_all, mmap2, comm_exec, use_clockid.
    const FLAGS: u64 = 1 << 8 | 1 << 9 | 1 << 10 | 1 << 13 | 1 << 18 | 1 << 23 | 1 << 24 | 1 << 25;
    const EXCLUDE_KERNEL: u64 = 1 << 5;
    const CLOCK_MONOTONIC: u64 = 1;
    const FREQUENCY: u64 = 1 << 10;
    // PERF_TYPE_SOFTWARE. PERF_COUNT_SW_CPU_CLOCK: readers know its unit. PERF_COUNT_SW_BPF_OUTPUT
    // for waits: as `perf record --off-cpu` has it.
    let wait = series.event.is_wait;
    let other = PerfType { kind: 1, config: if wait { 10 } else { 0 } };
    // Numbers of tracepoints are of a host, and perf wants a description of their fields.
    let perf = series.event.perf.filter(|_| !series.event.is_tracepoint());
    let other = if series.event.is_tracepoint() { PerfType { kind: 1, config: 10 } } else { other };
    let PerfType { kind, config } = perf.unwrap_or(other);
    let flags = if series.frequency == 0 { FLAGS & !FREQUENCY } else { FLAGS };
    let flags = flags | if kernel_stacks { 0 } else { EXCLUDE_KERNEL };
    let mut out = Vec::with_capacity(ATTR);
    let kind = u64::from(kind) | (ATTR as u64) << 32;
    words(&mut out, [kind, config, series.frequency.into(), SAMPLE_TYPE]);
    // read_format: PERF_FORMAT_ID; …, sample_stack_user and clockid in one word.
    words(&mut out, [1 << 2, flags, 0, 0, 0, 0, 0, CLOCK_MONOTONIC << 32, 0, 0]);
    debug_assert_eq!(out.len(), ATTR);
    out
}

/// Length and text, NUL-terminated and padded.
fn string(out: &mut Vec<u8>, text: &str) {
    let length = (text.len() + 1).next_multiple_of(NAME_ALIGN);
    out.extend((length as u32).to_le_bytes());
    let end = out.len() + length;
    out.extend_from_slice(text.as_bytes());
    out.resize(end, 0);
}

/// `struct perf_record_header_build_id`.
fn build_id(out: &mut Vec<u8>, id: &BuildId, mode: Mode, name: &str) {
    const HAS_SIZE: u16 = 1 << 15;
    let id = id.as_bytes();
    let id = &id[..id.len().min(20)];
    let name = &name.as_bytes()[..name.len().min(4095)];
    let padded = (name.len() + 1).next_multiple_of(NAME_ALIGN);
    let end = out.len() + 36 + padded;
    out.extend(0u32.to_le_bytes());
    out.extend((mode as u16 | HAS_SIZE).to_le_bytes());
    out.extend((36 + padded as u16).to_le_bytes());
    out.extend((-1i32).to_le_bytes());
    let mut field = [0; 24];
    field[..id.len()].copy_from_slice(id);
    field[20] = id.len() as u8;
    out.extend(field);
    out.extend_from_slice(name);
    out.resize(end, 0);
}
