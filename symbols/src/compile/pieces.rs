//! Compiles units while the rest of their section is being decompressed.
//!
//! One thread needs a second to decompress the 260 MB of libjvm's `.debug_info`. That is a third of
//! the time its table takes. Units of C and C++ that were built without link-time optimization need
//! no other part of their section. The first unit that needs more ends this, and `dwarf.rs` goes on
//! from there with the whole section. Without such a unit, the section is never written anywhere.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use gimli::{RunTimeEndian, SectionId};
use stackwire_elf::{Elf, ElfError, Stream};

use super::Files;
use super::debug::{Budgets, DwarfError, unit_length};
use super::overlay::UnitTable;
use super::sections::Sections;
use super::symbols::Symbols;
use super::units::{MAX_WORKERS, Work, Written, offset};

/// Units that are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// None: all are in the table.
    None,
    /// Those from this offset of the section on.
    From(usize),
}

/// What is done in pieces, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sections smaller than this are read whole.
    pub min_section: usize,
    /// Units are in one piece until they have this many.
    pub piece: usize,
    /// A larger unit is compiled from the whole section, which need not be in memory.
    pub max_unit: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { min_section: 16 << 20, piece: 1 << 20, max_unit: 32 << 20 }
    }
}

/// Most pieces between the decompressor and the table, and most bytes of them, unless one alone has
/// more.
const MAX_PIECES: usize = 8;
const MAX_BYTES: usize = 8 << 20;

/// Units that are whole, at the front of a buffer.
struct Piece {
    number: usize,
    buffer: Vec<u8>,
    length: usize,
}

/// A piece that was compiled.
struct Compiled {
    tables: Vec<Result<UnitTable, DwarfError>>,
    /// Bytes of the units before the first that leads out of the piece; of all, if none does.
    length: usize,
    leads_out: bool,
    returned: Returned,
}

/// The buffer of a piece that is in the table, and how many bytes the piece had.
struct Returned {
    buffer: Vec<u8>,
    length: usize,
}

/// Adds units from the front of the section to a table, as long as they need nothing but
/// themselves.
///
/// One thread decompresses, some compile a piece each, this one adds them in their order.
///
/// # Errors
/// When the section does not decompress to what its header says.
pub fn compile(
    elf: &Elf,
    sections: &Sections,
    files: &Files<'_>,
    symbols: &Symbols,
    written: &mut Written<'_>,
    limits: Limits,
) -> Result<Rest, DwarfError> {
    let fits = |stream: &Stream<'_>| stream.size >= limits.min_section as u64;
    let stream = elf.stream(SectionId::DebugInfo.name())?.filter(fits);
    let Some(stream) = stream.filter(|_| sections.stand_alone()) else {
        return Ok(Rest::From(0));
    };
    let size = stream.size;
    let budgets = Budgets::new(sections.length + size as usize);
    let mut compiled = 0;
    std::thread::scope(|scope| {
        let (free, returned) = mpsc::channel();
        let (full, pieces) = mpsc::channel();
        let room = Room { returned, spare: Vec::new(), pieces: 0, bytes: 0 };
        let cut = scope.spawn(move || cut(stream, sections.endian, limits, &full, room));
        let (done, finished) = mpsc::channel();
        // Of the compiling threads alone: when they have ended, nobody waits for pieces.
        let pieces = Arc::new(Mutex::new(pieces));
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_WORKERS);
        for _ in 0..workers {
            let (pieces, done, budgets) = (Arc::clone(&pieces), done.clone(), &budgets);
            scope.spawn(move || {
                while let Some(piece) = next(&pieces) {
                    let number = piece.number;
                    let compiled = compile_piece(piece, sections, files, symbols, budgets);
                    if done.send((number, compiled)).is_err() {
                        break;
                    }
                }
            });
        }
        drop((pieces, done));
        let mut early = BTreeMap::new();
        let mut number = 0;
        'pieces: for (its_number, piece) in finished {
            early.insert(its_number, piece);
            while let Some(piece) = early.remove(&number) {
                number += 1;
                written.write(piece.tables);
                compiled += piece.length;
                if piece.leads_out {
                    break 'pieces;
                }
                sections.forget_pages();
                // Nobody takes it when all has been read.
                let _ = free.send(piece.returned);
            }
        }
        drop(free);
        cut.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    Ok(if compiled as u64 == size { Rest::None } else { Rest::From(compiled) })
}

/// The next piece; `None` when there are no more.
fn next(pieces: &Mutex<mpsc::Receiver<Piece>>) -> Option<Piece> {
    pieces.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

fn compile_piece(
    piece: Piece,
    sections: &Sections,
    files: &Files<'_>,
    symbols: &Symbols,
    budgets: &Budgets,
) -> Compiled {
    let Piece { buffer, length, .. } = piece;
    let compile = || {
        let work = Work::new(sections, &buffer[..length], files, budgets, true);
        let headers = &work.debug.main.headers;
        let mut tables = work.compile_in_order(headers, symbols);
        let leads_out = |table: &Result<_, _>| matches!(table, Err(DwarfError::LeadsOut));
        let first = tables.iter().position(leads_out);
        tables.truncate(first.unwrap_or(tables.len()));
        // Those behind the first that leads out are counted with the rest of the section.
        let end = first.map_or(usize::MAX, |first| offset(&headers[first]).0);
        tables.extend(work.malformed(0..end));
        (tables, first.and_then(|first| headers.get(first)).map(|header| offset(header).0))
    };
    // Where panics do not end the program, one must not hold up the pieces behind this one.
    let (tables, end) = std::panic::catch_unwind(AssertUnwindSafe(compile))
        .unwrap_or_else(|_panic| (vec![Err(DwarfError::Panicked)], None));
    let returned = Returned { buffer, length };
    Compiled { tables, length: end.unwrap_or(length), leads_out: end.is_some(), returned }
}

/// Room for pieces. Buffers are used again: a new one costs page faults, a tenth of the time it
/// takes to fill it.
struct Room {
    returned: mpsc::Receiver<Returned>,
    spare: Vec<Vec<u8>>,
    /// Pieces that were sent and not returned, and their bytes.
    pieces: usize,
    bytes: usize,
}

impl Room {
    /// Waits until there is room for a piece; false: nobody wants more.
    fn wait_for(&mut self, length: usize, limits: Limits) -> bool {
        while self.pieces > 0
            && (self.pieces >= MAX_PIECES || self.bytes.saturating_add(length) > MAX_BYTES)
        {
            let Ok(Returned { buffer, length }) = self.returned.recv() else { return false };
            self.pieces -= 1;
            self.bytes -= length;
            // That of a large unit goes.
            if buffer.capacity() <= 2 * limits.piece {
                self.spare.push(buffer);
            }
        }
        self.pieces += 1;
        self.bytes += length;
        true
    }
}

/// Cuts the section between units into pieces. Ends early where nobody wants more, and before a
/// unit that is too large.
fn cut(
    mut stream: Stream<'_>,
    endian: RunTimeEndian,
    limits: Limits,
    full: &mpsc::Sender<Piece>,
    mut room: Room,
) -> Result<(), DwarfError> {
    let (mut buffer, mut filled, mut number) = (Vec::new(), 0, 0);
    let mut left = stream.size;
    while left > 0 && filled <= limits.max_unit {
        let wanted = match limits.piece.saturating_sub(filled) {
            0 => limits.piece,
            wanted => wanted,
        };
        let wanted = left.min(wanted as u64) as usize;
        make_room(&mut buffer, filled + wanted);
        let got = stream.read(&mut buffer[filled..filled + wanted]).map_err(ElfError::from)?;
        left -= got as u64;
        if got < wanted {
            let found = stream.size - left;
            return Err(ElfError::Cut { size: stream.size, found }.into());
        }
        filled += got;
        let length = whole_units(&buffer[..filled], endian);
        if length > 0 {
            if !room.wait_for(length, limits) {
                break;
            }
            let mut next = room.spare.pop().unwrap_or_default();
            make_room(&mut next, filled - length);
            next[..filled - length].copy_from_slice(&buffer[length..filled]);
            let piece = Piece { number, buffer: std::mem::replace(&mut buffer, next), length };
            (filled, number) = (filled - length, number + 1);
            if full.send(piece).is_err() {
                break;
            }
        }
    }
    Ok(())
}

fn make_room(buffer: &mut Vec<u8>, length: usize) {
    if buffer.len() < length {
        buffer.resize(length, 0);
    }
}

/// Bytes of the units at the front that are whole.
fn whole_units(bytes: &[u8], endian: RunTimeEndian) -> usize {
    let mut whole = 0;
    while let Some(length) = unit_length(&bytes[whole..], endian) {
        whole += length;
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_cut_by_their_lengths() {
        let whole = |bytes: &[u8]| whole_units(bytes, RunTimeEndian::Little);
        assert_eq!(whole(&[]), 0);
        assert_eq!(whole(&[2, 0, 0, 0, 9]), 0);
        assert_eq!(whole(&[2, 0, 0, 0, 9, 9]), 6);
        assert_eq!(whole(&[1, 0, 0, 0, 9, 2, 0, 0, 0, 9]), 5);
        let long = [255, 255, 255, 255, 1, 0, 0, 0, 0, 0, 0, 0, 9];
        assert_eq!((whole(&long), whole(&long[..12]), whole(&long[..4])), (13, 0, 0));
        assert_eq!(whole(&[255; 40]), 0);
        assert_eq!(whole_units(&[0, 0, 0, 2, 9, 9, 1], RunTimeEndian::Big), 6);
    }
}
