//! Walks a copied stack by the tables, as the eBPF programs walk a live one: with the same
//! [`TableWalk::up`]. Called by `perf_samples.rs`.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use stackwire_collector_ebpf::arch::{RSP, SignalFrame};
use stackwire_collector_ebpf::frame::{AGAIN, Elsewhere, NOT_CALLED, TableWalk};
use stackwire_collector_ebpf::tables::Mapping;
use stackwire_collector_ebpf::unwind::{Cursor, GO_ON, guessed};
use stackwire_collector_ebpf::{CopiedStack, INTERRUPTED, MAX_USER_FRAMES, Memory, UserEnd};
use stackwire_model::UserAddr;

use super::maps::Descriptors;
use super::reader::Reader;
use crate::helpers::broker::Broker;
use crate::process::executable::Kind;
use crate::process::{Process, Wanted};
use crate::sampler::Copied;

/// Files whose code is read, kept open.
const MAX_FILES: usize = 64;
/// How long a file may take to open.
const AT_MOST: Duration = Duration::from_millis(50);
/// Walks again when tables were replaced meanwhile.
const TRIES: usize = 3;
/// Stacks that say whether copies are large enough.
const LEAST_WALKED: u64 = 20;
/// Most bytes between the stack pointer of a signal handler's caller and that of what it
/// interrupted, on one stack: the registers, of which AMX has 11 KiB, and the red zone.
const SIGNAL_BYTES: u64 = 16 << 10;
/// Frames of ours that must be the kernel's, too, for its to be those of the same stack.
const OVERLAP: usize = 2;

/// The walker.
#[derive(Debug)]
pub struct CopiedStacks {
    tables: Reader,
    code: Code,
    /// Code made at run time is walked by frame pointers.
    guesses: bool,
    tally: Tally,
}

/// How many stacks were walked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// All.
    pub walked: u64,
    /// Those that the end of their copy ended.
    pub cut: u64,
    /// Bytes of the largest copy of those.
    pub largest_cut: u32,
}

impl CopiedStacks {
    /// One that reads these tables.
    ///
    /// # Errors
    /// When they cannot be mapped.
    pub fn new(maps: &Descriptors, broker: Arc<Broker>, guesses: bool) -> io::Result<Self> {
        let code = Code { broker, memory: None, files: HashMap::new() };
        Ok(Self { tables: Reader::new(maps)?, code, guesses, tally: Tally::default() })
    }

    /// How many stacks were walked since the last call, once they are enough to tell whether copies
    /// are large enough.
    pub fn take_tally(&mut self) -> Option<Tally> {
        (self.tally.walked >= LEAST_WALKED).then(|| std::mem::take(&mut self.tally))
    }

    /// Walks a stack of a process; leaf first into `frames`, as the eBPF programs write them.
    /// `by_frame_pointers`: what the kernel found, which goes on behind the copy.
    pub fn walk(
        &mut self,
        copied: &Copied<'_>,
        process: &Process,
        by_frame_pointers: &[u64],
        frames: &mut Vec<u64>,
    ) -> UserEnd {
        for _ in 0..TRIES {
            frames.clear();
            let generation = self.tables.generation();
            let (end, cut) = self.walk_once(copied, process, frames);
            if self.tables.generation() != generation {
                continue;
            }
            if end == UserEnd::NoTableYet as u64 {
                return UserEnd::NoTableYet;
            }
            self.tally.walked += 1;
            if !cut {
                return user_end(end);
            }
            let end = self.go_on(process, by_frame_pointers, frames);
            if end == UserEnd::CopyEnded {
                self.tally.cut += 1;
                let bytes = copied.stack.len() as u32;
                self.tally.largest_cut = self.tally.largest_cut.max(bytes);
            }
            return end;
        }
        frames.truncate(1);
        UserEnd::TablesReplaced
    }

    /// The end, and whether it is that of the copy.
    fn walk_once(
        &mut self,
        copied: &Copied<'_>,
        process: &Process,
        frames: &mut Vec<u64>,
    ) -> (u64, bool) {
        let registers = copied.registers;
        let cursor = Cursor {
            registers: registers.by_number,
            ip: registers.ip,
            known: 0xffff,
            exact: 1,
            // Registers that perf does not copy: fs and gs.
            thread: 0,
            guessed: guessed::NOT,
        };
        frames.push(cursor.ip);
        let Some(mut walk) = self.begin(cursor, process) else {
            return (UserEnd::NoMappingsYet as u64, false);
        };
        let stack = CopiedStack::new(copied.stack, cursor.registers[RSP as usize]);
        let mut memory = Copy { stack, code: &mut self.code, process };
        let mut is_elsewhere = false;
        loop {
            if frames.len() == MAX_USER_FRAMES {
                return (UserEnd::DepthLimit as u64, false);
            }
            memory.stack.leaves(&walk.cursor);
            memory.stack.cut = false;
            let sp = walk.cursor.registers[RSP as usize];
            match walk.up(&mut self.tables, &mut memory, self.guesses, |_| Elsewhere::Nothing) {
                GO_ON => {
                    let mark = if walk.cursor.exact != 0 { INTERRUPTED } else { 0 };
                    let above = walk.cursor.registers[RSP as usize].wrapping_sub(sp);
                    // The handler has a stack of its own, and the other one may lie behind it.
                    is_elsewhere |= mark != 0 && above > SIGNAL_BYTES;
                    frames.push(walk.cursor.ip | mark);
                }
                AGAIN => {}
                NOT_CALLED => {
                    frames.pop();
                    return (UserEnd::NoFramePointer as u64, false);
                }
                end => {
                    let is_behind = memory.stack.cut && !is_elsewhere;
                    let cut = end == UserEnd::Unreadable as u64 && is_behind;
                    return (end, cut);
                }
            }
        }
    }

    fn begin(&self, cursor: Cursor, process: &Process) -> Option<TableWalk> {
        let (first, count) = self.tables.process(process.pid)?;
        let generation = self.tables.generation();
        // Of nothing.
        let mapping = Mapping { start: 1, end: 0, word: 0 };
        let signal = SignalFrame::default();
        Some(TableWalk { cursor, mapping, first, count, generation, signal })
    }

    /// Behind the end of a copy goes on what the kernel found by frame pointers, where both agree
    /// on the frames before.
    fn go_on(
        &mut self,
        process: &Process,
        by_frame_pointers: &[u64],
        frames: &mut Vec<u64>,
    ) -> UserEnd {
        let Some(rest) = rest_of(frames, by_frame_pointers) else { return UserEnd::CopyEnded };
        frames.extend(rest.iter().take(MAX_USER_FRAMES - frames.len()));
        // Frame pointers end in any word that is none: only the code tells a thread's first
        // function.
        let last = frames.last().copied().unwrap_or(0);
        let cursor = Cursor { ip: last, ..Cursor::default() };
        let Some(mut walk) = self.begin(cursor, process) else { return UserEnd::CopyEnded };
        let mut memory = Copy { stack: CopiedStack::new(&[], 0), code: &mut self.code, process };
        let end = walk.up(&mut self.tables, &mut memory, false, |_| Elsewhere::Nothing);
        if end == UserEnd::Root as u64 { UserEnd::Root } else { UserEnd::CopyEnded }
    }
}

/// What the kernel's frames have behind those that are ours. None where it is not certain which of
/// its frames our last one is: in a recursion they are alike.
fn rest_of<'a>(ours: &[u64], theirs: &'a [u64]) -> Option<&'a [u64]> {
    if let Some(rest) = theirs.strip_prefix(ours) {
        return (!rest.is_empty()).then_some(rest);
    }
    let tail = &ours[ours.len().checked_sub(OVERLAP)?..];
    if ours.windows(OVERLAP).filter(|frames| *frames == tail).count() > 1 {
        return None;
    }
    // Frame pointers miss frames.
    let agree = |end: &usize| {
        let same = ours.iter().rev().zip(theirs[..*end].iter().rev());
        same.take_while(|(a, b)| a == b).count() >= OVERLAP
    };
    let mut ends = (1..theirs.len()).filter(agree);
    let end = ends.next()?;
    ends.next().is_none().then(|| &theirs[end..])
}

/// The same as a type; the numbers of [`TableWalk::up`] that are none are handled before.
fn user_end(end: u64) -> UserEnd {
    let all = [
        UserEnd::Root,
        UserEnd::NoUserStack,
        UserEnd::DepthLimit,
        UserEnd::NoFramePointer,
        UserEnd::NotCode,
        UserEnd::NoTable,
        UserEnd::NoRule,
        UserEnd::RegisterLost,
        UserEnd::BadStack,
        UserEnd::NoMappingsYet,
        UserEnd::UnknownSwitch,
        UserEnd::OverShare,
    ];
    // What cannot be read, and does not lie behind the copy.
    all.into_iter().find(|&it| it as u64 == end).unwrap_or(UserEnd::NotCopied)
}

/// The copy, and the code of the process.
struct Copy<'a> {
    stack: CopiedStack<'a>,
    code: &'a mut Code,
    process: &'a Process,
}

impl Memory for Copy<'_> {
    fn word(&mut self, address: u64) -> Option<u64> {
        let word = self.stack.word(address).or_else(|| self.code.word(self.process, address));
        if word.is_none() {
            self.stack.missed(address);
        }
        word
    }

    fn words<const N: usize>(&mut self, address: u64, to: &mut [u64; N]) -> bool {
        self.stack.words(address, to)
    }
}

/// Code of processes: what is in front of return addresses is looked at where frame pointers are
/// followed. Read from the process, if that is allowed and it lives, else from the file.
#[derive(Debug)]
struct Code {
    broker: Arc<Broker>,
    /// Of the process asked about last.
    memory: Option<(u64, Option<File>)>,
    /// By the number of the executable.
    files: HashMap<u64, Option<File>>,
}

impl Code {
    fn word(&mut self, process: &Process, address: u64) -> Option<u64> {
        let mapping = process.mapping(UserAddr(address))?;
        if self.memory.as_ref().is_none_or(|(image, _)| *image != process.image) {
            let memory = File::open(format!("/proc/{}/mem", process.pid)).ok();
            self.memory = Some((process.image, memory));
        }
        let mut bytes = [0; 8];
        if let Some((_, Some(memory))) = &self.memory
            && memory.read_exact_at(&mut bytes, address).is_ok()
        {
            return Some(u64::from_le_bytes(bytes));
        }
        let Kind::File { path, .. } = &mapping.executable.kind else { return None };
        if self.files.len() >= MAX_FILES {
            self.files.clear();
        }
        let file = self.files.entry(mapping.executable.id).or_insert_with(|| {
            let (pid, path) = (process.pid, path.clone());
            let wanted = Wanted::Mapped { pid, start: mapping.start, end: mapping.end, path };
            self.broker.open_within(&wanted, AT_MOST).ok()
        });
        let at = mapping.offset(UserAddr(address)).0;
        file.as_ref()?.read_exact_at(&mut bytes, at).ok()?;
        Some(u64::from_le_bytes(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_frames_go_on_where_both_agree() {
        // The leaf's caller is missing by frame pointers: the leaf had not made its frame.
        assert_eq!(rest_of(&[1, 2, 3, 4], &[1, 3, 4, 5, 6]), Some(&[5, 6][..]));
        assert_eq!(rest_of(&[1, 2, 3, 4], &[1, 9, 4, 5, 6]), None, "one frame proves nothing");
        assert_eq!(rest_of(&[1, 2], &[1, 2]), None, "there is no more");
        // A recursion.
        assert_eq!(rest_of(&[1, 7, 7, 7], &[1, 7, 7, 7, 7, 7, 8]), Some(&[7, 7, 8][..]));
        assert_eq!(rest_of(&[1, 7, 7, 7, 7], &[1, 7, 7, 7]), None);
        assert_eq!(rest_of(&[1], &[1, 2]), Some(&[2][..]));
        assert_eq!(rest_of(&[1, 2], &[]), None);
    }
}
