//! A file, used as a ring, for epochs that memory has no room for. Knows bytes, not what they mean.
//! Called by `outbox.rs`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat};

/// The file. What waits lies between `start` and `end`, which only grow. To get a position in the
/// file, take the remainder after division by the file's largest size.
#[derive(Debug)]
pub(super) struct Spool {
    file: File,
    most: u64,
    start: u64,
    end: u64,
}

/// Where something is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    offset: u64,
    /// Up to where the spool is free once this is gone.
    end: u64,
    /// How much it is.
    pub bytes: usize,
}

impl Spool {
    /// An empty one in a directory, of at most so many bytes.
    pub fn open(directory: &Path, most: u64) -> io::Result<Self> {
        // Without a name: nobody else opens it, and it is gone with this process.
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(openat(CWD, directory, flags, Mode::RUSR | Mode::WUSR)?);
        Ok(Self { file, most, start: 0, end: 0 })
    }

    /// Writes it behind all others; `None` when there is no room, or no luck.
    pub fn write(&mut self, content: &[u8]) -> Option<Place> {
        let length = content.len() as u64;
        if length > self.most || self.most == 0 {
            return None;
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        let mut offset = self.end;
        // In one piece: what does not fit before the end of the file goes to its beginning.
        if offset % self.most + length > self.most {
            offset = (offset / self.most + 1) * self.most;
        }
        if offset + length - self.start > self.most {
            return None;
        }
        self.file.write_all_at(content, offset % self.most).ok()?;
        self.end = offset + length;
        Some(Place { offset: offset % self.most, end: self.end, bytes: content.len() })
    }

    /// Reads it back.
    pub fn read(&self, place: &Place) -> io::Result<Vec<u8>> {
        let mut content = vec![0; place.bytes];
        self.file.read_exact_at(&mut content, place.offset)?;
        Ok(content)
    }

    /// This is gone, and all before it.
    pub fn free(&mut self, place: &Place) {
        self.start = place.end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_larger_than_all_of_it_has_no_room() {
        let directory = tempfile::tempdir().unwrap();
        assert!(Spool::open(directory.path(), 0).unwrap().write(&[1]).is_none());
        let mut spool = Spool::open(directory.path(), 4).unwrap();
        assert!(spool.write(&[1; 5]).is_none());
        let first = spool.write(&[1, 2, 3]).unwrap();
        assert!(spool.write(&[4]).is_some_and(|place| spool.read(&place).unwrap() == [4]));
        assert!(spool.write(&[5]).is_none(), "full");
        spool.free(&first);
        let again = spool.write(&[6, 7]).unwrap();
        assert_eq!((spool.read(&again).unwrap(), again.offset), (vec![6, 7], 0));
        spool.free(&again);
        assert!(spool.write(&[8; 4]).is_some(), "all of it is free");
    }
}
