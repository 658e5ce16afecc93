//! Pid namespaces, as containers have them: a pid is that of the namespace it is typed in.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use crate::support::{
    Pprof, Ran, Running, assert_near, assert_shares, binary, build, privileged, report, stackwire,
};

/// A namespace with a program of ours in it.
struct Namespace {
    _outer: Running,
    /// The program's pid on the host, and there.
    host_pid: u32,
    pid: u32,
}

impl Namespace {
    /// So many levels below the host's, with another program beside ours.
    fn start(levels: usize, program: &str) -> Self {
        let mut command = Command::new("unshare");
        for level in 0..levels {
            command.args(["unshare"].iter().skip(usize::from(level == 0)));
            command.args(["--pid", "--fork", "--mount-proc", "--kill-child=KILL"]);
        }
        let outer = Running::start(command.args(["sh", "-c", &format!("{program} & wait")]));
        let host_pid = descendants(outer.pid()).into_iter().find(|&pid| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "work\n")
        });
        let host_pid = host_pid.unwrap();
        let status = std::fs::read_to_string(format!("/proc/{host_pid}/status")).unwrap();
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
        let numbers: Vec<u32> = numbers.split_whitespace().map(|it| it.parse().unwrap()).collect();
        assert_eq!((numbers.len(), numbers[0]), (levels + 1, host_pid));
        Self { _outer: outer, host_pid, pid: numbers[levels] }
    }

    /// A program that is started inside.
    fn enter(&self, namespaces: &[&str], program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.host_pid)).args(namespaces).arg(program);
        command
    }

    /// Records there, in this directory.
    fn record(&self, directory: &Path, arguments: &[&str]) -> Ran {
        let mut command = self.enter(&["--pid", "--mount"], "sh");
        // Who enters begins at the root directory.
        command.args(["-c", "cd $0 && exec \"$@\""]).arg(directory).arg(binary("stackwire"));
        command.args(["record", "--sample-rate=499"]);
        Ran::of(command.args(arguments))
    }
}

/// All that descend from a process.
fn descendants(of: u32) -> Vec<u32> {
    let mut found = vec![of];
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        found.extend(
            children.unwrap_or_default().split_whitespace().map(|it| it.parse::<u32>().unwrap()),
        );
        next += 1;
    }
    found
}

fn work() -> String {
    format!("{} plain 120", build::work().display())
}

/// The pids of samples, each with that of the host where they have one.
fn pids(profile: &Pprof) -> BTreeSet<(u32, Option<u32>)> {
    let number = |text: &String| text.parse().unwrap();
    let pids = profile
        .samples
        .iter()
        .map(|sample| (number(&sample.labels["pid"]), sample.labels.get("host_pid").map(number)));
    pids.collect()
}

#[test]
fn a_pid_is_that_of_the_namespace_it_is_typed_in() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for levels in [1, 3] {
        let namespace = Namespace::start(levels, &work());
        let Namespace { pid, host_pid, .. } = namespace;
        // From inside, in each way that samples can be taken.
        for (source, known) in [("bpf", Some(host_pid)), ("perf", None)] {
            let (pid_there, source) = (format!("--pid={pid}"), format!("--source={source}"));
            let ran = namespace.record(
                directory.path(),
                &["--profile", "--duration=4s", &pid_there, &source, "--profile-output=in.pb.gz"],
            );
            ran.succeeded();
            let profile = Pprof::read(&at("in.pb.gz"));
            assert_eq!(pids(&profile), [(pid, known)].into(), "{levels} levels, {source}");
            assert_shares(&profile, &[("alpha", 60.0), ("beta", 30.0), ("gamma_", 10.0)]);
        }
        // From outside, by the host's pid.
        let pid_here = format!("--pid={host_pid}");
        let output = format!("--profile-output={}", at("out.pb.gz").display());
        stackwire(["record", "--profile", "--duration=1s", "-F499", &pid_here, &output])
            .succeeded();
        assert_eq!(pids(&Pprof::read(&at("out.pb.gz"))), [(host_pid, None)].into());
        // The host's pid is nobody there.
        let ran = namespace.record(directory.path(), &["--profile", &pid_here]);
        ran.failed(1, &format!("no process with pid {host_pid}"));
    }
}

#[test]
fn waits_and_scheduling_are_recorded_in_a_namespace() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let namespace = Namespace::start(2, &work());
    let all = ["--profile", "--offcpu", "--offcpu-wakers", "--pmu", "--pmu-format=json"];
    let outputs =
        ["--profile-output=on.pb.gz", "--offcpu-output=off.pb.gz", "--pmu-output=pmu.json"];
    let waits = format!("{} 2", build::waits().display());
    let ran = namespace.record(
        directory.path(),
        &[&all[..], &outputs, &["--", "sh", "-c", &format!("exec {waits}")]].concat(),
    );
    let said = ran.succeeded().stdout;
    let profile = Pprof::read(&at("off.pb.gz"));
    for function in ["in_sleep", "in_futex", "in_pipe", "in_epoll"] {
        let line = said.lines().find(|line| line.starts_with(&format!("{function} "))).unwrap();
        let waited_ns: u64 = line.split(' ').nth(1).unwrap().parse().unwrap();
        let through = profile.samples.iter().filter(|it| profile.functions(it).contains(&function));
        let recorded_ns: u64 = through.map(|it| it.values[1] + it.values[3]).sum();
        assert_near(function, recorded_ns, waited_ns, 20, 10_000_000);
    }
    let of_all = pids(&profile);
    let (pid, host_pid) = *of_all.first().unwrap();
    assert!(of_all.len() == 1 && host_pid.is_some_and(|host_pid| host_pid > pid), "{of_all:?}");
    let pmu: serde_json::Value =
        serde_json::from_slice(&std::fs::read(at("pmu.json")).unwrap()).unwrap();
    let process =
        pmu["processes"].as_array().unwrap().iter().find(|it| it["comm"] == "waits").unwrap();
    // The kernel takes the number of a thread before it leaves its CPU for the last time.
    let exited = process["switches"]["exited"].as_u64().unwrap();
    assert!(exited > 10, "{exited} threads ended: {process}");
    assert_eq!((&process["pid"], &process["host_pid"]), (&pid.into(), &host_pid.unwrap().into()));
}

#[test]
fn the_whole_namespace_is_sampled_and_what_is_outside_is_counted() {
    if !privileged() {
        return;
    }
    // Programs outside begin and end all the time.
    let mut outside = Command::new("sh");
    let _outside = Running::start(outside.args(["-c", "echo ready; while :; do /bin/true; done"]));
    let program = format!("{0} & unshare --pid --fork --mount-proc {0}", work());
    let namespace = Namespace::start(1, &program);
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let more = ["--offcpu", "--offcpu-wakers", "--pmu", "--per-pid", "--pmu-format=json"];
    let outputs = ["--offcpu-output=off.pb.gz", "--pmu-output=pmu.json"];
    for (source, more) in
        [("--source=bpf", [&more[..], &outputs].concat()), ("--source=perf", Vec::new())]
    {
        let all = ["--all", "--profile", "--duration=2s", source];
        let outputs = ["--profile-output=all.pb.gz", "--capture=all.stackwire"];
        namespace.record(directory.path(), &[&all[..], &outputs, &more].concat()).succeeded();
        let said = report(&at("all.stackwire"));
        assert!(said.contains("of processes outside the collector's pid namespace"), "{said}");
        let profile = Pprof::read(&at("all.pb.gz"));
        // Both programs, that of the namespace below among them, each with its number here.
        let works = profile.samples.iter().filter(|sample| sample.labels["comm"] == "work");
        let found: BTreeSet<&String> = works.map(|sample| &sample.labels["pid"]).collect();
        assert_eq!(found.len(), 2, "{source}: {found:?}");
        assert!(profile.samples.iter().all(|sample| sample.labels["comm"] != "true"));
        std::fs::remove_file(at("all.stackwire")).unwrap();
    }
    let pmu: serde_json::Value =
        serde_json::from_slice(&std::fs::read(at("pmu.json")).unwrap()).unwrap();
    let processes = pmu["processes"].as_array().unwrap();
    assert!(processes.iter().all(|it| it["pid"] != 0 && it["comm"] != "true"), "{processes:?}");
    assert_eq!(processes.iter().filter(|it| it["comm"] == "work").count(), 2);
    assert!(pmu["others"].is_null(), "{pmu}");
    let waits = Pprof::read(&at("off.pb.gz"));
    assert!(waits.samples.iter().all(|sample| sample.labels["pid"] != "0"));
}

#[test]
fn equal_pids_of_two_namespaces_come_apart() {
    if !privileged() {
        return;
    }
    let both = [Namespace::start(1, &work()), Namespace::start(1, &work())];
    assert_eq!(both[0].pid, both[1].pid);
    let directory = tempfile::tempdir().unwrap();
    for (namespace, capture) in both.iter().zip(["a.stackwire", "b.stackwire"]) {
        let (pid, capture) = (format!("--pid={}", namespace.pid), format!("--capture={capture}"));
        let arguments = ["--profile", "--duration=1s", &pid, &capture];
        namespace.record(directory.path(), &arguments).succeeded();
    }
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["resolve", "a.stackwire", "b.stackwire"]);
    Ran::of(command.args(["-o", "both.pb.gz"])).succeeded();
    let merged = pids(&Pprof::read(&directory.path().join("both.pb.gz")));
    let expected = both.each_ref().map(|it| (it.pid, Some(it.host_pid)));
    assert_eq!(merged, expected.into());
}

#[test]
fn a_proc_of_another_namespace_is_refused() {
    if !privileged() {
        return;
    }
    let namespace = Namespace::start(1, &work());
    let pid = format!("--pid={}", namespace.pid);
    // The namespace without its /proc: pids there are the host's.
    let mut command = namespace.enter(&["--pid"], binary("stackwire"));
    Ran::of(command.args(["record", "--profile", &pid]))
        .failed(1, "/proc is that of another pid namespace");
    let mut command = namespace.enter(&["--pid"], binary("stackwire-collector"));
    Ran::of(command.args(["--all", "--duration=1s", "--output=/dev/null"]))
        .failed(1, "/proc is that of another pid namespace");
}
