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

/// Sixty processes of 50 ms, one after the other: the report, and the seconds that their shell was
/// told they used.
#[track_caller]
fn of_brief_processes(directory: &Path, rate: &str) -> (String, f64) {
    let brief = build::briefs()[0].display();
    let script = format!("for i in $(seq 60); do {brief} 50; done; times");
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
    let (report, told) = of_brief_processes(directory.path(), "--sample-rate=997");
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

#[test]
fn what_nobody_sampled_counts() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (report, told) = of_brief_processes(directory.path(), "--sample-rate=2");
    let [used, ..] = row(&report, "all programs");
    let [unsampled, sampled, _] = row(&report, "processes without samples");
    assert!((used / told - 1.0).abs() < 0.05, "their parent was told {told} s\n{report}");
    assert!(unsampled > used * 0.7 && sampled == 0.0, "{report}");
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
    assert!((3.0..4.3).contains(&used), "{report}");
    assert!((99.0..101.0).contains(&sampled) && whole > 99.0, "{report}");
}
