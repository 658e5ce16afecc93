//! `make bench`: what a user sees of programs that people profile, as they are installed. Shows how
//! many frames are named, how many stacks are whole, and the sentence that `record` ends with where
//! a number is low.
//!
//! Prints a table, asserts nothing.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]
#![expect(clippy::unwrap_used, reason = "a bench may stop at what is not installed")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

#[path = "support/benched.rs"]
mod benched;
#[expect(dead_code, reason = "tests need more of it")]
#[path = "support/nginx.rs"]
mod nginx;
#[expect(dead_code, reason = "tests need more of it")]
#[path = "support/postgres.rs"]
mod postgres;

use self::benched::{Started, built, go_server, of_debian};

const PYTHON: &str =
    "import json\nwhile True: json.dumps([{str(i): sorted([i] * 9)} for i in range(300)])";
const NODE: &str = "function sorted(n) { return Array.from({length: n}, (_, i) => i * 7919 % 1000).sort((a, b) => a - b); }\n\
    for (;;) JSON.stringify(sorted(500));";
const JAVA: &str = "import java.util.*;\n\
    public class Sorting {\n\
      static String text(int n) {\n\
        List<String> all = new ArrayList<>();\n\
        for (int i = 0; i < n; i++) all.add(\"k\" + i * 7919 % 1000);\n\
        Collections.sort(all);\n\
        return String.join(\",\", all);\n\
      }\n\
      public static void main(String[] a) { long n = 0; for (;;) n += text(500).length(); }\n\
    }\n";
const RUBY: &str =
    "def text(n) = (0...n).map { |i| (i * 7919 % 1000).to_s }.sort.join(',')\nloop { text(500) }";
const PHP: &str = "function text($n) { $a = []; for ($i = 0; $i < $n; $i++) $a[] = 'k' . ($i * 7919 % 1000); sort($a); return implode(',', $a); } for (;;) text(500);";

/// `postgres.rs` asks whether it may do without.
fn can(what: &str, yes: bool) -> bool {
    assert!(yes, "{what} is not there; tests/setup.sh gets it");
    yes
}

fn main() {
    let binaries = std::env::args().nth(1).expect("usage: bench-workloads DIRECTORY-OF-BINARIES");
    let binaries = std::fs::canonicalize(binaries).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let bench = Bench { binaries, directory: directory.path() };
    println!(
        "\n| program | samples | frames named | stacks whole | what `record` says |\n|---|---|---|---|---|"
    );
    for (name, mut command) in bench.programs() {
        command.current_dir(bench.directory).stdout(Stdio::null()).stderr(Stdio::null());
        let program = Started(command.spawn().unwrap());
        std::thread::sleep(Duration::from_secs(2));
        if name.contains("perfmap") {
            let mut jcmd = Command::new("jcmd");
            jcmd.args([&program.0.id().to_string(), "Compiler.perfmap"]).stdout(Stdio::null());
            assert!(jcmd.status().unwrap().success());
        }
        bench.row(&name, &[&format!("--pid={}", program.0.id())]);
        let _ = std::fs::remove_file(format!("/tmp/perf-{}.map", program.0.id()));
    }
    {
        let postgres = postgres::Postgres::start().unwrap();
        let load = postgres.under_pgbench(30);
        bench.row("postgres, pgbench", &[&format!("--pid={}", load.master()), "--follow"]);
    }
    {
        let nginx = nginx::Nginx::start(of_debian("bookworm", "nginx"));
        bench.row("nginx, gzip", &[&format!("--pid={}", nginx.master()), "--follow"]);
    }
    let source = bench.directory.join("x.cc");
    std::fs::write(
        &source,
        "#include <bits/stdc++.h>\n#include <regex>\nint main() { std::regex r(\"a\"); }\n",
    )
    .unwrap();
    bench.row("g++ -O2", &["--", "g++", "-O2", "-c", source.to_str().unwrap(), "-o", "/dev/null"]);
    let brief =
        built(bench.directory, "brief", &["gcc", "-O2", "-g", "-DFRAME=40"], "brief.c", &["-lm"]);
    let script = format!("for i in $(seq 80); do {} 50; done", brief.display());
    bench.row("80 processes of 50 ms", &["--", "sh", "-c", &script]);
}

struct Bench<'d> {
    binaries: PathBuf,
    directory: &'d Path,
}

impl Bench<'_> {
    fn programs(&self) -> Vec<(String, Command)> {
        let cpp = built(self.directory, "cpp", &["g++", "-O2", "-g"], "inlined.cc", &[]);
        let rust = built(
            self.directory,
            "rust",
            &["rustc", "-O", "-g", "--edition=2024"],
            "inlined.rs",
            &[],
        );
        std::fs::write(self.directory.join("Sorting.java"), JAVA).unwrap();
        let of = |program: &Path, arguments: &[&str]| {
            let mut command = Command::new(program);
            command.args(arguments);
            command
        };
        let host = |program: &str, arguments: &[&str]| of(Path::new(program), arguments);
        let debian = |suite: &str, program: &str, arguments: &[&str]| {
            let mut command = of_debian(suite, program);
            command.args(arguments);
            command
        };
        vec![
            ("C++, -O2".to_owned(), of(&cpp, &["600"])),
            ("Rust, -O".to_owned(), of(&rust, &["600"])),
            ("Go, HTTP server".to_owned(), of(&go_server(), &[])),
            ("python3".to_owned(), host("python3", &["-c", PYTHON])),
            (
                "python3.13 -X perf".to_owned(),
                debian("trixie", "python3.13", &["-X", "perf", "-c", PYTHON]),
            ),
            ("node".to_owned(), host("node", &["-e", NODE])),
            ("node --perf-basic-prof".to_owned(), host("node", &["--perf-basic-prof", "-e", NODE])),
            ("java".to_owned(), host("java", &["Sorting.java"])),
            (
                "java -XX:+PreserveFramePointer, jcmd Compiler.perfmap".to_owned(),
                host("java", &["-XX:+PreserveFramePointer", "Sorting.java"]),
            ),
            ("ruby".to_owned(), debian("bookworm", "ruby3.1", &["--disable-gems", "-e", RUBY])),
            (
                "ruby --yjit".to_owned(),
                debian("bookworm", "ruby3.1", &["--disable-gems", "--yjit", "-e", RUBY]),
            ),
            ("php".to_owned(), debian("bookworm", "php8.2", &["-n", "-r", PHP])),
        ]
    }

    /// Twice, for the second is what one sees of programs met before.
    fn row(&self, name: &str, what: &[&str]) {
        let record = || {
            let mut command = Command::new(self.binaries.join("stackwire"));
            command.args(["record", "--sample-rate=997", "--no-capture", "--profile-output"]);
            command.arg(self.directory.join("x.pb.gz")).env("XDG_CACHE_HOME", self.directory);
            if !what.contains(&"--") {
                command.arg("--duration=4s");
            }
            let output = command.args(what).current_dir(self.directory).output().unwrap();
            String::from_utf8_lossy(&output.stderr).into_owned()
        };
        record();
        let said = record();
        let Some(line) = said.lines().find(|line| line.contains(" samples, ")) else {
            println!("| {name} | {said:?} |");
            return;
        };
        let part = |what: &str| {
            let parts = line.split(", ").chain(line.split(": "));
            let mut found = parts.filter_map(|part| part.split_once(what));
            found.next().map_or("", |(number, _)| number.rsplit(", ").next().unwrap_or(number))
        };
        let sentence: Vec<&str> = said
            .lines()
            .skip_while(|other| *other != line)
            .skip(1)
            .filter(|line| !line.starts_with("capture: "))
            .collect();
        println!(
            "| {name} | {} | {} % | {} % | {} |",
            part(" samples"),
            part(" % of frames named"),
            part(" % of stacks whole"),
            sentence.join(" ").replace('|', "\\|")
        );
    }
}
