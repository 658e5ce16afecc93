//! Names and line tables of functions of interpreters.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire_symbols::fuzz::code(bytes));
