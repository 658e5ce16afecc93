//! The line program of a compilation unit: which addresses belong to which file and line.

use gimli::{AttributeValue, LineProgramHeader};

use super::debug::{Debug, DwarfError, Place, Slice};
use super::paint::Span;

/// Rows of a unit.
#[derive(Debug, Default)]
pub struct Rows {
    /// Addresses with the number of a row in [`Rows::places`]; sorted, without overlaps.
    pub spans: Vec<Span>,
    /// File, as the program numbers them, and line.
    pub places: Vec<(u64, u32)>,
}

/// Most rows of a unit; the largest seen have some hundred thousand.
const MAX_ROWS: usize = 4 << 20;

/// Rows paid for at once: all threads share the budget. The headers of a unit have more bytes.
const BLOCK: usize = 64;

/// Reads the rows of a unit; none when it has no line program.
///
/// # Errors
/// See [`DwarfError`].
pub fn read<'a>(debug: &Debug<'a>, place: &Place<'a>) -> Result<Rows, DwarfError> {
    let mut found = Rows::default();
    let Some(program) = place.unit.line_program.clone() else { return Ok(found) };
    let mut rows = program.rows();
    let mut before: Option<(u64, u64, u32)> = None;
    let mut paid = 0;
    while let Some((_, row)) = rows.next_row()? {
        if paid == 0 {
            debug.budgets.rows.spend(BLOCK)?;
            paid = BLOCK;
        }
        paid -= 1;
        if found.spans.len() >= MAX_ROWS {
            return Err(DwarfError::TooMuch);
        }
        let address = row.address();
        // Of several rows at one address the last holds: only it has bytes.
        if let Some((start, file, line)) = before.take()
            && start < address
            && debug.is_code(start)
        {
            let what = found.places.len() as u32;
            match (found.places.last(), found.spans.last_mut()) {
                (Some(&last), Some(span)) if last == (file, line) && span.end == start => {
                    span.end = address
                }
                _ => {
                    found.places.push((file, line));
                    found.spans.push(Span { start, end: address, what });
                }
            }
        }
        if !row.end_sequence() {
            let line = row.line().map_or(0, |line| u32::try_from(line.get()).unwrap_or(0));
            before = Some((address, row.file_index(), line));
        }
    }
    found.spans.sort_by_key(|span| span.start);
    let mut end = 0;
    found.spans.retain_mut(|span| {
        span.start = span.start.max(end);
        end = end.max(span.end);
        span.start < span.end
    });
    Ok(found)
}

/// The path of a file of a line program: the directory of the compilation, the file's own
/// directory, its name. They stay as the producer wrote them. `..` is kept: its meaning depends on
/// links that nobody has any more.
pub fn path<'a>(
    place: &Place<'a>,
    header: &LineProgramHeader<Slice<'a>>,
    file: u64,
) -> Option<String> {
    let entry = header.file(file)?;
    let text = |value: AttributeValue<Slice<'a>>| {
        let text = place.dwarf.attr_string(&place.unit, value).ok()?;
        Some(String::from_utf8_lossy(text.slice()).into_owned())
    };
    let name = text(entry.path_name())?;
    if name.starts_with('/') {
        return Some(name);
    }
    let compiled_in = || {
        let unit = place.unit.comp_dir.map(|dir| String::from_utf8_lossy(dir.slice()).into_owned());
        unit.unwrap_or_default()
    };
    // Directory 0 is that of the compilation: from DWARF 5 on listed as such, not listed before.
    // All others are relative to it.
    let directory = match (entry.directory_index(), header.version()) {
        (0, ..5) => compiled_in(),
        (0, _) => entry.directory(header).and_then(text).unwrap_or_default(),
        _ => match entry.directory(header).and_then(text) {
            Some(directory) if directory.starts_with('/') => directory,
            Some(directory) => join(&compiled_in(), &directory),
            None => compiled_in(),
        },
    };
    Some(join(&directory, &name))
}

fn join(directory: &str, name: &str) -> String {
    match (directory.is_empty(), name.is_empty()) {
        (true, _) => name.to_owned(),
        (_, true) => directory.to_owned(),
        _ if directory.ends_with('/') => format!("{directory}{name}"),
        _ => format!("{directory}/{name}"),
    }
}
