//! `make bench`, last part: a capture of five million samples, recorded once and replayed, to each
//! output on one CPU; and perf's own file with copied stacks, resolved beside `perf script`.
//!
//! Prints tables and asserts nothing.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, FrameWriter, open_epoch};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const SAMPLES: u64 = 5_000_000;

fn main() -> Result<()> {
    let binaries =
        PathBuf::from(std::env::args().nth(1).ok_or("usage: bench-export DIRECTORY-OF-BINARIES")?);
    let directory = tempfile::tempdir()?;
    let at = |name: &str| directory.path().join(name);
    let load = Load::start(directory.path())?;
    let recorded = at("recorded.stackwire");
    let status = Command::new(binaries.join("stackwire-collector"))
        .args(["--all", "--sample-rate=10000", "--duration=20s", "--output"])
        .arg(&recorded)
        .status()?;
    if !status.success() {
        return Err("the collector failed".into());
    }
    let copied = at("dwarf.data");
    let status = Command::new("perf")
        .args([
            "record",
            "-N",
            "-q",
            "-a",
            "-e",
            "cpu-clock",
            "-F",
            "997",
            "--call-graph",
            "dwarf",
            "-o",
        ])
        .arg(&copied)
        .args(["--", "sleep", "5"])
        .status()?;
    if !status.success() {
        return Err("perf failed".into());
    }
    drop(load);
    let replayed = at("replayed.stackwire");
    let samples = replay(&recorded, &replayed)?;

    let stackwire = binaries.join("stackwire");
    let resolve = |input: &Path, more: &[&str]| {
        let mut command = Command::new("taskset");
        command
            .args(["-c", "0"])
            .arg(&stackwire)
            .arg("resolve")
            .arg(input)
            .arg("-o")
            .arg(at("x.pb.gz"));
        command.args(more).arg("--symbol-cache-dir").arg(at("cache"));
        command
    };
    let [perf_data, folded] = ["x.data", "x.folded"].map(|name| at(name).display().to_string());
    // Tables of symbols are compiled once, and not timed.
    measure(&mut resolve(&recorded, &[]))?;
    println!(
        "\n| {samples} samples on one CPU, to | seconds | in user mode | in the kernel | samples a second of user mode | peak MiB |\n|---|---|---|---|---|---|"
    );
    for (name, more) in [
        ("pprof", &[][..]),
        ("pprof and folded", &["--folded", &folded]),
        ("pprof and perf.data", &["--perf-data-output", &perf_data]),
    ] {
        let Cost { seconds, user, system, peak } = measure(&mut resolve(&replayed, more))?;
        let rate = samples as f64 / user;
        println!("| {name} | {seconds:.2} | {user:.2} | {system:.2} | {rate:.0} | {peak} |");
    }
    // What is left of the kernel's time when nothing but the file is written.
    let mut copy = Command::new("taskset");
    copy.args(["-c", "0", "dd", "bs=256k", "if=/dev/zero", "iflag=count_bytes"])
        .arg(format!("of={}", at("zeros").display()))
        .arg(format!("count={}", std::fs::metadata(&perf_data)?.len()));
    let Cost { seconds, user, system, peak } = measure(&mut copy)?;
    println!(
        "| (dd, as many bytes as perf.data) | {seconds:.2} | {user:.2} | {system:.2} | | {peak} |"
    );
    println!(
        "\n| `perf record --call-graph dwarf` of 5 s, with | seconds | peak MiB |\n|---|---|---|"
    );
    let mut perf = Command::new("taskset");
    perf.args(["-c", "0", "perf", "script", "-i"]).arg(&copied);
    for (name, mut command) in [("stackwire resolve", resolve(&copied, &[])), ("perf script", perf)]
    {
        let Cost { seconds, peak, .. } = measure(&mut command)?;
        println!("| {name} | {seconds:.2} | {peak} |");
    }
    Ok(())
}

/// A capture several times over, each time as another.
fn replay(from: &Path, to: &Path) -> Result<u64> {
    let mut out = FrameWriter::new(BufWriter::new(File::create(to)?));
    let (mut samples, mut number) = (0, 0u8);
    while samples < SAMPLES {
        number += 1;
        let mut reader = FrameReader::new(BufReader::new(File::open(from)?));
        while let Some(mut message) = reader.next_message()? {
            match &mut message.body {
                Some(Body::Hello(hello)) => hello.capture_id = vec![number; 16],
                Some(Body::Epoch(sealed)) => {
                    samples += open_epoch(sealed)?
                        .samples
                        .iter()
                        .map(|it| it.time_delta.len() as u64)
                        .sum::<u64>();
                }
                _ => {}
            }
            out.write(&message)?;
        }
    }
    Ok(samples)
}

/// What a command took: seconds by the clock and of CPU, and the most memory it held, in MiB.
#[derive(Default)]
struct Cost {
    seconds: f64,
    user: f64,
    system: f64,
    peak: u64,
}

fn measure(command: &mut Command) -> Result<Cost> {
    let started = Instant::now();
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let mut cost = Cost::default();
    let status = loop {
        let of = |name: &str| std::fs::read_to_string(format!("/proc/{}/{name}", child.id()));
        let status = of("status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        cost.peak = cost.peak.max(kib.unwrap_or(0) / 1024);
        // Of proc_pid_stat(5), counted from behind the name: utime and stime, in hundredths of a
        // second.
        let stat = of("stat").unwrap_or_default();
        let fields: Vec<_> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok());
        if let (Some(user), Some(system)) = (ticks(11), ticks(12)) {
            (cost.user, cost.system) = (user / 100.0, system / 100.0);
        }
        if let Some(status) = child.try_wait()? {
            break status;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    cost.seconds = started.elapsed().as_secs_f64();
    if status.success() { Ok(cost) } else { Err(status.to_string().into()) }
}

/// Programs with stacks of many kinds on every CPU.
struct Load(Vec<Child>);

impl Load {
    fn start(directory: &Path) -> Result<Self> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/unwind.c");
        let program = directory.join("unwind");
        let built =
            Command::new("gcc").args(["-O2", "-g", "-o"]).args([&program, &source]).status()?;
        if !built.success() {
            return Err("gcc failed".into());
        }
        let mut script = File::create(directory.join("x.py"))?;
        script.write_all(b"import json\nwhile True: json.dumps([{str(i): sorted([i] * 9)} for i in range(300)])\n")?;
        let quiet =
            |command: &mut Command| command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Ok(Self(vec![
            quiet(&mut Command::new(&program))?,
            quiet(Command::new("python3").arg(directory.join("x.py")))?,
            quiet(Command::new("dd").args(["if=/dev/zero", "of=/dev/null", "bs=64"]))?,
        ]))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
