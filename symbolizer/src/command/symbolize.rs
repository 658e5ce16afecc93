//! `stackwire symbolize`: addresses of one executable from the command line or standard input.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, anyhow};
use serde::Serialize;
use stackwire::profile::BuildId;
use stackwire::{Symbols, VirtAddr};

use super::Failure;
use super::beginning::whole;
use crate::cli::Symbolize;
use crate::say::say;

/// Addresses looked up together: a line may have millions.
const AT_ONCE: usize = 256;

pub fn run(arguments: &Symbolize) -> Result<(), Failure> {
    let sources = arguments.symbols.sources()?;
    let path = Path::new(&arguments.object);
    // A file of that name first: one may be called `deadbeef`.
    let symbols = match arguments.object.parse::<BuildId>() {
        Ok(typed) if !path.exists() => {
            let known = stackwire::build_ids(&typed.to_string(), &sources);
            let build_id = whole(&typed.to_string(), &known)?.unwrap_or(typed);
            Symbols::of_build_id(build_id, &sources)
        }
        _ => Symbols::of_file(path, &sources),
    };
    let symbols = symbols
        .map_err(|reason| anyhow!("cannot read symbols of {}: {reason}", arguments.object))?;
    for note in symbols.notes() {
        say(&format!("stackwire: {}: {note}", arguments.object));
    }
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    print(arguments, &symbols, arguments.addresses.iter().map(String::as_str), &mut out)?;
    if arguments.addresses.is_empty() {
        let mut input = BufReader::new(std::io::stdin());
        let mut line = String::new();
        while input.read_line(&mut line).context("cannot read standard input")? > 0 {
            print(arguments, &symbols, line.split_whitespace(), &mut out)?;
            line.clear();
            // Whoever writes one address and waits for its answer gets it.
            if input.buffer().is_empty() {
                out.flush().context("cannot print")?;
            }
        }
    }
    out.flush().context("cannot print")?;
    Ok(())
}

fn print<'a>(
    arguments: &Symbolize,
    symbols: &Symbols,
    texts: impl Iterator<Item = &'a str>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let mut addresses = Vec::new();
    let mut invalid = None;
    for text in texts {
        match address(text) {
            Some(address) => addresses.push(VirtAddr(address)),
            None => {
                invalid = Some(text);
                break;
            }
        }
    }
    for addresses in addresses.chunks(AT_ONCE) {
        for (&VirtAddr(address), answer) in addresses.iter().zip(symbols.lookup(addresses)) {
            let text =
                if arguments.json { json(address, &answer, symbols)? } else { plain(&answer) };
            match out.write_all(text.as_bytes()) {
                // `symbolize | head` has seen enough.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
                other => other.context("cannot print")?,
            }
        }
    }
    // The answers of those before it are printed first.
    match invalid {
        Some(text) => {
            Err(Failure::Usage(format!("{text:?} is not an address: give it in hex, as 0x1234")))
        }
        None => Ok(()),
    }
}

/// Hex with or without `0x`, as addr2line takes it.
fn address(text: &str) -> Option<u64> {
    if text.starts_with('+') {
        return None;
    }
    u64::from_str_radix(text.strip_prefix("0x").or(text.strip_prefix("0X")).unwrap_or(text), 16)
        .ok()
}

/// Function, then file and line, for each frame; question marks for what is unknown.
fn plain(answer: &stackwire::Answer) -> String {
    let mut text = String::new();
    for frame in answer.frames.iter() {
        let or = |text: &str| if text.is_empty() { "??" } else { text }.to_owned();
        let _ = writeln!(text, "{}\n{}:{}", or(&frame.function), or(&frame.file), frame.line);
    }
    if text.is_empty() { "??\n??:0\n".to_owned() } else { text }
}

/// What `--json` prints of an address, a line each.
#[derive(Serialize)]
struct Line<'a> {
    /// In hex, as it was asked for: 64 bits are more than a number of JSON holds everywhere.
    address: String,
    frames: Vec<Frame<'a>>,
    quality: &'static str,
    source: &'a str,
}

#[derive(Serialize)]
struct Frame<'a> {
    function: &'a str,
    file: &'a str,
    line: u32,
}

fn json(address: u64, answer: &stackwire::Answer, symbols: &Symbols) -> Result<String, Failure> {
    let frames = answer.frames.iter().map(|frame| Frame {
        function: &frame.function,
        file: &frame.file,
        line: frame.line,
    });
    let line = Line {
        address: format!("{address:#x}"),
        frames: frames.collect(),
        quality: answer.quality.map_or("missing", stackwire::profile::Quality::text),
        source: symbols.source(),
    };
    Ok(serde_json::to_string(&line).context("cannot write JSON")? + "\n")
}
