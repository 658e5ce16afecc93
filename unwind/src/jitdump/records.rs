//! The records of a jitdump, in the order they were written. What they say of functions is for who
//! asks: the unwind compiler here, names in `symbols/src/jit/jitdump.rs`. Pure.
//!
//! Layout: tools/perf/Documentation/jitdump-specification.txt.

/// `JiTD` in the byte order of the writer.
const MAGIC: u32 = 0x4A69_5444;
/// Bytes in front of the body of a record.
const HEAD: usize = 16;
/// Flag of the header: times are of the processor's counter and not of a clock.
const PROCESSOR_TIMES: u64 = 1;

/// What a record is about: `enum jit_record_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// Code was made.
    Load,
    /// Code was moved.
    Move,
    /// Lines of the code that is made next.
    DebugInfo,
    /// How to leave the code that is made next.
    Unwinding,
    /// Any other.
    Other,
}

/// A record.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// What it is about.
    pub kind: RecordKind,
    /// Where in the file it begins.
    pub offset: u64,
    /// When it was written, in nanoseconds of a clock; none where the file has other times.
    pub time_ns: Option<u64>,
    /// What it says; a part of that, if it is not `whole`.
    pub body: Fields<'a>,
    /// Whether the file has all of it. It is the last one otherwise.
    pub whole: bool,
}

/// The records of a file, up to its end or to the record that says that it is closed.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    content: &'a [u8],
    rest: &'a [u8],
    big: bool,
    clock: bool,
}

impl<'a> Records<'a> {
    /// None where the content does not begin as a jitdump.
    #[must_use]
    pub fn new(content: &'a [u8]) -> Option<Self> {
        let magic = *content.first_chunk::<4>()?;
        let big = match (u32::from_le_bytes(magic), u32::from_be_bytes(magic)) {
            (MAGIC, _) => false,
            (_, MAGIC) => true,
            _ => return None,
        };
        let mut header = Fields { bytes: content, big };
        header.skip(8)?;
        let size = header.word()?;
        header.skip(20)?;
        let clock = header.long()? & PROCESSOR_TIMES == 0;
        Some(Self { content, rest: content.get(size as usize..)?, big, clock })
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        let mut head = Fields { bytes: self.rest, big: self.big };
        let (kind, size, time_ns) = (head.word()?, head.word()? as usize, head.long()?);
        let offset = (self.content.len() - self.rest.len()) as u64;
        let whole = size <= self.rest.len();
        let body = self.rest.get(HEAD..size.min(self.rest.len()))?;
        self.rest = self.rest.get(size..).unwrap_or_default();
        let kind = match kind {
            0 => RecordKind::Load,
            1 => RecordKind::Move,
            2 => RecordKind::DebugInfo,
            3 => {
                self.rest = &[];
                return None;
            }
            4 => RecordKind::Unwinding,
            _ => RecordKind::Other,
        };
        let time_ns = (self.clock && time_ns != 0).then_some(time_ns);
        let body = Fields { bytes: body, big: self.big };
        Some(Record { kind, offset, time_ns, body, whole })
    }
}

/// Fields of a record, from its beginning to its end.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    bytes: &'a [u8],
    big: bool,
}

impl<'a> Fields<'a> {
    /// Passes over some bytes.
    pub fn skip(&mut self, count: usize) -> Option<()> {
        self.bytes = self.bytes.get(count..)?;
        Some(())
    }

    /// Four bytes.
    pub fn word(&mut self) -> Option<u32> {
        let (word, rest) = self.bytes.split_first_chunk::<4>()?;
        self.bytes = rest;
        Some(if self.big { u32::from_be_bytes(*word) } else { u32::from_le_bytes(*word) })
    }

    /// Eight bytes.
    pub fn long(&mut self) -> Option<u64> {
        let (long, rest) = self.bytes.split_first_chunk::<8>()?;
        self.bytes = rest;
        Some(if self.big { u64::from_be_bytes(*long) } else { u64::from_le_bytes(*long) })
    }

    /// Text up to its NUL.
    pub fn text(&mut self) -> Option<&'a [u8]> {
        let end = self.bytes.iter().position(|&byte| byte == 0)?;
        let text = &self.bytes[..end];
        self.bytes = &self.bytes[end + 1..];
        Some(text)
    }

    /// What is left.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.bytes
    }
}
