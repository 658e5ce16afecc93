//! Where outputs go: descriptors, links, pipes, and what must never be replaced.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::{Pprof, Ran, Running, binary, build::work, privileged, recorded, stackwire};

/// A capture of a program with known functions.
fn capture(directory: &Path) {
    let program = Running::start(Command::new(work()).args(["plain", "20"]));
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args(["--duration=1s", "--sample-rate=499", &format!("--pid={}", program.pid())]);
    Ran::of(collector.arg("--output").arg(directory.join("x.stackwire"))).succeeded();
}

/// Runs a script with a `/dev` of its own: what goes wrong there costs this machine nothing. `$1`
/// is the program.
fn in_own_dev(directory: &Path, script: &str) -> Ran {
    let set_up = "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && ln -s /proc/self/fd /dev/fd && \
        ln -s /proc/self/fd/1 /dev/stdout && ";
    let mut shell = Command::new("unshare");
    shell.args(["--mount", "sh", "-c", &format!("{set_up}{script}"), "sh"]);
    Ran::of(shell.arg(binary("stackwire")).current_dir(directory))
}

#[test]
fn standard_output_and_descriptors_are_written_and_never_replaced() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    capture(directory.path());
    stackwire([
        "resolve".as_ref(),
        at("x.stackwire").as_os_str(),
        "--folded".as_ref(),
        at("x.folded").as_os_str(),
    ])
    .succeeded();
    let folded = std::fs::read_to_string(at("x.folded")).unwrap();
    assert!(folded.contains("alpha"));
    for (name, to) in [
        ("-", ">>out"),
        ("/dev/stdout", ">>out"),
        ("/dev/fd/1", ">>out"),
        ("/dev/fd/7", ">/dev/null 7>>out"),
    ] {
        let script = format!(
            "printf 'before\\n' >out && \"$1\" report x.stackwire --folded {name} {to} && readlink /dev/stdout"
        );
        let ran = in_own_dev(directory.path(), &script).succeeded();
        assert_eq!(ran.stdout, "/proc/self/fd/1\n", "{name}: the link is what it was");
        let written = std::fs::read_to_string(at("out")).unwrap();
        assert_eq!(written, format!("before\n{folded}"), "{name}: the stacks and nothing else");
    }
    // Who writes there next goes on behind it.
    let script =
        "{ \"$1\" report x.stackwire --folded /dev/fd/7 >/dev/null; echo after >&7; } 7>out";
    in_own_dev(directory.path(), script).succeeded();
    assert_eq!(std::fs::read_to_string(at("out")).unwrap(), format!("{folded}after\n"));
    in_own_dev(directory.path(), "\"$1\" resolve x.stackwire -o - >out.pb.gz").succeeded();
    assert_eq!(Pprof::read(&at("out.pb.gz")).samples, Pprof::read(&at("x.pb.gz")).samples);
}

#[test]
fn what_a_link_leads_to_is_written_and_the_link_kept() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    capture(directory.path());
    std::fs::create_dir(at("elsewhere")).unwrap();
    std::fs::write(at("elsewhere/old"), "x".repeat(1 << 20)).unwrap();
    for target in ["elsewhere/old", "elsewhere/new"] {
        let _ = std::fs::remove_file(at("link"));
        std::os::unix::fs::symlink(target, at("link")).unwrap();
        let report = ["report".into(), at("x.stackwire").into_os_string()];
        stackwire(report.into_iter().chain(["--folded".into(), at("link").into_os_string()]))
            .succeeded();
        assert_eq!(std::fs::read_link(at("link")).unwrap(), Path::new(target));
        let written = std::fs::read_to_string(at(target)).unwrap();
        assert!(written.contains("alpha") && !written.contains('\0') && !written.contains("xxx"));
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    capture(directory.path());
    let mut report = Command::new(binary("stackwire"));
    report.args(["report", "x.stackwire", "--folded", "-"]).current_dir(&directory);
    let mut report = report.stdout(Stdio::piped()).spawn().unwrap();
    drop(report.stdout.take());
    assert!(report.wait().unwrap().success());
}

#[test]
fn profiles_named_within_a_minute_are_both_kept() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = Running::start(Command::new(work()).args(["plain", "20"]));
    for _ in 0..2 {
        // CPU time for a second, as people type it.
        let mut record = Command::new(binary("stackwire"));
        record.args([
            "record",
            "-F",
            "499",
            "--duration",
            "1",
            "--pid",
            &program.pid().to_string(),
        ]);
        Ran::of(record.current_dir(&directory)).succeeded();
    }
    let written = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    let profiles = written.filter(|path| path.extension().is_some_and(|it| it == "gz"));
    let written: Vec<Pprof> = profiles.map(|path| Pprof::read(&path)).collect();
    assert_eq!(written.len(), 2);
    // Each has its own second, of which others may take a part.
    assert!(written.iter().all(|profile| (50..1200).contains(&profile.count())));
}

/// A device that is full takes nothing; what else was asked for is written, and it is said where
/// the capture is.
#[test]
fn one_output_that_cannot_be_written_does_not_lose_the_others() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let work = ["sh", "-c", "sleep 0.1; i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"];
    let ways = ["--profile", "--profile-output=on.pb.gz", "--offcpu", "--pmu"];
    let full = ["--offcpu-output=off.pb.gz", "--pmu-output=/dev/full", "--folded=/dev/full", "--"];
    let ran = recorded(directory.path(), &[&ways[..], &full[..], &work[..]].concat());
    assert!(ran.stderr.contains("capture: on.stackwire"), "{}", ran.stderr);
    ran.failed(1, "cannot write /dev/full: No space left on device");
    for name in ["on.pb.gz", "off.pb.gz"] {
        assert!(!Pprof::read(&directory.path().join(name)).samples.is_empty(), "{name}");
    }
    let at = |name: &str| directory.path().join(name);
    // What the capture does not hold is not written, and neither is what nobody would look at.
    recorded(
        directory.path(),
        &["--profile", "--capture=x.stackwire", "--", work[0], work[1], work[2]],
    )
    .succeeded();
    let capture = at("x.stackwire").display().to_string();
    let pmu = format!("--pmu-output={}", at("pmu.txt").display());
    let output = format!("--output={}", at("y.pb.gz").display());
    let none = "does not say how threads were scheduled";
    stackwire(["resolve", &capture, &output, &pmu]).failed(1, none);
    let waits = format!("--offcpu-output={}", at("waits.pb.gz").display());
    let ran = stackwire(["resolve", &capture, &output, &waits]).succeeded();
    assert!(ran.stderr.contains("no samples: not written: "), "{}", ran.stderr);
    assert!(!at("waits.pb.gz").exists() && at("y.pb.gz").exists());
    for way in ["--per-pid", "--pmu-format=json"] {
        stackwire(["report", &capture, way]).failed(2, "say how --pmu is written");
    }
}
