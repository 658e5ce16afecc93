//! Functions and lines of a unit laid over each other: pieces of code with one chain of frames
//! each.

use rustc_hash::FxHashMap;

use super::debug::Place;
use super::lines::{self, Rows};
use super::paint::{Span, paint};
use super::scopes::Scopes;
use super::symbols::Symbols;
use crate::table::{Kind, NodeKey, Writer};

/// What a unit adds to a table, its numbers its own.
#[derive(Debug, Default)]
pub struct UnitTable {
    functions: Vec<String>,
    files: Vec<String>,
    /// Callers before what is inlined into them.
    nodes: Vec<NodeKey>,
    /// First address, address behind the last, node.
    ranges: Vec<(u64, u64, u32)>,
    known: FxHashMap<NodeKey, u32>,
}

/// Most frames of a unit; the largest seen have some hundred thousand. What is beyond has no names.
const MAX_NODES: usize = 4 << 20;

impl UnitTable {
    /// Adds it to a table.
    pub fn write(&self, writer: &mut Writer) {
        let functions: Vec<u32> =
            self.functions.iter().map(|name| writer.function(name, Kind::Dwarf)).collect();
        let files: Vec<u32> = self.files.iter().map(|path| writer.file(path)).collect();
        let mut nodes = vec![0];
        for node in &self.nodes {
            nodes.push(writer.node(NodeKey {
                function: functions[node.function as usize],
                file: node.file.map(|file| files[file as usize]),
                line: node.line,
                parent: nodes[node.parent as usize],
            }));
        }
        for &(start, end, node) in &self.ranges {
            writer.range(start, end, nodes[node as usize]);
        }
    }

    fn is_full(&self) -> bool {
        self.nodes.len() >= MAX_NODES
    }

    fn node(&mut self, key: NodeKey) -> u32 {
        if self.is_full() {
            return 0;
        }
        let nodes = &mut self.nodes;
        *self.known.entry(key).or_insert_with(|| {
            nodes.push(key);
            nodes.len() as u32
        })
    }
}

/// Lays functions and lines over each other.
///
/// A function that is not inlined gets the name of its symbol, where there is one: `abort` and not
/// `__GI_abort`. perf and llvm-symbolizer do the same, and the loader knows this name. Code that
/// has lines but no function also gets its name from the symbol.
pub fn overlay<'a>(
    place: &Place<'a>,
    scopes: &Scopes<'a>,
    rows: &Rows,
    symbols: &Symbols,
) -> UnitTable {
    let mut overlay = Overlay {
        place,
        scopes,
        symbols,
        table: UnitTable::default(),
        files: FxHashMap::default(),
        functions: FxHashMap::default(),
        callers: FxHashMap::default(),
    };
    let functions = paint(&scopes.spans);
    let (mut f, mut r, mut at) = (0, 0, 0);
    while f < functions.len() || r < rows.spans.len() {
        let (function, row) = (functions.get(f), rows.spans.get(r));
        let both = || [function, row].into_iter().flatten();
        // From where something is known to where what is known changes.
        let start = both().map(|span| span.start.max(at)).min().unwrap_or(0);
        let edge = |span: &Span| if span.start > start { span.start } else { span.end };
        let end = both().map(edge).min().unwrap_or(start);
        let inside = |span: &&Span| span.start <= start;
        let scope = function.filter(inside).map(|span| span.what);
        let line = row.filter(inside).map(|span| rows.places[span.what as usize]);
        overlay.add(start, end, scope, line);
        at = end;
        f += usize::from(function.is_some_and(|span| span.end <= at));
        r += usize::from(row.is_some_and(|span| span.end <= at));
    }
    overlay.table
}

struct Overlay<'p, 'a> {
    place: &'p Place<'a>,
    scopes: &'p Scopes<'a>,
    symbols: &'p Symbols,
    table: UnitTable,
    /// Numbers of files in the table by those of the line program.
    files: FxHashMap<u64, Option<u32>>,
    functions: FxHashMap<Name, u32>,
    /// The node a scope is called from, by scope and the symbol its outermost function has.
    callers: FxHashMap<(u32, Option<u32>), u32>,
}

/// Where the name of a function is from.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Name {
    Debug(u32),
    Symbol(u32),
    Unknown,
}

impl Overlay<'_, '_> {
    /// Adds the piece from `start` to `end`, where this scope and this row hold.
    fn add(&mut self, start: u64, end: u64, scope: Option<u32>, row: Option<(u64, u32)>) {
        let (file, line) = row.map_or((None, 0), |(file, line)| (self.file(file), line));
        let mut from = start;
        while from < end {
            let symbol = self.symbols.at(from);
            let to = symbol.map_or_else(|| self.symbols.next(from), |(_, to)| to).min(end);
            let symbol = symbol.map(|(number, _)| number);
            if symbol.is_none() && scope.is_none_or(|scope| !self.is_named(scope)) {
                // Add no frame here: the bounds that `.eh_frame` gives tell more than a frame
                // without a name.
                from = to;
                continue;
            }
            let (function, parent) = match scope {
                Some(scope) => (self.function_of(scope, symbol), self.caller(scope, symbol)),
                None => (self.function(symbol.map_or(Name::Unknown, Name::Symbol)), 0),
            };
            let node = self.table.node(NodeKey { function, file, line, parent });
            self.table.ranges.push((from, to, node));
            from = to;
        }
    }

    /// Whether a function has a name, or is inlined into one.
    fn is_named(&self, scope: u32) -> bool {
        let scope = self.scopes.scopes[scope as usize];
        scope.parent.is_some() || !self.scopes.names[scope.function as usize].is_empty()
    }

    /// The node a scope is called from, 0 for one that is not inlined.
    fn caller(&mut self, scope: u32, symbol: Option<u32>) -> u32 {
        if self.table.is_full() {
            return 0;
        }
        let mut chain = Vec::new();
        let mut at = scope;
        let mut caller = loop {
            if let Some(&known) = self.callers.get(&(at, symbol)) {
                break known;
            }
            match self.scopes.scopes[at as usize].parent {
                Some(parent) => chain.push(std::mem::replace(&mut at, parent)),
                None => break 0,
            }
        };
        for inner in chain.into_iter().rev() {
            let scope = self.scopes.scopes[inner as usize];
            let function = self.function_of(scope.parent.unwrap_or(0), symbol);
            let (file, line) = (self.file(scope.call.0), scope.call.1);
            caller = self.table.node(NodeKey { function, file, line, parent: caller });
            self.callers.insert((inner, symbol), caller);
        }
        caller
    }

    fn function_of(&mut self, scope: u32, symbol: Option<u32>) -> u32 {
        let scope = self.scopes.scopes[scope as usize];
        let symbol = symbol.filter(|_| scope.parent.is_none());
        self.function(symbol.map_or(Name::Debug(scope.function), Name::Symbol))
    }

    fn function(&mut self, name: Name) -> u32 {
        let functions = &mut self.table.functions;
        *self.functions.entry(name).or_insert_with(|| {
            functions.push(match name {
                Name::Debug(number) => {
                    String::from_utf8_lossy(self.scopes.names[number as usize]).into_owned()
                }
                Name::Symbol(number) => self.symbols.name(number).to_owned(),
                Name::Unknown => String::new(),
            });
            (functions.len() - 1) as u32
        })
    }

    fn file(&mut self, file: u64) -> Option<u32> {
        let (place, files) = (self.place, &mut self.table.files);
        *self.files.entry(file).or_insert_with(|| {
            let program = place.unit.line_program.as_ref()?;
            files.push(lines::path(place, program.header(), file)?);
            Some((files.len() - 1) as u32)
        })
    }
}
