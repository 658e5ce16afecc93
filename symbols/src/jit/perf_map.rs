//! Names of JIT code from a perf-map: lines `START SIZE name`, hex. Pure.
//!
//! A JIT appends a line for each function it makes. Java writes `0x` before its numbers, Node does
//! not; names may hold anything but a newline. Format: tools/perf/Documentation/jit-interface.txt.

use stackwire_model::UserAddr;

use super::{Function, Functions, Made};

/// Most lines taken: ten times what a large Java service makes.
const MAX_LINES: usize = 1 << 20;

/// Parses a perf-map; lines that do not parse are passed over, other bytes than UTF-8 replaced.
#[must_use]
pub fn parse(content: &[u8]) -> Functions {
    let (mut functions, mut made) = (Vec::new(), Vec::new());
    let mut record = 0;
    for line in content.split(|&byte| byte == b'\n') {
        if made.len() == MAX_LINES {
            break;
        }
        if let Some((start, end, name)) = parse_line(line) {
            let (start, end) = (UserAddr(start), UserAddr(end));
            made.push(Made { start, end, function: functions.len(), record, time_ns: None });
            functions.push(Function { name, ..Function::default() });
        }
        record += line.len() as u64 + 1;
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(functions: &Functions, address: u64) -> Option<&str> {
        functions.at(UserAddr(address)).map(|made| functions.functions[made.function].name.as_str())
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
    fn what_was_at_an_address_before_is_known_too() {
        let functions = parse(b"1000 100 old\n1040 20 new\n1000 10 newest\n");
        let versions = functions.versions(&[0xfff, 0x1000, 0x1050, 0x1100].map(UserAddr));
        let of = |index: usize| -> Vec<(&str, u64)> {
            let made = versions[index].iter().map(|&number| functions.made(number).unwrap());
            made.map(|made| (functions.functions[made.function].name.as_str(), made.record))
                .collect()
        };
        assert_eq!(of(1), [("newest", 25), ("old", 0)]);
        assert_eq!(of(2), [("new", 13), ("old", 0)]);
        assert!(of(0).is_empty() && of(3).is_empty());
        // Written over without end: of each address the last ones.
        let text: String = (0..1000).map(|n| format!("1000 {:x} f{n}\n", 1 + n % 3)).collect();
        let functions = parse(text.as_bytes());
        let versions = functions.versions(&[0x1000, 0x1001, 0x1002].map(UserAddr));
        assert_eq!(versions.iter().map(Vec::len).collect::<Vec<_>>(), [256, 256, 256]);
        assert_eq!((versions[0][0], versions[2][0]), (999, 998));
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
            let _ = parse(&bytes).line(UserAddr(5));
        }
    }
}
