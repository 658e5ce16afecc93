//! Profiles of others, read back in: perf's, Go's, gperftools', our own without names, folded
//! stacks; parts of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::support::debug_files::{RealServer, Stripped};
use crate::support::postgres::Postgres;
use crate::support::pprof::{frames_of, go};
use crate::support::{Pprof, Running, build, can, of_debian, privileged, report, run, stackwire};

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

/// What this `perf report` counts of an object, by symbol.
#[track_caller]
fn reported(mut perf: Command, file: &Path, object: &str) -> BTreeMap<String, u64> {
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
    let (text, _) = run(perf.args(fields).arg(file));
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
    let script = "print('ready', flush=True)\nwhile True: sorted(str(i) for i in range(3000))";
    // The distribution's own, whatever comes first in PATH.
    let python3 = std::fs::canonicalize("/usr/bin/python3").unwrap();
    let mut python = Command::new(&python3);
    python.args(["-c", script]);
    let mut threads = Command::new(build::work());
    threads.args(["threads", "60"]);
    let corpus = &build::unwind_corpus()[0].1;
    for (program, mut command) in [
        (build::work(), threads),
        (corpus.as_path(), Command::new(corpus)),
        (python3.as_path(), python),
    ] {
        let running = Running::start(&mut command);
        assert_counts_are_perfs(program, &[running.pid()]);
    }
}

#[test]
fn perf_data_of_postgresql_gives_perfs_counts() {
    if !privileged() {
        return;
    }
    let Some(postgres) = Postgres::start() else { return };
    let load = postgres.under_pgbench(60);
    assert_counts_are_perfs(&postgres.program(), &load.servers());
}

/// perf records processes by frame pointers, by copies of stacks and to a pipe: we count as it
/// does, function by function.
#[track_caller]
fn assert_counts_are_perfs(program: &Path, pids: &[u32]) {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let name = program.file_name().unwrap().to_str().unwrap();
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let pids = pids.join(",");
    let (fp, dwarf) = (&["-g"][..], &["--call-graph", "dwarf,32768"][..]);
    for (how, graph) in [
        ("fp", fp),
        ("dwarf", dwarf),
        ("pipe", fp),
        ("fp of 5.10", fp),
        ("dwarf of 5.10", dwarf),
        ("fp of 7.2", fp),
        ("dwarf of 7.2", dwarf),
        ("compressed by 7.2", &["-g", "-z"][..]),
    ] {
        let file = at(&format!("{how}.data"));
        let (mut perf, mut reader) = (Command::new("perf"), Command::new("perf"));
        if how.ends_with("5.10") {
            let Some(older) = of_debian("bullseye", "perf_5.10") else { continue };
            perf = older;
        } else if how.ends_with("7.2") {
            let newest = || of_debian("sid", "perf");
            let Some(newest) = newest().zip(newest()) else { continue };
            (perf, reader) = newest;
        }
        perf.args(["record", "-N", "-q", "-e", "cpu-clock", "-F", "499", "-p", &pids]);
        perf.args(graph).arg("-o").arg(if how == "pipe" { Path::new("-") } else { &file });
        perf.args(["--", "sleep", "1"]);
        if how == "pipe" {
            perf.stdout(std::fs::File::create(&file).unwrap());
        }
        assert!(perf.status().unwrap().success());
        let output = at("out.pb.gz");
        stackwire(["resolve".as_ref(), file.as_os_str(), "-o".as_ref(), output.as_os_str()])
            .succeeded();
        let ours = Pprof::read(&output);
        let theirs = reported(reader, &file, name);
        let found = leaves(&ours, program.to_str().unwrap());
        // Where both have a name: Debian's programs are stripped, and then perf shows addresses.
        // What perf calls the first entry of a linkage table is nobody's name.
        let is_name =
            |symbol: &str| !symbol.starts_with("0x") && !symbol.contains('@') && symbol != "_init";
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
        // As few as they are beside other work; each has to be right.
        assert!(samples > 50, "{name}, {how}: {samples} samples");
        let said = report(&file);
        // What perf lost of its copies is said, and not that there was none.
        let taken = format!(" = {} in the profile + ", ours.count());
        assert!(said.contains(&taken), "{said}");
        if how.starts_with("dwarf") {
            let line =
                said.lines().find(|line| line.ends_with("reached the thread's root")).unwrap();
            let share: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
            eprintln!("{name}: {share} % of the stacks perf copied are whole");
            // Of 500 calls deep, and of signal handlers on stacks of their own, perf copies too
            // little.
            assert!(share >= 99.5 || name == "unwind_o2", "{said}");
            if name == "unwind_o2" {
                assert!(said.contains("deeper than the copy of the stack"), "{said}");
                assert!(said.contains("next frame in memory that was not copied"), "{said}");
                assert!(!said.contains("next frame not readable"), "{said}");
            }
        }
    }
}

/// A file of Linux 7.2 whose user stacks come in records of their own: samples have as many frames
/// as perf finds.
#[test]
fn user_stacks_that_come_later_are_joined_to_their_samples() {
    let Some(mut perf) = of_debian("sid", "perf") else { return };
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deferred.perf.data");
    let fields = ["script", "--no-inline", "-F", "pid,time,ip", "-i"];
    let (text, _) = run(perf.args(fields).arg(&fixture));
    let mut theirs: BTreeMap<usize, u64> = BTreeMap::new();
    for sample in text.split("\n\n").filter(|sample| !sample.trim().is_empty()) {
        // Where the record is not in the file, perf prints its cookie as a frame.
        let is_cookie = |address: &str| (0x1000_0000..1 << 63).contains(&hex(address));
        let frames = sample.lines().filter_map(|line| line.strip_prefix('\t'));
        let frames = frames.filter(|address| !is_cookie(address)).count();
        *theirs.entry(frames).or_default() += 1;
    }
    assert!(theirs.values().sum::<u64>() > 300, "{text}");
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out.pb.gz");
    stackwire(["resolve".as_ref(), fixture.as_os_str(), "-o".as_ref(), output.as_os_str()])
        .succeeded();
    let profile = Pprof::read(&output);
    let mut ours: BTreeMap<usize, u64> = BTreeMap::new();
    let mut of_both = 0;
    for sample in &profile.samples {
        *ours.entry(sample.locations.len()).or_default() += sample.count;
        let is_user = |at: &u64| profile.file_of(*at) == "/bin/reads";
        let user = sample.locations.iter().filter(|at| is_user(at)).count();
        of_both += if user >= 4 && user < sample.locations.len() { sample.count } else { 0 };
    }
    assert_eq!(ours, theirs);
    assert!(of_both > 100, "{of_both} samples have stacks of the kernel and of user mode");
}

fn hex(text: &str) -> u64 {
    u64::from_str_radix(text.trim(), 16).unwrap()
}

#[test]
fn fixed_periods_are_what_samples_weigh() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [file, output] = ["perf.data", "out.pb.gz"].map(|name| directory.path().join(name));
    // `-B`: perf 6.1 sometimes crashes where it collects build-ids ("util/build-id.c:1010:
    // assertion failed").
    let perf = ["record", "-B", "-q", "-e", "cpu-clock", "-c", "2000000", "-o"];
    run(Command::new("perf")
        .args(perf)
        .arg(&file)
        .arg("--")
        .arg(build::work())
        .args(["plain", "1"]));
    stackwire(["resolve".as_ref(), file.as_os_str(), "-o".as_ref(), output.as_os_str()])
        .succeeded();
    let profile = Pprof::read(&output);
    assert!(profile.count() > 100);
    assert!(profile.samples.iter().all(|sample| sample.value == sample.count * 2_000_000));
    // Of a command perf does not record the CPU: none is made up.
    let by_cpu = stackwire(["report".as_ref(), file.as_os_str(), "--by".as_ref(), "cpu".as_ref()]);
    by_cpu.failed(1, "no sample has a label \"cpu\"; those there are: ");
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
    assert!(sums.iter().any(|sum| *sum > 0), "{text}");
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

    // Without names: of a program whose names are on a server.
    let libraries = std::fs::read_dir("/usr/lib/x86_64-linux-gnu").unwrap().flatten();
    let profiler = libraries
        .map(|it| it.path())
        .find(|path| path.to_string_lossy().contains("libprofiler.so"));
    if !can("libgoogle-perftools4", profiler.is_some()) {
        return;
    }
    let stripped = Stripped::of(build::work());
    let mut profiled = Command::new(&stripped.program);
    profiled
        .args(["plain", "3"])
        .env("LD_PRELOAD", profiler.unwrap())
        .env("CPUPROFILE", at("gperf"));
    assert!(profiled.output().unwrap().status.success());
    let to = format!("-output={}", at("gperf.pb").display());
    go(&["-proto", "-symbolize=none", &to], &[&at("gperf")]);
    let server = RealServer::start(stripped.debug.parent().unwrap(), &at("debuginfod.sqlite"));
    server.wait_for(&stripped.build_id);
    for input in ["gperf", "gperf.pb"] {
        let cache = format!("cache-{input}");
        let (ran, output) =
            stripped.resolve(&at(input), &cache, &[&format!("--debuginfod-url={}", server.url)]);
        ran.succeeded();
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

    // Several at once are one: what the program and the kernel did in both.
    let merged = at("merged.pb.gz");
    let inputs = [capture.as_os_str(), bare.as_os_str(), "-o".as_ref(), merged.as_os_str()];
    stackwire(["resolve".as_ref()].into_iter().chain(inputs)).succeeded();
    let merged = Pprof::read(&merged);
    assert_eq!(merged.count(), before.count() * 2);
    for object in [program, "[kernel]"] {
        let twice = frames_of(&before, object).into_iter().map(|(name, count)| (name, count * 2));
        assert_eq!(frames_of(&merged, object), twice.collect());
    }

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

#[test]
fn in_the_picture_of_a_difference_noise_is_grey() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    // The same function by two ways: neither tells by itself, both together do.
    let write = |name: &str, [steady, noisy, grown, shrunk, one, two]: [u32; 6]| {
        let text = format!(
            "p;main;steady {steady}\np;main;noisy {noisy}\np;main;grown {grown}\np;main;shrunk {shrunk}\n\
             p;main;one;both {one}\np;main;two;both {two}\n"
        );
        std::fs::write(at(name), text).unwrap();
    };
    write("before", [10_000, 1000, 1000, 2000, 1000, 1000]);
    write("after", [10_050, 1010, 2000, 1000, 1080, 1080]);
    let [before, after, svg] = ["before", "after", "x.svg"].map(at);
    let diff = ["report".as_ref(), "--diff".as_ref(), before.as_os_str(), after.as_os_str()];
    stackwire(diff.into_iter().chain(["--flamegraph".as_ref(), svg.as_os_str()])).succeeded();
    let svg = std::fs::read_to_string(svg).unwrap();
    let colour = |function: &str| {
        let frame = svg.split(&format!("<title>{function} (")).nth(1).unwrap();
        let fill = frame.split("fill=\"rgb(").nth(1).unwrap();
        let parts = fill.split(')').next().unwrap().split(',');
        let [red, green, blue] =
            parts.map(|part| part.parse::<u8>().unwrap()).collect::<Vec<_>>()[..]
        else {
            panic!("{fill}")
        };
        (red, green, blue)
    };
    for function in ["steady", "noisy", "main"] {
        assert_eq!(colour(function), (205, 205, 205), "{function}");
    }
    assert!(matches!(colour("grown"), (255, more, _) if more < 200));
    assert!(matches!(colour("shrunk"), (less, _, 255) if less < 200));
    assert!(matches!(colour("both"), (255, more, _) if more < 255));
}

#[test]
fn damaged_profiles_of_others_are_refused_in_words() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let file = at("perf.data");
    // See `fixed_periods_are_what_samples_weigh`.
    let perf = ["record", "-B", "-q", "-e", "cpu-clock", "-F", "997", "-g", "-o"];
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
    // Mappings with a build-id longer than there are: the others are read.
    let mut long = good.clone();
    let number = |at: usize| u64::from_le_bytes(good[at..at + 8].try_into().unwrap()) as usize;
    let (mut record, end) = (number(40), number(40) + number(48));
    while record < end {
        if good[record] == 10 {
            long[record + 5] |= 0x40;
            long[record + 40] = 21;
        }
        record += usize::from(u16::from_le_bytes([good[record + 6], good[record + 7]]));
    }
    std::fs::write(at("long"), long).unwrap();
    let said = stackwire(["report".as_ref(), at("long").as_os_str()]).succeeded().stdout;
    assert!(said.contains("records of the perf.data do not decode"), "{said}");
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
