//! Functions of CPython, with no flag and no agent: in their places among the native frames, with
//! their lines; those of a process that lies cost its own frames alone.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use crate::support::build::{self, source};
use crate::support::forged::assert_cost_themselves_alone;
use crate::support::interpreters::pythons;
use crate::support::pprof::Sample;
use crate::support::python::{copied_from_debian, like, place_of};
use crate::support::secret::{assert_no_secret, python_with_a_secret};
use crate::support::shares::is_about;
use crate::support::whole::ended;
use crate::support::{
    Pprof, Ran, Running, binary, of_debian, privileged, record, report, run, stackwire,
};

/// CPythons whose frames are known: from 3.8 on.
fn known() -> BTreeMap<String, Command> {
    let mut all = pythons();
    all.retain(|name, _| ["3.6", "3.7"].iter().all(|old| !name.contains(&format!(" {old}."))));
    if let Some(python) = of_debian("sid", "python3.14") {
        all.insert("python of Debian sid".to_owned(), python);
    }
    assert!(all.len() >= 4, "{all:?}");
    all
}

/// Frames in a file, leaf first: function and line.
fn in_file<'a>(profile: &'a Pprof, sample: &Sample, file: &str) -> Vec<(&'a str, u64)> {
    let lines = sample.locations.iter().flat_map(|id| &profile.locations[id].lines);
    let lines = lines.filter(|(_, path, _)| path == file);
    lines.map(|(function, _, line)| (function.as_str(), *line)).collect()
}

/// What `shares.py` has on its stack while it burns time, without the last two, and its part of the
/// time, in thousandths.
const SHARES: [(&[&str], f64); 6] = [
    (&["burn", "twice"], 6.0 / 21.0),
    (&["burn", "recursive", "recursive", "recursive", "recursive", "recursive"], 3.0 / 21.0),
    (&["burn", "generator"], 3.0 / 21.0),
    (&["burn", "key", "called_back"], 3.0 / 21.0),
    (&["burn", "Class.method"], 3.0 / 21.0),
    (&["burn", "coroutine", "awaits"], 3.0 / 21.0),
];

#[test]
fn functions_and_lines_have_their_shares_and_no_false_caller() {
    if !privileged() {
        return;
    }
    let program = source("shares.py");
    let text = std::fs::read_to_string(&program).unwrap();
    let line_of = |wanted: &str| 1 + text.lines().position(|line| line.trim() == wanted).unwrap();
    let [first, second] = ["burn(0.004)", "burn(0.002)"].map(|it| line_of(it) as u64);
    for (name, python) in known() {
        let running = Running::start(like(&python).arg(&program));
        let profile = record(running.pid(), 4, &[]);
        let file = program.to_str().unwrap();
        let mut counts = BTreeMap::new();
        let (mut lines, mut without, mut total) = (BTreeMap::new(), 0, 0);
        for sample in &profile.samples {
            let frames = in_file(&profile, sample, file);
            let functions: Vec<&str> = frames.iter().map(|(function, _)| *function).collect();
            total += sample.count;
            let Some(called) = functions.strip_suffix(&["main", "<module>"]) else {
                without += sample.count;
                continue;
            };
            // Names were not qualified before 3.11.
            let called: Vec<&str> =
                called.iter().map(|it| if *it == "method" { "Class.method" } else { it }).collect();
            let called = &called[..];
            // On its way there or back.
            let is_known = called.is_empty() || SHARES.iter().any(|(all, _)| all.ends_with(called));
            assert!(is_known, "{name}: {functions:?}");
            if called == SHARES[0].0 {
                *lines.entry(frames[1].1).or_insert(0) += sample.count;
            }
            *counts.entry(called.to_vec()).or_insert(0) += sample.count;
        }
        eprintln!(
            "{name}: {total} samples, {without} without its functions, {counts:?}, {lines:?}"
        );
        assert!(total > 300 && without * 100 <= total * 2, "{name}: {without} of {total}");
        for (functions, share) in SHARES {
            is_about(&name, functions, counts[functions], total, share);
        }
        let of_lines = [first, second].map(|line| lines[&line]);
        assert_eq!(lines.len(), 2, "{name}: {lines:?}");
        is_about(&name, &["line"], of_lines[0], of_lines[0] + of_lines[1], 2.0 / 3.0);
    }
}

#[test]
fn frames_are_those_that_python_knows() {
    if !privileged() {
        return;
    }
    let directory = tempfile::Builder::new().prefix("frames").tempdir_in("/var/tmp").unwrap();
    for (name, python) in known() {
        let said = directory.path().join("frames");
        let program = source("current_frames.py");
        let running = Running::start(like(&python).arg(&program).arg(&said));
        let profile = record(running.pid(), 2, &[]);
        drop(running);
        let text = std::fs::read_to_string(&said).unwrap();
        let mut threads: BTreeMap<&str, Vec<(&str, &str, u64)>> = BTreeMap::new();
        let mut thread = "";
        for line in text.lines() {
            match line.split('\t').collect::<Vec<_>>()[..] {
                [function, file, line] => {
                    let frame = (function, file, line.parse().unwrap());
                    threads.entry(thread).or_default().push(frame);
                }
                _ => thread = line,
            }
        }
        assert_eq!(threads.len(), 3, "{text}");
        let mut equal = 0;
        for sample in &profile.samples {
            let Some(known) = threads.get(sample.labels["tid"].as_str()) else { continue };
            let lines = sample.locations.iter().flat_map(|id| &profile.locations[id].lines);
            let lines = lines.filter(|(_, path, _)| path.ends_with(".py"));
            let found: Vec<_> =
                lines.map(|(function, file, line)| (&**function, &**file, *line)).collect();
            assert_eq!(found.len(), known.len(), "{name}: {found:?}");
            // The innermost is on either line of its loop.
            let of = |frames: &[(&str, &str, u64)]| -> Vec<(String, String)> {
                frames.iter().map(|&(one, two, _)| (one.to_owned(), two.to_owned())).collect()
            };
            assert_eq!((of(&found), &found[1..]), (of(known), &known[1..]), "{name}");
            equal += sample.count;
        }
        eprintln!("{name}: {equal} stacks are those of sys._current_frames()");
        assert!(equal > 100, "{name}: {equal}");
    }
}

/// What each thread of `blocked.py` waits in, the innermost first.
const WAITS: [(&str, &[&str]); 5] = [
    ("sleeps", &["nap", "twice", "sleeps"]),
    ("generates", &["generator", "generates"]),
    ("called_back", &["key", "called_back"]),
    ("runs_coroutine", &["awaited", "awaits", "runs_coroutine"]),
    ("takes", &["takes"]),
];

/// Threads are still while their lists are walked, at a switch to another.
#[test]
fn waits_are_in_the_functions_and_lines_that_wait() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("off.pb.gz");
    let program = source("blocked.py");
    let file = program.to_str().unwrap();
    let text = std::fs::read_to_string(&program).unwrap();
    let line_of = |wanted: &str| 1 + text.lines().position(|line| line.trim() == wanted).unwrap();
    let [first, second] = ["nap(0.02)", "nap(0.01)"].map(|it| line_of(it) as u64);
    for (name, python) in known() {
        let running = Running::start(like(&python).arg(&program));
        let mut collector = Command::new(binary("stackwire"));
        collector.current_dir(directory.path());
        collector.args(["record", "--offcpu", "--no-capture", "--duration=3s"]);
        collector.arg(format!("--pid={}", running.pid()));
        collector.arg(format!("--offcpu-output={}", output.display()));
        Ran::of(&mut collector).succeeded();
        let profile = Pprof::read(&output);
        let off_cpu = profile.kinds.iter().position(|kind| kind == "off_cpu/nanoseconds").unwrap();
        let mut found = BTreeMap::<&str, f64>::new();
        let mut lines = BTreeMap::<u64, f64>::new();
        for sample in &profile.samples {
            let seconds = sample.values[off_cpu] as f64 / 1e9;
            let frames = in_file(&profile, sample, file);
            let functions: Vec<&str> = frames.iter().map(|(function, _)| *function).collect();
            // The main thread waits from before to after.
            if frames.is_empty() || functions == ["<module>"] {
                continue;
            }
            let thread = functions.last().unwrap();
            let Some((thread, known)) = WAITS.iter().find(|(of, _)| of == thread) else {
                panic!("{name}: {functions:?}");
            };
            // On its way from one wait to the next it may wait for the interpreter's lock.
            assert!(known.ends_with(&functions), "{name}: {functions:?}");
            if functions == *known {
                *found.entry(thread).or_default() += seconds;
            }
            if functions == WAITS[0].1 {
                *lines.entry(frames[1].1).or_default() += seconds;
            }
        }
        eprintln!("{name}: {found:?}, {lines:?}");
        for (thread, _) in &WAITS[..4] {
            let seconds = found[thread];
            assert!((2.7..3.1).contains(&seconds), "{name}: {thread}: {seconds} s");
        }
        assert_eq!(lines.len(), 2, "{name}: {lines:?}");
        let share = lines[&first] / (lines[&first] + lines[&second]);
        assert!((share - 2.0 / 3.0).abs() < 0.02, "{name}: {share} of the time on the first line");
    }
}

#[test]
fn what_a_program_computes_with_is_in_no_capture() {
    if !privileged() {
        return;
    }
    let running = python_with_a_secret();
    let directory = tempfile::tempdir().unwrap();
    let capture = directory.path().join("x.stackwire");
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.arg(format!("--pid={}", running.pid())).args(["--duration=3s", "--sample-rate=997"]);
    Ran::of(collector.arg("--output").arg(&capture)).succeeded();
    assert_no_secret(&capture);
    let text = report(&capture);
    assert!(text.contains("spends [<string>]") && text.contains("CPython 3.11"), "{text}");
    assert!(text.contains("  <string>:") && text.contains(" in spends\n"), "{text}");
}

#[test]
fn all_functions_of_commands_and_of_chosen_processes_have_names() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = source("shares.py");
    let command = ["/usr/bin/python3".as_ref(), program.as_os_str(), OsStr::new("2")];
    let record = |more: &[&OsStr]| -> Pprof {
        let fixed = ["record", "--profile", "--sample-rate=997"].map(OsStr::new);
        let output = directory.path().join("x.pb.gz");
        let option = [OsStr::new("--profile-output"), output.as_os_str()];
        stackwire([&fixed[..], &option, more].concat()).succeeded();
        Pprof::read(&output)
    };
    // The first makes the unwind table.
    let of_command = [&[OsStr::new("--")], &command[..]].concat();
    record(&of_command);
    let running = Running::start(Command::new(command[0]).arg(command[1]));
    for (how, more) in [
        ("command", &of_command[..]),
        ("chosen", &["--comm=python3", "--duration=2s"].map(OsStr::new)),
    ] {
        let profile = record(more);
        let functions = profile.samples.iter().flat_map(|it| profile.functions(it));
        let unnamed: Vec<&str> = functions.filter(|name| name.contains("cpython")).collect();
        assert!(unnamed.is_empty(), "{how}: {unnamed:?}");
        let is_named = |it: &&Sample| profile.functions(it).contains(&"main");
        let named: u64 = profile.samples.iter().filter(is_named).map(|it| it.count).sum();
        eprintln!("{how}: {named} of {} in main", profile.count());
        assert!(named > 100 && named * 10 >= profile.count() * 8, "{how}: {named}");
    }
    drop(running);
}

#[test]
fn perf_names_them_by_the_laid_out_directory() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let running = Running::start(Command::new("/usr/bin/python3").arg(source("shares.py")));
    stackwire([
        "record",
        "--profile",
        "--duration=2s",
        "--sample-rate=499",
        &format!("--pid={}", running.pid()),
        &format!("--profile-output={}", at("x.pb.gz")),
        &format!("--perf-data-output={}", at("perf.data")),
        &format!("--perf-buildid-dir={}", at("laid")),
    ])
    .succeeded();
    let mut perf = Command::new("perf");
    perf.args(["--buildid-dir", &at("laid"), "script", "-F", "ip,sym", "-i", &at("perf.data")]);
    let printed = run(&mut perf).0;
    // Innermost first, an address before each.
    let functions = |stack: &str| -> Vec<String> {
        let names = stack.lines().filter_map(|line| line.trim().split_once(' '));
        names.map(|(_, name)| name.split('+').next().unwrap().to_owned()).collect()
    };
    let stacks: Vec<_> = printed.split("\n\n").map(functions).collect();
    let has = |wanted: &[&str]| {
        let has = |stack: &&Vec<String>| stack.windows(wanted.len()).any(|some| some == wanted);
        stacks.iter().filter(has).count() as f64 / stacks.len() as f64
    };
    let recursion = ["burn", "recursive", "recursive", "recursive", "recursive", "recursive"];
    let shares = (has(&["main", "<module>"]), has(&recursion), has(&["[unknown]", "main"]));
    let (_, share) = SHARES[1];
    // Nothing stands between but C functions of a stripped Python.
    assert!(shares.0 > 0.95 && (shares.1 - share).abs() < 0.05 && shares.2 < 0.01, "{shares:?}");
}

#[test]
fn how_frames_of_an_interpreter_ended_is_counted() {
    if !privileged() {
        return;
    }
    let deep = "def deep(left):\n    \
        if left: deep(left - 1)\n    \
        print('ready', flush=True)\n    \
        while True: pass\n\
        deep(700)";
    // Younger threads come first.
    let threads = "import threading, time\n\
        for _ in range(200): threading.Thread(target=time.sleep, args=[60], daemon=True).start()\n\
        print('ready', flush=True)\n\
        while True: pass";
    for (program, end) in [
        ("print('ready', flush=True)\nwhile True: pass", "reached the thread's first function"),
        (deep, "deeper than is recorded"),
        (threads, "not shown: too many threads in its process"),
    ] {
        let running = Running::start(Command::new("/usr/bin/python3").args(["-c", program]));
        let directory = tempfile::tempdir().unwrap();
        let capture = directory.path().join("x.stackwire");
        let mut collector = Command::new(binary("stackwire-collector"));
        collector.arg(format!("--pid={}", running.pid()));
        collector.args(["--duration=1500ms", "--sample-rate=499"]);
        Ran::of(collector.arg("--output").arg(&capture)).succeeded();
        let text = report(&capture);
        let ends = text.split("frames of interpreters ended\n").nth(1).unwrap_or_default();
        assert!(ended(ends, end) > 95.0, "{end}: {text}");
    }
    // Each of its functions has an evaluator of its own: those that fit are shown.
    for (name, mut python) in pythons() {
        if [" 3.9.", " 3.10."].iter().any(|old| name.contains(old)) {
            let running = Running::start(python.args(["-c", &deep.replace("700", "300")]));
            let profile = record(running.pid(), 1, &[]);
            assert!(profile.share_of("deep") > 95.0, "{name}: {}", profile.share_of("deep"));
        }
    }
}

/// What came after this version of ours, what it was not made for, and what came before.
#[test]
fn a_python_that_is_not_known_has_native_frames_and_a_sentence() {
    if !privileged() {
        return;
    }
    let spin = "def spin():\n  while True: pass\nprint('ready', flush=True)\nspin()";
    let said = |python: &mut Command, sentence: &str| {
        let running = Running::start(python.args(["-c", spin]));
        let directory = tempfile::tempdir().unwrap();
        let capture = directory.path().join("x.stackwire");
        let mut collector = Command::new(binary("stackwire-collector"));
        collector.arg(format!("--pid={}", running.pid()));
        collector.args(["--duration=1500ms", "--sample-rate=499"]);
        // Its build-id is that of the one which is known.
        collector.arg(format!("--unwind-cache-dir={}", directory.path().join("cache").display()));
        Ran::of(collector.arg("--output").arg(&capture)).succeeded();
        let text = report(&capture);
        let sentence = format!("its functions are not shown: {sentence}\n");
        assert!(text.contains(&sentence) && !text.contains(" spin ["), "{sentence}: {text}");
    };
    let directory = tempfile::tempdir().unwrap();
    for (symbol, offset, value, sentence) in [
        ("Py_Version", 0, 0x0310_00f0_u32, "CPython 3.16: not known to this version"),
        (
            "_PyRuntime",
            16,
            1,
            "CPython 3.13 without the global interpreter lock: not known to this version",
        ),
    ] {
        let Some((own, mut python)) = copied_from_debian(directory.path()) else { return };
        let mut bytes = std::fs::read(&own).unwrap();
        let at = place_of(&bytes, symbol) + offset;
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        std::fs::write(&own, bytes).unwrap();
        said(&mut python, sentence);
    }
    for (name, mut python) in pythons() {
        if name.contains(" 3.7.") {
            said(&mut python, "CPython: not known to this version");
        }
    }
}

/// What it says of itself beside that is in `fixtures/forged_python.c`.
#[test]
fn a_forged_python_costs_its_own_frames_alone() {
    if !privileged() {
        return;
    }
    let lies = ["", "cycle", "wild", "giant", "evaluators", "threads", "interpreters", "changing"];
    assert_cost_themselves_alone(build::forged_python(), &lies);
}

#[test]
fn the_interpreters_own_functions_are_to_be_had() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = source("shares.py");
    let running = Running::start(Command::new("/usr/bin/python3").arg(&program));
    let capture = directory.path().join("x.stackwire");
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.arg(format!("--pid={}", running.pid())).args(["--duration=2s", "--sample-rate=499"]);
    Ran::of(collector.arg("--output").arg(&capture)).succeeded();
    let folded = |more: &[&str]| -> String {
        let out = directory.path().join("out.folded");
        let mut arguments = vec!["resolve".as_ref(), capture.as_os_str()];
        arguments.extend(more.iter().map(OsStr::new));
        let options = [OsStr::new("--folded"), out.as_os_str()];
        stackwire(arguments.into_iter().chain(options)).succeeded();
        std::fs::read_to_string(Path::new(&out)).unwrap()
    };
    let (functions, native) = (folded(&[]), folded(&["--native-only"]));
    assert!(functions.contains(";<module>;main;") && !functions.contains("EvalFrameDefault"));
    assert!(native.contains("EvalFrameDefault") && !native.contains(";<module>;"), "{native}");
    let weight = |folded: &str| -> u64 {
        folded.lines().map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    };
    assert_eq!(weight(&functions), weight(&native));
    let inside = folded(&["--where=kind=cpython"]);
    let leaves = inside.lines().map(|line| line.rsplit_once(' ').unwrap().0);
    let leaves: Vec<&str> = leaves.map(|stack| stack.rsplit(';').next().unwrap()).collect();
    assert!(leaves.contains(&"burn") && leaves.iter().all(|leaf| text_has(&program, leaf)));
}

/// Whether a program has a function of this name.
fn text_has(program: &Path, function: &str) -> bool {
    let name = function.rsplit('.').next().unwrap();
    let text = std::fs::read_to_string(program).unwrap();
    name == "<module>" || text.contains(&format!("def {name}("))
}
