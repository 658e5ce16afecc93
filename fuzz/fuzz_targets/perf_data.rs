//! A perf.data.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire_formats::fuzz::perf_data(bytes));
