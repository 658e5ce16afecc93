//! A line of `/proc/PID/maps`, which both halves read of processes and of themselves, and formats
//! in profiles. Pure.

use crate::{Device, FileId, FileOffset, UserAddr};

/// `start-end permissions offset major:minor inode   path`, proc_pid_maps(5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapsLine<'a> {
    /// First address.
    pub start: UserAddr,
    /// First address behind it.
    pub end: UserAddr,
    /// Whether its content may be read.
    pub is_readable: bool,
    /// Whether its content may be written.
    pub is_writable: bool,
    /// Whether its content may be executed.
    pub is_executable: bool,
    /// Offset in the file of the first address.
    pub file_offset: FileOffset,
    /// Its file; none of memory.
    pub file: Option<FileId>,
    /// As the process has it, perhaps followed by ` (deleted)`; `[vdso]` and the like; empty.
    pub path: &'a [u8],
}

impl<'a> MapsLine<'a> {
    /// All lines of a text; those that are none are passed over.
    pub fn all(text: &'a [u8]) -> impl Iterator<Item = Self> {
        text.split(|&byte| byte == b'\n').filter_map(Self::parse)
    }

    fn parse(line: &'a [u8]) -> Option<Self> {
        // Only the path may be in another encoding.
        let mut fields = line.splitn(6, |&byte| byte == b' ');
        let mut word = || std::str::from_utf8(fields.next()?).ok();
        let (start, end) = word()?.split_once('-')?;
        let permissions = word()?;
        let file_offset = FileOffset(hex(word()?)?);
        let (major, minor) = word()?.split_once(':')?;
        let number = |text| u32::from_str_radix(text, 16).ok();
        let device = Device { major: number(major)?, minor: number(minor)? };
        let file = FileId::new(word()?.parse().ok()?, device);
        let (start, end) = (UserAddr(hex(start)?), UserAddr(hex(end)?));
        let is_readable = permissions.as_bytes().first() == Some(&b'r');
        let is_writable = permissions.as_bytes().get(1) == Some(&b'w');
        let is_executable = permissions.as_bytes().get(2) == Some(&b'x');
        let path = fields.next().unwrap_or_default().trim_ascii_start();
        (start < end).then_some(Self {
            start,
            end,
            is_readable,
            is_writable,
            is_executable,
            file_offset,
            file,
            path,
        })
    }
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_are_those_the_kernel_writes() {
        let text = b"\
55d0-66d0 r-xp 00002000 fe:01 1234                       /usr/bin/a \xff (deleted)\n\
7000-8000 rw-p 00000000 00:00 0                          [heap]\n\
9000-a000 r-xp 00000000 00:00 0 \n\
a000-9000 r-xp 00000000 00:00 0 \n\
b000-c000 r-xp 00000000 00:00\n\
nonsense\n";
        let lines: Vec<_> = MapsLine::all(text).collect();
        let device = Device { major: 0xfe, minor: 1 };
        let first = MapsLine {
            start: UserAddr(0x55d0),
            end: UserAddr(0x66d0),
            is_readable: true,
            is_writable: false,
            is_executable: true,
            file_offset: FileOffset(0x2000),
            file: FileId::new(1234, device),
            path: b"/usr/bin/a \xff (deleted)",
        };
        assert_eq!((lines.len(), lines[0]), (3, first));
        assert_eq!((lines[1].path, lines[1].file), (&b"[heap]"[..], None));
        assert!(!lines[1].is_executable && lines[2].is_executable);
        assert_eq!(lines[2].path, b"");
    }

    proptest! {
        #[test]
        fn never_panics(line in "[0-9a-f:x /\n-]{0,80}") {
            let _ = MapsLine::all(line.as_bytes()).count();
        }
    }
}
