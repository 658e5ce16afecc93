//! Samples as perf writes them: bytes in, who and when, call chain, registers and the copied stack
//! out. Pure.
//!
//! Format: `PERF_RECORD_SAMPLE` of include/uapi/linux/perf_event.h, with the parts
//! `PerfEvent::open_copying` asks for. Called by `sampler/perf.rs`.

use stackwire_collector_ebpf::arch::{PERF_IP, PERF_REGISTERS, REGISTERS};

use std::ops::Range;

use super::perf_event::Contents;
use super::record::MalformedRecord;

/// A sample; what is of no fixed size still lies in the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerfSample<'a> {
    /// Process, as the opener's pid namespace has it; 0 outside it.
    pub pid: u32,
    /// Thread, likewise.
    pub tid: u32,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time_ns: u64,
    /// CPU it was taken on.
    pub cpu: u32,
    /// Events since the sample before.
    pub period: u64,
    /// The kernel's call chain, see [`PerfSample::kernel`] and [`PerfSample::user`].
    chain: Chain<'a>,
    /// The user registers; None where there are none to be had, or of a 32-bit program.
    pub registers: Option<Registers>,
    /// It is of a 32-bit program.
    pub compat: bool,
    /// Where in the record memory from the stack pointer on is.
    pub stack: Range<usize>,
    /// cgroup v2 id of the task; 0: it was not asked for.
    pub cgroup_id: u64,
}

/// Registers of user mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// By DWARF number.
    pub by_number: [u64; REGISTERS],
    /// The instruction.
    pub ip: u64,
}

type Chain<'a> = &'a [[u8; 8]];

/// `PERF_RECORD_SAMPLE`.
pub const SAMPLE: u32 = 9;
/// `enum perf_callchain_context`: what follows is of the kernel, of user mode. Any other number
/// from the last one on marks something else.
const KERNEL: u64 = -128i64 as u64;
const USER: u64 = -512i64 as u64;
const LAST_MARK: u64 = -4095i64 as u64;
/// `PERF_SAMPLE_REGS_ABI_32`, `PERF_SAMPLE_REGS_ABI_64`.
const ABI_32: u64 = 1;
const ABI_64: u64 = 2;

impl<'a> PerfSample<'a> {
    /// Number of the event a record is of, header included.
    #[must_use]
    pub fn event_id(record: &[u8]) -> Option<u64> {
        Some(u64::from_ne_bytes(*record.get(8..)?.first_chunk()?))
    }

    /// Decodes a record, header included, of an event with these contents.
    ///
    /// # Errors
    /// When it does not hold what it says.
    pub fn decode(record: &'a [u8], contents: &Contents) -> Result<Self, MalformedRecord> {
        let malformed = MalformedRecord { length: record.len() };
        let words = &mut Words(record);
        let sample = Self::read(words, contents);
        let cgroup_id = if contents.cgroup { words.next() } else { Some(0) };
        let whole = sample.zip(cgroup_id).map(|(sample, cgroup_id)| Self { cgroup_id, ..sample });
        whole.ok_or(malformed)
    }

    fn read(words: &mut Words<'a>, contents: &Contents) -> Option<Self> {
        let all_bytes = words.0.len();
        words.next()?; // the header
        words.next()?; // the number of the event
        let (pid, tid) = words.pair()?;
        let time_ns = words.next()?;
        let (cpu, _) = words.pair()?;
        let period = match contents.period {
            Some(period) => period,
            None => words.next()?,
        };
        let length = usize::try_from(words.next()?).ok()?;
        let chain = words.many(length)?;
        let mut sample = Self {
            pid,
            tid,
            time_ns,
            cpu,
            period,
            chain,
            registers: None,
            compat: false,
            stack: 0..0,
            cgroup_id: 0,
        };
        if contents.stack_bytes == 0 {
            return Some(sample);
        }
        let abi = words.next()?;
        let mut all = [0; 64];
        if abi != 0 {
            // In the order of their numbers.
            let mut asked: Vec<u32> = PERF_REGISTERS.into_iter().chain([PERF_IP]).collect();
            asked.sort_unstable();
            for register in asked {
                *all.get_mut(register as usize)? = words.next()?;
            }
        }
        let by_number = PERF_REGISTERS.map(|register| all[register as usize]);
        let ip = all[PERF_IP as usize];
        sample.registers = (abi == ABI_64).then_some(Registers { by_number, ip });
        sample.compat = abi == ABI_32;
        let room = usize::try_from(words.next()?).ok()?;
        if room > 0 {
            let start = all_bytes - words.0.len();
            words.bytes(room)?;
            let copied = usize::try_from(words.next()?).ok().filter(|&copied| copied <= room)?;
            sample.stack = start..start + copied;
        }
        Some(sample)
    }

    /// Frames of the kernel, leaf first.
    pub fn kernel(&self) -> impl Iterator<Item = u64> + use<'a> {
        self.of(KERNEL)
    }

    /// Frames of user mode, leaf first, as the kernel finds them by frame pointers.
    pub fn user(&self) -> impl Iterator<Item = u64> + use<'a> {
        self.of(USER)
    }

    fn of(&self, context: u64) -> impl Iterator<Item = u64> + use<'a> {
        let all = self.chain.iter().map(|word| u64::from_ne_bytes(*word));
        // Those of user mode come last: a mark among them is an address that the process made up.
        let all = all.scan(0, |now, word| {
            let marks = word >= LAST_MARK;
            if marks && *now == USER {
                return None;
            }
            if marks {
                *now = word;
            }
            Some((!marks).then_some((*now, word)))
        });
        all.flatten().filter(move |&(of, _)| of == context).map(|(_, word)| word)
    }
}

/// What is left of a record.
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    fn next(&mut self) -> Option<u64> {
        Some(u64::from_ne_bytes(self.bytes(8)?.try_into().ok()?))
    }

    fn many(&mut self, count: usize) -> Option<&'a [[u8; 8]]> {
        Some(self.bytes(count.checked_mul(8)?)?.as_chunks().0)
    }

    /// The two halves of a word.
    fn pair(&mut self) -> Option<(u32, u32)> {
        let first = u32::from_ne_bytes(self.bytes(4)?.try_into().ok()?);
        Some((first, u32::from_ne_bytes(self.bytes(4)?.try_into().ok()?)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sources::perf_event::Kernel;

    fn contents(stack_bytes: u32, cgroup: bool) -> Contents {
        Contents { kernel: Kernel::WithStacks, stack_bytes, cgroup, period: None }
    }

    fn record(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn what_a_process_makes_up_is_not_the_kernels() {
        let pair = |low: u64, high: u64| low | high << 32;
        let mut words = vec![0, 77, pair(5, 6), 99, pair(3, 0), 1000];
        words.extend([7, KERNEL, 0xf1, USER, 0x11, KERNEL, 0xf2, 0xf3]);
        let record = record(&words);
        let sample = PerfSample::decode(&record, &contents(0, false)).unwrap();
        assert_eq!(sample.kernel().collect::<Vec<_>>(), [0xf1]);
        assert_eq!(sample.user().collect::<Vec<_>>(), [0x11]);
    }

    #[test]
    fn a_sample_that_does_not_say_its_weight_has_that_of_its_event() {
        let pair = |low: u64, high: u64| low | high << 32;
        let record = record(&[0, 77, pair(5, 6), 99, pair(3, 0), 2, USER, 0x11]);
        let contents = Contents { period: Some(500), ..contents(0, false) };
        let sample = PerfSample::decode(&record, &contents).unwrap();
        assert_eq!((sample.period, sample.user().collect::<Vec<_>>()), (500, vec![0x11]));
    }

    #[test]
    fn decodes_what_perf_writes() {
        let pair = |low: u64, high: u64| low | high << 32;
        let mut words = vec![0, 77, pair(5, 6), 99, pair(3, 0), 1000];
        words.extend([6, KERNEL, 0xf1, 0xf2, USER, 0x11, 0x12]);
        let chain = record(&words);
        let sample = PerfSample::decode(&chain, &contents(0, false)).unwrap();
        assert_eq!(PerfSample::event_id(&chain), Some(77));
        assert_eq!((sample.pid, sample.tid, sample.cpu), (5, 6, 3));
        assert_eq!((sample.time_ns, sample.period), (99, 1000));
        let frames = |sample: &PerfSample<'_>| {
            (sample.kernel().collect::<Vec<_>>(), sample.user().collect::<Vec<_>>())
        };
        assert_eq!(frames(&sample), (vec![0xf1, 0xf2], vec![0x11, 0x12]));
        // ax, bx, cx, dx, si, di, bp, sp, ip, r8 to r15.
        words.push(ABI_64);
        words.extend([10, 13, 12, 11, 14, 15, 16, 17, 50, 18, 19, 20, 21, 22, 23, 24, 25]);
        words.extend([16, 0xa, 0xb, 8]);
        let whole = record(&words);
        let sample = PerfSample::decode(&whole, &contents(16, false)).unwrap();
        let registers = sample.registers.unwrap();
        assert_eq!(registers.by_number[..8], [10, 11, 12, 13, 14, 15, 16, 17]);
        assert_eq!((registers.by_number[15], registers.ip), (25, 50));
        assert_eq!(whole[sample.stack], 0xau64.to_ne_bytes());
        assert!(!sample.compat);
        let cut = &whole[..whole.len() - 8];
        assert!(PerfSample::decode(cut, &contents(16, false)).is_err());
        let with_cgroup = [&whole[..], &record(&[321])].concat();
        let sample = PerfSample::decode(&with_cgroup, &contents(16, true)).unwrap();
        assert_eq!(sample.cgroup_id, 321);
        // A kernel thread has no user mode.
        words.truncate(13);
        words.extend([0, 0]);
        let none = record(&words);
        assert!(PerfSample::decode(&none, &contents(16, false)).unwrap().registers.is_none());
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400), copied: bool) {
            let contents = contents(copied.into(), copied);
            if let Ok(sample) = PerfSample::decode(&bytes, &contents) {
                prop_assert!(sample.kernel().count() + sample.user().count() <= bytes.len() / 8);
            }
        }
    }
}
