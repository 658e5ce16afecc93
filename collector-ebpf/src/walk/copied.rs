//! The top of a stack, copied together with the registers, as perf events give it
//! (`PERF_SAMPLE_STACK_USER` of include/uapi/linux/perf_event.h) or the eBPF programs
//! (`walk/copy.rs`). User space alone walks such a copy: the collector, and the reader of
//! perf.data.

use crate::arch::{RBP, RSP};
use crate::walk::handed_over::{OF_LEFT, OF_POINTER, PARTS, Part};
use crate::walk::unwind::Cursor;

/// Below the stack pointer, and still the function's (System V ABI).
const RED_ZONE: u64 = 128;
/// Nothing so far behind a copy is of the same stack: 1 GiB.
const FARTHEST: u64 = 1 << 30;
/// Go's heap lies behind goroutines' stacks: what is missed behind such a part is of the same stack
/// if the next frame may have it.
const LARGEST_FRAME: u64 = 64 << 10;

/// A copy.
#[derive(Clone, Copy, Debug)]
pub struct CopiedStack<'a> {
    bytes: &'a [u8],
    parts: [Part; PARTS],
    /// Stack pointer of the frame that is left, and what was in the slot below it.
    popped: Option<(u64, u64)>,
    /// A word behind its end was asked for.
    pub cut: bool,
}

impl<'a> CopiedStack<'a> {
    /// One that begins at the stack pointer.
    #[must_use]
    pub fn new(bytes: &'a [u8], start: u64) -> Self {
        Self::of(bytes, &Part::alone(start, bytes.len()))
    }

    /// One of several parts, whose bytes are one behind the other.
    #[must_use]
    pub fn of(bytes: &'a [u8], parts: &[Part; PARTS]) -> Self {
        Self { bytes, parts: *parts, popped: None, cut: false }
    }

    /// Notes which frame is left next. Where it was interrupted, the slot below its stack pointer
    /// may have been popped a moment ago, while the rule still says that rbp is there. In a live
    /// process the slot can be read; here rbp is in its register.
    pub fn leaves(&mut self, cursor: &Cursor) {
        let popped = (cursor.registers[RSP as usize], cursor.registers[RBP as usize]);
        self.popped = (cursor.exact != 0).then_some(popped);
    }

    /// Eight bytes.
    #[must_use]
    pub fn word(&self, address: u64) -> Option<u64> {
        if let Some((sp, rbp)) = self.popped
            && sp.checked_sub(address).is_some_and(|below| (1..=RED_ZONE).contains(&below))
        {
            return Some(rbp);
        }
        let bytes = self.at(address, 8)?;
        bytes.try_into().ok().map(u64::from_le_bytes)
    }

    /// As many words as there is room for; false when not all of them are there.
    pub fn words<const N: usize>(&mut self, address: u64, to: &mut [u64; N]) -> bool {
        let Some(bytes) = self.at(address, N * 8) else {
            self.missed(address.saturating_add(N as u64 * 8 - 8));
            return false;
        };
        for (word, bytes) in to.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        true
    }

    /// Notes that what is at an address was found nowhere.
    pub fn missed(&mut self, address: u64) {
        let is_behind = |part: &Part, farthest: u64| {
            let end = part.start.saturating_add(part.bytes);
            // A word may lie half in it.
            let range = end.saturating_sub(7)..end.saturating_add(farthest);
            part.bytes > 0 && range.contains(&address)
        };
        self.cut |= is_behind(&self.parts[OF_POINTER], FARTHEST);
        self.cut |= is_behind(&self.parts[OF_LEFT], LARGEST_FRAME);
    }

    fn at(&self, address: u64, size: usize) -> Option<&'a [u8]> {
        let mut before = 0usize;
        for part in &self.parts {
            let bytes = usize::try_from(part.bytes).ok()?;
            if let Some(at) = address.checked_sub(part.start)
                && let Ok(at) = usize::try_from(at)
                && at.checked_add(size).is_some_and(|end| end <= bytes)
            {
                return self.bytes.get(before.checked_add(at)?..)?.get(..size);
            }
            before = before.checked_add(bytes)?;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_of_the_copy_or_behind_it() {
        let bytes: Vec<u8> = [1u64, 2, 3].iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut copy = CopiedStack::new(&bytes, 0x1000);
        assert_eq!((copy.word(0x1008), copy.word(0x1018), copy.word(0xff8)), (Some(2), None, None));
        let mut two = [0; 2];
        assert!(copy.words(0x1008, &mut two) && two == [2, 3] && !copy.cut);
        copy.missed(0xff8);
        assert!(!copy.cut);
        assert!(!copy.words(0x1010, &mut [0; 2]) && copy.cut, "the second is behind it");
    }

    #[test]
    fn a_word_is_in_the_part_of_its_address() {
        let bytes: Vec<u8> = [1u64, 2, 3, 4].iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut parts = Part::alone(0x1000, 8);
        parts[OF_LEFT] = Part { start: 0x100, bytes: 16 };
        parts[5] = Part { start: 0x10, bytes: 8 };
        let mut copy = CopiedStack::of(&bytes, &parts);
        let words = [0x1000, 0x100, 0x108, 0x10].map(|at| copy.word(at));
        assert_eq!(words, [Some(1), Some(2), Some(3), Some(4)]);
        assert_eq!((copy.word(0x1004), copy.word(0x110)), (None, None), "not in the next part");
        copy.missed(0x18);
        assert!(!copy.cut, "it is behind what is no stack");
        copy.missed(0x110);
        assert!(copy.cut);
        parts[2] = Part { start: 0, bytes: u64::MAX };
        assert_eq!(CopiedStack::of(&bytes, &parts).word(0x200), None, "it is not so long");
    }

    #[test]
    fn what_was_popped_a_moment_ago_is_in_its_register() {
        let mut cursor = Cursor { exact: 1, ..Cursor::default() };
        (cursor.registers[RSP as usize], cursor.registers[RBP as usize]) = (0x1000, 77);
        let mut copy = CopiedStack::new(&[0; 8], 0x1000);
        copy.leaves(&cursor);
        assert_eq!((copy.word(0xff8), copy.word(0x1000)), (Some(77), Some(0)));
        copy.leaves(&Cursor { exact: 0, ..cursor });
        assert_eq!(copy.word(0xff8), None);
    }
}
