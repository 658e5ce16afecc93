//! Events by perf's names: software, hardware, raw, tracepoints with filters, beside perf.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::support::build::spread;
use crate::support::{Pprof, Ran, Running, binary, privileged, run, stackwire};

/// Sleeps 400 times, each for a millisecond.
const SLEEPS: &str = "import time\nfor _ in range(400): time.sleep(0.001)";
/// Likewise; prints how often it was preempted.
const SLEEPS_AND_SAYS: &str = "import resource, time\nfor _ in range(400): time.sleep(0.001)\n\
    print(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)";
/// Touches 3,000 pages.
const TOUCHES: &str =
    "import mmap\nm = mmap.mmap(-1, 3000 * 4096)\nfor i in range(3000): m[i * 4096] = 1";

/// Runs a command where tracefs is mounted.
fn with_tracefs(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    // Other tools mount it and leave it there.
    let mount = "[ -d /sys/kernel/tracing/events ] || mount -t tracefs none /sys/kernel/tracing; exec \"$@\"";
    command.args(["-m", "sh", "-c", mount, "sh"]).arg(program).args(arguments);
    command
}

/// Records a Python script with these options; how many events there were, those among them that
/// were lost and counted, and what the script says.
#[track_caller]
fn recorded(options: &[&str], script: &str) -> (u64, u64) {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("x.pb.gz");
    let output_option = format!("--profile-output={}", output.display());
    let fixed = ["record", "--profile", &output_option];
    let command = ["--", "/usr/bin/python3", "-S", "-c", script];
    let arguments = [&fixed[..], options, &command].concat();
    let ran = Ran::of(&mut with_tracefs(&binary("stackwire"), &arguments)).succeeded();
    let lost = ran.stderr.split(" lost").next().unwrap().rsplit(' ').next().unwrap();
    (Pprof::read(&output).count() + lost.parse::<u64>().unwrap(), said(&ran.stdout))
}

/// The number a script printed, if it did.
fn said(out: &str) -> u64 {
    out.lines().find_map(|line| line.parse().ok()).unwrap_or(0)
}

/// How many of an event perf records of it, and what the script says.
fn perfs(event: &str, script: &str) -> (u64, u64) {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("perf.data");
    let data = data.to_str().unwrap();
    let perf = Path::new("/usr/bin/perf");
    // `-B`: perf 6.1 sometimes crashes where it collects build-ids.
    let record = ["record", "-B", "-q", "-c", "1", "-m", "4096", "-e", event, "-o", data, "--"];
    let python = ["/usr/bin/python3", "-S", "-c", script];
    let (out, _) = run(&mut with_tracefs(perf, &[&record[..], &python].concat()));
    let (text, _) = run(&mut with_tracefs(perf, &["script", "-i", data, "-F", "event"]));
    (text.lines().filter(|line| line.contains(event)).count() as u64, said(&out))
}

#[test]
fn each_event_is_sampled_as_often_as_by_perf() {
    if !privileged() {
        return;
    }
    for (event, script) in [
        ("sched:sched_switch", SLEEPS_AND_SAYS),
        ("context-switches", SLEEPS_AND_SAYS),
        ("page-faults", TOUCHES),
        ("minor-faults", TOUCHES),
        ("syscalls:sys_enter_clock_nanosleep", SLEEPS),
    ] {
        let (theirs, preempted) = perfs(event, script);
        for source in ["auto", "perf"] {
            let source_option = format!("--source={source}");
            let options = ["--count=1", "--event", event, &source_option];
            let (ours, also_preempted) = recorded(&options, script);
            eprintln!("{event}: {ours} samples, perf {theirs}");
            // Of Python's start and end some differ from run to run, and so does how often it is
            // preempted.
            let apart = (ours + preempted).abs_diff(theirs + also_preempted);
            assert!(
                theirs > 300 && apart <= theirs / 50 + 12,
                "{event}, {source}: {ours}, {theirs}"
            );
        }
    }
}

#[test]
fn filters_choose_among_occurrences_of_a_tracepoint() {
    if !privileged() {
        return;
    }
    let event = ["--count=1", "--event=sched:sched_switch"];
    let filter = ["--filter", "prev_comm ~ \"python*\" && prev_state != 0"];
    let (found, _) = recorded(&[&event[..], &filter].concat(), SLEEPS);
    assert!((395..450).contains(&found), "{found}");
    let refused = |options: &[&str]| {
        let fixed = ["record", "--profile", "--profile-output=/tmp/never.pb.gz"];
        let command = ["--", "/usr/bin/python3", "-S", "-c", SLEEPS];
        let arguments = [&fixed[..], options, &command].concat();
        Ran::of(&mut with_tracefs(&binary("stackwire"), &arguments))
    };
    refused(&[&event[..], &["--filter", "no_such_field == 1"]].concat())
        .failed(1, "the kernel does not take this filter for sched:sched_switch");
    refused(&["--filter", "prev_pid == 1"]).failed(2, "a filter is of tracepoints");
    refused(&["--event=sched:no_such_event"])
        .failed(1, "this kernel has no tracepoint sched:no_such_event");
    refused(&["--event=sched:sched_switch", "--source=bpf"]).failed(2, "through perf events");
    refused(&["--event=sched:sched_switch", "--offcpu"]).failed(2, "two captures");
    refused(&["--event=cpu-clocks"]).failed(2, "perf knows no event of this name");
    refused(&["--event=cpu-clock", "--count=0"]).failed(2, "--count");
}

/// What stacks a tracepoint is met with, and that perf reads what was written of it.
#[test]
fn a_tracepoint_has_stacks_and_perf_reads_them() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let outputs = [
        format!("--profile-output={}", at("x.pb.gz").display()),
        format!("--perf-data-output={}", at("perf.data").display()),
    ];
    let fixed = ["record", "--profile", "--event=sched:sched_switch", "--count=1"];
    let script = "import time\nfor _ in range(40): time.sleep(0.001)";
    let rest = [&outputs[0], &outputs[1], "--", "/usr/bin/python3", "-S", "-c", script];
    let arguments = [&fixed[..], &rest].concat();
    Ran::of(&mut with_tracefs(&binary("stackwire"), &arguments)).succeeded();
    let profile = Pprof::read(&at("x.pb.gz"));
    assert!(profile.kinds.contains(&"sched:sched_switch/count".to_owned()), "{:?}", profile.kinds);
    let sleeps = profile.samples.iter().filter(|sample| {
        let functions = profile.functions(sample);
        let has = |wanted: &str| functions.iter().any(|function| function.contains(wanted));
        has("schedule") && has("clock_nanosleep") && has("_PyEval_EvalFrameDefault")
    });
    let sleeps: u64 = sleeps.map(|sample| sample.count).sum();
    assert!(sleeps >= 38, "{sleeps} sleeps of 40 have both stacks");
    let data = at("perf.data");
    let (text, _) = run(Command::new("perf").args(["script", "-F", "event,ip", "-i"]).arg(&data));
    assert!(text.matches("sched:sched_switch").count() >= 38, "{text}");
}

#[test]
fn events_of_this_host_are_listed() {
    if !privileged() {
        return;
    }
    let listed = Ran::of(&mut with_tracefs(&binary("stackwire"), &["events"])).succeeded().stdout;
    assert!(
        listed.contains("software events:\n  cpu-clock\n  task-clock\n  page-faults"),
        "{listed}"
    );
    assert!(listed.contains("\n  sched:sched_switch\n"), "{listed}");
    let has_cycles = Path::new("/sys/bus/event_source/devices/cpu").exists();
    assert_eq!(listed.contains("\n  cycles\n"), has_cycles, "{listed}");
    let few = Ran::of(&mut with_tracefs(&binary("stackwire"), &["events", "sched_sw"]));
    let few = few.succeeded().stdout;
    assert!(few.contains("  sched:sched_switch\n") && !few.contains("cpu-clock"), "{few}");
    // Where tracefs is not mounted, what to do.
    if !Path::new("/sys/kernel/tracing/events").exists() {
        let said = stackwire(["events"]).succeeded().stdout;
        assert!(said.contains("mount -t tracefs") || said.contains("sched:sched_switch"), "{said}");
    }
    // A raw event that no hardware here counts.
    let ran = stackwire([
        "record",
        "--all",
        "--duration=1s",
        "--event=r01c2",
        "--profile-output=/tmp/never.pb.gz",
    ]);
    if !has_cycles {
        ran.failed(1, "this machine has no counter for it");
    }
}

/// Counts by event, as `perf stat -j` and ours print them.
fn counts(said: &str) -> BTreeMap<String, f64> {
    let lines = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let count = |line: Value| {
        let value = line["counter-value"].as_str()?.parse().ok()?;
        let event = line["event"].as_str()?;
        Some((event.trim_end_matches(":u").to_owned(), value))
    };
    lines.filter_map(count).collect()
}

/// Without the switches that others made happen, whose number the script says.
fn counts_without_preemptions(ran: &Ran) -> BTreeMap<String, f64> {
    let mut counts = counts(&ran.stderr);
    for event in ["context-switches", "sched:sched_switch"] {
        *counts.get_mut(event).unwrap() -= said(&ran.stdout) as f64;
    }
    counts
}

#[test]
fn counts_are_those_of_perf_stat() {
    if !privileged() {
        return;
    }
    let script = "import os, resource, time
for _ in range(100): time.sleep(0.001)
for _ in range(20):
    if os.fork() == 0: os._exit(0)
    os.wait()
x = bytearray(8 << 20)
print(sum(resource.getrusage(who).ru_nivcsw for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))";
    let python = ["--", "/usr/bin/python3", "-S", "-c", script];
    let listed = Ran::of(&mut with_tracefs(&binary("stackwire"), &["events", "sched:"]));
    let listed = listed.succeeded().stdout;
    let tracepoints = listed.lines().filter_map(|line| line.strip_prefix("  "));
    let mut events = vec!["task-clock", "{page-faults,minor-faults}", "major-faults"];
    events.extend(["context-switches", "cpu-migrations"]);
    events.extend(tracepoints);
    assert!(events.len() > 15, "{events:?}");
    let events = events.join(",");
    let ours = ["stat", "--json", "--event", &events];
    let ours = Ran::of(&mut with_tracefs(&binary("stackwire"), &[&ours[..], &python].concat()));
    let ours = counts_without_preemptions(&ours.succeeded());
    let theirs = ["stat", "-j", "-e", &events];
    let perf = Path::new("/usr/bin/perf");
    let theirs = Ran::of(&mut with_tracefs(perf, &[&theirs[..], &python].concat()));
    let theirs = counts_without_preemptions(&theirs.succeeded());
    assert!(theirs.len() > 15, "{theirs:?}");
    let mut wrong = Vec::new();
    for (event, theirs) in &theirs {
        let ours = ours.get(event).copied().unwrap_or(-1.0);
        // Time, and what the scheduler does on a host where others run, differ from run to run.
        let often = matches!(event.as_str(), "task-clock" | "cpu-migrations")
            || event.starts_with("sched:sched_stat")
            || event.contains("migrate")
            || event.contains("wak");
        let allowed = if often { theirs * 0.5 + 60.0 } else { theirs * 0.03 + 15.0 };
        eprintln!("{event}: {ours}, perf {theirs}");
        if (ours - theirs).abs() > allowed {
            wrong.push(event);
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
    assert!(ours["sched:sched_process_fork"] >= 20.0);
}

#[test]
fn stat_prints_as_perf_and_counts_threads() {
    if !privileged() {
        return;
    }
    let ran = stackwire(["stat", "--", "sh", "-c", "exit 3"]);
    assert_eq!(ran.code, Some(3), "{}", ran.stderr);
    for line in [
        " Performance counter stats for 'sh -c exit 3':",
        " msec task-clock  ",
        "      context-switches  ",
        " seconds time elapsed",
        " seconds user",
    ] {
        assert!(ran.stderr.contains(line), "{line}: {}", ran.stderr);
    }
    if !Path::new("/sys/bus/event_source/devices/cpu").exists() {
        assert!(ran.stderr.contains("   <not supported>      cycles"), "{}", ran.stderr);
    }
    let threads = Running::start(Command::new(spread()).args(["4", "0", "4000"]));
    let pid = format!("--pid={}", threads.pid());
    std::thread::sleep(Duration::from_millis(300));
    let event = "--event=task-clock";
    let ran = stackwire(["stat", &pid, "--per-thread", event, "--duration=1s", "--json"]);
    let said = ran.succeeded().stderr;
    let clocks: Vec<f64> = said
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| line["thread"].as_str().unwrap().starts_with("spread-"))
        .map(|line| line["counter-value"].as_str().unwrap().parse().unwrap_or(0.0))
        .collect();
    assert_eq!(clocks.len(), 5, "{said}");
    let all: f64 = clocks.iter().sum();
    assert!(all > 500.0 && all < 4_400.0, "{clocks:?}");
    stackwire(["stat", "--pid=3999999"]).failed(1, "no process with pid 3999999");
    stackwire(["stat", "--event={cs", "--", "true"]).failed(2, "groups are written as");
    stackwire(["stat"]).failed(2, "what to count?");
    stackwire(["stat", "--", "/nonexistent/program"]).failed(127, "cannot run");
}

/// What was asked for is counted once, whatever was said twice.
#[test]
fn stat_counts_each_thread_once_and_each_event_as_often_as_it_is_listed() {
    if !privileged() {
        return;
    }
    let event = "--event={page-faults,task-clock},{faults,context-switches}";
    let ran = stackwire(["stat", "--json", event, "--", "/usr/bin/python3", "-S", "-c", TOUCHES]);
    let said = ran.succeeded().stderr;
    let faults: Vec<f64> = said
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|line| line["event"].as_str().unwrap().contains("faults"))
        .map(|line| line["counter-value"].as_str().unwrap().parse().unwrap())
        .collect();
    assert!(faults.len() == 2 && faults[0] > 3_000.0, "{said}");
    assert!((faults[0] - faults[1]).abs() < 10.0, "{said}");

    let running = Running::start(Command::new(spread()).args(["1", "0", "60000"]));
    let pid = format!("--pid={0},{0}", running.pid());
    let ran = stackwire(["stat", &pid, "--event=task-clock", "--duration=1s", "--json"]);
    let clock = counts(&ran.succeeded().stderr)["task-clock"];
    assert!(clock > 100.0 && clock < 1_200.0, "{clock} ms of a thread in a second");
}

/// Ctrl-C reaches `stat`, its collector and the command.
#[test]
fn stat_prints_what_it_counted_when_it_is_interrupted_or_the_process_ends() {
    if !privileged() {
        return;
    }
    let running = Running::start(Command::new(spread()).args(["1", "0", "60000"]));
    let pid = format!("--pid={}", running.pid());
    // The last is waited for, as it does not end at once.
    let takes_its_time = ["--", "sh", "-c", "trap '' INT; sleep 4; exit 5"];
    for (what, code) in
        [(&[pid.as_str()][..], 0), (&["--", "sleep", "60"], 130), (&takes_its_time, 5)]
    {
        let mut stat = Command::new(binary("stackwire"));
        stat.args(["stat", "--event=task-clock"]).args(what).stderr(Stdio::piped());
        let stat = stat.process_group(0).spawn().unwrap();
        std::thread::sleep(Duration::from_secs(2));
        let group = rustix::process::Pid::from_child(&stat);
        rustix::process::kill_process_group(group, rustix::process::Signal::INT).unwrap();
        let ended = stat.wait_with_output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(code), "{said}");
        assert!(said.contains(" msec task-clock"), "{said}");
    }
    drop(running);
    let running = Running::start(Command::new(spread()).args(["1", "0", "1500"]));
    let pid = format!("--pid={}", running.pid());
    let ran = stackwire(["stat", &pid, "--event=task-clock"]).succeeded();
    assert!(ran.stderr.contains(" msec task-clock"), "{}", ran.stderr);
    drop(running);
}

/// One in 100 page faults is a sample, and weighs 100.
#[test]
fn samples_of_each_so_many_occurrences_weigh_as_many() {
    if !privileged() {
        return;
    }
    for source in ["perf", "bpf"] {
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("x.pb.gz");
        let ran = stackwire([
            "record",
            "--profile",
            &format!("--source={source}"),
            "--event=page-faults",
            "--count=100",
            &format!("--profile-output={}", output.display()),
            "--",
            "/usr/bin/python3",
            "-S",
            "-c",
            TOUCHES,
        ]);
        ran.succeeded();
        let profile = Pprof::read(&output);
        let weight: u64 = profile.samples.iter().map(|sample| sample.values[1]).sum();
        eprintln!("{source}: {} samples, {weight} page faults", profile.count());
        assert!((3_000..5_000).contains(&weight), "{source}: {weight}");
        assert_eq!(weight, profile.count() * 100, "{source}");
    }
    let clock = ["record", "--profile", "--count=9999", "--", "true"];
    stackwire(clock).failed(2, "a clock counts nanoseconds");
}
