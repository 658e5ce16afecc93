//! perf.data, as perf of two ages and others read it, and as perf writes it; profiles of others read back in.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::pprof::go;
use crate::support::{Pprof, Ran, Running, build, can, privileged, report, stackwire, trixie};

/// A frame as perf names it: object and symbol.
type Frame = (String, String);

/// A sample as `perf script` prints it.
#[derive(Debug, Default)]
struct Printed {
    comm: String,
    pid: u32,
    tid: u32,
    cpu: u32,
    time: String,
    /// Leaf first.
    frames: Vec<Frame>,
}

/// perf of this Debian, and of the next.
fn perfs() -> Vec<(&'static str, Command)> {
    let newer = trixie("perf").map(|command| ("6.12", command));
    [("6.1", Command::new("perf"))].into_iter().chain(newer).collect()
}

#[track_caller]
fn run(command: &mut Command) -> (String, String) {
    let output = command.env("DEBUGINFOD_URLS", "").output().unwrap();
    let [out, err] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{command:?}: {err}");
    (out, err)
}

/// What perf prints of a file, and that it warns of nothing.
#[track_caller]
fn printed(perf: &mut Command, file: &Path) -> Vec<Printed> {
    let fields = ["script", "--no-inline", "-F", "comm,pid,tid,cpu,time,ip,sym,dso", "-i"];
    let (text, said) = run(perf.args(fields).arg(file));
    assert!(!said.to_lowercase().contains("warn") && !said.contains("rror"), "{said}");
    let mut samples: Vec<Printed> = Vec::new();
    for line in text.lines() {
        if let Some(frame) = line.strip_prefix('\t') {
            let (_, frame) = frame.trim().split_once(' ').unwrap_or_default();
            let (symbol, object) = frame.rsplit_once(" (").unwrap_or((frame, ""));
            let frame = (object.trim_end_matches(')').to_owned(), symbol.to_owned());
            samples.last_mut().unwrap().frames.push(frame);
        } else if let Some((thread, rest)) = line.split_once(" [") {
            let (comm, ids) = thread.trim().rsplit_once(' ').unwrap();
            let (pid, tid) = ids.split_once('/').unwrap();
            let (cpu, rest) = rest.split_once(']').unwrap();
            samples.push(Printed {
                comm: comm.trim().to_owned(),
                pid: pid.parse().unwrap(),
                tid: tid.parse().unwrap(),
                cpu: cpu.parse().unwrap(),
                time: rest.trim().trim_end_matches(':').to_owned(),
                frames: Vec::new(),
            });
        }
    }
    samples
}

/// Frames in an object by symbol, each as often as it was sampled; of inlined functions that they are in.
fn frames_of(profile: &Pprof, object: &str) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for sample in &profile.samples {
        for id in &sample.locations {
            let line = profile.locations[id].lines.last();
            if profile.file_of(*id) == object
                && let Some((function, ..)) = line
            {
                let name = function.strip_prefix("__pi_").unwrap_or(function);
                *found.entry(name.to_owned()).or_default() += sample.count;
            }
        }
    }
    found
}

/// How many of two sets of counts are the same, and how many there are.
fn common(one: &BTreeMap<String, u64>, other: &BTreeMap<String, u64>) -> (u64, u64) {
    let same = one.iter().map(|(key, count)| (*count).min(other.get(key).copied().unwrap_or(0)));
    (same.sum(), one.values().sum::<u64>().max(other.values().sum()))
}

#[test]
fn perf_of_two_ages_sees_what_we_see() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let work = build::work();
    let threads = Running::start(Command::new(work).args(["threads", "60"]));
    let system = Running::start(
        Command::new("sh").args(["-c", "echo ready; exec dd if=/dev/zero of=/dev/null bs=64"]),
    );
    let script = "console.log('ready'); function hot(n) { let s = 0; for (let i = 0; i < n; i++) s += i % 7; return s } for (;;) hot(1e6)";
    let node = Running::start(Command::new("node").current_dir(&directory).args([
        "--perf-basic-prof",
        "-e",
        script,
    ]));
    let (pprof, file, capture) = (at("x.pb.gz"), at("perf.data"), at("x.stackwire"));
    stackwire([
        "record".as_ref(),
        "--profile".as_ref(),
        "--all".as_ref(),
        "--duration=4s".as_ref(),
        "--sample-rate=997".as_ref(),
        "--profile-output".as_ref(),
        pprof.as_os_str(),
        "--perf-data-output".as_ref(),
        file.as_os_str(),
        "--capture".as_ref(),
        capture.as_os_str(),
    ])
    .succeeded();
    let ours = Pprof::read(&pprof);
    for (version, mut perf) in perfs() {
        let theirs = printed(&mut perf, &file);
        assert_eq!(theirs.len() as u64, ours.count(), "perf {version}");
        // Who: as often as we say, by name, process and thread.
        let mut who: BTreeMap<(String, String, String), i64> = BTreeMap::new();
        for sample in &ours.samples {
            let of = |key: &str| sample.labels[key].clone();
            *who.entry((of("thread"), of("pid"), of("tid"))).or_default() += sample.count as i64;
        }
        for sample in &theirs {
            let key = (sample.comm.clone(), sample.pid.to_string(), sample.tid.to_string());
            *who.entry(key).or_default() -= 1;
        }
        who.retain(|_, difference| *difference != 0);
        assert!(who.is_empty(), "perf {version}: {who:?}");
        // Where: the report by CPU.
        let by_cpu =
            stackwire(["report".as_ref(), "--by".as_ref(), "cpu".as_ref(), capture.as_os_str()]);
        let by_cpu = by_cpu.succeeded().stdout;
        for cpu in 0..2 {
            let count = theirs.iter().filter(|sample| sample.cpu == cpu).count();
            let line = by_cpu
                .lines()
                .find(|line| line.ends_with(&format!("  {cpu}")) && line.contains(" % "));
            let said =
                line.map_or(0, |line| line.split_whitespace().nth(2).unwrap().parse().unwrap());
            assert_eq!(said, count, "perf {version}, CPU {cpu}: {by_cpu}");
        }
        // When: in order, over four seconds.
        let times: Vec<f64> = theirs.iter().map(|sample| sample.time.parse().unwrap()).collect();
        assert!(times.is_sorted() && (3.0..5.0).contains(&(times[times.len() - 1] - times[0])));
        // What: symbols of a program with a symbol table, of the kernel, and of what Node made.
        let (mut same, mut all) = (0, 0);
        let mapped = |object: &str| {
            if object == "[kernel.kallsyms]" { "[kernel]" } else { object }.to_owned()
        };
        for object in [work.to_str().unwrap(), "[kernel.kallsyms]"] {
            let mut frames: BTreeMap<String, u64> = BTreeMap::new();
            for (_, symbol) in
                theirs.iter().flat_map(|s| &s.frames).filter(|frame| frame.0 == object)
            {
                // Of two names of one function either will do.
                let name = symbol.strip_prefix("__pi_").unwrap_or(symbol);
                *frames.entry(name.to_owned()).or_default() += 1;
            }
            let found = frames_of(&ours, &mapped(object));
            let (equal, of) = common(&frames, &found);
            for name in frames.keys().chain(found.keys()) {
                let (one, two) = (frames.get(name), found.get(name));
                if one != two {
                    eprintln!("{name}: perf {one:?}, we {two:?}");
                }
            }
            eprintln!("perf {version}: {equal} of {of} frames of {object} have the same name");
            assert!(of > 500, "{of} frames of {object}");
            (same, all) = (same + equal, all + of);
        }
        assert!(same as f64 >= all as f64 * 0.999, "perf {version}: {same} of {all}");
        let jit = format!("/tmp/perf-{}.map", node.pid());
        let hot =
            theirs.iter().flat_map(|s| &s.frames).filter(|f| f.0 == jit && f.1.contains("hot"));
        assert!(hot.count() > 500, "perf {version} does not see Node's functions");
    }
    for arguments in [
        &["report", "--stdio", "--header", "-i"][..],
        &["buildid-list", "-i"],
        &["inject", "-b", "-o", "/dev/null", "-i"],
    ] {
        let (text, said) = run(Command::new("perf").args(arguments).arg(&file));
        assert!(!said.to_lowercase().contains("warn"), "{arguments:?}: {said}");
        assert!(arguments[0] == "inject" || text.contains("[kernel.kallsyms]"), "{text}");
    }
    run(Command::new("perf").arg("diff").args([&file, &file]));

    let stats = "/usr/lib/x86_64-linux-gnu/libexec/hotspot-perfparser";
    if can("hotspot", Path::new(stats).exists()) {
        let (out, said) = run(Command::new(stats).arg("--print-stats").arg("--input").arg(&file));
        let text = out + &said;
        assert!(text.contains(&format!("samples: {}", ours.count())), "{text}");
        assert!(
            text.contains("samples time violations: 0")
                && text.contains("mmaps time violations: 0"),
            "{text}"
        );
    }
    let samply = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/sid/run");
    if can("samply of Debian sid", samply.is_file()) {
        assert!(symbolized_by_samply(&samply, &file, work).contains("\"alpha\""));
    }
    drop((threads, system));
}

/// What samply's server says of the address of `alpha`, with the program it has from the file.
fn symbolized_by_samply(samply: &Path, file: &Path, program: &Path) -> String {
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("x.json");
    run(Command::new(samply)
        .args(["samply", "import", "--save-only", "--no-open", "-o"])
        .args([&json, file]));
    let read: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let name = program.file_name().unwrap().to_str().unwrap();
    let library =
        read["libs"].as_array().unwrap().iter().find(|it| it["debugName"] == name).unwrap();
    let symbols = run(Command::new("nm").arg(program)).0;
    let alpha = symbols.lines().find(|line| line.ends_with(" alpha")).unwrap();
    let address = u64::from_str_radix(alpha.split(' ').next().unwrap(), 16).unwrap() + 4;
    let mut server = Command::new(samply)
        .args(["samply", "load", "--no-open", "-P", "3900+"])
        .arg(&json)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // ".../from-url/http%3A%2F%2F127.0.0.1%3A3900%2FTOKEN%2Fprofile.json/..."
    let lines = std::io::BufRead::lines(std::io::BufReader::new(server.stdout.take().unwrap()));
    let line = lines.map_while(Result::ok).find(|line| line.contains("from-url")).unwrap();
    let url = line.split("from-url/").nth(1).unwrap().split("%2Fprofile.json").next().unwrap();
    let url = url.replace("%3A", ":").replace("%2F", "/") + "/symbolicate/v5";
    let asked = format!(
        "{{\"memoryMap\":[[\"{name}\",{}]],\"stacks\":[[[0,{address}]]]}}",
        library["breakpadId"]
    );
    let answer = run(Command::new("curl").args(["-s", "-X", "POST", "-d", &asked, &url])).0;
    let _ = server.kill();
    let _ = server.wait();
    answer
}

#[test]
fn autofdo_makes_a_profile_clang_compiles_with() {
    let clang = Command::new("clang-22").arg("--version").output().is_ok();
    if !privileged() || !can("clang-22", clang) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(
        at("x.c"),
        "__attribute__((noinline)) long work(long n) { volatile long s = 0; for (long i = 0; i < n; i++) { if (i % 7) s += i; else s -= 3 * i; } return s; }\n\
         int main(void) { long t = 0; for (int i = 0; i < 3000; i++) t += work(200000); return t == 1; }\n",
    )
    .unwrap();
    // autofdo of Debian 12 does not read DWARF 5.
    let flags = ["-O1", "-gdwarf-4", "-fdebug-info-for-profiling", "-o"];
    run(Command::new("clang-22").args(flags).args([at("x"), at("x.c")]));
    let [program, pprof, file, text] =
        ["x", "x.pb.gz", "perf.data", "x.txt"].map(|name| at(name).display().to_string());
    stackwire([
        "record",
        "--profile",
        "--sample-rate=997",
        &format!("--profile-output={pprof}"),
        &format!("--perf-data-output={file}"),
        "--",
        &program,
    ])
    .succeeded();
    run(Command::new("create_llvm_prof").args([
        format!("--binary={program}"),
        format!("--profile={file}"),
        "--use_lbr=false".to_owned(),
        "--format=text".to_owned(),
        format!("--out={text}"),
    ]));
    let made = std::fs::read_to_string(&text).unwrap();
    assert!(made.starts_with("work:"), "{made}");
    let with = format!("-fprofile-sample-use={text}");
    run(Command::new("clang-22").args(["-O2", &with, "-o"]).args([at("y"), at("x.c")]));
}

/// Samples by the function they are in, not counting what is inlined, of one object.
fn leaves(profile: &Pprof, object: &str) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for sample in &profile.samples {
        let Some(leaf) = sample.locations.first() else { continue };
        if profile.file_of(*leaf) == object
            && let Some((function, ..)) = profile.locations[leaf].lines.last()
        {
            *found.entry(function.clone()).or_default() += sample.count;
        }
    }
    found
}

/// What `perf report` counts of an object, by symbol.
#[track_caller]
fn reported(file: &Path, object: &str) -> BTreeMap<String, u64> {
    let fields = [
        "report",
        "--stdio",
        "--no-children",
        "--no-inline",
        "-g",
        "none",
        "-F",
        "sample,dso,sym",
        "-t",
        ";",
        "-i",
    ];
    let (text, _) = run(Command::new("perf").args(fields).arg(file));
    let mut found = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let parts: Vec<&str> = line.split(';').map(str::trim).collect();
        let [count, dso, symbol] = parts[..] else { continue };
        if dso == object {
            let name = symbol.trim_start_matches("[.] ").trim_start_matches("[k] ");
            *found.entry(name.to_owned()).or_default() += count.parse::<u64>().unwrap();
        }
    }
    found
}

#[test]
fn perf_data_of_perf_gives_perfs_counts() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let script = "print('ready', flush=True)\nwhile True: sorted(str(i) for i in range(3000))";
    // The distribution's own, whatever comes first in PATH.
    let python3 = std::fs::canonicalize("/usr/bin/python3").unwrap();
    let mut python = Command::new(&python3);
    python.args(["-c", script]);
    for (program, mut command) in [
        (build::work().to_owned(), {
            let mut c = Command::new(build::work());
            c.args(["threads", "60"]);
            c
        }),
        (build::unwind_corpus()[0].1.clone(), Command::new(&build::unwind_corpus()[0].1)),
        (python3, python),
    ] {
        let running = Running::start(&mut command);
        for (how, graph) in
            [("fp", &["-g"][..]), ("dwarf", &["--call-graph", "dwarf,32768"]), ("pipe", &["-g"])]
        {
            let file = at(&format!("{how}.data"));
            let mut perf = Command::new("perf");
            perf.args([
                "record",
                "-N",
                "-q",
                "-e",
                "cpu-clock",
                "-F",
                "499",
                "-p",
                &running.pid().to_string(),
            ]);
            perf.args(graph).arg("-o").arg(if how == "pipe" { Path::new("-") } else { &file });
            perf.args(["--", "sleep", "2"]);
            if how == "pipe" {
                perf.stdout(std::fs::File::create(&file).unwrap());
            }
            assert!(perf.status().unwrap().success());
            let output = at("out.pb.gz");
            stackwire(["resolve".as_ref(), file.as_os_str(), "-o".as_ref(), output.as_os_str()])
                .succeeded();
            let ours = Pprof::read(&output);
            let name = program.file_name().unwrap().to_str().unwrap();
            let theirs = reported(&file, name);
            let found = leaves(&ours, program.to_str().unwrap());
            // Where both have a name: Debian's python is stripped, and then perf shows addresses.
            // What perf calls the first entry of a linkage table is nobody's name.
            let is_name = |symbol: &str| {
                !symbol.starts_with("0x") && !symbol.contains('@') && symbol != "_init"
            };
            let both = theirs.iter().filter(|(symbol, _)| is_name(symbol));
            let (mut samples, mut symbols) = (0, 0);
            for (symbol, count) in both {
                assert_eq!(
                    found.get(symbol),
                    Some(count),
                    "{name}, {how}: {symbol}\n{theirs:?}\n{found:?}"
                );
                (samples, symbols) = (samples + count, symbols + 1);
            }
            eprintln!("{name}, {how}: {samples} samples in {symbols} functions as perf has them");
            assert!(samples > 100, "{name}, {how}: {samples} samples");
            let said = report(&file);
            let taken = format!("samples taken {0} = {0} in the profile + 0 lost", ours.count());
            assert!(said.contains(&taken), "{said}");
            if how == "dwarf" {
                let line =
                    said.lines().find(|line| line.ends_with("reached the thread's root")).unwrap();
                let share: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
                eprintln!("{name}: {share} % of the stacks perf copied are whole");
                // Of 500 calls deep, and of signal handlers on stacks of their own, perf copies too little.
                assert!(share >= 99.5 || name == "unwind_o2", "{said}");
            }
        }
    }
}

/// Values by sample type, added up, as Go reads them.
#[track_caller]
fn totals(file: &Path) -> Vec<i64> {
    let text = go(&["-raw", "-symbolize=none"], &[file]);
    let mut sums = Vec::new();
    let samples = text.lines().skip_while(|line| *line != "Samples:").skip(2);
    for line in samples.take_while(|line| *line != "Locations") {
        let Some((values, _)) = line.split_once(':').filter(|_| !line.contains(":[")) else {
            continue;
        };
        for (index, value) in values.split_whitespace().enumerate() {
            sums.resize(sums.len().max(index + 1), 0);
            sums[index] += value.parse::<i64>().unwrap();
        }
    }
    sums
}

#[test]
fn pprof_of_go_and_gperftools_is_completed() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(
        at("main.go"),
        "package main\nimport (\"os\"; \"runtime/pprof\"; \"time\")\nvar keep [][]byte\n\
         func burn() int { s := 0; for i := 0; i < 1000000; i++ { s += i % 7 }; return s }\n\
         func main() { c, _ := os.Create(os.Args[1]); pprof.StartCPUProfile(c)\n\
         for e := time.Now().Add(2 * time.Second); time.Now().Before(e); { burn(); keep = append(keep, make([]byte, 100000)) }\n\
         pprof.StopCPUProfile(); c.Close(); h, _ := os.Create(os.Args[2]); pprof.WriteHeapProfile(h); h.Close() }\n",
    )
    .unwrap();
    let mut go_build = Command::new("go");
    go_build.args(["build", "-ldflags=-s -w", "-o", "prog", "main.go"]).current_dir(&directory);
    run(go_build.env("GO111MODULE", "off").env("HOME", directory.path()));
    run(Command::new(at("prog")).args([at("cpu"), at("heap")]));
    for (name, function) in [("cpu", "main.burn"), ("heap", "main.main")] {
        let output = at("out.pb.gz");
        stackwire(["resolve".as_ref(), at(name).as_os_str(), "-o".as_ref(), output.as_os_str()])
            .succeeded();
        assert_eq!(totals(&output), totals(&at(name)), "{name}");
        let types = |file: &Path| {
            go(&["-raw"], &[file])
                .lines()
                .skip_while(|l| *l != "Samples:")
                .nth(1)
                .map(|line| line.replace("[dflt]", ""))
                .unwrap()
                .to_owned()
        };
        assert_eq!(types(&output), types(&at(name)));
        assert!(go(&["-top"], &[&output]).contains(function), "{name}");
    }
    let both = stackwire(["report".as_ref(), at("cpu").as_os_str(), at("heap").as_os_str()]);
    both.failed(1, "cannot be added");

    // Without names: of a program whose names are in a separate file.
    let libraries = std::fs::read_dir("/usr/lib/x86_64-linux-gnu").unwrap().flatten();
    let profiler = libraries
        .map(|it| it.path())
        .find(|path| path.to_string_lossy().contains("libprofiler.so"));
    if !can("libgoogle-perftools4", profiler.is_some()) {
        return;
    }
    let (program, debug) = (at("stripped"), at("debug"));
    std::fs::copy(build::work(), &program).unwrap();
    let notes = run(Command::new("readelf").arg("-n").arg(&program)).0;
    let id =
        notes.split("Build ID: ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    std::fs::create_dir_all(debug.join(".build-id").join(&id[..2])).unwrap();
    let separate = debug.join(".build-id").join(&id[..2]).join(format!("{}.debug", &id[2..]));
    run(Command::new("objcopy").arg("--only-keep-debug").args([&program, &separate]));
    run(Command::new("strip").arg(&program));
    let mut profiled = Command::new(&program);
    profiled
        .args(["plain", "3"])
        .env("LD_PRELOAD", profiler.unwrap())
        .env("CPUPROFILE", at("gperf"));
    assert!(profiled.output().unwrap().status.success());
    let converted = go(
        &["-proto", "-symbolize=none", &format!("-output={}", at("gperf.pb").display())],
        &[&at("gperf")],
    );
    drop(converted);
    for input in ["gperf", "gperf.pb"] {
        let output = at("out.pb.gz");
        stackwire([
            "resolve".as_ref(),
            at(input).as_os_str(),
            "-o".as_ref(),
            output.as_os_str(),
            "--debug-dir".as_ref(),
            debug.as_os_str(),
        ])
        .succeeded();
        assert_eq!(totals(&output), totals(&at("gperf.pb")), "{input}");
        let top = go(&["-top", "-symbolize=none"], &[&output]);
        assert!(top.contains("alpha") && top.contains("beta"), "{input}: {top}");
    }
}

#[test]
fn what_is_written_without_names_gets_them_back() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let running = Running::start(Command::new(build::work()).args(["threads", "60"]));
    let pid = format!("--pid={}", running.pid());
    let [named, capture] = ["named.pb.gz", "x.stackwire"].map(at);
    stackwire([
        "record",
        "--profile",
        &pid,
        "--duration=2s",
        "--sample-rate=499",
        &format!("--profile-output={}", named.display()),
        &format!("--capture={}", capture.display()),
    ])
    .succeeded();
    let bare = at("bare.pb.gz");
    stackwire([
        "resolve".as_ref(),
        capture.as_os_str(),
        "--pprof-unsymbolized".as_ref(),
        "-o".as_ref(),
        bare.as_os_str(),
    ])
    .succeeded();
    let raw = go(&["-raw", "-symbolize=none"], &[&bare]);
    assert!(!raw.contains("alpha"), "it has names");
    // Go finds the program where it was; so do we, by its build-id.
    assert!(go(&["-top"], &[&bare]).contains("alpha"));
    let again = at("again.pb.gz");
    stackwire(["resolve".as_ref(), bare.as_os_str(), "-o".as_ref(), again.as_os_str()]).succeeded();
    let (before, after) = (Pprof::read(&named), Pprof::read(&again));
    let program = build::work().to_str().unwrap();
    assert_eq!(frames_of(&before, program), frames_of(&after, program));
    assert_eq!(frames_of(&before, "[kernel]"), frames_of(&after, "[kernel]"));
    assert_eq!(before.count(), after.count());

    // Folded stacks, back and forth.
    let folded = |input: &Path, output: &Path| {
        let pprof = at("unused.pb.gz");
        stackwire([
            "resolve".as_ref(),
            input.as_os_str(),
            "-o".as_ref(),
            pprof.as_os_str(),
            "--folded".as_ref(),
            output.as_os_str(),
        ])
        .succeeded();
        std::fs::read_to_string(output).unwrap()
    };
    let once = folded(&capture, &at("one.folded"));
    assert_eq!(once, folded(&at("one.folded"), &at("two.folded")));
    assert!(once.contains("alpha"));

    // Parts of it add up.
    let part = |options: &[&str]| -> u64 {
        let arguments =
            ["report", capture.to_str().unwrap()].into_iter().chain(options.iter().copied());
        let ran = stackwire(arguments).succeeded();
        ran.stdout.split_whitespace().next().unwrap().parse().unwrap()
    };
    let all = part(&[]);
    assert_eq!(part(&["--focus=alpha"]) + part(&["--ignore=alpha"]), all);
    assert_eq!(part(&["--time=..1"]) + part(&["--time=1.."]), all);
    assert!(part(&["--time=0.5..1"]) * 6 > all && part(&["--time=0.5..1"]) * 2 < all);
    let by_thread =
        stackwire(["report", capture.to_str().unwrap(), "--by", "thread"]).succeeded().stdout;
    assert!(by_thread.contains("  first\n") && by_thread.contains("  second\n"), "{by_thread}");

    let (svg, both) = (at("diff.svg"), at("diff.folded"));
    let diff = stackwire([
        "report".as_ref(),
        "--diff".as_ref(),
        capture.as_os_str(),
        named.as_os_str(),
        "--flamegraph".as_ref(),
        svg.as_os_str(),
        "--folded".as_ref(),
        both.as_os_str(),
    ])
    .succeeded();
    assert!(diff.stdout.contains("+0.00 %") && diff.stdout.contains("alpha"), "{}", diff.stdout);
    assert!(std::fs::read_to_string(svg).unwrap().contains("alpha"));
    let line = std::fs::read_to_string(both).unwrap();
    let counts: Vec<&str> = line.lines().next().unwrap().rsplit(' ').take(2).collect();
    assert_eq!(counts[0], counts[1], "{line}");
}

/// A cgroup of ours, removed in the end.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(hierarchy: &str, path: &str) -> Self {
        let directory =
            Path::new("/sys/fs/cgroup").join(hierarchy).join(path.trim_start_matches('/'));
        std::fs::create_dir_all(&directory).unwrap();
        Self(directory)
    }

    /// A command that runs there, under the root elsewhere.
    fn command(&self, program: &str) -> Command {
        let script = format!(
            "for all in /sys/fs/cgroup/*/cgroup.procs; do echo $$ >$all; done 2>/dev/null; echo $$ >{}/cgroup.procs; exec {program}",
            self.0.display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        command
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let mut directory = self.0.as_path();
        // Up to the hierarchy itself, which stays.
        while std::fs::remove_dir(directory).is_ok() {
            directory = directory.parent().unwrap();
        }
    }
}

#[test]
fn samples_say_whose_container_they_are_of() {
    let hierarchies =
        ["memory", "unified"].map(|name| Path::new("/sys/fs/cgroup").join(name).is_dir());
    if !privileged() || !can("cgroup v1 and v2 below /sys/fs/cgroup", hierarchies == [true, true]) {
        return;
    }
    let ids: Vec<String> = (1..6).map(|n| format!("{n:064x}")).collect();
    let uid = "2c9f1c5e-6f4e-4b6b-9a53-5c1f0d2f7a11";
    let slice = format!("/kubepods.slice/kubepods-pod{}.slice", uid.replace('-', "_"));
    let places = [
        ("memory", format!("/kubepods/burstable/pod{uid}/{}", ids[0]), Some(&ids[0]), Some(uid)),
        ("memory", format!("/docker/{}", ids[1]), Some(&ids[1]), None),
        ("unified", format!("{slice}/cri-containerd-{}.scope", ids[2]), Some(&ids[2]), Some(uid)),
        ("unified", "/system.slice/our.service".to_owned(), None, None),
    ];
    let work = build::work().to_str().unwrap();
    let cgroups = places.each_ref().map(|(hierarchy, path, ..)| Cgroup::new(hierarchy, path));
    let running =
        cgroups.each_ref().map(|it| Running::start(&mut it.command(&format!("{work} plain 60"))));
    // One that is gone, cgroup and all, long before anybody asks.
    let short = Cgroup::new("memory", &format!("/docker/{}", ids[4]));
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("x.pb.gz");
    let profile_output = format!("--profile-output={}", output.display());
    let recording = std::thread::spawn(move || {
        stackwire([
            "record",
            "--profile",
            "--all",
            "--duration=3s",
            "--sample-rate=997",
            &profile_output,
        ])
    });
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert!(short.command(&format!("{work} plain 0.05")).output().unwrap().status.success());
    drop(short);
    recording.join().unwrap().succeeded();
    let profile = Pprof::read(&output);
    let labels_of = |pid: u32| {
        let of = profile
            .samples
            .iter()
            .find(|sample| sample.labels.get("pid") == Some(&pid.to_string()));
        &of.unwrap_or_else(|| panic!("no sample of {pid}")).labels
    };
    for (running, (_, path, container, pod)) in running.iter().zip(&places) {
        let labels = labels_of(running.pid());
        assert_eq!(labels["cgroup_path"], *path);
        assert_eq!(labels.get("container_id"), *container, "{labels:?}");
        assert_eq!(labels.get("pod_uid").map(String::as_str), *pod, "{labels:?}");
        assert_eq!(labels["comm"], "work", "equal names, containers of their own");
    }
    let of_short =
        profile.samples.iter().filter(|sample| sample.labels.get("container_id") == Some(&ids[4]));
    assert!(
        of_short.map(|sample| sample.count).sum::<u64>() >= 3,
        "the process of 50 ms has no container"
    );
}

#[test]
fn names_of_the_own_pod_come_from_the_environment() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("x.pb.gz");
    let running = Running::start(Command::new(build::work()).args(["plain", "60"]));
    let mut command = Command::new(crate::support::binary("stackwire"));
    command.args([
        "record",
        "--profile",
        "--duration=1s",
        "--sample-rate=499",
        &format!("--pid={}", running.pid()),
    ]);
    command.arg("--profile-output").arg(&output);
    command.envs([("POD_NAME", "web-7"), ("POD_NAMESPACE", "shop"), ("CONTAINER_NAME", "app")]);
    Ran::of(&mut command).succeeded();
    let profile = Pprof::read(&output);
    for (key, value) in [("pod_name", "web-7"), ("namespace", "shop"), ("container_name", "app")] {
        assert!(profile.samples.iter().all(|sample| sample.labels[key] == value), "{key}");
    }
}

#[test]
fn damaged_profiles_of_others_are_refused_in_words() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let file = at("perf.data");
    let perf = ["record", "-N", "-q", "-e", "cpu-clock", "-F", "997", "-g", "-o"];
    let ran = Command::new("perf")
        .args(perf)
        .arg(&file)
        .args(["--", "gzip", "-c", "/bin/sh"])
        .output()
        .unwrap();
    if !can("perf", ran.status.success()) {
        return;
    }
    let good = std::fs::read(&file).unwrap();
    let bad = |name: &str, bytes: &[u8], words: &str| {
        std::fs::write(at(name), bytes).unwrap();
        stackwire(["report".as_ref(), at(name).as_os_str()]).failed(1, words);
    };
    bad("cut", &good[..good.len() - 100], "larger than the file");
    bad("half", &good[..400], "it is cut");
    bad("head", &good[..60], "its head is cut");
    bad("big", &[b"2ELIFREP", &good[8..]].concat(), "big-endian");
    let mut size = good.clone();
    size[48..56].copy_from_slice(&u64::MAX.to_le_bytes());
    bad("size", &size, "it is cut");
    let mut killed = good.clone();
    killed[48..56].fill(0);
    bad("killed", &killed, "killed before it finished");
    bad("gz", &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 1, 2, 3], "pprof");
    bad("text", b"a;b;c\n", "line 1 is no folded stack");
    bad("nothing", b"", "the file is empty");
    // Bits that are wrong anywhere: an error or a report, and neither a crash nor all memory.
    let mut state = 7u64;
    for _ in 0..200 {
        let mut bytes = good.clone();
        for _ in 0..8 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (state >> 33) as usize % bytes.len();
            bytes[at] = (state >> 24) as u8;
        }
        std::fs::write(at("flipped"), &bytes).unwrap();
        let code = stackwire(["report".as_ref(), at("flipped").as_os_str()]).code;
        assert!(matches!(code, Some(0 | 1)), "{code:?}");
    }
}
