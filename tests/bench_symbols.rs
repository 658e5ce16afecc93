//! `make bench`, second part: `stackwire symbolize` beside other symbolizers, on 20,000 random
//! addresses of our own binary and of libjvm's debug file, with inlined calls, each as a command of
//! its own.
//!
//! Then the memory of `stackwire resolve` on a capture that touches copies of that debug file, 5 GB
//! once decompressed.
//!
//! Prints tables and asserts nothing. `cold` compiles the table, `warm` finds it in the cache.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FORMAT, FrameWriter, seal_epoch, v1};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const ADDRESSES: usize = 20_000;

fn main() -> Result<()> {
    if std::env::args().nth(1).as_deref() == Some("blazesym") {
        return blazesym(&std::env::args().nth(2).ok_or("blazesym OBJECT")?);
    }
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
        let mut blazesym = Command::new(std::env::current_exe()?);
        blazesym.arg("blazesym").arg(&object);
        rows.push(("blazesym", blazesym));
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
    match libjvm() {
        Some((program, debug)) => memory(&stackwire, &program, &debug),
        None => Ok(()),
    }
}

/// Copies of the debug file, of more than 600 MB each once decompressed.
const COPIES: u8 = 8;
/// Places in each of them.
const PLACES: u64 = 500;

fn memory(stackwire: &Path, program: &Path, debug: &Path) -> Result<()> {
    let directory = tempfile::tempdir_in("target")?;
    let (program, debug) = (WithId::read(program)?, WithId::read(debug)?);
    let mut epoch = v1::Epoch {
        strings: vec![String::new()],
        processes: vec![v1::Process { pid: 1, ..Default::default() }],
        threads: vec![v1::Thread::default()],
        ..Default::default()
    };
    let (mut nodes, mut samples) = (v1::StackNodes::default(), v1::Samples::default());
    let mut before = 0u64;
    for copy in 0..COPIES {
        let path = std::fs::canonicalize(directory.path())?.join(format!("libjvm-{copy}.so"));
        program.write(copy, &path)?;
        let build_id = debug.id(copy);
        let rest: String = build_id[1..].iter().map(|byte| format!("{byte:02x}")).collect();
        let place = directory.path().join(format!(".build-id/{copy:02x}"));
        std::fs::create_dir_all(&place)?;
        debug.write(copy, &place.join(format!("{rest}.debug")))?;
        epoch.strings.push(path.display().to_string());
        let mut executable =
            v1::Executable { path: u32::from(copy) + 1, build_id, ..Default::default() };
        executable.set_kind(v1::ExecutableKind::File);
        epoch.executables.push(executable);
        let executable = u32::from(copy);
        let start = 0x10_0000_0000 * (u64::from(copy) + 1);
        // Where libjvm has its code.
        let (length, file_offset) = (0xd5_8000, 0x25_2000);
        epoch.mappings.push(v1::Mapping {
            process: 0,
            executable,
            start,
            length,
            file_offset,
            since_ns: 0,
        });
        for number in 0..PLACES {
            let offset = file_offset + number * 0x6b00;
            nodes.parent.push(0);
            nodes.executable.push(executable);
            nodes.offset_delta.push(offset.wrapping_sub(before) as i64);
            nodes.kind.push(v1::FrameKind::Leaf as u32);
            before = offset;
            epoch.stacks.push(v1::Stack { node: nodes.parent.len() as u32, end: 1 });
            samples.time_delta.push(1);
            samples.thread.push(0);
            samples.cpu.push(0);
            samples.user_stack.push(nodes.parent.len() as u32);
            samples.kernel_stack.push(0);
        }
    }
    samples.value.push(1);
    let taken = samples.cpu.len() as u64;
    (epoch.nodes, epoch.samples) = (Some(nodes), vec![samples]);
    let capture = directory.path().join("capture.stackwire");
    let mut out = FrameWriter::new(std::fs::File::create(&capture)?);
    let hello = v1::Hello { format: FORMAT, capture_id: vec![1; 16], ..Default::default() };
    let end = v1::End { epochs: 1, taken, ..Default::default() };
    for body in [Body::Hello(hello), Body::Epoch(seal_epoch(&epoch)), Body::End(end)] {
        out.write(&v1::CollectorMessage { body: Some(body) })?;
    }
    println!(
        "\n| resolve of {COPIES} x libjvm's debug file | seconds | peak MiB (256) |\n|---|---|---|"
    );
    for name in ["cold", "warm"] {
        let mut command = Command::new(stackwire);
        command.arg("resolve").arg(&capture).arg("-o").arg(directory.path().join("out.pb.gz"));
        command.arg("--symbol-cache-dir").arg(directory.path().join("cache"));
        command.arg("--debug-dir").arg(directory.path());
        let (seconds, peak) = measure(&mut command, "")?;
        println!("| {name} | {seconds:.2} | {peak} |");
    }
    Ok(())
}

/// A file whose build-id can be another.
struct WithId {
    bytes: Vec<u8>,
    at: usize,
}

impl WithId {
    fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path)?;
        // NT_GNU_BUILD_ID of owner GNU: the id follows.
        let words = [4u32.to_ne_bytes(), 20u32.to_ne_bytes(), 3u32.to_ne_bytes(), *b"GNU\0"];
        let note = words.concat();
        let at = bytes.windows(note.len()).position(|window| window == note);
        let at = at.ok_or("a file without build-id")? + note.len();
        Ok(Self { bytes, at })
    }

    fn id(&self, first: u8) -> Vec<u8> {
        [&[first], &self.bytes[self.at + 1..self.at + 20]].concat()
    }

    fn write(&self, first: u8, path: &Path) -> Result<()> {
        let mut bytes = self.bytes.clone();
        bytes[self.at] = first;
        Ok(std::fs::write(path, bytes)?)
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned())
}

/// What `stackwire symbolize` does, with blazesym: addresses from standard input, functions and
/// lines out.
fn blazesym(object: &str) -> Result<()> {
    use blazesym::symbolize::source::{Elf, Source};
    use blazesym::symbolize::{Input, Symbolizer};
    let text = std::io::read_to_string(std::io::stdin())?;
    let hex = |line: &str| u64::from_str_radix(line.trim_start_matches("0x"), 16);
    let addresses = text.lines().map(hex).collect::<std::result::Result<Vec<_>, _>>()?;
    let symbolizer = Symbolizer::builder().enable_demangling(false).build();
    let source = Source::Elf(Elf::new(object));
    let mut out = std::io::BufWriter::new(std::io::stdout());
    for symbol in symbolizer.symbolize(&source, Input::VirtOffset(&addresses))? {
        match symbol.as_sym() {
            Some(symbol) => writeln!(out, "{symbol:?}")?,
            None => writeln!(out, "??")?,
        }
    }
    Ok(())
}

/// The pair `tests/corpus.sh` fetched, if it was run.
fn libjvm() -> Option<(PathBuf, PathBuf)> {
    let cache = PathBuf::from(std::env::var_os("STACKWIRE_TEST_CACHE")?);
    let list = std::fs::read_to_string(cache.join("corpus/objects.tsv")).ok()?;
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
