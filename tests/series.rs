//! Several events at once: a series each, over the same processes and stacks; and captures of
//! format 1, which have one event.
//!
//! The program touches a number of pages that it prints: each is a page fault, four in five of them
//! in `touch_many`. perf, which samples the same two events of another run of it, is the second
//! judge.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::support::pprof::{Pprof, Sample, go, unpack};
use crate::support::server::{Server, profiles};
use crate::support::{Ran, Running, alone, binary, build, privileged, recorded, run, stackwire};

const KINDS: [&str; 4] =
    ["samples/count", "cpu/nanoseconds", "page-faults_sample/count", "page-faults/count"];

/// Sums of what `value` says, by the function of the program that the stack leads through.
fn by_function(profile: &Pprof, value: impl Fn(&Sample) -> u64) -> BTreeMap<&'static str, u64> {
    let mut sums = BTreeMap::new();
    for sample in &profile.samples {
        let functions = profile.functions(sample);
        let known = ["touch_many", "touch_few", "compute"];
        let function = known.into_iter().find(|name| functions.contains(name)).unwrap_or("other");
        *sums.entry(function).or_default() += value(sample);
    }
    sums
}

fn percent(of: &BTreeMap<&str, u64>, function: &str) -> f64 {
    let all: u64 = of.values().sum();
    of.get(function).copied().unwrap_or(0) as f64 * 100.0 / all.max(1) as f64
}

/// Runs the program under both events; the directory then has `out.pb.gz`, `out.stackwire` and
/// `out.data`. How many pages it touched.
fn record(directory: &Path) -> u64 {
    let outputs =
        ["profile-output=out.pb.gz", "capture=out.stackwire", "perf-data-output=out.data"];
    let ran = Ran::of(
        Command::new(binary("stackwire"))
            .current_dir(directory)
            .args(["record", "--event=cpu-clock", "--event=page-faults", "--sample-rate=499"])
            .args(outputs.map(|output| format!("--{output}")))
            .arg("--")
            .arg(build::faults())
            .arg("4"),
    )
    .succeeded();
    ran.stdout.trim().parse().unwrap()
}

/// Samples and the sum of periods of each event, and those by function, as `perf script` reads
/// them.
fn by_perf(data: &Path) -> BTreeMap<String, (u64, u64, BTreeMap<&'static str, u64>)> {
    let (text, _) = run(Command::new("perf")
        .args(["script", "--fields=comm,event,period,ip,sym", "--input"])
        .arg(data));
    let mut events = BTreeMap::<_, (u64, u64, BTreeMap<_, u64>)>::new();
    for stack in text.split("\n\n").filter(|stack| !stack.trim().is_empty()) {
        let (head, frames) = stack.trim_start().split_once('\n').unwrap_or((stack, ""));
        // Behind the name of the thread, which is perf's own at first.
        let mut words = head.split_whitespace().rev();
        let event = words.next().unwrap().trim_end_matches(':').to_owned();
        let period: u64 = words.next().unwrap().parse().unwrap();
        let known = ["touch_many", "touch_few", "compute"];
        let through = |name: &&str| frames.lines().any(|frame| frame.contains(*name));
        let function = known.into_iter().find(through).unwrap_or("other");
        let event = events.entry(event).or_default();
        event.0 += 1;
        event.1 += period;
        *event.2.entry(function).or_default() += period;
    }
    events
}

#[test]
fn page_faults_beside_the_clock_are_those_there_were() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let pages = record(directory.path());
    let profile = Pprof::read(&at("out.pb.gz"));
    assert_eq!(profile.kinds, KINDS);
    let one_series = |sample: &Sample| (sample.values[0] == 0) != (sample.values[2] == 0);
    assert!(profile.samples.iter().all(one_series));
    // The program's own pages, and a few hundred of its start.
    let faults = by_function(&profile, |sample| sample.values[3]);
    let all: u64 = faults.values().sum();
    assert!(all.abs_diff(pages) * 20 < pages, "{all} faults, {pages} pages touched");
    assert!((percent(&faults, "touch_many") - 80.0).abs() < 8.0, "{faults:?}");
    assert!((percent(&faults, "touch_few") - 20.0).abs() < 8.0, "{faults:?}");
    let time = by_function(&profile, |sample| sample.values[1]);
    assert!(percent(&faults, "compute") < 2.0 && percent(&time, "compute") > 15.0, "{time:?}");

    // Other runs, by perf. Its weights of page faults by frequency are guesses, 10 points off in
    // one run of five; by a fixed period they are exact.
    let perf = |arguments: &[&str], to: &str| {
        run(Command::new("perf")
            .args(["record", "-q", "-g"])
            .args(arguments)
            .arg("-o")
            .arg(at(to))
            .arg("--")
            .arg(build::faults())
            .arg("4"));
        by_perf(&at(to))
    };
    let theirs = perf(&["-e", "cpu-clock", "-e", "page-faults", "-F", "499"], "perf.data");
    let exact = perf(&["-e", "page-faults", "-c", "100"], "exact.data");
    for (event, ours, theirs) in [("cpu-clock", &time, &theirs), ("page-faults", &faults, &exact)] {
        let theirs = &theirs[event].2;
        for function in ["touch_many", "touch_few", "compute"] {
            let (one, other) = (percent(ours, function), percent(theirs, function));
            assert!(
                (one - other).abs() < 10.0,
                "{event} {function}: {one:.1} %, perf {other:.1} %"
            );
        }
    }
    // Theirs, read by us: two series of as many samples as perf says.
    let (resolved, folded) = (at("perf.pb.gz"), at("perf.folded"));
    stackwire([
        "resolve".as_ref(),
        at("perf.data").as_os_str(),
        "--output".as_ref(),
        resolved.as_os_str(),
        "--folded".as_ref(),
        folded.as_os_str(),
    ])
    .succeeded();
    let read = Pprof::read(&resolved);
    assert_eq!(read.kinds, KINDS);
    let sum = |value: usize| read.samples.iter().map(|sample| sample.values[value]).sum::<u64>();
    let counts = ["cpu-clock", "page-faults"].map(|event| (theirs[event].0, theirs[event].1));
    assert_eq!([(sum(0), sum(1)), (sum(2), sum(3))], counts);
    // Ours, read by perf.
    let ours = by_perf(&at("out.data"));
    let sum = |value: usize| profile.samples.iter().map(|sample| sample.values[value]).sum::<u64>();
    let counts = ["cpu-clock", "page-faults"].map(|event| (ours[event].0, ours[event].1));
    assert_eq!([(sum(0), sum(1)), (sum(2), sum(3))], counts);
    // Ours, read by us again.
    let again = at("again.pb.gz");
    let arguments = ["resolve".into(), at("out.pb.gz").into_os_string()];
    stackwire(arguments.into_iter().chain(["--output".into(), again.clone().into_os_string()]))
        .succeeded();
    let again = Pprof::read(&again);
    assert_eq!(again.kinds, KINDS);
    let sum = |of: &Pprof, value: usize| of.samples.iter().map(|it| it.values[value]).sum::<u64>();
    assert_eq!([0, 1, 2, 3].map(|it| sum(&again, it)), [0, 1, 2, 3].map(|it| sum(&profile, it)));
    // And by Go.
    let top = go(&["-top", "-sample_index=page-faults", "-nodecount=3"], &[&at("out.pb.gz")]);
    assert!(top.contains("touch_many") && !top.contains("compute"), "{top}");
}

/// The program gets a CPU for some milliseconds at a time: what comes and goes in bursts is counted
/// whole all the same.
#[test]
fn page_faults_beside_busy_cpus_are_those_there_were() {
    if !privileged() {
        return;
    }
    let _alone = alone();
    let _busy = [(); 4].map(|()| {
        let endless = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        Running(endless)
    });
    let directory = tempfile::tempdir().unwrap();
    let pages = record(directory.path());
    let profile = Pprof::read(&directory.path().join("out.pb.gz"));
    let faults = by_function(&profile, |sample| sample.values[3]);
    let all: u64 = faults.values().sum();
    assert!(all.abs_diff(pages) * 20 < pages, "{all} faults, {pages} pages touched");
    assert!((percent(&faults, "touch_many") - 80.0).abs() < 8.0, "{faults:?}");
    assert!((percent(&faults, "touch_few") - 20.0).abs() < 8.0, "{faults:?}");
}

/// Two programs share a CPU. One has thousands of page faults at a time and then none, the other
/// has one now and then. A sample of one must not stand for page faults of the other.
#[test]
fn page_faults_are_of_who_had_them() {
    if !privileged() {
        return;
    }
    let program = |mode: &[&str]| {
        let mut pinned = Command::new("taskset");
        pinned.args(["--cpu-list", "0"]).arg(build::faults()).arg("8").args(mode);
        pinned.stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    let programs = [program(&[]), program(&["sparse"])];
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["--all", "--event=page-faults", "--duration=5s", "--profile-output=x.pb.gz"];
    recorded(directory.path(), &arguments).succeeded();
    let pids = programs.map(|mut program| {
        program.kill().unwrap();
        program.wait().unwrap();
        program.id().to_string()
    });
    let profile = Pprof::read(&directory.path().join("x.pb.gz"));
    let of = |pid: &String| {
        let own = profile.samples.iter().filter(|sample| sample.labels["pid"] == *pid);
        own.map(|sample| sample.values[1]).sum::<u64>()
    };
    let [dense, sparse] = [of(&pids[0]), of(&pids[1])];
    assert!(
        dense > 100_000 && sparse * 10 < dense,
        "{dense} and {sparse}, truly a thousand to one"
    );
}

#[test]
fn each_series_is_reported_and_can_be_chosen() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    record(directory.path());
    let capture = directory.path().join("out.stackwire");
    let report = |more: &[&str]| {
        let mut command = Command::new(binary("stackwire"));
        Ran::of(command.arg("report").arg(&capture).args(more))
    };
    let profile = Pprof::read(&directory.path().join("out.pb.gz"));
    let sums =
        [0, 2, 3].map(|value| profile.samples.iter().map(|it| it.values[value]).sum::<u64>());
    let both = report(&[]).succeeded().stdout;
    let [clock, samples, faults] = sums;
    // Shares of page faults are of faults: one sample stands for more of them than another.
    let faults_head = format!("{faults} page-faults in {samples} samples");
    let heads = format!("{clock} samples of cpu-clock + {faults_head}");
    assert!(both.starts_with(&heads), "{both}");
    let (of_clock, of_faults) =
        both.split_once("\n\n").unwrap().1.split_once(&faults_head).unwrap();
    assert!(of_clock.contains(" compute [faults]"), "{both}");
    let table = of_faults.split_once("frames   named").unwrap().0;
    assert!(table.contains(" touch_few [faults]") && !table.contains(" compute ["), "{both}");

    let one = report(&["--event=page-faults"]).succeeded().stdout;
    assert!(one.starts_with(&format!("{faults_head} at 499 Hz")), "{one}");
    assert!(!one.contains("compute [faults]"), "{one}");
    let folded = report(&["--event=page-faults", "--folded=-"]).succeeded().stdout;
    let sum = |text: &str| {
        let counts = text.lines().map(|line| line.rsplit_once(' ').unwrap().1);
        counts.map(|count| count.parse::<u64>().unwrap()).sum::<u64>()
    };
    assert_eq!(sum(&folded), faults);
    // What there is room for one of is the first.
    assert_eq!(sum(&report(&["--folded=-"]).succeeded().stdout), clock);
    report(&["--event=cycles"]).failed(1, "events there are: cpu-clock, page-faults");
}

#[test]
fn windows_of_a_server_have_all_series() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path(), "127.0.0.1:0", &["--window=2s"]);
    let mut program =
        Command::new(build::faults()).arg("8").stdout(std::process::Stdio::null()).spawn().unwrap();
    run(Command::new(binary("stackwire-collector"))
        .arg(format!("--pid={}", program.id()))
        .arg(format!("--to=http://{}", server.address))
        .args(["--event=page-faults,cpu-clock", "--epoch=500ms", "--duration=5s"]));
    server.terminate();
    program.kill().unwrap();
    program.wait().unwrap();
    let written = profiles(directory.path());
    assert!(written.len() >= 2, "{written:?}");
    let mut sums = [0; 4];
    for path in &written {
        let profile = Pprof::read(path);
        assert_eq!(profile.kinds.len(), 4, "{}", path.display());
        assert_eq!(profile.kinds[1..3], ["page-faults/count", "cpu-clock_sample/count"]);
        for (sum, value) in sums.iter_mut().zip(0..) {
            *sum += profile.samples.iter().map(|sample| sample.values[value]).sum::<u64>();
        }
    }
    assert!(sums[0] > 50 && sums[1] > 100_000 && sums[2] > 200, "{sums:?}");
}

#[test]
fn an_event_twice_or_unknown_is_refused() {
    let run = |events: &str| {
        let collector = Command::new(binary("stackwire-collector"))
            .args(["--all", "--output=/dev/null", events])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&collector.stderr).into_owned();
        (collector.status.code(), said)
    };
    let (code, said) = run("--event=cpu-clock,cpu-clock");
    assert!(code == Some(2) && said.contains("cpu-clock is there twice"), "{code:?} {said}");
    let (code, said) = run("--event=page-fault");
    assert!(code == Some(2) && said.contains("page-faults"), "{code:?} {said}");
}

/// The capture, and what the last version that wrote format 1 made of it, are fixtures.
#[test]
fn captures_of_format_1_are_read_as_before() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let fixture = |name: &str| build::source(&format!("format-1.{name}"));
    let (pprof, folded) = (at("x.pb.gz"), at("x.folded"));
    stackwire([
        "resolve".as_ref(),
        fixture("stackwire").as_os_str(),
        "--output".as_ref(),
        pprof.as_os_str(),
        "--folded".as_ref(),
        folded.as_os_str(),
    ])
    .succeeded();
    let text = |path: &Path| std::fs::read(path).unwrap();
    assert!(text(&folded) == text(&fixture("folded")));
    // Unpacked: how well it is compressed may change.
    assert!(unpack(&pprof) == unpack(&fixture("pb.gz")), "{:?}", Pprof::read(&pprof));
}
