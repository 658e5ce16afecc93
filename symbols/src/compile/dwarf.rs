//! DWARF → ranges of the table: units in parallel, in batches, merged in their order.
//!
//! `units.rs` compiles one unit. It takes functions and inlined calls from `scopes.rs`, and files
//! and lines from `lines.rs`; `overlay.rs` lays the one over the other. `debug.rs` follows
//! references between units. `pieces.rs` compiles the first units of a section while the rest of
//! the section is still being decompressed.

use gimli::{SectionId, UnitHeader};
use stackwire_elf::{Bytes, Elf};

use super::Files;
use super::debug::{Budgets, DwarfError, Slice};
use super::pieces::{self, Limits, Rest};
use super::sections::{Sections, section};
use super::symbols::Symbols;
use super::units::{Work, Written, offset};
use crate::table::Writer;

/// Adds the ranges of a file's units to a table. `limits`: what is done in pieces.
///
/// # Errors
/// When sections cannot be read; units compiled before are in the table.
pub fn compile(
    elf: &Elf,
    files: &Files<'_>,
    symbols: &Symbols,
    writer: &mut Writer,
    notes: &mut Vec<String>,
    limits: Limits,
) -> Result<(), DwarfError> {
    let sections = Sections::load(elf, files)?;
    let mut written = Written::new(writer);
    let ended = match pieces::compile(elf, &sections, files, symbols, &mut written, limits) {
        Ok(Rest::None) => Ok(()),
        Ok(Rest::From(offset)) => section(elf, SectionId::DebugInfo.name())
            .map(|units| compile_from(&sections, &units, offset, files, symbols, &mut written)),
        Err(error) => Err(error),
    };
    if let Some((count, error)) = written.failed {
        let all = written.units;
        notes
            .push(format!("{count} of {all} units of its debug information do not parse: {error}"));
    }
    match written.without_split {
        0 => {}
        count => notes.push(format!("{count} .dwo files of it are missing")),
    }
    ended
}

/// Adds the ranges of the units from an offset on to a table.
fn compile_from(
    sections: &Sections,
    units: &Bytes,
    from: usize,
    files: &Files<'_>,
    symbols: &Symbols,
    written: &mut Written<'_>,
) {
    let budgets = Budgets::new(sections.length + units.len());
    let work = Work::new(sections, units, files, &budgets, false);
    let begin = |header: &UnitHeader<Slice<'_>>| offset(header).0;
    let headers = &work.debug.main.headers;
    let mut rest = &headers[headers.partition_point(|header| begin(header) < from)..];
    let mut done: Vec<_> = work.malformed(from..usize::MAX).collect();
    while !rest.is_empty() {
        let (batch, after) = rest.split_at(batch(rest));
        rest = after;
        // One batch is written while the next is worked out.
        let before = std::mem::take(&mut done);
        done = std::thread::scope(|scope| {
            let next = scope.spawn(|| work.compile_batch(batch, symbols));
            written.write(before);
            next.join().unwrap_or_default()
        });
        // What was read of mapped sections so far need not stay in memory.
        units.forget_pages();
        sections.forget_pages();
    }
    written.write(done);
    written.without_split += work.without_split.into_inner();
}

/// Units of a batch have this many bytes of entries together: what is worked out at once, two
/// batches, fits in memory.
const BATCH: usize = 8 << 20;

/// How many units the next batch has.
fn batch(headers: &[UnitHeader<Slice<'_>>]) -> usize {
    let mut bytes = 0;
    let fits = headers.iter().take_while(|header| {
        bytes += header.length_including_self();
        bytes <= BATCH
    });
    fits.count().max(1).min(headers.len())
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::super::debug::unit_length;
    use super::super::symbols;
    use super::*;
    use crate::table::{Frames, Table};

    const UNITS: usize = 12;
    const WHOLE: Limits = Limits { min_section: usize::MAX, piece: 1, max_unit: 1 };

    /// A program of twelve units with functions and calls inlined into them.
    fn program(flags: &[&str]) -> Elf {
        let directory = tempfile::tempdir().unwrap();
        open(&program_in(directory.path(), flags))
    }

    fn program_in(directory: &Path, flags: &[&str]) -> PathBuf {
        let path = |name: String| directory.join(name);
        let sources: Vec<_> = (0..UNITS).map(|unit| path(format!("{unit}.c"))).collect();
        for (unit, source) in sources.iter().enumerate() {
            let calls = if unit + 1 < UNITS { format!("more{}(x)", unit + 1) } else { "x".into() };
            let text = format!(
                "int more{0}(int);\n{1}\
                 static inline int twice{unit}(int x) {{ return x * 2 + {unit}; }}\n\
                 int more{unit}(int x) {{ x = twice{unit}(x) * 3; return {calls}; }}\n",
                unit + 1,
                if unit == 0 { "int main(int n, char **v) { return more1(n); }\n" } else { "" },
            );
            std::fs::write(source, text).unwrap();
        }
        let program = path("program".into());
        let mut gcc = Command::new("gcc");
        gcc.args(["-g", "-O2"]).args(flags).arg("-o").arg(&program).args(&sources);
        assert!(gcc.status().unwrap().success(), "{gcc:?}");
        program
    }

    fn open(path: &Path) -> Elf {
        Elf::open(std::fs::File::open(path).unwrap(), &Default::default()).unwrap()
    }

    fn table(elf: &Elf, limits: Limits) -> (Vec<u8>, Vec<String>) {
        let files = Files { executable: Some(elf), ..Default::default() };
        let (mut writer, mut notes) = (Writer::default(), Vec::new());
        let symbols = symbols::read(&files, &mut notes);
        compile(elf, &files, &symbols, &mut writer, &mut notes, limits).unwrap();
        (writer.finish(), notes)
    }

    fn rest(elf: &Elf, limits: Limits) -> Rest {
        let files = Files { executable: Some(elf), ..Default::default() };
        let (mut writer, mut notes) = (Writer::default(), Vec::new());
        let symbols = symbols::read(&files, &mut notes);
        let sections = Sections::load(elf, &files).unwrap();
        let mut written = Written::new(&mut writer);
        pieces::compile(elf, &sections, &files, &symbols, &mut written, limits).unwrap()
    }

    #[test]
    fn tables_of_pieces_are_those_of_the_whole() {
        for flags in [&["-gz=zlib"][..], &["-gz=zlib", "-gdwarf-4"], &["-gz=zlib", "-gdwarf64"]] {
            let elf = program(flags);
            let whole = table(&elf, WHOLE);
            assert_eq!(rest(&elf, WHOLE), Rest::From(0));
            for piece in [1, 100, 1000, 1 << 20] {
                let limits = Limits { min_section: 0, piece, max_unit: 1 << 20 };
                assert_eq!(rest(&elf, limits), Rest::None, "{flags:?}, pieces of {piece}");
                assert!(table(&elf, limits) == whole, "{flags:?}, pieces of {piece}");
            }
        }
    }

    #[test]
    fn a_unit_that_refers_to_another_ends_it() {
        // One partition a unit and one with what they share: references between them.
        let elf = program(&["-gz=zlib", "-flto", "-flto-partition=max"]);
        let whole = table(&elf, WHOLE);
        for piece in [1, 1000, 1 << 20] {
            let limits = Limits { min_section: 0, piece, max_unit: 1 << 20 };
            assert!(matches!(rest(&elf, limits), Rest::From(_)), "pieces of {piece}");
            assert!(table(&elf, limits) == whole, "pieces of {piece}");
        }
    }

    #[test]
    fn a_unit_that_does_not_parse_is_counted_and_those_behind_it_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let (damaged, compressed) = (directory.path().join("a"), directory.path().join("b"));
        let program = program_in(directory.path(), &[]);
        let mut file = std::fs::read(&program).unwrap();
        let info = open(&program).section(SectionId::DebugInfo.name()).unwrap().unwrap();
        let at = file.windows(info.len()).position(|bytes| *bytes == *info).unwrap();
        let first = unit_length(&info, gimli::RunTimeEndian::Little).unwrap();
        // The version of the second unit.
        file[at + first + 4] = 99;
        std::fs::write(&damaged, &file).unwrap();
        let mut objcopy = Command::new("objcopy");
        objcopy.arg("--compress-debug-sections=zlib").args([&damaged, &compressed]);
        assert!(objcopy.status().unwrap().success(), "{objcopy:?}");

        let whole = table(&open(&damaged), WHOLE);
        let limits = Limits { min_section: 0, piece: 100, max_unit: 1 << 20 };
        assert!(table(&open(&compressed), limits) == whole);
        let note = whole.1.first().map_or("", String::as_str);
        assert!(note.starts_with("1 of 12 units"), "{note}");
        let table = Table::open(whole.0.into()).unwrap();
        for unit in (0..UNITS).filter(|&unit| unit != 1) {
            let name = format!("more{unit}");
            let start = table.functions().find(|&(_, it)| it == name).unwrap().0;
            let line = table.lookup(start).next().map(|frame| frame.line);
            assert!(line.is_some_and(|line| line > 0), "{name}: {line:?}");
        }
    }

    #[test]
    fn a_large_unit_is_left_to_the_whole() {
        let elf = program(&["-gz=zlib"]);
        let limits = Limits { min_section: 0, piece: 16, max_unit: 64 };
        assert_eq!(rest(&elf, limits), Rest::From(0));
        assert!(table(&elf, limits) == table(&elf, WHOLE));
    }

    #[test]
    fn methods_of_classes_have_their_calls_wherever_the_class_is() {
        let directory = tempfile::tempdir().unwrap();
        let (source, program) = (directory.path().join("a.cc"), directory.path().join("a"));
        // One class in a function, where GCC puts the code into the entry of the class; one not.
        let text = "struct Base { virtual int run(int) = 0; };
            volatile int sink;
            static inline int inner(int x) { sink = x; return x * 3 + sink; }
            struct Outside : Base { int run(int x) override { return inner(x) + 1; } };
            Base *local() {
              struct Local : Base { int run(int x) override { return inner(x) + 2; } };
              static Local one; return &one;
            }
            Base *outside() { static Outside one; return &one; }
            int main() { return local()->run(1) + outside()->run(2); }\n";
        std::fs::write(&source, text).unwrap();
        let mut gcc = Command::new("g++");
        gcc.args(["-g", "-O2", "-fno-devirtualize", "-o"]).arg(&program).arg(&source);
        assert!(gcc.status().unwrap().success(), "{gcc:?}");
        let table = Table::open(table(&open(&program), WHOLE).0.into()).unwrap();
        for method in ["Local", "Outside"] {
            let is_it = |name: &str| name.contains(method) && name.contains("3run");
            let start = table.functions().find(|(_, name)| is_it(name)).unwrap().0;
            let mut chains = (0..64).map(|at| table.lookup(start.saturating_add(at)));
            let has_call = |chain: Frames<'_>| {
                let names: Vec<_> = chain.map(|frame| frame.readable_name()).collect();
                names.len() == 2 && names[0] == "inner" && names[1].contains(method)
            };
            assert!(chains.any(has_call), "{method}");
        }
    }
}
