//! DWARF: units, abbreviations, line programs, ranges, as sections of their own.

#![no_main]

const SECTIONS: &[&str] = &[
    ".debug_info",
    ".debug_abbrev",
    ".debug_line",
    ".debug_str",
    ".debug_line_str",
    ".debug_rnglists",
    ".debug_ranges",
    ".debug_addr",
    ".debug_str_offsets",
];

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(elf) = stackwire_fuzz::wrap(SECTIONS, bytes) {
        stackwire_symbols::fuzz::elf(&elf);
    }
});
