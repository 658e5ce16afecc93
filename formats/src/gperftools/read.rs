//! CPU profiles of gperftools (`CPUPROFILE=`): 64-bit words, then the text of `/proc/self/maps`.
//! The format is described in gperftools' `cpuprofile-fileformat.html`.

use std::io::Read;

use stackwire_model::profile::{Builder, EndReason, Executable, FrameKind, Origin, SampleKey};
use stackwire_model::{Event, MapsLine, UserAddr};

use crate::ReadError;
use crate::tasks::{Map, TaskId, Tasks};

/// Bytes of a profile read.
const MAX_BYTES: u64 = 256 << 20;
/// Deeper than gperftools records (254).
const MAX_DEPTH: u64 = 4096;

/// Whether a file begins like one: 0, header words (3), version 0, period, 0.
#[must_use]
pub fn is_one(head: &[u8]) -> bool {
    let word = |at: usize| {
        head.get(at * 8..at * 8 + 8)
            .map(|bytes| bytes.iter().rev().fold(0u64, |all, &byte| all << 8 | u64::from(byte)))
    };
    word(0) == Some(0)
        && word(1) == Some(3)
        && word(2) == Some(0)
        && word(3).is_some_and(|period| (1..=10_000_000).contains(&period))
        && word(4) == Some(0)
}

/// Reads a profile.
///
/// # Errors
/// When the file is cut, or when something it says of itself cannot be.
pub fn read(input: impl Read, into: &mut Builder, number: usize) -> Result<(), ReadError> {
    let bad = |what: &str| ReadError::Gperftools(what.to_owned());
    let mut bytes = Vec::new();
    input.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(bad("it is larger than any that is read"));
    }
    let mut words = bytes.chunks_exact(8).map(|chunk| {
        let mut word = [0; 8];
        word.copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    let period_ns = words.nth(3).unwrap_or(0).saturating_mul(1000);
    let frequency = u32::try_from(1_000_000_000 / period_ns.max(1)).unwrap_or(0);
    into.capture(number, Origin::default(), 0);
    let series = into.series(vec![(Event::by_name("cpu"), frequency)])?[0];
    words.next();
    let mut samples = Vec::new();
    let mut used = 5;
    loop {
        let cut = || bad("it is cut");
        let (count, depth) = (words.next().ok_or_else(cut)?, words.next().ok_or_else(cut)?);
        if depth == 0 || depth > MAX_DEPTH {
            return Err(bad("a stack in it is deeper than any"));
        }
        let mut stack = Vec::new();
        for index in 0..depth {
            let kind = if index == 0 { FrameKind::Exact } else { FrameKind::Caller };
            stack.push((UserAddr(words.next().ok_or_else(cut)?), kind));
        }
        used += 2 + depth as usize;
        // The trailer: no samples, one frame, at 0.
        if count == 0 && stack == [(UserAddr(0), FrameKind::Exact)] {
            break;
        }
        samples.push((count, stack));
    }
    let mut tasks = Tasks::default();
    let mut main = None;
    for line in MapsLine::all(&bytes[used * 8..]).filter(|line| line.is_executable) {
        let Some((map, path)) = mapping(&line, into)? else { continue };
        main.get_or_insert_with(|| path.rsplit('/').next().unwrap_or_default().to_owned());
        tasks.map(into, 0, map)?;
    }
    let only = TaskId { pid: 0, tid: 0 };
    tasks.comm(into, only, main.unwrap_or_default(), false)?;
    let mut taken = 0u64;
    for (count, stack) in samples {
        let user = tasks.stack(into, 0, &stack, EndReason::NotSaid)?;
        let (thread, _) = tasks.thread(into, only)?;
        let key = SampleKey { series, thread, user, kernel: None, labels: 0 };
        into.weighted(key, count, count.saturating_mul(period_ns))?;
        taken = taken.saturating_add(count);
    }
    into.taken(Some(taken));
    Ok(())
}

/// An executable mapping, with its path.
fn mapping(line: &MapsLine<'_>, into: &mut Builder) -> Result<Option<(Map, String)>, ReadError> {
    let path = String::from_utf8_lossy(line.path);
    let path = path.strip_suffix(" (deleted)").unwrap_or(&path);
    let executable = match path {
        "[vdso]" => Executable::Vdso { image: None },
        path if path.is_empty() || path.starts_with('[') => return Ok(None),
        path => Executable::File { path: path.to_owned(), key: line.file.map(Into::into) },
    };
    let executable = into.executable(executable)?;
    let &MapsLine { start, end, file_offset, .. } = line;
    let map = Map { start, end, file_offset, executable, private: false, since: 0 };
    Ok(Some((map, path.to_owned())))
}

#[cfg(test)]
mod tests {
    use stackwire_model::FileOffset;

    use super::*;

    #[test]
    fn a_profile_is_told_from_others_and_read() {
        let words = [0u64, 3, 0, 10_000, 0, 7, 2, 0x40_1010, 0x40_1021, 0, 1, 0];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(b"00401000-00402000 r-xp 00001000 fe:01 77 /bin/a prog (deleted)\n");
        assert!(is_one(&bytes) && !is_one(&bytes[8..]) && !is_one(b"short"));
        let mut into = Builder::new();
        assert!(read(&*bytes, &mut into, 0).is_ok());
        let profile = into.build();
        assert_eq!((profile.sample_count(), profile.samples[0].value), (7, 70_000_000));
        let at: Vec<_> = profile.locations.iter().map(|at| at.address.file()).collect();
        assert_eq!(at, [0x1010, 0x1020].map(|offset| Some(FileOffset(offset))));
        assert_eq!(profile.processes[0].comm, "a prog");
        for cut in 40..words.len() * 8 - 1 {
            assert!(read(&bytes[..cut], &mut Builder::new(), 0).is_err(), "{cut}");
        }
    }

    #[test]
    fn more_frames_than_are_ever_added_up_are_refused() {
        // The period is 0: time alone would be little.
        let counted = |count: u64| {
            let words = [0u64, 3, 0, 0, 0, count, 4, 0x40_1010, 0x40_1021, 0x40_1031, 0x40_1041];
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.extend([0u64, 1, 0].iter().flat_map(|word| word.to_le_bytes()));
            bytes.extend(b"00401000-00402000 r-xp 00001000 fe:01 77 /bin/prog\n");
            read(&*bytes, &mut Builder::new(), 0).map_err(|refused| refused.to_string())
        };
        assert_eq!(counted(1 << 60), Ok(()));
        assert!(counted((1 << 60) + 1).unwrap_err().contains("frames"));
    }
}
