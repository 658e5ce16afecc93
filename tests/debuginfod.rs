//! Names from debuginfod servers: a real one, and servers that stall, fail, lie and loop; the cache
//! they fill, used by many at once, killed in the middle, and better the second time.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::build::{inlined_cc, inlined_rs};
use crate::support::debug_files::{RealServer, Stripped};
use crate::support::{Pprof, Ran, Running, binary, privileged, stackwire};

/// How a server answers.
#[derive(Clone, Copy, Debug)]
enum Mode {
    Good,
    Stall,
    Error,
    Half,
    OtherFile,
    TenGib,
    Redirect,
    Garbage,
}

/// A server of ours on the loopback, with a count of what was asked. Threads end with the test.
fn serve(mode: Mode, file: Vec<u8>, build_id: &str) -> (String, Arc<Mutex<HashMap<String, u32>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked: Arc<Mutex<HashMap<String, u32>>> = Arc::default();
    let (count, wanted) = (Arc::clone(&asked), format!("/buildid/{build_id}/debuginfo"));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (count, file, wanted) = (Arc::clone(&count), file.clone(), wanted.clone());
            std::thread::spawn(move || answer(stream, mode, &file, &wanted, &count));
        }
    });
    (url, asked)
}

fn answer(
    mut stream: TcpStream,
    mode: Mode,
    file: &[u8],
    wanted: &str,
    count: &Mutex<HashMap<String, u32>>,
) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    while reader.read_line(&mut line).is_ok_and(|read| read > 0) {
        let path = line.split(' ').nth(1).unwrap_or("").to_owned();
        let mut header = String::new();
        while reader.read_line(&mut header).is_ok_and(|read| read > 2) {
            header.clear();
        }
        *count.lock().unwrap().entry(path.clone()).or_default() += 1;
        let body = |length: usize, body: &[u8]| {
            [format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n").as_bytes(), body]
                .concat()
        };
        let empty =
            |status: &str| format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").into_bytes();
        let bytes = match mode {
            Mode::Good if path == wanted => body(file.len(), file),
            Mode::Good => empty("404 Not Found"),
            Mode::Stall => {
                std::thread::sleep(Duration::from_secs(60));
                return;
            }
            Mode::Error => empty("500 Internal Server Error"),
            Mode::Half => body(file.len(), &file[..file.len() / 2]),
            Mode::OtherFile => {
                let other = std::fs::read("/bin/true").unwrap();
                body(other.len(), &other)
            }
            Mode::TenGib => body(10 << 30, b"\x7fELF"),
            Mode::Redirect => {
                b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n".to_vec()
            }
            Mode::Garbage => body(5, b"hello"),
        };
        let _ = stream.write_all(&bytes);
        if matches!(mode, Mode::Half | Mode::TenGib) {
            return;
        }
        line.clear();
    }
}

fn names(profile: &Pprof) -> Vec<String> {
    profile.locations.values().flat_map(|l| l.lines.iter().map(|(name, ..)| name.clone())).collect()
}

fn has_inlined(profile: &Pprof) -> bool {
    let names = names(profile);
    ["inner", "middle", "outer"].iter().all(|name| names.iter().any(|found| found.contains(name)))
}

#[test]
fn stripped_programs_out_of_sight_are_named_through_debuginfod() {
    if !privileged() {
        return;
    }
    for program in [inlined_cc(), inlined_rs()] {
        let stripped = Stripped::of(program);
        let server = RealServer::start(&stripped.at("served"), &stripped.at("index.sqlite"));
        server.wait_for(&stripped.build_id);
        // In a mount namespace of its own, and deleted there.
        let hide = "mount -t tmpfs none /mnt && cp \"$0\" /mnt/p && exec /mnt/p 30";
        let running = Running::start(
            Command::new("unshare").args(["-m", "sh", "-c", hide]).arg(&stripped.program),
        );
        std::fs::remove_file(format!("/proc/{}/root/mnt/p", running.pid())).unwrap();
        let output = stripped.at("live.pb.gz");
        stackwire([
            "record",
            "--profile",
            "--sample-rate=499",
            "--duration=3s",
            "--kernel-stacks=false",
            &format!("--pid={}", running.pid()),
            &format!("--debuginfod-url={}", server.url),
            &format!("--symbol-cache-dir={}", stripped.at("cache").display()),
            &format!("--profile-output={}", output.display()),
        ])
        .succeeded();
        let profile = Pprof::read(&output);
        assert!(has_inlined(&profile), "{:?}", names(&profile));
        let is_named = |id: &u64| !profile.locations[id].lines.is_empty();
        let named = profile.samples.iter().filter(|sample| sample.locations.iter().all(is_named));
        let named: u64 = named.map(|sample| sample.count).sum();
        let share = named as f64 / profile.count() as f64;
        assert!(share > 0.99, "{share} of {} samples are named", profile.count());

        stripped.verify("cache");
    }
}

#[test]
fn servers_that_fail_cost_names_and_never_the_profile() {
    if !privileged() {
        return;
    }
    let stripped = Stripped::of(inlined_cc());
    let capture = stripped.capture();
    let file = std::fs::read(&stripped.debug).unwrap();
    let (good, _) = serve(Mode::Good, file.clone(), &stripped.build_id);
    let modes = [
        (Mode::Stall, "silent for"),
        (Mode::Error, "500 Internal Server Error, 3 times"),
        (Mode::Half, "3 times"),
        (Mode::OtherFile, "sends a file with build-id"),
        (Mode::TenGib, "10737418240 bytes"),
        (Mode::Redirect, "redirect"),
        (Mode::Garbage, "not an ELF file"),
    ];
    for (mode, said) in modes {
        let (bad, _) = serve(mode, file.clone(), &stripped.build_id);
        let cache = format!("{mode:?}");
        let options = [format!("--debuginfod-url={bad}"), "--symbol-fetch-timeout=3s".to_owned()];
        let options = options.each_ref().map(String::as_str);
        let started = Instant::now();
        let (ran, output) = stripped.resolve(&capture, &cache, &options);
        ran.succeeded();
        // Three seconds and what a busy machine adds; a stalled server would hold for sixty.
        assert!(started.elapsed() < Duration::from_secs(20), "{mode:?}: {:?}", started.elapsed());
        assert!(!has_inlined(&Pprof::read(&output)), "{mode:?}");
        let comments = crate::support::pprof::go(&["-comments"], &[&output]);
        assert!(comments.contains(said), "{mode:?}: expected {said:?} in {comments}");
        let (ran, _) =
            stripped.resolve(&capture, &cache, &[&options[..], &["--symbol-fail-closed"]].concat());
        ran.failed(1, &format!("symbols of {} could not be fetched", stripped.program.display()));
        stripped.verify(&cache);
        // What was malformed is remembered for a day: a run with a good server then needs to hear
        // of the file anew.
        if matches!(mode, Mode::OtherFile | Mode::TenGib | Mode::Garbage) {
            continue;
        }
        let (ran, output) =
            stripped.resolve(&capture, &cache, &[&format!("--debuginfod-url={good}")]);
        ran.succeeded();
        assert!(has_inlined(&Pprof::read(&output)), "{mode:?}, then a good server");
    }
    // One that fails before one that has it.
    let (bad, _) = serve(Mode::OtherFile, file, &stripped.build_id);
    let both = [format!("--debuginfod-url={bad}"), format!("--debuginfod-url={good}")];
    let (ran, output) = stripped.resolve(&capture, "both", &both.each_ref().map(String::as_str));
    ran.succeeded();
    assert!(has_inlined(&Pprof::read(&output)));
}

#[test]
fn ten_at_once_fetch_each_file_once() {
    if !privileged() {
        return;
    }
    let stripped = Stripped::of(inlined_cc());
    let capture = stripped.capture();
    let file = std::fs::read(&stripped.debug).unwrap();
    let (url, asked) = serve(Mode::Good, file, &stripped.build_id);
    let children: Vec<_> = (0..10)
        .map(|number| {
            Command::new(binary("stackwire"))
                .arg("resolve")
                .arg(&capture)
                .arg(format!("--output={}", stripped.at(&format!("{number}.pb.gz")).display()))
                .arg(format!("--symbol-cache-dir={}", stripped.at("cache").display()))
                .arg(format!("--debuginfod-url={url}"))
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let first = std::fs::read(stripped.at("0.pb.gz")).unwrap();
    assert!(has_inlined(&Pprof::read(&stripped.at("0.pb.gz"))));
    for number in 1..10 {
        let other = stripped.at(&format!("{number}.pb.gz"));
        let comments = |path: &Path| crate::support::pprof::go(&["-comments"], &[path]);
        assert_eq!(comments(&other), comments(&stripped.at("0.pb.gz")), "number {number}");
        assert!(std::fs::read(other).unwrap() == first, "number {number} differs");
    }
    let asked = asked.lock().unwrap();
    assert!(asked.values().all(|&times| times == 1), "{asked:?}");
    stripped.verify("cache");
}

#[test]
fn a_better_source_later_gives_better_frames_and_the_same_source_the_same_bytes() {
    if !privileged() {
        return;
    }
    let stripped = Stripped::of(inlined_cc());
    let capture = stripped.capture();
    let bytes = || {
        let (ran, output) = stripped.resolve(&capture, "cache", &[]);
        ran.succeeded();
        (has_inlined(&Pprof::read(&output)), std::fs::read(output).unwrap())
    };
    let (named, before) = bytes();
    assert!(!named && bytes().1 == before, "nothing was added");
    let cache = format!("--symbol-cache-dir={}", stripped.at("cache").display());
    stackwire(["cache", &cache, "add", stripped.debug.to_str().unwrap()]).succeeded();
    let report = stackwire(["report", capture.to_str().unwrap(), &cache]).succeeded().stdout;
    assert!(report.contains("better than before"), "{report}");
    let (named, after) = bytes();
    assert!(named && after != before);
    assert!(bytes().1 == after, "nothing was added");
    // Kept under its build-id, as gdb and perf look for it.
    let (first, rest) = stripped.build_id.split_at(2);
    assert!(
        stripped.at("cache").join(".build-id").join(first).join(format!("{rest}.debug")).is_file()
    );
    stackwire(["cache", &cache, "rm", &stripped.build_id]).succeeded();
    assert!(
        stackwire(["cache", &cache, "stats"]).succeeded().stdout.contains("known to be missing")
    );
    assert!(bytes().1 == before, "what was added is gone");
}

#[test]
fn killed_at_any_moment_the_cache_is_whole() {
    let stripped = Stripped::of(inlined_cc());
    let file = std::fs::read(&stripped.debug).unwrap();
    // Room for one of the two, the file and its table.
    let room = format!("--symbol-cache-max={}", file.len() + 1000);
    let (url, _) = serve(Mode::Good, file, &stripped.build_id);
    let symbolize = || {
        let mut command = Command::new(binary("stackwire"));
        command
            .args(["symbolize", &room])
            .arg(format!("--symbol-cache-dir={}", stripped.at("cache").display()))
            .arg(format!("--debuginfod-url={url}"))
            .arg(&stripped.program)
            .arg("0x1200")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    };
    // How long it takes is the machine's affair, and how busy that is.
    let started = Instant::now();
    assert!(symbolize().status().unwrap().success());
    let twice = 2 * started.elapsed().as_micros() as u64;
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut finished = 0;
    for round in 0..200 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Every other time from an empty cache, else evicting what is there.
        if round % 2 == 0 {
            let _ = std::fs::remove_dir_all(stripped.at("cache"));
        }
        let mut child = symbolize().spawn().unwrap();
        std::thread::sleep(Duration::from_micros(state % twice));
        let _ = child.kill();
        finished += u32::from(child.wait().unwrap().success());
        stripped.verify("cache");
    }
    assert!((1..200).contains(&finished), "{finished} of 200 ended before they were killed");
    let unread = stackwire([
        "symbolize",
        "--json",
        &format!("--symbol-cache-dir={}", stripped.at("cache").display()),
        &format!("--debuginfod-url={url}"),
        stripped.program.to_str().unwrap(),
        "0x1200",
    ]);
    assert!(unread.succeeded().stdout.contains("\"quality\":\"dwarf\""));
}

/// What the cache has no room for is not fetched to be dropped again: its functions come by
/// section, from a real server, and lines as soon as there is room.
#[test]
fn of_a_debug_file_too_large_come_its_functions() {
    let stripped = Stripped::of(inlined_cc());
    let state = stripped.at("state.sqlite");
    let server = RealServer::start(&stripped.at("served"), &state);
    server.wait_for(&stripped.build_id);
    let bytes = std::fs::metadata(&stripped.debug).unwrap().len();
    let function = Command::new("nm").arg(&stripped.debug).output().unwrap();
    let function = String::from_utf8(function.stdout).unwrap();
    let address =
        function.lines().find(|line| line.ends_with(" T main")).unwrap().split(' ').next().unwrap();
    let symbolize = |room: u64| {
        stackwire([
            "symbolize",
            "--json",
            &format!("--symbol-cache-max={room}"),
            &format!("--symbol-cache-dir={}", stripped.at("cache").display()),
            &format!("--debuginfod-url={}", server.url),
            stripped.program.to_str().unwrap(),
            &format!("0x{address}"),
        ])
        .succeeded()
    };
    for _ in 0..2 {
        let small = symbolize(bytes - 1);
        let answer = small.stdout;
        assert!(answer.contains("\"function\":\"main\""), "{answer}");
        assert!(answer.contains("\"quality\":\"symtab\""), "{answer}");
        assert!(answer.contains("/section/.symtab and .strtab"), "{answer}");
        stripped.verify("cache");
    }
    let answer = symbolize(1 << 30).stdout;
    assert!(answer.contains("\"quality\":\"dwarf\"") && answer.contains("\"line\":"), "{answer}");
}

/// A debug file alone does not say where offsets are loaded: a table made of it must not be what
/// captures get.
#[test]
fn a_table_of_a_debug_file_alone_does_not_serve_captures() {
    if !privileged() {
        return;
    }
    let stripped = Stripped::of(inlined_cc());
    let capture = stripped.capture();
    let (first, rest) = stripped.build_id.split_at(2);
    let below = stripped.at("dir/.build-id").join(first);
    std::fs::create_dir_all(&below).unwrap();
    std::fs::copy(&stripped.debug, below.join(format!("{rest}.debug"))).unwrap();
    let debug_dir = format!("--debug-dir={}", stripped.at("dir").display());
    for (cache, asked) in
        [("by-id", stripped.build_id.as_str()), ("by-path", stripped.debug.to_str().unwrap())]
    {
        let cache_dir = format!("--symbol-cache-dir={}", stripped.at(cache).display());
        let said =
            stackwire(["symbolize", &cache_dir, &debug_dir, asked, "0x1200"]).succeeded().stdout;
        assert!(said.contains("inlined.cc"), "{said}");
        let (ran, output) = stripped.resolve(&capture, cache, &[&debug_dir]);
        ran.succeeded();
        assert!(has_inlined(&Pprof::read(&output)), "{cache}");
    }
}

/// What one server does not have, another may.
#[test]
fn what_is_missing_is_missing_on_the_servers_that_were_asked() {
    let stripped = Stripped::of(inlined_cc());
    let file = std::fs::read(&stripped.debug).unwrap();
    let (without, asked) = serve(Mode::Good, file.clone(), "ffffffffffffffff");
    let (with, _) = serve(Mode::Good, file, &stripped.build_id);
    let cache = format!("--symbol-cache-dir={}", stripped.at("cache").display());
    let ask = |url: &str| {
        // A password is for the server, not for whoever reads the output.
        let url = format!("--debuginfod-url={}", url.replace("http://", "http://user:secret@"));
        let ran = stackwire([
            "symbolize",
            "--json",
            &cache,
            &url,
            stripped.program.to_str().unwrap(),
            "0x1200",
        ]);
        let ran = ran.succeeded();
        assert!(
            !ran.stdout.contains("secret") && !ran.stderr.contains("secret"),
            "{}{}",
            ran.stdout,
            ran.stderr
        );
        ran.stdout
    };
    assert!(ask(&without).contains("missing") && ask(&without).contains("missing"));
    assert_eq!(asked.lock().unwrap().values().sum::<u32>(), 1, "what is missing is remembered");
    let forget = || stackwire(["cache", &cache, "rm", &stripped.build_id]);
    forget().succeeded();
    assert!(ask(&without).contains("missing"));
    assert_eq!(asked.lock().unwrap().values().sum::<u32>(), 2, "and can be forgotten");
    assert!(ask(&with).contains("dwarf"));
    // Words elfutils knows there are no servers, and no mistake.
    let mut command = Command::new(binary("stackwire"));
    command.env("DEBUGINFOD_URLS", format!("ima:enforcing {with} file:///usr/lib"));
    command
        .args(["symbolize", "--json"])
        .arg(format!("--symbol-cache-dir={}", stripped.at("other").display()));
    let ran = Ran::of(command.arg(&stripped.program).arg("0x1200")).succeeded();
    assert!(ran.stdout.contains("dwarf"), "{}", ran.stdout);
}
