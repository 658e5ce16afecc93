//! Where threads wait: a program whose threads wait in known functions, and which says by its own
//! clocks how long each was on no CPU.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::pprof::{Pprof, Sample};
use crate::support::slow::Slow;
use crate::support::{
    Ran, Running, alone, assert_near, binary, build, privileged, recorded, run, stackwire,
    stolen_ns,
};

const FUNCTIONS: [&str; 10] = [
    "in_sleep",
    "in_futex",
    "in_pipe",
    "in_epoll",
    "in_short_sleeps",
    "on_other_cpus",
    "in_turns",
    "left",
    "right",
    "spin",
];

/// Those that wait for a disk and for files.
const OF_FILES: [&str; 3] = ["in_disk", "in_read", "in_fault"];

/// Values of a sample of waits: blocked time, time without a CPU.
const KINDS: [&str; 4] =
    ["events/count", "off_cpu/nanoseconds", "run-queue_sample/count", "run_queue/nanoseconds"];

/// What threads that call a function again and again say: how long they were on no CPU, and how
/// often they called it.
#[derive(Default)]
struct Said {
    waited_ns: u64,
    calls: u64,
    /// Thread ids, each with how long it ran.
    threads: Vec<(u64, u64)>,
}

/// What a wait may be longer than by the CPU time of its thread. When a timer takes the CPU from
/// another thread, the kernel counts from the wake-up on, and the switch comes later: 5 to 17
/// microseconds in virtual machines, of the 40 that it counts for a short sleep.
const LATE_NS: u64 = 20_000;

/// Runs the program for three seconds under `record` with these arguments; the directory then has
/// `off.pb.gz` and `out.stackwire`. What it says of its threads, by function.
fn record(directory: &Path, arguments: &[&str]) -> BTreeMap<String, Said> {
    let said = record_with(directory, arguments, &[]);
    assert_eq!(said.len(), FUNCTIONS.len());
    said
}

/// Likewise, of the program with these files.
fn record_with(directory: &Path, arguments: &[&str], files: &[PathBuf]) -> BTreeMap<String, Said> {
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory).arg("record").args(arguments);
    command.args(["--offcpu-output=off.pb.gz", "--capture=out.stackwire", "--"]);
    let ran = Ran::of(command.arg(build::waits()).arg("3").args(files)).succeeded();
    let mut said = BTreeMap::<String, Said>::new();
    for line in ran.stdout.lines() {
        let mut words = line.split(' ');
        let of = said.entry(words.next().unwrap().to_owned()).or_default();
        let mut number = || words.next().map(|word| word.parse::<u64>().unwrap());
        of.waited_ns += number().unwrap();
        of.calls += number().unwrap();
        of.threads.extend(number().zip(number()));
    }
    said
}

fn sum(profile: &Pprof, function: &str, value: impl Fn(&Sample) -> u64) -> u64 {
    let through = |sample: &&Sample| profile.functions(sample).contains(&function);
    profile.samples.iter().filter(through).map(value).sum()
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
        let stolen_before = stolen_ns();
        let said = record(directory.path(), way);
        let stolen_ns = stolen_ns() - stolen_before;
        let profile = Pprof::read(&directory.path().join("off.pb.gz"));
        assert_eq!(profile.kinds, KINDS);
        for function in FUNCTIONS {
            let waited = sum(&profile, function, |sample| sample.values[1] + sample.values[3]);
            let Said { waited_ns, calls, .. } = said[function];
            let what = format!("{function} {way:?}");
            let more = 1_000_000 + calls * LATE_NS;
            println!("{what}: {}, {calls} calls", waited as i64 - waited_ns as i64);
            // While the host has a thread's CPU, the thread neither waits nor uses CPU time.
            let said = waited.clamp(waited_ns.saturating_sub(stolen_ns), waited_ns);
            assert_near(&what, waited, said, 50, more);
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
            let all = sum(&profile, function, |sample| sample.values[1]);
            // But of waits whose end the kernel hides.
            assert!(kernel * 100 >= all * 96, "{function}: {kernel} of {all}");
        }
        // A stack has neither the scheduler in it nor the program that took it.
        let of_switches = |name: &&str| name.contains("bpf_prog") || name.contains("__schedule");
        let all = profile.samples.iter().flat_map(|it| profile.functions(it));
        assert_eq!(all.filter(of_switches).collect::<Vec<_>>(), [""; 0]);
    }
}

#[test]
fn waits_for_disks_files_and_pages_are_as_long_as_the_program_says() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let Some(slow) = Slow::start() else { return };
    let directory = tempfile::tempdir().unwrap();
    let said = record_with(directory.path(), &["--offcpu"], &slow.paths());
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    for (function, kernel, state) in [
        (OF_FILES[0], "blkdev_read_iter", Some("disk")),
        (OF_FILES[1], "fuse_direct_io", None),
        (OF_FILES[2], "asm_exc_page_fault", None),
    ] {
        let Said { waited_ns, calls, .. } = said[function];
        let waited = sum(&profile, function, |sample| sample.values[1] + sample.values[3]);
        assert_near(function, waited, waited_ns, 50, 1_000_000 + calls * LATE_NS);
        let there = sum(&profile, function, |sample| {
            let in_state = state.is_none_or(|state| sample.labels["state"] == state);
            let through = profile.functions(sample).contains(&kernel) && in_state;
            u64::from(through) * (sample.values[1] + sample.values[3])
        });
        assert!(there * 100 >= waited * 99, "{function} in {kernel}: {there} of {waited}");
    }
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["resolve", "out.stackwire"]);
    Ran::of(command.arg("--offcpu-output=again.pb.gz")).succeeded();
    let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
    assert!(read("off.pb.gz") == read("again.pb.gz"), "resolved again, it is another");
}

/// On a CPU, as the scheduler's slices add up, blocked, and waiting for a CPU: of each thread, the
/// time that passed.
#[test]
fn what_threads_do_adds_up_to_the_time_that_passes() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let states = "--offcpu-states=sleep,disk,stopped,preempted";
    let sched = ["--pmu", "--per-thread", "--pmu-format=json", "--pmu-output=pmu.json"];
    let said = record(directory.path(), &[&["--offcpu", states][..], &sched].concat());
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    let json = std::fs::read(directory.path().join("pmu.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let mut threads = 0;
    for (function, (tid, passed_ns)) in
        said.iter().flat_map(|(function, said)| said.threads.iter().map(move |it| (function, *it)))
    {
        let name = tid.to_string();
        let own = profile.samples.iter().filter(|sample| sample.labels["tid"] == name);
        let off: u64 = own.map(|sample| sample.values[1] + sample.values[3]).sum();
        let of = json["processes"].as_array().unwrap().iter().find(|it| it["tid"] == tid);
        let on = of.unwrap_or_else(|| panic!("no {tid} in {json}"));
        let on = on.pointer("/slices/sum_ns").unwrap().as_u64().unwrap();
        println!(
            "{function} {on} + {off} of {passed_ns}: {}",
            (on + off) as i64 - passed_ns as i64
        );
        assert_near(&format!("{function} {tid}"), on + off, passed_ns, 100, 0);
        threads += 1;
    }
    assert_eq!(threads, 9);
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
    // Side by side: who spins has time on a CPU and none off it, who sleeps the other way round.
    let report = |arguments: &[&str]| {
        let mut command = Command::new(binary("stackwire"));
        command.current_dir(directory.path()).args(["report", "out.stackwire"]).args(arguments);
        Ran::of(&mut command).succeeded().stdout
    };
    let beside = report(&["--sort=total", "--top=500"]);
    let row = |name: &str| -> Vec<&str> {
        let line = beside.lines().find(|line| line.contains(&format!("  {name} [")));
        let line = line.unwrap_or_else(|| panic!("no {name} in {beside}"));
        line.split_whitespace().take(6).collect()
    };
    let head = "        cpu-clock s          off-cpu s        run-queue s\n";
    assert!(beside.contains(head), "{beside}");
    assert_eq!(row("spin")[2..4], ["-", "-"], "{beside}");
    assert_eq!(row("in_sleep")[2], "-", "{beside}");
    let in_sleep: f64 = row("in_sleep")[3].parse().unwrap();
    assert!((2.9..3.1).contains(&in_sleep), "{beside}");
    let one = report(&["--series=off-cpu"]);
    assert!(!one.contains("cpu-clock") && one.contains("hrtimer_nanosleep"), "{one}");
    // Of short waits one stands for several: their times are there all the same.
    let count = |arguments: &[&str]| {
        let mut command = Command::new(binary("stackwire"));
        command.current_dir(directory.path()).args([
            "resolve",
            "out.stackwire",
            "--output=p.pb.gz",
        ]);
        Ran::of(command.args(arguments)).succeeded();
        let profile = Pprof::read(&at("p.pb.gz"));
        profile.samples.iter().flat_map(|sample| &sample.values).sum::<u64>()
    };
    assert_eq!(count(&["--time=0..1.5"]) + count(&["--time=1.5..100"]), count(&[]));
    let diff = ["report", "--diff", "out.stackwire", "out.stackwire", "--series=run-queue"];
    let mut command = Command::new(binary("stackwire"));
    let diff = Ran::of(command.current_dir(directory.path()).args(diff)).succeeded().stdout;
    assert!(diff.contains("run_queue/nanoseconds before"), "{diff}");
}

/// Blocked time in a function, of samples whose waker is like this.
fn woken(profile: &Pprof, function: &str, is: impl Fn(&HashMap<String, String>) -> bool) -> u64 {
    sum(profile, function, |sample| u64::from(is(&sample.labels)) * sample.values[1])
}

#[test]
fn whoever_ends_a_wait_is_named_with_its_stack() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    record(directory.path(), &["--offcpu", "--offcpu-wakers"]);
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    let has = |labels: &HashMap<String, String>, key: &str, texts: &[&str]| {
        labels.get(key).is_some_and(|value| texts.iter().all(|text| value.contains(text)))
    };
    // One thread writes into the pipe. Timers end the other waits.
    let feeds = |labels: &_| {
        has(labels, "waker", &["waits"]) && has(labels, "waker_stack", &[";feed;", "pipe_write"])
    };
    let timer = |labels: &_| {
        has(labels, "waker", &["interrupt"]) && has(labels, "waker_stack", &["hrtimer_wakeup"])
    };
    for (function, is, least) in [
        ("in_pipe", &feeds as &dyn Fn(&_) -> bool, 99),
        ("in_sleep", &timer, 98),
        ("in_futex", &timer, 98),
        ("in_epoll", &timer, 98),
        // Of short waits that a late CPU made longer nobody looked for the waker.
        ("in_short_sleeps", &timer, 80),
    ] {
        let (all, found) = (woken(&profile, function, |_| true), woken(&profile, function, is));
        // A wake-up that the kernel hides (README) has no waker, and no time on the run queue.
        let unnamed = |sample: &Sample| u64::from(!sample.labels.contains_key("waker"));
        let queued = sum(&profile, function, |sample| unnamed(sample) * sample.values[3]);
        let blocked = sum(&profile, function, |sample| unnamed(sample) * sample.values[1]);
        let hidden = if queued == 0 { blocked } else { 0 };
        assert!(
            hidden * 100 <= all * 5,
            "{function}: the wake-ups of {hidden} of {all} are hidden"
        );
        assert!(found * 100 >= (all - hidden) * least, "{function}: {found} of {all} - {hidden}");
    }
    let feeder = |sample: &Sample| (feeds(&sample.labels), sample.labels.get("waker_tid").cloned());
    let feeders: std::collections::BTreeSet<_> =
        profile.samples.iter().map(feeder).filter(|it| it.0).collect();
    assert_eq!(feeders.len(), 1, "one thread feeds: {feeders:?}");
    let programs = |sample: &&Sample| has(&sample.labels, "waker_stack", &["bpf_"]);
    assert_eq!(profile.samples.iter().filter(programs).count(), 0, "it shows its own program");
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["resolve", "out.stackwire"]);
    Ran::of(command.arg("--offcpu-output=again.pb.gz")).succeeded();
    let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
    assert!(read("off.pb.gz") == read("again.pb.gz"), "resolved again, it is another");
    // Who wakes whom, by its name.
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["report", "out.stackwire", "--by=waker"]);
    let by = Ran::of(&mut command).succeeded().stdout;
    assert!(by.contains("interrupt") && by.contains("waits"), "{by}");
}

/// Of a process that was not asked for, its user stack is nobody's business.
#[test]
fn a_waker_outside_the_capture_has_a_name_and_a_kernel_stack() {
    if !privileged() {
        return;
    }
    let cat = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut cat = Running(cat);
    let mut pipe = cat.0.stdin.take().unwrap();
    let writes = std::thread::spawn(move || {
        // Until cat is killed.
        while pipe.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let directory = tempfile::tempdir().unwrap();
    let pid = format!("--pid={}", cat.pid());
    let arguments =
        [&pid, "--offcpu", "--offcpu-wakers", "--duration=2s", "--offcpu-output=off.pb.gz"];
    recorded(directory.path(), &arguments).succeeded();
    drop(cat);
    writes.join().unwrap();
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    let own = std::process::id().to_string();
    let is_own = |labels: &HashMap<String, String>| labels.get("waker_pid") == Some(&own);
    let all: u64 = profile.samples.iter().map(|sample| sample.values[1]).sum();
    let found: u64 = profile
        .samples
        .iter()
        .filter(|sample| is_own(&sample.labels))
        .map(|sample| sample.values[1])
        .sum();
    assert!(found * 100 > all * 90, "{found} of {all}: {:?}", profile.samples);
    for sample in profile.samples.iter().filter(|sample| is_own(&sample.labels)) {
        let stack = &sample.labels["waker_stack"];
        assert!(stack.split(';').all(|frame| frame.ends_with("_[k]")), "{stack}");
        assert!(stack.contains("pipe_write"), "{stack}");
    }
}

/// They have no wait that ended before the process did.
#[test]
fn two_thousand_threads_that_die_asleep_are_all_there() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["record", "--offcpu", "--no-capture"]);
    command.args(["--offcpu-output=off.pb.gz", "--"]).arg(build::crowd()).arg("2000");
    let said = Ran::of(&mut command).succeeded().stdout;
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    let slept = sum(&profile, "in_crowd", |sample| sample.values[1]);
    assert_near("in_crowd", slept, said.trim().parse().unwrap(), 50, 0);
    let threads: std::collections::BTreeSet<_> = profile
        .samples
        .iter()
        .filter(|sample| profile.functions(sample).contains(&"in_crowd"))
        .map(|sample| sample.labels["tid"].clone())
        .collect();
    assert_eq!(threads.len(), 2000);
}

/// Some kernels hide when a thread is given its CPU, and these do not wait a second time.
#[test]
fn threads_that_sleep_once_are_all_there() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["record", "--offcpu", "--offcpu-threshold=0"]);
    command.args(["--no-capture", "--offcpu-output=off.pb.gz", "--kernel-stacks=false", "--"]);
    Ran::of(command.arg(build::once()).arg("2000")).succeeded();
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    // However long: one that is preempted when its timer runs already has less left to sleep.
    let waits = |sample: &&Sample| {
        let mut functions = profile.functions(sample).into_iter();
        let sleeps = functions.any(|name| name.contains("nanosleep"));
        sample.labels["comm"] == "once" && sleeps && sample.values[1] > 0
    };
    let threads: std::collections::BTreeSet<_> =
        profile.samples.iter().filter(waits).map(|sample| sample.labels["tid"].clone()).collect();
    assert_eq!(threads.len(), 2000);
    // The kernel stack of a wait is its reason: it is there in any case, with names.
    assert!(sum(&profile, "hrtimer_nanosleep", |sample| sample.values[1]) > 3_800_000_000);
}

/// Nobody sees it leave its CPU, and it does not run before the end.
#[test]
fn a_sleep_longer_than_the_capture_shows() {
    if !privileged() {
        return;
    }
    let sleeps = Running(Command::new("sleep").arg("60").spawn().unwrap());
    std::thread::sleep(Duration::from_millis(200));
    let directory = tempfile::tempdir().unwrap();
    let pid = format!("--pid={}", sleeps.pid());
    let arguments = [pid.as_str(), "--offcpu", "--duration=1s", "--offcpu-output=off.pb.gz"];
    recorded(directory.path(), &arguments).succeeded();
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    let [sample] = profile.samples.as_slice() else { panic!("{:?}", profile.samples) };
    assert_near("sleep", sample.values[1], 1_000_000_000, 5, 0);
    let labels = ["comm", "state", "open"].map(|key| sample.labels[key].as_str());
    assert_eq!(labels, ["sleep", "sleep", "start,end"]);
    // The kernel says where it is all the same.
    assert!(profile.functions(sample).contains(&"hrtimer_nanosleep"), "{sample:?}");
}

/// The process that becomes the command waits until sampling has started.
#[test]
fn what_comes_before_a_command_is_not_its_own() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let ways = ["--offcpu", "--offcpu-threshold=0", "--pmu", "--pmu-format=json"];
    let outputs = ["--offcpu-output=off.pb.gz", "--pmu-output=pmu.json", "--", "sleep", "0.5"];
    recorded(directory.path(), &[&ways[..], &outputs[..]].concat()).succeeded();
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    let blocked: u64 = profile.samples.iter().map(|sample| sample.values[1]).sum();
    // The rest is for the disk the program comes from.
    assert!((500_000_000..600_000_000).contains(&blocked), "{blocked}");
    assert_near("asleep", sum(&profile, "hrtimer_nanosleep", |it| it.values[1]), blocked, 5, 0);
    assert!(profile.samples.iter().all(|sample| !sample.labels.contains_key("open")));
    assert!(profile.samples.iter().all(|sample| sample.labels["comm"] == "sleep"));
    let pmu = std::fs::read(directory.path().join("pmu.json")).unwrap();
    let pmu: serde_json::Value = serde_json::from_slice(&pmu).unwrap();
    let processes = pmu["processes"].as_array().unwrap();
    let names: Vec<_> = processes.iter().map(|it| it["comm"].as_str().unwrap()).collect();
    assert_eq!(names, ["sleep"]);
}

/// A thread that hardly ever gets the CPU waits for it already when the capture begins, and one
/// that always has it does not.
#[test]
fn threads_wait_for_a_cpu_from_the_start_on() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let spin = |nice: &str| {
        let arguments =
            ["-c", "0", "nice", "-n", nice, "sh", "-c", "echo ready; while :; do :; done"];
        Running::start(Command::new("taskset").args(arguments))
    };
    let [_one, _two, starved] = ["0", "0", "19"].map(spin);
    std::thread::sleep(Duration::from_millis(500));
    let ways = ["--offcpu", "--offcpu-states=preempted", "--pmu", "--pmu-format=json"];
    let outputs = ["--offcpu-output=off.pb.gz", "--pmu-output=pmu.json", "--duration=2s"];
    for time in 0..3 {
        let directory = tempfile::tempdir().unwrap();
        let pid = format!("--pid={}", starved.pid());
        let arguments = [&[pid.as_str()], &ways[..], &outputs[..]].concat();
        recorded(directory.path(), &arguments).succeeded();
        let profile = Pprof::read(&directory.path().join("off.pb.gz"));
        let waited: u64 = profile.samples.iter().map(|sample| sample.values[3]).sum();
        let pmu = std::fs::read(directory.path().join("pmu.json")).unwrap();
        let pmu: serde_json::Value = serde_json::from_slice(&pmu).unwrap();
        let ran = pmu["total"]["slices"]["sum_ns"].as_u64().unwrap();
        let passed = pmu["duration_ns"].as_u64().unwrap();
        assert_near(&format!("capture {time}"), waited + ran, passed, 50, 5_000_000);
    }
    drop(starved);
    // Alone, it runs nearly all the time, and may not be switched at all.
    let alone = Running::start(Command::new("sh").args(["-c", "echo ready; while :; do :; done"]));
    drop((_one, _two));
    let directory = tempfile::tempdir().unwrap();
    let pid = format!("--pid={}", alone.pid());
    let ran = recorded(directory.path(), &[&[pid.as_str()], &ways[..], &outputs[..]].concat());
    if ran.code == Some(0) {
        let profile = Pprof::read(&directory.path().join("off.pb.gz"));
        let waited: u64 = profile.samples.iter().map(|sample| sample.values[3]).sum();
        assert!(waited < 1_000_000_000, "{waited} ns of 2 s");
    }
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
    refused(&["--offcpu-wakers"], "--offcpu");
    refused(&["--offcpu", "--offcpu-threshold=2s"], "100ms is the longest");
    refused(&["--offcpu", "--offcpu-threshold=-1ms"], "--offcpu-threshold");
    refused(&["--offcpu", "--event=page-faults"], "add --profile");
    refused(&["--pmu", "--profile-output=x.pb.gz"], "add --profile");
    let help = stackwire(["record", "--help"]).succeeded().stdout;
    assert!(help.contains("--offcpu-output"), "{help}");
}
