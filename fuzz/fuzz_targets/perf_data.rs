//! A perf.data.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stackwire::fuzz::perf_data(bytes));
