//! Executables a symbolizer cannot see, because they are deleted, on another host, or another
//! user's: the collector hands them over, when it may.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, open_piece};

use crate::support::build::inlined_cc;
use crate::support::nobody::{NOBODY, public_binaries};
use crate::support::pprof::go;
use crate::support::server::{Server, profiles};
use crate::support::{Pprof, Ran, Running, binary, privileged, stackwire};

/// A program in a directory only root may enter, deleted as soon as it runs; `more` random bytes
/// follow it.
fn hidden(more: usize) -> Running {
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let path = directory.path().join("hidden");
    std::fs::copy(inlined_cc(), &path).unwrap();
    let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    std::io::copy(&mut std::fs::File::open("/dev/urandom").unwrap().take(more as u64), &mut file)
        .unwrap();
    drop(file);
    Running::start(Command::new(&path).arg("60"))
}

/// A server that is nobody, and so sees nothing of root's.
fn server(outputs: &Path, binaries: &Path, more: &[&str]) -> Server {
    std::fs::set_permissions(outputs, std::fs::Permissions::from_mode(0o1777)).unwrap();
    Server::of(
        Command::new("setpriv")
            .args(NOBODY)
            .arg(binaries.join("stackwire"))
            .args(["serve", "--listen=127.0.0.1:0", "--output-dir"])
            .arg(outputs)
            .arg(format!("--symbol-cache-dir={}", outputs.join("cache").display()))
            .args(more)
            .env_remove("TMPDIR"),
    )
}

fn collect(pid: u32, seconds: u32, more: &[&str]) {
    Ran::of(
        Command::new(binary("stackwire-collector"))
            .args([&format!("--pid={pid}"), &format!("--duration={seconds}s")])
            .args(["--sample-rate=199", "--epoch=500ms", "--kernel-stacks=false"])
            .args(more),
    )
    .succeeded();
}

/// Share of the samples in functions of the program with a line of its source.
fn named(profile: &Pprof) -> f64 {
    let good = profile.samples.iter().filter(|sample| {
        let lines = |id: &u64| profile.locations[id].lines.iter();
        sample
            .locations
            .iter()
            .flat_map(lines)
            .any(|(_, file, line)| file.ends_with("inlined.cc") && *line > 0)
    });
    let good: u64 = good.map(|sample| sample.count).sum();
    100.0 * good as f64 / profile.count() as f64
}

fn outputs() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("stackwire-out-").tempdir_in("/tmp").unwrap()
}

fn only_profile(directory: &Path) -> Pprof {
    let written = profiles(directory);
    assert_eq!(written.len(), 1, "{written:?}");
    Pprof::read(&written[0])
}

fn comments(directory: &Path) -> String {
    go(&["-comments"], &[&profiles(directory)[0]])
}

#[test]
fn a_deleted_program_of_another_user_comes_through_the_collector_when_it_may() {
    if !privileged() {
        return;
    }
    let binaries = public_binaries(None);
    let program = hidden(0);
    let first = outputs();
    let serving = server(first.path(), binaries.path(), &[]);
    collect(program.pid(), 2, &[&format!("--to=http://{}", serving.address)]);
    serving.terminate();
    let profile = only_profile(first.path());
    assert!(named(&profile) > 99.0, "{:.1} % named", named(&profile));
    let said = comments(first.path());
    assert!(said.contains("handed over by the collector ("), "{said}");

    // It is in the cache now, and not sent again; and its capture, moved elsewhere, has it too.
    let cache = format!("--symbol-cache-dir={}", first.path().join("cache").display());
    let mut list = Command::new("setpriv");
    list.args(NOBODY).arg(binaries.path().join("stackwire")).args(["cache", &cache, "ls"]);
    let list = Ran::of(&mut list).succeeded().stdout;
    assert!(list.contains("handed-over"), "{list}");
    let captures = std::fs::read_dir(first.path().join("captures")).unwrap();
    let capture = captures
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|extension| extension == "stackwire"))
        .unwrap();
    let elsewhere = outputs();
    let out = elsewhere.path().join("out.pb.gz");
    let empty = format!("--symbol-cache-dir={}", elsewhere.path().join("empty").display());
    let arguments: [&std::ffi::OsStr; 5] =
        ["resolve".as_ref(), capture.as_os_str(), "-o".as_ref(), out.as_os_str(), empty.as_ref()];
    stackwire(arguments).succeeded();
    assert!(named(&Pprof::read(&out)) > 99.0);

    let second = outputs();
    let serving = server(second.path(), binaries.path(), &[]);
    let to = format!("--to=http://{}", serving.address);
    collect(program.pid(), 2, &[&to, "--share-executables=never"]);
    serving.terminate();
    let profile = only_profile(second.path());
    assert_eq!(named(&profile), 0.0);
    let said = comments(second.path());
    assert!(said.contains("told to share no files"), "{said}");

    // What the collector refused is in the capture too: resolved again it says the same.
    let captures = std::fs::read_dir(second.path().join("captures")).unwrap();
    let capture = captures
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|extension| extension == "stackwire"))
        .unwrap();
    let (again, cache) = (second.path().join("again"), second.path().join("other-cache"));
    let mut resolve = Command::new("setpriv");
    resolve.args(NOBODY).arg(binaries.path().join("stackwire")).arg("resolve").arg(capture);
    resolve.arg("-o").arg(&again).arg("--symbol-cache-dir").arg(cache);
    Ran::of(&mut resolve).succeeded();
    let served = std::fs::read(&profiles(second.path())[0]).unwrap();
    assert!(std::fs::read(again).unwrap() == served, "served and resolved differ");
}

/// Code in an anonymous executable mapping, an endless loop of two bytes, after `prepare`.
fn spinning(prepare: &str) -> String {
    format!(
        "import ctypes, mmap, os, sys\n{prepare}\n\
         m = mmap.mmap(-1, 4096, prot=7)\n\
         m.write(b'\\xeb\\xfe')\n\
         print('ready', flush=True)\n\
         ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n"
    )
}

const LEAK: &str = r#"
    #define _GNU_SOURCE
    #include <fcntl.h>
    #include <stdio.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <time.h>
    #include <unistd.h>
    int main(int argc, char **argv) {
      char path[256];
      snprintf(path, sizeof path, "%s/jit-%d.dump", argv[1], getpid());
      int file = open(path, O_RDWR | O_CREAT, 0644);
      if (ftruncate(file, 4096)) return 1;
      void *dump = mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
      unsigned char *code = mmap(0, 4096, 7, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      memcpy(code, "\x48\xff\xc7\x48\x81\xff\x00\x00\x00\x10\x75\xf4\xc3", 13);
      puts("ready");
      fflush(stdout);
      for (time_t end = time(0) + 60, turn = time(0) + 2; time(0) < end;) {
        ((void (*)(long))code)(0);
        if (dump && time(0) >= turn) {
          munmap(dump, 4096);
          dump = 0;
          unlink(path);
          if (symlink(argv[2], path)) return 1;
        }
      }
    }
"#;

#[test]
fn the_broker_opens_nothing_its_user_may_not_read() {
    if !privileged() {
        return;
    }
    const SECRET: &[u8] = b"what nobody may read";
    let hidden = tempfile::tempdir().unwrap();
    std::fs::set_permissions(hidden.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let secret = hidden.path().join("secret");
    std::fs::write(&secret, SECRET).unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o644)).unwrap();
    // Mapped as a jitdump; once that is known, a link to what lies in a directory its user may not
    // enter.
    let place = outputs();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let source = place.path().join("leak.c");
    std::fs::write(&source, LEAK).unwrap();
    let program = place.path().join("leak");
    let built = Command::new("gcc").arg(&source).arg("-o").arg(&program).status().unwrap();
    assert!(built.success());
    let mut leak = Command::new("setpriv");
    leak.args(NOBODY).arg(program).arg(place.path()).arg(&secret);
    let program = Running::start(&mut leak);
    let capture = place.path().join("capture");
    let all = "+bpf,+perfmon,+syslog,+sys_ptrace,+checkpoint_restore,+dac_read_search";
    let binaries = public_binaries(None);
    Ran::of(
        Command::new("setpriv")
            .args(NOBODY)
            .args([format!("--inh-caps={all}"), format!("--ambient-caps={all}")])
            .arg(binaries.path().join("stackwire-collector"))
            .args([&format!("--pid={}", program.pid()), "--duration=5s", "--epoch=500ms"])
            .args([
                "--share-executables=always".to_owned(),
                format!("--output={}", capture.display()),
            ]),
    )
    .succeeded();
    let mut reader = FrameReader::new(std::fs::File::open(capture).unwrap());
    let mut pieces = 0;
    while let Some(message) = reader.next_message().unwrap() {
        if let Some(Body::Artifact(chunk)) = message.body {
            let piece = open_piece(&chunk).unwrap();
            assert!(!piece.windows(SECRET.len()).any(|window| window == SECRET));
            pieces += 1;
        }
    }
    assert!(pieces > 2, "{pieces} pieces of artifacts");
}

#[test]
fn a_set_user_id_program_its_user_may_not_read_is_not_handed_over() {
    if !privileged() {
        return;
    }
    let place = outputs();
    let program = place.path().join("setuid");
    std::fs::copy(inlined_cc(), &program).unwrap();
    let content = std::fs::read(&program).unwrap();
    let middle = &content[content.len() / 2..][..64];
    for (mode, handed) in [(0o4711, false), (0o4755, true)] {
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
        let mut started = Command::new("setpriv");
        let running = Running::start(started.args(NOBODY).arg(&program).arg("20"));
        let capture = place.path().join("capture");
        Ran::of(Command::new(binary("stackwire-collector")).args([
            format!("--pid={}", running.pid()),
            "--duration=2s".to_owned(),
            "--share-executables=always".to_owned(),
            format!("--output={}", capture.display()),
        ]))
        .succeeded();
        let mut reader = FrameReader::new(std::fs::File::open(capture).unwrap());
        let mut found = false;
        while let Some(message) = reader.next_message().unwrap() {
            if let Some(Body::Artifact(chunk)) = message.body {
                let piece = open_piece(&chunk).unwrap();
                found |= piece.windows(middle.len()).any(|window| window == middle);
            }
        }
        assert_eq!(found, handed, "{mode:o}");
    }
}

#[test]
fn a_process_of_another_namespace_does_not_get_the_map_of_this_one() {
    if !privileged() {
        return;
    }
    let map = Path::new("/tmp/perf-1.map");
    assert!(!map.exists(), "somebody's perf-map of pid 1 is in the way");
    std::fs::write(map, b"1000 7fffffff0000 wrong_from_host\n").unwrap();
    std::os::unix::fs::chown(map, Some(65534), None).unwrap();
    let script = spinning("");
    // Not in a directory below /tmp, which is another one in there.
    let outer = Running::start(Command::new("unshare").current_dir("/").args([
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        &format!("mount -t tmpfs none /tmp && exec python3 -c \"{script}\""),
    ]));
    let children = format!("/proc/{0}/task/{0}/children", outer.pid());
    let inner: u32 = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
    let profile = crate::support::record(inner, 2, &[]);
    let _ = std::fs::remove_file(map);
    assert!(profile.count() > 100, "{} samples", profile.count());
    let names = profile.locations.values().flat_map(|location| &location.lines);
    assert!(!names.map(|(name, ..)| name).any(|name| name == "wrong_from_host"));
}

#[test]
fn a_capture_file_holds_executables_only_when_always_is_asked() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let capture = |which: &str| -> PathBuf {
        let path = directory.path().join(which);
        let program = hidden(0);
        let to = format!("--output={}", path.display());
        collect(program.pid(), 1, &[&to, &format!("--share-executables={which}")]);
        path
    };
    for (which, whole) in [("missing", false), ("always", true)] {
        let path = capture(which);
        let out = directory.path().join(format!("{which}.pb.gz"));
        let cache = directory.path().join(format!("{which}.cache"));
        stackwire([
            "resolve".as_ref(),
            path.as_os_str(),
            "-o".as_ref(),
            out.as_os_str(),
            "--symbol-cache-dir".as_ref(),
            cache.as_os_str(),
        ])
        .succeeded();
        let share = named(&Pprof::read(&out));
        assert_eq!(share > 99.0, whole, "{which}: {share:.1} %");
    }
    // As record keeps it.
    let (program, path) = (hidden(0), directory.path().join("record"));
    stackwire([
        "record",
        "--profile",
        &format!("--pid={}", program.pid()),
        "--duration=1s",
        "--share-executables=always",
        &format!("--capture={}", path.display()),
        &format!("--profile-output={}", directory.path().join("live.pb.gz").display()),
    ])
    .succeeded();
    drop(program);
    let out = directory.path().join("later.pb.gz");
    let cache = directory.path().join("later.cache");
    let arguments = ["resolve", "--symbol-cache-dir"].map(std::ffi::OsStr::new);
    let rest = [cache.as_os_str(), path.as_os_str(), "-o".as_ref(), out.as_os_str()];
    stackwire(arguments.iter().chain(&rest)).succeeded();
    assert!(named(&Pprof::read(&out)) > 99.0);
}

/// Forwards connections, the first only until the collector has sent `cut` bytes. Counts what it
/// sends on each.
fn proxy(to: String, cut: usize) -> (String, Arc<[AtomicUsize; 8]>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let counts: Arc<[AtomicUsize; 8]> = Arc::default();
    let counting = Arc::clone(&counts);
    std::thread::spawn(move || {
        for (number, client) in listener.incoming().enumerate() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(&to).unwrap());
            let (mut back_from, mut back_to) =
                (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
            let counting = Arc::clone(&counting);
            std::thread::spawn(move || {
                let mut buffer = [0; 1 << 16];
                let count = &counting[number.min(7)];
                while let Ok(read @ 1..) = client.read(&mut buffer) {
                    if server.write_all(&buffer[..read]).is_err()
                        || count.fetch_add(read, Ordering::Relaxed) + read > cut && number == 0
                    {
                        break;
                    }
                }
                for stream in [client, server] {
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                }
            });
        }
    });
    (address, counts)
}

#[test]
fn a_transfer_that_breaks_off_goes_on_where_it_stopped() {
    if !privileged() {
        return;
    }
    const SIZE: usize = 48 << 20;
    const CUT: usize = 32 << 20;
    let binaries = public_binaries(None);
    let program = hidden(SIZE);
    let outputs = outputs();
    let serving = server(outputs.path(), binaries.path(), &[]);
    let (address, counts) = proxy(serving.address.clone(), CUT);
    collect(program.pid(), 4, &[&format!("--to=http://{address}")]);
    serving.terminate();
    // The profile of the first connection was written without it, and says so.
    let written = profiles(outputs.path());
    let last = Pprof::read(written.last().unwrap());
    assert!(named(&last) > 99.0, "{:.1} % named", named(&last));
    if named(&Pprof::read(&written[0])) < 99.0 {
        let said = comments(outputs.path());
        assert!(said.contains("had not sent it by then"), "{said}");
    }
    let sent: Vec<usize> = counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    assert!(sent[0] > CUT && sent[1] > 1 << 20, "the first connection was cut: {sent:?}");
    // What was on its way when the connection broke is sent again, not what had come.
    let total: usize = sent.iter().sum();
    assert!(total < SIZE + (SIZE - CUT), "{SIZE} bytes took {total} on the wire: {sent:?}");
}

#[test]
fn kernel_symbols_are_those_samples_touch_and_are_in_every_capture() {
    if !privileged() {
        return;
    }
    let outputs = outputs();
    let cache = format!("--symbol-cache-dir={}", outputs.path().join("cache").display());
    let server = |directory: &Path| Server::start(directory, "127.0.0.1:0", &[&cache]);
    let mut sent = Vec::new();
    for name in ["first", "second"] {
        let directory = outputs.path().join(name);
        let serving = server(&directory);
        let (address, counts) = proxy(serving.address.clone(), usize::MAX);
        let to = format!("--to=http://{address}");
        Ran::of(Command::new(binary("stackwire-collector")).args([
            "--all",
            "--duration=1s",
            // Whatever else runs is not what is weighed.
            "--share-executables=never",
            "--epoch=300ms",
            &to,
        ]))
        .succeeded();
        serving.terminate();
        sent.push(counts[0].load(Ordering::Relaxed));
        let profile = only_profile(&directory);
        let kernel = |id: &u64| profile.file_of(*id) == "[kernel]";
        let unnamed =
            profile.locations.iter().filter(|(id, l)| kernel(id) && l.lines.is_empty()).count();
        assert_eq!(unnamed, 0, "{name}: kernel frames without a name");
        // Moved elsewhere, each capture has what it needs.
        let capture = std::fs::read_dir(directory.join("captures")).unwrap();
        let capture = capture
            .map(|entry| entry.unwrap().path())
            .find(|path| path.extension().is_some_and(|e| e == "stackwire"));
        let empty = format!(
            "--symbol-cache-dir={}",
            outputs.path().join(format!("empty-{name}")).display()
        );
        let report = stackwire(["report".as_ref(), capture.unwrap().as_os_str(), empty.as_ref()])
            .succeeded()
            .stdout;
        assert!(!report.contains("were not sent"), "{report}");
        assert!(report.contains("kallsyms 100.0 %"), "{report}");
    }
    // All of the kernel's symbols have 900 kB.
    assert!(sent.iter().all(|&sent| sent < 200_000), "bytes sent: {sent:?}");
}

#[test]
fn metrics_say_where_names_came_from_and_what_was_lost() {
    if !privileged() {
        return;
    }
    let directory = outputs();
    let cache = format!("--symbol-cache-dir={}", directory.path().join("cache").display());
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let metrics = format!("--metrics-listen=127.0.0.1:{port}");
    let serving = Server::start(
        &directory.path().join("out"),
        "127.0.0.1:0",
        &[&cache, &metrics, "--window=1s"],
    );
    let program = Running::start(Command::new(inlined_cc()).arg("60"));
    collect(program.pid(), 3, &[&format!("--to=http://{}", serving.address)]);
    let read = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let value = |text: &str, name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let written = || {
        profiles(&directory.path().join("out"))
            .iter()
            .map(|path| Pprof::read(path).count())
            .sum::<u64>()
    };
    let text = loop {
        let text = read();
        let count = written();
        // A profile is counted before it is written: the last may be on its way.
        if count > 0 && value(&text, "stackwire_samples_total") >= count as f64 && count >= 100 {
            break text;
        }
        assert!(std::time::Instant::now() < deadline, "{count} samples written, metrics: {text}");
        std::thread::sleep(std::time::Duration::from_millis(100));
    };
    assert!(text.starts_with("HTTP/1.0 200"), "{text}");
    assert!(value(&text, "stackwire_executables_total{source=\"executable\"}") >= 1.0, "{text}");
    assert!(value(&text, "stackwire_executables_total{source=\"cache\"}") >= 1.0, "{text}");
    assert!(value(&text, "stackwire_locations_named_total{quality=\"dwarf\"}") > 5.0, "{text}");
    assert!(value(&text, "stackwire_conversion_seconds_count") >= 1.0, "{text}");
    let whole = "stackwire_user_stacks_total{reason=\"reached the thread's root\"}";
    assert!(value(&text, whole) > 5.0, "{text}");
    let loaded = "stackwire_unwind_tables_total{outcome=\"loaded\"}";
    assert!(value(&text, loaded) >= 1.0, "{text}");
    serving.terminate();
}
