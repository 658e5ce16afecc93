//! Line tables of Ruby 3.0 and later: entries with a line each, and an index that says which entry
//! is of which instruction word (`succ_index_table` of iseq.c).

use stackwire_model::Code;
use stackwire_model::code::INDEX_LENGTH;

/// Instruction words whose ranks are in the head of the index: nine of 7 bits in each word.
const IMMEDIATE: usize = 54;
const RANKS: usize = 9;
/// Bytes of the head, and of a block: the rank before it, ranks before each of its words but the
/// first, of 9 bits, and a bit for each instruction word.
const HEAD: usize = 48;
const BLOCK: usize = 80;
/// Instruction words of a block.
const BITS: usize = 512;

/// Where each stretch of instruction words ends, and its line; in order. Where the table makes no
/// sense any more it ends.
pub(super) fn lines(code: &Code, version: u32) -> Vec<(u64, Option<u32>)> {
    let mut lines = Vec::new();
    _ = by_index(code, version, &mut lines);
    lines
}

fn by_index(code: &Code, version: u32, into: &mut Vec<(u64, Option<u32>)>) -> Option<()> {
    let (length, rest) = code.lines.split_first_chunk::<INDEX_LENGTH>()?;
    let (index, entries) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    // Since 3.1 the number of a node stands between the line and the events.
    let entry = if version >> 8 == 0x0300 { 8 } else { 12 };
    let line = |rank: usize| {
        let entry = entries.chunks_exact(entry).nth(rank.checked_sub(1)?)?;
        let line = u32::from_le_bytes(*entry.first_chunk()?);
        (line > 0).then_some(line)
    };
    if index.is_empty() && entries.len() == entry {
        // All of it is one line.
        into.push((u64::from(u32::MAX), line(1)));
        return Some(());
    }
    // Of a short sequence it is shorter.
    let (head, blocks) = index.split_at(index.len().min(HEAD));
    let ranks = (0..IMMEDIATE.min(head.len() / 8 * RANKS))
        .map(|word| (word_at(head, word / RANKS) >> (word % RANKS * 7) & 0x7f) as usize);
    let behind = blocks
        .chunks_exact(BLOCK)
        .flat_map(|block| (0..BITS).map(move |word| rank_in(block, word)));
    for (word, rank) in ranks.chain(behind).enumerate() {
        let line = line(rank);
        match into.last_mut() {
            Some((end, last)) if *last == line => *end += 1,
            _ => into.push((word as u64 + 1, line)),
        }
    }
    Some(())
}

/// How many entries begin up to an instruction word of a block.
fn rank_in(block: &[u8], word: usize) -> usize {
    let (of, bit) = (word / 64, word % 64);
    let before = word_at(block, 0) & 0xffff_ffff;
    let small = of.checked_sub(1).map_or(0, |at| word_at(block, 1) >> (at * 9) & 0x1ff);
    let here = (word_at(block, 2 + of) << (63 - bit)).count_ones();
    before as usize + small as usize + here as usize
}

fn word_at(bytes: &[u8], index: usize) -> u64 {
    bytes.as_chunks().0.get(index).map_or(0, |word| u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stackwire_model::{Code, Runtime, Text};

    use super::super::Function;

    const VERSION: u32 = 0x0003_0102;

    fn code(lines: Vec<u8>) -> Code {
        let name = Text { width: 0, bytes: b"f".to_vec(), is_cut: false };
        Code { name, first_line: 10, lines, ..Code::unknown(Runtime::Ruby(VERSION)) }
    }

    /// As Ruby makes it: entry N begins at the N-th of `begins`, of `words` instruction words.
    fn table(begins: &[usize], words: usize) -> Vec<u8> {
        let rank = |word: usize| begins.iter().filter(|&&begin| begin <= word).count() as u64;
        let mut index = Vec::new();
        for word in 0..if words < 54 { words.div_ceil(9) } else { 6 } {
            let ranks = (0..9).map(|at| rank(word * 9 + at) << (at * 7));
            index.extend(ranks.fold(0, |all, one| all | one).to_le_bytes());
        }
        for block in 0..words.saturating_sub(54).div_ceil(512) {
            let first = 54 + block * 512;
            let before = if first == 0 { 0 } else { rank(first - 1) };
            index.extend(before.to_le_bytes());
            let small = (1..8).map(|at| (rank(first + at * 64 - 1) - before) << ((at - 1) * 9));
            index.extend(small.fold(0, |all, one| all | one).to_le_bytes());
            for at in 0..8 {
                let word = first + at * 64;
                let bits = begins.iter().filter(|begin| (word..word + 64).contains(begin));
                index.extend(bits.fold(0u64, |all, it| all | 1 << (it - word)).to_le_bytes());
            }
        }
        let entries = (0..begins.len() as u32)
            .flat_map(|number| [(100 + number).to_le_bytes(), [0; 4], [0; 4]].concat());
        [&(index.len() as u32).to_le_bytes()[..], &index, &entries.collect::<Vec<_>>()].concat()
    }

    fn line(code: &Code, position: u64) -> u32 {
        Function::read(code).unwrap().at(position).line
    }

    #[test]
    fn a_word_has_the_line_of_the_entry_that_begins_last() {
        let begins = [0, 3, 53, 54, 60, 130, 565, 566, 700];
        let code = code(table(&begins, 900));
        for word in 0..900 {
            let wanted = 99 + begins.iter().filter(|&&begin| begin <= word).count() as u32;
            assert_eq!(line(&code, word as u64), wanted, "{word}");
        }
        assert_eq!(line(&code, 5000), 0, "behind its end");
        let short = self::code(table(&[0, 3, 8], 10));
        assert_eq!(
            [0, 2, 3, 7, 8, 9].map(|word| line(&short, word)),
            [100, 100, 101, 101, 102, 102]
        );
    }

    #[test]
    fn what_is_cut_has_no_lines() {
        let whole = table(&[0, 3], 60);
        for length in 0..whole.len() {
            let found = line(&code(whole[..length].to_vec()), 1);
            assert!(found == 0 || length >= 132 + 12, "{length}");
        }
        assert_eq!(line(&code(Vec::new()), 1), 0);
        let alone = [[0; 4], 7u32.to_le_bytes(), [0; 4], [0; 4]].concat();
        assert_eq!(line(&code(alone), 9), 7);
    }

    proptest! {
        #[test]
        fn no_table_panics(lines in proptest::collection::vec(any::<u8>(), 0..400), at in any::<u64>()) {
            let _ = line(&code(lines.clone()), at);
            let framed = [&132u32.to_le_bytes()[..], &lines].concat();
            let _ = line(&code(framed), at);
        }
    }
}
