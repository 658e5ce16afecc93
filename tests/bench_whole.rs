//! `make bench`: how much of the CPU time that programs used has whole stacks and the names of
//! their functions, when none of them was met before; what a sample costs in eBPF, by language; how
//! much memory a hundred interpreters take.
//!
//! Prints tables, asserts nothing.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]
#![expect(clippy::unwrap_used, reason = "a bench may stop at what is not installed")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

#[path = "support/benched.rs"]
mod benched;

use self::benched::{Started, built, go_server, of_debian};

const PYTHON: &str = "import json\n\
    def work(): json.dumps([{str(i): sorted([i] * 9)} for i in range(300)])\n\
    while True: work()";
const BRIEF_PYTHON: &str = "import time\n\
    def work(): return sum(i * i % 7 for i in range(1000))\n\
    while time.process_time() < 0.05: work()";
const IDLE_PYTHON: &str = "import time\n\
    def work(): return sum(i * i % 7 for i in range(1000))\n\
    while True: work(); time.sleep(0.05)";
const RUBY: &str =
    "def text(n) = (0...n).map { |i| (i * 7919 % 1000).to_s }.sort.join(',')\nloop { text(500) }";

fn main() {
    let binaries = std::env::args().nth(1).expect("usage: bench-whole DIRECTORY-OF-BINARIES");
    let binaries = std::fs::canonicalize(binaries).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let bench = Bench { binaries, directory: directory.path() };
    let mut programs = bench.programs();
    println!(
        "\n| programs | seconds | program | CPU time | sampled | whole | function named | from the second second |\n|---|---|---|---|---|---|---|---|"
    );
    for runs_already in [true, false] {
        for seconds in [1, 10] {
            bench.at_once(&mut programs, runs_already, seconds);
        }
    }
    let brief =
        built(bench.directory, "brief", &["gcc", "-O2", "-g", "-DFRAME=40"], "brief.c", &["-lm"]);
    bench.brief("brief", &["run"], &format!("{} 50", brief.display()));
    std::fs::write(bench.directory.join("brief.py"), BRIEF_PYTHON).unwrap();
    bench.brief("python3", &["<module>"], "/usr/bin/python3 -S brief.py");
    println!("\n| program | samples | frames a sample | eBPF, µs a sample |\n|---|---|---|---|");
    for program in &mut programs {
        bench.cost(program);
    }
    bench.hundred();
}

/// A program, and what functions begin with of which one is on its stack all the time.
struct Program {
    name: &'static str,
    functions: &'static [&'static str],
    command: Command,
}

impl Program {
    fn start(&mut self) -> Started {
        Started(self.command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

struct Bench<'d> {
    binaries: PathBuf,
    directory: &'d Path,
}

impl Bench<'_> {
    fn programs(&self) -> Vec<Program> {
        let cpp = built(self.directory, "cpp", &["g++", "-O2", "-g"], "inlined.cc", &[]);
        let rust = built(
            self.directory,
            "rust",
            &["rustc", "-O", "-g", "--edition=2024"],
            "inlined.rs",
            &[],
        );
        let of = |name, functions, mut command: Command, arguments: &[&str]| {
            command.args(arguments);
            Program { name, functions, command }
        };
        let host = |program: &Path| Command::new(program);
        let (dd, python) = (Path::new("dd"), Path::new("/usr/bin/python3"));
        vec![
            of("C++", &["main"], host(&cpp), &["600"]),
            of("Rust", &["main"], host(&rust), &["600"]),
            of("Go", &["main.", "runtime."], host(&go_server()), &[]),
            // Stripped: the C library's alone have names.
            of("dd", &["__libc_start"], host(dd), &["if=/dev/zero", "of=/dev/null", "bs=4k"]),
            of("CPython 3.11", &["<module>"], host(python), &["-c", PYTHON]),
            of("CPython 3.13", &["<module>"], of_debian("trixie", "python3.13"), &["-c", PYTHON]),
            of(
                "Ruby 3.1",
                &["<main>"],
                of_debian("bookworm", "ruby3.1"),
                &["--disable-gems", "-e", RUBY],
            ),
        ]
    }

    /// All at once, with nothing kept of any of them.
    fn at_once(&self, programs: &mut [Program], runs_already: bool, seconds: u32) {
        let mut start = || programs.iter_mut().map(Program::start).collect::<Vec<_>>();
        let when = if runs_already { "run already" } else { "start later" };
        let mut running = Vec::new();
        if runs_already {
            running = start();
            std::thread::sleep(Duration::from_secs(2));
        }
        let mut collector = self.collector(&["-a", &format!("--duration={seconds}s")]);
        let mut collector = collector.spawn().unwrap();
        if !runs_already {
            std::thread::sleep(Duration::from_millis(300));
            running = start();
        }
        assert!(collector.wait().unwrap().success());
        let pids: Vec<u32> = running.iter().map(|it| it.0.id()).collect();
        drop(running);
        for (program, pid) in programs.iter().zip(pids) {
            self.row(when, seconds, program.name, program.functions, &format!("pid={pid}"));
        }
    }

    /// Two hundred processes of 50 ms.
    fn brief(&self, comm: &str, functions: &[&str], command: &str) {
        let script = format!("for i in $(seq 200); do {command}; done");
        let mut shell = Command::new("sh");
        let mut shell = shell.args(["-c", &script]).current_dir(self.directory).spawn().unwrap();
        let pid = format!("--pid={}", shell.id());
        let mut collector = self.collector(&[&pid, "--follow", "--duration=15s"]);
        assert!(collector.status().unwrap().success());
        shell.wait().unwrap();
        self.row("of 50 ms each", 15, comm, functions, &format!("comm={comm}"));
    }

    fn collector(&self, what: &[&str]) -> Command {
        let mut collector = Command::new(self.binaries.join("stackwire-collector"));
        let cache = self.directory.join("cache");
        let _ = std::fs::remove_dir_all(&cache);
        collector.args(["--sample-rate=997", "--output=x.stackwire"]).args(what);
        collector.env("XDG_CACHE_HOME", cache).current_dir(self.directory);
        collector
    }

    fn stackwire(&self, what: &[&str]) -> String {
        let mut command = Command::new(self.binaries.join("stackwire"));
        command.args(what).current_dir(self.directory).env("DEBUGINFOD_URLS", "");
        let output = command.env("XDG_CACHE_HOME", self.directory.join("names")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// What the last capture has of the processes of a label.
    fn row(&self, when: &str, seconds: u32, name: &str, functions: &[&str], label: &str) {
        let only = format!("--where={label}");
        let report = self.stackwire(&["report", "x.stackwire", &only]);
        let of_all = report.lines().find(|line| line.ends_with("  all programs"));
        let Some(of_all) = of_all else {
            println!("| {when} | {seconds} | {name} | no samples | | | | |");
            return;
        };
        let mut numbers = of_all.split_whitespace().filter_map(|word| word.parse::<f64>().ok());
        let [used, sampled, whole] = [(); 3].map(|()| numbers.next().unwrap());
        let named = |more: &[&str]| {
            let has = |frame: &str| functions.iter().any(|of| frame.starts_with(of));
            let (mut named, mut all) = (0, 0);
            for (stack, count) in self.folded(&[&[&*only], more].concat()) {
                all += count;
                named += if stack.iter().any(|frame| has(frame)) { count } else { 0 };
            }
            sampled * named as f64 / f64::max(all as f64, 1.0)
        };
        let all = named(&[]);
        let then =
            if seconds > 1 { format!("{:.1} %", named(&["--time=1.."])) } else { String::new() };
        println!(
            "| {when} | {seconds} | {name} | {used:.2} s | {sampled:.1} % | {whole:.1} % | {all:.1} % | {then} |"
        );
    }

    /// Stacks of the last capture, the outermost function first, each with its samples.
    fn folded(&self, what: &[&str]) -> Vec<(Vec<String>, u64)> {
        self.stackwire(&[&["resolve", "x.stackwire", "--folded=x.folded"], what].concat());
        let text = std::fs::read_to_string(self.directory.join("x.folded")).unwrap();
        let split = |line: &str| {
            let (stack, count) = line.rsplit_once(' ').unwrap();
            (stack.split(';').map(str::to_owned).collect(), count.parse().unwrap())
        };
        text.lines().map(split).collect()
    }

    /// What a sample of a program costs in eBPF: the kernel counts it, if it is asked to.
    fn cost(&self, program: &mut Program) {
        const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";
        let before = std::fs::read_to_string(SWITCH).unwrap();
        let running = program.start();
        std::thread::sleep(Duration::from_secs(1));
        let pid = format!("--pid={}", running.0.id());
        let mut collector = self.collector(&[&pid]);
        let mut collector = Started(collector.stderr(Stdio::null()).spawn().unwrap());
        // Tables are there, and functions have been told.
        std::thread::sleep(Duration::from_secs(4));
        std::fs::write(SWITCH, "1").unwrap();
        let first = run_time(collector.0.id());
        std::thread::sleep(Duration::from_secs(4));
        let second = run_time(collector.0.id());
        std::fs::write(SWITCH, before).unwrap();
        let pid = rustix::process::Pid::from_raw(collector.0.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let _ = collector.0.wait();
        let (samples, ns) = (second.0 - first.0, second.1 - first.1);
        let each = ns as f64 / samples as f64 / 1e3;
        let stacks = self.folded(&["--native-only"]);
        // Without the name of the process.
        let frames = |(stack, count): &(Vec<String>, u64)| (stack.len() as u64 - 1) * count;
        let all: u64 = stacks.iter().map(|(_, count)| count).sum();
        let frames = stacks.iter().map(frames).sum::<u64>() as f64 / all as f64;
        println!("| {} | {samples} | {frames:.1} | {each:.2} |", program.name);
    }

    /// What a hundred interpreters cost the collector.
    fn hundred(&self) {
        let start = |_| {
            let mut python = Command::new("/usr/bin/python3");
            Started(python.args(["-S", "-c", IDLE_PYTHON]).spawn().unwrap())
        };
        let running: Vec<Started> = (0..100).map(start).collect();
        let mut collector = self.collector(&["-a"]);
        let mut collector = Started(collector.stderr(Stdio::null()).spawn().unwrap());
        std::thread::sleep(Duration::from_secs(10));
        let status = format!("/proc/{}/status", collector.0.id());
        let status = std::fs::read_to_string(status).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let mebibytes = maps(collector.0.id()) as f64 / f64::from(1 << 20);
        println!(
            "\na hundred CPythons: the collector's memory is {} at most, its eBPF maps have {mebibytes:.1} MiB",
            peak.trim()
        );
        drop(running);
        let _ = collector.0.kill();
    }
}

/// What the kernel says of each descriptor of a process: numbers, by what is before them.
fn descriptors(pid: u32) -> impl Iterator<Item = impl Fn(&str) -> Option<u64>> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap().flatten();
    entries.map(|entry| {
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        move |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().parse().ok()
        }
    })
}

/// How often the programs of a process that take samples have run, and how many nanoseconds all of
/// its programs did.
fn run_time(pid: u32) -> (u64, u64) {
    let (mut samples, mut ns) = (0, 0);
    for value in descriptors(pid) {
        // BPF_PROG_TYPE_PERF_EVENT; what it calls in its place is counted with it.
        if let (Some(7), Some(count), Some(time)) =
            (value("prog_type:"), value("run_cnt:"), value("run_time_ns:"))
        {
            samples += count;
            ns += time;
        }
    }
    (samples, ns)
}

/// Bytes of the eBPF maps of a process, each once.
fn maps(pid: u32) -> u64 {
    let mut maps = BTreeMap::new();
    for value in descriptors(pid) {
        if let (Some(id), Some(bytes)) = (value("map_id:"), value("memlock:")) {
            maps.insert(id, bytes);
        }
    }
    maps.values().sum()
}
