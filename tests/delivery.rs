//! Collectors whose symbolizers are away, refuse, or do not answer: what they took is delivered, or
//! counted.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tonic::Code;

use crate::support::build::work;
use crate::support::mounted::Tmpfs;
use crate::support::peer::{Does, Peer};
use crate::support::server::{Server, profiles};
use crate::support::{Pprof, Running, binary, privileged};

fn collector(more: &[&str]) -> Child {
    Command::new(binary("stackwire-collector"))
        .args(["--epoch=300ms", "--sample-rate=199", "--verbose"])
        .args(more)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Samples taken and lost, by the collector's own word.
fn totals(output: &Output) -> (u64, u64) {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let first = |line: &str| line.split_whitespace().find_map(|word| word.parse::<u64>().ok());
    let taken = stderr.lines().find(|line| line.contains("samples taken"));
    let taken = taken.and_then(first).unwrap_or_else(|| panic!("{stderr}"));
    let lost = stderr.lines().filter(|line| line.contains("lost: ")).filter_map(first).sum();
    (taken, lost)
}

fn samples(directory: &Path) -> u64 {
    profiles(directory).iter().map(|path| Pprof::read(path).count()).sum()
}

/// Waits until a collector streams to a server. Between attempts it pauses for up to 10 s.
fn comes_back(directory: &Path) {
    let deadline = Instant::now() + Duration::from_secs(25);
    let is_log = |path: &Path| path.extension().is_some_and(|extension| extension == "stackwire");
    loop {
        let logs = std::fs::read_dir(directory.join("captures")).unwrap();
        if logs.flatten().any(|entry| is_log(&entry.path())) {
            break;
        }
        assert!(Instant::now() < deadline, "it does not come back");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_secs(1));
}

fn stop(child: &Child) {
    let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
}

/// A collector that is stopped delivers everything; then the server ends.
fn ends(collector: Child, server: Server) -> Output {
    stop(&collector);
    let output = collector.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    server.terminate();
    output
}

#[test]
fn no_status_ends_a_collector() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let mut peer = Peer::start("127.0.0.1:0", Does::Refuse(Code::Unimplemented));
    let address = peer.address.clone();
    let (pid, to) = (format!("--pid={}", program.pid()), format!("--to=http://{address}"));
    let collector = collector(&[&pid, &to]);
    let does = [
        Does::Refuse(Code::Unimplemented),
        Does::Refuse(Code::FailedPrecondition),
        Does::Refuse(Code::PermissionDenied),
        Does::RefuseEpochs(Code::InvalidArgument),
        Does::RefuseEpochs(Code::Unimplemented),
    ];
    for does in does {
        drop(peer);
        peer = Peer::start(&address, does);
        let deadline = Instant::now() + Duration::from_secs(25);
        while peer.seen.lock().unwrap().streams == 0 {
            assert!(Instant::now() < deadline, "{does:?}: it does not come back");
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    drop(peer);
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path(), &address, &[]);
    comes_back(directory.path());
    let output = ends(collector, server);
    let (taken, lost) = totals(&output);
    assert_eq!((samples(directory.path()), lost), (taken, 0));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("cannot deliver to http://127.0.0.1:"), "{said}");
    assert!(said.contains("delivering again"), "{said}");
}

#[test]
fn a_symbolizer_of_an_older_format_ends_it() {
    if !privileged() {
        return;
    }
    let peer = Peer::start("127.0.0.1:0", Does::Older);
    // It ends while samples wait for the unwind tables of their programs: those count as well.
    let cache = tempfile::tempdir().unwrap();
    let cache = format!("--unwind-cache-dir={}", cache.path().display());
    let _program = Running::start(
        Command::new("python3").args(["-c", "print('ready', flush=True)\nwhile True: pass"]),
    );
    let output = collector(&["-a", &cache, &format!("--to=http://{}", peer.address)]);
    let output = output.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("it reads format 1, this collector writes 2"), "{said}");
    let (taken, lost) = totals(&output);
    assert_eq!(taken, lost, "{said}");
}

#[test]
fn the_next_symbolizer_takes_over() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| directory.path().join(name));
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let server = Server::start(&first, "127.0.0.1:0", &[]);
    let next = Server::start(&second, "127.0.0.1:0", &[]);
    // A name with three addresses, one of which is the right one.
    let port = next.address.rsplit(':').next().unwrap();
    let hosts = directory.path().join("hosts");
    std::fs::write(&hosts, "127.0.0.3 name\n127.0.0.1 name\n127.0.0.4 name\n").unwrap();
    let mount = format!("mount --bind {} /etc/hosts && exec \"$@\"", hosts.display());
    let collector = Command::new("unshare")
        .args(["-m", "sh", "-c", &mount, "sh"])
        .arg(binary("stackwire-collector"))
        .args(["--epoch=300ms", "--sample-rate=199", "--verbose", "--duration=6s"])
        .args([format!("--pid={}", program.pid()), format!("--to=http://name:{port}")])
        .arg("--insecure")
        .args(["--to=http://127.0.0.1:1".to_owned(), format!("--to=http://{}", server.address)])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(3));
    // All that has come is acknowledged: nothing is delivered twice.
    next.terminate();
    let output = collector.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    server.terminate();
    let (taken, lost) = totals(&output);
    let found = [samples(&first), samples(&second)];
    assert!(found.iter().all(|&samples| samples > 100), "{found:?}");
    assert_eq!((found.iter().sum::<u64>(), lost), (taken, 0), "{found:?}");
}

#[test]
fn a_collector_that_cannot_deliver_ends_in_time_and_says_what_it_cost() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let pid = format!("--pid={}", program.pid());
    let silent = Peer::start("127.0.0.1:0", Does::Withhold);
    for to in ["--to=http://127.0.0.1:1", &format!("--to=http://{}", silent.address)] {
        let collector = collector(&[&pid, to, "--drain-timeout=2s"]);
        std::thread::sleep(Duration::from_secs(3));
        stop(&collector);
        let stopped = Instant::now();
        let output = collector.wait_with_output().unwrap();
        let took = stopped.elapsed();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        // What it has to do besides takes a second on a busy machine.
        assert!(took < Duration::from_secs(6), "{took:?}");
        let (taken, lost) = totals(&output);
        assert!(taken > 100 && taken == lost, "{taken} taken, {lost} lost");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("not everything was delivered within 2 s"), "{said}");
    }
}

#[test]
fn what_is_on_its_way_is_not_counted_lost() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let peer = Peer::start("127.0.0.1:0", Does::Withhold);
    let collector = collector(&[
        &format!("--pid={}", program.pid()),
        &format!("--to=http://{}", peer.address),
        "--buffer=0",
        "--drain-timeout=1s",
    ]);
    std::thread::sleep(Duration::from_secs(3));
    // One at a time is on its way, and none of those that wait can be kept.
    let seen = peer.seen.lock().unwrap().epochs.clone();
    assert_eq!(seen.len(), 1, "{seen:?}");
    // It was durable where it went: the next answer says so.
    let (address, directory) = (peer.address.clone(), tempfile::tempdir().unwrap());
    drop(peer);
    let server = Server::start(directory.path(), &address, &[]);
    comes_back(directory.path());
    let output = ends(collector, server);
    let (taken, lost) = totals(&output);
    assert!(lost > 0, "{output:?}");
    assert_eq!(samples(directory.path()) + lost, taken);
}

#[test]
fn an_epoch_that_is_refused_again_and_again_is_dropped_and_counted() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let peer = Peer::start("127.0.0.1:0", Does::RefuseEpochs(Code::InvalidArgument));
    let collector = collector(&[
        &format!("--pid={}", program.pid()),
        &format!("--to=http://{}", peer.address),
        "--drain-timeout=1s",
    ]);
    let deadline = Instant::now() + Duration::from_secs(20);
    // The first three times it is the first that is sent first.
    while peer.seen.lock().unwrap().epochs.len() < 2 {
        assert!(Instant::now() < deadline, "it is sent for ever");
        std::thread::sleep(Duration::from_millis(20));
    }
    let first = peer.seen.lock().unwrap().epochs.first_key_value().map(|(_, samples)| *samples);
    let (address, directory) = (peer.address.clone(), tempfile::tempdir().unwrap());
    drop(peer);
    let server = Server::start(directory.path(), &address, &[]);
    comes_back(directory.path());
    let output = ends(collector, server);
    let (taken, lost) = totals(&output);
    assert!(lost >= first.unwrap() && lost < taken / 2, "{taken} taken, {lost} lost");
    assert_eq!(samples(directory.path()) + lost, taken);
}

#[test]
fn on_a_full_disk_collectors_wait_until_there_is_room() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let disk = Tmpfs::mount(directory.path(), "24m");
    let server = Server::start(directory.path(), "127.0.0.1:0", &["--window=1s"]);
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let collector = collector(&[
        &format!("--pid={}", program.pid()),
        &format!("--to=http://{}", server.address),
    ]);
    comes_back(directory.path());
    let filler = directory.path().join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    while file.write_all(&[1; 1 << 16]).is_ok() {}
    std::thread::sleep(Duration::from_millis(500));
    let bytes = |directory: &Path| -> u64 {
        let logs = std::fs::read_dir(directory.join("captures")).unwrap().flatten();
        logs.map(|log| log.path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "stackwire"))
            .map(|path| path.metadata().unwrap().len())
            .sum()
    };
    let before = bytes(directory.path());
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(bytes(directory.path()), before, "nothing is added");
    drop(file);
    std::fs::remove_file(filler).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let output = ends(collector, server);
    let (taken, lost) = totals(&output);
    assert_eq!((samples(directory.path()), lost), (taken, 0));
    assert!(taken > 100, "{taken}");
    drop(disk);
}
