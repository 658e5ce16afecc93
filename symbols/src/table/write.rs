//! Writes compiled tables. The same input in the same order gives the same bytes.

use std::hash::{BuildHasher, Hash};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use rustc_hash::{FxBuildHasher, FxHashMap};
use stackwire_elf::Segment;

use super::readable::readable;
use super::sweep::{Range, filled, not_covered, starts, without_overlaps};
use super::{BOUND, FILE, HEADER, KIND_BITS, Kind, MAGIC, NO_TEXT, NODE, RANGE};

/// A frame in a table being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeKey {
    /// Number of the function.
    pub function: u32,
    /// Number of the file, if known.
    pub file: Option<u32>,
    /// Line, 0 when unknown.
    pub line: u32,
    /// Node of the frame it is inlined into, 0 for none.
    pub parent: u32,
}

/// A table being made.
#[derive(Debug, Default)]
pub struct Writer {
    text: Vec<u8>,
    /// Places in `text`, and nodes below, by what is there: a map would keep it a second time.
    places: HashTable<(u32, u32)>,
    functions: FxHashMap<((u32, u32), Kind), u32>,
    function_words: Vec<[u32; 2]>,
    files: FxHashMap<(u32, u32), u32>,
    file_words: Vec<[u32; 2]>,
    nodes: HashTable<u32>,
    node_words: Vec<NodeKey>,
    ranges: Vec<Range>,
    fallback: [Vec<Range>; 2],
    bounds: Vec<Range>,
    segments: Vec<Segment>,
}

/// Most bytes of names, nodes or ranges: their numbers have 32 bits. What is beyond has no names.
const MAX: usize = u32::MAX as usize / 16;

/// Most bytes of names; those of a browser have 300 MB. What is beyond has no names.
const MAX_TEXT: usize = 1 << 30;

impl Writer {
    /// Number of a function.
    pub fn function(&mut self, name: &str, kind: Kind) -> u32 {
        let (at, length) = self.place(name);
        let words = &mut self.function_words;
        *self.functions.entry(((at, length), kind)).or_insert_with(|| {
            words.push([at, length << KIND_BITS | kind as u32]);
            (words.len() - 1) as u32
        })
    }

    /// Number of a source file.
    pub fn file(&mut self, path: &str) -> u32 {
        let (at, length) = self.place(path);
        let words = &mut self.file_words;
        *self.files.entry((at, length)).or_insert_with(|| {
            words.push([at, length]);
            (words.len() - 1) as u32
        })
    }

    /// Node of a frame.
    pub fn node(&mut self, key: NodeKey) -> u32 {
        let nodes = &mut self.node_words;
        let of = |node: u32| nodes[node as usize - 1];
        let known = self.nodes.entry(hash(&key), |&it| of(it) == key, |&it| hash(&of(it)));
        match known {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(_) if nodes.len() >= MAX => 0,
            Entry::Vacant(place) => {
                nodes.push(key);
                *place.insert(nodes.len() as u32).get()
            }
        }
    }

    /// Addresses of a node. Where ranges overlap, the one that starts first keeps what it has.
    pub fn range(&mut self, start: u64, end: u64, leaf: u32) {
        if start < end && self.ranges.len() < MAX {
            self.ranges.push(Range { start, end, leaf });
        }
    }

    /// Addresses of a node where no other range is, nor one of a lower `level` (0 or 1).
    pub fn fallback(&mut self, level: usize, start: u64, end: u64, leaf: u32) {
        let ranges = &mut self.fallback[level.min(1)];
        if start < end && ranges.len() < MAX {
            ranges.push(Range { start, end, leaf });
        }
    }

    /// Bounds of a function that may have no name. Of functions that overlap, the one that starts
    /// first keeps what it has.
    pub fn bounds(&mut self, start: u64, end: u64) {
        if start < end && end - start <= u64::from(u32::MAX) && self.bounds.len() < MAX {
            self.bounds.push(Range { start, end, leaf: 0 });
        }
    }

    /// A segment of the executable.
    pub fn segment(&mut self, segment: Segment) {
        self.segments.push(segment);
    }

    /// The table.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.places = HashTable::default();
        self.nodes = HashTable::default();
        let ranges = std::mem::take(&mut self.ranges);
        let (fallback, bounds) =
            (std::mem::take(&mut self.fallback), std::mem::take(&mut self.bounds));
        let sweep = || {
            let ranges = fallback.into_iter().fold(without_overlaps(ranges), |ranges, level| {
                filled(&ranges, &without_overlaps(level))
            });
            (starts(&ranges), not_covered(&ranges, without_overlaps(bounds)))
        };
        // A CPU that has made its names begins with the ranges.
        let (readable, ((base, starts), bounds)) = std::thread::scope(|scope| {
            let sweep = scope.spawn(sweep);
            let readable = self.readable();
            let swept = sweep.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (readable, swept)
        });

        let span = starts.last().map_or(0, |&(start, _)| start);
        // Eight ranges a bucket on average: a search of three steps in one or two cache lines.
        let each = (u64::from(span) / (starts.len() as u64 / 8).max(1)).max(1);
        let shift = (63 - each.leading_zeros()).clamp(4, 31);
        let mut buckets = Vec::with_capacity((span >> shift) as usize + 2);
        let mut next = 0;
        for bucket in 0..=(u64::from(span) >> shift) + 1 {
            while starts.get(next).is_some_and(|&(start, _)| u64::from(start) < bucket << shift) {
                next += 1;
            }
            buckets.push(next as u32);
        }

        let mut out = Vec::with_capacity(
            HEADER
                + starts.len() * RANGE * 4
                + buckets.len() * 4
                + self.node_words.len() * NODE * 4
                + bounds.len() * BOUND * 4
                + self.file_words.len() * FILE * 4
                + self.text.len(),
        );
        out.extend(MAGIC);
        out.extend([0; 8]);
        out.extend(base.to_le_bytes());
        let counts = [
            self.node_words.len(),
            starts.len(),
            buckets.len(),
            self.segments.len(),
            bounds.len(),
            self.file_words.len(),
            shift as usize,
            // Beyond all kinds when there is none.
            self.functions.keys().map(|&(_, kind)| kind as usize).min().unwrap_or(usize::MAX),
        ];
        out.extend(counts.iter().flat_map(|&count| (count as u32).to_le_bytes()));
        out.resize(HEADER, 0);
        for node in &self.node_words {
            let [name, name_length] = self.function_words[node.function as usize];
            let (readable, readable_length) = readable[node.function as usize];
            let file = node.file.map_or(0, |file| file + 1);
            let (line, caller) = (node.line, node.parent);
            let words: [u32; NODE] =
                [name, name_length, readable, readable_length, file, line, caller, 0];
            out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
        let ranges = starts.iter().flat_map(|&(start, leaf)| [start, leaf]);
        out.extend(ranges.flat_map(u32::to_le_bytes));
        out.extend(buckets.iter().flat_map(|word| word.to_le_bytes()));
        for segment in &self.segments {
            let longs = [segment.offset.0, segment.address.0, segment.size];
            out.extend(longs.iter().flat_map(|long| long.to_le_bytes()));
        }
        for Range { start, end, .. } in bounds {
            let words = [start as u32, (start >> 32) as u32, (end - start) as u32];
            out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
        out.extend(self.file_words.iter().flatten().flat_map(|word| word.to_le_bytes()));
        out.extend(&self.text);
        let checksum = xxhash_rust::xxh3::xxh3_64(&out[16..]);
        out[8..16].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Adds the readable names of all functions; place and length of each, [`NO_TEXT`] where none
    /// was made. A name without another form is its own.
    fn readable(&mut self) -> Vec<(u32, u32)> {
        let names: Vec<&str> = self
            .function_words
            .iter()
            .map(|&[at, length]| {
                let name = &self.text[at as usize..][..(length >> KIND_BITS) as usize];
                std::str::from_utf8(name).unwrap_or_default()
            })
            .collect();
        let made = readable(&names);
        let mut places = vec![(NO_TEXT, 0); self.function_words.len()];
        for (function, name) in made {
            let [at, length] = self.function_words[function];
            match name {
                None => places[function] = (at, length >> KIND_BITS),
                Some(name) if self.text.len() + name.len() <= MAX_TEXT => {
                    places[function] = (self.text.len() as u32, name.len() as u32);
                    self.text.extend(name.as_bytes());
                }
                Some(_) => {}
            }
        }
        places
    }

    fn place(&mut self, text: &str) -> (u32, u32) {
        let fits = text.len() < 1 << (32 - KIND_BITS) && self.text.len() + text.len() <= MAX_TEXT;
        let text = if fits { text.as_bytes() } else { &[] };
        let all = &mut self.text;
        let of = |(at, length): (u32, u32)| &all[at as usize..][..length as usize];
        let known = self.places.entry(hash(text), |&it| of(it) == text, |&it| hash(of(it)));
        match known {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(place) => {
                let at = (all.len() as u32, text.len() as u32);
                all.extend(text);
                *place.insert(at).get()
            }
        }
    }
}

fn hash<T: Hash + ?Sized>(key: &T) -> u64 {
    FxBuildHasher.hash_one(key)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Bytes, Table};
    use super::*;
    use stackwire_model::{FileOffset, VirtAddr};

    fn table(ranges: &[(u64, u64, u32)], fallback: &[(u64, u64, u32)]) -> Table {
        let mut writer = Writer::default();
        let node = |writer: &mut Writer, line| {
            let function = writer.function(&format!("f{line}"), Kind::Dwarf);
            let file = Some(writer.file("a.c"));
            writer.node(NodeKey { function, file, line, parent: 0 })
        };
        for &(start, end, line) in ranges {
            let leaf = node(&mut writer, line);
            writer.range(start, end, leaf);
        }
        for &(start, end, line) in fallback {
            let leaf = node(&mut writer, line);
            writer.fallback(1, start, end, leaf);
        }
        Table::open(Bytes::from(writer.finish())).unwrap()
    }

    fn line(table: &Table, address: u64) -> Option<u32> {
        table.lookup(VirtAddr(address)).next().map(|frame| frame.line)
    }

    #[test]
    fn chains_come_innermost_first_with_their_names() {
        let mut writer = Writer::default();
        let (outer, inner) =
            (writer.function("outer", Kind::Dwarf), writer.function("inner", Kind::Dwarf));
        let file = Some(writer.file("/src/a.c"));
        let parent = writer.node(NodeKey { function: outer, file, line: 7, parent: 0 });
        let leaf = writer.node(NodeKey { function: inner, file: None, line: 3, parent });
        writer.range(0x1000, 0x1010, leaf);
        writer.segment(Segment {
            offset: FileOffset(0x400),
            address: VirtAddr(0x1000),
            size: 0x100,
        });
        let table = Table::open(Bytes::from(writer.finish())).unwrap();
        let frames: Vec<_> = table
            .lookup(VirtAddr(0x100f))
            .map(|f| (f.function().to_owned(), f.file().to_string(), f.line))
            .collect();
        assert_eq!(
            frames,
            [("inner".into(), String::new(), 3), ("outer".into(), "/src/a.c".into(), 7)]
        );
        assert_eq!(
            table.lookup(VirtAddr(0x1010)).count() + table.lookup(VirtAddr(0xfff)).count(),
            0
        );
        assert_eq!(
            [0x410, 0x500].map(|at| table.address_of(FileOffset(at))),
            [Some(VirtAddr(0x1010)), None]
        );
    }

    #[test]
    fn a_function_without_a_name_is_not_the_next_one() {
        let mut writer = Writer::default();
        for (at, name) in [(0, ""), (8, "named"), (16, "")] {
            let function = writer.function(name, Kind::Dwarf);
            let leaf = writer.node(NodeKey { function, file: None, line: 0, parent: 0 });
            writer.range(at, at + 8, leaf);
        }
        let table = Table::open(Bytes::from(writer.finish())).unwrap();
        let names = [0, 8, 16].map(|at| table.lookup(VirtAddr(at)).next().unwrap().function());
        assert_eq!(names, ["", "named", ""]);
    }

    #[test]
    fn readable_names_are_kept_beside_those_of_the_producer() {
        let mut writer = Writer::default();
        for (at, name) in [(0, "_Z4workm"), (8, "main"), (16, "_Z4idlem")] {
            let function = writer.function(name, Kind::Dwarf);
            let leaf = writer.node(NodeKey { function, file: None, line: 0, parent: 0 });
            writer.range(at, at + 8, leaf);
        }
        let table = Table::open(Bytes::from(writer.finish())).unwrap();
        let names = [0, 8, 16].map(|at| {
            let frame = table.lookup(VirtAddr(at)).next().unwrap();
            (frame.function(), frame.readable_name())
        });
        let expected = [
            ("_Z4workm", "work(unsigned long)".into()),
            ("main", "main".into()),
            ("_Z4idlem", "idle(unsigned long)".into()),
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn an_empty_table_is_one() {
        let table = Table::open(Bytes::from(Writer::default().finish())).unwrap();
        assert_eq!((table.lookup(VirtAddr(0)).count(), table.best()), (0, None));
    }

    #[test]
    fn damage_is_found() {
        let mut writer = Writer::default();
        let function = writer.function("f", Kind::Symtab);
        let leaf = writer.node(NodeKey { function, file: None, line: 0, parent: 0 });
        writer.range(1, 9, leaf);
        let bytes = writer.finish();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(Table::open(Bytes::from(damaged)).is_err(), "byte {at}");
            assert!(Table::open(Bytes::from(bytes[..at].to_vec())).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn what_is_at_zero_does_not_cost_a_kernel_its_text() {
        let text = 0xffff_ffff_8100_0000;
        let table = table(&[(0, 8, 1), (text, text + 8, 2), (text + 8, text + 16, 3)], &[]);
        assert_eq!((line(&table, 0), line(&table, text + 9)), (None, Some(3)));
    }

    #[test]
    fn bounds_are_kept_of_functions_with_an_address_without_a_name() {
        let mut writer = Writer::default();
        let function = writer.function("f", Kind::Dynsym);
        let leaf = writer.node(NodeKey { function, file: None, line: 0, parent: 0 });
        let far = 0x7_0000_0000;
        for (start, end) in [(0x10, 0x20), (0x20, 0x38), (far, far + 8)] {
            writer.range(start, end, leaf);
        }
        for (start, end) in
            [(0x8, 0x10), (0x10, 0x30), (0x30, 0x40), (far, far + 8), (far + 8, far + 9)]
        {
            writer.bounds(start, end);
        }
        let table = Table::open(Bytes::from(writer.finish())).unwrap();
        for (address, bounds) in [
            (0x7, None),
            (0x8, Some(0x8..0x10)),
            (0xf, Some(0x8..0x10)),
            // Covered by two ranges.
            (0x10, None),
            (0x3f, Some(0x30..0x40)),
            (0x40, None),
            (far, None),
            (far + 8, Some(far + 8..far + 9)),
        ] {
            let found = table.bounds(VirtAddr(address));
            assert_eq!(found.map(|it| it.start.0..it.end.0), bounds, "{address:#x}");
        }
    }

    proptest! {
        /// Against the definition: the first range to start that covers an address, else the first
        /// fallback.
        #[test]
        fn lookups_agree_with_a_plain_search(
            ranges in prop::collection::vec((0u64..500, 1u64..40, 1u32..9), 0..40),
            fallback in prop::collection::vec((0u64..500, 1u64..90, 10u32..19), 0..20),
        ) {
            let with_end = |(index, (start, length, line)): (usize, (u64, u64, u32))| {
                (start, start + length, line * 1000 + index as u32)
            };
            let ranges: Vec<_> = ranges.into_iter().enumerate().map(with_end).collect();
            let fallback: Vec<_> = fallback.into_iter().enumerate().map(with_end).collect();
            let table = table(&ranges, &fallback);
            let find = |ranges: &[(u64, u64, u32)], address: u64| {
                let covering = ranges.iter().filter(|r| (r.0..r.1).contains(&address));
                covering.min_by_key(|r| r.0).map(|r| r.2)
            };
            for address in 0..600 {
                let expected = find(&ranges, address).or_else(|| find(&fallback, address));
                prop_assert_eq!(line(&table, address), expected, "at {}", address);
            }
        }
    }
}
