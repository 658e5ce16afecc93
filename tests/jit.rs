//! Code made at run time: Node with lines from its jitdump, in a container of its own, growing
//! while it is sampled; Java.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::interpreters::javas;
use crate::support::server::{Server, profiles};
use crate::support::{Pprof, Running, binary, build, privileged, record, stackwire};

/// Share of the samples that have this function.
fn share(profile: &Pprof, function: &str) -> f64 {
    let has =
        |sample: &&crate::support::pprof::Sample| profile.functions(sample).contains(&function);
    let count: u64 = profile.samples.iter().filter(has).map(|sample| sample.count).sum();
    100.0 * count as f64 / profile.count() as f64
}

/// Files and lines this function was seen at.
fn places(profile: &Pprof, function: &str) -> Vec<(String, u64)> {
    let lines = profile.locations.values().flat_map(|location| &location.lines);
    let mut places: Vec<_> = lines
        .filter(|(name, ..)| name == function)
        .map(|(_, file, line)| (file.clone(), *line))
        .collect();
    places.sort();
    places.dedup();
    places
}

const SCRIPT: &str = "\
function hotLeaf(n) {
  let x = 0;
  for (let i = 0; i < n; i++)
    x = (x * 31 + i) | 0;
  return x;
}
function hotCaller() {
  let s = 0;
  for (let i = 0; i < 50; i++)
    s += hotLeaf(20000);
  return s;
}
console.log('ready');
const end = Date.now() + 60000;
while (Date.now() < end) hotCaller();
";

#[test]
fn nodes_lines_are_those_of_its_jitdump() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("hot.js");
    // Once it is hot, more functions, so that what Node has buffered of the hot ones gets written.
    let more = "const warm = Date.now() + 800;\nwhile (Date.now() < warm) hotCaller();\n\
        for (let i = 0; i < 60; i++) new Function('a', `let b = a; for (let k = 0; k < 1e6; k++) b = (b * ${i} + k) | 0; return b;`)(i);\n\
        console.log('ready');\n";
    std::fs::write(&script, SCRIPT.replace("console.log('ready');\n", more)).unwrap();
    let program = Running::start(
        // Not inlined, since of inlined functions V8 writes the lines and not the names.
        Command::new("node")
            .args(["--perf-prof", "--no-turbo-inlining"])
            .arg(&script)
            .current_dir(directory.path()),
    );
    let profile = record(program.pid(), 3, &[]);
    assert!(share(&profile, "hotLeaf") > 90.0, "{:.1} %", share(&profile, "hotLeaf"));
    let file = script.to_str().unwrap().to_owned();
    let leaf = places(&profile, "hotLeaf");
    assert!(leaf.iter().any(|place| *place == (file.clone(), 4)), "the loop's body: {leaf:?}");
    assert!(leaf.iter().all(|(of, line)| *of == file && (1..=6).contains(line)), "{leaf:?}");
    let caller = places(&profile, "hotCaller");
    assert!(caller.iter().all(|(of, line)| *of == file && (7..=12).contains(line)), "{caller:?}");
}

#[test]
fn a_perf_map_in_a_container_is_found_by_its_own_pid_in_its_own_root() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("hot.js");
    std::fs::write(&script, SCRIPT).unwrap();
    // A container's own /tmp and pids; the user is another's, so that nothing is to be had without
    // the broker.
    let shell = format!(
        "mount -t tmpfs none /mnt && cp {} /mnt/hot.js && mount --move /mnt /tmp && chmod 777 /tmp && cd /tmp && \
         exec setpriv --reuid=65534 --regid=65534 --clear-groups --pdeathsig=KILL node --perf-basic-prof /tmp/hot.js",
        script.display()
    );
    let outer = Running::start(Command::new("unshare").current_dir("/").args([
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        &shell,
    ]));
    let children = format!("/proc/{0}/task/{0}/children", outer.pid());
    let node: u32 = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
    // One that a process before it left, with this pid of ours.
    let _ = std::fs::remove_file(format!("/tmp/perf-{node}.map"));
    let profile = record(node, 3, &[]);
    // On a busy host much of the time is that of compiling it.
    assert!(share(&profile, "hotCaller") > 50.0, "{:.1} %", share(&profile, "hotCaller"));
}

#[test]
fn functions_made_during_the_capture_are_named() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("grow.js");
    // A new function every 300 ms, hot for as long.
    let text = "console.log('ready');\n\
        const end = Date.now() + 60000;\n\
        for (let n = 0; Date.now() < end; n++) {\n\
          const f = new Function('n', `return (function made${n}(n) { let x = ${n}; for (let i = 0; i < n; i++) x = (x * 31 + i) | 0; return x; })(n)`);\n\
          const until = Date.now() + 300;\n\
          while (Date.now() < until) f(200000);\n\
        }\n";
    std::fs::write(&script, text).unwrap();
    let program = Running::start(
        Command::new("node").arg("--perf-basic-prof").arg(&script).current_dir(&directory),
    );
    let map = format!("/tmp/perf-{}.map", program.pid());
    let capture = directory.path().join("grow.stackwire");
    let profile = record(program.pid(), 6, &[&format!("--capture={}", capture.display())]);
    drop(program);
    let _ = std::fs::remove_file(map);
    let made = profile
        .samples
        .iter()
        .flat_map(|sample| profile.functions(sample).into_iter().map(str::to_owned));
    let mut made: Vec<_> = made.filter(|name| name.starts_with("made")).collect();
    made.sort();
    made.dedup();
    assert!(made.len() >= 15, "in 6 s, one each 300 ms: {made:?}");
    // Taken in pieces: what did not change is there once. The whole map at each second would be
    // some times as long.
    let report = stackwire(["report".as_ref(), capture.as_os_str()]).succeeded().stdout;
    assert!(report.contains("perf-map"), "{report}");
}

/// Each function has 400 ms of CPU time at one address, 399 samples. The newest name for all of
/// them would be one function.
#[test]
fn an_address_that_is_used_again_has_the_name_of_its_time() {
    if !privileged() {
        return;
    }
    for mode in ["map", "dump", "late"] {
        let directory = tempfile::tempdir().unwrap();
        let program = Running::start(Command::new(build::jit()).arg(mode).current_dir(&directory));
        let profile = record(program.pid(), 7, &[]);
        let _ = std::fs::remove_file(format!("/tmp/perf-{}.map", program.pid()));
        drop(program);
        let mut counts = BTreeMap::<u32, u64>::new();
        for sample in &profile.samples {
            let leaf = profile.functions(sample).first().copied().unwrap_or_default();
            if let Some(number) = leaf.strip_prefix("version_") {
                *counts.entry(number.parse().unwrap()).or_default() += sample.count;
            }
        }
        let named: u64 = counts.values().sum();
        assert!(named * 100 > profile.count() * 95, "{mode}: {named} of {}", profile.count());
        // The first and the last are cut by the capture; what is still in a buffer is taken for the
        // last.
        let (&first, &last) = (counts.keys().next().unwrap(), counts.keys().next_back().unwrap());
        let whole: Vec<u64> = counts.range(first + 1..last).map(|(_, &count)| count).collect();
        assert_eq!(whole.len() as u32, last - first - 1, "{mode}: {counts:?}");
        // On a busy machine there are fewer, and the collector looks at the perf-map later than it
        // wants to.
        let good = whole.iter().filter(|count| (150..=650).contains(*count)).count();
        eprintln!("{mode}: {counts:?}");
        assert!(good >= 2 && good * 10 >= whole.len() * 7, "{mode}: {counts:?}");
    }
}

/// Frames without frame pointers, whose compiler says in its jitdump how to leave them.
#[test]
fn code_whose_jitdump_has_call_frame_information_is_left_by_it() {
    if !privileged() {
        return;
    }
    for (mode, least) in [("described", 99.0), ("growing", 93.0), ("partly", 99.0), ("bare", 0.0)] {
        let directory = tempfile::tempdir().unwrap();
        let program = Running::start(Command::new(build::jit()).arg(mode).current_dir(&directory));
        let profile = record(program.pid(), 6, &[]);
        drop(program);
        let (mut inner, mut whole, mut made) = (0, 0, BTreeSet::new());
        for sample in &profile.samples {
            let functions = profile.functions(sample);
            if functions.first() != Some(&"inner") {
                continue;
            }
            inner += sample.count;
            let Some(outer) = functions.get(1) else { continue };
            made.insert((*outer).to_owned());
            let callers = &functions[2..];
            whole += if callers.contains(&"main") { sample.count } else { 0 };
        }
        let share = 100.0 * whole as f64 / inner as f64;
        eprintln!("{mode}: {whole} of {inner}, {made:?}");
        assert!(inner * 10 > profile.count() * 8, "{mode}: {inner} of {}", profile.count());
        assert!(share >= least, "{mode}: {share:.1} % of {inner}");
        match mode {
            // Nothing is guessed where nothing is said.
            "bare" => assert_eq!(whole, 0),
            "growing" => assert!(made.len() >= 4, "{made:?}"),
            "partly" => assert!(made.iter().any(|name| name.starts_with("[jit]")), "{made:?}"),
            _ => assert_eq!(made.len(), 1),
        }
    }
}

/// Resident memory of a process, MiB (proc_pid_status(5)).
fn resident(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.0
}

/// A window is a capture of its own and asks for all of the map, which the collector reads again.
/// Each second is an epoch, of 10 s otherwise: an hour is `STACKWIRE_LONG=360`.
#[test]
fn a_large_perf_map_is_not_kept_in_memory_and_names_every_window() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let seconds =
        std::env::var("STACKWIRE_LONG").map_or(24, |s| s.trim_end_matches('s').parse().unwrap());
    let server = Server::start(directory.path(), "127.0.0.1:0", &["--window=4s"]);
    let program = Running::start(&mut Command::new(build::large_map()));
    let map = format!("/tmp/perf-{}.map", program.pid());
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args([format!("--pid={}", program.pid()), format!("--to=http://{}", server.address)]);
    collector.args(["--epoch=1s".to_owned(), format!("--duration={seconds}s")]);
    let mut collector = collector.spawn().unwrap();
    let mut memory = Vec::new();
    for _ in 2..seconds {
        std::thread::sleep(Duration::from_secs(1));
        memory.push(resident(collector.id()));
    }
    assert!(collector.wait().unwrap().success());
    drop(program);
    let _ = std::fs::remove_file(map);
    server.terminate();
    let windows = profiles(directory.path());
    assert!(windows.len() as u64 >= seconds / 4 - 1, "{windows:?}");
    for window in windows {
        let profile = Pprof::read(&window);
        // What is left when the server ends may be a few samples.
        let hot = share(&profile, "hot_loop");
        assert!(hot > 80.0 || profile.count() < 20, "{}: hot_loop {hot} %", window.display());
    }
    // The first copy is let go once it is delivered.
    let later = &mut memory[5..];
    eprintln!("resident, MiB: {later:.0?}");
    later.sort_by(f64::total_cmp);
    let median = later[later.len() / 2];
    assert!(median < 55.0, "{median} MiB of memory while the map has 24 MB: {later:.1?}");
}

#[test]
fn java_is_named_with_spaces_and_all() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("Hot.java");
    let text = "public class Hot {\n\
        static int spin(int n) { int x = 0; for (int i = 0; i < n; i++) x = x * 31 + i; return x; }\n\
        public static void main(String[] a) {\n\
          System.out.println(\"ready\");\n\
          int s = 0; long end = System.nanoTime() + 60_000_000_000L;\n\
          while (System.nanoTime() < end) s += spin(100000);\n\
          System.out.println(s);\n\
        }\n}\n";
    std::fs::write(&source, text).unwrap();
    let done = Command::new("javac")
        .args(["--release", "17"])
        .arg(&source)
        .current_dir(directory.path())
        .status()
        .unwrap();
    assert!(done.success());
    for java in javas() {
        let program = Running::start(
            Command::new(&java)
                .args(["-XX:+PreserveFramePointer", "-XX:-Inline", "Hot"])
                .current_dir(directory.path()),
        );
        // As an operator would: the JVM writes its map when it is told to, and compiles first.
        std::thread::sleep(Duration::from_secs(1));
        let map = format!("/tmp/perf-{}.map", program.pid());
        let deadline = Instant::now() + Duration::from_secs(20);
        while !Path::new(&map).exists() {
            assert!(Instant::now() < deadline, "the JVM wrote no perf-map");
            let told = Command::new(java.with_file_name("jcmd"))
                .args([&program.pid().to_string(), "Compiler.perfmap"])
                .stdout(Stdio::null())
                .status();
            assert!(told.unwrap().success());
        }
        let profile = record(program.pid(), 3, &[]);
        let _ = std::fs::remove_file(&map);
        let spin = profile
            .samples
            .iter()
            .flat_map(|sample| profile.functions(sample))
            .find(|name| name.contains("spin"));
        let spin = spin.map(str::to_owned).expect("a function spin");
        assert!(spin.contains(' ') || spin.contains("Hot.spin"), "{spin}");
        assert!(share(&profile, &spin) > 80.0, "{spin}: {:.1} %", share(&profile, &spin));
    }
}

const WASM: &str = "\
import sys, time, wasmtime
config = wasmtime.Config()
config.profiler = sys.argv[1]
engine = wasmtime.Engine(config)
store = wasmtime.Store(engine)
module = wasmtime.Module(engine, '''(module (func $spin (export \"spin\") (param i32) (result i32) (local i32)
  (loop $l (local.set 1 (i32.add (i32.mul (local.get 1) (i32.const 31)) (local.get 0)))
           (local.set 0 (i32.sub (local.get 0) (i32.const 1)))
           (br_if $l (local.get 0)))
  (local.get 1)))''')
spin = wasmtime.Instance(store, module, []).exports(store)['spin']
print('ready', flush=True)
end = time.time() + 60
while time.time() < end: spin(store, 10000000)
";

#[test]
fn wasmtime_is_named_by_either_file() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let installed = Command::new("python3")
        .args(["-m", "pip", "install", "-q", "--target"])
        .arg(directory.path())
        .arg("wasmtime")
        .stderr(Stdio::null())
        .status();
    if !crate::support::can("wasmtime, from PyPI", installed.is_ok_and(|status| status.success())) {
        return;
    }
    for profiler in ["perfmap", "jitdump"] {
        let program = Running::start(
            Command::new("python3")
                .args(["-c", WASM, profiler])
                .env("PYTHONPATH", directory.path())
                .current_dir(directory.path()),
        );
        let profile = record(program.pid(), 2, &[]);
        assert!(share(&profile, "spin") > 90.0, "{profiler}: {:.1} %", share(&profile, "spin"));
        let _ = std::fs::remove_file(format!("/tmp/perf-{}.map", program.pid()));
    }
}
