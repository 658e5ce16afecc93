//! `go tool pprof` reads what is written, in every view.

use std::process::Command;

use crate::support::pprof::go;
use crate::support::{Pprof, Running, build::work, privileged, stackwire};

#[test]
fn every_view() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let program = Running::start(Command::new(work()).args(["threads", "30"]));
    // Not equally long: of equal ones pprof shows no difference, and no function.
    for (name, duration) in [("one.pb.gz", 2), ("two.pb.gz", 4)] {
        stackwire([
            "record",
            "--profile",
            &format!("--pid={}", program.pid()),
            &format!("--duration={duration}s"),
            "--tag=build=42",
            &format!("--profile-output={}", at(name).display()),
            &format!("--flamegraph={}", at("graph.svg").display()),
            &format!("--folded={}", at("stacks.folded").display()),
        ])
        .succeeded();
    }
    let (one, two) = (at("one.pb.gz"), at("two.pb.gz"));
    let top = go(&["-top"], &[&one]);
    assert!(top.contains("Type: cpu") && top.contains("alpha"), "{top}");
    assert!(go(&["-top", "-sample_index=samples"], &[&one]).contains("Type: samples"));
    let traces = go(&["-traces"], &[&one]);
    assert!(
        traces.lines().any(|line| line.trim().starts_with("thread:") && line.ends_with("first"))
    );
    assert!(go(&["-comments"], &[&one]).contains("build=42"));
    assert!(go(&["-tags"], &[&one]).contains("second"));
    assert!(go(&["-top", "-tagfocus=thread=first"], &[&one]).contains("alpha"));
    assert!(go(&["-top", "-lines"], &[&one]).contains("work.c:"));
    let base = format!("-diff_base={}", one.display());
    assert!(go(&["-top", &base], &[&two]).contains("alpha"));
    assert!(go(&["-top"], &[one.as_path(), two.as_path()]).contains("alpha"), "two profiles merge");

    let raw = Pprof::read(&one);
    raw.assert_addresses_in_mappings();
    let main = raw.mappings.get(&1).unwrap();
    assert_eq!(main.file, work().to_str().unwrap(), "the first mapping is the program");
    let build_id = Command::new("readelf").arg("-n").arg(work()).output().unwrap();
    assert!(String::from_utf8_lossy(&build_id.stdout).contains(&main.build_id));
    assert_eq!(raw.period, 10_101_010);
    // Go's reader finds the same in it.
    let theirs = Pprof::read_by_go(&one);
    // It numbers anew, and adds up what is equal.
    let lines = |profile: &Pprof| {
        let mut found = std::collections::BTreeMap::new();
        for sample in &profile.samples {
            let lines = sample.locations.iter().flat_map(|id| profile.locations[id].lines.clone());
            *found.entry(lines.collect::<Vec<_>>()).or_insert(0) += sample.count;
        }
        found
    };
    assert_eq!((theirs.period, theirs.count()), (raw.period, raw.count()));
    assert_eq!(lines(&theirs), lines(&raw));
    assert!(raw.locations.values().flat_map(|at| &at.lines).any(|(.., line)| *line > 0));
    // Values are periods: samples × period.
    assert!(raw.samples.iter().all(|sample| sample.value == sample.count * 10_101_010));

    let svg = std::fs::read_to_string(at("graph.svg")).unwrap();
    assert!(svg.contains("alpha") && svg.contains("</svg>"));
    let folded = std::fs::read_to_string(at("stacks.folded")).unwrap();
    let line = folded.lines().find(|line| line.contains("alpha")).unwrap();
    assert!(line.starts_with("work;") && line.contains(";run;all;alpha"), "{line}");
}
