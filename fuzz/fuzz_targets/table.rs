//! Compiled tables whose checksum is right and whose content is not.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire_symbols::fuzz::table(bytes));
