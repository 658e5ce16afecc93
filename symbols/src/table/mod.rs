//! The compiled table: everything one executable's symbols can say, in a form that is mapped and
//! searched as it is. Made once per build-id by `compile/`, kept by the cache, asked by the
//! symbolizer.
//!
//! # Format
//!
//! Little-endian 32-bit words throughout, read in place; nothing is decoded when a table is opened.
//!
//! | part | words an entry | what |
//! |---|---|---|
//! | header | 16 | magic with version, checksum (XXH3 of all that follows it), base, counts |
//! | segments | 6 | file offset, address, size: how offsets in the file become addresses |
//! | starts | 1 | first address of each range, less the base, ascending |
//! | leaves | 1 | node of each range, 0 for none |
//! | buckets | 1 | first range at or after each multiple of 2^shift: what a search starts from |
//! | nodes | 7 | function (place, length and kind), file (place, length), line, node of the frame it is inlined into, place of the readable name |
//! | bounds | 3 | first address and length of each function that has addresses no name covers, ascending |
//! | text | – | names, raw (mangled), then readable ones, each with a zero byte behind it; UTF-8 |
//!
//! A chain of inlined calls is a path in a tree of nodes, as in a stack, and shared the same way.
//! An address costs one bucket, a search among the few ranges of it, and a step a frame. Nothing is
//! allocated. Nodes hold the places of their names, not numbers of functions and files: a third
//! larger, and one cache line a frame instead of three.
//!
//! Names are kept as the producer wrote them, for `--no-demangle`, and made readable once, when the
//! table is written: another demangler takes another version.
//!
//! # Against what else there is
//!
//! Side by side in one run on two shared cores, 20,000 random addresses with whole chains; libjvm's
//! 156 MB debug file (2.5 frames an address), and this program with full debug information (3.6):
//!
//! | | conversion | size | lookup | peak memory |
//! |---|---|---|---|---|
//! | libjvm: ours | 2.0 s | 51 MB | 0.17–0.31 µs | 212 MiB |
//! | symbolic-symcache | 4.2 s | 52 MB | 1.9 µs | 688 MiB |
//! | blazesym on DWARF | – | – | 90 µs, then 3.3 | 726 MiB |
//! | this program: ours | 0.7 s | 37 MB | 0.5 µs | 209 MiB |
//! | symbolic-symcache | 1.6 s | 35 MB | 2.3 µs | 236 MiB |
//! | blazesym on DWARF | – | – | 16 µs, then 2.6 | 153 MiB |
//! | blazesym on GSYM | – | 22 MB | 5.8 µs | 32 MiB |
//!
//! symbolic-symcache is 13.9, GSYM is llvm-gsymutil 22's, blazesym 0.2.7. None of them says which
//! kind of symbol a name is from, and none keeps the segments that turn offsets in a file into
//! addresses.
//!
//! # Versions
//!
//! - 2: the first.
//! - 3: bounds.
//! - 4: GHC's functions; no piece of code with a line and no name.
//! - 5: readable names.

mod readable;
mod text;
mod write;

use std::ops::Range;

use stackwire_elf::{Bytes, Segment};

use self::text::Text;
pub use self::write::{NodeKey, Writer};

/// Magic with the version in its last byte.
const MAGIC: [u8; 8] = *b"SWTABLE\x05";
/// Bytes of the header.
const HEADER: usize = 64;
/// Words of a node.
const NODE: usize = 7;
/// In place of the readable name of what has none.
const NO_TEXT: u32 = u32::MAX;
/// Words of the bounds of a function.
const BOUND: usize = 3;
/// Bits of the kind, below the length of a function's name.
const KIND_BITS: u32 = 3;
/// Longest chain followed; a table that is damaged in a way its checksum does not show must not
/// loop.
const MAX_CHAIN: usize = 1024;

/// Version of the format, part of the key tables are cached under.
pub const VERSION: u8 = MAGIC[7];

/// Where a function's name came from, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// DWARF: with inlined callees, files and lines.
    Dwarf = 0,
    /// Go's `.gopclntab`.
    Gopclntab = 1,
    /// `.symtab`.
    Symtab = 2,
    /// `.symtab` of `.gnu_debugdata`.
    MiniDebugInfo = 3,
    /// `.dynsym`.
    Dynsym = 4,
}

impl Kind {
    const ALL: [Self; 5] =
        [Self::Dwarf, Self::Gopclntab, Self::Symtab, Self::MiniDebugInfo, Self::Dynsym];
}

/// A table that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// Another magic or version.
    #[error("not a table of this version")]
    Version,
    /// Its parts do not fit in it.
    #[error("the table is cut or its counts are wrong")]
    Cut,
    /// The checksum differs.
    #[error("the checksum of the table is wrong")]
    Checksum,
}

/// A frame: a function, and where in it.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'t> {
    /// Name as the producer wrote it, empty when there is none.
    pub function: &'t str,
    /// Source file, empty when unknown.
    pub file: &'t str,
    /// Line, 0 when unknown.
    pub line: u32,
    /// Where the name is from.
    pub kind: Kind,
    readable: u32,
    text: &'t Text,
}

impl<'t> Frame<'t> {
    /// The readable form of its name, where the table has one; else it is made by `demangle`.
    #[must_use]
    pub fn readable(&self) -> Option<&'t str> {
        (self.readable != NO_TEXT).then(|| self.text.ended(self.readable))
    }
}

/// An opened table.
#[derive(Debug)]
pub struct Table {
    bytes: Bytes,
    checksum: u64,
    base: u64,
    shift: u32,
    segments: Part,
    starts: Part,
    leaves: Part,
    buckets: Part,
    nodes: Part,
    bounds: Part,
    text: Text,
    best: Option<Kind>,
}

/// Where a part lies and how many words it has.
#[derive(Clone, Copy, Debug)]
struct Part {
    at: usize,
    words: usize,
}

impl Table {
    /// Opens a table and checks all of it against its checksum.
    ///
    /// # Errors
    /// See [`TableError`].
    pub fn open(bytes: Bytes) -> Result<Self, TableError> {
        let data: &[u8] = &bytes;
        if data.get(..8) != Some(&MAGIC[..]) {
            return Err(TableError::Version);
        }
        let header = data.get(..HEADER).ok_or(TableError::Cut)?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if xxhash_rust::xxh3::xxh3_64(&data[16..]) != long(8) {
            return Err(TableError::Checksum);
        }
        let mut at = HEADER;
        let mut part = |count: u32, each: usize| {
            let words = count as usize * each;
            let found = Part { at, words };
            at += words * 4;
            found
        };
        let (segments, starts, leaves) = (part(word(24), 6), part(word(28), 1), part(word(28), 1));
        let (buckets, nodes) = (part(word(32), 1), part(word(36), NODE));
        let bounds = part(word(48), BOUND);
        let (shift, best) = (word(40), Kind::ALL.get(word(44) as usize).copied());
        if shift >= 32 {
            return Err(TableError::Cut);
        }
        let base = long(16);
        let text = Text::new(bytes.clone(), at).ok_or(TableError::Cut)?;
        let checksum = long(8);
        Ok(Self {
            bytes,
            checksum,
            base,
            shift,
            segments,
            starts,
            leaves,
            buckets,
            nodes,
            bounds,
            text,
            best,
        })
    }

    /// What tells it from any other table.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// Address a byte of the file is loaded at.
    #[must_use]
    pub fn address_of(&self, offset: u64) -> Option<u64> {
        self.segments().find_map(|segment| {
            let inside = offset.checked_sub(segment.offset).filter(|&inside| inside < segment.size);
            segment.address.checked_add(inside?)
        })
    }

    /// Segments of the executable; none when only its debug file was at hand.
    pub fn segments(&self) -> impl Iterator<Item = Segment> {
        (0..self.segments.words / 6).map(|index| {
            let long = |at| {
                let word = |at| u64::from(self.word(self.segments, at).unwrap_or(0));
                word(index * 6 + at) | word(index * 6 + at + 1) << 32
            };
            Segment { offset: long(0), address: long(2), size: long(4) }
        })
    }

    /// Frames at an address, innermost first; none when nothing covers it.
    #[must_use]
    pub fn lookup(&self, address: u64) -> Frames<'_> {
        Frames { table: self, node: self.leaf(address).unwrap_or(0), left: MAX_CHAIN }
    }

    /// Functions that are not inlined: first address, name. One that has several parts comes
    /// several times.
    pub fn functions(&self) -> impl Iterator<Item = (u64, &str)> {
        let mut before = "";
        (0..self.starts.words).filter_map(move |index| {
            let node = self.word(self.leaves, index)?;
            let name = Frames { table: self, node, left: MAX_CHAIN }.last();
            let name = name.map_or("", |frame| frame.function);
            let new = name != before && !name.is_empty();
            before = name;
            let start = self.word(self.starts, index)?;
            new.then_some((self.base + u64::from(start), name))
        })
    }

    /// Bounds of the function that covers an address, for one that has no name there.
    #[must_use]
    pub fn bounds(&self, address: u64) -> Option<Range<u64>> {
        let word = |at| u64::from(self.word(self.bounds, at).unwrap_or(0));
        let start = |index: usize| word(index * BOUND) | word(index * BOUND + 1) << 32;
        let (mut low, mut high) = (0, self.bounds.words / BOUND);
        while low < high {
            let middle = low + (high - low) / 2;
            if start(middle) <= address {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let index = low.checked_sub(1)?;
        let bounds = start(index)..start(index).saturating_add(word(index * BOUND + 2));
        bounds.contains(&address).then_some(bounds)
    }

    /// The best kind of names in it; `None` when there are none.
    #[must_use]
    pub fn best(&self) -> Option<Kind> {
        self.best
    }

    fn leaf(&self, address: u64) -> Option<u32> {
        let address = u32::try_from(address.checked_sub(self.base)?).ok()?;
        let bucket = (address >> self.shift) as usize;
        // The range that covers the address starts in its bucket, or is the last one to start
        // before it.
        let first = self.word(self.buckets, bucket)? as usize;
        let end = self.word(self.buckets, bucket + 1)? as usize;
        let starts = self.bytes.get(self.starts.at + first * 4..self.starts.at + end * 4)?;
        let (words, _) = starts.as_chunks::<4>();
        let inside = words.partition_point(|start| u32::from_le_bytes(*start) <= address);
        self.word(self.leaves, (first + inside).checked_sub(1)?)
    }

    fn word(&self, part: Part, index: usize) -> Option<u32> {
        if index >= part.words {
            return None;
        }
        let bytes = self.bytes.get(part.at + index * 4..)?.first_chunk::<4>()?;
        Some(u32::from_le_bytes(*bytes))
    }
}

/// The frames at an address, innermost first.
#[derive(Clone, Debug)]
pub struct Frames<'t> {
    table: &'t Table,
    node: u32,
    left: usize,
}

impl<'t> Iterator for Frames<'t> {
    type Item = Frame<'t>;

    fn next(&mut self) -> Option<Frame<'t>> {
        let index = self.node.checked_sub(1)? as usize;
        self.left = self.left.checked_sub(1)?;
        let table = self.table;
        let at = table.nodes.at + index * NODE * 4;
        let (words, _) = table.bytes.get(at..at + NODE * 4)?.as_chunks::<4>();
        let [name, name_length, file, file_length, line, parent, readable] =
            <[[u8; 4]; NODE]>::try_from(words).ok()?.map(u32::from_le_bytes);
        self.node = parent;
        let kind = name_length & ((1 << KIND_BITS) - 1);
        Some(Frame {
            function: table.text.get(name, name_length >> KIND_BITS),
            file: table.text.get(file, file_length),
            line,
            kind: Kind::ALL.get(kind as usize).copied().unwrap_or(Kind::Dynsym),
            readable,
            text: &table.text,
        })
    }
}
