//! Hosts as they are: programs installed by packages, no certificates, collectors that everyone may
//! execute, odd compilers.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::support::{
    Ran, Running, binary, build, outside_cargo, privileged, record, run, stackwire,
};

#[test]
fn a_package_is_made_without_privileges_and_its_programs_are_stripped() {
    let directory = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    // Whoever may load eBPF programs may do without all that for this.
    let make = ["make", "-s", "install", "PREFIX=/usr"];
    let mut command = if rustix::process::geteuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-all", "--inh-caps=-all"]).args(make);
        command
    } else {
        let mut command = Command::new(make[0]);
        command.args(&make[1..]);
        command
    };
    command.arg(format!("DESTDIR={}", directory.path().display())).current_dir(root);
    run(outside_cargo(&mut command));
    let at = |path: &str| directory.path().join("usr").join(path);
    for (program, mode) in [("stackwire", 0o755), ("stackwire-collector", 0o750)] {
        let path = at("bin").join(program);
        let found = std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(found, mode, "{program}");
        let sections = run(Command::new("readelf").args(["-SW"]).arg(&path)).0;
        assert!(!sections.contains(".symtab") && !sections.contains(".debug_info"), "{sections}");
        let notes = run(Command::new("readelf").arg("-n").arg(&path)).0;
        let id = notes.split("Build ID: ").nth(1).unwrap().split_whitespace().next().unwrap();
        let debug = at("lib/debug/.build-id").join(&id[..2]).join(format!("{}.debug", &id[2..]));
        let sections = run(Command::new("readelf").args(["-SW"]).arg(&debug)).0;
        assert!(sections.contains(".debug_info"), "{sections}");
        // And is found there.
        let symbols = run(Command::new("nm").arg(binary(program))).0;
        let main = symbols.lines().find(|line| line.ends_with(" T main")).unwrap();
        let address = main.split(' ').next().unwrap();
        let dir = format!("--debug-dir={}", at("lib/debug").display());
        let cache = format!("--symbol-cache-dir={}", directory.path().join("cache").display());
        let asked = ["symbolize", &dir, &cache, path.to_str().unwrap(), address];
        let found = stackwire(asked).succeeded().stdout;
        assert!(found.starts_with("main\n"), "{found}");
    }
}

/// Answers each request with 404 and counts them.
fn server() -> (u16, Arc<AtomicU32>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    let answer = move |stream: TcpStream, count: &AtomicU32| {
        let lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let words = lines.take_while(|line| line.as_ref().is_ok_and(|line| !line.is_empty()));
        // Who begins with TLS says nothing that ends.
        if words.count() > 0 {
            count.fetch_add(1, Ordering::Relaxed);
            let none = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            let _ = (&stream).write_all(none.as_bytes());
        }
    };
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let count = Arc::clone(&count);
            std::thread::spawn(move || answer(stream.unwrap(), &count));
        }
    });
    (port, asked)
}

#[test]
fn without_certificates_servers_without_tls_are_asked() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // Of a program with all its names, only chance samples (the vDSO) would be asked for.
    let stripped = directory.path().join("stripped");
    let mut strip = Command::new("strip");
    assert!(strip.arg(build::work()).arg("-o").arg(&stripped).status().unwrap().success());
    let program = Running::start(Command::new(&stripped).args(["plain", "20"]));
    let (port, asked) = server();
    let recorded = |urls: &str, cache: &str| {
        let script = format!(
            "for place in /etc/ssl /etc/pki /usr/share/ca-certificates /usr/local/share/ca-certificates; do \
               [ ! -d $place ] || mount -t tmpfs none $place; done; \
             unset SSL_CERT_FILE SSL_CERT_DIR; \
             exec {} record --pid {} --duration 1 -F 499 --no-capture --profile-output x.pb.gz \
               --symbol-fetch-timeout 3s --symbol-cache-dir {cache} {urls}",
            binary("stackwire").display(),
            program.pid()
        );
        let mut shell = Command::new("unshare");
        shell.args(["--mount", "sh", "-c", &script]).current_dir(&directory);
        Ran::of(&mut shell).succeeded().stderr
    };
    let plain = format!("--debuginfod-url http://127.0.0.1:{port}");
    let said = recorded(&plain, "one");
    assert!(!said.contains("cannot be asked"), "{said}");
    assert!(asked.swap(0, Ordering::Relaxed) > 0, "{said}");
    let said = recorded(&format!("--debuginfod-url https://127.0.0.1:{port} {plain}"), "two");
    assert!(said.contains("servers with https cannot be asked: "), "{said}");
    assert!(asked.load(Ordering::Relaxed) > 0 && said.contains("% of frames named"), "{said}");
}

#[test]
fn doctor_warns_of_a_collector_for_everyone() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let collector = directory.path().join("stackwire-collector");
    std::fs::copy(binary("stackwire-collector"), &collector).unwrap();
    let set = Command::new("setcap")
        .arg("cap_bpf,cap_perfmon,cap_syslog=ep")
        .arg(&collector)
        .env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap()))
        .status();
    assert!(set.unwrap().success());
    for (mode, warned) in [(0o755, true), (0o750, false), (0o710, false), (0o711, true)] {
        std::fs::set_permissions(&collector, std::fs::Permissions::from_mode(mode)).unwrap();
        let ran = stackwire(["doctor".as_ref(), "--collector".as_ref(), collector.as_os_str()]);
        let said = ran.stdout.lines().find(|line| line.contains("collector privileges")).unwrap();
        assert_eq!(said.contains("everyone may execute it"), warned, "{mode:o}: {said}");
        assert_eq!(said.starts_with("warn"), warned, "{mode:o}: {said}");
    }
}

/// What GHC writes has functions that are longer than they say, and blocks outside of them.
#[test]
fn functions_of_haskell_are_named_and_none_by_nothing() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("haskell");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/haskell/Main.hs");
    let mut ghc = Command::new("ghc");
    run(ghc
        .args(["-v0", "-O1", "-g", "-outputdir"])
        .arg(directory.path())
        .arg(source)
        .arg("-o")
        .arg(&program));
    let running = Running::start(&mut Command::new(&program));
    let profile = record(running.pid(), 2, &[]);
    drop(running);
    let mut hot = 0;
    for sample in &profile.samples {
        let functions = profile.functions(sample);
        assert!(functions.iter().all(|name| !name.is_empty()), "{functions:?}");
        hot += if functions.first() == Some(&"collatzLength") { sample.count } else { 0 };
    }
    assert!(hot * 10 > profile.count() * 8, "{hot} of {}", profile.count());
}

/// As some compilers write them.
#[test]
fn a_function_with_an_empty_name_in_its_debug_information_has_its_symbols() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let source = "__attribute__((noinline)) int lonely_function(int x) { return x * 7; }\n\
        int main(int c, char **v) { return lonely_function(c); }\n";
    std::fs::write(at("x.c"), source).unwrap();
    let mut gcc = Command::new("gcc");
    run(gcc.args(["-O1", "-g", "-fno-inline", "x.c", "-o", "x"]).current_dir(&directory));
    let mut bytes = std::fs::read(at("x")).unwrap();
    let name = b"lonely_function\0";
    let places: Vec<usize> =
        (0..bytes.len() - name.len()).filter(|&at| bytes[at..].starts_with(name)).collect();
    // In `.debug_str`, and in `.strtab` behind it.
    assert_eq!(places.len(), 2);
    bytes[places[0]] = 0;
    std::fs::write(at("empty"), &bytes).unwrap();
    run(Command::new("strip")
        .args(["-N", "lonely_function", "empty", "-o", "nameless"])
        .current_dir(&directory));
    let symbols = run(Command::new("nm").arg(at("x"))).0;
    let symbol = symbols.lines().find(|line| line.ends_with(" lonely_function")).unwrap();
    let address = symbol.split(' ').next().unwrap();
    let cache = format!("--symbol-cache-dir={}", at("cache").display());
    for file in ["empty", "nameless"] {
        let mut command = Command::new(binary("stackwire"));
        // One build-id, three files.
        let cache = format!("{cache}-{file}");
        command.args(["symbolize", &cache, at(file).to_str().unwrap(), address]);
        let found = Ran::of(command.stdin(Stdio::null())).succeeded().stdout;
        // What begins before it may reach into it, and an empty name is none.
        assert!(found.starts_with("lonely_function\n") || file == "nameless", "{file}: {found}");
        assert!(!found.starts_with('\n'), "{file}: {found}");
    }
}
