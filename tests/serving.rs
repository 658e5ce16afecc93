//! `stackwire serve` with real collectors: many at once, a server killed and started again,
//! windows.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::support::server::{Server, profiles};
use crate::support::{Pprof, Ran, Running, binary, build::work, privileged, stackwire};

fn collector(pid: u32, address: &str, seconds: u32) -> Child {
    Command::new(binary("stackwire-collector"))
        .args([format!("--pid={pid}"), format!("--to=http://{address}")])
        .args(["--epoch=500ms".to_owned(), "--sample-rate=199".to_owned()])
        .args([format!("--duration={seconds}s"), "--verbose".to_owned()])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap()
}

/// Samples a collector took, by its own word, once it has delivered everything.
fn taken(collector: Child) -> u64 {
    let output = collector.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
    assert!(!stderr.contains("lost:"), "{stderr}");
    let line = stderr.lines().find(|line| line.contains("samples taken")).unwrap();
    line.split_whitespace().find_map(|word| word.parse().ok()).unwrap()
}

#[test]
fn several_collectors_at_once_with_windows() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path(), "127.0.0.1:0", &["--window=2s"]);
    let programs: Vec<_> =
        (0..3).map(|_| Running::start(Command::new(work()).args(["plain", "40"]))).collect();
    let collectors: Vec<_> =
        programs.iter().map(|p| collector(p.pid(), &server.address, 5)).collect();
    let total: u64 = collectors.into_iter().map(taken).sum();
    server.terminate();
    let written = profiles(directory.path());
    assert!(written.len() >= 6, "windows of 2 s in 5 s of 3 collectors: {written:?}");
    let found: u64 = written.iter().map(|path| Pprof::read(path).count()).sum();
    assert_eq!(found, total, "samples in windows and samples taken");
    // The last window too has what it needs to name the kernel's functions.
    for path in &written {
        let profile = Pprof::read(path);
        for (id, location) in &profile.locations {
            let kernel = profile.file_of(*id) == "[kernel]";
            assert!(
                !kernel || !location.lines.is_empty(),
                "{}: a kernel frame has no name",
                path.display()
            );
        }
    }
    let captures = std::fs::read_dir(directory.path().join("captures")).unwrap();
    let captures = captures.filter(|entry| {
        entry.as_ref().unwrap().path().extension().is_some_and(|extension| extension == "stackwire")
    });
    assert_eq!(captures.count(), written.len(), "each window's capture is kept");
}

#[test]
fn a_window_has_all_that_was_recorded() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path(), "127.0.0.1:0", &["--window=2s"]);
    let collector = Command::new(binary("stackwire-collector"))
        .args(["--all", "--profile", "--offcpu", "--pmu", "--epoch=500ms", "--duration=5s"])
        .arg(format!("--to=http://{}", server.address))
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(collector.success());
    // Nor is one lost that has no samples.
    let without_samples = Command::new(binary("stackwire-collector"))
        .args(["--all", "--pmu", "--epoch=500ms", "--duration=1s"])
        .arg(format!("--to=http://{}", server.address))
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(without_samples.success());
    server.terminate();
    let written = profiles(directory.path());
    let of = |part: &str| {
        let is_it = |path: &&std::path::PathBuf| path.to_str().unwrap().ends_with(part);
        written.iter().filter(is_it).collect::<Vec<_>>()
    };
    let (on_cpu, off_cpu) = (of("-on-cpu.pb.gz"), of("-off-cpu.pb.gz"));
    assert!(on_cpu.len() >= 2 && on_cpu.len() == off_cpu.len(), "{written:?}");
    for (on_cpu, off_cpu) in on_cpu.into_iter().zip(off_cpu) {
        assert_eq!(Pprof::read(on_cpu).kinds, ["samples/count", "cpu/nanoseconds"]);
        assert!(Pprof::read(off_cpu).kinds.contains(&"off_cpu/nanoseconds".to_owned()));
        let pmu = off_cpu.to_str().unwrap().replace("off-cpu.pb.gz", "pmu.json");
        let pmu: serde_json::Value = serde_json::from_slice(&std::fs::read(pmu).unwrap()).unwrap();
        assert!(pmu["total"]["slices"]["count"].as_u64().unwrap() > 0);
    }
    let all = std::fs::read_dir(directory.path()).unwrap().flatten();
    let all = all.filter(|it| it.path().to_str().unwrap().ends_with("-pmu.json")).count();
    assert!(all > of("-off-cpu.pb.gz").len(), "{all}");
}

#[test]
fn a_server_that_is_killed_loses_nothing_and_counts_nothing_twice() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path(), "127.0.0.1:0", &[]);
    let address = server.address.clone();
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let collector = collector(program.pid(), &address, 9);
    std::thread::sleep(Duration::from_millis(3300));
    server.kill();
    std::thread::sleep(Duration::from_millis(1500));
    let server = Server::start(directory.path(), &address, &[]);
    let total = taken(collector);
    server.terminate();
    let written = profiles(directory.path());
    assert_eq!(written.len(), 2, "one of the killed server's log, one of the rest: {written:?}");
    let found: u64 = written.iter().map(|path| Pprof::read(path).count()).sum();
    assert_eq!(found, total);
}

#[test]
fn a_collector_whose_symbolizer_is_gone_says_so() {
    if !privileged() {
        return;
    }
    // `record` killed: its collector must not live on.
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let directory = tempfile::tempdir().unwrap();
    let mut record = Command::new(binary("stackwire"))
        .args(["record", "--profile", "--duration=60s"])
        .args([format!("--pid={}", program.pid())])
        .arg(format!("--profile-output={}", directory.path().join("out").display()))
        .spawn()
        .unwrap();
    let collectors = || {
        let output = Command::new("pgrep")
            .args(["-P", &record.id().to_string(), "stackwire-colle"])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while collectors().is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    let collector = collectors();
    assert!(!collector.is_empty(), "record started no collector");
    std::thread::sleep(Duration::from_secs(2));
    record.kill().unwrap();
    record.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let alive = || {
        let stat = std::fs::read_to_string(format!("/proc/{collector}/stat")).unwrap_or_default();
        stat.contains("stackwire-colle") && !stat.contains(") Z ")
    };
    while alive() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(!alive(), "the collector outlives its symbolizer");
}

#[test]
fn a_collector_killed_in_the_middle_leaves_a_profile_that_says_so() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out.pb.gz");
    let record = Command::new(binary("stackwire"))
        .args(["record", "--profile", "--duration=60s", "--sample-rate=499"])
        .args([format!("--pid={}", program.pid())])
        .arg(format!("--profile-output={}", output.display()))
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(5));
    let children = Command::new("pgrep")
        .args(["-P", &record.id().to_string(), "stackwire-colle"])
        .output()
        .unwrap();
    let collector: i32 = String::from_utf8(children.stdout).unwrap().trim().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(collector).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let ended = record.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("the capture was cut"), "{stderr}");
    let profile = Pprof::read(&output);
    assert!(profile.count() > 500, "{}", profile.count());
    assert!(profile.share_of("alpha") > 50.0);
}

#[test]
fn two_servers_do_not_share_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", directory.path().join("socket").display());
    let server = Server::start(directory.path(), &socket, &[]);
    let another = |output: &Path| {
        let output = format!("--output-dir={}", output.display());
        stackwire(["serve", "--listen", &socket, &output])
    };
    another(directory.path()).failed(1, "another stackwire serve");
    // Nor does one with another directory take the socket away.
    another(&directory.path().join("other")).failed(1, "another program listens there");
    stackwire(["ps", "--from", &socket]).succeeded();
    server.terminate();
}

#[test]
fn directories_that_are_removed_are_made_again() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("profiles");
    let server = Server::start(&output, "127.0.0.1:0", &["--window=1s"]);
    let program = Running::start(Command::new(work()).args(["plain", "40"]));
    let collector = collector(program.pid(), &server.address, 5);
    std::thread::sleep(Duration::from_millis(1700));
    std::fs::remove_dir_all(&output).unwrap();
    let total = taken(collector);
    server.terminate();
    // What was written by then is gone; the rest is there.
    let found: u64 = profiles(&output).iter().map(|path| Pprof::read(path).count()).sum();
    assert!(found * 2 > total && found < total, "{found} of {total} samples");
}

#[test]
fn epochs_longer_than_a_window_are_windows_of_their_own() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path(), "127.0.0.1:0", &["--window=1s"]);
    let program = Running::start(Command::new(work()).args(["plain", "20"]));
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args([format!("--pid={}", program.pid()), format!("--to=http://{}", server.address)]);
    Ran::of(collector.args(["--epoch=2s", "--duration=5s"])).succeeded();
    server.terminate();
    assert_eq!(profiles(directory.path()).len(), 3);
}

#[test]
fn windows_whose_index_is_lost_or_damaged_are_written_again() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let captures = directory.path().join("captures");
    std::fs::create_dir(&captures).unwrap();
    let program = Running::start(Command::new(work()).args(["plain", "20"]));
    let capture = directory.path().join("capture");
    let status = Command::new(binary("stackwire-collector"))
        .args([format!("--pid={}", program.pid()), format!("--output={}", capture.display())])
        .args(["--duration=1s", "--sample-rate=199"])
        .status();
    assert!(status.unwrap().success());
    for id in ["a", "b"] {
        let name = format!("{}-000000.stackwire", id.repeat(32));
        std::fs::copy(&capture, captures.join(name)).unwrap();
    }
    Server::start(directory.path(), "127.0.0.1:0", &[]).terminate();
    let written = profiles(directory.path());
    assert_eq!(written.len(), 2, "{written:?}");
    let before: Vec<_> = written.iter().map(|path| std::fs::read(path).unwrap()).collect();
    // Nothing is done twice while the index is there.
    std::fs::remove_file(&written[0]).unwrap();
    Server::start(directory.path(), "127.0.0.1:0", &[]).terminate();
    assert_eq!(profiles(directory.path()), written[1..]);
    std::fs::write(captures.join("windows.db"), "no index").unwrap();
    // With its write-ahead log SQLite would repair it.
    assert!(!captures.join("windows.db-wal").exists(), "the server has closed its index");
    Server::start(directory.path(), "127.0.0.1:0", &[]).terminate();
    assert_eq!(profiles(directory.path()), written);
    let after: Vec<_> = written.iter().map(|path| std::fs::read(path).unwrap()).collect();
    assert!(before == after, "the same profiles under the same names");
    assert!(captures.join("windows.db.damaged").exists());
}
