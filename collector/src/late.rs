//! Walks on in stacks that could not be walked where they were taken: perf events walk none, and
//! the eBPF programs stop where the mapping or the table is not there yet. A sample waits for its
//! table apart from all others. Called by `pipeline.rs`.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use stackwire_collector_ebpf::{MAX_COPY_BYTES, RecordKind, SampleHeader, UserEnd};

use crate::clock::now_ns;
use crate::managed::List;
use crate::process::{Mappings, Process};
use crate::sampler::{Copy, ToCopy};
use crate::unwind::{CopiedStacks, Held, Of, Tally, Unwind};

/// How long a sample waits for the table its stack is to be walked by.
const PATIENCE: Duration = Duration::from_secs(3);
/// Bytes that a sample takes while it waits, without its copy.
const BESIDE: usize = 1 << 10;
/// Bytes of one of its mappings, here and in the tables.
const OF_MAPPING: usize = 64;
/// Copies that tell whether they are of use, and how long none are made where they are not.
const TELLING: u32 = 64;
const REST: Duration = Duration::from_secs(1);

/// Who walked the stacks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// The eBPF programs, by tables: the walk goes on behind the frames of the sample.
    ByTables,
    /// The kernel, by frame pointers: all of it is walked.
    ByFramePointers,
}

/// A sample whose stack is to be walked, or a stack that a thread waits with.
#[derive(Debug)]
pub struct Late {
    /// The fixed part.
    pub header: SampleHeader,
    /// What was found by whoever walked first, leaf first.
    pub user: Vec<u64>,
    /// Leaf first.
    pub kernel: Vec<u64>,
    /// Frames of an interpreter.
    pub list: List,
    /// What the walk goes on from.
    pub copy: Copy,
    /// Its process, as it was then.
    pub process: Process,
}

/// One that waits.
#[derive(Debug)]
struct Waiting {
    late: Late,
    held: Held,
    /// The executable whose table it waits for, by number.
    table: u32,
    /// What it takes.
    bytes: usize,
}

/// What the waiting samples of a process take.
#[derive(Debug, Default)]
struct Share {
    pid: u32,
    samples: usize,
    bytes: usize,
    /// Of the mappings of the last of them, which are counted once.
    version: Option<u32>,
}

/// What has been walked, as far as it can be; user frames.
pub type Walked<'a> = &'a mut dyn FnMut(&Late, &[u64]);

/// The walks.
#[derive(Debug)]
pub struct LateWalks {
    walker: CopiedStacks,
    begun: Begun,
    /// Those that wait for a table, the oldest first, each with where its mappings are.
    waiting: VecDeque<Waiting>,
    /// Bytes they take, in all, stacks of waits, and by the image of the process.
    bytes: usize,
    bytes_of_waits: usize,
    by_image: HashMap<u64, Share>,
    /// Bytes that may wait. Beyond it, stacks are walked as far as tables are there.
    most_bytes: usize,
    /// Copies of late that could be walked on, and of processes whose mappings nobody knows.
    of_use: u32,
    of_none: u32,
    /// None are made until then.
    rests_until: Option<Instant>,
    frames: Vec<u64>,
}

impl LateWalks {
    /// None so far.
    #[must_use]
    pub fn new(walker: CopiedStacks, begun: Begun) -> Self {
        let most_bytes = match begun {
            Begun::ByTables => 16 << 20,
            Begun::ByFramePointers => 64 << 20,
        };
        Self {
            walker,
            begun,
            waiting: VecDeque::new(),
            bytes: 0,
            bytes_of_waits: 0,
            by_image: HashMap::new(),
            most_bytes,
            of_use: 0,
            of_none: 0,
            rests_until: None,
            frames: Vec::new(),
        }
    }

    /// See [`CopiedStacks::take_tally`].
    pub fn take_tally(&mut self) -> Option<Tally> {
        self.walker.take_tally()
    }

    /// Bytes of a stack to copy: less where many wait, none where it was of no use.
    pub fn bytes_to_copy(&mut self) -> ToCopy {
        if self.of_use + self.of_none >= TELLING {
            if self.of_none / 4 > self.of_use {
                self.rests_until = Some(Instant::now() + REST);
            }
            (self.of_use, self.of_none) = (0, 0);
        }
        self.rests_until = self.rests_until.filter(|until| *until > Instant::now());
        let largest = self.by_image.values().map(|share| share.bytes).max().unwrap_or(0);
        let of_sample = match self.bytes {
            _ if self.rests_until.is_some() => 0,
            bytes if bytes >= self.most_bytes => 0,
            bytes if bytes >= self.most_bytes / 2 || largest >= self.most_bytes / 8 => {
                MAX_COPY_BYTES / 4
            }
            _ => MAX_COPY_BYTES,
        };
        let of_wait = match self.bytes_of_waits {
            bytes if bytes >= self.most_bytes_of_waits() => 0,
            bytes if bytes >= self.most_bytes_of_waits() / 2 => of_sample.min(MAX_COPY_BYTES / 4),
            _ => of_sample,
        };
        ToCopy { of_sample, of_wait }
    }

    /// Of waits there may be a hundred times as many as of samples, which need room, too.
    fn most_bytes_of_waits(&self) -> usize {
        self.most_bytes / 4
    }

    /// An epoch is over: gives back what was taken to read tables.
    pub fn rest(&mut self) {
        self.walker.rest();
    }

    /// Whether samples wait.
    #[must_use]
    pub fn any_waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Images of the processes whose samples wait, each with its pid.
    pub fn images(&self) -> impl Iterator<Item = (u64, u32)> {
        self.by_image.iter().map(|(&image, share)| (image, share.pid))
    }

    /// Whether samples of an image wait.
    #[must_use]
    pub fn has(&self, image: u64) -> bool {
        self.by_image.contains_key(&image)
    }

    /// Whether what a sample has of its user stack holds: the programs may have walked it by the
    /// tables of code that had just been replaced.
    #[must_use]
    pub fn takes(&self, header: &SampleHeader, user: &[u64], process: &mut Process) -> bool {
        self.begun == Begun::ByFramePointers || process.certain(header.time_ns, user) == user.len()
    }

    /// Walks on in a sample's stack, at once or when the table is there.
    pub fn take(&mut self, mut late: Late, unwind: &mut Unwind, walked: Walked<'_>) {
        let place = match &late.process.mappings {
            Mappings::Known(mappings) => {
                self.of_use += 1;
                let held = unwind.hold(late.process.pid, mappings);
                held.map(|held| (held, mappings.len())).ok_or(UserEnd::OverShare)
            }
            Mappings::Denied | Mappings::Gone => {
                self.of_none += 1;
                Err(UserEnd::NoMappingsYet)
            }
        };
        let (held, mappings) = match place {
            Ok(place) => place,
            Err(end) => {
                late.header.user_end = end as u8;
                if self.begun == Begun::ByFramePointers {
                    // Nothing says that the kernel's frames are callers.
                    late.user = vec![late.copy.cursor.ip];
                }
                return walked(&late, &late.user);
            }
        };
        let bytes = self.bytes_of(&late, mappings);
        let theirs = self.by_image.get(&late.process.image).map_or(0, |share| share.bytes);
        // Others may come, for whom there has to be room.
        let share = if self.by_image.len() > 1 { self.most_bytes / 4 } else { self.most_bytes / 2 };
        let is_wait = late.header.kind == RecordKind::Stack as u8;
        let has_room = self.bytes + bytes <= self.most_bytes
            && theirs + bytes <= share
            && !(is_wait && self.bytes_of_waits + bytes > self.most_bytes_of_waits());
        match self.walk(&mut late, &held, has_room, walked) {
            Ok(()) => unwind.release(held),
            Err(table) => {
                self.bytes += bytes;
                self.bytes_of_waits += if is_wait { bytes } else { 0 };
                let share = self.by_image.entry(late.process.image).or_default();
                share.pid = late.process.pid;
                share.samples += 1;
                share.bytes += bytes;
                share.version = Some(late.process.version);
                self.waiting.push_back(Waiting { late, held, table, bytes });
            }
        }
    }

    /// What a sample takes while it waits. After each change its process has other mappings.
    fn bytes_of(&self, late: &Late, mappings: usize) -> usize {
        let known = self.by_image.get(&late.process.image).and_then(|share| share.version);
        let mappings = if known == Some(late.process.version) { 0 } else { mappings };
        let frames = late.user.len() + late.kernel.len() + late.list.entries.len() * 2;
        BESIDE + late.copy.bytes.len() + frames * 8 + mappings * OF_MAPPING
    }

    /// Walks on in those whose table has come, and in those that have waited long enough.
    pub fn look(&mut self, unwind: &mut Unwind, walked: Walked<'_>) {
        self.look_since(now_ns().saturating_sub(PATIENCE.as_nanos() as u64), unwind, walked);
    }

    /// Walks on in all, as far as tables are there: nobody waits for them any more.
    pub fn finish(&mut self, unwind: &mut Unwind, walked: Walked<'_>) {
        self.look_since(u64::MAX, unwind, walked);
    }

    fn look_since(&mut self, oldest_ns: u64, unwind: &mut Unwind, walked: Walked<'_>) {
        for _ in 0..self.waiting.len() {
            let Some(mut it) = self.waiting.pop_front() else { break };
            let is_over = it.late.header.time_ns <= oldest_ns;
            if !is_over && !self.walker.has_come(it.table) {
                self.waiting.push_back(it);
                continue;
            }
            match self.walk(&mut it.late, &it.held, !is_over, walked) {
                Ok(()) => {
                    self.forget(&it);
                    unwind.release(it.held);
                }
                Err(table) => self.waiting.push_back(Waiting { table, ..it }),
            }
        }
    }

    /// As far as tables are there. `may_wait`: not at all without one, whose number is the error.
    fn walk(
        &mut self,
        late: &mut Late,
        held: &Held,
        may_wait: bool,
        walked: Walked<'_>,
    ) -> Result<(), u32> {
        let first = [late.copy.cursor.ip];
        let frames = match self.begun {
            Begun::ByTables => (&late.user[..], &[][..]),
            Begun::ByFramePointers => (&first[..], &late.user[..]),
        };
        let of = Of { process: &late.process, held };
        let end = self.walker.walk(&late.copy, of, frames, &mut late.list, &mut self.frames);
        if end == UserEnd::NoTableYet && may_wait {
            return Err(self.walker.looked_up_last());
        }
        late.header.user_end = end as u8;
        walked(late, &self.frames);
        Ok(())
    }

    fn forget(&mut self, it: &Waiting) {
        self.bytes -= it.bytes;
        if it.late.header.kind == RecordKind::Stack as u8 {
            self.bytes_of_waits -= it.bytes;
        }
        let image = it.late.process.image;
        if let Some(share) = self.by_image.get_mut(&image) {
            share.samples -= 1;
            share.bytes -= it.bytes;
            if share.samples == 0 {
                self.by_image.remove(&image);
            }
        }
    }
}
