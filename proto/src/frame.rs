//! Frames of a capture file: `"SWF" version:u8 length:u32 crc:u32 body`, little-endian.
//!
//! Pure over `Read` and `Write`; opens no file. Written by the collector's file sink and spool and
//! by the symbolizer's capture log, read by `stackwire resolve`.

use std::io::{self, Read, Write};

use prost::Message;

use crate::FORMAT;
use crate::v1::CollectorMessage;

/// Largest body a reader accepts. A writer keeps epochs and artifact pieces far below it.
pub const MAX_FRAME_BYTES: u32 = 64 << 20;

const MAGIC: [u8; 3] = *b"SWF";
const HEADER_BYTES: usize = 12;

/// Why a capture could not be read at all.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// No bytes.
    #[error("the file is empty: the collector wrote nothing, or it was cut to nothing")]
    Empty,
    /// The first bytes are not a frame.
    #[error("not a Stackwire capture: it does not start with a frame header")]
    NotACapture,
    /// A later contract wrote this.
    #[error(
        "written by a newer Stackwire: format {found}, this one reads up to {FORMAT}; use a newer stackwire"
    )]
    Newer {
        /// Format the file declares.
        found: u32,
    },
    /// The reader underneath failed.
    #[error("cannot read: {0}")]
    Io(#[from] io::Error),
}

/// How a capture ended, as far as framing can tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// Bytes of whole frames read.
    pub good_bytes: u64,
    /// Frames whose checksum or content was wrong and that were passed over, with their offsets.
    pub damaged: Vec<u64>,
    /// What cut the reading short, when something did.
    pub cut: Option<String>,
}

/// Appends one message as a frame.
///
/// # Errors
/// Those of the writer; a body over [`MAX_FRAME_BYTES`] is `InvalidInput`.
pub fn write_frame(out: &mut impl Write, message: &CollectorMessage) -> io::Result<()> {
    let body = message.encode_to_vec();
    let length = u32::try_from(body.len())
        .ok()
        .filter(|&length| length <= MAX_FRAME_BYTES)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "frame too large"))?;
    let mut header = [0; HEADER_BYTES];
    header[..3].copy_from_slice(&MAGIC);
    header[3] = FORMAT as u8;
    header[4..8].copy_from_slice(&length.to_le_bytes());
    header[8..].copy_from_slice(&crc32fast::hash(&body).to_le_bytes());
    out.write_all(&header)?;
    out.write_all(&body)
}

/// Writes frames to something that is flushed at the end of each.
#[derive(Debug)]
pub struct FrameWriter<W: Write> {
    out: W,
}

impl<W: Write> FrameWriter<W> {
    /// Wraps a writer, best a buffered one.
    pub fn new(out: W) -> Self {
        Self { out }
    }

    /// Writes one frame and flushes, so that a crash leaves whole frames behind.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&mut self, message: &CollectorMessage) -> io::Result<()> {
        write_frame(&mut self.out, message)?;
        self.out.flush()
    }
}

/// Places looked at that may be a frame: each costs a checksum, and content can have any number.
const MAX_BEGINNINGS: usize = 1000;

/// Where the first whole frame begins, wherever that is: for files whose frames are damaged.
#[must_use]
pub fn find_frame(bytes: &[u8]) -> Option<usize> {
    let is_whole = |from: &[u8]| {
        let (header, rest) = from.split_first_chunk::<HEADER_BYTES>()?;
        let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
        let crc = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        let body = rest.get(..length as usize)?;
        (u32::from(header[3]) <= FORMAT && crc32fast::hash(body) == crc).then_some(())
    };
    let begins = bytes.windows(MAGIC.len()).enumerate().filter(|(_, window)| *window == MAGIC);
    begins.map(|(at, _)| at).take(MAX_BEGINNINGS).find(|&at| is_whole(&bytes[at..]).is_some())
}

/// Reads frames until the end, a cut, or damage it cannot step over.
#[derive(Debug)]
pub struct FrameReader<R: Read> {
    input: R,
    offset: u64,
    /// Up to here there were frames, damaged ones too.
    whole: u64,
    tail: Tail,
    done: bool,
}

impl<R: Read> FrameReader<R> {
    /// Wraps a reader, best a buffered one.
    pub fn new(input: R) -> Self {
        Self { input, offset: 0, whole: 0, tail: Tail::default(), done: false }
    }

    /// The next message; `None` at the end, whose nature [`FrameReader::tail`] tells.
    ///
    /// A frame whose checksum is wrong is passed over when a frame follows it where it should.
    ///
    /// # Errors
    /// Only what makes the whole capture unreadable: see [`ReadError`].
    pub fn next_message(&mut self) -> Result<Option<CollectorMessage>, ReadError> {
        while !self.done {
            let start = self.offset;
            let Some(header) = self.header()? else { break };
            let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
            let crc = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
            let mut body = Vec::new();
            // Grows with what is there, not with what the length field claims.
            let read = (&mut self.input).take(u64::from(length)).read_to_end(&mut body)?;
            self.offset += read as u64;
            if read < length as usize {
                self.stop(format!("cut inside the frame at byte {start}"));
                break;
            }
            self.whole = self.offset;
            let message = (crc32fast::hash(&body) == crc)
                .then(|| CollectorMessage::decode(body.as_slice()).ok())
                .flatten();
            match message {
                Some(message) => {
                    self.tail.good_bytes += HEADER_BYTES as u64 + u64::from(length);
                    return Ok(Some(message));
                }
                None => self.tail.damaged.push(start),
            }
        }
        self.done = true;
        Ok(None)
    }

    /// Where the reader has stopped, or where what is cut begins.
    #[must_use]
    pub fn offset_of_the_end(&self) -> u64 {
        self.whole
    }

    /// How the capture ended; complete once [`FrameReader::next_message`] has returned `None`.
    pub fn tail(&self) -> &Tail {
        &self.tail
    }

    fn header(&mut self) -> Result<Option<[u8; HEADER_BYTES]>, ReadError> {
        let start = self.offset;
        let mut header = Vec::with_capacity(HEADER_BYTES);
        let read = (&mut self.input).take(HEADER_BYTES as u64).read_to_end(&mut header)?;
        self.offset += read as u64;
        if read == 0 {
            return if start == 0 { Err(ReadError::Empty) } else { Ok(None) };
        }
        let Ok(header) = <[u8; HEADER_BYTES]>::try_from(header.as_slice()) else {
            if start == 0 {
                return Err(ReadError::NotACapture);
            }
            self.stop(format!("cut inside the frame header at byte {start}"));
            return Ok(None);
        };
        if header[..3] != MAGIC {
            if start == 0 {
                return Err(ReadError::NotACapture);
            }
            self.stop(format!("no frame where one should start, at byte {start}"));
            return Ok(None);
        }
        if u32::from(header[3]) > FORMAT {
            let found = u32::from(header[3]);
            if start == 0 {
                return Err(ReadError::Newer { found });
            }
            self.stop(format!("a frame of format {found} at byte {start}"));
            return Ok(None);
        }
        let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
        if length > MAX_FRAME_BYTES {
            self.stop(format!(
                "a frame at byte {start} claims {length} bytes, more than any writer makes"
            ));
            return Ok(None);
        }
        Ok(Some(header))
    }

    fn stop(&mut self, why: String) {
        self.tail.cut = Some(why);
        self.done = true;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::v1::{End, collector_message::Body};

    fn end(epochs: u64) -> CollectorMessage {
        CollectorMessage { body: Some(Body::End(End { epochs, ..End::default() })) }
    }

    fn file(count: u64) -> Vec<u8> {
        let mut out = Vec::new();
        for epochs in 0..count {
            write_frame(&mut out, &end(epochs)).unwrap();
        }
        out
    }

    fn read(bytes: &[u8]) -> Result<(Vec<CollectorMessage>, Tail), ReadError> {
        let mut reader = FrameReader::new(bytes);
        let mut messages = Vec::new();
        while let Some(message) = reader.next_message()? {
            messages.push(message);
        }
        Ok((messages, reader.tail().clone()))
    }

    #[test]
    fn reads_back_what_it_wrote_and_concatenates() {
        let mut bytes = file(3);
        bytes.extend(file(2));
        let (messages, tail) = read(&bytes).unwrap();
        assert_eq!(messages, [end(0), end(1), end(2), end(0), end(1)]);
        assert_eq!(tail, Tail { good_bytes: bytes.len() as u64, ..Tail::default() });
    }

    #[test]
    fn every_cut_keeps_the_whole_frames_before_it() {
        let bytes = file(4);
        let boundaries: Vec<_> = (0..=4).map(|n| file(n).len()).collect();
        for cut in 1..bytes.len() {
            match read(&bytes[..cut]) {
                Err(ReadError::NotACapture) => assert!(cut < HEADER_BYTES),
                Err(other) => panic!("cut at {cut}: {other}"),
                Ok((messages, tail)) => {
                    let whole = boundaries.iter().rposition(|&end| end <= cut).unwrap();
                    assert_eq!(messages.len(), whole, "cut at {cut}");
                    assert_eq!(tail.cut.is_some(), !boundaries.contains(&cut), "cut at {cut}");
                }
            }
        }
    }

    #[test]
    fn says_what_is_wrong_with_the_first_bytes() {
        assert!(matches!(read(b""), Err(ReadError::Empty)));
        assert!(matches!(read(b"perf data file, say"), Err(ReadError::NotACapture)));
        let mut newer = file(1);
        newer[3] = 9;
        assert!(matches!(read(&newer), Err(ReadError::Newer { found: 9 })));
    }

    #[test]
    fn a_length_of_4_gib_is_refused_without_allocating_it() {
        let mut bytes = file(1);
        let honest = bytes.len();
        bytes.extend(file(1));
        bytes[honest + 4..honest + 8].copy_from_slice(&u32::MAX.to_le_bytes());
        let (messages, tail) = read(&bytes).unwrap();
        assert_eq!(messages.len(), 1);
        assert!(tail.cut.unwrap().contains("4294967295"));
    }

    #[test]
    fn a_damaged_frame_is_passed_over_and_reported() {
        let first = file(1).len();
        let mut bytes = file(3);
        bytes[first + HEADER_BYTES] ^= 1;
        let (messages, tail) = read(&bytes).unwrap();
        assert_eq!(messages, [end(0), end(2)]);
        assert_eq!(tail.damaged, [first as u64]);
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..512), flip in 0usize..64) {
            let _ = read(&bytes);
            let mut damaged = file(3);
            let at = flip % damaged.len();
            damaged[at] ^= 0x40;
            let _ = read(&damaged);
        }
    }
}
