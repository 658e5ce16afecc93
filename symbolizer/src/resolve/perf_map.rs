//! Names of JIT code from a perf-map: lines `START SIZE name`, hex. Pure.
//!
//! A JIT appends a line for each function it makes and reuses memory, so of lines that overlap the later
//! one holds. Java writes `0x` before its numbers, Node does not; names may hold anything but a newline.
//! Format: tools/perf/Documentation/jit-interface.txt.

use std::collections::BinaryHeap;

use crate::profile::Line;

/// Most lines taken: ten times what a large Java service makes.
const MAX_LINES: usize = 1 << 20;

/// The functions of a perf-map, without overlaps.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Symbols {
    /// Start, end, name; by start.
    spans: Vec<(u64, u64, usize)>,
    names: Vec<String>,
}

impl Symbols {
    /// Parses a perf-map; lines that do not parse are passed over, other bytes than UTF-8 replaced.
    #[must_use]
    pub fn parse(content: &[u8]) -> Self {
        let mut entries: Vec<(u64, u64, usize)> = Vec::new();
        let mut names = Vec::new();
        for line in content.split(|&byte| byte == b'\n') {
            if entries.len() >= MAX_LINES {
                break;
            }
            if let Some((start, end, name)) = parse_line(line) {
                entries.push((start, end, names.len()));
                names.push(name);
            }
        }
        Self { spans: flatten(entries), names }
    }

    /// The name of the function `address` lies in.
    #[must_use]
    pub fn find(&self, address: u64) -> Option<&str> {
        let after = self.spans.partition_point(|&(start, ..)| start <= address);
        let &(_, end, name) = self.spans.get(after.checked_sub(1)?)?;
        (address < end).then(|| self.names[name].as_str())
    }
}

fn parse_line(line: &[u8]) -> Option<(u64, u64, String)> {
    let line = String::from_utf8_lossy(line);
    let mut fields = line.trim_end_matches('\r').splitn(3, ' ');
    let start = hex(fields.next()?)?;
    let size = hex(fields.next()?)?;
    let name = fields.next()?.trim();
    let end = start.checked_add(size)?;
    (size > 0 && !name.is_empty()).then(|| (start, end, name.to_owned()))
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
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

/// Takes function and file apart: `py::name:/path.py`, `JS:*name /path:1:17`; others are a name.
#[must_use]
pub fn line(name: &str) -> Line {
    if let Some(python) = name.strip_prefix("py::")
        && let Some((function, file)) = python.rsplit_once(":/")
    {
        return Line { function: function.to_owned(), file: format!("/{file}"), line: 0 };
    }
    if let Some(script) =
        ["JS:", "LazyCompile:", "Function:"].iter().find_map(|p| name.strip_prefix(p))
        && let Some((function, place)) = script.split_once(' ')
    {
        // The mark of the tier that compiled it: `*` optimized, `~` interpreted, `^` and `+` between.
        let function = function.trim_start_matches(['*', '~', '^', '+']);
        let mut parts = place.rsplitn(3, ':');
        let (_column, number, file) = (parts.next(), parts.next(), parts.next());
        let number = number.and_then(|number| number.parse().ok());
        if let (Some(line), Some(file)) = (number, file) {
            let function = if function.is_empty() { "(anonymous)" } else { function };
            return Line { function: function.to_owned(), file: file.to_owned(), line };
        }
    }
    Line { function: name.to_owned(), ..Line::default() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_what_node_java_and_python_write() {
        let text = b"7f10 20 JS:*hot /app/x.js:3:17\n0x0000000000008000 0x0000000000000010 long J.hot(int)\nbad line\n9000 0 empty\nzz 1 x\n";
        let symbols = Symbols::parse(text);
        assert_eq!(symbols.find(0x7f1f), Some("JS:*hot /app/x.js:3:17"));
        assert_eq!(symbols.find(0x7f30), None);
        assert_eq!(symbols.find(0x8001), Some("long J.hot(int)"));
        assert_eq!(symbols.find(0x9000), None);
        assert_eq!(symbols.find(0), None);
    }

    #[test]
    fn of_overlapping_functions_the_later_holds() {
        let symbols = Symbols::parse(b"1000 100 old\n1040 20 new\n1000 10 newest\n");
        let at = |address| symbols.find(address).unwrap_or("");
        assert_eq!(
            [at(0x1000), at(0x1010), at(0x1040), at(0x105f), at(0x1060)],
            ["newest", "old", "new", "new", "old"]
        );
    }

    #[test]
    fn names_are_taken_apart() {
        let parts = |name| {
            let line = line(name);
            (line.function, line.file, line.line)
        };
        let is = |function: &str, file: &str, line| (function.to_owned(), file.to_owned(), line);
        assert_eq!(parts("py::leafy:/a b/x.py"), is("leafy", "/a b/x.py", 0));
        assert_eq!(parts("JS:*hot /app/x.js:3:17"), is("hot", "/app/x.js", 3));
        assert_eq!(parts("JS:~ node:internal/x:10:2"), is("(anonymous)", "node:internal/x", 10));
        assert_eq!(parts("Builtin:ArrayMap"), is("Builtin:ArrayMap", "", 0));
        assert_eq!(parts("long J.hot(int)"), is("long J.hot(int)", "", 0));
    }

    #[test]
    fn other_bytes_than_utf8_cost_nothing_but_themselves() {
        let symbols = Symbols::parse(b"1000 10 \xff\xfef\n2000 10 g\n");
        assert!(symbols.find(0x1000).is_some_and(|name| name.ends_with('f')));
        assert_eq!(symbols.find(0x2000), Some("g"));
    }

    proptest! {
        #[test]
        fn agrees_with_a_search_from_the_back(
            entries in proptest::collection::vec((0u64..64, 1u64..32), 0..24),
            address in 0u64..100,
        ) {
            let text: String = entries
                .iter()
                .enumerate()
                .map(|(index, (start, size))| format!("{start:x} {size:x} f{index}\n"))
                .collect();
            let expected = entries
                .iter()
                .enumerate()
                .rev()
                .find(|(_, (start, size))| (*start..start + size).contains(&address))
                .map(|(index, _)| format!("f{index}"));
            let symbols = Symbols::parse(text.as_bytes());
            prop_assert_eq!(symbols.find(address), expected.as_deref());
        }

        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Symbols::parse(&bytes).find(5);
            let _ = line(&String::from_utf8_lossy(&bytes));
        }
    }
}
