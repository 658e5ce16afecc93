//! perf.data, as perf of three ages, hotspot, samply and autofdo read it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::process::Command;

use crate::support::pprof::frames_of;
use crate::support::{
    Pprof, Running, alone, binary, build, can, of_debian, privileged, run, stackwire, test_cache,
};

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

/// perf of this Debian, of the next, and the newest.
pub(crate) fn perfs() -> Vec<(&'static str, Command)> {
    let newer = of_debian("trixie", "perf").map(|command| ("6.12", command));
    let newest = of_debian("sid", "perf").map(|command| ("7.2 or newer", command));
    [("6.1", Command::new("perf"))].into_iter().chain(newer).chain(newest).collect()
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

/// How many of two sets of counts are the same, and how many there are.
fn common(one: &BTreeMap<String, u64>, other: &BTreeMap<String, u64>) -> (u64, u64) {
    let same = one.iter().map(|(key, count)| (*count).min(other.get(key).copied().unwrap_or(0)));
    (same.sum(), one.values().sum::<u64>().max(other.values().sum()))
}

/// Names of kernel functions that have several: the first of them.
fn kernel_aliases() -> HashMap<String, String> {
    let kallsyms = std::fs::read_to_string("/proc/kallsyms").unwrap();
    let mut first: HashMap<&str, &str> = HashMap::new();
    let mut aliases = HashMap::new();
    for line in kallsyms.lines() {
        let mut words = line.split_whitespace();
        let (Some(address), _, Some(name)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let one = *first.entry(address).or_insert(name);
        if one != name {
            aliases.insert(name.to_owned(), one.to_owned());
        }
    }
    aliases
}

/// The same samples of the same threads, and in these objects the same names for 99.9 % of the
/// frames.
#[track_caller]
fn assert_same(version: &str, theirs: &[Printed], ours: &Pprof, objects: &[&str]) {
    assert_eq!(theirs.len() as u64, ours.count(), "perf {version}");
    // Who: as often as we say, by name, process and thread.
    let mut who: BTreeMap<(String, String, String), i64> = BTreeMap::new();
    for sample in &ours.samples {
        let of = |key: &str| sample.labels[key].clone();
        *who.entry((of("thread"), of("pid"), of("tid"))).or_default() += sample.count as i64;
    }
    for sample in theirs {
        let key = (sample.comm.clone(), sample.pid.to_string(), sample.tid.to_string());
        *who.entry(key).or_default() -= 1;
    }
    who.retain(|_, difference| *difference != 0);
    assert!(who.is_empty(), "perf {version}: {who:?}");
    // What: of objects with a symbol table. Of the kernel's names for one function either will do.
    let aliases = kernel_aliases();
    let one_of = |name: &str| aliases.get(name).cloned().unwrap_or_else(|| name.to_owned());
    let (mut same, mut all) = (0, 0);
    for &object in objects {
        let mut frames: BTreeMap<String, u64> = BTreeMap::new();
        let of_it = |frame: &&Frame| frame.0 == object;
        for (_, symbol) in theirs.iter().flat_map(|s| &s.frames).filter(of_it) {
            *frames.entry(one_of(symbol)).or_default() += 1;
        }
        let name = if object == "[kernel.kallsyms]" { "[kernel]" } else { object };
        let mut found: BTreeMap<String, u64> = BTreeMap::new();
        for (symbol, count) in frames_of(ours, name) {
            *found.entry(one_of(&symbol)).or_default() += count;
        }
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
}

#[test]
fn perf_of_three_ages_sees_what_we_see() {
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
    let node = Running::start(Command::new("node").current_dir(&directory).args([
        "--perf-basic-prof",
        "-e",
        NODE,
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
        assert_same(version, &theirs, &ours, &[work.to_str().unwrap(), "[kernel.kallsyms]"]);
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
        let jit = format!("/tmp/perf-{}.map", node.pid());
        let hot =
            theirs.iter().flat_map(|s| &s.frames).filter(|f| f.0 == jit && f.1.contains("hot"));
        assert!(hot.count() > 50, "perf {version} does not see Node's functions");
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
    let json = at("x.json");
    let convert = ["data", "convert", "--force", "--to-json", json.to_str().unwrap(), "-i"];
    run(Command::new("perf").args(convert).arg(&file));

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
    let samply = test_cache().join("sid/run");
    if can("samply of Debian sid", samply.is_file()) {
        assert!(symbolized_by_samply(&samply, &file, work).contains("\"alpha\""));
    }
    drop((threads, system));
}

const NODE: &str = "console.log('ready'); function hot(n) { let s = 0; for (let i = 0; i < n; i++) s += i % 7; return s } for (;;) hot(1e6)";

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
fn two_thousand_short_processes_are_perfs_too() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let [pprof, file] =
        ["x.pb.gz", "perf.data"].map(|name| directory.path().join(name).display().to_string());
    let work = build::work().to_str().unwrap();
    let mut recorder = Command::new(binary("stackwire"))
        .args(["record", "--profile", "--all", "--sample-rate=997"])
        .args([format!("--profile-output={pprof}"), format!("--perf-data-output={file}")])
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_secs(1));
    let script = format!(
        "i=0; while [ $i -lt 1100 ]; do /bin/true; {work} plain 0.005 >/dev/null; i=$((i+1)); done"
    );
    run(Command::new("sh").args(["-c", &script]));
    run(Command::new("kill").args(["-INT", &recorder.id().to_string()]));
    assert!(recorder.wait().unwrap().success());
    let ours = Pprof::read(Path::new(&pprof));
    let pids: HashSet<_> = ours.samples.iter().map(|sample| &sample.labels["pid"]).collect();
    assert!(pids.len() > 1000, "only {} processes were seen", pids.len());
    for (version, mut perf) in perfs() {
        let theirs = printed(&mut perf, Path::new(&file));
        assert_same(version, &theirs, &ours, &[work, "[kernel.kallsyms]"]);
    }
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

/// On another host: one whose perf finds no file but those laid out.
#[test]
fn perf_names_from_the_laid_out_directory_what_we_named() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let program = at("program");
    std::fs::copy(build::work(), &program).unwrap();
    let running = Running::start(Command::new(&program).args(["threads", "60"]));
    let node = Running::start(Command::new("node").current_dir(&directory).args([
        "--perf-basic-prof",
        "-e",
        NODE,
    ]));
    let [pprof, file, laid, capture] =
        ["x.pb.gz", "perf.data", "laid", "x.stackwire"].map(|name| at(name).display().to_string());
    // Its own: names are remembered with the place they are from, which is about to go.
    let cache = format!("--symbol-cache-dir={}", at("cache").display());
    stackwire([
        "record",
        "--profile",
        "--all",
        "--duration=3s",
        "--sample-rate=499",
        &format!("--profile-output={pprof}"),
        &format!("--perf-data-output={file}"),
        &format!("--perf-buildid-dir={laid}"),
        &format!("--capture={capture}"),
        &cache,
    ])
    .succeeded();
    let map = format!("/tmp/perf-{}.map", node.pid());
    drop((running, node));
    std::fs::remove_file(&program).unwrap();
    std::fs::remove_file(map).unwrap();
    let ours = frames_of(&Pprof::read(Path::new(&pprof)), program.to_str().unwrap());
    // The program is gone, and what was compiled of it is still in the cache.
    let [empty, later, unused] =
        ["empty", "later", "unused.pb.gz"].map(|name| at(name).display().to_string());
    let into = format!("--perf-buildid-dir={later}");
    stackwire(["resolve", &capture, "-o", &unused, &into, &cache]).succeeded();
    let listed = run(Command::new("perf").args(["--buildid-dir", &laid, "buildid-cache", "-l"])).0;
    assert!(listed.contains("/usr/bin/node"), "{listed}");
    // Of the kernel's functions those that were sampled, and the one perf counts from.
    let kernels = std::fs::read_dir(Path::new(&laid).join("[kernel.kallsyms]")).unwrap();
    let kernels = kernels.map(|kernel| kernel.unwrap().path().join("kallsyms"));
    let symbols = std::fs::read_to_string({ kernels }.next().unwrap()).unwrap();
    assert!(symbols.contains(" t _text\n") && symbols.contains(" t [unknown]\n"), "{symbols}");
    for (options, named) in [
        (["--buildid-dir", &laid], true),
        (["--buildid-dir", &later], true),
        (["--buildid-dir", &empty], false),
    ] {
        let mut perf = Command::new("perf");
        perf.args(options);
        let theirs = printed(&mut perf, Path::new(&file));
        let mut frames: BTreeMap<String, u64> = BTreeMap::new();
        // Of this program alone: our own have a `main`, too.
        let of_it = |(of, symbol): &&(String, String)| {
            Path::new(of) == program && ours.contains_key(symbol)
        };
        for (_, symbol) in theirs.iter().flat_map(|s| &s.frames).filter(of_it) {
            *frames.entry(symbol.clone()).or_default() += 1;
        }
        let (same, all) = common(&frames, &ours);
        assert!(
            if named { same == all && all > 250 } else { same == 0 },
            "{options:?}: {same} of {all}"
        );
        // By its whole name: the collector, which is among the processes, has functions of
        // `Snapshots`.
        let hot = theirs.iter().flat_map(|s| &s.frames).filter(|(_, symbol)| symbol == "hot");
        let hot = hot.count();
        assert!(
            if named { hot > 100 } else { hot == 0 },
            "{options:?}: {hot} frames of Node's function"
        );
    }
}

/// `perf annotate` asks for the CPU before it shows a line.
#[test]
fn perf_annotates_functions_with_lines_of_source() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("perf.data");
    let program = Running::start(Command::new(build::work()).args(["plain", "20"]));
    let output = format!("--perf-data-output={}", file.display());
    crate::support::record(program.pid(), 1, &[&output]);
    drop(program);
    for (version, mut perf) in perfs() {
        let (text, _) = run(perf.args(["annotate", "--stdio", "-s", "alpha", "-i"]).arg(&file));
        let hot = text.lines().filter_map(|line| {
            let (percent, rest) = line.trim_start().split_once(' ')?;
            Some((percent.parse::<f64>().ok()?, rest))
        });
        let total: f64 = hot.map(|(percent, _)| percent).sum();
        assert!(total > 90.0, "perf {version}: {total} % of alpha are shown:\n{text}");
        assert!(text.contains("burn(6)"), "perf {version} shows no source:\n{text}");
    }
    for (version, mut perf) in perfs() {
        let fields = ["report", "--stdio", "--no-children", "-g", "none", "--sort", "sym,srcline"];
        let (text, _) = run(perf.args(fields).arg("-i").arg(&file));
        let alpha = text.lines().find(|line| line.contains("alpha")).unwrap();
        assert!(alpha.contains("work.c:24"), "perf {version}: {alpha}");
    }
}
