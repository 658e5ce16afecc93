//! Where threads wait: a program whose threads wait in known functions, and which says by its own
//! clocks how long each was on no CPU.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::support::pprof::{Pprof, Sample};
use crate::support::{Ran, Running, alone, binary, build, privileged, recorded, run, stackwire};

const FUNCTIONS: [&str; 7] =
    ["in_sleep", "in_futex", "in_pipe", "in_epoll", "in_short_sleeps", "on_other_cpus", "spin"];

/// Values of a sample of waits: blocked time, time without a CPU.
const KINDS: [&str; 4] =
    ["samples/count", "off_cpu/nanoseconds", "run-queue_sample/count", "run_queue/nanoseconds"];

/// What threads that call a function again and again say: how long they were on no CPU, and how
/// often they called it.
#[derive(Default)]
struct Said {
    waited_ns: u64,
    calls: u64,
}

/// What a wait may be longer than by the CPU time of its thread: the kernel begins to count that
/// when it has chosen the thread, and the tracepoint comes some microseconds later.
const LATE_NS: u64 = 12_000;

/// Runs the program for three seconds under `record` with these arguments; the directory then has
/// `off.pb.gz` and `out.stackwire`. What it says of its threads, by function.
fn record(directory: &Path, arguments: &[&str]) -> BTreeMap<String, Said> {
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory).arg("record").args(arguments);
    command.args(["--offcpu-output=off.pb.gz", "--capture=out.stackwire", "--"]);
    let ran = Ran::of(command.arg(build::waits()).arg("3")).succeeded();
    let mut said = BTreeMap::<String, Said>::new();
    for line in ran.stdout.lines() {
        let mut words = line.split(' ');
        let of = said.entry(words.next().unwrap().to_owned()).or_default();
        let mut number = || words.next().unwrap().parse::<u64>().unwrap();
        of.waited_ns += number();
        of.calls += number();
    }
    assert_eq!(said.len(), FUNCTIONS.len(), "{}", ran.stdout);
    said
}

fn sum(profile: &Pprof, function: &str, value: impl Fn(&Sample) -> u64) -> u64 {
    let through = |sample: &&Sample| profile.functions(sample).contains(&function);
    profile.samples.iter().filter(through).map(value).sum()
}

/// One part in `of` apart at most, or `more` nanoseconds.
#[track_caller]
fn assert_near(what: &str, one: u64, other: u64, of: u64, more: u64) {
    let apart = one.abs_diff(other);
    assert!(apart <= other / of + more, "{what}: {one} ns, and {other} ns by its own clock");
}

#[test]
fn waits_are_as_long_as_the_program_says() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    // Of short waits a share is taken; all of them; and with samples of CPU time beside them.
    let all = "--offcpu-states=sleep,disk,stopped,preempted";
    let ways: [&[&str]; 3] = [
        &["--offcpu", all],
        &["--offcpu", all, "--offcpu-threshold=0"],
        &["--offcpu", all, "--profile", "--profile-output=on.pb.gz"],
    ];
    for way in ways {
        let directory = tempfile::tempdir().unwrap();
        let said = record(directory.path(), way);
        let profile = Pprof::read(&directory.path().join("off.pb.gz"));
        assert_eq!(profile.kinds, KINDS);
        for function in FUNCTIONS {
            let waited = sum(&profile, function, |sample| sample.values[1] + sample.values[3]);
            let Said { waited_ns, calls } = said[function];
            let what = format!("{function} {way:?}");
            assert_near(&what, waited, waited_ns, 50, 1_000_000 + calls * LATE_NS);
        }
        assert_eq!(sum(&profile, "spin", |sample| sample.values[1]), 0, "it never blocks");
        // Where each waits, the kernel says.
        for (function, kernel) in [
            ("in_sleep", "hrtimer_nanosleep"),
            ("in_futex", "futex_wait"),
            ("in_epoll", "do_epoll_wait"),
        ] {
            let kernel = sum(&profile, kernel, |sample| {
                let functions = profile.functions(sample);
                u64::from(functions.contains(&function)) * sample.values[1]
            });
            assert_eq!(kernel, sum(&profile, function, |sample| sample.values[1]), "{function}");
        }
        // No frame of the program that took it is left.
        let leaves = profile.samples.iter().filter_map(|it| profile.functions(it).first().copied());
        let wrong: Vec<_> = leaves.filter(|leaf| !leaf.contains("schedule")).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}

#[test]
fn threads_that_are_preempted_are_not_off_cpu_unless_asked_for() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    record(directory.path(), &["--offcpu"]);
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    assert_eq!(sum(&profile, "spin", |sample| sample.count + sample.values[2]), 0);
    let states = |sample: &Sample| sample.labels["state"].clone();
    let states: std::collections::BTreeSet<_> = profile.samples.iter().map(states).collect();
    assert!(states.iter().all(|state| state == "sleep" || state == "disk"), "{states:?}");
}

#[test]
fn waits_are_in_every_output_and_resolve_to_the_same_bytes() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let on_cpu = "--profile-output=on.pb.gz";
    let others = ["--flamegraph=out.svg", "--perf-data-output=out.data"];
    record(directory.path(), &["--offcpu", "--profile", on_cpu, others[0], others[1]]);
    let outputs = ["--output=again-on.pb.gz", "--offcpu-output=again-off.pb.gz"];
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["resolve", "out.stackwire"]).args(outputs);
    Ran::of(&mut command).succeeded();
    for (one, other) in [("on.pb.gz", "again-on.pb.gz"), ("off.pb.gz", "again-off.pb.gz")] {
        assert!(std::fs::read(at(one)).unwrap() == std::fs::read(at(other)).unwrap(), "{one}");
    }
    assert_eq!(Pprof::read(&at("on.pb.gz")).kinds, ["samples/count", "cpu/nanoseconds"]);
    // Both in one picture, in two colours.
    let svg = std::fs::read_to_string(at("out.svg")).unwrap();
    let drawn =
        |name: &str| svg.split("<g>").find(|line| line.contains(&format!("<title>{name} (")));
    for (name, waits) in [("spin", false), ("in_sleep", false), ("hrtimer_nanosleep", true)] {
        let line = drawn(name).unwrap_or_else(|| panic!("no {name} in the flame graph"));
        assert_eq!(line.contains("rgb(96,144,224)"), waits, "{line}");
    }
    // As perf calls them.
    let (events, _) = run(Command::new("perf").args(["evlist", "-i"]).arg(at("out.data")));
    assert_eq!(events.lines().collect::<Vec<_>>(), ["cpu-clock", "offcpu-time", "run-queue"]);
    let (script, _) = run(Command::new("perf").arg("script").arg("-i").arg(at("out.data")));
    assert!(script.contains("offcpu-time:") && script.contains("hrtimer_nanosleep"));
    assert_eq!(Pprof::read(&at("off.pb.gz")).kinds, KINDS);
}

/// Nobody sees it leave its CPU, and it does not run before the end.
#[test]
fn a_sleep_longer_than_the_capture_shows() {
    if !privileged() {
        return;
    }
    let sleeps = Running(Command::new("sleep").arg("60").spawn().unwrap());
    std::thread::sleep(std::time::Duration::from_millis(200));
    let directory = tempfile::tempdir().unwrap();
    let pid = format!("--pid={}", sleeps.pid());
    let arguments = [pid.as_str(), "--offcpu", "--duration=1s", "--offcpu-output=off.pb.gz"];
    recorded(directory.path(), &arguments).succeeded();
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    let [sample] = profile.samples.as_slice() else { panic!("{:?}", profile.samples) };
    assert_near("sleep", sample.values[1], 1_000_000_000, 5, 0);
    let labels = ["comm", "state", "open"].map(|key| sample.labels[key].as_str());
    assert_eq!(labels, ["sleep", "sleep", "start,end"]);
}

#[test]
fn what_cannot_be_meant_says_so() {
    let refused = |arguments: &[&str], said: &str| {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(binary("stackwire"));
        let command = command.current_dir(directory.path()).arg("record").args(arguments);
        Ran::of(command.args(["--", "true"])).failed(2, said);
    };
    refused(&["--offcpu", "--offcpu-states=asleep"], "sleep, disk, stopped, preempted");
    refused(&["--offcpu-states=disk"], "--offcpu");
    refused(&["--offcpu-threshold=1ms"], "--offcpu");
    refused(&["--offcpu", "--offcpu-threshold=2s"], "1s is the longest");
    refused(&["--offcpu", "--offcpu-threshold=-1ms"], "--offcpu-threshold");
    let help = stackwire(["record", "--help"]).succeeded().stdout;
    assert!(help.contains("--offcpu-output"), "{help}");
}
