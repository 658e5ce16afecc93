//! `make bench`, second part: `stackwire symbolize` beside other symbolizers, on 20,000 random addresses of our own binary
//! and of libjvm's debug file, with inlined calls, each as a command of its own.
//!
//! Prints a table and asserts nothing. `cold` compiles the table, `warm` finds it in the cache.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const ADDRESSES: usize = 20_000;

fn main() -> Result<()> {
    let binaries = std::env::args().nth(1).ok_or("usage: bench-symbols DIRECTORY-OF-BINARIES")?;
    let stackwire = Path::new(&binaries).join("stackwire");
    println!(
        "\n| {ADDRESSES} addresses of | with | seconds | addresses a second | peak MiB |\n|---|---|---|---|---|"
    );
    let ours = (stackwire.clone(), stackwire.clone());
    for (program, object) in [Some(ours), libjvm()].into_iter().flatten() {
        let addresses = addresses(&object)?;
        let cache = tempfile::tempdir()?;
        let own = || {
            let mut command = Command::new(&stackwire);
            command.args(["symbolize", "--no-demangle", "--symbol-cache-dir"]).arg(cache.path());
            command.args(["--debug-dir", "target/corpus/root/usr/lib/debug"]).arg(&program);
            command
        };
        let other = |program: &str, arguments: &[&str]| {
            let mut command = Command::new(program);
            command.args(arguments).arg(&object);
            command
        };
        let mut rows = vec![("stackwire, cold", own()), ("stackwire, warm", own())];
        rows.push(("llvm-symbolizer-22", other("llvm-symbolizer-22", &["--no-demangle", "--obj"])));
        rows.push(("addr2line", other("addr2line", &["-f", "-i", "-e"])));
        for (name, mut command) in rows {
            let (seconds, peak) = match measure(&mut command, &addresses) {
                Ok(measured) => measured,
                Err(error) => {
                    println!("| {} | {name} | {error} | | |", name_of(&object));
                    continue;
                }
            };
            let rate = ADDRESSES as f64 / seconds;
            println!("| {} | {name} | {seconds:.2} | {rate:.0} | {peak} |", name_of(&object));
        }
        // It takes minutes for all of them.
        let few = &addresses[..addresses.lines().take(200).map(|line| line.len() + 1).sum()];
        match measure(&mut other("eu-addr2line", &["-f", "-i", "-e"]), few) {
            Ok((seconds, peak)) => println!(
                "| {} | eu-addr2line (200 of them) | {seconds:.2} | {:.0} | {peak} |",
                name_of(&object),
                200.0 / seconds
            ),
            Err(error) => println!("| {} | eu-addr2line | {error} | | |", name_of(&object)),
        }
    }
    Ok(())
}

fn name_of(path: &Path) -> String {
    path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned())
}

/// The pair `tests/corpus.sh` fetched, if it was run.
fn libjvm() -> Option<(PathBuf, PathBuf)> {
    let list = std::fs::read_to_string("target/corpus/objects.tsv").ok()?;
    let line = list.lines().find(|line| line.starts_with("libjvm\t"))?;
    let mut fields = line.split('\t');
    Some((fields.nth(1)?.into(), fields.nth(1)?.into()))
}

/// Addresses in functions, spread evenly and taken out of order; the same every time.
fn addresses(object: &Path) -> Result<String> {
    let output = Command::new("readelf").arg("-sW").arg(object).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let functions: Vec<u64> = text
        .lines()
        .filter(|line| line.contains(" FUNC "))
        .filter_map(|line| u64::from_str_radix(line.split_whitespace().nth(1)?, 16).ok())
        .filter(|&address| address > 0)
        .collect();
    let at = |index: usize| {
        let function = functions.get(index.wrapping_mul(7_919) % functions.len().max(1));
        function.map(|function| format!("{:#x}\n", function + index as u64 % 64))
    };
    Ok((0..ADDRESSES).filter_map(at).collect())
}

/// Seconds and peak memory of a command fed with addresses.
fn measure(command: &mut Command, addresses: &str) -> Result<(f64, u64)> {
    let started = Instant::now();
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let mut stdin = child.stdin.take().ok_or("no standard input")?;
    let text = addresses.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let mut peak = 0;
    let status = loop {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        peak = peak.max(kib.unwrap_or(0) / 1024);
        if let Some(status) = child.try_wait()? {
            break status;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let seconds = started.elapsed().as_secs_f64();
    let _ = writer.join();
    if status.success() { Ok((seconds, peak)) } else { Err(status.to_string().into()) }
}
