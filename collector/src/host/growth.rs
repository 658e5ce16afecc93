//! When a file grew: what a JIT compiler has written by a sample's time tells which of its
//! functions was at an address then.
//!
//! Sizes are asked for ten times a second, of descriptors that are open. Kept by `jit.rs`; put on
//! the wire by `wire.rs`.

use std::fs::File;
use std::time::Duration;

use rustix::fs::{AtFlags, StatxFlags, statx};

use crate::clock::now_ns;

/// Between two looks at a file's size.
pub const LOOK: Duration = Duration::from_millis(100);
/// Most sizes kept of a file in an epoch. Of 100 in an epoch of 10 s one comes with each look.
const MAX_MARKS: usize = 600;

/// A size a file had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// CLOCK_MONOTONIC nanoseconds.
    pub time_ns: u64,
    /// Bytes.
    pub size: u64,
}

/// Sizes a file had in an epoch. Each replaces the size before it. The first is the size when the
/// epoch began or when the file was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Growth {
    marks: Vec<Mark>,
    /// When it had the last of them at last. Not a mark until it has another.
    looked_ns: u64,
}

impl Growth {
    /// All of them, the oldest first.
    #[must_use]
    pub fn marks(&self) -> &[Mark] {
        &self.marks
    }

    /// It has this size now.
    pub fn now(&mut self, size: u64) {
        self.at(now_ns(), size);
    }

    fn at(&mut self, time_ns: u64, size: u64) {
        let last = self.marks.last().copied();
        if last.is_some_and(|last| last.size == size) {
            self.looked_ns = time_ns;
            return;
        }
        self.marks.truncate(MAX_MARKS - 2);
        // It grew between two looks, and not since it had grown before.
        if let Some(last) = last.filter(|last| last.time_ns < self.looked_ns) {
            self.marks.push(Mark { time_ns: self.looked_ns, ..last });
        }
        self.marks.push(Mark { time_ns, size });
    }

    /// Looks at the size it has.
    pub fn look(&mut self, file: &File) {
        if let Some(size) = size(file) {
            self.now(size);
        }
    }

    /// Another file is there now.
    pub fn restart(&mut self) {
        self.now(0);
    }

    /// Another epoch begins.
    pub fn end_epoch(&mut self) {
        self.marks.drain(..self.marks.len().saturating_sub(1));
    }
}

/// Bytes of a file, as far as they are known without asking a server that may not answer.
#[must_use]
pub fn size(file: &File) -> Option<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(file, c"", flags, StatxFlags::SIZE).ok().map(|found| found.stx_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_quiet_grew_after_the_last_look() {
        let mut growth = Growth::default();
        for (time_ns, size) in [(10, 24), (20, 24), (90, 24), (100, 48), (110, 72)] {
            growth.at(time_ns, size);
        }
        let marks: Vec<_> = growth.marks().iter().map(|it| (it.time_ns, it.size)).collect();
        assert_eq!(marks, [(10, 24), (90, 24), (100, 48), (110, 72)]);
    }
}
