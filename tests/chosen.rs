//! Processes chosen by what they are: by name, container and pod, those that start later among
//! them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::support::cgroup::Cgroup;
use crate::support::{Pprof, Ran, Running, binary, build, can, privileged, report, stackwire};

/// Pids of the samples, and of the processes that `--pmu` lists.
fn recorded(directory: &Path, arguments: &[&str]) -> [BTreeSet<u32>; 3] {
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory).args([
        "record",
        "--profile",
        "--offcpu",
        "--pmu",
        "--duration=2s",
    ]);
    command.args(["--sample-rate=499", "--profile-output=on.pb.gz", "--offcpu-output=off.pb.gz"]);
    command.arg("--offcpu-states=sleep,disk,preempted");
    command.args(["--pmu-format=json", "--pmu-output=pmu.json", "--capture=out.stackwire"]);
    let ran = Ran::of(command.args(arguments)).succeeded();
    assert!(ran.stderr.contains(", 0 lost,"), "{}", ran.stderr);
    let sampled = |name: &str| {
        let path = directory.join(name);
        // One that burns CPU time alone may never wait.
        if !path.exists() {
            return BTreeSet::new();
        }
        let profile = Pprof::read(&path);
        let pids = profile.samples.iter().map(|sample| sample.labels["pid"].parse().unwrap());
        pids.collect()
    };
    let pmu = std::fs::read(directory.join("pmu.json")).unwrap();
    let pmu: serde_json::Value = serde_json::from_slice(&pmu).unwrap();
    let pids = pmu["processes"].as_array().unwrap().iter();
    let pids = pids.map(|process| process["pid"].as_u64().unwrap() as u32);
    [sampled("on.pb.gz"), sampled("off.pb.gz"), pids.collect()]
}

#[test]
fn processes_are_chosen_by_name_container_and_pod() {
    let unified = Path::new("/sys/fs/cgroup/unified").is_dir();
    if !privileged() || !can("cgroup v2 at /sys/fs/cgroup/unified", unified) {
        return;
    }
    let [first, second, third] = [1, 2, 3].map(|n| format!("{n:02x}{:062x}", 0xbeef));
    let uid = "7e0a1c5e-6f4e-4b6b-9a53-5c1f0d2f7a12";
    let slice = format!("/kubepods.slice/kubepods-pod{}.slice", uid.replace('-', "_"));
    let in_pod = |id: &str| Cgroup::new("unified", &format!("{slice}/cri-containerd-{id}.scope"));
    let cgroups = [
        in_pod(&first),
        in_pod(&second),
        Cgroup::new("unified", &format!("/docker-{third}.scope")),
    ];
    let directory = tempfile::tempdir().unwrap();
    let [chosen, other] = ["a-chosen-name-of-24-byte", "other"].map(|name| {
        let path = directory.path().join(name);
        std::fs::copy(build::work(), &path).unwrap();
        path
    });
    let start = |cgroup: &Cgroup, program: &Path| {
        // Its threads burn CPU time and sleep.
        Running::start(&mut cgroup.command(&format!("{} plain 60", program.display())))
    };
    let running =
        [start(&cgroups[0], &chosen), start(&cgroups[1], &other), start(&cgroups[2], &chosen)];
    let [of_first, of_second, of_third] = running.each_ref().map(Running::pid);
    let with_cgroup = format!("--cgroup={}", cgroups[0].directory().parent().unwrap().display());
    let comm = "--comm=a-chosen-name-of-24-byte";
    let ways: [(&[&str], &[u32]); 6] = [
        (&[comm], &[of_first, of_third]),
        (&["--comm=other", comm, "--pod", uid], &[of_first, of_second]),
        (&["--container", &first[..6]], &[of_first]),
        (
            &[&format!("--container=containerd://{second}"), "--container", &third],
            &[of_second, of_third],
        ),
        (&["--pod", uid, "--comm=other"], &[of_second]),
        (&[&with_cgroup, comm], &[of_first]),
    ];
    for (arguments, expected) in ways {
        let expected: BTreeSet<u32> = expected.iter().copied().collect();
        let outputs = tempfile::tempdir().unwrap();
        let [sampled, waited, scheduled] = recorded(outputs.path(), arguments);
        assert_eq!(sampled, expected, "{arguments:?}");
        assert!(waited.is_subset(&expected), "{arguments:?}: {waited:?}");
        if !arguments.contains(&with_cgroup.as_str()) {
            assert_eq!(scheduled, expected, "{arguments:?}");
        }
        // The capture says what was chosen.
        let said = report(&outputs.path().join("out.stackwire"));
        assert!(said.contains("only processes "), "{said}");
    }
}

#[test]
fn those_that_start_later_are_chosen_from_their_first_moment() {
    let unified = Path::new("/sys/fs/cgroup/unified").is_dir();
    if !privileged() || !can("cgroup v2 at /sys/fs/cgroup/unified", unified) {
        return;
    }
    let id = format!("{:064x}", 0xfeed);
    let directory = tempfile::tempdir().unwrap();
    let late = directory.path().join("late-one");
    std::fs::copy(build::work(), &late).unwrap();
    let container = format!("--container={id}");
    for (how, source) in [
        ("--comm=late-one", "--source=bpf"),
        (&container, "--source=bpf"),
        ("--comm=late-one", "--source=perf"),
        (&container, "--source=perf"),
    ] {
        let mut command = Command::new(binary("stackwire"));
        command.current_dir(directory.path()).args([
            "record",
            "--profile",
            "--duration=4s",
            how,
            source,
        ]);
        let recording = command.args(["-F997", "--profile-output=late.pb.gz"]).spawn().unwrap();
        let mut recording = Running(recording);
        std::thread::sleep(Duration::from_millis(1500));
        let cgroup = Cgroup::new("unified", &format!("/docker-{id}.scope"));
        let mut command = cgroup.command(&format!("{} plain 1", late.display()));
        assert!(command.output().unwrap().status.success());
        assert!(recording.0.wait().unwrap().success());
        let profile = Pprof::read(&directory.path().join("late.pb.gz"));
        let said = |label: &str| -> BTreeSet<_> {
            profile.samples.iter().map(|sample| sample.labels[label].clone()).collect()
        };
        // The process in the container was a copy of this one and a shell before.
        let chosen = if how.starts_with("--container") { "pid" } else { "comm" };
        assert_eq!(said(chosen).len(), 1, "{how}: {:?} {:?}", said("pid"), said("comm"));
        let of_it = profile.samples.iter().filter(|sample| sample.labels["comm"] == "late-one");
        let sampled_ns: u64 = of_it.map(|sample| sample.values[1]).sum();
        assert!(sampled_ns > 900_000_000, "{how}: {sampled_ns} of 1 s");
    }
}

#[test]
fn who_waits_all_the_time_is_chosen_by_its_container() {
    let unified = Path::new("/sys/fs/cgroup/unified").is_dir();
    if !privileged() || !can("cgroup v2 at /sys/fs/cgroup/unified", unified) {
        return;
    }
    let id = format!("{:064x}", 0xabcdef);
    let cgroup = Cgroup::new("unified", &format!("/docker-{id}.scope"));
    let script = "sh -c 'echo ready; exec sleep 60'";
    let inside = Running::start(&mut cgroup.command(script));
    let _outside = Running::start(Command::new("sh").args(["-c", "echo ready; exec sleep 60"]));
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["record", "--offcpu", "--duration=1s"]);
    command.args(["--container", &id[50..]]);
    Ran::of(&mut command).failed(1, "if there is one");
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["record", "--offcpu", "--duration=1s"]);
    Ran::of(command.args(["--container", &id, "--offcpu-output=off.pb.gz"])).succeeded();
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    let pids = profile.samples.iter().map(|sample| sample.labels["pid"].clone());
    assert_eq!(pids.collect::<BTreeSet<_>>(), [inside.pid().to_string()].into());
    let waited_ns: u64 = profile.samples.iter().map(|sample| sample.values[1]).sum();
    assert!(waited_ns > 900_000_000, "{waited_ns} of 1 s");
}

#[test]
fn what_is_no_choice_says_so() {
    for (arguments, said) in [
        (&["--container=nginx"][..], "is no id of a container"),
        (&["--pod=web-0"], "is no uid of a pod"),
        (&["--comm=x", "--pid=1"], "use --pid PID for one process"),
        (&["--comm=x", "-a"], "or -a for all"),
        (&["--comm=x", "--follow"], "leave out --follow"),
        (&["--comm=x", "--", "true"], "leave out what chooses processes"),
    ] {
        let all = ["record", "--profile"].iter().chain(arguments).copied();
        stackwire(all).failed(2, said);
    }
    if !privileged() {
        return;
    }
    let nobody = ["record", "--profile", "--duration=1s", "--comm=no-such-name"];
    stackwire(nobody).failed(1, "each process called no-such-name, if there is one, used no CPU");
}
