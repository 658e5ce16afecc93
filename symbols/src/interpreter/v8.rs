//! Lines of V8: bytecode has a table of characters of the script by place in the bytecode
//! (src/codegen/source-position-table.cc), and the collector has said which characters end lines.

use stackwire_model::Code;
use stackwire_model::code::INDEX_LENGTH;

/// Where each stretch of bytecode ends, and its line; in order. Where the table makes no sense any
/// more it ends.
pub(super) fn lines(code: &Code) -> Vec<(u64, Option<u32>)> {
    let Some((length, rest)) = code.lines.split_first_chunk::<INDEX_LENGTH>() else {
        return Vec::new();
    };
    let length = u32::from_le_bytes(*length) as usize;
    let Some((mut table, mut rest)) = rest.split_at_checked(length) else { return Vec::new() };
    let mut ends = Vec::new();
    let mut last = 0u64;
    while let Some(distance) = number(&mut rest) {
        last = last.saturating_add(distance);
        ends.push(last);
    }
    // The first is where the function begins.
    let ends = ends.get(1..).unwrap_or_default();
    let line = |character: u64| {
        let before = ends.partition_point(|&end| end < character) as u32;
        code.first_line.checked_add(before)
    };
    // The first entry is of the function's entry, in front of the first instruction.
    let (mut at, mut raw) = (-1i64, 0i64);
    let mut lines: Vec<(u64, Option<u32>)> = Vec::new();
    while let (Some(distance), Some(more)) = (signed(&mut table), signed(&mut table)) {
        // What is no statement is the complement.
        at = at.saturating_add(if distance < 0 { !distance } else { distance });
        raw = raw.saturating_add(more);
        let begins = u64::try_from(at).unwrap_or(0);
        if let Some(before) = lines.last_mut() {
            before.0 = begins;
        }
        // The last bit says that the position is in no script; the character is one less.
        let character = u64::try_from(raw >> 1).ok().and_then(|it| it.checked_sub(1));
        let character = character.filter(|_| raw & 1 == 0);
        lines.push((u64::from(u32::MAX >> 1), character.and_then(line)));
    }
    lines
}

/// A number of 7 bits a byte, the last bits first.
fn number(from: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = from.split_first()?;
        *from = rest;
        number |= u64::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// Likewise, with its sign in the last bit.
fn signed(from: &mut &[u8]) -> Option<i64> {
    let number = number(from)?;
    Some((number >> 1) as i64 ^ -((number & 1) as i64))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stackwire_model::{Runtime, Text};

    use super::super::Function;
    use super::*;

    /// Of `twice` in tests/fixtures/shares.js, which begins at its character 348, by Node 24.22.3:
    /// its table as its bytecode has it, read from the process.
    const TABLE: [u8; 13] =
        [0x01, 0xf4, 0x0a, 0x02, 0x1c, 0x0d, 0x00, 0x08, 0x2c, 0x0d, 0x00, 0x0a, 0x24];
    /// 348, and line feeds at 352, 363 and 374.
    const ENDS: [u8; 5] = [0xdc, 0x02, 4, 11, 11];

    #[test]
    fn each_call_has_its_line() {
        let lines = [&(TABLE.len() as u32).to_le_bytes()[..], &TABLE, &ENDS].concat();
        let name = Text { width: 1, bytes: b"twice".to_vec(), is_cut: false };
        let code = Code { name, lines, first_line: 15, ..Code::unknown(Runtime::V8(0)) };
        let function = Function::read(&code).unwrap();
        // Calls are at 6 and 16, as the bytecode has it.
        let found = [0, 6, 9, 10, 16, 20, 21, 0x7fff_ffff].map(|at| function.at(at).line);
        assert_eq!(found, [16, 16, 16, 17, 17, 17, 18, 0]);
    }

    proptest! {
        #[test]
        fn what_is_no_table_has_no_lines(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let code = Code { lines: bytes, first_line: u32::MAX, ..Code::unknown(Runtime::V8(0)) };
            let lines = lines(&code);
            prop_assert!(lines.len() <= code.lines.len());
        }
    }
}
