//! CPython that is asked to name its functions while it is sampled: names come and go, the program
//! computes what it would have, and whoever dies leaves it running and untraced.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::interpreters::pythons;
use crate::support::pprof::Sample;
use crate::support::python::{
    Adding, children, collector, is_switched_on_again, kill, like, sampling, with_trampolines,
};
use crate::support::{Pprof, Ran, Running, alone, binary, privileged, record, recorded, report};

/// Percent of the samples that are in the function which adds.
fn share_through_step(profile: &Pprof) -> f64 {
    let is_in_it = |sample: &&Sample| profile.functions(sample).contains(&"py::step:<string>");
    let count: u64 = profile.samples.iter().filter(is_in_it).map(|sample| sample.count).sum();
    count as f64 * 100.0 / profile.count() as f64
}

#[test]
fn functions_have_names_while_they_are_sampled() {
    if !privileged() {
        return;
    }
    for (name, python) in with_trampolines() {
        let mut adding = Adding::start(&mut like(&python), &[]);
        let share = |more: &[&str]| share_through_step(&record(adding.pid(), 1, more));
        let (before, during) = (share(&[]), share(&["--inject-python"]));
        eprintln!("{name}: {before} % before, {during} % meanwhile");
        assert!(before == 0.0 && during > 20.0, "{name}: {before} % before, {during} % meanwhile");
        let after = adding.ask();
        assert!(!after.is_active && after.bad == 0, "{name}: {after:?}");
        adding.assert_well();
        if !is_switched_on_again(&python) {
            let directory = tempfile::tempdir().unwrap();
            let pid = format!("--pid={}", adding.pid());
            recorded(directory.path(), &[&pid, "--inject-python", "--duration=100ms"])
                .failed(1, "it was on once");
            adding.assert_well();
        }
    }
}

/// A thousand times at random moments, signals among them. CPython takes 254 of one process, some
/// versions one; those after it are refused.
#[test]
fn a_python_computes_what_it_would_have() {
    if !privileged() {
        return;
    }
    let all = with_trampolines();
    let again = all.iter().filter(|(_, python)| is_switched_on_again(python)).count();
    let processes = 1000usize.div_ceil(again * 250);
    let each = 1000usize.div_ceil(again * processes);
    let done: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = all
            .iter()
            .map(|(name, python)| {
                let often = is_switched_on_again(python);
                let (processes, each) = if often { (processes, each) } else { (20, 1) };
                scope.spawn(move || {
                    (0..processes).map(|_| switched_on(name, python, each)).sum::<usize>()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(done >= 1000, "{done}");
}

/// Switches one on and off so many times.
fn switched_on(name: &str, python: &Command, times: usize) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let mut adding = Adding::start(&mut like(python), &["signals"]);
    for round in 0..times {
        let mut command = collector();
        command.args(["--source=perf", "--unwind=fp", "--duration=1ms", "--inject-python"]);
        command.arg(format!("--pid={}", adding.pid()));
        let ran = Ran::of(command.arg("-o").arg(directory.path().join("x.stackwire")));
        assert_eq!(ran.code, Some(0), "{name}, {round}: {}", ran.stderr);
    }
    // Code that was freed too early would be missed now.
    let said = (adding.ask(), adding.ask()).1;
    eprintln!("{name}: {times} times, {said:?}");
    assert!(said.bad == 0 && !said.is_active && said.ticks > 0, "{name}: {said:?}");
    adding.assert_well();
    times
}

#[test]
fn whoever_dies_leaves_it_running() {
    if !privileged() {
        return;
    }
    for (name, python) in with_trampolines() {
        let directory = tempfile::tempdir().unwrap();
        for (who, signal) in [
            ("collector", Signal::KILL),
            ("collector", Signal::INT),
            ("collector", Signal::TERM),
            ("broker", Signal::KILL),
        ] {
            let mut adding = Adding::start(&mut like(&python), &["signals"]);
            let mut collector = sampling(adding.pid(), directory.path());
            adding.await_active(true);
            match who {
                "broker" => {
                    let [broker] = children(collector.id(), "sw-broker")[..] else { panic!() };
                    kill(broker, signal);
                }
                _ => kill(collector.id(), signal),
            }
            adding.await_active(false);
            adding.assert_well();
            let _ = collector.kill();
            collector.wait().unwrap();
            eprintln!("{name}: killed {who}");
        }
        // Who keeps it switched on is the broker's child: nobody switches it off then.
        let mut adding = Adding::start(&mut like(&python), &["signals"]);
        let mut collector = sampling(adding.pid(), directory.path());
        adding.await_active(true);
        let [broker] = children(collector.id(), "sw-broker")[..] else { panic!() };
        // Others open a file each, and end.
        let started = Instant::now();
        let keeper = loop {
            let found = children(broker, "sw-broker");
            if let [keeper] = found[..] {
                break keeper;
            }
            assert!(started.elapsed() < Duration::from_secs(10), "{name}: {found:?}");
            std::thread::sleep(Duration::from_millis(20));
        };
        kill(keeper, Signal::KILL);
        kill(collector.id(), Signal::INT);
        assert!(collector.wait().unwrap().success());
        adding.assert_well();
        assert!(adding.ask().is_active);
    }
}

#[test]
fn one_that_is_on_stays_on() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (name, mut python) in with_trampolines() {
        let mut adding = Adding::start(python.args(["-X", "perf"]), &[]);
        let pid = format!("--pid={}", adding.pid());
        let arguments = [&pid, "--inject-python", "--duration=200ms", "--capture=x.stackwire"];
        recorded(directory.path(), &arguments).succeeded();
        let report = report(&directory.path().join("x.stackwire"));
        assert!(report.contains("1  was on before and stays on"), "{name}:\n{report}");
        assert!(adding.ask().is_active, "{name}");
    }
}

/// A child that is forked meanwhile has it on as well, and goes off as well when it is sampled.
#[test]
fn children_that_are_forked_meanwhile_go_off_as_well() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    // On a busy host threads seldom run, so they are seldom seen where they may be interrupted.
    let spins =
        || Running::start(Command::new("sh").args(["-c", "echo ready; while :; do :; done"]));
    let _busy: Vec<Running> = (0..6).map(|_| spins()).collect();
    let directory = tempfile::tempdir().unwrap();
    for (name, mut python) in with_trampolines() {
        let forks = "import os, sys, time\nprint('ready', flush=True)\n\
            while not sys.is_stack_trampoline_active(): pass\n\
            child = os.fork()\nended = time.monotonic() + 20\n\
            while sys.is_stack_trampoline_active() and time.monotonic() < ended: sum(range(1000))\n\
            if child: os.waitpid(child, 0)\n\
            print('child'[bool(child):], sys.is_stack_trampoline_active(), flush=True)";
        let mut running = Running::start(python.args(["-c", forks]));
        let pid = format!("--pid={}", running.pid());
        let arguments =
            [&pid, "--follow", "--inject-python", "--duration=4s", "--capture=x.stackwire"];
        recorded(directory.path(), &arguments).succeeded();
        let mut said = String::new();
        running.0.stdout.as_mut().unwrap().read_to_string(&mut said).unwrap();
        let report = report(&directory.path().join("x.stackwire"));
        assert_eq!(said, "child False\nhild False\n", "{name}:\n{report}");
    }
}

/// Each moment of its start and its end is one at which it is not harmed.
#[test]
fn processes_that_begin_and_end_are_not_harmed() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (name, python) in with_trampolines() {
        for round in 0..20u64 {
            let mut child = like(&python).args(["-c", "sum(range(300000))"]).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(round * 4));
            let mut command = collector();
            command.args(["--source=perf", "--unwind=fp", "--duration=1ms", "--inject-python"]);
            command.arg(format!("--pid={}", child.id()));
            // It may have ended before.
            Ran::of(command.arg("-o").arg(directory.path().join("x.stackwire")));
            let status = child.wait().unwrap();
            assert!(status.success(), "{name}, {round}: {status}");
        }
    }
}

/// In a pid namespace with a `/proc` and a `/tmp` of its own, as containers have it.
#[test]
fn functions_in_a_container_have_names() {
    if !privileged() {
        return;
    }
    for (name, python) in with_trampolines() {
        let mut inside = Command::new("unshare");
        inside.args(["--pid", "--fork", "--mount-proc", "--kill-child"]);
        inside.args(["sh", "-c", "mount -t tmpfs tmp /tmp && exec \"$@\"", "sh"]);
        inside.arg(python.get_program()).args(python.get_args());
        for (variable, value) in python.get_envs() {
            inside.env(variable, value.unwrap_or_default());
        }
        let mut adding = Adding::start(&mut inside, &[]);
        let profile = record(only_child(adding.pid()), 1, &["--inject-python"]);
        let share = share_through_step(&profile);
        assert!(share > 20.0, "{name}: {share} %");
        assert!(!adding.ask().is_active, "{name}");
    }
}

fn only_child(of: u32) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap();
    children.trim().parse().unwrap()
}

/// Processes that were not chosen one by one cost the capture nothing, those that start later among
/// them.
#[test]
fn of_all_processes_the_report_counts_what_came_of_it() {
    if !privileged() {
        return;
    }
    // It switches on those of other tests as well.
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let mut new = with_trampolines();
    let mut early = Adding::start(&mut new[0].1, &[]);
    let old = pythons().into_iter().find(|(name, _)| name.starts_with("python 3.11"));
    let (_, mut old) = old.unwrap();
    let _old = Running::start(old.args(["-c", "print('ready', flush=True)\nwhile True: pass"]));
    let mut command = Command::new(binary("stackwire"));
    command.args(["record", "-a", "--inject-python", "--duration=5s", "--capture=x.stackwire"]);
    let recording = command.current_dir(directory.path()).stderr(Stdio::null()).spawn();
    let mut recording = recording.unwrap();
    early.await_active(true);
    let mut late = Adding::start(&mut new[1].1, &[]);
    late.await_active(true);
    assert!(recording.wait().unwrap().success());
    assert!(!early.ask().is_active && !late.ask().is_active);
    let report = report(&directory.path().join("x.stackwire"));
    assert!(report.contains("2  switched on, and off again at the end"), "{report}");
    assert!(report.contains("1  Python before 3.12 has no perf trampoline"), "{report}");
}

#[test]
fn a_command_has_names_from_its_start() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (name, python) = with_trampolines().remove(0);
    let program = python.get_program().to_str().unwrap();
    let brief = "def busy():\n  return sum(i * i for i in range(3000000))\nbusy()";
    let arguments =
        ["--inject-python", "-F", "997", "--folded=x.folded", "--", program, "-c", brief];
    recorded(directory.path(), &arguments).succeeded();
    let folded = std::fs::read_to_string(directory.path().join("x.folded")).unwrap();
    assert!(folded.contains("py::busy:<string>"), "{name}:\n{folded}");
}
