//! The end of some bytes, as text that was checked once.

#![allow(unsafe_code, reason = "a check of UTF-8 for each name would cost more than its lookup")]

use std::ffi::CStr;

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

    /// A piece; empty when there is none such. Costs no look at its content.
    pub(super) fn get(&self, at: u32, length: u32) -> &str {
        // SAFETY: checked in `new`, and the bytes do not change.
        let text = unsafe { std::str::from_utf8_unchecked(&self.bytes[self.start..]) };
        let at = at as usize;
        text.get(at..at + length as usize).unwrap_or("")
    }

    /// What begins at a place, up to a zero byte.
    pub(super) fn ended(&self, at: u32) -> &str {
        let rest = self.bytes[self.start..].get(at as usize..).unwrap_or_default();
        let length = CStr::from_bytes_until_nul(rest).map_or(0, CStr::count_bytes);
        self.get(at, length as u32)
    }
}
