//! What `report` shows of a capture, and how it is asked for: labels, the size of a terminal,
//! beginnings of build-ids, flame graphs.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::support::{Pprof, Ran, Running, binary, build, privileged, recorded, run};

/// A capture of two processes with known functions, one of them of C++.
fn capture_of_two(directory: &Path) {
    let [work, inlined] = [
        Running::start(Command::new(build::work()).args(["threads", "20"])),
        Running::start(Command::new(build::work()).args(["plain", "20"])),
    ];
    let pids = format!("{},{}", work.pid(), inlined.pid());
    recorded(directory, &["--pid", &pids, "--duration=1", "-F", "997", "--capture=x.stackwire"])
        .succeeded();
}

#[test]
fn samples_are_chosen_by_their_labels() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    capture_of_two(at);
    let ran = |arguments: &[&str]| {
        Ran::of(Command::new(binary("stackwire")).args(arguments).current_dir(at))
    };
    let whole = ran(&["resolve", "x.stackwire", "-o", "whole.pb.gz"]).succeeded();
    assert!(whole.stderr.contains("% of stacks whole"), "{}", whole.stderr);
    let whole = Pprof::read(&at.join("whole.pb.gz"));
    let threads: BTreeSet<&str> =
        whole.samples.iter().map(|sample| sample.labels["thread"].as_str()).collect();
    assert!(threads.len() >= 3, "{threads:?}");
    for thread in threads {
        let wanted = format!("comm=work,thread={thread}");
        ran(&["resolve", "x.stackwire", "-o", "part.pb.gz", "--where", &wanted]).succeeded();
        let part = Pprof::read(&at.join("part.pb.gz"));
        let expected = whole.samples.iter().filter(|it| it.labels["thread"] == thread);
        let expected: u64 = expected.map(|sample| sample.count).sum();
        assert!(part.samples.iter().all(|sample| sample.labels["thread"] == thread));
        assert_eq!(part.count(), expected, "{thread}");
    }
    // Of one label any value, of several labels all.
    let pids: BTreeSet<&String> = whole.samples.iter().map(|it| &it.labels["pid"]).collect();
    let all: Vec<String> = pids.iter().map(|pid| format!("pid={pid}")).collect();
    let report = ran(&["report", "x.stackwire", "--where", &all.join(",")]).succeeded().stdout;
    assert!(report.contains(&format!("{} samples of cpu-clock", whole.count())), "{report}");
    let one = ran(&["report", "x.stackwire", "--where", &all[0], "--where", "comm=other"]);
    one.failed(1, "is in that part of the profile");
    let none = ran(&["report", "x.stackwire", "--where", "tread=x"]);
    none.failed(1, "no sample has a label \"tread\"; those there are: ");
    let none = ran(&["report", "x.stackwire", "--by", "tread"]);
    none.failed(1, "those there are: cgroup_path, comm, ");
    ran(&["report", "x.stackwire", "--where", "comm"]).failed(2, "LABEL=VALUE");
    let sorted = ran(&["report", "x.stackwire", "--sort=total", "--top=3"]).succeeded().stdout;
    let mut rows = sorted.lines().skip_while(|line| !line.contains("function")).skip(1);
    let shares = rows.by_ref().take(3).map(|row| {
        let mut fields = row.split_whitespace().map(|field| field.parse::<f64>());
        (fields.next().unwrap().unwrap(), fields.nth(2).unwrap().unwrap())
    });
    let shares: Vec<(f64, f64)> = shares.collect();
    assert!(shares.is_sorted_by(|one, other| one.1 >= other.1), "{sorted}");
    assert!(shares[0].0 < 10.0 && shares[0].1 > 50.0, "who calls the rest comes first: {sorted}");
    assert!(rows.next().unwrap().ends_with(" more"), "{sorted}");
}

#[test]
fn a_report_fits_a_terminal() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let program = Running::start(Command::new(build::stripped_work()).args(["plain", "20"]));
    let pid = program.pid().to_string();
    let arguments = ["--pid", &pid, "--duration=1", "-F", "499", "--profile-output=x.pb.gz"];
    recorded(at, &arguments).succeeded();
    let on_terminal = |rows: usize, more: &str| {
        let report = format!(
            "stty rows {rows} cols 80; {} report x.stackwire --symbol-cache-dir=c {more}",
            binary("stackwire").display()
        );
        let mut script = Command::new("script");
        script.args(["-qec", &report, "/dev/null"]).env("NO_COLOR", "1").current_dir(at);
        Ran::of(&mut script).succeeded().stdout
    };
    for rows in [24, 50] {
        let report = on_terminal(rows, "");
        assert!(report.lines().count() < rows, "{report}");
        assert!(report.lines().all(|line| line.trim_end().chars().count() <= 80), "{report}");
        assert!(report.contains("stripped_work+0x") && report.contains("where stacks end: --full"));
        assert!(report.contains("of frames: stripped_work: no symbol covers it"), "{report}");
    }
    let full = on_terminal(24, "--full");
    assert!(full.contains("user stacks ended") && full.contains("samples taken"), "{full}");
}

#[test]
fn more_files_than_may_be_open_become_one_report() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("f"), "comm;main;work 3\n").unwrap();
    let report = format!(
        "ulimit -Sn 100 && exec {} report $(yes f | head -300)",
        binary("stackwire").display()
    );
    let ran = Ran::of(Command::new("sh").args(["-c", &report]).current_dir(&directory));
    let report = ran.succeeded().stdout;
    assert!(report.starts_with("900 samples"), "{report}");
}

#[test]
fn a_build_id_is_found_by_its_beginning() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let program = Running::start(Command::new(build::work()).args(["plain", "20"]));
    let pid = program.pid().to_string();
    let common = ["--symbol-cache-dir=c", "--profile-output=x.pb.gz"];
    recorded(at, &[&common[..], &["--pid", &pid, "--duration=1", "-F", "499"]].concat())
        .succeeded();
    let ran = |arguments: &[&str]| {
        let mut command = Command::new(binary("stackwire"));
        Ran::of(command.args(arguments).arg("--symbol-cache-dir=c").current_dir(at))
    };
    let report = ran(&["report", "x.stackwire"]).succeeded().stdout;
    let row = report.lines().find(|line| line.contains("/work ")).unwrap();
    let id = row.split(" /").last().unwrap().split("work ").nth(1).unwrap();
    let id = id.split_whitespace().next().unwrap();
    assert_eq!(id.len(), 12, "{row}");
    let symbols = run(Command::new("nm").arg(build::work())).0;
    let alpha = symbols.lines().find(|line| line.ends_with(" T alpha")).unwrap();
    let address = alpha.split(' ').next().unwrap();
    let found = ran(&["symbolize", id, address]).succeeded().stdout;
    assert!(found.starts_with("alpha\n"), "{found}");
    let removed = Command::new(binary("stackwire"))
        .args(["cache", "--symbol-cache-dir=c", "rm", id])
        .current_dir(at)
        .status()
        .unwrap();
    assert!(removed.success());
    ran(&["symbolize", id, address]).failed(1, "cannot read symbols of");
}

/// Colour of a frame of a flame graph.
fn colour(svg: &str, function: &str) -> [u32; 3] {
    let (_, rest) =
        svg.split_once(&format!("<title>{function}")).unwrap_or_else(|| panic!("{function}"));
    let (_, rest) = rest.split_once("fill=\"rgb(").unwrap();
    let numbers = rest.split(')').next().unwrap().split(',').map(|it| it.trim().parse().unwrap());
    numbers.collect::<Vec<u32>>().try_into().unwrap()
}

#[test]
fn a_flame_graph_tells_by_colour_what_frames_are() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let inlined = Running::start(Command::new(build::inlined_cc_release()).arg("20"));
    let mut jit = Command::new(build::attack("jit")).arg("fp").spawn().unwrap();
    let pids = format!("{},{}", inlined.pid(), jit.id());
    let arguments = ["--pid", &pids, "--duration=2", "-F", "997", "--profile-output=x.pb.gz"];
    let ran = recorded(directory.path(), &[&arguments[..], &["--flamegraph=live.svg"]].concat());
    jit.kill().unwrap();
    jit.wait().unwrap();
    ran.succeeded();
    let drawn = |output: &str, more: &[&str]| {
        let mut command = Command::new(binary("stackwire"));
        command.args(["report", "x.stackwire", "--flamegraph", output]).args(more);
        let report = Ran::of(command.current_dir(&directory)).succeeded().stdout;
        (report, std::fs::read_to_string(at(output)).unwrap())
    };
    let (report, svg) = drawn("again.svg", &[]);
    assert_eq!(
        svg,
        std::fs::read_to_string(at("live.svg")).unwrap(),
        "equal profiles, equal pictures"
    );
    // Blue, green, red.
    let [red, green, blue] = colour(&svg, "inner (");
    assert!(red < green && green == blue, "{red} {green} {blue}");
    let [red, green, blue] = colour(&svg, "[jit]+0x");
    assert!(green > red && green > blue, "{red} {green} {blue}");
    let [red, green, blue] = colour(&svg, "with_ops (");
    assert!(red > green && green == blue, "{red} {green} {blue}");
    // What a pointer on a frame shows.
    let (_, title) = svg.split_once("<title>inner (").unwrap();
    let (counts, place) = title.split("</title>").next().unwrap().split_once('\n').unwrap();
    assert!(counts.contains(" samples, ") && counts.ends_with("%)"), "{counts}");
    let (line, module) = place.split_once('\n').unwrap();
    assert!(line.starts_with("most often at ") && line.contains("inlined.cc:"), "{line}");
    assert_eq!(Path::new(module), build::inlined_cc_release());
    // The title says what the report says.
    let samples = report.split(" samples of cpu-clock").next().unwrap();
    assert!(svg.contains(&format!(": {samples} samples of cpu-clock")), "{samples}");
    let (_, without) = drawn("without.svg", &["--no-inlines"]);
    assert!(without.contains("<title>work(unsigned long)") && !without.contains("<title>inner"));
    // The root on top.
    let height = |svg: &str, function: &str| {
        let (_, rest) = svg.split_once(&format!("<title>{function}")).unwrap();
        let (_, rest) = rest.split_once(" y=\"").unwrap();
        rest.split('"').next().unwrap().parse::<f64>().unwrap()
    };
    let (_, icicle) = drawn("icicle.svg", &["--icicle"]);
    assert!(height(&icicle, "main (") < height(&icicle, "with_ops ("));
    assert!(height(&svg, "main (") > height(&svg, "with_ops ("));
}
