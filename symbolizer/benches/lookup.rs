//! `make bench`, third part: nanoseconds an address in this process, with whole chains of inlined
//! calls: from a compiled table (budget 150); with readable names at the first look (budget 400),
//! on average over many rounds and in the first of a process, which pays for new memory besides;
//! and from the answers of late (budget 50).

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stackwire::cache::Cache;
use stackwire::{Sources, Symbols, VirtAddr};

/// Fewer than answers are kept.
const ADDRESSES: usize = 10_000;
const ROUNDS: usize = 50;

fn main() {
    println!(
        "\n| {ADDRESSES} addresses of | frames each | table, ns | readable names, first time (in a new process) | from memory |"
    );
    println!("|---|---|---|---|---|");
    let own = std::env::current_exe().ok();
    for path in own.into_iter().chain(libjvm()) {
        match measure(&path) {
            Ok(row) => println!("{row}"),
            Err(error) => println!("| {} | {error} | | | |", path.display()),
        }
    }
}

/// The pair `tests/corpus.sh` fetched, if it was run.
fn libjvm() -> Option<PathBuf> {
    let list = std::fs::read_to_string(corpus().join("objects.tsv")).ok()?;
    let line = list.lines().find(|line| line.starts_with("libjvm\t"))?;
    Some(line.split('\t').nth(1)?.into())
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/corpus")
}

fn measure(path: &Path) -> anyhow::Result<String> {
    let directory = tempfile::tempdir()?;
    let cache = Arc::new(Cache::open(directory.path(), 1 << 30)?);
    // The compiled table is kept, answers are not.
    let open = || {
        let mut sources = Sources::default();
        sources.cache = Some(Arc::clone(&cache));
        sources.debug_dirs.push(corpus().join("root/usr/lib/debug"));
        Symbols::of_file(path, &sources)
    };
    let symbols = open()?;
    let table = symbols.table();
    // All over the code, out of order, the same every time.
    let functions: Vec<VirtAddr> = table.functions().map(|(address, _)| address).collect();
    let at = |index: usize| {
        functions[index * 7_919 % functions.len()].saturating_add((index % 61) as u64)
    };
    let addresses: Vec<VirtAddr> = (0..ADDRESSES).map(at).collect();

    let frames: usize = addresses.iter().map(|&address| table.lookup(address).count()).sum();
    let started = Instant::now();
    for &address in addresses.iter().cycle().take(ADDRESSES * ROUNDS) {
        for frame in table.lookup(black_box(address)) {
            black_box(frame);
        }
    }
    let from_table = started.elapsed().as_nanos() as usize / (ADDRESSES * ROUNDS);

    let ask = |symbols: &Symbols| {
        let started = Instant::now();
        drop(black_box(symbols.lookup(black_box(&addresses))));
        started.elapsed()
    };
    let cold = ask(&symbols).as_nanos() as usize / ADDRESSES;
    let mut readable = Duration::ZERO;
    for _ in 0..ROUNDS {
        readable += ask(&open()?);
    }
    let readable = readable.as_nanos() as usize / (ADDRESSES * ROUNDS);

    let started = Instant::now();
    (0..ROUNDS).for_each(|_| _ = ask(&symbols));
    let from_memory = started.elapsed().as_nanos() as usize / (ADDRESSES * ROUNDS);
    let name = path.file_name().unwrap_or_default().display();
    let each = frames as f64 / ADDRESSES as f64;
    Ok(format!("| {name} | {each:.1} | {from_table} | {readable} ({cold}) | {from_memory} |"))
}
