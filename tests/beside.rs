//! Waits of servers under load beside what `offcputime` says of the same waits: both watch the
//! whole host while the load begins and ends. Both take a wait from when the thread leaves its CPU
//! until it is given one again.
//!
//! Not beside `perf sched timehist`: on the kernel these tests were written on, perf's own trace
//! lacks three of four switches from idle on one of the CPUs, with no other profiler running.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::time::Duration;

use crate::support::nginx::Nginx;
use crate::support::postgres::Postgres;
use crate::support::pprof::Sample;
use crate::support::{Pprof, Running, alone, binary, of_debian, privileged, run};

/// How long both watch. The load takes less.
const SECONDS: &str = "15";

/// Nanoseconds that threads waited, by thread id and by the system call they waited in. Empty where
/// they were in none.
type Waited = BTreeMap<(u64, String), u64>;

/// What both say of this load.
struct Watched {
    ours: Waited,
    /// Threads of the server that serve.
    threads: BTreeSet<u64>,
    offcputime: Waited,
}

/// `serves`: whether a sample is of a thread that serves.
fn watched(serves: impl Fn(&Pprof, &Sample) -> bool, load: impl FnOnce()) -> Watched {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let said = std::fs::File::create(at("offcputime.txt")).unwrap();
    let mut ours = Command::new(binary("stackwire"));
    ours.current_dir(directory.path()).args(["record", "-a", "--offcpu", "--no-capture"]);
    ours.args(["--offcpu-states=sleep,disk,stopped,preempted", "--offcpu-threshold=0"]);
    ours.arg("--offcpu-output=off.pb.gz");
    ours.arg(format!("--duration={SECONDS}s"));
    let mut offcputime = Command::new("/usr/sbin/offcputime");
    offcputime.args(["--stack-storage-size=262144", SECONDS]).stdout(said);
    let mut ours = Running(ours.spawn().unwrap());
    std::thread::sleep(Duration::from_secs(2));
    let mut offcputime = Running(offcputime.spawn().unwrap());
    // Until both watch.
    std::thread::sleep(Duration::from_secs(4));
    load();
    for running in [&mut ours, &mut offcputime] {
        assert!(running.0.wait().unwrap().success());
    }
    let profile = Pprof::read(&at("off.pb.gz"));
    let mut found = Watched {
        ours: Waited::new(),
        threads: BTreeSet::new(),
        offcputime: of_offcputime(&std::fs::read_to_string(at("offcputime.txt")).unwrap()),
    };
    for sample in &profile.samples {
        let tid = sample.labels["tid"].parse().unwrap();
        // The other does not know waits that began before, or go on.
        if sample.labels.contains_key("open") {
            continue;
        }
        if serves(&profile, sample) {
            found.threads.insert(tid);
        }
        let call = call(&profile.functions(sample));
        *found.ours.entry((tid, call)).or_default() += sample.values[1] + sample.values[3];
    }
    found
}

/// The system call among these functions.
fn call(functions: &[&str]) -> String {
    let call = functions.iter().find(|name| name.starts_with("__x64_sys_"));
    call.copied().unwrap_or_default().to_owned()
}

/// Stacks, a function a line; then `- name (tid)` and microseconds.
fn of_offcputime(text: &str) -> Waited {
    let mut waited = Waited::new();
    let (mut functions, mut tid) = (Vec::new(), None);
    for line in text.lines().map(str::trim) {
        let name = line.strip_prefix("- ").and_then(|name| name.strip_suffix(')'));
        if let Some((_, number)) = name.and_then(|name| name.rsplit_once('(')) {
            tid = Some(number.parse().unwrap());
        } else if let Some(tid) = tid.take() {
            let micros: u64 = line.parse().unwrap();
            *waited.entry((tid, call(&functions))).or_default() += micros * 1000;
            functions.clear();
        } else if !line.is_empty() {
            functions.push(line);
        }
    }
    waited
}

/// Each within 3 % of the other, by thread, and by system call where threads wait a tenth of the
/// time.
fn assert_agree(found: &Watched) {
    let Watched { ours, threads, offcputime } = found;
    let of = |all: &Waited, tid: u64| -> u64 {
        all.iter().filter(|((of, _), _)| *of == tid).map(|(_, time)| time).sum()
    };
    // Of the others there is too little to compare.
    let busy = threads.iter().copied().filter(|&tid| of(offcputime, tid) > 200_000_000);
    let busy: Vec<u64> = busy.collect();
    assert!(!busy.is_empty(), "{busy:?} of {threads:?}");
    let (mut calls, mut others) = (BTreeMap::new(), BTreeMap::new());
    for tid in busy {
        let (own, other) = (of(ours, tid), of(offcputime, tid));
        println!("{tid}: {own} ours, {other} offcputime");
        near(&format!("thread {tid}"), own, other);
        for (all, sums) in [(ours, &mut calls), (offcputime, &mut others)] {
            for ((_, call), time) in all.iter().filter(|((of, _), _)| *of == tid) {
                *sums.entry(call.as_str()).or_insert(0u64) += time;
            }
        }
    }
    let all: u64 = calls.values().sum();
    println!("{calls:?} ours, {others:?} offcputime");
    for (call, time) in calls.into_iter().filter(|(_, time)| time * 10 > all) {
        near(call, time, others[call]);
    }
}

#[track_caller]
fn near(what: &str, one: u64, other: u64) {
    assert!(one.abs_diff(other) * 100 <= other * 3, "{what}: {one} and {other}");
}

#[test]
fn waits_of_postgresql_are_those_that_others_see() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let Some(postgres) = Postgres::start() else { return };
    assert_agree(&watched(
        |profile, sample| profile.functions(sample).contains(&"PostgresMain"),
        || postgres.transactions(300),
    ));
}

#[test]
fn waits_of_nginx_are_those_that_others_see() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let Some(nginx) = of_debian("bookworm", "nginx") else { return };
    let (nginx, file) = Nginx::idle(nginx);
    let workers = nginx.workers();
    // Milliseconds between two requests of a connection.
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("delay.lua");
    std::fs::write(&script, "function delay() return 5 end").unwrap();
    assert_agree(&watched(
        |_, sample| workers.contains(&sample.labels["pid"]),
        || {
            let mut wrk = Command::new("wrk");
            wrk.args(["-t", "1", "-c", "8", "-d", "4", "-s"]).arg(&script).arg(&file);
            run(&mut wrk);
        },
    ));
}
