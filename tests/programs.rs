//! Real programs: interpreters with JITs, release builds, tools of every day.

use std::process::{Command, Stdio};

use crate::support::build::{inlined_cc, inlined_rs};
use crate::support::go::releases;
use crate::support::interpreters::pythons;
use crate::support::{Pprof, Running, privileged, record, stackwire};

fn has(profile: &Pprof, function: &str) -> bool {
    profile.samples.iter().any(|sample| profile.functions(sample).contains(&function))
}

#[test]
fn node_functions_are_named_by_its_perf_map() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("hot.js");
    std::fs::write(
        &script,
        "function hotLeaf(n) { let x = 0; for (let i = 0; i < n; i++) x = (x * 31 + i) | 0; return x; }\n\
         function hotCaller() { let s = 0; for (let i = 0; i < 50; i++) s += hotLeaf(20000); return s; }\n\
         console.log('ready');\n\
         const end = Date.now() + 30000; while (Date.now() < end) hotCaller();\n",
    )
    .unwrap();
    // Inlined into its caller, which V8 does sooner or later, hotLeaf would have no frame.
    let options = ["--perf-basic-prof", "--no-turbo-inlining"];
    let program = Running::start(
        Command::new("node").args(options).arg(&script).current_dir(directory.path()),
    );
    let profile = record(program.pid(), 4, &[]);
    let map = format!("/tmp/perf-{}.map", program.pid());
    let named = std::fs::metadata(&map).is_ok();
    let _ = std::fs::remove_file(&map);
    assert!(named, "node wrote no perf-map");
    assert!(has(&profile, "hotLeaf"), "no frame of hotLeaf");
    let jit =
        profile.locations.values().find(|l| l.lines.iter().any(|(f, ..)| f == "hotLeaf")).unwrap();
    let (_, file, line) = &jit.lines[0];
    assert_eq!((file.as_str(), *line), (script.to_str().unwrap(), 1));
    assert_eq!(profile.mappings[&jit.mapping].file, "[jit]");
    profile.assert_addresses_in_mappings();
}

#[test]
fn python_is_named() {
    if !privileged() {
        return;
    }
    let script = "print('ready', flush=True)\ndef work():\n  x = 0\n  for i in range(100000): x += i * i\nwhile True: work()\n";
    for (name, mut python) in pythons() {
        let program = Running::start(python.args(["-c", script]));
        let profile = record(program.pid(), 2, &[]);
        // Of those before 3.8 the interpreter's own are shown.
        let is_old = name.contains(" 3.6.") || name.contains(" 3.7.");
        let functions = if is_old { &["_PyEval_EvalFrameDefault"][..] } else { &["work"] };
        let named = functions.iter().any(|function| has(&profile, function));
        assert!(named, "{name}: none of {functions:?}");
    }
}

#[test]
fn release_builds_with_frame_pointers_reach_their_root() {
    if !privileged() {
        return;
    }
    for program in [inlined_cc(), inlined_rs()] {
        let running = Running::start(Command::new(program).arg("30"));
        let profile = record(running.pid(), 2, &[]);
        let reaches = |sample: &&crate::support::pprof::Sample| {
            profile
                .functions(sample)
                .iter()
                .any(|function| *function == "main" || function.ends_with("::main"))
        };
        let whole: u64 = profile.samples.iter().filter(reaches).map(|sample| sample.count).sum();
        let share = whole as f64 / profile.count() as f64;
        assert!(share > 0.95, "{}: {share} of the stacks reach main", program.display());
    }
}

/// Runs a command under `record --` and reads the profile.
fn record_command(command: &[&str]) -> Pprof {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out.pb.gz");
    let mut arguments =
        vec!["record".to_owned(), "--profile".to_owned(), "--sample-rate=997".to_owned()];
    arguments.push(format!("--profile-output={}", output.display()));
    arguments.push("--".to_owned());
    arguments.extend(command.iter().map(|&word| word.to_owned()));
    stackwire(arguments).succeeded();
    Pprof::read(&output)
}

#[test]
fn gzip_from_its_first_instruction_to_its_end() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("data");
    let mut data = Vec::new();
    let mut x = 1u32;
    while data.len() < 40 << 20 {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        data.extend_from_slice(format!("{} ", x >> 20).as_bytes());
    }
    std::fs::write(&file, &data).unwrap();
    let profile = record_command(&["gzip", "-k", file.to_str().unwrap()]);
    assert!(profile.count() > 300, "{}", profile.count());
    let of_gzip = profile.samples.iter().filter(|sample| sample.labels["comm"] == "gzip");
    let of_gzip: u64 = of_gzip.map(|sample| sample.count).sum();
    assert!(of_gzip as f64 / profile.count() as f64 > 0.95);
    profile.assert_addresses_in_mappings();
    assert!(profile.mappings.values().any(|mapping| mapping.file.ends_with("/gzip")));
    // The file was compressed as if nobody had looked.
    let status = Command::new("gzip").arg("-t").arg(directory.path().join("data.gz")).status();
    assert!(status.unwrap().success());
}

#[test]
fn git_with_the_processes_it_starts() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let git = |arguments: &[&str]| {
        let status = Command::new("git")
            .args(["-c", "user.name=x", "-c", "user.email=x@example.org", "-C"])
            .arg(directory.path())
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        assert!(status.unwrap().success(), "git {arguments:?}");
    };
    git(&["init", "-q"]);
    for number in 0..400 {
        let text = format!("{number}\n").repeat(3000);
        std::fs::write(directory.path().join(format!("file{number}")), text).unwrap();
    }
    git(&["add", "."]);
    git(&["commit", "-qm", "all"]);
    let path = directory.path().to_str().unwrap();
    let profile =
        record_command(&["git", "-C", path, "repack", "-adfq", "--depth=50", "--window=250"]);
    assert!(profile.samples.iter().any(|sample| sample.labels["comm"] == "git"));
    let pids: std::collections::HashSet<_> =
        profile.samples.iter().map(|sample| &sample.labels["pid"]).collect();
    assert!(pids.len() > 1, "children were not followed");
}

/// `both` has C that it calls, and that calls it.
#[test]
fn code_of_go_is_told_from_the_c_in_its_program() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let mut totals = [0; 3];
    for release in releases() {
        let running = release.run("both");
        let (pid, capture) = (format!("--pid={}", running.pid()), format!("--capture={}", at("x")));
        let output = format!("--profile-output={}", at("x.pb.gz"));
        let fixed = ["record", "--profile", "--duration=2s", "--sample-rate=499"];
        stackwire(fixed.iter().copied().chain([&*pid, &*capture, &*output])).succeeded();
        // Innermost functions of a kind, each with its samples.
        let innermost = |kind: &str| -> Vec<(String, u64)> {
            let (only, folded) = (format!("--where=kind={kind}"), at("x.folded"));
            stackwire(["resolve", &at("x"), &only, "--folded", &folded]).succeeded();
            let text = std::fs::read_to_string(&folded).unwrap();
            let split = |line: &str| {
                let (stack, count) = line.rsplit_once(' ').unwrap();
                (stack.rsplit(';').next().unwrap().to_owned(), count.parse().unwrap())
            };
            text.lines().map(split).collect()
        };
        let (go, native) = (innermost("go"), innermost("native"));
        let sum = |all: &[(String, u64)], of: &dyn Fn(&str) -> bool| -> u64 {
            all.iter().filter(|(name, _)| of(name)).map(|(_, count)| count).sum()
        };
        // A package before each but a few of the assembler's.
        let is_of_go = |name: &str| name.starts_with("main.") || name.starts_with("runtime.");
        let is_of_c = |name: &str| name == "forever" || name == "plain";
        let of_go = sum(&go, &|name| name.contains('.'));
        let of_c = sum(&native, &is_of_c);
        let wrong = sum(&native, &is_of_go) + sum(&go, &is_of_c);
        eprintln!("{}: {of_go} with a package, {of_c} in C, {wrong} wrong", release.name);
        assert_eq!(wrong, 0, "{}: {go:?}, {native:?}", release.name);
        totals = [totals[0] + of_go, totals[1] + sum(&go, &|_| true), totals[2] + of_c];
    }
    // Of all releases: beside other tests a single one may get little of the CPUs.
    let [of_go, all, of_c] = totals;
    assert!(of_go > 100 && of_go * 10 >= all * 9 && of_c > 10, "{totals:?}");
}
