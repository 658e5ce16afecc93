//! `make bench`: whole stacks, and what they cost, by tables, by frame pointers, by copies of
//! stacks (`--source perf`) and by `perf record --call-graph dwarf` on the same programs in the
//! same run; and how soon tables are there when a capture starts on a host full of programs.
//!
//! Prints tables, asserts nothing.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use stackwire_proto::v1::EndReason;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, open_epoch};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Length of a recording, seconds.
const SECONDS: &str = "5";
/// Processes of the crowd, and executables they run.
const PROCESSES: usize = 500;
const EXECUTABLES: usize = 300;

fn main() -> Result<()> {
    let binaries =
        PathBuf::from(std::env::args().nth(1).ok_or("usage: bench-unwind DIRECTORY-OF-BINARIES")?);
    let directory = tempfile::tempdir()?;
    crowd(&binaries, directory.path())?;
    println!(
        "\n| program | recorded by | whole stacks | samples | lost | bytes written | CPU of the recorder |\n|---|---|---|---|---|---|---|"
    );
    for (name, mut command) in programs(directory.path())? {
        let program = Started::new(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
        std::thread::sleep(Duration::from_millis(300));
        for row in compare(&binaries, directory.path(), program.0.id())? {
            println!("| {name} | {row} |");
        }
    }
    large(&binaries, directory.path())
}

/// Killed when dropped.
struct Started(Child);

impl Started {
    fn new(command: &mut Command) -> Result<Self> {
        Ok(Self(command.spawn()?))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // It ends either way.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn built(directory: &Path, name: &str, compiler: &[&str], source: &str) -> Result<PathBuf> {
    let out = directory.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(source);
    let status =
        Command::new(compiler[0]).args(&compiler[1..]).arg(source).arg("-o").arg(&out).status()?;
    status.success().then_some(out).ok_or_else(|| format!("{compiler:?} failed").into())
}

fn programs(directory: &Path) -> Result<Vec<(&'static str, Command)>> {
    let c = built(directory, "unwind", &["gcc", "-O2", "-g"], "unwind.c")?;
    let cpp = built(directory, "cpp", &["g++", "-O2", "-g"], "inlined.cc")?;
    let rust = built(directory, "rust", &["rustc", "-O", "-g", "--edition=2024"], "inlined.rs")?;
    let command = |program: &Path, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments);
        command
    };
    let python =
        "import json\nwhile True: json.dumps([{str(i): sorted([i] * 9)} for i in range(300)])";
    Ok(vec![
        ("C, -O2", Command::new(c)),
        ("C++, -O2", command(&cpp, &["600"])),
        ("Rust, -O", command(&rust, &["600"])),
        ("python3", command("python3".as_ref(), &["-c", python])),
        ("dd bs=64", command("dd".as_ref(), &["if=/dev/zero", "of=/dev/null", "bs=64"])),
        ("gzip", command("sh".as_ref(), &["-c", "exec gzip -9 </dev/urandom"])),
    ])
}

/// A recorder each: name, whole stacks, samples, lost, bytes, CPU time.
fn compare(binaries: &Path, directory: &Path, pid: u32) -> Result<Vec<String>> {
    let mut rows = Vec::new();
    let capture = directory.join("x.stackwire");
    let pid = pid.to_string();
    for way in ["--unwind=auto", "--unwind=fp", "--source=perf"] {
        let collector = binaries.join("stackwire-collector");
        let mut command = Command::new(collector);
        command.args(["--sample-rate=997", "--pid", &pid, "--duration"]).arg(format!("{SECONDS}s"));
        command.arg(way).arg("--output").arg(&capture);
        command.arg("--unwind-cache-dir").arg(directory.join("tables"));
        let cpu = cpu_of(&mut command)?;
        let told = Told::of(&capture)?;
        let bytes = std::fs::metadata(&capture)?.len();
        let whole = share(told.roots(), told.user);
        rows.push(format!(
            "{way} | {whole:.1} % | {} | {} | {bytes} | {cpu:.2} s",
            told.samples, told.lost
        ));
    }
    let data = directory.join("perf.data");
    let mut perf = Command::new("perf");
    perf.args([
        "record",
        "-q",
        "-e",
        "cpu-clock",
        "-F",
        "997",
        "--call-graph",
        "dwarf",
        "-p",
        &pid,
        "-o",
    ]);
    perf.arg(&data).args(["--", "sleep", SECONDS]);
    let cpu = cpu_of(&mut perf)?;
    let bytes = std::fs::metadata(&data)?.len();
    let (stacks, whole, lost) = perf_script(&data)?;
    rows.push(format!(
        "perf record --call-graph dwarf | {:.1} % | {stacks} | {lost} | {bytes} | {cpu:.2} s",
        share(whole, stacks)
    ));
    Ok(rows)
}

fn share(part: u64, total: u64) -> f64 {
    part as f64 * 100.0 / total.max(1) as f64
}

/// Runs a command; user and system time of it and its children, seconds.
fn cpu_of(command: &mut Command) -> Result<f64> {
    let before = children_seconds()?;
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    status.success().then_some(()).ok_or_else(|| format!("{command:?} failed"))?;
    Ok(children_seconds()? - before)
}

/// Of children that were waited for: fields 16 and 17 of proc_pid_stat(5).
fn children_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit_once(") ").ok_or("no stat")?.1.split(' ').collect();
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    Ok((fields[13].parse::<f64>()? + fields[14].parse::<f64>()?) / ticks)
}

/// User stacks of perf.data, those that end where threads begin, and lost records.
fn perf_script(data: &Path) -> Result<(u64, u64, u64)> {
    const ROOTS: [&str; 4] = ["_start", "clone", "clone3", "__clone3"];
    let mut child = Command::new("perf")
        .args(["script", "-F", "ip,sym", "-i"])
        .arg(data)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let (mut stacks, mut whole) = (0, 0);
    let mut last = String::new();
    for line in BufReader::new(child.stdout.take().ok_or("no output")?).lines() {
        let line = line?;
        if !line.trim().is_empty() {
            last = line;
            continue;
        }
        if !last.is_empty() {
            stacks += 1;
            let name = last.split_whitespace().nth(1).unwrap_or_default();
            whole += u64::from(ROOTS.contains(&name));
            last.clear();
        }
    }
    child.wait()?;
    let stats = Command::new("perf").args(["report", "--stats", "-i"]).arg(data).output()?;
    let text = String::from_utf8_lossy(&stats.stdout).into_owned();
    let lost = text.lines().find(|line| line.trim_start().starts_with("LOST events:"));
    let lost = lost.and_then(|line| line.split_whitespace().nth(2)?.parse().ok()).unwrap_or(0);
    Ok((stacks, whole, lost))
}

/// What a capture tells of unwinding.
#[derive(Default)]
struct Told {
    samples: u64,
    /// With a user stack.
    user: u64,
    ends: HashMap<EndReason, u64>,
    lost: u64,
    /// Times, ends of the user stacks.
    order: Vec<(u64, EndReason)>,
}

impl Told {
    fn of(capture: &Path) -> Result<Self> {
        let mut reader = FrameReader::new(BufReader::new(File::open(capture)?));
        let mut told = Self::default();
        while let Some(message) = reader.next_message()? {
            match message.body {
                Some(Body::Epoch(sealed)) => {
                    let epoch = open_epoch(&sealed)?;
                    let columns = epoch.samples.first().cloned().unwrap_or_default();
                    let mut time = epoch.start_ns;
                    for (delta, stack) in columns.time_delta.iter().zip(&columns.user_stack) {
                        time = time.wrapping_add_signed(*delta);
                        told.samples += 1;
                        let Some(at) = stack.checked_sub(1) else { continue };
                        let end = epoch.stacks[at as usize].end();
                        told.user += 1;
                        *told.ends.entry(end).or_default() += 1;
                        told.order.push((time, end));
                    }
                }
                Some(Body::End(end)) => {
                    told.lost =
                        end.lost.iter().filter(|lost| lost.samples).map(|lost| lost.count).sum();
                }
                _ => {}
            }
        }
        Ok(told)
    }

    fn roots(&self) -> u64 {
        self.ends.get(&EndReason::Root).copied().unwrap_or(0)
    }
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// 500 processes of 300 executables, each with a table of its own: when the first samples come, and
/// how many of them find their table, second by second.
fn crowd(binaries: &Path, directory: &Path) -> Result<()> {
    let program = built(directory, "crowd", &["gcc", "-O2", "-static"], "unwind.c")?;
    let bytes = std::fs::read(&program)?;
    let note = [4u32, 20, 3].map(u32::to_le_bytes).concat();
    let at =
        bytes.windows(16).position(|bytes| bytes[..12] == note[..] && &bytes[12..] == b"GNU\0");
    let at = at.ok_or("no build-id")? as u64 + 16;
    let mut started = Vec::new();
    for number in 0..PROCESSES {
        let copy = directory.join(format!("crowd{}", number % EXECUTABLES));
        if number < EXECUTABLES {
            std::fs::copy(&program, &copy)?;
            let file = std::fs::OpenOptions::new().write(true).open(&copy)?;
            file.write_all_at(&(number as u64).to_le_bytes(), at)?;
        }
        started.push(Started::new(Command::new(copy).arg("crowd").stdout(Stdio::null()))?);
    }
    std::thread::sleep(Duration::from_secs(2));
    println!(
        "\n| {PROCESSES} processes of {EXECUTABLES} executables, `-a`, 997 Hz | tables on disk: none | all |\n|---|---|---|"
    );
    let mut columns = Vec::new();
    for _ in 0..2 {
        let capture = directory.join("crowd.stackwire");
        let begun = monotonic_ns();
        let mut collector = Command::new(binaries.join("stackwire-collector"))
            .args(["--all", "--sample-rate=997", "--output"])
            .arg(&capture)
            .arg("--unwind-cache-dir")
            .arg(directory.join("crowd-tables"))
            .stderr(Stdio::null())
            .spawn()?;
        std::thread::sleep(Duration::from_secs(8));
        let status = std::fs::read_to_string(format!("/proc/{}/status", collector.id()))?;
        let rss = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
        let rss: f64 = rss.split_whitespace().next().ok_or("no VmHWM")?.parse()?;
        let pid = rustix::process::Pid::from_raw(collector.id() as i32).ok_or("no pid")?;
        rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
        collector.wait()?;
        let told = Told::of(&capture)?;
        let first = told.order.first().ok_or("no samples")?.0;
        let mut rows = vec![
            ("first sample, ms".to_owned(), (first - begun) as f64 / 1e6),
            ("RSS, MiB".to_owned(), rss / 1024.0),
        ];
        for second in 0..6 {
            let within = |time: u64| (time - first) / 1_000_000_000 == second;
            let of = told.order.iter().filter(|(time, _)| within(*time));
            let (all, found) = of.fold((0, 0), |(all, found), (_, end)| {
                let missed = matches!(end, EndReason::NoTableYet | EndReason::NoMappingsYet);
                (all + 1, found + u64::from(!missed))
            });
            rows.push((
                format!("samples with their tables, second {}, %", second + 1),
                share(found, all),
            ));
        }
        columns.push(rows);
    }
    for (cold, warm) in columns[0].iter().zip(&columns[1]) {
        println!("| {} | {:.1} | {:.1} |", cold.0, cold.1, warm.1);
    }
    Ok(())
}

/// `--pid` on a program of 100 MB whose table is on disk.
fn large(binaries: &Path, directory: &Path) -> Result<()> {
    let program = Started::new(
        Command::new("node")
            .args(["-e", "for (;;) JSON.stringify({a: [1, 2, 3]});"])
            .current_dir(directory),
    )?;
    std::thread::sleep(Duration::from_millis(500));
    let size = std::fs::metadata(format!("/proc/{}/exe", program.0.id()))?.len();
    let capture = directory.join("large.stackwire");
    let mut times = Vec::new();
    for _ in 0..6 {
        let begun = monotonic_ns();
        let mut command = Command::new(binaries.join("stackwire-collector"));
        command
            .arg(format!("--pid={}", program.0.id()))
            .args(["--sample-rate=997", "--duration=300ms"]);
        command
            .arg("--output")
            .arg(&capture)
            .arg("--unwind-cache-dir")
            .arg(directory.join("large-tables"));
        cpu_of(&mut command)?;
        let told = Told::of(&capture)?;
        let first = told.order.first().ok_or("no samples")?.0;
        times.push((first - begun) as f64 / 1e6);
    }
    let cold = times.remove(0);
    times.sort_by(f64::total_cmp);
    println!(
        "\n`--pid` on a program of {:.0} MB: first sample after {:.0} ms with its table on disk, {cold:.0} ms without",
        size as f64 / 1e6,
        times[2]
    );
    Ok(())
}
