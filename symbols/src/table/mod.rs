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
//! | nodes | 8 | function, readable name, file, line, caller |
//! | ranges | 2 | first address, less the base, ascending; node, 0 for none |
//! | buckets | 1 | first range at or after each multiple of 2^shift: what a search starts from |
//! | segments | 6 | file offset, address, size: how offsets in the file become addresses |
//! | bounds | 3 | first address and length of each function with addresses no name covers |
//! | files | 2 | place and length of a path |
//! | text | – | names, raw (mangled), then paths and readable names; UTF-8 |
//!
//! In a node, a name is a place in the text and a length; the word with the length of the
//! function's name also holds the kind. A file is its number, from 1 on. The caller is the node of
//! the frame it is inlined into. A chain of inlined calls is a path in a tree of nodes, as in a
//! stack, and shared in the same way. Looking an address up takes one bucket, a search among the
//! few ranges of the bucket, and a step a frame. Nothing is allocated. Large parts are read at
//! random, so a read costs as much as its cache lines: a node is half of one. If functions had
//! numbers, as files have, the table would be a third smaller, and each frame would cost another
//! line.
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
//! | libjvm: ours | 2.5 s | 67 MB | 0.08 µs | 186 MiB |
//! | symbolic-symcache | 4.2 s | 52 MB | 1.9 µs | 688 MiB |
//! | blazesym on DWARF | – | – | 90 µs, then 3.3 | 726 MiB |
//! | this program: ours | 1.0 s | 65 MB | 0.09 µs | 288 MiB |
//! | symbolic-symcache | 1.6 s | 35 MB | 2.3 µs | 236 MiB |
//! | blazesym on DWARF | – | – | 16 µs, then 2.6 | 153 MiB |
//! | blazesym on GSYM | – | 22 MB | 5.8 µs | 32 MiB |
//!
//! Ours makes readable names as well, and the others do not. symbolic-symcache is 13.9, GSYM is
//! llvm-gsymutil 22's, blazesym 0.2.7. None of them says which kind of symbol a name is from, and
//! none keeps the segments that turn offsets in a file into addresses.
//!
//! # Versions
//!
//! - 2: the first.
//! - 3: bounds.
//! - 4: GHC's functions; no piece of code with a line and no name.
//! - 5: readable names.
//! - 6: nodes of half a cache line, ranges with their nodes, files by number.

mod readable;
mod sweep;
mod text;
mod write;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::OnceLock;

use bytestring::ByteString;
use stackwire_elf::{Bytes, Segment};
use stackwire_model::{FileOffset, VirtAddr};

use self::text::Text;
pub use self::write::{NodeKey, Writer};
use crate::demangle::demangle;

/// Magic with the version in its last byte.
const MAGIC: [u8; 8] = *b"SWTABLE\x06";
/// Bytes of the header.
const HEADER: usize = 64;
/// Words of a node.
const NODE: usize = 8;
/// Words of a range.
const RANGE: usize = 2;
/// Words of a segment.
const SEGMENT: usize = 6;
/// Words of a file.
const FILE: usize = 2;
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
    /// Line, 0 when unknown.
    pub line: u32,
    /// Where the name is from.
    pub kind: Kind,
    table: &'t Table,
    function: (u32, u32),
    readable: (u32, u32),
    file: u32,
}

impl<'t> Frame<'t> {
    /// Name as the producer wrote it, empty when there is none.
    #[must_use]
    pub fn function(&self) -> &'t str {
        self.table.text.get(self.function)
    }

    /// The same name, to keep.
    #[must_use]
    pub fn raw_name(&self) -> ByteString {
        self.table.text.keep(self.function)
    }

    /// The readable form of its name, to keep: that of the table; where the table has none, it is
    /// made now.
    #[must_use]
    pub fn readable_name(&self) -> ByteString {
        if self.readable.0 != NO_TEXT {
            return self.table.text.keep(self.readable);
        }
        match demangle(self.function()) {
            Cow::Borrowed(_) => self.raw_name(),
            Cow::Owned(readable) => readable.into(),
        }
    }

    /// Source file, to keep; empty when unknown.
    #[must_use]
    pub fn file(&self) -> ByteString {
        let Some(index) = (self.file as usize).checked_sub(1) else { return ByteString::new() };
        let table = self.table;
        let word = |at| table.word(table.files, index * FILE + at).unwrap_or(0);
        let place = (word(0), word(1));
        // Pieces of a table in our own memory are copied: once a file, not once a frame.
        match table.copied_files.get(index) {
            Some(copied) => copied.get_or_init(|| table.text.keep(place)).clone(),
            None => table.text.keep(place),
        }
    }
}

/// An opened table.
#[derive(Debug)]
pub struct Table {
    bytes: Bytes,
    checksum: u64,
    base: u64,
    shift: u32,
    nodes: Part,
    ranges: Part,
    buckets: Part,
    segments: Part,
    bounds: Part,
    files: Part,
    text: Text,
    /// Paths that were asked for, of a table whose text is not shared.
    copied_files: Box<[OnceLock<ByteString>]>,
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
        let table = Self::open_again(bytes)?;
        if xxhash_rust::xxh3::xxh3_64(&table.bytes[16..]) != table.checksum {
            return Err(TableError::Checksum);
        }
        Ok(table)
    }

    /// The same of bytes that were checked before.
    ///
    /// # Errors
    /// As [`Table::open`], the checksum aside.
    pub fn open_again(bytes: Bytes) -> Result<Self, TableError> {
        let data: &[u8] = &bytes;
        if data.get(..8) != Some(&MAGIC[..]) {
            return Err(TableError::Version);
        }
        let header = data.get(..HEADER).ok_or(TableError::Cut)?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let mut at = HEADER;
        let mut part = |count: u32, each: usize| {
            let words = count as usize * each;
            let found = Part { at, words };
            at += words * 4;
            found
        };
        let (nodes, ranges) = (part(word(24), NODE), part(word(28), RANGE));
        let (buckets, segments) = (part(word(32), 1), part(word(36), SEGMENT));
        let (bounds, files) = (part(word(40), BOUND), part(word(44), FILE));
        let (shift, best) = (word(48), Kind::ALL.get(word(52) as usize).copied());
        if shift >= 32 {
            return Err(TableError::Cut);
        }
        let base = long(16);
        let text = Text::new(bytes.clone(), at).ok_or(TableError::Cut)?;
        let checksum = long(8);
        let copied = if text.is_shared() { 0 } else { files.words / FILE };
        let copied_files = (0..copied).map(|_| OnceLock::new()).collect();
        Ok(Self {
            bytes,
            checksum,
            base,
            shift,
            nodes,
            ranges,
            buckets,
            segments,
            bounds,
            files,
            text,
            copied_files,
            best,
        })
    }

    /// What tells it from any other table.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// Gives the memory of a mapped table back to the system. It can be asked as before.
    pub fn forget_pages(&self) {
        self.bytes.forget_pages();
    }

    /// Address a byte of the file is loaded at.
    #[must_use]
    pub fn address_of(&self, offset: FileOffset) -> Option<VirtAddr> {
        self.segments().find_map(|segment| {
            let inside = offset.since(segment.offset).filter(|&inside| inside < segment.size);
            segment.address.checked_add(inside?)
        })
    }

    /// Segments of the executable; none when only its debug file was at hand.
    pub fn segments(&self) -> impl Iterator<Item = Segment> {
        (0..self.segments.words / SEGMENT).map(|index| {
            let long = |at| {
                let word = |at| u64::from(self.word(self.segments, at).unwrap_or(0));
                word(index * SEGMENT + at) | word(index * SEGMENT + at + 1) << 32
            };
            Segment { offset: FileOffset(long(0)), address: VirtAddr(long(2)), size: long(4) }
        })
    }

    /// Frames at an address, innermost first; none when nothing covers it.
    #[must_use]
    pub fn lookup(&self, address: VirtAddr) -> Frames<'_> {
        Frames { table: self, node: self.leaf(address).unwrap_or(0), left: MAX_CHAIN }
    }

    /// Functions that are not inlined: first address, name. One that has several parts comes
    /// several times.
    pub fn functions(&self) -> impl Iterator<Item = (VirtAddr, &str)> {
        let mut before = "";
        (0..self.ranges.words / RANGE).filter_map(move |index| {
            let node = self.word(self.ranges, index * RANGE + 1)?;
            let name = Frames { table: self, node, left: MAX_CHAIN }.last();
            let name = name.map_or("", |frame| frame.function());
            let new = name != before && !name.is_empty();
            before = name;
            let start = self.word(self.ranges, index * RANGE)?;
            new.then_some((VirtAddr(self.base).saturating_add(start.into()), name))
        })
    }

    /// Bounds of the function that covers an address, for one that has no name there.
    #[must_use]
    pub fn bounds(&self, address: VirtAddr) -> Option<Range<VirtAddr>> {
        let word = |at| u64::from(self.word(self.bounds, at).unwrap_or(0));
        let start = |index: usize| VirtAddr(word(index * BOUND) | word(index * BOUND + 1) << 32);
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

    fn leaf(&self, address: VirtAddr) -> Option<u32> {
        let address = u32::try_from(address.since(VirtAddr(self.base))?).ok()?;
        let bucket = (address >> self.shift) as usize;
        // The range that covers the address starts in its bucket, or is the last one to start
        // before it.
        let first = self.word(self.buckets, bucket)? as usize;
        let end = self.word(self.buckets, bucket + 1)? as usize;
        let bytes = |index: usize| self.ranges.at + index * RANGE * 4;
        let (ranges, _) = self.bytes.get(bytes(first)..bytes(end))?.as_chunks::<{ RANGE * 4 }>();
        // The lower half is the start.
        let inside = ranges.partition_point(|range| u64::from_le_bytes(*range) as u32 <= address);
        self.word(self.ranges, (first + inside).checked_sub(1)? * RANGE + 1)
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
        let [name, name_length, readable, readable_length, file, line, caller, _] =
            <[[u8; 4]; NODE]>::try_from(words).ok()?.map(u32::from_le_bytes);
        self.node = caller;
        let kind = name_length & ((1 << KIND_BITS) - 1);
        Some(Frame {
            line,
            kind: Kind::ALL.get(kind as usize).copied().unwrap_or(Kind::Dynsym),
            table,
            function: (name, name_length >> KIND_BITS),
            readable: (readable, readable_length),
            file,
        })
    }
}
