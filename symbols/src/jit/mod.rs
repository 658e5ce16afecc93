//! Code that compilers made at run time. perf-maps and jitdumps say which function was written
//! where. Pure.
//!
//! A compiler appends what it makes, and it reuses memory. Where functions overlap, the later one
//! holds, or the one that was there at a given time. The symbolizer asks this for addresses in
//! anonymous memory.

mod jitdump;
mod name;
mod perf_map;

use std::collections::BinaryHeap;

pub use self::jitdump::parse as parse_jitdump;
pub use self::perf_map::parse as parse_perf_map;
use bytestring::ByteString;
use stackwire_model::UserAddr;
use stackwire_model::profile::Line;

/// A function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Function {
    /// As its compiler wrote it.
    pub name: String,
    /// Where its lines begin: offset from its first byte, file, line; by offset.
    pub lines: Vec<(u64, u32, u32)>,
}

/// A function at a place: one that was moved has several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// First address.
    pub start: UserAddr,
    /// First address behind it.
    pub end: UserAddr,
    /// Number of the function.
    function: usize,
    /// Offset in the file of the record that says so.
    pub record: u64,
    /// When, by its compiler's clock, if it says: nanoseconds of `CLOCK_MONOTONIC`.
    pub time_ns: Option<u64>,
}

/// Start, end, index of what was put there.
type Span = (UserAddr, UserAddr, usize);

/// Functions and where they were put.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Functions {
    /// Without overlaps, by start.
    spans: Vec<Span>,
    /// In the order of the file.
    made: Vec<Made>,
    functions: Vec<Function>,
    files: Vec<ByteString>,
}

/// Functions looked at, for one address, from the last one on; and for all.
const MAX_VERSIONS: usize = 256;
const MAX_ALL: usize = 8 << 20;

impl Functions {
    /// From functions, and the places they were put at, in this order.
    fn of(functions: Vec<Function>, made: Vec<Made>) -> Self {
        let entries = made.iter().enumerate().map(|(index, made)| (made.start, made.end, index));
        Self { spans: flatten(entries.collect()), made, functions, files: Vec::new() }
    }

    /// Function, file and line at an address.
    #[must_use]
    pub fn line(&self, address: UserAddr) -> Option<Line> {
        self.line_of(self.at(address)?, address)
    }

    /// The same, of the function that was put there so.
    #[must_use]
    pub fn line_of(&self, made: &Made, address: UserAddr) -> Option<Line> {
        let function = self.functions.get(made.function)?;
        let offset = address.since(made.start)?;
        let mut line = name::line(&function.name);
        let after = function.lines.partition_point(|&(at, ..)| at <= offset);
        if let Some(&(_, file, number)) = after.checked_sub(1).and_then(|at| function.lines.get(at))
            && let Some(file) = self.files.get(file as usize)
        {
            line.file.clone_from(file);
            line.line = number;
        }
        Some(line)
    }

    /// What was put at an address last.
    fn at(&self, address: UserAddr) -> Option<&Made> {
        let after = self.spans.partition_point(|&(start, ..)| start <= address);
        let &(_, end, index) = self.spans.get(after.checked_sub(1)?)?;
        self.made.get(index).filter(|_| address < end)
    }

    /// What was put somewhere, by its number.
    #[must_use]
    pub fn made(&self, number: u32) -> Option<&Made> {
        self.made.get(number as usize)
    }

    /// Numbers of all that was put at each of these addresses, which are sorted; the last first.
    #[must_use]
    pub fn versions(&self, addresses: &[UserAddr]) -> Vec<Vec<u32>> {
        let mut found = vec![Vec::new(); addresses.len()];
        // Links each address to the next one that still takes functions. A process may write a
        // million functions over all sampled addresses: that costs at most MAX_VERSIONS looks at
        // each.
        let mut next: Vec<usize> = (0..=addresses.len()).collect();
        let mut all = 0;
        for (number, made) in self.made.iter().enumerate().rev() {
            let first = addresses.partition_point(|&address| address < made.start);
            let mut at = follow(&mut next, first);
            while addresses.get(at).is_some_and(|&address| address < made.end) {
                found[at].push(number as u32);
                all += 1;
                if found[at].len() == MAX_VERSIONS || all > MAX_ALL {
                    next[at] = at + 1;
                }
                at = follow(&mut next, at + 1);
            }
        }
        found
    }
}

/// Follows a chain of links to its end, and makes the chain shorter.
fn follow(next: &mut [usize], from: usize) -> usize {
    let mut at = from;
    while next[at] != at {
        next[at] = next[next[at]];
        at = next[at];
    }
    at
}

/// Cuts overlapping entries so that everywhere the latest holds: a sweep over all edges.
fn flatten(mut entries: Vec<Span>) -> Vec<Span> {
    entries.sort_unstable();
    let mut edges: Vec<UserAddr> =
        entries.iter().flat_map(|&(start, end, _)| [start, end]).collect();
    edges.sort_unstable();
    edges.dedup();
    let mut spans: Vec<Span> = Vec::new();
    let mut open: BinaryHeap<(usize, UserAddr)> = BinaryHeap::new();
    let mut next = entries.iter().peekable();
    for pair in edges.windows(2) {
        while let Some(&(_, end, name)) = next.next_if(|entry| entry.0 <= pair[0]) {
            open.push((name, end));
        }
        while open.peek().is_some_and(|&(_, end)| end <= pair[0]) {
            open.pop();
        }
        let Some(&(name, _)) = open.peek() else { continue };
        match spans.last_mut() {
            Some(last) if last.1 == pair[0] && last.2 == name => last.1 = pair[1],
            _ => spans.push((pair[0], pair[1], name)),
        }
    }
    spans
}
