//! Whose samples are: containers, pods, services, by real cgroups.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Pprof, Ran, Running, binary, build, can, privileged, stackwire};

/// A cgroup of ours, removed in the end.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(hierarchy: &str, path: &str) -> Self {
        let directory =
            Path::new("/sys/fs/cgroup").join(hierarchy).join(path.trim_start_matches('/'));
        std::fs::create_dir_all(&directory).unwrap();
        Self(directory)
    }

    /// A command that runs there, under the root elsewhere.
    fn command(&self, program: &str) -> Command {
        let script = format!(
            "for all in /sys/fs/cgroup/*/cgroup.procs; do echo $$ >$all; done 2>/dev/null; echo $$ >{}/cgroup.procs; exec {program}",
            self.0.display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        command
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let mut directory = self.0.as_path();
        // Up to the hierarchy itself, which stays.
        while std::fs::remove_dir(directory).is_ok() {
            directory = directory.parent().unwrap();
        }
    }
}

#[test]
fn samples_say_whose_container_they_are_of() {
    let hierarchies =
        ["memory", "unified"].map(|name| Path::new("/sys/fs/cgroup").join(name).is_dir());
    if !privileged() || !can("cgroup v1 and v2 below /sys/fs/cgroup", hierarchies == [true, true]) {
        return;
    }
    let ids: Vec<String> = (1..6).map(|n| format!("{n:064x}")).collect();
    let uid = "2c9f1c5e-6f4e-4b6b-9a53-5c1f0d2f7a11";
    let slice = format!("/kubepods.slice/kubepods-pod{}.slice", uid.replace('-', "_"));
    let places = [
        ("memory", format!("/kubepods/burstable/pod{uid}/{}", ids[0]), Some(&ids[0]), Some(uid)),
        ("memory", format!("/docker/{}", ids[1]), Some(&ids[1]), None),
        ("unified", format!("{slice}/cri-containerd-{}.scope", ids[2]), Some(&ids[2]), Some(uid)),
        ("unified", "/system.slice/our.service".to_owned(), None, None),
    ];
    let work = build::work().to_str().unwrap();
    let cgroups = places.each_ref().map(|(hierarchy, path, ..)| Cgroup::new(hierarchy, path));
    let running =
        cgroups.each_ref().map(|it| Running::start(&mut it.command(&format!("{work} plain 60"))));
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("x.pb.gz");
    let profile_output = format!("--profile-output={}", output.display());
    let recording = std::thread::spawn(move || {
        stackwire([
            "record",
            "--profile",
            "--all",
            "--duration=3s",
            "--sample-rate=997",
            &profile_output,
        ])
    });
    // Processes that are gone, cgroup and all, long before anybody asks. On a busy machine sampling
    // may begin late.
    while !recording.is_finished() {
        let short = Cgroup::new("memory", &format!("/docker/{}", ids[4]));
        assert!(short.command(&format!("{work} plain 0.05")).output().unwrap().status.success());
        drop(short);
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    recording.join().unwrap().succeeded();
    let profile = Pprof::read(&output);
    let labels_of = |pid: u32| {
        let of = profile
            .samples
            .iter()
            .find(|sample| sample.labels.get("pid") == Some(&pid.to_string()));
        &of.unwrap_or_else(|| panic!("no sample of {pid}")).labels
    };
    for (running, (_, path, container, pod)) in running.iter().zip(&places) {
        let labels = labels_of(running.pid());
        assert_eq!(labels["cgroup_path"], *path);
        assert_eq!(labels.get("container_id"), *container, "{labels:?}");
        assert_eq!(labels.get("pod_uid").map(String::as_str), *pod, "{labels:?}");
        assert_eq!(labels["comm"], "work", "equal names, containers of their own");
    }
    let of_short =
        profile.samples.iter().filter(|sample| sample.labels.get("container_id") == Some(&ids[4]));
    assert!(
        of_short.map(|sample| sample.count).sum::<u64>() >= 3,
        "the processes of 50 ms have no container"
    );
}

#[test]
fn names_of_the_own_pod_come_from_the_environment() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("x.pb.gz");
    let running = Running::start(Command::new(build::work()).args(["plain", "60"]));
    let mut command = Command::new(binary("stackwire"));
    command.args([
        "record",
        "--profile",
        "--duration=1s",
        "--sample-rate=499",
        &format!("--pid={}", running.pid()),
    ]);
    command.arg("--profile-output").arg(&output);
    command.envs([("POD_NAME", "web-7"), ("POD_NAMESPACE", "shop"), ("CONTAINER_NAME", "app")]);
    Ran::of(&mut command).succeeded();
    let profile = Pprof::read(&output);
    for (key, value) in [("pod_name", "web-7"), ("namespace", "shop"), ("container_name", "app")] {
        assert!(profile.samples.iter().all(|sample| sample.labels[key] == value), "{key}");
    }
}
