//! Stacks in which a frame pointer may be wrong, or a word may only look like a return address.
//! What cannot be known must be reported and not guessed. The test programs have known stacks. Most
//! of them have defeated us before (`fixtures/attacks`).

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::interpreters::pythons;
use crate::support::whole::{complete, recorded};
use crate::support::{Pprof, Ran, Running, binary, build, can, privileged};

/// A program that runs until dropped and says nothing.
struct Quiet(Child);

impl Quiet {
    fn start(name: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(build::attack(name));
        let child = command.args(arguments).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(300));
        Self(child)
    }

    /// The report, and the profile, of two seconds.
    fn recorded(&self) -> (String, Pprof) {
        let cache = tempfile::tempdir().unwrap();
        let pid = format!("--pid={}", self.0.id());
        // Tables are not there when the first capture begins.
        recorded(&[&pid, "--duration=500ms"], cache.path());
        recorded(&[&pid, "--duration=2s"], cache.path())
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Samples whose stack has this function.
fn with(profile: &Pprof, function: &str) -> u64 {
    let has =
        |sample: &&crate::support::pprof::Sample| profile.functions(sample).contains(&function);
    profile.samples.iter().filter(has).map(|sample| sample.count).sum()
}

/// Its trampolines make nothing of rbp; what they do when a call returns says how they are left.
#[test]
fn stacks_through_pythons_trampolines_are_whole_and_name_python_functions() {
    if !privileged() {
        return;
    }
    let with_trampolines = |name: &str| {
        let minor = name.strip_prefix("python 3.").and_then(|rest| rest.split('.').next());
        minor.is_none_or(|minor| minor.parse::<u32>().unwrap() >= 12)
    };
    let pythons = pythons().into_iter().filter(|(name, _)| with_trampolines(name));
    let pythons: Vec<(String, Command)> = pythons.collect();
    if !can("a CPython of 3.12 or later", !pythons.is_empty()) {
        return;
    }
    let script = "import json\n\
        def leaf(): return sorted(str(i) for i in range(200))\n\
        def middle(): return json.dumps(leaf())\n\
        def top():\n  print('ready', flush=True)\n  while True: middle()\n\
        top()\n";
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("busy.py"), script).unwrap();
    for (name, mut python) in pythons {
        let running =
            Running::start(python.args(["-X", "perf", "busy.py"]).current_dir(&directory));
        let cache = tempfile::tempdir().unwrap();
        let pid = format!("--pid={}", running.pid());
        recorded(&[&pid, "--duration=500ms"], cache.path());
        let (report, profile) = recorded(&[&pid, "--duration=3s"], cache.path());
        let share = complete(&report);
        eprintln!("{name} -X perf: {share} % of the stacks are whole");
        assert!(share >= 99.0, "{name}: {share} %\n{report}");
        let total = profile.count();
        let mut in_order = 0;
        for sample in &profile.samples {
            // Leaf first: each Python function where it was called.
            let functions = profile.functions(sample);
            let at = |name: &str| functions.iter().position(|it| *it == name);
            let [top, middle] = ["top", "middle"].map(at);
            if top.is_some() && middle.is_none_or(|middle| Some(middle) < top) {
                in_order += sample.count;
            }
        }
        assert!(in_order * 100 >= total * 99, "{name}: {in_order} of {total}\n{report}");
    }
}

#[test]
fn a_jit_that_uses_rbp_as_data_has_no_false_callers() {
    if !privileged() {
        return;
    }
    for how in ["gp", "heap"] {
        let (report, profile) = Quiet::start("jit", &[how]).recorded();
        assert_eq!(with(&profile, "never_called"), 0, "{how}:\n{report}");
        let total = profile.count();
        // Stacks through it end in it, but where its next instruction proves its caller.
        let beyond = profile.samples.iter().filter(|sample| {
            let functions = profile.functions(sample);
            let jit = functions.iter().position(|name| name.starts_with("[jit]"));
            jit.is_some_and(|jit| functions.get(jit + 1).is_some_and(|name| *name != "with_ops"))
        });
        let beyond: u64 = beyond.map(|sample| sample.count).sum();
        assert_eq!(beyond, 0, "{how}:\n{report}");
        assert!(
            total > 500 && report.contains("end here: code without frame pointers"),
            "{report}"
        );
    }
    // And one that keeps frame pointers is not doubted.
    let (report, profile) = Quiet::start("jit", &["fp"]).recorded();
    assert!(complete(&report) >= 99.5, "{report}");
    assert!(with(&profile, "with_ops") * 100 >= profile.count() * 99, "{report}");
}

#[test]
fn an_argument_of_a_fiber_is_no_caller() {
    if !privileged() {
        return;
    }
    let (report, profile) = Quiet::start("uctx9", &[]).recorded();
    assert_eq!(with(&profile, "never_called"), 0, "{report}");
    assert!(with(&profile, "__start_context") * 100 >= profile.count() * 99, "{report}");
    assert!(with(&profile, "fib_a") * 100 >= profile.count() * 99, "{report}");
}

#[test]
fn a_process_whose_main_thread_has_ended_is_named_and_whole() {
    if !privileged() {
        return;
    }
    for all in [false, true] {
        let program = Quiet::start("leader", &[]);
        let (report, profile) = if !all {
            program.recorded()
        } else {
            let cache = tempfile::tempdir().unwrap();
            recorded(&["--all", "--duration=2s"], cache.path())
        };
        let own =
            profile.samples.iter().filter(|it| it.labels["pid"] == program.0.id().to_string());
        let (mut total, mut whole) = (0, 0);
        for sample in own {
            let functions = profile.functions(sample);
            total += sample.count;
            let mut callers = functions.iter().skip_while(|name| **name != "th");
            let begun = callers.next().is_some() && callers.any(|name| *name == "start_thread");
            whole += if begun { sample.count } else { 0 };
        }
        assert!(total > 300 && whole * 100 >= total * 95, "{whole} of {total}:\n{report}");
    }
}

/// Children of 10 ms, one after the other, each by exec: known as soon as with `--all`.
#[test]
fn children_of_a_command_are_known_as_early_as_with_all() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let life = build::attack("life");
    let mut record = Command::new(binary("stackwire"));
    record.args(["record", "-F", "997", "--profile-output=x.pb.gz", "--"]);
    record.args([life.as_os_str(), "10".as_ref(), "200".as_ref()]).current_dir(&directory);
    Ran::of(&mut record).succeeded();
    let mut report = Command::new(binary("stackwire"));
    report.args(["report", "x.stackwire"]).current_dir(&directory);
    let report = Ran::of(&mut report).succeeded().stdout;
    let share = complete(&report);
    eprintln!("children of 10 ms: {share} % of the stacks are whole");
    // 1.2 % where the collector learns of them late, 80 % where it learns of each after some
    // milliseconds.
    assert!(share >= 98.0, "{report}");
}

/// A stack that was walked before is known by the words of it, but for code that may be another by
/// now.
#[test]
fn code_that_is_described_again_has_its_own_callers() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["record", "--offcpu", "--offcpu-threshold=0"]);
    command.args(["--no-capture", "--offcpu-output=off.pb.gz", "--"]);
    Ran::of(command.arg(build::attack("described_again")).arg("1500")).succeeded();
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    for (thread, caller, other) in [("in_a", "call_a", "call_b"), ("in_b", "call_b", "call_a")] {
        let through = |function: &str| -> u64 {
            let own = profile.samples.iter().filter(|sample| sample.labels["thread"] == thread);
            let own = own.filter(|sample| profile.functions(sample).contains(&function));
            own.map(|sample| sample.values[0]).sum()
        };
        // Its thread was called by the name of before for a moment, and its table made.
        let (right, wrong) = (through(caller), through(other));
        assert!(right > 1500 && wrong < 100, "{thread}: {right} right, {wrong} wrong");
    }
}
