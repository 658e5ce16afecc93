//! The first samples of programs nobody has met before: they are walked on once their tables are
//! there, from copies that go nowhere.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::newborn::{Loop, whole};
use crate::support::go::releases;
use crate::support::peer::{Does, Peer};
use crate::support::secret::{assert_no_secret, has_secret, python_with_a_secret};
use crate::support::server::Server;
use crate::support::whole::ended;
use crate::support::{Ran, binary, build, privileged};

/// Captures the host for 5 s with no table made before.
fn capture(directory: &Path, more: &[&str]) -> PathBuf {
    capture_for("5s", directory, more)
}

fn capture_for(duration: &str, directory: &Path, more: &[&str]) -> PathBuf {
    let file = directory.join("x.stackwire");
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args(["-a", "--sample-rate=997", "--duration", duration, "--output"]).arg(&file);
    let cache = tempfile::tempdir().unwrap();
    Ran::of(collector.args(more).env("XDG_CACHE_HOME", cache.path())).succeeded();
    file
}

/// Programs of Debian that do nothing but work, and what they are called.
fn programs() -> Vec<(&'static str, Loop)> {
    let start = |name, program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).stdin(File::open("/dev/zero").unwrap()).stdout(Stdio::null());
        (name, Loop(command.spawn().unwrap()))
    };
    vec![
        start(
            "perl",
            "perl",
            &["-e", "while (1) { $x{$i++ % 1000} .= 'a'; %x = () if $i % 1e5 == 0 }"],
        ),
        start("gzip", "gzip", &["-c"]),
        start("sha256sum", "sha256sum", &[]),
        start("python3", "python3", &["-c", "while True: sorted(str(i) for i in range(1000))"]),
    ]
}

#[test]
fn stacks_are_whole_from_the_first_sample() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let running = programs();
    std::thread::sleep(Duration::from_secs(1));
    let file = capture(directory.path(), &[]);
    for (comm, _) in &running {
        let (stacks, share, report) = whole(&file, comm, "..1");
        eprintln!("{comm}: {share} % of {stacks} in the first second");
        assert!(stacks > 100 && share >= 99.0, "{comm}: {share} % of {stacks}: {report}");
    }
}

/// Go's runtime is often on a stack of its own, and the goroutine's goes on behind it: copies have
/// both. `both` calls C as well, on that stack, and C calls Go. Some of what they do is deeper than
/// a copy.
#[test]
fn stacks_of_go_are_whole_from_the_first_sample() {
    if !privileged() {
        return;
    }
    for name in ["server", "both"] {
        let (mut stacks, mut roots, mut not_copied) = (0.0, 0.0, 0.0);
        for release in releases() {
            let directory = tempfile::tempdir().unwrap();
            let running = release.run(name);
            std::thread::sleep(Duration::from_millis(300));
            let file = capture_for("500ms", directory.path(), &[]);
            drop(running);
            let (whole, share, report) = whole(&file, name, "..");
            eprintln!(
                "{name}, {}: {share} % of the stacks are whole, {whole} of them",
                release.name
            );
            assert!(whole > 0, "{report}");
            let all = whole as f64 * 100.0 / share;
            not_copied += all * ended(&report, "in memory that was not copied") / 100.0;
            (stacks, roots) = (stacks + all, roots + whole as f64);
        }
        let said = format!("{name}: of {stacks} {roots} are whole, {not_copied} were not copied");
        assert!(stacks > 1000.0 && roots >= stacks * 0.98, "{said}");
        assert!(not_copied < stacks * 0.004, "{said}");
    }
}

#[test]
fn without_copies_they_end_where_tables_are_missing() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let running = programs();
    let file = capture(directory.path(), &["--stack-copies=off"]);
    let is_cut = |comm: &str| ended(&whole(&file, comm, "..1").2, "no unwind table yet") > 0.0;
    assert!(running.iter().any(|(comm, _)| is_cut(comm)), "all tables were there at once");
}

/// Records where a shell and what it calls wait, which nobody has met before.
fn waits(directory: &Path, more: &[&str]) -> PathBuf {
    let file = directory.join("x.stackwire");
    let script = "sleep 2 & perl -e 'select(undef, undef, undef, 0.05) for 1..20'; wait";
    let mut record = Command::new(binary("stackwire"));
    record.args(["record", "--offcpu"]).args(more).arg("--capture").arg(&file);
    let cache = tempfile::tempdir().unwrap();
    record.args(["--", "sh", "-c", script]).env("XDG_CACHE_HOME", cache.path());
    Ran::of(record.current_dir(directory)).succeeded();
    file
}

/// Half of what a program waits may begin before its tables are there: all of it, in `sleep`.
#[test]
fn stacks_of_waits_are_whole_from_the_first() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = waits(directory.path(), &[]);
    for (comm, least) in [("sh", 2), ("sleep", 1), ("perl", 20)] {
        let (stacks, share, report) = whole(&file, comm, "..");
        assert!(stacks >= least && share >= 99.0, "{comm}: {share} % of {stacks}: {report}");
    }
    let file = waits(directory.path(), &["--stack-copies=off"]);
    let (_, share, report) = whole(&file, "sleep", "..");
    assert!(share < 99.0, "its table was there at once: {report}");
}

/// What is in the stack of a process while its stacks are copied is in no message of the capture.
#[test]
fn no_byte_of_a_stack_is_in_a_capture() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let running = Loop(Command::new(build::secret()).spawn().unwrap());
    let file = capture(directory.path(), &["--share-executables=always"]);
    drop(running);
    let (stacks, share, report) = whole(&file, "secret", "..1");
    assert!(stacks > 100 && share >= 99.0, "{share} % of {stacks}: {report}");
    assert_no_secret(&file);
}

/// Nor in what goes over the network, what waits for that in a file, and the log of a server.
#[test]
fn no_byte_of_a_process_is_on_the_wire_in_the_spool_or_in_a_log() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let running = Loop(Command::new(build::secret()).spawn().unwrap());
    let python = python_with_a_secret();
    let collector = |address: &str, more: &[String]| {
        let mut collector = Command::new(binary("stackwire-collector"));
        collector.args(["--profile", "--offcpu", "--sample-rate=997", "--duration=4s"]);
        collector.arg("--epoch=500ms");
        collector.arg(format!("--pid={},{}", running.0.id(), python.pid()));
        collector.args(["--share-executables=always", &format!("--to=http://{address}")]);
        // Stacks are copied while there are no tables.
        let cache = tempfile::tempdir_in(directory.path()).unwrap().keep();
        collector.args(more).env("XDG_CACHE_HOME", cache).spawn().unwrap()
    };

    let served = directory.path().join("served");
    let server = Server::start(&served, "127.0.0.1:0", &["--window=1h", "--log-max=64"]);
    assert!(collector(&server.address, &[]).wait().unwrap().success());
    server.kill();
    let logs =
        std::fs::read_dir(served.join("captures")).unwrap().map(|entry| entry.unwrap().path());
    let logs: Vec<_> =
        logs.filter(|it| it.extension().is_some_and(|it| it == "stackwire")).collect();
    assert_eq!(logs.len(), 1, "{logs:?}");
    assert_no_secret(&logs[0]);

    let peer = Peer::start("127.0.0.1:0", Does::Withhold);
    let spool = directory.path().join("spool");
    std::fs::create_dir(&spool).unwrap();
    let options = ["--drain-timeout=1s".to_owned(), "--buffer=0".to_owned()];
    let spooled = format!("--spool={}", spool.display());
    let mut child = collector(&peer.address, &[&options[..], &[spooled]].concat());
    std::thread::sleep(Duration::from_millis(3500));
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap();
    let mut kept = Vec::new();
    for descriptor in descriptors.map(|entry| entry.unwrap().path()) {
        if std::fs::read_link(&descriptor).is_ok_and(|to| to.starts_with(&spool)) {
            let epochs = zstd::decode_all(File::open(&descriptor).unwrap()).unwrap();
            kept.push(epochs);
        }
    }
    child.wait().unwrap();
    assert!(kept.len() == 1 && kept[0].len() > 10_000, "{kept:?}");
    assert!(!has_secret(&kept[0]), "in the spool");
    let seen = peer.seen.lock().unwrap();
    assert!(seen.epochs.values().sum::<u64>() > 300, "{:?}", seen.epochs);
    for (number, message) in seen.messages.iter().enumerate() {
        assert!(!has_secret(message), "in message {number} on the wire");
    }
}
