//! Functions of CPython, with no flag and no agent: in their places among the native frames, with
//! their lines; those of a process that lies cost its own frames alone.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::build::{self, source};
use crate::support::forged::assert_cost_themselves_alone;
use crate::support::functions::{Lines, Shares, Waits, assert_frames, frames_it_knows, in_file};
use crate::support::interpreters::pythons;
use crate::support::pprof::Sample;
use crate::support::python::{copied_from_debian, like, place_of};
use crate::support::secret::{assert_no_secret, python_with_a_secret};
use crate::support::whole::ended;
use crate::support::{
    Pprof, Ran, Running, binary, can, of_debian, privileged, record, report, run, stackwire,
    test_cache,
};

/// CPythons whose frames are known: from 3.8 on.
fn known() -> BTreeMap<String, Command> {
    let mut all = pythons();
    all.retain(|name, _| ["3.6", "3.7"].iter().all(|old| !name.contains(&format!(" {old}."))));
    for version in ["3.14", "3.15"] {
        if let Some(python) = of_debian("sid", &format!("python{version}")) {
            all.insert(format!("python {version} of Debian sid"), python);
        }
    }
    let without_lock = test_cache().join("python3.13t/bin/python3.13t");
    if can("a CPython without its lock, which tests/setup.sh builds", without_lock.exists()) {
        all.insert("python 3.13 without its lock".to_owned(), Command::new(without_lock));
    }
    assert!(all.len() >= 4, "{all:?}");
    all
}

/// What `shares.py` has on its stack while it burns time, and its part of that.
const SHARES: [(&[&str], f64); 6] = [
    (&["burn", "twice", "main"], 6.0 / 21.0),
    (
        &["burn", "recursive", "recursive", "recursive", "recursive", "recursive", "main"],
        3.0 / 21.0,
    ),
    (&["burn", "generator", "main"], 3.0 / 21.0),
    (&["burn", "key", "called_back", "main"], 3.0 / 21.0),
    (&["burn", "Class.method", "main"], 3.0 / 21.0),
    (&["burn", "coroutine", "awaits", "main"], 3.0 / 21.0),
];
/// Lines of `twice`, there and in `mixed.py`.
const LINES: [&str; 2] = ["burn(0.004)", "burn(0.002)"];

#[test]
fn functions_and_lines_have_their_shares_and_no_false_caller() {
    if !privileged() {
        return;
    }
    let program = &source("shares.py");
    let shares = Shares { program, known: &SHARES, lines: &LINES, leaf: "", root: "<module>" };
    for (name, python) in known() {
        let running = Running::start(like(&python).arg(program));
        let profile = record(running.pid(), 4, &[]);
        shares.assert_are_in(&name, &profile, &profile.samples);
    }
}

/// Both are on the stack then: what the perf-map names is a frame of its own.
#[test]
fn functions_are_those_of_the_perf_map_where_there_is_one() {
    if !privileged() {
        return;
    }
    let program = source("shares.py");
    let mut compared = 0;
    for (name, python) in known() {
        let asks = "import sys; sys.exit(not hasattr(sys, 'activate_stack_trampoline'))";
        if !like(&python).args(["-c", asks]).status().unwrap().success() {
            continue; // before 3.12
        }
        let running = Running::start(like(&python).args(["-X", "perf"]).arg(&program));
        let profile = record(running.pid(), 2, &[]);
        let _ = std::fs::remove_file(format!("/tmp/perf-{}.map", running.pid()));
        let file = program.to_str().unwrap();
        let (mut equal, mut others) = (0, 0);
        for sample in &profile.samples {
            // Both name the file; its mapping tells whose word it is.
            let of = |by_map: bool| -> Vec<&str> {
                let at = sample.locations.iter().map(|id| &profile.locations[id]);
                let is_jit = |id| profile.mappings.get(id).is_some_and(|it| it.file == "[jit]");
                let at = at.filter(|it| is_jit(&it.mapping) == by_map);
                let lines = at.flat_map(|it| &it.lines).filter(|(_, path, _)| path == file);
                lines.map(|(function, ..)| function.as_str()).collect()
            };
            let (own, mapped) = (of(false), of(true));
            if own == mapped {
                equal += sample.count;
            } else {
                // A function is on one of the lists before it is on the other.
                let apart = own.len().abs_diff(mapped.len());
                assert!(apart <= 1, "{name}: {own:?} and {mapped:?}");
                others += sample.count;
            }
        }
        eprintln!("{name}: {equal} stacks are as the perf-map has them, {others} are not");
        assert!(equal > 100 && others * 50 <= equal, "{name}: {others} of {equal}");
        compared += 1;
    }
    assert!(compared >= 3, "{compared}");
}

/// py-spy stops the process and reads the same from outside.
#[test]
fn functions_have_the_shares_that_py_spy_finds() {
    let py_spy = test_cache().join("validators/bin/py-spy");
    if !privileged() || !can("py-spy, which tests/setup.sh installs", py_spy.exists()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let folded = directory.path().join("py-spy.folded");
    let program = source("shares.py");
    let running = Running::start(Command::new("/usr/bin/python3").arg(&program));
    let pid = running.pid().to_string();
    let mut theirs = Command::new(py_spy);
    theirs.args(["record", "--duration=8", "--rate=200", "--format=raw", "--pid", &pid]);
    run(theirs.arg("--output").arg(&folded));
    let profile = record(running.pid(), 4, &[]);
    let file = program.to_str().unwrap();
    // Stacks of functions, the innermost first, each with its samples.
    let own: Vec<(Vec<String>, u64)> = profile
        .samples
        .iter()
        .map(|sample| {
            let functions =
                in_file(&profile, sample, file).into_iter().map(|(name, _)| name.to_owned());
            (functions.collect(), sample.count)
        })
        .collect();
    let text = std::fs::read_to_string(&folded).unwrap();
    let of_line = |line: &str| {
        // `<module> (shares.py:60);main (shares.py:50) 3`
        let (stack, count) = line.rsplit_once(' ').unwrap();
        let functions = stack.rsplit(';').map(|frame| frame.split(" (").next().unwrap().to_owned());
        (functions.collect(), count.parse().unwrap())
    };
    let others: Vec<(Vec<String>, u64)> = text.lines().map(of_line).collect();
    let share = |all: &[(Vec<String>, u64)], wanted: &[&str]| {
        // It does not qualify names.
        let name = |name: &str| name.rsplit('.').next().unwrap().to_owned();
        let is = |stack: &[String]| {
            stack.len() > wanted.len()
                && stack.iter().zip(wanted).all(|(one, other)| name(one) == name(other))
        };
        let part: u64 = all.iter().filter(|(stack, _)| is(stack)).map(|(_, count)| count).sum();
        part as f64 / all.iter().map(|(_, count)| count).sum::<u64>() as f64
    };
    for (functions, known) in SHARES {
        let (one, other) = (share(&own, functions), share(&others, functions));
        eprintln!("{functions:?}: {one:.3}, {other:.3} by py-spy, {known:.3} by design");
        assert!((one - known).abs() < 0.02, "{functions:?}: {one}");
        assert!((one - other).abs() < 0.05, "{functions:?}: {one}, {other} by py-spy");
    }
}

/// What `mixed.py` has on its stack while it burns time, and its part of that.
const MIXED: [(&[&str], f64); 6] = [
    (&["burn", "twice", "main"], 6.0 / 24.0),
    (&["burn", "of_sqlite", "queries", "main"], 3.0 / 24.0),
    (&["burn", "compare", "sorts", "main"], 3.0 / 24.0),
    (&["burn", "lock", "main"], 3.0 / 24.0),
    (&["checks", "main"], 6.0 / 24.0),
    (&["burn", "of_expat", "parses", "main"], 3.0 / 24.0),
];

/// C that calls Python: SQLite, libc by ctypes, expat. Three threads and a child do the same.
#[test]
fn functions_called_from_c_have_their_shares_in_each_thread_and_in_a_child() {
    if !privileged() {
        return;
    }
    let program = &source("mixed.py");
    let shares = Shares { program, known: &MIXED, lines: &LINES, leaf: "", root: "<module>" };
    let mut run = 0;
    for (name, python) in known() {
        let asks = ["-c", "import ctypes, pyexpat, sqlite3, zlib"];
        if !like(&python).args(asks).stderr(Stdio::null()).status().unwrap().success() {
            eprintln!("{name} was built without one of these modules");
            continue;
        }
        let running = Running::start(like(&python).arg(program));
        let profile = record(running.pid(), 4, &["--follow"]);
        let mut threads: BTreeMap<(&str, &str), Vec<&Sample>> = BTreeMap::new();
        for sample in &profile.samples {
            let [pid, tid] = ["pid", "tid"].map(|label| sample.labels[label].as_str());
            threads.entry((pid, tid)).or_default().push(sample);
        }
        assert_eq!(threads.len(), 4, "{name}: {:?}", threads.keys());
        for ((pid, tid), samples) in threads {
            shares.assert_are_in(&format!("{name}, {pid}/{tid}"), &profile, samples);
        }
        run += 1;
    }
    assert!(run >= 4, "{run}");
}

/// What `two_interpreters.py` has on its stack while it burns time, and its part of that.
const TWO: [(&[&str], f64); 2] =
    [(&["burn", "twice", "main"], 6.0 / 9.0), (&["burn", "inside", "main"], 3.0 / 9.0)];

/// A function of one interpreter calls what another runs, in the same thread.
#[test]
fn functions_of_two_interpreters_are_inside_each_other() {
    if !privileged() {
        return;
    }
    let program = &source("two_interpreters.py");
    let lines = ["burn(0.016)", "burn(0.008)"];
    let shares = Shares { program, known: &TWO, lines: &lines, leaf: "", root: "<module>" };
    for (name, python) in known() {
        let running = Running::start(like(&python).arg(program));
        let profile = record(running.pid(), 4, &[]);
        shares.assert_are_in(&name, &profile, &profile.samples);
    }
}

/// What `arrays.py` has on its stack while it burns time, and its part of that.
const ARRAYS: [(&[&str], f64); 3] = [
    (&["burn", "twice", "main"], 6.0 / 15.0),
    (&["burn", "of_numpy", "applies", "main"], 3.0 / 15.0),
    (&["sorts", "main"], 6.0 / 15.0),
];

#[test]
fn functions_around_numpy_have_their_shares() {
    let python = test_cache().join("validators/bin/python3");
    if !privileged() || !can("numpy, which tests/setup.sh installs", python.exists()) {
        return;
    }
    let program = &source("arrays.py");
    let shares = Shares { program, known: &ARRAYS, lines: &LINES, leaf: "", root: "<module>" };
    let running = Running::start(Command::new(python).arg(program));
    // Makes the unwind tables, which takes 0.1 s: no functions are shown before.
    record(running.pid(), 1, &[]);
    let profile = record(running.pid(), 4, &[]);
    shares.assert_are_in("numpy", &profile, &profile.samples);
    // Where the time goes is in its own code.
    let in_numpy = |sample: &&Sample| {
        let leaf = &profile.locations[&sample.locations[0]];
        let path = profile.mappings.get(&leaf.mapping).map_or("", |it| &it.file);
        profile.functions(sample).contains(&"sorts") && path.contains("_multiarray_umath")
    };
    let count: u64 = profile.samples.iter().filter(in_numpy).map(|it| it.count).sum();
    assert!(count * 100 > profile.count() * 30, "{count} of {}", profile.count());
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
        let known = frames_it_knows(&text);
        assert_eq!(known.len(), 3, "{text}");
        let equal = assert_frames(&name, &profile, &known, ".py", Lines::OfCallers);
        eprintln!("{name}: {equal:?} stacks are those of sys._current_frames()");
        assert!(equal.values().sum::<u64>() > 100, "{name}: {equal:?}");
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
    let program = &source("blocked.py");
    let lines = ["nap(0.02)", "nap(0.01)"];
    let waits = Waits { program, known: &WAITS, lines, root: None, main: "<module>" };
    for (name, python) in known() {
        let running = Running::start(like(&python).arg(program));
        waits.assert_are_of(&name, running.pid());
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
    let flat = "print('ready', flush=True)\nwhile True: pass";
    let mut all: Vec<_> =
        known().into_values().map(|it| (it, flat, "reached the thread's first function")).collect();
    let debians = || Command::new("/usr/bin/python3");
    all.push((debians(), deep, "deeper than is recorded"));
    all.push((debians(), threads, "not shown: too many threads in its process"));
    for (mut python, program, end) in all {
        let running = Running::start(python.args(["-c", program]));
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
    let without_lock =
        "CPython 3.14 without the global interpreter lock: not known to this version";
    for (of, symbol, offset, value, sentence) in [
        (
            ["trixie", "3.13"],
            "Py_Version",
            0,
            0x0310_00f0_u32,
            "CPython 3.16: not known to this version",
        ),
        (["sid", "3.14"], "_PyRuntime", 16, 1, without_lock),
    ] {
        let Some((own, mut python)) = copied_from_debian(of, directory.path()) else { return };
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
