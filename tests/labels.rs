//! Whose samples are: containers, pods, services, by real cgroups.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::support::cgroup::Cgroup;
use crate::support::{Pprof, Ran, Running, binary, build, can, privileged, stackwire};

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

/// A field of protobuf that has a length.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let length = u8::try_from(content.len()).ok().filter(|length| *length < 128).unwrap();
    [&[number << 3 | 2, length], content].concat()
}

#[test]
fn processes_say_themselves_whose_they_are() {
    if !privileged() {
        return;
    }
    let attribute = |key: &str, value: &str| {
        let value = field(2, &field(1, value.as_bytes()));
        field(1, &[field(1, key.as_bytes()), value].concat())
    };
    let attributes = [attribute("service.name", "shop"), attribute("service.version", "7")];
    let hex: String =
        field(1, &attributes.concat()).iter().map(|byte| format!("{byte:02x}")).collect();
    let context = |how: &str| {
        let mut command = Command::new(build::context());
        command.args([how, &hex]).env("OTEL_SERVICE_NAME", "of the environment");
        command
    };
    let mut of_environment = Command::new(build::work());
    of_environment.args(["plain", "60"]).env("OTEL_SERVICE_NAME", "cart");
    let attributes = "service.namespace=eu,deployment.environment.name=test%2C2,team=blue";
    of_environment.env("OTEL_RESOURCE_ATTRIBUTES", attributes);
    // Of another user, who may not be traced.
    let mut of_nobody = Command::new("setpriv");
    of_nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(build::context());
    of_nobody.args(["memfd", &hex]);
    let mut silent = Command::new(build::work());
    silent.args(["plain", "60"]).env("OTEL_SERVICE_NAMES", "no");
    let shop = &[("service_name", "shop"), ("service_version", "7")][..];
    let cart = &[
        ("service_name", "cart"),
        ("service_namespace", "eu"),
        ("deployment_environment_name", "test,2"),
    ][..];
    let running =
        [(context("memfd"), shop), (of_nobody, shop), (of_environment, cart), (silent, &[])];
    let running = running.map(|(mut command, labels)| (Running::start(&mut command), labels));
    let mut running = Vec::from(running);
    // Named by the process itself, where the kernel can (CONFIG_ANON_VMA_NAME).
    for how in ["anon", "shared"] {
        let text =
            Ran::of(Command::new("timeout").arg("1").arg(build::context()).args([how, &hex]));
        match text.stdout.trim() {
            "ready" => running.push((Running::start(&mut context(how)), shop)),
            no_name => assert_eq!(no_name, "this kernel names no mappings"),
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let pids: Vec<String> =
        running.iter().map(|(running, _)| format!("--pid={}", running.pid())).collect();
    for source in ["--source=bpf", "--source=perf"] {
        let mut command = Command::new(binary("stackwire"));
        command.current_dir(directory.path()).args([
            "record",
            "--profile",
            "--duration=3s",
            source,
        ]);
        command.args(&pids).args(["--sample-rate=499", "--profile-output=x.pb.gz"]);
        Ran::of(&mut command).succeeded();
        let profile = Pprof::read(&directory.path().join("x.pb.gz"));
        for (running, expected) in &running {
            let pid = running.pid().to_string();
            let of_it = || profile.samples.iter().filter(|sample| sample.labels["pid"] == pid);
            assert!(of_it().count() > 0, "{pid} was not sampled");
            for sample in of_it() {
                let said = sample.labels.iter().filter(|(key, _)| {
                    key.starts_with("service_") || key.starts_with("deployment_")
                });
                let said = said.map(|(key, value)| (key.as_str(), value.as_str()));
                let expected = expected.iter().copied();
                assert_eq!(said.collect::<BTreeMap<_, _>>(), expected.collect(), "{source}");
            }
        }
    }
}
