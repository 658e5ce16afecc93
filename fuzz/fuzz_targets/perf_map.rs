//! The perf-map parser.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire_symbols::fuzz::perf_map(bytes));
