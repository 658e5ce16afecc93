//! The top of a stack, copied together with the registers, as perf events give it
//! (`PERF_SAMPLE_STACK_USER` of include/uapi/linux/perf_event.h). User space alone walks such a
//! copy: the collector without eBPF, and the reader of perf.data.

use crate::arch::{RBP, RSP};
use crate::walk::unwind::Cursor;

/// Below the stack pointer, and still the function's (System V ABI).
const RED_ZONE: u64 = 128;
/// Nothing so far behind a copy is of the same stack: 1 GiB.
const FARTHEST: u64 = 1 << 30;

/// A copy.
#[derive(Clone, Copy, Debug)]
pub struct CopiedStack<'a> {
    bytes: &'a [u8],
    /// Address of the first byte.
    start: u64,
    /// Stack pointer of the frame that is left, and what was in the slot below it.
    popped: Option<(u64, u64)>,
    /// A word behind its end was asked for.
    pub cut: bool,
}

impl<'a> CopiedStack<'a> {
    /// One that begins at the stack pointer.
    #[must_use]
    pub fn new(bytes: &'a [u8], start: u64) -> Self {
        Self { bytes, start, popped: None, cut: false }
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
        let end = self.start.saturating_add(self.bytes.len() as u64);
        // A word may lie half in it.
        self.cut |= (end.saturating_sub(7)..end.saturating_add(FARTHEST)).contains(&address);
    }

    fn at(&self, address: u64, size: usize) -> Option<&'a [u8]> {
        let at = usize::try_from(address.checked_sub(self.start)?).ok()?;
        self.bytes.get(at..at.checked_add(size)?)
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
