//! How much of the CPU time that programs used has samples with whole stacks: judged by what the
//! kernel told their parent.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::{Running, build, privileged, recorded, stackwire};

/// What the report says of what programs of this name used: seconds, and how much of it has
/// samples, and whole stacks, in percent.
#[track_caller]
fn row(report: &str, name: &str) -> [f64; 3] {
    let (_, table) = report.split_once("  used by\n").unwrap_or_else(|| panic!("{report}"));
    let row = table.lines().find(|line| line.ends_with(&format!("  {name}")));
    let row = row.unwrap_or_else(|| panic!("{name} is not in\n{report}"));
    let mut numbers = row.split_whitespace().filter_map(|word| word.parse().ok());
    [(); 3].map(|()| numbers.next().unwrap())
}

#[track_caller]
fn report(directory: &Path, more: &[&str]) -> String {
    let capture = directory.join("x.stackwire");
    let arguments = ["report", capture.to_str().unwrap()];
    stackwire(arguments.iter().chain(more)).succeeded().stdout
}

/// Records what bash does: the report, and the seconds that it was told its children used.
#[track_caller]
fn of_children(directory: &Path, rate: &str, script: &str) -> (String, f64) {
    let script = format!("{script}; times");
    let what = ["--profile", rate, "--capture=x.stackwire", "--", "bash", "-c", &script];
    let printed = recorded(directory, &what).succeeded().stdout;
    // Of itself, and of the children it has waited for: `0m2.912s 0m0.103s`.
    let seconds = |text: &str| {
        let (minutes, seconds) = text.trim_end_matches('s').split_once('m').unwrap();
        minutes.parse::<f64>().unwrap() * 60.0 + seconds.parse::<f64>().unwrap()
    };
    let told = printed.lines().rfind(|line| line.starts_with("0m")).unwrap();
    (report(directory, &[]), told.split_whitespace().map(seconds).sum())
}

#[test]
fn what_brief_processes_used_is_what_their_parent_was_told() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = format!("for i in $(seq 60); do {} 50; done", build::briefs()[0].display());
    let (report, told) = of_children(directory.path(), "--sample-rate=997", &script);
    let [used, sampled, whole] = row(&report, "brief_small");
    assert!((used / told - 1.0).abs() < 0.02, "their parent was told {told} s\n{report}");
    assert!((97.0..103.0).contains(&sampled) && whole > 97.0, "{report}");
    // Of processes it can be told, of threads and of a part of the time it cannot.
    let path = directory.path();
    let chosen = self::report(path, &["--where=comm=brief_small"]);
    assert_eq!(row(&chosen, "all programs"), [used, sampled, whole]);
    for part in ["--where=thread=brief_small", "--time=0..1", "--focus=spin"] {
        assert!(!self::report(path, &[part]).contains("used by"), "{part}");
    }
}

/// Of 3 ms each, of which a timer of 10 ms sees every third.
#[test]
fn what_nobody_sampled_counts() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = format!("for i in $(seq 600); do {} 3; done", build::briefs()[0].display());
    let (report, told) = of_children(directory.path(), "--sample-rate=99", &script);
    let [used, sampled, _] = row(&report, "brief_small");
    assert!((used / told - 1.0).abs() < 0.05, "their parent was told {told} s\n{report}");
    assert!((70.0..130.0).contains(&sampled), "{report}");
    let chosen = self::report(directory.path(), &["--where=comm=brief_small"]);
    assert_eq!(row(&chosen, "all programs")[0], used);
}

/// They are waited for when the epochs they ended in are long over.
#[test]
fn children_that_are_reaped_late_count() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = format!(
        "import os, time\n\
         children = [os.spawnl(os.P_NOWAIT, {0:?}, {0:?}, '20') for _ in range(40)]\n\
         time.sleep(4)\n\
         for child in children: os.waitpid(child, 0)",
        build::briefs()[0].display().to_string()
    );
    std::fs::write(directory.path().join("late.py"), script).unwrap();
    let (report, told) = of_children(directory.path(), "--sample-rate=20", "python3 -S late.py");
    let [used, ..] = row(&report, "all programs");
    assert!((used / told - 1.0).abs() < 0.05, "bash was told {told} s\n{report}");
}

/// The last program of the process has no samples, and is gone when the capture ends.
#[test]
fn what_a_process_was_before_it_became_another_program_counts() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = "(for ((i = 0; i < 200000; i++)); do :; done; exec true)";
    let (report, told) = of_children(directory.path(), "--sample-rate=997", script);
    let [used, sampled, _] = row(&report, "bash");
    assert!((used / told - 1.0).abs() < 0.05, "bash was told {told} s\n{report}");
    assert!((95.0..105.0).contains(&sampled), "{report}");
}

/// Some child runs when the capture ends, and ends soon.
#[test]
fn at_the_end_nothing_counts_twice() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let brief = build::briefs()[0].display();
    let script = format!("while :; do {brief} 200; done");
    let shell = Command::new("bash").args(["-c", &script]).spawn();
    let shell = Running(shell.unwrap());
    let pid = format!("--pid={}", shell.pid());
    for duration in ["--duration=2s", "--duration=2100ms", "--duration=2300ms"] {
        let what = ["--profile", "--capture=x.stackwire", "--sample-rate=997", "--follow"];
        let what = [&what[..], &[duration, &pid]].concat();
        let began = std::time::Instant::now();
        recorded(directory.path(), &what).succeeded();
        eprintln!("{duration}: {:?}", began.elapsed());
        let report = report(directory.path(), &[]);
        let [_, sampled, _] = row(&report, "brief_small");
        assert!((97.0..103.0).contains(&sampled), "{duration}: {report}");
    }
}

#[test]
fn of_a_process_that_runs_it_is_what_it_used_meanwhile() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let busy = Command::new(&build::briefs()[0]).arg("60000").stdout(Stdio::null()).spawn();
    let busy = Running(busy.unwrap());
    std::thread::sleep(std::time::Duration::from_secs(2));
    let pid = format!("--pid={}", busy.pid());
    let what = ["--profile", "--capture=x.stackwire", "--duration=4s", "--sample-rate=997", &pid];
    recorded(directory.path(), &what).succeeded();
    let report = report(directory.path(), &[]);
    let [used, sampled, whole] = row(&report, "brief_small");
    // Of one of several CPUs, for as long as samples were taken.
    assert!((3.0..4.3).contains(&used), "{report}");
    assert!((99.0..101.0).contains(&sampled) && whole > 99.0, "{report}");
}
