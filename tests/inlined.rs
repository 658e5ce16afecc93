//! Chains of inlined functions, as the compiler made them: every sampled address, against
//! llvm-symbolizer.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::build::{inlined_cc, inlined_rs};
use crate::support::{Pprof, Running, privileged, record};

/// Function and line, innermost first.
type Chain = Vec<(String, u64)>;

/// What llvm-symbolizer says of addresses as linked; it ends each answer with an empty line.
pub(crate) fn oracle(binary: &Path, addresses: &[u64]) -> Vec<Chain> {
    let mut child = Command::new("llvm-symbolizer")
        .args(["--obj", binary.to_str().unwrap(), "--inlines", "--demangle", "--output-style=LLVM"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("llvm is installed by tests/setup.sh");
    let input: String = addresses.iter().map(|address| format!("{address:#x}\n")).collect();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    let answers = output.trim_end().split("\n\n").map(|answer| {
        let lines: Vec<&str> = answer.lines().collect();
        let frames = lines.chunks_exact(2).map(|frame| {
            let line = frame[1].rsplit(':').nth(1).unwrap().parse().unwrap();
            (frame[0].to_owned(), line)
        });
        frames.collect()
    });
    answers.collect()
}

/// The last part of a name without arguments and hash: tools print or leave out the rest as they
/// like, and LLVM 14 leaves the escapes of Rust's old mangling in.
fn bare(function: &str) -> String {
    let name = function.replace("$u7b$", "{").replace("$u7d$", "}").replace("$LT$", "<");
    let name = name.replace("$GT$", ">").replace("_{{", "{{");
    let mut depth = 0;
    let mut outside = String::new();
    for c in name.chars() {
        match c {
            '<' | '(' => depth += 1,
            '>' | ')' => depth -= 1,
            c if depth == 0 => outside.push(c),
            _ => {}
        }
    }
    let mut parts: Vec<&str> = outside.split("::").filter(|part| !part.is_empty()).collect();
    if parts.last().is_some_and(|last| last.len() == 17 && last.starts_with('h')) {
        parts.pop();
    }
    (*parts.last().unwrap_or(&"")).to_owned()
}

fn compare(binary: &Path, profile: &Pprof, three: [&str; 3]) {
    let file = binary.to_str().unwrap();
    // The ELF address of a file offset: of the segment it lies in, as `readelf` prints it.
    let segments = segments(binary);
    let mut ours: BTreeMap<u64, Chain> = BTreeMap::new();
    for (id, location) in &profile.locations {
        if profile.file_of(*id) != file {
            continue;
        }
        let mapping = &profile.mappings[&location.mapping];
        let offset = location.address - mapping.start + mapping.offset;
        let &(start, _, address) = segments
            .iter()
            .find(|(start, size, _)| (*start..start + size).contains(&offset))
            .unwrap();
        let chain = location.lines.iter().map(|(f, _, line)| (bare(f), *line)).collect();
        ours.insert(offset - start + address, chain);
    }
    let addresses: Vec<u64> = ours.keys().copied().collect();
    assert!(addresses.len() > 10, "only {} addresses", addresses.len());
    let theirs = oracle(binary, &addresses);
    let mut wrong = Vec::new();
    let mut deep = 0;
    for ((address, ours), theirs) in ours.iter().zip(&theirs) {
        let theirs: Chain = theirs.iter().map(|(f, line)| (bare(f), *line)).collect();
        // Of the procedure linkage table no symbol tells; the oracle takes the last one before it.
        let is_stub = ours.is_empty() || ours[0].0.ends_with("@plt");
        let in_plt = is_stub && theirs == [("_init".to_owned(), 0)];
        if *ours != theirs && !in_plt {
            wrong.push(format!("{address:#x}: {ours:?}, llvm-symbolizer: {theirs:?}"));
        }
        let names: Vec<&str> = ours.iter().map(|(function, _)| function.as_str()).collect();
        deep += usize::from(names.windows(3).any(|window| window == three));
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), ours.len(), wrong.join("\n"));
    assert!(deep > 5, "only {deep} addresses in a chain of three");
}

/// File offset, size in the file and address of each loaded segment.
fn segments(binary: &Path) -> Vec<(u64, u64, u64)> {
    let output = Command::new("readelf").args(["-lW"]).arg(binary).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
    text.lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            (words.first() == Some(&"LOAD")).then(|| (hex(words[1]), hex(words[4]), hex(words[2])))
        })
        .collect()
}

#[test]
fn a_chain_of_three_in_cpp() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(inlined_cc()).arg("30"));
    let profile = record(program.pid(), 4, &[]);
    compare(inlined_cc(), &profile, ["inner", "middle", "outer"]);
}

#[test]
fn a_chain_of_three_in_rust() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(inlined_rs()).arg("30"));
    let profile = record(program.pid(), 4, &[]);
    compare(inlined_rs(), &profile, ["inner", "middle", "outer"]);
}
