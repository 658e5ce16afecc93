//! Walks a copied stack by the tables, as the eBPF programs walk a live one: with the same
//! [`TableWalk::up`]. Called by `late.rs`.

use std::io;

use stackwire_collector_ebpf::arch::{RSP, SignalFrame};
use stackwire_collector_ebpf::frame::{AGAIN, Elsewhere, NOT_CALLED, TableWalk};
use stackwire_collector_ebpf::tables::{Mapping, state};
use stackwire_collector_ebpf::unwind::{Cursor, GO_ON, guessed};
use stackwire_collector_ebpf::{CopiedStack, INTERRUPTED, MAX_USER_FRAMES, Memory, UserEnd};
use stackwire_model::UserAddr;

use super::code::Code;
use super::maps::Descriptors;
use super::processes::Held;
use super::reader::Reader;
use crate::managed::{List, Native};
use crate::process::Process;
use crate::sampler::Copy;

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
    /// None: stacks that code has to be looked at for end there.
    code: Option<Code>,
    /// Code made at run time is walked by frame pointers.
    guesses: bool,
    tally: Tally,
}

/// Whose stack it is.
#[derive(Clone, Copy, Debug)]
pub struct Of<'a> {
    /// The process, as it was when the stack was copied.
    pub process: &'a Process,
    /// What it had mapped then.
    pub held: &'a Held,
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
    pub fn new(maps: &Descriptors, code: Option<Code>, guesses: bool) -> io::Result<Self> {
        Ok(Self { tables: Reader::new(maps)?, code, guesses, tally: Tally::default() })
    }

    /// How many stacks were walked since the last call, once they are enough to tell whether copies
    /// are large enough.
    pub fn take_tally(&mut self) -> Option<Tally> {
        (self.tally.walked >= LEAST_WALKED).then(|| std::mem::take(&mut self.tally))
    }

    /// Number of the executable that was looked up last: where there is no table yet, its own.
    #[must_use]
    pub fn looked_up_last(&self) -> u32 {
        self.tables.executable
    }

    /// Whether it is known by now if an executable has a table.
    pub fn has_come(&mut self, executable: u32) -> bool {
        self.tables.state_of(executable) != Some(state::NOT_YET)
    }

    /// See [`Reader::rest`].
    pub fn rest(&mut self) {
        self.tables.rest();
    }

    /// Walks on from the last of the frames that are `known`, leaf first into `frames`, as the eBPF
    /// programs write them. `by_frame_pointers`: what the kernel found, which goes on behind the
    /// copy. In `list` the evaluators are noted that it comes by.
    pub fn walk(
        &mut self,
        copy: &Copy,
        of: Of<'_>,
        (known, by_frame_pointers): (&[u64], &[u64]),
        list: &mut List,
        frames: &mut Vec<u64>,
    ) -> UserEnd {
        for _ in 0..TRIES {
            frames.clear();
            frames.extend_from_slice(known);
            list.forget(known.len().saturating_sub(1));
            let generation = self.tables.generation();
            let (end, cut) = self.walk_once(copy, of, list, frames);
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
            let end = self.go_on(of, by_frame_pointers, frames);
            if end == UserEnd::CopyEnded {
                self.tally.cut += 1;
                let bytes = copy.bytes.len() as u32;
                self.tally.largest_cut = self.tally.largest_cut.max(bytes);
            }
            return end;
        }
        frames.clear();
        frames.extend_from_slice(known);
        UserEnd::TablesReplaced
    }

    /// The end, and whether it is that of the copy.
    fn walk_once(
        &mut self,
        copy: &Copy,
        of: Of<'_>,
        list: &mut List,
        frames: &mut Vec<u64>,
    ) -> (u64, bool) {
        let cursor = copy.cursor;
        let mut walk = self.begin(cursor, of);
        let stack = CopiedStack::of(&copy.bytes, &copy.parts);
        let code = self.code.as_mut();
        let mut memory = Memories { stack, code, process: of.process, code_is_missing: false };
        let mut is_elsewhere = false;
        // The frame before the one that the walk begins with was found by the kernel side.
        let mut after_core = 0;
        if let [.., before, _] = frames[..] {
            list.evaluator.is_at((before & !INTERRUPTED).wrapping_sub(1), &mut after_core);
        }
        loop {
            if frames.len() == MAX_USER_FRAMES {
                return (UserEnd::DepthLimit as u64, false);
            }
            memory.stack.leaves(&walk.cursor);
            memory.stack.cut = false;
            let (sp, ip) = (walk.cursor.registers[RSP as usize], walk.cursor.lookup_ip());
            let is_guessed = walk.cursor.guessed != guessed::NOT;
            let end = walk.up(&mut self.tables, &mut memory, self.guesses, |_| Elsewhere::Nothing);
            match end {
                // Code was to decide about this frame, and cannot be read.
                _ if memory.code_is_missing => {
                    if is_guessed {
                        frames.pop();
                    }
                    return (UserEnd::NotCopied as u64, false);
                }
                GO_ON => {
                    let mark = if walk.cursor.exact != 0 { INTERRUPTED } else { 0 };
                    let caller = walk.cursor.registers[RSP as usize];
                    let above = caller.wrapping_sub(sp);
                    let number = frames.len().saturating_sub(1);
                    list.come_by(Native { number, ip, stack: (sp, caller) }, &mut after_core);
                    // The handler has a stack of its own, and the other one may lie behind it.
                    let is_far = mark != 0 && above > SIGNAL_BYTES;
                    is_elsewhere |= is_far && memory.stack.word(caller).is_none();
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

    fn begin(&self, cursor: Cursor, of: Of<'_>) -> TableWalk {
        let generation = self.tables.generation();
        // Of nothing.
        let mapping = Mapping { start: 1, end: 0, word: 0 };
        let signal = SignalFrame::default();
        TableWalk {
            cursor,
            mapping,
            first: of.held.first,
            count: of.held.count,
            generation,
            signal,
        }
    }

    /// Behind the end of a copy goes on what the kernel found by frame pointers, where both agree
    /// on the frames before.
    fn go_on(&mut self, of: Of<'_>, by_frame_pointers: &[u64], frames: &mut Vec<u64>) -> UserEnd {
        let Some(rest) = rest_of(frames, by_frame_pointers) else { return UserEnd::CopyEnded };
        frames.extend(rest.iter().take(MAX_USER_FRAMES - frames.len()));
        // Frame pointers end in any word that is none: only the code tells a thread's first
        // function.
        let last = frames.last().copied().unwrap_or(0);
        let cursor = Cursor { ip: last, ..Cursor::default() };
        let mut walk = self.begin(cursor, of);
        let (stack, code) = (CopiedStack::new(&[], 0), self.code.as_mut());
        let mut memory = Memories { stack, code, process: of.process, code_is_missing: false };
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
struct Memories<'a> {
    stack: CopiedStack<'a>,
    code: Option<&'a mut Code>,
    process: &'a Process,
    /// Code was asked for, and there was none.
    code_is_missing: bool,
}

impl Memory for Memories<'_> {
    fn word(&mut self, address: u64) -> Option<u64> {
        let word = self.stack.word(address);
        let word = word.or_else(|| self.code.as_mut()?.word(self.process, address));
        if word.is_none() {
            self.stack.missed(address);
            self.code_is_missing |= self.process.mapping(UserAddr(address)).is_some();
        }
        word
    }

    fn words<const N: usize>(&mut self, address: u64, to: &mut [u64; N]) -> bool {
        self.stack.words(address, to)
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
