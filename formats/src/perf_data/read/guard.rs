//! Checks the sizes in a perf.data before memory is allocated by them: the crate that reads the
//! file believes every size.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use linux_perf_data::linux_perf_event_reader::{RawEventRecord, RecordType};
use zstd::stream::raw::{Decoder, Operation};

use crate::ReadError;

/// Bytes of features kept: names, build-ids, topology. Real ones have some hundred KiB.
const MAX_FEATURES: u64 = 64 << 20;
/// Bytes of a head; less means a pipe was written to.
const HEADER: u64 = 104;
/// The feature that describes events, and the record that holds a feature where a pipe was written
/// to.
const EVENT_DESC: u32 = 12;
const HEADER_FEATURE: u32 = 80;
/// A record that is followed by as many bytes as it says.
const AUXTRACE: u32 = 71;
/// Records that hold others, compressed.
const COMPRESSED: [u32; 2] = [81, 83];
/// The end of a round: what came before the one before it is sorted and handed on.
const FINISHED_ROUND: u32 = 68;
/// Most bytes the compressed records of a round may hold when they are opened, for they are held
/// together.
const MAX_OPENED: u64 = 512 << 20;

/// Whether the file is one that was written to a pipe.
///
/// # Errors
/// When it is no perf.data, or says that it holds more than it has.
pub fn check(file: &mut File) -> Result<bool, ReadError> {
    let bad = |what: &str| ReadError::PerfData(what.to_owned());
    let length = file.metadata()?.len();
    let mut head = [0; 16];
    file.read_exact_at(&mut head, 0).map_err(|_cause| bad("it has no head"))?;
    if &head[..8] == b"2ELIFREP" {
        return Err(bad("it is of a big-endian host"));
    }
    if word(&head, 8) < HEADER {
        records(file, 16, length)?;
        return Ok(true);
    }
    let mut head = [0; HEADER as usize];
    file.read_exact_at(&mut head, 0).map_err(|_cause| bad("its head is cut"))?;
    let word = |at: usize| word(&head, at);
    let fits = |offset: u64, size: u64| offset.checked_add(size).is_some_and(|end| end <= length);
    let (attrs, data) = ((word(24), word(32)), (word(40), word(48)));
    if data.1 == 0 && data.0 != 0 {
        return Err(bad("it has no data: perf record was killed before it finished"));
    }
    if word(16) == 0 || word(16) > 4096 || !fits(attrs.0, attrs.1) || attrs.1 > 1 << 20 {
        return Err(bad("its event attributes are not in it"));
    }
    if !fits(data.0, data.1) {
        return Err(bad("it is cut: its data is larger than the file"));
    }
    if word(64) != 0 || word(88) != 0 || word(96) != 0 {
        return Err(bad("it is of simpleperf, or of a perf older than any that is read"));
    }
    let features: u32 = (72..104).step_by(8).map(|at| word(at).count_ones()).sum();
    let mut table = vec![0; features as usize * 16];
    file.read_exact_at(&mut table, data.0 + data.1)
        .map_err(|_cause| bad("it is cut: its features are not in it"))?;
    let mut all = 0u64;
    for entry in table.chunks_exact(16) {
        let (offset, size) = (self::word(entry, 0), self::word(entry, 8));
        all = all.saturating_add(size);
        if !fits(offset, size) || all > MAX_FEATURES {
            return Err(bad("its features are larger than the file"));
        }
    }
    let bits = word(72);
    if bits >> EVENT_DESC & 1 == 1 {
        // Sections are in the order of their bits.
        let before = (bits & ((1 << EVENT_DESC) - 1)).count_ones() as usize * 16;
        let (offset, size) = (self::word(&table, before), self::word(&table, before + 8));
        let mut events = vec![0; usize::try_from(size).unwrap_or(0)];
        file.read_exact_at(&mut events, offset)?;
        if !events_fit(&events) {
            return Err(bad("its events are more than are in it"));
        }
    }
    records(file, data.0, data.0 + data.1)?;
    Ok(false)
}

/// The word at an offset that is inside.
fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Whether the crate can decode a record: it asserts that the build-id of a mapping has at most 20
/// bytes.
pub fn decodes(record: &RawEventRecord<'_>) -> bool {
    /// `PERF_RECORD_MISC_MMAP_BUILD_ID`, of `PERF_RECORD_MMAP2`: the length of the build-id follows
    /// pid, tid, address, length and offset.
    const BUILD_ID: u16 = 1 << 14;
    const LENGTH: usize = 32;
    let length = || record.data.get(LENGTH..LENGTH + 1).and_then(|mut byte| byte.read_u8().ok());
    record.record_type != RecordType::MMAP2
        || record.misc & BUILD_ID == 0
        || length().is_none_or(|length| length <= 20)
}

/// Whether a description of events holds as many as it says: count, bytes of an attribute, then of
/// each event attribute, count of ids, length of the name, name, ids.
fn events_fit(mut rest: &[u8]) -> bool {
    let mut take = |bytes: u64| {
        let (taken, after) = rest.split_at_checked(usize::try_from(bytes).ok()?)?;
        rest = after;
        Some(taken)
    };
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |all, &b| all << 8 | u64::from(b));
    let mut all = || {
        let (count, size) = (number(take(4)?), number(take(4)?));
        // Each takes more than a byte.
        for _ in 0..count {
            take(size.max(1))?;
            let (ids, name) = (number(take(4)?), number(take(4)?));
            take(name)?;
            take(ids.checked_mul(8)?)?;
        }
        Some(())
    };
    all().is_some()
}

/// Bytes a piece of a stream of zstd has when it is opened.
fn opened_size(stream: &mut Decoder<'_>, piece: Option<&[u8]>) -> u64 {
    let mut rest = piece.unwrap_or_default();
    let mut out = vec![0; 128 << 10];
    let mut all = 0;
    while let Ok(done) = stream.run_on_buffers(rest, &mut out) {
        all += done.bytes_written as u64;
        rest = &rest[done.bytes_read..];
        if done.bytes_read + done.bytes_written == 0 || all > MAX_OPENED {
            break;
        }
    }
    all
}

/// Steps over records: those that announce more than a record holds must be followed by it.
fn records(file: &mut File, start: u64, end: u64) -> Result<(), ReadError> {
    let bad = |what: &str| ReadError::PerfData(what.to_owned());
    file.seek(SeekFrom::Start(start))?;
    let mut input = std::io::BufReader::with_capacity(1 << 18, file);
    let (mut at, mut opened) = (start, 0u64);
    let mut stream = None;
    while at + 8 <= end {
        let mut header = [0; 8];
        if input.read_exact(&mut header).is_err() {
            break;
        }
        let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let size = u64::from(u16::from_le_bytes([header[6], header[7]]));
        if size < 8 {
            break;
        }
        at += size;
        let mut rest = size as i64 - 8;
        if kind == AUXTRACE {
            let mut more = [0; 8];
            if rest < 8 || input.read_exact(&mut more).is_err() {
                break;
            }
            let more = u64::from_le_bytes(more);
            at = at.saturating_add(more);
            if at > end {
                return Err(bad("a trace in it is larger than the file"));
            }
            rest += more as i64 - 8;
        }
        if kind == FINISHED_ROUND {
            opened = 0;
        }
        if kind == HEADER_FEATURE {
            let mut body = vec![0; usize::try_from(rest).unwrap_or(0)];
            if input.read_exact(&mut body).is_err() {
                break;
            }
            rest = 0;
            // Its number has eight bytes, of which the crate looks at four.
            if body.starts_with(&EVENT_DESC.to_le_bytes()) && !body.get(8..).is_some_and(events_fit)
            {
                return Err(bad("its events are more than are in it"));
            }
        }
        if COMPRESSED.contains(&kind) {
            let mut body = vec![0; usize::try_from(rest).unwrap_or(0)];
            if input.read_exact(&mut body).is_err() {
                break;
            }
            rest = 0;
            let stream = match &mut stream {
                Some(stream) => stream,
                none => none.insert(Decoder::new()?),
            };
            // One that is no zstd is for the reader to refuse.
            opened += opened_size(stream, body.get(if kind == 83 { 8 } else { 0 }..));
            if opened > MAX_OPENED {
                return Err(bad("a round of it holds more than is read at once"));
            }
        }
        input.seek_relative(rest)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A file of a pipe, whose only record describes as many events as a number can say.
    fn events_beyond_measure(feature: u64) -> File {
        let mut bytes = b"PERFILE2".to_vec();
        bytes.extend(16u64.to_le_bytes());
        bytes.extend(HEADER_FEATURE.to_le_bytes());
        bytes.extend([0, 0, 24, 0]);
        bytes.extend(feature.to_le_bytes());
        bytes.extend(u64::MAX.to_le_bytes());
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        file
    }

    #[test]
    fn events_beyond_measure_are_refused() {
        let events = u64::from(EVENT_DESC);
        for feature in [events, events | 1 << 32, events | 0x2c6c_6500_0000_0000] {
            let refused = check(&mut events_beyond_measure(feature)).unwrap_err();
            assert!(refused.to_string().contains("its events are more"), "{feature}: {refused}");
        }
        assert!(check(&mut events_beyond_measure(11)).unwrap());
    }
}
