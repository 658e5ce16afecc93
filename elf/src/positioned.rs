//! A file read from a position of its own: descriptors that were duplicated share one.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

/// Reads with pread.
#[derive(Debug)]
pub(crate) struct Positioned<'a> {
    file: &'a File,
    at: u64,
    length: u64,
}

impl<'a> Positioned<'a> {
    /// From the beginning of a file of this many bytes.
    pub(crate) fn new(file: &'a File, length: u64) -> Self {
        Self { file, at: 0, length }
    }
}

impl Read for Positioned<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Positioned<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (from, offset) = match to {
            SeekFrom::Start(at) => (at, 0),
            SeekFrom::Current(offset) => (self.at, offset),
            SeekFrom::End(offset) => (self.length, offset),
        };
        let at = from.checked_add_signed(offset);
        self.at = at.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}
