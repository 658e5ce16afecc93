//! The whole host, with processes that come and go: labels, names, and no sample unaccounted for.

use std::process::Command;

use crate::support::{Pprof, binary, privileged, report, stackwire};

#[test]
fn two_thousand_short_processes() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out.pb.gz");
    let capture = directory.path().join("out.stackwire");
    // /bin/true and a program of our own with symbols, that lives for some 5 ms.
    let work = crate::support::build::work().to_str().unwrap();
    let script = format!(
        "i=0; while [ $i -lt 1000 ]; do /bin/true; {work} plain 0.005 >/dev/null; i=$((i+1)); done"
    );
    let mut shell = Command::new("sh").args(["-c", &script]).spawn().unwrap();
    let arguments = [
        "record".to_owned(),
        "--profile".to_owned(),
        "--all".to_owned(),
        "--duration=20s".to_owned(),
        "--sample-rate=499".to_owned(),
        format!("--profile-output={}", output.display()),
        format!("--capture={}", capture.display()),
    ];
    stackwire(arguments).succeeded();
    let _ = shell.kill();
    let _ = shell.wait();

    let profile = Pprof::read(&output);
    for sample in &profile.samples {
        for label in ["pid", "tid", "comm", "thread"] {
            assert!(sample.labels.contains_key(label), "{sample:?} has no {label}");
        }
    }
    profile.assert_addresses_in_mappings();
    let ours = profile.samples.iter().filter(|sample| sample.labels["comm"] == "work");
    let pids: std::collections::HashSet<_> =
        ours.map(|sample| sample.labels["pid"].clone()).collect();
    assert!(pids.len() > 300, "only {} of the short processes were seen", pids.len());

    let (mut frames, mut named) = (0, 0);
    for sample in &profile.samples {
        for id in &sample.locations {
            let file = profile.file_of(*id);
            if file == work
                || file.ends_with("/libc.so.6")
                || file.ends_with("/ld-linux-x86-64.so.2")
            {
                frames += sample.count;
                named += sample.count * u64::from(!profile.locations[id].lines.is_empty());
            }
        }
    }
    let share = named as f64 * 100.0 / frames as f64;
    assert!(share >= 99.0, "{share} % of {frames} frames with symbols are named");

    // "samples taken 123 = 120 in the profile + 3 lost", counted by the kernel and by Go.
    let text = report(&capture);
    let line = text.lines().find(|line| line.starts_with("samples taken")).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [taken, delivered, lost] = numbers[..] else { panic!("{line}") };
    assert_eq!(taken, delivered + lost);
    assert_eq!(delivered, profile.count());
    assert!(!text.contains("unaccounted"), "{text}");
}

#[test]
fn a_full_ring_is_counted_and_told() {
    if !privileged() {
        return;
    }
    // Stopped for a while, the collector cannot keep up with deep stacks at a high rate.
    let directory = tempfile::tempdir().unwrap();
    let capture = directory.path().join("out.stackwire");
    let program = crate::support::Running::start(
        Command::new(crate::support::build::work()).args(["deep", "40"]),
    );
    let mut collector = Command::new(binary("stackwire-collector"))
        .args([format!("--pid={}", program.pid()), "--sample-rate=20000".to_owned()])
        .args(["--duration=6s".to_owned(), format!("--output={}", capture.display())])
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2500));
    let pid = rustix::process::Pid::from_raw(collector.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2000));
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert!(collector.wait().unwrap().success());
    let text = report(&capture);
    assert!(text.contains("ring buffer full"), "{text}");
    assert!(!text.contains("unaccounted"), "{text}");
}
