//! What `doctor` says of a host, and of processes.

use std::process::{Command, Stdio};

use crate::support::interpreters::{javas, pythons};
use crate::support::nobody::{NOBODY, public_binaries};
use crate::support::{Ran, Running, build, go, of_debian, privileged, stackwire};

#[test]
fn doctor_tells_what_works() {
    let ran = stackwire(["doctor"]);
    for what in ["kernel ", "BTF", "lockdown", "kptr_restrict", "max_sample_rate", "collector"] {
        assert!(ran.stdout.contains(what), "no word on {what}: {}", ran.stdout);
    }
    stackwire(["doctor", "--collector=/nonexistent"]).failed(1, "checks prevent profiling");
}

/// Each line that says `ok` or `warn`, with the advice below it.
#[track_caller]
fn said_of(pid: u32) -> Vec<String> {
    let ran = stackwire(["doctor", "--pid", &pid.to_string()]).succeeded();
    let mut said: Vec<String> = Vec::new();
    for line in ran.stdout.lines() {
        match (line.strip_prefix("      "), said.last_mut()) {
            (Some(advice), Some(last)) => *last = format!("{last}: {advice}"),
            _ => said.push(line.to_owned()),
        }
    }
    said
}

#[track_caller]
fn assert_said(command: &mut Command, expected: &[&str]) {
    let running = Running::start(command);
    let said = said_of(running.pid());
    for line in expected {
        let (level, text) = line.split_once(' ').unwrap();
        let is_it = |it: &&String| it.starts_with(level) && it.contains(text);
        assert!(said.iter().find(is_it).is_some(), "{command:?}: no {line:?} in {said:#?}");
    }
}

#[test]
fn it_says_what_to_expect_of_a_process() {
    let python = "import time\nprint('ready', flush=True)\ntime.sleep(60)";
    for (name, mut command) in pythons() {
        let minor = name.strip_prefix("python 3.").and_then(|rest| rest.split('.').next());
        let minor: u32 = minor.map_or(13, |minor| minor.parse().unwrap());
        command.args(["-c", python]);
        let names = if minor < 8 { "warn Python 3.12 or later" } else { "ok of Python functions" };
        assert_said(&mut command, &[names, "ok stacks: whole"]);
    }
    let node = ["-e", "console.log('ready'); setTimeout(() => {}, 60000)"];
    let expected = ["ok of JavaScript functions", "ok stacks: whole"];
    assert_said(Command::new("node").args(node), &expected);
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("Ready.java");
    let java = "class Ready { public static void main(String[] a) throws Exception { System.out.println(\"ready\"); Thread.sleep(60000); } }";
    std::fs::write(&source, java).unwrap();
    for program in javas() {
        let run = || Command::new(&program);
        let expected = ["warn jcmd", "warn -XX:+PreserveFramePointer"];
        assert_said(run().arg(&source), &expected);
        let option = "-XX:+PreserveFramePointer";
        assert_said(run().args([option]).arg(&source), &["ok stacks: whole"]);
        let mut of_environment = run();
        of_environment.env("JAVA_TOOL_OPTIONS", option).stderr(Stdio::null());
        assert_said(of_environment.arg(&source), &["ok stacks: whole"]);
    }
    if let Some(mut ruby) = of_debian("bookworm", "ruby3.1") {
        ruby.args(["--disable-gems", "-e", "puts 'ready'; STDOUT.flush; sleep 60"]);
        assert_said(&mut ruby, &["ok of Ruby methods", "ok stacks: whole"]);
    }
    // The others are a library in a program of C and what loads a plugin.
    for (name, running) in go::releases()[0].whole().take(4) {
        let said = said_of(running.pid());
        assert!(said.iter().any(|line| line.contains("Go's own table")), "{name}: {said:?}");
    }
    let work = ["plain", "60"];
    assert_said(Command::new(build::work()).args(work), &["ok with lines and inlined functions"]);
    assert_said(Command::new(build::stripped_work()).args(work), &["warn it is stripped"]);
}

#[test]
fn what_it_cannot_look_at_it_says() {
    stackwire(["doctor", "--pid=4000001"]).failed(1, "checks prevent profiling");
    assert!(stackwire(["doctor", "--pid=4000001"]).stdout.contains("there is no such process"));
    if !privileged() {
        return;
    }
    // kthreadd.
    assert!(stackwire(["doctor", "--pid=2"]).stdout.contains("it runs no program"));
    let running = Running::start(Command::new(build::work()).args(["plain", "60"]));
    let binaries = public_binaries(None);
    let mut command = Command::new("setpriv");
    command.args(NOBODY).arg(binaries.path().join("stackwire"));
    let ran = Ran::of(command.args(["doctor", "--pid", &running.pid().to_string()]));
    assert!(ran.stdout.contains("permission denied"), "{}", ran.stdout);
    assert_eq!(ran.code, Some(1));
}
