//! Processes that put whatever they like into their registers, stacks, mappings and names. Each
//! costs at most its own samples.

use std::process::Command;

use crate::support::server::{Server, profiles};
use crate::support::{Pprof, Ran, Running, binary, build, privileged, report, stackwire};

/// Ways of `hostile.c`.
const WAYS: [&str; 13] = [
    "kernel",
    "top",
    "vsyscall",
    "null",
    "int80",
    "zero",
    "ones",
    "half",
    "kernel_stack",
    "far",
    "name",
    "many",
    "leader",
];

fn start() -> (Vec<Running>, Running) {
    let hostile = WAYS.iter().map(|way| Running::start(Command::new(build::hostile()).arg(way)));
    (hostile.collect(), Running::start(Command::new(build::work()).args(["plain", "120"])))
}

/// The honest one beside them is all there, and so are they.
#[track_caller]
fn assert_honest(profile: &Pprof, honest: u32, hostile: &[Running]) {
    let samples = |pid: u32| -> u64 {
        let of = profile.samples.iter().filter(|sample| sample.labels["pid"] == pid.to_string());
        of.map(|sample| sample.count).sum()
    };
    // Shares of the three say little in as few samples as it gets beside all the others.
    let works =
        |functions: Vec<&str>| functions.iter().any(|it| ["alpha", "beta", "gamma_"].contains(it));
    let named = profile.samples.iter().filter(|sample| works(profile.functions(sample)));
    let named: u64 = named.map(|sample| sample.count).sum();
    let all = samples(honest);
    assert!(named > 20 && named * 10 > all * 9, "{named} of {all} samples of the honest are named");
    for (way, process) in WAYS.iter().zip(hostile) {
        assert!(samples(process.pid()) > 0, "{way}: no sample");
    }
}

#[test]
fn hostile_processes_cost_their_own_samples_alone_from_a_file() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (hostile, honest) = start();
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args(["--duration=4s", "--sample-rate=997", "--epoch=500ms", "--output"]);
    collector.arg(at("x.stackwire")).arg(format!("--pid={}", honest.pid()));
    collector.args(hostile.iter().map(|process| format!("--pid={}", process.pid())));
    Ran::of(&mut collector).succeeded();
    let report = report(&at("x.stackwire"));
    stackwire([
        "resolve".as_ref(),
        at("x.stackwire").as_os_str(),
        "-o".as_ref(),
        at("x.pb.gz").as_os_str(),
    ])
    .succeeded();
    let profile = Pprof::read(&at("x.pb.gz"));
    let taken = profile.count();
    let sum = format!("samples taken {taken} = {taken} in the profile + 0 lost");
    assert!(report.contains(&sum) && !report.contains("left out"), "{report}");
    assert_honest(&profile, honest.pid(), &hostile);
}

#[test]
fn hostile_processes_cost_their_own_samples_alone_live() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("x.pb.gz");
    let (hostile, honest) = start();
    let output_ = format!("--profile-output={}", output.display());
    stackwire(["record", "--profile", "-a", "--duration=4s", "--sample-rate=997", &output_])
        .succeeded();
    assert_honest(&Pprof::read(&output), honest.pid(), &hostile);
}

#[test]
fn hostile_processes_cost_their_own_samples_alone_through_a_server() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // Names are looked for beside processes that keep all CPUs busy.
    let server = Server::start(directory.path(), "127.0.0.1:0", &["--drain-timeout=60s"]);
    let (hostile, honest) = start();
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args(["-a", "--duration=4s", "--sample-rate=997", "--epoch=500ms"]);
    Ran::of(collector.arg(format!("--to=http://{}", server.address))).succeeded();
    server.terminate();
    let written = profiles(directory.path());
    assert_eq!(written.len(), 1, "{written:?}");
    assert_honest(&Pprof::read(&written[0]), honest.pid(), &hostile);
}
