//! How threads are scheduled (`--pmu`): beside what the kernel itself counts of a process, beside
//! runqlat, and the same from a capture.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{
    Pprof, Ran, Running, alone, assert_near, binary, build, privileged, stolen_ns,
};

/// Runs `sched` for three seconds under `record --pmu`. The JSON of it, and what the program says.
fn record(directory: &Path, arguments: &[&str]) -> (Value, Vec<u64>) {
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory).args(["record", "--pmu", "--pmu-format=json"]).args(arguments);
    command.args(["--pmu-output=pmu.json", "--capture=out.stackwire", "--"]);
    let ran = Ran::of(command.arg(build::sched()).arg("3")).succeeded();
    let said = ran.stdout.split_whitespace().map(|word| word.parse().unwrap()).collect();
    (read(&directory.join("pmu.json")), said)
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[track_caller]
fn number(of: &Value, path: &str) -> u64 {
    let found = of.pointer(path).unwrap_or_else(|| panic!("no {path} in {of}"));
    found.as_u64().unwrap_or_else(|| panic!("{path}: {found}"))
}

#[test]
fn sums_are_those_the_kernel_has_of_the_process() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let (found, said) = record(directory.path(), &[]);
    let [voluntary, preempted, faults, on_cpu, delay, slices] = said[..] else {
        panic!("{said:?}")
    };
    let all = &found["processes"];
    assert_eq!((all.as_array().unwrap().len(), &all[0]["comm"]), (1, &"sched".into()));
    let of = |path: &str| number(&all[0], path);
    // Before it became this program, the process waited for its start and had other mappings.
    let waits = of("/switches/voluntary") + of("/switches/io") + of("/switches/stopped");
    assert_near("voluntary", waits, voluntary, 50, 20);
    assert_near("preempted", of("/switches/preempted"), preempted, 50, 20);
    assert_eq!(of("/switches/exited"), 8, "the threads of the program");
    assert_near("page faults", of("/counters/page-faults/value"), faults, 50, 200);
    // See `hand_over` for why they are not the same each.
    assert_near("on a CPU", of("/slices/sum_ns"), on_cpu, 33, slices * 3_000);
    assert_near("waiting for one", of("/run_queue/sum_ns"), delay, 33, slices * 12_000);
    assert_near("slices", of("/slices/count"), slices, 50, 20);
    // Each is in a bucket, and the bounds of buckets hold the sum.
    for times in ["slices", "run_queue"] {
        let buckets = all[0][times]["buckets"].as_array().unwrap();
        let sum = |at: usize| -> u64 {
            let times = |it: &Value| it[at].as_u64().unwrap() * it[2].as_u64().unwrap();
            buckets.iter().map(times).sum()
        };
        let exact = of(&format!("/{times}/sum_ns"));
        assert!(sum(0) <= exact && exact <= sum(1), "{times}: {} {exact} {}", sum(0), sum(1));
    }
    let counters = found["counters"].as_array().unwrap();
    let there = |name: &str| {
        counters.iter().find(|it| it["name"] == name).unwrap()["missing"].as_str().is_none()
    };
    assert!(there("page-faults"));
    // Where the hardware has none, one line says so and the rest works.
    if !there("cycles") {
        let text = text(directory.path(), &[]);
        assert!(text.contains("cycles: not available: this machine has no counter"), "{text}");
    }
}

/// A shell that works and then becomes `sleep`, and says how long it ran until then.
#[test]
fn each_program_that_a_process_becomes_has_its_own_times() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let work = "i=0; while [ $i -lt 500000 ]; do i=$((i+1)); done;
                read ran rest </proc/$$/schedstat; echo $ran; exec sleep 0.3";
    for way in [&[][..], &["--per-thread"]] {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(binary("stackwire"));
        command.current_dir(directory.path()).args(["record", "--pmu", "--pmu-format=json"]);
        command.args(["--pmu-output=pmu.json", "--no-capture"]).args(way);
        let stolen_before = stolen_ns();
        let ran = Ran::of(command.args(["--", "sh", "-c", work])).succeeded();
        let stolen_ns = stolen_ns() - stolen_before;
        let said: u64 = ran.stdout.trim().parse().unwrap();
        let found = read(&directory.path().join("pmu.json"));
        let all = found["processes"].as_array().unwrap();
        let slices = |comm: &str| {
            let own = all.iter().filter(|it| it["comm"] == comm);
            own.map(|it| number(it, "/slices/sum_ns")).sum::<u64>()
        };
        println!("{} of {said}, {stolen_ns} stolen", slices("sh"));
        // What it does from its last words on is in the sum, too, and what the host takes from it.
        assert_near("sh", slices("sh"), said, 50, 10_000_000 + stolen_ns);
        assert!((1..50_000_000).contains(&slices("sleep")), "{found}");
        assert_eq!(all.len(), 2, "{found}");
    }
}

/// What each process of `handover` says, by its pid.
struct HandedOver {
    run_ns: u64,
    delay_ns: u64,
    slices: u64,
    lived_ns: u64,
}

/// Runs `handover` for six seconds under `record` with these arguments. Some hundred thousand
/// switches a second, on all CPUs. Also how many nanoseconds the host took from the machine: they
/// are no time on a CPU by the kernel, and are by the tracepoints.
///
/// A wait of three microseconds here is a quarter of a microsecond longer than the kernel's
/// `schedstat` has it: the kernel reads its clock before it chooses the next thread, and not at all
/// where a wake-up made it choose (`rq_clock_skip_update`). The tracepoint of ours, of perf and of
/// runqlat is behind that. What a thread ran, waited and slept is its time by the wall clock.
fn hand_over(directory: &Path, arguments: &[&str]) -> (BTreeMap<u64, HandedOver>, u64) {
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory).arg("record").args(arguments);
    command.args(["--capture=out.stackwire", "--"]).arg(build::handover()).arg("6");
    let stolen_before = stolen_ns();
    let ran = Ran::of(&mut command).succeeded();
    let stolen_ns = stolen_ns() - stolen_before;
    let of = |line: &str| {
        let said: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        let [pid, run_ns, delay_ns, slices, _, lived_ns] = said[..] else { panic!("{line}") };
        (pid, HandedOver { run_ns, delay_ns, slices, lived_ns })
    };
    let said: BTreeMap<u64, HandedOver> = ran.stdout.lines().map(of).collect();
    let slices: u64 = said.values().map(|it| it.slices).sum();
    println!("{} switches a second, {} ms taken by the host", slices / 6, stolen_ns / 1_000_000);
    assert!(said.len() >= 2 && slices > 100_000, "{}", ran.stdout);
    (said, stolen_ns)
}

#[test]
fn sums_of_processes_that_switch_all_the_time_are_those_of_the_kernel() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let (said, stolen_ns) =
        hand_over(directory.path(), &["--pmu", "--pmu-format=json", "--pmu-output=pmu.json"]);
    let json = read(&directory.path().join("pmu.json"));
    for (pid, said) in said {
        let own = json["processes"].as_array().unwrap().iter().find(|it| it["pid"] == pid);
        let of = |path: &str| number(own.unwrap(), path);
        assert_near("on a CPU", of("/slices/sum_ns"), said.run_ns, 50, stolen_ns);
        let queue = of("/run_queue/sum_ns");
        assert_near("waiting for one", queue, said.delay_ns, 50, said.slices * 500);
        assert!(queue > said.delay_ns - said.delay_ns / 50, "{queue} of {}", said.delay_ns);
        assert_near("slices", of("/slices/count"), said.slices, 50, 0);
    }
}

#[test]
fn waits_of_processes_that_switch_all_the_time_add_up() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let states = "--offcpu-states=sleep,disk,stopped,preempted";
    let (said, stolen_ns) =
        hand_over(directory.path(), &["--offcpu", states, "--offcpu-output=off.pb.gz"]);
    let profile = Pprof::read(&directory.path().join("off.pb.gz"));
    let (mut delay_ns, mut queue_ns) = (0, 0);
    for (pid, said) in said {
        let name = pid.to_string();
        let own = || profile.samples.iter().filter(|sample| sample.labels["pid"] == name);
        let sum = |value: usize| own().map(|sample| sample.values[value]).sum::<u64>();
        let (off_cpu, queue) = (sum(1), sum(3));
        assert_near("waits", sum(2), said.slices, 50, 0);
        assert_near("time", said.run_ns + off_cpu + queue, said.lived_ns, 100, stolen_ns);
        delay_ns += said.delay_ns;
        queue_ns += queue;
    }
    println!("{queue_ns} ns for CPUs, {delay_ns} ns by the kernel");
    assert_near("waiting for a CPU", queue_ns, delay_ns, 15, 0);
    // Nothing is lost unsaid.
    let mut report = Command::new(binary("stackwire"));
    report.current_dir(directory.path()).args(["report", "out.stackwire"]);
    let report = Ran::of(&mut report).succeeded().stdout;
    assert!(!report.contains("unaccounted"), "{report}");
}

/// What `report --pmu` prints of the capture.
fn text(directory: &Path, arguments: &[&str]) -> String {
    let capture = directory.join("out.stackwire");
    let mut command = Command::new(binary("stackwire"));
    command.args(["report", "--pmu"]).args(arguments).arg(capture);
    Ran::of(&mut command).succeeded().stdout
}

#[test]
fn a_capture_says_later_what_the_run_said() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (json, _) = record(directory.path(), &["--profile", "--profile-output=on.pb.gz"]);
    let again = text(directory.path(), &["--pmu-format=json"]);
    assert_eq!(again, std::fs::read_to_string(at("pmu.json")).unwrap());
    assert_eq!(json["total"], {
        let mut only = json["processes"][0].clone();
        let map = only.as_object_mut().unwrap();
        map.retain(|key, _| key != "pid" && key != "comm");
        only
    });
    // Two captures add up.
    let other = tempfile::tempdir().unwrap();
    let (one_more, _) = record(other.path(), &[]);
    let mut command = Command::new(binary("stackwire"));
    command.args(["report", "--pmu", "--pmu-format=json"]);
    command.args([at("out.stackwire"), other.path().join("out.stackwire")]);
    let both: Value = serde_json::from_str(&Ran::of(&mut command).succeeded().stdout).unwrap();
    for path in ["/total/slices/count", "/total/run_queue/sum_ns", "/total/switches/voluntary"] {
        let sum = number(&json, path) + number(&one_more, path);
        assert_eq!(number(&both, path), sum, "{path}");
    }
    let pretty = text(directory.path(), &[]);
    for line in [
        "On-CPU Time (time slice per context switch):",
        "Runqueue Latency (time waiting for CPU):",
        "  Preempted (running):    ",
        "Hardware Counters:",
    ] {
        assert!(pretty.contains(line), "{pretty}");
    }
    assert!(pretty.starts_with("=== PMU Metrics (PID: "), "{pretty}");
}

#[test]
fn threads_are_told_apart_when_asked_for() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (json, _) = record(directory.path(), &["--per-thread"]);
    let threads = json["processes"].as_array().unwrap();
    assert_eq!(threads.len(), 8, "{threads:?}");
    let tids: std::collections::BTreeSet<_> =
        threads.iter().map(|it| it["tid"].as_u64().unwrap()).collect();
    assert_eq!(tids.len(), 8);
    // Spinners have the most of the CPU and come first; each has half of one.
    for spinner in &threads[..2] {
        let seconds = number(spinner, "/slices/sum_ns") as f64 / 1e9;
        assert!((1.2..1.8).contains(&seconds), "{spinner}");
        assert!(number(spinner, "/run_queue/sum_ns") > 1_000_000_000, "{spinner}");
    }
}

#[test]
fn latencies_on_the_run_queue_are_those_of_runqlat() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("pmu.json");
    let mut program = Command::new(build::sched()).arg("8").stdout(Stdio::null()).spawn().unwrap();
    let pid = program.id().to_string();
    // Both for five seconds. It is in /usr/sbin, which is not in everybody's PATH.
    let other = Command::new("/usr/sbin/runqlat")
        .args(["-p", &pid, "5", "1"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut command = Command::new(binary("stackwire"));
    command.args(["record", "--pmu", "--pid", &pid, "--duration=5s", "--no-capture"]);
    command.args(["--pmu-format=json", "--pmu-output"]).arg(&output);
    Ran::of(&mut command).succeeded();
    let listed = String::from_utf8(other.wait_with_output().unwrap().stdout).unwrap();
    assert!(program.wait().unwrap().success());
    let found = read(&output);
    // Lines of `from -> to : count |***|`, in microseconds, each twice as wide as the one before.
    let row = |line: &str| {
        let (range, rest) = line.split_once(':')?;
        let from: u64 = range.split("->").next()?.trim().parse().ok()?;
        let count: u64 = rest.split_whitespace().next()?.parse().ok()?;
        Some((from, count))
    };
    let theirs: Vec<(u64, u64)> = listed.lines().filter_map(row).collect();
    let all: u64 = theirs.iter().map(|(_, count)| count).sum();
    assert!(all > 20_000, "{listed}");
    for (share, name) in [(0.5, "p50_ns"), (0.95, "p95_ns"), (0.99, "p99_ns")] {
        let mut left = (all as f64 * share) as u64;
        let is_it = |(_, count): &&(u64, u64)| {
            let found = left <= *count;
            left = left.saturating_sub(*count);
            found
        };
        let from = theirs.iter().find(is_it).unwrap().0;
        let ours = number(&found["processes"][0], &format!("/run_queue/{name}")) / 1000;
        let apart = from.max(1).ilog2().abs_diff(ours.max(1).ilog2());
        assert!(apart <= 1, "{name}: {ours} us, and from {from} us on\n{listed}");
    }
}

/// A program that is bound to its CPU is never switched out.
#[test]
fn what_still_runs_at_the_end_counts() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("pmu.json");
    let mut spins = Command::new("chrt");
    let spins = spins.args(["-f", "50", "sh", "-c", "while :; do :; done"]);
    let spins = Running(spins.spawn().unwrap());
    std::thread::sleep(std::time::Duration::from_millis(300));
    let mut command = Command::new(binary("stackwire"));
    command.args(["record", "--pmu", "--no-capture", "--pmu-format=json", "--duration=700ms"]);
    command.args(["--pid", &spins.pid().to_string(), "--pmu-output"]).arg(&output);
    Ran::of(&mut command).succeeded();
    let ran = number(&read(&output), "/total/slices/sum_ns");
    assert!((600_000_000..1_000_000_000).contains(&ran), "{ran}");
}

/// Numbers of processes are used again: by then they are another's.
#[test]
fn processes_of_one_number_are_told_apart() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    // The next process gets the number after this one; others may come in between.
    let again = "sh -c 'exit 0' & first=$!; wait; for i in 1 2 3; do\n\
        echo $((first + 100)) > /proc/sys/kernel/ns_last_pid; sh -c 'sleep 0.1' & wait; done";
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["record", "--pmu", "--pmu-format=json"]);
    command.args(["--pmu-output=pmu.json", "--no-capture", "--", "sh", "-c", again]);
    Ran::of(&mut command).succeeded();
    let found = read(&directory.path().join("pmu.json"));
    let mut pids: Vec<_> = found["processes"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|it| it["switches"]["exited"] == 1)
        .map(|it| it["pid"].as_u64().unwrap())
        .collect();
    let all = pids.len();
    pids.sort_unstable();
    pids.dedup();
    assert!(pids.len() < all, "no number was used again: {pids:?}");
    let exits = found["processes"].as_array().unwrap();
    assert!(exits.iter().all(|it| number(it, "/switches/exited") <= 1), "{found}");
}

/// More threads than are told apart at once, one after the other.
#[test]
fn threads_that_ended_make_room() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let program = "import threading, time\n\
        for i in range(2500):\n    t = threading.Thread(target=lambda: None); t.start(); t.join()\n\
        time.sleep(4)\n\
        def late():\n    end = time.monotonic() + 0.3\n    while time.monotonic() < end: pass\n\
        t = threading.Thread(target=late); t.start(); t.join()\n\
        print(t.native_id)";
    let mut command = Command::new(binary("stackwire"));
    command.current_dir(directory.path()).args(["record", "--pmu", "--per-thread"]);
    command.args(["--pmu-format=json", "--pmu-output=pmu.json", "--no-capture", "--"]);
    let ran = Ran::of(command.args(["python3", "-c", program])).succeeded();
    let tid: u64 = ran.stdout.trim().parse().unwrap();
    let found = read(&directory.path().join("pmu.json"));
    let threads = found["processes"].as_array().unwrap();
    let late = threads.iter().find(|it| it["tid"] == tid).expect("the last thread is there");
    assert!(number(late, "/slices/sum_ns") > 200_000_000, "{late}");
    assert!(number(&found, "/total/switches/exited") >= 2500);
}

#[test]
fn what_cannot_be_meant_says_so() {
    let refused = |arguments: &[&str], said: &str| {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(binary("stackwire"));
        let command = command.current_dir(directory.path()).arg("record").args(arguments);
        Ran::of(command).failed(2, said);
    };
    refused(&["--per-pid", "--pid=1"], "--per-pid divides what --pmu finds of the whole host");
    refused(&["--pmu", "--per-pid", "--", "true"], "add -a --pmu, or leave it out");
    refused(&["--per-thread", "-a"], "--pmu");
    refused(&["--pmu-output=x", "-a"], "--pmu");
    refused(&["--pmu", "-a", "--pmu-format=xml"], "text, json");
    // Of a capture, sums are whole.
    let directory = tempfile::tempdir().unwrap();
    record(directory.path(), &["--profile", "--profile-output=on.pb.gz"]);
    let report = |arguments: &[&str]| {
        let mut command = Command::new(binary("stackwire"));
        Ran::of(command.current_dir(directory.path()).arg("report").args(arguments))
    };
    for part in ["--time=0..1", "--where=tid=1", "--diff", "--flamegraph=x.svg", "--by=tid"] {
        report(&["--pmu", "out.stackwire", part]).failed(2, "cannot be used with");
    }
    report(&["--pmu", "on.pb.gz"]).failed(1, "does not say how threads were scheduled");
    report(&["--where=comm=nobody", "out.stackwire"]).failed(1, "is in that part of the profile");
    // One that is cut says so, as any report does.
    let whole = std::fs::read(directory.path().join("out.stackwire")).unwrap();
    std::fs::write(directory.path().join("cut.stackwire"), &whole[..whole.len() / 2]).unwrap();
    let cut = report(&["--pmu", "cut.stackwire"]).succeeded().stdout;
    assert!(cut.contains("note: "), "{cut}");
}
