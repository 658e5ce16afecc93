//! Copies what a process says of itself: the OpenTelemetry process context in its memory, and two
//! variables of its environment. No other byte of either is passed on.
//!
//! The context is a header of 32 bytes at the start of a mapping with a known name, and the bytes
//! it points at: `oteps/profiles/4719-process-ctx.md` of the OpenTelemetry specification. What
//! those bytes mean is not looked at here. Called by `open.rs`.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use stackwire_model::{MapsLine, UserAddr};

use super::OpenError;

/// Most that a context may have (the specification's limit).
const MAX_CONTEXT: usize = 64 << 10;
/// Most of a variable.
const MAX_VARIABLE: usize = 8 << 10;
/// Most of an environment that is looked at.
const MAX_ENVIRONMENT: u64 = 1 << 20;
/// How often a context that is being written is read again.
const ATTEMPTS: usize = 3;
/// The version there is.
const VERSION: u32 = 2;

/// Variables of the environment, in the order they are passed on.
const VARIABLES: [&[u8]; 2] = [b"OTEL_SERVICE_NAME=", b"OTEL_RESOURCE_ATTRIBUTES="];

/// A file without a name: three times a length, four bytes, and so many bytes. First comes the
/// context, then the variables; what there is none of is empty.
pub(super) fn copy(task: u32, context: Option<UserAddr>) -> Result<File, OpenError> {
    let context = context.and_then(|at| read_context(task, at)).unwrap_or_default();
    let mut environment = Vec::new();
    // Who may not be looked at says nothing.
    if let Ok(file) = File::open(format!("/proc/{task}/environ")) {
        let _ = file.take(MAX_ENVIRONMENT).read_to_end(&mut environment);
    }
    let [name, attributes] = VARIABLES.map(|variable| value(&environment, variable));
    let mut file = File::from(memfd_create(c"said", MemfdFlags::CLOEXEC)?);
    let mut write = || {
        for part in [context.as_slice(), name, attributes] {
            file.write_all(&(part.len() as u32).to_ne_bytes())?;
            file.write_all(part)?;
        }
        file.rewind()
    };
    write().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    Ok(file)
}

/// The value of a variable in `environ`, proc_pid_environ(5). Pure.
fn value<'a>(environment: &'a [u8], variable: &[u8]) -> &'a [u8] {
    let mut all = environment.split(|&byte| byte == 0);
    let value = all.find_map(|entry| entry.strip_prefix(variable)).unwrap_or_default();
    if value.len() > MAX_VARIABLE { &[] } else { value }
}

/// The bytes of a context. None where there is none, or while it is written.
fn read_context(task: u32, at: UserAddr) -> Option<Vec<u8>> {
    let memory = File::open(format!("/proc/{task}/mem")).ok()?;
    let header = || {
        let mut header = [0; 32];
        memory.read_exact_at(&mut header, at.0).ok()?;
        Some(header)
    };
    for _ in 0..ATTEMPTS {
        let before = header()?;
        let Some((payload, length)) = payload(&before) else { continue };
        if !is_memory(&std::fs::read(format!("/proc/{task}/maps")).ok()?, at, payload, length) {
            return None;
        }
        let mut bytes = vec![0; length];
        memory.read_exact_at(&mut bytes, payload.0).ok()?;
        if header()? == before {
            return Some(bytes);
        }
    }
    None
}

/// Whether all of that is in one mapping, and either without a file or in that of the header, by
/// the text of `/proc/PID/maps`. A file may be of a file system that a process has made up and that
/// does not answer. Pure.
fn is_memory(maps: &[u8], header: UserAddr, start: UserAddr, length: usize) -> bool {
    let end = start.0.saturating_add(length as u64);
    MapsLine::all(maps).any(|line| {
        let contains = line.start <= start && end <= line.end.0;
        contains && (line.file.is_none() || (line.start..line.end).contains(&header))
    })
}

/// Where a context is and how long, by its header. None while it is written. Pure.
fn payload(header: &[u8; 32]) -> Option<(UserAddr, usize)> {
    let word =
        |at: usize| -> u32 { u32::from_ne_bytes([0, 1, 2, 3].map(|byte| header[at + byte])) };
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    let (published_ns, length) = (long(16), word(12) as usize);
    let fits = header.starts_with(b"OTEL_CTX") && word(8) == VERSION && published_ns != 0;
    (fits && (1..=MAX_CONTEXT).contains(&length)).then(|| (UserAddr(long(24)), length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(version: u32, length: u32, published_ns: u64, payload: u64) -> [u8; 32] {
        let mut header = [0; 32];
        header[..8].copy_from_slice(b"OTEL_CTX");
        header[8..12].copy_from_slice(&version.to_ne_bytes());
        header[12..16].copy_from_slice(&length.to_ne_bytes());
        header[16..24].copy_from_slice(&published_ns.to_ne_bytes());
        header[24..].copy_from_slice(&payload.to_ne_bytes());
        header
    }

    #[test]
    fn what_is_no_context_or_is_being_written_is_not_read() {
        assert_eq!(payload(&header(2, 5, 1, 4096)), Some((UserAddr(4096), 5)));
        for bad in [(1, 5, 1), (2, 0, 1), (2, 70_000, 1), (2, 5, 0)] {
            assert_eq!(payload(&header(bad.0, bad.1, bad.2, 4096)), None, "{bad:?}");
        }
        assert_eq!(payload(&[0; 32]), None);
    }

    #[test]
    fn a_context_is_in_memory_alone() {
        let maps = b"1000-3000 rw-p 00000000 00:00 0   [heap]\n3000-4000 r--p 00000000 08:01 7   /x\n4000-5000 rw-p 00000000 00:01 8   /memfd:OTEL_CTX (deleted)\n";
        let at = |start, length| is_memory(maps, UserAddr(0x4000), UserAddr(start), length);
        assert!(at(0x1000, 0x2000) && at(0x4020, 0x100));
        assert!(!at(0x3000, 8) && !at(0x2ff8, 16) && !at(0x5000, 1) && !at(u64::MAX, 1));
    }

    #[test]
    fn of_an_environment_two_variables_are_read() {
        let environment = b"SECRET=x\0OTEL_SERVICE_NAME=shop\0OTEL_SERVICE_NAME=other\0";
        assert_eq!(value(environment, VARIABLES[0]), b"shop");
        assert_eq!(value(environment, VARIABLES[1]), b"");
        let long = [VARIABLES[1], &[b'x'; MAX_VARIABLE + 1]].concat();
        assert_eq!(value(&long, VARIABLES[1]), b"");
    }

    #[test]
    fn the_own_context_is_copied() {
        let content = *b"content";
        let own = header(2, 7, 1, content.as_ptr() as u64);
        let at = UserAddr(own.as_ptr() as u64);
        assert_eq!(read_context(std::process::id(), at).unwrap(), content);
        let unwritten = header(2, 7, 0, content.as_ptr() as u64);
        assert_eq!(read_context(std::process::id(), UserAddr(unwritten.as_ptr() as u64)), None);
        let nowhere = header(2, 7, 1, 16);
        assert_eq!(read_context(std::process::id(), UserAddr(nowhere.as_ptr() as u64)), None);
        let mut copied = Vec::new();
        copy(std::process::id(), Some(at)).unwrap().read_to_end(&mut copied).unwrap();
        assert_eq!(copied[..11], [&7u32.to_ne_bytes()[..], &content].concat());
    }
}
