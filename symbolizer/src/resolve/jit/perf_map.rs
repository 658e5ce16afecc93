//! Names of JIT code from a perf-map: lines `START SIZE name`, hex. Pure.
//!
//! A JIT appends a line for each function it makes. Java writes `0x` before its numbers, Node does not; names may hold anything but a newline.
//! Format: tools/perf/Documentation/jit-interface.txt.

use super::{Function, Functions};

/// Most lines taken: ten times what a large Java service makes.
const MAX_LINES: usize = 1 << 20;

/// Parses a perf-map; lines that do not parse are passed over, other bytes than UTF-8 replaced.
#[must_use]
pub fn parse(content: &[u8]) -> Functions {
    let (mut functions, mut made) = (Vec::new(), Vec::new());
    let lines = content.split(|&byte| byte == b'\n').filter_map(parse_line);
    for (start, end, name) in lines.take(MAX_LINES) {
        made.push((start, end, functions.len()));
        functions.push(Function { name, ..Function::default() });
    }
    Functions::of(functions, made)
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

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(functions: &Functions, address: u64) -> Option<&str> {
        functions.at(address).map(|(_, function)| function.name.as_str())
    }

    #[test]
    fn reads_what_node_java_and_python_write() {
        let text = b"7f10 20 JS:*hot /app/x.js:3:17\n0x0000000000008000 0x0000000000000010 long J.hot(int)\nbad line\n9000 0 empty\nzz 1 x\n";
        let functions = parse(text);
        assert_eq!(name(&functions, 0x7f1f), Some("JS:*hot /app/x.js:3:17"));
        assert_eq!(name(&functions, 0x7f30), None);
        assert_eq!(name(&functions, 0x8001), Some("long J.hot(int)"));
        assert_eq!(name(&functions, 0x9000), None);
        assert_eq!(name(&functions, 0), None);
    }

    #[test]
    fn of_overlapping_functions_the_later_holds() {
        let functions = parse(b"1000 100 old\n1040 20 new\n1000 10 newest\n");
        let at = |address| name(&functions, address).unwrap();
        assert_eq!(
            [at(0x1000), at(0x1010), at(0x1040), at(0x105f), at(0x1060)],
            ["newest", "old", "new", "new", "old"]
        );
    }

    #[test]
    fn other_bytes_than_utf8_cost_nothing_but_themselves() {
        let functions = parse(b"1000 10 \xff\xfef\n2000 10 g\n");
        assert!(name(&functions, 0x1000).is_some_and(|name| name.ends_with('f')));
        assert_eq!(name(&functions, 0x2000), Some("g"));
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
            let functions = parse(text.as_bytes());
            prop_assert_eq!(name(&functions, address), expected.as_deref());
        }

        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes).line(5);
        }
    }
}
