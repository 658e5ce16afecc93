//! Code that compilers made at run time: who wrote which function where, from perf-maps and jitdumps. Pure.
//!
//! A compiler appends what it makes and reuses memory, so where functions overlap the later holds. Called by
//! `resolve/mod.rs` for addresses in anonymous memory.

mod anonymous;
mod jitdump;
mod name;
mod perf_map;

use std::collections::BinaryHeap;

pub use self::anonymous::name;
pub use self::jitdump::parse as parse_jitdump;
pub use self::perf_map::parse as parse_perf_map;
use crate::profile::Line;

/// A function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Function {
    /// As its compiler wrote it.
    pub name: String,
    /// Where its lines begin: offset from its first byte, file, line; by offset.
    pub lines: Vec<(u64, u32, u32)>,
}

/// Functions without overlaps.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Functions {
    /// Start, end, place; by start.
    spans: Vec<(u64, u64, usize)>,
    /// Where functions begin, which may have been overwritten since, and which they are: one that was moved has
    /// several.
    places: Vec<(u64, usize)>,
    functions: Vec<Function>,
    files: Vec<String>,
}

impl Functions {
    /// From functions, and the places they were put at, in this order: start, end, number of the function.
    fn of(functions: Vec<Function>, made: Vec<(u64, u64, usize)>) -> Self {
        let places = made.iter().map(|&(start, _, function)| (start, function)).collect();
        let entries = made.into_iter().enumerate();
        let entries = entries.map(|(place, (start, end, _))| (start, end, place)).collect();
        Self { spans: flatten(entries), places, functions, files: Vec::new() }
    }

    /// Function, file and line at an address.
    #[must_use]
    pub fn line(&self, address: u64) -> Option<Line> {
        let (start, function) = self.at(address)?;
        let mut line = name::line(&function.name);
        let after = function.lines.partition_point(|&(offset, ..)| offset <= address - start);
        if let Some(&(_, file, number)) = after.checked_sub(1).and_then(|at| function.lines.get(at))
            && let Some(file) = self.files.get(file as usize)
        {
            line.file.clone_from(file);
            line.line = number;
        }
        Some(line)
    }

    /// Where the function at an address begins, and which it is.
    fn at(&self, address: u64) -> Option<(u64, &Function)> {
        let after = self.spans.partition_point(|&(start, ..)| start <= address);
        let &(_, end, place) = self.spans.get(after.checked_sub(1)?)?;
        let &(start, function) = self.places.get(place).filter(|_| address < end)?;
        Some((start, self.functions.get(function)?))
    }
}

/// Cuts overlapping entries so that everywhere the latest holds: a sweep over all edges.
fn flatten(mut entries: Vec<(u64, u64, usize)>) -> Vec<(u64, u64, usize)> {
    entries.sort_unstable();
    let mut edges: Vec<u64> = entries.iter().flat_map(|&(start, end, _)| [start, end]).collect();
    edges.sort_unstable();
    edges.dedup();
    let mut spans: Vec<(u64, u64, usize)> = Vec::new();
    let mut open: BinaryHeap<(usize, u64)> = BinaryHeap::new();
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
