//! The end of some bytes, as text that was checked once.

#![allow(unsafe_code, reason = "a check of UTF-8 for each name would cost more than its lookup")]

use stackwire_elf::Bytes;

/// The end of some bytes, as text.
#[derive(Clone, Debug)]
pub(super) struct Text {
    bytes: Bytes,
    start: usize,
}

impl Text {
    /// `None` when it is no UTF-8, or begins behind the end.
    pub(super) fn new(bytes: Bytes, start: usize) -> Option<Self> {
        std::str::from_utf8(bytes.get(start..)?).ok()?;
        Some(Self { bytes, start })
    }

    /// The piece at a place, of a length; empty when there is none such. Costs no look at its
    /// content.
    pub(super) fn get(&self, (at, length): (u32, u32)) -> &str {
        // SAFETY: checked in `new`, and the bytes do not change.
        let text = unsafe { std::str::from_utf8_unchecked(&self.bytes[self.start..]) };
        let at = at as usize;
        text.get(at..at + length as usize).unwrap_or("")
    }
}
