//! What people meet first: which processes are sampled, what `record` says in the end, what it
//! leaves behind, code without names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::newborn;
use crate::support::nginx::Nginx;
use crate::support::postgres::Postgres;
use crate::support::pprof::Sample;
use crate::support::whole;
use crate::support::{
    Pprof, Ran, Running, binary, build, can, of_debian, privileged, record, recorded, run,
    stackwire,
};

/// Samples by process.
fn by_pid(profile: &Pprof) -> BTreeMap<u32, u64> {
    let mut counts = BTreeMap::new();
    for sample in &profile.samples {
        *counts.entry(sample.labels["pid"].parse().unwrap()).or_default() += sample.count;
    }
    counts
}

/// Names of the files in a directory, the minute in them left out.
fn files(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    let without_digits = |name: std::ffi::OsString| {
        name.to_string_lossy().replace(|digit: char| digit.is_ascii_digit(), "")
    };
    let mut names: Vec<String> = entries.map(name).map(without_digits).collect();
    names.sort();
    names
}

#[test]
fn children_that_ran_before_are_followed() {
    if !privileged() {
        return;
    }
    // A shell, a shell in it, and two programs below them.
    let work = build::work().display();
    let script = format!("sh -c '{work} plain 60 & wait' & {work} plain 60 & wait");
    let mut shell = Command::new("sh").args(["-c", &script]).stdout(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let of = |parent: u32| -> Vec<u32> {
        let output = Command::new("pgrep").args(["-P", &parent.to_string()]).output().unwrap();
        let pids = String::from_utf8(output.stdout).unwrap();
        pids.lines().map(|pid| pid.parse().unwrap()).collect()
    };
    let children = of(shell.id());
    let grandchildren: Vec<u32> = children.iter().flat_map(|&child| of(child)).collect();
    let followed = record(shell.id(), 2, &["--follow"]);
    let alone = recorded(
        tempfile::tempdir().unwrap().path(),
        &["--pid", &shell.id().to_string(), "--duration=1"],
    );
    for pid in [&children[..], &grandchildren].concat() {
        let _ = Command::new("kill").arg(pid.to_string()).status();
    }
    shell.wait().unwrap();
    let workers: BTreeSet<u32> = by_pid(&followed).into_keys().collect();
    assert_eq!(grandchildren.len(), 1, "{children:?}");
    assert!(workers.contains(&grandchildren[0]), "{workers:?}");
    assert!(children.iter().any(|child| workers.contains(child)), "{workers:?}");
    // What the parent itself does, which is to wait, is no CPU time.
    alone.failed(1, "used no CPU");
}

#[test]
fn workers_of_postgresql_are_followed_from_their_master() {
    if !privileged() {
        return;
    }
    let Some(postgres) = Postgres::start() else { return };
    let load = postgres.under_pgbench(20);
    let master = load.master();
    let profile = record(master, 3, &["--follow"]);
    let found = by_pid(&profile);
    let busy = load.servers().into_iter().filter(|pid| found.get(pid).is_some_and(|&n| n > 50));
    assert!(busy.count() >= 2, "{found:?}");
    let named = profile.samples.iter().filter(|it| profile.functions(it).contains(&"main"));
    let named: u64 = named.map(|sample| sample.count).sum();
    assert!(named * 100 >= profile.count() * 95, "{named} of {}", profile.count());
}

/// Debian's nginx has no symbols: its functions and those of libz are one row each.
#[test]
fn workers_of_nginx_are_followed_from_their_master() {
    if !privileged() {
        return;
    }
    let Some(nginx) = of_debian("bookworm", "nginx") else { return };
    let nginx = Nginx::start(nginx);
    let (pid, cache) = (format!("--pid={}", nginx.master()), tempfile::tempdir().unwrap());
    // Tables are made meanwhile.
    whole::recorded(&[&pid, "--follow", "--duration=1s"], cache.path());
    let (report, profile) = whole::recorded(&[&pid, "--follow", "--duration=4s"], cache.path());
    let found = by_pid(&profile);
    assert!(found.values().filter(|&&count| count > 30).count() >= 2, "{found:?}");
    assert!(whole::complete(&report) >= 99.0, "{report}");
    let mut compressed = BTreeMap::<&str, u64>::new();
    let mut files = BTreeSet::new();
    for sample in &profile.samples {
        let file = profile.file_of(sample.locations[0]);
        if file.contains("libz") {
            files.insert(file);
            *compressed.entry(profile.functions(sample)[0]).or_default() += sample.count;
        }
    }
    let count: u64 = compressed.values().sum();
    assert!(count * 4 > profile.count(), "{count} of {} in libz", profile.count());
    // How many functions of libz a few seconds meet differs: each must be one, not a place in one.
    let libz = files.first().unwrap();
    let unnamed = compressed.keys().filter_map(|name| name.split_once("+0x"));
    let unnamed: BTreeSet<u64> =
        unnamed.map(|(_, start)| u64::from_str_radix(start, 16).unwrap()).collect();
    let starts = function_starts(libz);
    assert!(!unnamed.is_empty() && unnamed.is_subset(&starts), "{compressed:?}");
}

/// Where functions begin, as `readelf` reads `.eh_frame`.
fn function_starts(file: &str) -> BTreeSet<u64> {
    let output =
        Command::new("readelf").args(["-W", "--debug-dump=frames", file]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let starts = text.lines().filter_map(|line| line.split_once(" pc=")?.1.split_once(".."));
    starts.map(|(start, _)| u64::from_str_radix(start, 16).unwrap()).collect()
}

/// As in a container without CAP_SYSLOG: where the kernel's functions are may not be told, nor that
/// they are of no process.
#[test]
fn a_kernel_whose_symbols_are_hidden_is_one_row() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let hidden = "mount --bind /dev/null /proc/kallsyms && exec \"$@\"";
    let mut record = Command::new("unshare");
    record.args(["-m", "sh", "-c", hidden, "sh"]).arg(binary("stackwire"));
    record.args([
        "record",
        "--sample-rate=997",
        "--profile-output=x.pb.gz",
        "--capture=x.stackwire",
        "--perf-data-output=x.data",
    ]);
    record.args(["--", "dd", "if=/dev/zero", "of=/dev/null", "bs=64", "count=3000000"]);
    let said = Ran::of(record.current_dir(&directory)).succeeded().stderr;
    let profile = Pprof::read(&directory.path().join("x.pb.gz"));
    let leaves = profile.samples.iter().map(|it| (profile.file_of(it.locations[0]), it.count));
    let kernel: u64 = leaves.filter(|(file, _)| *file == "[kernel]").map(|(_, count)| count).sum();
    assert!(kernel * 10 > profile.count() * 3, "{kernel} of {}", profile.count());
    let places = profile.locations.keys().filter(|&&id| profile.file_of(id) == "[kernel]");
    assert_eq!(places.count(), 1);
    let capture = directory.path().join("x.stackwire");
    let report = stackwire(["report".as_ref(), capture.as_os_str()]).succeeded().stdout;
    let why = "the collector could not read kallsyms (kernel.kptr_restrict, or no CAP_SYSLOG)";
    assert!(report.contains(why) && !report.contains("[unmapped]"), "{report}");
    assert!(said.contains("of frames named"), "{said}");
    // perf does not name it by its own kernel.
    let script =
        Command::new("perf").args(["script", "-i", "x.data"]).current_dir(&directory).output();
    let script = String::from_utf8(script.unwrap().stdout).unwrap();
    assert!(
        script.contains("ffffffff7000") && !script.contains("_text"),
        "{:?}",
        script.get(..500)
    );
}

#[test]
fn several_processes_and_a_cgroup_are_sampled() {
    if !privileged() {
        return;
    }
    let start = || Running::start(Command::new(build::work()).args(["plain", "30"]));
    let (one, two, other) = (start(), start(), start());
    let two_pid = two.pid().to_string();
    let profile = record(one.pid(), 1, &["--pid", &two_pid]);
    let found: Vec<u32> = by_pid(&profile).into_keys().collect();
    let mut expected = vec![one.pid(), two.pid()];
    expected.sort_unstable();
    assert_eq!(found, expected);

    let hierarchy = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .into_iter()
        .find(|root| Path::new(root).join("cgroup.controllers").exists());
    if !can("cgroup v2 below /sys/fs/cgroup", hierarchy.is_some()) {
        return;
    }
    let cgroup = Path::new(hierarchy.unwrap()).join("stackwire-newcomers");
    std::fs::create_dir_all(&cgroup).unwrap();
    std::fs::write(cgroup.join("cgroup.procs"), other.pid().to_string()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["--cgroup", cgroup.to_str().unwrap(), "--duration=1", "-F", "499"];
    let ran = recorded(directory.path(), &arguments);
    let expected = other.pid();
    drop(other);
    while std::fs::remove_dir(&cgroup).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    ran.succeeded();
    assert_eq!(
        files(directory.path()),
        ["stackwire-newcomers--on-cpu.pb.gz", "stackwire-newcomers--on-cpu.stackwire"]
    );
    let profile = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
    let profile = profile.into_iter().find(|path| path.extension().is_some_and(|it| it == "gz"));
    let profile = Pprof::read(&profile.unwrap());
    assert_eq!(by_pid(&profile).into_keys().collect::<Vec<_>>(), [expected]);
}

#[test]
fn the_exit_status_is_that_of_the_command() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let busy = format!("{} plain 0.3 >/dev/null", build::work().display());
    for (script, code) in
        [("exit 3", 3), ("kill -TERM $$", 143), ("kill -KILL $$", 137), ("exit 0", 0)]
    {
        let whole = format!("{busy}; {script}");
        let ran =
            recorded(at, &["--profile-output=x.pb.gz", "-F", "499", "--", "sh", "-c", &whole]);
        assert_eq!(ran.code, Some(code), "{script}: {}", ran.stderr);
        assert!(ran.stderr.contains("stacks whole"), "{}", ran.stderr);
        assert_eq!(files(at), ["x.pb.gz", "x.stackwire"], "{script}");
        std::fs::remove_file(at.join("x.pb.gz")).unwrap();
        std::fs::remove_file(at.join("x.stackwire")).unwrap();
    }
    // 127 is a status as any other, where the command ran.
    let whole = format!("{busy}; exit 127");
    let ran = recorded(at, &["--no-capture", "--profile-output=x.pb.gz", "--", "sh", "-c", &whole]);
    assert_eq!(ran.code, Some(127), "{}", ran.stderr);
    std::fs::remove_file(at.join("x.pb.gz")).unwrap();
    // Too short to be sampled: nothing is wrong.
    for (script, code) in [("exit 0", 0), ("exit 7", 7)] {
        let ran = recorded(at, &["-F", "1", "--", "sh", "-c", script]);
        assert_eq!(ran.code, Some(code), "{script}: {}", ran.stderr);
        assert!(ran.stderr.contains("used no CPU"), "{}", ran.stderr);
        assert_eq!(files(at), [""; 0], "{script}");
    }
    recorded(at, &["--", "/no/such/program"]).failed(1, "cannot run /no/such/program");
    assert_eq!(files(at), [""; 0]);
}

#[test]
fn the_capture_is_kept_beside_the_profile() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let program = Running::start(Command::new(build::work()).args(["plain", "30"]));
    let pid = program.pid().to_string();
    let common = ["--pid", &pid, "--duration=1", "-F", "499"];
    recorded(at, &common).succeeded();
    assert_eq!(files(at), ["work--on-cpu.pb.gz", "work--on-cpu.stackwire"]);
    let entries = || std::fs::read_dir(at).unwrap().map(|entry| entry.unwrap().path());
    let capture = entries().find(|path| path.extension().is_some_and(|it| it == "stackwire"));
    assert!(crate::support::report(&capture.unwrap()).contains("alpha"));
    entries().for_each(|path| std::fs::remove_file(path).unwrap());
    recorded(at, &[&common[..], &["--no-capture"]].concat()).succeeded();
    assert_eq!(files(at), ["work--on-cpu.pb.gz"]);
    entries().for_each(|path| std::fs::remove_file(path).unwrap());
    // A capture that nobody named replaces none, and goes without it.
    std::fs::write(at.join("host7.stackwire"), "precious").unwrap();
    recorded(at, &[&common[..], &["--profile-output=host7.pb.gz"]].concat()).succeeded();
    assert_eq!(std::fs::read_to_string(at.join("host7.stackwire")).unwrap(), "precious");
    assert_eq!(files(at), ["host-.stackwire", "host.pb.gz", "host.stackwire"]);
    entries().for_each(|path| std::fs::remove_file(path).unwrap());
    // There is nothing beside what is no file.
    for output in ["/dev/null", "-", "/dev/stdout"] {
        recorded(at, &[&common[..], &["--profile-output", output]].concat()).succeeded();
        assert_eq!(files(at), [""; 0], "{output}");
    }
}

#[test]
fn a_function_without_a_name_is_one_row() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(build::stripped_work()).args(["plain", "60"]));
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("x.pb.gz");
    let ran = recorded(
        directory.path(),
        &[
            &format!("--pid={}", program.pid()),
            "--duration=2",
            "-F",
            "997",
            "--profile-output=x.pb.gz",
            "--folded=x.folded",
            // The same build-id as that of `work`, which other tests have put there.
            "--symbol-cache-dir=cache",
        ],
    )
    .succeeded();
    let profile = Pprof::read(&output);
    // Where its symbols say functions begin: in this file addresses are offsets.
    let symbols = run(Command::new("nm").arg(build::work())).0;
    let start = |name: &str| {
        let line = symbols.lines().find(|line| line.ends_with(&format!(" T {name}")));
        let hex = line.unwrap_or_else(|| panic!("{name}")).split(' ').next().unwrap();
        format!("stripped_work+0x{}", hex.trim_start_matches('0'))
    };
    let own = profile.samples.iter().flat_map(|sample| profile.functions(sample));
    let own: BTreeSet<&str> = own.filter(|name| name.starts_with("stripped_work")).collect();
    let expected = ["alpha", "beta", "gamma_", "all", "run", "main"].map(start);
    assert!(expected.iter().all(|name| own.contains(name.as_str())), "{own:?}");
    // `burn`, the beginning of the program, the clock: no address of its own for each sample.
    assert!(own.len() < 12, "{own:?}");
    let folded = std::fs::read_to_string(directory.path().join("x.folded")).unwrap();
    assert!(folded.contains(&format!("{};{}", start("all"), start("alpha"))), "{folded}");
    // And that they have no names is said, with what helps.
    assert!(ran.stderr.contains("of the frames without a name are in"), "{}", ran.stderr);
    assert!(ran.stderr.contains("stripped_work: name a server"), "{}", ran.stderr);
    let mut report = Command::new(binary("stackwire"));
    report.args(["report", "x.stackwire", "--symbol-cache-dir=cache"]).current_dir(&directory);
    let report = Ran::of(&mut report).succeeded().stdout;
    assert!(report.contains("100.0 % missing: no symbol covers it"), "{report}");
}

/// Its innermost function is named, what called it is not there, and all who are asked say why.
#[test]
fn of_a_32_bit_program_frame_pointers_alone_are_followed() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let running = Running(Command::new(build::narrow()).spawn().unwrap());
    let pid = format!("--pid={}", running.pid());
    let recorded = |how: &[&str]| {
        let arguments = ["--profile-output=x.pb.gz", "--duration=1s", &pid];
        let said = recorded(directory.path(), &[&arguments[..], how].concat()).succeeded().stderr;
        (said, Pprof::read(&directory.path().join("x.pb.gz")))
    };
    let share = |profile: &Pprof, function: &str| {
        let is_in = |sample: &&Sample| profile.functions(sample).contains(&function);
        let inside = profile.samples.iter().filter(is_in).map(|sample| sample.count).sum::<u64>();
        inside as f64 / profile.count() as f64
    };
    let sentence = "32-bit process; stacks of 32-bit processes are not walked by tables";
    for source in ["--source=bpf", "--source=perf"] {
        let (said, profile) = recorded(&[source]);
        assert!(said.contains(sentence) && said.contains("--unwind fp"), "{said}");
        assert!(share(&profile, "spins") > 0.9 && share(&profile, "_start") == 0.0, "{source}");
    }
    let (said, profile) = recorded(&["--source=perf", "--unwind=fp"]);
    // `spins` calls nothing and has no frame: who called it is missing.
    assert!(share(&profile, "_start") > 0.9, "{said}");
    let doctor = stackwire(["doctor", &pid]).succeeded().stdout;
    assert!(doctor.contains("as of every 32-bit program"), "{doctor}");
}

#[test]
fn a_program_with_a_build_id_of_two_bytes_is_named_and_whole() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("two-bytes");
    run(Command::new("gcc")
        .args(["-O2", "-g", "-Wl,--build-id=0xabcd"])
        .arg(build::source("unwind.c"))
        .arg("-o")
        .arg(&program));
    // Once met when it starts, and once when it already runs.
    let started = format!("timeout 3 {} sort", program.display());
    let arguments = ["--profile-output=a.pb.gz", "-F", "997", "--", "sh", "-c", &started];
    let ran = recorded(directory.path(), &arguments);
    assert_eq!(ran.code, Some(124), "{}", ran.stderr);
    let running = Running::start(Command::new(&program).arg("sort"));
    let pid = format!("--pid={}", running.pid());
    let arguments = ["--profile-output=b.pb.gz", "-F", "997", "--duration=3s", &pid];
    recorded(directory.path(), &arguments).succeeded();
    for name in ["a", "b"] {
        let capture = directory.path().join(format!("{name}.stackwire"));
        let (samples, share, report) = newborn::whole(&capture, "two-bytes", "1..3");
        assert!(samples > 500 && share >= 99.0, "{samples} samples, {share} % whole:\n{report}");
        let profile = Pprof::read(&directory.path().join(format!("{name}.pb.gz")));
        let counts = profile.samples.iter().map(|sample| {
            let is_named = profile.functions(sample).contains(&"sort");
            if is_named { sample.count } else { 0 }
        });
        let sorting: u64 = counts.sum();
        assert!(sorting * 10 > profile.count() * 9, "{sorting} of {} named", profile.count());
    }
}

#[test]
fn code_of_a_jit_without_a_map_is_one_row_a_mapping() {
    if !privileged() {
        return;
    }
    let mut program = Command::new(build::attack("jit"));
    let mut program = program.arg("fp").spawn().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let ran = recorded(
        directory.path(),
        &[
            &format!("--pid={}", program.id()),
            "--duration=2",
            "-F",
            "997",
            "--profile-output=x.pb.gz",
        ],
    );
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.id())).unwrap();
    program.kill().unwrap();
    program.wait().unwrap();
    let ran = ran.succeeded();
    let place = maps.lines().find(|line| line.contains("rwxp")).unwrap();
    let expected = format!("[jit]+0x{}", place.split('-').next().unwrap());
    let profile = Pprof::read(&directory.path().join("x.pb.gz"));
    let made = profile.samples.iter().flat_map(|sample| profile.functions(sample));
    let made: BTreeSet<&str> = made.filter(|name| name.starts_with("[jit]")).collect();
    assert_eq!(made, BTreeSet::from([expected.as_str()]));
    let said = "made at run time: let its run-time write a perf-map";
    assert!(profile.count() > 500 && ran.stderr.contains(said), "{}", ran.stderr);
}
