//! Line tables of CPython: of 3.11 and later (Objects/locations.md, since 3.13
//! InternalDocs/code_objects.md), of 3.10 and of those before it (Objects/lnotab_notes.txt).

use stackwire_model::Code;

/// Bytes of an instruction and of each of its caches.
const UNIT: u64 = 2;

/// Where each stretch of instructions ends, in bytes from the first, and its line; in order. Where
/// the table makes no sense any more it ends.
pub(super) fn lines(code: &Code, version: u32) -> Vec<(u64, Option<u32>)> {
    let mut lines = Vec::new();
    match version >> 16 {
        0x030b.. => _ = by_locations(code, &mut lines),
        0x030a => by_ranges(code, &mut lines),
        _ => by_increments(code, &mut lines),
    }
    lines
}

type Lines = Vec<(u64, Option<u32>)>;

/// Pairs of what both grow by. The line may shrink; the last has no end.
fn by_increments(code: &Code, into: &mut Lines) {
    let (mut at, mut line) = (0u64, i64::from(code.first_line));
    for &[bytes, lines] in code.lines.as_chunks().0 {
        at += u64::from(bytes);
        into.push((at, known(line)));
        line += i64::from(lines.cast_signed());
    }
    into.push((u64::MAX, known(line)));
}

fn known(line: i64) -> Option<u32> {
    u32::try_from(line).ok().filter(|line| *line > 0)
}

/// Likewise, but the line is that of the instructions up to there; -128: they have none.
fn by_ranges(code: &Code, into: &mut Lines) {
    const NONE: i8 = -128;
    let (mut end, mut line) = (0u64, i64::from(code.first_line));
    for &[bytes, lines] in code.lines.as_chunks().0 {
        end += u64::from(bytes);
        let lines = lines.cast_signed();
        if lines != NONE {
            line += i64::from(lines);
        }
        into.push((end, known(line).filter(|_| lines != NONE)));
    }
}

fn by_locations(code: &Code, into: &mut Lines) -> Option<()> {
    let mut bytes = code.lines.iter().copied();
    let mut line = i64::from(code.first_line);
    let mut unit = 0u64;
    while let Some(head) = bytes.next() {
        // Between entries there is nothing without this bit.
        if head & 0x80 == 0 {
            return None;
        }
        unit += u64::from(head & 7) + 1;
        let kind = head >> 3 & 15;
        match kind {
            0..=9 => {
                bytes.next()?;
            }
            10..=12 => {
                line += i64::from(kind - 10);
                bytes.next()?;
                bytes.next()?;
            }
            13 => line = line.checked_add(signed(&mut bytes)?)?,
            14 => {
                line = line.checked_add(signed(&mut bytes)?)?;
                for _ in 0..3 {
                    number(&mut bytes)?;
                }
            }
            _ => {}
        }
        // The last kind is of instructions that no line has.
        into.push((unit * UNIT, known(line).filter(|_| kind != 15)));
    }
    None
}

/// A number of six bits a byte, the lowest first.
fn number(bytes: &mut impl Iterator<Item = u8>) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..=30).step_by(6) {
        let byte = bytes.next()?;
        number |= u64::from(byte & 63) << shift;
        if byte & 64 == 0 {
            return Some(number);
        }
    }
    None
}

/// Likewise, with its sign in the lowest bit.
fn signed(bytes: &mut impl Iterator<Item = u8>) -> Option<i64> {
    let number = number(bytes)?;
    let value = i64::try_from(number >> 1).ok()?;
    Some(if number & 1 == 0 { value } else { -value })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stackwire_model::{Code, Runtime, Text};

    use super::super::Function;

    /// None: it has none there.
    fn line(code: &Code, version: u32, position: u64) -> Option<u32> {
        let code = Code { runtime: Runtime::Cpython(version), ..code.clone() };
        let line = Function::read(&code).unwrap().at(position).line;
        (line != 0).then_some(line)
    }

    const VERSION: u32 = 0x030d_00f0;

    fn code(lines: &[u8]) -> Code {
        let name = Text { width: 1, bytes: b"f".to_vec(), is_cut: false };
        let runtime = Runtime::Cpython(VERSION);
        Code { name, first_line: 10, lines: lines.to_vec(), ..Code::unknown(runtime) }
    }

    #[test]
    fn each_kind_of_entry_has_its_line() {
        // Units 0 to 1: line 10, by columns; 2: line 12, on one line; 3: 7, without columns; 4:
        // none; 5: line 8 to 9.
        let code = code(&[
            0x81,
            0,
            0x80 | 12 << 3,
            0,
            0,
            0x80 | 13 << 3,
            11,
            0x80 | 15 << 3,
            0x80 | 14 << 3,
            2,
            1,
            3,
            4,
        ]);
        let at = |unit: u64| line(&code, VERSION, unit * 2);
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 6].map(at),
            [10, 10, 12, 7, 0, 8, 0].map(|line| (line != 0).then_some(line))
        );
        assert_eq!(line(&code, VERSION, 3), Some(10), "in the middle of an instruction");
    }

    /// `co_linetable` of `def f(x):\n    for y in x:\n        print(y)\n    return None` by CPython
    /// 3.11.2, and what its `co_lines()` gives.
    #[test]
    fn lines_are_those_of_co_lines() {
        let lines = b"\x80\x00\xd8\r\x0e\xf0\x00\x01\x05\x11\xf0\x00\x01\x05\x11\x88\x01\xdd\x08\r\
            \x88a\x89\x08\x8c\x08\x88\x08\x88\x08\xd8\x0b\x0f\x884";
        let code = Code { first_line: 1, ..code(lines) };
        let at = |position| line(&code, VERSION, position);
        assert_eq!([0, 2, 8, 10, 41, 42, 44].map(at), [1, 2, 2, 3, 3, 4, 4].map(Some));
        assert_eq!(at(46), None, "behind its end");
    }

    /// `co_lnotab` by CPython 3.9.18 and `co_linetable` by 3.10.13 of the same function, and what
    /// `dis.findlinestarts` says of both.
    #[test]
    fn older_tables_are_read_as_well() {
        let starts = |version: u32, lines: &[u8], starts: &[(u64, u32)]| {
            let code = Code { first_line: 1, ..code(lines) };
            for &(position, wanted) in starts {
                assert_eq!(line(&code, version, position), Some(wanted), "{version:x} {position}");
                assert_eq!(line(&code, version, position + 1), Some(wanted));
            }
        };
        let lines = b"\x00\x01\x08\x01\x04\x01\x02\xff\x06\x02\x02\x01\x02\x02\x08\xfe\x04\x02";
        let of_3_9 =
            [(0, 2), (8, 3), (12, 4), (14, 3), (20, 5), (22, 6), (24, 8), (32, 6), (36, 8)];
        starts(0x0309_0000, lines, &of_3_9);
        let lines = b"\x08\x01\x04\x01\x02\x01\x06\xff\x02\x02\x02\x01\x16\x02";
        let of_3_10 = [(0, 2), (8, 3), (12, 4), (14, 3), (20, 5), (22, 6), (24, 8)];
        starts(0x030a_0000, lines, &of_3_10);
    }

    proptest! {
        #[test]
        fn no_table_panics(lines in proptest::collection::vec(any::<u8>(), 0..200), at in any::<u64>()) {
            for version in [VERSION, 0x030a_0000, 0x0309_0000] {
                let _ = line(&code(&lines), version, at);
            }
        }
    }
}
