//! `make bench`: the collector's budgets, beside `perf record -g` on the same load in the same run,
//! and how long `stackwire symbolize` takes beside other symbolizers.
//!
//! Prints a table, writes `target/bench.json`, asserts nothing: timings depend on the machine. The
//! load is a program of three threads and a dd full of system calls, on every CPU. With a second
//! directory, of an older build, each measurement is of both in turn: machines are noisy.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, open_epoch};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Length of a measurement, and what is left out at its start.
const MEASURED: Duration = Duration::from_secs(20);
const WARM_UP: Duration = Duration::from_secs(3);

/// How often the first sample is waited for.
const STARTS: usize = 15;

fn main() -> Result<()> {
    let sides: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if sides.is_empty() || sides.len() > 2 {
        return Err("usage: bench DIRECTORY-OF-BINARIES [OLDER-ONES]".into());
    }
    let directory = tempfile::tempdir()?;
    let capture = directory.path().join("bench.stackwire");
    let output = format!("--output={}", capture.display());
    let mut rows: Vec<BTreeMap<&str, f64>> = vec![BTreeMap::new(); sides.len()];
    let collector = |side: usize| Command::new(sides[side].join("stackwire-collector"));

    let idle = first_samples(&sides, "--all", &capture)?;
    let load = Load::start(directory.path())?;
    let pid = format!("--pid={}", load.pid());
    let busy_pid = first_samples(&sides, &pid, &capture)?;
    let busy_all = first_samples(&sides, "--all", &capture)?;
    let mut a_second = 0.0;
    for (side, rows) in rows.iter_mut().enumerate() {
        rows.insert("first sample with -a, CPUs idle, ms", idle[side]);
        rows.insert("first sample with --pid, ms", busy_pid[side]);
        rows.insert("first sample with -a, ms", busy_all[side]);
        let slowly = ["--all", "--sample-rate=99", "--epoch=5s", &output];
        let ours = observe(collector(side).args(slowly))?;
        let wire = Wire::of(&capture)?;
        rows.insert("user CPU at 99 Hz -a, % of one CPU", ours.user_percent);
        rows.insert("system CPU at 99 Hz -a, % of one CPU", ours.system_percent);
        rows.insert("RSS at 99 Hz -a, MiB", ours.rss_mib);
        rows.insert("BPF maps, MiB", ours.maps_mib);
        rows.insert("wire at 99 Hz -a, bytes a sample", wire.bytes_a_sample);

        let ours = observe(collector(side).args(["--all", "--sample-rate=10000", &output]))?;
        let wire = Wire::of(&capture)?;
        a_second = wire.samples as f64 / wire.seconds;
        rows.insert("samples a second at 10 kHz -a", a_second);
        rows.insert("user CPU a sample at 10 kHz, µs", ours.user_percent * 10_000.0 / a_second);
        rows.insert("system CPU a sample at 10 kHz, µs", ours.system_percent * 10_000.0 / a_second);
        rows.insert("samples lost at 10 kHz, %", wire.lost as f64 * 100.0 / wire.taken as f64);
        rows.insert("samples unaccounted for", (wire.taken - wire.samples - wire.lost) as f64);
        rows.insert("wire at 10 kHz, bytes a sample", wire.bytes_a_sample);
    }

    let data = directory.path().join("perf.data");
    let mut perf = BTreeMap::new();
    for (rate, user, rss) in [
        ("99", "user CPU at 99 Hz -a, % of one CPU", Some("RSS at 99 Hz -a, MiB")),
        ("10000", "user CPU a sample at 10 kHz, µs", None),
    ] {
        let theirs = observe(
            Command::new("perf")
                .args(["record", "-N", "-q", "-a", "-g", "-e", "cpu-clock", "-F", rate, "-o"])
                .arg(&data),
        )?;
        match rss {
            Some(rss) => {
                perf.insert(user, theirs.user_percent);
                perf.insert("system CPU at 99 Hz -a, % of one CPU", theirs.system_percent);
                perf.insert(rss, theirs.rss_mib);
                // 8 bytes of header aside, all of perf.data is records.
                let bytes = std::fs::metadata(&data)?.len() as f64;
                let samples = 99.0 * cpus() as f64 * (MEASURED + WARM_UP).as_secs_f64();
                perf.insert("wire at 99 Hz -a, bytes a sample", bytes / samples);
            }
            None => {
                perf.insert(user, theirs.user_percent * 10_000.0 / a_second);
                let system = theirs.system_percent * 10_000.0 / a_second;
                perf.insert("system CPU a sample at 10 kHz, µs", system);
            }
        }
    }
    drop(load);
    print(&rows, &perf)?;
    Ok(())
}

/// Milliseconds from the start of a collector to its first sample, for each side: the median.
fn first_samples(sides: &[PathBuf], scope: &str, capture: &Path) -> Result<Vec<f64>> {
    let mut took: Vec<Vec<f64>> = vec![Vec::new(); sides.len()];
    for _ in 0..STARTS {
        for (side, took) in sides.iter().zip(&mut took) {
            let started = monotonic_ns();
            let status = Command::new(side.join("stackwire-collector"))
                .args([scope, "--sample-rate=997", "--duration=300ms", "--output"])
                .arg(capture)
                .status()?;
            if !status.success() {
                return Err("the collector failed".into());
            }
            took.push(Wire::of(capture)?.first_sample_ns.saturating_sub(started) as f64 / 1e6);
        }
    }
    let median = |mut took: Vec<f64>| {
        took.sort_by(f64::total_cmp);
        took[took.len() / 2]
    };
    Ok(took.into_iter().map(median).collect())
}

/// Budgets of the design, where there is one.
const BUDGETS: [(&str, &str); 8] = [
    ("user CPU at 99 Hz -a, % of one CPU", "< 0.5"),
    ("RSS at 99 Hz -a, MiB", "≤ 32"),
    ("BPF maps, MiB", "≤ 64"),
    ("user CPU a sample at 10 kHz, µs", "≤ 1"),
    ("samples unaccounted for", "0"),
    ("first sample with --pid, ms", "≤ 100"),
    ("first sample with -a, ms", "≤ 150"),
    ("wire at 99 Hz -a, bytes a sample", "≤ 10"),
];

fn print(sides: &[BTreeMap<&str, f64>], perf: &BTreeMap<&str, f64>) -> Result<()> {
    println!(
        "| | Stackwire collector | older | `perf record -g` | budget |\n|---|---|---|---|---|"
    );
    let mut json = String::from("{\n");
    let known = |value: Option<&f64>| value.map_or(String::new(), |value| format!("{value:.2}"));
    for (name, value) in &sides[0] {
        let older = known(sides.get(1).and_then(|rows| rows.get(name)));
        let theirs = known(perf.get(name));
        let budget = BUDGETS.iter().find(|(of, _)| of == name).map_or("", |(_, budget)| budget);
        println!("| {name} | {value:.2} | {older} | {theirs} | {budget} |");
        let theirs = perf.get(name).map_or("null".to_owned(), |value| format!("{value:.4}"));
        json.push_str(&format!(
            "  \"{name}\": {{\"stackwire\": {value:.4}, \"perf\": {theirs}}},\n"
        ));
    }
    json.truncate(json.len() - 2);
    json.push_str("\n}\n");
    std::fs::write("target/bench.json", json)?;
    Ok(())
}

/// What a command used once it had warmed up.
struct Used {
    user_percent: f64,
    system_percent: f64,
    rss_mib: f64,
    maps_mib: f64,
}

fn observe(command: &mut Command) -> Result<Used> {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    std::thread::sleep(WARM_UP);
    let (started, before) = (Instant::now(), cpu_seconds(child.id())?);
    std::thread::sleep(MEASURED);
    let (after, took) = (cpu_seconds(child.id())?, started.elapsed().as_secs_f64());
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()))?;
    let rss = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    let rss: f64 = rss.split_whitespace().next().ok_or("no VmHWM")?.parse()?;
    let maps_mib = map_bytes(child.id())? as f64 / f64::from(1 << 20);
    let pid = rustix::process::Pid::from_raw(child.id() as i32).ok_or("no pid")?;
    rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
    child.wait()?;
    Ok(Used {
        user_percent: (after.0 - before.0) * 100.0 / took,
        system_percent: (after.1 - before.1) * 100.0 / took,
        rss_mib: rss / 1024.0,
        maps_mib,
    })
}

/// User and system time, by the clock ticks of proc_pid_stat(5).
fn cpu_seconds(pid: u32) -> Result<(f64, f64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit_once(") ").ok_or("no stat")?.1.split(' ').collect();
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    Ok((fields[11].parse::<f64>()? / ticks, fields[12].parse::<f64>()? / ticks))
}

/// Memory of a process's BPF maps, as the kernel accounts it.
fn map_bytes(pid: u32) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        let info = std::fs::read_to_string(entry?.path()).unwrap_or_default();
        if info.contains("map_type:") {
            let memlock = info.lines().find_map(|line| line.strip_prefix("memlock:"));
            bytes += memlock.map_or(Ok(0), |memlock| memlock.trim().parse::<u64>())?;
        }
    }
    Ok(bytes)
}

/// What a capture tells.
struct Wire {
    samples: u64,
    seconds: f64,
    bytes_a_sample: f64,
    first_sample_ns: u64,
    taken: u64,
    lost: u64,
}

impl Wire {
    fn of(capture: &Path) -> Result<Self> {
        let mut reader = FrameReader::new(BufReader::new(File::open(capture)?));
        let (mut samples, mut taken, mut lost) = (0, 0, 0);
        let mut span: Option<(u64, u64)> = None;
        let mut first_sample_ns = 0;
        let mut whole: Vec<(usize, usize)> = Vec::new();
        while let Some(message) = reader.next_message()? {
            match message.body {
                Some(Body::Epoch(sealed)) => {
                    let epoch = open_epoch(&sealed)?;
                    let columns = epoch.samples.into_iter().next().unwrap_or_default();
                    let first = columns.time_delta.first();
                    if let (0, Some(&delta)) = (samples, first) {
                        first_sample_ns = epoch.start_ns.wrapping_add_signed(delta);
                    }
                    samples += columns.time_delta.len() as u64;
                    span = Some((span.map_or(epoch.start_ns, |(start, _)| start), epoch.end_ns));
                    whole.push((sealed.zstd.len(), columns.time_delta.len()));
                }
                Some(Body::End(end)) => {
                    taken = end.taken;
                    lost = end.lost.iter().filter(|lost| lost.samples).map(|lost| lost.count).sum();
                }
                _ => {}
            }
        }
        let (start, end) = span.ok_or("no epoch")?;
        // Steady state: neither the first epoch nor the last, which is cut short.
        let steady = if whole.len() > 2 { &whole[1..whole.len() - 1] } else { &whole[..] };
        let (bytes, counted) =
            steady.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        Ok(Self {
            samples,
            seconds: (end - start) as f64 / 1e9,
            bytes_a_sample: bytes as f64 / counted.max(1) as f64,
            first_sample_ns,
            taken,
            lost,
        })
    }
}

/// Every CPU busy.
struct Load(Vec<Child>);

impl Load {
    fn start(directory: &Path) -> Result<Self> {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
        let flags =
            ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-inline"];
        let at = |name: &str| directory.join(name);
        let compile = |arguments: &[&std::ffi::OsStr]| -> Result<()> {
            let status = Command::new("gcc").args(flags).args(arguments).status()?;
            status.success().then_some(()).ok_or_else(|| "gcc failed".into())
        };
        let (library, work) = (at("libwork.so"), at("work"));
        let (library_source, work_source) = (fixtures.join("libwork.c"), fixtures.join("work.c"));
        compile(&[
            "-fPIC".as_ref(),
            "-shared".as_ref(),
            library_source.as_ref(),
            "-o".as_ref(),
            library.as_ref(),
        ])?;
        let rpath = format!("-Wl,-rpath,{}", directory.display());
        let search = format!("-L{}", directory.display());
        compile(&[
            work_source.as_ref(),
            "-o".as_ref(),
            work.as_ref(),
            search.as_ref(),
            rpath.as_ref(),
            "-lwork".as_ref(),
        ])?;
        let mut load = Self(Vec::new());
        for _ in 0..cpus().div_ceil(2) {
            load.0
                .push(Command::new(&work).args(["threads", "600"]).stdout(Stdio::null()).spawn()?);
            let mut dd = Command::new("dd");
            dd.args(["if=/dev/zero", "of=/dev/null", "bs=64"]).stderr(Stdio::null());
            load.0.push(dd.spawn()?);
        }
        Ok(load)
    }

    fn pid(&self) -> u32 {
        self.0.first().map_or(0, Child::id)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It ends either way.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
