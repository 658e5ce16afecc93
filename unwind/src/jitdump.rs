//! From a jitdump to the unwind table of the code it describes: its compiler writes call frame
//! information beside each function (`JIT_CODE_UNWINDING_INFO`), as CPython and V8 do when asked
//! to.
//!
//! `jitdump/records.rs` has their layout. What cannot be read costs its
//! function; where functions overlap the later holds. Run in the collector's unwind compiler, on
//! files of strangers.

mod records;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;

use gimli::{BaseAddresses, EhFrame, LittleEndian, UnwindContext, UnwindSection};
use stackwire_collector_ebpf::Rule;
use stackwire_collector_ebpf::tables::WINDOW;

pub use self::records::{Fields, Record, RecordKind, Records};
use crate::compile::rule;
use crate::error::CompileError;
use crate::pages::Spans;
use crate::shared::Shared;
use crate::table::Table;

/// Largest jitdump read.
const MAX_BYTES: u64 = 64 << 20;
/// Most functions taken.
const MAX_FUNCTIONS: usize = 1 << 18;
/// Most rules of a function, and of all.
const MAX_RULES: usize = 1 << 16;
const MAX_SPANS: usize = 4 << 20;
/// Where functions and their call frame information are taken to lie: what is added up from there
/// stays positive.
const TEXT: u64 = 1 << 40;
const FRAMES: u64 = TEXT + (1 << 32);

/// Compiles the table of what lies in one window of [`WINDOW`] bytes; its offsets are those in the
/// window.
///
/// # Errors
/// See [`CompileError`]: `Nothing` when there is code and nothing says how to leave it.
pub fn compile(file: &File, window: u64) -> Result<Table, CompileError> {
    let size = file.metadata()?.len();
    if size > MAX_BYTES {
        return Err(CompileError::JitdumpTooLarge(size));
    }
    let mut content = vec![0; size as usize];
    file.read_exact_at(&mut content, 0)?;
    table(&content, window)
}

/// A function at a place, and its call frame information.
#[derive(Clone, Copy)]
struct Placed<'a> {
    start: u64,
    end: u64,
    frames: &'a [u8],
}

fn table(content: &[u8], window: u64) -> Result<Table, CompileError> {
    let placed = read(content).ok_or(CompileError::NotJitdump)?;
    if !placed.is_empty() && placed.iter().all(|placed| placed.frames.is_empty()) {
        return Err(CompileError::Nothing);
    }
    let mut spans = Spans::default();
    let mut taken = Taken::default();
    // One that was moved has those of before.
    let mut known: HashMap<*const u8, Rules> = HashMap::new();
    for placed in placed.iter().rev().filter(|placed| placed.start / WINDOW == window) {
        let rules = known.entry(placed.frames.as_ptr()).or_insert_with(|| Rules::of(placed.frames));
        for part in taken.take(placed.start, placed.end) {
            rules.add(placed, part, window * WINDOW, &mut spans);
        }
        if spans.len() > MAX_SPANS {
            return Err(CompileError::TooManyRules);
        }
    }
    Ok(spans.finish(None))
}

/// All functions in the order they were made; one that is still being written is not there yet.
fn read(content: &[u8]) -> Option<Vec<Placed<'_>>> {
    let mut placed: Vec<Placed<'_>> = Vec::new();
    let mut by_index = BTreeMap::new();
    let mut frames: &[u8] = &[];
    for record in Records::new(content)?.take_while(|record| record.whole) {
        let mut body = record.body;
        // A record that makes no sense costs itself.
        let _ = match record.kind {
            // The information comes before its function.
            RecordKind::Load => load(body, std::mem::take(&mut frames)).map(|(one, index)| {
                by_index.insert(index, placed.len());
                placed.push(one);
            }),
            RecordKind::Move => moved(&mut body).map(|(start, end, index)| {
                if let Some(&before) = by_index.get(&index) {
                    let frames = placed[before].frames;
                    placed.push(Placed { start, end, frames });
                }
            }),
            RecordKind::Unwinding => {
                frames = unwinding(body).unwrap_or_default();
                None
            }
            RecordKind::DebugInfo | RecordKind::Other => None,
        };
        if placed.len() == MAX_FUNCTIONS {
            break;
        }
    }
    Some(placed)
}

/// A function, and the number its compiler gave it.
fn load<'a>(mut body: Fields<'_>, frames: &'a [u8]) -> Option<(Placed<'a>, u64)> {
    body.skip(16)?; // pid, tid, vma
    let (start, size, index) = (body.long()?, body.long()?, body.long()?);
    let end = start.checked_add(size).filter(|&end| end > start)?;
    Some((Placed { start, end, frames }, index))
}

/// Where the function of a number is now.
fn moved(body: &mut Fields<'_>) -> Option<(u64, u64, u64)> {
    body.skip(24)?; // pid, tid, vma, where it was
    let (start, size, index) = (body.long()?, body.long()?, body.long()?);
    Some((start, start.checked_add(size)?, index))
}

/// `.eh_frame` of a record. perf, CPython and V8 have the `.eh_frame_hdr` behind it, its
/// specification in front.
fn unwinding(mut body: Fields<'_>) -> Option<&[u8]> {
    let (size, header) = (body.long()?, body.long()?);
    body.skip(8)?; // how much of it is mapped
    let all = body.rest().get(..usize::try_from(size).ok()?)?;
    let header = usize::try_from(header).ok()?;
    let first = all.get(..all.len().checked_sub(header)?)?;
    // The header's first word, taken for the length of an entry, leads far beyond it.
    let length = first.first_chunk().map(|four| u32::from_le_bytes(*four))?;
    if length as usize <= first.len() { Some(first) } else { all.get(header..) }
}

/// Rules by offset in a function.
#[derive(Default)]
struct Rules(Vec<(u64, u64, Rule)>);

impl Rules {
    /// Of the one function that is described. A description of several does not say which of them
    /// is where.
    fn of(frames: &[u8]) -> Self {
        Self::read(frames).unwrap_or_default()
    }

    fn read(frames: &[u8]) -> Option<Self> {
        let mut section = EhFrame::new(frames, LittleEndian);
        section.set_address_size(8);
        let bases = BaseAddresses::default().set_text(TEXT).set_eh_frame(FRAMES);
        let mut entries = section.entries(&bases);
        let mut found = None;
        while let Ok(Some(entry)) = entries.next() {
            let gimli::CieOrFde::Fde(partial) = entry else { continue };
            if found.replace(partial).is_some() {
                return None;
            }
        }
        let mut shared = Shared::default();
        let cie = |section: &EhFrame<_>, bases: &_, offset| shared.entry(section, bases, offset);
        let fde = found?.parse(cie).ok()?;
        // Where compilers think the information will lie differs: it begins with its function.
        let base = fde.initial_address();
        let mut context = UnwindContext::new();
        let mut rows = fde.rows(&section, &bases, &mut context).ok()?;
        let mut rules = Vec::new();
        while let Ok(Some(row)) = rows.next_row() {
            let (start, end) = (row.start_address(), row.end_address().min(fde.end_address()));
            if let (Some(start), Some(end)) = (start.checked_sub(base), end.checked_sub(base))
                && rules.len() < MAX_RULES
            {
                rules.push((start, end, rule(row, &section, fde.cie())));
            }
        }
        Some(Self(rules))
    }

    /// Adds those of a part of a function.
    fn add(&self, placed: &Placed<'_>, (from, to): (u64, u64), window: u64, spans: &mut Spans) {
        let size = placed.end - placed.start;
        if self.0.last().is_some_and(|&(_, end, _)| end > size) {
            return;
        }
        let first = self.0.partition_point(|&(_, end, _)| placed.start + end <= from);
        for &(start, end, rule) in &self.0[first..] {
            let at = |offset: u64| (placed.start + offset).clamp(from, to) - window;
            if placed.start + start >= to {
                break;
            }
            spans.add(at(start), at(end), rule);
        }
    }
}

/// Parts of memory that are a later function's.
#[derive(Default)]
struct Taken(BTreeMap<u64, u64>);

impl Taken {
    /// What is left of `start..end`, which is taken by it.
    fn take(&mut self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut left = Vec::new();
        let mut from = start;
        let mut whole = (start, end);
        let before = self.0.range(..start).next_back().map(|(&start, &end)| (start, end));
        let inside = self.0.range(start..end).map(|(&start, &end)| (start, end));
        let met: Vec<_> =
            before.filter(|&(_, end)| end > start).into_iter().chain(inside).collect();
        for (taken, until) in met {
            if from < taken {
                left.push((from, taken));
            }
            from = from.max(until);
            whole = (whole.0.min(taken), whole.1.max(until));
            self.0.remove(&taken);
        }
        if from < end {
            left.push((from, end));
        }
        self.0.insert(whole.0, whole.1);
        left
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stackwire_collector_ebpf::cfa;

    use super::*;
    use stackwire_model::FileOffset;

    const WINDOW_7: u64 = 7 * WINDOW;

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

    fn load(start: u64, size: u64, index: u64) -> Vec<u8> {
        let mut body = longs(&[0, start, start, size, index]);
        body.extend(b"f\0");
        body.resize(body.len() + size as usize, 0x90);
        record(0, &body)
    }

    /// A function that pushes `pushed` bytes in its first instruction, of one byte.
    fn unwinding(size: u32, pushed: u8) -> Vec<u8> {
        // Id, version, "zR", alignments 1 and -8, return address 16; pointers pc-relative, 4 bytes;
        // CFA rsp + 8, rip at CFA - 8.
        let mut cie = vec![0, 0, 0, 0, 1, b'z', b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8, 0x90, 1];
        cie.resize(cie.len().next_multiple_of(4), 0);
        let mut frames = (cie.len() as u32).to_le_bytes().to_vec();
        frames.extend(cie);
        let to_cie = frames.len() as u32 + 4;
        let mut fde = to_cie.to_le_bytes().to_vec();
        // As perf lays it out: behind the code, rounded up to eight bytes.
        let back = -(size.next_multiple_of(8) as i32 + to_cie as i32 + 4);
        fde.extend(back.to_le_bytes());
        fde.extend(size.to_le_bytes());
        // No augmentation; after one byte CFA rsp + 8 + pushed.
        fde.extend([0, 0x41, 0x0e, 8 + pushed]);
        fde.resize(fde.len().next_multiple_of(4), 0);
        frames.extend((fde.len() as u32).to_le_bytes());
        frames.extend(fde);
        frames.extend([0; 4]);
        let header = [0; 20];
        let mut body = longs(&[(frames.len() + header.len()) as u64, header.len() as u64, 0]);
        body.extend(frames);
        body.extend(header);
        record(4, &body)
    }

    fn header() -> Vec<u8> {
        let mut out: Vec<u8> =
            [0x4A69_5444_u32, 1, 40, 62, 0, 7].iter().flat_map(|word| word.to_le_bytes()).collect();
        out.extend([0; 16]);
        out
    }

    /// The same with the header in front.
    fn unwinding_by_specification(size: u32, pushed: u8) -> Vec<u8> {
        let record = unwinding(size, pushed);
        let (head, frames) = record.split_at(40);
        let (frames, _) = frames.split_at(frames.len() - 20);
        // Version, and how what follows is written.
        let header = [&[1, 0x1b, 3, 0x3b][..], &[0; 16]].concat();
        [head, &header, frames].concat()
    }

    #[test]
    fn either_order_of_header_and_frames_is_read_and_several_functions_are_not() {
        let load = load(WINDOW_7 + 0x1_0000, 0x20, 1);
        for record in [unwinding(0x20, 16), unwinding_by_specification(0x20, 16)] {
            let found = table(&[header(), record, load.clone()].concat(), 7).unwrap();
            assert_eq!([0, 1].map(|at| offset(&found, at)), [Some(8), Some(24)]);
        }
        let longer = table(&[header(), unwinding(0x21, 16), load.clone()].concat(), 7).unwrap();
        assert_eq!(offset(&longer, 0), None, "of another function");
        let mut two = unwinding(0x10, 16);
        let frames = two.len() - 40 - 20 - 4;
        let again = two[40 + 24..40 + frames].to_vec();
        // Its entry lies further from the one they share.
        let mut again = again;
        let far = u32::from_le_bytes(again[4..8].try_into().unwrap()) + again.len() as u32;
        again[4..8].copy_from_slice(&far.to_le_bytes());
        two.splice(40 + frames..40 + frames, again.iter().copied());
        let size = two.len() as u32;
        two[4..8].copy_from_slice(&size.to_le_bytes());
        let all = u64::from_le_bytes(two[16..24].try_into().unwrap()) + again.len() as u64;
        two[16..24].copy_from_slice(&all.to_le_bytes());
        let found = table(&[header(), two, load].concat(), 7).unwrap();
        assert_eq!(offset(&found, 0), None);
    }

    fn dump() -> Vec<u8> {
        let at = WINDOW_7 + 0x1_0000;
        [
            header(),
            unwinding(0x20, 16),
            load(at, 0x20, 1),
            // Without: its code has no rule.
            load(at + 0x40, 0x20, 2),
            unwinding(0x10, 24),
            load(at + 0x10, 0x10, 3),
            record(1, &longs(&[0, at, at, at + 0x100, 0x20, 1])),
            unwinding(0x20, 32),
            load(at + WINDOW, 0x20, 4),
        ]
        .concat()
    }

    fn offset(table: &Table, at: u64) -> Option<i32> {
        table.rule(FileOffset(0x1_0000 + at)).map(|rule| rule.offset)
    }

    #[test]
    fn each_function_has_its_rules_and_the_later_holds() {
        let found = table(&dump(), 7).unwrap();
        let at = |at| offset(&found, at);
        assert_eq!([at(0), at(1), at(0xf)], [Some(8), Some(24), Some(24)]);
        assert_eq!([at(0x10), at(0x11), at(0x1f)], [Some(8), Some(32), Some(32)], "written over");
        assert_eq!([at(0x20), at(0x40)], [None, None]);
        assert_eq!([at(0x100), at(0x101), at(0x120)], [Some(8), Some(24), None], "moved");
        let other = table(&dump(), 8).unwrap();
        assert_eq!([offset(&other, 1), offset(&other, 0x101)], [Some(40), None]);
        assert!(found.rules.iter().skip(1).all(|rule| rule.cfa == cfa::REGISTER));
    }

    #[test]
    fn a_dump_that_says_nothing_of_frames_has_no_table_and_an_empty_one_an_empty_table() {
        let nothing = [header(), load(0x1000, 0x10, 1)].concat();
        assert!(matches!(table(&nothing, 0), Err(CompileError::Nothing)));
        assert!(table(&header(), 0).unwrap().pages.iter().all(|&rows| rows == 0));
        assert!(table(b"\x7fELF", 0).is_err());
    }

    #[test]
    fn cut_anywhere_it_has_what_comes_before() {
        let dump = dump();
        let whole = read(&dump).unwrap().len();
        let counts: Vec<usize> =
            (40..=dump.len()).map(|end| read(&dump[..end]).unwrap().len()).collect();
        assert!(counts.is_sorted() && counts.last() == Some(&whole) && counts[0] == 0);
        assert_eq!(counts[counts.len() - 2], whole - 1);
    }

    proptest! {
        #[test]
        fn what_is_taken_is_taken_once(parts in proptest::collection::vec((0u64..60, 1u64..20), 1..30)) {
            let mut taken = Taken::default();
            let mut bytes = [false; 100];
            for (start, length) in parts {
                let left = taken.take(start, start + length);
                for at in start..start + length {
                    let is_left = left.iter().any(|&(from, to)| (from..to).contains(&at));
                    prop_assert_eq!(is_left, !bytes[at as usize]);
                    bytes[at as usize] = true;
                }
            }
        }

        #[test]
        fn damage_never_panics(at in 40usize..600, bytes in proptest::collection::vec(any::<u8>(), 1..16)) {
            let mut dump = dump();
            let at = at.min(dump.len());
            let end = (at + bytes.len()).min(dump.len());
            dump[at..end].copy_from_slice(&bytes[..end - at]);
            if let Ok(table) = table(&dump, 7) {
                prop_assert!(Table::parse(&table.to_bytes()).is_ok());
            }
        }
    }
}
