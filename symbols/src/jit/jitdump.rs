//! jitdump: what a JIT compiler made, in binary, with its lines. Pure.
//!
//! `unwind/src/jitdump/records.rs` has the layout. There are records of code that was loaded, of
//! code that was moved, and of the lines of the code that is loaded next. The code itself and
//! unwind tables are skipped. A file may be cut, for example while it is still being written. It
//! then gives everything before the cut, and the name of code that is not all there.

use std::collections::HashMap;

use bytestring::ByteString;
use stackwire_unwind::jitdump::{Fields, RecordKind, Records};

use stackwire_model::UserAddr;

use super::{Function, Functions, Made};

/// Most functions taken.
const MAX_FUNCTIONS: usize = 1 << 20;
/// Most lines taken, of all functions.
const MAX_LINES: usize = 16 << 20;
/// `\xff`: the file of the line before.
const SAME_FILE: &[u8] = b"\xff";
/// V8 adds the size of an ELF header to the addresses of lines, to suit what perf made of them
/// before 5.9 (`kElfHeaderSize` of src/diagnostics/perf-jit.cc).
const V8_OFFSET: u64 = 0x40;

/// Parses a jitdump; records that make no sense are passed over.
#[must_use]
pub fn parse(content: &[u8]) -> Functions {
    let mut dump = Dump::default();
    // Only what was read stays when it ends in the middle.
    let _ = dump.read(content);
    let mut functions = Functions::of(dump.functions, dump.made);
    functions.files = dump.files;
    functions
}

#[derive(Default)]
struct Dump<'a> {
    functions: Vec<Function>,
    made: Vec<Made>,
    /// Of the record that is read: its offset, and when it was written.
    record: (u64, Option<u64>),
    /// By the index its compiler gave it, which moved code keeps: the last of them.
    by_index: HashMap<u64, usize>,
    /// How many lines the code that comes next has, and they, by its address.
    lines: HashMap<u64, (u64, Fields<'a>)>,
    line_count: usize,
    files: Vec<ByteString>,
    file_numbers: HashMap<String, u32>,
}

/// Address, file, line.
type Lines = Vec<(u64, u32, u32)>;

impl<'a> Dump<'a> {
    fn read(&mut self, content: &'a [u8]) -> Option<()> {
        for record in Records::new(content)? {
            self.record = (record.offset, record.time_ns);
            // A record that makes no sense costs itself.
            let _ = match record.kind {
                RecordKind::Load => self.load(record.body),
                RecordKind::Move => self.moved(record.body),
                RecordKind::DebugInfo => self.debug_info(record.body),
                RecordKind::Unwinding | RecordKind::Other => None,
            };
            if self.made.len() == MAX_FUNCTIONS {
                break;
            }
        }
        Some(())
    }

    fn load(&mut self, mut body: Fields<'_>) -> Option<()> {
        body.skip(16)?; // pid, tid, vma
        let (start, size, index) = (body.long()?, body.long()?, body.long()?);
        let name = body.text()?;
        let end = start.checked_add(size).filter(|end| *end > start)?;
        let mut lines = match self.lines.remove(&start) {
            Some((count, entries)) => {
                let lines = self.of_one_file(count, entries, name);
                lines.or_else(|| self.of_files(count, entries)).unwrap_or_default()
            }
            None => Vec::new(),
        };
        let offset = if is_v8(name) { V8_OFFSET } else { 0 };
        for line in &mut lines {
            line.0 = line.0.wrapping_sub(start).wrapping_sub(offset);
        }
        lines.retain(|line| line.0 < size);
        lines.sort_by_key(|line| line.0);
        let name = String::from_utf8_lossy(name).into_owned();
        self.by_index.insert(index, self.functions.len());
        self.made(start, end, self.functions.len());
        self.functions.push(Function { name, lines });
        Some(())
    }

    fn moved(&mut self, mut body: Fields<'_>) -> Option<()> {
        body.skip(16)?; // pid, tid, vma
        let (_old, new, size, index) = (body.long()?, body.long()?, body.long()?, body.long()?);
        let function = *self.by_index.get(&index)?;
        let end = new.checked_add(size).filter(|end| *end > new)?;
        self.made(new, end, function);
        Some(())
    }

    fn made(&mut self, start: u64, end: u64, function: usize) {
        let (record, time_ns) = self.record;
        let (start, end) = (UserAddr(start), UserAddr(end));
        self.made.push(Made { start, end, function, record, time_ns });
    }

    fn debug_info(&mut self, mut body: Fields<'a>) -> Option<()> {
        let (code, count) = (body.long()?, body.long()?);
        self.lines.insert(code, (count, body));
        Some(())
    }

    /// Each line with its file.
    fn of_files(&mut self, count: u64, mut entries: Fields<'a>) -> Option<Lines> {
        let mut lines = Vec::new();
        let mut file = None;
        for _ in 0..count {
            let Some((address, line, name)) = entry(&mut entries) else { break };
            self.line_count += 1;
            if self.line_count > MAX_LINES {
                return None;
            }
            if name != SAME_FILE {
                let name = std::str::from_utf8(name).ok();
                file = Some(self.file(name.filter(|name| !name.contains(char::is_control))?));
            }
            lines.push((address, file?, line));
        }
        Some(lines)
    }

    /// Node 20 writes memory it has freed in place of the file's name, as many bytes as that name
    /// had. The name of the function also contains the file. It is the same file when its length
    /// fits.
    fn of_one_file(
        &mut self,
        count: u64,
        mut entries: Fields<'a>,
        function: &[u8],
    ) -> Option<Lines> {
        let file = super::name::line(std::str::from_utf8(function).ok()?).file;
        let length = file.len() + 1;
        let size = count.checked_mul(16 + length as u64)?;
        // V8 fills records up to a multiple of eight.
        let filled = (entries.rest().len() as u64).checked_sub(size)?;
        (!file.is_empty() && filled < 8).then_some(())?;
        let file = self.file(&file);
        let mut lines = Vec::new();
        for _ in 0..count {
            self.line_count += 1;
            if self.line_count > MAX_LINES {
                return None;
            }
            let (address, line) = (entries.long()?, entries.word()?);
            entries.skip(4 + length)?;
            lines.push((address, file, line));
        }
        Some(lines)
    }

    fn file(&mut self, name: &str) -> u32 {
        *self.file_numbers.entry(name.to_owned()).or_insert_with(|| {
            self.files.push(name.into());
            (self.files.len() - 1) as u32
        })
    }
}

/// Address, line, file of a line entry.
fn entry<'a>(body: &mut Fields<'a>) -> Option<(u64, u32, &'a [u8])> {
    let (address, line) = (body.long()?, body.word()?);
    body.skip(4)?; // discriminator
    Some((address, line, body.text()?))
}

fn is_v8(name: &[u8]) -> bool {
    let prefixes = ["JS:", "LazyCompile:", "Function:", "Script:", "Eval:", "RegExp:"];
    prefixes.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> Vec<u8> {
        let mut out = Vec::new();
        for word in [0x4A69_5444_u32, 1, 40, 62, 0, 7] {
            out.extend(word.to_le_bytes());
        }
        out.extend([0; 16]);
        out
    }

    fn record(kind: u32, body: &[u8]) -> Vec<u8> {
        let mut out = kind.to_le_bytes().to_vec();
        out.extend((16 + body.len() as u32).to_le_bytes());
        out.extend([0; 8]);
        out.extend(body);
        out
    }

    fn longs(values: &[u64]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn load(start: u64, size: u64, index: u64, name: &str) -> Vec<u8> {
        let mut body = longs(&[0, start, start, size, index]);
        body.extend(name.as_bytes());
        body.push(0);
        body.extend(vec![0x90; size as usize]);
        record(0, &body)
    }

    fn lines(code: u64, entries: &[(u64, u32, &[u8])]) -> Vec<u8> {
        let mut body = longs(&[code, entries.len() as u64]);
        for (address, line, file) in entries {
            body.extend(address.to_le_bytes());
            body.extend(line.to_le_bytes());
            body.extend([0; 4]);
            body.extend(*file);
            body.push(0);
        }
        record(2, &body)
    }

    fn dump() -> Vec<u8> {
        let entries: &[(u64, u32, &[u8])] =
            &[(0x1000, 3, b"/x.java"), (0x1008, 4, SAME_FILE), (0x1010, 9, b"/y.java")];
        let moved = record(1, &longs(&[0, 0x1000, 0x1000, 0x5000, 0x20, 1]));
        let script = lines(0x2000, &[(0x2044, 7, b"/a.js")]);
        [
            header(),
            lines(0x1000, entries),
            load(0x1000, 0x20, 1, "Hot.loop"),
            script,
            load(0x2000, 0x10, 2, "JS:*hot /a.js:6:1"),
            moved,
            load(0x1000, 0x10, 3, "newer"),
        ]
        .concat()
    }

    fn at(functions: &Functions, address: u64) -> (String, String, u32) {
        let line = functions.line(UserAddr(address)).unwrap_or_default();
        (line.function.to_string(), line.file.to_string(), line.line)
    }

    #[test]
    fn functions_with_lines_moved_and_overwritten() {
        let functions = parse(&dump());
        let is = |function: &str, file: &str, line| (function.to_owned(), file.to_owned(), line);
        assert_eq!(at(&functions, 0x1000), is("newer", "", 0));
        assert_eq!(at(&functions, 0x1010), is("Hot.loop", "/y.java", 9));
        assert_eq!(at(&functions, 0x5000), is("Hot.loop", "/x.java", 3));
        assert_eq!(at(&functions, 0x500c), is("Hot.loop", "/x.java", 4));
        assert_eq!(at(&functions, 0x2003), is("hot", "/a.js", 6), "before its first line");
        assert_eq!(at(&functions, 0x2004), is("hot", "/a.js", 7));
        assert_eq!(at(&functions, 0x5020), is("", "", 0));
    }

    #[test]
    fn cut_anywhere_it_gives_what_comes_before() {
        let whole = dump();
        let all = parse(&whole).made.len();
        let count = |end: usize| parse(&whole[..end]).made.len();
        let counts: Vec<_> = (0..=whole.len()).map(count).collect();
        assert!(counts.is_sorted(), "{counts:?}");
        let code = 0x10;
        assert_eq!((count(whole.len() - code), count(whole.len() - code - 1)), (all, all - 1));
    }

    #[test]
    fn a_function_moved_a_thousand_times_is_there_once() {
        let mut bytes = [header(), load(0x1000, 0x10, 1, &"long".repeat(1000))].concat();
        for n in 1..=1000 {
            bytes.extend(record(1, &longs(&[0, 0x1000, 0x1000, 0x1000 + n * 0x100, 0x10, 1])));
        }
        let functions = parse(&bytes);
        assert_eq!((functions.functions.len(), functions.made.len()), (1, 1001));
        assert_eq!(at(&functions, 0x1000 + 700 * 0x100).0.len(), 4000);
    }

    #[test]
    fn files_that_are_no_text_are_none() {
        let entries: &[(u64, u32, &[u8])] = &[(0x1000, 3, b"\x9a)\x04"), (0x1004, 4, b"/x.js")];
        let bytes = [header(), lines(0x1000, entries), load(0x1000, 0x20, 1, "f")].concat();
        assert_eq!(at(&parse(&bytes), 0x1006), ("f".to_owned(), String::new(), 0));
    }

    #[test]
    fn a_file_that_is_overwritten_is_the_one_of_its_function() {
        // As many bytes as `/app/x.js` and its end.
        let garbage = b"\x77\x4e\x01\0\0\x82|\x03\x88";
        let entries: &[(u64, u32, &[u8])] = &[(0x1040, 3, garbage), (0x1048, 4, garbage)];
        let name = "JS:*hot /app/x.js:2:1";
        let bytes = [header(), lines(0x1000, entries), load(0x1000, 0x20, 1, name)].concat();
        let is = |line| ("hot".to_owned(), "/app/x.js".to_owned(), line);
        assert_eq!((at(&parse(&bytes), 0x1001), at(&parse(&bytes), 0x1009)), (is(3), is(4)));
        // What was there before may be text, and shorter.
        let text: &[u8] = b"abc\0efghi";
        let texts: &[(u64, u32, &[u8])] = &[(0x1040, 3, text), (0x1048, 4, text)];
        let shorter = [header(), lines(0x1000, texts), load(0x1000, 0x20, 1, name)].concat();
        assert_eq!((at(&parse(&shorter), 0x1001), at(&parse(&shorter), 0x1009)), (is(3), is(4)));
        // Filled up to a multiple of eight, as V8 does.
        let mut filled = lines(0x1000, texts);
        filled.extend([0; 4]);
        let size = filled.len() as u32;
        filled[4..8].copy_from_slice(&size.to_le_bytes());
        let filled = [header(), filled, load(0x1000, 0x20, 1, name)].concat();
        assert_eq!(at(&parse(&filled), 0x1009), is(4));
        // Of another length: nothing is believed but the name.
        let name = "JS:*hot /app/other.js:2:1";
        let bytes = [header(), lines(0x1000, entries), load(0x1000, 0x20, 1, name)].concat();
        assert_eq!(at(&parse(&bytes), 0x1009).2, 2);
    }

    proptest! {
        #[test]
        fn damage_never_panics(at in 40usize..300, bytes in proptest::collection::vec(any::<u8>(), 1..16)) {
            let mut dump = dump();
            let end = (at + bytes.len()).min(dump.len());
            let at = at.min(end);
            dump[at..end].copy_from_slice(&bytes[..end - at]);
            let functions = parse(&dump);
            for address in [0x1000, 0x2004, 0x5000, u64::MAX] {
                let _ = functions.line(UserAddr(address));
            }
        }
    }
}
