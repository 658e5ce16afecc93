//! ELF files with everything in them: symbols, DWARF, Go's table.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire_symbols::fuzz::elf(bytes));
