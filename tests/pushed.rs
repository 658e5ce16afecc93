//! `serve` pushes its profiles: all of them, and a piece twice only where its answer was lost.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use stackwire_proto::v1;

use crate::support::build::work;
use crate::support::client::{epoch, hello, sealed};
use crate::support::server::{Server, profiles};
use crate::support::tokens::Tokens;
use crate::support::{Pprof, Ran, Running, binary, privileged, stackwire, test_cache};

/// Pyroscope's own code for its API, which keeps what it is sent.
struct Receiver {
    child: Child,
    address: String,
    directory: PathBuf,
}

/// A piece, as it was received.
#[derive(Debug, PartialEq, Eq)]
struct Received {
    labels: BTreeMap<String, String>,
    id: String,
    tenant: String,
    authorization: String,
}

impl Receiver {
    fn start(directory: &Path, listen: &str) -> Self {
        std::fs::create_dir_all(directory).unwrap();
        let mut child = Command::new(test_cache().join("pyroscope"))
            .arg(directory)
            .arg(listen)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut address = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
        let address = address.trim().to_owned();
        Self { child, address, directory: directory.to_owned() }
    }

    fn url(&self) -> String {
        format!("--pyroscope-url=http://{}", self.address)
    }

    /// What it answers from now on.
    fn refuse(&self, code: Option<&str>) {
        let path = self.directory.join("refuse");
        match code {
            Some(code) => {
                std::fs::write(self.directory.join("new"), code).unwrap();
                std::fs::rename(self.directory.join("new"), path).unwrap();
            }
            None => std::fs::remove_file(path).unwrap(),
        }
    }

    fn received(&self) -> Vec<(Received, Pprof)> {
        let entries = std::fs::read_dir(&self.directory).unwrap().map(|it| it.unwrap().path());
        let mut told: Vec<PathBuf> =
            entries.filter(|path| path.extension().is_some_and(|it| it == "json")).collect();
        told.sort();
        let read = |path: PathBuf| {
            let said: serde_json::Value =
                serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
            let labels = said["Labels"].as_object().unwrap().iter();
            let about = Received {
                labels: labels.map(|(name, value)| (name.clone(), text(value))).collect(),
                id: text(&said["ID"]),
                tenant: text(&said["Tenant"]),
                authorization: text(&said["Authorization"]),
            };
            let profile = path.with_extension("pb.gz");
            (about, Pprof::read(&profile))
        };
        told.into_iter().map(read).collect()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Samples by name of the process.
fn by_comm(profiles: impl IntoIterator<Item = Pprof>) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for sample in profiles.into_iter().flat_map(|profile| profile.samples) {
        *all.entry(sample.labels["comm"].clone()).or_default() += sample.count;
    }
    all
}

fn by_label(received: &[(Received, Pprof)], label: &str) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for (about, profile) in received {
        *all.entry(about.labels[label].clone()).or_default() += profile.count();
    }
    all
}

/// Windows by state, of all captures.
fn windows(tokens: &Tokens, server: &Server) -> BTreeMap<String, u64> {
    let from = format!("--from=https://{}", server.address);
    let [ca, token] = tokens.proofs("ops");
    let listed = stackwire(["ps", "--format=json", &from, &ca, &token]).succeeded().stdout;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let mut all = BTreeMap::new();
    for capture in listed["captures"].as_array().unwrap() {
        for (state, count) in capture["windows"].as_object().unwrap() {
            *all.entry(state.clone()).or_default() += count.as_u64().unwrap();
        }
    }
    all.retain(|_, count| *count > 0);
    all
}

#[track_caller]
fn becomes(tokens: &Tokens, server: &Server, wanted: &[(&str, u64)]) {
    let wanted = wanted.iter().map(|(state, count)| ((*state).to_owned(), *count)).collect();
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let windows = windows(tokens, server);
        if windows == wanted {
            return;
        }
        assert!(Instant::now() < deadline, "{windows:?}, not {wanted:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A window of processes `p0`, `p1` and so on, of which each has 5 samples.
fn send(tokens: &Tokens, server: &Server, capture: u8, processes: u32) {
    let mut one = epoch(0, "/bin/program", &[1; 20], 0x1000, 5 * processes as usize);
    let process = one.processes[0].clone();
    one.processes.clear();
    one.threads.clear();
    for number in 0..processes {
        let comm = u32::try_from(one.strings.len()).unwrap();
        one.strings.push(format!("p{number}"));
        one.processes.push(v1::Process { pid: number + 1, comm, ..process.clone() });
        one.threads.push(v1::Thread { process: number, tid: number + 1, comm });
    }
    one.samples[0].thread = (0..5 * processes).map(|at| at % processes).collect();
    let client = tokens.client(server, "alice");
    let heard = client.send(hello(capture), vec![sealed(&one)], |_| Vec::new());
    assert_eq!(heard.acked, Some(0), "{heard:?}");
}

#[test]
fn each_process_is_a_series_with_all_its_samples() {
    if !privileged() {
        return;
    }
    let tokens = Tokens::new();
    let receiver = Receiver::start(&tokens.path("received"), "127.0.0.1:0");
    let (out, password) = (tokens.path("out"), tokens.path("password"));
    std::fs::write(&password, "secret\n").unwrap();
    let token = format!("--pyroscope-token-file={}", password.display());
    let options = ["--window=2s", "--pyroscope-tenant=team", "--pyroscope-user=me", &token];
    let url = receiver.url();
    let options = [&options[..], &["--tag=a-zone=b", "--tag=comm=no", &url]].concat();
    let server = tokens.server(&out, "127.0.0.1:0", &options);
    let _program = Running::start(Command::new(work()).args(["plain", "30"]));
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args(["--all", "--profile", "--offcpu", "--epoch=500ms", "--duration=5s"]);
    // What happens to run here may be large.
    collector.arg("--share-executables=never");
    collector.arg(format!("--to=https://{}", server.address)).args(tokens.proofs("alice"));
    Ran::of(&mut collector).succeeded();
    server.terminate();
    let written = |part: &str| {
        let of_part = profiles(&out).into_iter().filter(|it| it.to_str().unwrap().contains(part));
        by_comm(of_part.map(|path| Pprof::read(&path)))
    };
    let pushed = |name: &str| {
        let mut by_comm = BTreeMap::new();
        let received = receiver.received().into_iter();
        for (about, profile) in received.filter(|(about, _)| about.labels["__name__"] == name) {
            *by_comm.entry(about.labels["comm"].clone()).or_default() += profile.count();
            assert!(profile.samples.iter().all(|sample| sample.labels.is_empty()));
            assert!(profile.start > 0 && profile.duration > 0);
        }
        by_comm
    };
    // What a busy host leaves no time for at the end, the next start writes and pushes.
    let server = tokens.server(&out, "127.0.0.1:0", &options);
    let started = Instant::now();
    for (part, name) in [("on-cpu", "process_cpu"), ("off-cpu", "off_cpu")] {
        let whole = |found: &BTreeMap<_, u64>| found.values().sum::<u64>() > 20;
        let (mut is, mut found) = (written(part), pushed(name));
        while (found != is || !whole(&found)) && started.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(100));
            (is, found) = (written(part), pushed(name));
        }
        assert_eq!(found, is, "{part}");
        assert!(whole(&found), "{found:?}");
    }
    server.terminate();
    let received = receiver.received();
    let hostname = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for (about, _) in &received {
        let Received { labels, tenant, authorization, .. } = about;
        assert_eq!(labels["service_name"], labels["comm"]);
        assert_eq!(
            (labels["hostname"].as_str(), labels["a_zone"].as_str()),
            (hostname.trim(), "b")
        );
        // me:secret
        assert_eq!((tenant.as_str(), authorization.as_str()), ("team", "Basic bWU6c2VjcmV0"));
    }
    let ids: BTreeSet<&String> = received.iter().map(|(about, _)| &about.id).collect();
    assert_eq!(ids.len(), received.len());
}

#[test]
fn what_cannot_be_pushed_now_is_pushed_later() {
    let tokens = Tokens::new();
    let (out, directory) = (tokens.path("out"), tokens.path("received"));
    let first = Receiver::start(&directory, "127.0.0.1:0");
    let (url, address) = (first.url(), first.address.clone());
    drop(first);
    // Nobody takes anything yet; the server is killed with it.
    let server = tokens.server(&out, "127.0.0.1:0", &[&url]);
    send(&tokens, &server, 1, 3);
    send(&tokens, &server, 2, 300);
    becomes(&tokens, &server, &[("written", 2)]);
    server.kill();
    let receiver = Receiver::start(&directory, &address);
    receiver.refuse(Some("unavailable"));
    let mut server = tokens.server(&out, "127.0.0.1:0", &[&url]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !server.log().iter().any(|line| line.contains("503 Service Unavailable")) {
        assert!(Instant::now() < deadline, "{:?}", server.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(receiver.received().is_empty());
    receiver.refuse(None);
    // It is killed in the middle of 300 pieces, again and again.
    let mut kills = 0;
    let all: BTreeMap<String, u64> = (0..300).map(|number| (format!("p{number}"), 5)).collect();
    while windows(&tokens, &server).get("pushed") != Some(&2) {
        std::thread::sleep(Duration::from_millis(150));
        if kills < 5 && !receiver.received().is_empty() {
            server.kill();
            kills += 1;
            server = tokens.server(&out, "127.0.0.1:0", &[&url]);
        }
        assert!(Instant::now() < deadline, "{:?}", server.log());
    }
    server.terminate();
    let received = receiver.received();
    let copies = received.len() - 303;
    assert!(kills > 0 && copies <= kills, "{copies} pieces came twice, {kills} kills");
    let mut once: BTreeMap<&String, &(Received, Pprof)> = BTreeMap::new();
    for piece in &received {
        let (known, profile) = once.entry(&piece.0.id).or_insert(piece);
        assert_eq!((known, profile.count()), (&piece.0, piece.1.count()), "the same under one id");
    }
    let mut of_second = BTreeMap::new();
    for (about, profile) in once.values().filter(|it| it.0.labels["hostname"] == "host2") {
        *of_second.entry(about.labels["comm"].clone()).or_default() += profile.count();
    }
    assert_eq!(of_second, all);
    // A server that starts again has nothing to say.
    let server = tokens.server(&out, "127.0.0.1:0", &[&url]);
    becomes(&tokens, &server, &[("pushed", 2)]);
    server.terminate();
    assert_eq!(receiver.received().len(), received.len());
}

#[test]
fn what_is_refused_for_good_is_dropped_and_counted() {
    let tokens = Tokens::new();
    let out = tokens.path("out");
    let receiver = Receiver::start(&tokens.path("received"), "127.0.0.1:0");
    let url = receiver.url();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let metrics_listen = format!("--metrics-listen={free}");
    let options = [url.as_str(), metrics_listen.as_str()];
    let server = tokens.server(&out, "127.0.0.1:0", &options);
    let metrics = || {
        let asked = Command::new("curl").arg("-s").arg(format!("http://{free}/metrics")).output();
        String::from_utf8(asked.unwrap().stdout).unwrap()
    };
    let counted = |line: &str| metrics().lines().any(|it| it == line);
    receiver.refuse(Some("invalid_argument"));
    send(&tokens, &server, 1, 3);
    let dropped = "stackwire_serve_pushed_pieces_total{outcome=\"refused\"} 3";
    let deadline = Instant::now() + Duration::from_secs(30);
    while !counted(dropped) {
        assert!(Instant::now() < deadline, "{}", metrics());
        std::thread::sleep(Duration::from_millis(100));
    }
    becomes(&tokens, &server, &[("not_pushed", 1)]);
    // A password that is wrong may be mended.
    receiver.refuse(Some("unauthenticated"));
    send(&tokens, &server, 2, 2);
    becomes(&tokens, &server, &[("not_pushed", 1), ("written", 1)]);
    receiver.refuse(None);
    becomes(&tokens, &server, &[("not_pushed", 1), ("pushed", 1)]);
    assert_eq!(by_label(&receiver.received(), "comm").into_values().sum::<u64>(), 10);
    assert_eq!(profiles(&out).len(), 2);
    let taken = "stackwire_serve_pushed_pieces_total{outcome=\"taken\"} 2";
    assert!(counted(dropped) && counted(taken), "{}", metrics());
    server.terminate();
}

#[test]
fn no_password_goes_out_in_clear_text() {
    let serve = |more: &[&str]| {
        let all = ["serve", "--output-dir=x", "--listen=127.0.0.1:0", "--pyroscope-token-file=x"];
        stackwire(all.iter().chain(more).copied())
    };
    serve(&["--pyroscope-url=http://192.0.2.1:4040"]).failed(2, "in clear text");
    let told = serve(&["--pyroscope-url=http://me:secret@127.0.0.1:4040"]);
    assert!(!told.stderr.contains("secret"), "{}", told.stderr);
    told.failed(2, "the command line");
    serve(&["--pyroscope-url=ftp://127.0.0.1"]).failed(2, "write http://host:port");
}
