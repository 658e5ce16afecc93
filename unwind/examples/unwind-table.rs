//! Prints what an unwind table of a file holds: `cargo run --release -p stackwire-unwind --example
//! unwind-table FILE…`

#![expect(clippy::print_stdout, reason = "it prints what it finds")]

use std::time::Instant;

fn main() {
    for path in std::env::args().skip(1) {
        let started = Instant::now();
        let table = std::fs::File::open(&path)
            .map_err(|error| error.to_string())
            .and_then(|file| stackwire_unwind::compile(&file).map_err(|error| error.to_string()));
        match table {
            Ok(table) => println!(
                "{path}: {} rows, {} rules, {} pages, {} bytes, {:?}",
                table.rows.len(),
                table.rules.len(),
                table.pages.len(),
                table.to_bytes().len(),
                started.elapsed()
            ),
            Err(error) => println!("{path}: {error}"),
        }
    }
}
